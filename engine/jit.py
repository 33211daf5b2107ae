"""Compile hot path functions with numba, typed, without the GIL, with a disk cache that is right.

`inner` marks a function that only other compiled functions call; it is compiled
into its callers. `entry` marks a function that Python calls; its machine code is kept on disk.
numba's disk cache notices a change of the file that holds the entry point but not of the functions
the entry point calls, so an edit there would go on running the old code. An entry point therefore
carries in its cache name a digest of everything it can reach: bytecode, constants and compiler
options of itself and of each inner function, however deep, and of what builds intrinsics.
"""

import builtins
import dis
import hashlib
from collections.abc import Callable
from types import CodeType, FunctionType
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


def inner_inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile as `inner`, and copy it into every place that calls it.

    Why: to hand over an array costs more than the few instructions of a small function.
    """
    compiled = numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)
    return cast(Callable[P, R], compiled)


def entry(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that Python calls, and keep the machine code on disk."""
    digest = hashlib.blake2b(digest_size=8)
    _absorb(function, digest, set())
    function.__qualname__ = f"{function.__qualname__}_{digest.hexdigest()}"
    return cast(Callable[P, R], numba.njit(nogil=True, cache=True)(function))


def _absorb(function: Any, digest: "hashlib.blake2b", seen: set[str]) -> None:
    """Feed bytecode, constants and, in turn, every reachable function into a digest.

    Why also functions that are not compiled: an intrinsic is built by them.
    """
    plain = getattr(function, "py_func", getattr(function, "__wrapped__", function))
    code = getattr(plain, "__code__", None)
    name = f"{getattr(plain, '__module__', '')}.{getattr(plain, '__qualname__', '')}"
    if not isinstance(code, CodeType) or name in seen:
        return
    seen.add(name)
    digest.update(repr(getattr(function, "targetoptions", None)).encode())
    _absorb_code(code, plain.__globals__, digest, seen)


def _globals_of(code: CodeType) -> set[str]:
    return {
        one.argval
        for one in dis.get_instructions(code)
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def _absorb_code(
    code: CodeType, scope: dict[str, Any], digest: "hashlib.blake2b", seen: set[str]
) -> None:
    """Feed code, the code of functions made inside it, and what both name, into a digest."""
    for used in _globals_of(code):
        if used not in scope and not hasattr(builtins, used):
            raise NameError(
                f"{code.co_name} uses {used}, which is not defined yet: an entry point stands"
                " behind all that it reaches, or its machine code outlives a change of that"
            )
    digest.update(code.co_code)
    plain = tuple(constant for constant in code.co_consts if not isinstance(constant, CodeType))
    digest.update(repr((plain, code.co_names)).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _absorb_code(constant, scope, digest, seen)
    for used in code.co_names:
        value = scope.get(used)
        if isinstance(value, bool | int | float | tuple | np.generic):
            digest.update(f"{used}={value!r}".encode())
        elif isinstance(value, FunctionType) or hasattr(value, "__wrapped__"):
            _absorb(value, digest, seen)
