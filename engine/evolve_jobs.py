"""What an event of a job changes: the job, and the owners of its rows."""

from laneway.engine.errors import InternalError
from laneway.engine.evolve_requests import drop_passed
from laneway.engine.inputs import Completed, Input, RowResult
from laneway.engine.state import (
    JobRow,
    JobState,
    RequestState,
    State,
    TrialProgress,
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
            state.device.refusals_in_a_row = 0
            state.device.backoff_tries = 0
        elif event.trigger == "refuse":
            _count_refusal(state, event.data["cause"])
        if event.dest in MACHINES["job"].final:
            del state.jobs[number]
            _leave_job(state, job, event, taken)


def _plan(state: State, number: int, event: Event) -> None:
    if number != state.next_job:
        raise InternalError(f"job/{number} was planned, job/{state.next_job} was next")
    state.next_job = number + 1
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
        rows=tuple(JobRow(*row) for row in data["rows"]),
        planned_ns=state.now_ns,
    )
    state.jobs[number] = job
    if job.origin == "request":
        state.last_task = job.task
        for row in job.rows:
            state.requests[row.owner].job = number
        drop_passed(state, state.prefill_again, is_prefilling)
        drop_passed(state, state.decode_ready, is_decoding)
    else:
        state.models[job.model].trial.job = number


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


def _leave_job(state: State, job: JobState, event: Event, taken: Input) -> None:
    """Let the owners of a terminal job go on; take over the tokens of a completed one."""
    if job.origin != "request":
        trial = state.models[job.model].trial
        trial.job = None
        if event.trigger == "complete":
            trial.done_tokens = job.rows[0].to_tokens
            trial.refusals = trial.kv_refusals = 0
        elif event.trigger == "refuse":
            _count_retry(trial, event.data["cause"])
        return
    results: tuple[RowResult | None, ...] = (None,) * len(job.rows)
    if event.trigger == "complete":
        assert isinstance(taken, Completed)
        results = taken.rows
    for row, result in zip(job.rows, results, strict=True):
        request = state.requests.get(row.owner)
        if request is None:
            continue
        request.job = None
        if result is None:
            if event.trigger == "refuse":
                _count_retry(request, event.data["cause"])
            queue = state.prefill_again if job.task == "prefill" else state.decode_ready
            queue.appendleft(request.number)
            continue
        request.refusals = request.kv_refusals = 0
        if result.fault or is_end_token(state, request, result.token):
            continue
        request.tokens.append(result.token)
        if request.state == "decoding":
            state.decode_ready.append(request.number)


def _count_retry(owner: RequestState | TrialProgress, cause: str) -> None:
    """Use up a retry of whoever owns a refused job; a busy device costs none."""
    if cause == "submit":
        owner.refusals += 1
    elif cause == "kv":
        owner.kv_refusals += 1
