"""Find numbers of a row 64 at a time, as the bits of a word (vectors.py), to the row's end."""

import numpy as np
from numpy.typing import NDArray

from laneway.engine.bf16 import bits_of, order_key
from laneway.engine.jit import inner, inner_inlined
from laneway.engine.vectors import WORD, count_bits, equal_mask, lowest_bit, reach_mask

_ONE = np.uint64(1)
_NOTHING = np.uint64(0)
_NEGATIVE_ZERO = np.int16(-32768)


@inner_inlined
def reaching(row: NDArray[np.int16], word: int, key: np.int16) -> np.uint64:
    """Return which of the 64 numbers of a word have an order key of at least ``key``.

    Why -1: that is the key of -0.0 in reach_mask, and of nothing else.
    """
    begin = word * WORD
    if begin + WORD > row.size:
        return _reaching_at_end(row, begin, key)
    mask: np.uint64 = reach_mask(row, begin, np.int16(-1) if key == 0 else key)
    return mask


@inner
def _reaching_at_end(row: NDArray[np.int16], begin: int, key: np.int16) -> np.uint64:
    mask = _NOTHING
    for i in range(begin, row.size):
        if order_key(row[i]) >= key:
            mask |= _ONE << np.uint64(i - begin)
    return mask


@inner_inlined
def equal_to(row: NDArray[np.int16], word: int, key: np.int16) -> np.uint64:
    """Return which of the 64 numbers of a word have an order key."""
    begin = word * WORD
    if begin + WORD > row.size:
        return _equal_at_end(row, begin, key)
    mask: np.uint64 = equal_mask(row, begin, np.int16(bits_of(key)))
    if key == 0:
        mask |= equal_mask(row, begin, _NEGATIVE_ZERO)
    return mask


@inner
def _equal_at_end(row: NDArray[np.int16], begin: int, key: np.int16) -> np.uint64:
    mask = _NOTHING
    for i in range(begin, row.size):
        if order_key(row[i]) == key:
            mask |= _ONE << np.uint64(i - begin)
    return mask


@inner
def nth_bit(mask: np.uint64, index: int) -> int:
    """Return the place of the index-th set bit (from 0) of a word that has so many."""
    for _ in range(index):
        mask &= mask - _ONE
    return int(lowest_bit(mask))


@inner
def nth_of_number(
    row: NDArray[np.int16], block_max: NDArray[np.int16], key: np.int16, index: int
) -> int:
    """Return the id of the index-th entry (from 0, by id) that has an order key, -1 if too few.

    Shapes: row i16[vocab], block_max i16[blocks].
    """
    words = -(-row.size // WORD)
    for block in range(block_max.size):
        if block_max[block] < key:
            continue
        for word in range(2 * block, min(2 * block + 2, words)):
            mask = equal_to(row, word, key)
            equal = count_bits(mask)
            if index < equal:
                return word * WORD + nth_bit(mask, index)
            index -= equal
    return -1
