"""Metrics of a running engine are what its state holds, and never hurt serving.

Source: I8, R16.2, R15.1.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.metric_story import faulted
from support.rig import Rig

from laneway.engine.distribution import Distribution
from laneway.engine.effects import SubmitJob
from laneway.engine.families import picture
from laneway.engine.inputs import Completed, Input, RequestSubmitted
from laneway.engine.metrics import Metrics
from laneway.engine.picture import MetricsPicture
from laneway.engine.ports import Step
from laneway.engine.state import State


def gauges(told: MetricsPicture) -> dict[str, float]:
    """Return every gauge that must be 0 when nothing is going on."""
    names = (
        *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
        *("kv_cache_usage_perc", "submit_queue_depth", "jobs_inflight", "lanes_active"),
    )
    return {
        f"{family.name}{labels}": value
        for family in told.families
        for labels, value in family.series
        if family.name.removeprefix("laneway:") in names and not isinstance(value, Distribution)
    }


def check_agreement(told: MetricsPicture, state: State) -> None:
    """Hold every gauge and the count of tokens against the state, which other code folds."""
    by_name = {family.name.removeprefix("laneway:"): family.series for family in told.families}

    def states(name: str) -> Counter[str]:
        return +Counter({labels[-1]: int(value) for labels, value in by_name[name]})  # type: ignore[arg-type]

    requests = Counter(request.state for request in state.requests.values())
    jobs = Counter(job.state for job in state.jobs.values())
    assert states("kv_slots") == Counter(lane.state for lane in state.lanes.values())
    assert states("buffer_pool_items") == Counter(b.state for b in state.buffers.values())
    if not state.lanes:
        return
    used = sum(lane.state != "empty" for lane in state.lanes.values())
    assert told.value("kv_cache_usage_perc") == used / len(state.lanes)
    assert told.value("num_requests_waiting") == state.waiting_requests == requests["waiting"]
    assert told.value("num_requests_running") == requests["prefilling"] + requests["decoding"]
    assert states("num_requests_waiting_by_reason").total() == requests["waiting"]
    assert told.value("submit_queue_depth") == jobs["planned"]
    assert told.value("jobs_inflight") == jobs["submitted"] + jobs["uncertain"]
    rows = [row.lane for job in state.jobs.values() for row in job.rows]
    assert told.value("lanes_active") == len(rows)


def check_counters(told: MetricsPicture, rig: Rig) -> None:
    """Hold counters against what the clients got and what the device ran."""
    results = [one.stream.result() for one in rig.streams]
    admitted = {e.entities[0] for e in rig.events("request", "admit")}
    ended = [result for result in results if result.request in admitted]
    expected = Counter(result.finish_reason for result in ended)
    renamed = {"cancelled": "abort"}
    for reason, count in expected.items():
        name = renamed.get(reason, reason)
        assert told.value("request_success_total", finished_reason=name) == count
    tokens = sum(result.usage.completion_tokens for result in ended)
    assert told.value("generation_tokens_total") == tokens
    first = told.value("time_to_first_token_seconds")
    between = told.value("inter_token_latency_seconds")
    assert isinstance(first, Distribution) and isinstance(between, Distribution)
    assert first.count == sum(result.usage.completion_tokens > 0 for result in ended)
    assert first.count + between.count == tokens
    e2e = told.value("e2e_request_latency_seconds")
    assert isinstance(e2e, Distribution) and e2e.count == len(ended)


def scenario(rig: Rig, seed: int) -> None:
    """Hand in, cancel and run in an order that the seed draws."""
    random = np.random.default_rng(seed)
    for _ in range(60):
        choice = random.integers(0, 10)
        if choice < 3:
            prompt = [int(token) for token in random.integers(1, 20, random.integers(1, 9))]
            rig.submit(prompt, seed=seed, max_tokens=int(random.integers(1, 6)))
        elif choice == 3 and rig.streams:
            rig.streams[int(random.integers(0, len(rig.streams)))].stream.cancel()
        for _ in range(int(random.integers(0, 12))):
            rig.act()
            check_agreement(rig.engine.metrics(), rig.state)


@pytest.mark.parametrize("seed", range(4))
def test_gauges_are_what_the_state_holds_after_every_action(seed: int) -> None:
    rig = Rig()
    scenario(rig, seed)
    rig.run()
    told = rig.engine.metrics()
    check_agreement(told, rig.state)
    check_counters(told, rig)
    assert set(gauges(told).values()) == {0} and len(gauges(told)) == 9
    assert told.value("metrics_failures_total") == 0
    rig.close()
    check_agreement(rig.engine.metrics(), rig.state)


@pytest.mark.parametrize("submits", [[0x0601, 0, 0x0301], ["doubt"], ["early", 0x0301], [0x0101]])
def test_gauges_agree_when_submits_are_refused(submits: list[int | str]) -> None:
    rig = Rig()
    rig.device.submits.extend([0, 0, *submits])
    scenario(rig, 5)
    rig.run()
    check_agreement(rig.engine.metrics(), rig.state)
    check_counters(rig.engine.metrics(), rig)
    assert rig.engine.metrics().value("metrics_failures_total") == 0


def test_gauges_agree_after_a_fault_and_over_a_restart() -> None:
    rig = Rig()
    rig.device.on_result = Faults(at=5)
    scenario(rig, 6)
    rig.run()
    told = rig.engine.metrics()
    check_agreement(told, rig.state)
    check_counters(told, rig)
    assert told.value("device_exceptions_total", kind="ccu") == 1
    assert told.value("kv_cache_usage_perc") != 0
    rig.close()
    again = Rig(steps=rig.steps)
    scenario(again, 7)
    again.run()
    told = again.engine.metrics()
    check_agreement(told, again.state)
    assert told.value("device_exceptions_total", kind="ccu") == 1
    assert told.value("build_info", generation="1") == told.value("build_info", generation="2") == 1
    assert set(gauges(told).values()) == {0}
    assert told == picture(fold(again.steps))


class Faults:
    """Let one job of a request end in an exception of the device."""

    def __init__(self, *, at: int) -> None:
        self.left = at

    def __call__(self, effect: SubmitJob, done: Completed) -> Input:
        self.left -= effect.origin == "request"
        if self.left or effect.origin != "request":
            return done
        return faulted(done.job, "ccu", ticket=done.ticket, generation=done.generation)


def fold(steps: list[Step]) -> Metrics:
    """Return the metrics of steps, apart from any engine."""
    metrics = Metrics()
    for step in steps:
        metrics.observe(step)
    return metrics


def test_a_picture_does_not_change_any_more() -> None:
    rig = Rig()
    before = rig.engine.metrics()
    same = rig.engine.metrics()
    rig.submit([1, 2, 3])
    rig.run()
    assert before == same != rig.engine.metrics()
    assert before.value("generation_tokens_total") == 0


def test_nothing_is_kept_of_requests_and_jobs_that_ended() -> None:
    rig = Rig()
    for number in range(30):
        rig.submit([1 + number % 5, 2], seed=number)
    rig.streams[7].stream.cancel()
    rig.run()
    metrics = rig.engine._meter.metrics
    assert (metrics.requests, metrics.jobs) == ({}, {})
    assert not rig.state.jobs and not rig.state.requests


class Unwalked(dict[int, Any]):
    """A table that may be asked for one entry, never walked."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a step looked at every live entry")

    keys = values = items = __iter__  # type: ignore[assignment]


def test_a_step_looks_at_no_request_or_job_but_its_own() -> None:
    rig = Rig()
    for number in range(20):
        rig.submit([1 + number % 5, 2], seed=number)
    rig.run()
    metrics = Metrics(requests=Unwalked(), jobs=Unwalked())
    for step in rig.steps:
        metrics.observe(step)
    assert picture(metrics) == rig.engine.metrics()


# ---------------------------------------------------------------------------- failing metrics


class Broken(Metrics):
    """Metrics with a number that cannot be measured, and a message that must not be logged."""

    def observe(self, step: Step) -> None:
        if isinstance(step.taken, RequestSubmitted | Completed):
            raise ValueError(f"the prompt was {step.taken}")
        super().observe(step)


def refuse(_: Metrics, step: Step) -> None:
    """Measure nothing at all."""
    raise LookupError(step.step)


def test_a_failing_metric_never_hurts_serving(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.engine._meter.metrics = Broken()
    with caplog.at_level(logging.ERROR, logger="laneway.engine"):
        for number in range(3):
            rig.submit([1 + number, 2], seed=number)
        rig.run()
    rig.check_answers()
    rig.check_idle()
    failures = rig.engine.metrics().value("metrics_failures_total")
    assert isinstance(failures, int) and failures > 3
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("step ") and "(RequestSubmitted)" in lines[0]
    assert "prompt" not in caplog.text and len(lines) == failures.bit_length()
    rig.close()


def test_a_failing_metric_never_keeps_a_journal_from_being_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.submit([1, 2, 3])
    rig.run()
    rig.close()
    monkeypatch.setattr(Metrics, "observe", refuse)
    before = len(rig.steps)
    again = Rig(steps=rig.steps)
    assert again.engine.metrics().value("metrics_failures_total") == len(again.steps) > before
    again.submit([1, 2, 3])
    again.run()
    again.check_answers()
    again.close()
