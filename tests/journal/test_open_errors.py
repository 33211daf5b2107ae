"""What cannot be opened, read or written is refused with one clear line, and left as it was."""

import os
import resource
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.journal_steps import story, tamper, ticks

from laneway.engine.errors import (
    ConfigurationError,
    JournalError,
    JournalFormatError,
    JournalWriteError,
)
from laneway.journal import MemoryJournal, SqlJournal, open_journal


def one_line(error: pytest.ExceptionInfo[JournalError]) -> str:
    """Return the message, which is one line and not empty."""
    message = str(error.value)
    assert message and "\n" not in message
    return message


@contextmanager
def as_nobody() -> Iterator[None]:
    """Give up the rights of root for a moment, which would ignore permissions."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder that other users reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


# ---------------------------------------------------------------------------- targets


def test_targets(tmp_path: Path) -> None:
    assert isinstance(open_journal(), MemoryJournal)
    for target in (tmp_path / "a.db", str(tmp_path / "b.db"), f"sqlite:///{tmp_path / 'c.db'}"):
        with open_journal(target) as journal:
            assert isinstance(journal, SqlJournal)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.db", "b.db", "c.db"]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("postgresql://host/db", "PostgreSQL come with a later delivery"),
        ("postgresql+psycopg://user:secret@host/db", "PostgreSQL"),
        ("mysql://host/db", "mysql"),
        ("sqlite://", "sqlite:///FILE"),
        ("sqlite:///:memory:", "sqlite:///FILE"),
        ("sqlite:///x.db?mode=ro", "sqlite:///FILE"),
        ("://", "neither a path nor"),
        ("", "empty"),
    ],
)
def test_targets_that_are_not_served(target: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as error:
        open_journal(target)
    assert "secret" not in str(error.value)


def test_memory_cannot_be_read_again() -> None:
    with pytest.raises(ConfigurationError, match="name a file"):
        open_journal(read_only=True)


def test_token_modes(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with pytest.raises(ConfigurationError, match="full or digest"):
        open_journal(path, tokens="none")
    open_journal(path, tokens="digest").close()
    with open_journal(path) as journal:
        assert journal.tokens == "digest"
    with pytest.raises(ConfigurationError, match="keeps tokens 'digest', not 'full'"):
        open_journal(path, tokens="full")
    with open_journal(path, read_only=True) as journal:
        assert journal.tokens == "digest"


# ---------------------------------------------------------------------------- not a journal


def foreign(path: Path) -> None:
    """Make a database of somebody else."""
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE step (x)")
    connection.close()


def words(path: Path) -> None:
    """Make a text file."""
    path.write_text("this is not a database, it is a letter to a friend\n" * 40)


def newer(path: Path) -> None:
    """Make a journal of the future."""
    open_journal(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 3")
    connection.close()


def short(path: Path) -> None:
    """Cut a journal inside its header."""
    open_journal(path).close()
    os.truncate(path, 60)


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (foreign, "is an SQLite database, but not a journal"),
        (words, "is not a journal"),
        (newer, "made by a newer laneway .schema 3, this one reads 2.: update"),
        (short, "is not a journal|damaged or cut off"),
    ],
)
def test_files_that_are_no_journal_of_ours(
    tmp_path: Path, make: object, says: str, read_only: bool
) -> None:
    path = tmp_path / "run.db"
    assert callable(make)
    make(path)
    before = path.read_bytes()
    with pytest.raises(JournalFormatError, match=says) as error:
        open_journal(path, read_only=read_only)
    assert str(path) in one_line(error)
    assert path.read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} <= {"run.db", "run.db-wal", "run.db-shm"}


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(JournalFormatError, match="no such journal"):
        open_journal(tmp_path / "missing.db", read_only=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty.db").touch()
    with pytest.raises(JournalFormatError, match="is empty"):
        open_journal(tmp_path / "empty.db", read_only=True)
    with pytest.raises(JournalFormatError, match=str(tmp_path)):
        open_journal(tmp_path, read_only=True)


def test_an_empty_file_becomes_a_journal(tmp_path: Path) -> None:
    (tmp_path / "run.db").touch()
    with open_journal(tmp_path / "run.db") as journal:
        journal.append(story())
        assert list(journal.read()) == story()


def test_cut_off_anywhere(tmp_path: Path) -> None:
    """A page that is gone is missed; a cut inside the last page may take nothing but zeros."""
    path = tmp_path / "run.db"
    with open_journal(path) as journal:
        journal.append(ticks(1, 400))
    whole = path.read_bytes()
    assert len(whole) >= 10 * 4096
    for size in (1, 99, 100, 511, 512, 4095, 4096, 4097, 8192, len(whole) - 4096):
        for read_only in (True, False):
            path.write_bytes(whole[:size])
            with pytest.raises(JournalFormatError) as error:
                open_journal(path, read_only=read_only)
            one_line(error)
    for size in range(len(whole) - 4095, len(whole), 273):
        path.write_bytes(whole[:size])
        try:
            with open_journal(path, read_only=True) as journal:
                assert list(journal.read()) == ticks(1, 400)
        except JournalFormatError:
            assert whole[size:].strip(b"\0")


def test_the_last_row_is_looked_at(story_file: Path) -> None:
    tamper(story_file, ("UPDATE step SET at_ns = at_ns + 1 WHERE step = 5", ()))
    with pytest.raises(JournalFormatError, match="step 5: the row is not what was written"):
        open_journal(story_file)


def test_a_damaged_row_is_not_read_as_if_it_were_good(story_file: Path) -> None:
    tamper(story_file, ("UPDATE step SET input = replace(input, '7', '8') WHERE step = 2", ()))
    with open_journal(story_file, read_only=True) as journal:
        reading = journal.read()
        assert next(reading).step == 1
        with pytest.raises(JournalFormatError, match="step 2: the row is not what was written"):
            next(reading)


# ---------------------------------------------------------------------------- permissions


def test_a_folder_that_may_not_be_written(open_folder: Path) -> None:
    with as_nobody(), pytest.raises(JournalWriteError, match="may be written") as error:
        open_journal(open_folder / "run.db")
    one_line(error)
    assert list(open_folder.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JournalWriteError, match="choose a directory"):
        open_journal(tmp_path / "nowhere" / "run.db")
    with pytest.raises(JournalWriteError, match="is a directory"):
        open_journal(tmp_path)


def test_a_closed_journal_is_read_where_nothing_may_be_written(open_folder: Path) -> None:
    path = open_folder / "run.db"
    with open_journal(path) as journal:
        journal.append(story())
    path.chmod(0o444)
    with as_nobody(), open_journal(path, read_only=True) as reader:
        assert list(reader.read()) == story()
        assert reader.findings() == []
    assert [file.name for file in open_folder.iterdir()] == ["run.db"]


def test_a_journal_in_use_is_not_read_as_a_closed_one(open_folder: Path, tmp_path: Path) -> None:
    """Its log is needed, and a log cannot be read where nothing may be written beside it."""
    with open_journal(tmp_path / "run.db") as journal:
        journal.append(story())
        for name in ("run.db", "run.db-wal"):
            shutil.copy(tmp_path / name, open_folder / name)
            (open_folder / name).chmod(0o444)
    with as_nobody(), pytest.raises(JournalFormatError, match="copy both") as error:
        open_journal(open_folder / "run.db", read_only=True)
    one_line(error)


def test_a_file_that_may_not_be_written(open_folder: Path) -> None:
    path = open_folder / "run.db"
    open_journal(path).close()
    path.chmod(0o444)
    open_folder.chmod(0o777)
    with as_nobody(), pytest.raises(JournalWriteError, match="must be writable") as error:
        open_journal(path)
    one_line(error)


def test_a_file_that_may_not_be_read(open_folder: Path) -> None:
    path = open_folder / "run.db"
    open_journal(path).close()
    with as_nobody(), pytest.raises(JournalFormatError, match="check its permissions") as error:
        open_journal(path, read_only=True)
    one_line(error)


# ---------------------------------------------------------------------------- while writing


@contextmanager
def no_file_above(size_bytes: int) -> Iterator[None]:
    """Let the system refuse to make files larger, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_the_journal_at_the_last_whole_call(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    journal = open_journal(path)
    journal.append(story())
    log_bytes = (tmp_path / "run.db-wal").stat().st_size
    with no_file_above(log_bytes + 3 * 4096):
        with pytest.raises(JournalWriteError, match="cannot be written") as error:
            journal.append(ticks(6, 2000))
        one_line(error)
        assert journal.head() == (5, 5000)
    with pytest.raises(JournalWriteError, match="no more steps after an error"):
        journal.append(ticks(6, 1))
    journal.close()
    with open_journal(path) as journal:
        assert list(journal.read()) == story()
        journal.append(ticks(6, 1))


def test_an_interrupt_in_the_middle_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.db"
    journal = SqlJournal.open(path)
    journal.append(story())
    assert journal._writer is not None
    real = journal._writer._cursor

    class Interrupted:
        """A cursor whose second statement meets Ctrl-C."""

        execute = real.execute

        def executemany(self, *parameters: object) -> None:
            real.executemany(*parameters)  # type: ignore[arg-type]
            raise KeyboardInterrupt

    monkeypatch.setattr(journal._writer, "_cursor", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        journal.append(ticks(6, 2))
    with pytest.raises(JournalWriteError, match="no more steps"):
        journal.append(ticks(6, 1))
    journal.close()
    with open_journal(path) as again:
        assert list(again.read()) == story()


def test_another_program_has_written(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    journal = open_journal(path)
    journal.append(story())
    connection = sqlite3.connect(path)
    connection.execute(
        "INSERT INTO step SELECT 6, at_ns, input_kind, input, events, chain FROM step WHERE step=5"
    )
    connection.commit()
    connection.close()
    with pytest.raises(JournalWriteError, match="another program has written to it"):
        journal.append(ticks(6, 1))
    journal.close()
    with pytest.raises(JournalFormatError, match="step 6"):
        open_journal(path)


def test_another_program_holds_the_write_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laneway.journal.connect.BUSY_TIMEOUT_S", 0.0)
    path = tmp_path / "run.db"
    journal = open_journal(path)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    with pytest.raises(JournalWriteError, match="another program is writing"):
        journal.append(story())
    connection.close()
    journal.close()
    with open_journal(path) as journal:
        assert journal.head() == (0, 0)
