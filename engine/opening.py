"""What an engine makes of the journal it is given: the state to go on from, and the time.

Source: decisions 9 and 17, G21.
"""

from collections.abc import Callable

from laneway.engine.errors import InternalError, JournalError, JournalFormatError
from laneway.engine.evolve import fold
from laneway.engine.inputs import EngineStarted
from laneway.engine.ports import JournalPort, Step
from laneway.engine.state import State, initial_state

NAMED_MAX = 5


def open_journal_state(
    journal: JournalPort, wall_ns: int, *, watch: Callable[[Step], None]
) -> tuple[State, int]:
    """Fold what the journal has; return the state and the engine time now (decision 9).

    ``watch`` is shown every step.
    """
    state, anchor = fold_journal(journal, watch)
    if state.requests:
        numbers = [f"request/{number}" for number in sorted(state.requests)]
        more = ", …" if len(numbers) > NAMED_MAX else ""
        have = "1 request has" if len(numbers) == 1 else f"{len(numbers)} requests have"
        raise JournalError(
            f"{have} no ending in the journal ({', '.join(numbers[:NAMED_MAX])}{more}):"
            " take another file"
        )
    if state.step == 0:
        return state, 0
    assert anchor is not None
    anchor_wall_ns, anchor_ns = anchor
    last_wall_ns = anchor_wall_ns + state.now_ns - anchor_ns
    return state, state.now_ns + max(0, wall_ns - last_wall_ns)


def fold_journal(
    journal: JournalPort, watch: Callable[[Step], None] = lambda _: None
) -> tuple[State, tuple[int, int] | None]:
    """Fold every step; return the state, and wall clock and engine time of the last start.

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
        watch(step)
    return state, anchor
