"""``evolve``: what an event does to the state, and ``fold`` over recorded steps."""

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
    note = _NOTES.get(type(taken))
    if note is not None:
        note(state, taken)


def _start(state: State, taken: EngineStarted) -> None:
    state.limits = taken.limits
    state.closing = False
    state.coming_back.clear()


def _close(state: State, taken: CloseRequested) -> None:
    state.closing = True
    state.coming_back.clear()


def _stall(state: State, taken: JobStalled) -> None:
    if taken.job in state.jobs:
        state.jobs[taken.job].suspected = True


def _forbid_way_back(state: State, taken: UnloadRequested) -> None:
    for model in state.models.values():
        model.no_way_back = model.no_way_back or model.replaces == taken.model


def _probe(state: State, taken: HealthProbed) -> None:
    state.device.health_ns = state.now_ns


def _throttle(state: State, taken: ThrottleTold) -> None:
    state.device.throttled = taken.chips


def _doubt_status(state: State, taken: StatusDoubted) -> None:
    if taken.kind == "missed":
        after_ns = state.now_ns - HOUR_NS
        missed = tuple(one for one in state.device.missed_ns if one > after_ns)
        most = state.limits.missed_completions_max + 1
        state.device.missed_ns = (*missed, state.now_ns)[-most:]


def _read_counters(state: State, taken: CountersRead) -> None:
    device = state.device
    differs = bool(difference(state, taken))
    device.counter_differences = device.counter_differences + 1 if differs else 0


_NOTES: dict[type, Callable[[State, Any], None]] = {
    EngineStarted: _start,
    CloseRequested: _close,
    JobStalled: _stall,
    UnloadRequested: _forbid_way_back,
    HealthProbed: _probe,
    ThrottleTold: _throttle,
    StatusDoubted: _doubt_status,
    CountersRead: _read_counters,
}
"""By input what it declares of itself, whatever is decided."""


def evolve(state: State, event: Event, taken: Input) -> None:
    """Apply one event: check it against the declared table, move its entities, derive the rest.

    Raises: IllegalTransitionError when an entity is not where the event says, or the table has no
    such edge.
    """
    machine, source, trigger = event.machine, event.source, event.trigger
    check_source(state, machine, event.entities, source, trigger)
    if TABLES[machine].get((source, trigger)) != event.dest:
        name = entity_name(machine, event.entities[0])
        raise IllegalTransitionError(machine, source, trigger, name)
    EVOLVERS[machine](state, event, taken)


def check_source(
    state: State, machine: str, entities: tuple[int, ...], source: str, trigger: str
) -> None:
    """Check that all entities are in ``source``. Raises: IllegalTransitionError."""
    known = _NONE if machine == "device" else entities_of(state, machine)
    for number in entities:
        found = known[number].state if number in known else state_of(state, machine, number)
        if found != source:
            raise IllegalTransitionError(machine, found, trigger, entity_name(machine, number))


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

EVOLVERS: dict[str, Callable[[State, Event, Input], None]] = {
    "request": evolve_request,
    "job": evolve_job,
    "buffer": evolve_buffer,
    "lane": evolve_lane,
    "model": evolve_model,
    "device": _evolve_device,
}
"""By machine what moves the state by an event that was checked."""
