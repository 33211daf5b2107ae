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

from collections.abc import Sequence
from typing import Any

import attrs

from laneway.engine.errors import ReplayDivergedError
from laneway.engine.evolve import fold
from laneway.engine.inputs import EngineStarted
from laneway.engine.ladder import PROCESS
from laneway.engine.plan import USABLE
from laneway.engine.ports import Step
from laneway.engine.state import RequestState, State, TrialRun, initial_state
from laneway.journal.answers import note, row_of
from laneway.journal.faults import Signal, signal_of
from laneway.journal.port import ReadableJournal
from laneway.journal.replay import MISFITS
from laneway.journal.story import Fate, Story
from laneway.journal.trail import Trail
from laneway.statemachines import MACHINES, Event, entity_name

_REQUEST_FINAL = MACHINES["request"].final
_LOADING = ("validating", "configuring", "warming", "recovering", "unloading")
_BEYOND = ("suspect", "resetting", "recovering")


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
            note(self.open, step, self.state)
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
            row=row_of(signal.cause),
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
    owners: list[RequestState | TrialRun] = list(state.requests.values())
    for model in state.models.values():
        owners += model.runs.values()
    return bool(
        device.refusals_in_a_row
        or device.backoff_tries
        or (device.counter_differences and device.counters_trusted and device.state in USABLE)
        or any(one.refusals or one.kv_refusals for one in owners)
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
