"""The short ways of usual decode jobs decide what the long way does, and leave the same state."""

import random

import pytest
from support.both_ways import decide_both_ways
from support.campaign import draw, play
from support.campaign_faults import KINDS
from support.fake_device import FakeDevice
from support.rig import Rig
from support.schedules import VERIFIED, wide

from laneway.engine import Limits, Request, Sampling

ANSWERS = ("Completed", "SubmitAccepted", "BufferRestored")
SCHEDULES = 8
LIVES = 4


def test_every_step_of_drawn_schedules_is_decided_the_same_both_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches to 16, one and two jobs in flight, faults, cancels, deadlines, canaries."""
    ways = decide_both_ways(monkeypatch)
    for seed in range(SCHEDULES):
        play(draw(seed))
    assert ways["complete"] > SCHEDULES and ways["plan"] > SCHEDULES, ways


def test_every_step_of_long_answers_is_decided_the_same_both_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs of like jobs between arrivals, cancels, endings, canaries and probes of the health."""
    ways = decide_both_ways(monkeypatch)
    for seed in range(LIVES):
        live(random.Random(seed))
    for answer in ANSWERS:
        assert ways[answer] > 10 * LIVES, ways
    assert ways["foreseen"] > 3 * LIVES, ways


def test_every_step_of_groups_that_take_turns_is_decided_the_same_both_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two and three groups of four, one job in flight; somebody leaves or comes in between."""
    ways = decide_both_ways(monkeypatch)
    for seed in range(LIVES):
        take_turns(random.Random(seed))
    for answer in ANSWERS:
        assert ways[answer] > 10 * LIVES, ways
    assert ways["foreseen"] > 3 * LIVES, ways


@pytest.mark.soak
def test_thousands_of_lives_are_decided_the_same_both_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decide_both_ways(monkeypatch)
    for seed in range(1_000):
        play(draw(seed, kinds=KINDS))
        live(random.Random(seed))
        take_turns(random.Random(seed))


def live(draws: random.Random) -> None:
    """Serve a few long answers, with whatever may come between two jobs."""
    limits = Limits(
        inflight_jobs_max=draws.choice((1, 2)),
        canary_jobs=draws.choice((0, 7, 1000)),
        canary_idle_ns=draws.choice((0, 300_000)),
        health_every_ns=draws.choice((100_000, 10_000_000_000)),
    )
    batches = draws.choice(((1, 4), (1, 2, 4, 8), (4, 16)))
    rig = Rig(
        device=FakeDevice(
            inflight_max=2,
            verified=VERIFIED,
            artifact=lambda model: wide(
                model, lanes=batches[-1] + 1, batches=batches, rule="length_zero"
            ),
        ),
        limits=limits,
        canaries=True,
    )
    early = []
    for number in range(draws.randint(1, batches[-1])):
        stream = rig.submit(
            [draws.randint(1, 60) for _ in range(draws.randint(1, 5))],
            seed=number,
            max_tokens=draws.randint(15, 40),
            min_tokens=(least := draws.choice((0, 0, 9))),
            ignore_eos=draws.random() < 0.8 or least > 0,  # the fake masks nothing
        )
        if draws.random() < 0.3:
            penalties = Sampling(seed=number, repetition_penalty=1.2)
            rig.engine.submit(Request(model="m", prompt=(1, 2), max_tokens=30, sampling=penalties))
        rig.run_actions(draws.choice((0, 3, 40)))
        if draws.random() < 0.2:
            stream.cancel()
            early.append(stream)
    rig.run()
    rig.check_answers(ended_early=early)
    rig.close()


def take_turns(draws: random.Random) -> None:
    """Serve more long answers than a batch takes; they go on in any order of their lanes."""
    count = 4 * draws.choice((2, 3))
    rig = Rig(
        device=FakeDevice(
            verified=VERIFIED,
            artifact=lambda model: wide(model, lanes=count, batches=(1, 4), rule="length_zero"),
        ),
        limits=Limits(inflight_jobs_max=1, prefill_tokens_max=draws.choice((3, 2048))),
        canaries=draws.random() < 0.3,
    )
    streams = []
    for number in range(count + draws.choice((0, 0, 1))):
        prompt = [draws.randint(1, 60) for _ in range(draws.randint(1, 5))]
        tokens = draws.choice((40, 40, 40, 25))
        streams.append(rig.submit(prompt, seed=number, max_tokens=tokens, ignore_eos=True))
        rig.run_actions(draws.choice((0, 0, 5)))
    early = []
    if draws.random() < 0.5:
        rig.run_actions(draws.randint(100, 300))
        early.append(draws.choice(streams))
        early[0].cancel()
    rig.run()
    rig.check_answers(ended_early=early)
    rig.close()
