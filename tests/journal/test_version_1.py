"""A file of schema version 1 is read, proven and continued as it is.

``files/version_1.journal`` was written by the code before version 2: ``run_core`` twice, the second
time with a fault. What stands in it is known from then.
"""

import shutil
import sqlite3
from pathlib import Path

import pytest
from support.journal_steps import run_core, tamper

from laneway.journal import copy, open_journal
from laneway.journal.explain import explain
from laneway.journal.replay import fold, verify
from laneway.journal.timeline import timeline

FILE = Path(__file__).parent / "files" / "version_1.journal"
CHAIN = "7abe1bbe3c69a2230962e2eed42d702a1b494abc8c9bb5df3de355f6ce57ba0f"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Return a copy of the file."""
    return Path(shutil.copy(FILE, tmp_path / "old.db"))


def test_it_verifies(old: Path) -> None:
    with open_journal(old, read_only=True) as journal:
        report = verify(journal)
        assert (report.ok, report.asked) == (True, "decide"), report.reason
        assert (report.steps, report.incarnations) == (97, 2)
        assert (report.events, report.entity_events) == (281, 331)
        assert report.chain == CHAIN
        assert fold(journal).step == 97


def test_its_views_are_those_of_its_version(old: Path) -> None:
    connection = sqlite3.connect(f"file:{old}?mode=ro", uri=True)
    (count,) = connection.execute("SELECT count(*) FROM entity_event").fetchone()
    (first,) = connection.execute("SELECT events FROM step WHERE step = 1").fetchone()
    connection.close()
    assert count == 331
    assert first == '[["device",[0],"open","closed","serving",1,0,{"incarnation":1}]]'


def test_timeline_and_explain_read_it(old: Path) -> None:
    with open_journal(old, read_only=True) as journal:
        assert len(list(timeline(journal, "buffer/1"))) > 5
        assert len(explain(journal).stories) == 1


def test_it_goes_on_in_the_old_form(old: Path) -> None:
    with open_journal(old) as journal:
        run_core(journal, wall_clock_ns=1_900_000_000_000_000_000)
        assert verify(journal).ok
    with open_journal(old, read_only=True) as journal:
        report = verify(journal)
        assert report.ok and report.incarnations == 3, report.reason
        assert all(row.events.startswith((b'[["', b"[]")) for row in journal.rows())  # type: ignore[attr-defined]


def test_a_copy_of_it_is_of_its_version(old: Path, tmp_path: Path) -> None:
    with open_journal(copy(old, tmp_path / "copy.db"), read_only=True) as journal:
        assert verify(journal).chain == CHAIN


@pytest.mark.parametrize("column", ["input", "events"])
def test_a_changed_letter_is_found(old: Path, column: str) -> None:
    tamper(old, (f"UPDATE step SET {column} = replace({column}, '1', '2') WHERE step = 40", ()))
    with open_journal(old, read_only=True) as journal:
        report = verify(journal)
        assert (report.ok, report.asked, report.step) == (False, "chain", 40)
