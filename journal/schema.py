"""The tables and views of a journal file, and the check that they are the ones this code made.

Any SQLite tool from 3.40 on can read them. ``step`` has one row for each step; the views ``event``
and ``entity_event`` expand its JSON, with the names of ``edge`` for its codes. The text below is
compared with what a file holds (``schema_findings``), because a changed view shows a changed
history to whoever looks through it.

Changing anything here is a new SCHEMA_VERSION.
"""

import sqlite3
from collections.abc import Mapping
from types import MappingProxyType

from laneway.journal import schema_1

SCHEMA_VERSION = 2
"""Of a file that is made today. Version 1 is read and continued as it is: its events name their
edges in words, and its views are those of ``schema_1``."""

APPLICATION_ID = 0x6C616E65
"""``PRAGMA application_id``: "lane" in ASCII."""

META_KEYS = ("journal_id", "schema_version", "tokens")


META = """\
CREATE TABLE meta (
  key TEXT NOT NULL PRIMARY KEY,
  value TEXT NOT NULL
) STRICT, WITHOUT ROWID"""

STEP = """\
CREATE TABLE step (
  step INTEGER PRIMARY KEY,
  at_ns INTEGER NOT NULL,
  input_kind TEXT NOT NULL,
  input TEXT NOT NULL,
  events TEXT NOT NULL,
  chain BLOB NOT NULL CHECK (length(chain) = 32)
) STRICT"""

EDGE = """\
CREATE TABLE edge (
  code INTEGER PRIMARY KEY,
  machine TEXT NOT NULL,
  "trigger" TEXT NOT NULL,
  source TEXT NOT NULL,
  dest TEXT NOT NULL
) STRICT"""

EVENT = """\
CREATE VIEW event (step, ordinal, at_ns, machine, entities, "trigger", source, dest, epoch,
  generation, data) AS
SELECT
  s.step,
  e.key - 2,
  s.at_ns,
  coalesce(g.machine, e.value ->> '$[0][0]'),
  (
    SELECT group_concat(
      coalesce(g.machine, e.value ->> '$[0][0]') || '/' || CASE n.type
        WHEN 'array' THEN (n.value ->> 0) || '-' || (n.value ->> 1)
        ELSE n.value
      END,
      ', '
    )
    FROM json_each(e.value, '$[1]') AS n
  ),
  coalesce(g."trigger", e.value ->> '$[0][1]'),
  coalesce(g.source, e.value ->> '$[0][2]'),
  coalesce(g.dest, e.value ->> '$[0][3]'),
  CASE WHEN json_array_length(e.value) > 3 THEN e.value ->> 2 ELSE s.events ->> 0 END,
  CASE WHEN json_array_length(e.value) > 3 THEN e.value ->> 3 ELSE s.events ->> 1 END,
  CASE json_array_length(e.value) WHEN 3 THEN e.value -> 2 WHEN 5 THEN e.value -> 4 END
FROM step AS s, json_each(s.events) AS e LEFT JOIN edge AS g ON g.code = e.value ->> 0
WHERE e.key > 1"""

ENTITY_EVENT = """\
CREATE VIEW entity_event (step, ordinal, at_ns, machine, entity, "trigger", source, dest, epoch,
  generation) AS
SELECT
  s.step,
  e.key - 2,
  s.at_ns,
  coalesce(g.machine, e.value ->> '$[0][0]'),
  coalesce(g.machine, e.value ->> '$[0][0]') || '/' || (
    CASE n.type WHEN 'array' THEN n.value ->> 0 ELSE n.value END + one.key
  ),
  coalesce(g."trigger", e.value ->> '$[0][1]'),
  coalesce(g.source, e.value ->> '$[0][2]'),
  coalesce(g.dest, e.value ->> '$[0][3]'),
  CASE WHEN json_array_length(e.value) > 3 THEN e.value ->> 2 ELSE s.events ->> 0 END,
  CASE WHEN json_array_length(e.value) > 3 THEN e.value ->> 3 ELSE s.events ->> 1 END
FROM
  step AS s,
  json_each(s.events) AS e
  LEFT JOIN edge AS g ON g.code = e.value ->> 0,
  json_each(e.value, '$[1]') AS n,
  json_each(
    '[0' || CASE n.type
      WHEN 'array' THEN replace(hex(zeroblob((n.value ->> 1) - (n.value ->> 0))), '00', ',0')
      ELSE ''
    END || ']'
  ) AS one
WHERE e.key > 1"""
"""The last join counts: a range of n entities is made to an array of n zeros, whose keys count."""

STEP_INSERT = """\
CREATE TRIGGER step_insert BEFORE INSERT ON step
WHEN EXISTS (SELECT 1 FROM step WHERE step >= NEW.step)
BEGIN SELECT RAISE(ABORT, 'a journal is append-only: this step is not after the last'); END"""


def _guards(*tables: str) -> tuple[str, ...]:
    return tuple(
        f"CREATE TRIGGER {table}_{verb.lower()} BEFORE {verb} ON {table}\n"
        "BEGIN SELECT RAISE(ABORT, 'a journal is append-only'); END"
        for table in tables
        for verb in ("UPDATE", "DELETE")
    )


EDGE_INSERT = """\
CREATE TRIGGER edge_insert BEFORE INSERT ON edge
WHEN EXISTS (SELECT 1 FROM step)
BEGIN SELECT RAISE(ABORT, 'a journal is append-only'); END"""
"""A guard against accidents; what somebody changes on purpose is found by the chain."""

META_INSERT = """\
CREATE TRIGGER meta_insert BEFORE INSERT ON meta
WHEN (SELECT count(*) FROM meta) >= 3
BEGIN SELECT RAISE(ABORT, 'a journal is append-only'); END"""

_VERSION_1 = (META, STEP, schema_1.EVENT, schema_1.ENTITY_EVENT, STEP_INSERT, META_INSERT)
_VERSION_2 = (META, STEP, EDGE, EVENT, ENTITY_EVENT, STEP_INSERT, META_INSERT, EDGE_INSERT)
STATEMENTS: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        1: (*_VERSION_1, *_guards("meta", "step")),
        2: (*_VERSION_2, *_guards("meta", "step", "edge")),
    }
)
"""By schema version everything that a file consists of."""

COLUMNS = ("step", "at_ns", "input_kind", "input", "events", "chain")
INSERT_STEP = (
    "INSERT INTO step (step, at_ns, input_kind, input, events, chain) VALUES (?, ?, ?, ?, ?, ?)"
)
_TEXTS = " AND ".join(f"+{name} >= '' AND +{name} < x''" for name in COLUMNS[2:5])
_ARE_RIGHT = f"{_TEXTS} AND +chain >= x'' AND +at_ns < ''"
_TOLD = " || ' ' || ".join(f"typeof({name})" for name in COLUMNS)
SELECT_ROWS = (
    f"SELECT {', '.join(COLUMNS)}, CASE WHEN {_ARE_RIGHT} THEN NULL ELSE {_TOLD} END"
    " FROM step WHERE step >= ? AND step <= ? ORDER BY step LIMIT ?"
)
"""The seventh column is NULL where the storage classes are right: to tell them takes longer.

Numbers go before every text, texts before every blob, so a comparison tells the class, in less time
than a function that names it; ``+`` keeps the declared type of the column out of it. That ``step``
is an integer follows from its being the key; a real ``at_ns`` reaches Python as one.
"""
INSERT_META = "INSERT INTO meta (key, value) VALUES (?, ?)"
INSERT_EDGE = 'INSERT INTO edge (code, machine, "trigger", source, dest) VALUES (?, ?, ?, ?, ?)'
SELECT_EDGES = (
    'SELECT code, machine, "trigger", source, dest, typeof(machine) || typeof("trigger")'
    " || typeof(source) || typeof(dest) FROM edge ORDER BY code"
)
SELECT_LAST_STEP = "SELECT max(step) FROM step"


def schema_findings(connection: sqlite3.Connection, version: int) -> list[str]:
    """Return what in the file is not as its version makes it: pages, header, definitions.

    The connection returns text as bytes.
    """
    findings = [
        f"the file is damaged: {text(line)}"
        for (line,) in connection.execute("PRAGMA integrity_check(3)")
        if line != b"ok"
    ]
    for name, expected in (
        ("application_id", APPLICATION_ID),
        ("user_version", version),
        ("encoding", b"UTF-8"),
    ):
        (found,) = connection.execute(f"PRAGMA {name}").fetchone()
        if found != expected:
            findings.append(f"{name} is {found!r}, not {expected!r}")
    return findings + _definition_findings(connection, version)


def _definition_findings(connection: sqlite3.Connection, version: int) -> list[str]:
    expected = {_name_of(statement): statement for statement in STATEMENTS[version]}
    rows = connection.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY name").fetchall()
    found = {(text(kind), text(name)): text(sql) for kind, name, sql in rows}
    findings = []
    for key in sorted(expected.keys() | found.keys()):
        kind, name = key
        if key not in found:
            findings.append(f"{kind} {name} is missing")
        elif key not in expected:
            findings.append(f"{kind} {name} does not belong to a journal")
        elif found[key] != expected[key]:
            findings.append(f"the definition of {kind} {name} was changed")
    return findings


def _name_of(statement: str) -> tuple[str, str]:
    _, kind, name = statement.split(maxsplit=3)[:3]
    return kind.lower(), name


def text(value: object) -> str:
    """Return a column that should be text as text, whatever it holds."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
