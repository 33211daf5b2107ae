"""Requests that cannot be served are refused alone, in words, and nobody else notices (I12).

Source: R7.2, R14.1.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_line import DEMO, MODELS, laneway
from support.fake_device import FakeDevice, answer
from support.one_line import is_the_line

from laneway.adapters.calbin import pack
from laneway.engine import Engine, Limits, ModelError, Request, Sampling
from laneway.engine.errors import EngineClosedError, RequestRejectedError
from laneway.journal import open_journal

ANSWER_IS_NO = 1
VIRTUAL = "sim:?clock=virtual"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small model, packed, and the demo model, packed."""
    folder = tmp_path_factory.mktemp("bad")
    pack(MODELS / "tiny-dense", folder / "tiny")
    pack(DEMO, folder / "demo")
    return folder


def ask(**values: Any) -> Request:
    """Make a request of one token, with these values."""
    return Request(**({"model": "m", "prompt": (1,)} | values))


def sample(**values: Any) -> Sampling:
    """Make sampling parameters, of any type."""
    return Sampling(**values)


def rows_of(model: Path, *words: object) -> list[dict[str, Any]]:
    called = laneway("run", "--model", model, "--device", VIRTUAL, "--json", "--seed", 1, *words)
    assert (called.code, called.err) == (ANSWER_IS_NO, ""), called
    return called.rows


def test_bad_prompts_are_told_one_by_one_and_the_others_are_answered(packed: Path) -> None:
    """Text and ids, empty, too long, unknown, no text at all: each its own line (I12)."""
    words = {
        "": ("empty_prompt", "request/2: the prompt has no tokens: give at least one"),
        "a" * 3000: ("too_long", "request/3: prompt 3000 + max_tokens 4 = 3004 tokens; the model…"),
        "\udcff": (
            "prompt",
            "the prompt has a lone surrogate at character 0, which is no character",
        ),
    }
    ids = {
        "99999": ("unknown_token", "request/…: token 99999 is not in 0..…"),
        "-1": ("unknown_token", "request/…: token -1 is not in 0..…"),
        f"{2**31 - 1}": ("unknown_token", f"request/…: token {2**31 - 1} is not in 0..…"),
    }
    good = ("ROMEO.", "5,6,7")
    alone = (
        laneway(
            "run",
            "--model",
            packed / "demo",
            "--device",
            VIRTUAL,
            "--json",
            "--seed",
            1,
            "--max-tokens",
            4,
            good[0],
            "--prompt-tokens",
            good[1],
        )
        .done()
        .rows
    )
    asked: list[object] = ["--max-tokens", 4, good[0], *words]
    for each in (*ids, good[1]):
        asked += ["--prompt-tokens", each]
    rows = rows_of(packed / "demo", *asked)
    assert [rows[0]["tokens"], rows[-1]["tokens"]] == [row["tokens"] for row in alone]
    assert [rows[0]["error"], rows[-1]["error"]] == [None, None]
    for row, (type_, line) in zip(rows[1:-1], (*words.values(), *ids.values()), strict=True):
        assert row["error"]["type"] == type_, row
        assert is_the_line(row["error"]["message"], line), row
        assert (row["tokens"], row["finish_reason"]) == ([], "error")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--max-tokens", 512), "request/1: prompt 1 + max_tokens 512 = 513 tokens; the model holds"
         " 512: shorten one of them"),
        (("--max-tokens", 2**31 - 1), f"request/1: prompt 1 + max_tokens {2**31 - 1} = {2**31}"
         " tokens; the model holds 512: shorten one of them"),
        (("--deadline", 1e-12), "request/1: the deadline had passed on arrival: give it more time"),
        (("--stop", "x"), "this model has no tokenizer: it cannot look for stop strings"),
        (("text",), "this model has no tokenizer: …"),
    ],
    ids=["longer than the model", "much longer", "deadline", "stop without text", "text"],
)  # fmt: skip
def test_a_request_that_the_model_cannot_serve(
    words: tuple[object, ...], line: str, packed: Path
) -> None:
    rows = rows_of(packed / "tiny", "--prompt-tokens", "1", "--max-tokens", 2, *words)
    messages = [row["error"]["message"] for row in rows if row["error"] is not None]
    assert len(messages) == 1 and is_the_line(messages[0], line), messages


def test_each_bad_request_is_refused_alone_while_others_are_answered() -> None:
    """Bad requests come in between, while good ones are queued and running (I12)."""
    engine = Engine(device=FakeDevice(), journal=open_journal(), threads=False)
    engine.load("m", "source")
    bad: list[tuple[dict[str, Any], str, int]] = [
        ({"prompt": ()}, "empty_prompt", 400),
        ({"prompt": (64,)}, "unknown_token", 400),
        ({"prompt": (-1,)}, "unknown_token", 400),
        ({"prompt": ((1 << 31) - 1,)}, "unknown_token", 400),
        ({"prompt": (1,) * 49}, "too_long", 400),
        ({"max_tokens": 48}, "too_long", 400),
        ({"max_tokens": (1 << 31) - 1}, "too_long", 400),
        ({"max_tokens": 0}, "max_tokens", 400),
        ({"max_tokens": -((1 << 31) - 1)}, "max_tokens", 400),
        ({"deadline_s": 1e-12}, "deadline", 504),
        ({"model": "x"}, "unknown_model", 404),
    ]
    good, refused = [], []
    for number, (wrong, _, _) in enumerate(bad):
        prompt = (number + 1, 2)
        sampling = Sampling(seed=number)
        good.append(
            engine.submit(Request(model="m", prompt=prompt, max_tokens=5, sampling=sampling))
        )
        refused.append(engine.submit(ask(**({"max_tokens": 2} | wrong))))
        for _ in range(7):
            engine.advance()
    for number, stream in enumerate(good):
        expected = answer((number + 1, 2), seed=number, max_tokens=5)
        assert list(stream.result().tokens) == expected
    for stream, (wrong, reason, status) in zip(refused, bad, strict=True):
        error = stream.result().error
        if reason == "deadline":
            assert stream.result().finish_reason == "deadline"
            continue
        assert isinstance(error, RequestRejectedError), wrong
        assert (error.reason, error.http_status) == (reason, status), wrong
        assert "\n" not in str(error) and len(str(error)) < 200, wrong
    engine.close()


VALUES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: sample(temperature="1"), TypeError, "temperature must be a number, not str"),
    (lambda: sample(temperature=10**400), ValueError, "temperature must be finite, not 1000…"),
    (lambda: sample(top_p=True), TypeError, "top_p must be a number, not bool"),
    (lambda: sample(top_k=1.5), TypeError, "top_k must be an integer, not float"),
    (lambda: sample(top_k=10**30), ValueError, f"top_k must be …, not {10**30}"),
    (lambda: sample(seed=1 << 64), ValueError, f"seed must be within …, not {1 << 64}"),
    (lambda: ask(model=""), ValueError, "model must be the name of a served model"),
    (lambda: ask(prompt=[1.0]), TypeError, "a prompt is text or integers; it has a float"),
    (lambda: ask(prompt=[True]), TypeError, "a prompt is text or integers; it has a bool"),
    (lambda: ask(max_tokens=1.5), TypeError, "max_tokens must be an integer, not 1.5"),
    (lambda: ask(sampling=None), TypeError, "sampling must be a Sampling, not NoneType"),
    (lambda: ask(stop=("",)), ValueError, "a stop string has 1 to 1024 characters"),
    (lambda: ask(deadline_s=-1.0), ValueError, "deadline_s must be a positive time, not -1.0"),
    (lambda: ask(client_id="x" * 257), ValueError, "client_id has at most 256 characters, not 257"),
    (lambda: Limits(inflight_jobs_max=0), ValueError, "…inflight_jobs_max…"),
    (lambda: Limits(queued_tokens_max=1.5), TypeError, "…queued_tokens_max…"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "kind", "line"), VALUES)
def test_a_value_out_of_range_cannot_be_made(
    make: Callable[[], object], kind: type[Exception], line: str
) -> None:
    with pytest.raises(kind) as refused:
        make()
    assert is_the_line(str(refused.value).splitlines()[0], line), refused.value


def test_unknown_ids_and_calls_out_of_order() -> None:
    engine = Engine(device=FakeDevice(), journal=open_journal(), threads=False)
    engine.load("m", "source")
    with pytest.raises(ModelError, match=r"^no model 'x' is served$"):
        engine.unload("x")
    with pytest.raises(ModelError, match=r"^model 'n' was not loaded: one model at a time"):
        engine.load("n", "source")
    request = Request(model="m", prompt=(1, 2), max_tokens=3, sampling=Sampling(seed=1))
    stream = engine.submit(request)
    engine.cancel(999)
    engine.cancel(-1)
    assert len(stream.result().tokens) > 0, "a cancel of nobody is nobody's end"
    engine.close()
    engine.cancel(1)
    with pytest.raises(EngineClosedError, match="make a new one"):
        engine.submit(Request(model="m", prompt=(1,)))


def test_the_parameters_at_their_bounds_are_taken() -> None:
    bounds: list[dict[str, Any]] = [
        {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "seed": 0},
        {"temperature": 2.0, "top_k": (1 << 31) - 1, "top_p": 5e-324, "min_p": 1.0},
        {"seed": (1 << 64) - 1, "temperature": 1e-300},
    ]
    engine = Engine(device=FakeDevice(), journal=open_journal(), threads=False)
    engine.load("m", "source")
    for values in bounds:
        seed = values.setdefault("seed", 4)
        request = Request(
            model="m", prompt=(3,), max_tokens=3, sampling=Sampling(**values), deadline_s=1e9
        )
        assert list(engine.submit(request).result().tokens) == answer((3,), seed=seed, max_tokens=3)
    engine.close()
