"""Write the instants of a job compactly: each as the time since the one before.

A device tells nine instants of a job that lie close together, on a clock that may have run for
weeks. The first is written as it is, each later one as what has passed since the last one told; one
that was not told (0) is null, and one that lies before the last (which no sound device says) is an
array of the instant itself. The duration at the end stands as it is. One value has one form.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

import attrs

from laneway.engine.inputs import JobTimes
from laneway.journal.wire import Shape
from laneway.statemachines.values import quick

_NAMES = tuple(field.name for field in attrs.fields(JobTimes))
_values_of = attrgetter(*_NAMES)
_make = quick(JobTimes)
_INTEGERS = frozenset({int})

Told = int | tuple[int] | None


def _to_wire(times: JobTimes) -> Sequence[Any]:
    a, b, c = times.submit_ns, times.accept_ns, times.h2d_begin_ns
    d, e, f = times.h2d_end_ns, times.exec_begin_ns, times.exec_end_ns
    g, h, i = times.d2h_begin_ns, times.d2h_end_ns, times.visible_ns
    if 0 < a <= b <= c <= d <= e <= f <= g <= h <= i:  # as a sound device tells them
        last = times.postprocess_ns
        return (a, b - a, c - b, d - c, e - d, f - e, g - f, h - g, i - h, last)
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
    if _INTEGERS.issuperset(map(type, instants)):
        a, b, c, d, e, f, g, h, i = accumulate(instants)
        return _make(
            submit_ns=a,
            accept_ns=b,
            h2d_begin_ns=c,
            h2d_end_ns=d,
            exec_begin_ns=e,
            exec_end_ns=f,
            d2h_begin_ns=g,
            d2h_end_ns=h,
            visible_ns=i,
            postprocess_ns=duration_ns,
        )
    values: list[int] = []
    before = 0
    for told in instants:
        if told is None:
            values.append(0)
            continue
        before = told[0] if isinstance(told, tuple) else before + told
        values.append(before)
    return _make(**dict(zip(_NAMES, (*values, duration_ns), strict=True)))


def is_written_so(written: tuple[Any, ...]) -> bool:
    """Return whether this is the one form of the instants it stands for."""
    if _INTEGERS.issuperset(map(type, written)):
        return bool(written[0] > 0 and min(written[1:-1]) >= 0)
    return tuple(_to_wire(_from_wire(written))) == written


TIMES = Shape(tuple[(*(Told,) * (len(_NAMES) - 1), int)], _to_wire, _from_wire)  # type: ignore[misc]
"""How JobTimes travel."""
