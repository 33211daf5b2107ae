"""Batches on the simulated board: inactive rows, rows fixed to lanes, continued prefills.

Source: npurt.h (lane rules, flags of a submodel), npurt_sim.h (lane rules), E13, E15.
"""

import ctypes as c
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.native_board import (
    CONTEXT,
    DECODE,
    DECODE_4,
    DONE,
    LANES,
    LENGTHS,
    PREFILL,
    PREFILL_4,
    RESERVE,
    ROLLBACK,
    ROOT,
    STEP_IDLE,
    VOCAB,
    Bench,
    Board,
    OpenBoard,
    Pair,
    vary,
)

from laneway.adapters import npurt
from laneway.adapters.calbin import pack
from laneway.adapters.npurt import Code


@pytest.fixture
def changed(bench: Bench, tmp_path: Path) -> Iterator[OpenBoard]:
    """Open boards with the calbin's manifest changed."""
    opened: list[Board] = []

    def make(config: str = "", **changes: object) -> Board:
        folder = tmp_path / f"{len(opened)}"
        folder.mkdir()
        board = Board(bench.library, vary(bench, folder, **changes).calbin, config).configure()
        opened.append(board)
        return board

    yield make
    for board in opened:
        board.close()


def reserve(board: Board, *lanes: int) -> None:
    board.txn += 1
    assert board.apply(*((RESERVE, lane, 0, 1) for lane in lanes)) == (Code.OK, 99)


def kv_bytes(board: Board) -> bytes:
    """All KV of the bank, with what lies behind its last lane if there is anything."""
    chip, address, size = c.c_uint32(0), c.c_uint64(0), c.c_uint64(0)
    board.ok("npurt_sim_kv_address", board.bank, 0, c.byref(chip), c.byref(address), c.byref(size))
    assert size.value % 4096 == 0, "lanes lie one behind the other"
    taken = b""
    piece = c.create_string_buffer(size.value)
    for lane in range(LANES + 1):
        place = (board.device, chip.value, address.value + lane * size.value)
        if board.code("npurt_sim_peek", *place, piece, size.value) != Code.OK:
            break
        taken += piece.raw
    return taken


# ---- inactive rows


@pytest.mark.parametrize("rule", ["length_zero", "mask_csr", "scratch_lane"])
def test_an_inactive_row_writes_no_lane_and_its_logits_are_zero(
    changed: OpenBoard, bench: Bench, rule: str
) -> None:
    board = changed(lane_rule=rule)
    pair = Pair(board, DECODE_4)
    lane_bytes = 4 * CONTEXT * 2 * 2 * 16 * 4
    assert kv_bytes(board)[: LANES * lane_bytes] == bytes(LANES * lane_bytes)
    reserve(board, 5, 2)
    pair.write([([7], 0), ([], 0), ([8], 0)])
    pair.view(LENGTHS, np.int32)[1, 0] = 1 if rule == "mask_csr" else 0  # masked out all the same
    mask = [(0, 0, 1), (0, 1, 0)] if rule == "mask_csr" else []
    code, ticket = board.submit(pair, [(5, 1, 0), (0, 0, 0), (2, 1, 0)], registers=mask)
    assert code == Code.OK
    board.step(STEP_IDLE)
    assert (board.result(ticket).state, board.result(ticket).lanes_done_mask) == (DONE, 0b101)
    assert pair.logits(0) == board.oracle(bench.calbin, [7])[0]
    assert pair.logits(2) == board.oracle(bench.calbin, [8])[0]
    assert pair.logits(1) == pair.logits(3) == [0] * VOCAB
    found = kv_bytes(board)
    written = {
        lane
        for lane in range(len(found) // lane_bytes)
        if any(found[lane * lane_bytes : (lane + 1) * lane_bytes])
    }
    assert written == ({2, 5, LANES} if rule == "scratch_lane" else {2, 5})


@pytest.mark.parametrize(
    "rows", [[(0, 1, 0)], [(0, 1, 0), (1, 1, 0), (2, 1, 0), (3, 0, 0)], [(0, 0, 0), (1, 1, 0)]]
)
def test_without_a_rule_a_batch_is_full_or_refused(
    changed: OpenBoard, rows: list[tuple[int, int, int]]
) -> None:
    board = changed(lane_rule="undefined")
    pair = Pair(board, DECODE_4)
    reserve(board, 0, 1, 2, 3)
    pair.write([([1] * n, 0) for _, n, _ in rows])
    assert board.submit(pair, rows) == (Code.LANE_RULE, 0)
    assert board.counters().submitted == 0
    pair.write([([1], 0)] * 4)
    assert board.submit(pair, [(lane, 1, 0) for lane in range(4)])[0] == Code.OK


def test_a_mask_that_contradicts_the_job_is_refused(changed: OpenBoard) -> None:
    board = changed(lane_rule="mask_csr")
    pair = Pair(board, DECODE_4)
    reserve(board, 0)
    pair.write([([], 0), ([1], 0)])
    rows = [(3, 0, 0), (0, 1, 0)]
    masks: dict[tuple[tuple[int, int, int], ...], Code] = {
        (): Code.LANE_RULE,  # a register that is not given has its default: active
        ((0, 0, 0), (0, 1, 0)): Code.LANE_RULE,
        ((0, 0, 1), (0, 1, 1)): Code.LANE_RULE,
        ((0, 0, 2),): Code.INVALID_ARG,
        ((0, 2, 0),): Code.INVALID_ARG,
        ((1, 0, 0),): Code.NOT_FOUND,
    }
    for mask, code in masks.items():
        assert board.submit(pair, rows, registers=mask) == (code, 0), mask
    assert board.submit(pair, rows, registers=[(0, 0, 0)])[0] == Code.OK
    plain = changed()
    reserve(plain, 0)
    other = Pair(plain, DECODE)
    other.write([([1], 0)])
    assert plain.submit(other, [(0, 1, 0)], registers=[(0, 0, 1)]) == (Code.NOT_FOUND, 0)


def test_the_register_of_a_mask_is_described(changed: OpenBoard) -> None:
    board = changed(lane_rule="mask_csr")
    info, csr = npurt.SubmodelInfo(), npurt.CsrInfo()
    board.ok("npurt_calbin_submodel", board.calbin, DECODE_4, c.byref(info))
    assert (info.lane_rule, info.csr_count) == (2, 1)
    board.ok("npurt_calbin_csr", board.calbin, DECODE_4, 0, c.byref(csr))
    assert (csr.id, csr.per_lane, csr.required, csr.name) == (0, 1, 1, b"row_active")
    assert (csr.min, csr.max, getattr(csr, "def")) == (0, 1, 1)
    gone = board.code("npurt_calbin_csr", board.calbin, DECODE_4, 1, c.byref(csr))
    assert gone == Code.NOT_FOUND
    none = changed()
    gone = none.code("npurt_calbin_csr", none.calbin, DECODE_4, 0, c.byref(csr))
    assert gone == Code.NOT_FOUND


# ---- rows fixed to lanes


def test_rows_that_are_fixed_to_lanes_take_no_other(changed: OpenBoard, bench: Bench) -> None:
    board = changed(fixed_rows=True)
    info = npurt.SubmodelInfo()
    board.ok("npurt_calbin_submodel", board.calbin, DECODE_4, c.byref(info))
    assert info.h.flags & npurt.SUBMODEL_FIXED_ROWS
    pair = Pair(board, DECODE_4)
    reserve(board, *range(LANES))
    pair.write([([1], 0), ([2], 0)])
    for lanes in ((1, 0), (0, 5), (2, 3), (1, 2), (0, 2)):
        rows = [(lane, 1, 0) for lane in lanes]
        assert board.submit(pair, rows) == (Code.LANE_RULE, 0), lanes
    pair.write([([], 0), ([9], 0), ([], 0), ([8], 0)])
    code, ticket = board.submit(pair, [(0, 0, 0), (5, 1, 0), (0, 0, 0), (7, 1, 0)])
    assert code == Code.OK
    board.step(STEP_IDLE)
    assert board.result(ticket).state == DONE
    assert pair.logits(3) == board.oracle(bench.calbin, [8])[0]
    single = Pair(board, DECODE)
    single.write([([3], 0)])
    assert board.submit(single, [(6, 1, 0)])[0] == Code.OK, "a batch of one has any lane"
    assert not changed().trace().count(b"fixed")


def test_rows_are_free_unless_the_manifest_says_otherwise(changed: OpenBoard) -> None:
    board = changed(fixed_rows=False)
    pair = Pair(board, DECODE_4)
    reserve(board, 6, 1)
    pair.write([([1], 0), ([2], 0)])
    assert board.submit(pair, [(6, 1, 0), (1, 1, 0)])[0] == Code.OK


# ---- continued prefills


def test_a_prefill_in_parts_equals_one_prefill_in_bits(board: Board, bench: Bench) -> None:
    one, four = Pair(board, PREFILL), Pair(board, PREFILL_4)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    for first, last in ((0, 4), (4, 5), (5, 11)):
        board.run(one, [(2, tokens[first:last], first)])
    assert (one.logits(), one.digest()) == board.oracle(bench.calbin, tokens)
    board.run(four, [(0, tokens[:6], 0), (3, tokens[:2], 0)])
    board.run(four, [(3, tokens[2:], 2), (0, tokens[6:], 6)])
    for row in (0, 1):
        assert (four.logits(row), four.digest(row)) == board.oracle(bench.calbin, tokens)


def test_a_submodel_that_cannot_continue_a_prefill_says_so(
    changed: OpenBoard, bench: Bench
) -> None:
    submodels = json.loads((bench.calbin / "manifest.json").read_text())["submodels"]
    whole = [{**submodel, "incremental_prefill": False} for submodel in submodels]
    board = changed(submodels=whole)
    info = npurt.SubmodelInfo()
    board.ok("npurt_calbin_submodel", board.calbin, PREFILL, c.byref(info))
    assert info.h.flags & npurt.SUBMODEL_INCREMENTAL_PREFILL == 0
    pair = Pair(board, PREFILL)
    board.run(pair, [(0, [1, 2], 0)])
    board.txn += 1
    pair.write([([3], 2)])
    assert board.apply((RESERVE, 0, 2, 3)) == (Code.OK, 99)
    assert board.submit(pair, [(0, 1, 2)]) == (Code.UNSUPPORTED, 0)
    assert board.apply((ROLLBACK, 0, 2, 3)) == (Code.OK, 99)
    board.run(Pair(board, DECODE), [(0, [3], 2)])


# ---- large batches and their profiles


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "calbin"
    pack(ROOT / "models" / "tiny-moe", folder, batch=(1, 4, 8, 16), context=CONTEXT, lanes=32)
    return folder


def code_of_create(bench: Bench, calbin: Path, config: str) -> int:
    device, handle = c.c_void_p(), c.c_void_p()
    params = npurt.OpenParams(config=config.encode())
    bench.library.call("npurt_device_open", c.byref(params), c.byref(device))
    source = npurt.CalbinSource(path=str(calbin).encode())
    answer = bench.library.attempt("npurt_calbin_create", device, c.byref(source), c.byref(handle))
    bench.library.call("npurt_device_close", device)
    return answer.code


def test_a_profile_for_a_batch_refuses_what_it_has_no_memory_for(
    bench: Bench, large: Path, tmp_path: Path
) -> None:
    """40,960 tokens of KV: 8 lanes of 5,120, 16 of 2,560 or 32 of 1,280."""
    refused = Code.CALBIN_INCOMPATIBLE
    batches = {"tp2-b4": refused, "tp2-b8": refused, "tp2-b16": Code.OK, "tp2-ref": Code.OK}
    for profile, code in batches.items():
        assert code_of_create(bench, large, f"profile = {profile}") == code, profile
    assert code_of_create(bench, bench.calbin, "profile = tp2-b4") == Code.OK
    for lanes, code in ((16, Code.OK), (17, refused)):
        folder = tmp_path / str(lanes)
        pack(ROOT / "models" / "tiny-moe", folder, batch=(8,), context=CONTEXT, lanes=lanes)
        assert code_of_create(bench, folder, "profile = tp2-b8") == code


@pytest.mark.parametrize(
    ("profile", "largest"),
    [("tp2-b4", 4), ("tp2-b8", 8), ("tp2-b16", 16), ("tp2-ref", 64), ("tiny", 64)],
)
def test_the_largest_batch_is_told(open_board: OpenBoard, profile: str, largest: int) -> None:
    board = open_board(f"profile = {profile}", configured=False)
    caps = (npurt.Cap * 14)()
    board.ok("npurt_device_caps", board.device, caps, c.sizeof(npurt.Cap), c.byref(c.c_uint32(14)))
    assert (caps[13].id, caps[13].value) == (14, largest)


def test_a_batch_of_sixteen_costs_what_the_simple_model_says(bench: Bench, large: Path) -> None:
    """base + rows x each + context x per token; sixteen rows are right in bits."""
    config = "profile = cost\nh2d = 1us\nd2h = 1us\ndecode = 8ms/500us/10us\nprefill = 1ms/20us/3us"
    board = Board(bench.library, large, config).configure()
    batch, prefill = Pair(board, 7, rows=16, width=1), Pair(board, 0, rows=1, width=CONTEXT)

    def took(result: npurt.Completion) -> int:
        return int(result.times.exec_end - result.times.exec_begin)

    told = board.run(prefill, [(0, [1, 2, 3, 4, 5], 0)])
    assert took(told) == 1_000_000 + 5 * 20_000 + 25 * 3_000
    rows = [(0, [6], 5), *((lane, [lane], 0) for lane in range(1, 16))]
    told = board.run(batch, rows)
    assert took(told) == 8_000_000 + 16 * 500_000 + (6 + 15) * 10_000
    assert batch.logits(0) == board.oracle(large, [1, 2, 3, 4, 5, 6])[0]
    for row in range(1, 16):
        assert batch.logits(row) == board.oracle(large, [row])[0]
    board.close()
