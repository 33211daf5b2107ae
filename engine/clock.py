"""Clocks: where the engine's instants come from.

Nothing in the core reads one; the shell does, and puts the instant into inputs.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of instants in ns that never falls."""

    def now_ns(self) -> int:
        """Return the present instant in ns."""
        ...

    def real_seconds(self, duration_ns: int) -> float:
        """Return how many seconds of the real world a duration on this clock takes."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        """Return the present instant in ns."""
        return time.monotonic_ns()

    def real_seconds(self, duration_ns: int) -> float:
        """Return how many seconds of the real world a duration on this clock takes."""
        return duration_ns / 1e9


class ManualClock:
    """A clock that moves only when it is told to."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        """Return the present instant in ns."""
        return self._now_ns

    def real_seconds(self, duration_ns: int) -> float:
        """Return 0: nobody knows when this clock moves, so look again at once."""
        return 0.0

    def advance(self, by_ns: int) -> None:
        """Move forward. Raises: ValueError for a negative step."""
        if by_ns < 0:
            raise ValueError(f"a clock does not go back (by {by_ns} ns)")
        self._now_ns += by_ns


def wall_clock_ns() -> int:
    """Return the wall clock in ns since the epoch: the anchor of one incarnation."""
    return time.time_ns()
