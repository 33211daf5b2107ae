"""Which steps are faults, and what each of them says: read from the input alone, as it was told.

A signal is one step that says that something went wrong. Whether it cost anything is told by what
followed (explain.py). The ladder itself names row and rung of what it was asked about; ``cause``
and ``rung`` here are those of faults that did not come to it, or ended at once in a lost device.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from laneway.engine.faulting import row_of, was_reset_by_another
from laneway.engine.inputs import (
    ArtifactRefused,
    CapabilitiesLost,
    CcuRecord,
    Completed,
    ConfigureFailed,
    CountersRead,
    DeviceFaulted,
    EngineStarted,
    HealthFacts,
    HealthProbed,
    JobStalled,
    KvApplyFailed,
    MemoryBuried,
    ModelReleased,
    ReleaseFailed,
    RestoreFailed,
    StatusDoubted,
    SubmitDoubtful,
    SubmitRefused,
    ThrottleTold,
)
from laneway.engine.ladder import DEVICE, FOREIGN_RESET, GONE, OUT, first_rung
from laneway.engine.ledger import difference
from laneway.engine.ports import Step
from laneway.engine.state import State
from laneway.statemachines import Event, entity_name
from laneway.statemachines.event import NO_DATA

FLAG_LATE = 16
"""NPURT_F_LATE of a completion (npurt.h)."""

_KIND_OF_CODE = {
    0x0201: "epoch",
    0x0202: "generation",
    0x0801: "unhealthy",
    0x0802: "wedged",
    0x0803: "lost",
    0x0804: "sticky",
}
"""What a code means that a device may answer any call with (npurt.h)."""

_WELL = ("ok", "degraded")
_BUSY, _CALLER, _JOB, _CSR = 0x03, 0x01, 0x06, 0x0603
_IN_DOUBT = (
    ("device", "suspect"),
    ("device", "escalate"),
    ("device", "lose"),
    ("buffer", "quarantine"),
    ("lane", "suspect"),
)


@attrs.frozen(kw_only=True)
class Signal:
    """One step that says that something went wrong.

    ``about``: the entities it names, the job or the device first. ``details``: what the device told
    with it, as JSON values.
    """

    step: int
    at_ns: int
    kind: str
    about: tuple[str, ...]
    text: str
    cause: str = ""
    rung: int = 0
    details: Mapping[str, Any] = NO_DATA


_Told = tuple[str, tuple[str, ...], str, str, int, dict[str, Any]]
"""Kind, about, text, cause, rung, details."""


def signal_of(step: Step, state: State, *, inside: bool) -> Signal | None:
    """Return what a step says went wrong, or None; ``state`` is the one before it.

    ``inside``: the story of a fault is being told; then what the engine does about it is no signal.
    """
    tell = _TELLERS.get(type(step.taken))
    told = tell(step, state) if tell is not None else None
    if told is None and not inside:
        told = _by_events(step)
    if told is None:
        return None
    kind, about, text, cause, rung, details = told
    return Signal(
        step=step.step,
        at_ns=step.at_ns,
        kind=kind,
        about=about,
        text=text,
        cause=cause,
        rung=rung,
        details=details,
    )


def health_json(health: HealthFacts | None) -> dict[str, Any] | None:
    """Return what a device said of its health, memory and counters, as JSON values."""
    if health is None:
        return None
    return {
        **attrs.asdict(health),
        "used_bytes": list(health.used_bytes),
        "counters": dict(health.counters),
    }


def record_text(record: CcuRecord) -> str:
    """Return an exception record in words."""
    return (
        f"chip {record.chip}, ccu {record.ccu}, code {record.code} ({record.subcode}), task"
        f" {record.task_index}, command {record.cmd_index}, pc {record.pc:#x}"
        + (f": {record.text}" if record.text else "")
    )


def health_text(health: HealthFacts | None) -> str:
    """Return what a device said of its health in words."""
    if health is None:
        return "the device does not answer"
    counters = counters_text(health.counters)
    memory = "+".join(str(held) for held in health.used_bytes)
    sticky = f", sticky {health.sticky:#06x}" if health.sticky else ""
    advised = f", advises {health.advised}" if health.advised else ""
    return (
        f"health {health.state}{sticky}{advised}, epoch {health.device_epoch}, last progress"
        f" {health.last_progress_ns} ns, {memory} bytes used, {counters or 'no counters told'}"
    )


def counters_text(counters: Iterable[tuple[str, int]]) -> str:
    """Return counters of jobs and resets in words, without those that stand at 0."""
    return " ".join(
        f"{name} {count}"
        for name, count in counters
        if count and "_ns" not in name and "bytes" not in name
    )


def _by_events(step: Step) -> _Told | None:
    """Return what the events of a step put in doubt, whatever its input was."""
    for event in step.events:
        if (event.machine, event.trigger) in _IN_DOUBT:
            reason = str(event.data.get("reason", ""))
            text = f"{type(step.taken).__name__}: {reason}" if reason else type(step.taken).__name__
            about = tuple(entity_name(event.machine, number) for number in event.entities)
            return "device", about, text, "", 0, {}
        if (event.machine, event.trigger) == ("model", "refuse"):
            return _load_refused(event)
    return None


def _load_refused(event: Event) -> _Told:
    (number,) = event.entities
    reason = str(event.data["reason"])
    return "load", (entity_name("model", number),), reason, "load refused on the host", 0, {}


def _job(number: int | None) -> tuple[str, ...]:
    return ("device/0",) if number is None else (entity_name("job", number),)


# ---------------------------------------------------------------------------- by input


def _device_faulted(step: Step, state: State) -> _Told:
    taken = step.taken
    assert isinstance(taken, DeviceFaulted)
    text = (
        f"{taken.kind} {taken.code:#06x}: {taken.reason};"
        f" {'quiescent' if taken.quiescent else 'not quiescent'}, kv effect {taken.kv_effect}"
    )
    record = attrs.asdict(taken.record) if taken.record is not None else None
    details = {
        "code": taken.code,
        "ticket": taken.ticket,
        "epoch": taken.epoch,
        "generation": taken.generation,
        "quiescent": taken.quiescent,
        "kv_effect": taken.kv_effect,
        "record": record,
        "health": health_json(taken.health),
    }
    kind = taken.kind
    if kind in ("device", "call"):
        kind = _KIND_OF_CODE.get(taken.code, kind)
    if not step.events:
        return kind, _job(taken.job), text, "of no job in flight: recorded only (I5)", 0, details
    cause, rung = row_of(state, taken)
    if cause == FOREIGN_RESET:
        kind = "epoch"
    return kind, _job(taken.job), text, cause, rung, details


def _stalled(step: Step, state: State) -> _Told:
    taken = step.taken
    assert isinstance(taken, JobStalled)
    text = (
        f"no result for {taken.age_ns} ns in phase {taken.phase}, no progress for"
        f" {taken.progress_age_ns} ns ({taken.stage})"
    )
    details = {
        "stage": taken.stage,
        "phase": taken.phase,
        "age_ns": taken.age_ns,
        "progress_age_ns": taken.progress_age_ns,
        "ticket": taken.ticket,
    }
    cause = "slow, not hung (row 9)" if taken.stage == "suspect" else "hang (row 8)"
    return "hang", _job(taken.job), text, cause, 0, details


def _refused(step: Step, state: State) -> _Told:
    taken = step.taken
    assert isinstance(taken, SubmitRefused)
    text = f"submit refused with {taken.code:#06x}: {taken.reason}"
    kind, cause, rung = "submit_refused", "", 0
    if taken.code >> 8 == _BUSY:
        kind, cause = "busy", "device busy (row 2)"
    elif taken.code == _CSR:
        kind, cause, rung = "csr", "register refused (row 5)", 1
    elif taken.code >> 8 in (_CALLER, _JOB):
        cause, rung = "submit refused (row 3)", 1
    else:
        kind = _KIND_OF_CODE.get(taken.code, "device")
        cause, rung = first_rung("call", taken.code, quiescent=True, kv_effect="none")
    return kind, _job(taken.job), text, cause, rung, {"code": taken.code}


def _doubtful(step: Step, state: State) -> _Told:
    taken = step.taken
    assert isinstance(taken, SubmitDoubtful)
    text = f"submit in doubt with {taken.code:#06x}, ticket {taken.ticket}: {taken.reason}"
    details = {"code": taken.code, "ticket": taken.ticket}
    return "doubtful", _job(taken.job), text, "submit in doubt (row 4)", 2, details


def _kv_failed(step: Step, state: State) -> _Told:
    taken = step.taken
    assert isinstance(taken, KvApplyFailed)
    text = f"{taken.operation} of lane/{taken.lane} failed with {taken.code:#06x}: {taken.reason}"
    in_doubt = taken.unknown or taken.operation in ("COMMIT", "RELEASE")
    cause = "KV in doubt (row 20)" if in_doubt else "KV not applied before submit (row 19)"
    lane = entity_name("lane", taken.lane)
    about = (lane,) if taken.job is None else (entity_name("job", taken.job), lane)
    details = {"code": taken.code, "operation": taken.operation, "unknown": taken.unknown}
    return "kv_apply", about, text, cause, 2 if in_doubt else 1, details


def _completed(step: Step, state: State) -> _Told | None:
    taken = step.taken
    assert isinstance(taken, Completed)
    about = _job(taken.job)
    if any(row.fault == "numeric" for row in taken.rows):
        rows = [index for index, row in enumerate(taken.rows) if row.fault == "numeric"]
        text = f"abnormal numbers in rows {rows}"
        return "numeric", about, text, "abnormal numbers (row 12)", 2, {"rows": rows}
    if taken.flags & FLAG_LATE and taken.job not in state.jobs:
        text = f"an answer for ticket {taken.ticket} came late: accounted, nothing else"
        return "late", about, text, "late completion (row 11)", 0, {"ticket": taken.ticket}
    job = state.jobs.get(taken.job)
    verdicts = [row.verdict for row in taken.rows if row.verdict not in ("", "equal")]
    if verdicts and job is not None and job.origin == "canary":
        text = f"a canary differs: {verdicts[0]}"
        return "canary", about, text, "a canary differs (row 12)", 2, {}
    if verdicts:
        text = f"golden differs: {verdicts[0]}"
        return "golden", about, text, "golden fails at load (row 18)", 1, {}
    if job is not None and job.state == "uncertain":
        text = "done after a submit in doubt: nothing of it is believed"
        return "doubtful", about, text, "submit in doubt (row 4)", 2, {"ticket": taken.ticket}
    if taken.kv_effect in ("partial", "unknown") and step.events:
        text = f"done, but its kv effect is {taken.kv_effect}"
        return "kv_effect", about, text, "KV in doubt (row 20)", 2, {"kv_effect": taken.kv_effect}
    return None


def _status(step: Step, state: State) -> _Told | None:
    taken = step.taken
    assert isinstance(taken, StatusDoubted)
    text = f"{taken.kind}: ticket {taken.ticket} was shown {taken.shown} after {taken.before}"
    details = {"what": taken.kind, "before": taken.before, "shown": taken.shown}
    if taken.kind == "missed":
        cause = "found by a poll alone (row 10)"
    else:
        cause = "a state that cannot follow (E11)"
    return "status", _job(taken.job), text, cause, 2 if step.events else 0, details


def _probed(step: Step, state: State) -> _Told | None:
    taken = step.taken
    assert isinstance(taken, HealthProbed)
    health = taken.health
    details = {"health": health_json(health)}
    if health is None:
        text = f"no answer to a health probe: {taken.reason}"
        return "silent", ("device/0",), text, "", 0, details
    moves = [event for event in step.events if event.machine == "device"]
    if moves and was_reset_by_another(state, health) and health.state not in GONE:
        return "epoch", ("device/0",), health_text(health), FOREIGN_RESET, DEVICE, details
    if health.sticky or health.state not in _WELL:
        kind = health.state if health.state not in _WELL else "sticky"
        return kind, ("device/0",), health_text(health), "", 0, details
    for event in step.events:
        if (event.machine, event.trigger) == ("device", "escalate"):
            text = f"memory read again: {event.data['reason']}"
            return "memory", ("device/0",), text, "", 0, details
    return None


def _capabilities(step: Step, state: State) -> _Told | None:
    taken = step.taken
    assert isinstance(taken, CapabilitiesLost)
    text = f"gone since the reset: {', '.join(taken.names)}"
    return "capabilities", ("device/0",), text, "capabilities changed (row 26)", OUT, {}


def _throttled(step: Step, state: State) -> _Told | None:
    taken = step.taken
    assert isinstance(taken, ThrottleTold)
    if not taken.chips:
        return None
    text = f"chips {', '.join(map(str, taken.chips))} run slower because of their heat"
    details = {"chips": list(taken.chips)}
    return "throttled", ("device/0",), text, "thermal throttle (row 25)", 0, details


def _restore_failed(step: Step, state: State) -> _Told:
    taken = step.taken
    assert isinstance(taken, RestoreFailed)
    text = f"buffer/{taken.buffer} was not restored, {taken.code:#06x}: {taken.reason}"
    about = (entity_name("job", taken.job), entity_name("buffer", taken.buffer))
    return "restore", about, text, "", 0, {"code": taken.code}


def _configure_failed(step: Step, state: State) -> _Told:
    taken = step.taken
    assert isinstance(taken, ConfigureFailed)
    text = f"configure failed with {taken.code:#06x}: {taken.reason}"
    about = (entity_name("model", taken.model),)
    return "configure", about, text, "configure failed (row 17)", 1, {"code": taken.code}


def _artifact_refused(step: Step, state: State) -> _Told:
    taken = step.taken
    assert isinstance(taken, ArtifactRefused)
    about = (entity_name("model", taken.model),)
    return "artifact", about, taken.reason, "artifact refused on the host", 0, {}


def _release_failed(step: Step, state: State) -> _Told:
    taken = step.taken
    assert isinstance(taken, ReleaseFailed)
    text = f"release failed with {taken.code:#06x}: {taken.reason}"
    about = (entity_name("model", taken.model),)
    return "release", about, text, "memory not given back (row 13)", 0, {"code": taken.code}


def _released(step: Step, state: State) -> _Told | None:
    taken = step.taken
    assert isinstance(taken, ModelReleased)
    held = [event.data["held"] for event in step.events if event.trigger == "linger"]
    if not held and taken.healthy:
        return None
    text = f"after the release: {held[0]}" if held else "the device is not well after the release"
    about = (entity_name("model", taken.model),)
    details = {"used_bytes": list(taken.used_bytes), "healthy": taken.healthy}
    return "memory", about, text, "memory not given back at once (row 13)", 0, details


def _counters(step: Step, state: State) -> _Told | None:
    taken = step.taken
    assert isinstance(taken, CountersRead)
    if not state.device.counters_trusted or not (differs := difference(state, taken)):
        return None
    details = {"counters": dict(taken.counters), "asked": list(taken.asked)}
    return "counters", ("device/0",), differs, "counters wrong (row 21)", 2, details


def _buried(step: Step, state: State) -> _Told | None:
    taken = step.taken
    assert isinstance(taken, MemoryBuried)
    if not any(event.trigger == "lose" for event in step.events):
        return None
    text = f"{taken.item_count} buffers, {taken.byte_count} bytes are kept for good"
    return "memory_kept", ("device/0",), text, "too much memory kept for good", 7, {}


def _started(step: Step, state: State) -> _Told | None:
    """Return what a start found: an engine that ended without a close (G21)."""
    if state.device.state == "closed":
        return None
    jobs = tuple(entity_name("job", number) for number in sorted(state.jobs))
    text = (
        f"the process before ended without a close, its device {state.device.state}:"
        f" {len(jobs)} jobs in flight, {len(state.requests)} requests without an ending"
    )
    return "killed", ("device/0", *jobs), text, "the process was killed (G21)", 7, {}


_TELLERS: dict[type, Callable[[Step, State], _Told | None]] = {
    DeviceFaulted: _device_faulted,
    JobStalled: _stalled,
    SubmitRefused: _refused,
    SubmitDoubtful: _doubtful,
    KvApplyFailed: _kv_failed,
    Completed: _completed,
    StatusDoubted: _status,
    HealthProbed: _probed,
    CapabilitiesLost: _capabilities,
    ThrottleTold: _throttled,
    RestoreFailed: _restore_failed,
    ConfigureFailed: _configure_failed,
    ArtifactRefused: _artifact_refused,
    ReleaseFailed: _release_failed,
    ModelReleased: _released,
    CountersRead: _counters,
    MemoryBuried: _buried,
    EngineStarted: _started,
}
