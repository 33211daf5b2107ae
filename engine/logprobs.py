"""Log-probabilities of a row as the device wrote it, before anything is adjusted.

The log-sum-exp runs over the whole vocabulary in float64. BF16 has so few numbers that the
exponential of each is looked up, which is faster than computing it with vectors, and exact to
float64. Log-probabilities differ from those of exact arithmetic by less than 1e-11.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from laneway.engine.bf16 import key_below, order_key, widen
from laneway.engine.jit import inner
from laneway.engine.masks import reaching
from laneway.engine.sampling import LOGPROBS_MAX
from laneway.engine.vectors import BLOCK, WORD, four_at, lowest_bit

_LOOKED_UP_MAX = 600.0
"""Rows whose highest number is within this are looked up: no sum is infinite or without a bit."""
_UNREAD = 40.0
"""Entries that hold less than e^-40 of the highest together are left out of other rows."""
_NUMBERS = 65536
_LOW = np.uint64(0xFFFF)
_ONE = np.uint64(1)
_SECOND, _THIRD, _FOURTH = np.uint64(16), np.uint64(32), np.uint64(48)


class Logprobs(NamedTuple):
    """Log-probabilities asked for, by row: the token's own first, then the most likely in order.

    Shapes: ids i32[rows, LOGPROBS_MAX + 1], values f64[rows, LOGPROBS_MAX + 1], lengths i64[rows].
    """

    ids: NDArray[np.int32]
    values: NDArray[np.float64]
    lengths: NDArray[np.int64]

    def part(self, first: int, end: int) -> "Logprobs":
        """Return the room of some rows, as views."""
        return Logprobs(self.ids[first:end], self.values[first:end], self.lengths[first:end])

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


def exponentials() -> NDArray[np.float64]:
    """Return exp of every BF16 number, by its bits, as far as rows are looked up.

    Shapes: [65536]. What is above is 0 and not asked for; what is far below counts for nothing.
    """
    bits = np.arange(_NUMBERS, dtype=np.uint32)
    table = np.zeros(_NUMBERS)
    with np.errstate(invalid="ignore"):  # some bits are a NaN
        numbers = (bits << 16).view(np.float32).astype(np.float64)
    np.exp(numbers, out=table, where=np.abs(numbers) <= _LOOKED_UP_MAX + 100.0)
    return table


@inner
def log_sum_exp(
    row: NDArray[np.int16],
    block_max: NDArray[np.int16],
    highest: float,
    table: NDArray[np.float64],
) -> float:
    """Return the logarithm of the sum of exp over a row whose highest number is given.

    Shapes: row i16[vocab], block_max i16[blocks], table f64[65536] (exponentials).
    """
    if abs(highest) <= _LOOKED_UP_MAX:
        return math.log(_sum_looked_up(row, table))
    threshold = key_below(highest, _UNREAD + math.log(row.size))
    mass = 0.0
    words = -(-row.size // WORD)
    for block in range(block_max.size):
        if block_max[block] < threshold:
            continue
        for word in range(2 * block, min(2 * block + 2, words)):
            mask = reaching(row, word, threshold)
            while mask != 0:
                x = widen(order_key(row[word * WORD + lowest_bit(mask)]))
                mass += math.exp(x - highest)
                mask &= mask - _ONE
    return highest + math.log(mass)


@inner
def _sum_looked_up(row: NDArray[np.int16], table: NDArray[np.float64]) -> float:
    """Add up the table's entries of all numbers of a row.

    Why four sums and four numbers a load: an addition takes several cycles, and loads are what such
    a loop has too few of.
    """
    a = b = c = d = 0.0
    fours = row.size // 4
    for i in range(fours):
        bits = four_at(row, 4 * i)
        a += table[bits & _LOW]
        b += table[(bits >> _SECOND) & _LOW]
        c += table[(bits >> _THIRD) & _LOW]
        d += table[bits >> _FOURTH]
    for i in range(4 * fours, row.size):
        a += table[np.uint16(row[i])]
    return (a + b) + (c + d)


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


@inner
def tell_most_likely(
    row: NDArray[np.int16],
    block_max: NDArray[np.int16],
    highest: float,
    most: int,
    table: NDArray[np.float64],
    ids: NDArray[np.int32],
    values: NDArray[np.float64],
) -> tuple[float, int]:
    """Fill places 1 and on; return the logarithm of the mass and the number of filled places.

    Shapes: row i16[vocab] (BF16 bits, finite), block_max i16[blocks] (of all entries), ids
    i32[LOGPROBS_MAX + 1], values f64[LOGPROBS_MAX + 1].
    """
    log_mass = log_sum_exp(row, block_max, highest, table)
    held = fill_most_likely(row, block_max, min(most, row.size), log_mass, ids, values)
    return log_mass, held + 1
