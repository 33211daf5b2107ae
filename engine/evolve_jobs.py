"""What an event of a job changes: the job, and the owners of its rows."""

from collections import deque

from laneway.engine.errors import InternalError
from laneway.engine.evolve_canaries import count_job
from laneway.engine.evolve_ladder import note_exception
from laneway.engine.evolve_requests import drop_passed, forget_alone, leave_turns
from laneway.engine.guilt import pardon
from laneway.engine.inputs import Completed, DeviceFaulted, Input, RowResult
from laneway.engine.plan import may_split
from laneway.engine.state import (
    JobRow,
    JobState,
    Ledger,
    RequestState,
    State,
    TrialRun,
    is_decoding,
    is_end_token,
    is_prefilling,
)
from laneway.statemachines import MACHINES, Event


def evolve_job(state: State, event: Event, taken: Input) -> None:
    """Move jobs; a completed one's tokens are taken from the step's input."""
    for number in event.entities:
        if event.trigger == "plan":
            _plan(state, number, event)
            continue
        job = state.jobs[number]
        job.state = event.dest
        if event.trigger in ("submit", "doubt"):
            job.ticket = event.data["ticket"]
            state.device.ledger.submitted += 1
            state.device.refusals_in_a_row = 0
            state.device.backoff_tries = 0
        elif event.trigger == "recall":
            job.recall_until_ns = event.data["until_ns"]
        elif event.trigger == "refuse":
            _count_refusal(state, event.data["cause"])
        elif event.trigger == "fault" and event.data["kind"] in ("ccu", "dma"):
            note_exception(state)
        if event.dest in MACHINES["job"].final:
            del state.jobs[number]
            if event.source != "planned":
                _count_end(state.device.ledger, number, taken)
            _leave_job(state, job, event, taken)


def _plan(state: State, number: int, event: Event) -> None:
    """Bring a job into being; its rows are the lanes reserved for it in the same step."""
    if number != state.next_job:
        raise InternalError(f"job/{number} was planned, job/{state.next_job} was next")
    data = event.data
    job = JobState(
        number=number,
        state=event.dest,
        task=data["task"],
        origin=data["origin"],
        model=data["model"],
        epoch=event.epoch,
        generation=event.generation,
        buffer=data["buffer"],
        rows=_rows(state, number),
        planned_ns=state.now_ns,
    )
    state.reserving = ()
    add_job(state, job)
    if job.origin != "request":
        state.models[job.model].runs[job.rows[0].owner].job = number
        return
    requests = state.requests
    for row in job.rows:
        request = requests[row.owner]
        request.job = number
        if request.alone:
            leave_turns(state, row.owner)  # it may have been taken out of turn
    _count_turn(state, job)
    drop_all_passed(state)
    _drop_taken(state, job)


def add_job(state: State, job: JobState) -> None:
    """Let a planned job be among those in flight."""
    state.next_job = job.number + 1
    state.jobs[job.number] = job
    if len(state.jobs) > 1:
        for one in state.jobs.values():
            one.overlapped = True
    state.models[job.model].canary.went = job.origin == "canary"


def drop_all_passed(state: State) -> None:
    """Drop from the front of every queue of those that have a lane what does not belong there."""
    drop_passed(state, state.prefill_again, is_prefilling)
    drop_passed(state, state.chunking, is_prefilling)
    drop_passed(state, state.decode_ready, is_decoding)


def _drop_taken(state: State, job: JobState) -> None:
    """Take the owners of a job out of the middle of the queue, where its rows are fixed to lanes.

    Why only there: elsewhere a job takes the first of the queue, who are dropped already.
    """
    facts = state.models[job.model].facts
    assert facts is not None
    if job.task == "decode" and facts.by_name[state.buffers[job.buffer].submodel].fixed_rows:
        taken = {row.owner for row in job.rows}
        left = [number for number in state.decode_ready if number not in taken]
        if len(left) < len(state.decode_ready):
            state.decode_ready = deque(left)


def _rows(state: State, job: int) -> tuple[JobRow, ...]:
    """Return the rows of a job to be, from the lanes that are reserved for it."""
    rows: list[JobRow] = []
    for number in state.reserving:
        lane = state.lanes[number]
        owner = lane.owner
        if lane.job != job or owner is None:
            raise InternalError(f"lane/{number} is reserved for job/{lane.job}, not for job/{job}")
        rows.append(JobRow(number, owner, lane.length_tokens, lane.reserved_tokens))
    return tuple(rows)


def _count_turn(state: State, job: JobState) -> None:
    """Keep the books by which prefill and decode, short and long, take turns (R5.4)."""
    if job.task == "decode":
        pay_for_decode(state)
        return
    state.prefill_debt_tokens = sum(row.to_tokens - row.from_tokens for row in job.rows)
    if any(state.requests[row.owner].long for row in job.rows):
        state.short_turns = 0
    elif state.chunking or state.long_waiting.entries:
        state.short_turns += 1


def pay_for_decode(state: State) -> None:
    """Pay off what a decode job pays of the debt that prefills left."""
    paid = state.limits.prefill_tokens_per_decode
    state.prefill_debt_tokens = max(0, state.prefill_debt_tokens - paid)


def _count_refusal(state: State, cause: str) -> None:
    """Count refusals of submits in a row; back off from what may pass by itself."""
    device = state.device
    if cause == "submit":
        device.refusals_in_a_row += 1
        return
    limits = state.limits
    wait_ns = min(limits.backoff_first_ns << min(device.backoff_tries, 20), limits.backoff_last_ns)
    device.backoff_tries += 1
    device.backoff_until_ns = state.now_ns + wait_ns


def _count_end(ledger: Ledger, number: int, taken: Input) -> None:
    """Count the end of a job that the device had, as the device told it (E14)."""
    if isinstance(taken, Completed) and taken.job == number:
        ledger.finished += 1
    elif not isinstance(taken, DeviceFaulted) or taken.job != number:
        ledger.given_up += 1
    elif taken.kind == "aborted":
        ledger.aborted += 1
    else:
        ledger.failed += 1


def _leave_job(state: State, job: JobState, event: Event, taken: Input) -> None:
    """Let the owners of a terminal job go on; take over the tokens of a completed one."""
    if job.origin != "request":
        _leave_run(state, job, event)
        return
    if event.trigger == "complete" and not event.data.get("withheld"):
        assert isinstance(taken, Completed)
        _take_tokens(state, job, taken.rows)
        return
    again: list[int] = []
    for row in job.rows:
        request = state.requests.get(row.owner)
        if request is None:
            continue
        request.job = None
        if event.trigger == "refuse":
            _count_retry(request, event.data["cause"])
        again.append(request.number)
    queue = state.prefill_again if job.task == "prefill" else state.decode_ready
    queue.extendleft(reversed(again))


def _take_tokens(state: State, job: JobState, results: tuple[RowResult, ...]) -> None:
    """Give the owners of a completed job their tokens, and let them wait for their next one."""
    model = state.models[job.model]
    facts = model.facts
    assert facts is not None
    count_job(model, facts.by_name[state.buffers[job.buffer].submodel].batch_max)
    find, ready = state.requests.get, state.decode_ready.append
    for row, result in zip(job.rows, results, strict=True):
        owner = row.owner
        request = find(owner)
        if request is None:
            continue
        request.job = None
        request.refusals = request.kv_refusals = 0
        if row.to_tokens < request.prefill_tokens:
            _go_on_with_known(state, request)
            continue
        token = result.token
        if result.fault or is_end_token(facts, request, token):
            continue
        request.tokens.append(token)
        if request.state == "decoding":
            ready(owner)
        if request.alone and job.task == "decode":
            forget_alone(state, request)
            pardon(state.ladder, request.content)


def _go_on_with_known(state: State, request: RequestState) -> None:
    """Queue a request for the next part of what it already has.

    That is the next turn of its class where prompts may be run in parts. Else no prefill may begin
    behind tokens, and the rest takes its turns among the decodes.
    """
    if may_split(state, state.models[request.model]):
        state.chunking.appendleft(request.number)
    else:
        request.catching_up = True
        state.decode_ready.append(request.number)


def _leave_run(state: State, job: JobState, event: Event) -> None:
    run = state.models[job.model].runs[job.rows[0].owner]
    run.job = None
    run.overlapped = run.overlapped or job.overlapped
    if event.trigger == "complete":
        run.done_tokens = job.rows[0].to_tokens
        run.refusals = run.kv_refusals = 0
    elif event.trigger == "refuse":
        _count_retry(run, event.data["cause"])


def _count_retry(owner: RequestState | TrialRun, cause: str) -> None:
    """Use up a retry of whoever owns a refused job; a busy device costs none."""
    if cause == "submit":
        owner.refusals += 1
    elif cause == "kv":
        owner.kv_refusals += 1
