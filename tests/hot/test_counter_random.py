"""The counter-based generator against plain Python, numpy's and the published vectors."""

import numpy as np
import pytest

from laneway.engine import draw

WORD = 2**64
EDGES = [0, 1, 2, 3, 255, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, WORD - 2, WORD - 1]


def philox_in_python(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Ten Philox4x64 rounds on Python integers, from the description in the paper."""
    left, right, extra, last = counter
    k0, k1 = key
    for _ in range(10):
        p0 = 0xD2E7470EE14C6C93 * left
        p1 = 0xCA5A826395121157 * extra
        left, right, extra, last = (
            (p1 // WORD) ^ right ^ k0,
            p1 % WORD,
            (p0 // WORD) ^ last ^ k1,
            p0 % WORD,
        )
        k0 = (k0 + 0x9E3779B97F4A7C15) % WORD
        k1 = (k1 + 0xBB67AE8584CAA73B) % WORD
    return left, right, extra, last


def compiled(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    words = [np.uint64(word) for word in (*counter, *key)]
    return tuple(int(word) for word in draw.philox(*words))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
        ),
        (
            (WORD - 1,) * 4,
            (WORD - 1,) * 2,
            (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
        ),
    ],
)
def test_published_vectors(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert philox_in_python(counter, key) == words
    assert compiled(counter, key) == words


def test_words_equal_plain_python() -> None:
    rng = np.random.default_rng(11)
    for _ in range(300):
        numbers = [int(n) for n in rng.integers(0, WORD, 6, np.uint64, endpoint=False)]
        counter, key = tuple(numbers[:4]), (numbers[4], numbers[5])
        assert compiled(counter, key) == philox_in_python(counter, key)


def test_uniform_equals_numpys_generator() -> None:
    rng = np.random.default_rng(12)
    seeds = EDGES + [int(n) for n in rng.integers(0, WORD, 60, np.uint64)]
    positions = EDGES[:10] + [int(n) for n in rng.integers(0, 2**20, 20)]
    for seed in seeds:
        for position in positions:
            # numpy adds one to its counter before it makes the first words.
            before = [(position - 1) % WORD] + [WORD - 1 if position == 0 else 0] * 3
            numpys = np.random.Philox(
                counter=np.array(before, np.uint64), key=np.array([seed, 0], np.uint64)
            )
            word = int(numpys.random_raw())
            uniform = draw.uniform(np.uint64(seed), np.uint64(position))
            assert uniform == (word >> 11) / 2**53
            assert 0.0 <= uniform < 1.0


def test_products_of_edges() -> None:
    for a in EDGES:
        for b in EDGES:
            assert int(draw.multiply_high(np.uint64(a), np.uint64(b))) == a * b // WORD


def test_neighbouring_keys_give_unrelated_numbers() -> None:
    """Seeds and positions that differ by one bit must flip about half of the 53 bits."""
    flips = []
    for seed in range(64):
        for position in range(64):
            here = int(draw.uniform(np.uint64(seed), np.uint64(position)) * 2**53)
            for other in ((seed ^ 1, position), (seed, position ^ 1)):
                there = int(draw.uniform(np.uint64(other[0]), np.uint64(other[1])) * 2**53)
                flips.append(bin(here ^ there).count("1"))
    assert min(flips) >= 5
    assert abs(np.mean(flips) - 26.5) < 0.2
