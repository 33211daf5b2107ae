"""What the engine knows, and ``evolve``, the only function that changes it.

Theory of operation. ``State`` is a value in the sense that matters: it is a function of the steps
taken so far, and two folds of the same journal give equal states (``freeze`` compares them). For
speed it is changed in place, by ``evolve`` and ``begin_step`` alone; whoever needs the old value
calls ``copy`` first. An event says which entities moved; what an event cannot say without repeating
itself (prompt, tokens, artifact facts) is read from the step's own input, so nothing is stored
twice. What has ended leaves the state: a terminal job, an ended request, an unloaded model with its
lanes and buffers.
"""

import copy as copying
import heapq
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import attrs

from laneway.engine.effects import BufferPlan, KvOperation
from laneway.engine.errors import IllegalTransitionError, InternalError
from laneway.engine.inputs import (
    ArtifactValidated,
    CloseRequested,
    Completed,
    DeviceFacts,
    EngineStarted,
    Input,
    ModelConfigured,
    RequestSubmitted,
    RowResult,
)
from laneway.engine.limits import Limits
from laneway.engine.ports import Step
from laneway.engine.sampling import Sampling
from laneway.statemachines import MACHINES, Event, entity_name

DEVICE = 0
"""The engine drives one device; its entity is ``device/0``."""


@attrs.define
class RequestState:
    """A live request: its parameters, its tokens so far, and what it holds."""

    number: int
    state: str
    model: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool
    deadline_ns: int | None
    client_id: str | None
    admitted_ns: int
    tokens: list[int] = attrs.Factory(list)
    lane: int | None = None
    job: int | None = None
    refusals: int = 0
    kv_refusals: int = 0
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0


@attrs.frozen
class JobRow:
    """One row of a job: lane, owner (request number or trial index), KV length before and after."""

    lane: int
    owner: int
    from_tokens: int
    to_tokens: int


@attrs.define
class JobState:
    """A job that is not terminal."""

    number: int
    state: str
    task: str
    origin: str
    model: int
    epoch: int
    generation: int
    buffer: int
    rows: tuple[JobRow, ...]
    planned_ns: int
    ticket: int = 0


@attrs.define
class BufferState:
    """A pool item.

    Its key is (epoch, generation, submodel, task) plus the shape the submodel fixes (E2).
    """

    number: int
    state: str
    model: int
    epoch: int
    generation: int
    submodel: str
    task: str
    job: int | None = None


@attrs.define
class LaneState:
    """A KV space: who owns it, how long it truly is, and which device operations are still due.

    ``due`` are operations that the next list sent for this lane must begin with (decision 20);
    ``carried`` are those that the list of the present reservation began with, due again if that
    list was not applied.
    """

    number: int
    state: str
    model: int
    generation: int
    origin: str = ""
    owner: int | None = None
    length_tokens: int = 0
    reserved_tokens: int = 0
    job: int | None = None
    due: tuple[KvOperation, ...] = ()
    carried: tuple[KvOperation, ...] = ()


@attrs.define
class TrialProgress:
    """Where golden and warm-up stand: the trial that runs, its tokens so far, lane and job."""

    index: int = 0
    done_tokens: int = 0
    lane: int | None = None
    job: int | None = None
    refusals: int = 0
    kv_refusals: int = 0


@attrs.define
class ModelState:
    """One load of one artifact that is not unloaded."""

    number: int
    state: str
    alias: str
    source: str
    facts: ArtifactValidated | None = None
    generation: int = 0
    lane_first: int = 0
    lane_count: int = 0
    buffers: tuple[BufferPlan, ...] = ()
    trial: TrialProgress = attrs.Factory(TrialProgress)
    used_bytes_before: tuple[int, ...] = ()
    releasing: bool = False
    reason: str = ""


@attrs.define
class DeviceState:
    """The device as the engine sees it, and the counts behind its budgets (E28)."""

    state: str = "closed"
    incarnation: int = 0
    epoch: int = 0
    facts: DeviceFacts | None = None
    refusals_in_a_row: int = 0
    backoff_tries: int = 0
    backoff_until_ns: int = 0
    reason: str = ""


@attrs.define
class State:
    """Everything the engine decides from.

    The ``next_*`` numbers rise over the whole journal (decision 9).
    """

    step: int = 0
    now_ns: int = 0
    limits: Limits = attrs.Factory(Limits)
    device: DeviceState = attrs.Factory(DeviceState)
    closing: bool = False
    models: dict[int, ModelState] = attrs.Factory(dict)
    aliases: dict[str, int] = attrs.Factory(dict)
    lanes: dict[int, LaneState] = attrs.Factory(dict)
    buffers: dict[int, BufferState] = attrs.Factory(dict)
    jobs: dict[int, JobState] = attrs.Factory(dict)
    requests: dict[int, RequestState] = attrs.Factory(dict)
    waiting: deque[int] = attrs.Factory(deque)
    prefill_again: deque[int] = attrs.Factory(deque)
    decode_ready: deque[int] = attrs.Factory(deque)
    deadlines: list[tuple[int, int]] = attrs.Factory(list)
    waiting_requests: int = 0
    waiting_tokens: int = 0
    last_task: str = ""
    next_request: int = 1
    next_job: int = 1
    next_model: int = 1
    next_lane: int = 1
    next_buffer: int = 1
    next_epoch: int = 1
    next_generation: int = 1


def initial_state() -> State:
    """Return the state before the first step of a journal."""
    return State()


def copy(state: State) -> State:
    """Return an independent copy; frozen values inside are shared."""
    return copying.deepcopy(state, {id(state.limits): state.limits})


def freeze(state: State) -> tuple[Hashable, ...]:
    """Return a canonical hashable value: equal if and only if the states are."""
    frozen = _freeze(state)
    assert isinstance(frozen, tuple)
    return frozen


def _freeze(value: Any) -> Hashable:
    if attrs.has(type(value)):
        return tuple(_freeze(getattr(value, field.name)) for field in attrs.fields(type(value)))
    if isinstance(value, dict):
        return tuple((key, _freeze(value[key])) for key in sorted(value))
    if isinstance(value, list | tuple | deque):
        return tuple(_freeze(item) for item in value)
    if isinstance(value, Hashable):
        return value
    raise InternalError(f"a state must not hold a {type(value).__name__}")


def fold(state: State, step: Step) -> None:
    """Apply one recorded step without deciding it again.

    Raises: InternalError when the step is not the next one, or does not follow.
    """
    if step.step != state.step + 1:
        raise InternalError(f"step {step.step} stands where step {state.step + 1} should")
    begin_step(state, step.taken, step.at_ns)
    for event in step.events:
        evolve(state, event, step.taken)


def begin_step(state: State, taken: Input, at_ns: int) -> None:
    """Take note of an input: step number, time, and what the input itself declares."""
    if at_ns < state.now_ns:
        raise InternalError(f"step {state.step + 1}: time fell from {state.now_ns} to {at_ns} ns")
    state.step += 1
    state.now_ns = at_ns
    if isinstance(taken, EngineStarted):
        state.limits = taken.limits
        state.closing = False
    elif isinstance(taken, CloseRequested):
        state.closing = True


def state_of(state: State, machine: str, number: int) -> str:
    """Return the state an entity is in; what does not exist yet is in its machine's initial state.

    Raises: IllegalTransitionError for a lane or buffer that no model brought into being.
    """
    if machine == "device":
        return state.device.state
    entity = _TABLES[machine](state).get(number)
    if entity is not None:
        return str(entity.state)
    if machine in ("lane", "buffer"):
        raise IllegalTransitionError(machine, "absent", "any", entity_name(machine, number))
    return MACHINES[machine].initial


_TABLES: dict[str, Callable[[State], dict[int, Any]]] = {
    "request": lambda state: state.requests,
    "job": lambda state: state.jobs,
    "buffer": lambda state: state.buffers,
    "lane": lambda state: state.lanes,
    "model": lambda state: state.models,
}


def evolve(state: State, event: Event, taken: Input) -> None:
    """Apply one event: check it against the declared table, move its entities, derive the rest.

    Raises: IllegalTransitionError when an entity is not where the event says, or the table has no
    such edge.
    """
    dest = MACHINES[event.machine].table.get((event.source, event.trigger))
    for number in event.entities:
        if state_of(state, event.machine, number) != event.source or dest != event.dest:
            raise IllegalTransitionError(
                event.machine,
                state_of(state, event.machine, number),
                event.trigger,
                entity_name(event.machine, number),
            )
    _EVOLVERS[event.machine](state, event, taken)


# ---------------------------------------------------------------------------- request


def _evolve_request(state: State, event: Event, taken: Input) -> None:
    for number in event.entities:
        if event.trigger in ("admit", "reject"):
            _receive(state, number, event, taken)
            continue
        request = state.requests[number]
        if request.state == "waiting":
            state.waiting_requests -= 1
            state.waiting_tokens -= len(request.prompt)
        request.state = event.dest
        if event.trigger == "prefill":
            request.lane = event.data["lane"]
            _drop_passed(state, state.waiting, is_waiting)
        elif event.trigger == "decode":
            state.decode_ready.append(number)
        elif event.dest in MACHINES["request"].final:
            del state.requests[number]
            _compact_waiting(state)
            _drop_passed_deadlines(state)


def _receive(state: State, number: int, event: Event, taken: Input) -> None:
    if number != state.next_request:
        raise InternalError(f"request/{number} arrived, request/{state.next_request} was next")
    state.next_request = number + 1
    if event.trigger == "reject":
        return
    assert isinstance(taken, RequestSubmitted)
    state.requests[number] = RequestState(
        number=number,
        state=event.dest,
        model=event.data["model"],
        prompt=taken.prompt,
        max_tokens=taken.max_tokens,
        sampling=taken.sampling,
        stop=taken.stop,
        ignore_eos=taken.ignore_eos,
        deadline_ns=taken.deadline_ns,
        client_id=taken.client_id,
        admitted_ns=state.now_ns,
        logprobs=taken.logprobs,
        stop_token_ids=taken.stop_token_ids,
        min_tokens=taken.min_tokens,
    )
    if taken.deadline_ns is not None:
        heapq.heappush(state.deadlines, (taken.deadline_ns, number))
    state.waiting.append(number)
    state.waiting_requests += 1
    state.waiting_tokens += len(taken.prompt)


def is_waiting(request: RequestState) -> bool:
    """Return whether a request belongs in the queue of the waiting."""
    return request.state == "waiting"


def is_prefilling(request: RequestState) -> bool:
    """Return whether a request has a lane and needs its prefill run (again)."""
    return request.state == "prefilling" and request.job is None


def is_decoding(request: RequestState) -> bool:
    """Return whether a request is ready for its next decode job."""
    return request.state == "decoding" and request.job is None


def queue_head(
    state: State, queue: deque[int], fits: Callable[[RequestState], bool]
) -> RequestState | None:
    """Return the first request of a queue that still belongs there.

    Why: a request that ended or moved on stays in the queue and is skipped, so that cancel is O(1).
    """
    for number in queue:
        request = state.requests.get(number)
        if request is not None and fits(request):
            return request
    return None


def _drop_passed(state: State, queue: deque[int], fits: Callable[[RequestState], bool]) -> None:
    """Drop from the front of a queue what does not belong there any more."""
    while queue:
        request = state.requests.get(queue[0])
        if request is not None and fits(request):
            return
        queue.popleft()


def _compact_waiting(state: State) -> None:
    """Bound the queue of the waiting by its live members, whoever leaves behind its head."""
    if len(state.waiting) > 2 * state.waiting_requests + 64:
        kept = [n for n in state.waiting if n in state.requests and is_waiting(state.requests[n])]
        state.waiting = deque(kept)


def _drop_passed_deadlines(state: State) -> None:
    """Keep the earliest deadline that still matters on top, and the heap bounded by live ones."""
    while state.deadlines and state.deadlines[0][1] not in state.requests:
        heapq.heappop(state.deadlines)
    if len(state.deadlines) > 2 * len(state.requests) + 64:
        state.deadlines = [entry for entry in state.deadlines if entry[1] in state.requests]
        heapq.heapify(state.deadlines)


def is_end_token(state: State, request: RequestState, token: int) -> bool:
    """Return whether a sampled token ends the request and is not itself part of the answer.

    Why min_tokens is not asked: until then these tokens are masked and cannot be sampled.
    """
    return token in end_tokens(state, request)


def end_tokens(state: State, request: RequestState) -> tuple[int, ...]:
    """Return the tokens that end a request: the model's, unless ignored, and the request's own."""
    facts = state.models[request.model].facts
    if request.ignore_eos or facts is None:
        return request.stop_token_ids
    return facts.end_tokens + request.stop_token_ids


# ---------------------------------------------------------------------------- job


def _evolve_job(state: State, event: Event, taken: Input) -> None:
    for number in event.entities:
        if event.trigger == "plan":
            _plan(state, number, event)
            continue
        job = state.jobs[number]
        job.state = event.dest
        if event.trigger in ("submit", "doubt"):
            job.ticket = event.data["ticket"]
            state.device.refusals_in_a_row = 0
            state.device.backoff_tries = 0
        elif event.trigger == "refuse":
            _count_refusal(state, event.data["cause"])
        if event.dest in MACHINES["job"].final:
            del state.jobs[number]
            _leave_job(state, job, event, taken)


def _plan(state: State, number: int, event: Event) -> None:
    if number != state.next_job:
        raise InternalError(f"job/{number} was planned, job/{state.next_job} was next")
    state.next_job = number + 1
    data = event.data
    job = JobState(
        number=number,
        state=event.dest,
        task=data["task"],
        origin=data["origin"],
        model=data["model"],
        epoch=event.epoch,
        generation=event.generation,
        buffer=data["buffer"],
        rows=tuple(JobRow(*row) for row in data["rows"]),
        planned_ns=state.now_ns,
    )
    state.jobs[number] = job
    if job.origin == "request":
        state.last_task = job.task
        for row in job.rows:
            state.requests[row.owner].job = number
        _drop_passed(state, state.prefill_again, is_prefilling)
        _drop_passed(state, state.decode_ready, is_decoding)
    else:
        state.models[job.model].trial.job = number


def _count_refusal(state: State, cause: str) -> None:
    """Count refusals of submits in a row; back off from what may pass by itself."""
    device = state.device
    if cause == "submit":
        device.refusals_in_a_row += 1
        return
    limits = state.limits
    wait_ns = min(limits.backoff_first_ns << min(device.backoff_tries, 20), limits.backoff_last_ns)
    device.backoff_tries += 1
    device.backoff_until_ns = state.now_ns + wait_ns


def _leave_job(state: State, job: JobState, event: Event, taken: Input) -> None:
    """Let the owners of a terminal job go on; take over the tokens of a completed one."""
    if job.origin != "request":
        trial = state.models[job.model].trial
        trial.job = None
        if event.trigger == "complete":
            trial.done_tokens = job.rows[0].to_tokens
            trial.refusals = trial.kv_refusals = 0
        elif event.trigger == "refuse":
            _count_retry(trial, event.data["cause"])
        return
    results: tuple[RowResult | None, ...] = (None,) * len(job.rows)
    if event.trigger == "complete":
        assert isinstance(taken, Completed)
        results = taken.rows
    for row, result in zip(job.rows, results, strict=True):
        request = state.requests.get(row.owner)
        if request is None:
            continue
        request.job = None
        if result is None:
            if event.trigger == "refuse":
                _count_retry(request, event.data["cause"])
            queue = state.prefill_again if job.task == "prefill" else state.decode_ready
            queue.appendleft(request.number)
            continue
        request.refusals = request.kv_refusals = 0
        if result.fault or is_end_token(state, request, result.token):
            continue
        request.tokens.append(result.token)
        if request.state == "decoding":
            state.decode_ready.append(request.number)


def _count_retry(owner: RequestState | TrialProgress, cause: str) -> None:
    """Use up a retry of whoever owns a refused job; a busy device costs none."""
    if cause == "submit":
        owner.refusals += 1
    elif cause == "kv":
        owner.kv_refusals += 1


# ---------------------------------------------------------------------------- buffer, lane


def _evolve_buffer(state: State, event: Event, taken: Input) -> None:
    for number in event.entities:
        buffer = state.buffers[number]
        buffer.state = event.dest
        if event.trigger == "acquire":
            buffer.job = event.data["job"]
        elif event.dest == "free":
            buffer.job = None


def _evolve_lane(state: State, event: Event, taken: Input) -> None:
    for index, number in enumerate(event.entities):
        lane = state.lanes[number]
        lane.state = event.dest
        _LANE_MOVES[event.trigger](state, lane, event, index)


def _bind(state: State, lane: LaneState, event: Event, index: int) -> None:
    lane.origin = event.data["origin"]
    lane.owner = event.data["owners"][index]
    lane.length_tokens = 0
    if lane.origin != "request":
        state.models[lane.model].trial.lane = lane.number


def _reserve(state: State, lane: LaneState, event: Event, index: int) -> None:
    lane.job = event.data["job"]
    lane.reserved_tokens = event.data["to"][index]
    lane.carried, lane.due = lane.due, ()


def _commit(state: State, lane: LaneState, event: Event, index: int) -> None:
    lane.due = (kv_operation("COMMIT", lane),)
    lane.length_tokens = lane.reserved_tokens
    _end_reservation(lane)


def _rollback(state: State, lane: LaneState, event: Event, index: int) -> None:
    lane.due = (kv_operation("ROLLBACK", lane),) if event.data["applied"] else lane.carried
    _end_reservation(lane)


def _end_reservation(lane: LaneState) -> None:
    lane.reserved_tokens = 0
    lane.job = None
    lane.carried = ()


def _evict(state: State, lane: LaneState, event: Event, index: int) -> None:
    if lane.origin != "request":
        trial = state.models[lane.model].trial
        trial.index += 1
        trial.done_tokens = 0
        trial.lane = None
    _forget_owner(state, lane, event, index)


def _forget_owner(state: State, lane: LaneState, event: Event, index: int) -> None:
    lane.origin = ""
    lane.owner = None
    lane.length_tokens = 0
    lane.due = ()
    _end_reservation(lane)


_LANE_MOVES: dict[str, Callable[[State, LaneState, Event, int], None]] = {
    "bind": _bind,
    "reserve": _reserve,
    "commit": _commit,
    "rollback": _rollback,
    "evict": _evict,
    "suspect": _forget_owner,
    "clear": _forget_owner,
    "abandon": _forget_owner,
}


def kv_operation(verb: str, lane: LaneState) -> KvOperation:
    """Return the device operation that ``verb`` means for the lane's present reservation."""
    return KvOperation(
        verb=verb,
        lane=lane.number,
        from_tokens=lane.length_tokens,
        to_tokens=lane.reserved_tokens,
        transaction=lane.job or 0,
    )


# ---------------------------------------------------------------------------- model, device


def _evolve_model(state: State, event: Event, taken: Input) -> None:
    (number,) = event.entities
    if event.trigger == "load":
        if number != state.next_model:
            raise InternalError(f"model/{number} was asked for, model/{state.next_model} was next")
        state.next_model = number + 1
        state.models[number] = ModelState(
            number=number, state=event.dest, alias=event.data["alias"], source=event.data["source"]
        )
        return
    model = state.models[number]
    model.state = event.dest
    model.reason = event.data.get("reason", model.reason)
    model.releasing = event.data.get("release", False)
    if event.trigger == "accept":
        _accept(state, model, event, taken)
    elif event.trigger == "configure":
        _configure(state, model, event, taken)
    elif event.trigger == "publish":
        state.aliases[model.alias] = number
    elif event.dest == "unloaded":
        _remove_model(state, number)
    if model.state != "ready" and state.aliases.get(model.alias) == number:
        del state.aliases[model.alias]


def _accept(state: State, model: ModelState, event: Event, taken: Input) -> None:
    assert isinstance(taken, ArtifactValidated)
    model.facts = taken
    model.generation = event.generation
    model.lane_first, model.lane_count = event.data["lanes"]
    model.buffers = tuple(
        BufferPlan(submodel=submodel, task=task, first=first, count=count)
        for submodel, task, first, count in event.data["buffers"]
    )
    state.next_generation = event.generation + 1
    state.next_lane = model.lane_first + model.lane_count
    state.next_buffer = model.buffers[-1].first + model.buffers[-1].count


def _configure(state: State, model: ModelState, event: Event, taken: Input) -> None:
    assert isinstance(taken, ModelConfigured)
    model.used_bytes_before = taken.used_bytes_before
    for number in range(model.lane_first, model.lane_first + model.lane_count):
        state.lanes[number] = LaneState(number, "empty", model.number, event.generation)
    for plan in model.buffers:
        for number in range(plan.first, plan.first + plan.count):
            state.buffers[number] = BufferState(
                number=number,
                state="free",
                model=model.number,
                epoch=event.epoch,
                generation=event.generation,
                submodel=plan.submodel,
                task=plan.task,
            )


def _remove_model(state: State, number: int) -> None:
    del state.models[number]
    for table in (state.lanes, state.buffers):
        for owned in [n for n, entity in table.items() if entity.model == number]:
            del table[owned]


def _evolve_device(state: State, event: Event, taken: Input) -> None:
    device = state.device
    device.state = event.dest
    device.reason = event.data.get("reason", "")
    if event.trigger == "lose":
        for model in state.models.values():
            model.releasing = False  # nobody will answer any more
    if event.trigger == "open":
        assert isinstance(taken, EngineStarted)
        state.device = DeviceState(
            state=event.dest,
            incarnation=event.data["incarnation"],
            epoch=event.epoch,
            facts=taken.device,
        )
        state.next_epoch = event.epoch + 1


_EVOLVERS: dict[str, Callable[[State, Event, Input], None]] = {
    "request": _evolve_request,
    "job": _evolve_job,
    "buffer": _evolve_buffer,
    "lane": _evolve_lane,
    "model": _evolve_model,
    "device": _evolve_device,
}
