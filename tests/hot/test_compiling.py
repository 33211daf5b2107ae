"""Machine code kept on disk is found again only for exactly the same functions and options."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from laneway.engine.jit import _absorb, inner, inner_inlined

SOURCE = """
FACTOR = {factor}

@wrap
def helper(x):
    return x * FACTOR + {added}

def caller(x):
    return helper(x)
"""


def digest(wrap: Callable[..., Any], *, factor: float = 2.0, added: float = 1.0) -> str:
    """Return the digest of an entry point whose helper was compiled by ``wrap``."""
    scope: dict[str, Any] = {"wrap": wrap, "__name__": "made"}
    exec(SOURCE.format(factor=factor, added=added), scope)
    absorbed = hashlib.blake2b(digest_size=8)
    _absorb(scope["caller"], absorbed, set())
    return absorbed.hexdigest()


def test_the_same_functions_have_the_same_digest() -> None:
    assert digest(inner) == digest(inner)


@pytest.mark.parametrize(
    "other",
    [
        lambda: digest(inner_inlined),
        lambda: digest(inner, factor=3.0),
        lambda: digest(inner, added=2.0),
    ],
)
def test_options_constants_and_globals_of_what_is_called_change_it(
    other: Callable[[], str],
) -> None:
    assert other() != digest(inner)


BUILT = """
from numba.extending import intrinsic

def emit(value):
    return {factor} * value

@intrinsic
def helper(typing_context, value):
    def build(context, builder, signature, arguments):
        return emit(arguments[0] {operation} {added})
    return value, build

def caller(x):
    return helper(x)
"""


def digest_built(*, factor: float = 2.0, added: float = 1.0, operation: str = "+") -> str:
    """Return the digest of an entry point that calls an intrinsic."""
    scope: dict[str, Any] = {"__name__": "made"}
    exec(BUILT.format(factor=factor, added=added, operation=operation), scope)
    absorbed = hashlib.blake2b(digest_size=8)
    _absorb(scope["caller"], absorbed, set())
    return absorbed.hexdigest()


def test_what_builds_an_intrinsic_changes_the_digest() -> None:
    digests = [
        digest_built(),
        digest_built(factor=3.0),
        digest_built(added=2.0),
        digest_built(operation="-"),
    ]
    assert digest_built() == digests[0]
    assert len(set(digests)) == len(digests)
