"""What the adapter holds for one load of one artifact, from validation to release.

Here the engine's numbers meet the device's: lanes are numbered over the whole journal and the
device counts its bank from 0; epoch and generation are the engine's own and the device has others
(decision 9). Nothing else translates.
"""

import ctypes
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache

import attrs

from laneway.adapters import npurt
from laneway.adapters.buffers import Buffer, SubmodelPart
from laneway.adapters.forms import INACTIVE
from laneway.adapters.trials import TrialRun
from laneway.engine.effects import KvOperation, SubmitRow
from laneway.engine.errors import InternalError
from laneway.engine.ports import TextPort

_VERBS = npurt.KV_VERBS
DeviceOperations = tuple[ctypes.Array[npurt.KvOp], dict[int, int]]
"""An operation list as the device gets it, and the lane tags once it has been applied."""


@attrs.frozen(eq=False, kw_only=True)
class Generation:
    """One successful configuration, in both numberings."""

    epoch: int
    generation: int
    device_epoch: int
    device_generation: int
    lane_first: int
    lane_count: int


@attrs.define(eq=False, kw_only=True)
class LoadedModel:
    """One artifact on the way from validated to released."""

    number: int
    calbin: ctypes.c_void_p
    folder: str
    sha256: str
    name: str
    vocabulary: int
    context_tokens: int
    kv_layout: int
    chip_mask: int
    text: TextPort
    submodels: tuple[SubmodelPart, ...]
    trials: tuple[TrialRun, ...]
    files: ExitStack
    """Keeps a calbin that was packed on the fly until it is released."""
    bank: ctypes.c_void_p | None = None
    current: Generation | None = None
    buffers: dict[int, Buffer] = attrs.field(factory=dict)
    lane_tags: dict[int, int] = attrs.field(factory=dict)
    """Device lane to the tag of the sequence bound to it: the job that reserved it first."""

    golden_bits: dict[tuple[int, int], bytes] = attrs.field(factory=dict)
    """Digests of the golden rows of the load, by trial and position, where bits may be compared."""

    def stale_code(self, *, epoch: int, generation: int) -> npurt.Code | None:
        """Return why something decided for this epoch and generation is stale, or None."""
        if self.current is None or self.current.generation != generation:
            return npurt.Code.STALE_GENERATION
        return None if self.current.epoch == epoch else npurt.Code.STALE_EPOCH

    def device_operations(self, operations: tuple[KvOperation, ...]) -> DeviceOperations:
        """Translate an operation list.

        A lane's tag is the transaction of the reservation that bound it, until it is released.
        """
        tags = dict(self.lane_tags)
        numbers: list[int] = []
        first, count = self._lanes()
        for operation in operations:
            verb, transaction = operation.verb, operation.transaction
            lane = operation.lane - first
            if not 0 <= lane < count:
                raise self._foreign(operation.lane)
            if verb == "RESERVE":
                tag = tags.setdefault(lane, transaction)
            elif verb == "RELEASE":
                tag = tags.pop(lane, 0)
            else:
                tag = tags.get(lane, 0)
            from_tokens, to_tokens = operation.from_tokens, operation.to_tokens
            numbers += (_VERBS[verb], lane, from_tokens, to_tokens, tag, transaction)
        array = (npurt.KvOp * len(operations))()
        _operations_of(len(operations)).pack_into(array, 0, *numbers)
        return array, tags

    def device_rows(self, batch: Sequence[SubmitRow | None], tags: Mapping[int, int]) -> list[int]:
        """Translate the rows of a batch for `SubmitForm.fill`; an inactive one is zeros (E15).

        ``tags`` are the lane tags when it is submitted.
        """
        numbers: list[int] = []
        first, count = self._lanes()
        for row in batch:
            if row is None:
                numbers += INACTIVE
                continue
            lane = row.lane - first
            if not 0 <= lane < count:
                raise self._foreign(row.lane)
            numbers += (lane, 1, len(row.tokens), row.start, tags.get(lane, 0))
        return numbers

    def _lanes(self) -> tuple[int, int]:
        """Return the number of the first lane and how many there are; none if not configured."""
        current = self.current
        return (0, 0) if current is None else (current.lane_first, current.lane_count)

    def _foreign(self, lane: int) -> InternalError:
        return InternalError(f"lane/{lane} does not belong to model/{self.number}")


@cache
def _operations_of(count: int) -> struct.Struct:
    """Return npurt_kv_op, field by field, so many times: ctypes takes several times as long."""
    return struct.Struct("@" + "4I2Q" * count)
