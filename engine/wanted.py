"""Is an effect still wanted when its turn comes.

Effects wait in the outbox while later inputs are decided. A job that was given up meanwhile,
because its generation is gone, must not be submitted any more (I10, G4); nobody waits for its
answer. One that was planned before the device became suspect is withdrawn, which is its answer
(G2). Everything else that was decided is carried out, but what clients are told waits while a
generation is examined (E11): a token that was decided just before must not reach anybody until it
is known whether it is believed. If it is not, it is dropped, and the ending does not count it.
"""

from laneway.engine.effects import ClientEffect, Deliver, DeviceEffect, SubmitJob
from laneway.engine.evolve_canaries import SERVED
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


def is_held_back(state: State, model: int | None) -> bool:
    """Return whether clients of a model are to be told nothing now."""
    found = state.models.get(model or 0)
    return found is not None and found.canary.examining


def is_believed(state: State, effect: ClientEffect, model: int | None) -> bool:
    """Return whether what was held back may be told, now that the examination is over.

    A token may if its model still serves, or its request lives on.
    """
    if not isinstance(effect, Deliver):
        return True
    found = state.models.get(model or 0)
    served = found is not None and found.state in SERVED
    return served or effect.request in state.requests
