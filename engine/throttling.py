"""What is different while the device is hot: less is admitted, jobs are given more time (row 25).

A device that is throttled is well, only slower: nothing is reset and nobody's request ends for it.
When it becomes unhealthy that is row 14's matter (health.py).
"""

from laneway.engine.state import State

SLOWER = 2
"""How much longer a job of a throttled device may take before a hang is suspected, and the part of
the queues that may be filled meanwhile."""


def patience(state: State) -> int:
    """Return by how much the times of the hang rule and of coming again are stretched (E16)."""
    return SLOWER if state.device.throttled else 1


def may_wait(state: State, most: int) -> int:
    """Return how much of a queue's bound may be filled now (R7.2)."""
    return max(1, most // SLOWER) if state.device.throttled else most
