"""``laneway run`` killed for real, at events that its journal or its own output shows.

What it had printed must be in the journal it leaves, and the same command is then refused with exit
code 4, or goes on with numbers that were never used (decisions 4, 9, 17; G21).
"""

import ctypes
import os
import select
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.command_line import DEMO, laneway
from support.left_behind import (
    UNFINISHED,
    check_lock_is_free,
    check_numbers_rise,
    open_requests,
    read_whole,
    tokens_of,
)

from laneway.adapters.calbin import pack
from laneway.adapters.text import TokenizerText

pytestmark = pytest.mark.slow

BOARD = "sim:?clock=virtual"
ASKED = ("--temperature", "0.8", "--seed", "3")
LONG = ("ROMEO.", "JULIET.", "KING HENRY.", "What news?", *ASKED, "--max-tokens", "240")
IN_MODIFY = 0x2
PROGRAM = "from laneway.adapters.cli import main; main()"

Reached = Callable[["subprocess.Popen[str]", Path], list[str]]


def rows_in(path: Path) -> int:
    """Return how many steps a journal has that another process writes."""
    if not path.exists():
        return 0
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        found = connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'step'")
        if found.fetchone() == (0,):
            return 0
        (count,) = connection.execute("SELECT count(*) FROM step").fetchone()
        return int(count)
    finally:
        connection.close()


@contextmanager
def changes_in(folder: Path) -> Iterator[int]:
    """Lend a descriptor that can be read after a file in the folder was written to."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_CLOEXEC)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    try:
        assert libc.inotify_add_watch(descriptor, os.fsencode(folder), IN_MODIFY) >= 0
        yield descriptor
    finally:
        os.close(descriptor)


def rows(count: int) -> Reached:
    """Wait until the journal has so many steps."""

    def reached(process: "subprocess.Popen[str]", path: Path) -> list[str]:
        assert process.stdout is not None
        ended = process.stdout.fileno()
        with changes_in(path.parent) as changed:
            while rows_in(path) < count:
                ready, _, _ = select.select([changed, ended], [], [])
                assert changed in ready, "it ended before"
                os.read(changed, 1 << 16)
        return []

    return reached


def lines(count: int) -> Reached:
    """Wait until so many lines of answers were printed; return them."""

    def reached(process: "subprocess.Popen[str]", path: Path) -> list[str]:
        assert process.stdout is not None
        return [process.stdout.readline() for _ in range(count)]

    return reached


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed") / "demo"
    pack(DEMO, folder)
    return folder


@pytest.mark.parametrize(
    ("reached", "unfinished"),
    [(rows(9), 0), (lines(1), 4), (lines(12), 4)],
    ids=["9 steps", "1 line", "12 lines"],
)
def test_killed_at(reached: Reached, unfinished: int, demo: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    common = ("--model", str(demo), "--device", BOARD, "--journal", str(path))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "run", *LONG, *common],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    printed = reached(process, path)
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL
    check_lock_is_free(path)
    steps = read_whole(path)
    check_numbers_rise(steps)
    assert len(open_requests(steps)) == unfinished
    check_printed([*printed, *rest.splitlines(keepends=True)], tokens_of(steps))
    again = ("run", "ROMEO.", *ASKED, "--max-tokens", 2, *common, "--json")
    if unfinished:
        laneway(*again).refused(4, f"{unfinished} request", UNFINISHED, "request/1", "another file")
        assert read_whole(path) == steps
    else:
        laneway(*again).done()
        longer = read_whole(path)
        assert longer[: len(steps)] == steps
        check_numbers_rise(longer)


def check_printed(printed: list[str], tokens: dict[int, list[int]]) -> None:
    """Find every whole line that was printed in the text of the tokens that the journal has."""
    tokenizer = TokenizerText(DEMO / "tokenizer.json")
    for line in printed:
        if line.endswith("\n"):
            number, _, text = line.rstrip("\n").partition("| ")
            kept = tokenizer.decode(tokens[int(number)]).split("\n")
            assert text.rstrip() in [each.rstrip() for each in kept], line
