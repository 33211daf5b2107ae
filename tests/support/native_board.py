"""Drive the simulated board through its C ABI alone: build it, open it, run jobs on it."""

import ctypes as c
import functools
import json
import mmap
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from laneway.adapters import npurt
from laneway.adapters.binding import Library, load_library
from laneway.adapters.calbin import pack
from laneway.adapters.npurt import Code

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "adapters" / "native"
FLAGS = (
    *("-std=c11", "-O2", "-D_GNU_SOURCE", "-pthread", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-Wl,-Bsymbolic"),
)
PREFILL, PREFILL_4, DECODE, DECODE_4 = range(4)
TOKENS, POSITIONS, LENGTHS, LOGITS, DIGEST = range(5)
RESERVE, COMMIT, ROLLBACK, RELEASE = 1, 2, 3, 4
QUEUED, H2D, EXEC, D2H, DONE, FAILED, ABORTED, LOST = range(1, 9)
STEP_ONE, STEP_TIME, STEP_TICKET, STEP_IDLE, STEP_KIND, STEP_END = range(1, 7)
CONTEXT, VOCAB, LANES = 64, 512, 8
FOREVER = (1 << 64) - 1


@functools.cache
def _compiled() -> tuple[Library, tempfile.TemporaryDirectory[str]]:
    compiler = shutil.which("cc")
    assert compiler is not None, "no C compiler, and no built simulator that is up to date"
    folder = tempfile.TemporaryDirectory(prefix="calsim-")
    path = Path(folder.name) / "libcalsim.so"
    sources = sorted(str(source) for source in NATIVE.glob("calsim_*.c"))
    subprocess.run([compiler, *FLAGS, "-o", str(path), *sources, "-lm"], check=True)
    return load_library(path), folder


def native_library() -> Library:
    """Open the installed simulator if it is newer than its sources, else one compiled now."""
    newest = max(source.stat().st_mtime for source in NATIVE.glob("*.[ch]"))
    for built in sorted((ROOT / "adapters").glob("_calsim*.so")):
        if built.stat().st_mtime >= newest:
            return load_library(built)
    return _compiled()[0]


class Pair:
    """An input and an output buffer with their memory."""

    def __init__(
        self,
        board: "Board",
        submodel: int,
        *,
        digest: bool = True,
        rows: int | None = None,
        width: int | None = None,
    ) -> None:
        self.board = board
        board.pairs.append(self)  # memory that jobs may still touch lives as long as the board
        self.rows = rows or (4 if submodel in (PREFILL_4, DECODE_4) else 1)
        self.width = width or (CONTEXT if submodel in (PREFILL, PREFILL_4) else 1)
        self.memory: dict[int, mmap.mmap] = {}
        self.in_ = board.create_buffer(submodel, npurt.IN)
        self.out = board.create_buffer(submodel, npurt.OUT)
        shapes = {TOKENS: 4 * self.width, POSITIONS: 4 * self.width, LENGTHS: 4, LOGITS: 2 * VOCAB}
        for tensor, row_bytes in (shapes | ({DIGEST: 8} if digest else {})).items():
            self.memory[tensor] = mmap.mmap(-1, self.rows * row_bytes)
            assert self.map(tensor) == Code.OK

    def address(self, tensor: int) -> int:
        # The export goes with the array: nothing keeps the mapping open, as a careless host would.
        return c.addressof(c.c_char.from_buffer(self.memory[tensor]))

    def map(self, tensor: int, *, address: int | None = None) -> int:
        where = self.address(tensor) if address is None else address
        buffer = self.out if tensor >= LOGITS else self.in_
        return self.board.code("npurt_buffer_map", buffer, tensor, where, len(self.memory[tensor]))

    def view(self, tensor: int, dtype: type[np.generic]) -> NDArray[np.generic]:
        values = np.frombuffer(self.memory[tensor], dtype)
        return values.reshape(self.rows, -1)

    def write(self, rows: Sequence[tuple[Sequence[int], int]]) -> None:
        """Fill the inputs: per row its tokens and the length before them."""
        for tensor in (TOKENS, POSITIONS, LENGTHS):
            self.view(tensor, np.int32)[:] = 0
        for row, (tokens, kv_len) in enumerate(rows):
            self.view(TOKENS, np.int32)[row, : len(tokens)] = tokens
            self.view(POSITIONS, np.int32)[row, : len(tokens)] = range(kv_len, kv_len + len(tokens))
            self.view(LENGTHS, np.int32)[row, 0] = len(tokens)

    def logits(self, row: int = 0) -> list[int]:
        return [int(bits) for bits in self.view(LOGITS, np.uint16)[row]]

    def digest(self, row: int = 0) -> int:
        return int(self.view(DIGEST, np.uint64)[row, 0])


class Board:
    """One opened board with one configured calbin and its bank."""

    def __init__(
        self, library: Library, folder: Path, config: str = "", *, exclusive: bool = False
    ) -> None:
        self.library = library
        self.pairs: list[Pair] = []
        self.device = c.c_void_p()
        params = npurt.OpenParams(config=config.encode())
        params.h.flags = int(exclusive)
        library.call("npurt_device_open", c.byref(params), c.byref(self.device))
        self.calbin, self.bank = c.c_void_p(), c.c_void_p()
        source = npurt.CalbinSource(path=str(folder).encode())
        self.ok("npurt_calbin_create", self.device, c.byref(source), c.byref(self.calbin))
        self.txn = 0
        self.generation = 0
        self.epoch = 1

    def code(self, name: str, *arguments: object) -> int:
        return self.library.attempt(name, *arguments).code

    def ok(self, name: str, *arguments: object) -> None:
        self.library.call(name, *arguments)

    def configure(self) -> "Board":
        result = npurt.ConfigureResult()
        params = npurt.ConfigureParams()
        self.ok("npurt_calbin_configure", self.calbin, c.byref(params), c.byref(result))
        self.generation = result.generation
        params_kv = npurt.KvParams(layout=2)
        self.ok("npurt_kv_open", self.calbin, c.byref(params_kv), c.byref(self.bank))
        return self

    def create_buffer(self, submodel: int, direction: int) -> c.c_void_p:
        buffer = c.c_void_p()
        spec = npurt.BufferSpec(submodel=submodel, direction=direction)
        self.ok("npurt_buffer_create", self.calbin, c.byref(spec), c.byref(buffer))
        return buffer

    def apply(self, *ops: tuple[int, int, int, int], txn: int | None = None) -> tuple[int, int]:
        """Apply (op, lane, from, to) with the lane's number + 1 as its sequence."""
        quoted = self.txn if txn is None else txn
        array = (npurt.KvOp * len(ops))(
            *(
                npurt.KvOp(op=op, lane=lane, from_len=a, to_len=b, seq_tag=lane + 1, txn=quoted)
                for op, lane, a, b in ops
            )
        )
        bad = c.c_uint32(99)
        size = c.sizeof(npurt.KvOp)
        code = self.code("npurt_kv_apply", self.bank, array, size, len(ops), c.byref(bad))
        return code, bad.value

    def submit(
        self,
        pair: Pair,
        rows: Sequence[tuple[int, int, int]],
        *,
        engine: int = 0,
        epoch: int | None = None,
        generation: int | None = None,
        registers: Sequence[tuple[int, int, int]] = (),
    ) -> tuple[int, int]:
        """Submit (lane, tokens, kv_len) per row and (id, row, value); return code and ticket."""
        csrs = (npurt.CsrValue * len(registers))(*(npurt.CsrValue(*one) for one in registers))
        lanes = (npurt.Lane * len(rows))(
            *(
                npurt.Lane(lane=lane, active=int(n > 0), tokens=n, kv_len=k, seq_tag=lane + 1)
                for lane, n, k in rows
            )
        )
        params = npurt.SubmitParams(
            in_=pair.in_,
            out=pair.out,
            kv=self.bank,
            lanes=lanes,
            lane_count=len(rows),
            lane_stride=c.sizeof(npurt.Lane),
            csrs=c.cast(csrs, c.POINTER(npurt.CsrValue)) if registers else None,
            csr_count=len(registers),
            csr_stride=c.sizeof(npurt.CsrValue),
            engine_mode=engine,
            expect_generation=self.generation if generation is None else generation,
            expect_epoch=self.epoch if epoch is None else epoch,
            client_tag=77,
            kv_txn=self.txn,
        )
        ticket = c.c_uint64(99)
        code = self.code("npurt_job_submit", self.device, c.byref(params), c.byref(ticket))
        return code, ticket.value

    def start(self, pair: Pair, rows: Sequence[tuple[int, Sequence[int], int]]) -> int:
        """Reserve and submit (lane, tokens, kv_len) per row; return the ticket."""
        self.txn += 1
        pair.write([(tokens, kv_len) for _, tokens, kv_len in rows])
        ops = [(RESERVE, lane, k, k + len(tokens)) for lane, tokens, k in rows if tokens]
        assert self.apply(*ops) == (Code.OK, 99)
        code, ticket = self.submit(pair, [(lane, len(tokens), k) for lane, tokens, k in rows])
        assert code == Code.OK
        return ticket

    def run(self, pair: Pair, rows: Sequence[tuple[int, Sequence[int], int]]) -> npurt.Completion:
        """Run one job to its end, commit and retire."""
        ticket = self.start(pair, rows)
        self.step(STEP_IDLE)
        result = self.result(ticket)
        assert result.state == DONE
        ops = [(COMMIT, lane, k, k + len(tokens)) for lane, tokens, k in rows if tokens]
        assert self.apply(*ops) == (Code.OK, 99)
        self.retire(pair, ticket)
        return result

    def retire(self, pair: Pair, ticket: int) -> None:
        """Retire a job and restore its buffers, as a host has to before it uses them again."""
        self.ok("npurt_job_retire", self.device, ticket)
        for buffer in (pair.in_, pair.out):
            self.ok("npurt_buffer_restore", buffer, npurt.RESTORE_SLICES | npurt.RESTORE_TENSORS)

    def step(self, how: int, argument: int = 0) -> int:
        fired = c.c_uint32(0)
        self.ok("npurt_sim_step", self.device, how, argument, c.byref(fired))
        return fired.value

    def state(self, ticket: int) -> int:
        state = npurt.JobState()
        self.ok("npurt_job_poll", self.device, ticket, c.byref(state))
        return int(state.state)

    def flags(self, ticket: int) -> int:
        state = npurt.JobState()
        self.ok("npurt_job_poll", self.device, ticket, c.byref(state))
        return int(state.h.flags)

    def result(self, ticket: int) -> npurt.Completion:
        completion = npurt.Completion()
        self.ok("npurt_job_result", self.device, ticket, c.byref(completion))
        return completion

    def wait(self, tickets: Sequence[int], timeout_ns: int) -> tuple[int, int]:
        which = c.c_uint32(99)
        array = (c.c_uint64 * len(tickets))(*tickets)
        wait = (array, len(tickets), timeout_ns, c.byref(which))
        return self.code("npurt_job_wait", self.device, *wait), which.value

    def lane(self, lane: int) -> npurt.KvLaneInfo:
        told = npurt.KvLaneInfo()
        self.ok("npurt_kv_lane", self.bank, lane, c.byref(told))
        return told

    def counters(self) -> npurt.Counters:
        counters = npurt.Counters()
        self.ok("npurt_device_counters", self.device, c.byref(counters))
        return counters

    def health(self) -> npurt.Health:
        health = npurt.Health()
        self.ok("npurt_device_health", self.device, c.byref(health))
        return health

    def now(self) -> int:
        ns = c.c_uint64(0)
        self.ok("npurt_clock_now", self.device, c.byref(ns))
        return ns.value

    def memory(self, chip: int = 0) -> npurt.Memory:
        told = npurt.Memory()
        self.ok("npurt_device_memory", self.device, chip, c.byref(told))
        return told

    def describe(self) -> npurt.DeviceDesc:
        told = npurt.DeviceDesc()
        self.ok("npurt_sim_describe", self.device, c.byref(told))
        return told

    def try_configure(self, *, timeout_ns: int = 0) -> tuple[int, npurt.ConfigureResult]:
        """Configure the calbin without a bank; return code and result."""
        result = npurt.ConfigureResult()
        params = npurt.ConfigureParams(timeout_ns=timeout_ns)
        code = self.code("npurt_calbin_configure", self.calbin, c.byref(params), c.byref(result))
        return code, result

    def give_back(self, *pairs: Pair) -> None:
        """Destroy buffers, close the bank; the calbin's handle stays."""
        for pair in pairs:
            for buffer in (pair.in_, pair.out):
                self.ok("npurt_buffer_destroy", buffer)
        self.ok("npurt_kv_close", self.bank)
        self.bank = c.c_void_p()

    def scope(self, level: int) -> npurt.ResetScope:
        scope = npurt.ResetScope()
        self.ok("npurt_reset_describe", self.device, level, c.byref(scope))
        return scope

    def reset(
        self, level: int, *, only_code: int = Code.OK, timeout_ns: int = 0, chips: int = 0
    ) -> npurt.ResetReport:
        report = npurt.ResetReport()
        params = npurt.ResetParams(level=level, timeout_ns=timeout_ns, chip_mask=chips)
        assert (
            self.code("npurt_reset_run", self.device, c.byref(params), c.byref(report)) == only_code
        )
        assert report.status == only_code
        return report

    def faults(self, plan: str, *, arm: bool = True) -> None:
        self.ok("npurt_sim_faults", self.device, plan.encode())
        if arm:
            self.ok("npurt_sim_arm", self.device)

    def violations(self) -> list[str]:
        return [text for _, text in self.blames()]

    def blames(self) -> list[tuple[int, str]]:
        """Return ticket and text of each violation."""
        events = (npurt.Event * 16)()
        count = c.c_uint32(16)
        size = c.sizeof(npurt.Event)
        self.ok("npurt_sim_violations", self.device, events, size, c.byref(count))
        return [(event.ticket, event.text.decode()) for event in events[: count.value]]

    def events(self) -> list[tuple[int, int, str]]:
        """Take kind, ticket and text of every event that waits."""
        taken = []
        event = npurt.Event()
        while self.code("npurt_device_event", self.device, c.byref(event)) == Code.OK:
            taken.append((event.kind, event.ticket, event.text.decode()))
        return taken

    def trace(self) -> bytes:
        need = c.c_uint64(0)
        self.ok("npurt_sim_trace", self.device, None, 0, c.byref(need))
        text = c.create_string_buffer(need.value)
        self.ok("npurt_sim_trace", self.device, text, len(text), None)
        return text.value

    def oracle(self, folder: Path, tokens: Sequence[int]) -> tuple[list[int], int]:
        logits, digest = (c.c_uint16 * VOCAB)(), c.c_uint64(0)
        ids = (c.c_int32 * len(tokens))(*tokens)
        self.ok("npurt_sim_oracle", str(folder).encode(), ids, len(tokens), logits, c.byref(digest))
        return list(logits), digest.value

    def close(self) -> None:
        self.code("npurt_device_close", self.device)


OpenBoard = Callable[..., Board]


@attrs.frozen
class Bench:
    """A library and a packed model; boards opened on them are closed at the end."""

    library: Library
    calbin: Path

    @contextmanager
    def opening(self) -> Iterator[OpenBoard]:
        opened: list[Board] = []

        def make(config: str = "", *, configured: bool = True) -> Board:
            board = Board(self.library, self.calbin, config)
            opened.append(board)
            return board.configure() if configured else board

        yield make
        for board in opened:
            board.close()


def vary(bench: Bench, folder: Path, **changes: Any) -> Bench:
    """Copy a bench's calbin and change keys of its manifest."""
    calbin = Path(shutil.copytree(bench.calbin, folder / "varied"))
    manifest = json.loads((calbin / "manifest.json").read_text())
    (calbin / "manifest.json").write_text(json.dumps(manifest | changes))
    return Bench(bench.library, calbin)


def make_bench(folder: Path) -> Bench:
    calbin = folder / "tiny-moe"
    pack(ROOT / "models" / "tiny-moe", calbin, batch=(1, 4), context=CONTEXT, lanes=LANES)
    return Bench(native_library(), calbin)
