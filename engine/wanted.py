"""Is an effect still wanted when its turn comes.

Effects wait in the outbox while later inputs are decided. A job that was given up meanwhile,
because the device was lost, must not be submitted any more (I10, G4); nobody waits for its answer.
Everything else that was decided is carried out.
"""

from laneway.engine.effects import DeviceEffect, SubmitJob
from laneway.engine.state import State


def is_wanted(state: State, effect: DeviceEffect) -> bool:
    """Return whether an effect is to be carried out now."""
    return not isinstance(effect, SubmitJob) or effect.job in state.jobs
