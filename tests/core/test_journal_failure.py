"""A journal that cannot be written: no effect of that step, a stopped engine, told to everybody."""

import pytest
from support.fake_device import FakeDevice
from support.memory_steps import ListJournal
from support.script import begin

from laneway.engine import Engine, EngineClosedError, LanewayError, Request
from laneway.engine.errors import JournalWriteError


def test_no_effect_of_the_failed_step_begins_whichever_it_is() -> None:
    whole = begin().run()
    stopped = 0
    for count in range(0, whole, 2):
        rig = begin()
        rig.run_actions(count)
        rig.journal.fail = True
        kept = list(rig.steps)
        before = len(rig.device.executed)
        outbox = len(rig.engine._outbox)
        with pytest.raises(JournalWriteError):
            rig.run()
        stopped += 1
        assert rig.steps == kept
        assert len(rig.device.executed) <= before + outbox, "only effects of durable steps"
        assert rig.engine._outbox == type(rig.engine._outbox)()
        assert all(one.stream._over() for one in rig.streams)
        rig.engine.close()
        assert rig.device.stopped and rig.journal.closed
    assert stopped == (whole + 1) // 2


def test_everybody_is_told_clearly() -> None:
    rig = begin()
    rig.run_actions(25)
    with_tokens = [one for one in rig.streams if one.stream._tokens]
    assert with_tokens
    rig.journal.fail = True
    with pytest.raises(LanewayError, match="disk full"):
        rig.run()
    for one in rig.streams:
        if one.stream._result is None:
            with pytest.raises(EngineClosedError, match=r"request/\d.*disk full"):
                one.stream.result()
            with pytest.raises(EngineClosedError, match="disk full"):
                list(one.stream)
    with pytest.raises(EngineClosedError, match="disk full"):
        rig.engine.submit(Request(model="m", prompt=(1,)))
    with pytest.raises(EngineClosedError, match="disk full"):
        rig.engine.step()
    with pytest.raises(EngineClosedError, match="disk full"):
        rig.engine.load("m", "x")
    with pytest.raises(EngineClosedError):
        rig.engine.unload("m")
    health = rig.engine.health()
    assert (health.live, health.ready) == (False, False) and "disk full" in health.reason
    for one in rig.streams:
        one.stream.cancel()
    rig.engine.close()
    rig.engine.close()
    assert rig.journal.closed and rig.device.stopped


def test_the_caller_that_drives_gets_the_failure_itself_and_then_like_everybody() -> None:
    rig = begin()
    rig.run_actions(12)
    rig.journal.fail = True
    with pytest.raises(JournalWriteError, match="disk full"):
        rig.streams[0].stream.result()
    with pytest.raises(EngineClosedError, match="disk full"):
        rig.streams[0].stream.result()


def test_a_failure_at_the_very_first_step_is_the_constructor_s() -> None:
    journal = ListJournal()
    journal.fail = True
    device = FakeDevice()
    with pytest.raises(JournalWriteError):
        Engine(device=device, journal=journal, threads=False)
    assert not device.executed


def test_a_failure_during_close_still_stops_the_device_and_closes_the_journal() -> None:
    rig = begin()
    rig.run()
    rig.journal.fail = True
    with pytest.raises(LanewayError):
        rig.engine.close()
    assert rig.device.stopped and rig.journal.closed


def test_what_was_not_durable_is_not_shown() -> None:
    rig = begin()
    rig.run_actions(12)
    subscription = rig.engine.subscribe()
    rig.journal.fail = True
    with pytest.raises(LanewayError):
        rig.run()
    assert subscription.get(timeout_s=0) is None
    assert rig.engine.snapshot().step <= len(rig.steps), "decision 4: visible only when durable"
    rig.engine.close()
