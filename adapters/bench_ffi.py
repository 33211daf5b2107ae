"""The suite ``ffi``: what crossing into the library and waking up again cost (T3).

Every job is a real one on a board that computes nothing (`sim:null`). Right before or after its
submit stand two calls into C functions that do nothing: one with six arguments, which is what a
submit would cost with its arguments spelled out, and one with the arguments of the submit itself,
which is the crossing (T3). What the whole submit takes is told beside it (T3/board): the rest is
the board's own work, checks, lock and waking its thread. Then the consumer waits for the job inside
the library; from the begin of the submit to its waking is held against one round trip between two
Python threads through queues (T3/wake).
"""

import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import attrs

from laneway.adapters import npurt
from laneway.adapters.bench_board import calbin, probed
from laneway.adapters.binding import Answer, Library
from laneway.adapters.measuring import Figure, at_most
from laneway.adapters.probing import Piece, Probed

JOBS = 150
ROUNDS = 9
BOARD = "sim:null?clock=real&checks=none"
SUBMIT_LIMIT, WAKE_LIMIT = 1.2, 4.0
_WAIT_NS = 1_000_000_000


def run(
    tell: Callable[[str], None] = lambda text: None, *, jobs: int = JOBS, rounds: int = ROUNDS
) -> Iterator[Figure]:
    """Measure T3. The arguments make it short for tests."""
    with calbin(batch=(1,)) as folder, probed(BOARD, folder) as board:
        spy = _Spy(board.calls.library)
        board.calls.library = spy  # type: ignore[assignment]
        names = ("bare", "crossing", "submit", "wake", "queue")
        medians: dict[str, list[float]] = {name: [] for name in names}
        with _Echo() as echo:
            for number in range(rounds + 1):
                tell(f"ffi: round {number} of {rounds}")
                spy.forget()
                trips = _round(board, spy, echo, jobs)
                if number:  # the first round touches everything for the first time
                    for name, values in (*spy.took.items(), ("queue", trips)):
                        medians[name].append(statistics.median(values))
    us = {name: statistics.median(values) / 1000 for name, values in medians.items()}
    bare = ("ctypes call of 6 arguments", us["bare"])
    yield at_most("T3", us["crossing"], "us/submit", *bare, limit=SUBMIT_LIMIT)
    whole = at_most("T3/board", us["submit"], "us/submit", *bare, limit=SUBMIT_LIMIT)
    yield attrs.evolve(whole, gate="none: the work of the board", gate_met=None)
    queue = ("SimpleQueue round trip", us["queue"])
    yield at_most("T3/wake", us["wake"], "us/job", *queue, limit=WAKE_LIMIT)


def _round(board: Probed, spy: "_Spy", echo: "_Echo", jobs: int) -> list[int]:
    """Run so many jobs of one token and as many round trips in turns; return the trips in ns."""
    sequence = board.open()
    board.run(Piece(sequence, (1, 2, 3)))
    spy.forget()
    trips = []
    for _ in range(jobs):
        flight = board.start((Piece(sequence, (4,)),))
        spy.wait(flight.ticket)
        board.finish(flight)
        trips.append(echo.trip_ns())
    board.release(sequence)
    return trips


class _Spy:
    """A library whose submits are timed, each beside a bare call."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._cdll = ctypes.CDLL(str(library.path))
        self._submit = self._cdll.npurt_job_submit
        self._submit.argtypes = (
            *(ctypes.c_void_p, ctypes.POINTER(npurt.SubmitParams)),
            ctypes.POINTER(ctypes.c_uint64),
        )
        self._bare, self._crossing = ctypes.CDLL(None).labs, ctypes.CDLL(None).labs
        self._bare.argtypes = (ctypes.c_int64,) * 6
        self._crossing.argtypes = self._submit.argtypes
        self._arguments: tuple[Any, ...] = ()
        self.forget()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def forget(self) -> None:
        """Begin to measure anew."""
        names = ("bare", "crossing", "submit", "wake")
        self.took: dict[str, list[int]] = {name: [] for name in names}
        self._begun_ns = 0

    def attempt(self, name: str, *arguments: Any) -> Answer:
        """Call; time it if it is a submit."""
        if name != "npurt_job_submit":
            return self._library.attempt(name, *arguments)
        self._arguments = arguments
        if len(self.took["bare"]) % 2:
            self._time_bare()
        begun = time.perf_counter_ns()
        code = self._submit(*arguments)
        self.took["submit"].append(time.perf_counter_ns() - begun)
        self._begun_ns = begun
        return Answer(name, int(code))

    def wait(self, ticket: int) -> None:
        """Wait for the job that was submitted last, inside the library."""
        tickets, which = (ctypes.c_uint64 * 1)(ticket), ctypes.c_uint32(0)
        self._library.call(
            "npurt_job_wait", self._arguments[0], tickets, 1, _WAIT_NS, ctypes.byref(which)
        )
        self.took["wake"].append(time.perf_counter_ns() - self._begun_ns)
        if len(self.took["bare"]) < len(self.took["submit"]):
            self._time_bare()

    def _time_bare(self) -> None:
        begun = time.perf_counter_ns()
        self._bare(1, 2, 3, 4, 5, 6)
        between = time.perf_counter_ns()
        self._crossing(*self._arguments)
        self.took["crossing"].append(time.perf_counter_ns() - between)
        self.took["bare"].append(between - begun)


class _Echo:
    """A thread that sends back what it gets."""

    def __init__(self) -> None:
        self._there: SimpleQueue[int | None] = SimpleQueue()
        self._back: SimpleQueue[int] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bench-echo", daemon=True)

    def trip_ns(self) -> int:
        """Return how long there and back takes."""
        begun = time.perf_counter_ns()
        self._there.put(1)
        self._back.get()
        return time.perf_counter_ns() - begun

    def _run(self) -> None:
        while (one := self._there.get()) is not None:
            self._back.put(one)

    def __enter__(self) -> "_Echo":
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._there.put(None)
        self._thread.join()
