"""What a cruise leaves to ``decide``, and that it begins only where one job was proven."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import attrs
import msgspec
import pytest
from support.both_ways import outlined

from laneway.adapters.bench_ticks import life
from laneway.engine.course import Course
from laneway.engine.cruise import Cruise, find_cruise
from laneway.engine.decide import decide
from laneway.engine.effects import SubmitJob
from laneway.engine.inputs import (
    BufferRestored,
    Completed,
    Input,
    RequestSubmitted,
    RowResult,
    SubmitAccepted,
    TimePassed,
)
from laneway.engine.ports import Step
from laneway.engine.ring import Group
from laneway.engine.state import State, copy, freeze, initial_state

STEPS = list(islice(life(), 400))
"""Sixteen sequences, one job in flight."""

DECODES = [
    i for i, s in enumerate(STEPS) if isinstance(s.taken, Completed) and len(s.taken.rows) == 16
]


def state_before(index: int) -> State:
    """Return the state before one of the steps, decided step by step."""
    state = initial_state()
    for step in STEPS[:index]:
        decide(state, step.taken, step.at_ns)
    return state


@pytest.fixture
def start() -> int:
    """A completion behind which every step is of the run."""
    return DECODES[3]


@pytest.fixture
def cruise(start: int) -> Cruise:
    """A cruise that may take that completion."""
    found = find_cruise(state_before(start))
    assert found is not None
    return found


def due_canary(state: State) -> None:
    """Let a canary be due after the next job, and have a lane."""
    state.models[1].canary.jobs = 999
    state.models[1].empty_lanes.append(99)


def row(taken: Completed, **change: Any) -> Completed:
    """Change the answer of one row."""
    rows = list(taken.rows)
    rows[5] = msgspec.structs.replace(rows[5], **change)
    return attrs.evolve(taken, rows=tuple(rows))


ODD: dict[str, Callable[[Completed], Completed]] = {
    "another job": lambda taken: attrs.evolve(taken, job=taken.job - 1),
    "another ticket": lambda taken: attrs.evolve(taken, ticket=taken.ticket + 1),
    "another epoch": lambda taken: attrs.evolve(taken, epoch=taken.epoch + 1),
    "another generation": lambda taken: attrs.evolve(taken, generation=taken.generation - 1),
    "KV in doubt": lambda taken: attrs.evolve(taken, kv_effect="unknown"),
    "KV not applied": lambda taken: attrs.evolve(taken, kv_effect="none"),
    "too few rows": lambda taken: attrs.evolve(taken, rows=taken.rows[:-1]),
    "abnormal numbers": lambda taken: row(taken, fault="numeric", token=-1),
    "a stop string": lambda taken: row(taken, stop_hit=True),
}


@pytest.mark.parametrize("change", ODD.values(), ids=list(ODD))
def test_an_odd_completion_is_not_its_business(
    cruise: Cruise, start: int, change: Callable[[Completed], Completed]
) -> None:
    step = STEPS[start]
    assert isinstance(step.taken, Completed)
    before = attrs.evolve(cruise, behind=list(cruise.behind))
    assert cruise.decide(change(step.taken), step.at_ns) is None
    assert cruise == before, "it changed"
    assert cruise.decide(step.taken, step.at_ns) is not None


def test_time_that_falls_is_not_its_business(cruise: Cruise, start: int) -> None:
    assert cruise.decide(STEPS[start].taken, cruise.now_ns - 1) is None


def test_it_ends_when_something_is_due(cruise: Cruise, start: int) -> None:
    """With any answer: where two jobs may be in flight, each may let a canary begin."""
    assert cruise.decide(STEPS[start].taken, cruise.until_ns) is None
    assert cruise.decide(STEPS[start].taken, cruise.until_ns - 1) is not None
    for step in STEPS[start + 1 : start + 3]:
        assert cruise.decide(step.taken, cruise.until_ns) is None
        assert cruise.decide(step.taken, cruise.until_ns - 1) is not None


def test_a_canary_that_can_have_no_lane_ends_nothing(start: int) -> None:
    state = state_before(start)
    state.models[1].canary.jobs = 999
    state.models[1].canary.since_ns = -(1 << 60)
    cruise = find_cruise(copy(state))
    assert cruise is not None and cruise.jobs_left > 1
    plain = copy(state)
    for step in STEPS[start : start + 9]:
        assert cruise.decide(step.taken, step.at_ns) == decide(plain, step.taken, step.at_ns)


@pytest.mark.parametrize("missing", [SubmitAccepted, BufferRestored])
def test_a_completion_before_one_of_the_other_answers_is_not_its_business(
    cruise: Cruise, start: int, missing: type[Input]
) -> None:
    """Without the one the job is planned still, without the other its buffer is not free."""
    taken: list[Step] = STEPS[start : start + 3]
    assert {type(step.taken) for step in taken} == {Completed, SubmitAccepted, BufferRestored}
    for step in taken:
        if not isinstance(step.taken, missing):
            assert cruise.decide(step.taken, step.at_ns) is not None
    assert cruise.decide(STEPS[start + 3].taken, STEPS[start + 3].at_ns) is None


@pytest.mark.parametrize("kind", [SubmitAccepted, BufferRestored])
def test_an_answer_that_comes_twice_is_not_its_business(
    cruise: Cruise, start: int, kind: type[Input]
) -> None:
    for step in STEPS[start : start + 3]:
        assert cruise.decide(step.taken, step.at_ns) is not None
        if isinstance(step.taken, kind):
            assert cruise.decide(step.taken, step.at_ns) is None


def test_a_course_cruises_from_the_second_like_job_on(start: int) -> None:
    course = Course(state_before(start))
    for index in range(start, start + 3):
        course.decide(STEPS[index].taken, STEPS[index].at_ns)
        assert course._cruise is None, "no job of the run was decided both ways yet"
    course.decide(STEPS[start + 3].taken, STEPS[start + 3].at_ns)
    assert course._cruise is not None


def test_a_run_whose_job_was_decided_differently_does_not_cruise(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A condition the cruise knows nothing of: it would ask one thing less."""
    real = Group.take
    monkeypatch.setattr(Group, "take", lambda self, *given: real(self, *given)[:-1])
    course, plain = Course(state_before(start)), state_before(start)
    for step in STEPS[start : start + 12]:
        found = course.decide(step.taken, step.at_ns)
        assert course._cruise is None
        assert found == decide(plain, step.taken, step.at_ns)


@pytest.mark.parametrize("buffer", [99, None])
def test_a_buffer_of_another_batch_that_comes_back_asks_for_a_proof_anew(
    start: int, buffer: int | None
) -> None:
    """Then a smaller batch may have a buffer that had none, and takes the next job."""
    course = Course(state_before(start))
    for step in STEPS[start : start + 3]:
        course.decide(step.taken, step.at_ns)
    if buffer is not None:
        course.decide(BufferRestored(buffer=buffer, job=1), STEPS[start + 2].at_ns)
    course.decide(STEPS[start + 3].taken, STEPS[start + 3].at_ns)
    assert course.is_cruising is (buffer is None)


@pytest.mark.parametrize("steps", range(9))
def test_whoever_looks_sees_the_state_after_the_last_step(start: int, steps: int) -> None:
    """Landed between two jobs, within one, after even and odd numbers of them."""
    course = Course(state_before(start))
    for step in STEPS[start : start + 6 + steps]:
        course.decide(step.taken, step.at_ns)
    assert course._cruise is not None or not steps
    assert freeze(course.state) == freeze(state_before(start + 6 + steps))
    assert course._cruise is None


def test_another_input_ends_a_cruise_and_is_decided_at_its_state(start: int) -> None:
    course, plain = Course(state_before(start)), state_before(start)
    for step in STEPS[start : start + 10]:
        course.decide(step.taken, step.at_ns)
        decide(plain, step.taken, step.at_ns)
    assert course._cruise is not None
    at_ns = STEPS[start + 10].at_ns
    assert course.decide(TimePassed(), at_ns) == decide(plain, TimePassed(), at_ns)
    assert course._cruise is None and freeze(course.state) == freeze(plain)


def test_the_loop_is_answered_while_another_thread_lands(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look lands; the state has no job for a moment, and the submit is wanted all the same."""
    course = Course(state_before(start))
    for step in STEPS[start : start + 9]:
        course.decide(step.taken, step.at_ns)
    decision = course.decide(STEPS[start + 9].taken, STEPS[start + 9].at_ns)
    (submit,) = [one for one in decision.effects if isinstance(one, SubmitJob)]
    real = Group.land
    seen: list[tuple[Any, ...]] = []

    def land(group: Group, state: State, flying: int | None) -> None:
        seen.append((len(state.jobs), course.is_wanted(submit), course.is_examining()))
        seen.append((course.step, course.now_ns, course.wake_ns()))
        real(group, state, flying)

    monkeypatch.setattr(Group, "land", land)
    assert submit.job in course.state.jobs
    assert seen == [(0, True, False), (STEPS[start + 9].step, STEPS[start + 9].at_ns, None)]


@pytest.mark.parametrize(
    "change",
    [
        lambda state: setattr(state.device, "state", "degraded"),
        lambda state: setattr(state.device, "ceiling_reason", "counters"),
        lambda state: setattr(state.device, "backoff_until_ns", state.now_ns + 1),
        lambda state: setattr(state.models[1].canary, "examining", True),
        lambda state: setattr(state.models[1], "state", "draining"),
        lambda state: setattr(state, "closing", True),
        lambda state: state.decode_ready.append(1),
        lambda state: state.alone.append(1),
        lambda state: setattr(state.requests[3], "min_tokens", 1_000),
        lambda state: state.requests.pop(3),
        lambda state: setattr(state.requests[3], "max_tokens", len(state.requests[3].tokens) + 1),
        lambda state: setattr(state.device.ledger, "finished", 999),
        lambda state: due_canary(state),
        lambda state: setattr(state.device, "health_ns", -(1 << 60)),
    ],
)
def test_where_anything_may_be_due_no_cruise_is_found(
    start: int, change: Callable[[State], None]
) -> None:
    state = state_before(start)
    assert find_cruise(copy(state)) is not None
    change(state)
    assert find_cruise(state) is None


def test_somebody_who_waits_and_may_begin_ends_it(start: int) -> None:
    """There is no empty lane for a seventeenth in this life: it may go on; with one it may not."""
    asked = next(step.taken for step in STEPS if isinstance(step.taken, RequestSubmitted))
    state = state_before(start)
    decide(state, attrs.evolve(asked, request=17), state.now_ns)
    assert find_cruise(copy(state)) is not None
    state.models[1].empty_lanes.append(99)
    assert find_cruise(state) is None


def test_a_token_that_may_end_an_answer_is_not_its_business(start: int) -> None:
    state = state_before(start)
    state.requests[6].stop_token_ids = (7,)
    cruise = find_cruise(state)
    assert cruise is not None
    taken = STEPS[start].taken
    assert isinstance(taken, Completed)
    assert cruise.decide(row(taken, token=7), STEPS[start].at_ns) is None
    assert cruise.decide(row(taken, token=8), STEPS[start].at_ns) is not None


def test_the_next_job_is_foreseen_once_and_when_nothing_stands_between(
    cruise: Cruise, start: int
) -> None:
    """Its number, buffer, operations and places are right, and none of its tokens is in it."""
    (completed, *answers), (following, *_) = STEPS[start : start + 3], STEPS[start + 3 :]
    jobs = [cruise.foresee()]
    assert cruise.foresee() is None
    for step in (completed, *answers, following):
        decision = cruise.decide(step.taken, step.at_ns)
        assert decision is not None
        came = [effect for effect in decision.effects if isinstance(effect, SubmitJob)]
        assert all(outlined(job) == jobs[-1] for job in came)
        if step is not following:
            jobs.append(cruise.foresee())
    assert [job and job.job - cruise.job for job in jobs] == [-1, None, None, 0]


def test_nothing_is_foreseen_before_the_buffer_is_restored(cruise: Cruise, start: int) -> None:
    completed, restored, accepted = STEPS[start : start + 3]
    assert isinstance(restored.taken, BufferRestored)
    for step in (completed, accepted):
        assert cruise.decide(step.taken, cruise.now_ns) is not None
        assert cruise.foresee() is None
    assert cruise.decide(restored.taken, cruise.now_ns) is not None
    assert cruise.foresee() is not None


def test_nothing_is_foreseen_behind_the_last_job_of_a_cruise(cruise: Cruise) -> None:
    cruise.jobs_left = 0
    assert cruise.foresee() is None


def test_log_probabilities_are_told(cruise: Cruise, start: int) -> None:
    taken = STEPS[start].taken
    assert isinstance(taken, Completed)
    told = RowResult(token=9, logprobs=((9, -0.5),))
    decision = cruise.decide(row(taken, token=9, logprobs=told.logprobs), STEPS[start].at_ns)
    assert decision is not None
    assert [e.logprobs for e in decision.effects[1:-1]].count(told.logprobs) == 1  # type: ignore[union-attr]
