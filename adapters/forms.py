"""What a submit says to the device, in memory that is made once for each buffer.

A buffer has one job at a time, so its parameters are filled in again for each: the rows and what
they are to (D7, E15), generation and epoch they were decided for, the tag of the job.
"""

import ctypes
import struct
from collections.abc import Sequence
from functools import cache

from laneway.adapters import npurt
from laneway.adapters.binding import Answer
from laneway.adapters.calls import DeviceCalls

ROW_NUMBERS = 5
"""Numbers of one row: lane, 1 if it is active, tokens, KV length, tag of the sequence."""

INACTIVE = (0,) * ROW_NUMBERS


class SubmitForm:
    """The parameters of the submits of one buffer; for whoever holds the buffer."""

    def __init__(self, rows_max: int, *, source: ctypes.c_void_p, target: ctypes.c_void_p) -> None:
        """Make room for so many rows; ``source`` and ``target`` are the buffer's two objects."""
        self._lanes = (npurt.Lane * rows_max)()
        self._ticket = ctypes.c_uint64(0)
        self.params = npurt.SubmitParams(
            in_=source,
            out=target,
            lanes=self._lanes,
            lane_stride=ctypes.sizeof(npurt.Lane),
            csr_stride=ctypes.sizeof(npurt.CsrValue),
        )

    def fill(
        self,
        numbers: Sequence[int],
        csrs: ctypes.Array[npurt.CsrValue],
        *,
        bank: ctypes.c_void_p | None,
        generation: int,
        epoch: int,
        job: int,
        engine_mode: int = npurt.ENGINE_AUTO,
    ) -> None:
        """Say what the next submit says; ``numbers`` are ROW_NUMBERS for each row of the batch.

        ``generation`` and ``epoch`` are the device's. Raises: struct.error for more rows than fit.
        """
        rows = len(numbers) // ROW_NUMBERS
        _rows_of(rows).pack_into(self._lanes, 0, *numbers)
        params = self.params
        params.lane_count = rows
        params.csrs = csrs if len(csrs) else None
        params.csr_count = len(csrs)
        params.kv = bank
        params.expect_generation = generation
        params.expect_epoch = epoch
        params.client_tag = params.kv_txn = job
        params.engine_mode = engine_mode

    def submit(self, calls: DeviceCalls) -> tuple[Answer, int]:
        """Submit; return the answer and the ticket, 0 where there is none."""
        self._ticket.value = 0
        params, ticket = ctypes.byref(self.params), ctypes.byref(self._ticket)
        answer = calls.attempt("npurt_job_submit", params, ticket)
        return answer, self._ticket.value


@cache
def _rows_of(count: int) -> struct.Struct:
    """Return npurt_lane, field by field, so many times: ctypes takes several times as long."""
    return struct.Struct("@" + "4IQ" * count)
