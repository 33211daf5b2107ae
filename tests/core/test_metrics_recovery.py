"""Metrics of recovery are what the device was asked for and what became of it.

Expected counts come from the resets that the device ran and the lies it was told to tell.

Source: R14.7, R15.4, I8.
"""

from collections import Counter
from typing import Any

import attrs
import pytest
from support.fake_device import FakeDevice, healthy
from support.rig import Rig
from support.script import small_artifact
from support.strikes import STICKY, begin, strike

from laneway.engine.distribution import Distribution
from laneway.engine.effects import RunReset
from laneway.engine.families import picture
from laneway.engine.metrics import Metrics
from laneway.engine.picture import MetricsPicture

WORSE = (("submitted", 3), *((n, 0) for n in ("pending", "running", "finished", "failed")))


def counted(told: MetricsPicture, name: str) -> dict[tuple[str, ...], Any]:
    """Return the series of a family without the label of the engine."""
    (family,) = (one for one in told.families if one.name == f"laneway:{name}")
    return {labels[1:]: value for labels, value in family.series}


def check_fold(rig: Rig) -> MetricsPicture:
    """Hold the live numbers against a fold of the steps, and the breaker against the state."""
    metrics = Metrics()
    for step in rig.steps:
        metrics.observe(step)
    told = rig.engine.metrics()
    assert picture(metrics) == told
    assert told.value("metrics_failures_total") == 0
    states = {labels[0]: value for labels, value in counted(told, "device_breaker").items()}
    assert states == {
        state: int(state == rig.state.ladder.breaker) for state in ("closed", "half_open", "open")
    }
    asked = [effect.level for effect in rig.device.executed if isinstance(effect, RunReset)]
    results = counted(told, "device_resets_total")
    by_level = Counter({str(level): count for level, count in Counter(asked).items()})
    ended: Counter[str] = Counter()
    for (level, _, _), count in results.items():
        ended[level] += count
    pending = rig.state.device.state in ("resetting", "recovering")
    assert sum(by_level.values()) - sum(ended.values()) == int(pending)
    assert pending or by_level == ended
    return told


@pytest.mark.parametrize(
    ("lie", "result"),
    [
        ({"code": 0x0805, "reason": "failed"}, "failed"),
        ({"health": None}, "V1"),
        ({"health": attrs.evolve(healthy(0), sticky=STICKY)}, "V1"),
        ({"used_bytes_after": (1 << 30,)}, "V3"),
        ({"health": attrs.evolve(healthy(0), counters=(*WORSE, ("aborted", 0)))}, "V4"),
        ({"epoch_after": 99}, "V5"),
    ],
)
def test_each_reset_has_one_result(lie: dict[str, Any], result: str) -> None:
    rig = begin()
    rig.device.resets.append(lie)
    strike(rig)
    rig.run()
    rig.check_answers()
    told = check_fold(rig)
    assert counted(told, "device_resets_total") == {
        ("1", "7", result): 1,
        ("2", "7", "verified"): 1,
    }
    assert counted(told, "recovery_rungs_total") == {("4",): 1, ("5",): 1}
    rig.close()


def test_a_proof_that_fails_and_versions_that_change() -> None:
    rig = begin()
    strike(rig)
    rig.device.verdict = "token 3 differs"
    rig.run(until=lambda: sum(isinstance(e, RunReset) for e in rig.device.executed) == 2)
    rig.device.verdict = "equal"
    rig.device.resets.append({"firmware_version": "2"})
    rig.run()
    told = check_fold(rig)
    first, second = ("1", "7", "proof"), ("2", "7", "V2")
    assert counted(told, "device_resets_total") == {first: 1, second: 1}
    assert counted(told, "recovery_rungs_total") == {("4",): 1, ("5",): 1, ("8",): 1}
    (took,) = counted(told, "device_recovery_seconds").values()
    assert isinstance(took, Distribution) and took.count == 0, "it never served again"


def test_requests_and_time_of_a_recovery() -> None:
    """Suspended and resumed are counted as decided; the time is that between two steps."""
    rig = begin()
    strike(rig)
    at_ns = rig.steps[-1].at_ns
    rig.run()
    rig.check_answers()
    told = check_fold(rig)
    suspends = rig.events("request", "suspend")
    expected = Counter("suspect" if event.data["suspect"] else "innocent" for event in suspends)
    assert counted(told, "requests_suspended_total") == {
        (how,): count for how, count in expected.items()
    }
    assert told.value("requests_resumed_total") == len(rig.events("request", "resume"))
    (served,) = (s.at_ns for s in rig.steps for e in s.events if e.trigger == "serve")
    (reset,) = (s.at_ns for s in rig.steps for e in s.events if e.trigger == "reset")
    (took,) = counted(told, "device_recovery_seconds").values()
    assert isinstance(took, Distribution)
    assert (took.count, took.total) == (1, served - at_ns)
    assert told.value("device_last_reset_timestamp") == reset / 1e9
    rig.close()


def test_they_agree_after_every_action_and_over_a_kill() -> None:
    rig = begin()
    strike(rig)
    while rig.state.device.state != "recovering":
        assert rig.act()
        check_fold(rig)
    assert rig.engine.metrics().value("device_breaker", state="half_open") == 1
    live = len(rig.state.requests) - len(rig.state.suspended)
    before = counted(rig.engine.metrics(), "requests_suspended_total")
    again = Rig(device=FakeDevice(artifact=small_artifact), steps=list(rig.steps), resume=True)
    again.run()
    told = again.engine.metrics()
    assert counted(told, "device_resets_total") == {("1", "7", "cut_off"): 1}
    abandoned = counted(told, "requests_suspended_total").get(("abandoned",), 0)
    assert abandoned == live
    assert sum(counted(told, "requests_suspended_total").values()) == sum(before.values()) + live
    again.close()


def test_a_device_at_rest_has_a_closed_breaker_and_no_reset() -> None:
    rig = begin()
    rig.run()
    told = check_fold(rig)
    assert counted(told, "device_resets_total") == {}
    assert counted(told, "device_last_reset_timestamp") == {}
    rig.close()
