"""``laneway run``: the answers, their JSON, exit codes, determinism.

Source: README.md (commands).
"""

import math
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from support.command_line import DEMO, MODELS, laneway

from laneway.adapters import open_device
from laneway.adapters.calbin import pack
from laneway.adapters.cli_run import _logprobs_row, _row
from laneway.adapters.text import TokenizerText
from laneway.engine import Engine, Request, Result, Sampling
from laneway.engine.inputs import RequestSubmitted
from laneway.engine.request import Usage
from laneway.journal import open_journal

KEYS = ["request", "prompt_tokens", "tokens", "text", "finish_reason", "usage", "error"]
VIRTUAL = "sim:?clock=virtual"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, packed once."""
    folder = tmp_path_factory.mktemp("run") / "demo"
    pack(DEMO, folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer, packed once."""
    folder = tmp_path_factory.mktemp("run") / "tiny"
    pack(MODELS / "tiny-dense", folder)
    return folder


def answers(model: Path, *arguments: object, device: str = VIRTUAL) -> list[dict[str, Any]]:
    """Run and return the rows of a call in which every request ended well."""
    called = laneway("run", "--model", model, "--device", device, "--json", *arguments)
    return called.done().rows


# ------------------------------------------------------------------------ what is printed


def test_a_row_has_exactly_what_interfaces_name(demo: Path) -> None:
    prompts = ("ROMEO.", "What news?")
    asked = (*prompts, "--prompt-tokens", "5,6,7", "--max-tokens", 9, "--seed", 1)
    rows = answers(demo, *asked)
    tokenizer = TokenizerText(DEMO / "tokenizer.json")
    prompt_tokens = [*(list(tokenizer.encode(prompt)) for prompt in prompts), [5, 6, 7]]
    for index, row in enumerate(rows):
        assert list(row) == KEYS
        assert row["request"] == index
        assert row["prompt_tokens"] == prompt_tokens[index]
        assert len(row["tokens"]) == 9
        assert row["text"] == tokenizer.decode(row["tokens"])
        assert (row["finish_reason"], row["error"]) == ("length", None)
        count = len(row["prompt_tokens"])
        assert row["usage"] == {
            "prompt_tokens": count,
            "completion_tokens": 9,
            "total_tokens": count + 9,
        }


def test_without_a_tokenizer_there_is_no_text(tiny: Path) -> None:
    (row,) = answers(tiny, "--prompt-tokens", "1,2,3", "--max-tokens", 4, "--seed", 1)
    assert row["text"] is None and len(row["tokens"]) == 4
    asked = ("--prompt-tokens", "1,2,3", "--max-tokens", 4, "--seed", 1)
    called = laneway("run", "--model", tiny, "--device", VIRTUAL, *asked).done()
    ids = " ".join(map(str, row["tokens"]))
    assert called.out == f"1| {ids}  [length, 4 tokens]\n", "the ids are shown in place of text"


def test_the_text_is_shown_line_by_line(demo: Path) -> None:
    asked = ("ROMEO.", "JULIET.", "--max-tokens", 40, "--seed", 5, "--temperature", 0.8)
    texts = [row["text"] for row in answers(demo, *asked)]
    out = laneway("run", "--model", demo, "--device", VIRTUAL, *asked).done().out
    for number, text in enumerate(texts, start=1):
        own = [line.partition("| ")[2] for line in out.splitlines() if line[0] == str(number)]
        assert own[-1].endswith("[length, 40 tokens]")
        shown = [line.removesuffix("[length, 40 tokens]").strip() for line in own]
        wanted = [line.strip() for line in text.split("\n")]
        assert [line for line in shown if line] == [line for line in wanted if line]


def test_a_stop_text_ends_before_itself(demo: Path) -> None:
    asked = ("ROMEO.", "--max-tokens", 60, "--seed", 4, "--temperature", 0.8)
    (free,) = answers(demo, *asked)
    text = free["text"]
    middle = len(text) // 2
    stop = text[middle : middle + 4]
    (row,) = answers(demo, *asked, "--stop", stop, "--stop", "\x00 never")
    assert row["finish_reason"] == "stop"
    assert row["text"] == text[: text.index(stop)]
    assert row["tokens"] == free["tokens"][: len(row["tokens"])]


def test_greedy_answers_are_the_golden_ones(demo: Path) -> None:
    """As far as the golden margin is beyond one step of BF16, which the device rounds to."""
    golden = np.load(DEMO / "golden.npz")
    compared = 0
    for run in range(4):
        prompt, greedy = golden[f"prompt_{run}"], golden[f"greedy_{run}"].tolist()
        margins = golden[f"margin_{run}"][len(prompt) - 1 :]
        top = golden[f"logits_{run}"][len(prompt) - 1 :].max(axis=-1)
        decided = margins > 2.0 ** (np.floor(np.log2(np.abs(top))) - 7)
        count = len(decided) if decided.all() else int(np.argmin(decided))
        asked = ("--prompt-tokens", ",".join(map(str, prompt)), "--temperature", 0)
        (row,) = answers(demo, *asked, "--max-tokens", count)
        assert row["tokens"] == greedy[:count]
        compared += count
    assert compared >= 30


def test_the_shipped_demo_is_the_default(demo: Path) -> None:
    asked = ("ROMEO.", "--max-tokens", 5, "--seed", 8)
    called = laneway("run", *asked, "--json").done()
    assert called.rows == answers(demo, *asked)


# ------------------------------------------------------------------------ exit codes


def test_a_request_that_cannot_be_served_is_told_beside_the_others(tiny: Path) -> None:
    asked = ("words", "--prompt-tokens", "1,2", "--prompt-tokens", "1,512", "--max-tokens", 3)
    called = laneway("run", "--model", tiny, "--device", VIRTUAL, "--json", *asked, "--seed", 1)
    text, good, unknown = called.done(1).rows
    assert all(list(row) == KEYS for row in called.rows)
    assert [row["request"] for row in called.rows] == [0, 1, 2]
    assert (good["finish_reason"], len(good["tokens"])) == ("length", 3)
    assert text["error"]["type"] == "prompt" and "no tokenizer" in text["error"]["message"]
    assert unknown["error"]["type"] == "unknown_token" and "512" in unknown["error"]["message"]
    for row in (text, unknown):
        assert (row["finish_reason"], row["tokens"], row["text"]) == ("error", [], None)
        assert set(row["error"]) == {"type", "message"}
    shown = laneway("run", "--model", tiny, "--device", VIRTUAL, *asked).done(1).out
    assert "1| [this model has no tokenizer" in shown and "[length, 3 tokens]" in shown


@pytest.mark.parametrize(
    ("asked", "type_"),
    [
        (("--prompt-tokens", "1,2", "--max-tokens", 511), "too_long"),
        (("--prompt-tokens", ",".join(["3"] * 512)), "too_long"),
        (("--prompt-tokens", "-1"), "unknown_token"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_limit(
    tiny: Path, asked: tuple[object, ...], type_: str
) -> None:
    called = laneway("run", "--model", tiny, "--device", VIRTUAL, "--json", *asked)
    assert called.done(1).row["error"]["type"] == type_


def test_a_deadline_that_passes_ends_the_request(tiny: Path) -> None:
    """Device time of 3 us a job: 100 us are over before 200 tokens are there."""
    asked = ("--prompt-tokens", "1,2", "--max-tokens", 200, "--deadline", 1e-4, "--seed", 1)
    called = laneway("run", "--model", tiny, "--device", VIRTUAL, "--json", *asked)
    row = called.done(1).row
    assert row["finish_reason"] == "deadline" and 0 < len(row["tokens"]) < 200
    assert row["error"]["type"] == "DeadlineExpiredError"


def test_a_device_that_is_lost_is_told_by_every_request(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "plan").write_text("fault a kind=device_lost on=exec nth=3 release=never\n")
    device = f"{VIRTUAL}&faults={tmp_path / 'plan'}"
    asked = ("--prompt-tokens", "1,2", "--prompt-tokens", "3", "--max-tokens", 9, "--seed", 1)
    file = tmp_path / "run.db"
    called = laneway(
        "run", "--model", tiny, "--device", device, "--json", "--journal", file, *asked
    )
    rows = called.done(75).rows
    assert [row["finish_reason"] for row in rows] == ["error", "error"]
    assert all(row["error"]["type"] == "RequestLostError" for row in rows)
    assert any("lost" in row["error"]["message"] for row in rows)
    assert "verify: ok" in laneway("journal", "verify", file).done().out


def test_a_fault_that_a_reset_mends_is_seen_by_nobody(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "plan").write_text("fault a kind=ccu_exception on=exec nth=3\n")
    prompts = ("--prompt-tokens", "1,2", "--prompt-tokens", "3")
    asked = ("run", "--model", tiny, "--json", "--max-tokens", 9, "--seed", 1, *prompts)
    calm = laneway(*asked, "--device", VIRTUAL).done().rows
    faulty = laneway(*asked, "--device", f"{VIRTUAL}&faults={tmp_path / 'plan'}").done().rows
    assert faulty == calm


def test_a_device_that_is_lost_while_loading_asks_for_a_new_process(
    tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "plan").write_text("fault a kind=device_lost on=exec nth=1 during=load\n")
    device = f"{VIRTUAL}&faults={tmp_path / 'plan'}"
    called = laneway("run", "--prompt-tokens", "1", "--model", tiny, "--device", device)
    called.refused(75, "lost")


# ------------------------------------------------------------------------ determinism


def by_prompt(rows: list[dict[str, Any]]) -> dict[tuple[int, ...], tuple[list[int], str]]:
    return {tuple(row["prompt_tokens"]): (row["tokens"], row["text"]) for row in rows}


def test_a_seed_decides_the_tokens_whatever_the_clock_and_the_order(demo: Path) -> None:
    rest = ("--max-tokens", 10, "--temperature", 0.8, "--top-p", 0.9, "--seed", 77)
    prompts = ("ROMEO.", "What news?", "My lord,", "KING HENRY.")
    first = by_prompt(answers(demo, *prompts, *rest))
    assert len(first) == 4
    assert by_prompt(answers(demo, *prompts, *rest)) == first
    assert by_prompt(answers(demo, *reversed(prompts), *rest)) == first
    assert by_prompt(answers(demo, *prompts, *rest, device="sim:?clock=real")) == first
    (alone,) = answers(demo, prompts[2], *rest)
    assert (alone["tokens"], alone["text"]) == first[tuple(alone["prompt_tokens"])]
    assert by_prompt(answers(demo, *prompts, *rest[:-1], 78)) != first


def test_what_was_measured_is_told_after_the_answers(tiny: Path) -> None:
    """Percentiles of every class of waiting, by task and bucket, beside how busy the device was."""
    asked = ("--prompt-tokens", "1,2,3", "--prompt-tokens", ",".join(["5"] * 40))
    called = laneway(
        "run", "--model", tiny, "--device", VIRTUAL, *asked, "--max-tokens", 4, "--metrics"
    )
    assert called.code == 0 and called.out.count("[length, 4 tokens]") == 2
    shown = called.err
    assert "bucket=32" in shown and "bucket=128" in shown and "p99" in shown
    for name in ("turn_wait_seconds", "job_seconds", "inter_token_latency_seconds"):
        assert name in shown
    for name in ("e2e_request_latency_seconds", "overlap_ratio", "engine_slot_busy_ratio"):
        assert name in shown


def test_a_seed_that_is_drawn_is_recorded(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    asked = ("--prompt-tokens", "1,2", "--prompt-tokens", "9", "--max-tokens", 5)
    rows = answers(tiny, *asked, "--journal", file)
    with open_journal(file, read_only=True) as journal:
        seeds = {
            step.taken.sampling.seed
            for step in journal.read()
            if isinstance(step.taken, RequestSubmitted)
        }
    (seed,) = seeds
    assert answers(tiny, *asked, "--seed", seed) == rows


def test_a_journal_is_continued(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    asked = ("--prompt-tokens", "1,2", "--max-tokens", 5, "--seed", 3, "--journal", file)
    assert answers(tiny, *asked) == answers(tiny, *asked)
    sums = laneway("journal", "stats", file, "--json").done().row
    assert (sums["incarnations"], sums["requests"]["finished"], sums["tokens"]) == (2, 2, 10)
    assert "verify: ok" in laneway("journal", "verify", file).done().out


# ------------------------------------------------------------------------ the sampler


def test_penalties_and_logprobs(tiny: Path) -> None:
    asked = ("--prompt-tokens", "5,6,7", "--max-tokens", 6, "--temperature", 0)
    (plain,) = answers(tiny, *asked)
    (told,) = answers(tiny, *asked, "--logprobs", 2)
    assert list(told) == [*KEYS, "logprobs"]
    assert {key: told[key] for key in KEYS} == plain
    assert [one["token"] for one in told["logprobs"]] == plain["tokens"]
    for one in told["logprobs"]:  # greedy and unpenalised: the token is the most likely
        assert one["top"][0] == [one["token"], one["logprob"]]
        assert len(one["top"]) == 2 and one["top"][1][1] <= one["logprob"] < 0.0
    for name, value in (("repetition", 9), ("presence", 2), ("frequency", 2)):
        (changed,) = answers(tiny, *asked, f"--{name}-penalty", value)
        assert changed["tokens"] != plain["tokens"] or len(set(plain["tokens"])) == 6


def test_a_log_probability_is_never_below_what_clients_know() -> None:
    row = _logprobs_row(((3, -math.inf), (4, -0.5), (3, -1e30)))
    assert row == {"token": 3, "logprob": -9999.0, "top": [[4, -0.5], [3, -9999.0]]}


def test_a_row_says_from_which_token_on_an_answer_is_in_doubt() -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=2)
    plain = Result(
        request=9, prompt=(1,), tokens=(2, 3), text=None, finish_reason="length", usage=usage
    )
    assert list(_row(0, plain)) == KEYS
    doubted = _row(0, attrs.evolve(plain, suspect_tokens_from=1))
    assert doubted == {**_row(0, plain), "suspect_tokens_from": 1}
    continued = _row(0, attrs.evolve(plain, continued_tokens_from=1))
    assert continued == {**_row(0, plain), "continued_tokens_from": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [("repetition-penalty", 0), ("presence-penalty", -2.5), ("logprobs", 21)],
)
def test_a_parameter_out_of_range_is_a_usage_error(tiny: Path, name: str, value: float) -> None:
    asked = ("--prompt-tokens", "5", f"--{name}", value)
    called = laneway("run", "--model", tiny, "--device", VIRTUAL, "--json", *asked)
    assert called.code == 2
    assert name.replace("-", "_") in called.err


# ------------------------------------------------------------------------ going on


def test_resume_needs_a_journal_that_is_there(tmp_path: Path) -> None:
    laneway("run", "--resume", "--device", VIRTUAL).refused(2, "--journal")
    missing = tmp_path / "missing.db"
    laneway("run", "--resume", "--journal", missing).refused(4, "does not exist")
    assert not missing.exists()


def test_resume_of_a_journal_without_open_requests_answers_prompts_alone(
    tiny: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.db"
    asked = ("--prompt-tokens", "1,2", "--seed", 1, "--max-tokens", 3, "--journal", path)
    first = answers(tiny, *asked)
    assert answers(tiny, *asked, "--resume") == first
    assert laneway("run", "--resume", "--journal", path, "--device", VIRTUAL).done().out == ""


def test_resumed_requests_stand_before_new_prompts(tiny: Path, tmp_path: Path) -> None:
    """Open ones by their journal number, new ones by their place, each with its own answer."""
    path = tmp_path / "run.db"
    (alone,) = answers(tiny, "--prompt-tokens", "3,4", "--seed", 2, "--max-tokens", 4)
    journal = open_journal(path)
    device = open_device(VIRTUAL)
    engine = Engine(device=device, journal=journal, threads=False)
    engine.load("m", str(tiny))
    sampling = Sampling(seed=2)
    for priority in (0, 1):
        asked = Request(
            model="m", prompt=(3, 4), max_tokens=4, sampling=sampling, priority=priority, logprobs=1
        )
        engine.submit(asked)
    for _ in range(30):
        engine.advance()
    assert len(engine.requests()) == 2
    journal.close()
    device.stop()
    asked_now = ("--prompt-tokens", "3,4", "--seed", 2, "--max-tokens", 4)
    rows = answers(tiny, *asked_now, "--journal", path, "--resume")
    assert [row["request"] for row in rows] == [1, 2, 0]
    for row in rows:
        assert (row["tokens"], row["finish_reason"]) == (alone["tokens"], alone["finish_reason"])
        assert ("logprobs" in row) == (row["request"] > 0)
