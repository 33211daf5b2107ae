"""Explain the faults of a journal: what led to each, who held what, what answered, who got what.

Theory of operation. The steps are folded as the engine did; beside it a trail keeps the latest
steps of what lives. The first step that says that something went wrong opens a story, which takes
in all further signals and answers until nothing of it is pending any more: the device serves
again, or is lost, refusals are over, a load has its end. Requests that lived at the fault are
followed to their endings, also beyond the end of the story. Nothing is taken from anywhere but the
steps.

A start in a journal whose engine did not close is a fault too: the process was killed (G21).

Source: R14, R18.5, decision 16.
"""

import re
from collections.abc import Sequence
from typing import Any

import attrs

from laneway.engine.errors import ReplayDivergedError
from laneway.engine.evolve import fold
from laneway.engine.inputs import EngineStarted, ResetFinished
from laneway.engine.ladder import CCU, PROCESS, budget, within
from laneway.engine.plan import USABLE
from laneway.engine.ports import Step
from laneway.engine.state import State, initial_state
from laneway.journal.faults import Signal, health_json, health_text, signal_of
from laneway.journal.port import ReadableJournal
from laneway.journal.replay import MISFITS
from laneway.journal.story import Fate, Line, Story
from laneway.journal.trail import Trail
from laneway.statemachines import MACHINES, Event, entity_name

RUNGS = {
    0: "queue, refuse or wait",
    1: "end one job",
    2: "quarantine",
    3: "cancel",
    4: "reset of the CCU",
    5: "reset of the configuration",
    6: "reset of the device",
    7: "new process",
    8: "out of rotation",
}
_REQUEST_FINAL = MACHINES["request"].final
_LOADING = ("validating", "configuring", "warming", "recovering", "unloading")
_BEYOND = ("suspect", "resetting", "recovering")
_FENCES = {
    ("buffer", "quarantined"): "quarantined",
    ("lane", "unknown"): "unknown",
}
_MENDS = {("buffer", "rebuild"): "rebuilt", ("lane", "clear"): "cleared"}


@attrs.frozen(kw_only=True)
class Explanation:
    """The stories of all faults in order, and where the journal ends."""

    stories: tuple[Story, ...]
    steps: int
    device: str


def explain(journal: ReadableJournal) -> Explanation:
    """Tell every fault of a journal.

    Raises: JournalFormatError; ReplayDivergedError when the events do not fit.
    """
    told = _Explainer()
    for step in journal.read():
        try:
            told.take(step)
        except MISFITS as error:
            raise ReplayDivergedError(
                f"step {step.step} cannot be explained, its events do not fit: {error}",
                step=step.step,
            ) from error
    return Explanation(
        stories=tuple(told.stories), steps=told.state.step, device=told.state.device.state
    )


def nearest(stories: Sequence[Story], step: int) -> Story | None:
    """Return the story that a step belongs to, or the last one that began before it."""
    begun = [one for one in stories if one.signals[0].step <= step]
    return begun[-1] if begun else None


@attrs.define
class _Explainer:
    """The fold: the engine's state, the trail, the stories; at most one of them is open."""

    state: State = attrs.Factory(initial_state)
    trail: Trail = attrs.Factory(Trail)
    stories: list[Story] = attrs.Factory(list)
    open: Story | None = None
    followed: dict[int, list[Fate]] = attrs.Factory(dict)

    def take(self, step: Step) -> None:
        """Take one more step, the next one."""
        signal = signal_of(step, self.state, inside=self.open is not None)
        if isinstance(step.taken, EngineStarted) and self.open is not None:
            self._end("killed", step)
        if signal is not None:
            self._hear(signal)
        fold(self.state, step)
        self.trail.take(step)
        for event in step.events:
            if event.machine == "request" and self.followed:
                self._follow(step, event)
        if self.open is not None:
            _note(self.open, step, self.state)
            outcome = _outcome(self.open, step, self.state)
            if outcome:
                self._end(outcome, step)

    def _hear(self, signal: Signal) -> None:
        story = self.open
        if story is None and self.stories and self.state.device.state in ("lost", "closing"):
            story = self.stories[-1] if signal.kind != "killed" else None
        if story is not None:
            story.signals.append(signal)
            return
        jobs = [int(name[4:]) for name in signal.about if name.startswith("job/")]
        jobs = [number for number in jobs if number in self.state.jobs] or list(self.state.jobs)
        lanes = [int(name[5:]) for name in signal.about if name.startswith("lane/")]
        lanes += [row.lane for number in jobs for row in self.state.jobs[number].rows]
        fates = _fates(self.state)
        self.open = Story(
            number=len(self.stories) + 1,
            signals=[signal],
            before=self.trail.lines(jobs, lanes),
            held=_held(self.state),
            fates=fates,
            cause=signal.cause,
            rungs=[signal.rung],
            row=_row_of(signal.cause),
        )
        self.stories.append(self.open)
        for fate in fates:
            self.followed.setdefault(fate.request, []).append(fate)

    def _end(self, outcome: str, step: Step) -> None:
        story, self.open = self.open, None
        assert story is not None
        story.outcome = outcome
        story.next = _what_next(story, outcome)

    def _follow(self, step: Step, event: Event) -> None:
        for number in event.entities:
            for fate in self.followed.get(number, ()):
                _move_fate(fate, step, event, self.state)
            if event.dest in _REQUEST_FINAL:
                self.followed.pop(number, None)


# ---------------------------------------------------------------------------- who held what


def _fates(state: State) -> list[Fate]:
    return [
        Fate(
            request=request.number,
            state=request.state,
            prompt_tokens=len(request.prompt),
            tokens_before=len(request.tokens),
            tokens=len(request.tokens),
            lane=request.lane,
            job=request.job,
        )
        for request in state.requests.values()
    ]


def _held(state: State) -> dict[str, Any]:
    """Return who held what: jobs, buffers that are not free, lanes that are not empty, models."""
    jobs = [
        {
            "job": job.number,
            "state": job.state,
            "task": job.task,
            "origin": job.origin,
            "ticket": job.ticket,
            "model": job.model,
            "buffer": job.buffer,
            "epoch": job.epoch,
            "generation": job.generation,
            "planned_ns": job.planned_ns,
            "rows": [
                {
                    "lane": row.lane,
                    "owner": f"{job.origin}/{row.owner}",
                    "from_tokens": row.from_tokens,
                    "to_tokens": row.to_tokens,
                }
                for row in job.rows
            ],
        }
        for job in state.jobs.values()
    ]
    buffers = [
        {"buffer": one.number, "state": one.state, "job": one.job, "submodel": one.submodel}
        for one in state.buffers.values()
        if one.state != "free"
    ]
    lanes = [
        {
            "lane": lane.number,
            "state": lane.state,
            "owner": None if lane.owner is None else f"{lane.origin}/{lane.owner}",
            "tokens": lane.length_tokens,
        }
        for lane in state.lanes.values()
        if lane.state != "empty"
    ]
    models = [
        {
            "model": model.number,
            "alias": model.alias,
            "state": model.state,
            "generation": model.generation,
        }
        for model in state.models.values()
    ]
    device = {"state": state.device.state, "epoch": state.device.epoch}
    return {
        "device": device | {"reason": state.device.reason},
        "models": models,
        "jobs": jobs,
        "buffers": buffers,
        "lanes": lanes,
    }


def _move_fate(fate: Fate, step: Step, event: Event, state: State) -> None:
    if event.trigger == "suspend":
        fate.suspended = "suspect" if event.data["suspect"] else "innocent"
        fate.suspended_step = step.step
        fate.tokens = event.data["tokens"]
    elif event.trigger == "resume":
        fate.resumed_step = step.step
        fate.alone = bool(event.data["alone"])
    elif event.trigger == "abandon":
        fate.suspended, fate.suspended_step = "abandoned", step.step
    elif event.dest in _REQUEST_FINAL:
        fate.ending, fate.reason = event.trigger, str(event.data["reason"])
        fate.ended_step, fate.ended_ns = step.step, step.at_ns
        fate.tokens = event.data["tokens"]
        return
    if fate.request in state.requests:
        fate.state = state.requests[fate.request].state


# ---------------------------------------------------------------------------- what answered


def _note(story: Story, step: Step, state: State) -> None:
    """Take what a step of the story did: the ladder's moves, what was fenced and mended."""
    story.last_step, story.last_ns = step.step, step.at_ns
    if isinstance(step.taken, ResetFinished):
        story.answers.append(_report(step, step.taken))
    for event in step.events:
        if event.machine == "device":
            story.answers.append(_device_move(step, event, state))
            if event.trigger in ("escalate", "lose"):
                _climb(story, event)
        elif event.machine == "model":
            names = ", ".join(entity_name("model", number) for number in event.entities)
            reason = str(event.data.get("reason", ""))
            text = f"{names} {event.trigger}, generation {event.generation}"
            moved = _line(step, f"model {event.trigger}", _because(text, reason), dict(event.data))
            story.answers.append(moved)
        elif event.machine == "job" and event.trigger == "recall":
            text = f"job/{event.entities[0]}: the device is asked to end it (rung 3)"
            story.answers.append(_line(step, "recall", text, dict(event.data)))
        elif event.machine == "job":
            _fence_jobs(story, event)
        elif event.machine == "request" and event.trigger == "reject":
            reason = str(event.data["reason"])
            story.rejected[reason] = story.rejected.get(reason, 0) + 1
        else:
            _fence(story, event)


def _climb(story: Story, event: Event) -> None:
    """Take the rung that the ladder chose; the first one names the row, instead of the signal."""
    first = all(line.what not in ("escalate", "lose") for line in story.answers[:-1])
    if first:
        story.rungs.clear()
        decisive = story.decisive.cause or "device lost (row 16)"
        story.cause = str(event.data.get("cause", decisive))
        story.row = _row_of(story.cause)
    if story.rungs[-1:] != [event.data["rung"]]:
        story.rungs.append(event.data["rung"])
    if event.trigger == "lose":
        story.reason = event.data["reason"]


def _row_of(cause: str) -> int | None:
    named = re.search(r"\(row (\d+)\)", cause)
    return int(named[1]) if named else None


def _fence(story: Story, event: Event) -> None:
    done = _FENCES.get((event.machine, event.dest)) or _MENDS.get((event.machine, event.trigger))
    if done is None and (event.machine, event.trigger) == ("lane", "rollback"):
        done = "rolled back"
    if done is not None:
        names = [entity_name(event.machine, number) for number in event.entities]
        story.fenced.setdefault(done, []).extend(names)


def _fence_jobs(story: Story, event: Event) -> None:
    if event.dest in MACHINES["job"].final and event.trigger != "complete":
        names = [entity_name("job", number) for number in event.entities]
        story.fenced.setdefault(event.dest, []).extend(names)


def _device_move(step: Step, event: Event, state: State) -> Line:
    data = dict(event.data)
    reason = str(data.get("reason", data.get("why", "")))
    text = event.trigger
    if event.trigger == "escalate":
        waits = "pause" if data.get("pausing") else "watch" if data.get("watching") else "drain"
        text = f"rung {data['rung']} ({RUNGS[data['rung']]}): {data['cause']}"
        if data.get("until_ns"):
            text += f"; {waits} until {data['until_ns'] / 1e6:.3f} ms at most"
        data["left"] = budgets_left(state)
    elif event.trigger == "reset":
        jobs = ", ".join(f"job/{job} (ticket {ticket})" for job, ticket in data["jobs"])
        text = f"reset of level {data['level']} asked for, in flight: {jobs or 'nothing'}"
        data["left"] = budgets_left(state)
        data["breaker"] = state.ladder.breaker
    elif event.trigger == "lose":
        text = f"lost, rung {data['rung']} ({RUNGS[data['rung']]})"
        data["left"] = budgets_left(state)
    elif event.trigger == "restrict":
        text = "one job in flight from here on"
    elif event.trigger == "distrust":
        text = f"counters are not trusted any more: {data['counters']}"
    return _line(step, event.trigger, _because(text, reason), data)


def budgets_left(state: State) -> dict[str, list[int]]:
    """Return what is left of each budget, as rung: [left, of how many, in ns]."""
    left: dict[str, list[int]] = {}
    for rung in range(CCU, PROCESS + 1):
        allowed = budget(state.limits, rung)
        used = within(state.ladder.attempts.get(rung, ()), state.now_ns, allowed.window_ns)
        left[str(rung)] = [max(0, allowed.count - len(used)), allowed.count, allowed.window_ns]
    return left


def _report(step: Step, taken: ResetFinished) -> Line:
    """Tell the report of a reset, and whether it was believed."""
    refused = next(
        (
            str(event.data["reason"])
            for event in step.events
            if event.machine == "device" and event.trigger in ("escalate", "lose")
        ),
        "",
    )
    flags = [name for name in ("quiesced", "verified", "wider") if getattr(taken, name)]
    text = (
        f"reset of level {taken.level} came back with {taken.code:#06x}"
        f"{f' ({taken.reason})' if taken.reason else ''} after {taken.duration_ns / 1e6:.3f} ms:"
        f" {', '.join(flags) or 'no claims'}; {taken.jobs_aborted} jobs aborted,"
        f" {taken.jobs_unaccounted} unaccounted for; epoch {taken.epoch_before} ->"
        f" {taken.epoch_after}; bytes {list(taken.used_bytes_before)} ->"
        f" {list(taken.used_bytes_after)}; {health_text(taken.health)};"
        f" {f'not believed: {refused}' if refused else 'believed'}"
    )
    report = {
        "level": taken.level,
        "code": taken.code,
        "reason": taken.reason,
        "quiesced": taken.quiesced,
        "verified": taken.verified,
        "wider": taken.wider,
        "jobs_aborted": taken.jobs_aborted,
        "jobs_unaccounted": taken.jobs_unaccounted,
        "epoch_before": taken.epoch_before,
        "epoch_after": taken.epoch_after,
        "used_bytes_before": list(taken.used_bytes_before),
        "used_bytes_after": list(taken.used_bytes_after),
        "health_before": health_json(taken.health_before),
        "health": health_json(taken.health),
        "duration_ns": taken.duration_ns,
        "refused": refused,
    }
    return _line(step, "report", text, report)


def _line(step: Step, what: str, text: str, data: dict[str, Any] | None = None) -> Line:
    return Line(step=step.step, at_ns=step.at_ns, what=what, text=text, data=data or {})


def _because(text: str, reason: str) -> str:
    return f"{text}: {reason}" if reason else text


# ---------------------------------------------------------------------------- how it ended


def _outcome(story: Story, step: Step, state: State) -> str:
    """Return how the story ended with this step, or "" while something of it is pending."""
    device = state.device
    if device.state == "lost":
        return "lost"
    if device.state in ("closing", "closed"):
        return "closed"
    if device.state in _BEYOND or _is_refused(state) or _is_loading(story, state):
        return ""
    if state.suspended or any(model.canary.examining for model in state.models.values()):
        return ""
    done = [line.what for line in story.answers]
    if story.signals[0].kind == "killed":
        return "restarted"
    for what, outcome in (
        ("serve", "recovered"),
        ("distrust", "distrusted"),
        ("absolve", "absolved"),
        ("restrict", "restricted"),
    ):
        if what in done:
            return "degraded" if device.state == "degraded" else outcome
    if any(what in ("model fail", "model refuse") for what in done):
        return "failed"
    return "degraded" if device.state == "degraded" else "went on"


def _is_refused(state: State) -> bool:
    """Return whether a refusal, a doubt or a difference of the counters is still open."""
    device = state.device
    runs = [run for model in state.models.values() for run in model.runs.values()]
    return bool(
        device.refusals_in_a_row
        or device.backoff_tries
        or (device.counter_differences and device.counters_trusted and device.state in USABLE)
        or any(one.refusals or one.kv_refusals for one in (*state.requests.values(), *runs))
        or any(job.state == "uncertain" for job in state.jobs.values())
    )


def _is_loading(story: Story, state: State) -> bool:
    """Return whether a load or release that a signal is about has not ended yet."""
    names = {name for signal in story.signals for name in signal.about}
    names |= {line.text.split(" ", 1)[0] for line in story.answers if line.what == "model fail"}
    return any(
        entity_name("model", model.number) in names
        and (model.state in _LOADING or model.releasing or bool(model.reread_ns))
        for model in state.models.values()
    )


def _what_next(story: Story, outcome: str) -> str:
    if outcome == "lost" and story.rungs[-1] == PROCESS:
        return (
            "start a new process on the same journal: only that brings the device back (exit code"
            " 75 asks a supervisor for it)"
        )
    if outcome == "lost":
        return f"an operator has to look before the device is opened again: {story.reason}"
    if outcome == "degraded":
        return (
            "nothing at once: one job at a time until the generation ends; unload and load give"
            " the rest back"
        )
    if outcome == "distrusted":
        return "nothing at once: one job in flight until the device is opened again"
    if outcome == "restricted":
        return "nothing: one job in flight until canaries have proved the device again"
    if outcome == "failed":
        return "mend what the load failed of, then load again"
    if outcome == "killed":
        return "the next fault tells what the start after it found"
    return "nothing"
