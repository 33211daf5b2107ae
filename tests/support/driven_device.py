"""Drive a device port with effects and look at what it posts, with or without threads."""

import threading
from collections.abc import Callable
from typing import TypeVar

from laneway.adapters.device import NpurtDevice
from laneway.engine.effects import (
    BufferPlan,
    ConfigureModel,
    DeviceEffect,
    KvOperation,
    PublishModel,
    SubmitJob,
    SubmitRow,
    ValidateArtifact,
)
from laneway.engine.inputs import (
    ArtifactValidated,
    Completed,
    Input,
    ModelConfigured,
    SubmitAccepted,
)
from laneway.engine.sampling import Sampling

SECOND = 1_000_000_000
PATIENCE_S = 60.0
LOOKS = 100
"""How often it is looked again, in that time, whether device time can pass."""
GREEDY = Sampling(temperature=0.0, seed=0)
LANE_FIRST = 40
BUFFER_FIRST = 70
EPOCH, GENERATION = 5, 9

Wanted = TypeVar("Wanted", bound=Input)


class DrivenDevice:
    """A started device, everything it posted so far, and the numbers an engine would keep.

    Lanes, buffers, epoch and generation begin at odd numbers, so that a mix-up with the device's
    own shows.
    """

    def __init__(self, device: NpurtDevice, *, threads: bool) -> None:
        self.device = device
        self.threads = threads
        self.posted: list[Input] = []
        self._changed = threading.Condition()
        self.next_job = 1
        self.lengths: dict[int, int] = {}
        self.facts: ArtifactValidated | None = None
        self.buffers: tuple[BufferPlan, ...] = ()
        device.start(self._post, threads=threads)

    def _post(self, posted: Input) -> None:
        with self._changed:
            self.posted.append(posted)
            self._changed.notify_all()

    def ask(self, effect: DeviceEffect, wanted: type[Wanted]) -> Wanted:
        """Hand an effect over and return its answer; no time passes."""
        seen = len(self.posted)
        self.device.execute(effect)
        if not self.threads:
            self.settle()
        with self._changed:
            self._changed.wait_for(
                lambda: not self.threads or any(isinstance(o, wanted) for o in self.posted[seen:]),
                PATIENCE_S,
            )
            for one in self.posted[seen:]:
                if isinstance(one, wanted):
                    return one
        raise AssertionError(f"no {wanted.__name__} came; posted: {self.posted[seen:]}")

    def run(self, effect: DeviceEffect, wanted: type[Wanted]) -> Wanted:
        """Hand an effect over, let time pass, and return the next input of a kind."""
        seen = len(self.posted)
        self.device.execute(effect)
        return self.next(wanted, after=seen)

    def next(
        self, wanted: type[Wanted], *, after: int, fits: Callable[[Wanted], bool] = lambda _: True
    ) -> Wanted:
        """Return the first input of a kind behind the ones already seen; time passes meanwhile."""
        while True:
            with self._changed:
                count = len(self.posted)
                for one in self.posted[after:count]:
                    if isinstance(one, wanted) and fits(one):
                        return one
            if not self._move() and len(self.posted) == count:
                raise AssertionError(f"no {wanted.__name__} came; posted: {self.posted[after:]}")

    def _move(self) -> bool:
        """Let something happen; return False when nothing will."""
        if not self.threads:
            return self.device.step() or self.device.advance()
        with self._changed:
            count = len(self.posted)
        for _ in range(LOOKS):
            if self.device.advance():
                return True
            with self._changed:  # a job that was accepted may not be waited for yet
                if self._changed.wait_for(lambda: len(self.posted) > count, PATIENCE_S / LOOKS):
                    return True
        return False

    def settle(self) -> None:
        """Without threads: carry out what waits, without letting time pass."""
        while self.device.step():
            pass

    # ------------------------------------------------------------------ a model

    def validate(self, source: str, *, model: int = 1) -> ArtifactValidated:
        """Validate an artifact and remember what it needs."""
        effect = ValidateArtifact(model=model, source=source)
        self.facts = self.ask(effect, ArtifactValidated)
        return self.facts

    def configure(self, *, model: int = 1, buffers_each: int = 2) -> ModelConfigured:
        """Configure the validated artifact with lanes and buffers numbered from odd places."""
        return self.ask(self.configure_effect(model, buffers_each), ModelConfigured)

    def configure_effect(self, model: int = 1, buffers_each: int = 2) -> ConfigureModel:
        """Make the effect that configures the validated artifact."""
        assert self.facts is not None
        self.buffers = tuple(
            BufferPlan(
                submodel=submodel.name,
                task=submodel.task,
                first=BUFFER_FIRST + index * buffers_each,
                count=buffers_each,
            )
            for index, submodel in enumerate(self.facts.submodels)
        )
        self.lengths = {}
        return ConfigureModel(
            model=model,
            epoch=EPOCH,
            generation=GENERATION,
            lane_first=LANE_FIRST,
            lane_count=self.facts.lane_count,
            buffers=self.buffers,
            trials=self.facts.trials,
            timeout_ns=120 * SECOND,
        )

    def load(self, source: str) -> None:
        """Validate, configure and publish."""
        self.validate(source)
        self.configure()
        self.device.execute(PublishModel(model=1, generation=GENERATION))

    def buffer(self, task: str, *, batch: int = 1, number: int = 0) -> int:
        """Return the number of a buffer of a submodel with that task and batch."""
        assert self.facts is not None
        for plan, submodel in zip(self.buffers, self.facts.submodels, strict=True):
            if (submodel.task, submodel.batch_max) == (task, batch):
                return plan.first + number
        raise AssertionError(f"no submodel {task} of batch {batch}")

    # ------------------------------------------------------------------ jobs

    def job(
        self,
        task: str,
        rows: tuple[SubmitRow, ...],
        *,
        before: tuple[KvOperation, ...] = (),
        batch: int = 1,
        buffer: int | None = None,
        origin: str = "request",
        generation: int = GENERATION,
        epoch: int = EPOCH,
        stall_ns: tuple[int, int, int] = (2 * SECOND, 6 * SECOND, 60 * SECOND),
    ) -> SubmitJob:
        """Make the effect that reserves and submits the next job."""
        number = self.next_job
        self.next_job += 1
        reserve = tuple(
            KvOperation(
                verb="RESERVE",
                lane=row.lane,
                from_tokens=row.start,
                to_tokens=row.start + len(row.tokens),
                transaction=number,
            )
            for row in rows
        )
        return SubmitJob(
            job=number,
            model=1,
            epoch=epoch,
            generation=generation,
            buffer=self.buffer(task, batch=batch) if buffer is None else buffer,
            task=task,
            origin=origin,
            operations=before + reserve,
            rows=rows,
            suspect_after_ns=stall_ns[0],
            confirm_after_ns=stall_ns[1],
            cap_after_ns=stall_ns[2],
        )

    def complete(self, effect: SubmitJob) -> Completed:
        """Run a job to its end and return its result."""
        return self.run(effect, Completed)

    def submit(self, effect: SubmitJob) -> int:
        """Submit a job, let no time pass, and return its ticket."""
        return self.ask(effect, SubmitAccepted).ticket


def row(
    tokens: tuple[int, ...],
    *,
    lane: int = 0,
    start: int = 0,
    owner: int = 1,
    sampling: Sampling | None = GREEDY,
) -> SubmitRow:
    """Make a row; lanes count from the model's first."""
    return SubmitRow(
        lane=LANE_FIRST + lane, owner=owner, tokens=tokens, start=start, sampling=sampling
    )


def settle_rows(verb: str, effect: SubmitJob) -> tuple[KvOperation, ...]:
    """Make COMMIT or ROLLBACK for every reservation of a job."""
    return tuple(
        KvOperation(
            verb=verb,
            lane=row.lane,
            from_tokens=row.start,
            to_tokens=row.start + len(row.tokens),
            transaction=effect.job,
        )
        for row in effect.rows
    )
