"""The clock of an opened device, for everything that talks about its jobs.

The simulator has a clock of its own, which may be stepped or scaled; other backends stamp with the
machine's monotonic clock. A clock that never falls is owed also after the device is closed: then
the last instant is kept, moving on with the machine's clock where the device's time ran by itself.

Source: decision 8, npurt_clock_now.
"""

import ctypes
import threading
import time

from laneway.adapters.calls import DeviceCalls

_STEPPED_LOOK_S = 0.01


class DeviceClock:
    """Instants of the device in ns; thread-safe."""

    def __init__(self, calls: DeviceCalls, *, stepped: bool, scale: float = 1.0) -> None:
        self._calls = calls
        self._stepped = stepped
        self._scale = scale
        self._lock = threading.Lock()
        self._told = ctypes.c_uint64(0)
        self._pointer = ctypes.byref(self._told)
        self._last_ns = 0
        self._told_at = -1
        self._stopped_at_ns: int | None = None

    def now_ns(self) -> int:
        """Return the present instant of the device in ns.

        A stepped one is asked once after each call in which its time may have moved.
        """
        moves = self._calls.moves if self._stepped else 0
        if self._told_at == moves:
            return self._last_ns
        with self._lock:
            if self._stopped_at_ns is None:
                self._calls.call("npurt_clock_now", self._pointer)
                told_ns = self._told.value
                if told_ns > self._last_ns:
                    self._last_ns = told_ns
                if self._stepped and moves % 2 == 0:
                    self._told_at = moves
                return self._last_ns
            if self._stepped:
                return self._last_ns
            gone_ns = time.monotonic_ns() - self._stopped_at_ns
            return self._last_ns + int(gone_ns * self._scale)

    def real_seconds(self, duration_ns: int) -> float:
        """Return how many seconds of the real world a duration on this clock takes.

        A stepped clock moves when somebody steps it: look again soon.
        """
        return _STEPPED_LOOK_S if self._stepped else duration_ns / 1e9 / self._scale

    def stop(self) -> None:
        """Ask the device no more: it is about to be closed or was abandoned.

        Why the device is not asked a last time: an abandoned one might not answer (D13).
        """
        with self._lock:
            if self._stopped_at_ns is None:
                self._stopped_at_ns = time.monotonic_ns()
