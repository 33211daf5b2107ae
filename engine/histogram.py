"""Group a whole vocabulary by number, for rows where nothing bounds the number of candidates.

BF16 has fewer than 65,536 numbers, so counting how often each occurs groups and sorts a vocabulary
of any size at once, without a sort. The token of one member of a group is found by a second read.
"""

import numpy as np
from numpy.typing import NDArray

from laneway.engine.bf16 import BLOCK, bits_of, order_key, widen
from laneway.engine.jit import inner

BINS = 65536

_NEGATIVE_ZERO = 0x8000


@inner
def count_numbers(row: NDArray[np.int16], counts: NDArray[np.int32]) -> None:
    """Count how often each number occurs, by its bits; all counts must be zero before.

    Shapes: row i16[vocab], counts i32[BINS].
    """
    unsigned = row.view(np.uint16)
    for i in range(unsigned.size):
        counts[unsigned[i]] += 1
    counts[0] += counts[_NEGATIVE_ZERO]
    counts[_NEGATIVE_ZERO] = 0


@inner
def group_counts(
    counts: NDArray[np.int32],
    highest: np.int16,
    wanted: int,
    values: NDArray[np.float64],
    sizes: NDArray[np.int64],
) -> int:
    """Form groups of equal numbers, from the highest down until they hold ``wanted`` entries.

    Leaves all counts zero. Shapes: counts i32[BINS], values f64[groups], sizes i64[groups].
    """
    groups = 0
    held = 0
    key = np.int32(highest)
    while held < wanted and key >= -32768:
        size = counts[bits_of(np.int16(key))]
        if size > 0:
            values[groups] = widen(np.int16(key))
            sizes[groups] = size
            groups += 1
            held += size
        key -= 1
    counts[:] = 0
    return groups


@inner
def nth_of_number(
    row: NDArray[np.int16], block_max: NDArray[np.int16], key: np.int16, index: int
) -> int:
    """Return the id of the index-th entry (from 0, by id) that has an order key.

    Shapes: row i16[vocab], block_max i16[blocks].
    """
    for block in range(block_max.size):
        if block_max[block] < key:
            continue
        begin = block * BLOCK
        end = min(begin + BLOCK, row.size)
        equal = 0
        for i in range(begin, end):
            equal += order_key(row[i]) == key
        if index >= equal:
            index -= equal
            continue
        for i in range(begin, end):
            if order_key(row[i]) == key:
                if index == 0:
                    return i
                index -= 1
    return -1
