"""Several processes, one board: who has it, and what a reset by one is for the others (SCN-14).

Source: npurt.h (open, epochs), npurt_sim.h (Owners), G11, R17.5.
"""

import ctypes as c
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.native_board import (
    ABORTED,
    COMMIT,
    DECODE,
    EXEC,
    FOREVER,
    RESERVE,
    STEP_TICKET,
    Bench,
    Board,
    OpenBoard,
    Pair,
)
from support.second_owner import SecondOwner

from laneway.adapters import npurt
from laneway.adapters.npurt import Code

pytestmark = pytest.mark.slow
EV_EPOCH, EV_OWNER = 5, 6
OTHER_PROCESS = 16384


@pytest.fixture
def shared(tmp_path: Path) -> str:
    """The line of a configuration that names the board's file."""
    return f"board = {tmp_path / 'board'}"


@pytest.fixture
def other(bench: Bench) -> Iterator[SecondOwner]:
    """Another process, with the same library and calbin."""
    process = SecondOwner(Path(bench.library.path), bench.calbin)
    yield process
    process.end()


def try_open(bench: Bench, config: str, *, exclusive: bool) -> int:
    params = npurt.OpenParams(config=config.encode())
    params.h.flags = int(exclusive)
    device = c.c_void_p()
    answer = bench.library.attempt("npurt_device_open", c.byref(params), c.byref(device))
    if answer.ok:
        bench.library.call("npurt_device_close", device)
    return answer.code


def test_a_board_is_opened_by_one_process_alone_or_by_several(
    bench: Bench, other: SecondOwner, shared: str
) -> None:
    assert other.ask("open", config=shared, exclusive=True) == Code.OK
    for exclusive in (True, False):
        assert try_open(bench, shared, exclusive=exclusive) == Code.DEVICE_OWNED
    other.ask("close")
    assert try_open(bench, shared, exclusive=True) == Code.OK
    assert other.ask("open", config=shared) == Code.OK
    assert try_open(bench, shared, exclusive=False) == Code.OK
    assert try_open(bench, shared, exclusive=True) == Code.DEVICE_OWNED
    words = c.create_string_buffer(256)
    bench.library.call("npurt_last_error", words, 256)
    assert str(os.getpid()).encode() in words.value, "it opened the board last"


def test_a_process_that_dies_has_the_board_no_more(
    bench: Bench, other: SecondOwner, shared: str
) -> None:
    assert other.ask("open", config=shared, exclusive=True) == Code.OK
    other.kill()
    assert try_open(bench, shared, exclusive=True) == Code.OK


def test_a_reset_by_another_process_is_a_new_epoch_for_everybody(
    open_board: OpenBoard, bench: Bench, other: SecondOwner, shared: str
) -> None:
    board = open_board(shared)
    pair, running = Pair(board, DECODE), Pair(board, DECODE)
    board.run(pair, [(0, [5], 0)])
    ticket = board.start(running, [(1, [5], 0)])
    board.step(STEP_TICKET, ticket | EXEC << 56)
    assert other.ask("open", config=shared) == Code.OK
    assert other.ask("epoch") == 1
    board.health()
    owners = [text for kind, _, text in board.events() if kind == EV_OWNER]
    assert owners == [f"opened by process {other.pid}"]
    assert other.ask("reset", level=1) == [1, 1]
    assert board.state(ticket) == EXEC, "what is no new epoch is nobody else's"
    assert other.ask("reset", level=4) == [1, 2]
    assert board.state(ticket) == ABORTED
    told = [(kind, text) for kind, _, text in board.events() if kind in (EV_EPOCH, EV_OWNER)]
    assert told == [
        (EV_OWNER, f"reset by process {other.pid}"),
        (EV_EPOCH, "epoch 2 after a device reset by another process"),
    ]
    assert board.describe().owner_pid == other.pid
    assert board.result(ticket).device_epoch == 1
    assert board.apply((COMMIT, 1, 0, 1))[0] == Code.CONFIG_LOST
    assert board.submit(pair, [(0, 1, 1)]) == (Code.STALE_EPOCH, 0)
    assert board.submit(pair, [(0, 1, 1)], epoch=2) == (Code.STALE_GENERATION, 0)
    assert board.counters().device_epoch == board.health().device_epoch == 2
    board.ok("npurt_job_retire", board.device, ticket)
    board.give_back(pair, running)
    board.epoch = 2
    board.configure()
    pair = Pair(board, DECODE)
    board.run(pair, [(0, [5], 0)])
    expected = board.oracle(bench.calbin, [5])[0]
    assert pair.logits() == other.ask("serve") == expected, "both serve again"


def test_a_reset_of_ours_reaches_the_other_process(
    open_board: OpenBoard, other: SecondOwner, shared: str
) -> None:
    board = open_board(shared)
    assert other.ask("open", config=shared) == Code.OK
    assert board.scope(4).effects_yes & OTHER_PROCESS
    report = board.reset(4)
    assert (report.epoch_before, report.epoch_after) == (1, 2)
    assert report.effects_seen & OTHER_PROCESS
    assert other.ask("epoch") == 2
    kinds = [kind for kind, _, _ in other.ask("events")]
    assert kinds == [EV_OWNER, EV_EPOCH]
    assert other.ask("reset", level=4) == [2, 3]
    assert board.health().device_epoch == 3
    assert [kind for kind, _, _ in board.events()][-2:] == [EV_OWNER, EV_EPOCH]


def test_the_epoch_outlives_every_process(bench: Bench, other: SecondOwner, shared: str) -> None:
    board = Board(bench.library, bench.calbin, shared)
    board.reset(4)
    board.close()
    assert other.ask("open", config=shared) == Code.OK
    assert other.ask("epoch") == 2


def test_a_board_at_work_notices_by_itself(
    open_board: OpenBoard, other: SecondOwner, shared: str
) -> None:
    """With a real clock nobody has to call; the job would last for days."""
    board = open_board(f"{shared}\nclock = real\nprofile = cost\ndecode = 1000000s/0ns/0ns")
    assert other.ask("open", config=shared) == Code.OK
    ticket = board.start(Pair(board, DECODE), [(0, [5], 0)])
    assert other.ask("reset", level=4) == [1, 2]
    assert board.wait([ticket], FOREVER) == (Code.OK, 0)
    assert board.result(ticket).state == ABORTED


def test_boards_of_one_process_share_a_file_too(open_board: OpenBoard, shared: str) -> None:
    first, second = open_board(shared), open_board(shared)
    second.reset(4)
    first.txn += 1
    assert first.apply((RESERVE, 0, 0, 1))[0] == Code.CONFIG_LOST
    assert first.health().device_epoch == 2


@pytest.mark.parametrize("content", ["x", "calsim-board 2\n" + "0" * 64, "a" * 79])
def test_a_file_that_is_no_board_is_left_alone(bench: Bench, tmp_path: Path, content: str) -> None:
    file = tmp_path / "board"
    file.write_text(content)
    assert try_open(bench, f"board = {file}", exclusive=False) == Code.INVALID_ARG
    assert file.read_text() == content
    (tmp_path / "link").symlink_to(file)
    assert try_open(bench, f"board = {tmp_path / 'link'}", exclusive=False) == Code.NOT_FOUND
    assert try_open(bench, f"board = {tmp_path}", exclusive=False) == Code.NOT_FOUND
