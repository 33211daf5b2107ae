"""Engines that break one rule of loads and of what takes whose place: plants as in plants.py."""

from typing import Any

import pytest

from laneway.engine import evolve_models, health, loading
from laneway.engine.draft import Draft
from laneway.engine.inputs import ReplaceRequested
from laneway.engine.successors import ask_again


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
