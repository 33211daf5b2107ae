"""When the engine wants to be woken if nothing else happens."""

from laneway.engine.plan import inflight_ceiling
from laneway.engine.state import State


def next_wake_ns(state: State) -> int | None:
    """Return the engine time of the next deadline, end of a back-off or reading, or None."""
    wakes = [state.deadlines[0][0]] if state.deadlines else []
    wakes += [model.reread_ns for model in state.models.values() if model.reread_ns]
    backoff_ns = state.device.backoff_until_ns
    if backoff_ns > state.now_ns and len(state.jobs) < inflight_ceiling(state):
        wakes.append(backoff_ns)
    return min(wakes, default=None)
