"""The suite ``pingpong``: what two jobs in flight hide, and what a batch gives (T4, T5).

T4. The whole engine on a simulated board with a stepped clock, so nothing here depends on the speed
of this machine. Two groups of 16 sequences. The host takes as long for the results of a job as the
device took for the job: device time passes before the engine may look at them. Idle is the time in
which no job computes (``exec`` of the device's own instants), for one job in flight and for two;
what two of them may remove at most follows from the durations of the phases alone.

T5. The same board without host time: tokens a second against what the cost model allows at full
lanes. And on the running clock, with the real engine, sampler (as K2 asks it) and journal: which
share of a tick is not the device's, at 10 ms a job.
"""

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs

from laneway.adapters.bench_board import LANES, calbin, open_npurt
from laneway.adapters.device import NpurtDevice
from laneway.adapters.measuring import Figure, absolute
from laneway.engine import Engine, Limits, Request, Sampling
from laneway.engine.inputs import Completed, Input, JobTimes
from laneway.journal import open_journal

MS = 1_000_000
ROWS = 16
EXEC_NS, TRANSFER_NS = 10 * MS, 50_000
TOKENS = 48
HOST_ROUNDS = 5
BOARD = f"sim:cost?decode={EXEC_NS}ns/0ns/0ns&h2d={TRANSFER_NS}ns&d2h={TRANSFER_NS}ns"
SAMPLING = Sampling(temperature=0.7, top_k=20, top_p=0.95)
T4_LEAST, T5_LEAST, T5_HOST_MOST = 80.0, 0.95, 10.0


def run(
    tell: Callable[[str], None] = lambda text: None, *, tokens: int = TOKENS, real: bool = True
) -> Iterator[Figure]:
    """Measure T4 and T5. The arguments make it short for tests."""
    with calbin(batch=(1, ROWS)) as folder:
        tell("pingpong: host work beside device work")
        host_ns = EXEC_NS + 2 * TRANSFER_NS
        seen = {
            depth: idle_share(decode_times(folder, depth=depth, host_ns=host_ns, tokens=tokens))
            for depth in (1, 2)
        }
        jobs = 2 * tokens
        model = {depth: idle_share(model_times(jobs, depth, host_ns)) for depth in (1, 2)}
        removed, possible = (100 * (each[1] - each[2]) for each in (seen, model))
        yield attrs.evolve(
            absolute(
                *("T4", 100 * removed / possible, "% of the idle that may go"),
                *("idle removed / what may go, % of time", possible),
                least=T4_LEAST,
            ),
            ratio=round(removed / possible, 3),
        )
        tell("pingpong: tokens a second at full lanes")
        times = decode_times(folder, depth=2, host_ns=0, tokens=tokens)
        bound = ROWS / max(EXEC_NS, TRANSFER_NS) * 1e9
        rate = ROWS / statistics.median(periods_ns(times)) * 1e9
        yield attrs.evolve(
            absolute("T5", rate, "tokens/s, device time", "cost model", bound, least=0),
            gate=f">= {T5_LEAST:g}x of the bound",
            gate_met=rate >= T5_LEAST * bound,
        )
        if real:
            tell("pingpong: the host's share of a tick")
            yield _host_share(folder, tokens)


def _host_share(folder: Path, tokens: int, *, rounds: int = HOST_ROUNDS) -> Figure:
    """T5: the part of a tick in which the device has nothing of it, on the running clock.

    It has a job from the instant that it accepted it to the one at which its result is there. Every
    round is an engine of its own.
    """
    shares, lengths = [], []
    for _ in range(rounds):
        times = decode_times(folder, depth=1, host_ns=None, tokens=tokens, requests=ROWS)
        period = statistics.median(periods_ns(times))
        busy = statistics.median(each.visible_ns - each.accept_ns for each in times)
        shares.append(100 * (period - busy) / period)
        lengths.append(busy / 1000)
    return absolute(
        *("T5/host", statistics.median(shares), "% of a tick"),
        *("device, us a tick", statistics.median(lengths)),
        most=T5_HOST_MOST,
    )


def decode_times(
    folder: Path, *, depth: int, host_ns: int | None, tokens: int, requests: int = LANES
) -> list[JobTimes]:
    """Return the instants of the full decode jobs of so many requests.

    ``host_ns``: device time that the results of a job take on the host; None for a running clock.
    """
    clock = "virtual" if host_ns is not None else "real"
    device: Any = open_npurt(f"{BOARD}&clock={clock}")
    if host_ns:
        device = BusyHost(device, host_ns)
    limits = Limits(inflight_jobs_max=depth, batch_rows_max=ROWS, canary_jobs=0, canary_idle_ns=0)
    with TemporaryDirectory(prefix="laneway-bench-") as place:
        journal = open_journal(Path(place) / "run.db")
        with Engine(device=device, journal=journal, limits=limits) as engine:
            engine.load("m", str(folder))
            steps = engine.subscribe(steps_max=1 << 20)
            asks = Request(
                model="m", prompt=(1, 2, 3), max_tokens=tokens, ignore_eos=True, sampling=SAMPLING
            )
            streams = [engine.submit(asks) for _ in range(requests)]
            for stream in streams:
                stream.result().raise_for_error()
            steps.close()
    done = [step.taken for step in steps if isinstance(step.taken, Completed)]
    full = [one.times for one in done if len(one.rows) == ROWS and _decodes(one.times)]
    return full[2:-2]  # in full swing


def _decodes(times: JobTimes) -> bool:
    """Whether a job took as long as a decode job does, rather than a prefill of 16 prompts."""
    return abs(times.exec_end_ns - times.exec_begin_ns - EXEC_NS) < EXEC_NS // 2


class BusyHost:
    """A stepped device whose host is slow: results are seen only when their time has passed.

    One result after the other; meanwhile device time runs and the other job goes on.
    """

    def __init__(self, device: NpurtDevice, host_ns: int) -> None:
        self._device = device
        self._host_ns = host_ns
        self._seen: deque[Completed] = deque()
        self._until_ns: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def start(self, post: Callable[[Input], None], *, threads: bool) -> None:
        """Keep the results of full batches back; everything else is seen at once."""
        self._post = post
        self._device.start(self._take, threads=threads)

    def _take(self, taken: Input) -> None:
        if isinstance(taken, Completed) and len(taken.rows) == ROWS:
            self._seen.append(taken)
        else:
            self._post(taken)

    def step(self) -> bool:
        """Do one piece of device work, or be done with a result whose time has passed."""
        if self._device.step():
            return True
        if not self._seen:
            return False
        now_ns = self._device.clock.now_ns()
        if self._until_ns is None:
            self._until_ns = now_ns + self._host_ns
        if now_ns < self._until_ns:
            return False
        self._until_ns = None
        self._post(self._seen.popleft())
        return True

    def advance(self, until_ns: int | None) -> bool:
        """Let device time pass, at most to the end of the host's work."""
        ends = [at for at in (until_ns, self._until_ns) if at is not None]
        return self._device.advance(min(ends, default=None))


def model_times(jobs: int, depth: int, host_ns: int) -> list[JobTimes]:
    """Return the instants that the overlap model gives so many jobs: all three phases overlap.

    A job is submitted when the host is done with the one ``depth`` before it. Each phase begins
    when the job is there and the phase before it in the order of the submits has left it.
    """
    made: list[JobTimes] = []
    host_done: list[int] = []
    for number in range(jobs):
        submit = host_done[number - depth] if number >= depth else 0
        last = made[-1] if made else JobTimes()
        h2d = max(submit, last.h2d_end_ns)
        compute = max(h2d + TRANSFER_NS, last.exec_end_ns)
        d2h = max(compute + EXEC_NS, last.d2h_end_ns)
        visible = d2h + TRANSFER_NS
        made.append(
            JobTimes(
                submit_ns=submit,
                h2d_begin_ns=h2d,
                h2d_end_ns=h2d + TRANSFER_NS,
                exec_begin_ns=compute,
                exec_end_ns=compute + EXEC_NS,
                d2h_begin_ns=d2h,
                d2h_end_ns=visible,
                visible_ns=visible,
            )
        )
        host_done.append(max(visible, host_done[-1] if host_done else 0) + host_ns)
    return made[2:-2]


def idle_share(times: Sequence[JobTimes]) -> float:
    """Return the share of the time in which no job computes; jobs compute one at a time."""
    begin = min(each.exec_begin_ns for each in times)
    end = max(each.exec_end_ns for each in times)
    busy = sum(each.exec_end_ns - each.exec_begin_ns for each in times)
    return 1 - busy / (end - begin)


def periods_ns(times: Sequence[JobTimes]) -> list[int]:
    """Return the times from the end of each job's computing to that of the next."""
    ends = sorted(each.exec_end_ns for each in times)
    return [later - earlier for earlier, later in zip(ends, ends[1:], strict=False)]
