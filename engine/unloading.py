"""Unload a model.

Drain, wait until nothing is in flight, release, and believe only the memory figures (R10.3, E22,
G16).
"""

from laneway.engine.draft import Draft
from laneway.engine.effects import ReleaseModel
from laneway.engine.faulting import lose_device
from laneway.engine.inputs import ModelReleased, ReleaseFailed
from laneway.engine.state import ModelState, State


def drain(draft: Draft, number: int) -> None:
    """Stop serving a model; what it has is finished. Nothing happens to one that is not ready."""
    model = draft.state.models.get(number)
    if model is not None and model.state == "ready":
        draft.emit("model", number, "drain", generation=model.generation)


def unload_if_idle(draft: Draft) -> None:
    """Release every draining model that has nothing left to do."""
    for model in list(draft.state.models.values()):
        if model.state == "draining" and is_idle(draft.state, model):
            data = {"release": True}
            draft.emit("model", model.number, "unload", generation=model.generation, data=data)
            draft.ask(ReleaseModel(model=model.number, generation=model.generation))


def is_idle(state: State, model: ModelState) -> bool:
    """Return whether no request, job, lane or buffer of the model is in use."""
    number = model.number
    return (
        not any(request.model == number for request in state.requests.values())
        and not any(job.model == number for job in state.jobs.values())
        and all(b.state == "free" for b in state.buffers.values() if b.model == number)
        and all(
            lane.state in ("empty", "unknown")
            for lane in state.lanes.values()
            if lane.model == number
        )
    )


def released(draft: Draft, taken: ModelReleased) -> None:
    """Take a model as gone only when its memory fell back and the device is well (E22)."""
    model = draft.state.models.get(taken.model)
    if model is None or not model.releasing:
        return
    reason = _still_held(draft.state, model, taken)
    if reason:
        _release_ended_badly(draft, model, reason)
    elif model.state == "unloading":
        draft.emit("model", model.number, "vacate", generation=model.generation)
    else:
        draft.emit("model", model.number, "clean", generation=model.generation)


def _still_held(state: State, model: ModelState, taken: ModelReleased) -> str:
    if not taken.healthy:
        return "the device is not healthy after the release"
    tolerance = state.limits.unload_tolerance_bytes
    before = model.used_bytes_before
    if before and len(before) != len(taken.used_bytes):
        return f"it tells of {len(taken.used_bytes)} chips, {len(before)} before the load"
    for chip, (was, now) in enumerate(zip(before, taken.used_bytes, strict=False)):
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
    """Fail the model and give up the device.

    Level 2 and 3 resets would follow, and the budget is 0 (row 13).
    """
    if model.state == "unloading":
        data = {"reason": reason}
        draft.emit("model", model.number, "fail", generation=model.generation, data=data)
    lose_device(draft, f"model/{model.number}: {reason}")
