"""What the adapter holds for one load of one artifact, from validation to release.

Here the engine's numbers meet the device's: lanes are numbered over the whole journal and the
device counts its bank from 0; epoch and generation are the engine's own and the device has others
(decision 9). Nothing else translates.
"""

import ctypes
import struct
from contextlib import ExitStack

import attrs

from laneway.adapters import npurt
from laneway.adapters.buffers import Buffer, SubmodelPart
from laneway.adapters.trials import TrialRun
from laneway.engine.effects import KvOperation, SubmitJob
from laneway.engine.errors import InternalError
from laneway.engine.ports import TextPort

_KV_OP = struct.Struct("@4I2Q")
_LANE = struct.Struct("@4IQ")
"""npurt_kv_op and npurt_lane, field by field: ctypes takes several times as long for each."""

_VERBS = npurt.KV_VERBS


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

    def lane_index(self, lane: int) -> int:
        """Return the device's index of a lane. Raises: InternalError if it is not ours."""
        current = self.current
        if current is None or not 0 <= lane - current.lane_first < current.lane_count:
            raise InternalError(f"lane/{lane} does not belong to model/{self.number}")
        return lane - current.lane_first

    def device_operations(
        self, operations: tuple[KvOperation, ...]
    ) -> tuple[ctypes.Array[npurt.KvOp], dict[int, int]]:
        """Translate an operation list; tell also the lane tags once it has been applied.

        A lane's tag is the transaction of the reservation that bound it, until it is released.
        """
        tags = dict(self.lane_tags)
        array = (npurt.KvOp * len(operations))()
        at = 0
        for operation in operations:
            lane, verb = self.lane_index(operation.lane), operation.verb
            if verb == "RESERVE":
                tag = tags.setdefault(lane, operation.transaction)
            elif verb == "RELEASE":
                tag = tags.pop(lane, 0)
            else:
                tag = tags.get(lane, 0)
            _KV_OP.pack_into(
                array,
                at,
                _VERBS[verb],
                lane,
                operation.from_tokens,
                operation.to_tokens,
                tag,
                operation.transaction,
            )
            at += _KV_OP.size
        return array, tags

    def device_rows(self, effect: SubmitJob) -> ctypes.Array[npurt.Lane]:
        """Translate the rows of a job; entry i is row i, all zero where that is inactive (E15)."""
        rows = effect.batch_rows
        array = (npurt.Lane * len(rows))()
        tags = self.lane_tags
        for place, row in enumerate(rows):
            if row is None:
                continue
            lane = self.lane_index(row.lane)
            _LANE.pack_into(
                *(array, place * _LANE.size, lane, 1),
                *(len(row.tokens), row.start, tags.get(lane, 0)),
            )
        return array
