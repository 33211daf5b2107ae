"""Metrics of steps told by hand are what a reader would write down.

Source: R15.1 to R15.4, G20, I5.
"""

from pathlib import Path

import attrs
import pytest
from support.metric_story import (
    complete,
    completed,
    end,
    event,
    faulted,
    fed,
    health,
    opened,
    plan,
    stall,
    started,
    submitted,
)

from laneway.engine.distribution import Histogram, decades
from laneway.engine.families import NAMES, picture
from laneway.engine.inputs import (
    NO_TOKEN,
    CancelRequested,
    HealthProbed,
    InboxOverflowed,
    Input,
    JobTimes,
    LoadRequested,
    RowResult,
    TimePassed,
)
from laneway.engine.metrics import MODELS_KEPT_MAX
from laneway.statemachines import Event

MS = 1_000_000
PAGE = Path(__file__).parents[2] / "specs" / "metrics.md"


def test_a_model_at_rest() -> None:
    story = opened()
    assert story.by("kv_slots") == {"empty": 4}
    assert story.by("buffer_pool_items") == {"free": 4}
    assert story.value("kv_cache_usage_perc") == 0
    assert story.value("cache_config_info", block_size="64", num_gpu_blocks="4") == 1
    assert story.value("model_memory_bytes", model="1", chip="0") == 1000
    assert story.value("model_memory_bytes", model="1", chip="1") == 900
    for name in ("running", "waiting"):
        assert story.value(f"num_requests_{name}", model_name="m", engine="0", generation="1") == 0


def test_lanes_of_two_models_that_move_at_once_count_for_their_own() -> None:
    story = opened()
    story.load(number=2, generation=2)
    lanes = (1, 2, 5)
    for trigger, source, dest in (("bind", "empty", "ready"), ("abandon", "ready", "unknown")):
        story.at(1, TimePassed(), Event("lane", lanes, trigger, source, dest, 1, 1))
        assert story.value("kv_slots", generation="1", state=dest) == 2
        assert story.value("kv_slots", generation="2", state=dest) == 1
    assert story.value("kv_slots", generation="1", state="empty") == 2
    assert story.value("kv_slots", generation="2", state="empty") == 3


def test_versions_stand_on_one_series_joined_by_generation() -> None:
    families = {family.name: family for family in picture(opened().metrics).families}
    (build,) = families["laneway:build_info"].series
    assert dict(zip(families["laneway:build_info"].labels, build[0], strict=True)) == {
        "model_name": "m",
        "engine": "0",
        "generation": "1",
        "model_hash": "hash1",
        "runtime_version": "r1",
        "driver_version": "d1",
        "firmware_version": "f1",
        "version": "1.2",
    }
    versions = {"model_hash", "runtime_version", "driver_version", "firmware_version", "version"}
    others = [f for name, f in families.items() if name != "laneway:build_info"]
    assert not any(versions & set(family.labels) for family in others)


def test_one_request_from_admission_to_its_last_token() -> None:
    story = opened()
    story.admit(1, 1)
    assert story.value("num_requests_waiting") == 1
    story.prefill(4, 1, lane=1, job=1, accept=False)
    assert (story.value("num_requests_waiting"), story.value("num_requests_running")) == (0, 1)
    assert (story.value("submit_queue_depth"), story.value("jobs_inflight")) == (1, 0)
    assert story.value("lanes_active") == 1
    assert story.value("kv_cache_usage_perc") == 0.25
    assert story.by("kv_slots") == {"empty": 3, "reserved": 1}
    assert story.by("buffer_pool_items") == {"free": 3, "preparing": 1}
    story.accept(4.5, 1, buffer=1)
    assert (story.value("submit_queue_depth"), story.value("jobs_inflight")) == (0, 1)
    decode = event("request", 1, "decode", "prefilling")
    story.at(6, completed(1), *complete(1, buffer=1, lanes=[1]), decode)
    assert story.value("prompt_tokens_total") == 3
    assert story.value("generation_tokens_total") == 1
    assert story.by("buffer_pool_items") == {"free": 3, "completing": 1}
    assert (story.value("jobs_inflight"), story.value("lanes_active")) == (0, 0)
    story.decode(6, 2, [1, 1, 3, 4])
    story.at(7.5, completed(2), *complete(2, buffer=3, lanes=[1]))
    story.at(8, TimePassed(), *plan(3, "decode", buffer=4, rows=[[1, 1, 4, 5]]))
    story.accept(8, 3, buffer=4)
    story.at(
        10,
        completed(3),
        *complete(3, buffer=4, lanes=[1]),
        end(1, "finish", "decoding", reason="length", tokens=3),
        event("lane", 1, "evict", "ready"),
    )
    assert story.value("generation_tokens_total") == 3
    assert story.value("request_success_total", finished_reason="length") == 1
    assert story.counted("time_to_first_token_seconds") == [1, 5.0]  # 1 -> 6
    assert story.counted("inter_token_latency_seconds") == [2, 4.0]  # 6 -> 7.5 -> 10
    assert story.counted("request_time_per_output_token_seconds") == [1, 2.0]  # (10 - 6) / 2
    assert story.counted("e2e_request_latency_seconds") == [1, 9.0]  # 1 -> 10
    assert story.counted("request_queue_time_seconds") == [1, 3.0]  # 1 -> 4
    assert story.counted("request_prefill_time_seconds") == [1, 2.0]  # 4 -> 6
    assert story.counted("request_decode_time_seconds") == [1, 4.0]  # 6 -> 10
    assert story.counted("request_inference_time_seconds") == [1, 6.0]  # 4 -> 10
    assert story.counted("batch_fill_ratio", submodel="p1") == [1, 1.0]
    assert story.counted("batch_fill_ratio", submodel="d2") == [2, 1.0]  # two jobs, half full
    assert (story.value("num_requests_running"), story.value("kv_cache_usage_perc")) == (0, 0)


def test_an_end_token_is_no_part_of_the_answer() -> None:
    story = fed()
    ended = end(1, "finish", "prefilling", reason="stop", tokens=0)
    story.at(6, completed(1), *complete(1, buffer=1, lanes=[1]), ended)
    assert story.value("generation_tokens_total") == 0
    assert story.value("request_success_total", finished_reason="stop") == 1
    assert story.counted("time_to_first_token_seconds") == [0, 0.0]
    assert story.counted("e2e_request_latency_seconds") == [1, 5.0]
    assert story.counted("request_inference_time_seconds") == [0, 0.0]


def test_a_row_without_a_token_gives_none_and_its_neighbour_its_own() -> None:
    story = fed()
    story.admit(4, 2)
    decode = event("request", 1, "decode", "prefilling")
    story.at(6, completed(1), *complete(1, buffer=1, lanes=[1]), decode)
    story.at(6, TimePassed(), event("buffer", 1, "release", "completing"))
    story.prefill(6, 2, lane=2, job=2)
    decode = event("request", 2, "decode", "prefilling")
    story.at(7, completed(2), *complete(2, buffer=1, lanes=[2]), decode)
    story.decode(7, 3, [1, 1, 3, 4], [2, 2, 3, 4])
    assert story.value("lanes_active") == 2
    story.at(
        8,
        completed(3, RowResult(token=NO_TOKEN, fault="parameters"), RowResult(token=6)),
        *complete(3, buffer=3, lanes=[1, 2]),
        end(1, "fail", "decoding", reason="parameters", tokens=1),
    )
    assert story.value("generation_tokens_total") == 3
    assert story.value("request_success_total", finished_reason="error") == 1
    assert story.value("corrupted_requests_total") == 0
    assert story.value("lanes_active") == 0
    assert story.counted("inter_token_latency_seconds") == [1, 1.0]
    assert story.counted("batch_fill_ratio", submodel="d2") == [1, 1.0]


def test_a_row_that_failed_gives_no_token_even_if_its_request_lives() -> None:
    story = fed()
    row = RowResult(token=NO_TOKEN, fault="parameters")
    story.at(6, completed(1, row), *complete(1, buffer=1, lanes=[1]))
    assert story.value("num_requests_running") == 1
    assert story.value("generation_tokens_total") == 0


def test_golden_and_warm_up_jobs_are_held_but_not_measured() -> None:
    story = opened()
    bind = event("lane", 1, "bind", "empty", data={"origin": "golden", "owners": [0]})
    rows = [[1, 0, 0, 3]]
    planned = plan(1, "prefill", buffer=1, rows=rows, origin="golden")
    story.at(1, TimePassed(), bind, *planned)
    assert (story.value("submit_queue_depth"), story.value("lanes_active")) == (1, 1)
    story.accept(2, 1, buffer=1)
    done = completed(1, RowResult(token=NO_TOKEN, verdict="equal"))
    story.at(3, done, *complete(1, buffer=1, lanes=[1]))
    assert (story.value("jobs_inflight"), story.value("lanes_active")) == (0, 0)
    assert story.value("prompt_tokens_total") == story.value("generation_tokens_total") == 0
    assert story.counted("batch_fill_ratio", submodel="p1") == [0, 0.0]
    assert story.by("job_stage_seconds") == {}


@pytest.mark.parametrize(
    ("trigger", "reason", "told"),
    [
        ("cancel", "cancelled", "abort"),
        ("expire", "deadline", "deadline"),
        ("fail", "device_lost", "error"),
    ],
)
def test_who_ends_while_waiting_has_waited(trigger: str, reason: str, told: str) -> None:
    story = opened()
    story.admit(2, 1)
    ended = end(1, trigger, "waiting", reason=reason, tokens=0)
    story.at(9, CancelRequested(request=1), ended)
    assert story.by("request_success_total") == {told: 1}
    assert story.counted("request_queue_time_seconds") == [1, 7.0]
    assert story.counted("e2e_request_latency_seconds") == [1, 7.0]
    assert story.counted("request_prefill_time_seconds") == [0, 0.0]
    assert story.value("num_requests_waiting") == 0


def test_refusals_by_reason() -> None:
    story = opened()
    for number, reason in enumerate(("too_long", "max_num_queued_reqs", "too_long"), 1):
        refused = event("request", number, "reject", "received", data={"reason": reason})
        story.at(number, submitted(number), refused)
    story.at(5, InboxOverflowed(count=4))
    assert story.by("admission_rejections_total") == {
        "inbox_full": 4,
        "max_num_queued_reqs": 1,
        "too_long": 2,
    }
    assert story.by("request_success_total") == {}


def test_the_waiting_wait_for_a_turn_for_a_lane_or_for_the_device() -> None:
    story = opened()
    for number in range(1, 7):
        story.admit(1, number)
    assert story.by("num_requests_waiting_by_reason") == {"capacity": 4, "lane": 2}
    story.prefill(2, 1, lane=1, job=1)
    assert story.by("num_requests_waiting_by_reason") == {"capacity": 3, "lane": 2}
    story.at(3, stall("suspect"), event("device", 0, "suspect", "serving"))
    assert story.by("num_requests_waiting_by_reason") == {"device": 5}
    story.at(4, completed(1), event("device", 0, "absolve", "suspect"))
    assert story.by("num_requests_waiting_by_reason") == {"capacity": 3, "lane": 2}


def test_stages_are_those_the_device_tells() -> None:
    story = fed()
    times = JobTimes(
        submit_ns=1 * MS,
        accept_ns=2 * MS,
        h2d_begin_ns=4 * MS,
        h2d_end_ns=5 * MS,
        exec_begin_ns=6 * MS,
        exec_end_ns=26 * MS,
        d2h_begin_ns=0,
        d2h_end_ns=30 * MS,
        visible_ns=31 * MS,
        postprocess_ns=2 * MS,
    )
    decode = event("request", 1, "decode", "prefilling")
    done = completed(1, times=times)
    story.at(6, done, *complete(1, buffer=1, lanes=[1]), decode)
    stages = {
        stage: story.counted("job_stage_seconds", stage=stage, task="prefill", submodel="p1")
        for stage in ("queue", "h2d", "infer", "postprocess")
    }
    assert stages == {
        "queue": [1, 0.003],
        "h2d": [1, 0.001],
        "infer": [1, 0.02],
        "postprocess": [1, 0.002],
    }
    assert story.value("job_stage_seconds", stage="d2h") is None


@pytest.mark.parametrize(
    ("taken", "reason"),
    [
        (completed(7), "not_in_flight"),
        (faulted(7, "ccu"), "not_in_flight"),
        (completed(1, epoch=2), "epoch"),
        (completed(1, generation=2), "generation"),
        (completed(1, ticket=5), "ticket"),
        (completed(1, RowResult(token=NO_TOKEN, fault="numeric"), ticket=5), "ticket"),
    ],
)
def test_an_answer_that_ends_no_job_is_stale(taken: Input, reason: str) -> None:
    story = fed()
    before = story.value("jobs_inflight")
    story.at(5, taken)
    assert story.by("stale_completions_total") == {reason: 1}
    assert story.value("jobs_inflight") == before == 1
    assert story.value("generation_tokens_total") == 0
    assert "numeric" not in story.by("device_exceptions_total")
    decode = event("request", 1, "decode", "prefilling")
    story.at(6, completed(1), *complete(1, buffer=1, lanes=[1]), decode)
    assert story.by("stale_completions_total") == {reason: 1}
    assert story.value("generation_tokens_total") == 1


def fault_events(kind: str) -> list[Event]:
    """Return what follows from a fault of job 1: it, its buffer, lane and request, the device."""
    return [
        event("buffer", 1, "quarantine", "submitted"),
        event("job", 1, "fault", "submitted"),
        event("lane", 1, "suspect", "reserved"),
        end(1, "fail", "prefilling", reason=f"device_fault_{kind}", tokens=0),
        event("device", 0, "suspect", "serving"),
        event("device", 0, "lose", "suspect"),
    ]


@pytest.mark.parametrize(
    ("taken", "kind", "corrupted"),
    [
        (faulted(1, "ccu"), "ccu", 0),
        (stall("confirm"), "hang", 0),
        (completed(1, RowResult(token=NO_TOKEN, fault="numeric")), "numeric", 1),
    ],
)
def test_a_fault_is_counted_and_what_it_took_stays_in_use(
    taken: Input, kind: str, corrupted: int
) -> None:
    story = fed()
    story.at(6, taken, *fault_events(kind))
    assert story.by("device_exceptions_total") == {kind: 1}
    assert story.by("stale_completions_total") == {}
    assert story.by("kv_slots") == {"empty": 3, "unknown": 1}
    assert story.value("kv_cache_usage_perc") == 0.25
    assert story.by("buffer_pool_items") == {"free": 3, "quarantined": 1}
    assert (story.value("jobs_inflight"), story.value("num_requests_running")) == (0, 0)
    assert story.value("corrupted_requests_total") == corrupted
    assert story.value("request_success_total", finished_reason="error") == 1


def test_a_suspicion_and_a_hang_of_no_job_are_no_exceptions() -> None:
    story = fed()
    story.at(6, stall("suspect"))
    story.at(6, attrs.evolve(stall("confirm"), job=7))
    assert story.by("device_exceptions_total") == {}


def test_the_device_tells_its_own_counters_at_a_probe_and_at_a_fault() -> None:
    story = fed()
    assert story.by("device_jobs") == {}
    probe = health(submitted=9, pending=2, finished=6, left=1)
    story.at(5, HealthProbed(health=probe, reason=""))
    assert story.by("device_jobs") == {"finished": 6, "left": 1, "pending": 2}
    story.at(5, HealthProbed(health=None, reason="silent"))
    assert story.by("device_jobs") == {"finished": 6, "left": 1, "pending": 2}
    story.at(6, faulted(None, "device", health=health(finished=8)))
    assert story.by("device_jobs") == {"finished": 8}
    story.at(7, started())
    assert story.by("device_jobs") == {}


def test_gauges_go_with_the_model_and_its_counters_stay() -> None:
    story = fed()
    ended = end(1, "finish", "prefilling", reason="stop", tokens=1)
    story.at(
        6,
        completed(1),
        *complete(1, buffer=1, lanes=[1]),
        ended,
        event("lane", 1, "evict", "ready"),
    )
    story.unload(7, 1)
    assert story.value("generation_tokens_total", generation="1") == 1
    assert story.value("build_info", generation="1") == 1
    others = ("build", "breaker")  # of a generation that is gone too; of the device
    gauges = [
        name
        for name, kind in NAMES.items()
        if kind == "gauge" and not any(other in name for other in others)
    ]
    assert {name: story.by(name.partition(":")[2]) for name in gauges} == dict.fromkeys(gauges, {})
    story.load(8, number=2, generation=2)
    assert story.value("generation_tokens_total", generation="1") == 1
    assert story.value("generation_tokens_total", generation="2") == 0
    assert story.value("kv_cache_usage_perc", generation="2") == 0
    assert story.value("kv_cache_usage_perc", generation="1") is None


def test_a_restart_ends_what_a_dead_process_held() -> None:
    story = fed()
    story.at(5, CancelRequested(request=1), end(1, "cancel", "prefilling", reason="c", tokens=0))
    story.at(
        9,
        started(),
        event("job", 1, "abandon", "submitted", generation=0),
        event("buffer", 1, "abandon", "submitted", generation=0),
        event("lane", 1, "abandon", "reserved", generation=0),
        event("model", 1, "abandon", "ready"),
        event("model", 1, "clean", "failed"),
        event("device", 0, "abandon", "serving"),
        event("device", 0, "open", "closed", data={"incarnation": 2}),
    )
    assert not story.metrics.jobs and not story.metrics.requests
    story.load(10, number=2, generation=2)
    assert story.by("kv_slots") == {"empty": 4}
    assert (story.value("jobs_inflight"), story.value("lanes_active")) == (0, 0)
    assert story.value("request_success_total", generation="1", finished_reason="abort") == 1


def test_models_that_are_long_gone_are_forgotten() -> None:
    story = opened()
    story.unload(1, 1)
    for number in range(2, 3 * MODELS_KEPT_MAX):
        story.load(number, number=number, generation=number)
        story.unload(number, number)
    assert len(story.metrics.models) == MODELS_KEPT_MAX
    assert story.value("generation_tokens_total", generation=str(number)) == 0
    assert story.value("generation_tokens_total", generation="1") is None


def test_a_load_that_was_refused_leaves_no_series() -> None:
    story = opened()
    story.unload(1, 1)
    taken = LoadRequested(model=2, alias="x", source="s")
    alias = {"alias": "x", "source": "s"}
    refused = [
        event("model", 2, "load", "unloaded", generation=0, data=alias),
        event("model", 2, "refuse", "validating", generation=0),
        event("model", 2, "clean", "failed", generation=0),
    ]
    story.at(2, taken, *refused)
    assert list(story.metrics.models) == [1]


# ---------------------------------------------------------------------------- histograms


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram((10, 20, 50), 10)
    for value in (10, 11, 20, 50, 51, 0):
        histogram.observe(value)
    told = histogram.freeze()
    assert told.counts == (2, 2, 1, 1)
    assert told.cumulative() == ((1.0, 2), (2.0, 4), (5.0, 5), (float("inf"), 6))
    assert (told.count, told.total) == (6, 142)


def test_percentiles_lie_where_an_even_spread_would_put_them() -> None:
    histogram = Histogram((10, 20, 50), 10)
    assert histogram.freeze().quantile(0.5) is None
    for value in [5] * 5 + [15] * 4 + [60]:
        histogram.observe(value)
    told = histogram.freeze()
    assert told.quantile(0.25) == pytest.approx(0.5)  # half of the five in 0..1
    assert told.quantile(0.7) == pytest.approx(1.5)  # half of the four in 1..2
    assert told.quantile(0.99) == 5.0  # above every bound


def test_bounds_rise_by_one_two_five() -> None:
    assert decades(1, 50) == (1, 2, 5, 10, 20, 50)
    assert decades(10, 30) == (10, 20)


# ---------------------------------------------------------------------------- the page


def rows(page: str) -> list[tuple[str, ...]]:
    """Return name, kind, further labels and meaning of every metric of a page."""
    lines = [line for line in page.splitlines() if line.startswith("| `laneway:")]
    return [
        tuple(cell.strip().replace("`", "") for cell in line.split("|")[1:-1]) for line in lines
    ]


def test_the_page_describes_every_metric() -> None:
    told = picture(opened().metrics).families
    own = {"model_name", "engine", "generation"}
    described = [
        (f.name, f.kind, ", ".join(label for label in f.labels if label not in own) or "–", f.help)
        for f in told
    ]
    assert rows(PAGE.read_text("utf-8")) == described


def test_a_difference_from_the_page_would_be_seen() -> None:
    assert rows("| `laneway:a_total` | counter | `x`, `y` | What it is. |\n| b | c |") == [
        ("laneway:a_total", "counter", "x, y", "What it is.")
    ]
