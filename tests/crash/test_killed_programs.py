"""``laneway run`` killed for real, at events that its journal or its own output shows.

What it had printed must be in the journal it leaves, and the same command is then refused with exit
code 4, or goes on with numbers that were never used; with ``--resume`` every open request gets the
answer of a run that nobody killed (decisions 4, 9, 17; G21).
"""

import ctypes
import os
import random
import select
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.command_line import DEMO, laneway, laneway_program
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
LONG = ("ROMEO.", "JULIET.", "KING HENRY.", "What news?", *ASKED, "--max-tokens", "120")
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


@pytest.fixture(scope="module")
def answers(demo: Path) -> list[dict[str, Any]]:
    """The rows of the command when nobody kills it."""
    return laneway("run", *LONG, "--model", demo, "--device", BOARD, "--json").done().rows


@pytest.mark.parametrize(
    ("reached", "unfinished"),
    [(rows(9), 0), (lines(1), 4), (lines(6), 4)],
    ids=["9 steps", "1 line", "6 lines"],
)
def test_killed_at(
    reached: Reached, unfinished: int, demo: Path, answers: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "run.db"
    common = ("--model", str(demo), "--device", BOARD, "--journal", str(path))
    printed = kill(reached, common, path)
    steps = read_whole(path)
    check_numbers_rise(steps)
    assert len(open_requests(steps)) == unfinished
    check_printed(printed, tokens_of(steps))
    again = ("run", "ROMEO.", *ASKED, "--max-tokens", 2, *common, "--json")
    if unfinished:
        laneway(*again).refused(4, f"{unfinished} request", UNFINISHED, "request/1", "another file")
        assert read_whole(path) == steps
        check_resumed(laneway("run", "--resume", *common[2:], "--json").done().rows, answers)
    else:
        laneway(*again).done()
    longer = read_whole(path)
    assert longer[: len(steps)] == steps
    check_numbers_rise(longer)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_killed_and_started_for_real(
    seed: int, demo: Path, answers: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Twenty starts: each journal is left by a killed program and finished by one of its own."""
    path = tmp_path / "run.db"
    common = ("--model", str(demo), "--device", BOARD, "--journal", str(path))
    kill(rows(random.Random(seed).randint(12, 150)), common, path)
    left = open_requests(read_whole(path))
    called = laneway_program("run", "--resume", *common[2:], "--json", folder=tmp_path).done()
    assert {row["request"] for row in called.rows} == left
    check_resumed(called.rows, answers)
    steps = read_whole(path)
    assert not open_requests(steps)
    check_numbers_rise(steps)


def check_resumed(rows: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
    """Hold resumed answers against those of the command that nobody killed, text included."""
    for row in rows:
        assert row == answers[row["request"] - 1] | {"request": row["request"]}


def kill(reached: Reached, common: tuple[str, ...], path: Path) -> list[str]:
    """Run the command until something is reached, kill it, return the lines it had printed."""
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
    return [*printed, *rest.splitlines(keepends=True)]


def check_printed(printed: list[str], tokens: dict[int, list[int]]) -> None:
    """Find every whole line that was printed in the text of the tokens that the journal has."""
    tokenizer = TokenizerText(DEMO / "tokenizer.json")
    for line in printed:
        if line.endswith("\n"):
            number, _, text = line.rstrip("\n").partition("| ")
            kept = tokenizer.decode(tokens[int(number)]).split("\n")
            assert text.rstrip() in [each.rstrip() for each in kept], line
