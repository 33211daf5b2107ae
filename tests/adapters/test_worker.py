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
