"""Stories of faults: where each begins and ends, which step belongs to which, kills and their end.

Source: R18.5, G21, R14.7.
"""

import attrs
import pytest
from support.fake_device import FakeDevice, healthy
from support.rig import Rig
from support.script import TOKENS, small_artifact
from support.strikes import STICKY, begin, run_to_job, strike
from support.told import fault_told

from laneway.engine.inputs import (
    DeviceFaulted,
    HealthProbed,
    Input,
    JobStalled,
    ResetFinished,
    SubmitRefused,
)
from laneway.engine.ports import Step
from laneway.journal import open_journal
from laneway.journal.explain import Explanation, explain, nearest

SECOND_NS = 1_000_000_000


def told_of(steps: list[Step]) -> Explanation:
    """Explain steps as a journal gives them back."""
    journal = open_journal()
    journal.append(steps)
    return explain(journal)


def step_of(steps: list[Step], kind: type) -> list[int]:
    """Return the steps of a kind of input."""
    return [step.step for step in steps if isinstance(step.taken, kind)]


def test_two_faults_are_two_stories_and_each_step_finds_its_own() -> None:
    rig = begin()
    strike(rig)
    rig.run()
    rig.device.clock.advance(SECOND_NS)
    rig.submit([4, 4], seed=9, max_tokens=TOKENS, ignore_eos=True)
    strike(rig)
    rig.run()
    rig.check_answers()
    rig.close()
    told = told_of(rig.steps)
    first, second = told.stories
    faults = step_of(rig.steps, DeviceFaulted)
    assert [one.signals[0].step for one in told.stories] == faults
    serves = [s.step for s in rig.steps for e in s.events if e.trigger == "serve"]
    assert [one.last_step for one in told.stories] == serves
    assert [one.outcome for one in told.stories] == ["recovered", "recovered"]
    for step, expected in ((faults[0] - 1, None), (faults[0], first), (serves[0], first)):
        assert nearest(told.stories, step) is expected
    assert nearest(told.stories, faults[1]) is second is nearest(told.stories, len(rig.steps))
    left = [line.data["left"] for line in second.answers if line.what == "reset"]
    assert [each["4"][:2] for each in left] == [[0, 2]], "both resets of the CCU are used up"


def test_a_fault_within_a_recovery_belongs_to_its_story() -> None:
    rig = begin()
    strike(rig)
    rig.run(until=lambda: rig.state.device.state == "recovering" and bool(rig.device.running))
    strike(rig)
    rig.run()
    rig.close()
    (story,) = told_of(rig.steps).stories
    assert [one.step for one in story.signals] == step_of(rig.steps, DeviceFaulted)
    assert (story.rungs, story.outcome) == ([4, 5], "recovered")


def test_an_epoch_read_behind_the_engines_own_reset_is_nobody_elses() -> None:
    """A probe that waited for the device may be told before the report of the reset is."""
    rig = begin()
    run_to_job(rig)

    def probe_first(taken: Input) -> None:
        if isinstance(taken, ResetFinished):
            health = attrs.evolve(healthy(0), device_epoch=taken.epoch_after)
            rig.engine._inbox._queue.appendleft(HealthProbed(health=health, reason=""))

    rig.device.meanwhile = probe_first
    rig.device.drop_jobs()
    rig.interrupt(fault_told("device", STICKY))
    rig.run()
    rig.close()
    (story,) = told_of(rig.steps).stories
    assert rig.state.device.epoch == 2, "the probe read nothing new"
    assert [one.kind for one in story.signals] == ["sticky"]


def test_refusals_are_one_story_until_the_device_takes_a_job_again() -> None:
    rig = begin()
    rig.run_actions(20)
    rig.device.submits.extend([0x0301] * 3)
    rig.run()
    rig.check_answers()
    rig.close()
    (story,) = told_of(rig.steps).stories
    refused = step_of(rig.steps, SubmitRefused)
    assert [one.step for one in story.signals] == refused and len(refused) == 3
    assert (story.kind, story.row, story.rungs, story.outcome) == ("busy", 2, [0], "went on")
    assert {fate.ending for fate in story.fates} == {"finish"}
    assert all(not fate.suspended for fate in story.fates)


def test_without_a_budget_the_story_says_lost_and_what_to_do() -> None:
    rig = begin(resets=False)
    strike(rig)
    rig.run()
    rig.close()
    (story,) = told_of(rig.steps).stories
    assert (story.outcome, story.row, story.rungs) == ("lost", 7, [8])
    assert "operator" in story.next and "no reset is left in the budget" in story.reason
    assert {(fate.ending, fate.reason) for fate in story.fates} == {("fail", "device_lost")}


@pytest.mark.parametrize("state", ["wedged", "unhealthy"])
def test_a_probe_without_a_job_is_of_the_device(state: str) -> None:
    rig = begin()
    rig.run_actions(20)
    rig.interrupt(HealthProbed(health=attrs.evolve(healthy(0), state=state), reason=""))
    rig.run()
    rig.close()
    (story,) = told_of(rig.steps).stories
    assert (story.kind, story.decisive.about) == (state, ("device/0",))
    assert story.outcome == ("lost" if state == "wedged" else "absolved")


def test_a_slow_job_is_absolved() -> None:
    rig = begin()
    number = run_to_job(rig)
    job = rig.state.jobs[number]
    stalled = JobStalled(
        job=number, ticket=job.ticket, stage="suspect", phase="exec", age_ns=9, progress_age_ns=9
    )
    rig.interrupt(stalled)
    rig.run()
    rig.check_answers()
    rig.close()
    (story,) = told_of(rig.steps).stories
    assert (story.row, story.rungs, story.outcome) == (9, [0], "absolved")
    assert story.signals[0].about == (f"job/{number}",)


def test_a_killed_process_is_a_fault_that_the_next_start_tells() -> None:
    """G21: what was in flight is abandoned; who had no ending goes on with the next process."""
    rig = begin()
    number = run_to_job(rig)
    live = sorted(rig.state.requests)
    had = {one.number: len(one.tokens) for one in rig.state.requests.values()}
    killed = list(rig.steps)
    again = Rig(device=FakeDevice(artifact=small_artifact), steps=killed, resume=True)
    again.run()
    again.close()
    told = told_of(again.steps)
    (story,) = told.stories
    assert (story.kind, story.outcome) == ("killed", "restarted")
    assert story.signals[0].step == len(killed) + 1
    assert f"job/{number}" in story.fenced["lost"] and f"job/{number}" in story.decisive.about
    assert [fate.request for fate in story.fates] == live
    for fate in story.fates:
        assert (fate.tokens_before, fate.suspended) == (had[fate.request], "abandoned")
        assert fate.resumed_step > story.signals[0].step
        assert (fate.ending, fate.reason, fate.tokens) == ("finish", "length", TOKENS)
    assert told.device == "closed"


def test_a_kill_in_the_middle_of_a_recovery_ends_its_story() -> None:
    rig = begin()
    strike(rig)
    rig.run(until=lambda: rig.state.device.state == "recovering")
    again = Rig(device=FakeDevice(artifact=small_artifact), steps=list(rig.steps), resume=True)
    again.run()
    again.close()
    first, second = told_of(again.steps).stories
    assert (first.kind, first.outcome) == ("ccu", "killed")
    assert (second.kind, second.outcome) == ("killed", "restarted")


def test_a_journal_that_ends_in_the_middle_says_open() -> None:
    rig = begin()
    strike(rig)
    told = told_of(list(rig.steps))
    (story,) = told.stories
    assert (story.outcome, story.next, told.device) == ("open", "", rig.state.device.state)
    assert {fate.ending for fate in story.fates} == {""}


def test_without_faults_there_is_no_story() -> None:
    rig = begin()
    rig.run()
    rig.close()
    assert told_of(rig.steps) == Explanation(stories=(), steps=len(rig.steps), device="closed")
