"""Latencies of many requests at once are those of each one alone, whoever joins or leaves.

A life is held against a recount of its steps in which every request stands for itself; what such
lives seldom have is told by hand.

Source: R15.2, R15.3, I8.
"""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
from support.campaign import Arrival, Schedule, draw, play
from support.fake_device import FakeDevice
from support.metric_story import Story, complete, completed, event, opened, plan
from support.recount import Recount, check_recount
from support.rig import Rig
from support.schedules import VERIFIED, wide

from laneway.engine import Limits
from laneway.engine.families import picture
from laneway.engine.inputs import NO_TOKEN, RowResult, TimePassed
from laneway.engine.metrics import Metrics
from laneway.engine.ports import Step
from laneway.journal import open_journal

LENGTHS = (1, 3, 14, 34)
"""Of prompts: those of the first three are in one bucket."""


def told_at_any_time(steps: Sequence[Step], seed: int) -> list[Step]:
    """Return the steps with instants that differ: no two intervals are alike, some are long."""
    it = random.Random(seed)
    at_ns = 0
    told = []
    for step in steps:
        at_ns += it.choice((0, 3, 40_000, 700_000, 9_000_000, 250_000_000)) + it.randrange(1000)
        told.append(attrs.evolve(step, at_ns=at_ns))
    return told


def measured(steps: Sequence[Step]) -> Recount:
    """Measure steps, hold all that was measured against a recount, and return that."""
    metrics = Metrics()
    for step in steps:
        metrics.observe(step)
    return check_recount(picture(metrics), steps)


def crowd(seed: int) -> Schedule:
    """Draw a life with faults, cancels and deadlines in which prompts of any length crowd."""
    it = random.Random(1000 + seed)
    schedule = draw(seed)
    arrivals = tuple(
        Arrival(
            after=it.choice((0, 0, 0, 4, 30)),
            prompt=tuple(it.randint(1, 60) for _ in range(it.choice(LENGTHS))),
            seed=number,
            max_tokens=it.choice((1, 2, 5, 12)),
            cancel_after=it.randint(0, 120) if it.random() < 0.15 else None,
            deadline_us=it.randint(1, 400) if it.random() < 0.1 else None,
        )
        for number in range(it.choice((4, 10, 20)))
    )
    return attrs.evolve(schedule, arrivals=arrivals)


def steps_of(schedule: Schedule, file: Path) -> list[Step]:
    """Play a life and read its steps from its journal."""
    play(schedule, keep=file)
    with open_journal(file, read_only=True) as journal:
        return list(journal.read())


def test_lives_with_faults_are_what_a_recount_says(tmp_path: Path) -> None:
    moves: Counter[str] = Counter()
    for seed in range(24):
        steps = steps_of(crowd(seed), tmp_path / f"{seed}.db")
        try:
            measured(steps)
            measured(told_at_any_time(steps, seed))
        except AssertionError as error:
            error.add_note(f"the life of seed {seed}")
            raise
        events = (event for step in steps for event in step.events)
        moves.update(event.trigger for event in events if event.machine == "request")
    few = {name: moves[name] for name in ("suspend", "resume", "cancel", "expire", "fail")}
    assert min(few.values()) >= 5, few


def crowded(steps: Sequence[Step] = ()) -> Rig:
    """Return a rig with eight lanes in batches and two jobs in flight."""
    device = FakeDevice(
        inflight_max=2,
        verified=VERIFIED,
        artifact=lambda model: wide(model, lanes=8, batches=(1, 4, 8), rule="length_zero"),
    )
    return Rig(device=device, limits=Limits(inflight_jobs_max=2), steps=steps, resume=bool(steps))


@pytest.mark.parametrize("seed", range(6))
def test_lives_over_a_kill_are_what_a_recount_says(seed: int) -> None:
    it = random.Random(seed)
    rig = crowded()
    for number in range(12):
        prompt = [it.randint(1, 60) for _ in range(it.choice(LENGTHS))]
        rig.submit(prompt, seed=number, max_tokens=it.randint(4, 12), ignore_eos=True)
    rig.run_actions(it.randint(40, 90))
    assert rig.state.requests
    again = crowded(list(rig.steps))
    for number in range(4):
        again.submit([1, 2], seed=number, max_tokens=9, ignore_eos=True)
    again.run()
    measured(again.steps)
    check_recount(again.engine.metrics(), again.steps)
    measured(told_at_any_time(again.steps, seed))
    assert again.events("request", "resume")
    again.close()


def test_a_batch_that_one_leaves_and_one_joins() -> None:
    """Four decode together; one is cancelled, one comes; each gap counts for whom it was."""
    rig = crowded()
    streams = [
        rig.submit([1] * length, seed=9, max_tokens=9, ignore_eos=True) for length in (2, 2, 34, 34)
    ]
    rig.run(
        until=lambda: [len(one.tokens) >= 3 for one in rig.state.requests.values()] == [True] * 4
    )
    streams[1].cancel()
    rig.run_actions(9)
    rig.submit([1, 2, 3], seed=4, max_tokens=5, ignore_eos=True)
    rig.run()
    left_with = len(streams[1].result().tokens)
    assert 3 <= left_with < 9
    recount = measured(told_at_any_time(rig.steps, 1))
    between = recount.values["inter_token_latency_seconds", "32"]
    assert len(between) == (9 - 1) + (left_with - 1) + (5 - 1)
    assert len(recount.values["inter_token_latency_seconds", "128"]) == 2 * (9 - 1)
    rig.close()


# ---------------------------------------------------------------------------- told by hand

INNOCENT = {"suspect": False}


def prefilled(requests: int) -> Story:
    """Return a story in which requests 1, 2, … got their first token at 1, 2, … in their lane."""
    story = opened()
    for number in range(1, requests + 1):
        story.admit(number - 0.5, number)
        story.prefill(number - 0.5, number, lane=number, job=number, accept=False)
        decode = event("request", number, "decode", "prefilling")
        story.at(number, completed(number), *complete(number, buffer=1, lanes=[number]), decode)
        story.at(number, TimePassed(), event("buffer", 1, "release", "completing"))
    return story


def decode(story: Story, begin: float, until: float, job: int, lanes: tuple[int, int]) -> None:
    """Let two requests, each in the lane of its number, have one more token at ``until``."""
    story.decode(begin, job, *([lane, lane, job, job + 1] for lane in lanes))
    rows = (RowResult(token=5), RowResult(token=6))
    story.at(until, completed(job, *rows), *complete(job, buffer=3, lanes=list(lanes)))
    story.at(until, TimePassed(), event("buffer", 3, "release", "completing"))


def test_batches_of_one_size_whose_members_change() -> None:
    """1 and 2 go on together, then 1 and 3, then 2 and 3, then 2 and 3 in the other order."""
    story = prefilled(3)
    decode(story, 4, 5, 4, (1, 2))  # 1 -> 5, 2 -> 5
    decode(story, 6, 7, 5, (1, 2))  # 5 -> 7 twice
    decode(story, 8, 10, 6, (1, 3))  # 7 -> 10, 3 -> 10
    decode(story, 11, 14, 7, (2, 3))  # 7 -> 14, 10 -> 14
    decode(story, 14, 15, 8, (3, 2))  # 14 -> 15 twice
    gaps = [4, 3, 2, 2, 3, 7, 7, 4, 1, 1]
    assert story.counted("inter_token_latency_seconds") == [len(gaps), sum(gaps)]
    waits = [4 - 1, 4 - 2, 1, 1, 8 - 7, 8 - 3, 11 - 7, 11 - 10, 0, 0]
    assert story.counted("turn_wait_seconds", task="decode") == [len(waits), sum(waits)]
    runs = [1, 1, 1, 1, 2, 2, 3, 3, 1, 1]
    assert story.counted("job_seconds", task="decode") == [len(runs), sum(runs)]
    assert story.value("generation_tokens_total") == 3 + len(gaps)


def test_a_row_with_a_fault_gives_no_token_to_its_own_request_alone() -> None:
    story = prefilled(2)
    decode(story, 4, 5, 4, (1, 2))
    story.decode(6, 5, [1, 1, 5, 6], [2, 2, 5, 6])
    rows = (RowResult(token=5), RowResult(token=NO_TOKEN, fault="numeric"))
    suspend = event("request", 2, "suspend", "decoding", data={"suspect": True})
    story.at(8, completed(5, *rows), *complete(5, buffer=3, lanes=[1, 2]), suspend)
    assert story.counted("inter_token_latency_seconds") == [3, (5 - 1) + (5 - 2) + (8 - 5)]
    assert story.value("generation_tokens_total") == 5
    assert story.value("device_exceptions_total", kind="numeric") == 1


def test_one_of_a_batch_that_goes_on_later_runs_all_its_tokens_first() -> None:
    """Request 2 has 3 of a prompt and 3 of its own: a part of five gives no token, the rest one."""
    story = prefilled(2)
    decode(story, 4, 5, 4, (1, 2))
    decode(story, 5, 6, 5, (1, 2))
    story.at(7, TimePassed(), event("request", 2, "suspend", "decoding", data=INNOCENT))
    story.at(8, TimePassed(), event("request", 2, "resume", "suspended", data={"model": 1}))
    prefill = event("request", 2, "prefill", "waiting", data={"lanes": [4]})
    first = plan(6, "prefill", buffer=1, rows=[[4, 2, 0, 5]])
    story.at(9, TimePassed(), prefill, *first)
    story.at(10, completed(6), *complete(6, buffer=1, lanes=[4]))
    assert story.value("generation_tokens_total") == 2 + 4
    story.at(11, TimePassed(), *plan(7, "prefill", buffer=2, rows=[[4, 2, 5, 6]]))
    story.at(12, completed(7), *complete(7, buffer=2, lanes=[4]))
    assert story.value("generation_tokens_total") == 2 + 4 + 1
    gaps = [5 - 1, 5 - 2, 1, 1, 12 - 6]
    assert story.counted("inter_token_latency_seconds") == [len(gaps), sum(gaps)]


def test_a_batch_that_got_too_few_rows_is_not_measured() -> None:
    story = prefilled(2)
    decode(story, 4, 5, 4, (1, 2))
    story.decode(6, 5, [1, 1, 5, 6], [2, 2, 5, 6])
    with pytest.raises(ValueError, match="zip"):
        story.at(8, completed(5), *complete(5, buffer=3, lanes=[1, 2]))
    assert story.value("generation_tokens_total") == 4
