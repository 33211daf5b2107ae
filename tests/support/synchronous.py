"""A server as simple as can be: submit one job, wait for it, sample, go on. No engine, no threads.

It follows the engine's documented policy (prefill and decode take turns; each first come first
served; the lowest free lane) and samples with the slow reference, so what it answers and in which
order it asks the device is what the engine must do as well.
"""

from collections import deque
from collections.abc import Iterable

import attrs
import numpy as np
from support.asking import Ask, Outcome
from support.native_board import (
    COMMIT,
    DECODE,
    FOREVER,
    LANES,
    LOGITS,
    PREFILL,
    RELEASE,
    ROLLBACK,
    STEP_IDLE,
    Board,
    Pair,
)

from laneway.adapters.npurt import Code


@attrs.frozen
class Arrival:
    """A client asks (``what`` is an Ask) or cancels (its number) once ``after`` jobs were taken.

    It arrives while that job is in flight, or when nothing is left to run.
    """

    after: int
    what: Ask | int


@attrs.define(eq=False)
class Served:
    """One request as the loop sees it; ``ending`` is "" while it lives."""

    ask: Ask
    tokens: list[int] = attrs.Factory(list)
    ending: str = ""
    lane: int | None = None

    @property
    def outcome(self) -> Outcome:
        """How it ended, as the engine's results are compared."""
        return Outcome(tuple(self.tokens), self.ending)

    @property
    def next_position(self) -> int:
        """The absolute position of the next token to sample."""
        return len(self.ask.prompt) + len(self.tokens)


class SynchronousServer:
    """Serves a script of arrivals on a board of its own."""

    def __init__(self, board: Board, *, real: bool = False) -> None:
        self._board = board
        self._real = real
        self._pairs = {"prefill": Pair(board, PREFILL), "decode": Pair(board, DECODE)}
        self._lanes = list(range(LANES))
        self._queues: dict[str, deque[Served]] = {"prefill": deque(), "decode": deque()}
        self._last_task = ""
        self._jobs = 0
        self.served: list[Served] = []

    def run(self, script: Iterable[Arrival]) -> list[Served]:
        """Serve everything and return the requests in order of arrival."""
        due = deque(script)
        while True:
            task = self._choose()
            if task is None:
                if not due:
                    return self.served
                self._take(due.popleft())
                continue
            request = self._queues[task].popleft()
            ticket = self._submit(task, request)
            while due and due[0].after <= self._jobs:
                self._take(due.popleft())
            self._wait(ticket)
            self._settle(task, request)
            self._retire(task, ticket)

    def _take(self, arrival: Arrival) -> None:
        if isinstance(arrival.what, Ask):
            self.served.append(Served(arrival.what))
            self._queues["prefill"].append(self.served[-1])
            return
        request = self.served[arrival.what]
        if request.ending:
            return
        request.ending = "cancelled"
        for queue in self._queues.values():
            if request in queue:  # it is not in flight: its lane is free at once
                queue.remove(request)
                self._free(request)

    def _choose(self) -> str | None:
        for task in (
            ("decode", "prefill") if self._last_task == "prefill" else ("prefill", "decode")
        ):
            if self._queues[task] and (task == "decode" or self._lanes):
                return task
        return None

    def _submit(self, task: str, request: Served) -> int:
        if request.lane is None:
            request.lane = self._lanes.pop(0)
        start = 0 if task == "prefill" else request.next_position - 1
        tokens = request.ask.prompt if task == "prefill" else request.tokens[-1:]
        self._last_task = task
        self._jobs += 1
        self._range = (start, start + len(tokens))
        return self._board.start(self._pairs[task], [(request.lane, tokens, start)])

    def _wait(self, ticket: int) -> None:
        if not self._real:
            self._board.step(STEP_IDLE)
        assert self._board.wait([ticket], FOREVER if self._real else 0) == (Code.OK, 0)

    def _settle(self, task: str, request: Served) -> None:
        assert request.lane is not None
        if request.ending:
            self._apply(ROLLBACK, request.lane)
            self._free(request)
            return
        self._apply(COMMIT, request.lane)
        bits = self._pairs[task].view(LOGITS, np.uint16)[0].view(np.uint16)
        token = request.ask.draw(bits, request.tokens)
        if token in request.ask.ends:
            request.ending = "stop"
        else:
            request.tokens.append(token)
            if len(request.tokens) == request.ask.max_tokens:
                request.ending = "length"
        if request.ending:
            self._free(request)
        else:
            self._queues["decode"].append(request)

    def _apply(self, operation: int, lane: int) -> None:
        assert self._board.apply((operation, lane, *self._range))[0] == Code.OK

    def _free(self, request: Served) -> None:
        if request.lane is not None:
            length = self._board.lane(request.lane).committed
            assert self._board.apply((RELEASE, request.lane, length, 0))[0] == Code.OK
            self._lanes = sorted([*self._lanes, request.lane])
            request.lane = None

    def _retire(self, task: str, ticket: int) -> None:
        self._board.ok("npurt_job_retire", self._board.device, ticket)
        for buffer in (self._pairs[task].in_, self._pairs[task].out):
            self._board.ok("npurt_buffer_restore", buffer, 3)
