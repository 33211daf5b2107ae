"""A token that comes at the worst moment, between a reader's look and its word that it waits.

Deliveries take no lock, so the moment is made: the token is delivered from within that look.
"""

import asyncio
import threading

import pytest

from laneway.engine.stream import Stream

TIMEOUT_S = 60


def stream() -> Stream:
    return Stream(1, prompt=(1,), has_text=False, client_id=None, cancel=lambda _: None, drive=None)


def test_a_thread_that_looks_as_a_token_comes_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    told = stream()
    real = Stream._has_more
    teller = threading.Thread(target=told.deliver, args=(0, 7, ""))

    def late(self: Stream) -> bool:
        if self._tokens or teller.is_alive():
            return real(self)
        teller.start()
        while not self._tokens:  # the token is there, whoever tells of it is not done
            pass
        return False

    monkeypatch.setattr(Stream, "_has_more", late)
    found: list[int | None] = []
    reader = threading.Thread(target=lambda: found.append(next(iter(told)).token), daemon=True)
    reader.start()
    reader.join(TIMEOUT_S)
    assert found == [7], "the reader sleeps although its token is there"
    teller.join(TIMEOUT_S)


def test_a_loop_that_looks_as_a_token_comes_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told = stream()

    async def read() -> int | None:
        loop = asyncio.get_running_loop()
        real = loop.create_future

        def late() -> "asyncio.Future[None]":
            if not told._tokens:
                told.deliver(0, 7, "")
            return real()

        monkeypatch.setattr(loop, "create_future", late)
        async for delta in told:
            return delta.token
        return None

    async def bounded() -> int | None:
        return await asyncio.wait_for(read(), TIMEOUT_S)

    assert asyncio.run(bounded()) == 7
    assert not told._waiters


def test_a_loop_that_waits_is_woken_by_the_next_token() -> None:
    told = stream()

    async def read() -> int | None:
        loop = asyncio.get_running_loop()
        teller = threading.Thread(target=told.deliver, args=(0, 7, ""))

        def begin_when_waiting() -> None:
            if told._waiters:
                teller.start()
            else:
                loop.call_soon(begin_when_waiting)

        loop.call_soon(begin_when_waiting)
        async for delta in told:
            teller.join(TIMEOUT_S)
            return delta.token
        return None

    async def bounded() -> int | None:
        return await asyncio.wait_for(read(), TIMEOUT_S)

    assert asyncio.run(bounded()) == 7
