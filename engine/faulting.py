"""What happens when the device fails.

The job ends, its memory and lanes are fenced, and the device is lost (R14, G4, G7).

The reset budget is 0: there is no reset, so the first fault that puts the device in doubt ends in
`lost`. That is a true end state: every job is terminal, every buffer the device may still touch is
quarantined, every lane that held something is unknown, every client is told once, readiness is
false, nothing is submitted any more. A suspected hang only stops submissions until it is confirmed
or the job turns out to be slow (E16).
"""

from laneway.engine.draft import Draft
from laneway.engine.effects import ProbeHealth
from laneway.engine.ending import fail
from laneway.engine.inputs import DeviceFaulted, HealthProbed, JobStalled, RestoreFailed
from laneway.engine.reserving import suspect as suspect_lanes
from laneway.engine.state import JobState

USABLE = ("serving", "degraded", "draining")
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


def absolve(draft: Draft, job: JobState) -> None:
    """Let a suspect device go on, now that the job it was suspected for has its answer (E16)."""
    if draft.state.device.state == "suspect":
        draft.device("absolve", data={"job": job.number})
        if draft.state.closing:
            draft.device("drain")


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
