"""Journals to test with."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.journal_steps import run_core, story

from laneway.journal import Journal, open_journal

Factory = Callable[..., Journal]


@pytest.fixture(params=["memory", "path", "url"])
def make_journal(request: pytest.FixtureRequest, tmp_path: Path) -> Factory:
    """Return a function that opens an empty journal of each kind."""
    targets = {
        "memory": None,
        "path": tmp_path / "run.db",
        "url": f"sqlite:///{tmp_path / 'run.db'}",
    }
    return lambda **options: open_journal(targets[request.param], **options)


@pytest.fixture
def story_file(tmp_path: Path) -> Path:
    """Return a closed journal file with the story in it."""
    path = tmp_path / "story.db"
    with open_journal(path) as journal:
        journal.append(story())
    return path


@pytest.fixture(scope="session")
def core_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a closed journal file of two incarnations of the real core, the second with a fault.

    It is shared: only for tests that read.
    """
    path = tmp_path_factory.mktemp("core") / "core.db"
    with open_journal(path) as journal:
        run_core(journal)
        run_core(journal, fault=True, wall_clock_ns=1_800_000_000_000_000_000)
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Most journals here are stories written by hand, or damaged: no engine decided them."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.unproven_journals)
