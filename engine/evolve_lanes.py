"""What an event of a lane changes: owner, length, reservation, and what is due on the device."""

import heapq
from collections.abc import Callable
from itertools import repeat

from laneway.engine.effects import KvOperation
from laneway.engine.evolve_canaries import begin_canary
from laneway.engine.inputs import Input
from laneway.engine.state import LaneState, State, TrialRun, kv_operation
from laneway.statemachines import Event


def evolve_lane(state: State, event: Event, taken: Input) -> None:
    """Move lanes; ``data`` says for each entity what the move is about."""
    dest = event.dest
    if event.trigger == "evict":
        _end_run(state, event)
    lanes = [state.lanes[number] for number in event.entities]
    if event.source == "empty":
        for lane in lanes:
            _take(state.models[lane.model].empty_lanes, lane.number)
    _LANE_MOVES[event.trigger](lanes, event)
    for lane in lanes:
        lane.state = dest
    if dest == "empty":
        for lane in lanes:
            heapq.heappush(state.models[lane.model].empty_lanes, lane.number)
    if event.trigger == "reserve":
        state.reserving += event.entities
    elif event.trigger == "bind" and event.data["origin"] != "request":
        _begin_run(state, event)
    elif event.trigger == "suspect":
        _forget_runs(state, event)


def _take(heap: list[int], number: int) -> None:
    """Take a number out of a heap, at once if it is the lowest."""
    if heap[0] == number:
        heapq.heappop(heap)
    else:
        heap.remove(number)
        heapq.heapify(heap)


def _begin_run(state: State, event: Event) -> None:
    """Begin a run of a trial with the lanes it is given."""
    model = state.models[state.lanes[event.entities[0]].model]
    number = event.data["owners"][0]
    model.runs[number] = TrialRun(
        number=number,
        trial=event.data["trial"],
        origin=event.data["origin"],
        lanes=event.entities,
    )
    model.next_run = number + 1
    if event.data["origin"] == "canary":
        begin_canary(state, model, event)


def _end_run(state: State, event: Event) -> None:
    """Forget the run whose lanes are given back, if they are of one."""
    lane = state.lanes[event.entities[0]]
    if lane.origin != "request" and lane.owner is not None:
        del state.models[lane.model].runs[lane.owner]


def _forget_runs(state: State, event: Event) -> None:
    """Forget the canaries that have no lane any more: what they ran in is unknown."""
    lanes = state.lanes
    runs = state.models[lanes[event.entities[0]].model].runs
    for run in list(runs.values()):
        held = any(lanes[n].owner == run.number and lanes[n].origin == "canary" for n in run.lanes)
        if run.origin == "canary" and not held:
            del runs[run.number]


def _bind(lanes: list[LaneState], event: Event) -> None:
    for lane, owner in zip(lanes, event.data["owners"], strict=True):
        lane.origin = event.data["origin"]
        lane.owner = owner
        lane.length_tokens = 0


def _reserve(lanes: list[LaneState], event: Event) -> None:
    job, by = event.data["job"], event.data["by"]
    growth = repeat(by, len(lanes)) if isinstance(by, int) else by
    for lane, tokens in zip(lanes, growth, strict=True):
        lane.job = job
        lane.reserved_tokens = lane.length_tokens + tokens
        lane.carried = lane.due
        lane.due = ()


def _commit(lanes: list[LaneState], event: Event) -> None:
    for lane in lanes:
        reached = lane.reserved_tokens
        lane.due = (KvOperation("COMMIT", lane.number, lane.length_tokens, reached, lane.job or 0),)
        lane.length_tokens = reached
        lane.reserved_tokens = 0
        lane.on_device = True
        lane.job = None
        lane.carried = ()


def _rollback(lanes: list[LaneState], event: Event) -> None:
    applied = event.data["applied"]
    for lane in lanes:
        lane.due = (kv_operation("ROLLBACK", lane),) if applied else lane.carried
        lane.on_device = lane.on_device or applied
        _end_reservation(lane)


def _clear(lanes: list[LaneState], event: Event) -> None:
    """Take lanes into the generation that a reset began."""
    _forget_owner(lanes, event)
    for lane in lanes:
        lane.generation = event.generation


def _end_reservation(lane: LaneState) -> None:
    lane.reserved_tokens = 0
    lane.job = None
    lane.carried = ()


def _forget_owner(lanes: list[LaneState], event: Event) -> None:
    for lane in lanes:
        lane.origin = ""
        lane.owner = None
        lane.length_tokens = 0
        lane.due = ()
        lane.on_device = False
        _end_reservation(lane)


_LANE_MOVES: dict[str, Callable[[list[LaneState], Event], None]] = {
    "bind": _bind,
    "reserve": _reserve,
    "commit": _commit,
    "rollback": _rollback,
    "evict": _forget_owner,
    "suspect": _forget_owner,
    "clear": _clear,
    "abandon": _forget_owner,
}
