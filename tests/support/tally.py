"""What campaigns of faults are held against: outcomes of runs, read from their steps, and figures.

Who is innocent, how many resets went beyond a budget and who got all of an answer is told by the
events and the streams alone, never by the engine's own state.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import attrs

from laneway.engine import Limits, Stream
from laneway.engine.ladder import budget
from laneway.engine.ports import Step
from laneway.statemachines import Event

S = TypeVar("S")
TRIES_MAX = 100


@attrs.define
class Outcome:
    """What came of one schedule."""

    hits: tuple[str, ...]
    """Kinds that did strike."""

    device: str
    whole: bool = True
    """Whether the engine was left in peace: nobody closed it or took its model."""

    accepted: int = 0
    finished: int = 0
    innocent: int = 0
    """Accepted requests that no fault named and whose clients waited."""

    innocent_finished: int = 0
    resets: tuple[int, ...] = ()
    """The rungs of the resets, in order."""

    over_budget: int = 0


def judge(
    made: Outcome,
    steps: Sequence[Step],
    streams: Iterable[Stream],
    *,
    impatient: set[int],
    limits: Limits,
) -> Outcome:
    """Count who got what, and which resets there were; return the outcome."""
    suspects = set(_numbers(_events(steps, "request", "suspend"), suspect=True))
    suspects |= _refused_again(steps)
    accepted = set(_numbers(_events(steps, "request", "admit")))
    for stream in streams:
        if stream.request not in accepted:
            continue
        good = stream.result().finish_reason in ("stop", "length")
        made.accepted += 1
        made.finished += good
        if stream.request not in suspects | impatient:
            made.innocent += 1
            made.innocent_finished += good
    made.resets = tuple(event.data["rung"] for event in _events(steps, "device", "reset"))
    made.over_budget = over_budget(steps, limits)
    return made


def _events(steps: Sequence[Step], machine: str, trigger: str) -> list[Event]:
    return [
        event
        for step in steps
        for event in step.events
        if (event.machine, event.trigger) == (machine, trigger)
    ]


def _numbers(events: Iterable[Event], **data: object) -> list[int]:
    """Return the entities of the events whose data says so."""
    return [
        number
        for event in events
        if all(event.data.get(name) == value for name, value in data.items())
        for number in event.entities
    ]


def _refused_again(steps: Sequence[Step]) -> set[int]:
    """Return the requests whose jobs were refused more often than a job is tried again (row 3)."""
    owners = {
        number: event.data["owners"]
        for event in _events(steps, "job", "plan")
        for number in event.entities
    }
    refused = Counter(
        owner
        for event in _events(steps, "job", "refuse")
        for number in event.entities
        for owner in owners[number]
    )
    return {owner for owner, times in refused.items() if times > 1}


def over_budget(steps: Sequence[Step], limits: Limits) -> int:
    """Return how many resets went beyond a budget, counted from the steps alone (I10)."""
    times: dict[int, list[int]] = {}
    over = 0
    for step in steps:
        for event in step.events:
            if (event.machine, event.trigger) != ("device", "reset") or not event.data["level"]:
                continue
            rung = event.data["rung"]
            allowed = budget(limits, rung)
            before = times.setdefault(rung, [])
            recent = [at for at in before if step.at_ns - at < allowed.window_ns]
            over += len(recent) >= allowed.count
            before.append(step.at_ns)
    return over


@attrs.define
class Tally:
    """Many outcomes in figures, by kind of fault where a schedule had one fault alone."""

    schedules: int = 0
    accepted: int = 0
    finished: int = 0
    over_budget: int = 0
    lost_devices: int = 0
    resets: Counter[int] = attrs.Factory(Counter)
    lost: Counter[str] = attrs.Factory(Counter)
    """By kind: devices that were lost by it alone."""

    shares: dict[str, tuple[int, int]] = attrs.Factory(dict)
    """By kind: innocents that finished, and innocents."""

    def add(self, made: Outcome) -> None:
        """Count one outcome."""
        self.schedules += 1
        self.accepted += made.accepted
        self.finished += made.finished
        self.over_budget += made.over_budget
        self.lost_devices += made.device == "lost"
        self.resets.update(made.resets)
        if len(made.hits) == 1 and made.whole:
            self.lost[made.hits[0]] += made.device == "lost"
            done, all_ = self.shares.get(made.hits[0], (0, 0))
            self.shares[made.hits[0]] = (
                done + made.innocent_finished,
                all_ + made.innocent,
            )

    def lines(self) -> list[str]:
        """Return the figures to print."""
        rungs = ", ".join(f"R{rung} {count}" for rung, count in sorted(self.resets.items()))
        head = (
            f"{self.schedules} schedules: {self.finished} of {self.accepted} requests finished,"
            f" {self.lost_devices} devices lost, resets {rungs or 'none'},"
            f" {self.over_budget} over budget"
        )
        return [head, *(self._line(kind) for kind in sorted(self.shares))]

    def _line(self, kind: str) -> str:
        done, all_ = self.shares[kind]
        lost = f", {self.lost[kind]} devices lost" if self.lost[kind] else ""
        figures = f"{done:6} of {all_:6} innocents finished ({share(done, all_):.1%}){lost}"
        return f"  {kind:24} {figures}"


def share(done: int, all_: int) -> float:
    """Return a share, 1 of nothing."""
    return done / all_ if all_ else 1.0


def campaign(
    schedules: Iterable[S],
    play: Callable[[S], Outcome],
    *,
    tally: Tally | None = None,
    smaller: Callable[[S], Iterable[S]] = lambda schedule: (),
) -> Tally:
    """Play schedules and count them; a failure names its schedule and the smallest that fails so.

    ``smaller`` gives those that have a little less of what happens.
    """
    tally = tally if tally is not None else Tally()
    for schedule in schedules:
        try:
            tally.add(play(schedule))
        except Exception as failure:
            failure.add_note(f"schedule {schedule}")
            failure.add_note(f"smallest {shrink(schedule, play, smaller, type(failure))}")
            raise
    return tally


def shrink(
    schedule: S,
    play: Callable[[S], Outcome],
    smaller: Callable[[S], Iterable[S]],
    kind: type[Exception],
) -> S:
    """Return a schedule of which every smaller one plays well, or fails in another way."""
    for _ in range(TRIES_MAX):
        for candidate in smaller(schedule):
            try:
                play(candidate)
            except Exception as failure:
                if type(failure) is kind:
                    schedule = candidate
                    break
        else:
            return schedule
    return schedule
