"""Move a state over many decode jobs at once, where each is like the one before.

Theory of operation. While full batches decode undisturbed, one job after the other has the same
rows in the same two buffers, and a job moves the state by the same step: every length and every
number of a job grows by one, every request gets a token. ``find_run`` says whether a state stands
before such a job, and ``Run`` what the events of the next jobs will be if nothing else happens.
Whoever finds exactly those in a journal may call ``skip`` in the place of ``evolve`` for each of
them; the state is then the same (a test folds both ways at every step). Only even numbers of jobs
are skipped, since the two buffers take turns.

Source: decision 13.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import attrs

from laneway.engine.effects import KvOperation
from laneway.engine.errors import InternalError
from laneway.engine.state import (
    BufferState,
    JobRow,
    JobState,
    ModelState,
    State,
    end_tokens,
)
from laneway.statemachines import Event
from laneway.statemachines.event import NO_DATA, make_event


@attrs.frozen(kw_only=True)
class Run:
    """What stays the same from job to job, and the job that is in flight before the first.

    ``buffers`` are the one of that job and the one of the next. One of ``ends`` among the tokens
    may end a request: then the job is none of the run.
    """

    job: int
    buffers: tuple[int, int]
    model: int
    epoch: int
    generation: int
    lanes: tuple[int, ...]
    owners: list[int]
    ends: frozenset[int]

    def is_beside(self, other: "Run") -> bool:
        """Return whether two runs are of the same generation and buffers."""
        mine = (self.model, self.epoch, self.generation, set(self.buffers))
        return mine == (other.model, other.epoch, other.generation, set(other.buffers))

    def completed(self, job: int, turn: int, *, then: "Run | None" = None) -> tuple[Event, ...]:
        """Return the events of a job's completion; ``turn`` is 0 or 1 and says which buffer.

        ``then``: the sequences of the next job, where they are others.
        """
        others = self if then is None else then
        done, committed = self._completing[turn]
        after = self.buffers[1 - turn]
        plan = {
            "buffer": after,
            "model": self.model,
            "origin": "request",
            "owners": others.owners,
            "task": "decode",
        }
        following = {"job": job + 1}
        return (
            done,
            self._event("job", (job,), "complete", "submitted", "completed"),
            committed,
            self._event(
                "lane", others.lanes, "reserve", "ready", "reserved", {"by": 1, **following}
            ),
            self._event("buffer", (after,), "acquire", "free", "preparing", following),
            self._event("job", (job + 1,), "plan", "drafted", "planned", plan),
        )

    def restored(self, turn: int) -> tuple[Event, ...]:
        """Return the events of the restoring of a completed job's buffer."""
        return self._releasing[turn]

    def accepted(self, job: int, turn: int, ticket: int) -> tuple[Event, ...]:
        """Return the events of the submit of the job that follows a completed one."""
        told = {"ticket": ticket}
        return (
            self._submitting[turn],
            self._event("job", (job + 1,), "submit", "planned", "submitted", told),
        )

    @cached_property
    def _completing(self) -> tuple[tuple[Event, Event], ...]:
        """By turn what every completion has: the buffer's event, and the lanes'."""
        lanes = self._event("lane", self.lanes, "commit", "reserved", "ready")
        return tuple(
            (self._event("buffer", (buffer,), "complete", "submitted", "completing"), lanes)
            for buffer in self.buffers
        )

    @cached_property
    def _releasing(self) -> tuple[tuple[Event, ...], ...]:
        return tuple(
            (self._event("buffer", (buffer,), "release", "completing", "free"),)
            for buffer in self.buffers
        )

    @cached_property
    def _submitting(self) -> tuple[Event, ...]:
        return tuple(
            self._event("buffer", (buffer,), "submit", "preparing", "submitted")
            for buffer in reversed(self.buffers)
        )

    def _event(
        self,
        machine: str,
        entities: tuple[int, ...],
        trigger: str,
        source: str,
        dest: str,
        data: Mapping[str, object] = NO_DATA,
    ) -> Event:
        own = (self.epoch, self.generation)
        return make_event(machine, entities, trigger, source, dest, *own, data)


def find_run(state: State, *, others_ready: bool = False) -> Run | None:
    """Return the run that a state stands before, None if its next job may be unlike the last.

    ``others_ready``: others may be ready to go in between.
    """
    if len(state.jobs) != 1:
        return None
    (job,) = state.jobs.values()
    model = state.models.get(job.model)
    if model is None or model.facts is None or not _is_undisturbed(state, job, model):
        return None
    if state.decode_ready and not others_ready:
        return None
    buffer = state.buffers[job.buffer]
    after = _next_buffer(state, model, job, buffer)
    alike = after is not None and _counts_alike(state, model, buffer)
    if after is None or not alike or not _rows_are_alike(state, job, by_last=not others_ready):
        return None
    owners = [row.owner for row in job.rows]
    return Run(
        job=job.number,
        buffers=(job.buffer, after),
        model=job.model,
        epoch=job.epoch,
        generation=job.generation,
        lanes=tuple(row.lane for row in job.rows),
        owners=owners,
        ends=frozenset(
            token for owner in owners for token in end_tokens(state, state.requests[owner])
        ),
    )


def _is_undisturbed(state: State, job: JobState, model: ModelState) -> bool:
    """Return whether a decode job of requests is in flight and nothing else waits for a turn."""
    known = (job.state, job.task, job.origin) == ("submitted", "decode", "request")
    odd = job.suspected or job.recall_until_ns or job.overlapped or model.canary.went
    waiting = state.reserving or state.prefill_again or state.chunking
    return known and not odd and not waiting and job.epoch == state.device.epoch


def _next_buffer(state: State, model: ModelState, job: JobState, buffer: BufferState) -> int | None:
    """Return the buffer that takes turns with a job's, if two do for good."""
    free = model.free_buffers[buffer.submodel]
    if (buffer.state, buffer.job) != ("submitted", job.number) or not free:
        return None
    heap, used = list(free), [buffer.number]
    for _ in range(2):
        taken = heap[0]
        heap.remove(taken)
        heapq.heapify(heap)
        heapq.heappush(heap, used[-1])
        used.append(taken)
    other = state.buffers[used[1]]
    takes_turns = heap == free and used[2] == buffer.number
    return other.number if takes_turns and (other.state, other.job) == ("free", None) else None


def _counts_alike(state: State, model: ModelState, buffer: BufferState) -> bool:
    """Return whether a job counts in the books by one, and in nothing else."""
    assert model.facts is not None
    device = state.device
    batch = model.facts.by_name[buffer.submodel].batch_max
    return batch in model.canary.batches and device.refusals_in_a_row == device.backoff_tries == 0


def _rows_are_alike(state: State, job: JobState, *, by_last: bool) -> bool:
    """Return whether every row carries one token of a request that decodes, after such a job.

    ``by_last``: that was the job right before this one.
    """
    number = job.number
    for row in job.rows:
        request, lane = state.requests.get(row.owner), state.lanes[row.lane]
        length = row.from_tokens
        carried = lane.carried[0].transaction if lane.carried and not by_last else number - 1
        before = KvOperation("COMMIT", row.lane, length - 1, length, carried)
        if (
            request is None
            or (request.state, request.job, request.alone) != ("decoding", number, False)
            or request.refusals
            or request.kv_refusals
            or row.to_tokens != length + 1
            or row.to_tokens < request.prefill_tokens
            or (lane.state, lane.owner, lane.job) != ("reserved", row.owner, number)
            or (lane.length_tokens, lane.reserved_tokens) != (length, length + 1)
            or (lane.due, lane.carried, lane.on_device) != ((), (before,), True)
        ):
            return False
    return True


def skip(
    state: State,
    run: Run,
    tokens: Sequence[Iterable[int]],
    *,
    step: int,
    now_ns: int,
    planned_ns: int,
    ticket: int,
) -> None:
    """Move a state over as many jobs as there are ``tokens`` of, an even number.

    ``state`` is the one that ``run`` was found in; ``step`` and ``now_ns`` are those of the last
    step skipped; the job then in flight was planned at ``planned_ns`` and has ``ticket``.
    """
    count = len(tokens)
    if count % 2:
        raise InternalError(f"{count} jobs would leave the two buffers in each other's places")
    if not count:
        return
    job = state.jobs.pop(run.job)
    number = run.job + count
    rows = []
    for row, own in zip(job.rows, zip(*tokens, strict=True), strict=True):
        request, lane = state.requests[row.owner], state.lanes[row.lane]
        request.tokens.extend(own)
        request.job = lane.job = number
        length = row.from_tokens + count
        lane.length_tokens, lane.reserved_tokens = length, length + 1
        committed = ("COMMIT", row.lane, length - 1, length, number - 1)
        lane.carried = (KvOperation(*committed),)
        rows.append(JobRow(row.lane, row.owner, length, length + 1))
    state.jobs[number] = attrs.evolve(
        job, number=number, rows=tuple(rows), planned_ns=planned_ns, ticket=ticket
    )
    keep_books(state, job, count)
    state.step, state.now_ns = step, now_ns


def keep_books(state: State, job: JobState, count: int) -> None:
    """Count an even number of decode jobs, of which ``job`` was the first and is gone."""
    number = job.number + count
    state.buffers[job.buffer].job = number
    state.next_job = number + 1
    state.models[job.model].canary.jobs += count
    state.device.ledger.submitted += count
    state.device.ledger.finished += count
    paid = count * state.limits.prefill_tokens_per_decode
    state.prefill_debt_tokens = max(0, state.prefill_debt_tokens - paid)
