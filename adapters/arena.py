"""Host memory that a device transfers to and from, and a place for what is tainted.

An arena is one page-aligned anonymous mapping. Its address never changes: one exported ctypes array
is held for the arena's life, and while an export exists Python itself refuses to close or resize
the mapping. Memory of a job that never became quiescent may still be written by the device; it goes
to the graveyard, which keeps the mapping until the process ends (E9, D12).

Source: npurt.h (ownership of memory), E1, E4, E9.
"""

import ctypes
import mmap
import threading

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Arena:
    """One page-aligned anonymous mapping with a fixed address.

    Units: sizes and offsets in bytes; the size is rounded up to whole pages.
    """

    def __init__(self, byte_count: int) -> None:
        if byte_count < 1:
            raise ValueError(f"an arena needs at least one byte, not {byte_count}")
        self.byte_count = -(-byte_count // mmap.PAGESIZE) * mmap.PAGESIZE
        self._mapping = mmap.mmap(-1, self.byte_count)
        self._export: ctypes.Array[ctypes.c_ubyte] | None = (
            ctypes.c_ubyte * self.byte_count
        ).from_buffer(self._mapping)
        self.address = ctypes.addressof(self._export)

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""
        return self._export is None

    @property
    def mapping(self) -> mmap.mmap:
        """The mapping itself; closing or resizing it raises BufferError while the arena lives."""
        return self._mapping

    def view(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
        """Return an array over a part of the memory. Raises: ValueError if it does not fit."""
        if self._export is None:
            raise ValueError("the arena is closed")
        kind: np.dtype[np.generic] = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        if offset < 0 or offset + count * kind.itemsize > self.byte_count:
            raise ValueError(
                f"{count} items of {kind.itemsize} bytes at {offset} do not fit the arena's"
                f" {self.byte_count} bytes"
            )
        export = memoryview(self._export).cast("B")
        return np.frombuffer(export, dtype=kind, count=count, offset=offset).reshape(shape)

    def wipe(self) -> None:
        """Overwrite everything with zeros (E4)."""
        if self._export is None:
            raise ValueError("the arena is closed")
        ctypes.memset(self.address, 0, self.byte_count)

    def close(self) -> None:
        """Give the memory back.

        The caller has dropped all views and the device's map.
        Raises: BufferError while a view of it is alive; the arena is then as before.
        """
        if self._export is None:
            return
        self._export = None
        try:
            self._mapping.close()
        except BufferError:
            self._export = (ctypes.c_ubyte * self.byte_count).from_buffer(self._mapping)
            raise


class Account:
    """How much memory is kept for good, over all devices that share it; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Lock()
        self._items = 0
        self._bytes = 0

    @property
    def totals(self) -> tuple[int, int]:
        """Items and bytes kept so far; neither ever falls."""
        with self._changed:
            return self._items, self._bytes

    def add(self, byte_count: int) -> None:
        """Count one more item."""
        with self._changed:
            self._items += 1
            self._bytes += byte_count


PROCESS = Account()
"""What this process keeps. Why state of a module: buried memory outlives device and engine and is
given back only by the end of the process, and its budget is one for the process (E9)."""


class Graveyard:
    """Keeps arenas that the device may still write to until the process ends (E9).

    ``account``: where they are counted, by default for the process.
    """

    def __init__(self, account: Account | None = None) -> None:
        self.account = PROCESS if account is None else account
        self._buried: list[tuple[Arena, str]] = []

    @property
    def item_count(self) -> int:
        """The number of arenas kept here."""
        return len(self._buried)

    @property
    def byte_count(self) -> int:
        """The bytes kept here."""
        return sum(arena.byte_count for arena, _ in self._buried)

    def bury(self, arena: Arena, reason: str) -> None:
        """Keep an arena's memory mapped for good.

        Why: the reference taken here is never given back, so that the mapping outlives the device
        object, its engine and even this graveyard.
        """
        if any(arena is kept for kept, _ in self._buried):
            return
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(arena.mapping))
        self._buried.append((arena, reason))
        self.account.add(arena.byte_count)
