"""Every reason to refuse a request, with status, message and time to come back (R7.2, R14.1)."""

from typing import Any

import attrs
import pytest
from support.fake_device import CONTEXT, LANES, VOCABULARY, FakeDevice
from support.fake_device import artifact as fake_artifact
from support.rig import Rig

from laneway.engine import (
    DeadlineExpiredError,
    Limits,
    RequestRejectedError,
    Stream,
)
from laneway.engine.decide import decide
from laneway.engine.effects import Conclude
from laneway.engine.inputs import ArtifactValidated, Input, RequestSubmitted, SubmodelFacts
from laneway.engine.sampling import Sampling
from laneway.engine.state import copy


def rejection(stream: Stream) -> RequestRejectedError:
    """Return the error of a refused request."""
    result = stream.result()
    assert (result.finish_reason, result.tokens) == ("error", ()) and not result.text
    assert isinstance(result.error, RequestRejectedError)
    return result.error


SHAPES: list[tuple[dict[str, Any], str, int, str]] = [
    ({"prompt": []}, "empty_prompt", 400, "no tokens"),
    ({"prompt": [1], "max_tokens": 0}, "max_tokens", 400, "at least 1, not 0"),
    ({"prompt": [1], "max_tokens": -5}, "max_tokens", 400, "at least 1, not -5"),
    ({"prompt": [1, VOCABULARY]}, "unknown_token", 400, f"token {VOCABULARY} is not in 0..63"),
    ({"prompt": [-1]}, "unknown_token", 400, "token -1"),
    ({"prompt": [(1 << 31) - 1]}, "unknown_token", 400, "is not in"),
    ({"prompt": [1], "max_tokens": CONTEXT}, "too_long", 400, f"= {CONTEXT + 1} tokens"),
    ({"prompt": [1] * (CONTEXT + 1), "max_tokens": 1}, "too_long", 400, f"holds {CONTEXT}"),
    ({"prompt": [1], "model": "other"}, "unknown_model", 404, "no model 'other' is served"),
]


@pytest.mark.parametrize(("asked", "reason", "status", "part"), SHAPES)
def test_what_can_never_be_served_is_refused_at_once(
    asked: dict[str, Any], reason: str, status: int, part: str
) -> None:
    rig = Rig()
    stream = rig.submit(**asked)
    error = rejection(stream)
    assert (error.reason, error.http_status, error.retry_after_s) == (reason, status, None)
    assert part in str(error) and f"request/{stream.request}" in str(error)
    assert error.request == stream.request
    (event,) = rig.events("request")
    assert (event.trigger, event.dest) == ("reject", "rejected")
    rig.close()


def test_the_longest_that_fits_is_admitted() -> None:
    rig = Rig()
    rig.submit([1] * (CONTEXT - 4), max_tokens=4)
    rig.run()
    rig.check_answers()
    rig.close()


def short_prefill(model: int) -> ArtifactValidated:
    """Return an artifact whose prefill takes 10 tokens at most."""
    facts = fake_artifact(model)
    submodels = (
        SubmodelFacts(name="prefill_b1", task="prefill", batch_max=1, tokens_max=10),
        facts.submodels[1],
    )
    return attrs.evolve(facts, submodels=submodels)


def test_a_prompt_longer_than_any_prefill_is_refused() -> None:
    rig = Rig(device=FakeDevice(artifact=short_prefill))
    error = rejection(rig.submit([1] * 11))
    assert (error.reason, error.http_status) == ("too_long", 400)
    assert "11 tokens" in str(error) and "at most 10" in str(error)
    assert rig.submit([1] * 10).result().error is None
    rig.close()


def test_a_deadline_that_has_passed_on_arrival_is_504() -> None:
    rig = Rig()
    stream = rig.submit([1], deadline_s=1e-12)
    result = stream.result()
    assert result.finish_reason == "deadline"
    assert isinstance(result.error, DeadlineExpiredError)
    assert "on arrival" in str(result.error)
    rig.close()


def test_the_queue_is_bounded_by_requests() -> None:
    rig = Rig(limits=Limits(queued_requests_max=3, retry_after_ns=2_500_000_000))
    rig.device.holding = True
    streams = [rig.submit([1, 2]) for _ in range(LANES + 4)]
    rig.run()
    refused = [s for s in streams if s._over()]
    # One prefill is in flight and holds its lane; three wait; the rest is told to come back.
    assert [s.request for s in refused] == [s.request for s in streams[4:]]
    error = rejection(refused[0])
    assert (error.reason, error.http_status) == ("max_num_queued_reqs", 429)
    assert error.retry_after_s == 2.5
    assert "3 requests wait, at most 3 may" in str(error)
    rig.device.holding = False
    rig.run()
    rig.streams = [one for one in rig.streams if one.stream not in refused]
    rig.check_answers()
    rig.close()


def test_the_queue_is_bounded_by_tokens_and_smaller_ones_still_fit() -> None:
    rig = Rig(limits=Limits(queued_tokens_max=10))
    rig.device.holding = True
    running = rig.submit([1])
    rig.run()
    waits = rig.submit([1] * 7)
    too_many = rig.submit([1] * 4)
    fits = rig.submit([1] * 3)
    full = rig.submit([1])
    rig.run()
    for stream in (too_many, full):
        error = rejection(stream)
        assert (error.reason, error.http_status) == ("max_num_queued_tokens", 429)
        assert error.retry_after_s == 1.0
    assert "7 prompt tokens wait, at most 10 may" in str(rejection(too_many))
    waits.cancel()
    rig.run()
    again = rig.submit([1] * 7)
    rig.run()
    rig.device.holding = False
    rig.run()
    assert {s.result().finish_reason for s in (running, fits, again)} <= {"length", "stop"}
    rig.close()


def test_cancelled_and_expired_requests_leave_room_in_the_queue() -> None:
    rig = Rig(limits=Limits(queued_requests_max=2))
    rig.device.holding = True
    rig.submit([1])
    rig.run()
    for _ in range(5):
        first = rig.submit([1])
        second = rig.submit([1], deadline_s=1.0)
        rig.run_actions(2)
        first.cancel()
        rig.device.clock.advance(1_000_000_000)
        rig.run()
        assert first.result().finish_reason == "cancelled"
        assert second.result().finish_reason == "deadline"
    rig.device.holding = False
    rig.run()
    rig.check_idle()
    rig.close()


def test_before_a_model_is_loaded_nothing_is_served() -> None:
    rig = Rig(load=False)
    error = rejection(rig.submit([1]))
    assert (error.reason, error.http_status) == ("unknown_model", 404)
    assert "served: none" in str(error)
    rig.close()


def state_of(rig: Rig, model: int) -> str:
    """Return the state of a model, "" when it holds nothing."""
    return rig.state.models[model].state if model in rig.state.models else ""


def test_while_a_model_loads_and_drains_it_is_503_with_a_time() -> None:
    rig = Rig(load=False)
    number = rig.ask_load()
    for state in ("validating", "configuring", "warming"):
        rig.run(until=lambda state=state: state_of(rig, number) == state)  # type: ignore[misc]
        early = rig.submit([1])
        rig.run(until=early._over)
        error = rejection(early)
        assert (error.reason, error.http_status) == ("model_not_ready", 503), state
        assert error.retry_after_s == 1.0 and f"'m' is {state}" in str(error)
    rig.run()
    live = rig.submit([2, 3])
    rig.run_actions(6)
    rig.ask_unload(number)
    late = rig.submit([1])
    rig.run(until=late._over)
    error = rejection(late)
    assert (error.reason, error.http_status) == ("model_not_ready", 503)
    assert "draining" in str(error)
    rig.run()
    assert live.result().error is None
    rig.close()


def test_a_closing_engine_refuses() -> None:
    rig = Rig()
    live = rig.submit([2, 3])
    rig.run_actions(3)
    rig.ask_close(drain=True)
    late = rig.submit([1])
    rig.run(until=late._over)
    error = rejection(late)
    assert (error.reason, error.http_status) == ("closing", 503)
    rig.run()
    assert live.result().error is None


NOT_YET = ("unknown_model", "model_not_ready", "model_changed")


def test_a_request_handed_in_just_before_the_model_is_published_is_served_or_refused() -> None:
    rig = Rig(load=False)

    def meanwhile(taken: Input) -> None:
        rig.submit([len(rig.streams) + 1, 2])

    rig.device.meanwhile = meanwhile
    rig.engine.load("m", "source")
    rig.device.meanwhile = None
    rig.run()
    for one in rig.streams:
        result = one.stream.result()
        if result.error is None:
            assert list(result.tokens) == one.expected()
        else:
            assert rejection(one.stream).reason in (
                "unknown_model",
                "model_not_ready",
                "model_changed",
            )
    rig.close()


def test_tokens_made_for_another_model_are_not_run() -> None:
    rig = Rig()
    taken = RequestSubmitted(
        request=rig.state.next_request,
        alias="m",
        prompt=(1, 2),
        max_tokens=2,
        sampling=Sampling(seed=1),
        stop=(),
        ignore_eos=False,
        deadline_ns=None,
        client_id=None,
        model=99,
    )
    decision = decide(copy(rig.state), taken, rig.state.now_ns)
    (told,) = decision.effects
    assert isinstance(told, Conclude)
    assert (told.kind, told.http_status, told.admitted) == ("model_changed", 503, False)
    assert [event.trigger for event in decision.events] == ["reject"]
    rig.close()
