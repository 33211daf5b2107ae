"""Drive an opened device call by call, for the checks of the isolation runner.

No engine stands between: a check decides itself which job runs on which bank, when it is waited
for, and looks at everything the device says. Each job has a buffer of its own; each sequence has a
lane of its own from its first job until it is released. A ledger counts what was submitted and how
it ended, apart from the device's own counters.

A device whose clock is stepped is moved here, one event at a time; any other is waited for, within
a bound.

Source: R5.2, E3, E14, E17, D2, D3.
"""

import ctypes
import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

from laneway.adapters import npurt
from laneway.adapters.arena import Graveyard
from laneway.adapters.buffers import (
    Buffer,
    SubmodelPart,
    create_buffer,
    csr_values,
    destroy_buffer,
    read_submodel,
)
from laneway.adapters.calbin import check_artifact
from laneway.adapters.device import NpurtDevice
from laneway.adapters.facts import read_chips, read_health
from laneway.adapters.forms import INACTIVE
from laneway.adapters.golden import GoldenRun, load_golden
from laneway.adapters.npurt import Code
from laneway.adapters.results import read_logits
from laneway.adapters.rooted import open_root
from laneway.engine.effects import SubmitRow

JOB_TIMEOUT_S = 30.0
SLICE_NS = 100_000_000
CONFIGURE_TIMEOUT_NS = 120_000_000_000
MEMORY_TOLERANCE_BYTES = 64 << 20
_WHOLE = npurt.ENDED | npurt.OUTPUT_VALID
_APPLIED = 1
_COUNTED = ("submitted", "pending", "running", "finished", "left", "failed", "aborted")


class CheckFailed(Exception):  # noqa: N818 - a verdict, not an error of ours
    """What was checked is not so; the words say what was seen."""


@attrs.frozen
class Finding:
    """What a check says of one capability; ``result`` is passed, failed or skipped."""

    capability: str
    result: str = "passed"
    value: int = 0
    note: str = ""

    @classmethod
    def skip(cls, capability: str, note: str) -> "Finding":
        """Say that there was nothing to check; no record is made of it."""
        return cls(capability, result="skipped", note=note)


@attrs.define(eq=False)
class Sequence:
    """The tokens that one lane holds."""

    lane: int
    tag: int
    length: int = 0


@attrs.frozen(eq=False)
class Piece:
    """One row of a job: so many tokens behind what its sequence holds."""

    sequence: Sequence
    tokens: tuple[int, ...]


@attrs.define(eq=False)
class Flight:
    """A job that was accepted; ``places`` are the rows of its pieces."""

    ticket: int
    buffer: Buffer
    pieces: tuple[Piece, ...]
    places: tuple[int, ...]
    txn: int


@attrs.frozen(eq=False)
class Output:
    """What a job that is done gave, row by row; digests are None where the calbin has none."""

    logits: tuple[NDArray[np.uint16], ...]
    digests: tuple[int | None, ...]
    engine: int
    times: npurt.Times

    def equals(self, other: "Output") -> bool:
        """Whether every bit is the same."""
        same = len(self.logits) == len(other.logits) and self.digests == other.digests
        return same and all(map(np.array_equal, self.logits, other.logits))


@attrs.define
class Ledger:
    """What was asked of the device here, and how it ended."""

    submitted: int = 0
    finished: int = 0


class Probed:
    """One opened device, with one calbin configured on it; nobody else uses it.

    Raises: DeviceError or ModelError when that is not possible.
    """

    def __init__(self, device: NpurtDevice, folder: Path) -> None:
        self.device = device
        self.calls = device.calls
        self.facts = device.describe()
        self.ledger = Ledger()
        self.chips = tuple(chip for chip in range(8) if self.facts.chip_mask >> chip & 1)
        self.opening = self.counters()
        self._used_before = self._used_bytes()
        artifact = check_artifact(folder)
        self.sha256 = artifact.sha256
        golden = load_golden(open_root(folder), artifact.manifest.shape, context=None)
        self.calbin = ctypes.c_void_p()
        source = npurt.CalbinSource(
            path=str(artifact.folder).encode(), expect_sha256=artifact.sha256.encode()
        )
        self.calls.call("npurt_calbin_create", ctypes.byref(source), ctypes.byref(self.calbin))
        self.info = npurt.CalbinInfo()
        self._call("npurt_calbin_describe", self.calbin, ctypes.byref(self.info))
        self.parts = tuple(
            read_submodel(self.calls, self.calbin, index)
            for index in range(self.info.submodel_count)
        )
        self.golden = tuple(run for run in golden.runs if self._fits(run))
        self._graveyard = Graveyard()
        self._buffers: list[Buffer] = []
        self._free: list[Buffer] = []
        self._modes: dict[int, int] = {}
        self._flights: list[Flight] = []
        self._lanes = list(range(self.info.max_lanes))
        self._number = 0
        self._configure(npurt.KV_LAYOUTS[artifact.manifest.kv_layout])

    def _configure(self, kv_layout: int) -> None:
        result = npurt.ConfigureResult()
        params = npurt.ConfigureParams(timeout_ns=CONFIGURE_TIMEOUT_NS)
        self._call(
            "npurt_calbin_configure", self.calbin, ctypes.byref(params), ctypes.byref(result)
        )
        self._generation, self._epoch = result.generation, result.device_epoch
        self.bank = ctypes.c_void_p()
        kv = npurt.KvParams(layout=kv_layout, lanes=self.info.max_lanes)
        self._call("npurt_kv_open", self.calbin, ctypes.byref(kv), ctypes.byref(self.bank))
        if self.device.simulator is not None:
            self.device.simulator.arm()

    def _fits(self, run: GoldenRun) -> bool:
        longest = max((part.tokens_max for part in self.parts if part.task == "prefill"), default=0)
        return len(run.prompt) <= longest and run.row_count <= self.info.max_context

    def _call(self, name: str, *arguments: object) -> None:
        self.calls.library.call(name, *arguments)

    # ---------------------------------------------------------------------- looking

    def counters(self) -> dict[str, int]:
        """Read the job counters that the device tells."""
        return dict(read_health(self.calls, self.chips).counters)

    def now_ns(self) -> int:
        """Return the device's time."""
        now = ctypes.c_uint64(0)
        self.calls.call("npurt_clock_now", ctypes.byref(now))
        return now.value

    def poll(self, flight: Flight) -> npurt.JobState:
        """Return what the device says of a job."""
        state = npurt.JobState()
        self.calls.call("npurt_job_poll", flight.ticket, ctypes.byref(state))
        return state

    def part(self, task: str, *, rows: int = 1, tokens: int = 1) -> SubmodelPart | None:
        """Return the smallest submodel of a task that takes so many rows and tokens."""
        fitting = [
            part
            for part in self.parts
            if part.task == task and part.batch_max >= rows and part.tokens_max >= tokens
        ]
        return min(fitting, key=lambda part: (part.batch_max, part.tokens_max), default=None)

    def _used_bytes(self) -> tuple[int, ...]:
        return tuple(chip.used_bytes for chip in read_chips(self.calls, self.chips))

    # ---------------------------------------------------------------------- jobs

    def open(self) -> Sequence:
        """Return a new sequence on the lowest empty lane. Raises: CheckFailed when none is left."""
        if not self._lanes:
            raise CheckFailed(f"all {self.info.max_lanes} lanes are in use")
        self._number += 1
        self._lanes.sort()
        return Sequence(self._lanes.pop(0), self._number)

    def start(
        self, pieces: Items[Piece], *, engine: int = npurt.ENGINE_AUTO, forced: bool = False
    ) -> Flight:
        """Reserve and submit one job. Raises: CheckFailed if the device does not take it.

        ``engine`` fixes buffer and job to a bank; ``forced`` leaves the buffer free and forces the
        job alone.
        """
        tokens = max(len(piece.tokens) for piece in pieces)
        decodes = tokens == 1 and all(piece.sequence.length for piece in pieces)
        part = self.part("decode" if decodes else "prefill", rows=len(pieces), tokens=tokens)
        if part is None:
            raise CheckFailed(f"no submodel takes {len(pieces)} rows of {tokens} tokens")
        buffer = self._take_buffer(part, npurt.ENGINE_AUTO if forced else engine)
        self._number += 1
        txn = self._number
        self._apply("RESERVE", pieces, txn)
        places = _places(part, pieces)
        rows: list[SubmitRow | None] = [None] * (max(places) + 1)
        for place, piece in zip(places, pieces, strict=True):
            rows[place] = SubmitRow(
                lane=piece.sequence.lane,
                owner=0,
                tokens=piece.tokens,
                start=piece.sequence.length,
                sampling=None,
            )
        buffer.fill(rows, vocabulary=self.info.vocab, positions_max=self.info.max_context)
        ticket = self._submit(buffer, dict(zip(places, pieces, strict=True)), rows, engine, txn)
        flight = Flight(ticket, buffer, tuple(pieces), places, txn)
        buffer.ticket = flight.ticket
        self.ledger.submitted += 1
        self._flights.append(flight)
        return flight

    def _take_buffer(self, part: SubmodelPart, engine: int) -> Buffer:
        for buffer in self._free:
            if buffer.submodel is part and self._modes[buffer.number] == engine:
                self._free.remove(buffer)
                return buffer
        number = len(self._buffers) + 1
        buffer = create_buffer(self.calls, self.calbin, number, part, engine_mode=engine)
        self._buffers.append(buffer)
        self._modes[number] = engine
        return buffer

    def _apply(self, verb: str, pieces: Items[Piece], txn: int) -> None:
        array = (npurt.KvOp * len(pieces))()
        for entry, piece in zip(array, pieces, strict=True):
            sequence = piece.sequence
            entry.op, entry.lane = npurt.KV_VERBS[verb], sequence.lane
            entry.from_len, entry.to_len = sequence.length, sequence.length + len(piece.tokens)
            if verb == "RELEASE":
                entry.to_len = 0
            entry.seq_tag, entry.txn = sequence.tag, txn
        bad = ctypes.c_uint32(0)
        size = ctypes.sizeof(npurt.KvOp)
        answer = self.calls.library.attempt(
            "npurt_kv_apply", self.bank, array, size, len(array), ctypes.byref(bad)
        )
        if not answer.ok:
            raise CheckFailed(f"{verb} of lane {array[0].lane}: {answer.reason}")

    def _submit(
        self,
        buffer: Buffer,
        pieces: Mapping[int, Piece],
        batch: Items[SubmitRow | None],
        engine: int,
        txn: int,
    ) -> int:
        numbers: list[int] = []
        for place in range(len(batch)):
            piece = pieces.get(place)
            if piece is None:
                numbers += INACTIVE
            else:
                sequence = piece.sequence
                numbers += (sequence.lane, 1, len(piece.tokens), sequence.length, sequence.tag)
        buffer.form.fill(
            numbers,
            csr_values(buffer.submodel, batch),
            bank=self.bank,
            generation=self._generation,
            epoch=self._epoch,
            job=txn,
            engine_mode=engine,
        )
        answer, ticket = buffer.form.submit(self.calls)
        if answer.ok and ticket:
            return ticket
        raise CheckFailed(f"with {len(self._flights)} in flight: {answer.reason}")

    def wait(self, flights: Items[Flight]) -> Flight:
        """Return one of the jobs that is terminal. Raises: CheckFailed when none becomes so."""
        deadline = time.monotonic() + JOB_TIMEOUT_S
        while time.monotonic() < deadline:
            ended = self._look(flights) if self.device.stepped else self._wait(flights)
            if ended is not None:
                return ended
            if self.device.stepped and not self.step():
                break
        ended = self._look(flights)  # once more before a completion counts as missing (D3)
        if ended is None:
            raise CheckFailed(f"{len(flights)} jobs in flight, and none of them ends")
        return ended

    def _look(self, flights: Items[Flight]) -> Flight | None:
        ended = (each for each in flights if self.poll(each).h.flags & npurt.TERMINAL)
        return next(ended, None)

    def step(self) -> bool:
        """Let the next event of a stepped device happen; return False if there is none."""
        simulator = self.device.simulator
        return simulator is not None and simulator.step_event()

    def _wait(self, flights: Items[Flight]) -> Flight | None:
        """Wait for a slice of time."""
        tickets = (ctypes.c_uint64 * len(flights))(*(flight.ticket for flight in flights))
        which = ctypes.c_uint32(0)
        answer = self.calls.attempt(
            "npurt_job_wait", tickets, len(tickets), SLICE_NS, ctypes.byref(which)
        )
        if answer.code in (Code.WAIT_TIMEOUT, Code.INTERRUPTED):
            return None
        if not answer.ok:
            raise CheckFailed(answer.reason)
        return flights[which.value]

    def finish(self, flight: Flight) -> Output:
        """Take the output of a job that is terminal, commit, and give its buffer back.

        Raises: CheckFailed if it did not end well.
        """
        done = self._result(flight)
        state = npurt.JOB_STATES.get(done.state, str(done.state))
        if done.state != npurt.JOB_DONE or done.h.flags & _WHOLE != _WHOLE or done.status:
            raise CheckFailed(
                f"job {flight.ticket} ended {state}: {npurt.code_name(done.status)}, flags"
                f" {done.h.flags}"
            )
        if done.kv_effect != _APPLIED:
            effect = npurt.KV_EFFECTS.get(done.kv_effect, "?")
            raise CheckFailed(f"job {flight.ticket} left its KV {effect}")
        output = self._read(flight, done)
        self._apply("COMMIT", flight.pieces, flight.txn)
        for piece in flight.pieces:
            piece.sequence.length += len(piece.tokens)
        self.calls.call("npurt_job_retire", flight.ticket)
        for pointer in flight.buffer.pointers.values():
            self._call(
                "npurt_buffer_restore", pointer, npurt.RESTORE_SLICES | npurt.RESTORE_TENSORS
            )
        flight.buffer.wipe()
        flight.buffer.ticket = 0
        self._free.append(flight.buffer)
        self._flights.remove(flight)
        self.ledger.finished += 1
        return output

    def _result(self, flight: Flight) -> npurt.Completion:
        """Return how a job ended. Raises: CheckFailed if it was told to have ended and has not."""
        done = npurt.Completion()
        answer = self.calls.attempt("npurt_job_result", flight.ticket, ctypes.byref(done))
        if not answer.ok:
            raise CheckFailed(f"job {flight.ticket} was told done too early: {answer.reason}")
        return done

    def _read(self, flight: Flight, done: npurt.Completion) -> Output:
        rows = flight.places
        logits = read_logits(flight.buffer, self.info.vocab)
        digest = flight.buffer.output("kv_digest")
        told = None if digest is None else digest.reshape(-1)
        return Output(
            logits=tuple(logits[row].copy() for row in rows),
            digests=tuple(None if told is None else int(told[row]) for row in rows),
            engine=done.engine_used,
            times=npurt.Times.from_buffer_copy(done.times),
        )

    def run(self, piece: Piece, *, engine: int = npurt.ENGINE_AUTO) -> Output:
        """Run one job alone."""
        flight = self.start((piece,), engine=engine)
        return self.finish(self.wait((flight,)))

    def release(self, sequence: Sequence) -> None:
        """Give a sequence's lane back."""
        self._apply("RELEASE", (Piece(sequence, ()),), 0)
        self._lanes.append(sequence.lane)

    # ---------------------------------------------------------------------- ending

    def finish_all(self) -> None:
        """Let everything in flight end, whatever became of it.

        Raises: CheckFailed when it does not, or is not known to be quiet afterwards.
        """
        while self._flights:
            flight = self.wait(self._flights)
            done = self._result(flight)
            if not done.h.flags & npurt.QUIESCENT:
                raise CheckFailed(f"job {flight.ticket} never became quiescent")
            self.calls.call("npurt_job_retire", flight.ticket)
            self._flights.remove(flight)

    def close(self) -> None:
        """Leave the device as it was found, and make sure of it.

        Raises: CheckFailed naming what is left; DeviceError.
        """
        if self._flights:
            raise CheckFailed(f"{len(self._flights)} jobs are not accounted for")
        for buffer in self._buffers:
            destroy_buffer(self.calls, buffer, self._graveyard)
        self._call("npurt_kv_close", self.bank)
        self._call("npurt_calbin_release", self.calbin)
        health = read_health(self.calls, self.chips)
        wrong = [f"health is {health.state}"] if health.state != "ok" else []
        grown = [
            now - before
            for now, before in zip(self._used_bytes(), self._used_before, strict=True)
            if now > before + MEMORY_TOLERANCE_BYTES
        ]
        wrong += [f"{grown[0]} bytes were not given back"] if grown else []
        simulator = self.device.simulator
        violations = simulator.violations() if simulator is not None else ()
        wrong += [f"violation {violations[0].text}"] if violations else []
        if wrong:
            raise CheckFailed(f"the device is not clean afterwards: {', '.join(wrong)}")


def told_counters(counters: dict[str, int]) -> dict[str, int]:
    """Keep the counters of jobs. Raises: CheckFailed if the device does not tell one of them."""
    missing = [name for name in _COUNTED if name not in counters]
    if missing:
        raise CheckFailed(f"the device does not count {', '.join(missing)}")
    return {name: counters[name] for name in _COUNTED}


def _places(part: SubmodelPart, pieces: Items[Piece]) -> tuple[int, ...]:
    """Return the row of each piece: that of its lane where rows are fixed, else its own (E15)."""
    if not part.fixed_rows:
        return tuple(range(len(pieces)))
    return tuple(piece.sequence.lane % part.batch_max for piece in pieces)
