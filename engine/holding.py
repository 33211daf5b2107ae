"""What clients are not told while a generation is examined (E11, R14.5).

A token that was decided just before must not reach anybody until it is known whether it is
believed. If it is not, it is dropped, and the ending of its request does not count it. The rules
are in wanted.py; this keeps what waits, for whoever has the turn.
"""

from collections.abc import Callable

import attrs

from laneway.engine.effects import ClientEffect, Conclude, Deliver
from laneway.engine.state import State
from laneway.engine.wanted import is_believed, is_held_back


class HeldBack:
    """Effects for clients that wait, in order. ``model_of`` gives the model of a request."""

    def __init__(self, model_of: Callable[[int], int | None]) -> None:
        self._model_of = model_of
        self._held: list[ClientEffect] = []
        self._unbelieved: dict[int, int] = {}
        """Requests of which tokens were dropped, with the first position of those."""

    def __bool__(self) -> bool:
        """Return whether anything is kept."""
        return bool(self._held)

    def takes(self, state: State, effect: ClientEffect) -> bool:
        """Keep an effect if its clients are to be told nothing now; return whether it was kept."""
        if not self._is_held(state, effect):
            return False
        self._held.append(effect)
        return True

    def release(self, state: State) -> list[ClientEffect]:
        """Return what may be told now, in order; nothing while anything is still held back."""
        if not self._held or any(self._is_held(state, effect) for effect in self._held):
            return []
        told: list[ClientEffect] = []
        for effect in self._held:
            if is_believed(state, effect, self._model_of(effect.request)):
                told.append(effect)
            elif isinstance(effect, Deliver):
                first = self._unbelieved.get(effect.request, effect.position)
                self._unbelieved[effect.request] = min(first, effect.position)
        self._held.clear()
        return told

    def amend(self, effect: Conclude) -> Conclude:
        """Return an ending that counts only the tokens that were told."""
        told = self._unbelieved.pop(effect.request, None)
        return effect if told is None else attrs.evolve(effect, completion_tokens=told)

    def clear(self) -> None:
        """Forget everything: the engine stops."""
        self._held.clear()

    def _is_held(self, state: State, effect: ClientEffect) -> bool:
        return is_held_back(state, self._model_of(effect.request))
