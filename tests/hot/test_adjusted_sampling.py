"""Penalties, biases, masks and log-probabilities against the reference (G17, decision 6)."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray
from support.random_rows import QWEN3_VOCABULARY, peaked, random_row, random_sampling, to_bits
from support.slow_sampler import Bits, adjusted, logprobs, reference, to_numbers

from laneway.engine import bf16, logits
from laneway.engine.adjusting import BIAS
from laneway.engine.inputs import NO_TOKEN
from laneway.engine.logprobs import Logprobs, allocate_logprobs
from laneway.engine.sampling import Sampling
from laneway.engine.sampling_arrays import SamplerScratch, SamplingArrays

Option = TypeVar("Option")

REPETITIONS = [1.0, 1.0, 1.1, 1.3, 0.5, 2.0, 1e-3, 1e30]
EXTREME_REPETITIONS = [1e-38, 1e-45, 1e-300, 3e38, 1e300]
PENALTIES = [0.0, 0.0, 0.1, 0.5, -0.5, 2.0, -2.0, 1e-9]
BIASES = [0.0, 0.5, -0.5, 1.0, -1.0, 2.0, 1e-7, 100.0, -100.0, 3.3]
INFINITE_BIASES = [np.inf, -np.inf, np.inf, -np.inf, np.nan]


@attrs.frozen(kw_only=True)
class Ask:
    """Everything asked of one row; ``bias`` replaces the sampling's own, None: it does not."""

    sampling: Sampling
    position: int
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    masked: tuple[int, ...] = ()
    bias: dict[int, float] | None = None
    logprobs: int | None = None

    def expected(self, row: Bits) -> int:
        return reference(
            row,
            self.sampling,
            self.position,
            prompt=self.prompt,
            output=self.output,
            masked=self.masked,
            bias=self.bias,
        )


def run(
    rows: Bits, asks: Sequence[Ask]
) -> tuple[NDArray[np.int32], NDArray[np.int8], Logprobs, SamplerScratch]:
    count, vocabulary = rows.shape
    arrays, scratch = SamplingArrays.allocate(count), SamplerScratch.allocate(vocabulary)
    for i, ask in enumerate(asks):
        arrays.want_token(
            i,
            ask.sampling,
            position=ask.position,
            prompt=ask.prompt,
            output=ask.output,
            masked=ask.masked,
            logprobs=ask.logprobs,
        )
        if ask.bias is not None:
            with np.errstate(over="ignore"):  # what FP32 cannot hold is infinite
                arrays.spans[i, BIAS] = arrays.lists.put([*ask.bias], [*ask.bias.values()])
    tokens, status = np.zeros(count, np.int32), np.zeros(count, np.int8)
    told = allocate_logprobs(count)
    logits.sample_rows(rows, arrays, scratch, tokens, status, told)
    assert not scratch.touched.marks.any()
    assert not scratch.touched.bits.any()
    assert not scratch.arrays.counts.any()
    return tokens, status, told, scratch


def pick(rng: np.random.Generator, options: Sequence[Option]) -> Option:
    """Draw one of a few options."""
    return options[int(rng.integers(len(options)))]


def some_ids(rng: np.random.Generator, row: Bits, count: int) -> tuple[int, ...]:
    """Draw ids, with repeats: anywhere, among the highest, or in the first block."""
    if not count:
        return ()
    if rng.random() < 0.5:
        best = np.argsort(-to_numbers(row), kind="stable")[: 1 + count // 2]
        return tuple(best[rng.integers(0, best.size, count)].tolist())
    reach = min(row.size, pick(rng, (130, row.size)))
    return tuple(rng.integers(0, reach, count).tolist())


def random_ask(rng: np.random.Generator, row: Bits) -> Ask:
    """Draw what is asked of a row: mostly what people ask, at times what breaks things."""
    plain, position = random_sampling(rng)
    extreme = rng.random() < 0.05
    bias: dict[int, float] = {}
    if rng.random() < 0.4:
        ids = some_ids(rng, row, int(rng.integers(1, 12)))
        bias = {token: pick(rng, BIASES) for token in ids}
        if rng.random() < 0.3:  # numbers that other entries have: ties between both parts
            x = to_numbers(row).tolist()
            bias = {token: pick(rng, x) - x[token] for token in ids}
    if extreme and bias:
        bias[next(iter(bias))] = pick(rng, INFINITE_BIASES)
    allowed = None
    if rng.random() < 0.2:
        allowed = some_ids(rng, row, pick(rng, (1, 2, 30, 900)))
    masked = some_ids(rng, row, pick(rng, (0, 0, 1, 3, 40)))
    if rng.random() < 0.01:
        masked = tuple(range(row.size))
    return Ask(
        sampling=attrs.evolve(
            plain,
            repetition_penalty=pick(rng, EXTREME_REPETITIONS if extreme else REPETITIONS),
            presence_penalty=pick(rng, PENALTIES),
            frequency_penalty=pick(rng, PENALTIES),
            allowed_token_ids=allowed,
        ),
        position=position,
        prompt=some_ids(rng, row, pick(rng, (0, 1, 5, 50, 600))),
        output=some_ids(rng, row, pick(rng, (0, 1, 5, 50, 600))),
        masked=masked,
        bias=bias,
    )


def check_random_rows(seed: int, size: int, count: int, *, rows_an_ask: int = 1) -> None:
    """Hold a number of random rows against the reference; so many in a row are asked the same."""
    rng = np.random.default_rng([seed, size])
    rows = np.stack([random_row(rng, size) for _ in range(count)])
    drawn = [random_ask(rng, row) for row in rows[::rows_an_ask]]
    asks = [
        attrs.evolve(drawn[i // rows_an_ask], position=drawn[i // rows_an_ask].position + i)
        for i in range(count)
    ]
    tokens, status, _, _ = run(rows, asks)
    expected = np.array([ask.expected(row) for row, ask in zip(rows, asks, strict=True)])
    different = np.flatnonzero(tokens != expected)
    assert not different.size, [(int(i), asks[i], tokens[i], expected[i]) for i in different[:3]]
    np.testing.assert_array_equal(status == bf16.ROW_PARAMETERS, expected == NO_TOKEN)
    np.testing.assert_array_equal(status == bf16.ROW_OK, expected != NO_TOKEN)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (1, 100),
        (2, 300),
        (3, 300),
        (127, 400),
        (128, 400),
        (129, 600),
        (300, 1000),
        (1025, 600),
        (2048, 300),
        (5003, 200),
        (QWEN3_VOCABULARY, 12),
    ],
)
def test_adjusted_tokens_equal_the_reference(size: int, count: int) -> None:
    check_random_rows(1, size, count)


@pytest.mark.soak
@pytest.mark.parametrize(("size", "count"), [(5, 40_000), (64, 40_000), (130, 22_000)])
def test_a_hundred_thousand_adjusted_rows_equal_the_reference(size: int, count: int) -> None:
    for part in range(count // 2000):
        check_random_rows(100 + part, size, 2000, rows_an_ask=4)


@pytest.mark.parametrize("kind", ["peaked", "flat", "negative"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, repetition_penalty=1.1, seed=1),
        Sampling(temperature=0.7, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1, seed=2),
        Sampling(temperature=0.8, top_p=0.95, presence_penalty=0.1, frequency_penalty=0.1, seed=3),
        Sampling(temperature=1.0, repetition_penalty=0.8, seed=4),
        Sampling(temperature=1.0, frequency_penalty=-2.0, seed=5),
    ],
)
def test_full_vocabulary_rows_with_a_long_history(kind: str, sampling: Sampling) -> None:
    rng = np.random.default_rng(78)
    x = {
        "peaked": peaked(rng, QWEN3_VOCABULARY),
        "flat": rng.normal(0.0, 1.0, QWEN3_VOCABULARY),
        "negative": rng.normal(-20.0, 1.5, QWEN3_VOCABULARY),
    }[kind]
    row = to_bits(x)
    prompt = some_ids(rng, row, 3000)
    asks = [
        Ask(sampling=sampling, position=p, prompt=prompt, output=some_ids(rng, row, 512))
        for p in range(6)
    ]
    tokens, status, _, _ = run(np.tile(row, (len(asks), 1)), asks)
    assert tokens.tolist() == [ask.expected(row) for ask in asks]
    assert not status.any()


# ---------------------------------------------------------------------------- by hand


def bits(*numbers: float) -> Bits:
    return to_bits(np.array(numbers))[None]


def greedy(row: Bits, **asked: object) -> tuple[int, int]:
    """Return token and status of one greedy row; ``asked`` are fields of Ask or of Sampling."""
    own = {key: asked.pop(key) for key in list(asked) if key in attrs.fields_dict(Ask)}
    sampling = Sampling(temperature=0.0, seed=1, **asked)  # type: ignore[arg-type]
    tokens, status, _, _ = run(row, [Ask(sampling=sampling, position=0, **own)])  # type: ignore[arg-type]
    return int(tokens[0]), int(status[0])


def test_a_repeated_id_is_divided_above_zero_and_multiplied_below() -> None:
    row = bits(3.0, 2.0, -1.0)
    assert greedy(row, repetition_penalty=1.4, prompt=(0,)) == (0, bf16.ROW_OK)  # 2.14 > 2
    assert greedy(row, repetition_penalty=1.6, prompt=(0,)) == (1, bf16.ROW_OK)  # 1.875 < 2
    assert greedy(row, repetition_penalty=1.6, output=(0,)) == (1, bf16.ROW_OK)
    assert greedy(row, repetition_penalty=1.4, prompt=(0,) * 9, output=(0,)) == (0, bf16.ROW_OK)
    row = bits(-1.0, -1.5, -4.0)
    assert greedy(row, repetition_penalty=1.4, prompt=(0,)) == (0, bf16.ROW_OK)  # -1.4 > -1.5
    assert greedy(row, repetition_penalty=1.6, prompt=(0,)) == (1, bf16.ROW_OK)  # -1.6 < -1.5
    assert greedy(row, repetition_penalty=0.25, prompt=(2,)) == (0, bf16.ROW_OK)  # a tie: lowest id


def test_frequency_counts_and_presence_does_not_and_both_leave_the_prompt_alone() -> None:
    row = bits(3.0, 2.0)
    for asked, token in (
        ({"frequency_penalty": 0.4, "output": (0, 0)}, 0),  # 2.2
        ({"frequency_penalty": 0.4, "output": (0, 0, 0)}, 1),  # 1.8
        ({"frequency_penalty": 2.0, "prompt": (0, 0, 0)}, 0),
        ({"presence_penalty": 0.9, "output": (0, 0, 0)}, 0),  # 2.1
        ({"presence_penalty": 1.1, "output": (0,)}, 1),  # 1.9
        ({"presence_penalty": 2.0, "prompt": (0,)}, 0),
        ({"frequency_penalty": -0.6, "output": (1, 1)}, 1),  # 3.2
        ({"presence_penalty": 0.5, "frequency_penalty": 0.25, "output": (0, 0)}, 0),  # 2: a tie
    ):
        assert greedy(row, **asked) == (token, bf16.ROW_OK)


def test_bias_comes_before_repetition() -> None:
    """3 + 1 = 4, over 2 is 2; the other way round it would be 2.5 and the first id."""
    row = bits(3.0, 2.25)
    asked = {"logit_bias": {0: 1.0}, "repetition_penalty": 2.0, "prompt": (0,)}
    assert greedy(row, **asked) == (1, bf16.ROW_OK)


def test_allowed_and_masked_ids() -> None:
    row = bits(3.0, 2.0, 1.0, 0.0)
    assert greedy(row, allowed_token_ids=(2, 3)) == (2, bf16.ROW_OK)
    assert greedy(row, allowed_token_ids=(2, 3), masked=(2,)) == (3, bf16.ROW_OK)
    assert greedy(row, allowed_token_ids=(2, 3), logit_bias={0: 100.0, 3: 2.0}) == (3, bf16.ROW_OK)
    assert greedy(row, masked=(0, 1)) == (2, bf16.ROW_OK)
    assert greedy(row, masked=(0,), logit_bias={0: 100.0}) == (1, bf16.ROW_OK)
    assert greedy(row, masked=(0, 1, 2, 3)) == (NO_TOKEN, bf16.ROW_PARAMETERS)
    assert greedy(row, allowed_token_ids=(1,), masked=(1,)) == (NO_TOKEN, bf16.ROW_PARAMETERS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinities_and_nan_made_by_parameters(temperature: float) -> None:
    row = bits(3.0, 0.0, -1.0)
    sampling = Sampling(temperature=temperature, top_k=1, seed=1)

    def outcome(*, penalty: float = 1.0, prompt: tuple[int, ...] = (), **own: object) -> int:
        asked = attrs.evolve(sampling, repetition_penalty=penalty)
        ask = Ask(sampling=asked, position=0, prompt=prompt, **own)  # type: ignore[arg-type]
        tokens, status, _, _ = run(row, [ask])
        assert (status[0] == bf16.ROW_PARAMETERS) == (tokens[0] == NO_TOKEN)
        return int(tokens[0])

    inf = float("inf")
    assert outcome(bias={2: inf}) == 2
    assert outcome(bias={1: inf, 2: inf}) == NO_TOKEN
    assert outcome(bias={0: -inf}, masked=(1,)) == 2
    assert outcome(bias={0: -inf, 1: -inf, 2: -inf}) == NO_TOKEN
    assert outcome(bias={1: inf, 0: float("nan")}) == NO_TOKEN
    assert outcome(penalty=1e-300, prompt=(0,)) == 0  # FP32 zero: 3 / 0 is +inf
    assert outcome(penalty=1e300, prompt=(1,)) == NO_TOKEN  # FP32 infinity: 0 * inf is NaN
    assert outcome(penalty=1e300, prompt=(2,), masked=(0, 1)) == NO_TOKEN  # -1 * inf is -inf
    assert outcome(bias={1: inf}, masked=(1,)) == 0


def test_ids_outside_the_vocabulary_fail_their_own_row_only() -> None:
    rows = np.zeros((4, 200), np.uint16)
    for bad in (-1, 200, 2**31 - 1):
        asks = [
            Ask(sampling=Sampling(seed=1), position=3, masked=(5,)),
            Ask(sampling=Sampling(seed=1), position=3, masked=(7, bad)),
            Ask(sampling=Sampling(seed=1, repetition_penalty=2.0), position=3, prompt=(bad,)),
            Ask(sampling=Sampling(seed=1), position=3),
        ]
        tokens, status, _, _ = run(rows, asks)
        wrong = bf16.ROW_PARAMETERS
        assert status.tolist() == [bf16.ROW_OK, wrong, wrong, bf16.ROW_OK]
        assert tokens.tolist() == [asks[0].expected(rows[0]), -1, -1, asks[3].expected(rows[3])]


@pytest.mark.parametrize("place", [0, 150, 199])
def test_abnormal_numbers_come_before_parameters(place: int) -> None:
    """A NaN of the device is its fault even where a mask would hide it (R14.5)."""
    row = np.zeros((1, 200), np.uint16)
    row[0, place] = 0x7FC0
    ask = Ask(sampling=Sampling(seed=1), position=0, masked=tuple(range(200)), logprobs=3)
    tokens, status, told, _ = run(row, [ask])
    assert (tokens[0], status[0], told.of_row(0)) == (NO_TOKEN, bf16.ROW_NAN, ())


def test_adjusted_tokens_do_not_depend_on_batch_order_scratch_or_thread() -> None:
    rng = np.random.default_rng(22)
    size, count = 3000, 160
    rows = np.stack([random_row(rng, size) for _ in range(count)])
    before = rows.copy()
    asks = [random_ask(rng, row) for row in rows]
    together = run(rows, asks)[0]

    def some(order: NDArray[np.int64]) -> NDArray[np.int32]:
        return run(rows[order], [asks[i] for i in order])[0]

    shuffled = rng.permutation(count)
    np.testing.assert_array_equal(some(shuffled), together[shuffled])
    alone = np.concatenate([some(np.array([i])) for i in range(count)])
    np.testing.assert_array_equal(alone, together)
    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(some, np.array_split(np.arange(count), 2)))
    np.testing.assert_array_equal(np.concatenate(halves), together)
    np.testing.assert_array_equal(rows, before)


# ---------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize(("size", "count"), [(1, 20), (3, 60), (129, 200), (1025, 200), (5003, 60)])
def test_logprobs_equal_the_reference(size: int, count: int) -> None:
    rng = np.random.default_rng([5, size])
    rows = np.stack([random_row(rng, size) for _ in range(count)])
    asks = [
        attrs.evolve(random_ask(rng, row), logprobs=int(rng.choice([0, 1, 5, 20]))) for row in rows
    ]
    tokens, _, told, _ = run(rows, asks)
    for i, (row, ask) in enumerate(zip(rows, asks, strict=True)):
        if tokens[i] == NO_TOKEN:
            assert told.of_row(i) == ()
            continue
        assert ask.logprobs is not None
        expected = logprobs(row, int(tokens[i]), ask.logprobs)
        assert [token for token, _ in told.of_row(i)] == [token for token, _ in expected]
        np.testing.assert_allclose(
            [value for _, value in told.of_row(i)],
            [value for _, value in expected],
            rtol=1e-11,
            atol=1e-11,
        )


def test_logprobs_of_a_full_vocabulary_and_by_hand() -> None:
    rng = np.random.default_rng(6)
    row = to_bits(peaked(rng, QWEN3_VOCABULARY))
    ask = Ask(sampling=Sampling(seed=2), position=1, logprobs=20)
    tokens, _, told, _ = run(row[None], [ask])
    expected = logprobs(row, int(tokens[0]), 20)
    assert [token for token, _ in told.of_row(0)] == [token for token, _ in expected]
    for (_, value), (_, wanted) in zip(told.of_row(0), expected, strict=True):
        assert value == pytest.approx(wanted, abs=1e-11)
    quarter = Ask(sampling=Sampling(temperature=0.0, seed=1), position=0, logprobs=2)
    _, _, told, _ = run(np.zeros((1, 4), np.uint16), [quarter])
    ids, values = zip(*told.of_row(0), strict=True)
    assert ids == (0, 0, 1)
    assert values == pytest.approx([-np.log(4.0)] * 3, abs=1e-12)


@pytest.mark.parametrize("highest", [-3e38, -650.0, -600.0, -599.0, 599.0, 600.0, 650.0, 3e38])
def test_logprobs_of_rows_that_are_far_from_zero(highest: float) -> None:
    """On both sides of where exponentials are no longer looked up."""
    rng = np.random.default_rng(7)
    row = to_bits(highest - rng.exponential(abs(highest) * 0.01, 1001))
    row[700] = to_bits(np.array([highest]))[0]
    ask = Ask(sampling=Sampling(temperature=0.0, seed=2), position=1, logprobs=3)
    tokens, _, told, _ = run(row[None], [ask])
    expected = logprobs(row, int(tokens[0]), 3)
    assert [token for token, _ in told.of_row(0)] == [token for token, _ in expected]
    np.testing.assert_allclose(
        [value for _, value in told.of_row(0)],
        [value for _, value in expected],
        rtol=1e-11,
        atol=1e-11,
    )


def test_logprobs_are_those_before_adjustment() -> None:
    row = bits(3.0, 2.0, 1.0)
    ask = Ask(sampling=Sampling(temperature=0.0, seed=1), position=0, masked=(0,), logprobs=3)
    tokens, _, told, _ = run(row, [ask])
    log_mass = float(np.log(np.exp(3.0) + np.exp(2.0) + np.exp(1.0)))
    assert tokens[0] == 1
    assert [token for token, _ in told.of_row(0)] == [1, 0, 1, 2]
    values = [value for _, value in told.of_row(0)]
    assert values == pytest.approx([2 - log_mass, 3 - log_mass, 2 - log_mass, 1 - log_mass])


def test_logprobs_need_room() -> None:
    arrays = SamplingArrays.allocate(1)
    arrays.want_token(0, Sampling(seed=1), position=0, logprobs=0)
    tokens, status = np.zeros(1, np.int32), np.zeros(1, np.int8)
    row, scratch = np.zeros((1, 200), np.uint16), SamplerScratch.allocate(200)
    with pytest.raises(ValueError, match="log-probabilities"):
        logits.sample_rows(row, arrays, scratch, tokens, status)
    with pytest.raises(ValueError, match="logprobs have 2 rows"):
        logits.sample_rows(row, arrays, scratch, tokens, status, allocate_logprobs(2))


# ---------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("repetition_penalty", [1e-300, 0.5, 1e300], [0.0, -1.0, np.inf, np.nan]),
        ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1, np.nan]),
        ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1, np.inf]),
        (
            "logit_bias",
            [{}, {1: 100}, {1: -100.0}, {i: 1.0 for i in range(1024)}],
            [{1: 100.1}, {1: -101}, {-1: 1.0}, {1: np.nan}, {i: 1.0 for i in range(1025)}],
        ),
        (
            "allowed_token_ids",
            [None, (0,), tuple(range(1024))],
            [(), (-1,), (2**31,), tuple(range(1025))],
        ),
    ],
)
def test_bounds_of_every_parameter(name: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        Sampling(**{name: value})  # type: ignore[arg-type]
    for value in bad:
        with pytest.raises(ValueError, match=name):
            Sampling(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sampling(repetition_penalty=True),
        lambda: Sampling(presence_penalty="1"),  # type: ignore[arg-type]
        lambda: Sampling(logit_bias={"1": 1.0}),  # type: ignore[arg-type]
        lambda: Sampling(logit_bias={1: "1"}),  # type: ignore[arg-type]
        lambda: Sampling(allowed_token_ids=(1.0,)),  # type: ignore[arg-type]
    ],
)
def test_types_of_parameters(make: Callable[[], Sampling]) -> None:
    with pytest.raises(TypeError):
        make()


def test_a_bias_is_kept_in_order_of_ids_and_names_none_twice() -> None:
    assert Sampling(logit_bias={7: 1, 3: -2.5}).logit_bias == ((3, -2.5), (7, 1.0))
    with pytest.raises(ValueError, match="twice"):
        Sampling(logit_bias=((1, 1.0), (1, 2.0)))


def test_the_reference_adjusts_only_what_is_named() -> None:
    """Guards the reference itself: an entry that nothing names keeps its number exactly."""
    row = to_bits(np.linspace(-4.0, 4.0, 50))
    sampling = Sampling(repetition_penalty=1.5, frequency_penalty=1.0, logit_bias={9: 1.0}, seed=1)
    x = adjusted(row, sampling, prompt=(1,), output=(2, 2), masked=(3,))
    changed = np.flatnonzero(x.astype(np.float64) != to_numbers(row))
    assert changed.tolist() == [1, 2, 3, 9]
