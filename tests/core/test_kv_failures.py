"""KV operation lists that are not applied: no loop, no abort, no doubtful lane in use (R2.3, R7.7).

RESERVE before anything is applied costs a try; COMMIT and RELEASE, or an answer that says unknown,
cost the lane; too many lost lanes cost the device (rows 19 and 20).
"""

import pytest
from support.fake_device import FakeDevice, KvFault
from support.rig import Rig
from support.schedules import Scheduled, Shape
from support.script import begin, points, small_artifact

from laneway.engine import Limits, ModelError, RequestLostError
from laneway.engine.effects import ApplyKv, RunReset, SubmitJob
from laneway.engine.inputs import KvApplyFailed
from laneway.engine.limits import SECOND
from laneway.statemachines import Event


def job_owner(rig: Rig, job: int | None) -> int:
    """Return the request a job was planned for."""
    (event,) = [event for event in rig.events("job", "plan") if event.entities == (job,)]
    return int(event.data["owners"][0])


def unknown_lanes(rig: Rig) -> int:
    return sum(lane.state == "unknown" for lane in rig.state.lanes.values())


def test_a_reserve_that_fails_once_costs_nobody_a_token() -> None:
    for rig in points(stride=3):
        rig.device.kv_faults = [KvFault(verb="RESERVE")]
        rig.run()
        rig.check_answers()
        rig.check_idle()
        rig.close()


def test_a_lane_that_was_never_reserved_on_the_device_is_not_released_there() -> None:
    """Row 19: the bank is asked to release only what it holds."""
    rig = Rig()
    rig.device.kv_faults = [KvFault(verb="RESERVE", times=1000)]
    rig.submit([1, 2])
    rig.run()
    (evicted,) = rig.events("lane", "evict")[-1:]
    asked = [effect for effect in rig.device.executed if isinstance(effect, ApplyKv)]
    lanes = [op.lane for effect in asked for op in effect.operations if op.verb == "RELEASE"]
    trials = [event.entities[0] for event in rig.events("lane", "evict")[:-1]]
    assert lanes == trials, f"lane {evicted.entities} was never reserved, released are {lanes}"
    rig.device.kv_faults = []
    rig.submit([1, 2])
    rig.run()
    assert len([e for e in rig.device.executed if isinstance(e, ApplyKv)]) == len(asked) + 1
    rig.close()


def test_a_reserve_that_always_fails_ends_each_request_within_the_retries() -> None:
    rig = begin()
    rig.device.kv_faults = [KvFault(verb="RESERVE", times=1000)]
    rig.run()
    for one in rig.streams:
        error = one.stream.result().error
        assert isinstance(error, RequestLostError) and "refused (3 times)" in str(error)
    refused: dict[int, list[int]] = {}
    for step in rig.steps:
        if isinstance(step.taken, KvApplyFailed):
            owner = job_owner(rig, step.taken.job)
            refused.setdefault(owner, []).append(step.at_ns)
    assert [len(times) for times in refused.values()] == [3] * len(rig.streams)
    assert all(times[-1] - times[0] <= SECOND for times in refused.values()), "row 19: in 1 s"
    rig.check_idle()
    rig.device.kv_faults = []
    again = rig.submit([5, 5])
    rig.run()
    assert again.result().error is None
    rig.close()


@pytest.mark.parametrize("verb", ["RESERVE", "COMMIT", "RELEASE"])
@pytest.mark.parametrize(
    ("code", "levels"), [(0x0702, [2]), (0x0202, [2]), (0x0201, [0]), (0x0804, [4]), (0x0F01, [4])]
)
def test_a_list_that_finds_all_of_it_gone_is_answered_by_the_ladder(
    verb: str, code: int, levels: list[int]
) -> None:
    """Rows 15, 20, 22: nobody is served on a configuration that is gone, and nobody pays for it."""
    for wait in (0, 14, 30):
        rig = Rig(device=FakeDevice(artifact=small_artifact), resets=True)
        for number in range(5):
            rig.submit([number + 1, 2], seed=number, max_tokens=5, ignore_eos=True)
        rig.run_actions(wait)
        rig.device.kv_faults = [KvFault(verb=verb, code=code)]
        rig.run()
        ran = [effect.level for effect in rig.device.executed if isinstance(effect, RunReset)]
        assert ran == levels and rig.state.device.state == "serving"
        rig.check_answers()
        rig.check_idle()
        rig.close()


@pytest.mark.parametrize(
    "fault", [KvFault(verb="COMMIT"), KvFault(verb="RESERVE", unknown=True)], ids=lambda f: f.verb
)
def test_a_doubtful_lane_costs_no_token_and_is_not_used_again(fault: KvFault) -> None:
    rig = Rig()
    streams = [rig.submit([number + 1, 2], seed=number, max_tokens=5) for number in range(12)]
    rig.run_actions(40)
    rig.device.kv_faults = [fault]
    rig.run()
    assert [stream.result().error for stream in streams] == [None] * len(streams)
    (suspended,) = rig.events("request", "suspend")
    assert not suspended.data["suspect"], "row 20: its lane is in doubt, and nobody is to blame"
    assert unknown_lanes(rig) == 1
    (event,) = rig.events("lane", "suspect")
    bound = [e.entities for e in rig.events("lane", "bind") if e.entities == event.entities]
    again = [e for e in after(rig, event) if e.machine == "lane" and e.entities == event.entities]
    assert bound and not again
    rig.check_answers()
    rig.close()


def is_batch(job: SubmitJob) -> bool:
    """Tell whether a job decodes for four requests at once."""
    return (job.origin, job.task, len(job.rows)) == ("request", "decode", 4)


@pytest.mark.parametrize("verb", ["RESERVE", "COMMIT"])
def test_a_list_that_ended_unknown_puts_every_lane_of_it_in_doubt(verb: str) -> None:
    """Nobody knows what was applied, so no lane of the batch is used again; all go on elsewhere."""
    it = Scheduled(Shape((1, 4), 12, "length_zero", 1, Limits(prefill_tokens_max=8)))
    rig = it.rig
    for number in range(4):
        rig.submit([number + 1, 2], seed=number, max_tokens=6, ignore_eos=True)
    rig.run(until=lambda: is_batch(rig.device.submitted[-1]))
    rig.device.kv_faults = [KvFault(verb=verb, unknown=True)]
    rig.run()
    (failure,) = [step.taken for step in rig.steps if isinstance(step.taken, KvApplyFailed)]
    assert failure.unknown and len(failure.lanes) == 4
    doubted = {n for event in rig.events("lane", "suspect") for n in event.entities}
    assert doubted == set(failure.lanes)
    assert unknown_lanes(rig) == 4
    assert rig.state.device.state == "degraded", "a quarter of the lanes is not more than one"
    rig.check_answers()
    rig.close()


def test_a_list_that_was_not_applied_puts_the_blamed_lane_alone_in_doubt() -> None:
    it = Scheduled(Shape((1, 4), 12, "length_zero", 1, Limits(prefill_tokens_max=8)))
    rig = it.rig
    for number in range(4):
        rig.submit([number + 1, 2], seed=number, max_tokens=6, ignore_eos=True)
    rig.run(until=lambda: is_batch(rig.device.submitted[-1]))
    rig.device.kv_faults = [KvFault(verb="COMMIT")]
    rig.run()
    assert unknown_lanes(rig) == 1
    rig.check_answers()
    rig.close()


def after(rig: Rig, event: Event) -> list[Event]:
    """Return the events that follow a given one."""
    every = rig.events_of_all()
    return every[every.index(event) + 1 :]


def test_a_release_that_fails_costs_the_lane_only() -> None:
    rig = Rig()
    rig.device.kv_faults = [KvFault(verb="RELEASE")]
    for number in range(6):
        rig.submit([number + 1, 2], seed=number, max_tokens=3)
    rig.run()
    assert rig.state.device.state == "degraded", "G12: a lane is unknown"
    ended = [one.stream for one in rig.streams if one.stream.result().error is not None]
    assert len(ended) <= 1, "at most the sequence that had the lane next"
    rig.check_answers(ended_early=ended)
    assert unknown_lanes(rig) == 1
    rig.close()


@pytest.mark.parametrize("verb", ["COMMIT", "RELEASE", "ROLLBACK", "RESERVE"])
@pytest.mark.parametrize("unknown", [False, True])
def test_any_failed_operation_at_every_point_keeps_every_promise(verb: str, unknown: bool) -> None:
    for rig in points(stride=7):
        rig.device.kv_faults = [KvFault(verb=verb, unknown=unknown)]
        rig.streams[0].stream.cancel()
        rig.run()
        rig.check_answers(ended_early=[one.stream for one in rig.streams])
        rig.close()


def test_more_than_a_quarter_of_unknown_lanes_lose_the_device() -> None:
    rig = Rig()
    rig.device.kv_faults = [KvFault(verb="COMMIT", times=3)]
    for number in range(8):
        rig.submit([number + 1, 2], seed=number, max_tokens=5)
    rig.run(until=lambda: unknown_lanes(rig) == 2)
    assert rig.state.device.state == "degraded", "G12: a lane is unknown"
    rig.run()
    assert rig.state.device.state == "lost"
    assert "3 of 8 lanes is in doubt" in rig.engine.health().reason
    rig.check_answers(ended_early=[one.stream for one in rig.streams])
    rig.close()
    assert rig.device.closes == [True]


def test_unknown_lanes_leave_with_their_model() -> None:
    rig = Rig()
    rig.device.kv_faults = [KvFault(verb="COMMIT")]
    rig.submit([1, 2])
    rig.run()
    assert unknown_lanes(rig) == 1
    rig.engine.unload("m")
    assert not rig.state.lanes
    rig.engine.load("m", "source")
    assert unknown_lanes(rig) == 0
    rig.submit([1, 2])
    rig.run()
    rig.check_answers()
    rig.close()


@pytest.mark.parametrize("verb", ["RESERVE", "COMMIT", "RELEASE"])
@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize("times", [1, 500])
def test_a_load_with_failing_kv_ends(verb: str, unknown: bool, times: int) -> None:
    rig = Rig(load=False)
    rig.device.kv_faults = [KvFault(verb=verb, unknown=unknown, times=times)]
    try:
        rig.engine.load("m", "source")
    except ModelError as refused:
        assert "m" in str(refused)
    assert len(rig.events("job", "refuse")) <= 25, "bounded retries"
    rig.device.kv_faults = []
    rig.close()


def test_small_artifact_loses_the_device_with_its_first_doubtful_lane() -> None:
    rig = Rig(device=FakeDevice(artifact=small_artifact))
    rig.device.kv_faults = [KvFault(verb="COMMIT")]
    stream = rig.submit([1, 2])
    rig.run()
    assert rig.state.device.state == "lost", "one of two lanes is more than a quarter"
    assert stream.result().error is not None
    rig.close()


@pytest.mark.parametrize("unknown", [False, True])
def test_a_release_that_fails_leaves_the_lanes_beside_it_in_step(unknown: bool) -> None:
    """A list is applied whole or not at all: a batch gives each lane back by itself (row 20)."""
    shape = Shape((1, 8), 0, "length_zero", 1, Limits())
    it = Scheduled(shape)
    rig = it.rig
    rig.device.kv_faults = [KvFault(verb="RELEASE", unknown=unknown)]
    for number in range(16):
        rig.submit([number + 1, 3], seed=number, max_tokens=3, ignore_eos=True)
    rig.run()
    failed = [step.taken.lane for step in rig.steps if isinstance(step.taken, KvApplyFailed)]
    assert set(failed) == {1}, "the last golden run of the load gives its eight lanes back"
    assert unknown_lanes(rig) == 1
    rig.check_answers()
    rig.close()
