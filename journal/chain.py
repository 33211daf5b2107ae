"""The chain: each row's hash covers the row before it, so a changed or missing row is found.

Theory of operation. ``chain`` of a row is SHA-256 over the previous row's chain (32 bytes) and the
row's stored values in column order: step, at_ns, input_kind, input, events. A value is one letter
for its storage class, its length in bytes as an unsigned 64-bit integer, and the bytes: ``I`` for
an integer (signed 64 bits), ``T`` for text (UTF-8); all integers big-endian. Before the first row
stands the hash of what never changes: a fixed label, then key and value of every row of ``meta`` in
order of the key, then (from schema version 2 on) every row of ``edge`` in order of the code, its
columns in order, all written the same way. Nothing is parsed to check a chain. It proves that what
is there is what was written, up to the last row; it cannot know of rows cut off at the end.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from laneway.engine.errors import JournalFormatError
from laneway.journal.native_text import BUILT
from laneway.statemachines.values import of_tuple

CHAIN_BYTES = 32
ROWS_AT_ONCE = 1536
"""Rows that are looked at together."""

STORAGE_CLASSES = b"integer integer text text text blob"
"""What ``typeof`` says of a row's six columns, in order."""

_LABEL = b"laneway journal"
_NUMBERS = struct.Struct(">9sq9sq")
_NUMBER = struct.pack(">cQ", b"I", 8)
_sha256 = hashlib.sha256
_HEAD = struct.Struct(">cQ")
_INTEGER = struct.Struct(">cQq")
_TEXTS_KNOWN = 2048
_TEXTS = tuple(_HEAD.pack(b"T", length) for length in range(_TEXTS_KNOWN))
_COLUMNS = ("step", "at_ns", "input_kind", "input", "events", "chain")


class RawRow(NamedTuple):
    """One row as it is stored, before anything is believed of it: text and blobs are bytes."""

    step: object
    at_ns: object
    input_kind: object
    input: object
    events: object
    chain: object
    storage_classes: object = None
    """What ``typeof`` says of them, None where they are as they should be."""


Raw = tuple[object, object, object, object, object, object, object]
"""The seven of a `RawRow` as a plain tuple."""

Block = Sequence[Raw]
"""Rows that were read together."""

FollowedRow = tuple[int, int, bytes, bytes, bytes]
"""A row that follows the chain: step, at_ns, input_kind, input, events."""


Columns = tuple[tuple[Any, ...], ...]
"""Rows by their columns, as ``zip(*rows)`` gives them: unproven."""


class Head(NamedTuple):
    """The end of a journal: its last step and instant (0 if there is none) and the chain there."""

    step: int
    at_ns: int
    chain: bytes


make_head: Callable[[tuple[int, int, bytes]], Head] = of_tuple(Head)
"""Make a head of its fields, as ``Head`` does."""


def meta_chain(
    rows: Iterable[tuple[str, str]], edges: Iterable[tuple[int, str, str, str, str]] = ()
) -> bytes:
    """Return the chain that the first row continues."""
    parts = [_LABEL]
    for key, value in sorted(rows):
        for text in (key.encode(), value.encode()):
            parts += (_HEAD.pack(b"T", len(text)), text)
    for code, *names in edges:
        parts.append(_INTEGER.pack(b"I", 8, code))
        for text in map(str.encode, names):
            parts += (_HEAD.pack(b"T", len(text)), text)
    return hashlib.sha256(b"".join(parts)).digest()


def row_chain(
    previous: bytes, step: int, at_ns: int, kind: bytes, taken: bytes, events: bytes
) -> bytes:
    """Return the chain of a row."""
    usual = BUILT.chain(previous, step, at_ns, kind, taken, events)
    return plain_chain(previous, step, at_ns, kind, taken, events) if usual is None else usual


def plain_chain(
    previous: bytes, step: int, at_ns: int, kind: bytes, taken: bytes, events: bytes
) -> bytes:
    """Return the chain of a row, by Python alone."""
    numbers = _NUMBERS.pack(_NUMBER, step, _NUMBER, at_ns)
    try:
        own, of_taken, of_events = _TEXTS[len(kind)], _TEXTS[len(taken)], _TEXTS[len(events)]
    except IndexError:  # one is long, as an input with a prompt is
        own, of_taken, of_events = (_HEAD.pack(b"T", len(text)) for text in (kind, taken, events))
    parts = (previous, numbers, own, kind, of_taken, taken, of_events, events)
    return _sha256(b"".join(parts)).digest()


def are_typed(columns: Columns) -> bool:
    """Return whether all values of rows are of the right storage classes and types."""
    steps, instants, kinds, taken, events, chains, storage_classes = columns
    numbers = {*map(type, steps), *map(type, instants)}
    texts = {*map(type, kinds), *map(type, taken), *map(type, events), *map(type, chains)}
    return not any(storage_classes) and numbers == {int} and texts == {bytes}


def follow_all(head: Head, columns: Columns) -> Head | None:
    """Return the head after many rows, given by columns that are typed, if they follow ``head``.

    None where one does not, or may not: ``follow`` tells which, and what is wrong with it.
    """
    steps, instants, kinds, taken, events, chains, _ = columns
    if (
        steps != tuple(range(head.step + 1, head.step + 1 + len(steps)))
        or tuple(sorted(instants)) != instants
        or instants[0] < head.at_ns
    ):
        return None
    if max(map(len, (*kinds, *taken, *events))) >= _TEXTS_KNOWN:
        before = (head.chain, *chains[:-1])
        found = list(map(row_chain, before, steps, instants, kinds, taken, events))
    else:
        found = _chains(head.chain, columns)
    return make_head((steps[-1], instants[-1], chains[-1])) if found == [*chains] else None


def _chains(previous: bytes, columns: Columns) -> list[bytes]:
    """Return what ``row_chain`` does for each row of texts of known lengths, as in one call."""
    steps, instants, kinds, taken, events, chains, _ = columns
    one, told = repeat(_NUMBER), _TEXTS.__getitem__
    numbers = map(_NUMBERS.pack, one, steps, one, instants)
    of_kinds, of_taken, of_events = (map(told, map(len, texts)) for texts in (kinds, taken, events))
    before = (previous, *chains[:-1])
    parts = zip(before, numbers, of_kinds, kinds, of_taken, taken, of_events, events, strict=True)
    return [found.digest() for found in map(_sha256, map(b"".join, parts))]


def heads(head: Head, rows: Block) -> Iterator[Head]:
    """Return where a journal stands after a block: at the end of it, or after each row up to a bad.

    Raises: JournalFormatError naming the step.
    """
    columns = tuple(zip(*rows, strict=True))
    after = follow_all(head, columns) if are_typed(columns) else None
    if after is not None:
        yield after
        return
    for row in rows:
        head, *_ = follow(head, row)
        yield head


def followed(head: Head, blocks: Iterable[Block]) -> Iterator[FollowedRow]:
    """Return the rows of blocks that follow ``head``, each checked against the chain.

    Raises: JournalFormatError naming the step and what is wrong with it.
    """
    for rows in blocks:
        columns = tuple(zip(*rows, strict=True))
        after = follow_all(head, columns) if are_typed(columns) else None
        if after is None:
            for row in rows:
                head, kind, taken, events = follow(head, row)
                yield head.step, head.at_ns, kind, taken, events
        else:
            head = after
            yield from zip(*columns[:5], strict=True)


def follow(head: Head, row: Raw) -> tuple[Head, bytes, bytes, bytes]:
    """Check that a row continues the chain; return the new head and kind, input and events.

    Raises: JournalFormatError naming the step and what is wrong with it.
    """
    step, at_ns, kind, taken, events, chain, storage_classes = row
    if not (
        storage_classes is None
        and isinstance(step, int)
        and isinstance(at_ns, int)
        and isinstance(kind, bytes)
        and isinstance(taken, bytes)
        and isinstance(events, bytes)
        and isinstance(chain, bytes)
    ):
        raise JournalFormatError(f"step {step!r}: {_wrong_class(row)}")
    if step != head.step + 1:
        raise JournalFormatError(_out_of_order(head, step))
    if at_ns < head.at_ns:
        raise JournalFormatError(f"step {step}: time falls from {head.at_ns} to {at_ns} ns")
    if row_chain(head.chain, step, at_ns, kind, taken, events) != chain:
        what = "meta, edge or this row" if head.step == 0 else "the row"
        raise JournalFormatError(
            f"step {step}: {what} is not what was written (the chain does not match)"
        )
    return make_head((step, at_ns, chain)), kind, taken, events


def _out_of_order(head: Head, step: int) -> str:
    expected = head.step + 1
    if step <= head.step:
        return f"step {step}: stands after step {head.step}"
    if step == expected + 1:
        return f"step {expected} is missing"
    return f"steps {expected} to {step - 1} are missing"


def _wrong_class(row: Raw) -> str:
    if isinstance(row[1], float):
        return "column at_ns is real, not integer"
    found = row[-1]
    names = found.decode("ascii", "replace").split() if isinstance(found, bytes) else []
    for column, expected, name in zip(
        _COLUMNS, STORAGE_CLASSES.decode().split(), names, strict=False
    ):
        if name != expected:
            return f"column {column} is {name}, not {expected}"
    return "the storage classes of its columns are not those of a journal"
