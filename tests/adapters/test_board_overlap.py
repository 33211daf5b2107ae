"""Two jobs in flight on the simulated board: what overlaps, and that nothing else is shared.

Source: npurt.h (states, options, ownership), npurt_sim.h (overlap), E11, E12, R5.2.
"""

import ctypes as c
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.native_board import (
    COMMIT,
    D2H,
    DECODE,
    DONE,
    EXEC,
    FAILED,
    FOREVER,
    H2D,
    LOGITS,
    QUEUED,
    RESERVE,
    ROOT,
    STEP_IDLE,
    STEP_ONE,
    STEP_TICKET,
    TOKENS,
    Bench,
    Board,
    OpenBoard,
    Pair,
)

from laneway.adapters import npurt, open_device
from laneway.adapters.npurt import Code

SUBMIT_MODE, PARALLEL_MODE, CEILING = 1, 2, 3


def finish(board: Board, pair: Pair, ticket: int, txn: int, lane: int, length: int) -> int:
    """Settle a finished job; return when its end was known."""
    visible = int(board.result(ticket).times.visible)
    assert board.apply((COMMIT, lane, length, length + 1), txn=txn) == (Code.OK, 99)
    board.retire(pair, ticket)
    return visible


def period_ns(board: Board, depth: int, jobs: int = 24) -> float:
    """Keep `depth` sequences busy, each submitted again at once; return the time between two ends.

    The first four ends are left out: the pipeline fills.
    """
    pairs = [Pair(board, DECODE) for _ in range(depth)]
    lengths = [0] * depth
    flying = {
        lane: (board.start(pair, [(lane, [lane + 1], 0)]), board.txn)
        for lane, pair in enumerate(pairs)
    }
    ends: list[int] = []
    while len(ends) < jobs:
        assert board.step(STEP_ONE) == 1
        for lane, (ticket, txn) in list(flying.items()):
            if board.state(ticket) != DONE:
                continue
            ends.append(finish(board, pairs[lane], ticket, txn, lane, lengths[lane]))
            lengths[lane] += 1
            flying[lane] = (board.start(pairs[lane], [(lane, [3], lengths[lane])]), board.txn)
    return (ends[-1] - ends[3]) / (jobs - 4)


@pytest.mark.parametrize(
    ("phases_ms", "gains"),
    [
        ((0.05, 5.4, 0.05), (1.00, 1.00, 1.01, 1.02)),
        ((0.3, 2.0, 0.5), (1.00, 1.00, 1.12, 1.40)),
        ((1, 1, 1), (1.00, 1.00, 1.50, 2.00)),
    ],
)
def test_a_second_job_in_flight_gains_what_the_model_says(
    open_board: OpenBoard, phases_ms: tuple[float, float, float], gains: tuple[float, ...]
) -> None:
    """Hand computation: a cycle of two jobs lasts as long as what cannot overlap."""
    h2d, compute, d2h = phases_ms
    got = []
    for overlap in range(4):
        config = (
            f"profile = cost\noverlap = {overlap}\n"
            f"h2d = {h2d}ms\ndecode = {compute}ms/0ns/0ns\nd2h = {d2h}ms"
        )
        alone = period_ns(open_board(config), 1)
        assert alone == pytest.approx(1e6 * (h2d + compute + d2h), abs=1)
        got.append(round(alone / period_ns(open_board(config), 2), 2))
    assert tuple(got) == gains


@pytest.mark.parametrize(
    ("overlap", "begins"),
    [
        # ping: 0-1, 1-3, 3-4 us. pong, transfers 1 us and computes 2 us as well:
        (0, (4, 5, 7)),
        (1, (4, 5, 7)),
        (2, (1, 4, 6)),  # its transfer beside ping's compute, the rest behind ping
        (3, (1, 3, 5)),
    ],
)
def test_the_times_of_each_phase_are_those_of_the_model(
    open_board: OpenBoard, bench: Bench, overlap: int, begins: tuple[int, int, int]
) -> None:
    board = open_board(
        f"profile = cost\noverlap = {overlap}\nh2d = 1us\ndecode = 2us/0ns/0ns\nd2h = 1us"
    )
    ping, pong = Pair(board, DECODE), Pair(board, DECODE)
    first = board.start(ping, [(0, [5], 0)])
    second = board.start(pong, [(1, [6], 0)])
    board.step(STEP_IDLE)
    one, two = board.result(first).times, board.result(second).times
    assert (one.h2d_begin, one.exec_begin, one.d2h_begin, one.visible) == (0, 1000, 3000, 4000)
    told = (two.h2d_begin, two.exec_begin, two.d2h_begin)
    assert told == tuple(1000 * begin for begin in begins)
    lasted = (two.h2d_end - told[0], two.exec_end - told[1], two.d2h_end - told[2])
    assert lasted == (1000, 2000, 1000)
    assert (board.result(first).engine_used, board.result(second).engine_used) == (1, 2)
    assert ping.logits() == board.oracle(bench.calbin, [5])[0]
    assert pong.logits() == board.oracle(bench.calbin, [6])[0]
    assert board.counters().busy_ns[0] == 4000


def test_half_a_link_lets_no_transfer_pass_another(open_board: OpenBoard) -> None:
    """Hypothesis 2: ping's output waits for pong's long input, and pong's compute for ping."""
    board = open_board("profile = cost\noverlap = 2\nh2d = 3us\ndecode = 1us/0ns/0ns\nd2h = 2us")
    first = board.start(Pair(board, DECODE), [(0, [5], 0)])
    second = board.start(Pair(board, DECODE), [(1, [6], 0)])
    board.step(STEP_IDLE)
    one, two = board.result(first).times, board.result(second).times
    assert (one.exec_begin, one.exec_end, one.d2h_begin, one.d2h_end) == (3000, 4000, 6000, 8000)
    assert (two.h2d_begin, two.h2d_end, two.exec_begin, two.d2h_end) == (3000, 6000, 8000, 11000)


def test_polling_two_jobs_never_goes_back_and_a_third_is_refused(board: Board) -> None:
    pairs = [Pair(board, DECODE) for _ in range(3)]
    tickets = [board.start(pairs[lane], [(lane, [lane], 0)]) for lane in (0, 1)]
    board.txn += 1
    assert board.apply((RESERVE, 2, 0, 1)) == (Code.OK, 99)
    seen: list[tuple[int, ...]] = [(QUEUED, QUEUED)]
    while DONE not in seen[-1]:
        assert board.submit(pairs[2], [(2, 1, 0)]) == (Code.QUEUE_FULL, 0)
        told = board.counters()
        assert told.submitted == told.pending + told.running + told.finished
        assert list(told.inflight) == [1, 1]
        assert board.step(STEP_ONE) == 1
        seen.append(tuple(board.state(ticket) for ticket in tickets))
    assert (EXEC, H2D) in seen and (D2H, EXEC) in seen, "both were under way at once"
    assert all(a <= b for was, now in pairwise(seen) for a, b in zip(was, now, strict=True))
    assert board.wait(tickets, 0) == (Code.OK, 0)
    assert board.submit(pairs[2], [(2, 1, 0)])[0] == Code.OK


@pytest.mark.parametrize(
    ("overlap", "phase", "behind"),
    [
        *((0, "h2d", QUEUED), (0, "exec", QUEUED), (0, "d2h", QUEUED)),
        *((3, "h2d", QUEUED), (3, "exec", H2D), (3, "d2h", EXEC)),
        *((2, "exec", H2D), (2, "d2h", H2D)),
    ],
)
def test_a_hung_job_holds_its_resource_and_no_other(
    open_board: OpenBoard, overlap: int, phase: str, behind: int
) -> None:
    # With half a link it depends on time whether the other's transfer begins before the hang.
    for config in ("", "\nclock = real\nscale = 1000") if overlap != 2 else ("",):
        board = open_board(f"overlap = {overlap}{config}")
        board.faults(f"fault h kind=hang phase={phase} release=reset1")
        hung = board.start(Pair(board, DECODE), [(0, [1], 0)])
        other = board.start(Pair(board, DECODE), [(1, [1], 0)])
        if config:
            while board.state(hung) < {"h2d": H2D, "exec": EXEC, "d2h": D2H}[phase]:
                pass
            while board.state(other) < behind:
                pass
        else:
            board.step(STEP_IDLE)
        assert board.state(other) == behind
        assert board.wait([hung, other], 0)[0] == Code.WAIT_TIMEOUT
        assert board.reset(1).jobs_aborted == 2
        effects = [board.result(ticket).kv_effect for ticket in (hung, other)]
        assert effects == [0 if phase == "h2d" else 3, 3 if behind == EXEC else 0]


def test_an_exception_of_one_job_is_none_of_the_other(board: Board, bench: Bench) -> None:
    board.faults("fault x kind=ccu_exception engine=ping kv=unknown inflight>=2")
    ping, pong = Pair(board, DECODE), Pair(board, DECODE)
    first = board.start(ping, [(0, [5], 0)])
    second = board.start(pong, [(1, [6], 0)])
    board.step(STEP_IDLE)
    assert (board.state(first), board.state(second)) == (FAILED, DONE)
    assert pong.logits() == board.oracle(bench.calbin, [6])[0]
    assert [board.lane(lane).certainty for lane in (0, 1)] == [2, 1]


# ---- parallel mode


def set_option(board: Board, option: int, value: int) -> int:
    return board.code("npurt_device_set", board.device, option, c.c_int64(value))


def test_parallel_mode_is_turned_off_and_on_with_nothing_in_flight(open_board: OpenBoard) -> None:
    board = open_board()
    pairs = [Pair(board, DECODE), Pair(board, DECODE)]
    for mode, begin_ns in ((0, 3000), (1, 1000)):
        assert set_option(board, PARALLEL_MODE, mode) == Code.OK
        start = board.now()
        tickets: list[int] = []
        for lane, pair in enumerate(pairs):
            board.txn += 1
            length = board.lane(lane).committed
            pair.write([([1], length)])
            assert board.apply((RESERVE, lane, length, length + 1)) == (Code.OK, 99)
            code, ticket = board.submit(pair, [(lane, 1, length)])
            assert code == Code.OK
            tickets.append(ticket)
        assert set_option(board, PARALLEL_MODE, 1 - mode) == Code.OBJECT_IN_FLIGHT
        board.step(STEP_IDLE)
        assert board.result(tickets[1]).times.h2d_begin - start == begin_ns
        for lane, pair in enumerate(pairs):
            length = board.lane(lane).committed
            done = (COMMIT, lane, length, length + 1)
            assert board.apply(done, txn=board.txn - 1 + lane) == (Code.OK, 99)
            board.retire(pair, tickets[lane])
    assert set_option(board, PARALLEL_MODE, 2) == Code.UNSUPPORTED
    assert set_option(board, SUBMIT_MODE, 0) == Code.UNSUPPORTED
    assert set_option(board, SUBMIT_MODE, 1) == Code.OK
    assert set_option(open_board("overlap = 1"), PARALLEL_MODE, 1) == Code.UNSUPPORTED


def test_a_ceiling_of_one_takes_one_job(board: Board) -> None:
    assert set_option(board, CEILING, 3) == Code.INVALID_ARG
    assert set_option(board, CEILING, 1) == Code.OK
    board.start(Pair(board, DECODE), [(0, [1], 0)])
    board.txn += 1
    pair = Pair(board, DECODE)
    pair.write([([1], 0)])
    assert board.apply((RESERVE, 1, 0, 1)) == (Code.OK, 99)
    assert board.submit(pair, [(1, 1, 0)]) == (Code.QUEUE_FULL, 0)


# ---- memory in flight


def test_each_mistake_with_memory_is_blamed_on_its_own_job(board: Board, bench: Bench) -> None:
    ping, pong = Pair(board, DECODE), Pair(board, DECODE)
    first = board.start(ping, [(0, [5], 0)])
    second = board.start(pong, [(1, [6], 0)])
    board.step(STEP_TICKET, first | EXEC << 56)
    assert board.state(second) in (QUEUED, H2D)
    pong.view(TOKENS, np.int32)[0, 0] = 9  # pong's input has not been taken yet
    ping.view(LOGITS, np.uint16)[0, 3] = 1  # ping's output is still to come
    board.step(STEP_IDLE)
    assert [(ticket, text.split()[0]) for ticket, text in board.blames()] == [
        (second, "INPUT_TOUCHED"),
        (first, "OUTPUT_TOUCHED"),
    ]
    assert ping.logits() == board.oracle(bench.calbin, [5])[0]
    assert pong.logits() == board.oracle(bench.calbin, [9])[0]


def test_memory_that_one_job_loses_fails_that_job_only(board: Board, bench: Bench) -> None:
    ping, pong = Pair(board, DECODE), Pair(board, DECODE)
    first = board.start(ping, [(0, [5], 0)])
    second = board.start(pong, [(1, [6], 0)])
    board.step(STEP_TICKET, first | EXEC << 56)
    pong.memory[TOKENS].close()
    board.step(STEP_IDLE)
    assert (board.state(first), board.state(second)) == (DONE, FAILED)
    assert board.result(second).status == Code.DMA
    assert ping.logits() == board.oracle(bench.calbin, [5])[0]
    assert [ticket for ticket, _ in board.blames()] == [second]


def test_two_jobs_in_flight_share_no_lane_and_no_output(board: Board) -> None:
    ping, pong = Pair(board, DECODE), Pair(board, DECODE)
    assert pong.map(LOGITS, address=ping.address(LOGITS)) == Code.OK
    board.start(ping, [(0, [5], 0)])
    assert board.submit(pong, [(0, 1, 0)]) == (Code.OBJECT_IN_FLIGHT, 0)
    board.txn += 1
    pong.write([([1], 0)])
    assert board.apply((RESERVE, 1, 0, 1)) == (Code.OK, 99)
    assert board.submit(pong, [(1, 1, 0)]) == (Code.RANGE_OVERLAP, 0)


# ---- clocks


def play(board: Board, turns: int = 20) -> bytes:
    """Keep two sequences busy under chances; return the trace."""
    board.faults(
        "fault s kind=slow phase=exec p=0.3 factor=4\nfault h kind=slow phase=h2d p=0.3 factor=3\n"
        "fault l kind=late_completion p=0.1 delay=2us\nfault r kind=submit_reject p=0.1"
    )
    pairs = [Pair(board, DECODE), Pair(board, DECODE)]
    flying: dict[int, tuple[int, int]] = {}
    for _ in range(turns * 6):
        for lane, pair in enumerate(pairs):
            length = board.lane(lane).committed
            if lane in flying:
                ticket, txn = flying[lane]
                if board.state(ticket) == DONE:
                    finish(board, pair, ticket, txn, lane, length)
                    del flying[lane]
                continue
            board.txn += 1
            pair.write([([lane + 1], length)])
            assert board.apply((RESERVE, lane, length, length + 1))[0] == Code.OK
            code, ticket = board.submit(pair, [(lane, 1, length)])
            if code == Code.OK:
                flying[lane] = ticket, board.txn
            else:
                assert board.apply((3, lane, length, length + 1))[0] == Code.OK
        board.step(STEP_ONE)
    assert board.violations() == []
    return board.trace()


def test_same_plan_and_calls_give_the_same_trace_with_two_in_flight(
    open_board: OpenBoard,
) -> None:
    traces = set()
    for seed in range(10):
        for overlap in range(4):
            config = f"seed = {seed}\noverlap = {overlap}"
            first = play(open_board(config))
            again = play(open_board(f"{config}\nclock = virtual"))
            assert again.replace(b"clock=2", b"clock=0", 1) == first
            traces.add(first.partition(b"\n")[2])
    assert len(traces) >= 30, "plans and overlap matter (0 and 1 are alike)"


def test_two_jobs_at_once_are_right_with_a_real_clock(open_board: OpenBoard, bench: Bench) -> None:
    board = open_board("clock = real\nprofile = cost\nscale = 100\nchecks = all")
    pairs = [Pair(board, DECODE), Pair(board, DECODE)]
    for length in range(12):
        tickets = [board.start(pairs[lane], [(lane, [9 + lane], length)]) for lane in (0, 1)]
        one, two = (board.wait([ticket], FOREVER) for ticket in tickets)
        assert (one, two) == ((Code.OK, 0), (Code.OK, 0))
        times = [board.result(ticket).times for ticket in tickets]
        assert times[1].exec_begin >= times[0].exec_end, "one computes at a time"
        for lane, pair in enumerate(pairs):
            done = (COMMIT, lane, length, length + 1)
            assert board.apply(done, txn=board.txn - 1 + lane) == (Code.OK, 99)
            board.retire(pair, tickets[lane])
    for lane, pair in enumerate(pairs):
        assert pair.logits() == board.oracle(bench.calbin, [9 + lane] * 12)[0]
    assert board.violations() == []


# ---- what the board says of it


def capabilities(board: Board) -> dict[str, npurt.Cap]:
    caps = (npurt.Cap * len(npurt.CAPABILITIES))()
    count = c.c_uint32(len(caps))
    board.ok("npurt_device_caps", board.device, caps, c.sizeof(npurt.Cap), c.byref(count))
    return {npurt.CAPABILITIES[cap.id - 1]: cap for cap in caps}


SHIPPED = ROOT / "adapters" / "calrt-0.7.6.persona"


def test_the_shipped_persona_refuses_what_the_runtime_refuses(open_board: OpenBoard) -> None:
    """Design values of the runtime in production: one job, one board, no statement on the rest."""
    told = capabilities(open_board(f"persona = {SHIPPED}"))
    assert len(told) == len(npurt.CAPABILITIES)
    answers = {name: (cap.support, cap.evidence, cap.value) for name, cap in told.items()}
    assert answers["IN_FLIGHT"] == answers["BATCH_LANES"] == (3, 0, 1)
    assert answers["LAYOUTS"] == (3, 0, 1 << 2)
    assert answers["MULTI_BOARD"] == (1, 4, 1)
    first_level = {"PING_PONG", "PARALLEL_MODE", "OVERLAP_MODEL", "POLL_THREADSAFE", "COUNTERS"}
    for name, answer in answers.items():
        if name in first_level | {"SAME_MODEL_FAST_PATH"}:
            assert answer == (0, 1, 0), name
        elif name not in ("IN_FLIGHT", "BATCH_LANES", "LAYOUTS", "MULTI_BOARD"):
            assert answer == (0, 3, 0), name
    assert {cap.scope for cap in told.values()} == {b"CalRT 0.7.6"}
    assert told["CANCEL"].note.startswith(b"no cancel call is known")


def test_what_a_persona_does_not_say_is_unknown(open_board: OpenBoard, tmp_path: Path) -> None:
    table = tmp_path / "p"
    table.write_text(
        "# one line\n\nscope Other 2\n"
        "cap CANCEL support=limited evidence=C2 source=record value=7 note=two  words=1 # end\n"
    )
    told = capabilities(open_board(f"persona = {table}"))
    cancel, health = told["CANCEL"], told["HEALTH"]
    assert (cancel.support, cancel.evidence, cancel.source, cancel.value) == (2, 2, 4, 7)
    assert (cancel.scope, cancel.note) == (b"Other 2", b"two  words=1")
    assert (health.support, health.evidence, health.source, health.value) == (0, 3, 5, 0)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("cap MAGIC support=yes evidence=C0 source=vendor", "'MAGIC' is no capability"),
        ("cap", "'' is no capability"),
        ("cap CANCEL support=yes evidence=C0", "CANCEL needs support=, evidence= and source="),
        ("cap CANCEL support=maybe evidence=C0 source=vendor", "support does not take 'maybe'"),
        ("cap CANCEL support=yes evidence=C5 source=vendor", "evidence does not take 'C5'"),
        ("cap CANCEL support=yes evidence=C0 source=me", "source does not take 'me'"),
        ("cap CANCEL support=yes evidence=C0 source=vendor value=-1", "value does not take '-1'"),
        ("cap CANCEL support=yes support=no evidence=C0 source=vendor", "'support' a second time"),
        ("cap CANCEL color=red", "unknown key 'color'"),
        ("cap CANCEL loose", "unknown key 'loose'"),
        ("cap HEALTH support=yes evidence=C0 source=vendor", "HEALTH a second time"),
        ("scope", "expected 'cap NAME"),
        ("capacity", "expected 'cap NAME"),
    ],
)
def test_a_wrong_persona_is_refused_with_its_line(
    bench: Bench, tmp_path: Path, line: str, complaint: str
) -> None:
    table = tmp_path / "p"
    table.write_text(f"cap HEALTH support=yes evidence=C0 source=vendor\n\n{line}\n")
    params = npurt.OpenParams(config=f"persona = {table}".encode())
    device = c.c_void_p()
    answer = bench.library.attempt("npurt_device_open", c.byref(params), c.byref(device))
    assert (answer.code, device.value) == (Code.INVALID_ARG, None)
    assert "persona line 3: " in answer.words
    assert complaint.replace(" take '", " take the value '") in answer.words
    params = npurt.OpenParams(config=f"persona = {tmp_path}/none".encode())
    answer = bench.library.attempt("npurt_device_open", c.byref(params), c.byref(device))
    assert answer.code == Code.NOT_FOUND


def test_a_device_takes_a_shipped_persona_by_name() -> None:
    device = open_device("sim:tiny?clock=manual&persona=calrt-0.7.6")
    facts = device.describe()
    device.stop()
    told = {row.name: (row.support, row.evidence) for row in facts.capabilities}
    assert (told["MULTI_BOARD"], told["PING_PONG"]) == (("no", "C4"), ("unknown", "C1"))
    assert facts.inflight_max == 1


@pytest.mark.parametrize(
    ("overlap", "parallel"), [(0, (1, 0)), (1, (1, 0)), (2, (3, 1)), (3, (3, 1))]
)
def test_the_overlap_is_told(
    open_board: OpenBoard, overlap: int, parallel: tuple[int, int]
) -> None:
    told = capabilities(open_board(f"overlap = {overlap}", configured=False))
    assert (told["OVERLAP_MODEL"].support, told["OVERLAP_MODEL"].value) == (3, overlap)
    assert (told["PARALLEL_MODE"].support, told["PARALLEL_MODE"].value) == parallel
    assert (told["IN_FLIGHT"].value, told["PING_PONG"].value) == (2, 2)
    assert {(cap.evidence, cap.source) for cap in told.values()} == {(9, 6)}
