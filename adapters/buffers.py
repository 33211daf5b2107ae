"""A buffer: input and output runtime objects of one submodel over one arena of its own (E1).

Every tensor lies page-aligned in the arena, inputs first; the map is made once when the buffer is
created and the addresses never change. Before a submit the input is filled; after
acceptance nobody here touches the arena until the result is valid, and nobody fills it again until
the ticket is retired and everything is restored and wiped (E3, E4).
"""

import ctypes
import mmap
import struct
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import cast

import attrs
import numpy as np
from numpy.typing import NDArray

from laneway.adapters import npurt
from laneway.adapters.arena import Arena, Graveyard
from laneway.adapters.calls import DeviceCalls
from laneway.adapters.forms import SubmitForm
from laneway.engine.effects import SubmitRow
from laneway.engine.errors import DeviceError, InternalError
from laneway.engine.lanes import PACK_OK, PACK_STATUS_NAMES, pack_lanes

_Numbers = NDArray[np.int32]
_DTYPES: dict[int, type[np.generic]] = {
    npurt.DTYPE_INT32: np.int32,
    npurt.DTYPE_UINT64: np.uint64,
    npurt.DTYPE_FLOAT32: np.float32,
    npurt.DTYPE_BF16: np.uint16,
}


@attrs.frozen
class Tensor:
    """One tensor of a submodel; ``dtype`` is a numpy type, bf16 as its bits."""

    index: int
    name: str
    direction: int
    dtype: type[np.generic]
    shape: tuple[int, ...]
    byte_count: int


@attrs.frozen
class SubmodelPart:
    """One compiled graph as the device describes it."""

    index: int
    name: str
    task: str
    batch_max: int
    tokens_max: int
    tensors: tuple[Tensor, ...]
    incremental: bool
    csrs: tuple[tuple[int, bool, int], ...]
    """(id, per row, default) of the registers that every submit must set."""
    engine_modes: int = 1
    """Bit i: engine mode i (auto, ping, pong)."""
    lane_rule: int = 0
    fixed_rows: bool = False
    mask: int | None = None
    """The register that tells for each row whether it is active (lane rule MASK_CSR)."""


@attrs.define(eq=False)
class Buffer:
    """One pool item. ``ticket`` is the job that holds it, 0 if none."""

    number: int
    submodel: SubmodelPart
    arena: Arena
    views: dict[str, NDArray[np.generic]]
    pointers: dict[int, ctypes.c_void_p]
    form: SubmitForm = attrs.field(init=False)
    ticket: int = 0
    tainted: bool = False
    logits: NDArray[np.uint16] | None = None
    """The logits by rows, once somebody has read them."""

    fillings: int = 0
    """How often somebody wrote to its input, or wiped it."""

    def fill(
        self, rows: Sequence[SubmitRow | None], *, vocabulary: int, positions_max: int
    ) -> None:
        """Write tokens, positions and lengths of a job; what no row fills is zero.

        ``rows`` are those of the batch in order, None where one is inactive.

        Raises: ValueError if the rows do not fit, and nothing is written then; InternalError if the
        buffer is held or tainted.
        """
        self._check_free()
        tokens = [() if row is None else row.tokens for row in rows]
        counts = list(map(len, tokens))
        views = self.views
        status = pack_lanes(
            np.array(list(chain.from_iterable(tokens)), np.int32),
            np.array([0, *accumulate(counts)][:-1], np.int64),
            np.array(counts, np.int32),
            np.array([0 if row is None else row.start for row in rows], np.int32),
            vocabulary=vocabulary,
            positions_max=positions_max,
            tokens=cast(_Numbers, views["tokens"]),
            positions=cast(_Numbers, views["positions"]),
            lengths=cast(_Numbers, views["lengths"]),
        )
        if status != PACK_OK:
            raise ValueError(f"buffer/{self.number}: {PACK_STATUS_NAMES[status]}")
        self.fillings += 1

    def put_tokens(self, tokens: Sequence[int], *, vocabulary: int) -> bool:
        """Write the one token of each of the first rows over the one that ``fill`` wrote.

        For a submodel of one token a row. Return False, with nothing written, if one is none of the
        vocabulary.
        Raises: InternalError if the buffer is held or tainted.
        """
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            return False
        self._check_free()
        self.fillings += 1
        struct.pack_into(f"={len(tokens)}i", self.views["tokens"].data, 0, *tokens)
        return True

    @property
    def is_free(self) -> bool:
        """Whether no job holds it and the device lets it be."""
        return not (self.ticket or self.tainted)

    def _check_free(self) -> None:
        if not self.is_free:
            raise InternalError(f"buffer/{self.number} is not free (ticket {self.ticket})")

    def output(self, name: str) -> NDArray[np.generic] | None:
        """Return an output tensor, or None if the submodel has none of that name."""
        return self.views.get(name)

    def wipe(self) -> None:
        """Overwrite tokens, positions, lengths and logits (E4)."""
        self.fillings += 1
        self.arena.wipe()

    def drop_views(self) -> None:
        """Forget the views, so that the arena can be closed."""
        self.views = {}
        self.logits = None


def read_submodel(calls: DeviceCalls, calbin: ctypes.c_void_p, index: int) -> SubmodelPart:
    """Read one submodel with its tensors and registers. Raises: DeviceError."""
    call = calls.library.call
    info = npurt.SubmodelInfo()
    call("npurt_calbin_submodel", calbin, index, ctypes.byref(info), about=f"submodel {index}")
    tensors = []
    for number in range(info.tensor_count):
        tensor = npurt.TensorInfo()
        call("npurt_calbin_tensor", calbin, index, number, ctypes.byref(tensor))
        tensors.append(_take_tensor(tensor))
    csrs = []
    mask = None
    for number in range(info.csr_count):
        csr = npurt.CsrInfo()
        call("npurt_calbin_csr", calbin, index, number, ctypes.byref(csr))
        if csr.name == npurt.ROW_ACTIVE and csr.per_lane:
            mask = csr.id
        if csr.required:
            csrs.append((csr.id, bool(csr.per_lane), getattr(csr, "def")))
    return SubmodelPart(
        index=info.index,
        name=info.name.decode("utf-8", "replace"),
        task=npurt.TASKS.get(info.task, str(info.task)),
        batch_max=info.max_batch,
        tokens_max=info.max_tokens,
        incremental=bool(info.h.flags & npurt.SUBMODEL_INCREMENTAL_PREFILL),
        tensors=tuple(tensors),
        csrs=tuple(csrs),
        engine_modes=info.engine_modes,
        lane_rule=info.lane_rule,
        fixed_rows=bool(info.h.flags & npurt.SUBMODEL_FIXED_ROWS),
        mask=mask,
    )


def _take_tensor(info: npurt.TensorInfo) -> Tensor:
    name = info.name.decode("utf-8", "replace")
    if info.dtype not in _DTYPES or not 0 <= info.rank <= 8 or info.alignment > mmap.PAGESIZE:
        raise DeviceError(
            f"tensor {name} of dtype {info.dtype}, rank {info.rank} and alignment"
            f" {info.alignment} cannot be mapped",
            code=npurt.Code.UNSUPPORTED,
        )
    dtype = _DTYPES[info.dtype]
    shape = tuple(info.dims[: info.rank])
    need = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if min(shape, default=1) < 1 or need != info.bytes:
        raise DeviceError(
            f"tensor {name} of shape {shape} has {info.bytes} bytes, {need} are its due",
            code=npurt.Code.INTERNAL,
        )
    return Tensor(info.index, name, info.direction, dtype, shape, need)


def csr_values(
    part: SubmodelPart, rows: Sequence[SubmitRow | None]
) -> ctypes.Array[npurt.CsrValue]:
    """Make the full snapshot of required registers (D7).

    The one that masks rows is 0 for a row of the batch that is inactive (E15).
    """
    if not part.csrs:
        return (npurt.CsrValue * 0)()
    values = [
        npurt.CsrValue(identity, place, 0 if row is None and identity == part.mask else default)
        for identity, per_row, default in part.csrs
        for place, row in enumerate(rows if per_row else rows[:1])
    ]
    return (npurt.CsrValue * len(values))(*values)


def create_buffer(
    calls: DeviceCalls,
    calbin: ctypes.c_void_p,
    number: int,
    part: SubmodelPart,
    *,
    engine_mode: int = npurt.ENGINE_AUTO,
) -> Buffer:
    """Create both runtime objects of a buffer and map its arena to every tensor.

    ``engine_mode`` binds them to one command bank.
    Raises: DeviceError; nothing is left behind then.
    """
    offsets: dict[int, int] = {}
    reached = 0
    for tensor in sorted(part.tensors, key=lambda tensor: (tensor.direction, tensor.index)):
        offsets[tensor.index] = reached
        reached += -(-tensor.byte_count // mmap.PAGESIZE) * mmap.PAGESIZE
    arena = Arena(reached)
    views = {
        tensor.name: arena.view(offsets[tensor.index], tensor.shape, tensor.dtype)
        for tensor in part.tensors
    }
    buffer = Buffer(number, part, arena, views, {})
    try:
        for direction in (npurt.IN, npurt.OUT):
            spec = npurt.BufferSpec(
                submodel=part.index,
                direction=direction,
                engine_mode=engine_mode,
                lanes=part.batch_max,
            )
            pointer = ctypes.c_void_p()
            calls.library.call(
                "npurt_buffer_create",
                *(calbin, ctypes.byref(spec), ctypes.byref(pointer)),
                about=f"buffer/{number}",
            )
            buffer.pointers[direction] = pointer
        for tensor in part.tensors:
            calls.library.call(
                "npurt_buffer_map",
                *(buffer.pointers[tensor.direction], tensor.index),
                *(arena.address + offsets[tensor.index], tensor.byte_count),
                about=f"buffer/{number} {tensor.name}",
            )
        source, target = buffer.pointers[npurt.IN], buffer.pointers[npurt.OUT]
        buffer.form = SubmitForm(part.batch_max, source=source, target=target)
    except DeviceError:
        for pointer in buffer.pointers.values():
            calls.library.attempt("npurt_buffer_destroy", pointer)
        buffer.drop_views()
        del views
        arena.close()
        raise
    return buffer


def destroy_buffer(calls: DeviceCalls, buffer: Buffer, graveyard: Graveyard) -> None:
    """Destroy the runtime objects and give the memory back, or bury it if that failed.

    Raises: DeviceError if the device did not let go; the memory is then in the graveyard.
    """
    try:
        for direction in (npurt.IN, npurt.OUT):
            pointer = buffer.pointers.get(direction)
            if pointer is not None:
                calls.library.call("npurt_buffer_destroy", pointer, about=f"buffer/{buffer.number}")
                del buffer.pointers[direction]
    except DeviceError as error:
        bury_buffer(buffer, graveyard, str(error))
        raise
    if not buffer.tainted:
        buffer.drop_views()
        buffer.arena.close()


def bury_buffer(buffer: Buffer, graveyard: Graveyard, reason: str) -> None:
    """Keep a buffer's memory for good: the device may still write to it (E9)."""
    buffer.tainted = True
    graveyard.bury(buffer.arena, reason)
