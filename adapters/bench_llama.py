"""llama.cpp's sampler chain as a peer of the sampling benchmark.

It is driven through the C API that the wheel ``xllamacpp`` exports, and does per row what its
server does for every slot: widen BF16 to float32, fill one candidate for each token of the
vocabulary, run the chain. The filling is compiled, so that the peer is not charged for Python.
"""

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numba
import numpy as np
from numpy.typing import NDArray

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
SEED = 1
LAST_TOKENS = 64
REPETITION = 1.1
PENALTY = 0.1


class _Candidates(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    ]


class _ChainParams(ctypes.Structure):
    _fields_ = [("no_perf", ctypes.c_bool)]


class LlamaChains:
    """Sampler chains of one vocabulary size; for one thread."""

    def __init__(self, library: ctypes.PyDLL, vocabulary: int) -> None:
        self._library = library
        self._declare()
        self._row = np.zeros(vocabulary, CANDIDATE)
        self._candidates = _Candidates(data=self._row.ctypes.data, size=vocabulary)

    @classmethod
    def open(cls, vocabulary: int) -> Self | None:
        """Return the peer, or None where its wheel is not installed."""
        spec = importlib.util.find_spec("xllamacpp")
        if spec is None or spec.origin is None:
            return None
        found = sorted(Path(spec.origin).parent.glob("xllamacpp*.so"))
        if not found:
            return None
        return cls(ctypes.PyDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL), vocabulary)

    def _declare(self) -> None:
        pointer = ctypes.c_void_p
        number = ctypes.c_float
        for name, result, arguments in (
            ("chain_init", pointer, [_ChainParams]),
            ("chain_add", None, [pointer, pointer]),
            ("apply", None, [pointer, pointer]),
            ("init_greedy", pointer, []),
            ("init_dist", pointer, [ctypes.c_uint32]),
            ("init_top_k", pointer, [ctypes.c_int32]),
            ("init_top_p", pointer, [number, ctypes.c_size_t]),
            ("init_temp", pointer, [number]),
            ("init_min_p", pointer, [number, ctypes.c_size_t]),
            ("init_penalties", pointer, [ctypes.c_int32, ctypes.c_int32, number, number, number]),
            ("accept", None, [pointer, ctypes.c_int32]),
        ):
            function = getattr(self._library, f"llama_sampler_{name}")
            function.restype = result
            function.argtypes = arguments

    def _chain(self, *stages: int) -> int:
        library = self._library
        chain: int = library.llama_sampler_chain_init(_ChainParams(True))
        for stage in stages:
            library.llama_sampler_chain_add(chain, stage)
        return chain

    def greedy(self) -> int:
        """Return a chain that takes the most likely token."""
        return self._chain(self._library.llama_sampler_init_greedy())

    def nucleus(self) -> int:
        """Return a chain of top_k 20, top_p 0.95 and temperature 0.7, in the peer's own order."""
        library = self._library
        return self._chain(
            library.llama_sampler_init_top_k(20),
            library.llama_sampler_init_top_p(0.95, 1),
            library.llama_sampler_init_temp(0.7),
            library.llama_sampler_init_dist(SEED),
        )

    def full(self, history: Sequence[int]) -> int:
        """Return the nucleus chain with min_p and penalties over its default of 64 last tokens."""
        library = self._library
        chain = self._chain(
            library.llama_sampler_init_penalties(
                len(self._row), LAST_TOKENS, REPETITION, PENALTY, PENALTY
            ),
            library.llama_sampler_init_top_k(20),
            library.llama_sampler_init_top_p(0.95, 1),
            library.llama_sampler_init_min_p(0.05, 1),
            library.llama_sampler_init_temp(0.7),
            library.llama_sampler_init_dist(SEED),
        )
        for token in history:
            library.llama_sampler_accept(chain, token)
        return chain

    def sample(self, chain: int, bits: NDArray[np.uint16]) -> int:
        """Return the token that a chain draws from a row."""
        _fill(bits, self._row["id"], self._row["logit"].view(np.uint32))
        self._candidates.size = len(bits)
        self._candidates.selected = -1
        self._candidates.sorted = False
        self._library.llama_sampler_apply(chain, ctypes.addressof(self._candidates))
        return int(self._row["id"][self._candidates.selected])


@numba.njit(cache=True)
def _fill(bits: NDArray[np.uint16], ids: NDArray[np.int32], logits: NDArray[np.uint32]) -> None:
    for index in range(len(bits)):
        ids[index] = index
        logits[index] = np.uint32(bits[index]) << np.uint32(16)
