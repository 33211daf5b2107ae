"""The suite ``tick``: what the engine itself costs for a decode tick of 16 rows (T1, T2).

A tick is everything that the host does from one device call to the next: the answers of the device
taken (accepted, completed, restored), decided, every transition validated and recorded, the journal
committed to a file (NORMAL), the state evolved, 16 tokens delivered to streams, metrics, the next
job planned and handed to the device. Nothing is sampled: the device is a Python object that answers
at once (``bench_null.py``), so the engine has its real threads and inbox and waits for nothing.
Both sides run on one core.

The baseline fires the triggers of the same events, taken from the tick itself, one by one on plain
`transitions` models: no journal, no state, no rules.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs

from laneway.adapters.bench_null import CONTEXT_TOKENS, NullDevice
from laneway.adapters.measuring import Figure, at_most, interleave, on_one_core
from laneway.engine import Engine, Limits, Request
from laneway.engine.ports import Step
from laneway.journal import open_journal
from laneway.statemachines import MACHINES
from laneway.statemachines.declare import build_transitions_machine

ROWS = 16
TICKS = 100
"""Ticks a call of a contender: so many that starting and stopping hardly counts."""

LIVE, QUEUED = 1024, 10_000
PROMPT = tuple(range(8))
T1_LIMIT, T2_LIMIT = 0.36, 1.5


def run(
    tell: Callable[[str], None] = lambda text: None,
    *,
    live: int = LIVE,
    queued: int = QUEUED,
    ticks: int = TICKS,
    rounds: int = 9,
) -> Iterator[Figure]:
    """Measure T1 and T2. The arguments make it short for tests."""
    with (
        TemporaryDirectory(prefix="laneway-bench-") as folder,
        on_one_core(),
        ExitStack() as stack,
    ):
        tell("tick: 16 live")
        few = stack.enter_context(Serving(Path(folder) / "few.db", live=ROWS, queued=0))
        tell("tick: one step a commit")
        apart = stack.enter_context(
            Serving(Path(folder) / "apart.db", live=ROWS, queued=0, steps_max=1)
        )
        tell(f"tick: {live} live, {queued} queued")
        many = stack.enter_context(Serving(Path(folder) / "many.db", live=live, queued=queued))
        fire = firing(few.steps_of_a_tick())
        gc.collect()
        took = interleave(
            {
                "fire": lambda: [fire() for _ in range(ticks)],
                "few": lambda: few.run(ticks),
                "apart": lambda: apart.run(ticks),
                "many": lambda: many.run(ticks),
            },
            rounds=rounds,
            tell=lambda done, of: tell(f"tick: round {done + 1} of {of}"),
        )
    us = {name: value / ticks for name, value in took.items()}
    baseline = ("transitions models, same events", us["fire"])
    yield at_most("T1", us["few"], "us/tick", *baseline, limit=T1_LIMIT)
    told = at_most("T1/apart", us["apart"], "us/tick", *baseline, limit=T1_LIMIT)
    yield attrs.evolve(told, gate="none: three commits a tick", gate_met=None)
    yield at_most("T2", us["many"], "us/tick", "T1", us["few"], limit=T2_LIMIT)


class Serving:
    """An engine on its own threads that decodes full batches as far as it is let.

    ``live`` requests hold lanes and decode, ``queued`` ones wait. ``steps_max``: inputs decided in
    one transaction.
    """

    def __init__(self, path: Path, *, live: int, queued: int, steps_max: int = 256) -> None:
        self._device = NullDevice(lanes=live, rows_max=ROWS)
        limits = Limits(
            inflight_jobs_max=1,
            step_batch_max=steps_max,
            queued_requests_max=live + queued,
            queued_tokens_max=1 << 30,
            canary_jobs=0,
            canary_idle_ns=0,
        )
        self.engine = Engine(device=self._device, journal=open_journal(path), limits=limits)
        try:
            self.engine.load("null", "null:")
            for _ in range(live + queued):
                self.engine.submit(
                    Request(
                        model="null",
                        prompt=PROMPT,
                        max_tokens=CONTEXT_TOKENS - len(PROMPT),
                        ignore_eos=True,
                    )
                )
            self._fill(live)
        except BaseException:
            self.engine.close(drain=False)
            raise

    def _fill(self, live: int) -> None:
        """Tick until every lane decodes."""
        states = ("prefilling", "decoding")
        while sum(view.state == states[1] for view in self.engine.requests()) < live:
            self.run(1)

    def run(self, ticks: int) -> None:
        """Let so many ticks happen."""
        self._device.run(ticks)

    def steps_of_a_tick(self) -> list[Step]:
        """Return the steps of one tick."""
        subscription = self.engine.subscribe()
        self.run(1)
        subscription.close()
        return list(subscription)

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *unused: object) -> None:
        self._device.open_up()
        self.engine.close(drain=False)


class _Model:
    state: str


def firing(steps: list[Step]) -> Callable[[], None]:
    """Return what fires the events of steps one by one on models of `transitions`.

    Each entity has a model. One that comes into being in the steps, or does not come back to where
    it began, is set back before: nothing is charged for that but an assignment.
    """
    judges = {
        name: build_transitions_machine(one.initial, tuple(one.states), one.edges)
        for name, one in MACHINES.items()
    }
    models: dict[tuple[str, int], _Model] = {}
    first: dict[tuple[str, int], str] = {}
    triggers = []
    for step in steps:
        for event in step.events:
            for number in event.entities:
                key = (event.machine, number)
                if key not in models:
                    models[key] = _Model()
                    judges[event.machine].add_model(models[key], initial=event.source)
                    first[key] = event.source
                triggers.append(getattr(models[key], event.trigger))
    begin = [(models[key], state) for key, state in first.items()]

    def fire() -> None:
        for model, state in begin:
            model.state = state
        for trigger in triggers:
            trigger()

    return fire
