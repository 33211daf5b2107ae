"""Late, doubled, stale, overtaking and effectless completions (I5, G13, E7, D6)."""

from collections.abc import Callable

import attrs
import msgspec
import pytest
from support.rig import Rig
from support.script import begin, finish_and_check, points
from support.told import fault_told

from laneway.engine.effects import SubmitJob
from laneway.engine.inputs import (
    BufferRestored,
    Completed,
    Input,
    JobProgressed,
    JobStalled,
    KvApplied,
    KvApplyFailed,
    RestoreFailed,
    RowResult,
    SubmitAccepted,
    SubmitDoubtful,
    SubmitRefused,
)


def last_done(rig: Rig) -> Completed | None:
    """Return the last completion the engine took."""
    done = [step.taken for step in rig.steps if isinstance(step.taken, Completed)]
    return done[-1] if done else None


def test_a_doubled_completion_at_every_point_changes_nothing() -> None:
    for rig in points(stride=3):
        done = last_done(rig)
        assert done is not None
        wrong = tuple(msgspec.structs.replace(row, token=63) for row in done.rows)
        rig.interrupt(attrs.evolve(done, rows=wrong))
        assert rig.steps[-1].events == ()
        finish_and_check(rig, ended=[])


@pytest.mark.parametrize("field", ["epoch", "generation"])
@pytest.mark.parametrize("by", [-1, 1])
def test_a_completion_of_another_epoch_or_generation_changes_nothing(field: str, by: int) -> None:
    for rig in points(stride=7):
        for job, ticket in rig.device.running:
            stale = Completed(
                job=job.job,
                ticket=ticket,
                epoch=job.epoch,
                generation=job.generation,
                flags=7,
                kv_effect="applied",
                engine_slot=1,
                rows=(RowResult(token=9),),
                times=last_done(rig).times,  # type: ignore[union-attr]
            )
            rig.interrupt(attrs.evolve(stale, **{field: getattr(stale, field) + by}))
            assert rig.steps[-1].events == ()
        finish_and_check(rig, ended=[])


UNKNOWN = 4_000

STRAYS: list[Input] = [
    SubmitAccepted(job=UNKNOWN, ticket=1),
    SubmitRefused(job=UNKNOWN, code=0x0601, reason="stray"),
    SubmitRefused(job=UNKNOWN, code=0x0801, reason="stray"),
    SubmitDoubtful(job=UNKNOWN, ticket=1, code=0x0602, reason="stray"),
    KvApplyFailed(job=UNKNOWN, lane=9_000, operation="COMMIT", code=1, unknown=True, reason=""),
    KvApplied(lanes=(1, 9_000)),
    JobProgressed(job=UNKNOWN, ticket=1, phase="exec"),
    JobStalled(job=UNKNOWN, ticket=1, stage="cap", phase="exec", age_ns=1, progress_age_ns=1),
    BufferRestored(buffer=9_000, job=UNKNOWN),
    BufferRestored(buffer=1, job=UNKNOWN),
    RestoreFailed(buffer=1, job=UNKNOWN, code=1, reason="stray"),
    RestoreFailed(buffer=9_000, job=UNKNOWN, code=1, reason="stray"),
    fault_told(
        "ccu",
        1,
        job=UNKNOWN,
        ticket=1,
        epoch=1,
        generation=1,
        quiescent=True,
        kv_effect="none",
        reason="stray",
    ),
]


@pytest.mark.parametrize("stray", STRAYS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("job", [UNKNOWN, 1, 2])
def test_what_matches_no_job_in_flight_is_recorded_only(stray: Input, job: int) -> None:
    for rig in points(stride=13):
        if job in rig.state.jobs:
            continue
        named = getattr(stray, "job", None) is not None
        taken = stray
        if named and job != UNKNOWN:
            taken = attrs.evolve(stray, job=job)  # type: ignore[arg-type]
        if isinstance(taken, BufferRestored | RestoreFailed) and job != UNKNOWN:
            buffer = rig.state.buffers.get(taken.buffer)
            if buffer is not None and buffer.job == job:
                continue
        rig.interrupt(taken)
        assert rig.steps[-1].taken is taken and rig.steps[-1].events == ()
        finish_and_check(rig, ended=[])


def test_every_completion_may_overtake_its_acceptance() -> None:
    rig = begin()
    rig.device.submits.extend(["early"] * 20)
    rig.run()
    for step in rig.steps:
        if isinstance(step.taken, Completed) and step.taken.job > 1:
            moved = [(e.machine, e.trigger) for e in step.events]
            assert moved.index(("job", "submit")) < moved.index(("job", "complete"))
    for step in rig.steps:
        if isinstance(step.taken, SubmitAccepted) and step.taken.job > 1:
            assert not step.events
    finish_and_check(rig, ended=[])


def test_cancel_with_an_overtaking_completion_at_every_point() -> None:
    for rig in points(stride=3):
        rig.device.submits.extend(["early"] * 20)
        rig.streams[1].stream.cancel()
        finish_and_check(rig, ended=[1])


def test_a_job_seen_running_completes() -> None:
    rig = begin()
    seen = []

    def meanwhile(taken: Input) -> None:
        if isinstance(taken, SubmitAccepted):
            seen.append(taken.job)
            for phase in ("h2d", "exec", "exec"):
                rig.device._post(JobProgressed(job=taken.job, ticket=taken.ticket, phase=phase))

    rig.device.meanwhile = meanwhile
    rig.run()
    assert len(rig.events("buffer", "run")) == len(seen) > 4
    finish_and_check(rig, ended=[])


def kv_effect(effect: str, job: int) -> Callable[[SubmitJob, Completed], Input]:
    """Return a hook that lets one job report another effect on KV."""
    return lambda asked, done: attrs.evolve(done, kv_effect=effect) if asked.job == job else done


@pytest.mark.parametrize("effect", ["none", "partial", "unknown"])
@pytest.mark.parametrize("job", [2, 3, 4, 5])
def test_a_completion_without_its_kv_costs_its_lane_and_no_token(effect: str, job: int) -> None:
    rig = begin()
    rig.device.on_result = kv_effect(effect, job)
    rig.run()
    (step,) = [s for s in rig.steps if isinstance(s.taken, Completed) and s.taken.job == job]
    moved = {event.trigger for event in step.events if event.machine == "lane"}
    assert ("rollback" if effect == "none" else "suspect") in moved and "commit" not in moved
    suspended = rig.events("request", "suspend")
    assert len(suspended) == (job in (2, 4)), "jobs 3 and 5 are the last of their requests"
    assert not any(event.data["suspect"] for event in suspended), "nobody is to blame"
    ended = [one.stream for one in rig.streams if one.stream.result().error is not None]
    assert not ended or rig.state.device.state == "lost"
    rig.check_answers(ended_early=ended)
    rig.close()


@pytest.mark.parametrize("effect", ["none", "partial", "unknown"])
@pytest.mark.parametrize("job", [1, 2, 3, 4])
def test_a_load_whose_trial_has_no_kv_ends(effect: str, job: int) -> None:
    rig = Rig(load=False)
    rig.device.on_result = kv_effect(effect, job)
    number = rig.ask_load()
    rig.run()
    assert number not in rig.state.models or rig.state.models[number].state in ("ready", "failed")
    rig.close()


def test_a_request_whose_parameters_leave_no_token_fails_alone() -> None:
    rig = begin()

    def hook(asked: SubmitJob, done: Completed) -> Input:
        if asked.rows[0].owner != 2:
            return done
        return attrs.evolve(done, rows=(RowResult(token=-1, fault="parameters"),))

    rig.device.on_result = hook
    rig.run()
    result = rig.streams[1].stream.result()
    assert (result.finish_reason, getattr(result.error, "http_status", 0)) == ("error", 400)
    assert rig.state.device.state == "serving"
    finish_and_check(rig, ended=[1])
