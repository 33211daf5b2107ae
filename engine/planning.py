"""Choose the next job (R5.4, R6.2, G9).

A plan is a value; it is validated, then it becomes events and one effect.

Two classes take turns whenever both have work: prefill (requests whose submit was refused once,
then the waiting, first come first served) and decode (live sequences, round robin). So neither
starves: with in-flight 1 a decoding sequence waits at most one prefill for every decode, and a
waiting prompt at most one decode once a lane is free.
"""

import attrs

from laneway.engine.draft import Draft
from laneway.engine.effects import KvOperation, SubmitJob, SubmitRow
from laneway.engine.errors import InternalError
from laneway.engine.sampling import Sampling
from laneway.engine.state import (
    BufferState,
    ModelState,
    RequestState,
    State,
    end_tokens,
    is_decoding,
    is_prefilling,
    is_waiting,
    kv_operation,
    queue_head,
)


@attrs.frozen(kw_only=True)
class PlanRow:
    """One row of a plan. ``bind``: the lane is given to the owner by this job."""

    lane: int
    owner: int
    tokens: tuple[int, ...]
    start: int
    sampling: Sampling | None
    bind: bool


@attrs.frozen(kw_only=True)
class Plan:
    """One job to be: task, buffer, rows."""

    task: str
    origin: str
    model: int
    buffer: int
    rows: tuple[PlanRow, ...]


def plan(draft: Draft) -> None:
    """Plan jobs until the in-flight ceiling is reached or nothing is left to run."""
    while (chosen := choose(draft.state)) is not None:
        validate(draft.state, chosen)
        carry_out(draft, chosen)


def inflight_ceiling(state: State) -> int:
    """Return how many jobs may be in flight.

    Policy and device, and 1 unless more is verified (E11, G19).
    """
    facts = state.device.facts
    if facts is None or state.device.state not in ("serving", "degraded", "draining"):
        return 0
    return min(state.limits.inflight_jobs_max, facts.inflight_max, 1)


def choose(state: State) -> Plan | None:
    """Return the next plan, or None when the device is to be given nothing now."""
    if len(state.jobs) >= inflight_ceiling(state):
        return None
    if state.now_ns < state.device.backoff_until_ns:
        return None
    for model in state.models.values():
        chosen = None
        if model.state == "warming":
            chosen = _choose_trial(state, model)
        elif model.state in ("ready", "draining"):
            chosen = _choose_request(state, model)
        if chosen is not None:
            return chosen
    return None


def _choose_request(state: State, model: ModelState) -> Plan | None:
    order = (_choose_prefill, _choose_decode)
    if state.last_task == "prefill":
        order = (_choose_decode, _choose_prefill)
    for chooser in order:
        chosen = chooser(state, model)
        if chosen is not None:
            return chosen
    return None


def _choose_prefill(state: State, model: ModelState) -> Plan | None:
    request = queue_head(state, state.prefill_again, is_prefilling)
    lane = request.lane if request is not None else None
    if request is None:
        lane = empty_lane(state, model)
        request = queue_head(state, state.waiting, is_waiting) if lane is not None else None
    if request is None or lane is None:
        return None
    buffer = free_buffer(state, model, "prefill", tokens=len(request.prompt))
    if buffer is None:
        return None
    row = PlanRow(
        lane=lane,
        owner=request.number,
        tokens=request.prompt,
        start=0,
        sampling=request.sampling,
        bind=request.lane is None,
    )
    return _plan(model, "prefill", "request", buffer, row)


def _choose_decode(state: State, model: ModelState) -> Plan | None:
    buffer = free_buffer(state, model, "decode", tokens=1)
    request = queue_head(state, state.decode_ready, is_decoding)
    if buffer is None or request is None or request.lane is None:
        return None
    row = PlanRow(
        lane=request.lane,
        owner=request.number,
        tokens=(request.tokens[-1],),
        start=state.lanes[request.lane].length_tokens,
        sampling=request.sampling,
        bind=False,
    )
    return _plan(model, "decode", "request", buffer, row)


def _choose_trial(state: State, model: ModelState) -> Plan | None:
    """Return the next job of golden and warm-up, one trial after the other (decision 19)."""
    progress = model.trial
    assert model.facts is not None
    if progress.job is not None or progress.index >= len(model.facts.trials):
        return None
    trial = model.facts.trials[progress.index]
    decoded = progress.done_tokens - len(trial.prompt)
    task = "prefill" if progress.done_tokens == 0 else "decode"
    tokens = trial.prompt if task == "prefill" else trial.forced[decoded : decoded + 1]
    buffer = free_buffer(state, model, task, tokens=len(tokens))
    lane = progress.lane if progress.lane is not None else empty_lane(state, model)
    if buffer is None or lane is None:
        return None
    row = PlanRow(
        lane=lane,
        owner=progress.index,
        tokens=tokens,
        start=progress.done_tokens,
        sampling=None,
        bind=progress.lane is None,
    )
    return _plan(model, task, trial.origin, buffer, row)


def _plan(model: ModelState, task: str, origin: str, buffer: BufferState, row: PlanRow) -> Plan:
    return Plan(task=task, origin=origin, model=model.number, buffer=buffer.number, rows=(row,))


def free_buffer(state: State, model: ModelState, task: str, *, tokens: int) -> BufferState | None:
    """Return a free buffer of this epoch, generation and task that takes so many tokens, or None.

    Source: E2, G3.
    """
    assert model.facts is not None
    fitting = {
        submodel.name
        for submodel in model.facts.submodels
        if submodel.task == task and submodel.tokens_max >= tokens
    }
    for buffer in state.buffers.values():
        if (
            buffer.state == "free"
            and buffer.submodel in fitting
            and buffer.model == model.number
            and buffer.generation == model.generation
            and buffer.epoch == state.device.epoch
        ):
            return buffer
    return None


def empty_lane(state: State, model: ModelState) -> int | None:
    """Return the lowest empty lane of the model, or None."""
    for number in range(model.lane_first, model.lane_first + model.lane_count):
        if state.lanes[number].state == "empty":
            return number
    return None


def validate(state: State, chosen: Plan) -> None:
    """Hold a plan against the rules every plan must obey, whoever made it.

    Raises: InternalError naming the rule: one task, distinct lanes each owned by its sequence, room
    in the lane, the right number of tokens, a free buffer, the ceiling. Source: R2.1, R7.3, E12,
    E15, I6.
    """
    model = state.models[chosen.model]
    facts = model.facts
    buffer = state.buffers[chosen.buffer]
    lanes = [row.lane for row in chosen.rows]
    assert facts is not None
    submodel = next(s for s in facts.submodels if s.name == buffer.submodel)
    rules = (
        (len(state.jobs) < inflight_ceiling(state), "E11: in-flight ceiling"),
        (bool(lanes) and len(set(lanes)) == len(lanes), "E12: distinct lanes"),
        (len(lanes) <= submodel.batch_max, "R6.1: batch of the submodel"),
        (buffer.state == "free" and buffer.task == chosen.task, "E1: a free buffer of the task"),
    )
    for holds, rule in rules:
        if not holds:
            raise InternalError(f"step {state.step}: plan breaks {rule}: {chosen}")
    for row in chosen.rows:
        lane = state.lanes[row.lane]
        end_tokens = row.start + len(row.tokens)
        owned = (lane.origin, lane.owner) == (chosen.origin, row.owner)
        row_rules = (
            (lane.state == ("empty" if row.bind else "ready"), "E15: lane state"),
            (row.bind or owned, "E15: lane owner"),
            (row.start == lane.length_tokens, "R7.3: length before"),
            (1 <= len(row.tokens) <= submodel.tokens_max, "R2.1: tokens of the task"),
            (end_tokens <= facts.context_tokens, "E18: room in the lane"),
        )
        for holds, rule in row_rules:
            if not holds:
                raise InternalError(f"step {state.step}: plan breaks {rule}: {chosen}")


def carry_out(draft: Draft, chosen: Plan) -> None:
    """Turn a validated plan into events and the one effect that submits it."""
    state = draft.state
    model = state.models[chosen.model]
    generation = model.generation
    number = state.next_job
    lanes = [row.lane for row in chosen.rows]
    bound = [row for row in chosen.rows if row.bind]
    if bound:
        owners = [row.owner for row in bound]
        data = {"origin": chosen.origin, "owners": owners}
        draft.emit("lane", [row.lane for row in bound], "bind", generation=generation, data=data)
    for row in chosen.rows:
        if chosen.origin == "request" and state.requests[row.owner].state == "waiting":
            draft.emit(
                "request", row.owner, "prefill", generation=generation, data={"lane": row.lane}
            )
    due = [operation for lane in lanes for operation in state.lanes[lane].due]
    targets = [row.start + len(row.tokens) for row in chosen.rows]
    draft.emit("lane", lanes, "reserve", generation=generation, data={"job": number, "to": targets})
    draft.emit("buffer", chosen.buffer, "acquire", generation=generation, data={"job": number})
    rows = [
        [row.lane, row.owner, row.start, to] for row, to in zip(chosen.rows, targets, strict=True)
    ]
    draft.emit(
        "job",
        number,
        "plan",
        generation=generation,
        data={
            "task": chosen.task,
            "origin": chosen.origin,
            "model": chosen.model,
            "buffer": chosen.buffer,
            "rows": rows,
        },
    )
    reserve = [kv_operation("RESERVE", state.lanes[lane]) for lane in lanes]
    draft.ask(_submit_effect(state, chosen, number, (*due, *reserve)))


def _submit_row(state: State, chosen: Plan, row: PlanRow) -> SubmitRow:
    """Return a row of the effect; what the sampler needs of its request travels with it.

    Why ``output`` is copied only for penalties: the tokens of a request grow, and an effect is a
    value.
    """
    plain = SubmitRow(
        lane=row.lane, owner=row.owner, tokens=row.tokens, start=row.start, sampling=row.sampling
    )
    if chosen.origin != "request":
        return plain
    request = state.requests[row.owner]
    return attrs.evolve(
        plain,
        generated=len(request.tokens),
        prompt=request.prompt if request.sampling.counts_prompt else (),
        output=tuple(request.tokens) if request.sampling.counts_output else (),
        masked=_masked(state, request),
        logprobs=request.logprobs,
    )


def _masked(state: State, request: RequestState) -> tuple[int, ...]:
    """Return the tokens that would end a request that has not its least number of tokens yet."""
    if len(request.tokens) >= request.min_tokens:
        return ()
    facts = state.models[request.model].facts
    assert facts is not None
    return tuple(token for token in end_tokens(state, request) if token < facts.vocabulary)


def _submit_effect(
    state: State, chosen: Plan, number: int, operations: tuple[KvOperation, ...]
) -> SubmitJob:
    limits = state.limits
    return SubmitJob(
        job=number,
        model=chosen.model,
        epoch=state.device.epoch,
        generation=state.models[chosen.model].generation,
        buffer=chosen.buffer,
        task=chosen.task,
        origin=chosen.origin,
        operations=operations,
        rows=tuple(_submit_row(state, chosen, row) for row in chosen.rows),
        suspect_after_ns=limits.hang_suspect_ns,
        confirm_after_ns=limits.hang_confirm_ns,
        cap_after_ns=limits.hang_cap_ns,
    )
