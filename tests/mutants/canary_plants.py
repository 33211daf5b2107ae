"""Engines that break one rule of canaries, or of what follows from them: plants as in plants.py."""

from typing import Any

import msgspec
import pytest

from laneway.adapters import waiting
from laneway.engine import (
    canaries,
    completing,
    draft,
    evolve_canaries,
    evolve_models,
    holding,
    plan,
    planning,
    state,
    trusting,
)
from laneway.statemachines import Event


def canary_verdict_ignored(patch: pytest.MonkeyPatch) -> None:
    real = canaries.judge_canary

    def judge(made: draft.Draft, job: state.JobState, rows: Any) -> None:
        real(made, job, tuple(msgspec.structs.replace(row, verdict="") for row in rows))

    patch.setattr(completing, "judge_canary", judge)


def canary_in_a_row(patch: pytest.MonkeyPatch) -> None:
    real = canaries.choose_served

    def choose(known: state.State, model: state.ModelState) -> plan.Plan | None:
        went, model.canary.went = model.canary.went, False
        chosen = real(known, model)
        model.canary.went = went
        return chosen

    patch.setattr(planning, "choose_served", choose)


def doubt_not_marked(patch: pytest.MonkeyPatch) -> None:
    real = evolve_canaries.evolve_proof

    def evolve(known: state.State, model: state.ModelState, event: Event) -> None:
        if event.trigger != "mark":
            real(known, model, event)

    patch.setattr(evolve_models, "evolve_proof", evolve)


def ceiling_stays_at_two(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(canaries, "restrict", lambda made, reason: None)


def ceiling_reason_ignored(patch: pytest.MonkeyPatch) -> None:
    def ceiling(known: state.State) -> int:
        usable = known.device.state in plan.USABLE
        return plan.full_ceiling(known) if usable and known.device.facts is not None else 0

    patch.setattr(plan, "inflight_ceiling", ceiling)
    patch.setattr(planning, "inflight_ceiling", ceiling)


def overlapped_results_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(completing, "is_withheld", lambda known, job: False)


def told_while_examined(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holding, "is_held_back", lambda known, model: False)


def two_again_without_proof(patch: pytest.MonkeyPatch) -> None:
    real = canaries._agree

    def agree(made: draft.Draft, model: state.ModelState, run: state.TrialRun) -> None:
        real(made, model, run)
        if trusting.may_requalify(made.state):
            trusting.relax(made)

    patch.setattr(canaries, "_agree", agree)


def two_again_never(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(canaries, "may_requalify", lambda known: False)


def poll_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(waiting.Waiting, "_has_result", lambda self, flight: True)


def illegal_step_unsaid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(waiting.Waiting, "_doubt", lambda self, flight, kind, shown: False)
