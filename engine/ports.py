"""The protocols that the engine owns and adapters implement."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import attrs

from laneway.engine.clock import Clock
from laneway.engine.effects import DeviceEffect
from laneway.engine.inputs import DeviceFacts, Input
from laneway.statemachines import Event
from laneway.statemachines.values import opened


@attrs.frozen(kw_only=True, weakref_slot=False)
class Step:
    """One input with its events: the unit of the journal.

    ``step`` counts from 1; ``at_ns`` is engine time.
    """

    step: int
    at_ns: int
    taken: Input
    events: tuple[Event, ...]


_Opened = opened(Step)


def make_step(*, step: int, at_ns: int, taken: Input, events: tuple[Event, ...]) -> Step:
    """Make a step, as ``Step`` does."""
    made = _Opened()
    made.step = step
    made.at_ns = at_ns
    made.taken = taken
    made.events = events
    made.__class__ = Step
    return made  # type: ignore[no-any-return]


class TextPort(Protocol):
    """Tokens from text and text from tokens for one artifact (decision 12).

    Thread-safe.
    """

    @property
    def has_text(self) -> bool:
        """Whether tokens have text here; without a tokenizer they are ids only."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a prompt. Raises: ValueError for text that has no tokens here."""
        ...

    def open(
        self,
        request: int,
        *,
        stop: tuple[str, ...],
        tokens: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """Begin a request's text, or rebuild it from the tokens it already has.

        Stop strings are looked for in the text from the ``min_tokens``-th generated token on.
        """
        ...

    def push(self, request: int, position: int, token: int) -> bool:
        """Take one generated token in order; return True when a stop string is now complete.

        The same token at the same position changes nothing.
        """
        ...

    def take(self, request: int, position: int, token: int | None = None) -> str:
        """Return the text that the token at ``position`` released; push it first if it is given."""
        ...

    def finish(self, request: int, *, tokens: int | None = None) -> str:
        """Return the text held back after the first ``tokens`` tokens and forget the request.

        None: after all that were pushed. A token that was pushed may never have been delivered.
        """
        ...

    def drop(self, request: int) -> None:
        """Forget the request."""
        ...


class DevicePort(Protocol):
    """A device that carries out effects and answers with inputs.

    With ``threads`` the port works on threads of its own and calls ``post`` from them. Without, it
    works only inside ``step`` and device time moves only inside ``advance`` (E30: the same code
    runs both ways).
    """

    @property
    def clock(self) -> Clock:
        """The clock all instants of this device are on; the engine uses it too."""
        ...

    @property
    def virtual(self) -> bool:
        """Whether the device is meant to be stepped by an engine without threads."""
        ...

    def describe(self) -> DeviceFacts:
        """Return what the device says of itself. Raises: DeviceError."""
        ...

    def start(self, post: Callable[[Input], None], *, threads: bool) -> None:
        """Begin to work."""
        ...

    def execute(self, effect: DeviceEffect) -> None:
        """Take one effect for execution; never raises for a device's failure.

        Never waits for a device: a thread of the port may go first, for a bounded moment. It must
        not wait for a thread that looks at the engine, whose lock may be held meanwhile.
        """
        ...

    def step(self) -> bool:
        """Do one piece of waiting work, if any (without threads only).

        Return whether something was done.
        """
        ...

    def advance(self, until_ns: int | None) -> bool:
        """Let device time pass to its next event, at most to ``until_ns`` (stepped devices only).

        Returns False when nothing happens by itself any more and ``until_ns`` is None.
        """
        ...

    def text(self, model: int) -> TextPort:
        """Return the text side of a validated artifact (decision 21).

        Raises: KeyError for an unknown model.
        """
        ...

    def stop(self) -> None:
        """End the threads; after the device was closed or abandoned."""
        ...


@runtime_checkable
class EagerPort(Protocol):
    """What a DevicePort is too that gets its next job as soon as can be; it takes ForeseeJob.

    Why: an idle device waits for its next job. A thread that has the result in its hands need not
    wake another one to decide, nor that one a third to submit; and what is known of the next job
    need not be worked out then.
    """

    def lend(self, go_on: Callable[[Input], None]) -> None:
        """Let the thread that waits call ``go_on`` in the place of ``post``, with no lock held.

        It posts, or decides the step at once and calls ``execute`` meanwhile; what that was given
        is carried out when it has returned. To be called before ``start``.
        """
        ...


class JournalPort(Protocol):
    """What remembers: append-only steps, one transaction per call."""

    @property
    def tokens(self) -> str:
        """``full`` or ``digest`` (decision 5)."""
        ...

    def claim(self) -> None:
        """Take the journal for the one engine that it will have.

        Raises: JournalWriteError if an engine has it, or had it.
        """
        ...

    def append(self, steps: Sequence[Step]) -> None:
        """Make the steps durable, all or none. Raises: JournalWriteError."""
        ...

    def read(self, *, first: int = 1, last: int | None = None) -> Iterator[Step]:
        """Return the steps in order. Raises: JournalFormatError."""
        ...

    def close(self) -> None:
        """Checkpoint and give the owner lock back; idempotent."""
        ...
