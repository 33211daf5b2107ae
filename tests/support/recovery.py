"""A recovery in one step, in place of resets: what it takes for requests to go on (G8, G15).

``Recovery`` answers a fault as the engine's own answer would begin: the job is fenced, every lane
is unknown, every request that held something is suspended, those of the faulted job as suspects. At
``recover`` the lanes are cleared, the buffers rebuilt and the suspended resumed, in one step. It
stands in for functions of the engine, so that replay decides the same.
"""

from collections import deque

import attrs
import pytest
from support.fake_device import healthy
from support.rig import Rig
from support.told import fault_told

from laneway.engine import faulting, health
from laneway.engine.draft import Draft
from laneway.engine.effects import ApplyKv
from laneway.engine.inputs import DeviceFaulted, HealthProbed
from laneway.engine.reserving import suspect
from laneway.engine.resuming import suspend_request


@attrs.define
class Recovery:
    """Faults the device of a rig and recovers it, as often as asked."""

    rig: Rig

    def fault(self, job: int | None = None) -> None:
        """Let a job fault, or the device alone; nothing it had survives."""
        completing = {n for n, b in self.rig.state.buffers.items() if b.state == "completing"}
        self.rig.device.reset(restoring=completing)
        outbox = self.rig.engine._outbox
        self.rig.engine._outbox = deque(e for e in outbox if not isinstance(e, ApplyKv))
        self.rig.interrupt(faulted(job))

    def fault_running(self) -> int | None:
        """Let the oldest job in flight fault, if there is one, else the device; return the job."""
        job = min(self.rig.state.jobs, default=None)
        self.fault(job)
        return job

    def recover(self) -> None:
        """Let the suspended go on."""
        self.rig.interrupt(HealthProbed(health=healthy(0), reason="recovered"))


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines answer faults by suspending, and a probe by resuming."""
    monkeypatch.setattr(faulting, "fault", _fault)
    monkeypatch.setattr(health, "probed", _probed)


def faulted(job: int | None) -> DeviceFaulted:
    """Return a fault of a job, or of the device."""
    return fault_told("ccu" if job is not None else "device", 0x0603, job=job)


def _fault(draft: Draft, taken: DeviceFaulted) -> None:
    state = draft.state
    if state.device.state != "suspect":
        draft.device("suspect", data={"reason": taken.reason})
    owners: list[int] = []
    for number in sorted(state.jobs):
        job = state.jobs[number]
        if number == taken.job:
            owners = [row.owner for row in job.rows]
        draft.emit("buffer", job.buffer, "quarantine", generation=job.generation)
        trigger = "fault" if number == taken.job and job.state != "planned" else "lose"
        data = {"kind": "ccu", "reason": taken.reason}
        draft.emit("job", number, trigger, generation=job.generation, data=data)
    suspect(draft, sorted(state.lanes), reason=taken.reason)
    for number in sorted(state.requests):
        request = state.requests[number]
        suspend_request(draft, request, taken.reason, suspect=number in owners)


def _probed(draft: Draft, taken: HealthProbed) -> None:
    state = draft.state
    if taken.reason != "recovered" or state.device.state != "suspect":
        return
    draft.device("escalate", data={"cause": "told to", "rung": 4, "reason": "told to"})
    draft.device("reset", data={"rung": 4, "level": 1, "stamps": 0})
    generation = next(iter(state.models.values())).generation
    unknown = [n for n, lane in sorted(state.lanes.items()) if lane.state == "unknown"]
    if unknown:
        draft.emit("lane", unknown, "clear", generation=generation)
    kept = [n for n, buffer in sorted(state.buffers.items()) if buffer.state == "quarantined"]
    if kept:
        draft.emit("buffer", kept, "rebuild", generation=generation)
    draft.device("recover")
    draft.device("serve")
