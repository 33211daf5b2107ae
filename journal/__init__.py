"""What remembers: an append-only journal of steps, in an SQLite file or in memory.

``open_journal`` opens one to append or to read; ``replay.fold`` and ``replay.verify`` fold it and
prove it; ``timeline`` and ``stats`` look into it.
"""

import os

import sqlalchemy
from sqlalchemy.exc import ArgumentError

from laneway.engine.errors import ConfigurationError
from laneway.journal.copying import copy
from laneway.journal.memory import MemoryJournal
from laneway.journal.port import ReadableJournal
from laneway.journal.store import SqlJournal

Journal = MemoryJournal | SqlJournal


def open_journal(
    target: str | os.PathLike[str] | None = None,
    *,
    tokens: str | None = None,
    read_only: bool = False,
) -> Journal:
    """Open a journal: None is one in memory, else a path or an SQLAlchemy URL of an SQLite file.

    ``tokens`` is ``full`` or ``digest`` (keeps no prompt, stop string or output token); None is
    what the file has, and ``full`` for a new one. To append, the file is made if it is missing and
    belongs to this journal until ``close``; ``read_only`` opens it beside an engine that writes it.

    Raises: ConfigurationError (a URL or mode that is not served), JournalWriteError (owned by
    another engine, cannot be written), JournalFormatError (not a journal, damaged, newer).
    """
    if target is None:
        if read_only:
            raise ConfigurationError("a journal in memory cannot be opened to read: name a file")
        return MemoryJournal(tokens=tokens or "full")
    path = _path_of(target)
    return SqlJournal.open_to_read(path) if read_only else SqlJournal.open(path, tokens=tokens)


def _path_of(target: str | os.PathLike[str]) -> str:
    path = os.fspath(target)
    if not path:
        raise ConfigurationError("the journal's file name is empty")
    if "://" not in path:
        return path
    try:
        url = sqlalchemy.make_url(path)
    except ArgumentError as error:
        raise ConfigurationError(f"{path!r} is neither a path nor a database URL") from error
    if url.get_backend_name() == "postgresql":
        raise ConfigurationError(
            "journals in PostgreSQL come with a later delivery: name an SQLite file"
        )
    if url.get_backend_name() != "sqlite":
        raise ConfigurationError(
            f"no journal can be kept in {url.get_backend_name()}: name an SQLite file"
        )
    if url.query or not url.database or url.database == ":memory:":
        raise ConfigurationError(
            "a journal's URL is sqlite:///FILE without options; without a target it is in memory"
        )
    return url.database


__all__ = ["Journal", "MemoryJournal", "ReadableJournal", "SqlJournal", "copy", "open_journal"]
