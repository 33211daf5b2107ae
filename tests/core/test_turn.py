"""The end of a job is decided on the thread that brings it, where the engine has nothing else."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from support.fake_device import FakeDevice
from support.memory_steps import ListJournal

from laneway.engine import Engine, EngineClosedError, Request, Stream, loop
from laneway.engine.clients import Recorded
from laneway.engine.effects import DeviceEffect, ForeseeJob, ProbeHealth, SubmitJob
from laneway.engine.errors import JournalWriteError, UsageError
from laneway.engine.inputs import CancelRequested, Completed, Input, TimePassed
from laneway.engine.ports import Step

PATIENCE_S = 30.0


class EagerDevice(FakeDevice):
    """Answers at once what the engine thread asks; its jobs end when the test lets them.

    What is asked while the test's thread is lent waits in ``lent`` until ``come_back``.
    """

    def __init__(self) -> None:
        super().__init__(virtual=False)
        self.lent: list[DeviceEffect] = []
        self.foreseen: list[SubmitJob] = []
        self._tester = threading.current_thread()

    def start(self, post: Callable[[Input], None], *, threads: bool) -> None:
        self._post = post

    def lend(self, go_on: Callable[[Input], None]) -> None:
        self._go_on = go_on

    def execute(self, effect: DeviceEffect) -> None:
        if isinstance(effect, ForeseeJob):
            self.foreseen.append(effect.submit)
            return
        self.executed.append(effect)
        if threading.current_thread() is self._tester:
            self.lent.append(effect)
        else:
            self._answer(effect)
            while not self.holding and self._running:
                self.finish_job()

    def end_job(self) -> Completed:
        """Bring the end of the running job to the engine on this thread."""
        ended: list[Input] = []
        post, self._post = self._post, ended.append
        self.finish_job()
        self._post = post
        (completed,) = ended
        assert isinstance(completed, Completed)
        self._go_on(completed)
        return completed

    def come_back(self) -> None:
        """Carry out what was asked meanwhile."""
        effects, self.lent = self.lent, []
        for effect in sorted(effects, key=lambda one: not isinstance(one, SubmitJob)):
            self._answer(effect)


class Served:
    """An engine on its thread with one request whose first job runs."""

    def __init__(self, *, max_tokens: int = 9) -> None:
        self.device, self.journal = EagerDevice(), ListJournal()
        self.engine = Engine(device=self.device, journal=self.journal, threads=True)
        self.engine.load("m", "source")
        self.device.holding = True
        self.subscription = self.engine.subscribe(steps_max=1 << 20)
        asks = Request(model="m", prompt=(1, 2), max_tokens=max_tokens, ignore_eos=True)
        self.stream: Stream = self.engine.submit(asks)
        self.rest()

    def rest(self) -> None:
        """Wait until the engine thread has nothing to do and a job runs."""
        self.until(lambda: bool(self.device.running) and bool(self.engine._inbox._sleeping))
        self.until(self.engine._is_at_rest)

    @staticmethod
    def until(done: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < end, "it does not come"
            time.sleep(0)

    def shown(self) -> list[int]:
        """Return the steps that a subscriber was shown and has not taken yet."""
        return [step.step for step in self.subscription._steps.queue if step is not None]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(loop, "LENT_S", PATIENCE_S)  # so that it sleeps until it is woken
    made = Served()
    yield made
    made.device.holding = False
    made.device.come_back()
    while made.device.running:
        made.device.finish_job()
    made.engine.close(drain=False)


def test_the_next_job_is_asked_for_before_any_other_thread_is_needed(served: Served) -> None:
    device, before = served.device, len(served.journal.steps)
    completed = device.end_job()
    assert [step.taken for step in served.journal.steps[before:]] == [completed]
    assert [effect.job for effect in device.lent if isinstance(effect, SubmitJob)] == [
        completed.job + 1
    ]
    assert served.engine._inbox._sleeping, "the engine thread was not woken"
    device.come_back()
    assert next(iter(served.stream)).token == completed.rows[0].token
    served.rest()


@pytest.mark.parametrize("jobs", [0, 5])
@pytest.mark.parametrize("look", ["snapshot", "metrics", "health", "subscribe"])
def test_whoever_looks_first_waits_until_the_step_is_shown(
    served: Served, look: str, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the engine thread, since a caller may be interrupted anywhere; also in a cruise."""
    by: list[str] = []
    real = Engine._show

    def show(engine: Engine, step: Step) -> None:
        by.append(threading.current_thread().name)
        real(engine, step)

    monkeypatch.setattr(Engine, "_show", show)
    for _ in range(jobs):
        served.device.end_job()
        served.device.come_back()
        served.rest()
    assert served.engine._course.is_cruising == (jobs > 0)
    served.device.end_job()
    durable = served.journal.steps[-1].step
    assert durable not in served.shown()
    getattr(served.engine, look)()
    assert served.shown()[-1] == durable and set(by) == {"laneway-engine"}
    assert served.engine.health().step == served.engine.snapshot().step == durable
    served.device.come_back()
    served.rest()
    assert served.shown() == sorted(set(served.shown())), "nothing is shown twice"


def test_clients_are_told_though_the_device_is_slow_to_take_the_next_job() -> None:
    served = Served()
    completed = served.device.end_job()
    assert next(iter(served.stream)).token == completed.rows[0].token
    assert served.device.lent, "it has not answered yet"
    served.device.come_back()
    served.device.holding = False
    while served.device.running:
        served.device.finish_job()
    served.engine.close(drain=False)


def test_the_last_token_wakes_the_engine_thread() -> None:
    """No job follows, so no answer comes that would."""
    served = Served(max_tokens=1)
    completed = served.device.end_job()
    result = served.stream.result(timeout_s=PATIENCE_S)
    assert result.tokens == (completed.rows[0].token,) and result.finish_reason == "length"
    served.device.come_back()
    served.engine.close()


def busy(served: Served) -> None:
    assert served.engine._turn.acquire(timeout=PATIENCE_S)


def unshown(served: Served) -> None:
    served.engine._unshown.append(served.journal.steps[-1])


def unasked(served: Served) -> None:
    served.engine._outbox.append(ProbeHealth())


def asked(served: Served) -> None:
    served.engine._inbox._queue.append(CancelRequested(request=99))


def waited_for(served: Served) -> None:
    served.engine._looks += 1


def awaiting(served: Served) -> None:
    recorded = Recorded(stop=(), min_tokens=0, tokens=(), logprobs=())
    served.engine._clients._recorded[99] = recorded


def inspected(served: Served) -> None:
    served.engine._inspect = lambda state, steps: None


@pytest.mark.parametrize(
    "hold_up", [busy, asked, waited_for, awaiting, inspected, unshown, unasked]
)
def test_where_anything_else_is_due_it_is_posted(
    served: Served, hold_up: Callable[[Served], None]
) -> None:
    engine = served.engine
    hold_up(served)
    completed = served.device.end_job()
    assert not served.device.lent, "this thread decided"
    if hold_up is busy:
        served.until(lambda: not engine._inbox._sleeping)
        for _ in range(100):
            time.sleep(0)  # it is about to take the turn
        assert engine._inbox._queue[-1] is completed
        engine._turn.release()
    assert next(iter(served.stream)).token == completed.rows[0].token
    engine._looks = 0
    engine._clients._recorded.clear()
    assert completed in [step.taken for step in served.journal.steps]


@pytest.mark.parametrize("left", [unshown, unasked])
def test_what_is_left_to_the_engine_thread_is_done_when_it_is_woken(
    served: Served, left: Callable[[Served], None]
) -> None:
    before = len(served.shown())
    left(served)
    served.engine._inbox.wake()
    if left is unshown:
        served.until(lambda: len(served.shown()) > before)
    else:
        served.until(lambda: ProbeHealth() in served.device.executed)


def test_it_is_decided_under_the_lock(served: Served) -> None:
    """A caller who holds it sees no state on its way."""
    held: list[bool] = []
    gate = served.engine._gate
    served.journal.watch = lambda steps: held.append(gate._is_owned())  # type: ignore[attr-defined]
    served.device.end_job()
    assert held == [True]


def test_a_step_is_shown_though_the_next_one_fails(served: Served) -> None:
    served.device.end_job()
    durable = served.journal.steps[-1].step
    served.journal.fail = True
    served.device.come_back()
    with pytest.raises(EngineClosedError, match="told to"):
        served.stream.result(timeout_s=PATIENCE_S)
    assert served.shown()[-1] == durable


def test_after_the_end_nothing_is_decided(served: Served) -> None:
    served.device.holding = False
    ended: list[Input] = []
    post, served.device._post = served.device._post, ended.append
    served.device.finish_job()
    served.device._post = post
    served.engine._fail(JournalWriteError("told to"))
    before = len(served.journal.steps)
    served.device._go_on(ended[0])
    assert len(served.journal.steps) == before and not served.device.lent


def test_a_journal_that_fails_stops_the_engine_and_not_this_thread(served: Served) -> None:
    served.journal.fail = True
    served.device.end_job()
    assert not served.device.lent, "nothing begins that is not durable"
    with pytest.raises(EngineClosedError, match="told to"):
        served.stream.result(timeout_s=PATIENCE_S)
    with pytest.raises(EngineClosedError, match="told to"):
        served.engine.submit(Request(model="m", prompt=(1,)))
    served.engine.close()
    assert served.device.stopped


def test_an_engine_thread_that_waits_for_the_turn_decides_nothing_after_a_failure(
    served: Served,
) -> None:
    """What it would decide stands on a state that is ahead of the journal."""
    inbox, before = served.engine._inbox, len(served.journal.steps)

    def fail(steps: Sequence[Step]) -> None:
        inbox.post(TimePassed())
        served.until(lambda: not inbox._sleeping)
        for _ in range(100):
            time.sleep(0)  # it is about to take the turn
        served.journal.watch = lambda steps: None
        served.engine._is_time = lambda: True  # type: ignore[method-assign]
        raise JournalWriteError("disk full (told to)")

    served.journal.watch = fail
    served.device.end_job()
    with pytest.raises(EngineClosedError, match="disk full"):
        served.stream.result(timeout_s=PATIENCE_S)
    served.engine.close()
    assert len(served.journal.steps) == before and not served.device.lent


def test_a_device_that_refuses_the_job_stops_the_engine_and_the_step_is_shown(
    served: Served,
) -> None:
    def refuse(effect: DeviceEffect) -> None:
        raise UsageError("it was stopped")

    served.device.execute = refuse  # type: ignore[method-assign]
    served.device.end_job()
    assert served.journal.steps[-1].step in served.shown()
    with pytest.raises(EngineClosedError, match="it was stopped"):
        served.stream.result(timeout_s=PATIENCE_S)
    served.engine.close()


def test_the_next_job_is_foreseen_while_the_device_computes(served: Served) -> None:
    """Once a job, and only in a cruise."""
    device = served.device
    jobs = [device.running[0][0]]
    while len(jobs) < 7:
        device.end_job()
        device.come_back()
        served.rest()
        jobs.append(device.running[0][0])
    foreseen = [job.job for job in device.foreseen]
    assert foreseen == sorted(set(foreseen)) and foreseen[-1] == jobs[-1].job + 1
    for job in device.foreseen[:-1]:
        (came,) = (one for one in jobs if one.job == job.job)
        assert (came.operations, came.buffer) == (job.operations, job.buffer)


class NeverLent(FakeDevice):
    """Has threads that nobody is to use."""

    def lend(self, go_on: Callable[[Input], None]) -> None:
        raise AssertionError("an engine that is stepped by hand has one thread")


def test_an_engine_stepped_by_hand_borrows_and_foresees_nothing() -> None:
    device = NeverLent()
    engine = Engine(device=device, journal=ListJournal(), threads=False)
    engine.load("m", "source")
    engine.submit(Request(model="m", prompt=(1, 2), max_tokens=9)).result()
    engine.close()
    assert device.stopped and not any(isinstance(one, ForeseeJob) for one in device.executed)
