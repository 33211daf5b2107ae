"""Choose the token of a row some of whose entries were changed by the request's own parameters.

The same three ways as choosing.py, over two parts put in one order: the row without its touched
entries, in BF16, and the touched entries with their FP32 values (adjusting.py). Order, groups,
masses and draw are those of groups.py, so which way is taken never shows in the token.
"""

import math

import numpy as np
from numpy.typing import NDArray

from laneway.engine.adjusting import ABSENT_KEY, ABSENT_WORD, Touched, bit_of
from laneway.engine.bf16 import bits_of, first_block, key_below, order_key, widen
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
from laneway.engine.choosing import UPPER_PART, place_of, upper_part
from laneway.engine.groups import settle, weigh
from laneway.engine.histogram import (
    LOWEST_KEY,
    clear_counts,
    count_reaching,
    next_counted,
)
from laneway.engine.jit import inner
from laneway.engine.masks import equal_to, nth_bit, reaching
from laneway.engine.scratch import Scratch
from laneway.engine.vectors import WORD, count_bits, lowest_bit

_LAST_WORD = np.int64(0x7FFFFFFF)
_NO_CANDIDATE = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE = np.uint64(1)


@inner
def best_key(block_max: NDArray[np.int16]) -> np.int16:
    """Return the largest block maximum."""
    best = ABSENT_KEY
    for block in range(block_max.size):
        best = max(best, block_max[block])
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
    key = best_key(block_max)
    if key != ABSENT_KEY:
        word = 2 * first_block(block_max, key)
        mask = equal_to(row, word, key) & ~touched.bits[word]
        if mask == 0:
            word += 1
            mask = equal_to(row, word, key) & ~touched.bits[word]
        token = word * WORD + lowest_bit(mask)
        best = min(best, candidate(row[token], token))
    return int(np.int64(best & ID_MASK))


@inner
def choose_merged(
    row: NDArray[np.int16],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    u: float,
    touched: Touched,
    count: int,
    left: int,
    restricted: bool,
    scratch: Scratch,
) -> int:
    """Return the token that the uniform number u selects; something must be left to select.

    Shapes: row i16[vocab]; the block maxima are those without touched entries.
    """
    block_max = scratch.block_max
    values, sizes, weights = scratch.values, scratch.sizes, scratch.weights
    total = left if restricted else row.size - count + left
    wanted = total if top_k <= 0 else min(top_k, total)
    top = best_key(block_max)
    highest = -np.inf
    if left > 0:
        highest = number_of(np.uint32(best_entry(touched, left) >> ID_BITS))
    if top != ABSENT_KEY:
        highest = max(highest, widen(top))
    by_blocks = wanted <= min(TOP_K_BY_BLOCKS_MAX, block_max.size)
    if top == ABSENT_KEY or by_blocks or min_p >= UPPER_PART:
        threshold = ABSENT_KEY
        if top != ABSENT_KEY and by_blocks:
            threshold = kth_block_max(block_max, wanted, top)
        elif top != ABSENT_KEY:
            threshold = key_below(highest, -temperature * math.log(min_p))
        found = _collect(row, block_max, threshold, touched, left, scratch.candidates)
        if found > 0:
            sort_candidates(scratch.candidates, found)
            groups = group_candidates(scratch.candidates, found, values, sizes)
            groups = weigh(values, sizes, weights, groups, temperature, min_p, wanted)
            group, index = settle(sizes, weights, groups, top_p, u, 0.0)
            return int(np.int64(scratch.candidates[place_of(sizes, group, index)] & ID_MASK))
    sort_candidates(touched.entries, left)
    threshold, rest = upper_part(highest, row.size, temperature, min_p)
    while True:
        groups, held = _group_both(row, top, threshold, touched, left, wanted, scratch)
        groups = weigh(values, sizes, weights, groups, temperature, min_p, wanted)
        if held >= wanted:
            rest = 0.0
        group, index = settle(sizes, weights, groups, top_p, u, rest)
        if group >= 0:
            break
        threshold, rest = LOWEST_KEY, 0.0
    return _nth_of_number(row, block_max, touched, left, np.float32(values[group]), index)


@inner
def last_word(threshold: np.int16) -> np.int64:
    """Return the last order word that belongs to what reaches a threshold.

    Why: an order word is 2^31 - 1 less the FP32 order key, whose upper half is the BF16 order key.
    So touched entries are taken down to just above the next lower BF16 number, and what is taken is
    the upper part of the common order.
    """
    return _LAST_WORD - (np.int64(threshold) << 16)


@inner
def _collect(
    row: NDArray[np.int16],
    block_max: NDArray[np.int16],
    threshold: np.int16,
    touched: Touched,
    left: int,
    candidates: NDArray[np.uint64],
) -> int:
    """Gather everything of both parts that reaches a threshold; -1 if there is more than fits."""
    count = 0
    last = last_word(threshold)
    for i in range(left):
        if np.int64(touched.entries[i] >> ID_BITS) <= last:
            if count == candidates.size:
                return -1
            candidates[count] = touched.entries[i]
            count += 1
    for block in range(block_max.size):
        if block_max[block] < threshold or block_max[block] == ABSENT_KEY:
            continue
        for word in range(2 * block, min(2 * block + 2, touched.bits.size)):
            mask = reaching(row, word, threshold) & ~touched.bits[word]
            while mask != 0:
                if count == candidates.size:
                    return -1
                token = word * WORD + lowest_bit(mask)
                candidates[count] = candidate(row[token], token)
                count += 1
                mask &= mask - _ONE
    return count


@inner
def _group_both(
    row: NDArray[np.int16],
    top: np.int16,
    threshold: np.int16,
    touched: Touched,
    left: int,
    wanted: int,
    scratch: Scratch,
) -> tuple[int, int]:
    """Form groups of what reaches a threshold in both parts, until they hold ``wanted`` entries.

    Returns how many groups there are, and how many entries they hold. The entries are sorted.
    """
    entries, counts = touched.entries, scratch.counts
    values, sizes = scratch.values, scratch.sizes
    strayed = False
    if top != ABSENT_KEY:
        _, strayed = count_reaching(row, scratch.block_max, threshold, touched.bits, counts)
    last = last_word(threshold)
    groups = 0
    held = 0
    place = 0
    key = int(top)
    while held < wanted:
        row_word = ABSENT_WORD
        if top != ABSENT_KEY:
            key = next_counted(counts, key, int(threshold))
            if key >= threshold:
                row_word = order_word(np.float32(widen(np.int16(key))))
        own_word = ABSENT_WORD
        if place < left and np.int64(entries[place] >> ID_BITS) <= last:
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
    if top != ABSENT_KEY:
        clear_counts(counts, top, threshold, strayed)
    return groups, held


@inner
def _nth_of_number(
    row: NDArray[np.int16],
    block_max: NDArray[np.int16],
    touched: Touched,
    left: int,
    number: np.float32,
    index: int,
) -> int:
    """Return the id of the index-th entry (from 0, by id) of both parts that has a number.

    The entries are sorted. Why the mask: ids of both parts that lie in one word are put in order by
    being bits of it.
    """
    word_of_number = order_word(number)
    place = 0
    while place < left and np.uint32(touched.entries[place] >> ID_BITS) < word_of_number:
        place += 1
    bits = np.float32(number).view(np.int32)
    in_row = bits & 0xFFFF == 0
    key = order_key(np.int16(bits >> 16))
    for word in range(touched.bits.size):
        mask = np.uint64(0)
        if in_row and block_max[word // 2] >= key and block_max[word // 2] != ABSENT_KEY:
            mask = equal_to(row, word, key) & ~touched.bits[word]
        while place < left and np.uint32(touched.entries[place] >> ID_BITS) == word_of_number:
            token = int(np.int64(touched.entries[place] & ID_MASK))
            if token // WORD != word:
                break
            mask |= bit_of(token)
            place += 1
        equal = count_bits(mask)
        if index < equal:
            return word * WORD + nth_bit(mask, index)
        index -= equal
    return -1
