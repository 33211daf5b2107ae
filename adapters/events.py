"""Take what a device keeps in its ring of events as plain values.

The ring is bounded and every event is given out once: whoever reads here has it, nobody else. Lost
ones are counted by the next one that is read. The numbers never begin anew while a device is open.

Source: npurt.h (events), E27.
"""

import ctypes
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from laneway.adapters import npurt
from laneway.adapters.calls import DeviceCalls

TAKEN_MAX = 1024
"""How many are taken at once at most: a device that makes them faster than that does not hold up
its reader."""

KINDS: Mapping[int, str] = MappingProxyType(
    {
        1: "health",
        2: "throttle",
        3: "ccu",
        4: "late",
        5: "epoch",
        6: "owner",
        7: "memory",
        8: "counter",
        9: "violation",
    }
)


@attrs.frozen(kw_only=True)
class DeviceEvent:
    """One event; ``ticket`` and ``code`` are 0 where it is about no job and no error."""

    number: int
    at_ns: int
    kind: str
    ticket: int
    chip: int
    code: int
    device_epoch: int
    lost_before: int
    """How many the device had to drop just before this one."""
    text: str


def read_events(calls: DeviceCalls, *, since: int = 0) -> tuple[DeviceEvent, ...]:
    """Take every event that waits, oldest first; leave out those up to number ``since``.

    Units: at_ns in the device's own time. Raises: DeviceError.
    """
    taken = []
    event = npurt.Event()
    for _ in range(TAKEN_MAX):
        answer = calls.attempt("npurt_device_event", ctypes.byref(event))
        if answer.code == npurt.Code.EMPTY:
            break
        calls.library.check(answer, about="events")
        if event.seq > since:
            taken.append(_read(event))
    return tuple(taken)


def _read(event: npurt.Event) -> DeviceEvent:
    return DeviceEvent(
        number=event.seq,
        at_ns=event.when_ns,
        kind=KINDS.get(event.kind, f"kind {event.kind}"),
        ticket=event.ticket,
        chip=event.chip,
        code=event.code,
        device_epoch=event.device_epoch,
        lost_before=event.dropped,
        text=event.text.decode("utf-8", "replace"),
    )
