"""The one way in: inputs in order of arrival, from any thread.

Inputs of callers are bounded and refused with an error when the inbox is full; the overflow itself
becomes an input, so that the journal knows. Answers of the device are never refused: there are at
most as many as effects under way.
"""

import threading
from collections import deque
from collections.abc import Callable

from laneway.engine.errors import EngineClosedError, RequestRejectedError
from laneway.engine.inputs import InboxOverflowed, Input


class Inbox:
    """A bounded queue of inputs that also numbers what callers bring into being."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._queue: deque[Input] = deque()
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._sleeping = 0
        self._woken = False
        self._overflowed = 0
        self._closed: BaseException | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits; what arrives at this moment comes behind."""
        return not self._queue and not self._overflowed

    def post(self, taken: Input) -> None:
        """Add an answer of the device or the clock.

        Inputs after the end of the engine are dropped.
        """
        with self._lock:
            if self._closed is None:
                self._queue.append(taken)
                if self._sleeping:
                    self._arrived.notify()

    def ask(self, make: Callable[[], Input], *, urgent: bool = False) -> None:
        """Add an input of a caller; an urgent one (it ends something) always fits.

        ``make`` runs under the lock, so numbers it gives rise in inbox order.

        Raises: EngineClosedError after the end; RequestRejectedError (429) when the inbox is full.
        """
        with self._lock:
            if self._closed is not None:
                raise EngineClosedError("the engine has ended: make a new one") from self._closed
            if not urgent and len(self._queue) >= self._bound:
                self._overflowed += 1
                raise RequestRejectedError(
                    f"the inbox holds {self._bound} inputs: come back later",
                    reason="inbox_full",
                    http_status=429,
                    retry_after_s=1.0,
                )
            self._queue.append(make())
            self._arrived.notify()

    def take(self, at_most: int) -> list[Input]:
        """Return waiting inputs, oldest first, an overflow before them; never blocks."""
        if self.is_empty:
            return []
        with self._lock:
            taken: list[Input] = []
            if self._overflowed:
                taken.append(InboxOverflowed(count=self._overflowed))
                self._overflowed = 0
            while self._queue and len(taken) < at_most:
                taken.append(self._queue.popleft())
            return taken

    def wait(self, timeout_s: float | None) -> None:
        """Block until an input is there, somebody wakes, the inbox is closed, or time is over."""
        with self._arrived:
            self._sleeping += 1
            try:
                self._arrived.wait_for(
                    lambda: bool(self._queue) or self._woken or self._closed is not None,
                    timeout=timeout_s,
                )
            finally:
                self._sleeping -= 1
                self._woken = False

    def wake(self) -> None:
        """Let a waiting engine thread look again, or not begin to wait."""
        with self._arrived:
            self._woken = True
            self._arrived.notify_all()

    def close(self, cause: BaseException | None = None) -> None:
        """Refuse everything from now on."""
        with self._arrived:
            self._closed = cause or EngineClosedError("closed")
            self._queue.clear()
            self._arrived.notify_all()
