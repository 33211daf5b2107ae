"""What a library was asked to run, seen at the C ABI and nowhere else.

The log stands between a caller (the adapter, or a loop in a test) and the library: it remembers
which memory was mapped to which buffer, and reads tokens, positions and rows of every accepted
submit out of that memory. So two callers can be compared in what reached the device.
"""

import ctypes
from unittest import mock

import attrs
import numpy as np

from laneway.adapters import npurt
from laneway.adapters.binding import Answer, Library

TOKENS, POSITIONS, LENGTHS = range(3)


@attrs.frozen
class Job:
    """One row that the device accepted.

    ``sequence`` counts the prefills so far: it names the sequence that has the lane.
    """

    task: str
    sequence: int
    lane: int
    tokens: tuple[int, ...]
    positions: tuple[int, ...]


@attrs.frozen
class _Buffer:
    task: str
    maps: dict[int, tuple[int, int]] = attrs.Factory(dict)


class SubmitLog:
    """Watches one library object: the jobs in the order of their submits, and every mapping."""

    def __init__(self, library: Library) -> None:
        self.jobs: list[Job] = []
        self.refused: list[int] = []
        self.mapped: list[tuple[int, int]] = []
        """Address and bytes of every mapping ever made, in order."""
        self._buffers: dict[int | None, _Buffer] = {}
        self._sequences: dict[int, int] = {}
        self._prefills = 0
        self._attempt = library.attempt
        mock.patch.object(library, "attempt", self._watch).start()

    def clear(self) -> None:
        """Forget the jobs so far."""
        self.jobs.clear()
        self.refused.clear()
        self._sequences.clear()
        self._prefills = 0

    def _watch(self, name: str, *arguments: object) -> Answer:
        answer = self._attempt(name, *arguments)
        seen = getattr(self, f"_see_{name.removeprefix('npurt_')}", None)
        if seen is not None:
            seen(answer, *arguments)
        return answer

    def _see_buffer_create(
        self, answer: Answer, calbin: ctypes.c_void_p, spec: object, out: object
    ) -> None:
        if answer.ok:
            info = npurt.SubmodelInfo()
            index = spec._obj.submodel  # type: ignore[attr-defined]
            assert self._attempt("npurt_calbin_submodel", calbin, index, ctypes.byref(info)).ok
            self._buffers[out._obj.value] = _Buffer(npurt.TASKS[info.task])  # type: ignore[attr-defined]

    def _see_buffer_map(
        self, answer: Answer, buffer: ctypes.c_void_p, tensor: int, address: int, size: int
    ) -> None:
        if answer.ok:
            self._buffers[buffer.value].maps[tensor] = (address, size)
            self.mapped.append((address, size))

    def _see_job_submit(
        self, answer: Answer, device: ctypes.c_void_p, params: object, ticket: object
    ) -> None:
        if not answer.ok:
            self.refused.append(answer.code)
            return
        asked: npurt.SubmitParams = params._obj  # type: ignore[attr-defined]
        buffer = self._buffers[asked.in_]
        inputs = [
            np.frombuffer(ctypes.string_at(*buffer.maps[tensor]), np.int32)
            for tensor in (TOKENS, POSITIONS, LENGTHS)
        ]
        lengths = inputs[2]
        tokens, positions = (array.reshape(len(lengths), -1) for array in inputs[:2])
        for row in range(asked.lane_count):
            lane = asked.lanes[row]
            assert lane.tokens == lengths[row]
            if not lane.active:
                continue
            if lane.kv_len == 0:
                self._sequences[lane.lane] = self._prefills
                self._prefills += 1
            self.jobs.append(
                Job(
                    buffer.task,
                    self._sequences[lane.lane],
                    int(lane.lane),
                    tuple(tokens[row, : lane.tokens].tolist()),
                    tuple(positions[row, : lane.tokens].tolist()),
                )
            )
