"""Loads and unloads that fail on the simulated board, and a model that computes wrongly for good.

Each fault comes from a plan; which resets it may cost is the row's, and the board sees no mistake.

Source: R14.5, R14.7, E22, rows 12, 13, 17 and 18; SCN-15, SCN-17.
"""

from pathlib import Path

import attrs
import numpy as np
import pytest
from support.asking import answer_alone, draw_ask, outcomes, pack_with_end_tokens
from support.real_engine import RealEngine, check_journal, levels

from laneway.adapters import open_device
from laneway.adapters.device import NpurtDevice
from laneway.engine import Engine, Limits, ModelError
from laneway.engine.limits import SECOND
from laneway.engine.ports import Step
from laneway.journal import open_journal
from laneway.journal.port import ReadableJournal


def engine_on(folder: Path, plan: str) -> tuple[Engine, ReadableJournal]:
    """Return an engine on a board with a plan, and its journal."""
    (folder / "plan").write_text(f"{plan}\n")
    journal = open_journal(folder / "run.db")
    device = open_device(f"sim:tiny?clock=virtual&faults={folder / 'plan'}")
    limits = Limits(canary_jobs=0, canary_idle_ns=0)
    return Engine(device=device, journal=journal, limits=limits), journal


def close(engine: Engine, folder: Path) -> list[Step]:
    """Close an engine; hold its journal against the rules."""
    engine.close()
    with open_journal(folder / "run.db", read_only=True) as journal:
        return check_journal(journal)


# ------------------------------------------------------------------ row 17


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        ("kind=configure_fail", [3]),
        ("kind=configure_partial_memory release=reset3", [3]),
        ("kind=configure_fail count=2", [3, 4]),
    ],
)
def test_a_configuration_that_fails_is_tried_behind_resets(
    calbin: Path, tmp_path: Path, plan: str, wanted: list[int]
) -> None:
    engine, _ = engine_on(tmp_path, f"fault c {plan}")
    engine.load("m", str(calbin))
    assert engine.ready()
    assert levels(close(engine, tmp_path)) == wanted


def test_a_configuration_that_never_succeeds_is_a_failed_load(calbin: Path, tmp_path: Path) -> None:
    engine, _ = engine_on(tmp_path, "fault c kind=configure_fail count=3")
    with pytest.raises(ModelError, match="configure failed with 0x0701"):
        engine.load("m", str(calbin))
    assert engine.health().device == "serving"
    engine.load("m", str(calbin))
    assert levels(close(engine, tmp_path)) == [3, 4]


# ------------------------------------------------------------------ row 18


@pytest.mark.parametrize(("times", "wanted"), [(1, [2]), (2, [2, 4])])
def test_golden_that_passed_before_is_tried_behind_resets(
    calbin: Path, tmp_path: Path, times: int, wanted: list[int]
) -> None:
    engine, _ = engine_on(tmp_path, f"fault w kind=warmup_wrong skip=1 count={times}")
    engine.load("m", str(calbin))
    engine.unload("m")
    engine.load("m", str(calbin))
    assert levels(close(engine, tmp_path)) == wanted


# ------------------------------------------------------------------ row 13


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("leak_until_dynamic_clear", [3]), ("leak_until_soft", [3, 2, 4])],
)
def test_memory_that_stays_costs_the_resets_it_takes(
    calbin: Path, tmp_path: Path, kind: str, wanted: list[int]
) -> None:
    engine, _ = engine_on(tmp_path, f"fault r kind={kind}")
    engine.load("m", str(calbin))
    with pytest.raises(ModelError, match="bytes, 0 before the load"):
        engine.unload("m")
    while engine.models() and engine.advance():
        pass
    assert engine.health().device == "serving"
    engine.load("m", str(calbin))
    assert levels(close(engine, tmp_path)) == wanted


def take_turns(folder: Path, rounds: int) -> int:
    """Load and unload two models in turns, one in twelve with a leak; return the leaks.

    Each verdict on memory is right, each leak is cleared by its reset, and each model computes as
    if the other had never been there. Two hours pass after a leak, so that budgets are whole.
    """
    draw = np.random.default_rng(15)
    models = [
        pack_with_end_tokens(folder / name, batch=(1,), lanes=2, name=name) for name in ("a", "b")
    ]
    asks = [attrs.evolve(draw_ask(draw, tokens_max=4), ignore_eos=True) for _ in models]
    alone = [answer_alone(model, ask) for model, ask in zip(models, asks, strict=True)]
    engine, _ = engine_on(folder, "")
    device = engine._device
    assert isinstance(device, NpurtDevice) and device.simulator is not None
    leaks = 0
    for number in range(rounds):
        which = number % 2
        engine.load("m", str(models[which]))
        stream = engine.submit(asks[which].request())
        assert outcomes([stream.result()]) == [alone[which]], number
        leaking = draw.random() < 1 / 12
        device.simulator.set_faults("fault r kind=leak_until_dynamic_clear" if leaking else "")
        try:
            engine.unload("m")
        except ModelError:
            assert leaking, number
            leaks += 1
            while engine.models() and engine.advance():
                pass
            until_ns = device.clock.now_ns() + 7200 * SECOND
            while device.clock.now_ns() < until_ns:
                engine.advance(until_ns)
        else:
            assert not leaking, number
        assert not engine.models() and engine.health().device == "serving"
    assert levels(close(engine, folder)) == [3] * leaks
    return leaks


def test_two_models_take_turns_with_leaks_between(tmp_path: Path) -> None:
    assert take_turns(tmp_path, 12) > 0


@pytest.mark.soak
def test_two_models_take_turns_a_thousand_times(tmp_path: Path) -> None:
    assert take_turns(tmp_path, 1000) > 50


# ------------------------------------------------------------------ row 12


def test_a_model_that_computes_wrongly_for_good_gives_way_to_the_one_before(
    calbin: Path, tmp_path: Path
) -> None:
    """Its own golden differs after the reset; what served before it serves again, right."""
    newer = pack_with_end_tokens(tmp_path, batch=(1,), lanes=2, name="newer")
    journal = open_journal(tmp_path / "run.db")
    real = RealEngine(calbin, journal=journal, limits=Limits(canary_jobs=6), canaries=True)
    (before,) = real.engine.models()
    real.engine.replace("m", newer)
    real.simulator.set_faults("fault g kind=numeric_garbage model=newer count=inf")
    real.simulator.arm()
    random = np.random.default_rng(23)
    for _ in range(6):
        real.submit(attrs.evolve(draw_ask(random, tokens_max=8), ignore_eos=True))
    real.run()
    wrong = [result.error for result in real.results() if result.error is not None]
    assert wrong, "nobody was told that the numbers are in doubt"
    (after,) = real.engine.models()
    assert (after.sha256, after.state) == (before.sha256, "ready")
    real.begin()
    ask = draw_ask(random)
    real.submit(ask)
    real.run()
    assert outcomes(real.results()) == [answer_alone(calbin, ask)]
    real.close()
    with open_journal(tmp_path / "run.db", read_only=True) as kept:
        assert levels(check_journal(kept)) == [2]
