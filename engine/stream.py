"""A caller's end of one request: deltas as they become durable, then one result.

Filled by the engine thread, read by the caller's thread or event loop; when the engine is stepped
by hand, reading drives it. A stream holds at most the request's own ``max_tokens`` deltas, so a
slow reader costs bounded memory and never blocks the engine.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from laneway.engine.effects import Conclude
from laneway.engine.errors import (
    DeadlineExpiredError,
    EngineClosedError,
    InternalError,
    LanewayError,
    RequestCancelledError,
    RequestError,
    RequestLostError,
    RequestRejectedError,
)
from laneway.engine.request import Delta, Result, Usage

SECOND_NS = 1_000_000_000


class Stream:
    """Iterate over the deltas of one request; ``result()`` gives its ending.

    Iteration raises the request's error after its last delta, so that a failed stream never looks
    finished; a request its own caller cancelled just ends. A stream that is attached to a request
    repeats its deltas from ``from_position`` on; its result has all tokens (decision 14).
    """

    def __init__(
        self,
        request: int,
        *,
        prompt: tuple[int, ...],
        has_text: bool,
        client_id: str | None,
        cancel: Callable[[int], None],
        drive: Callable[[], None] | None,
        from_position: int = 0,
    ) -> None:
        self.request = request
        self.client_id = client_id
        self._prompt = prompt
        self.has_text = has_text
        self._cancel = cancel
        self._drive = drive
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._sleeping = 0
        self._read = from_position
        """How many of its tokens were read, or passed over."""

        self._rest = ""
        """Text that was held back for a stop string and came with the ending, until it is read."""

        self._tokens: list[int] = []
        self._logprobs: list[tuple[tuple[int, float], ...]] = []
        self._text: list[str] = []
        self._result: Result | None = None
        self._broken: LanewayError | None = None
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def ended(self) -> bool:
        """Whether the ending is there, so that ``result`` does not wait."""
        return self._over()

    def cancel(self) -> None:
        """Ask the engine to end the request; idempotent."""
        self._cancel(self.request)

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the ending and return it; the request's error, if any, is in it.

        Raises: EngineClosedError if the engine ends first; TimeoutError.
        """
        while self._drive is not None and not self._over():
            self._drive()
        with self._changed:
            if not self._sleep_until(self._over, timeout_s):
                raise TimeoutError(f"request/{self.request} has not ended in {timeout_s} s")
            if self._result is None:
                assert self._broken is not None
                raise self._broken
            return self._result

    def __iter__(self) -> Iterator[Delta]:
        """Yield deltas until the ending."""
        while True:
            while self._drive is not None and not self._has_more() and not self._over():
                self._drive()
            with self._changed:
                self._sleep_until(lambda: self._has_more() or self._over(), None)
                delta = self._next_delta()
            if delta is None:
                self._finish_reading()
                return
            yield delta

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield deltas until the ending, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        while True:
            if self._drive is not None and not self._has_more() and not self._over():
                self._drive()
                await asyncio.sleep(0)
                continue
            with self._changed:
                delta = self._next_delta()
                over = self._over()
                arrival = loop.create_future() if delta is None and not over else None
                if arrival is not None:
                    self._waiters.append((loop, arrival))
                    if self._has_more():  # it came between the look and the word that one waits
                        self._waiters.pop()
                        continue
            if arrival is not None:
                await arrival
            elif delta is not None:
                yield delta
            else:
                self._finish_reading()
                return

    def _has_more(self) -> bool:
        return self._read < len(self._tokens) or bool(self._rest)

    def _next_delta(self) -> Delta | None:
        """Return the next delta, made now: what nobody reads costs the engine thread nothing."""
        position = self._read
        if position < len(self._tokens):
            self._read = position + 1
            logprobs = self._logprobs[position] if self._logprobs else ()
            return Delta(
                position=position,
                token=self._tokens[position],
                text=self._text[position],
                logprobs=logprobs,
            )
        if self._rest:
            rest, self._rest = self._rest, ""
            return Delta(position=len(self._tokens), token=None, text=rest)
        return None

    def _sleep_until(self, done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait under the lock; return whether it is done. Sleepers are counted before they look.

        Why: a token is delivered far more often than somebody waits for it, and waking nobody is
        not free.
        """
        self._sleeping += 1
        try:
            return self._changed.wait_for(done, timeout=timeout_s)
        finally:
            self._sleeping -= 1

    def _finish_reading(self) -> None:
        if self._result is None:
            assert self._broken is not None
            raise self._broken
        if self._result.finish_reason != "cancelled":
            self._result.raise_for_error()

    def _over(self) -> bool:
        return self._result is not None or self._broken is not None

    # ------------------------------------------------------------ the engine's side

    def deliver(
        self, position: int, token: int, text: str, logprobs: tuple[tuple[int, float], ...] = ()
    ) -> None:
        """Add the next durable token (engine thread).

        Why no lock: sixteen streams a tick are told, and hardly ever does somebody wait. A reader
        says that it waits before it looks for the last time, and here it is looked for waiters
        after the token is there, so one of the two sees the other. The token comes last, since
        readers go by it.

        Raises: InternalError for one that was told before, or that skips another.
        """
        tokens = self._tokens
        if position != len(tokens):
            raise InternalError(
                f"request/{self.request}: token {position} was to be told after {len(tokens)}"
            )
        self._text.append(text)
        if logprobs:
            self._logprobs.append(logprobs)
        tokens.append(token)
        if self._sleeping or self._waiters:
            with self._changed:
                self._tell()

    def another(self, from_position: int) -> "Stream":
        """Return one more stream of the same request, given what this one was given so far.

        Not while a token is delivered: whoever keeps the streams sees to that.
        """
        other = Stream(
            self.request,
            prompt=self._prompt,
            has_text=self.has_text,
            client_id=self.client_id,
            cancel=self._cancel,
            drive=self._drive,
            from_position=from_position,
        )
        with self._lock:
            other._tokens, other._text = self._tokens.copy(), self._text.copy()
            other._logprobs = self._logprobs.copy()
        return other

    def conclude(self, ending: Conclude, text: str) -> None:
        """Add what text was held back, and the ending (engine thread)."""
        with self._changed:
            self._rest = text
            self._result = Result(
                request=self.request,
                tokens=tuple(self._tokens),
                prompt=self._prompt,
                text="".join(self._text) + text if self.has_text else None,
                finish_reason=ending.finish_reason,
                usage=Usage(
                    prompt_tokens=ending.prompt_tokens,
                    completion_tokens=ending.completion_tokens,
                ),
                error=_error_of(ending),
                logprobs=tuple(self._logprobs),
                suspect_tokens_from=ending.suspect_tokens_from,
                continued_tokens_from=ending.continued_tokens_from,
            )
            self._tell()

    def break_off(self, cause: BaseException) -> None:
        """End the stream because the engine ended (engine thread)."""
        with self._changed:
            if self._over():
                return
            broken = EngineClosedError(f"the engine ended before request/{self.request}: {cause}")
            broken.__cause__ = cause
            self._broken = broken
            self._tell()

    def _tell(self) -> None:
        if self._sleeping:
            self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, arrival in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_arrive, arrival)


def _arrive(arrival: asyncio.Future[None]) -> None:
    if not arrival.done():
        arrival.set_result(None)


def _error_of(ending: Conclude) -> RequestError | None:
    """Turn an ending that is a value in the core into the error its caller gets."""
    if ending.finish_reason in ("stop", "length"):
        return None
    number = ending.request
    message = f"request/{number}: {ending.message or ending.kind}"
    if ending.finish_reason == "cancelled":
        return RequestCancelledError(f"request/{number} was cancelled", request=number)
    if ending.finish_reason == "deadline":
        return DeadlineExpiredError(message, request=number)
    if ending.admitted and ending.kind != "parameters":
        return RequestLostError(message, request=number)
    retry_after_s = None
    if ending.retry_after_ns is not None:
        retry_after_s = ending.retry_after_ns / SECOND_NS
    return RequestRejectedError(
        message,
        reason=ending.kind,
        http_status=ending.http_status,
        retry_after_s=retry_after_s,
        request=number,
    )
