"""Requests drawn at random, and their answers computed from nothing but the model's folder."""

import functools
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from support.native_board import CONTEXT, LANES, ROOT, VOCAB
from support.slow_sampler import Bits, reference

from laneway.adapters.binding import Library
from laneway.adapters.calbin import pack
from laneway.adapters.library import open_library
from laneway.adapters.simulated import recompute
from laneway.engine import Request, Result
from laneway.engine.sampling import Sampling

END_TOKENS = (7, 81, 160, 233, 305, 377, 450, 511)
GREEDY = Sampling(temperature=0.0, seed=0)
_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_k": 200, "top_p": 0.5, "min_p": 1e-4},
    {"temperature": 2.0, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_p": 0.95, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 1.0, "logit_bias": {3: 4.0, 70: -100.0}, "repetition_penalty": 0.9},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(0, VOCAB, 3)), "frequency_penalty": -1.0},
)


@attrs.frozen(kw_only=True)
class Ask:
    """What one client asks for."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0

    def request(self, *, logprobs: int | None = None) -> Request:
        """Return it as a request of model ``m``."""
        return Request(
            model="m",
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            min_tokens=min(self.min_tokens, self.max_tokens),
            logprobs=logprobs,
        )

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end the answer and are no part of it."""
        return self.stop_token_ids if self.ignore_eos else END_TOKENS + self.stop_token_ids

    def draw(self, bits: Bits, output: Sequence[int]) -> int:
        """Return the token that a row of logits gives after what was generated so far."""
        return reference(
            bits,
            self.sampling,
            len(self.prompt) + len(output),
            prompt=self.prompt,
            output=output,
            masked=self.ends if len(output) < self.min_tokens else (),
        )


@attrs.frozen
class Outcome:
    """How a request ended, comparable between the engine and anything else."""

    tokens: tuple[int, ...]
    ending: str


def outcomes(results: Iterable[Result]) -> list[Outcome]:
    """Return tokens and ending of each result."""
    return [Outcome(result.tokens, result.finish_reason) for result in results]


def draw_ask(random: np.random.Generator, *, tokens_max: int = 16) -> Ask:
    """Draw a prompt, a length and one of several sampling settings."""
    prompt = random.integers(0, VOCAB, int(random.integers(1, 24)))
    kind = _SAMPLINGS[random.integers(len(_SAMPLINGS))]
    max_tokens = int(random.integers(1, tokens_max + 1))
    stops = random.integers(0, VOCAB, 20) if random.integers(4) == 0 else np.zeros(0, np.int64)
    return Ask(
        prompt=tuple(prompt.tolist()),
        max_tokens=max_tokens,
        sampling=Sampling(**kind, seed=int(random.integers(2**63))),
        ignore_eos=bool(random.integers(4) == 0),
        stop_token_ids=tuple(stops.tolist()),
        min_tokens=int(random.integers(max_tokens + 1)) if random.integers(3) == 0 else 0,
    )


def pack_with_end_tokens(
    folder: Path, *, batch: tuple[int, ...] = (1, 4), lanes: int = LANES, **options: Any
) -> Path:
    """Pack the small mixture of experts, with end tokens so that some answers stop."""
    source = Path(shutil.copytree(ROOT / "models" / "tiny-moe", folder / "model"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": list(END_TOKENS)}))
    pack(source, folder / "calbin", batch=batch, context=CONTEXT, lanes=lanes, **options)
    return folder / "calbin"


@functools.cache
def _library() -> Library:
    return open_library()


@functools.cache
def answer_alone(calbin: Path, ask: Ask) -> Outcome:
    """Compute an answer from nothing: every position anew, without KV, engine or board."""
    sequence = list(ask.prompt)
    while True:
        bits, _ = recompute(_library(), str(calbin), sequence, vocabulary=VOCAB)
        answer = tuple(sequence[len(ask.prompt) :])
        token = ask.draw(bits, answer)
        if token in ask.ends:
            return Outcome(answer, "stop")
        sequence.append(token)
        if len(answer) + 1 == ask.max_tokens:
            return Outcome((*answer, token), "length")
