"""A thread that carries out effects one after the other.

An exception never dies with the thread: the work's own guard turns it into an input. What is left
here is a queue, an end, and the name under which the thread shows up.
"""

import queue
import threading
from collections.abc import Callable

from laneway.engine.effects import DeviceEffect


class Worker:
    """Runs ``work`` on each effect, in order, on one daemon thread.

    Why a daemon: a call into a wedged device may never return, and must not keep the process (D13).
    """

    def __init__(self, name: str, work: Callable[[DeviceEffect], None]) -> None:
        self._work = work
        self._queue: queue.SimpleQueue[DeviceEffect | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"laneway-{name}", daemon=True)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this worker's thread."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def put(self, effect: DeviceEffect) -> None:
        """Take one effect; never blocks."""
        self._queue.put(effect)

    def stop(self, *, timeout_s: float) -> bool:
        """End after what is queued; return whether the thread ended in time."""
        self._queue.put(None)
        if self._thread.is_alive() and not self.is_current:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (effect := self._queue.get()) is not None:
            self._work(effect)
