"""What holds for the whole suite: profiles, and the proof of every journal that a test wrote.

A journal that an engine wrote must verify, whatever the test was about. Tests that write steps no
engine decided, or damage a file on purpose, say so with the marker ``unproven_journals``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from laneway.adapters import arena
from laneway.journal import MemoryJournal, SqlJournal, open_journal
from laneway.journal.replay import verify

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
            report = verify(journal)
        assert report.ok, f"{path}: {report.asked}, step {report.step}: {report.reason}"
    for journal in memories:
        report = verify(journal)
        assert report.ok, f"in memory: {report.asked}, step {report.step}: {report.reason}"
