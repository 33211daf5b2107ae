"""``laneway bench``: figures with their baselines, measured in one interleaved run."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from laneway.adapters.exits import ANSWER_IS_NO, DONE
from laneway.adapters.screen import wide_console
from laneway.engine.errors import ConfigurationError

SUITES = ("sampling", "dispatch", "journal", "tick", "ffi", "pingpong", "schedule", "batch")
"""Each is a module laneway.adapters.bench_NAME, imported only when it is asked for."""


def bench(
    suites: Annotated[
        list[str] | None, typer.Argument(help=f"Of {', '.join(SUITES)}; default all.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Calbin or model folder for batch; default the demo.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device URL for batch.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File that batch draws into.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a figure.")] = False,
) -> None:
    """Measure kernels, tables, journal and engine against limits and peers, in ratios.

    The suite batch measures every batch size of a model on a device and recommends one. Exit code 1
    when a gate is not met. Peers are optional: `pip install 'laneway[bench]'`; --plot needs
    `pip install 'laneway[plot]'`.

    Examples:
        laneway bench

        laneway bench dispatch --json

        laneway bench batch --device sim:tp2-b16?clock=virtual --plot batch.svg

    """
    wanted = suites or SUITES
    for name in wanted:
        if name not in SUITES:
            raise ConfigurationError(f"no suite {name!r}; there are {', '.join(SUITES)}")
    given = {"model": model, "device": device, "plot": plot}
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen and list(wanted) != ["batch"]:
        raise ConfigurationError(f"--{' and --'.join(chosen)} belong to the suite batch alone")
    figures = []
    with Console(file=sys.stderr).status("measuring") as status:
        for name in wanted:
            for figure in import_module(f"laneway.adapters.bench_{name}").run(
                status.update, **chosen
            ):
                figures.append(figure)
                if as_json:
                    print(json.dumps(figure.to_json()), flush=True)
    if not as_json:
        table = Table("id", "value", "unit", "baseline", "its value", "ratio", "gate", "met")
        for figure in figures:
            table.add_row(*(str(cell) for cell in figure.to_json().values()))
        wide_console().print(table)
    missed = any(figure.gate_met is False for figure in figures)
    raise typer.Exit(ANSWER_IS_NO if missed else DONE)
