"""The suite ``dispatch``.

A table step read from the declaration against ``model.trigger()`` of `transitions` (K6).
"""

from collections.abc import Callable, Iterator
from itertools import cycle

import numpy as np

from laneway.adapters.measuring import Figure, interleave, times_faster
from laneway.statemachines import MACHINES
from laneway.statemachines.declare import build_transitions_machine

BATCH = 256
ROUND_TRIP = ("acquire", "submit", "run", "complete", "release")
"""One life of a buffer, so that contenders come back to where they began."""


class _Model:
    state: str


def run(tell: Callable[[str], None] = lambda text: None) -> Iterator[Figure]:
    """Measure one step, then a batch of steps, each against firing the trigger on a model."""
    tell("dispatch")
    machine = MACHINES["buffer"]
    judge = build_transitions_machine(machine.initial, tuple(machine.states), machine.edges)
    model = _Model()
    judge.add_model(model, initial=machine.initial)
    triggers = [getattr(model, name) for name in ROUND_TRIP]

    def fire() -> None:
        for trigger in triggers:
            trigger()

    table = machine.table

    def step() -> str:
        state = "free"
        for name in ROUND_TRIP:
            state = table[state, name]
        return state

    dense = np.array(machine.dense, np.int8)
    states = np.zeros(BATCH, np.int8)
    columns = [np.full(BATCH, machine.triggers.index(name), np.intp) for name in ROUND_TRIP]
    turns = cycle(columns)

    def batch() -> None:
        states[:] = dense[states, next(turns)]

    took = interleave({"fire": fire, "step": step, "batch": batch})
    fired = took["fire"] / len(ROUND_TRIP) * 1000
    baseline = "model.trigger()"
    yield times_faster(
        "K6", took["step"] / len(ROUND_TRIP) * 1000, "ns/step", baseline, fired, limit=100
    )
    yield times_faster(
        "K6/batch", took["batch"] / BATCH * 1000, "ns/step", baseline, fired, limit=1000
    )
