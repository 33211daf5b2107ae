"""Decide every input both ways: as the engine does, and with every job of decodes the long way."""

from collections import Counter

import pytest

from laneway.engine import decoding, loop
from laneway.engine.decide import decide
from laneway.engine.draft import Decision
from laneway.engine.inputs import Input
from laneway.engine.state import State, copy, freeze


def decide_both_ways(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Let engines decide both ways and compare; return how often each short way was taken."""
    taken_ways: Counter[str] = Counter()
    complete, plan = decoding.complete_decode, decoding.plan_decode

    def counted(name: str, real: object) -> object:
        def way(*arguments: object) -> object:
            taken_ways[name] += 1
            return real(*arguments)  # type: ignore[operator]

        return way

    def both(state: State, taken: Input, at_ns: int) -> Decision:
        other = copy(state)
        with patch.context() as long:
            long.setattr(decoding, "going_on", lambda *unused: None)
            long.setattr(decoding, "is_plain", lambda *unused: False)
            expected = decide(other, taken, at_ns)
        found = decide(state, taken, at_ns)
        assert found == expected, f"step {state.step}: {taken}"
        assert freeze(state) == freeze(other), f"step {state.step}: {taken}"
        return found

    patch.setattr(decoding, "complete_decode", counted("complete", complete))
    patch.setattr(decoding, "plan_decode", counted("plan", plan))
    patch.setattr(loop, "decide", both)
    return taken_ways
