"""What a client may ask of the sampler.

Ranges as public LLM servers know them.
"""

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import attrs

GREEDY_BELOW = 1e-5
SEED_MAX = (1 << 64) - 1
TOP_K_MAX = (1 << 31) - 1
LOGPROBS_MAX = 20
LOGIT_BIAS_MAX = 1024
ALLOWED_TOKEN_IDS_MAX = 1024
BIAS_BOUND = 100.0
PENALTY_BOUND = 2.0


def check_token_ids(name: str, ids: Iterable[Any]) -> None:
    """Refuse what is no token id of any model. Raises: TypeError or ValueError naming the field."""
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise TypeError(f"{name} holds token ids, not a {type(token).__name__}")
        if not 0 <= token < 1 << 31:
            raise ValueError(f"{name} holds token ids from 0, not {token}")


def _as_bias(
    bias: Mapping[int, float] | Iterable[tuple[int, float]],
) -> tuple[tuple[int, float], ...]:
    pairs = bias.items() if isinstance(bias, Mapping) else bias
    checked = tuple((token, _as_number("logit_bias", value)) for token, value in pairs)
    check_token_ids("logit_bias", (token for token, _ in checked))
    return tuple(sorted(checked))


def _as_ids(ids: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(ids)


def _as_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {value}")
    return number


@attrs.frozen(kw_only=True)
class Sampling:
    """Sampling parameters of one request.

    ``temperature`` 0..2 (below 1e-5 is greedy, ties to the lowest id); ``top_k`` 0 or -1 is off;
    ``top_p`` in (0, 1]; ``min_p`` 0..1; ``seed`` 0..2^64-1, or None: the shell draws one and the
    journal records it. The random number of a token is a function of (seed, absolute position)
    alone, so lane, batch, neighbours and restarts do not change it.

    ``repetition_penalty`` above 0 (1 is off) divides the positive and multiplies the other logits
    of ids in prompt or output, once each; ``frequency_penalty`` and ``presence_penalty`` -2..2 (0
    is off) are taken off for ids in the output, the first as often as the id is there.
    ``logit_bias`` maps at most 1024 ids to -100..100; ``allowed_token_ids``, at most 1024, are the
    only ones that may be drawn. adjusting.py has order and arithmetic.

    Raises: ValueError (out of range) or TypeError (not a number), naming the parameter.
    Source: decision 6.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = attrs.field(default=(), converter=_as_bias)
    allowed_token_ids: tuple[int, ...] | None = attrs.field(default=None, converter=_as_ids)

    def __attrs_post_init__(self) -> None:
        """Check every range."""
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            object.__setattr__(self, name, _as_number(name, getattr(self, name)))
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
        if not 0.0 <= self.temperature <= 2.0:
            raise ValueError(f"temperature must be within 0 and 2, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be within 0 and 1, not {self.min_p}")
        if not -1 <= self.top_k <= TOP_K_MAX:
            raise ValueError(f"top_k must be -1 or 0 (off) or 1 to 2^31-1, not {self.top_k}")
        if self.seed is not None and not 0 <= self.seed <= SEED_MAX:
            raise ValueError(f"seed must be within 0 and 2^64-1, not {self.seed}")
        self._check_adjustments()

    def _check_adjustments(self) -> None:
        if not self.repetition_penalty > 0.0:
            raise ValueError(f"repetition_penalty must be above 0, not {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= PENALTY_BOUND:
                raise ValueError(f"{name} must be within -2 and 2, not {getattr(self, name)}")
        if len(self.logit_bias) > LOGIT_BIAS_MAX:
            raise ValueError(f"logit_bias has at most {LOGIT_BIAS_MAX}, not {len(self.logit_bias)}")
        ids = [token for token, _ in self.logit_bias]
        if len(set(ids)) != len(ids):
            raise ValueError("logit_bias names a token twice")
        for token, bias in self.logit_bias:
            if not abs(bias) <= BIAS_BOUND:
                raise ValueError(
                    f"logit_bias of token {token} must be within -100 and 100, not {bias}"
                )
        if self.allowed_token_ids is not None:
            if not 0 < len(self.allowed_token_ids) <= ALLOWED_TOKEN_IDS_MAX:
                raise ValueError(
                    f"allowed_token_ids names 1 to {ALLOWED_TOKEN_IDS_MAX} tokens,"
                    f" not {len(self.allowed_token_ids)}"
                )
            check_token_ids("allowed_token_ids", self.allowed_token_ids)

    @cached_property
    def counts_prompt(self) -> bool:
        """Return whether the tokens of the prompt change what is drawn."""
        return self.repetition_penalty != 1.0

    @cached_property
    def counts_output(self) -> bool:
        """Return whether the tokens generated so far change what is drawn."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
