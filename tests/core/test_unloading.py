"""Unload a model: drain, release, and believe only the memory figures (R10.3, E22, G16)."""

import attrs
import pytest
from support.fake_device import FakeDevice, healthy
from support.recovery import faulted
from support.rig import Rig

from laneway.engine import Limits, ModelError
from laneway.engine.effects import ProbeHealth, ReleaseModel
from laneway.engine.inputs import HealthProbed, ModelReleased, ReleaseFailed
from laneway.engine.limits import SECOND
from laneway.engine.loads import Loads
from laneway.statemachines import Event


def test_live_requests_are_finished_first() -> None:
    rig = Rig()
    for number in range(11):
        rig.submit([number + 1, 3], seed=number)
    rig.run_actions(30)
    rig.engine.unload("m")
    released = next(e for e in rig.device.executed if isinstance(e, ReleaseModel))
    assert rig.device.executed[-1] is released, "nothing is asked of the device afterwards"
    rig.check_answers()
    assert rig.engine.models() == () and not rig.engine.ready()
    assert "no model is ready" in rig.engine.health().reason
    rig.close()


def test_an_unload_goes_on_after_a_reset_that_came_between() -> None:
    """The model serves what was suspended, then is gone as asked; it does not serve on."""
    rig = Rig(resets=True)
    rig.submit([1, 2], max_tokens=8)
    rig.run_actions(6)
    rig.ask_unload(1)
    rig.run(until=lambda: rig.state.models[1].state == "draining")
    rig.device.drop_jobs()
    rig.interrupt(faulted(min(rig.state.jobs)))
    rig.run()
    assert not rig.state.models and rig.state.device.state == "serving"
    rig.check_answers()
    rig.close()


def test_load_and_unload_again_and_again() -> None:
    rig = Rig()
    for round_ in range(4):
        rig.submit([round_ + 1, 3], seed=round_)
        rig.run()
        rig.engine.unload("m")
        rig.engine.load("m", "source")
    rig.submit([9], seed=9)
    rig.run()
    rig.check_answers()
    model = rig.state.models[5]
    assert (model.generation, model.lane_first, rig.state.next_buffer) == (5, 33, 31)
    rig.close()


def test_an_unknown_alias_is_an_error() -> None:
    rig = Rig()
    with pytest.raises(ModelError, match="no model 'x'"):
        rig.engine.unload("x")
    rig.engine.unload("m")
    with pytest.raises(ModelError, match="no model 'm'"):
        rig.engine.unload("m")
    rig.close()


def hold_memory(rig: Rig, *, first: int, again: int) -> None:
    """Let the device tell of so many bytes at the release and when it is asked once more."""
    rig.device.overrides[ReleaseModel] = lambda effect: ModelReleased(
        model=effect.model, used_bytes=(first,), healthy=True
    )
    rig.device.overrides[ProbeHealth] = lambda effect: HealthProbed(
        health=attrs.evolve(healthy(0), used_bytes=(again,)), reason=""
    )


@pytest.mark.parametrize(("stays", "lost"), [(0, False), (10, False), (11, True)])
def test_memory_must_come_back_within_the_tolerance(stays: int, lost: bool) -> None:
    rig = Rig(limits=Limits(unload_tolerance_bytes=10))
    hold_memory(rig, first=stays, again=stays)
    if lost:
        with pytest.raises(ModelError, match="chip 0 holds 11 bytes, 0 before"):
            rig.engine.unload("m")
        assert rig.state.device.state == "lost"
        assert rig.state.models[1].state == "failed"
    else:
        rig.engine.unload("m")
        assert not rig.state.models and not rig.state.buffers
    rig.close()
    assert rig.device.closes == [lost]


@pytest.mark.parametrize("failed_load", [False, True])
def test_memory_that_comes_back_late_is_read_once_more_after_five_seconds(
    failed_load: bool,
) -> None:
    """Row 13: wait 5 s, read once more, only then the verdict; no thread sleeps for it."""
    rig = Rig(limits=Limits(unload_tolerance_bytes=10), load=False)
    hold_memory(rig, first=11, again=10)
    if failed_load:
        rig.device.verdict = "differs"
        with pytest.raises(ModelError, match="differs"):
            rig.engine.load("m", "source")
        rig.run()
    else:
        rig.engine.load("m", "source")
        rig.engine.unload("m")
    assert rig.state.device.state == "serving" and not rig.state.models
    probes = [effect for effect in rig.device.executed if isinstance(effect, ProbeHealth)]
    assert len(probes) == 1, "read once more, and once only"
    at = {type(step.taken): step.at_ns for step in rig.steps}
    waited = next(s.at_ns for s in rig.steps for e in s.events if e.trigger == "reread")
    assert waited - at[ModelReleased] == 5 * SECOND
    rig.device.verdict = "equal"
    rig.engine.load("m", "source")
    rig.close()


@pytest.mark.parametrize("state", ["", "unhealthy", "degraded"])
def test_a_second_reading_that_says_bad_or_nothing_loses_the_device(state: str) -> None:
    rig = Rig(limits=Limits(unload_tolerance_bytes=10))
    hold_memory(rig, first=11, again=0)
    facts = attrs.evolve(healthy(0), state=state) if state else None
    rig.device.overrides[ProbeHealth] = lambda effect: HealthProbed(health=facts, reason="silence")
    with pytest.raises(ModelError, match="read again"):
        rig.engine.unload("m")
    assert rig.state.device.state == "lost"
    rig.close()


def test_what_is_said_while_memory_is_waited_for_decides_nothing() -> None:
    rig = Rig(limits=Limits(unload_tolerance_bytes=10))
    hold_memory(rig, first=11, again=0)
    rig.ask_unload(1)
    rig.run(until=lambda: bool(rig.events("model", "linger")))
    rig.interrupt(ModelReleased(model=1, used_bytes=(0,), healthy=True))
    rig.interrupt(HealthProbed(health=healthy(0), reason="unasked"))
    assert rig.state.models[1].state == "unloading", "neither is the second reading"
    rig.run()
    assert not rig.state.models
    rig.close()


def test_closing_waits_for_the_second_reading() -> None:
    rig = Rig(limits=Limits(unload_tolerance_bytes=10))
    hold_memory(rig, first=11, again=0)
    rig.close()
    assert rig.device.closes == [False]


@pytest.mark.parametrize("used", [(), (0, 0)])
def test_memory_figures_of_another_shape_do_not_kill_the_engine(used: tuple[int, ...]) -> None:
    rig = Rig()
    rig.device.overrides[ReleaseModel] = lambda effect: ModelReleased(
        model=effect.model, used_bytes=used, healthy=True
    )
    try:
        rig.engine.unload("m")
    except ModelError as refused:
        assert "m" in str(refused)
    rig.close()


def test_a_sick_device_after_the_release_is_lost() -> None:
    rig = Rig()
    rig.device.overrides[ReleaseModel] = lambda effect: ModelReleased(
        model=effect.model, used_bytes=(0,), healthy=False
    )
    with pytest.raises(ModelError, match="not healthy"):
        rig.engine.unload("m")
    assert rig.state.device.state == "lost"
    rig.close()


def test_a_failed_release_is_told_with_its_code() -> None:
    rig = Rig()
    rig.device.overrides[ReleaseModel] = lambda effect: ReleaseFailed(
        model=effect.model, code=0x0802, reason="wedged"
    )
    with pytest.raises(ModelError, match="0x0802: wedged"):
        rig.engine.unload("m")
    assert rig.state.device.state == "lost" and not rig.engine.ready()
    rig.close()
    assert rig.device.closes == [True]


def test_an_unload_is_over_when_what_failed_meanwhile_is_given_back() -> None:
    """A model that is given up while it drains is released too, so nothing of it is left."""
    rig = Rig()
    loads, model = Loads(), rig.state.models[1]
    assert not loads.is_gone(rig.state, 1)
    data = {"reason": "computes wrongly", "release": True}
    loads.note(Event("model", (1,), "fail", "unloading", "failed", 1, 1, data))
    model.releasing = True
    assert not loads.is_gone(rig.state, 1), "its memory is still to come back"
    model.releasing = False
    assert loads.is_gone(rig.state, 1) and loads.why_left(rig.state, 1) == "computes wrongly"
    del rig.state.models[1]
    assert loads.is_gone(rig.state, 1) and loads.why_left(rig.state, 1) is None


def test_a_model_that_is_not_ready_is_not_drained() -> None:
    rig = Rig(load=False)
    number = rig.ask_load()
    rig.ask_unload(number)
    rig.run()
    assert rig.state.models[number].state == "ready"
    rig.ask_unload(number + 7)
    rig.run()
    assert rig.steps[-1].events == ()
    rig.close()


def test_close_with_a_model_on_a_lost_device_leaves_it_failed() -> None:
    rig = Rig(device=FakeDevice())
    rig.device.submits.append(0x0801)
    rig.submit([1])
    rig.run()
    assert rig.state.models[1].state == "failed"
    rig.close()
    assert rig.state.models[1].state == "failed"
