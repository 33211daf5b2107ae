"""One engine owns a journal; others are kept off, readers are not (decision 17)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.journal_steps import story, ticks

from laneway.engine.errors import JournalWriteError
from laneway.journal import open_journal
from laneway.journal.replay import TODAY, verify

HOLD = """
import sys
from laneway.journal import open_journal
from support.journal_steps import story
journal = open_journal(sys.argv[1])
journal.append(story())
print("held", flush=True)
sys.stdin.read()
"""


def hold(path: Path) -> "subprocess.Popen[str]":
    """Return a process that owns the journal."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_owner_is_refused_and_told_who(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with open_journal(path) as journal:
        with pytest.raises(JournalWriteError, match=f"in use by process {os.getpid()}"):
            open_journal(path)
        journal.append(story())
    with open_journal(path) as journal:
        journal.append(ticks(6, 1))


def test_every_name_of_a_file_is_the_same_journal(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    (tmp_path / "link.db").symlink_to(path)
    (tmp_path / "sub").mkdir()
    with open_journal(path):
        for name in (tmp_path / "link.db", tmp_path / "sub" / ".." / "run.db"):
            with pytest.raises(JournalWriteError, match="in use"):
                open_journal(name)


def test_readers_are_let_in(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with open_journal(path) as journal:
        journal.append(story())
        with open_journal(path, read_only=True) as reader:
            assert list(reader.read()) == story()
            reading = reader.read()
            next(reading)
            journal.append(ticks(6, 1))
            assert reader.head() == (6, 6000)
            with pytest.raises(JournalWriteError, match="read only"):
                reader.append(ticks(7, 1))


def test_close_leaves_one_file(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with open_journal(path) as journal:
        journal.append(story())
        assert (tmp_path / "run.db.lock").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["run.db"]


def test_files_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with open_journal(tmp_path / "run.db") as journal:
            journal.append(story())
            modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == {name: 0o600 for name in ("run.db", "run.db-wal", "run.db-shm", "run.db.lock")}


def test_a_lock_file_left_behind_locks_nobody(tmp_path: Path) -> None:
    (tmp_path / "run.db.lock").write_text("1\n")
    open_journal(tmp_path / "run.db").close()
    assert not (tmp_path / "run.db.lock").exists()


def test_a_failed_opening_gives_the_lock_back(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    open_journal(path, tokens="digest").close()
    for _ in range(2):
        with pytest.raises(ValueError, match="keeps tokens 'digest'"):
            open_journal(path, tokens="full")
    assert [file.name for file in tmp_path.iterdir()] == ["run.db"]


@pytest.mark.slow
def test_another_process_owns_it_until_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    process = hold(path)
    try:
        with pytest.raises(JournalWriteError, match=f"in use by process {process.pid}"):
            open_journal(path)
        with open_journal(path, read_only=True) as reader:
            assert list(reader.read()) == story()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with open_journal(path) as journal:
        assert journal.head() == (5, 5000)
        journal.append(ticks(6, 1))
        assert verify(journal, code=TODAY).asked == "fold"
