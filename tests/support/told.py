"""What a device tells the engine, with the fields that a test does not care about filled in."""

from typing import Any

from laneway.engine.inputs import DeviceFaulted, JobStalled
from laneway.engine.state import JobState


def fault_told(
    kind: str, code: int, *, job: int | None = None, ticket: int = 0, **more: Any
) -> DeviceFaulted:
    """Return a fault of a job, or of the device, of which nothing good is known."""
    known: dict[str, Any] = {
        "epoch": 0,
        "generation": 0,
        "quiescent": False,
        "kv_effect": "unknown",
        "reason": "told to",
        "record": None,
        "health": None,
    }
    return DeviceFaulted(kind=kind, code=code, job=job, ticket=ticket, **{**known, **more})


def stall_told(job: JobState, stage: str, *, ticket: int | None = None) -> JobStalled:
    """Return that a job stands still."""
    return JobStalled(
        job=job.number,
        ticket=job.ticket if ticket is None else ticket,
        stage=stage,
        phase="exec",
        age_ns=9,
        progress_age_ns=9,
    )
