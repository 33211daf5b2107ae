"""Metrics of an engine on a board equal those of its journal file, number by number.

Source: I8, R15.1 to R15.4.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.asking import draw_ask
from support.command_line import laneway
from support.real_engine import RealEngine
from support.rig import without_resets

from laneway.engine.distribution import Distribution
from laneway.engine.inputs import Completed
from laneway.engine.picture import MetricsPicture
from laneway.journal import open_journal
from laneway.journal.stats import stats

IDLE = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("submit_queue_depth", "jobs_inflight", "lanes_active"),
)


def of_file(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the metrics that a reader of the file folds, also while an engine writes it."""
    with open_journal(file, read_only=True) as journal:
        metrics: dict[str, list[dict[str, Any]]] = stats(journal)["metrics"]
    return metrics


def count(told: MetricsPicture, name: str, **labels: str) -> Any:
    """Return how many values a histogram has."""
    value = told.value(name, **labels)
    assert value is not None and not isinstance(value, int | float)
    return value.count


@pytest.mark.parametrize("tokens", ["full", "digest"])
def test_a_running_engine_and_its_file_agree(calbin: Path, tmp_path: Path, tokens: str) -> None:
    file = tmp_path / "run.db"
    real = RealEngine(calbin, journal=open_journal(file, tokens=tokens))
    random = np.random.default_rng(5)
    asks = [draw_ask(random, tokens_max=8) for _ in range(12)]
    for ask in asks:
        real.submit(ask)
    real.streams[9].cancel()
    for _ in range(8):
        for _ in range(25):
            real.engine.advance()
        assert of_file(file) == real.engine.metrics().to_json()
    assert real.engine.metrics().value("num_requests_running") != 0
    results = real.results()
    real.engine.run_until_idle()
    told = real.engine.metrics()
    assert of_file(file) == told.to_json()
    assert {name: told.value(name) for name in IDLE} == dict.fromkeys(IDLE, 0)
    tokens_of = [result.usage.completion_tokens for result in results]
    assert told.value("generation_tokens_total") == sum(tokens_of)
    assert count(told, "time_to_first_token_seconds") == sum(n > 0 for n in tokens_of)
    ran = [len(job.tokens) for job in real.jobs if job.task == "prefill"]
    assert told.value("prompt_tokens_total") == sum(ran)
    for task in ("prefill", "decode"):
        jobs = sum(job.task == task for job in real.jobs)
        assert count(told, "batch_fill_ratio", task=task) == jobs > 0
        for stage in ("queue", "h2d", "infer", "d2h", "postprocess"):
            assert count(told, "job_stage_seconds", task=task, stage=stage) == jobs
    real.close()
    assert of_file(file) == real.engine.metrics().to_json()
    (sums,) = laneway("journal", "stats", file, "--json").done().rows
    assert sums["metrics"] == of_file(file)


@pytest.mark.parametrize("overlap", [0, 2, 3])
def test_overlap_and_busy_banks_are_what_the_completions_say(
    calbin: Path, tmp_path: Path, overlap: int
) -> None:
    """Two in flight, against counting the busy banks at every border of two phases."""
    file = tmp_path / "run.db"
    real = RealEngine(
        calbin,
        url=f"sim:tiny?clock=virtual&overlap={overlap}",
        journal=open_journal(file),
        together=True,
    )
    random = np.random.default_rng(7)
    for _ in range(16):
        real.submit(draw_ask(random, tokens_max=8))
    real.run()
    told = real.engine.metrics()
    assert of_file(file) == told.to_json()
    jobs = [step.taken for step in real.steps() if isinstance(step.taken, Completed)]
    spans = [(one.engine_slot, one.times.h2d_begin_ns, one.times.d2h_end_ns) for one in jobs]
    borders = sorted({at for _, begin, end in spans for at in (begin, end)})
    busy = both = idle = 0
    for begin, end in pairwise(borders):
        running = sum(first <= begin and end <= last for _, first, last in spans)
        busy += (end - begin) * (running > 0)
        both += (end - begin) * (running > 1)
        idle += (end - begin) * (running == 0)
    assert told.value("device_busy_seconds_total") == busy / 1e9
    assert told.value("device_overlap_seconds_total") == both / 1e9
    assert told.value("overlap_ratio") == both / busy
    assert (both > 0) == (overlap > 0)
    pauses = told.value("device_idle_seconds")
    assert isinstance(pauses, Distribution) and pauses.total == idle
    for slot, name in enumerate(("ping", "pong"), 1):
        held = sum(end - begin for bank, begin, end in spans if bank == slot)
        assert told.value("engine_slot_busy_seconds_total", slot=name) == held / 1e9 > 0
        assert told.value("engine_slot_busy_ratio", slot=name) == held / (busy + idle)
    for task in ("prefill", "decode"):
        assert count(told, "job_seconds", task=task) > 0
    tokens = told.value("generation_tokens_total")
    assert count(told, "turn_wait_seconds") >= tokens  # a turn for each token, cancelled or not
    real.close()


def test_they_agree_after_a_fault_and_over_two_lives(calbin: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    plan = "fault a kind=ccu_exception on=exec nth=4 code=77 quiesce=y kv=unknown"
    (tmp_path / "plan").write_text(f"{plan}\n")
    url = f"sim:tiny?clock=virtual&faults={tmp_path / 'plan'}"
    first = RealEngine(calbin, url=url, journal=open_journal(file), limits=without_resets())
    random = np.random.default_rng(6)
    asks = [draw_ask(random, tokens_max=8) for _ in range(3)]
    for ask in asks:
        first.submit(ask)
    lost = first.results()
    told = first.engine.metrics()
    assert of_file(file) == told.to_json()
    errors = sum(result.finish_reason == "error" for result in lost)
    assert told.value("request_success_total", finished_reason="error") == errors > 0
    assert told.value("device_exceptions_total", kind="ccu") == 1
    assert told.value("buffer_pool_items", state="quarantined") == 1
    usage = told.value("kv_cache_usage_perc")
    assert isinstance(usage, float) and 0 < usage < 1
    assert told.value("jobs_inflight") == told.value("num_requests_waiting") == 0
    first.close()
    again = RealEngine(calbin, journal=open_journal(file))
    assert of_file(file) == again.engine.metrics().to_json()
    for ask in asks:
        again.submit(ask)
    results = again.results()
    again.engine.run_until_idle()
    told = again.engine.metrics()
    assert of_file(file) == told.to_json()
    assert told.value("device_exceptions_total", kind="ccu") == 1
    assert {name: told.value(name) for name in IDLE} == dict.fromkeys(IDLE, 0)
    for generation, answers in (("1", lost), ("2", results)):
        tokens = sum(result.usage.completion_tokens for result in answers)
        assert told.value("generation_tokens_total", generation=generation) == tokens
        assert told.value("build_info", generation=generation) == 1
    assert told.value("metrics_failures_total") == 0
    again.close()
    assert of_file(file) == again.engine.metrics().to_json()
