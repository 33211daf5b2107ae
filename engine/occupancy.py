"""How busy the device is, told from the instants of the jobs that are done.

A job occupies its command bank from the first phase that the device tells of to the last. Jobs
begin in the order of their submits, so their times are taken in that order, each as soon as all
before it have ended; then what two jobs did at once, and the pauses between jobs, come out exactly
whatever the order of the completions. A pause counts while requests live: then it is time that the
host took. Instants are the device's; a job of which it tells none is left out.

Source: R15.3.
"""

from collections import Counter

import attrs

from laneway.engine.distribution import Histogram, stages
from laneway.engine.inputs import JobTimes

SLOTS = ("auto", "ping", "pong")
"""By the number that the ABI gives them."""


@attrs.frozen
class _Span:
    slot: str
    begin_ns: int
    end_ns: int


@attrs.define
class Occupancy:
    """Times of the device's jobs of requests so far, in ns.

    ``slots`` is how long each command bank was busy, ``busy_ns`` how long any was, ``overlap_ns``
    how long two were; ``pauses`` lie between jobs.
    """

    slots: Counter[str] = attrs.Factory(Counter)
    busy_ns: int = 0
    overlap_ns: int = 0
    pauses: Histogram = attrs.Factory(stages)
    _order: dict[int, bool] = attrs.Factory(dict)
    _ended: dict[int, _Span | None] = attrs.Factory(dict)
    _reached_ns: int = 0
    _resting: bool = True

    def plan(self, job: int) -> None:
        """Take note of a job to come."""
        self._order[job] = self._resting
        self._resting = False

    def rest(self) -> None:
        """Take note that nobody waits for anything: the pause from here on is nobody's."""
        self._resting = True

    def restart(self) -> None:
        """Begin anew: the device was opened, its clock may be another."""
        self._order.clear()
        self._ended.clear()
        self._reached_ns = 0
        self._resting = True

    def end(self, job: int, slot: int, times: JobTimes | None) -> None:
        """Take the times of a job that is terminal, None where they are not known.

        One from before a restart is nobody's any more.
        """
        if job not in self._order:
            return
        self._ended[job] = None if times is None else _span(slot, times)
        while self._order and (first := next(iter(self._order))) in self._ended:
            rested = self._order.pop(first)
            span = self._ended.pop(first)
            if span is not None:
                self._take(span, rested)
            elif rested and self._order:
                self._order[next(iter(self._order))] = True
            else:
                self._resting = self._resting or rested

    def _take(self, span: _Span, rested: bool) -> None:
        self.slots[span.slot] += span.end_ns - span.begin_ns
        beyond = span.begin_ns - self._reached_ns
        if beyond >= 0:
            if not rested:
                self.pauses.observe(beyond)
            self.busy_ns += span.end_ns - span.begin_ns
        else:
            self.overlap_ns += min(self._reached_ns, span.end_ns) - span.begin_ns
            self.busy_ns += max(0, span.end_ns - self._reached_ns)
        self._reached_ns = max(self._reached_ns, span.end_ns)

    def share(self, slot: str) -> float:
        """Return the share of the time with work in which a command bank was busy, 0 to 1."""
        whole = self.busy_ns + self.pauses.total
        return self.slots[slot] / whole if whole else 0.0

    @property
    def overlap_share(self) -> float:
        """The share of the busy time in which two jobs ran at once, 0 to 1."""
        return self.overlap_ns / self.busy_ns if self.busy_ns else 0.0


def _span(slot: int, times: JobTimes) -> _Span | None:
    begins = [at for at in (times.h2d_begin_ns, times.exec_begin_ns, times.d2h_begin_ns) if at]
    begin_ns = min(begins, default=0)
    end_ns = max(times.h2d_end_ns, times.exec_end_ns, times.d2h_end_ns)
    if not 0 < begin_ns <= end_ns:
        return None
    return _Span(SLOTS[slot] if slot < len(SLOTS) else str(slot), begin_ns, end_ns)
