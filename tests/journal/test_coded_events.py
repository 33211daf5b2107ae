"""Events by codes of edges: the text is pinned, one list has one text, misfits are refused."""

import pytest

from laneway.engine.errors import JournalFormatError, JournalWriteError
from laneway.journal.codec import Codec
from laneway.journal.edges import DECLARED, edges_of
from laneway.journal.native_text import PYTHON
from laneway.statemachines import MACHINES, Event

EDGES = edges_of(
    [
        (0, "lane", "commit", "reserved", "ready"),
        (7, "job", "plan", "drafted", "planned"),
        (12, "job", "submit", "planned", "submitted"),
    ]
)
CODEC = Codec(edges=EDGES)
IN_PYTHON = Codec(edges=EDGES, texts=PYTHON)


def lanes(*numbers: int, epoch: int = 1, generation: int = 2) -> Event:
    """Return lanes that commit."""
    return Event("lane", numbers, "commit", "reserved", "ready", epoch, generation)


PLAN = Event("job", (5,), "plan", "drafted", "planned", 1, 2, {"b": (1, 2), "a": None})
UNCODED = Event("lane", (5, 6), "commit", "ready", "reserved", 1, 2)


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ((), "[]"),
        ((lanes(4),), "[1,2,[0,4]]"),
        ((lanes(1, 2),), "[1,2,[0,[1,2]]]"),
        ((lanes(1, 2, 3),), "[1,2,[0,[[1,3]]]]"),
        ((lanes(1, 3, 4, 5, 6),), "[1,2,[0,[1,[3,6]]]]"),
        ((lanes(3, 2, 1),), "[1,2,[0,[3,2,1]]]"),
        ((lanes(5, 6, 7, 1, 2, 3, 3, 4),), "[1,2,[0,[[5,7],[1,3],3,4]]]"),
        ((lanes(4), lanes(5)), "[1,2,[0,4],[0,5]]"),
        ((lanes(4), lanes(5, generation=3), lanes(6)), "[1,2,[0,4],[0,5,1,3],[0,6]]"),
        ((lanes(4, epoch=9), lanes(5)), "[9,2,[0,4],[0,5,1,2]]"),
        ((PLAN,), '[1,2,[7,5,{"a":null,"b":[1,2]}]]'),
        ((lanes(4, epoch=9), PLAN), '[9,2,[0,4],[7,5,1,2,{"a":null,"b":[1,2]}]]'),
        ((UNCODED,), '[1,2,[["lane","commit","ready","reserved"],[5,6]]]'),
    ],
)
def test_the_text_of_events(events: tuple[Event, ...], text: str) -> None:
    assert CODEC.encode_events(events).decode() == text
    assert IN_PYTHON.encode_events(events).decode() == text
    assert CODEC.decode_events(text.encode()) == events


@pytest.mark.parametrize("codec", [CODEC, IN_PYTHON])
def test_groups_of_one_step_that_take_turns(codec: Codec) -> None:
    events = (lanes(1, 2), lanes(4, 5, 6), lanes(4, 5, 6), lanes(1, 2), lanes(7))
    for _ in range(2):
        assert codec.encode_events(events) == (
            b"[1,2,[0,[1,2]],[0,[[4,6]]],[0,[[4,6]]],[0,[1,2]],[0,7]]"
        )
        with pytest.raises(JournalWriteError, match="names no entity"):
            codec.encode_events((lanes(),))


def test_edges_that_differ_in_one_name_have_codes_of_their_own() -> None:
    names = ("lane", "commit", "reserved", "ready")
    others = [
        ("odd", "commit", "reserved", "ready"),
        ("lane", "odd", "reserved", "ready"),
        ("lane", "commit", "odd", "ready"),
        ("lane", "commit", "reserved", "odd"),
    ]
    edges = edges_of((code, *edge) for code, edge in enumerate((names, *others)))
    for codec in (Codec(edges=edges), Codec(edges=edges, texts=PYTHON)):
        for code, (machine, trigger, source, dest) in enumerate((names, *others)):
            event = Event(machine, (5,), trigger, source, dest, 1, 2)
            assert codec.encode_events((event,)) == b"[1,2,[%d,5]]" % code
            assert codec.decode_events(b"[1,2,[%d,5]]" % code) == (event,)
        unknown = Event("lane", (5,), "odd", "odd", "ready", 1, 2)
        assert codec.encode_events((unknown,)) == b'[1,2,[["lane","odd","odd","ready"],5]]'


def test_what_is_remembered_of_groups_does_not_change_what_is_written() -> None:
    """More groups than are remembered, each twice."""
    for _ in range(2):
        for first in range(600):
            event = lanes(first, first + 1, first + 2, first + 9)
            text = f"[1,2,[0,[[{first},{first + 2}],{first + 9}]]]"
            assert IN_PYTHON.encode_events((event,)).decode() == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[1]", "begin with the epoch"),
        (b"[1,2]", "begin with the epoch"),
        (b"[[0,4]]", "begin with the epoch"),
        (b"[1,[0,4],[0,5]]", "begin with the epoch"),
        (b"[1,2,3]", "3 stands where an event should"),
        (b"[1,2,[0,4],5]", "5 stands where an event should"),
        (b'["1",2,[0,4]]', "Expected `int | array`"),
        (b"[1,2,[3,4]]", "no edge has the code 3"),
        (b"[1,2,[-1,4]]", "no edge has the code -1"),
        (b'[1,2,[["lane","commit","ready"],4]]', "length 4"),
        (b"[1,2,[0]]", "length 2"),
        (b"[1,2,[0,[]]]", "names no entity"),
        (b"[1,2,[0,[[3,4]]]]", "entity range"),
        (b"[1,2,[0,[[1,2,3]]]]", "length 2"),
        (b"[1,2,[0,[[0,99999999999999]]]]", "more than"),
        (b'[1,2,[0,"4"]]', "Expected `int | array`"),
        (b"[1,2,[0,4,1]]", "epoch without a generation"),
        (b"[1,2,[0,4,{},1]]", "behind its data"),
        (b"[1,2,[0,4,{},1,{}]]", "behind its data"),
        (b"[1,2,[0,4,1,2,{},3]]", "length"),
        (b"[1,2,[0,4,1,2,3]]", "Expected `object`"),
        (b"[1,2,[0,4,[]]]", "Expected `int | object`"),
        (b"{}", "Expected `array`"),
        (b"[", "truncated"),
    ],
)
def test_events_that_do_not_fit_are_refused(text: bytes, says: str) -> None:
    with pytest.raises(JournalFormatError, match=says):
        CODEC.decode_events(text)


def test_every_declared_edge_has_a_code() -> None:
    declared = {
        (name, edge.trigger, source, edge.dest)
        for name, machine in MACHINES.items()
        for edge in machine.edges
        for source in edge.sources
    }
    assert set(DECLARED.codes) == declared
    assert sorted(DECLARED.names) == list(range(len(declared)))
    assert all(DECLARED.codes[edge] == code for code, edge in DECLARED.names.items())
    assert edges_of(DECLARED.rows()).codes == DECLARED.codes


@pytest.mark.parametrize(
    "rows",
    [
        [(0, "a", "b", "c", "d"), (0, "a", "b", "c", "e")],
        [(0, "a", "b", "c", "d"), (1, "a", "b", "c", "d")],
        [(-1, "a", "b", "c", "d")],
        [(1 << 16, "a", "b", "c", "d")],
    ],
)
def test_codes_that_cannot_be(rows: list[tuple[int, str, str, str, str]]) -> None:
    with pytest.raises(ValueError, match="which cannot be"):
        edges_of(rows)
