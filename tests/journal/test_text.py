"""The texts of usual rows in C: byte for byte those of Python, and None for whatever is unusual."""

import hashlib
import importlib
import importlib.util
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.journal_steps import completed, run_core, story
from support.text_library import load

from laneway.adapters.bench_ticks import life
from laneway.engine import inputs
from laneway.engine.errors import JournalWriteError
from laneway.engine.inputs import BufferRestored, Completed, JobTimes, RowResult, SubmitAccepted
from laneway.engine.ports import Step
from laneway.journal import MemoryJournal, native_text
from laneway.journal.chain import Head, plain_chain, row_chain
from laneway.journal.codec import KINDS, Codec
from laneway.journal.edges import DECLARED
from laneway.journal.native_text import BUILT, PYTHON, Texts
from laneway.journal.sealing import Row, seal
from laneway.statemachines import Event
from laneway.statemachines.event import NO_DATA

EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True)
TEXT_MAX = 16_384
"""Bytes of the longest text that C writes."""

INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1
HEAD = Head(6, 40, bytes(range(32)))
EDGE = ("lane", "commit", "reserved", "ready")
assert EDGE in DECLARED.codes


class OwnInt(int):
    """Somebody's numbers."""


class OwnStr(str):
    """Somebody's strings."""

    __slots__ = ()


class OwnBytes(bytes):
    """Somebody's bytes."""

    __slots__ = ()


class OwnTuple(tuple[Any, ...]):
    """Somebody's tuples."""

    __slots__ = ()


class OwnEvent(Event):
    """Somebody's events."""


def of_edge(
    edge: tuple[str, str, str, str], numbers: Any, epoch: Any, generation: Any, data: Any
) -> Event:
    """Return what moved along an edge."""
    machine, trigger, source, dest = edge
    return Event(machine, tuple(numbers), trigger, source, dest, epoch, generation, data)


def lanes(*numbers: Any, epoch: Any = 1, generation: Any = 2, data: Any = NO_DATA) -> Event:
    """Return lanes that commit."""
    return of_edge(EDGE, numbers, epoch, generation, data)


def sealed(texts: Texts, taken: Any, events: Any, at_ns: Any = 50) -> tuple[list[Row], Head] | str:
    """Return the row of a step and the head after it, or what is said against the step.

    Each time by a codec that remembers nothing.
    """
    step = Step(step=HEAD.step + 1, at_ns=at_ns, taken=taken, events=events)
    try:
        return seal(Codec(texts=texts), HEAD, [step])
    except (JournalWriteError, AttributeError) as error:
        return str(error)


def usual_row(taken: Any, events: Any = (), at_ns: Any = 50) -> native_text.UsualRow | None:
    """Return what C gives for a step behind HEAD, hashed by Python if the processor cannot."""
    row = Codec().usual_row(HEAD.chain, HEAD.step + 1, at_ns, taken, events)
    if row is None or row[3] is not None:
        return row
    texts = tuple(text.encode() for text in row[:3])
    return *row[:3], plain_chain(HEAD.chain, HEAD.step + 1, at_ns, *texts)


def written(taken: Any, events: Any = ()) -> tuple[str, str, str, bytes]:
    """Return the same, as Python writes it."""
    codec = Codec(texts=PYTHON)
    kind, text = codec.encode_input(taken)
    told = codec.encode_events(events)
    chain = plain_chain(HEAD.chain, HEAD.step + 1, 50, kind.encode(), text, told)
    return kind, text.decode(), told.decode(), chain


HASHES = bool(BUILT is not PYTHON and importlib.import_module(native_text._NAME).sha256(b""))
"""Whether the processor has instructions for it."""

DONE = completed(17, (101, 102))
ONE = (lanes(4),)


def test_it_is_built() -> None:
    assert BUILT is not PYTHON, "install laneway again, with a C compiler"


# ---------------------------------------------------------------------------- usual rows


def test_the_row_of_a_completion() -> None:
    """Every byte by hand; the layout of what is hashed stands in chain.py."""
    events = (lanes(1, 2, 3), lanes(7, generation=3, data={"b": (1, None), "a": "x"}))
    row = usual_row(DONE, events, at_ns=50)
    code = DECLARED.codes[EDGE]
    taken = b'[1,17,917,1,2,7,"applied",1,[[101,102]],[5,null,null,null,null,null,null,null,85,0]]'
    told = b'[1,2,[%d,[[1,3]]],[%d,7,1,3,{"a":"x","b":[1,null]}]]' % (code, code)
    parts = [HEAD.chain, struct.pack(">cQqcQq", b"I", 8, 7, b"I", 8, 50)]
    for text in (b"Completed", taken, told):
        parts += (struct.pack(">cQ", b"T", len(text)), text)
    chain = hashlib.sha256(b"".join(parts)).digest()
    assert row == ("Completed", taken.decode(), told.decode(), chain)


def test_the_rows_of_inputs_of_two_numbers() -> None:
    accepted = usual_row(SubmitAccepted(job=17, ticket=-917), ONE)
    restored = usual_row(BufferRestored(buffer=3, job=17), ONE)
    assert accepted is not None and accepted[:2] == ("SubmitAccepted", "[1,17,-917]")
    assert restored is not None and restored[:2] == ("BufferRestored", "[1,3,17]")


NUMBERS = st.integers(INT_MIN, INT_MAX) | st.integers(-3, 130) | st.sampled_from([INT_MIN, INT_MAX])
DIGESTS = NUMBERS | st.integers(0, (1 << 64) - 1) | st.just((1 << 64) - 1)
ASCII = st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters='"\\'))
INSTANTS = st.lists(st.just(0) | st.integers(0, 40), min_size=9, max_size=9)
SORTED = st.lists(st.integers(1, INT_MAX), min_size=9, max_size=9).map(sorted)
TIMES = st.builds(
    lambda instants, last: JobTimes(
        **dict(zip([f.name for f in attrs.fields(JobTimes)], (*instants, last), strict=True))
    ),
    INSTANTS | SORTED,
    NUMBERS,
)
USUAL_INPUTS = (
    st.builds(
        Completed,
        **{
            name: NUMBERS
            for name in ("job", "ticket", "epoch", "generation", "flags", "engine_slot")
        },
        kv_effect=ASCII,
        rows=st.lists(st.builds(RowResult, token=NUMBERS), max_size=20).map(tuple)
        | st.lists(st.builds(RowResult, token=NUMBERS, kv_digest=DIGESTS), max_size=20).map(tuple),
        times=TIMES,
    )
    | st.builds(SubmitAccepted, job=NUMBERS, ticket=NUMBERS)
    | st.builds(BufferRestored, buffer=NUMBERS, job=NUMBERS)
)
ENTITIES = st.lists(NUMBERS, min_size=1, max_size=6) | st.lists(
    st.integers(0, 9), min_size=1, max_size=12
)
RUNS = st.builds(lambda first, count: range(first, first + count), NUMBERS, st.integers(1, 5))
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | ASCII,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(ASCII, inner, max_size=4)
    ),
    max_leaves=8,
).filter(lambda value: depth_of(value) <= 7)
USUAL_EVENTS = st.lists(
    st.builds(
        of_edge,
        st.sampled_from(sorted(DECLARED.codes)),
        ENTITIES | RUNS,
        st.integers(0, 1) | NUMBERS,
        st.integers(0, 1) | NUMBERS,
        st.just(NO_DATA) | st.dictionaries(ASCII, VALUES, max_size=5),
    ),
    max_size=5,
).map(tuple)


def depth_of(value: Any) -> int:
    """Return how many arrays and objects stand inside each other."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return 1 + max(map(depth_of, value), default=0)
    return 0


def fits(numbers: tuple[int, ...]) -> bool:
    """Return whether all are of 64 bits."""
    return all(INT_MIN <= number <= INT_MAX for number in numbers)


@EXAMPLES
@given(USUAL_INPUTS, USUAL_EVENTS)
def test_a_usual_row_is_what_python_writes(taken: Any, events: tuple[Event, ...]) -> None:
    usual = all(fits(event.entities) for event in events)  # else a run goes beyond
    assert usual_row(taken, events) == (written(taken, events) if usual else None)
    assert sealed(BUILT, taken, events) == sealed(PYTHON, taken, events)


def test_the_rows_of_a_life() -> None:
    """Every row of decoding is usual; all are the same by both."""
    steps = list(islice(life(), 400))
    origin = MemoryJournal().origin()
    assert seal(Codec(), origin, steps) == seal(Codec(texts=PYTHON), origin, steps)
    decoding = [s for s in steps[200:] if type(s.taken).__name__ in BUILT.kinds]
    assert len(decoding) == 200
    codec = Codec()
    for step in decoding:
        row = codec.usual_row(HEAD.chain, step.step, step.at_ns, step.taken, step.events)
        assert row is not None and row[0] == type(step.taken).__name__


@pytest.mark.parametrize("tokens", ["full", "digest"])
def test_the_rows_of_whole_incarnations(tokens: str) -> None:
    """Loads, cancels, faults and closes: most of it unusual."""
    journal = MemoryJournal(tokens=tokens)
    run_core(journal)
    run_core(journal, fault=True, wall_clock_ns=1_800_000_000_000_000_000)
    origin = journal.origin()
    for steps in (list(journal.read()), story(tokens)):
        plain = Codec(tokens, texts=PYTHON)
        assert seal(Codec(tokens), origin, steps) == seal(plain, origin, steps)


def test_a_digest_and_a_journal_in_words_are_left_to_python() -> None:
    for codec in (Codec("digest"), Codec(edges=None)):
        assert codec.usual_row(HEAD.chain, 7, 50, DONE, ONE) is None


def test_kinds_have_the_versions_of_the_table() -> None:
    assert set(BUILT.kinds) <= set(KINDS)
    versions = tuple(KINDS[kind][0] + 40 + n for n, kind in enumerate(BUILT.kinds))
    texts = [
        BUILT.row(versions, {}, b"", 1, 1, taken, ())
        for taken in (DONE, SubmitAccepted(job=1, ticket=2), BufferRestored(buffer=1, job=2))
    ]
    assert [row[1].partition(",")[0] for row in texts if row] == ["[41", "[42", "[43"]


# ---------------------------------------------------------------------------- unusual inputs


class LikeRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is as a row is, but none."""

    token: int
    stop_hit: bool = False
    fault: str = ""
    verdict: str = ""
    kv_digest: int | None = None
    logprobs: tuple[Any, ...] = ()


UNSET = Completed.__new__(Completed)
ODD_NUMBERS: list[Any] = [
    True,
    None,
    1.0,
    "1",
    OwnInt(1),
    np.int64(1),
    1 << 63,
    INT_MIN - 1,
    1 << 64,
    (1,),
]
ODD_STRINGS: list[Any] = [
    "é",
    'a"b',
    "a\\b",
    "a\n",
    "\x00",
    "\x7f",
    "\ud800",
    "😀",
    OwnStr("a"),
    b"a",
    None,
    7,
]
ODD_ROWS: list[Any] = [
    [RowResult(token=1)],
    OwnTuple((RowResult(token=1),)),
    (RowResult(token=1, stop_hit=True),),
    (RowResult(token=1), RowResult(token=2, fault="numeric")),
    (RowResult(token=1, verdict="equal"),),
    (RowResult(token=1, kv_digest=5), RowResult(token=2)),
    (RowResult(token=1), RowResult(token=2, kv_digest=5)),
    (RowResult(token=1, kv_digest=5, verdict="equal"),),
    *[
        (RowResult(token=1, kv_digest=5), RowResult(token=2, kv_digest=odd))  # type: ignore[arg-type]
        for odd in (True, 1.0, "1", OwnInt(1), np.int64(1), 1 << 64, INT_MIN - 1)
    ],
    (RowResult(token=1, logprobs=((1, -0.5),)),),
    (RowResult(token=1, stop_hit=0),),  # type: ignore[arg-type]
    (LikeRow(token=1),),
    (7,),
    (None,),
    None,
    7,
    *[(RowResult(token=1), RowResult(token=odd)) for odd in ODD_NUMBERS],
]
ODD_TIMES: list[Any] = [
    None,
    (5, 0, 0),
    DONE,
    JobTimes.__new__(JobTimes),
    JobTimes(submit_ns=INT_MIN, accept_ns=INT_MAX),
    *[JobTimes(exec_begin_ns=odd) for odd in ODD_NUMBERS],
    *[JobTimes(postprocess_ns=odd) for odd in ODD_NUMBERS],
]
ODD_INPUTS: list[Any] = [
    *[attrs.evolve(DONE, job=odd) for odd in ODD_NUMBERS],
    *[attrs.evolve(DONE, engine_slot=odd) for odd in ODD_NUMBERS],
    *[attrs.evolve(DONE, kv_effect=odd) for odd in ODD_STRINGS],
    *[attrs.evolve(DONE, rows=odd) for odd in ODD_ROWS],
    *[attrs.evolve(DONE, times=odd) for odd in ODD_TIMES],
    *[SubmitAccepted(job=1, ticket=odd) for odd in ODD_NUMBERS],
    *[BufferRestored(buffer=odd, job=1) for odd in ODD_NUMBERS],
    attrs.evolve(DONE, rows=tuple(RowResult(token=100_000 + n) for n in range(3000))),
    attrs.evolve(DONE, kv_effect="a" * TEXT_MAX),
    UNSET,
    BufferRestored.__new__(BufferRestored),
    inputs.TimePassed(),
    Completed,
    object(),
    None,
]


@pytest.mark.parametrize("taken", ODD_INPUTS)
def test_an_unusual_input_is_left_to_python(taken: Any) -> None:
    assert usual_row(taken, ONE) is None
    assert sealed(BUILT, taken, ONE) == sealed(PYTHON, taken, ONE)


@pytest.mark.parametrize("at_ns", [True, OwnInt(50), 1 << 63])
def test_an_unusual_instant_is_left_to_python(at_ns: Any) -> None:
    assert usual_row(DONE, ONE, at_ns=at_ns) is None
    assert sealed(BUILT, DONE, ONE, at_ns) == sealed(PYTHON, DONE, ONE, at_ns)


# ---------------------------------------------------------------------------- unusual events


def nested(levels: int) -> Any:
    """Return arrays inside each other."""
    return (nested(levels - 1),) if levels else 1


def endless() -> Any:
    """Return a list that holds itself."""
    itself: list[Any] = []
    itself.append(itself)
    return itself


ODD_VALUES: list[Any] = [
    *[odd for odd in ODD_NUMBERS if odd is not True and odd is not None and odd not in ("1", (1,))],
    *[odd for odd in ODD_STRINGS if odd is not None and odd != 7],
    0.5,
    OwnTuple((1,)),
    OrderedDict(a=1),
    MappingProxyType({"a": 1}),
    {1},
    object(),
    nested(8),
    {"a": {"b": {"c": nested(5)}}},
    [1, (2, {"a": 0.5})],
    {1: 2},
    {"é": 1},
    {'"': 1},
    {OwnStr("a"): 1},
    {f"k{n}": n for n in range(17)},
    endless(),
    "a" * TEXT_MAX,
    tuple(range(10_000)),
]
ODD_NAMES: list[Any] = ["odd", OwnStr("lane"), OwnStr("commit"), None, 7, []]
ODD_EVENTS: list[Any] = [
    list(ONE),
    OwnTuple(ONE),
    (OwnEvent(*EDGE[:1], (4,), *EDGE[1:], 1, 2),),
    (Event.__new__(Event),),
    *[(*ONE, odd) for odd in (OwnEvent(*EDGE[:1], (4,), *EDGE[1:], 1, 2), DONE, None, 7)],
    (lanes(),),
    (*ONE, lanes()),
    (lanes(INT_MAX - 1, INT_MAX, INT_MAX + 1),),
    (Event("lane", [4], *EDGE[1:], 1, 2),),  # type: ignore[arg-type]
    (Event("lane", OwnTuple((4,)), *EDGE[1:], 1, 2),),
    (Event("lane", 4, *EDGE[1:], 1, 2),),  # type: ignore[arg-type]
    (Event("lane", None, *EDGE[1:], 1, 2),),  # type: ignore[arg-type]
    *[(Event(odd, (4,), *EDGE[1:], 1, 2),) for odd in ODD_NAMES],
    *[(Event("lane", (4,), odd, *EDGE[2:], 1, 2),) for odd in ODD_NAMES],
    *[(Event("lane", (4,), "commit", odd, "ready", 1, 2),) for odd in ("odd", "é", "\ud800")],
    *[(Event("lane", (4,), "commit", "reserved", odd, 1, 2),) for odd in ("reserved", 'o"dd')],
    *[(lanes(odd),) for odd in ODD_NUMBERS],
    *[(lanes(1, 2, odd),) for odd in ODD_NUMBERS],
    *[(lanes(odd, 2, 3, 4),) for odd in ODD_NUMBERS],
    *[(lanes(4, epoch=odd),) for odd in ODD_NUMBERS],
    *[(lanes(4, generation=odd),) for odd in ODD_NUMBERS],
    *[(*ONE, lanes(4, generation=odd)) for odd in ODD_NUMBERS],
    *[(*ONE, lanes(5, data={"a": 1, "value": odd})) for odd in ODD_VALUES],
    (lanes(4, data=MappingProxyType({})),),
    (lanes(4, data=MappingProxyType({"a": 1})),),
    (lanes(4, data=OrderedDict()),),
    (lanes(4, data=OrderedDict(b=1, a=2)),),
    *[(lanes(4, data=odd),) for odd in (None, (), 0, [1], 7, "data")],
    tuple(lanes(n, n + 2) for n in range(2000)),
    (lanes(*range(0, 20_000, 2)),),
]


@pytest.mark.parametrize("events", ODD_EVENTS)
def test_unusual_events_are_left_to_python(events: Any) -> None:
    codes = Codec()._events.codes  # type: ignore[union-attr]
    assert BUILT.events(codes, events) is None
    assert usual_row(DONE, events) is None
    assert sealed(BUILT, DONE, events) == sealed(PYTHON, DONE, events)


@pytest.mark.parametrize("events", [None, 7, object(), "events"])
def test_what_are_no_events_is_left_to_python(events: Any) -> None:
    assert BUILT.events({}, events) is None


@pytest.mark.parametrize(
    "codes",
    [
        None,
        {},
        MappingProxyType({}),
        {"lane": None},
        {"lane": {"commit": 5}},
        {"lane": {"commit": {"reserved": {"ready": "5"}}}},
        {"lane": {"commit": {"reserved": {"ready": None}}}},
    ],
)
def test_a_table_without_the_code_is_left_to_python(codes: Any) -> None:
    assert BUILT.events(codes, ONE) is None
    assert BUILT.row((1, 1, 1), codes, b"", 1, 1, DONE, ONE) is None


# ---------------------------------------------------------------------------- bounds


def test_the_longest_text() -> None:
    """As many bytes as there may be, and one more."""
    codes = Codec()._events.codes  # type: ignore[union-attr]
    bare = Codec(texts=PYTHON).encode_events((lanes(4, data={"a": ""}),))
    for spare, fits_in in ((TEXT_MAX - len(bare), True), (TEXT_MAX - len(bare) + 1, False)):
        events = (lanes(4, data={"a": "x" * spare}),)
        text = BUILT.events(codes, events)
        assert (text is not None) == fits_in
        assert text is None or text == Codec(texts=PYTHON).encode_events(events)


@given(st.integers(TEXT_MAX - 60, TEXT_MAX + 20))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_text_that_ends_anywhere_at_its_bound(length: int) -> None:
    """Whatever would be the first byte too many: of a number, a bracket, a word, a key."""
    long = "x" * (length - 40)
    codes = Codec()._events.codes  # type: ignore[union-attr]
    for data in ({"a": long, "b": (True, None, -7)}, {"a": long, "bb": {"c": "d"}, "e": [False]}):
        events = (lanes(4, data=data), lanes(5, 6, 7, 9, epoch=12, generation=13))
        text = BUILT.events(codes, events)
        expected = Codec(texts=PYTHON).encode_events(events)
        assert text == (expected if len(expected) <= TEXT_MAX else None)
    taken = attrs.evolve(DONE, kv_effect=long, times=JobTimes(submit_ns=9, accept_ns=4))
    row = usual_row(taken)
    assert row == (written(taken) if len(written(taken)[1]) <= TEXT_MAX else None)


def test_the_most_keys_and_the_deepest_data() -> None:
    for data in (
        {f"k{n % 4}{n}": n for n in range(16)},
        {"a": nested(7)},
        {"a": {"b": {"c": nested(5)}}},
    ):
        assert usual_row(DONE, (lanes(4, data=data),)) == written(DONE, (lanes(4, data=data),))


# ---------------------------------------------------------------------------- the chain


def by_hand(
    previous: bytes, step: int, at_ns: int, kind: bytes, taken: bytes, events: bytes
) -> bytes:
    """Return the hash of the bytes that chain.py describes."""
    found = previous + b"I" + struct.pack(">Qq", 8, step) + b"I" + struct.pack(">Qq", 8, at_ns)
    for text in (kind, taken, events):
        found += b"T" + struct.pack(">Q", len(text)) + text
    return hashlib.sha256(found).digest()


@EXAMPLES
@given(st.binary(max_size=40), NUMBERS, NUMBERS, *[st.binary(max_size=300)] * 3)
def test_the_chain_of_a_row(
    previous: bytes, step: int, at_ns: int, kind: bytes, taken: bytes, events: bytes
) -> None:
    given = (previous, step, at_ns, kind, taken, events)
    assert BUILT.chain(*given) == (by_hand(*given) if HASHES else None)
    assert plain_chain(*given) == by_hand(*given)


def test_the_chain_of_a_long_row() -> None:
    given = (bytes(32), 7, 50, b"RequestSubmitted", b"x" * 70_000, b"y" * 2047)
    assert BUILT.chain(*given) == (by_hand(*given) if HASHES else None)
    assert plain_chain(*given) == by_hand(*given)


@pytest.mark.skipif(not HASHES, reason="no instructions for SHA-256")
def test_the_hash_itself() -> None:
    """Of every length around one block, two and three, and of a megabyte."""
    sha256: Callable[[bytes], bytes] = importlib.import_module(native_text._NAME).sha256
    data = np.random.default_rng(7).bytes(1 << 20)
    for count in (*range(200), 1 << 20):
        assert sha256(data[:count]) == hashlib.sha256(data[:count]).digest(), count
    assert sha256("") is None  # type: ignore[arg-type]


def test_python_hashes_where_the_processor_cannot() -> None:
    def row(*given: Any) -> native_text.UsualRow | None:
        written = BUILT.row(*given)
        return None if written is None else (*written[:3], None)

    unaided = attrs.evolve(BUILT, row=row, chain=native_text.nothing)
    assert sealed(unaided, DONE, ONE) == sealed(PYTHON, DONE, ONE)


@pytest.mark.parametrize("place", range(6))
def test_an_unusual_chain_is_left_to_python(place: int) -> None:
    odd: list[Any] = [
        None,
        "a",
        bytearray(b"a"),
        memoryview(b"a"),
        OwnBytes(b"a"),
        1.0,
        True,
        1 << 63,
        OwnInt(1),
    ]
    for one in odd:
        given: list[Any] = [bytes(32), 7, 50, b"TimePassed", b"[1]", b"[]"]
        given[place] = one
        assert BUILT.chain(*given) is None
    assert row_chain(bytes(32), True, OwnInt(50), b"k", b"[1]", b"[]") == row_chain(
        bytes(32), 1, 50, b"k", b"[1]", b"[]"
    )


# ---------------------------------------------------------------------------- the module


@pytest.mark.parametrize(
    ("name", "count"), [("row", 6), ("row", 8), ("events", 1), ("events", 3), ("chain", 5)]
)
def test_another_number_of_values_is_no_call(name: str, count: int) -> None:
    with pytest.raises(TypeError, match=rf"{name} takes \d values, not {count}"):
        getattr(BUILT, name)(*[b""] * count)


def test_versions_that_are_none_are_left_to_python() -> None:
    odd: list[Any] = [None, (), (1,), (1, 1, 1, 1), [1, 1, 1], (None, 1, 1), (True, 1, 1)]
    for versions in odd:
        assert BUILT.row(versions, {}, b"", 1, 1, DONE, ()) is None


def referred(taken: Completed, events: tuple[Event, ...], codes: Any) -> Iterator[Any]:
    """Yield every value that C looks at in a row."""
    yield from (taken, taken.rows, taken.times, taken.kv_effect, codes, events, HEAD.chain)
    yield from (value for row in taken.rows for value in (row, *msgspec.structs.astuple(row)))
    yield from attrs.astuple(taken.times)
    yield from (Completed, RowResult, JobTimes, Event, NO_DATA, RowResult.__struct_defaults__)
    for event in events:
        yield from (event, *attrs.astuple(event, recurse=False), *event.entities)
        for key, value in event.data.items():
            yield from (key, value)


def test_no_reference_is_kept_or_lost() -> None:
    """Of nothing that is looked at, in usual and unusual calls alike."""
    events = (
        lanes(1001, 1002, 1003, 2001),
        lanes(5005, generation=1 << 40, data={"word": "some word", "many": (70_001, [70_002])}),
    )
    taken = attrs.evolve(
        completed(1 << 41, (100_001, 100_002)),
        kv_effect="".join(("app", "lied")),
        times=JobTimes(submit_ns=1 << 45, visible_ns=1 << 46),
    )
    codes = Codec()._events.codes  # type: ignore[union-attr]
    odd_events = (*events, lanes(4, data={"word": 0.5}))
    odd_taken = attrs.evolve(taken, rows=(*taken.rows, RowResult(token=7, stop_hit=True)))
    calls: list[Callable[[], Any]] = [
        lambda: BUILT.row((1, 1, 1), codes, HEAD.chain, 1 << 42, 1 << 43, taken, events),
        lambda: BUILT.row((1, 1, 1), codes, HEAD.chain, 1 << 42, 1 << 43, taken, odd_events),
        lambda: BUILT.row((1, 1, 1), codes, HEAD.chain, 1 << 42, 1 << 43, odd_taken, events),
        lambda: BUILT.events(codes, events),
        lambda: BUILT.events(codes, odd_events),
        lambda: BUILT.chain(HEAD.chain, 1 << 42, 1 << 43, b"kind", b"taken", b"events"),
        lambda: BUILT.chain(HEAD.chain, 1 << 42, 1 << 43, b"kind", b"taken", "events"),  # type: ignore[arg-type]
    ]
    values = list(referred(taken, events, codes))
    before = list(map(sys.getrefcount, values))
    none_before = sys.getrefcount(None)
    for call in calls:
        for _ in range(500):
            call()
    assert list(map(sys.getrefcount, values)) == before
    assert abs(sys.getrefcount(None) - none_before) < 100
    made = BUILT.row((1, 1, 1), codes, HEAD.chain, 1, 1, taken, events)
    assert made is not None
    # Held by the tuple, and by the call that counts.
    assert [sys.getrefcount(made[place]) for place in (1, 2, 3)] == [2, 2, 2]


@pytest.mark.parametrize("name", ["Completed", "JobTimes", "RowResult", "BufferRestored"])
def test_a_class_with_other_fields_is_refused_when_it_is_loaded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else C would write a text without the new field."""
    path = Path(sys.modules["laneway.journal._text"].__file__ or "")
    assert load(path).KINDS == BUILT.kinds
    fields = [*getattr(inputs, name).__slots__, "more"]
    changed = attrs.make_class(name, fields, slots=True)
    assert set(fields) <= vars(changed).keys()
    monkeypatch.setattr(inputs, name, changed)
    with pytest.raises(ImportError, match=f"built for other {name}: install laneway again"):
        load(path)


def test_without_the_extension_python_writes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert native_text._built() is PYTHON
    assert Codec(texts=PYTHON).usual_row(HEAD.chain, 7, 50, DONE, ONE) is None
