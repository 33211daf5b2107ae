"""A "model" that is a hash: the token after a sequence is a function of sequence and seed.

A mixed-up lane, a lost or repeated token, or a wrong start shows in every later token.
"""

import hashlib
from collections.abc import Sequence

from laneway.engine.inputs import (
    ArtifactValidated,
    ChipFacts,
    HealthFacts,
    SubmodelFacts,
    Trial,
)

VOCABULARY = 64
END_TOKEN = 0
CONTEXT = 48
LANES = 8


def next_token(sequence: Sequence[int], seed: int, masked: Sequence[int] = ()) -> int:
    """Return the token that follows a sequence: never the end token unless the hash says so.

    The first byte of the hash that is no masked token counts; eight are enough for a few of them.
    """
    text = f"{seed}:{','.join(map(str, sequence))}".encode()
    drawn = (byte % VOCABULARY for byte in hashlib.blake2b(text, digest_size=8).digest())
    return next(token for token in drawn if token not in masked)


def answer(
    prompt: Sequence[int],
    *,
    seed: int,
    max_tokens: int,
    ignore_eos: bool = False,
    stop_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """Return the tokens of a request run alone: the independent reference."""
    sequence = list(prompt)
    while len(sequence) < len(prompt) + max_tokens:
        ends = [*stop_token_ids, *([] if ignore_eos else [END_TOKEN])]
        short = len(sequence) < len(prompt) + min_tokens
        token = next_token(sequence, seed, ends if short else ())
        if token in ends:
            break
        sequence.append(token)
    return sequence[len(prompt) :]


class WordText:
    """Text port where token n reads ``<n>``."""

    def __init__(self) -> None:
        self.opened: dict[int, tuple[str, ...]] = {}
        self.searched_from: dict[int, int] = {}
        self.pushed: dict[int, list[int]] = {}

    has_text = True

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(ord(letter) % VOCABULARY for letter in text)

    def open(
        self,
        request: int,
        *,
        stop: tuple[str, ...],
        tokens: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self.opened[request] = stop
        self.searched_from[request] = max(min_tokens - 1, 0)
        self.pushed[request] = list(tokens)

    def push(self, request: int, position: int, token: int) -> bool:
        if request not in self.pushed:
            return False
        if self.pushed[request][position : position + 1] != [token]:
            del self.pushed[request][position:]
            self.pushed[request].append(token)
        searched = self.pushed[request][self.searched_from[request] :]
        text = "".join(f"<{t}>" for t in searched)
        return any(stop in text for stop in self.opened[request])

    def take(self, request: int, position: int, token: int | None = None) -> str:
        if token is not None:
            self.push(request, position, token)
        return f"<{self.pushed[request][position]}>"

    def finish(self, request: int, *, tokens: int | None = None) -> str:
        self.drop(request)
        return ""

    def drop(self, request: int) -> None:
        self.opened.pop(request, None)
        self.pushed.pop(request, None)


def artifact(model: int) -> ArtifactValidated:
    """Return facts of the fake's one artifact."""
    return ArtifactValidated(
        model=model,
        name="fake",
        sha256="0" * 64,
        architecture="fake",
        layout="single",
        lane_rule="length_zero",
        context_tokens=CONTEXT,
        vocabulary=VOCABULARY,
        lane_count=LANES,
        end_tokens=(END_TOKEN,),
        submodels=(
            SubmodelFacts(name="prefill_b1", task="prefill", batch_max=1, tokens_max=CONTEXT),
            SubmodelFacts(name="decode_b1", task="decode", batch_max=1, tokens_max=1),
        ),
        chip_bytes=(100,),
        chips=(ChipFacts(total_bytes=1000, used_bytes=0),),
        trials=(
            Trial(origin="golden", prompt=(1, 2, 3), forced=(4, 5)),
            Trial(origin="warmup", prompt=(9,), forced=()),
        ),
    )


def healthy(now_ns: int) -> HealthFacts:
    """Return a healthy answer."""
    return HealthFacts(
        state="ok",
        device_epoch=1,
        sticky=0,
        advised=0,
        observed_ns=now_ns,
        last_progress_ns=now_ns,
        used_bytes=(0,),
        counters=(),
    )
