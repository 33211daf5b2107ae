"""Files that are not what a command takes them for: an exit code, one line, nothing changed.

Commands, requests and artifacts that are refused in words: ``test_bad_inputs.py`` and neighbours.

Source: README.md (exit codes).
"""

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import MODELS, laneway

from laneway.adapters import open_device
from laneway.engine import Engine, Request, Sampling
from laneway.journal import open_journal

TINY = MODELS / "tiny-dense"
USAGE, JOURNAL = 2, 4


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        *(f"journal {name} notes.txt" for name in ("show", "stats", "replay", "verify")),
        *("journal timeline notes.txt lane/1", "journal copy notes.txt copy.db"),
        f"run --prompt-tokens 1 --model {TINY} --journal notes.txt",
    ],
)
def test_a_file_that_is_no_journal_is_refused_and_stays_as_it_is(
    command: str, tmp_path: Path
) -> None:
    text = "these are notes, not a journal\n" * 40
    (tmp_path / "notes.txt").write_text(text)
    laneway(*command.split()).refused(JOURNAL, "notes.txt", "not a journal")
    assert (tmp_path / "notes.txt").read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_database_of_another_kind_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE step (x)")
    other.close()
    laneway("journal", "show", "other.db").refused(JOURNAL, "other.db", "not a journal")
    run = ("run", "--prompt-tokens", 1, "--model", TINY, "--journal", "other.db")
    laneway(*run).refused(JOURNAL, "other.db")


def test_a_journal_in_use_is_refused_but_can_be_read() -> None:
    run = ("run", "--prompt-tokens", 1, "--model", TINY, "--device", "sim:?clock=virtual")
    laneway(*run, "--max-tokens", 2, "--seed", 1, "--journal", "run.db", "--json").done()
    with open_journal("run.db"):
        laneway(*run, "--journal", "run.db").refused(JOURNAL, "run.db", "in use by process")
        laneway("journal", "stats", "run.db").done()
        laneway("journal", "copy", "run.db", "copy.db").done()
    assert "verify: ok" in laneway("journal", "verify", "copy.db").done().out


@pytest.fixture
def unfinished(tmp_path: Path) -> Iterator[Path]:
    """A journal whose engine went away in the middle of a request."""
    journal = open_journal(tmp_path / "run.db")
    device = open_device("sim:?clock=virtual")
    engine = Engine(device=device, journal=journal, threads=False)
    engine.load("m", str(TINY))
    engine.submit(Request(model="m", prompt=(1, 2), max_tokens=9, sampling=Sampling(seed=1)))
    for _ in range(9):
        engine.step()
    journal.close()
    yield tmp_path / "run.db"
    device.stop()


def test_unfinished_requests_ask_for_another_file(unfinished: Path) -> None:
    before = laneway("journal", "stats", "run.db", "--json").done().row
    assert before["requests"]["open"] == 1
    run = ("run", "--prompt-tokens", 1, "--model", TINY, "--device", "sim:?clock=virtual")
    for _ in range(2):
        refused = laneway(*run, "--journal", "run.db")
        refused.refused(JOURNAL, "1 request has no ending in the journal", "another file")
    assert laneway("journal", "stats", "run.db", "--json").done().row["steps"] == before["steps"]
    assert "verify: ok" in laneway("journal", "verify", "run.db").done().out


def test_an_entity_that_cannot_be_is_a_usage_error(unfinished: Path) -> None:
    for entity in ("lane", "lane/x", "boat/1", "lane/-1"):
        laneway("journal", "timeline", "run.db", entity).refused(USAGE, entity)


def test_numbers_beyond_any_step_match_nothing_and_cannot_be_replayed(unfinished: Path) -> None:
    beyond = 10**30
    for option, number in (("--first", beyond), ("--last", -beyond), ("--request", beyond)):
        assert laneway("journal", "show", "run.db", option, number).done().out == ""
    whole = laneway("journal", "show", "run.db").done().out
    for option, number in (("--last", beyond), ("--first", -beyond)):
        assert laneway("journal", "show", "run.db", option, number).done().out == whole
    steps = laneway("journal", "stats", "run.db", "--json").done().row["steps"]
    for number in (beyond, 9999):
        refused = laneway("journal", "replay", "run.db", "--until", number, "--json")
        refused.refused(USAGE, "--until", f"1 to {steps}")


def test_a_copy_replaces_nothing(unfinished: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.db").write_text("mine")
    laneway("journal", "copy", "run.db", "copy.db").refused(USAGE, "copy.db", "another name")
    assert (tmp_path / "copy.db").read_text() == "mine"
    laneway("journal", "copy", "run.db", "nowhere/copy.db").refused(JOURNAL, "nowhere/copy.db")


# ------------------------------------------------------------------------ damaged models


def damage(folder: Path, name: str, how: str) -> None:
    path = folder / name
    raw = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "cut":
        raw = raw[: len(raw) // 2]
    elif how == "empty":
        raw = bytearray()
    elif how == "noise":
        raw[:64] = bytes(range(64))
    path.write_bytes(raw)


DAMAGES = [
    (name, how)
    for name in ("config.json", "model.safetensors", "golden.npz")
    for how in ("missing", "cut", "empty", "noise")
    if (name, how) != ("golden.npz", "missing")  # golden runs are then computed while packing
]


@pytest.mark.parametrize(("name", "how"), DAMAGES)
def test_a_damaged_model_folder_is_refused_by_name(name: str, how: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    damage(folder, name, how)
    run = ("run", "--prompt-tokens", 1, "--model", folder, "--device", "sim:?clock=virtual")
    laneway(*run).refused(USAGE, name)
    laneway("model", "pack", folder, tmp_path / "out").refused(USAGE, name)
    laneway("model", "inspect", folder).refused(USAGE, name)
    assert not (tmp_path / "out").exists()


def test_a_model_that_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    (folder / "model.safetensors").chmod(0o666)
    run = ("run", "--prompt-tokens", 1, "--model", folder, "--device", "sim:?clock=virtual")
    laneway(*run).refused(USAGE, "model.safetensors", "chmod o-w")
