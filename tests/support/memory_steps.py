"""The smallest journal port: a list.

What the engine recorded can be looked at without any journal code.
"""

from collections.abc import Callable, Iterator, Sequence

from laneway.engine.errors import JournalWriteError
from laneway.engine.ports import Step


class ListJournal:
    """Keeps steps in a list; fails when told to.

    ``watch`` sees each transaction before it is kept.
    """

    tokens = "full"

    def __init__(self, steps: Sequence[Step] = ()) -> None:
        self.steps = list(steps)
        self.fail = False
        self.closed = False
        self.watch: Callable[[Sequence[Step]], None] = lambda _: None

    def claim(self) -> None:
        pass

    def append(self, steps: Sequence[Step]) -> None:
        if self.fail:
            raise JournalWriteError("disk full (told to)")
        self.watch(steps)
        self.steps.extend(steps)

    def read(self, *, first: int = 1, last: int | None = None) -> Iterator[Step]:
        return iter(self.steps[first - 1 : last])

    def close(self) -> None:
        self.closed = True
