"""Whoever waits for a job naps, and a slice is as long as it would be in one sleep."""

from types import SimpleNamespace
from typing import Any

import pytest

from laneway.adapters import npurt, waiting
from laneway.adapters.binding import Answer
from laneway.adapters.waiting import NAP_NS, SLICE_NS, Waiting
from laneway.engine.clock import ManualClock

MS = 1_000_000


class Library:
    """A device whose waits end without a result; each takes as long as it was told, or longer."""

    def __init__(self, *, late_ns: int = 0) -> None:
        self.library = SimpleNamespace(simulates=False)
        self.moves = 0
        self.now_ns = 0
        self.naps: list[int] = []
        self.late_ns = late_ns

    def host_ns(self, scale: float) -> int:
        return int(self.now_ns / scale)

    def attempt(self, name: str, tickets: Any, count: int, at_most_ns: int, which: Any) -> Answer:
        self.naps.append(at_most_ns)
        self.now_ns += at_most_ns + self.late_ns
        return Answer(name, npurt.Code.WAIT_TIMEOUT)


def slept(
    monkeypatch: pytest.MonkeyPatch, library: Library, *, scale: float = 1.0, stepped: bool = False
) -> list[int]:
    """Return the naps of one slice."""
    calls: Any = library
    clock = ManualClock()
    options: Any = {"stepped": stepped, "scale": scale}
    waits = Waiting(calls, clock, chips=(0,), post=lambda taken: None, **options)
    waits._flights[7] = SimpleNamespace(ticket=7)  # type: ignore[assignment]
    monkeypatch.setattr(waits, "_look_at", lambda flights: False)
    host = SimpleNamespace(monotonic_ns=lambda: library.host_ns(scale))
    monkeypatch.setattr(waiting, "time", host)
    assert not waits.collect(timeout_ns=round(SLICE_NS * scale))
    return library.naps


def test_a_slice_is_slept_in_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slept(monkeypatch, Library()) == [NAP_NS] * 200


def test_naps_that_end_late_make_no_slice_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do where other threads keep the interpreter."""
    library = Library(late_ns=5 * MS)
    slept(monkeypatch, library)
    assert SLICE_NS <= library.now_ns < SLICE_NS + 6 * MS


def test_a_nap_is_time_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slept(monkeypatch, Library(), scale=50.0) == [50 * NAP_NS] * 200


def test_a_stepped_device_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slept(monkeypatch, Library(), stepped=True) == [SLICE_NS]
