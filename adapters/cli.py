"""The command ``laneway``: put engine, device and journal together for a person at a terminal.

Each group of commands has a file of its own (cli_run.py, cli_model.py, …). Here are the
application, ``--debug``, and the way errors leave: one line on stderr with what to do next, and an
exit code (adapters/exits.py). That holds for a mistyped option too.

What loads numba or SQLAlchemy is imported inside the commands that need it: nobody waits two
seconds for ``--help``.
"""

import logging
import signal
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, TextIO, cast

import typer
from rich.console import Console

from laneway.adapters import (
    cli_bench,
    cli_devices,
    cli_journal,
    cli_machines,
    cli_model,
    cli_probe,
    cli_run,
    cli_soak,
)
from laneway.adapters.exits import (
    INTERRUPTED,
    PIPE_CLOSED,
    USAGE,
    Output,
    Terminated,
    describe,
    exit_code,
    is_help,
)

app = typer.Typer(
    name="laneway",
    help="""Serve LLMs on an NPU board with every event in a journal.

    Examples: laneway run "ROMEO." --max-tokens 32

    laneway --debug run "ROMEO." --model somewhere
    """,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command("run")(cli_run.run)
app.command("bench")(cli_bench.bench)
app.command("soak")(cli_soak.soak)
app.command("devices")(cli_devices.devices)
app.command("probe")(cli_probe.probe_device)
app.add_typer(cli_machines.app, name="machines")
app.add_typer(cli_model.app, name="model")
app.add_typer(cli_journal.app, name="journal")


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            print(version("laneway"))
        except PackageNotFoundError:
            print("not installed")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and log.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Set what holds for every command."""
    logging.basicConfig(
        stream=sys.stderr,
        # Without --debug nothing is logged: what a person must know is the one line of an error.
        level=logging.DEBUG if debug else logging.CRITICAL + 1,
        format="%(levelname)s %(name)s: %(message)s",
    )


def _terminate(number: int, frame: object) -> None:
    raise Terminated


def main() -> None:
    """Run the command line and leave with the exit code that says how it went."""
    debug = "--debug" in sys.argv[1:]
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument != "--debug"]
    if debug:
        sys.argv.insert(1, "--debug")
    output, sys.stdout = sys.stdout, cast(TextIO, Output(sys.stdout))
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        code = app(prog_name="laneway", standalone_mode=False)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt, Terminated) as error:
        if is_help(error):
            sys.exit(USAGE)
        if debug:
            traceback.print_exception(error)
        if exit_code(error) == PIPE_CLOSED:
            sys.exit(PIPE_CLOSED)  # who read it, as head does, wants no more words
        Console(stderr=True, soft_wrap=True).print(
            f"laneway: {describe(error)}", style="red", markup=False, highlight=False
        )
        sys.exit(exit_code(error))
    finally:
        sys.stdout = output
        signal.signal(signal.SIGTERM, before)
    if code == INTERRUPTED:
        print("laneway: interrupted", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
