"""An engine killed anywhere leaves a journal that is whole to its last durable step.

One script is cut after each action, around and inside each append, in the middle of writing a
frame of the log, and in checkpoints. What is left must be a prefix of the uncut life, as long as
the dead engine knew it to be; what anybody saw must be in it; and a next engine starts clean or is
refused (decisions 4, 9, 17; G21). SIGKILL ends the process, or, where a write is torn, the limit of
file sizes, which kills at a byte.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.command_line import MODELS, laneway
from support.left_behind import (
    UNFINISHED,
    check_lock_is_free,
    check_next_engine,
    check_visible_is_durable,
    open_requests,
    read_whole,
)
from support.warm_parent import Ended, WarmParent

from laneway.adapters.calbin import pack
from laneway.engine.ports import Step
from laneway.journal import SqlJournal, open_journal
from laneway.journal.connect import log_path, size_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.unproven_journals,  # each is proven below, right after its engine died
]

KILLED, TORN = -9, -25
BOARD = "sim:tiny?clock=virtual"


@attrs.frozen
class Whole:
    """A life that nobody cut."""

    device: str
    model: str
    steps: list[Step]
    said: Ended
    actions: int


def live_whole(parent: WarmParent, folder: Path, device: str, model: str) -> Whole:
    path = folder / "whole.db"
    said = parent.live(path, "never", device=device, model=model)
    assert said.code == 0
    steps = read_whole(path)
    assert said.durable == len(steps)
    ((actions,),) = said.heard("actions")
    return Whole(device, model, steps, said, actions)


@pytest.fixture(scope="module")
def whole(parent: WarmParent, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The life on the fake device."""
    return live_whole(parent, tmp_path_factory.mktemp("fake"), "fake", "source")


@pytest.fixture(scope="module")
def on_board(parent: WarmParent, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The life on the simulated board."""
    folder = tmp_path_factory.mktemp("board")
    pack(MODELS / "tiny-dense", folder / "tiny")
    return live_whole(parent, folder, BOARD, str(folder / "tiny"))


def cut_and_check(
    parent: WarmParent, whole: Whole, path: Path, cut: tuple[Any, ...], *, code: int
) -> tuple[Ended, bool]:
    """Cut one life; return what it said and whether the next engine could start."""
    try:
        ended = parent.live(path, *cut, device=whole.device, model=whole.model)
        assert ended.code == code
        check_lock_is_free(path)
        steps = read_whole(path)
        assert steps == whole.steps[: ended.durable]
        assert ended.said == whole.said.said[: len(ended.said)], "it lived the same life"
        check_visible_is_durable(ended, steps)
        clean = check_next_engine(path, steps)
        if clean:
            assert read_whole(path)[: len(steps)] == steps
    except Exception as failure:
        failure.add_note(f"cut: {cut}")
        raise
    return ended, clean


def check_all(
    parent: WarmParent,
    whole: Whole,
    folder: Path,
    cuts: Iterable[tuple[Any, ...]],
    *,
    code: int = KILLED,
) -> list[Ended]:
    """Cut many lives; some must let the next engine start and some must not."""
    lives = []
    for number, cut in enumerate(cuts):
        lives.append(cut_and_check(parent, whole, folder / f"{number}.db", cut, code=code))
    assert {clean for _, clean in lives} == {True, False}
    return [ended for ended, _ in lives]


def test_killed_after_any_twelfth_action(parent: WarmParent, whole: Whole, tmp_path: Path) -> None:
    cuts = [("action", number) for number in range(1, whole.actions, 12)]
    assert len(cuts) >= 12
    lives = check_all(parent, whole, tmp_path, cuts)
    assert len({len(life.heard("token")) for life in lives}) > 4
    assert len({len(life.heard("ending")) for life in lives}) == 4


def test_killed_between_commit_and_effects(
    parent: WarmParent, whole: Whole, tmp_path: Path
) -> None:
    """A step is durable and nobody saw it: the file has it, and it was asked of nobody."""
    cuts = [("durable", number) for number in range(1, len(whole.steps) + 1, 8)]
    for number, life in enumerate(check_all(parent, whole, tmp_path, cuts)):
        assert life.durable == cuts[number][1]
        assert len(life.heard("seen")) < life.durable


def test_killed_before_the_commit(parent: WarmParent, whole: Whole, tmp_path: Path) -> None:
    """A step that was decided and not written never was."""
    cuts = [("before", number) for number in range(2, len(whole.steps) + 1, 11)]
    for number, life in enumerate(check_all(parent, whole, tmp_path, cuts)):
        assert life.durable == cuts[number][1] - 1


def test_killed_inside_the_statement(parent: WarmParent, whole: Whole, tmp_path: Path) -> None:
    """SQLite is killed after so many operations of its machine, the last of which commits."""
    step = len(whole.steps) // 2
    kept = []
    for operations in (*range(1, 19, 3), *range(19, 24)):
        path = tmp_path / f"{operations}.db"
        ended = parent.live(path, "statement", step, operations)
        assert (ended.code, ended.durable) == (KILLED, step - 1), operations
        steps = read_whole(path)
        assert steps == whole.steps[: len(steps)]
        check_visible_is_durable(ended, steps)
        assert not check_next_engine(path, steps)
        kept.append(len(steps))
    assert set(kept) == {step - 1, step}, "whole, or never written"


def frames_of(whole: Whole, path: Path) -> dict[int, int]:
    """Return by step how many frames its commit adds to the log."""
    frames: dict[int, int] = {}
    with SqlJournal.open(path) as journal:
        assert journal._writer is not None
        journal._writer._checkpointer.stop()
        for step in whole.steps:
            before = size_bytes(log_path(path))
            journal.append([step])
            frames[step.step] = (size_bytes(log_path(path)) - before) // 4120
    return frames


def test_killed_in_the_middle_of_writing_to_the_log(
    parent: WarmParent, whole: Whole, tmp_path: Path
) -> None:
    """A frame is 24 bytes of header and a page; the first byte that is missing varies.

    A step is durable when all frames of its commit are there: one, or more where a page was full.
    """
    frames = frames_of(whole, tmp_path / "frames.db")
    sizes = (0, 1, 23, 24, 25, 2000, 4119, 4120, 4121, 6000)
    third = len(whole.steps) // 3
    cuts = [("log", third + 2 * index, size) for index, size in enumerate(sizes)]
    cuts.append(("log", len(whole.steps), 9))
    for cut, life in zip(cuts, check_all(parent, whole, tmp_path, cuts, code=TORN), strict=True):
        is_whole = cut[2] >= 4120 * frames[cut[1]]
        assert life.durable == cut[1] - 1 + is_whole, "whole frames count, torn ones do not"
    assert sum(frames[cut[1]] == 1 for cut in cuts if cut[2] >= 4120) > 1


def test_killed_in_the_middle_of_a_checkpoint(
    parent: WarmParent, whole: Whole, tmp_path: Path
) -> None:
    """Pages went to the database in part; the log still has them all, whichever they were."""
    steps = range(8, len(whole.steps), 6)
    cuts = [
        ("checkpoint", step, size) for step, size in zip(steps, (0, 1, 4096, 4097), strict=False)
    ]
    for cut, life in zip(cuts, check_all(parent, whole, tmp_path, cuts, code=TORN), strict=True):
        assert life.durable == cut[1]
    for number, size in enumerate((0, 1, 4096, 5000, 8192, 12000)):
        path = tmp_path / f"close-{number}.db"
        ended, clean = cut_and_check(parent, whole, path, ("close", size), code=TORN)
        assert clean and ended.durable == len(whole.steps), "all was over but the closing"


def test_killed_while_the_file_is_made(parent: WarmParent, whole: Whole, tmp_path: Path) -> None:
    """What was to be a journal becomes one, or is one already; nobody has to clean up."""
    for number, size in enumerate((0, 1, 50, 511, 512, 4095, 4096, 5000, 9000, 20_000, 30_000)):
        path = tmp_path / f"{number}.db"
        ended = parent.live(path, "create", size)
        assert ended.code == TORN, size
        check_lock_is_free(path)
        open_journal(path).close()
        steps = read_whole(path)
        assert steps == whole.steps[: ended.durable], size
        check_next_engine(path, steps)
        read_whole(path)


def test_killed_on_a_board(parent: WarmParent, on_board: Whole, tmp_path: Path) -> None:
    """The same on the simulated board, where the next engine is the command line's."""
    last = len(on_board.steps)
    cuts = [
        *(("action", on_board.actions * part // 8) for part in (1, 3, 5, 7)),
        *(("durable", step) for step in (2, last // 2, last)),
        ("before", last // 2),
    ]
    run = ("run", "--prompt-tokens", "1,2", "--model", on_board.model, "--device", BOARD)
    rest = ("--max-tokens", 2, "--seed", 1, "--json", "--journal")
    answers = set()
    for number, cut in enumerate(cuts):
        path = tmp_path / f"{number}.db"
        ended = parent.live(path, *cut, device=BOARD, model=on_board.model)
        assert ended.code == KILLED, cut
        check_lock_is_free(path)
        steps = read_whole(path)
        assert steps == on_board.steps[: ended.durable], cut
        check_visible_is_durable(ended, steps)
        if open_requests(steps):
            laneway(*run, *rest, path).refused(4, UNFINISHED, "another file")
            assert read_whole(path) == steps
        else:
            answers.add(tuple(laneway(*run, *rest, path).done().row["tokens"]))
            assert read_whole(path)[: len(steps)] == steps
    assert len(answers) == 1, "a next engine answered, and always the same"
