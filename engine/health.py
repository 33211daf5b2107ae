"""Ask the device for its health under load, and judge what it says (E29, E16; rows 14 to 16)."""

from laneway.engine.draft import Draft
from laneway.engine.effects import ProbeHealth
from laneway.engine.faulting import let_go_on, was_reset_by_another
from laneway.engine.inputs import HealthFacts, HealthProbed
from laneway.engine.ladder import DEVICE, FOREIGN_RESET, GONE, PROCESS, RUNG_OF_ADVICE, Recovery
from laneway.engine.plan import USABLE
from laneway.engine.recovering import WELL, begin, escalate, give_up, watch_unwell
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
    elif was_reset_by_another(state, health):
        reason = f"the device is in epoch {health.device_epoch}, not {state.device.device_epoch}"
        begin(draft, FOREIGN_RESET, DEVICE, reason)
    elif health.sticky:
        reason = f"every submit fails with {health.sticky:#06x}"
        begin(draft, "sticky error (row 15)", DEVICE, reason, code=health.sticky)
    elif health.state in WELL:
        if recovery is not None and not recovery.until_ns:
            _end_watch(draft, recovery)
    else:
        _judge_unwell(draft, health)


def _end_watch(draft: Draft, recovery: Recovery) -> None:
    """Let a device that is well again go on, unless a job of it is suspected: then look again."""
    state = draft.state
    if any(job.suspected for job in state.jobs.values()):
        until_ns = state.now_ns + state.limits.unhealthy_grace_ns
        reason = "it is well again, but a job is suspected"
        escalate(draft, recovery.cause, recovery.rung, reason, until_ns=until_ns, watching=True)
    else:
        let_go_on(draft, {"why": "it is well again"})


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
