"""The product as it is on a board that fails: resets, golden, and the texts of a calm run.

One fault of each sort is a story with its resets by hand; then come schedules that nobody thought
of (`support/board_campaign.py`): every kind that the board knows, batches up to 16, one or two jobs
in flight. The long campaign: ``pytest -m soak -s tests/integration/test_recovery_on_a_board.py``.

Source: R14, I7, I10, G5, G8, G15, E16, SCN-07, SCN-08, SCN-09, SCN-16.
"""

from functools import partial
from pathlib import Path

import attrs
import numpy as np
import pytest
from support.asking import Ask, answer_alone, draw_ask, outcomes
from support.board_campaign import draw, play, smaller
from support.fault_plans import KINDS, SILENT
from support.real_engine import RealEngine, check_journal
from support.tally import Tally, campaign, over_budget, share

from laneway.adapters import arena
from laneway.engine import Limits
from laneway.journal import open_journal

COUNT = 8
FAULTS = [
    ("ccu_exception on=exec nth=5 quiesce=n kv=unknown", [1]),
    ("ccu_exception on=exec nth=5 quiesce=y kv=partial", [1]),
    ("hang on=h2d nth=4 release=reset1", [1]),
    ("hang on=exec nth=6 release=reset4", [1, 4]),
    ("sticky on=exec nth=5 release=reset4", [4]),
    ("submit_reject on=submit nth=4 code=0x0202", [2]),
]
SHARE_MIN = 0.95
PIECE = 100


def serve(
    calbin: Path, folder: Path, fault: str, *, query: str, limits: Limits | None = None
) -> list[int]:
    """Serve under one fault; every answer is that of a run alone. Return the levels of resets."""
    (folder / "plan").write_text(f"fault a kind={fault}\n")
    file = folder / "run.db"
    url = f"sim:tiny?{query}&faults={folder / 'plan'}"
    real = RealEngine(calbin, url=url, journal=open_journal(file), limits=limits, together=True)
    random = np.random.default_rng(11)
    asks: list[Ask] = [
        attrs.evolve(draw_ask(random, tokens_max=6), ignore_eos=True) for _ in range(COUNT)
    ]
    for ask in asks:
        real.submit(ask)
    assert outcomes(real.results()) == [answer_alone(calbin, ask) for ask in asks]
    health = real.engine.health()
    assert health.ready and health.device in ("serving", "degraded")
    real.close()
    with open_journal(file, read_only=True) as journal:
        steps = check_journal(journal)
    events = [event for step in steps for event in step.events if event.machine == "device"]
    assert not [event for event in events if event.trigger == "lose"]
    return [event.data["level"] for event in events if event.trigger == "reset"]


@pytest.mark.parametrize(("fault", "levels"), FAULTS)
def test_a_fault_costs_a_reset_and_nobody_a_token(
    calbin: Path, tmp_path: Path, fault: str, levels: list[int]
) -> None:
    assert serve(calbin, tmp_path, fault, query="clock=virtual") == levels


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault, _ in FAULTS[:3]])
def test_threads_and_running_time_change_no_token(calbin: Path, tmp_path: Path, fault: str) -> None:
    """The same where everything has a thread of its own and time runs fifty times as fast."""
    limits = Limits(hang_suspect_ns=20_000_000_000, hang_confirm_ns=40_000_000_000)
    assert serve(calbin, tmp_path, fault, query="clock=real&scale=50", limits=limits)


# ---------------------------------------------------------------------------- threads


BOUNDED = tuple(kind for kind in KINDS if kind.name not in ("configure_hang", "release_slow"))
"""Kinds whose calls return while a test waits."""


def serve_any(calbin: Path, folder: Path, seed: int) -> str:
    """Serve under a drawn plan with threads in running time; return the device's state at the end.

    How much is served depends on the machine; what is told is whole or begins like the answer of a
    run alone, and ends once.
    """
    schedule = draw(seed, kinds=BOUNDED)
    limits = Limits(
        inflight_jobs_max=schedule.inflight,
        hang_suspect_ns=20_000_000_000,
        hang_confirm_ns=40_000_000_000,
    )
    arena.PROCESS = arena.Account()  # each run is a process of its own (E9)
    file, url = folder / f"run-{seed}.db", "sim:tiny?clock=real&scale=50"
    real = RealEngine(calbin, url=url, journal=open_journal(file), limits=limits, together=True)
    real.simulator.set_faults(schedule.plan)
    random = np.random.default_rng(seed)
    asks = [draw_ask(random, tokens_max=6) for _ in range(COUNT)]
    for ask in asks:
        real.submit(ask)
    for ask, told in zip(asks, outcomes(real.results()), strict=True):
        alone = answer_alone(calbin, ask)
        whole = told.ending in ("stop", "length")
        assert told == alone if whole else told.tokens == alone.tokens[: len(told.tokens)]
    real.close()
    with open_journal(file, read_only=True) as journal:
        steps = check_journal(journal)
    assert over_budget(steps, limits) == 0
    return real.engine.snapshot().device


@pytest.mark.slow
def test_any_faults_under_threads(calbin: Path, tmp_path: Path) -> None:
    for seed in range(3):
        assert serve_any(calbin, tmp_path, seed) == "closed"


@pytest.mark.soak
def test_many_faults_under_threads(calbin: Path, tmp_path: Path) -> None:
    for seed in range(3, 200):
        assert serve_any(calbin, tmp_path, seed) == "closed"


# ---------------------------------------------------------------------------- campaigns


def check(tally: Tally) -> None:
    """Hold the figures: budgets, what ends a device, and who pays for a fault alone."""
    assert tally.over_budget == 0, tally.lines()
    for kind, (done, all_) in tally.shares.items():
        assert not tally.lost[kind], f"{kind} alone has no reason to end a device"
        assert share(done, all_) >= SHARE_MIN, (kind, done, all_)


@pytest.mark.slow
def test_some_schedules_of_any_faults_of_the_board(tmp_path: Path) -> None:
    tally = campaign(map(draw, range(6)), partial(play, folder=tmp_path), smaller=smaller)
    check(tally)
    assert tally.schedules == 6 and tally.resets and tally.finished


@pytest.mark.soak
def test_many_schedules_of_any_faults_of_the_board(tmp_path: Path) -> None:
    """Each kind alone ten times, then up to three faults at once; prints the shares by kind."""
    tally = Tally()
    kinds = (*KINDS, *SILENT)
    for first in range(0, 20):
        alone = (
            draw(1000 * first + seed, kinds=[kind], faults_max=1)
            for seed, kind in enumerate(kinds)
            if first % 2 == 0
        )
        mixed = map(draw, range(1000 * first, 1000 * first + PIECE))
        for schedules in (alone, mixed):
            campaign(schedules, partial(play, folder=tmp_path), tally=tally, smaller=smaller)
        print("\n".join(tally.lines()), flush=True)
    check(tally)
