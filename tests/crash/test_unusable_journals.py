"""A journal that cannot be used is one clear line and exit code 4, and loses nothing.

Damaged, cut off, of a newer schema, in use, read-only, on a full disk: as the command line meets
them. What ``journal/test_open_errors.py`` shows of the functions is not repeated.
"""

import json
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.command_line import MODELS
from support.left_behind import read_whole
from support.warm_parent import Called, WarmParent

from laneway.adapters.calbin import pack
from laneway.journal import open_journal

pytestmark = [pytest.mark.slow, pytest.mark.unproven_journals]

BOARD = "sim:?clock=virtual"
READERS = ("show", "stats", "replay", "verify")
ASKED = ("--prompt-tokens", "1,2", "--max-tokens", "12", "--seed", "1", "--json")


@pytest.fixture(scope="module")
def shared(parent: WarmParent) -> Iterator[Path]:
    """A folder that every user reaches, with a packed model and the journal of one run."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    pack(MODELS / "tiny-dense", folder / "tiny")
    for path in (folder / "tiny", *(folder / "tiny").iterdir()):
        path.chmod(path.stat().st_mode | 0o055)
    try:
        called = parent.call(*run(folder, folder / "good.db"), folder=folder)
        assert (called.code, called.err) == (0, ""), called
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def folder(shared: Path) -> Iterator[Path]:
    """An empty folder beside it."""
    made = Path(tempfile.mkdtemp(dir=shared))
    made.chmod(0o755)
    yield made
    made.chmod(0o755)


def run(shared: Path, journal: Path) -> tuple[str, ...]:
    """Return the words of a run that appends to a journal."""
    return (
        "run",
        *ASKED,
        "--model",
        f"{shared / 'tiny'}",
        "--device",
        BOARD,
        "--journal",
        f"{journal}",
    )


def refused(called: Called, pattern: str) -> None:
    """Hold a call against exit code 4 and one line."""
    assert called.code == 4, called
    assert re.fullmatch(f"laneway: {pattern}\n", called.err), called.err
    assert called.out == "", called


# ---------------------------------------------------------------------------- not usable files


def cut_off(path: Path) -> None:
    """Lose the second half of the file."""
    os.truncate(path, path.stat().st_size // 2)


def overwrite_header(path: Path) -> None:
    """Lose the first bytes of the file."""
    path.write_bytes(b"\0" * 100 + path.read_bytes()[100:])


def make_newer(path: Path) -> None:
    """Pretend that a later laneway made the file."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 7")
    connection.close()


def change_last_row(path: Path) -> None:
    """Change one figure of the last step behind the guards."""
    connection = sqlite3.connect(path)
    (sql,) = connection.execute(
        "SELECT sql FROM sqlite_schema WHERE name = 'step_update'"
    ).fetchone()
    connection.execute("DROP TRIGGER step_update")
    connection.execute(
        "UPDATE step SET at_ns = at_ns + 1 WHERE step = (SELECT max(step) FROM step)"
    )
    connection.execute(sql)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("damage", "pattern", "readers"),
    [
        (cut_off, r"\S*run.db is damaged or cut off \(.*\): use a copy of it", READERS[:3]),
        (overwrite_header, r"\S*run.db is not a journal \(not an SQLite database\)", READERS),
        (
            make_newer,
            r"\S*run.db was made by a newer laneway \(schema 7, this one reads 2\):"
            r" update laneway",
            READERS,
        ),
        (change_last_row, r"step \d+: the row is not what was written.*", ("show", "replay")),
    ],
    ids=["cut off", "header", "newer", "last row"],
)
def test_a_file_that_is_not_as_written(
    damage: Callable[[Path], None],
    pattern: str,
    readers: tuple[str, ...],
    parent: WarmParent,
    shared: Path,
    folder: Path,
) -> None:
    path = Path(shutil.copy(shared / "good.db", folder / "run.db"))
    damage(path)
    before = path.read_bytes()
    refused(parent.call(*run(shared, path), folder=folder), pattern)
    for reader in readers:
        called = parent.call("journal", reader, path, folder=folder)
        assert called.code == 4 and re.fullmatch(f"laneway: {pattern}\n", called.err), called
    assert path.read_bytes() == before, "nobody repairs, nobody loses more"
    assert not path.with_name("run.db.lock").exists()


def test_a_journal_of_a_live_engine(parent: WarmParent, shared: Path, folder: Path) -> None:
    path = Path(shutil.copy(shared / "good.db", folder / "run.db"))
    with open_journal(path):
        called = parent.call(*run(shared, path), folder=folder)
        refused(
            called,
            rf"\S*run.db is in use by process {os.getpid()}: close that engine, or take another"
            r" file \(reading is allowed\)",
        )
        assert parent.call("journal", "verify", path, folder=folder).code == 0
    assert parent.call(*run(shared, path), folder=folder).code == 0


# ---------------------------------------------------------------------------- no files at all


@pytest.mark.parametrize("reader", [*READERS, "copy"])
def test_a_pipe_is_not_waited_for(reader: str, parent: WarmParent, folder: Path) -> None:
    path = folder / "run.db"
    os.mkfifo(path)
    words = ("journal", reader, path, *((folder / "copy.db",) if reader == "copy" else ()))
    called = parent.call(*words, folder=folder)
    refused(called, r"\S*run.db is not a regular file: there is no journal in it")
    assert not (folder / "copy.db").exists()


@pytest.mark.parametrize("target", ["pipe", "/dev/null", "/dev/zero"])
def test_what_is_no_file_takes_no_steps(
    target: str, parent: WarmParent, shared: Path, folder: Path
) -> None:
    path = folder / target  # the last two are absolute: they stand for themselves
    if target == "pipe":
        os.mkfifo(path)
    called = parent.call(*run(shared, path), folder=folder)
    refused(called, rf"{path} is not a regular file: name another one")
    assert not path.with_name(path.name + ".lock").exists()


def link(path: Path) -> None:
    """Lead the name of the lock to a file of somebody else."""
    path.with_name("precious").write_text("mine\n")
    path.symlink_to(path.with_name("precious"))


@pytest.mark.parametrize(
    "make",
    [link, lambda path: path.write_text("my notes\n"), os.mkfifo],
    ids=["link", "file", "pipe"],
)
def test_what_lies_where_the_lock_should_be_is_left_alone(
    make: Callable[[Path], object], parent: WarmParent, shared: Path, folder: Path
) -> None:
    lock = folder / "run.db.lock"
    make(lock)
    called = parent.call(*run(shared, folder / "run.db"), folder=folder)
    refused(
        called,
        r"\S*run.db.lock is in the way and is no lock of a journal: move it, or take another"
        r" journal file",
    )
    kept = {file.name: file.read_text() for file in folder.iterdir() if file.is_file()}
    assert set(kept) <= {"precious", "run.db.lock", "stdout", "stderr"}
    assert kept.get("precious", "mine\n") == "mine\n"
    assert lock.is_fifo() or kept["run.db.lock"] in ("mine\n", "my notes\n")


# ---------------------------------------------------------------------------- rights


def test_a_file_that_may_only_be_read(parent: WarmParent, shared: Path, folder: Path) -> None:
    path = Path(shutil.copy(shared / "good.db", folder / "run.db"))
    path.chmod(0o444)
    folder.chmod(0o777)
    called = parent.call(*run(shared, path), folder=folder, nobody=True)
    refused(called, r"\S*run.db cannot be written \(.*\): file and directory must be writable")
    assert parent.call("journal", "verify", path, folder=folder, nobody=True).code == 0
    assert path.read_bytes() == (shared / "good.db").read_bytes()


def test_a_folder_that_may_only_be_read(parent: WarmParent, shared: Path, folder: Path) -> None:
    for name in ("new.db", "run.db"):
        if name == "run.db":
            shutil.copy(shared / "good.db", folder / name)
        called = parent.call(*run(shared, folder / name), folder=folder, nobody=True)
        refused(
            called,
            rf"\S*{name}: no journal can be written here \(Permission denied\): choose a directory"
            " that exists and may be written",
        )
    assert not (folder / "new.db").exists()


# ---------------------------------------------------------------------------- a full disk


FULL = r"\S*run.db cannot be written \(.*\): (make room on the disk|check disk).*"


@pytest.mark.parametrize("room_bytes", [3_000, 9_000])
def test_a_disk_too_full_to_begin(
    room_bytes: int, parent: WarmParent, shared: Path, folder: Path
) -> None:
    path = folder / "run.db"
    refused(parent.call(*run(shared, path), folder=folder, disk=(0, room_bytes)), FULL)
    assert parent.call(*run(shared, path), folder=folder).code == 0, "with room it is made"
    read_whole(path)


@pytest.mark.parametrize(("appends", "room_bytes"), [(8, 5_000), (30, 0), (60, 9_000)])
def test_a_disk_that_becomes_full(
    appends: int, room_bytes: int, parent: WarmParent, shared: Path, folder: Path
) -> None:
    """The run ends at once; every step that was committed is there, old and new."""
    path = Path(shutil.copy(shared / "good.db", folder / "run.db"))
    before = read_whole(path)
    called = parent.call(*run(shared, path), folder=folder, disk=(appends, room_bytes))
    refused(called, ".*" + FULL)
    kept = read_whole(path)
    assert kept[: len(before)] == before
    assert len(kept) == len(before) + appends + room_bytes // 4120
    stats = parent.call("journal", "stats", path, "--json", folder=folder)
    assert json.loads(stats.out)["steps"] == len(kept)
