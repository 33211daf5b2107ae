"""``laneway bench``: figures with their baselines, measured in one interleaved run."""

import json
import sys
from importlib import import_module
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from laneway.adapters.exits import ANSWER_IS_NO, DONE
from laneway.adapters.screen import wide_console
from laneway.engine.errors import ConfigurationError

SUITES = ("sampling", "dispatch", "journal")
"""Each is a module laneway.adapters.bench_NAME, imported only when it is asked for."""


def bench(
    suites: Annotated[
        list[str] | None, typer.Argument(help=f"Of {', '.join(SUITES)}; default all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a figure.")] = False,
) -> None:
    """Measure our kernels and tables against limits and peers, in ratios.

    Exit code 1 when a gate is not met. Peers are optional: `pip install 'laneway[bench]'`.

    Examples:
        laneway bench

        laneway bench dispatch --json

    """
    wanted = suites or SUITES
    for name in wanted:
        if name not in SUITES:
            raise ConfigurationError(f"no suite {name!r}; there are {', '.join(SUITES)}")
    figures = []
    with Console(file=sys.stderr).status("measuring") as status:
        for name in wanted:
            for figure in import_module(f"laneway.adapters.bench_{name}").run(status.update):
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
