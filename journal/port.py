"""What every journal offers to those who look into it (replay, verify, timeline)."""

from collections.abc import Iterator
from typing import Protocol

from laneway.engine.ports import Step
from laneway.journal.chain import Block, Head, RawRow
from laneway.journal.codec import Codec


class ReadableJournal(Protocol):
    """The reading side of a journal; appending stands in ``laneway.engine.ports.JournalPort``."""

    @property
    def tokens(self) -> str:
        """``full`` or ``digest``."""
        ...

    @property
    def journal_id(self) -> str:
        """A random number drawn when the journal was made."""
        ...

    @property
    def codec(self) -> Codec:
        """How its steps are written."""
        ...

    def head(self) -> tuple[int, int]:
        """Return number and instant of the last step, (0, 0) if there is none."""
        ...

    def read(self, *, first: int = 1, last: int | None = None) -> Iterator[Step]:
        """Return the steps in order, each checked against the chain. Raises: JournalFormatError."""
        ...

    def rows(self, *, first: int | None = None, last: int | None = None) -> Iterator[RawRow]:
        """Return the rows as they are stored, without believing them."""
        ...

    def blocks(self, *, first: int | None = None, last: int | None = None) -> Iterator[Block]:
        """Return the same rows, many at a time and as plain tuples."""
        ...

    def origin(self) -> Head:
        """Return the head before the first step: the chain of ``meta`` as it is stored now."""
        ...

    def findings(self) -> list[str]:
        """Return what is wrong with the storage apart from its rows."""
        ...

    def size_bytes(self) -> int:
        """Return the bytes the journal takes."""
        ...

    def close(self) -> None:
        """Give back what the journal holds; idempotent."""
        ...
