"""The device refuses submits: roll back, try again within bounds, tell (R7.4, R14.2, rows 2 to 5).

Codes are those of the device ABI: 0x01 the caller, 0x02 stale, 0x03 capacity, 0x06 the job, 0x08
the device.
"""

import pytest
from support.fake_device import FakeDevice
from support.rig import Rig
from support.script import PROMPTS, TOKENS, begin, points, small_artifact

from laneway.engine import Limits, ModelError, RequestLostError
from laneway.engine.inputs import JobStalled, SubmitRefused

CAPACITY = 0x0301
REJECTED = 0x0601
CALLER = 0x0101
STALE = 0x0201
SICK = 0x0801
JOBS = len(PROMPTS) * TOKENS


def refused_at(job: int, *codes: int) -> Rig:
    """Return a rig whose submits are refused from the given one on."""
    rig = begin()
    rig.device.submits.extend([0] * job)
    rig.device.submits.extend(codes)
    return rig


@pytest.mark.parametrize("code", [CAPACITY, REJECTED])
@pytest.mark.parametrize("job", range(JOBS))
def test_one_refusal_of_any_job_costs_nobody_a_token(job: int, code: int) -> None:
    rig = refused_at(job, code)
    rig.run()
    rig.check_answers()
    rig.check_idle()
    assert len(rig.events("job", "refuse")) == 1
    assert len(rig.events("lane", "rollback")) == 1
    assert rig.events("request", "fail") == []
    rig.close()


@pytest.mark.parametrize("job", range(JOBS))
def test_two_rejections_end_the_request_and_no_other(job: int) -> None:
    rig = refused_at(job, REJECTED, REJECTED)
    rig.run()
    failed = [one for one in rig.streams if one.stream.result().finish_reason == "error"]
    assert len(failed) <= 1, "two rejections may hit two requests once each, or one twice"
    for one in failed:
        error = one.stream.result().error
        assert isinstance(error, RequestLostError) and "refused (2 times)" in str(error)
    rig.check_answers(ended_early=[one.stream for one in failed])
    rig.check_idle()
    rig.close()


def test_a_capacity_refusal_does_not_use_up_the_retry_of_a_rejected_submit() -> None:
    rig = Rig()
    rig.device.submits.extend([CAPACITY, REJECTED])
    stream = rig.submit([1, 2])
    rig.run()
    assert stream.result().error is None, "row 3: a rejected submit is tried once more"
    rig.check_answers()
    rig.close()


def test_the_caller_s_mistake_ends_the_request_at_once() -> None:
    for job in range(JOBS):
        rig = refused_at(job, CALLER)
        rig.run()
        failed = [one for one in rig.streams if one.stream.result().finish_reason == "error"]
        assert len(failed) == 1
        rig.check_answers(ended_early=[failed[0].stream])
        rig.check_idle()
        rig.close()


def test_capacity_is_tried_again_after_a_rising_pause_not_in_a_loop() -> None:
    rig = Rig(limits=Limits(backoff_first_ns=1_000, backoff_last_ns=6_000))
    rig.device.submits.extend([CAPACITY] * 5)
    rig.submit([1, 2], max_tokens=1)
    rig.run()
    refused = [step.at_ns for step in rig.steps if isinstance(step.taken, SubmitRefused)]
    assert [b - a for a, b in zip(refused, refused[1:], strict=False)] == [1000, 2000, 4000, 6000]
    rig.check_answers()
    rig.close()


def test_capacity_that_never_comes_ends_in_503_within_the_tries() -> None:
    rig = Rig(limits=Limits(backoff_tries_max=4))
    rig.device.submits.extend([CAPACITY] * 100)
    stream = rig.submit([1, 2])
    rig.run()
    assert "request/1" in str(stream.result().error)
    assert len(rig.events("job", "refuse")) == 5
    rig.device.submits.clear()
    rig.check_idle()
    rig.submit([3])
    rig.run()
    rig.check_answers(ended_early=[stream])
    rig.close()


def test_a_deadline_ends_the_wait_for_capacity() -> None:
    rig = Rig()
    rig.device.submits.extend([CAPACITY] * 3)
    stream = rig.submit([1, 2], deadline_s=0.006)
    rig.run()
    assert stream.result().finish_reason == "deadline"
    rig.check_idle()
    rig.close()


def test_three_rejections_in_a_row_lose_the_device() -> None:
    rig = refused_at(0, REJECTED, REJECTED, REJECTED)
    rig.run()
    assert rig.state.device.state == "lost"
    assert "3 refusals in a row" in rig.engine.health().reason
    rig.check_answers(ended_early=[one.stream for one in rig.streams])
    rig.close()
    assert rig.device.closes == [True]


@pytest.mark.parametrize("code", [SICK, 0x0F01, 0x0404])
@pytest.mark.parametrize("job", range(JOBS))
def test_sick_loses_the_device_at_once(job: int, code: int) -> None:
    rig = refused_at(job, code)
    rig.run()
    assert rig.state.device.state == "lost"
    assert all(one.stream.result().finish_reason in ("error", "length") for one in rig.streams)
    assert len(rig.device.submitted) == job + 2, "the golden, the accepted, and the refused one"
    rig.check_answers(ended_early=[one.stream for one in rig.streams])
    rig.close()
    assert rig.device.closes == [True]


@pytest.mark.parametrize("code", [CAPACITY, REJECTED, CALLER, STALE, SICK])
def test_a_refusal_of_a_job_whose_request_ended_keeps_nothing(code: int) -> None:
    for job in range(JOBS):
        rig = refused_at(job, code)
        while len(rig.device.executed_jobs) < job + 2:
            rig.act()
        owner = rig.device.executed_jobs[-1].rows[0].owner
        cancelled = rig.streams[owner - 1].stream
        cancelled.cancel()
        rig.run()
        assert cancelled.result().finish_reason == "cancelled"
        if code == SICK:
            assert rig.state.device.state == "lost"
        else:
            rig.check_answers(ended_early=[cancelled])
            rig.check_idle()
        rig.close()


@pytest.mark.parametrize("code", [CAPACITY, REJECTED, SICK])
def test_cancel_around_a_refusal_at_every_point(code: int) -> None:
    for job in (0, 2):
        for rig in points(stride=5):
            rig.device.submits.extend([0] * job + [code])
            rig.run_actions(4)
            for one in rig.streams[:2]:
                one.stream.cancel()
            rig.run()
            rig.check_answers(ended_early=[one.stream for one in rig.streams])
            rig.close()


@pytest.mark.parametrize("code", [CAPACITY, REJECTED, CALLER, STALE, SICK])
def test_a_load_whose_submits_are_always_refused_ends(code: int) -> None:
    rig = Rig(device=FakeDevice(artifact=small_artifact), load=False)
    rig.device.submits.extend([code] * 500)
    with pytest.raises(ModelError):
        rig.engine.load("m", "source")
    assert len(rig.events("job", "refuse")) <= 25, "bounded retries"
    rig.close()


@pytest.mark.parametrize("code", [CAPACITY, REJECTED])
def test_a_load_survives_one_refusal(code: int) -> None:
    rig = Rig(load=False)
    rig.device.submits.extend([0, code, 0, code])
    rig.engine.load("m", "source")
    rig.check_idle_lanes()
    rig.close()


def test_a_hang_suspected_of_a_job_that_is_then_refused_does_not_stop_the_device_for_ever() -> None:
    rig = begin()
    rig.device.submits.extend([REJECTED])
    rig.run(until=lambda: bool(rig.state.jobs))
    (job,) = rig.state.jobs
    rig.interrupt(
        JobStalled(job=job, ticket=0, stage="suspect", phase="h2d", age_ns=9, progress_age_ns=9)
    )
    rig.run()
    assert rig.state.device.state == "serving"
    rig.check_answers()
    rig.close()
