"""A long run with everything checked: does anything leak, end twice, differ, or never end.

Requests of mixed lengths arrive at a fixed rate of the device's own time, each out of a pool whose
answers were computed before on a device without faults. Every finished answer is compared with
them, every ending is counted, the invariants run after every step. A fault that ends the device
ends the incarnation: the engine is closed, a fresh device is opened on the same journal, and the
run goes on. Between incarnations, and at the end, pools, lanes and queues must be idle.
"""

import gc
import random
import resource
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs

from laneway.adapters.arena import Account, Graveyard
from laneway.adapters.discover import open_device
from laneway.engine import Engine, Request, Sampling, Stream
from laneway.engine.errors import EngineClosedError, InvariantError, ModelError
from laneway.engine.invariants import check
from laneway.engine.ports import DevicePort, Step
from laneway.engine.snapshot import Snapshot
from laneway.engine.state import State
from laneway.engine.watch import Watch
from laneway.journal import open_journal
from laneway.statemachines import MACHINES, Event

HOUR_NS = 3_600_000_000_000
ARRIVAL_NS = 4_000_000_000
POOL = 48
PROMPT_TOKENS_MAX = 16
TOKENS_MAX = 12
CANCEL_SHARE = 0.02
DEADLINE_SHARE = 0.02
ALIAS = "soak"
KIB = 1024
MEMORY_EVERY = 200
MEMORY_GROWTH_KIB_MAX = 48 * KIB


@attrs.define(kw_only=True)
class SoakReport:
    """What came of a soak.

    ``lost`` are accepted requests without an ending, ``doubled`` with more than one.
    """

    requests: int = 0
    completed: int = 0
    errors: int = 0
    lost: int = 0
    doubled: int = 0
    token_differences: int = 0
    invariant_breaks: int = 0
    not_idle: int = 0
    resets: int = 0
    rungs: dict[str, int] = attrs.Factory(dict)
    steps: int = 0
    incarnations: int = 0
    failed_loads: int = 0
    """Incarnations whose device was lost before its model was ready."""
    endings: dict[str, int] = attrs.Factory(dict)
    device_hours: float = 0.0
    memory_growth_kib: int = 0
    """The most that resident memory grew within one incarnation, from its 200th request on."""

    @property
    def ok(self) -> bool:
        """Whether nothing was lost, doubled, different, broken or left behind."""
        return not (
            self.lost
            or self.doubled
            or self.token_differences
            or self.invariant_breaks
            or self.not_idle
            or self.memory_growth_kib > MEMORY_GROWTH_KIB_MAX
        )


@attrs.frozen
class _Asked:
    """One request of the pool and its answer on a device without faults."""

    request: Request
    answer: tuple[int, ...]


@attrs.define
class _Waiting:
    """A stream whose ending is due, the pool entry it came from, and the endings it has had."""

    stream: Stream
    asked: _Asked
    ended_early: bool


class Soak:
    """One long run on one kind of device."""

    def __init__(
        self,
        *,
        hours: float,
        clock: str,
        faults: Path | None,
        seed: int,
        model: Path,
        tell: Callable[[SoakReport, float], None] = lambda report, share: None,
    ) -> None:
        self._length_ns = int(hours * HOUR_NS)
        self._stepped = clock == "virtual"
        self._query = f"clock={clock}&seed={seed}"
        self._faults = faults
        self._model = model
        self._random = random.Random(seed)
        self._tell = tell
        self._report = SoakReport()
        self._endings: Counter[str] = Counter()
        self._watch = Watch()
        self._ended: set[int] = set()
        self._memory_kib = 0
        self._spent_ns = 0

    def run(self) -> SoakReport:
        """Run to the end and report."""
        pool = self._make_pool()
        # What was made up to here stays: nobody needs to look through it again and again.
        gc.collect()
        gc.freeze()
        with TemporaryDirectory(prefix="laneway-soak-") as folder:
            journal = str(Path(folder) / "soak.db")
            while self._spent_ns < self._length_ns and not self._report.invariant_breaks:
                self._report.incarnations += 1
                self._live(journal, pool)
        self._report.endings = dict(sorted(self._endings.items()))
        self._report.device_hours = round(self._spent_ns / HOUR_NS, 3)
        return self._report

    def _make_pool(self) -> list[_Asked]:
        """Draw the pool and compute its answers, one request at a time, without faults."""
        device = open_device("sim:?clock=virtual", whole_jobs=True)
        with Engine(device=device, journal=open_journal(None)) as engine:
            engine.load(ALIAS, str(self._model))
            vocabulary = engine.models()[0].vocabulary
            return [self._draw(engine, vocabulary) for _ in range(POOL)]

    def _draw(self, engine: Engine, vocabulary: int) -> _Asked:
        draw = self._random
        request = Request(
            model=ALIAS,
            prompt=[draw.randrange(vocabulary) for _ in range(draw.randint(1, PROMPT_TOKENS_MAX))],
            max_tokens=draw.randint(1, TOKENS_MAX),
            sampling=Sampling(
                temperature=draw.choice((0.0, 0.8, 1.0)),
                top_k=draw.choice((0, 20)),
                seed=draw.getrandbits(63),
            ),
        )
        return _Asked(request, engine.submit(request).result().tokens)

    def _live(self, journal: str, pool: list[_Asked]) -> None:
        """Run one incarnation until the time is over or its device is lost."""
        # An incarnation stands for a process, and what it keeps is its own (E9).
        graveyard = Graveyard(Account())
        device = open_device(
            f"sim:?{self._query}{self._fault_key()}", graveyard=graveyard, whole_jobs=True
        )
        waiting: deque[_Waiting] = deque()
        begun_ns = device.clock.now_ns()
        try:
            with Engine(
                device=device,
                journal=open_journal(journal),
                inspect=self._inspect,
            ) as engine:
                engine.load(ALIAS, str(self._model))
                self._serve(engine, device, pool, waiting, begun_ns)
                if engine.snapshot().device != "lost":
                    self._drain(engine, device, waiting)
                    self._check_idle(engine.snapshot())
                self._report.steps = engine.snapshot().step
        except InvariantError:
            self._report.invariant_breaks += 1
        except ModelError:
            self._report.failed_loads += 1
        self._spent_ns += max(device.clock.now_ns() - begun_ns, 1)
        self._account(waiting)

    def _serve(
        self,
        engine: Engine,
        device: DevicePort,
        pool: list[_Asked],
        waiting: deque[_Waiting],
        begun_ns: int,
    ) -> None:
        """Hand in requests at the arrival rate until the time is over or the device is lost."""
        end_ns = begun_ns + self._length_ns - self._spent_ns
        arrival_ns = begun_ns
        served = 0
        while arrival_ns < end_ns:
            self._pass_time(engine, device, arrival_ns)
            if engine.snapshot().device == "lost":
                return
            self._submit(engine, pool, waiting)
            self._account(waiting, ended_only=True)
            arrival_ns += ARRIVAL_NS
            served += 1
            if served % MEMORY_EVERY == 0:
                self._watch_memory(first=served == MEMORY_EVERY)
                self._report.steps = engine.snapshot().step
                share = (self._spent_ns + arrival_ns - begun_ns) / self._length_ns
                self._tell(self._report, min(share, 1.0))

    def _watch_memory(self, *, first: bool) -> None:
        """Compare resident memory with that of the incarnation's first look.

        Why within one incarnation: a lost device is left alone with all its memory (D13).
        """
        gc.collect()
        now_kib = _memory_kib()
        if first:
            self._memory_kib = now_kib
        growth_kib = now_kib - self._memory_kib
        self._report.memory_growth_kib = max(self._report.memory_growth_kib, growth_kib)

    def _submit(self, engine: Engine, pool: list[_Asked], waiting: deque[_Waiting]) -> None:
        asked = self._random.choice(pool)
        chance = self._random.random()
        request = asked.request
        early = chance < CANCEL_SHARE + DEADLINE_SHARE
        if CANCEL_SHARE <= chance < CANCEL_SHARE + DEADLINE_SHARE:
            request = attrs.evolve(request, deadline_s=1e-5)
        stream = engine.submit(request)
        self._report.requests += 1
        waiting.append(_Waiting(stream, asked, early))
        if chance < CANCEL_SHARE:
            stream.cancel()

    def _pass_time(self, engine: Engine, device: DevicePort, until_ns: int) -> None:
        """Let the engine work and device time pass until an instant."""
        if not self._stepped:
            while device.clock.now_ns() < until_ns and engine.health().live:
                left_ns = until_ns - device.clock.now_ns()
                engine.wait(min(device.clock.real_seconds(left_ns), 0.05))
            return
        while True:
            engine.run_until_idle()
            if device.clock.now_ns() >= until_ns or not engine.advance(until_ns):
                return

    def _drain(self, engine: Engine, device: DevicePort, waiting: deque[_Waiting]) -> None:
        while (waiting or not _is_settled(engine)) and engine.snapshot().device != "lost":
            self._account(waiting, ended_only=True)
            if waiting or not _is_settled(engine):
                self._pass_time(engine, device, device.clock.now_ns() + ARRIVAL_NS)
        self._pass_time(engine, device, device.clock.now_ns() + ARRIVAL_NS)

    def _account(self, waiting: deque[_Waiting], *, ended_only: bool = False) -> None:
        """Count the endings there are.

        Without ``ended_only`` every request must have one by now.
        """
        kept: deque[_Waiting] = deque()
        while waiting:
            one = waiting.popleft()
            if not one.stream.ended:
                kept.append(one)
                continue
            try:
                result = one.stream.result()
            except EngineClosedError:
                self._report.lost += 1
                continue
            self._endings[result.finish_reason] += 1
            good = result.finish_reason in ("stop", "length")
            self._report.completed += good
            self._report.errors += result.finish_reason == "error"
            expected = one.asked.answer[: len(result.tokens)]
            if result.tokens != (one.asked.answer if good else expected):
                self._report.token_differences += 1
        if ended_only:
            waiting.extend(kept)
        else:
            self._report.lost += len(kept)

    def _inspect(self, state: State, steps: Sequence[Step]) -> None:
        """Hold every step to the invariants, and count endings from the events alone."""
        for step in steps:
            self._watch.take(step)
            for event in step.events:
                if event.machine == "device" and event.trigger in ("reset", "lose"):
                    self._count_rung(event)
                if event.machine == "request" and event.dest in MACHINES["request"].final:
                    for number in event.entities:
                        self._report.doubled += number in self._ended
                        self._ended.add(number)
        check(state)

    def _count_rung(self, event: Event) -> None:
        """Count a reset by its rung, or the rung that a device was lost with."""
        rung = f"R{event.data['rung']}"
        self._report.rungs[rung] = self._report.rungs.get(rung, 0) + 1
        self._report.resets += event.trigger == "reset"

    def _check_idle(self, picture: Snapshot) -> None:
        lanes, buffers = dict(picture.lanes), dict(picture.buffers)
        lanes.pop("empty", None)
        buffers.pop("free", None)
        unknown = lanes.pop("unknown", 0)
        if picture.device == "degraded":
            buffers.pop("quarantined", None)
        if lanes or buffers or picture.jobs or picture.requests or unknown > 2:
            self._report.not_idle += 1

    def _fault_key(self) -> str:
        return "" if self._faults is None else f"&faults={self._faults}"


def _is_settled(engine: Engine) -> bool:
    """Return whether no recovery is under way."""
    return engine.snapshot().device in ("serving", "degraded")


def _memory_kib() -> int:
    """Return the resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // KIB
