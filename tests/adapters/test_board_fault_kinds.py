"""Each kind of fault of the simulated board beyond the first three, through its C ABI alone.

Source: npurt.h (submit, completion, KV), npurt_sim.h (fault plan), D2, D3, D6, E14, E17.
"""

import ctypes as c
import hashlib

import numpy as np
import pytest
from support.native_board import (
    ABORTED,
    COMMIT,
    CONTEXT,
    D2H,
    DECODE,
    DECODE_4,
    DONE,
    EXEC,
    FAILED,
    FOREVER,
    LOGITS,
    PREFILL,
    QUEUED,
    RELEASE,
    RESERVE,
    ROLLBACK,
    STEP_IDLE,
    STEP_TICKET,
    STEP_TIME,
    Bench,
    Board,
    OpenBoard,
    Pair,
)

from laneway.adapters import npurt
from laneway.adapters.npurt import Code

EV_LATE_COMPLETION = 4


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ("kind=submit_indeterminate runs=maybe", "runs=maybe: expected yes or no"),
        ("kind=submit_indeterminate code=1", "unknown key 'code' for kind=submit_indeterminate"),
        ("kind=submit_indeterminate on=exec", "on=exec does not go with"),
        ("kind=csr_fail k=-1", "k=-1"),
        ("kind=csr_fail runs=yes", "unknown key 'runs'"),
        ("kind=slow", "slow needs factor="),
        ("kind=slow factor=0.5", "factor=0.5"),
        ("kind=slow factor=2 on=submit", "on=submit does not go with"),
        ("kind=slow factor=2 release=never", "unknown key 'release'"),
        ("kind=dma_error", "a dma_error needs dir= or on="),
        ("kind=dma_error dir=exec", "dir=exec does not go with"),
        ("kind=dma_error dir=h2d on=d2h", "on= and dir= name different points"),
        ("kind=dma_error dir=h2d offset=x", "offset=x"),
        ("kind=numeric_nan lanes=0", "lanes=0"),
        ("kind=numeric_nan flag=yes", "flag=yes: expected y or n"),
        ("kind=lost_completion poll_sees=no", "poll_sees=no: expected y or n"),
        ("kind=lost_completion delay=1s", "unknown key 'delay'"),
        ("kind=late_completion", "late_completion needs delay="),
        ("kind=late_completion delay=3", "delay=3"),
        ("kind=late_completion delay=1s after=reset", "after=reset"),
        ("kind=late_dma bytes=8", "late_dma needs delay="),
        ("kind=late_dma delay=1s bytes=0", "bytes=0"),
        ("kind=late_dma delay=1s on=d2h", "on=d2h does not go with"),
        ("kind=kv_apply_before code=0x601", "code=0x601"),
        ("kind=kv_apply_before code=0x704", "partial=y goes with code=0x704"),
        ("kind=kv_apply_after code=0x703 partial=y", "partial=y goes with code=0x704"),
        ("kind=kv_apply_after partial=yes", "partial=yes: expected y or n"),
        ("kind=kv_apply_after task=decode", "is about no job: no task=, engine="),
        ("kind=kv_apply_before on=kv_apply_after", "on=kv_apply_after does not go with"),
        ("kind=kv_can_lie", "kv_can_lie needs tokens="),
        ("kind=kv_can_lie tokens=many", "tokens=many: expected a whole number"),
        ("kind=counter_skew field=finished", "counter_skew needs field= and n="),
        ("kind=counter_skew n=1", "counter_skew needs field= and n="),
        ("kind=counter_skew field=inflight n=1", "field=inflight is not a counter"),
        ("kind=counter_skew field=late n=1 lane=2", "no task=, engine=, lane= or model="),
    ],
)
def test_a_wrong_rule_is_refused_with_its_line(board: Board, rule: str, complaint: str) -> None:
    plan = f"fault ok kind=csr_fail\n\nfault a {rule}"
    answer = board.library.attempt("npurt_sim_faults", board.device, plan.encode())
    assert answer.code == Code.INVALID_ARG
    assert "fault plan line 3: " in answer.words
    assert complaint in answer.words


# ---- submit


def reserve_and_submit(board: Board, pair: Pair, lane: int, token: int) -> tuple[int, int]:
    board.txn += 1
    pair.write([([token], 0)])
    assert board.apply((RESERVE, lane, 0, 1))[0] == Code.OK
    return board.submit(pair, [(lane, 1, 0)])


def test_a_doubtful_submit_may_run(board: Board, bench: Bench) -> None:
    board.faults("fault i kind=submit_indeterminate runs=yes")
    pair = Pair(board, DECODE)
    code, ticket = reserve_and_submit(board, pair, 0, 5)
    assert code == Code.SUBMIT_INDETERMINATE
    assert ticket != 0
    assert pair.map(LOGITS) == Code.OBJECT_IN_FLIGHT, "its buffers are locked all the same"
    board.step(STEP_IDLE)
    assert board.state(ticket) == DONE
    assert pair.logits() == board.oracle(bench.calbin, [5])[0]
    assert board.counters().submitted == 1


def test_a_doubtful_submit_may_never_run(board: Board) -> None:
    board.faults("fault i kind=submit_indeterminate runs=no nth=1")
    code, ticket = reserve_and_submit(board, Pair(board, DECODE), 0, 5)
    assert (code, ticket != 0) == (Code.SUBMIT_INDETERMINATE, True)
    behind = Pair(board, DECODE)
    other = board.start(behind, [(1, [1], 0)])
    board.step(STEP_IDLE)
    assert (board.state(ticket), board.state(other)) == (QUEUED, DONE)
    assert (board.counters().pending, board.counters().finished) == (1, 1)
    assert board.wait([ticket], 0)[0] == Code.WAIT_TIMEOUT
    assert board.code("npurt_job_retire", board.device, ticket) == Code.OBJECT_IN_FLIGHT
    assert board.reset(1).jobs_aborted == 1
    assert (board.result(ticket).state, board.result(ticket).kv_effect) == (ABORTED, 0)


def test_a_register_that_fails_queues_nothing(board: Board) -> None:
    board.faults("fault c kind=csr_fail k=3")
    pair = Pair(board, DECODE)
    assert reserve_and_submit(board, pair, 0, 5) == (Code.CSR_FAILED, 0)
    words = c.create_string_buffer(256)
    board.ok("npurt_last_error", words, 256)
    assert words.value.startswith(b"register 3 is not set")
    assert board.counters().submitted == 0
    assert board.apply((ROLLBACK, 0, 0, 1)) == (Code.OK, 99)
    board.run(pair, [(0, [5], 0)])


# ---- phases


@pytest.mark.parametrize(
    ("phase", "took"), [("h2d", (2500, 1000, 1000)), ("d2h", (1000, 1000, 2500))]
)
def test_a_slow_phase_takes_longer_and_is_right(
    board: Board, bench: Bench, phase: str, took: tuple[int, int, int]
) -> None:
    board.faults(f"fault s kind=slow phase={phase} factor=2.5")
    pair = Pair(board, DECODE)
    times = board.run(pair, [(0, [5], 0)]).times
    lasted = (
        times.h2d_end - times.h2d_begin,
        times.exec_end - times.exec_begin,
        times.d2h_end - times.d2h_begin,
    )
    assert lasted == took
    assert pair.logits() == board.oracle(bench.calbin, [5])[0]


def test_a_transfer_to_the_device_breaks_off(board: Board) -> None:
    board.faults("fault e kind=dma_error dir=h2d offset=5")
    pair = Pair(board, PREFILL)
    ticket = board.start(pair, [(0, [1, 2], 0)])
    board.step(STEP_IDLE)
    result = board.result(ticket)
    assert (result.state, result.status, result.kv_effect) == (FAILED, Code.DMA, 0)
    assert result.h.flags == npurt.TERMINAL | npurt.QUIESCENT
    assert board.apply((ROLLBACK, 0, 0, 2)) == (Code.OK, 99)
    assert board.counters().h2d_bytes == 0
    assert board.violations() == [], "the host did nothing wrong"


def test_a_transfer_to_the_host_breaks_off_with_part_of_the_output(
    board: Board, bench: Bench
) -> None:
    board.faults("fault e kind=dma_error on=d2h offset=10")
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [5], 0)])
    tag = pair.logits()
    board.step(STEP_IDLE)
    result = board.result(ticket)
    assert (result.state, result.status, result.kv_effect) == (FAILED, Code.DMA, 1)
    assert result.h.flags & npurt.OUTPUT_VALID == 0
    expected = board.oracle(bench.calbin, [5])[0]
    assert (pair.logits()[:5], pair.logits()[5:]) == (expected[:5], tag[5:])
    board.retire(pair, ticket)
    assert board.violations() == []


@pytest.mark.parametrize(("flag", "told"), [("y", npurt.NUMERIC_FLAG), ("n", 0)])
def test_undefined_numbers_come_in_the_named_lanes_only(
    board: Board, bench: Bench, flag: str, told: int
) -> None:
    board.faults(f"fault n kind=numeric_nan lanes=0xa flag={flag}")
    pair = Pair(board, DECODE_4)
    result = board.run(pair, [(lane, [lane + 1], 0) for lane in range(4)])
    assert result.h.flags & npurt.NUMERIC_FLAG == told
    for lane in range(4):
        expected = np.array(board.oracle(bench.calbin, [lane + 1])[0])
        got = np.array(pair.logits(lane))
        spoilt = (got & 0x7F80 == 0x7F80) & (got & 0x7F != 0)
        assert spoilt.sum() == (1 if lane in (1, 3) else 0)
        assert (got[~spoilt] == expected[~spoilt]).all()
    board.run(pair, [(lane, [9], 1) for lane in range(4)])
    for lane in range(4):
        assert pair.logits(lane) == board.oracle(bench.calbin, [lane + 1, 9])[0], "KV is whole"


# ---- the end becomes known


def test_a_completion_that_no_wait_tells_is_seen_by_a_poll(board: Board, bench: Bench) -> None:
    board.faults("fault l kind=lost_completion poll_sees=y")
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [5], 0)])
    board.step(STEP_IDLE)
    for _ in range(2):
        assert board.wait([ticket], 0)[0] == Code.WAIT_TIMEOUT
        assert board.state(ticket) == DONE
    assert board.result(ticket).h.flags & npurt.OUTPUT_VALID
    assert pair.logits() == board.oracle(bench.calbin, [5])[0]
    assert board.apply((COMMIT, 0, 0, 1)) == (Code.OK, 99)
    board.retire(pair, ticket)
    board.run(pair, [(0, [6], 1)])


def test_a_completion_that_nobody_tells_leaves_the_job_running(board: Board) -> None:
    board.faults("fault l kind=lost_completion poll_sees=n")
    ticket = board.start(Pair(board, DECODE), [(0, [5], 0)])
    other = board.start(Pair(board, DECODE), [(1, [5], 0)])
    board.step(STEP_IDLE)
    assert (board.state(ticket), board.state(other)) == (D2H, DONE)
    assert board.wait([ticket], 0)[0] == Code.WAIT_TIMEOUT
    assert board.wait([ticket, other], 0) == (Code.OK, 1)
    completion = npurt.Completion()
    answer = board.code("npurt_job_result", board.device, ticket, c.byref(completion))
    assert answer == Code.NOT_READY
    assert board.apply((COMMIT, 0, 0, 1), txn=1) == (Code.OBJECT_IN_FLIGHT, 0)
    assert (board.counters().running, board.counters().finished) == (1, 1)
    assert board.reset(1).jobs_aborted == 1
    assert (board.result(ticket).state, board.result(ticket).kv_effect) == (ABORTED, 3)


def test_a_late_completion_comes_once_and_says_so(board: Board, bench: Bench) -> None:
    board.faults("fault l kind=late_completion delay=7us")
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [5], 0)])
    board.events()
    board.step(STEP_TIME, 9_999)
    assert (board.state(ticket), board.counters().late) == (D2H, 0)
    board.step(STEP_TIME, 10_000)  # three phases of 1 us, then 7 us
    result = board.result(ticket)
    assert (result.state, result.times.d2h_end, result.times.visible) == (DONE, 3_000, 10_000)
    assert result.h.flags == (npurt.TERMINAL | npurt.QUIESCENT | npurt.OUTPUT_VALID | npurt.LATE)
    assert pair.logits() == board.oracle(bench.calbin, [5])[0]
    assert (board.counters().late, board.counters().finished) == (1, 1)
    assert [(kind, about) for kind, about, _ in board.events()] == [(EV_LATE_COMPLETION, ticket)]
    board.step(STEP_IDLE)
    assert board.counters().finished == 1
    assert board.apply((COMMIT, 0, 0, 1)) == (Code.OK, 99)


def test_a_late_completion_does_not_outlive_a_reset(board: Board) -> None:
    board.faults("fault l kind=late_completion delay=1s")
    ticket = board.start(Pair(board, DECODE), [(0, [5], 0)])
    board.step(STEP_TICKET, ticket | EXEC << 56)
    board.step(STEP_TIME, 5_000)
    assert board.reset(1).jobs_aborted == 1
    board.step(STEP_IDLE)
    assert (board.result(ticket).state, board.counters().late) == (ABORTED, 0)


def test_what_comes_late_keeps_nobody_waiting_in_running_time(
    open_board: OpenBoard, bench: Bench
) -> None:
    board = open_board("clock = real")
    board.faults(
        "fault l kind=late_completion delay=100000s nth=1\nfault m kind=late_completion"
        " delay=1us nth=3"
    )
    late = board.start(Pair(board, DECODE), [(0, [5], 0)])
    for lane, flags in ((1, 0), (2, npurt.LATE)):
        pair = Pair(board, DECODE)
        ticket = board.start(pair, [(lane, [6], 0)])
        assert board.wait([ticket], FOREVER) == (Code.OK, 0)
        assert board.result(ticket).h.flags & npurt.LATE == flags
        assert pair.logits() == board.oracle(bench.calbin, [6])[0]
        board.retire(pair, ticket)
    assert board.state(late) == D2H  # and the board is closed with its end to come


def late_writer(board: Board, *, quiesce: str) -> tuple[Pair, int]:
    """A job that failed at 2 us, with its logits set to zero, and a late write 5 us behind it."""
    board.faults(
        f"fault x kind=ccu_exception quiesce={quiesce} kv=unknown\n"
        "fault d kind=late_dma delay=5us bytes=33"
    )
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [5], 0)])
    board.step(STEP_TIME, 2_000)
    assert board.state(ticket) == FAILED
    pair.view(LOGITS, np.uint8)[:] = 0
    return pair, ticket


def test_a_late_write_goes_to_memory_of_a_job_that_was_never_quiescent(board: Board) -> None:
    pair, _ = late_writer(board, quiesce="n")
    board.step(STEP_TIME, 6_999)
    assert not pair.view(LOGITS, np.uint8).any()
    board.step(STEP_TIME, 7_000)
    written = pair.view(LOGITS, np.uint8)[0]
    assert (written[:33] != 0).all(), "undefined numbers have no zero byte here"
    assert not written[33:].any()
    assert board.violations() == []


def test_a_late_write_never_comes_once_the_job_is_quiescent(board: Board) -> None:
    pair, _ = late_writer(board, quiesce="y")
    board.step(STEP_IDLE)
    assert not pair.view(LOGITS, np.uint8).any()


def test_a_late_write_is_stopped_by_a_reset(board: Board) -> None:
    pair, ticket = late_writer(board, quiesce="n")
    board.reset(1)
    board.retire(pair, ticket)
    board.step(STEP_IDLE)
    assert not pair.view(LOGITS, np.uint8).any()


def test_a_late_write_that_finds_no_memory_blames_the_host(board: Board) -> None:
    pair, ticket = late_writer(board, quiesce="n")
    pair.memory[LOGITS].close()
    board.step(STEP_IDLE)
    ((blamed, text),) = board.blames()
    assert blamed == ticket
    assert text == "HOST_MEMORY_GONE tensor logits: the job was never quiescent"


# ---- KV


@pytest.mark.parametrize("code", [Code.KV_APPLY, Code.KV_NO_SPACE])
def test_a_list_fails_before_a_job_and_the_bank_is_as_it_was(board: Board, code: int) -> None:
    board.faults(f"fault k kind=kv_apply_before code={code:#x} nth=2")
    pair = Pair(board, DECODE)
    board.run(pair, [(0, [5], 0)])
    before = bytes(board.lane(0)), bytes(board.lane(1))
    assert board.apply((RESERVE, 1, 0, 1), (RESERVE, 0, 1, 2), txn=50) == (code, 0)
    assert (bytes(board.lane(0)), bytes(board.lane(1))) == before
    assert board.apply((RESERVE, 1, 0, 1), (RESERVE, 0, 1, 2), txn=50) == (Code.OK, 99)


def test_a_list_fails_after_a_job_and_the_bank_is_as_it_was(board: Board) -> None:
    board.faults("fault k kind=kv_apply_after lane=0")
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [5], 0)])
    board.step(STEP_IDLE)
    before = bytes(board.lane(0))
    failed = board.apply((RESERVE, 1, 0, 1), (COMMIT, 0, 0, 1))
    assert failed == (Code.KV_APPLY, 1), "the operation that settles is to blame"
    assert (bytes(board.lane(0)), board.lane(1).bound) == (before, 0)
    assert board.apply((COMMIT, 0, 0, 1)) == (Code.OK, 99)
    board.retire(pair, ticket)


def test_a_list_that_fails_half_way_leaves_its_lanes_unknown(board: Board) -> None:
    board.faults("fault k kind=kv_apply_before partial=y")
    assert board.apply((RESERVE, 0, 0, 1), (RESERVE, 2, 0, 1), txn=5) == (Code.KV_UNKNOWN, 0)
    assert [board.lane(lane).certainty for lane in range(4)] == [2, 1, 2, 1]
    assert board.apply((RESERVE, 0, 0, 1), txn=5) == (Code.KV_UNKNOWN, 0)
    assert board.apply((RELEASE, 0, 0, 0), (RELEASE, 2, 0, 0)) == (Code.OK, 99)
    assert board.apply((RESERVE, 0, 0, 1), txn=5) == (Code.OK, 99)


def test_a_list_that_both_settles_and_reserves_fails_once(board: Board) -> None:
    board.faults("fault a kind=kv_apply_after\nfault b kind=kv_apply_before nth=2")
    pair = Pair(board, DECODE)
    board.start(pair, [(0, [5], 0)])  # the first list that reserves
    board.step(STEP_IDLE)
    both = ((COMMIT, 0, 0, 1), (RESERVE, 1, 0, 1))
    assert board.apply(*both) == (Code.KV_APPLY, 0)
    assert board.apply(*both) == (Code.KV_APPLY, 1)
    assert board.apply(*both) == (Code.OK, 99)


def can_reserve(board: Board, to_len: int) -> tuple[int, npurt.KvAnswer]:
    answer = npurt.KvAnswer()
    op = npurt.KvOp(op=RESERVE, lane=1, to_len=to_len, seq_tag=2, txn=9)
    code = board.code(
        "npurt_kv_can_allocate", board.bank, c.byref(op), c.sizeof(op), 1, c.byref(answer)
    )
    return code, answer


def test_an_answer_about_kv_space_may_be_a_lie(board: Board) -> None:
    board.faults("fault y kind=kv_can_lie tokens=1 nth=1\nfault n kind=kv_can_lie tokens=-60 nth=1")
    code, answer = can_reserve(board, CONTEXT + 1)
    assert (code, answer.fit_len) == (Code.OK, CONTEXT + 1)
    assert board.apply((RESERVE, 1, 0, CONTEXT + 1), txn=9) == (Code.KV_NO_SPACE, 0)
    board.faults("fault n kind=kv_can_lie tokens=-60", arm=False)
    code, answer = can_reserve(board, CONTEXT - 59)
    assert (code, answer.fit_len) == (Code.KV_NO_SPACE, CONTEXT - 60)
    code, answer = can_reserve(board, CONTEXT)
    assert (code, answer.fit_len) == (Code.OK, CONTEXT)
    assert board.apply((RESERVE, 1, 0, CONTEXT), txn=9) == (Code.OK, 99)


# ---- counters


def test_a_skewed_counter_is_what_is_read_and_not_what_is_counted(board: Board) -> None:
    board.faults(
        "fault u kind=counter_skew field=finished n=5 nth=2\n"
        "fault d kind=counter_skew field=left n=-1 nth=3"
    )
    board.run(Pair(board, DECODE), [(0, [5], 0)])
    readings = [board.counters() for _ in range(4)]
    assert [told.finished for told in readings] == [1, 6, 1, 1]
    assert [told.left for told in readings] == [0, 0, (1 << 64) - 1, 0]


# ---- determinism


PLAN = """
fault i kind=submit_indeterminate p=0.15 runs=yes
fault k kind=csr_fail p=0.1
fault w kind=slow phase=exec p=0.2 factor=4
fault e kind=dma_error dir=d2h p=0.1 offset=9
fault n kind=numeric_nan p=0.2 lanes=0x5
fault l kind=lost_completion p=0.2
fault o kind=late_completion p=0.2 delay=2us
fault x kind=ccu_exception p=0.1 kv=partial quiesce=n
fault d kind=late_dma p=0.5 delay=1us
fault b kind=kv_apply_before p=0.1
fault a kind=kv_apply_after p=0.1 partial=y
fault c kind=counter_skew field=late n=3 p=0.5
"""


def play(board: Board) -> tuple[bytes, str]:
    """Play one fixed order of calls over a plan with chances; return trace and outputs' digest."""
    board.faults(PLAN)
    outputs = hashlib.sha256()
    for turn in range(40):
        lane = turn % 4
        pair = Pair(board, DECODE)
        board.txn += 1
        pair.write([([turn], 0)])
        code, ticket = board.apply((RESERVE, lane, 0, 1))[0], 0
        if code == Code.OK:
            code, ticket = board.submit(pair, [(lane, 1, 0)])
        board.step(STEP_IDLE)
        outputs.update(f"{code} {board.counters().late}".encode())
        if ticket:
            result = board.result(ticket)
            outputs.update(f"{result.state} {result.h.flags}".encode())
            if result.h.flags & npurt.OUTPUT_VALID:
                outputs.update(pair.view(LOGITS, np.uint8).tobytes())
            if not result.h.flags & npurt.QUIESCENT:
                board.reset(1)
            board.ok("npurt_job_retire", board.device, ticket)
        for _ in range(3):
            if board.apply((RELEASE, lane, 0, 0))[0] == Code.OK:
                break
    return board.trace(), outputs.hexdigest()


@pytest.mark.slow
def test_same_seed_and_calls_give_the_same_trace_under_every_kind(open_board: OpenBoard) -> None:
    played = set()
    for seed in range(8):
        trace, outputs = play(open_board(f"seed = {seed}"))
        again, same = play(open_board(f"seed = {seed}\nclock = virtual"))
        assert (again.replace(b"clock=2", b"clock=0", 1), same) == (trace, outputs)
        played.add(trace.partition(b"\n")[2])
    assert len(played) == 8
    fired = {
        word.partition(b"=")[2]
        for trace in played
        for line in trace.splitlines()
        if line.endswith(b"decision=fire")
        for word in line.split()
        if word.startswith(b"rule=")
    }
    assert fired == {line.split()[1].encode() for line in PLAN.strip().splitlines()}
