"""What must hold after every step, written independently of the code that decides.

``check_state`` looks at one state, ``Ledger`` at the steps that led to it. Each check raises an
AssertionError that names the rule.
"""

from collections import Counter
from collections.abc import Sequence

import attrs

from laneway.engine.ports import Step
from laneway.engine.state import JobState, LaneState, RequestState, State
from laneway.statemachines import Event
from laneway.statemachines.coupling import broken_couplings

IN_FLIGHT = {"planned": ("preparing",), "submitted": ("submitted", "running")}
IN_FLIGHT["uncertain"] = IN_FLIGHT["submitted"]
REQUEST_ENDINGS = ("finish", "cancel", "expire", "fail", "reject")
STALE_QUEUED_MAX = 256


def check_state(state: State) -> None:
    """Hold one state against every invariant of this file."""
    check_lanes(state)
    check_jobs(state)
    check_buffers(state)
    check_requests(state)
    check_queues(state)
    check_models(state)
    check_end_states(state)
    check_numbers(state)


def check_lanes(state: State) -> None:
    """I3: every lane of a configured model is in one of four states, with at most one owner."""
    for model in state.models.values():
        of_model = [lane for lane in state.lanes.values() if lane.model == model.number]
        configured = model.state not in ("validating", "configuring", "failed")
        if configured or of_model:
            assert len(of_model) == model.lane_count, f"I3: model/{model.number} lost a lane"
    owners = Counter((n.origin, n.owner) for n in state.lanes.values() if n.owner is not None)
    assert all(count == 1 for count in owners.values()), f"I3: an owner with two lanes: {owners}"
    for lane in state.lanes.values():
        assert lane.model in state.models, f"I3: lane/{lane.number} outlived its model"
        check_lane(state, lane)


def check_lane(state: State, lane: LaneState) -> None:
    """I3, I4, E19: what a lane's state promises, and that no lane is kept for nobody."""
    name = f"lane/{lane.number} ({lane.state})"
    if lane.state in ("empty", "unknown"):
        assert (lane.owner, lane.job, lane.length_tokens) == (None, None, 0), f"I3: {name}: {lane}"
        assert not lane.due, f"I3: {name} has operations due: {lane.due}"
        named = [job.number for job in state.jobs.values() if lane.number in lanes_of(job)]
        assert not named, f"I4: {name} is named by jobs {named}"
        return
    assert lane.owner is not None, f"I3: {name} has no owner"
    if lane.state == "reserved":
        assert lane.job in state.jobs, f"E19: {name} is reserved for job/{lane.job}, which is gone"
        assert lane.reserved_tokens > lane.length_tokens, f"R7.3: {name} does not grow: {lane}"
        return
    assert lane.state == "ready" and lane.job is None, f"I3: {name} names job/{lane.job}"
    if lane.origin == "request":
        owner = state.requests.get(lane.owner)
        assert owner is not None, f"E19: {name} is kept for request/{lane.owner}, which has ended"
        assert owner.lane == lane.number, f"I3: {name}: request/{owner.number} says {owner.lane}"
    else:
        trial = state.models[lane.model].trial
        assert trial.lane == lane.number, f"I3: {name} is kept for a trial that has {trial.lane}"


def lanes_of(job: JobState) -> list[int]:
    """Return the lanes a job names."""
    return [row.lane for row in job.rows]


def check_jobs(state: State) -> None:
    """I6 and the references between job, buffer, lane and owner."""
    facts = state.device.facts
    if state.jobs:
        assert facts is not None
        ceiling = min(state.limits.inflight_jobs_max, facts.inflight_max, 1)
        assert len(state.jobs) <= ceiling, f"I6: {len(state.jobs)} jobs, at most {ceiling}"
    for number, job in state.jobs.items():
        name = f"job/{number} ({job.state})"
        assert number == job.number and job.state in IN_FLIGHT, f"I6: {name} is terminal, yet here"
        assert job.task in ("prefill", "decode"), f"I6: {name} has task {job.task}"
        buffer = state.buffers[job.buffer]
        assert buffer.job == number, f"E1: {name}: buffer/{buffer.number} says {buffer.job}"
        assert buffer.state in IN_FLIGHT[job.state], f"G13: {name}: buffer is {buffer.state}"
        assert buffer.task == job.task, f"R4.1: {name} in a {buffer.task} buffer"
        key = (buffer.model, buffer.epoch, buffer.generation)
        assert key == (job.model, job.epoch, job.generation), f"G11: {name}: buffer is of {key}"
        lanes = lanes_of(job)
        assert lanes and len(set(lanes)) == len(lanes), f"I6: {name} names lanes {lanes}"
        check_rows(state, job)


def check_rows(state: State, job: JobState) -> None:
    """I4, R7.3: each row's lane is reserved for this job and this owner, from and to as told."""
    for row in job.rows:
        lane = state.lanes[row.lane]
        told = ("reserved", job.number, job.origin, row.owner, row.from_tokens, row.to_tokens)
        is_now = (
            lane.state,
            lane.job,
            lane.origin,
            lane.owner,
            lane.length_tokens,
            lane.reserved_tokens,
        )
        assert is_now == told, f"I4: job/{job.number}: lane/{row.lane} is {is_now}, not {told}"
        if job.origin == "request" and row.owner in state.requests:
            request = state.requests[row.owner]
            assert (request.job, request.lane) == (job.number, row.lane), f"I6: {request}"


def check_buffers(state: State) -> None:
    """E1, E4: a free buffer has no job, a busy one has a live one, a done one has a dead one."""
    for buffer in state.buffers.values():
        name = f"buffer/{buffer.number} ({buffer.state})"
        assert buffer.model in state.models, f"E1: {name} outlived its model"
        if buffer.state == "free":
            assert buffer.job is None, f"E1: {name} names job/{buffer.job}"
        elif buffer.state in ("preparing", "submitted", "running"):
            job = state.jobs.get(buffer.job or 0)
            assert job is not None and job.buffer == buffer.number, f"E1: {name}: {buffer.job}"
        else:
            assert buffer.job is not None, f"E1: {name} forgot its job"
            assert buffer.job not in state.jobs, f"E4: {name}: job/{buffer.job} is not terminal"


def check_requests(state: State) -> None:
    """What a live request holds, and that its KV is exactly as long as what was run."""
    for request in state.requests.values():
        check_request(state, request)
        model = state.models.get(request.model)
        assert model is not None and model.state in ("ready", "draining"), (
            f"I1: request/{request.number} lives on model/{request.model}, which serves nothing"
        )


def check_request(state: State, request: RequestState) -> None:
    """Hold one live request against its lane and job."""
    name = f"request/{request.number} ({request.state})"
    assert len(request.tokens) < request.max_tokens, f"I1: {name} is done but lives"
    if request.state == "waiting":
        held = (request.lane, request.job, request.tokens)
        assert held == (None, None, []), f"R6.2: {name} holds {held}"
        return
    assert request.state in ("prefilling", "decoding"), f"{name}: no fault suspends in this build"
    assert request.lane is not None, f"R6.2: {name} has no lane"
    lane = state.lanes[request.lane]
    assert (lane.origin, lane.owner) == ("request", request.number), f"I3: {name}: {lane}"
    assert lane.job == request.job, f"I6: {name}: job/{request.job}, its lane job/{lane.job}"
    done = len(request.tokens)
    length = 0 if request.state == "prefilling" else len(request.prompt) + done - 1
    assert (done == 0) == (request.state == "prefilling"), f"R6.2: {name} has {done} tokens"
    assert lane.length_tokens == length, f"R7.3: {name}: KV {lane.length_tokens}, not {length}"
    if request.job is not None:
        assert request.job in state.jobs, f"I6: {name} waits for job/{request.job}, which is gone"


def check_queues(state: State) -> None:
    """G9: every request that waits for a turn stands in its queue once, the waiting in order."""
    waiting = [r.number for r in state.requests.values() if r.state == "waiting"]
    queued = [n for n in state.waiting if n in waiting]
    assert queued == sorted(waiting), f"G9: {sorted(waiting)} wait, the queue has {queued}"
    assert state.waiting_requests == len(waiting), f"I8: waiting counted {state.waiting_requests}"
    tokens = sum(len(state.requests[n].prompt) for n in waiting)
    assert state.waiting_tokens == tokens, f"I8: {state.waiting_tokens} tokens, not {tokens}"
    for queue, status in ((state.prefill_again, "prefilling"), (state.decode_ready, "decoding")):
        idle = {r.number for r in state.requests.values() if r.state == status and r.job is None}
        found = Counter(n for n in queue if n in idle)
        assert found == Counter(idle), f"I9: {status} {sorted(idle)}, queued {dict(found)}"
    timed = {n for n, r in state.requests.items() if r.deadline_ns is not None}
    kept = {n for _, n in state.deadlines}
    assert timed <= kept, f"R7.2: deadlines of {timed - kept} are forgotten"
    if state.deadlines:
        assert state.deadlines[0][1] in state.requests, "R7.2: a dead deadline is on top"


def check_models(state: State) -> None:
    """E21: an alias points to a ready model; one model at a time has the device."""
    for alias, number in state.aliases.items():
        model = state.models[number]
        assert (model.alias, model.state) == (alias, "ready"), f"E21: {alias!r} -> {model}"
    for model in state.models.values():
        served = state.aliases.get(model.alias) == model.number
        assert served == (model.state == "ready"), f"E21: model/{model.number} is {model.state}"
    assert len(state.models) <= 1, f"R9.2: {len(state.models)} models hold the device"


def check_end_states(state: State) -> None:
    """G7, I10: a device that is lost or closing has nothing left to do."""
    if state.device.state not in ("lost", "closing", "closed"):
        return
    assert not state.jobs, f"I10: jobs {sorted(state.jobs)} on a {state.device.state} device"
    assert not state.requests, f"G7: requests {sorted(state.requests)} were not told"
    assert not state.aliases, f"G7: {state.aliases} served by a {state.device.state} device"
    held = {lane.state for lane in state.lanes.values()} - {"empty", "unknown"}
    assert not held, f"G7: lanes still {held}"
    used = {buffer.state for buffer in state.buffers.values()}
    assert not used & {"preparing", "submitted", "running"}, f"G7: buffers still {used}"


def check_numbers(state: State) -> None:
    """Decision 9: the next numbers are above all that exist."""
    for table, after in (
        (state.requests, state.next_request),
        (state.jobs, state.next_job),
        (state.models, state.next_model),
        (state.lanes, state.next_lane),
        (state.buffers, state.next_buffer),
    ):
        assert all(number < after for number in table), f"decision 9: {list(table)} < {after}"
    for buffer in state.buffers.values():
        assert buffer.epoch < state.next_epoch and buffer.generation < state.next_generation


@attrs.define
class Ledger:
    """I1, I3 and decision 9 over all steps: births, endings and numbers."""

    at_ns: int = 0
    step: int = 0
    admitted: dict[int, str] = attrs.Factory(dict)
    last: dict[str, int] = attrs.Factory(dict)

    def take(self, step: Step) -> None:
        """Take one more step. Raises: AssertionError naming the rule it breaks."""
        assert step.step == self.step + 1, f"step {step.step} follows {self.step}"
        assert step.at_ns >= self.at_ns, f"decision 8: time fell to {step.at_ns}"
        self.step, self.at_ns = step.step, step.at_ns
        broken = broken_couplings(step.events)
        assert not broken, f"step {step.step} breaks {broken}"
        for event in step.events:
            self._take_event(event)

    def _take_event(self, event: Event) -> None:
        assert len(set(event.entities)) == len(event.entities), f"twice in one event: {event}"
        if event.machine == "request":
            for number in event.entities:
                self._take_request(number, event.trigger)
        elif (event.machine, event.trigger) == ("job", "plan"):
            self._rises("job", event.entities)
        elif (event.machine, event.trigger) == ("model", "load"):
            self._rises("model", event.entities)
        elif (event.machine, event.trigger) == ("model", "accept"):
            self._rises("generation", (event.generation,))
            first, count = event.data["lanes"]
            self._rises("lane", range(first, first + count))
            for _, _, first, count in event.data["buffers"]:
                self._rises("buffer", range(first, first + count))
        elif (event.machine, event.trigger) == ("device", "open"):
            self._rises("epoch", (event.epoch,))
            self._rises("incarnation", (event.data["incarnation"],))

    def _take_request(self, number: int, trigger: str) -> None:
        if trigger in ("admit", "reject"):
            self._rises("request", (number,))
            self.admitted[number] = ""
        if trigger in REQUEST_ENDINGS:
            before = self.admitted.get(number)
            assert before == "", f"I1: request/{number} ends by {trigger} after {before!r}"
            self.admitted[number] = trigger

    def _rises(self, kind: str, numbers: Sequence[int]) -> None:
        for number in numbers:
            assert number == self.last.get(kind, 0) + 1, (
                f"decision 9: {kind} {number} after {self.last.get(kind, 0)}"
            )
            self.last[kind] = number

    def check_all_ended(self) -> None:
        """I1: every request that was accepted or refused has exactly one ending."""
        open_ = [number for number, ending in self.admitted.items() if not ending]
        assert not open_, f"I1: requests {open_} have no ending"
