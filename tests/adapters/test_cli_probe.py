"""``laneway probe``: processes, records, exit codes; and what the records turn on.

The checks themselves: ``test_probe.py``. Source: R5.2, R1.2, G22, E31, README.md (exit codes).
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command_line import MODELS, laneway

from laneway.adapters import read_records

TINY = MODELS / "tiny-dense"
NO, USAGE, DEVICE = 1, 2, 3
VIRTUAL = "sim:?clock=virtual"
PERSONA = f"{VIRTUAL}&persona=calrt-0.7.6"
IN_FLIGHT_CHECKS = ("counters", "status", "ping-pong", "interleave")


def feature(url: str, name: str, calbin: str, *more: object) -> dict[str, Any]:
    """Return what ``laneway devices`` says of a feature with a calbin, else with any."""
    row = laneway("devices", url, "--json", *more).done().row
    found = {each["calbin"]: each for each in row["features"] if each["feature"] == name}
    told: dict[str, Any] = found.get(calbin) or found["any"]
    return told


@pytest.mark.slow
def test_a_probe_turns_on_what_it_proved_and_nothing_else(tmp_path: Path) -> None:
    """The whole circle, on a board that speaks like a runtime of which little is known."""
    file = tmp_path / "board.json"
    done = laneway(
        *("probe", PERSONA, "--model", TINY, "--record", file, "--json"),
        *(f"--check={check}" for check in IN_FLIGHT_CHECKS),
    ).done()
    assert [(row["test"], row["capability"], row["result"]) for row in done.rows] == [
        ("counters", "COUNTERS", "passed"),
        ("status", "POLL_THREADSAFE", "passed"),
        ("ping-pong", "PING_PONG", "passed"),
        ("interleave", "IN_FLIGHT", "passed"),
    ]
    records = read_records(file)
    assert [record.capability for record in records] == [row["capability"] for row in done.rows]
    (calbin,) = {record.fingerprint.calbin_sha256 for record in records}
    assert {record.fingerprint.backend for record in records} == {"sim"}

    before = feature(PERSONA, "two_in_flight", calbin)
    assert not before["on"] and "PING_PONG has no verification record" in before["why"]
    after = feature(PERSONA, "two_in_flight", calbin, "--records", file)
    assert (after["on"], after["value"], after["calbin"]) == (True, 2, calbin)
    assert not feature(PERSONA, "batch", calbin, "--records", file)["on"]
    boards = feature(PERSONA, "several_boards", calbin, "--records", file)
    assert "CalRT 0.7.6 does not support it" in boards["why"]
    other = f"{PERSONA}&driver_version=9.9"
    elsewhere = feature(other, "two_in_flight", calbin, "--records", file)
    assert "of another system: driver '0.1.0', not '9.9'" in elsewhere["why"]

    run = ("run", "--prompt-tokens", "1,2,3", "--prompt-tokens", "4,5", "--model", TINY, "--json")
    sampled = ("--max-tokens", 6, "--seed", 3, "--device", PERSONA)
    alone = laneway(*run, *sampled).done().rows
    together = laneway(*run, *sampled, "--records", file).done().rows
    assert [row["tokens"] for row in together] == [row["tokens"] for row in alone]


def test_a_check_that_fails_is_a_record_that_keeps_the_feature_off(tmp_path: Path) -> None:
    plan, file = tmp_path / "plan", tmp_path / "board.json"
    plan.write_text("fault a kind=counter_skew on=counters field=left n=1 count=inf\n")
    lying = f"{VIRTUAL}&faults={plan}"
    failed = laneway(
        *("probe", lying, "--model", TINY, "--check", "counters", "--record", file, "--json")
    )
    assert (failed.code, failed.err) == (NO, "")
    assert failed.row["result"] == "failed" and "left 0 to 1" in failed.row["note"]
    (record,) = read_records(file)
    assert (record.capability, record.passed) == ("COUNTERS", False)
    calbin = record.fingerprint.calbin_sha256
    told = feature(VIRTUAL, "two_in_flight", calbin, "--records", file)
    assert not told["on"] and "COUNTERS failed its check counters" in told["why"]
    passed = laneway(
        *("probe", VIRTUAL, "--model", TINY, "--check", "counters", "--record", file, "--json")
    ).done()
    assert passed.row["result"] == "passed" and len(read_records(file)) == 1
    assert feature(VIRTUAL, "two_in_flight", calbin, "--records", file)["on"]


def test_what_the_device_says_no_to_is_skipped_and_no_record(tmp_path: Path) -> None:
    file = tmp_path / "board.json"
    done = laneway(
        *("probe", f"{VIRTUAL}&overlap=0", "--model", TINY, "--check", "parallel-mode"),
        *("--record", file),
    )
    assert done.code == 0 and "the device says no to it" in done.out
    assert "checking parallel-mode" in done.err
    assert read_records(file) == ()


# ---------------------------------------------------------------------------- processes that end


def replace_python(folder: Path, monkeypatch: pytest.MonkeyPatch, otherwise: str) -> None:
    """Let every process but the first, which describes the system, do something else."""
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\ncase "$(cat "$3")" in\n*describe*) exec "{sys.executable}" "$@" ;;\nesac\n'
        f"{otherwise}\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


@pytest.mark.parametrize(
    ("otherwise", "words"),
    [
        ("kill -SEGV $$", "its process was ended by SIGSEGV"),
        ("echo 'no such thing' >&2; exit 9", "exit code 9 and no answer: no such thing"),
        ("exit 0", "exit code 0 and no answer"),
        ('printf "{" > "$4"; exit 0', "exit code 0 and no answer"),
        ("sleep 600", "no answer within 2 s: its process was ended"),
    ],
)
def test_a_process_that_ends_badly_is_a_failed_check(
    otherwise: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "board.json"
    replace_python(tmp_path, monkeypatch, otherwise)
    failed = laneway(
        *("probe", VIRTUAL, "--model", TINY, "--check", "batch", "--record", file),
        *("--timeout", 2, "--json"),
    )
    assert (failed.code, failed.err) == (NO, "")
    assert [(row["capability"], row["result"]) for row in failed.rows] == [
        ("BATCH_LANES", "failed"),
        ("LANE_RULE", "failed"),
    ]
    assert all(words in row["note"] for row in failed.rows)
    assert [record.passed for record in read_records(file)] == [False, False]


def test_a_system_that_cannot_be_described_is_an_error_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nkill -ABRT $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    called = laneway("probe", VIRTUAL, "--model", TINY, "--json")
    called.refused(DEVICE, "cannot be probed: its process was ended by SIGABRT")


# ---------------------------------------------------------------------------- usage


def test_bad_usage_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("notes")
    base = ("probe", VIRTUAL, "--model", TINY, "--json")
    laneway(*base, "--check", "luck").refused(USAGE, "'luck'", "known are golden, counters")
    laneway(*base, "--record", file).refused(USAGE, "notes.txt", "not a file of verification")
    assert file.read_text() == "notes"
    laneway(*base, "--seed", -1).refused(USAGE, "seed")
    laneway("probe", VIRTUAL, "--model", tmp_path / "absent").refused(USAGE, "absent")
    laneway("probe", "nothing:", "--model", TINY, "--json").refused(USAGE, "'nothing'")
    laneway("probe", "sim:?overlap=9", "--model", TINY, "--json").refused(USAGE, "overlap")


def test_the_answer_of_a_probe_is_json(tmp_path: Path) -> None:
    row = laneway("probe", VIRTUAL, "--model", TINY, "--check", "golden", "--json").done().row
    assert set(row) == {"test", "capability", "result", "value", "note"}
    assert json.loads(json.dumps(row)) == row and row["value"] == 1 << 2
