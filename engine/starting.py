"""Open an incarnation.

End what was bound to the process that is gone (G21), then open the device.
"""

from laneway.engine.draft import Draft
from laneway.engine.inputs import EngineStarted
from laneway.engine.state import DEVICE


def start(draft: Draft, taken: EngineStarted) -> None:
    """Fence the tail of the last incarnation and open the device under a new epoch.

    Requests without an ending are kept; they go on when a model of their artifact is ready
    (resuming.py). The shell refuses a journal with such requests unless it is told to resume.
    Source: G21, decision 9.
    """
    state = draft.state
    if state.jobs:
        draft.emit_each("job", sorted(state.jobs), "abandon")
    live = [n for n, one in sorted(state.requests.items()) if one.state != "suspended"]
    if live:
        draft.emit_each("request", live, "abandon")
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
