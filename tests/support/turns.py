"""Measure how long each class waits for its turn, in jobs planned, from the state after each step.

It looks at the state alone and knows nothing of the policy; the bounds it is held against are those
that the engine states for itself.
"""

from collections import Counter

import attrs

from laneway.engine.ports import Step
from laneway.engine.state import RequestState, State


@attrs.define
class TurnMeter:
    """The longest wait of each class so far."""

    longest: Counter[str] = attrs.Factory(Counter)
    _decodes: Counter[int] = attrs.Factory(Counter)
    _prefill: int = 0
    _passed: int = 0

    def take(self, state: State, step: Step) -> None:
        """Count the jobs planned in a step against everybody who still waits after it."""
        for event in step.events:
            if (event.machine, event.trigger) != ("job", "plan"):
                continue
            if event.data["origin"] != "request":
                continue
            if event.data["task"] == "decode":
                self._served_decode(event.data["owners"])
            else:
                self._served_prefill(state, event.data["owners"])
            self._wait(state, event.data["task"])

    def _served_decode(self, owners: list[int]) -> None:
        for owner in owners:
            self._longest("decode", self._decodes.pop(owner, 0) + 1)

    def _served_prefill(self, state: State, owners: list[int]) -> None:
        self._longest("prefill", self._prefill + 1)
        self._prefill = 0
        if any(state.requests[owner].long for owner in owners):
            self._longest("long_prefill", self._passed)
            self._passed = 0
        elif any(r.long and r.job is None for r in state.requests.values() if _has_prompt(r)):
            self._passed += 1

    def _wait(self, state: State, task: str) -> None:
        ready = {r.number for r in state.requests.values() if r.state == "decoding" and not r.job}
        for number in set(self._decodes) - ready:
            del self._decodes[number]
        self._decodes.update(ready)
        lane = any(model.empty_lanes for model in state.models.values())
        idle = [r for r in state.requests.values() if _has_prompt(r) and r.job is None]
        if not any(lane or r.lane is not None for r in idle):
            self._prefill = 0
        elif task == "decode":
            self._prefill += 1

    def _longest(self, kind: str, turns: int) -> None:
        self.longest[kind] = max(self.longest[kind], turns)


def _has_prompt(request: RequestState) -> bool:
    return request.state in ("waiting", "prefilling")
