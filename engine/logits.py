"""Turn BF16 logits rows into tokens, on the host, straight from the bits the device wrote.

Theory of operation. Each row goes through the same stages, on int16 order keys (bf16.py) until only
what can be drawn is left, then in float64 (groups.py says exactly what is computed):

    scan -> finite? -> parameters in range? -> greedy: highest, lowest id
                                            -> temperature -> min_p -> top_k -> top_p -> draw

Of the ways to find what can be drawn (choosing.py) the cheapest that is exact is taken, and all
give the same token. The random number is a function of (request seed, position of the sampled
token) alone (draw.py), so a token depends on its own row and its own parameters only: not on batch,
lane, order or thread.

A number that is not finite is a device fault and never a token (R14.5): the row gets a status and
NO_TOKEN. Kernels take arrays and scalars; the GIL is released while they run.
"""

import attrs
import numpy as np
from numpy.typing import NDArray

from laneway.engine.bf16 import BLOCK, ROW_OK, ROW_PARAMETERS, fault_of, order_key, scan_blocks
from laneway.engine.candidates import CANDIDATES_MAX
from laneway.engine.choosing import choose
from laneway.engine.draw import uniform
from laneway.engine.histogram import BINS
from laneway.engine.inputs import NO_TOKEN
from laneway.engine.jit import entry, inner
from laneway.engine.sampling import GREEDY_BELOW, Sampling

WANT_NOTHING = 0
WANT_SCAN = 1
WANT_TOKEN = 2


@attrs.frozen(kw_only=True)
class SamplingArrays:
    """Sampling parameters of the rows of one job, one array each, entry i for row i.

    Shapes: all [rows]; wanted i8 (WANT_*), temperature, top_p, min_p f64, top_k i64, seed u64,
    position i64 (absolute, of the token to be sampled).
    """

    wanted: NDArray[np.int8]
    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    seed: NDArray[np.uint64]
    position: NDArray[np.int64]

    @classmethod
    def allocate(cls, rows: int) -> "SamplingArrays":
        """Make arrays for a number of rows, of which nothing is wanted yet."""
        return cls(
            wanted=np.zeros(rows, np.int8),
            temperature=np.zeros(rows, np.float64),
            top_k=np.zeros(rows, np.int64),
            top_p=np.ones(rows, np.float64),
            min_p=np.zeros(rows, np.float64),
            seed=np.zeros(rows, np.uint64),
            position=np.zeros(rows, np.int64),
        )

    def want_token(self, row: int, sampling: Sampling, *, position: int) -> None:
        """Ask for a token of a row. Raises: ValueError if the request has no seed yet."""
        if sampling.seed is None:
            raise ValueError("sampling needs a seed; the shell draws one at admission")
        self.wanted[row] = WANT_TOKEN
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed
        self.position[row] = position

    def want_scan(self, row: int) -> None:
        """Ask only whether a row's numbers are finite."""
        self.wanted[row] = WANT_SCAN

    def want_nothing(self, row: int) -> None:
        """Leave a row unread: it is inactive, or its numbers are not due yet."""
        self.wanted[row] = WANT_NOTHING


@attrs.frozen(kw_only=True)
class SamplerScratch:
    """Working memory for one vocabulary size; one per thread that samples, never shared.

    Why: arrays above the allocator's threshold would be fresh pages at each step.
    """

    vocabulary: int
    block_max: NDArray[np.int16]
    candidates: NDArray[np.uint64]
    counts: NDArray[np.int32]
    values: NDArray[np.float64]
    sizes: NDArray[np.int64]
    weights: NDArray[np.float64]
    lanes: NDArray[np.float32]

    @classmethod
    def allocate(cls, vocabulary: int) -> "SamplerScratch":
        """Make the working memory. Raises: ValueError for an impossible vocabulary size."""
        if not 0 < vocabulary <= 2**31 - 1:
            raise ValueError(f"vocabulary must be within 1 and 2^31-1, not {vocabulary}")
        return cls(
            vocabulary=vocabulary,
            block_max=np.zeros(-(-vocabulary // BLOCK), np.int16),
            candidates=np.zeros(CANDIDATES_MAX, np.uint64),
            counts=np.zeros(BINS, np.int32),
            values=np.zeros(BINS, np.float64),
            sizes=np.zeros(BINS, np.int64),
            weights=np.zeros(BINS, np.float64),
            lanes=np.zeros(BLOCK, np.float32),
        )


def sample_rows(
    logits: NDArray[np.uint16],
    sampling: SamplingArrays,
    scratch: SamplerScratch,
    tokens: NDArray[np.int32],
    status: NDArray[np.int8],
) -> None:
    """Fill token and status of every row as its ``wanted`` entry asks.

    A row whose status is not ROW_OK, or of which no token is wanted, gets NO_TOKEN.
    Shapes: logits u16[rows, vocabulary] (BF16 bits, only read), tokens i32[rows], status i8[rows].
    Raises: ValueError if an array does not fit.
    Source: R2.6, R14.5, serving rules of sampling (order, ranges, ties).
    """
    rows = _check_logits(logits, scratch.vocabulary)
    _check_rows("tokens", tokens, rows, np.int32)
    _check_rows("status", status, rows, np.int8)
    if sampling.wanted.size != rows:
        raise ValueError(f"sampling has {sampling.wanted.size} rows, logits have {rows}")
    _sample(
        logits.view(np.int16),
        sampling.wanted,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        sampling.position,
        scratch.block_max,
        scratch.candidates,
        scratch.counts,
        scratch.values,
        scratch.sizes,
        scratch.weights,
        scratch.lanes,
        tokens,
        status,
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
    sampling.want_token(0, Sampling(temperature=1.0, seed=0), position=0)
    sample_rows(logits, sampling, scratch, tokens, status)
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
    block_max: NDArray[np.int16],
    candidates: NDArray[np.uint64],
    counts: NDArray[np.int32],
    values: NDArray[np.float64],
    sizes: NDArray[np.int64],
    weights: NDArray[np.float64],
    lanes: NDArray[np.float32],
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
        if temperature[r] < GREEDY_BELOW:
            tokens[r] = _first_highest(row, block_max, top_block)
            continue
        tokens[r] = choose(
            row,
            temperature[r],
            top_k[r],
            top_p[r],
            min_p[r],
            uniform(seed[r], np.uint64(position[r])),
            top_block,
            block_max,
            candidates,
            counts,
            values,
            sizes,
            weights,
            lanes,
        )


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
