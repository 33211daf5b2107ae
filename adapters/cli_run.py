"""``laneway run``: answer prompts, all at once, streaming."""

import asyncio
import json
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from laneway.adapters import open_device
from laneway.adapters.exits import ANSWER_IS_NO, DONE, RESTART
from laneway.adapters.metrics_table import metrics_table
from laneway.adapters.records import read_records
from laneway.adapters.screen import Screen, watch_loading, wide_console
from laneway.engine import (
    Engine,
    JournalError,
    ModelError,
    Request,
    RequestError,
    RequestRejectedError,
    Result,
    Sampling,
    Stream,
    Usage,
)
from laneway.engine.errors import ConfigurationError, DeviceLostError, RestartNeededError
from laneway.engine.evidence import VerificationRecord

LOGPROB_LEAST = -9999.0
"""What JSON says instead of anything lower, down to minus infinity, which it cannot say."""


def run(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts, answered at once.")] = None,
    prompt_tokens: Annotated[
        list[str] | None, typer.Option(help="A prompt as token ids: 1,2,3. May be repeated.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Calbin or Hugging Face folder; default the shipped demo.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device URL.")] = "sim:",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens at most, each.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="One seed for all; default drawn.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="-2 to 2; 0 is off.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="-2 to 2; 0 is off.")] = 0.0,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: each token's, and so many of the best.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop text. May be repeated.")] = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds, each.")] = None,
    on_fault: Annotated[
        str, typer.Option(help="After a fault of the device: continue the answers, or fail them.")
    ] = "continue",
    journal: Annotated[
        str | None, typer.Option(help="Journal file, made or continued; default in memory.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Let the journal's requests without an ending go on.")
    ] = False,
    records: Annotated[
        Path | None, typer.Option(help="Verification records of this device (laneway probe).")
    ] = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Afterwards on stderr: what was measured.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt.")] = False,
) -> None:
    """Answer all prompts at once, streaming.

    Examples:
        laneway run "ROMEO." "What news?" --max-tokens 32 --seed 7

        laneway run "To be" --temperature 0 --journal run.db

        laneway run --prompt-tokens 1,2,3 --model models/tiny-moe --json

        laneway run --resume --journal run.db

    """
    wanted = [*(prompts or []), *(_read_tokens(text) for text in prompt_tokens or [])]
    if resume and journal is None:
        raise typer.BadParameter("--resume needs the --journal whose requests are to go on")
    if resume and journal is not None and "://" not in journal and not Path(journal).exists():
        raise JournalError(
            f"{journal} does not exist: name the journal whose requests are to go on"
        )
    if not wanted and not resume:
        raise typer.BadParameter("give at least one prompt, or --prompt-tokens")
    folder = model if model is not None else demo_model()
    sampling = _usable(
        lambda: Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed if seed is not None else secrets.randbits(63),
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
        )
    )
    alias = folder.resolve().name
    requests = [
        _usable(
            lambda prompt=prompt: Request(
                model=alias,
                prompt=prompt,
                max_tokens=max_tokens,
                sampling=sampling,
                stop=tuple(stop or ()),
                deadline_s=deadline,
                logprobs=logprobs,
                on_fault=on_fault,
            )
        )
        for prompt in wanted
    ]
    verified = read_records(records) if records is not None else ()
    with _open_engine(device, journal, verified, resume=resume) as engine:
        results = finish_open(engine, model, quiet=as_json) if resume else []
        resumed = len(results)
        if requests:
            _load(engine, alias, folder, quiet=as_json)
            streams = [_submit(engine, request) for request in requests]
            results += asyncio.run(_show_all(streams, _names(requests), quiet=as_json))
        restart = engine.health().restart
        if metrics:
            wide_console(stderr=True).print(metrics_table(engine.metrics().to_json()))
    if as_json:
        for index, result in enumerate(results):
            row = _row(result.request if index < resumed else index - resumed, result)
            if result.logprobs or (logprobs is not None and index >= resumed):
                row["logprobs"] = [_logprobs_row(pairs) for pairs in result.logprobs]
            print(json.dumps(row))
    if all(result.error is None for result in results):
        raise typer.Exit(DONE)
    raise typer.Exit(RESTART if restart else ANSWER_IS_NO)


def finish_open(engine: Engine, model: Path | None, *, quiet: bool) -> list[Result]:
    """Let the requests without an ending go on, model by model; return their results in order.

    A model is loaded from where it was, unless ``model`` names another place of the same artifact.
    """
    views = engine.requests()
    streams = {view.number: engine.attach(view.number) for view in views}
    results: list[Result] = []
    for alias in dict.fromkeys(view.alias for view in views):
        for served in engine.models():
            engine.unload(served.alias)
        mine = [view for view in views if view.alias == alias]
        source = Path(mine[-1].source) if model is None else model
        _load(engine, alias, source, quiet=quiet)
        names = [f"request/{view.number}" for view in mine]
        shown = _show_all([streams[view.number] for view in mine], names, quiet=quiet)
        results += asyncio.run(shown)
    for served in engine.models():
        engine.unload(served.alias)
    return sorted(results, key=lambda result: result.request)


def _open_engine(
    url: str, journal: str | None, records: tuple[VerificationRecord, ...], *, resume: bool
) -> Engine:
    """Open device and journal and put an engine over them; nothing stays open if that fails.

    Raises: DeviceError, JournalError, ConfigurationError.
    """
    from laneway.adapters.device import NpurtDevice
    from laneway.journal import open_journal

    with ExitStack() as undo:
        port = open_device(url)
        undo.callback(port.stop)
        if isinstance(port, NpurtDevice) and port.stepped and not port.virtual:
            raise ConfigurationError(
                f"the time of {url} stands still until a program steps it: take clock=real or"
                " clock=virtual"
            )
        opened = open_journal(journal)
        undo.callback(opened.close)
        engine = Engine(device=port, journal=opened, records=records, resume=resume)
        undo.pop_all()
    return engine


def _load(engine: Engine, alias: str, folder: Path, *, quiet: bool) -> None:
    """Load the model. Raises: ModelError, or DeviceLostError where the device is at fault."""
    try:
        with watch_loading(engine, alias, quiet=quiet):
            engine.load(alias, str(folder))
    except ModelError as error:
        health = engine.health()
        if health.restart:
            raise RestartNeededError(str(error)) from error
        if health.device == "lost":
            raise DeviceLostError(str(error)) from error
        raise


async def _show_all(
    streams: Sequence[Stream | Result], names: list[str], *, quiet: bool
) -> list[Result]:
    """Show the answers as they come; return the endings in the order of the streams."""
    with Screen(Console(), names, quiet=quiet) as screen:
        return await asyncio.gather(
            *(_show(screen, index, stream) for index, stream in enumerate(streams))
        )


def _names(requests: list[Request]) -> list[str]:
    return [
        request.prompt if isinstance(request.prompt, str) else f"{len(request.prompt)} tokens"
        for request in requests
    ]


def _submit(engine: Engine, request: Request) -> Stream | Result:
    """Submit a request; one that is refused on the spot has its result, and the others go on."""
    try:
        return engine.submit(request)
    except RequestRejectedError as refused:
        return Result(
            request=0,
            prompt=() if isinstance(request.prompt, str) else tuple(request.prompt),
            tokens=(),
            text=None,
            finish_reason="error",
            usage=Usage(prompt_tokens=0, completion_tokens=0),
            error=refused,
        )


async def _show(screen: Screen, index: int, stream: Stream | Result) -> Result:
    if isinstance(stream, Result):
        screen.end(index, stream)
        return stream
    try:
        async for delta in stream:
            screen.add(index, delta)
    except RequestError:
        pass  # the ending below carries it
    screen.end(index, stream.result())
    return stream.result()


def demo_model() -> Path:
    """Return the folder of the model that ships with the package."""
    from importlib.resources import files

    folder = Path(str(files("laneway.models").joinpath("demo-shakespeare")))
    if not folder.is_dir():
        raise ConfigurationError("the demo model is not installed: name one with --model")
    return folder


def _read_tokens(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--prompt-tokens wants ids such as 1,2,3, not {text!r}") from None


def _usable(make: Any) -> Any:
    """Build a value from the command line's words; what is out of range is the user's error."""
    try:
        return make()
    except (TypeError, ValueError) as wrong:
        raise typer.BadParameter(str(wrong)) from wrong


def _row(index: int, result: Result) -> dict[str, Any]:
    """Return the line of one request as interfaces name it."""
    error = None
    if result.error is not None:
        error = {"type": _error_type(result), "message": str(result.error)}
    row = {
        "request": index,
        "prompt_tokens": list(result.prompt),
        "tokens": list(result.tokens),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
            "total_tokens": result.usage.total_tokens,
        },
        "error": error,
    }
    if result.suspect_tokens_from is not None:
        row["suspect_tokens_from"] = result.suspect_tokens_from
    if result.continued_tokens_from is not None:
        row["continued_tokens_from"] = result.continued_tokens_from
    return row


def _logprobs_row(pairs: tuple[tuple[int, float], ...]) -> dict[str, Any]:
    """Return one token's log-probability and the most likely; none below what clients know."""
    bounded = [[token, max(value, LOGPROB_LEAST)] for token, value in pairs]
    return {"token": bounded[0][0], "logprob": bounded[0][1], "top": bounded[1:]}


def _error_type(result: Result) -> str:
    reason = getattr(result.error, "reason", "")
    return reason or type(result.error).__name__
