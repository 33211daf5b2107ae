"""Compare the engine's account of its jobs with the device's counters (E14, row 21).

At every point where nothing is left to do, and every so many jobs. One difference may be a reading
between two moments; one that survives the next comparison makes the counters untrusted and the
in-flight ceiling 1. Service goes on: counters never free anything.
"""

from laneway.engine.draft import Draft
from laneway.engine.effects import ReadCounters
from laneway.engine.inputs import CountersRead
from laneway.engine.ledger import check_ledger, counts, difference
from laneway.engine.plan import USABLE
from laneway.engine.state import State
from laneway.engine.trusting import restrict
from laneway.statemachines import MACHINES

JOBS_BETWEEN_READINGS = 1000
DIFFERENCES_MAX = 1
_JOB_FINAL = MACHINES["job"].final


def ask_if_due(draft: Draft) -> None:
    """Ask for the counters when a job ended in this step and it is time to compare."""
    state = draft.state
    if (
        not _has_ended_job(draft)
        or state.device.state not in USABLE
        or not state.device.counters_trusted
    ):
        return
    ledger = state.device.ledger
    ended = ledger.finished + ledger.failed + ledger.aborted
    if _is_idle(state) or ended % JOBS_BETWEEN_READINGS == 0:
        draft.ask(ReadCounters(asked=counts(state)))


def _has_ended_job(draft: Draft) -> bool:
    for event in draft.events:
        if event.machine == "job" and event.dest in _JOB_FINAL:
            return True
    return False


def _is_idle(state: State) -> bool:
    trials = any(model.state == "warming" or model.runs for model in state.models.values())
    return not (state.jobs or state.requests or trials)


def compare(draft: Draft, taken: CountersRead) -> None:
    """Stop to trust the counters when they differ twice in a row.

    Raises: InternalError when the engine's own account does not add up.
    """
    state = draft.state
    check_ledger(state)
    device = state.device
    if not device.counters_trusted or device.state not in USABLE:
        return
    if device.counter_differences > DIFFERENCES_MAX:
        differs = difference(state, taken)
        draft.device("distrust", data={"counters": differs})
        restrict(draft, f"the counters of the device are wrong: {differs}")
