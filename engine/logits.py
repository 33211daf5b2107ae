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

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from laneway.engine.adjusting import (
    ALLOWED,
    KINDS,
    Touched,
    clear,
    hide,
    touch,
    value_touched,
)
from laneway.engine.bf16 import (
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
from laneway.engine.logprobs import Logprobs, allocate_logprobs, tell_most_likely
from laneway.engine.masks import nth_of_number
from laneway.engine.merging import choose_greedy, choose_merged
from laneway.engine.sampling import GREEDY_BELOW, Sampling
from laneway.engine.sampling_arrays import (
    WANT_NOTHING,
    WANT_SCAN,
    SamplerScratch,
    SamplingArrays,
)
from laneway.engine.scratch import Scratch

_LOGITS, _TOKEN, _STATUS = np.dtype(np.uint16), np.dtype(np.int32), np.dtype(np.int8)
_NO_LOGPROBS = allocate_logprobs(0)
_Arrays = tuple[Any, ...]


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
    _check_rows("tokens", tokens, rows, _TOKEN)
    _check_rows("status", status, rows, _STATUS)
    if len(sampling.requests) != rows:
        raise ValueError(f"sampling has {len(sampling.requests)} rows, logits have {rows}")
    if logprobs is not None and len(logprobs.lengths) != rows:
        raise ValueError(f"logprobs have {len(logprobs.lengths)} rows, logits have {rows}")
    if not _sample(
        logits,
        sampling.requests,
        sampling.lists.ids,
        sampling.lists.values,
        tokens,
        status,
        *cast(_Arrays, _NO_LOGPROBS if logprobs is None else logprobs),
        *cast(_Arrays, scratch.arrays),
        *cast(_Arrays, scratch.touched),
    ):
        raise ValueError("a row asks for log-probabilities: give them room")


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
    _check_rows("tokens", tokens, rows, _TOKEN)
    _check_rows("status", status, rows, _STATUS)
    _argmax(logits, scratch.arrays.block_max, tokens, status)


def numeric_scan(
    logits: NDArray[np.uint16], scratch: SamplerScratch, status: NDArray[np.int8]
) -> None:
    """Fill the status of every row without sampling (golden, warm-up and forced rows).

    Shapes: logits u16[rows, vocabulary], status i8[rows].
    Raises: ValueError if an array does not fit.
    """
    rows = _check_logits(logits, scratch.vocabulary)
    _check_rows("status", status, rows, _STATUS)
    _numeric_scan(logits, scratch.arrays.block_max, status)


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
    if logits.dtype != _LOGITS or logits.ndim != 2 or not logits.flags.c_contiguous:
        raise ValueError("logits must be contiguous uint16[rows, vocabulary]")
    rows, size = cast(tuple[int, int], logits.shape)
    if size != vocabulary:
        raise ValueError(f"logits have {size} entries a row, scratch has {vocabulary}")
    return rows


def _check_rows(
    name: str, array: NDArray[np.int32] | NDArray[np.int8], rows: int, dtype: np.dtype[np.generic]
) -> None:
    """Refuse an output array that is not one entry a row. Raises: ValueError."""
    if array.dtype != dtype or array.shape != (rows,) or not array.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous {dtype}[{rows}]")


@inner
def _choose(
    row: NDArray[np.int16],
    asked: Any,
    ids: NDArray[np.int32],
    values: NDArray[np.float32],
    top_block: int,
    touched: Touched,
    scratch: Scratch,
) -> int:
    """Return the token of a row that was scanned, or NO_TOKEN if its parameters leave none."""
    adjusted = False
    for kind in range(KINDS):
        adjusted = adjusted or asked.spans[kind, 1] > 0
    if adjusted:
        return _adjust_and_choose(row, asked, ids, values, touched, scratch)
    if asked.temperature < GREEDY_BELOW:
        return nth_of_number(row, scratch.block_max, scratch.block_max[top_block], 0)
    return choose(
        row,
        asked.temperature,
        asked.top_k,
        asked.top_p,
        asked.min_p,
        uniform(asked.seed, np.uint64(asked.position)),
        top_block,
        touched.bits,
        scratch,
    )


@inner
def _adjust_and_choose(
    row: NDArray[np.int16],
    asked: Any,
    ids: NDArray[np.int32],
    values: NDArray[np.float32],
    touched: Touched,
    scratch: Scratch,
) -> int:
    """Return the token of a row with adjustments, or NO_TOKEN if they leave none (G17)."""
    restricted = asked.spans[ALLOWED, 1] > 0
    count = touch(row, asked, ids, values, touched)
    if count < 0:
        return NO_TOKEN
    left, infinite, certain = value_touched(asked, touched, count)
    token = NO_TOKEN
    if left >= 0 and infinite == 1:
        token = certain
    elif infinite == 0 and (left > 0 or (left == 0 and not restricted and count < row.size)):
        hide(row, scratch.block_max, touched, count, restricted)
        if asked.temperature < GREEDY_BELOW:
            token = choose_greedy(row, scratch.block_max, touched, left)
        else:
            token = choose_merged(
                row,
                asked.temperature,
                asked.top_k,
                asked.top_p,
                asked.min_p,
                uniform(asked.seed, np.uint64(asked.position)),
                touched,
                count,
                left,
                restricted,
                scratch,
            )
    clear(touched, count)
    return token


@entry
def _argmax(
    logits: NDArray[np.uint16],
    block_max: NDArray[np.int16],
    tokens: NDArray[np.int32],
    status: NDArray[np.int8],
) -> None:
    """Take the first highest entry of every row."""
    for r in range(logits.shape[0]):
        row = logits[r].view(np.int16)
        tokens[r] = NO_TOKEN
        status[r] = ROW_OK
        top_block = scan_blocks(row, block_max)
        if top_block < 0:
            status[r] = fault_of(row)
        else:
            tokens[r] = nth_of_number(row, block_max, block_max[top_block], 0)


@entry
def _numeric_scan(
    logits: NDArray[np.uint16], block_max: NDArray[np.int16], status: NDArray[np.int8]
) -> None:
    """Name what is not finite in every row."""
    for r in range(logits.shape[0]):
        row = logits[r].view(np.int16)
        status[r] = ROW_OK
        if scan_blocks(row, block_max) < 0:
            status[r] = fault_of(row)


@inner
def _in_range(asked: Any) -> bool:
    """Tell whether parameters can be computed with; a NaN is out of every range."""
    return bool(
        0.0 <= asked.temperature < np.inf
        and asked.top_k >= -1
        and 0.0 < asked.top_p <= 1.0
        and 0.0 <= asked.min_p <= 1.0
        and asked.position >= 0
    )


@entry
def _sample(
    logits: NDArray[np.uint16],
    requests: NDArray[np.void],
    ids: NDArray[np.int32],
    values: NDArray[np.float32],
    tokens: NDArray[np.int32],
    status: NDArray[np.int8],
    told_ids: NDArray[np.int32],
    told_values: NDArray[np.float64],
    told_lengths: NDArray[np.int64],
    block_max: NDArray[np.int16],
    candidates: NDArray[np.uint64],
    counts: NDArray[np.int32],
    group_values: NDArray[np.float64],
    sizes: NDArray[np.int64],
    weights: NDArray[np.float64],
    exponentials: NDArray[np.float64],
    marks: NDArray[np.int32],
    bits: NDArray[np.uint64],
    touched_ids: NDArray[np.int32],
    outputs: NDArray[np.int32],
    flags: NDArray[np.uint8],
    bias: NDArray[np.float32],
    raw: NDArray[np.int16],
    numbers: NDArray[np.float32],
    words: NDArray[np.uint32],
    entries: NDArray[np.uint64],
) -> bool:
    """Do the stages of the module docstring for every row; return whether logprobs have room.

    Why so many arrays: to take a named tuple of arrays apart costs several times what they cost.
    """
    scratch = Scratch(block_max, candidates, counts, group_values, sizes, weights, exponentials)
    touched = Touched(marks, bits, touched_ids, outputs, flags, bias, raw, numbers, words, entries)
    room = told_lengths.size == logits.shape[0]
    for r in range(logits.shape[0]):
        if requests[r].logprobs >= 0 and not room:
            return False
    for r in range(logits.shape[0]):
        row = logits[r].view(np.int16)
        asked = requests[r]
        tokens[r] = NO_TOKEN
        status[r] = ROW_OK
        if room:
            told_lengths[r] = 0
        if asked.wanted == WANT_NOTHING:
            continue
        top_block = scan_blocks(row, block_max)
        if top_block < 0:
            status[r] = fault_of(row)
            continue
        if asked.wanted == WANT_SCAN:
            continue
        if not _in_range(asked):
            status[r] = ROW_PARAMETERS
            continue
        log_mass = 0.0
        length = 0
        if asked.logprobs >= 0:
            highest = widen(block_max[top_block])
            log_mass, length = tell_most_likely(
                row,
                block_max,
                highest,
                asked.logprobs,
                exponentials,
                told_ids[r],
                told_values[r],
            )
        token = _choose(row, asked, ids, values, top_block, touched, scratch)
        if token == NO_TOKEN:
            status[r] = ROW_PARAMETERS
        elif asked.logprobs >= 0:
            told_ids[r, 0] = token
            told_values[r, 0] = widen(order_key(row[token])) - log_mass
            told_lengths[r] = length
        tokens[r] = token
    return True
