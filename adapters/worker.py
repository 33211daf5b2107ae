"""A thread that carries out effects one after the other.

An exception never dies with the thread: the work's own guard turns it into an input. What is left
here is a queue, an end, and the name under which the thread shows up.

The order is that in which they were put, but for one: a submit goes before the restore of a buffer
that stands right in front of it. The two are of different buffers, since one that is not restored
is in no plan, and the device is not to wait for a wipe.

A thread that has an urgent effect in its hands may stand in for a worker that has nothing to do, so
that nobody has to be woken first; the worker begins nothing meanwhile.
"""

import queue
import threading
from collections.abc import Callable, Iterable

from laneway.engine.effects import DeviceEffect, RestoreBuffer, SubmitJob


class Worker:
    """Runs ``work`` on each effect, one after the other, on one daemon thread.

    Why a daemon: a call into a wedged device may never return, and must not keep the process (D13).
    """

    def __init__(self, name: str, work: Callable[[DeviceEffect], None]) -> None:
        self._work = work
        self._queue: queue.SimpleQueue[DeviceEffect | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._undone = 0
        """Effects that were taken and not yet carried out."""

        self._busy = threading.Lock()
        """Held by whoever carries out."""

        self._awaited: tuple[DeviceEffect, threading.Lock] | None = None
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
        with self._lock:
            self._undone += 1
            self._queue.put(effect)

    def hand_over(self, effect: DeviceEffect, *, at_most_s: float) -> None:
        """Take one effect, and sleep until it was carried out, for a bounded time.

        Only one thread may hand over. Why sleep: a thread that goes on with Python keeps the
        interpreter, and this one would get it late and lose it again at every call into the device.
        """
        done = threading.Lock()
        done.acquire()
        self._awaited = (effect, done)
        self.put(effect)
        done.acquire(timeout=at_most_s)

    def claim(self) -> bool:
        """Keep it from beginning anything, if it has nothing to do; return whether it had not.

        Whoever claimed it owes it ``stand_in``. What is put meanwhile waits.
        """
        with self._lock:
            return not self._undone and self._busy.acquire(blocking=False)

    def stand_in(self, effects: Iterable[DeviceEffect]) -> None:
        """Carry out on the caller's thread, which has claimed it, what it would have; let it go on.

        Why all of it: what is put meanwhile comes behind, and the device has its job by then.
        """
        try:
            for effect in _submits_first(effects):
                self._work(effect)
        finally:
            self._busy.release()

    def stop(self, *, timeout_s: float) -> bool:
        """End after what is queued; return whether the thread ended in time."""
        self._queue.put(None)
        if self._thread.is_alive() and not self.is_current:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _carry_out(self, effect: DeviceEffect) -> None:
        with self._busy:
            self._work(effect)
        with self._lock:
            self._undone -= 1
        awaited = self._awaited
        if awaited is not None and awaited[0] is effect:
            self._awaited = None
            awaited[1].release()

    def _run(self) -> None:
        effect = self._queue.get()
        while effect is not None:
            after = None
            if type(effect) is RestoreBuffer and not self._queue.empty():
                after = self._queue.get()
                if after is None:
                    self._carry_out(effect)
                    return
                effect, after = _submits_first((effect, after))
            self._carry_out(effect)
            effect = after if after is not None else self._queue.get()


def _submits_first(effects: Iterable[DeviceEffect]) -> list[DeviceEffect]:
    """Return effects in the order that the head of this file tells."""
    ordered: list[DeviceEffect] = []
    for effect in effects:
        goes_first = ordered and type(ordered[-1]) is RestoreBuffer and type(effect) is SubmitJob
        ordered.insert(len(ordered) - 1 if goes_first else len(ordered), effect)
    return ordered
