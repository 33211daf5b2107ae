"""Back to what served before, when a reset does not help against abnormal numbers (R14.5, row 12).

Theory of operation. A model whose golden differs again after a reset stands down: it keeps its
place but runs nothing, and the shell is asked for a load of what passed golden under its alias
before. That artifact is checked beside it (successors.py). If it is good, the model gives way: its
requests end, because their tokens would have another author, it is released, and the other one
takes its place and is the proof of the reset. If not, the next rung follows as if there were no
way back. What gave way is not gone back to any more.

A model that is to go anyway, because a good artifact waits for its place or because it was draining
when the reset came, gives way at once: nothing is loaded back, and the device is not reset further
for the sake of what would be released next. The one that waits is the proof; without any the device
serves, and the golden run of the next load decides.
"""

from typing import TypeGuard

from laneway.engine.draft import Draft
from laneway.engine.effects import LoadBack, ReleaseModel
from laneway.engine.ending import fail
from laneway.engine.ladder import NUMBERS
from laneway.engine.proven import proven_here
from laneway.engine.reserving import suspect as suspect_lanes
from laneway.engine.state import ModelState, Proven, State


def way_back(state: State, model: ModelState) -> Proven | None:
    """Return what to go back to from a model whose golden differs after a reset, or None."""
    recovery = state.ladder.recovery
    if recovery is None or recovery.cause != NUMBERS or state.device.state != "recovering":
        return None
    if not model.served or model.drain_again or len(state.models) > 1 or state.closing:
        return None
    assert model.facts is not None
    sha256 = model.facts.sha256
    others = [one for one in proven_here(state, model.alias) if one.sha256 != sha256]
    return others[-1] if others else None


def is_to_go(state: State, model: ModelState) -> bool:
    """Return whether a model whose golden differs after a reset is to go anyway."""
    if not model.served or state.device.state != "recovering":
        return False
    others = state.models.values()
    return model.drain_again or any(
        one.vetted and one.waiting and one.replaces == model.number for one in others
    )


def stand_down(draft: Draft, model: ModelState, back: Proven, reason: str) -> None:
    """Let a model run nothing any more until it is known whether there is a way back."""
    _suspect_its_lanes(draft, model, reason)
    data = {"reason": reason, "loads_back": back.source}
    draft.emit("model", model.number, "stand_down", generation=model.generation, data=data)
    draft.ask(
        LoadBack(alias=model.alias, source=back.source, sha256=back.sha256, instead_of=model.number)
    )


def stands_down(model: ModelState | None, state: State) -> TypeGuard[ModelState]:
    """Return whether a model has stood down; a reset takes it up again."""
    standing = model is not None and model.state == "recovering"
    return standing and state.device.state == "recovering"


def give_way(draft: Draft, model: ModelState, reason: str) -> None:
    """End what a model that computes wrongly has, and have it released."""
    said = f"model/{model.number} computes wrongly and is given up: ask again"
    for request in list(draft.state.requests.values()):
        if request.model == model.number:
            fail(draft, request, "model_changed", said, http_status=503)
    _suspect_its_lanes(draft, model, reason)
    data = {"reason": reason, "release": True, "disproven": True}
    draft.emit("model", model.number, "fail", generation=model.generation, data=data)
    draft.ask(ReleaseModel(model=model.number, generation=model.generation))


def _suspect_its_lanes(draft: Draft, model: ModelState, reason: str) -> None:
    """Believe no KV of a model any more."""
    lanes = draft.state.lanes
    held = [n for n, one in lanes.items() if one.model == model.number and one.state == "ready"]
    suspect_lanes(draft, held, reason=reason)
