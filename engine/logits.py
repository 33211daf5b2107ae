"""Turn BF16 logits rows into tokens, on the host, straight from the bits the device wrote.

Theory of operation. Each row goes through the same stages, on int16 order keys (bf16.py) until only
what can be drawn is left, then in float64 (groups.py says exactly what is computed):

    scan -> finite? -> parameters in range?
         -> allowed ids, masked ids, biases, penalties (adjusting.py), if any
         -> greedy: highest, lowest id
         -> temperature -> min_p -> top_k -> top_p -> draw

Of the ways to find what can be drawn (choosing.py, merging.py) the cheapest that is exact is taken,
and all give the same token. The random number is a function of (request seed, position of the
sampled token) alone (draw.py), so a token depends on its own row and its own parameters only: not
on batch, lane, order or thread. Log-probabilities, if asked for, are those of the row before all
this (logprobs.py).

A number that is not finite is a device fault and never a token (R14.5): the row gets a status and
NO_TOKEN. A row whose request's own parameters leave no token, or a NaN, or more than one +inf, gets
ROW_PARAMETERS (G17); a single +inf is drawn with certainty. Kernels take arrays and scalars; the
GIL is released while they run.
"""

import numpy as np
from numpy.typing import NDArray

from laneway.engine.adjusting import (
    ALLOWED,
    Asked,
    Touched,
    clear,
    hide,
    touch,
    value_touched,
)
from laneway.engine.bf16 import (
    BLOCK,
    ROW_OK,
    ROW_PARAMETERS,
    fault_of,
    order_key,
    scan_blocks,
    widen,
)
from laneway.engine.choosing import choose
from laneway.engine.draw import uniform
from laneway.engine.inputs import NO_TOKEN
from laneway.engine.jit import entry, inner
from laneway.engine.logprobs import Logprobs, allocate_logprobs, tell_logprobs
from laneway.engine.merging import choose_greedy, choose_merged
from laneway.engine.sampling import GREEDY_BELOW, Sampling
from laneway.engine.sampling_arrays import (
    WANT_NOTHING,
    WANT_SCAN,
    SamplerScratch,
    SamplingArrays,
)


def sample_rows(
    logits: NDArray[np.uint16],
    sampling: SamplingArrays,
    scratch: SamplerScratch,
    tokens: NDArray[np.int32],
    status: NDArray[np.int8],
    logprobs: Logprobs | None = None,
) -> None:
    """Fill token and status of every row as its ``wanted`` entry asks.

    A row whose status is not ROW_OK, or of which no token is wanted, gets NO_TOKEN and no
    log-probabilities.
    Shapes: logits u16[rows, vocabulary] (BF16 bits, only read), tokens i32[rows], status i8[rows].
    Raises: ValueError if an array does not fit, or log-probabilities are asked for without room.
    Source: R2.6, R14.5, serving rules of sampling (order, ranges, ties).
    """
    rows = _check_logits(logits, scratch.vocabulary)
    _check_rows("tokens", tokens, rows, np.int32)
    _check_rows("status", status, rows, np.int8)
    if sampling.wanted.size != rows:
        raise ValueError(f"sampling has {sampling.wanted.size} rows, logits have {rows}")
    if logprobs is None:
        if (sampling.logprobs >= 0).any():
            raise ValueError("a row asks for log-probabilities: give them room")
    elif len(logprobs.lengths) != rows:
        raise ValueError(f"logprobs have {len(logprobs.lengths)} rows, logits have {rows}")
    _sample(
        logits.view(np.int16),
        sampling.wanted,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        sampling.position,
        sampling.asked(),
        scratch.block_max,
        scratch.candidates,
        scratch.counts,
        scratch.values,
        scratch.sizes,
        scratch.weights,
        scratch.lanes,
        scratch.touched,
        tokens,
        status,
    )
    if logprobs is not None:
        tell_logprobs(
            logits.view(np.int16),
            sampling.logprobs,
            tokens,
            scratch.block_max,
            scratch.wide_lanes,
            logprobs,
        )


def argmax_rows(
    logits: NDArray[np.uint16],
    scratch: SamplerScratch,
    tokens: NDArray[np.int32],
    status: NDArray[np.int8],
) -> None:
    """Fill the highest entry of every row, ties to the lowest id, and the row's status.

    Shapes: as for sample_rows. Raises: ValueError if an array does not fit.
    """
    rows = _check_logits(logits, scratch.vocabulary)
    _check_rows("tokens", tokens, rows, np.int32)
    _check_rows("status", status, rows, np.int8)
    _argmax(logits.view(np.int16), scratch.block_max, tokens, status)


def numeric_scan(
    logits: NDArray[np.uint16], scratch: SamplerScratch, status: NDArray[np.int8]
) -> None:
    """Fill the status of every row without sampling (golden, warm-up and forced rows).

    Shapes: logits u16[rows, vocabulary], status i8[rows].
    Raises: ValueError if an array does not fit.
    """
    rows = _check_logits(logits, scratch.vocabulary)
    _check_rows("status", status, rows, np.int8)
    _numeric_scan(logits.view(np.int16), scratch.block_max, status)


def warm_up(vocabulary: int) -> None:
    """Compile every kernel of this file, or load it from the disk cache, before the first job."""
    logits = np.zeros((1, vocabulary), np.uint16)
    sampling = SamplingArrays.allocate(1)
    scratch = SamplerScratch.allocate(vocabulary)
    tokens, status = np.zeros(1, np.int32), np.zeros(1, np.int8)
    sampling.want_token(0, Sampling(temperature=1.0, seed=0), position=0, logprobs=0)
    sample_rows(logits, sampling, scratch, tokens, status, allocate_logprobs(1))
    argmax_rows(logits, scratch, tokens, status)
    numeric_scan(logits, scratch, status)


def _check_logits(logits: NDArray[np.uint16], vocabulary: int) -> int:
    """Return the number of rows. Raises: ValueError if the array is not BF16 rows of this size."""
    if logits.dtype != np.uint16 or logits.ndim != 2 or not logits.flags.c_contiguous:
        raise ValueError("logits must be contiguous uint16[rows, vocabulary]")
    if logits.shape[1] != vocabulary:
        raise ValueError(f"logits have {logits.shape[1]} entries a row, scratch has {vocabulary}")
    return len(logits)


def _check_rows(
    name: str, array: NDArray[np.int32] | NDArray[np.int8], rows: int, dtype: type[np.generic]
) -> None:
    """Refuse an output array that is not one entry a row. Raises: ValueError."""
    if array.dtype != dtype or array.shape != (rows,) or not array.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous {np.dtype(dtype)}[{rows}]")


@entry
def _sample(
    logits: NDArray[np.int16],
    wanted: NDArray[np.int8],
    temperature: NDArray[np.float64],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    seed: NDArray[np.uint64],
    position: NDArray[np.int64],
    asked: Asked,
    block_max: NDArray[np.int16],
    candidates: NDArray[np.uint64],
    counts: NDArray[np.int32],
    values: NDArray[np.float64],
    sizes: NDArray[np.int64],
    weights: NDArray[np.float64],
    lanes: NDArray[np.float32],
    touched: Touched,
    tokens: NDArray[np.int32],
    status: NDArray[np.int8],
) -> None:
    """Do the stages of the module docstring for every row."""
    for r in range(logits.shape[0]):
        tokens[r] = NO_TOKEN
        status[r] = ROW_OK
        if wanted[r] == WANT_NOTHING:
            continue
        row = logits[r]
        top_block = scan_blocks(row, block_max)
        if top_block < 0:
            status[r] = fault_of(row)
            continue
        if wanted[r] == WANT_SCAN:
            continue
        if not _in_range(temperature[r], top_k[r], top_p[r], min_p[r], position[r]):
            status[r] = ROW_PARAMETERS
            continue
        u = uniform(seed[r], np.uint64(position[r]))
        if asked.spans[r, :, 1].any():
            tokens[r] = _adjust_and_choose(
                row,
                temperature[r],
                top_k[r],
                top_p[r],
                min_p[r],
                u,
                top_block,
                r,
                asked,
                touched,
                block_max,
                candidates,
                counts,
                values,
                sizes,
                weights,
                lanes,
            )
            if tokens[r] == NO_TOKEN:
                status[r] = ROW_PARAMETERS
        elif temperature[r] < GREEDY_BELOW:
            tokens[r] = _first_highest(row, block_max, top_block)
        else:
            tokens[r] = choose(
                row,
                temperature[r],
                top_k[r],
                top_p[r],
                min_p[r],
                u,
                top_block,
                block_max,
                candidates,
                counts,
                values,
                sizes,
                weights,
                lanes,
            )


@inner
def _adjust_and_choose(
    row: NDArray[np.int16],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    u: float,
    top_block: int,
    r: int,
    asked: Asked,
    touched: Touched,
    block_max: NDArray[np.int16],
    candidates: NDArray[np.uint64],
    counts: NDArray[np.int32],
    values: NDArray[np.float64],
    sizes: NDArray[np.int64],
    weights: NDArray[np.float64],
    lanes: NDArray[np.float32],
) -> int:
    """Return the token of a row with adjustments, or NO_TOKEN if they leave none (G17)."""
    raw_highest = widen(block_max[top_block])
    restricted = asked.spans[r, ALLOWED, 1] > 0
    count = touch(asked, r, touched)
    if count < 0:
        return NO_TOKEN
    left, infinite, certain = value_touched(row, asked, r, touched, count)
    token = NO_TOKEN
    if left >= 0 and infinite == 1:
        token = certain
    elif infinite == 0 and (left > 0 or (left == 0 and not restricted and count < row.size)):
        hide(row, block_max, touched, count, restricted)
        if temperature < GREEDY_BELOW:
            token = choose_greedy(row, block_max, touched, left)
        else:
            token = choose_merged(
                row,
                temperature,
                top_k,
                top_p,
                min_p,
                u,
                raw_highest,
                block_max,
                touched,
                count,
                left,
                restricted,
                candidates,
                counts,
                values,
                sizes,
                weights,
                lanes,
            )
    clear(touched, count)
    return token


@entry
def _argmax(
    logits: NDArray[np.int16],
    block_max: NDArray[np.int16],
    tokens: NDArray[np.int32],
    status: NDArray[np.int8],
) -> None:
    """Take the first highest entry of every row."""
    for r in range(logits.shape[0]):
        tokens[r] = NO_TOKEN
        status[r] = ROW_OK
        top_block = scan_blocks(logits[r], block_max)
        if top_block < 0:
            status[r] = fault_of(logits[r])
        else:
            tokens[r] = _first_highest(logits[r], block_max, top_block)


@entry
def _numeric_scan(
    logits: NDArray[np.int16], block_max: NDArray[np.int16], status: NDArray[np.int8]
) -> None:
    """Name what is not finite in every row."""
    for r in range(logits.shape[0]):
        status[r] = ROW_OK
        if scan_blocks(logits[r], block_max) < 0:
            status[r] = fault_of(logits[r])


@inner
def _in_range(temperature: float, top_k: int, top_p: float, min_p: float, position: int) -> bool:
    """Tell whether parameters can be computed with; a NaN is out of every range."""
    return (
        0.0 <= temperature < np.inf
        and top_k >= -1
        and 0.0 < top_p <= 1.0
        and 0.0 <= min_p <= 1.0
        and position >= 0
    )


@inner
def _first_highest(row: NDArray[np.int16], block_max: NDArray[np.int16], top_block: int) -> int:
    """Return the lowest id among the highest entries, given the first block that holds one."""
    for i in range(top_block * BLOCK, min((top_block + 1) * BLOCK, row.size)):
        if order_key(row[i]) == block_max[top_block]:
            return i
    return NO_TOKEN
