"""The simulated board's contract for jobs, buffers and KV, through its C ABI alone.

Source: npurt.h (states, ownership, submit, wait, KV), npurt_sim.h (transfers, forward).
"""

import ctypes as c
import threading

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
    H2D,
    LANES,
    LENGTHS,
    LOGITS,
    POSITIONS,
    PREFILL,
    PREFILL_4,
    QUEUED,
    RELEASE,
    RESERVE,
    ROLLBACK,
    ROOT,
    STEP_END,
    STEP_IDLE,
    STEP_ONE,
    STEP_TICKET,
    STEP_TIME,
    TOKENS,
    VOCAB,
    Bench,
    Board,
    OpenBoard,
    Pair,
)

from laneway.adapters import npurt
from laneway.adapters.npurt import Code

# ---- forward


def test_prefill_then_decode_equals_the_oracle_bit_for_bit(board: Board, bench: Bench) -> None:
    prefill, decode = Pair(board, PREFILL), Pair(board, DECODE)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    board.run(prefill, [(2, tokens[:5], 0)])
    assert (prefill.logits(), prefill.digest()) == board.oracle(bench.calbin, tokens[:5])
    for length in range(5, 8):
        board.run(decode, [(2, tokens[length : length + 1], length)])
        assert (decode.logits(), decode.digest()) == board.oracle(
            bench.calbin, tokens[: length + 1]
        )
    digest = c.c_uint64(0)
    board.ok("npurt_sim_kv_digest", board.bank, 2, c.byref(digest))
    assert digest.value == board.oracle(bench.calbin, tokens)[1]


def test_a_batch_equals_each_lane_alone_and_inactive_rows_write_nothing(
    board: Board, bench: Bench
) -> None:
    prefill, decode = Pair(board, PREFILL_4), Pair(board, DECODE_4)
    prompts = [[7, 8, 9], [10, 11], [12], [13, 14, 15, 16]]
    board.run(prefill, [(lane, prompt, 0) for lane, prompt in enumerate(prompts)])
    for row, prompt in enumerate(prompts):
        assert prefill.logits(row) == board.oracle(bench.calbin, prompt)[0]
    result = board.run(decode, [(3, [20], 4), (0, [], 0), (1, [21], 2)])
    assert result.lanes_done_mask == 0b101
    assert decode.logits(0) == board.oracle(bench.calbin, [*prompts[3], 20])[0]
    assert decode.logits(2) == board.oracle(bench.calbin, [*prompts[1], 21])[0]
    assert decode.logits(1) == decode.logits(3) == [0] * VOCAB
    assert board.lane(0).committed == 3


def test_captured_logits_and_routing_hold_against_the_golden_file(open_board: OpenBoard) -> None:
    board = open_board("capture = 1")
    golden = np.load(ROOT / "models" / "tiny-moe" / "golden.npz")
    prompt = [int(token) for token in golden["prompt_0"]][:CONTEXT]
    pair = Pair(board, PREFILL)
    ticket = board.start(pair, [(0, prompt, 0)])
    board.step(STEP_IDLE)
    logits = (c.c_float * VOCAB)()
    experts, weights = (c.c_int32 * 2)(), (c.c_float * 2)()
    for position in range(len(prompt)):
        board.ok("npurt_sim_logits", board.device, ticket, 0, position, logits, VOCAB)
        assert np.abs(np.array(logits) - golden["logits_0"][position]).max() < 1e-4
        if golden["route_margin_0"][1, position] > 1e-4:
            place = (ticket, 0, position, 1, experts, weights, 2)
            board.ok("npurt_sim_routing", board.device, *place)
            assert sorted(experts) == sorted(golden["route_idx_0"][1, position])
    assert board.code("npurt_sim_logits", board.device, ticket, 0, 0, logits, 5) == Code.INVALID_ARG
    board.ok("npurt_job_retire", board.device, ticket)
    gone = board.code("npurt_sim_logits", board.device, ticket, 0, 0, logits, VOCAB)
    assert gone == Code.STALE_TICKET


def test_a_poked_kv_row_changes_the_next_logits(board: Board, bench: Bench) -> None:
    prefill, decode = Pair(board, PREFILL), Pair(board, DECODE)
    board.run(prefill, [(1, [3, 1, 4], 0)])
    chip, address, size = c.c_uint32(9), c.c_uint64(0), c.c_uint64(0)
    board.ok("npurt_sim_kv_address", board.bank, 1, c.byref(chip), c.byref(address), c.byref(size))
    assert (chip.value, size.value) == (0, 4 * CONTEXT * 2 * 2 * 16 * 4)
    key = np.zeros(1, np.float32)
    peek = board.code("npurt_sim_peek", board.device, 0, address.value, key.ctypes.data, 4)
    assert peek == Code.OK and key[0] != 0
    key += 8
    board.ok("npurt_sim_poke", board.device, 0, address.value, key.ctypes.data, 4)
    board.run(decode, [(1, [15], 3)])
    assert decode.logits() != board.oracle(bench.calbin, [3, 1, 4, 15])[0]


def test_null_profile_answers_from_token_and_position_only(open_board: OpenBoard) -> None:
    board = open_board("profile = null")
    decode = Pair(board, DECODE)
    answers: list[list[list[int]]] = [[], []]
    for lane in (0, 1):
        for length in range(3):
            board.run(decode, [(lane, [5], length)])
            answers[lane].append(decode.logits())
    assert answers[0] == answers[1]
    assert len({tuple(logits) for logits in answers[0]}) == 3
    assert all(sum(bits != 0 for bits in logits) == 1 for logits in answers[0])


# ---- states and ownership


def test_states_come_in_order_and_only_by_stepping(board: Board) -> None:
    pair = Pair(board, PREFILL)
    ticket = board.start(pair, [(0, [1, 2], 0)])
    seen = [board.state(ticket)]
    completion = npurt.Completion()
    early = board.code("npurt_job_result", board.device, ticket, c.byref(completion))
    assert early == Code.NOT_READY
    while board.step(STEP_ONE):
        seen.append(board.state(ticket))
        told = board.counters()
        assert told.submitted == told.pending + told.running + told.finished
        assert told.left == told.pending + told.running
    assert seen == [QUEUED, H2D, EXEC, D2H, DONE]
    result = board.result(ticket)
    assert result.h.flags == npurt.TERMINAL | npurt.QUIESCENT | npurt.OUTPUT_VALID
    assert (result.client_tag, result.kv_effect, result.engine_used) == (77, 1, 1)
    stamps = result.times
    assert (stamps.h2d_begin, stamps.exec_begin, stamps.d2h_begin) == (0, 1000, 2000)
    assert (stamps.d2h_end, stamps.visible, board.now()) == (3000, 3000, 3000)
    assert (result.times.clock, result.times.valid) == (3, 0x7FF)


def test_a_step_to_an_end_stops_there_or_at_an_instant(board: Board) -> None:
    """The first job's phases end at 1, 2 and 3 us, the second's at 2, 3 and 4."""
    pairs = (Pair(board, PREFILL), Pair(board, PREFILL))
    first, second = (board.start(p, [(lane, [1], 0)]) for lane, p in enumerate(pairs))
    assert board.step(STEP_END, 1999) > 0
    assert (board.state(first), board.now()) == (EXEC, 1000)
    assert board.step(STEP_END, 1999) == 0
    assert board.step(STEP_END, 1 << 40) > 0
    assert (board.state(first), board.now()) == (DONE, 3000)
    assert board.state(second) < DONE
    assert board.step(STEP_END, 1 << 40) > 0
    assert (board.state(second), board.now()) == (DONE, 4000)
    assert board.step(STEP_END, 1 << 40) == 0 and board.now() == 4000


def test_inputs_are_taken_in_the_h2d_phase_not_at_submit(board: Board, bench: Bench) -> None:
    pair = Pair(board, PREFILL)
    ticket = board.start(pair, [(0, [1, 2], 0)])
    pair.view(TOKENS, np.int32)[0, 1] = 40
    board.step(STEP_TICKET, ticket | EXEC << 56)
    pair.view(TOKENS, np.int32)[0, 0] = 41
    board.step(STEP_IDLE)
    assert pair.logits() == board.oracle(bench.calbin, [1, 40])[0]


@pytest.mark.parametrize(
    ("tensor", "value"), [(TOKENS, VOCAB), (TOKENS, -1), (POSITIONS, 7), (LENGTHS, 1)]
)
def test_inputs_that_contradict_the_submit_fail_the_job(
    board: Board, tensor: int, value: int
) -> None:
    pair = Pair(board, PREFILL)
    ticket = board.start(pair, [(0, [1, 2], 0)])
    pair.view(tensor, np.int32)[0, 0] = value
    board.step(STEP_IDLE)
    result = board.result(ticket)
    assert (result.state, result.status, result.kv_effect) == (FAILED, Code.INVALID_ARG, 0)
    assert result.h.flags == npurt.TERMINAL | npurt.QUIESCENT


def test_buffers_are_locked_until_retire(board: Board) -> None:
    pair = Pair(board, PREFILL)
    ticket = board.start(pair, [(0, [1], 0)])
    for state in (QUEUED, DONE):
        board.step(STEP_IDLE) if state == DONE else None
        assert board.state(ticket) == state
        assert pair.map(TOKENS) == Code.OBJECT_IN_FLIGHT
        assert board.code("npurt_buffer_slice", pair.in_, TOKENS, 1, 0, 4) == Code.OBJECT_IN_FLIGHT
        assert board.code("npurt_buffer_restore", pair.in_, 1) == Code.OBJECT_IN_FLIGHT
        assert board.code("npurt_buffer_destroy", pair.out) == Code.OBJECT_IN_FLIGHT
        assert board.code("npurt_kv_close", board.bank) == Code.OBJECT_IN_FLIGHT
        assert board.code("npurt_calbin_release", board.calbin) == Code.OBJECT_IN_FLIGHT
        retired = board.code("npurt_job_retire", board.device, ticket)
        assert retired == (Code.OK if state == DONE else Code.OBJECT_IN_FLIGHT)
    assert pair.map(TOKENS) == Code.OK
    assert board.code("npurt_job_retire", board.device, ticket) == Code.STALE_TICKET


def test_destroyed_handles_are_recognised(board: Board) -> None:
    pair = Pair(board, DECODE)
    assert board.code("npurt_buffer_destroy", pair.in_) == Code.OK
    assert board.code("npurt_buffer_destroy", pair.in_) == Code.BAD_HANDLE
    assert board.code("npurt_kv_close", pair.out) == Code.BAD_HANDLE
    assert board.code("npurt_buffer_destroy", pair.out) == Code.OK
    assert board.code("npurt_kv_close", board.bank) == Code.OK
    info = npurt.KvLaneInfo()
    assert board.code("npurt_kv_lane", board.bank, 0, c.byref(info)) == Code.BAD_HANDLE
    assert board.code("npurt_calbin_release", board.calbin) == Code.OK
    assert board.code("npurt_calbin_release", board.calbin) == Code.BAD_HANDLE
    assert board.code("npurt_device_close", board.device) == Code.OK
    assert board.code("npurt_device_close", board.device) == Code.BAD_HANDLE
    assert board.code("npurt_device_close", c.c_void_p(0x1234567812345671)) == Code.BAD_HANDLE


def test_unmapped_host_memory_is_a_failed_job_and_no_crash(board: Board) -> None:
    before, after = Pair(board, PREFILL), Pair(board, DECODE)
    ticket = board.start(before, [(0, [1, 2], 0)])
    before.memory[POSITIONS].close()
    board.step(STEP_IDLE)
    result = board.result(ticket)
    assert (result.state, result.status, result.kv_effect) == (FAILED, Code.DMA, 0)
    assert result.h.flags == npurt.TERMINAL | npurt.QUIESCENT
    late = board.start(after, [(1, [1], 0)])
    board.step(STEP_TICKET, late | D2H << 56)
    after.memory[LOGITS].close()
    board.step(STEP_IDLE)
    result = board.result(late)
    assert (result.state, result.status, result.kv_effect) == (FAILED, Code.DMA, 1)
    found = board.violations()
    assert len(found) == 2
    assert "HOST_MEMORY_GONE tensor positions" in found[0]
    assert "HOST_MEMORY_GONE tensor logits" in found[1]


def test_memory_of_a_job_in_flight_cannot_be_mapped_again(board: Board) -> None:
    first, second = Pair(board, PREFILL), Pair(board, DECODE)
    ticket = board.start(first, [(0, [1], 0)])
    logits = first.address(LOGITS)
    assert second.map(LOGITS, address=logits) == Code.RANGE_OVERLAP
    assert second.map(LOGITS, address=logits + 64) == Code.ALIGNMENT
    assert second.map(TOKENS, address=first.address(TOKENS)) == Code.OK  # two inputs may share
    board.step(STEP_IDLE)
    board.ok("npurt_job_retire", board.device, ticket)
    assert second.map(LOGITS, address=logits) == Code.OK
    assert ["RANGE_OVERLAP" in text for text in board.violations()] == [True]


def test_a_slice_moves_only_its_part(board: Board, bench: Bench) -> None:
    pair = Pair(board, PREFILL)
    pair.write([([9, 9, 5, 6, 7], 0)])
    pair.view(POSITIONS, np.int32)[0, 2:5] = range(3)
    pair.view(LENGTHS, np.int32)[0, 0] = 3
    for tensor in (TOKENS, POSITIONS):
        board.ok("npurt_buffer_slice", pair.in_, tensor, 1, 2, 3)
    board.txn = 1
    assert board.apply((RESERVE, 0, 0, 4)) == (Code.OK, 99)
    assert board.submit(pair, [(0, 4, 0)]) == (Code.INVALID_ARG, 0)
    assert board.apply((ROLLBACK, 0, 0, 4), (RESERVE, 0, 0, 3)) == (Code.OK, 99)
    code, ticket = board.submit(pair, [(0, 3, 0)])
    assert code == Code.OK
    board.step(STEP_IDLE)
    assert board.result(ticket).state == DONE
    assert pair.logits() == board.oracle(bench.calbin, [5, 6, 7])[0]
    assert board.counters().h2d_bytes == 3 * 4 * 2 + 4
    assert board.code("npurt_buffer_slice", pair.out, LOGITS, 2, 0, 8) == Code.OBJECT_IN_FLIGHT
    board.ok("npurt_job_retire", board.device, ticket)
    assert board.code("npurt_buffer_slice", pair.out, LOGITS, 2, 0, 8) == Code.UNSUPPORTED


# ---- submit, queue, wait


def test_submit_refuses_a_stale_epoch_and_generation_and_queues_nothing(board: Board) -> None:
    pair = Pair(board, DECODE)
    board.txn = 1
    assert board.apply((RESERVE, 0, 0, 1)) == (Code.OK, 99)
    for generation in (0, board.generation - 1, board.generation + 1):
        refused = board.submit(pair, [(0, 1, 0)], generation=generation)
        assert refused == (Code.STALE_GENERATION, 0)
    assert board.submit(pair, [(0, 1, 0)], epoch=2) == (Code.STALE_EPOCH, 0)
    assert board.counters().submitted == 0
    assert board.step(STEP_IDLE) == 0


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([(0, 1, 1)], Code.BAD_STATE),  # another length than committed
        ([(1, 1, 0)], Code.BAD_STATE),  # a lane without reservation
        ([(0, 2, 0)], Code.INVALID_ARG),  # more tokens than the submodel takes
        ([(0, 1, 0), (0, 1, 0)], Code.INVALID_ARG),  # one lane twice
        ([(LANES, 1, 0)], Code.INVALID_ARG),  # no such lane
        ([(0, 0, 0)], Code.INVALID_ARG),  # nobody active
        ([], Code.INVALID_ARG),
    ],
)
def test_submit_refuses_rows_that_the_bank_does_not_know(
    board: Board, rows: list[tuple[int, int, int]], code: Code
) -> None:
    pair = Pair(board, DECODE_4)
    board.txn = 5
    assert board.apply((RESERVE, 0, 0, 1)) == (Code.OK, 99)
    assert board.submit(pair, rows) == (code, 0)
    board.txn = 6
    assert board.submit(pair, [(0, 1, 0)]) == (Code.BAD_STATE, 0)  # another txn
    board.txn = 5
    assert board.submit(pair, [(0, 1, 0)])[0] == Code.OK


def test_two_jobs_are_taken_and_a_third_is_refused(open_board: OpenBoard) -> None:
    board = open_board("overlap = 0")
    pairs = [Pair(board, DECODE) for _ in range(3)]
    first = board.start(pairs[0], [(0, [1], 0)])
    second = board.start(pairs[1], [(1, [2], 0)])
    board.txn += 1
    assert board.apply((RESERVE, 2, 0, 1)) == (Code.OK, 99)
    assert board.submit(pairs[2], [(2, 1, 0)]) == (Code.QUEUE_FULL, 0)
    assert list(board.counters().inflight) == [1, 1]
    board.step(STEP_TICKET, first | DONE << 56)
    assert (board.state(first), board.state(second)) == (DONE, QUEUED)
    assert board.submit(pairs[2], [(2, 1, 0)], engine=2) == (Code.QUEUE_FULL, 0)
    board.step(STEP_IDLE)
    assert board.result(second).engine_used == 2
    assert board.result(second).times.h2d_begin == board.result(first).times.d2h_end


def test_cancel_ends_a_queued_job_only(board: Board) -> None:
    running, queued = Pair(board, DECODE), Pair(board, DECODE)
    first = board.start(running, [(0, [1], 0)])
    second = board.start(queued, [(1, [1], 0)])
    board.step(STEP_ONE)
    assert board.code("npurt_job_cancel", board.device, first) == Code.CANCEL_TOO_LATE
    assert board.code("npurt_job_cancel", board.device, second) == Code.OK
    result = board.result(second)
    assert (result.state, result.status) == (ABORTED, Code.JOB_ABORTED)
    assert result.h.flags == npurt.TERMINAL | npurt.QUIESCENT | npurt.CANCEL_SEEN
    assert board.apply((ROLLBACK, 1, 0, 1)) == (Code.OK, 99)
    board.step(STEP_IDLE)
    assert board.state(first) == DONE
    counters = board.counters()
    assert (counters.submitted, counters.finished, counters.aborted) == (2, 1, 1)


def test_wait_polls_and_names_a_terminal_ticket(board: Board) -> None:
    slow, quick = Pair(board, DECODE), Pair(board, DECODE)
    tickets = [board.start(slow, [(0, [1], 0)]), board.start(quick, [(1, [1], 0)])]
    assert board.wait(tickets, 0) == (Code.WAIT_TIMEOUT, 99)
    board.ok("npurt_job_cancel", board.device, tickets[1])
    assert board.wait(tickets, 0) == (Code.OK, 1)
    assert board.wait([tickets[0], 1 << 60], 0)[0] == Code.STALE_TICKET


@pytest.mark.parametrize(
    ("waker", "code"),
    [
        *(("step", Code.OK), ("reset", Code.OK)),
        *(("time", Code.WAIT_TIMEOUT), ("close", Code.BAD_HANDLE)),
    ],
)
def test_a_blocked_wait_is_woken(board: Board, waker: str, code: Code) -> None:
    if waker == "time":
        board.faults("fault h kind=hang phase=h2d")
    ticket = board.start(Pair(board, DECODE), [(0, [1], 0)])
    answers: list[tuple[int, int]] = []
    timeout = 500 if waker == "time" else FOREVER
    thread = threading.Thread(target=lambda: answers.append(board.wait([ticket], timeout)))
    thread.start()
    if waker == "step":
        board.step(STEP_IDLE)
    elif waker == "reset":
        board.reset(1)
    elif waker == "close":
        board.close()
    while waker == "time" and thread.is_alive():
        board.step(STEP_TIME, board.now() + 600)
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert answers[0][0] == code


def test_the_real_clock_runs_by_itself(open_board: OpenBoard, bench: Bench) -> None:
    board = open_board("clock = real\nscale = 1000")
    pairs = [Pair(board, DECODE), Pair(board, DECODE)]
    for length in range(4):
        tickets = [board.start(pair, [(lane, [9], length)]) for lane, pair in enumerate(pairs)]
        for ticket in tickets:
            assert board.wait([ticket], FOREVER) == (Code.OK, 0)
            stamps = board.result(ticket).times
            assert stamps.exec_end >= stamps.exec_begin + 1000
        ops = [(COMMIT, lane, length, length + 1) for lane in (0, 1)]
        assert board.apply(ops[1]) == (Code.OK, 99)
        assert board.apply(ops[0], txn=board.txn - 1) == (Code.OK, 99)
        for ticket in tickets:
            board.ok("npurt_job_retire", board.device, ticket)
    assert pairs[0].logits() == pairs[1].logits() == board.oracle(bench.calbin, [9] * 4)[0]
    assert board.code("npurt_sim_step", board.device, STEP_ONE, 0, None) == Code.BAD_STATE


# ---- KV


def test_nothing_is_applied_twice(board: Board) -> None:
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [1], 0)])
    assert board.apply((COMMIT, 0, 0, 1)) == (Code.OBJECT_IN_FLIGHT, 0)
    board.step(STEP_IDLE)
    assert board.apply((RESERVE, 0, 0, 1)) == (Code.BAD_STATE, 0)
    assert board.apply((COMMIT, 0, 0, 1), txn=99) == (Code.BAD_STATE, 0)
    assert board.apply((COMMIT, 0, 0, 1)) == (Code.OK, 99)
    assert board.apply((COMMIT, 0, 0, 1)) == (Code.BAD_STATE, 0)
    assert board.apply((ROLLBACK, 0, 0, 1)) == (Code.BAD_STATE, 0)
    assert board.lane(0).committed == 1
    board.ok("npurt_job_retire", board.device, ticket)
    assert board.apply((RELEASE, 0, 0, 0)) == (Code.OK, 99)
    assert board.apply((RELEASE, 0, 0, 0)) == (Code.BAD_STATE, 0)


def test_a_list_is_applied_whole_or_not_at_all(board: Board) -> None:
    board.txn = 1
    code = board.apply((RESERVE, 0, 0, 4), (RESERVE, 1, 0, CONTEXT), (RESERVE, 2, 0, CONTEXT + 1))
    assert code == (Code.KV_NO_SPACE, 2)
    assert [board.lane(lane).bound for lane in range(3)] == [0, 0, 0]
    assert board.apply((RESERVE, 0, 0, 4), (ROLLBACK, 0, 0, 4), (RESERVE, 0, 0, 5)) == (0, 99)
    lane = board.lane(0)
    assert (lane.bound, lane.committed, lane.reserved, lane.txn) == (1, 0, 5, 1)
    answer = npurt.KvAnswer()
    op = npurt.KvOp(op=RESERVE, lane=1, to_len=9, seq_tag=1, txn=2)
    size = c.sizeof(op)
    can = (board.bank, c.byref(op), size, 1, c.byref(answer))
    assert board.code("npurt_kv_can_allocate", *can) == Code.OK
    assert (answer.free_lanes, answer.fit_len) == (LANES - 1, CONTEXT)
    assert list(answer.need_bytes)[:3] == [9 * 256, 9 * 256, 0]
    assert list(answer.free_bytes)[:2] == [(LANES * CONTEXT - 5) * 256] * 2
    assert board.lane(1).bound == 0


def test_committing_what_no_job_wrote_is_a_violation(board: Board) -> None:
    board.txn = 1
    assert board.apply((RESERVE, 0, 0, 4), (COMMIT, 0, 0, 4)) == (Code.OK, 99)
    assert "COMMIT_UNWRITTEN" in board.violations()[0]
