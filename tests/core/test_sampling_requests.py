"""What a request asks of the sampler, from submit to the ending (R7.2, G17, I7).

Stop tokens, a least number of tokens, log-probabilities, and what travels to the sampler.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from support.fake_device import END_TOKEN, VOCABULARY, answer
from support.rig import Rig

from laneway.engine import Request, RequestRejectedError, Result, Sampling, Stream
from laneway.engine.effects import SubmitRow

PROMPT = (1, 2)


def submit(
    rig: Rig, *, prompt: Sequence[int] = PROMPT, seed: int = 1, max_tokens: int = 8, **rest: Any
) -> Stream:
    sampling = rest.pop("sampling", None) or Sampling(seed=seed)
    return rig.engine.submit(
        Request(model="m", prompt=prompt, max_tokens=max_tokens, sampling=sampling, **rest)
    )


def finished(rig: Rig, **asked: Any) -> Result:
    return submit(rig, **asked).result()


def rows_of(rig: Rig, request: int) -> list[SubmitRow]:
    """Return the rows that were submitted for a request, in order."""
    return [
        row
        for job in rig.device.submitted
        for row in job.rows
        if (job.origin, row.owner) == ("request", request)
    ]


# ---------------------------------------------------------------------------- stop tokens


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it() -> None:
    rig = Rig()
    whole = answer(PROMPT, seed=1, max_tokens=8, ignore_eos=True)
    stop = whole[3]
    first = whole.index(stop)
    for ignore_eos in (False, True):
        result = finished(rig, stop_token_ids=(63, stop), ignore_eos=ignore_eos)
        expected = answer(
            PROMPT, seed=1, max_tokens=8, ignore_eos=ignore_eos, stop_token_ids=(63, stop)
        )
        assert len(expected) <= first
        assert list(result.tokens) == expected
        assert result.text == "".join(f"<{token}>" for token in expected)
        assert (result.finish_reason, result.error) == ("stop", None)
    rig.close()


def test_the_models_own_end_tokens_still_end_beside_stop_tokens() -> None:
    seed = next(s for s in range(4000) if 0 < len(answer(PROMPT, seed=s, max_tokens=8)) < 8)
    rig = Rig()
    unused = next(t for t in range(VOCABULARY) if t not in answer(PROMPT, seed=seed, max_tokens=8))
    stops = (unused or 1,)
    result = finished(rig, seed=seed, stop_token_ids=stops)
    assert list(result.tokens) == answer(PROMPT, seed=seed, max_tokens=8, stop_token_ids=stops)
    assert result.finish_reason == "stop"
    rig.close()


# ---------------------------------------------------------------------------- min_tokens


def test_nothing_ends_an_answer_before_its_least_number_of_tokens() -> None:
    """Seeds whose answers end early by the model's token and by one of the request's own."""
    rig = Rig()
    early = [s for s in range(4000) if len(answer(PROMPT, seed=s, max_tokens=8)) < 3][:4]
    for seed in early:
        for least in (0, 1, 3, 8):
            result = finished(rig, seed=seed, min_tokens=least)
            expected = answer(PROMPT, seed=seed, max_tokens=8, min_tokens=least)
            assert list(result.tokens) == expected
            assert len(expected) >= least
            assert result.finish_reason == ("length" if len(expected) == 8 else "stop")
    rig.close()


def test_end_tokens_are_masked_until_then_and_not_longer() -> None:
    rig = Rig()
    stream = submit(rig, min_tokens=3, stop_token_ids=(5,), max_tokens=6)
    stream.result()
    masked = [row.masked for row in rows_of(rig, stream.request)]
    assert masked[:4] == [(END_TOKEN, 5)] * 3 + [()] * (len(masked[:4]) - 3)
    stream = submit(rig, min_tokens=2, stop_token_ids=(5,), ignore_eos=True, max_tokens=3)
    stream.result()
    masked = [row.masked for row in rows_of(rig, stream.request)]
    assert masked == [(5,), (5,), ()][: len(masked)]
    stream = submit(rig, max_tokens=3, ignore_eos=True)
    stream.result()
    assert [row.masked for row in rows_of(rig, stream.request)] == [()] * 3
    rig.close()


def test_a_stop_string_counts_from_the_least_number_of_tokens_on() -> None:
    whole = answer(PROMPT, seed=1, max_tokens=8, ignore_eos=True)
    rig = Rig()
    stop = f"<{whole[1]}>"
    ends = next((i for i in range(3, 8) if whole[i] == whole[1]), None)
    result = finished(rig, stop=stop, ignore_eos=True)
    assert list(result.tokens) == whole[: whole.index(whole[1]) + 1]
    result = finished(rig, stop=stop, min_tokens=2, ignore_eos=True)
    assert list(result.tokens) == whole[:2]
    result = finished(rig, stop=stop, min_tokens=3, ignore_eos=True)
    later = 8 if ends is None else ends + 1
    assert list(result.tokens) == whole[:later]
    rig.close()


# ---------------------------------------------------------------------------- to the sampler


@pytest.mark.parametrize(
    ("asked", "prompt", "output"),
    [
        ({}, False, False),
        ({"logit_bias": {3: 1.0}, "allowed_token_ids": (3, 4)}, False, False),
        ({"repetition_penalty": 1.2}, True, True),
        ({"presence_penalty": 0.5}, False, True),
        ({"frequency_penalty": -0.5}, False, True),
    ],
)
def test_penalties_see_prompt_and_output_and_nothing_else_is_sent(
    asked: dict[str, Any], prompt: bool, output: bool
) -> None:
    rig = Rig()
    other = submit(rig, prompt=(9, 9, 9), seed=5, ignore_eos=True)
    stream = submit(rig, sampling=Sampling(seed=1, **asked), max_tokens=4, ignore_eos=True)
    tokens = stream.result().tokens
    for index, row in enumerate(rows_of(rig, stream.request)):
        assert row.prompt == (PROMPT if prompt else ())
        assert row.output == (tokens[:index] if output else ())
        assert row.sampling == Sampling(seed=1, **asked)
    assert other.result().error is None
    rig.close()


def test_the_seed_that_is_drawn_changes_nothing_else() -> None:
    asked = Sampling(repetition_penalty=1.5, logit_bias={1: 2.0}, allowed_token_ids=(4,))
    rig = Rig()
    stream = submit(rig, sampling=asked)
    stream.result()
    sent = rows_of(rig, stream.request)[0].sampling
    assert sent == Sampling(
        seed=77, repetition_penalty=1.5, logit_bias={1: 2.0}, allowed_token_ids=(4,)
    )
    rig.close()


# ---------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("most", [None, 0, 2])
def test_logprobs_reach_the_client_with_their_token(most: int | None) -> None:
    rig = Rig()
    plain = submit(rig, prompt=(9, 9, 9), seed=5)
    stream = submit(rig, logprobs=most, ignore_eos=True)
    deltas = list(stream)
    assert len(deltas) == 8
    for delta in deltas:
        others = () if most is None else tuple((n, -1.0 - n) for n in range(most))
        expected = () if most is None else ((delta.token, -0.5), *others)
        assert delta.logprobs == expected
    assert all(delta.logprobs == () for delta in plain)
    rig.close()


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ({"stop_token_ids": (3, VOCABULARY)}, "stop_token_ids: token 64 is not in 0..63"),
        ({"sampling": Sampling(logit_bias={VOCABULARY: 1.0})}, "logit_bias: token 64"),
        ({"sampling": Sampling(allowed_token_ids=(0, 99))}, "allowed_token_ids: token 99"),
    ],
)
def test_ids_the_model_does_not_have_are_refused(asked: dict[str, Any], part: str) -> None:
    rig = Rig()
    error = finished(rig, **asked).error
    assert isinstance(error, RequestRejectedError)
    assert (error.reason, error.http_status) == ("unknown_token", 400)
    assert part in str(error)
    good = {"stop_token_ids": (63,), "sampling": Sampling(seed=1, allowed_token_ids=(63,))}
    assert finished(rig, **good).error is None
    rig.close()


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("min_tokens", [0, 1, 8], [-1, 9]),
        ("logprobs", [None, 0, 20], [-1, 21]),
        ("stop_token_ids", [(), (0,), tuple(range(128))], [(-1,), (1 << 31,), tuple(range(129))]),
    ],
)
def test_bounds_of_a_request(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        Request(model="m", prompt=PROMPT, max_tokens=8, **{name: value})
    for value in bad:
        with pytest.raises(ValueError, match=name):
            Request(model="m", prompt=PROMPT, max_tokens=8, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_tokens", 1.0), ("min_tokens", True), ("logprobs", "5"), ("stop_token_ids", ("a",))],
)
def test_types_of_a_request(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        Request(model="m", prompt=PROMPT, **{name: value})
