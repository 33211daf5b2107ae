"""A soak counts what it should, is one run for one seed, and sees what is wrong."""

from pathlib import Path

import attrs
import pytest

from laneway.adapters import soaking
from laneway.adapters.cli_run import demo_model
from laneway.adapters.cli_soak import DEFAULT_FAULTS
from laneway.adapters.soaking import Soak, SoakReport, _Asked

# Often enough that a short run sees each of them.
PLAN = """
fault rejected kind=submit_reject on=submit every=40 count=inf
fault exception kind=ccu_exception on=exec every=90 count=inf quiesce=n kv=unknown
"""


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short runs ask for few prompts, whose answers are computed before each of them."""
    monkeypatch.setattr(soaking, "POOL", 12)


def soak(hours: float, faults: Path | None, seed: int = 3) -> SoakReport:
    return Soak(hours=hours, clock="virtual", faults=faults, seed=seed, model=demo_model()).run()


def test_a_run_without_faults_ends_every_request_in_one_incarnation() -> None:
    report = soak(0.05, None)
    assert report.ok, attrs.asdict(report)
    assert report.requests == 45, "one in 4 seconds of 3 minutes"
    assert sum(report.endings.values()) == report.requests
    assert (report.errors, report.incarnations) == (0, 1)


def test_a_run_under_faults_goes_on_after_resets(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text(PLAN)
    report = soak(0.03, plan)
    assert report.ok, attrs.asdict(report)
    assert report.resets > 1 and report.incarnations == 1
    again = soak(0.03, plan)
    for one in (report, again):
        one.memory_growth_kib = 0
    assert again == report, "one seed is one run"


def test_a_device_that_is_gone_is_followed_by_a_fresh_one(tmp_path: Path) -> None:
    """Row 16: no reset of this process brings it back; the journal goes on in the next one."""
    plan = tmp_path / "plan"
    plan.write_text("fault gone kind=device_lost on=exec every=80 count=inf release=never\n")
    report = soak(0.03, plan)
    assert report.ok, attrs.asdict(report)
    assert report.incarnations > 1 and report.errors >= 1 and report.resets == 0


def test_a_wrong_answer_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    make_pool = Soak._make_pool

    def wrong_pool(self: Soak) -> list[_Asked]:
        pool = make_pool(self)
        return [_Asked(one.request, (*one.answer[:-1], one.answer[-1] + 1)) for one in pool]

    monkeypatch.setattr(Soak, "_make_pool", wrong_pool)
    report = soak(0.02, None)
    assert report.token_differences > 0 and not report.ok


def test_a_broken_invariant_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from laneway.engine.errors import InvariantError

    def broken(state: object) -> None:
        raise InvariantError("I3", "told to")

    monkeypatch.setattr(soaking, "check", broken)
    report = soak(0.003, None)
    assert report.invariant_breaks > 0 and not report.ok


def test_the_shipped_plan_is_there_and_is_taken() -> None:
    assert DEFAULT_FAULTS.is_file()
    assert soak(0.01, DEFAULT_FAULTS).ok
