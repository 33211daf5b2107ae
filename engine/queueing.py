"""Whose turn it is: decode, short prefill or long prefill, and which sequences go together.

Theory of operation. Three classes (R5.4, E13). **Decode**: every sequence that has a token goes on,
round robin, as many as the largest batch takes. **Short prefill** and **long prefill**: prompts
that wait, each class in the order of fairness.py.

A prefill leaves a debt of its tokens; each decode job pays off a fixed part. While a decode is
ready and there is a debt, the turn is decode's; else prefill's, if there is a prompt and a lane.
So with a ceiling of one job, in turns (jobs planned):

- a sequence that is ready waits at most for one prefill before each decode job, and for as many
  decode jobs as batches are ready: ``decode_bound_turns``;
- the prefill class, while a lane is empty, waits at most until its own last job is paid off:
  ``prefill_bound_turns``;
- a long prompt is passed by at most ``short_turns_max`` short prefill jobs: then the next empty
  lane is kept for it.

``bounds`` says what they are for a model; a refused job that is tried again is not counted.

A long prompt is split only where the submodel takes it in parts and that is granted (R5.5); then
each part is a turn, and its debt lets decode go in between. Prompts of the short class go together
into one job up to a token budget; the long class goes alone.

Where rows are fixed to lanes (E15), lanes come in blocks of a batch and a job takes lanes of one
block: the first in the queue says which. New sequences fill the lowest block.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

from laneway.engine.effects import SubmitRow
from laneway.engine.inputs import SubmodelFacts
from laneway.engine.limits import Limits
from laneway.engine.plan import Plan, block_of, may_split, takes_rows
from laneway.engine.state import (
    ModelState,
    RequestState,
    State,
    is_decoding,
    is_prefilling,
    is_waiting_number,
    known_tokens,
)
from laneway.engine.submit_rows import decode_rows, drawn_row


def choose_request(state: State, model: ModelState) -> Plan | None:
    """Return the next job of live requests, or None."""
    if state.alone:
        suspect = _first_alone(state, model)
        if suspect is not None:
            return _choose_alone(state, model, suspect)
    queues = (state.decode_ready, state.prefill_again, state.chunking)
    if not any(queues) and not state.waiting_requests:
        return None  # seen at once, since every decision asks
    order = (_choose_prefill, _choose_decode)
    if state.prefill_debt_tokens > 0:
        order = (_choose_decode, _choose_prefill)
    for chooser in order:
        chosen = chooser(state, model)
        if chosen is not None:
            return chosen
    return None


def choose_begun(state: State, model: ModelState) -> Plan | None:
    """Return the next job of a request that has a lane; whoever waits goes on waiting."""
    for queue in (state.prefill_again, state.chunking):
        for request in _live(state, queue, model, is_prefilling):
            return _prefill_alone(state, model, request, request.lane)
    return _choose_decode(state, model)


def prefill_bound_turns(limits: Limits, tokens_max: int) -> int:
    """Return for how many turns at most an empty lane waits for the next prompt.

    ``tokens_max``: of one prefill job.
    """
    return -(-tokens_max // limits.prefill_tokens_per_decode) + 1


def decode_bound_turns(lanes: int, batch_max: int, block: int) -> int:
    """Return for how many turns at most a sequence that is ready waits, itself included.

    ``block``: how many lanes may share a job, all of them unless rows are fixed.
    """
    jobs = -(-lanes // block) * -(-block // batch_max)
    return 2 * min(lanes, jobs)


# ---------------------------------------------------------------------------- decode


def _choose_decode(state: State, model: ModelState) -> Plan | None:
    sizes = _submodels(model, "decode", tokens=1)
    ready: Iterable[int] = state.decode_ready
    if sizes[-1].fixed_rows:
        ready = _of_one_block(state, model, sizes)
    taken = _together(state, model, ready, _rows_max(state, sizes))
    if not taken:
        return None
    rows = decode_rows(state, taken)
    buffer, rows = _fit(state, model, sizes, rows)
    return None if buffer is None else _plan(model, "decode", buffer, rows)


def _of_one_block(state: State, model: ModelState, sizes: list[SubmodelFacts]) -> Iterator[int]:
    """Yield the requests that are ready and whose lanes may share a job with the first one's (E15).

    Why the order stays fair: what is ready goes round by blocks, so a sequence waits for one job of
    every other block that was there before it.
    """
    full = widest(state, model, sizes)
    block: int | None = None
    for request in _live(state, state.decode_ready, model, is_decoding):
        assert request.lane is not None
        own = block_of(model, full, request.lane)
        if block is None or own == block:
            block = own
            yield request.number


# ---------------------------------------------------------------------------- suspects


def _first_alone(state: State, model: ModelState) -> RequestState | None:
    """Return the first suspect of a model that can run."""
    for number in state.alone:
        request = state.requests[number]
        if request.model == model.number and request.state != "suspended":
            return request
    return None


def _choose_alone(state: State, model: ModelState, request: RequestState) -> Plan | None:
    """Return the next job of a suspect, once nothing else is in flight (G15).

    Why nothing else: another fault then names the guilty one, and costs nobody but it; those who
    wait for a lane meanwhile have lost nothing. If no lane is empty, those who have one go on until
    one is.
    """
    if request.lane is None and not model.empty_lanes:
        return _choose_decode(state, model)
    if state.jobs:
        return None
    if is_decoding(request):
        sizes = _submodels(model, "decode", tokens=1)
        rows = decode_rows(state, [request])
        buffer, _ = _fit(state, model, sizes, rows)
        return None if buffer is None else _plan(model, "decode", buffer, rows)
    lane = request.lane if request.lane is not None else _lowest(model)
    return _prefill_alone(state, model, request, lane)


# ---------------------------------------------------------------------------- prefill


def _choose_prefill(state: State, model: ModelState) -> Plan | None:
    """Return the next prefill: one refused before, else of the class whose turn it is."""
    may_begin = state.waiting_requests and model.empty_lanes
    if not (state.prefill_again or state.chunking or may_begin):
        return None
    for request in _live(state, state.prefill_again, model, is_prefilling):
        return _prefill_alone(state, model, request, request.lane)
    long_first = state.short_turns >= state.limits.short_turns_max
    chooser: Callable[[State, ModelState], Plan | None]
    for chooser in (_long, _short) if long_first else (_short, _long):
        chosen = chooser(state, model)
        if chosen is not None or (long_first and _long_waits(state, model)):
            return chosen
    return None


def _long_waits(state: State, model: ModelState) -> bool:
    waiting = _waiting(state, state.long_waiting.in_order(), model)
    return next(waiting, None) is not None


def _long(state: State, model: ModelState) -> Plan | None:
    """Return the next part of a prompt that was begun, else of the first long prompt."""
    for request in _live(state, state.chunking, model, is_prefilling):
        return _prefill_alone(state, model, request, request.lane)
    for request in _waiting(state, state.long_waiting.in_order(), model):
        return _prefill_alone(state, model, request, _lowest(model))
    return None


def _prefill_alone(
    state: State, model: ModelState, request: RequestState, lane: int | None
) -> Plan | None:
    if lane is None:
        return None
    row = _prefill_row(state, model, request, lane)
    sizes = _submodels(model, "prefill", tokens=len(row.tokens), start=row.start)
    buffer, _ = _fit(state, model, [size for size in sizes if size.batch_max == 1] or sizes, [row])
    bind = request.lane is None
    return None if buffer is None else _plan(model, "prefill", buffer, [row], bind=bind)


def _short(state: State, model: ModelState) -> Plan | None:
    """Return a job of the first short prompts: as many as lanes, batch and token budget take."""
    sizes = _submodels(model, "prefill", tokens=1)
    lanes = _empty_lanes(state, model, sizes)
    most = min(len(lanes), _rows_max(state, sizes))
    rows: list[SubmitRow] = []
    left = state.limits.prefill_tokens_max
    for request in _waiting(state, state.short_waiting.in_order(), model):
        if len(rows) == most or (rows and request.prefill_tokens > left):
            break
        rows.append(_prefill_row(state, model, request, lanes[len(rows)]))
        left -= request.prefill_tokens
    if not rows:
        return None
    width = max(len(row.tokens) for row in rows)
    buffer, rows = _fit(state, model, _submodels(model, "prefill", tokens=width), rows)
    return None if buffer is None else _plan(model, "prefill", buffer, rows, bind=True)


def _empty_lanes(state: State, model: ModelState, sizes: list[SubmodelFacts]) -> list[int]:
    """Return the empty lanes that may share a prefill, lowest first.

    Where rows are fixed these are of the lowest one's block (E15).
    """
    lanes = sorted(model.empty_lanes)
    if lanes and sizes[-1].fixed_rows:
        full = widest(state, model, sizes)
        block = block_of(model, full, lanes[0])
        return [lane for lane in lanes if block_of(model, full, lane) == block]
    return lanes


def _prefill_row(state: State, model: ModelState, request: RequestState, lane: int) -> SubmitRow:
    """Return the next part of what a request already has: its prompt, and its tokens if resumed.

    It is all that is left, unless it is long and may be split, or is more than a prefill takes.
    """
    start = state.lanes[lane].length_tokens if request.lane is not None else 0
    goal = end = request.prefill_tokens
    if request.long and may_split(state, model):
        end = min(end, start + state.limits.prefill_chunk_tokens)
    if request.tokens:
        end = min(end, start + _prefill_width(state, model))
    tokens = known_tokens(request, start, end)
    if end < goal:
        return SubmitRow(lane, request.number, tokens, start, None)
    return drawn_row(state, request, lane, tokens, start)


def _prefill_width(state: State, model: ModelState) -> int:
    """Return how many tokens a prefill of one sequence takes at most."""
    facts = model.facts
    assert facts is not None
    sizes = facts.tasks["prefill"]
    return max(size.tokens_max for size in sizes if takes_rows(state, facts, size, 1))


# ---------------------------------------------------------------------------- helpers


def _live(
    state: State,
    queue: deque[int],
    model: ModelState,
    fits: Callable[[RequestState], bool],
) -> Iterator[RequestState]:
    """Yield the requests of a model that still belong in a queue, in order.

    Why: a request that ended or moved on stays in the queue and is skipped, so that cancel is O(1).
    """
    find, own = state.requests.get, model.number
    for number in queue:
        request = find(number)
        if request is not None and request.model == own and fits(request):
            yield request


def _waiting(state: State, numbers: Iterable[int], model: ModelState) -> Iterator[RequestState]:
    for number in numbers:
        if is_waiting_number(state, number):
            request = state.requests[number]
            if request.model == model.number:
                yield request


def _rows_max(state: State, sizes: list[SubmodelFacts]) -> int:
    return min(state.limits.batch_rows_max, sizes[-1].batch_max) if sizes else 0


def _together(
    state: State, model: ModelState, numbers: Iterable[int], most: int
) -> list[RequestState]:
    """Return the first requests that decode and may share a job, of those in a queue.

    One that was refused before goes alone.
    """
    find, own = state.requests.get, model.number
    taken: list[RequestState] = []
    for number in numbers:
        request = find(number)
        if request is None or request.model != own or not is_decoding(request):
            continue
        if request.refusals or request.kv_refusals:
            return taken or [request]
        taken.append(request)
        if len(taken) == most:
            break
    return taken


def _lowest(model: ModelState) -> int | None:
    return model.empty_lanes[0] if model.empty_lanes else None


def _submodels(model: ModelState, task: str, *, tokens: int, start: int = 0) -> list[SubmodelFacts]:
    """Return the submodels of a task that take rows of so many tokens, smallest batch first."""
    assert model.facts is not None
    return [
        submodel
        for submodel in model.facts.tasks[task]
        if submodel.tokens_max >= tokens and (start == 0 or submodel.incremental)
    ]


def widest(state: State, model: ModelState, sizes: Sequence[SubmodelFacts]) -> SubmodelFacts:
    """Return the submodel of the largest batch that may be run full."""
    facts = model.facts
    assert facts is not None
    for size in reversed(sizes):
        if takes_rows(state, facts, size, size.batch_max):
            return size
    return sizes[-1]


def _fit(
    state: State, model: ModelState, sizes: list[SubmodelFacts], rows: list[SubmitRow]
) -> tuple[int | None, list[SubmitRow]]:
    """Return a free buffer and the rows that it takes: all, in the smallest batch that does.

    If none takes all, the largest batch that may run is filled (E15: where inactive rows are
    undefined, only full ones).
    """
    facts = model.facts
    assert facts is not None
    count = len(rows)
    for size in sizes:
        if size.batch_max >= count and takes_rows(state, facts, size, count):
            buffer = free_buffer(model, size)
            if buffer is not None and len(_beside_first(model, size, rows)) == count:
                return buffer, rows
    for size in reversed(sizes):
        if size.batch_max <= count and takes_rows(state, facts, size, size.batch_max):
            buffer = free_buffer(model, size)
            taken = _beside_first(model, size, rows)[: size.batch_max]
            if buffer is not None and len(taken) == size.batch_max:
                return buffer, taken
    return None, []


def _beside_first(model: ModelState, size: SubmodelFacts, rows: list[SubmitRow]) -> list[SubmitRow]:
    """Return the rows whose lanes may share a job of this submodel with the first one's."""
    if not size.fixed_rows:
        return rows
    block = block_of(model, size, rows[0].lane)
    return [row for row in rows if block_of(model, size, row.lane) == block]


def free_buffer(model: ModelState, submodel: SubmodelFacts) -> int | None:
    """Return the lowest free buffer of a submodel, or None.

    Those of an old epoch or generation are in no list (E2, G3).
    """
    free = model.free_buffers.get(submodel.name)
    return free[0] if free else None


def _plan(
    model: ModelState, task: str, buffer: int, rows: list[SubmitRow], *, bind: bool = False
) -> Plan:
    ordered = tuple(sorted(rows, key=attrgetter("lane")))
    number = model.number
    return Plan(task=task, origin="request", model=number, buffer=buffer, rows=ordered, bind=bind)


def bounds(state: State, model: ModelState) -> dict[str, int]:
    """Return the service bounds of a model's classes: see the head of this file.

    ``decode`` and ``prefill`` in turns, ``long_prefill`` in short prefill jobs.
    """
    facts = model.facts
    assert facts is not None
    full = [
        size for size in facts.tasks["decode"] if takes_rows(state, facts, size, size.batch_max)
    ]
    partial = takes_rows(state, facts, full[-1], 1)
    batch = min(state.limits.batch_rows_max, full[-1].batch_max) if partial else 1
    block = full[-1].batch_max if full[-1].fixed_rows else facts.lane_count
    width = max(size.tokens_max for size in facts.tasks["prefill"])
    tokens_max = max(width, state.limits.prefill_tokens_max)
    return {
        "decode": decode_bound_turns(facts.lane_count, batch, min(block, facts.lane_count)),
        "prefill": prefill_bound_turns(state.limits, tokens_max),
        "long_prefill": state.limits.short_turns_max,
    }
