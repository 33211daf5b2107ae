"""Force every golden row through a device's own prefill and decode with KV, and compare.

Every golden run goes through the device twice on a fresh lane: once as one prefill of the prompt
and then a decode step for each greedy token, once as a prefill of the first token and then decode
steps only. So each row is compared as the device computes it in either way; a row counts once, and
its token is equal only if it is equal both ways. On the simulator the float32 logits and the
routing of every position are read through its test entries; elsewhere the BF16 rows of the output
buffer are what there is.

The device is driven with the same effects as by the engine, stepped by hand.

Source: E25, R10.2.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import attrs
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from laneway.adapters.comparing import LOGIT_TOLERANCE, compare_logits, routing_equal
from laneway.adapters.device import NpurtDevice
from laneway.adapters.golden import GoldenRun
from laneway.adapters.tensors import widen_bf16
from laneway.engine.effects import (
    ApplyKv,
    BufferPlan,
    ConfigureModel,
    DeviceEffect,
    KvOperation,
    RestoreBuffer,
    SubmitJob,
    SubmitRow,
    ValidateArtifact,
)
from laneway.engine.errors import DeviceFaultError, DeviceRefusedError, ModelError
from laneway.engine.inputs import (
    ArtifactRefused,
    ArtifactValidated,
    BufferRestored,
    Completed,
    Input,
    KvApplied,
    ModelConfigured,
    SubmitAccepted,
)

EPOCH = 1
GENERATION = 1
MODEL = 1
LANE = 1
FOREVER_NS = 1 << 62
BF16_STEP = 2.0**-8

Answer = TypeVar("Answer")


@attrs.frozen(kw_only=True)
class Verdict:
    """How a device's numbers compare with the golden ones.

    ``rows`` counts golden rows; ``tokens_compared`` those of them whose golden margin decides the
    token, ``tokens_equal`` those whose token was equal in every way it was computed.
    ``routing_equal`` is None for a dense model.

    ``dtype`` says which numbers were compared: ``float32``, or ``bfloat16`` with a bound of one
    rounding step more.
    """

    max_abs_logit_error: float
    dtype: str
    rows: int
    tokens_equal: int
    tokens_compared: int
    routing_equal: bool | None
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the device computes this model."""
        return (
            self.max_abs_logit_error <= self.bound
            and self.tokens_equal == self.tokens_compared
            and self.routing_equal is not False
        )


class Forcing:
    """Drives one device through golden runs; the only user of the device."""

    def __init__(self, device: NpurtDevice, source: str) -> None:
        self._device = device
        self._posted: list[Input] = []
        self._job = 0
        device.start(self._posted.append, threads=False)
        self._facts = self._ask(ValidateArtifact(model=MODEL, source=source), ArtifactValidated)
        # One row at a time: in the smallest batch, which needs no rule for inactive rows (E15).
        sizes = sorted(self._facts.submodels, key=lambda one: (-one.batch_max, one.tokens_max))
        submodels = {submodel.task: submodel for submodel in sizes}
        plans = tuple(
            BufferPlan(submodel=submodels[task].name, task=task, first=number, count=1)
            for number, task in enumerate(("prefill", "decode"), start=1)
        )
        self._buffers = {plan.task: plan.first for plan in plans}
        self._ask(
            ConfigureModel(
                model=MODEL,
                epoch=EPOCH,
                generation=GENERATION,
                lane_first=LANE,
                lane_count=self._facts.lane_count,
                buffers=plans,
                trials=(),
                timeout_ns=120_000_000_000,
            ),
            ModelConfigured,
        )

    def verify(self, tell: Callable[[int, int], None] = lambda done, of: None) -> Verdict:
        """Compare every golden run; ``tell`` hears of progress in runs."""
        runs = [
            run.golden
            for run in self._device.trials(MODEL)
            if run.golden is not None and run.trial.batch == 1  # the others repeat one of these
        ]
        if not runs:
            raise ModelError(
                f"no golden run can be compared: {self._device.url} computes nothing, or none of"
                " the model's runs fits its context (pack it again)"
            )
        errors: list[float] = []
        bounds: list[float] = []
        tokens: list[bool] = []
        rows = 0
        routed: list[bool] = []
        for done, run in enumerate(runs):
            tell(done, len(runs))
            rows += run.row_count
            agreed: dict[int, bool] = {}
            for split in dict.fromkeys((len(run.prompt), 1)):
                logits, experts, first = self._run(run, split)
                wanted = _rows(run, first, run.row_count)
                result = compare_logits(wanted, logits, bf16=not self._exact)
                errors.append(result.max_abs_logit_error)
                bounds.append(self._bound(wanted))
                for position, equal in self._compare_tokens(run, first, logits):
                    agreed[position] = agreed.get(position, True) and equal
                if experts is not None:
                    routed.append(routing_equal(wanted, experts))
            tokens += agreed.values()
        tell(len(runs), len(runs))
        return Verdict(
            max_abs_logit_error=max(errors),
            dtype="float32" if self._exact else "bfloat16",
            rows=rows,
            tokens_equal=sum(tokens),
            tokens_compared=len(tokens),
            routing_equal=all(routed) if routed else None,
            bound=max(bounds),
        )

    @property
    def _exact(self) -> bool:
        return self._device.simulator is not None

    def _compare_tokens(
        self, run: GoldenRun, first: int, logits: NDArray[np.float32]
    ) -> Iterator[tuple[int, bool]]:
        """Yield position and equality of the token of every row whose golden margin decides it."""
        for position, row in enumerate(logits, start=first):
            wanted = _rows(run, position, position + 1)
            result = compare_logits(wanted, row[np.newaxis], bf16=not self._exact)
            if result.tokens_compared:
                yield position, result.tokens_equal == 1

    def _bound(self, run: GoldenRun) -> float:
        if self._exact:
            return LOGIT_TOLERANCE
        return LOGIT_TOLERANCE + BF16_STEP * float(np.max(np.abs(run.logits)))

    def _run(
        self, run: GoldenRun, split: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int32] | None, int]:
        """Run a golden run as a prefill of ``split`` tokens and decode steps.

        Returns logits [rows, vocab], experts [layers, rows, k] or None, and the position of the
        first row (not 0 where a prefill shows only its last row).
        """
        logits: list[NDArray[np.float32]] = []
        experts: list[NDArray[np.int32]] = []
        layers, chosen = _routing_shape(run)
        due: tuple[KvOperation, ...] = ()
        for start, tokens in _pieces(run.tokens, split):
            done, due = self._submit(tokens, start, due)
            for offset in range(len(tokens)):
                if self._exact:
                    assert self._device.simulator is not None
                    logits.append(
                        self._device.simulator.logits(
                            done.ticket,
                            row=0,
                            position=offset,
                            vocabulary=self._facts.vocabulary,
                        )
                    )
                    experts += [self._experts(done.ticket, offset, layers, chosen)]
                elif offset == len(tokens) - 1:
                    bits = self._device.output_logits(MODEL, self._last_buffer)
                    logits.append(widen_bf16(bits[0]))
            self._ask(
                RestoreBuffer(
                    model=MODEL, buffer=self._last_buffer, job=self._job, ticket=done.ticket
                ),
                BufferRestored,
            )
        release = KvOperation(
            verb="RELEASE",
            lane=LANE,
            from_tokens=len(run.tokens),
            to_tokens=0,
            transaction=0,
        )
        self._ask(
            ApplyKv(model=MODEL, epoch=EPOCH, generation=GENERATION, operations=(*due, release)),
            KvApplied,
        )
        routes = np.stack(experts, axis=1) if layers and experts else None
        return np.stack(logits), routes, run.row_count - len(logits)

    def _experts(self, ticket: int, position: int, layers: int, chosen: int) -> NDArray[np.int32]:
        assert self._device.simulator is not None
        routes = np.empty((layers, chosen), np.int32)
        for layer in range(layers):
            routes[layer], _ = self._device.simulator.routing(
                ticket, row=0, position=position, layer=layer, experts_per_token=chosen
            )
        return routes

    def _submit(
        self, tokens: Sequence[int], start: int, due: tuple[KvOperation, ...]
    ) -> tuple[Completed, tuple[KvOperation, ...]]:
        """Run one job; return its completion and the commit that is due afterwards."""
        self._job += 1
        task = "prefill" if start == 0 else "decode"
        self._last_buffer = self._buffers[task]
        reserve = KvOperation(
            verb="RESERVE",
            lane=LANE,
            from_tokens=start,
            to_tokens=start + len(tokens),
            transaction=self._job,
        )
        row = SubmitRow(lane=LANE, owner=0, tokens=tuple(tokens), start=start, sampling=None)
        self._ask(
            SubmitJob(
                job=self._job,
                model=MODEL,
                epoch=EPOCH,
                generation=GENERATION,
                buffer=self._last_buffer,
                task=task,
                origin="warmup",
                operations=(*due, reserve),
                rows=(row,),
                suspect_after_ns=FOREVER_NS,
                confirm_after_ns=FOREVER_NS,
                cap_after_ns=FOREVER_NS,
            ),
            SubmitAccepted,
        )
        done = self._await(Completed)
        return done, (replace(reserve, verb="COMMIT"),)

    def _ask(self, effect: DeviceEffect, kind: type[Answer]) -> Answer:
        self._device.execute(effect)
        return self._await(kind)

    def _await(self, kind: type[Answer]) -> Answer:
        """Let the device work until an answer of this kind.

        Raises: ModelError if the artifact is refused; DeviceFaultError, DeviceRefusedError for any
        other answer.
        """
        while not self._posted:
            if not self._device.step() and not self._device.advance(None):
                raise DeviceRefusedError(f"the device gave no answer while {kind.__name__} was due")
        posted = self._posted.pop(0)
        if isinstance(posted, kind):
            return posted
        if isinstance(posted, ArtifactRefused):
            raise ModelError(posted.reason)
        reason = getattr(posted, "reason", str(posted))
        error = DeviceFaultError if isinstance(posted, Completed) else DeviceRefusedError
        raise error(f"{type(posted).__name__}: {reason}", code=getattr(posted, "code", 0))


def _pieces(tokens: Sequence[int], split: int) -> Iterator[tuple[int, Sequence[int]]]:
    yield 0, tokens[:split]
    for position in range(split, len(tokens)):
        yield position, tokens[position : position + 1]


def _routing_shape(run: GoldenRun) -> tuple[int, int]:
    if run.route_experts is None:
        return 0, 0
    return run.route_experts.shape[0], run.route_experts.shape[2]


def _rows(run: GoldenRun, first: int, last: int) -> GoldenRun:
    """Return the rows ``first .. last - 1`` of a run, for comparing logits; routing is left out."""
    if (first, last) == (0, run.row_count):
        return run
    return attrs.evolve(
        run,
        prompt=run.tokens[first : first + 1],
        greedy=tuple(int(token) for token in np.argmax(run.logits[first:last], axis=-1)),
        logits=run.logits[first:last],
        margin=run.margin[first:last],
        route_experts=None,
        route_weights=None,
        route_margin=None,
    )
