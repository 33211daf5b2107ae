"""A new incarnation on what an old one left, cut anywhere (G21, decision 9)."""

import pytest
from support.fake_device import FakeDevice, KvFault
from support.memory_steps import ListJournal
from support.rig import Rig, check_replay
from support.script import begin

from laneway.engine import Engine, JournalError
from laneway.engine.evolve import fold
from laneway.engine.inputs import EngineStarted, RequestSubmitted
from laneway.engine.ports import Step
from laneway.engine.state import initial_state


def whole_life() -> list[Step]:
    """Return the steps of a life with a load, requests, an unload, a load, and a close."""
    rig = begin()
    rig.run()
    rig.engine.unload("m")
    rig.engine.load("m", "again")
    rig.submit([4])
    rig.run()
    rig.close()
    return rig.steps


def life_with_a_loss() -> list[Step]:
    """Return the steps of a life whose device is lost at the end."""
    rig = Rig()
    rig.submit([4])
    rig.run()
    rig.device.kv_faults = [KvFault(verb="COMMIT", times=3)]
    for number in range(8):
        rig.submit([number + 1, 2], max_tokens=3)
    rig.run()
    rig.close()
    return rig.steps


def open_requests(steps: list[Step]) -> int:
    """Return how many requests of the steps have no ending."""
    born = sum(isinstance(step.taken, RequestSubmitted) for step in steps)
    ended = [
        event
        for step in steps
        for event in step.events
        if event.machine == "request"
        and event.dest in ("finished", "rejected", "cancelled", "expired", "failed")
    ]
    return born - sum(len(event.entities) for event in ended)


@pytest.mark.parametrize("life", [whole_life, life_with_a_loss])
def test_cut_after_any_step_the_journal_is_refused_or_the_start_is_clean(life: object) -> None:
    steps = life()  # type: ignore[operator]
    clean = 0
    for count in range(len(steps) + 1):
        kept = steps[:count]
        if open_requests(kept):
            with pytest.raises(JournalError, match="no ending"):
                Rig(steps=kept)
            continue
        clean += 1
        rig = Rig(steps=kept, load=clean % 4 == 0)
        state = rig.state
        assert state.device.state == "serving"
        assert not state.jobs and not state.requests
        if clean % 4 == 0:
            rig.submit([5, 5], seed=8)
            rig.run()
            rig.check_answers()
            rig.check_idle()
        else:
            assert not state.models and not state.lanes and not state.buffers
        rig.close()
    assert clean > 20


def test_what_was_bound_to_the_old_process_ends_in_the_first_step() -> None:
    steps = whole_life()
    cuts = [
        count
        for count in range(1, len(steps))
        if not open_requests(steps[:count]) and steps[count - 1].events
    ]
    ends: set[tuple[str, str, str]] = set()
    for count in cuts:
        rig = Rig(steps=steps[:count], load=False)
        started = rig.steps[count]
        assert isinstance(started.taken, EngineStarted)
        ends |= {(e.machine, e.trigger, e.dest) for e in started.events}
        rig.close()
    assert {
        ("job", "abandon", "lost"),
        ("buffer", "abandon", "quarantined"),
        ("lane", "abandon", "unknown"),
        ("model", "abandon", "failed"),
        ("model", "clean", "unloaded"),
        ("device", "abandon", "closed"),
        ("device", "open", "serving"),
    } <= ends


def test_numbers_go_on_and_are_never_used_again() -> None:
    steps: list[Step] = []
    for round_ in range(3):
        rig = Rig(steps=steps)
        rig.submit([round_ + 1], seed=round_)
        rig.run()
        rig.check_answers()
        rig.close()  # the ledger holds every number against all incarnations
        steps = rig.steps
    state = initial_state()
    for step in steps:
        fold(state, step)
    assert (state.device.incarnation, state.device.epoch) == (3, 3)
    assert (state.next_model, state.next_generation, state.next_request) == (4, 4, 4)
    assert (state.next_lane, state.next_buffer) == (25, 19)


@pytest.mark.parametrize(("later_ns", "gap_ns"), [(5_000_000, 5_000_000), (-10_000, 0), (0, 0)])
def test_engine_time_goes_on_by_the_wall_clock_and_never_falls(later_ns: int, gap_ns: int) -> None:
    first = Rig(wall_ns=1_000_000)
    first.submit([1, 2])
    first.run()
    first.close()
    last_ns = first.steps[-1].at_ns
    second = Rig(steps=first.steps, wall_ns=1_000_000 + last_ns + later_ns)
    started = second.steps[len(first.steps)]
    assert started.at_ns == last_ns + gap_ns
    second.submit([1, 2])
    second.run()
    second.close()
    third = Rig(steps=second.steps, wall_ns=5)
    assert third.steps[len(second.steps)].at_ns == second.steps[-1].at_ns
    third.close()


def test_a_clock_that_falls_does_not_take_engine_time_along() -> None:
    rig = Rig()
    rig.submit([1, 2])
    rig.run_actions(20)
    rig.device.clock._now_ns -= 3_000
    rig.run()  # the ledger holds each instant against the one before
    rig.check_answers()
    rig.close()


def test_the_first_step_of_a_journal_is_at_zero() -> None:
    rig = Rig(load=False, wall_ns=1_700_000_000_000_000_000)
    assert (rig.steps[0].step, rig.steps[0].at_ns) == (1, 0)
    rig.close()


def test_deadlines_of_a_new_incarnation_are_on_engine_time() -> None:
    first = Rig(wall_ns=1_000)
    first.close()
    second = Rig(steps=first.steps, wall_ns=900_000_000_000)
    stream = second.submit([1, 2], max_tokens=40, deadline_s=5e-6, ignore_eos=True)
    fine = second.submit([1, 2], deadline_s=100.0)
    second.run()
    assert stream.result().finish_reason == "deadline" and stream.result().tokens
    assert fine.result().error is None
    second.close()


def test_a_journal_with_a_missing_step_is_refused() -> None:
    rig = Rig()
    rig.submit([1])
    rig.run()
    rig.close()
    for gap in range(1, len(rig.steps)):
        if rig.steps[gap].events and gap != len(rig.steps) - 1:
            kept = ListJournal(rig.steps[:gap] + rig.steps[gap + 1 :])
            with pytest.raises(JournalError):
                Engine(device=FakeDevice(), journal=kept, threads=False)


def test_requests_without_an_ending_are_named() -> None:
    rig = begin()
    rig.run_actions(8)
    with pytest.raises(JournalError, match=r"3 requests .*request/1"):
        Rig(steps=rig.steps)


def test_the_journal_of_several_lives_replays_as_one() -> None:
    first = Rig()
    first.submit([1])
    first.run()
    second = Rig(steps=first.steps[:-2])
    second.submit([2])
    second.run()
    second.close()
    check_replay(second.steps, second.state)
    assert isinstance(second.journal, ListJournal)
