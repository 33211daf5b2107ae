"""Log-probabilities of a row as the device wrote it, before anything is adjusted.

The log-sum-exp runs over the whole vocabulary in float64. The exponential is a polynomial that
vectors can compute, with the same result on every processor; its relative error is below 1e-11.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from laneway.engine.bf16 import BLOCK, key_below, order_key, scan_blocks, widen
from laneway.engine.jit import entry, inner
from laneway.engine.sampling import LOGPROBS_MAX

_LOG2_E = math.log2(math.e)
_UNREAD = 40.0
"""Blocks that hold less than e^-40 of the highest entry together are left out."""
_LOWEST_POWER = -1000.0
_ROUNDER = 1.5 * 2.0**52
_SHIFT = np.uint32(16)
_MANTISSA_BITS = np.uint64(52)
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9 = (
    math.log(2.0) ** n / math.factorial(n) for n in range(10)
)


class Logprobs(NamedTuple):
    """Log-probabilities asked for, by row: the token's own first, then the most likely in order.

    Shapes: ids i32[rows, LOGPROBS_MAX + 1], values f64[rows, LOGPROBS_MAX + 1], lengths i64[rows].
    """

    ids: NDArray[np.int32]
    values: NDArray[np.float64]
    lengths: NDArray[np.int64]

    def of_row(self, row: int) -> tuple[tuple[int, float], ...]:
        """Return the pairs (token, log-probability) of one row."""
        length = int(self.lengths[row])
        return tuple(
            zip(self.ids[row, :length].tolist(), self.values[row, :length].tolist(), strict=True)
        )


def allocate_logprobs(rows: int) -> Logprobs:
    """Make room for the log-probabilities of a number of rows."""
    return Logprobs(
        ids=np.zeros((rows, LOGPROBS_MAX + 1), np.int32),
        values=np.zeros((rows, LOGPROBS_MAX + 1), np.float64),
        lengths=np.zeros(rows, np.int64),
    )


@inner
def log_sum_exp(
    row: NDArray[np.int16],
    block_max: NDArray[np.int16],
    highest: float,
    lanes: NDArray[np.float64],
) -> float:
    """Return the logarithm of the sum of exp over a row whose highest number is given.

    Shapes: row i16[vocab], block_max i16[blocks], lanes f64[BLOCK], overwritten.
    Why lanes: as in bounds.py, one sum for each column of the blocks uses vectors as it stands.
    """
    unsigned = row.view(np.uint16)
    threshold = key_below(highest, _UNREAD + math.log(row.size))
    lanes[:] = 0.0
    full = row.size // BLOCK
    for block in range(full):
        if block_max[block] >= threshold:
            for j in range(BLOCK):
                lanes[j] += _exp_below(unsigned[block * BLOCK + j], highest)
    mass = 0.0
    for j in range(BLOCK):
        mass += lanes[j]
    for i in range(full * BLOCK, row.size):
        mass += _exp_below(unsigned[i], highest)
    return highest + math.log(mass)


@inner
def _exp_below(bits: np.uint16, highest: float) -> float:
    """Return exp(x - highest) of one number that is at most the highest."""
    x = np.float64(np.uint32(np.uint32(bits) << _SHIFT).view(np.float32))
    y = max((x - highest) * _LOG2_E, _LOWEST_POWER)
    rounded = np.float64(y + _ROUNDER)
    f = np.float64(y - (rounded - _ROUNDER))
    f2 = f * f
    low = (_C0 + _C1 * f) + f2 * (_C2 + _C3 * f)
    high = (_C4 + _C5 * f) + f2 * (_C6 + _C7 * f) + f2 * f2 * (_C8 + _C9 * f)
    p = np.float64(low + f2 * f2 * high)
    return np.uint64(p.view(np.uint64) + (rounded.view(np.uint64) << _MANTISSA_BITS)).view(
        np.float64
    )


@inner
def fill_most_likely(
    row: NDArray[np.int16],
    block_max: NDArray[np.int16],
    wanted: int,
    log_mass: float,
    ids: NDArray[np.int32],
    values: NDArray[np.float64],
) -> int:
    """Fill places 1 to ``wanted`` with the most likely entries in order; return how many.

    Shapes: row i16[vocab], block_max i16[blocks], ids i32[wanted + 1], values f64[wanted + 1].
    Why insertion: after the first blocks a block's maximum shows that nothing of it comes in.
    """
    held = 0
    for block in range(block_max.size):
        if held == wanted and (wanted == 0 or widen(block_max[block]) <= values[held]):
            continue
        for i in range(block * BLOCK, min((block + 1) * BLOCK, row.size)):
            x = widen(order_key(row[i]))
            if held == wanted and x <= values[held]:
                continue
            held = min(held + 1, wanted)
            place = held
            while place > 1 and values[place - 1] < x:
                values[place] = values[place - 1]
                ids[place] = ids[place - 1]
                place -= 1
            values[place] = x
            ids[place] = i
    for place in range(1, held + 1):
        values[place] -= log_mass
    return held


@entry
def tell_logprobs(
    logits: NDArray[np.int16],
    asked: NDArray[np.int64],
    tokens: NDArray[np.int32],
    block_max: NDArray[np.int16],
    lanes: NDArray[np.float64],
    told: Logprobs,
) -> None:
    """Fill the log-probabilities of every row that has a token and asks for some.

    Shapes: logits i16[rows, vocab] (BF16 bits, finite where there is a token), asked i64[rows] (-1
    or how many of the most likely), tokens i32[rows].
    Why a kernel of its own: few rows ask, and inside the sampler the sum would not use vectors.
    """
    for r in range(logits.shape[0]):
        told.lengths[r] = 0
        if asked[r] < 0 or tokens[r] < 0:
            continue
        row = logits[r]
        highest = widen(block_max[scan_blocks(row, block_max)])
        log_mass = log_sum_exp(row, block_max, highest, lanes)
        most = min(asked[r], row.size)
        held = fill_most_likely(row, block_max, most, log_mass, told.ids[r], told.values[r])
        told.ids[r, 0] = tokens[r]
        told.values[r, 0] = widen(order_key(row[tokens[r]])) - log_mass
        told.lengths[r] = held + 1
