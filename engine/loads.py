"""What became of the loads that callers wait for, told from the events of models.

A load ends well when its model is ready. One that failed is over once what it took is given back,
or never will be. A replacement that failed is over once what served before serves again, or cannot
(R14.5). Numbers are those of models; ``state`` is the engine's after the last durable step.
"""

from laneway.engine.state import State
from laneway.statemachines import Event

_GONE = ("lost", "closing", "closed")


class Loads:
    """Which models failed, and by which other one each failed replacement is made up for."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self._backs: dict[int, int] = {}
        """Replacement to the load of what served before; 0 until that has its number."""

    def note(self, event: Event) -> None:
        """Take a move of a model (the engine's gate)."""
        (number,) = event.entities
        if event.dest == "failed":
            self._reasons[number] = str(event.data.get("reason", "abandoned"))
        if "loads_back" in event.data:
            self._backs[number] = 0
        elif "instead_of" in event.data:
            self._backs[event.data["instead_of"]] = number

    def reason(self, number: int) -> str | None:
        """Return why a model failed, None if it did not."""
        return self._reasons.get(number)

    def has_ended(self, state: State, number: int) -> bool:
        """Return whether a load is over: ready, or failed and cleared away."""
        return _is_ready(state, number) or self._is_cleared(state, number)

    def is_gone(self, state: State, number: int) -> bool:
        """Return whether an unload is over: nothing is left, or nothing more will be given back.

        Why: a model that fails while it is unloaded, since it computes wrongly, is released too.
        """
        return number not in state.models or self._is_cleared(state, number)

    def _is_cleared(self, state: State, number: int) -> bool:
        """Return whether a model failed and what it had was given back, or never will be."""
        model = state.models.get(number)
        return number in self._reasons and (model is None or not model.releasing)

    def why_left(self, state: State, number: int) -> str | None:
        """Return why something is left of a model that was unloaded, None if nothing is."""
        return self._reasons.get(number) if number in state.models else None

    def is_replaced(self, state: State, number: int) -> bool:
        """Return whether a replacement is over: ready, or failed and nothing more follows of it."""
        if _is_ready(state, number):
            return True
        out = state.device.state in _GONE
        if number not in self._reasons or (number in state.models and not out):
            return False
        back = self._backs.get(number)
        if back is None or (out and not back):
            return True
        return bool(back) and (
            back in self._reasons or back not in state.models or _is_ready(state, back)
        )

    def describe_serving(self, number: int, serving: int | None) -> str:
        """Return what serves an alias after its replacement ``number`` failed.

        ``serving``: the model that the alias names now, if any.
        """
        back = self._backs.get(number)
        if back in self._reasons:
            return f"what was there before was not loaded back: {self._reasons[back]}"
        if serving is None:
            return "nothing serves it now: load it"
        how = "loaded back" if serving == back else "untouched"
        return f"model/{serving} serves it ({how})"


def _is_ready(state: State, number: int) -> bool:
    model = state.models.get(number)
    return model is not None and model.state == "ready"
