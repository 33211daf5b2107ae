"""Another artifact in the place of one that serves, on the simulated board (R10.2, R14.5).

What is in flight ends with the old one, a bad one costs nothing, one that fails on the board is
taken back, and nothing of either stays behind.
"""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.asking import answer_alone, draw_ask, outcomes, pack_with_end_tokens
from support.real_engine import RealEngine, check_journal

from laneway.adapters.facts import read_chips
from laneway.engine import ModelError


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give another artifact: the same model with fewer lanes."""
    return pack_with_end_tokens(tmp_path_factory.mktemp("newer"), batch=(1,), lanes=2)


def start(calbin: Path, folder: Path, plan: str = "", *, clock: str = "virtual") -> RealEngine:
    """Return an engine that serves three requests of the old artifact on such a board."""
    (folder / "plan").write_text(f"# what the board does wrong\n{plan}\n")
    real = RealEngine(calbin, url=f"sim:tiny?clock={clock}&faults={folder / 'plan'}")
    random = np.random.default_rng(17)
    for _ in range(3):
        real.submit(draw_ask(random, tokens_max=8))
    return real


def finish(real: RealEngine, calbin: Path) -> None:
    """Hold all answers against runs alone; journal, memory and board against their rules."""
    random = np.random.default_rng(17)
    asks = [draw_ask(random, tokens_max=8) for _ in range(4)]
    real.submit(asks[-1])
    assert outcomes(real.results()) == [answer_alone(calbin, ask) for ask in asks]
    real.engine.unload("m")
    chips = read_chips(real.device.calls, real.device._described.chip_indices)
    assert [chip.used_bytes for chip in chips] == [0, 0]
    real.close()
    check_journal(real.journal)


@pytest.mark.parametrize("clock", ["virtual", "real"])
def test_a_good_one_takes_its_place(calbin: Path, newer: Path, tmp_path: Path, clock: str) -> None:
    real = start(calbin, tmp_path, clock=clock)
    (before,) = real.engine.models()
    number = real.engine.replace("m", newer)
    (after,) = real.engine.models()
    assert (after.number, after.state) == (number, "ready") and after.sha256 != before.sha256
    finish(real, calbin)


def test_a_damaged_one_costs_the_old_one_nothing(calbin: Path, newer: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(newer, tmp_path / "damaged"))
    (largest,) = sorted(damaged.iterdir(), key=lambda one: one.stat().st_size)[-1:]
    largest.write_bytes(largest.read_bytes()[:-1] + b"\0")
    real = start(calbin, tmp_path)
    with pytest.raises(ModelError, match=r"model/1 serves it \(untouched\)"):
        real.engine.replace("m", damaged)
    finish(real, calbin)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("fault c kind=configure_fail skip=1 count=3", "configure failed with 0x0701"),
        ("fault w kind=warmup_wrong skip=1", "golden 0 at position"),
    ],
    ids=["configure", "golden"],
)
def test_one_that_the_board_does_not_run_is_taken_back(
    calbin: Path, newer: Path, tmp_path: Path, plan: str, reason: str
) -> None:
    real = start(calbin, tmp_path, plan)
    (before,) = real.engine.models()
    told = rf"{re.escape(reason)}.*; model/3 serves it \(loaded back\)"
    with pytest.raises(ModelError, match=told):
        real.engine.replace("m", newer)
    (after,) = real.engine.models()
    assert after.sha256 == before.sha256
    finish(real, calbin)
