"""What a client hands in and what it gets back, as values."""

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from laneway.engine.checking import INT32_MAX, NAME_CHARACTERS_MAX, check_int, check_text
from laneway.engine.errors import RequestError
from laneway.engine.sampling import LOGPROBS_MAX, Sampling, check_token_ids

CLIENT_ID_CHARACTERS_MAX = 256
STOP_STRINGS_MAX = 16
STOP_CHARACTERS_MAX = 1024
STOP_TOKEN_IDS_MAX = 128
PRIORITY_MAX = 100
ON_FAULT = ("continue", "fail")


def _as_tuple(stop: str | Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _as_ids(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(ids)


@attrs.frozen(kw_only=True)
class Request:
    """A request for tokens.

    ``prompt`` is text or token ids. ``stop`` ends the answer before the first of its strings, a
    token of ``stop_token_ids`` before itself; neither they nor the model's end tokens do so before
    ``min_tokens`` tokens. ``deadline_s`` counts from the submit. ``client_id`` is echoed and never
    used as a key. ``logprobs``, 0 to 20, asks for each token's log-probability and those of as many
    of the most likely. Among those who wait a lower ``priority`` goes first, and ``tenant`` names
    whose share of the device it takes. ``on_fault``: after a fault of the device the answer goes on
    from its tokens (``continue``), or ends with an error (``fail``).

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
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_as_ids)
    min_tokens: int = 0
    logprobs: int | None = None
    priority: int = 0
    tenant: str = ""
    on_fault: str = "continue"

    def __attrs_post_init__(self) -> None:
        """Check types and bounds that need no model."""
        check_text("model", self.model, most=NAME_CHARACTERS_MAX)
        if not self.model:
            raise ValueError("model must be the name of a served model")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        if not isinstance(self.sampling, Sampling):
            raise TypeError(f"sampling must be a Sampling, not {type(self.sampling).__name__}")
        if not isinstance(self.prompt, str):
            _check_tokens(self.prompt)
        check_int("max_tokens", self.max_tokens, least=-INT32_MAX, most=INT32_MAX)
        if len(self.stop) > STOP_STRINGS_MAX:
            raise ValueError(f"at most {STOP_STRINGS_MAX} stop strings, not {len(self.stop)}")
        for text in self.stop:
            check_text("a stop string", text, most=STOP_CHARACTERS_MAX)
            if not text:
                raise ValueError(f"a stop string has 1 to {STOP_CHARACTERS_MAX} characters")
        if self.deadline_s is not None and not 0.0 < self.deadline_s < float(1 << 31):
            raise ValueError(f"deadline_s must be a positive time, not {self.deadline_s}")
        if self.client_id is not None:
            check_text("client_id", self.client_id, most=CLIENT_ID_CHARACTERS_MAX)
        if len(self.stop_token_ids) > STOP_TOKEN_IDS_MAX:
            raise ValueError(
                f"at most {STOP_TOKEN_IDS_MAX} stop_token_ids, not {len(self.stop_token_ids)}"
            )
        check_token_ids("stop_token_ids", self.stop_token_ids)
        check_int("min_tokens", self.min_tokens, least=0, most=max(self.max_tokens, 0))
        check_int("priority", self.priority, least=-PRIORITY_MAX, most=PRIORITY_MAX)
        check_text("tenant", self.tenant, most=NAME_CHARACTERS_MAX)
        if self.on_fault not in ON_FAULT:
            raise ValueError(f"on_fault must be continue or fail, not {self.on_fault!r}")
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, least=0, most=LOGPROBS_MAX)


def _check_tokens(prompt: Any) -> None:
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
        raise TypeError(f"a prompt is text or token ids, not {type(prompt).__name__}")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int):
            raise TypeError(f"a prompt is text or integers; it has a {type(token).__name__}")
        if not -INT32_MAX <= token <= INT32_MAX:
            raise ValueError(f"a prompt has token ids up to {INT32_MAX}, not {token}")


@attrs.frozen(kw_only=True)
class Delta:
    """One step of an answer. ``position`` counts generated tokens from 0.

    The last delta may have no token: it then carries text that was held back for a stop string.
    ``logprobs``, if asked for, are (token, log-probability) before any adjustment: the token's own,
    then the most likely in order.
    """

    position: int
    token: int | None
    text: str
    logprobs: tuple[tuple[int, float], ...] = ()


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
    model has no tokenizer. ``logprobs`` has an entry for each token, as in Delta, if they were
    asked for. ``suspect_tokens_from``: a canary found the device's numbers in doubt, and the tokens
    from this position on were made since the last good one; None: nothing was found.
    ``continued_tokens_from``: after a fault or a restart the answer went on from this position, on
    a device of which no record says that this gives the same numbers; None where it does, or where
    nothing happened.
    """

    request: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: str
    usage: Usage
    error: RequestError | None = None
    logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    suspect_tokens_from: int | None = None
    continued_tokens_from: int | None = None

    def raise_for_error(self) -> None:
        """Raise the request's error, if it has one."""
        if self.error is not None:
            raise self.error
