"""A journal in memory, for tests and for runs that keep none. It ends with the process."""

import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from laneway.engine.errors import JournalWriteError
from laneway.engine.ports import Step
from laneway.journal.chain import ROWS_AT_ONCE, Block, Head, RawRow
from laneway.journal.meta import new_meta
from laneway.journal.sealing import seal, trusted_head, unseal

ONE_ENGINE = "this journal has an engine, or had one: open a journal of its own for each engine"


class MemoryJournal:
    """Rows as the file has them, in a list: the same texts, the same chain, the same checks."""

    def __init__(self, *, tokens: str = "full") -> None:
        """Begin an empty journal. Raises: ConfigurationError for an unknown token mode."""
        meta = new_meta(tokens)
        self.codec = meta.codec()
        self.tokens = tokens
        self.journal_id = meta.journal_id
        self._origin = meta.origin()
        self._head = self._origin
        self._rows: list[RawRow] = []
        self._size_bytes = 0
        self._lock = threading.Lock()
        self._closed = False
        self._claimed = False

    def claim(self) -> None:
        """Take the journal for one engine. Raises: JournalWriteError if it has one, or had."""
        with self._lock:
            if self._claimed:
                raise JournalWriteError(ONE_ENGINE)
            self._claimed = True

    def append(self, steps: Sequence[Step]) -> None:
        """Keep the steps, all or none. Raises: JournalWriteError."""
        with self._lock:
            if self._closed:
                raise JournalWriteError("the journal is closed")
            rows, self._head = seal(self.codec, self._head, steps)
            for step, at_ns, kind, taken, events, chain in rows:
                texts = (kind.encode(), taken.encode(), events.encode())
                row = RawRow(step, at_ns, *texts, bytes(chain))
                self._rows.append(row)
                self._size_bytes += len(taken) + len(events) + len(kind) + len(chain) + 16

    def head(self) -> tuple[int, int]:
        """Return number and instant of the last step, (0, 0) if there is none."""
        head = self._head
        return head.step, head.at_ns

    def read(self, *, first: int = 1, last: int | None = None) -> Iterator[Step]:
        """Return the steps in order, each checked against the chain. Raises: JournalFormatError."""
        if first <= 1:
            return unseal(self.codec, self._origin, self.blocks(last=last))
        if first - 1 > len(self._rows):
            return iter(())
        head = trusted_head(self._rows[first - 2])
        return unseal(self.codec, head, self.blocks(first=first, last=last))

    def rows(self, *, first: int | None = None, last: int | None = None) -> Iterator[RawRow]:
        """Return the rows."""
        for block in self.blocks(first=first, last=last):
            yield from map(RawRow._make, block)

    def blocks(self, *, first: int | None = None, last: int | None = None) -> Iterator[Block]:
        """Return the rows, many at a time."""
        with self._lock:
            end = len(self._rows) if last is None else min(last, len(self._rows))
        for begin in range(max((first or 1) - 1, 0), end, ROWS_AT_ONCE):
            yield self._rows[begin : min(begin + ROWS_AT_ONCE, end)]

    def origin(self) -> Head:
        """Return the head before the first step."""
        return self._origin

    def findings(self) -> list[str]:
        """Return nothing: memory has no pages to be damaged."""
        return []

    def size_bytes(self) -> int:
        """Return the bytes of all rows."""
        return self._size_bytes

    def close(self) -> None:
        """Take no more steps; what there is can still be read. Idempotent."""
        with self._lock:
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
