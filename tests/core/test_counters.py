"""The engine's account of its jobs against the device's counters (E14, row 21).

Compared whenever nothing is left to do and every 1000 jobs; one difference is borne, the second in
a row makes the counters untrusted. Service goes on, and nothing is ever freed by a counter.
"""

import attrs
import pytest
from support.rig import Rig
from support.script import begin, finish_and_check, points

from laneway.engine import InternalError, Limits
from laneway.engine.effects import ReadCounters
from laneway.engine.inputs import Completed, CountersRead
from laneway.engine.ledger import counts, difference
from laneway.statemachines import Event


def serve(rig: Rig, prompt: int) -> None:
    """Serve one request to its end, after which nothing is left to do."""
    rig.submit([prompt, 2], seed=prompt, max_tokens=3)
    rig.run()


def distrusts(rig: Rig) -> list[Event]:
    return rig.events("device", "distrust")


def test_they_are_compared_whenever_nothing_is_left_to_do() -> None:
    rig = Rig()
    rig.run()
    asked = [e for e in rig.device.executed if isinstance(e, ReadCounters)]
    assert len(asked) == 1, "after golden and warm-up"
    for number in range(3):
        serve(rig, number + 1)
    asked = [e for e in rig.device.executed if isinstance(e, ReadCounters)]
    assert len(asked) == 4
    read = [step.taken for step in rig.steps if isinstance(step.taken, CountersRead)]
    jobs = len([step for step in rig.steps if isinstance(step.taken, Completed)])
    assert read[-1].asked == (jobs, jobs, 0, 0)
    assert not distrusts(rig) and rig.state.device.counters_trusted
    rig.close()


def test_they_are_compared_every_thousand_jobs_while_there_is_always_work() -> None:
    rig = Rig(limits=Limits(queued_requests_max=4000))
    rig.replays = False
    rig.journal.watch = lambda steps: None
    rig.run()
    for number in range(700):
        rig.submit([1 + number % 60, 2], seed=number, max_tokens=3, ignore_eos=True)
    asked: list[tuple[int, ...]] = []
    looked = 0
    while rig.state.requests or len(asked) < 2:
        assert rig.act()
        if rig.state.requests:
            new, looked = rig.device.executed[looked:], len(rig.device.executed)
            asked += [effect.asked for effect in new if isinstance(effect, ReadCounters)]
    assert [sum(one[1:]) for one in asked[1:]] == [1000, 2000]
    assert not distrusts(rig)


@pytest.mark.parametrize("field", ["submitted", "finished", "failed", "aborted", "left", "running"])
@pytest.mark.parametrize("by", [-1, 1])
def test_one_difference_is_borne_and_the_second_in_a_row_ends_the_trust(
    field: str, by: int
) -> None:
    rig = Rig()
    serve(rig, 1)
    rig.device.skew = {field: by}
    serve(rig, 2)
    assert rig.state.device.counters_trusted, "one difference may be a reading in between"
    rig.device.skew = {}
    serve(rig, 3)
    rig.device.skew = {field: by}
    serve(rig, 4)
    assert rig.state.device.counters_trusted, "not in a row"
    serve(rig, 5)
    (event,) = distrusts(rig)
    assert event.data["counters"]
    device = rig.state.device
    assert (
        not device.counters_trusted and "counters of the device are wrong" in device.ceiling_reason
    )
    assert device.state == "serving" and rig.engine.ready(), "service goes on"
    asked = len([e for e in rig.device.executed if isinstance(e, ReadCounters)])
    serve(rig, 6)
    assert len([e for e in rig.device.executed if isinstance(e, ReadCounters)]) == asked
    rig.check_answers()
    rig.check_idle()
    rig.close()


def test_counters_that_began_anywhere_or_are_not_told_are_no_difference() -> None:
    rig = Rig(load=False)
    facts = rig.state.device.facts
    assert facts is not None
    rig.close()
    base = (("submitted", 40), ("finished", 30), ("pending", 1), ("running", 2))
    state = attrs.evolve(
        rig.state, device=attrs.evolve(rig.state.device, facts=attrs.evolve(facts, counters=base))
    )
    state.device.ledger.submitted = state.device.ledger.finished = 5
    own = counts(state)
    assert own == (5, 5, 0, 0)
    for counters, differs in (
        ((("submitted", 45), ("finished", 35)), False),
        ((("submitted", 45), ("finished", 35), ("failed", 99)), False),
        ((), False),
        ((("submitted", 5),), True),
        ((("finished", 34),), True),
        ((("left", 3), ("pending", 1), ("running", 1)), True),
    ):
        assert bool(difference(state, CountersRead(asked=own, counters=counters))) is differs


def test_a_job_that_ended_on_the_device_before_its_answer_is_no_difference() -> None:
    for rig in points(stride=3):
        now = counts(rig.state)
        flying = sum(job.state != "planned" for job in rig.state.jobs.values())
        for ahead in (0, 1, 2):
            told = (("submitted", now[0]), ("finished", now[1] + ahead))
            read = CountersRead(asked=now, counters=told)
            assert bool(difference(rig.state, read)) is (ahead > flying)
        rig.interrupt(CountersRead(asked=now, counters=()))
        finish_and_check(rig, ended=[])


def test_an_own_account_that_does_not_add_up_is_a_bug_of_the_engine() -> None:
    rig = begin()
    rig.run()
    rig.state.device.ledger.submitted += 1
    with pytest.raises(InternalError, match="E14"):
        rig.interrupt(CountersRead(asked=(0, 0, 0, 0), counters=()))


def test_a_fault_is_told_apart_from_what_nobody_said() -> None:
    rig = begin()
    rig.device.submits.extend([0, 0, 0x0801])
    rig.run()
    ledger = rig.state.device.ledger
    assert ledger.failed == ledger.aborted == 0
    assert ledger.submitted == ledger.finished + ledger.given_up
    rig.close()
