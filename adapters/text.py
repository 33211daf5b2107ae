"""The text side of an artifact: prompts to tokens, generated tokens to text, stop strings.

Text is kept by position. The engine thread pushes a token, and takes the text of its position, when
its step is durable. Where there are stop strings the wait thread has pushed it before, when it was
sampled, because the engine must know at once whether one is complete. A job that was fenced after
its tokens were pushed runs again, so a position may be pushed again: with the same token, which
changes nothing, or, if the fenced run was corrupt, with another one, which replaces it and what
followed, as long as it was not taken. No position may be left out.

Source: decisions 12 and 14.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from os import PathLike, fspath

from tokenizers import Tokenizer

from laneway.adapters.detokenise import Detokeniser, detokeniser_maker, special_tokens
from laneway.adapters.manifest import BYTES_MAX, TOKENIZER_NAME, Manifest
from laneway.adapters.rooted import Root
from laneway.adapters.stopping import StopMatcher, check_stop
from laneway.engine.errors import InternalError, ModelError
from laneway.engine.ports import TextPort


def open_text(root: Root, manifest: Manifest) -> TextPort:
    """Return the text side of a model folder: with its tokenizer, or token ids only.

    Raises: ModelError if the tokenizer's file may not be opened or holds no tokenizer.
    """
    if not root.has(TOKENIZER_NAME):
        return TokenIdsText()
    raw = root.read(TOKENIZER_NAME, bytes_max=BYTES_MAX[TOKENIZER_NAME])
    try:
        return TokenizerText(raw, eos=manifest.eos_token_ids)
    except ValueError as error:
        raise ModelError(f"{root.folder}: {error}") from error


class TokenizerText:
    """TextPort over a ``tokenizer.json``; thread-safe."""

    def __init__(self, source: bytes | str | PathLike[str], *, eos: Iterable[int] = ()) -> None:
        """Read the tokenizer from its content or its path; tokens of ``eos`` have no text.

        Raises: ValueError if it is no tokenizer.
        """
        self._tokenizer = _read(source)
        skipped = special_tokens(self._tokenizer) | frozenset(eos)
        self._skipped = skipped
        self._detokeniser = detokeniser_maker(self._tokenizer, skipped)
        self._texts: dict[int, _Text] = {}
        self._lock = threading.Lock()

    @property
    def has_text(self) -> bool:
        """True: tokens have text here."""
        return True

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a prompt.

        Raises: ValueError for text with a lone surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the prompt has a lone surrogate at character {error.start}, which is no character"
            ) from error
        return tuple(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of a whole list of tokens."""
        kept = [token for token in tokens if token not in self._skipped]
        return str(self._tokenizer.decode(kept, skip_special_tokens=True))

    def open(
        self,
        request: int,
        *,
        stop: tuple[str, ...],
        tokens: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """Begin a request's text, or rebuild it from the tokens it already has.

        The first push after this is of the token that follows ``tokens``, which are generated ones.
        Raises: ValueError for a stop string that cannot be searched for.
        """
        check_stop(stop)
        text = _Text(self._detokeniser, stop, tokens, searched_from=max(min_tokens - 1, 0))
        with self._lock:
            self._texts[request] = text

    def push(self, request: int, position: int, token: int) -> bool:
        """Take one generated token in order; return True when a stop string is now complete.

        A request that is not open gives False: it was cancelled while its job ran.
        Raises: InternalError if a position is left out, or changes its token after it was taken.
        """
        with self._lock:
            text = self._texts.get(request)
            if text is None:
                return False
            return text.push(request, position, token)

    def take(self, request: int, position: int, token: int | None = None) -> str:
        """Return the text that the token at ``position`` released; again if asked again.

        A ``token`` that is given is pushed first.
        Raises: InternalError for a request that is not open or a position not pushed.
        """
        with self._lock:
            text = self._texts.get(request)
            if text is None:
                raise InternalError(f"request/{request}: its text is not open")
            if token is not None:
                text.push(request, position, token)
            return text.take(request, position)

    def finish(self, request: int, *, tokens: int | None = None) -> str:
        """Return the text held back after the first ``tokens`` tokens and forget the request.

        None: after all that were pushed. Nothing is held back once a stop string matched; an
        incomplete character becomes U+FFFD.
        Raises: InternalError for a request that is not open.
        """
        with self._lock:
            text = self._texts.pop(request, None)
        if text is None:
            raise InternalError(f"request/{request}: its text is not open")
        return text.finish(tokens)

    def drop(self, request: int) -> None:
        """Forget the request, if it is open."""
        with self._lock:
            self._texts.pop(request, None)


class TokenIdsText:
    """TextPort of a model without a tokenizer: token ids only."""

    @property
    def has_text(self) -> bool:
        """False: tokens are ids only here."""
        return False

    def encode(self, text: str) -> tuple[int, ...]:
        """Refuse. Raises: ValueError always."""
        raise ValueError("this model has no tokenizer: give the prompt as token ids")

    def open(
        self,
        request: int,
        *,
        stop: tuple[str, ...],
        tokens: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """Begin a request. Raises: ValueError for stop strings."""
        if stop:
            raise ValueError("this model has no tokenizer: it cannot look for stop strings")

    def push(self, request: int, position: int, token: int) -> bool:
        """Return False: there is no text to stop at."""
        return False

    def take(self, request: int, position: int, token: int | None = None) -> str:
        """Return no text."""
        return ""

    def finish(self, request: int, *, tokens: int | None = None) -> str:
        """Return no text."""
        return ""

    def drop(self, request: int) -> None:
        """Do nothing: nothing is remembered."""


class _Text:
    """The text of one request by position; entry i belongs to the i-th generated token.

    Text released before token ``searched_from`` is not searched for stop strings. Where there are
    none, text is made when it is taken: the device waits for whoever pushes, not for who takes.
    """

    def __init__(
        self,
        detokeniser: Callable[[], Detokeniser],
        stop: Sequence[str],
        tokens: Iterable[int],
        *,
        searched_from: int = 0,
    ) -> None:
        self._new_detokeniser = detokeniser
        self._stop = stop
        self._searched_from = searched_from
        self._first_position: int | None = None
        self._taken = 0
        self._rebuild(tokens)

    def push(self, request: int, position: int, token: int) -> bool:
        """Set the token at a position; tell whether a stop string is complete with it."""
        if self._first_position is None:
            self._first_position = position - len(self._tokens)
        if position == self._first_position + len(self._tokens):
            self._append(token)
            return self._hit_index is not None
        index = position - self._first_position
        if not 0 <= index < len(self._tokens):
            expected = self._first_position + len(self._tokens)
            raise InternalError(
                f"request/{request}: position {position} pushed, {expected} is the next"
            )
        if self._tokens[index] != token:
            if index < self._taken:
                raise InternalError(
                    f"request/{request}: position {position} was delivered as token"
                    f" {self._tokens[index]} and is pushed again as {token}"
                )
            self._rebuild(self._tokens[:index])
            self._append(token)
        return self._hit_index is not None and index >= self._hit_index

    def take(self, request: int, position: int) -> str:
        """Return the text released at a position; before any push, counted from 0."""
        index = position - (self._first_position or 0)
        self._release()
        if not 0 <= index < len(self._released):
            raise InternalError(f"request/{request}: position {position} was not pushed")
        self._taken = max(self._taken, index + 1)
        return self._released[index]

    def finish(self, tokens: int | None) -> str:
        """Return the rest of the text after so many tokens; None is all."""
        if tokens is not None and tokens < len(self._tokens):
            self._rebuild(self._tokens[:tokens])
        self._release()
        return self._matcher.add(self._detokeniser.end()) + self._matcher.end()

    def _rebuild(self, tokens: Iterable[int]) -> None:
        self._detokeniser = self._new_detokeniser()
        self._matcher = StopMatcher(self._stop)
        self._tokens: list[int] = []
        self._released: list[str] = []
        self._hit_index: int | None = None
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        self._tokens.append(token)
        if self._stop:
            self._release()

    def _release(self) -> None:
        """Make the text of every token that has none yet."""
        for index in range(len(self._released), len(self._tokens)):
            piece = self._detokeniser.add(self._tokens[index])
            if self._stop and index >= self._searched_from:
                piece = self._matcher.add(piece)
                if self._matcher.hit and self._hit_index is None:
                    self._hit_index = index
            self._released.append(piece)


def _read(source: bytes | str | PathLike[str]) -> Tokenizer:
    """Read a tokenizer. Raises: ValueError if it is none."""
    name = TOKENIZER_NAME if isinstance(source, bytes) else fspath(source)
    try:
        if isinstance(source, bytes):
            return Tokenizer.from_buffer(source)
        return Tokenizer.from_file(name)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{name}: no tokenizer: {error}") from error
