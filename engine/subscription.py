"""A bounded view of durable steps for one observer; a slow one loses steps and is told how many."""

import queue
from collections.abc import Callable, Iterator

from laneway.engine.ports import Step


class Subscription:
    """Iterate over steps as they become visible.

    ``lost`` counts steps that a full buffer dropped.
    """

    def __init__(self, steps_max: int, *, forget: Callable[["Subscription"], None]) -> None:
        self._steps: queue.Queue[Step | None] = queue.Queue()
        self._steps_max = steps_max
        self._forget = forget
        self._open = True
        self.lost = 0

    def put(self, step: Step) -> None:
        """Add a step (the engine's gate); never blocks."""
        if self._steps.qsize() >= self._steps_max:
            self.lost += 1
        else:
            self._steps.put(step)

    def get(self, timeout_s: float | None = None) -> Step | None:
        """Return the next step, or None after the time or after ``close``."""
        try:
            return self._steps.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def __iter__(self) -> Iterator[Step]:
        """Yield steps until the subscription is closed."""
        while (step := self._steps.get()) is not None:
            yield step

    def close(self) -> None:
        """End the subscription; idempotent."""
        if self._open:
            self._forget(self)
            self.end()

    def end(self) -> None:
        """Let the observer see that no step follows (engine thread)."""
        self._open = False
        self._steps.put(None)
