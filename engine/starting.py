"""Open an incarnation.

End what was bound to the process that is gone (G21), then open the device.
"""

from laneway.engine.draft import Draft
from laneway.engine.errors import InternalError
from laneway.engine.inputs import EngineStarted
from laneway.engine.state import DEVICE


def start(draft: Draft, taken: EngineStarted) -> None:
    """Fence the tail of the last incarnation and open the device under a new epoch.

    Raises: InternalError if requests without an ending are left; the shell refuses such a journal
    first. Source: G21, decision 9.
    """
    state = draft.state
    if state.requests:
        raise InternalError(f"{len(state.requests)} requests of an earlier incarnation are open")
    if state.jobs:
        draft.emit_each("job", sorted(state.jobs), "abandon")
    held = [n for n, b in sorted(state.buffers.items()) if b.state not in ("free", "quarantined")]
    if held:
        draft.emit_each("buffer", held, "abandon")
    bound = [n for n, lane in sorted(state.lanes.items()) if lane.state in ("ready", "reserved")]
    if bound:
        draft.emit_each("lane", bound, "abandon")
    for number in sorted(state.models):
        model = state.models[number]
        if model.state != "failed":
            draft.emit("model", number, "abandon", generation=model.generation)
        draft.emit("model", number, "clean", generation=model.generation)
    if state.device.state != "closed":
        draft.device("abandon")
    draft.emit(
        "device",
        DEVICE,
        "open",
        epoch=state.next_epoch,
        data={"incarnation": state.device.incarnation + 1},
    )
