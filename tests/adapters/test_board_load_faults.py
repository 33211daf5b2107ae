"""Configurations, releases, memory and the device itself that fail: rules that are about no job.

Source: npurt.h (calbin, memory, health), npurt_sim.h (fault plan), E10, E21, E22, G11.
"""

import ctypes as c
import os
import threading

import pytest
from support.native_board import (
    ABORTED,
    DECODE,
    DONE,
    EXEC,
    FOREVER,
    LOST,
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

MIB_100 = 100 << 20
EV_HEALTH, EV_EPOCH, EV_OWNER = 1, 5, 6
QUIESCED = 1
VALIDATED, CONFIGURED = 1, 2


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ("kind=configure_fail code=0x601", "code=0x601: a configuration fails with"),
        ("kind=configure_fail lane=1", "is about no job: no task=, engine= or lane="),
        ("kind=configure_fail on=release", "on=release does not go with"),
        ("kind=configure_partial_memory release=reset2", "release=reset2: expected never, reset3"),
        ("kind=configure_partial_memory chip=2", "chip=2"),
        ("kind=configure_hang heeds=n", "heeds=n needs for="),
        ("kind=configure_hang for=5", "for=5"),
        ("kind=warmup_wrong bytes=5", "unknown key 'bytes'"),
        ("kind=release_leak release=reset3", "unknown key 'release'"),
        ("kind=release_slow", "release_slow needs for="),
        ("kind=release_slow for=1s task=decode", "no task=, engine= or lane="),
        ("kind=health_block", "health_block needs for="),
        ("kind=memory_skew n=5", "memory_skew needs field= and n="),
        ("kind=memory_skew field=chips n=5", "field=chips is not a figure of memory"),
        ("kind=epoch_bump pid=5", "unknown key 'pid'"),
        ("kind=epoch_bump on=exec", "on=exec does not go with"),
        ("kind=epoch_bump on=time", "on=time needs after="),
        ("kind=epoch_bump on=health task=decode", "no task=, engine=, lane= or model="),
        ("kind=owner_change pid=0", "pid=0"),
        ("kind=wedged code=0x802", "unknown key 'code'"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_line(board: Board, rule: str, complaint: str) -> None:
    answer = board.library.attempt("npurt_sim_faults", board.device, f"\nfault a {rule}".encode())
    assert answer.code == Code.INVALID_ARG
    assert "fault plan line 2: " in answer.words
    assert complaint in answer.words


# ---- configure


def calbin_state(board: Board) -> tuple[int, int]:
    told = npurt.CalbinInfo()
    board.ok("npurt_calbin_describe", board.calbin, c.byref(told))
    return told.state, told.generation


@pytest.mark.parametrize("code", [Code.CONFIGURE_FAILED, Code.DEVICE_MEMORY, Code.DEVICE_UNHEALTHY])
def test_a_configuration_that_fails_takes_nothing(
    open_board: OpenBoard, bench: Bench, code: int
) -> None:
    board = open_board(configured=False)
    board.faults(f"fault c kind=configure_fail code={int(code):#x}", arm=False)
    failed, result = board.try_configure()
    assert failed == code
    assert (result.generation, result.mem_before[0], result.mem_after[0]) == (0, 0, 0)
    assert calbin_state(board) == (VALIDATED, 0)
    board.configure()
    pair = Pair(board, DECODE)
    board.run(pair, [(0, [5], 0)])
    assert pair.logits() == board.oracle(bench.calbin, [5])[0]


@pytest.mark.parametrize(("release", "level"), [("reset3", 3), ("reset4", 4), ("never", 5)])
def test_a_configuration_breaks_off_with_memory_taken(
    open_board: OpenBoard, release: str, level: int
) -> None:
    board = open_board(configured=False)
    board.faults(f"fault c kind=configure_partial_memory chip=1 bytes=4096 release={release}")
    failed, result = board.try_configure()
    assert failed == Code.CONFIGURE_FAILED
    assert list(result.mem_after)[:2] == [0, 4096]
    assert (board.memory(0).used, board.memory(1).used) == (0, 4096)
    told = board.memory(1)
    assert (told.dynamic, told.unaccounted) == ((4096, 0) if level == 3 else (0, 4096))
    for reset in (3, 4):
        board.reset(reset)
        assert board.memory(1).used == (4096 if reset < level else 0)
    board.configure()


def test_a_configuration_that_hangs_ends_at_its_bound(open_board: OpenBoard) -> None:
    board = open_board(configured=False)
    board.faults("fault c kind=configure_hang count=2")
    failed, result = board.try_configure(timeout_ns=7 * 10**9)
    assert failed == Code.CONFIGURE_FAILED
    assert result.duration_ns == board.now() == 7 * 10**9
    assert calbin_state(board) == (VALIDATED, 0)
    assert board.try_configure()[1].duration_ns == 0, "a timeout of 0 polls"
    board.configure()


@pytest.mark.parametrize(
    ("keys", "took_s", "code"),
    [
        ("for=2s", 2, Code.OK),
        ("for=9s", 5, Code.CONFIGURE_FAILED),
        ("for=9s heeds=n", 9, Code.OK),
    ],
)
def test_a_slow_configuration(open_board: OpenBoard, keys: str, took_s: int, code: int) -> None:
    board = open_board(configured=False)
    board.faults(f"fault c kind=configure_hang {keys}")
    answer, result = board.try_configure(timeout_ns=5 * 10**9)
    assert (answer, result.duration_ns) == (code, took_s * 10**9)
    assert calbin_state(board)[0] == (CONFIGURED if code == Code.OK else VALIDATED)


def test_a_hanging_configuration_lets_others_look_and_close(
    open_board: OpenBoard, bench: Bench
) -> None:
    board = open_board("clock = real\nprofile = tiny", configured=False)
    board.faults("fault c kind=configure_hang for=100000s heeds=n")
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(board.try_configure()[0]))
    thread.start()
    report, params = npurt.ResetReport(), npurt.ResetParams(level=1)
    refused = 0
    while refused != Code.BAD_STATE:  # the configuration begins
        refused = board.code("npurt_reset_run", board.device, c.byref(params), c.byref(report))
    assert board.code("npurt_calbin_release", board.calbin) == Code.BAD_STATE
    assert board.try_configure()[0] == Code.OBJECT_IN_FLIGHT
    assert board.health().state == 1
    board.close()
    thread.join()
    assert answers == [Code.BAD_HANDLE]


def test_a_configuration_that_computes_nonsense(open_board: OpenBoard, bench: Bench) -> None:
    board = open_board(configured=False)
    board.faults("fault w kind=warmup_wrong", arm=False)
    board.configure()
    pair = Pair(board, DECODE)
    for length in range(2):
        result = board.run(pair, [(0, [5], length)])
        assert result.h.flags & npurt.NUMERIC_FLAG == 0
        assert pair.logits() == [0x3F80] * 512
    board.reset(2)
    board.give_back(pair)
    board.configure()
    pair = Pair(board, DECODE)
    board.run(pair, [(0, [5], 0)])
    assert pair.logits() == board.oracle(bench.calbin, [5])[0]


# ---- release


@pytest.mark.parametrize(
    ("kind", "level"),
    [("release_leak", 5), ("leak_until_dynamic_clear", 3), ("leak_until_soft", 4)],
)
def test_a_release_leaks_until_its_reset(board: Board, kind: str, level: int) -> None:
    board.faults(f"fault r kind={kind} chip=1", arm=False)
    board.give_back()
    board.ok("npurt_calbin_release", board.calbin)
    assert (board.memory(0).used, board.memory(1).used) == (0, MIB_100)
    for reset in (1, 2, 3, 4):
        report = board.reset(reset)
        assert report.mem_after[1] == board.memory(1).used == (MIB_100 if reset < level else 0)


def test_a_leak_is_as_large_as_the_chip_has_room(bench: Bench, open_board: OpenBoard) -> None:
    board = open_board("dram_bytes = 1000000")
    board.faults("fault r kind=release_leak")
    board.give_back()
    board.ok("npurt_calbin_release", board.calbin)
    assert board.memory().used == 1000000
    source = npurt.CalbinSource(path=str(bench.calbin).encode())
    board.ok("npurt_calbin_create", board.device, c.byref(source), c.byref(board.calbin))
    assert board.try_configure()[0] == Code.DEVICE_MEMORY


def test_a_slow_release_gives_back_at_its_time(board: Board) -> None:
    used = board.memory(0).used, board.memory(1).used
    board.faults("fault r kind=release_slow for=5s")
    board.give_back()
    board.ok("npurt_calbin_release", board.calbin)
    board.step(STEP_TIME, 5 * 10**9 - 1)
    assert (board.memory(0).used, board.memory(1).used) == used
    assert (board.memory(0).unaccounted, board.memory(0).params) == (used[0], 0)
    board.step(STEP_TIME, 5 * 10**9)
    assert (board.memory(0).used, board.memory(1).used) == (0, 0)


# ---- memory and health


def test_what_is_read_of_memory_may_be_wrong(board: Board) -> None:
    right = board.memory().used
    board.faults("fault m kind=memory_skew field=used n=+1000 nth=2", arm=False)
    assert [board.memory().used for _ in range(3)] == [right, right + 1000, right]
    board.faults("fault m kind=memory_skew field=dynamic n=-1 count=inf")
    assert board.memory().dynamic == (1 << 64) - 1
    assert board.memory().used == right


def test_a_look_at_the_health_takes_its_time(board: Board) -> None:
    board.faults("fault h kind=health_block for=4s nth=2", arm=False)
    assert [board.health().observed_ns for _ in range(3)] == [0, 4 * 10**9, 4 * 10**9]


def test_a_blocked_look_blocks_nobody_else_and_ends_with_the_device(open_board: OpenBoard) -> None:
    board = open_board("clock = real\nprofile = tiny")
    board.faults("fault h kind=health_block for=100000s", arm=False)
    answers: list[int] = []
    health = npurt.Health()
    thread = threading.Thread(
        target=lambda: answers.append(
            board.code("npurt_device_health", board.device, c.byref(health))
        )
    )
    thread.start()
    while b"decision=fire" not in board.trace():
        pass  # it looks
    ticket = board.start(Pair(board, DECODE), [(0, [5], 0)])
    assert board.wait([ticket], FOREVER) == (Code.OK, 0)
    assert board.health().state == 1
    board.close()
    thread.join()
    assert answers == [Code.BAD_HANDLE]


# ---- the device falls ill, by call and by time


@pytest.mark.parametrize("kind", ["unhealthy", "sticky", "wedged", "device_lost"])
@pytest.mark.parametrize("point", ["submit", "health", "time after=1s"])
def test_a_device_falls_ill_when_nothing_runs(board: Board, kind: str, point: str) -> None:
    board.faults(f"fault s kind={kind} on={point}")
    states = {"unhealthy": 3, "sticky": 3, "wedged": 4, "device_lost": 5}
    codes = {
        "unhealthy": Code.OK,
        "sticky": Code.STICKY,
        "wedged": Code.DEVICE_WEDGED,
        "device_lost": Code.DEVICE_LOST,
    }
    pair = Pair(board, DECODE)
    board.txn += 1
    pair.write([([5], 0)])
    assert board.apply((RESERVE, 0, 0, 1))[0] == Code.OK
    if point == "health":
        assert board.health().state == states[kind]
    elif point != "submit":
        board.step(STEP_TIME, 10**9)
    code, ticket = board.submit(pair, [(0, 1, 0)])
    assert (code, ticket != 0) == (codes[kind], kind == "unhealthy")
    assert (board.health().state, board.health().sticky) == (states[kind], codes[kind])
    assert [kind for kind, _, _ in board.events()].count(EV_HEALTH) == 1


def test_a_wedged_device_makes_no_progress_until_its_reset(open_board: OpenBoard) -> None:
    for config in ("", "clock = real\nscale = 1000"):
        board = open_board(config)
        board.faults("fault h kind=slow factor=1e9 phase=d2h nth=1\nfault w kind=wedged nth=2")
        pairs = [Pair(board, DECODE), Pair(board, DECODE)]
        tickets = [board.start(pair, [(lane, [1], 0)]) for lane, pair in enumerate(pairs)]
        if config:
            while board.health().state != 4:
                pass
        else:
            board.step(STEP_IDLE)
        health = board.health()
        assert (health.state, health.sticky, health.advised) == (4, Code.DEVICE_WEDGED, 4)
        assert [board.state(ticket) < DONE for ticket in tickets] == [True, True]
        report = board.reset(1)
        assert (report.jobs_aborted, report.jobs_unaccounted) == (0, 2)
        report = board.reset(4)
        assert (report.jobs_aborted, report.h.flags & QUIESCED, report.health_after) == (2, 1, 1)
        for pair, ticket in zip(pairs, tickets, strict=True):
            assert board.result(ticket).state == ABORTED
            board.retire(pair, ticket)


# ---- somebody else's reset


@pytest.mark.parametrize("point", ["submit", "health", "time after=1s"])
def test_another_process_resets_the_board(board: Board, bench: Bench, point: str) -> None:
    board.faults(f"fault e kind=epoch_bump on={point} nth=1")
    running, pair, ticket = Pair(board, DECODE), Pair(board, DECODE), 0
    if point == "submit":
        board.txn += 1
        assert board.apply((RESERVE, 0, 0, 1))[0] == Code.OK
    else:
        ticket = board.start(running, [(0, [5], 0)])
        board.step(STEP_TICKET, ticket | EXEC << 56)
    board.events()
    if point == "health":
        assert board.health().device_epoch == 2
    elif point != "submit":
        board.step(STEP_TIME, 10**9)
    assert board.submit(pair, [(0, 1, 0)]) == (Code.STALE_EPOCH, 0)
    assert board.health().device_epoch == board.counters().device_epoch == 2
    kinds = [kind for kind, _, _ in board.events()]
    assert kinds.index(EV_OWNER) < kinds.index(EV_EPOCH)
    assert calbin_state(board) == (3, 0)
    assert list(board.counters().resets) == [0] * 4, "it was not ours"
    if ticket and point == "health":
        result = board.result(ticket)
        assert (result.state, bool(result.h.flags & npurt.QUIESCENT)) == (ABORTED, True)
    if ticket:
        board.ok("npurt_job_retire", board.device, ticket)
    board.give_back(running, pair)
    board.epoch = 2
    board.configure()
    pair = Pair(board, DECODE)
    board.run(pair, [(0, [5], 0)])
    assert pair.logits() == board.oracle(bench.calbin, [5])[0]


def test_another_process_has_the_board_for_a_while(board: Board) -> None:
    board.faults("fault o kind=owner_change pid=77 for=5s on=health", arm=False)
    assert board.health().device_epoch == 2
    assert board.describe().owner_pid == 77
    board.give_back()
    assert board.try_configure()[0] == Code.DEVICE_OWNED
    board.reset(1, only_code=Code.DEVICE_OWNED)
    board.reset(4, only_code=Code.DEVICE_OWNED)
    board.events()
    board.step(STEP_TIME, 5 * 10**9)
    board.epoch = 2
    board.configure()
    assert board.describe().owner_pid == os.getpid()
    assert [text for kind, _, text in board.events() if kind == EV_OWNER] == ["given back"]
    pair = Pair(board, DECODE)
    board.run(pair, [(0, [5], 0)])


def test_a_submit_to_a_board_of_another_process_is_refused(board: Board) -> None:
    board.faults("fault o kind=owner_change")
    pair = Pair(board, DECODE)
    board.txn += 1
    assert board.apply((RESERVE, 0, 0, 1))[0] == Code.OK
    for _ in range(2):
        assert board.submit(pair, [(0, 1, 0)]) == (Code.DEVICE_OWNED, 0)


def test_a_hung_job_is_lost_when_another_process_resets(board: Board) -> None:
    board.faults("fault h kind=hang phase=exec\nfault e kind=epoch_bump on=health")
    ticket = board.start(Pair(board, DECODE), [(0, [5], 0)])
    board.step(STEP_IDLE)
    board.health()
    assert board.result(ticket).state == LOST


# ---- determinism


def test_same_plan_and_calls_give_the_same_trace(open_board: OpenBoard) -> None:
    plan = (
        "fault a kind=configure_fail p=0.3 count=inf\nfault b kind=reset_partial p=0.4"
        " without=quiesces_dma count=inf level=1\nfault c kind=epoch_bump p=0.3 on=health count=inf"
        "\nfault d kind=unhealthy on=time after=7us\nfault e kind=memory_skew field=used n=1 p=0.5"
        "\nfault f kind=release_leak p=0.5 count=inf\nfault g kind=reset_wide p=0.2 also=new_epoch"
    )
    traces = []
    for seed in (1, 1, 2):
        board = open_board(f"seed = {seed}", configured=False)
        board.faults(plan)
        for _ in range(12):
            if board.try_configure()[0] == Code.OK:
                board.reset(2)
            board.health()
            board.memory()
            board.reset(1)
            board.step(STEP_TIME, board.now() + 1000)
        traces.append(board.trace().partition(b"\n")[2])
    assert traces[0] == traces[1] != traces[2]
    fired = {line.split()[2] for line in traces[0].splitlines() if line.endswith(b"=fire")}
    assert fired == {b"rule=" + rule.encode() for rule in "abcdeg"}
