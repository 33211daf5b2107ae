"""How the events of a step are written: by codes of edges, or (schema version 1) in words.

Theory of operation. From schema version 2 on the events of a step are an array: the epoch and the
generation of the first event, then each event as ``[edge, entities, data?]``, or as
``[edge, entities, epoch, generation, data?]`` where these are not the first event's. ``edge`` is a
code of the file's table (``edges.py``), or the array ``[machine, trigger, source, dest]`` of an
edge without one. ``entities`` is one number, or an array of numbers and ranges (``ranges.py``).
``data`` is left out when it is empty and its keys are sorted. So one list of events has exactly one
text; no events are ``[]``. In version 1 an event is ``[machine, entities, trigger, source, dest,
epoch, generation, data?]``, its entities always an array.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from laneway.engine.errors import JournalWriteError
from laneway.journal.edges import Edge, Edges
from laneway.journal.native_text import BUILT, Texts
from laneway.journal.ranges import RUN_MIN, Item, compress, expand
from laneway.statemachines import Event
from laneway.statemachines.event import NO_DATA, make_event

UNFIT = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)
"""What a value or a text that does not fit makes `msgspec` and the value classes raise."""

REMEMBERED_MAX = 256
"""Groups of entities whose form is remembered."""

encode_json = msgspec.json.Encoder(order="deterministic").encode
"""Write JSON as a journal does, the keys of every object sorted."""


class _InWords(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    machine: str
    entities: tuple[Item, ...]
    trigger: str
    source: str
    dest: str
    epoch: int
    generation: int
    data: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class WordyEvents:
    """Events of schema version 1."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(tuple[_InWords, ...]).decode

    def encode(self, events: Sequence[Event]) -> bytes:
        """Return the text. Raises: JournalWriteError."""
        try:
            return encode_json([self._wire(event) for event in events])
        except UNFIT as error:
            raise _refused(error) from error

    def decode(self, text: bytes) -> tuple[Event, ...]:
        """Return the events. Raises: ValueError, what `msgspec` raises."""
        return tuple(map(_from_words, self._decode(text)))

    @staticmethod
    def _wire(event: Event) -> tuple[Any, ...]:
        entities = _some(event)
        wire = (
            event.machine,
            entities if len(entities) < RUN_MIN else compress(entities),
            event.trigger,
            event.source,
            event.dest,
            event.epoch,
            event.generation,
        )
        return (*wire, _plain(event.data)) if event.data else wire


def _from_words(wire: _InWords) -> Event:
    if not wire.entities:
        raise ValueError(f"{wire.machine} {wire.trigger} names no entity")
    return make_event(
        wire.machine,
        expand(wire.entities),
        wire.trigger,
        wire.source,
        wire.dest,
        wire.epoch,
        wire.generation,
        NO_DATA if wire.data is msgspec.UNSET else _frozen(wire.data),
    )


class _Coded(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    edge: int | tuple[str, str, str, str]
    entities: int | tuple[Item, ...]
    third: int | dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    generation: int | msgspec.UnsetType = msgspec.UNSET
    data: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class CodedEvents:
    """Events of schema version 2, by the codes of one file."""

    def __init__(self, edges: Edges, texts: Texts = BUILT) -> None:
        self.codes = _by_name(edges)
        self._usual = texts.events
        self._names = dict(edges.names)
        self._decode = msgspec.json.Decoder(list[int | _Coded]).decode
        self._entities: dict[tuple[int, ...], Any] = {}
        self._last: tuple[tuple[int, ...], Any] = ((), None)
        """The last of them: a batch has it several times in one step, and in the next."""

    def encode(self, events: Sequence[Event]) -> bytes:
        """Return the text. Raises: JournalWriteError."""
        usual = self._usual(self.codes, events)
        if usual is not None:
            return usual
        if not events:
            return b"[]"
        try:
            return encode_json(self._wire(events))
        except UNFIT as error:
            raise _refused(error) from error

    def _wire(self, events: Sequence[Event]) -> list[Any]:
        codes = self.codes
        group, form = self._last
        first = events[0]
        epoch, generation = first.epoch, first.generation
        wire: list[Any] = [epoch, generation]
        for event in events:
            try:
                edge: Any = codes[event.machine][event.trigger][event.source][event.dest]
            except KeyError:
                edge = (event.machine, event.trigger, event.source, event.dest)
            entities: Any = event.entities
            if len(entities) == 1:
                entities = entities[0]
            elif entities and entities == group:
                entities = form
            else:
                group, form = self._last = entities, self._compress(event)
                entities = form
            data = event.data
            if event.epoch != epoch or event.generation != generation:
                own = (edge, entities, event.epoch, event.generation)
                wire.append((*own, _plain(data)) if data else own)
            elif data:
                wire.append((edge, entities, data if type(data) is dict else dict(data)))
            else:
                wire.append((edge, entities))
        return wire

    def _compress(self, event: Event) -> Any:
        """Return the form of several entities, and remember it: the lanes of a batch come again."""
        entities = _some(event)
        written = self._entities.get(entities)
        if written is None:
            written = compress(entities)
            if len(self._entities) >= REMEMBERED_MAX:
                self._entities.clear()
            self._entities[entities] = written
        return written

    def decode(self, text: bytes) -> tuple[Event, ...]:
        """Return the events. Raises: ValueError, what `msgspec` raises."""
        wire = self._decode(text)
        if not wire:
            return ()
        epoch, generation = (*wire, None)[:2]
        coded = wire[2:]
        if type(epoch) is not int or type(generation) is not int or not coded:
            raise ValueError("they do not begin with the epoch and the generation of the first")
        return tuple([self._event(one, epoch, generation) for one in coded])

    def _event(self, wire: int | _Coded, epoch: int, generation: int) -> Event:
        if type(wire) is int:
            raise ValueError(f"{wire} stands where an event should")
        assert isinstance(wire, _Coded)
        machine, trigger, source, dest = self._edge(wire.edge)
        entities = wire.entities
        if type(entities) is not int and not entities:
            raise ValueError(f"{machine} {trigger} names no entity")
        data = third = wire.third
        if type(third) is int:
            if type(wire.generation) is not int:
                raise ValueError(f"{machine} {trigger} has an epoch without a generation")
            epoch, generation, data = third, wire.generation, wire.data
        elif wire.generation is not msgspec.UNSET:
            raise ValueError(f"{machine} {trigger} has something behind its data")
        return make_event(
            machine,
            (entities,) if type(entities) is int else expand(entities),  # type: ignore[arg-type]
            trigger,
            source,
            dest,
            epoch,
            generation,
            NO_DATA if data is msgspec.UNSET else _frozen(data),
        )

    def _edge(self, edge: int | Edge) -> Edge:
        if type(edge) is not int:
            return edge  # type: ignore[return-value]
        names = self._names.get(edge)
        if names is None:
            raise ValueError(f"no edge has the code {edge}")
        return names


_Codes = dict[str, dict[str, dict[str, dict[str, int]]]]


def _by_name(edges: Edges) -> _Codes:
    """Return the codes by machine, trigger, source and dest, one after the other.

    Why: a string knows its hash, so four looks take half the time of one by all four names.
    """
    codes: _Codes = {}
    for (machine, trigger, source, dest), code in edges.codes.items():
        codes.setdefault(machine, {}).setdefault(trigger, {}).setdefault(source, {})[dest] = code
    return codes


def _refused(error: Exception) -> JournalWriteError:
    return JournalWriteError(f"events cannot be stored: {error}")


def _some(event: Event) -> tuple[int, ...]:
    if not event.entities:
        raise ValueError(f"{event.machine} {event.trigger} names no entity")
    return event.entities


def _plain(data: Any) -> dict[str, Any]:
    return data if type(data) is dict else dict(data)


def _frozen(value: Any) -> Any:
    """Return a decoded JSON value with its arrays as tuples; most arrays are of numbers only."""
    if type(value) is list:
        if list in map(type, value) or dict in map(type, value):
            return tuple(map(_frozen, value))
        return tuple(value)
    if type(value) is dict:
        return {key: _frozen(item) for key, item in value.items()}
    return value
