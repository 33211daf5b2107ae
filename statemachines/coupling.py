"""Transitions of different machines that must share a step.

A coupling says: when an event of one machine is in a step, then that step also moves what the first
one binds. Only triggers are compared here; that the right entities moved is the business of the
tables (they can only move from where they are) and of the invariants. ``broken_couplings`` is pure
and is run by tests over every step they write.
"""

from collections.abc import Sequence

import attrs

from laneway.statemachines.event import Event


@attrs.frozen
class Coupling:
    """``when`` needs one of ``then`` in the same step; each is a pair of machine and trigger."""

    when: tuple[str, str]
    then: tuple[tuple[str, str], ...]
    why: str
    rule: str


COUPLINGS = (
    Coupling(
        ("job", "plan"),
        (("buffer", "acquire"),),
        "a job exclusively owns a buffer from the moment it is planned",
        "R3.4, E1",
    ),
    Coupling(
        ("job", "plan"),
        (("lane", "reserve"),),
        "a job is planned only with its KV growth reserved",
        "R7.1, E17",
    ),
    Coupling(
        ("job", "submit"),
        (("buffer", "submit"),),
        "the device owns the memory of an accepted job",
        "G13, E3",
    ),
    Coupling(
        ("job", "doubt"),
        (("buffer", "submit"),),
        "memory of a job that may be queued belongs to the device",
        "D6, E5",
    ),
    Coupling(
        ("job", "refuse"),
        (("buffer", "refuse"),),
        "nothing was queued, so the buffer was never the device's",
        "R7.4, R4.3",
    ),
    Coupling(
        ("job", "complete"),
        (("buffer", "complete"),),
        "a done job's memory is read, restored and wiped before it is free",
        "R4.3, E4",
    ),
    Coupling(
        ("job", "complete"),
        (("lane", "commit"), ("lane", "rollback"), ("lane", "suspect")),
        "a reservation ends with its job",
        "R7.4, E17",
    ),
    Coupling(
        ("job", "fault"),
        (("buffer", "quarantine"),),
        "an exception never leads to a free buffer",
        "G1, E5",
    ),
    Coupling(
        ("job", "abort"),
        (("buffer", "quarantine"),),
        "a job killed on the device may still have DMA under way",
        "R4.5, E5",
    ),
    Coupling(
        ("job", "lose"),
        (("buffer", "quarantine"),),
        "what the device may still do to the memory is not known",
        "G7, E5",
    ),
    Coupling(
        ("job", "fault"),
        (("lane", "suspect"), ("lane", "rollback")),
        "after an exception nobody knows what is in the lanes, unless the device is sure of it",
        "R7.5, G14",
    ),
    Coupling(
        ("request", "prefill"),
        (("lane", "bind"),),
        "a request gets its lane with its first job and keeps it",
        "R6.2, E15",
    ),
    Coupling(
        ("model", "degrade"),
        (("device", "reset"), ("device", "lose")),
        "a model loses its generation only by a reset or with its device",
        "G5",
    ),
)


def broken_couplings(events: Sequence[Event]) -> list[Coupling]:
    """Return the couplings that the events of one step break."""
    moved = {(event.machine, event.trigger) for event in events}
    return [
        coupling
        for coupling in COUPLINGS
        if coupling.when in moved and not moved.intersection(coupling.then)
    ]


def couplings_with(machine: str, trigger: str) -> list[Coupling]:
    """Return the couplings that an event of this machine and trigger may answer."""
    return [coupling for coupling in COUPLINGS if (machine, trigger) in coupling.then]


def couplings_of(machine: str, trigger: str) -> list[Coupling]:
    """Return the couplings that an event of this machine and trigger begins."""
    return [coupling for coupling in COUPLINGS if coupling.when == (machine, trigger)]
