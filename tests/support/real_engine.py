"""The whole engine on a simulated board, with everything that reached the board in a log."""

from collections import deque
from collections.abc import Iterable
from pathlib import Path

import attrs
from support.asking import Ask
from support.proven import prove
from support.submit_log import Job, SubmitLog
from support.synchronous import Arrival

from laneway.adapters import open_device
from laneway.adapters.arena import Arena
from laneway.adapters.device import NpurtDevice
from laneway.engine import Engine, Result, Stream
from laneway.engine.inputs import CancelRequested, RequestSubmitted, ResetFinished
from laneway.engine.limits import Limits
from laneway.engine.ports import Step
from laneway.engine.snapshot import Snapshot
from laneway.engine.watch import Watch
from laneway.journal import Journal, open_journal
from laneway.journal.port import ReadableJournal

ACTIONS_MAX = 200_000
PATIENCE_S = 60.0


class RealEngine:
    """One engine on one board with one model, ``m``, loaded; the log begins after the load.

    It takes one job of one row at a time, the order of a plain submit-and-wait loop (R5.1), unless
    ``together``; and nobody's jobs but theirs who asked, unless ``canaries``.
    """

    def __init__(
        self,
        calbin: Path,
        *,
        url: str = "sim:tiny?clock=virtual",
        journal: Journal | None = None,
        limits: Limits | None = None,
        together: bool = False,
        canaries: bool = False,
    ) -> None:
        chosen = limits if limits is not None else Limits()
        if not canaries:
            chosen = attrs.evolve(chosen, canary_jobs=0, canary_idle_ns=0)
        if not together:
            chosen = attrs.evolve(chosen, inflight_jobs_max=1, batch_rows_max=1)
        device = open_device(url)
        assert isinstance(device, NpurtDevice) and device.simulator is not None
        self.device = device
        self.simulator = device.simulator
        self.log = SubmitLog(device.calls.library)
        self.journal = journal if journal is not None else open_journal()
        self.engine = Engine(
            device=device,
            journal=self.journal,
            limits=chosen,
            draw_seed=lambda: 1,
        )
        self.model = self.engine.load("m", str(calbin))
        self.streams: list[Stream] = []
        self._first_step = 1
        self._first_request = 1
        self.begin()

    # ------------------------------------------------------------------ doing

    def begin(self) -> None:
        """Begin a new record: of jobs, streams and steps."""
        self._first_step = self.engine.snapshot().step + 1
        self._first_request += len(self.streams)
        self.streams = []
        self.log.clear()

    def submit(self, ask: Ask) -> Stream:
        """Hand in a request."""
        self.streams.append(self.engine.submit(ask.request()))
        return self.streams[-1]

    def run(self, script: Iterable[Arrival] = ()) -> None:
        """Step until nothing is left, with arrivals after as many jobs as they say."""
        due = deque(script)
        for _ in range(ACTIONS_MAX):
            self.engine.run_until_idle()
            if due and due[0].after <= len(self.jobs) and self.engine.snapshot().jobs:
                self._take(due.popleft())
            elif not self.engine.advance():
                if not due:
                    return
                self._take(due.popleft())
        raise AssertionError(f"the engine is still busy after {ACTIONS_MAX} actions")

    def _take(self, arrival: Arrival) -> None:
        if isinstance(arrival.what, Ask):
            self.submit(arrival.what)
        else:
            self.streams[arrival.what].cancel()

    def finish(self) -> list[Result]:
        """Wait for every ending, and until nothing is held any more (engines with threads)."""
        results = self.results()
        steps = self.engine.subscribe()
        while not _is_idle(self.engine.snapshot()):
            assert steps.get(PATIENCE_S) is not None, self.engine.snapshot()
        steps.close()
        return results

    # ------------------------------------------------------------------ looking

    @property
    def jobs(self) -> list[Job]:
        """The jobs that the board took since ``begin``."""
        return self.log.jobs

    @property
    def arenas(self) -> dict[int, Arena]:
        """The memory of every buffer of the model."""
        buffers = self.device._models[self.model].buffers
        return {number: buffer.arena for number, buffer in buffers.items()}

    def results(self) -> list[Result]:
        """Return the endings in order of submission, waiting for them."""
        return [stream.result(PATIENCE_S) for stream in self.streams]

    def steps(self) -> list[Step]:
        """Return what the journal has since ``begin``."""
        return list(self.journal.read(first=self._first_step))

    def arrivals(self, asks: list[Ask]) -> list[Arrival]:
        """Return when the requests and cancels since ``begin`` arrived, counted in jobs planned."""
        arrivals = []
        planned = 0
        for step in self.steps():
            if isinstance(step.taken, RequestSubmitted):
                number = step.taken.request - self._first_request
                arrivals.append(Arrival(planned, asks[number]))
            elif isinstance(step.taken, CancelRequested):
                arrivals.append(Arrival(planned, step.taken.request - self._first_request))
            for event in step.events:
                planned += (event.machine, event.trigger) == ("job", "plan")
        return arrivals

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Close; the board must have seen no mistake of the host."""
        assert self.simulator.violations() == ()
        self.engine.close()


def _is_idle(snapshot: Snapshot) -> bool:
    held = {state for state, _ in (*snapshot.lanes, *snapshot.buffers)} - {"empty", "free"}
    return not snapshot.jobs and not snapshot.requests and not held


def levels(steps: Iterable[Step]) -> list[int]:
    """Return the levels of the resets in some steps, 0 for a look at somebody else's."""
    return [step.taken.level for step in steps if isinstance(step.taken, ResetFinished)]


def check_journal(journal: ReadableJournal) -> list[Step]:
    """Prove a journal, hold it against the rules over all its steps; return them."""
    steps = list(journal.read())
    watch = Watch()
    for step in steps:
        watch.take(step)
    watch.check_all_ended()
    prove(journal)
    return steps
