"""How busy the device is, told from the instants of the jobs that are done.

A job occupies its command bank from the first phase that the device tells of to the last. Jobs
begin in the order of their submits, so their times are taken in that order, each as soon as all
before it have ended; then what two jobs did at once, and the pauses between jobs, come out exactly
whatever the order of the completions. A pause counts while requests live: then it is time that the
host took. Instants are the device's; a job of which it tells none is left out.

Source: R15.3.
"""

from typing import TypeAlias

import attrs

from laneway.engine.distribution import Histogram, stages
from laneway.engine.inputs import JobTimes

SLOTS = ("auto", "ping", "pong")
"""By the number that the ABI gives them."""


_Span: TypeAlias = tuple[str, int, int]
"""The name of a command bank, and from when to when it was busy. Units: ns."""


@attrs.define
class Occupancy:
    """Times of the device's jobs of requests so far, in ns.

    ``slots`` is how long each command bank was busy, ``busy_ns`` how long any was, ``overlap_ns``
    how long two were; ``pauses`` lie between jobs.
    """

    slots: dict[str, int] = attrs.Factory(dict)
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
        order, ended = self._order, self._ended
        if job not in order:
            return
        span = None if times is None else _span(slot, times)
        if job != next(iter(order)):
            ended[job] = span
            return
        self._take(span, order.pop(job))
        while ended and (first := next(iter(order))) in ended:
            self._take(ended.pop(first), order.pop(first))

    def _take(self, span: _Span | None, rested: bool) -> None:
        """Take the times of the next job in order, whose pause before it may be nobody's."""
        if span is None:
            if rested and self._order:
                self._order[next(iter(self._order))] = True
            else:
                self._resting = self._resting or rested
            return
        slot, begin_ns, end_ns = span
        self.slots[slot] = self.slots.get(slot, 0) + end_ns - begin_ns
        reached_ns = self._reached_ns
        if begin_ns >= reached_ns:
            if not rested:
                self.pauses.observe(begin_ns - reached_ns)
            self.busy_ns += end_ns - begin_ns
        else:
            self.overlap_ns += min(reached_ns, end_ns) - begin_ns
            self.busy_ns += max(0, end_ns - reached_ns)
        if end_ns > reached_ns:
            self._reached_ns = end_ns

    def share(self, slot: str) -> float:
        """Return the share of the time with work in which a command bank was busy, 0 to 1."""
        whole = self.busy_ns + self.pauses.total
        return self.slots.get(slot, 0) / whole if whole else 0.0

    @property
    def overlap_share(self) -> float:
        """The share of the busy time in which two jobs ran at once, 0 to 1."""
        return self.overlap_ns / self.busy_ns if self.busy_ns else 0.0


def _span(slot: int, times: JobTimes) -> _Span | None:
    begin_ns, end_ns = times.h2d_begin_ns, times.h2d_end_ns
    if (at_ns := times.exec_begin_ns) and (at_ns < begin_ns or not begin_ns):
        begin_ns = at_ns
    if (at_ns := times.d2h_begin_ns) and (at_ns < begin_ns or not begin_ns):
        begin_ns = at_ns
    if (at_ns := times.exec_end_ns) > end_ns:
        end_ns = at_ns
    if (at_ns := times.d2h_end_ns) > end_ns:
        end_ns = at_ns
    if not 0 < begin_ns <= end_ns:
        return None
    return SLOTS[slot] if slot < len(SLOTS) else str(slot), begin_ns, end_ns
