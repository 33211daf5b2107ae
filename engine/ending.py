"""Give a request its one ending, and tell its client (I1).

Accounting of what the device still uses is not done here (E7).

An ended request leaves the state at once. Its lane is given back here only when no job names it;
otherwise the job's own end gives it back (E19), whatever became of the request.
"""

from laneway.engine.draft import Draft
from laneway.engine.effects import Conclude
from laneway.engine.inputs import CancelRequested
from laneway.engine.reserving import evict_if_idle
from laneway.engine.state import RequestState


def conclude(
    draft: Draft,
    request: RequestState,
    trigger: str,
    *,
    finish_reason: str,
    kind: str = "",
    message: str = "",
    http_status: int = 200,
    retry_after_ns: int | None = None,
) -> None:
    """End a live request by ``trigger``, tell its client, give back its lane if no job has it."""
    model = draft.state.models.get(request.model)
    generation = 0 if model is None else model.generation
    data = {"reason": kind or finish_reason, "tokens": len(request.tokens)}
    if request.suspect_from is not None:
        data["suspect_from"] = request.suspect_from
    if request.continued_from is not None:
        data["continued_from"] = request.continued_from
    draft.emit("request", request.number, trigger, generation=generation, data=data)
    draft.ask(
        Conclude(
            request=request.number,
            finish_reason=finish_reason,
            prompt_tokens=len(request.prompt),
            completion_tokens=len(request.tokens),
            kind=kind,
            message=message,
            http_status=http_status,
            retry_after_ns=retry_after_ns,
            suspect_tokens_from=request.suspect_from,
            continued_tokens_from=request.continued_from,
        )
    )
    if request.lane is not None:
        evict_if_idle(draft, request.lane)


def finish(draft: Draft, request: RequestState, finish_reason: str) -> None:
    """End a request that got what it asked for: ``stop`` or ``length``."""
    conclude(draft, request, "finish", finish_reason=finish_reason)


def cancel(draft: Draft, taken: CancelRequested) -> None:
    """End a request at its client's wish.

    One that has ended already stays as it is: cancel is idempotent.
    """
    request = draft.state.requests.get(taken.request)
    if request is not None:
        cancel_request(draft, request)


def cancel_request(draft: Draft, request: RequestState) -> None:
    """End one live request as cancelled (R3.5: nothing the device uses is freed by it)."""
    conclude(draft, request, "cancel", finish_reason="cancelled", kind="cancelled", http_status=499)


def expire(draft: Draft) -> None:
    """End every live request whose deadline has come."""
    state = draft.state
    while state.deadlines and state.deadlines[0][0] <= state.now_ns:
        request = state.requests[state.deadlines[0][1]]
        conclude(
            draft,
            request,
            "expire",
            finish_reason="deadline",
            kind="deadline",
            message=f"the deadline passed after {len(request.tokens)} tokens",
            http_status=504,
        )


def fail(
    draft: Draft, request: RequestState, kind: str, message: str, *, http_status: int = 500
) -> None:
    """End a request with an error that its client is told."""
    conclude(
        draft,
        request,
        "fail",
        finish_reason="error",
        kind=kind,
        message=message,
        http_status=http_status,
        retry_after_ns=draft.state.limits.retry_after_ns if http_status == 503 else None,
    )
