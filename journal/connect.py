"""Open SQLite connections for a journal, through SQLAlchemy, and say what their errors mean.

An owner's connection appends; readers open the file read-only, take no lock that a writer could
notice and leave the file as it is. The engines use no pool: a connection lives as long as its
purpose. Connections are in SQLite's own autocommit mode (a transaction is what BEGIN and COMMIT
enclose) and give text as bytes, because what a damaged file holds need not be UTF-8.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import sqlalchemy
from sqlalchemy.pool import NullPool

from laneway.engine.errors import (
    ConfigurationError,
    JournalError,
    JournalFormatError,
    JournalWriteError,
)
from laneway.journal import schema
from laneway.journal.chain import Head, RawRow, follow
from laneway.journal.codec import TOKENS_MODES
from laneway.journal.edges import Edges, edges_of
from laneway.journal.meta import Meta
from laneway.journal.owner import lock_path
from laneway.journal.sealing import trusted_head

BUSY_TIMEOUT_S = 5.0
"""How long a statement waits for another program that holds the write lock."""

SQLITE_VERSION_MIN = (3, 40, 0)

_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def writing_engine(path: Path) -> sqlalchemy.Engine:
    """Return an engine whose connections may write the existing file."""
    return sqlalchemy.create_engine(
        "sqlite+pysqlite://", poolclass=NullPool, creator=lambda: _open(path, "mode=rw")
    )


def reading_engine(path: Path) -> sqlalchemy.Engine:
    """Return an engine whose connections read the file and nothing else."""
    return sqlalchemy.create_engine(
        "sqlite+pysqlite://", poolclass=NullPool, creator=lambda: _open_to_read(path)
    )


def driver_connection(connection: sqlalchemy.PoolProxiedConnection) -> sqlite3.Connection:
    """Return the bare connection below a SQLAlchemy one: the hot path's."""
    bare = connection.driver_connection
    if not isinstance(bare, sqlite3.Connection):
        raise ConfigurationError(f"not an SQLite connection: {type(bare).__name__}")
    return bare


def _open(path: Path, mode: str) -> sqlite3.Connection:
    if sqlite3.sqlite_version_info < SQLITE_VERSION_MIN:
        raise ConfigurationError(
            f"journals need SQLite {'.'.join(map(str, SQLITE_VERSION_MIN))}, this Python has"
            f" {sqlite3.sqlite_version}: use a newer Python"
        )
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?{mode}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.text_factory = bytes
    try:
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.execute("PRAGMA cell_size_check=ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _open_to_read(path: Path) -> sqlite3.Connection:
    """Open read-only; a file whose directory may not be written as the unchanging file it is."""
    connection = _open(path, "mode=ro")
    try:
        connection.execute("SELECT count(*) FROM sqlite_schema")
    except sqlite3.OperationalError as error:
        connection.close()
        blocked = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
        is_in_use = size_bytes(log_path(path)) > 0 or os.path.exists(lock_path(path))
        if error.sqlite_errorcode & 0xFF not in blocked or is_in_use:
            raise
        return _open(path, "mode=ro&immutable=1")
    except BaseException:
        connection.close()
        raise
    return connection


def log_path(path: Path) -> Path:
    """Return where SQLite keeps the write-ahead log of a file."""
    return path.with_name(path.name + "-wal")


def size_bytes(path: Path) -> int:
    """Return the size of a file, 0 if there is none."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


@contextmanager
def reading_errors(path: Path) -> Iterator[None]:
    """Turn errors of SQLite while reading into a JournalFormatError with one clear line.

    Why UnicodeDecodeError: the driver raises it in place of its own error when the message quotes
    a damaged name.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise JournalFormatError(f"{path} is damaged ({error}): use a copy of it") from error
    except sqlite3.Error as error:
        raise _read_error(path, error) from error
    except sqlalchemy.exc.DBAPIError as error:
        raise _read_error(path, error.orig) from error


@contextmanager
def writing_errors(path: Path) -> Iterator[None]:
    """Turn errors of SQLite while writing into a JournalWriteError with one clear line."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise JournalFormatError(f"{path} is damaged ({error}): use a copy of it") from error
    except sqlite3.Error as error:
        raise write_error(path, error) from error
    except sqlalchemy.exc.DBAPIError as error:
        raise write_error(path, error.orig) from error


def _read_error(path: Path, error: BaseException | None) -> JournalError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if not os.path.exists(path):
        return JournalFormatError(f"{path}: there is no such journal: check the path")
    if code == sqlite3.SQLITE_NOTADB:
        return JournalFormatError(f"{path} is not a journal (not an SQLite database)")
    if code == sqlite3.SQLITE_CORRUPT:
        return JournalFormatError(f"{path} is damaged or cut off ({error}): use a copy of it")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return JournalFormatError(
            f"{path} cannot be opened to read ({error}): check its permissions; a journal that was"
            " not closed needs its -wal file and a directory that may be written: copy both"
        )
    return JournalFormatError(f"{path} cannot be read ({error})")


def write_error(path: Path, error: BaseException | None) -> JournalError:
    """Return the error of this package for an error of SQLite while writing."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _DAMAGE:
        return _read_error(path, error)
    advice = {
        sqlite3.SQLITE_FULL: "make room on the disk, then start again",
        sqlite3.SQLITE_BUSY: "another program is writing to it: close that program",
        sqlite3.SQLITE_READONLY: "file and directory must be writable",
        sqlite3.SQLITE_CANTOPEN: "file and directory must be writable",
        sqlite3.SQLITE_CONSTRAINT: "another program has written to it: verify it",
    }.get(code, "check disk and permissions")
    return JournalWriteError(f"{path} cannot be written ({error}): {advice}")


# ---------------------------------------------------------------------------- first look


def is_empty(path: Path, connection: sqlite3.Connection) -> bool:
    """Return whether the file holds nothing at all, so that a journal may be made in it.

    Raises: JournalFormatError for a file of one byte, which SQLite takes for an empty one.
    """
    if size_bytes(path) == 1:
        raise JournalFormatError(f"{path} is not a journal (it holds one byte)")
    (objects,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    return bool(objects == 0 and _pragma(connection, "application_id") == 0)


def read_meta(path: Path, connection: sqlite3.Connection) -> Meta:
    """Return what never changes in a journal, after a look whether this code can read the file.

    Raises: JournalFormatError.
    """
    with reading_errors(path):
        if _pragma(connection, "application_id") != schema.APPLICATION_ID:
            raise JournalFormatError(f"{path} is an SQLite database, but not a journal")
        version = _pragma(connection, "user_version")
        if version > schema.SCHEMA_VERSION:
            raise JournalFormatError(
                f"{path} was made by a newer laneway (schema {version}, this one reads"
                f" {schema.SCHEMA_VERSION}): update laneway"
            )
        if version < 1:
            raise JournalFormatError(f"{path} has schema {version}, which never was: damaged")
        rows = connection.execute("SELECT key, value FROM meta").fetchall()
    meta = {schema.text(key): schema.text(value) for key, value in rows}
    if set(meta) != set(schema.META_KEYS):
        raise JournalFormatError(f"{path}: meta holds {sorted(meta)}, not {schema.META_KEYS}")
    if meta["schema_version"] != str(version) or meta["tokens"] not in TOKENS_MODES:
        raise JournalFormatError(
            f"{path}: meta says schema_version={meta['schema_version']!r},"
            f" tokens={meta['tokens']!r}, which cannot be: damaged"
        )
    return Meta(meta, None if version == 1 else _read_edges(path, connection))


def _read_edges(path: Path, connection: sqlite3.Connection) -> Edges:
    """Return the codes of a file. Raises: JournalFormatError."""
    with reading_errors(path):
        rows = connection.execute(schema.SELECT_EDGES).fetchall()
    if any(classes != b"text" * 4 for *_, classes in rows):
        raise JournalFormatError(f"{path}: edge holds what is not text: damaged")
    try:
        return edges_of((code, *map(schema.text, names)) for code, *names, _ in rows)
    except ValueError as error:
        raise JournalFormatError(f"{path}: {error}: damaged") from error


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)


def read_head(path: Path, connection: sqlite3.Connection, origin: Head) -> Head:
    """Return where the journal ends, after a look whether its last row continues the one before.

    Raises: JournalFormatError naming the step.
    """
    with reading_errors(path):
        (last,) = connection.execute(schema.SELECT_LAST_STEP).fetchone()
        if last is None:
            return origin
        found = connection.execute(schema.SELECT_ROWS, (last - 1, last, 2)).fetchall()
    rows = [RawRow._make(row) for row in found]
    before = trusted_head(rows[0]) if len(rows) == 2 else origin
    head, *_ = follow(before, rows[-1])
    return head
