"""The short way of usual decode jobs decides what the long way does, and leaves the same state."""

import pytest
from support.both_ways import decide_both_ways
from support.campaign import draw, play
from support.campaign_faults import KINDS

SCHEDULES = 10


def test_every_step_of_drawn_schedules_is_decided_the_same_both_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches to 16, one and two jobs in flight, faults, cancels, deadlines, canaries."""
    ways = decide_both_ways(monkeypatch)
    for seed in range(SCHEDULES):
        play(draw(seed))
    assert ways["complete"] > SCHEDULES and ways["plan"] > SCHEDULES, ways


@pytest.mark.soak
def test_thousands_of_schedules_are_decided_the_same_both_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decide_both_ways(monkeypatch)
    for seed in range(2_000):
        play(draw(seed, kinds=KINDS))
