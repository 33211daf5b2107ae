"""The suite ``sampling``.

BF16 logits of a large vocabulary to tokens, against the read limit and llama.cpp (K1 to K4).

Every step reads rows that are not in a cache, as after a DMA: the rows are taken in turn from a
ring larger than the last level. The read limit is one pass over the same bytes. The peer is
llama.cpp's sampler chain from the wheel ``xllamacpp``, driven through its C API; it is left out
where the wheel is not installed.
"""

from collections.abc import Callable, Iterator

import numba
import numpy as np
from numpy.typing import NDArray

from laneway.adapters.bench_llama import LlamaChains
from laneway.adapters.measuring import Figure, at_most, compared, interleave, times_faster
from laneway.adapters.sampling_threads import SamplingThreads
from laneway.engine.logits import sample_rows
from laneway.engine.logprobs import allocate_logprobs
from laneway.engine.sampling import Sampling
from laneway.engine.sampling_arrays import SamplerScratch, SamplingArrays

VOCABULARY = 151_936
ROWS = 8
RING_BYTES = 256 << 20
SEED = 1

GREEDY = Sampling(temperature=0.0, seed=SEED)
NUCLEUS = Sampling(temperature=0.7, top_k=20, top_p=0.95, seed=SEED)
FULL = Sampling(
    temperature=0.7,
    top_k=20,
    top_p=0.95,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    seed=SEED,
)
HISTORY_TOKENS = 512
TOP_P = Sampling(temperature=0.8, top_p=0.95, seed=SEED)


def run(tell: Callable[[str], None] = lambda text: None) -> Iterator[Figure]:
    """Measure; yields a figure as soon as it is there."""
    for shape, make in (("peaked", _peaked_row), ("flat", _flat_row)):
        tell(f"sampling, {shape} rows")
        ring = _Ring(make)
        contenders: dict[str, Callable[[], object]] = {
            "read": ring.read,
            "top_p": ring.sampler(TOP_P),
        }
        peer = LlamaChains.open(VOCABULARY) if shape == "peaked" else None
        if shape == "peaked":
            contenders |= {
                "greedy": ring.sampler(GREEDY),
                "nucleus": ring.sampler(NUCLEUS),
                "full": ring.sampler(FULL),
                "full + logprobs": ring.sampler(FULL, logprobs=5),
            }
        if peer is not None:
            contenders |= {
                "llama greedy": ring.peer(peer, peer.greedy()),
                "llama nucleus": ring.peer(peer, peer.nucleus()),
                "llama full": ring.peer(peer, peer.full(ring.history)),
            }
        both = SamplingThreads(VOCABULARY, 2)
        if shape == "peaked":
            contenders["full, two threads"] = ring.sampler(FULL, threads=both)
        took = interleave(contenders)
        both.close()
        yield from _figures(shape, took)


def _figures(shape: str, took: dict[str, float]) -> Iterator[Figure]:
    limit = "read of the same bytes"
    if shape == "peaked":
        yield at_most("K1", took["greedy"], "us/step", limit, took["read"], limit=1.4)
        yield at_most("K2", took["nucleus"], "us/step", limit, took["read"], limit=2.0)
        yield at_most("K3", took["full"], "us/step", limit, took["read"], limit=3.0)
        two = took["full, two threads"]
        yield compared("K3/two threads", two, "us/step", "one thread", took["full"])
        logged = took["full + logprobs"]
        yield at_most("K4/logprobs", logged, "us/step", limit, took["read"], limit=8.0)
        if "llama greedy" in took:
            peer = "llama.cpp sampler chain"
            yield times_faster(
                "K1/llama", took["greedy"], "us/step", peer, took["llama greedy"], limit=10
            )
            yield times_faster(
                "K2/llama", took["nucleus"], "us/step", peer, took["llama nucleus"], limit=7
            )
            yield times_faster(
                "K3/llama", took["full"], "us/step", peer, took["llama full"], limit=15
            )
    bound = 8.0 if shape == "peaked" else 40.0
    yield at_most(f"K4/{shape}", took["top_p"], "us/step", limit, took["read"], limit=bound)


class _Ring:
    """Rows in turn, always cold, and what runs over them."""

    def __init__(self, make: Callable[[np.random.Generator], NDArray[np.float32]]) -> None:
        generator = np.random.default_rng(SEED)
        bases = [_round_to_bf16(make(generator)) for _ in range(ROWS)]
        count = max(2, RING_BYTES // (ROWS * VOCABULARY * 2))
        self._steps = np.empty((count, ROWS, VOCABULARY), np.uint16)
        for index, row in enumerate(self._steps.reshape(-1, VOCABULARY)):
            row[:] = np.roll(bases[index % ROWS], 977 * index)
        self._words = self._steps.view(np.uint64)
        self.history = generator.choice(VOCABULARY, HISTORY_TOKENS).tolist()
        self._next = 0
        self._scratch = SamplerScratch.allocate(VOCABULARY)
        self._tokens = np.empty(ROWS, np.int32)
        self._status = np.empty(ROWS, np.int8)

    def _turn(self) -> int:
        self._next = (self._next + 1) % len(self._steps)
        return self._next

    def read(self) -> int:
        """Read every byte of one step."""
        return int(_read_words(self._words[self._turn()].reshape(-1)))

    def sampler(
        self,
        sampling: Sampling,
        *,
        logprobs: int | None = None,
        threads: SamplingThreads | None = None,
    ) -> Callable[[], object]:
        """Return a step of our kernels; half of the history is prompt, half is output."""
        wanted = SamplingArrays.allocate(ROWS)
        half = HISTORY_TOKENS // 2
        for row in range(ROWS):
            wanted.want_token(
                row,
                sampling,
                position=HISTORY_TOKENS + row,
                prompt=self.history[:half],
                output=self.history[half:],
                logprobs=logprobs,
            )
        if threads is not None:
            return lambda: threads.sample(
                self._steps[self._turn()], wanted, self._tokens, self._status
            )
        room = None if logprobs is None else allocate_logprobs(ROWS)
        return lambda: sample_rows(
            self._steps[self._turn()], wanted, self._scratch, self._tokens, self._status, room
        )

    def peer(self, chains: LlamaChains, chain: int) -> Callable[[], object]:
        """Return a step of the peer: every row through one chain."""
        return lambda: [chains.sample(chain, row) for row in self._steps[self._turn()]]


@numba.njit(cache=True, nogil=True)
def _read_words(words: NDArray[np.uint64]) -> np.uint64:
    """Read everything, in four streams at once: one alone does not use the memory's bandwidth."""
    quarter = len(words) // 4
    a = b = c = d = np.uint64(0)
    for index in range(quarter):
        a |= words[index]
        b |= words[quarter + index]
        c |= words[2 * quarter + index]
        d |= words[3 * quarter + index]
    return a | b | c | d


def _round_to_bf16(row: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(row, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _peaked_row(generator: np.random.Generator) -> NDArray[np.float32]:
    """Return logits as a language model gives them: a few likely tokens far above the rest."""
    row = generator.normal(-1.0, 2.3, VOCABULARY)
    head = generator.choice(VOCABULARY, 400, replace=False)
    likely = 22.0 - 1.9 * np.log(np.arange(1, 401)) + generator.normal(0, 0.6, 400)
    row[head] = np.maximum(row[head], likely)
    return row.astype(np.float32)


def _flat_row(generator: np.random.Generator) -> NDArray[np.float32]:
    return generator.normal(0.0, 1.0, VOCABULARY).astype(np.float32)
