"""Every kind of fault of the board is explained: by its job or device, row, rung, and endings.

What is expected comes from the plan's kind, from the inputs that the journal holds and from what
the clients got, never from the explanation.

Source: R18.5, R14.7, decision 16.
"""

import io
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from rich.console import Console
from support.asking import draw_ask
from support.explained_kinds import KINDS, SILENT, Explained, kinds_of_the_header

from laneway.adapters import open_device
from laneway.adapters.fault_stories import print_story
from laneway.engine import Engine, Limits, ModelError, Request, Result
from laneway.engine.inputs import (
    Completed,
    ConfigureFailed,
    CountersRead,
    DeviceFaulted,
    HealthProbed,
    Input,
    JobStalled,
    KvApplyFailed,
    ModelReleased,
    ResetFinished,
    SubmitDoubtful,
    SubmitRefused,
)
from laneway.engine.ports import Step
from laneway.journal import open_journal
from laneway.journal.answers import RUNGS
from laneway.journal.explain import Explanation, explain
from laneway.journal.story import Story

ACTIONS_MAX = 20_000
LIVE = {"finish", "fail", "cancel", "expire", "reject"}


@attrs.frozen
class Driven:
    """What a life of an engine on a failing board left behind."""

    explanation: Explanation
    steps: list[Step]
    results: dict[int, Result]
    device: str
    lost_reason: str


def drive(calbin: Path, folder: Path, plan: str, limits: dict[str, Any]) -> Driven:
    """Load, answer three requests together and three alone, unload, close; whatever happens."""
    (folder / "plan").write_text(plan + "\n")
    engine = Engine(
        device=open_device(f"sim:tiny?clock=virtual&faults={folder / 'plan'}"),
        journal=open_journal(folder / "run.db"),
        limits=attrs.evolve(Limits(health_every_ns=1000), **limits),
        draw_seed=lambda: 1,
    )
    results = {}
    try:
        engine.load("m", str(calbin))
        for result in answer(engine):
            results[result.request] = result
        if engine.ready():
            engine.unload("m")
    except ModelError as error:
        assert "m" in str(error)
    for _ in range(ACTIONS_MAX):
        if not engine.advance():
            break
    health = engine.health()
    engine.close()
    with open_journal(folder / "run.db", read_only=True) as journal:
        steps = list(journal.read())
        return Driven(explain(journal), steps, results, health.device, health.reason)


def answer(engine: Engine) -> list[Result]:
    """Return the results of three requests together, then of three one by one."""
    random = np.random.default_rng(31)
    asks = [draw_ask(random, tokens_max=8) for _ in range(3)]
    streams = [
        engine.submit(
            Request(
                model="m",
                prompt=ask.prompt,
                max_tokens=ask.max_tokens,
                sampling=ask.sampling,
                ignore_eos=True,
            )
        )
        for ask in asks
    ]
    results = [stream.result() for stream in streams]
    for number in range(3):
        engine.run_until_idle()
        request = Request(model="m", prompt=(1, 2, 3 + number), max_tokens=2)
        results.append(engine.submit(request).result())
    return results


def test_the_table_has_every_kind_of_the_board() -> None:
    assert set(KINDS) | set(SILENT) == kinds_of_the_header()
    assert not set(KINDS) & set(SILENT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_explained(calbin: Path, tmp_path: Path, kind: str) -> None:
    expected = KINDS[kind]
    driven = drive(calbin, tmp_path, expected.plan, expected.limits)
    stories = driven.explanation.stories
    assert stories, "the fault is told"
    story = stories[0]
    assert (story.kind, story.row, story.rungs[0]) == (expected.kind, expected.row, expected.rung)
    assert story.outcome == expected.outcome
    check_what_was_told(story, driven.steps)
    check_resets(story, driven.steps)
    check_requests(story, driven)
    check_text(story, expected)
    lost = [one for one in stories if one.outcome == "lost"]
    assert bool(lost) == (driven.device == "lost")
    if lost:
        assert lost[0].reason == driven.lost_reason
        assert ("new process" if lost[0].rungs[-1] == 7 else "operator") in lost[0].next


@pytest.mark.parametrize("kind", SILENT)
def test_a_kind_without_a_trace_is_not_invented(calbin: Path, tmp_path: Path, kind: str) -> None:
    driven = drive(calbin, tmp_path, f"fault a kind={SILENT[kind]}", {})
    assert driven.explanation.stories == ()
    assert all(result.error is None for result in driven.results.values())
    assert driven.explanation.steps == len(driven.steps)


def named(taken: Input) -> str:
    """Return what an input that tells of a fault is about."""
    if isinstance(taken, DeviceFaulted | KvApplyFailed):
        if taken.job is not None:
            return f"job/{taken.job}"
        return f"lane/{taken.lane}" if isinstance(taken, KvApplyFailed) else "device/0"
    if isinstance(taken, JobStalled | SubmitRefused | SubmitDoubtful | Completed):
        return f"job/{taken.job}"
    if isinstance(taken, ConfigureFailed | ModelReleased):
        return f"model/{taken.model}"
    assert isinstance(taken, CountersRead | HealthProbed), taken
    return "device/0"


def check_what_was_told(story: Story, steps: list[Step]) -> None:
    """Hold the signals against the inputs: who, and each word of the device."""
    for signal in story.signals:
        taken = steps[signal.step - 1].taken
        assert signal.about[0] == named(taken)
        if isinstance(taken, DeviceFaulted):
            assert signal.details["code"] == taken.code and taken.reason in signal.text
            told = signal.details["record"]
            assert (told is None) == (taken.record is None)
            if taken.record is not None:
                fields = ("chip", "ccu", "code", "pc")
                assert all(told[name] == getattr(taken.record, name) for name in fields)
            if taken.health is not None:
                assert signal.details["health"]["counters"] == dict(taken.health.counters)
    for line in story.before:
        assert line.step < story.signals[0].step
    about = story.signals[0].about[0]
    if about.startswith("job/"):
        assert any(line.text.startswith(f"{about} planned") for line in story.before)


def check_resets(story: Story, steps: list[Step]) -> None:
    """Every reset in the time of the story is told: its level, and whether it was believed."""
    within = steps[story.signals[0].step - 1 : story.last_step]
    resets = [step for step in within if isinstance(step.taken, ResetFinished)]
    reports = [line for line in story.answers if line.what == "report"]
    assert [line.step for line in reports] == [step.step for step in resets]
    for line, step in zip(reports, resets, strict=True):
        assert isinstance(step.taken, ResetFinished)
        assert (line.data["level"], line.data["code"]) == (step.taken.level, step.taken.code)
        recovered = any(event.trigger == "recover" for event in step.events)
        assert recovered == (line.data["refused"] == "")
    climbed = [event.data["rung"] for step in within for event in step.events if is_rung(event)]
    assert list(dict.fromkeys(climbed)) == (list(dict.fromkeys(story.rungs)) if climbed else [])


def is_rung(event: object) -> bool:
    """Return whether an event chooses a rung of the ladder."""
    machine, trigger = getattr(event, "machine", ""), getattr(event, "trigger", "")
    return machine == "device" and trigger in ("escalate", "lose")


def check_requests(story: Story, driven: Driven) -> None:
    """Hold each request against the steps before the fault and against its client's result."""
    live: dict[int, int] = {}
    for step in driven.steps[: story.signals[0].step - 1]:
        for event in step.events:
            if event.machine == "request":
                for number in event.entities:
                    live[number] = step.step
                    if event.trigger in LIVE:
                        del live[number]
    assert [fate.request for fate in story.fates] == sorted(live)
    for fate in story.fates:
        result = driven.results[fate.request]
        assert fate.tokens == result.usage.completion_tokens
        assert fate.tokens_before <= fate.tokens
        if result.error is None:
            assert (fate.ending, fate.reason) == ("finish", result.finish_reason)
        else:
            assert fate.ending == "fail" and fate.reason
        suspensions = [
            event.data["suspect"]
            for step in driven.steps
            for event in step.events
            if (event.machine, event.trigger) == ("request", "suspend")
            and fate.request in event.entities
        ]
        if suspensions:
            assert fate.suspended == ("suspect" if suspensions[-1] else "innocent")


def check_text(story: Story, expected: Explained) -> None:
    """What a person reads has the kind, who it is about, row, rungs and every ending."""
    out = io.StringIO()
    print_story(Console(file=out, width=160), story)
    text = out.getvalue()
    assert f"fault {story.number}" in text and expected.kind in text
    assert all(name in text for name in story.decisive.about)
    assert f"row {expected.row}" in text
    assert all(RUNGS[rung] in text for rung in story.rungs)
    for fate in story.fates:
        assert f"{fate.ending}: {fate.reason}" in text
    record = story.signals[0].details.get("record")
    if record is not None:
        assert f"chip {record['chip']}, ccu {record['ccu']}, code {record['code']}" in text
