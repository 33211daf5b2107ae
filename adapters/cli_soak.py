"""``laneway soak``: a long run with all invariants on."""

import json
import sys
from pathlib import Path
from typing import Annotated

import attrs
import typer
from rich.console import Console
from rich.progress import Progress

from laneway.adapters.cli_run import demo_model
from laneway.adapters.exits import ANSWER_IS_NO, DONE
from laneway.engine.errors import ConfigurationError

CLOCKS = ("virtual", "real")
DEFAULT_FAULTS = Path(__file__).parent / "soak.faults"


def soak(
    hours: Annotated[float, typer.Option(help="Hours of device time.")] = 24.0,
    clock: Annotated[str, typer.Option(help="virtual or real.")] = "virtual",
    faults: Annotated[
        str, typer.Option(help="Fault plan file, or none; default the shipped mix of all kinds.")
    ] = str(DEFAULT_FAULTS),
    seed: Annotated[int, typer.Option(help="One seed is one run on the virtual clock.")] = 1,
    model: Annotated[Path | None, typer.Option(help="Default the shipped demo.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Run for long with every invariant checked after every step.

    The load is one request per 4 seconds of device time, prompts of 1 to 16 tokens, answers of
    1 to 12, a few cancelled and a few with a deadline that passes. A fault that ends the device
    ends the incarnation: the engine is closed, a fresh device is opened on the same journal, and
    the run goes on. Exit code 1 if anything was lost, doubled, different, broken or not idle.

    Examples:
        laneway soak --hours 1 --faults none

        laneway soak --hours 24 --clock virtual --seed 7 --json

    """
    from laneway.adapters.soaking import Soak, SoakReport

    if clock not in CLOCKS:
        raise ConfigurationError(f"--clock {clock}: one of {', '.join(CLOCKS)} is wanted")
    plan = None if faults == "none" else Path(faults)
    with Progress(console=Console(file=sys.stderr), transient=True, disable=as_json) as progress:
        task = progress.add_task("soak", total=1.0)

        def tell(report: SoakReport, share: float) -> None:
            text = f"soak: {report.requests} requests, {report.incarnations} incarnations"
            progress.update(task, completed=share, description=text)

        report = Soak(
            hours=hours,
            clock=clock,
            faults=plan,
            seed=seed,
            model=model if model is not None else demo_model(),
            tell=tell,
        ).run()
    print(json.dumps(attrs.asdict(report), indent=None if as_json else 2))
    if not as_json:
        print("soak: ok" if report.ok else "soak: not ok")
    raise typer.Exit(DONE if report.ok else ANSWER_IS_NO)
