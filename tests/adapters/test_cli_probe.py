"""``laneway probe``: processes, records, exit codes; and what the records turn on.

The checks themselves: ``test_probe.py``. Source: R5.2, R1.2, G22, E31, README.md (exit codes).
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from support.command_line import MODELS, laneway

from laneway.adapters import probe, probe_child, read_records
from laneway.adapters.calbin import prepare

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


def answer_here(request: probe_child.Request, place: Path) -> Path:
    """Do in this process what a process of a probe does; return the file with its answer."""
    asked, answer = place / "request", place / "answer"
    asked.write_bytes(msgspec.json.encode(request))
    with mock.patch.object(sys, "argv", ["probe_child", str(asked), str(answer)]):
        with mock.patch.object(os, "_exit", side_effect=AssertionError), suppress(SystemExit):
            probe_child.main()
    return answer


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the checks of a probe run here: a process takes a second, and others show what it is for.

    Why no ``os._exit``: it is for a device that may still be at work, which none of these leaves.
    """

    def ask(request: probe_child.Request, place: Path, timeout_s: float) -> probe_child.Answer:
        answer = answer_here(request, place).read_bytes()
        return msgspec.json.decode(answer, type=probe_child.Answer)

    monkeypatch.setattr(probe, "_ask", ask)


@pytest.fixture(scope="module")
def description(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first process of a probe says, in a file."""
    with prepare(TINY) as calbin:
        request = probe_child.Request(
            url=VIRTUAL, calbin=str(calbin), check=probe_child.DESCRIBE, seed=1
        )
        return answer_here(request, tmp_path_factory.mktemp("description"))


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


@pytest.mark.usefixtures("in_this_process")
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


@pytest.mark.usefixtures("in_this_process")
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


def replace_python(
    folder: Path, monkeypatch: pytest.MonkeyPatch, otherwise: str, description: Path
) -> None:
    """Let the first process say what the system is, and every other one do something else."""
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\ncase "$(cat "$3")" in\n*describe*) exec cp "{description}" "$4" ;;\nesac\n'
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
        ("sleep 600", "no answer within 1 s: its process was ended"),
    ],
)
def test_a_process_that_ends_badly_is_a_failed_check(
    otherwise: str,
    words: str,
    description: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "board.json"
    replace_python(tmp_path, monkeypatch, otherwise, description)
    failed = laneway(
        *("probe", VIRTUAL, "--model", TINY, "--check", "batch", "--record", file),
        *("--timeout", 1 if otherwise.startswith("sleep") else 60, "--json"),
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


@pytest.mark.usefixtures("in_this_process")
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


@pytest.mark.usefixtures("in_this_process")
def test_the_answer_of_a_probe_is_json(tmp_path: Path) -> None:
    row = laneway("probe", VIRTUAL, "--model", TINY, "--check", "golden", "--json").done().row
    assert set(row) == {"test", "capability", "result", "value", "note"}
    assert json.loads(json.dumps(row)) == row and row["value"] == 1 << 2
