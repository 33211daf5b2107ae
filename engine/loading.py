"""Load a model.

Validate on the host, configure, warm up, publish (R10.1, R10.2, R9.1, E20a to E25).

One model at a time: a second calbin on a board needs what only the vendor can deliver (R9.2, R9.3),
so a load is refused while another model holds the device. A load that fails gives back what it took
and says why. One that replaces a model that serves is let in beside it as far as `validating`, and
waits there until that model is gone (successors.py).
"""

from typing import Any

import attrs

from laneway.engine.configuring import ask_configure
from laneway.engine.draft import Draft
from laneway.engine.effects import PublishModel, ReleaseModel, ValidateArtifact
from laneway.engine.going_back import give_way, is_to_go, stand_down, stands_down, way_back
from laneway.engine.inputs import (
    ArtifactRefused,
    ArtifactValidated,
    ChipFacts,
    ConfigureFailed,
    LoadBackRequested,
    LoadRequested,
    ModelConfigured,
    ReplaceRequested,
)
from laneway.engine.ladder import CONFIGURATION, DEVICE, GOLDEN, MEMORY, PROCESS, is_spent
from laneway.engine.plan import takes_rows
from laneway.engine.proven import passed_here
from laneway.engine.recovering import (
    begin,
    configured_again,
    give_up,
    is_proving,
    next_rung,
    proof_failed,
    prove_on,
    serve_again,
)
from laneway.engine.reserving import suspect
from laneway.engine.state import ModelState, State
from laneway.engine.successors import ask_again, is_check, let_go, make_way, takes_models


def load(draft: Draft, taken: LoadRequested) -> None:
    """Begin a load, or refuse it when the device cannot take one."""
    others = [model for model in draft.state.models.values()]
    data = {"alias": taken.alias, "source": taken.source}
    draft.emit("model", taken.model, "load", data=data)
    reason = _refuse_load(draft.state, others)
    if reason:
        _refuse(draft, taken.model, reason)
        return
    draft.ask(ValidateArtifact(model=taken.model, source=taken.source))


def replace(draft: Draft, taken: ReplaceRequested) -> None:
    """Begin to put an artifact in the place of a model that serves, or refuse it."""
    state = draft.state
    reason = _refuse_replace(state, taken.alias)
    data = {"alias": taken.alias, "source": taken.source}
    old = state.aliases.get(taken.alias, 0)
    draft.emit("model", taken.model, "load", data={**data, "replaces": old})
    if reason:
        _refuse(draft, taken.model, reason)
        return
    draft.ask(ValidateArtifact(model=taken.model, source=taken.source, check=True))


def _refuse_replace(state: State, alias: str) -> str:
    if state.closing:
        return "the engine is closing"
    if alias not in state.aliases:
        return f"no model {alias!r} is served that it could replace: load it"
    if state.device.state not in ("serving", "degraded"):
        return _say_device(state)
    others = [one for one in state.models.values() if one.number != state.aliases[alias]]
    return f"one load at a time: wait for {_say_models(others)}" if others else ""


def _say_device(state: State) -> str:
    return f"the device is {state.device.state}: {state.device.reason or 'it takes no model'}"


def _say_models(models: list[ModelState]) -> str:
    return ", ".join(f"model/{one.number} ({one.alias!r}, {one.state})" for one in models)


def load_back(draft: Draft, taken: LoadBackRequested) -> None:
    """Begin to load what served an alias before: once its place is free, or beside who has it.

    On a device that is being looked at or reset it waits until that serves again.
    """
    state = draft.state
    others = list(state.models.values())
    data: dict[str, Any] = {
        **{"alias": taken.alias, "source": taken.source, "sha256": taken.sha256},
        "instead_of": taken.instead_of,
    }
    beside = stands_down(state.models.get(taken.instead_of), state)
    if beside:
        data["replaces"] = taken.instead_of
    waits = not beside and not takes_models(state)
    if waits:
        data["waits"] = True
    draft.emit("model", taken.model, "load", data=data)
    reason = "" if beside and not state.closing else _refuse_load(state, others, may_wait=True)
    if reason:
        _refuse(draft, taken.model, reason)
    elif not waits:
        draft.ask(ValidateArtifact(model=taken.model, source=taken.source, check=beside))


def _refuse_load(state: State, others: list[ModelState], *, may_wait: bool = False) -> str:
    """Return why a load cannot begin, or ""; ``may_wait``: any device will do that is not lost."""
    if state.closing:
        return "the engine is closing"
    if state.device.state != "serving" and not (may_wait and state.device.state != "lost"):
        return _say_device(state)
    if others:
        held = _say_models(others)
        return f"one model at a time (several resident models are C3): unload {held} first"
    return ""


def _refuse(draft: Draft, number: int, reason: str) -> None:
    """End a load that touched nothing: failed, and clean at once."""
    draft.emit("model", number, "refuse", data={"reason": reason})
    model = draft.state.models[number]
    let_go(draft, model, "clean", generation=0)
    prove_on(draft, model, reason)


def refused(draft: Draft, taken: ArtifactRefused) -> None:
    """End a load whose artifact is not good."""
    model = draft.state.models.get(taken.model)
    if model is not None and model.state == "validating" and not model.waiting:
        _refuse(draft, taken.model, taken.reason)


def validated(draft: Draft, taken: ArtifactValidated) -> None:
    """Check that the artifact fits the device and the limits, then have it configured."""
    state = draft.state
    model = state.models.get(taken.model)
    if model is None or model.state != "validating" or model.waiting:
        return
    if is_check(model):
        _vet(draft, model, taken)
        return
    reason = _refuse_other(state, model, taken) or refuse_artifact(state, taken)
    if reason:
        data = {"reason": reason, "release": True}
        draft.emit("model", taken.model, "refuse", data=data)
        draft.ask(ReleaseModel(model=taken.model, generation=0))
        return
    generation = state.next_generation
    count = state.limits.buffers_per_submodel
    buffers = [
        [submodel.name, submodel.task, state.next_buffer + index * count, count]
        for index, submodel in enumerate(taken.submodels)
    ]
    data = {"lanes": [state.next_lane, taken.lane_count], "buffers": buffers}
    draft.emit("model", taken.model, "accept", generation=generation, data=data)
    ask_configure(draft, model)


def _vet(draft: Draft, model: ModelState, taken: ArtifactValidated) -> None:
    """Let a good artifact wait for the model it replaces; a bad one costs that model nothing."""
    old = draft.state.models.get(model.replaces)
    chips = taken.chips if old is None else _chips_without(old, taken.chips)
    fitting = attrs.evolve(taken, chips=chips)
    reason = _refuse_other(draft.state, model, taken) or refuse_artifact(draft.state, fitting)
    if reason:
        _refuse(draft, model.number, reason)
        return
    draft.emit("model", model.number, "vet", data={"sha256": taken.sha256})
    if stands_down(old, draft.state):
        give_way(draft, old, old.reason)
    elif old is not None:
        make_way(draft, old)
    ask_again(draft)


def _chips_without(old: ModelState, chips: tuple[ChipFacts, ...]) -> tuple[ChipFacts, ...]:
    """Return the chips as they will be when a model has given back what it has on them."""
    held = (*(old.facts.chip_bytes if old.facts is not None else ()), *(0 for _ in chips))
    return tuple(
        attrs.evolve(chip, used_bytes=max(0, chip.used_bytes - mine))
        for chip, mine in zip(chips, held, strict=False)
    )


def _refuse_other(state: State, model: ModelState, taken: ArtifactValidated) -> str:
    """Return why a load must not go on whatever the artifact needs, or ""."""
    if state.closing:
        return "the engine is closing"
    old = state.models.get(model.replaces)
    if model.must_be and old is not None and not stands_down(old, state):
        return f"model/{old.number} is tried again after a further reset"
    if model.must_be and taken.sha256 != model.must_be:
        return f"another artifact is at {model.source} now: {taken.sha256}, not {model.must_be}"
    return ""


def refuse_artifact(state: State, taken: ArtifactValidated) -> str:
    """Return why an artifact cannot run here, or "".

    Why: over-commit is refused before anything is configured (R9.1).
    """
    if len(taken.chip_bytes) > len(taken.chips):
        return f"it needs {len(taken.chip_bytes)} chips, the device has {len(taken.chips)}"
    for index, (need, chip) in enumerate(zip(taken.chip_bytes, taken.chips, strict=False)):
        free = chip.total_bytes - chip.used_bytes
        if need > free:
            return f"chip {index} needs {need} bytes, {free} of {chip.total_bytes} are free"
    for task in ("prefill", "decode"):
        if not any(submodel.task == task for submodel in taken.submodels):
            return f"it has no {task} submodel"
    batch_max = max(submodel.batch_max for submodel in taken.submodels)
    if taken.lane_count < batch_max:
        return f"it has {taken.lane_count} lanes, its largest batch needs {batch_max}"
    for task in ("prefill", "decode"):
        if not any(takes_rows(state, taken, submodel, 1) for submodel in taken.tasks[task]):
            return (
                f"no {task} submodel may run one row alone: pack it with a batch of 1, or give"
                " records for batch lanes and for its rule of inactive lanes (laneway probe)"
            )
    return _refuse_trials(taken)


def _refuse_trials(taken: ArtifactValidated) -> str:
    """Return why the golden and warm-up trials cannot run on the artifact they came with, or ""."""
    if not taken.trials:
        return "it has nothing to run before it serves (golden, warm-up): pack it again"
    prefill_max = max(s.tokens_max for s in taken.submodels if s.task == "prefill")
    for index, trial in enumerate(taken.trials):
        tokens = (*trial.prompt, *trial.forced)
        if not 0 < len(trial.prompt) <= prefill_max or len(tokens) > taken.context_tokens:
            return (
                f"trial {index} has {len(trial.prompt)} + {len(trial.forced)} tokens; a prefill"
                f" takes {prefill_max}, a lane {taken.context_tokens}: pack it again"
            )
        if not all(0 <= token < taken.vocabulary for token in tokens):
            return f"trial {index} has tokens outside 0..{taken.vocabulary - 1}: pack it again"
    return ""


def configured(draft: Draft, taken: ModelConfigured) -> None:
    """Bring lanes and buffers of the new generation into being.

    Golden and warm-up follow by planning.
    """
    model = draft.state.models.get(taken.model)
    if model is None or model.state != "configuring":
        return
    proving = is_proving(draft.state)
    if proving:
        configured_again(draft, taken)
    data = {"device_generation": taken.device_generation, "device_epoch": taken.device_epoch}
    draft.emit("model", taken.model, "configure", generation=model.generation, data=data)
    if draft.state.closing and not proving:
        fail_load(draft, model, "the engine is closing")


def configure_failed(draft: Draft, taken: ConfigureFailed) -> None:
    """Try a configuration that the device refused again behind a reset, then end the load (row 17).

    What it took was given back before this was said, the artifact with it: each try begins at
    validating. Dynamic memory is cleared first; the second time the device is reset, once.
    """
    model = draft.state.models.get(taken.model)
    if model is None or model.state != "configuring":
        return
    reason = f"configure failed with {taken.code:#06x}: {taken.reason}"
    limits = draft.state.limits
    proving = is_proving(draft.state)
    if proving and model.lane_first in draft.state.lanes:
        proof_failed(draft, model, reason)
        return
    last = model.configure_failures >= limits.configure_retries_max
    rung = DEVICE if last else CONFIGURATION
    spent = is_spent(draft.state.ladder, limits, rung, draft.state.now_ns)
    over = model.configure_failures > limits.configure_retries_max or (last and spent)
    if over or draft.state.closing:
        end_load(draft, model, reason)
        return
    data = {"reason": reason, "waits": True}
    draft.emit("model", model.number, "retry", generation=model.generation, data=data)
    if proving:
        next_rung(draft, f"model/{model.number}: {reason}")
    elif not spent:
        level = 0 if last else MEMORY
        begin(draft, "configure failed (row 17)", rung, reason, code=taken.code, level=level)
    else:
        ask_again(draft)


def publish(draft: Draft, model: ModelState) -> None:
    """Make the generation visible under its alias: one event, after golden and warm-up (E21).

    Those who were suspended and wait for this model go on.
    """
    data = {"alias": model.alias}
    draft.emit("model", model.number, "publish", generation=model.generation, data=data)
    draft.ask(PublishModel(model=model.number, generation=model.generation))
    if is_proving(draft.state):
        serve_again(draft)
    make_way(draft, model)


def golden_differed(draft: Draft, model: ModelState, reason: str) -> None:
    """End a load whose golden run differs; a model that served gives way to what did before it.

    That follows a reset which did not help against abnormal numbers (row 12). One that is to go
    anyway gives way whatever the reset was for. An artifact that passed on this device before is
    tried again behind a reset of the configuration, then of the device; if that does not help, the
    device is not what it was (row 18).
    """
    state = draft.state
    back, recovery = way_back(state, model), state.ladder.recovery
    said = f"model/{model.number}: {reason}"
    if is_to_go(state, model):
        give_way(draft, model, reason)
    elif back is not None:
        stand_down(draft, model, back, reason)
    elif is_proving(state) and recovery is not None and recovery.cause == GOLDEN:
        if recovery.rung < DEVICE:
            proof_failed(draft, model, reason)
        else:
            give_up(draft, f"what passed golden before does not after resets: {said}", PROCESS)
    elif recovery is None and _is_doubtful(state, model):
        begin(draft, GOLDEN, CONFIGURATION, said, spared=model.number)
    else:
        fail_load(draft, model, reason)


def _is_doubtful(state: State, model: ModelState) -> bool:
    """Return whether golden differs of an artifact that this device ran well (row 18)."""
    assert model.facts is not None
    known = passed_here(state, model.facts.sha256)
    spent = is_spent(state.ladder, state.limits, CONFIGURATION, state.now_ns)
    return known and not spent and not state.closing


def fail_load(draft: Draft, model: ModelState, reason: str) -> None:
    """Give up a load that has the device, and have its memory given back (G6, row 18).

    After a reset it is not a load that failed but the proof of the reset: the next rung follows. If
    one is chosen already, because of another fault, the verdict on what it ends means nothing.
    """
    if is_proving(draft.state):
        proof_failed(draft, model, reason)
        return
    recovery = draft.state.ladder.recovery
    if recovery is None or (recovery.watching and not model.served):
        end_load(draft, model, reason)


def end_load(draft: Draft, model: ModelState, reason: str) -> None:
    """Fail a load, and have given back what it took."""
    lanes = [n for n, lane in draft.state.lanes.items() if lane.model == model.number]
    suspect(draft, [n for n in lanes if draft.state.lanes[n].state == "ready"], reason=reason)
    data = {"reason": reason, "release": True}
    draft.emit("model", model.number, "fail", generation=model.generation, data=data)
    draft.ask(ReleaseModel(model=model.number, generation=model.generation))
