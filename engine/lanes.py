"""Pack the tokens of a job's rows into the input arrays of the device.

A job names rows; row i carries a list of tokens that run at consecutive positions from a start.
The device reads three arrays in arena memory: tokens and positions, one line of equal width for
each row, and the number of tokens of each row. Whatever a row does not fill is zero, and a row that
the job does not use has length zero, which is how a LENGTH_ZERO calbin knows it to be inactive.

Every number is checked before the first write, so a refused job leaves the arrays as they were, and
no index can leave them. The GIL is released while the kernel runs.
"""

import numpy as np
from numpy.typing import NDArray

from laneway.engine.jit import entry

PACK_OK = 0
PACK_ROWS = 1
PACK_COUNT = 2
PACK_SOURCE = 3
PACK_POSITION = 4
PACK_TOKEN = 5

PACK_STATUS_NAMES = {
    PACK_OK: "ok",
    PACK_ROWS: "more rows than the batch has, or row arrays of different sizes",
    PACK_COUNT: "a row with a negative number of tokens or more than fit",
    PACK_SOURCE: "a row that points outside the flattened tokens",
    PACK_POSITION: "a position below zero or not below the limit",
    PACK_TOKEN: "a token id outside the vocabulary",
}

_INT32_MAX = 2**31 - 1
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


def pack_lanes(
    source: NDArray[np.int32],
    offsets: NDArray[np.int64],
    counts: NDArray[np.int32],
    starts: NDArray[np.int32],
    *,
    vocabulary: int,
    positions_max: int,
    tokens: NDArray[np.int32],
    positions: NDArray[np.int32],
    lengths: NDArray[np.int32],
) -> int:
    """Fill the device's arrays from rows of tokens; return a PACK_* status.

    Row i takes ``source[offsets[i] : offsets[i] + counts[i]]`` at positions from ``starts[i]`` on;
    a count of zero, like a row beyond the given ones, makes an inactive row.
    Shapes: source i32[n], offsets i64[r], counts, starts i32[r]; tokens, positions i32[B, width],
    lengths i32[B], all contiguous.
    Raises: ValueError for arrays of another type or shape.
    """
    batch, width = tokens.shape if tokens.ndim == 2 else (-1, -1)
    _check("source", source, _INT32, (source.size,))
    _check("offsets", offsets, _INT64, (offsets.size,))
    _check("counts", counts, _INT32, (counts.size,))
    _check("starts", starts, _INT32, (starts.size,))
    _check("tokens", tokens, _INT32, (batch, width))
    _check("positions", positions, _INT32, (batch, width))
    _check("lengths", lengths, _INT32, (batch,))
    return _pack(
        source,
        offsets,
        counts,
        starts,
        vocabulary,
        min(positions_max, _INT32_MAX),
        tokens,
        positions,
        lengths,
    )


def warm_up_lanes() -> None:
    """Compile the kernel, or load it from the disk cache, before the first job."""
    line = np.zeros((1, 1), np.int32)
    row = np.zeros(1, np.int32)
    pack_lanes(
        row,
        np.zeros(1, np.int64),
        row,
        row,
        vocabulary=1,
        positions_max=1,
        tokens=line,
        positions=line.copy(),
        lengths=row.copy(),
    )


def _check(
    name: str,
    array: NDArray[np.int32] | NDArray[np.int64],
    dtype: np.dtype[np.generic],
    shape: tuple[int, ...],
) -> None:
    """Refuse an array of another type or shape. Raises: ValueError.

    Why a dtype and no type: to compare with a type costs several times as much.
    """
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} must be contiguous {dtype}{list(shape)}, not {array.dtype}{list(array.shape)}"
        )


@entry
def _pack(
    source: NDArray[np.int32],
    offsets: NDArray[np.int64],
    counts: NDArray[np.int32],
    starts: NDArray[np.int32],
    vocabulary: int,
    positions_max: int,
    tokens: NDArray[np.int32],
    positions: NDArray[np.int32],
    lengths: NDArray[np.int32],
) -> int:
    """Check everything, then write everything."""
    batch, width = tokens.shape
    rows = counts.size
    if rows > batch or offsets.size != rows or starts.size != rows:
        return PACK_ROWS
    for row in range(rows):
        count = np.int64(counts[row])
        start = np.int64(starts[row])
        offset = offsets[row]
        if count < 0 or count > width:
            return PACK_COUNT
        if count == 0:
            continue
        if offset < 0 or offset > source.size - count:
            return PACK_SOURCE
        if start < 0 or start > positions_max - count:
            return PACK_POSITION
        for i in range(offset, offset + count):
            if source[i] < 0 or source[i] >= vocabulary:
                return PACK_TOKEN
    for row in range(batch):
        count = np.int64(counts[row]) if row < rows else np.int64(0)
        lengths[row] = count
        for column in range(count):
            tokens[row, column] = source[offsets[row] + column]
            positions[row, column] = starts[row] + column
        for column in range(count, width):
            tokens[row, column] = 0
            positions[row, column] = 0
    return PACK_OK
