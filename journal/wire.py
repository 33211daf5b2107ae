"""Derive from an attrs class how its values look as JSON arrays, and check that they do.

Theory of operation. A value of an attrs class is an array of its fields in their order, nested
values likewise; a tuple is an array; integers, floats, strings, booleans and null stand for
themselves. ``Shape`` holds for one type what `msgspec` checks on the way in (a plain type: exact
length, exact types, nothing extra) and the two conversions, which are None where nothing is to be
done, so that long runs of integers are never touched by Python code.
"""

import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import attrs

Convert = Callable[[Any], Any]


@attrs.frozen
class Shape:
    """How one type travels: the type that is checked, and the conversions to and from it."""

    checked: Any
    to_wire: Convert | None = None
    from_wire: Convert | None = None


def shape_of(annotation: Any, *, special: Mapping[Any, Shape] | None = None) -> Shape:
    """Return the shape of an annotation: int, str, bool, float, ``X | None``, tuple, attrs class.

    ``special`` replaces the shape of single fields, named (class, field).

    Raises: TypeError for a type that has no wire form.
    """
    if annotation in (int, str, bool, float):
        return Shape(annotation)
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is tuple:
        return _tuple_shape(arguments, special or {})
    if origin in (types.UnionType, typing.Union) and len(arguments) == 2:
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return _optional_shape(shape_of(inner, special=special))
    if isinstance(annotation, type) and attrs.has(annotation):
        return value_shape(annotation, special=special or {})
    raise TypeError(f"no wire form for {annotation}")


def value_shape(cls: type, *, special: Mapping[Any, Shape], version: int | None = None) -> Shape:
    """Return the shape of an attrs class; ``version`` is put before the fields if given."""
    hints = typing.get_type_hints(cls)
    names = tuple(field.name for field in attrs.fields(cls))
    shapes = [special.get((cls, name)) or shape_of(hints[name], special=special) for name in names]
    checked = [shape.checked for shape in shapes]
    if version is not None:
        checked.insert(0, typing.Literal[version])
    return Shape(
        _tuple_type(*checked),
        _value_to_wire(names, [shape.to_wire for shape in shapes], version),
        _value_from_wire(cls, names, [shape.from_wire for shape in shapes], version),
    )


def _value_to_wire(
    names: tuple[str, ...], converts: list[Convert | None], version: int | None
) -> Convert:
    items = [] if version is None else [str(version)]
    for index, (name, convert) in enumerate(zip(names, converts, strict=True)):
        items.append(f"value.{name}" if convert is None else f"convert_{index}(value.{name})")
    return _compile("value", f"({''.join(item + ', ' for item in items)})", converts)


def _value_from_wire(
    cls: type, names: tuple[str, ...], converts: list[Convert | None], version: int | None
) -> Convert:
    skip = 0 if version is None else 1
    items = []
    for index, (name, convert) in enumerate(zip(names, converts, strict=True)):
        item = f"row[{index + skip}]"
        items.append(f"{name}={item if convert is None else f'convert_{index}({item})'}")
    return _compile("row", f"cls({', '.join(items)})", converts, cls=cls)


def _compile(argument: str, body: str, converts: list[Convert | None], **names: object) -> Convert:
    """Compile one expression over the conversions of a class's fields.

    Why: this is the inner loop of writing and reading; attrs makes its methods the same way. All
    names in it are fields of our own classes.
    """
    scope = {f"convert_{index}": convert for index, convert in enumerate(converts)} | names
    made: Convert = eval(f"lambda {argument}: {body}", scope)
    return made


def _optional_shape(inner: Shape) -> Shape:
    return Shape(inner.checked | None, _unless_none(inner.to_wire), _unless_none(inner.from_wire))


def _unless_none(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda value: None if value is None else convert(value)


def _tuple_shape(arguments: tuple[Any, ...], special: Mapping[Any, Shape]) -> Shape:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        item = shape_of(arguments[0], special=special)
        return Shape(_tuple_type(item.checked, ...), _each(item.to_wire), _each(item.from_wire))
    items = [shape_of(argument, special=special) for argument in arguments]
    if any(item.to_wire is not None for item in items):
        raise TypeError(f"no wire form for values inside a tuple of fixed length: {arguments}")
    return Shape(_tuple_type(*(item.checked for item in items)))


def _tuple_type(*items: Any) -> Any:
    return types.GenericAlias(tuple, items)


def _each(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda values: tuple(map(convert, values))
