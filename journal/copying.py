"""Copy a journal while an engine writes it: everything committed at one instant, in one file."""

import os
import sqlite3
from pathlib import Path

from laneway.engine.errors import ConfigurationError
from laneway.journal.connect import (
    driver_connection,
    reading_engine,
    reading_errors,
    writing_engine,
    writing_errors,
)
from laneway.journal.store import SqlJournal
from laneway.journal.writer import create_file


def copy(source: str | os.PathLike[str], destination: str | os.PathLike[str]) -> Path:
    """Copy a journal file to a new file and return its path; the engine goes on meanwhile.

    Raises: ConfigurationError if the destination exists, JournalFormatError if the source is not
    a journal, JournalWriteError if the copy cannot be written (nothing is left of it then).
    """
    origin = SqlJournal.open_to_read(source).path
    target = Path(destination).absolute()
    if os.path.lexists(target):
        raise ConfigurationError(f"{target} exists already: choose another name for the copy")
    create_file(target)
    try:
        with reading_errors(origin):
            proxied = reading_engine(origin).raw_connection()
        try:
            _back_up(driver_connection(proxied), target)
        finally:
            proxied.close()
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return target


def _back_up(source: sqlite3.Connection, target: Path) -> None:
    with writing_errors(target):
        proxied = writing_engine(target).raw_connection()
        try:
            connection = driver_connection(proxied)
            connection.execute("PRAGMA synchronous=FULL")
            source.backup(connection)
        finally:
            proxied.close()
