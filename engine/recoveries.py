"""What recoveries cost and how they end, told from the events of device and requests alone.

A reset has one result: what refused its report (V1 to V5, or ``failed`` where the call itself did),
``proof`` where the device was believed and then golden or the configuration failed or another fault
came, ``verified`` where it serves again, and ``cut_off`` where the process or the engine ended
first. How long a recovery took is from the first time that the device was given no more work to
the time that it serves again.

Source: R14.7, R15.4, E28.
"""

import re
from collections import Counter

import attrs

from laneway.engine.distribution import SECOND_NS, Histogram, decades
from laneway.engine.inputs import ResetFinished
from laneway.engine.ports import Step
from laneway.statemachines import Event

BREAKER = ("closed", "half_open", "open")
RECOVERY_BOUNDS_NS = decades(SECOND_NS // 1000, 5000 * SECOND_NS)
_BREAKER = {"reset": "open", "recover": "half_open", "serve": "closed"}
_SUSPENSIONS = ("suspend", "abandon")


@attrs.define
class Recoveries:
    """Counts over the whole journal; ``breaker`` and ``last_reset_ns`` are of now.

    ``resets`` are by level, row and result; ``rungs`` counts how often each was chosen; ``waits``
    counts suspensions by what the requests were taken for.
    """

    resets: Counter[tuple[str, str, str]] = attrs.Factory(Counter)
    rungs: Counter[str] = attrs.Factory(Counter)
    waits: Counter[str] = attrs.Factory(Counter)
    resumed: int = 0
    took: Histogram = attrs.Factory(lambda: Histogram(RECOVERY_BOUNDS_NS, SECOND_NS))
    breaker: str = "closed"
    last_reset_ns: int | None = None
    _since_ns: int | None = None
    _rung: int | None = None
    _reset: tuple[str, str] | None = None

    def take_device(self, event: Event, step: Step) -> None:
        """Take a move of the device."""
        trigger, data = event.trigger, event.data
        self.breaker = _BREAKER.get(trigger, self.breaker)
        if trigger in ("suspect", "escalate", "lose") and self._since_ns is None:
            self._since_ns = step.at_ns
        if self._reset is not None and trigger in ("escalate", "lose", "serve", "abandon"):
            self.resets[(*self._reset, _result(event, step))] += 1
            self._reset = None
        if trigger == "reset":
            self._reset = (str(data["level"]), _row(data["cause"]))
            self.last_reset_ns = step.at_ns
        if "rung" in data and data["rung"] != self._rung:
            self._rung = data["rung"]
            self.rungs[str(self._rung)] += 1
        if trigger == "serve" and self._since_ns is not None:
            self.took.observe(step.at_ns - self._since_ns)
        if trigger in ("serve", "absolve", "lose", "abandon"):
            self._since_ns = self._rung = None

    def take_request(self, event: Event) -> None:
        """Take a move of requests."""
        if event.trigger == "resume":
            self.resumed += len(event.entities)
        elif event.trigger in _SUSPENSIONS:
            how = "abandoned"
            if event.trigger == "suspend":
                how = "suspect" if event.data["suspect"] else "innocent"
            self.waits[how] += len(event.entities)


def _result(event: Event, step: Step) -> str:
    if event.trigger == "serve":
        return "verified"
    if event.trigger == "abandon":
        return "cut_off"
    if not isinstance(step.taken, ResetFinished):
        return "proof" if event.source == "recovering" else "cut_off"
    if step.taken.code:
        return "failed"
    named = re.search(r"\((V\d)\)", str(event.data["reason"]))
    return named[1] if named else "V2"  # versions are what no check names (row 26)


def _row(cause: str) -> str:
    """Return the row that a cause names, "" for none."""
    named = re.search(r"\(row (\d+)\)", cause)
    return named[1] if named else ""
