"""The log is bounded and moved into the database; only grave steps wait for the disk."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.journal_steps import story, ticks

from laneway.engine.errors import JournalWriteError
from laneway.engine.inputs import TimePassed
from laneway.engine.ports import Step
from laneway.journal import SqlJournal, checkpoint, writer
from laneway.journal.checkpoint import Checkpointer
from laneway.journal.connect import driver_connection, writing_engine
from laneway.statemachines import Event


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqlJournal]:
    """Return a journal whose own thread is not started: the test is the thread."""
    monkeypatch.setattr(Checkpointer, "start", lambda self: None)
    with SqlJournal.open(tmp_path / "run.db") as opened:
        yield opened


@pytest.fixture
def thread_connection(journal: SqlJournal) -> Iterator[sqlite3.Connection]:
    """Return the connection that the thread would have."""
    proxied = writing_engine(journal.path).raw_connection()
    connection = driver_connection(proxied)
    connection.execute("PRAGMA busy_timeout=0")
    yield connection
    proxied.close()


def checkpointer_of(journal: SqlJournal) -> Checkpointer:
    """Return the journal's own."""
    assert journal._writer is not None
    return journal._writer._checkpointer


def main_file_rows(path: Path, tmp_path: Path) -> int:
    """Count the rows of the database without its log."""
    alone = tmp_path / "alone.db"
    alone.write_bytes(path.read_bytes())
    connection = sqlite3.connect(f"file:{alone}?immutable=1", uri=True)
    try:
        return int(connection.execute("SELECT count(*) FROM step").fetchone()[0])
    finally:
        connection.close()


def test_nothing_is_done_when_nothing_was_written(
    journal: SqlJournal, thread_connection: sqlite3.Connection
) -> None:
    assert not checkpointer_of(journal).step(thread_connection)
    journal.append(story())
    assert checkpointer_of(journal).step(thread_connection)
    assert not checkpointer_of(journal).step(thread_connection)


def test_rows_go_into_the_database(
    journal: SqlJournal, thread_connection: sqlite3.Connection, tmp_path: Path
) -> None:
    journal.append(story())
    checkpointer_of(journal).step(thread_connection)
    assert main_file_rows(journal.path, tmp_path) == 5


def test_appending_never_checkpoints_by_itself(journal: SqlJournal, tmp_path: Path) -> None:
    for step in ticks(1, 1200):
        journal.append([step])
    log = journal.path.with_name("run.db-wal")
    assert log.stat().st_size > 1200 * 4096
    journal.close()
    assert main_file_rows(journal.path, tmp_path) == 1200


def pages_in_use(connection: sqlite3.Connection) -> int:
    """Return how many pages of the log hold something, whatever the length of the file."""
    return int(connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1])


def test_a_log_that_is_too_long_is_begun_anew(
    journal: SqlJournal, thread_connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file keeps its length, and is written over."""
    monkeypatch.setattr(checkpoint, "LOG_BYTES_MAX", 40 * 4096)
    log = journal.path.with_name("run.db-wal")
    for step in ticks(1, 100):
        journal.append([step])
    length = log.stat().st_size
    assert length > 40 * 4096
    checkpointer_of(journal).step(thread_connection)
    journal.append(ticks(101, 1))
    assert pages_in_use(thread_connection) <= 3
    assert log.stat().st_size == length
    assert len(list(journal.read())) == 101


class Meanwhile:
    """A connection behind whose first statement something happens."""

    def __init__(self, connection: sqlite3.Connection, then: Callable[[], None]) -> None:
        self._connection = connection
        self._then = [then]

    def execute(self, statement: str) -> sqlite3.Cursor:
        done = self._connection.execute(statement)
        if self._then:
            row = done.fetchone()
            self._then.pop()()
            done = self._connection.execute("SELECT ?, ?, ?", row)
        return done


def test_a_log_that_is_never_caught_up_with_is_begun_anew(
    journal: SqlJournal, thread_connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under steady load, or here because of a reader: what is left is copied at the gate."""
    monkeypatch.setattr(checkpoint, "LOG_BYTES_MAX", 40 * 4096)
    journal.append(ticks(1, 50))
    reader = sqlite3.connect(journal.path, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM step").fetchone() == (50,)
    for step in ticks(51, 100):
        journal.append([step])
    behind: Any = Meanwhile(thread_connection, reader.close)
    assert checkpointer_of(journal).step(behind)
    journal.append(ticks(151, 1))
    assert pages_in_use(thread_connection) <= 3
    assert len(list(journal.read())) == 151


def test_a_log_that_is_short_goes_on(
    journal: SqlJournal, thread_connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To begin anew holds up the engine, so it is done past the bound alone."""
    monkeypatch.setattr(checkpoint, "LOG_BYTES_MAX", 400 * 4096)
    journal.append(ticks(1, 1))
    asked: list[str] = []
    thread_connection.set_trace_callback(asked.append)
    for number in range(2, 50):
        journal.append(ticks(number, 1))
        checkpointer_of(journal).step(thread_connection)
    assert set(asked) == {"PRAGMA wal_checkpoint(PASSIVE)"}


def test_a_log_that_grew_beyond_its_bound_is_cut_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does in which a reader stood."""
    monkeypatch.setattr(Checkpointer, "start", lambda self: None)
    monkeypatch.setattr(checkpoint, "LOG_BYTES_MAX", 40 * 4096)
    monkeypatch.setattr(writer, "LOG_BYTES_MAX", 40 * 4096)
    log = tmp_path / "run.db-wal"
    with SqlJournal.open(tmp_path / "run.db") as journal:
        for step in ticks(1, 100):
            journal.append([step])
        assert log.stat().st_size > 80 * 4096
        thread = sqlite3.connect(journal.path, isolation_level=None)
        checkpointer_of(journal).step(thread)
        journal.append(ticks(101, 1))
        assert log.stat().st_size <= 40 * 4096
        thread.close()


def test_a_reader_in_the_log_holds_up_nobody(
    journal: SqlJournal, thread_connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "LOG_BYTES_MAX", 4096)
    journal.append(story())
    reader = sqlite3.connect(journal.path, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM step").fetchone() == (5,)
    journal.append(ticks(6, 1))
    assert checkpointer_of(journal).step(thread_connection)
    journal.append(ticks(7, 1))
    assert reader.execute("SELECT count(*) FROM step").fetchone() == (5,)
    reader.close()
    assert checkpointer_of(journal).step(thread_connection)
    journal.append(ticks(8, 1))
    assert pages_in_use(thread_connection) <= 3
    assert journal.head()[0] == 8


def test_the_thread_wakes_when_the_log_has_grown(
    journal: SqlJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "GROWTH_BYTES", 8 * 4096)
    woken = checkpointer_of(journal)._wake
    journal.append(ticks(1, 1))
    assert not woken.is_set()
    journal.append(ticks(2, 8))
    assert woken.is_set()


def test_the_thread_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thread does the work when it is woken; the test waits for the work, not for time."""
    done = threading.Event()
    work = Checkpointer.step

    def step(self: Checkpointer, connection: sqlite3.Connection) -> bool:
        worked = work(self, connection)
        if worked:
            done.set()
        return worked

    monkeypatch.setattr(Checkpointer, "step", step)
    monkeypatch.setattr(checkpoint, "GROWTH_BYTES", 1)
    with SqlJournal.open(tmp_path / "run.db") as journal:
        journal.append(story())
        assert done.wait(60)
        assert main_file_rows(journal.path, tmp_path) == 5


def test_a_failed_checkpoint_stops_the_journal(journal: SqlJournal) -> None:
    journal.append(story())
    checkpointer_of(journal).failure = sqlite3.OperationalError("disk I/O error")
    with pytest.raises(JournalWriteError, match="disk I/O error"):
        journal.append(ticks(6, 1))
    assert list(journal.read()) == story()


# ---------------------------------------------------------------------------- durability


def statements_of(journal: SqlJournal, *steps: Step) -> list[str]:
    """Return what the owner's connection is told while steps are appended in one call."""
    assert journal._writer is not None
    told: list[str] = []
    journal._writer._connection.set_trace_callback(told.append)
    journal.append(steps)
    journal._writer._connection.set_trace_callback(None)
    once = dict.fromkeys(told)  # a statement that fires a trigger is told twice
    return [line.split("(")[0].strip() for line in once if not line.startswith("--")]


def grave(number: int, machine: str, trigger: str) -> Step:
    """Return a step with one event."""
    events = (Event(machine, (0,), trigger, "a", "b", 1, 1),)
    return Step(step=number, at_ns=number, taken=TimePassed(), events=events)


def test_one_step_is_one_statement(journal: SqlJournal) -> None:
    assert statements_of(journal, grave(1, "job", "complete")) == ["INSERT INTO step"]


def test_several_steps_are_one_transaction(journal: SqlJournal) -> None:
    told = statements_of(journal, *(grave(n, "job", "complete") for n in (1, 2, 3)))
    assert told == ["BEGIN IMMEDIATE", *["INSERT INTO step"] * 3, "COMMIT"]


@pytest.mark.parametrize(
    ("machine", "trigger"), [("buffer", "quarantine"), ("device", "reset"), ("device", "lose")]
)
def test_grave_steps_wait_for_the_disk(journal: SqlJournal, machine: str, trigger: str) -> None:
    full, normal = "PRAGMA synchronous=FULL", "PRAGMA synchronous=NORMAL"
    assert statements_of(journal, grave(1, machine, trigger)) == [full, "INSERT INTO step", normal]
    assert statements_of(journal, grave(2, "job", "complete"), grave(3, machine, trigger)) == [
        full,
        "BEGIN IMMEDIATE",
        *["INSERT INTO step"] * 2,
        "COMMIT",
        normal,
    ]
    assert journal._writer is not None
    assert journal._writer._connection.execute("PRAGMA synchronous").fetchone() == (1,)
