"""Which entities a step is about: what moved, what its events mention, what its input names.

An entity is (machine, number); its text form is such as ``lane/3``.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from laneway.engine.errors import ConfigurationError
from laneway.engine.inputs import (
    DeviceClosed,
    DeviceFaulted,
    EngineStarted,
    HealthProbed,
    Input,
)
from laneway.engine.ports import Step
from laneway.statemachines import MACHINES, Event, entity_name

Entity = tuple[str, int]

DEVICE: Entity = ("device", 0)
_ABOUT_DEVICE = (EngineStarted, DeviceFaulted, HealthProbed, DeviceClosed)
_SINGLE = ("request", "job", "buffer", "lane", "model")


def parse_entity(text: str) -> Entity:
    """Return the entity behind its text form.

    Raises: ConfigurationError for anything but MACHINE/NUMBER.
    """
    machine, slash, number = text.partition("/")
    if machine not in MACHINES or not slash or not (number.isascii() and number.isdigit()):
        raise ConfigurationError(
            f"{text!r} is not an entity: write {', '.join(f'{name}/N' for name in MACHINES)}"
        )
    return machine, int(number)


def entity_names(entities: Iterable[Entity]) -> tuple[str, ...]:
    """Return the text forms in order, each once."""
    return tuple(dict.fromkeys(entity_name(*entity) for entity in entities))


def named_by(taken: Input) -> Iterator[Entity]:
    """Return the entities that an input names in its fields."""
    for machine in _SINGLE:
        number = getattr(taken, machine, None)
        if isinstance(number, int):
            yield machine, number
    for number in getattr(taken, "lanes", ()):
        yield "lane", number
    if isinstance(taken, _ABOUT_DEVICE):
        yield DEVICE


def moved_by(event: Event) -> Iterator[Entity]:
    """Return the entities that an event moved."""
    for number in event.entities:
        yield event.machine, number


def mentioned_by(event: Event) -> Iterator[Entity]:
    """Return the entities that an event's data mentions.

    ``job``, ``buffer``, ``lane``, ``model`` and ``request`` are numbers; ``owners`` are requests
    when ``origin`` says so.
    """
    data = event.data
    for machine in _SINGLE:
        number = data.get(machine)
        if isinstance(number, int):
            yield machine, number
    if data.get("origin") == "request":
        for owner in _sequence(data.get("owners")):
            yield "request", owner


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def concerns(step: Step, entity: Entity) -> bool:
    """Return whether a step moved, mentions or names an entity."""
    if entity in named_by(step.taken):
        return True
    return any(event_concerns(event, entity) for event in step.events)


def event_concerns(event: Event, entity: Entity) -> bool:
    """Return whether an event moved or mentions an entity."""
    machine, number = entity
    if event.machine == machine and number in event.entities:
        return True
    return bool(event.data) and entity in mentioned_by(event)
