"""What is asked of a row, as the kernels read it: each field against the parameter by name."""

import struct

import numpy as np
import pytest

from laneway.engine.adjusting import ALLOWED, BIAS, MASKED, OUTPUT, PROMPT
from laneway.engine.sampling import Sampling
from laneway.engine.sampling_arrays import WANT_TOKEN, SamplingArrays

FULL = Sampling(
    temperature=0.7,
    top_k=20,
    top_p=0.95,
    min_p=0.01,
    seed=(1 << 64) - 1,
    repetition_penalty=1.5,
    frequency_penalty=-0.25,
    presence_penalty=0.5,
    logit_bias={5: -1.0, 9: 2.0},
    allowed_token_ids=(4, 5, 9),
)
PLAIN = Sampling(temperature=0.0, seed=3)


def listed(arrays: SamplingArrays, row: int, kind: int) -> list[int]:
    first, count = arrays.spans[row, kind].tolist()
    return [int(each) for each in arrays.lists.ids[first : first + count]]


def ask_everything(arrays: SamplingArrays, row: int) -> None:
    arrays.want_token(
        row, FULL, position=41, prompt=(1, 2), output=(3, 3, 4), masked=(6,), logprobs=2
    )


def test_every_parameter_is_in_its_field() -> None:
    arrays = SamplingArrays.allocate(3)
    untouched = arrays.requests[[0, 2]].tobytes()
    ask_everything(arrays, 1)
    request = arrays.requests[1]
    by_name = {name: request[name].item() for name in request.dtype.names if name != "spans"}
    assert by_name == {
        "temperature": 0.7,
        "top_p": 0.95,
        "min_p": 0.01,
        "seed": (1 << 64) - 1,
        "top_k": 20,
        "position": 41,
        "logprobs": 2,
        "repetition": 1.5,
        "frequency": -0.25,
        "presence": 0.5,
        "wanted": WANT_TOKEN,
    }
    assert listed(arrays, 1, PROMPT) == [1, 2]
    assert listed(arrays, 1, OUTPUT) == [3, 3, 4]
    assert listed(arrays, 1, BIAS) == [5, 9]
    assert listed(arrays, 1, ALLOWED) == [4, 5, 9]
    assert listed(arrays, 1, MASKED) == [6]
    assert arrays.requests[[0, 2]].tobytes() == untouched


def test_a_row_that_asks_for_less_keeps_nothing_of_before() -> None:
    arrays, fresh = SamplingArrays.allocate(1), SamplingArrays.allocate(1)
    ask_everything(arrays, 0)
    for each in (arrays, fresh):
        each.want_token(0, PLAIN, position=7)
    assert arrays.requests.tobytes() == fresh.requests.tobytes()
    assert arrays.requests["logprobs"][0] == -1 and not arrays.spans[0].any()


def test_a_part_writes_into_the_rows_it_is_of() -> None:
    arrays = SamplingArrays.allocate(4)
    arrays.part(2, 4).want_token(1, PLAIN, position=11)
    assert arrays.position.tolist() == [0, 0, 0, 11]


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_that_is_not_there_is_refused(row: int) -> None:
    arrays = SamplingArrays.allocate(2)
    with pytest.raises(IndexError):
        arrays.want_token(row, PLAIN, position=0)
    assert not arrays.wanted.any()


def test_penalties_are_rounded_to_fp32_as_the_hardware_does() -> None:
    """The largest FP32 is 0x1.fffffep127; half a step above it, numbers begin to be infinite."""
    largest = float.fromhex("0x1.fffffep127")
    for penalty, bits in (
        (1.1, struct.unpack("<I", struct.pack("<f", 1.1))[0]),
        (1e-300, 0),
        (largest, 0x7F7FFFFF),
        (float.fromhex("0x1.fffffefp127"), 0x7F7FFFFF),
        (float.fromhex("0x1.ffffffp127"), 0x7F800000),
        (1e300, 0x7F800000),
    ):
        arrays = SamplingArrays.allocate(1)
        arrays.want_token(0, Sampling(seed=1, repetition_penalty=penalty), position=0)
        assert arrays.requests["repetition"].view(np.uint32)[0] == bits, penalty
