"""In which order a worker carries out what it was given."""

import threading

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
