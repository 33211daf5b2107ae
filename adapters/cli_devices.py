"""``laneway devices``: which devices there are, what one says it can do, and what is used of it."""

import json
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from laneway.adapters.discover import list_devices, open_device
from laneway.adapters.exits import one_line
from laneway.adapters.records import read_records
from laneway.adapters.screen import wide_console
from laneway.engine.capability import FEATURES, decide_all, grant
from laneway.engine.evidence import Granted, Refused, VerificationRecord
from laneway.engine.inputs import DeviceFacts

_LISTS = ("chips", "capabilities", "grants", "features")
ANY_CALBIN = "any"


def devices(
    url: Annotated[str | None, typer.Argument(help="Open this device and show it.")] = None,
    records: Annotated[
        Path | None, typer.Option(help="Verification records of this device (laneway probe).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> None:
    """List device names, or open one device and show versions, memory, capabilities, features.

    A capability is the device's word, with the evidence for it. A feature is on where the evidence
    of all that it needs allows it; else the last column says what is missing.

    Examples:
        laneway devices

        laneway devices sim:tp2-ref

        laneway devices npurt:/opt/npu/libshim.so --records board.json

    """
    if url is None:
        _list(as_json)
    else:
        _show(url, read_records(records) if records is not None else (), as_json)


def _list(as_json: bool) -> None:
    listed = list_devices()
    if as_json:
        for device in listed:
            print(json.dumps(attrs.asdict(device)))
        return
    table = Table("name", "opened by", "from", "error")
    for device in listed:
        table.add_row(device.name, device.target, device.distribution, device.error)
    wide_console().print(table)


def _show(url: str, records: tuple[VerificationRecord, ...], as_json: bool) -> None:
    device = open_device(url)
    try:
        facts = grant(device.describe(), records)
    finally:
        device.stop()
    shown: dict[str, Any] = attrs.asdict(facts)
    del shown["grants"]
    shown["features"] = _features(facts, records)
    if as_json:
        print(json.dumps(shown))
        return
    console = wide_console()
    for key, value in shown.items():
        if key not in _LISTS:
            console.print(f"{key}: {_cell(value)}", highlight=False, markup=False)
    for index, chip in enumerate(facts.chips):
        console.print(f"chip {index}: {chip.used_bytes} of {chip.total_bytes} bytes used")
    _print_table(console, shown["capabilities"])
    _print_table(console, shown["features"])


def _features(
    facts: DeviceFacts, records: tuple[VerificationRecord, ...]
) -> list[dict[str, object]]:
    """Return a row for each feature with any calbin, then those that differ with a named one."""
    rows = [_feature_row(each, ANY_CALBIN) for each in decide_all(facts, records)]
    for sha256 in sorted({record.fingerprint.calbin_sha256 for record in records} - {""}):
        named = [_feature_row(each, sha256) for each in decide_all(facts, records, sha256)]
        plain = [row | {"calbin": sha256} for row in rows[: len(FEATURES)]]
        rows += [row for row in named if row not in plain]
    return rows


def _feature_row(decided: Granted | Refused, calbin: str) -> dict[str, object]:
    granted = isinstance(decided, Granted)
    return {
        "feature": decided.feature,
        "level": FEATURES[decided.feature].level,
        "calbin": calbin,
        "on": granted,
        "value": decided.value if isinstance(decided, Granted) else None,
        "why": decided.by or decided.evidence if isinstance(decided, Granted) else decided.reason,
    }


def _print_table(console: Console, rows: list[dict[str, object]]) -> None:
    table = Table(*rows[0].keys()) if rows else Table("nothing")
    for row in rows:
        table.add_row(*(escape(_cell(value)) for value in row.values()))
    console.print(table)


def _cell(value: object) -> str:
    """Return a value for a terminal: the words of a library may hold anything."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    return "" if value is None else one_line(str(value))
