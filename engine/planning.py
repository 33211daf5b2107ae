"""Plan the next jobs: a plan is a value; it is validated, then it becomes events and one effect.

Who goes next is decided in queueing.py for requests, in trials.py for golden and warm-up, in
canaries.py for what runs of them while requests are served; plan.py holds the rules of every plan.
Source: R5.4, R6.2, G9.
"""

from typing import Any

from msgspec.structs import replace

from laneway.engine import decoding
from laneway.engine.canaries import choose_served
from laneway.engine.draft import Draft
from laneway.engine.effects import (
    KvOperation,
    SubmitJob,
    SubmitRow,
)
from laneway.engine.plan import Plan, inflight_ceiling, places_of, plan_data, validate
from laneway.engine.state import State, kv_operation
from laneway.engine.submit_rows import submit_job
from laneway.engine.trials import choose_trial


def plan(draft: Draft) -> None:
    """Plan jobs until the in-flight ceiling is reached or nothing is left to run."""
    while (chosen := choose(draft.state)) is not None:
        validate(draft.state, chosen)
        carry_out(draft, chosen)


def choose(state: State) -> Plan | None:
    """Return the next plan, or None when the device is to be given nothing now."""
    if len(state.jobs) >= state.limits.inflight_jobs_max:
        return None  # seen at once, since every decision asks
    if len(state.jobs) >= inflight_ceiling(state):
        return None
    if state.now_ns < state.device.backoff_until_ns:
        return None
    for model in state.models.values():
        chosen = None
        if model.state == "warming":
            chosen = choose_trial(state, model)
        elif model.state in ("ready", "draining"):
            chosen = choose_served(state, model)
        if chosen is not None:
            return chosen
    return None


def carry_out(draft: Draft, chosen: Plan) -> None:
    """Turn a validated plan into events and the one effect that submits it."""
    state = draft.state
    number = state.next_job
    if decoding.is_plain(state, chosen):
        operations = decoding.plan_decode(draft, chosen)
    else:
        operations = _move(draft, chosen)
    draft.ask(_submit_effect(state, chosen, number, operations))


def _move(draft: Draft, chosen: Plan) -> tuple[KvOperation, ...]:
    """Move lanes, buffer and job as a plan says; return what the device's bank is asked to do."""
    state = draft.state
    generation = state.models[chosen.model].generation
    number = state.next_job
    lanes = [row.lane for row in chosen.rows]
    _bind(draft, chosen, generation)
    held = [state.lanes[lane] for lane in lanes]
    due = [operation for lane in held for operation in lane.due]
    growth = [len(row.tokens) for row in chosen.rows]
    by = growth[0] if growth.count(growth[0]) == len(growth) else growth
    draft.emit("lane", lanes, "reserve", generation=generation, data={"job": number, "by": by})
    draft.emit("buffer", chosen.buffer, "acquire", generation=generation, data={"job": number})
    draft.emit("job", number, "plan", generation=generation, data=plan_data(chosen))
    return (*due, *(kv_operation("RESERVE", lane) for lane in held))


def _bind(draft: Draft, chosen: Plan, generation: int) -> None:
    """Give lanes to the owners that have none; a request is prefilling from here on."""
    if not chosen.bind:
        return
    lanes = [row.lane for row in chosen.rows]
    owners = [row.owner for row in chosen.rows]
    data: dict[str, Any] = {"origin": chosen.origin, "owners": owners}
    if chosen.trial is not None:
        data["trial"] = chosen.trial
    if chosen.pair:
        data["pair"] = True
    draft.emit("lane", lanes, "bind", generation=generation, data=data)
    if chosen.trial is None:
        draft.emit("request", owners, "prefill", generation=generation, data={"lanes": lanes})


def _named_by_trial(chosen: Plan) -> tuple[SubmitRow, ...]:
    """Return the rows of a run by what they run, which is what their results are held against."""
    assert chosen.trial is not None
    return tuple(replace(row, owner=chosen.trial) for row in chosen.rows)


def _submit_effect(
    state: State, chosen: Plan, number: int, operations: tuple[KvOperation, ...]
) -> SubmitJob:
    model = state.models[chosen.model]
    assert model.facts is not None
    submodel = model.facts.by_name[state.buffers[chosen.buffer].submodel]
    return submit_job(
        state,
        model=chosen.model,
        generation=model.generation,
        job=number,
        task=chosen.task,
        origin=chosen.origin,
        buffer=chosen.buffer,
        operations=operations,
        rows=_named_by_trial(chosen) if chosen.trial is not None else chosen.rows,
        places=places_of(model, submodel, [row.lane for row in chosen.rows]),
    )
