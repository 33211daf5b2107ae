"""Is an effect still wanted when its turn comes.

Effects wait in the outbox while later inputs are decided. A job that was given up meanwhile,
because its generation is gone, must not be submitted any more (I10, G4); nobody waits for its
answer. One that was planned before the device became suspect is withdrawn, which is its answer
(G2). Everything else that was decided is carried out.
"""

from laneway.engine.effects import DeviceEffect, SubmitJob
from laneway.engine.plan import inflight_ceiling
from laneway.engine.state import State


def is_wanted(state: State, effect: DeviceEffect) -> bool:
    """Return whether an effect is to be carried out now."""
    if not isinstance(effect, SubmitJob):
        return True
    return effect.job in state.jobs and inflight_ceiling(state) > 0


def withdrawn_job(state: State, effect: DeviceEffect) -> int | None:
    """Return the job that an effect which is not carried out takes back with it, or None (G2)."""
    return effect.job if isinstance(effect, SubmitJob) and effect.job in state.jobs else None
