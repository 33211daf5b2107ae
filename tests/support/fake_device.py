"""A device port without a device: answers every effect at once or when told, fails when told.

Its "model" is a hash: the token after a sequence is a function of the sequence, seed and position,
so that a mixed-up lane, a lost or repeated token or a wrong start shows in the text. It also holds
the engine to the rules of memory: it asserts when a buffer or a lane is used while it may not be.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import attrs
from support.hash_model import (
    CONTEXT,
    END_TOKEN,
    LANES,
    VOCABULARY,
    WordText,
    answer,
    artifact,
    healthy,
    next_token,
)
from support.told import fault_told

from laneway.engine.clock import ManualClock
from laneway.engine.effects import (
    ApplyKv,
    CancelJob,
    CloseDevice,
    ConfigureModel,
    DeviceEffect,
    KvOperation,
    ProbeHealth,
    PublishModel,
    ReadCounters,
    ReleaseModel,
    RestoreBuffer,
    RunReset,
    SubmitJob,
    SubmitRow,
    ValidateArtifact,
)
from laneway.engine.evidence import Capability
from laneway.engine.inputs import (
    NO_TOKEN,
    ArtifactRefused,
    ArtifactValidated,
    BufferRestored,
    CancelTold,
    ChipFacts,
    Completed,
    CountersRead,
    DeviceClosed,
    DeviceFacts,
    DeviceFaulted,
    HealthProbed,
    Input,
    JobTimes,
    KvApplied,
    KvApplyFailed,
    ModelConfigured,
    ModelReleased,
    ResetFinished,
    RowResult,
    SubmitAccepted,
    SubmitDoubtful,
    SubmitRefused,
)

COST_NS = 1_000

__all__ = [
    "CONTEXT",
    "END_TOKEN",
    "LANES",
    "VOCABULARY",
    "FakeDevice",
    "KvFault",
    "answer",
    "artifact",
    "healthy",
]


@attrs.frozen(kw_only=True)
class KvFault:
    """The next ``times`` lists that hold an operation ``verb`` are not applied."""

    verb: str
    unknown: bool = False
    code: int = 0x0703
    times: int = 1


@attrs.define
class FakeDevice:
    """A DevicePort in plain Python, stepped by hand.

    ``refuse_artifact`` refuses loads. ``submits`` says what the next submits become: 0 accepted, a
    code refused, ``doubt`` doubtful, ``early`` completed before it is accepted. ``kv_faults`` are
    lists not applied. ``overrides`` replaces the answer to a kind of effect; ``on_result`` may
    replace what a finished job posts; ``holding`` keeps jobs from finishing; ``meanwhile`` is
    called after each answer, as another thread would come in between. ``bank`` is the device's word
    on each lane's sequence, moved by the KV operations alone, and every reservation is checked
    against it. ``verified`` names the capabilities that carry a record. ``order`` says which of the
    running jobs ends next, by place. ``resets`` changes fields of the reports of the next resets.
    ``sources`` answers for the artifacts of single sources in place of ``artifact``.
    ``cancels`` is the code that a cancel is answered with; ``ends``: 0, and the job does end.
    """

    clock: ManualClock = attrs.Factory(ManualClock)
    refuse_artifact: str = ""
    verdict: str = "equal"
    submits: deque[int | str] = attrs.Factory(deque)
    kv_faults: list[KvFault] = attrs.Factory(list)
    overrides: dict[type[Any], Callable[[Any], Input | None]] = attrs.Factory(dict)
    on_result: Callable[[SubmitJob, Completed], Input | None] | None = None
    meanwhile: Callable[[Input], None] | None = None
    holding: bool = False
    virtual: bool = True
    inflight_max: int = 1
    verified: tuple[str, ...] = ()
    order: list[int] = attrs.Factory(list)
    artifact: Callable[[int], ArtifactValidated] = attrs.field(default=lambda m: artifact(m))
    sources: dict[str, Callable[[ValidateArtifact], Input]] = attrs.Factory(dict)
    executed: list[DeviceEffect] = attrs.Factory(list)
    submitted: list[SubmitJob] = attrs.Factory(list)
    closes: list[bool] = attrs.Factory(list)
    stopped: bool = False
    resets: deque[dict[str, Any]] = attrs.Factory(deque)
    cancels: int | str = 0
    epoch: int = 1
    skew: dict[str, int] = attrs.Factory(dict)
    _finished: int = 0
    _post: Callable[[Input], None] = attrs.field(default=lambda _: None)
    _effects: deque[DeviceEffect] = attrs.Factory(deque)
    _running: deque[tuple[SubmitJob, int]] = attrs.Factory(deque)
    _ticket: int = 900
    _words: WordText = attrs.Factory(WordText)
    _known: set[int] = attrs.Factory(set)
    _busy: dict[int, int] = attrs.Factory(dict)
    _bank: dict[int, list[int]] = attrs.Factory(dict)
    _written: dict[int, list[int]] = attrs.Factory(dict)
    _reserved: dict[int, int] = attrs.Factory(dict)
    _doubted: set[int] = attrs.Factory(set)
    _bound: set[int] = attrs.Factory(set)
    _pool: dict[int, str] = attrs.Factory(dict)
    _lane_first: int = 0

    def describe(self) -> DeviceFacts:
        return DeviceFacts(
            url="fake:",
            backend="fake",
            product="fake",
            serial="0",
            runtime_version="1",
            driver_version="1",
            firmware_version="1",
            device_epoch=1,
            inflight_max=self.inflight_max,
            chips=(ChipFacts(total_bytes=1000, used_bytes=0),),
            counters=self.counters(),
            capabilities=tuple(self._capabilities()),
            backend_kind="sim",
            proven=self.verified,
        )

    def _capabilities(self) -> Iterator[Capability]:
        """Say yes to everything that the engine may ask for; what counts is ``verified``."""
        values = {
            "IN_FLIGHT": self.inflight_max,
            **{"PING_PONG": 2, "COUNTERS": 1, "POLL_THREADSAFE": 1, "BATCH_LANES": 16},
            **{"LANE_RULE": 0b11, "INCREMENTAL_PREFILL": 1, "CANCEL": 1, "LAYOUTS": 0b111110},
        }
        for name, value in values.items():
            yield Capability(
                name=name, support="yes", evidence="SIM", source="simulated", value=value
            )

    def start(self, post: Callable[[Input], None], *, threads: bool) -> None:
        assert not threads
        self._post = post

    def post(self, taken: Input) -> None:
        """Tell the engine something, as a thread of the device would."""
        self._post(taken)
        if self.meanwhile is not None:
            self.meanwhile(taken)

    def execute(self, effect: DeviceEffect) -> None:
        self.executed.append(effect)
        self._effects.append(effect)

    def text(self, model: int) -> WordText:
        if model not in self._known:
            raise KeyError(model)
        return self._words

    def stop(self) -> None:
        self.stopped = True

    def step(self) -> bool:
        if not self._effects:
            return False
        self._answer(self._effects.popleft())
        return True

    def advance(self, until_ns: int | None) -> bool:
        if not self._running or self.holding:
            if until_ns is None or until_ns <= self.clock.now_ns():
                return False
            self.clock.advance(until_ns - self.clock.now_ns())
            return True
        self.clock.advance(COST_NS)
        self.finish_job()
        return True

    def finish_job(self) -> None:
        """Let a running job end: the one that ``order`` says next, else the oldest."""
        place = self.order.pop(0) % len(self._running) if self.order else 0
        effect, ticket = self._running[place]
        del self._running[place]
        self._finished += 1
        done = self._run(effect, ticket)
        posted = done if self.on_result is None else self.on_result(effect, done)
        if posted is not None:
            self.post(posted)

    def counters(self) -> tuple[tuple[str, int], ...]:
        """Return the counters as the device tells them: honest but for ``skew``."""
        running = len(self._running)
        honest = {
            "submitted": self._finished + running,
            "pending": 0,
            "running": running,
            "finished": self._finished,
            "left": running,
            "failed": 0,
            "aborted": 0,
        }
        return tuple((name, count + self.skew.get(name, 0)) for name, count in honest.items())

    def drop_jobs(self) -> None:
        """Forget the running jobs: the device will never say how they ended."""
        self._running.clear()

    def reset(self, *, restoring: set[int]) -> None:
        """Forget all lanes and jobs, but for the buffers that are still being restored."""
        self.drop_jobs()
        for held in (self._bank, self._reserved, self._written, self._doubted, self._bound):
            held.clear()
        self._busy = {buffer: job for buffer, job in self._busy.items() if buffer in restoring}
        kept = [one for one in self._effects if not isinstance(one, SubmitJob | ApplyKv)]
        self._effects = deque(kept)

    @property
    def running(self) -> tuple[tuple[SubmitJob, int], ...]:
        """Jobs the device has, with their tickets, oldest first."""
        return tuple(self._running)

    @property
    def executed_jobs(self) -> list[SubmitJob]:
        """Jobs the engine handed over, in order, whatever became of them."""
        return [effect for effect in self.executed if isinstance(effect, SubmitJob)]

    @property
    def has_work(self) -> bool:
        """Whether effects wait for execution."""
        return bool(self._effects)

    def _answer(self, effect: DeviceEffect) -> None:
        assert not self.closes, f"the device is closed, yet it is asked for {effect}"
        if isinstance(effect, ConfigureModel | ReleaseModel):
            assert not self._running, f"E23: jobs run on the device during {effect}"
        if type(effect) in self.overrides:
            answered = self.overrides[type(effect)](effect)
            if answered is not None:
                self.post(answered)
            return
        match effect:
            case SubmitJob():
                self._submit(effect)
            case CancelJob():
                self._cancel(effect)
            case ApplyKv():
                self._apply_alone(effect)
            case RestoreBuffer():
                self._restore(effect)
            case ValidateArtifact():
                self._validate(effect)
            case ConfigureModel():
                self._configure(effect)
            case ReleaseModel():
                self.post(ModelReleased(model=effect.model, used_bytes=(0,), healthy=True))
            case ProbeHealth():
                self.post(HealthProbed(health=healthy(self.clock.now_ns()), reason=""))
            case ReadCounters():
                self.post(CountersRead(asked=effect.asked, counters=self.counters()))
            case RunReset():
                self._reset(effect)
            case CloseDevice():
                self.closes.append(effect.abandon)
                self.post(DeviceClosed(abandoned=effect.abandon, reason=""))
            case PublishModel():
                pass

    def _submit(self, effect: SubmitJob) -> None:
        self.submitted.append(effect)
        if (failed := self._failed_operation(effect.operations)) is not None:
            operation, fault = failed
            self.post(_kv_failed(effect.job, effect.operations, operation, fault))
            return
        for operation in effect.operations:
            self._apply(operation.verb, operation.lane, operation.to_tokens)
        told = self.submits.popleft() if self.submits else 0
        if isinstance(told, int) and told:
            self.post(SubmitRefused(job=effect.job, code=told, reason="told to"))
            return
        assert effect.buffer not in self._busy, f"E1: buffer/{effect.buffer} is in use"
        assert len(self._running) < self.inflight_max, "E11: too many jobs in flight"
        self._check_rows(effect)
        self._ticket += 1
        self._busy[effect.buffer] = effect.job
        self._running.append((effect, self._ticket))
        if told == "doubt":
            self.post(
                SubmitDoubtful(job=effect.job, ticket=self._ticket, code=0x0602, reason="told to")
            )
            return
        accepted = SubmitAccepted(job=effect.job, ticket=self._ticket)
        if told == "early":
            self.finish_job()
        self.post(accepted)

    def _check_rows(self, effect: SubmitJob) -> None:
        """Hold the rows of a job against what the calbin takes."""
        facts = self.artifact(effect.model)
        if effect.buffer not in self._pool:
            return
        size = facts.by_name[self._pool[effect.buffer]]
        whole = len(effect.rows) == size.batch_max
        assert whole or facts.lane_rule != "undefined", f"E15: {len(effect.rows)} rows of {size}"
        if not size.fixed_rows:
            assert not effect.places, "E15: rows of this calbin are free"
            return
        rows = zip(effect.places, effect.rows, strict=True)
        firsts = {row.lane - self._lane_first - place for place, row in rows}
        assert len(firsts) == 1 and firsts.pop() % size.batch_max == 0, (
            f"E15: rows {effect.places} of {size.name} have the lanes of others: {effect.rows}"
        )

    def _restore(self, effect: RestoreBuffer) -> None:
        assert all(job.buffer != effect.buffer for job, _ in self._running), "E4: job still runs"
        assert self._busy.pop(effect.buffer, None) == effect.job, "E4: restored for another job"
        self.post(BufferRestored(buffer=effect.buffer, job=effect.job))

    def _apply_alone(self, effect: ApplyKv) -> None:
        if (failed := self._failed_operation(effect.operations)) is not None:
            operation, fault = failed
            self.post(_kv_failed(None, effect.operations, operation, fault))
            return
        for operation in effect.operations:
            self._apply(operation.verb, operation.lane, operation.to_tokens)
        self.post(KvApplied(lanes=tuple(operation.lane for operation in effect.operations)))

    def _failed_operation(
        self, operations: tuple[KvOperation, ...]
    ) -> tuple[KvOperation, KvFault] | None:
        """Return the operation of a list that fails, if any; then nothing of it is applied."""
        for operation in operations:
            for index, fault in enumerate(self.kv_faults):
                if fault.verb == operation.verb:
                    left = [attrs.evolve(fault, times=fault.times - 1)] if fault.times > 1 else []
                    self.kv_faults[index : index + 1] = left
                    if fault.unknown:
                        self._doubted.update(one.lane for one in operations)
                    elif fault.verb != "RESERVE":
                        self._doubted.add(operation.lane)
                    return operation, fault
            if operation.lane in self._doubted:
                return operation, KvFault(verb=operation.verb, unknown=True, code=0x0704)
        return None

    def _apply(self, verb: str, lane: int, to_tokens: int) -> None:
        held = self._bank.setdefault(lane, [])
        if verb == "RESERVE":
            assert lane not in self._reserved, f"lane/{lane} reserved twice"
            self._reserved[lane] = to_tokens
            self._bound.add(lane)
            return
        if verb == "RELEASE":
            assert lane in self._bound, f"row 19: lane/{lane} released though never reserved"
            self._bound.remove(lane)
            assert lane not in self._reserved, f"lane/{lane} released while reserved"
            running = [row.lane for job, _ in self._running for row in job.rows]
            assert lane not in running, f"I4: lane/{lane} released while a job names it"
            self._bank[lane] = []
            return
        assert lane in self._reserved, f"{verb} of lane/{lane} without a reservation"
        end = self._reserved.pop(lane)
        if verb == "COMMIT":
            held.extend(self._written.get(lane, []))
            assert len(held) == end == to_tokens, f"lane/{lane} committed at a wrong length"
        self._written.pop(lane, None)

    def _validate(self, effect: ValidateArtifact) -> None:
        if self.refuse_artifact:
            self.post(ArtifactRefused(model=effect.model, reason=self.refuse_artifact))
            return
        if not effect.check:
            self._known.add(effect.model)
        told = self.sources.get(effect.source)
        self.post(self.artifact(effect.model) if told is None else told(effect))

    def _cancel(self, effect: CancelJob) -> None:
        """Say what ``cancels`` says; ``ends`` ends the job as well."""
        code = self.cancels if isinstance(self.cancels, int) else 0
        told = CancelTold(job=effect.job, ticket=effect.ticket, code=code, reason="told to")
        if self.cancels == "ends":
            for place, (job, ticket) in enumerate(self._running):
                if ticket == effect.ticket:
                    del self._running[place]
                    self.post(told)
                    self.post(aborted(job, ticket))
                    return
        self.post(told)

    def _reset(self, effect: RunReset) -> None:
        """End what runs; the report is what ``resets`` makes of an honest one."""
        before = self.epoch
        told = self.resets.popleft() if self.resets else {}
        if not told.get("code"):
            self._running.clear()
            self.epoch += effect.level in (0, 4)
        report = ResetFinished(
            level=effect.level,
            code=0,
            reason="",
            quiesced=True,
            verified=True,
            wider=False,
            epoch_before=before,
            epoch_after=self.epoch,
            claimed=0,
            effects=0,
            jobs_aborted=0,
            jobs_unaccounted=0,
            duration_ns=5,
            used_bytes_before=(0,),
            used_bytes_after=(0,),
            health_before=healthy(self.clock.now_ns()),
            health=attrs.evolve(healthy(self.clock.now_ns()), counters=self.counters()),
            runtime_version="1",
            driver_version="1",
            firmware_version="1",
        )
        self.post(attrs.evolve(report, **told))

    def _configure(self, effect: ConfigureModel) -> None:
        for held in (
            self._bank,
            self._reserved,
            self._written,
            self._busy,
            self._doubted,
            self._bound,
        ):
            held.clear()
        assert effect.model in self._known, f"model/{effect.model} was checked, not validated"
        self._lane_first = effect.lane_first
        self._pool = {
            number: plan.submodel
            for plan in effect.buffers
            for number in range(plan.first, plan.first + plan.count)
        }
        self.post(
            ModelConfigured(
                model=effect.model,
                device_generation=7,
                device_epoch=self.epoch,
                duration_ns=5,
                used_bytes_before=(0,),
                used_bytes_after=(100,),
            )
        )

    def _run(self, effect: SubmitJob, ticket: int) -> Completed:
        rows = []
        for row in effect.rows:
            held = self._bank.setdefault(row.lane, [])
            assert len(held) == row.start, f"lane/{row.lane} holds {len(held)}, not {row.start}"
            self._written[row.lane] = list(row.tokens)
            rows.append(self._row(effect, row, [*held, *row.tokens]))
        return Completed(
            job=effect.job,
            ticket=ticket,
            epoch=effect.epoch,
            generation=effect.generation,
            flags=7,
            kv_effect="applied",
            engine_slot=1,
            rows=tuple(rows),
            times=JobTimes(),
        )

    def _row(self, effect: SubmitJob, row: SubmitRow, sequence: list[int]) -> RowResult:
        if row.sampling is None:
            verdict = self.verdict if effect.origin in ("golden", "canary") else ""
            return RowResult(token=NO_TOKEN, verdict=verdict)
        token = next_token(sequence, row.sampling.seed or 0, row.masked)
        hit = row.searched and self._words.push(row.owner, row.generated, token)
        logprobs: tuple[tuple[int, float], ...] = ()
        if row.logprobs is not None:
            logprobs = ((token, -0.5), *((other, -1.0 - other) for other in range(row.logprobs)))
        return RowResult(token=token, stop_hit=hit, logprobs=logprobs)


def aborted(effect: SubmitJob, ticket: int) -> DeviceFaulted:
    """Return the end of a job that was cancelled on the device."""
    return fault_told(
        "aborted",
        0x0606,
        job=effect.job,
        ticket=ticket,
        epoch=effect.epoch,
        generation=effect.generation,
        quiescent=True,
        kv_effect="none",
        reason="cancelled",
    )


def _kv_failed(
    job: int | None,
    operations: tuple[KvOperation, ...],
    operation: KvOperation,
    fault: KvFault,
) -> KvApplyFailed:
    return KvApplyFailed(
        lanes=tuple(dict.fromkeys(each.lane for each in operations)),
        job=job,
        lane=operation.lane,
        operation=operation.verb,
        code=fault.code,
        unknown=fault.unknown,
        reason="told to",
    )
