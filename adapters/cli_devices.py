"""``laneway devices``: which devices there are, and what one says it can do."""

import json
from typing import Annotated, Any

import attrs
import typer
from rich.table import Table

from laneway.adapters.discover import list_devices, open_device
from laneway.adapters.screen import wide_console

SUPPORT = {0: "unknown", 1: "no", 2: "limited", 3: "yes"}
SOURCE = {
    1: "device",
    2: "vendor document",
    3: "header only",
    4: "verification record",
    5: "inferred",
    6: "simulated",
}
SIMULATED = 9


def devices(
    url: Annotated[str | None, typer.Argument(help="Open this device and show it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> None:
    """List device names, or open one device and show versions, memory and capabilities.

    Examples:
        laneway devices

        laneway devices sim:tp2-ref

    """
    if url is None:
        _list(as_json)
    else:
        _show(url, as_json)


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


def _show(url: str, as_json: bool) -> None:
    device = open_device(url)
    try:
        facts = device.describe()
    finally:
        device.stop()
    shown: dict[str, Any] = attrs.asdict(facts)
    shown["capabilities"] = [
        {
            "name": name,
            "support": SUPPORT.get(support, str(support)),
            "evidence": "SIM" if evidence == SIMULATED else f"C{evidence}",
            "source": SOURCE.get(source, str(source)),
            "value": value,
        }
        for name, support, evidence, source, value in facts.capabilities
    ]
    if as_json:
        print(json.dumps(shown))
        return
    console = wide_console()
    for key, value in shown.items():
        if key == "chips":
            for index, chip in enumerate(value):
                console.print(
                    f"chip {index}: {chip['used_bytes']} of {chip['total_bytes']} bytes used"
                )
        elif key != "capabilities":
            console.print(f"{key}: {value}", highlight=False)
    table = Table("capability", "support", "evidence", "source", "value")
    for row in shown["capabilities"]:
        table.add_row(*(str(cell) for cell in row.values()))
    console.print(table)
