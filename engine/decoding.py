"""Decide the usual decode job in one pass over its rows: its completion, and its plan.

Theory of operation. A decode job of requests of which each gets a token and goes on needs nothing
that completing.py and planning.py know of what may go wrong. ``going_on`` and ``is_plain`` say
whether a job is of that kind, without changing anything; the two functions behind them then record
the events that ``Draft.emit`` would, and evolve_decodes.py moves the state over them. Every other
job takes the long way; a test decides both ways at every step and finds the same.

Source: decision 13.
"""

from typing import NamedTuple

from laneway.engine.draft import Draft
from laneway.engine.effects import Deliver, KvOperation, RestoreBuffer
from laneway.engine.evolve_decodes import (
    ACQUIRED,
    COMMITTED,
    COMPLETED_BUFFER,
    COMPLETED_JOB,
    PLANNED,
    RESERVED,
    complete_decodes,
    plan_decodes,
)
from laneway.engine.inputs import Completed
from laneway.engine.plan import Plan, plan_data
from laneway.engine.state import JobState, LaneState, RequestState, State, is_end_token
from laneway.statemachines.event import NO_DATA, make_event


class Rows(NamedTuple):
    """The rows of a job by columns; a value of the moment, since what it names moves on."""

    requests: list[RequestState]
    lanes: list[LaneState]


def going_on(state: State, job: JobState, taken: Completed) -> Rows | None:
    """Return the rows of a completed job if each is of a request that decodes on after its token.

    None where anything else is to be thought of: an ending, an abnormal number, KV in doubt, a
    suspect, an examination, a device that is being judged.
    """
    model = state.models[job.model]
    facts = model.facts
    if (
        job.task != "decode"
        or job.origin != "request"
        or job.state != "submitted"
        or taken.kv_effect != "applied"
        or facts is None
        or model.canary.examining
        or state.device.state == "suspect"
        or len(taken.rows) != len(job.rows)
        or state.buffers[job.buffer].state != "submitted"
    ):
        return None
    find, known = state.requests.get, state.lanes
    requests: list[RequestState] = []
    lanes: list[LaneState] = []
    for row, result in zip(job.rows, taken.rows, strict=True):
        request, lane = find(row.owner), known[row.lane]
        if (
            request is None
            or request.state != "decoding"
            or result.fault
            or result.stop_hit
            or request.alone
            or len(request.tokens) + 1 >= request.max_tokens
            or is_end_token(facts, request, result.token)
            or lane.state != "reserved"
            or lane.reserved_tokens != row.to_tokens
        ):
            return None
        requests.append(request)
        lanes.append(lane)
    return Rows(requests, lanes)


def complete_decode(draft: Draft, job: JobState, rows: Rows, taken: Completed) -> None:
    """Complete a job whose rows are ``going_on``; every request is told its token."""
    state = draft.state
    own = (state.device.epoch, job.generation, NO_DATA)
    numbers = tuple([row.lane for row in job.rows])
    draft.events += (
        make_event("buffer", (job.buffer,), "complete", "submitted", COMPLETED_BUFFER, *own),
        make_event("job", (job.number,), "complete", "submitted", COMPLETED_JOB, *own),
        make_event("lane", numbers, "commit", "reserved", COMMITTED, *own),
    )
    complete_decodes(state, job, *rows, [result.token for result in taken.rows])
    draft.ask(
        RestoreBuffer(model=job.model, buffer=job.buffer, job=job.number, ticket=taken.ticket)
    )
    draft.effects += [
        Deliver(request.number, len(request.tokens) - 1, result.token, result.logprobs)
        for request, result in zip(rows.requests, taken.rows, strict=True)
    ]


def is_plain(state: State, chosen: Plan) -> bool:
    """Return whether a plan is a decode of requests, none of them a suspect.

    Where rows are fixed to lanes it is not: they may stand anywhere in the queue (E15).
    """
    facts = state.models[chosen.model].facts
    assert facts is not None
    return (
        chosen.task == "decode"
        and chosen.origin == "request"
        and not state.alone
        and not facts.by_name[state.buffers[chosen.buffer].submodel].fixed_rows
    )


def plan_decode(draft: Draft, chosen: Plan) -> tuple[KvOperation, ...]:
    """Plan the job of a validated plan that ``is_plain``; return its KV operations."""
    state = draft.state
    number = state.next_job
    generation = state.models[chosen.model].generation
    own = (state.device.epoch, generation)
    lanes = tuple([row.lane for row in chosen.rows])
    growth, following = {"job": number, "by": 1}, {"job": number}
    draft.events += (
        make_event("lane", lanes, "reserve", "ready", RESERVED, *own, growth),
        make_event("buffer", (chosen.buffer,), "acquire", "free", ACQUIRED, *own, following),
        make_event("job", (number,), "plan", "drafted", PLANNED, *own, plan_data(chosen)),
    )
    job = JobState(
        number=number,
        state=PLANNED,
        task=chosen.task,
        origin=chosen.origin,
        model=chosen.model,
        epoch=state.device.epoch,
        generation=generation,
        buffer=chosen.buffer,
        rows=(),
        planned_ns=state.now_ns,
    )
    return plan_decodes(state, job, chosen.rows)
