"""A suspected hang stops submissions, a confirmed one loses the device (E16, G4, R14.4)."""

import attrs
import pytest
from support.fake_device import healthy
from support.lost import check_lost
from support.rig import Rig
from support.schedules import Scheduled, Shape
from support.script import begin, points

from laneway.engine import Limits
from laneway.engine.inputs import HealthProbed, JobStalled


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


@pytest.mark.parametrize("state", ["", "unhealthy", "wedged", "lost", "ok", "degraded"])
def test_a_probe_is_believed_only_when_it_says_bad(state: str) -> None:
    rig = begin()
    rig.run_actions(20)
    rig.run(until=lambda: bool(rig.device.running))
    rig.device.holding = True
    facts = attrs.evolve(healthy(0), state=state) if state else None
    rig.post(HealthProbed(health=facts, reason="unasked"))
    rig.run()
    assert rig.state.device.state == "serving", "only a suspect is judged by a probe"
    rig.interrupt(stalled(rig, "suspect"))
    rig.post(HealthProbed(health=facts, reason="no answer"))
    rig.run()
    expected = "suspect" if state in ("ok", "degraded") else "lost"
    assert rig.state.device.state == expected
    rig.device.holding = False
    rig.run()
    rig.check_answers(ended_early=[one.stream for one in rig.streams])
    rig.close()


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
