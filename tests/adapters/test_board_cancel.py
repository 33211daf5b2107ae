"""Cancel on the simulated board: what it ends, what it only notes, and that it frees nothing.

Source: npurt.h (cancel), npurt_sim.h (cancel=), E6, D4.
"""

import ctypes as c
import threading

import pytest
from support.native_board import (
    ABORTED,
    D2H,
    DECODE,
    DONE,
    EXEC,
    FOREVER,
    H2D,
    LOGITS,
    QUEUED,
    RESERVE,
    ROLLBACK,
    STEP_IDLE,
    STEP_ONE,
    STEP_TICKET,
    Bench,
    Board,
    OpenBoard,
    Pair,
)

from laneway.adapters import npurt
from laneway.adapters.npurt import Code

CANCEL_CAP, NO, LIMITED, YES = 7, 1, 2, 3


def cancel(board: Board, ticket: int) -> int:
    return board.code("npurt_job_cancel", board.device, ticket)


@pytest.mark.parametrize(("which", "support"), [("none", NO), ("queued", LIMITED), ("any", YES)])
def test_what_can_be_cancelled_is_told(open_board: OpenBoard, which: str, support: int) -> None:
    board = open_board(f"cancel = {which}", configured=False)
    caps, count = (npurt.Cap * 64)(), c.c_uint32(64)
    board.ok("npurt_device_caps", board.device, caps, c.sizeof(npurt.Cap), c.byref(count))
    assert caps[CANCEL_CAP - 1].id == CANCEL_CAP
    assert caps[CANCEL_CAP - 1].support == support


def test_a_cancelled_job_keeps_everything_until_it_is_retired(board: Board) -> None:
    """OK: noted. Releases nothing."""
    running, queued = Pair(board, DECODE), Pair(board, DECODE)
    board.start(running, [(0, [1], 0)])
    ticket = board.start(queued, [(1, [1], 0)])
    assert cancel(board, ticket) == Code.OK
    assert board.state(ticket) == ABORTED
    assert queued.map(LOGITS) == Code.OBJECT_IN_FLIGHT
    assert board.code("npurt_buffer_destroy", queued.in_) == Code.OBJECT_IN_FLIGHT
    assert (board.lane(1).reserved, board.lane(1).certainty) == (1, 1)
    assert cancel(board, ticket) == Code.CANCEL_TOO_LATE
    board.retire(queued, ticket)
    assert cancel(board, ticket) == Code.STALE_TICKET
    assert board.counters().aborted == 1


def test_a_cancel_wakes_who_waits(board: Board) -> None:
    board.start(Pair(board, DECODE), [(0, [1], 0)])
    board.faults("fault i kind=submit_indeterminate runs=no")
    pair = Pair(board, DECODE)
    board.txn += 1
    assert board.apply((RESERVE, 1, 0, 1))[0] == Code.OK
    code, ticket = board.submit(pair, [(1, 1, 0)])
    assert code == Code.SUBMIT_INDETERMINATE
    answers: list[tuple[int, int]] = []
    thread = threading.Thread(target=lambda: answers.append(board.wait([ticket], FOREVER)))
    thread.start()
    assert cancel(board, ticket) == Code.OK, "what may never run can be taken back"
    thread.join(timeout=60)
    assert answers == [(Code.OK, 0)]
    assert board.apply((ROLLBACK, 1, 0, 1)) == (Code.OK, 99)


def test_a_board_that_cancels_nothing_says_so(open_board: OpenBoard) -> None:
    board = open_board("cancel = none")
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [1], 0)])
    assert cancel(board, ticket) == Code.UNSUPPORTED
    assert board.flags(ticket) == 0
    board.step(STEP_IDLE)
    assert board.result(ticket).state == DONE


@pytest.mark.parametrize(("phase", "effect"), [(H2D, 0), (EXEC, 3)])
def test_a_running_job_ends_with_its_phase(open_board: OpenBoard, phase: int, effect: int) -> None:
    board = open_board("cancel = any")
    pair, behind = Pair(board, DECODE), Pair(board, DECODE)
    ticket = board.start(pair, [(0, [1], 0)])
    board.step(STEP_TICKET, ticket | phase << 56)
    other = board.start(behind, [(1, [2], 0)])
    assert cancel(board, ticket) == Code.OK
    assert (board.state(ticket), board.flags(ticket)) == (phase, npurt.CANCEL_SEEN)
    assert cancel(board, ticket) == Code.OK, "again: noted already"
    board.step(STEP_IDLE)
    result = board.result(ticket)
    assert (result.state, result.status, result.kv_effect) == (ABORTED, Code.JOB_ABORTED, effect)
    assert result.h.flags == npurt.TERMINAL | npurt.QUIESCENT | npurt.CANCEL_SEEN
    assert board.lane(0).certainty == (2 if effect else 1)
    assert board.result(other).state == DONE, "who was behind goes on"
    board.retire(pair, ticket)


def test_a_job_on_its_way_to_the_host_ends_as_ever(open_board: OpenBoard, bench: Bench) -> None:
    board = open_board("cancel = any")
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [5], 0)])
    board.step(STEP_TICKET, ticket | D2H << 56)
    assert cancel(board, ticket) == Code.OK
    board.step(STEP_IDLE)
    result = board.result(ticket)
    assert (result.state, result.kv_effect) == (DONE, 1)
    assert result.h.flags & (npurt.OUTPUT_VALID | npurt.CANCEL_SEEN) == 4 | 32
    assert pair.logits() == board.oracle(bench.calbin, [5])[0]


@pytest.mark.parametrize(("release", "ends"), [("reset1", True), ("never", False)])
def test_a_hung_job_is_cancelled_unless_it_hangs_for_good(
    open_board: OpenBoard, release: str, ends: bool
) -> None:
    board = open_board("cancel = any")
    board.faults(f"fault h kind=hang phase=exec release={release}")
    ticket = board.start(Pair(board, DECODE), [(0, [1], 0)])
    board.step(STEP_IDLE)
    assert cancel(board, ticket) == Code.OK
    assert board.state(ticket) == (ABORTED if ends else EXEC)
    assert board.wait([ticket], 0)[0] == (Code.OK if ends else Code.WAIT_TIMEOUT)


def test_a_job_that_waits_for_its_next_phase_ends_at_once(open_board: OpenBoard) -> None:
    board = open_board("cancel = any")
    board.faults("fault s kind=slow phase=exec factor=1000 nth=1")
    board.start(Pair(board, DECODE), [(0, [1], 0)])
    ticket = board.start(Pair(board, DECODE), [(1, [2], 0)])
    while board.state(ticket) != H2D:
        board.step(STEP_ONE)
    board.step(STEP_ONE)
    assert cancel(board, ticket) == Code.OK
    assert (board.state(ticket), board.result(ticket).kv_effect) == (ABORTED, 0)


def test_queued_is_what_the_states_say(board: Board) -> None:
    ticket = board.start(Pair(board, DECODE), [(0, [1], 0)])
    assert board.state(ticket) == QUEUED
    assert cancel(board, ticket) == Code.OK
    assert board.step(STEP_IDLE) == 0, "its start does not come any more"
