"""The way in is bounded, the end is always let in, and observers lose steps, not the engine."""

import threading
from collections.abc import Sequence

import pytest
from support.fake_device import FakeDevice
from support.memory_steps import ListJournal
from support.rig import Rig

from laneway.engine import (
    Engine,
    EngineClosedError,
    Limits,
    Request,
    RequestRejectedError,
    Stream,
)
from laneway.engine.clients import Recorded
from laneway.engine.effects import (
    CloseDevice,
    Deliver,
    DeviceEffect,
    ReleaseModel,
    RestoreBuffer,
    SubmitJob,
)
from laneway.engine.errors import UsageError
from laneway.engine.inputs import DeviceClosed, InboxOverflowed, Input
from laneway.engine.loop import _device_first
from laneway.engine.ports import Step
from laneway.engine.state import State


def fill(rig: Rig, count: int) -> list[Stream]:
    """Hand in requests without letting the engine move."""
    return [rig.submit([number + 1, 2]) for number in range(count)]


def test_a_full_inbox_refuses_with_a_time_and_the_journal_knows() -> None:
    rig = Rig(limits=Limits(inbox_inputs_max=4))
    fill(rig, 4)
    for _ in range(3):
        with pytest.raises(RequestRejectedError) as refused:
            rig.engine.submit(Request(model="m", prompt=(1,)))
        error = refused.value
        assert (error.reason, error.http_status, error.retry_after_s) == ("inbox_full", 429, 1.0)
    rig.run()
    overflows = [s.taken for s in rig.steps if isinstance(s.taken, InboxOverflowed)]
    assert overflows == [InboxOverflowed(count=3)]
    rig.check_answers()
    assert rig.state.next_request == 5, "a refused call takes no number"
    rig.close()


def test_answers_of_the_device_are_let_into_a_full_inbox() -> None:
    rig = Rig(limits=Limits(inbox_inputs_max=1))
    stream = rig.submit([1, 2])
    rig.run(until=lambda: bool(rig.device.running) and not rig.engine._inbox._queue)
    rig.submit([3, 4])
    rig.device.finish_job()
    rig.run()
    assert stream.result().error is None
    rig.check_answers()
    rig.close()


def test_cancel_gets_into_a_full_inbox() -> None:
    rig = Rig(limits=Limits(inbox_inputs_max=2))
    stream = fill(rig, 2)[0]
    stream.cancel()
    rig.run()
    assert stream.result().finish_reason == "cancelled"
    rig.close()


def test_close_gets_into_a_full_inbox() -> None:
    rig = Rig(limits=Limits(inbox_inputs_max=2))
    streams = fill(rig, 2)
    rig.engine.close(drain=False)
    assert rig.device.stopped and rig.journal.closed
    assert all(stream._over() for stream in streams)


def test_a_call_that_fails_takes_no_number() -> None:
    rig = Rig()

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no such stop string")

    words = rig.device._words
    rig.device._words.open = refuse  # type: ignore[method-assign]
    with pytest.raises(RequestRejectedError, match="no such stop"):
        rig.engine.submit(Request(model="m", prompt=(1,)))
    del words.open
    stream = rig.submit([1, 2])
    assert stream.request == 1 and stream.result().error is None
    rig.close()


def test_a_request_that_arrives_while_the_device_closes_is_told() -> None:
    rig = Rig()
    late: list[Stream] = []

    def meanwhile(taken: Input) -> None:
        if isinstance(taken, DeviceClosed):
            late.append(rig.engine.submit(Request(model="m", prompt=(1,))))

    rig.device.meanwhile = meanwhile
    rig.engine.close()
    assert late and late[0]._over(), "its caller would wait for ever"


class InlineDevice(FakeDevice):
    """Answers each effect at once, on the thread that asks: an engine on its own thread."""

    def start(self, post: object, *, threads: bool) -> None:
        self._post = post  # type: ignore[assignment]

    def execute(self, effect: DeviceEffect) -> None:
        self.executed.append(effect)
        self._answer(effect)
        while self._running:
            self.finish_job()


def test_the_same_engine_on_its_own_thread() -> None:
    journal = ListJournal()
    engine = Engine(device=InlineDevice(virtual=False), journal=journal, threads=True)
    engine.load("m", "source")
    streams = [engine.submit(Request(model="m", prompt=(n + 1,), max_tokens=5)) for n in range(9)]
    results = [stream.result(timeout_s=30.0) for stream in streams]
    assert all(result.error is None for result in results)
    with pytest.raises(EngineClosedError, match="own threads"):
        engine.step()
    engine.close()
    assert journal.closed
    assert [step.step for step in journal.steps] == list(range(1, len(journal.steps) + 1))


def test_on_its_own_thread_a_request_that_arrives_at_the_end_is_told() -> None:
    device = InlineDevice(virtual=False)
    engine = Engine(device=device, journal=ListJournal(), threads=True)
    engine.load("m", "source")
    late: list[Stream] = []

    def meanwhile(taken: Input) -> None:
        if isinstance(taken, DeviceClosed):
            late.append(engine.submit(Request(model="m", prompt=(1,))))

    device.meanwhile = meanwhile
    engine.close()
    assert late and late[0]._over(), "its caller would wait for ever"


class WatchedDevice(InlineDevice):
    """Notes at each submit which steps are durable, shown and inspected."""

    def __init__(self, journal: ListJournal) -> None:
        super().__init__(virtual=False)
        self.journal = journal
        self.shown_steps: list[int] = []
        self.inspected_steps: list[int] = []
        self.moments: list[tuple[int, int, int]] = []

    def put(self, step: Step) -> None:
        self.shown_steps.append(step.step)

    def end(self) -> None:
        self.shown_steps.append(-1)

    def inspect(self, state: State, steps: Sequence[Step]) -> None:
        self.inspected_steps.append(steps[-1].step)

    def execute(self, effect: DeviceEffect) -> None:
        if isinstance(effect, SubmitJob):
            shown, inspected = (
                (steps or [0])[-1] for steps in (self.shown_steps, self.inspected_steps)
            )
            self.moments.append((self.journal.steps[-1].step, shown, inspected))
        super().execute(effect)


@pytest.mark.parametrize(("inspects", "resumes"), [(False, False), (True, False), (False, True)])
def test_a_submit_waits_for_the_journal_and_an_inspection_and_for_no_observer(
    inspects: bool, resumes: bool
) -> None:
    """But while a request of an earlier life has no text, which the step opens when it is shown."""
    device = WatchedDevice(ListJournal())
    inspect = device.inspect if inspects else None
    engine = Engine(device=device, journal=device.journal, threads=True, inspect=inspect)
    if resumes:
        engine._clients._recorded[99] = Recorded(stop=(), min_tokens=0, tokens=(), logprobs=())
    engine._subscriptions.append(device)  # type: ignore[arg-type]
    engine.load("m", "source")
    engine.submit(Request(model="m", prompt=(1, 2), max_tokens=5)).result(timeout_s=30.0)
    engine.close()
    assert len(device.moments) >= 5
    for durable, shown, inspected in device.moments:
        if inspects:
            assert inspected == durable
        assert (shown == durable) if inspects or resumes else (shown < durable)


def test_a_step_is_shown_though_the_device_refuses_its_job() -> None:
    device = WatchedDevice(ListJournal())
    engine = Engine(device=device, journal=device.journal, threads=True)
    engine._subscriptions.append(device)  # type: ignore[arg-type]
    engine.load("m", "source")

    def refuse(effect: DeviceEffect) -> None:
        raise UsageError("it was stopped")

    device.execute = refuse  # type: ignore[method-assign]
    stream = engine.submit(Request(model="m", prompt=(1, 2), max_tokens=5))
    with pytest.raises(EngineClosedError):
        stream.result(timeout_s=30.0).raise_for_error()
    durable = device.journal.steps[-1].step
    assert durable in device.shown_steps and engine.health().step == durable


def test_a_subscription_sees_every_durable_step_once() -> None:
    rig = Rig(load=False)
    subscription = rig.engine.subscribe()
    rig.engine.load("m", "source")
    rig.submit([1, 2])
    rig.run()
    seen = []
    while (step := subscription.get(timeout_s=0)) is not None:
        seen.append(step)
    assert seen == rig.steps[1:] and subscription.lost == 0
    rig.close()


def test_a_slow_subscription_loses_steps_and_knows_how_many() -> None:
    rig = Rig()
    begin = len(rig.steps)
    slow = rig.engine.subscribe(steps_max=3)
    fast = rig.engine.subscribe()
    rig.submit([1, 2])
    rig.run()
    assert slow.lost == len(rig.steps) - begin - 3 and fast.lost == 0
    assert [slow.get(timeout_s=0) for _ in range(3)] == rig.steps[begin : begin + 3]
    slow.close()
    slow.close()
    rig.submit([1, 3])
    rig.run()
    assert slow.get(timeout_s=0) is None
    assert list(slow) == [] if slow._steps.qsize() else True
    rig.close()


def test_iterating_a_subscription_ends_with_the_engine() -> None:
    rig = Rig()
    subscription = rig.engine.subscribe()
    rig.engine.close()
    seen: list[int] = []
    reader = threading.Thread(
        target=lambda: seen.extend(step.step for step in subscription), daemon=True
    )
    reader.start()
    reader.join(timeout=2.0)
    assert not reader.is_alive(), "the observer waits for ever"
    assert seen[-1] == rig.steps[-1].step


def test_a_snapshot_is_of_the_last_durable_step_and_does_not_change() -> None:
    rig = Rig()
    before = rig.engine.snapshot()
    assert (before.step, before.incarnation, before.epoch) == (len(rig.steps), 1, 1)
    rig.submit([1, 2], client_id="c")
    rig.run_actions(3)
    (view,) = rig.engine.requests()
    assert (view.prompt_tokens, view.completion_tokens, view.client_id) == (2, 0, "c")
    assert before.requests == () and dict(before.lanes) == {"empty": 8}
    rig.run()
    after = rig.engine.snapshot()
    assert after.requests == () and after.jobs == ()
    assert rig.engine.health().ready
    rig.close()
    assert rig.engine.health().reason == "the engine is closed"
    assert CloseDevice(abandon=False) in rig.device.executed


def test_only_what_jobs_ask_goes_before_what_clients_are_told() -> None:
    """A model that goes takes its text side with it, and an ending may still have text."""
    told = Deliver(1, 0, 5)
    restore = RestoreBuffer(model=1, buffer=1, job=1, ticket=1)
    assert _device_first([told, restore, told]) == [restore, told, told]
    release = ReleaseModel(model=1, generation=1)
    assert _device_first([told, restore, release, told]) == [told, restore, release, told]
