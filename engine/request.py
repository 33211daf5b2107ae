"""What a client hands in and what it gets back, as values."""

from collections.abc import Sequence

import attrs

from laneway.engine.errors import RequestError
from laneway.engine.sampling import Sampling

CLIENT_ID_CHARACTERS_MAX = 256
STOP_STRINGS_MAX = 16
STOP_CHARACTERS_MAX = 1024


def _as_tuple(stop: str | Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


@attrs.frozen(kw_only=True)
class Request:
    """A request for tokens.

    ``prompt`` is text or token ids. ``stop`` ends the answer before the first of its strings.
    ``deadline_s`` counts from the submit. ``client_id`` is echoed and never used as a key.

    Raises: TypeError or ValueError naming the field, when it is made.
    Source: R7.2.
    """

    model: str
    prompt: str | Sequence[int]
    max_tokens: int = 64
    sampling: Sampling = attrs.Factory(Sampling)
    stop: tuple[str, ...] = attrs.field(default=(), converter=_as_tuple)
    ignore_eos: bool = False
    deadline_s: float | None = None
    client_id: str | None = None

    def __attrs_post_init__(self) -> None:
        """Check types and bounds that need no model."""
        if not isinstance(self.model, str) or not self.model:
            raise ValueError("model must be the name of a served model")
        if not isinstance(self.sampling, Sampling):
            raise TypeError(f"sampling must be a Sampling, not {type(self.sampling).__name__}")
        if not isinstance(self.prompt, str):
            _check_tokens(self.prompt)
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int):
            raise TypeError(f"max_tokens must be an integer, not {self.max_tokens!r}")
        if len(self.stop) > STOP_STRINGS_MAX:
            raise ValueError(f"at most {STOP_STRINGS_MAX} stop strings, not {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= STOP_CHARACTERS_MAX:
                raise ValueError(f"a stop string has 1 to {STOP_CHARACTERS_MAX} characters")
        if self.deadline_s is not None and not 0.0 < self.deadline_s < float(1 << 31):
            raise ValueError(f"deadline_s must be a positive time, not {self.deadline_s}")
        if self.client_id is not None and len(self.client_id) > CLIENT_ID_CHARACTERS_MAX:
            raise ValueError(f"client_id has at most {CLIENT_ID_CHARACTERS_MAX} characters")


def _check_tokens(prompt: Sequence[int]) -> None:
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int):
            raise TypeError(f"a prompt is text or integers; it has a {type(token).__name__}")


@attrs.frozen(kw_only=True)
class Delta:
    """One step of an answer. ``position`` counts generated tokens from 0.

    The last delta may have no token: it then carries text that was held back for a stop string.
    """

    position: int
    token: int | None
    text: str


@attrs.frozen(kw_only=True)
class Usage:
    """Token counts of one request, as OpenAI clients know them."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Return both together."""
        return self.prompt_tokens + self.completion_tokens


@attrs.frozen(kw_only=True)
class Result:
    """A request's one ending: prompt and answer as token ids, and the answer as text.

    ``finish_reason`` is stop, length, cancelled, deadline or error. ``text`` is None where the
    model has no tokenizer.
    """

    request: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: str
    usage: Usage
    error: RequestError | None = None

    def raise_for_error(self) -> None:
        """Raise the request's error, if it has one."""
        if self.error is not None:
            raise self.error
