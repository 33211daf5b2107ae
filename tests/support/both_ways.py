"""Decide every input both ways: as an engine does, and step by step with every job the long way.

The state of the long way is a shadow that only ``decide`` moves. After every step the engine's
state is compared with it, landed on a copy, so that a cruise goes on. In every other step of a
cruise it is asked which job it foresees, as an engine on threads does; that job must be what comes.
"""

from collections import Counter
from weakref import WeakKeyDictionary

import attrs
import msgspec
import pytest
from support.rig import Rig

from laneway.engine import decoding
from laneway.engine.course import Course
from laneway.engine.decide import decide
from laneway.engine.draft import Decision
from laneway.engine.effects import SubmitJob, SubmitRow
from laneway.engine.inputs import Completed, Input
from laneway.engine.state import State, copy, freeze


def landed(course: Course) -> State:
    """Return the state after the last step, without landing."""
    if course._cruise is None:
        return course._state
    cruise = attrs.evolve(course._cruise, state=copy(course._state))
    cruise.land()
    return cruise.state


def outlined(job: SubmitJob) -> SubmitJob:
    """Return a job as it may be foreseen: without tokens, and without what the sampler needs."""
    rows = tuple(SubmitRow(row.lane, row.owner, (0,), row.start, None) for row in job.rows)
    return msgspec.structs.replace(job, rows=rows)


def decide_both_ways(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Let engines decide both ways and compare; return how often each short way was taken."""
    ways: Counter[str] = Counter()
    shadows: WeakKeyDictionary[Course, State] = WeakKeyDictionary()
    real = Course.decide
    complete, plan = decoding.complete_decode, decoding.plan_decode

    def counted(name: str, way: object) -> object:
        def take(*arguments: object) -> object:
            ways[name] += 1
            return way(*arguments)  # type: ignore[operator]

        return take

    def both(course: Course, taken: Input, at_ns: int) -> Decision:
        if course not in shadows:
            shadows[course] = copy(course.state)
        shadow = shadows[course]
        with patch.context() as long:
            long.setattr(decoding, "going_on", lambda *unused: None)
            long.setattr(decoding, "is_plain", lambda *unused: False)
            expected = decide(shadow, taken, at_ns)
        foreseen = course.foresee() if shadow.step % 2 else None
        found = real(course, taken, at_ns)
        assert found == expected, f"step {shadow.step}: {taken}"
        if foreseen is not None and course._cruise is not None and type(taken) is Completed:
            (job,) = (one for one in found.effects if isinstance(one, SubmitJob))
            assert outlined(job) == foreseen.submit
            ways["foreseen"] += 1
        assert freeze(landed(course)) == freeze(shadow), f"step {shadow.step}: {taken}"
        assert (course.step, course.now_ns) == (shadow.step, shadow.now_ns)
        if course._cruise is not None:
            ways[type(taken).__name__] += 1
        return found

    patch.setattr(decoding, "complete_decode", counted("complete", complete))
    patch.setattr(decoding, "plan_decode", counted("plan", plan))
    patch.setattr(Rig, "_watch", lambda rig, steps: None)  # it looks at the state, which lands
    patch.setattr(Course, "decide", both)
    return ways
