"""Faults, determinism and resets of the simulated board, through its C ABI alone.

Source: npurt.h (reset levels), npurt_sim.h (faults, determinism).
"""

import ctypes as c

import pytest
from support.native_board import (
    ABORTED,
    COMMIT,
    D2H,
    DECODE,
    DECODE_4,
    DONE,
    EXEC,
    FAILED,
    H2D,
    LANES,
    LOGITS,
    LOST,
    QUEUED,
    RELEASE,
    RESERVE,
    ROLLBACK,
    STEP_IDLE,
    STEP_TIME,
    Bench,
    Board,
    OpenBoard,
    Pair,
)

from laneway.adapters import npurt
from laneway.adapters.npurt import Code


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        ("\n# nothing\nfault a kind=meltdown", "line 3: kind=meltdown"),
        ("fault a kind=hang", "line 1: a hang needs phase="),
        ("fault a kind=hang phase=exec\nfault a kind=hang phase=d2h", "line 2: id 'a' a second"),
        ("fault a kind=hang on=wait", "line 1: on=wait: this board injects at"),
        ("fault a kind=hang phase=exec on=h2d", "different points"),
        ("fault a kind=hang phase=exec color=red", "unknown key 'color'"),
        ("fault a kind=hang phase=exec code=1", "unknown key 'code'"),
        ("fault a kind=submit_reject on=exec", "does not go with kind=submit_reject"),
        ("fault a kind=submit_reject code=0x602", "code=0x602"),
        ("fault a kind=ccu_exception kv=applied", "kv=applied"),
        ("fault a kind=ccu_exception nth=1 every=2", "only one of"),
        ("fault a kind=ccu_exception nth=0", "nth=0"),
        ("fault a kind=ccu_exception p=1.5", "p=1.5"),
        ("fault a kind=ccu_exception after=3", "after=3"),
        ("fault a kind=ccu_exception chip=2", "chip=2"),
        ("fault a kind=ccu_exception nth>=2", "unknown key 'nth>'"),
        ("fault a kind=ccu_exception inflight=2", "inflight takes >="),
        ("fault kind=hang phase=exec", "comes an id"),
        ("error a kind=hang", "begins with 'fault'"),
    ],
)
def test_a_wrong_fault_plan_is_refused_with_its_line(
    board: Board, plan: str, complaint: str
) -> None:
    answer = board.library.attempt("npurt_sim_faults", board.device, plan.encode())
    assert answer.code == Code.INVALID_ARG
    assert complaint in answer.words


def test_a_rejected_submit_leaves_everything_untouched(board: Board) -> None:
    board.faults("fault r kind=submit_reject nth=2 code=0x301", arm=False)
    pair = Pair(board, DECODE)
    board.run(pair, [(0, [1], 0)])  # not armed: does not count
    board.ok("npurt_sim_arm", board.device)
    board.run(pair, [(0, [1], 1)])
    board.txn += 1
    assert board.apply((RESERVE, 0, 2, 3)) == (Code.OK, 99)
    assert board.submit(pair, [(0, 1, 2)]) == (Code.QUEUE_FULL, 0)
    assert board.counters().submitted == 2
    assert board.submit(pair, [(0, 1, 2)])[0] == Code.OK  # count defaults to 1


@pytest.mark.parametrize("quiesce", ["y", "n"])
@pytest.mark.parametrize(("kv", "effect"), [("none", 0), ("partial", 2), ("unknown", 3)])
def test_a_ccu_exception_reports_what_it_left(
    board: Board, quiesce: str, kv: str, effect: int
) -> None:
    board.faults(
        f"fault x kind=ccu_exception task=decode chip=1 code=9 pc=0x40 quiesce={quiesce} kv={kv}"
    )
    pair = Pair(board, DECODE_4)
    ticket = board.start(pair, [(lane, [lane], 0) for lane in range(4)])
    board.step(STEP_IDLE)
    result = board.result(ticket)
    assert (result.state, result.status) == (FAILED, Code.CCU_EXCEPTION)
    assert (result.ccu.valid, result.ccu.chip, result.ccu.code, result.ccu.pc) == (1, 1, 9, 0x40)
    assert (result.kv_effect, result.lanes_done_mask) == (effect, 0b11 if effect == 2 else 0)
    certain = [board.lane(lane).certainty for lane in range(4)]
    assert certain == {0: [1] * 4, 2: [1, 1, 2, 2], 3: [2] * 4}[effect]
    quiescent = bool(result.h.flags & npurt.QUIESCENT)
    assert quiescent == (quiesce == "y")
    assert (board.health().state, board.health().advised) == ((1, 0) if quiescent else (2, 1))
    retired = board.code("npurt_job_retire", board.device, ticket)
    assert retired == (Code.OK if quiescent else Code.OBJECT_IN_FLIGHT)
    if not quiescent:
        assert board.apply((RELEASE, 0, 0, 0)) == (Code.OBJECT_IN_FLIGHT, 0)
        report = board.reset(1)
        assert report.h.flags & 1  # DMA_QUIESCED
        board.ok("npurt_job_retire", board.device, ticket)
        assert board.health().state == 1
        assert [board.lane(lane).certainty for lane in range(LANES)] == [2] * LANES
    if board.lane(3).certainty == 2:
        assert board.apply((ROLLBACK, 3, 0, 1)) == (Code.KV_UNKNOWN, 0)
        assert board.apply((RELEASE, 3, 0, 0), (RESERVE, 3, 0, 1)) == (Code.OK, 99)


@pytest.mark.parametrize("phase", ["h2d", "exec", "d2h"])
def test_a_hang_makes_no_progress_and_blocks_the_next_job(
    open_board: OpenBoard, phase: str
) -> None:
    board = open_board("overlap = 0")
    board.faults(f"fault h kind=hang phase={phase} release=reset1")
    hung = board.start(Pair(board, DECODE), [(0, [1], 0)])
    behind = board.start(Pair(board, DECODE), [(1, [1], 0)])
    board.step(STEP_IDLE)
    state = {"h2d": H2D, "exec": EXEC, "d2h": D2H}[phase]
    assert (board.state(hung), board.state(behind)) == (state, QUEUED)
    progress = board.health().last_progress_ns
    board.step(STEP_TIME, board.now() + 10**10)
    assert board.health().last_progress_ns == progress
    assert board.health().observed_ns == board.now() >= 10**10
    report = board.reset(1)
    assert (report.jobs_aborted, report.jobs_unaccounted) == (2, 0)
    result = board.result(hung)
    assert (result.state, result.kv_effect) == (ABORTED, 0 if state == H2D else 3)
    assert (board.result(behind).state, board.result(behind).kv_effect) == (ABORTED, 0)
    for ticket in (hung, behind):
        board.ok("npurt_job_retire", board.device, ticket)


def test_a_hang_that_nothing_ends_is_given_up_by_a_device_reset(board: Board) -> None:
    board.faults("fault h kind=hang phase=exec")
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [1], 0)])
    board.step(STEP_IDLE)
    report = board.reset(1)
    assert (report.jobs_aborted, report.jobs_unaccounted, report.h.flags & 1) == (0, 1, 0)
    assert board.state(ticket) == EXEC
    report = board.reset(4)
    assert (report.jobs_unaccounted, report.h.flags & 1) == (1, 0)
    result = board.result(ticket)
    assert (result.state, result.status, result.h.flags) == (LOST, Code.JOB_LOST, npurt.TERMINAL)
    assert board.code("npurt_job_retire", board.device, ticket) == Code.OBJECT_IN_FLIGHT
    assert pair.map(LOGITS) == Code.OBJECT_IN_FLIGHT


def draw_run(board: Board) -> bytes:
    """Play one fixed order of calls over a plan with chances; return the trace."""
    board.faults(
        "fault r kind=submit_reject p=0.2\n"
        "fault x kind=ccu_exception p=0.25 kv=unknown count=inf\n"
        "fault l kind=ccu_exception every=7 lane=2 kv=partial until=1s"
    )
    pairs = [Pair(board, DECODE_4), Pair(board, DECODE_4)]
    committed = dict.fromkeys(range(LANES), 0)
    for turn in range(12):
        tickets = []
        for half, pair in enumerate(pairs):
            lanes = range(4 * half, 4 * half + 4)
            board.txn += 1
            pair.write([([turn + lane], committed[lane]) for lane in lanes])
            ops = [(RESERVE, lane, committed[lane], committed[lane] + 1) for lane in lanes]
            assert board.apply(*ops)[0] == Code.OK
            code, ticket = board.submit(pair, [(lane, 1, committed[lane]) for lane in lanes])
            tickets.append((lanes, board.txn, ticket if code == Code.OK else 0))
        board.step(STEP_IDLE)
        for lanes, txn, ticket in tickets:
            done = ticket and board.result(ticket).state == DONE
            if ticket:
                board.ok("npurt_job_retire", board.device, ticket)
            for lane in lanes:
                known = board.lane(lane).certainty == 1
                verb = COMMIT if done else ROLLBACK if known else RELEASE
                n = committed[lane]
                assert board.apply((verb, lane, n, n + 1), txn=txn)[0] == Code.OK
                committed[lane] = n + 1 if done else n if known else 0
    return board.trace()


@pytest.mark.slow
def test_same_seed_and_calls_give_the_same_trace(open_board: OpenBoard) -> None:
    traces = set()
    for seed in range(20):
        first = draw_run(open_board(f"seed = {seed}"))
        assert first == draw_run(open_board(f"seed = {seed}\nclock = virtual")).replace(
            b"clock=2", b"clock=0"
        )
        traces.add(first.partition(b"\n")[2])
    assert len(traces) == 20
    assert all(b"decision=fire" in trace and b"decision=pass" in trace for trace in traces)


# ---- resets


def test_each_reset_level_does_what_it_claims(board: Board) -> None:
    pair = Pair(board, DECODE)
    used = board.reset(1).mem_before[0]
    assert used > 0
    assert board.apply(*((RELEASE, lane, 0, 0) for lane in range(LANES))) == (Code.OK, 99)
    scopes = []
    for level in range(1, 5):
        scope = npurt.ResetScope()
        board.ok("npurt_reset_describe", board.device, level, c.byref(scope))
        assert (scope.evidence, scope.source) == (9, 6)
        assert scope.effects_yes & scope.effects_no == 0
        scopes.append(scope)
    assert board.apply((RESERVE, 0, 0, 1), txn=1)[0] == Code.OK
    board.txn = 1
    pair.write([([1], 0)])
    code, ticket = board.submit(pair, [(0, 1, 0)])
    assert code == Code.OK
    board.reset(2, only_code=Code.OBJECT_IN_FLIGHT)
    board.reset(3, only_code=Code.OBJECT_IN_FLIGHT)
    report = board.reset(1)
    assert (report.jobs_aborted, report.epoch_after) == (1, 1)
    board.ok("npurt_job_retire", board.device, ticket)
    board.reset(3, only_code=Code.BAD_STATE)
    report = board.reset(2)
    assert (report.mem_before[0], report.mem_after[0], report.epoch_after) == (used, 0, 1)
    assert report.effects_seen & ~scopes[1].effects_yes == 0
    info = npurt.CalbinInfo()
    board.ok("npurt_calbin_describe", board.calbin, c.byref(info))
    assert (info.state, info.generation) == (3, 0)
    assert board.apply((RESERVE, 1, 0, 1))[0] == Code.CONFIG_LOST
    assert board.submit(pair, [(0, 1, 0)]) == (Code.STALE_GENERATION, 0)
    board.reset(3)
    report = board.reset(4)
    assert (report.epoch_before, report.epoch_after) == (1, 2)
    assert board.counters().device_epoch == board.health().device_epoch == 2
    assert list(board.counters().resets) == [2, 1, 1, 1]
    assert board.submit(pair, [(0, 1, 0)]) == (Code.STALE_EPOCH, 0)
    board.reset(4, only_code=Code.RESET_REFUSED)
    board.step(STEP_TIME, scopes[3].min_interval_ns)
    board.reset(4)


def test_a_lost_calbin_is_configured_again_as_a_new_generation(board: Board, bench: Bench) -> None:
    pair = Pair(board, DECODE)
    board.run(pair, [(0, [5], 0)])
    old, old_bank = board.generation, board.bank
    board.reset(2)
    board.ok("npurt_kv_close", old_bank)
    board.bank = c.c_void_p()
    board.configure()
    assert board.generation > old
    board.txn += 1
    assert board.apply((RESERVE, 0, 0, 1)) == (Code.OK, 99)
    assert board.submit(pair, [(0, 1, 0)]) == (Code.STALE_GENERATION, 0)  # an old buffer
    assert board.apply((ROLLBACK, 0, 0, 1), (RELEASE, 0, 0, 0)) == (Code.OK, 99)
    fresh = Pair(board, DECODE)
    board.run(fresh, [(0, [5], 0)])
    assert fresh.logits() == board.oracle(bench.calbin, [5])[0]
