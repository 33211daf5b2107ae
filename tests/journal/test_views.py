"""The SQL views say what the Python side says, to any SQLite tool."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from laneway.engine.inputs import DeviceFaulted
from laneway.journal import open_journal

EVENT = (
    "step, ordinal, at_ns, machine, entities, trigger, source, dest, epoch, generation, data"
).split(", ")
ENTITY_EVENT = (
    "step, ordinal, at_ns, machine, entity, trigger, source, dest, epoch, generation"
).split(", ")


def select(path: Path, statement: str) -> list[tuple[Any, ...]]:
    """Ask the file as a stranger does: no settings, no functions of our own."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def test_columns_are_the_promised_ones(story_file: Path) -> None:
    connection = sqlite3.connect(story_file)
    for view, expected in (
        ("event", EVENT),
        ("entity_event", ENTITY_EVENT),
        ("step", ["step", "at_ns", "input_kind", "input", "events", "chain"]),
        ("meta", ["key", "value"]),
        ("edge", ["code", "machine", "trigger", "source", "dest"]),
    ):
        names = [c[0] for c in connection.execute(f"SELECT * FROM {view}").description]
        assert names == expected
    connection.close()


def test_the_story_by_hand(story_file: Path) -> None:
    plan = '{"buffer":1,"model":1,"origin":"request","owners":[5,6],"task":"decode"}'
    assert select(story_file, "SELECT * FROM event ORDER BY step, ordinal") == [
        (1, 0, 1000, "device", "device/0", "open", "closed", "serving", 1, 0, '{"incarnation":1}'),
        (2, 0, 2000, "request", "request/5", "admit", "received", "waiting", 1, 0, '{"model":1}'),
        (
            *(3, 0, 3000, "lane", "lane/1-4, lane/7", "reserve", "ready", "reserved", 1, 2),
            '{"job":17}',
        ),
        (3, 1, 3000, "buffer", "buffer/1", "acquire", "free", "preparing", 1, 2, '{"job":17}'),
        (3, 2, 3000, "job", "job/17", "plan", "drafted", "planned", 1, 2, plan),
        (5, 0, 5000, "job", "job/17", "complete", "submitted", "completed", 1, 2, None),
    ]
    assert select(
        story_file, "SELECT ordinal, entity, trigger, dest FROM entity_event WHERE step = 3"
    ) == [
        (0, "lane/1", "reserve", "reserved"),
        (0, "lane/2", "reserve", "reserved"),
        (0, "lane/3", "reserve", "reserved"),
        (0, "lane/4", "reserve", "reserved"),
        (0, "lane/7", "reserve", "reserved"),
        (1, "buffer/1", "acquire", "preparing"),
        (2, "job/17", "plan", "planned"),
    ]


@pytest.mark.parametrize("name", ["story_file", "core_file"])
def test_views_equal_the_python_decoding(name: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    events: list[tuple[Any, ...]] = []
    entity_events: list[tuple[Any, ...]] = []
    with open_journal(path, read_only=True) as journal:
        for step in journal.read():
            for ordinal, event in enumerate(step.events):
                moved = (event.trigger, event.source, event.dest, event.epoch, event.generation)
                where = (step.step, ordinal, step.at_ns, event.machine)
                data = json.loads(json.dumps(dict(event.data))) if event.data else None
                events.append((*where, *moved, data))
                entity_events.extend(
                    (*where, f"{event.machine}/{number}", *moved) for number in event.entities
                )
    columns = ", ".join(c for c in EVENT if c != "entities")
    found = select(path, f"SELECT {columns} FROM event ORDER BY step, ordinal")
    assert [(*row[:-1], json.loads(row[-1]) if row[-1] else None) for row in found] == events
    assert select(path, "SELECT * FROM entity_event") == entity_events
    if name == "core_file":
        assert len(entity_events) > 100


def test_questions_of_the_card(core_file: Path) -> None:
    """Which jobs were in flight at a step; faults with cause; the life of a buffer."""
    with open_journal(core_file, read_only=True) as journal:
        steps = list(journal.read())
    fault = next(s.step for s in steps if type(s.taken).__name__ == "DeviceFaulted")
    flying = select(
        core_file,
        "SELECT entity FROM entity_event WHERE machine = 'job' AND step < "
        f"{fault} GROUP BY entity HAVING max(dest IN ('completed', 'lost')) = 0",
    )
    (job,) = {e.entities[0] for e in steps[fault - 1].events if e.machine == "job"}
    assert flying == [(f"job/{job}",)]
    faults = [
        (step.step, step.taken.kind, f"job/{event.entities[0]}")
        for step in steps
        for event in step.events
        if isinstance(step.taken, DeviceFaulted) and event.trigger == "fault"
    ]
    assert faults[0] == (fault, "ccu", f"job/{job}")
    assert (
        select(
            core_file,
            "SELECT s.step, json_extract(s.input, '$[5]'), e.entities FROM step s JOIN event e"
            " USING (step) WHERE s.input_kind = 'DeviceFaulted' AND e.trigger = 'fault'",
        )
        == faults
    )
    life = select(core_file, "SELECT trigger FROM entity_event WHERE entity = 'buffer/1'")
    assert [t for (t,) in life][:5] == ["acquire", "submit", "complete", "release", "acquire"]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE step SET at_ns = 0",
        "DELETE FROM step",
        "INSERT OR REPLACE INTO step SELECT * FROM step WHERE step = 1",
        "INSERT INTO step SELECT 0, at_ns, input_kind, input, events, chain FROM step LIMIT 1",
        "UPDATE meta SET value = 'digest'",
        "DELETE FROM meta",
        "INSERT OR REPLACE INTO meta VALUES ('tokens', 'digest')",
        "INSERT INTO meta VALUES ('more', 'x')",
        "UPDATE edge SET dest = 'free'",
        "DELETE FROM edge",
        "INSERT INTO edge VALUES (999, 'lane', 'sing', 'ready', 'ready')",
    ],
)
def test_tables_are_append_only(story_file: Path, statement: str) -> None:
    connection = sqlite3.connect(story_file)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        connection.execute(statement)
    connection.close()


@pytest.mark.parametrize(
    "values",
    [
        "(9, 'x', 'k', 'i', 'e', zeroblob(32))",
        "(9, 1, 'k', x'00', 'e', zeroblob(32))",
        "(9, 1, 'k', 'i', NULL, zeroblob(32))",
        "(9, 1, 'k', 'i', 'e', zeroblob(31))",
        "(9, 1, 'k', 'i', 'e', 'c')",
    ],
)
def test_columns_have_types(story_file: Path, values: str) -> None:
    connection = sqlite3.connect(story_file)
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute(f"INSERT INTO step VALUES {values}")
    connection.close()
