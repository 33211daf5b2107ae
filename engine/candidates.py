"""Find the few vocabulary entries that can be drawn when top_k or min_p bounds their number.

The k-th largest block maximum is a safe threshold: k blocks reach it, so at least k entries do, and
the k best entries all lie in blocks that reach it. Only those blocks are read again. A row of fewer
than k blocks is short, and is read by columns instead, the j-th numbers of all blocks: the k-th
largest column maximum is as safe. A candidate is one unsigned integer, order word above token id,
so that plain ascending order is "number descending, id ascending"; the order word has 32 bits
because that holds any FP32 number.
"""

import numpy as np
from numpy.typing import NDArray

from laneway.engine.bf16 import order_key
from laneway.engine.jit import inner
from laneway.engine.masks import reaching
from laneway.engine.vectors import BLOCK, WORD, lowest_bit

CANDIDATES_MAX = 1024
TOP_K_BY_BLOCKS_MAX = 512

_COUNTED_AT_ONCE = 16384
_ONE = np.uint64(1)
_SIGN = np.uint32(0x80000000)
ID_BITS = np.uint64(32)
ID_MASK = np.uint64(0xFFFFFFFF)
_SHELL_GAPS = (86961, 33936, 13776, 4592, 1968, 701, 301, 132, 57, 23, 10, 4, 1)


@inner
def order_word(value: np.float32) -> np.uint32:
    """Return the unsigned integer that falls as the number rises; equal for -0.0 and +0.0."""
    bits = np.float32(value + np.float32(0.0)).view(np.uint32)
    return bits if bits & _SIGN else np.uint32(~(bits | _SIGN))


@inner
def number_of(word: np.uint32) -> float:
    """Return the number that has an order word, exactly."""
    bits = word if word & _SIGN else np.uint32(~word & ~_SIGN)
    return np.float64(np.uint32(bits).view(np.float32))


@inner
def candidate(bits: np.int16, token: int) -> np.uint64:
    """Return the candidate that an entry of a row is, given its BF16 bits and its id."""
    word = order_word(np.uint32(np.uint32(np.uint16(bits)) << np.uint32(16)).view(np.float32))
    return (np.uint64(word) << ID_BITS) | np.uint64(token)


@inner
def kth_block_max(block_max: NDArray[np.int16], k: int, highest: np.int16) -> np.int16:
    """Return the k-th largest block maximum, k within 1 and the number of blocks.

    Shapes: block_max i16[blocks]. Why: some ten counts halve the range of keys down to one, and a
    count is a vector loop over a few kilobytes, whatever k is.
    """
    lowest = highest
    for block in range(block_max.size):
        lowest = min(lowest, block_max[block])
    low = np.int32(lowest)
    high = np.int32(highest)
    while low < high:
        middle = (low + high + 1) >> 1
        if _count_reaching(block_max, np.int16(middle)) >= k:
            low = middle
        else:
            high = middle - 1
    return np.int16(low)


@inner
def kth_column_max(
    row: NDArray[np.int16], k: int, highest: np.int16, candidates: NDArray[np.uint64]
) -> np.int16:
    """Return the k-th largest column maximum, k within 1, BLOCK and the size of the row.

    ``candidates`` is working memory here.
    """
    columns = candidates.view(np.int16)[:BLOCK]
    columns[:] = np.int16(-32768)
    for begin in range(0, row.size, BLOCK):
        block = row[begin : begin + BLOCK]
        for j in range(block.size):
            columns[j] = max(columns[j], order_key(block[j]))
    return kth_block_max(columns, k, highest)


@inner
def _count_reaching(block_max: NDArray[np.int16], key: np.int16) -> int:
    """Return how many block maxima reach a key.

    Why parts: a count of 16 bits fills twice as many lanes of a vector as one of 32 bits.
    """
    reached = 0
    for begin in range(0, block_max.size, _COUNTED_AT_ONCE):
        part = block_max[begin : begin + _COUNTED_AT_ONCE]
        count = np.int16(0)
        for block in range(part.size):
            count = np.int16(count + np.int16(part[block] >= key))
        reached += int(count)
    return reached


@inner
def collect(
    row: NDArray[np.int16],
    block_max: NDArray[np.int16],
    threshold: np.int16,
    candidates: NDArray[np.uint64],
) -> int:
    """Gather all entries at or above a threshold; -1 if there are more than fit.

    Shapes: row i16[vocab], block_max i16[blocks], candidates u64[CANDIDATES_MAX].
    """
    count = 0
    words = -(-row.size // WORD)
    for block in range(block_max.size):
        if block_max[block] < threshold:
            continue
        for word in range(2 * block, min(2 * block + 2, words)):
            mask = reaching(row, word, threshold)
            while mask != 0:
                if count == candidates.size:
                    return -1
                token = word * WORD + lowest_bit(mask)
                candidates[count] = candidate(row[token], token)
                count += 1
                mask &= mask - _ONE
    return count


@inner
def sort_candidates(candidates: NDArray[np.uint64], count: int) -> None:
    """Sort in place: number descending, id ascending.

    Why: Shell's method, since most calls sort twenty to sixty; the large gaps are for a row whose
    touched entries (adjusting.py) are many.
    """
    for gap in _SHELL_GAPS:
        for i in range(gap, count):
            moved = candidates[i]
            place = i
            while place >= gap and candidates[place - gap] > moved:
                candidates[place] = candidates[place - gap]
                place -= gap
            candidates[place] = moved


@inner
def group_candidates(
    candidates: NDArray[np.uint64],
    count: int,
    values: NDArray[np.float64],
    sizes: NDArray[np.int64],
) -> int:
    """Form groups of equal numbers from sorted candidates; return how many.

    Shapes: values f64[groups], sizes i64[groups].
    """
    groups = 0
    last = np.uint64(0)
    for i in range(count):
        word = candidates[i] >> ID_BITS
        if groups > 0 and word == last:
            sizes[groups - 1] += 1
            continue
        values[groups] = number_of(np.uint32(word))
        sizes[groups] = 1
        groups += 1
        last = word
    return groups
