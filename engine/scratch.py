"""Working memory of the sampler's kernels, as they see it."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Scratch(NamedTuple):
    """Working memory for one row at a time. A named tuple, because kernels can take one.

    Shapes: block_max i16[blocks], candidates u64[CANDIDATES_MAX], counts i32[BINS] (zero between
    rows); values f64, sizes i64 and weights f64, all [groups]; exponentials f64[BINS] (only read).
    """

    block_max: NDArray[np.int16]
    candidates: NDArray[np.uint64]
    counts: NDArray[np.int32]
    values: NDArray[np.float64]
    sizes: NDArray[np.int64]
    weights: NDArray[np.float64]
    exponentials: NDArray[np.float64]
