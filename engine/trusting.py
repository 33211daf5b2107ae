"""How many jobs in flight the device is trusted with: down to one at an anomaly, and back to two.

Theory of operation. What is verified allows two (plan.py); what is seen may take one away (E11):
counters that differ twice (counting.py), a state that steps backwards or is told done too early,
results that again and again only a poll finds, an exception or a canary that differs while two jobs
overlapped. The device stays in service with one in flight. It is given two again when as many
canaries as ``needed_canaries`` says were equal since the last anomaly and then two golden runs in
flight at once were (canaries.py). A device whose counters are not believed is not: nothing could be
held against them (E14).
"""

from laneway.engine.draft import Draft
from laneway.engine.inputs import StatusDoubted
from laneway.engine.plan import full_ceiling
from laneway.engine.state import JobState, State
from laneway.statemachines import MACHINES

DOUBLINGS_MAX = 16
_RESTRICTABLE = frozenset(
    state for state, trigger in MACHINES["device"].table if trigger == "restrict"
)


def restrict(draft: Draft, reason: str) -> None:
    """Let the device have one job in flight from here on; said again, it begins anew.

    Nothing happens on a device that is given no jobs anyway.
    """
    if draft.state.device.state in _RESTRICTABLE:
        draft.device("restrict", data={"reason": reason})


def restrict_if_overlapped(draft: Draft, job: JobState, kind: str) -> None:
    """Narrow the device when a job ends badly that was not alone (E11)."""
    if job.overlapped:
        restrict(draft, f"job/{job.number} ended by {kind} while two jobs overlapped")


def relax(draft: Draft) -> None:
    """Let the device have as many jobs in flight as are verified."""
    draft.device("relax")


def doubt_status(draft: Draft, taken: StatusDoubted) -> None:
    """Narrow a device that contradicts itself about the state of a job (E11, row 10)."""
    device, limits = draft.state.device, draft.state.limits
    if taken.kind != "missed":
        said = f"shown {taken.shown} after {taken.before}"
        restrict(draft, f"job/{taken.job}, ticket {taken.ticket}, steps illegally: {said}")
    elif len(device.missed_ns) > limits.missed_completions_max:
        count = len(device.missed_ns)
        restrict(draft, f"{count} results in an hour were found by polls alone")


def needed_canaries(state: State) -> int:
    """Return how many canaries in a row must be equal before two in flight are tried again."""
    falls = state.device.ceiling_falls
    return state.limits.requalify_canaries << min(max(falls - 1, 0), DOUBLINGS_MAX)


def may_requalify(state: State) -> bool:
    """Return whether a device that fell to one in flight has earned its trial with two."""
    device = state.device
    return (
        bool(device.ceiling_reason)
        and device.good_canaries >= needed_canaries(state)
        and device.counters_trusted
        and device.state == "serving"
        and not state.closing
        and full_ceiling(state) > 1
    )
