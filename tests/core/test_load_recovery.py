"""What a load or an unload that fails may cost: resets, a retry, no more (rows 13, 17, 18)."""

from collections.abc import Callable

import attrs
import msgspec
import pytest
from support.fake_device import FakeDevice, artifact, healthy
from support.rig import Rig
from support.strikes import levels
from support.told import fault_told

from laneway.engine import Limits, ModelError, Request, RequestRejectedError, Stream
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
    HealthProbed,
    Input,
    ModelReleased,
)


def refuse_configurations(rig: Rig, times: int) -> list[int]:
    """Let the next configurations fail; return their generations as they come."""
    configure, seen = rig.device._configure, list[int]()

    def answer(effect: ConfigureModel) -> Input | None:
        seen.append(effect.generation)
        if len(seen) <= times:
            return ConfigureFailed(model=effect.model, code=0x0701, reason="no bank")
        configure(effect)
        return None

    rig.device.overrides[ConfigureModel] = answer
    return seen


def replaceable() -> Rig:
    """Return a rig that serves one artifact and has another one at ``newer``."""

    def newer(effect: ValidateArtifact) -> Input:
        return attrs.evolve(artifact(effect.model), sha256="1" * 64)

    return Rig(resets=True, device=FakeDevice(sources={"newer": newer}))


# ------------------------------------------------------------------ row 17


@pytest.mark.parametrize(("times", "wanted"), [(1, [3]), (2, [3, 4])])
def test_a_configuration_is_tried_again_behind_a_reset_of_memory_then_of_the_device(
    times: int, wanted: list[int]
) -> None:
    rig = Rig(resets=True, load=False)
    seen = refuse_configurations(rig, times)
    rig.engine.load("m", "source")
    assert levels(rig) == wanted and len(seen) == times + 1
    assert len(set(seen)) == len(seen), "a generation is never used twice"
    assert rig.state.device.state == "serving" and rig.state.ladder.breaker == "closed"
    rig.submit([1, 2])
    rig.run()
    rig.check_answers()
    rig.close()


def test_the_third_failure_is_a_failed_load_and_the_device_goes_on() -> None:
    rig = Rig(resets=True, load=False)
    seen = refuse_configurations(rig, 3)
    with pytest.raises(ModelError, match="0x0701: no bank"):
        rig.engine.load("m", "source")
    rig.run()
    assert levels(rig) == [3, 4] and len(seen) == 3
    assert rig.state.device.state == "serving" and not rig.state.models
    rig.engine.load("m", "source")
    rig.close()


def test_a_replacement_whose_configuration_fails_three_times_is_taken_back() -> None:
    rig = replaceable()
    refuse_configurations(rig, 3)
    with pytest.raises(ModelError, match=r"no bank; model/3 serves it \(loaded back\)"):
        rig.engine.replace("m", "newer")
    assert levels(rig) == [3, 4]
    rig.close()


def test_a_load_that_was_tried_again_brings_nothing_back() -> None:
    """It was in nobody's place: what an operator unloaded before stays unloaded."""
    rig = Rig(resets=True)
    rig.engine.unload("m")
    refuse_configurations(rig, 3)
    with pytest.raises(ModelError, match="no bank"):
        rig.engine.load("m", "other")
    rig.run()
    assert not rig.state.aliases and not rig.state.models
    assert not rig.events("model", "vet")
    rig.close()


def test_a_load_back_that_fails_is_not_made_up_for() -> None:
    """A device that takes no configuration: three tries, then two of what was there, no more."""
    rig = replaceable()
    seen = refuse_configurations(rig, 1 << 30)
    with pytest.raises(ModelError, match="what was there before was not loaded back: .*no bank"):
        rig.engine.replace("m", "newer")
    rig.run()
    backs = [e.data["instead_of"] for e in rig.events("model", "load") if "instead_of" in e.data]
    assert backs == [2] and not rig.state.models
    assert len(seen) == 6
    rig.close()


UNWELL = HealthProbed(health=attrs.evolve(healthy(0), state="unhealthy"), reason="")


def gone_with_its_way_back_open() -> Rig:
    """Return a rig whose replacement failed and is gone; its way back is on its way."""
    rig = replaceable()
    refuse_configurations(rig, 3)
    rig.ask_replace()
    rig.run(until=lambda: not rig.state.models)
    return rig


def test_whoever_asks_for_a_model_on_its_way_back_is_told_to_come_again() -> None:
    """From the first failed configuration to the end no request hears that its model is unknown."""
    rig = replaceable()
    refuse_configurations(rig, 3)
    number = rig.ask_replace()
    rig.run(until=lambda: 1 not in rig.state.models)
    asked: dict[tuple[object, ...], Stream] = {}
    while not rig.state.aliases:
        ways = tuple((n, one.state, one.releasing) for n, one in rig.state.models.items())
        if ways not in asked:
            asked[ways] = rig.engine.submit(Request(model="m", prompt=(9,), max_tokens=1))
        assert rig.act()
    assert () in asked and ((number, "failed", True),) in asked
    told = {stream.result().error for stream in asked.values()}
    assert all(isinstance(error, RequestRejectedError) for error in told)
    assert {(e.reason, e.http_status, e.retry_after_s) for e in told} == {  # type: ignore[union-attr]
        ("model_not_ready", 503, 1.0)
    }
    assert not rig.state.coming_back
    rig.close()


def unknown_model(rig: Rig) -> bool:
    """Return whether a request for ``m`` is refused for good."""
    error = rig.engine.submit(Request(model="m", prompt=(9,), max_tokens=1)).result().error
    return isinstance(error, RequestRejectedError) and error.http_status == 404


def test_nobody_is_told_to_come_again_for_what_cannot_come_back() -> None:
    """Neither when the way back ends, nor in a new process, which loads nothing by itself."""
    rig = gone_with_its_way_back_open()
    assert rig.state.coming_back == {2: "m"}
    begun = list(rig.steps)
    del rig.device.sources["newer"]
    rig.device.sources["source"] = lambda e: ArtifactRefused(model=e.model, reason="gone")
    rig.run()
    assert unknown_model(rig) and not rig.state.coming_back
    rig.close()
    again = Rig(steps=begun, load=False)
    assert unknown_model(again) and not again.state.coming_back
    again.close()
    closing = gone_with_its_way_back_open()
    closing.ask_close(drain=True)
    closing.run()
    assert closing.state.device.state == "closed" and not closing.state.coming_back
    closing.close()


def test_a_load_back_waits_for_a_device_that_is_looked_at() -> None:
    """Unwell for a moment is no reason to serve nothing for good: it goes on when all is well."""
    rig = gone_with_its_way_back_open()
    rig.interrupt(UNWELL)
    rig.run(until=lambda: 3 in rig.state.models)
    assert rig.state.device.state == "suspect"
    assert (rig.state.models[3].state, rig.state.models[3].waiting) == ("validating", True)
    rig.run()
    assert rig.state.aliases == {"m": 3} and rig.state.device.state == "serving"
    assert levels(rig) == [3, 4], "it was never reset for it"
    rig.close()


def test_a_load_back_waits_for_a_reset() -> None:
    rig = gone_with_its_way_back_open()
    rig.interrupt(fault_told("device", 0x0801))
    rig.run(until=lambda: 3 in rig.state.models)
    assert rig.state.device.state in ("suspect", "resetting") and rig.state.models[3].waiting
    rig.run()
    assert rig.state.aliases == {"m": 3} and levels(rig)[:2] == [3, 4]
    rig.close()


@pytest.mark.parametrize("drain", [True, False])
def test_a_load_back_that_waits_ends_with_the_engine(drain: bool) -> None:
    rig = gone_with_its_way_back_open()
    rig.interrupt(UNWELL)
    rig.run(until=lambda: 3 in rig.state.models)
    rig.close(drain=drain)
    assert rig.state.device.state == "closed" and not rig.state.aliases


def test_a_load_back_that_waits_is_lost_with_its_device() -> None:
    rig = gone_with_its_way_back_open()
    rig.interrupt(UNWELL)
    rig.run(until=lambda: 3 in rig.state.models)
    rig.interrupt(HealthProbed(health=None, reason="no answer"))
    rig.run()
    assert rig.state.device.state == "lost" and rig.state.models[3].state == "failed"
    rig.close()


def test_a_good_one_goes_on_whose_place_became_free_on_a_device_that_was_looked_at() -> None:
    rig = replaceable()
    rig.ask_replace()
    rig.run(until=lambda: rig.state.models[1].state == "unloading")
    rig.interrupt(UNWELL)
    rig.run(until=lambda: 1 not in rig.state.models)
    assert rig.state.device.state == "suspect" and rig.state.models[2].waiting
    rig.run()
    assert rig.state.aliases == {"m": 2}
    rig.close()


@pytest.mark.parametrize(
    ("limits", "wanted", "tries"),
    [
        (Limits(configuration_resets_max=0), [4], 3),
        (Limits(device_resets_max=0), [3], 2),
        (Limits(configure_retries_max=0), [4], 2),
        (Limits(configuration_resets_max=0, device_resets_max=0), [], 2),
    ],
)
def test_no_more_than_the_budget_allows(limits: Limits, wanted: list[int], tries: int) -> None:
    rig = Rig(resets=True, load=False, limits=limits)
    seen = refuse_configurations(rig, 9)
    with pytest.raises(ModelError, match="no bank"):
        rig.engine.load("m", "source")
    rig.run()
    assert levels(rig) == wanted and len(seen) == tries
    assert rig.state.device.state == "serving" and not rig.state.models
    rig.close()


# ------------------------------------------------------------------ row 18


def differ_until(rig: Rig, generation: int) -> None:
    """Let golden rows of generations before this one differ."""

    def judge(effect: SubmitJob, done: Completed) -> Input:
        if effect.origin != "golden" or effect.generation >= generation:
            return done
        rows = tuple(msgspec.structs.replace(row, verdict="differs") for row in done.rows)
        return attrs.evolve(done, rows=rows)

    rig.device.on_result = judge


@pytest.mark.parametrize(("until", "wanted"), [(3, [2]), (4, [2, 4])])
def test_golden_that_passed_here_before_is_tried_behind_resets(
    until: int, wanted: list[int]
) -> None:
    """Generation 1 passed; that of the second load is 2, and one more after each reset."""
    rig = Rig(resets=True)
    rig.engine.unload("m")
    differ_until(rig, until)
    assert rig.engine.load("other", "source") == 2, "under another name too"
    assert levels(rig) == wanted
    rig.submit([1, 2], model="other")
    rig.run()
    rig.check_answers()
    rig.close()


def test_a_device_that_does_not_compute_any_more_what_it_did_is_given_up() -> None:
    rig = Rig(resets=True)
    rig.engine.unload("m")
    differ_until(rig, 99)
    with pytest.raises(ModelError, match="passed golden before does not after resets"):
        rig.engine.load("m", "source")
    assert levels(rig) == [2, 4] and rig.engine.health().restart
    assert not rig.events("model", "publish")[1:], "it was never published"
    rig.close()


def test_golden_of_what_never_ran_here_costs_no_reset() -> None:
    rig = Rig(resets=True, load=False)
    differ_until(rig, 99)
    with pytest.raises(ModelError, match="differs"):
        rig.engine.load("m", "source")
    rig.run()
    assert levels(rig) == [] and rig.state.device.state == "serving"
    rig.close()


# ------------------------------------------------------------------ row 13


@pytest.mark.parametrize(
    ("helps", "wanted"), [(3, [3]), (2, [3, 2]), (4, [3, 2, 4])], ids=["memory", "config", "device"]
)
def test_memory_that_stays_is_cleared_then_reset(helps: int, wanted: list[int]) -> None:
    """Row 13: five seconds, one more reading, then level 3, rung 5, rung 6, each once."""
    rig = Rig(resets=True, limits=Limits(unload_tolerance_bytes=10))
    held: Callable[[], int] = lambda: 0 if helps in levels(rig) else 11  # noqa: E731
    rig.device.overrides[ReleaseModel] = lambda effect: ModelReleased(
        model=effect.model, used_bytes=(held(),), healthy=True
    )
    rig.device.overrides[ProbeHealth] = lambda effect: HealthProbed(
        health=attrs.evolve(healthy(0), used_bytes=(held(),)), reason=""
    )
    for level in wanted:
        rig.device.resets.append({"used_bytes_after": (0 if level == helps else 11,)})
    rig.ask_unload(1)
    rig.run()
    assert levels(rig) == wanted
    assert not rig.state.models and rig.state.device.state == "serving"
    rig.engine.load("m", "source")
    rig.close()
