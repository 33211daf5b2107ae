"""Find stop strings in a text that arrives in pieces, and hold back no more than necessary.

The match that is complete first wins; of several complete at the same character the longest wins,
so no character of a stop string is ever released. The text ends where the winning match begins.
Held back is exactly the longest end of the text that is a true prefix of a stop string. Each stop
string is followed by an automaton (Knuth, Morris, Pratt), so a character costs the same however
long the stop strings are.
"""

from collections.abc import Sequence


class StopMatcher:
    """The stop strings of one request and how far each has matched."""

    def __init__(self, stop: Sequence[str]) -> None:
        """Make a matcher; ``stop`` has passed check_stop."""
        self._strings = tuple(dict.fromkeys(stop))
        self._borders = tuple(_borders(string) for string in self._strings)
        self._matched = [0] * len(self._strings)
        self._held = ""
        self.hit = False

    def add(self, piece: str) -> str:
        """Return the text that one more piece releases; nothing once a stop string matched."""
        if self.hit or not self._strings:
            return "" if self.hit else piece
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            longest = self._step(character)
            if longest:
                self.hit = True
                self._held = ""
                return text[: end - longest]
        held = max(self._matched)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """Return what is held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> int:
        """Take one character; return the length of the longest stop string complete with it."""
        longest = 0
        for index, string in enumerate(self._strings):
            matched = self._matched[index]
            while matched and string[matched] != character:
                matched = self._borders[index][matched - 1]
            if string[matched] == character:
                matched += 1
            if matched == len(string):
                longest = max(longest, matched)
                matched = self._borders[index][matched - 1]
            self._matched[index] = matched
        return longest


def check_stop(stop: Sequence[str]) -> None:
    """Refuse stop strings that no text can be searched for.

    Raises: ValueError for an empty stop string, which would match everywhere, or a lone surrogate.
    """
    for string in stop:
        if not string:
            raise ValueError("a stop string is empty: leave it out, or give at least one character")
        if any("\ud800" <= character <= "\udfff" for character in string):
            raise ValueError(f"stop string {string!r} has a lone surrogate, which is no character")


def _borders(string: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for index in range(1, len(string)):
        while length and string[index] != string[length]:
            length = borders[length - 1]
        if string[index] == string[length]:
            length += 1
        borders[index] = length
    return borders
