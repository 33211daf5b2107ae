"""A fault as a person reads it on a terminal, most important first."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from laneway.adapters.exits import one_line
from laneway.engine.inputs import CcuRecord
from laneway.journal.answers import RUNGS
from laneway.journal.faults import counters_text, record_text
from laneway.journal.story import Fate, Line, Story

_STYLES = {"lost": "bold red", "failed": "bold red", "killed": "bold red", "open": "bold yellow"}
_SHOWN_MAX = 12
"""How many of the same kind are named one by one."""


def print_story(console: Console, story: Story) -> None:
    """Print one story: what it was, what answered, who got what, then what led to it."""
    console.print(_head(story), soft_wrap=True)
    for title, body in _parts(story):
        console.print(Text(f"  {title}", style="bold"), soft_wrap=True)
        console.print(body, soft_wrap=not isinstance(body, Table))
    console.print()


def _head(story: Story) -> Group:
    first = story.signals[0]
    row = "" if story.row is None else f", row {story.row}"
    rungs = " -> ".join(f"{rung} {RUNGS[rung]}" for rung in story.rungs)
    return Group(
        Text.assemble(
            (f"fault {story.number}", "bold"),
            f"  {story.kind} of {', '.join(story.decisive.about)}  step {first.step} at"
            f" {first.at_ns / 1e6:.3f} ms  ",
            (story.outcome, _STYLES.get(story.outcome, "bold green")),
            f" after {(story.last_ns - first.at_ns) / 1e6:.3f} ms (step {story.last_step})",
        ),
        _text(f"  because: {story.cause or 'not told'}{row if 'row' not in story.cause else ''}"),
        _text(f"  rung:    {rungs}"),
        _text(f"  next:    {story.next or 'the journal ends first: look again later'}"),
    )


def _parts(story: Story) -> Iterator[tuple[str, RenderableType]]:
    yield "what was told", _signals(story)
    if story.before:
        yield "what led to it", _lines(story.before)
    yield "who held what", _text("\n".join(f"    {line}" for line in _held(story.held)))
    if story.answers:
        yield "what answered", _lines(story.answers)
        left = [line.data["left"] for line in story.answers if "left" in line.data]
        if left:
            yield "budgets left", _text("    " + "; ".join(_left(left[-1])))
    if story.fenced:
        parts = [f"    {done}: {_names(names)}" for done, names in story.fenced.items()]
        yield "what was fenced and mended", _text("\n".join(parts))
    if story.fates:
        yield "what each request got", _fates(story.fates)
    if story.rejected:
        counts = ", ".join(f"{count} {reason}" for reason, count in story.rejected.items())
        yield "turned away meanwhile", _text(f"    {counts}")


def _signals(story: Story) -> Text:
    lines = []
    for signal in story.signals:
        about = ", ".join(signal.about)
        lines.append(f"    {signal.step:>7}  {signal.kind}  {about}: {one_line(signal.text)}")
        if record := signal.details.get("record"):
            lines.append(f"{'':13}record: {one_line(record_text(CcuRecord(**record)))}")
        if health := signal.details.get("health"):
            lines.append(f"{'':13}health {health['state']}, {_counters(health)}")
    return _text("\n".join(lines))


def _counters(health: Mapping[str, Any]) -> str:
    told = counters_text(health["counters"].items())
    return (
        f"sticky {health['sticky']:#06x}, advises {health['advised']}, epoch"
        f" {health['device_epoch']}, bytes {health['used_bytes']}, counters {told or 'not told'}"
    )


def _lines(lines: list[Line]) -> Text:
    """Return one line each; a reason is said where it is new."""
    shown = []
    said = ""
    for line in lines:
        reason = str(line.data.get("reason", ""))
        text = line.text.removesuffix(f": {reason}") if reason and reason == said else line.text
        said = reason or said
        shown.append(f"    {line.step:>7}  {line.at_ns / 1e6:>12.3f} ms  {one_line(text)}")
    return _text("\n".join(shown))


def _held(held: Mapping[str, Any]) -> Iterator[str]:
    device = held["device"]
    models = ", ".join(
        f"model/{one['model']} {one['alias']!r} {one['state']}, generation {one['generation']}"
        for one in held["models"]
    )
    yield f"device/0 {device['state']}, epoch {device['epoch']}; {models or 'no model'}"
    for job in held["jobs"]:
        rows = ", ".join(
            f"lane/{row['lane']} {row['owner']} {row['from_tokens']}->{row['to_tokens']}"
            for row in job["rows"]
        )
        yield (
            f"job/{job['job']} {job['state']}, ticket {job['ticket']}, {job['task']} in"
            f" buffer/{job['buffer']}: {rows}"
        )
    buffers = [f"buffer/{one['buffer']} {one['state']}" for one in held["buffers"]]
    lanes = [
        f"lane/{one['lane']} {one['state']} {one['owner'] or ''} {one['tokens']} tokens"
        for one in held["lanes"]
    ]
    for names in (buffers, lanes):
        if names:
            yield _names(names)


def _left(left: Mapping[str, list[int]]) -> Iterator[str]:
    for rung, (count, most, window_ns) in left.items():
        yield f"{RUNGS[int(rung)]} {count} of {most} in {window_ns // 1_000_000_000} s"


def _fates(fates: list[Fate]) -> Table:
    table = Table("request", "lane", "job", "prompt", "had", "got", "on the way", "ending")
    for fate in fates:
        table.add_row(
            str(fate.request),
            "-" if fate.lane is None else str(fate.lane),
            "-" if fate.job is None else str(fate.job),
            str(fate.prompt_tokens),
            str(fate.tokens_before),
            str(fate.tokens),
            _way(fate),
            _ending(fate),
        )
    return table


def _way(fate: Fate) -> str:
    if not fate.suspended:
        return "not touched"
    how = "abandoned" if fate.suspended == "abandoned" else f"suspended as {fate.suspended}"
    went = f"{how} (step {fate.suspended_step})"
    if fate.resumed_step:
        went += f", resumed{' alone' if fate.alone else ''} (step {fate.resumed_step})"
    return went


def _ending(fate: Fate) -> str:
    if not fate.ending:
        return f"none yet: {fate.state}"
    return f"{fate.ending}: {fate.reason} (step {fate.ended_step})"


def _names(names: list[str]) -> str:
    rest = len(names) - _SHOWN_MAX
    shown = ", ".join(names[:_SHOWN_MAX])
    return shown if rest <= 0 else f"{shown} and {rest} more"


def _text(text: str) -> Text:
    return Text(text)
