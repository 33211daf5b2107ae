"""Immutable pictures of the state for callers: what is served, what runs, is it well."""

from collections import Counter
from collections.abc import Iterable

import attrs

from laneway.engine.ladder import PROCESS
from laneway.engine.state import State


@attrs.frozen(kw_only=True)
class ModelView:
    """One model as callers see it."""

    number: int
    alias: str
    state: str
    generation: int
    sha256: str
    context_tokens: int
    vocabulary: int
    reason: str


@attrs.frozen(kw_only=True)
class RequestView:
    """One live request as callers see it; no prompt, no tokens.

    ``alias`` is the name it was asked of, ``source`` where that model was loaded from.
    """

    number: int
    state: str
    model: int
    alias: str
    source: str
    lane: int | None
    prompt_tokens: int
    completion_tokens: int
    client_id: str | None


@attrs.frozen(kw_only=True)
class Health:
    """Liveness, readiness and why.

    ``live``: the engine runs. ``ready``: a request would be served now. ``restart``: this process
    cannot bring the device back, a new one may (rung 7 of the ladder).
    """

    live: bool
    ready: bool
    device: str
    step: int
    reason: str
    restart: bool = False


@attrs.frozen(kw_only=True)
class Snapshot:
    """The state after one durable step. Counts are by state, as in the state machines.

    ``rung``: 7 or 8 once the device is lost, else 0.
    """

    step: int
    at_ns: int
    incarnation: int
    epoch: int
    device: str
    reason: str
    rung: int
    closing: bool
    models: tuple[ModelView, ...]
    requests: tuple[RequestView, ...]
    lanes: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[str, int], ...]
    jobs: tuple[tuple[str, int], ...]

    def health(self, *, alive: bool, failure: BaseException | None, step: int) -> Health:
        """Return liveness and readiness (E29); ``step`` is the last durable one."""
        reason = self.reason
        serving = any(model.state == "ready" for model in self.models)
        usable = self.device in ("serving", "degraded") and not self.closing
        if failure is not None:
            reason = str(failure)
        elif not alive:
            reason = "the engine is closed"
        elif usable and not serving:
            reason = "no model is ready"
        return Health(
            live=alive,
            ready=alive and usable and serving,
            device=self.device,
            step=step,
            reason=reason,
            restart=self.rung == PROCESS,
        )


def take_snapshot(state: State) -> Snapshot:
    """Return an immutable picture of a state."""
    return Snapshot(
        step=state.step,
        at_ns=state.now_ns,
        incarnation=state.device.incarnation,
        epoch=state.device.epoch,
        device=state.device.state,
        reason=state.device.reason,
        rung=state.device.lost_rung,
        closing=state.closing,
        models=tuple(
            ModelView(
                number=model.number,
                alias=model.alias,
                state=model.state,
                generation=model.generation,
                sha256=model.facts.sha256 if model.facts else "",
                context_tokens=model.facts.context_tokens if model.facts else 0,
                vocabulary=model.facts.vocabulary if model.facts else 0,
                reason=model.reason,
            )
            for model in state.models.values()
        ),
        requests=tuple(
            RequestView(
                number=request.number,
                state=request.state,
                model=request.model,
                alias=request.alias,
                source=request.source,
                lane=request.lane,
                prompt_tokens=len(request.prompt),
                completion_tokens=len(request.tokens),
                client_id=request.client_id,
            )
            for request in state.requests.values()
        ),
        lanes=_count(lane.state for lane in state.lanes.values()),
        buffers=_count(buffer.state for buffer in state.buffers.values()),
        jobs=_count(job.state for job in state.jobs.values()),
    )


def _count(states: Iterable[str]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(Counter(states).items()))
