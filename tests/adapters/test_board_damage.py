"""Faults that let a job end well with something wrong: numbers, KV, counters, states, the device.

Source: npurt.h (health, counters, states), npurt_sim.h (fault plan), E11, E14, E15, D2, D15.
"""

import ctypes as c
import math

import numpy as np
import pytest
from support.native_board import (
    COMMIT,
    DECODE,
    DECODE_4,
    DONE,
    EXEC,
    H2D,
    LOST,
    PREFILL,
    QUEUED,
    RESERVE,
    STEP_IDLE,
    STEP_ONE,
    STEP_TICKET,
    STEP_TIME,
    Bench,
    Board,
    OpenBoard,
    Pair,
)

from laneway.adapters import npurt
from laneway.adapters.npurt import Code

EV_THROTTLE = 2
VERIFIED, CLEARS_STICKY = 2, 4
"""A flag of a reset's report; one of its effects."""


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ("kind=numeric_offset n=0", "n=0"),
        ("kind=numeric_garbage n=2", "unknown key 'n' for kind=numeric_garbage"),
        ("kind=numeric_constant on=d2h", "on=d2h does not go with"),
        ("kind=stale_output lanes=1", "unknown key 'lanes'"),
        ("kind=swapped_output on=exec", "on=exec does not go with"),
        ("kind=kv_zero pos=-1", "pos=-1"),
        ("kind=kv_bit victim=1", "unknown key 'victim'"),
        ("kind=kv_swap pos=1", "kv_swap needs with="),
        ("kind=pad_write", "pad_write needs victim="),
        ("kind=unhealthy release=soon", "release=soon: expected never or reset1 .. reset4"),
        ("kind=unhealthy code=0x801", "unknown key 'code'"),
        ("kind=sticky code=0x601", "code=0x601: a device refuses with a code of class 8"),
        ("kind=device_lost on=poll", "on=poll does not go with"),
        ("kind=thermal limit=0", "limit=0"),
        ("kind=thermal tau=0s", "tau=0s: more than nothing"),
        ("kind=drift", "drift needs percent= or bytes="),
        ("kind=illegal_step from=exec", "illegal_step needs from= and to="),
        ("kind=illegal_step from=done to=exec", "from=done: expected queued, h2d, exec, d2h"),
        ("kind=illegal_step from=exec to=exec", "from= and to= are the same state"),
        ("kind=illegal_step from=exec to=h2d on=exec", "on=exec does not go with"),
        ("kind=counter_stuck", "counter_stuck needs field="),
        ("kind=counter_stuck field=late n=1", "unknown key 'n'"),
        ("kind=counter_negative field=late n=-1", "n=-1"),
        ("kind=counter_reset field=all", "field=all is not a counter"),
        ("kind=counter_reset field=late task=decode", "no task=, engine=, lane= or model="),
    ],
)
def test_a_wrong_rule_is_refused_with_its_line(board: Board, rule: str, complaint: str) -> None:
    answer = board.library.attempt("npurt_sim_faults", board.device, f"\nfault a {rule}".encode())
    assert answer.code == Code.INVALID_ARG
    assert "fault plan line 2: " in answer.words
    assert complaint in answer.words


# ---- numbers


def right_kv(board: Board, bench: Bench, pair: Pair, prompts: dict[int, list[int]]) -> bool:
    """Run one more token on every lane; is it what it must be?"""
    board.faults("", arm=False)
    rows = [(lane, [9], len(prompt)) for lane, prompt in prompts.items()]
    board.run(pair, rows)
    return all(
        pair.logits(row) == board.oracle(bench.calbin, [*prompt, 9])[0]
        for row, prompt in enumerate(prompts.values())
    )


@pytest.mark.parametrize("flag", ["", " flag=y"])
@pytest.mark.parametrize("kind", ["numeric_garbage", "numeric_constant", "numeric_offset n=3"])
def test_wrong_numbers_are_finite_and_unflagged_and_kv_is_whole(
    board: Board, bench: Bench, kind: str, flag: str
) -> None:
    board.faults(f"fault n kind={kind} lanes=0x6{flag}")
    pair = Pair(board, DECODE_4)
    result = board.run(pair, [(lane, [lane + 1], 0) for lane in range(4)])
    assert bool(result.h.flags & npurt.NUMERIC_FLAG) == bool(flag)
    assert result.h.flags & npurt.OUTPUT_VALID
    for lane in range(4):
        expected, got = board.oracle(bench.calbin, [lane + 1])[0], pair.logits(lane)
        assert all(bits & 0x7F80 != 0x7F80 for bits in got)
        if lane not in (1, 2):
            assert got == expected
        elif "constant" in kind:
            assert got == [0x3F80] * len(got)  # one
        elif "offset" in kind:
            assert got == expected[-3:] + expected[:-3]
        else:
            assert got != expected
            assert len(set(got)) > len(got) // 2
    assert right_kv(board, bench, pair, {lane: [lane + 1] for lane in range(4)})


def test_a_stale_output_is_that_of_the_job_before_on_the_bank(board: Board, bench: Bench) -> None:
    board.faults("fault s kind=stale_output nth=3")
    pair = Pair(board, DECODE)
    board.run(pair, [(0, [5], 0)])
    before = board.oracle(bench.calbin, [5])[0]
    board.run(pair, [(1, [6], 0)])
    assert pair.logits() == (other := board.oracle(bench.calbin, [6])[0]) != before
    result = board.run(pair, [(0, [7], 1)])
    assert (result.engine_used, result.h.flags & npurt.NUMERIC_FLAG) == (1, 0)
    assert pair.logits() == other, "what lane 1 got last on this bank"
    assert right_kv(board, bench, pair, {0: [5, 7]})


def test_swapped_outputs_are_those_of_the_other_job(board: Board, bench: Bench) -> None:
    board.faults("fault s kind=swapped_output count=2 inflight>=1")
    ping, pong = Pair(board, DECODE), Pair(board, DECODE)
    first = board.start(ping, [(0, [5], 0)])
    second = board.start(pong, [(1, [6], 0)])
    board.step(STEP_IDLE)
    assert [board.state(ticket) for ticket in (first, second)] == [DONE, DONE]
    # ping's output leaves while pong still computes: pong's bank holds nothing yet.
    assert pong.logits() == board.oracle(bench.calbin, [5])[0]
    assert ping.logits() == [0] * len(ping.logits())
    assert board.violations() == []


# ---- KV


@pytest.mark.parametrize("kind", ["kv_stale", "kv_swap with=3", "kv_zero", "kv_bit"])
def test_damaged_kv_shows_in_the_next_token_of_its_lane_only(
    board: Board, bench: Bench, kind: str
) -> None:
    prompts = {0: [3, 1, 4, 1], 1: [5, 9, 2, 6]}
    board.faults(f"fault k kind={kind} lane=1 task=decode")
    prefill, decode = Pair(board, PREFILL), Pair(board, DECODE_4)
    for lane, prompt in prompts.items():
        board.run(prefill, [(lane, prompt, 0)])
    board.run(decode, [(0, [7], 4), (1, [8], 4)])
    for row, (prompt, token) in enumerate(((prompts[0], 7), (prompts[1], 8))):
        told = board.oracle(bench.calbin, [*prompt, token])[0]
        assert decode.logits(row) == told, "the job itself is right"
    digests = []
    for lane, tokens in ((0, [*prompts[0], 7]), (1, [*prompts[1], 8])):
        digest = c.c_uint64(0)
        board.ok("npurt_sim_kv_digest", board.bank, lane, c.byref(digest))
        digests.append(digest.value == board.oracle(bench.calbin, tokens)[1])
    assert digests == [True, False]
    board.faults("")
    board.run(decode, [(0, [2], 5), (1, [2], 5)])
    assert decode.logits(0) == board.oracle(bench.calbin, [*prompts[0], 7, 2])[0]
    if kind != "kv_bit":  # one bit may be too small to show in BF16
        assert decode.logits(1) != board.oracle(bench.calbin, [*prompts[1], 8, 2])[0]


def read_kv(board: Board, lane: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """KV of a lane. Shapes: [layers, context, key and value]."""
    chip, address, size = c.c_uint32(0), c.c_uint64(0), c.c_uint64(0)
    place = (c.byref(chip), c.byref(address), c.byref(size))
    board.ok("npurt_sim_kv_address", board.bank, lane, *place)
    raw = np.empty(size.value // 4, np.float32)
    board.ok("npurt_sim_peek", board.device, 0, address.value, raw.ctypes.data, size.value)
    return raw.reshape(4, 64, -1)


def test_a_swap_gives_each_lane_the_others_row(open_board: OpenBoard) -> None:
    whole, hurt = open_board(), open_board()
    hurt.faults("fault k kind=kv_swap pos=2 lane=3 with=5")
    for board in (whole, hurt):
        prefill = Pair(board, PREFILL)
        board.run(prefill, [(5, [9, 9, 2, 6], 0)])
        board.run(prefill, [(3, [5, 6, 7, 8], 0)])
    for lane, other in ((3, 5), (5, 3)):
        was, now, foreign = read_kv(whole, lane), read_kv(hurt, lane), read_kv(whole, other)
        changed = [at for at in range(64) if (was[:, at] != now[:, at]).any()]
        assert changed == [2]
        assert (now[:, 2] == foreign[:, 2]).all()


@pytest.mark.parametrize("kind", ["kv_zero", "kv_bit"])
def test_only_the_named_position_is_damaged(open_board: OpenBoard, kind: str) -> None:
    whole, hurt = open_board(), open_board()
    hurt.faults(f"fault k kind={kind} pos=2")
    for board in (whole, hurt):
        board.run(Pair(board, PREFILL), [(3, [5, 6, 7, 8], 0)])
    was, now = read_kv(whole, 3), read_kv(hurt, 3)
    assert [at for at in range(64) if (was[:, at] != now[:, at]).any()] == [2]
    if kind == "kv_zero":
        assert not now[:, 2].any()
    else:
        assert np.unpackbits(was.view(np.uint8) ^ now.view(np.uint8)).sum() == 1


def test_an_inactive_row_overwrites_another_lane(board: Board, bench: Bench) -> None:
    board.faults("fault p kind=pad_write victim=2")
    decode = Pair(board, DECODE_4)
    board.run(decode, [(2, [5], 0), (1, [6], 0), (0, [7], 0), (3, [1], 0)])  # full: no such row
    board.run(Pair(board, DECODE), [(4, [6], 0)])  # a batch of one is full
    digest = c.c_uint64(0)
    board.ok("npurt_sim_kv_digest", board.bank, 2, c.byref(digest))
    assert digest.value == board.oracle(bench.calbin, [5])[1]
    board.run(decode, [(1, [8], 1), (0, [], 0), (0, [9], 1)])
    assert decode.logits(0) == board.oracle(bench.calbin, [6, 8])[0]
    board.run(decode, [(2, [8], 1)])
    assert decode.logits(0) != board.oracle(bench.calbin, [5, 8])[0]
    assert board.violations() == []


# ---- states and counters


@pytest.mark.parametrize(
    ("source", "shown", "seen"),
    [
        ("exec", H2D, [QUEUED, H2D, H2D, 4]),
        ("h2d", DONE, [QUEUED, DONE, EXEC, 4]),
        ("d2h", QUEUED, [QUEUED, H2D, EXEC, QUEUED]),
    ],
)
def test_a_poll_may_show_a_state_that_cannot_be(
    board: Board, source: str, shown: int, seen: list[int]
) -> None:
    names = {QUEUED: "queued", H2D: "h2d", DONE: "done"}
    board.faults(f"fault i kind=illegal_step from={source} to={names[shown]}")
    ticket = board.start(Pair(board, DECODE), [(0, [1], 0)])
    told = [board.state(ticket)]
    for _ in range(3):
        board.step(STEP_ONE)
        told.append(board.state(ticket))
        if told[-1] == DONE:
            completion = npurt.Completion()
            early = board.code("npurt_job_result", board.device, ticket, c.byref(completion))
            assert early == Code.NOT_READY
    assert told == seen
    board.step(STEP_ONE)
    assert board.state(ticket) == DONE


def test_counters_stick_go_negative_and_start_again(board: Board) -> None:
    pair = Pair(board, DECODE)
    board.run(pair, [(0, [5], 0)])
    board.faults(
        "fault a kind=counter_stuck field=finished skip=1 count=3\n"
        "fault b kind=counter_reset field=submitted skip=4\n"
    )
    told = []
    for length in range(1, 8):
        board.run(pair, [(0, [5], length)])
        counters = board.counters()
        told.append((counters.finished, counters.submitted))
    assert told == [
        *((2, 2), (3, 3), (3, 4), (3, 5)),  # stuck from the second reading on, for three
        *((6, 0), (7, 1), (8, 2)),  # jobs counted from the fifth reading on
    ]
    board.faults("fault c kind=counter_negative field=left")
    assert board.counters().left == (1 << 64) - 1
    assert board.counters().left == 0


# ---- the device


def try_submit(board: Board, pair: Pair, lane: int) -> int:
    board.txn += 1
    pair.write([([1], 0)])
    assert board.apply((RESERVE, lane, 0, 1)) == (Code.OK, 99)
    return board.submit(pair, [(lane, 1, 0)])[0]


def test_an_unhealthy_device_says_so_and_goes_on(board: Board, bench: Bench) -> None:
    board.faults("fault u kind=unhealthy chip=1 release=reset2")
    pair = Pair(board, DECODE)
    board.run(pair, [(0, [5], 0)])
    assert pair.logits() == board.oracle(bench.calbin, [5])[0]
    health = board.health()
    assert (health.state, health.advised, health.sticky) == (3, 2, 0)
    assert list(health.chip_state)[:2] == [1, 3]
    board.reset(1)
    assert board.health().state == 3, "level 1 is not enough"
    board.reset(2)
    assert (board.health().state, board.health().advised) == (1, 0)


def test_a_sticky_error_refuses_every_submit_until_its_reset(open_board: OpenBoard) -> None:
    for release, level in (("", 4), (" release=reset1", 1)):
        board = open_board()
        board.faults(f"fault s kind=sticky code=0x802{release}")
        pair = Pair(board, DECODE)
        board.run(pair, [(0, [5], 0)])
        for lane in (1, 2):
            assert try_submit(board, pair, lane) == Code.DEVICE_WEDGED
        assert (board.health().sticky, board.health().state) == (Code.DEVICE_WEDGED, 3)
        assert board.counters().submitted == 1
        if level == 4:
            assert board.reset(1).h.flags & VERIFIED == 0, "the device still refuses"
            assert board.health().sticky == Code.DEVICE_WEDGED
        assert board.reset(level).h.flags & VERIFIED
        assert (board.health().sticky, board.health().state) == (0, 1)


def test_a_lost_device_loses_every_job_in_flight(open_board: OpenBoard) -> None:
    for config in ("", "clock = real\nscale = 1000"):
        board = open_board(config)
        board.faults("fault l kind=device_lost engine=pong on=h2d")
        pairs = [Pair(board, DECODE), Pair(board, DECODE)]
        board.faults("fault h kind=hang phase=d2h nth=1\nfault l kind=device_lost engine=pong")
        tickets = [board.start(pair, [(lane, [1], 0)]) for lane, pair in enumerate(pairs)]
        if config:
            while board.health().state != 5:
                pass
        board.step(STEP_IDLE) if not config else None
        for ticket in tickets:
            result = board.result(ticket)
            assert (result.state, result.status, result.kv_effect) == (LOST, Code.JOB_LOST, 3)
            assert result.h.flags == npurt.TERMINAL, "who knows what it still writes"
            assert board.wait([ticket], 0) == (Code.OK, 0)
            retired = board.code("npurt_job_retire", board.device, ticket)
            assert retired == Code.OBJECT_IN_FLIGHT
        assert try_submit(board, Pair(board, DECODE), 2) == Code.DEVICE_LOST
        assert (board.health().state, board.health().sticky) == (5, Code.DEVICE_LOST)
        report = board.reset(4)
        assert (report.health_after, report.epoch_after, report.jobs_unaccounted) == (1, 2, 2)


def test_heat_slows_the_device_above_its_limit(open_board: OpenBoard) -> None:
    """One RC node: target 45 + 40 degrees while it computes, 45 while it does not."""
    board = open_board("profile = cost\ndecode = 1s/0ns/0ns\nh2d = 1ns\nd2h = 1ns")
    board.faults("fault t kind=thermal tau=2s rise=40 limit=70 factor=3")
    pair = Pair(board, DECODE)
    warm, lasted, expected, celsius = [], [], [], 45.0
    for length in range(5):
        times = board.run(pair, [(0, [1], length)]).times
        lasted.append(times.exec_end - times.exec_begin)
        warm.append(board.health().temp_mdegc[0])
        expected.append(3 * 10**9 if celsius > 70 else 10**9)
        celsius = 85 + (celsius - 85) * math.exp(-expected[-1] / 2e9)
        assert warm[-1] == pytest.approx(1000 * celsius, abs=2)
    assert lasted == expected
    assert set(lasted) == {10**9, 3 * 10**9}
    assert [kind for kind, _, _ in board.events()].count(EV_THROTTLE) == 1
    assert (board.health().throttle[0], board.health().clock_mhz[0]) == (1, 500)
    board.step(STEP_TIME, board.now() + 60 * 10**9)
    assert board.health().temp_mdegc[0] == pytest.approx(45000, abs=2)
    times = board.run(pair, [(0, [1], 5)]).times
    assert times.exec_end - times.exec_begin == 10**9
    assert board.health().throttle[0] == 0


def test_drift_makes_jobs_slower_and_memory_fuller(board: Board) -> None:
    """Ten per cent per job on 1 us, 100 bytes a job."""
    board.faults("fault d kind=drift percent=10000000 bytes=100")
    told, pair = npurt.Memory(), Pair(board, DECODE)
    board.ok("npurt_device_memory", board.device, 0, c.byref(told))
    before = told.dynamic
    for length in range(3):
        times = board.run(pair, [(0, [1], length)]).times
        assert times.exec_end - times.exec_begin == 1000 + 100 * (length + 1)
        board.ok("npurt_device_memory", board.device, 0, c.byref(told))
        assert told.dynamic == before + 100 * (length + 1)


def test_a_device_that_never_recovers_stays_so(board: Board) -> None:
    board.faults("fault l kind=device_lost release=never")
    ticket = board.start(Pair(board, DECODE), [(0, [1], 0)])
    board.step(STEP_TICKET, ticket | DONE << 56)
    assert board.state(ticket) == LOST
    report = board.reset(4)
    assert (report.h.flags & VERIFIED, report.effects_seen & CLEARS_STICKY) == (0, 0)
    assert (board.health().state, board.health().advised) == (5, 102)
    assert board.apply((COMMIT, 0, 0, 1))[0] != Code.OK
