"""What the journal could not keep does not come in: the engine goes on (I12)."""

from collections.abc import Callable
from typing import Any

import pytest
from support.rig import Rig

from laneway.engine import Engine, Request

LONE = "\ud800"


def ask(**fields: Any) -> Request:
    return Request(**{"model": "m", "prompt": (1, 2), "max_tokens": 2, **fields})


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("client_id", LONE, ValueError),
        ("client_id", 5, TypeError),
        ("client_id", b"x", TypeError),
        ("model", LONE, ValueError),
        ("model", "x" * 257, ValueError),
        ("stop", (LONE,), ValueError),
        ("ignore_eos", 1, TypeError),
        ("ignore_eos", "yes", TypeError),
        ("prompt", (1 << 63,), ValueError),
        ("prompt", b"ab", TypeError),
        ("prompt", None, TypeError),
        ("prompt", 7, TypeError),
        ("max_tokens", 1 << 70, ValueError),
        ("max_tokens", True, TypeError),
    ],
)
def test_a_request_with_such_a_value_cannot_be_made(
    field: str, value: object, error: type[Exception]
) -> None:
    with pytest.raises(error):
        ask(**{field: value})


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.load(5, "source"),
        lambda engine: engine.load(LONE, "source"),
        lambda engine: engine.load("n", LONE),
        lambda engine: engine.load("n" * 257, "source"),
        lambda engine: engine.cancel("x"),
        lambda engine: engine.cancel(1 << 70),
    ],
)
def test_such_a_call_is_refused_and_the_engine_goes_on(call: Callable[[Engine], object]) -> None:
    rig = Rig()
    steps = len(rig.steps)
    with pytest.raises((TypeError, ValueError)):
        call(rig.engine)
    assert len(rig.steps) == steps
    rig.submit([1, 2])
    rig.run()
    rig.check_answers()
    rig.close()
