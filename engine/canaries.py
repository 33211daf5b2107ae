"""Canaries: the golden trials of a model that serves, run again to find silent corruption (E25).

Theory of operation. A canary is one golden trial of a batch that requests ran in; the trials take
turns. It runs as ordinary jobs in lanes of its own, as many as nobody waits for, at least one. One
is due after so many jobs of requests, and a while after the last one if anything was served since
(``Limits``), so an engine without work comes to rest. While requests have work a job of a canary is
followed by one of theirs: each of their turns waits for one more turn at most, and the bounds of
queueing.py at most double while a canary runs. One that began is finished, also while draining.

So what goes wrong in every job is found within ``canary_jobs`` jobs, those until a lane is empty,
and twice its own. What goes wrong now and then is found by the canary that meets it.

A canary that is equal proves the tokens made before it began. One that differs marks all others
since the last good one: in the event, and in the ending that each client is told. If all of its
jobs were alone on the device, the generation is not to be believed (R14.5). If jobs overlapped in
it, the overlap may be to blame (E11): the device falls to one job in flight, the results of request
jobs that are still in flight are taken back and run again, nothing is delivered, and the same
golden runs alone. Equal: service goes on, one in flight. Different, or not to be run: R14.5.

A device that may be given its second job back (trusting.py) runs two golden runs at once in lanes
and buffers of their own, with different prompts where there are two, else one job apart, so that
crossed outputs differ. Two lanes are kept empty for them, and requests wait for the length of it.
Both equal and overlapped: two in flight again.
"""

from collections.abc import Iterator

from laneway.engine.draft import Draft
from laneway.engine.faulting import distrust_generation
from laneway.engine.inputs import RowResult, SubmodelFacts
from laneway.engine.plan import USABLE, Plan, block_of
from laneway.engine.queueing import choose_begun, choose_request
from laneway.engine.reserving import evict
from laneway.engine.state import JobState, ModelState, State, TrialRun
from laneway.engine.trials import plan_run, submodel_of
from laneway.engine.trusting import may_requalify, relax, restrict

PAIR = 2
"""Golden runs at once, before a device has two jobs of requests in flight again."""

# ---------------------------------------------------------------------------- planning


def choose_served(state: State, model: ModelState) -> Plan | None:
    """Return the next job of a model that serves: of a request, or of a canary."""
    canary = model.canary
    if canary.examining:
        return _choose_examiner(state, model)
    if canary.pairing:
        return _choose_pair(state, model)
    if state.alone:
        return choose_request(state, model)  # nothing runs beside a suspect (G15)
    if model.state == "ready" and not model.runs and may_requalify(state):
        chosen = _choose_pair(state, model)
        if chosen is not None or len(model.empty_lanes) < PAIR:
            return chosen or choose_begun(state, model)
    if not model.runs and not is_due(state, model):
        return choose_request(state, model)
    if canary.went:
        return choose_request(state, model) or _choose_canary(state, model)
    return _choose_canary(state, model) or choose_request(state, model)


def is_due(state: State, model: ModelState) -> bool:
    """Return whether a canary is to begin as soon as a lane is free."""
    canary, limits = model.canary, state.limits
    if not canary.jobs or model.state != "ready" or state.closing:
        return False
    if limits.canary_jobs and canary.jobs >= limits.canary_jobs:
        return True
    at_ns = due_ns(state, model)
    return at_ns is not None and at_ns <= state.now_ns


def due_ns(state: State, model: ModelState) -> int | None:
    """Return when the next canary is due by time alone, or None."""
    idle_ns = state.limits.canary_idle_ns
    if not idle_ns or not model.canary.jobs or model.state != "ready" or state.closing:
        return None
    return model.canary.since_ns + idle_ns


def _choose_canary(state: State, model: ModelState) -> Plan | None:
    for run in model.runs.values():
        return None if run.job is not None else plan_run(state, model, run)
    for index in _rotation(model):
        spare = len(model.empty_lanes) - state.waiting_requests
        chosen = _begin(state, model, index, lanes=max(spare, 1))
        if chosen is not None:
            return chosen
    return None


def _choose_examiner(state: State, model: ModelState) -> Plan | None:
    """Return the next job of the golden run that decides, once nothing else is in flight."""
    canary = model.canary
    if state.jobs:
        return None
    if canary.examiner is None:
        trial = _examined_trial(model)
        assert trial is not None
        return _begin(state, model, trial, lanes=len(model.empty_lanes))
    run = model.runs.get(canary.examiner)
    return None if run is None else plan_run(state, model, run)


def _choose_pair(state: State, model: ModelState) -> Plan | None:
    """Return the next job of two golden runs that are in flight at once."""
    pairing = model.canary.pairing
    runs = [model.runs[number] for number in pairing if number in model.runs]
    if len(pairing) == 1 and runs:
        chosen = _begin_second(state, model, runs[0])
        if chosen is not None:
            return chosen
    for run in runs:
        if run.job is None:
            return plan_run(state, model, run)
    if pairing:
        return None
    half = len(model.empty_lanes) // 2
    begun = (_begin(state, model, index, lanes=half, pair=True) for index in _rotation(model))
    return next((chosen for chosen in begun if chosen is not None), None)


def _begin_second(state: State, model: ModelState, first: TrialRun) -> Plan | None:
    """Return the first job of the second run; with the same prompt it stays one job behind."""
    assert model.facts is not None
    trials = model.facts.trials
    prompt = trials[first.trial].prompt
    others = [index for index in _rotation(model) if trials[index].prompt != prompt]
    if not others and not first.done_tokens:
        return None
    index = others[0] if others else first.trial
    return _begin(state, model, index, lanes=len(model.empty_lanes), pair=True)


def _rotation(model: ModelState) -> Iterator[int]:
    """Yield the golden trials of the batches in use, those after the last one's first."""
    assert model.facts is not None
    trials, canary = model.facts.trials, model.canary
    golden = [index for index, trial in enumerate(trials) if trial.origin == "golden"]
    used = [index for index in golden if trials[index].batch in canary.batches] or golden
    yield from sorted(used, key=lambda index: (index <= canary.trial, index))


def _begin(
    state: State, model: ModelState, index: int, *, lanes: int, pair: bool = False
) -> Plan | None:
    taken = _lanes(state, model, index, most=lanes)
    if not taken:
        return None
    run = TrialRun(number=model.next_run, trial=index, origin="canary")
    return plan_run(state, model, run, begin=taken, pair=pair)


def _lanes(state: State, model: ModelState, index: int, *, most: int) -> tuple[int, ...]:
    """Return the empty lanes that a trial may run in now, as many as may be; none if it may not.

    Where nothing certain is said of inactive rows it needs a whole batch, and where rows are fixed
    to lanes they are of one block (E15).
    """
    assert model.facts is not None
    trial = model.facts.trials[index]
    tasks = (("prefill", len(trial.prompt)), ("decode", 1))
    for rows in range(min(trial.batch, most, len(model.empty_lanes)), 0, -1):
        sizes = [submodel_of(state, model, trial, t, tokens=n, rows=rows) for t, n in tasks]
        found = _together(model, [size for size in sizes if size is not None], rows)
        if None not in sizes and found:
            return found
    return ()


def _together(model: ModelState, sizes: list[SubmodelFacts], rows: int) -> tuple[int, ...]:
    """Return the lowest empty lanes that may share each job of a run, or none."""
    blocks: dict[tuple[int, ...], list[int]] = {}
    for lane in sorted(model.empty_lanes):
        block = tuple(block_of(model, size, lane) for size in sizes)
        blocks.setdefault(block, []).append(lane)
    whole = (lanes for lanes in blocks.values() if len(lanes) >= rows)
    return tuple(next(whole, [])[:rows])


# ---------------------------------------------------------------------------- judging


def judge_canary(draft: Draft, job: JobState, results: tuple[RowResult, ...]) -> None:
    """Hold a job of a canary against its golden rows; act on the verdict of the run."""
    model = draft.state.models[job.model]
    run = model.runs.get(job.rows[0].owner)
    if run is None:
        return  # its lanes are in doubt, and it left with them
    canary = model.canary
    if canary.examining and run.number != canary.examiner:
        drop_run(draft, model, run)
        return
    assert model.facts is not None
    for row, result in zip(job.rows, results, strict=True):
        if result.verdict not in ("", "equal"):
            said = f"canary of trial {run.trial} at position {row.to_tokens - 1}: {result.verdict}"
            _differ(draft, model, run, said)
            return
    lanes = [draft.state.lanes[row.lane] for row in job.rows]
    if any(lane.state != "ready" or lane.length_tokens != run.done_tokens for lane in lanes):
        drop_run(draft, model, run)
        return
    trial = model.facts.trials[run.trial]
    if run.done_tokens == len(trial.prompt) + len(trial.forced):
        drop_run(draft, model, run)
        _agree(draft, model, run)


def _agree(draft: Draft, model: ModelState, run: TrialRun) -> None:
    """Believe what was served before a run that was equal."""
    data = {"run": run.number, "trial": run.trial, "overlapped": run.overlapped}
    trigger = "acquit" if model.canary.examining else "prove"
    draft.emit("model", model.number, trigger, generation=model.generation, data=data)
    if model.canary.paired == PAIR and draft.state.device.state == "serving":
        relax(draft)


def _differ(draft: Draft, model: ModelState, run: TrialRun, reason: str) -> None:
    """Mark what nobody proved, then examine the generation, or believe nothing of it."""
    state, canary = draft.state, model.canary
    overlapped = run.overlapped
    live = [one for one in state.requests.values() if one.model == model.number]
    data = {
        "run": run.number,
        "trial": run.trial,
        "overlapped": overlapped,
        "reason": reason,
        "requests": [
            [one.number, one.proven_tokens] for one in live if len(one.tokens) > one.proven_tokens
        ],
        "ended": [list(pair) for pair in (*canary.ended_before, *canary.ended)],
    }
    draft.emit("model", model.number, "mark", generation=model.generation, data=data)
    examined = run.number == canary.examiner
    for other in list(model.runs.values()):
        if other.job is None:
            drop_run(draft, model, other)
    if examined or not overlapped:
        distrust_generation(draft, model, reason)
        return
    examine(draft, model, f"{reason}, while two jobs overlapped")


def may_examine(state: State, model: ModelState) -> bool:
    """Return whether a golden run alone can decide about the generation of a model now."""
    served = model.state in ("ready", "draining") and not model.canary.examining
    return served and state.device.state in USABLE and _examined_trial(model) is not None


def examine(draft: Draft, model: ModelState, reason: str) -> None:
    """Believe nothing of a generation until a golden run alone has decided (E11, R14.5)."""
    restrict(draft, reason)
    data = {"reason": reason}
    draft.emit("model", model.number, "examine", generation=model.generation, data=data)


def _examined_trial(model: ModelState) -> int | None:
    """Return the trial that decides: the one that differed, else the next golden one, or None."""
    return model.canary.trial if model.canary.trial >= 0 else next(_rotation(model), None)


def drop_run(draft: Draft, model: ModelState, run: TrialRun) -> None:
    """Give the lanes of a run back that it still has; what is unknown waits (E19, G8)."""
    lanes = draft.state.lanes
    mine = [n for n in run.lanes if lanes[n].state == "ready" and lanes[n].owner == run.number]
    if mine:
        evict(draft, tuple(mine))


def drop_broken_runs(draft: Draft, model: ModelState) -> None:
    """Give up every run of a canary that lost a lane."""
    for run in list(model.runs.values()):
        broken = any(draft.state.lanes[number].state == "unknown" for number in run.lanes)
        if run.origin == "canary" and broken and run.job is None:
            drop_run(draft, model, run)


# ---------------------------------------------------------------------------- examining


def is_withheld(state: State, job: JobState) -> bool:
    """Return whether a job's results are taken back: its generation is being examined."""
    return job.origin == "request" and state.models[job.model].canary.examining


def is_examining(state: State) -> bool:
    """Return whether a golden run alone is to decide whether a generation is believed."""
    return any(model.canary.examining for model in state.models.values())


def settle_runs(draft: Draft) -> None:
    """Draw the conclusion where golden runs that something hangs on cannot be run to their end."""
    state = draft.state
    if state.jobs or state.ladder.recovery is not None:
        return  # they go on, or end with their generation
    for model in list(state.models.values()):
        canary = model.canary
        if not (canary.examining or canary.pairing):
            continue
        if canary.pairing and not model.runs:
            restrict(draft, "two golden runs in flight at once did not both end equal")
        elif canary.examining and not _has_examiner(state, model):
            reason = "a canary differed, and the golden run that was to decide could not be run"
            distrust_generation(draft, model, reason)


def _has_examiner(state: State, model: ModelState) -> bool:
    canary = model.canary
    if canary.examiner is not None:
        return canary.examiner in model.runs
    trial = _examined_trial(model)
    return trial is not None and bool(_lanes(state, model, trial, most=len(model.empty_lanes)))
