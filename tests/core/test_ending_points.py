"""A request, or the whole engine, ends at every point between two steps (kind of failure 1 and 4).

One script of three requests is run again and again; each time something ends it at another point.
What the device uses is never freed early (the FakeDevice asserts it), nothing is kept for the dead,
and the others get the tokens of a run alone.
"""

from collections.abc import Callable

import pytest
from support.fake_device import FakeDevice, answer
from support.rig import Rig
from support.script import begin, finish_and_check, points, small_artifact

from laneway.engine import RequestRejectedError


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_cancel_at_every_point(victim: int) -> None:
    endings = set()
    for rig in points(stride=1 if victim == 1 else 3):
        rig.streams[victim].stream.cancel()
        rig.streams[victim].stream.cancel()
        finish_and_check(rig, ended=[victim])
        endings.add(rig.streams[victim].stream.result().finish_reason)
    assert endings == {"cancelled", "length"}


def test_cancel_of_all_at_every_point() -> None:
    for rig in points(stride=2):
        for one in rig.streams:
            one.stream.cancel()
        finish_and_check(rig, ended=[0, 1, 2])


def test_deadline_at_every_point() -> None:
    endings = set()
    for rig in points(stride=2, deadline_s=1.0):
        rig.device.clock.advance(2_000_000_000)
        finish_and_check(rig, ended=[1])
        endings.add(rig.streams[1].stream.result().finish_reason)
    assert endings == {"deadline", "length"}


def test_a_deadline_comes_by_itself_while_a_job_hangs() -> None:
    rig = begin(deadline_s=1.0)
    rig.run(until=lambda: len(rig.device.submitted) == 4)
    assert rig.device.submitted[-1].rows[0].owner == 2
    rig.device.holding = True
    rig.run()
    assert rig.streams[1].stream.result().finish_reason == "deadline"
    lane = rig.device.submitted[-1].rows[0].lane
    assert rig.state.lanes[lane].state == "reserved", "the device still has the job"
    rig.device.holding = False
    finish_and_check(rig, ended=[1])


def close_now(rig: Rig) -> None:
    rig.close(drain=False)


def close_draining(rig: Rig) -> None:
    rig.close(drain=True)


def close_twice(rig: Rig) -> None:
    rig.ask_close(drain=True)
    rig.act()
    rig.close(drain=False)


def close_during_unload(rig: Rig) -> None:
    rig.ask_unload(1)
    rig.act()
    rig.close(drain=False)


@pytest.mark.parametrize("close", [close_now, close_draining, close_twice, close_during_unload])
def test_close_at_every_point(close: Callable[[Rig], None]) -> None:
    for rig in points(stride=3):
        close(rig)
        ended = [] if close is close_draining else [one.stream for one in rig.streams]
        rig.check_answers(ended_early=ended)
        for one in rig.streams:
            assert one.stream.result().finish_reason in ("length", "cancelled")
        assert rig.device.closes == [False], "a healthy device is closed, once"
        assert not rig.state.models and not rig.state.lanes and not rig.state.buffers


def test_close_at_every_point_of_a_load() -> None:
    count = 0
    while True:
        rig = Rig(load=False, device=FakeDevice(artifact=small_artifact))
        rig.ask_load()
        enough = rig.run_actions(count)
        rig.close(drain=count % 4 == 0)
        assert not rig.state.models
        assert rig.device.closes == [False]
        if not enough:
            break
        count += 2
    assert count > 20


def test_unload_at_every_point() -> None:
    for rig in points(stride=3):
        rig.ask_unload(1)
        rig.run()
        for one in rig.streams:
            result = one.stream.result()
            if result.error is not None:
                assert isinstance(result.error, RequestRejectedError)
                assert result.error.reason in ("model_not_ready", "unknown_model")
                assert result.tokens == ()
            else:
                assert list(result.tokens) == one.expected()
        assert not rig.state.models and not rig.state.lanes and not rig.state.buffers
        rig.engine.load("m", "again")
        again = rig.submit([7, 7], seed=1)
        rig.run()
        assert list(again.result().tokens) == answer([7, 7], seed=1, max_tokens=4)
        rig.close()
