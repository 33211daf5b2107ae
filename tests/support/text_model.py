"""The small mixture of experts with a tokenizer, and what each request must be answered alone.

The tokenizer is made here: 256 bytes and 256 pairs of letters, so that every token has a text and
stop strings of one or two letters are hit often. Tokens come from recomputing every position from
nothing (``answer_alone``); the text side is the tokenizers library and a plain search.
"""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import attrs
from support.asking import END_TOKENS, Ask, answer_alone
from support.native_board import CONTEXT, LANES, ROOT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from laneway.adapters.calbin import pack
from laneway.engine import Result
from laneway.engine.sampling import Sampling

LETTERS = "abcdefghijklmnop"
_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def tokenizer() -> Tokenizer:
    """Make the tokenizer: ids 0 to 255 are bytes, the rest pairs of letters."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in LETTERS for b in LETTERS]
    vocabulary = {name: index for index, name in enumerate([*names, *(a + b for a, b in pairs)])}
    made = Tokenizer(models.BPE(vocabulary, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


@functools.cache
def text_calbin(batches: tuple[int, ...] = (1, 4)) -> Path:
    """Pack the model for these batches once for this process; nobody changes it.

    The artifact of other batches has the same weights, so the answers of runs alone are the same.
    """
    _KEPT.append(tempfile.TemporaryDirectory(prefix="laneway-model-"))
    folder = Path(_KEPT[-1].name)
    source = Path(shutil.copytree(ROOT / "models" / "tiny-moe", folder / "model"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": list(END_TOKENS)}))
    tokenizer().save(str(source / "tokenizer.json"))
    lanes = max(LANES, batches[-1] + 2)
    pack(source, folder / "calbin", batch=batches, context=CONTEXT, lanes=lanes)
    return folder / "calbin"


@attrs.frozen(kw_only=True)
class Wish:
    """What one client asks for: ``prompt`` is text or token ids."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def tokens(self) -> tuple[int, ...]:
        """Return the prompt as token ids."""
        if isinstance(self.prompt, str):
            return tuple(tokenizer().encode(self.prompt).ids)
        return self.prompt


@attrs.frozen
class Answer:
    """Tokens, text and ending of a request that is served alone."""

    tokens: tuple[int, ...]
    text: str
    ending: str


@functools.cache
def expected(wish: Wish) -> Answer:
    """Compute an answer without engine, board or KV."""
    ask = Ask(
        prompt=wish.tokens(),
        max_tokens=wish.max_tokens,
        sampling=wish.sampling,
        ignore_eos=wish.ignore_eos,
    )
    alone = answer_alone(text_calbin(), ask)
    for count in range(1, len(alone.tokens) + 1):
        text = _decode(alone.tokens[:count])
        found = [place for stop in wish.stop if (place := text.find(stop)) >= 0]
        if found:
            return Answer(alone.tokens[:count], text[: min(found)], "stop")
    return Answer(alone.tokens, _decode(alone.tokens), alone.ending)


def _decode(tokens: tuple[int, ...]) -> str:
    return str(tokenizer().decode([token for token in tokens if token not in END_TOKENS]))


def check_result(wish: Wish, result: Result) -> None:
    """I7: an answer is that of a run alone; what ended early is a beginning of it."""
    if not result.tokens and result.finish_reason not in ("stop", "length"):
        return
    alone = expected(wish)
    if result.finish_reason in ("stop", "length"):
        got = Answer(result.tokens, result.text or "", result.finish_reason)
        assert got == alone, f"I7: {wish}: {got} instead of {alone}"
        assert result.error is None
    else:
        assert result.tokens == alone.tokens[: len(result.tokens)], f"I7: {wish}: {result}"
        assert result.error is not None, result
