"""Admit a request or refuse it at once, with the reason and what to do about it (R7.2, R14.1).

Nothing here waits or spins. What can never fit is refused with need and limit; what could fit later
is refused with a time to come back when the queue is full; everything else is queued, first come
first served (G9).
"""

import attrs

from laneway.engine.draft import Draft
from laneway.engine.effects import Conclude
from laneway.engine.guilt import is_poison
from laneway.engine.inputs import RequestSubmitted
from laneway.engine.state import ModelState, State
from laneway.engine.successors import is_coming_back
from laneway.engine.throttling import may_wait, patience


@attrs.frozen
class Refusal:
    """Why a request is not admitted.

    ``later`` says that the same request may succeed another time.
    """

    reason: str
    http_status: int
    message: str
    later: bool = False


def admit(draft: Draft, taken: RequestSubmitted) -> None:
    """Decide the one input that brings a request into being."""
    state = draft.state
    refusal = refuse(state, taken)
    if refusal is None:
        model = state.aliases[taken.alias]
        draft.emit("request", taken.request, "admit", data={"model": model})
        return
    draft.emit("request", taken.request, "reject", data={"reason": refusal.reason})
    draft.ask(
        Conclude(
            request=taken.request,
            finish_reason="deadline" if refusal.reason == "deadline" else "error",
            prompt_tokens=len(taken.prompt),
            completion_tokens=0,
            kind=refusal.reason,
            message=refusal.message,
            http_status=refusal.http_status,
            retry_after_ns=_come_again_ns(state) if refusal.later else None,
            admitted=False,
        )
    )


def _come_again_ns(state: State) -> int:
    return state.limits.retry_after_ns * patience(state)


def refuse(state: State, taken: RequestSubmitted) -> Refusal | None:
    """Return why the request cannot be admitted now, or None."""
    if state.closing:
        return Refusal("closing", 503, "the engine is closing: send it to another one")
    if state.device.state == "lost":
        return Refusal(
            "device_lost", 503, f"the device is lost ({state.device.reason}): open it again"
        )
    if is_poison(state.ladder, state.limits, taken.prompt, state.now_ns):
        return Refusal(
            "poison",
            422,
            "requests with this prompt failed the device twice: it is refused for a while",
        )
    model = _serving_model(state, taken.alias)
    if isinstance(model, Refusal):
        return model
    if taken.model != model.number:
        return Refusal(
            "model_changed",
            503,
            f"the model behind {taken.alias!r} changed while the request came in: send it again",
            later=True,
        )
    return _refuse_shape(model, taken) or _refuse_queue(state, taken)


def _serving_model(state: State, alias: str) -> ModelState | Refusal:
    number = state.aliases.get(alias)
    if number is not None:
        return state.models[number]
    for model in state.models.values():
        if model.alias == alias and model.state != "failed":
            return Refusal(
                "model_not_ready", 503, f"model {alias!r} is {model.state}: try later", later=True
            )
    if is_coming_back(state, alias):
        said = f"what served {alias!r} before is loaded back: try later"
        return Refusal("model_not_ready", 503, said, later=True)
    served = ", ".join(sorted(state.aliases)) or "none"
    return Refusal("unknown_model", 404, f"no model {alias!r} is served; served: {served}")


def _refuse_shape(model: ModelState, taken: RequestSubmitted) -> Refusal | None:
    facts = model.facts
    assert facts is not None
    if not taken.prompt:
        return Refusal("empty_prompt", 400, "the prompt has no tokens: give at least one")
    if taken.max_tokens < 1:
        return Refusal("max_tokens", 400, f"max_tokens must be at least 1, not {taken.max_tokens}")
    unknown = _refuse_unknown_tokens(facts.vocabulary, taken)
    if unknown is not None:
        return unknown
    need = len(taken.prompt) + taken.max_tokens
    if need > facts.context_tokens:
        return Refusal(
            "too_long",
            400,
            f"prompt {len(taken.prompt)} + max_tokens {taken.max_tokens} = {need} tokens; the model"
            f" holds {facts.context_tokens}: shorten one of them",
        )
    longest = max(s.tokens_max for s in facts.submodels if s.task == "prefill")
    if len(taken.prompt) > longest:
        return Refusal(
            "too_long",
            400,
            f"prompt of {len(taken.prompt)} tokens; a prefill takes at most {longest}: shorten it",
        )
    return None


def _refuse_unknown_tokens(vocabulary: int, taken: RequestSubmitted) -> Refusal | None:
    """Refuse ids that the model does not have, wherever the request names them (G17)."""
    sampling = taken.sampling
    for name, ids in (
        ("", taken.prompt),
        ("stop_token_ids: ", taken.stop_token_ids),
        ("logit_bias: ", tuple(token for token, _ in sampling.logit_bias)),
        ("allowed_token_ids: ", sampling.allowed_token_ids or ()),
    ):
        for token in ids:
            if not 0 <= token < vocabulary:
                return Refusal(
                    "unknown_token", 400, f"{name}token {token} is not in 0..{vocabulary - 1}"
                )
    return None


def _refuse_queue(state: State, taken: RequestSubmitted) -> Refusal | None:
    limits = state.limits
    if taken.deadline_ns is not None and taken.deadline_ns <= state.now_ns:
        return Refusal("deadline", 504, "the deadline had passed on arrival: give it more time")
    requests_max = may_wait(state, limits.queued_requests_max)
    tokens_max = may_wait(state, limits.queued_tokens_max)
    if state.waiting_requests >= requests_max:
        return Refusal(
            "max_num_queued_reqs",
            429,
            f"{state.waiting_requests} requests wait, at most {requests_max} may",
            later=True,
        )
    if state.waiting_tokens + len(taken.prompt) > tokens_max:
        return Refusal(
            "max_num_queued_tokens",
            429,
            f"{state.waiting_tokens} prompt tokens wait, at most {tokens_max} may",
            later=True,
        )
    return None
