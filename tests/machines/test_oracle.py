"""The compiled tables against real `transitions` models: every machine, state and trigger."""

from functools import cache

import pytest
from transitions import Machine as TransitionsMachine
from transitions import MachineError

from laneway.statemachines import MACHINES, Machine, next_state
from laneway.statemachines.declare import build_transitions_machine


class Model:
    """Bears the state that a real `transitions` machine moves."""

    state: str


@cache
def judge_of(name: str) -> TransitionsMachine:
    """Return the real machine behind a declaration."""
    machine = MACHINES[name]
    return build_transitions_machine(machine.initial, tuple(machine.states), machine.edges)


def fire(machine: Machine, state: str, trigger: str) -> str | None:
    """Return where a real model ends up, or None where `transitions` refuses."""
    judge = judge_of(machine.name)
    model = Model()
    judge.add_model(model, initial=state)
    try:
        getattr(model, trigger)()
    except MachineError:
        assert model.state == state
        return None
    finally:
        judge.remove_model(model)
    return model.state


@pytest.mark.parametrize("name", MACHINES)
def test_table_does_what_transitions_does(name: str) -> None:
    machine = MACHINES[name]
    states = list(machine.states)
    for state in states:
        for trigger in machine.triggers:
            expected = fire(machine, state, trigger)
            assert next_state(name, state, trigger) == expected, (state, trigger)
            dense = machine.dense[states.index(state)][machine.triggers.index(trigger)]
            assert (states[dense] if dense >= 0 else None) == expected, (state, trigger)


def test_the_oracle_sees_a_wrong_table() -> None:
    machine = MACHINES["lane"]
    wrong = {**machine.table, ("empty", "commit"): "ready"}
    assert wrong["empty", "commit"] != fire(machine, "empty", "commit")
