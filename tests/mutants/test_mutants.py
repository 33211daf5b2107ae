"""Engines with one rule broken are found, and the sound engine is not (R2.7, R3.5).

The table of mutants stands in ``plants.py``; each names the rule it breaks and the detector that
must find it. What a detector says must name the fault, so that a plant that merely crashes is not
taken for a mutant that was found.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutants.detectors import DETECTORS, Detector
from mutants.plants import MUTANTS, Mutant

pytestmark = [pytest.mark.unproven_journals, pytest.mark.slow]

SURVIVORS: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def _report() -> Iterator[None]:
    """Print who survived, all at once, after the last mutant."""
    SURVIVORS.clear()
    yield
    print(f"\nmutants: {len(MUTANTS)}, survivors: {', '.join(SURVIVORS) or 'none'}")


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda detector: detector.__name__)
def test_the_sound_engine_passes(detector: Detector) -> None:
    detector()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_mutant_is_found(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    mutant.plant(monkeypatch)
    try:
        mutant.detector()
    except Exception as found:
        said = f"{type(found).__name__}: {found}"
        assert re.search(mutant.says, said), f"{mutant.id} is found for another reason: {said}"
    else:
        SURVIVORS.append(mutant.id)
        pytest.fail(f"{mutant.id} survives {mutant.detector.__name__}: {mutant.wrong}")


def test_every_mutant_has_a_name_of_its_own_and_a_line_in_the_readme() -> None:
    names = [mutant.id for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    page = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    told = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \| [^|]+ \| `(\w+)` \|$", page, re.M)
    assert told == [(m.id, m.rule, m.detector.__name__) for m in MUTANTS]
