"""Events of a device as plain values: each once, in order, with what was lost.

Source: npurt.h (events), E27.
"""

from collections.abc import Iterator

import pytest
from support.driven_device import DrivenDevice, row
from support.native_board import Bench

from laneway.adapters import npurt
from laneway.adapters.device import NpurtDevice
from laneway.adapters.discover import open_device
from laneway.adapters.events import KINDS, TAKEN_MAX, read_events
from laneway.engine.errors import DeviceError

RING = 256
"""What the simulated board keeps, by its capability EVENTS."""


@pytest.fixture
def device(bench: Bench) -> Iterator[NpurtDevice]:
    opened = open_device("sim:tiny?clock=manual")
    assert isinstance(opened, NpurtDevice)
    yield opened
    opened.calls.attempt("npurt_device_close")


def test_a_fresh_device_has_nothing_to_tell(device: NpurtDevice) -> None:
    assert read_events(device.calls) == ()


def test_each_event_is_read_once_and_in_order(device: NpurtDevice, bench: Bench) -> None:
    driven = DrivenDevice(device, threads=False)
    driven.load(str(bench.calbin))
    (configured,) = read_events(device.calls)
    assert (configured.kind, configured.number, configured.at_ns) == ("memory", 1, 0)
    assert (configured.code, configured.ticket, configured.lost_before) == (0, 0, 0)
    assert configured.text.startswith("configured ")
    assert device.simulator is not None
    device.simulator.set_faults("fault x kind=ccu_exception chip=1 code=9 quiesce=n")
    ticket = driven.submit(driven.job("decode", (row((5,)),)))
    device.simulator.step_idle()
    raised, health = read_events(device.calls)
    assert (raised.kind, raised.ticket, raised.chip) == ("ccu", ticket, 1)
    assert (raised.code, raised.device_epoch) == (npurt.Code.CCU_EXCEPTION, 1)
    assert (raised.at_ns, raised.number) == (2_000, 2)
    assert (health.kind, health.number, health.ticket) == ("health", 3, 0)
    assert read_events(device.calls) == ()


def test_numbers_up_to_since_are_left_out_and_gone(device: NpurtDevice) -> None:
    assert device.simulator is not None
    plan = "\n".join(f"fault u{i} kind=epoch_bump on=time after={i}us" for i in range(1, 4))
    device.simulator.set_faults(plan)
    device.simulator.step_idle()
    events = read_events(device.calls, since=4)
    assert [(event.number, event.kind, event.device_epoch) for event in events] == [
        (5, "owner", 3),
        (6, "epoch", 4),
    ]
    assert read_events(device.calls) == ()


def test_what_the_ring_had_to_drop_is_counted(device: NpurtDevice) -> None:
    assert device.simulator is not None
    device.simulator.set_faults("fault e kind=epoch_bump on=health count=inf")
    health = npurt.Health()
    for _ in range(200):
        device.calls.call("npurt_device_health", health)
    events = read_events(device.calls)
    assert len(events) == RING < TAKEN_MAX
    assert [event.number for event in events] == list(range(145, 401))
    assert [event.lost_before for event in events] == [144] + [0] * (RING - 1)


def test_every_kind_of_the_header_has_a_word() -> None:
    header = npurt.__file__.replace("npurt.py", "native/npurt.h")
    with open(header, encoding="utf-8") as file:
        names = [line.split()[0] for line in file if line.lstrip().startswith("NPURT_EV_")]
    assert len(names) == len(KINDS) == max(KINDS)


def test_a_closed_device_is_an_error(device: NpurtDevice) -> None:
    device.calls.call("npurt_device_close")
    with pytest.raises(DeviceError, match="events: npurt_device_event: BAD_HANDLE"):
        read_events(device.calls)
