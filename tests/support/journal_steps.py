"""Steps for journal tests: a short story told by hand, and a run of the core on the fake device."""

import sqlite3
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from support.fake_device import FakeDevice
from support.told import fault_told

from laneway.engine.decide import decide
from laneway.engine.effects import DeviceEffect
from laneway.engine.evidence import Capability, Grant
from laneway.engine.evolve import fold
from laneway.engine.inputs import (
    CancelRequested,
    ChipFacts,
    CloseRequested,
    Completed,
    DeviceFacts,
    EngineStarted,
    Input,
    JobTimes,
    LoadRequested,
    RequestSubmitted,
    RowResult,
    SubmitAccepted,
    TimePassed,
)
from laneway.engine.limits import Limits
from laneway.engine.ports import JournalPort, Step
from laneway.engine.sampling import Sampling
from laneway.engine.state import initial_state
from laneway.statemachines import Event

FACTS = DeviceFacts(
    url="fake:",
    backend="fake",
    product="fäke",
    serial="0",
    runtime_version="1",
    driver_version="1",
    firmware_version="1",
    device_epoch=1,
    inflight_max=1,
    chips=(ChipFacts(total_bytes=1000, used_bytes=0),),
    capabilities=(
        Capability(
            name="CAP_A",
            support="limited",
            evidence="C2",
            source="header only",
            value=-4,
            scope="vörsion",
            note="",
        ),
    ),
    proven=("CAP_A",),
    grants=(Grant(feature="f", calbin_sha256="", value=2, evidence="SIM", by="conformance"),),
)


def started(tokens: str = "full", wall_clock_ns: int = 1_700_000_000_000_000_000) -> EngineStarted:
    """Return the input that opens an incarnation."""
    return EngineStarted(
        wall_clock_ns=wall_clock_ns,
        code_version="0",
        journal_tokens=tokens,
        limits=Limits(),
        device=FACTS,
    )


def submitted(
    request: int,
    prompt: Iterable[int],
    *,
    max_tokens: int = 4,
    stop: tuple[str, ...] = (),
    model: int = 1,
) -> RequestSubmitted:
    """Return a client's wish."""
    return RequestSubmitted(
        request=request,
        alias="m",
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        sampling=Sampling(seed=request),
        stop=stop,
        ignore_eos=False,
        deadline_ns=None,
        client_id="client-secret",
        model=model,
    )


def completed(job: int, tokens: Iterable[int]) -> Completed:
    """Return a done job with one row for each token."""
    return Completed(
        job=job,
        ticket=900 + job,
        epoch=1,
        generation=2,
        flags=7,
        kv_effect="applied",
        engine_slot=1,
        rows=tuple(RowResult(token=token) for token in tokens),
        times=JobTimes(submit_ns=5, visible_ns=90),
    )


def story(tokens: str = "full") -> list[Step]:
    """Return five steps with every shape of event: ranges, single entities, data, none at all."""
    events: list[tuple[Event, ...]] = [
        (Event("device", (0,), "open", "closed", "serving", 1, 0, {"incarnation": 1}),),
        (Event("request", (5,), "admit", "received", "waiting", 1, 0, {"model": 1}),),
        (
            Event("lane", (1, 2, 3, 4, 7), "reserve", "ready", "reserved", 1, 2, {"job": 17}),
            Event("buffer", (1,), "acquire", "free", "preparing", 1, 2, {"job": 17}),
            Event(
                "job",
                (17,),
                "plan",
                "drafted",
                "planned",
                1,
                2,
                {
                    "task": "decode",
                    "origin": "request",
                    "model": 1,
                    "buffer": 1,
                    "owners": (5, 6),
                },
            ),
        ),
        (),
        (Event("job", (17,), "complete", "submitted", "completed", 1, 2),),
    ]
    taken: list[Input] = [
        started(tokens),
        submitted(5, (7, 8, 9), stop=("secret stop",)),
        SubmitAccepted(job=17, ticket=917),
        TimePassed(),
        completed(17, (54321, 54322)),
    ]
    return [
        Step(step=number, at_ns=number * 1000, taken=one, events=happened)
        for number, (one, happened) in enumerate(zip(taken, events, strict=True), 1)
    ]


def ticks(first: int, count: int) -> list[Step]:
    """Return steps in which nothing happens, to follow on what there is."""
    return [
        Step(step=number, at_ns=number * 1000, taken=TimePassed(), events=())
        for number in range(first, first + count)
    ]


def run_core(
    journal: JournalPort,
    *,
    prompts: Iterable[tuple[int, ...]] = ((3, 1, 4), (1, 5), (9, 2, 6, 5)),
    load: bool = True,
    fault: bool = False,
    wall_clock_ns: int = 1_700_000_000_000_000_000,
) -> None:
    """Run the real core on the fake device for one incarnation, step by step, into a journal.

    One model is loaded, every prompt is answered (the last one is cancelled early), then the engine
    closes; with ``fault`` the third job of a request ends in a device exception instead. Without
    ``load`` the engine opens and closes.
    """
    state = initial_state()
    for step in journal.read():
        fold(state, step)
    device = FakeDevice()
    if fault:
        device.on_result = _Fault()
    inbox: deque[Input] = deque()
    device.start(inbox.append, threads=False)
    wanted: deque[Input] = deque([started(journal.tokens, wall_clock_ns)])
    later: deque[Input] = deque()
    if load:
        wanted.append(LoadRequested(model=state.next_model, alias="m", source="x"))
        first = state.next_request
        model = state.next_model
        later.extend(
            submitted(first + index, prompt, model=model) for index, prompt in enumerate(prompts)
        )
        later.append(CancelRequested(request=first + len(later) - 1))
    later.append(CloseRequested(drain=True))
    while True:
        if inbox or wanted:
            one = inbox.popleft() if inbox else wanted.popleft()
            at_ns = max(state.now_ns, device.clock.now_ns())
            decision = decide(state, one, at_ns)
            journal.append([Step(step=state.step, at_ns=at_ns, taken=one, events=decision.events)])
            for effect in decision.effects:
                if isinstance(effect, get_args(DeviceEffect)):
                    device.execute(effect)
        elif device.step():
            continue
        elif device.running:
            device.clock.advance(1000)
            device.finish_job()
        elif later:
            wanted.extend(later)
            later.clear()
        else:
            return


class _Fault:
    """Let the third job that serves a request end in an exception of the device."""

    def __init__(self) -> None:
        self._left = 3

    def __call__(self, effect: object, done: Completed) -> Input:
        if getattr(effect, "origin", "") == "request":
            self._left -= 1
        if self._left:
            return done
        return fault_told(
            "ccu",
            0x401,
            job=done.job,
            ticket=done.ticket,
            epoch=done.epoch,
            generation=done.generation,
            quiescent=True,
        )


def tamper(path: Path, *statements: tuple[str, tuple[object, ...]]) -> None:
    """Change a closed journal file behind its back: the guards are taken off and put on again."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous=OFF")
        guards = connection.execute(
            "SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'"
        ).fetchall()
        connection.execute("BEGIN IMMEDIATE")
        for name, _ in guards:
            connection.execute(f"DROP TRIGGER {name}")
        for statement, values in statements:
            connection.execute(statement, values)
        for _, sql in guards:
            connection.execute(sql)
        connection.execute("COMMIT")
    finally:
        connection.close()


def end_requests(journal: JournalPort) -> None:
    """Cancel what a dead incarnation left open, so that the next one may begin."""
    state = initial_state()
    for step in journal.read():
        fold(state, step)
    for number in sorted(state.requests):
        taken = CancelRequested(request=number)
        at_ns = state.now_ns
        events = decide(state, taken, at_ns).events
        journal.append([Step(step=state.step, at_ns=at_ns, taken=taken, events=events)])
