"""Looking into a journal: one entity's life, jobs in flight, a choice of steps, sums."""

import json
from pathlib import Path

import pytest
from support.journal_steps import completed, run_core, started, story, ticks
from support.told import fault_told

from laneway.engine.errors import ConfigurationError
from laneway.engine.inputs import (
    CancelRequested,
    DeviceFaulted,
    JobStalled,
    SubmitRefused,
)
from laneway.engine.ports import Step
from laneway.journal import MemoryJournal, open_journal
from laneway.journal.entities import parse_entity
from laneway.journal.replay import fold
from laneway.journal.stats import stats
from laneway.journal.timeline import Moment, in_flight_at, show, step_record, timeline
from laneway.statemachines import Event


def journal_of(*steps: Step) -> MemoryJournal:
    """Return a journal with these steps."""
    journal = MemoryJournal()
    journal.append(steps)
    return journal


# ---------------------------------------------------------------------------- timeline


def test_the_life_of_a_job_by_hand() -> None:
    plan = {
        "buffer": 1,
        "model": 1,
        "origin": "request",
        "owners": (5, 6),
        "task": "decode",
    }
    assert list(timeline(journal_of(*story()), "job/17")) == [
        Moment(
            step=3,
            at_ns=3000,
            since_ns=0,
            input_kind="SubmitAccepted",
            input_entities=("job/17",),
            trigger="plan",
            source="drafted",
            dest="planned",
            epoch=1,
            generation=2,
            related=("buffer/1", "model/1", "request/5", "request/6"),
            data=plan,
        ),
        Moment(
            step=5,
            at_ns=5000,
            since_ns=2000,
            input_kind="Completed",
            input_entities=("job/17",),
            trigger="complete",
            source="submitted",
            dest="completed",
            epoch=1,
            generation=2,
        ),
    ]


def test_an_input_that_moved_nothing_is_a_moment_too() -> None:
    late = Step(step=6, at_ns=9000, taken=completed(17, (1,)), events=())
    moments = list(timeline(journal_of(*story(), late), "job/17"))
    assert [(m.step, m.since_ns, m.trigger) for m in moments][-1] == (6, 4000, "")


def test_a_lane_inside_a_range() -> None:
    for lane, steps in ((3, [3]), (5, []), (7, [3])):
        moments = timeline(journal_of(*story()), f"lane/{lane}")
        assert [m.step for m in moments] == steps


def test_two_moves_in_one_step() -> None:
    events = (
        Event("model", (1,), "degrade", "ready", "recovering", 1, 1),
        Event("model", (1,), "fail", "recovering", "failed", 1, 1, {"reason": "x"}),
    )
    journal = journal_of(Step(step=1, at_ns=5, taken=started(), events=events))
    moments = list(timeline(journal, "model/1"))
    assert [(m.trigger, m.since_ns) for m in moments] == [("degrade", 0), ("fail", 0)]


def test_a_life_is_connected(core_file: Path) -> None:
    with open_journal(core_file, read_only=True) as journal:
        for entity in ("buffer/1", "request/1", "lane/1", "model/1", "device/0"):
            moves = [m for m in timeline(journal, entity) if m.trigger]
            assert moves
            for before, after in zip(moves, moves[1:], strict=False):
                assert before.dest == after.source


def test_moments_are_json(core_file: Path) -> None:
    with open_journal(core_file, read_only=True) as journal:
        for moment in timeline(journal, "job/1"):
            record = json.loads(json.dumps(moment.to_json()))
            assert record["step"] == moment.step
            assert record["related"] == list(moment.related)


@pytest.mark.parametrize("text", ["", "job", "job/", "/1", "jobs/1", "job/x", "job/-1", "job/²"])
def test_what_is_no_entity(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not an entity"):
        parse_entity(text)


# ---------------------------------------------------------------------------- in flight


def test_in_flight_by_hand() -> None:
    journal = journal_of(*story())
    assert in_flight_at(journal, 2) == ()
    (job,) = in_flight_at(journal, 3)
    assert job.to_json() == {
        "job": 17,
        "state": "planned",
        "task": "decode",
        "origin": "request",
        "model": 1,
        "buffer": 1,
        "lanes": [1, 2, 3, 4, 7],
        "owners": [5, 6],
        "epoch": 1,
        "generation": 2,
        "planned_step": 3,
        "planned_ns": 3000,
        "ticket": 0,
    }
    assert in_flight_at(journal, 4) == (job,)
    assert in_flight_at(journal, 5) == ()


def test_in_flight_is_what_the_state_holds(core_file: Path) -> None:
    with open_journal(core_file, read_only=True) as journal:
        for step in range(0, journal.head()[0] + 1, 5):
            expected = {
                n: (j.state, j.ticket, j.buffer) for n, j in fold(journal, step).jobs.items()
            }
            found = {j.job: (j.state, j.ticket, j.buffer) for j in in_flight_at(journal, step)}
            assert found == expected


# ---------------------------------------------------------------------------- show


@pytest.mark.parametrize(
    ("filters", "steps"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"request": 5}, [2, 3]),
        ({"request": 6}, [3]),
        ({"request": 7}, []),
        ({"job": 17}, [3, 5]),
        ({"lane": 3}, [3]),
        ({"lane": 9}, []),
        ({"buffer": 1}, [3]),
        ({"model": 1}, [2, 3]),
        ({"device": 0}, [1]),
        ({"trigger": "plan"}, [3]),
        ({"trigger": "admit", "request": 5}, [2]),
        ({"trigger": "reserve", "job": 17}, [3]),
        ({"trigger": "complete", "lane": 1}, []),
        ({"job": 17, "lane": 9}, []),
        ({"input_kind": "TimePassed"}, [4]),
        ({"first": 2, "last": 3}, [2, 3]),
        ({"from_ns": 3000, "until_ns": 4000}, [3, 4]),
        ({"from_ns": 3001}, [4, 5]),
        ({"until_ns": 0}, []),
    ],
)
def test_show(filters: dict[str, int | str], steps: list[int]) -> None:
    found = show(journal_of(*story()), **filters)  # type: ignore[arg-type]
    assert [step.step for step in found] == steps


def test_steps_are_json() -> None:
    record = step_record(story()[2])
    assert json.loads(json.dumps(record)) == record
    assert record["input"] == {"job": 17, "ticket": 917}
    assert record["events"][0] == {
        "machine": "lane",
        "entities": ["lane/1", "lane/2", "lane/3", "lane/4", "lane/7"],
        "trigger": "reserve",
        "source": "ready",
        "dest": "reserved",
        "epoch": 1,
        "generation": 2,
        "data": {"job": 17},
    }


# ---------------------------------------------------------------------------- stats


def test_stats_by_hand() -> None:
    ended = (
        Event(
            "request", (5,), "finish", "decoding", "finished", 1, 2, {"reason": "stop", "tokens": 7}
        ),
    )
    sums = stats(
        journal_of(
            *story(),
            Step(step=6, at_ns=6000, taken=CancelRequested(request=9), events=ended),
            Step(step=7, at_ns=7000, taken=SubmitRefused(job=18, code=1, reason="full"), events=()),
            Step(step=8, at_ns=8000, taken=fault("ccu"), events=()),
            Step(step=9, at_ns=8000, taken=fault("dma"), events=()),
            Step(step=10, at_ns=8000, taken=fault("ccu"), events=()),
            Step(step=11, at_ns=9000, taken=stall("suspect"), events=()),
            Step(step=12, at_ns=9000, taken=stall("confirm"), events=()),
        )
    )
    assert sums["steps"] == 12
    assert sums["incarnations"] == 1
    assert (sums["first_ns"], sums["last_ns"]) == (1000, 9000)
    assert sums["events"] == {
        "request": {"admit": 1, "finish": 1},
        "job": {"complete": 1, "plan": 1},
        "buffer": {"acquire": 1},
        "lane": {"reserve": 5},
        "device": {"open": 1},
    }
    assert sums["entity_events"] == 11
    assert sums["requests"] == {
        "cancelled": 0,
        "expired": 0,
        "failed": 0,
        "finished": 1,
        "rejected": 0,
        "open": 0,
    }
    assert sums["tokens"] == 7
    assert sums["faults"] == {"ccu": 2, "dma": 1, "hang": 1, "submit_refused": 1}
    assert sums["inputs"]["DeviceFaulted"] == 3
    assert json.loads(json.dumps(sums)) == sums


def fault(kind: str) -> DeviceFaulted:
    """Return a fault of no job."""
    return fault_told(kind, 1, epoch=1, generation=1)


def stall(stage: str) -> JobStalled:
    """Return a stall."""
    return JobStalled(job=1, ticket=1, stage=stage, phase="exec", age_ns=5, progress_age_ns=5)


def test_tokens_of_open_requests_are_counted_from_their_jobs() -> None:
    sums = stats(journal_of(*story()))
    assert sums["requests"]["open"] == 1
    assert sums["tokens"] == 1


@pytest.mark.parametrize("tokens", ["full", "digest"])
def test_tokens_at_every_step_are_what_the_state_holds(tokens: str) -> None:
    whole = MemoryJournal()
    run_core(whole)
    steps = list(whole.read())
    for last in range(0, len(steps) + 1, 4):
        state = fold(whole, last)
        ended = sum(
            event.data["tokens"]
            for step in steps[:last]
            for event in step.events
            if event.machine == "request" and "tokens" in event.data
        )
        expected = ended + sum(len(request.tokens) for request in state.requests.values())
        other = MemoryJournal(tokens=tokens)
        for step in steps[:last]:
            taken = started(tokens) if step.step == 1 else step.taken
            other.append([Step(step=step.step, at_ns=step.at_ns, taken=taken, events=step.events)])
        assert stats(other)["tokens"] == expected


def test_bytes_grow(tmp_path: Path) -> None:
    for journal in (MemoryJournal(), open_journal(tmp_path / "run.db")):
        with journal:
            before = stats(journal)["bytes"]
            journal.append(ticks(1, 200))
            assert stats(journal)["bytes"] > before
    assert stats(MemoryJournal())["steps"] == 0
