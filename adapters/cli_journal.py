"""``laneway journal``: look into a journal, fold it, prove it, copy it."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import msgspec
import typer
from rich.table import Table

from laneway.adapters.exits import ANSWER_IS_NO, DONE
from laneway.adapters.metrics_table import metrics_table
from laneway.adapters.screen import wide_console
from laneway.engine.snapshot import take_snapshot
from laneway.engine.state import JobState, State
from laneway.statemachines import MACHINES

if TYPE_CHECKING:
    from laneway.journal import ReadableJournal
    from laneway.journal.replay import VerifyReport

app = typer.Typer(
    help="""Look into a journal, fold it, prove it, copy it.

    Examples: laneway journal stats run.db

    laneway journal verify run.db
    """,
    no_args_is_help=True,
)

File = Annotated[str, typer.Argument(help="Journal file.")]
Json = Annotated[bool, typer.Option("--json", help="JSON lines.")]


@contextmanager
def _reading(file: str) -> Iterator["ReadableJournal"]:
    from laneway.journal import open_journal

    journal = open_journal(file, read_only=True)
    try:
        yield journal
    finally:
        journal.close()


def _ns(option: str, time_ms: float) -> int:
    if not math.isfinite(time_ms):
        raise typer.BadParameter(f"{option} wants a time in milliseconds, not {time_ms}")
    return int(time_ms * 1e6)


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.3f}"


@app.command("show")
def show_steps(
    file: File,
    request: Annotated[int | None, typer.Option(help="Steps of this request.")] = None,
    job: Annotated[int | None, typer.Option(help="Steps of this job.")] = None,
    lane: Annotated[int | None, typer.Option(help="Steps of this lane.")] = None,
    buffer: Annotated[int | None, typer.Option(help="Steps of this buffer.")] = None,
    model: Annotated[int | None, typer.Option(help="Steps of this model.")] = None,
    device: Annotated[int | None, typer.Option(help="Steps of this device (0).")] = None,
    trigger: Annotated[str | None, typer.Option(help="Steps with this trigger.")] = None,
    kind: Annotated[str | None, typer.Option("--input", help="Steps of this input kind.")] = None,
    first: Annotated[int, typer.Option(help="From this step.")] = 1,
    last: Annotated[int | None, typer.Option(help="To this step.")] = None,
    from_ms: Annotated[float, typer.Option(help="From this engine time.")] = 0.0,
    until_ms: Annotated[float | None, typer.Option(help="To this engine time.")] = None,
    details: Annotated[
        bool, typer.Option("--details", help="The input's fields; always with --input.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show steps: the input, and the events that were decided. All filters must pass.

    Examples:
        laneway journal show run.db --request 2

        laneway journal show run.db --trigger quarantine

        laneway journal show run.db --input DeviceFaulted --json

    """
    from laneway.journal.codec import KINDS
    from laneway.journal.timeline import show, step_record

    from_ns = _ns("--from-ms", from_ms)
    until_ns = None if until_ms is None else _ns("--until-ms", until_ms)
    if kind is not None and kind not in KINDS:
        raise typer.BadParameter(f"--input {kind}: one of {', '.join(KINDS)} is wanted")
    triggers = sorted({name for machine in MACHINES.values() for _, name in machine.table})
    if trigger is not None and trigger not in triggers:
        raise typer.BadParameter(f"--trigger {trigger}: one of {', '.join(triggers)} is wanted")
    with _reading(file) as journal:
        steps = show(
            journal,
            request=request,
            job=job,
            lane=lane,
            buffer=buffer,
            model=model,
            device=device,
            trigger=trigger,
            input_kind=kind,
            first=first,
            last=last,
            from_ns=from_ns,
            until_ns=until_ns,
        )
        if as_json:
            for step in steps:
                print(json.dumps(step_record(step)))
            return
        for record in map(step_record, steps):
            print(f"{record['step']:>7}  {_ms(record['at_ns']):>12} ms  {record['input_kind']}")
            if details or kind is not None:
                _tell_fields(record["input"])
            for event in record["events"]:
                names = ", ".join(event["entities"])
                reason = event["data"].get("reason")
                because = f"  ({reason})" if reason else ""
                moved = f"{event['trigger']}: {event['source']} -> {event['dest']}"
                print(f"{'':24}{names} {moved}{because}")


def _tell_fields(fields: dict[str, Any], *, indent: int = 12) -> None:
    """Print what an input says, one field a line, leaving out what is empty."""
    for name, value in fields.items():
        if isinstance(value, dict):
            print(f"{'':{indent}}{name}:")
            _tell_fields(value, indent=indent + 2)
        elif value not in (None, "", 0, [], ()):
            print(f"{'':{indent}}{name}: {value}")


@app.command("stats")
def show_stats(file: File, as_json: Json = False) -> None:
    """Sum a journal up: rows, incarnations, endings, tokens, events, faults, metrics.

    The metrics are those that the engine had after the last step. Percentiles are estimated from
    buckets.

    Examples:
        laneway journal stats run.db

    """
    from laneway.journal.stats import stats

    with _reading(file) as journal:
        sums = stats(journal)
    if as_json:
        print(json.dumps(sums))
        return
    table = Table("what", "how many", title=f"journal {sums['journal_id']}")
    for name in ("steps", "incarnations", "entity_events", "tokens", "bytes"):
        table.add_row(name, str(sums[name]))
    table.add_row("span", f"{_ms(sums['last_ns'] - sums['first_ns'])} ms")
    table.add_row("requests", _counts(sums["requests"]))
    for machine, events in sums["events"].items():
        table.add_row(f"{machine} events", _counts(events))
    table.add_row("faults", _counts(sums["faults"]) or "none")
    wide_console().print(table)
    wide_console().print(metrics_table(sums["metrics"]))


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


@app.command("timeline")
def show_timeline(
    file: File,
    entity: Annotated[str, typer.Argument(help="Such as buffer/1, request/5, job/17, device/0.")],
    as_json: Json = False,
) -> None:
    """Show the life of one entity with time differences.

    Examples:
        laneway journal timeline run.db buffer/1

        laneway journal timeline run.db request/2

    """
    from laneway.journal.timeline import timeline

    with _reading(file) as journal:
        moments = timeline(journal, entity)
        if as_json:
            for moment in moments:
                print(json.dumps(moment.to_json()))
            return
        table = Table("step", "at ms", "+ ms", "input", "trigger", "from", "to", "with")
        for moment in moments:
            table.add_row(
                str(moment.step),
                _ms(moment.at_ns),
                _ms(moment.since_ns),
                moment.input_kind,
                moment.trigger or "-",
                moment.source,
                moment.dest,
                ", ".join(moment.related),
            )
    wide_console().print(table if table.row_count else f"{entity} is not in this journal")


@app.command("explain")
def explain_faults(
    file: File,
    step: Annotated[
        int | None, typer.Option(help="The fault that this step belongs to, or the last before it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain faults: what led to each, who held what, which rung answered, who got what.

    One story a fault, from the steps alone; with --json one object a fault.

    Examples:
        laneway journal explain run.db

        laneway journal explain run.db --step 43 --json

    """
    from laneway.adapters.fault_stories import print_story
    from laneway.journal.explain import explain, nearest

    with _reading(file) as journal:
        last, _ = journal.head()
        if step is not None and not 1 <= step <= last:
            raise typer.BadParameter(f"--step {step}: the journal has steps 1 to {last}")
        told = explain(journal)
    stories = list(told.stories)
    if step is not None:
        found = nearest(stories, step)
        stories = [] if found is None else [found]
    if as_json:
        for story in stories:
            print(json.dumps(story.to_json()))
        return
    for story in stories:
        print_story(wide_console(), story)
    where = "" if step is None else f" up to step {step}"
    print(f"{len(stories) or 'no'} fault{'s' * (len(stories) != 1)}{where}, {told.steps} steps")
    if told.device != "closed":
        print(f"the last step leaves the device {told.device}: the engine runs, or was killed")


@app.command()
def replay(
    file: File,
    until: Annotated[int | None, typer.Option(help="Fold up to this step.")] = None,
    state: Annotated[bool, typer.Option("--state", help="The whole state: who held what.")] = False,
    as_json: Json = False,
) -> None:
    """Fold a journal to a state: what the engine knew after a step.

    Examples:
        laneway journal replay run.db --until 44 --state

    """
    from laneway.journal.replay import fold
    from laneway.journal.timeline import in_flight_at

    with _reading(file) as journal:
        last, _ = journal.head()
        if until is not None and not 0 <= until <= last:
            raise typer.BadParameter(f"--until {until}: the journal has steps 1 to {last}")
        folded = fold(journal, until)
        flying = in_flight_at(journal, folded.step)
    picture = attrs.asdict(take_snapshot(folded))
    picture["in_flight"] = [job.to_json() for job in flying]
    if state:
        picture["held"] = _held(folded)
    if as_json:
        print(json.dumps(picture))
    else:
        print(json.dumps(picture, indent=2))


def _held(state: State) -> dict[str, list[dict[str, Any]]]:
    """Return who holds what: every lane and buffer that is not idle, every job, every request."""
    lanes = [
        {
            "lane": f"lane/{lane.number}",
            "state": lane.state,
            "owner": f"{lane.origin}/{lane.owner}" if lane.owner is not None else None,
            "length_tokens": lane.length_tokens,
            "job": None if lane.job is None else f"job/{lane.job}",
        }
        for lane in state.lanes.values()
        if lane.state != "empty"
    ]
    buffers = [
        {
            "buffer": f"buffer/{buffer.number}",
            "state": buffer.state,
            "job": None if buffer.job is None else f"job/{buffer.job}",
        }
        for buffer in state.buffers.values()
        if buffer.state != "free"
    ]
    jobs = [_job(job) for job in state.jobs.values()]
    requests = [
        {
            "request": f"request/{request.number}",
            "state": request.state,
            "lane": None if request.lane is None else f"lane/{request.lane}",
            "prompt_tokens": len(request.prompt),
            "tokens": len(request.tokens),
        }
        for request in state.requests.values()
    ]
    return {"lanes": lanes, "buffers": buffers, "jobs": jobs, "requests": requests}


def _job(job: JobState) -> dict[str, Any]:
    """Return what a job is, its rows by the names of their fields."""
    told: dict[str, Any] = attrs.asdict(job, filter=lambda field, value: field.name != "rows")
    return {**told, "rows": [msgspec.structs.asdict(row) for row in job.rows]}


@app.command("verify")
def prove(file: File, as_json: Json = False) -> None:
    """Prove a journal: every byte is as written, and today's code decides the same.

    The last line is `verify: ok`; else the first step that differs, and exit code 1.

    Examples:
        laneway journal verify run.db

    """
    from laneway.journal.replay import verify

    with _reading(file) as journal:
        report = verify(journal)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        _tell_verdict(report)
    raise typer.Exit(DONE if report.ok else ANSWER_IS_NO)


def _tell_verdict(report: "VerifyReport") -> None:
    print(
        f"{report.steps} steps, {report.entity_events} entity events,"
        f" {report.incarnations} incarnations, chain {report.chain[:16]}…"
    )
    if report.note:
        print(f"note: {report.note}")
    where = f"step {report.step}: " if report.step else ""
    print("verify: ok" if report.ok else f"verify: {report.asked}: {where}{report.reason}")


@app.command("copy")
def copy_journal(
    file: File,
    destination: Annotated[Path, typer.Argument(help="File to write; must not exist.")],
) -> None:
    """Copy a journal, also while an engine writes it.

    Examples:
        laneway journal copy run.db run-copy.db

    """
    from laneway.journal import copy

    copied = copy(file, destination)
    print(f"copied to {copied}")
