"""Compile hot path functions with numba, typed, without the GIL, with a disk cache that is right.

`inner` marks a function that only other compiled functions call; it is compiled
into its callers. `entry` marks a function that Python calls; its machine code is kept on disk.
numba's disk cache notices a change of the file that holds the entry point but not of the functions
the entry point calls, so an edit there would go on running the old code. An entry point therefore
carries in its cache name a digest of everything it can reach: bytecode, constants and compiler
options of itself and of each inner function, however deep.
"""

import hashlib
from collections.abc import Callable
from types import CodeType
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


def inner(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that other compiled functions call.

    Why numpy's error model: a division by zero gives an infinity, which its caller looks for, and
    does not raise out of a loop over rows.
    """
    return cast(Callable[P, R], numba.njit(nogil=True, error_model="numpy")(function))


def inner_fused(function: Callable[P, R]) -> Callable[P, R]:
    """Compile as `inner`, with multiply and add fused where the processor can.

    Why: for estimates whose error the caller bounds; results differ between processors in the last
    bits. Never for a result, and never with numba's full fastmath, which reorders sums. What such a
    function calls is compiled so too: it must not share helpers with functions that give results.
    """
    return cast(Callable[P, R], numba.njit(nogil=True, fastmath={"contract"})(function))


def entry(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that Python calls, and keep the machine code on disk."""
    digest = hashlib.blake2b(digest_size=8)
    _absorb(function, digest, set())
    function.__qualname__ = f"{function.__qualname__}_{digest.hexdigest()}"
    return cast(Callable[P, R], numba.njit(nogil=True, cache=True)(function))


def _absorb(function: Any, digest: "hashlib.blake2b", seen: set[str]) -> None:
    """Feed bytecode, constants and, in turn, every reachable inner function into a digest."""
    plain = getattr(function, "py_func", function)
    code = getattr(plain, "__code__", None)
    name = f"{getattr(plain, '__module__', '')}.{getattr(plain, '__qualname__', '')}"
    if not isinstance(code, CodeType) or name in seen:
        return
    seen.add(name)
    digest.update(code.co_code)
    digest.update(repr((code.co_consts, code.co_names)).encode())
    digest.update(repr(getattr(function, "targetoptions", None)).encode())
    for used in code.co_names:
        value = plain.__globals__.get(used)
        if isinstance(value, bool | int | float | tuple | np.generic):
            digest.update(f"{used}={value!r}".encode())
        elif hasattr(value, "py_func"):
            _absorb(value, digest, seen)
