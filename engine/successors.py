"""One artifact in the place of another: who waits for whom, and the way back (R10.2, R14.5).

Theory of operation. A model that is to replace another stands beside it in `validating`. First its
artifact is only checked, and let go of again: a bad one costs the other nothing. A good one waits
(`vet`) while the other finishes what it has and is released. When that is gone the artifact is
validated for good (`revalidate`) and the load goes its usual way; the alias has no model meanwhile,
and a request is told to come again. If the load then fails, what it took is given back first, and
the shell is asked (`LoadBack`) for a load of the artifact that served the alias before: what a
model passed golden with on this device is remembered by alias (`State.proven`). Until that comes no
model may have the alias, and a request is told to come again then too (`State.coming_back`).

Only a model that was vetted made another one go, so only of its failure anything is loaded back. A
plain load whose configuration is tried again waits and is validated anew as well, but it is in
nobody's place. A load back that fails is not made up for by a further one, which would never end,
and what failed is not its own way back. Nor is there one to a model that was asked to be unloaded
while the other was on its way.

A load back that comes to a device which does not serve just then waits for it (`waits`), as does a
good artifact whose place became free meanwhile: both go on when the device is let go on, or serves
after its reset.

Why the artifact is validated twice: a handle of the device made while the other model serves would
be stale after any reset on the way, and the device is asked for nothing it would have to undo.
"""

from laneway.engine.draft import Draft
from laneway.engine.effects import LoadBack, ValidateArtifact
from laneway.engine.proven import proven_here
from laneway.engine.state import ModelState, Proven, State

_TAKES_MODELS = ("serving", "degraded", "recovering")


def is_check(model: ModelState) -> bool:
    """Return whether the artifact of a model is only checked, since another has its place."""
    return bool(model.replaces) and not model.vetted


def takes_models(state: State) -> bool:
    """Return whether the device may be given a model now, or waits for one as its proof."""
    return state.device.state in _TAKES_MODELS


def make_way(draft: Draft, model: ModelState) -> None:
    """Drain a model that a good artifact waits to replace."""
    waiting = (one for one in draft.state.models.values() if one.waiting)
    if model.state == "ready" and any(one.replaces == model.number for one in waiting):
        draft.emit("model", model.number, "drain", generation=model.generation)


def ask_again(draft: Draft) -> None:
    """Go on with a load whose wait is over: the model it replaces is gone, the device serves."""
    state = draft.state
    for model in list(state.models.values()):
        if not model.waiting or model.replaces in state.models:
            continue
        if state.closing:
            draft.emit("model", model.number, "refuse", data={"reason": "the engine is closing"})
            draft.emit("model", model.number, "clean")
        elif takes_models(state):
            draft.emit("model", model.number, "revalidate")
            draft.ask(ValidateArtifact(model=model.number, source=model.source))


def let_go(draft: Draft, model: ModelState, trigger: str, *, generation: int) -> None:
    """End a model of which nothing is left; if it failed in another's place, go back to that."""
    back = to_load_back(draft.state, model)
    data = {} if back is None else {"loads_back": back.source}
    draft.emit("model", model.number, trigger, generation=generation, data=data)
    if back is not None:
        draft.ask(
            LoadBack(
                alias=model.alias,
                source=back.source,
                sha256=back.sha256,
                instead_of=model.number,
            )
        )


def is_coming_back(state: State, alias: str) -> bool:
    """Return whether no model has an alias just now, but one will be loaded back under it.

    That is so from the failure of the one that took its place on: first what that took is given
    back, then the shell is asked.
    """
    if alias in state.coming_back.values():
        return True
    failed = (one for one in state.models.values() if one.alias == alias and one.state == "failed")
    return any(to_load_back(state, model) is not None for model in failed)


def to_load_back(state: State, model: ModelState) -> Proven | None:
    """Return what served the alias of a model that failed after it had made the other go."""
    if model.served or not model.vetted or model.must_be or model.no_way_back:
        return None
    if model.replaces in state.models or state.closing:
        return None
    known = proven_here(state, model.alias)
    if not known or (model.facts is not None and known[-1].sha256 == model.facts.sha256):
        return None
    return known[-1]
