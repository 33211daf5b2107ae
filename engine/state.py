"""What the engine knows; ``evolve`` (evolve.py) changes it, and nothing else but its short ways.

Theory of operation. ``State`` is a value in the sense that matters: it is a function of the steps
taken so far, and two folds of the same journal give equal states (``freeze`` compares them). For
speed it is changed in place, by ``evolve`` and ``begin_step`` and by what moves it over the usual
decode jobs as they would (evolve_decodes.py, evolve_run.py, ring.py); whoever needs the old value
calls ``copy`` first. An event says which entities moved; what an event cannot say without repeating
itself (prompt, tokens, artifact facts) is read from the step's own input, so nothing is stored
twice. What has ended leaves the state: a terminal job, an ended request, an unloaded model with its
lanes and buffers.
"""

import copy as copying
from collections import deque
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any

import attrs
import msgspec

from laneway.engine.effects import BufferPlan, KvOperation
from laneway.engine.errors import IllegalTransitionError, InternalError
from laneway.engine.fairness import FairQueue
from laneway.engine.inputs import (
    ArtifactValidated,
    DeviceFacts,
)
from laneway.engine.ladder import Ladder
from laneway.engine.limits import Limits
from laneway.engine.sampling import Sampling
from laneway.statemachines import MACHINES, entity_name

DEVICE = 0
"""The engine drives one device; its entity is ``device/0``."""


@attrs.define
class RequestState:
    """A live request: its parameters, its tokens so far, and what it holds.

    ``prefill_tokens``: how many of its known tokens must be in its lane before the next one is
    drawn, which are the prompt and those it already had when it was resumed. ``catching_up``: the
    last of them go through decode jobs that draw nothing, since no prefill takes them.
    ``requeues`` and ``suspicions`` count how often a device fault suspended it, as an innocent and
    as a suspect; ``alone``: it is a suspect that nothing else runs beside (G15).
    """

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
    priority: int = 0
    tenant: str = ""
    long: bool = False
    tag: int = 0
    """Its class of waiting and its place in it (fairness.py)."""

    alias: str = ""
    source: str = ""
    sha256: str = ""
    """The name it was asked of, and the artifact that its tokens come from, with its place."""

    on_fault: str = "continue"
    prefill_tokens: int = 0
    catching_up: bool = False
    served: bool = False
    """Whether it had a lane before: then it stands before those of its class that had none."""

    requeues: int = 0
    suspicions: int = 0
    alone: bool = False
    content: str = ""
    """What it was accused under (guilt.py), "" if it never was."""

    canary_tokens: int = 0
    proven_tokens: int = 0
    suspect_from: int | None = None
    """Its tokens when the last canary began, when the last good one did, and the first that a
    canary that differed put in doubt (decision 15)."""

    continued_from: int | None = None
    """The first of its tokens that was drawn after a fault or a restart, on a device of which no
    record says that a prefill gives the bits of decodes."""


class JobRow(msgspec.Struct, frozen=True, gc=False):
    """One row of a job: lane, owner (request or run number), KV length before and after."""

    lane: int
    owner: int
    from_tokens: int
    to_tokens: int


@attrs.define
class JobState:
    """A job that is not terminal.

    ``recall_until_ns``: until when it is waited for, since the device was asked to end it.
    """

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
    suspected: bool = False
    recall_until_ns: int = 0
    overlapped: bool = False
    """Whether another job was in flight at any moment of it."""


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
    list was not applied. ``on_device``: a RESERVE of this binding was applied, so the bank knows of
    it and must be told of its end.
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
    on_device: bool = False


@attrs.define
class TrialRun:
    """One run of a trial: which one, its tokens so far, its lanes and its job.

    A trial for a batch runs in as many lanes, all with the same tokens. ``overlapped``: any of its
    jobs so far was.
    """

    number: int
    trial: int
    origin: str
    done_tokens: int = 0
    lanes: tuple[int, ...] = ()
    job: int | None = None
    refusals: int = 0
    kv_refusals: int = 0
    overlapped: bool = False


@attrs.define
class Canary:
    """The books of a generation's canaries (canaries.py).

    ``jobs`` of requests were completed since the last one began, which was at ``since_ns`` and ran
    trial ``trial``. ``batches`` are those that jobs of requests ran in. ``went``: the model's last
    job was a canary's. ``pairing`` are the runs of an interleave golden under way, of which
    ``paired`` ended equal. ``examining``: a canary differed and nothing is believed until
    ``examiner``, a run alone, has decided. ``ended`` are requests that ended with tokens that no
    canary proved, each with the first such position; ``ended_before`` those of them that had ended
    when the canary under way began.
    """

    jobs: int = 0
    since_ns: int = 0
    trial: int = -1
    batches: tuple[int, ...] = ()
    went: bool = False
    pairing: tuple[int, ...] = ()
    paired: int = 0
    examining: bool = False
    examiner: int | None = None
    ended: list[tuple[int, int]] = attrs.Factory(list)
    ended_before: list[tuple[int, int]] = attrs.Factory(list)


@attrs.define
class ModelState:
    """One load of one artifact that is not unloaded.

    ``releasing``: the device is giving it back and has not said how that ended. ``reread_ns``: when
    its memory is to be read once more, 0 for never; ``rereading``: that reading decides.
    """

    number: int
    state: str
    alias: str
    source: str
    facts: ArtifactValidated | None = None
    generation: int = 0
    lane_first: int = 0
    lane_count: int = 0
    buffers: tuple[BufferPlan, ...] = ()
    runs: dict[int, TrialRun] = attrs.Factory(dict)
    """The runs of trials under way, by their number; ``next_run`` is the next one's."""

    next_run: int = 0
    empty_lanes: list[int] = attrs.Factory(list)
    """The numbers of its empty lanes, as a heap: the lowest is taken first."""

    free_buffers: dict[str, list[int]] = attrs.Factory(dict)
    """By submodel the numbers of its free buffers, as heaps."""

    used_bytes_before: tuple[int, ...] = ()
    releasing: bool = False
    reason: str = ""
    configure_failures: int = 0
    served: bool = False
    """Whether it was ever ready: then a reset does not end its load."""

    drain_again: bool = False
    """It was draining when a reset took its generation."""

    reread_ns: int = 0
    rereading: bool = False
    canary: Canary = attrs.Factory(Canary)
    replaces: int = 0
    """The model whose place it is to take, 0 for none (successors.py)."""

    vetted: bool = False
    """Its artifact was found good beside that model, which had to go for it."""

    waiting: bool = False
    """Its load waits in `validating`, for its place or for a device that serves; the latter also
    after a configuration that failed, whose load never was in the place of another."""

    no_way_back: bool = False
    """The model that it replaces was asked to be unloaded meanwhile: that is not loaded back."""

    must_be: str = ""
    """The SHA-256 that its artifact must have, "" for any."""


@attrs.frozen
class Proven:
    """An artifact that passed golden: where it was, its SHA-256, and the device with versions."""

    source: str
    sha256: str
    device: str


@attrs.define
class Ledger:
    """Jobs since the device was opened, by what the device said of them (E14).

    ``given_up`` are those it said nothing of.
    """

    submitted: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    given_up: int = 0


@attrs.define
class DeviceState:
    """The device as the engine sees it, and the counts behind its budgets (E28).

    ``counter_differences``: comparisons in a row in which its counters differed from the ledger.
    ``ceiling_reason``: why only one job may be in flight, "" if more may; ``ceiling_falls``: how
    often it became so; ``good_canaries``: since the last anomaly. ``missed_ns``: when polls found
    what no wait had told, the latest few. ``health_ns``: when its health was told last.
    ``lost_rung``: 7 where a new process may open it again, 8 where not.
    """

    state: str = "closed"
    incarnation: int = 0
    epoch: int = 0
    facts: DeviceFacts | None = None
    refusals_in_a_row: int = 0
    backoff_tries: int = 0
    backoff_until_ns: int = 0
    reason: str = ""
    ledger: Ledger = attrs.Factory(Ledger)
    counter_differences: int = 0
    counters_trusted: bool = True
    ceiling_reason: str = ""
    health_ns: int = 0
    lost_rung: int = 0
    ceiling_falls: int = 0
    good_canaries: int = 0
    missed_ns: tuple[int, ...] = ()
    throttled: tuple[int, ...] = ()
    """The chips that run slower now because of their heat (row 25)."""

    device_epoch: int = 0
    """The device's own number of its epoch, as it was opened or last reset and believed."""


@attrs.define
class State:
    """Everything the engine decides from.

    The ``next_*`` numbers rise over the whole journal (decision 9).
    """

    step: int = 0
    now_ns: int = 0
    limits: Limits = attrs.Factory(Limits)
    device: DeviceState = attrs.Factory(DeviceState)
    ladder: Ladder = attrs.Factory(Ladder)
    closing: bool = False
    models: dict[int, ModelState] = attrs.Factory(dict)
    aliases: dict[str, int] = attrs.Factory(dict)
    proven: dict[str, tuple[Proven, ...]] = attrs.Factory(dict)
    """By alias what passed golden under it, the latest last (successors.py)."""

    coming_back: dict[int, str] = attrs.Factory(dict)
    """By failed model the alias that a load back was asked of the shell for and has not come."""

    lanes: dict[int, LaneState] = attrs.Factory(dict)
    buffers: dict[int, BufferState] = attrs.Factory(dict)
    jobs: dict[int, JobState] = attrs.Factory(dict)
    requests: dict[int, RequestState] = attrs.Factory(dict)
    short_waiting: FairQueue = attrs.Factory(FairQueue)
    long_waiting: FairQueue = attrs.Factory(FairQueue)
    prefill_again: deque[int] = attrs.Factory(deque)
    chunking: deque[int] = attrs.Factory(deque)
    decode_ready: deque[int] = attrs.Factory(deque)
    alone: list[int] = attrs.Factory(list)
    """Suspects that run alone, in order: while one of them can run, nothing else does (G15)."""

    deadlines: list[tuple[int, int]] = attrs.Factory(list)
    waiting_requests: int = 0
    waiting_tokens: int = 0
    suspended: list[int] = attrs.Factory(list)
    """The requests that are suspended, first come first."""

    reserving: tuple[int, ...] = ()
    """Lanes reserved in this step for the job that is planned next in it."""

    prefill_debt_tokens: int = 0
    """Prompt tokens run that decode jobs have not yet been given their turns for."""

    short_turns: int = 0
    """Short prefill jobs planned in a row while a long one waited."""

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


def state_of(state: State, machine: str, number: int) -> str:
    """Return the state an entity is in; what does not exist yet is in its machine's initial state.

    Raises: IllegalTransitionError for a lane or buffer that no model brought into being.
    """
    if machine == "device":
        return state.device.state
    known = entities_of(state, machine)
    if number in known:
        found: str = known[number].state
        return found
    if machine in ("lane", "buffer"):
        raise IllegalTransitionError(machine, "absent", "any", entity_name(machine, number))
    return MACHINES[machine].initial


def entities_of(state: State, machine: str) -> dict[int, Any]:
    """Return the entities of a machine that exist, by number (every machine but the device)."""
    return _TABLES[machine](state)  # type: ignore[no-any-return]


_TABLES: dict[str, Callable[[State], Any]] = {
    name: attrgetter(f"{name}s") for name in ("request", "job", "buffer", "lane", "model")
}


def waiting_queue(state: State, request: RequestState) -> FairQueue:
    """Return the queue of a request's class: short or long prefill."""
    return state.long_waiting if request.long else state.short_waiting


def is_waiting_number(state: State, number: int) -> bool:
    """Return whether a request lives and waits for a lane."""
    request = state.requests.get(number)
    return request is not None and request.state == "waiting"


def is_prefilling(request: RequestState) -> bool:
    """Return whether a request has a lane and needs its prefill run (again)."""
    return request.state == "prefilling" and request.job is None and not request.catching_up


def is_decoding(request: RequestState) -> bool:
    """Return whether a request is ready for its next decode job."""
    return request.job is None and (request.state == "decoding" or request.catching_up)


def is_homeless(state: State, request: RequestState) -> bool:
    """Return whether a restart took a request's model and no other one came for it yet."""
    return request.state == "suspended" and request.model not in state.models


def known_tokens(request: RequestState, start: int, end: int) -> tuple[int, ...]:
    """Return a part of a request's history: its prompt, then the tokens it already has."""
    prompt = request.prompt
    if end <= len(prompt):
        return prompt[start:end]
    own = request.tokens[max(start - len(prompt), 0) : end - len(prompt)]
    return (*prompt[start:], *own)


def is_end_token(facts: ArtifactValidated, request: RequestState, token: int) -> bool:
    """Return whether a sampled token ends the request and is not itself part of the answer.

    ``facts``: those of the request's model. Why min_tokens is not asked: until then these tokens
    are masked and cannot be sampled.
    """
    return token in request.stop_token_ids or (not request.ignore_eos and token in facts.end_tokens)


def end_tokens(state: State, request: RequestState) -> tuple[int, ...]:
    """Return the tokens that end a request: the model's, unless ignored, and the request's own."""
    facts = state.models[request.model].facts
    if request.ignore_eos or facts is None:
        return request.stop_token_ids
    return facts.end_tokens + request.stop_token_ids


def kv_operation(verb: str, lane: LaneState) -> KvOperation:
    """Return the device operation that ``verb`` means for the lane's present reservation."""
    return KvOperation(verb, lane.number, lane.length_tokens, lane.reserved_tokens, lane.job or 0)
