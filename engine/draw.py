"""Draw one uniform number from a key instead of from a stream.

The generator is Philox4x64-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
1, 2, 3", 2011): ten rounds of multiply, swap and xor turn a 256-bit counter and a 128-bit key into
256 random bits. Key = (request seed, 0), counter = (absolute position, 0, 0, 0); the upper 53 bits
of the first output word give the uniform number. Nothing is remembered between draws, so a token
depends only on its request's seed and its position: not on the lane, the batch, the neighbours, a
requeue or a restart.
"""

import numpy as np

from laneway.engine.jit import inner

_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2E7470EE14C6C93)
_MULTIPLIER_1 = np.uint64(0xCA5A826395121157)
_KEY_STEP_0 = np.uint64(0x9E3779B97F4A7C15)
_KEY_STEP_1 = np.uint64(0xBB67AE8584CAA73B)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_SURPLUS = np.uint64(11)
_UNIT = 2.0**-53


@inner
def multiply_high(a: np.uint64, b: np.uint64) -> np.uint64:
    """Return the upper 64 bits of a 128-bit product."""
    a_low, a_high = a & _LOW_HALF, a >> _HALF
    b_low, b_high = b & _LOW_HALF, b >> _HALF
    low = a_low * b_low
    middle = a_high * b_low + (low >> _HALF)
    cross = a_low * b_high + (middle & _LOW_HALF)
    return a_high * b_high + (middle >> _HALF) + (cross >> _HALF)


@inner
def philox(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Turn a counter of four words and a key of two into four random words."""
    for _ in range(_ROUNDS):
        high_0 = multiply_high(_MULTIPLIER_0, c0)
        low_0 = _MULTIPLIER_0 * c0
        high_1 = multiply_high(_MULTIPLIER_1, c2)
        low_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 += _KEY_STEP_0
        k1 += _KEY_STEP_1
    return c0, c1, c2, c3


@inner
def uniform(seed: np.uint64, position: np.uint64) -> float:
    """Return the uniform number in [0, 1) of one request at one absolute position."""
    zero = np.uint64(0)
    word = philox(position, zero, zero, zero, seed, zero)[0]
    return float(word >> _SURPLUS) * _UNIT
