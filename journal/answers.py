"""What answered a fault: the moves of the ladder, reports of resets, what was fenced and mended."""

import re
from typing import Any

from laneway.engine.inputs import CancelTold, ResetFinished
from laneway.engine.ladder import CCU, PROCESS, budget, within
from laneway.engine.ports import Step
from laneway.engine.state import State
from laneway.journal.faults import health_json, health_text
from laneway.journal.story import Line, Story
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
"""The rungs of the ladder in words."""

_FENCES = {
    ("buffer", "quarantined"): "quarantined",
    ("lane", "unknown"): "unknown",
}
_MENDS = {("buffer", "rebuild"): "rebuilt", ("lane", "clear"): "cleared"}


def note(story: Story, step: Step, state: State) -> None:
    """Take what a step of the story did: the ladder's moves, what was fenced and mended."""
    story.last_step, story.last_ns = step.step, step.at_ns
    if isinstance(step.taken, ResetFinished):
        story.answers.append(_report(step, step.taken))
    elif isinstance(step.taken, CancelTold):
        said = (
            "will be ended" if step.taken.code == 0 else f"will not be ended: {step.taken.reason}"
        )
        text = f"job/{step.taken.job}, asked to be ended: it {said}"
        story.answers.append(_line(step, "cancel", text, {"code": step.taken.code}))
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
        story.row = row_of(story.cause)
    if story.rungs[-1:] != [event.data["rung"]]:
        story.rungs.append(event.data["rung"])
    if event.trigger == "lose":
        story.reason = event.data["reason"]


def row_of(cause: str) -> int | None:
    """Return the row that a cause names, None where it names none."""
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
