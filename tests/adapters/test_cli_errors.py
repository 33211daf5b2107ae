"""Bad input on the command line: an exit code, one line that says what to do, no traceback.

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
USAGE, DEVICE, JOURNAL = 2, 3, 4


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("nosuch", ["No such command", "laneway --help"]),
        ("--nosuch", ["No such option", "--help"]),
        ("run", ["at least one prompt", "laneway run --help"]),
        ("run a --nosuch 1", ["--nosuch", "laneway run --help"]),
        ("run a --max-tokens x", ["--max-tokens"]),
        ("run a --max-tokens 0", ["--max-tokens", "1"]),
        ("run a --temperature 9", ["temperature", "0 and 2", "9"]),
        ("run a --temperature nan", ["temperature", "finite"]),
        ("run a --top-k -7", ["top_k", "-7"]),
        ("run a --top-p 0", ["top_p", "at most 1"]),
        ("run a --min-p 2", ["min_p", "0 and 1"]),
        ("run a --seed -1", ["seed", "2^64-1"]),
        ("run a --seed 18446744073709551616", ["seed", "2^64-1"]),
        ("run a --deadline 0", ["deadline_s", "positive"]),
        ("run a --stop=", ["stop string", "1 to 1024"]),
        ("run --prompt-tokens 1,a", ["--prompt-tokens", "1,2,3", "1,a"]),
        ("run --prompt-tokens 1,,2", ["--prompt-tokens", "1,,2"]),
        ("run a --model nowhere", ["nowhere", "no such folder"]),
        ("run a --model /dev/null", ["/dev/null", "not a folder"]),
        ("run a --device nosuch:", ["'nosuch'", "known are", "sim"]),
        ("run a --device sim", ["a name and a colon", "sim:"]),
        ("run a --device sim:huge", ["huge", "tiny"]),
        ("run a --device sim:?speed=9", ["'speed'", "known are", "clock"]),
        ("run a --device sim:?clock=fast", ["clock=fast", "real", "virtual"]),
        ("run a --device sim:?clock=manual", ["stands still", "clock=real"]),
        ("run a --device sim:?seed=abc", ["seed"]),
        ("run a --device sim:?seed=1&seed=2", ["seed", "twice"]),
        ("run a --device sim:?faults=nowhere", ["nowhere", "cannot be read"]),
        ("run a --device npurt:/nowhere.so", ["/nowhere.so", "LANEWAY_NPURT"]),
        ("run a --device npurt:/dev/null", ["/dev/null"]),
        ("run a --journal postgresql://host/db", ["PostgreSQL", "SQLite file"]),
        ("run a --journal=", ["empty"]),
        ("devices sim:?x=1", ["'x'", "known are"]),
        ("machines explain nosuch ready", ["'nosuch'", "request, job, buffer"]),
        ("machines explain lane nosuch", ["'nosuch'", "reserve"]),
        ("machines explain lane", ["Missing argument", "laneway machines explain --help"]),
        ("model pack nowhere out", ["nowhere", "no such folder"]),
        (f"model pack {TINY} out --batch a", ["--batch", "1,4"]),
        (f"model pack {TINY} out --batch 0", ["batch"]),
        (f"model pack {TINY} out --layout nine", ["nine", "tp2"]),
        (f"model pack {TINY} out --lanes 1000", ["lanes"]),
        (f"model pack {TINY} out --context 100000", ["context"]),
        (f"model pack {TINY} /usr", ["/usr", "another destination"]),
        ("model inspect nowhere", ["nowhere", "no such folder"]),
        ("model verify nowhere", ["nowhere", "no such folder"]),
        ("model verify", ["Missing argument", "laneway model verify --help"]),
        (f"model verify {TINY} --device sim:null", ["no golden run can be compared"]),
        ("journal show", ["Missing argument", "laneway journal show --help"]),
        ("journal timeline run.db", ["Missing argument"]),
    ],
)
def test_usage_errors(command: str, words: list[str], tmp_path: Path) -> None:
    laneway(*command.split()).refused(USAGE, *words)
    assert list(tmp_path.iterdir()) == [], "nothing was left behind"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("journal show nowhere.db", ["nowhere.db", "check the path"]),
        ("journal stats nowhere.db", ["nowhere.db", "check the path"]),
        ("journal timeline nowhere.db buffer/1", ["nowhere.db", "check the path"]),
        ("journal replay nowhere.db", ["nowhere.db", "check the path"]),
        ("journal verify nowhere.db", ["nowhere.db", "check the path"]),
        ("journal copy nowhere.db copy.db", ["nowhere.db", "check the path"]),
        ("run a --journal nowhere/run.db", ["nowhere/run.db", "directory"]),
        ("run a --journal .", ["a directory"]),
    ],
)
def test_journal_errors(command: str, words: list[str], tmp_path: Path) -> None:
    if words == ["a directory"]:
        words = [str(tmp_path)]
    laneway(*command.split()).refused(JOURNAL, *words)
    assert list(tmp_path.iterdir()) == [], "nothing was left behind"


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
        refused.refused(JOURNAL, "1 requests in the journal have no ending", "another file")
    assert laneway("journal", "stats", "run.db", "--json").done().row["steps"] == before["steps"]
    assert "verify: ok" in laneway("journal", "verify", "run.db").done().out


def test_an_entity_that_cannot_be_is_a_usage_error(unfinished: Path) -> None:
    for entity in ("lane", "lane/x", "boat/1", "lane/-1"):
        laneway("journal", "timeline", "run.db", entity).refused(USAGE, entity)


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


def test_a_board_with_too_little_memory_is_told_with_numbers() -> None:
    device = "sim:?clock=virtual&dram_bytes=100000"
    run = ("run", "--prompt-tokens", 1, "--model", TINY, "--device", device)
    laneway(*run).refused(USAGE, "needs", "100000")
