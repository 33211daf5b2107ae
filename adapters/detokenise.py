"""Turn tokens into text one at a time, without ever showing a broken character.

A token of a byte-level vocabulary stands for bytes, and a character may span tokens. The bytes go
through an incremental UTF-8 decoder, which gives a character when its last byte is there and
U+FFFD for bytes that can never become one; so the pieces together are exactly what decoding all
tokens at once gives, and each token costs the same however long the text is.

Vocabularies of another kind have decoders that look at their neighbours. There a short window of
tokens is decoded again, with and without the newest, and the difference is the new text.
"""

import codecs
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_CHARACTER_TOKENS_MAX = 4
"""Most tokens that one character spans: UTF-8 has four bytes at most."""


class Detokeniser(Protocol):
    """The text of one growing list of tokens."""

    def add(self, token: int) -> str:
        """Return the text that is complete with one more token."""
        ...

    def end(self) -> str:
        """Return what was incomplete."""
        ...


def detokeniser_maker(tokenizer: Tokenizer, skipped: frozenset[int]) -> Callable[[], Detokeniser]:
    """Choose how texts of a vocabulary are made; ``skipped`` tokens have no text."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is not None and decoder["type"] == "ByteLevel":
        pieces = _Pieces(tokenizer, skipped)
        return lambda: _ByteLevelDetokeniser(pieces)
    return lambda: _WindowDetokeniser(tokenizer, skipped)


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that the tokenizer marks as special."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token for token, entry in added.items() if entry.special)


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Why: such a vocabulary writes a byte that is a visible Latin-1 character as that character, and
    the n-th of the others, counted from 0, as the character 256 + n.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): byte for byte in visible}
    table.update({chr(256 + n): byte for n, byte in enumerate(hidden)})
    return table


class _Pieces(dict[int, tuple[bytes, str | None]]):
    """What each token of a byte-level vocabulary stands for, worked out once, when it is first met.

    Its bytes and, where these are whole characters, their text. At most one entry a token id that
    was asked for, and those are of the vocabulary. Shared by all texts; thread-safe, since two
    threads that work out the same token write the same.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._byte_of = _bytes_of_characters()

    def __missing__(self, token: int) -> tuple[bytes, str | None]:
        """Work out and keep what a token stands for; one that is skipped is nothing."""
        bytes_ = b"" if token in self._skipped else self._bytes_of(token)
        text: str | None = None
        with suppress(UnicodeDecodeError):  # bytes of a part of a character have no text yet
            text = bytes_.decode()
        self[token] = (bytes_, text)
        return bytes_, text

    def _bytes_of(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        try:
            return bytes([self._byte_of[character] for character in name])
        except KeyError:
            # An added token is written as it reads, not byte by byte.
            return str(name).encode()


class _ByteLevelDetokeniser:
    """Text by bytes.

    A token of whole characters is its text, unless bytes of a character before it still wait.
    """

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waits = False

    def add(self, token: int) -> str:
        """Return the characters that are complete with one more token."""
        bytes_, text = self._pieces[token]
        if text is not None and not self._waits:
            return text
        text = self._decoder.decode(bytes_)
        self._waits = bool(self._decoder.getstate()[0])
        return text

    def end(self) -> str:
        """Return U+FFFD if bytes of an incomplete character are left."""
        self._waits = False
        return self._decoder.decode(b"", True)


class _WindowDetokeniser:
    """Text by difference: decode the last released token with the ones after it."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._released: list[int] = []
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """Return the text that is complete with one more token."""
        if token in self._skipped:
            return ""
        self._waiting.append(token)
        return self._release(at_end=False)

    def end(self) -> str:
        """Return the text of tokens that wait for the rest of a character."""
        return self._release(at_end=True)

    def _release(self, *, at_end: bool) -> str:
        before = self._decode(self._released)
        text = self._decode([*self._released, *self._waiting])
        incomplete = text.endswith(_REPLACEMENT) and len(self._waiting) < _CHARACTER_TOKENS_MAX
        if incomplete and not at_end:
            return ""
        if self._waiting:
            self._released, self._waiting = self._waiting, []
        return text[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
