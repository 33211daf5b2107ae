"""``laneway probe``: find out what a device can really do."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from laneway.adapters.cli_run import demo_model
from laneway.adapters.exits import ANSWER_IS_NO, DONE
from laneway.adapters.records import read_records, write_records
from laneway.adapters.screen import wide_console

if TYPE_CHECKING:
    from laneway.adapters.probe import Report


def probe_device(
    url: Annotated[str, typer.Argument(help="Device URL.")],
    model: Annotated[
        Path | None, typer.Option(help="Calbin or Hugging Face folder; default the shipped demo.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="File of verification records, made or added to.")
    ] = None,
    check: Annotated[
        list[str] | None, typer.Option(help="Only this check. May be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides prompts and tokens.")] = 1,
    timeout: Annotated[
        float | None, typer.Option(min=1, help="Seconds for each check; default 180.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a capability.")] = False,
) -> None:
    """Check what a device says it can, each check alone with it in a process of its own.

    Nobody else may use the device meanwhile. Checks: golden, counters, status, ping-pong,
    parallel-mode, overlap, interleave, batch, pieces. What passed or failed is a record of this
    very system (runtime, driver, firmware, calbin, chips, backend); give the file to
    laneway run --records. Exit code 1 if a check failed.

    Examples:
        laneway probe sim:

        laneway probe npurt:/opt/npu/libshim.so --model models/qwen3 --record board.json

        laneway probe "sim:?clock=virtual" --check overlap --check interleave --json

    """
    from laneway.adapters.probe import CHECK_TIMEOUT_S, probe
    from laneway.adapters.probe_checks import CHECKS

    if record is not None and record.exists():
        read_records(record)  # whatever is wrong with it is said before the checks, not after
    console = Console(file=sys.stderr)
    report = probe(
        url,
        model if model is not None else demo_model(),
        seed=seed,
        checks=tuple(check) if check else tuple(CHECKS),
        timeout_s=timeout if timeout is not None else CHECK_TIMEOUT_S,
        tell=lambda name: None if as_json else console.print(f"checking {name}", style="dim"),
    )
    if record is not None:
        write_records(record, report.records())
    _show(report, as_json)
    raise typer.Exit(ANSWER_IS_NO if report.failed else DONE)


def _show(report: "Report", as_json: bool) -> None:
    if as_json:
        for each in report.checked:
            print(json.dumps({"test": each.test, **attrs.asdict(each.finding)}))
        return
    table = Table("check", "capability", "result", "value", "what was seen")
    for each in report.checked:
        finding = each.finding
        value = str(finding.value) if finding.result == "passed" else ""
        table.add_row(each.test, finding.capability, finding.result, value, escape(finding.note))
    wide_console().print(table)
