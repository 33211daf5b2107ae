"""An event is one fact: entities of one machine moved from source to dest by a trigger.

One event may cover several entities that moved alike (architecture: grouped events keep a batch-16
tick at 7 events instead of 37). Every other change of engine state is derived from events by
``engine/state.py``.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from laneway.statemachines.values import opened

NO_DATA: Mapping[str, Any] = MappingProxyType({})


@attrs.frozen(weakref_slot=False)
class Event:
    """One transition of one or more entities of a machine.

    ``epoch`` and ``generation`` are those it happened in; generation is 0 where none exists yet.
    ``data`` holds JSON values only and never prompt or output tokens, which stand in the step's
    input.
    """

    machine: str
    entities: tuple[int, ...]
    trigger: str
    source: str
    dest: str
    epoch: int
    generation: int
    data: Mapping[str, Any] = attrs.field(default=NO_DATA, hash=False)


_Opened = opened(Event)


def make_event(
    machine: str,
    entities: tuple[int, ...],
    trigger: str,
    source: str,
    dest: str,
    epoch: int,
    generation: int,
    data: Mapping[str, Any] = NO_DATA,
) -> Event:
    """Make an event, as ``Event`` does."""
    made = _Opened()
    made.machine = machine
    made.entities = entities
    made.trigger = trigger
    made.source = source
    made.dest = dest
    made.epoch = epoch
    made.generation = generation
    made.data = data
    made.__class__ = Event
    return made  # type: ignore[no-any-return]


def entity_name(machine: str, number: int) -> str:
    """Return the text form of an entity, such as ``lane/3``."""
    return f"{machine}/{number}"
