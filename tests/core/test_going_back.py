"""Back to what served before, when a reset does not help against abnormal numbers (row 12)."""

from collections.abc import Sequence

import attrs
import msgspec
import pytest
from support.fake_device import FakeDevice, artifact, healthy
from support.rig import Rig
from support.strikes import levels
from support.told import fault_told

from laneway.engine import Limits, ModelError
from laneway.engine.effects import (
    ConfigureModel,
    ProbeHealth,
    ReleaseModel,
    SubmitJob,
    ValidateArtifact,
)
from laneway.engine.inputs import (
    ArtifactRefused,
    Completed,
    ConfigureFailed,
    DeviceFacts,
    DeviceFaulted,
    HealthProbed,
    Input,
    ModelReleased,
    Trial,
)
from laneway.engine.ports import Step

OLD, NEW = "0" * 64, "1" * 64
CANARIES = Limits(canary_jobs=4, canary_idle_ns=0)
ONE_TRIAL = (Trial(origin="golden", prompt=(1, 2), forced=()),)


def by_source(effect: ValidateArtifact) -> Input:
    """Return the artifact of a source: the old one of ``source``, the new one of others."""
    sha256 = OLD if effect.source == "source" else NEW
    return attrs.evolve(artifact(effect.model), sha256=sha256, trials=ONE_TRIAL)


def rig_of(
    *, steps: Sequence[Step] = (), device: FakeDevice | None = None, load: bool = True
) -> Rig:
    """Return a rig with canaries and resets, which serves the old artifact."""
    device = FakeDevice() if device is None else device
    device.sources = dict.fromkeys(("source", "newer"), by_source)
    return Rig(steps=steps, device=device, limits=CANARIES, resets=True, canaries=True, load=load)


def wrong_numbers_of(rig: Rig, *models: int, until: int = 1 << 60) -> None:
    """Let every golden row of some models differ from here on, up to a generation."""

    def judge(effect: SubmitJob, done: Completed) -> Input:
        wrong = effect.model in models and effect.generation < until
        if not wrong or effect.origin not in ("golden", "canary"):
            return done
        rows = tuple(msgspec.structs.replace(row, verdict="differs") for row in done.rows)
        return attrs.evolve(done, rows=rows)

    rig.device.on_result = judge


def spoil(rig: Rig, *models: int, until: int = 1 << 60) -> None:
    """Let requests run on a model whose numbers go wrong, until all is over."""
    wrong_numbers_of(rig, *models, until=until)
    for number in range(4):
        rig.submit([number + 1, 5], seed=number, max_tokens=4, ignore_eos=True)
    rig.run()


def test_golden_that_differs_after_the_reset_leads_back() -> None:
    """Canary, reset of the configuration, golden once more, then the artifact before it."""
    rig = rig_of()
    rig.engine.replace("m", "newer")
    spoil(rig, 2)
    assert levels(rig) == [2], "the configuration was reset, the device was not"
    assert rig.state.aliases == {"m": 3} and rig.state.device.state == "serving"
    facts = rig.state.models[3].facts
    assert facts is not None and facts.sha256 == OLD and rig.state.models[3].source == "source"
    ways = [e.trigger for e in rig.events("model") if e.entities == (2,)]
    assert ways[-4:] == ["configure", "stand_down", "fail", "clean"]
    assert [one.sha256 for one in rig.state.proven["m"]] == [OLD], "the other is not gone back to"
    kinds = {event.data["reason"] for event in rig.events("request", "fail")}
    assert kinds == {"numbers_in_doubt", "model_changed"}
    rig.streams.clear()
    rig.submit([7, 8], max_tokens=3)
    rig.run()
    rig.check_answers()
    rig.close()


def test_what_nobody_knows_a_better_one_for_is_reset_further() -> None:
    rig = rig_of()
    spoil(rig, 1, until=3)
    assert levels(rig) == [2, 4] and rig.state.aliases == {"m": 1}
    rig.close()


def test_one_way_back_is_enough() -> None:
    """Where the numbers of what was gone back to differ too, the device is to blame."""
    rig = rig_of()
    rig.engine.replace("m", "newer")
    spoil(rig, 2, 3, until=5)
    assert levels(rig) == [2, 4] and rig.state.aliases == {"m": 3}
    assert [
        e.data["instead_of"] for e in rig.events("model", "load") if "instead_of" in e.data
    ] == [2]
    rig.close()


@pytest.mark.parametrize("how", ["unreadable", "another"])
def test_what_cannot_be_read_is_no_way_back(how: str) -> None:
    """The model that stood down is reset further and serves on; its requests go on."""
    rig = rig_of()
    rig.engine.replace("m", "newer")
    rig.device.sources["source"] = lambda effect: (
        ArtifactRefused(model=effect.model, reason="gone")
        if how == "unreadable"
        else attrs.evolve(artifact(effect.model), sha256="2" * 64)
    )
    spoil(rig, 2, until=4)
    assert levels(rig) == [2, 4] and rig.state.aliases == {"m": 2}
    assert any("no way back" in e.data["reason"] for e in rig.events("device", "escalate"))
    rig.close()


def test_it_is_remembered_over_a_restart_but_not_for_another_device() -> None:
    first = rig_of()
    first.engine.replace("m", "newer")
    first.close()
    for serial, served in (("0", OLD), ("1", NEW)):
        rig = rig_of(steps=first.steps, device=Numbered(serial=serial), load=False)
        rig.engine.load("m", "newer")
        spoil(rig, 3, until=5)
        facts = rig.state.models[rig.state.aliases["m"]].facts
        assert facts is not None and facts.sha256 == served
        rig.close()


@attrs.define
class Numbered(FakeDevice):
    """A device with a serial number."""

    serial: str = "0"

    def describe(self) -> DeviceFacts:
        return attrs.evolve(FakeDevice.describe(self), serial=self.serial)


def test_a_configuration_that_fails_on_the_way_back_is_tried_after_a_further_reset() -> None:
    rig = rig_of()
    rig.engine.replace("m", "newer")
    configure = rig.device._configure
    refused: list[int] = []

    def answer(effect: object) -> Input | None:
        assert hasattr(effect, "model")
        if effect.model == 3 and not refused:
            refused.append(effect.model)
            return ConfigureFailed(model=3, code=0x0701, reason="no bank")
        configure(effect)  # type: ignore[arg-type]
        return None

    rig.device.overrides[ConfigureModel] = answer
    spoil(rig, 2)
    assert levels(rig) == [2, 4] and rig.state.aliases == {"m": 3}
    rig.close()


def test_memory_that_is_not_given_back_on_the_way_is_reset_and_then_it_goes_on() -> None:
    rig = rig_of()
    rig.engine.replace("m", "newer")
    told = iter([999 << 20])
    rig.device.overrides[ReleaseModel] = lambda effect: ModelReleased(
        model=effect.model, used_bytes=(next(told, 0),), healthy=True
    )
    rig.device.overrides[ProbeHealth] = lambda effect: HealthProbed(
        health=attrs.evolve(healthy(0), used_bytes=(999 << 20,)), reason=""
    )
    spoil(rig, 2)
    assert levels(rig) == [2, 4] and rig.state.aliases == {"m": 3}
    rig.close()


@pytest.mark.parametrize("what", ["close", "stop", "unload", "fault", "load", "replace"])
def test_whatever_comes_at_any_point_of_the_way_the_engine_comes_to_rest(what: str) -> None:
    """From the first canary that differs to the last token, at every third point."""
    whole = rig_of()
    count = _begin_way(whole, 1 << 30)
    whole.run()
    assert whole.state.aliases == {"m": 3}
    whole.close()
    offset = ["close", "stop", "unload", "fault", "load", "replace"].index(what) % 3
    for actions in range(offset, count, 3):
        rig = rig_of()
        _begin_way(rig, actions)
        if what in ("close", "stop"):
            rig.close(drain=what == "close")
            continue
        if what == "fault":
            rig.device.drop_jobs()
            rig.interrupt(_fault())
        elif what == "unload":
            rig.ask_unload(max(rig.state.models, default=2))
        elif what == "load":
            rig.ask_load()
        else:
            rig.ask_replace()
        rig.run()
        assert rig.state.device.state in ("serving", "lost"), actions
        if what == "load":
            served = rig.state.models[rig.state.aliases["m"]].facts
            assert served is not None and served.sha256 == OLD, "it does not close the way back"
        elif what == "fault":
            assert rig.state.aliases.get("m") in (2, 3, 4), (actions, rig.state.device.reason)
        rig.close()


@pytest.mark.parametrize("what", ["replaced", "unloaded"])
def test_one_that_is_to_go_anyway_costs_no_further_reset(what: str) -> None:
    """While it drains, its golden differs after the reset: its requests end, and it goes.

    The one that waits for its place is the proof of the reset; without any the device serves.
    """
    rig = rig_of()
    for number in range(4):
        rig.submit([number + 1, 5], seed=number, max_tokens=12, ignore_eos=True)
    rig.run(until=lambda: any(one.tokens for one in rig.state.requests.values()))
    if what == "replaced":
        rig.ask_replace()
    else:
        rig.ask_unload(1)
    rig.run(until=lambda: rig.state.models[1].state == "draining" and bool(rig.device.running))
    wrong_numbers_of(rig, 1)
    _strike(rig)
    rig.run()
    assert levels(rig) == [1], "one reset, and no more"
    assert rig.state.device.state == "serving"
    assert rig.state.aliases == ({"m": 2} if what == "replaced" else {})
    assert sorted(rig.state.models) == ([2] if what == "replaced" else [])
    assert not rig.events("model", "stand_down") and not rig.state.requests
    assert not [e for e in rig.events("model", "load") if "instead_of" in e.data]
    assert OLD not in [one.sha256 for one in rig.state.proven.get("m", ())], "no way back"
    assert "model_changed" in {e.data["reason"] for e in rig.events("request", "fail")}
    rig.close()


def test_one_gives_way_that_was_not_draining_yet_when_the_reset_came() -> None:
    """The old one is not draining yet when it is reset, but a good artifact waits for its place."""
    rig = rig_of()
    rig.submit([1, 5], max_tokens=12, ignore_eos=True)
    rig.run(until=lambda: bool(rig.device.running))
    rig.ask_replace()
    rig.run(until=lambda: 2 in rig.state.models)
    wrong_numbers_of(rig, 1)
    _strike(rig)
    rig.run()
    assert rig.state.aliases == {"m": 2} and rig.state.device.state == "serving"
    assert levels(rig) == [1]
    rig.close()


def _strike(rig: Rig) -> None:
    """Let the device drop a job with an exception of its CCU."""
    job = rig.state.jobs[min(rig.state.jobs)]
    told = {"job": job.number, "ticket": job.ticket, "generation": job.generation}
    rig.device.drop_jobs()
    rig.interrupt(fault_told("ccu", 0x0603, epoch=rig.state.device.epoch, **told))


def _begin_way(rig: Rig, actions: int) -> int:
    """Let the numbers of a new model go wrong for good, act so often; return how often it was."""
    rig.engine.replace("m", "newer")
    wrong_numbers_of(rig, 2, until=4)
    for number in range(2):
        rig.submit([number + 1, 5], seed=number, max_tokens=4, ignore_eos=True)
    rig.run(until=lambda: bool(rig.events("model", "mark")))
    done = 0
    while done < actions and rig.act():
        done += 1
    return done


def _fault() -> DeviceFaulted:
    return fault_told("device", 0x0801)


def test_a_load_that_never_served_has_no_way_back() -> None:
    rig = rig_of(load=False)
    wrong_numbers_of(rig, 1)
    with pytest.raises(ModelError, match="differs"):
        rig.engine.load("m", "source")
    assert levels(rig) == []
    rig.close()
