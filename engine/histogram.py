"""Group the upper part of a vocabulary, or all of it, by number.

BF16 has fewer than 65,536 numbers, so counting how often each occurs groups and sorts a vocabulary
of any size at once, without a sort. Blocks whose maximum is too low are not read, and of the others
only what reaches the threshold is walked, bit by bit of a mask, unless it is much.
"""

import numpy as np
from numpy.typing import NDArray

from laneway.engine.bf16 import bits_of, widen
from laneway.engine.jit import inner, inner_inlined
from laneway.engine.masks import reaching
from laneway.engine.vectors import WORD, count_bits, four_at, lowest_bit

BINS = 65536
LOWEST_KEY = np.int16(-32768)
"""Below the key of every finite number."""

_NEGATIVE_ZERO = 0x8000
_MANY = 16
"""From so many of 64 on, counting all 64 is faster than walking those that reach."""
_RUN = 64
_ONE = np.uint64(1)
_LOW = np.uint64(0xFFFF)
_SECOND, _THIRD, _FOURTH = np.uint64(16), np.uint64(32), np.uint64(48)


@inner
def count_reaching(
    row: NDArray[np.int16],
    block_max: NDArray[np.int16],
    threshold: np.int16,
    hidden: NDArray[np.uint64],
    counts: NDArray[np.int32],
) -> tuple[int, bool]:
    """Count how often each number that reaches a threshold occurs, by its bits.

    Returns how many entries reach it, and whether numbers below it were counted here and there
    too. Shapes: row i16[vocab], block_max i16[blocks], hidden u64[words] (a bit for each entry that
    does not count), counts i32[BINS], all zero before.
    """
    unsigned = row.view(np.uint16)
    held = 0
    strayed = False
    for block in range(block_max.size):
        if block_max[block] < threshold:
            continue
        for word in range(2 * block, min(2 * block + 2, hidden.size)):
            mask = reaching(row, word, threshold) & ~hidden[word]
            reached = count_bits(mask)
            held += reached
            begin = word * WORD
            if reached >= _MANY:
                _count_all(row, begin, min(begin + WORD, row.size), counts)
                strayed = strayed or reached < WORD
                mask = hidden[word]
                while mask != 0:
                    counts[unsigned[begin + lowest_bit(mask)]] -= 1
                    mask &= mask - _ONE
            while mask != 0:
                counts[unsigned[begin + lowest_bit(mask)]] += 1
                mask &= mask - _ONE
    counts[0] += counts[_NEGATIVE_ZERO]
    counts[_NEGATIVE_ZERO] = 0
    return held, strayed


@inner_inlined
def _count_all(row: NDArray[np.int16], begin: int, end: int, counts: NDArray[np.int32]) -> None:
    """Count how often each number occurs from one place to another.

    Why eight at a time: a load waits for the stores before it that may be to the same address, as
    far as the processor can tell early, so there are two loads of the row for eight stores.
    """
    eights = (end - begin) // 8
    for i in range(begin, begin + 8 * eights, 8):
        first, second = four_at(row, i), four_at(row, i + 4)
        counts[first & _LOW] += 1
        counts[(first >> _SECOND) & _LOW] += 1
        counts[(first >> _THIRD) & _LOW] += 1
        counts[first >> _FOURTH] += 1
        counts[second & _LOW] += 1
        counts[(second >> _SECOND) & _LOW] += 1
        counts[(second >> _THIRD) & _LOW] += 1
        counts[second >> _FOURTH] += 1
    for i in range(begin + 8 * eights, end):
        counts[np.uint16(row[i])] += 1


@inner
def next_counted(counts: NDArray[np.int32], key: int, last: int) -> int:
    """Return the first order key from ``key`` down to ``last`` that was counted, or last - 1.

    Shapes: counts i32[BINS].
    """
    while key >= last:
        bits = np.int64(bits_of(np.int16(key)))
        if counts[bits] != 0:
            return key
        if (key & (_RUN - 1)) == _RUN - 1:
            begin = bits & ~(_RUN - 1)
            seen = np.int32(0)
            for j in range(_RUN):
                seen |= counts[begin + j]
            if seen == 0:
                key -= _RUN
                continue
        key -= 1
    return last - 1


@inner
def group_counts(
    counts: NDArray[np.int32],
    top: np.int16,
    threshold: np.int16,
    wanted: int,
    values: NDArray[np.float64],
    sizes: NDArray[np.int64],
) -> int:
    """Form groups of equal numbers, from the highest key to a threshold or to ``wanted`` entries.

    Shapes: counts i32[BINS], values f64[groups], sizes i64[groups].
    """
    groups = 0
    held = 0
    key = int(top)
    while held < wanted:
        key = next_counted(counts, key, int(threshold))
        if key < threshold:
            break
        size = counts[bits_of(np.int16(key))]
        values[groups] = widen(np.int16(key))
        sizes[groups] = size
        groups += 1
        held += size
        key -= 1
    return groups


@inner
def clear_counts(
    counts: NDArray[np.int32], top: np.int16, threshold: np.int16, strayed: bool
) -> None:
    """Make all counts zero again, given between which order keys they may not be.

    Shapes: counts i32[BINS].
    """
    if strayed:
        counts[:] = 0
        return
    if top >= 0:
        counts[max(np.int64(threshold), 0) : np.int64(top) + 1] = 0
    if threshold < 0:
        first = np.int64(bits_of(min(top, np.int16(-1))))
        counts[first : np.int64(bits_of(threshold)) + 1] = 0
