"""What events change in the books of canaries: what is proven, marked, held to one in flight."""

from laneway.engine.state import Canary, ModelState, RequestState, State
from laneway.statemachines import Event

SERVED = ("ready", "draining")
ENDED_MAX = 4096
"""How many ended requests are remembered until a canary proves them; older ones are forgotten."""


def begin_canary(state: State, model: ModelState, event: Event) -> None:
    """Take note that a canary began: what was served until now is what it can prove."""
    canary = model.canary
    number = event.data["owners"][0]
    canary.jobs = 0
    canary.since_ns = state.now_ns
    canary.trial = event.data["trial"]
    if event.data.get("pair"):
        canary.pairing += (number,)
    if canary.examining:
        canary.examiner = number
    for request in _requests(state, model):
        request.canary_tokens = len(request.tokens)
    canary.ended_before = (canary.ended_before + canary.ended)[-ENDED_MAX:]
    canary.ended = []


def evolve_proof(state: State, model: ModelState, event: Event) -> None:
    """Follow a model's event: a verdict, or the beginning or end of its being served."""
    canary = model.canary
    if event.dest not in SERVED:
        model.canary = Canary()
    elif event.trigger == "publish":
        model.canary = Canary(since_ns=state.now_ns)
    elif event.trigger == "prove":
        state.device.good_canaries += 1
        canary.paired += event.data["run"] in canary.pairing and event.data["overlapped"]
        canary.ended_before = []
        for request in _requests(state, model):
            request.proven_tokens = request.canary_tokens
    elif event.trigger == "mark":
        canary.ended = canary.ended_before = []
        for number, first in event.data["requests"]:
            request = state.requests[number]
            if request.suspect_from is None:
                request.suspect_from = first
    elif event.trigger in ("examine", "acquit"):
        canary.examining = event.trigger == "examine"
        canary.examiner = None


def evolve_ceiling(state: State, event: Event) -> None:
    """Follow an event of the device that narrows its jobs to one, or gives it two again."""
    device = state.device
    narrowed = event.trigger == "restrict"
    device.ceiling_falls += narrowed and not device.ceiling_reason
    device.ceiling_reason = event.data["reason"] if narrowed else ""
    device.good_canaries = 0
    for model in state.models.values():
        model.canary.pairing = ()
        model.canary.paired = 0


def count_job(model: ModelState, batch: int) -> None:
    """Count a job of requests that is complete, and the batch it ran in."""
    canary = model.canary
    canary.jobs += 1
    if batch not in canary.batches:
        canary.batches = (*canary.batches, batch)


def remember_ended(state: State, request: RequestState) -> None:
    """Remember a request that ends with tokens that no canary has proven yet."""
    limits = state.limits
    if not (limits.canary_jobs or limits.canary_idle_ns):
        return  # there is no canary that could put them in doubt
    first, model = request.proven_tokens, state.models.get(request.model)
    if model is not None and len(request.tokens) > first:
        ended = model.canary.ended
        ended.append((request.number, first))
        del ended[:-ENDED_MAX]


def _requests(state: State, model: ModelState) -> list[RequestState]:
    return [one for one in state.requests.values() if one.model == model.number]
