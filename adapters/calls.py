"""One opened device: its library, its pointer, and who may call it when.

Most calls may overlap. Configure, release and close may not (class X of the ABI): they wait until
no other thread is inside and keep others out meanwhile. A wait that does not end within its bound
is reported instead of made longer, so that a wedged device cannot hold its own closing up (D13).

Source: npurt.h (thread safety), E10, E23.
"""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from laneway.adapters import npurt
from laneway.adapters.binding import Answer, Library
from laneway.adapters.callwatch import CallWatch
from laneway.engine.errors import DeviceLostError


class DeviceCalls:
    """Calls on one opened device; thread-safe. ``watch`` knows which are inside the library."""

    def __init__(
        self, library: Library, pointer: ctypes.c_void_p, *, watch: CallWatch | None = None
    ) -> None:
        self.watch = watch if watch is not None else CallWatch(time.monotonic_ns)
        self.library = library
        self.pointer = pointer
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._shared = _Shared(self)
        self._inside = 0
        self._kept_out = False
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the device was closed or abandoned: no call is made any more."""
        return self._closed

    @property
    def moves(self) -> int:
        """A number that changes with every call that may move a stepped clock or end a job."""
        return self.library.moves

    def close(self) -> None:
        """Let no call begin any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def shared(self) -> AbstractContextManager[None]:
        """Make calls that may overlap with others. Not to be nested.

        Raises: DeviceLostError once the device is closed.
        """
        return self._shared

    def enter_shared(self) -> None:
        """Begin what ``leave_shared`` ends; ``shared`` does both."""
        with self._lock:
            self._wait_until_let_in()
            if self._closed:
                raise DeviceLostError("the device is closed", code=npurt.Code.BAD_HANDLE)
            self._inside += 1

    def leave_shared(self) -> None:
        """End what ``enter_shared`` began; only who keeps others out waits for that."""
        with self._lock:
            self._inside -= 1
            if self._kept_out:
                self._changed.notify_all()

    def rejoin_shared(self) -> None:
        """Be among those again that ``leave_shared`` was called to leave for a while.

        Also of a device that was closed meanwhile, so that there is one end for every beginning.
        """
        with self._lock:
            self._wait_until_let_in()
            self._inside += 1

    def _wait_until_let_in(self) -> None:
        """Wait while somebody keeps others out of a device that is open (the lock is held)."""
        while self._kept_out and not self._closed:
            self._changed.wait()

    @contextmanager
    def exclusive(self, *, timeout_s: float) -> Iterator[None]:
        """Make calls while nobody else does. Not to be nested; one thread at a time asks for it.

        Raises: DeviceLostError if another call has not returned in time, or the device is closed.
        """
        self._keep_out(timeout_s)
        try:
            yield
        finally:
            with self._changed:
                self._kept_out = False
                self._changed.notify_all()

    def _keep_out(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._kept_out = True
            while self._inside and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    self._kept_out = False
                    self._changed.notify_all()
                    raise DeviceLostError(
                        f"a device call has not returned within {timeout_s} s",
                        code=npurt.Code.DEVICE_WEDGED,
                    )
            if self._closed:
                self._kept_out = False
                raise DeviceLostError("the device is closed", code=npurt.Code.BAD_HANDLE)

    def attempt(self, name: str, *arguments: object) -> Answer:
        """Call a function whose first argument is the device; return the status."""
        if self._closed:
            return Answer(name, npurt.Code.BAD_HANDLE, "the device is closed")
        return self.library.attempt(name, self.pointer, *arguments)

    def call(self, name: str, *arguments: object, about: str = "") -> None:
        """Call a function whose first argument is the device. Raises: DeviceError if not OK."""
        answer = self.attempt(name, *arguments)
        if answer.code:
            self.library.check(answer, about=about)


class _Shared(AbstractContextManager[None]):
    """The context of ``DeviceCalls.shared``: it holds nothing, so there is one for all threads."""

    def __init__(self, calls: DeviceCalls) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._calls.enter_shared()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._calls.leave_shared()
