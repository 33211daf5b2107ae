"""How busy the device was, how much two jobs overlapped, and who waited how long, by hand.

Source: R15.2, R15.3, I8.
"""

from itertools import pairwise

import numpy as np
import pytest
from support.metric_story import complete, completed, end, event, fed, opened

from laneway.engine.buckets import BUCKET_BOUNDS, BUCKETS, Bucketed, bucket_of
from laneway.engine.distribution import Distribution, Histogram
from laneway.engine.inputs import JobTimes
from laneway.engine.occupancy import Occupancy


def span(begin: int, end: int) -> JobTimes:
    """Return times of a job whose phases fill an interval."""
    middle = (begin + end) // 2
    return JobTimes(
        submit_ns=1,
        h2d_begin_ns=begin,
        h2d_end_ns=middle,
        exec_begin_ns=middle,
        exec_end_ns=middle,
        d2h_begin_ns=middle,
        d2h_end_ns=end,
    )


def pauses(told: Occupancy) -> tuple[int, int]:
    """Return how many pauses there were, and how long they were together."""
    frozen = told.pauses.freeze()
    return frozen.count, frozen.total


def test_jobs_one_after_the_other_have_pauses_between_them() -> None:
    told = Occupancy()
    for job, (begin, until) in enumerate(((100, 150), (170, 200), (200, 210)), 1):
        told.plan(job)
        told.end(job, 1, span(begin, until))
    assert (told.slots, told.busy_ns, told.overlap_ns) == ({"ping": 90}, 90, 0)
    assert pauses(told) == (2, 20)
    assert told.share("ping") == 90 / 110
    assert told.overlap_share == 0.0


def test_a_long_job_beside_short_ones_is_no_pause_whoever_ends_first() -> None:
    """Job 1 lasts from 100 to 200 on pong; 2, 3 and 4 run beside it on ping and end before it."""
    told = Occupancy()
    told.plan(1)
    beside = {2: (110, 120), 3: (140, 160), 4: (190, 230)}
    for job, (begin, until) in beside.items():
        told.plan(job)
        told.end(job, 1, span(begin, until))
    assert told.busy_ns == 0, "what job 1 did beside them is not known yet"
    told.end(1, 2, span(100, 200))
    assert told.slots == {"pong": 100, "ping": 10 + 20 + 40}
    assert told.busy_ns == 130
    assert told.overlap_ns == 10 + 20 + 10
    assert pauses(told) == (0, 0)
    assert told.overlap_share == 40 / 130


def test_nobody_waits_in_a_pause_without_requests() -> None:
    told = Occupancy()
    told.plan(1)
    told.end(1, 1, span(10, 20))
    told.rest()
    told.plan(2)
    told.end(2, 1, span(500, 510))
    assert (told.busy_ns, pauses(told)) == (20, (0, 0))
    told.plan(3)
    told.end(3, 1, None)
    told.rest()
    told.plan(4)
    told.end(4, 1, None)  # refused: the next one is the first after the rest
    told.plan(5)
    told.end(5, 1, span(900, 910))
    assert (told.busy_ns, pauses(told)) == (30, (0, 0))


def test_a_device_opened_anew_has_another_clock() -> None:
    told = Occupancy()
    told.plan(1)
    told.end(1, 1, span(1000, 1100))
    told.plan(2)
    told.restart()
    told.plan(3)
    told.end(2, 1, None)
    told.end(3, 2, span(5, 15))
    assert not told._ended and not told._order
    assert (told.busy_ns, told.overlap_ns, pauses(told)) == (110, 0, (0, 0))


@pytest.mark.parametrize("times", [JobTimes(), JobTimes(h2d_begin_ns=9, d2h_end_ns=3)])
def test_a_job_of_which_nothing_is_told_is_left_out(times: JobTimes) -> None:
    told = Occupancy()
    told.plan(1)
    told.end(1, 1, times)
    assert not told.slots and told.busy_ns == 0
    assert told.share("ping") == told.overlap_share == 0.0


@pytest.mark.parametrize(
    ("times", "busy_ns"),
    [
        (JobTimes(h2d_begin_ns=10, h2d_end_ns=12), 12 - 10),
        (JobTimes(exec_begin_ns=10, exec_end_ns=20), 20 - 10),
        (JobTimes(d2h_begin_ns=10, d2h_end_ns=30), 30 - 10),
        (JobTimes(exec_begin_ns=12, exec_end_ns=20, d2h_begin_ns=10, d2h_end_ns=30), 30 - 10),
        (JobTimes(h2d_begin_ns=9, h2d_end_ns=40, exec_begin_ns=5, exec_end_ns=20), 40 - 5),
        (JobTimes(h2d_begin_ns=9, exec_end_ns=20, d2h_begin_ns=30), 20 - 9),
    ],
)
def test_a_job_is_busy_over_the_phases_that_are_told(times: JobTimes, busy_ns: int) -> None:
    told = Occupancy()
    told.plan(1)
    told.end(1, 1, times)
    assert (told.slots, told.busy_ns) == ({"ping": busy_ns}, busy_ns)


@pytest.mark.parametrize("seed", range(20))
def test_two_banks_in_any_order_are_what_a_count_at_each_instant_says(seed: int) -> None:
    """Against counting the busy banks at every nanosecond."""
    random = np.random.default_rng(seed)
    busy = np.zeros((2, 4000), bool)
    free = [10, 10]
    spans: dict[int, tuple[int, int, int]] = {}
    for job in range(1, 30):
        bank = int(random.integers(2))
        least = max(free[bank], spans[job - 1][1] if job > 1 else 0)
        begin = least + int(random.integers(0, 9))
        free[bank] = begin + int(random.integers(1, 60))
        spans[job] = (bank, begin, free[bank])
        busy[bank, begin : free[bank]] = True
    told = Occupancy()
    for job in spans:
        told.plan(job)
    ended = sorted(spans, key=lambda job: spans[job][2])
    for job in ended:
        bank, begin, until = spans[job]
        told.end(job, 1 + bank, span(begin, until))
    either = busy.any(axis=0)
    assert told.busy_ns == either.sum()
    assert told.overlap_ns == busy.all(axis=0).sum()
    assert told.slots == {"ping": busy[0].sum(), "pong": busy[1].sum()}
    work = np.flatnonzero(either)
    gaps = [after - before - 1 for before, after in pairwise(work.tolist()) if after > before + 1]
    frozen = told.pauses.freeze()
    assert frozen.total == sum(gaps)


# ---------------------------------------------------------------------------- buckets


def test_a_bucket_ends_with_its_bound() -> None:
    for place, bound in enumerate(BUCKET_BOUNDS):
        assert (bucket_of(bound), bucket_of(bound + 1)) == (place, place + 1)
    assert (bucket_of(0), BUCKETS[bucket_of(1 << 20)]) == (0, "more")


def test_what_saw_nothing_has_no_series_but_there_is_one() -> None:
    told = Bucketed()
    assert [(name, one.count) for name, one in told.freeze()] == [("32", 0)]
    told.observe(2, 5)
    told.observe(0, 7)
    assert [(name, one.total) for name, one in told.freeze()] == [("32", 7), ("512", 5)]


def test_series_of_several_buckets_add_up() -> None:
    one, two = Histogram((10, 20), 10), Histogram((10, 20), 10)
    one.observe(5)
    two.observe(15)
    two.observe(90)
    both = one.freeze().plus(two.freeze())
    assert both == Distribution((10, 20), (1, 1, 1), 110, 10)
    with pytest.raises(ValueError, match="different bounds"):
        one.freeze().plus(Histogram((10,), 10).freeze())


# ---------------------------------------------------------------------------- a story


def test_turns_and_runs_of_one_request_by_task() -> None:
    """Admitted at 1, prefill 4 to 6, decode planned at 6 and done at 7.5, then at 8 and 10."""
    story = fed()
    decode = event("request", 1, "decode", "prefilling")
    story.at(6, completed(1), *complete(1, buffer=1, lanes=[1]), decode)
    story.decode(6.25, 2, [1, 1, 3, 4])
    story.at(7.5, completed(2), *complete(2, buffer=3, lanes=[1]))
    assert story.counted("turn_wait_seconds", task="prefill", bucket="32") == [1, 3.0]
    assert story.counted("turn_wait_seconds", task="decode") == [1, 0.25]
    assert story.counted("job_seconds", task="prefill") == [1, 2.0]
    assert story.counted("job_seconds", task="decode", bucket="32") == [1, 1.25]


def test_the_device_is_idle_between_the_jobs_of_a_living_request() -> None:
    story = opened()
    story.admit(1, 1)
    story.prefill(1, 1, lane=1, job=1)
    second = 1_000_000_000
    done = completed(1, times=span(second, 2 * second), engine_slot=1)
    decode = event("request", 1, "decode", "prefilling")
    story.at(2, done, *complete(1, buffer=1, lanes=[1]), decode)
    story.decode(2, 2, [1, 1, 3, 4])
    story.at(
        4,
        completed(2, times=span(3 * second, 4 * second), engine_slot=2),
        *complete(2, buffer=3, lanes=[1]),
        end(1, "finish", "decoding", reason="length", tokens=2),
    )
    assert story.counted("device_idle_seconds") == [1, 1.0]
    assert story.by("engine_slot_busy_seconds_total") == {"ping": 1.0, "pong": 1.0}
    assert story.value("device_busy_seconds_total") == 2.0
    assert story.by("engine_slot_busy_ratio") == {"ping": 1 / 3, "pong": 1 / 3}
    assert story.value("overlap_ratio") == story.value("device_overlap_seconds_total") == 0
