"""What a client may ask of the sampler.

Ranges as public LLM servers know them.
"""

import math

import attrs

GREEDY_BELOW = 1e-5
SEED_MAX = (1 << 64) - 1


@attrs.frozen(kw_only=True)
class Sampling:
    """Sampling parameters of one request.

    ``temperature`` 0..2 (below 1e-5 is greedy, ties to the lowest id); ``top_k`` 0 or -1 is off;
    ``top_p`` in (0, 1]; ``min_p`` 0..1; ``seed`` 0..2^64-1, or None: the shell draws one and the
    journal records it. The random number of a token is a function of (seed, absolute position)
    alone, so lane, batch, neighbours and restarts do not change it.

    Raises: ValueError (out of range) or TypeError (not a number), naming the parameter.
    Source: decision 6.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __attrs_post_init__(self) -> None:
        """Check every range."""
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, not {type(value).__name__}")
            if not math.isfinite(value):
                raise ValueError(f"{name} must be finite, not {value}")
            object.__setattr__(self, name, float(value))
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
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1 or 0 (off) or at least 1, not {self.top_k}")
        if self.seed is not None and not 0 <= self.seed <= SEED_MAX:
            raise ValueError(f"seed must be within 0 and 2^64-1, not {self.seed}")
