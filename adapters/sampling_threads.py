"""Sample the rows of a job on several threads.

Kernels run without the GIL and a row knows nothing of another, so rows are dealt out in contiguous
parts, each with working memory of its own, and tokens are those of one thread.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from laneway.engine.logits import sample_rows
from laneway.engine.logprobs import Logprobs
from laneway.engine.sampling_arrays import SamplerScratch, SamplingArrays

THREADS_MAX = 64


class SamplingThreads:
    """A number of threads, the caller's among them; used by one caller at a time."""

    def __init__(self, vocabulary: int, threads: int) -> None:
        self._scratches = [SamplerScratch.allocate(vocabulary) for _ in range(threads)]
        self._others = ThreadPoolExecutor(threads - 1, "sampling") if threads > 1 else None

    def sample(
        self,
        logits: NDArray[np.uint16],
        sampling: SamplingArrays,
        tokens: NDArray[np.int32],
        status: NDArray[np.int8],
        logprobs: Logprobs | None = None,
    ) -> None:
        """Fill what `laneway.engine.logits.sample_rows` fills; returns when all rows are done.

        Shapes, Raises: as there.
        """
        if self._others is None:
            sample_rows(logits, sampling, self._scratches[0], tokens, status, logprobs)
            return
        borders = [len(logits) * n // len(self._scratches) for n in range(len(self._scratches) + 1)]

        def part(number: int) -> None:
            rows = slice(borders[number], borders[number + 1])
            sample_rows(
                logits[rows],
                sampling.part(rows.start, rows.stop),
                self._scratches[number],
                tokens[rows],
                status[rows],
                None if logprobs is None else logprobs.part(rows.start, rows.stop),
            )

        waiting = [self._others.submit(part, n) for n in range(1, len(self._scratches))]
        try:
            part(0)
        finally:
            for other in waiting:
                other.exception()
        for other in waiting:
            other.result()

    def close(self) -> None:
        """End the other threads."""
        if self._others is not None:
            self._others.shutdown()
