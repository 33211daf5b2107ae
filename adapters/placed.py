"""A text side whose tokens are told by absolute position.

The engine counts the generated tokens of a request from 0 and takes their text by that number; a
row of a job knows only its absolute position in the sequence. The distance between the two is the
length of the prompt, which shows at the first token after the text was opened: that token follows
the tokens the text was opened with.

Source: architecture decision 12, TextPort.
"""

import threading
from collections.abc import Sequence

import attrs

from laneway.engine.ports import TextPort


@attrs.define
class _Place:
    opened_with: int
    first_absolute: int | None = None


class PlacedText:
    """TextPort that also takes tokens by absolute position; thread-safe."""

    def __init__(self, text: TextPort) -> None:
        self._text = text
        self._places: dict[int, _Place] = {}
        self._lock = threading.Lock()

    @property
    def has_text(self) -> bool:
        """Whether tokens have text here."""
        return self._text.has_text

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a prompt. Raises: ValueError for text that has no tokens here."""
        return self._text.encode(text)

    def open(self, request: int, *, stop: tuple[str, ...], tokens: Sequence[int] = ()) -> None:
        """Begin a request's text, or rebuild it from the tokens it already has."""
        self._text.open(request, stop=stop, tokens=tokens)
        with self._lock:
            self._places[request] = _Place(len(tokens))

    def push(self, request: int, position: int, token: int) -> bool:
        """Take one generated token in order; return True when a stop string is now complete."""
        return self._text.push(request, position, token)

    def push_absolute(self, request: int, absolute: int, token: int) -> bool:
        """Take the token at an absolute position of the sequence.

        A request that is not open gives False: it ended while its job ran.
        """
        with self._lock:
            place = self._places.get(request)
            if place is None:
                return False
            if place.first_absolute is None:
                place.first_absolute = absolute
            position = absolute - place.first_absolute + place.opened_with
        return self._text.push(request, position, token)

    def take(self, request: int, position: int) -> str:
        """Return the text that the token at ``position`` released."""
        return self._text.take(request, position)

    def finish(self, request: int) -> str:
        """Return the text held back so far and forget the request."""
        self._forget(request)
        return self._text.finish(request)

    def drop(self, request: int) -> None:
        """Forget the request."""
        self._forget(request)
        self._text.drop(request)

    def _forget(self, request: int) -> None:
        with self._lock:
            self._places.pop(request, None)
