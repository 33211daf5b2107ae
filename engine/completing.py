"""Account for a job that is done, then deliver what is current (R3.1, R7.4, E7, E17, E19).

Accounting (job, buffer, lanes) runs once for every job whatever became of its requests; delivery
needs a live request. A completion that matches no job in flight changes nothing: it is in the
journal as an input without events (I5).
"""

from laneway.engine import decoding
from laneway.engine.canaries import examine, is_withheld, judge_canary, may_examine
from laneway.engine.draft import Draft
from laneway.engine.effects import Deliver, RestoreBuffer
from laneway.engine.ending import fail, finish
from laneway.engine.faulting import absolve, fault_job, judge_rest
from laneway.engine.inputs import BufferRestored, Completed, RowResult
from laneway.engine.ladder import first_rung
from laneway.engine.loading import fail_load
from laneway.engine.recovering import begin
from laneway.engine.reserving import evict_if_idle, suspect
from laneway.engine.resuming import suspend_request
from laneway.engine.state import JobRow, JobState, is_end_token
from laneway.engine.submitting import mark_submitted
from laneway.engine.trials import judge_trial
from laneway.statemachines.event import NO_DATA


def complete(draft: Draft, taken: Completed) -> None:
    """Take the result of a done job: the one path by which tokens come into being."""
    job = draft.state.jobs.get(taken.job)
    if job is None or (job.epoch, job.generation) != (taken.epoch, taken.generation):
        return
    if job.state == "planned":
        mark_submitted(draft, job, taken.ticket)
    elif job.ticket != taken.ticket:
        return  # another submission's answer: nothing of this job is known by it (E8)
    rows = decoding.going_on(draft.state, job, taken)
    if rows is not None:
        decoding.complete_decode(draft, job, rows, taken)
        return
    numeric = any(result.fault == "numeric" for result in taken.rows)
    if numeric:
        _end_abnormal(draft, job)
        return
    if job.state == "uncertain":
        _end_doubtful(draft, job)
        return
    withheld = is_withheld(draft.state, job)
    _account(draft, job, taken, withheld=withheld)
    absolve(draft, job)
    if job.origin != "request":
        judge = judge_canary if job.origin == "canary" else judge_trial
        judge(draft, job, taken.rows)
        return
    if withheld:
        for row in job.rows:
            _take_back(draft, row)
    else:
        _deliver_rows(draft, job, taken.rows)
    if taken.kv_effect in ("partial", "unknown"):
        model = draft.state.models[job.model]
        judge_rest(draft, model, f"job/{job.number}: kv effect {taken.kv_effect}")


def _end_abnormal(draft: Draft, job: JobState) -> None:
    """End a job whose numbers are abnormal; a golden run alone decides what that means (R14.5).

    Row 12: nothing is published meanwhile. Where no golden run can decide, a reset does.
    """
    reason = f"job/{job.number}: abnormal numbers"
    fault_job(draft, job, "numeric", reason)
    absolve(draft, job)
    model = draft.state.models[job.model]
    judge_rest(draft, model, reason)
    if job.origin == "request" and may_examine(draft.state, model):
        examine(draft, model, reason)
        return
    cause, rung = first_rung("numeric", 0, quiescent=True, kv_effect="applied")
    begin(draft, cause, rung, reason)


def _end_doubtful(draft: Draft, job: JobState) -> None:
    """End a job whose submit was in doubt and that did run: nothing of it is believed (row 4).

    The device did answer, so it goes on; the job's buffer stays quarantined, its lanes are unknown,
    and what it was for fails with one error.
    """
    reason = f"job/{job.number}: done after a doubtful submit"
    fault_job(draft, job, "doubtful", reason)
    absolve(draft, job)
    model = draft.state.models[job.model]
    if job.origin != "request" and model.state == "warming":
        fail_load(draft, model, reason)
    judge_rest(draft, model, reason)


def _account(draft: Draft, job: JobState, taken: Completed, *, withheld: bool) -> None:
    """Settle job, buffer and lanes: commit what is certain and still wanted, roll back the rest.

    ``withheld``: nothing of its results is taken, and its rows run again (E11).
    """
    generation = job.generation
    data = {"withheld": True} if withheld else NO_DATA
    draft.emit("buffer", job.buffer, "complete", generation=generation)
    draft.emit("job", job.number, "complete", generation=generation, data=data)
    live = draft.state.requests
    wanted = [row.lane for row in job.rows if job.origin != "request" or row.owner in live]
    unwanted: list[int] = []
    if taken.kv_effect == "none" or withheld:
        wanted, unwanted = [], [row.lane for row in job.rows]
    elif len(wanted) < len(job.rows):
        unwanted = [row.lane for row in job.rows if row.lane not in wanted]
    if taken.kv_effect in ("partial", "unknown"):
        suspect(draft, wanted + unwanted, reason=f"kv effect {taken.kv_effect}")
    else:
        if wanted:
            draft.emit("lane", wanted, "commit", generation=generation)
        if unwanted:
            data = {"applied": True}
            draft.emit("lane", unwanted, "rollback", generation=generation, data=data)
    draft.ask(
        RestoreBuffer(model=job.model, buffer=job.buffer, job=job.number, ticket=taken.ticket)
    )


def _take_back(draft: Draft, row: JobRow) -> None:
    """Let a request whose result was withheld wait for its next job; in another lane if need be."""
    request = draft.state.requests.get(row.owner)
    if request is None:
        evict_if_idle(draft, row.lane)
    elif draft.state.lanes[row.lane].state != "ready":
        reason = f"the KV of lane/{row.lane} is in doubt"
        suspend_request(draft, request, reason, suspect=False, kind="kv_unknown")


def _deliver_rows(draft: Draft, job: JobState, results: tuple[RowResult, ...]) -> None:
    """Hand the tokens of a job to its requests; those whose prompt is done now decode."""
    state = draft.state
    facts = state.models[job.model].facts
    assert facts is not None
    find, lanes, ask = state.requests.get, state.lanes, draft.effects.append
    decoding: list[int] = []
    for row, result in zip(job.rows, results, strict=True):
        number, owner, to_tokens = row.lane, row.owner, row.to_tokens
        request = find(owner)
        if request is None:
            evict_if_idle(draft, number)
            continue
        token = result.token
        if result.fault:
            message = f"no token can be drawn from its parameters ({result.fault})"
            fail(draft, request, "parameters", message, http_status=400)
            continue
        drawn = to_tokens >= request.prefill_tokens  # else a part of what it has
        if drawn:
            if is_end_token(facts, request, token):
                finish(draft, request, "stop")
                continue
            count = len(request.tokens)
            ask(Deliver(owner, count - 1, token, result.logprobs))
            if result.stop_hit and count >= request.min_tokens:
                finish(draft, request, "stop")
                continue
            if count >= request.max_tokens:
                finish(draft, request, "length")
                continue
        lane = lanes[number]
        if lane.state != "ready" or lane.length_tokens != to_tokens:
            reason = f"the KV of lane/{number} is not what the job should have left"
            suspend_request(draft, request, reason, suspect=False, kind="kv_unknown")
        elif drawn and request.state == "prefilling":
            decoding.append(owner)
    if decoding:
        draft.emit("request", decoding, "decode", generation=job.generation)


def restore(draft: Draft, taken: BufferRestored) -> None:
    """Return a restored and wiped buffer to the pool (R4.4, E4)."""
    buffer = draft.state.buffers.get(taken.buffer)
    if buffer is not None and buffer.state == "completing" and buffer.job == taken.job:
        draft.emit("buffer", buffer.number, "release", generation=buffer.generation)
