"""Bound the mass of a whole vocabulary in FP32, fast and safely.

top_p without top_k, and a draw without any bound, need the mass of all entries, yet the answer
usually lies among a few. The mass is therefore estimated in FP32 with vectors, the error of the
estimate is bounded, and the answer is accepted only if it is the same at both ends of the bound.
Otherwise the row is grouped by the histogram, which is exact and slower.
"""

import math

import numpy as np
from numpy.typing import NDArray

from laneway.engine.bf16 import BLOCK, key_below
from laneway.engine.jit import inner, inner_fused

UNREAD_MASS = 1e-3
"""Mass, against 1 for the highest entry, that blocks left unread may hold together."""

_LOG2_E = math.log2(math.e)
_OFFSET_MAX = 1e4
_LOWEST_POWER = np.float32(-126.0)
_ROUNDER = np.float32(1.5 * 2**23)
_SHIFT = np.uint32(16)
_MANTISSA_BITS = np.uint32(23)
_C0, _C1, _C2, _C3, _C4 = (np.float32(math.log(2.0) ** n / math.factorial(n)) for n in range(5))


@inner
def mass_bounds(
    row: NDArray[np.int16],
    block_max: NDArray[np.int16],
    highest: float,
    temperature: float,
    lanes: NDArray[np.float32],
) -> tuple[float, float]:
    """Return numbers that the mass of a row (weight 1 for its highest) lies between.

    Returns (0, inf) where FP32 cannot tell. Shapes: row i16[vocab], block_max i16[blocks], lanes
    f32[BLOCK], overwritten.
    Why this error: with e = 2^-24, an exponent x * scale - offset carries at most
    3 e (|offset| + 126), a lane's sum over the blocks e * blocks, and the polynomial 5e-5 of the
    result; the constants below are above the sum of these.
    """
    scale = _LOG2_E / temperature
    offset = highest * scale
    if not abs(offset) <= _OFFSET_MAX:
        return 0.0, np.inf
    threshold = read_from(row.size, highest, temperature)
    mass = _estimate(
        row.view(np.uint16), block_max, threshold, np.float32(scale), np.float32(offset), lanes
    )
    error = 1.5e-7 * (abs(offset) + 126.0) + 6e-8 * block_max.size + 6e-5
    return mass * (1.0 - error), mass * (1.0 + error) + UNREAD_MASS


@inner
def read_from(size: int, highest: float, temperature: float) -> np.int16:
    """Return the order key that a block must reach to be read for the estimate."""
    return key_below(highest, -temperature * math.log(UNREAD_MASS / size))


@inner_fused
def _estimate(
    unsigned: NDArray[np.uint16],
    block_max: NDArray[np.int16],
    threshold: np.int16,
    scale: np.float32,
    offset: np.float32,
    lanes: NDArray[np.float32],
) -> float:
    """Sum 2^(x * scale - offset) over the blocks that reach a threshold.

    Why lanes: a sum per column of the blocks uses vectors as it stands; one running sum would have
    to be reordered for that.
    """
    lanes[:] = 0.0
    full = unsigned.size // BLOCK
    for block in range(full):
        if block_max[block] >= threshold:
            for j in range(BLOCK):
                lanes[j] += _power_of_two(unsigned[block * BLOCK + j], scale, offset)
    mass = 0.0
    for j in range(BLOCK):
        mass += float(lanes[j])
    for i in range(full * BLOCK, unsigned.size):
        mass += float(_power_of_two(unsigned[i], scale, offset))
    return mass


@inner_fused
def _power_of_two(bits: np.uint16, scale: np.float32, offset: np.float32) -> np.float32:
    """Return 2^(x * scale - offset) of one number; the exponent is at most about zero.

    Why _ROUNDER: conversion to a 64-bit integer, which is what a cast means here, has no vector
    form; adding 1.5 * 2^23 leaves the rounded exponent in the lowest bits. This relies on float
    sums not being reordered.
    """
    x = np.uint32(np.uint32(bits) << _SHIFT).view(np.float32)
    y = np.float32(x * scale - offset)
    y = y if y > _LOWEST_POWER else _LOWEST_POWER
    rounded = np.float32(y + _ROUNDER)
    f = np.float32(y - np.float32(rounded - _ROUNDER))
    p = np.float32(_C0 + f * (_C1 + f * (_C2 + f * (_C3 + f * _C4))))
    power = np.uint32(rounded.view(np.uint32) << _MANTISSA_BITS)
    return np.uint32(p.view(np.uint32) + power).view(np.float32)
