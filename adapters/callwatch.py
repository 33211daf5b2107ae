"""Notice a device call that does not return: it counts as the device being wedged (E10, row 16).

Every call but a wait has a bound. Each is noted when it begins and forgotten when it returns; a
step outside the calls, with a clock of its own, finds the one that has been inside for more than
five times its bound. That is said once: a wedged device is left alone from then on.
"""

import threading
from collections.abc import Callable, Mapping
from functools import cache
from itertools import count
from types import MappingProxyType

import attrs

SECOND_NS = 1_000_000_000
OVERDUE_FACTOR = 5
BOUND_NS = 1 * SECOND_NS
BOUNDS_NS: Mapping[str, int] = MappingProxyType(
    {
        "npurt_calbin_create": 60 * SECOND_NS,
        "npurt_calbin_configure": 120 * SECOND_NS,
        "npurt_calbin_release": 30 * SECOND_NS,
        "npurt_buffer_create": 10 * SECOND_NS,
        "npurt_device_close": 30 * SECOND_NS,
        "npurt_reset_run": 120 * SECOND_NS,
    }
)
"""Calls that may rightly take longer than BOUND_NS: starting values, to be measured (E10)."""

UNWATCHED = frozenset({"npurt_job_wait"})
"""A wait has its own bound, which its caller gives. Nor are the simulator's own entries watched."""


@cache
def is_watched(name: str) -> bool:
    """Return whether a call of this name has a bound."""
    return name not in UNWATCHED and not name.startswith("npurt_sim_")


@attrs.frozen
class Overdue:
    """A call that has not returned: its name, and for how long it has been inside."""

    name: str
    inside_ns: int

    @property
    def reason(self) -> str:
        """What to tell: the call, its bound, and since when."""
        bound_ns = BOUNDS_NS.get(self.name, BOUND_NS)
        return (
            f"{self.name} has not returned for {self.inside_ns / SECOND_NS:.1f} s, its bound is"
            f" {bound_ns / SECOND_NS:g} s: the device is wedged, restart the process"
        )


class CallWatch:
    """The calls that are inside a device's library now; thread-safe.

    ``now_ns`` is host time: device time may stand still when the device does. A call is noted and
    forgotten by one operation of a dict each, so no lock is needed around every device call.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._changed = threading.Lock()
        self._inside: dict[int, tuple[str, int]] = {}
        self._numbers = count(1)
        self._said = False

    def enter(self, name: str) -> int | None:
        """Note that a call begins; return what ``leave`` is to be told, None if not watched."""
        if not is_watched(name):
            return None
        call = next(self._numbers)
        self._inside[call] = (name, self._now_ns())
        return call

    def leave(self, call: int | None) -> None:
        """Forget a call that has returned."""
        if call is not None:
            del self._inside[call]

    def step(self) -> Overdue | None:
        """Return the call that is longest overdue, the first time there is one."""
        now_ns = self._now_ns()
        with self._changed:
            overdue = [
                Overdue(name, now_ns - since_ns)
                for name, since_ns in list(self._inside.values())
                if now_ns - since_ns > OVERDUE_FACTOR * BOUNDS_NS.get(name, BOUND_NS)
            ]
            if self._said or not overdue:
                return None
            self._said = True
        return max(overdue, key=lambda one: one.inside_ns)
