"""Arrays that the sampler's kernels work on: what is asked of the rows of a job, and scratch."""

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from laneway.engine.adjusting import (
    ALLOWED,
    BIAS,
    KINDS,
    MASKED,
    OUTPUT,
    PROMPT,
    Asked,
    Touched,
    allocate_touched,
)
from laneway.engine.bf16 import BLOCK
from laneway.engine.candidates import CANDIDATES_MAX
from laneway.engine.histogram import BINS
from laneway.engine.sampling import LOGPROBS_MAX, Sampling

WANT_NOTHING = 0
WANT_SCAN = 1
WANT_TOKEN = 2

_LIST_FIRST = 256


@attrs.define(kw_only=True)
class TokenLists:
    """Lists of token ids, with a number each, one after the other in memory that grows."""

    ids: NDArray[np.int32] = attrs.Factory(lambda: np.zeros(_LIST_FIRST, np.int32))
    values: NDArray[np.float32] = attrs.Factory(lambda: np.zeros(_LIST_FIRST, np.float32))
    used: int = 0

    def put(self, ids: Sequence[int], values: Sequence[float] | None = None) -> tuple[int, int]:
        """Append a list; return (first, count)."""
        first, end = self.used, self.used + len(ids)
        if end > self.ids.size:
            size = max(end, 2 * self.ids.size)
            self.ids = np.resize(self.ids, size)
            self.values = np.resize(self.values, size)
        self.ids[first:end] = ids
        if values is not None:
            self.values[first:end] = values
        self.used = end
        return first, len(ids)


@attrs.frozen(kw_only=True)
class SamplingArrays:
    """Sampling parameters of the rows of one job, one array each, entry i for row i.

    Shapes: all [rows] but spans; wanted i8 (WANT_*), temperature, top_p, min_p f64, top_k i64, seed
    u64, position i64 (absolute, of the token to be sampled), logprobs i64 (-1 or how many of the
    most likely), repetition, frequency, presence f32; spans i64[rows, KINDS, 2] into ``lists``.
    """

    wanted: NDArray[np.int8]
    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    seed: NDArray[np.uint64]
    position: NDArray[np.int64]
    logprobs: NDArray[np.int64]
    repetition: NDArray[np.float32]
    frequency: NDArray[np.float32]
    presence: NDArray[np.float32]
    spans: NDArray[np.int64]
    lists: TokenLists

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
            logprobs=np.full(rows, -1, np.int64),
            repetition=np.ones(rows, np.float32),
            frequency=np.zeros(rows, np.float32),
            presence=np.zeros(rows, np.float32),
            spans=np.zeros((rows, KINDS, 2), np.int64),
            lists=TokenLists(),
        )

    def want_token(
        self,
        row: int,
        sampling: Sampling,
        *,
        position: int,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
        masked: Sequence[int] = (),
        logprobs: int | None = None,
    ) -> None:
        """Ask for a token of a row.

        ``prompt`` and ``output`` are what penalties look at, ``masked`` are ids that must not be
        drawn. ``logprobs``: how many of the most likely are wanted beside the token's own.

        Raises: ValueError if the request has no seed yet.
        """
        if sampling.seed is None:
            raise ValueError("sampling needs a seed; the shell draws one at admission")
        self.wanted[row] = WANT_TOKEN
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed
        self.position[row] = position
        self.logprobs[row] = -1 if logprobs is None else min(max(logprobs, 0), LOGPROBS_MAX)
        with np.errstate(over="ignore"):  # a penalty beyond FP32 is infinite, which G17 answers
            self.repetition[row] = sampling.repetition_penalty
        self.frequency[row] = sampling.frequency_penalty
        self.presence[row] = sampling.presence_penalty
        spans, lists = self.spans[row], self.lists
        spans[:] = 0
        if sampling.counts_prompt:
            spans[PROMPT] = lists.put(prompt)
        if sampling.counts_output:
            spans[OUTPUT] = lists.put(output)
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            spans[BIAS] = lists.put(ids, values)
        if sampling.allowed_token_ids is not None:
            spans[ALLOWED] = lists.put(sampling.allowed_token_ids)
        if masked:
            spans[MASKED] = lists.put(masked)

    def want_scan(self, row: int) -> None:
        """Ask only whether a row's numbers are finite."""
        self.wanted[row] = WANT_SCAN

    def want_nothing(self, row: int) -> None:
        """Leave a row unread: it is inactive, or its numbers are not due yet."""
        self.wanted[row] = WANT_NOTHING

    def asked(self) -> Asked:
        """Return what the kernels need to know of adjustments."""
        return Asked(
            ids=self.lists.ids,
            values=self.lists.values,
            spans=self.spans,
            repetition=self.repetition,
            frequency=self.frequency,
            presence=self.presence,
        )


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
    wide_lanes: NDArray[np.float64]
    touched: Touched

    @classmethod
    def allocate(cls, vocabulary: int) -> "SamplerScratch":
        """Make the working memory. Raises: ValueError for an impossible vocabulary size."""
        if not 0 < vocabulary <= 2**31 - 1:
            raise ValueError(f"vocabulary must be within 1 and 2^31-1, not {vocabulary}")
        groups = max(vocabulary, BINS)
        return cls(
            vocabulary=vocabulary,
            block_max=np.zeros(-(-vocabulary // BLOCK), np.int16),
            candidates=np.zeros(CANDIDATES_MAX, np.uint64),
            counts=np.zeros(BINS, np.int32),
            values=np.zeros(groups, np.float64),
            sizes=np.zeros(groups, np.int64),
            weights=np.zeros(groups, np.float64),
            lanes=np.zeros(BLOCK, np.float32),
            wide_lanes=np.zeros(BLOCK, np.float64),
            touched=allocate_touched(vocabulary),
        )
