"""Choose the token of a row some of whose entries were changed by the request's own parameters.

The same three ways as choosing.py, over two parts put in one order: the row without its touched
entries, in BF16, and the touched entries with their FP32 values (adjusting.py). Order, groups,
masses and draw are those of groups.py, so which way is taken never shows in the token.
"""

import math

import numpy as np
from numpy.typing import NDArray

from laneway.engine.adjusting import ABSENT_KEY, ABSENT_WORD, Touched
from laneway.engine.bf16 import BLOCK, bits_of, key_below, order_key, widen
from laneway.engine.bounds import mass_bounds, read_from
from laneway.engine.candidates import (
    ID_BITS,
    ID_MASK,
    TOP_K_BY_BLOCKS_MAX,
    candidate,
    group_candidates,
    kth_block_max,
    number_of,
    order_word,
    sort_candidates,
)
from laneway.engine.choosing import UPPER_PART, pick_complete, pick_upper
from laneway.engine.groups import cut_top_p, pick, total_mass, weigh
from laneway.engine.histogram import count_numbers
from laneway.engine.jit import inner

_LAST_WORD = np.int64(0x7FFFFFFF)
_NO_CANDIDATE = np.uint64(0xFFFFFFFFFFFFFFFF)
_NEGATIVE_ZERO = np.uint16(0x8000)
_SHIFT_MAX = 300.0
_SUM_ERROR = 1e-9


@inner
def best_block(block_max: NDArray[np.int16]) -> int:
    """Return the first block with the largest maximum."""
    best = 0
    for block in range(block_max.size):
        if block_max[block] > block_max[best]:
            best = block
    return best


@inner
def best_entry(touched: Touched, left: int) -> np.uint64:
    """Return the first candidate, in order, of the touched entries."""
    best = _NO_CANDIDATE
    for i in range(left):
        best = min(best, touched.entries[i])
    return best


@inner
def choose_greedy(
    row: NDArray[np.int16], block_max: NDArray[np.int16], touched: Touched, left: int
) -> int:
    """Return the lowest id among the highest entries of both parts, of which there is one."""
    best = best_entry(touched, left)
    block = best_block(block_max)
    for i in range(block * BLOCK, min((block + 1) * BLOCK, row.size)):
        if block_max[block] == ABSENT_KEY:
            break
        if touched.marks[i] == 0 and order_key(row[i]) == block_max[block]:
            best = min(best, candidate(row[i], i))
            break
    return int(best & ID_MASK)


@inner
def choose_merged(
    row: NDArray[np.int16],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    u: float,
    raw_highest: float,
    block_max: NDArray[np.int16],
    touched: Touched,
    count: int,
    left: int,
    restricted: bool,
    candidates: NDArray[np.uint64],
    counts: NDArray[np.int32],
    values: NDArray[np.float64],
    sizes: NDArray[np.int64],
    weights: NDArray[np.float64],
    lanes: NDArray[np.float32],
) -> int:
    """Return the token that the uniform number u selects; something must be left to select.

    Shapes: row i16[vocab], block_max i16[blocks] without touched entries; the scratch arrays as
    SamplerScratch has them. ``raw_highest``: highest number of the row as the device wrote it.
    """
    total = left if restricted else row.size - count + left
    wanted = total if top_k <= 0 else min(top_k, total)
    base_key = block_max[best_block(block_max)]
    highest = -np.inf
    if left > 0:
        highest = number_of(np.uint32(best_entry(touched, left) >> ID_BITS))
    if base_key != ABSENT_KEY:
        highest = max(highest, widen(base_key))
    if base_key == ABSENT_KEY:
        threshold = ABSENT_KEY
    elif wanted <= min(TOP_K_BY_BLOCKS_MAX, block_max.size):
        threshold = kth_block_max(block_max, wanted, base_key)
    else:
        threshold = key_below(highest, -temperature * math.log(max(min_p, UPPER_PART)))
    found = _collect(row, block_max, threshold, touched, left, candidates)
    if found > 0:
        sort_candidates(candidates, found)
        groups = group_candidates(candidates, found, values, sizes)
        groups = weigh(values, sizes, weights, groups, temperature, min_p, wanted)
        place = -1
        if found >= wanted or min_p >= UPPER_PART:
            place = pick_complete(sizes, weights, groups, top_p, u)
        elif wanted == total and min_p == 0.0:
            low, high = _mass_bounds(
                row, block_max, raw_highest, highest, temperature, touched, count, left, lanes
            )
            place = pick_upper(sizes, weights, groups, top_p, u, low, high)
        if place >= 0:
            return int(candidates[place] & ID_MASK)
    if base_key != ABSENT_KEY:
        _count_untouched(row, touched, count, counts)
    sort_candidates(touched.entries, left)
    groups = _group_both(counts, base_key, touched.entries, left, wanted, values, sizes)
    groups = weigh(values, sizes, weights, groups, temperature, min_p, wanted)
    mass = total_mass(sizes, weights, groups)
    if top_p < 1.0:
        groups, mass = cut_top_p(sizes, weights, groups, top_p * mass)
    group, index = pick(sizes, weights, groups, u * mass)
    word = order_word(np.float32(values[group]))
    return _nth_of_word(row, touched, base_key != ABSENT_KEY, word, index)


@inner
def _collect(
    row: NDArray[np.int16],
    block_max: NDArray[np.int16],
    threshold: np.int16,
    touched: Touched,
    left: int,
    candidates: NDArray[np.uint64],
) -> int:
    """Gather everything above all that lies below a threshold; -1 if there is more than fits.

    Why the last word: an order word is 2^31 - 1 less the FP32 order key, whose upper half is the
    BF16 order key. So touched entries are taken down to just above the next lower BF16 number, and
    what is gathered is the upper part of the common order.
    """
    count = 0
    last = _LAST_WORD - (np.int64(threshold) << 16)
    for i in range(left):
        if np.int64(touched.entries[i] >> ID_BITS) <= last:
            if count == candidates.size:
                return -1
            candidates[count] = touched.entries[i]
            count += 1
    for block in range(block_max.size):
        if block_max[block] < threshold or block_max[block] == ABSENT_KEY:
            continue
        begin = block * BLOCK
        for i in range(begin, min(begin + BLOCK, row.size)):
            if order_key(row[i]) < threshold or touched.marks[i] != 0:
                continue
            if count == candidates.size:
                return -1
            candidates[count] = candidate(row[i], i)
            count += 1
    return count


@inner
def _mass_bounds(
    row: NDArray[np.int16],
    block_max: NDArray[np.int16],
    raw_highest: float,
    highest: float,
    temperature: float,
    touched: Touched,
    count: int,
    left: int,
    lanes: NDArray[np.float32],
) -> tuple[float, float]:
    """Return numbers that the mass of both parts (weight 1 for the highest) lies between.

    The row is estimated as a whole, against its own highest number; what its touched entries put
    into that is taken off again. Returns (0, inf) where the two highest numbers are too far apart.
    """
    shift = (raw_highest - highest) / temperature
    if not abs(shift) <= _SHIFT_MAX:
        return 0.0, np.inf
    low, high = mass_bounds(row, block_max, raw_highest, temperature, lanes)
    threshold = read_from(row.size, raw_highest, temperature)
    whole = row.size // BLOCK
    all_touched = 0.0
    read_touched = 0.0
    for index in range(count):
        token = touched.ids[index]
        weight = math.exp((widen(order_key(row[token])) - raw_highest) / temperature)
        all_touched += weight
        block = token // BLOCK
        if block >= whole or block_max[block] >= threshold:
            read_touched += weight
    scale = math.exp(shift)
    low = max(low - all_touched * (1.0 + _SUM_ERROR), 0.0) * scale
    high = (high - read_touched * (1.0 - _SUM_ERROR)) * scale
    own = 0.0
    for i in range(left):
        word = np.uint32(touched.entries[i] >> ID_BITS)
        own += math.exp((number_of(word) - highest) / temperature)
    return (low + own) * (1.0 - _SUM_ERROR), (high + own) * (1.0 + _SUM_ERROR)


@inner
def _count_untouched(
    row: NDArray[np.int16], touched: Touched, count: int, counts: NDArray[np.int32]
) -> None:
    """Count how often each number occurs among the entries that are not touched."""
    count_numbers(row, counts)
    for index in range(count):
        bits = np.uint16(row[touched.ids[index]])
        counts[0 if bits == _NEGATIVE_ZERO else bits] -= 1


@inner
def _group_both(
    counts: NDArray[np.int32],
    base_key: np.int16,
    entries: NDArray[np.uint64],
    left: int,
    wanted: int,
    values: NDArray[np.float64],
    sizes: NDArray[np.int64],
) -> int:
    """Form groups of equal numbers of both parts, from the highest, until they hold ``wanted``.

    Leaves all counts zero. Shapes: counts i32[BINS], entries u64[left] sorted, values f64[groups],
    sizes i64[groups].
    """
    groups = 0
    held = 0
    place = 0
    key = np.int32(base_key)
    while held < wanted:
        while key > -32768 and counts[bits_of(np.int16(key))] == 0:
            key -= 1
        row_word = np.uint32(ABSENT_WORD)
        if key > -32768:
            row_word = order_word(np.float32(widen(np.int16(key))))
        own_word = np.uint32(ABSENT_WORD)
        if place < left:
            own_word = np.uint32(entries[place] >> ID_BITS)
        word = min(row_word, own_word)
        if word == ABSENT_WORD:
            break
        size = 0
        if row_word == word:
            size += counts[bits_of(np.int16(key))]
            key -= 1
        while place < left and np.uint32(entries[place] >> ID_BITS) == word:
            size += 1
            place += 1
        values[groups] = number_of(word)
        sizes[groups] = size
        groups += 1
        held += size
    counts[:] = 0
    return groups


@inner
def _nth_of_word(
    row: NDArray[np.int16], touched: Touched, with_row: bool, word: np.uint32, index: int
) -> int:
    """Return the id of the index-th entry (from 0, by id) of both parts that has an order word."""
    for i in range(row.size):
        mark = touched.marks[i]
        if mark > 0:
            equal = touched.words[mark - 1] == word
        else:
            equal = with_row and np.uint32(candidate(row[i], i) >> ID_BITS) == word
        if equal:
            if index == 0:
                return i
            index -= 1
    return -1
