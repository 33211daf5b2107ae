"""The verdict on a device's row, and what is tried before a model is ready."""

import numpy as np
import pytest
from numpy.typing import NDArray

from laneway.adapters.golden import Golden, GoldenRun
from laneway.adapters.tensors import round_to_bf16
from laneway.adapters.trials import judge_row, plan_trials
from laneway.engine.inputs import SubmodelFacts, Trial

ROWS = [
    [1.0, 2.0, 3.0, -4.0],
    [0.5, 0.25, -0.125, 8.0],
    [100.0, 100.25, -3.0, 0.0],
    [0.0, 0.0001, 0.00005, -0.0001],
]


def make_run(prompt: tuple[int, ...] = (1, 2), greedy: tuple[int, ...] = (3, 1, 2)) -> GoldenRun:
    logits = np.array(ROWS, np.float32)
    top = np.sort(logits, axis=1)
    return GoldenRun(
        prompt=prompt,
        greedy=greedy,
        logits=logits,
        margin=top[:, -1] - top[:, -2],
        keys={},
        values={},
        route_experts=None,
        route_weights=None,
        route_margin=None,
    )


def rounded(values: list[float]) -> NDArray[np.uint16]:
    return round_to_bf16(np.array(values, np.float32))


@pytest.mark.parametrize("position", range(4))
def test_rounding_to_bf16_alone_is_equal(position: int) -> None:
    assert judge_row(make_run(), position, rounded(ROWS[position])) == "equal"


@pytest.mark.parametrize(
    ("position", "column", "value", "equal"),
    [
        # One step of bf16 at 2.0 is 2^-7 = 0.0078125; allowed is 2.0 * 2^-8 + 1e-4.
        (0, 1, 2.0078125, True),
        (0, 1, 2.015625, False),
        (0, 3, -4.015625, True),
        (0, 3, -4.03125, False),
        # Near zero only the tolerance of 1e-4 is left.
        (3, 0, 0.00009, True),
        (3, 0, 0.0002, False),
        (1, 3, float("nan"), False),
        (1, 3, float("inf"), False),
    ],
)
def test_one_step_of_rounding_is_allowed_and_no_more(
    position: int, column: int, value: float, equal: bool
) -> None:
    row = list(ROWS[position])
    row[column] = value
    verdict = judge_row(make_run(), position, rounded(row))
    assert (verdict == "equal") is equal
    if not equal:
        assert f"1 of 4 logits differ, most at token {column}" in verdict


def test_a_close_decision_may_fall_either_way() -> None:
    # Golden is token 1 with 100.25, which bf16 rounds to the 100 of token 0: a tie, lowest first.
    actual = rounded(ROWS[2])
    assert actual[0] == actual[1]
    assert judge_row(make_run(), 2, actual) == "equal"


def test_rows_outside_the_run_and_of_another_size_are_told() -> None:
    assert "no golden row for position 4" in judge_row(make_run(), 4, rounded(ROWS[0]))
    assert judge_row(make_run(), 0, rounded([1.0])) == "1 logits, the golden row has 4"


def submodels(tokens_max: int) -> tuple[SubmodelFacts, ...]:
    return (
        SubmodelFacts(name="p", task="prefill", batch_max=1, tokens_max=tokens_max),
        SubmodelFacts(name="d", task="decode", batch_max=1, tokens_max=1),
    )


def test_golden_prompts_that_fit_come_first_and_a_warm_up_last() -> None:
    long = make_run(prompt=(1, 2, 3, 0), greedy=(2,))
    planned = plan_trials(
        Golden((make_run(), long)),
        submodels(3),
        context_tokens=8,
        vocabulary=4,
        golden_decode_steps=4,
        warmup_decode_steps=2,
    )
    # The third greedy token has no golden row, and the long prompt does not fit a prefill of 3.
    assert [one.trial for one in planned] == [
        Trial(origin="golden", prompt=(1, 2), forced=(3, 1)),
        Trial(origin="warmup", prompt=(1, 2, 3), forced=(1, 2)),
    ]
    assert planned[0].golden is not None and planned[1].golden is None


def test_forced_steps_stay_within_the_context_and_the_limit() -> None:
    def forced(context: int, steps: int) -> tuple[int, ...]:
        planned = plan_trials(
            Golden((make_run(),)),
            submodels(8),
            context_tokens=context,
            vocabulary=512,
            golden_decode_steps=steps,
            warmup_decode_steps=0,
        )
        return planned[0].trial.forced

    assert forced(8, 1) == (3,)
    assert forced(3, 4) == (3,)
    assert forced(2, 4) == ()
