"""Engines that blame the wrong ones, or go on wrongly: plants as in plants.py."""

from typing import Any

import pytest

from laneway.adapters import commands, resetting
from laneway.engine import evolve_requests, faulting, guilt, recovering, resuming, submitting
from laneway.engine.draft import Draft
from laneway.engine.effects import Deliver


def hang_blames_everybody(patch: pytest.MonkeyPatch) -> None:
    real = faulting.fault_job

    def fault_job(draft: Draft, job: Any, kind: str, reason: str, **more: Any) -> None:
        real(draft, job, kind, reason, **{**more, "blamed": True})

    patch.setattr(faulting, "fault_job", fault_job)


def hang_blames_the_one_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(faulting, "oldest_in_flight", lambda known, told: told)


def innocents_blamed(patch: pytest.MonkeyPatch) -> None:
    real = resuming.suspend_request

    def suspend(draft: Draft, request: Any, reason: str, **more: Any) -> bool:
        return real(draft, request, reason, **{**more, "suspect": True})

    patch.setattr(recovering, "suspend_request", suspend)


def twins_accused_twice(patch: pytest.MonkeyPatch) -> None:
    real = guilt.accuse

    def accuse(ladder: Any, limits: Any, content: str, now_ns: int) -> None:
        score, _ = ladder.guilt.get(content, (0, 0))
        real(ladder, limits, content, now_ns)
        ladder.guilt[content] = (score + 1, now_ns)

    patch.setattr(evolve_requests, "accuse", accuse)


def prefill_without_the_last_token(patch: pytest.MonkeyPatch) -> None:
    real = evolve_requests._resume

    def resume(state: Any, request: Any, event: Any) -> None:
        real(state, request, event)
        request.prefill_tokens -= bool(request.tokens)
        state.waiting_tokens -= bool(request.tokens)

    patch.setattr(evolve_requests, "_resume", resume)


def last_token_told_again(patch: pytest.MonkeyPatch) -> None:
    real = resuming.resume_request

    def resume(draft: Draft, request: Any, model: Any = None) -> None:
        real(draft, request, model)
        if request.tokens:
            last = len(request.tokens) - 1
            draft.ask(Deliver(request.number, last, request.tokens[last], ()))

    patch.setattr(resuming, "resume_request", resume)


def lost_configuration_served(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(submitting, "is_beyond_lanes", lambda code: False)


def freed_after_a_reset(patch: pytest.MonkeyPatch) -> None:
    """Believe after a reset that nothing is written any more."""
    real = resetting.give_up_generation

    def give_up(calls: Any, model: Any, graveyard: Any) -> None:
        real(calls, model, graveyard)
        graveyard._buried.clear()

    patch.setattr(commands, "give_up_generation", give_up)
