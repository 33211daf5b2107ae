"""What each reset level of the simulated board does, claims and reports, unless a rule says so.

Source: npurt.h (resets), npurt_sim.h (Resets), D8, D12, E5, E9, E23, R17.4.
"""

import ctypes as c

import numpy as np
import pytest
from support.native_board import (
    ABORTED,
    DECODE,
    DONE,
    EXEC,
    LANES,
    LOGITS,
    LOST,
    RELEASE,
    RESERVE,
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

QUIESCED, VERIFIED, WIDER = 1, 2, 4
ABORTS, QUIESCES, CLEARS_STICKY, DROPS_CONFIG = 1, 2, 4, 8
DROPS_KV, FREES_DYNAMIC, RESETS_COUNTERS, NEW_EPOCH = 32, 256, 1024, 2048
DROPS_PARAMS, FREES_ALL, OTHER_CHIP, OTHER_MODEL, DROPS_HOST_MAPS = 128, 512, 4096, 8192, 65536
EV_EPOCH, EV_MEMORY = 5, 7
INTERVAL_NS = 10**9


def reach(board: Board, level: int) -> npurt.ResetReport:
    """Run a level after the ones that it wants before it."""
    if level in (2, 3):
        board.reset(1)
    if level == 3:
        board.reset(2)
    return board.reset(level)


def serve_again(board: Board, bench: Bench) -> None:
    """Configure the same handle anew and hold a first answer against the oracle."""
    board.epoch = board.health().device_epoch
    before = board.generation
    board.configure()
    assert board.generation > before
    pair = Pair(board, DECODE)
    board.run(pair, [(0, [5], 0)])
    assert pair.logits() == board.oracle(bench.calbin, [5])[0]


# ---- what is claimed


def test_the_claims_are_those_of_the_header(board: Board) -> None:
    """By hand: words of npurt_sim.h, and every effect is claimed, denied or left open."""
    soft = ABORTS | QUIESCES | CLEARS_STICKY | DROPS_CONFIG | 16 | DROPS_KV | 64 | DROPS_PARAMS
    soft |= FREES_DYNAMIC | FREES_ALL | RESETS_COUNTERS | NEW_EPOCH | OTHER_CHIP | OTHER_MODEL
    claims = {
        1: (ABORTS | QUIESCES | OTHER_CHIP | OTHER_MODEL, DROPS_KV | 64, 1, 0),
        2: (DROPS_CONFIG | 16 | DROPS_KV | 64 | DROPS_PARAMS | OTHER_MODEL, 0, 0, 0),
        3: (FREES_DYNAMIC, 0, 0, 0),
        4: (soft, 32768, 1, INTERVAL_NS),
    }
    for level, (yes, unknown, in_flight, interval_ns) in claims.items():
        scope = board.scope(level)
        assert (scope.level, scope.effects_yes) == (level, yes)
        assert scope.effects_no == (1 << 17) - 1 - yes - unknown
        assert (scope.can_run_in_flight, scope.min_interval_ns) == (in_flight, interval_ns)
    scope = npurt.ResetScope()
    for level in (0, 5):
        answer = board.code("npurt_reset_describe", board.device, level, c.byref(scope))
        assert answer == Code.INVALID_ARG


def test_what_a_level_does_and_what_it_claims_are_set_apart(open_board: OpenBoard) -> None:
    board = open_board(
        "reset1 = aborts_jobs\nreset1_claims = aborts_jobs+quiesces_dma?+drops_kv\n"
        "reset_interval = 5ms"
    )
    scope = board.scope(1)
    assert scope.effects_yes == ABORTS | DROPS_KV
    assert scope.effects_no == (1 << 17) - 1 - ABORTS - QUIESCES - DROPS_KV
    ticket = board.start(Pair(board, DECODE), [(0, [5], 0)])
    board.step(STEP_TICKET, ticket | EXEC << 56)
    report = board.reset(1)
    assert report.h.flags & QUIESCED == 0, "it does not quiesce"
    assert report.effects_seen == ABORTS
    assert board.result(ticket).h.flags == npurt.TERMINAL
    assert [board.lane(lane).certainty for lane in range(2)] == [2, 1], "only the one cut off"
    assert board.scope(4).min_interval_ns == 5 * 10**6
    assert board.scope(4).effects_yes & NEW_EPOCH


@pytest.mark.parametrize(
    "line",
    [
        "reset1 = everything",
        "reset1 = aborts_jobs+aborts_jobs",
        "reset1 = aborts_jobs?",
        "reset2_claims = aborts_jobs+aborts_jobs?",
        "reset3 = ",
        "reset_interval = 5",
    ],
)
def test_a_wrong_scope_is_refused(bench: Bench, line: str) -> None:
    params = npurt.OpenParams(config=line.encode())
    answer = bench.library.attempt("npurt_device_open", c.byref(params), c.byref(c.c_void_p()))
    assert answer.code == Code.INVALID_ARG
    assert f"{line.split(' ')[0]} does not take the value" in answer.words


# ---- what each level does


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_a_calbin_is_configured_anew_after_each_level(
    board: Board, bench: Bench, level: int
) -> None:
    pair = Pair(board, DECODE)
    board.run(pair, [(0, [5], 0)])
    generation, used = board.generation, board.memory().used
    report = reach(board, level)
    assert report.h.flags & (QUIESCED | VERIFIED) == QUIESCED | VERIFIED
    assert (report.epoch_before, report.epoch_after) == (1, 2 if level == 4 else 1)
    assert (report.jobs_aborted, report.jobs_unaccounted) == (0, 0)
    told = npurt.CalbinInfo()
    board.ok("npurt_calbin_describe", board.calbin, c.byref(told))
    kept = level == 1
    assert (told.state, told.generation) == ((2, generation) if kept else (3, 0))
    assert (board.memory().params > 0) == kept
    if kept:
        assert (report.mem_before[0], report.mem_after[0]) == (used, used)
        assert [board.lane(lane).certainty for lane in range(LANES)] == [2] * LANES
        assert board.apply((RESERVE, 0, 1, 2), txn=9) == (Code.KV_UNKNOWN, 0)
        assert board.apply((RELEASE, 0, 0, 0)) == (Code.OK, 99)
        board.run(pair, [(0, [6], 0)])
        assert pair.logits() == board.oracle(bench.calbin, [6])[0], "the generation goes on"
    else:
        code = Code.STALE_EPOCH if level == 4 else Code.STALE_GENERATION
        assert board.submit(pair, [(0, 1, 0)]) == (code, 0)
        assert board.apply((RESERVE, 1, 0, 1), txn=9)[0] == Code.CONFIG_LOST
    board.give_back(pair)
    if kept:
        board.ok("npurt_calbin_release", board.calbin)
        source = npurt.CalbinSource(path=str(bench.calbin).encode())
        board.ok("npurt_calbin_create", board.device, c.byref(source), c.byref(board.calbin))
    serve_again(board, bench)


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_a_calbin_is_released_after_each_level(board: Board, bench: Bench, level: int) -> None:
    """Released as it stands, whether lost or not; a new handle of it is configured."""
    pair = Pair(board, DECODE)
    board.run(pair, [(0, [5], 0)])
    reach(board, level)
    board.give_back(pair)
    board.ok("npurt_calbin_release", board.calbin)
    memory = board.memory()
    assert (memory.params, memory.kv, memory.workspace) == (0, 0, 0)
    source = npurt.CalbinSource(path=str(bench.calbin).encode())
    board.ok("npurt_calbin_create", board.device, c.byref(source), c.byref(board.calbin))
    serve_again(board, bench)


def test_dynamic_memory_stays_until_level_three(bench: Bench, open_board: OpenBoard) -> None:
    board = open_board("profile = tp2-ref", configured=False)
    board.faults("fault d kind=drift bytes=1000 on=exec")
    code, _ = board.try_configure()
    assert code == Code.OK
    board.ok("npurt_kv_open", board.calbin, c.byref(npurt.KvParams(layout=2)), c.byref(board.bank))
    told = npurt.CalbinInfo()
    board.ok("npurt_calbin_describe", board.calbin, c.byref(told))
    board.generation = told.generation
    pair = Pair(board, DECODE)
    board.run(pair, [(0, [5], 0)])
    assert board.memory().dynamic == told.other_bytes[0] + 1000
    assert board.reset(2).effects_seen & FREES_DYNAMIC == 0
    assert board.memory().used == board.memory().dynamic == told.other_bytes[0] + 1000
    report = board.reset(3)
    assert report.effects_seen == FREES_DYNAMIC
    assert (report.mem_after[0], board.memory().used) == (0, 0)


def test_a_device_reset_begins_anew(board: Board) -> None:
    pair = Pair(board, DECODE)
    board.run(pair, [(0, [5], 0)])
    board.events()
    ticket = board.start(pair, [(1, [5], 0)])
    board.step(STEP_TICKET, ticket | EXEC << 56)
    report = board.reset(4)
    assert (report.jobs_aborted, report.jobs_unaccounted) == (1, 0)
    dropped = DROPS_CONFIG | DROPS_KV | DROPS_PARAMS
    assert report.effects_seen == ABORTS | QUIESCES | dropped | RESETS_COUNTERS | NEW_EPOCH
    counters = board.counters()
    assert (counters.submitted, counters.finished, counters.aborted) == (0, 0, 0)
    assert (counters.device_epoch, list(counters.resets)) == (2, [0, 0, 0, 1])
    assert [kind for kind, _, _ in board.events()] == [EV_MEMORY, EV_EPOCH]
    result = board.result(ticket)
    assert (result.state, result.status, result.device_epoch) == (ABORTED, Code.JOB_ABORTED, 1)
    assert result.kv_effect == 3
    board.ok("npurt_job_retire", board.device, ticket)


def test_the_least_time_between_two_device_resets_counts_from_the_attempt(
    open_board: OpenBoard,
) -> None:
    board = open_board("reset_interval = 3ms")
    board.faults("fault f kind=reset_fail level=4")
    board.reset(4, only_code=Code.RESET_FAILED)
    board.step(STEP_TIME, 3 * 10**6 - 1)
    report = board.reset(4, only_code=Code.RESET_REFUSED)
    assert (report.epoch_after, report.effects_seen, report.h.flags) == (1, 0, 0)
    board.reset(1)
    board.step(STEP_TIME, 3 * 10**6)
    assert board.reset(4).epoch_after == 2


@pytest.mark.parametrize(("release", "level"), [(2, 2), (3, 3), (4, 4)])
def test_a_hung_job_ends_at_the_level_that_releases_it(
    board: Board, bench: Bench, release: int, level: int
) -> None:
    board.faults(f"fault h kind=hang phase=exec release=reset{release}")
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [5], 0)])
    board.step(STEP_IDLE)
    report = board.reset(1)
    assert (report.jobs_aborted, report.jobs_unaccounted, report.h.flags & QUIESCED) == (0, 1, 0)
    for before in range(2, level):
        board.reset(before)
        assert board.state(ticket) == EXEC
        assert board.code("npurt_buffer_destroy", pair.in_) == Code.OBJECT_IN_FLIGHT
    report = board.reset(level)
    assert (report.jobs_aborted, report.jobs_unaccounted) == (1, 0)
    assert report.h.flags & QUIESCED
    result = board.result(ticket)
    assert (result.state, result.kv_effect) == (ABORTED, 3)
    board.ok("npurt_job_retire", board.device, ticket)
    board.give_back(pair)
    serve_again(board, bench)


def test_what_is_never_quiescent_stays_and_the_board_serves_again(
    board: Board, bench: Bench
) -> None:
    """E9: its buffers, bank and calbin handle stay; the same handle is configured anew."""
    board.faults("fault h kind=hang phase=exec")
    stuck, clean = Pair(board, DECODE), Pair(board, DECODE)
    ticket = board.start(stuck, [(0, [5], 0)])
    board.step(STEP_IDLE)
    board.reset(1)
    board.reset(2)
    code, _ = board.try_configure()
    assert code == Code.OBJECT_IN_FLIGHT, "nobody knows what it does"
    report = board.reset(4)
    assert (report.jobs_unaccounted, report.h.flags & QUIESCED) == (1, 0)
    assert board.state(ticket) == LOST
    assert board.code("npurt_job_retire", board.device, ticket) == Code.OBJECT_IN_FLIGHT
    for buffer in (stuck.in_, stuck.out):
        assert board.code("npurt_buffer_destroy", buffer) == Code.OBJECT_IN_FLIGHT
    for buffer in (clean.in_, clean.out):
        board.ok("npurt_buffer_destroy", buffer)
    old_bank = board.bank
    assert board.code("npurt_kv_close", old_bank) == Code.OBJECT_IN_FLIGHT
    assert board.code("npurt_calbin_release", board.calbin) == Code.OBJECT_IN_FLIGHT
    board.bank = c.c_void_p()
    serve_again(board, bench)
    assert board.code("npurt_calbin_release", board.calbin) == Code.OBJECT_IN_FLIGHT
    assert board.code("npurt_kv_close", old_bank) == Code.OBJECT_IN_FLIGHT


def test_a_reset_of_one_chip_says_that_it_reached_the_other(board: Board) -> None:
    ticket = board.start(Pair(board, DECODE), [(0, [5], 0)])
    report = board.reset(1, chips=1)
    assert report.h.flags & WIDER
    assert report.effects_seen & OTHER_CHIP
    assert board.state(ticket) == ABORTED
    assert board.reset(1, chips=3).h.flags & WIDER == 0
    report = npurt.ResetReport()
    params = npurt.ResetParams(level=1, chip_mask=4)
    answer = board.code("npurt_reset_run", board.device, c.byref(params), c.byref(report))
    assert answer == Code.INVALID_ARG


def test_a_reset_for_another_model_says_that_it_reached_this_one(
    board: Board, bench: Bench
) -> None:
    other, report = c.c_void_p(), npurt.ResetReport()
    source = npurt.CalbinSource(path=str(bench.calbin).encode())
    board.ok("npurt_calbin_create", board.device, c.byref(source), c.byref(other))
    params = npurt.ResetParams(level=2, only=other)
    board.ok("npurt_reset_run", board.device, c.byref(params), c.byref(report))
    assert report.h.flags & WIDER
    assert report.effects_seen & OTHER_MODEL
    assert report.effects_seen & DROPS_CONFIG


def test_host_maps_may_go_with_a_reset(open_board: OpenBoard) -> None:
    board = open_board("reset1 = aborts_jobs+quiesces_dma+drops_host_maps")
    idle, pair = Pair(board, DECODE), Pair(board, DECODE)
    board.run(idle, [(0, [5], 0)])
    ticket = board.start(pair, [(1, [5], 0)])
    assert board.reset(1).effects_seen & DROPS_HOST_MAPS
    board.txn += 1
    assert board.apply((RESERVE, 0, 1, 2))[0] == Code.OK, "KV was not touched"
    assert board.submit(idle, [(0, 1, 1)])[0] == Code.BAD_STATE, "not mapped"
    board.retire(pair, ticket)
    assert idle.map(LOGITS) == Code.OK


# ---- late things behind a reset (SCN-09)


def behind(board: Board, level: int) -> None:
    """Levels 2 and 3 run after level 1, which has ended the jobs already."""
    for before in ([1] if level in (2, 3) else []) + ([2] if level == 3 else []) + [level]:
        board.reset(before)


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_a_late_completion_behind_each_level_is_told_and_changes_no_end(
    board: Board, level: int
) -> None:
    board.faults("fault l kind=late_completion delay=1s outlives=y")
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [5], 0)])
    board.step(STEP_TIME, 5_000)
    behind(board, level)
    assert board.result(ticket).state == ABORTED
    board.events()
    late_before = board.counters().late
    board.step(STEP_IDLE)
    result = board.result(ticket)
    assert (result.state, result.status) == (ABORTED, Code.JOB_ABORTED)
    assert result.h.flags & npurt.LATE
    assert result.h.flags & npurt.OUTPUT_VALID == 0
    assert board.counters().late == late_before + 1
    assert [(kind, about) for kind, about, _ in board.events()] == [(4, ticket)]
    board.ok("npurt_job_retire", board.device, ticket)


def test_a_late_completion_of_a_retired_job_is_an_event(board: Board) -> None:
    board.faults("fault l kind=late_completion delay=1s outlives=y")
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [5], 0)])
    board.step(STEP_TIME, 5_000)
    board.reset(4)
    board.retire(pair, ticket)
    board.events()
    board.step(STEP_IDLE)
    assert [(kind, about) for kind, about, _ in board.events()] == [(4, ticket)]
    assert board.counters().late == 1
    state = npurt.JobState()
    stale = board.code("npurt_job_poll", board.device, ticket, c.byref(state))
    assert stale == Code.STALE_TICKET


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_a_late_write_behind_a_reset_that_does_not_quiesce(
    open_board: OpenBoard, level: int
) -> None:
    """It goes to the memory of the job that was cut off, which is locked; to nobody else's."""
    board = open_board("reset1 = aborts_jobs+drops_kv\nreset4 = aborts_jobs+drops_config+new_epoch")
    board.faults("fault d kind=late_dma delay=1s bytes=64")
    pair, other = Pair(board, DECODE), Pair(board, DECODE)
    ticket = board.start(pair, [(0, [5], 0)])
    board.step(STEP_TICKET, ticket | EXEC << 56)
    behind(board, level)
    assert board.result(ticket).h.flags == npurt.TERMINAL
    assert board.code("npurt_job_retire", board.device, ticket) == Code.OBJECT_IN_FLIGHT
    assert board.code("npurt_buffer_destroy", pair.out) == Code.OBJECT_IN_FLIGHT
    pair.view(LOGITS, np.uint8)[:] = 0
    other.view(LOGITS, np.uint8)[:] = 0
    board.step(STEP_IDLE)
    assert pair.view(LOGITS, np.uint8)[0][:64].all()
    assert not other.view(LOGITS, np.uint8).any()
    assert board.violations() == []


def test_a_reset_that_quiesces_later_lets_the_job_be_retired(open_board: OpenBoard) -> None:
    board = open_board("reset1 = aborts_jobs+drops_kv")
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [5], 0)])
    board.step(STEP_TICKET, ticket | EXEC << 56)
    assert board.reset(1).h.flags & QUIESCED == 0
    assert board.reset(4).h.flags & QUIESCED
    assert board.result(ticket).state == ABORTED
    board.retire(pair, ticket)
    board.give_back(pair)


def test_jobs_that_a_reset_did_not_end_are_lost_with_their_configuration(
    open_board: OpenBoard,
) -> None:
    board = open_board("reset1 = none")
    ticket = board.start(Pair(board, DECODE), [(0, [5], 0)])
    board.step(STEP_TICKET, ticket | EXEC << 56)
    report = board.reset(1)
    assert (report.jobs_aborted, report.jobs_unaccounted, report.effects_seen) == (0, 1, 0)
    assert board.state(ticket) == EXEC
    report = board.reset(2)
    assert (report.jobs_aborted, report.jobs_unaccounted) == (0, 1)
    assert board.result(ticket).state == LOST
    board.step(STEP_IDLE)


def test_a_job_that_outlived_a_reset_ends_as_ever(open_board: OpenBoard, bench: Bench) -> None:
    board = open_board("reset1 = none")
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [5], 0)])
    board.step(STEP_TICKET, ticket | EXEC << 56)
    board.reset(1)
    board.step(STEP_IDLE)
    assert board.result(ticket).state == DONE
    assert pair.logits() == board.oracle(bench.calbin, [5])[0]
