"""What an event of a model changes: the model, its lanes and its buffers."""

from laneway.engine.effects import BufferPlan
from laneway.engine.errors import InternalError
from laneway.engine.evolve_canaries import evolve_proof
from laneway.engine.inputs import ArtifactValidated, Input, ModelConfigured
from laneway.engine.proven import forget_proven, remember_proven
from laneway.engine.state import BufferState, LaneState, ModelState, State
from laneway.statemachines import Event


def evolve_model(state: State, event: Event, taken: Input) -> None:
    """Move a model; lanes and buffers come and go with it."""
    (number,) = event.entities
    if event.trigger == "load":
        if number != state.next_model:
            raise InternalError(f"model/{number} was asked for, model/{state.next_model} was next")
        state.next_model = number + 1
        state.models[number] = ModelState(
            number=number,
            state=event.dest,
            alias=event.data["alias"],
            source=event.data["source"],
            replaces=event.data.get("replaces", 0),
            must_be=event.data.get("sha256", ""),
            waiting=event.data.get("waits", False),
        )
        state.coming_back.pop(event.data.get("instead_of", 0), None)
        return
    model = state.models[number]
    model.state = event.dest
    model.reason = event.data.get("reason", model.reason)
    model.releasing = event.data.get("release", False)
    model.reread_ns = event.data.get("reread_ns", 0)
    model.rereading = event.trigger == "reread"
    evolve_proof(state, model, event)
    if event.trigger == "accept":
        _accept(state, model, event, taken)
    elif event.trigger in ("degrade", "stand_down"):
        _degrade(model, event)
    elif event.trigger == "reconfigure":
        model.generation = event.generation
        state.next_generation = event.generation + 1
    elif event.trigger == "configure":
        _configure(state, model, event, taken)
    elif event.trigger == "drain":
        model.drain_again = False
    elif event.trigger == "retry":
        model.configure_failures += 1
        model.waiting = event.data.get("waits", False)
    elif event.trigger == "vet":
        model.vetted = model.waiting = True
    elif event.trigger == "revalidate":
        model.waiting = False
    elif event.trigger == "publish":
        state.aliases[model.alias] = number
        model.served = True
        remember_proven(state, model)
    elif event.dest == "unloaded":
        _remove_model(state, number)
    if "loads_back" in event.data:
        state.coming_back[number] = model.alias
    if event.data.get("disproven"):
        forget_proven(state, model)
    if model.state != "ready" and state.aliases.get(model.alias) == number:
        del state.aliases[model.alias]


def _accept(state: State, model: ModelState, event: Event, taken: Input) -> None:
    assert isinstance(taken, ArtifactValidated)
    model.facts = taken
    model.generation = event.generation
    model.lane_first, model.lane_count = event.data["lanes"]
    model.buffers = tuple(
        BufferPlan(submodel=submodel, task=task, first=first, count=count)
        for submodel, task, first, count in event.data["buffers"]
    )
    state.next_generation = event.generation + 1
    state.next_lane = model.lane_first + model.lane_count
    state.next_buffer = model.buffers[-1].first + model.buffers[-1].count


def _degrade(model: ModelState, event: Event) -> None:
    """Forget what was bound to the generation that ended; its lanes and buffers stay declared."""
    model.drain_again = model.drain_again or event.source == "draining"
    model.runs.clear()
    model.next_run = 0


def _configure(state: State, model: ModelState, event: Event, taken: Input) -> None:
    """Bring lanes and buffers into being; after a reset they exist and were moved by events."""
    assert isinstance(taken, ModelConfigured)
    if model.lane_first in state.lanes:
        return
    model.used_bytes_before = taken.used_bytes_before
    for number in range(model.lane_first, model.lane_first + model.lane_count):
        state.lanes[number] = LaneState(number, "empty", model.number, event.generation)
    model.empty_lanes = list(range(model.lane_first, model.lane_first + model.lane_count))
    for plan in model.buffers:
        model.free_buffers[plan.submodel] = list(range(plan.first, plan.first + plan.count))
        for number in range(plan.first, plan.first + plan.count):
            state.buffers[number] = BufferState(
                number=number,
                state="free",
                model=model.number,
                epoch=event.epoch,
                generation=event.generation,
                submodel=plan.submodel,
                task=plan.task,
            )


def _remove_model(state: State, number: int) -> None:
    del state.models[number]
    for table in (state.lanes, state.buffers):
        for owned in [n for n, entity in table.items() if entity.model == number]:
            del table[owned]
