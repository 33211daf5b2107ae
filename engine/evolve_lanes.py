"""What an event of a lane changes: owner, length, reservation, and what is due on the device."""

from collections.abc import Callable

from laneway.engine.inputs import Input
from laneway.engine.state import LaneState, State, kv_operation
from laneway.statemachines import Event


def evolve_lane(state: State, event: Event, taken: Input) -> None:
    """Move lanes; ``data`` says for each entity what the move is about."""
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
