"""Values that are made quickly: the same as those of the class's own constructor."""

import inspect
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from laneway.engine.inputs import TimePassed
from laneway.engine.ports import Step, make_step
from laneway.statemachines import Event
from laneway.statemachines.event import NO_DATA, make_event
from laneway.statemachines.values import opened, quick


@attrs.frozen(kw_only=True, weakref_slot=False)
class Named:
    first: int
    second: str = "two"


def test_a_quick_value_is_one_of_the_class_and_equal_and_frozen() -> None:
    made = make_event("lane", (1, 2), "commit", "reserved", "ready", 1, 1)
    own = Event("lane", (1, 2), "commit", "reserved", "ready", 1, 1)
    assert type(made) is Event and made == own and hash(made) == hash(own)
    assert made.data is NO_DATA and repr(made) == repr(own)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        made.epoch = 2  # type: ignore[misc]
    assert attrs.evolve(made, epoch=2).epoch == 2


def test_names_and_defaults_are_those_of_the_class() -> None:
    make = quick(Named)
    assert make(first=1) == Named(first=1) and make(second="b", first=2) == Named(
        first=2, second="b"
    )
    positional: Any = make
    with pytest.raises(TypeError):
        positional(1)
    with pytest.raises(TypeError):
        make()  # type: ignore[call-arg]


def test_a_class_that_does_more_than_take_its_fields_is_refused() -> None:
    @attrs.frozen
    class Weak:
        one: int

    @attrs.frozen(weakref_slot=False)
    class Checked:
        one: int = attrs.field(validator=attrs.validators.ge(0))

    @attrs.frozen(weakref_slot=False)
    class Converted:
        one: int = attrs.field(converter=int)

    @attrs.frozen(weakref_slot=False)
    class Made:
        one: list[int] = attrs.Factory(list)

    @attrs.frozen(weakref_slot=False)
    class Busy:
        one: int

        def __attrs_post_init__(self) -> None:
            raise AssertionError("never")

    for refused in (Weak, Checked, Converted, Made, Busy):
        with pytest.raises(TypeError):
            quick(refused)
        with pytest.raises(TypeError):
            opened(refused)


@pytest.mark.parametrize(
    ("make", "cls", "given"),
    [
        (make_event, Event, ("lane", (1, 2), "commit", "reserved", "ready", 1, 2, {"by": 1})),
        (make_step, Step, (41, 1_000, TimePassed(), ())),
    ],
)
def test_what_is_written_out_has_the_parameters_of_the_class(
    make: Callable[..., Any], cls: type, given: tuple[Any, ...]
) -> None:
    """Each field is given a value of its own and comes out where the constructor puts it."""
    told = inspect.signature(make).parameters
    own = inspect.signature(cls).parameters
    assert [(p.name, p.kind, p.default) for p in told.values()] == [
        (p.name, p.kind, p.default) for p in own.values()
    ]
    named = dict(zip(own, given, strict=True))
    made, expected = make(**named), cls(**named)
    assert type(made) is cls and made == expected and repr(made) == repr(expected)
    needed = {name: named[name] for name, p in own.items() if p.default is p.empty}
    assert make(**needed) == cls(**needed)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(made, next(iter(named)), None)
