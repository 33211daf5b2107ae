"""Each invariant is broken once and says so: a check that cannot fail checks nothing.

Good states and steps come from a small run on the fake device; the damage is one assignment.

Source: I1 to I6, I8 to I10, I12, E1, E4, E7, E11, E12, E17, E19, G9, G11, G13, R7.3,
decisions 8, 9, 15.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.canary_rig import busy as busy_with_canaries
from support.canary_rig import fill
from support.memory_steps import ListJournal
from support.rig import Rig
from support.told import fault_told

from laneway.engine.errors import InvariantError
from laneway.engine.inputs import (
    BufferRestored,
    Completed,
    RequestSubmitted,
    SubmitAccepted,
)
from laneway.engine.invariants import INVARIANTS, check
from laneway.engine.ports import Step
from laneway.engine.state import JobState, LaneState, RequestState, State, TrialRun, copy
from laneway.engine.watch import Watch
from laneway.statemachines import Event

SPEC = Path(__file__).parents[2] / "specs" / "invariants.md"


def busy() -> Rig:
    """Return a rig with a job in flight, lanes held, requests decoding and waiting."""
    rig = Rig()
    for number in range(10):
        timed = {"deadline_s": 1.0} if number == 2 else {}
        rig.submit([number + 1, 3], seed=number, max_tokens=6, ignore_eos=True, **timed)
    rig.run(until=lambda: _is_rich(rig.state))
    return rig


def _is_rich(state: State) -> bool:
    jobs = list(state.jobs.values())
    return (
        bool(jobs)
        and jobs[0].state == "submitted"
        and jobs[0].task == "decode"
        and sum(request.state == "decoding" for request in state.requests.values()) >= 4
        and state.waiting_requests >= 2
    )


STATE = busy().state


def job_of(state: State) -> JobState:
    return next(iter(state.jobs.values()))


def request_of(state: State, status: str) -> RequestState:
    """Return a request in a state that no job runs at the moment."""
    return next(r for r in state.requests.values() if r.state == status and r.job is None)


def lane_of(state: State, status: str) -> LaneState:
    return next(lane for lane in state.lanes.values() if lane.state == status)


def _own_twice(state: State) -> None:
    first, second = [lane for lane in state.lanes.values() if lane.state == "ready"][:2]
    second.owner = first.owner


def _overtake(state: State) -> None:
    """Let two of the waiting change places."""
    queue = state.short_waiting
    (first, one), (second, two) = sorted(queue.entries)[:2]
    queue.entries = sorted(
        {*queue.entries} - {(first, one), (second, two)} | {(first, two), (second, one)}
    )


def _lost(state: State) -> None:
    state.device.state = "lost"


def _double_job(state: State) -> None:
    job = job_of(state)
    state.jobs[state.next_job] = attrs.evolve(job, number=state.next_job)


DAMAGES: tuple[tuple[str, Callable[[State], Any]], ...] = (
    ("I1", lambda s: setattr(request_of(s, "decoding"), "max_tokens", 1)),
    ("I1", lambda s: setattr(next(iter(s.models.values())), "state", "failed")),
    ("R6.2", lambda s: setattr(request_of(s, "waiting"), "lane", 1)),
    ("R6.2", lambda s: setattr(request_of(s, "decoding"), "tokens", [])),
    ("I3", lambda s: setattr(request_of(s, "decoding"), "lane", lane_of(s, "reserved").number)),
    ("R7.3", lambda s: request_of(s, "decoding").tokens.append(1)),
    ("E1", lambda s: setattr(s.buffers[min(s.buffers)], "model", 99)),
    ("I2", lambda s: setattr(s.buffers[job_of(s).buffer], "job", 99)),
    ("E4", lambda s: setattr(s.buffers[job_of(s).buffer], "state", "completing")),
    ("I2", lambda s: setattr(job_of(s), "buffer", 99)),
    ("I3", lambda s: setattr(s.models[1], "lane_count", 99)),
    ("I3", _own_twice),
    ("I6", lambda s: setattr(request_of(s, "decoding"), "job", job_of(s).number)),
    ("I3", lambda s: setattr(lane_of(s, "ready"), "origin", "golden")),
    ("I4", lambda s: _empty(lane_of(s, "reserved"), s)),
    ("R7.3", lambda s: setattr(lane_of(s, "reserved"), "reserved_tokens", 0)),
    ("I6", lambda s: setattr(job_of(s), "rows", ())),
    ("I6", _double_job),
    ("G11", lambda s: setattr(s.buffers[job_of(s).buffer], "epoch", 0)),
    ("G11", lambda s: setattr(job_of(s), "generation", 99)),
    ("G13", lambda s: setattr(s.buffers[job_of(s).buffer], "state", "preparing")),
    ("R4.1", lambda s: setattr(s.buffers[job_of(s).buffer], "task", "prefill")),
    ("G9", _overtake),
    ("G9", lambda s: s.short_waiting.entries.pop()),
    ("E13", lambda s: setattr(request_of(s, "waiting"), "long", True)),
    ("I8", lambda s: setattr(s, "waiting_requests", 99)),
    ("I8", lambda s: setattr(s, "waiting_tokens", 99)),
    ("I9", lambda s: s.decode_ready.clear()),
    ("I9", lambda s: s.decode_ready.extend(s.decode_ready)),
    ("R7.2", lambda s: s.deadlines.clear()),
    ("R7.2", lambda s: setattr(s, "deadlines", [(0, 99), *s.deadlines])),
    ("E21", lambda s: s.aliases.clear()),
    ("E21", lambda s: setattr(s, "aliases", {"n": 1})),
    ("R9.2", lambda s: s.models.update({2: attrs.evolve(s.models[1], number=2, state="failed")})),
    ("I10", _lost),
    ("G8", lambda s: setattr(request_of(s, "waiting"), "prefill_tokens", 1)),
    ("E11", lambda s: setattr(s.models[1].canary, "examining", True)),
    ("E19", lambda s: s.models[1].runs.update({9: TrialRun(9, 0, "canary", lanes=(1,))})),
    ("decision 15", lambda s: setattr(request_of(s, "decoding"), "proven_tokens", 99)),
    ("G8", lambda s: setattr(request_of(s, "decoding"), "catching_up", True)),
    ("R6.2", lambda s: setattr(request_of(s, "decoding"), "state", "suspended")),
    ("R6.2", lambda s: _give_a_token(s)),
    ("G15", lambda s: s.alone.append(1)),
    ("G15", lambda s: _suspect_in_a_job(s)),
    ("G9", lambda s: setattr(max_waiting(s), "served", True)),
    ("decision 9", lambda s: setattr(s, "next_request", 1)),
    ("decision 9", lambda s: setattr(s, "next_epoch", 1)),
)


def _empty(lane: LaneState, state: State) -> None:
    """Free a lane that a job names, as a careless cancel would."""
    del state.requests[lane.owner or 0]
    lane.state, lane.owner, lane.job, lane.length_tokens, lane.due = "empty", None, None, 0, ()


def _give_a_token(state: State) -> None:
    """Let a waiting request have a token, counted everywhere, though it never had a lane."""
    request = request_of(state, "waiting")
    request.tokens.append(1)
    request.prefill_tokens += 1
    state.waiting_tokens += 1


def _suspect_in_a_job(state: State) -> None:
    """Run a suspect beside another row."""
    job = job_of(state)
    owner = job.rows[0].owner
    state.requests[owner].alone = True
    state.alone.append(owner)
    job.rows += (job.rows[0],)


def max_waiting(state: State) -> RequestState:
    """Return the last of those who wait."""
    return max((r for r in state.requests.values() if r.state == "waiting"), key=lambda r: r.number)


def test_the_state_is_good_and_rich() -> None:
    check(STATE)
    assert {request.state for request in STATE.requests.values()} >= {"waiting", "decoding"}


@pytest.mark.parametrize(
    ("rule", "damage"), DAMAGES, ids=[f"{n}-{rule}" for n, (rule, _) in enumerate(DAMAGES)]
)
def test_a_broken_state_is_named(rule: str, damage: Callable[[State], Any]) -> None:
    damaged = copy(STATE)
    damage(damaged)
    with pytest.raises(InvariantError) as found:
        check(damaged)
    assert found.value.name == rule, found.value


# ---------------------------------------------------------------------------- steps


def _story() -> list[Step]:
    rig = Rig()
    rig.submit([1, 2], max_tokens=2, ignore_eos=True)
    rig.submit([1, 2], max_tokens=2, model="other")
    rig.run()
    rig.close()
    return rig.steps


STEPS = _story()


def _at(kind: type[Any]) -> int:
    return max(index for index, step in enumerate(STEPS) if isinstance(step.taken, kind))


def _replaced(index: int, **changes: Any) -> list[Step]:
    return [*STEPS[:index], attrs.evolve(STEPS[index], **changes), *STEPS[index + 1 :]]


def _taken(index: int, **changes: Any) -> list[Step]:
    return _replaced(index, taken=attrs.evolve(STEPS[index].taken, **changes))


def _first(machine: str, trigger: str) -> tuple[int, Event]:
    for index, step in enumerate(STEPS):
        for event in step.events:
            if (event.machine, event.trigger) == (machine, trigger):
                return index, event
    raise LookupError(f"{machine} {trigger}")


def _once_more(machine: str, trigger: str, index: int | None = None) -> list[Step]:
    at, event = _first(machine, trigger)
    at = at if index is None else index
    return _replaced(at, events=(*STEPS[at].events, event))


def _submitted_again(index: int) -> list[Step]:
    events = (_first("buffer", "submit")[1], _first("job", "submit")[1])
    return _replaced(index, events=events)


def _without(machine: str, trigger: str) -> list[Step]:
    at, event = _first(machine, trigger)
    return _replaced(at, events=tuple(e for e in STEPS[at].events if e is not event))


def _withheld_for_nothing() -> list[Step]:
    """Return a story in which a result is taken back although nothing is examined."""
    events = [
        attrs.evolve(event, data={"withheld": True}) if event.trigger == "complete" else event
        for event in STEPS[DONE].events
    ]
    return _replaced(DONE, events=tuple(events))


def _believed_while_examined() -> list[Step]:
    examine = Event("model", (1,), "examine", "ready", "ready", 1, 1, {"reason": "x"})
    at = _at(SubmitAccepted)
    return _replaced(at, events=(*STEPS[at].events, examine))


def _beside_another() -> list[Step]:
    """Return a story in which a device fell to one job in flight and a second one is planned."""
    rig = busy_with_canaries()
    fill(rig, 4)
    rig.run(until=lambda: len(rig.state.jobs) == 2)
    restrict = Event("device", (0,), "restrict", "serving", "serving", 1, 0, {"reason": "x"})
    at = max(
        index for index, step in enumerate(rig.steps) for e in step.events if e.trigger == "plan"
    )
    wrong = attrs.evolve(rig.steps[at], events=(restrict, *rig.steps[at].events))
    return [*rig.steps[:at], wrong]


def _foreign_fault() -> list[Step]:
    at, _ = _first("job", "complete")
    fault = fault_told(
        "ccu",
        1,
        job=1,
        ticket=1,
        epoch=77,
        generation=1,
        quiescent=True,
        kv_effect="none",
        reason="",
    )
    return _replaced(at, taken=fault)


DONE, RESTORED, ASKED = _at(Completed), _at(BufferRestored), _at(RequestSubmitted)
_LOSE = Event("device", (0,), "lose", "serving", "lost", 1, 0, {"reason": "x"})

WRONG: tuple[tuple[str, Callable[[], Sequence[Step]]], ...] = (
    ("decision 3", lambda: STEPS[1:]),
    ("decision 8", lambda: _replaced(len(STEPS) - 1, at_ns=-1)),
    ("G1, E5", lambda: _replaced(DONE, events=(_job_event("fault", "faulted"),))),
    ("I5", lambda: _taken(DONE, epoch=9)),
    ("I5", lambda: _taken(DONE, generation=9)),
    ("I5", lambda: _taken(DONE, ticket=9)),
    ("I5", _foreign_fault),
    ("E7", lambda: _replaced(DONE, events=())),
    ("E7", lambda: _submitted_again(len(STEPS) - 1)),
    ("E17", lambda: _taken(DONE, kv_effect="none")),
    ("E17", lambda: _once_more("lane", "commit", _at(SubmitAccepted))),
    ("E4", lambda: _once_more("buffer", "release", DONE)),
    ("E4", lambda: _taken(RESTORED, job=99)),
    ("I1", lambda: _once_more("request", "finish", len(STEPS) - 1)),
    ("I10", lambda: _replaced(0, events=(*STEPS[0].events, _LOSE))),
    ("I12", lambda: _once_more("lane", "evict", ASKED)),
    ("decision 9", lambda: _once_more("request", "admit")),
    ("decision 9", lambda: _once_more("device", "open")),
    ("R3.4, E1", lambda: _without("buffer", "acquire")),
    ("E11", _withheld_for_nothing),
    ("E11", _believed_while_examined),
    ("E11", _beside_another),
)


def _job_event(trigger: str, dest: str) -> Event:
    _, event = _first("job", "complete")
    return attrs.evolve(event, trigger=trigger, dest=dest)


def test_the_story_is_good() -> None:
    watch = Watch()
    for step in STEPS:
        watch.take(step)
    watch.check_all_ended()
    assert sorted(watch.endings.values()) == ["finish", "reject"]


@pytest.mark.parametrize(
    ("rule", "steps"), WRONG, ids=[f"{n}-{rule}" for n, (rule, _) in enumerate(WRONG)]
)
def test_a_wrong_step_is_named(rule: str, steps: Callable[[], Sequence[Step]]) -> None:
    watch = Watch()
    with pytest.raises(InvariantError) as found:
        for step in steps():
            watch.take(step)
    assert found.value.name == rule, found.value


def test_a_request_without_an_ending_is_named() -> None:
    watch = Watch()
    for step in STEPS[: _first("request", "finish")[0]]:
        watch.take(step)
    with pytest.raises(InvariantError, match=r"I1: requests \[1\] have no ending"):
        watch.check_all_ended()


def test_a_watch_follows_a_journal_of_several_lives() -> None:
    rig = Rig(steps=STEPS)
    rig.submit([3], max_tokens=1, ignore_eos=True)
    rig.run()
    rig.close()
    assert isinstance(rig.journal, ListJournal) and rig.watch.step == len(rig.journal.steps)


def test_every_invariant_has_its_sentence_in_the_specification() -> None:
    page = SPEC.read_text("utf-8")
    assert [one.id for one in INVARIANTS] == [f"I{number}" for number in range(1, 13)]
    for one in INVARIANTS:
        line = next(line for line in page.splitlines() if line.startswith(f"| {one.id} |"))
        assert line.split(" | ")[1].startswith(one.sentence.partition(";")[0].rstrip(".")), one.id
        assert one.checked
