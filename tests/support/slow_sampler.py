"""The sampler as its definition reads: sort everything, add up in float64, draw.

Written to be obviously right and independent of the product: no block bounds, no histograms, the
random number from numpy's own Philox.
"""

import math

import numpy as np
from numpy.typing import NDArray

from laneway.engine.sampling import Sampling

Bits = NDArray[np.uint16]


def to_numbers(bits: Bits) -> NDArray[np.float64]:
    """Widen BF16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def uniform(seed: int, position: int) -> float:
    """The request's random number, from numpy's own Philox."""
    before = [position - 1, 0, 0, 0] if position else [2**64 - 1] * 4
    generator = np.random.Philox(
        counter=np.array(before, np.uint64), key=np.array([seed, 0], np.uint64)
    )
    return int(generator.random_raw()) // 2**11 / 2.0**53


def kept(bits: Bits, sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Sort everything and sum in order; return ids in order and the running mass.

    The first n entries of a tie of weight w have mass n * w, as groups.py defines it: adding w one
    by one rounds otherwise, which shows where top_p falls exactly on a border.
    """
    x = to_numbers(bits)
    order = np.argsort(-x, kind="stable")
    if sampling.temperature < 1e-5:
        return order, np.ones(1)
    x = x[order]
    starts = np.flatnonzero(np.concatenate([[True], x[1:] != x[:-1]]))
    sizes = np.diff(np.append(starts, x.size))
    weights = np.array([math.exp((v - x[0]) / sampling.temperature) for v in x[starts]])
    before = np.concatenate([[0.0], np.cumsum(sizes * weights)[:-1]])
    rank_in_tie = np.arange(x.size) - np.repeat(starts, sizes) + 1
    mass = np.repeat(before, sizes) + rank_in_tie * np.repeat(weights, sizes)
    mass = mass[np.repeat(weights, sizes) >= sampling.min_p]
    if sampling.top_k > 0:
        mass = mass[: sampling.top_k]
    if sampling.top_p < 1.0:
        mass = mass[: np.searchsorted(mass, sampling.top_p * mass[-1], side="left") + 1]
    return order, mass


def drawn(
    order: NDArray[np.int64], mass: NDArray[np.float64], sampling: Sampling, position: int
) -> int:
    """Take the first entry whose running mass passes the random point."""
    assert sampling.seed is not None
    point = uniform(sampling.seed, position) * mass[-1]
    return int(order[np.searchsorted(mass, point, side="right")])


def reference(bits: Bits, sampling: Sampling, position: int) -> int:
    """Return the token that a row of logits gives at an absolute position."""
    return drawn(*kept(bits, sampling), sampling, position)
