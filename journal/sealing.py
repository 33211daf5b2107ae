"""Turn steps into rows, and rows back into steps: what every kind of journal shares."""

from collections.abc import Iterable, Iterator, Sequence

from laneway.engine.errors import JournalFormatError, JournalWriteError
from laneway.engine.inputs import EngineStarted
from laneway.engine.ports import Step, make_step
from laneway.journal.chain import (
    Block,
    FollowedRow,
    Head,
    RawRow,
    followed,
    make_head,
    plain_chain,
    row_chain,
)
from laneway.journal.codec import Codec

Row = tuple[int, int, str, str, str, bytearray]
"""A row as the driver takes it without a question: of bytes it asks first who adapts them."""

_INTEGER_MAX = (1 << 63) - 1


def seal(codec: Codec, head: Head, steps: Sequence[Step]) -> tuple[list[Row], Head]:
    """Return the rows of steps that follow ``head``, and the head after them.

    Raises: JournalWriteError for a gap, for time that falls, for an input or event that has no
    stored form, or an EngineStarted that says another token mode than the journal has.
    """
    rows: list[Row] = []
    for step in steps:
        row, head = _seal_one(codec, head, step)
        rows.append(row)
    return rows, head


def _seal_one(codec: Codec, head: Head, step: Step) -> tuple[Row, Head]:
    """Return the row of a step that follows ``head``, and the head after it.

    Raises: JournalWriteError, as ``seal``.
    """
    before, before_ns, chain = head
    number, at_ns = step.step, step.at_ns
    if number != before + 1:
        raise JournalWriteError(f"step {number} does not follow step {before}")
    if not before_ns <= at_ns <= _INTEGER_MAX:
        raise JournalWriteError(
            f"step {number}: time goes from {before_ns} to {at_ns} ns; it must not fall"
        )
    usual = codec.usual_row(chain, number, at_ns, step.taken, step.events)
    if usual is None:
        kind, text, events, chain = _unusual_row(codec, chain, number, step)
    else:
        kind, text, events, hashed = usual
        if hashed is None:  # this processor has no instructions for it
            texts = (kind.encode(), text.encode(), events.encode())
            hashed = plain_chain(chain, number, at_ns, *texts)
        chain = hashed
    row = (number, at_ns, kind, text, events, bytearray(chain))
    return row, make_head((number, at_ns, chain))


def _unusual_row(
    codec: Codec, previous: bytes, number: int, step: Step
) -> tuple[str, str, str, bytes]:
    """Return kind, input, events and chain of any step. Raises: JournalWriteError, as ``seal``."""
    taken = step.taken
    if type(taken) is EngineStarted and taken.journal_tokens != codec.tokens:
        raise JournalWriteError(
            f"step {number}: EngineStarted says journal_tokens={taken.journal_tokens!r}, the"
            f" journal has {codec.tokens!r}"
        )
    try:
        kind, text = codec.encode_input(taken)
        events = codec.encode_events(step.events)
    except JournalWriteError as error:
        raise JournalWriteError(f"step {number}: {error}") from error
    chain = row_chain(previous, number, step.at_ns, kind.encode(), text, events)
    return kind, text.decode(), events.decode(), chain


def unseal(codec: Codec, head: Head, blocks: Iterable[Block]) -> Iterator[Step]:
    """Return the steps of rows that follow ``head``, each checked against the chain.

    Raises: JournalFormatError naming the step.
    """
    for row in followed(head, blocks):
        yield decode_row(codec, row)


def decode_row(codec: Codec, row: FollowedRow) -> Step:
    """Return the step of a row that was found to follow the chain.

    Raises: JournalFormatError naming the step.
    """
    step, at_ns, kind, taken, events = row
    try:
        return make_step(
            step=step,
            at_ns=at_ns,
            taken=codec.decode_input(kind.decode(errors="replace"), taken),
            events=codec.decode_events(events),
        )
    except JournalFormatError as error:
        raise JournalFormatError(f"step {step}: {error}") from error


def trusted_head(row: RawRow) -> Head:
    """Return a row's own word on where the journal stands after it, to read on from there.

    Raises: JournalFormatError if its columns are not even of the right kind.
    """
    step, at_ns, chain = row.step, row.at_ns, row.chain
    if isinstance(step, int) and isinstance(at_ns, int) and isinstance(chain, bytes):
        return Head(step, at_ns, chain)
    raise JournalFormatError(f"step {step!r}: the row is not what was written")
