"""The sampler as its definition reads: sort everything, add up in float64, draw.

Written to be obviously right and independent of the product: no block bounds, no histograms, the
random number from numpy's own Philox.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from laneway.engine.sampling import Sampling

Bits = NDArray[np.uint16]


def to_numbers(bits: Bits) -> NDArray[np.float64]:
    """Widen BF16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def uniform(seed: int, position: int) -> float:
    """The request's random number, from numpy's own Philox."""
    before = [position - 1, 0, 0, 0] if position else [2**64 - 1] * 4
    generator = np.random.Philox(
        counter=np.array(before, np.uint64), key=np.array([seed, 0], np.uint64)
    )
    return int(generator.random_raw()) // 2**11 / 2.0**53


def adjusted(
    bits: Bits,
    sampling: Sampling,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    masked: Sequence[int] = (),
    bias: Mapping[int, float] | None = None,
) -> NDArray[np.float32]:
    """Return the FP32 logits of a whole row after everything the request changes, in order.

    A masked entry is -inf whatever else is asked of it. ``bias`` replaces that of ``sampling``, for
    values that no request can have.
    """
    x = (bits.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        for token, added in (dict(sampling.logit_bias) if bias is None else bias).items():
            x[token] = x[token] + np.float32(added)
        penalty = np.float32(sampling.repetition_penalty)
        if sampling.repetition_penalty != 1.0:
            for token in {*prompt, *output}:
                x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        frequency = np.float32(sampling.frequency_penalty)
        presence = np.float32(sampling.presence_penalty)
        for token, times in Counter(output).items():
            x[token] = x[token] - frequency * np.float32(times)
            x[token] = x[token] - presence
    if sampling.allowed_token_ids is not None:
        allowed = np.zeros(x.size, np.bool_)
        allowed[list(sampling.allowed_token_ids)] = True
        x[~allowed] = -np.inf
    x[list(masked)] = -np.inf
    return x


def logprobs(bits: Bits, token: int, most: int) -> list[tuple[int, float]]:
    """Return (id, log-probability) of a token, then of the most likely, from the untouched row."""
    x = to_numbers(bits)
    with np.errstate(under="ignore"):
        log_mass = x.max() + math.log(math.fsum(np.exp(x - x.max())))
    best = np.argsort(-x, kind="stable")[:most]
    return [(int(i), float(x[i] - log_mass)) for i in (token, *best)]


def kept(
    x: NDArray[np.float64], sampling: Sampling
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Sort everything and sum in order; return ids in order and the running mass.

    The first n entries of a tie of weight w have mass n * w, as groups.py defines it: adding w one
    by one rounds otherwise, which shows where top_p falls exactly on a border.
    """
    order = np.argsort(-x, kind="stable")
    if sampling.temperature < 1e-5:
        return order, np.ones(1)
    x = x[order]
    starts = np.flatnonzero(np.concatenate([[True], x[1:] != x[:-1]]))
    sizes = np.diff(np.append(starts, x.size))
    weights = np.array([math.exp((v - x[0]) / sampling.temperature) for v in x[starts]])
    before = np.concatenate([[0.0], np.cumsum(sizes * weights)[:-1]])
    rank_in_tie = np.arange(x.size) - np.repeat(starts, sizes) + 1
    mass = np.repeat(before, sizes) + rank_in_tie * np.repeat(weights, sizes)
    mass = mass[np.repeat(weights, sizes) >= sampling.min_p]
    if sampling.top_k > 0:
        mass = mass[: sampling.top_k]
    if sampling.top_p < 1.0:
        mass = mass[: np.searchsorted(mass, sampling.top_p * mass[-1], side="left") + 1]
    return order, mass


def drawn(
    order: NDArray[np.int64], mass: NDArray[np.float64], sampling: Sampling, position: int
) -> int:
    """Take the first entry whose running mass passes the random point."""
    assert sampling.seed is not None
    point = uniform(sampling.seed, position) * mass[-1]
    return int(order[np.searchsorted(mass, point, side="right")])


def reference(
    bits: Bits,
    sampling: Sampling,
    position: int,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    masked: Sequence[int] = (),
    bias: Mapping[int, float] | None = None,
) -> int:
    """Return the token that a row of logits gives at an absolute position.

    -1: the request's own parameters leave no token, a NaN or several +inf. One +inf is certain.
    """
    x = adjusted(bits, sampling, prompt=prompt, output=output, masked=masked, bias=bias)
    certain = np.flatnonzero(x == np.inf)
    if np.isnan(x).any() or certain.size > 1 or (x == -np.inf).all():
        return -1
    if certain.size == 1:
        return int(certain[0])
    return drawn(*kept(x.astype(np.float64), sampling), sampling, position)
