"""The decision being made: events and effects so far, over the state they already changed.

``emit`` is how an event comes into being (decoding.py and cruise.py make those of the usual decode
job themselves). It reads source and destination from the
declared tables and evolves the state at once, so that the rest of the decision sees what was
decided so far ("read your own events") and so that deciding and replaying go through the same
function.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from laneway.engine.effects import Effect
from laneway.engine.errors import IllegalTransitionError
from laneway.engine.evolve import EVOLVERS, TABLES, check_source
from laneway.engine.inputs import Input
from laneway.engine.state import DEVICE, State, state_of
from laneway.statemachines import Event, entity_name
from laneway.statemachines.event import NO_DATA, make_event


class Decision(NamedTuple):
    """What follows from one input: facts to record, then things to ask of the world."""

    events: tuple[Event, ...]
    effects: tuple[Effect, ...]


@attrs.define
class Draft:
    """A decision under construction."""

    state: State
    taken: Input
    events: list[Event] = attrs.Factory(list)
    effects: list[Effect] = attrs.Factory(list)

    def emit(
        self,
        machine: str,
        entities: int | Sequence[int],
        trigger: str,
        *,
        generation: int = 0,
        epoch: int | None = None,
        data: Mapping[str, Any] = NO_DATA,
    ) -> None:
        """Record that entities of one machine moved by ``trigger`` and let the state follow.

        Raises: IllegalTransitionError when the table has no such edge, or the entities differ in
        state.
        """
        state = self.state
        numbers = (entities,) if isinstance(entities, int) else tuple(entities)
        source = state_of(state, machine, numbers[0])
        dest = TABLES[machine].get((source, trigger))
        if dest is None:
            raise IllegalTransitionError(machine, source, trigger, entity_name(machine, numbers[0]))
        if len(numbers) > 1:
            check_source(state, machine, numbers, source, trigger)
        if epoch is None:
            epoch = state.device.epoch
        event = make_event(machine, numbers, trigger, source, dest, epoch, generation, data)
        EVOLVERS[machine](state, event, self.taken)
        self.events.append(event)

    def emit_each(
        self,
        machine: str,
        entities: Sequence[int],
        trigger: str,
        *,
        generation: int = 0,
        data: Mapping[str, Any] = NO_DATA,
    ) -> None:
        """Emit one event for every source state among the entities, first seen first."""
        by_source: dict[str, list[int]] = {}
        for number in entities:
            by_source.setdefault(state_of(self.state, machine, number), []).append(number)
        for numbers in by_source.values():
            self.emit(machine, numbers, trigger, generation=generation, data=data)

    def device(self, trigger: str, *, data: Mapping[str, Any] = NO_DATA) -> None:
        """Move the device."""
        self.emit("device", DEVICE, trigger, data=data)

    def ask(self, effect: Effect) -> None:
        """Ask something of the world, once the step is durable."""
        self.effects.append(effect)

    def decision(self) -> Decision:
        """Return the finished decision."""
        return Decision(tuple(self.events), tuple(self.effects))
