"""What holds for the whole suite: profiles, places, the device, the proof of every test's journal.

A journal that an engine wrote must verify, whatever the test was about. Tests that write steps no
engine decided, or damage a file on purpose, say so with the marker ``unproven_journals``.

``--device URL`` runs the tests marked ``board`` on that device, and nothing else.
"""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support.chosen_device import Chosen, choose, chosen
from support.golden_once import remember_golden_runs
from support.proven import prove_once

from laneway.adapters import arena
from laneway.journal import MemoryJournal, SqlJournal, open_journal

settings.register_profile("quick", max_examples=20, deadline=None, derandomize=True)
settings.register_profile(
    "ci",
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", max_examples=2000, deadline=None)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Name a device to run on."""
    group = parser.getgroup("device", "run the tests marked board on a device")
    group.addoption("--device", metavar="URL", help="sim:… or npurt:/path/lib.so")
    group.addoption("--model", metavar="DIR", type=Path, help="an artifact for that device")
    group.addoption(
        "--allow-reset",
        metavar="LEVEL",
        type=int,
        choices=range(5),
        default=0,
        help="the highest level of reset that the device may get, 0 (default): none",
    )
    group.addoption(
        "--results",
        metavar="DIR",
        type=Path,
        default=Path("build/device"),
        help="folder for journals and what the device says of itself (default build/device)",
    )


MEMORY = Path("/dev/shm")
MEMORY_BYTES_MIN = 1 << 30


def _work_in_memory() -> None:
    """Let files of tests lie in memory where there is enough of it and nobody named a place.

    Why: a journal waits for the disk when it is made and closed, thousands of times in a run. What
    tests kill is a process, never the machine, so what a disk would have kept is the same.
    """
    if "TMPDIR" not in os.environ and MEMORY.is_dir() and os.access(MEMORY, os.W_OK):
        if shutil.disk_usage(MEMORY).free >= MEMORY_BYTES_MIN:
            os.environ["TMPDIR"] = str(MEMORY)
            tempfile.tempdir = None


def pytest_collection_finish() -> None:
    """Leave what was collected out of every later search for garbage, and search less often.

    Why: modules and tests live to the end, and most of what a test makes is freed without a search.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 10)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the place of files, the device and the tests for it; say what is left out."""
    _work_in_memory()
    url = config.getoption("--device")
    if url is None:
        return
    if getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--device: one device serves one process, leave out -n")
    config.option.markexpr = "board"
    config.option.reportchars += "s"
    results: Path = config.getoption("--results")
    for old in (results / "journals").glob("run-*.db"):
        old.unlink()
    choose(
        Chosen(
            url=url,
            model=config.getoption("--model"),
            reset_level_max=config.getoption("--allow-reset"),
            results=results,
        )
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the journals of a device prove."""
    named = chosen()
    if named is not None:
        terminalreporter.section("device")
        for line in named.verdict():
            terminalreporter.line(line)


@pytest.fixture(scope="session", autouse=True)
def _remember_golden_runs() -> Iterator[None]:
    """Compute and read golden runs once for each model."""
    with pytest.MonkeyPatch.context() as patch:
        remember_golden_runs(patch)
        yield


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count memory that is kept for good anew in every test, as in a process of its own (E9)."""
    monkeypatch.setattr(arena, "PROCESS", arena.Account())


@pytest.fixture(autouse=True)
def _prove_journals(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Verify every journal that was opened to append in this process, after the test."""
    files: set[Path] = set()
    memories: list[MemoryJournal] = []
    open_file = SqlJournal.open
    begin_memory = MemoryJournal.__init__

    def note_file(path: str, **options: Any) -> SqlJournal:
        journal = open_file(path, **options)
        files.add(Path(path).resolve())
        return journal

    def note_memory(self: MemoryJournal, **options: Any) -> None:
        begin_memory(self, **options)
        memories.append(self)

    monkeypatch.setattr(SqlJournal, "open", note_file)
    monkeypatch.setattr(MemoryJournal, "__init__", note_memory)
    yield
    monkeypatch.undo()
    if request.node.get_closest_marker("unproven_journals") is not None:
        return
    for path in sorted(files):
        if not path.exists():
            continue
        with open_journal(path, read_only=True) as journal:
            prove_once(journal)
    for kept in memories:
        prove_once(kept)
