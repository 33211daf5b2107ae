"""Reset a device, tell what was observed, and give up what belonged to the generation before (E27).

A reset is one call, framed by two readings of health, memory and counters. What it returned is told
as it is; whether the device is to be believed afterwards is the engine's decision. Level 0 runs no
reset: somebody else did, and the device is read as it is now (row 22).
"""

import ctypes
import logging

from laneway.adapters import npurt
from laneway.adapters.arena import Graveyard
from laneway.adapters.buffers import Buffer, bury_buffer, destroy_buffer
from laneway.adapters.calls import DeviceCalls
from laneway.adapters.facts import lost_capabilities, read_health, read_versions
from laneway.adapters.loaded import LoadedModel
from laneway.engine.effects import RunReset
from laneway.engine.errors import DeviceError
from laneway.engine.evidence import Capability
from laneway.engine.inputs import HealthFacts, ResetFinished

LOG = logging.getLogger("laneway.adapters.resetting")
EXCLUSIVE_TIMEOUT_S = 10.0
INSPECT = 0


def run_reset(
    calls: DeviceCalls, chips: tuple[int, ...], effect: RunReset, *, index: int, known_epoch: int
) -> ResetFinished:
    """Run the reset and return what was observed; a device that does not answer is an answer."""
    before = _read_health(calls, chips)
    report = npurt.ResetReport()
    scope = npurt.ResetScope()
    code, reason = 0, ""
    if effect.level == INSPECT:
        report.epoch_before = known_epoch
        report.epoch_after = before.device_epoch if before is not None else known_epoch
    else:
        code, reason = _call(calls, effect, scope, report)
    after = _read_health(calls, chips)
    versions = _read_versions(calls, index)
    return ResetFinished(
        level=effect.level,
        code=code,
        reason=reason,
        quiesced=bool(report.h.flags & npurt.RESET_DMA_QUIESCED),
        verified=bool(report.h.flags & npurt.RESET_VERIFIED),
        wider=bool(report.h.flags & npurt.RESET_WIDER),
        epoch_before=report.epoch_before,
        epoch_after=report.epoch_after,
        claimed=scope.effects_yes,
        effects=report.effects_seen,
        jobs_aborted=report.jobs_aborted,
        jobs_unaccounted=report.jobs_unaccounted,
        duration_ns=report.duration_ns,
        used_bytes_before=before.used_bytes if before is not None else (),
        used_bytes_after=after.used_bytes if after is not None else (),
        health_before=before,
        health=after,
        runtime_version=versions[0],
        driver_version=versions[1],
        firmware_version=versions[2],
    )


def _call(
    calls: DeviceCalls, effect: RunReset, scope: npurt.ResetScope, report: npurt.ResetReport
) -> tuple[int, str]:
    """Ask what the level claims, then run it while nobody else makes a call."""
    params = npurt.ResetParams(
        level=effect.level,
        cause=effect.cause,
        timeout_ns=effect.timeout_ns,
        reason=effect.reason.encode("utf-8", "replace")[:127],
    )
    try:
        with calls.exclusive(timeout_s=EXCLUSIVE_TIMEOUT_S):
            calls.attempt("npurt_reset_describe", effect.level, ctypes.byref(scope))
            answer = calls.attempt("npurt_reset_run", ctypes.byref(params), ctypes.byref(report))
    except DeviceError as error:
        return error.code, str(error)
    return int(answer.code), "" if answer.ok else answer.reason


def _read_health(calls: DeviceCalls, chips: tuple[int, ...]) -> HealthFacts | None:
    try:
        with calls.shared():
            return read_health(calls, chips)
    except DeviceError as error:
        LOG.warning("no health around a reset: %s", error)
        return None


def _read_versions(calls: DeviceCalls, index: int) -> tuple[str, str, str]:
    try:
        with calls.shared():
            return read_versions(calls, index)
    except DeviceError as error:
        LOG.warning("no versions after a reset: %s", error)
        return "unknown", "unknown", "unknown"


def read_lost_capabilities(calls: DeviceCalls, known: tuple[Capability, ...]) -> tuple[str, ...]:
    """Return what the device does not say any more that it can; none if it does not answer.

    Why: one that does not answer is found by the reset's own report.
    """
    try:
        with calls.shared():
            return lost_capabilities(calls, known)
    except DeviceError as error:
        LOG.warning("no capabilities after a reset: %s", error)
        return ()


def give_up_generation(calls: DeviceCalls, model: LoadedModel, graveyard: Graveyard) -> None:
    """Let go of buffers, bank and calbin of a generation that a reset ended; never fails.

    Memory whose job is not known to be quiescent is kept for good (E9); handles that the device
    does not take back are left behind with it.
    """
    for number in list(model.buffers):
        _give_up_buffer(calls, model.buffers.pop(number), graveyard)
    bank, model.bank, model.current = model.bank, None, None
    if bank is not None:
        answer = calls.library.attempt("npurt_kv_close", bank)
        if not answer.ok:
            LOG.warning("model/%d: its bank stays: %s", model.number, answer.reason)
    answer = calls.library.attempt("npurt_calbin_release", model.calbin)
    if not answer.ok:
        LOG.warning("model/%d: its calbin stays: %s", model.number, answer.reason)


def _give_up_buffer(calls: DeviceCalls, buffer: Buffer, graveyard: Graveyard) -> None:
    if not is_quiescent(calls, buffer):
        bury_buffer(buffer, graveyard, f"ticket {buffer.ticket} is not quiescent after a reset")
        return
    if buffer.ticket:
        calls.attempt("npurt_job_retire", buffer.ticket)
        buffer.ticket = 0
    try:
        destroy_buffer(calls, buffer, graveyard)
    except DeviceError as error:
        LOG.warning("buffer/%d stays: %s", buffer.number, error)


def is_quiescent(calls: DeviceCalls, buffer: Buffer) -> bool:
    """Return whether the device says that it will not touch a buffer's memory any more."""
    if not buffer.ticket:
        return not buffer.tainted
    state = npurt.JobState()
    answer = calls.attempt("npurt_job_poll", buffer.ticket, ctypes.byref(state))
    return answer.ok and state.h.flags & npurt.ENDED == npurt.ENDED
