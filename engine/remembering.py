"""What a journal remembers of requests beside the state: what came with their tokens, how they end.

The state keeps the tokens of those who live, since it decides from them. Log-probabilities stand in
the inputs alone, and an ended request leaves the state. ``Remembered`` reads them while a journal
is folded, so that a stream that is attached later repeats what was delivered (decision 14).
"""

import attrs

from laneway.engine.effects import Conclude
from laneway.engine.inputs import Completed, RequestSubmitted
from laneway.engine.ports import Step
from laneway.engine.state import RequestState, State
from laneway.statemachines import MACHINES, Event

Pairs = tuple[tuple[int, float], ...]
"""What came with a token: (token, log-probability), its own first."""

_FINAL = MACHINES["request"].final
_FINISH_REASONS = {"cancel": "cancelled", "expire": "deadline"}
_STATUSES = {"finish": 200, "cancel": 499, "expire": 504}


@attrs.define
class Remembered:
    """What is told of each live request, and of ``keep`` beyond its ending.

    ``logprobs`` has an entry for each token, if the request asked for them.
    """

    keep: int = 0
    logprobs: dict[int, list[Pairs]] = attrs.Factory(dict)
    asked: RequestSubmitted | None = None
    tokens: list[int] = attrs.Factory(list)
    sha256: str = ""
    ending: Event | None = None
    """Of ``keep``: what it asked for, its tokens, their artifact, and the event that ended it."""

    _rows: dict[int, tuple[RequestState, ...]] = attrs.Factory(dict)
    """By job in flight its requests, which outlive their place in the state here."""

    def take(self, state: State, step: Step) -> None:
        """Take note of a step; ``state`` is the one after it."""
        taken = step.taken
        if isinstance(taken, Completed) and taken.job not in state.jobs:
            requests = self._rows.pop(taken.job, ())
            for request, row in zip(requests, taken.rows, strict=False):
                self._note(request, row.logprobs)
        for event in step.events:
            if event.machine == "job" and event.trigger == "plan":
                self._plan(state, event)
            elif event.machine == "request":
                self._take_request(state, event, step)

    def _plan(self, state: State, event: Event) -> None:
        """Remember whose rows a job has, and forget jobs whose answer will not be believed."""
        if event.data["origin"] == "request":
            owners = event.data["owners"]
            self._rows[event.entities[0]] = tuple(state.requests[owner] for owner in owners)
        if len(self._rows) > 2 * len(state.jobs) + 64:
            self._rows = {job: rows for job, rows in self._rows.items() if job in state.jobs}

    def _note(self, request: RequestState, logprobs: Pairs) -> None:
        """Keep what came with a token, if it became one of the request's."""
        if request.logprobs is None:
            return
        told = self.logprobs.setdefault(request.number, [])
        if len(told) < len(request.tokens):
            told.append(logprobs)

    def _take_request(self, state: State, event: Event, step: Step) -> None:
        for number in event.entities:
            if number == self.keep:
                self._keep(state, event, step)
            elif event.dest in _FINAL:
                self.logprobs.pop(number, None)

    def _keep(self, state: State, event: Event, step: Step) -> None:
        if isinstance(step.taken, RequestSubmitted) and step.taken.request == self.keep:
            self.asked = step.taken
        request = state.requests.get(self.keep)
        if request is not None:
            self.tokens, self.sha256 = request.tokens, request.sha256
        if event.dest in _FINAL:
            self.ending = event

    def conclude(self) -> Conclude:
        """Return the ending of ``keep`` as its client was told it, but for the words."""
        assert self.ending is not None
        assert self.asked is not None
        trigger, reason = self.ending.trigger, str(self.ending.data["reason"])
        finish_reason = _FINISH_REASONS.get(trigger, "error")
        if trigger == "finish" or reason == "deadline":
            finish_reason = reason
        return Conclude(
            request=self.keep,
            finish_reason=finish_reason,
            prompt_tokens=len(self.asked.prompt),
            completion_tokens=len(self.tokens),
            kind="" if trigger == "finish" else reason,
            message="" if trigger == "finish" else f"it ended by {reason}, as its journal says",
            http_status=_STATUSES.get(trigger, 500),
            admitted=trigger != "reject",
            suspect_tokens_from=self.ending.data.get("suspect_from"),
            continued_tokens_from=self.ending.data.get("continued_from"),
        )
