"""Read and write bf16 parameters in the safetensors form.

The form: 8 bytes with the length of a JSON header (little endian), the header (name → dtype, shape,
byte range), then the bytes of all tensors without gaps. The reader trusts nothing: every range must
fit its shape and dtype, and the ranges together must cover the file exactly, so that a truncated or
damaged file is refused before a tensor is used. One tensor is in memory at a time.
"""

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import attrs
import msgspec
import numpy as np
from numpy.typing import NDArray

from laneway.adapters.manifest import TENSORS_MAX
from laneway.engine.errors import ModelError

_HEADER_BYTES_MAX = 16 << 20
_NAME = re.compile(r"[!-~]{1,256}")
_KEPT_BYTES_MAX = 512 << 20
_ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2},
    **{"I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1},
}
FLOATS_ACCEPTED = ("BF16", "F32", "F16")


@attrs.frozen
class TensorEntry:
    """Where a tensor stands in its file.

    Units: offset in bytes from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def byte_count(self) -> int:
        """The bytes that shape and dtype need."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    def part(self, name: str, first: int, shape: tuple[int, ...]) -> "TensorEntry":
        """Name a contiguous part that starts at element `first`."""
        return TensorEntry(name, self.dtype, shape, self.offset + first * _ITEM_BYTES[self.dtype])


class _HeaderEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(file: BinaryIO, *, path: object) -> dict[str, TensorEntry]:
    """Read the table of a safetensors file and hold it against the size of the file.

    Raises: ModelError if the file is truncated, damaged or not in this form.
    """
    size = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(_read_exactly(file, 8, path=path), "little")
    if not 2 <= header_bytes <= min(_HEADER_BYTES_MAX, size - 8):
        raise ModelError(
            f"{path}: damaged or truncated: its header claims {header_bytes} bytes,"
            f" the file has {size}"
        )
    raw = _read_exactly(file, header_bytes, path=path)
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        table = {
            name: msgspec.json.decode(entry, type=_HeaderEntry) for name, entry in header.items()
        }
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: damaged: its header is no tensor table: {error}") from error
    if len(table) > TENSORS_MAX:
        raise ModelError(f"{path}: {len(table)} tensors, more than the {TENSORS_MAX} allowed")
    return _check_table(table, first=8 + header_bytes, size=size, path=path)


def _check_table(
    table: Mapping[str, _HeaderEntry], *, first: int, size: int, path: object
) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    reached = 0
    for name, raw in sorted(table.items(), key=lambda item: item[1].data_offsets):
        begin, end = raw.data_offsets
        if not _NAME.fullmatch(name):
            # Names go into messages: no line breaks or terminal codes from a file.
            raise ModelError(f"{path}: damaged: {name[:40]!a} is no tensor name")
        if raw.dtype not in _ITEM_BYTES:
            raise ModelError(f"{path}: tensor {name} has the unknown dtype {raw.dtype}")
        if any(length < 0 for length in raw.shape):
            raise ModelError(f"{path}: damaged: tensor {name} has the shape {list(raw.shape)}")
        entry = TensorEntry(name, raw.dtype, raw.shape, first + begin)
        if begin != reached or end - begin != entry.byte_count:
            raise ModelError(
                f"{path}: damaged: tensor {name} ({raw.dtype} {list(raw.shape)}) cannot stand at"
                f" bytes {begin} to {end}"
            )
        reached = end
        entries[name] = entry
    if first + reached != size:
        raise ModelError(
            f"{path}: damaged or truncated: its tensors end at byte {first + reached},"
            f" the file at {size}"
        )
    return entries


def read_bf16(file: BinaryIO, entry: TensorEntry, *, path: object) -> NDArray[np.uint16]:
    """Read a tensor as the bits of bf16; F32 and F16 are rounded to nearest even.

    Raises: ModelError for another dtype, or values that are not finite in bf16.
    """
    if entry.dtype not in FLOATS_ACCEPTED:
        raise ModelError(
            f"{path}: tensor {entry.name} is {entry.dtype}; only {', '.join(FLOATS_ACCEPTED)}"
            " can be packed"
        )
    file.seek(entry.offset)
    raw = _read_exactly(file, entry.byte_count, path=path)
    if entry.dtype == "BF16":
        bits = np.frombuffer(raw, dtype="<u2")
    else:
        floats = np.frombuffer(raw, dtype="<f4" if entry.dtype == "F32" else "<f2")
        bits = round_to_bf16(floats.astype(np.float32))
    if bool(np.any((bits & 0x7F80) == 0x7F80)):
        raise ModelError(f"{path}: tensor {entry.name} holds values that are not finite in bf16")
    return bits.reshape(entry.shape)


def round_to_bf16(floats: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to the bits of bf16, nearest even; infinity and NaN stay what they are."""
    words = np.ascontiguousarray(floats, dtype=np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = (
        (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    ).astype(np.uint16)
    # The carry of the rounding would turn some NaNs into zero or infinity.
    return np.where(np.isnan(floats), np.uint16(0x7FC0), rounded)


def widen_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Give the float32 values of bf16 bits, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


class StoredParameters:
    """Parameters of an open file as float32, for the reference.

    Why: a small model is kept in memory, because the reference asks for every tensor once per
    sequence; of a large one only the tensor in use is there.
    """

    def __init__(self, file: BinaryIO, entries: Mapping[str, TensorEntry], *, path: object) -> None:
        self._file, self._entries, self._path = file, entries, path
        total = sum(entry.byte_count for entry in entries.values())
        self._kept: dict[str, NDArray[np.float32]] | None = {} if total <= _KEPT_BYTES_MAX else None

    @property
    def count(self) -> int:
        """How many parameters there are."""
        return sum(math.prod(entry.shape) for entry in self._entries.values())

    def whole(self, name: str) -> NDArray[np.float32]:
        """Give a tensor."""
        if self._kept is not None and name in self._kept:
            return self._kept[name]
        floats = widen_bf16(self._bits(name))
        if self._kept is not None:
            self._kept[name] = floats
        return floats

    def rows(self, name: str, indices: NDArray[np.int64]) -> NDArray[np.float32]:
        """Give some rows of a tensor."""
        if self._kept is not None:
            return self.whole(name)[indices]
        return widen_bf16(self._bits(name)[indices])

    def _bits(self, name: str) -> NDArray[np.uint16]:
        return read_bf16(self._file, self._entries[name], path=self._path)


def write_bf16(
    file: BinaryIO,
    shapes: Mapping[str, tuple[int, ...]],
    load: Callable[[str], NDArray[np.uint16]],
) -> tuple[str, int]:
    """Write a safetensors file of bf16 tensors in the given order; return its SHA-256 and size."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    reached = 0
    for name, shape in shapes.items():
        end = reached + 2 * math.prod(shape)
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (reached, end)}
        reached = end
    header = msgspec.json.encode(table)
    header += b" " * (-len(header) % 8)
    hasher = hashlib.sha256()
    for piece in (len(header).to_bytes(8, "little"), header):
        hasher.update(piece)
        file.write(piece)
    for name in shapes:
        piece = load(name).astype("<u2").tobytes()
        hasher.update(piece)
        file.write(piece)
    return hasher.hexdigest(), 8 + len(header) + reached


def _read_exactly(file: BinaryIO, count: int, *, path: object) -> bytes:
    try:
        content = file.read(count)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) != count:
        raise ModelError(f"{path}: truncated: {count} bytes wanted, {len(content)} there")
    return content
