"""Figures judge ratios the right way round, and contenders are interleaved."""

import json
import os
import threading

import pytest

from laneway.adapters import bench_dispatch, measuring
from laneway.adapters.measuring import at_most, interleave, times_faster


def test_a_bound_from_above_is_on_value_over_baseline() -> None:
    assert at_most("K1", 14.0, "us", "read", 10.0, limit=1.4).gate_met
    missed = at_most("K1", 14.1, "us", "read", 10.0, limit=1.4)
    assert not missed.gate_met and missed.ratio == 1.41


def test_a_bound_from_below_is_on_baseline_over_value() -> None:
    assert times_faster("K6", 2.0, "ns", "fire", 200.0, limit=100).gate_met
    missed = times_faster("K6", 2.0, "ns", "fire", 199.0, limit=100)
    assert not missed.gate_met and missed.ratio == 99.5


def test_contenders_take_turns_in_alternating_order() -> None:
    seen: list[str] = []
    took = interleave(
        {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, rounds=2, burst_ns=1
    )
    assert set(took) == {"a", "b"} and all(value > 0 for value in took.values())
    assert seen[:2] == ["a", "b"], "both are called once before anything is measured"
    turns = [
        name for before, name in zip(["", *seen[2:]], seen[2:], strict=False) if name != before
    ]
    assert turns == ["a", "b", "a"], "round 1 is a b, round 2 is b a"


def test_every_figure_is_one_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "BURST_NS", 1)
    figures = list(bench_dispatch.run())
    assert [figure.id for figure in figures] == ["K6", "K6/batch"]
    for figure in figures:
        told = json.loads(json.dumps(figure.to_json()))
        assert set(told) == {
            *("id", "value", "unit", "baseline"),
            *("baseline_value", "ratio", "gate", "gate_met"),
        }


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot keep a thread")
def test_contenders_are_kept_on_one_core_with_the_threads_they_begin() -> None:
    before = os.sched_getaffinity(0)
    seen: list[set[int]] = []
    with measuring.on_one_core():
        seen.append(os.sched_getaffinity(0))
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert seen == [{min(before)}] * 2 and os.sched_getaffinity(0) == before
