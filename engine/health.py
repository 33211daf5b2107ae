"""Ask the device for its health under load, and judge what it says (E29, E16; rows 14 to 16)."""

from laneway.engine.draft import Draft
from laneway.engine.effects import ProbeHealth
from laneway.engine.inputs import HealthFacts, HealthProbed
from laneway.engine.ladder import DEVICE, GONE, PROCESS, RUNG_OF_ADVICE
from laneway.engine.plan import USABLE
from laneway.engine.recovering import WELL, begin, give_up, watch_unwell
from laneway.statemachines import MACHINES

_JOB_FINAL = MACHINES["job"].final


def ask_if_due(draft: Draft) -> None:
    """Ask for the health when a job ended in this step and the last answer is old."""
    state = draft.state
    if state.now_ns - state.device.health_ns < state.limits.health_every_ns:
        return
    if state.device.state not in USABLE:
        return
    if any(event.machine == "job" and event.dest in _JOB_FINAL for event in draft.events):
        draft.ask(ProbeHealth())


def probed(draft: Draft, taken: HealthProbed) -> None:
    """Believe a probe that says the device is unwell.

    One that says it is well ends a watch, and buys time in a suspected hang (E16).
    """
    state = draft.state
    if state.device.state not in (*USABLE, "suspect"):
        return
    health, recovery = taken.health, state.ladder.recovery
    if recovery is not None and not recovery.watching:
        return  # its reset will ask again
    if health is None:
        give_up(draft, f"no answer to a health probe: {taken.reason}", PROCESS)
    elif health.state in GONE:
        give_up(draft, f"a health probe says {health.state}", PROCESS)
    elif health.sticky:
        reason = f"every submit fails with {health.sticky:#06x}"
        begin(draft, "sticky error (row 15)", DEVICE, reason, code=health.sticky)
    elif health.state in WELL:
        if recovery is not None and not recovery.until_ns:
            absolve_device(draft, "it is well again")
    else:
        _judge_unwell(draft, health)


def _judge_unwell(draft: Draft, health: HealthFacts) -> None:
    """Reset what the device advises; without advice only once the time to become well is over."""
    recovery = draft.state.ladder.recovery
    rung = RUNG_OF_ADVICE.get(health.advised, DEVICE)
    if health.advised > max(RUNG_OF_ADVICE):
        give_up(draft, f"the device advises {health.advised}: a matter of its operator", PROCESS)
    elif health.advised or (recovery is not None and not recovery.until_ns):
        reason = f"a health probe says {health.state}, advised {health.advised}"
        begin(draft, "device unwell (row 14)", rung, reason)
    elif recovery is None:
        watch_unwell(draft, health, rung)


def absolve_device(draft: Draft, reason: str) -> None:
    """Let a suspect device go on as what it was."""
    draft.device("absolve", data={"why": reason})
    if draft.state.closing:
        draft.device("drain")
