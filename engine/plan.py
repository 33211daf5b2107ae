"""A plan: one job to be, as a value, and the rules that every plan must obey, whoever made it."""

from collections.abc import Iterable
from typing import Any

import msgspec

from laneway.engine.capability import batch_max, chunked_prefill, inflight_max, lane_rule
from laneway.engine.effects import SubmitRow
from laneway.engine.errors import InternalError
from laneway.engine.inputs import ArtifactValidated, SubmodelFacts
from laneway.engine.state import ModelState, State

USABLE = ("serving", "degraded", "draining")


class Plan(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One job to be: task, buffer, rows in the order of their lanes.

    Owners of rows are requests, or runs of trials. ``bind``: lanes are given to them by this job.
    ``trial`` is the trial that a job of another origin than a request runs; ``pair``: as one of two
    runs that are to be in flight at once.
    """

    task: str
    origin: str
    model: int
    buffer: int
    rows: tuple[SubmitRow, ...]
    bind: bool = False
    trial: int | None = None
    pair: bool = False


def plan_data(chosen: Plan) -> dict[str, Any]:
    """Return what the event of a job's plan says of it."""
    return {
        "task": chosen.task,
        "origin": chosen.origin,
        "model": chosen.model,
        "buffer": chosen.buffer,
        "owners": [row.owner for row in chosen.rows],
    }


def inflight_ceiling(state: State) -> int:
    """Return how many jobs may be in flight now.

    What ``full_ceiling`` says; 1 on a degraded device and on one that fell to it, except for the
    two golden runs that are to show whether it may have two again (R5.3, E11, E14, G12, G19).
    """
    if state.device.state == "recovering":
        return 1  # golden and warm-up of what was configured anew
    if state.device.facts is None or state.device.state not in USABLE:
        return 0
    if state.device.state == "degraded":
        return 1
    if state.device.ceiling_reason and not _only_pair_flies(state):
        return 1
    return full_ceiling(state)


def _only_pair_flies(state: State) -> bool:
    """Return whether two golden runs are under way to be in flight at once, and nothing else is."""
    pairs = {(model.number, run) for model in state.models.values() for run in model.canary.pairing}
    return bool(pairs) and all(
        job.origin == "canary" and (job.model, job.rows[0].owner) in pairs
        for job in state.jobs.values()
    )


def full_ceiling(state: State) -> int:
    """Return how many jobs may be in flight by policy and by what is verified (R5.3, E11, G19)."""
    facts = state.device.facts
    assert facts is not None
    most = min(state.limits.inflight_jobs_max, facts.inflight_max)
    if most > 1:
        for model in state.models.values():
            if model.facts is not None:
                most = min(most, inflight_max(facts, model.facts.sha256))
    return most


def takes_rows(state: State, facts: ArtifactValidated, submodel: SubmodelFacts, rows: int) -> bool:
    """Return whether a job of so many rows may run on a submodel.

    As many as are verified; where nothing certain is said of inactive rows, only a full batch may
    (R6.1, R1.2, E15).
    """
    device = state.device.facts
    if device is None or not 1 <= rows <= batch_max(device, facts.sha256, submodel.batch_max):
        return False
    whole = rows == submodel.batch_max
    return whole or lane_rule(device, facts.sha256, facts.lane_rule) != "undefined"


def block_of(model: ModelState, submodel: SubmodelFacts, lane: int) -> int:
    """Return the block of lanes that a lane shares jobs with: one if rows are free (E15)."""
    return (lane - model.lane_first) // submodel.batch_max if submodel.fixed_rows else 0


def places_of(model: ModelState, submodel: SubmodelFacts, lanes: Iterable[int]) -> tuple[int, ...]:
    """Return the rows that lanes have in a batch; empty where rows are not fixed to lanes (E15)."""
    if not submodel.fixed_rows:
        return ()
    return tuple((lane - model.lane_first) % submodel.batch_max for lane in lanes)


def may_split(state: State, model: ModelState) -> bool:
    """Return whether prompts of a model may be run in parts (R5.5, E13)."""
    device, facts = state.device.facts, model.facts
    return (
        device is not None
        and facts is not None
        and chunked_prefill(device, facts.sha256)
        and all(size.incremental for size in facts.submodels if size.task == "prefill")
    )


def validate(state: State, chosen: Plan) -> None:
    """Hold a plan against the rules every plan must obey, whoever made it.

    One task; distinct lanes, each in no other job and owned by its sequence; room in the lane; the
    number of rows and tokens that the submodel takes; lanes that may share its job where rows are
    fixed; a free buffer of this generation; the ceiling.

    Raises: InternalError naming the rule. Source: R2.1, R5.5, R6.1, R7.3, E11, E12, E15, I6.
    """
    model = state.models[chosen.model]
    facts = model.facts
    buffer = state.buffers[chosen.buffer]
    assert facts is not None
    submodel = facts.by_name[buffer.submodel]
    lanes = [row.lane for row in chosen.rows]
    owners = {row.owner for row in chosen.rows}
    count = len(lanes)
    key = (buffer.model, buffer.epoch, buffer.generation, buffer.task)
    mine = (model.number, state.device.epoch, model.generation, chosen.task)
    rule = ""
    if len(state.jobs) >= inflight_ceiling(state):
        rule = "E11: in-flight ceiling"
    elif len(set(lanes)) < count:
        rule = "E12: distinct lanes"
    elif len(owners) < count and chosen.trial is None:
        rule = "E12: distinct sequences"
    elif not takes_rows(state, facts, submodel, count):
        rule = "E15, R6.1: rows of the submodel"
    elif not _share_block(model, submodel, lanes):
        rule = "E15: rows that are fixed to lanes"
    elif buffer.state != "free" or key != mine:
        rule = "E1, E2: a free buffer of the task"
    rule = rule or _broken_rule(state, chosen, facts, submodel)
    if rule:
        raise InternalError(f"step {state.step}: plan breaks {rule}: {chosen}")


def _share_block(model: ModelState, submodel: SubmodelFacts, lanes: list[int]) -> bool:
    """Return whether lanes may be in one job of a submodel."""
    return not submodel.fixed_rows or len({block_of(model, submodel, n) for n in lanes}) == 1


def _broken_rule(
    state: State, chosen: Plan, facts: ArtifactValidated, submodel: SubmodelFacts
) -> str:
    """Return the first rule that a row of a plan breaks, or ""."""
    lanes, model, origin = state.lanes, chosen.model, chosen.origin
    tokens_max, context_tokens = submodel.tokens_max, facts.context_tokens
    bind = chosen.bind
    in_parts = chosen.task == "decode" or submodel.incremental
    for row in chosen.rows:
        lane, start, count = lanes[row.lane], row.start, len(row.tokens)
        if lane.model != model:
            return "E15: lane of the model"
        if lane.state != ("empty" if bind else "ready"):
            return "E12, E15: lane state"
        if (lane.owner != row.owner or lane.origin != origin) and not bind:
            return "E15: lane owner"
        if start != lane.length_tokens:
            return "R7.3: length before"
        if not 1 <= count <= tokens_max:
            return "R2.1: tokens of the task"
        if not in_parts and start:
            return "R5.5: a split prompt"
        if start + count > context_tokens:
            return "E18: room in the lane"
    return ""
