"""Engines that break one rule of the recovery ladder: plants as in plants.py."""

from typing import Any

import attrs
import pytest

from laneway.engine import (
    admission,
    course,
    evolve_jobs,
    evolve_ladder,
    evolve_requests,
    faulting,
    ladder,
    loading,
    recovering,
    resuming,
)
from laneway.engine.draft import Draft
from laneway.engine.inputs import DeviceFaulted


def budget_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evolve_ladder, "_stamp", lambda state, rung, count: None)


def attempt_counted_afterwards(patch: pytest.MonkeyPatch) -> None:
    """Count an attempt when its report comes, so that a process that dies in it forgets it."""
    stamp, count_anew = evolve_ladder._stamp, evolve_ladder._count_anew

    def count_attempt(state: Any, event: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(evolve_ladder, "_stamp", lambda state, rung, count: None)
            real(state, event)

    def count_late(state: Any, taken: Any) -> None:
        stamp(state, state.ladder.recovery.rung, 1)
        count_anew(state, taken)

    real = evolve_ladder._count_attempt
    patch.setattr(evolve_ladder, "_count_attempt", count_attempt)
    patch.setattr(evolve_ladder, "_count_anew", count_late)


def _without_rule(patch: pytest.MonkeyPatch, rule: str) -> None:
    """Believe a report of which one rule does not hold, as if it did."""
    real = recovering.refuse_reset

    def refuse(state: Any, taken: Any) -> str:
        said = real(state, taken)
        return "" if f"({rule})" in said or (rule == "V5" and "epoch was" in said) else said

    patch.setattr(recovering, "refuse_reset", refuse)


def health_not_verified(patch: pytest.MonkeyPatch) -> None:
    _without_rule(patch, "V1")


def versions_not_verified(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovering, "changed_versions", lambda facts, taken: "")


def memory_not_verified(patch: pytest.MonkeyPatch) -> None:
    _without_rule(patch, "V3")


def counters_not_verified(patch: pytest.MonkeyPatch) -> None:
    _without_rule(patch, "V4")


def epoch_not_verified(patch: pytest.MonkeyPatch) -> None:
    _without_rule(patch, "V5")


def golden_skipped_after_a_reset(patch: pytest.MonkeyPatch) -> None:
    real = loading.configured

    def configured(draft: Draft, taken: Any) -> None:
        real(draft, taken)
        model = draft.state.models.get(taken.model)
        if recovering.is_proving(draft.state) and model is not None and model.state == "warming":
            loading.publish(draft, model)

    patch.setattr(loading, "configured", configured)


def golden_ignored_after_a_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loading, "proof_failed", lambda draft, model, reason: None)


def epoch_kept_over_a_reset(patch: pytest.MonkeyPatch) -> None:
    real = Draft.emit

    def emit(self: Draft, machine: str, entities: Any, trigger: str, **more: Any) -> None:
        if (machine, trigger) == ("device", "recover"):
            more["epoch"] = self.state.device.epoch
        real(self, machine, entities, trigger, **more)

    patch.setattr(Draft, "emit", emit)


def generation_kept_over_a_reset(patch: pytest.MonkeyPatch) -> None:
    real = Draft.emit

    def emit(self: Draft, machine: str, entities: Any, trigger: str, **more: Any) -> None:
        if (machine, trigger) == ("model", "reconfigure"):
            more["generation"] = self.state.models[entities].generation
        real(self, machine, entities, trigger, **more)

    patch.setattr(Draft, "emit", emit)


def buffers_rebuilt_for_the_old_generation(patch: pytest.MonkeyPatch) -> None:
    real = Draft.emit_each

    def emit_each(self: Draft, machine: str, entities: Any, trigger: str, **more: Any) -> None:
        if trigger == "rebuild":
            more["generation"] -= 1
        real(self, machine, entities, trigger, **more)

    patch.setattr(Draft, "emit_each", emit_each)


def lanes_not_cleared(patch: pytest.MonkeyPatch) -> None:
    real = Draft.emit

    def emit(self: Draft, machine: str, entities: Any, trigger: str, **more: Any) -> None:
        if (machine, trigger) != ("lane", "clear"):
            real(self, machine, entities, trigger, **more)

    patch.setattr(Draft, "emit", emit)


def lanes_believed_over_a_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovering, "suspect_lanes", lambda draft, lanes, reason: None)


def innocents_go_on_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(resuming, "REQUEUES_MAX", 99)


def suspects_not_alone(patch: pytest.MonkeyPatch) -> None:
    real = evolve_requests._resume

    def resume(state: Any, request: Any, event: Any) -> None:
        request.alone = False
        real(state, request, event)

    patch.setattr(evolve_requests, "_resume", resume)


def delivered_token_repeated(patch: pytest.MonkeyPatch) -> None:
    real = evolve_requests._resume

    def resume(state: Any, request: Any, event: Any) -> None:
        del request.tokens[-1:]
        real(state, request, event)

    patch.setattr(evolve_requests, "_resume", resume)


def suspended_keeps_its_lane(patch: pytest.MonkeyPatch) -> None:
    real = evolve_requests._suspend

    def suspend(state: Any, request: Any, event: Any) -> None:
        lane = request.lane
        real(state, request, event)
        request.lane = lane

    patch.setattr(evolve_requests, "_suspend", suspend)


def withdrawn_job_submitted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(course, "is_wanted", lambda known, effect: True)


def drain_without_bound(patch: pytest.MonkeyPatch) -> None:
    real = recovering.escalate

    def escalate(draft: Draft, cause: str, rung: int, reason: str, **more: Any) -> None:
        if more.get("until_ns") and not more.get("pausing"):
            more["until_ns"] = 1 << 62
        real(draft, cause, rung, reason, **more)

    patch.setattr(recovering, "escalate", escalate)


def drain_skipped(patch: pytest.MonkeyPatch) -> None:
    real = recovering.advance

    def advance(draft: Draft) -> None:
        recovery = draft.state.ladder.recovery
        if recovery is not None and not recovery.watching and not recovery.pausing:
            recovery.until_ns = 0
        real(draft)

    patch.setattr(recovering, "advance", advance)


def pause_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovering, "pause_ns", lambda known, limits, rung, now_ns: 0)


def restarts_not_counted(patch: pytest.MonkeyPatch) -> None:
    real = evolve_ladder._stamp

    def stamp(state: Any, rung: int, count: int) -> None:
        real(state, rung, 0 if rung == ladder.PROCESS else count)

    patch.setattr(evolve_ladder, "_stamp", stamp)


def budgets_forgotten_at_a_start(patch: pytest.MonkeyPatch) -> None:
    real = evolve_ladder.evolve_ladder

    def evolve(state: Any, event: Any, taken: Any) -> None:
        real(state, event, taken)
        if event.trigger == "open":
            state.ladder.attempts = {}

    patch.setattr("laneway.engine.evolve.evolve_ladder", evolve)


def half_open_fault_counts_once(patch: pytest.MonkeyPatch) -> None:
    real = recovering._start

    def start(draft: Draft, rung: int, level: int, *, stamps: int) -> None:
        real(draft, rung, level, stamps=min(stamps, 1))

    patch.setattr(recovering, "_start", start)


def poison_served(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "is_poison", lambda *known: False)


def pardon_missing(patch: pytest.MonkeyPatch) -> None:
    for module in (evolve_jobs, evolve_requests):
        patch.setattr(module, "pardon", lambda known, content: None)


def fault_of_another_epoch_believed(patch: pytest.MonkeyPatch) -> None:
    real = faulting.fault

    def fault(draft: Draft, taken: DeviceFaulted) -> None:
        real(draft, attrs.evolve(taken, epoch=0))

    patch.setattr(faulting, "fault", fault)
