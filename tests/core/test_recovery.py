"""The recovery ladder on a device in plain Python (R14, G2, G5, G7, G12; 9.2, 9.3).

Whatever the device does, a fault ends in service with the same text as without it, or, when the
budgets are spent, in `lost` with everybody told. Every step is held against all invariants by the
rig, and every journal against replay.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import msgspec
import pytest
from support.fake_device import FakeDevice, healthy
from support.rig import Rig
from support.script import small_artifact
from support.strikes import (
    CCU,
    DMA,
    REJECTED,
    STICKY,
    begin,
    fault,
    levels,
    run_to_job,
    strike,
    strike_now,
)
from support.told import fault_told, stall_told

from laneway.engine import Request, RequestRejectedError, Stream
from laneway.engine.effects import CancelJob, ConfigureModel, ProbeHealth, SubmitJob
from laneway.engine.inputs import (
    CapabilitiesLost,
    Completed,
    ConfigureFailed,
    DeviceFaulted,
    HealthFacts,
    HealthProbed,
    Input,
    RequestSubmitted,
    ResetFinished,
)

SECOND_NS = 1_000_000_000


def points(stride: int = 1) -> Iterator[Rig]:
    """Yield the script stopped after every so many actions."""
    whole = begin().run()
    for count in range(0, whole + 1, stride):
        rig = begin()
        assert rig.run_actions(count, seen=count - stride)
        rig.replays = count % 11 == 0
        yield rig


def finish(rig: Rig) -> None:
    """Run to the end: all is served, all texts are those of runs without a fault."""
    rig.run()
    assert rig.state.device.state == "serving", rig.state.device
    assert rig.engine.ready()
    assert rig.state.ladder.recovery is None and rig.state.ladder.breaker == "closed"
    rig.check_answers(ended_early=refused(rig))
    rig.check_idle()
    rig.close()


def refused(rig: Rig) -> list[Stream]:
    """Return the streams of requests that came while the model was recovering (R14.1)."""
    streams = [one.stream for one in rig.streams]
    return [one for one in streams if is_refused(one)]


def is_refused(stream: Stream) -> bool:
    error = stream.result().error
    return isinstance(error, RequestRejectedError) and error.reason == "model_not_ready"


@pytest.mark.parametrize(
    ("kind", "code", "expected"),
    [
        ("ccu", CCU, [1]),
        ("dma", DMA, [1]),
        ("aborted", 0x0606, [1]),
        ("lost", 0x0607, [1]),
    ],
)
def test_a_fault_of_the_running_job_at_every_point(
    kind: str, code: int, expected: list[int]
) -> None:
    hit = 0
    for rig in points(stride=1 if kind == "ccu" else 2):
        if not any(job.state == "submitted" for job in rig.state.jobs.values()):
            continue
        strike_now(rig, kind, code)
        assert not rig.engine.ready()
        generation = rig.state.models[1].generation
        finish(rig)
        assert levels(rig) == expected
        if rig.events("model", "reconfigure"):
            (event,) = rig.events("model", "reconfigure")
            assert event.generation == generation + 1, "G12: a reset begins a new generation"
        hit += 1
    assert hit > 3


def abnormal(rig: Rig, golden: str) -> None:
    """Let the next job of requests have abnormal numbers, and the golden run after it a verdict."""

    def hook(effect: SubmitJob, done: Completed) -> Input:
        if effect.origin != "request":
            return done
        rig.device.on_result = None
        rig.device.verdict = golden
        rows = tuple(msgspec.structs.replace(row, token=-1, fault="numeric") for row in done.rows)
        return attrs.evolve(done, rows=rows)

    rig.device.on_result = hook


def test_abnormal_numbers_have_a_golden_run_decide_first() -> None:
    """Row 12, R14.7: equal, and service goes on without a reset; different, and one follows."""
    for golden, expected in (("equal", []), ("token 3 differs", [2])):
        rig = Rig(resets=True)
        for number in range(5):
            rig.submit([number + 1, 2], seed=number, ignore_eos=True)
        abnormal(rig, golden)
        if expected:
            rig.run(until=lambda rig=rig: bool(levels(rig)))  # type: ignore[misc]
            rig.device.verdict = "equal"
        rig.run()
        assert levels(rig) == expected
        assert [event.trigger for event in rig.events("model", "examine", "acquit")] == (
            ["examine"] if expected else ["examine", "acquit"]
        )
        rig.check_answers(ended_early=[one.stream for one in rig.streams if expected])
        assert rig.state.device.state == ("serving" if expected else "degraded")
        rig.close()


@pytest.mark.parametrize("code", [STICKY, 0x0F01, 0x08FF])
def test_a_fault_of_the_device_at_every_point(code: int) -> None:
    for rig in points(stride=7):
        epoch = rig.state.device.epoch
        rig.interrupt(fault(rig, "device", code))
        finish(rig)
        assert levels(rig) == [4]
        assert rig.state.device.epoch == epoch + 1


def test_a_contained_exception_costs_a_buffer_and_no_reset() -> None:
    """Row 6: the device is quiescent and sure that nothing was written."""
    hit = 0
    for rig in points():
        if not any(job.state == "submitted" for job in rig.state.jobs.values()):
            continue
        (job,) = rig.state.jobs.values()
        buffer = job.buffer
        strike_now(rig, "ccu", CCU, quiescent=True, kv_effect="none")
        assert rig.state.buffers[buffer].state == "quarantined"
        assert rig.state.device.state == "degraded"
        rig.run()
        rig.check_answers()
        assert levels(rig) == []
        assert not rig.events("lane", "suspect"), "nothing is in doubt but the buffer"
        rig.close()
        hit += 1
    assert hit > 5


def test_a_second_exception_in_its_window_is_not_contained_any_more() -> None:
    """Row 6: two within ten minutes lead to a reset of the CCU; further apart they do not."""
    for apart_ns, expected in ((599 * SECOND_NS, [1]), (601 * SECOND_NS, [])):
        rig = begin()
        for _ in range(2):
            strike(rig, "ccu", CCU, quiescent=True, kv_effect="none")
            rig.run()
            rig.device.clock.advance(apart_ns)
            rig.submit([4, 4], seed=9, ignore_eos=True)
        rig.run()
        rig.check_answers()
        assert levels(rig) == expected
        rig.close()


def test_a_confirmed_hang_is_reset() -> None:
    """Row 8, E16: suspect, confirmed, reset; the others wait and are served."""
    for stage in ("confirm", "cap"):
        rig = begin()
        run_to_job(rig)
        (job,) = rig.state.jobs.values()
        rig.device.holding = True
        stalled = stall_told(job, stage)
        rig.interrupt(stalled)
        rig.run(until=lambda rig=rig: bool(levels(rig)))  # type: ignore[misc]
        rig.device.holding = False
        finish(rig)
        assert levels(rig) == [1]


def hang(rig: Rig) -> None:
    """Let the job in flight hang for certain."""
    run_to_job(rig)
    (job,) = rig.state.jobs.values()
    rig.device.holding = True
    rig.interrupt(stall_told(job, "confirm"))


@pytest.mark.parametrize(
    ("cancels", "waited_s", "expected"),
    [("ends", 0, []), (0, 2, [1]), (0x0609, 2, [1]), (0x0106, 0, [1])],
)
def test_a_hung_job_is_cancelled_where_the_device_can(
    cancels: int | str, waited_s: int, expected: list[int]
) -> None:
    """Row 8, rung 3, E6: once, for two seconds; a job that ends by it needs no reset."""
    rig = begin(verified=("CANCEL",), cancels=cancels)
    hang(rig)
    started_ns = rig.device.clock.now_ns()
    done = (lambda: bool(levels(rig))) if expected else (lambda: not rig.state.jobs)
    rig.run(until=done)
    assert (rig.device.clock.now_ns() - started_ns) // SECOND_NS == waited_s
    assert len([e for e in rig.device.executed if isinstance(e, CancelJob)]) == 1
    rig.device.holding = False
    rig.run()
    assert levels(rig) == expected
    assert rig.state.device.state == ("serving" if expected else "degraded")
    rig.check_answers()
    rig.close()


def test_a_hung_job_is_not_cancelled_without_evidence() -> None:
    rig = begin()
    hang(rig)
    rig.device.holding = False
    finish(rig)
    assert levels(rig) == [1]
    assert not [e for e in rig.device.executed if isinstance(e, CancelJob)]


def test_rungs_are_climbed_until_one_helps() -> None:
    """Rows 23, 24: what a reset says of itself is not believed; each failure is the next rung."""
    lies: list[dict[str, Any]] = [
        {"code": 0x0805, "reason": "failed"},
        {"code": 0x0806, "reason": "refused"},
        {"code": 0x0807, "reason": "unverified"},
        {"health": None},
        {"health": attrs.evolve(healthy(0), state="unhealthy")},
        {"health": attrs.evolve(healthy(0), sticky=STICKY)},
        {"used_bytes_after": (1 << 30,)},
        {"epoch_after": 99},
        {"health": attrs.evolve(healthy(0), counters=counters(submitted=3, finished=1))},
    ]
    for lie in lies:
        rig = begin()
        run_to_job(rig)
        rig.device.resets.append(lie)
        strike_now(rig)
        finish(rig)
        assert levels(rig) == [1, 2], lie


def counters(**told: int) -> tuple[tuple[str, int], ...]:
    names = ("submitted", "pending", "running", "finished", "failed", "aborted")
    return tuple((name, told.get(name, 0)) for name in names)


def test_jobs_that_are_not_accounted_for_need_the_reset_of_the_device() -> None:
    rig = begin()
    rig.device.resets.append({"jobs_unaccounted": 1})
    strike(rig)
    finish(rig)
    assert levels(rig) == [1, 4]


def test_golden_decides_whether_a_reset_helped() -> None:
    """V6: golden that differs after a reset is the next rung, not a failed load."""
    rig = begin()
    strike(rig)
    rig.device.verdict = "token 3 differs"
    rig.run(until=lambda: len(levels(rig)) == 2)
    rig.device.verdict = "equal"
    finish(rig)
    assert levels(rig) == [1, 2]


def test_a_configuration_that_fails_after_a_reset_is_the_next_rung() -> None:
    rig = begin()
    strike(rig)

    def refuse(effect: ConfigureModel) -> Input | None:
        del rig.device.overrides[ConfigureModel]
        return ConfigureFailed(model=effect.model, code=0x0701, reason="told to")

    rig.device.overrides[ConfigureModel] = refuse
    finish(rig)
    assert levels(rig) == [1, 2]


def test_a_device_that_stays_broken_is_lost_within_its_budget() -> None:
    """I10, G7: resets are bounded, every client is told once, readiness is false."""
    rig = begin()
    run_to_job(rig)
    for _ in range(20):
        rig.device.resets.append({"code": 0x0805, "reason": "failed"})
    started_ns = rig.device.clock.now_ns()
    strike_now(rig)
    rig.run()
    assert levels(rig) == [1, 2, 4, 4, 4], "one climb, then the resets of the device in its budget"
    assert rig.state.device.state == "lost" and not rig.engine.ready()
    waited_ns = rig.device.clock.now_ns() - started_ns
    assert waited_ns >= (60 + 120) * SECOND_NS, "R6 pauses 60 s, then 120 s"
    (lost,) = rig.events("device", "lose")
    assert lost.data["rung"] == 7
    assert all(one.stream.result().error is not None for one in rig.streams)
    rig.close()
    assert rig.device.closes == [True], "D13: a device that is not well is left alone"


def test_budgets_and_restarts_survive_the_process() -> None:
    """E28: the fourth process in an hour finds no rung left but the last."""
    steps: list[Any] = []
    for process in range(4):
        rig = Rig(device=FakeDevice(artifact=small_artifact), steps=steps, resets=True)
        rig.device.resets.extend({"code": 0x0805, "reason": "failed"} for _ in range(9))
        rig.submit([1, 2])
        rig.interrupt(fault_of_device(rig))
        rig.run()
        assert rig.state.device.state == "lost"
        assert rig.events("device", "lose")[-1].data["rung"] == (7 if process < 3 else 8)
        assert levels(rig) == ([4, 4, 4] if process == 0 else []), "R6: three an hour"
        rig.close()
        steps = rig.steps


def fault_of_device(rig: Rig) -> DeviceFaulted:
    (model,) = rig.state.models.values()
    return fault_told(
        "device",
        STICKY,
        epoch=rig.state.device.epoch,
        generation=model.generation,
        health=healthy(0),
    )


def test_a_budget_is_there_again_after_its_window() -> None:
    rig = begin()
    for round_ in range(4):
        strike(rig)
        rig.run()
        rig.device.clock.advance((1 if round_ != 2 else 1000) * SECOND_NS)
        rig.submit([round_ + 1, 2], seed=round_, ignore_eos=True)
    rig.run()
    assert levels(rig) == [1, 1, 2, 1], "two of the CCU in ten minutes, then the next rung"
    rig.close()


@pytest.mark.parametrize("kind", ["wedged", "lost"])
def test_a_device_that_is_gone_is_not_reset(kind: str) -> None:
    """Row 16: no more calls, everybody is told, a new process is asked for."""
    rig = begin()
    rig.run_actions(20)
    rig.post(HealthProbed(health=attrs.evolve(healthy(0), state=kind), reason=""))
    rig.run()
    assert rig.state.device.state == "lost" and levels(rig) == []
    rig.close()


def test_a_device_that_is_unwell_is_given_time_to_become_well() -> None:
    """Row 14: no work meanwhile; after 30 s it is asked again, and that answer decides."""
    for well, expected in ((True, []), (False, [4])):
        rig = begin()
        rig.run_actions(20)
        unwell = attrs.evolve(healthy(0), state="unhealthy")
        rig.interrupt(HealthProbed(health=unwell, reason=""))
        assert rig.state.device.state == "suspect"
        if not well:
            rig.device.overrides[ProbeHealth] = partial(answer_once, rig, unwell)
        started_ns = rig.device.clock.now_ns()
        finish(rig)
        assert levels(rig) == expected
        assert rig.device.clock.now_ns() - started_ns >= 30 * SECOND_NS


def test_a_degraded_device_that_was_unwell_is_degraded_afterwards() -> None:
    """G12: what is quarantined still is, whatever the device says of its health."""
    rig = begin()
    strike(rig, "ccu", CCU, quiescent=True, kv_effect="none")
    assert rig.state.device.state == "degraded"
    rig.interrupt(HealthProbed(health=attrs.evolve(healthy(0), state="unhealthy"), reason=""))
    assert rig.state.device.state == "suspect"
    rig.run()
    assert rig.state.device.state == "degraded"
    rig.check_answers()
    rig.close()


def answer_once(rig: Rig, health: HealthFacts, asked: ProbeHealth) -> Input:
    del rig.device.overrides[ProbeHealth]
    return HealthProbed(health=health, reason="")


def test_advice_of_an_unwell_device_is_taken_at_once() -> None:
    """Row 14: where the device says which reset it needs, that one is run."""
    for advised, level in ((1, 1), (2, 2), (4, 4)):
        rig = begin()
        rig.run_actions(20)
        unwell = attrs.evolve(healthy(0), state="unhealthy", advised=advised)
        rig.interrupt(HealthProbed(health=unwell, reason=""))
        finish(rig)
        assert levels(rig) == [level]


def test_versions_that_change_with_a_reset_end_the_service() -> None:
    """Row 26: another firmware is another device; nothing is published on it."""
    rig = begin()
    rig.device.resets.append({"firmware_version": "2"})
    strike(rig)
    rig.run()
    assert rig.state.device.state == "lost"
    assert rig.events("device", "lose")[-1].data["rung"] == 8
    assert "firmware_version was 1, is 2" in rig.engine.health().reason
    rig.close()


def test_capabilities_that_are_gone_after_a_reset_end_the_service() -> None:
    """SCN-23: what it was allowed to do is not evident any more, so nothing is published on it."""
    rig = begin()

    def tell_first(taken: Input) -> None:
        if isinstance(taken, ResetFinished):
            rig.engine._inbox._queue.appendleft(CapabilitiesLost(names=("IN_FLIGHT", "CANCEL")))

    rig.device.meanwhile = tell_first
    strike(rig)
    rig.run()
    assert rig.state.device.state == "lost" and not rig.engine.ready()
    assert rig.events("device", "lose")[-1].data["rung"] == 8
    assert "gone since the reset (row 26): IN_FLIGHT, CANCEL" in rig.engine.health().reason
    assert all(one.stream.ended for one in rig.streams)
    rig.close()


def test_capabilities_told_outside_of_a_reset_change_nothing() -> None:
    rig = begin()
    run_to_job(rig)
    rig.interrupt(CapabilitiesLost(names=("IN_FLIGHT",)))
    finish(rig)
    assert not rig.events("device", "lose")


def test_a_reset_by_another_process_is_taken_for_done_once() -> None:
    """Row 22: the device is looked at, not reset; a second owner in ten minutes is the end."""
    rig = begin()
    rig.device.submits.append(0x0201)
    rig.run()
    rig.check_answers()
    assert levels(rig) == [0] and rig.state.device.state == "serving"
    rig.device.submits.append(0x0201)
    rig.submit([7, 7], seed=3)
    rig.run()
    assert levels(rig) == [0] and rig.state.device.state == "lost"
    assert "another owner" in rig.engine.health().reason
    rig.close()


def test_three_refusals_in_a_row_have_the_configuration_reset() -> None:
    """Row 3."""
    rig = begin()
    rig.device.submits.extend([REJECTED] * 3)
    rig.run()
    assert levels(rig) == [2]
    assert rig.state.device.state == "serving"
    rig.close()


def test_a_reset_waits_for_what_is_in_flight_and_withdraws_what_is_not() -> None:
    """G2: a job that was not handed over is taken back, and its request is served later."""
    withdrawn = 0
    for rig in points():
        if not any(job.state == "planned" for job in rig.state.jobs.values()):
            continue
        rig.interrupt(fault(rig, "device", STICKY))
        finish(rig)
        assert levels(rig) == [4]
        withdrawn += len(rig.events("job", "withdraw"))
    assert withdrawn > 5


def test_a_drain_is_bounded() -> None:
    """A job that does not end within the bound is given up by the reset (cascade guard)."""
    rig = begin()
    run_to_job(rig)
    rig.device.holding = True
    started_ns = rig.device.clock.now_ns()
    rig.interrupt(fault(rig, "device", STICKY))
    rig.run(until=lambda: bool(levels(rig)))
    waited_ns = rig.device.clock.now_ns() - started_ns
    assert 30 * SECOND_NS <= waited_ns < 31 * SECOND_NS
    (reset,) = rig.events("device", "reset")
    assert [job for job, _ in reset.data["jobs"]] == [rig.device.executed_jobs[-1].job]
    rig.device.holding = False
    finish(rig)


def test_a_reset_that_is_due_comes_with_whatever_comes_first() -> None:
    """I12: a request that is refused at that moment has brought about nothing."""
    rig = begin()
    run_to_job(rig)
    rig.device.holding = True
    rig.interrupt(fault(rig, "device", STICKY))
    rig.device.clock.advance(31 * SECOND_NS)
    refused_one = rig.engine.submit(Request(model="absent", prompt=(1,)))
    rig.run(until=lambda: bool(levels(rig)))
    (due,) = [step for step in rig.steps if any(e.trigger == "reset" for e in step.events)]
    assert isinstance(due.taken, RequestSubmitted) and due.taken.alias == "absent"
    assert refused_one.result().error is not None
    rig.device.holding = False
    finish(rig)


def test_faults_in_the_middle_of_a_recovery_climb_and_end() -> None:
    """A fault while golden runs after a reset reopens the breaker and counts double (9.3)."""
    rig = begin()
    run_to_job(rig)
    strike_now(rig)
    rig.run(until=lambda: rig.state.device.state == "recovering" and bool(rig.device.running))
    strike_now(rig)
    finish(rig)
    assert levels(rig) == [1, 2]
    assert [event.data["stamps"] for event in rig.events("device", "reset")] == [1, 2]


@pytest.mark.parametrize("verdict", ["equal", "token 3 differs"])
def test_what_a_proof_says_is_nothing_once_the_next_reset_is_decided(verdict: str) -> None:
    """A golden run that was in flight when another fault came cannot end the model any more."""
    rig = begin()
    run_to_job(rig)
    taken = fault(rig, "ccu", CCU)
    rig.device.drop_jobs()
    rig.interrupt(taken)
    rig.run(until=lambda: rig.state.device.state == "recovering" and bool(rig.device.running))
    rig.device.verdict = verdict
    rig.interrupt(fault(rig, "device", STICKY))
    rig.run(until=lambda: len(levels(rig)) == 2)
    rig.device.verdict = "equal"
    finish(rig)
    assert levels(rig) == [1, 4] and not rig.events("model", "fail")


@pytest.mark.parametrize("drain", [True, False])
def test_closing_at_every_point_of_a_recovery(drain: bool) -> None:
    def start() -> Rig:
        rig = begin()
        strike(rig)
        return rig

    whole = start().run()
    for count in range(0, whole, 5):
        rig = start()
        rig.replays = count % 3 == 0
        assert rig.run_actions(count, seen=count - 5)
        rig.close(drain=drain)
        if drain:
            rig.check_answers()
        assert all(one.stream.ended for one in rig.streams)


def test_each_reset_has_a_record_before_and_after() -> None:
    """E27, R14.7: cause, what was in flight, what was observed."""
    rig = begin()
    strike(rig)
    finish(rig)
    (reset,) = rig.events("device", "reset")
    assert reset.data["cause"].startswith("exception") and reset.data["rung"] == 4
    after = [step.taken for step in rig.steps if isinstance(step.taken, ResetFinished)]
    assert len(after) == 1 and after[0].health is not None and after[0].level == 1


def test_a_further_fault_of_the_device_at_every_point_of_a_recovery() -> None:
    """G2: also a job of the proof that was not handed over is withdrawn, and no reset overtakes it.

    What was handed over is waited for; either way the climb ends in service.
    """
    withdrawn = 0
    for count in range(0, 88, 2):
        rig = begin()
        strike(rig)
        rig.replays = count % 3 == 0
        assert rig.run_actions(count, seen=count - 2)
        rig.interrupt(fault(rig, "device", STICKY))
        finish(rig)
        lost = [event for event in rig.events("job", "lose") if event.source == "planned"]
        assert not lost, f"G2: {lost} while its buffer was preparing"
        withdrawn += len(rig.events("job", "withdraw"))
    assert withdrawn >= 2
