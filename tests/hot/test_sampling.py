"""Sampling against a float64 reference that sorts, and its edges."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray
from support.random_rows import (
    FINITE_MAX,
    QWEN3_VOCABULARY,
    peaked,
    random_finite,
    random_row,
    random_sampling,
    to_bits,
)
from support.slow_sampler import Bits, drawn, kept, reference, to_numbers, uniform

from laneway.adapters.sampling_threads import SamplingThreads
from laneway.engine import bf16, groups, logits
from laneway.engine.inputs import NO_TOKEN
from laneway.engine.logprobs import allocate_logprobs
from laneway.engine.sampling import Sampling
from laneway.engine.sampling_arrays import SamplerScratch, SamplingArrays

SPECIAL = {
    bf16.ROW_NAN: [0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFC0, 0xFFFF],
    bf16.ROW_POSITIVE_INFINITY: [0x7F80],
    bf16.ROW_NEGATIVE_INFINITY: [0xFF80],
}


def run(
    rows: Bits, samplings: list[Sampling], positions: list[int]
) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
    count, vocabulary = rows.shape
    arrays = SamplingArrays.allocate(count)
    for i, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        arrays.want_token(i, sampling, position=position)
    tokens, status = np.zeros(count, np.int32), np.zeros(count, np.int8)
    logits.sample_rows(rows, arrays, SamplerScratch.allocate(vocabulary), tokens, status)
    return tokens, status


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (1, 100),
        (2, 400),
        (3, 400),
        (127, 350),
        (128, 350),
        (129, 350),
        (300, 700),
        (1000, 700),
        (1025, 500),
        (2048, 500),
        (5003, 300),
        (40_000, 60),
        (QWEN3_VOCABULARY, 20),
    ],
)
def test_tokens_equal_the_reference(size: int, count: int) -> None:
    check_random_rows(size, size, count)


@pytest.mark.soak
@pytest.mark.parametrize(("size", "count"), [(300, 40_000), (1000, 40_000), (5003, 20_000)])
def test_a_hundred_thousand_tokens_equal_the_reference(size: int, count: int) -> None:
    for part in range(count // 2000):
        check_random_rows(100 + part, size, 2000)


def check_random_rows(seed: int, size: int, count: int) -> None:
    """Hold tokens drawn of random rows against the plain reference."""
    rng = np.random.default_rng(seed)
    rows = np.stack([random_row(rng, size) for _ in range(count)])
    asked = [random_sampling(rng) for _ in range(count)]
    tokens, status = run(rows, [s for s, _ in asked], [p for _, p in asked])
    expected = [reference(row, *ask) for row, ask in zip(rows, asked, strict=True)]
    different = np.flatnonzero(tokens != expected)
    assert not different.size, [(int(i), asked[i], tokens[i], expected[i]) for i in different[:5]]
    assert not status.any()


@pytest.mark.parametrize("kind", ["peaked", "flat", "negative"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.8, top_p=0.95, seed=1),
        Sampling(temperature=1.0, seed=2),
        Sampling(temperature=0.7, top_k=20, top_p=0.95, seed=3),
        Sampling(temperature=0.7, min_p=0.05, seed=4),
        Sampling(temperature=0.3, top_p=0.5, min_p=1e-6, seed=5),
    ],
)
def test_full_vocabulary_rows_equal_the_reference(kind: str, sampling: Sampling) -> None:
    rng = np.random.default_rng(77)
    x = {
        "peaked": peaked(rng, QWEN3_VOCABULARY),
        "flat": rng.normal(0.0, 1.0, QWEN3_VOCABULARY),
        "negative": rng.normal(-20.0, 1.5, QWEN3_VOCABULARY),
    }[kind]
    positions = list(range(24))
    rows = np.tile(to_bits(x), (len(positions), 1))
    tokens, status = run(rows, [sampling] * len(positions), positions)
    order, mass = kept(to_numbers(rows[0]), sampling)
    assert tokens.tolist() == [drawn(order, mass, sampling, p) for p in positions]
    assert not status.any()


def test_hand_computed_draws() -> None:
    """Weights 4, 2, 1, 1 of 8 at temperature 1: the uniform number alone decides."""
    log2 = float(np.log(2.0))
    x = to_bits(np.array([0.0, 2.0, 1.0, 0.0]))
    rows, positions = np.tile(x, (400, 1)), list(range(400))
    sampling = Sampling(temperature=1.0 / log2, seed=9)
    tokens, _ = run(rows, [sampling] * 400, positions)
    for token, position in zip(tokens, positions, strict=True):
        u = uniform(9, position)
        assert token == (1 if u < 0.5 else 2 if u < 0.75 else 0 if u < 0.875 else 3)
    halves = Sampling(temperature=1.0 / log2, top_p=0.74, seed=9)
    tokens, _ = run(rows, [halves] * 400, positions)
    for token, position in zip(tokens, positions, strict=True):
        assert token == (1 if uniform(9, position) * 6.0 < 4.0 else 2)


def test_points_on_a_border_belong_to_the_next_entry() -> None:
    """Two entries of weight 1, then three of 1/2 (mass 3.5), borders hit exactly."""
    sizes, weights = np.array([2, 3]), np.array([1.0, 0.5])
    points = [0.0, 0.999, 1.0, 1.999, 2.0, 2.499, 2.5, 2.999, 3.0, 3.499]
    picked = [groups.pick(sizes, weights, 2, point) for point in points]
    first, second = [(0, i) for i in (0, 0, 1, 1)], [(1, i) for i in (0, 0, 1, 1, 2, 2)]
    assert picked == first + second
    for target, size_of_first, size_of_second, mass in (
        (0.1, 1, 0, 1.0),
        (1.0, 1, 0, 1.0),
        (1.001, 2, 0, 2.0),
        (2.0, 2, 0, 2.0),
        (2.5, 2, 1, 2.5),
        (2.501, 2, 2, 3.0),
        (3.5, 2, 3, 3.5),
    ):
        cut = np.array([2, 3])
        left, kept_mass = groups.cut_top_p(cut, weights, 2, target)
        sizes_left = [*cut[:left].tolist(), 0][:2]
        assert (sizes_left, kept_mass) == ([size_of_first, size_of_second], mass)


def test_counts_in_a_tie_equal_a_search_one_by_one() -> None:
    """Division only guesses the count; targets on and next to every border must not be missed."""
    size = 60
    for before in (0.0, 0.1, 1.0 / 3.0, 7.3, 1e6):
        for weight in (1.0, 0.1, 1.0 / 3.0, 0.7, 1e-9, 3e-12):
            masses = [before + n * weight for n in range(size + 1)]
            targets = [t for m in masses[1:] for t in (m, np.nextafter(m, 0.0))]
            for target in targets:
                least = next(n for n in range(1, size + 1) if masses[n] >= target)
                assert groups.entries_to_reach(target, before, weight, size) == least
                if not before <= target < masses[-1]:
                    continue
                index = next(n for n in range(size) if masses[n + 1] > target)
                sizes, weights = np.array([1, size]), np.array([before, weight])
                assert groups.pick(sizes, weights, 2, target) == (1, index)


def test_top_k_keeps_exactly_k_with_ties_to_the_lowest_ids() -> None:
    x = np.zeros(1000)
    x[[3, 500]] = 1.0
    rows = np.tile(to_bits(x), (600, 1))
    tokens, _ = run(rows, [Sampling(temperature=2.0, top_k=5, seed=1)] * 600, list(range(600)))
    assert set(tokens.tolist()) == {0, 1, 2, 3, 500}


def test_top_p_keeps_exactly_the_prefix_of_a_tie() -> None:
    rows = np.zeros((500, 300), np.uint16)
    tokens, _ = run(rows, [Sampling(top_p=0.01, seed=1)] * 500, list(range(500)))
    assert set(tokens.tolist()) == {0, 1, 2}
    tokens, _ = run(rows, [Sampling(top_p=1e-12, seed=1)] * 500, list(range(500)))
    assert set(tokens.tolist()) == {0}


def test_greedy_ties_and_signed_zeros() -> None:
    rows = np.full((5, 300), 0xC000, np.uint16)
    rows[0, [299, 200]] = 0x8000, 0x0000
    rows[1, [200, 299]] = 0x8000, 0x0000
    rows[2, [40, 41]] = 0x0000, 0x8000
    rows[3, [130, 131, 299]] = 0x3F80
    tokens, status = run(rows, [Sampling(temperature=0.0, seed=0)] * 5, [0] * 5)
    assert tokens.tolist() == [200, 200, 40, 130, 0]
    again, again_status = np.zeros(5, np.int32), np.zeros(5, np.int8)
    logits.argmax_rows(rows, SamplerScratch.allocate(300), again, again_status)
    assert again.tolist() == tokens.tolist()
    assert not status.any() and not again_status.any()


@pytest.mark.parametrize("size", [1, 128, 200, 1000])
@pytest.mark.parametrize("expected", SPECIAL)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_finite_is_never_a_token(size: int, expected: int, temperature: float) -> None:
    rng = np.random.default_rng(size)
    places = sorted({0, size // 2, size - 1})
    cases = [(bits, place) for bits in SPECIAL[expected] for place in places]
    rows = np.stack([random_finite(rng, size) for _ in range(2 * len(cases))])
    for i, (bits, place) in enumerate(cases):
        rows[2 * i, place] = bits
    sampling = Sampling(temperature=temperature, seed=3)
    tokens, status = run(rows, [sampling] * len(rows), [0] * len(rows))
    assert (status[::2] == expected).all() and (tokens[::2] == NO_TOKEN).all()
    assert (status[1::2] == bf16.ROW_OK).all()
    assert tokens[1::2].tolist() == [reference(row, sampling, 0) for row in rows[1::2]]
    scanned = np.full(len(rows), 99, np.int8)
    logits.numeric_scan(rows, SamplerScratch.allocate(size), scanned)
    assert scanned.tolist() == status.tolist()


def test_the_gravest_fault_names_the_row() -> None:
    rows = np.zeros((3, 200), np.uint16)
    rows[0, [5, 9, 180]] = 0xFF80, 0x7F80, 0xFFC0
    rows[1, [5, 9]] = 0xFF80, 0x7F80
    rows[2, :] = 0xFF80
    _, status = run(rows, [Sampling(seed=0)] * 3, [0] * 3)
    assert status.tolist() == [
        bf16.ROW_NAN,
        bf16.ROW_POSITIVE_INFINITY,
        bf16.ROW_NEGATIVE_INFINITY,
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", np.nan),
        ("temperature", np.inf),
        ("temperature", -0.5),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", np.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", np.nan),
        ("position", -1),
    ],
)
def test_impossible_parameters_fail_their_own_row_only(name: str, value: float) -> None:
    rows = np.zeros((2, 200), np.uint16)
    arrays = SamplingArrays.allocate(2)
    for row in range(2):
        arrays.want_token(row, Sampling(seed=1), position=4)
    getattr(arrays, name)[0] = value
    tokens, status = np.zeros(2, np.int32), np.zeros(2, np.int8)
    logits.sample_rows(rows, arrays, SamplerScratch.allocate(200), tokens, status)
    assert status.tolist() == [bf16.ROW_PARAMETERS, bf16.ROW_OK]
    assert tokens.tolist() == [NO_TOKEN, reference(rows[1], Sampling(seed=1), 4)]


def test_a_row_is_read_only_as_far_as_it_is_wanted() -> None:
    rows = np.full((4, 200), 0x7FC0, np.uint16)
    rows[2:] = 0
    arrays = SamplingArrays.allocate(4)
    arrays.want_scan(1)
    arrays.want_scan(2)
    arrays.want_token(3, Sampling(temperature=0.0, seed=0), position=0)
    tokens, status = np.zeros(4, np.int32), np.zeros(4, np.int8)
    scratch = SamplerScratch.allocate(200)
    logits.sample_rows(rows, arrays, scratch, tokens, status)
    assert status.tolist() == [bf16.ROW_OK, bf16.ROW_NAN, bf16.ROW_OK, bf16.ROW_OK]
    assert tokens.tolist() == [-1, -1, -1, 0]
    arrays.want_nothing(1)
    logits.sample_rows(rows, arrays, scratch, tokens, status)
    assert status.tolist() == [bf16.ROW_OK] * 4


def test_tokens_do_not_depend_on_batch_order_scratch_or_thread() -> None:
    rng = np.random.default_rng(21)
    size, count = 3000, 240
    rows = np.stack([random_row(rng, size) for _ in range(count)])
    before = rows.copy()
    asked = [random_sampling(rng) for _ in range(count)]
    together, _ = run(rows, [s for s, _ in asked], [p for _, p in asked])

    def some(order: NDArray[np.int64]) -> NDArray[np.int32]:
        return run(rows[order], [asked[i][0] for i in order], [asked[i][1] for i in order])[0]

    shuffled = rng.permutation(count)
    np.testing.assert_array_equal(some(shuffled), together[shuffled])
    alone = np.concatenate([some(np.array([i])) for i in range(count)])
    np.testing.assert_array_equal(alone, together)
    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(some, np.array_split(np.arange(count), 2)))
    np.testing.assert_array_equal(np.concatenate(halves), together)
    np.testing.assert_array_equal(rows, before)


def test_order_keys_rise_with_the_number() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    bits = bits[(bits & 0x7FFF) <= FINITE_MAX]
    keys = np.array([int(bf16.order_key(b)) for b in bits.view(np.int16)])
    by_key = to_numbers(bits)[np.argsort(keys, kind="stable")]
    assert (np.diff(by_key) >= 0).all()
    assert len(set(keys.tolist())) == len(bits) - 1
    back = np.array([bf16.widen(np.int16(key)) for key in keys])
    np.testing.assert_array_equal(back, to_numbers(bits))


def test_arrays_of_another_form_are_refused() -> None:
    scratch = SamplerScratch.allocate(200)
    good = np.zeros((2, 200), np.uint16)
    arrays = SamplingArrays.allocate(2)
    tokens, status = np.zeros(2, np.int32), np.zeros(2, np.int8)
    bads: list[NDArray[Any]] = [
        good[:, :199],
        good[0],
        good.astype(np.int16),
        np.asfortranarray(good),
    ]
    for bad in bads:
        with pytest.raises(ValueError, match="logits"):
            logits.sample_rows(bad, arrays, scratch, tokens, status)
    with pytest.raises(ValueError, match="tokens"):
        logits.sample_rows(good, arrays, scratch, tokens[:1], status)
    with pytest.raises(ValueError, match="status"):
        logits.sample_rows(good, arrays, scratch, tokens, np.zeros(3, np.int8))
    with pytest.raises(ValueError, match="sampling has 3 rows"):
        logits.sample_rows(good, SamplingArrays.allocate(3), scratch, tokens, status)
    with pytest.raises(ValueError, match="seed"):
        arrays.want_token(0, Sampling(), position=0)
    with pytest.raises(ValueError, match="vocabulary"):
        SamplerScratch.allocate(0)


def test_every_status_has_a_name() -> None:
    statuses = {v for k, v in vars(bf16).items() if k.startswith("ROW_") and isinstance(v, int)}
    assert set(bf16.ROW_STATUS_NAMES) == statuses


def test_one_and_two_threads_give_the_same_tokens() -> None:
    rng = np.random.default_rng(23)
    size = 3000
    for count in (0, 1, 2, 7, 240):
        rows = np.array([random_row(rng, size) for _ in range(count)], np.uint16)
        rows = rows.reshape(count, size)
        arrays = SamplingArrays.allocate(count)
        for row in range(count):
            sampling, position = random_sampling(rng)
            asked = attrs.evolve(sampling, frequency_penalty=float(rng.choice([0.0, 0.5])))
            output = rng.integers(0, size, 50).tolist()
            arrays.want_token(row, asked, position=position, output=output, logprobs=row % 3)
        answers = []
        for threads in (1, 2, 3):
            pool = SamplingThreads(size, threads)
            tokens, status = np.full(count, 99, np.int32), np.full(count, 99, np.int8)
            told = allocate_logprobs(count)
            pool.sample(rows, arrays, tokens, status, told)
            pool.close()
            pairs = [told.of_row(row) for row in range(count)]
            answers.append((tokens.tolist(), status.tolist(), pairs))
        assert answers[1] == answers[0] and answers[2] == answers[0]


def test_an_error_on_another_thread_is_raised() -> None:
    pool = SamplingThreads(200, 2)
    arrays = SamplingArrays.allocate(2)
    arrays.want_token(1, Sampling(seed=1), position=0, logprobs=1)
    tokens, status = np.zeros(2, np.int32), np.zeros(2, np.int8)
    with pytest.raises(ValueError, match="log-probabilities"):
        pool.sample(np.zeros((2, 200), np.uint16), arrays, tokens, status)
    pool.close()
