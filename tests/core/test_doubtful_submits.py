"""A submit in doubt costs its job, its lane and its buffer, not the device (row 4, D6, G12).

The device goes on degraded until the model is unloaded; when too little is left to serve with, only
a reset would help, and the device is lost.
"""

import pytest
from support.fake_device import FakeDevice
from support.rig import Rig
from support.told import stall_told

from laneway.engine import Limits

WIDE = Limits(buffers_per_submodel=4)


def doubted(number: int, *, limits: Limits = WIDE) -> Rig:
    """Return an idle rig after six requests, with the submit of one of its jobs in doubt."""
    rig = Rig(limits=limits)
    rig.device.submits.extend([0] * number + ["doubt"])
    for index in range(6):
        rig.submit([index + 1, 2], seed=index, max_tokens=3, ignore_eos=True)
    return rig


@pytest.mark.parametrize("number", range(0, 18, 3))
def test_it_is_in_flight_until_it_ends_and_costs_a_buffer_and_a_lane(number: int) -> None:
    """Its request goes on in another lane with the tokens of a calm run; so do the others."""
    rig = doubted(number)
    rig.run(until=lambda: bool(rig.events("job", "doubt")))
    (job,) = rig.state.jobs.values()
    assert job.state == "uncertain" and rig.state.buffers[job.buffer].state == "submitted"
    submitted = len(rig.device.submitted)
    rig.run(until=lambda: not rig.state.jobs or rig.state.device.state != "serving")
    assert len(rig.device.submitted) == submitted, "nothing is submitted meanwhile"
    rig.run()
    state = rig.state
    assert state.buffers[job.buffer].state == "quarantined"
    assert state.lanes[job.rows[0].lane].state == "unknown"
    (again,) = rig.events("request", "suspend")
    assert again.entities == (job.rows[0].owner,) and again.data["suspect"]
    assert state.device.state == "degraded" and rig.engine.ready()
    assert "doubtful submit" in rig.engine.health().reason
    rig.check_answers()
    rig.close()


def test_what_is_quarantined_or_unknown_is_not_used_again_and_leaves_with_its_model() -> None:
    rig = doubted(2)
    rig.run()
    (quarantined,) = rig.events("buffer", "quarantine")
    (unknown,) = rig.events("lane", "suspect")
    for index in range(12):
        rig.submit([index + 1, 3], seed=index)
    rig.run()
    after = rig.events_of_all()[rig.events_of_all().index(quarantined) + 1 :]
    moved = {(event.machine, number) for event in after for number in event.entities}
    assert ("buffer", quarantined.entities[0]) not in moved
    again = after[after.index(unknown) + 1 :]
    assert all(e.entities != unknown.entities for e in again if e.machine == "lane")
    rig.engine.unload("m")
    assert rig.state.device.state == "serving", "nothing is in doubt any more"
    rig.engine.load("m", "source")
    stream = rig.submit([1, 2])
    rig.run()
    assert stream.result().error is None
    rig.check_idle()
    rig.close()
    assert rig.device.closes == [False]


def test_more_than_a_quarter_of_the_lanes_in_doubt_lose_the_device() -> None:
    rig = Rig(limits=Limits(buffers_per_submodel=8))
    rig.device.submits.extend([0, "doubt"] * 3)
    for index in range(8):
        rig.submit([index + 1, 2], seed=index, max_tokens=5)
    rig.run(until=lambda: len(rig.events("job", "fault")) == 2)
    assert rig.state.device.state == "degraded"
    rig.run()
    assert rig.state.device.state == "lost"
    assert "3 of 8 lanes" in rig.engine.health().reason
    rig.check_answers(ended_early=[one.stream for one in rig.streams])
    rig.close()


def test_too_few_buffers_left_lose_the_device_and_say_so() -> None:
    """G12: a submodel without a buffer is a reason to reset, and there is none."""
    rig = Rig(limits=Limits(buffers_per_submodel=1))
    rig.device.submits.append("doubt")
    rig.submit([1, 2])
    rig.run()
    assert rig.state.device.state == "lost" and not rig.engine.ready()
    assert "all 1 buffers of" in rig.engine.health().reason
    rig.check_answers(ended_early=[one.stream for one in rig.streams])
    rig.close()
    assert rig.device.closes == [True]


def test_without_an_end_by_its_deadline_it_is_a_hang() -> None:
    """Row 8: then the device is lost."""
    rig = doubted(3)
    rig.run(until=lambda: bool(rig.events("job", "doubt")))
    rig.device.holding = True
    (job,) = rig.state.jobs.values()
    rig.post(stall_told(job, "cap"))
    rig.run()
    assert rig.state.device.state == "lost" and "hangs" in rig.engine.health().reason
    rig.check_answers(ended_early=[one.stream for one in rig.streams])
    rig.close()


def test_a_suspected_hang_that_was_a_doubtful_submit_ends_degraded() -> None:
    rig = doubted(3)
    rig.run(until=lambda: bool(rig.events("job", "doubt")))
    (job,) = rig.state.jobs.values()
    rig.interrupt(stall_told(job, "suspect"))
    assert rig.state.device.state == "suspect"
    rig.run()
    assert rig.state.device.state == "degraded"
    rig.close()


@pytest.mark.parametrize("number", range(4))
def test_a_trial_in_doubt_is_a_failed_load_and_not_a_lost_device(number: int) -> None:
    rig = Rig(load=False, device=FakeDevice(), limits=WIDE)
    rig.device.submits.extend([0] * number + ["doubt"])
    rig.ask_load()
    rig.run()
    assert rig.state.device.state == "serving"
    assert not rig.state.models, "it failed and gave everything back"
    rig.engine.load("m", "source")
    rig.submit([1, 2])
    rig.run()
    rig.check_answers()
    rig.close()
