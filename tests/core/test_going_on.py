"""Requests go on after a restart, wherever the last life was cut (G21, I1, I7, decisions 9 and 14).

A life is cut after any of its steps, as a killed process leaves it, and the next one resumes. Every
request gets one ending and the tokens of a run alone; whoever attaches is told every token once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_device import FakeDevice, answer, artifact, healthy
from support.memory_steps import ListJournal
from support.recovery import Recovery, stand_in
from support.rig import Rig, check_answer, check_replay
from support.schedules import VERIFIED, wide
from support.script import PROMPTS, TOKENS, begin, small_artifact

from laneway.engine import (
    Engine,
    JournalError,
    Limits,
    RequestLostError,
    RequestRejectedError,
    Result,
    Stream,
)
from laneway.engine.inputs import ArtifactValidated, HealthProbed
from laneway.engine.ports import Step

Make = Callable[[int], ArtifactValidated]


def resume(steps: Sequence[Step], *, load: bool = True, make: Make = artifact, **rest: Any) -> Rig:
    """Start the next life on the steps of the last one."""
    device = FakeDevice(artifact=make, verified=VERIFIED)
    return Rig(steps=steps, device=device, load=load, resume=True, **rest)


def attach_all(rig: Rig) -> dict[int, Stream]:
    """Listen to every open request."""
    return {number: rig.engine.attach(number) for number in sorted(rig.state.requests)}


def check_whole(stream: Stream, expected: list[int], max_tokens: int) -> None:
    """Hold an answer against a run alone: every token told once, in order, with its text."""
    deltas = [delta for delta in stream if delta.token is not None]
    assert [delta.position for delta in deltas] == list(range(len(expected)))
    assert [delta.token for delta in deltas] == expected
    assert [delta.text for delta in deltas] == [f"<{token}>" for token in expected]
    check_answer(stream.result(), expected, max_tokens)


def script_answer(number: int) -> list[int]:
    """Return the answer to a request of the script, run alone."""
    return answer(PROMPTS[number - 1], seed=number - 1, max_tokens=TOKENS, ignore_eos=True)


def script_steps() -> list[Step]:
    """Return the steps of the script until everything is answered."""
    rig = begin()
    rig.run()
    return rig.steps


# ---------------------------------------------------------------------------- every cut


def test_cut_after_any_step_every_request_goes_on() -> None:
    steps = script_steps()
    went_on = 0
    for count in range(len(steps) + 1):
        rig = resume(steps[:count], make=small_artifact, load=False)
        rig.replays = count % 4 == 0
        streams = attach_all(rig)
        assert {request.state for request in rig.state.requests.values()} <= {"suspended"}
        assert not rig.state.models and not rig.state.lanes and not rig.state.buffers
        rig.engine.load("m", "source")
        rig.run()
        for number, stream in streams.items():
            check_whole(stream, script_answer(number), TOKENS)
        went_on += len(streams)
        rig.check_idle()
        rig.close()
    assert went_on > 40


def test_killed_again_and_again_every_request_ends_once() -> None:
    """Each life lives for so many actions, loads included, until one is left in peace."""
    for patience in (9, 14, 22, 31):
        steps: list[Step] = begin().steps
        rig = begin()
        rig.run_actions(patience)
        steps = rig.steps
        lives = 1
        while rig.state.requests or not rig.state.models:
            rig = resume(steps, make=small_artifact, load=False)
            streams = attach_all(rig)
            rig.ask_load()
            rig.run_actions(patience + lives)
            steps = rig.steps
            lives += 1
        rig.run()
        assert 2 <= lives < 30
        for number, stream in streams.items():
            check_whole(stream, script_answer(number), TOKENS)
        rig.close()


def test_a_waiting_request_keeps_its_place() -> None:
    """Those who had a lane go first, the others by priority as before (G9)."""
    rig = Rig(device=FakeDevice(artifact=small_artifact))
    for number, priority in enumerate((0, 0, 5, -5, 0)):
        rig.submit([number + 1], seed=number, max_tokens=6, ignore_eos=True, priority=priority)
    rig.run(until=lambda: sum(r.state == "decoding" for r in rig.state.requests.values()) == 2)
    again = resume(rig.steps, make=small_artifact)
    again.run()
    events = [e for step in again.steps[len(rig.steps) :] for e in step.events]
    served = [n for e in events if e.trigger == "prefill" for n in e.entities]
    assert served == [1, 4, 2, 5, 3], "1 and 4 had a lane"
    again.close()


# ---------------------------------------------------------------------------- what travels along


def test_log_probabilities_and_stop_strings_cross_a_restart() -> None:
    """A stop string that begins in one life and ends in the next one still ends the answer."""
    whole = answer([4, 4], seed=2, max_tokens=12, ignore_eos=True)
    stop = f"{whole[5]}><{whole[6]}"

    def life() -> Rig:
        rig = Rig()
        rig.submit([4, 4], seed=2, max_tokens=12, ignore_eos=True, stop=stop, logprobs=2)
        return rig

    calm = life()
    calm.run()
    expected: Result = calm.streams[0].stream.result()
    assert list(expected.tokens) == whole[:7] and expected.finish_reason == "stop"
    calm.close()
    for count in range(1, len(calm.steps)):
        if not any(step.events for step in calm.steps[count - 1 : count]):
            continue
        rig = resume(calm.steps[:count])
        if 1 not in {r.number for r in rig.engine.requests()}:
            rig.close()
            continue
        result = rig.engine.attach(1).result()
        assert result == expected, count
        rig.close()


def test_suspects_are_still_alone_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    rig = begin()
    rig.run(until=lambda: any(job.state == "submitted" for job in rig.state.jobs.values()))
    rig.run(until=lambda: any(r.state == "decoding" for r in rig.state.requests.values()))
    rig.run(until=lambda: any(job.state == "submitted" for job in rig.state.jobs.values()))
    job = Recovery(rig).fault_running()
    (suspect,) = [r.number for r in rig.state.requests.values() if r.alone]
    again = resume(rig.steps, make=small_artifact)
    assert job is not None and again.state.alone == [suspect]
    first = [e for e in again.events("job", "plan") if e.data["origin"] == "request"]
    started = len(first)
    again.run()
    planned = [e for e in again.events("job", "plan") if e.data["origin"] == "request"]
    assert list(planned[started - 1].data["owners"]) == [suspect]
    for number in (1, 2, 3):
        assert list(again.engine.attach(number).result().tokens) == script_answer(number)
    again.close()


# ---------------------------------------------------------------------------- no way on


def test_without_resume_the_journal_is_refused_as_before() -> None:
    rig = begin()
    rig.run_actions(20)
    with pytest.raises(JournalError, match=r"no ending .*--resume .*another file"):
        Rig(steps=rig.steps)


def test_a_journal_of_digests_cannot_go_on() -> None:
    rig = begin()
    rig.run_actions(20)
    journal = ListJournal(rig.steps)
    journal.tokens = "digest"
    with pytest.raises(JournalError, match="only digests"):
        Engine(device=FakeDevice(), journal=journal, threads=False, resume=True)


def test_another_artifact_of_the_name_ends_the_request_with_one_error() -> None:
    rig = begin()
    rig.run_actions(25)
    open_before = sorted(rig.state.requests)
    other = resume(
        rig.steps,
        make=lambda model: attrs.evolve(small_artifact(model), sha256="1" * 64),
        load=False,
    )
    streams = attach_all(other)
    other.engine.load("m", "elsewhere")
    other.run()
    assert sorted(streams) == open_before
    for stream in streams.values():
        error = stream.result().error
        assert isinstance(error, RequestLostError) and "another artifact" in str(error)
    other.check_idle()
    other.close()


def test_a_request_whose_model_does_not_come_stays_open_for_the_next_life() -> None:
    """Another name, or no model at all, ends nothing, however the engine is closed."""
    rig = begin()
    rig.run_actions(25)
    open_before = sorted(rig.state.requests)
    steps = rig.steps
    for drain, alias in ((True, None), (False, None), (True, "other"), (False, "other")):
        idle = resume(steps, make=small_artifact, load=False)
        streams = attach_all(idle)
        if alias is not None:
            idle.engine.load(alias, "source")
            idle.run()
        assert sorted(idle.state.requests) == open_before
        idle.engine.close(drain=drain)
        assert sorted(idle.state.requests) == open_before
        assert idle.state.device.state == "closed"
        check_replay(idle.steps, idle.state)
        for stream in streams.values():
            with pytest.raises(Exception, match="engine ended before"):
                stream.result()
        steps = idle.steps
    last = resume(steps, make=small_artifact)
    streams = attach_all(last)
    last.run()
    for number, stream in streams.items():
        check_whole(stream, script_answer(number), TOKENS)
    last.close()


def test_a_load_that_fails_ends_nothing() -> None:
    rig = begin()
    rig.run_actions(25)
    again = resume(rig.steps, make=small_artifact, load=False)
    streams = attach_all(again)
    again.device.refuse_artifact = "damaged"
    with pytest.raises(Exception, match="damaged"):
        again.engine.load("m", "source")
    again.device.refuse_artifact = ""
    again.engine.load("m", "source")
    again.run()
    for number, stream in streams.items():
        check_whole(stream, script_answer(number), TOKENS)
    again.close()


def test_deadlines_run_on_while_nobody_serves() -> None:
    rig = Rig(wall_ns=0)
    rig.submit([1, 2], max_tokens=30, ignore_eos=True, deadline_s=1.0)
    rig.submit([1, 2], max_tokens=30, ignore_eos=True, deadline_s=100.0)
    rig.run_actions(40)
    done = [len(r.tokens) for r in rig.state.requests.values()]
    assert all(done)
    again = resume(rig.steps, load=False, wall_ns=10_000_000_000)
    streams = attach_all(again)
    again.run(until=lambda: 1 not in again.state.requests)
    result = streams[1].result()
    assert result.finish_reason == "deadline" and len(result.tokens) == done[0]
    again.engine.load("m", "source")
    assert list(streams[2].result().tokens) == answer(
        [1, 2], seed=0, max_tokens=30, ignore_eos=True
    )
    again.close()


def test_a_request_without_its_model_can_be_cancelled() -> None:
    rig = begin()
    rig.run_actions(25)
    again = resume(rig.steps, make=small_artifact, load=False)
    streams = attach_all(again)
    for stream in streams.values():
        stream.cancel()
    again.run()
    for number, stream in streams.items():
        result = stream.result()
        assert result.finish_reason == "cancelled"
        assert list(result.tokens) == script_answer(number)[: len(result.tokens)]
    again.close()


# ---------------------------------------------------------------------------- a lost device


def lose(rig: Rig) -> None:
    """Let the device of a rig be gone, so that a new process is asked for, and close."""
    rig.interrupt(HealthProbed(health=attrs.evolve(healthy(0), state="wedged"), reason=""))
    assert rig.state.device.state == "lost"
    assert rig.events("device", "lose")[-1].data["rung"] == 7
    rig.engine.close()


def test_what_was_not_bound_to_a_lost_device_goes_on_in_the_next_process() -> None:
    """Row 16, G21: those on the device were told; those that waited for a model go on, once."""
    cut = begin()
    cut.run_actions(25)
    waited = sorted(cut.state.requests)
    lost = resume(cut.steps, make=small_artifact, load=False, resets=True)
    lose(lost)
    assert sorted(lost.state.requests) == waited and not lost.events("request", "fail")
    rig = resume(lost.steps, make=small_artifact)
    streams = attach_all(rig)
    assert sorted(streams) == waited
    rig.run()
    for number, stream in streams.items():
        check_whole(stream, script_answer(number), TOKENS)
    rig.check_idle()
    rig.close()


def test_what_a_lost_device_had_is_over_in_the_next_process() -> None:
    """Row 16: told once, on the device or queued for it; a restart neither repeats nor forgets."""
    rig = Rig(device=FakeDevice(artifact=small_artifact), resets=True)
    for number in range(6):
        rig.submit([number + 1, 2], seed=number, max_tokens=6, ignore_eos=True)
    rig.run(until=lambda: sum(r.state == "decoding" for r in rig.state.requests.values()) == 2)
    assert any(request.state == "waiting" for request in rig.state.requests.values())
    lose(rig)
    told = {one.stream.request: one.stream.result() for one in rig.streams}
    assert all(isinstance(result.error, RequestLostError) for result in told.values())
    again = resume(rig.steps, make=small_artifact)
    assert not again.state.requests
    again.run()
    for number, result in told.items():
        assert again.engine.attach(number).result().tokens == result.tokens
    late = again.submit([8, 8], seed=3, ignore_eos=True)
    again.run()
    assert late.result().error is None
    again.check_answers()
    again.close()


# ---------------------------------------------------------------------------- attach


def test_a_stream_can_be_attached_at_any_point_from_any_position() -> None:
    rig = Rig()
    first = rig.submit([3, 1], seed=4, max_tokens=8, ignore_eos=True, logprobs=1)
    attached: list[tuple[int, Stream]] = []
    count = 0
    while rig.act():
        if count % 5 == 0 and 1 in rig.state.requests:
            attached.append((count // 5 % 10, rig.engine.attach(1, from_position=count // 5 % 10)))
        count += 1
    attached += [(start, rig.engine.attach(1, from_position=start)) for start in range(10)]
    deltas = list(first)
    assert [delta.position for delta in deltas] == list(range(8))
    for start, stream in attached:
        assert list(stream) == deltas[start:]
        assert stream.result() == first.result()
    assert len(attached) > 15
    rig.close()


def test_an_ended_request_can_be_read_again_after_a_restart() -> None:
    rig = Rig()
    whole = rig.submit([3, 1], seed=4, max_tokens=5, ignore_eos=True, logprobs=1)
    early = rig.submit([3, 1], seed=4, max_tokens=30, ignore_eos=True)
    refused = rig.submit([3, 1], seed=4, max_tokens=4000)
    rig.run(until=lambda: 1 not in rig.state.requests)
    early.cancel()
    rig.close()
    again = resume(rig.steps)
    assert again.engine.attach(1).result() == whole.result()
    assert list(again.engine.attach(1)) == list(whole)
    assert again.engine.attach(2).result().finish_reason == "cancelled"
    assert again.engine.attach(2).result().tokens == early.result().tokens
    error = again.engine.attach(3).result().error
    assert isinstance(error, RequestRejectedError) and error.reason == "too_long"
    assert refused.result().error is not None
    for unknown in (4, 99):
        with pytest.raises(RequestRejectedError, match=f"no request/{unknown}"):
            again.engine.attach(unknown)
    for wrong in (0, -1, True, "1"):
        with pytest.raises((TypeError, ValueError)):
            again.engine.attach(wrong)  # type: ignore[arg-type]
    again.close()


# ---------------------------------------------------------------------------- anything


@settings(max_examples=15)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(1, 60), min_size=1, max_size=14), st.integers(1, 9)),
        min_size=1,
        max_size=10,
    ),
    lives=st.lists(
        st.tuples(
            st.sampled_from([(1,), (1, 4), (1, 4, 8)]),
            st.sampled_from([1, 3, 512]),
            st.integers(1, 90),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_any_chain_of_lives_gives_the_tokens_of_solo_runs(
    prompts: list[tuple[list[int], int]], lives: list[tuple[tuple[int, ...], int, int]]
) -> None:
    """Each life may have other batches, lanes and limits; the artifact is the same by its hash."""

    def make(batches: tuple[int, ...]) -> Make:
        return lambda model: wide(model, lanes=batches[-1] + 1, batches=batches, rule="length_zero")

    rig = Rig(device=FakeDevice(artifact=make((1, 4)), verified=VERIFIED))
    for number, (prompt, max_tokens) in enumerate(prompts):
        rig.submit(prompt, seed=number, max_tokens=max_tokens)
    rig.run_actions(lives[0][2])
    told = {n: one.stream.result() for n, one in enumerate(rig.streams, 1) if one.stream.ended}
    for batches, chunk, actions in lives:
        limits = Limits(prefill_chunk_tokens=chunk, long_prefill_threshold_tokens=chunk + 3)
        rig = resume(rig.steps, make=make(batches), limits=limits, load=False)
        streams = attach_all(rig)
        rig.ask_load()
        rig.run_actions(actions)
        told |= {n: stream.result() for n, stream in streams.items() if stream.ended}
    rig.run()
    rig.check_idle()
    for number in rig.watch.endings:
        prompt, max_tokens = prompts[number - 1]
        result = rig.engine.attach(number).result()
        check_answer(result, answer(prompt, seed=number - 1, max_tokens=max_tokens), max_tokens)
        assert told.get(number, result) == result
    rig.close()
