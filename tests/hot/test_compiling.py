"""Machine code kept on disk is found again only for exactly the same functions and options."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from laneway.engine import lanes, logits
from laneway.engine.jit import _absorb, entry, inner, inner_inlined

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


def test_an_entry_point_before_what_it_reaches_is_refused() -> None:
    """Its name would say nothing of that, and old machine code would be found again."""
    scope: dict[str, Any] = {"inner": inner, "entry": entry, "__name__": "made"}
    early = "@entry\ndef first(x):\n    return later(x)\n"
    later = "@inner\ndef later(x):\n    return x + 1\n"
    with pytest.raises(NameError, match="first uses later"):
        exec(early + later, scope)
    exec(later + early.replace("@entry\n", ""), scope)
    _absorb(scope["first"], hashlib.blake2b(digest_size=8), set())


def test_every_entry_point_is_named_after_all_that_it_reaches() -> None:
    """What is absorbed now, with every function there, is what was when it was made."""
    entries: list[Any] = [logits._sample, logits._argmax, logits._numeric_scan, lanes._pack]
    for made in entries:
        plain = made.py_func
        name, _, kept = plain.__qualname__.rpartition("_")
        again = hashlib.blake2b(digest_size=8)
        plain.__qualname__ = name
        try:
            _absorb(plain, again, set())
        finally:
            plain.__qualname__ = f"{name}_{kept}"
        assert again.hexdigest() == kept, name
