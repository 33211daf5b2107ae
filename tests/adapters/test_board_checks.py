"""The simulated board watches the host's memory in flight: each mistake is planted and found.

Source: npurt.h (ownership of memory), npurt_sim.h (violations, key checks), E1, E3, E4, R2.7.
"""

import ctypes as c
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.native_board import (
    D2H,
    DECODE,
    DECODE_4,
    DIGEST,
    DONE,
    EXEC,
    LENGTHS,
    LOGITS,
    POSITIONS,
    PREFILL,
    RESERVE,
    STEP_IDLE,
    STEP_TICKET,
    TOKENS,
    Bench,
    Board,
    OpenBoard,
    Pair,
)

from laneway.adapters import npurt
from laneway.adapters.npurt import Code


def kinds(board: Board) -> list[str]:
    return [text.partition(" ")[0] for text in board.violations()]


# ---- what is right is not blamed


def test_a_host_that_keeps_the_rules_is_blamed_for_nothing(board: Board, bench: Bench) -> None:
    prefill, decode = Pair(board, PREFILL), Pair(board, DECODE)
    board.run(prefill, [(0, [5, 6, 7, 8], 0)])
    board.run(decode, [(0, [9], 4)])
    board.run(decode, [(0, [3], 5)])
    assert decode.logits() == board.oracle(bench.calbin, [5, 6, 7, 8, 9, 3])[0]
    board.run(prefill, [(1, [4, 2], 0)])
    assert prefill.logits() == board.oracle(bench.calbin, [4, 2])[0]
    ticket = board.start(prefill, [(2, [1], 0)])
    board.step(STEP_TICKET, ticket | EXEC << 56)
    prefill.view(TOKENS, np.int32)[0, 0] = 40  # too early by the contract, but already taken
    board.step(STEP_IDLE)
    assert board.violations() == []


@pytest.mark.parametrize(
    ("config", "seen"),
    [
        ("", True),
        ("checks = all", True),
        ("checks = output+input", True),
        ("checks = input", False),
        ("checks = none", False),
        ("profile = null", False),
        ("profile = null\nchecks = output", True),
    ],
)
def test_outputs_are_tagged_only_where_it_is_asked_for(
    open_board: OpenBoard, config: str, seen: bool
) -> None:
    board = open_board(config)
    pair = Pair(board, DECODE)
    board.start(pair, [(0, [1], 0)])
    assert any(pair.logits()) == seen
    pair.view(LOGITS, np.uint16)[0, 7] = 1
    board.step(STEP_IDLE)
    assert ("OUTPUT_TOUCHED" in kinds(board)) == seen


@pytest.mark.parametrize("value", ["", "inputs", "input+input", "input+", "+input", "all+input"])
def test_a_wrong_list_of_checks_is_refused(bench: Bench, value: str) -> None:
    device = c.c_void_p()
    params = npurt.OpenParams(config=f"checks = {value}".encode())
    answer = bench.library.attempt("npurt_device_open", c.byref(params), c.byref(device))
    assert (answer.code, device.value) == (Code.INVALID_ARG, None)
    assert "line 1: checks does not take the value" in answer.words


# ---- ranges in flight


def test_two_buffers_over_one_memory_cannot_be_in_flight_at_once(board: Board) -> None:
    first, second = Pair(board, DECODE), Pair(board, DECODE)
    assert second.map(LOGITS, address=first.address(LOGITS)) == Code.OK  # both idle
    ticket = board.start(first, [(0, [1], 0)])
    board.txn += 1
    second.write([([1], 0)])
    assert board.apply((RESERVE, 1, 0, 1))[0] == Code.OK
    assert board.submit(second, [(1, 1, 0)]) == (Code.RANGE_OVERLAP, 0)
    ((blamed, text),) = board.blames()
    assert (blamed, text.split()[:3]) == (ticket, ["RANGE_OVERLAP", "tensor", "logits:"])


# ---- inputs


@pytest.mark.parametrize(
    ("tensor", "name"), [(TOKENS, "tokens"), (POSITIONS, "positions"), (LENGTHS, "lengths")]
)
def test_writing_to_an_input_in_flight_is_found(board: Board, tensor: int, name: str) -> None:
    pair = Pair(board, PREFILL)
    ticket = board.start(pair, [(0, [1, 2], 0)])
    pair.view(tensor, np.int32)[0, 0] += 1
    board.step(STEP_IDLE)
    ((blamed, text),) = board.blames()
    assert blamed == ticket
    assert text.startswith(f"INPUT_TOUCHED tensor {name} from byte 0:")
    assert any(kind == 9 and about == ticket for kind, about, _ in board.events())


def test_a_write_that_is_taken_back_is_not_found(board: Board) -> None:
    """The known limit of comparing two moments."""
    pair = Pair(board, DECODE)
    board.start(pair, [(0, [1], 0)])
    pair.view(TOKENS, np.int32)[0, 0] = 9
    pair.view(TOKENS, np.int32)[0, 0] = 1
    board.step(STEP_IDLE)
    assert board.violations() == []


def test_only_the_sliced_part_of_an_input_counts(board: Board) -> None:
    pair = Pair(board, PREFILL)
    pair.write([([9, 9, 5], 0)])
    pair.view(POSITIONS, np.int32)[0, 2] = 0
    pair.view(LENGTHS, np.int32)[0, 0] = 1
    for tensor in (TOKENS, POSITIONS):
        board.ok("npurt_buffer_slice", pair.in_, tensor, 1, 2, 1)
    board.txn = 1
    assert board.apply((RESERVE, 0, 0, 1))[0] == Code.OK
    assert board.submit(pair, [(0, 1, 0)])[0] == Code.OK
    pair.view(TOKENS, np.int32)[0, :2] = 11
    board.step(STEP_IDLE)
    assert board.violations() == []


# ---- outputs


def test_who_reads_an_output_early_reads_undefined_numbers(board: Board, bench: Bench) -> None:
    first, second = Pair(board, DECODE), Pair(board, DECODE)
    tickets = [board.start(first, [(0, [1], 0)]), board.start(second, [(1, [1], 0)])]
    early = [pair.view(LOGITS, np.uint16)[0].copy() for pair in (first, second)]
    for bits in early:
        assert (bits & 0x7F80 == 0x7F80).all() and (bits & 0x7F != 0).all(), "not a number, each"
    assert (early[0] != early[1]).any(), "each ticket has a tag of its own"
    board.step(STEP_TICKET, tickets[0] | D2H << 56)
    assert (first.view(LOGITS, np.uint16)[0] == early[0]).all()
    board.step(STEP_IDLE)
    expected, digest = board.oracle(bench.calbin, [1])
    assert (first.logits(), first.digest()) == (second.logits(), second.digest())
    assert (first.logits(), first.digest()) == (expected, digest)
    assert board.violations() == []


@pytest.mark.parametrize(("tensor", "name"), [(LOGITS, "logits"), (DIGEST, "kv_digest")])
def test_writing_to_an_output_in_flight_is_found(
    board: Board, bench: Bench, tensor: int, name: str
) -> None:
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [1], 0)])
    board.step(STEP_TICKET, ticket | EXEC << 56)
    pair.view(tensor, np.uint8)[0, -1] ^= 1
    board.step(STEP_IDLE)
    ((blamed, text),) = board.blames()
    assert blamed == ticket
    assert text.startswith(f"OUTPUT_TOUCHED tensor {name} ")
    assert (pair.logits(), pair.digest()) == board.oracle(bench.calbin, [1])


def test_wiping_while_the_device_works_is_found(board: Board) -> None:
    """What an engine does that gives a buffer back without waiting for its job (R2.7)."""
    pair = Pair(board, DECODE)
    board.start(pair, [(0, [1], 0)])
    for tensor in pair.memory:
        pair.view(tensor, np.uint8)[:] = 0
    board.step(STEP_IDLE)
    assert kinds(board).count("INPUT_TOUCHED") == 2  # tokens and lengths; position 0 was 0
    board.step(STEP_IDLE)
    assert "OUTPUT_TOUCHED" not in kinds(board), "the job failed before it had an output"


def test_what_is_left_of_the_tag_in_a_valid_output_is_found(board: Board) -> None:
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [1], 0)])
    tag = pair.view(LOGITS, np.uint64)[0, 0].copy()
    board.step(STEP_IDLE)
    assert (pair.view(LOGITS, np.uint64) != tag).all()
    pair.view(LOGITS, np.uint64)[0, 3] = tag
    board.ok("npurt_job_retire", board.device, ticket)
    ((blamed, text),) = board.blames()
    assert (blamed, text.split()[:3]) == (ticket, ["TAG_LEFT", "tensor", "logits:"])


# ---- reuse


@pytest.mark.parametrize(
    ("told_in", "told_out", "blamed"),
    [
        (3, 3, []),
        (7, 3, []),
        (0, 0, ["input", "output"]),
        (3, 0, ["output"]),
        (1, 3, ["input"]),
        (3, 2, ["output"]),
    ],
)
def test_a_buffer_used_again_without_restore_is_found(
    board: Board, told_in: int, told_out: int, blamed: list[str]
) -> None:
    pair = Pair(board, DECODE)
    ticket = board.start(pair, [(0, [1], 0)])
    board.step(STEP_IDLE)
    board.ok("npurt_job_retire", board.device, ticket)
    for buffer, told in ((pair.in_, told_in), (pair.out, told_out)):
        if told:
            board.ok("npurt_buffer_restore", buffer, told)
    for tensor in (TOKENS, POSITIONS, LENGTHS):
        assert pair.map(tensor) == Code.OK  # where restore has dropped the maps
    again = board.start(pair, [(1, [2], 0)])
    assert board.violations() == [
        f"NOT_RESTORED {which} buffer: not restored since its latest job was retired"
        for which in blamed
    ]
    assert [ticket for ticket, _ in board.blames()] == [again] * len(blamed)
    board.step(STEP_IDLE)
    assert board.state(again) == DONE


def test_tokens_of_the_job_before_are_found(board: Board) -> None:
    pair = Pair(board, PREFILL)
    board.run(pair, [(0, [5, 6, 7, 8], 0)])
    for lane, tokens in ((1, [4, 2]), (2, [5, 6, 7])):
        pair.view(TOKENS, np.int32)[0, : len(tokens)] = tokens  # the rest is as it was
        pair.view(POSITIONS, np.int32)[0, : len(tokens)] = range(len(tokens))
        pair.view(LENGTHS, np.int32)[0, 0] = len(tokens)
        board.txn += 1
        assert board.apply((RESERVE, lane, 0, len(tokens)))[0] == Code.OK
        code, ticket = board.submit(pair, [(lane, len(tokens), 0)])
        assert code == Code.OK
        board.step(STEP_IDLE)
        board.retire(pair, ticket)
    # The second time nothing of the job before is left: what lies there is older, and was said.
    assert board.violations() == [
        "INPUT_NOT_WIPED tensor tokens row 0: tokens of the buffer's latest job"
    ]


def test_tokens_left_in_an_inactive_row_are_found(board: Board) -> None:
    pair = Pair(board, DECODE_4)
    board.run(pair, [(0, [1], 0), (1, [2], 0), (2, [3], 0), (3, [4], 0)])
    left = pair.view(TOKENS, np.int32).copy()
    pair.write([([5], 1), ([], 0), ([6], 1)])
    pair.view(TOKENS, np.int32)[3] = left[3]
    board.txn += 1
    assert board.apply((RESERVE, 0, 1, 2), (RESERVE, 2, 1, 2))[0] == Code.OK
    code, _ = board.submit(pair, [(0, 1, 1), (0, 0, 0), (2, 1, 1)])
    assert code == Code.OK
    assert ["row 3" in text for text in board.violations()] == [True]


# ---- strict

_PLANT = """
import sys
from pathlib import Path
import numpy as np
from support.native_board import DECODE, LOGITS, STEP_IDLE, Board, Pair, native_library
board = Board(native_library(), Path(sys.argv[1]), "strict = 1").configure()
pair = Pair(board, DECODE)
board.run(pair, [(0, [1], 0)])
print("kept the rules", flush=True)
board.start(pair, [(0, [2], 1)])
pair.view(LOGITS, np.uint16)[0, 0] = 0
board.step(STEP_IDLE)
print("went on", flush=True)
"""


@pytest.mark.slow
def test_strict_ends_the_process_at_the_first_violation(bench: Bench) -> None:
    tests = str(Path(__file__).parents[1])
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{_PLANT}"]
        + [str(bench.calbin)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGABRT, ended.stderr
    assert ended.stdout == "kept the rules\n"
    assert "violation (strict): OUTPUT_TOUCHED tensor logits" in ended.stderr
