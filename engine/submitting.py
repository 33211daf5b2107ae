"""What the submit thread answered.

Accepted, refused, doubtful, or KV not applied (R2.5, R7.4, R14.2, D6, G13).

A refusal costs the job, not the request: the request is tried again in a new job until its retries
are spent. The rows of a refused batch are tried again one by one, so that a bad one fails alone
(I12). Capacity codes are tried again after a back-off (row 2 of the ladder); refusals in a row,
stale epochs and device codes begin the device's recovery (rows 3, 15, 22).
"""

from laneway.engine.canaries import drop_broken_runs, drop_run
from laneway.engine.draft import Draft
from laneway.engine.ending import fail
from laneway.engine.faulting import absolve, judge_rest
from laneway.engine.inputs import (
    JobProgressed,
    KvApplyFailed,
    SubmitAccepted,
    SubmitDoubtful,
    SubmitRefused,
    SubmitWithdrawn,
)
from laneway.engine.ladder import CONFIGURATION, first_rung, is_beyond_lanes
from laneway.engine.loading import fail_load
from laneway.engine.recovering import begin
from laneway.engine.reserving import evict_if_idle, rollback, suspect
from laneway.engine.resuming import suspend_request
from laneway.engine.state import JobState, LaneState, RequestState, TrialRun

CAPACITY_CLASS = 0x03
CALLER_CLASS = 0x01
JOB_CLASS = 0x06


def accept(draft: Draft, taken: SubmitAccepted) -> None:
    """Move job and buffer to submitted; nothing if the completion came first (G13)."""
    job = draft.state.jobs.get(taken.job)
    if job is not None and job.state == "planned":
        mark_submitted(draft, job, taken.ticket)


def mark_submitted(draft: Draft, job: JobState, ticket: int) -> None:
    """Record that the device has the job."""
    draft.emit("buffer", job.buffer, "submit", generation=job.generation)
    draft.emit("job", job.number, "submit", generation=job.generation, data={"ticket": ticket})


def doubt(draft: Draft, taken: SubmitDoubtful) -> None:
    """Treat a submit that may have queued as in flight (row 4): its end quarantines the buffer.

    Without an end by its deadline it is a hang (row 8).
    """
    job = draft.state.jobs.get(taken.job)
    if job is None or job.state != "planned":
        return
    draft.emit("buffer", job.buffer, "submit", generation=job.generation)
    data = {"ticket": taken.ticket, "code": taken.code}
    draft.emit("job", job.number, "doubt", generation=job.generation, data=data)


def withdraw(draft: Draft, taken: SubmitWithdrawn) -> None:
    """Take back a job that was not handed over: its requests wait for another (G2)."""
    job = draft.state.jobs.get(taken.job)
    if job is None or job.state != "planned":
        return
    rollback(draft, job, applied=False)
    draft.emit("buffer", job.buffer, "withdraw", generation=job.generation)
    draft.emit("job", job.number, "withdraw", generation=job.generation)
    absolve(draft, job)
    for row in job.rows:
        if job.origin == "request" and row.owner not in draft.state.requests:
            evict_if_idle(draft, row.lane)


def progress(draft: Draft, taken: JobProgressed) -> None:
    """Record that a long job was seen running."""
    job = draft.state.jobs.get(taken.job)
    if job is not None and draft.state.buffers[job.buffer].state == "submitted":
        data = {"phase": taken.phase}
        draft.emit("buffer", job.buffer, "run", generation=job.generation, data=data)


def refuse(draft: Draft, taken: SubmitRefused) -> None:
    """Roll the job back and decide who pays for the refusal (rows 2, 3, 5, 15, 22)."""
    job = draft.state.jobs.get(taken.job)
    if job is None or job.state != "planned":
        return
    rollback(draft, job, applied=True)
    kind = taken.code >> 8
    busy = kind == CAPACITY_CLASS
    _drop_job(draft, job, taken.code, cause="busy" if busy else "submit")
    device = draft.state.device
    limits = draft.state.limits
    if busy and device.backoff_tries > limits.backoff_tries_max:
        _fail_owners(draft, job, "device_busy", taken.reason, http_status=503)
    elif kind == CALLER_CLASS and len(job.rows) == 1:
        _fail_owners(draft, job, "device_refused", taken.reason)
    elif kind == CALLER_CLASS:
        _fail_spent_owners(draft, job, "device_refused", taken.reason)
    elif kind == JOB_CLASS:
        _fail_spent_owners(draft, job, "device_refused", taken.reason)
        if device.refusals_in_a_row >= limits.submit_refusals_in_a_row_max:
            reason = f"{device.refusals_in_a_row} refusals in a row: {taken.reason}"
            begin(draft, "submits refused (row 3)", CONFIGURATION, reason, code=taken.code)
    elif not busy:
        cause, rung = first_rung("call", taken.code, quiescent=True, kv_effect="none")
        begin(draft, cause, rung, taken.reason, code=taken.code)


def refuse_kv(draft: Draft, taken: KvApplyFailed) -> None:
    """Answer a KV list that was not applied, without loop or abort (R2.3, R7.7; rows 19, 20).

    Where the device says that all of it is gone, it is the ladder's business (rows 15, 22).
    """
    state = draft.state
    job = state.jobs.get(taken.job) if taken.job is not None else None
    if job is not None and job.state == "planned":
        rollback(draft, job, applied=False)
        _drop_job(draft, job, taken.code, cause="kv")
        _fail_spent_owners(draft, job, "kv_apply", taken.reason)
    if is_beyond_lanes(taken.code):
        cause, rung = first_rung("call", taken.code, quiescent=True, kv_effect="none")
        begin(draft, cause, rung, taken.reason, code=taken.code)
        return
    doubtful: tuple[int, ...] = ()
    if taken.unknown:
        doubtful = taken.lanes or (taken.lane,)
    elif taken.operation in ("COMMIT", "RELEASE"):
        doubtful = (taken.lane,)
    lanes = [state.lanes[number] for number in dict.fromkeys(doubtful) if number in state.lanes]
    lanes = [lane for lane in lanes if lane.state != "reserved"]
    if lanes:
        _doubt_lanes(draft, lanes, taken.reason)


def _doubt_lanes(draft: Draft, lanes: list[LaneState], reason: str) -> None:
    """Take lanes of one model out of use whose device side is not as decided (row 20).

    What they held goes on in other lanes, from its tokens.

    A lane that is reserved is not among them: it was bound anew, and the list of its own job fails
    too.
    """
    state = draft.state
    model = state.models[lanes[0].model]
    numbers = [lane.number for lane in lanes]
    held = [lane.owner or 0 for lane in lanes if lane.origin == "request"]
    suspect(draft, numbers, reason=reason)
    tried = {number for run in model.runs.values() for number in run.lanes}
    if model.state == "warming" and tried.intersection(numbers):
        fail_load(draft, model, f"the KV of a trial is in doubt: {reason}")
        return
    drop_broken_runs(draft, model)
    for owner in held:
        if (request := state.requests.get(owner)) is not None:
            suspend_request(draft, request, reason, suspect=False, kind="kv_unknown")
    judge_rest(draft, model, reason)


def _drop_job(draft: Draft, job: JobState, code: int, *, cause: str) -> None:
    data = {"code": code, "cause": cause}
    draft.emit("buffer", job.buffer, "refuse", generation=job.generation)
    draft.emit("job", job.number, "refuse", generation=job.generation, data=data)
    absolve(draft, job)
    for row in job.rows:
        if job.origin == "request" and row.owner not in draft.state.requests:
            evict_if_idle(draft, row.lane)


def _fail_spent_owners(draft: Draft, job: JobState, kind: str, reason: str) -> None:
    """End those owners of a refused job whose retries are spent."""
    if job.origin != "request":
        if _is_spent(draft, draft.state.models[job.model].runs[job.rows[0].owner]):
            _fail_owners(draft, job, kind, reason)
        return
    for request in _owners(draft, job):
        if _is_spent(draft, request):
            _fail_refused(draft, job, request, kind, reason, http_status=500)


def _is_spent(draft: Draft, owner: RequestState | TrialRun) -> bool:
    limits = draft.state.limits
    return owner.refusals > limits.submit_retries_max or owner.kv_refusals > limits.kv_retries_max


def _owners(draft: Draft, job: JobState) -> list[RequestState]:
    """Return the live requests of a job."""
    if job.origin != "request":
        return []
    requests = draft.state.requests
    return [requests[row.owner] for row in job.rows if row.owner in requests]


def _fail_owners(
    draft: Draft, job: JobState, kind: str, reason: str, *, http_status: int = 500
) -> None:
    """End what a refused job was for: its requests, or the load that ran a trial."""
    model = draft.state.models[job.model]
    if job.origin != "request":
        if model.state == "warming":
            fail_load(draft, model, f"a trial was refused: {reason}")
        elif (run := model.runs.get(job.rows[0].owner)) is not None:
            drop_run(draft, model, run)
        return
    for request in _owners(draft, job):
        _fail_refused(draft, job, request, kind, reason, http_status=http_status)


def _fail_refused(
    draft: Draft, job: JobState, request: RequestState, kind: str, reason: str, *, http_status: int
) -> None:
    times = request.refusals or request.kv_refusals or draft.state.device.backoff_tries
    message = f"job/{job.number} was refused ({times} times): {reason}"
    fail(draft, request, kind, message, http_status=http_status)
