"""What a caller sees of a request: deltas, one result, errors, no matter how it is read."""

import asyncio

import pytest
from support.fake_device import FakeDevice, answer
from support.rig import Rig

from laneway.engine import (
    DeadlineExpiredError,
    EngineClosedError,
    Limits,
    Request,
    RequestCancelledError,
    RequestLostError,
    RequestRejectedError,
    Sampling,
)


def test_iteration_drives_and_gives_every_token_in_order() -> None:
    rig = Rig()
    other = rig.submit([8, 8], seed=2)
    stream = rig.submit([1, 2], seed=1, max_tokens=7)
    deltas = list(stream)
    expected = answer([1, 2], seed=1, max_tokens=7)
    assert [delta.token for delta in deltas] == expected
    assert [delta.position for delta in deltas] == list(range(len(expected)))
    assert [delta.text for delta in deltas] == [f"<{token}>" for token in expected]
    assert "".join(delta.text for delta in deltas) == stream.result().text
    assert list(stream) == []
    assert other.result().error is None
    rig.close()


def test_the_result_is_the_same_each_time() -> None:
    rig = Rig()
    stream = rig.submit([1, 2], seed=1)
    first = stream.result()
    rig.close()
    assert stream.result() is first and stream.result(timeout_s=0.0) is first
    first.raise_for_error()
    usage = first.usage
    assert (usage.prompt_tokens, usage.total_tokens) == (2, 2 + len(first.tokens))


def test_a_token_is_seen_only_after_its_step_is_durable() -> None:
    rig = Rig()
    stream = rig.submit([1, 2], seed=1, max_tokens=5, ignore_eos=True)
    while not stream._over():
        rig.act()
        done = sum(
            type(step.taken).__name__ == "Completed" and bool(step.events) for step in rig.steps
        )
        assert len(stream._tokens) <= done - 4, "four jobs are trials"
    rig.close()


def test_a_stop_string_ends_after_its_last_token() -> None:
    expected = answer([1, 2], seed=1, max_tokens=8)
    stop = f"<{expected[2]}>"
    first = next(i for i, token in enumerate(expected) if f"<{token}>" == stop)
    rig = Rig()
    stream = rig.submit([1, 2], seed=1, max_tokens=8, stop=(stop,))
    result = stream.result()
    assert (result.finish_reason, list(result.tokens)) == ("stop", expected[: first + 1])
    rig.check_idle_lanes()
    rig.close()


def test_a_stop_string_over_two_tokens() -> None:
    expected = answer([1, 2], seed=1, max_tokens=8)
    rig = Rig()
    stream = rig.submit([1, 2], seed=1, max_tokens=8, stop=(f"{expected[1]}><{expected[2]}",))
    assert list(stream.result().tokens) == expected[:3]
    rig.close()


def test_a_text_prompt_is_tokenised_by_the_model() -> None:
    rig = Rig()
    stream = rig.engine.submit(
        Request(model="m", prompt="Hi", max_tokens=3, sampling=Sampling(seed=4))
    )
    prompt = [ord("H") % 64, ord("i") % 64]
    assert list(stream.result().tokens) == answer(prompt, seed=4, max_tokens=3)
    rig.close()


def test_without_a_seed_one_is_drawn_and_recorded() -> None:
    rig = Rig()
    stream = rig.engine.submit(Request(model="m", prompt=(1, 2), max_tokens=4))
    assert list(stream.result().tokens) == answer([1, 2], seed=77, max_tokens=4)
    rig.close()


def test_a_cancelled_stream_just_ends_and_its_result_says_so() -> None:
    rig = Rig()
    stream = rig.submit([1, 2], max_tokens=20, ignore_eos=True)
    deltas = []
    for delta in stream:
        deltas.append(delta)
        if len(deltas) == 3:
            stream.cancel()
    result = stream.result()
    assert result.finish_reason == "cancelled"
    assert isinstance(result.error, RequestCancelledError) and result.error.request == 1
    assert [delta.token for delta in deltas] == list(result.tokens)
    rig.close()
    stream.cancel()


def test_a_failed_stream_never_looks_finished() -> None:
    rig = Rig()
    stream = rig.submit([1, 2], max_tokens=20, ignore_eos=True)
    rig.device.submits.extend([0, 0, 0x0801])
    deltas = []
    with pytest.raises(RequestLostError, match="device is lost"):
        for delta in stream:
            deltas.append(delta)
    assert len(deltas) == 2
    with pytest.raises(RequestLostError):
        list(stream)
    with pytest.raises(RequestLostError):
        stream.result().raise_for_error()
    rig.close()


def test_an_expired_and_a_refused_stream_raise() -> None:
    rig = Rig()
    late = rig.submit([1, 2], max_tokens=40, deadline_s=4e-6, ignore_eos=True)
    with pytest.raises(DeadlineExpiredError, match=r"after \d+ tokens"):
        list(late)
    refused = rig.submit([])
    with pytest.raises(RequestRejectedError):
        list(refused)
    rig.close()


def test_async_iteration_interleaves() -> None:
    rig = Rig()
    order: list[int] = []

    async def read(seed: int) -> list[int | None]:
        stream = rig.submit([seed, 2], seed=seed, max_tokens=6, ignore_eos=True)
        tokens = []
        async for delta in stream:
            order.append(seed)
            tokens.append(delta.token)
        return tokens

    async def all_of_them() -> list[list[int | None]]:
        return list(await asyncio.gather(read(1), read(2), read(3)))

    results = asyncio.run(all_of_them())
    for seed, tokens in zip((1, 2, 3), results, strict=True):
        assert tokens == answer([seed, 2], seed=seed, max_tokens=6, ignore_eos=True)
    assert order != sorted(order), "they run together"
    rig.close()


def test_async_iteration_of_a_failed_stream_raises() -> None:
    rig = Rig()
    rig.device.submits.extend([0, 0x0801])

    async def read() -> None:
        async for _ in rig.submit([1, 2], max_tokens=6, ignore_eos=True):
            pass

    with pytest.raises(RequestLostError):
        asyncio.run(read())
    rig.close()


def test_an_unread_stream_is_bounded_by_its_own_tokens_and_blocks_nobody() -> None:
    rig = Rig()
    unread = rig.submit([1, 2], max_tokens=30, ignore_eos=True)
    read = rig.submit([3, 4], max_tokens=30, ignore_eos=True)
    assert len(read.result().tokens) == 30
    rig.run()
    assert len(unread._tokens) == 30
    assert [d.token for d in unread] == list(unread.result().tokens)
    rig.close()


def test_a_stream_of_a_stepped_engine_that_cannot_move_says_so() -> None:
    rig = Rig()
    rig.device.holding = True
    stream = rig.submit([1, 2])
    with pytest.raises(EngineClosedError, match="step the device"):
        stream.result()
    rig.device.holding = False
    assert stream.result().error is None
    rig.close()


def test_a_closed_engine_refuses_calls() -> None:
    rig = Rig()
    rig.close()
    for call in (
        lambda: rig.engine.submit(Request(model="m", prompt=(1,))),
        lambda: rig.engine.load("m", "x"),
    ):
        with pytest.raises(EngineClosedError):
            call()
    rig.engine.cancel(1)
    rig.engine.close()
    assert rig.engine.health().live is False


def test_leaving_the_block_by_an_error_does_not_drain() -> None:
    rig = Rig()
    stream = rig.submit([1, 2], max_tokens=40, ignore_eos=True)
    with pytest.raises(ZeroDivisionError), rig.engine:
        rig.run_actions(10)
        raise ZeroDivisionError
    assert stream.result().finish_reason == "cancelled"


def test_close_with_a_time_drains_only_that_long() -> None:
    rig = Rig(device=FakeDevice(), limits=Limits())
    long_ = rig.submit([1, 2], max_tokens=40, ignore_eos=True)
    short = rig.submit([3, 4], max_tokens=2, ignore_eos=True)
    rig.engine.close(drain=True, timeout_s=6e-6)
    assert short.result().finish_reason == "length"
    assert long_.result().finish_reason == "cancelled" and long_.result().tokens
