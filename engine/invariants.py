"""I1 to I12 as functions over the state.

``check`` holds one state against every invariant that a state can break, and raises InvariantError
with the rule's id; ``Watch`` in watch.py does the same for steps, with what only the past can tell.
Both are written apart from the code that decides: they read what is there and know nothing of why.
``INVARIANTS`` names each invariant with its sentence and where it is checked. Tests call both at
every step; the running engine calls neither.

Source: specs/invariants.md.
"""

from collections import Counter
from collections.abc import Collection

import attrs

from laneway.engine.errors import InvariantError
from laneway.engine.ladder import budget, within
from laneway.engine.ledger import check_ledger
from laneway.engine.state import BufferState, JobState, LaneState, RequestState, State

IN_FLIGHT = {
    "planned": ("preparing",),
    "submitted": ("submitted", "running"),
    "uncertain": ("submitted", "running"),
}
"""What a buffer may be while its job is in a state."""

SERVES = {
    "waiting": ("ready", "draining", "recovering", "configuring", "warming"),
    "prefilling": ("ready", "draining"),
    "decoding": ("ready", "draining"),
    "suspended": ("ready", "draining", "recovering", "configuring", "warming"),
}
"""What the model of a request may be, by the request's state."""

NO_LANES = ("validating", "configuring", "recovering", "failed")
"""What a model may be that was never configured."""

BUSY_BUFFERS = ("preparing", "submitted", "running")


@attrs.frozen
class Invariant:
    """One invariant: its sentence, and where it is checked: ``state``, ``steps`` or a place."""

    id: str
    sentence: str
    checked: tuple[str, ...]


_STATE, _STEPS = "state", "steps"

INVARIANTS = tuple(
    Invariant(*line)
    for line in (
        ("I1", "Each accepted request gets exactly one terminal event.", (_STATE, _STEPS)),
        (
            "I2",
            "A buffer is written neither between submit and completion nor while it is"
            " quarantined.",
            (_STATE, "the simulated board's violations"),
        ),
        (
            "I3",
            "Lanes empty, ready, reserved and unknown add up to all lanes; each has at most one"
            " owner.",
            (_STATE,),
        ),
        ("I4", "No lane or slot goes free while a submitted job names it.", (_STATE,)),
        (
            "I5",
            "A completion changes state only if job, epoch and generation match and the job is in"
            " flight; else it is recorded and nothing changes.",
            (_STEPS,),
        ),
        (
            "I6",
            "Jobs in flight never exceed the ceiling; a job has one task; its lanes are distinct.",
            (_STATE,),
        ),
        (
            "I7",
            "The tokens of a request depend on prompt, parameters, seed and model alone.",
            ("tests/model/test_engine_machine.py",),
        ),
        (
            "I8",
            "Every metric equals a fold over the journal; gauges are 0 when idle.",
            (_STATE,),
        ),
        ("I9", "With a healthy device each class is served within its bound.", (_STATE,)),
        (
            "I10",
            "Nothing is submitted to an unhealthy device; resets stay in budget, each with cause,"
            " probe and result.",
            (_STATE, _STEPS),
        ),
        (
            "I11",
            "Replay gives the same state, and deciding again the same events.",
            ("journal/replay.py",),
        ),
        ("I12", "A bad request fails alone.", (_STEPS,)),
    )
)


def check(state: State) -> None:
    """Hold one state against every invariant that a state can break.

    Raises: InvariantError naming the first that does not hold.
    """
    check_requests(state)
    check_buffers(state)
    check_lanes(state)
    check_jobs(state)
    check_queues(state)
    check_models(state)
    check_canaries(state)
    check_end_states(state)
    check_ladder(state)
    check_numbers(state)


# ---------------------------------------------------------------------------- requests


def check_requests(state: State) -> None:
    """I1, I3, I6: what a live request holds, and that its model can still serve it."""
    for request in state.requests.values():
        check_request(state, request)
        model = state.models.get(request.model)
        if model is None and request.state == "suspended":
            continue  # a restart took it; the request waits for another of its artifact
        if model is None or model.state not in SERVES[request.state]:
            raise InvariantError(
                "I1",
                f"{_of(request)} lives on model/{request.model}, which serves nothing",
            )
    listed = sorted(state.suspended)
    suspended = sorted(n for n, one in state.requests.items() if one.state == "suspended")
    if listed != suspended:
        raise InvariantError("G8", f"requests {suspended} are suspended, listed {listed}")
    _check_alone(state)


def _check_alone(state: State) -> None:
    """G15: who runs alone is listed once, and no job has a row of it beside another."""
    alone = sorted(r.number for r in state.requests.values() if r.alone)
    listed = sorted(state.alone)
    resumed = [n for n in alone if state.requests[n].state != "suspended" or n in listed]
    if listed != resumed:
        raise InvariantError("G15", f"requests {alone} run alone, listed {listed}")
    for job in state.jobs.values():
        suspects = [row.owner for row in job.rows if row.owner in alone]
        if job.origin == "request" and suspects and (len(job.rows) > 1 or len(state.jobs) > 1):
            raise InvariantError("G15", f"{_of(job)} runs the suspects {suspects} beside others")


def check_request(state: State, request: RequestState) -> None:
    """I1, R6.2, R7.3: one live request agrees with its lane, its job and its tokens."""
    number, status = request.number, request.state
    done = len(request.tokens)
    if done >= request.max_tokens:
        raise InvariantError("I1", f"{_of(request)} is done but lives")
    if status not in SERVES:
        raise InvariantError("I1", f"{_of(request)} has no way on")
    length = len(request.prompt) + done
    if status in ("waiting", "prefilling") and request.prefill_tokens != length:
        said = f"is to run {request.prefill_tokens} tokens and has {length}"
        raise InvariantError("G8", f"{_of(request)} {said}")
    if request.catching_up and status != "prefilling":
        raise InvariantError("G8", f"{_of(request)} catches up with nothing")
    if status in ("waiting", "suspended"):
        if request.lane is not None or request.job is not None:
            raise InvariantError("R6.2", f"{_of(request)} holds {(request.lane, request.job)}")
        if done and not request.served:
            raise InvariantError("R6.2", f"{_of(request)} has {done} tokens and never had a lane")
        return
    lane = state.lanes.get(request.lane or 0)
    if lane is None:
        raise InvariantError("R6.2", f"{_of(request)} has no lane")
    if lane.owner != number or lane.origin != "request":
        owner = (lane.origin, lane.owner)
        raise InvariantError("I3", f"{_of(request)}: its lane is of {owner}")
    if lane.job != request.job:
        said = f"job/{request.job}, its lane job/{lane.job}"
        raise InvariantError("I6", f"{_of(request)}: {said}")
    if status == "decoding" and not done:
        raise InvariantError("R6.2", f"{_of(request)} has {done} tokens")
    length -= 1
    if status == "prefilling":
        if lane.length_tokens > length:
            said = f"its KV is {lane.length_tokens} long, at most {length}"
            raise InvariantError("R7.3", f"{_of(request)}: {said}")
    elif lane.length_tokens != length:
        said = f"its KV is {lane.length_tokens} long, not {length}"
        raise InvariantError("R7.3", f"{_of(request)}: {said}")
    if request.job is not None and request.job not in state.jobs:
        raise InvariantError("I6", f"{_of(request)} waits for job/{request.job}, which is gone")


def _of(entity: RequestState | BufferState | LaneState | JobState) -> str:
    """Name an entity and its state, for a message."""
    kind = type(entity).__name__.removesuffix("State").lower()
    return f"{kind}/{entity.number} ({entity.state})"


# ---------------------------------------------------------------------------- buffers


def check_buffers(state: State) -> None:
    """I2, E1, E4: a free buffer has no job, a busy one has its own, a done one has a dead one."""
    for buffer in state.buffers.values():
        if buffer.model not in state.models:
            raise InvariantError("E1", f"{_of(buffer)} outlived its model")
        if buffer.state == "free":
            if buffer.job is not None:
                raise InvariantError("E1", f"{_of(buffer)} names job/{buffer.job}")
        elif buffer.state in BUSY_BUFFERS:
            job = state.jobs.get(buffer.job or 0)
            if job is None or job.buffer != buffer.number:
                said = f"is busy, yet job/{buffer.job} does not have it"
                raise InvariantError("I2", f"{_of(buffer)} {said}")
        elif buffer.job is None:
            raise InvariantError("E1", f"{_of(buffer)} forgot its job")
        elif buffer.job in state.jobs:
            raise InvariantError("E4", f"{_of(buffer)}: job/{buffer.job} is not terminal")


# ---------------------------------------------------------------------------- lanes


def check_lanes(state: State) -> None:
    """I3: every lane of a configured model is in one of four states, with at most one owner."""
    held = [lane.model for lane in state.lanes.values()]
    for model in state.models.values():
        count = held.count(model.number)
        if count == model.lane_count:
            continue
        if count or model.state not in NO_LANES:
            said = f"model/{model.number} has {count} of {model.lane_count} lanes"
            raise InvariantError("I3", said)
    owners = [(n.origin, n.owner) for n in state.lanes.values() if n.origin == "request"]
    if len(set(owners)) != len(owners):
        twice = [owner for owner, count in Counter(owners).items() if count > 1]
        raise InvariantError("I3", f"owners with two lanes: {twice}")
    named = frozenset([row.lane for job in state.jobs.values() for row in job.rows])
    for lane in state.lanes.values():
        if lane.model not in state.models:
            raise InvariantError("I3", f"lane/{lane.number} outlived its model")
        check_lane(state, lane, named)


def check_lane(state: State, lane: LaneState, named: frozenset[int]) -> None:
    """I3, I4, E19: what a lane's state promises, and that no lane is kept for nobody.

    ``named`` are the lanes that jobs name.
    """
    status = lane.state
    if status in ("empty", "unknown"):
        if lane.owner is not None or lane.job is not None or lane.length_tokens:
            held = (lane.owner, lane.job, lane.length_tokens)
            raise InvariantError("I3", f"{_of(lane)} holds {held}")
        if lane.due:
            raise InvariantError("I3", f"{_of(lane)} has operations due: {lane.due}")
        if lane.number in named:
            jobs = [job.number for job in state.jobs.values() if lane.number in _lanes_of(job)]
            raise InvariantError("I4", f"{_of(lane)} is named by jobs {jobs}")
        return
    if lane.owner is None:
        raise InvariantError("I3", f"{_of(lane)} has no owner")
    if status == "reserved":
        if lane.job not in state.jobs:
            said = f"is reserved for job/{lane.job}, which ended"
            raise InvariantError("E19", f"{_of(lane)} {said}")
        if lane.reserved_tokens <= lane.length_tokens:
            growth = f"{lane.length_tokens} to {lane.reserved_tokens}"
            raise InvariantError("R7.3", f"{_of(lane)} is reserved from {growth}")
        return
    if status != "ready" or lane.job is not None:
        raise InvariantError("I3", f"{_of(lane)} names job/{lane.job}")
    if lane.origin == "request":
        owner = state.requests.get(lane.owner)
        if owner is None:
            said = f"is kept for request/{lane.owner}, which ended"
            raise InvariantError("E19", f"{_of(lane)} {said}")
        if owner.lane != lane.number:
            said = f"request/{owner.number} has lane/{owner.lane}"
            raise InvariantError("I3", f"{_of(lane)}: {said}")
    else:
        run = state.models[lane.model].runs.get(lane.owner)
        if run is None or lane.number not in run.lanes:
            said = f"is kept for run {lane.owner}, which does not have it"
            raise InvariantError("I3", f"{_of(lane)} {said}")


def _lanes_of(job: JobState) -> list[int]:
    return [row.lane for row in job.rows]


# ---------------------------------------------------------------------------- jobs


def check_jobs(state: State) -> None:
    """I6, E1, G11, G13: the ceiling, and that job, buffer and lanes agree."""
    if state.jobs:
        facts = state.device.facts
        verified = facts.inflight_max if facts is not None else 0
        ceiling = min(state.limits.inflight_jobs_max, verified)
        if len(state.jobs) > ceiling:
            raise InvariantError("I6", f"{len(state.jobs)} in flight, at most {ceiling}")
    check_ledger(state)
    for number, job in state.jobs.items():
        if number != job.number or job.state not in IN_FLIGHT:
            raise InvariantError("I6", f"{_of(job)} is terminal, yet here")
        if job.task not in ("prefill", "decode"):
            raise InvariantError("I6", f"{_of(job)} has task {job.task}")
        buffer = state.buffers.get(job.buffer)
        if buffer is None:
            raise InvariantError("E1", f"{_of(job)}: buffer/{job.buffer} does not exist")
        _check_buffer_of(job, buffer)
        lanes = _lanes_of(job)
        if not lanes or len(set(lanes)) != len(lanes):
            raise InvariantError("I6", f"{_of(job)} names lanes {lanes}")
        check_rows(state, job)
    rows = [lane for job in state.jobs.values() for lane in _lanes_of(job)]
    if len(set(rows)) != len(rows):
        shared = [lane for lane, count in Counter(rows).items() if count > 1]
        raise InvariantError("E12", f"two jobs share lanes {shared}")
    buffers = [job.buffer for job in state.jobs.values()]
    if len(set(buffers)) != len(buffers):
        doubled = [number for number, count in Counter(buffers).items() if count > 1]
        raise InvariantError("E12", f"two jobs share buffers {doubled}")


def _check_buffer_of(job: JobState, buffer: BufferState) -> None:
    said = f"buffer/{buffer.number}"
    if buffer.job != job.number:
        raise InvariantError("E1", f"{_of(job)}: {said} is of job/{buffer.job}")
    if buffer.state not in IN_FLIGHT[job.state]:
        raise InvariantError("G13", f"{_of(job)}: {said} is {buffer.state}")
    if buffer.task != job.task:
        raise InvariantError("R4.1", f"{_of(job)}: {said} is for {buffer.task}")
    key = (buffer.model, buffer.epoch, buffer.generation)
    if key != (job.model, job.epoch, job.generation):
        raise InvariantError("G11", f"{_of(job)}: {said} is of {key}")


def check_rows(state: State, job: JobState) -> None:
    """I4, R7.3: each row's lane is reserved for this job and this owner, from and to as told."""
    for row in job.rows:
        lane = state.lanes.get(row.lane)
        if lane is None:
            raise InvariantError("I4", f"job/{job.number}: lane/{row.lane} does not exist")
        told = ("reserved", job.number, job.origin, row.owner, row.from_tokens, row.to_tokens)
        is_now = (
            *(lane.state, lane.job, lane.origin, lane.owner),
            *(lane.length_tokens, lane.reserved_tokens),
        )
        if is_now != told:
            said = f"lane/{row.lane} is {is_now}, not {told}"
            raise InvariantError("I4", f"job/{job.number}: {said}")
        if job.origin != "request":
            continue
        request = state.requests.get(row.owner)
        if request is not None and (request.job, request.lane) != (job.number, row.lane):
            held = (request.job, request.lane)
            said = f"request/{request.number} of job/{job.number} has {held}"
            raise InvariantError("I6", said)


# ---------------------------------------------------------------------------- queues


def check_queues(state: State) -> None:
    """I8, I9, G9, R7.2: who waits for a turn stands in its queue once, the waiting in order."""
    _check_waiting(state)
    turns: dict[str, list[int]] = {"prefilling": [], "decoding": []}
    for number, request in state.requests.items():
        if request.job is None and request.state in turns:
            turns["decoding" if request.catching_up else request.state].append(number)
    prefilling = (*state.prefill_again, *state.chunking)
    for queue, status in ((prefilling, "prefilling"), (state.decode_ready, "decoding")):
        idle = set(turns[status])
        queued = [number for number in queue if number in idle]
        if len(queued) != len(idle) or set(queued) != idle:
            said = f"{status} {sorted(idle)} wait for a turn, queued {dict(Counter(queued))}"
            raise InvariantError("I9", said)
    timed = {number for number, r in state.requests.items() if r.deadline_ns is not None}
    if timed and not timed.issubset([number for _, number in state.deadlines]):
        lost = timed - {number for _, number in state.deadlines}
        raise InvariantError("R7.2", f"the deadlines of requests {sorted(lost)} are forgotten")
    if state.deadlines and state.deadlines[0][1] not in state.requests:
        top = state.deadlines[0][1]
        raise InvariantError("R7.2", f"the dead request/{top} has the next deadline")


def _check_waiting(state: State) -> None:
    waiting = sorted([r.number for r in state.requests.values() if r.state == "waiting"])
    check_waiting(state, waiting)
    count = state.waiting_requests
    if count != len(waiting):
        raise InvariantError("I8", f"{len(waiting)} requests wait, counted {count}")
    tokens = sum([_known(state.requests[number]) for number in waiting])
    if state.waiting_tokens != tokens:
        raise InvariantError("I8", f"{tokens} tokens, counted {state.waiting_tokens}")


def _known(request: RequestState) -> int:
    return len(request.prompt) + len(request.tokens)


def check_waiting(state: State, waiting: list[int]) -> None:
    """G9, E13: each who waits stands once, in its class, and no tenant overtakes itself.

    Those whose turn had come before a fault stand before all others.
    """
    found: list[int] = []
    members = set(waiting)
    for queue, is_long in ((state.short_waiting, False), (state.long_waiting, True)):
        stands = [number for number in queue.in_order() if number in members]
        found += stands
        last: dict[tuple[str, int], int] = {}
        served = [number for number in stands if state.requests[number].served]
        if stands[: len(served)] != sorted(served):
            raise InvariantError("G9", f"the resumed {served} do not stand first in {stands}")
        for number in stands[len(served) :]:
            one = state.requests[number]
            if one.long != is_long:
                said = f"requests {[number]} wait in the queue of another class"
                raise InvariantError("E13", said)
            before = last.get((one.tenant, one.priority), 0)
            if before >= number:
                said = f"of tenant {one.tenant!r} stands before request/{number}"
                raise InvariantError("G9", f"request/{before} {said}")
            last[one.tenant, one.priority] = number
    if sorted(found) != waiting:
        raise InvariantError("G9", f"requests {waiting} wait, the queues have {found}")


# ---------------------------------------------------------------------------- models, device


def check_models(state: State) -> None:
    """E21, R9.2: an alias points to its ready model; one model at a time has the device.

    One more is validated beside the model that it is to replace, and has nothing there. What is
    to be loaded back serves nothing yet (R14.5).
    """
    for alias, number in state.aliases.items():
        if number not in state.models or state.models[number].alias != alias:
            said = f"alias {alias!r} points to model/{number}, which is not of it"
            raise InvariantError("E21", said)
    for model in state.models.values():
        served = state.aliases.get(model.alias) == model.number
        if served != (model.state == "ready"):
            said = f"model/{model.number} is {model.state}, served: {served}"
            raise InvariantError("E21", said)
    for number, alias in state.coming_back.items():
        if number >= state.next_model or alias in state.aliases or state.closing:
            said = f"{alias!r} is to come back after model/{number}; served: {state.aliases}"
            raise InvariantError("R14.5", said)
    beside = [model for model in state.models.values() if model.replaces in state.models]
    if any(model.generation or model.state not in ("validating", "failed") for model in beside):
        said = f"{[model.number for model in beside]} are not beside what they replace"
        raise InvariantError("R9.2", f"models {said}")
    if len(state.models) - len(beside) > 1 or len(beside) > 1:
        raise InvariantError("R9.2", f"models {sorted(state.models)} hold the device")


def check_canaries(state: State) -> None:
    """E11, decision 15: who examines has one job in flight; no proof is ahead of its tokens."""
    restricted = state.device.ceiling_reason or state.device.state not in ("serving", "degraded")
    for model in state.models.values():
        canary = model.canary
        if canary.examining and not restricted:
            raise InvariantError("E11", f"model/{model.number} is examined with two in flight")
        if canary.examining and model.state not in ("ready", "draining"):
            raise InvariantError("E11", f"model/{model.number} ({model.state}) is examined")
        for run in model.runs.values():
            lanes = [state.lanes[number] for number in run.lanes if number in state.lanes]
            if run.origin == "canary" and not any(lane.owner == run.number for lane in lanes):
                raise InvariantError("E19", f"run {run.number} of a canary has no lane")
    for request in state.requests.values():
        order = (request.proven_tokens, request.canary_tokens, len(request.tokens))
        if list(order) != sorted(order):
            said = f"proven, at the last canary, now: {order}"
            raise InvariantError("decision 15", f"{_of(request)}: {said}")


def check_end_states(state: State) -> None:
    """I10, G7: a device that is lost or closing has nothing left to do."""
    status = state.device.state
    if status not in ("lost", "closing", "closed"):
        return
    if state.jobs:
        raise InvariantError("I10", f"jobs {sorted(state.jobs)} on a {status} device")
    untold = sorted(n for n, r in state.requests.items() if r.model in state.models)
    if untold:
        raise InvariantError("G7", f"requests {untold} were not told")
    if state.aliases:
        raise InvariantError("G7", f"{state.aliases} served by a {status} device")
    held = sorted(n for n, lane in state.lanes.items() if lane.state in ("ready", "reserved"))
    if held:
        raise InvariantError("G7", f"lanes {held} are still held on a {status} device")
    used = sorted(n for n, buffer in state.buffers.items() if buffer.state in BUSY_BUFFERS)
    if used:
        raise InvariantError("G7", f"buffers {used} are still in use on a {status} device")


def check_ladder(state: State) -> None:
    """I10, R14.7: a recovery belongs to a device that is out of service; resets stay in budget."""
    status, ladder = state.device.state, state.ladder
    busy = status in ("resetting", "recovering")
    if busy and ladder.recovery is None:
        raise InvariantError("R14.7", f"the device is {status} for no recorded reason")
    if ladder.recovery is not None and not busy and status != "suspect":
        raise InvariantError("R14.7", f"a recovery is under way on a {status} device")
    for rung, times_ns in ladder.attempts.items():
        allowed = budget(state.limits, rung)
        used = within(times_ns, state.now_ns, allowed.window_ns)
        if len(used) > allowed.count + 1:  # the last attempt may have counted double
            raise InvariantError("I10", f"{len(used)} attempts on rung {rung} of {allowed.count}")
    if status != "resetting":
        return
    if state.jobs:
        raise InvariantError("I10", f"jobs {sorted(state.jobs)} while a reset runs")
    known = sorted(n for n, lane in state.lanes.items() if lane.state != "unknown")
    if known:
        raise InvariantError("I10", f"lanes {known} are believed while a reset runs")
    used_buffers = sorted(n for n, one in state.buffers.items() if one.state in BUSY_BUFFERS)
    if used_buffers:
        raise InvariantError("I10", f"buffers {used_buffers} are in use while a reset runs")


def check_numbers(state: State) -> None:
    """Decision 9: the next numbers are above all that exist."""
    buffers = state.buffers.values()
    _check_below("request", state.requests, state.next_request)
    _check_below("job", state.jobs, state.next_job)
    _check_below("model", state.models, state.next_model)
    _check_below("lane", state.lanes, state.next_lane)
    _check_below("buffer", state.buffers, state.next_buffer)
    _check_below("epoch", [buffer.epoch for buffer in buffers], state.next_epoch)
    _check_below("generation", [buffer.generation for buffer in buffers], state.next_generation)


def _check_below(kind: str, numbers: Collection[int], after: int) -> None:
    if numbers and max(numbers) >= after:
        late = [number for number in numbers if number >= after]
        raise InvariantError("decision 9", f"{kind} {late} although {after} is next")
