"""``laneway model``: pack, inspect and verify calbins."""

import json
import sys
from pathlib import Path
from typing import Annotated

import attrs
import typer
from rich.console import Console
from rich.progress import Progress

from laneway.adapters import open_device
from laneway.adapters.exits import ANSWER_IS_NO, DONE
from laneway.engine.errors import ConfigurationError

app = typer.Typer(
    help="""Pack, inspect and verify models.

    Examples: laneway model inspect models/tiny-moe

    laneway model verify models/tiny-moe
    """,
    no_args_is_help=True,
)
VERIFY_DEVICE = "sim:?clock=virtual&capture=1"


@app.command()
def pack(
    source: Annotated[Path, typer.Argument(help="Hugging Face Qwen3 or Qwen3-MoE folder.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write the calbin into.")],
    batch: Annotated[str, typer.Option(help="Batch sizes, such as 1,4,8.")] = "1",
    lanes: Annotated[int | None, typer.Option(help="Default max(8, 2 x largest batch).")] = None,
    context: Annotated[int | None, typer.Option(help="Positions a lane holds.")] = None,
    chips: Annotated[int | None, typer.Option(help="Default as the layout needs.")] = None,
    layout: Annotated[
        str | None, typer.Option(help="single, tp2, ep2, pp2, tpep; default tp2.")
    ] = None,
    lane_rule: Annotated[
        str, typer.Option(help="Inactive rows: undefined, length_zero, mask_csr, scratch_lane.")
    ] = "length_zero",
    fixed_rows: Annotated[
        bool, typer.Option("--fixed-rows", help="Row i of a batch takes lane i only.")
    ] = False,
    kv_layout: Annotated[str, typer.Option(help="only_valid, all, auto.")] = "all",
    model_root: Annotated[
        Path | None, typer.Option(help="Folder that links in the source may lead into.")
    ] = None,
) -> None:
    """Make a simulated calbin from a model folder.

    Examples:
        laneway model pack models/tiny-moe build/tiny-moe

        laneway model pack models/tiny-dense build/small --lanes 16 --context 128

    """
    from laneway.adapters.calbin import pack as pack_folder

    try:
        sizes = tuple(int(part) for part in batch.split(","))
    except ValueError:
        raise typer.BadParameter(f"--batch wants sizes such as 1,4, not {batch!r}") from None
    with Console(file=sys.stderr).status(f"packing {source.name}") as status:
        manifest = pack_folder(
            source,
            destination,
            batch=sizes,
            lanes=lanes,
            context=context,
            chips=chips,
            layout=layout,
            lane_rule=lane_rule,
            fixed_rows=fixed_rows,
            kv_layout=kv_layout,
            model_root=model_root,
            progress=lambda what: status.update(f"packing {source.name}: {what}"),
        )
    print(f"packed {manifest.name} into {destination}")


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="Calbin or Hugging Face folder.")],
    model_root: Annotated[Path | None, typer.Option(help="See pack.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Tell what is in a model folder, after checking it.

    Examples:
        laneway model inspect models/demo-shakespeare

    """
    from laneway.adapters.calbin import inspect as inspect_folder

    found = inspect_folder(folder, model_root=model_root)
    print(json.dumps(found) if as_json else json.dumps(found, indent=2))


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="Calbin or Hugging Face folder.")],
    device: Annotated[str, typer.Option(help="Device URL.")] = VERIFY_DEVICE,
    model_root: Annotated[Path | None, typer.Option(help="See pack.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Force every golden row through a device's prefill and decode, and compare the logits.

    Exit code 0 when the device computes the model, 1 when it does not.

    Examples:
        laneway model verify models/tiny-moe

        laneway model verify build/tiny-moe --json

    """
    from laneway.adapters.device import NpurtDevice
    from laneway.adapters.validating import ArtifactOptions
    from laneway.adapters.verifying import Forcing

    given = {} if model_root is None else {"options": ArtifactOptions(model_root=str(model_root))}
    opened = open_device(_with_capture(device), **given)
    if not isinstance(opened, NpurtDevice):
        raise ConfigurationError(f"{device}: golden rows can be forced only through npurt devices")
    console = Console(file=sys.stderr)
    quiet = as_json or not console.is_terminal
    try:
        with Progress(console=console, transient=True, disable=quiet) as progress:
            task = progress.add_task("golden runs")
            verdict = Forcing(opened, str(folder)).verify(
                lambda done, of: progress.update(task, completed=done, total=of)
            )
    finally:
        opened.stop()
    if as_json:
        told = attrs.asdict(verdict)
        del told["bound"]
        print(json.dumps(told))
    else:
        print(
            f"{verdict.rows} rows, largest logit error {verdict.max_abs_logit_error:.3g}"
            f" ({verdict.dtype}, bound {verdict.bound:.3g}), tokens {verdict.tokens_equal} of"
            f" {verdict.tokens_compared}, routing"
            f" {'-' if verdict.routing_equal is None else verdict.routing_equal}"
        )
        print("verify: ok" if verdict.ok else "verify: the device does not compute this model")
    raise typer.Exit(DONE if verdict.ok else ANSWER_IS_NO)


def _with_capture(url: str) -> str:
    """Ask a simulated board to keep float32 logits, and to be stepped."""
    name, _, rest = url.partition(":")
    if name != "sim":
        return url
    profile, _, query = rest.partition("?")
    keys = {part.partition("=")[0] for part in query.split("&") if part}
    added = [f"{k}={v}" for k, v in (("clock", "virtual"), ("capture", "1")) if k not in keys]
    return f"sim:{profile}?" + "&".join([part for part in (query, *added) if part])
