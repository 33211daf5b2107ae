"""Measure the engine from its steps alone.

Theory of operation. ``Metrics`` is a fold: each step, in order, through ``observe``, and nothing
else. So the numbers of a running engine are those of its journal, also over restarts and in a
journal that keeps digests of tokens (I8). Times are engine time (``Step.at_ns``) or the device's
own (``JobTimes``); nothing is sampled. A gauge is a count by state that every event moves on, and
an ending takes the record of its request or job away: the cost of a step does not depend on how
many requests live. Requests that go on in the same jobs have one record together (``Cohort``), as
long as each job is exactly of them; it is scattered before anything happens to one of them alone.
``families.py`` says what the numbers are called and puts them into a picture that others can keep.

Source: R15.1 to R15.4, G20, I8.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs

from laneway.engine.buckets import bucket_of
from laneway.engine.distribution import MILLIONTHS
from laneway.engine.inputs import (
    ArtifactValidated,
    Completed,
    CountersRead,
    DeviceFacts,
    DeviceFaulted,
    EngineStarted,
    HealthFacts,
    HealthProbed,
    InboxOverflowed,
    JobStalled,
    ModelConfigured,
    RequestSubmitted,
    RowResult,
)
from laneway.engine.measured import (
    Cohort,
    LiveJob,
    LiveRequest,
    MeasuredModel,
    Submodel,
    gather,
    tally,
)
from laneway.engine.occupancy import Occupancy
from laneway.engine.ports import Step
from laneway.engine.recoveries import Recoveries
from laneway.statemachines import MACHINES, Event

MODELS_KEPT_MAX = 8
"""How many models that are gone keep their counters; older ones are forgotten."""

DEVICE_JOB_COUNTERS = ("pending", "finished", "left")
_REQUEST_FINAL = MACHINES["request"].final
_JOB_FINAL = MACHINES["job"].final
_FINISHED_REASON = {"cancel": "abort", "expire": "deadline", "fail": "error"}
_CORRUPTED = "device_fault_numeric"
_VERDICTS = {"prove": "equal", "acquit": "equal", "mark": "different"}


@attrs.define
class Metrics:
    """All numbers after the steps observed so far.

    ``models`` are by number, those that are gone among them. ``device_jobs`` is what the device
    last said of itself, empty until it did. ``buffers`` says of which model and submodel each is,
    ``lanes_moved`` which lanes of one model moved together of late, with its counts of lanes.
    Between steps ``gained`` is empty and ``gained_together`` None: who gained a token.
    """

    device_state: str = ""
    device: DeviceFacts | None = None
    code_version: str = ""
    models: dict[int, MeasuredModel] = attrs.Factory(dict)
    requests: dict[int, LiveRequest] = attrs.Factory(dict)
    jobs: dict[int, LiveJob] = attrs.Factory(dict)
    rejections: Counter[str] = attrs.Factory(Counter)
    exceptions: Counter[str] = attrs.Factory(Counter)
    stale: Counter[str] = attrs.Factory(Counter)
    canaries: Counter[str] = attrs.Factory(Counter)
    restricted: bool = False
    device_jobs: dict[str, int] = attrs.Factory(dict)
    occupancy: Occupancy = attrs.Factory(Occupancy)
    recoveries: Recoveries = attrs.Factory(Recoveries)
    buffers: dict[int, tuple[MeasuredModel, Submodel]] = attrs.Factory(dict)
    lanes_moved: tuple[tuple[int, ...], dict[str, int]] = ((), {})
    gained: list[int] = attrs.Factory(list)
    gained_together: Cohort | None = None
    growth: tuple[int, ...] = ()
    """By how much the lanes reserved in this step grow, for the job planned next."""

    def observe(self, step: Step) -> None:
        """Take one more step, the next one.

        Raises: LookupError or TypeError for a step that does not follow from those before it.
        """
        taken = step.taken
        if type(taken) is Completed or type(taken) is DeviceFaulted:
            self._take_answer(taken, step)
            return
        if (note := _INPUTS.get(type(taken))) is not None:
            note(self, taken)
        for event in step.events:
            _HANDLERS[event.machine](self, event, step)

    # ------------------------------------------------------------------ inputs

    def _take_answer(self, taken: Completed | DeviceFaulted, step: Step) -> None:
        """Take what a job became; an answer that ends no job is stale, and changes nothing (I5)."""
        job = self.jobs.get(taken.job or 0)
        if isinstance(taken, DeviceFaulted):
            self.exceptions[taken.kind] += 1
            self._take_health(taken.health)
        self.gained.clear()
        self.gained_together = None
        for event in step.events:
            _HANDLERS[event.machine](self, event, step)
        if (cohort := self.gained_together) is not None:
            self.gained_together = None
            cohort.gain(step.at_ns)
            return
        self._take_tokens(step.at_ns)
        if taken.job is None:
            return
        if job is None or taken.job in self.jobs:
            self.stale[_stale_reason(job, taken)] += 1
        elif isinstance(taken, Completed) and any(row.fault == "numeric" for row in taken.rows):
            self.exceptions["numeric"] += 1

    def _take_tokens(self, at_ns: int) -> None:
        """Count the tokens of those that gained one in this step and still live.

        All are of one job, so of one model.
        """
        live: dict[int, LiveRequest] = {}
        gaps: list[tuple[int, int]] = []
        find = self.requests.get
        for number in self.gained:
            request = find(number)
            if request is None:
                continue
            live[number] = request
            if request.tokens == 0:
                _take_token(request, at_ns)
                continue
            gaps.append((request.bucket, at_ns - request.last_token_ns))
            request.last_token_ns = at_ns
            request.tokens += 1
            model = request.model
        for (bucket, gap_ns), times in tally(gaps):
            model.inter_token.observe(bucket, gap_ns, times)
            model.generation_tokens += times
        if live:
            gather(live, at_ns)

    def _cohort_of(self, owners: tuple[int, ...]) -> Cohort | None:
        """Return the cohort that is exactly the owners of a job, in order, if there is one."""
        first = self.requests.get(owners[0])
        cohort = None if first is None else first.cohort
        return cohort if cohort is not None and cohort.numbers == owners else None

    def _scatter(self, request: LiveRequest) -> None:
        """Let a request have numbers of its own; so must those that it was together with."""
        cohort = request.cohort
        if cohort is None:
            return
        if cohort is self.gained_together:
            self.gained_together = None
            self.gained += cohort.numbers
        cohort.scatter()

    def _start(self, taken: EngineStarted) -> None:
        self.occupancy.restart()
        self.device = taken.device
        self.code_version = taken.code_version
        self.device_jobs = {}

    def _stall(self, taken: JobStalled) -> None:
        if taken.stage != "suspect" and taken.job in self.jobs:
            self.exceptions["hang"] += 1

    def _read(self, taken: CountersRead) -> None:
        self._take_counters(taken.counters)

    def _probe(self, taken: HealthProbed) -> None:
        self._take_health(taken.health)

    def _overflow(self, taken: InboxOverflowed) -> None:
        self.rejections["inbox_full"] += taken.count

    def _take_health(self, health: HealthFacts | None) -> None:
        if health is not None:
            self._take_counters(health.counters)

    def _take_counters(self, counters: tuple[tuple[str, int], ...]) -> None:
        if counters:
            told = dict(counters)
            self.device_jobs = {n: told[n] for n in DEVICE_JOB_COUNTERS if n in told}

    # ------------------------------------------------------------------ requests

    def _take_request(self, event: Event, step: Step) -> None:
        self.recoveries.take_request(event)
        for number in event.entities:
            if event.trigger == "reject":
                self.rejections[event.data["reason"]] += 1
            elif event.trigger == "admit":
                model = self.models[event.data["model"]]
                tokens = _prompt_tokens(step)
                self.requests[number] = LiveRequest(
                    *(model, step.at_ns, step.at_ns, tokens, tokens),
                    *(bucket_of(tokens), step.at_ns),
                )
                model.requests[event.dest] += 1
            elif event.dest in _REQUEST_FINAL:
                self._end_request(number, event, step.at_ns)
            else:
                request = self.requests[number]
                self._scatter(request)
                if event.trigger == "resume":
                    self._rebind(request, event)
                _move_request(request, event, step.at_ns)

    def _rebind(self, request: LiveRequest, event: Event) -> None:
        """Count a request with the model that it goes on with, if a restart took its own."""
        model = self.models[event.data["model"]]
        if model is not request.model:
            request.model = model
            model.requests[event.source] += 1

    def _end_request(self, number: int, event: Event, at_ns: int) -> None:
        """Settle a request at its ending; the ending says how many tokens it got."""
        request = self.requests.pop(number)
        self._scatter(request)
        model = request.model
        if event.data["tokens"] > request.tokens:
            _take_token(request, at_ns)
        if model.resident:
            model.requests[event.source] -= 1
        model.finished[_FINISHED_REASON.get(event.trigger, event.data["reason"])] += 1
        model.corrupted += event.data["reason"] == _CORRUPTED
        bucket = request.bucket
        model.end_to_end.observe(bucket, at_ns - request.admitted_ns)
        if event.source == "waiting":
            model.queued.observe(bucket, at_ns - request.waiting_since_ns)
        if request.tokens:
            decode_ns = request.last_token_ns - request.first_token_ns
            model.decode.observe(bucket, decode_ns)
            model.inference.observe(bucket, request.last_token_ns - request.started_ns)
            if request.tokens > 1:
                model.time_per_output_token.observe(bucket, decode_ns // (request.tokens - 1))
        if not self.requests:
            self.occupancy.rest()

    # ------------------------------------------------------------------ jobs

    def _take_job(self, event: Event, step: Step) -> None:
        for number in event.entities:
            if event.trigger == "plan":
                self._plan(number, event, step.at_ns)
                continue
            job = self.jobs[number]
            model = job.model
            model.jobs[event.source] -= 1
            if event.dest not in _JOB_FINAL:
                model.jobs[event.dest] += 1
                job.ticket = event.data.get("ticket", job.ticket)
                continue
            del self.jobs[number]
            model.active_lanes -= len(job.owners)
            if job.origin == "request":
                trigger = "" if event.data.get("withheld") else event.trigger
                self._end_job(number, job, trigger, step)

    def _end_job(self, number: int, job: LiveJob, trigger: str, step: Step) -> None:
        """Settle a job of requests that is terminal, however it ended.

        ``trigger``: "" for one whose results were taken back, to be run again.
        """
        if trigger == "complete":
            self._account(job, step)
        else:
            for owner in job.owners:
                if (request := self.requests.get(owner)) is not None:
                    self._scatter(request)
                    request.idle_since_ns = step.at_ns
        taken = step.taken
        if isinstance(taken, Completed) and taken.job == number:
            self.occupancy.end(number, taken.engine_slot, taken.times)
        else:
            self.occupancy.end(number, 0, None)

    def _plan(self, number: int, event: Event, at_ns: int) -> None:
        data = event.data
        model = self.models[data["model"]]
        held = self.buffers.get(data["buffer"])
        submodel = None if held is None else held[1]
        task, origin, owners = data["task"], data["origin"], tuple(data["owners"])
        epoch, generation = event.epoch, event.generation
        self.jobs[number] = LiveJob(
            model, submodel, task, origin, epoch, generation, owners, self.growth, at_ns
        )
        self.growth = ()
        model.jobs[event.dest] += 1
        model.active_lanes += len(owners)
        if origin != "request":
            return
        self.occupancy.plan(number)
        turns = model.turns[task].of
        if (cohort := self._cohort_of(owners)) is not None:
            idle_ns = at_ns - cohort.idle_since_ns
            for bucket, times in cohort.buckets:
                turns[bucket].observe(idle_ns, times)
            return
        since: list[tuple[int, int]] = []
        for owner in owners:
            request = self.requests[owner]
            self._scatter(request)
            since.append((request.bucket, request.idle_since_ns))
        for (bucket, idle_since_ns), times in tally(since):
            turns[bucket].observe(at_ns - idle_since_ns, times)

    def _account(self, job: LiveJob, step: Step) -> None:
        """Take the numbers of a completed job that ran for requests."""
        if not isinstance(step.taken, Completed):
            raise TypeError(f"step {step.step}: a job was completed by another input")
        if job.task == "prefill":
            job.model.prompt_tokens += sum(job.growth)
        owners, rows = job.owners, step.taken.rows
        if (submodel := job.submodel) is not None:
            submodel.fill.observe(len(owners) * MILLIONTHS // submodel.facts.batch_max)
            submodel.take_times(step.taken.times)
        cohort = self._cohort_of(owners)
        alike = len(owners) == len(rows) == len(job.growth)
        if cohort is None or not alike or _any_fault(rows):
            self._account_each(job, rows, step.at_ns)
            return
        took_ns = step.at_ns - job.planned_ns
        runs = job.model.runs[job.task].of
        for bucket, times in cohort.buckets:
            runs[bucket].observe(took_ns, times)
        cohort.idle_since_ns = step.at_ns
        self.gained_together = cohort

    def _account_each(self, job: LiveJob, rows: tuple[RowResult, ...], at_ns: int) -> None:
        """Take what a completed job means for each of its owners that still lives."""
        buckets: list[int] = []
        find, gained = self.requests.get, self.gained
        for owner, growth, result in zip(job.owners, job.growth, rows, strict=True):
            request = find(owner)
            if request is None:
                continue
            self._scatter(request)
            buckets.append(request.bucket)
            request.idle_since_ns = at_ns
            if request.prompt_left:
                request.prompt_left = max(request.prompt_left - growth, 0)
            if not result.fault and not request.prompt_left:
                gained.append(owner)
        took_ns = at_ns - job.planned_ns
        for bucket, times in tally(buckets):
            job.model.runs[job.task].observe(bucket, took_ns, times)

    # ------------------------------------------------------------------ lanes, buffers

    def _take_lane(self, event: Event, step: Step) -> None:
        entities, source, dest = event.entities, event.source, event.dest
        if event.trigger == "reserve":
            by = event.data["by"]
            self.growth += (by,) * len(entities) if isinstance(by, int) else tuple(by)
        lanes, counts = self.lanes_moved
        if entities == lanes:
            counts[source] -= len(lanes)
            counts[dest] += len(lanes)
            return
        for model in self.models.values():
            if model.resident:
                moved = sum(map(model.lane_numbers.__contains__, entities))
                model.lanes[source] -= moved
                model.lanes[dest] += moved
                if moved == len(entities):
                    self.lanes_moved = (entities, model.lanes)

    def _take_buffer(self, event: Event, step: Step) -> None:
        for number in event.entities:
            if (held := self.buffers.get(number)) is not None:
                counts = held[0].buffers
                counts[event.source] -= 1
                counts[event.dest] += 1

    # ------------------------------------------------------------------ models, device

    def _take_model(self, event: Event, step: Step) -> None:
        (number,) = event.entities
        if event.trigger == "load":
            self.models[number] = MeasuredModel(
                number, event.data["alias"], self.device, self.code_version
            )
        elif event.trigger == "accept" and isinstance(step.taken, ArtifactValidated):
            first, count = event.data["lanes"]
            buffers = {name: range(at, at + n) for name, _, at, n in event.data["buffers"]}
            lanes = range(first, first + count)
            self.models[number].accept(step.taken, event.generation, lanes, buffers)
        elif event.trigger == "configure" and isinstance(step.taken, ModelConfigured):
            before, after = step.taken.used_bytes_before, step.taken.used_bytes_after
            held = tuple(now - was for was, now in zip(before, after, strict=True))
            model = self.models[number]
            model.bring_up(held)
            for submodel in model.submodels:
                self.buffers |= dict.fromkeys(submodel.buffers, (model, submodel))
        elif event.dest == "unloaded":
            self._let_go(number)
        elif event.trigger in _VERDICTS:
            self.canaries[_VERDICTS[event.trigger]] += 1

    def _let_go(self, number: int) -> None:
        """Keep what a model counted, unless it never had a generation or is too long ago."""
        model = self.models[number]
        model.take_down()
        for submodel in model.submodels:
            for buffer in submodel.buffers:
                self.buffers.pop(buffer, None)
        if not model.generation:
            del self.models[number]
        if len(self.models) > MODELS_KEPT_MAX:
            gone = [n for n, m in self.models.items() if m.generation and not m.resident]
            for oldest in gone[: len(self.models) - MODELS_KEPT_MAX]:
                del self.models[oldest]

    def _take_device(self, event: Event, step: Step) -> None:
        self.device_state = event.dest
        self.recoveries.take_device(event, step)
        if event.trigger in ("open", "restrict", "relax"):
            self.restricted = event.trigger == "restrict"


_INPUTS: dict[type, Callable[[Metrics, Any], None]] = {
    EngineStarted: Metrics._start,
    JobStalled: Metrics._stall,
    HealthProbed: Metrics._probe,
    CountersRead: Metrics._read,
    InboxOverflowed: Metrics._overflow,
}
_HANDLERS: dict[str, Callable[[Metrics, Event, Step], None]] = {
    "request": Metrics._take_request,
    "job": Metrics._take_job,
    "lane": Metrics._take_lane,
    "buffer": Metrics._take_buffer,
    "model": Metrics._take_model,
    "device": Metrics._take_device,
}


def _prompt_tokens(step: Step) -> int:
    taken = step.taken
    return len(taken.prompt) if isinstance(taken, RequestSubmitted) else 0


def _any_fault(rows: tuple[RowResult, ...]) -> bool:
    """Tell whether any row of a job has none of what it was to give.

    Why a loop: a job that goes well asks all its rows, and this is the fastest way.
    """
    for row in rows:
        if row.fault:
            return True
    return False


def _stale_reason(job: LiveJob | None, taken: Completed | DeviceFaulted) -> str:
    """Return which of job, epoch, generation and ticket an answer did not match."""
    if job is None:
        return "not_in_flight"
    if taken.epoch != job.epoch:
        return "epoch"
    return "generation" if taken.generation != job.generation else "ticket"


def _move_request(request: LiveRequest, event: Event, at_ns: int) -> None:
    model = request.model
    if model.resident:
        model.requests[event.source] -= 1
        model.requests[event.dest] += 1
    if event.trigger == "prefill":
        model.queued.observe(request.bucket, at_ns - request.waiting_since_ns)
        if not request.tokens:
            request.started_ns = at_ns
    elif event.dest == "waiting":
        request.waiting_since_ns = at_ns
        request.prompt_left = request.prompt_tokens + request.tokens


def _take_token(request: LiveRequest, at_ns: int) -> None:
    """Count a token that became part of an answer, when its step was taken."""
    model = request.model
    if request.tokens == 0:
        model.time_to_first_token.observe(request.bucket, at_ns - request.admitted_ns)
        model.prefill.observe(request.bucket, at_ns - request.started_ns)
        request.first_token_ns = at_ns
    else:
        model.inter_token.of[request.bucket].observe(at_ns - request.last_token_ns)
    request.last_token_ns = at_ns
    request.tokens += 1
    model.generation_tokens += 1
