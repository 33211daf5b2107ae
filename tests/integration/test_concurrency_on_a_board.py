"""Whatever runs beside it, each request gets the logits of its solo run, by bits (I7, R6.2, E12).

The simulated board computes real logits from KV in its memory, so a row in the wrong lane, a stale
buffer, a neighbour that leaks or a prompt that was split wrongly changes bits long before it
changes a token.
"""

from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest
from support.asking import Ask, Outcome, draw_ask, outcomes, pack_with_end_tokens
from support.logits_log import LogitsLog
from support.real_engine import RealEngine

from laneway.engine import Limits
from laneway.engine.inputs import KvApplyFailed

ASKS = 24


@attrs.frozen
class Solo:
    """The requests of every schedule, and what each is run alone: its ending and its logits."""

    calbin: Path
    asks: tuple[Ask, ...]
    outcomes: tuple[Outcome, ...]
    logits: tuple[dict[int, str], ...]


@pytest.fixture(scope="module")
def solo(tmp_path_factory: pytest.TempPathFactory) -> Solo:
    """Run each request alone, one job of one row at a time."""
    folder = tmp_path_factory.mktemp("concurrency")
    calbin = pack_with_end_tokens(folder, batch=(1, 4, 8, 16), lanes=32)
    random = np.random.default_rng(404)
    asks = tuple(draw_ask(random, tokens_max=12) for _ in range(ASKS))
    with pytest.MonkeyPatch.context() as patch:
        log = LogitsLog(patch)
        real = RealEngine(calbin)
        for ask in asks:
            real.submit(ask)
            real.run()
        ended = outcomes(real.results())
        real.close()
    numbers = [stream.request for stream in real.streams]
    return Solo(calbin, asks, tuple(ended), tuple(log.of.get(n, {}) for n in numbers))


def check(
    solo: Solo, real: RealEngine, log: LogitsLog, order: Sequence[int], cancelled: set[int]
) -> None:
    """Hold every request of a run against its solo run."""
    for stream, ask, ended in zip(real.streams, order, outcomes(real.results()), strict=True):
        logits = log.of.get(stream.request, {})
        alone = solo.logits[ask]
        if stream.request not in cancelled:
            assert ended == solo.outcomes[ask]
            assert logits == alone
        else:
            assert ended.tokens == solo.outcomes[ask].tokens[: len(ended.tokens)]
            assert logits == {position: alone[position] for position in logits}


@pytest.mark.parametrize("seed", range(8))
def test_any_mix_has_the_bits_of_solo_runs(
    solo: Solo, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every ceiling with every batch; chunks, arrivals and cancels are drawn by the seed."""
    play(solo, solo.calbin, seed, monkeypatch)


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with rows fixed to lanes, masked by a register where they are inactive."""
    return pack_with_end_tokens(
        tmp_path_factory.mktemp("fixed"),
        batch=(1, 4, 8, 16),
        lanes=32,
        lane_rule="mask_csr",
        fixed_rows=True,
    )


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8, 308))
def test_hundreds_of_mixes_have_the_bits_of_solo_runs(
    solo: Solo, fixed: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, every third on rows that are fixed to lanes."""
    play(solo, fixed if seed % 3 == 0 else solo.calbin, seed, monkeypatch)


def play(solo: Solo, calbin: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve every request in an order and by limits that the seed draws; hold each against solo."""
    random = np.random.default_rng(seed)
    limits = Limits(
        inflight_jobs_max=1 + seed % 2,
        batch_rows_max=(1, 4, 8, 64)[seed // 2 % 4],
        long_prefill_threshold_tokens=int(random.integers(1, 8)),
        prefill_chunk_tokens=int(random.integers(1, 6)),
        prefill_tokens_max=int(random.integers(1, 40)),
        short_turns_max=int(random.integers(1, 4)),
    )
    log = LogitsLog(monkeypatch)
    overlap = int(random.integers(0, 4))
    real = RealEngine(
        calbin,
        url=f"sim:tiny?clock=virtual&overlap={overlap}",
        limits=limits,
        together=True,
    )
    order = [int(n) for n in random.permutation(ASKS)]
    cancelled = set()
    for ask in order:
        stream = real.submit(solo.asks[ask])
        for _ in range(int(random.integers(0, 30))):
            real.engine.advance()
        if random.random() < 0.15:
            stream.cancel()
            cancelled.add(stream.request)
    real.run()
    check(solo, real, log, order, cancelled)
    assert not real.simulator.violations()
    if limits.batch_rows_max > 1:
        assert max(log.rows) > 1, "no batch was run"
    real.close()


@pytest.mark.parametrize("rule", ["length_zero", "mask_csr", "scratch_lane", "undefined"])
@pytest.mark.parametrize("inflight", [1, 2])
def test_rows_fixed_to_lanes_have_the_bits_of_solo_runs(
    solo: Solo, rule: str, inflight: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lane has its own row, with inactive rows before and between, by every lane rule (E15).

    A row in the place of another would be refused, or give bits of another sequence.
    """
    calbin = pack_with_end_tokens(tmp_path, batch=(1, 4), lanes=8, lane_rule=rule, fixed_rows=True)
    log = LogitsLog(monkeypatch)
    real = RealEngine(
        calbin,
        limits=Limits(inflight_jobs_max=inflight, long_prefill_threshold_tokens=8),
        together=True,
    )
    order = [int(n) for n in np.random.default_rng(inflight).permutation(ASKS)]
    for ask in order:
        real.submit(solo.asks[ask])
        for _ in range(ask % 5):
            real.engine.advance()
    real.run()
    check(solo, real, log, order, set())
    assert not real.log.refused and not real.simulator.violations()
    gaps = [places for places in log.places if places and places[-1] >= len(places)]
    full = [places for places in log.places if places == (0, 1, 2, 3)]
    assert full, "no batch was full"
    if rule == "undefined":
        assert not gaps, "a batch was not full"
        assert set(log.rows) == {1, 4}
    else:
        assert any(places[0] > 0 for places in gaps), "no batch began with an inactive row"
        assert any(places[-1] - places[0] >= len(places) for places in gaps), (
            "no batch had an inactive row between others"
        )
    real.close()


@pytest.mark.parametrize(("where", "nth"), [("before", 9), ("after", 4)])
def test_a_batch_whose_list_ended_half_way_goes_on_in_other_lanes(
    solo: Solo, where: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that the board applied nobody knows how far (partial=y): no lane of it is believed."""
    plan = tmp_path / "plan"
    plan.write_text(f"fault a kind=kv_apply_{where} partial=y nth={nth}\n")
    log = LogitsLog(monkeypatch)
    real = RealEngine(
        solo.calbin,
        url=f"sim:tiny?clock=virtual&faults={plan}",
        limits=Limits(inflight_jobs_max=1, batch_rows_max=4),
        together=True,
    )
    order = list(range(ASKS))
    for ask in order:
        real.submit(solo.asks[ask])
    real.run()
    steps = real.steps()
    (failure,) = [step.taken for step in steps if isinstance(step.taken, KvApplyFailed)]
    events = [event for step in steps for event in step.events if event.machine == "lane"]
    doubted = {n for event in events if event.trigger == "suspect" for n in event.entities}
    assert failure.unknown and len(failure.lanes) > 1
    assert doubted == set(failure.lanes)
    assert dict(real.engine.snapshot().lanes)["unknown"] == len(doubted)
    check(solo, real, log, order, set())
    real.close()


@pytest.mark.soak
def test_ten_thousand_requests_in_one_threaded_run(
    solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads, two in flight, batches of up to sixteen: every one has the bits of its solo run."""
    log = LogitsLog(monkeypatch)
    real = RealEngine(
        solo.calbin,
        url="sim:tiny?clock=real",
        limits=Limits(queued_requests_max=20_000, long_prefill_threshold_tokens=4),
        together=True,
    )
    order = [number % ASKS for number in range(10_000)]
    for ask in order:
        real.submit(solo.asks[ask])
    results = real.finish()
    assert len(results) == 10_000
    check(solo, real, log, order, set())
    assert max(log.rows) == 16
    real.close()
