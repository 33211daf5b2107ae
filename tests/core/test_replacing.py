"""Put another artifact in the place of a model that serves, and go back (R10.2, R14.5, R9.1)."""

from collections.abc import Callable

import attrs
import msgspec
import pytest
from support.fake_device import FakeDevice, artifact
from support.rig import Rig
from support.told import fault_told

from laneway.engine import ModelError, Request, RequestRejectedError
from laneway.engine.effects import ConfigureModel, ReleaseModel, SubmitJob, ValidateArtifact
from laneway.engine.inputs import (
    ArtifactRefused,
    ArtifactValidated,
    ChipFacts,
    Completed,
    ConfigureFailed,
    DeviceFaulted,
    Input,
    ReplaceRequested,
    Trial,
    UnloadRequested,
)

OLD, NEW = "0" * 64, "1" * 64


def by_source(effect: ValidateArtifact, **fields: object) -> ArtifactValidated:
    """Return the artifact of a source: the old one of ``source``, the new one of others."""
    sha256 = OLD if effect.source == "source" else NEW
    return attrs.evolve(artifact(effect.model), sha256=sha256, **fields)  # type: ignore[arg-type]


def device_of(**fields: object) -> FakeDevice:
    """Return a device with the old artifact at ``source`` and new ones elsewhere."""

    def told(effect: ValidateArtifact) -> Input:
        return by_source(effect, **fields)

    return FakeDevice(sources=dict.fromkeys(("source", "newer", "newest"), told))


def rig_of() -> Rig:
    """Return a rig that serves the old artifact."""
    return Rig(device=device_of())


def wrong_golden_of(rig: Rig, *models: int) -> None:
    """Let the golden rows of some models differ."""

    def judge(effect: SubmitJob, done: Completed) -> Input:
        if effect.model in models and effect.origin == "golden":
            return attrs.evolve(
                done,
                rows=tuple(msgspec.structs.replace(row, verdict="differs") for row in done.rows),
            )
        return done

    rig.device.on_result = judge


def refuse_configuration_of(rig: Rig, *models: int) -> None:
    """Let every configuration of some models fail."""
    configure = rig.device._configure

    def answer(effect: ConfigureModel) -> Input | None:
        if effect.model in models:
            return ConfigureFailed(model=effect.model, code=0x0701, reason="no bank")
        configure(effect)
        return None

    rig.device.overrides[ConfigureModel] = answer


def ways(rig: Rig, number: int) -> list[str]:
    """Return the triggers that a model went through."""
    return [e.trigger for e in rig.events("model") if e.entities == (number,)]


def test_a_good_one_takes_its_place_when_the_old_one_has_finished_and_gone() -> None:
    rig = rig_of()
    for number in range(3):
        rig.submit([number + 1, 3], seed=number, max_tokens=6)
    rig.run_actions(10)
    assert rig.engine.replace("m", "newer") == 2
    assert ways(rig, 1)[-4:] == ["publish", "drain", "unload", "vacate"]
    assert ways(rig, 2) == ["load", "vet", "revalidate", "accept", "configure", "publish"]
    assert rig.state.models[2].facts == by_source(ValidateArtifact(model=2, source="newer"))
    assert all(one.stream.result().finish_reason == "length" for one in rig.streams), "nobody lost"
    rig.submit([7, 8])
    rig.run()
    rig.check_answers()
    (asked,) = [e for e in rig.device.executed if isinstance(e, ReleaseModel)]
    assert asked.model == 1
    rig.close()


def test_the_alias_moves_at_once_and_says_when_to_come_again() -> None:
    rig = rig_of()
    rig.submit([1, 2], max_tokens=8)
    rig.run_actions(6)
    number = rig.ask_replace()
    seen: list[int | None] = []
    while not seen or seen[-1] != number:
        now = rig.state.aliases.get("m")
        if not seen or seen[-1] != now:
            seen.append(now)
        if now is None and len(seen) == 2:
            early = rig.engine.submit(Request(model="m", prompt=(9,), max_tokens=1))
            seen.append(0)
        rig.act()
    assert seen == [1, None, 0, None, 2]
    refused = early.result()
    assert isinstance(refused.error, RequestRejectedError)
    told = (refused.error.reason, refused.error.http_status, refused.error.retry_after_s)
    assert told == ("model_not_ready", 503, 1.0)
    rig.check_answers()
    rig.close()


FULL = (ChipFacts(total_bytes=1000, used_bytes=150),)
EMPTY = (ChipFacts(total_bytes=1000, used_bytes=50),)


def test_memory_is_counted_as_it_will_be_without_the_old_one() -> None:
    """The old one has 100 of 1000 bytes (by hand): what needs 950 fits once it is gone."""
    rig = rig_of()
    rig.device.sources["newer"] = lambda effect: by_source(
        effect, chip_bytes=(951,), chips=FULL if effect.check else EMPTY
    )
    with pytest.raises(ModelError, match="chip 0 needs 951 bytes, 950 of 1000 are free"):
        rig.engine.replace("m", "newer")
    rig.device.sources["newest"] = lambda effect: by_source(
        effect, chip_bytes=(950,), chips=FULL if effect.check else EMPTY
    )
    assert rig.engine.replace("m", "newest") == 3
    rig.close()


BAD: list[tuple[str, Callable[[ValidateArtifact], Input]]] = [
    ("its hash is wrong", lambda e: ArtifactRefused(model=e.model, reason="its hash is wrong")),
    ("needs 2 chips", lambda e: by_source(e, chip_bytes=(1, 1))),
    ("nothing to run before it serves", lambda e: by_source(e, trials=())),
]


@pytest.mark.parametrize(("reason", "answer"), BAD, ids=[reason for reason, _ in BAD])
def test_a_bad_one_costs_the_old_one_nothing(
    reason: str, answer: Callable[[ValidateArtifact], Input]
) -> None:
    rig = rig_of()
    rig.device.sources["newer"] = answer
    rig.submit([1, 2], max_tokens=8)
    rig.run_actions(6)
    before = len(rig.device.executed)
    with pytest.raises(ModelError, match=rf"{reason}.*; model/1 serves it \(untouched\)"):
        rig.engine.replace("m", "newer")
    asked = {type(effect) for effect in rig.device.executed[before:]}
    assert ReleaseModel not in asked and ConfigureModel not in asked
    assert ways(rig, 1)[-1] == "publish" and 2 not in rig.state.models
    rig.run()
    rig.check_answers()
    assert rig.engine.replace("m", "newest") == 3
    rig.close()


def test_what_is_not_served_cannot_be_replaced_and_one_goes_at_a_time() -> None:
    rig = rig_of()
    with pytest.raises(ModelError, match="no model 'x' is served"):
        rig.engine.replace("x", "newer")
    rig.submit([1, 2], max_tokens=8)
    rig.run_actions(6)
    number = rig.ask_replace()
    rig.act()
    with pytest.raises(ModelError, match=f"one load at a time: wait for model/{number}"):
        rig.engine.replace("m", "newest")
    with pytest.raises(ModelError, match="one model at a time"):
        rig.engine.load("other", "newest")
    rig.run(until=lambda: bool(rig.events("model", "vet")))
    with pytest.raises(ModelError, match="no model 'm' is served"):
        rig.engine.replace("m", "newest")
    rig.run()
    assert rig.state.aliases == {"m": number}
    rig.check_answers()
    rig.close()


@pytest.mark.parametrize("how", ["configure", "golden", "gone"])
def test_one_that_cannot_serve_is_taken_back(how: str) -> None:
    """The old artifact is loaded again under a new number, and the caller is told both."""
    rig = rig_of()
    rig.submit([1, 2], max_tokens=8)
    rig.run_actions(6)
    if how == "configure":
        refuse_configuration_of(rig, 2)
    elif how == "golden":
        wrong_golden_of(rig, 2)
    else:
        rig.device.sources["newer"] = lambda e: (
            by_source(e) if e.check else ArtifactRefused(model=e.model, reason="no such folder")
        )
    told = {"configure": "no bank", "golden": "differs", "gone": "no such folder"}[how]
    with pytest.raises(ModelError, match=rf"{told}.*; model/3 serves it \(loaded back\)"):
        rig.engine.replace("m", "newer")
    facts = rig.state.models[3].facts
    assert facts is not None and facts.sha256 == OLD and rig.state.models[3].source == "source"
    rig.submit([7, 8])
    rig.run()
    rig.check_answers()
    assert rig.engine.replace("m", "newest") == 4, "and another may follow"
    rig.close()


def test_what_was_there_before_must_be_the_same_artifact() -> None:
    """A folder that was overwritten is no way back, and nothing else is served in its name."""
    rig = rig_of()
    wrong_golden_of(rig, 2)
    rig.device.sources["source"] = lambda e: attrs.evolve(by_source(e), sha256="2" * 64)
    with pytest.raises(ModelError, match="not loaded back: another artifact is at source now"):
        rig.engine.replace("m", "newer")
    rig.run()
    assert not rig.state.aliases and not rig.state.models
    rig.engine.load("m", "newer")
    rig.close()


UNTIL: list[tuple[str, Callable[[Rig], bool]]] = [
    ("checked", lambda rig: 2 in rig.state.models),
    ("vetted", lambda rig: bool(rig.events("model", "vet"))),
    ("released", lambda rig: rig.state.models[1].state == "unloading"),
    ("configured", lambda rig: "accept" in ways(rig, 2)),
]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("until", [one for _, one in UNTIL], ids=[name for name, _ in UNTIL])
def test_what_is_unloaded_meanwhile_does_not_come_back(
    until: Callable[[Rig], bool], fails: bool
) -> None:
    """The one that is on its way goes on; when it fails, nothing serves."""
    rig = rig_of()
    rig.submit([1, 2], max_tokens=8)
    rig.run_actions(6)
    if fails:
        refuse_configuration_of(rig, 2)
    rig.ask_replace()
    rig.run(until=lambda: until(rig))
    rig.interrupt(UnloadRequested(model=1))
    rig.run()
    assert rig.state.aliases == ({} if fails else {"m": 2})
    assert sorted(rig.state.models) == ([] if fails else [2])
    rig.check_answers()
    rig.close()


def test_what_failed_is_not_offered_as_its_own_way_back() -> None:
    """The same artifact again: it served, but it cannot any more, and nothing older comes back."""
    rig = rig_of()
    assert rig.engine.replace("m", "newer") == 2
    refuse_configuration_of(rig, 3)
    with pytest.raises(ModelError, match="no bank; nothing serves it now: load it"):
        rig.engine.replace("m", "newest")
    rig.run()
    assert not rig.state.models
    rig.close()


def test_a_device_that_is_lost_meanwhile_is_told() -> None:
    rig = rig_of()
    rig.submit([1, 2], max_tokens=8)
    rig.run_actions(6)

    def lose(taken: Input) -> None:
        if isinstance(taken, ArtifactValidated) and taken.model == 2:
            rig.device._post(_wedged())

    rig.device.meanwhile = lose
    with pytest.raises(ModelError, match=r"wedged.*; nothing serves it now"):
        rig.engine.replace("m", "newer")
    rig.close()


def _wedged() -> DeviceFaulted:
    return fault_told("call", 0x0802, reason="wedged")


# ------------------------------------------------------------------ at every point


ONE_TRIAL = (Trial(origin="golden", prompt=(1, 2), forced=()),)


def short_rig() -> Rig:
    """Return a rig whose artifacts run one golden job, with resets in the budget."""
    return Rig(device=device_of(trials=ONE_TRIAL), resets=True)


def story(rig: Rig, actions: int) -> int:
    """Serve, ask for a replacement in between, act so often; return the new model's number.

    It is told with one action less before it is told with more.
    """
    rig.replays = actions % 4 == 0
    rig.submit([1, 3], max_tokens=3)
    rig.run_actions(3)
    number = rig.ask_replace()
    rig.run_actions(actions, seen=actions - 1)
    return number


def length_of_story() -> int:
    """Return how many actions the story has."""
    rig = short_rig()
    story(rig, 0)
    count = rig.run()
    assert rig.state.aliases == {"m": 2}
    rig.close()
    return count


@pytest.mark.parametrize("what", ["close", "stop", "unload", "unload_new", "load"])
def test_whatever_is_asked_at_any_point_the_engine_comes_to_rest(what: str) -> None:
    for actions in range(length_of_story()):
        rig = short_rig()
        number = story(rig, actions)
        if what in ("close", "stop"):
            rig.close(drain=what == "close")
            continue
        if what == "load":
            rig.ask_load()
        else:
            rig.ask_unload(1 if what == "unload" else number)
        rig.run()
        assert number in rig.state.models or what == "unload_new"
        rig.check_answers()
        rig.close()


@pytest.mark.parametrize("kind", ["ccu", "device"])
def test_a_fault_at_any_point_ends_with_one_of_them_serving(kind: str) -> None:
    """What is in flight is reset, the old one recovers or the new one is loaded, or goes back."""
    served = set()
    for actions in range(length_of_story()):
        rig = short_rig()
        story(rig, actions)
        job = min(rig.state.jobs, default=None)
        rig.device.drop_jobs()
        fault = attrs.evolve(_wedged(), code=0x0603 if kind == "ccu" else 0x0801, kind=kind)
        rig.interrupt(attrs.evolve(fault, job=job if kind == "ccu" else None))
        rig.run()
        refused = bool(rig.events("model", "refuse"))
        served.add(rig.state.aliases["m"])
        assert rig.state.aliases["m"] in ((1,) if refused else (2, 3)), actions
        rig.check_answers(ended_early=[one.stream for one in rig.streams])
        rig.close()
    assert served == {1, 2, 3}


def test_a_process_killed_at_any_point_leaves_nothing_behind() -> None:
    """Requests go on from their tokens with the artifact that they began with (G21)."""
    whole = short_rig()
    story(whole, 0)
    whole.run()
    steps = list(whole.steps)
    begun = next(s.step for s in steps if isinstance(s.taken, ReplaceRequested))
    whole.close()
    for cut in range(begun, len(steps)):
        rig = Rig(steps=steps[:cut], device=device_of(), load=False, resume=True)
        assert not rig.state.models and not rig.state.aliases
        open_requests = sorted(rig.state.requests)
        rig.engine.load("m", "source")
        streams = [rig.engine.attach(number) for number in open_requests]
        for stream in streams:
            expected = whole.streams[stream.request - 1].expected()
            assert list(stream.result().tokens) == expected
        assert rig.engine.replace("m", "newer") == max(rig.state.models)
        rig.close()
