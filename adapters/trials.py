"""Golden and warm-up sequences of a model, and the verdict on a device's row.

A golden trial runs the prompt of a golden run as a prefill and its first greedy tokens as forced
decode steps; after each job the row of logits is held against the golden row of the same position.
The device gives BF16, so a right number may be off by what float32 arithmetic allows plus one
rounding step. A warm-up trial runs fixed tokens and its numbers are only checked to be finite.

Source: E25, decision 19, R10.2.
"""

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from laneway.adapters.golden import Golden, GoldenRun
from laneway.adapters.tensors import widen_bf16
from laneway.engine.inputs import SubmodelFacts, Trial

TOLERANCE = 1e-4
BF16_STEP = 2.0**-8
EQUAL = "equal"
_WARMUP_PROMPT = (1, 2, 3, 4)
_WARMUP_FORCED = (5, 6, 7, 8)


@attrs.frozen
class TrialRun:
    """A trial and, for a golden one, the run that its rows are held against."""

    trial: Trial
    golden: GoldenRun | None


def plan_trials(
    golden: Golden | None,
    submodels: Sequence[SubmodelFacts],
    *,
    context_tokens: int,
    vocabulary: int,
    golden_decode_steps: int,
    warmup_decode_steps: int,
) -> tuple[TrialRun, ...]:
    """Choose what runs before the model is ready: every golden prompt that fits, then a warm-up.

    They run one row at a time; for each larger batch one of them runs in all its rows at once, so
    that no compiled graph and no lane position serves unproven.

    Source: E21, E25.
    """
    prefill_max = max((s.tokens_max for s in submodels if s.task == "prefill"), default=0)
    decodes = any(s.task == "decode" for s in submodels)
    runs = []
    for run in golden.runs if golden is not None else ():
        if len(run.prompt) > min(prefill_max, context_tokens):
            continue
        # The last greedy token has no golden row: nothing was computed after it.
        room = min(len(run.greedy) - 1, context_tokens - len(run.prompt))
        steps = max(0, min(golden_decode_steps, room)) if decodes else 0
        trial = Trial(origin="golden", prompt=run.prompt, forced=run.greedy[:steps])
        runs.append(TrialRun(trial, run))
    prompt_tokens = min(len(_WARMUP_PROMPT), prefill_max, context_tokens)
    steps = min(warmup_decode_steps, len(_WARMUP_FORCED), context_tokens - prompt_tokens)
    prompt = tuple(token % vocabulary for token in _WARMUP_PROMPT[:prompt_tokens])
    forced = tuple(token % vocabulary for token in _WARMUP_FORCED[: max(0, steps * decodes)])
    if prompt:
        runs.append(TrialRun(Trial(origin="warmup", prompt=prompt, forced=forced), None))
    return tuple(run for batch in _batches(submodels) for run in _for_batch(runs, batch))


def _batches(submodels: Sequence[SubmodelFacts]) -> list[int]:
    """Return the batch sizes that both tasks have, smallest first.

    Why both: a run goes through the submodels of one size, from its prefill to its last decode.
    """
    sizes = [{s.batch_max for s in submodels if s.task == task} for task in ("prefill", "decode")]
    return sorted(sizes[0] & sizes[1]) or [1]


def _for_batch(runs: list[TrialRun], batch: int) -> list[TrialRun]:
    """Return all runs for the smallest batch, the shortest golden one for every other."""
    if batch == 1:
        return runs
    shortest = min(runs, key=lambda run: (run.golden is None, len(run.trial.prompt)), default=None)
    if shortest is None:
        return []
    return [TrialRun(attrs.evolve(shortest.trial, batch=batch), shortest.golden)]


def judge_row(run: GoldenRun, position: int, bits: NDArray[np.uint16]) -> str:
    """Hold the logits after ``position`` against the golden row: ``equal``, or what differs.

    Shapes: bits u16[vocabulary].
    """
    if not 0 <= position < run.row_count:
        return f"there is no golden row for position {position}"
    expected = run.logits[position]
    if bits.shape != expected.shape:
        return f"{bits.size} logits, the golden row has {expected.size}"
    actual = widen_bf16(bits)
    differences = np.abs(actual - expected)
    allowed = TOLERANCE + BF16_STEP * np.abs(expected)
    # Not `differences > allowed`: a NaN must not pass.
    wrong = ~(differences <= allowed)
    if bool(wrong.any()):
        worst = int(np.argmax(np.where(wrong, np.nan_to_num(differences, nan=np.inf), -1.0)))
        return (
            f"{int(np.count_nonzero(wrong))} of {expected.size} logits differ, most at token"
            f" {worst}: {actual[worst]:.6g}, golden {expected[worst]:.6g}"
        )
    best = int(np.argmax(expected))
    if float(run.margin[position]) > 2 * BF16_STEP * abs(float(expected[best])):
        chosen = int(np.argmax(actual))
        if chosen != best:
            return f"the highest logit is token {chosen}, golden {best}"
    return EQUAL
