"""Any schedule gives each request the tokens of its solo run (I7, R6.2), within the bounds (I9).

The fake device's model is a hash over the whole sequence, so a row in the wrong lane, a lost or
repeated token, a part of a prompt that began at the wrong place or a neighbour that leaked shows in
every later token. Jobs in flight end in any order.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.schedules import Scheduled, Shape

from laneway.engine import Limits


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Draw a shape: any mix of batches, lanes, rule, ceiling and turns."""
    return Shape(
        batches=draw(st.sampled_from([(1,), (1, 4), (1, 4, 8), (1, 2, 4, 8, 16), (1, 16)])),
        spare_lanes=draw(st.sampled_from([0, 1, 16])),
        rule=draw(st.sampled_from(["length_zero", "mask_csr", "undefined"])),
        inflight=draw(st.sampled_from([1, 2])),
        canaries=draw(st.booleans()),
        limits=Limits(
            canary_jobs=draw(st.sampled_from([0, 2, 9])),
            canary_idle_ns=draw(st.sampled_from([0, 20_000])),
            inflight_jobs_max=draw(st.sampled_from([1, 2])),
            batch_rows_max=draw(st.sampled_from([1, 3, 64])),
            long_prefill_threshold_tokens=draw(st.sampled_from([2, 6, 512])),
            short_turns_max=draw(st.sampled_from([1, 3])),
            prefill_tokens_max=draw(st.sampled_from([4, 12, 2048])),
            prefill_chunk_tokens=draw(st.sampled_from([1, 3, 512])),
            prefill_tokens_per_decode=draw(st.sampled_from([2, 512])),
            priority_step_tokens=draw(st.sampled_from([1, 4096])),
            tenant_weights=(("big", 4),),
        ),
        fixed=draw(st.booleans()),
    )


ARRIVALS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 60), min_size=1, max_size=14),
        st.integers(1, 9),  # max_tokens
        st.integers(-2, 2),  # priority
        st.sampled_from(["", "big", "small"]),  # tenant
        st.integers(0, 12),  # actions before the next arrival
        st.one_of(st.none(), st.none(), st.integers(0, 40)),  # cancelled after so many actions
    ),
    min_size=1,
    max_size=24,
)


ORDERS = st.lists(st.integers(0, 1), max_size=40)


@settings(max_examples=60)
@given(shape=shapes(), arrivals=ARRIVALS, order=ORDERS)
def test_any_schedule_gives_the_tokens_of_solo_runs(
    shape: Shape, arrivals: list[tuple[Any, ...]], order: list[int]
) -> None:
    play(shape, arrivals, order)


@pytest.mark.soak
@settings(max_examples=3_000)
@given(shape=shapes(), arrivals=ARRIVALS, order=ORDERS)
def test_thousands_of_schedules_give_the_tokens_of_solo_runs(
    shape: Shape, arrivals: list[tuple[Any, ...]], order: list[int]
) -> None:
    play(shape, arrivals, order)


def play(shape: Shape, arrivals: list[tuple[Any, ...]], order: list[int]) -> None:
    """Serve the arrivals to the end; answers, bounds and what is held then are as they must be."""
    it = Scheduled(shape, order)
    rig = it.rig
    cancels: list[tuple[int, Any]] = []
    early = []
    for number, (prompt, max_tokens, priority, tenant, actions, cancel) in enumerate(arrivals):
        stream = rig.submit(
            prompt, seed=number, max_tokens=max_tokens, priority=priority, tenant=tenant
        )
        if cancel is not None:
            cancels.append((cancel, stream))
        for _ in range(actions):
            rig.act()
            for left, one in cancels:
                if left == 0:
                    one.cancel()
                    early.append(one)
            cancels = [(left - 1, one) for left, one in cancels if left > 0]
    for _, one in cancels:
        one.cancel()
        early.append(one)
    rig.run()
    rig.check_answers(ended_early=early)
    rig.check_idle()
    it.check_bounds()
    rig.close()


def steady(**limits: Any) -> Scheduled:
    """Return a run on four lanes of batch 4 at the default turns."""
    shape = Shape((1, 4), 0, "length_zero", 1, Limits(inflight_jobs_max=1, **limits))
    return Scheduled(shape)


def test_an_endless_stream_of_prompts_never_holds_up_a_decode() -> None:
    """Decoding sequences go on every second turn while prompts never end (R5.4)."""
    it = steady(prefill_tokens_max=4)
    first = it.rig.submit([1, 2], seed=1, max_tokens=30, ignore_eos=True)
    for number in range(200):
        it.rig.submit([3, 4, 5], seed=number, max_tokens=1, ignore_eos=True)
    it.rig.run()
    assert first.result().finish_reason == "length"
    assert it.meter.longest["decode"] == 2 == it.bounds["decode"]
    it.rig.close()


def test_full_decode_load_never_holds_up_a_long_prompt() -> None:
    """With lanes that free up now and then a long prompt is passed by short ones boundedly."""
    it = steady(long_prefill_threshold_tokens=8, short_turns_max=2, prefill_tokens_max=4)
    for number in range(60):
        it.rig.submit([3, 4, 5], seed=number, max_tokens=6, ignore_eos=True)
        if number == 10:
            it.rig.submit(range(1, 21), seed=5, max_tokens=2, ignore_eos=True)
    it.rig.run()
    it.rig.check_answers()
    assert it.meter.longest["long_prefill"] == 2
    it.check_bounds()
    it.rig.close()


def test_batches_are_filled() -> None:
    """Sixteen sequences of one length decode in jobs of sixteen rows, not one by one."""
    it = Scheduled(Shape((1, 4, 16), 0, "length_zero", 1, Limits(inflight_jobs_max=1)))
    for number in range(16):
        it.rig.submit([1, 2, 3], seed=number, max_tokens=8, ignore_eos=True)
    it.rig.run()
    it.rig.check_answers()
    decodes = [
        len(event.data["owners"])
        for event in it.rig.events("job", "plan")
        if event.data["task"] == "decode" and event.data["origin"] == "request"
    ]
    assert decodes.count(16) >= 6 and len(decodes) <= 8, decodes
    it.rig.close()


def test_blocks_of_fixed_rows_take_turns() -> None:
    """Lanes that share jobs go in blocks of four, each block once in four decodes (E15, R5.4)."""
    it = Scheduled(
        Shape((1, 4), 12, "length_zero", 1, Limits(inflight_jobs_max=1, prefill_tokens_max=8), True)
    )
    for number in range(60):
        it.rig.submit([1 + number % 50, 2], seed=number, max_tokens=2 + number % 9)
    it.rig.run()
    it.rig.check_answers()
    decodes = [job for job in it.rig.device.submitted if job.task == "decode"]
    gaps = [job.places for job in decodes if job.places and job.places[-1] >= len(job.places)]
    assert any(places[0] > 0 for places in gaps) and (0, 1, 2, 3) in {j.places for j in decodes}
    assert it.bounds["decode"] == 8, "sixteen lanes in blocks of four, and a prefill before each"
    assert 4 < it.meter.longest["decode"] <= 8
    it.check_bounds()
    it.rig.close()


def test_two_groups_take_turns_in_flight() -> None:
    """With two jobs in flight two groups of sequences alternate, each in its own lanes (E12)."""
    it = Scheduled(Shape((1, 4), 4, "length_zero", 2, Limits()))
    for number in range(8):
        it.rig.submit([1, 2, 3], seed=number, max_tokens=8, ignore_eos=True)
    most = 0
    while it.rig.act():
        most = max(most, len(it.rig.device.running))
    it.rig.check_answers()
    assert most == 2
    it.rig.close()


def test_tenants_share_by_weight_and_priorities_do_not_starve() -> None:
    """Of two tenants who always wait the one of weight 4 is served four times as often (E13)."""
    it = Scheduled(
        Shape((1,), 0, "length_zero", 1, Limits(tenant_weights=(("big", 4),), inflight_jobs_max=1))
    )
    streams = {}
    for number in range(40):
        for tenant in ("big", "small"):
            stream = it.rig.submit([1, 2], seed=number, max_tokens=2, tenant=tenant)
            streams[stream.request] = tenant
    late = it.rig.submit([7, 7], seed=3, max_tokens=2, priority=1)
    it.rig.run()
    served = [n for event in it.rig.events("request", "prefill") for n in event.entities]
    first = [streams[n] for n in served[:25] if n in streams]
    assert 19 <= first.count("big") <= 21, first
    assert late.result().finish_reason in ("stop", "length")
    it.rig.close()
