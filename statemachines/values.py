"""Make the values of which a tick makes dozens, at little cost.

Theory of operation. What a job has for each of its rows is a frozen struct of `msgspec`, whose
constructor is in C. A row of a journal is a named tuple: ``of_tuple`` makes it from a plain tuple
of its fields without the detour over its own constructor.

Other values are of frozen classes. A frozen class forbids assignment, so its own constructor goes
around that for each field, which takes several times as long as assigning. ``quick`` makes a class
without that ban and with the same slots. Its constructor fills a new object by plain assignment and
at its end gives it the frozen class: the two are laid out alike, which Python checks at every
change of class. What comes out is a value of the frozen class like any other. Of those that a tick
makes most of, events and steps, the function is written out beside the class, with ``opened``: a
call of a plain function that assigns costs half of what a constructor costs that does it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import attrs

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")


def of_tuple(cls: type[Value]) -> Callable[[Any], Value]:
    """Return what makes a named tuple of a plain one that has all its fields, in order.

    Why it counts nothing: whoever names the type of the plain tuple lets the type checker do it.
    """
    return cast(Callable[[Any], Value], partial(tuple.__new__, cls))


def quick(cls: Callable[Parameters, Value]) -> Callable[Parameters, Value]:
    """Return what makes values of a frozen class, with the parameters of its constructor.

    Raises: TypeError for a class that must do more than take its fields over (a validator, a
    converter, ``__attrs_post_init__``, a default that is made), or that can be referred to weakly.
    """
    frozen = cast(type, cls)
    fields = _taken_over(frozen)

    def freeze(value: object) -> None:
        value.__class__ = frozen

    made = attrs.make_class(
        frozen.__name__,
        {each.name: attrs.field(default=each.default, kw_only=each.kw_only) for each in fields},
        class_body={"__attrs_post_init__": freeze},
        slots=True,
        weakref_slot=False,
        eq=False,
        repr=False,
    )
    return cast(Callable[Parameters, Value], made)


def opened(cls: type) -> Callable[[], Any]:
    """Return a class without fields' values, with the slots of a frozen one, to assign to.

    Whoever has filled an object of it gives it the frozen class. Raises: TypeError, as ``quick``.
    """
    names = tuple(field.name for field in _taken_over(cls))
    return cast(Callable[[], Any], type(cls.__name__, (), {"__slots__": names}))


def _taken_over(frozen: type) -> tuple[Any, ...]:
    """Return the fields of a class that does no more than take them over. Raises: TypeError."""
    fields = attrs.fields(frozen)
    names = tuple(field.name for field in fields)
    if frozen.__dict__.get("__slots__") != names or hasattr(frozen, "__attrs_post_init__"):
        raise TypeError(f"{frozen.__name__} needs slots, no weak references and no work when made")
    for field in fields:
        is_made = isinstance(field.default, attrs.Factory)  # type: ignore[arg-type]
        if field.validator or field.converter or is_made:
            raise TypeError(f"{frozen.__name__}.{field.name} is not taken as it is given")
    return tuple(fields)
