"""Decide a run of like decode jobs without moving the state from job to job.

Theory of operation. While the same sequences decode undisturbed, their groups take turns (ring.py)
and one job after the other goes through the same two buffers (evolve_run.py). What a healthy answer
to such a job brings is then known but for tokens, instants and tickets: ``Cruise`` decides it from
the groups, and keeps what it decided. The state stands still meanwhile. ``land`` moves it to where
it belongs: over whole pairs of jobs at once, and over what is behind them step by step.

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
from laneway.engine.effects import Effect, KvOperation, RestoreBuffer, SubmitJob, SubmitRow
from laneway.engine.evolve import fold
from laneway.engine.evolve_run import Run
from laneway.engine.inputs import BufferRestored, Completed, Input, SubmitAccepted
from laneway.engine.ports import make_step
from laneway.engine.queueing import widest
from laneway.engine.ring import Group, find_ring, keep, land
from laneway.engine.state import JobState, ModelState, State
from laneway.engine.submit_rows import submit_job
from laneway.statemachines import Event

Following = tuple[tuple[Event, ...], tuple[KvOperation, ...]]
"""What of a job's end does not hang on its tokens: its events, the next job's operations."""

JOBS_MAX, LAPS_MAX = 256, 16
"""Jobs of a cruise, or turns of each group, so that landing is short and every so many jobs are
decided the long way."""


@attrs.define
class Cruise:
    """A run under way: what is constant in it, what was decided, and the state it began at.

    ``jobs_left``: how many jobs may still be completed in it; from ``until_ns`` on something is
    due. ``job`` is the last one planned, with its ``ticket`` once it is accepted; ``at`` is its
    group. ``pair``: step, instant, when the last job was planned and its ticket, after those that
    the groups keep; ``behind`` are the decided inputs after those, ``completed`` the jobs in them.
    ``following`` is what was worked out before the job's end.
    """

    state: State
    run: Run
    groups: tuple[Group, ...]
    jobs_left: int
    until_ns: int
    job: int
    ticket: int
    now_ns: int
    step: int
    at: int = 0
    turn: int = 0
    accepted: bool = True
    restored: bool = True
    planned_ns: int = 0
    pair: tuple[int, int, int, int] = (0, 0, 0, 0)
    behind: list[tuple[Input, int, tuple[Event, ...]]] = attrs.Factory(list)
    completed: list[tuple[int, tuple[int, ...]]] = attrs.Factory(list)
    following: Following | None = None

    def is_like(self, other: "Cruise") -> bool:
        """Return whether two are of the same groups in the same lanes and buffers."""
        theirs = {(tuple(one.run.owners), one.run.lanes) for one in other.groups}
        mine = {(tuple(one.run.owners), one.run.lanes) for one in self.groups}
        return mine == theirs and self.run.is_beside(other.run)

    def decide(self, taken: Input, at_ns: int) -> Decision | None:
        """Return what follows from an input, or None, having changed nothing: land first."""
        decision: Decision | None = None
        if not self.now_ns <= at_ns < self.until_ns:
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
        if self.accepted and self.restored and len(self.completed) == 2:
            self._keep_pair()
        return decision

    def foresee(self) -> SubmitJob | None:
        """Return the job that follows the one in flight if nothing else happens, its tokens 0.

        None if it is not known yet, or was asked for before. What of it was worked out is used when
        the job in flight ends: until then there is time.
        """
        if self.following is not None or not (self.accepted and self.restored and self.jobs_left):
            return None
        self.following = self._follow()
        then = self._then
        behind = int(then is self.groups[self.at])
        rows = tuple(
            SubmitRow(member[0], member[1], (0,), member[2] + then.done + behind, None)
            for member in then.members
        )
        return self._submit(self.following[1], rows)

    def land(self) -> None:
        """Move the state to where the last decision left it."""
        state = self.state
        step, now_ns, planned_ns, ticket = self.pair
        land(
            *(state, self.groups),
            step=step,
            now_ns=now_ns,
            planned_ns=planned_ns,
            ticket=ticket,
        )
        for taken, at_ns, events in self.behind:
            fold(state, make_step(step=state.step + 1, at_ns=at_ns, taken=taken, events=events))

    def _keep_pair(self) -> None:
        """Keep of two whole jobs what it takes to move the state over them at once."""
        keep(self.groups, self.completed, self.run.job)
        self.completed.clear()
        self.behind.clear()
        self.pair = (self.step, self.now_ns, self.planned_ns, self.ticket)

    @property
    def _then(self) -> Group:
        """The group of the job that follows the one in flight."""
        return self.groups[(self.at + 1) % len(self.groups)]

    def _follow(self) -> Following:
        """Work out what of the end of the job in flight does not hang on its tokens."""
        group, then = self.groups[self.at], self._then
        events = group.run.completed(self.job, self.turn, then=then.run)
        return events, then.operations(self.job + 1, behind=self.job if then is group else None)

    def _submit(
        self, operations: tuple[KvOperation, ...], rows: tuple[SubmitRow, ...]
    ) -> SubmitJob:
        """Return the job that follows the one in flight."""
        run = self.run
        return submit_job(
            self.state,
            model=run.model,
            generation=run.generation,
            job=self.job + 1,
            task="decode",
            origin="request",
            buffer=run.buffers[1 - self.turn],
            operations=operations,
            rows=rows,
        )

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
        run, job, turn, group = self.run, self.job, self.turn, self.groups[self.at]
        own = (job, self.ticket, run.epoch, run.generation)
        if (
            (taken.job, taken.ticket, taken.epoch, taken.generation) != own
            or not (self.accepted and self.restored)
            or not self.jobs_left
            or taken.kv_effect != "applied"
            or len(taken.rows) != len(group.members)
        ):
            return None
        for row in taken.rows:
            if row.fault or row.stop_hit:
                return None
        tokens = tuple([row.token for row in taken.rows])
        if not group.run.ends.isdisjoint(tokens):
            return None
        events, operations = self.following or self._follow()
        effects: list[Effect] = [
            RestoreBuffer(model=run.model, buffer=run.buffers[turn], job=job, ticket=taken.ticket)
        ]
        effects += group.take(job, taken.rows, tokens)
        effects.append(self._submit(operations, self._then.rows()))
        self.following = None
        self.completed.append((job, tokens))
        self.jobs_left -= 1
        self.at = (self.at + 1) % len(self.groups)
        self.job = job + 1
        self.turn = 1 - turn
        self.accepted = self.restored = False
        self.planned_ns = at_ns
        return Decision(events, tuple(effects))


# ---------------------------------------------------------------------------- finding


def group_count(state: State) -> int:
    """Return how many groups of sequences seem to take turns."""
    job = next(iter(state.jobs.values()), None)
    return 1 + len(state.decode_ready) // len(job.rows) if job is not None else 1


def find_cruise(state: State) -> Cruise | None:
    """Return the cruise that may begin at a state, None if something else may be due in it."""
    if len(state.jobs) != 1 or len(state.models) != 1 or not _is_calm(state):
        return None
    (job,), (model,) = state.jobs.values(), state.models.values()
    until_ns = _until_ns(state, model)
    if not _is_plain(state, model, job) or until_ns <= state.now_ns:
        return None
    groups = find_ring(state, model, rows_max=_rows_max(state, model))
    jobs_left = _jobs_left(state, model, groups) if groups else 0
    if jobs_left < 1:
        return None
    return Cruise(
        state=state,
        run=groups[0].run,
        groups=groups,
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


def _rows_max(state: State, model: ModelState) -> int:
    """Return how many rows a decode job of a model has where enough requests are ready."""
    assert model.facts is not None
    full = widest(state, model, model.facts.tasks["decode"])
    return min(state.limits.batch_rows_max, full.batch_max)


def _jobs_left(state: State, model: ModelState, groups: tuple[Group, ...]) -> int:
    """Return after how many jobs at most nothing is due yet, by counts."""
    limits, ledger, canary = state.limits, state.device.ledger, model.canary
    left = max(JOBS_MAX, LAPS_MAX * len(groups))
    for index, group in enumerate(groups):
        requests = [state.requests[owner] for owner in group.run.owners]
        if any([len(one.tokens) < one.min_tokens for one in requests]):
            return 0  # until then a row carries the tokens that must not be drawn
        turns = min([one.max_tokens - len(one.tokens) - 1 for one in requests])
        left = min(left, index + turns * len(groups))
    if limits.canary_jobs and model.empty_lanes:
        left = min(left, limits.canary_jobs - canary.jobs - 1)
    ended = ledger.finished + ledger.failed + ledger.aborted
    return min(left, JOBS_BETWEEN_READINGS - ended % JOBS_BETWEEN_READINGS - 1)


def _until_ns(state: State, model: ModelState) -> int:
    """Return from when on something is due by time: a health probe, a canary.

    Without an empty lane no canary can begin, however long it is due; and none becomes empty in a
    cruise.
    """
    limits = state.limits
    until_ns = state.device.health_ns + limits.health_every_ns
    if limits.canary_idle_ns and model.empty_lanes:
        until_ns = min(until_ns, model.canary.since_ns + limits.canary_idle_ns)
    return until_ns
