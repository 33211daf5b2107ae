"""Close the engine: drain or cancel, unload, close the device (R14.6, D13)."""

from laneway.engine.draft import Draft
from laneway.engine.effects import CloseDevice
from laneway.engine.ending import cancel_request
from laneway.engine.inputs import CloseRequested, DeviceClosed
from laneway.engine.state import State, is_homeless
from laneway.engine.unloading import drain, unload_if_idle


def close(draft: Draft, taken: CloseRequested) -> None:
    """Stop admission; without ``drain`` also end every live request now.

    What is in flight ends by itself. A request that a restart left without its model stays open,
    for the next restart (G21).
    """
    if draft.state.device.state in ("serving", "degraded"):
        draft.device("drain")
    if not taken.drain:
        for request in list(draft.state.requests.values()):
            if not is_homeless(draft.state, request):
                cancel_request(draft, request)


def shut_if_idle(draft: Draft) -> None:
    """Close the device once the engine closes and nothing is left on it.

    Models without requests are drained first. A lost device is closed without touching it (D13);
    its failed models stay failed, since nobody can verify them clean.
    """
    state = draft.state
    if not state.closing:
        return
    lost = state.device.state == "lost"
    if not lost:
        served = any(not is_homeless(state, one) for one in state.requests.values())
        if state.device.state != "draining" or served or state.jobs or _has_runs(state):
            return
        for number in sorted(state.models):
            drain(draft, number)
        unload_if_idle(draft)
        if any(m.state != "failed" or m.releasing for m in state.models.values()):
            return
    draft.device("shut", data={"reason": state.device.reason})
    draft.ask(CloseDevice(abandon=lost))


def _has_runs(state: State) -> bool:
    """Return whether golden runs of a model that serves are not over, or one has yet to decide."""
    return any(
        model.canary.examining or (model.runs and model.state in ("ready", "draining"))
        for model in state.models.values()
    )


def closed(draft: Draft, taken: DeviceClosed) -> None:
    """Record that the device handle is gone: this incarnation has ended."""
    if draft.state.device.state == "closing":
        draft.device("close", data={"abandoned": taken.abandoned})
