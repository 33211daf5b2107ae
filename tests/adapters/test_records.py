"""Files of verification records: what is written is read, and nothing else is.

Source: R1.2, R5.2, E24, G22.
"""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.command_line import MODELS, laneway
from support.evidence_steps import CALBIN, PING_PONG, fingerprint, record

from laneway.adapters import open_device, read_records
from laneway.adapters.records import (
    BYTES_MAX,
    RECORDS_MAX,
    encode_records,
    merge_records,
    write_records,
)
from laneway.engine.capability import grant
from laneway.engine.errors import ConfigurationError
from laneway.engine.evidence import VerificationRecord

USAGE = 2
RUN = ("run", "--prompt-tokens", 1, "--model", MODELS / "tiny-dense", "--max-tokens", 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "board.json"


def text_of(*records: VerificationRecord) -> dict[str, Any]:
    """Return a good file as a value that a test may spoil."""
    taken: dict[str, Any] = json.loads(encode_records(records))
    return taken


def test_what_is_written_is_read(path: Path) -> None:
    records = (*PING_PONG, record("CANCEL", -3, result="failed", note="two ended: “both”"))
    write_records(path, records)
    assert read_records(path) == records
    assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0
    assert [file.name for file in path.parent.iterdir()] == ["board.json"]


def test_a_file_is_what_a_person_expects(path: Path) -> None:
    write_records(path, (record("COUNTERS"),))
    assert json.loads(path.read_text()) == {
        "version": 1,
        "records": [
            {
                "capability": "COUNTERS",
                "result": "passed",
                "value": 1,
                "test": "by-hand",
                "seed": 7,
                "note": "seen",
                "fingerprint": {
                    "backend": "calrt",
                    "backend_version": "5",
                    "runtime": "0.7.6",
                    "driver": "1.0.0",
                    "firmware": "2.0",
                    "chip_mask": 3,
                    "calbin_sha256": CALBIN,
                },
            }
        ],
    }


def test_a_new_record_replaces_the_old_one_of_its_system_only(path: Path) -> None:
    here, there = record("COUNTERS"), record("COUNTERS", fingerprint=fingerprint(driver="2"))
    write_records(path, (here, there, record("CANCEL")))
    failed = attrs.evolve(here, result="failed", note="lies")
    write_records(path, (failed,))
    assert read_records(path) == (there, record("CANCEL"), failed)
    assert merge_records((here,), ()) == (here,)


# ---------------------------------------------------------------------------- hostile files

REPLACED = (
    *("no object", "an extra field", "no version", "a version of text"),
    *("records that are no list", "too many"),
)
"""These give another file; the others change the good one."""
Spoil = Callable[[dict[str, Any]], object]
SPOILT: dict[str, Spoil] = {
    "no object": lambda good: [],
    "an extra field": lambda good: good | {"comment": ""},
    "no version": lambda good: {"records": good["records"]},
    "a version of text": lambda good: good | {"version": "1"},
    "records that are no list": lambda good: good | {"records": {}},
    "too many": lambda good: good | {"records": good["records"] * (RECORDS_MAX + 1)},
    "an extra field of a record": lambda good: good["records"][0].update(by="me"),
    "a missing field": lambda good: good["records"][0].pop("seed"),
    "a missing fingerprint field": lambda good: good["records"][0]["fingerprint"].pop("driver"),
    "another result": lambda good: good["records"][0].update(result="maybe"),
    "a number of text": lambda good: good["records"][0].update(value="2"),
    "a truth for a number": lambda good: good["records"][0].update(value=True),
    "a fraction": lambda good: good["records"][0].update(value=1.5),
    "a number beyond 64 bits": lambda good: good["records"][0].update(value=1 << 63),
    "a negative seed": lambda good: good["records"][0].update(seed=-1),
    "a mask too wide": lambda good: good["records"][0]["fingerprint"].update(chip_mask=256),
    "a hash that is none": lambda good: good["records"][0]["fingerprint"].update(
        calbin_sha256="A" * 64
    ),
    "a hash with a line behind": lambda good: good["records"][0]["fingerprint"].update(
        calbin_sha256="a" * 64 + "\n"
    ),
    "a name that is none": lambda good: good["records"][0].update(capability="ping pong"),
    "a note without end": lambda good: good["records"][0].update(note="x" * 1025),
    "a note that steers a terminal": lambda good: good["records"][0].update(note="\x1b[2J"),
    "a version that steers a terminal": lambda good: good["records"][0]["fingerprint"].update(
        runtime="1\n2"
    ),
    "null": lambda good: good["records"][0].update(note=None),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_file_is_refused(name: str, path: Path) -> None:
    good = text_of(record("COUNTERS"))
    path.write_text(json.dumps(good))
    assert len(read_records(path)) == 1
    whole = SPOILT[name](good)
    spoilt = whole if name in REPLACED else good
    path.write_text(json.dumps(spoilt))
    with pytest.raises(ConfigurationError, match=f"records {path}: ") as refusal:
        read_records(path)
    assert "\x1b" not in str(refusal.value)


def test_a_file_cut_anywhere_is_refused(path: Path) -> None:
    whole = encode_records((record("COUNTERS"),)).rstrip()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigurationError, match="not a file of verification records"):
            read_records(path)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[" * 100_000, b"NaN", b'{"version":1e999}'])
def test_what_is_no_json_of_ours_is_refused(text: bytes, path: Path) -> None:
    path.write_bytes(text)
    with pytest.raises(ConfigurationError, match="not a file of verification records"):
        read_records(path)


def test_a_file_of_another_version_is_refused(path: Path) -> None:
    path.write_text(json.dumps(text_of() | {"version": 2}))
    with pytest.raises(ConfigurationError, match="version 2, this laneway reads 1"):
        read_records(path)


def test_a_file_too_large_is_refused_and_not_read(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(BYTES_MAX + 1)
    with pytest.raises(ConfigurationError, match=f"more than {BYTES_MAX} bytes"):
        read_records(path)


def test_what_is_no_file_is_refused(tmp_path: Path, path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("", "director"), ("pipe", "no regular file"), ("absent", "No such file")):
        with pytest.raises(ConfigurationError, match=words):
            read_records(tmp_path / name)


def test_a_file_that_is_something_else_is_not_overwritten(path: Path) -> None:
    path.write_text("notes")
    with pytest.raises(ConfigurationError, match="not a file of verification records"):
        write_records(path, PING_PONG)
    assert path.read_text() == "notes"
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_records(path.parent / "absent" / "board.json", PING_PONG)


def test_a_full_file_takes_no_more(path: Path) -> None:
    many = [record("CANCEL", fingerprint=fingerprint(driver=str(n))) for n in range(RECORDS_MAX)]
    write_records(path, many)
    with pytest.raises(ConfigurationError, match="more than a file holds"):
        write_records(path, (record("COUNTERS"),))
    assert read_records(path) == tuple(many)


# ---------------------------------------------------------------------------- given to an engine


def test_the_simulator_carries_records_unless_told_not_to() -> None:
    for url, most, pieces in (("sim:", 2, True), ("sim:?records=none", 1, False)):
        device = open_device(url)
        facts = grant(device.describe())
        device.stop()
        assert (facts.inflight_max, facts.chunked_prefill) == (most, pieces), url


def test_another_word_for_records_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="records=all: none is the only word"):
        open_device("sim:?records=all")


def test_records_are_read_before_anything_is_opened(path: Path) -> None:
    path.write_text("{}")
    laneway(*RUN, "--records", path, "--device", "sim:nothing").refused(USAGE, "board.json")
    laneway(*RUN, "--records", path.with_name("absent")).refused(USAGE, "No such file")
    laneway("devices", "sim:", "--records", path).refused(USAGE, "board.json", "missing required")


def test_records_of_another_system_leave_everything_off(path: Path) -> None:
    write_records(path, PING_PONG)
    laneway(*RUN, "--records", path, "--device", "sim:?records=none", "--json").done()
    shown = laneway("devices", "sim:?records=none", "--records", path, "--json").done().row
    (found,) = (each for each in shown["features"] if each["feature"] == "two_in_flight")
    assert (found["on"], shown["inflight_max"]) == (False, 1)
    assert (
        "the record of PING_PONG is of another system: backend 'calrt', not 'sim'" in found["why"]
    )
