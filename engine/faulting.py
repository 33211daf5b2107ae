"""What happens when the device fails.

The job ends, its memory and lanes are fenced, its requests are suspected; what the device has to go
through is the recovery ladder's business (`recovering.py`), which begins on the rung that the
fault's row names (R14, 9.2). A suspected hang only stops submissions until it is confirmed or the
job turns out to be slow (E16).

Less than that costs less: where the device answered for certain and only one job's memory or lane
is in doubt, that buffer stays quarantined, that lane unknown, and the device goes on `degraded`
until its generation ends (rows 4, 6 and 20, G12). When too little is left to serve with (more than
a quarter of the lanes unknown, or a submodel without a buffer) that is brought about by a reset.
"""

from collections.abc import Mapping
from typing import Any

from laneway.engine.capability import can_cancel
from laneway.engine.draft import Draft
from laneway.engine.effects import CancelJob, ProbeHealth
from laneway.engine.ending import fail
from laneway.engine.guilt import is_blamed, oldest_in_flight
from laneway.engine.inputs import (
    CancelTold,
    DeviceFaulted,
    HealthFacts,
    JobStalled,
    MemoryBuried,
    RestoreFailed,
)
from laneway.engine.ladder import (
    CCU,
    CODE_CANCEL_TOO_LATE,
    CONFIGURATION,
    DEVICE,
    FOREIGN_RESET,
    GONE,
    PROCESS,
    QUARANTINE,
    first_rung,
    within,
)
from laneway.engine.loading import fail_load
from laneway.engine.plan import USABLE
from laneway.engine.recovering import begin, lose_device
from laneway.engine.reserving import evict_if_idle, rollback
from laneway.engine.reserving import suspect as suspect_lanes
from laneway.engine.resuming import suspend_request
from laneway.engine.state import JobState, ModelState, State
from laneway.engine.successors import ask_again
from laneway.engine.trusting import restrict_if_overlapped

UNKNOWN_LANES_MAX_SHARE = 0.25
"""Row 20 of the ladder: more unknown lanes than this share is a matter of the generation."""


def fault(draft: Draft, taken: DeviceFaulted) -> None:
    """Fence the job that failed, then do what the row of the fault says (9.2).

    A fault of no job in flight, or of another epoch, is only recorded (I5).
    """
    state = draft.state
    if taken.epoch not in (0, state.device.epoch):
        return
    device_wide = taken.kind in ("device", "call")
    job = state.jobs.get(taken.job) if taken.job is not None else None
    if job is None and not device_wide:
        return
    reason = f"{taken.kind} {taken.code:#06x}: {taken.reason}"
    cause, rung = row_of(state, taken)
    recalled = job is not None and job.recall_until_ns > 0 and cause != FOREIGN_RESET
    if recalled and taken.kind == "aborted" and taken.quiescent:
        cause, rung = "cancelled on the device (row 8)", QUARANTINE
    if job is not None:
        reason = f"job/{job.number}: {reason}"
        repeated = _is_repeated(state)
        unwritten = rung == QUARANTINE and taken.kv_effect == "none"
        blamed = is_blamed(state, taken.kind) and cause != FOREIGN_RESET
        fault_job(draft, job, taken.kind, reason, unwritten=unwritten, blamed=blamed)
        if rung == QUARANTINE and repeated:
            cause, rung = "second exception in its window (row 6)", CCU
        if rung == QUARANTINE:
            _go_on_contained(draft, job, reason)
            return
    begin(draft, cause, rung, reason, code=taken.code)


def row_of(state: State, taken: DeviceFaulted) -> tuple[str, int]:
    """Return the cause of a fault and the rung that it begins with (9.2).

    Whatever a job ended by, a device that is gone or that another process has reset is the cause.
    """
    if taken.health is not None and taken.health.state in GONE:
        return "device lost (row 16)", PROCESS
    if was_reset_by_another(state, taken.health):
        return FOREIGN_RESET, DEVICE
    return first_rung(taken.kind, taken.code, quiescent=taken.quiescent, kv_effect=taken.kv_effect)


def was_reset_by_another(state: State, health: HealthFacts | None) -> bool:
    """Return whether the device is in a later epoch than any that this engine knows (row 22)."""
    return health is not None and health.device_epoch > state.device.device_epoch


def _is_repeated(state: State) -> bool:
    """Return whether there was an exception a short while ago (row 6)."""
    window_ns = state.limits.exceptions_window_ns
    return bool(within(state.ladder.exceptions_ns, state.now_ns, window_ns))


def _go_on_contained(draft: Draft, job: JobState, reason: str) -> None:
    """Go on with one buffer and some lanes less, as the device is sure of the rest (row 6)."""
    model = draft.state.models[job.model]
    absolve(draft, job)
    if job.origin != "request" and model.state == "warming":
        fail_load(draft, model, reason)
    judge_rest(draft, model, reason)


def fault_job(
    draft: Draft,
    job: JobState,
    kind: str,
    reason: str,
    *,
    unwritten: bool = False,
    blamed: bool = True,
) -> None:
    """End a job that went wrong.

    Its buffer is quarantined (G1). Its lanes are unknown (G14), or rolled back where the device
    says for certain that they are ``unwritten``. Its requests are suspects, none guilty yet: each
    is run again alone (G15); unless it is not ``blamed``.
    """
    generation = job.generation
    data = {"kind": kind, "reason": reason}
    trigger = "lose" if job.state == "planned" else "abort" if kind == "aborted" else "fault"
    draft.emit("buffer", job.buffer, "quarantine", generation=generation, data=data)
    draft.emit("job", job.number, trigger, generation=generation, data=data)
    if unwritten:
        rollback(draft, job, applied=True)
    else:
        suspect_lanes(draft, [row.lane for row in job.rows], reason=reason)
    restrict_if_overlapped(draft, job, kind)
    if job.origin != "request":
        return
    named = f"device_fault_{kind}" if blamed else "device_fault"
    for row in job.rows:
        request = draft.state.requests.get(row.owner)
        if request is not None:
            suspend_request(draft, request, reason, suspect=blamed, kind=named)
        elif unwritten:
            evict_if_idle(draft, row.lane)


def stall(draft: Draft, taken: JobStalled) -> None:
    """Stop submissions at a suspected hang and probe; reset when it is confirmed (E16).

    What is confirmed concerns the oldest job in flight: it holds up the others (9.3).
    """
    job = draft.state.jobs.get(taken.job)
    if job is None or draft.state.device.state == "lost":
        return
    if draft.state.device.state == "recovering" and taken.stage == "suspect":
        return  # the proof runs one job at a time: there is nothing to stop
    reason = f"no result for {taken.age_ns} ns in phase {taken.phase}"
    if draft.state.device.state in USABLE:
        suspect(draft, f"job/{job.number}: {reason}")
    if taken.stage == "suspect":
        draft.ask(ProbeHealth())
        return
    hung = oldest_in_flight(draft.state, job)
    if not hung.recall_until_ns and _may_recall(draft.state, hung):
        until_ns = draft.state.now_ns + draft.state.limits.recall_wait_ns
        data = {"reason": reason, "until_ns": until_ns}
        draft.emit("job", hung.number, "recall", generation=hung.generation, data=data)
        draft.ask(CancelJob(job=hung.number, ticket=hung.ticket))
    elif draft.state.now_ns >= hung.recall_until_ns:
        _end_hung(draft, hung, reason)


def _may_recall(state: State, job: JobState) -> bool:
    """Return whether the device may be asked to end a job: once, where it is a capability (E6)."""
    device, facts = state.device.facts, state.models[job.model].facts
    if device is None or facts is None or job.state not in ("submitted", "uncertain"):
        return False
    return can_cancel(device, facts.sha256)


def _end_hung(draft: Draft, job: JobState, reason: str) -> None:
    """End a job that hangs, and what stands still behind it without being to blame."""
    blamed = is_blamed(draft.state, "hang")
    fault_job(draft, job, "hang", reason, blamed=blamed)
    for other in [one for one in draft.state.jobs.values() if one.suspected]:
        fault_job(draft, other, "hang", f"behind job/{job.number}: {reason}", blamed=False)
    begin(draft, "hang (row 8)", CCU, f"job/{job.number} hangs: {reason}")


def recall_told(draft: Draft, taken: CancelTold) -> None:
    """Wait on for a job that is to end, or reset at once where the device will not end it."""
    job = draft.state.jobs.get(taken.job)
    if job is not None and job.recall_until_ns and taken.code not in (0, CODE_CANCEL_TOO_LATE):
        _end_hung(draft, job, f"it cannot be cancelled: {taken.reason}")


def expire_recalls(draft: Draft) -> None:
    """Reset where a job did not end although the device was asked to end it (row 8)."""
    for job in list(draft.state.jobs.values()):
        if job.recall_until_ns and draft.state.now_ns >= job.recall_until_ns:
            _end_hung(draft, job, "it did not end when the device was asked to end it")


def restore_failed(draft: Draft, taken: RestoreFailed) -> None:
    """Keep a buffer that could not be cleaned away from everybody (E4, E5)."""
    buffer = draft.state.buffers.get(taken.buffer)
    if buffer is None or buffer.state != "completing" or buffer.job != taken.job:
        return
    data = {"kind": "restore", "reason": taken.reason}
    draft.emit("buffer", buffer.number, "quarantine", generation=buffer.generation, data=data)
    cause, rung = first_rung("restore", taken.code, quiescent=False, kv_effect="unknown")
    reason = f"buffer/{buffer.number} could not be restored: {taken.reason}"
    begin(draft, cause, rung, reason, code=taken.code)


def buried(draft: Draft, taken: MemoryBuried) -> None:
    """Give the device up when the process keeps more memory for good than it may (E9).

    Only the end of the process gives that memory back, so no other device of it helps.
    """
    limits = draft.state.limits
    items, kept = taken.item_count, taken.byte_count
    if items <= limits.buried_items_max and kept <= limits.buried_bytes_max:
        return
    lose_device(
        draft,
        f"{items} buffers with {kept} bytes are kept for good, since the device may still write to"
        f" them; a process may keep {limits.buried_items_max} and {limits.buried_bytes_max} bytes:"
        " restart the process",
        rung=PROCESS,
    )


def absolve(draft: Draft, job: JobState) -> None:
    """Let a suspect device go on, now that a job it was suspected for has its answer (E16).

    Not while another job in flight is suspected: that one has no answer yet (G4).
    """
    state = draft.state
    if state.device.state != "suspect" or state.ladder.recovery is not None:
        return  # nothing to absolve, or its reset is decided
    others = (one for one in state.jobs.values() if one.number != job.number)
    if not any(one.suspected for one in others):
        let_go_on(draft, {"job": job.number})


def let_go_on(draft: Draft, why: Mapping[str, Any]) -> None:
    """Let a suspect device go on as what it was: closing, degraded or serving (G12).

    Loads that waited for it go on too.
    """
    draft.device("absolve", data=why)
    if draft.state.closing:
        draft.device("drain")
    elif any(_in_doubt(draft.state)):
        degrade(draft, "it was degraded before it was suspected")
    ask_again(draft)


def judge_rest(draft: Draft, model: ModelState, reason: str) -> None:
    """Go on degraded with what is left of a model's lanes and buffers, or have it made anew.

    Source: G12, row 20. A model that is being given back needs nothing any more.
    """
    if model.state not in ("warming", "ready", "draining"):
        return
    short = _too_little_left(draft.state, model)
    if short:
        begin(draft, "too little left to serve with (row 20)", CONFIGURATION, f"{short}: {reason}")
    else:
        degrade(draft, reason)


def _too_little_left(state: State, model: ModelState) -> str:
    """Return what a model is too short of to be served without a reset, or ""."""
    lanes = [lane for lane in state.lanes.values() if lane.model == model.number]
    unknown = sum(lane.state == "unknown" for lane in lanes)
    if unknown > UNKNOWN_LANES_MAX_SHARE * len(lanes):
        return f"KV of {unknown} of {len(lanes)} lanes is in doubt"
    for plan in model.buffers:
        numbers = range(plan.first, plan.first + plan.count)
        if all(state.buffers[number].state == "quarantined" for number in numbers):
            return f"all {plan.count} buffers of {plan.submodel} are quarantined"
    return ""


def _in_doubt(state: State) -> tuple[bool, bool]:
    """Return whether a lane is unknown, and whether a buffer is quarantined."""
    return (
        any(lane.state == "unknown" for lane in state.lanes.values()),
        any(buffer.state == "quarantined" for buffer in state.buffers.values()),
    )


def degrade(draft: Draft, reason: str) -> None:
    """Let the device go on with one job at a time while something of it is in doubt (G12)."""
    if draft.state.device.state == "serving":
        draft.device("degrade", data={"reason": reason})


def requalify(draft: Draft) -> None:
    """Let the device serve fully again once nothing of it is in doubt (G12)."""
    if draft.state.device.state == "degraded" and not any(_in_doubt(draft.state)):
        draft.device("requalify")


def suspect(draft: Draft, reason: str) -> None:
    """Stop submissions on the device at once (G4)."""
    draft.device("suspect", data={"reason": reason})


def distrust_generation(draft: Draft, model: ModelState, reason: str) -> None:
    """Believe nothing of a generation any more whose golden run alone differs (R14.5, row 12).

    Requests with tokens that no canary proved end with an error: what they would go on from is in
    doubt. The others go on in the next generation.
    """
    said = f"model/{model.number} computes wrongly: {reason}"
    for request in list(draft.state.requests.values()):
        if request.model == model.number and request.suspect_from is not None:
            message = f"its tokens from position {request.suspect_from} on are in doubt: {said}"
            fail(draft, request, "numbers_in_doubt", message)
    cause, rung = first_rung("numeric", 0, quiescent=True, kv_effect="applied")
    begin(draft, cause, rung, said)
