"""What an event of a request changes: its own state and the queues it stands in."""

import heapq
from collections import deque
from collections.abc import Callable

from laneway.engine.errors import InternalError
from laneway.engine.fairness import UNIT
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
            state.waiting_tokens -= len(request.prompt)
        request.state = event.dest
        if event.trigger == "prefill":
            request.lane = event.data["lanes"][index]
            queue = waiting_queue(state, request)
            queue.serve(request.tag)
            queue.drop_passed(lambda one: is_waiting_number(state, one))
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
        priority=taken.priority,
        tenant=taken.tenant,
        long=len(taken.prompt) > state.limits.long_prefill_threshold_tokens,
    )
    if taken.deadline_ns is not None:
        heapq.heappush(state.deadlines, (taken.deadline_ns, number))
    _wait(state, state.requests[number])
    state.waiting_requests += 1
    state.waiting_tokens += len(taken.prompt)


def _wait(state: State, request: RequestState) -> None:
    """Give a request its place among those of its class."""
    limits = state.limits
    queue = waiting_queue(state, request)
    request.tag = queue.tag(
        request.tenant,
        cost_tokens=len(request.prompt) + request.max_tokens,
        weight=dict(limits.tenant_weights).get(request.tenant, 1),
    )
    lead = request.priority * limits.priority_step_tokens * UNIT
    queue.push(request.tag + lead, request.number)


def drop_passed(state: State, queue: deque[int], fits: Callable[[RequestState], bool]) -> None:
    """Drop from the front of a queue what does not belong there any more."""
    while queue:
        request = state.requests.get(queue[0])
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
