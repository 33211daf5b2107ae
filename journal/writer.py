"""The owner's side of a journal file: make it, append to it, close it."""

import os
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

import sqlalchemy

from laneway.engine.errors import ConfigurationError, JournalWriteError
from laneway.engine.ports import Step
from laneway.journal import schema
from laneway.journal.checkpoint import LOG_BYTES_MAX, Checkpointer
from laneway.journal.codec import Codec
from laneway.journal.connect import (
    driver_connection,
    is_empty,
    read_head,
    read_meta,
    reading_errors,
    write_error,
    writing_errors,
)
from laneway.journal.meta import Meta, new_meta
from laneway.journal.owner import OwnerLock
from laneway.journal.sealing import Row, seal

DISK_TRIGGERS = frozenset({"quarantine", "reset", "lose"})
"""Steps with such an event wait for the disk (decision 4)."""


class Writer:
    """The one that appends to a journal file: owner lock, connection, head, checkpoint thread."""

    def __init__(
        self, path: Path, lock: OwnerLock, engine: sqlalchemy.Engine, tokens: str | None
    ) -> None:
        """Open the file on ``engine``; see ``SqlJournal.open``."""
        self._path = path
        self._lock = lock
        self._engine = engine
        with reading_errors(path):
            self._proxied = engine.raw_connection()
        try:
            self._connection = driver_connection(self._proxied)
            self.meta = _prepare(path, engine, self._connection, tokens)
            self.head = read_head(path, self._connection, self.meta.origin())
        except BaseException:
            self._proxied.close()
            raise
        self._cursor = self._connection.cursor()
        self._execute = self._cursor.execute
        self._failure: BaseException | None = None
        self._closed = False
        self._gate = threading.Lock()
        self._checkpointer = Checkpointer(engine, self._gate)
        self._checkpointer.start()

    def append(self, codec: Codec, steps: Sequence[Step]) -> None:
        """Make the steps durable, all or none. Raises: JournalWriteError."""
        with self._gate:
            if self._closed or self._failure or self._checkpointer.failure:
                self._refuse()
            rows, head = seal(codec, self.head, steps)
            try:
                to_disk = _must_reach_disk(steps)
                if to_disk or len(rows) > 1:
                    self._write(rows, to_disk=to_disk)
                else:
                    self._execute(schema.INSERT_STEP, rows[0])
            except BaseException as error:
                self._failure = error
                self._roll_back(error)
                if isinstance(error, sqlite3.Error):
                    raise write_error(self._path, error) from error
                raise
            self.head = head
            self._checkpointer.notice(rows)

    def _refuse(self) -> None:
        """Raise JournalWriteError: the journal takes no more steps."""
        if self._closed:
            raise JournalWriteError(f"{self._path} is closed")
        failure = self._failure or self._checkpointer.failure
        raise JournalWriteError(
            f"{self._path} takes no more steps after an error ({failure})"
        ) from failure

    def _write(self, rows: list[Row], *, to_disk: bool) -> None:
        execute = self._execute
        if to_disk:
            execute("PRAGMA synchronous=FULL")
        if len(rows) == 1:
            execute(schema.INSERT_STEP, rows[0])
        else:
            execute("BEGIN IMMEDIATE")
            self._cursor.executemany(schema.INSERT_STEP, rows)
            execute("COMMIT")
        if to_disk:
            execute("PRAGMA synchronous=NORMAL")

    def _roll_back(self, cause: BaseException) -> None:
        """Leave the transaction, if the error did not already end it."""
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            cause.add_note(f"and the roll-back failed: {error}")

    def close(self) -> None:
        """Checkpoint, close, give the lock back; idempotent.

        Raises: JournalWriteError if the checkpoint fails; steps are safe in the write-ahead log.
        """
        with self._gate:
            if self._closed:
                return
            self._closed = True
        try:
            self._checkpointer.stop()
            with writing_errors(self._path):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self._proxied.close()
            self._engine.dispose()
            self._lock.release()


def create_file(path: Path) -> None:
    """Make the file, readable by its owner alone, unless it exists.

    Raises: JournalWriteError if it cannot be made.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if path.is_dir():
            raise JournalWriteError(f"{path} is a directory: name a file in it") from None
        if not os.path.isfile(path):
            raise JournalWriteError(f"{path} is not a regular file: name another one") from None
    except OSError as error:
        raise JournalWriteError(
            f"{path} cannot be made ({error.strerror}): choose a directory that may be written"
        ) from error


def _prepare(
    path: Path, engine: sqlalchemy.Engine, connection: sqlite3.Connection, tokens: str | None
) -> Meta:
    """Make a journal of an empty file, or see that there is one; return its meta.

    Why: nothing is changed in a file before it is known to be ours.
    """
    with reading_errors(path):
        is_new = is_empty(path, connection)
    if not is_new:
        meta = read_meta(path, connection)
        if tokens not in (None, meta.tokens):
            raise ConfigurationError(
                f"{path} keeps tokens {meta.tokens!r}, not {tokens!r}: take another file"
            )
    with writing_errors(path):
        _set_up(path, connection)
        if is_new:
            _create_schema(engine, new_meta(tokens or "full"))
    return read_meta(path, connection)


def _set_up(path: Path, connection: sqlite3.Connection) -> None:
    (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != b"wal":
        raise JournalWriteError(f"{path}: this file system has no write-ahead log: choose another")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA wal_autocheckpoint=0")
    connection.execute(f"PRAGMA journal_size_limit={LOG_BYTES_MAX}")
    _try_to_write(connection)


def _try_to_write(connection: sqlite3.Connection) -> None:
    """Write what is there already, and take it back.

    Why: SQLite opens a file that it may only read without a word, and begins a transaction on it.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        connection.execute(f"PRAGMA user_version={version}")
    finally:
        connection.execute("ROLLBACK")


def _create_schema(engine: sqlalchemy.Engine, meta: Meta) -> None:
    edges = [] if meta.edges is None else meta.edges.rows()
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        for statement in schema.STATEMENTS[meta.version]:
            connection.exec_driver_sql(statement)
        connection.exec_driver_sql(schema.INSERT_META, list(meta.rows.items()))
        connection.exec_driver_sql(schema.INSERT_EDGE, edges)
        connection.exec_driver_sql(f"PRAGMA application_id={schema.APPLICATION_ID}")
        connection.exec_driver_sql(f"PRAGMA user_version={schema.SCHEMA_VERSION}")
        connection.exec_driver_sql("COMMIT")


def _must_reach_disk(steps: Sequence[Step]) -> bool:
    for step in steps:
        for event in step.events:
            if event.trigger in DISK_TRIGGERS:
                return True
    return False
