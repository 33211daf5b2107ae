"""Hold what a device gives against golden runs.

Verifying a device, golden runs after a load or a reset, and canaries share these comparisons.
Numbers that are close are not all decided by the arithmetic: a token counts only where the golden
margin is larger than what rounding can move, and a route only where the router's margin is.

Source: E25.
"""

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from laneway.adapters.golden import GoldenRun
from laneway.engine.errors import ModelError

LOGIT_TOLERANCE = 1e-4
ROUTE_MARGIN_MIN = 1e-4
TOKEN_MARGIN_MIN = 1e-3


@attrs.frozen
class LogitErrors:
    """How far a device's rows are from golden ones.

    tokens_compared counts the rows whose margin is large enough to decide the token.
    """

    max_abs_logit_error: float
    rows: int
    tokens_equal: int
    tokens_compared: int


def compare_logits(run: GoldenRun, logits: ArrayLike, *, bf16: bool = False) -> LogitErrors:
    """Hold a device's logits against a run, row by row from row 0.

    Shapes: logits [rows, vocab], at most the run's rows.
    Why: a token is compared only where the golden margin decides it: beyond 1e-3 in float32, or
    beyond one bf16 step of the top logit once the device has rounded; the lowest id wins a tie.
    Raises: ModelError if the rows cannot belong to this run.
    """
    actual = np.asarray(logits, dtype=np.float32)
    if actual.ndim != 2 or not 0 < len(actual) <= run.row_count:
        raise ModelError(f"logits of shape {actual.shape} for a run of {run.row_count} rows")
    expected = run.logits[: len(actual)]
    if actual.shape != expected.shape:
        raise ModelError(f"logits of shape {actual.shape}, the vocabulary is {expected.shape[1]}")
    largest = float(np.max(np.abs(actual - expected)))
    bound = _bf16_step(expected.max(axis=-1)) if bf16 else np.float32(TOKEN_MARGIN_MIN)
    decided = run.margin[: len(actual)] > bound
    equal = np.argmax(actual, axis=-1) == np.argmax(expected, axis=-1)
    return LogitErrors(
        max_abs_logit_error=largest,
        rows=len(actual),
        tokens_equal=int(np.count_nonzero(decided & equal)),
        tokens_compared=int(np.count_nonzero(decided)),
    )


def _bf16_step(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Give the distance of bf16 numbers at a value: 8 bits of precision."""
    _, exponent = np.frexp(values)
    step: NDArray[np.float32] = np.ldexp(np.float32(1), exponent - 8)
    return step


def routing_equal(run: GoldenRun, experts: ArrayLike) -> bool:
    """Tell whether each position used the golden experts wherever the router's margin decides.

    Shapes: experts [layers, rows, k], at most the run's rows.
    """
    if run.route_experts is None or run.route_margin is None:
        raise ModelError("a dense model routes nothing; there is no routing to compare")
    actual = np.asarray(experts)
    rows = actual.shape[1] if actual.ndim == 3 else 0
    expected = run.route_experts[:, :rows]
    if rows == 0 or actual.shape != expected.shape:
        raise ModelError(f"experts of shape {actual.shape} for {run.route_experts.shape}")
    same = (np.sort(actual, axis=-1) == np.sort(expected, axis=-1)).all(axis=-1)
    decided = run.route_margin[:, :rows] > ROUTE_MARGIN_MIN
    return bool(same[decided].all())
