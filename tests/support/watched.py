"""A journal port that shows every transaction to a watcher the moment it is durable."""

from collections.abc import Callable, Iterator, Sequence

from laneway.engine.ports import JournalPort, Step


class WatchedJournal:
    """Passes everything on to a journal; ``watch`` sees the steps before any effect of them."""

    def __init__(self, journal: JournalPort, watch: Callable[[Sequence[Step]], None]) -> None:
        self._journal = journal
        self._watch = watch

    @property
    def tokens(self) -> str:
        return self._journal.tokens

    def claim(self) -> None:
        self._journal.claim()

    def append(self, steps: Sequence[Step]) -> None:
        self._journal.append(steps)
        self._watch(steps)

    def read(self, *, first: int = 1, last: int | None = None) -> Iterator[Step]:
        return self._journal.read(first=first, last=last)

    def close(self) -> None:
        self._journal.close()
