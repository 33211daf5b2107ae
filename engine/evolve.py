"""``evolve``: the only function that changes the state, and ``fold`` over recorded steps."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from laneway.engine.errors import IllegalTransitionError, InternalError
from laneway.engine.evolve_buffers import evolve_buffer
from laneway.engine.evolve_canaries import evolve_ceiling
from laneway.engine.evolve_jobs import evolve_job
from laneway.engine.evolve_ladder import evolve_ladder
from laneway.engine.evolve_lanes import evolve_lane
from laneway.engine.evolve_models import evolve_model
from laneway.engine.evolve_requests import evolve_request
from laneway.engine.inputs import (
    CloseRequested,
    CountersRead,
    EngineStarted,
    HealthProbed,
    Input,
    JobStalled,
    StatusDoubted,
    ThrottleTold,
    UnloadRequested,
)
from laneway.engine.ledger import difference
from laneway.engine.limits import SECOND
from laneway.engine.ports import Step
from laneway.engine.state import DeviceState, State, entities_of, state_of
from laneway.statemachines import MACHINES, Event, entity_name

HOUR_NS = 3600 * SECOND


def fold(state: State, step: Step) -> None:
    """Apply one recorded step without deciding it again.

    Raises: InternalError when the step is not the next one, or does not follow.
    """
    if step.step != state.step + 1:
        raise InternalError(f"step {step.step} stands where step {state.step + 1} should")
    begin_step(state, step.taken, step.at_ns)
    for event in step.events:
        evolve(state, event, step.taken)


def begin_step(state: State, taken: Input, at_ns: int) -> None:
    """Take note of an input: step number, time, and what the input itself declares."""
    if at_ns < state.now_ns:
        raise InternalError(f"step {state.step + 1}: time fell from {state.now_ns} to {at_ns} ns")
    state.step += 1
    state.now_ns = at_ns
    if isinstance(taken, EngineStarted):
        state.limits = taken.limits
        state.closing = False
        state.coming_back.clear()
    elif isinstance(taken, CloseRequested):
        state.closing = True
        state.coming_back.clear()
    elif isinstance(taken, JobStalled) and taken.job in state.jobs:
        state.jobs[taken.job].suspected = True
    elif isinstance(taken, UnloadRequested):
        for model in state.models.values():
            model.no_way_back = model.no_way_back or model.replaces == taken.model
    elif isinstance(taken, HealthProbed):
        state.device.health_ns = at_ns
    elif isinstance(taken, ThrottleTold):
        state.device.throttled = taken.chips
    elif isinstance(taken, StatusDoubted) and taken.kind == "missed":
        after_ns = at_ns - HOUR_NS
        missed = tuple(one for one in state.device.missed_ns if one > after_ns)
        state.device.missed_ns = (*missed, at_ns)[-state.limits.missed_completions_max - 1 :]
    elif isinstance(taken, CountersRead):
        device = state.device
        differs = bool(difference(state, taken))
        device.counter_differences = device.counter_differences + 1 if differs else 0


def evolve(state: State, event: Event, taken: Input) -> None:
    """Apply one event: check it against the declared table, move its entities, derive the rest.

    Raises: IllegalTransitionError when an entity is not where the event says, or the table has no
    such edge.
    """
    machine, trigger = event.machine, event.trigger
    source = event.source
    known = _NONE if machine == "device" else entities_of(state, machine)
    for number in event.entities:
        found = known[number].state if number in known else state_of(state, machine, number)
        if found != source:
            raise IllegalTransitionError(machine, found, trigger, entity_name(machine, number))
    if TABLES[machine].get((source, trigger)) != event.dest:
        name = entity_name(machine, event.entities[0])
        raise IllegalTransitionError(machine, source, trigger, name)
    _EVOLVERS[machine](state, event, taken)


def _evolve_device(state: State, event: Event, taken: Input) -> None:
    device = state.device
    device.state = event.dest
    if event.trigger == "distrust":
        device.counters_trusted = False
        return
    if event.trigger in ("restrict", "relax"):
        evolve_ceiling(state, event)
        return
    device.reason = event.data.get("reason", "")
    evolve_ladder(state, event, taken)
    if event.trigger == "lose":
        device.lost_rung = event.data["rung"]
        for model in state.models.values():
            model.releasing = model.rereading = False  # nobody will answer any more
            model.reread_ns = 0
    if event.trigger == "open":
        assert isinstance(taken, EngineStarted)
        state.device = DeviceState(
            state=event.dest,
            incarnation=event.data["incarnation"],
            epoch=event.epoch,
            facts=taken.device,
            health_ns=state.now_ns,
            device_epoch=taken.device.device_epoch,
        )
        state.next_epoch = event.epoch + 1


_NONE: Mapping[int, Any] = MappingProxyType({})
TABLES: Mapping[str, Mapping[tuple[str, str], str]] = {
    name: dict(machine.table) for name, machine in MACHINES.items()
}
"""By machine: where a trigger leads from a state."""

_EVOLVERS: dict[str, Callable[[State, Event, Input], None]] = {
    "request": evolve_request,
    "job": evolve_job,
    "buffer": evolve_buffer,
    "lane": evolve_lane,
    "model": evolve_model,
    "device": _evolve_device,
}
