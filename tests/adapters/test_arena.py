"""Arenas have fixed addresses while they live, and tainted ones live for ever."""

import ctypes
import gc
import mmap
import os
import sys

import numpy as np
import pytest

from laneway.adapters import arena as arena_module
from laneway.adapters.arena import Arena, Graveyard


def mapped(address: int) -> bool:
    """Tell whether the kernel has a mapping at an address."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
            if begin <= address < end:
                return True
    return False


def test_an_arena_is_page_aligned_and_whole_pages() -> None:
    arena = Arena(1)
    assert arena.byte_count == mmap.PAGESIZE
    assert arena.address % mmap.PAGESIZE == 0
    arena.close()


def test_views_lie_in_the_arena_and_share_its_memory() -> None:
    arena = Arena(3 * mmap.PAGESIZE)
    first = arena.view(0, (4, 8), np.int32)
    second = arena.view(mmap.PAGESIZE, (2,), np.uint16)
    assert first.ctypes.data == arena.address
    assert second.ctypes.data == arena.address + mmap.PAGESIZE
    first[3, 7] = 77
    assert ctypes.c_int32.from_address(arena.address + (3 * 8 + 7) * 4).value == 77


def test_a_view_beyond_the_end_is_refused() -> None:
    arena = Arena(mmap.PAGESIZE)
    with pytest.raises(ValueError, match="do not fit"):
        arena.view(mmap.PAGESIZE - 4, (2,), np.int32)
    with pytest.raises(ValueError, match="do not fit"):
        arena.view(-4, (1,), np.int32)


@pytest.mark.parametrize("size", [0, -1])
def test_an_empty_arena_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        Arena(size)


def test_the_mapping_can_be_neither_closed_nor_resized_while_the_arena_lives() -> None:
    arena = Arena(mmap.PAGESIZE)
    with pytest.raises(BufferError):
        arena.mapping.close()
    with pytest.raises(BufferError):
        arena.mapping.resize(2 * mmap.PAGESIZE)
    arena.close()


def test_closing_with_a_live_view_raises_and_changes_nothing() -> None:
    arena = Arena(mmap.PAGESIZE)
    view = arena.view(0, (4,), np.int32)
    view[:] = 5
    address = arena.address
    with pytest.raises(BufferError):
        arena.close()
    assert not arena.closed
    assert arena.view(0, (4,), np.int32).ctypes.data == address
    assert list(view) == [5, 5, 5, 5]
    del view
    arena.close()
    assert arena.closed
    assert not mapped(address)


def test_wipe_overwrites_everything() -> None:
    arena = Arena(2 * mmap.PAGESIZE)
    view = arena.view(0, (arena.byte_count,), np.uint8)
    view[:] = 0xA5
    arena.wipe()
    assert not view.any()


def test_a_closed_arena_gives_no_view_and_cannot_be_wiped() -> None:
    arena = Arena(8)
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        arena.view(0, (1,), np.int8)
    with pytest.raises(ValueError, match="closed"):
        arena.wipe()


def test_buried_memory_outlives_every_object() -> None:
    arena = Arena(mmap.PAGESIZE)
    address = arena.address
    arena.view(0, (1,), np.int32)[0] = 42
    graveyard = Graveyard()
    graveyard.bury(arena, "job/3 never became quiescent")
    graveyard.bury(arena, "said twice, kept once")
    assert (graveyard.item_count, graveyard.byte_count) == (1, mmap.PAGESIZE)
    del arena, graveyard
    gc.collect()
    assert mapped(address)
    assert ctypes.c_int32.from_address(address).value == 42


def test_memory_that_is_not_buried_goes_with_its_arena() -> None:
    arena = Arena(mmap.PAGESIZE)
    address = arena.address
    del arena
    gc.collect()
    assert not mapped(address)


def test_what_is_buried_is_counted_for_the_whole_process() -> None:
    """E9: the budget is one for the process, whatever number of devices it had."""
    before = arena_module.PROCESS.totals
    for _ in range(3):
        graveyard = Graveyard()
        graveyard.bury(Arena(1), "one of each device")
        assert graveyard.item_count == 1
    items, byte_count = arena_module.PROCESS.totals
    assert (items - before[0], byte_count - before[1]) == (3, 3 * mmap.PAGESIZE)


def test_the_address_stays_while_other_memory_comes_and_goes() -> None:
    arena = Arena(64 * mmap.PAGESIZE)
    view = arena.view(0, (8,), np.int64)
    view[:] = np.arange(8)
    others = [Arena(64 * mmap.PAGESIZE) for _ in range(8)]
    for other in others:
        other.close()
    assert view.ctypes.data == arena.address
    assert list(view) == list(range(8))
    assert os.sysconf("SC_PAGESIZE") == mmap.PAGESIZE
    assert sys.maxsize > 2**32, "the ABI is LP64 only"
