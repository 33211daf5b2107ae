"""Lane packing against plain numpy, and its refusals."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from laneway.engine import lanes

GUARD = 7
FILL = -77
VOCABULARY = 1000
POSITIONS = 4096


class Arena:
    """Device arrays inside a larger buffer, so that a write outside would be seen."""

    def __init__(self, batch: int, width: int) -> None:
        self.shape = (batch, width)
        size = batch * width
        self.memory = np.full(4 * GUARD + 2 * size + batch, FILL, np.int32)
        at = GUARD
        self.tokens = self.memory[at : at + size].reshape(batch, width)
        at += size + GUARD
        self.positions = self.memory[at : at + size].reshape(batch, width)
        at += size + GUARD
        self.lengths = self.memory[at : at + batch]

    def guards_intact(self) -> bool:
        """Tell whether everything outside the three arrays still has its fill."""
        copy = self.memory.copy()
        size = self.shape[0] * self.shape[1]
        for at, count in (
            (GUARD, size),
            (2 * GUARD + size, size),
            (3 * GUARD + 2 * size, self.shape[0]),
        ):
            copy[at : at + count] = FILL
        return bool((copy == FILL).all())


def pack(
    arena: Arena,
    source: list[int],
    offsets: list[int],
    counts: list[int],
    starts: list[int],
) -> int:
    return lanes.pack_lanes(
        np.array(source, np.int32),
        np.array(offsets, np.int64),
        np.array(counts, np.int32),
        np.array(starts, np.int32),
        vocabulary=VOCABULARY,
        positions_max=POSITIONS,
        tokens=arena.tokens,
        positions=arena.positions,
        lengths=arena.lengths,
    )


def expected(
    rows: list[tuple[NDArray[np.int32], int]], batch: int, width: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    tokens = np.zeros((batch, width), np.int32)
    positions = np.zeros((batch, width), np.int32)
    lengths = np.zeros(batch, np.int32)
    for i, (ids, start) in enumerate(rows):
        tokens[i, : len(ids)] = ids
        positions[i, : len(ids)] = np.arange(start, start + len(ids))
        lengths[i] = len(ids)
    return tokens, positions, lengths


def test_hand_written_job() -> None:
    arena = Arena(4, 3)
    assert pack(arena, [5, 6, 7, 8], [1, 0, 0], [3, 0, 1], [10, 99, 0]) == lanes.PACK_OK
    assert arena.tokens.tolist() == [[6, 7, 8], [0, 0, 0], [5, 0, 0], [0, 0, 0]]
    assert arena.positions.tolist() == [[10, 11, 12], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert arena.lengths.tolist() == [3, 0, 1, 0]
    assert arena.guards_intact()


def test_random_jobs_equal_numpy() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        batch, width = int(rng.integers(1, 17)), int(rng.integers(1, 33))
        rows = []
        for _ in range(int(rng.integers(0, batch + 1))):
            ids = rng.integers(0, VOCABULARY, int(rng.integers(0, width + 1))).astype(np.int32)
            rows.append((ids, int(rng.integers(0, POSITIONS - width))))
        order = rng.permutation(len(rows))
        source: list[int] = []
        offsets = [0] * len(rows)
        for i in order:
            offsets[i] = len(source)
            source += rows[i][0].tolist()
        arena = Arena(batch, width)
        arena.tokens[:] = 3
        counts, starts = [len(ids) for ids, _ in rows], [start for _, start in rows]
        assert pack(arena, source, offsets, counts, starts) == lanes.PACK_OK
        tokens, positions, lengths = expected(rows, batch, width)
        np.testing.assert_array_equal(arena.tokens, tokens)
        np.testing.assert_array_equal(arena.positions, positions)
        np.testing.assert_array_equal(arena.lengths, lengths)
        assert arena.guards_intact()


@pytest.mark.parametrize(
    ("status", "source", "offsets", "counts", "starts"),
    [
        (lanes.PACK_ROWS, [1], [0] * 3, [1] * 3, [0] * 3),
        (lanes.PACK_ROWS, [1], [0], [1, 1], [0, 0]),
        (lanes.PACK_ROWS, [1], [0, 0], [1, 1], [0]),
        (lanes.PACK_COUNT, [1], [0, 0], [1, -1], [0, 0]),
        (lanes.PACK_COUNT, [1] * 9, [0, 0], [1, 5], [0, 0]),
        (lanes.PACK_SOURCE, [1], [0, -1], [1, 1], [0, 0]),
        (lanes.PACK_SOURCE, [1, 2], [0, 1], [1, 2], [0, 0]),
        (lanes.PACK_SOURCE, [1], [0, 2**62], [1, 1], [0, 0]),
        (lanes.PACK_SOURCE, [1], [0, 2**63 - 1], [1, 4], [0, 0]),
        (lanes.PACK_POSITION, [1], [0, 0], [1, 1], [0, -1]),
        (lanes.PACK_POSITION, [1], [0, 0], [1, 1], [0, POSITIONS]),
        (lanes.PACK_POSITION, [1, 1], [0, 0], [1, 2], [0, POSITIONS - 1]),
        (lanes.PACK_POSITION, [1], [0, 0], [1, 1], [0, 2**31 - 1]),
        (lanes.PACK_TOKEN, [1, -1], [0, 1], [1, 1], [0, 0]),
        (lanes.PACK_TOKEN, [1, VOCABULARY], [0, 1], [1, 1], [0, 0]),
    ],
)
def test_refusal_changes_nothing(
    status: int, source: list[int], offsets: list[int], counts: list[int], starts: list[int]
) -> None:
    arena = Arena(2, 4)
    assert pack(arena, source, offsets, counts, starts) == status
    assert (arena.memory == FILL).all()


def test_last_position_and_token_are_allowed() -> None:
    arena = Arena(1, 2)
    assert pack(arena, [0, VOCABULARY - 1], [0], [2], [POSITIONS - 2]) == lanes.PACK_OK
    assert arena.tokens.tolist() == [[0, VOCABULARY - 1]]
    assert arena.positions.tolist() == [[POSITIONS - 2, POSITIONS - 1]]


def test_arrays_of_another_form_are_refused() -> None:
    arena = Arena(2, 4)
    row = np.zeros(1, np.int32)
    offsets = np.zeros(1, np.int64)
    bads: list[NDArray[Any]] = [
        arena.tokens.T,
        arena.tokens[:, :3],
        arena.tokens[0],
        np.zeros((2, 4)),
    ]
    for tokens in bads:
        with pytest.raises(ValueError, match="must be contiguous"):
            lanes.pack_lanes(
                row,
                offsets,
                row,
                row,
                vocabulary=1,
                positions_max=1,
                tokens=tokens,
                positions=arena.positions,
                lengths=arena.lengths,
            )


def test_every_status_has_a_name() -> None:
    statuses = {v for k, v in vars(lanes).items() if k.startswith("PACK_") and isinstance(v, int)}
    assert set(lanes.PACK_STATUS_NAMES) == statuses
