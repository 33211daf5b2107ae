"""A copy is one whole journal at one instant, whoever writes meanwhile."""

import sqlite3
from pathlib import Path

import pytest
from support.journal_steps import story, ticks

from laneway.engine.errors import ConfigurationError, JournalFormatError, JournalWriteError
from laneway.journal import copy, open_journal
from laneway.journal.replay import verify


def test_copy_of_a_live_journal(tmp_path: Path) -> None:
    source = tmp_path / "run.db"
    with open_journal(source) as journal:
        journal.append(story())
        copied = copy(source, tmp_path / "copy.db")
        journal.append(ticks(6, 3))
        assert list(journal.read()) == [*story(), *ticks(6, 3)]
    assert copied == tmp_path / "copy.db"
    assert copied.stat().st_mode & 0o777 == 0o600
    with open_journal(copied) as other:
        assert other.journal_id == journal.journal_id
        assert list(other.read()) == story()
        other.append(ticks(6, 1))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["copy.db", "run.db"]


def test_copy_verifies(core_file: Path, tmp_path: Path) -> None:
    copied = copy(core_file, tmp_path / "copy.db")
    with (
        open_journal(copied, read_only=True) as one,
        open_journal(core_file, read_only=True) as two,
    ):
        assert verify(one) == verify(two)
        assert verify(one).ok


def test_what_exists_is_not_overwritten(story_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "other"
    target.write_text("precious")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for destination in (target, story_file, tmp_path, tmp_path / "dangling"):
        with pytest.raises(ConfigurationError, match="exists already"):
            copy(story_file, destination)
    assert target.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_a_source_that_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalFormatError, match="no such journal"):
        copy(tmp_path / "missing.db", tmp_path / "copy.db")
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE x (y)").connection.close()
    with pytest.raises(JournalFormatError, match="not a journal"):
        copy(tmp_path / "other.db", tmp_path / "copy.db")
    assert not (tmp_path / "copy.db").exists()


def test_nothing_is_left_of_a_failed_copy(story_file: Path, tmp_path: Path) -> None:
    with pytest.raises(JournalWriteError, match="cannot be made"):
        copy(story_file, tmp_path / "nowhere" / "copy.db")
    damaged = story_file.read_bytes()
    story_file.write_bytes(damaged[:-4096])
    with pytest.raises(JournalFormatError):
        copy(story_file, tmp_path / "copy.db")
    assert not (tmp_path / "copy.db").exists()
