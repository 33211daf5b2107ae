"""Fault schedules on the stepped device: drawn from a seed, played to the end, held against truth.

A schedule is a shape (batches, lanes, jobs in flight), requests that arrive over time, cancels,
deadlines, a close, and one to three faults of any kind at points of the run. ``play`` runs it with
every invariant after every step; what a client got is compared with a run alone, resets are counted
against their budgets from the events alone, and the end must be service or a device that is lost
for a stated reason. The same seed is the same schedule.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable

import attrs
from support.campaign_faults import KINDS, Kind, Trouble
from support.fake_device import FakeDevice
from support.rig import Rig
from support.schedules import VERIFIED, wide

from laneway.engine import Limits, RequestRejectedError, Stream
from laneway.engine.ladder import budget
from laneway.engine.state import State
from laneway.statemachines import Event

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


@attrs.define
class Outcome:
    """What came of one schedule."""

    schedule: Schedule
    hits: tuple[str, ...]
    """Kinds that did strike."""

    device: str
    accepted: int = 0
    finished: int = 0
    innocent: int = 0
    """Accepted requests that no fault named and whose clients waited."""

    innocent_finished: int = 0
    lost: int = 0
    differing: int = 0
    resets: tuple[int, ...] = ()
    """The rungs of the resets, in order."""

    over_budget: int = 0


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


def play(schedule: Schedule, *, limits: Limits | None = None) -> Outcome:
    """Play a schedule to its end; raises when an invariant, a text or the journal is wrong."""
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
    run.play()
    return run.judge()


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
        if isinstance(error, RequestRejectedError) and error.reason == "no_such_model":
            assert not state.aliases, "a model that failed to load is not served"
            return
        assert error is None, f"the device is {state.device.state}, yet {late.result()}"

    def judge(self) -> Outcome:
        """Close, and hold what came of it against what must."""
        rig, state = self.rig, self.rig.state
        device = state.device.state
        rig.close(drain=True)
        early = [one.stream for one in rig.streams if one.stream.result().error is not None]
        early += [s for s in (one.stream for one in rig.streams) if s.request in self.impatient]
        rig.check_answers(ended_early=early)
        made = Outcome(schedule=self.schedule, hits=tuple(self.trouble.struck), device=device)
        suspects = set(_numbers(rig.events("request", "suspend"), suspect=True))
        suspects |= _refused_again(rig)
        accepted = set(_numbers(rig.events("request", "admit")))
        for one in rig.streams:
            if one.stream.request not in accepted:
                continue
            result = one.stream.result()
            good = result.finish_reason in ("stop", "length")
            made.accepted += 1
            made.finished += good
            if one.stream.request not in suspects | self.impatient:
                made.innocent += 1
                made.innocent_finished += good
        resets = rig.events("device", "reset")
        made.resets = tuple(event.data["rung"] for event in resets)
        made.over_budget = over_budget(rig, state)
        return made


def _numbers(events: Iterable[Event], **data: object) -> list[int]:
    """Return the entities of the events whose data says so."""
    return [
        number
        for event in events
        if all(event.data.get(name) == value for name, value in data.items())
        for number in event.entities
    ]


def _refused_again(rig: Rig) -> set[int]:
    """Return the requests whose jobs were refused more often than a job is tried again (row 3)."""
    owners = {
        number: event.data["owners"]
        for event in rig.events("job", "plan")
        for number in event.entities
    }
    refused = Counter(
        owner
        for event in rig.events("job", "refuse")
        for number in event.entities
        for owner in owners[number]
    )
    return {owner for owner, times in refused.items() if times > 1}


def over_budget(rig: Rig, state: State) -> int:
    """Return how many resets went beyond a budget, counted from the steps alone (I10)."""
    times: dict[int, list[int]] = {}
    over = 0
    for step in rig.steps:
        for event in step.events:
            if (event.machine, event.trigger) != ("device", "reset") or not event.data["level"]:
                continue
            rung = event.data["rung"]
            allowed = budget(state.limits, rung)
            before = times.setdefault(rung, [])
            recent = [at for at in before if step.at_ns - at < allowed.window_ns]
            over += len(recent) >= allowed.count
            before.append(step.at_ns)
    return over


@attrs.define
class Tally:
    """Many outcomes in figures, by kind of fault where a schedule had one fault alone."""

    schedules: int = 0
    accepted: int = 0
    finished: int = 0
    over_budget: int = 0
    lost_devices: int = 0
    resets: Counter[int] = attrs.Factory(Counter)
    shares: dict[str, tuple[int, int]] = attrs.Factory(dict)
    """By kind: innocents that finished, and innocents."""

    def add(self, made: Outcome) -> None:
        """Count one outcome."""
        self.schedules += 1
        self.accepted += made.accepted
        self.finished += made.finished
        self.over_budget += made.over_budget
        self.lost_devices += made.device == "lost"
        self.resets.update(made.resets)
        if len(made.hits) == 1 and made.schedule.close_at is None:
            done, all_ = self.shares.get(made.hits[0], (0, 0))
            self.shares[made.hits[0]] = (
                done + made.innocent_finished,
                all_ + made.innocent,
            )

    def lines(self) -> list[str]:
        """Return the figures to print."""
        rungs = ", ".join(f"R{rung} {count}" for rung, count in sorted(self.resets.items()))
        head = (
            f"{self.schedules} schedules: {self.finished} of {self.accepted} requests finished,"
            f" {self.lost_devices} devices lost, resets {rungs or 'none'},"
            f" {self.over_budget} over budget"
        )
        return [head, *(self._line(kind) for kind in sorted(self.shares))]

    def _line(self, kind: str) -> str:
        done, all_ = self.shares[kind]
        return f"  {kind:24} {done:6} of {all_:6} innocents finished ({share(done, all_):.1%})"


def share(done: int, all_: int) -> float:
    """Return a share, 1 of nothing."""
    return done / all_ if all_ else 1.0


def campaign(
    seeds: Iterable[int],
    *,
    draw_one: Callable[[int], Schedule] = draw,
    tally: Tally | None = None,
) -> Tally:
    """Play a schedule for each seed and count it; a failure names its schedule."""
    tally = tally if tally is not None else Tally()
    for seed in seeds:
        schedule = draw_one(seed)
        try:
            tally.add(play(schedule))
        except Exception as failure:
            failure.add_note(f"schedule {schedule}")
            raise
    return tally
