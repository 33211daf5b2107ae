"""A board that grows hot under load and cool without it (row 25)."""

from pathlib import Path

import attrs
import numpy as np
from support.asking import answer_alone, draw_ask, outcomes
from support.real_engine import RealEngine, check_journal

from laneway.engine import Limits
from laneway.engine.inputs import ResetFinished, ThrottleTold
from laneway.journal import open_journal
from laneway.journal.explain import explain

OFTEN = Limits(health_every_ns=1000)
HOT = "fault t kind=thermal tau=20us rise=50 limit=60 factor=3"


def test_heat_is_told_and_costs_time_alone(calbin: Path, tmp_path: Path) -> None:
    """It begins at 45 degrees, is throttled above 60 while it computes, and cools in a pause."""
    (tmp_path / "plan").write_text(HOT + "\n")
    url = f"sim:tiny?clock=virtual&faults={tmp_path / 'plan'}"
    real = RealEngine(calbin, url=url, journal=open_journal(tmp_path / "run.db"), limits=OFTEN)
    random = np.random.default_rng(3)
    asks = [attrs.evolve(draw_ask(random), max_tokens=16, ignore_eos=True) for _ in range(3)]
    for ask in asks:
        real.submit(ask)
    real.run()
    told = [step.taken for step in real.steps() if isinstance(step.taken, ThrottleTold)]
    assert told and told[0].chips == (0, 1)
    assert all(one.chips != other.chips for one, other in zip(told, told[1:], strict=False))
    assert outcomes(real.results()) == [answer_alone(calbin, ask) for ask in asks]
    assert not any(isinstance(step.taken, ResetFinished) for step in real.steps())
    real.close()
    with open_journal(tmp_path / "run.db", read_only=True) as kept:
        check_journal(kept)
        story = explain(kept).stories[0]
    assert (story.kind, story.row, story.rungs, story.outcome) == ("throttled", 25, [0], "went on")
