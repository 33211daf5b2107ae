"""Climb the recovery ladder: drain, reset, verify, prove, go on (R14, G2, G5, G7, G12; 9.2, 9.3).

Theory of operation. A fault that puts more than one job in doubt makes the device `suspect` and
begins a recovery on the rung that its row names. From there one thing is done at a time:

- **drain**: what is in flight ends, at most for ``drain_timeout_ns``; what was not handed over is
  withdrawn (G2). A device that is only unwell is given time to become well (row 14).
- **reset**: ``run_reset`` fences all that belongs to the generation (jobs lost, buffers
  quarantined, lanes unknown, models recovering, requests suspended), counts the attempt, then asks
  for the reset of the rung, or of the next one whose budget is not spent.
- **verify**: the report is not believed but held against what must be true (V1 to V5); what does
  not hold chooses the next rung (rows 23, 24).
- **prove**: the models are configured anew under a new generation; golden and warm-up decide, and
  a failure chooses the next rung.
- **go on**: the device serves, suspended requests go on from their own tokens.

When no rung is left that this process can do, the device is `lost`: with rung 7 a new process may
open it again, with rung 8 nobody should before an operator has looked (G7).
"""

from typing import Any

from laneway.engine.configuring import ask_configure
from laneway.engine.draft import Draft
from laneway.engine.effects import ProbeHealth, ReleaseModel, RunReset
from laneway.engine.ending import fail
from laneway.engine.inputs import (
    CapabilitiesLost,
    DeviceFacts,
    HealthFacts,
    ModelConfigured,
    ResetFinished,
)
from laneway.engine.ladder import (
    CCU,
    DEVICE,
    FOREIGN_RESET,
    INSPECT,
    LEVELS,
    OUT,
    PROCESS,
    affordable_rung,
    follows_foreign_reset,
    is_spent,
    pause_ns,
    within,
)
from laneway.engine.ledger import parts_difference
from laneway.engine.plan import USABLE, full_ceiling
from laneway.engine.reserving import suspect as suspect_lanes
from laneway.engine.resuming import go_on, suspend_request
from laneway.engine.state import DEVICE as DEVICE_NUMBER
from laneway.engine.state import ModelState, State, is_homeless
from laneway.engine.successors import ask_again
from laneway.engine.trusting import restrict

WELL = ("ok", "degraded")
FOREIGN_RESETS_MAX = 1
"""Resets by another process that are borne within their window (row 22)."""
_HELD_BUFFERS = ("preparing", "submitted", "running", "completing")
_HAS_GENERATION = ("ready", "draining", "configuring", "warming")


def begin(
    draft: Draft,
    cause: str,
    rung: int,
    reason: str,
    *,
    code: int = 0,
    level: int = 0,
    spared: int = 0,
) -> None:
    """Begin a recovery on a rung, or take a further fault into the one under way.

    ``level`` is of its first reset, where it is not the rung's own; ``spared`` is the model of a
    first load that the recovery is for.
    """
    state = draft.state
    recovery = state.ladder.recovery
    if state.device.state in ("lost", "closing", "closed"):
        return
    if rung >= PROCESS:
        give_up(draft, reason, rung)
    elif cause != FOREIGN_RESET and not _is_affordable(state, rung):
        give_up(draft, f"no reset is left in the budget: {reason}", PROCESS)
    elif recovery is None or recovery.watching:
        if state.device.state in USABLE:
            draft.device("suspect", data={"reason": reason})
        until_ns = state.now_ns + state.limits.drain_timeout_ns
        more: dict[str, Any] = {"level": level} if level else {}
        escalate(draft, cause, rung, reason, until_ns=until_ns, code=code, **more)
        _fail_first_loads(draft, reason, spared)
    elif state.device.state == "recovering":
        changes = len(recent_epoch_changes(state))
        if cause == FOREIGN_RESET and changes >= FOREIGN_RESETS_MAX:
            lose_device(draft, f"the board has another owner: {reason}", rung=OUT)
        else:
            next_rung(draft, reason, least=rung)
    elif state.device.state == "suspect" and rung > recovery.rung:
        escalate(draft, cause, rung, reason, until_ns=recovery.until_ns, code=code)


def _is_affordable(state: State, rung: int) -> bool:
    return affordable_rung(state.ladder, state.limits, rung, state.now_ns) < PROCESS


def watch_unwell(draft: Draft, health: HealthFacts, rung: int) -> None:
    """Give a device that says it is unwell a while to become well before it is reset (row 14)."""
    state = draft.state
    reason = f"a health probe says {health.state}, advised {health.advised}"
    if state.device.state in USABLE:
        draft.device("suspect", data={"reason": reason})
    until_ns = state.now_ns + state.limits.unhealthy_grace_ns
    escalate(draft, "device unwell (row 14)", rung, reason, until_ns=until_ns, watching=True)


def escalate(draft: Draft, cause: str, rung: int, reason: str, **more: Any) -> None:
    """Choose a rung: the device is suspect until its reset runs."""
    draft.device("escalate", data={"cause": cause, "rung": rung, "reason": reason, **more})


def next_rung(draft: Draft, reason: str, *, least: int = 0) -> None:
    """Choose what follows a rung that did not help: the next one, the last one again (row 23).

    A rung that began with another level than its own is run once more with that first.
    """
    recovery = draft.state.ladder.recovery
    assert recovery is not None
    following = recovery.rung if recovery.level else recovery.rung + 1
    rung = max(min(following, DEVICE), least)
    until_ns = draft.state.now_ns + draft.state.limits.drain_timeout_ns
    escalate(draft, recovery.cause, rung, reason, until_ns=until_ns)


def give_up(draft: Draft, reason: str, rung: int) -> None:
    """End in `lost`; rung 7 asks for a new process, as long as its budget lasts (row 16)."""
    state = draft.state
    if rung == PROCESS and is_spent(state.ladder, state.limits, PROCESS, state.now_ns):
        rung = OUT
    lose_device(draft, reason, rung=rung)


# ---------------------------------------------------------------------------- moving on


def advance(draft: Draft) -> None:
    """Do what the recovery waits for, if its time has come; nothing while all is well."""
    state = draft.state
    recovery = state.ladder.recovery
    if recovery is None:
        if state.suspended:
            resume_waiting(draft)
        return
    if state.device.state != "suspect":
        return
    if state.closing and all(is_homeless(state, one) for one in state.requests.values()):
        lose_device(draft, f"closed before it was recovered: {recovery.reason}", rung=PROCESS)
        return
    is_time = state.now_ns >= recovery.until_ns
    if recovery.watching:
        if is_time and recovery.until_ns:
            _look_again(draft)
    elif is_time or (not recovery.pausing and not state.jobs):
        run_reset(draft)


def _look_again(draft: Draft) -> None:
    """Ask an unwell device once more: its answer decides (row 14)."""
    recovery = draft.state.ladder.recovery
    assert recovery is not None
    escalate(draft, recovery.cause, recovery.rung, recovery.reason, watching=True)
    draft.ask(ProbeHealth())


def resume_waiting(draft: Draft) -> None:
    """Let suspended requests go on whose model serves again (G8, G15)."""
    state = draft.state
    if state.device.state not in USABLE:
        return
    for number in sorted(state.suspended):
        go_on(draft, state.requests[number])


# ---------------------------------------------------------------------------- reset


def run_reset(draft: Draft) -> None:
    """Fence the generation, count the attempt, ask for the reset (R14.7, G2, E27, E28)."""
    state = draft.state
    recovery = state.ladder.recovery
    assert recovery is not None
    reason = recovery.reason
    if recovery.cause == FOREIGN_RESET and not recovery.resets:
        if len(recent_epoch_changes(state)) >= FOREIGN_RESETS_MAX:
            lose_device(draft, f"the board has another owner: {reason}", rung=OUT)
            return
        _start(draft, recovery.rung, INSPECT, stamps=0)
        return
    rung = affordable_rung(state.ladder, state.limits, recovery.rung, state.now_ns)
    if rung >= PROCESS:
        give_up(draft, f"no reset is left in the budget: {reason}", rung)
        return
    wait_ns = pause_ns(state.ladder, state.limits, rung, state.now_ns)
    if wait_ns:
        until_ns = state.now_ns + wait_ns
        escalate(draft, recovery.cause, rung, reason, until_ns=until_ns, pausing=True)
        return
    level = recovery.level if recovery.level and rung == recovery.rung else LEVELS[rung]
    _start(draft, rung, level, stamps=2 if state.ladder.breaker == "half_open" else 1)


def recent_epoch_changes(state: State) -> tuple[int, ...]:
    """Return when another process reset the board, as far as it still counts (row 22)."""
    changes_ns, window_ns = state.ladder.epoch_changes_ns, state.limits.exceptions_window_ns
    return within(changes_ns, state.now_ns, window_ns)


def _start(draft: Draft, rung: int, level: int, *, stamps: int) -> None:
    state = draft.state
    recovery = state.ladder.recovery
    assert recovery is not None
    reason = recovery.reason
    data = {
        "cause": recovery.cause,
        "rung": rung,
        "level": level,
        "reason": reason,
        "stamps": stamps,
        "jobs": [[job.number, job.ticket] for job in state.jobs.values()],
    }
    fence(draft, reason)
    draft.device("reset", data=data)
    for number in sorted(state.models):
        model = state.models[number]
        if model.state in _HAS_GENERATION:
            said = {"reason": reason}
            draft.emit("model", number, "degrade", generation=model.generation, data=said)
    draft.ask(
        RunReset(
            level=level,
            cause=recovery.code,
            reason=f"{recovery.cause}: {reason}",
            timeout_ns=state.limits.reset_timeout_ns,
        )
    )


def fence(draft: Draft, reason: str) -> None:
    """End what is bound to the generation: jobs, buffers, lanes; requests on lanes are suspended.

    They are innocent: those that were to blame were dealt with when their job ended (G15).
    """
    state = draft.state
    data = {"reason": reason}
    _lose_jobs(draft, data)
    for number, buffer in sorted(state.buffers.items()):
        if buffer.state in _HELD_BUFFERS:
            draft.emit("buffer", number, "quarantine", generation=buffer.generation, data=data)
    known = [number for number, lane in sorted(state.lanes.items()) if lane.state != "unknown"]
    suspect_lanes(draft, known, reason=reason)
    for number in sorted(state.requests):
        request = state.requests[number]
        if request.state in ("prefilling", "decoding"):
            suspend_request(draft, request, reason, suspect=False, kind="device_fault")


def _lose_jobs(draft: Draft, data: dict[str, str]) -> None:
    """Give up every job that is not terminal; the device may still touch its memory (E5)."""
    for number, job in sorted(draft.state.jobs.items()):
        draft.emit("buffer", job.buffer, "quarantine", generation=job.generation, data=data)
        draft.emit("job", number, "lose", generation=job.generation, data=data)


def reset_finished(draft: Draft, taken: ResetFinished) -> None:
    """Hold the report of a reset against what must be true, then configure anew (V1 to V5)."""
    state = draft.state
    if state.device.state != "resetting":
        return
    changed = changed_versions(state.device.facts, taken)
    if changed:
        lose_device(draft, f"the versions changed with the reset (row 26): {changed}", rung=OUT)
        return
    again = len(recent_epoch_changes(state)) >= FOREIGN_RESETS_MAX
    if again and follows_foreign_reset(state.device.device_epoch, taken):
        found = f"it was in epoch {taken.epoch_before} before its reset"
        lose_device(draft, f"the board has another owner: {found}", rung=OUT)
        return
    problem = refuse_reset(state, taken)
    if problem:
        # What one could not end only a reset of the device can: level 2 wants nothing in flight.
        least = DEVICE if taken.jobs_unaccounted else 0
        next_rung(draft, f"reset of level {taken.level}: {problem}", least=least)
        return
    epoch = state.device.epoch
    if taken.epoch_after != taken.epoch_before:
        epoch = state.next_epoch
    draft.emit("device", DEVICE_NUMBER, "recover", epoch=epoch, data={"level": taken.level})
    for number in sorted(state.models):
        model = state.models[number]
        if model.state == "recovering":
            generation = state.next_generation
            draft.emit("model", number, "reconfigure", generation=generation)
            ask_configure(draft, model, again=True)
        elif model.state == "failed":
            said = {"release": True, "reason": model.reason}
            draft.emit("model", number, "release_again", generation=model.generation, data=said)
            draft.ask(ReleaseModel(model=number, generation=model.generation))
    if not _has_to_prove(state):
        serve_again(draft)


def capabilities_lost(draft: Draft, taken: CapabilitiesLost) -> None:
    """Take a device out of rotation that can do less since its reset (E24, row 26).

    What it was allowed to do is not evident any more, so nothing is published on it.
    """
    if draft.state.device.state == "resetting":
        gone = ", ".join(taken.names)
        lose_device(draft, f"capabilities are gone since the reset (row 26): {gone}", rung=OUT)


def changed_versions(facts: DeviceFacts | None, taken: ResetFinished) -> str:
    """Return which version is another after a reset, or "" (V2, E24, row 26)."""
    if facts is None or taken.code:
        return ""
    for name in ("runtime_version", "driver_version", "firmware_version"):
        was, now = getattr(facts, name), getattr(taken, name)
        if was != now:
            return f"{name} was {was}, is {now}"
    return ""


def refuse_reset(state: State, taken: ResetFinished) -> str:
    """Return why a reset is not believed to have worked, or "" (V1, V3, V4, V5)."""
    if taken.code:
        return f"it ended with {taken.code:#06x}: {taken.reason}"
    health = taken.health
    if health is None:
        return "the device does not answer after it (V1)"
    if health.state not in WELL or health.sticky:
        return f"the device is {health.state}, sticky {health.sticky:#06x} after it (V1)"
    tolerance = state.limits.unload_tolerance_bytes
    for chip, (was, now) in enumerate(
        zip(_expected_bytes(state, taken), taken.used_bytes_after, strict=False)
    ):
        if now > was + tolerance:
            return f"chip {chip} holds {now} bytes after it, {was} are expected (V3)"
    if taken.jobs_unaccounted:
        return f"{taken.jobs_unaccounted} jobs are not accounted for (V4)"
    if parts_difference(dict(health.counters)):
        return f"the counters do not add up after it: {dict(health.counters)} (V4)"
    device_wide = taken.level in (INSPECT, LEVELS[DEVICE])
    if device_wide != (taken.epoch_after != taken.epoch_before):
        return f"the epoch was {taken.epoch_before}, is {taken.epoch_after} (V5)"
    return ""


def _expected_bytes(state: State, taken: ResetFinished) -> tuple[int, ...]:
    """Return what each chip may hold: before the load where the configuration was dropped."""
    if taken.level != LEVELS[CCU]:
        for model in state.models.values():
            if model.used_bytes_before:
                return model.used_bytes_before
    return taken.used_bytes_before


# ---------------------------------------------------------------------------- proof


def configured_again(draft: Draft, taken: ModelConfigured) -> None:
    """Take lanes and buffers into the new generation; golden and warm-up follow (G5, G12)."""
    state = draft.state
    model = state.models[taken.model]
    generation = model.generation
    lanes = [number for number, lane in state.lanes.items() if lane.model == model.number]
    if lanes:
        draft.emit("lane", sorted(lanes), "clear", generation=generation)
    buffers = [number for number, one in state.buffers.items() if one.model == model.number]
    if buffers:
        draft.emit_each("buffer", sorted(buffers), "rebuild", generation=generation)


def serve_again(draft: Draft) -> None:
    """Let a device serve whose proof is complete, and what waited for it go on."""
    state = draft.state
    recovery = state.ladder.recovery
    assert recovery is not None
    data = {"reason": "", "resets": recovery.resets, "since_ns": recovery.begun_ns}
    draft.device("serve", data=data)
    if full_ceiling(state) > 1:
        restrict(draft, "after a reset, until two golden runs in flight at once were equal")
    if state.closing:
        draft.device("drain")
    for number in sorted(state.models):
        model = state.models[number]
        if model.state == "ready" and model.drain_again:
            draft.emit("model", number, "drain", generation=model.generation)
    ask_again(draft)
    resume_waiting(draft)


def proof_failed(draft: Draft, model: ModelState, reason: str) -> None:
    """Choose the next rung when a model cannot be configured or does not pass golden (V6)."""
    next_rung(draft, f"model/{model.number}: {reason}")


def prove_on(draft: Draft, gone: ModelState, reason: str) -> None:
    """Go on with a proof that waited for a model which is gone now.

    The one that stood down for it is reset further; without any the device serves, and the golden
    run of the next load decides.
    """
    state = draft.state
    if state.device.state != "recovering":
        return
    stood_down = state.models.get(gone.replaces)
    if not state.models:
        serve_again(draft)
    elif stood_down is not None and stood_down.state == "recovering":
        next_rung(draft, f"there is no way back: {reason}")


def is_proving(state: State) -> bool:
    """Return whether what runs now is the proof after a reset."""
    return state.device.state == "recovering"


def _has_to_prove(state: State) -> bool:
    """Return whether a model must be configured or pass golden before the device serves."""
    return any(model.state in ("configuring", "warming") for model in state.models.values())


def _fail_first_loads(draft: Draft, reason: str, spared: int) -> None:
    """End loads that never served: whoever asked for them is told, and may ask again (G6)."""
    for number in sorted(draft.state.models):
        model = draft.state.models[number]
        first = not model.served and number != spared
        if first and model.state in ("configuring", "warming"):
            _end_load(draft, model, reason)


def _end_load(draft: Draft, model: ModelState, reason: str) -> None:
    held = [
        number
        for number, lane in draft.state.lanes.items()
        if lane.model == model.number and lane.state == "ready"
    ]
    suspect_lanes(draft, held, reason=reason)
    data = {"reason": reason}
    draft.emit("model", model.number, "fail", generation=model.generation, data=data)


# ---------------------------------------------------------------------------- the end


def lose_device(draft: Draft, reason: str, *, rung: int = PROCESS) -> None:
    """Bring everything to its end on a device that is not used any more (G7)."""
    state = draft.state
    if state.device.state in ("lost", "closing", "closed"):
        return
    if state.device.state in USABLE:
        draft.device("suspect", data={"reason": reason})
    data = {"reason": reason}
    draft.device("lose", data={**data, "rung": rung})
    _lose_jobs(draft, data)
    held = [n for n, lane in sorted(state.lanes.items()) if lane.state in ("ready", "reserved")]
    suspect_lanes(draft, held, reason=reason)
    for number in sorted(state.requests):
        if is_homeless(state, state.requests[number]):
            continue  # nothing of it was on this device: it waits for the next restart (G21)
        message = f"the device is lost: {reason}"
        fail(draft, state.requests[number], "device_lost", message, http_status=503)
    for number in sorted(state.models):
        model = state.models[number]
        if model.state == "ready":
            draft.emit("model", number, "degrade", generation=model.generation, data=data)
        if model.state != "failed":
            draft.emit("model", number, "fail", generation=model.generation, data=data)
