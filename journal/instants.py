"""Write the instants of a job compactly: each as the time since the one before.

A device tells nine instants of a job that lie close together, on a clock that may have run for
weeks. The first is written as it is, each later one as what has passed since the last one told; one
that was not told (0) is null, and one that lies before the last (which no sound device says) is an
array of the instant itself. The duration at the end stands as it is. One value has one form.
"""

from operator import attrgetter
from typing import Any

import attrs

from laneway.engine.inputs import JobTimes
from laneway.journal.wire import Shape

_NAMES = tuple(field.name for field in attrs.fields(JobTimes))
_values_of = attrgetter(*_NAMES)

Told = int | tuple[int] | None


def _to_wire(times: JobTimes) -> list[Any]:
    *instants, duration_ns = _values_of(times)
    written: list[Any] = []
    before = 0
    for instant in instants:
        if instant == 0:
            written.append(None)
            continue
        written.append(instant - before if instant >= before else (instant,))
        before = instant
    written.append(duration_ns)
    return written


def _from_wire(written: tuple[Any, ...]) -> JobTimes:
    *instants, duration_ns = written
    values: list[int] = []
    before = 0
    for told in instants:
        if told is None:
            values.append(0)
            continue
        before = told[0] if isinstance(told, tuple) else before + told
        values.append(before)
    return JobTimes(**dict(zip(_NAMES, (*values, duration_ns), strict=True)))


TIMES = Shape(tuple[(*(Told,) * (len(_NAMES) - 1), int)], _to_wire, _from_wire)  # type: ignore[misc]
"""How JobTimes travel."""
