"""Faults that strike a rig in the middle of its script, and what recoveries of them are seen by."""

from typing import Any

import attrs
from support.fake_device import FakeDevice, healthy
from support.rig import Rig
from support.script import PROMPTS, TOKENS, small_artifact
from support.told import fault_told

from laneway.engine import Limits
from laneway.engine.effects import RunReset, SubmitJob
from laneway.engine.inputs import Completed, DeviceFaulted, Input

CCU, DMA, REJECTED, STICKY, RESET_FAILED = 0x0604, 0x0605, 0x0601, 0x0804, 0x0805
POISON = (6, 6, 6)
"""The beginning of a prompt that fails every job it is in, where ``poisoned`` answers."""


def begin(
    limits: Limits | None = None, *, tokens: int = TOKENS, resets: bool = True, **device: Any
) -> Rig:
    """Return a rig with resets in its budget and the script's three requests handed in."""
    rig = Rig(device=FakeDevice(artifact=small_artifact, **device), limits=limits, resets=resets)
    for number, prompt in enumerate(PROMPTS):
        rig.submit(prompt, seed=number, max_tokens=tokens, ignore_eos=True)
    return rig


def fault(rig: Rig, kind: str = "ccu", code: int = CCU, **more: Any) -> DeviceFaulted:
    """Return a fault of the job in flight, or of the device where the kind is of the device."""
    job = next(iter(rig.state.jobs.values()), None)
    taken = fault_told(
        kind,
        code,
        job=job.number if job is not None and kind not in ("device", "call") else None,
        ticket=job.ticket if job is not None else 0,
        epoch=rig.state.device.epoch,
        generation=next(iter(rig.state.models.values())).generation,
        health=healthy(0),
    )
    return attrs.evolve(taken, **more)


def run_to_job(rig: Rig) -> int:
    """Run until the device has a job that it accepted; return its number."""
    rig.run(until=lambda: any(job.state == "submitted" for job in rig.state.jobs.values()))
    return next(iter(rig.state.jobs))


def strike_now(rig: Rig, kind: str = "ccu", code: int = CCU, /, **more: Any) -> DeviceFaulted:
    """Let the job in flight fail, and the device never say how it ended; return what was told."""
    taken = fault(rig, kind, code, **more)
    rig.device.drop_jobs()
    rig.interrupt(taken)
    return taken


def strike(rig: Rig, kind: str = "ccu", code: int = CCU, /, **more: Any) -> DeviceFaulted:
    """Run until the device has a job, and let that fail."""
    run_to_job(rig)
    return strike_now(rig, kind, code, **more)


def levels(rig: Rig) -> list[int]:
    """Return the levels of the resets that the device was asked for."""
    return [effect.level for effect in rig.device.executed if isinstance(effect, RunReset)]


def poisoned(effect: SubmitJob, done: Completed) -> Input:
    """Fail every job that has a row of the poison prompt; others end well."""
    if not any(row.tokens[: len(POISON)] == POISON for row in effect.rows):
        return done
    return fault_told(
        "ccu",
        CCU,
        job=effect.job,
        ticket=done.ticket,
        epoch=effect.epoch,
        generation=effect.generation,
        reason="bad command",
        health=healthy(0),
    )
