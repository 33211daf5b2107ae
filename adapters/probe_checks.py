"""What the isolation runner checks, one capability after the other.

A check takes a device that nobody else uses and says what it found. It passes only by what it
measured or compared: logits by every bit against the same sequence run alone, and that one against
the golden numbers of the calbin; states and counters against a ledger of its own.

Source: R5.2, R6.1, E12, E14, E15, E25.
"""

import ctypes
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Self

import attrs

from laneway.adapters import npurt
from laneway.adapters.npurt import ENGINE_AUTO, ENGINE_PING, ENGINE_PONG
from laneway.adapters.probe_overlap import check_overlap, check_parallel_mode
from laneway.adapters.probing import (
    CheckFailed,
    Finding,
    Flight,
    Output,
    Piece,
    Probed,
    told_counters,
)
from laneway.adapters.trials import EQUAL, judge_row

ROUNDS = 4
LONG_TOKENS = 24
STEPS = 4
POLLS_AFTER = 3
POLL_TIMEOUT_S = 30.0


@attrs.frozen
class Story:
    """A prompt and the tokens that follow it; ``golden`` is its run in the calbin, if it is one."""

    prompt: tuple[int, ...]
    forced: tuple[int, ...]
    golden: int | None = None

    def jobs(self) -> Iterator[tuple[int, ...]]:
        """Return the tokens of each job: the prompt, then one at a time."""
        yield self.prompt
        for token in self.forced:
            yield (token,)


def stories(probed: Probed, seed: int) -> list[Story]:
    """Return pairs of stories: of equal length, of unequal length, and the golden ones."""
    drawn = random.Random(seed)
    longest = max((part.tokens_max for part in probed.parts if part.task == "prefill"), default=0)
    room = min(longest, probed.info.max_context - STEPS)
    if room < 2:
        raise CheckFailed("the calbin has no room for a prompt of two tokens and some more")
    long, short = min(LONG_TOKENS, room), max(1, min(LONG_TOKENS, room) // 6)

    def draw(length: int) -> Story:
        tokens = [drawn.randrange(probed.info.vocab) for _ in range(length + STEPS)]
        return Story(tuple(tokens[:length]), tuple(tokens[length:]))

    told = [draw(long), draw(long), draw(long), draw(short), draw(short), draw(long)]
    for index, run in enumerate(probed.golden[:2]):
        told.append(Story(run.prompt, run.greedy[:-1][:STEPS], index))
    return told[: len(told) // 2 * 2]


# ---------------------------------------------------------------------------- alone


def run_alone(probed: Probed, story: Story, engine: int = ENGINE_AUTO) -> list[Output]:
    """Run a story with nothing else in flight; hold it against its golden numbers."""
    sequence = probed.open()
    outputs = [probed.run(Piece(sequence, tokens), engine=engine) for tokens in story.jobs()]
    probed.release(sequence)
    if story.golden is not None:
        _judge(probed, story, outputs)
    return outputs


def _judge(probed: Probed, story: Story, outputs: list[Output]) -> None:
    assert story.golden is not None
    for offset, output in enumerate(outputs):
        position = len(story.prompt) - 1 + offset
        verdict = judge_row(probed.golden[story.golden], position, output.logits[0])
        if verdict != EQUAL:
            raise CheckFailed(f"golden run {story.golden}, position {position}: {verdict}")


def check_golden(probed: Probed, seed: int) -> Iterator[Finding]:
    """Hold the calbin's layout against its own golden numbers."""
    if not probed.golden:
        raise CheckFailed("the calbin has no golden run that fits it")
    rows = 0
    for index, run in enumerate(probed.golden):
        story = Story(run.prompt, run.greedy[:-1][:STEPS], index)
        rows += len(run_alone(probed, story))
    layout = npurt.LAYOUTS.get(probed.info.layout, str(probed.info.layout))
    note = f"layout {layout}: {rows} golden rows equal within BF16"
    yield Finding("LAYOUTS", value=1 << probed.info.layout, note=note)


# ---------------------------------------------------------------------------- two in flight


@attrs.define
class Pair:
    """Two stories at once: their outputs, and how often both had a job in flight."""

    outputs: tuple[list[Output], list[Output]] = attrs.Factory(lambda: ([], []))
    together: int = 0


def run_together(
    probed: Probed, pair: tuple[Story, Story], engines: tuple[int, int], *, forced: bool = False
) -> Pair:
    """Run two stories, each going on as soon as its job is done; jobs fill both banks."""
    sequences = (probed.open(), probed.open())
    jobs = tuple(story.jobs() for story in pair)
    told = Pair()
    flying: dict[int, Flight] = {}

    def go_on(side: int) -> None:
        tokens = next(jobs[side], None)
        if tokens is None:
            return
        flying[side] = probed.start(
            (Piece(sequences[side], tokens),), engine=engines[side], forced=forced
        )
        other = flying.get(1 - side)
        if other is not None and not probed.poll(other).h.flags & npurt.TERMINAL:
            told.together += 1

    for side in (0, 1):
        go_on(side)
    while flying:
        ended = probed.wait(list(flying.values()))
        side = next(each for each, flight in flying.items() if flight is ended)
        del flying[side]
        told.outputs[side].append(probed.finish(ended))
        go_on(side)
    for sequence in sequences:
        probed.release(sequence)
    return told


def compare(alone: list[Output], together: list[Output], name: str) -> None:
    """Hold the jobs of a story against the same alone. Raises: CheckFailed at the first bit."""
    for number, (wanted, found) in enumerate(zip(alone, together, strict=True)):
        if found.equals(wanted):
            continue
        what = "KV digest" if found.logits[0].tobytes() == wanted.logits[0].tobytes() else "logits"
        raise CheckFailed(f"{name}, job {number}: its {what} differ from the same job alone")


def check_interleave(probed: Probed, seed: int) -> Iterator[Finding]:
    """See that two jobs with buffers and sequences of their own give what each gives alone."""
    told = stories(probed, seed)
    alone = [run_alone(probed, story) for story in told]
    together = jobs = 0
    for first in range(0, len(told), 2):
        pair = (told[first], told[first + 1])
        for engines in ((ENGINE_PING, ENGINE_PONG), (ENGINE_PONG, ENGINE_PING)):
            found = run_together(probed, pair, engines)
            together += found.together
            jobs += sum(map(len, found.outputs))
            lengths = f"prompts of {len(pair[0].prompt)} and {len(pair[1].prompt)} tokens"
            for side in (0, 1):
                compare(alone[first + side], found.outputs[side], lengths)
    if not together:
        raise CheckFailed("no two jobs were ever in flight at once: each ended too soon")
    digest = "and KV digests " if alone[0][0].digests[0] is not None else ""
    note = f"logits {digest}of {jobs} jobs equal bit for bit, {together} of them beside another"
    yield Finding("IN_FLIGHT", value=2, note=note)


def check_ping_pong(probed: Probed, seed: int) -> Iterator[Finding]:
    """See that a job runs on the bank that its buffer is bound to, or that it is forced to."""
    task = probed.part("prefill")
    if task is None or not task.engine_modes & 0b110:
        raise CheckFailed("the calbin binds no job to a bank")
    told = stories(probed, seed)
    pair = (told[0], told[1])
    alone = [run_alone(probed, story) for story in pair]
    for engines in ((ENGINE_PING, ENGINE_PONG), (ENGINE_PONG, ENGINE_PING)):
        for forced in (False, True):
            found = run_together(probed, pair, engines, forced=forced)
            for side in (0, 1):
                used = {output.engine for output in found.outputs[side]}
                if used != {engines[side]}:
                    raise CheckFailed(f"asked for bank {engines[side]}, it ran on {sorted(used)}")
                compare(alone[side], found.outputs[side], f"bank {engines[side]}")
    note = "bound and forced jobs ran on the bank asked for, with the same bits as alone"
    yield Finding("PING_PONG", value=2, note=note)


# ---------------------------------------------------------------------------- status, counters


def check_status(probed: Probed, seed: int) -> Iterator[Finding]:
    """Poll on a second thread while the first waits: states come in order and end truly."""
    told = stories(probed, seed)
    polls = 0
    for round_ in range(ROUNDS):
        story = told[round_ % len(told)]
        wanted = run_alone(probed, story)
        sequence = probed.open()
        for number, tokens in enumerate(story.jobs()):
            flight = probed.start((Piece(sequence, tokens),))
            with _Watch(probed, flight) as watch:
                while probed.device.stepped and watch.ask() and probed.step():
                    pass
                probed.wait((flight,))
            polls += watch.judge()
            compare([wanted[number]], [probed.finish(flight)], "polled")
        probed.release(sequence)
    yield Finding("POLL_THREADSAFE", value=1, note=f"{polls} polls beside a wait, states in order")


class _Watch:
    """Polls one job on a thread of its own and remembers each change of its state.

    A device that is stepped is polled twice when asked, between two events; any other all the time.
    """

    def __init__(self, probed: Probed, flight: Flight) -> None:
        self._probed = probed
        self._flight = flight
        self._waited = threading.Event()
        self._asked, self._answered = threading.Semaphore(0), threading.Semaphore(0)
        self._seen: list[int] = []
        self._polls = 0
        self._wrong = ""
        self._thread = threading.Thread(target=self._run, name="laneway-probe-poll", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._waited.set()
        self._asked.release()
        self._thread.join(timeout=POLL_TIMEOUT_S)

    def ask(self) -> bool:
        """Have it poll once; return whether the job is still open."""
        self._asked.release()
        self._answered.acquire(timeout=POLL_TIMEOUT_S)
        return not self._wrong and bool(self._seen) and self._seen[-1] < npurt.JOB_DONE

    def _run(self) -> None:
        try:
            if self._probed.device.stepped:
                while self._asked.acquire() and not self._waited.is_set():
                    self._poll()
                    self._poll()
                    self._answered.release()
            else:
                while not self._waited.is_set():
                    self._poll()
            for _ in range(POLLS_AFTER):
                self._poll()
        except Exception as error:
            self._wrong = self._wrong or f"{type(error).__name__}: {error}"
            self._answered.release()

    def _poll(self) -> None:
        told = self._probed.poll(self._flight)
        self._polls += 1
        if not self._seen or told.state != self._seen[-1]:
            self._seen.append(told.state)
        terminal = bool(told.h.flags & npurt.TERMINAL)
        if self._wrong:
            return
        if terminal != (told.state >= npurt.JOB_DONE):
            self._wrong = f"state {_state(told.state)} with flags {told.h.flags}"
        elif terminal:
            self._wrong = self._hold_result(told.state)

    def _hold_result(self, state: int) -> str:
        """Hold an end that a poll tells against the job's own result."""
        done = npurt.Completion()
        answer = self._probed.calls.attempt(
            "npurt_job_result", self._flight.ticket, ctypes.byref(done)
        )
        if not answer.ok:
            return f"a poll says {_state(state)}, the result {answer.reason}"
        if done.state != state:
            return f"a poll says {_state(state)}, the result {_state(done.state)}"
        return ""

    def judge(self) -> int:
        """Return the number of polls. Raises: CheckFailed if states went back or said too much."""
        if self._thread.is_alive():
            raise CheckFailed("a poll beside a wait has not returned")
        order = " ".join(map(_state, self._seen))
        if self._seen != sorted(self._seen):
            raise CheckFailed(f"the state went back: {order}")
        if self._wrong:
            raise CheckFailed(f"{self._wrong} (seen: {order})")
        return self._polls


def _state(number: int) -> str:
    return npurt.JOB_STATES.get(number, str(number))


def check_counters(probed: Probed, seed: int) -> Iterator[Finding]:
    """Hold the device's counters against a ledger kept here, at rest and with jobs in flight."""
    opening = told_counters(probed.opening)
    base = told_counters(probed.counters())
    if base != opening:
        raise CheckFailed(f"counters moved without a job: {_moved(opening, base)}")
    looks = 0
    submitted, finished = probed.ledger.submitted, probed.ledger.finished
    told = stories(probed, seed)
    for first in range(0, len(told), 2):
        pair = told[first : first + 2]
        sequences = [probed.open() for _ in pair]
        for tokens in zip(*(story.jobs() for story in pair), strict=False):
            flights = []
            for sequence, each in zip(sequences, tokens, strict=True):
                flights.append(probed.start((Piece(sequence, each),)))
                _hold(probed, base, probed.ledger.submitted - submitted, finished)
            while flights:
                ended = probed.wait(flights)
                flights.remove(ended)
                _hold(probed, base, probed.ledger.submitted - submitted, finished)
                probed.finish(ended)
            counters = told_counters(probed.counters())
            rest = probed.ledger.finished - finished
            if counters["left"] or counters["finished"] - base["finished"] != rest:
                raise CheckFailed(f"at rest after {rest} jobs: {_moved(base, counters)}")
            looks += 1
        for sequence in sequences:
            probed.release(sequence)
    scope = "since before this process" if any(base.values()) else "from zero at open"
    note = f"equal to a ledger of {probed.ledger.submitted} jobs at {looks} rests; counted {scope}"
    yield Finding("COUNTERS", value=1, note=note)


def _hold(probed: Probed, base: Mapping[str, int], submitted: int, finished: int) -> None:
    """Hold the counters against the ledger while jobs may be in flight."""
    now = told_counters(probed.counters())
    ended = now["finished"] + now["failed"] + now["aborted"]
    open_ = now["pending"] + now["running"]
    rules = (
        (min(now.values()) >= 0 and max(now.values()) < 1 << 63, "none is negative"),
        (now["submitted"] - base["submitted"] == submitted, f"submitted is {submitted} more"),
        (now["submitted"] == open_ + ended, "submitted = pending + running + finished + …"),
        (now["left"] == open_, "left = pending + running"),
        (now["failed"] == base["failed"] and now["aborted"] == base["aborted"], "none failed"),
        (now["finished"] - base["finished"] >= probed.ledger.finished - finished, "finished"),
    )
    for holds, rule in rules:
        if not holds:
            raise CheckFailed(f"against the ledger ({rule}): {_moved(base, now)}")


def _moved(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {before[name]} to {after[name]}" for name in after)


# ---------------------------------------------------------------------------- rows and pieces


def check_batch(probed: Probed, seed: int) -> Iterator[Finding]:
    """See that each row of a full batch, and of a part of one, gets what it gets alone."""
    decode = max(
        (part for part in probed.parts if part.task == "decode"),
        key=lambda part: part.batch_max,
        default=None,
    )
    if decode is None or decode.batch_max < 2:
        yield Finding.skip("BATCH_LANES", "the calbin is compiled for batch 1")
        yield Finding.skip("LANE_RULE", "the calbin is compiled for batch 1")
        return
    drawn = random.Random(seed)
    rows = min(decode.batch_max, probed.info.max_lanes)
    told = [
        Story(
            tuple(drawn.randrange(probed.info.vocab) for _ in range(1 + row % 5)),
            tuple(drawn.randrange(probed.info.vocab) for _ in range(2)),
        )
        for row in range(rows)
    ]
    alone = [run_alone(probed, story) for story in told]
    if rows == decode.batch_max:
        _run_batch(probed, told, alone, active=rows)
        yield Finding("BATCH_LANES", value=rows, note=f"{rows} rows equal each alone, bit for bit")
    else:
        yield Finding.skip("BATCH_LANES", f"{rows} lanes cannot fill a batch of {decode.batch_max}")
    if not decode.lane_rule:
        yield Finding.skip("LANE_RULE", "the calbin has no rule for inactive lanes")
        return
    _run_batch(probed, told, alone, active=rows // 2 + 1)
    rule = npurt.LANE_RULES.get(decode.lane_rule, str(decode.lane_rule))
    some = f"{rows // 2 + 1} of {decode.batch_max} rows"
    note = f"{rule}: {some} equal each alone, and no other lane changed"
    yield Finding("LANE_RULE", value=1 << decode.lane_rule, note=note)


def _run_batch(
    probed: Probed, told: list[Story], alone: list[list[Output]], *, active: int
) -> None:
    """Run the first stories as one batch, then the others alone: their lanes must be untouched."""
    sequences = [probed.open() for _ in told]
    for story, sequence in zip(told, sequences, strict=True):
        probed.run(Piece(sequence, story.prompt))
    for step in range(2):
        pieces = [Piece(sequences[row], (told[row].forced[step],)) for row in range(active)]
        output = probed.finish(probed.wait((probed.start(pieces),)))
        for row in range(active):
            own = attrs.evolve(
                output, logits=output.logits[row : row + 1], digests=output.digests[row : row + 1]
            )
            compare([alone[row][1 + step]], [own], f"row {row} of {active}")
    for row in range(active, len(told)):
        for step in range(2):
            found = probed.run(Piece(sequences[row], (told[row].forced[step],)))
            name = f"lane {sequences[row].lane}, which was in no row of the batch"
            compare([alone[row][1 + step]], [found], name)
    for sequence in sequences:
        probed.release(sequence)


def check_pieces(probed: Probed, seed: int) -> Iterator[Finding]:
    """See that a prompt in pieces gives what the whole prompt gives."""
    if not any(part.incremental for part in probed.parts if part.task == "prefill"):
        yield Finding.skip("INCREMENTAL_PREFILL", "no submodel takes a piece of a prompt")
        return
    story = stories(probed, seed)[0]
    wanted = run_alone(probed, story)
    size = len(story.prompt)
    cuts = 0
    for cut in sorted({size // 4, size // 2, size - 2} - set(range(2))):
        sequence = probed.open()
        for piece in (story.prompt[:cut], story.prompt[cut:]):
            output = probed.run(Piece(sequence, piece))
        found = [output, *(probed.run(Piece(sequence, (token,))) for token in story.forced)]
        probed.release(sequence)
        compare(wanted, found, f"{size} tokens cut at {cut}")
        cuts += 1
    note = f"a prompt of {size} tokens cut in {cuts} ways equals the whole, bit for bit"
    yield Finding("INCREMENTAL_PREFILL", value=1, note=note)


Check = Callable[[Probed, int], Iterator[Finding]]

CHECKS: Mapping[str, tuple[Check, tuple[str, ...]]] = MappingProxyType(
    {
        "golden": (check_golden, ("LAYOUTS",)),
        "counters": (check_counters, ("COUNTERS",)),
        "status": (check_status, ("POLL_THREADSAFE",)),
        "ping-pong": (check_ping_pong, ("PING_PONG",)),
        "parallel-mode": (check_parallel_mode, ("PARALLEL_MODE",)),
        "overlap": (check_overlap, ("OVERLAP_MODEL",)),
        "interleave": (check_interleave, ("IN_FLIGHT",)),
        "batch": (check_batch, ("BATCH_LANES", "LANE_RULE")),
        "pieces": (check_pieces, ("INCREMENTAL_PREFILL",)),
    }
)
"""Name to the check and the capabilities that it speaks about."""
