"""The story of one fault as plain values: what is told to a person or as JSON."""

from typing import Any

import attrs

from laneway.journal.faults import Signal


@attrs.frozen(kw_only=True)
class Line:
    """One thing that happened: ``what`` is its short name, ``data`` what belongs to it as JSON."""

    step: int
    at_ns: int
    what: str
    text: str
    data: dict[str, Any] = attrs.Factory(dict)

    def to_json(self) -> dict[str, Any]:
        """Return the line as JSON values."""
        return attrs.asdict(self)


@attrs.define(kw_only=True)
class Fate:
    """A request that lived when the fault came: what it had, what became of it.

    ``tokens``: how many it had at the fault, at the last. ``suspended``: "" or ``suspect``,
    ``innocent`` or ``abandoned`` (with its process), of its last suspension. ``ending``: the
    trigger of its ending, "" while it lives; ``reason``: why, as told to its client.
    """

    request: int
    state: str
    prompt_tokens: int
    tokens_before: int
    lane: int | None
    job: int | None
    tokens: int = 0
    suspended: str = ""
    suspended_step: int = 0
    resumed_step: int = 0
    alone: bool = False
    ending: str = ""
    reason: str = ""
    ended_step: int = 0
    ended_ns: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fate as JSON values."""
        return attrs.asdict(self)


@attrs.define(kw_only=True)
class Story:
    """One fault from its first signal to its end.

    ``rungs``: those that answered, in order. ``outcome``: ``lost``, ``recovered``, ``restarted``,
    ``degraded``, ``absolved``, ``distrusted``, ``restricted``, ``failed`` (a load), ``went on``,
    ``closed`` or ``killed`` (the engine ended in the middle), or ``open`` where the journal ends
    first. ``fenced`` lists entities by what was done to them, ``rejected`` counts the requests that
    were turned away meanwhile.
    """

    number: int
    signals: list[Signal]
    before: list[Line]
    held: dict[str, Any]
    fates: list[Fate]
    answers: list[Line] = attrs.Factory(list)
    fenced: dict[str, list[str]] = attrs.Factory(dict)
    rejected: dict[str, int] = attrs.Factory(dict)
    row: int | None = None
    rungs: list[int] = attrs.Factory(list)
    cause: str = ""
    outcome: str = "open"
    reason: str = ""
    next: str = ""
    last_step: int = 0
    last_ns: int = 0

    @property
    def kind(self) -> str:
        """What kind of fault it is: of the first signal that came to the ladder, else the first."""
        return self.decisive.kind

    @property
    def decisive(self) -> Signal:
        """The signal that the answer was given to."""
        escalated = [line.step for line in self.answers if line.what in ("escalate", "lose")]
        at = escalated[0] if escalated else self.signals[0].step
        return next((one for one in self.signals if one.step == at), self.signals[0])

    def to_json(self) -> dict[str, Any]:
        """Return the story as JSON values."""
        first = self.signals[0]
        return {
            "fault": self.number,
            "kind": self.kind,
            "about": list(self.decisive.about),
            "step": first.step,
            "at_ns": first.at_ns,
            "last_step": self.last_step,
            "last_ns": self.last_ns,
            "took_ns": self.last_ns - first.at_ns,
            "cause": self.cause,
            "row": self.row,
            "rung": self.rungs[0],
            "rungs": self.rungs,
            "outcome": self.outcome,
            "reason": self.reason,
            "next": self.next,
            "signals": [_signal_json(one) for one in self.signals],
            "before": [line.to_json() for line in self.before],
            "held": self.held,
            "answers": [line.to_json() for line in self.answers],
            "fenced": self.fenced,
            "requests": [fate.to_json() for fate in self.fates],
            "rejected": self.rejected,
        }


def _signal_json(signal: Signal) -> dict[str, Any]:
    return {
        "step": signal.step,
        "at_ns": signal.at_ns,
        "kind": signal.kind,
        "about": list(signal.about),
        "text": signal.text,
        "details": dict(signal.details),
    }
