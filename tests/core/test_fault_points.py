"""A fault at every point: one true end state, everybody told once, nothing reused (R14, G1 to G8).

With a reset budget of 0 every device fault ends in ``lost``.
"""

from collections.abc import Callable

import attrs
import pytest
from support.fake_device import healthy
from support.lost import check_lost
from support.rig import Rig
from support.script import begin, points
from support.told import fault_told

from laneway.engine.effects import RestoreBuffer, SubmitJob
from laneway.engine.inputs import (
    BufferRestored,
    CcuRecord,
    Completed,
    DeviceFaulted,
    Input,
    RestoreFailed,
    RowResult,
    SubmitAccepted,
)

RECORD = CcuRecord(
    chip=0, ccu=1, code=7, subcode=2, task_index=3, cmd_index=4, pc=5, text="bad command"
)


def faulted(job: int | None, kind: str) -> DeviceFaulted:
    """Return a fault of a job, or of the device alone."""
    return fault_told(
        kind,
        0x0603,
        job=job,
        ticket=901,
        epoch=1,
        generation=1,
        record=RECORD if kind == "ccu" else None,
        health=healthy(0),
    )


def restart(rig: Rig) -> None:
    """Let the next incarnation run on the same steps: it starts clean (G21)."""
    again = Rig(steps=rig.steps)
    again.streams = []
    again.submit([3, 3], seed=5)
    again.run()
    again.check_answers()
    again.check_idle()
    again.close()


@pytest.mark.parametrize("kind", ["ccu", "dma", "numeric", "aborted", "lost", "call"])
def test_a_fault_of_the_running_job_at_every_point(kind: str) -> None:
    hit = 0
    for rig in points(stride=1 if kind == "ccu" else 7):
        if not rig.state.jobs:
            continue
        (job,) = rig.state.jobs.values()
        before = (job.buffer, job.rows[0].lane)
        rig.device.drop_jobs()
        rig.interrupt(faulted(job.number, kind))
        hit += 1
        live = {event.entities[0] for event in rig.events("request", "fail")}
        assert rig.state.buffers[before[0]].state == "quarantined"
        assert rig.state.lanes[before[1]].state == "unknown"
        rig.device.holding = True
        rig.run()
        check_lost(rig, live)
        rig.close()
        assert rig.device.closes == [True], "a lost device is left alone"
        if hit % 5 == 0:
            restart(rig)
    assert hit > 7


@pytest.mark.parametrize("kind", ["device", "call"])
def test_a_fault_of_no_job_at_every_point(kind: str) -> None:
    for rig in points(stride=4):
        rig.interrupt(faulted(None, kind))
        live = {event.entities[0] for event in rig.events("request", "fail")}
        rig.run()
        check_lost(rig, live)
        rig.close()


def test_a_fault_at_every_point_of_the_closing() -> None:
    for count in range(0, 60, 2):
        rig = begin()
        rig.run_actions(20)
        rig.ask_close(drain=count % 4 == 0)
        rig.run_actions(count)
        rig.device.drop_jobs()
        rig.interrupt(faulted(None, "device"))
        rig.close()
        rig.check_answers(ended_early=[one.stream for one in rig.streams])


def test_a_fault_at_every_point_of_a_load() -> None:
    for count in range(0, 34, 2):
        rig = Rig(load=False)
        rig.ask_load()
        rig.run_actions(count)
        rig.device.drop_jobs()
        rig.interrupt(faulted(None, "device"))
        rig.run()
        assert rig.state.device.state == "lost" and not rig.engine.ready()
        rig.close()
        restart(rig)


def test_the_first_answer_of_the_late_job_after_the_loss_changes_nothing() -> None:
    for rig in points(stride=4):
        rig.interrupt(faulted(None, "device"))
        rig.run()
        before = [event for event in rig.events_of_all() if event.machine != "buffer"]
        rig.run()
        after = [event for event in rig.events_of_all() if event.machine != "buffer"]
        assert before == after
        rig.close()


def test_no_submit_reaches_a_device_that_is_lost() -> None:
    for rig in points(stride=3):
        rig.interrupt(faulted(None, "device"))
        assert rig.state.device.state == "lost"
        handed_over = len(rig.device.executed_jobs)
        rig.run()
        assert len(rig.device.executed_jobs) == handed_over, "I10: submitted to a lost device"
        rig.close()


def test_abnormal_numbers_are_a_fault_of_the_device() -> None:
    for job in (2, 3, 4, 5):
        rig = begin()
        rig.device.on_result = numeric_in(job)
        rig.run()
        live = {event.entities[0] for event in rig.events("request", "fail")}
        check_lost(rig, live)
        assert all(63 not in one.stream.result().tokens[-1:] for one in rig.streams)
        rig.close()


def numeric_in(job: int) -> Callable[[SubmitJob, Completed], Input]:
    """Return a hook by which one job's numbers are abnormal."""
    bad = (RowResult(token=63, fault="numeric"),)
    return lambda asked, done: attrs.evolve(done, rows=bad) if asked.job == job else done


@pytest.mark.parametrize("job", [1, 2, 4])
def test_a_buffer_that_cannot_be_restored_is_quarantined(job: int) -> None:
    def answer_restore(effect: RestoreBuffer) -> Input:
        if effect.job == job:
            return RestoreFailed(buffer=effect.buffer, job=job, code=1, reason="told to")
        return BufferRestored(buffer=effect.buffer, job=effect.job)

    rig = Rig(load=False)
    rig.device.overrides[RestoreBuffer] = answer_restore
    rig.device._busy = Forgetful()
    rig.ask_load()
    rig.run()
    if rig.engine.ready():
        rig.submit([1, 2])
        rig.run()
    assert rig.state.device.state == "lost"
    states = [buffer.state for buffer in rig.state.buffers.values()]
    assert states.count("quarantined") >= 1
    rig.check_answers(ended_early=[one.stream for one in rig.streams])
    rig.close()
    restart(rig)


class Forgetful(dict[int, int]):
    """Busy buffers of a fake whose restores are answered by a test."""

    def __contains__(self, key: object) -> bool:
        return False


def test_a_late_acceptance_after_the_loss_is_recorded_only() -> None:
    rig = begin()
    rig.run_actions(6)
    rig.interrupt(faulted(None, "device"))
    rig.post(SubmitAccepted(job=2, ticket=990))
    rig.run()
    late = [step for step in rig.steps if isinstance(step.taken, SubmitAccepted)]
    assert late[-1].events == ()
    rig.close()
