"""Golden runs are computed, and read from their file, once for each model of a process.

Both are functions of bytes alone, and cost more than most of what the tests do with a model: a test
packs and loads a model of its own, which is the one that the test before it had. What comes out of
another file, or of another question, is still made anew. ``adapters/test_reference.py`` and
``adapters/test_pack_refusals.py`` call the functions themselves.
"""

import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import pytest

from laneway.adapters import calbin, golden, packing, probing, reference, validating
from laneway.adapters.golden import Golden
from laneway.adapters.manifest import BYTES_MAX, GOLDEN_NAME, Shape
from laneway.adapters.rooted import Root
from laneway.adapters.tensors import StoredParameters
from laneway.engine.errors import ModelError

READERS = (calbin, packing, probing, validating)


def remember_golden_runs(patch: pytest.MonkeyPatch) -> None:
    """Let the product remember what it made of which bytes."""
    made: dict[Hashable, Golden] = {}

    def remember(key: Hashable, make: Callable[[], Golden]) -> Golden:
        if key not in made:
            made[key] = make()
        return made[key]

    def make(shape: Shape, parameters: StoredParameters, **rest: Any) -> Golden:
        file = parameters._file
        place = file.tell()
        file.seek(0)
        key = ("make", digest(file.read()), shape, *sorted(rest.items()))
        file.seek(place)
        return remember(key, lambda: reference.make_golden(shape, parameters, **rest))

    def load(root: Root, shape: Shape, *, context: int | None = None) -> Golden:
        def read() -> Golden:
            return golden.load_golden(root, shape, context=context)

        try:
            raw = root.read(GOLDEN_NAME, bytes_max=BYTES_MAX[GOLDEN_NAME])
        except ModelError:
            return read()
        return remember(("load", digest(raw), shape, context), read)

    patch.setattr(packing, "make_golden", make)
    for module in READERS:
        patch.setattr(module, "load_golden", load)


def digest(raw: bytes) -> bytes:
    """Return what stands for the bytes of a file."""
    return hashlib.blake2b(raw).digest()
