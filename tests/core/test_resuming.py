"""Requests go on after a fault with the tokens of a run without one (G8, G15, D11, R7.5, I7).

The fake device's "model" is a hash over the whole sequence and the seed: a token lost or repeated
by a continuation changes every later one. What travels to the sampler is compared too: position,
number, history and masks of every token drawn.
"""

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_device import FakeDevice, answer, artifact
from support.recovery import Recovery, stand_in
from support.rig import Rig, check_answer
from support.schedules import VERIFIED, Scheduled, Shape
from support.script import begin, points

from laneway.engine import Limits, Request, RequestLostError, Result, Sampling
from laneway.engine.effects import SubmitRow
from laneway.engine.errors import InternalError
from laneway.engine.inputs import ArtifactValidated, SubmodelFacts
from laneway.engine.resuming import suspend_request

WIDE = Shape((1, 4), 4, "length_zero", 2, Limits())


@pytest.fixture(autouse=True)
def recovering() -> Iterator[None]:
    """Let every engine of a test answer faults by suspending."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in(monkeypatch)
        yield


def drawn(rig: Rig, request: int) -> dict[int, tuple[Any, ...]]:
    """Return what the sampler was given for each token of a request; each time the same."""
    found: dict[int, tuple[Any, ...]] = {}
    for job in rig.device.submitted:
        for row in job.rows:
            if job.origin != "request" or row.owner != request or row.sampling is None:
                continue
            given = _given(row)
            assert found.setdefault(row.generated, given) == given, (request, row)
    return found


def _given(row: SubmitRow) -> tuple[Any, ...]:
    end = row.start + len(row.tokens)
    return (end, row.sampling, row.prompt, row.output, row.masked, row.logprobs)


# ---------------------------------------------------------------------------- every point


@pytest.mark.parametrize("wait", [0, 3])
def test_a_fault_at_every_point_changes_no_token(wait: int) -> None:
    """``wait`` actions pass between fault and recovery; nothing may be planned in them."""
    suspended = 0
    for rig in points():
        recovery = Recovery(rig)
        recovery.fault_running()
        held = [r for r in rig.state.requests.values() if r.state == "suspended"]
        suspended += len(held)
        before = len(rig.events("job", "plan"))
        rig.run_actions(wait)
        assert len(rig.events("job", "plan")) == before, "G4: planned on a suspect device"
        recovery.recover()
        rig.run()
        rig.check_answers()
        rig.check_idle()
        rig.close()
    assert suspended > 30


def test_what_the_sampler_is_given_is_what_it_was_without_the_fault() -> None:
    """Position, number, penalties' history, masks and log-probabilities of every token."""

    def submit(rig: Rig) -> list[int]:
        sampling = Sampling(seed=3, repetition_penalty=1.2, presence_penalty=0.5)
        made = []
        for prompt in ([3, 1, 4], [1, 5], [9, 2, 6, 5]):
            asked = Request(
                model="m",
                prompt=prompt,
                max_tokens=9,
                sampling=sampling,
                ignore_eos=True,
                min_tokens=4,
                stop_token_ids=(7, 8),
                logprobs=2,
            )
            made.append(rig.engine.submit(asked).request)
        return made

    calm = Scheduled(WIDE).rig
    numbers = submit(calm)
    actions = calm.run()
    expected = {number: drawn(calm, number) for number in numbers}
    assert all(len(tokens) > 3 for tokens in expected.values())
    for count in range(0, actions, 3):
        rig = Scheduled(WIDE).rig
        rig.replays = count % 5 == 0
        submit(rig)
        rig.run_actions(count, seen=count - 3)
        recovery = Recovery(rig)
        recovery.fault_running()
        recovery.recover()
        rig.run()
        assert {number: drawn(rig, number) for number in numbers} == expected
        rig.close()


def test_deltas_and_log_probabilities_are_those_of_a_calm_run() -> None:
    def life(fault_at: int | None) -> tuple[list[Any], Result]:
        rig = Rig(device=FakeDevice(verified=("INCREMENTAL_PREFILL",)))
        stream = rig.submit([5, 6], seed=9, max_tokens=10, ignore_eos=True, logprobs=3)
        if fault_at is not None:
            rig.run_actions(fault_at)
            recovery = Recovery(rig)
            recovery.fault_running()
            recovery.recover()
        deltas = list(stream)
        rig.close()
        return deltas, stream.result()

    deltas, result = life(None)
    assert [delta.position for delta in deltas] == list(range(10))
    for count in range(0, 60, 2):
        assert life(count) == (deltas, result), count


# ---------------------------------------------------------------------------- more than a prefill


def narrow(model: int, *, incremental: bool) -> ArtifactValidated:
    """Return an artifact whose prefill takes six tokens."""
    sizes = (
        SubmodelFacts(
            name="prefill_b1", task="prefill", batch_max=1, tokens_max=6, incremental=incremental
        ),
        SubmodelFacts(name="decode_b1", task="decode", batch_max=1, tokens_max=1),
        SubmodelFacts(name="decode_b4", task="decode", batch_max=4, tokens_max=1),
    )
    return attrs.evolve(artifact(model), submodels=sizes)


@pytest.mark.parametrize("incremental", [False, True])
def test_more_than_a_prefill_takes_goes_in_parts_or_by_decodes(incremental: bool) -> None:
    """As few jobs as the artifact allows; those that catch up draw nothing and batch together."""
    seen = 0
    for count in range(0, 70, 2):
        device = FakeDevice(
            verified=VERIFIED, artifact=lambda model: narrow(model, incremental=incremental)
        )
        rig = Rig(device=device)
        rig.replays = count % 10 == 0
        for number, prompt in enumerate(([1, 2, 3], [4, 5, 6, 7, 8, 9], [3])):
            rig.submit(prompt, seed=number, max_tokens=12, ignore_eos=True)
        rig.run_actions(count, seen=count - 2)
        recovery = Recovery(rig)
        recovery.fault(None)
        known = {n: len(r.prompt) + len(r.tokens) for n, r in rig.state.requests.items()}
        started = len(rig.device.submitted)
        recovery.recover()
        rig.run()
        rig.check_answers()
        rig.check_idle()
        rig.close()
        for request, tokens in known.items():
            jobs = [
                (job.task, row)
                for job in rig.device.submitted[started:]
                for row in job.rows
                if row.owner == request and job.origin == "request"
            ]
            first = next(i for i, (_, row) in enumerate(jobs) if row.sampling is not None)
            if incremental:
                expected = ["prefill"] * -(-tokens // 6)
            else:
                expected = ["prefill"] + ["decode"] * max(tokens - 6, 0)
            assert [task for task, _ in jobs[: first + 1]] == expected
            seen += tokens > 6
    assert seen > 12


@pytest.mark.parametrize("verified", [(), ("INCREMENTAL_PREFILL",)])
def test_what_no_record_promises_is_marked_and_what_one_promises_is_not(
    verified: tuple[str, ...],
) -> None:
    """A continued answer says from which token on; one that had no token yet was not continued."""
    rig = Rig(device=FakeDevice(verified=verified))
    first = rig.submit([1, 2, 3], max_tokens=6, ignore_eos=True)
    rig.run(until=lambda: 1 in rig.state.requests and len(rig.state.requests[1].tokens) == 2)
    second = rig.submit([4, 5], max_tokens=6, ignore_eos=True)
    recovery = Recovery(rig)
    recovery.fault(None)
    recovery.recover()
    rig.run()
    rig.check_answers()
    assert first.result().continued_tokens_from == (None if verified else 2)
    assert second.result().continued_tokens_from is None
    rig.check_idle()
    rig.close()


# ---------------------------------------------------------------------------- guilt


def crowd() -> Scheduled:
    """Return a run whose four lanes decode together while four more requests wait."""
    it = Scheduled(Shape((1, 4), 0, "length_zero", 1, Limits()))
    for number in range(8):
        it.rig.submit([number + 1, 2], seed=number, max_tokens=8, ignore_eos=True)
    it.rig.run(until=lambda: _batch(it.rig) is not None)
    return it


def _batch(rig: Rig) -> int | None:
    """Return the job in flight that decodes four sequences."""
    for job in rig.state.jobs.values():
        if len(job.rows) == 4 and job.task == "decode" and job.state == "submitted":
            return job.number
    return None


def test_suspects_run_alone_first_and_then_beside_others_again() -> None:
    rig = crowd().rig
    recovery = Recovery(rig)
    job = _batch(rig)
    assert job is not None
    suspects = sorted(row.owner for row in rig.state.jobs[job].rows)
    started = len(rig.device.submitted)
    recovery.fault(job)
    recovery.recover()
    rig.run()
    rig.check_answers()
    after = [sorted(row.owner for row in job.rows) for job in rig.device.submitted[started:]]
    tasks = [job.task for job in rig.device.submitted[started:]]
    alone = [[number] for number in suspects for _ in range(2)]
    assert after[: len(alone)] == alone, "each through a prefill and a decode, alone"
    assert tasks[: len(alone)] == ["prefill", "decode"] * 4
    assert max(map(len, after)) == 4
    rig.close()


def test_the_guilty_one_fails_alone_and_costs_the_others_one_fault() -> None:
    """Whenever one request runs, its job faults; all others get every token (G15, I12)."""
    for guilty in (1, 3):
        rig = crowd().rig
        recovery = Recovery(rig)
        recovery.fault(_batch(rig))
        recovery.recover()
        faults = 1
        while rig.act():
            for job in list(rig.state.jobs.values()):
                if job.state == "submitted" and guilty in [row.owner for row in job.rows]:
                    recovery.fault(job.number)
                    recovery.recover()
                    faults += 1
        assert faults == 2
        for one in rig.streams:
            if one.stream.request == guilty:
                error = one.stream.result().error
                assert isinstance(error, RequestLostError) and "alone" in str(error)
            else:
                check_answer(one.stream.result(), one.expected(), one.max_tokens)
        rig.check_idle()
        rig.close()


def test_an_innocent_goes_on_once_and_then_ends_with_one_error() -> None:
    rig = Rig()
    stream = rig.submit([1, 2], seed=1, max_tokens=30, ignore_eos=True)
    recovery = Recovery(rig)
    for fault in range(2):
        rig.run(until=lambda: any(r.state == "decoding" for r in rig.state.requests.values()))
        rig.run_actions(7)
        recovery.fault(None)
        assert (1 in rig.state.requests) == (fault == 0)
        recovery.recover()
    rig.run()
    result = stream.result()
    whole = answer([1, 2], seed=1, max_tokens=30, ignore_eos=True)
    assert 0 < len(result.tokens) < 30 and list(result.tokens) == whole[: len(result.tokens)]
    assert isinstance(result.error, RequestLostError)
    rig.close()


def test_those_who_only_wait_lose_nothing() -> None:
    rig = crowd().rig
    waiting = [r.number for r in rig.state.requests.values() if r.state == "waiting"]
    assert waiting
    recovery = Recovery(rig)
    for _ in range(2):
        recovery.fault(None)
        rig.run_actions(3)
        assert all(rig.state.requests[number].state == "waiting" for number in waiting)
        recovery.recover()
    rig.run()
    for one in rig.streams:
        if one.stream.request in waiting:
            check_answer(one.stream.result(), one.expected(), one.max_tokens)
    rig.close()


def test_the_resumed_stand_before_all_who_wait() -> None:
    rig = crowd().rig
    held = [r.number for r in rig.state.requests.values() if r.state == "decoding"]
    recovery = Recovery(rig)
    recovery.fault(None)
    for number in range(4):
        rig.submit([9, number], seed=number, max_tokens=2, priority=-5)
    rig.run_actions(8)
    before = len(rig.events("request", "prefill"))
    recovery.recover()
    rig.run()
    served = [n for event in rig.events("request", "prefill")[before:] for n in event.entities]
    assert len(held) == 4 and sorted(served[:4]) == held
    rig.check_answers()
    rig.close()


# ---------------------------------------------------------------------------- endings


def test_a_request_may_ask_to_fail_at_a_fault() -> None:
    """At every point: one error and no more, and the others go on (on_fault)."""
    failed = 0
    for rig in points(stride=2, on_fault="fail"):
        recovery = Recovery(rig)
        recovery.fault_running()
        recovery.recover()
        rig.run()
        stream = rig.streams[1].stream
        rig.check_answers(ended_early=[stream])
        error = stream.result().error
        failed += error is not None
        if error is not None:
            assert isinstance(error, RequestLostError) and "as it asked" in str(error)
        rig.check_idle()
        rig.close()
    assert failed > 5


def test_a_suspended_request_can_be_cancelled() -> None:
    for rig in points(stride=3):
        recovery = Recovery(rig)
        recovery.fault_running()
        for one in rig.streams:
            one.stream.cancel()
        rig.run_actions(6)
        assert not rig.state.requests
        recovery.recover()
        rig.run()
        rig.check_answers(ended_early=[one.stream for one in rig.streams])
        rig.check_idle()
        rig.close()


def test_the_deadline_of_a_suspended_request_runs_on() -> None:
    expired = 0
    for rig in points(stride=3, deadline_s=1.0):
        recovery = Recovery(rig)
        recovery.fault_running()
        rig.device.clock.advance(2_000_000_000)
        rig.run_actions(4)
        stream = rig.streams[1].stream
        expired += stream.ended and stream.result().finish_reason == "deadline"
        recovery.recover()
        rig.run()
        rig.check_answers(ended_early=[rig.streams[1].stream])
        rig.check_idle()
        rig.close()
    assert expired > 5


@pytest.mark.parametrize("drain", [False, True])
def test_an_engine_that_closes_waits_for_the_suspended(drain: bool) -> None:
    for rig in points(stride=5):
        recovery = Recovery(rig)
        recovery.fault_running()
        rig.ask_close(drain=drain)
        recovery.recover()
        rig.run_actions(3)
        rig.close(drain=drain)
        early = [] if drain else [one.stream for one in rig.streams]
        rig.check_answers(ended_early=early)


def test_a_request_is_not_suspended_while_a_job_has_it() -> None:
    rig = begin()
    rig.run(until=lambda: any(r.job for r in rig.state.requests.values()))
    request = next(r for r in rig.state.requests.values() if r.job)
    with pytest.raises(InternalError, match="has it"):
        suspend_request(None, request, "", suspect=False)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------- anything


@settings(max_examples=30)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(1, 60), min_size=1, max_size=14), st.integers(1, 9)),
        min_size=1,
        max_size=14,
    ),
    batches=st.sampled_from([(1,), (1, 4), (1, 4, 8)]),
    inflight=st.sampled_from([1, 2]),
    threshold=st.sampled_from([2, 6, 512]),
    chunk=st.sampled_from([1, 3, 512]),
    faults=st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=3),
)
def test_any_schedule_with_faults_gives_prefixes_of_solo_runs(
    prompts: list[tuple[list[int], int]],
    batches: tuple[int, ...],
    inflight: int,
    threshold: int,
    chunk: int,
    faults: list[tuple[int, bool]],
) -> None:
    """With one fault every answer is whole; with more, whole or ended by one error."""
    limits = Limits(long_prefill_threshold_tokens=threshold, prefill_chunk_tokens=chunk)
    rig = Scheduled(Shape(batches, 2, "length_zero", inflight, limits)).rig
    for number, (prompt, max_tokens) in enumerate(prompts):
        rig.submit(prompt, seed=number, max_tokens=max_tokens)
    recovery = Recovery(rig)
    for count, of_a_job in faults:
        rig.run_actions(count)
        if of_a_job:
            recovery.fault_running()
        else:
            recovery.fault(None)
        rig.run_actions(count % 4)
        recovery.recover()
    rig.run()
    rig.check_answers(ended_early=[] if len(faults) == 1 else [o.stream for o in rig.streams])
    rig.check_idle()
    rig.close()
