"""Another process resets the board, or takes it, under an engine that serves (row 22, SCN-14)."""

from pathlib import Path

import numpy as np
import pytest
from support.asking import answer_alone, draw_ask, outcomes
from support.real_engine import RealEngine, check_journal, levels

from laneway.engine.ports import Step
from laneway.journal import open_journal


def run(calbin: Path, folder: Path, plan: str) -> tuple[RealEngine, list[Step]]:
    """Serve three requests on a board with a plan to their ends; return engine and steps."""
    (folder / "plan").write_text(f"{plan}\n")
    url = f"sim:tiny?clock=virtual&faults={folder / 'plan'}"
    real = RealEngine(calbin, url=url, journal=open_journal(folder / "run.db"))
    random = np.random.default_rng(41)
    for _ in range(3):
        real.submit(draw_ask(random, tokens_max=8))
    real.run()
    return real, real.steps()


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        ("fault e kind=epoch_bump on=submit nth=3", [0]),
        ("fault o kind=owner_change on=submit nth=3 pid=7 for=1us", [2]),
        ("fault o kind=owner_change on=submit nth=3 pid=7 for=20ms", [2, 4, 4]),
    ],
    ids=["reset", "owned-shortly", "owned-for-a-while"],
)
def test_requests_go_on_behind_somebody_elses_reset(
    calbin: Path, tmp_path: Path, plan: str, wanted: list[int]
) -> None:
    """It is looked at, nobody is suspected; what is still owned is waited for by pauses.

    Where KV operations fail first, the configuration is reset before the epoch is seen.
    """
    real, steps = run(calbin, tmp_path, plan)
    random = np.random.default_rng(41)
    asks = [draw_ask(random, tokens_max=8) for _ in range(3)]
    assert outcomes(real.results()) == [answer_alone(calbin, ask) for ask in asks]
    assert levels(steps) == wanted
    assert len(real.engine._state.ladder.epoch_changes_ns) == 1, "it was noticed, once"
    suspended = [e for s in steps for e in s.events if e.trigger == "suspend"]
    assert not any(event.data["suspect"] for event in suspended)
    real.close()
    with open_journal(tmp_path / "run.db", read_only=True) as kept:
        check_journal(kept)


def test_the_second_reset_by_another_within_ten_minutes_is_a_matter_of_the_operator(
    calbin: Path, tmp_path: Path
) -> None:
    plan = "fault a kind=epoch_bump on=submit nth=3\nfault b kind=epoch_bump on=submit nth=9"
    real, steps = run(calbin, tmp_path, plan)
    assert levels(steps) == [0]
    health = real.engine.health()
    assert (health.device, health.restart) == ("lost", False) and "another owner" in health.reason
    real.engine.close()
    with open_journal(tmp_path / "run.db", read_only=True) as kept:
        check_journal(kept)
