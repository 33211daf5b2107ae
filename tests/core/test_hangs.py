"""A suspected hang stops submissions, a confirmed one loses the device (E16, G4, R14.4)."""

import attrs
import pytest
from support.fake_device import healthy
from support.lost import check_lost
from support.rig import Rig
from support.schedules import Scheduled, Shape
from support.script import begin, points

from laneway.engine import Limits
from laneway.engine.inputs import HealthFacts, HealthProbed, JobStalled
from laneway.engine.limits import SECOND


def stalled(rig: Rig, stage: str) -> JobStalled:
    (job,) = rig.state.jobs.values()
    return JobStalled(
        job=job.number, ticket=job.ticket, stage=stage, phase="exec", age_ns=9, progress_age_ns=9
    )


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
        rig.interrupt(
            JobStalled(
                job=suspected.number,
                ticket=suspected.ticket,
                stage="suspect",
                phase="exec",
                age_ns=9,
                progress_age_ns=9,
            )
        )
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
