"""Whoever looks at an engine in a cruise sees the last step; the engine thread alone lands."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from laneway.adapters.bench_tick import ROWS, Serving
from laneway.engine.ring import Group
from laneway.engine.state import State

TICKS = 40


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """Sixteen sequences that decode as far as they are let, on an engine with threads."""
    with Serving(tmp_path / "journal.db", live=ROWS, queued=0) as made:
        made.run(TICKS)
        assert made.engine._course.is_cruising
        yield made


def counts(serving: Serving) -> list[int]:
    """Return how many tokens each request has, as a look shows it."""
    return [view.completion_tokens for view in serving.engine.requests()]


def test_a_look_shows_every_token_so_far(serving: Serving) -> None:
    before = counts(serving)
    for ticks in (1, 2, 5):
        serving.run(ticks)
        after = counts(serving)
        assert after == [count + ticks for count in before]
        before = after


def test_the_engine_thread_lands_for_a_caller(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a landing is no state, and a caller may be interrupted anywhere."""
    real = Group.land
    landed: list[str] = []

    def land(group: Group, state: State, flying: int | None) -> None:
        landed.append(threading.current_thread().name)
        real(group, state, flying)

    monkeypatch.setattr(Group, "land", land)
    serving.run(5)
    serving.engine.snapshot()
    assert landed == ["laneway-engine"]
    assert not serving.engine._course.is_cruising and not serving.engine._looks


def test_health_and_models_are_told_without_landing(serving: Serving) -> None:
    assert serving.engine.ready() and serving.engine.model_number("null") == 1
    assert serving.engine._course.is_cruising


def test_many_who_look_hold_nobody_up(serving: Serving) -> None:
    """Several threads look all the time; every look shows as much as the one before, or more."""
    stop = threading.Event()
    failed: list[str] = []

    def look() -> None:
        before = [0] * ROWS
        while not stop.is_set():
            after = counts(serving)
            if any(b > a for b, a in zip(before, after, strict=True)):
                failed.append(f"{before} then {after}")
            before = after

    lookers = [threading.Thread(target=look, daemon=True) for _ in range(3)]
    for looker in lookers:
        looker.start()
    for _ in range(20):
        serving.run(10)
    stop.set()
    for looker in lookers:
        looker.join(60)
    assert not failed and not any(looker.is_alive() for looker in lookers)
