"""The suite ``schedule``: how long each class waits at most, beside the bound that is stated.

The whole engine on a simulated board with a stepped clock, so nothing here depends on the speed of
this machine. Three loads that an adversary would choose, one job in flight:

- **endless prompts**: every lane but one decodes, and short prompts never end;
- **long prompts**: all lanes decode, and long prompts that are run whole stand among short ones;
- **mixed**: short and long prompts, short and long answers, drawn by a seed.

Turns are jobs planned; who waits is read from the state that the steps fold to. Their bounds are
those that ``engine/queueing.py`` states for the model. The bound of the time from one token to the
next follows: half of the turns before a token are decodes, half are prefills, so it is half the
turns times the longest job of both kinds, in device time.

Source: R5.4, E13, I9.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from laneway.adapters.bench_board import LANES, calbin, open_npurt
from laneway.adapters.measuring import Figure, absolute
from laneway.engine import Engine, Limits, Request
from laneway.engine.evolve import fold
from laneway.engine.inputs import Completed
from laneway.engine.ports import Step
from laneway.engine.queueing import bounds
from laneway.engine.state import RequestState, State, initial_state
from laneway.journal import open_journal
from laneway.statemachines import Event

MS = 1_000_000
BATCHES = (1, 4)
SHORT, LONG = 8, 250
BOARD = "sim:cost?clock=virtual&decode=8ms/500us/1us&prefill=4ms/100us/0ns&h2d=50us&d2h=50us"
LIMITS = Limits(
    inflight_jobs_max=1,
    long_prefill_threshold_tokens=64,
    prefill_chunk_tokens=64,
    prefill_tokens_max=64,
    prefill_tokens_per_decode=64,
    canary_jobs=0,
    canary_idle_ns=0,
)


@attrs.frozen
class Ask:
    """One request of a load, handed in after so many jobs."""

    after: int
    prompt: int
    answer: int


def run(tell: Callable[[str], None] = lambda text: None, *, size: int = 6) -> Iterator[Figure]:
    """Measure every load; ``size`` scales how many requests there are."""
    whole = attrs.evolve(LIMITS, prefill_chunk_tokens=LONG)
    loads = {
        "endless": (endless(size), LIMITS),
        "long": (long_prompts(size), whole),
        "mixed": (mixed(size), LIMITS),
    }
    with calbin(batch=BATCHES) as folder:
        for name, (asks, limits) in loads.items():
            tell(f"schedule: {name}")
            watched = serve(folder, asks, limits=limits)
            for kind, most in watched.bounds.items():
                yield absolute(
                    *(f"I9/{name}/{kind}", watched.longest[kind], "turns", "stated bound", most),
                    most=most,
                )
            yield from _between_tokens(name, watched)


def _between_tokens(name: str, watched: "Watched") -> Iterator[Figure]:
    """Return the times between tokens, as 99th percentile and longest, beside their bound."""
    bound = watched.gap_bound_ns / MS
    for share, told in ((0.99, "p99"), (1.0, "longest")):
        yield absolute(
            *(f"I9/{name}/token/{told}", quantile(watched.gaps_ns, share) / MS, "ms"),
            *("half the turns x longest jobs", bound),
            most=bound,
        )


def quantile(values: list[int], share: float) -> int:
    """Return the value that ``share`` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


# ---------------------------------------------------------------------------- loads


def endless(size: int) -> list[Ask]:
    """Every lane but one decodes for long; prompts of one token to answer come without end."""
    decoding = [Ask(0, SHORT, 8 * size) for _ in range(LANES - 1)]
    return [*decoding, *(Ask(LANES, SHORT, 1) for _ in range(48 * size))]


def long_prompts(size: int) -> list[Ask]:
    """Twice as many sequences as lanes decode all the time, with a long prompt now and then."""
    asks = [Ask(0, SHORT, 2 * size) for _ in range(2 * LANES)]
    asks += [Ask(20 * n, LONG, 2) for n in range(size)]
    return [*asks, *(Ask(4 * n, SHORT, 2 * size) for n in range(8 * size))]


def mixed(size: int) -> list[Ask]:
    """Arrivals, prompts and answers of any length."""
    drawn = random.Random(11)
    return [
        Ask(
            after=drawn.randrange(20 * size),
            prompt=drawn.choice((1, SHORT, 60, 65, LONG)),
            answer=drawn.randint(1, 4 * size),
        )
        for _ in range(24 * size)
    ]


# ---------------------------------------------------------------------------- serving


def serve(folder: Path, asks: list[Ask], *, limits: Limits = LIMITS) -> "Watched":
    """Serve a load to its end; return what was seen of it."""
    due = sorted(asks, key=lambda ask: ask.after)
    watched = Watched()
    device = open_npurt(BOARD)
    journal = open_journal()
    with Engine(device=device, journal=journal, limits=limits, threads=False) as engine:
        steps = engine.subscribe(steps_max=1 << 20)
        for step in journal.read():
            watched.take(step)
        engine.load("m", str(folder))
        while True:
            while due and due[0].after <= watched.jobs:
                ask = due.pop(0)
                prompt = tuple(1 + n % 100 for n in range(ask.prompt))
                engine.submit(
                    Request(model="m", prompt=prompt, max_tokens=ask.answer, ignore_eos=True)
                )
            more = engine.advance()
            while (next_step := steps.get(0)) is not None:
                watched.take(next_step)
            if not more and not due:
                return watched
            if not more:
                watched.jobs = due[0].after  # nothing runs until the next arrives


@attrs.define
class Watched:
    """The longest wait of each class in turns, the times between tokens, and the longest jobs."""

    state: State = attrs.Factory(initial_state)
    bounds: dict[str, int] = attrs.Factory(dict)
    longest: Counter[str] = attrs.Factory(Counter)
    gaps_ns: list[int] = attrs.Factory(list)
    job_ns: Counter[str] = attrs.Factory(Counter)
    jobs: int = 0
    _waited: Counter[int] = attrs.Factory(Counter)
    _prefill: int = 0
    _passed: int = 0
    _token_ns: dict[int, int] = attrs.Factory(dict)

    @property
    def gap_bound_ns(self) -> int:
        """The longest time from one token of a sequence to its next that the bounds allow."""
        return self.bounds["decode"] // 2 * (self.job_ns["decode"] + self.job_ns["prefill"])

    def take(self, step: Step) -> None:
        """Take the next step."""
        jobs = {number: job for number, job in self.state.jobs.items() if job.origin == "request"}
        fold(self.state, step)
        for event in step.events:
            if (event.machine, event.trigger) == ("model", "publish"):
                self.bounds = bounds(self.state, self.state.models[event.entities[0]])
            elif (event.machine, event.trigger) == ("request", "decode"):
                self._token_ns.update(dict.fromkeys(event.entities, step.at_ns))
            elif (event.machine, event.trigger) == ("job", "plan"):
                self._plan(event)
        if isinstance(step.taken, Completed) and step.taken.job in jobs:
            job = jobs[step.taken.job]
            took_ns = step.at_ns - job.planned_ns
            self.job_ns[job.task] = max(self.job_ns[job.task], took_ns)
            for row in job.rows if job.task == "decode" else ():
                self.gaps_ns.append(step.at_ns - self._token_ns[row.owner])
                self._token_ns[row.owner] = step.at_ns

    def _plan(self, event: Event) -> None:
        """Count a job that was planned against everybody who still waits after it."""
        if event.data["origin"] != "request":
            return
        self.jobs += 1
        owners = event.data["owners"]
        if event.data["task"] == "decode":
            for owner in owners:
                self._saw("decode", self._waited.pop(owner, 0) + 1)
        else:
            self._saw("prefill", self._prefill + 1)
            self._prefill = 0
            self._pass(owners)
        self._wait(decode=event.data["task"] == "decode")

    def _pass(self, owners: list[int]) -> None:
        """Count short prefills that passed a long prompt."""
        requests = self.state.requests
        if any(requests[owner].long for owner in owners):
            self._saw("long_prefill", self._passed)
            self._passed = 0
        elif any(one.long and one.job is None for one in requests.values() if _prefills(one)):
            self._passed += 1

    def _wait(self, *, decode: bool) -> None:
        requests = self.state.requests.values()
        ready = {one.number for one in requests if one.state == "decoding" and one.job is None}
        for number in set(self._waited) - ready:
            del self._waited[number]
        self._waited.update(ready)
        lane = any(model.empty_lanes for model in self.state.models.values())
        idle = [one for one in requests if _prefills(one) and one.job is None]
        if not any(lane or one.lane is not None for one in idle):
            self._prefill = 0
        elif decode:
            self._prefill += 1

    def _saw(self, kind: str, turns: int) -> None:
        self.longest[kind] = max(self.longest[kind], turns)


def _prefills(request: RequestState) -> bool:
    return request.state in ("waiting", "prefilling")
