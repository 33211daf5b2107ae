"""Rows of logits and sampling parameters drawn at random: model-like and adversarial ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.slow_sampler import Bits

from laneway.engine.sampling import Sampling

QWEN3_VOCABULARY = 151936
FINITE_MAX = 0x7F7F
TEMPERATURES = [0.0, 9e-6, 1e-5, 1e-3, 0.1, 0.5, 0.7, 0.8, 1.0, 1.3, 2.0]
TOP_KS = [-1, 0, 1, 2, 3, 20, 40, 100, 600, 5000, 2**31 - 1]
TOP_PS = [1.0, 1.0, 0.95, 0.9, 0.5, 0.1, 1e-12, 0.9999999]
MIN_PS = [0.0, 0.0, 0.0, 0.05, 0.3, 1.0, 1e-7, 1e-300]


def to_bits(values: NDArray[np.float64]) -> Bits:
    """Round to BF16, nearest even."""
    u = values.astype(np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def random_sampling(rng: np.random.Generator) -> tuple[Sampling, int]:
    sampling = Sampling(
        temperature=float(rng.choice(TEMPERATURES)),
        top_k=int(rng.choice(TOP_KS)),
        top_p=float(rng.choice(TOP_PS)),
        min_p=float(rng.choice(MIN_PS)),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
    )
    return sampling, int(rng.integers(0, 50_000))


def peaked(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    x = rng.normal(-1.0, 2.3, size)
    head = rng.permutation(size)[: min(400, size // 2)]
    x[head] = np.maximum(x[head], 22.0 - 1.9 * np.log(np.arange(1, head.size + 1)))
    return x


def random_finite(rng: np.random.Generator, size: int) -> Bits:
    magnitude = rng.integers(0, FINITE_MAX + 1, size)
    return (magnitude | (rng.integers(0, 2, size) << 15)).astype(np.uint16)


def random_row(rng: np.random.Generator, size: int) -> Bits:
    """One row of a kind drawn at random: model-like ones and ones that try to break things."""
    few = rng.normal(0.0, 3.0, 4)
    kinds: list[Callable[[], NDArray[Any]]] = [
        lambda: to_bits(peaked(rng, size)),
        lambda: to_bits(peaked(rng, size) - 40.0),
        lambda: to_bits(rng.normal(0.0, 1.0, size)),
        lambda: to_bits(rng.normal(0.0, 1e-3, size)),
        lambda: to_bits(rng.normal(-30.0, 4.0, size)),
        lambda: to_bits(rng.normal(0.0, 1.0, size) * 10.0 ** rng.integers(-37, 37)),
        lambda: to_bits(np.round(rng.normal(0.0, 2.0, size))),
        lambda: to_bits(rng.choice(few, size)),
        lambda: to_bits(np.full(size, few[0])),
        lambda: np.full(size, rng.choice([0x0000, 0x8000, 1, 0x8001, FINITE_MAX, 0xFF7F]), "u2"),
        lambda: rng.choice(np.array([0x0000, 0x8000], np.uint16), size),
        lambda: rng.choice(np.array([0, 0x8000, 1, 0x8001, 2, 0x8002], np.uint16), size),
        lambda: to_bits(np.linspace(-20.0, 20.0, size)),
        lambda: to_bits(np.linspace(20.0, -20.0, size)),
        lambda: random_finite(rng, size),
    ]
    return np.asarray(kinds[rng.integers(len(kinds))](), np.uint16)
