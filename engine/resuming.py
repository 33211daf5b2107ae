"""Let requests go on after a fault or a restart, from the tokens they have (G8, G15, G21, R7.5).

Theory of operation. A fault costs jobs, not requests. ``suspend_request`` takes from a request what
it held; whoever decides about the device calls ``resume_request`` when there is a model to go on
with. A resumed request waits for a lane like a new one, first of its class, and its prefill runs
all that it has: its prompt, then its tokens. The next token is then the one that the fault kept
away: same position, same random number, same history for penalties, same masks.

A prefill that does not take all of it runs what it takes. The rest goes through further parts where
prompts may be run in parts, else one by one through decode jobs that draw nothing. Where a prefill
gives the bits of decodes, as on the simulated board, the answer is that of a run without a fault,
by bits. That is promised where a record says that a prompt in pieces equals the whole, since a
decode is a piece of one token; elsewhere the answer is marked from the first continued token on.

Guilt. Every request of the job that a fault names is a suspect, whatever the size of the batch;
all others are innocent (guilt.py: whom a hang names). A suspect is run once more, alone: its jobs
have one row and nothing else is in flight, before anybody who was resumed with it. It runs beside
others again after the first token that a decode job draws for it; then prefill and decode both went
well. Suspected again, alone or later, it ends with an error. An innocent goes on once; the second
time it ends with an error too, so that no chain of faults keeps a request running for ever. One
that only waited for a lane has lost nothing and stays where it is.

A restart suspends every request (starting.py): the model each was bound to is gone. It goes on when
a model is published under the name it was asked of, if that is the same artifact by its hash; if it
is another, its tokens would have another author, and it ends with an error. A restart is nobody's
fault and counts as none. Until its model comes a request waits; a closing engine leaves it open,
for the next restart.
"""

from typing import Any

from laneway.engine.capability import chunked_prefill
from laneway.engine.draft import Draft
from laneway.engine.ending import fail
from laneway.engine.errors import InternalError
from laneway.engine.guilt import content_of
from laneway.engine.reserving import evict_if_idle
from laneway.engine.state import ModelState, RequestState, State, is_homeless

REQUEUES_MAX = 1
SUSPICIONS_MAX = 1


def suspend_request(
    draft: Draft,
    request: RequestState,
    reason: str,
    *,
    suspect: bool,
    kind: str = "device_fault",
) -> bool:
    """Take a request off the device until it is resumed, or end it with one error.

    ``suspect``: the fault is of a job that had a row of it, which has ended by now. ``kind`` names
    the error of a request that may not go on. Returns whether the request lives.
    Raises: InternalError while a job still has it.
    """
    if request.job is not None:
        raise InternalError(f"request/{request.number} is suspended while job/{request.job} has it")
    if request.state in ("waiting", "suspended"):
        return True
    why = _may_not_go_on(request, suspect=suspect)
    lane = request.lane
    data: dict[str, Any] = {"reason": reason, "suspect": suspect, "tokens": len(request.tokens)}
    if suspect:
        data["content"] = content_of(request.prompt)
    generation = draft.state.models[request.model].generation
    draft.emit("request", request.number, "suspend", generation=generation, data=data)
    if lane is not None:
        evict_if_idle(draft, lane)
    if why:
        guilty = suspect and request.on_fault != "fail"
        fail(draft, request, kind, f"{why}: {reason}", http_status=500 if guilty else 503)
    return not why


def _may_not_go_on(request: RequestState, *, suspect: bool) -> str:
    """Return why a fault ends a request, or ""."""
    if request.on_fault == "fail":
        return "a fault of the device ended it, as it asked"
    if suspect and request.suspicions >= SUSPICIONS_MAX:
        how = "alone" if request.alone else "once more"
        return f"the device failed it {how} after it had been run again"
    if not suspect and request.requeues >= REQUEUES_MAX:
        return "the device failed under it once more after it had gone on"
    return ""


def resume_request(draft: Draft, request: RequestState, model: ModelState | None = None) -> None:
    """Let a suspended request wait for a lane of a model: its own, unless another is named."""
    state = draft.state
    chosen = state.models[request.model] if model is None else model
    data = {"model": chosen.number, "tokens": len(request.tokens), "alone": request.alone}
    if request.tokens and not _continues_exactly(state, chosen):
        data["exact"] = False
    draft.emit("request", request.number, "resume", generation=chosen.generation, data=data)


def _continues_exactly(state: State, model: ModelState) -> bool:
    """Return whether a prefill of known tokens is known to give the bits of their decodes."""
    device, facts = state.device.facts, model.facts
    if device is None or facts is None:
        return False
    return chunked_prefill(device, facts.sha256)


def go_on(draft: Draft, request: RequestState) -> None:
    """Let a suspended request go on if a model serves that it can go on with (G8, G21).

    That is its own. Where a restart took that, it is the one that is served under its name now, if
    it is the same artifact; with another one the request ends with an error.
    """
    state = draft.state
    number = request.model if not is_homeless(state, request) else state.aliases.get(request.alias)
    model = state.models.get(number or 0)
    if model is None or model.facts is None or model.state not in ("ready", "draining"):
        return
    if request.sha256 == model.facts.sha256:
        resume_request(draft, request, model)
        return
    message = (
        f"model {model.alias!r} is another artifact now ({model.facts.sha256[:12]}), its tokens"
        f" come from {request.sha256[:12]}: ask again"
    )
    fail(draft, request, "model_changed", message, http_status=503)
