"""Order, widen and scan BF16 numbers as bits, so that no FP32 copy of a vocabulary is needed.

A BF16 number is the upper half of an FP32 number. Its 16 bits, read as a signed integer, rise with
the number for positive numbers and fall for negative ones; flipping the lower 15 bits of the
negative ones gives the *order key*: an int16 that rises with the number. The one repair: -0.0 would
get key -1 and +0.0 key 0, yet they are equal, so key -1 is never used and -0.0 has key 0.

A row is scanned in blocks of 128. Sampling needs only the largest key of each block: whatever is
kept later lies in the few blocks whose maximum is high enough. NaN and infinities are found in the
same pass, because a device row may hold finite numbers only (R14.5).

Why three extrema and not the key: integer maxima need one vector instruction per load and the key
four, so the scan takes the signed maximum (the best non-negative number), the unsigned maximum
(the most negative number, which is where -inf and negative NaN are; both in vectors.py), and the
signed minimum only in a block without non-negative numbers.
"""

import numpy as np
from numpy.typing import NDArray

from laneway.engine.jit import inner
from laneway.engine.vectors import BLOCK, STREAMS, block_extrema

ROW_OK = 0
ROW_NAN = 1
ROW_POSITIVE_INFINITY = 2
ROW_NEGATIVE_INFINITY = 3
ROW_PARAMETERS = 4

ROW_STATUS_NAMES = {
    ROW_OK: "ok",
    ROW_NAN: "nan",
    ROW_POSITIVE_INFINITY: "positive_infinity",
    ROW_NEGATIVE_INFINITY: "negative_infinity",
    ROW_PARAMETERS: "parameters",
}

_FLIP = np.int16(0x7FFF)
_INFINITY_KEY = np.int16(0x7F80)
_NEGATIVE_INFINITY_BITS = np.uint16(0xFF80)
_POSITIVE_INFINITY_BITS = np.uint16(0x7F80)
_MAGNITUDE = np.uint16(0x7FFF)


@inner
def order_key(bits: np.int16) -> np.int16:
    """Return the int16 that rises with the number; equal for -0.0 and +0.0."""
    key = np.int16(bits ^ ((bits >> 15) & _FLIP))
    return np.int16(0) if key == -1 else key


@inner
def bits_of(key: np.int16) -> np.uint16:
    """Return the BF16 bits of an order key."""
    return np.uint16(key ^ ((key >> 15) & _FLIP))


@inner
def widen(key: np.int16) -> float:
    """Return the number that has an order key, exactly.

    Why not float(): compiled, that leaves FP32 what is FP32, and what is computed with it too.
    """
    return np.float64(np.uint32(np.uint32(bits_of(key)) << np.uint32(16)).view(np.float32))


@inner
def key_below(highest: float, drop: float) -> np.int16:
    """Return an order key above which no number at least ``highest - drop`` is missed.

    Why: callers use it to leave out what cannot matter and test the rest exactly, so it goes down
    by more than every rounding error, a key or two lower than it need be.
    """
    bound = highest - drop
    bound -= 1e-6 * (1.0 + abs(bound)) + 1e-12 * (abs(highest) + drop)
    bits = np.float32(bound).view(np.int32)
    key = np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> 16
    return np.int16(key - 1 if key > -32768 else key)


@inner
def scan_blocks(row: NDArray[np.int16], block_max: NDArray[np.int16]) -> int:
    """Fill the largest order key of each block; return the first block that holds the highest.

    Returns -1 if a number is not finite. Shapes: row i16[vocab] (BF16 bits), block_max
    i16[ceil(vocab / BLOCK)].
    """
    count = row.size // (BLOCK * STREAMS)
    highest = block_extrema(row, count, block_max)
    read = count * STREAMS
    least = np.int16(0)
    for block in range(read):
        least = min(least, block_max[block])
    if least < 0:
        for block in range(read):
            if block_max[block] < 0:
                block_max[block] = _negative_best(row, block)
    unsigned = row.view(np.uint16)
    for block in range(read, block_max.size):
        best = np.int16(-32768)
        for i in range(block * BLOCK, min((block + 1) * BLOCK, row.size)):
            best = max(best, order_key(row[i]))
            highest = max(highest, unsigned[i])
        block_max[block] = best
    top = np.int16(-32768)
    for block in range(block_max.size):
        top = max(top, block_max[block])
    if top >= _INFINITY_KEY or highest >= _NEGATIVE_INFINITY_BITS:
        return -1
    return first_block(block_max, top)


@inner
def first_block(block_max: NDArray[np.int16], key: np.int16) -> int:
    """Return the first block with a maximum, or 0 if there is none.

    Shapes: block_max i16[blocks].
    """
    for block in range(block_max.size):
        if block_max[block] == key:
            return block
    return 0


@inner
def _negative_best(row: NDArray[np.int16], block: int) -> np.int16:
    """Return the largest order key of a whole block in which the sign of every number is set."""
    least = np.int16(32767)
    for j in range(BLOCK):
        least = min(least, row[block * BLOCK + j])
    return order_key(least)


@inner
def fault_of(row: NDArray[np.int16]) -> int:
    """Name what is not finite in a row: NaN before +inf before -inf.

    Shapes: row i16[vocab] (BF16 bits).
    """
    unsigned = row.view(np.uint16)
    status = ROW_OK
    for i in range(unsigned.size):
        bits = unsigned[i]
        if (bits & _MAGNITUDE) > _POSITIVE_INFINITY_BITS:
            return ROW_NAN
        if bits == _POSITIVE_INFINITY_BITS:
            status = ROW_POSITIVE_INFINITY
        elif bits == _NEGATIVE_INFINITY_BITS and status == ROW_OK:
            status = ROW_NEGATIVE_INFINITY
    return status
