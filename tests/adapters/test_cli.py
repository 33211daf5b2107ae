"""The command line as a whole: help, devices, machines, how errors leave, programs of their own.

Source: README.md (commands, exit codes).
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import MODELS, laneway, laneway_program
from support.native_board import ROOT

from laneway.adapters import cli_run
from laneway.adapters.npurt import CAPABILITIES
from laneway.journal import open_journal
from laneway.journal.replay import fold, verify
from laneway.statemachines import MACHINES
from laneway.statemachines.coupling import couplings_of

COMMANDS = (
    *("run", "devices", "machines", "machines explain"),
    *("model pack", "model inspect", "model verify"),
    *(f"journal {name}" for name in ("show", "stats", "timeline", "replay", "verify", "copy")),
)


@pytest.mark.parametrize("command", ["", "model", "journal", *COMMANDS])
def test_the_help_of_every_command_has_an_example(command: str) -> None:
    called = laneway(*command.split(), "--help").done()
    _, _, examples = called.out.partition("Examples:")
    assert f"laneway {command}".strip() in examples, called.out


@pytest.mark.parametrize("group", ["", "model", "journal"])
def test_a_group_without_a_command_shows_its_help(group: str) -> None:
    called = laneway(*group.split()).done(2)
    assert "Examples:" in called.out


def test_the_version_is_that_of_the_package() -> None:
    version = laneway("--version").done().out.strip()
    assert version and f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()


# ------------------------------------------------------------------------ devices

WORDS = ("value", "scope", "note")


def test_devices_are_listed() -> None:
    rows = laneway("devices", "--json").done().rows
    assert {"sim", "npurt"} <= {row["name"] for row in rows}
    assert all(set(row) == {"name", "target", "distribution", "error"} for row in rows)
    listed = laneway("devices").done().out
    assert "sim" in listed and "npurt" in listed


def test_a_device_says_what_it_is_and_can_do() -> None:
    row = laneway("devices", "sim:tp2-ref?firmware_version=1.2.3", "--json").done().row
    assert (row["backend"], row["firmware_version"]) == ("calsim", "1.2.3")
    assert [chip["used_bytes"] for chip in row["chips"]] == [0, 0]
    capabilities = {capability["name"]: capability for capability in row["capabilities"]}
    assert set(capabilities) <= set(CAPABILITIES) and capabilities["IN_FLIGHT"]["value"] >= 1
    for capability in capabilities.values():
        assert set(capability) == {*("name", "support", "evidence", "source"), *WORDS}
        assert capability["evidence"] in ("C0", "C1", "C2", "C3", "C4", "SIM")
    shown = laneway("devices", "sim:tp2-ref").done().out
    assert "IN_FLIGHT" in shown and "firmware_version: 0.1.0" in shown
    assert "one calbin at a time" in shown


def test_a_device_says_what_is_on_and_why_the_rest_is_not() -> None:
    row = laneway("devices", "sim:", "--json").done().row
    features = {feature["feature"]: feature for feature in row["features"]}
    assert (features["two_in_flight"]["on"], features["two_in_flight"]["value"]) == (True, 2)
    assert features["two_in_flight"]["why"] == "conformance"
    resident = features["resident_models"]
    assert not resident["on"] and "missing is a memory plan" in resident["why"]
    assert (row["inflight_max"], row["chunked_prefill"]) == (2, True)
    bare = laneway("devices", "sim:?records=none", "--json").done().row
    assert [each["feature"] for each in bare["features"] if each["on"]] == ["single_job"]
    shown = " ".join(laneway("devices", "sim:?records=none").done().out.split())
    assert "two_in_flight" in shown and "off: PING_PONG" in shown


# ------------------------------------------------------------------------ machines


def test_machines_are_shown() -> None:
    shown = laneway("machines").done().out
    assert all(f"{machine.name}: {machine.meaning[:40]}" in shown for machine in MACHINES.values())
    rows = laneway("machines", "--json").done().rows
    edges = {
        (machine.name, source, trigger, dest)
        for machine in MACHINES.values()
        for (source, trigger), dest in machine.table.items()
    }
    told = {(row["machine"], row["source"], row["trigger"], row["dest"]) for row in rows}
    assert told == edges and len(rows) == len(edges)
    assert all({"decided_by", "rule"} <= set(row) for row in rows)


def test_the_page_of_the_specification_is_what_the_command_prints() -> None:
    printed = laneway("machines", "--markdown").done().out
    assert printed == (ROOT / "specs" / "machines.md").read_text()


@pytest.mark.parametrize("name", ["buffer", "lane"])
def test_every_state_and_trigger_is_explained(name: str) -> None:
    machine = MACHINES[name]
    for each in (*machine.states, *machine.triggers):
        told = laneway("machines", "explain", name, each).done().out
        assert f"{name} {each}" in told
        if each in machine.triggers:
            assert "rule:" in told and "decided by: " in told
            assert ("in the same step:" in told) == bool(couplings_of(name, each))
    told = laneway("machines", "explain", "buffer", "quarantine").out
    assert "-> quarantined" in told and "decided by: engine/faulting.py" in told


def test_help_waits_for_neither_kernels_nor_database() -> None:
    """What takes seconds to load is loaded by the command that needs it."""
    commands = ["--help", "run --help", "journal show --help", "model --help"]
    program = (
        "import sys\n"
        "from laneway.adapters.cli import main\n"
        f"for command in {commands}:\n"
        "    sys.argv = ['laneway', *command.split()]\n"
        "    try:\n        main()\n    except SystemExit as left:\n        assert not left.code\n"
        "    heavy = {'numba', 'sqlalchemy', 'tokenizers'} & set(sys.modules)\n"
        "    assert not heavy, (command, heavy)\n"
    )
    called = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (called.returncode, called.stderr) == (0, b"")
    assert called.stdout.count(b"Examples:") == len(commands)


# ------------------------------------------------------------------------ how errors leave


@pytest.mark.parametrize("command", ["machines --json", "machines", "--help", "devices --json"])
def test_a_full_disk_under_the_output_is_told_in_one_line(command: str) -> None:
    with open("/dev/full", "wb") as full:
        called = subprocess.run(
            [sys.executable, "-m", "laneway.adapters.cli", *command.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    said = "laneway: the output cannot be written: No space left on device\n"
    assert (called.returncode, called.stderr.decode()) == (74, said)


def test_who_stops_reading_gets_no_more_words() -> None:
    """As ``| head`` does: the status of a program that a closed pipe ended, and nothing said."""
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "wb") as closed:
        called = subprocess.run(
            [sys.executable, "-m", "laneway.adapters.cli", "machines"],
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (called.returncode, called.stderr) == (141, b"")


def test_a_traceback_is_shown_only_with_debug() -> None:
    wrong = ("run", "a", "--device", "nosuch:")
    laneway(*wrong).refused(2, "nosuch")
    for arguments in (("--debug", *wrong), (*wrong, "--debug")):
        called = laneway(*arguments)
        assert called.code == 2
        assert "Traceback (most recent call last)" in called.err
        assert called.err.rstrip().splitlines()[-1].startswith("laneway: no device is called")


def test_a_bug_is_told_apart_and_says_how_to_see_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(streams: object, names: object, *, quiet: bool) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(cli_run, "_show_all", broken)
    called = laneway("run", "--prompt-tokens", "1", "--model", MODELS / "tiny-dense", "--json")
    called.refused(70, "ZeroDivisionError", "two lines", "--debug")


def test_an_interrupt_closes_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(streams: object, names: object, *, quiet: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_run, "_show_all", interrupted)
    file = tmp_path / "run.db"
    ask = ("run", "--prompt-tokens", "1", "--model", MODELS / "tiny-dense", "--json")
    called = laneway(*ask, "--journal", file)
    assert called.code == 130 and "Traceback" not in called.err
    assert "verify: ok" in laneway("journal", "verify", file).done().out


# ------------------------------------------------------------------------ programs of their own


def test_the_program_answers_and_proves_its_journal(tmp_path: Path) -> None:
    ask = ("run", "ROMEO.", "JULIET.", "--max-tokens", 8, "--seed", 3, "--journal", "run.db")
    called = laneway_program(*ask, folder=tmp_path).done()
    assert called.out.count("[length, 8 tokens]") == 2
    verified = laneway_program("journal", "verify", "run.db", folder=tmp_path).done()
    assert verified.out.splitlines()[-1] == "verify: ok"


def test_the_program_refuses_in_one_line(tmp_path: Path) -> None:
    laneway_program("run", "a", "--model", "nowhere", folder=tmp_path).refused(2, "nowhere")


def _hear_interrupts() -> None:
    """Let a program be interrupted also where the tests were begun in a shell's background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_ends_the_program_with_everything_closed(
    number: signal.Signals, code: int, word: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.db"
    program = subprocess.Popen(
        [sys.executable, "-m", "laneway.adapters.cli", "run", "ROMEO.", "--max-tokens", "500"]
        + ["--journal", str(path), "--seed", "1", "--device", "sim:tp2-ref"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hear_interrupts,
    )
    assert program.stdout is not None and program.stderr is not None
    program.stdout.readline()  # the first line of the answer: it is in the middle of it
    program.send_signal(number)
    _, said = program.communicate(timeout=60)
    assert (program.returncode, said.strip().splitlines()[-1]) == (code, f"laneway: {word}")
    with open_journal(path, read_only=True) as journal:
        assert verify(journal).ok
        folded = fold(journal)
    assert not folded.requests and folded.device.state == "closed"
