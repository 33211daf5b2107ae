"""Weigh groups of equal numbers, cut them by min_p, top_k and top_p, and pick one entry.

Theory of operation. Entries are ordered by logit descending, id ascending; entries with equal
logits form a group. With T the temperature and m the highest logit, an entry of logit x has weight
exp((x - m) / T) in float64, so the highest has weight 1. The mass of the first n entries of a group
is n times its weight, and masses are summed from group to group in order. Everything below is
defined on these float64 numbers, not on a rounding of them:

- min_p keeps entries of weight at least min_p;
- top_k keeps exactly the first k of the order;
- top_p keeps the shortest prefix of the order whose mass reaches top_p times the mass so far kept;
- the draw takes the first entry at which the running mass exceeds u times the mass kept.

Groups come from a short candidate list, from the upper part of the vocabulary or from all of it;
all give the same numbers, so which way a row takes never shows in its token. The same order holds
for rows without any bound.
"""

import math

import numpy as np
from numpy.typing import NDArray

from laneway.engine.jit import inner

_SUM_ERROR = 1e-9
"""Above what adding up a vocabulary in float64 can lose, relatively."""


@inner
def weigh(
    values: NDArray[np.float64],
    sizes: NDArray[np.int64],
    weights: NDArray[np.float64],
    groups: int,
    temperature: float,
    min_p: float,
    top_k: int,
) -> int:
    """Fill the weights, cut by min_p and top_k; return how many groups are left.

    Shapes: values f64[groups], sizes i64[groups] (the last may shrink), weights f64[groups].
    Why: entries whose weight is zero in float64 can never be drawn, so they are left out too.
    """
    left = top_k
    for group in range(groups):
        weight = math.exp((values[group] - values[0]) / temperature)
        if weight < min_p or weight == 0.0 or left == 0:
            return group
        weights[group] = weight
        sizes[group] = min(sizes[group], left)
        left -= sizes[group]
    return groups


@inner
def total_mass(sizes: NDArray[np.int64], weights: NDArray[np.float64], groups: int) -> float:
    """Sum the mass of all groups in order."""
    mass = 0.0
    for group in range(groups):
        mass += sizes[group] * weights[group]
    return mass


@inner
def entries_to_reach(target: float, before: float, weight: float, size: int) -> int:
    """Return the least n in 1..size with before + n * weight >= target; size if there is none."""
    count = min(max(int((target - before) / weight), 1), size)
    while count > 1 and before + (count - 1) * weight >= target:
        count -= 1
    while count < size and before + count * weight < target:
        count += 1
    return count


@inner
def cut_top_p(
    sizes: NDArray[np.int64], weights: NDArray[np.float64], groups: int, target: float
) -> tuple[int, float]:
    """Keep the shortest prefix whose mass reaches the target; return its groups and its mass.

    Shapes: sizes i64[groups] (the last may shrink), weights f64[groups].
    """
    mass = 0.0
    for group in range(groups):
        after = mass + sizes[group] * weights[group]
        if after >= target:
            sizes[group] = entries_to_reach(target, mass, weights[group], sizes[group])
            return group + 1, mass + sizes[group] * weights[group]
        mass = after
    return groups, mass


@inner
def pick(
    sizes: NDArray[np.int64], weights: NDArray[np.float64], groups: int, point: float
) -> tuple[int, int]:
    """Return (group, index in it) of the first entry at which the running mass exceeds a point."""
    mass = 0.0
    for group in range(groups):
        weight = weights[group]
        after = mass + sizes[group] * weight
        if after > point:
            index = min(max(int((point - mass) / weight), 0), sizes[group] - 1)
            while index > 0 and mass + index * weight > point:
                index -= 1
            while mass + (index + 1) * weight <= point:
                index += 1
            return group, index
        mass = after
    return groups - 1, sizes[groups - 1] - 1


@inner
def settle(
    sizes: NDArray[np.int64],
    weights: NDArray[np.float64],
    groups: int,
    top_p: float,
    u: float,
    rest: float,
) -> tuple[int, int]:
    """Cut by top_p and draw; return (group, index in it) of the entry that u selects.

    ``rest`` bounds the mass of entries that come after all groups and are not in them. Returns
    (-1, -1) if the answer is not the same for every such mass.
    Shapes: sizes i64[groups] (one may shrink), weights f64[groups].
    Why both ends are enough: cut and draw never go up the order as the whole mass grows.
    """
    known = total_mass(sizes, weights, groups)
    if rest == 0.0:
        mass = known
        if top_p < 1.0:
            groups, mass = cut_top_p(sizes, weights, groups, top_p * known)
        return pick(sizes, weights, groups, u * mass)
    most = (known + rest) * (1.0 + _SUM_ERROR)
    if top_p >= 1.0:
        if not u * most < known:
            return -1, -1
        first = pick(sizes, weights, groups, u * known)
        last = pick(sizes, weights, groups, u * most)
        return last if first == last else (-1, -1)
    if not top_p * most <= known:
        return -1, -1
    longest, mass = cut_top_p(sizes, weights, groups, top_p * most)
    size = sizes[longest - 1]
    shortest, mass = cut_top_p(sizes, weights, longest, top_p * known)
    if shortest != longest or sizes[longest - 1] != size:
        return -1, -1
    return pick(sizes, weights, longest, u * mass)
