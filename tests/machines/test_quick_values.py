"""Values that ``quick`` makes: the same as those of the class's own constructor."""

from typing import Any

import attrs
import pytest

from laneway.statemachines import Event
from laneway.statemachines.event import NO_DATA, make_event
from laneway.statemachines.values import quick


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
