"""A suspected hang stops submissions, a confirmed one loses the device (E16, G4, R14.4)."""

from typing import Any

import attrs
import pytest
from support.fake_device import FakeDevice, healthy
from support.lost import check_lost
from support.recovery import faulted
from support.rig import Rig
from support.schedules import VERIFIED, Scheduled, Shape, wide
from support.script import begin, points
from support.told import stall_told

from laneway.engine import Limits
from laneway.engine.effects import CancelJob, RunReset
from laneway.engine.inputs import HealthFacts, HealthProbed, JobStalled
from laneway.engine.limits import SECOND


def stalled(rig: Rig, stage: str) -> JobStalled:
    (job,) = rig.state.jobs.values()
    return stall_told(job, stage)


def test_a_suspected_hang_stops_submissions_until_the_job_ends() -> None:
    held = 0
    for rig in points(stride=2):
        if not rig.state.jobs:
            continue
        rig.device.holding = True
        (job,) = rig.state.jobs
        rig.interrupt(stalled(rig, "suspect"))
        assert rig.state.device.state == "suspect" and not rig.engine.ready()
        rig.run()
        if job in rig.state.jobs:
            assert rig.state.device.state == "suspect"
            assert any(isinstance(step.taken, HealthProbed) for step in rig.steps)
            assert len(rig.state.jobs) == 1, "its buffers are kept, nothing new is submitted"
            held += 1
        rig.device.holding = False
        rig.run()
        assert rig.state.device.state == "serving" and rig.engine.ready()
        rig.check_answers()
        rig.check_idle()
        rig.close()
    assert held > 5


def test_the_answer_of_another_job_absolves_nobody() -> None:
    """Of two jobs in flight one is suspected: the end of the other opens nothing (E16, G4)."""
    for suspect, opened in ((0, False), (1, True)):
        it = Scheduled(Shape((1,), 7, "length_zero", 2, Limits()))
        rig = it.rig
        rig.device.holding = True
        for number in range(4):
            rig.submit([1, 2, 3], seed=number, max_tokens=3, ignore_eos=True)
        rig.run()
        first, second = rig.state.jobs.values()
        suspected = (second, first)[suspect]
        rig.interrupt(stall_told(suspected, "suspect"))
        planned = rig.state.next_job
        rig.device.finish_job()
        rig.run()
        assert (rig.state.device.state == "serving") == opened
        assert (rig.state.next_job > planned) == opened
        rig.device.holding = False
        rig.run()
        assert rig.state.device.state == "serving"
        rig.check_answers()
        rig.close()


@pytest.mark.parametrize("stage", ["confirm", "cap"])
@pytest.mark.parametrize("suspected", [False, True])
def test_a_confirmed_hang_loses_the_device(stage: str, suspected: bool) -> None:
    for rig in points(stride=4):
        if not rig.state.jobs:
            continue
        rig.device.holding = True
        if suspected:
            rig.interrupt(stalled(rig, "suspect"))
            rig.run()
            if not rig.state.jobs:
                continue
        rig.interrupt(stalled(rig, stage))
        live = {event.entities[0] for event in rig.events("request", "fail")}
        rig.run()
        check_lost(rig, live)
        rig.close()


PROBES = [("", "lost"), ("wedged", "lost"), ("lost", "lost")]


@pytest.mark.parametrize(
    ("state", "expected"),
    [*PROBES, ("unhealthy", "serving"), ("ok", "serving"), ("degraded", "serving")],
)
def test_a_probe_that_says_bad_is_believed_whoever_asked(state: str, expected: str) -> None:
    """Rows 14 and 16: what is gone is lost at once; what is unwell is given time, and is well."""
    rig = probed(state)
    assert rig.state.device.state == expected
    rig.device.holding = False
    rig.run()
    rig.check_answers(ended_early=[one.stream for one in rig.streams])
    rig.close()


@pytest.mark.parametrize(
    ("state", "expected"),
    [*PROBES, ("unhealthy", "suspect"), ("ok", "suspect"), ("degraded", "suspect")],
)
def test_no_probe_absolves_a_device_while_a_job_is_suspected(state: str, expected: str) -> None:
    """E16, G4: only the job's own answer does, however well the device says that it is."""
    rig = probed("ok")
    rig.interrupt(stalled(rig, "suspect"))
    rig.post(HealthProbed(health=facts_of(state), reason="no answer"))
    for _ in range(4):
        rig.device.clock.advance(31 * SECOND)
        rig.run_actions(20)
    assert rig.state.device.state == expected
    rig.device.holding = False
    rig.run()
    if expected == "suspect":
        assert rig.state.device.state == "serving"
        rig.check_answers()
    rig.close()


def facts_of(state: str) -> HealthFacts | None:
    """Return what a device in a state says, None where it does not answer."""
    return attrs.evolve(healthy(0), state=state) if state else None


def probed(state: str) -> Rig:
    """Return a rig whose job does not end and whose device was asked by somebody."""
    rig = begin()
    rig.run_actions(20)
    rig.run(until=lambda: bool(rig.device.running))
    rig.device.holding = True
    rig.post(HealthProbed(health=facts_of(state), reason="unasked"))
    rig.run()
    return rig


@pytest.mark.parametrize("drain", [False, True])
def test_close_while_a_hang_is_suspected(drain: bool) -> None:
    for confirm in (False, True):
        rig = begin()
        rig.run(until=lambda rig=rig: bool(rig.device.running))  # type: ignore[misc]
        rig.device.holding = True
        rig.post(stalled(rig, "suspect"))
        rig.run()
        rig.ask_close(drain=drain)
        rig.run()
        if confirm:
            rig.post(stalled(rig, "cap"))
        rig.device.holding = False
        rig.close(drain=drain)
        rig.check_answers(ended_early=[one.stream for one in rig.streams])
        assert rig.device.closes == [confirm]


# ---------------------------------------------------------------------------- who is to blame


def two_in_flight(**device: Any) -> tuple[Rig, int, int]:
    """Return a rig with resets, whose two jobs in flight do not end, and their numbers."""
    made = FakeDevice(
        inflight_max=2,
        verified=(*VERIFIED, *device.pop("verified", ())),
        artifact=lambda model: wide(model, lanes=4, batches=(1,), rule="length_zero"),
        **device,
    )
    rig = Rig(device=made, limits=Limits(), resets=True)
    made.holding = True
    for number in range(4):
        rig.submit([number + 1, 2], seed=number, max_tokens=3, ignore_eos=True)
    rig.run()
    first, second = rig.state.jobs
    return rig, first, second


def suspects_of(rig: Rig) -> list[int]:
    """Return the requests that were ever suspended as suspects."""
    events = rig.events("request", "suspend")
    return [number for event in events if event.data["suspect"] for number in event.entities]


def owner_of(rig: Rig, job: int) -> int:
    return rig.state.jobs[job].rows[0].owner


def stall_of(rig: Rig, job: int, stage: str) -> JobStalled:
    return JobStalled(
        job=job,
        ticket=rig.state.jobs[job].ticket,
        stage=stage,
        phase="exec",
        age_ns=9,
        progress_age_ns=9,
    )


def go_on(rig: Rig) -> None:
    """Let the device work again after its reset, and hold every answer against a run alone."""
    rig.run(until=lambda: any(isinstance(effect, RunReset) for effect in rig.device.executed))
    rig.device.holding = False
    rig.run()
    assert rig.state.device.state == "serving"
    rig.check_answers()
    rig.check_idle()
    rig.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_oldest_of_two_hung_jobs_is_to_blame_whichever_is_told_first(
    order: tuple[int, int],
) -> None:
    """9.3: the device stands still, so the younger one is held up by the older one (G15)."""
    rig, first, second = two_in_flight()
    guilty, innocent = owner_of(rig, first), owner_of(rig, second)
    for which in order:
        job = (first, second)[which]
        if job in rig.state.jobs:
            rig.interrupt(stall_of(rig, job, "suspect"))
            rig.interrupt(stall_of(rig, job, "confirm"))
    assert not rig.state.jobs, "both are ended, so that the reset need not wait for them"
    assert suspects_of(rig) == [guilty]
    assert rig.state.requests[innocent].requeues == 1
    go_on(rig)
    assert suspects_of(rig) == [guilty]


def test_what_hangs_while_a_reset_waits_for_it_is_innocent() -> None:
    """9.3: who carries the exception is to blame, not who comes to no end because of it."""
    rig, first, second = two_in_flight()
    guilty = owner_of(rig, second)
    (ticket,) = [ticket for job, ticket in rig.device.running if job.job == second]
    rig.interrupt(attrs.evolve(faulted(second), ticket=ticket, epoch=rig.state.device.epoch))
    rig.interrupt(stall_of(rig, first, "confirm"))
    assert suspects_of(rig) == [guilty]
    go_on(rig)


@pytest.mark.parametrize(("kind", "blamed"), [("ccu", 2), ("dma", 2), ("aborted", 1), ("lost", 1)])
def test_a_second_fault_of_a_job_counts_if_it_is_an_exception_of_its_own(
    kind: str, blamed: int
) -> None:
    """9.3: what is aborted or lost after an exception of another job is innocent."""
    rig, first, second = two_in_flight()
    for job, told in ((first, "ccu"), (second, kind)):
        ticket = rig.state.jobs[job].ticket
        epoch = rig.state.device.epoch
        rig.interrupt(attrs.evolve(faulted(job), ticket=ticket, epoch=epoch, kind=told))
    assert len(suspects_of(rig)) == blamed
    go_on(rig)


def test_a_job_that_moves_is_not_ended_with_the_one_beyond_the_hard_cap() -> None:
    """E16: the cap confirms whatever others do; who was never suspected ends by itself."""
    rig, first, second = two_in_flight()
    guilty = owner_of(rig, first)
    rig.interrupt(stall_of(rig, first, "cap"))
    assert suspects_of(rig) == [guilty] and list(rig.state.jobs) == [second]
    rig.device.holding = False
    rig.run()
    assert suspects_of(rig) == [guilty]
    assert not any(event.data["kind"] == "hang" for event in rig.events("job", "fault")[1:])
    rig.check_answers()
    rig.close()


def test_only_the_oldest_is_asked_to_end() -> None:
    """Row 8, E6: what it held up gets its chance; nothing is reset, nobody else is blamed."""
    rig, first, second = two_in_flight(verified=("CANCEL",), cancels="ends")
    guilty = owner_of(rig, first)
    for job in (first, second):
        rig.interrupt(stall_of(rig, job, "confirm"))
    rig.run(until=lambda: first not in rig.state.jobs)
    asked = [effect.job for effect in rig.device.executed if isinstance(effect, CancelJob)]
    assert asked == [first]
    rig.device.holding = False
    rig.run()
    assert suspects_of(rig) == [guilty]
    assert not rig.events("device", "reset") and rig.state.device.state == "degraded"
    rig.check_answers()
    rig.close()
