"""Decide a run of like decode jobs without moving the state from job to job.

Theory of operation. While the same sequences decode undisturbed, one job after the other has the
same rows in the same two buffers (evolve_run.py). What a healthy answer to such a job brings is
then known but for tokens, instants and tickets: ``Cruise`` decides it from the run, and keeps what
it decided. The state stands still meanwhile. ``land`` moves it to where it belongs: over whole
pairs of jobs at once, and over what is behind them step by step.

A cruise decides only what it is sure of. Any other input, and any answer that is not that of a job
whose rows all go on, it leaves to ``decide``, after landing. It ends before the first job after
which anything would be due: the last token of a request, a canary, a comparison of counters, a
health probe. Course.py lets a run cruise only after ``decide`` has decided a job of it just as the
cruise would have; and ``journal verify`` decides every step by ``decide``.

Source: decision 13.
"""

import attrs

from laneway.engine.counting import JOBS_BETWEEN_READINGS
from laneway.engine.draft import Decision
from laneway.engine.effects import (
    Deliver,
    Effect,
    KvOperation,
    RestoreBuffer,
    SubmitJob,
    SubmitRow,
)
from laneway.engine.evolve import fold
from laneway.engine.evolve_run import Run, find_run, skip
from laneway.engine.inputs import BufferRestored, Completed, Input, SubmitAccepted
from laneway.engine.ports import make_step
from laneway.engine.sampling import Sampling
from laneway.engine.state import JobState, ModelState, State
from laneway.engine.throttling import patience
from laneway.statemachines import Event

JOBS_MAX = 256
"""Jobs of a cruise, so that landing is short and every so many jobs are decided the long way."""


Member = tuple[int, int, int, int, Sampling, tuple[int, ...], list[int] | None, int | None]
"""One row of every job of a run: lane, owner, start, generated, sampling, prompt, output, logprobs.

``start`` and ``generated`` are the length of its lane and the tokens of its request before the
first job's token; ``output`` grows with them where the sampler looks at it.
"""


@attrs.define
class Cruise:
    """A run under way: what is constant in it, what was decided, and the state it began at.

    ``jobs_left``: how many jobs may still be completed in it; from ``until_ns`` on something is
    due. ``job`` is the last one planned, with its ``ticket`` once it is accepted. ``tokens`` are
    those of whole pairs of jobs, up to ``pair``; ``behind`` are the decided inputs after those.
    """

    state: State
    run: Run
    members: tuple[Member, ...]
    patience: int
    jobs_left: int
    until_ns: int
    job: int
    ticket: int
    now_ns: int
    step: int
    turn: int = 0
    accepted: bool = True
    restored: bool = True
    planned_ns: int = 0
    tokens: list[tuple[int, ...]] = attrs.Factory(list)
    pair: tuple[int, int, int, int] = (0, 0, 0, 0)
    behind: list[tuple[Input, int, tuple[Event, ...]]] = attrs.Factory(list)
    behind_tokens: list[tuple[int, ...]] = attrs.Factory(list)

    def decide(self, taken: Input, at_ns: int) -> Decision | None:
        """Return what follows from an input, or None, having changed nothing: land first."""
        decision: Decision | None = None
        if at_ns < self.now_ns:
            return None
        if type(taken) is Completed:
            decision = self._complete(taken, at_ns)
        elif type(taken) is SubmitAccepted:
            decision = self._accept(taken)
        elif type(taken) is BufferRestored:
            decision = self._restore(taken)
        if decision is None:
            return None
        self.step += 1
        self.now_ns = at_ns
        self.behind.append((taken, at_ns, decision.events))
        if self.accepted and self.restored and len(self.behind_tokens) == 2:
            self._keep_pair()
        return decision

    def land(self) -> None:
        """Move the state to where the last decision left it."""
        state = self.state
        if self.tokens:
            step, now_ns, planned_ns, ticket = self.pair
            skip(
                *(state, self.run, self.tokens),
                step=step,
                now_ns=now_ns,
                planned_ns=planned_ns,
                ticket=ticket,
            )
        for taken, at_ns, events in self.behind:
            fold(state, make_step(step=state.step + 1, at_ns=at_ns, taken=taken, events=events))

    def _keep_pair(self) -> None:
        """Keep of two whole jobs what ``skip`` needs."""
        self.tokens += self.behind_tokens
        self.behind_tokens.clear()
        self.behind.clear()
        self.pair = (self.step, self.now_ns, self.planned_ns, self.ticket)

    # ------------------------------------------------------------------ the three answers

    def _accept(self, taken: SubmitAccepted) -> Decision | None:
        if self.accepted or taken.job != self.job:
            return None
        self.accepted = True
        self.ticket = taken.ticket
        return Decision(self.run.accepted(self.job - 1, 1 - self.turn, taken.ticket), ())

    def _restore(self, taken: BufferRestored) -> Decision | None:
        turn = 1 - self.turn
        if self.restored or (taken.buffer, taken.job) != (self.run.buffers[turn], self.job - 1):
            return None
        self.restored = True
        return Decision(self.run.restored(turn), ())

    def _complete(self, taken: Completed, at_ns: int) -> Decision | None:
        run, job, turn = self.run, self.job, self.turn
        own = (job, self.ticket, run.epoch, run.generation)
        if (
            (taken.job, taken.ticket, taken.epoch, taken.generation) != own
            or not (self.accepted and self.restored)
            or not self.jobs_left
            or at_ns >= self.until_ns
            or taken.kv_effect != "applied"
            or len(taken.rows) != len(self.members)
        ):
            return None
        for row in taken.rows:
            if row.fault or row.stop_hit:
                return None
        tokens = tuple([row.token for row in taken.rows])
        if not run.ends.isdisjoint(tokens):
            return None
        decision = Decision(run.completed(job, turn), self._effects(taken, tokens))
        self.behind_tokens.append(tokens)
        self.jobs_left -= 1
        self.job = job + 1
        self.turn = 1 - turn
        self.accepted = self.restored = False
        self.planned_ns = at_ns
        return decision

    def _effects(self, taken: Completed, tokens: tuple[int, ...]) -> tuple[Effect, ...]:
        """Return what the world is asked: the buffer back, the tokens told, the next job run."""
        run, job = self.run, self.job
        buffer, after = run.buffers[self.turn], run.buffers[1 - self.turn]
        done = job - run.job
        told: list[Effect] = [
            RestoreBuffer(model=run.model, buffer=buffer, job=job, ticket=taken.ticket)
        ]
        due: list[KvOperation] = []
        reserve: list[KvOperation] = []
        rows: list[SubmitRow] = []
        for member, result, token in zip(self.members, taken.rows, tokens, strict=True):
            lane, owner, start, generated, sampling, prompt, output, logprobs = member
            position, start = generated + done, start + done
            told.append(Deliver(owner, position, token, result.logprobs))
            due.append(KvOperation("COMMIT", lane, start, start + 1, job))
            reserve.append(KvOperation("RESERVE", lane, start + 1, start + 2, job + 1))
            before: tuple[int, ...] = ()
            if output is not None:
                output.append(token)
                before = tuple(output)
            row = (lane, owner, (token,), start + 1, sampling, position + 1)
            rows.append(SubmitRow(*row, prompt, before, (), logprobs))
        told.append(self._submit(job + 1, after, (*due, *reserve), tuple(rows)))
        return tuple(told)

    def _submit(
        self,
        job: int,
        buffer: int,
        operations: tuple[KvOperation, ...],
        rows: tuple[SubmitRow, ...],
    ) -> SubmitJob:
        run, limits, stretch = self.run, self.state.limits, self.patience
        return SubmitJob(
            job=job,
            model=run.model,
            epoch=run.epoch,
            generation=run.generation,
            buffer=buffer,
            task="decode",
            origin="request",
            operations=operations,
            rows=rows,
            suspect_after_ns=limits.hang_suspect_ns * stretch,
            confirm_after_ns=limits.hang_confirm_ns * stretch,
            cap_after_ns=limits.hang_cap_ns * stretch,
        )


# ---------------------------------------------------------------------------- finding


def find_cruise(state: State) -> Cruise | None:
    """Return the cruise that may begin at a state, None if something else may be due in it."""
    if len(state.jobs) != 1 or len(state.models) != 1 or state.decode_ready:
        return None  # seen at once, since every completion asks
    if not _is_calm(state):
        return None
    (job,), (model,) = state.jobs.values(), state.models.values()
    until_ns = _until_ns(state, model)
    if not _is_plain(state, model, job) or until_ns <= state.now_ns:
        return None
    run = find_run(state)
    jobs_left = 0 if run is None else _jobs_left(state, model, job)
    if run is None or jobs_left < 1:
        return None
    return Cruise(
        state=state,
        run=run,
        members=_members(state, job),
        patience=patience(state),
        jobs_left=jobs_left,
        until_ns=until_ns,
        job=job.number,
        ticket=job.ticket,
        now_ns=state.now_ns,
        step=state.step,
        planned_ns=job.planned_ns,
    )


def _is_calm(state: State) -> bool:
    """Return whether nothing but the job in flight is going on."""
    device = state.device
    return (
        device.state == "serving"
        and not device.ceiling_reason
        and not state.closing
        and state.ladder.recovery is None
        and not (state.suspended or state.alone)
        and state.now_ns >= device.backoff_until_ns
    )


def _is_plain(state: State, model: ModelState, job: JobState) -> bool:
    """Return whether a model serves, runs nothing of its own, and nobody waits who could begin."""
    canary, facts = model.canary, model.facts
    return (
        model.state == "ready"
        and facts is not None
        and job.origin == "request"
        and not (model.runs or canary.examining or canary.pairing)
        and not (state.waiting_requests and model.empty_lanes)
        and not facts.by_name[state.buffers[job.buffer].submodel].fixed_rows
    )


def _jobs_left(state: State, model: ModelState, job: JobState) -> int:
    """Return after how many jobs at most nothing is due yet, by counts."""
    limits, ledger, canary = state.limits, state.device.ledger, model.canary
    requests = [state.requests[row.owner] for row in job.rows]
    if any(len(one.tokens) < one.min_tokens for one in requests):
        return 0  # until then a row carries the tokens that must not be drawn
    left = min(one.max_tokens - len(one.tokens) - 1 for one in requests)
    if limits.canary_jobs:
        left = min(left, limits.canary_jobs - canary.jobs - 1)
    ended = ledger.finished + ledger.failed + ledger.aborted
    left = min(left, JOBS_BETWEEN_READINGS - ended % JOBS_BETWEEN_READINGS - 1)
    return min(left, JOBS_MAX)


def _until_ns(state: State, model: ModelState) -> int:
    """Return from when on something is due by time: a health probe, a canary."""
    limits = state.limits
    until_ns = state.device.health_ns + limits.health_every_ns
    if limits.canary_idle_ns:
        until_ns = min(until_ns, model.canary.since_ns + limits.canary_idle_ns)
    return until_ns


def _members(state: State, job: JobState) -> tuple[Member, ...]:
    members: list[Member] = []
    for row in job.rows:
        request = state.requests[row.owner]
        sampling = request.sampling
        prompt = request.prompt if sampling.counts_prompt else ()
        output = list(request.tokens) if sampling.counts_output else None
        before = (row.from_tokens, len(request.tokens))
        own = (sampling, prompt, output, request.logprobs)
        members.append((row.lane, row.owner, *before, *own))
    return tuple(members)
