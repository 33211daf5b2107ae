"""Engines that break one rule of loads and of what takes whose place: plants as in plants.py."""

from typing import Any

import pytest

from laneway.engine import evolve as evolve_module
from laneway.engine import evolve_models, health, loading, successors
from laneway.engine.draft import Draft
from laneway.engine.inputs import Input, ReplaceRequested
from laneway.engine.proven import proven_here
from laneway.engine.state import ModelState, Proven, State
from laneway.engine.successors import ask_again
from laneway.statemachines import Event


def drained_before_it_is_known(patch: pytest.MonkeyPatch) -> None:
    """Drain the model that serves as soon as another is asked for."""
    real = loading.replace

    def replace(draft: Draft, taken: ReplaceRequested) -> None:
        old = draft.state.models[draft.state.aliases[taken.alias]]
        real(draft, taken)
        draft.emit("model", old.number, "drain", generation=old.generation)

    patch.setattr(loading, "replace", replace)


def any_artifact_loaded_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loading, "_refuse_other", lambda state, model, taken: "")


def disproven_gone_back_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evolve_models, "forget_proven", lambda state, model: None)


def foreign_reset_overlooked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(health, "was_reset_by_another", lambda state, found: False)


def configured_again_without_a_reset(patch: pytest.MonkeyPatch) -> None:
    def begin(draft: Draft, *how: Any, **more: Any) -> None:
        ask_again(draft)

    patch.setattr(loading, "begin", begin)


def tried_again_taken_for_vetted(patch: pytest.MonkeyPatch) -> None:
    """Believe of every load that is validated anew that it made another model go."""
    real = evolve_models.evolve_model

    def evolve(state: State, event: Event, taken: Input) -> None:
        real(state, event, taken)
        if event.trigger == "revalidate":
            state.models[event.entities[0]].vetted = True

    patch.setitem(evolve_module.EVOLVERS, "model", evolve)


def loads_back_without_end(patch: pytest.MonkeyPatch) -> None:
    """Make up for a load back that fails by a further one."""
    real = successors.to_load_back

    def to_load_back(state: State, model: ModelState) -> Proven | None:
        known = proven_here(state, model.alias)
        if model.must_be and known and not state.closing:
            return known[-1]
        return real(state, model)

    patch.setattr(successors, "to_load_back", to_load_back)
