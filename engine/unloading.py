"""Unload a model.

Drain, wait until nothing is in flight, release, and believe only the memory figures (R10.3, E22,
G16). Memory that is not back at once is given a while and read once more; that reading is the
verdict (row 13).
"""

from laneway.engine.draft import Draft
from laneway.engine.effects import ProbeHealth, ReleaseModel
from laneway.engine.faulting import requalify
from laneway.engine.inputs import HealthProbed, ModelReleased, ReleaseFailed
from laneway.engine.ladder import CONFIGURATION, MEMORY
from laneway.engine.recovering import begin, prove_on
from laneway.engine.state import ModelState, State
from laneway.engine.successors import ask_again, let_go


def drain(draft: Draft, number: int) -> None:
    """Stop serving a model; what it has is finished. Nothing happens to one that is not ready."""
    model = draft.state.models.get(number)
    if model is not None and model.state == "ready":
        draft.emit("model", number, "drain", generation=model.generation)


def unload_if_idle(draft: Draft) -> None:
    """Release every draining model that has nothing left to do."""
    for model in [one for one in draft.state.models.values() if one.state == "draining"]:
        decided = not model.canary.examining
        if decided and is_idle(draft.state, model):
            data = {"release": True}
            draft.emit("model", model.number, "unload", generation=model.generation, data=data)
            draft.ask(ReleaseModel(model=model.number, generation=model.generation))


def is_idle(state: State, model: ModelState) -> bool:
    """Return whether no request, job, lane or buffer of the model is in use.

    What is quarantined or unknown waits for the end of its generation, which this is (G12).
    """
    number = model.number
    return (
        not any(request.model == number for request in state.requests.values())
        and not any(job.model == number for job in state.jobs.values())
        and all(
            b.state in ("free", "quarantined") for b in state.buffers.values() if b.model == number
        )
        and all(
            lane.state in ("empty", "unknown")
            for lane in state.lanes.values()
            if lane.model == number
        )
    )


def released(draft: Draft, taken: ModelReleased) -> None:
    """Take a model as gone only when its memory fell back and the device is well (E22).

    Memory that is not back yet may be on its way: it is read once more before the verdict (row 13).
    """
    model = draft.state.models.get(taken.model)
    if model is None or not model.releasing or model.reread_ns or model.rereading:
        return
    if not taken.healthy:
        _release_ended_badly(draft, model, "the device is not healthy after the release")
        return
    reason = still_held(draft.state, model, taken.used_bytes)
    if not reason:
        _take_as_gone(draft, model)
        return
    at_ns = draft.state.now_ns + draft.state.limits.unload_reread_ns
    data = {"release": True, "reason": model.reason, "reread_ns": at_ns, "held": reason}
    draft.emit("model", model.number, "linger", generation=model.generation, data=data)


def reread(draft: Draft) -> None:
    """Ask the device for its memory once more, for every model whose while is over (row 13)."""
    for model in list(draft.state.models.values()):
        if model.reread_ns and model.reread_ns <= draft.state.now_ns:
            data = {"release": True, "reason": model.reason}
            draft.emit("model", model.number, "reread", generation=model.generation, data=data)
            draft.ask(ProbeHealth())


def judge_reread(draft: Draft, taken: HealthProbed) -> None:
    """Let the second reading decide what became of a model (row 13, E22)."""
    for model in list(draft.state.models.values()):
        if not model.rereading:
            continue
        if taken.health is None:
            reason = f"no answer when its memory was read again: {taken.reason}"
        elif taken.health.state != "ok" or taken.health.sticky:
            reason = f"the device is {taken.health.state} when its memory is read again"
        else:
            reason = still_held(draft.state, model, taken.health.used_bytes)
        if reason:
            _release_ended_badly(draft, model, reason)
        else:
            _take_as_gone(draft, model)


def _take_as_gone(draft: Draft, model: ModelState) -> None:
    trigger = "vacate" if model.state == "unloading" else "clean"
    let_go(draft, model, trigger, generation=model.generation)
    requalify(draft)
    ask_again(draft)
    prove_on(draft, model, model.reason)


def still_held(state: State, model: ModelState, used_bytes: tuple[int, ...]) -> str:
    """Return which memory is not back after a release, or ""."""
    tolerance = state.limits.unload_tolerance_bytes
    before = model.used_bytes_before
    if before and len(before) != len(used_bytes):
        return f"it tells of {len(used_bytes)} chips, {len(before)} before the load"
    for chip, (was, now) in enumerate(zip(before, used_bytes, strict=False)):
        if now > was + tolerance:
            return f"chip {chip} holds {now} bytes, {was} before the load"
    return ""


def release_failed(draft: Draft, taken: ReleaseFailed) -> None:
    """Record that the device did not give the model back."""
    model = draft.state.models.get(taken.model)
    if model is not None and model.releasing:
        reason = f"release failed with {taken.code:#06x}: {taken.reason}"
        _release_ended_badly(draft, model, reason)


def _release_ended_badly(draft: Draft, model: ModelState, reason: str) -> None:
    """Fail the model and have memory, then configuration of the device reset (row 13, E22)."""
    if model.state == "unloading":
        data = {"reason": reason}
        draft.emit("model", model.number, "fail", generation=model.generation, data=data)
    said = f"model/{model.number}: {reason}"
    begin(draft, "memory not given back (row 13)", CONFIGURATION, said, level=MEMORY)
