"""What the simulated board carries records of (G22): a test for each, by bits and by hand.

The list of them, and which test stands for which: ``adapters/conformance.py``.
"""

import threading
from pathlib import Path

import pytest
from support.native_board import (
    COMMIT,
    CONTEXT,
    D2H,
    DECODE,
    DONE,
    FOREVER,
    LANES,
    PREFILL,
    QUEUED,
    ROOT,
    STEP_ONE,
    Bench,
    Board,
    OpenBoard,
    Pair,
)

from laneway.adapters import open_device
from laneway.adapters.calbin import pack
from laneway.adapters.conformance import PROOFS
from laneway.adapters.npurt import Code

PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6])


def test_two_in_flight_equal_each_alone(open_board: OpenBoard, bench: Bench) -> None:
    """Two prefills, then two decodes, of unequal lengths and on lanes of their own."""
    board = open_board()
    prefills = [Pair(board, PREFILL) for _ in PROMPTS]
    decodes = [Pair(board, DECODE) for _ in PROMPTS]
    for pairs, pieces in ((prefills, PROMPTS), (decodes, ([7], [8]))):
        starts = [0, 0] if pairs is prefills else [len(prompt) for prompt in PROMPTS]
        tickets = []
        for lane, (pair, tokens, start) in enumerate(zip(pairs, pieces, starts, strict=True)):
            tickets.append(board.start(pair, [(lane, tokens, start)]))
        assert list(board.counters().inflight) == [1, 1]
        while board.step(STEP_ONE):
            pass
        assert {board.result(ticket).engine_used for ticket in tickets} == {1, 2}
        for lane, (pair, tokens, start) in enumerate(zip(pairs, pieces, starts, strict=True)):
            whole = [*PROMPTS[lane], *tokens] if start else tokens
            logits, digest = board.oracle(bench.calbin, whole)
            assert (pair.logits(), pair.digest()) == (logits, digest)
            txn = board.txn - 1 + lane
            assert board.apply((COMMIT, lane, start, start + len(tokens)), txn=txn)[0] == Code.OK
            board.retire(pair, tickets[lane])
    assert board.violations() == []


def test_states_seen_from_another_thread_never_go_back(open_board: OpenBoard) -> None:
    """One thread waits for a job while another polls it all the time."""
    board = open_board("clock = real\nprofile = tp2-ref\nscale = 20")
    pair = Pair(board, DECODE)
    for round_ in range(8):
        seen: list[int] = []
        ticket = board.start(pair, [(0, [5], round_)])

        def poll(ticket: int = ticket, seen: list[int] = seen) -> None:
            while not seen or seen[-1] < DONE:
                seen.append(board.state(ticket))

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        assert board.wait([ticket], FOREVER) == (Code.OK, 0)
        thread.join(timeout=30)
        assert not thread.is_alive()
        assert seen == sorted(seen) and seen[-1] == DONE
        assert board.apply((COMMIT, 0, round_, round_ + 1))[0] == Code.OK
        board.retire(pair, ticket)


def test_counters_equal_a_ledger_kept_by_hand(open_board: OpenBoard) -> None:
    board = open_board()
    pairs = [Pair(board, DECODE) for _ in range(2)]
    submitted = 0
    for position in range(3):
        tickets = [board.start(pair, [(lane, [5], position)]) for lane, pair in enumerate(pairs)]
        submitted += 2
        while True:
            states = [board.state(ticket) for ticket in tickets]
            counters = board.counters()
            pending = states.count(QUEUED)
            running = sum(QUEUED < state <= D2H for state in states)
            done = states.count(DONE)
            assert (counters.submitted, counters.pending) == (submitted, pending)
            assert (counters.running, counters.left) == (running, pending + running)
            assert counters.finished == submitted - 2 + done
            assert (counters.failed, counters.aborted) == (0, 0)
            if not board.step(STEP_ONE):
                break
        for lane, (pair, ticket) in enumerate(zip(pairs, tickets, strict=True)):
            txn = board.txn - 1 + lane
            assert board.apply((COMMIT, lane, position, position + 1), txn=txn)[0] == Code.OK
            board.retire(pair, ticket)


def test_a_prompt_in_pieces_equals_the_whole(open_board: OpenBoard, bench: Bench) -> None:
    board = open_board()
    pair = Pair(board, PREFILL)
    prompt = [token * 7 % 512 for token in range(1, 20)]
    start = 0
    for piece in (prompt[:1], prompt[1:9], prompt[9:19]):
        board.run(pair, [(0, piece, start)])
        start += len(piece)
        logits, digest = board.oracle(bench.calbin, prompt[:start])
        assert (pair.logits(), pair.digest()) == (logits, digest)


@pytest.mark.slow
def test_layouts_equal_each_other(bench: Bench, tmp_path: Path) -> None:
    wanted = None
    for layout in ("single", "tp2", "ep2", "pp2", "tpep"):
        folder = tmp_path / layout
        source = ROOT / "models" / "tiny-moe"
        pack(source, folder, batch=(1, 4), context=CONTEXT, lanes=LANES, layout=layout)
        board = Board(bench.library, folder).configure()
        pair = Pair(board, PREFILL)
        board.run(pair, [(0, PROMPTS[0], 0)])
        found = (pair.logits(), pair.digest())
        board.close()
        wanted = wanted or found
        assert found == wanted, layout
    assert wanted == Board(bench.library, bench.calbin).oracle(bench.calbin, PROMPTS[0])


def test_every_proof_is_a_test_and_every_capability_is_told() -> None:
    text = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_board_*.py"))
    assert [test for test in PROOFS.values() if f"def {test}(" not in text] == []
    device = open_device("sim:")
    told = {row.name: row.supported for row in device.describe().capabilities}
    device.stop()
    assert [name for name in PROOFS if not told.get(name)] == []
