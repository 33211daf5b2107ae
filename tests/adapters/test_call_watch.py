"""A device call that does not return counts as the device being wedged (E10, row 16)."""

import ctypes
import threading
from pathlib import Path
from typing import Any

import pytest

from laneway.adapters import npurt, open_device
from laneway.adapters.callwatch import BOUNDS_NS, SECOND_NS, CallWatch
from laneway.adapters.device import NpurtDevice
from laneway.engine import Engine
from laneway.engine.effects import ProbeHealth
from laneway.engine.inputs import DeviceClosed, DeviceFaulted
from laneway.journal import open_journal

PATIENCE_S = 60.0


class Time:
    """Host time that stands still until it is set."""

    def __init__(self) -> None:
        self.now_ns = 7

    def __call__(self) -> int:
        return self.now_ns


@pytest.mark.parametrize(
    ("name", "bound_ns"),
    [
        ("npurt_job_submit", SECOND_NS),
        ("npurt_device_health", SECOND_NS),
        ("npurt_calbin_configure", BOUNDS_NS["npurt_calbin_configure"]),
    ],
)
def test_a_call_is_overdue_beyond_five_times_its_bound_and_that_is_said_once(
    name: str, bound_ns: int
) -> None:
    time = Time()
    watch = CallWatch(time)
    call = watch.enter(name)
    time.now_ns += 5 * bound_ns
    assert watch.step() is None, "five times its bound is still borne"
    time.now_ns += 1
    overdue = watch.step()
    assert overdue is not None and overdue.name == name
    assert name in overdue.reason and "restart the process" in overdue.reason
    assert watch.step() is None, "said once"
    watch.leave(call)


def test_calls_that_returned_and_waits_are_never_overdue() -> None:
    time = Time()
    watch = CallWatch(time)
    watch.leave(watch.enter("npurt_job_submit"))
    assert watch.enter("npurt_job_wait") is None
    time.now_ns += 10**15
    assert watch.step() is None


class Wedged:
    """A simulated board whose health call blocks once it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = open_device("sim:tiny?clock=real&scale=50")
        assert isinstance(device, NpurtDevice)
        self.device = device
        self.time = Time()
        device.calls.watch._now_ns = self.time
        self.inside, self.release = threading.Event(), threading.Event()
        self.blocking = False
        entries: dict[str, Any] = device.calls.library._entries
        honest = entries["npurt_device_health"]

        def health(*arguments: Any) -> int:
            if self.blocking:
                self.inside.set()
                assert self.release.wait(PATIENCE_S)
                return int(npurt.Code.DEVICE_WEDGED)
            return int(honest(*arguments))

        monkeypatch.setitem(entries, "npurt_device_health", health)

    def wedge(self) -> None:
        """Ask for health, and wait until the call is inside."""
        self.blocking = True
        self.device.execute(ProbeHealth())
        assert self.inside.wait(PATIENCE_S)


def test_a_blocked_call_loses_the_device_and_no_call_is_made_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wedged = Wedged(monkeypatch)
    device = wedged.device
    engine = Engine(device=device, journal=open_journal(tmp_path / "run.db"))
    try:
        wedged.wedge()
        assert not device.watch_step() and engine.health().device == "serving"
        wedged.time.now_ns += 5 * SECOND_NS + 1
        device.watch_step()
        assert device.calls.closed, "row 16: no more calls"
        steps = engine.subscribe()
        while engine.health().device != "lost":
            assert steps.get(PATIENCE_S) is not None
        assert "npurt_device_health has not returned" in engine.health().reason
        answer = device.calls.attempt("npurt_clock_now", ctypes.byref(ctypes.c_uint64()))
        assert answer.code == npurt.Code.BAD_HANDLE
        wedged.release.set()
    finally:
        wedged.release.set()
        engine.close(drain=False)
    with open_journal(tmp_path / "run.db", read_only=True) as journal:
        taken = [step.taken for step in journal.read()]
    faults = [one for one in taken if isinstance(one, DeviceFaulted)]
    assert [(one.kind, one.code) for one in faults] == [("call", npurt.Code.DEVICE_WEDGED)]
    assert [one.abandoned for one in taken if isinstance(one, DeviceClosed)] == [True]
