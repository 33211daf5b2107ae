"""Resets of the simulated board that fail, lie, or do less or more than asked (SCN-16).

Source: npurt.h (resets), npurt_sim.h (fault plan), D8, E27.
"""

import ctypes as c
import threading

import numpy as np
import pytest
from support.native_board import (
    ABORTED,
    DECODE,
    DONE,
    EXEC,
    H2D,
    LOGITS,
    QUEUED,
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
DROPS_KV, DROPS_PARAMS, RESETS_COUNTERS, NEW_EPOCH = 32, 128, 1024, 2048
OK, LOST_HEALTH = 1, 5


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ("kind=reset_fail on=submit", "on=submit does not go with"),
        ("kind=reset_fail code=0x601", "code=0x601: a device refuses with a code of class 8"),
        ("kind=reset_fail level=5", "level=5"),
        ("kind=reset_fail task=decode", "no task=, engine=, lane= or model="),
        ("kind=reset_fail model=tiny", "no task=, engine=, lane= or model="),
        ("kind=reset_refused for=1s", "unknown key 'for' for kind=reset_refused"),
        ("kind=reset_slow", "reset_slow needs for="),
        ("kind=reset_partial", "reset_partial needs without="),
        ("kind=reset_partial without=nothing", "without=nothing: expected effects joined by +"),
        ("kind=reset_partial without=new_epoch?", "without=new_epoch?"),
        ("kind=reset_wide", "reset_wide needs also="),
        ("kind=reset_wide also=new_epoch tells=yes", "tells=yes: expected y or n"),
        ("kind=reset_ok_but_dead then=gone", "then=gone: expected lost, hang or garbage"),
        ("kind=version_mismatch field=runtime", "version_mismatch needs field= and version="),
        ("kind=version_mismatch field=compiler version=1", "field=compiler: expected runtime"),
        ("kind=version_mismatch field=driver version=new", "version=new: expected a dotted"),
        ("kind=unhealthy level=1", "level= is for on=reset"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_line(board: Board, rule: str, complaint: str) -> None:
    answer = board.library.attempt("npurt_sim_faults", board.device, f"\nfault a {rule}".encode())
    assert answer.code == Code.INVALID_ARG
    assert "fault plan line 2: " in answer.words
    assert complaint in answer.words


def in_flight(board: Board) -> tuple[Pair, int]:
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [5], 0)])
    board.step(STEP_TICKET, ticket | EXEC << 56)
    return pair, ticket


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("kind=reset_fail", Code.RESET_FAILED),
        ("kind=reset_fail code=0x802", Code.DEVICE_WEDGED),
        ("kind=reset_refused", Code.RESET_REFUSED),
    ],
)
@pytest.mark.parametrize("level", [1, 4])
def test_a_reset_that_fails_has_done_nothing(
    board: Board, rule: str, code: int, level: int
) -> None:
    """Armed at open; level= picks the level; what did not run is not counted."""
    board.faults(f"fault r {rule} level={level}", arm=False)
    _, ticket = in_flight(board)
    used = board.memory().used
    report = board.reset(level, only_code=code)
    assert (report.jobs_aborted, report.jobs_unaccounted, report.effects_seen) == (0, 0, 0)
    assert (report.h.flags, report.epoch_after) == (0, 1)
    assert (report.mem_before[0], report.mem_after[0]) == (used, used)
    assert board.state(ticket) == EXEC
    board.step(STEP_IDLE)
    assert board.state(ticket) == DONE
    assert list(board.counters().resets) == [0] * 4
    board.reset(5 - level)
    assert sum(board.counters().resets) == 1


def test_a_slow_reset_takes_its_time_and_is_right(board: Board) -> None:
    board.faults("fault s kind=reset_slow for=3s level=1")
    _, ticket = in_flight(board)
    before = board.now()
    report = board.reset(1, timeout_ns=3 * 10**9)
    assert report.duration_ns == 3 * 10**9 == board.now() - before
    assert report.h.flags == QUIESCED | VERIFIED
    assert board.state(ticket) == ABORTED


def test_a_reset_slower_than_its_bound_fails_at_the_bound(board: Board) -> None:
    board.faults("fault s kind=reset_slow for=3s")
    _, ticket = in_flight(board)
    report = board.reset(1, only_code=Code.RESET_FAILED, timeout_ns=10**9)
    assert report.duration_ns == 10**9
    assert (report.jobs_aborted, report.effects_seen, board.state(ticket)) == (0, 0, EXEC)
    assert board.reset(1).jobs_aborted == 1


def test_a_slow_reset_lets_health_and_polls_through(open_board: OpenBoard) -> None:
    """[X] of npurt.h: health, counters, events, poll and wait go on; a submit is refused."""
    board = open_board("clock = real\nscale = 1000\nprofile = tiny")
    board.faults("fault s kind=reset_slow for=1000000s level=1\nfault h kind=hang phase=exec")
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [5], 0)])
    report, params = npurt.ResetReport(), npurt.ResetParams(level=1, timeout_ns=60 * 10**9)
    answers: list[int] = []

    def run() -> None:
        answers.append(
            board.code("npurt_reset_run", board.device, c.byref(params), c.byref(report))
        )

    thread = threading.Thread(target=run)
    thread.start()
    while board.submit(pair, [(0, 1, 0)])[0] != Code.BAD_STATE:
        pass  # the reset begins
    assert board.health().state == OK
    assert board.state(ticket) in (QUEUED, H2D, EXEC)
    assert board.counters().submitted == 1
    assert board.wait([ticket], 0)[0] == Code.WAIT_TIMEOUT
    thread.join()
    assert answers == [Code.RESET_FAILED]
    assert report.duration_ns >= 60 * 10**9


# ---- success that is none


def again(board: Board) -> Pair:
    """Configure anew after level 4; with what the board says its epoch is."""
    board.epoch = board.health().device_epoch
    board.ok("npurt_kv_close", board.bank)
    board.bank = c.c_void_p()
    board.configure()
    return Pair(board, DECODE)


def test_a_reset_says_ok_and_the_device_is_gone(board: Board) -> None:
    board.faults("fault d kind=reset_ok_but_dead level=4")
    report = board.reset(4)
    assert report.h.flags & VERIFIED, "so it says"
    assert report.health_after == OK
    health = board.health()
    assert (health.state, health.sticky) == (LOST_HEALTH, Code.DEVICE_LOST)
    board.step(STEP_TIME, 10**9)
    assert board.reset(4).health_after == OK
    assert board.health().state == OK


def test_a_reset_may_say_that_it_is_not_verified(board: Board) -> None:
    board.faults("fault d kind=reset_ok_but_dead tells=y release=never")
    report = board.reset(1, only_code=Code.RESET_UNVERIFIED)
    assert (report.h.flags & VERIFIED, report.health_after) == (0, LOST_HEALTH)
    board.reset(4)
    assert board.health().state == LOST_HEALTH


def test_after_a_reset_every_job_hangs_until_another(board: Board) -> None:
    board.faults("fault d kind=reset_ok_but_dead then=hang level=4 release=reset4")
    assert board.reset(4).h.flags & VERIFIED
    pair = again(board)
    ticket = board.start(pair, [(0, [5], 0)])
    board.step(STEP_IDLE)
    assert (board.state(ticket), board.health().state) == (EXEC, OK)
    board.reset(1)
    assert board.state(ticket) == EXEC
    board.step(STEP_TIME, 10**9)
    assert board.reset(4).jobs_aborted == 1
    board.ok("npurt_job_retire", board.device, ticket)
    pair = again(board)
    board.run(pair, [(0, [5], 0)])


def test_after_a_reset_every_job_has_garbage_until_another(board: Board, bench: Bench) -> None:
    board.faults("fault d kind=reset_ok_but_dead then=garbage release=reset1 level=1")
    expected = board.oracle(bench.calbin, [5])[0]
    board.reset(1)
    pair = Pair(board, DECODE)
    assert board.apply(*((4, lane, 0, 0) for lane in range(2)))[0] == Code.OK
    result = board.run(pair, [(0, [5], 0)])
    assert result.h.flags == npurt.TERMINAL | npurt.QUIESCENT | npurt.OUTPUT_VALID
    assert pair.logits() != expected
    board.reset(1)
    assert board.apply((4, 0, 0, 0))[0] == Code.OK
    board.run(pair, [(0, [5], 0)])
    assert pair.logits() == expected


# ---- less than asked


def test_cores_that_still_run_after_a_reset(board: Board, bench: Bench) -> None:
    board.faults("fault p kind=reset_partial without=aborts_jobs level=1")
    pair, ticket = in_flight(board)
    report = board.reset(1)
    assert (report.jobs_aborted, report.jobs_unaccounted) == (0, 1)
    assert report.h.flags & QUIESCED == 0
    assert report.effects_seen & ABORTS, "it says that it did"
    assert board.state(ticket) == EXEC
    board.step(STEP_IDLE)
    assert board.state(ticket) == DONE
    assert pair.logits() == board.oracle(bench.calbin, [5])[0]


@pytest.mark.parametrize("tells", ["y", "n"])
def test_a_report_tells_what_was_not_done_or_does_not(board: Board, tells: str) -> None:
    rule = "kind=reset_partial without=drops_config+drops_all_configs+drops_params"
    board.faults(f"fault p {rule} tells={tells} level=2")
    used = board.memory().used
    report = board.reset(2)
    assert bool(report.effects_seen & DROPS_CONFIG) == (tells == "n")
    assert (report.mem_before[0], report.mem_after[0]) == (used, used), "memory never lies"
    told = npurt.CalbinInfo()
    board.ok("npurt_calbin_describe", board.calbin, c.byref(told))
    assert (told.state, told.generation) == (2, board.generation)
    assert board.lane(0).certainty == 2, "KV was dropped all the same"


def test_a_reset_that_does_not_quiesce_lets_late_writes_through(board: Board) -> None:
    board.faults(
        "fault p kind=reset_partial without=quiesces_dma level=1\n"
        "fault d kind=late_dma delay=1ms bytes=32"
    )
    pair, ticket = in_flight(board)
    report = board.reset(1)
    assert (report.jobs_aborted, report.h.flags & QUIESCED) == (1, 0)
    assert report.effects_seen & QUIESCES == 0, "about that it never lies"
    assert board.result(ticket).h.flags == npurt.TERMINAL
    pair.view(LOGITS, np.uint8)[:] = 0
    board.step(STEP_IDLE)
    assert pair.view(LOGITS, np.uint8)[0][:32].all()
    assert board.code("npurt_job_retire", board.device, ticket) == Code.OBJECT_IN_FLIGHT
    assert board.reset(1).h.flags & QUIESCED
    board.retire(pair, ticket)


def test_a_reset_that_leaves_the_sticky_error(board: Board) -> None:
    board.faults(
        "fault s kind=sticky\nfault p kind=reset_partial without=clears_sticky level=4 nth=1"
    )
    board.run(Pair(board, DECODE), [(0, [5], 0)])
    report = board.reset(4)
    assert report.h.flags & VERIFIED == 0
    assert board.health().sticky == Code.STICKY
    board.step(STEP_TIME, board.now() + 10**9)
    report = board.reset(4)
    assert report.effects_seen & CLEARS_STICKY
    assert board.health().sticky == 0


# ---- more than asked


@pytest.mark.parametrize("tells", ["", " tells=n"])
def test_a_reset_does_more_than_it_says(board: Board, tells: str) -> None:
    also = "drops_config+new_epoch+resets_counters"
    board.faults(f"fault w kind=reset_wide also={also} level=1{tells}")
    pair, ticket = in_flight(board)
    report = board.reset(1)
    assert (report.epoch_before, report.epoch_after) == (1, 2)
    assert bool(report.h.flags & WIDER) == (tells == "")
    assert bool(report.effects_seen & NEW_EPOCH) == (tells == "")
    assert report.jobs_aborted == 1
    board.ok("npurt_job_retire", board.device, ticket)
    assert board.submit(pair, [(0, 1, 0)]) == (Code.STALE_EPOCH, 0)
    assert board.submit(pair, [(0, 1, 0)], epoch=2) == (Code.STALE_GENERATION, 0)
    assert (board.counters().submitted, board.memory().params) == (0, 0)


# ---- versions


def test_another_version_after_a_reset(board: Board) -> None:
    board.faults("fault v kind=version_mismatch field=firmware version=9.8.7 level=2")
    assert board.describe().firmware_version == b"0.1.0"
    board.reset(1)
    assert board.describe().firmware_version == b"0.1.0"
    board.reset(2)
    told = board.describe()
    assert (told.firmware_version, told.runtime_version) == (b"9.8.7", b"0.1.0")
    found = npurt.DeviceDesc()
    board.ok("npurt_device_describe", 0, c.byref(found))
    assert found.firmware_version == b"9.8.7"


def test_another_version_at_an_instant_until_the_firmware_is_loaded_again(
    open_board: OpenBoard,
) -> None:
    board = open_board("reset4 = reloads_firmware+new_epoch")
    board.faults("fault v kind=version_mismatch field=driver version=2.0 on=time after=5s")
    board.step(STEP_TIME, 5 * 10**9 - 1)
    assert board.describe().driver_version == b"0.1.0"
    board.step(STEP_TIME, 5 * 10**9)
    assert board.describe().driver_version == b"2.0"
    board.reset(1)
    assert board.describe().driver_version == b"2.0"
    board.reset(4)
    assert board.describe().driver_version == b"0.1.0"
