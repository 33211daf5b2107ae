"""Suspects, guilt and poison: who fails alone, and what is refused afterwards (G15, 9.3)."""

from support.fake_device import FakeDevice
from support.rig import Rig
from support.schedules import VERIFIED, wide
from support.strikes import POISON, poisoned

from laneway.engine import RequestRejectedError, Stream
from laneway.engine.effects import SubmitJob
from laneway.engine.inputs import Completed, Input

HOUR_NS = 3_600_000_000_000


def kind_of(stream: Stream) -> tuple[str, int]:
    error = stream.result().error
    assert isinstance(error, RequestRejectedError)
    return error.reason, error.http_status


def test_what_fails_alone_again_ends_and_its_content_is_refused_for_an_hour() -> None:
    rig = Rig(resets=True)
    rig.device.on_result = poisoned
    innocent = [rig.submit([2, number], seed=number, ignore_eos=True) for number in range(3)]
    guilty = rig.submit(POISON, seed=5)
    rig.run()
    rig.check_answers(ended_early=[guilty])
    assert [stream.result().error for stream in innocent] == [None] * 3
    assert guilty.result().error is not None and "alone" in str(guilty.result().error)
    again = rig.submit(POISON, seed=99)
    rig.run()
    assert kind_of(again) == ("poison", 422)
    rig.device.clock.advance(HOUR_NS)
    rig.device.on_result = None
    later = rig.submit(POISON, seed=5, ignore_eos=True)
    rig.run()
    assert later.result().error is None
    rig.check_idle()
    rig.close()


def test_twins_in_one_job_are_accused_once() -> None:
    """9.3: it takes two faults to be poison, however often a content stands in the first one."""
    device = FakeDevice(
        verified=VERIFIED,
        artifact=lambda model: wide(model, lanes=4, batches=(1, 4), rule="length_zero"),
    )
    rig = Rig(device=device, resets=True)
    faults = iter([True])

    def once(effect: SubmitJob, done: Completed) -> Input:
        poisons = sum(row.tokens[:3] == POISON for row in effect.rows)
        return poisoned(effect, done) if poisons == 3 and next(faults, False) else done

    device.on_result = once
    rig.submit([1, 2], max_tokens=1, ignore_eos=True)
    rig.run(until=lambda: bool(rig.state.jobs))
    for number in range(3):
        rig.submit(POISON, seed=number, max_tokens=4, ignore_eos=True)
    rig.run(until=lambda: len(rig.state.suspended) == 3)
    assert [score for score, _ in rig.state.ladder.guilt.values()] == [1]
    rig.run(until=lambda: rig.state.device.state == "serving")
    rig.submit(POISON, seed=9, max_tokens=4, ignore_eos=True)
    rig.run()
    rig.check_answers()
    assert rig.state.ladder.guilt == {}
    rig.close()


def test_who_gets_through_alone_is_pardoned() -> None:
    """The same prompt twice under two faults an hour apart from each other is no poison."""
    rig = Rig(resets=True)
    for _ in range(3):
        faults = iter([True])

        def once(effect: SubmitJob, done: Completed, faults: object = faults) -> Input:
            return poisoned(effect, done) if next(faults, False) else done  # type: ignore[call-overload]

        rig.device.on_result = once
        stream = rig.submit(POISON, seed=5, max_tokens=3, ignore_eos=True)
        rig.run()
        assert stream.result().error is None, stream.result()
        assert rig.state.ladder.guilt == {}
        rig.device.clock.advance(HOUR_NS // 4)
    rig.check_answers()
    rig.close()


def test_an_accusation_that_is_too_long_ago_makes_no_poison_with_a_new_one() -> None:
    """A client that gave up cannot be pardoned; its accusation is forgotten all the same."""
    for apart_ns, refused in ((HOUR_NS // 2, True), (HOUR_NS, False)):
        rig = Rig(resets=True)
        for wait_ns in (apart_ns, 0):
            rig.device.on_result = poisoned
            given_up = rig.submit(POISON, seed=5, ignore_eos=True)
            rig.run(until=lambda rig=rig: bool(rig.state.suspended))  # type: ignore[misc]
            given_up.cancel()
            rig.device.on_result = None
            rig.run()
            rig.device.clock.advance(wait_ns)
        again = rig.submit(POISON, seed=5, ignore_eos=True)
        rig.run()
        assert (again.result().error is not None) == refused
        rig.close()
