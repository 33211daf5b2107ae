"""Commands that cannot be carried out: the exit code, and the whole line that says why.

A change of wording is a change here. ``{here}`` is the folder of the test, ``…`` stands for
anything.

Source: README.md (exit codes).
"""

from pathlib import Path

import pytest
from support.command_line import MODELS
from support.one_line import check_refused

from laneway.adapters.simulator import KEYS, PROFILES

USAGE, DEVICE, JOURNAL = 2, 3, 4
TINY = MODELS / "tiny-dense"
LONG_NAME = "x" * 300
SIM_KEYS = ", ".join(KEYS)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


RUN_HELP = "; see laneway run --help"
NO_JOURNAL = "{here}/nowhere.db: there is no such journal: check the path"
COMMANDS: list[tuple[str, int, str]] = [
    ("nosuch", USAGE, "No such command 'nosuch'; see laneway --help"),
    ("--nosuch", USAGE, "No such option: --nosuch; see laneway --help"),
    ("run", USAGE, "Invalid value: give at least one prompt, or --prompt-tokens" + RUN_HELP),
    ("run a --nosuch 1", USAGE, "No such option: --nosuch" + RUN_HELP),
    ("run a --max-tokens x", USAGE, "Invalid value for '--max-tokens'…" + RUN_HELP),
    ("run a --max-tokens 0", USAGE, "Invalid value for '--max-tokens'…1" + RUN_HELP),
    (
        "run a --temperature -0.01",
        USAGE,
        "Invalid value: temperature must be within 0 and 2, not -0.01" + RUN_HELP,
    ),
    (
        "run a --temperature 2.01",
        USAGE,
        "Invalid value: temperature must be within 0 and 2, not 2.01" + RUN_HELP,
    ),
    (
        "run a --temperature nan",
        USAGE,
        "Invalid value: temperature must be finite, not nan" + RUN_HELP,
    ),
    (
        "run a --temperature inf",
        USAGE,
        "Invalid value: temperature must be finite, not inf" + RUN_HELP,
    ),
    (
        "run a --top-k -2",
        USAGE,
        "Invalid value: top_k must be -1 or 0 (off) or 1 to 2^31-1, not -2" + RUN_HELP,
    ),
    (
        "run a --top-k 2147483648",
        USAGE,
        "Invalid value: top_k must be -1 or 0 (off) or 1 to 2^31-1, not 2147483648" + RUN_HELP,
    ),
    (
        "run a --top-p 0",
        USAGE,
        "Invalid value: top_p must be above 0 and at most 1, not 0.0" + RUN_HELP,
    ),
    (
        "run a --top-p 1.01",
        USAGE,
        "Invalid value: top_p must be above 0 and at most 1, not 1.01" + RUN_HELP,
    ),
    (
        "run a --min-p -0.01",
        USAGE,
        "Invalid value: min_p must be within 0 and 1, not -0.01" + RUN_HELP,
    ),
    (
        "run a --min-p 1.01",
        USAGE,
        "Invalid value: min_p must be within 0 and 1, not 1.01" + RUN_HELP,
    ),
    (
        "run a --seed -1",
        USAGE,
        "Invalid value: seed must be within 0 and 2^64-1, not -1" + RUN_HELP,
    ),
    (
        "run a --seed 18446744073709551616",
        USAGE,
        "Invalid value: seed must be within 0 and 2^64-1, not 18446744073709551616" + RUN_HELP,
    ),
    (
        "run a --deadline 0",
        USAGE,
        "Invalid value: deadline_s must be a positive time, not 0.0" + RUN_HELP,
    ),
    (
        "run a --deadline 2147483648",
        USAGE,
        "Invalid value: deadline_s must be a positive time, not 2147483648.0" + RUN_HELP,
    ),
    (
        "run a --deadline nan",
        USAGE,
        "Invalid value: deadline_s must be a positive time, not nan" + RUN_HELP,
    ),
    (
        "run a --stop=",
        USAGE,
        "Invalid value: a stop string has 1 to 1024 characters" + RUN_HELP,
    ),
    (
        "run a --stop " + "x" * 1025,
        USAGE,
        "Invalid value: a stop string has at most 1024 characters, not 1025" + RUN_HELP,
    ),
    (
        "run a" + " --stop x" * 17,
        USAGE,
        "Invalid value: at most 16 stop strings, not 17" + RUN_HELP,
    ),
    (
        "run --prompt-tokens 1,a",
        USAGE,
        "Invalid value: --prompt-tokens wants ids such as 1,2,3, not '1,a'" + RUN_HELP,
    ),
    (
        "run --prompt-tokens 1,,2",
        USAGE,
        "Invalid value: --prompt-tokens wants ids such as 1,2,3, not '1,,2'" + RUN_HELP,
    ),
    (
        "run --prompt-tokens=",
        USAGE,
        "Invalid value: --prompt-tokens wants ids such as 1,2,3, not ''" + RUN_HELP,
    ),
    (
        "run a --model nowhere",
        USAGE,
        "model 'nowhere' was not loaded: nowhere: no such folder; give the path of a model folder",
    ),
    (
        "run a --model /dev/null",
        USAGE,
        "model 'null' was not loaded: /dev/null: not a folder; give the folder that holds the"
        " model's files",
    ),
    ("run a --device nosuch:", USAGE, "no device is called 'nosuch'; known are …sim"),
    (
        "run a --device sim",
        USAGE,
        "device 'sim': a name and a colon are wanted, such as sim: or npurt:/path/lib.so",
    ),
    (
        "run a --device :",
        USAGE,
        "device ':': a name and a colon are wanted, such as sim: or npurt:/path/lib.so",
    ),
    ("run a --device sim:huge", USAGE, f"sim:huge: the profiles are {', '.join(PROFILES)}"),
    (
        "run a --device sim:?speed=9",
        USAGE,
        f"sim: unknown option 'speed'; known are {SIM_KEYS}",
    ),
    (
        "run a --device sim:?clock=fast",
        USAGE,
        "sim: clock=fast: one of real, manual, virtual is wanted",
    ),
    (
        "run a --device sim:?clock=manual",
        USAGE,
        "the time of sim:?clock=manual stands still until a program steps it: take clock=real or"
        " clock=virtual",
    ),
    (
        "run a --device sim:?seed=abc",
        USAGE,
        "…npurt_device_open: INVALID_ARG (0x0101): config line 2: seed does not take the value"
        " 'abc'",
    ),
    (
        "run a --device sim:?dram_bytes=-1",
        USAGE,
        "…npurt_device_open: INVALID_ARG (0x0101): config line 2: dram_bytes does not take the"
        " value '-1'",
    ),
    (
        "run a --device sim:?scale=0",
        USAGE,
        "…npurt_device_open: INVALID_ARG (0x0101): config line 2: scale does not take the value"
        " '0'",
    ),
    (
        "run a --device sim:?firmware_version=new",
        USAGE,
        "…npurt_device_open: INVALID_ARG (0x0101): config line 2: firmware_version does not take"
        " the value 'new'",
    ),
    ("run a --device sim:?seed=1&seed=2", USAGE, "sim: option seed is given twice"),
    (
        "run a --device sim:?seed=1%0aclock=manual",
        USAGE,
        "sim: option seed holds a control character",
    ),
    ("run a --device sim:?faults=nowhere", USAGE, "sim: faults=nowhere cannot be read: …"),
    ("run a --device npurt:?index=x", USAGE, "npurt: option index=x: 0 to 255 is wanted"),
    ("run a --device sim:?samplers=0", USAGE, "sim: option samplers=0: 1 to 64 is wanted"),
    ("run a --device npurt:?chips=256", USAGE, "npurt: option chips=256: 0 to 255 is wanted"),
    ("run a --device npurt:?config=nowhere", USAGE, "npurt: config=nowhere cannot be read: …"),
    (
        "run a --device npurt:?index=9",
        DEVICE,
        "…npurt_device_open: NOT_FOUND (0x0107): board 9; there is board 0 only",
    ),
    (
        "run a --device npurt:/nowhere.so",
        USAGE,
        "no npurt library found (named by the caller: /nowhere.so; named by LANEWAY_NPURT: not"
        " set; the built simulator: …/_calsim.abi3.so). …",
    ),
    (
        "run a --journal postgresql://host/db",
        USAGE,
        "journals in PostgreSQL come with a later delivery: name an SQLite file",
    ),
    ("run a --journal=", USAGE, "the journal's file name is empty"),
    (
        "run a --journal nowhere/run.db",
        JOURNAL,
        "{here}/nowhere/run.db: no journal can be written here (No such file or directory): choose"
        " a directory that exists and may be written",
    ),
    ("run a --journal .", JOURNAL, "{here} is a directory: name a file in it"),
    ("devices sim:?x=1", USAGE, f"sim: unknown option 'x'; known are {SIM_KEYS}"),
    (
        "machines explain nosuch ready",
        USAGE,
        "no machine 'nosuch'; there are request, job, buffer, lane, model, device",
    ),
    (
        "machines explain lane nosuch",
        USAGE,
        "lane has no state or trigger 'nosuch'; it has empty, ready, reserved, unknown, …",
    ),
    (
        "machines explain lane",
        USAGE,
        "Missing argument 'name'; see laneway machines explain --help",
    ),
    (
        "model pack nowhere out",
        USAGE,
        "nowhere: no such folder; give the path of a model folder",
    ),
    (
        f"model pack {TINY} out --batch a",
        USAGE,
        "Invalid value: --batch wants sizes such as 1,4, not 'a'; see laneway model pack --help",
    ),
    (f"model pack {TINY} out --batch 0", USAGE, "batch [0]: 1 to 8 sizes from 1 are wanted"),
    (
        f"model pack {TINY} out --layout nine",
        USAGE,
        "layout 'nine': one of single, tp2, ep2, pp2, tpep is wanted",
    ),
    (
        f"model pack {TINY} out --lanes 65",
        USAGE,
        "lanes 65: the simulated board has at most 64",
    ),
    (
        f"model pack {TINY} out --context 513",
        USAGE,
        "context 513: the model has 1 to 512 positions (max_position_embeddings)",
    ),
    (
        f"model pack {TINY} /usr",
        USAGE,
        "/usr: exists and is no calbin of laneway; name another destination",
    ),
    ("model inspect nowhere", USAGE, "nowhere: no such folder; give the path of a model folder"),
    ("model verify nowhere", USAGE, "nowhere: no such folder; give the path of a model folder"),
    ("model verify", USAGE, "Missing argument 'folder'; see laneway model verify --help"),
    (
        f"model verify {TINY} --device sim:null",
        USAGE,
        "no golden run can be compared: sim:null?clock=virtual&capture=1 computes nothing, …",
    ),
    ("journal show", USAGE, "Missing argument 'file'; see laneway journal show --help"),
    (
        "journal timeline run.db",
        USAGE,
        "Missing argument 'entity'; see laneway journal timeline --help",
    ),
    (
        "journal show nowhere.db --from-ms nan",
        USAGE,
        "Invalid value: --from-ms wants a time in milliseconds, not nan; see laneway journal show"
        " --help",
    ),
    (
        "journal show nowhere.db --until-ms inf",
        USAGE,
        "Invalid value: --until-ms wants a time in milliseconds, not inf; see laneway journal show"
        " --help",
    ),
    (
        "journal show a\0b",
        USAGE,
        "the journal's file name holds a null character: take another one",
    ),
    (
        "journal copy a\0b copy.db",
        USAGE,
        "the journal's file name holds a null character: take another one",
    ),
    (
        "run a --journal a\0b",
        USAGE,
        "the journal's file name holds a null character: take another one",
    ),
    (
        f"journal show {LONG_NAME}",
        JOURNAL,
        f"{{here}}/{LONG_NAME}: there is no such journal: check the path",
    ),
    (f"run a --journal {LONG_NAME}", JOURNAL, f"…{LONG_NAME}: no journal can be written here (…"),
    (
        "model inspect \x1b[2J\udcff",
        USAGE,
        "\\x1b[2J\\udcff: no such folder; give the path of a model folder",
    ),
    *((f"journal {name} nowhere.db", JOURNAL, NO_JOURNAL) for name in ("show", "stats", "replay")),
    ("journal verify nowhere.db", JOURNAL, NO_JOURNAL),
    ("journal timeline nowhere.db buffer/1", JOURNAL, NO_JOURNAL),
    ("journal copy nowhere.db copy.db", JOURNAL, NO_JOURNAL),
]


@pytest.mark.parametrize(
    ("command", "code", "line"), COMMANDS, ids=[ascii(c[:40])[1:-1] for c, _, _ in COMMANDS]
)
def test_a_command_is_refused_in_one_line(
    command: str, code: int, line: str, tmp_path: Path
) -> None:
    check_refused(command.split(" "), code, line.replace("{here}", str(tmp_path)))
    assert list(tmp_path.iterdir()) == [], "nothing was left behind"
