"""Fold a journal to a state, and prove that today's code would decide the same.

Theory of operation. ``fold`` applies the recorded events; every row is checked against the chain on
the way. ``verify`` asks four questions, each of all steps before the next is asked, and stops at
the first no: is the file as this code made it (storage), is every row what was written (chain), can
every row be read and folded (fold), and does deciding each input again give the same events
(decide). The state after deciding is compared with the state after folding too, so that two wrongs
do not make a right. A journal that keeps digests instead of tokens cannot be decided again, and the
report says so.

A fold believes no row before it has looked at its chain, so where all is well the questions about
chain and fold are answered by one pass; where it is not, the chain is asked alone, of all rows,
before anything else is refuted.
"""

from collections.abc import Callable, Hashable
from typing import Any

import attrs

from laneway.engine import decide as deciding
from laneway.engine.draft import Decision
from laneway.engine.errors import (
    InternalError,
    JournalError,
    JournalFormatError,
    ReplayDivergedError,
)
from laneway.engine.evolve import fold as fold_step
from laneway.engine.inputs import EngineStarted, Input
from laneway.engine.ports import Step
from laneway.engine.state import State, freeze, initial_state
from laneway.journal.chain import FollowedRow, Head, followed, heads
from laneway.journal.port import ReadableJournal
from laneway.journal.runs import RunFolder
from laneway.journal.sealing import decode_row


@attrs.frozen
class Code:
    """The code that a journal is held against: by default today's."""

    initial_state: Callable[[], Any] = initial_state
    fold: Callable[[Any, Step], None] = fold_step
    freeze: Callable[[Any], Hashable] = freeze
    decide: Callable[[Any, Input, int], Decision] = deciding.decide


TODAY = Code()

MISFITS = (
    InternalError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
"""What folding or deciding raises on a step that some other code recorded."""


@attrs.frozen(kw_only=True)
class VerifyReport:
    """What ``verify`` found.

    ``asked`` is the last question that was asked: ``storage``, ``chain``, ``fold`` or ``decide``;
    ``step`` and ``reason`` are of the first no (``step`` 0: not about one step).
    """

    ok: bool
    journal_id: str
    tokens: str
    asked: str
    steps: int
    incarnations: int
    events: int
    entity_events: int
    chain: str
    step: int = 0
    reason: str = ""
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return attrs.asdict(self)


@attrs.define
class _Counts:
    """What was seen so far."""

    steps: int = 0
    incarnations: int = 0
    events: int = 0
    entity_events: int = 0
    chain: bytes = b""


class _Refuted(Exception):
    """One question was answered with no."""

    def __init__(self, asked: str, step: int, reason: str) -> None:
        super().__init__(reason)
        self.asked = asked
        self.step = step
        self.reason = reason.removeprefix(f"step {step}: ")


def fold(journal: ReadableJournal, until: int | None = None, *, code: Code = TODAY) -> State:
    """Return the state after step ``until`` (None: after the last).

    Raises: JournalFormatError (a row is not what was written), ReplayDivergedError (the events do
    not fit the state they are applied to), both naming the step.
    """
    state: State = code.initial_state()

    def plainly(row: FollowedRow, step: Step) -> None:
        try:
            code.fold(state, step)
        except MISFITS as error:
            raise ReplayDivergedError(
                f"step {step.step}: its events do not fit the state before it: {_say(error)}",
                step=step.step,
            ) from error

    bulk = code.fold is fold_step
    folder = RunFolder(journal.codec, state, plainly, bulk=bulk, exact=False)
    _take_rows(folder, journal, until)
    return state


def _take_rows(folder: RunFolder, journal: ReadableJournal, until: int | None) -> Head:
    """Fold the rows of a journal, many at a time; return where it stands after them."""
    head = journal.origin()
    for rows in journal.blocks(last=until):
        head = folder.take_all(head, rows)
    folder.finish()
    return head


def verify(journal: ReadableJournal, *, code: Code = TODAY) -> VerifyReport:
    """Answer whether the journal is whole and today's code decides the same.

    A bad journal is an answer, not an exception.

    Source: R18.5.
    """
    counts = _Counts()
    asked = "fold" if journal.tokens == "digest" else "decide"
    refuted: _Refuted | None = None
    try:
        _check_storage(journal)
        folded = _check_rows(journal, counts, code)
        if asked == "decide":
            _check_decide(journal, counts, code, folded)
    except _Refuted as found:
        refuted = found
    note = ""
    if journal.tokens == "digest":
        note = "the journal keeps digests of tokens: it was folded, it cannot be decided again"
    return VerifyReport(
        ok=refuted is None,
        journal_id=journal.journal_id,
        tokens=journal.tokens,
        asked=asked if refuted is None else refuted.asked,
        steps=counts.steps,
        incarnations=counts.incarnations,
        events=counts.events,
        entity_events=counts.entity_events,
        chain=counts.chain.hex(),
        step=0 if refuted is None else refuted.step,
        reason="" if refuted is None else refuted.reason,
        note=note,
    )


def _check_storage(journal: ReadableJournal) -> None:
    try:
        findings = journal.findings()
    except JournalError as error:
        raise _Refuted("storage", 0, str(error)) from error
    if findings:
        raise _Refuted("storage", 0, "; ".join(findings))


def _check_rows(journal: ReadableJournal, counts: _Counts, code: Code) -> Any:
    """Ask about the chain and about the fold; return the folded state."""
    try:
        return _check_fold(journal, counts, code)
    except _Refuted:
        events = counts.incarnations, counts.events, counts.entity_events
        counts.incarnations = counts.events = counts.entity_events = 0
        _check_chain(journal, counts)
        counts.incarnations, counts.events, counts.entity_events = events
        raise


def _check_chain(journal: ReadableJournal, counts: _Counts) -> None:
    """See that all rows are what was written, from the meta rows on, without reading them."""
    head: Head | None = None
    try:
        head = journal.origin()
        for rows in journal.blocks():
            for after in heads(head, rows):
                counts.steps, _, counts.chain = head = after
    except JournalError as error:
        step = 0 if head is None else head.step + 1
        raise _Refuted("chain", step, str(error)) from error


def _check_fold(journal: ReadableJournal, counts: _Counts, code: Code) -> Any:
    """See that every row can be read, is the one text of what it says, and can be folded."""
    state = code.initial_state()

    def plainly(row: FollowedRow, step: Step) -> None:
        *_, taken, events = row
        try:
            _check_text(journal, step, taken, events)
            code.fold(state, step)
        except MISFITS as error:
            reason = f"step {step.step}: its events do not fit the state before it: {_say(error)}"
            raise _Refuted("fold", step.step, reason) from error
        counts.incarnations += isinstance(step.taken, EngineStarted)
        counts.events += len(step.events)
        counts.entity_events += sum(len(event.entities) for event in step.events)

    folder = RunFolder(journal.codec, state, plainly, bulk=code.fold is fold_step)
    try:
        head = _take_rows(folder, journal, None)
    except JournalError as error:
        raise _Refuted("fold", folder.at, str(error)) from error
    finally:
        counts.events += folder.events
        counts.entity_events += folder.entity_events
    if head.step:
        counts.steps, _, counts.chain = head
    return state


def _check_text(journal: ReadableJournal, step: Step, taken: bytes, events: bytes) -> None:
    """See that a row holds the text this code writes, and that an incarnation is declared well.

    Raises: JournalFormatError.
    """
    codec = journal.codec
    if codec.encode_events(step.events) != events:
        raise JournalFormatError(f"step {step.step}: events are not in the form a journal writes")
    if codec.tokens == "full" and codec.encode_input(step.taken)[1] != taken:
        raise JournalFormatError(f"step {step.step}: input is not in the form a journal writes")
    if not isinstance(step.taken, EngineStarted):
        if step.step == 1:
            raise JournalFormatError("step 1: a journal begins with EngineStarted")
    elif step.taken.journal_tokens != journal.tokens:
        raise JournalFormatError(
            f"step {step.step}: EngineStarted says journal_tokens={step.taken.journal_tokens!r},"
            f" the journal has {journal.tokens!r}"
        )


def _check_decide(journal: ReadableJournal, counts: _Counts, code: Code, folded: Any) -> None:
    """See that deciding every input again gives the recorded events and the folded state.

    Why the texts of the events are compared: that each is the one of its events is known by now.
    """
    codec = journal.codec
    state = code.initial_state()
    for row in followed(journal.origin(), journal.blocks(last=counts.steps)):
        number, at_ns, kind, taken, events = row
        told = codec.decode_input(kind.decode(errors="replace"), taken)
        try:
            decided = code.decide(state, told, at_ns).events
        except MISFITS as error:
            reason = f"step {number}: deciding fails: {_say(error)}"
            raise _Refuted("decide", number, reason) from error
        if codec.encode_events(decided) != events:
            step = decode_row(codec, row)
            raise _Refuted("decide", number, _difference(codec.encode_events, step, decided))
    if state != folded and code.freeze(state) != code.freeze(folded):
        number = counts.steps
        reason = f"after step {number} the decided state is not the folded state"
        raise _Refuted("decide", number, reason)


def _say(error: Exception) -> str:
    return str(error) if isinstance(error, InternalError) else f"{type(error).__name__}: {error}"


def _difference(encode: Callable[..., bytes], step: Step, decided: tuple[Any, ...]) -> str:
    """Say which event is the first that differs, as recorded and as decided."""
    for index in range(max(len(step.events), len(decided))):
        recorded = encode(step.events[index : index + 1]).decode()
        today = encode(decided[index : index + 1]).decode()
        if recorded != today:
            kind = type(step.taken).__name__
            return f"step {step.step} ({kind}), event {index}: recorded {recorded}, decided {today}"
    return f"step {step.step}: the events differ"
