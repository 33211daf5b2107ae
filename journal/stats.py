"""The sums of a journal: what happened how often, how requests ended, what went wrong.

The metrics among them are the fold that a running engine keeps, over the same steps (I8).
"""

from collections import Counter
from typing import Any

import attrs

from laneway.engine.inputs import (
    ArtifactRefused,
    Completed,
    ConfigureFailed,
    DeviceFaulted,
    EngineStarted,
    Input,
    JobStalled,
    KvApplyFailed,
    ReleaseFailed,
    RestoreFailed,
    SubmitDoubtful,
    SubmitRefused,
)
from laneway.engine.meter import Meter
from laneway.engine.ports import Step
from laneway.journal.port import ReadableJournal
from laneway.statemachines import MACHINES, Event

_FAULT_INPUTS: dict[type, str] = {
    ArtifactRefused: "artifact",
    ConfigureFailed: "configure",
    ReleaseFailed: "release",
    SubmitRefused: "submit_refused",
    SubmitDoubtful: "submit_doubtful",
    KvApplyFailed: "kv_apply",
    RestoreFailed: "restore",
}
"""Inputs that say of themselves that something failed, and the kind they count as."""


@attrs.define
class _Sums:
    steps: int = 0
    first_ns: int = 0
    last_ns: int = 0
    incarnations: int = 0
    inputs: Counter[str] = attrs.Factory(Counter)
    events: dict[str, Counter[str]] = attrs.Factory(dict)
    faults: Counter[str] = attrs.Factory(Counter)
    endings: Counter[str] = attrs.Factory(Counter)
    open_tokens: dict[int, int] = attrs.Factory(dict)
    owners: dict[int, tuple[int, ...]] = attrs.Factory(dict)
    tokens: int = 0
    meter: Meter = attrs.Factory(Meter)


def stats(journal: ReadableJournal) -> dict[str, Any]:
    """Return the sums of a journal as JSON values.

    ``events`` counts entity events by machine and trigger. ``requests`` counts by ending, with
    ``open`` for those without one. ``tokens`` are tokens that became part of an answer. ``faults``
    counts what the device or the host reported as failed, by kind. ``metrics`` are those of an
    engine after the last step.

    Raises: JournalFormatError.
    """
    sums = _Sums()
    for step in journal.read():
        _add(sums, step)
    requests = {state: sums.endings[state] for state in sorted(MACHINES["request"].final)}
    return {
        "journal_id": journal.journal_id,
        "journal_tokens": journal.tokens,
        "steps": sums.steps,
        "incarnations": sums.incarnations,
        "first_ns": sums.first_ns,
        "last_ns": sums.last_ns,
        "bytes": journal.size_bytes(),
        "inputs": dict(sorted(sums.inputs.items())),
        "events": {
            machine: dict(sorted(sums.events[machine].items()))
            for machine in MACHINES
            if machine in sums.events
        },
        "entity_events": sum(counter.total() for counter in sums.events.values()),
        "requests": requests | {"open": len(sums.open_tokens)},
        "tokens": sums.tokens + sum(sums.open_tokens.values()),
        "faults": dict(sorted(sums.faults.items())),
        "metrics": sums.meter.picture().to_json(),
    }


def _add(sums: _Sums, step: Step) -> None:
    if sums.steps == 0:
        sums.first_ns = step.at_ns
    sums.steps += 1
    sums.meter.take(step)  # counts what it cannot measure
    sums.last_ns = step.at_ns
    sums.incarnations += isinstance(step.taken, EngineStarted)
    sums.inputs[type(step.taken).__name__] += 1
    sums.faults.update(_fault_kinds(step.taken))
    for event in step.events:
        sums.events.setdefault(event.machine, Counter())[event.trigger] += len(event.entities)
        if event.machine == "request":
            _add_request(sums, event)
        elif event.machine == "job":
            _add_job(sums, event, step.taken)


def _fault_kinds(taken: Input) -> list[str]:
    if isinstance(taken, DeviceFaulted):
        return [taken.kind]
    if isinstance(taken, JobStalled):
        return [] if taken.stage == "suspect" else ["hang"]
    if isinstance(taken, Completed):
        return [row.fault for row in taken.rows if row.fault]
    kind = _FAULT_INPUTS.get(type(taken))
    return [] if kind is None else [kind]


def _add_request(sums: _Sums, event: Event) -> None:
    """Count endings; an ending says how many tokens its request got."""
    for number in event.entities:
        if event.trigger == "admit":
            sums.open_tokens[number] = 0
        elif event.dest in MACHINES["request"].final:
            sums.endings[event.dest] += 1
            counted = sums.open_tokens.pop(number, 0)
            sums.tokens += event.data.get("tokens", counted)


def _add_job(sums: _Sums, event: Event, taken: Input) -> None:
    """Count one token for each live request whose job is complete, until its ending tells."""
    for number in event.entities:
        if event.trigger == "plan":
            if event.data.get("origin") == "request":
                sums.owners[number] = tuple(event.data.get("owners", ()))
        elif event.dest in MACHINES["job"].final:
            owners = sums.owners.pop(number, ())
            believed = event.trigger == "complete" and not event.data.get("withheld")
            if not believed or not isinstance(taken, Completed):
                continue
            for owner, row in zip(owners, taken.rows, strict=False):
                if owner in sums.open_tokens and not row.fault:
                    sums.open_tokens[owner] += 1
