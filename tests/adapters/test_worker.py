"""In which order a worker carries out what it was given."""

import threading

import pytest

from laneway.adapters.worker import Worker
from laneway.engine.effects import DeviceEffect, ProbeHealth, RestoreBuffer, SubmitJob


def submit(job: int) -> SubmitJob:
    return SubmitJob(
        job=job,
        model=1,
        epoch=1,
        generation=1,
        buffer=2,
        task="decode",
        origin="request",
        operations=(),
        rows=(),
        suspect_after_ns=1,
        confirm_after_ns=1,
        cap_after_ns=1,
    )


def restore(job: int) -> RestoreBuffer:
    return RestoreBuffer(model=1, buffer=1, job=job, ticket=job)


def carried_out(*effects: DeviceEffect) -> list[DeviceEffect]:
    """Return effects in the order in which a worker runs them that has all of them at once."""
    done: list[DeviceEffect] = []
    begin = threading.Event()

    def work(effect: DeviceEffect) -> None:
        begin.wait(60)
        done.append(effect)

    worker = Worker("test", work)
    first = ProbeHealth()
    worker.put(first)  # it waits in this one until the others are there
    worker.start()
    for effect in effects:
        worker.put(effect)
    begin.set()
    assert worker.stop(timeout_s=60)
    assert done[0] == first
    return done[1:]


def test_a_submit_goes_before_the_restore_right_in_front_of_it() -> None:
    assert carried_out(restore(1), submit(2)) == [submit(2), restore(1)]
    assert carried_out(restore(1), restore(2), submit(3)) == [restore(1), submit(3), restore(2)]


def test_all_else_keeps_its_order() -> None:
    probe = ProbeHealth()
    for given in (
        [restore(1), probe, submit(2)],
        [submit(2), restore(1)],
        [restore(1)],
        [probe, restore(1), restore(2)],
        [restore(1), probe],
    ):
        assert carried_out(*given) == given


def test_whoever_hands_over_goes_on_when_it_was_carried_out() -> None:
    done: list[DeviceEffect] = []
    worker = Worker("test", done.append)
    worker.start()
    for number in range(1, 50):
        worker.hand_over(submit(number), at_most_s=60)
        assert done.count(submit(number)) == 1
        worker.put(restore(number))  # the next one goes before it, if it still waits
    assert worker.stop(timeout_s=60)
    assert [each for each in done if isinstance(each, SubmitJob)] == list(map(submit, range(1, 50)))


def test_whoever_hands_over_waits_no_longer_than_told() -> None:
    begin = threading.Event()
    done: list[DeviceEffect] = []

    def work(effect: DeviceEffect) -> None:
        begin.wait(60)
        done.append(effect)

    worker = Worker("test", work)
    worker.start()
    worker.hand_over(submit(1), at_most_s=0.001)  # its device call does not return
    worker.hand_over(submit(2), at_most_s=0.001)
    assert done == []
    begin.set()
    assert worker.stop(timeout_s=60)
    assert done == [submit(1), submit(2)]


def test_what_was_put_before_lets_nobody_go_on() -> None:
    begin = threading.Event()
    still_awaited: list[bool] = []

    def work(effect: DeviceEffect) -> None:
        begin.wait(60)
        still_awaited.append(worker._awaited is not None)

    worker = Worker("test", work)
    worker.start()
    worker.put(ProbeHealth())
    worker.hand_over(submit(1), at_most_s=0.001)  # both stand behind the event
    begin.set()
    assert worker.stop(timeout_s=60)
    assert still_awaited == [True, True]


def test_whoever_stands_in_is_alone() -> None:
    """What is put meanwhile is carried out behind it; its own effects keep the worker's order."""
    done: list[tuple[str, DeviceEffect]] = []
    begun = threading.Event()

    def work(effect: DeviceEffect) -> None:
        done.append((threading.current_thread().name, effect))
        begun.set()

    worker = Worker("test", work)
    worker.start()
    assert worker.claim() and not worker.claim()
    worker.put(ProbeHealth())
    assert not begun.wait(0.05), "it began though another stands in for it"
    worker.stand_in([restore(1), submit(2), restore(3)])
    assert worker.stop(timeout_s=60)
    mine = threading.current_thread().name
    expected = [submit(2), restore(1), restore(3)]
    assert done == [*((mine, effect) for effect in expected), ("laneway-test", ProbeHealth())]


def test_nobody_stands_in_for_one_that_has_something_to_do() -> None:
    begin, entered = threading.Event(), threading.Event()

    def work(effect: DeviceEffect) -> None:
        entered.set()
        begin.wait(60)

    worker = Worker("test", work)
    worker.put(ProbeHealth())
    assert not worker.claim(), "it waits in the queue"
    worker.start()
    assert entered.wait(60) and not worker.claim(), "it is being carried out"
    begin.set()
    worker.hand_over(submit(1), at_most_s=60)
    while not worker.claim():
        pass  # the last one was carried out and is not yet counted
    worker.stand_in([])
    assert worker.stop(timeout_s=60)


def test_a_failure_of_who_stands_in_gives_the_worker_back() -> None:
    def work(effect: DeviceEffect) -> None:
        if isinstance(effect, SubmitJob):
            raise ValueError("its own guard is broken")
        done.append(effect)

    done: list[DeviceEffect] = []
    worker = Worker("test", work)
    worker.start()
    assert worker.claim()
    with pytest.raises(ValueError, match="guard"):
        worker.stand_in([submit(1)])
    worker.put(ProbeHealth())
    assert worker.stop(timeout_s=60) and done == [ProbeHealth()]
