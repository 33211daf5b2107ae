"""Arrays that the sampler's kernels work on: what is asked of the rows of a job, and scratch."""

import struct
from collections.abc import Sequence
from itertools import chain

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
    Touched,
    allocate_touched,
)
from laneway.engine.candidates import CANDIDATES_MAX
from laneway.engine.histogram import BINS
from laneway.engine.logprobs import exponentials
from laneway.engine.sampling import LOGPROBS_MAX, Sampling
from laneway.engine.scratch import Scratch
from laneway.engine.vectors import BLOCK

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
        """Append a list; return (first, count).

        Why pack_into: a long history comes every time, and numpy takes three times as long for it.
        """
        first, end = self.used, self.used + len(ids)
        if end > self.ids.size:
            size = max(end, 2 * self.ids.size)
            self.ids = np.resize(self.ids, size)
            self.values = np.resize(self.values, size)
        struct.pack_into(f"{len(ids)}i", self.ids.data, first * self.ids.itemsize, *ids)
        if values is not None:
            self.values[first:end] = values
        self.used = end
        return first, len(ids)


REQUEST = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
        ("top_k", np.int64),
        ("position", np.int64),
        ("logprobs", np.int64),
        ("spans", np.int64, (KINDS, 2)),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("wanted", np.int8),
    ],
    align=True,
)
"""What is asked of one row.

``wanted`` is one of WANT_*; ``position`` is absolute, of the token to be sampled; ``logprobs`` is
-1 or how many of the most likely; ``spans[kind]`` is (first, count) of a list (adjusting.py).
Why one record a row: handing an array to a kernel costs as much as drawing some tokens.
"""


_FIELDS = struct.Struct(f"@dddQqqq{2 * KINDS}qfffb0Q")
"""The same record, field by field. A penalty beyond FP32 is infinite, which G17 answers.

Why: numpy takes ten times as long to fill a record field by field.
"""


def _field(name: str) -> property:
    """Return a property: one field of all requests, as an array that writes through."""
    return property(lambda arrays: arrays.requests[name])


@attrs.frozen(kw_only=True)
class SamplingArrays:
    """Sampling parameters of the rows of one job: ``requests[i]`` (REQUEST) for row i.

    ``lists`` holds what the requests' spans point to.
    """

    requests: NDArray[np.void]
    lists: TokenLists
    memory: memoryview = attrs.field(init=False, repr=False)
    """The bytes of ``requests``."""

    @memory.default
    def _bytes_of_requests(self) -> memoryview:
        return self.requests.view(np.uint8).data

    wanted = _field("wanted")
    temperature = _field("temperature")
    top_k = _field("top_k")
    top_p = _field("top_p")
    min_p = _field("min_p")
    position = _field("position")
    spans = _field("spans")

    @classmethod
    def allocate(cls, rows: int) -> "SamplingArrays":
        """Make room for a number of rows, of which nothing is wanted yet."""
        requests = np.zeros(rows, REQUEST)
        requests["top_p"] = 1.0
        requests["logprobs"] = -1
        requests["repetition"] = 1.0
        return cls(requests=requests, lists=TokenLists())

    def part(self, first: int, end: int) -> "SamplingArrays":
        """Return the requests of some rows, as views."""
        return SamplingArrays(requests=self.requests[first:end], lists=self.lists)

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
        if not 0 <= row < len(self.requests):
            raise IndexError(f"row {row} of {len(self.requests)}")
        spans, lists = [(0, 0)] * KINDS, self.lists
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
        _FIELDS.pack_into(
            self.memory,
            row * _FIELDS.size,
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.seed,
            sampling.top_k,
            position,
            -1 if logprobs is None else min(max(logprobs, 0), LOGPROBS_MAX),
            *chain.from_iterable(spans),
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            WANT_TOKEN,
        )

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
    arrays: Scratch
    touched: Touched

    @classmethod
    def allocate(cls, vocabulary: int) -> "SamplerScratch":
        """Make the working memory. Raises: ValueError for an impossible vocabulary size."""
        if not 0 < vocabulary <= 2**31 - 1:
            raise ValueError(f"vocabulary must be within 1 and 2^31-1, not {vocabulary}")
        groups = max(vocabulary, BINS)
        arrays = Scratch(
            block_max=np.zeros(-(-vocabulary // BLOCK), np.int16),
            candidates=np.zeros(CANDIDATES_MAX, np.uint64),
            counts=np.zeros(BINS, np.int32),
            values=np.zeros(groups, np.float64),
            sizes=np.zeros(groups, np.int64),
            weights=np.zeros(groups, np.float64),
            exponentials=exponentials(),
        )
        return cls(vocabulary=vocabulary, arrays=arrays, touched=allocate_touched(vocabulary))
