"""Every request of a killed engine goes on in the next one, however often that is killed too.

One script is cut at many of its points, and the lives that resume it are cut again, loads included,
until one is left in peace. Then every request that was accepted has one ending, its answer is that
of the uncut life (tokens and text), no client was told anything twice or differently, and the
journal of all lives verifies with its chain whole (G21, I1, I7, I11, decisions 9, 14, 17).
"""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.command_line import MODELS, laneway
from support.fake_device import END_TOKEN, answer
from support.left_behind import (
    ENDINGS,
    check_lock_is_free,
    check_numbers_rise,
    check_visible_is_durable,
    open_requests,
    read_whole,
    tokens_of,
)
from support.mortal import CANCELLED, MAX_TOKENS, PROMPTS
from support.warm_parent import Ended, WarmParent

from laneway.adapters.calbin import pack
from laneway.engine.inputs import NO_TOKEN
from laneway.engine.ladder import CCU, DEVICE
from laneway.engine.ports import Step
from laneway.journal import open_journal
from laneway.journal.replay import fold

pytestmark = [
    pytest.mark.slow,
    pytest.mark.unproven_journals,  # each is proven below, right after its engine died
]

BOARD = "sim:tiny?clock=virtual"


@attrs.frozen
class Script:
    """The life that nobody cut: what it is run on, how long it is, and each request's answer.

    ``busy``: the steps after which requests are open. ``first``: what the first life is run on, if
    that is another device.
    """

    device: str
    model: str
    steps: int
    actions: int
    answers: dict[int, list[int]]
    busy: list[int]
    first: str = ""


def whole_life(parent: WarmParent, folder: Path, device: str, model: str) -> Script:
    path = folder / "whole.db"
    said = parent.live(path, "never", device=device, model=model)
    steps = read_whole(path)
    ((actions,),) = said.heard("actions")
    busy = [count for count in range(len(steps)) if open_requests(steps[:count])]
    return Script(device, model, len(steps), actions, answers_of(steps), busy)


def answers_of(steps: Iterable[Step]) -> dict[int, list[int]]:
    """Return the tokens drawn for each request, over all lives, without the token that ends it."""
    drawn = {
        request: [token for token in tokens if token != NO_TOKEN]
        for request, tokens in tokens_of(steps).items()
    }
    return {
        request: tokens[:-1] if tokens[-1:] == [END_TOKEN] else tokens
        for request, tokens in drawn.items()
    }


@pytest.fixture(scope="module")
def script(parent: WarmParent, tmp_path_factory: pytest.TempPathFactory) -> Script:
    """The script on the fake device, whose answers are computed from nothing."""
    whole = whole_life(parent, tmp_path_factory.mktemp("fake"), "fake", "source")
    answers = {
        number: answer(prompt, seed=number - 1, max_tokens=MAX_TOKENS)
        for number, prompt in enumerate(PROMPTS, 1)
    }
    for number, tokens in whole.answers.items():
        assert tokens == answers[number][: len(tokens)]
    return attrs.evolve(whole, answers=answers)


@pytest.fixture(scope="module")
def on_board(parent: WarmParent, tmp_path_factory: pytest.TempPathFactory) -> Script:
    """The script on the simulated board; the answers are those of three commands of their own."""
    folder = tmp_path_factory.mktemp("board")
    model = folder / "tiny"
    pack(MODELS / "tiny-dense", model)
    answers = {}
    for number, prompt in enumerate(PROMPTS, 1):
        asked = ("--prompt-tokens", ",".join(map(str, prompt)), "--seed", number - 1)
        on = ("--model", model, "--device", BOARD, "--max-tokens", MAX_TOKENS, "--json")
        answers[number] = laneway("run", *asked, *on).done().row["tokens"]
    whole = whole_life(parent, folder, BOARD, str(model))
    return attrs.evolve(whole, answers=answers)


def run_lives(
    parent: WarmParent, script: Script, path: Path, cuts: Sequence[tuple[Any, ...]]
) -> tuple[list[Ended], list[Step]]:
    """Live once for each cut, and then on until nothing is cut any more; each is proven.

    Return how each life ended, and the steps of all.
    """
    lives: list[Ended] = []
    before: list[Step] = []
    for number, cut in enumerate((*cuts, ("never",))):
        device = script.device if number else script.first or script.device
        ended = parent.live(path, *cut, device=device, model=script.model, resume=number > 0)
        check_lock_is_free(path)
        steps = read_whole(path)
        assert steps[: len(before)] == before, "what was durable stays"
        check_visible_is_durable(ended, steps)
        before = steps
        lives.append(ended)
    assert lives[-1].code == 0
    return lives, before


def check_lives(script: Script, lives: Sequence[Ended], steps: Sequence[Step]) -> int:
    """Hold all lives together against the uncut one; return how many requests went on."""
    check_numbers_rise(steps)
    assert not open_requests(steps), "I1: every request has an ending"
    events = [e for step in steps for e in step.events if e.machine == "request"]
    ended = [n for event in events if event.trigger in ENDINGS for n in event.entities]
    assert len(set(ended)) == len(ended), "I1: and only one"
    cancelled = {n for e in events if e.trigger == "cancel" for n in e.entities}
    assert cancelled <= {CANCELLED + 1}
    for number, tokens in answers_of(steps).items():
        if number in cancelled:
            assert tokens == script.answers[number][: len(tokens)]
        else:
            assert tokens == script.answers[number], f"I7: request/{number}"
    for life in lives:
        heard: dict[int, list[int]] = {}
        for request, position, token in life.heard("token"):
            assert position == len(heard.setdefault(request, [])), "told in order, each once"
            heard[request].append(token)
        for request, tokens in heard.items():
            assert tokens == script.answers[request][: len(tokens)]
        for request, text in life.heard("text"):
            if request not in cancelled and script.device == "fake":
                assert text == "".join(f"<{token}>" for token in script.answers[request])
    return len({n for event in events if event.trigger == "abandon" for n in event.entities})


def check_cuts(
    parent: WarmParent, script: Script, folder: Path, all_cuts: Iterable[Sequence[tuple[Any, ...]]]
) -> int:
    """Run many chains of lives; return how many requests went on in them."""
    went_on = 0
    for number, cuts in enumerate(all_cuts):
        path = folder / f"{number}.db"
        try:
            lives, steps = run_lives(parent, script, path, cuts)
            went_on += check_lives(script, lives, steps)
        except Exception as failure:
            failure.add_note(f"cuts: {cuts}")
            raise
    return went_on


def any_cuts(script: Script, seed: int) -> list[tuple[Any, ...]]:
    """Draw where the first life is cut, and perhaps those that resume it."""
    drawn = random.Random(seed)
    kinds = (
        lambda: ("action", drawn.randint(1, script.actions)),
        lambda: ("durable", drawn.randint(1, script.steps)),
        lambda: ("before", drawn.randint(1, script.steps)),
        lambda: ("statement", drawn.randint(2, script.steps), drawn.randint(1, 23)),
        lambda: ("log", drawn.randint(2, script.steps), drawn.randint(0, 6000)),
    )
    return [drawn.choice(kinds)() for _ in range(drawn.choice((1, 1, 2, 3)))]


def test_resumed_after_any_eighteenth_action(
    parent: WarmParent, script: Script, tmp_path: Path
) -> None:
    cuts = [[("action", number)] for number in range(1, script.actions, 18)]
    assert check_cuts(parent, script, tmp_path, cuts) > 8


def test_resumed_between_commit_and_effects_and_before_the_commit(
    parent: WarmParent, script: Script, tmp_path: Path
) -> None:
    cuts = [[("durable", number)] for number in range(1, script.steps + 1, 23)]
    cuts += [[("before", number)] for number in range(2, script.steps + 1, 23)]
    assert check_cuts(parent, script, tmp_path, cuts) > 4


def test_killed_while_resuming_again_and_again(
    parent: WarmParent, script: Script, tmp_path: Path
) -> None:
    """The next life dies at its start, in the load, and in the middle of what goes on."""
    half = ("action", script.actions // 2)
    first = ("before", 1)
    chains = [[half, first, ("durable", 1), ("action", load), first] for load in (1, 20, 48)]
    chains += [[half, *[("action", step)] * 3] for step in (5, 60)]
    assert check_cuts(parent, script, tmp_path, chains) > 6


def test_resumed_on_a_board(parent: WarmParent, on_board: Script, tmp_path: Path) -> None:
    """The same on the simulated board, against commands of their own, by bits."""
    busy = on_board.busy
    cuts = [[("durable", busy[len(busy) * part // 4])] for part in (1, 3)]
    cuts += [[("before", busy[len(busy) // 2]), ("action", 60)]]
    assert check_cuts(parent, on_board, tmp_path, cuts) > 4


def test_the_command_line_lets_them_go_on(
    parent: WarmParent, on_board: Script, tmp_path: Path
) -> None:
    for number in (1, 2):
        path = tmp_path / f"{number}.db"
        step = on_board.busy[number * len(on_board.busy) // 3]
        parent.live(path, "durable", step, device=BOARD, model=on_board.model)
        left = open_requests(read_whole(path))
        assert left
        called = laneway("run", "--resume", "--journal", path, "--device", BOARD, "--json").done()
        assert [row["request"] for row in called.rows] == sorted(left)
        for row in called.rows:
            assert row["finish_reason"] in ("length", "stop")
            assert row["tokens"] == on_board.answers[row["request"]]
        steps = read_whole(path)
        assert not open_requests(steps)
        assert laneway("run", "--resume", "--journal", path, "--device", BOARD).done().out == ""
        check_numbers_rise(read_whole(path))


@pytest.mark.parametrize(
    ("fault", "rung", "kills"),
    [
        (
            "ccu_exception on=exec task=decode nth=1 quiesce=n kv=unknown",
            CCU,
            [("before", "reset"), ("durable", "reset"), ("before", "recover"), ("before", "serve")],
        ),
        (
            "sticky on=exec task=decode nth=1 release=reset4",
            DEVICE,
            [("durable", "reset"), ("durable", "recover")],
        ),
    ],
)
def test_killed_at_every_turn_of_a_reset(
    fault: str,
    rung: int,
    kills: list[tuple[str, str]],
    parent: WarmParent,
    on_board: Script,
    tmp_path: Path,
) -> None:
    """Before and after the attempt is counted, believed, proven: it counts, and all go on (E28)."""
    (tmp_path / "plan").write_text(f"fault a kind={fault}\n")
    script = attrs.evolve(on_board, first=f"{BOARD}&faults={tmp_path / 'plan'}")
    whole_life(parent, tmp_path, script.first, script.model)
    whole = read_whole(tmp_path / "whole.db")
    turns = turns_of(whole)
    assert list(turns) == ["reset", "recover", "serve"]
    assert len(open_requests(whole[: turns["reset"]])) == 3
    cuts = [[(how, turns[turn])] for how, turn in kills]
    check_cuts(parent, script, tmp_path, cuts)
    for number, kill in enumerate(kills):
        with open_journal(tmp_path / f"{number}.db", read_only=True) as journal:
            attempts = fold(journal).ladder.attempts
        counted = kill != ("before", "reset")
        expected = {rung: 1} if counted else {}
        assert {one: len(times) for one, times in attempts.items()} == expected, f"E28: {kill}"


def turns_of(steps: Iterable[Step]) -> dict[str, int]:
    """Return the steps at which a reset was begun, believed and proven."""
    return {
        event.trigger: step.step
        for step in steps
        for event in step.events
        if event.machine == "device" and event.trigger in ("reset", "recover", "serve")
    }


@pytest.mark.parametrize("seed", range(8))
def test_any_cut_and_any_cut_of_what_resumes_it(
    seed: int, parent: WarmParent, script: Script, tmp_path: Path
) -> None:
    check_cuts(parent, script, tmp_path, [any_cuts(script, seed)])


@pytest.mark.soak
@pytest.mark.parametrize("block", range(40))
def test_a_thousand_cuts(block: int, parent: WarmParent, script: Script, tmp_path: Path) -> None:
    """Forty blocks of twenty-five chains of lives."""
    seeds = range(1000 + 25 * block, 1025 + 25 * block)
    assert check_cuts(parent, script, tmp_path, (any_cuts(script, seed) for seed in seeds)) > 10
