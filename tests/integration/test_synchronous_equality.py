"""The engine answers as a plain submit-and-wait loop does: tokens, bits and device order.

Two boards of the same kind: one is driven by the engine with its workers, the other by the loop of
support/synchronous.py through the bare C ABI. Both are watched at the C ABI, so what is compared is
what the device was asked: task, sequence, lane, tokens and positions of every job, in order.

Source: R5.1 (phase A equals the synchronous path), R2.1, R2.2, R2.4, R3.5, I7.
"""

from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest
from support.asking import GREEDY, Ask, Outcome, answer_alone, draw_ask, outcomes
from support.native_board import CONTEXT, LANES, VOCAB, Bench
from support.real_engine import PATIENCE_S, RealEngine
from support.submit_log import Job, SubmitLog
from support.synchronous import Arrival, Served, SynchronousServer

from laneway.adapters.library import open_library

SCENARIOS = range(10)
LAST = 1 << 30


def synchronous(
    calbin: Path, script: list[Arrival], *, real: bool = False
) -> tuple[list[Served], list[Job]]:
    """Serve a script with the loop on a board of its own; return requests and jobs."""
    library = open_library()
    log = SubmitLog(library)
    with Bench(library, calbin).opening() as make:
        board = make("clock = real" if real else "")
        served = SynchronousServer(board, real=real).run(script)
        assert board.violations() == []
    return served, log.jobs


def draw_script(seed: int) -> list[Arrival]:
    """Draw a scenario: requests that come in clusters, some more than there are lanes; cancels."""
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 16))
    spread = int(random.choice([0, 0, 30, 200]))
    at = sorted(random.integers(0, spread + 1, count).tolist())
    script = [Arrival(after, draw_ask(random)) for after in at]
    for number, after in enumerate(at):
        if random.random() < 0.3:
            script.append(Arrival(after + int(random.integers(0, 40)), number))
    # A request is cancelled after it came, also where both come after the same job.
    return sorted(script, key=lambda one: (one.after, isinstance(one.what, int)))


def check_ordered(jobs: list[Job]) -> None:
    """R2.1, R7.3: a job has one task, and each sequence is run gaplessly from 0."""
    reached: dict[int, int] = {}
    for job in jobs:
        start = reached.get(job.sequence, 0)
        assert job.positions == tuple(range(start, start + len(job.tokens))), job
        assert (job.task == "prefill") == (start == 0), job
        assert job.task == "prefill" or len(job.tokens) == 1, job
        reached[job.sequence] = start + len(job.tokens)


# ------------------------------------------------------------------------ stepped


@pytest.fixture(scope="module")
def by_loop(calbin: Path) -> dict[int, tuple[list[Served], list[Job]]]:
    """What the loop made of each scenario."""
    return {seed: synchronous(calbin, draw_script(seed)) for seed in SCENARIOS}


@pytest.mark.parametrize("seed", SCENARIOS)
def test_a_scenario_equals_the_synchronous_loop(
    calbin: Path, by_loop: dict[int, tuple[list[Served], list[Job]]], seed: int
) -> None:
    real = RealEngine(calbin)
    real.run(draw_script(seed))
    served, jobs = by_loop[seed]
    assert outcomes(real.results()) == [one.outcome for one in served]
    assert real.jobs == jobs
    check_ordered(real.jobs)
    real.close()


def test_the_scenarios_are_worth_running(
    by_loop: dict[int, tuple[list[Served], list[Job]]],
) -> None:
    """Between them they have every ending, more requests than lanes, and cancels at each stage."""
    runs = [served for served, _ in by_loop.values()]
    cancelled = [one for served in runs for one in served if one.ending == "cancelled"]
    assert {one.ending for served in runs for one in served} == {"stop", "length", "cancelled"}
    assert sum(len(served) > LANES for served in runs) >= 3
    assert sum(not one.tokens for one in cancelled) >= 3
    assert sum(bool(one.tokens) for one in cancelled) >= 3
    assert sum(one.ending == "stop" for served in runs for one in served) >= 3


def test_every_answer_is_that_of_its_solo_run(calbin: Path) -> None:
    """I7: neighbours, lanes and order change nothing; greedy is the arg-max at every position."""
    random = np.random.default_rng(99)
    asks = [draw_ask(random, tokens_max=14) for _ in range(10)]
    asks = [attrs.evolve(a, sampling=GREEDY) if i % 2 else a for i, a in enumerate(asks)]
    real = RealEngine(calbin)
    real.run([Arrival(0, ask) for ask in asks])
    assert outcomes(real.results()) == [answer_alone(calbin, ask) for ask in asks]
    real.close()


def test_a_full_context_is_served_to_its_last_position(calbin: Path) -> None:
    random = np.random.default_rng(5)
    script = []
    for length in (1, CONTEXT // 2, CONTEXT - 1):
        prompt = tuple(random.integers(0, VOCAB, length).tolist())
        rest = CONTEXT - length
        ask = Ask(prompt=prompt, max_tokens=rest, sampling=GREEDY, ignore_eos=True)
        script.append(Arrival(0, ask))
    real = RealEngine(calbin)
    real.run(script)
    served, jobs = synchronous(calbin, script)
    assert outcomes(real.results()) == [one.outcome for one in served]
    assert [one.ending for one in served] == ["length"] * 3
    assert real.jobs == jobs
    real.close()


def test_a_cancel_after_any_job_leaves_the_others_as_they_are(calbin: Path) -> None:
    """R3.5: the job in flight is waited for, its tokens go nowhere, its lane is used again."""
    random = np.random.default_rng(17)
    asks = [attrs.evolve(draw_ask(random), max_tokens=4, ignore_eos=True) for _ in range(3)]
    late = attrs.evolve(draw_ask(random), max_tokens=3, ignore_eos=True)
    alone = [answer_alone(calbin, ask) for ask in (*asks, late)]
    real = RealEngine(calbin)
    cut = set()
    for after in range(1, 13):
        script = [Arrival(0, ask) for ask in asks]
        script += [Arrival(after, 1), Arrival(after + 2, late)]
        real.begin()
        real.run(script)
        served, jobs = synchronous(calbin, script)
        found = outcomes(real.results())
        assert found == [one.outcome for one in served]
        assert real.jobs == jobs
        assert [found[number] for number in (0, 2, 3)] == [alone[number] for number in (0, 2, 3)]
        assert found[1].tokens == alone[1].tokens[: len(found[1].tokens)]
        cut.add(len(found[1].tokens))
    assert cut == {0, 1, 2, 3, 4}
    real.close()


def test_an_order_that_differs_would_be_seen(calbin: Path) -> None:
    """The comparison can fail: the same requests in another order are another device order."""
    random = np.random.default_rng(3)
    asks = [draw_ask(random) for _ in range(3)]
    _, jobs = synchronous(calbin, [Arrival(0, ask) for ask in asks])
    _, other = synchronous(calbin, [Arrival(0, ask) for ask in reversed(asks)])
    assert jobs != other


# ------------------------------------------------------------------------ threads


@pytest.fixture(scope="module")
def shared_engine(calbin: Path) -> Iterator[RealEngine]:
    """An engine with threads on a board whose time runs by itself."""
    real = RealEngine(calbin, url="sim:tiny?clock=real")
    yield real
    real.close()


@pytest.fixture
def threaded(shared_engine: RealEngine) -> RealEngine:
    """The same engine for each test, with the record begun anew."""
    shared_engine.begin()
    return shared_engine


@pytest.mark.parametrize("seed", range(2))
def test_threads_change_nothing_one_after_the_other(
    calbin: Path, threaded: RealEngine, seed: int
) -> None:
    random = np.random.default_rng(seed)
    asks = [draw_ask(random) for _ in range(6)]
    for ask in asks:
        threaded.submit(ask).result(PATIENCE_S)
    # Each is alone: it comes when nothing is left of those before it.
    served, jobs = synchronous(calbin, [Arrival(LAST, ask) for ask in asks], real=True)
    assert outcomes(threaded.results()) == [one.outcome for one in served]
    assert threaded.jobs == jobs


@pytest.mark.parametrize("seed", range(3))
def test_threads_equal_the_loop_for_the_same_arrivals(
    calbin: Path, threaded: RealEngine, seed: int
) -> None:
    """When requests arrive is up to the threads; what is made of the arrivals is not."""
    random = np.random.default_rng(1000 + seed)
    asks = [draw_ask(random, tokens_max=8) for _ in range(7)]
    for number, ask in enumerate(asks):
        stream = threaded.submit(ask)
        if number % 3 == 2:
            next(iter(stream), None)  # let some of it happen before the next ones come
        if number % 4 == 3:
            threaded.streams[number - 1].cancel()
    results = threaded.finish()
    served, jobs = synchronous(calbin, threaded.arrivals(asks), real=True)
    assert outcomes(results) == [one.outcome for one in served]
    assert threaded.jobs == jobs
    check_ordered(threaded.jobs)
    for result, ask in zip(results, asks, strict=True):
        alone = answer_alone(calbin, ask)
        if result.finish_reason == "cancelled":
            assert result.tokens == alone.tokens[: len(result.tokens)]
        else:
            assert Outcome(result.tokens, result.finish_reason) == alone
