"""The suite ``batch``: choose the batch of a model on a device by what is measured (R6.3).

Every batch size has a calbin of its own, configured alone, and is asked job by job. Times are the
device's (from submit to visible), so a simulated board gives the same numbers on every machine. For
each size: the time per token of a request that is alone in it (P50, P99); tokens a second when it
is full, also when the temperature stands; the share of that which a partly filled batch keeps; what
it costs that the rows are of different lengths; KV, workspace and D2H bytes for a token; and
temperature and power while it runs full. What a device does not tell is not told here either.

The choice is the smallest size that comes within NEAR of the most tokens a second: larger is not
taken for faster, and what is gained last is paid by everyone who is alone.
"""

import ctypes
import statistics
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import attrs

from laneway.adapters import npurt
from laneway.adapters.bench_board import BATCHES, calbin, probed
from laneway.adapters.manifest import MANIFEST_NAME, read_manifest
from laneway.adapters.measuring import Figure
from laneway.adapters.probing import Flight, Piece, Probed
from laneway.adapters.rooted import open_root
from laneway.engine.errors import ConfigurationError

BOARD = "sim:tp2-b16?clock=virtual"
TICKS = 48
CONTEXT_TOKENS = 160
NEAR = 0.95
NOT_TOLD = "not told"
SHORT, LONG = 4, 84
"""Lengths of the prompts in tokens."""

BLOCKS_MAX = 60
STEADY_CELSIUS = 0.2
"""Full batches run in blocks until a block changes the temperature by less."""

_COMPUTES = 3
"""The state of a job in EXEC (npurt.h)."""

MS = 1_000_000


@attrs.frozen(kw_only=True)
class Measured:
    """What one batch size gave. Times in ns of the device, rates in tokens a second.

    ``steady_rate`` is the rate when the temperature stands, ``celsius`` and ``watts`` of each chip
    are what was read then, empty where they are not told.

    ``fill`` and ``efficiency`` belong together: rows, and the tokens a second that remain of a full
    batch. ``mixed`` is the time of a tick with rows of different lengths over one with rows of
    their mean length.
    """

    batch: int
    alone_p50_ns: float
    alone_p99_ns: float
    rate: float
    steady_rate: float
    fill: tuple[int, ...]
    efficiency: tuple[float, ...]
    mixed: float
    kv_bytes: float
    workspace_bytes: float
    d2h_bytes: float | None
    celsius: tuple[float, ...]
    watts: tuple[float, ...]


def run(
    tell: Callable[[str], None] = lambda text: None,
    *,
    model: Path | None = None,
    device: str = BOARD,
    plot: Path | None = None,
    ticks: int = TICKS,
) -> Iterator[Figure]:
    """Measure every batch size, then choose.

    Raises: ConfigurationError for a plot without matplotlib; ModelError; DeviceError.
    """
    draw = None if plot is None else _drawing(plot)
    measured = []
    for batch in _sizes(model):
        tell(f"batch: {batch} rows")
        with ExitStack() as stack:
            folder = stack.enter_context(
                calbin(model, batch=sorted({1, batch}), context=CONTEXT_TOKENS)
            )
            measured.append(measure(stack.enter_context(probed(device, folder)), batch, ticks))
    for one in measured:
        yield from _figures(one, measured[0])
    if draw is not None:
        draw(measured)
    yield choose(measured)


def _is_calbin(model: Path) -> bool:
    return (model / MANIFEST_NAME).is_file()


def _sizes(model: Path | None) -> tuple[int, ...]:
    """Return the sizes to measure: those of a calbin, or those that a model is packed with."""
    if model is None or not _is_calbin(model):
        return BATCHES
    manifest, _ = read_manifest(open_root(model))
    return tuple(sorted({part.max_batch for part in manifest.submodels if part.task == "decode"}))


def measure(board: Probed, batch: int, ticks: int) -> Measured:
    """Measure one size on an opened device; its decode submodel is the only one used."""
    board.parts = tuple(
        part for part in board.parts if part.task == "prefill" or part.batch_max == batch
    )
    alone = _ticks(board, [SHORT], ticks)
    rates = {
        rows: rows / statistics.mean(_ticks(board, [SHORT] * rows, ticks)) * 1e9
        for rows in sorted({max(1, batch * part // 4) for part in (1, 2, 3)} | {1})
        if rows < batch
    }
    before = board.counters()
    rates[batch] = batch / statistics.mean(_ticks(board, [SHORT] * batch, ticks)) * 1e9
    after = board.counters()
    # The prefills of those sequences have one row of logits each, like every tick of one row.
    rows_read = batch * (ticks + 1)
    told = "d2h_bytes" in before and "d2h_bytes" in after
    info = board.info
    steady, (celsius, watts) = _run_hot(board, batch, ticks)
    return Measured(
        batch=batch,
        alone_p50_ns=statistics.median(alone),
        alone_p99_ns=statistics.quantiles(alone, n=100, method="inclusive")[98],
        rate=rates[batch],
        steady_rate=steady,
        fill=tuple(rates),
        efficiency=tuple(rate / rates[batch] for rate in rates.values()),
        mixed=_mixed(board, batch, ticks),
        kv_bytes=sum(info.kv_bytes) / (info.max_lanes * info.max_context),
        workspace_bytes=float(sum(info.workspace_bytes)),
        d2h_bytes=(after["d2h_bytes"] - before["d2h_bytes"]) / rows_read if told else None,
        celsius=celsius,
        watts=watts,
    )


def _ticks(
    board: Probed, lengths: Items[int], ticks: int, *, last: Callable[[Flight], None] | None = None
) -> list[int]:
    """Return how long each decode job takes the device with a row for every given length. ns.

    ``last`` is called with the last job, while it is in flight.
    """
    lanes = [board.open() for _ in lengths]
    for lane, length in zip(lanes, lengths, strict=True):
        board.run(Piece(lane, tuple(range(1, length + 1))))
    took = []
    for number in range(ticks):
        flight = board.start([Piece(lane, (1,)) for lane in lanes])
        if last is not None and number == ticks - 1:
            last(flight)
        times = board.finish(board.wait((flight,))).times
        took.append(int(times.visible - times.submit))
    for lane in lanes:
        board.release(lane)
    return took


def _mixed(board: Probed, batch: int, ticks: int) -> float:
    """Return the time of a tick with half its rows long, over one in which all have the mean."""
    if batch == 1:
        return 1.0
    few = max(1, ticks // 4)
    half = batch // 2
    mixed = _ticks(board, [SHORT] * half + [LONG] * (batch - half), few)
    alike = _ticks(board, [(SHORT + LONG) // 2] * batch, few)
    return statistics.mean(mixed) / statistics.mean(alike)


def _run_hot(board: Probed, batch: int, ticks: int) -> "tuple[float, Climate]":
    """Run full batches until the temperature stands, as long as one is told and it moves.

    Return tokens a second at the end, and what was read while the last job computed.
    """
    seen: list[Climate] = []

    def look(flight: Flight) -> None:
        while board.poll(flight).state < _COMPUTES and (not board.device.stepped or board.step()):
            pass
        seen.append(_climate(board))

    for _ in range(BLOCKS_MAX):
        rate = batch / statistics.mean(_ticks(board, [SHORT] * batch, ticks, last=look)) * 1e9
        if len(seen) > 1 and not _moved(seen[-2], seen[-1]):
            break
    return rate, seen[-1]


def _moved(before: "Climate", after: "Climate") -> bool:
    pairs = zip(before[0], after[0], strict=True)
    return any(abs(now - was) >= STEADY_CELSIUS for was, now in pairs)


Climate = tuple[tuple[float, ...], tuple[float, ...]]
"""Degrees and watts by chip, empty where they are not told."""


def _climate(board: Probed) -> Climate:
    """Return temperature and power of each chip in use, where the device tells them."""
    health = npurt.Health()
    board.calls.call("npurt_device_health", ctypes.byref(health))
    celsius, watts = (
        tuple(values[chip] / 1000 for chip in board.chips) if health.valid_mask >> bit & 1 else ()
        for bit, values in ((1, health.temp_mdegc), (3, health.power_mw))
    )
    return celsius, watts


# ---------------------------------------------------------------------------- telling


def _figures(one: Measured, first: Measured) -> Iterator[Figure]:
    """Yield the figures of one size, each beside that of the smallest."""
    name = f"b{one.batch}"
    beside = f"b{first.batch}"

    def figure(what: str, value: float, unit: str, base: float) -> Figure:
        return Figure(
            id=f"R6.3/{name}/{what}",
            value=round(value, 4),
            unit=unit,
            baseline=beside,
            baseline_value=round(base, 4),
            ratio=round(value / base, 3) if base else 0.0,
            gate="",
            gate_met=None,
        )

    yield figure("alone p50", one.alone_p50_ns / MS, "ms/token", first.alone_p50_ns / MS)
    yield figure("alone p99", one.alone_p99_ns / MS, "ms/token", first.alone_p99_ns / MS)
    yield figure("full", one.rate, "tokens/s", first.rate)
    yield figure("full, steady", one.steady_rate, "tokens/s", first.steady_rate)
    for rows, share in zip(one.fill, one.efficiency, strict=True):
        if rows < one.batch:
            yield figure(f"{rows} rows", share, "of full", 1.0)
    yield figure("mixed lengths", one.mixed, "x the mean length", 1.0)
    yield figure("kv", one.kv_bytes, "bytes reserved/token of room", first.kv_bytes)
    yield figure("workspace", one.workspace_bytes, "bytes", first.workspace_bytes)
    if one.d2h_bytes is not None:
        yield figure("d2h", one.d2h_bytes, "bytes/token", first.d2h_bytes or 0.0)
    for what, unit, told, base in (
        ("temperature", "degC", one.celsius, first.celsius),
        ("power", "W", one.watts, first.watts),
    ):
        if told:
            yield figure(what, max(told), unit, max(base, default=0.0))
        else:
            yield attrs.evolve(figure(what, 0.0, unit, 0.0), baseline=NOT_TOLD)


def choose(measured: Items[Measured]) -> Figure:
    """Return the recommendation: the smallest size near the most tokens a second, and why."""
    best = max(measured, key=lambda one: one.steady_rate)
    chosen = next(one for one in measured if one.steady_rate >= NEAR * best.steady_rate)
    first = measured[0]
    half = [
        share
        for rows, share in zip(chosen.fill, chosen.efficiency, strict=True)
        if rows == max(1, chosen.batch // 2)
    ]
    reasons = [
        f"{chosen.rate:.0f} tokens/s full, {chosen.rate / first.rate:.2f}x of b{first.batch}",
        f"the most is {best.rate:.0f} with b{best.batch}",
        f"alone a token takes {chosen.alone_p50_ns / first.alone_p50_ns:.2f}x of b{first.batch}",
        f"half full keeps {half[0]:.0%}",
    ]
    return Figure(
        id="R6.3/choice",
        value=chosen.batch,
        unit="rows",
        baseline="; ".join(reasons),
        baseline_value=best.batch,
        ratio=round(chosen.rate / best.rate, 3),
        gate="",
        gate_met=None,
    )


def _drawing(path: Path) -> Callable[[Items[Measured]], None]:
    """Return what draws the sizes into a file.

    Raises: ConfigurationError without matplotlib, or for a file that it could not write: before
    minutes are spent on measuring.
    """
    try:
        matplotlib = import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigurationError("--plot needs matplotlib: pip install 'laneway[plot]'") from error
    kinds = matplotlib.Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigurationError(f"--plot {path}: the name must end in one of {', '.join(kinds)}")
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"--plot {path}: there is no folder {path.absolute().parent}")

    def draw(measured: Items[Measured]) -> None:
        picture = matplotlib.Figure(figsize=(8, 4), layout="constrained")
        rate, alone = picture.subplots(1, 2)
        sizes = [one.batch for one in measured]
        for one in measured:
            full = [share * one.rate for share in one.efficiency]
            rate.plot(one.fill, full, marker="o", label=f"batch {one.batch}")
        rate.set(xlabel="rows in use", ylabel="tokens/s (device time)", title="a batch, filled")
        rate.set_xticks(sorted({rows for one in measured for rows in one.fill}))
        rate.set_ylim(bottom=0)
        rate.legend()
        for label, values in (
            ("P50", [one.alone_p50_ns / MS for one in measured]),
            ("P99", [one.alone_p99_ns / MS for one in measured]),
        ):
            alone.plot(sizes, values, marker="o", label=label)
        alone.set(xlabel="batch", ylabel="ms a token", title="a request that is alone")
        alone.set_xticks(sizes)
        alone.set_ylim(bottom=0)
        alone.legend()
        try:
            picture.savefig(path)
        except OSError as error:
            told = error.strerror or error
            raise ConfigurationError(f"--plot {path}: cannot be written: {told}") from error

    return draw
