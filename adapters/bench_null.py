"""A device that does nothing and answers at once: what is left is what the engine itself costs.

Theory of operation. Every effect gets the answer of a healthy device inside ``execute``, on the
engine's own thread, so no other thread takes part. Decode jobs run only as far as they are let:
``run`` lets a number of them through and waits until the next one stands before the device. So an
engine with threads can be measured in bursts, between which it sleeps.
"""

import threading
from collections.abc import Callable

from laneway.adapters.text import TokenIdsText
from laneway.engine.clock import Clock, MonotonicClock
from laneway.engine.effects import (
    ApplyKv,
    CloseDevice,
    ConfigureModel,
    DeviceEffect,
    ProbeHealth,
    ReadCounters,
    ReleaseModel,
    RestoreBuffer,
    SubmitJob,
    ValidateArtifact,
)
from laneway.engine.errors import InternalError
from laneway.engine.evidence import Capability
from laneway.engine.inputs import (
    NO_TOKEN,
    ArtifactValidated,
    BufferRestored,
    ChipFacts,
    Completed,
    CountersRead,
    DeviceClosed,
    DeviceFacts,
    HealthFacts,
    HealthProbed,
    Input,
    JobTimes,
    KvApplied,
    ModelConfigured,
    ModelReleased,
    RowResult,
    SubmitAccepted,
    SubmodelFacts,
    Trial,
)
from laneway.engine.ports import TextPort
from laneway.statemachines.values import quick

CONTEXT_TOKENS = 1 << 20
VOCABULARY = 151_936
TIMEOUT_S = 120.0

CHIP = ChipFacts(total_bytes=1 << 34, used_bytes=0)
_TIMES = JobTimes(
    submit_ns=90_000_000_000_000,
    accept_ns=90_000_000_004_100,
    h2d_begin_ns=90_000_000_012_300,
    h2d_end_ns=90_000_000_095_400,
    exec_begin_ns=90_000_000_101_200,
    exec_end_ns=90_000_009_412_700,
    d2h_begin_ns=90_000_009_420_100,
    d2h_end_ns=90_000_009_690_800,
    visible_ns=90_000_009_702_300,
    postprocess_ns=412_345,
)
"""The instants of a job that took 10 ms, so that they have the digits they have in life."""

_ROWS = tuple(RowResult(token=(row * 7919 + 104_729) % VOCABULARY) for row in range(64))
_FORCED = (RowResult(token=NO_TOKEN),)
"""Results made once: to make them is a device's work, which is not measured."""

_make_accepted, _make_completed = quick(SubmitAccepted), quick(Completed)
_make_restored = quick(BufferRestored)
"""For the same reason what is made each time is made quickly."""


_CAPABILITIES = tuple(
    Capability(name=name, support="yes", evidence="SIM", source="simulated", value=value)
    for name, value in (("BATCH_LANES", 16), ("LANE_RULE", 0b11))
)
"""What it says of itself, so that the engine lets it run batches with inactive rows."""


class NullDevice:
    """A DevicePort whose jobs take no time; decode jobs wait for ``run``.

    ``lanes``: KV lanes of its one model. ``rows_max``: rows of its largest batch, for both tasks.
    """

    virtual = False

    def __init__(self, *, lanes: int, rows_max: int) -> None:
        self._clock = MonotonicClock()
        self._lanes = lanes
        self._rows_max = rows_max
        self._text = TokenIdsText()
        self._post: Callable[[Input], None] | None = None
        self._held: SubmitJob | None = None
        self._left = 0
        self._stands = threading.Event()

    # ------------------------------------------------------------------ for the measurement

    def run(self, jobs: int) -> None:
        """Let so many decode jobs through; return when the next one stands before the device.

        Raises: InternalError when none comes.
        """
        if not self._stands.wait(TIMEOUT_S) or self._held is None:
            raise InternalError(f"no decode job came within {TIMEOUT_S:g} s")
        held, self._held = self._held, None
        self._left = jobs
        self._stands.clear()
        self.execute(held)
        if not self._stands.wait(TIMEOUT_S):
            raise InternalError(f"{jobs} decode jobs were not done within {TIMEOUT_S:g} s")

    def open_up(self) -> None:
        """Let everything through from now on, so that the engine can be closed."""
        self._left = -1
        if self._held is not None:
            held, self._held = self._held, None
            self.execute(held)

    # ------------------------------------------------------------------ the port

    @property
    def clock(self) -> Clock:
        """The host's clock."""
        return self._clock

    def describe(self) -> DeviceFacts:
        """Return facts of nothing in particular."""
        return DeviceFacts(
            url="null:",
            backend="null",
            product="none",
            serial="0",
            runtime_version="0",
            driver_version="0",
            firmware_version="0",
            device_epoch=1,
            inflight_max=1,
            chips=(CHIP,),
            capabilities=_CAPABILITIES,
            backend_kind="sim",
            proven=("BATCH_LANES", "LANE_RULE"),
        )

    def start(self, post: Callable[[Input], None], *, threads: bool) -> None:
        """Take where answers go; there are no threads here."""
        self._post = post

    def execute(self, effect: DeviceEffect) -> None:
        """Answer at once, or keep a decode job that is not let through yet."""
        if isinstance(effect, SubmitJob) and effect.task == "decode" and effect.origin == "request":
            if self._left == 0:
                self._held = effect
                self._stands.set()
                return
            self._left -= 1
        assert self._post is not None
        for answer in self._answers(effect):
            self._post(answer)

    def step(self) -> bool:
        """Do nothing: every effect was answered."""
        return False

    def advance(self, until_ns: int | None) -> bool:
        """Do nothing: time passes by itself."""
        return False

    def text(self, model: int) -> TextPort:
        """Return the side without text."""
        return self._text

    def stop(self) -> None:
        """Do nothing: there are no threads here."""

    # ------------------------------------------------------------------ answers

    def _answers(self, effect: DeviceEffect) -> list[Input]:
        match effect:
            case SubmitJob():
                return [_make_accepted(job=effect.job, ticket=effect.job), _completed(effect)]
            case RestoreBuffer():
                return [_make_restored(buffer=effect.buffer, job=effect.job)]
            case ApplyKv():
                return [KvApplied(lanes=tuple(one.lane for one in effect.operations))]
            case ValidateArtifact():
                return [null_artifact(effect.model, self._lanes, self._rows_max)]
            case ConfigureModel():
                return [_configured(effect)]
            case ReleaseModel():
                return [ModelReleased(model=effect.model, used_bytes=(0,), healthy=True)]
            case ReadCounters():
                return [CountersRead(asked=effect.asked, counters=())]
            case ProbeHealth():
                return [HealthProbed(health=_healthy(self._clock.now_ns()), reason="")]
            case CloseDevice():
                return [DeviceClosed(abandoned=effect.abandon, reason="")]
        return []


def _completed(effect: SubmitJob) -> Completed:
    return _make_completed(
        job=effect.job,
        ticket=effect.job,
        epoch=effect.epoch,
        generation=effect.generation,
        flags=7,
        kv_effect="applied",
        engine_slot=effect.job % 2,
        rows=_ROWS[: len(effect.rows)] if effect.origin == "request" else _FORCED,
        times=_TIMES,
    )


def null_artifact(model: int, lanes: int, rows_max: int) -> ArtifactValidated:
    """Return an artifact without numbers: two submodels of so many rows, one short warm-up."""
    return ArtifactValidated(
        model=model,
        name="null",
        sha256="0" * 64,
        architecture="none",
        layout="single",
        lane_rule="length_zero",
        context_tokens=CONTEXT_TOKENS,
        vocabulary=VOCABULARY,
        lane_count=lanes,
        end_tokens=(),
        submodels=(
            SubmodelFacts(name="prefill", task="prefill", batch_max=rows_max, tokens_max=512),
            SubmodelFacts(name="decode", task="decode", batch_max=rows_max, tokens_max=1),
        ),
        chip_bytes=(1,),
        chips=(CHIP,),
        trials=(Trial(origin="warmup", prompt=(1,), forced=()),),
    )


def _configured(effect: ConfigureModel) -> ModelConfigured:
    return ModelConfigured(
        model=effect.model,
        device_generation=1,
        device_epoch=1,
        duration_ns=1,
        used_bytes_before=(0,),
        used_bytes_after=(0,),
    )


def _healthy(now_ns: int) -> HealthFacts:
    return HealthFacts(
        state="ok",
        device_epoch=1,
        sticky=0,
        advised=0,
        observed_ns=now_ns,
        last_progress_ns=now_ns,
        used_bytes=(0,),
        counters=(),
    )
