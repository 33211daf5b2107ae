"""The board is reset by another process: the engine goes on behind it, once (row 22)."""

import attrs
import pytest
from support.fake_device import healthy
from support.rig import Rig
from support.strikes import levels
from support.told import fault_told

from laneway.engine.inputs import DeviceFaulted, HealthProbed
from laneway.engine.ladder import INSPECT
from laneway.engine.limits import SECOND


def health_now(rig: Rig) -> HealthProbed:
    """Return what the device says of itself: well, in its epoch of now."""
    health = attrs.evolve(healthy(0), device_epoch=rig.device.epoch + 1)
    return HealthProbed(health=health, reason="")


def aborted_by_another(rig: Rig, job: int) -> DeviceFaulted:
    """Return the end of a job that somebody else's reset brought."""
    return fault_told(
        "aborted",
        0x0606,
        job=job,
        ticket=rig.state.jobs[job].ticket,
        epoch=rig.state.device.epoch,
        generation=rig.state.jobs[job].generation,
        quiescent=True,
        reason="aborted",
        health=attrs.evolve(healthy(0), device_epoch=rig.device.epoch + 1),
    )


def served() -> Rig:
    """Return a rig with two requests, one of them in flight."""
    rig = Rig(resets=True)
    for number in range(2):
        rig.submit([number + 1, 2], seed=number, max_tokens=6, ignore_eos=True)
    rig.run(until=lambda: bool(rig.device.running))
    return rig


@pytest.mark.parametrize("told_by", ["job", "health"])
def test_the_device_is_looked_at_not_reset_and_nobody_is_to_blame(told_by: str) -> None:
    """A job that was aborted by it, or a health that names another epoch, tells the same."""
    rig = served()
    if told_by == "job":
        fault = aborted_by_another(rig, min(rig.state.jobs))
        rig.device.drop_jobs()
        rig.interrupt(fault)
    else:
        rig.device.drop_jobs()
        rig.interrupt(health_now(rig))
    rig.run()
    assert levels(rig) == [INSPECT] and rig.state.device.state == "serving"
    (first,) = rig.events("device", "escalate")[:1]
    assert (first.data["cause"], first.data["rung"]) == ("epoch changed by another (row 22)", 6)
    suspended = rig.events("request", "suspend")
    assert suspended and not any(event.data["suspect"] for event in suspended)
    assert rig.state.device.device_epoch == rig.device.epoch == 2
    assert not rig.state.ladder.guilt
    rig.check_answers()
    rig.close()


@pytest.mark.parametrize(("after_s", "lost"), [(590, True), (601, False)])
def test_the_second_within_ten_minutes_is_another_owner(after_s: int, lost: bool) -> None:
    rig = served()
    rig.device.drop_jobs()
    rig.interrupt(health_now(rig))
    rig.run()
    rig.device.clock.advance(after_s * SECOND)
    rig.interrupt(health_now(rig))
    rig.run()
    assert (rig.state.device.state == "lost") == lost
    if lost:
        assert rig.state.device.lost_rung == 8 and "another owner" in rig.state.device.reason
    else:
        assert levels(rig) == [INSPECT, INSPECT]
    rig.close()


def test_the_second_while_the_first_is_proven_is_another_owner_too() -> None:
    rig = served()
    rig.device.drop_jobs()
    rig.interrupt(health_now(rig))
    rig.run(until=lambda: rig.state.device.state == "recovering" and bool(rig.device.running))
    fault = aborted_by_another(rig, min(rig.state.jobs))
    rig.device.drop_jobs()
    rig.interrupt(fault)
    rig.run()
    assert (rig.state.device.state, rig.state.device.lost_rung) == ("lost", 8)
    rig.close()


def test_a_reset_of_its_own_is_nobody_elses() -> None:
    """After rung 6 the device is in another epoch, and says so whenever it is asked."""
    rig = served()
    fault = attrs.evolve(
        aborted_by_another(rig, min(rig.state.jobs)), kind="device", code=0x0801, health=None
    )
    rig.device.drop_jobs()
    rig.interrupt(fault)
    rig.run()
    assert levels(rig) == [4] and rig.state.device.device_epoch == 2
    rig.interrupt(HealthProbed(health=attrs.evolve(healthy(0), device_epoch=2), reason=""))
    assert rig.state.device.state == "serving"
    rig.run()
    rig.check_answers()
    rig.close()


def test_one_that_is_seen_only_at_a_reset_counts_too() -> None:
    """What finds its configuration gone begins at rung 5; the report tells of the rest."""
    rig = served()
    for count in (1, 2):
        rig.device.epoch += 1
        rig.device.drop_jobs()
        rig.interrupt(
            attrs.evolve(
                aborted_by_another(rig, min(rig.state.jobs)), kind="call", code=0x0702, health=None
            )
        )
        rig.run(until=lambda: rig.state.device.state in ("serving", "lost"))
        assert rig.state.device.state == ("serving" if count == 1 else "lost")
        rig.submit([9, 2], max_tokens=6, ignore_eos=True)
        rig.run(until=lambda: bool(rig.device.running))
    assert levels(rig) == [2, 2] and rig.state.device.lost_rung == 8
    rig.close()


def test_a_reset_of_its_own_that_did_more_than_asked_is_nobody_elses() -> None:
    rig = served()
    rig.device.resets.extend([{"epoch_after": 2}, {"epoch_before": 2, "epoch_after": 2}])
    fault = attrs.evolve(aborted_by_another(rig, min(rig.state.jobs)), kind="ccu", health=None)
    rig.device.drop_jobs()
    rig.interrupt(fault)
    rig.run()
    assert levels(rig) == [1, 2] and not rig.state.ladder.epoch_changes_ns
    rig.close()
