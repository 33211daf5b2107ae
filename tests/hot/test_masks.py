"""Block maxima, masks and groups of the upper part, against numpy."""

import numpy as np
import pytest
from numpy.typing import NDArray
from support.random_rows import random_row
from support.slow_sampler import Bits, to_numbers

from laneway.engine import bf16, groups, histogram, masks
from laneway.engine.vectors import BLOCK, WORD

SIZES = [1, 63, 64, 65, 127, 128, 129, 511, 512, 513, 640, 1000, 2113, 5003]


def rows_of(size: int) -> list[Bits]:
    rng = np.random.default_rng(size)
    return [random_row(rng, size) for _ in range(40)]


def as_mask(tests: NDArray[np.bool_]) -> int:
    return sum(1 << int(i) for i in np.flatnonzero(tests))


@pytest.mark.parametrize("size", SIZES)
def test_block_maxima_are_the_largest_keys(size: int) -> None:
    for row in rows_of(size):
        block_max = np.zeros(-(-size // BLOCK), np.int16)
        top_block = bf16.scan_blocks(row.view(np.int16), block_max)
        x = to_numbers(row)
        parts = [x[begin : begin + BLOCK].max() for begin in range(0, size, BLOCK)]
        assert [float(bf16.widen(key)) for key in block_max] == parts
        assert top_block == int(np.argmax(parts))


@pytest.mark.parametrize("size", SIZES)
def test_masks_name_the_numbers_that_pass(size: int) -> None:
    rng = np.random.default_rng(size)
    for row in rows_of(size):
        x = to_numbers(row)
        probes = [*row[rng.integers(0, size, 6)].tolist(), 0x0000, 0x8000, 0x0001, 0x8001]
        for bits in probes:
            probe = np.array([bits], np.uint16)
            key, number = bf16.order_key(probe.view(np.int16)[0]), to_numbers(probe)[0]
            for word in range(-(-size // WORD)):
                part = x[word * WORD : (word + 1) * WORD]
                i16 = row.view(np.int16)
                assert int(masks.reaching(i16, word, np.int16(key))) == as_mask(part >= number)
                assert int(masks.equal_to(i16, word, np.int16(key))) == as_mask(part == number)


@pytest.mark.parametrize("size", SIZES)
def test_the_nth_entry_of_a_number(size: int) -> None:
    for row in rows_of(size):
        i16, x = row.view(np.int16), to_numbers(row)
        block_max = np.zeros(-(-size // BLOCK), np.int16)
        bf16.scan_blocks(i16, block_max)
        for place in {0, size // 2, size - 1}:
            key = np.int16(bf16.order_key(i16[place]))
            ids = np.flatnonzero(x == x[place]).tolist()
            for index in {0, len(ids) // 2, len(ids) - 1}:
                assert masks.nth_of_number(i16, block_max, key, index) == ids[index]
            assert masks.nth_of_number(i16, block_max, key, len(ids)) == -1


@pytest.mark.parametrize("size", SIZES)
def test_groups_down_to_a_threshold_and_counts_left_clear(size: int) -> None:
    rng = np.random.default_rng(size)
    counts = np.zeros(histogram.BINS, np.int32)
    values, sizes = np.zeros(histogram.BINS), np.zeros(histogram.BINS, np.int64)
    for row in rows_of(size):
        i16, x = row.view(np.int16), to_numbers(row)
        block_max = np.zeros(-(-size // BLOCK), np.int16)
        top = block_max[bf16.scan_blocks(i16, block_max)]
        hidden = rng.random(size) < rng.choice([0.0, 0.1, 0.9])
        words = np.array(
            [as_mask(hidden[w * WORD : (w + 1) * WORD]) for w in range(-(-size // WORD))], np.uint64
        )
        place = int(rng.integers(size))
        for threshold, least in ((bf16.order_key(i16[place]), x[place]), (-32768, -np.inf)):
            shown = x[(x >= least) & ~hidden]
            key = np.int16(threshold)
            held, strayed = histogram.count_reaching(i16, block_max, key, words, counts)
            found = histogram.group_counts(counts, top, key, size, values, sizes)
            histogram.clear_counts(counts, top, key, strayed)
            numbers, times = np.unique(shown, return_counts=True)
            assert held == shown.size
            assert values[:found].tolist() == numbers[::-1].tolist()
            assert sizes[:found].tolist() == times[::-1].tolist()
            assert not counts.any()


def test_what_is_settled_without_the_rest_is_what_the_whole_gives() -> None:
    """A prefix of groups and a bound on the rest answer as all groups do, or not at all."""
    rng = np.random.default_rng(4)
    answered = unanswered = 0
    for _ in range(4000):
        count = int(rng.integers(2, 30))
        sizes = rng.integers(1, 9, count)
        weights = np.sort(rng.random(count) ** 6)[::-1].copy()
        weights[0] = 1.0
        kept = int(rng.integers(1, count))
        rest = float((sizes[kept:] * weights[kept:]).sum())
        top_p, u = float(rng.choice([1.0, 0.9, 0.5])), float(rng.random())
        whole = groups.settle(sizes.copy(), weights, count, top_p, u, 0.0)
        for bound in (rest, 2.0 * rest):
            part = groups.settle(sizes.copy(), weights, kept, top_p, u, bound)
            assert part in (whole, (-1, -1))
            answered += part == whole
            unanswered += part == (-1, -1)
    assert answered > 1000 and unanswered > 1000
