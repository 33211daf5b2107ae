"""Measure contenders against each other in one interleaved run, and say what came out.

Machines are shared and drift: every round runs each contender for a short burst, in alternating
order, and a ratio is formed from medians of the same rounds. Absolute times are for orientation,
ratios are what a gate judges.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs

BURST_NS = 40_000_000
ROUNDS = 9


@attrs.frozen(kw_only=True)
class Figure:
    """One measured figure.

    ``ratio`` is value over baseline, or baseline over value where more is better.

    ``gate`` is the condition on the ratio, or on the value, as text; ``gate_met`` is None where
    there is no gate.
    """

    id: str
    value: float
    unit: str
    baseline: str
    baseline_value: float
    ratio: float
    gate: str
    gate_met: bool | None

    def to_json(self) -> dict[str, Any]:
        """Return the figure as JSON values."""
        return attrs.asdict(self)


def _figure(
    figure_id: str,
    value: float,
    unit: str,
    baseline: str,
    baseline_value: float,
    ratio: float,
    gate: str,
    gate_met: bool,
) -> Figure:
    """Return a figure with its numbers rounded for the reader; the gate was judged before."""
    return Figure(
        id=figure_id,
        value=round(value, 4),
        unit=unit,
        baseline=baseline,
        baseline_value=round(baseline_value, 4),
        ratio=round(ratio, 3),
        gate=gate,
        gate_met=gate_met,
    )


def at_most(
    figure_id: str, value: float, unit: str, baseline: str, baseline_value: float, *, limit: float
) -> Figure:
    """Return a figure whose gate bounds value / baseline from above."""
    ratio = value / baseline_value
    gate = f"<= {limit:g}x"
    return _figure(figure_id, value, unit, baseline, baseline_value, ratio, gate, ratio <= limit)


def times_faster(
    figure_id: str, value: float, unit: str, baseline: str, baseline_value: float, *, limit: float
) -> Figure:
    """Return a figure whose gate bounds baseline / value from below."""
    ratio = baseline_value / value
    gate = f">= {limit:g}x faster"
    return _figure(figure_id, value, unit, baseline, baseline_value, ratio, gate, ratio >= limit)


def times_as_fast(
    figure_id: str, value: float, unit: str, baseline: str, baseline_value: float, *, limit: float
) -> Figure:
    """Return a figure whose gate bounds baseline / value from below, by a share of the baseline."""
    figure = times_faster(figure_id, value, unit, baseline, baseline_value, limit=limit)
    return attrs.evolve(figure, gate=f">= {limit:g}x as fast")


def absolute(
    figure_id: str,
    value: float,
    unit: str,
    baseline: str,
    baseline_value: float,
    *,
    least: float | None = None,
    most: float | None = None,
) -> Figure:
    """Return a figure whose gate bounds the value itself; the baseline is for orientation."""
    met = (least is None or value >= least) and (most is None or value <= most)
    bound = f">= {least:g}" if least is not None else f"<= {most:g}"
    ratio = value / baseline_value
    gate = f"{bound} {unit}"
    return _figure(figure_id, value, unit, baseline, baseline_value, ratio, gate, met)


def compared(
    figure_id: str, value: float, unit: str, baseline: str, baseline_value: float
) -> Figure:
    """Return a figure of baseline / value without a gate."""
    figure = times_faster(figure_id, value, unit, baseline, baseline_value, limit=0.0)
    return attrs.evolve(figure, gate="", gate_met=None)


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keep the caller, and threads that begin meanwhile, on one core, where the system can.

    Why: on a shared machine one core may be a third slower than another for as long as a thread
    stays on it, and contenders on threads of their own would be compared by where they are.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int = ROUNDS,
    burst_ns: int | None = None,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, float]:
    """Return the median time of one call of each contender, in microseconds.

    Every contender is called once before, so that nothing is compiled or first touched inside.
    """
    length_ns = BURST_NS if burst_ns is None else burst_ns
    for work in contenders.values():
        work()
    bursts = {name: partial(_burst, work, length_ns) for name, work in contenders.items()}
    return take_turns(bursts, rounds=rounds, tell=tell)


def take_turns(
    contenders: Mapping[str, Callable[[], float]],
    *,
    rounds: int = ROUNDS,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, float]:
    """Return the median of what each contender says that its burst took, in any unit."""
    order = list(contenders)
    told: dict[str, list[float]] = {name: [] for name in order}
    for number in range(rounds):
        tell(number, rounds)
        for name in order if number % 2 == 0 else reversed(order):
            told[name].append(contenders[name]())
    return {name: statistics.median(values) for name, values in told.items()}


def _burst(work: Callable[[], object], burst_ns: int) -> float:
    """Call again and again for a while, at least once; return the time of one call in us."""
    count = 0
    begun = time.perf_counter_ns()
    while True:
        work()
        count += 1
        spent = time.perf_counter_ns() - begun
        if spent >= burst_ns:
            return spent / count / 1000
