"""The journal in an SQLite file: one row a step, one transaction a call.

Theory of operation. The owner appends with one prebuilt statement on the bare connection of its
SQLAlchemy engine; one step is a statement that is its own transaction, several are enclosed in one.
`synchronous=NORMAL` lets a commit survive the death of the process without waiting for the disk;
calls that record a quarantine, a reset or the loss of the device wait for it (decision 4). The
first error while writing closes the journal for writing for good: nobody can say what the disk
holds. Readers have connections of their own and see what is committed, while an engine writes.
"""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import sqlalchemy

from laneway.engine.errors import ConfigurationError, JournalFormatError, JournalWriteError
from laneway.engine.ports import Step
from laneway.journal import schema
from laneway.journal.chain import ROWS_AT_ONCE, Block, Head, RawRow
from laneway.journal.codec import TOKENS_MODES
from laneway.journal.connect import (
    driver_connection,
    is_empty,
    log_path,
    read_head,
    read_meta,
    reading_engine,
    reading_errors,
    size_bytes,
    writing_engine,
)
from laneway.journal.memory import ONE_ENGINE
from laneway.journal.meta import Meta
from laneway.journal.owner import OwnerLock
from laneway.journal.sealing import trusted_head, unseal
from laneway.journal.writer import Writer, create_file
from laneway.statemachines.values import of_tuple

_make_row: Callable[[Any], RawRow] = of_tuple(RawRow)

ROWS_PER_READ = ROWS_AT_ONCE
"""Rows fetched at a time; between two fetches a reader holds up nobody."""

FIRST_STEP = -(1 << 63)
LAST_STEP = (1 << 63) - 1
"""Every number a row can have, so that rows that do not belong there are seen too."""


class SqlJournal:
    """A journal file, open to append (one owner) or to read; see ``laneway.journal.open_journal``.

    One thread appends; any thread reads.
    """

    def __init__(
        self, path: Path, reader: sqlalchemy.Engine, meta: Meta, writer: Writer | None
    ) -> None:
        """Take over an opened file; ``open`` and ``open_to_read`` make journals."""
        self.path = path
        self._reader = reader
        self.tokens = meta.tokens
        self.journal_id = meta.journal_id
        self.codec = meta.codec()
        self._version = meta.version
        self._origin = meta.origin()
        self._writer = writer
        self._claim = threading.Lock()

    def claim(self) -> None:
        """Take the journal for one engine. Raises: JournalWriteError if it has one, or had."""
        if self._writer is None:
            raise JournalWriteError(f"{self.path} is open to read only")
        if not self._claim.acquire(blocking=False):
            raise JournalWriteError(f"{self.path}: {ONE_ENGINE}")

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, tokens: str | None = None) -> "SqlJournal":
        """Open or create a file to append to. ``tokens`` None: as the file has it, else full.

        Raises: JournalWriteError (another owner, cannot be written), JournalFormatError (not a
        journal, damaged, of another version), ConfigurationError (the other token mode).
        """
        if tokens is not None and tokens not in TOKENS_MODES:
            raise ConfigurationError(f"journal tokens must be full or digest, not {tokens!r}")
        resolved = _resolve(path)
        lock = OwnerLock.acquire(resolved)
        try:
            create_file(resolved)
            writer = Writer(resolved, lock, writing_engine(resolved), tokens)
        except BaseException:
            lock.release()
            raise
        return cls(resolved, reading_engine(resolved), writer.meta, writer)

    @classmethod
    def open_to_read(cls, path: str | os.PathLike[str]) -> "SqlJournal":
        """Open a file to read, also while an engine writes it. Raises: JournalFormatError."""
        resolved = _resolve(path)
        if os.path.exists(resolved) and not os.path.isfile(resolved):
            # Opening a pipe would wait for its other end.
            raise JournalFormatError(f"{resolved} is not a regular file: there is no journal in it")
        reader = reading_engine(resolved)
        with _connected(reader, resolved) as connection:
            if is_empty(resolved, connection):
                raise JournalFormatError(f"{resolved} is empty: there is no journal in it")
            meta = read_meta(resolved, connection)
        return cls(resolved, reader, meta, None)

    def append(self, steps: Sequence[Step]) -> None:
        """Make the steps durable, all or none. Raises: JournalWriteError."""
        if self._writer is None:
            raise JournalWriteError(f"{self.path} is open to read only")
        if steps:
            self._writer.append(self.codec, steps)

    def head(self) -> tuple[int, int]:
        """Return number and instant of the last step, (0, 0) if there is none."""
        if self._writer is not None:
            return self._writer.head.step, self._writer.head.at_ns
        with _connected(self._reader, self.path) as connection:
            head = read_head(self.path, connection, self._origin)
        return head.step, head.at_ns

    def read(self, *, first: int = 1, last: int | None = None) -> Iterator[Step]:
        """Return the steps in order, each checked against the chain.

        Raises: JournalFormatError naming the step that is not what was written.
        """
        if first <= 1:
            return unseal(self.codec, self._origin, self.blocks(last=last))
        before = next(self.rows(first=first - 1, last=first - 1), None)
        if before is None:
            return iter(())
        return unseal(self.codec, trusted_head(before), self.blocks(first=first, last=last))

    def rows(self, *, first: int | None = None, last: int | None = None) -> Iterator[RawRow]:
        """Return the rows as they are stored. Raises: JournalFormatError if they cannot be read."""
        for block in self.blocks(first=first, last=last):
            yield from map(_make_row, block)

    def blocks(self, *, first: int | None = None, last: int | None = None) -> Iterator[Block]:
        """Return the same rows, many at a time. Raises: JournalFormatError."""
        begin = FIRST_STEP if first is None else max(first, FIRST_STEP)
        end = LAST_STEP if last is None else min(last, LAST_STEP)
        with _connected(self._reader, self.path) as connection:
            while begin <= end:
                found = connection.execute(schema.SELECT_ROWS, (begin, end, ROWS_PER_READ))
                rows = found.fetchall()
                if rows:
                    yield rows
                if len(rows) < ROWS_PER_READ:
                    return
                begin = rows[-1][0] + 1

    def origin(self) -> Head:
        """Return the head before the first step: the chain of ``meta`` as it is stored now."""
        with _connected(self._reader, self.path) as connection:
            return read_meta(self.path, connection).origin()

    def findings(self) -> list[str]:
        """Return what is wrong with the file apart from its rows: pages, header, definitions."""
        with _connected(self._reader, self.path) as connection:
            return schema.schema_findings(connection, self._version)

    def size_bytes(self) -> int:
        """Return the bytes the journal takes on disk, its write-ahead log included."""
        return size_bytes(self.path) + size_bytes(log_path(self.path))

    def close(self) -> None:
        """Checkpoint and give the owner lock back; idempotent. What there is can still be read.

        Raises: JournalWriteError if the last checkpoint fails; the lock is given back all the same
        and the steps are safe in the write-ahead log.
        """
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _resolve(path: str | os.PathLike[str]) -> Path:
    if "\0" in os.fspath(path):
        raise ConfigurationError("the journal's file name holds a null character: take another one")
    return Path(path).resolve()


@contextmanager
def _connected(engine: sqlalchemy.Engine, path: Path) -> Iterator[sqlite3.Connection]:
    """Lend a reading connection."""
    with reading_errors(path):
        proxied = engine.raw_connection()
        try:
            yield driver_connection(proxied)
        finally:
            proxied.close()
