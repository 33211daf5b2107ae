"""Random fault schedules end in service or in a stated loss; no text differs (R14, I7, I10).

Each seed is a schedule of `support/campaign.py`: batches up to 16, one or two jobs in flight, one
to three faults of any kind of `support/campaign_faults.py`, cancels, deadlines, a close. Every
invariant is checked after every step and every answer against a run alone. The long campaign:
``pytest -m soak -s tests/core/test_campaign.py``. What fails is made as small as it gets.
"""

from pathlib import Path

import pytest
from mutants.recovery_plants import delivered_token_repeated
from support.campaign import draw, play, smaller
from support.campaign_faults import KINDS, Kind
from support.tally import Tally, campaign, share, shrink

from laneway.engine.errors import InternalError
from laneway.journal import open_journal

SHARE_MIN = 0.95
PIECE = 500


def check(tally: Tally) -> None:
    """Hold the figures: budgets, and who pays for a fault alone in its schedule."""
    assert tally.over_budget == 0, tally.lines()
    ends = {kind.name: kind.ends for kind in KINDS}
    for kind, (done, all_) in tally.shares.items():
        if not ends[kind]:
            assert share(done, all_) >= SHARE_MIN, (kind, done, all_)


def test_some_schedules_of_any_faults() -> None:
    tally = campaign(map(draw, range(40)), play, smaller=smaller)
    check(tally)
    assert tally.schedules == 40 and tally.resets and tally.finished


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_single_fault_of_each_kind(kind: Kind) -> None:
    """A device that is not gone by design serves again, and innocents get their answers."""
    tally = Tally()
    for seed in range(3):
        made = play(draw(seed, kinds=[kind], faults_max=1))
        tally.add(made)
        if kind.ends and kind.name in made.hits:
            assert made.device == "lost", kind.ends
        elif not kind.ends:
            assert made.device != "lost", f"{kind.name} has no reason to end the device"
    check(tally)


@pytest.mark.unproven_journals
def test_a_failing_schedule_is_made_small_and_kept_as_a_journal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever goes on forgets a token: one request and one fault are enough to show it."""
    delivered_token_repeated(monkeypatch)
    ccu = [kind for kind in KINDS if kind.name == "ccu"]
    schedule = draw(5, kinds=ccu)
    assert len(schedule.arrivals) > 2
    with pytest.raises(InternalError) as found:
        campaign([schedule], play, smaller=smaller)
    small = shrink(schedule, play, smaller, InternalError)
    assert (len(small.arrivals), len(small.faults)) == (1, 1)
    assert found.value.__notes__[-1] == f"smallest {small}"
    with pytest.raises(InternalError):
        play(small, keep=tmp_path / "run.db")
    with open_journal(tmp_path / "run.db", read_only=True) as journal:
        kept = [event.trigger for step in journal.read() for event in step.events]
    assert "suspend" in kept and "resume" in kept


@pytest.mark.soak
def test_ten_thousand_schedules() -> None:
    """Two thirds with up to three faults, the rest with one alone; prints the shares by kind."""
    tally = Tally()
    for first in range(0, 10_000, PIECE):
        single = first % (3 * PIECE) == 0
        seeds = range(first, first + PIECE)
        drawn = (draw(seed, faults_max=1 if single else 3) for seed in seeds)
        campaign(drawn, play, tally=tally, smaller=smaller)
        print("\n".join(tally.lines()), flush=True)
    check(tally)
