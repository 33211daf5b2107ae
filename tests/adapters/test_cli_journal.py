"""``laneway journal``: what is shown is what happened; a journal that was changed is found out.

Source: R18.5.
"""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from support.command_line import MODELS, laneway

from laneway.adapters.calbin import pack
from laneway.engine import queueing
from laneway.statemachines import MACHINES

STATS_KEYS = {
    *("journal_id", "journal_tokens", "steps", "incarnations", "first_ns", "last_ns", "bytes"),
    *("inputs", "events", "entity_events", "requests", "tokens", "faults", "metrics"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A journal of three requests, and the rows the run printed."""
    folder = tmp_path_factory.mktemp("journal")
    pack(MODELS / "tiny-dense", folder / "model")
    asked = [part for tokens in ("1,2,3", "4", "5,6") for part in ("--prompt-tokens", tokens)]
    device = "sim:?clock=virtual"
    run = ("run", "--model", folder / "model", "--device", device, "--seed", 7, "--max-tokens", 4)
    called = laneway(*run, *asked, "--journal", folder / "run.db", "--json")
    return folder / "run.db", called.done().rows


@pytest.fixture
def file(recorded: tuple[Path, list[dict[str, Any]]]) -> Path:
    return recorded[0]


@pytest.fixture(scope="module")
def every(recorded: tuple[Path, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every step, as the command shows it."""
    return laneway("journal", "show", recorded[0], "--json").done().rows


def test_stats_add_up(file: Path, recorded: tuple[Path, list[dict[str, Any]]]) -> None:
    sums = laneway("journal", "stats", file, "--json").done().row
    assert set(sums) == STATS_KEYS
    assert sums["requests"]["finished"] == 3 and sums["requests"]["open"] == 0
    assert sums["tokens"] == sum(len(row["tokens"]) for row in recorded[1]) == 12
    assert (sums["incarnations"], sums["faults"]) == (1, {})
    assert sums["inputs"]["RequestSubmitted"] == 3
    with sqlite3.connect(file) as database:
        (steps,) = database.execute("SELECT count(*) FROM step").fetchone()
        (entity_events,) = database.execute("SELECT count(*) FROM entity_event").fetchone()
    database.close()
    assert (sums["steps"], sums["entity_events"]) == (steps, entity_events)
    shown = laneway("journal", "stats", file).done().out
    assert "finished 3" in shown and sums["journal_id"] in shown
    (tokens,) = sums["metrics"]["laneway:generation_tokens_total"]
    assert tokens["value"] == sums["tokens"]
    (first,) = sums["metrics"]["laneway:time_to_first_token_seconds"]
    assert first["count"] == 3 and first["buckets"]["inf"] == 3
    (line,) = (line for line in shown.splitlines() if "generation_tokens_total" in line)
    assert "12" in line
    assert "time_to_first_token_seconds" in shown and "p50" in shown


def test_show_gives_every_step_in_order(file: Path, every: list[dict[str, Any]]) -> None:
    rows = every
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[0]["input_kind"] == "EngineStarted" and rows[-1]["input_kind"] == "DeviceClosed"
    keys = {"step", "at_ns", "input_kind", "input", "events"}
    assert all(set(row) == keys for row in rows)
    for row in rows:
        for event in row["events"]:
            table = MACHINES[event["machine"]].table
            assert table[event["source"], event["trigger"]] == event["dest"]
    shown = laneway("journal", "show", file).done().out
    assert sum(not line.startswith(" " * 8) for line in shown.splitlines()) == len(rows)


@pytest.mark.parametrize(
    ("filters", "fits"),
    [
        ("--request 2", lambda row: "request/2" in json.dumps(row) or 2 in _requests(row)),
        ("--trigger commit", lambda row: "commit" in [e["trigger"] for e in row["events"]]),
        ("--input Completed", lambda row: row["input_kind"] == "Completed"),
        ("--first 5 --last 9", lambda row: 5 <= row["step"] <= 9),
        ("--input Completed --trigger finish", lambda row: row["input_kind"] == "Completed"),
    ],
)
def test_filters_of_show_all_hold(
    file: Path, every: list[dict[str, Any]], filters: str, fits: Any
) -> None:
    shown = laneway("journal", "show", file, "--json", *filters.split()).done().rows
    assert 0 < len(shown) < len(every)
    assert all(fits(row) for row in shown)
    assert all(row in every for row in shown)


def _requests(row: dict[str, Any]) -> list[int]:
    """Every owner that a planned job of this step has, and the request its input names."""
    named = [row["input"].get("request")]
    for event in row["events"]:
        named += [part[1] for part in event["data"].get("rows", ())]
        named += event["data"].get("owners", ())
    return [number for number in named if number is not None]


@pytest.mark.parametrize("entity", ["job", "lane", "buffer", "model", "device"])
def test_every_kind_of_entity_can_be_followed(
    file: Path, every: list[dict[str, Any]], entity: str
) -> None:
    number = 0 if entity == "device" else 1
    shown = laneway("journal", "show", file, f"--{entity}", number, "--json").done().rows
    moved = [
        row["step"]
        for row in every
        if any(f"{entity}/{number}" in event["entities"] for event in row["events"])
    ]
    assert moved and set(moved) <= {row["step"] for row in shown}
    lines = laneway("journal", "timeline", file, f"{entity}/{number}", "--json").done().rows
    moves = [line for line in lines if line["trigger"]]
    assert [line["step"] for line in moves if line["step"] not in moved] == []
    for before, after in zip(moves, moves[1:], strict=False):
        assert after["source"] == before["dest"], "each move begins where the last one ended"
        assert after["at_ns"] >= before["at_ns"]
    shown_text = laneway("journal", "timeline", file, f"{entity}/{number}").done().out
    assert moves[0]["trigger"] in shown_text and moves[-1]["dest"] in shown_text


def test_times_bound_what_is_shown(file: Path, every: list[dict[str, Any]]) -> None:
    middle_ms = every[len(every) // 2]["at_ns"] / 1e6
    late = laneway("journal", "show", file, "--json", "--from-ms", middle_ms).done().rows
    early = laneway("journal", "show", file, "--json", "--until-ms", middle_ms).done().rows
    assert {row["step"] for row in late} | {row["step"] for row in early} == {
        row["step"] for row in every
    }
    assert 0 < len(late) < len(every) and 0 < len(early) < len(every)


def test_what_no_step_can_match_is_a_usage_error(file: Path, every: list[dict[str, Any]]) -> None:
    laneway("journal", "show", file, "--input", "Foo").refused(2, "--input Foo", "Completed")
    laneway("journal", "show", file, "--trigger", "foo").refused(2, "--trigger foo", "quarantine")
    for step in (0, len(every) + 1):
        called = laneway("journal", "explain", file, f"--step={step}")
        called.refused(2, f"--step {step}", f"has steps 1 to {len(every)}")
    for until in (-1, len(every) + 1):
        called = laneway("journal", "replay", file, f"--until={until}")
        called.refused(2, f"--until {until}", f"has steps 1 to {len(every)}")


def test_a_journal_without_faults_says_so(file: Path, every: list[dict[str, Any]]) -> None:
    for arguments in ((), ("--step", 5)):
        assert laneway("journal", "explain", file, "--json", *arguments).done().rows == []
        (line,) = laneway("journal", "explain", file, *arguments).done().out.splitlines()
        assert line.startswith("no faults") and line.endswith(f"{len(every)} steps")


def test_a_fault_is_explained_to_a_person_and_to_a_program(tmp_path: Path) -> None:
    pack(MODELS / "tiny-dense", tmp_path / "model")
    (tmp_path / "plan").write_text(
        "fault a kind=ccu_exception on=exec nth=2 chip=0 code=77 pc=64 quiesce=n kv=unknown\n"
    )
    device = f"sim:?clock=virtual&faults={tmp_path / 'plan'}"
    run = ("run", "--model", tmp_path / "model", "--device", device, "--max-tokens", 4, "--json")
    file = tmp_path / "run.db"
    (answer,) = laneway(*run, "--prompt-tokens", "1,2,3", "--journal", file).done().rows
    faults = laneway("journal", "show", file, "--input", "DeviceFaulted", "--json").done().rows
    row = laneway("journal", "explain", file, "--json").done().row
    job = f"job/{faults[0]['input']['job']}"
    assert (row["step"], row["about"], row["kind"]) == (faults[0]["step"], [job], "ccu")
    assert (row["row"], row["rung"], row["outcome"]) == (7, 4, "recovered")
    assert row["signals"][0]["details"]["record"]["pc"] == 64
    (request,) = row["requests"]
    assert (request["suspended"], request["tokens"]) == ("suspect", len(answer["tokens"]))
    shown = laneway("journal", "explain", file, "--step", row["step"] + 1).done().out
    for words in (job, "row 7", "reset of the CCU", "code 77", "pc 0x40", "suspended as suspect"):
        assert words in shown
    assert shown.splitlines()[-1].startswith("1 fault up to step")
    assert (
        laneway("journal", "explain", file, "--step", row["step"] - 1, "--json").done().rows == []
    )


def test_the_life_of_a_request(file: Path, recorded: tuple[Path, list[dict[str, Any]]]) -> None:
    lines = laneway("journal", "timeline", file, "request/3", "--json").done().rows
    triggers = [line["trigger"] for line in lines if line["trigger"]]
    assert triggers == ["admit", "prefill", "decode", "finish"]
    assert lines[-1]["data"]["tokens"] == len(recorded[1][2]["tokens"])


def test_an_entity_that_never_was_is_said_to_be_missing(file: Path) -> None:
    assert "not in this journal" in laneway("journal", "timeline", file, "lane/999").done().out
    assert laneway("journal", "timeline", file, "lane/999", "--json").done().rows == []


def test_replay_folds_to_any_step(file: Path, every: list[dict[str, Any]]) -> None:
    planned = next(
        row["step"]
        for row in every
        for event in row["events"]
        if event["machine"] == "job"
        and event["trigger"] == "plan"
        and event["data"]["origin"] == "request"
    )
    folded = laneway("journal", "replay", file, "--until", planned, "--state", "--json").done().row
    assert folded["step"] == planned and folded["device"] == "serving"
    (flying,) = folded["in_flight"]
    assert (flying["state"], flying["task"], flying["origin"]) == ("planned", "prefill", "request")
    held = folded["held"]
    assert [lane["owner"] for lane in held["lanes"]] == ["request/1"]
    preparing = [buffer["job"] for buffer in held["buffers"] if buffer["state"] == "preparing"]
    assert preparing == [f"job/{flying['job']}"]
    assert [job["number"] for job in held["jobs"]] == [flying["job"]]
    assert [request["request"] for request in held["requests"]] == ["request/1"]
    last = laneway("journal", "replay", file).done()
    end = json.loads(last.out)
    assert end["step"] == len(every) and end["device"] == "closed" and end["in_flight"] == []
    assert "held" not in end


def test_verify_says_ok_in_its_last_line(file: Path) -> None:
    assert laneway("journal", "verify", file).done().out.splitlines()[-1] == "verify: ok"
    report = laneway("journal", "verify", file, "--json").done().row
    assert (report["ok"], report["asked"], report["reason"]) == (True, "decide", "")


def test_a_copy_is_the_same_journal(file: Path, tmp_path: Path) -> None:
    called = laneway("journal", "copy", file, tmp_path / "copy.db").done()
    assert str(tmp_path / "copy.db") in called.out
    first, second = (
        laneway("journal", "verify", each, "--json").done().row
        for each in (file, tmp_path / "copy.db")
    )
    assert first == second


# ------------------------------------------------------------------------ found out


def tamper(file: Path, change: str) -> None:
    """Change a journal behind its guards: its triggers are taken out meanwhile."""
    with sqlite3.connect(file) as database:
        guards = database.execute(
            "SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'"
        ).fetchall()
        assert guards, "a journal guards itself against changes"
        for name, _ in guards:
            database.execute(f"DROP TRIGGER {name}")
        assert database.execute(change).rowcount > 0
        for _, guard in guards:
            database.execute(guard)
    database.close()


def test_a_journal_refuses_to_be_changed(file: Path, tmp_path: Path) -> None:
    laneway("journal", "copy", file, tmp_path / "copy.db").done()
    with sqlite3.connect(tmp_path / "copy.db") as database:
        for change in ("DELETE FROM step", "UPDATE step SET at_ns = 0"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                database.execute(change)
    database.close()


@pytest.mark.parametrize(
    ("change", "step"),
    [
        ("UPDATE step SET at_ns = at_ns + 1 WHERE step = 7", 7),
        ("UPDATE step SET events = replace(events, '[1,', '[2,') WHERE step > 9", None),
        ("DELETE FROM step WHERE step = 8", 8),
        ("DELETE FROM step WHERE step = 1", 1),
        ("UPDATE step SET chain = zeroblob(length(chain)) WHERE step = 3", 3),
        ("UPDATE meta SET value = 'digest' WHERE key = 'tokens'", None),
    ],
)
def test_a_changed_journal_is_refuted_with_the_step(
    file: Path, tmp_path: Path, change: str, step: int | None
) -> None:
    changed = tmp_path / "changed.db"
    laneway("journal", "copy", file, changed).done()
    tamper(changed, change)
    called = laneway("journal", "verify", changed).done(1)
    verdict = called.out.splitlines()[-1]
    assert verdict.startswith("verify: ") and verdict != "verify: ok"
    if step is not None:
        assert f"step {step}" in verdict
    report = laneway("journal", "verify", changed, "--json").done(1).row
    assert report["ok"] is False and report["reason"]


def test_a_decision_of_other_code_is_found(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that decides something else is caught at the first step where it does."""
    rows = laneway("journal", "show", file, "--json", "--trigger", "plan").done().rows
    decodes = [
        row["step"]
        for row in rows
        for event in row["events"]
        if event["data"].get("task") == "decode" and event["data"].get("origin") == "request"
    ]
    prefill_first = queueing._choose_prefill
    monkeypatch.setattr(
        queueing, "_choose_decode", lambda state, model: prefill_first(state, model)
    )
    called = laneway("journal", "verify", file).done(1)
    assert called.out.splitlines()[-1].startswith(f"verify: decide: step {decodes[0]}")
