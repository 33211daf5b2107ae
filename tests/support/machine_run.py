"""One run of whole engines on simulated boards over one journal, every invariant at every step.

A run may see several lives: an engine that was closed, or whose device is lost, is followed by a
fresh engine on a fresh board over the same journal file. ``act`` does one thing at a time, without
threads and on virtual time, so a run is a function of what it was told.
"""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import numpy as np
from support.fault_plans import corrupts
from support.proven import prove
from support.rig import are_alike
from support.text_model import Wish, check_result, text_calbin
from support.watched import WatchedJournal

from laneway.adapters import arena, npurt
from laneway.adapters.device import NpurtDevice
from laneway.adapters.simulator import open_device
from laneway.adapters.validating import ArtifactOptions
from laneway.engine import (
    Engine,
    Limits,
    Request,
    RequestError,
    RequestLostError,
    RequestRejectedError,
    Stream,
)
from laneway.engine.inputs import CloseRequested, Input, LoadRequested, UnloadRequested
from laneway.engine.invariants import check
from laneway.engine.ports import Step
from laneway.engine.state import State
from laneway.engine.watch import Watch
from laneway.journal import open_journal
from laneway.journal.replay import fold

ACTIONS_MAX = 50_000
OPTIONS = ArtifactOptions(golden_decode_steps=1, warmup_decode_steps=0)
"""Short trials, so that most jobs of a run are those of requests."""

WALL_NS = 1_700_000_000_000_000_000


@attrs.define
class Asked:
    """A stream, what it was asked for, and whether its client may be told less than all."""

    stream: Stream
    wish: Wish
    patient: bool


def open_stepped() -> NpurtDevice:
    """Open the simulator of most runs: time moves only when it is stepped."""
    return open_device("tiny?clock=virtual", options=OPTIONS)


class MachineRun:
    """Engines one after the other on ``folder``/run.db; the first is opened at once.

    ``open_board`` opens another device than the stepped simulator, which may know no faults, with
    ``source`` for another artifact: then nobody knows the answers. ``batches`` are those of the
    artifact. ``steps`` are all steps of all lives.
    """

    def __init__(
        self,
        folder: Path,
        *,
        plan: str = "",
        limits: Limits | None = None,
        load: bool = True,
        open_board: Callable[[], NpurtDevice] | None = None,
        source: Path | None = None,
        batches: tuple[int, ...] = (1, 4),
    ) -> None:
        arena.PROCESS = arena.Account()  # each run is a process of its own (E9)
        self.file = folder / "run.db"
        self.watch = Watch()
        self.lives = 0
        self._plan = plan
        self._limits = limits
        self._open_board = open_board if open_board is not None else open_stepped
        self._source = source if source is not None else text_calbin(batches)
        self.steps: list[Step] = []
        self._exact = source is None and not corrupts(plan)
        self._disturbed = bool(plan)
        self.open(load=load)

    # ------------------------------------------------------------------ lives

    def open(self, *, load: bool = True) -> None:
        """Begin a life: a fresh board, the same journal."""
        self.lives += 1
        self.asked: list[Asked] = []
        self._engine: Engine | None = None
        device = self._open_board()
        self.device = device
        if device.simulator is not None:
            device.simulator.set_faults(self._plan)
        self._journal = WatchedJournal(open_journal(self.file), self._see)
        limits = self._limits or Limits()
        if device.simulator is None:  # a canary due by time alone would be waited for in real time
            limits = attrs.evolve(limits, canary_idle_ns=0)
        self._engine = Engine(
            device=device,
            journal=self._journal,
            limits=limits,
            wall_clock=lambda: WALL_NS,
            draw_seed=lambda: 1,
            threads=False,
        )
        check(self.state)
        if load:
            number = self.state.next_model
            self.ask_load()
            self.act_until(lambda: number < self.state.next_model and not self._is_loading())

    def _see(self, steps: Sequence[Step]) -> None:
        self.steps += steps
        for step in steps:
            self.watch.take(step)
        if self._engine is not None:
            check(self.state)

    @property
    def engine(self) -> Engine:
        """The living engine."""
        assert self._engine is not None, "no engine was opened"
        return self._engine

    @property
    def state(self) -> State:
        """The engine's state, to look at."""
        return self.engine._state

    @property
    def lost(self) -> bool:
        """Whether the device was given up."""
        return self.state.device.state == "lost"

    def _is_loading(self) -> bool:
        busy = ("validating", "configuring", "warming")
        return any(model.state in busy for model in self.state.models.values())

    # ------------------------------------------------------------------ doing

    def submit(self, wish: Wish, *, deadline_s: float | None = None) -> Stream | None:
        """Hand in a request; None if it cannot even be turned into tokens."""
        request = Request(
            model="m",
            prompt=wish.prompt,
            max_tokens=wish.max_tokens,
            sampling=wish.sampling,
            stop=wish.stop,
            ignore_eos=wish.ignore_eos,
            deadline_s=deadline_s,
        )
        try:
            stream = self.engine.submit(request)
        except RequestRejectedError:
            return None
        self.asked.append(Asked(stream, wish, patient=deadline_s is None))
        return stream

    def cancel(self, which: int) -> None:
        """Cancel one of the requests of this life, whatever became of it."""
        if self.asked:
            one = self.asked[which % len(self.asked)]
            one.patient = False
            one.stream.cancel()

    def ask(self, make: Callable[[], Input]) -> None:
        """Let a caller say something without waiting for what follows."""
        self.engine._inbox.ask(make)

    def ask_load(self) -> None:
        """Ask for the model, perhaps a second time."""
        engine = self.engine

        def make() -> Input:
            engine._next_model += 1
            number = engine._next_model - 1
            return LoadRequested(model=number, alias="m", source=str(self._source))

        self.ask(make)

    def ask_unload(self) -> None:
        """Ask for the newest model's end, perhaps too early or twice."""
        self._disturbed = True
        number = self.state.next_model - 1
        self.ask(lambda: UnloadRequested(model=number))

    def set_faults(self, plan: str) -> None:
        """Give this board and those to come another fault plan."""
        self._plan = plan
        self._disturbed = self._disturbed or bool(plan)
        self._exact = self._exact and not corrupts(plan)
        if not self.device.calls.closed and self.device.simulator is not None:
            self.device.simulator.set_faults(plan)

    def act(self, count: int) -> int:
        """Do up to so many things; return how many there were."""
        for done in range(count):
            if not self.engine.advance():
                return done
        return count

    def act_until(self, done: Callable[[], bool]) -> None:
        """Act until ``done`` holds or nothing is left."""
        for _ in range(ACTIONS_MAX):
            if done() or not self.engine.advance():
                return
        raise AssertionError(f"the engine is still busy after {ACTIONS_MAX} actions")

    def let_time_pass(self, by_ns: int) -> None:
        """Move the board's clock, and what happens on it meanwhile."""
        if not self.device.calls.closed and self.device.simulator is not None:
            self.device.simulator.step_to(self.device.clock.now_ns() + by_ns)

    # ------------------------------------------------------------------ looking

    def check_board(self) -> None:
        """I2, E4: the board saw no mistake, and free memory holds nothing of anybody."""
        if self.device.calls.closed:
            return
        simulator = self.device.simulator
        if simulator is not None and self._violation_count():
            raise AssertionError(f"I2: the board saw {simulator.violations()}")
        for model in self.device._models.values():
            for number, held in model.buffers.items():
                buffer = self.state.buffers.get(number)
                if buffer is not None and buffer.state == "free":
                    memory = held.arena.view(0, (held.arena.byte_count,), np.uint8)
                    assert not memory.any(), f"E4: buffer/{number} is free and holds something"

    def _violation_count(self) -> int:
        """Return how many mistakes the board saw; asked often, so it reads none of them."""
        none, count = (npurt.Event * 1)(), ctypes.c_uint32(0)
        size = ctypes.sizeof(npurt.Event)
        self.device.calls.call("npurt_sim_violations", none, size, ctypes.byref(count))
        return count.value

    def settle(self) -> None:
        """Let everything end that will: then nobody waits and nothing is in flight."""
        self.act_until(lambda: False)
        assert not self.state.requests, f"I1: idle, yet {sorted(self.state.requests)} live"
        assert not self.state.jobs, f"idle, yet {sorted(self.state.jobs)} are in flight"

    # ------------------------------------------------------------------ ends

    def ask_close(self, *, drain: bool) -> None:
        """Ask for the end of this life without waiting for it."""
        self._disturbed = True
        self.ask(lambda: CloseRequested(drain=drain))

    def close(self, *, drain: bool = True) -> None:
        """End this life and hold every answer of it against a run alone."""
        self.check_board()
        self._disturbed = self._disturbed or not drain
        self.engine.close(drain=drain)
        assert self.state.device.state == "closed"
        self.watch.check_all_ended()
        assert self.engine._meter.failures == 0, "a step is not in the metrics"
        for one in self.asked:
            result = one.stream.result()
            seen = _read(one.stream)
            assert seen == result.tokens, f"I1: {seen} were delivered of {result}"
            if self._exact:
                check_result(one.wish, result)
            if one.patient and not self._disturbed:
                lost = isinstance(result.error, RequestLostError)
                assert not lost, f"nothing went wrong, yet {result}"
                assert result.finish_reason != "cancelled", result

    def drop(self) -> None:
        """Leave everything as it is and let go of the file; for runs that have failed."""
        self._journal.close()

    def prove(self) -> None:
        """I11: the journal is whole, replay gives the last state, deciding again the events."""
        with open_journal(self.file, read_only=True) as journal:
            report = prove(journal)
            folded = fold(journal)
        assert are_alike(folded, self.state), "I11: the fold is not the live state"
        assert report.steps == self.watch.step, "I11: not every step is in the file"


def _read(stream: Stream) -> tuple[int, ...]:
    """Return what a client read; the error at the end is what the result says too."""
    seen: list[int] = []
    try:
        for delta in stream:
            seen += [] if delta.token is None else [delta.token]
    except RequestError as told:
        assert told is stream.result().error
    return tuple(seen)
