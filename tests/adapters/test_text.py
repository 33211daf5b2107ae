"""Text from tokens: against decoding everything at once, and against a naive search for stops."""

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from laneway.adapters.manifest import TOKENIZER_NAME, Manifest
from laneway.adapters.rooted import open_root
from laneway.adapters.stopping import StopMatcher
from laneway.adapters.text import TokenIdsText, TokenizerText, open_text
from laneway.engine.errors import InternalError, ModelError

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "models" / "demo-shakespeare" / TOKENIZER_NAME
VOCABULARY = 2048
SPECIAL = (0, 1, 2)
FIRST = 17

TEXT = TokenizerText(TOKENIZER, eos=[0])
REFERENCE = Tokenizer.from_file(str(TOKENIZER))

byte_tokens = [token for token in range(VOCABULARY) if len(REFERENCE.id_to_token(token) or "") == 1]
token_ids = st.integers(0, VOCABULARY - 1) | st.sampled_from(byte_tokens) | st.sampled_from(SPECIAL)
characters = st.sampled_from("ab \u00e9\u20ac\U0001f600\ufffd")
stops = st.lists(st.text(characters, min_size=1, max_size=4), max_size=4).map(tuple)
# Two letters only, so that stop strings overlap themselves and each other.
letters = st.sampled_from("ab")
letter_stops = st.lists(st.text(letters, min_size=1, max_size=6), max_size=4).map(tuple)


@pytest.fixture
def request_number() -> int:
    return 5


def stream(
    text: TokenizerText, tokens: Sequence[int], stop: tuple[str, ...] = ()
) -> tuple[list[str], str, list[bool]]:
    """Push and take every token; return pieces, rest and stop answers."""
    text.open(1, stop=stop)
    pieces, hits = [], []
    for position, token in enumerate(tokens, FIRST):
        hits.append(text.push(1, position, token))
        pieces.append(text.take(1, position))
    return pieces, text.finish(1), hits


def first_stop(full: str, stop: tuple[str, ...]) -> tuple[int, int] | None:
    """Return begin and end of the stop string that is complete first, the longest of equals."""
    found = [
        (end, begin)
        for string in stop
        for begin in range(len(full))
        if full.startswith(string, begin)
        for end in [begin + len(string)]
    ]
    if not found:
        return None
    end, begin = min(found)
    return begin, end


@given(st.lists(token_ids, max_size=60))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_pieces_are_the_decoded_whole(tokens: list[int]) -> None:
    pieces, rest, hits = stream(TEXT, tokens)
    whole = REFERENCE.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces) + rest == whole
    assert TEXT.decode(tokens) == whole
    assert not any(hits)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_characters_are_released_whole_and_at_once(prompt: str) -> None:
    tokens = TEXT.encode(prompt)
    pieces, rest, _ = stream(TEXT, tokens)
    assert "".join(pieces) == prompt
    assert rest == ""
    sent = b""
    for token, piece in zip(tokens, pieces, strict=True):
        before = len(sent.decode(errors="ignore"))
        sent += b"".join(_bytes_of(token))
        assert len(sent.decode(errors="ignore")) - before == len(piece)


def _bytes_of(token: int) -> list[bytes]:
    """Return a token's bytes, read off what the library gives for it between two known bytes."""
    name = REFERENCE.id_to_token(token) or ""
    if token in SPECIAL:
        return []
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return [bytes([ord(c) if ord(c) in visible else hidden[ord(c) - 256]]) for c in name]


@given(st.text(letters, max_size=30), letter_stops, st.randoms(use_true_random=False))
@settings(max_examples=250, deadline=None, derandomize=True)
def test_matcher_equals_a_naive_search(full: str, stop: tuple[str, ...], random: object) -> None:
    matcher = StopMatcher(stop)
    released, rest = "", full
    while rest:
        size = random.randint(1, 3)  # type: ignore[attr-defined]
        piece, rest = rest[:size], rest[size:]
        released += matcher.add(piece)
        seen = full[: len(full) - len(rest)]
        match = first_stop(seen, stop)
        assert matcher.hit == (match is not None)
        if match is not None:
            assert released == full[: match[0]]
        else:
            longest = max(
                (n for s in stop for n in range(len(s)) if seen.endswith(s[:n])), default=0
            )
            assert released == seen[: len(seen) - longest]
    match = first_stop(full, stop)
    assert released + matcher.end() == (full if match is None else full[: match[0]])


@given(st.lists(st.sampled_from(byte_tokens[:8]) | token_ids, max_size=40), stops)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_stop_strings_end_the_text_of_tokens(tokens: list[int], stop: tuple[str, ...]) -> None:
    pieces, rest, hits = stream(TEXT, tokens, stop)
    whole = REFERENCE.decode(tokens, skip_special_tokens=True)
    match = first_stop(whole, stop)
    text = "".join(pieces) + rest
    assert text == (whole if match is None else whole[: match[0]])
    assert hits == sorted(hits)
    if True in hits:
        assert match is not None
        assert rest == ""
        assert not any(pieces[hits.index(True) + 1 :])


@pytest.mark.parametrize(
    ("full", "stop", "released"),
    [
        ("xaabaaab", ("aaab",), "xaab"),
        ("abababac", ("ababac",), "ab"),
        ("say abc", ("bc", "abc"), "say "),
        ("say abc", ("abc", "bc"), "say "),
        ("abcd", ("abcd", "bc"), "a"),
    ],
)
def test_overlapping_stop_strings(full: str, stop: tuple[str, ...], released: str) -> None:
    matcher = StopMatcher(stop)
    assert "".join(matcher.add(character) for character in full) == released
    assert matcher.hit
    assert matcher.end() == ""


def test_stop_string_over_tokens_is_hit_at_its_last_token() -> None:
    tokens = TEXT.encode("one two, three")
    whole = [REFERENCE.decode(list(tokens[: n + 1])) for n in range(len(tokens))]
    pieces, rest, hits = stream(TEXT, tokens, ("o, t", "zzz"))
    assert "".join(pieces) + rest == "one tw"
    assert hits == ["o, t" in text for text in whole]


def test_held_back_text_comes_at_the_end() -> None:
    pieces, rest, hits = stream(TEXT, TEXT.encode("to be"), ("be or not",))
    assert "".join(pieces) == "to "
    assert rest == "be"
    assert not any(hits)


def test_incomplete_character_becomes_one_replacement() -> None:
    tokens = [t for t in TEXT.encode("\u20ac")][:2]
    assert [_bytes_of(t) for t in tokens] == [[b"\xe2"], [b"\x82"]]
    assert stream(TEXT, tokens) == (["", ""], "\ufffd", [False, False])


@given(st.lists(token_ids, min_size=1, max_size=30), stops, st.integers(0, 30))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_rebuilding_goes_on_as_if_nothing_happened(
    tokens: list[int], stop: tuple[str, ...], cut: int
) -> None:
    cut = min(cut, len(tokens))
    pieces, rest, hits = stream(TEXT, tokens, stop)
    TEXT.open(2, stop=stop, tokens=tokens[:cut])
    assert [TEXT.take(2, place) for place in range(cut)] == pieces[:cut], "told again from 0 on"
    for position, token in enumerate(tokens[cut:], FIRST + cut):
        assert TEXT.push(2, position, token) == hits[position - FIRST]
        assert TEXT.take(2, position) == pieces[position - FIRST]
    assert TEXT.finish(2) == rest


@given(st.lists(token_ids, min_size=1, max_size=20), stops, st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_pushing_again_changes_nothing(
    tokens: list[int], stop: tuple[str, ...], data: st.DataObject
) -> None:
    pieces, rest, hits = stream(TEXT, tokens, stop)
    TEXT.open(3, stop=stop)
    for index, token in enumerate(tokens):
        assert TEXT.push(3, FIRST + index, token) == hits[index]
        again = data.draw(st.integers(0, index))
        assert TEXT.push(3, FIRST + again, tokens[again]) == hits[again]
    for _ in range(2):
        assert [TEXT.take(3, FIRST + i) for i in range(len(tokens))] == pieces
    assert TEXT.finish(3) == rest


def test_a_corrupt_token_is_replaced_until_it_was_taken(request_number: int) -> None:
    right, wrong = TEXT.encode("good text"), TEXT.encode("xq")
    TEXT.open(request_number, stop=("q",))
    TEXT.push(request_number, FIRST, right[0])
    TEXT.push(request_number, FIRST + 1, wrong[0])
    TEXT.push(request_number, FIRST + 2, wrong[-1])
    pieces = []
    for position, token in enumerate(right, FIRST):
        assert not TEXT.push(request_number, position, token)
        pieces.append(TEXT.take(request_number, position))
    assert "".join(pieces) == "good text"
    with pytest.raises(InternalError, match=r"request/5: position 18 was delivered as token"):
        TEXT.push(request_number, FIRST + 1, wrong[0])
    TEXT.drop(request_number)


def test_gaps_and_unknown_requests(request_number: int) -> None:
    TEXT.open(request_number, stop=())
    assert TEXT.push(request_number, FIRST, 300) is False
    with pytest.raises(InternalError, match=r"request/5: position 19 pushed, 18 is the next"):
        TEXT.push(request_number, FIRST + 2, 300)
    with pytest.raises(InternalError, match=r"request/5: position 16 pushed, 18 is the next"):
        TEXT.push(request_number, FIRST - 1, 300)
    with pytest.raises(InternalError, match=r"request/5: position 18 was not pushed"):
        TEXT.take(request_number, FIRST + 1)
    TEXT.drop(request_number)
    TEXT.drop(request_number)
    assert TEXT.push(request_number, FIRST + 1, 300) is False
    with pytest.raises(InternalError, match=r"request/5: its text is not open"):
        TEXT.take(request_number, FIRST)
    with pytest.raises(InternalError, match=r"request/5: its text is not open"):
        TEXT.finish(request_number)


def test_prompts_and_stop_strings_that_are_no_text() -> None:
    assert TEXT.encode("") == ()
    assert TEXT.encode("<|im_start|>hi")[0] == 1
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        TEXT.encode("ab\ud800c")
    with pytest.raises(ValueError, match="empty"):
        TEXT.open(1, stop=("a", ""))
    with pytest.raises(ValueError, match="lone surrogate"):
        TEXT.open(1, stop=("a\udfff",))
    assert "".join(stream(TEXT, TEXT.encode("aba"), ("b", "b"))[0]) == "a"


def test_content_path_and_rubbish() -> None:
    from_content = TokenizerText(TOKENIZER.read_bytes())
    assert from_content.encode("to be") == TEXT.encode("to be")
    assert from_content.has_text
    with pytest.raises(ValueError, match=r"tokenizer\.json: no tokenizer"):
        TokenizerText(b"{}")
    with pytest.raises(ValueError, match="no tokenizer"):
        TokenizerText(TOKENIZER.with_name("missing.json"))


def test_model_folders_with_and_without_tokenizer(tmp_path: Path) -> None:
    manifest = cast(Manifest, SimpleNamespace(eos_token_ids=(0,)))
    text = open_text(open_root(TOKENIZER.parent), manifest)
    assert text.encode("to be") == TEXT.encode("to be")
    assert not open_text(open_root(ROOT / "models" / "tiny-dense"), manifest).has_text
    (tmp_path / TOKENIZER_NAME).write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer\.json: no tokenizer"):
        open_text(open_root(tmp_path), manifest)


def test_end_tokens_have_no_text_even_if_not_special() -> None:
    plain = TEXT.encode("z")[0]
    text = TokenizerText(TOKENIZER, eos=[plain])
    tokens = [*TEXT.encode("a"), plain]
    assert stream(text, tokens)[:2] == (["a", ""], "")
    assert text.decode(tokens) == "a"


def test_added_tokens_read_as_they_are_written() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.add_tokens([AddedToken("<tool call \u20ac>", special=False)])
    text = TokenizerText(tokenizer.to_str().encode())
    tokens = text.encode("a<tool call \u20ac>b")
    assert tokens[1] == VOCABULARY
    assert stream(text, tokens)[0] == ["a", "<tool call \u20ac>", "b"]
    assert text.decode(tokens) == "a<tool call \u20ac>b"


def test_vocabularies_of_another_kind() -> None:
    """Words with a mark for the space, and single bytes for what has no word."""
    words = {"<unk>": 0, "\u2581to": 1, "\u2581be": 2, "!": 3}
    names = {**words, **{f"<0x{byte:02X}>": 4 + byte for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(names, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    text = TokenizerText(tokenizer.to_str().encode())
    euro = [4 + byte for byte in "\u20ac".encode()]
    pieces, rest, _ = stream(text, [1, 2, *euro, 3, 2, *euro[:2]])
    assert pieces == ["to", " be", "", "", "\u20ac", "!", " be", "", ""]
    assert rest == "\ufffd\ufffd"
    assert "".join(pieces) + rest == text.decode([1, 2, *euro, 3, 2, *euro[:2]])


def test_without_a_tokenizer() -> None:
    text = TokenIdsText()
    assert not text.has_text
    with pytest.raises(ValueError, match="no tokenizer: give the prompt as token ids"):
        text.encode("hello")
    with pytest.raises(ValueError, match="no tokenizer: it cannot look for stop strings"):
        text.open(1, stop=("x",))
    text.open(1, stop=(), tokens=[1])
    assert text.push(1, 0, 5) is False
    assert text.take(1, 0) == text.finish(1) == ""
    text.drop(1)


def test_threads_push_and_take_side_by_side() -> None:
    tokens = TEXT.encode("To be, or not to be, that is the question: " * 40)
    pushed = threading.Semaphore(0)
    TEXT.open(8, stop=())

    def push_all() -> None:
        for position, token in enumerate(tokens):
            TEXT.push(8, position, token)
            pushed.release()

    thread = threading.Thread(target=push_all)
    thread.start()
    pieces = []
    for position in range(len(tokens)):
        assert pushed.acquire(timeout=30)
        pieces.append(TEXT.take(8, position))
    thread.join()
    assert "".join(pieces) + TEXT.finish(8) == REFERENCE.decode(list(tokens))


def test_text_of_a_token_that_was_never_delivered_is_not_flushed() -> None:
    text = TokenizerText(TOKENIZER)
    whole = text.encode("never <stop here")
    text.open(1, stop=("<stop>",))
    for position, token in enumerate(whole):
        text.push(1, position, token)
    kept = len(text.encode("never"))
    released = "".join(text.take(1, position) for position in range(kept))
    assert released + text.finish(1, tokens=kept) == text.decode(whole[:kept])


@pytest.mark.parametrize("least", range(7))
def test_stop_strings_are_looked_for_from_the_least_number_of_tokens_on(least: int) -> None:
    """Tokens a b a b a b, stop string "b": the first "b" at or after token ``least`` ends it."""
    a, b = (REFERENCE.encode(letter).ids[0] for letter in "ab")
    tokens = [a, b, a, b, a, b]
    text = TokenizerText(TOKENIZER, eos=[0])
    text.open(1, stop=("b",), min_tokens=least)
    hits = [text.push(1, position, token) for position, token in enumerate(tokens)]
    first = next(i for i in range(6) if tokens[i] == b and i + 1 >= least)
    assert hits == [i >= first for i in range(6)]
    released = "".join(text.take(1, position) for position in range(6))
    assert released + text.finish(1) == "ababab"[:first]


def test_without_stop_strings_text_is_made_when_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device waits for whoever pushes, so a push does no more than it must."""
    text = TokenizerText(TOKENIZER)
    decoded: list[int] = []
    make = text._detokeniser

    class Counting:
        def __init__(self) -> None:
            self._real = make()

        def add(self, token: int) -> str:
            decoded.append(token)
            return self._real.add(token)

        def end(self) -> str:
            return self._real.end()

    monkeypatch.setattr(text, "_detokeniser", Counting)
    tokens = text.encode("What was pushed and not taken is told at the end.")
    text.open(1, stop=())
    for position, token in enumerate(tokens):
        assert not text.push(1, position, token)
    assert decoded == []
    taken = [text.take(1, 1), text.take(1, 0)]
    assert decoded == list(tokens)
    rest = [text.take(1, position) for position in range(2, len(tokens))]
    assert "".join([taken[1], taken[0], *rest, text.finish(1)]) == text.decode(tokens)
    assert decoded == list(tokens), "each token is worked out once"
