"""Move the state over the usual decode job in one pass over its rows.

Theory of operation. Nearly every job of a busy engine is a decode of requests that all go on after
it. ``evolve`` moves the state by one event after the other, each with a pass over the entities it
names. The two functions here do the same for the events of such a job's completion and of its plan,
in one pass each. Whoever calls them has seen that the rows are of that kind (decoding.py) and
records the events; a journal is folded through ``evolve``, and a test holds the two states equal
after every step.

Source: decision 13.
"""

from collections.abc import Sequence
from itertools import islice

from laneway.engine.effects import KvOperation, SubmitRow
from laneway.engine.evolve_buffers import take_buffer
from laneway.engine.evolve_canaries import count_job
from laneway.engine.evolve_jobs import add_job, drop_all_passed, pay_for_decode
from laneway.engine.state import (
    JobRow,
    JobState,
    LaneState,
    RequestState,
    State,
)
from laneway.statemachines import MACHINES


def _dest(machine: str, source: str, trigger: str) -> str:
    """Return where a declared edge leads."""
    return MACHINES[machine].table[source, trigger]


COMPLETED_BUFFER = _dest("buffer", "submitted", "complete")
COMPLETED_JOB = _dest("job", "submitted", "complete")
COMMITTED = _dest("lane", "reserved", "commit")
RESERVED = _dest("lane", "ready", "reserve")
ACQUIRED = _dest("buffer", "free", "acquire")
PLANNED = _dest("job", "drafted", "plan")


def complete_decodes(
    state: State,
    job: JobState,
    requests: Sequence[RequestState],
    lanes: Sequence[LaneState],
    tokens: Sequence[int],
) -> None:
    """Move buffer, job and lanes over a completion, and give every request its token.

    ``requests``, ``lanes`` and ``tokens`` are those of the job's rows, in their order.
    """
    number = job.number
    model = state.models[job.model]
    buffer = state.buffers[job.buffer]
    assert model.facts is not None
    buffer.state = COMPLETED_BUFFER
    del state.jobs[number]
    state.device.ledger.finished += 1
    count_job(model, model.facts.by_name[buffer.submodel].batch_max)
    for request, lane, token in zip(requests, lanes, tokens, strict=True):
        request.job = None
        request.refusals = request.kv_refusals = 0
        request.tokens.append(token)
        reached = lane.reserved_tokens
        lane.due = (KvOperation("COMMIT", lane.number, lane.length_tokens, reached, number),)
        lane.length_tokens = reached
        lane.reserved_tokens = 0
        lane.job = None
        lane.carried = ()
        lane.state = COMMITTED
    state.decode_ready.extend([row.owner for row in job.rows])


def plan_decodes(
    state: State, job: JobState, planned: Sequence[SubmitRow]
) -> tuple[KvOperation, ...]:
    """Move lanes, buffer and job over a plan; return what the device is asked to do before it.

    ``planned``: the rows of the plan. Their requests are the first of ``decode_ready``.
    """
    number = job.number
    requests, lanes = state.requests, state.lanes
    due: list[KvOperation] = []
    reserve: list[KvOperation] = []
    rows: list[JobRow] = []
    for row in planned:
        owner, name = row.owner, row.lane
        lane = lanes[name]
        requests[owner].job = lane.job = number
        length = lane.length_tokens
        grown = lane.reserved_tokens = length + 1
        lane.carried = lane.due
        due += lane.due
        lane.due = ()
        lane.state = RESERVED
        reserve.append(KvOperation("RESERVE", name, length, grown, number))
        rows.append(JobRow(name, owner, length, grown))
    job.rows = tuple(rows)
    buffer, model = state.buffers[job.buffer], state.models[job.model]
    take_buffer(model.free_buffers[buffer.submodel], buffer.number)
    buffer.state = ACQUIRED
    buffer.job = number
    add_job(state, job)
    pay_for_decode(state)
    _leave_ready(state, {row.owner for row in planned})
    return (*due, *reserve)


def _leave_ready(state: State, taken: set[int]) -> None:
    """Take the owners of a job out of the head of the queue, and what has passed behind them."""
    ready = state.decode_ready
    if taken == set(islice(ready, len(taken))):
        for _ in taken:
            ready.popleft()
    drop_all_passed(state)
