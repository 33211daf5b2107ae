"""What happens when the device fails.

The job ends, its memory and lanes are fenced, and the device is lost (R14, G4, G7).

The reset budget is 0: there is no reset, so the first fault that puts the device in doubt ends in
`lost`. That is a true end state: every job is terminal, every buffer the device may still touch is
quarantined, every lane that held something is unknown, every client is told once, readiness is
false, nothing is submitted any more. A suspected hang only stops submissions until it is confirmed
or the job turns out to be slow (E16).

Less than that costs less: where the device answered for certain and only one job's memory or lane
is in doubt, that buffer stays quarantined, that lane unknown, and the device goes on `degraded`
until the model is unloaded (rows 4 and 20, G12). When too little is left to serve with (more than a
quarter of the lanes unknown, or a submodel without a buffer) only a reset would help, and the
device is lost.
"""

from laneway.engine.draft import Draft
from laneway.engine.effects import ProbeHealth
from laneway.engine.ending import fail
from laneway.engine.inputs import (
    DeviceFaulted,
    HealthProbed,
    JobStalled,
    MemoryBuried,
    RestoreFailed,
)
from laneway.engine.plan import USABLE
from laneway.engine.reserving import suspect as suspect_lanes
from laneway.engine.state import JobState, ModelState, State

UNKNOWN_LANES_MAX_SHARE = 0.25
"""Row 20 of the ladder: more unknown lanes than this share is a matter of the generation."""

SICK = ("unhealthy", "wedged", "lost")


def fault(draft: Draft, taken: DeviceFaulted) -> None:
    """Fence the job that failed, then give the device up.

    A fault of no job in flight, or of another epoch, is only recorded (I5).
    """
    if taken.epoch not in (0, draft.state.device.epoch):
        return
    device_wide = taken.kind in ("device", "call")
    reason = f"{taken.kind} {taken.code:#06x}: {taken.reason}"
    job = draft.state.jobs.get(taken.job) if taken.job is not None else None
    if job is not None:
        reason = f"job/{job.number}: {reason}"
        fault_job(draft, job, taken.kind, reason)
    elif not device_wide:
        return
    lose_device(draft, reason)


def fault_job(draft: Draft, job: JobState, kind: str, reason: str) -> None:
    """End a job that went wrong.

    Its buffer is quarantined, its lanes are unknown, its requests fail (G1, G14).
    """
    generation = job.generation
    data = {"kind": kind, "reason": reason}
    trigger = "lose" if job.state == "planned" else "abort" if kind == "aborted" else "fault"
    draft.emit("buffer", job.buffer, "quarantine", generation=generation, data=data)
    draft.emit("job", job.number, trigger, generation=generation, data=data)
    suspect_lanes(draft, [row.lane for row in job.rows], reason=reason)
    if job.origin != "request":
        return
    for row in job.rows:
        request = draft.state.requests.get(row.owner)
        if request is not None:
            fail(draft, request, f"device_fault_{kind}", f"the device failed it: {reason}")


def stall(draft: Draft, taken: JobStalled) -> None:
    """Stop submissions at a suspected hang and probe; give up when it is confirmed (E16)."""
    job = draft.state.jobs.get(taken.job)
    if job is None or draft.state.device.state == "lost":
        return
    reason = f"no result for {taken.age_ns} ns in phase {taken.phase}"
    if draft.state.device.state in USABLE:
        suspect(draft, f"job/{job.number}: {reason}")
    if taken.stage == "suspect":
        draft.ask(ProbeHealth())
        return
    fault_job(draft, job, "hang", reason)
    lose_device(draft, f"job/{job.number} hangs: {reason}")


def probed(draft: Draft, taken: HealthProbed) -> None:
    """Believe a probe that says the device is gone.

    One that says it is well only buys time (E16).
    """
    if draft.state.device.state != "suspect":
        return
    if taken.health is None:
        lose_device(draft, f"no answer to a health probe: {taken.reason}")
    elif taken.health.state in SICK:
        lose_device(draft, f"a health probe says {taken.health.state}")


def restore_failed(draft: Draft, taken: RestoreFailed) -> None:
    """Keep a buffer that could not be cleaned away from everybody (E4, E5)."""
    buffer = draft.state.buffers.get(taken.buffer)
    if buffer is None or buffer.state != "completing" or buffer.job != taken.job:
        return
    data = {"kind": "restore", "reason": taken.reason}
    draft.emit("buffer", buffer.number, "quarantine", generation=buffer.generation, data=data)
    lose_device(draft, f"buffer/{buffer.number} could not be restored: {taken.reason}")


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
    )


def absolve(draft: Draft, job: JobState) -> None:
    """Let a suspect device go on, now that a job it was suspected for has its answer (E16).

    Not while another job in flight is suspected: that one has no answer yet (G4).
    """
    others = (one for one in draft.state.jobs.values() if one.number != job.number)
    if draft.state.device.state == "suspect" and not any(one.suspected for one in others):
        draft.device("absolve", data={"job": job.number})
        if draft.state.closing:
            draft.device("drain")
        elif any(_in_doubt(draft.state)):
            degrade(draft, "it was degraded before it was suspected")


def judge_rest(draft: Draft, model: ModelState, reason: str) -> None:
    """Go on degraded with what is left of a model's lanes and buffers, or give the device up.

    Source: G12, row 20. A model that is being given back needs nothing any more.
    """
    if model.state not in ("warming", "ready", "draining"):
        return
    short = _too_little_left(draft.state, model)
    if short:
        lose_device(draft, f"{short}: {reason}")
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


def lose_device(draft: Draft, reason: str) -> None:
    """Bring everything to its end on a device that is not used any more (G7)."""
    state = draft.state
    if state.device.state in ("lost", "closing", "closed"):
        return
    if state.device.state in USABLE:
        suspect(draft, reason)
    data = {"reason": reason}
    draft.device("lose", data=data)
    for number in sorted(state.jobs):
        job = state.jobs[number]
        generation = job.generation
        draft.emit("buffer", job.buffer, "quarantine", generation=generation, data=data)
        draft.emit("job", number, "lose", generation=generation, data=data)
    held = [n for n, lane in sorted(state.lanes.items()) if lane.state in ("ready", "reserved")]
    suspect_lanes(draft, held, reason=reason)
    for number in sorted(state.requests):
        message = f"the device is lost: {reason}"
        fail(draft, state.requests[number], "device_lost", message, http_status=503)
    for number in sorted(state.models):
        model = state.models[number]
        if model.state == "ready":
            draft.emit("model", number, "degrade", generation=model.generation, data=data)
        if model.state != "failed":
            draft.emit("model", number, "fail", generation=model.generation, data=data)
