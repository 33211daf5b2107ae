"""An engine with canaries on a fake device whose golden rows differ when told."""

from collections.abc import Callable

import attrs
import msgspec
from support.rig import Rig
from support.schedules import Scheduled, Shape

from laneway.engine import Limits, Stream
from laneway.engine.effects import SubmitJob
from laneway.engine.inputs import Completed, Input
from laneway.statemachines import Event

OFTEN = Limits(canary_jobs=8, canary_idle_ns=0, requalify_canaries=2)


def planned(rig: Rig, origin: str = "") -> list[Event]:
    """Return the plans of jobs so far, of one origin if one is named."""
    return [e for e in rig.events("job", "plan") if origin in ("", e.data["origin"])]


def differs(asked: SubmitJob, done: Completed) -> Completed:
    rows = tuple(msgspec.structs.replace(row, verdict="3 of 64 logits differ") for row in done.rows)
    return attrs.evolve(done, rows=rows)


def bad(when: Callable[[SubmitJob], bool]) -> Callable[[SubmitJob, Completed], Input]:
    """Return a device whose canaries differ where ``when`` says so."""

    def on_result(asked: SubmitJob, done: Completed) -> Input:
        is_bad = asked.origin == "canary" and when(asked)
        return differs(asked, done) if is_bad else done

    return on_result


def busy(limits: Limits = OFTEN, *, inflight: int = 2, batches: tuple[int, ...] = (1,)) -> Rig:
    """Return a rig with canaries, and lanes for six at once."""
    shape = Shape(batches, 6 - batches[-1], "length_zero", inflight, limits, canaries=True)
    return Scheduled(shape).rig


def fill(rig: Rig, count: int = 12, *, max_tokens: int = 8, first: int = 0) -> list[Stream]:
    """Hand in requests of one length."""
    return [
        rig.submit([1 + n % 60, 2, 3], seed=n, max_tokens=max_tokens, ignore_eos=True)
        for n in range(first, first + count)
    ]


def begin_examination(limits: Limits = OFTEN, *, runs: int = 1, count: int = 14) -> Rig:
    """Return a rig of which the ``runs``-th canary differed at its end, overlapped, under load."""
    rig = busy(limits)
    seen: list[int] = []

    def when(asked: SubmitJob) -> bool:
        seen.append(asked.job)
        return len(rig.events("model", "prove")) == runs - 1 and asked.rows[0].start > 0

    rig.device.on_result = bad(when)
    fill(rig, count)
    rig.run(until=lambda: bool(rig.events("model", "examine")))
    assert rig.events("model", "examine")
    rig.device.on_result = None
    return rig


def told_so_far(rig: Rig) -> dict[int, int]:
    """Return how many tokens each client was told."""
    return {one.stream.request: len(one.stream._tokens) for one in rig.streams}
