"""Look into a journal: the life of one entity, what was in flight, a choice of steps, the sums.

Everything here is read from steps alone and returned as plain values; how they look on a terminal
is for the command line.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import msgspec

from laneway.engine.ports import Step
from laneway.journal.entities import (
    Entity,
    concerns,
    entity_names,
    event_concerns,
    mentioned_by,
    named_by,
    parse_entity,
)
from laneway.journal.port import ReadableJournal
from laneway.statemachines import MACHINES, Event, entity_name
from laneway.statemachines.event import NO_DATA


@attrs.frozen(kw_only=True)
class Moment:
    """One line of an entity's life.

    ``trigger`` is "" where an input named the entity and nothing moved it (a late answer, a phase
    seen). ``since_ns`` is the time since the line before. ``input_entities`` are those the input
    names, ``related`` the other ones that the event's data mentions.
    """

    step: int
    at_ns: int
    since_ns: int
    input_kind: str
    input_entities: tuple[str, ...]
    trigger: str = ""
    source: str = ""
    dest: str = ""
    epoch: int = 0
    generation: int = 0
    related: tuple[str, ...] = ()
    data: Mapping[str, Any] = NO_DATA

    def to_json(self) -> dict[str, Any]:
        """Return the line as JSON values."""
        return {field.name: _json(getattr(self, field.name)) for field in attrs.fields(type(self))}


def timeline(journal: ReadableJournal, entity: str) -> Iterator[Moment]:
    """Return the life of one entity (``buffer/1``) in order.

    Raises: ConfigurationError for a text that is no entity; JournalFormatError.
    """
    return _moments(journal, parse_entity(entity))


def _moments(journal: ReadableJournal, entity: Entity) -> Iterator[Moment]:
    machine, number = entity
    before_ns: int | None = None
    for step in journal.read():
        moves = [e for e in step.events if e.machine == machine and number in e.entities]
        named = tuple(named_by(step.taken))
        if not moves and entity not in named:
            continue
        since_ns = 0 if before_ns is None else step.at_ns - before_ns
        before_ns = step.at_ns
        kind = type(step.taken).__name__
        if not moves:
            yield Moment(
                step=step.step,
                at_ns=step.at_ns,
                since_ns=since_ns,
                input_kind=kind,
                input_entities=entity_names(named),
            )
        for event in moves:
            mentioned = [other for other in mentioned_by(event) if other != entity]
            yield Moment(
                step=step.step,
                at_ns=step.at_ns,
                since_ns=since_ns,
                input_kind=kind,
                input_entities=entity_names(named),
                trigger=event.trigger,
                source=event.source,
                dest=event.dest,
                epoch=event.epoch,
                generation=event.generation,
                related=entity_names(mentioned),
                data=event.data,
            )
            since_ns = 0


@attrs.frozen(kw_only=True)
class InFlight:
    """A job that was decided and not yet terminal; ``ticket`` is 0 until the device gave one."""

    job: int
    state: str
    task: str
    origin: str
    model: int
    buffer: int
    lanes: tuple[int, ...]
    owners: tuple[int, ...]
    epoch: int
    generation: int
    planned_step: int
    planned_ns: int
    ticket: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return {key: _json(value) for key, value in attrs.asdict(self).items()}


def in_flight_at(journal: ReadableJournal, step: int) -> tuple[InFlight, ...]:
    """Return the jobs that were in flight after a step, in order of their numbers.

    Raises: JournalFormatError.
    """
    jobs: dict[int, InFlight] = {}
    for recorded in journal.read(last=step):
        reserved: list[int] = []
        for event in recorded.events:
            if (event.machine, event.trigger) == ("lane", "reserve"):
                reserved += event.entities
            elif event.machine == "job":
                _follow_jobs(jobs, recorded, event, tuple(reserved))
                reserved = []
    return tuple(jobs[number] for number in sorted(jobs))


def _follow_jobs(
    jobs: dict[int, InFlight], step: Step, event: Event, lanes: tuple[int, ...]
) -> None:
    """Take a job's event; ``lanes`` were reserved before it in its step."""
    data = event.data
    for number in event.entities:
        if event.trigger == "plan":
            jobs[number] = InFlight(
                job=number,
                state=event.dest,
                task=data.get("task", ""),
                origin=data.get("origin", ""),
                model=data.get("model", 0),
                buffer=data.get("buffer", 0),
                lanes=lanes,
                owners=tuple(data.get("owners", ())),
                epoch=event.epoch,
                generation=event.generation,
                planned_step=step.step,
                planned_ns=step.at_ns,
            )
        elif event.dest in MACHINES["job"].final:
            jobs.pop(number, None)
        elif number in jobs:
            ticket = data.get("ticket", jobs[number].ticket)
            jobs[number] = attrs.evolve(jobs[number], state=event.dest, ticket=ticket)


def show(
    journal: ReadableJournal,
    *,
    request: int | None = None,
    job: int | None = None,
    lane: int | None = None,
    buffer: int | None = None,
    model: int | None = None,
    device: int | None = None,
    trigger: str | None = None,
    input_kind: str | None = None,
    first: int = 1,
    last: int | None = None,
    from_ns: int = 0,
    until_ns: int | None = None,
) -> Iterator[Step]:
    """Return the steps that pass every filter given, in order.

    An entity passes if the step moved it, mentions it or has an input that names it; together with
    ``trigger``, if one event with that trigger does. Step and time ranges include their ends.

    Raises: JournalFormatError.
    """
    numbers = (request, job, lane, buffer, model, device)
    machines = ("request", "job", "lane", "buffer", "model", "device")
    entities = [
        (machine, number)
        for machine, number in zip(machines, numbers, strict=True)
        if number is not None
    ]
    for step in journal.read(first=first, last=last):
        if until_ns is not None and step.at_ns > until_ns:
            return
        if step.at_ns < from_ns or input_kind not in (None, type(step.taken).__name__):
            continue
        if trigger is None:
            passes = all(concerns(step, entity) for entity in entities)
        else:
            passes = any(
                event.trigger == trigger
                and all(event_concerns(event, entity) for entity in entities)
                for event in step.events
            )
        if passes:
            yield step


def step_record(step: Step) -> dict[str, Any]:
    """Return a step as JSON values: input and events with the names of their fields."""
    return {
        "step": step.step,
        "at_ns": step.at_ns,
        "input_kind": type(step.taken).__name__,
        "input": _json(attrs.asdict(step.taken)),
        "events": [_event_record(event) for event in step.events],
    }


def _event_record(event: Event) -> dict[str, Any]:
    return {
        "machine": event.machine,
        "entities": [entity_name(event.machine, number) for number in event.entities],
        "trigger": event.trigger,
        "source": event.source,
        "dest": event.dest,
        "epoch": event.epoch,
        "generation": event.generation,
        "data": _json(event.data),
    }


def _json(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _json(msgspec.structs.asdict(value))
    if isinstance(value, Mapping):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return value
