"""What an event of a request changes: its own state and the queues it stands in."""

import heapq
from collections import deque
from collections.abc import Callable

from laneway.engine.errors import InternalError
from laneway.engine.evolve_canaries import remember_ended
from laneway.engine.fairness import FIRST_KEY, UNIT
from laneway.engine.guilt import accuse, pardon
from laneway.engine.inputs import Input, RequestSubmitted
from laneway.engine.state import RequestState, State, is_waiting_number, waiting_queue
from laneway.statemachines import MACHINES, Event


def evolve_request(state: State, event: Event, taken: Input) -> None:
    """Move requests; what a new one asks for is taken from the step's input."""
    for index, number in enumerate(event.entities):
        if event.trigger in ("admit", "reject"):
            _receive(state, number, event, taken)
            continue
        request = state.requests[number]
        if request.state == "waiting":
            state.waiting_requests -= 1
            state.waiting_tokens -= request.prefill_tokens
        elif request.state == "suspended":
            state.suspended.remove(number)
        request.state = event.dest
        if event.trigger == "prefill":
            request.lane = event.data["lanes"][index]
            request.served = True
            queue = waiting_queue(state, request)
            queue.serve(request.tag)
            queue.drop_passed(lambda one: is_waiting_number(state, one))
        elif event.trigger == "decode":
            request.catching_up = False
            state.decode_ready.append(number)
        elif event.trigger == "suspend":
            _suspend(state, request, event)
        elif event.trigger == "abandon":
            _let_go(state, request)
        elif event.trigger == "resume":
            _resume(state, request, event)
        elif event.dest in MACHINES["request"].final:
            del state.requests[number]
            if request.alone:
                forget_alone(state, request)
                if event.trigger == "finish":
                    pardon(state.ladder, request.content)
            remember_ended(state, request)
            _compact_waiting(state)
            _drop_passed_deadlines(state)


def _receive(state: State, number: int, event: Event, taken: Input) -> None:
    if number != state.next_request:
        raise InternalError(f"request/{number} arrived, request/{state.next_request} was next")
    state.next_request = number + 1
    if event.trigger == "reject":
        return
    assert isinstance(taken, RequestSubmitted)
    model = state.models[event.data["model"]]
    assert model.facts is not None
    state.requests[number] = RequestState(
        number=number,
        state=event.dest,
        model=model.number,
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
        priority=taken.priority,
        tenant=taken.tenant,
        long=len(taken.prompt) > state.limits.long_prefill_threshold_tokens,
        alias=taken.alias,
        source=model.source,
        sha256=model.facts.sha256,
        on_fault=taken.on_fault,
        prefill_tokens=len(taken.prompt),
    )
    if taken.deadline_ns is not None:
        heapq.heappush(state.deadlines, (taken.deadline_ns, number))
    request = state.requests[number]
    request.tag = waiting_queue(state, request).tag(
        request.tenant,
        cost_tokens=request.prefill_tokens + request.max_tokens,
        weight=dict(state.limits.tenant_weights).get(request.tenant, 1),
    )
    _wait(state, request)


def _suspend(state: State, request: RequestState, event: Event) -> None:
    """Let a fault take from a request what it held; count whether it is a suspect."""
    _let_go(state, request)
    if event.data["suspect"]:
        request.suspicions += 1
        forget_alone(state, request)
        request.alone = True
        request.content = event.data["content"]
        accuse(state.ladder, state.limits, request.content, state.now_ns)
    else:
        request.requeues += 1


def _let_go(state: State, request: RequestState) -> None:
    """Take from a request what it held; it stands in no queue until it is resumed."""
    request.lane = request.job = None
    request.catching_up = False
    request.refusals = request.kv_refusals = 0
    state.suspended.append(request.number)
    leave_turns(state, request.number)
    waiting_queue(state, request).discard(request.number)


def _resume(state: State, request: RequestState, event: Event) -> None:
    """Let a request wait for a lane again; all that it has goes through its prefill."""
    request.model = event.data["model"]
    request.prefill_tokens = len(request.prompt) + len(request.tokens)
    if not event.data.get("exact", True) and request.continued_from is None:
        request.continued_from = len(request.tokens)
    if request.served:
        request.long = request.prefill_tokens > state.limits.long_prefill_threshold_tokens
    _wait(state, request)
    if request.alone and request.number not in state.alone:
        state.alone.append(request.number)


def forget_alone(state: State, request: RequestState) -> None:
    """Let a request run beside others again, and others beside it."""
    request.alone = False
    if request.number in state.alone:
        state.alone.remove(request.number)


def leave_turns(state: State, number: int) -> None:
    """Take a request out of every queue of those that have a lane."""
    for queue in (state.prefill_again, state.chunking, state.decode_ready):
        if number in queue:
            queue.remove(number)


def _wait(state: State, request: RequestState) -> None:
    """Give a request its place among those of its class.

    Whoever was served before stands first, in the order of arrival: its turn had come, it has paid
    for it, and no fault is its tenant's doing.
    """
    state.waiting_requests += 1
    state.waiting_tokens += request.prefill_tokens
    key = FIRST_KEY
    if request.served:
        request.tag = 0
    else:
        key = request.tag + request.priority * state.limits.priority_step_tokens * UNIT
    waiting_queue(state, request).push(key, request.number)


def drop_passed(state: State, queue: deque[int], fits: Callable[[RequestState], bool]) -> None:
    """Drop from the front of a queue what does not belong there any more."""
    find = state.requests.get
    while queue:
        request = find(queue[0])
        if request is not None and fits(request):
            return
        queue.popleft()


def _compact_waiting(state: State) -> None:
    """Bound the queues of the waiting by their live members, whoever leaves behind their heads."""
    for queue in (state.short_waiting, state.long_waiting):
        queue.compact(lambda one: is_waiting_number(state, one), state.waiting_requests)


def _drop_passed_deadlines(state: State) -> None:
    """Keep the earliest deadline that still matters on top, and the heap bounded by live ones."""
    while state.deadlines and state.deadlines[0][1] not in state.requests:
        heapq.heappop(state.deadlines)
    if len(state.deadlines) > 2 * len(state.requests) + 64:
        state.deadlines = [entry for entry in state.deadlines if entry[1] in state.requests]
        heapq.heapify(state.deadlines)
