"""Fast scenarios of replacements, loads and owners that go wrong; detectors as the others."""

from collections.abc import Callable

import attrs
import msgspec
import pytest
from support.fake_device import FakeDevice, artifact, healthy
from support.rig import Rig
from support.strikes import levels

from laneway.engine import Limits, ModelError
from laneway.engine.effects import ConfigureModel, SubmitJob, ValidateArtifact
from laneway.engine.inputs import Completed, ConfigureFailed, HealthProbed, Input, Trial

OLD, NEW, OTHER = "0" * 64, "1" * 64, "2" * 64
ONE_TRIAL = (Trial(origin="golden", prompt=(1, 2), forced=()),)


def _rig() -> Rig:
    def told(effect: ValidateArtifact) -> Input:
        sha256 = OLD if effect.source == "source" else NEW
        return attrs.evolve(artifact(effect.model), sha256=sha256, trials=ONE_TRIAL)

    device = FakeDevice(sources=dict.fromkeys(("source", "newer"), told))
    limits = Limits(canary_jobs=4, canary_idle_ns=0)
    return Rig(device=device, limits=limits, resets=True, canaries=True)


def _wrong(rig: Rig, model: int, *, until: int = 1 << 60) -> None:
    """Let the golden rows of a model differ in generations before ``until``."""

    def judge(effect: SubmitJob, done: Completed) -> Input:
        wrong = effect.model == model and effect.generation < until
        if not wrong or effect.origin == "request":
            return done
        rows = tuple(msgspec.structs.replace(row, verdict="differs") for row in done.rows)
        return attrs.evolve(done, rows=rows)

    rig.device.on_result = judge


def _serve(rig: Rig) -> None:
    for number in range(4):
        rig.submit([number + 1, 5], seed=number, max_tokens=4, ignore_eos=True)
    rig.run()


def bad_replacement() -> None:
    """An artifact that does not fit is refused, and the model that serves knows nothing of it."""
    rig = _rig()
    rig.device.sources["newer"] = lambda effect: attrs.evolve(
        artifact(effect.model), chip_bytes=(1, 1)
    )
    with pytest.raises(ModelError, match="needs 2 chips"):
        rig.engine.replace("m", "newer")
    rig.run()
    assert rig.state.aliases == {"m": 1}, "R10.2: the model that serves had to go for a bad one"
    rig.close()


def overwritten_source() -> None:
    """What is loaded back must be what served before."""
    rig = _rig()
    _wrong(rig, 2)
    rig.device.sources["source"] = lambda effect: attrs.evolve(
        artifact(effect.model), sha256=OTHER, trials=ONE_TRIAL
    )
    with pytest.raises(ModelError, match="differs"):
        rig.engine.replace("m", "newer")
    rig.run()
    assert not rig.state.aliases, "R14.5: another artifact is served in the name of the old one"
    rig.close()


def wrong_for_good() -> None:
    """A model gives way to the one before; when that goes wrong too the device is reset further."""
    rig = _rig()
    rig.engine.replace("m", "newer")
    _wrong(rig, 2)
    _serve(rig)
    assert rig.state.aliases == {"m": 3}, f"R14.5: {rig.state.aliases} serves"
    _wrong(rig, 3, until=6)
    _serve(rig)
    assert rig.state.aliases == {"m": 3}, "R14.5: what was found wrong serves again"
    assert levels(rig) == [2, 2, 4], f"row 12: resets {levels(rig)}"
    rig.close()


def somebody_elses_reset() -> None:
    """The board is in a later epoch: it is looked at."""
    rig = _rig()
    rig.submit([1, 2], max_tokens=8, ignore_eos=True)
    rig.run(until=lambda: bool(rig.device.running))
    rig.device.drop_jobs()
    rig.interrupt(HealthProbed(health=attrs.evolve(healthy(0), device_epoch=2), reason=""))
    rig.run(until=lambda: not rig.state.requests)
    assert levels(rig) == [0], f"row 22: resets {levels(rig)}"
    rig.close()


def configuration_that_fails_once() -> None:
    """Dynamic memory is cleared before the second try."""
    rig = _rig()
    configure = rig.device._configure
    tries: list[int] = []

    def answer(effect: ConfigureModel) -> Input | None:
        tries.append(effect.model)
        if len(tries) == 1:
            return ConfigureFailed(model=effect.model, code=0x0701, reason="once")
        configure(effect)
        return None

    rig.device.overrides[ConfigureModel] = answer
    rig.engine.replace("m", "newer")
    assert levels(rig) == [3], f"row 17: resets {levels(rig)}"
    rig.close()


def _refuse_configurations(rig: Rig) -> list[int]:
    """Let no configuration succeed from here on; return the models that ask for one."""
    asked: list[int] = []

    def answer(effect: ConfigureModel) -> Input:
        asked.append(effect.model)
        return ConfigureFailed(model=effect.model, code=0x0701, reason="never")

    rig.device.overrides[ConfigureModel] = answer
    return asked


def unloaded_on_purpose() -> None:
    """A load that fails after its operator unloaded another model brings nothing back."""
    rig = _rig()
    rig.engine.unload("m")
    _refuse_configurations(rig)
    with pytest.raises(ModelError, match="never"):
        rig.engine.load("m", "newer")
    rig.run()
    backs = [event for event in rig.events("model", "load") if "instead_of" in event.data]
    assert not backs, "R14.5: what its operator unloaded is loaded back"
    rig.close()


def nothing_can_be_configured() -> None:
    """What is loaded back is not made up for when it fails too."""
    rig = _rig()
    asked = _refuse_configurations(rig)
    with pytest.raises(ModelError, match="never"):
        rig.engine.replace("m", "newer")
    for _ in range(1000):
        rig.act()
    assert max(asked) == 3, "R14.5: a load back is made up for by a further one"
    rig.close()


REPLACING_DETECTORS: tuple[Callable[[], None], ...] = (
    bad_replacement,
    overwritten_source,
    wrong_for_good,
    somebody_elses_reset,
    configuration_that_fails_once,
    unloaded_on_purpose,
    nothing_can_be_configured,
)
