"""An engine on a fake device with wide submodels, with the turns of each class measured."""

from collections.abc import Sequence

import attrs
from support.fake_device import FakeDevice, artifact
from support.hash_model import CONTEXT
from support.rig import Rig
from support.turns import TurnMeter

from laneway.engine import Limits
from laneway.engine.inputs import ArtifactValidated, SubmodelFacts, Trial
from laneway.engine.ports import Step
from laneway.engine.queueing import bounds

VERIFIED = (
    *("IN_FLIGHT", "PING_PONG", "COUNTERS", "POLL_THREADSAFE"),
    *("BATCH_LANES", "LANE_RULE", "INCREMENTAL_PREFILL"),
)


def wide(
    model: int, *, lanes: int, batches: tuple[int, ...], rule: str, fixed: bool = False
) -> ArtifactValidated:
    """Return the fake's artifact with submodels of several batches."""
    submodels = tuple(
        SubmodelFacts(
            name=f"{task}_b{size}",
            task=task,
            batch_max=size,
            tokens_max=CONTEXT if task == "prefill" else 1,
            incremental=task == "prefill",
            fixed_rows=fixed,
        )
        for task in ("prefill", "decode")
        for size in batches
    )
    trials = tuple(Trial(origin="golden", prompt=(1, 2), forced=(3,), batch=b) for b in batches)
    return attrs.evolve(
        artifact(model), lane_count=lanes, lane_rule=rule, submodels=submodels, trials=trials
    )


@attrs.frozen
class Shape:
    """What a schedule runs on, and by which limits."""

    batches: tuple[int, ...]
    spare_lanes: int
    rule: str
    inflight: int
    limits: Limits
    fixed: bool = False
    canaries: bool = False


class Scheduled:
    """One engine on a wide fake device, with the turns measured."""

    def __init__(self, shape: Shape, order: Sequence[int] = ()) -> None:
        lanes = shape.batches[-1] + shape.spare_lanes
        device = FakeDevice(
            inflight_max=shape.inflight,
            verified=VERIFIED,
            artifact=lambda model: wide(
                model, lanes=lanes, batches=shape.batches, rule=shape.rule, fixed=shape.fixed
            ),
        )
        device.order = list(order)
        self.rig = Rig(device=device, limits=shape.limits, canaries=shape.canaries)
        self.meter = TurnMeter()
        watch = self.rig.journal.watch

        def take(steps: Sequence[Step]) -> None:
            watch(steps)
            for step in steps:
                self.meter.take(self.rig.state, step)

        self.rig.journal.watch = take
        self.bounds = bounds(self.rig.state, self.rig.state.models[1])

    def check_bounds(self) -> None:
        """I9: nobody waited longer than is stated."""
        for kind, most in self.bounds.items():
            found = self.meter.longest[kind]
            assert found <= most, f"I9: {kind} waited {found}, its bound is {most}"
