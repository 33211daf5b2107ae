"""The engine's own account of its jobs, and how it compares with the device's counters (E14).

The account is folded from the jobs' events, by what the device said of each. The device's counters
may have begun anywhere, and may count for the process or for the board: what is compared is what
they grew by since the device was opened. They are read between submits, so what was submitted
before is known for certain; jobs that were in flight may have ended on the device before their
answer was taken, and are allowed for. Counters never free anything.
"""

from collections.abc import Mapping

from laneway.engine.errors import InternalError
from laneway.engine.inputs import CountersRead
from laneway.engine.state import State

NAMES = ("submitted", "finished", "failed", "aborted")
_PARTS = ("pending", "running", "finished", "failed", "aborted")


def counts(state: State) -> tuple[int, ...]:
    """Return the own account in the order of NAMES."""
    ledger = state.device.ledger
    return tuple(getattr(ledger, name) for name in NAMES)


def difference(state: State, taken: CountersRead) -> str:
    """Return how the device's counters differ from the own account, or "" if they do not.

    What the device does not tell is not compared.
    """
    told = dict(taken.counters)
    facts = state.device.facts
    base = dict(facts.counters) if facts is not None else {}
    in_flight = _in_flight(state)
    for name, asked, now in zip(NAMES, taken.asked, counts(state), strict=True):
        if name not in told or name not in base:
            continue
        grown = told[name] - base[name]
        most = now if name == "submitted" else now + in_flight
        if not asked <= grown <= most:
            return f"{name} grew by {grown}, the engine counts {asked} to {most}"
    return _own_difference(told)


def parts_difference(told: Mapping[str, int]) -> str:
    """Return how the submitted jobs differ from their parts, or ""; "" too if not all are told."""
    if "submitted" in told and all(name in told for name in _PARTS):
        parts = sum(told[name] for name in _PARTS)
        if told["submitted"] != parts:
            return f"submitted is {told['submitted']}, its parts add up to {parts}"
    return ""


def _own_difference(told: Mapping[str, int]) -> str:
    """Return how the device's counters contradict each other, or ""."""
    if difference := parts_difference(told):
        return difference
    if all(name in told for name in ("left", "pending", "running")):
        parts = told["pending"] + told["running"]
        if told["left"] != parts:
            return f"left is {told['left']}, pending and running are {parts}"
    return ""


def check_ledger(state: State) -> None:
    """Hold the own account against the jobs that live.

    Raises: InternalError when it does not add up, which is a bug of the engine and not the device's
    doing (E14).
    """
    ledger = state.device.ledger
    ended = ledger.finished + ledger.failed + ledger.aborted + ledger.given_up
    in_flight = _in_flight(state)
    if ledger.submitted != ended + in_flight:
        raise InternalError(
            f"E14, step {state.step}: {ledger.submitted} jobs were submitted, {ended} have ended"
            f" and {in_flight} are in flight"
        )


def _in_flight(state: State) -> int:
    return sum(job.state != "planned" for job in state.jobs.values())
