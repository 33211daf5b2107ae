"""Scenarios of faults, crossed by what they may depend on: phase, depth, extent, chip, owner.

What must hold is told by the steps of the journal; answers are those of runs alone. The table of
scenarios in tests/README.md says where the others are shown.

Source: R14.3, R14.4, E16, G11, G15, rows 6 to 8, 22 and 26, SCN-07, SCN-08, SCN-14, SCN-23.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest
from support.asking import Ask, answer_alone, draw_ask, outcomes
from support.real_engine import RealEngine, check_journal
from support.second_owner import SecondOwner

from laneway.adapters import facts
from laneway.adapters.calls import DeviceCalls
from laneway.engine import Limits
from laneway.engine.evidence import Capability
from laneway.engine.inputs import JobStalled
from laneway.engine.limits import SECOND
from laneway.engine.ports import Step
from laneway.journal import open_journal
from laneway.journal.explain import explain
from laneway.statemachines import Event

COUNT = 4
SLICE_NS = SECOND // 5
"""How far apart a job in flight is looked at."""


def asks_of(seed: int) -> list[Ask]:
    random = np.random.default_rng(seed)
    drawn = [draw_ask(random, tokens_max=6) for _ in range(COUNT)]
    return [attrs.evolve(ask, ignore_eos=True) for ask in drawn]


def begin(calbin: Path, file: Path, query: str = "", *, depth: int = 2) -> RealEngine:
    """Return an engine with jobs of one row, so that as many run at once as it may have."""
    limits = Limits(inflight_jobs_max=depth, batch_rows_max=1)
    url = f"sim:tiny?clock=virtual{query}"
    return RealEngine(calbin, url=url, journal=open_journal(file), limits=limits, together=True)


def finish(real: RealEngine, calbin: Path, asks: list[Ask], file: Path) -> list[Step]:
    """Hold every answer against a run alone and prove the journal; return its steps."""
    assert outcomes(real.results()) == [answer_alone(calbin, ask) for ask in asks]
    health = real.engine.health()
    assert health.ready, health
    real.close()
    with open_journal(file, read_only=True) as journal:
        return check_journal(journal)


def serve(calbin: Path, folder: Path, fault: str, *, depth: int = 2) -> list[Step]:
    """Serve a few requests while one fault strikes; return the steps."""
    real = begin(calbin, folder / "run.db", depth=depth)
    real.simulator.set_faults(f"fault a kind={fault}")
    asks = asks_of(5)
    for ask in asks:
        real.submit(ask)
    return finish(real, calbin, asks, folder / "run.db")


def events(steps: Sequence[Step], machine: str, trigger: str) -> list[Event]:
    found = [event for step in steps for event in step.events]
    return [event for event in found if (event.machine, event.trigger) == (machine, trigger)]


def suspended(steps: Sequence[Step], *, suspect: bool) -> Counter[int]:
    """Return how often each request was suspended as a suspect, or as an innocent."""
    told = [one for one in events(steps, "request", "suspend") if one.data["suspect"] == suspect]
    return Counter(number for event in told for number in event.entities)


@pytest.mark.parametrize(("phase", "depth"), [("h2d", 2), ("exec", 1), ("exec", 2), ("d2h", 2)])
def test_a_hang_in_any_phase_at_any_depth(
    calbin: Path, tmp_path: Path, phase: str, depth: int
) -> None:
    """SCN-07: found in time, one suspect, the other goes on once, and nothing is used again."""
    steps = serve(calbin, tmp_path, f"hang on={phase} nth=5 release=reset1", depth=depth)
    told = [step.taken for step in steps if isinstance(step.taken, JobStalled)]
    limits = Limits()
    for stage, bound_ns in (
        ("suspect", limits.hang_suspect_ns),
        ("confirm", limits.hang_confirm_ns),
    ):
        age_ns = min(one.age_ns for one in told if one.stage == stage)
        assert bound_ns <= age_ns <= bound_ns + SLICE_NS, stage
    (phase_told,) = {one.phase for one in told if one.job == min(one.job for one in told)}
    assert phase_told == phase
    assert list(suspended(steps, suspect=True).values()) == [1]
    assert set(suspended(steps, suspect=False).values()) <= {1}
    assert len(events(steps, "device", "reset")) == 1
    hung = events(steps, "job", "fault")
    assert len(hung) == depth and {event.data["kind"] for event in hung} == {"hang"}
    quarantined = [event.entities[0] for event in events(steps, "buffer", "quarantine")]
    assert len(quarantined) == len(set(quarantined)) >= depth


@pytest.mark.parametrize("quiesce", ["y", "n"])
@pytest.mark.parametrize(("kv", "chip"), [("none", 0), ("partial", 1), ("unknown", 0)])
def test_an_exception_of_any_extent_on_any_chip(
    calbin: Path, tmp_path: Path, quiesce: str, kv: str, chip: int
) -> None:
    """SCN-08: contained only where the device is quiet and sure of its KV (rows 6 and 7)."""
    fault = f"ccu_exception on=exec nth=5 quiesce={quiesce} kv={kv} chip={chip}"
    steps = serve(calbin, tmp_path, fault)
    contained = quiesce == "y" and kv == "none"
    resets = [event.data["level"] for event in events(steps, "device", "reset")]
    assert resets == ([] if contained else [1])
    assert len(suspended(steps, suspect=True)) == 1
    assert bool(events(steps, "device", "degrade")) == contained


@pytest.mark.slow
@pytest.mark.parametrize("actions", [3, 30])
def test_another_process_resets_the_board_that_an_engine_serves_on(
    calbin: Path, tmp_path: Path, actions: int
) -> None:
    """SCN-14: whatever finds it first, what was there is made anew and every answer is whole."""
    line = tmp_path / "board"
    real = begin(calbin, tmp_path / "run.db", f"&board={line}")
    other = SecondOwner(Path(real.device.calls.library.path), calbin)
    asks = asks_of(6)
    for ask in asks:
        real.submit(ask)
    for _ in range(actions):
        assert real.engine.advance()
    assert other.ask("open", config=f"board = {line}") == 0
    assert other.ask("reset", level=4) == [1, 2]
    assert other.ask("close") is None
    steps = finish(real, calbin, asks, tmp_path / "run.db")
    other.end()
    (reset,) = events(steps, "device", "reset")
    assert reset.data["level"] < 4, "the other process did that: what it ended is all there is"


def test_a_board_that_can_do_less_after_a_reset_is_taken_out_of_rotation(
    calbin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SCN-23: its table has a line less; the reset itself went well, and nothing is published."""
    real = begin(calbin, tmp_path / "run.db")
    told = facts._read_capabilities

    def all_but_batches(calls: DeviceCalls) -> Iterator[Capability]:
        return (one for one in told(calls) if one.name != "BATCH_LANES")

    monkeypatch.setattr(facts, "_read_capabilities", all_but_batches)
    real.simulator.set_faults("fault a kind=ccu_exception on=exec quiesce=n kv=unknown")
    streams = [real.submit(ask) for ask in asks_of(5)]
    real.run()
    health = real.engine.health()
    assert (health.device, health.ready, health.restart) == ("lost", False, False)
    assert health.reason.endswith("gone since the reset (row 26): BATCH_LANES")
    assert all(stream.ended for stream in streams)
    real.close()
    with open_journal(tmp_path / "run.db", read_only=True) as journal:
        check_journal(journal)
        (story,) = explain(journal).stories
    assert [one.kind for one in story.signals] == ["ccu", "capabilities"]
    assert story.outcome == "lost"
