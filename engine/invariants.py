"""I1 to I12 as functions over the state.

``check`` holds one state against every invariant that a state can break, and raises InvariantError
with the rule's id; ``Watch`` in watch.py does the same for steps, with what only the past can tell.
Both are written apart from the code that decides: they read what is there and know nothing of why.
``INVARIANTS`` names each invariant with its sentence and where it is checked. Tests call both at
every step; the running engine calls neither.

Source: specs/invariants.md.
"""

from collections import Counter
from collections.abc import Iterable

import attrs

from laneway.engine.errors import InvariantError
from laneway.engine.ledger import check_ledger
from laneway.engine.state import BufferState, JobState, LaneState, RequestState, State

IN_FLIGHT = {
    "planned": ("preparing",),
    "submitted": ("submitted", "running"),
    "uncertain": ("submitted", "running"),
}
"""What a buffer may be while its job is in a state."""

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
    check_end_states(state)
    check_numbers(state)


def hold(holds: bool, rule: str, message: str) -> None:
    """Raise InvariantError with a rule's id, unless it holds."""
    if not holds:
        raise InvariantError(rule, message)


# ---------------------------------------------------------------------------- requests


def check_requests(state: State) -> None:
    """I1, I3, I6: what a live request holds, and that its model can still serve it."""
    for request in state.requests.values():
        check_request(state, request)
        model = state.models.get(request.model)
        hold(
            model is not None and model.state in ("ready", "draining"),
            "I1",
            f"request/{request.number} lives on model/{request.model}, which serves nothing",
        )


def check_request(state: State, request: RequestState) -> None:
    """I1, R6.2, R7.3: one live request agrees with its lane, its job and its tokens."""
    name = f"request/{request.number} ({request.state})"
    done = len(request.tokens)
    hold(done < request.max_tokens, "I1", f"{name} is done but lives")
    if request.state == "waiting":
        held = (request.lane, request.job, done)
        hold(held == (None, None, 0), "R6.2", f"{name} holds {held}")
        return
    hold(request.state in ("prefilling", "decoding"), "I1", f"{name} has no way on")
    lane = state.lanes.get(request.lane or 0)
    if lane is None:
        raise InvariantError("R6.2", f"{name} has no lane")
    owner = (lane.origin, lane.owner)
    hold(owner == ("request", request.number), "I3", f"{name}: its lane is of {owner}")
    hold(lane.job == request.job, "I6", f"{name}: job/{request.job}, its lane job/{lane.job}")
    hold((done == 0) == (request.state == "prefilling"), "R6.2", f"{name} has {done} tokens")
    held_tokens = lane.length_tokens
    if request.state == "prefilling":
        most = len(request.prompt) - 1
        hold(held_tokens <= most, "R7.3", f"{name}: its KV is {held_tokens} long, at most {most}")
    else:
        length = len(request.prompt) + done - 1
        hold(held_tokens == length, "R7.3", f"{name}: its KV is {held_tokens} long, not {length}")
    alive = request.job is None or request.job in state.jobs
    hold(alive, "I6", f"{name} waits for job/{request.job}, which is gone")


# ---------------------------------------------------------------------------- buffers


def check_buffers(state: State) -> None:
    """I2, E1, E4: a free buffer has no job, a busy one has its own, a done one has a dead one."""
    for buffer in state.buffers.values():
        name = f"buffer/{buffer.number} ({buffer.state})"
        hold(buffer.model in state.models, "E1", f"{name} outlived its model")
        if buffer.state == "free":
            hold(buffer.job is None, "E1", f"{name} names job/{buffer.job}")
        elif buffer.state in BUSY_BUFFERS:
            job = state.jobs.get(buffer.job or 0)
            own = job is not None and job.buffer == buffer.number
            hold(own, "I2", f"{name} is busy, yet job/{buffer.job} does not have it")
        else:
            hold(buffer.job is not None, "E1", f"{name} forgot its job")
            dead = buffer.job not in state.jobs
            hold(dead, "E4", f"{name}: job/{buffer.job} is not terminal")


# ---------------------------------------------------------------------------- lanes


def check_lanes(state: State) -> None:
    """I3: every lane of a configured model is in one of four states, with at most one owner."""
    for model in state.models.values():
        count = sum(lane.model == model.number for lane in state.lanes.values())
        configured = model.state not in ("validating", "configuring", "failed")
        if configured or count:
            whole = count == model.lane_count
            hold(whole, "I3", f"model/{model.number} has {count} of {model.lane_count} lanes")
    owners = Counter((n.origin, n.owner) for n in state.lanes.values() if n.origin == "request")
    twice = [owner for owner, count in owners.items() if count > 1]
    hold(not twice, "I3", f"owners with two lanes: {twice}")
    for lane in state.lanes.values():
        hold(lane.model in state.models, "I3", f"lane/{lane.number} outlived its model")
        check_lane(state, lane)


def check_lane(state: State, lane: LaneState) -> None:
    """I3, I4, E19: what a lane's state promises, and that no lane is kept for nobody."""
    name = f"lane/{lane.number} ({lane.state})"
    if lane.state in ("empty", "unknown"):
        held = (lane.owner, lane.job, lane.length_tokens)
        hold(held == (None, None, 0), "I3", f"{name} holds {held}")
        hold(not lane.due, "I3", f"{name} has operations due: {lane.due}")
        named = [job.number for job in state.jobs.values() if lane.number in _lanes_of(job)]
        hold(not named, "I4", f"{name} is named by jobs {named}")
        return
    hold(lane.owner is not None, "I3", f"{name} has no owner")
    if lane.state == "reserved":
        hold(lane.job in state.jobs, "E19", f"{name} is reserved for job/{lane.job}, which ended")
        grows = lane.reserved_tokens > lane.length_tokens
        growth = f"{lane.length_tokens} to {lane.reserved_tokens}"
        hold(grows, "R7.3", f"{name} is reserved from {growth}")
        return
    hold(lane.state == "ready" and lane.job is None, "I3", f"{name} names job/{lane.job}")
    if lane.origin == "request":
        owner = state.requests.get(lane.owner or 0)
        if owner is None:
            raise InvariantError("E19", f"{name} is kept for request/{lane.owner}, which ended")
        same = owner.lane == lane.number
        hold(same, "I3", f"{name}: request/{owner.number} has lane/{owner.lane}")
    else:
        run = state.models[lane.model].runs.get(-1 if lane.owner is None else lane.owner)
        mine = run is not None and lane.number in run.lanes
        hold(mine, "I3", f"{name} is kept for run {lane.owner}, which does not have it")


def _lanes_of(job: JobState) -> list[int]:
    return [row.lane for row in job.rows]


# ---------------------------------------------------------------------------- jobs


def check_jobs(state: State) -> None:
    """I6, E1, G11, G13: the ceiling, and that job, buffer and lanes agree."""
    if state.jobs:
        facts = state.device.facts
        verified = facts.inflight_max if facts is not None else 0
        ceiling = min(state.limits.inflight_jobs_max, verified)
        hold(len(state.jobs) <= ceiling, "I6", f"{len(state.jobs)} in flight, at most {ceiling}")
    check_ledger(state)
    for number, job in state.jobs.items():
        name = f"job/{number} ({job.state})"
        live = number == job.number and job.state in IN_FLIGHT
        hold(live, "I6", f"{name} is terminal, yet here")
        hold(job.task in ("prefill", "decode"), "I6", f"{name} has task {job.task}")
        buffer = state.buffers.get(job.buffer)
        if buffer is None:
            raise InvariantError("E1", f"{name}: buffer/{job.buffer} does not exist")
        _check_buffer_of(name, job, buffer)
        lanes = _lanes_of(job)
        distinct = bool(lanes) and len(set(lanes)) == len(lanes)
        hold(distinct, "I6", f"{name} names lanes {lanes}")
        check_rows(state, job)
    rows = Counter(lane for job in state.jobs.values() for lane in _lanes_of(job))
    shared = [lane for lane, count in rows.items() if count > 1]
    hold(not shared, "E12", f"two jobs share lanes {shared}")
    buffers = Counter(job.buffer for job in state.jobs.values())
    doubled = [number for number, count in buffers.items() if count > 1]
    hold(not doubled, "E12", f"two jobs share buffers {doubled}")


def _check_buffer_of(name: str, job: JobState, buffer: BufferState) -> None:
    said = f"{name}: buffer/{buffer.number}"
    hold(buffer.job == job.number, "E1", f"{said} is of job/{buffer.job}")
    hold(buffer.state in IN_FLIGHT[job.state], "G13", f"{said} is {buffer.state}")
    hold(buffer.task == job.task, "R4.1", f"{said} is for {buffer.task}")
    key = (buffer.model, buffer.epoch, buffer.generation)
    hold(key == (job.model, job.epoch, job.generation), "G11", f"{said} is of {key}")


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
        same = is_now == told
        hold(same, "I4", f"job/{job.number}: lane/{row.lane} is {is_now}, not {told}")
        if job.origin == "request" and row.owner in state.requests:
            request = state.requests[row.owner]
            held = (request.job, request.lane)
            mine = held == (job.number, row.lane)
            hold(mine, "I6", f"request/{request.number} of job/{job.number} has {held}")


# ---------------------------------------------------------------------------- queues


def check_queues(state: State) -> None:
    """I8, I9, G9, R7.2: who waits for a turn stands in its queue once, the waiting in order."""
    waiting = sorted(r.number for r in state.requests.values() if r.state == "waiting")
    check_waiting(state, waiting)
    count = state.waiting_requests
    hold(count == len(waiting), "I8", f"{len(waiting)} requests wait, counted {count}")
    tokens = sum(len(state.requests[number].prompt) for number in waiting)
    hold(state.waiting_tokens == tokens, "I8", f"{tokens} tokens, counted {state.waiting_tokens}")
    prefilling = (*state.prefill_again, *state.chunking)
    for queue, status in ((prefilling, "prefilling"), (tuple(state.decode_ready), "decoding")):
        idle = {r.number for r in state.requests.values() if r.state == status and r.job is None}
        found = Counter(number for number in queue if number in idle)
        once = found == Counter(idle)
        hold(once, "I9", f"{status} {sorted(idle)} wait for a turn, queued {dict(found)}")
    timed = {number for number, r in state.requests.items() if r.deadline_ns is not None}
    lost = timed - {number for _, number in state.deadlines}
    hold(not lost, "R7.2", f"the deadlines of requests {sorted(lost)} are forgotten")
    if state.deadlines:
        top = state.deadlines[0][1]
        hold(top in state.requests, "R7.2", f"the dead request/{top} has the next deadline")


def check_waiting(state: State, waiting: list[int]) -> None:
    """G9, E13: each who waits stands once, in its class, and no tenant overtakes itself."""
    found = []
    for queue, is_long in ((state.short_waiting, False), (state.long_waiting, True)):
        stands = [number for number in queue.in_order() if number in set(waiting)]
        found += stands
        requests = [state.requests[number] for number in stands]
        misplaced = [one.number for one in requests if one.long != is_long]
        hold(not misplaced, "E13", f"requests {misplaced} wait in the queue of another class")
        last: dict[tuple[str, int], int] = {}
        for one in requests:
            before = last.get((one.tenant, one.priority), 0)
            first = f"request/{before} of tenant {one.tenant!r} stands before request/{one.number}"
            hold(before < one.number, "G9", first)
            last[one.tenant, one.priority] = one.number
    hold(sorted(found) == waiting, "G9", f"requests {waiting} wait, the queues have {found}")


# ---------------------------------------------------------------------------- models, device


def check_models(state: State) -> None:
    """E21, R9.2: an alias points to its ready model; one model at a time has the device."""
    for alias, number in state.aliases.items():
        known = number in state.models and state.models[number].alias == alias
        hold(known, "E21", f"alias {alias!r} points to model/{number}, which is not of it")
    for model in state.models.values():
        served = state.aliases.get(model.alias) == model.number
        right = served == (model.state == "ready")
        hold(right, "E21", f"model/{model.number} is {model.state}, served: {served}")
    hold(len(state.models) <= 1, "R9.2", f"models {sorted(state.models)} hold the device")


def check_end_states(state: State) -> None:
    """I10, G7: a device that is lost or closing has nothing left to do."""
    status = state.device.state
    if status not in ("lost", "closing", "closed"):
        return
    hold(not state.jobs, "I10", f"jobs {sorted(state.jobs)} on a {status} device")
    hold(not state.requests, "G7", f"requests {sorted(state.requests)} were not told")
    hold(not state.aliases, "G7", f"{state.aliases} served by a {status} device")
    held = sorted(n for n, lane in state.lanes.items() if lane.state in ("ready", "reserved"))
    hold(not held, "G7", f"lanes {held} are still held on a {status} device")
    used = sorted(n for n, buffer in state.buffers.items() if buffer.state in BUSY_BUFFERS)
    hold(not used, "G7", f"buffers {used} are still in use on a {status} device")


def check_numbers(state: State) -> None:
    """Decision 9: the next numbers are above all that exist."""
    tables: tuple[tuple[str, Iterable[int], int], ...] = (
        ("request", state.requests, state.next_request),
        ("job", state.jobs, state.next_job),
        ("model", state.models, state.next_model),
        ("lane", state.lanes, state.next_lane),
        ("buffer", state.buffers, state.next_buffer),
        ("epoch", [b.epoch for b in state.buffers.values()], state.next_epoch),
        ("generation", [b.generation for b in state.buffers.values()], state.next_generation),
    )
    for kind, numbers, after in tables:
        late = [number for number in numbers if number >= after]
        hold(not late, "decision 9", f"{kind} {late} although {after} is next")
