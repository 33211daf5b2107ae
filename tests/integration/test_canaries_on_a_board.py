"""A board that begins to compute wrongly in the middle of a run under load: canaries find it.

The fault is switched on between two jobs and off again; every answer is held against one computed
from nothing. Who was told nothing of a doubt has the right tokens, whoever has wrong ones was told
from where on.

Source: E11, E14, E25, R5.3, R14.5, G17, decision 15, rows 10, 12 and 21.
"""

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from support.asking import Ask, Outcome, answer_alone, draw_ask, pack_with_end_tokens
from support.real_engine import RealEngine, check_journal

from laneway.engine import Limits, Request, Result
from laneway.engine.inputs import StatusDoubted
from laneway.engine.limits import SECOND
from laneway.engine.ports import Step
from laneway.journal import open_journal
from laneway.statemachines import Event

EVERY = 8
LIMITS = Limits(canary_jobs=EVERY, canary_idle_ns=600 * SECOND, requalify_canaries=2)
LANES = 8
TOKENS = 5
TO_FREE_LANE = 2 * TOKENS
"""Jobs until one of the sequences that hold all lanes has ended, at most so many in batches."""

RUN = 6
"""Jobs of a canary: a prefill and its decodes, and one that was in flight."""

DETECTED = EVERY + TO_FREE_LANE + 2 * RUN
"""Jobs within which a fault that every canary meets is found: while one runs, every second job is
a request's."""


@pytest.fixture(scope="module")
def calbin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack the small mixture of experts with batches of one and four."""
    return pack_with_end_tokens(tmp_path_factory.mktemp("canaries"), batch=(1, 4), lanes=LANES)


class Run:
    """One engine under load on a board that computes rightly until told otherwise."""

    def __init__(self, calbin: Path, folder: Path, *, url: str = "", **limits: Any) -> None:
        self.file = folder / "run.db"
        self.real = RealEngine(
            calbin,
            url=url or "sim:tiny?clock=virtual&overlap=3",
            journal=open_journal(self.file),
            limits=attrs.evolve(LIMITS, **limits),
            together=True,
            canaries=True,
        )
        random = np.random.default_rng(61)
        self.asks = [
            attrs.evolve(draw_ask(random), max_tokens=TOKENS, ignore_eos=True, stop_token_ids=())
            for _ in range(6)
        ]
        self.alone = {ask: answer_alone(calbin, ask) for ask in self.asks}
        self.asked: list[Ask] = []

    @property
    def device(self) -> str:
        """The state of the device."""
        return self.real.engine.health().device

    @property
    def ceiling_reason(self) -> str:
        """Why one job may be in flight, or nothing."""
        return self.real.engine._state.device.ceiling_reason

    def submit(self, count: int) -> None:
        """Hand in so many requests."""
        for _ in range(count):
            ask = self.asks[len(self.asked) % len(self.asks)]
            self.asked.append(ask)
            self.real.submit(ask)

    def events(self, machine: str, trigger: str) -> list[tuple[Step, Event]]:
        """Return the events of a trigger with their steps."""
        return [
            (step, event)
            for step in self.real.journal.read()
            for event in step.events
            if (event.machine, event.trigger) == (machine, trigger)
        ]

    def jobs(self, origin: str) -> int:
        """Count the jobs planned for an origin so far."""
        plans = self.events("job", "plan")
        return sum(event.data["origin"] == origin for _, event in plans)

    def warm(self) -> None:
        """Serve until the first canary under load was good and two jobs are in flight."""
        self.submit(24)
        for _ in range(20_000):
            state = self.real.engine._state
            if state.device.good_canaries and len(state.jobs) == 2:
                return
            assert self.real.engine.advance()
        raise AssertionError("no canary was good")

    def until(self, machine: str, trigger: str, *, within: int) -> int:
        """Serve until an event; return after how many jobs it came."""
        state = self.real.engine._state
        begun = state.next_job
        steps = self.real.engine.subscribe(steps_max=1 << 20)
        while state.next_job - begun <= within:
            assert self.real.engine.advance(), f"nothing more happens, and no {trigger} came"
            while steps._steps.qsize():
                step = steps.get(0)
                assert step is not None
                if any((e.machine, e.trigger) == (machine, trigger) for e in step.events):
                    steps.close()
                    return state.next_job - begun
        raise AssertionError(f"no {trigger} in {within} jobs")

    def check(self) -> list[Result]:
        """Hold every answer against the one computed from nothing; return those that differ."""
        wrong = []
        marks = [event for _, event in self.events("model", "mark")]
        ended = {number: first for mark in marks for number, first in mark.data["ended"]}
        for result, ask in zip(self.real.results(), self.asked, strict=True):
            alone = self.alone[ask]
            first = _first_difference(result, alone)
            if result.error is None and result.finish_reason != alone.ending:
                first = min(first, len(result.tokens))
            marked = result.suspect_tokens_from
            if marked is None:
                marked = ended.get(result.request)  # its client had its ending before
            if first < len(result.tokens):
                wrong.append(result)
                assert marked is not None and marked <= first, (result, alone)
            elif result.error is None and marked is None:
                assert result.tokens == alone.tokens
        return wrong

    def close(self) -> list[Step]:
        """Close, and prove the journal."""
        self.real.close()
        with open_journal(self.file, read_only=True) as journal:
            return check_journal(journal)


def _first_difference(result: Result, alone: Outcome) -> int:
    pairs = enumerate(zip(result.tokens, alone.tokens, strict=False))
    return next((at for at, (told, true) in pairs if told != true), len(result.tokens))


OVERLAPPED = {
    "stale_output": "on=exec",
    "swapped_output": "on=d2h",
    "kv_swap": "with=1",
    "kv_bit": "on=exec",
    "numeric_garbage": "on=exec",
    "numeric_constant": "on=exec",
    "numeric_offset": "on=exec n=3",
}


WAY_BACK = ("kv_swap", "numeric_offset")
"""The kinds after which the way back is shown too: it begins at canaries that differ, whatever the
kind, and nothing on it knows the kind."""


@pytest.mark.parametrize("kind", OVERLAPPED)
def test_what_goes_wrong_only_while_jobs_overlap_costs_the_second_job_in_flight(
    calbin: Path, tmp_path: Path, kind: str
) -> None:
    """It falls to one by itself and serves rightly; two again once the fault is gone."""
    fall_to_one(calbin, tmp_path, kind, back=kind in WAY_BACK)


@pytest.mark.soak
@pytest.mark.parametrize("kind", OVERLAPPED)
def test_two_are_in_flight_again_after_any_kind(calbin: Path, tmp_path: Path, kind: str) -> None:
    fall_to_one(calbin, tmp_path, kind, back=True)


def fall_to_one(calbin: Path, folder: Path, kind: str, *, back: bool) -> None:
    """Let a fault of jobs that overlap come under load, and go on with it, or without it."""
    run = Run(calbin, folder)
    run.warm()
    rule = f"fault a kind={kind} {OVERLAPPED[kind]} count=inf inflight>=2"
    run.real.simulator.set_faults(rule)
    run.submit(24)
    run.until("model", "mark", within=DETECTED)
    run.until("model", "acquit", within=RUN)
    assert run.ceiling_reason and run.device == "serving"
    before = len(run.asked)
    if back:
        come_back(run)
    run.submit(24)
    run.real.run()
    wrong = run.check()
    assert wrong, "the fault was real"
    assert all(result.request <= before for result in wrong)
    assert run.device == "serving"
    steps = run.close()
    assert any(event.trigger == "mark" for step in steps for event in step.events)


def come_back(run: Run) -> None:
    """Have the fault found again when two golden runs are tried at once, then let it go."""
    run.submit(24)
    run.until("model", "mark", within=400)
    assert run.real.engine._state.models[1].canary.examining, "two at once differed"
    run.until("model", "acquit", within=RUN)
    assert not run.events("device", "relax")
    run.real.simulator.set_faults("")
    run.submit(60)
    run.until("device", "relax", within=400)
    assert run.ceiling_reason == ""


@pytest.mark.parametrize("kind", ["numeric_garbage", "numeric_constant", "numeric_offset"])
@pytest.mark.parametrize("inflight", [1, 2])
def test_what_goes_wrong_with_one_in_flight_too_ends_the_belief_in_the_generation(
    calbin: Path, tmp_path: Path, kind: str, inflight: int
) -> None:
    run = Run(calbin, tmp_path, inflight_jobs_max=inflight)
    run.warm() if inflight == 2 else run.submit(24)
    if inflight == 1:
        run.until("model", "prove", within=DETECTED)
    run.real.simulator.set_faults(f"fault a kind={kind} {OVERLAPPED[kind]} count=inf")
    run.submit(24)
    run.until("device", "escalate", within=DETECTED)
    assert "computes wrongly: canary" in run.real.engine.health().reason
    assert len(run.events("model", "examine")) == inflight - 1
    run.real.simulator.set_faults("")
    run.real.run()
    assert run.device == "serving" and run.events("device", "reset")
    wrong = run.check()
    assert wrong
    assert all(result.error is not None for result in wrong if result.request in _live(run))
    before = len(run.asked)
    run.submit(12)
    run.real.run()
    late = run.real.results()[before:]
    assert [result.tokens for result in late] == [
        run.alone[ask].tokens for ask in run.asked[before:]
    ]
    run.close()


def _live(run: Run) -> set[int]:
    (_, mark), *_ = run.events("model", "mark")
    return {number for number, _ in mark.data["requests"]}


SLOW = "sim:cost?clock=virtual&overlap=3&decode=900ms/0ns/0ns&prefill=900ms/0ns/0ns"
"""A board whose jobs are long enough to be polled."""


@pytest.mark.parametrize("step", ["from=exec to=queued", "from=exec to=h2d", "from=exec to=done"])
def test_a_state_that_steps_illegally_costs_the_second_job_in_flight(
    calbin: Path, tmp_path: Path, step: str
) -> None:
    run = Run(calbin, tmp_path, url=SLOW)
    run.warm()
    run.real.simulator.set_faults(f"fault a kind=illegal_step {step} every=3")
    for tick in range(1, 120):  # instants at which time stops, so that jobs are looked at
        run.real.engine.submit(
            Request(model="m", prompt=(1,), max_tokens=1, deadline_s=tick / 4, priority=100)
        )
    run.until("device", "restrict", within=12)
    assert "steps illegally" in run.ceiling_reason and run.device == "serving"
    run.real.simulator.set_faults("")
    run.submit(60)
    run.until("device", "relax", within=400)
    run.real.run()
    assert not run.check()
    assert all(result.error is None for result in run.real.results())
    steps = run.close()
    assert [s for s in steps if isinstance(s.taken, StatusDoubted)]


@pytest.mark.parametrize("kind", ["counter_skew n=1", "counter_stuck", "counter_negative"])
def test_counters_that_lie_cost_the_second_job_for_good(
    calbin: Path, tmp_path: Path, kind: str
) -> None:
    run = Run(calbin, tmp_path)
    run.warm()
    run.real.run()
    run.real.simulator.set_faults(f"fault a kind={kind} field=finished count=inf")
    for _ in range(3):
        run.submit(6)
        run.real.run()
    assert run.events("device", "distrust") and "counters" in run.ceiling_reason
    run.real.simulator.set_faults("")
    run.submit(60)  # with which two are in flight again where that is possible
    run.real.run()
    assert not run.events("device", "relax") and run.ceiling_reason
    assert not run.check() and run.device == "serving"
    run.close()


def test_results_that_only_polls_find_cost_the_second_job(calbin: Path, tmp_path: Path) -> None:
    run = Run(calbin, tmp_path)
    run.warm()
    run.real.simulator.set_faults("fault a kind=lost_completion every=5 count=inf poll_sees=y")
    run.submit(24)
    run.until("device", "restrict", within=40)
    assert run.ceiling_reason == "3 results in an hour were found by polls alone"
    run.real.simulator.set_faults("")
    run.submit(60)
    run.until("device", "relax", within=400)
    run.real.run()
    assert not run.check()
    run.close()


def test_an_honest_board_is_proven_again_and_again_at_a_bounded_cost(
    calbin: Path, tmp_path: Path
) -> None:
    run = Run(calbin, tmp_path)
    run.submit(90)
    run.real.run()
    jobs = run.jobs("request"), run.jobs("canary")
    proven = len(run.events("model", "prove"))
    assert proven >= 3 and not run.events("model", "mark")
    assert jobs[1] <= 5 * (jobs[0] // EVERY + 1), "each a prefill and four decodes"
    assert not run.check()
    run.close()
