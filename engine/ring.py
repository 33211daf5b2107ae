"""The sequences of a run of decode jobs: groups that take turns, and what a job does to each.

Theory of operation. Every job of such a run has the rows of one group; when it is completed, its
group goes to the end of the queue and the first one in it is planned. So groups take turns for
good; often there is but one. ``find_ring`` says whether a state stands before such a run, with all
that a job needs of each sequence. The state stands still in a run; a group keeps what its jobs
brought, and ``land`` moves the state over all of it at once, as ``evolve`` would have job by job.

Source: decision 13.
"""

from collections import deque
from collections.abc import Sequence

import attrs

from laneway.engine.effects import Deliver, KvOperation, SubmitRow
from laneway.engine.evolve_run import Run, find_run, keep_books
from laneway.engine.inputs import RowResult
from laneway.engine.sampling import Sampling
from laneway.engine.state import (
    JobRow,
    LaneState,
    ModelState,
    RequestState,
    State,
    end_tokens,
    is_decoding,
)

Member = tuple[int, int, int, int, Sampling, tuple[int, ...], list[int] | None, int | None, bool]
"""One row of a group's jobs: lane, owner, start, generated, sampling, prompt, output, logprobs,
searched.

``start`` and ``generated`` are the length of its lane and the tokens of its request before the
group's first token; ``output`` grows with them where the sampler looks at it.
"""


@attrs.define
class Group:
    """The rows of a job, in order of their lanes.

    ``due``: the operations that its first job's list begins with. ``done`` jobs brought ``latest``
    tokens, the last one under number ``job``; ``kept`` are those up to where a landing would move
    the state at once, with the number of the last.
    """

    run: Run
    members: tuple[Member, ...]
    due: tuple[KvOperation, ...]
    latest: tuple[int, ...]
    done: int = 0
    job: int = 0
    kept: list[tuple[int, ...]] = attrs.Factory(list)
    kept_job: int = 0

    def take(self, job: int, rows: Sequence[RowResult], tokens: tuple[int, ...]) -> list[Deliver]:
        """Take the tokens of a completed job; return what clients are told."""
        done = self.done
        told = [
            Deliver(member[1], member[3] + done, row.token, row.logprobs)
            for member, row in zip(self.members, rows, strict=True)
        ]
        self.done = done + 1
        self.job = job
        self.latest = tokens
        for member, token in zip(self.members, tokens, strict=True):
            if member[6] is not None:
                member[6].append(token)
        return told

    def operations(self, job: int, *, behind: int | None) -> tuple[KvOperation, ...]:
        """Return the operations of its next job, whose number is ``job``.

        ``behind``: its job that is still in flight, None if it has none.
        """
        done, before = (self.done, self.job) if behind is None else (self.done + 1, behind)
        due = self.due if not done else self._commits(done, before)
        reserve = []
        for member in self.members:
            length = member[2] + done
            reserve.append(KvOperation("RESERVE", member[0], length, length + 1, job))
        return (*due, *reserve)

    def rows(self) -> tuple[SubmitRow, ...]:
        """Return the rows of its next job, once none of its jobs is in flight."""
        done = self.done
        rows: list[SubmitRow] = []
        for member, token in zip(self.members, self.latest, strict=True):
            lane, owner, start, generated, sampling, prompt, output, logprobs, searched = member
            length, number = start + done, generated + done
            own = () if output is None else tuple(output)
            row = SubmitRow(
                lane, owner, (token,), length, sampling, number, prompt, own, (), logprobs, searched
            )
            rows.append(row)
        return tuple(rows)

    def _commits(self, done: int, job: int) -> tuple[KvOperation, ...]:
        commits = []
        for member in self.members:
            length = member[2] + done
            commits.append(KvOperation("COMMIT", member[0], length - 1, length, job))
        return tuple(commits)

    def land(self, state: State, flying: int | None) -> None:
        """Move lanes and requests over the jobs that are kept; ``flying``: it is in this one."""
        done = len(self.kept)
        commits = self._commits(done, self.kept_job) if done else self.due
        own = zip(*self.kept, strict=True) if done else ((),) * len(self.members)
        for member, tokens, commit in zip(self.members, own, commits, strict=True):
            request, lane = state.requests[member[1]], state.lanes[member[0]]
            request.tokens.extend(tokens)
            request.job = lane.job = flying
            length = lane.length_tokens = member[2] + done
            lane.reserved_tokens = 0 if flying is None else length + 1
            lane.due, lane.carried = ((commit,), ()) if flying is None else ((), (commit,))
            lane.state = "ready" if flying is None else "reserved"

    def kept_rows(self) -> tuple[JobRow, ...]:
        """Return the rows of the job that is in flight after those that are kept."""
        done = len(self.kept)
        return tuple(
            JobRow(member[0], member[1], member[2] + done, member[2] + done + 1)
            for member in self.members
        )


def keep(groups: Sequence[Group], jobs: Sequence[tuple[int, tuple[int, ...]]], first: int) -> None:
    """Let completed jobs, by number and tokens, be among those moved over at once.

    ``first``: the number of the first job of the run, which was the first group's.
    """
    for number, tokens in jobs:
        group = groups[(number - first) % len(groups)]
        group.kept.append(tokens)
        group.kept_job = number


def land(
    state: State, groups: Sequence[Group], *, step: int, now_ns: int, planned_ns: int, ticket: int
) -> None:
    """Move a state over the jobs that the groups have kept, an even number of them.

    ``step`` and ``now_ns`` are those of the last step; the job then in flight was planned at
    ``planned_ns`` and has ``ticket``.
    """
    first = groups[0].run.job
    count = sum(len(group.kept) for group in groups)
    if not count:
        return
    job = state.jobs.pop(first)
    number, flying = first + count, count % len(groups)
    for index, group in enumerate(groups):
        group.land(state, number if index == flying else None)
    state.jobs[number] = attrs.evolve(
        job, number=number, rows=groups[flying].kept_rows(), planned_ns=planned_ns, ticket=ticket
    )
    state.decode_ready = deque(
        owner for group in (*groups[flying + 1 :], *groups[:flying]) for owner in group.run.owners
    )
    keep_books(state, job, count)
    state.step, state.now_ns = step, now_ns


# ---------------------------------------------------------------------------- finding


def find_ring(state: State, model: ModelState, *, rows_max: int) -> tuple[Group, ...]:
    """Return the groups of the run that a state stands before, that in flight first; () if none.

    ``rows_max``: as many rows has a job, where so many are ready.
    """
    run = find_run(state, others_ready=True)
    if run is None:
        return ()
    (job,) = state.jobs.values()
    width = len(job.rows)
    ready = tuple(state.decode_ready)
    if ready and (width != rows_max or len(ready) % width):
        return ()
    starts = [row.from_tokens for row in job.rows]
    groups = [_group(state, run, starts, due=())]
    for at in range(0, len(ready), width):
        queued = ready[at : at + width]
        if not all([_is_plain(state, model, number) for number in queued]):
            return ()
        group = _queued_group(state, run, queued)
        if list(group.run.lanes) != sorted(group.run.lanes):
            return ()  # they were not in one job before: they will be after it
        groups.append(group)
    return tuple(groups)


def _queued_group(state: State, run: Run, queued: tuple[int, ...]) -> Group:
    requests = [state.requests[number] for number in queued]
    lanes = [_lane_of(state, request) for request in requests]
    own = attrs.evolve(
        run,
        lanes=tuple(lane.number for lane in lanes),
        owners=list(queued),
        ends=frozenset(token for one in requests for token in end_tokens(state, one)),
    )
    due = tuple(operation for lane in lanes for operation in lane.due)
    return _group(state, own, [lane.length_tokens for lane in lanes], due=due)


def _group(
    state: State,
    run: Run,
    starts: list[int],
    *,
    due: tuple[KvOperation, ...],
) -> Group:
    members: list[Member] = []
    latest: list[int] = []
    for lane, owner, start in zip(run.lanes, run.owners, starts, strict=True):
        request = state.requests[owner]
        sampling = request.sampling
        prompt = request.prompt if sampling.counts_prompt else ()
        output = list(request.tokens) if sampling.counts_output else None
        generated = len(request.tokens)
        asked = (request.logprobs, bool(request.stop))
        members.append((lane, owner, start, generated, sampling, prompt, output, *asked))
        latest.append(request.tokens[-1])
    return Group(run=run, members=tuple(members), due=due, latest=tuple(latest))


def _lane_of(state: State, request: RequestState) -> LaneState:
    assert request.lane is not None
    return state.lanes[request.lane]


def _is_plain(state: State, model: ModelState, number: int) -> bool:
    """Return whether a queued request decodes on in a lane that its last job left, committed."""
    request = state.requests.get(number)
    if request is None or request.lane is None or not request.tokens:
        return False
    lane = state.lanes[request.lane]
    length = lane.length_tokens
    committed = [("COMMIT", length - 1, length)]
    return (
        request.model == model.number
        and request.state == "decoding"
        and is_decoding(request)
        and not (request.alone or request.refusals or request.kv_refusals)
        and (lane.state, lane.owner, lane.origin, lane.job) == ("ready", number, "request", None)
        and (lane.reserved_tokens, lane.carried, lane.on_device) == (0, (), True)
        and [(one.verb, one.from_tokens, one.to_tokens) for one in lane.due] == committed
    )
