"""Choose the token of one row: narrow, weigh, cut, pick (groups.py says what is computed).

Three ways, tried from cheap to dear; all give the same token.

1. Candidates, where top_k or min_p bounds them and the block maxima (in a short row, the column
   maxima) find them.
2. The groups of the upper part of the row: what is left out holds so little mass together that in
   nearly every row it cannot change the answer, whatever it is.
3. The groups of the whole row.
"""

import math

import numpy as np
from numpy.typing import NDArray

from laneway.engine.bf16 import key_below, order_key, widen
from laneway.engine.candidates import (
    ID_MASK,
    TOP_K_BY_BLOCKS_MAX,
    collect,
    group_candidates,
    kth_block_max,
    kth_column_max,
    sort_candidates,
)
from laneway.engine.groups import settle, weigh
from laneway.engine.histogram import LOWEST_KEY, clear_counts, count_reaching, group_counts
from laneway.engine.jit import inner
from laneway.engine.masks import nth_of_number
from laneway.engine.scratch import Scratch
from laneway.engine.vectors import BLOCK

UPPER_PART = math.exp(-10.0)
"""Weight down to which candidates are gathered where only min_p bounds them (way 1)."""
UNREAD_MASS = 1e-3
"""Mass, against 1 for the highest entry, that the entries left out may hold together (way 2)."""


@inner
def choose(
    row: NDArray[np.int16],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    u: float,
    top_block: int,
    nothing: NDArray[np.uint64],
    scratch: Scratch,
) -> int:
    """Return the token that the uniform number u selects.

    Shapes: row i16[vocab], nothing u64[words], all zero.
    """
    block_max, counts = scratch.block_max, scratch.counts
    values, sizes, weights = scratch.values, scratch.sizes, scratch.weights
    top = block_max[top_block]
    wanted = row.size if top_k <= 0 else min(top_k, row.size)
    by_blocks = wanted <= min(TOP_K_BY_BLOCKS_MAX, block_max.size)
    by_columns = block_max.size < wanted <= BLOCK
    if by_blocks or by_columns or min_p >= UPPER_PART:
        if by_blocks:
            threshold = kth_block_max(block_max, wanted, top)
        elif by_columns:
            threshold = kth_column_max(row, wanted, top, scratch.candidates)
        else:
            threshold = key_below(widen(top), -temperature * math.log(min_p))
        found = collect(row, block_max, threshold, scratch.candidates)
        if found > 0:
            sort_candidates(scratch.candidates, found)
            groups = group_candidates(scratch.candidates, found, values, sizes)
            groups = weigh(values, sizes, weights, groups, temperature, min_p, wanted)
            group, index = settle(sizes, weights, groups, top_p, u, 0.0)
            return int(np.int64(scratch.candidates[place_of(sizes, group, index)] & ID_MASK))
    threshold, rest = upper_part(widen(top), row.size, temperature, min_p)
    while True:
        held, strayed = count_reaching(row, block_max, threshold, nothing, counts)
        groups = group_counts(counts, top, threshold, wanted, values, sizes)
        clear_counts(counts, top, threshold, strayed)
        groups = weigh(values, sizes, weights, groups, temperature, min_p, wanted)
        if held >= wanted:
            rest = 0.0
        group, index = settle(sizes, weights, groups, top_p, u, rest)
        if group >= 0:
            break
        threshold, rest = LOWEST_KEY, 0.0
    key = order_key(np.int16(np.float32(values[group]).view(np.int32) >> 16))
    return nth_of_number(row, block_max, key, index)


@inner
def upper_part(
    highest: float, size: int, temperature: float, min_p: float
) -> tuple[np.int16, float]:
    """Return the order key that the upper part of a row reaches, and the mass that is left out.

    Why: an entry that does not reach it weighs less than UNREAD_MASS / size, or less than min_p.
    """
    least = UNREAD_MASS / size
    threshold = key_below(highest, -temperature * math.log(max(min_p, least)))
    return threshold, 0.0 if min_p >= least else UNREAD_MASS


@inner
def place_of(sizes: NDArray[np.int64], group: int, index: int) -> int:
    """Return how many entries come before one of a group."""
    for earlier in range(group):
        index += sizes[earlier]
    return index
