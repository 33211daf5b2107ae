"""What an engine makes of the journal it is given: the state to go on from, and the time.

Source: decisions 9 and 17, G21.
"""

from collections.abc import Callable

import attrs

from laneway.engine.errors import InternalError, JournalError, JournalFormatError
from laneway.engine.evolve import fold
from laneway.engine.inputs import EngineStarted
from laneway.engine.ports import JournalPort, Step
from laneway.engine.remembering import Remembered
from laneway.engine.state import State, initial_state

NAMED_MAX = 5


@attrs.frozen
class Opened:
    """What a journal has: the state to go on from, the engine time now, what it remembers."""

    state: State
    now_ns: int
    remembered: Remembered


def open_journal_state(
    journal: JournalPort, wall_ns: int, *, watch: Callable[[Step], None], resume: bool
) -> Opened:
    """Fold what the journal has (decision 9); ``watch`` is shown every step.

    Raises: JournalError if requests have no ending and are not to be resumed, or cannot be.
    """
    remembered = Remembered()

    def take(state: State, step: Step) -> None:
        watch(step)
        if resume:
            remembered.take(state, step)

    state, anchor = fold_journal(journal, take)
    if state.requests:
        _check_open(state, resume=resume, tokens=journal.tokens)
    if anchor is None:
        return Opened(state, 0, remembered)
    anchor_wall_ns, anchor_ns = anchor
    last_wall_ns = anchor_wall_ns + state.now_ns - anchor_ns
    return Opened(state, state.now_ns + max(0, wall_ns - last_wall_ns), remembered)


def _check_open(state: State, *, resume: bool, tokens: str) -> None:
    """Refuse requests without an ending, unless they are to go on and can (decision 5).

    Raises: JournalError.
    """
    numbers = [f"request/{number}" for number in sorted(state.requests)]
    more = ", …" if len(numbers) > NAMED_MAX else ""
    have = "1 request has" if len(numbers) == 1 else f"{len(numbers)} requests have"
    found = f"{have} no ending in the journal ({', '.join(numbers[:NAMED_MAX])}{more})"
    if not resume:
        raise JournalError(
            f"{found}: go on with --resume (Engine(resume=True)), or take another file"
        )
    if tokens != "full":
        raise JournalError(
            f"{found}, and it keeps only digests of their tokens, so they cannot go on: take"
            " another file"
        )


def fold_journal(
    journal: JournalPort, watch: Callable[[State, Step], None] = lambda _, __: None
) -> tuple[State, tuple[int, int] | None]:
    """Fold every step; return the state, and wall clock and engine time of the last start.

    ``watch`` is shown every step with the state after it.

    Raises: JournalFormatError when a step does not follow, or the first is not a start.
    """
    state = initial_state()
    anchor: tuple[int, int] | None = None
    for step in journal.read():
        try:
            fold(state, step)
        except InternalError as damage:
            raise JournalFormatError(f"step {step.step} does not follow: {damage}") from damage
        if isinstance(step.taken, EngineStarted):
            anchor = step.taken.wall_clock_ns, step.at_ns
        elif anchor is None:
            raise JournalFormatError(f"step {step.step} comes before any start of an engine")
        watch(state, step)
    return state, anchor


def remember(journal: JournalPort, number: int) -> Remembered:
    """Read what a journal has of one request. Raises: JournalFormatError."""
    remembered = Remembered(keep=number)
    fold_journal(journal, remembered.take)
    return remembered
