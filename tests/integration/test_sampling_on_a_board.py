"""Penalties, masks and log-probabilities from the client to the board and back (I7, decision 6).

Expected values come from the model's folder alone: every position computed anew, the slow sampler.
"""

import threading
from pathlib import Path

import attrs
import numpy as np
import pytest
from support.asking import Ask, Outcome, answer_alone, outcomes, pack_with_end_tokens
from support.native_board import VOCAB
from support.real_engine import RealEngine
from support.slow_sampler import logprobs as slow_logprobs
from support.synchronous import Arrival

from laneway.adapters.library import open_library
from laneway.adapters.simulated import recompute
from laneway.engine import Sampling
from laneway.engine.inputs import Completed

PROMPT = (17, 301, 44, 17)
BIAS = {5: 30.0, 6: 28.0}
ASKS = tuple(
    Ask(prompt=PROMPT, max_tokens=10, sampling=sampling, ignore_eos=True)
    for sampling in (
        Sampling(temperature=0.0, logit_bias=BIAS, seed=3),
        Sampling(temperature=0.0, logit_bias=BIAS, repetition_penalty=5.0, seed=3),
        Sampling(
            temperature=0.0, logit_bias=BIAS, frequency_penalty=2.0, presence_penalty=2.0, seed=3
        ),
        Sampling(temperature=0.0, frequency_penalty=-2.0, seed=3),
        Sampling(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.5, seed=3),
        Sampling(temperature=0.9, logit_bias={5: 30.0, 6: 30.5}, frequency_penalty=1.5, seed=3),
        Sampling(temperature=0.9, allowed_token_ids=(4, 9, 200), seed=3),
    )
)


@pytest.fixture(scope="module")
def alone(calbin: Path) -> list[Outcome]:
    """Each answer computed from nothing."""
    return [answer_alone(calbin, ask) for ask in ASKS]


def test_what_is_asked_of_the_sampler_shows_in_the_answers(alone: list[Outcome]) -> None:
    """Guards the others: these requests differ in their parameters only, and all differ."""
    assert len({one.tokens for one in alone}) == len(ASKS)
    assert set(alone[5].tokens) >= {5, 6}
    assert set(alone[6].tokens) <= {4, 9, 200}


@pytest.mark.parametrize("backwards", [False, True])
def test_answers_do_not_depend_on_neighbours_or_order(
    calbin: Path, alone: list[Outcome], backwards: bool
) -> None:
    asks = ASKS[::-1] if backwards else ASKS
    real = RealEngine(calbin)
    real.run([Arrival(2 * number, ask) for number, ask in enumerate(asks)])
    assert outcomes(real.results()) == (alone[::-1] if backwards else alone)
    real.close()


def test_answers_do_not_depend_on_how_many_threads_sample(
    tmp_path: Path, alone: list[Outcome]
) -> None:
    """K5 in service: three threads share the rows of a batch (samplers=3)."""
    calbin = pack_with_end_tokens(tmp_path, batch=(1, 8), lanes=8)
    real = RealEngine(calbin, url="sim:tiny?clock=virtual&samplers=3", together=True)
    real.run([Arrival(0, ask) for ask in ASKS])
    assert outcomes(real.results()) == alone
    done = [step.taken for step in real.steps() if isinstance(step.taken, Completed)]
    assert max(len(one.rows) for one in done) > 3, "there was never a row for each thread"
    assert any(one.name.startswith("sampling") for one in threading.enumerate())
    real.close()


def test_end_tokens_wait_for_the_least_number_of_tokens(calbin: Path) -> None:
    stops = answer_alone(calbin, ASKS[4]).tokens[:3]
    asks = [
        attrs.evolve(ASKS[4], stop_token_ids=stops, ignore_eos=False, min_tokens=least)
        for least in (0, 1, 4, 10)
    ]
    expected = [answer_alone(calbin, ask) for ask in asks]
    assert expected[0] == Outcome((), "stop")
    real = RealEngine(calbin)
    real.run([Arrival(0, ask) for ask in asks])
    assert outcomes(real.results()) == expected
    real.close()


@pytest.mark.parametrize("most", [0, 3])
def test_logprobs_are_those_of_the_model(calbin: Path, most: int) -> None:
    ask = ASKS[4]
    real = RealEngine(calbin)
    stream = real.engine.submit(ask.request(logprobs=most))
    deltas = list(stream)
    assert stream.result().logprobs == tuple(delta.logprobs for delta in deltas)
    sequence = list(ask.prompt)
    for delta in deltas:
        assert delta.token is not None
        bits, _ = recompute(open_library(), str(calbin), sequence, vocabulary=VOCAB)
        expected = slow_logprobs(bits, delta.token, most)
        assert [token for token, _ in delta.logprobs] == [token for token, _ in expected]
        np.testing.assert_allclose(
            [value for _, value in delta.logprobs], [value for _, value in expected], atol=1e-9
        )
        sequence.append(delta.token)
    assert len(deltas) == ask.max_tokens
    real.close()


def test_a_request_whose_parameters_leave_no_token_fails_alone(calbin: Path) -> None:
    """G17: the only allowed token is an end token, and the answer may not end yet."""
    real = RealEngine(calbin)
    neighbour = real.submit(ASKS[1])
    stream = real.submit(
        attrs.evolve(
            ASKS[0],
            sampling=Sampling(allowed_token_ids=(7,), seed=1),
            ignore_eos=False,
            min_tokens=2,
        )
    )
    result = stream.result()
    assert (result.tokens, result.finish_reason) == ((), "error")
    assert getattr(result.error, "reason", "") == "parameters"
    assert getattr(result.error, "http_status", 0) == 400
    assert outcomes([neighbour.result()]) == [answer_alone(calbin, ASKS[1])]
    real.close()
