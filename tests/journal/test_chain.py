"""Whatever is changed in a journal file, verify finds it and names the step."""

import hashlib
import random
import shutil
import sqlite3
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.journal_steps import run_core, tamper

from laneway.engine.errors import JournalError
from laneway.journal import MemoryJournal, open_journal
from laneway.journal.chain import CHAIN_BYTES
from laneway.journal.replay import VerifyReport, verify

COLUMNS = ("step", "at_ns", "input_kind", "input", "events", "chain")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small journal that verifies: an engine opens and closes with nothing to do."""
    path = tmp_path_factory.mktemp("chain") / "original.db"
    with open_journal(path) as journal:
        run_core(journal, load=False)
        assert verify(journal).ok
        assert journal.head()[0] == 3
    return path


@pytest.fixture
def victim(original: Path, tmp_path: Path) -> Path:
    """Return a copy to be changed."""
    return Path(shutil.copy(original, tmp_path / "victim.db"))


def question(path: Path) -> tuple[str, int]:
    """Return where verify says no, or "open" where the file does not even open."""
    try:
        with open_journal(path, read_only=True) as journal:
            report = verify(journal)
    except JournalError:
        return "open", 0
    assert report.reason or report.ok
    return ("ok", 0) if report.ok else (report.asked, report.step)


def rows_of(path: Path) -> list[tuple[Any, ...]]:
    """Return the rows with text as bytes."""
    connection = sqlite3.connect(path)
    connection.text_factory = bytes
    rows = connection.execute(f"SELECT {', '.join(COLUMNS)} FROM step ORDER BY step").fetchall()
    connection.close()
    return rows


def test_the_chain_as_documented(original: Path) -> None:
    def text(value: bytes) -> bytes:
        return b"T" + len(value).to_bytes(8, "big") + value

    def integer(value: int) -> bytes:
        return b"I" + (8).to_bytes(8, "big") + struct.pack(">q", value)

    connection = sqlite3.connect(original)
    connection.text_factory = bytes
    meta = connection.execute("SELECT key, value FROM meta ORDER BY key").fetchall()
    edges = connection.execute("SELECT * FROM edge ORDER BY code").fetchall()
    connection.close()
    assert [key for key, _ in meta] == [b"journal_id", b"schema_version", b"tokens"]
    chain = hashlib.sha256(
        b"laneway journal"
        + b"".join(text(key) + text(value) for key, value in meta)
        + b"".join(integer(code) + b"".join(map(text, names)) for code, *names in edges)
    ).digest()
    for step, at_ns, kind, taken, events, stored in rows_of(original):
        row = integer(step) + integer(at_ns) + text(kind) + text(taken) + text(events)
        chain = hashlib.sha256(chain + row).digest()
        assert stored == chain
    assert len(chain) == CHAIN_BYTES


def changes(value: Any) -> Iterator[Any]:
    """Return the value with each byte changed in two ways."""
    raw = value if isinstance(value, bytes) else struct.pack(">q", value)
    for index in range(len(raw)):
        for mask in (0x01, 0x80):
            changed = bytearray(raw)
            changed[index] ^= mask
            yield bytes(changed) if isinstance(value, bytes) else struct.unpack(">q", changed)[0]


@pytest.mark.parametrize("column", COLUMNS)
def test_every_byte_of_every_column(column: str) -> None:
    """In memory, where the rows are those of a file; some of them in a file below."""
    journal = open_journal(None)
    assert isinstance(journal, MemoryJournal)
    run_core(journal, load=False)
    assert verify(journal).ok
    sound = list(journal._rows)
    for index, row in enumerate(sound):
        for changed in changes(getattr(row, column)):
            journal._rows[index] = row._replace(**{column: changed})
            check_refuted(verify(journal), column, row.step, changed)
        journal._rows[index] = row
    assert verify(journal).ok


def check_refuted(report: VerifyReport, column: str, step: object, changed: Any) -> None:
    """See that a changed value is found, where the chain can tell at the step it was changed in."""
    assert not report.ok, f"step {step}: {column} -> {changed!r}"
    assert report.reason
    if column != "step":
        assert (report.asked, report.step) == ("chain", step)


EVERY = 11
"""Of the changes, in a file: no multiple of two, so that each way of changing a byte comes."""


@pytest.mark.parametrize("column", COLUMNS)
def test_some_bytes_of_every_column_of_a_file(victim: Path, column: str) -> None:
    rows = rows_of(victim)
    position = COLUMNS.index(column)
    connection = sqlite3.connect(victim, isolation_level=None)
    connection.execute("PRAGMA synchronous=OFF")
    journal = open_journal(victim, read_only=True)
    cast = "CAST(? AS TEXT)" if column in ("input_kind", "input", "events") else "?"
    guards = connection.execute(
        "SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'"
    ).fetchall()

    def put(step: int, value: Any) -> None:
        connection.execute("BEGIN")
        for name, _ in guards:
            connection.execute(f"DROP TRIGGER {name}")
        where = step if column != "step" else current["step"]
        connection.execute(f"UPDATE step SET {column} = {cast} WHERE step = ?", (value, where))
        for _, sql in guards:
            connection.execute(sql)
        connection.execute("COMMIT")
        if column == "step":
            current["step"] = value

    for row in rows:
        current = {"step": row[0]}
        for changed in islice(changes(row[position]), None, None, EVERY):
            if column == "step" and any(changed == other[0] for other in rows):
                continue
            put(row[0], changed)
            check_refuted(verify(journal), column, row[0], changed)
        put(row[0], row[position])
    connection.close()
    assert verify(journal).ok


OTHER_CLASSES = [
    (column, value)
    for column, kept in zip(COLUMNS[1:], (int, str, str, str, bytes), strict=True)
    for value in (None, 7, "text", b"blob", 1.5)
    if not isinstance(value, kept)
]


@pytest.mark.parametrize(("column", "value"), OTHER_CLASSES)
def test_another_storage_class(victim: Path, column: str, value: Any) -> None:
    relaxed(victim, f"UPDATE step SET {column} = ? WHERE step = 3", (value,))
    assert question(victim) != ("ok", 0)


@pytest.mark.parametrize(
    ("column", "kind"), [("at_ns", "TEXT"), ("at_ns", "REAL"), ("input", "BLOB")]
)
def test_the_same_bytes_in_another_storage_class(victim: Path, column: str, kind: str) -> None:
    relaxed(victim, f"UPDATE step SET {column} = CAST({column} AS {kind}) WHERE step = 3")
    with open_journal(victim, read_only=True) as journal:
        report = verify(journal)
        assert not report.ok
        with pytest.raises(JournalError, match=f"step 3: column {column} is {kind.lower()}"):
            list(journal.read())


def relaxed(path: Path, statement: str, values: tuple[Any, ...] = ()) -> None:
    """Run a statement while the table of steps has no types, then put its definition back."""
    connection = sqlite3.connect(path, isolation_level=None)
    (sql,) = connection.execute("SELECT sql FROM sqlite_schema WHERE name='step'").fetchone()
    loose = "CREATE TABLE step (step INTEGER PRIMARY KEY, at_ns, input_kind, input, events, chain)"
    define(connection, loose)
    connection.close()
    tamper(path, (statement, values))
    connection = sqlite3.connect(path, isolation_level=None)
    define(connection, sql)
    connection.close()


def define(connection: sqlite3.Connection, sql: str, name: str = "step") -> None:
    """Change a definition without a look at what it means."""
    connection.execute("PRAGMA writable_schema=ON")
    connection.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (sql, name))
    connection.execute("PRAGMA writable_schema=RESET")


INSERT = f"INSERT INTO step ({', '.join(COLUMNS)}) "


@pytest.mark.parametrize(
    ("statements", "step"),
    [
        (["DELETE FROM step WHERE step = 2"], 2),
        (["DELETE FROM step WHERE step = 1"], 1),
        (["DELETE FROM step WHERE step < 3"], 1),
        (["DELETE FROM step WHERE step = 2", "UPDATE step SET step = step - 1 WHERE step > 2"], 2),
        (
            [
                "UPDATE step SET step = -2 WHERE step = 2",
                "UPDATE step SET step = 2 WHERE step = 3",
                "UPDATE step SET step = 3 WHERE step = -2",
            ],
            2,
        ),
        ([INSERT + "SELECT 0, 0, input_kind, input, events, chain FROM step WHERE step = 1"], 1),
        ([INSERT + "SELECT -9, 0, input_kind, input, events, chain FROM step WHERE step = 1"], 1),
        ([INSERT + "SELECT -9223372036854775808, 0, 'x', '', '', zeroblob(32)"], 1),
        ([INSERT + "SELECT 9223372036854775807, 0, 'x', '', '', zeroblob(32)"], None),
        (
            [INSERT + "SELECT max(step) + 1, at_ns, input_kind, input, events, chain FROM step"],
            None,
        ),
        (
            ["UPDATE meta SET value = 'z' || substr(value, 2) WHERE key = 'journal_id'"],
            1,
        ),
        (["UPDATE meta SET value = CAST(x'ff' AS TEXT) WHERE key = 'journal_id'"], 1),
        (["UPDATE step SET input = CAST(CAST(input AS BLOB) || x'ff' AS TEXT) WHERE step = 3"], 3),
        (["UPDATE step SET events = events || ' ' WHERE step = 3"], 3),
        (["UPDATE step SET events = events || char(0) WHERE step = 3"], 3),
    ],
)
def test_rows_that_are_not_what_was_written(
    victim: Path, statements: list[str], step: int | None
) -> None:
    count = len(rows_of(victim))
    tamper(victim, *((statement, ()) for statement in statements))
    assert question(victim) == ("chain", count + 1 if step is None else step)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE meta SET value = 'digest' WHERE key = 'tokens'",
        "UPDATE meta SET value = 'none' WHERE key = 'tokens'",
        "UPDATE meta SET value = '1' WHERE key = 'schema_version'",
        "UPDATE meta SET key = 'other' WHERE key = 'tokens'",
        "DELETE FROM meta WHERE key = 'journal_id'",
        "DELETE FROM meta",
        "INSERT INTO meta VALUES ('more', 'x')",
    ],
)
def test_meta(victim: Path, statement: str) -> None:
    tamper(victim, (statement, ()))
    assert question(victim)[0] in ("open", "chain")


EDGE = ("code", "machine", "trigger", "source", "dest")


@pytest.mark.parametrize("column", EDGE)
def test_every_code_of_an_edge_with_one_of_its_names(victim: Path, column: str) -> None:
    """What a code stands for is a part of the history: a changed row is found at the first step."""
    change_edges(victim, column, EDGE.index(column), len(EDGE))


@pytest.mark.soak
@pytest.mark.parametrize("column", EDGE)
def test_every_code_and_name_of_an_edge(victim: Path, column: str) -> None:
    change_edges(victim, column, 0, 1)


def change_edges(victim: Path, column: str, first: int, stride: int) -> None:
    """Change a column of some edges, one after the other: verify says no each time."""
    connection = sqlite3.connect(victim)
    codes = [code for (code,) in connection.execute("SELECT code FROM edge")]
    connection.close()
    assert len(codes) > 50
    new = "code + 1000" if column == "code" else f"upper({column})"
    for code in codes[first::stride]:
        tamper(victim, (f'UPDATE edge SET "{column}" = {new} WHERE code = {code}', ()))
        assert question(victim) == ("chain", 1), code
        old = f"code - 1000 WHERE code = {code + 1000}"
        if column != "code":
            old = f"lower({column}) WHERE code = {code}"
        tamper(victim, (f'UPDATE edge SET "{column}" = {old}', ()))
    assert question(victim) == ("ok", 0)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM edge WHERE code = 7",
        "DELETE FROM edge",
        "INSERT INTO edge VALUES (999, 'lane', 'sing', 'ready', 'ready')",
        "INSERT INTO edge SELECT 999, machine, trigger, source, dest FROM edge WHERE code = 1",
        "UPDATE edge SET code = -1 WHERE code = 3",
        "UPDATE edge SET machine = CAST(x'ff' AS TEXT) WHERE code = 3",
    ],
)
def test_edges(victim: Path, statement: str) -> None:
    tamper(victim, (statement, ()))
    assert question(victim) in (("open", 0), ("chain", 1))


@pytest.mark.parametrize(
    "statement",
    [
        "DROP VIEW event",
        "DROP TRIGGER step_update",
        "DROP TRIGGER edge_insert",
        "DROP TABLE edge",
        "CREATE VIEW other AS SELECT 1",
        "CREATE TABLE other (x)",
        "CREATE INDEX step_at ON step (at_ns)",
        "CREATE TRIGGER sneaky AFTER INSERT ON step BEGIN SELECT 1; END",
        "ALTER TABLE step ADD COLUMN more TEXT",
        "ALTER TABLE step RENAME COLUMN at_ns TO at",
        "PRAGMA user_version = 0",
        "PRAGMA user_version = 1",
        "PRAGMA user_version = 3",
        "PRAGMA application_id = 1",
    ],
)
def test_definitions(victim: Path, statement: str) -> None:
    connection = sqlite3.connect(victim, isolation_level=None)
    if "RENAME" in statement:
        connection.execute("DROP VIEW event")
        connection.execute("DROP VIEW entity_event")
    connection.execute(statement)
    connection.close()
    assert question(victim)[0] in ("open", "storage")


@pytest.mark.parametrize(
    "name", ["event", "entity_event", "step", "meta", "edge", "step_insert", "step_delete"]
)
def test_a_definition_changed_by_one_letter(victim: Path, name: str) -> None:
    connection = sqlite3.connect(victim, isolation_level=None)
    (sql,) = connection.execute("SELECT sql FROM sqlite_schema WHERE name=?", (name,)).fetchone()
    define(connection, sql + " ", name)
    connection.close()
    assert question(victim)[0] in ("open", "storage")


def test_a_flipped_bit_of_the_file_never_changes_the_history(victim: Path) -> None:
    """A bit that means nothing does no harm; nowhere does a journal verify and read otherwise."""
    raw = victim.read_bytes()
    with open_journal(victim, read_only=True) as journal:
        expected = list(journal.read())
    draw = random.Random(5)
    found = 0
    for _ in range(60):
        changed = bytearray(raw)
        changed[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        victim.write_bytes(changed)
        if question(victim) != ("ok", 0):
            found += 1
            continue
        with open_journal(victim, read_only=True) as journal:
            assert list(journal.read()) == expected
    assert found > 10
