"""Load a model: refuse what does not fit, publish after the last trial (R10.1, R10.2, R9.1)."""

from collections.abc import Callable

import attrs
import pytest
from support.fake_device import FakeDevice, artifact
from support.rig import Rig

from laneway.engine import ModelError
from laneway.engine.effects import ConfigureModel, PublishModel, ReleaseModel
from laneway.engine.inputs import (
    ArtifactValidated,
    ChipFacts,
    ConfigureFailed,
    Input,
    ModelReleased,
    SubmodelFacts,
    Trial,
)


def changed(**fields: object) -> Callable[[int], ArtifactValidated]:
    """Return an artifact like the fake's, but for some facts."""
    return lambda model: attrs.evolve(artifact(model), **fields)  # type: ignore[arg-type]


def refusal_of(rig: Rig) -> str:
    """Return why a load is refused; nothing of it may remain."""
    with pytest.raises(ModelError) as refused:
        rig.engine.load("m", "source")
    rig.run()
    assert not rig.state.models and not rig.state.lanes and not rig.state.buffers
    assert not rig.engine.ready()
    assert not any(isinstance(effect, PublishModel) for effect in rig.device.executed)
    return str(refused.value)


def test_the_way_of_a_good_load() -> None:
    rig = Rig()
    ways = [event.dest for event in rig.events("model")]
    assert ways == ["validating", "configuring", "warming", "ready"]
    (configure,) = [e for e in rig.device.executed if isinstance(e, ConfigureModel)]
    assert configure.trials == artifact(1).trials
    assert (configure.lane_first, configure.lane_count) == (1, 8)
    (view,) = rig.engine.models()
    assert (view.number, view.alias, view.state, view.context_tokens) == (1, "m", "ready", 48)
    rig.close()


def test_it_is_published_with_the_last_trial_and_not_before() -> None:
    rig = Rig(load=False)
    number = rig.ask_load()
    while not rig.engine.ready():
        state = rig.state.models.get(number)
        assert state is None or rig.state.aliases == {}
        done = [j for j in rig.device.submitted if j.origin in ("golden", "warmup")]
        assert len(done) <= 4
        rig.act()
    # The golden prompt with two forced tokens is three jobs, the warm-up prompt is one.
    assert [(j.origin, j.task, j.rows[0].tokens) for j in rig.device.submitted] == [
        ("golden", "prefill", (1, 2, 3)),
        ("golden", "decode", (4,)),
        ("golden", "decode", (5,)),
        ("warmup", "prefill", (9,)),
    ]
    assert [j.rows[0].start for j in rig.device.submitted] == [0, 3, 4, 0]
    rig.close()


def test_a_refused_artifact_touches_no_device() -> None:
    rig = Rig(load=False, device=FakeDevice(refuse_artifact="its hash is wrong"))
    assert "its hash is wrong" in refusal_of(rig)
    assert not any(isinstance(effect, ConfigureModel) for effect in rig.device.executed)
    rig.device.refuse_artifact = ""
    rig.engine.load("m", "source")
    assert rig.engine.ready()
    rig.close()


MISFITS = [
    ({"chip_bytes": (1001,)}, "chip 0 needs 1001 bytes, 1000 of 1000 are free"),
    ({"chips": (ChipFacts(total_bytes=1000, used_bytes=901),)}, "needs 100 bytes, 99 of 1000"),
    ({"chip_bytes": (1, 1)}, "needs 2 chips, the device has 1"),
    ({"submodels": artifact(1).submodels[:1]}, "no decode submodel"),
    ({"submodels": artifact(1).submodels[1:]}, "no prefill submodel"),
    ({"submodels": ()}, "no prefill submodel"),
    ({"lane_count": 0}, "0 lanes"),
    ({"trials": ()}, "nothing to run before it serves"),
]


@pytest.mark.parametrize(("fields", "part"), MISFITS, ids=lambda v: v if isinstance(v, str) else "")
def test_what_does_not_fit_is_refused_before_the_device_is_touched(
    fields: dict[str, object], part: str
) -> None:
    rig = Rig(load=False, device=FakeDevice(artifact=changed(**fields)))
    assert part in refusal_of(rig)
    assert not any(isinstance(effect, ConfigureModel) for effect in rig.device.executed)
    rig.close()


def test_memory_that_just_fits_is_enough() -> None:
    chips = (ChipFacts(total_bytes=1000, used_bytes=900),)
    rig = Rig(device=FakeDevice(artifact=changed(chips=chips, lane_count=1)))
    rig.submit([1, 2])
    rig.submit([3, 4])
    rig.run()
    rig.check_answers()
    rig.close()


LANES = ("BATCH_LANES", "LANE_RULE")


def test_an_artifact_that_nobody_could_run_alone_on_is_refused() -> None:
    """Without evidence for batches a calbin that has no batch of 1 cannot run anything (R1.2)."""
    wide = (
        SubmodelFacts(name="prefill", task="prefill", batch_max=1, tokens_max=48),
        SubmodelFacts(name="decode", task="decode", batch_max=8, tokens_max=1),
    )
    device = FakeDevice(artifact=changed(submodels=wide, lane_count=8))
    rig = Rig(load=False, device=device)
    assert "no decode submodel may run one row alone" in refusal_of(rig)
    device.artifact = changed()
    rig.engine.load("m", "source")
    rig.close()


def test_lanes_must_be_enough_for_the_largest_batch() -> None:
    wide = (
        SubmodelFacts(name="prefill", task="prefill", batch_max=1, tokens_max=48),
        SubmodelFacts(name="decode", task="decode", batch_max=8, tokens_max=1),
    )
    device = FakeDevice(artifact=changed(submodels=wide, lane_count=7), verified=LANES)
    rig = Rig(load=False, device=device)
    assert "7 lanes, its largest batch needs 8" in refusal_of(rig)
    device.artifact = changed(submodels=wide, lane_count=8)
    rig.engine.load("m", "source")
    rig.close()


BAD_TRIALS = [
    Trial(origin="golden", prompt=(), forced=(1,)),
    Trial(origin="golden", prompt=(1,) * 49, forced=()),
    Trial(origin="golden", prompt=(1,) * 40, forced=(1,) * 9),
]


@pytest.mark.parametrize("trial", BAD_TRIALS, ids=["empty", "too-long", "forced-too-long"])
def test_a_trial_that_cannot_run_is_a_refused_artifact_not_a_dead_engine(trial: Trial) -> None:
    rig = Rig(load=False, device=FakeDevice(artifact=changed(trials=(trial,))))
    refusal_of(rig)
    rig.close()


def test_prefill_submodels_of_several_lengths_are_chosen_by_the_prompt() -> None:
    submodels = (
        SubmodelFacts(name="prefill_8", task="prefill", batch_max=1, tokens_max=8),
        SubmodelFacts(name="prefill_48", task="prefill", batch_max=1, tokens_max=48),
        SubmodelFacts(name="decode_b1", task="decode", batch_max=1, tokens_max=1),
    )
    rig = Rig(device=FakeDevice(artifact=changed(submodels=submodels)))
    for tokens in (3, 8, 9, 30, 4):
        rig.submit([tokens] * tokens, seed=tokens)
    rig.run()
    rig.check_answers()
    rig.close()


def test_a_golden_mismatch_is_a_failed_load_with_the_place() -> None:
    rig = Rig(load=False)
    rig.device.verdict = "row differs by 3 bits"
    reason = refusal_of(rig)
    assert "golden 0 at position 2" in reason and "differs by 3 bits" in reason
    assert sum(isinstance(e, ReleaseModel) for e in rig.device.executed) == 1
    assert rig.state.device.state == "serving", "the device is well"
    rig.close()


def test_after_a_failed_load_the_next_one_may_follow_at_once() -> None:
    rig = Rig(load=False)
    rig.device.verdict = "differs"
    with pytest.raises(ModelError, match="differs"):
        rig.engine.load("m", "source")
    rig.device.verdict = "equal"
    rig.engine.load("m", "source")
    assert rig.engine.ready()
    rig.close()


def test_a_failed_configure_is_tried_once_more_and_then_gives_back_what_it_took() -> None:
    """Row 17: the second failure is a failed load, not a lost device."""
    rig = Rig(load=False)
    rig.device.overrides[ConfigureModel] = lambda effect: ConfigureFailed(
        model=effect.model, code=0x0701, reason="no bank"
    )
    reason = refusal_of(rig)
    assert "0x0701" in reason and "no bank" in reason
    asked = [type(e).__name__ for e in rig.device.executed]
    assert asked == ["ValidateArtifact", "ConfigureModel"] * 2 + ["ReleaseModel"]
    del rig.device.overrides[ConfigureModel]
    rig.engine.load("m", "source")
    assert rig.state.models[2].generation == 3, "a generation is never used twice"
    rig.close()


def test_a_configure_that_fails_once_costs_nobody_the_load() -> None:
    rig = Rig(load=False)
    tries: list[int] = []

    def refuse_first(effect: ConfigureModel) -> Input:
        tries.append(effect.generation)
        del rig.device.overrides[ConfigureModel]
        return ConfigureFailed(model=effect.model, code=0x0701, reason="once")

    rig.device.overrides[ConfigureModel] = refuse_first
    rig.engine.load("m", "source")
    assert tries == [1] and rig.state.models[1].generation == 2
    rig.submit([1, 2])
    rig.run()
    rig.check_answers()
    rig.close()


def test_a_configure_that_fails_while_the_engine_closes_is_not_tried_again() -> None:
    rig = Rig(load=False)
    rig.device.overrides[ConfigureModel] = lambda effect: ConfigureFailed(
        model=effect.model, code=0x0701, reason="no bank"
    )
    rig.ask_load()
    rig.run(until=lambda: any(isinstance(e, ConfigureModel) for e in rig.device.executed))
    rig.ask_close(drain=True)
    rig.run_actions(1)
    rig.close()
    assert sum(isinstance(e, ConfigureModel) for e in rig.device.executed) == 1


def test_a_failed_load_whose_memory_stays_loses_the_device() -> None:
    rig = Rig(load=False)
    rig.device.verdict = "differs"
    rig.device.overrides[ReleaseModel] = lambda effect: ModelReleased(
        model=effect.model, used_bytes=(0,), healthy=False
    )
    with pytest.raises(ModelError, match="differs"):
        rig.engine.load("m", "source")
    rig.run()
    assert rig.state.device.state == "lost"
    rig.close()


def test_a_second_model_is_refused_by_name_and_the_first_goes_on() -> None:
    rig = Rig()
    rig.submit([1, 2])
    with pytest.raises(ModelError) as refused:
        rig.engine.load("other", "source")
    assert "one model at a time" in str(refused.value) and "model/1 ('m', ready)" in str(
        refused.value
    )
    with pytest.raises(ModelError, match="C3"):
        rig.engine.load("m", "source")
    rig.run()
    rig.check_answers()
    rig.close()


def test_a_load_on_a_closing_engine_is_refused() -> None:
    rig = Rig()
    rig.submit([1, 2])
    rig.run_actions(4)
    rig.ask_close(drain=True)
    rig.act()
    rig.ask_unload(1)
    with pytest.raises(ModelError, match="closing"):
        rig.engine.load("n", "source")
    rig.close()


def test_a_load_is_not_started_twice_by_doubled_answers() -> None:
    rig = Rig(load=False)
    doubled: list[object] = []

    def meanwhile(taken: object) -> None:
        if type(taken).__name__ in ("ArtifactValidated", "ModelConfigured", "ModelReleased"):
            doubled.append(taken)
            rig.device._post(taken)  # type: ignore[arg-type]

    rig.device.meanwhile = meanwhile
    rig.engine.load("m", "source")
    rig.submit([1, 2])
    rig.run()
    rig.engine.unload("m")
    rig.run()
    assert len(doubled) == 3
    assert len(rig.events("model", "accept")) == len(rig.events("model", "configure")) == 1
    rig.check_answers()
    rig.close()
