"""Choose the token of one row: narrow, weigh, cut, pick (groups.py says what is computed).

Three ways, tried from cheap to dear; all give the same token.

1. Candidates that are complete: top_k or min_p bounds them, and the block maxima find them.
2. Candidates that are the upper part of an unbounded row: a bound on the mass of the whole row
   shows that the rest cannot change the answer.
3. The histogram of the whole row.
"""

import math

import numpy as np
from numpy.typing import NDArray

from laneway.engine.bf16 import key_below, order_key, widen
from laneway.engine.bounds import mass_bounds
from laneway.engine.candidates import (
    ID_MASK,
    TOP_K_BY_BLOCKS_MAX,
    collect,
    group_candidates,
    kth_block_max,
    sort_candidates,
)
from laneway.engine.groups import cut_top_p, pick, total_mass, weigh
from laneway.engine.histogram import count_numbers, group_counts, nth_of_number
from laneway.engine.jit import inner

UPPER_PART = math.exp(-10.0)
"""Weight down to which an unbounded row's candidates are gathered (way 2)."""


@inner
def choose(
    row: NDArray[np.int16],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    u: float,
    top_block: int,
    block_max: NDArray[np.int16],
    candidates: NDArray[np.uint64],
    counts: NDArray[np.int32],
    values: NDArray[np.float64],
    sizes: NDArray[np.int64],
    weights: NDArray[np.float64],
    lanes: NDArray[np.float32],
) -> int:
    """Return the token that the uniform number u selects.

    Shapes: row i16[vocab]; the scratch arrays as SamplerScratch has them.
    """
    wanted = row.size if top_k <= 0 else min(top_k, row.size)
    highest = widen(block_max[top_block])
    if wanted <= min(TOP_K_BY_BLOCKS_MAX, block_max.size):
        threshold = kth_block_max(block_max, wanted, block_max[top_block])
    else:
        threshold = key_below(highest, -temperature * math.log(max(min_p, UPPER_PART)))
    count = collect(row, block_max, threshold, candidates)
    if count > 0:
        sort_candidates(candidates, count)
        groups = group_candidates(candidates, count, values, sizes)
        left = weigh(values, sizes, weights, groups, temperature, min_p, wanted)
        place = -1
        if count >= wanted or min_p >= UPPER_PART:
            place = pick_complete(sizes, weights, left, top_p, u)
        elif wanted == row.size and min_p == 0.0:
            low, high = mass_bounds(row, block_max, highest, temperature, lanes)
            place = pick_upper(sizes, weights, left, top_p, u, low, high)
        if place >= 0:
            return int(candidates[place] & ID_MASK)
    count_numbers(row, counts)
    groups = group_counts(counts, block_max[top_block], wanted, values, sizes)
    groups = weigh(values, sizes, weights, groups, temperature, min_p, wanted)
    mass = total_mass(sizes, weights, groups)
    if top_p < 1.0:
        groups, mass = cut_top_p(sizes, weights, groups, top_p * mass)
    group, index = pick(sizes, weights, groups, u * mass)
    key = order_key(np.int16(np.float32(values[group]).view(np.int32) >> 16))
    return nth_of_number(row, block_max, key, index)


@inner
def pick_complete(
    sizes: NDArray[np.int64], weights: NDArray[np.float64], groups: int, top_p: float, u: float
) -> int:
    """Return the place, in order, of the entry drawn from groups that hold every candidate."""
    mass = total_mass(sizes, weights, groups)
    if top_p < 1.0:
        groups, mass = cut_top_p(sizes, weights, groups, top_p * mass)
    group, index = pick(sizes, weights, groups, u * mass)
    return _place(sizes, group, index)


@inner
def pick_upper(
    sizes: NDArray[np.int64],
    weights: NDArray[np.float64],
    groups: int,
    top_p: float,
    u: float,
    low: float,
    high: float,
) -> int:
    """Return the place of the entry drawn if it is the same for any whole mass in low..high.

    Returns -1 if the upper part of the row does not settle it.
    """
    known = total_mass(sizes, weights, groups)
    low = max(low, known)
    if top_p >= 1.0:
        if not u * high < known:
            return -1
        first, first_index = pick(sizes, weights, groups, u * low)
        group, index = pick(sizes, weights, groups, u * high)
        return _place(sizes, group, index) if first == group and first_index == index else -1
    if not top_p * high <= known:
        return -1
    longest, _ = cut_top_p(sizes, weights, groups, top_p * high)
    size = sizes[longest - 1]
    groups, mass = cut_top_p(sizes, weights, longest, top_p * low)
    if groups != longest or sizes[groups - 1] != size:
        return -1
    group, index = pick(sizes, weights, groups, u * mass)
    return _place(sizes, group, index)


@inner
def _place(sizes: NDArray[np.int64], group: int, index: int) -> int:
    """Return how many entries come before one of a group."""
    for earlier in range(group):
        index += sizes[earlier]
    return index
