"""When the engine wants to be woken if nothing else happens."""

from laneway.engine.canaries import due_ns
from laneway.engine.plan import inflight_ceiling
from laneway.engine.state import State


def next_wake_ns(state: State) -> int | None:
    """Return the engine time of the next deadline, end of a back-off, reading, canary, or None."""
    wake_ns = state.deadlines[0][0] if state.deadlines else None
    for model in state.models.values():
        if model.reread_ns:
            wake_ns = _sooner(wake_ns, model.reread_ns)
    for job in state.jobs.values():
        if job.recall_until_ns:
            wake_ns = _sooner(wake_ns, job.recall_until_ns)
    recovery = state.ladder.recovery
    if recovery is not None and recovery.until_ns and state.device.state == "suspect":
        wake_ns = _sooner(wake_ns, recovery.until_ns)
    backoff_ns = state.device.backoff_until_ns
    if backoff_ns > state.now_ns and len(state.jobs) < inflight_ceiling(state):
        wake_ns = _sooner(wake_ns, backoff_ns)
    if not state.jobs and state.device.state in ("serving", "degraded"):
        for model in state.models.values():
            at_ns = due_ns(state, model)
            if at_ns is not None and at_ns > state.now_ns:
                wake_ns = _sooner(wake_ns, at_ns)
    return wake_ns


def _sooner(wake_ns: int | None, other_ns: int) -> int:
    return other_ns if wake_ns is None else min(wake_ns, other_ns)
