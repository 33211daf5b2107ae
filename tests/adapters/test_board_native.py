"""The simulated board through its C ABI alone: the contract of npurt.h, and the simulator's own.

Source: device-abi 4.2 to 4.8 (states, ownership, submit, KV, resets), 8.1 to 8.4 (simulator).
"""

import ctypes as c
import mmap
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from laneway.adapters import npurt
from laneway.adapters.binding import Library, load_library
from laneway.adapters.calbin import pack
from laneway.adapters.npurt import Code

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "adapters" / "native"
FLAGS = (
    *("-std=c11", "-O2", "-D_GNU_SOURCE", "-pthread", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-Wl,-Bsymbolic"),
)
PREFILL, PREFILL_4, DECODE, DECODE_4 = range(4)
TOKENS, POSITIONS, LENGTHS, LOGITS, DIGEST = range(5)
RESERVE, COMMIT, ROLLBACK, RELEASE = 1, 2, 3, 4
QUEUED, H2D, EXEC, D2H, DONE, FAILED, ABORTED, LOST = range(1, 9)
STEP_ONE, STEP_TIME, STEP_TICKET, STEP_IDLE, STEP_KIND = range(1, 6)
CONTEXT, VOCAB, LANES = 64, 512, 8
FOREVER = (1 << 64) - 1


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    built = sorted((ROOT / "adapters").glob("_calsim*.so"))
    if built:
        return load_library(built[0])
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler and no built simulator")
    path = tmp_path_factory.mktemp("native") / "libcalsim.so"
    sources = sorted(str(source) for source in NATIVE.glob("calsim_*.c"))
    subprocess.run([compiler, *FLAGS, "-o", str(path), *sources, "-lm"], check=True)
    return load_library(path)


@pytest.fixture(scope="module")
def calbin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board") / "tiny-moe"
    pack(ROOT / "models" / "tiny-moe", folder, batch=(1, 4), context=CONTEXT, lanes=LANES)
    return folder


class Pair:
    """An input and an output buffer with their memory."""

    def __init__(self, board: "Board", submodel: int, *, digest: bool = True) -> None:
        self.board = board
        self.rows = 4 if submodel in (PREFILL_4, DECODE_4) else 1
        self.width = CONTEXT if submodel in (PREFILL, PREFILL_4) else 1
        self.memory: dict[int, mmap.mmap] = {}
        self.in_ = board.create_buffer(submodel, npurt.IN)
        self.out = board.create_buffer(submodel, npurt.OUT)
        shapes = {TOKENS: 4 * self.width, POSITIONS: 4 * self.width, LENGTHS: 4, LOGITS: 2 * VOCAB}
        for tensor, row_bytes in (shapes | ({DIGEST: 8} if digest else {})).items():
            self.memory[tensor] = mmap.mmap(-1, self.rows * row_bytes)
            assert self.map(tensor) == Code.OK

    def address(self, tensor: int) -> int:
        # The export goes with the array: nothing keeps the mapping open, as a careless host would.
        return c.addressof(c.c_char.from_buffer(self.memory[tensor]))

    def map(self, tensor: int, *, address: int | None = None) -> int:
        where = self.address(tensor) if address is None else address
        buffer = self.out if tensor >= LOGITS else self.in_
        return self.board.code("npurt_buffer_map", buffer, tensor, where, len(self.memory[tensor]))

    def view(self, tensor: int, dtype: type[np.generic]) -> NDArray[np.generic]:
        values = np.frombuffer(self.memory[tensor], dtype)
        return values.reshape(self.rows, -1)

    def write(self, rows: Sequence[tuple[Sequence[int], int]]) -> None:
        """Fill the inputs: per row its tokens and the length before them."""
        for tensor in (TOKENS, POSITIONS, LENGTHS):
            self.view(tensor, np.int32)[:] = 0
        for row, (tokens, kv_len) in enumerate(rows):
            self.view(TOKENS, np.int32)[row, : len(tokens)] = tokens
            self.view(POSITIONS, np.int32)[row, : len(tokens)] = range(
                kv_len, kv_len + len(tokens)
            )
            self.view(LENGTHS, np.int32)[row, 0] = len(tokens)

    def logits(self, row: int = 0) -> list[int]:
        return [int(bits) for bits in self.view(LOGITS, np.uint16)[row]]

    def digest(self, row: int = 0) -> int:
        return int(self.view(DIGEST, np.uint64)[row, 0])


class Board:
    """One opened board with one configured calbin and its bank."""

    def __init__(self, library: Library, folder: Path, config: str = "") -> None:
        self.library = library
        self.device = c.c_void_p()
        params = npurt.OpenParams(config=config.encode())
        library.call("npurt_device_open", c.byref(params), c.byref(self.device))
        self.calbin, self.bank = c.c_void_p(), c.c_void_p()
        source = npurt.CalbinSource(path=str(folder).encode())
        self.ok("npurt_calbin_create", self.device, c.byref(source), c.byref(self.calbin))
        self.txn = 0
        self.generation = 0
        self.epoch = 1

    def code(self, name: str, *arguments: object) -> int:
        return self.library.attempt(name, *arguments).code

    def ok(self, name: str, *arguments: object) -> None:
        self.library.call(name, *arguments)

    def configure(self) -> "Board":
        result = npurt.ConfigureResult()
        params = npurt.ConfigureParams()
        self.ok("npurt_calbin_configure", self.calbin, c.byref(params), c.byref(result))
        self.generation = result.generation
        params_kv = npurt.KvParams(layout=2)
        self.ok("npurt_kv_open", self.calbin, c.byref(params_kv), c.byref(self.bank))
        return self

    def create_buffer(self, submodel: int, direction: int) -> c.c_void_p:
        buffer = c.c_void_p()
        spec = npurt.BufferSpec(submodel=submodel, direction=direction)
        self.ok("npurt_buffer_create", self.calbin, c.byref(spec), c.byref(buffer))
        return buffer

    def apply(self, *ops: tuple[int, int, int, int], txn: int | None = None) -> tuple[int, int]:
        """Apply (op, lane, from, to) with the lane's number + 1 as its sequence."""
        quoted = self.txn if txn is None else txn
        array = (npurt.KvOp * len(ops))(
            *(
                npurt.KvOp(op=op, lane=lane, from_len=a, to_len=b, seq_tag=lane + 1, txn=quoted)
                for op, lane, a, b in ops
            )
        )
        bad = c.c_uint32(99)
        size = c.sizeof(npurt.KvOp)
        return self.code("npurt_kv_apply", self.bank, array, size, len(ops), c.byref(bad)), bad.value

    def submit(
        self,
        pair: Pair,
        rows: Sequence[tuple[int, int, int]],
        *,
        engine: int = 0,
        epoch: int | None = None,
        generation: int | None = None,
    ) -> tuple[int, int]:
        """Submit (lane, tokens, kv_len) per row; return code and ticket."""
        lanes = (npurt.Lane * len(rows))(
            *(
                npurt.Lane(lane=lane, active=int(n > 0), tokens=n, kv_len=k, seq_tag=lane + 1)
                for lane, n, k in rows
            )
        )
        params = npurt.SubmitParams(
            in_=pair.in_,
            out=pair.out,
            kv=self.bank,
            lanes=lanes,
            lane_count=len(rows),
            lane_stride=c.sizeof(npurt.Lane),
            engine_mode=engine,
            expect_generation=self.generation if generation is None else generation,
            expect_epoch=self.epoch if epoch is None else epoch,
            client_tag=77,
            kv_txn=self.txn,
        )
        ticket = c.c_uint64(99)
        code = self.code("npurt_job_submit", self.device, c.byref(params), c.byref(ticket))
        return code, ticket.value

    def start(self, pair: Pair, rows: Sequence[tuple[int, Sequence[int], int]]) -> int:
        """Reserve and submit (lane, tokens, kv_len) per row; return the ticket."""
        self.txn += 1
        pair.write([(tokens, kv_len) for _, tokens, kv_len in rows])
        ops = [(RESERVE, lane, k, k + len(tokens)) for lane, tokens, k in rows if tokens]
        assert self.apply(*ops) == (Code.OK, 99)
        code, ticket = self.submit(pair, [(lane, len(tokens), k) for lane, tokens, k in rows])
        assert code == Code.OK
        return ticket

    def run(self, pair: Pair, rows: Sequence[tuple[int, Sequence[int], int]]) -> npurt.Completion:
        """Run one job to its end, commit and retire."""
        ticket = self.start(pair, rows)
        self.step(STEP_IDLE)
        result = self.result(ticket)
        assert result.state == DONE
        ops = [(COMMIT, lane, k, k + len(tokens)) for lane, tokens, k in rows if tokens]
        assert self.apply(*ops) == (Code.OK, 99)
        self.ok("npurt_job_retire", self.device, ticket)
        return result

    def step(self, how: int, argument: int = 0) -> int:
        fired = c.c_uint32(0)
        self.ok("npurt_sim_step", self.device, how, argument, c.byref(fired))
        return fired.value

    def state(self, ticket: int) -> int:
        state = npurt.JobState()
        self.ok("npurt_job_poll", self.device, ticket, c.byref(state))
        return int(state.state)

    def result(self, ticket: int) -> npurt.Completion:
        completion = npurt.Completion()
        self.ok("npurt_job_result", self.device, ticket, c.byref(completion))
        return completion

    def lane(self, lane: int) -> npurt.KvLaneInfo:
        told = npurt.KvLaneInfo()
        self.ok("npurt_kv_lane", self.bank, lane, c.byref(told))
        return told

    def counters(self) -> npurt.Counters:
        counters = npurt.Counters()
        self.ok("npurt_device_counters", self.device, c.byref(counters))
        return counters

    def health(self) -> npurt.Health:
        health = npurt.Health()
        self.ok("npurt_device_health", self.device, c.byref(health))
        return health

    def now(self) -> int:
        ns = c.c_uint64(0)
        self.ok("npurt_clock_now", self.device, c.byref(ns))
        return ns.value

    def reset(self, level: int, *, only_code: int = Code.OK) -> npurt.ResetReport:
        report = npurt.ResetReport()
        params = npurt.ResetParams(level=level)
        assert (
            self.code("npurt_reset_run", self.device, c.byref(params), c.byref(report)) == only_code
        )
        assert report.status == only_code
        return report

    def faults(self, plan: str, *, arm: bool = True) -> None:
        self.ok("npurt_sim_faults", self.device, plan.encode())
        if arm:
            self.ok("npurt_sim_arm", self.device)

    def violations(self) -> list[str]:
        events = (npurt.Event * 16)()
        count = c.c_uint32(16)
        size = c.sizeof(npurt.Event)
        self.ok("npurt_sim_violations", self.device, events, size, c.byref(count))
        return [event.text.decode() for event in events[: count.value]]

    def trace(self) -> bytes:
        need = c.c_uint64(0)
        self.ok("npurt_sim_trace", self.device, None, 0, c.byref(need))
        text = c.create_string_buffer(need.value)
        self.ok("npurt_sim_trace", self.device, text, len(text), None)
        return text.value

    def oracle(self, folder: Path, tokens: Sequence[int]) -> tuple[list[int], int]:
        logits, digest = (c.c_uint16 * VOCAB)(), c.c_uint64(0)
        ids = (c.c_int32 * len(tokens))(*tokens)
        self.ok(
            "npurt_sim_oracle", str(folder).encode(), ids, len(tokens), logits, c.byref(digest)
        )
        return list(logits), digest.value

    def close(self) -> None:
        self.code("npurt_device_close", self.device)


OpenBoard = Callable[..., Board]


@pytest.fixture
def open_board(library: Library, calbin: Path) -> Iterator[OpenBoard]:
    opened: list[Board] = []

    def make(config: str = "", *, configured: bool = True) -> Board:
        board = Board(library, calbin, config)
        opened.append(board)
        return board.configure() if configured else board

    yield make
    for board in opened:
        board.close()


@pytest.fixture
def board(open_board: OpenBoard) -> Board:
    return open_board()


# ---- the forward behind it -------------------------------------------------------------------


def test_prefill_then_decode_equals_the_oracle_bit_for_bit(board: Board, calbin: Path) -> None:
    prefill, decode = Pair(board, PREFILL), Pair(board, DECODE)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    board.run(prefill, [(2, tokens[:5], 0)])
    assert (prefill.logits(), prefill.digest()) == board.oracle(calbin, tokens[:5])
    for length in range(5, 8):
        board.run(decode, [(2, tokens[length : length + 1], length)])
        assert (decode.logits(), decode.digest()) == board.oracle(calbin, tokens[: length + 1])
    digest = c.c_uint64(0)
    board.ok("npurt_sim_kv_digest", board.bank, 2, c.byref(digest))
    assert digest.value == board.oracle(calbin, tokens)[1]


def test_a_batch_equals_each_lane_alone_and_inactive_rows_write_nothing(
    board: Board, calbin: Path
) -> None:
    prefill, decode = Pair(board, PREFILL_4), Pair(board, DECODE_4)
    prompts = [[7, 8, 9], [10, 11], [12], [13, 14, 15, 16]]
    board.run(prefill, [(lane, prompt, 0) for lane, prompt in enumerate(prompts)])
    for row, prompt in enumerate(prompts):
        assert prefill.logits(row) == board.oracle(calbin, prompt)[0]
    result = board.run(decode, [(3, [20], 4), (0, [], 0), (1, [21], 2)])
    assert result.lanes_done_mask == 0b101
    assert decode.logits(0) == board.oracle(calbin, [*prompts[3], 20])[0]
    assert decode.logits(2) == board.oracle(calbin, [*prompts[1], 21])[0]
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


def test_a_poked_kv_row_changes_the_next_logits(board: Board, calbin: Path) -> None:
    prefill, decode = Pair(board, PREFILL), Pair(board, DECODE)
    board.run(prefill, [(1, [3, 1, 4], 0)])
    chip, address, size = c.c_uint32(9), c.c_uint64(0), c.c_uint64(0)
    board.ok(
        "npurt_sim_kv_address", board.bank, 1, c.byref(chip), c.byref(address), c.byref(size)
    )
    assert (chip.value, size.value) == (0, 4 * CONTEXT * 2 * 2 * 16 * 4)
    key = np.zeros(1, np.float32)
    peek = board.code("npurt_sim_peek", board.device, 0, address.value, key.ctypes.data, 4)
    assert peek == Code.OK and key[0] != 0
    key += 8
    board.ok("npurt_sim_poke", board.device, 0, address.value, key.ctypes.data, 4)
    board.run(decode, [(1, [15], 3)])
    assert decode.logits() != board.oracle(calbin, [3, 1, 4, 15])[0]


def test_null_profile_answers_from_token_and_position_only(open_board: OpenBoard) -> None:
    board = open_board("profile = null")
    decode = Pair(board, DECODE)
    answers = []
    for lane in (0, 1):
        answers.append([board.run(decode, [(lane, [5], n)]) and decode.logits() for n in range(3)])
    assert answers[0] == answers[1]
    assert len({tuple(logits) for logits in answers[0]}) == 3
    assert all(sum(bits != 0 for bits in logits) == 1 for logits in answers[0])


# ---- states, ownership ------------------------------------------------------------------------


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


def test_inputs_are_taken_in_the_h2d_phase_not_at_submit(board: Board, calbin: Path) -> None:
    pair = Pair(board, PREFILL)
    ticket = board.start(pair, [(0, [1, 2], 0)])
    pair.view(TOKENS, np.int32)[0, 1] = 40
    board.step(STEP_TICKET, ticket | EXEC << 56)
    pair.view(TOKENS, np.int32)[0, 0] = 41
    board.step(STEP_IDLE)
    assert pair.logits() == board.oracle(calbin, [1, 40])[0]


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


def test_a_slice_moves_only_its_part(board: Board, calbin: Path) -> None:
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
    assert pair.logits() == board.oracle(calbin, [5, 6, 7])[0]
    assert board.counters().h2d_bytes == 3 * 4 * 2 + 4
    assert board.code("npurt_buffer_slice", pair.out, LOGITS, 2, 0, 8) == Code.OBJECT_IN_FLIGHT
    board.ok("npurt_job_retire", board.device, ticket)
    assert board.code("npurt_buffer_slice", pair.out, LOGITS, 2, 0, 8) == Code.UNSUPPORTED


# ---- submit, queue, wait ------------------------------------------------------------------------


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


def test_two_jobs_are_taken_and_a_third_is_refused(board: Board) -> None:
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


def wait(board: Board, tickets: Sequence[int], timeout_ns: int) -> tuple[int, int]:
    which = c.c_uint32(99)
    array = (c.c_uint64 * len(tickets))(*tickets)
    code = board.code(
        "npurt_job_wait", board.device, array, len(tickets), timeout_ns, c.byref(which)
    )
    return code, which.value


def test_wait_polls_and_names_a_terminal_ticket(board: Board) -> None:
    slow, quick = Pair(board, DECODE), Pair(board, DECODE)
    tickets = [board.start(slow, [(0, [1], 0)]), board.start(quick, [(1, [1], 0)])]
    assert wait(board, tickets, 0) == (Code.WAIT_TIMEOUT, 99)
    board.ok("npurt_job_cancel", board.device, tickets[1])
    assert wait(board, tickets, 0) == (Code.OK, 1)
    assert wait(board, [tickets[0], 1 << 60], 0)[0] == Code.STALE_TICKET


@pytest.mark.parametrize("waker", ["step", "time", "reset", "close"])
def test_a_blocked_wait_is_woken(open_board: OpenBoard, waker: str) -> None:
    board = open_board()
    ticket = board.start(Pair(board, DECODE), [(0, [1], 0)])
    answers: list[tuple[int, int]] = []
    timeout = 500 if waker == "time" else FOREVER
    thread = threading.Thread(target=lambda: answers.append(wait(board, [ticket], timeout)))
    thread.start()
    if waker == "step":
        board.step(STEP_IDLE)
    elif waker == "reset":
        board.reset(1)
    elif waker == "time":
        while thread.is_alive():  # the thread's own start may come after a step: go on in time
            board.step(STEP_TIME, board.now() + 600 if board.state(ticket) < H2D else board.now())
            if board.state(ticket) >= H2D:
                break
    else:
        board.close()
    thread.join(timeout=30)
    expected = {"step": Code.OK, "reset": Code.OK, "close": Code.BAD_HANDLE}
    if waker == "time":
        board.step(STEP_TIME, board.now() + 600)
        board.close()
        thread.join(timeout=30)
        assert answers[0][0] in (Code.WAIT_TIMEOUT, Code.OK)
    else:
        assert answers[0][0] == expected[waker]
    assert not thread.is_alive()


def test_the_real_clock_runs_by_itself(open_board: OpenBoard, calbin: Path) -> None:
    board = open_board("clock = real\nscale = 1000")
    pairs = [Pair(board, DECODE), Pair(board, DECODE)]
    for length in range(4):
        tickets = [board.start(pair, [(lane, [9], length)]) for lane, pair in enumerate(pairs)]
        for ticket in tickets:
            assert wait(board, [ticket], FOREVER) == (Code.OK, 0)
            stamps = board.result(ticket).times
            assert stamps.exec_end >= stamps.exec_begin + 1000
        ops = [(COMMIT, lane, length, length + 1) for lane in (0, 1)]
        assert board.apply(ops[1]) == (Code.OK, 99)
        assert board.apply(ops[0], txn=board.txn - 1) == (Code.OK, 99)
        for ticket in tickets:
            board.ok("npurt_job_retire", board.device, ticket)
    assert pairs[0].logits() == pairs[1].logits() == board.oracle(calbin, [9] * 4)[0]
    assert board.code("npurt_sim_step", board.device, STEP_ONE, 0, None) == Code.BAD_STATE


# ---- KV -------------------------------------------------------------------------------------------


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


# ---- faults -----------------------------------------------------------------------------------------


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
def test_a_hang_makes_no_progress_and_blocks_the_next_job(board: Board, phase: str) -> None:
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


# ---- resets -------------------------------------------------------------------------------------------


def test_each_reset_level_does_what_it_claims(board: Board) -> None:
    pair = Pair(board, DECODE)
    used = board.reset(1).mem_before[0]
    assert used > 0
    for lane in range(LANES):
        assert board.apply((RELEASE, lane, 0, 0), txn=1)[0] == Code.INVALID_ARG or True
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


def test_a_lost_calbin_is_configured_again_as_a_new_generation(
    board: Board, calbin: Path
) -> None:
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
    assert fresh.logits() == board.oracle(calbin, [5])[0]


# ---- device: configuration, sizes, memory, events ------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ("profile = huge", "line 1: profile does not take the value 'huge'"),
        ("seed = 1\nspeed = 2", "line 2: unknown key 'speed'"),
        ("seed = 1\nseed = 2", "line 2: key 'seed' a second time"),
        ("seed", 'line 1: not "key = value"'),
        ("seed = -1", "seed does not take"),
        ("scale = 2", "scale belongs to clock = real"),
        ("strict = yes", "strict does not take"),
        ("driver_version = 1..2", "driver_version does not take"),
    ],
)
def test_a_wrong_configuration_is_refused(library: Library, config: str, complaint: str) -> None:
    device = c.c_void_p()
    params = npurt.OpenParams(config=config.encode())
    answer = library.attempt("npurt_device_open", c.byref(params), c.byref(device))
    assert answer.code == Code.INVALID_ARG
    assert complaint in answer.words
    assert not device.value


def test_struct_size_smaller_is_refused_and_larger_is_not_touched_beyond(board: Board) -> None:
    size = c.sizeof(npurt.Health)
    raw = (c.c_uint8 * (size + 64))(*([0xAB] * (size + 64)))
    health = npurt.Health.from_buffer(raw)
    for offered, code in ((size - 1, Code.STRUCT_SIZE), (0, Code.STRUCT_SIZE)):
        health.h.struct_size = offered
        before = bytes(raw)
        pointer = c.cast(raw, c.POINTER(npurt.Health))
        assert board.code("npurt_device_health", board.device, pointer) == code
        assert bytes(raw) == before
    health.h.struct_size = size + 64
    assert board.code("npurt_device_health", board.device, c.byref(health)) == Code.OK
    assert health.h.struct_size == size
    assert bytes(raw[size:]) == b"\xab" * 64


def test_arrays_keep_to_the_callers_stride(board: Board) -> None:
    class Wide(c.Structure):
        _fields_ = [("cap", npurt.Cap), ("more", c.c_uint8 * 24)]

    count = c.c_uint32(0)
    board.ok("npurt_device_caps", board.device, None, 0, c.byref(count))
    assert count.value == len(npurt.CAPABILITIES)
    wide = (Wide * 5)()
    c.memset(wide, 0xCD, c.sizeof(wide))
    count.value = 4
    pointer = c.cast(wide, c.POINTER(npurt.Cap))
    board.ok("npurt_device_caps", board.device, pointer, c.sizeof(Wide), c.byref(count))
    assert [entry.cap.id for entry in wide[:4]] == [1, 2, 3, 4]
    assert {(entry.cap.evidence, entry.cap.source) for entry in wide[:4]} == {(9, 6)}
    assert all(bytes(entry.more) == b"\xcd" * 24 for entry in wide)
    assert bytes(wide[4]) == b"\xcd" * c.sizeof(Wide)
    count.value = 4
    narrow = board.code("npurt_device_caps", board.device, pointer, 100, c.byref(count))
    assert narrow == Code.STRUCT_SIZE


def memory(board: Board, chip: int) -> npurt.Memory:
    told = npurt.Memory()
    board.ok("npurt_device_memory", board.device, chip, c.byref(told))
    return told


def test_the_reference_profile_has_the_reference_memory_and_times(open_board: OpenBoard) -> None:
    board = open_board("profile = tp2-ref")
    gib = 1 << 30
    for chip in (0, 1):
        told = memory(board, chip)
        assert (told.total, told.kv) == (16 * gib, 1.875 * gib)
        assert told.params == pytest.approx(8.469 * gib, abs=1)
        assert told.workspace == pytest.approx(3.731 * gib, abs=1)
        assert told.used == told.params + told.kv + told.workspace + told.dynamic
    times = board.run(Pair(board, DECODE), [(0, [1], 0)]).times
    # 5.4 ms at 2,048 tokens of context, 48 layers x 4.19 MB of KV halved at 200 GB/s of it.
    assert times.exec_end - times.exec_begin == pytest.approx(5.43e6 - 0.503e6, rel=0.01)
    assert times.d2d_bytes == 48 * 2 * 2048 * 2
    assert times.d2h_end - times.d2h_begin == pytest.approx(0.05e6, rel=0.01)


def test_memory_is_taken_by_configure_and_given_back_by_release(open_board: OpenBoard) -> None:
    board = open_board(configured=False)
    assert memory(board, 0).used == 0
    board.configure()
    assert memory(board, 0).kv == LANES * CONTEXT * 256
    board.ok("npurt_kv_close", board.bank)
    board.ok("npurt_calbin_release", board.calbin)
    assert [memory(board, chip).used for chip in (0, 1)] == [0, 0]
    told = npurt.Memory()
    assert board.code("npurt_device_memory", board.device, 2, c.byref(told)) == Code.NOT_FOUND


def test_a_calbin_that_does_not_fit_or_match_is_refused(library: Library, calbin: Path) -> None:
    cases = {
        "dram_bytes = 1000000": Code.CALBIN_TOO_LARGE,
        "firmware_version = 0.0.9": Code.CALBIN_INCOMPATIBLE,
    }
    for config, code in cases.items():
        device, handle = c.c_void_p(), c.c_void_p()
        params = npurt.OpenParams(config=config.encode())
        library.call("npurt_device_open", c.byref(params), c.byref(device))
        source = npurt.CalbinSource(path=str(calbin).encode())
        answer = library.attempt("npurt_calbin_create", device, c.byref(source), c.byref(handle))
        assert (answer.code, handle.value) == (code, None)
        source.expect_sha256 = b"0" * 64
        answer = library.attempt("npurt_calbin_create", device, c.byref(source), c.byref(handle))
        assert answer.code == Code.CALBIN_HASH
        library.call("npurt_device_close", device)


def test_a_full_event_ring_says_how_many_were_lost(board: Board) -> None:
    board.txn = 1
    for _ in range(300):
        assert board.apply((RESERVE, 0, 0, 1), (COMMIT, 0, 0, 1))[0] == Code.OK
        assert board.apply((RELEASE, 0, 0, 0))[0] == Code.OK
    event = npurt.Event()
    board.ok("npurt_device_event", board.device, c.byref(event))
    assert (event.dropped, event.seq) == (45, 46)  # 301 with that of configure, 256 kept
    seen = 1
    while board.code("npurt_device_event", board.device, c.byref(event)) == Code.OK:
        seen += 1
        assert event.dropped == 0
    assert (seen, event.seq) == (256, 301)
