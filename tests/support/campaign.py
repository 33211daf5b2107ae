"""Fault schedules on the stepped device: drawn from a seed, played to the end, held against truth.

A schedule is a shape (batches, lanes, jobs in flight), requests that arrive over time, cancels,
deadlines, a close, and one to three faults of any kind at points of the run. ``play`` runs it with
every invariant after every step; what a client got is compared with a run alone, resets are counted
against their budgets from the events alone, and the end must be service or a device that is lost
for a stated reason. The same seed is the same schedule.
"""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs
from support.campaign_faults import KINDS, Kind, Trouble
from support.fake_device import FakeDevice
from support.rig import Rig
from support.schedules import VERIFIED, wide
from support.tally import Outcome, judge

from laneway.engine import Limits, RequestRejectedError, Stream
from laneway.journal import open_journal

ENDS = ("lost", "closed")
ACTIONS_MAX = 20_000


@attrs.frozen
class Arrival:
    """One request: what it asks for, when it comes, and what its client does."""

    after: int
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    cancel_after: int | None
    deadline_us: int | None


@attrs.frozen
class Schedule:
    """What happens in a run, in actions of the engine."""

    seed: int
    batches: tuple[int, ...]
    lanes: int
    inflight: int
    fixed: bool
    order: tuple[int, ...]
    arrivals: tuple[Arrival, ...]
    faults: tuple[tuple[int, Kind], ...]
    close_at: int | None
    drain: bool


def draw(seed: int, *, kinds: Iterable[Kind] = KINDS, faults_max: int = 3) -> Schedule:
    """Draw a schedule."""
    it = random.Random(seed)
    batches = it.choice([(1,), (1, 2), (1, 4), (1, 4, 8), (1, 2, 4, 8, 16), (1, 16)])
    count = it.choice((1, 3, 6, 12))
    arrivals = tuple(
        Arrival(
            after=it.choice((0, 0, 2, 9, 30)),
            prompt=tuple(it.randint(1, 60) for _ in range(it.choice((1, 2, 5, 14)))),
            seed=number,
            max_tokens=it.randint(1, 9),
            cancel_after=it.randint(0, 120) if it.random() < 0.1 else None,
            deadline_us=it.randint(1, 400) if it.random() < 0.05 else None,
        )
        for number in range(count)
    )
    table = tuple(kinds)
    struck = it.choice((1, 1, 2, faults_max)) if faults_max > 1 else 1
    faults = tuple(
        (it.randint(1, 40 + 12 * count), it.choice(table)) for _ in range(min(struck, faults_max))
    )
    closing = faults_max > 1 and it.random() < 0.15
    return Schedule(
        seed=seed,
        batches=batches,
        lanes=batches[-1] + it.choice((0, 1, 8)),
        inflight=it.choice((1, 2)),
        fixed=it.random() < 0.25,
        order=tuple(it.randint(0, 1) for _ in range(40)),
        arrivals=arrivals,
        faults=tuple(sorted(faults, key=lambda one: one[0])),
        close_at=it.randint(1, 200) if closing else None,
        drain=it.random() < 0.5,
    )


def smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Yield schedules that have a little less: of requests, faults, endings, rows, tokens."""
    for name in ("arrivals", "faults"):
        held = getattr(schedule, name)
        for place in range(len(held)):
            yield attrs.evolve(schedule, **{name: held[:place] + held[place + 1 :]})
    for plain in ({"close_at": None}, {"inflight": 1}, {"fixed": False}, {"batches": (1,)}):
        if any(getattr(schedule, name) != value for name, value in plain.items()):
            yield attrs.evolve(schedule, **plain)
    for place, one in enumerate(schedule.arrivals):
        calm = attrs.evolve(one, cancel_after=None, deadline_us=None, max_tokens=1)
        if calm != one:
            arrivals = (*schedule.arrivals[:place], calm, *schedule.arrivals[place + 1 :])
            yield attrs.evolve(schedule, arrivals=arrivals)


def play(schedule: Schedule, *, limits: Limits | None = None, keep: Path | None = None) -> Outcome:
    """Play a schedule to its end; raises when an invariant, a text or the journal is wrong.

    ``keep``: where its steps become a journal, however it ends.
    """
    chosen = attrs.evolve(
        limits if limits is not None else Limits(), inflight_jobs_max=schedule.inflight
    )
    device = FakeDevice(
        inflight_max=schedule.inflight,
        verified=VERIFIED,
        artifact=lambda model: wide(
            model,
            lanes=schedule.lanes,
            batches=schedule.batches,
            rule="length_zero",
            fixed=schedule.fixed,
        ),
    )
    device.order = list(schedule.order)
    rig = Rig(device=device, limits=chosen, resets=True)
    rig.replays = schedule.seed % 8 == 0
    trouble = Trouble(rig, random.Random(schedule.seed + 1))
    run = _Run(rig, schedule, trouble)
    try:
        run.play()
        return run.judge()
    finally:
        if keep is not None:
            with open_journal(keep) as journal:
                journal.append(rig.steps)


class _Run:
    """One schedule under way."""

    def __init__(self, rig: Rig, schedule: Schedule, trouble: Trouble) -> None:
        self.rig = rig
        self.schedule = schedule
        self.trouble = trouble
        self.impatient: set[int] = set()
        self._cancels: list[tuple[int, Stream]] = []
        self._done = 0
        self._closed = False

    def play(self) -> None:
        """Let everything happen in its turn, then let all of it end."""
        for arrival in self.schedule.arrivals:
            self._act(arrival.after)
            if not self._closed:
                self._submit(arrival)
        last = max((at for at, _ in self.schedule.faults), default=0)
        self._act(max(0, max(last, self.schedule.close_at or 0) + 1 - self._done))
        for _, stream in self._cancels:
            stream.cancel()
        self.trouble.run()
        if not self._closed and self.rig.state.device.state not in ENDS:
            self._prove_service()

    def _submit(self, arrival: Arrival) -> None:
        deadline_s = None if arrival.deadline_us is None else arrival.deadline_us / 1e6
        stream = self.rig.submit(
            arrival.prompt,
            seed=arrival.seed,
            max_tokens=arrival.max_tokens,
            deadline_s=deadline_s,
            ignore_eos=True,
        )
        if deadline_s is not None:
            self.impatient.add(stream.request)
        if arrival.cancel_after is not None:
            self.impatient.add(stream.request)
            self._cancels.append((self._done + arrival.cancel_after, stream))

    def _act(self, count: int) -> None:
        """Let ``count`` actions pass, with the faults and cancels that fall into them."""
        for _ in range(count):
            for at, kind in self.schedule.faults:
                if at == self._done:
                    self.trouble.strike(kind)
            if self._done == self.schedule.close_at:
                self.rig.ask_close(drain=self.schedule.drain)
                self._closed = True
            self._done += 1
            for at, stream in self._cancels:
                if at == self._done:
                    stream.cancel()
            self.rig.act()
            self.trouble.go_on()

    def _prove_service(self) -> None:
        """A device that is not lost serves again, with nothing held back."""
        state = self.rig.state
        assert state.device.state in ("serving", "degraded"), state.device
        assert state.ladder.recovery is None and state.ladder.breaker == "closed"
        assert not state.suspended and not state.requests
        late = self.rig.submit((9, 9, 9), seed=5, max_tokens=3, ignore_eos=True)
        self.rig.run()
        error = late.result().error
        if isinstance(error, RequestRejectedError) and error.reason == "unknown_model":
            assert not state.aliases, "a model that failed to load is not served"
            return
        assert error is None, f"the device is {state.device.state}, yet {late.result()}"

    def judge(self) -> Outcome:
        """Close, and hold what came of it against what must."""
        rig = self.rig
        device = rig.state.device.state
        rig.close(drain=True)
        streams = [one.stream for one in rig.streams]
        early = [one for one in streams if one.result().error is not None]
        early += [one for one in streams if one.request in self.impatient]
        rig.check_answers(ended_early=early)
        hits = tuple(self.trouble.struck)
        made = Outcome(hits=hits, device=device, whole=self.schedule.close_at is None)
        limits = rig.state.limits
        return judge(made, rig.steps, streams, impatient=self.impatient, limits=limits)
