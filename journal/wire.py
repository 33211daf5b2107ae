"""Derive from an attrs class how its values look as JSON arrays, and check that they do.

Theory of operation. A value of an attrs class is an array of its fields in their order, nested
values likewise; a tuple is an array; integers, floats, strings, booleans and null stand for
themselves. ``Shape`` holds for one type what `msgspec` checks on the way in (a plain type: exact
length, exact types, nothing extra) and the two conversions, which are None where nothing is to be
done, so that long runs of integers are never touched by Python code.

A tuple of values that mostly hold their defaults travels by columns (``columns_shape``): one array
for each field, null where every value has the default, and nothing after the last column that says
something. So a batch of sampled tokens is ``[[101,102,103]]``.
"""

import types
import typing
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import attrs
import msgspec

from laneway.statemachines.values import quick

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
    return _compile("row", f"cls({', '.join(items)})", converts, cls=_maker(cls))


def _maker(cls: type) -> Callable[..., Any]:
    """Return the quickest way to a value of a class."""
    try:
        return quick(cls)
    except TypeError:
        return cls


def _compile(argument: str, body: str, converts: list[Convert | None], **names: object) -> Convert:
    """Compile one expression over the conversions of a class's fields.

    Why: this is the inner loop of writing and reading; attrs makes its methods the same way. All
    names in it are fields of our own classes.
    """
    scope = {f"convert_{index}": convert for index, convert in enumerate(converts)} | names
    made: Convert = eval(f"lambda {argument}: {body}", scope)
    return made


@attrs.frozen
class _Column:
    """One field of values that travel by columns; a field without default is always written."""

    name: str
    values_of: Callable[[Any], Any]
    shape: Shape
    default: Any

    def to_wire(self, values: tuple[Any, ...]) -> list[Any] | None:
        """Return what every value holds in this field, or None where that is the default."""
        column = list(map(self.values_of, values))
        if self.shape.to_wire is not None:
            column = list(map(self.shape.to_wire, column))
        if self.default is not msgspec.NODEFAULT and column.count(self.default) == len(column):
            return None
        return column

    def from_wire(self, column: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the field of each value."""
        convert = self.shape.from_wire
        return column if convert is None else tuple(map(convert, column))


def columns_shape(
    cls: type[msgspec.Struct], *, special: Mapping[Any, Shape] | None = None
) -> Shape:
    """Return the shape of a tuple of structs by columns.

    The first field has no default: its column tells how many values there are. ``special`` as in
    ``shape_of``; a conversion must keep the default as it is.
    """
    hints = typing.get_type_hints(cls)
    columns = []
    for field in msgspec.structs.fields(cls):
        given = (special or {}).get((cls, field.name))
        shape = given or shape_of(hints[field.name], special=special)
        columns.append(_Column(field.name, attrgetter(field.name), shape, field.default))
    first, *others = columns
    none = msgspec.NODEFAULT
    if first.default is not none or any(column.default is none for column in others):
        raise TypeError(f"{cls.__name__} cannot travel by columns: only its first field has none")
    fields: list[Any] = [(first.name, _tuple_type(first.shape.checked, ...))]
    fields += [(c.name, _tuple_type(c.shape.checked, ...) | None, None) for c in others]
    checked = msgspec.defstruct(
        f"{cls.__name__}Columns", fields, array_like=True, forbid_unknown_fields=True
    )
    return Shape(checked, _columns_to_wire(columns), _columns_from_wire(cls, columns))


def _columns_to_wire(columns: list[_Column]) -> Convert:
    """Return what writes values by columns.

    By far the most values hold every default but for the first field, so that is seen at once. Why
    by identity: it is the quickest look there is, and a value it overlooks is only written the
    longer way, to the same text.
    """

    def written(values: tuple[Any, ...]) -> list[Any]:
        told = [column.to_wire(values) for column in columns]
        while told[-1] is None:
            told.pop()
        return told

    first, *others = columns
    same = " and ".join(f"value.{column.name} is default_{column.name}" for column in others)
    defaults = {f"default_{column.name}": column.default for column in others}
    converted = first.shape.to_wire is not None
    item = f"{'convert_0' if converted else ''}(value.{first.name})"
    plain = f"(only := [{item} for value in values if {same}])"
    body = f"[only] if len({plain}) == len(values) else written(values)"
    return _compile("values", body, [first.shape.to_wire], written=written, **defaults)


def _columns_from_wire(make: type, columns: list[_Column]) -> Convert:
    first, *others = columns
    body = f"tuple([make({first.name}=value) for value in values])"
    plainly = _compile("values", body, [], make=make)

    def from_wire(told: Any) -> tuple[Any, ...]:
        key = first.from_wire(getattr(told, first.name))
        names, values = [first.name], [key]
        for column in others:
            found = getattr(told, column.name)
            if found is None:
                continue
            if len(found) != len(key):
                raise ValueError(f"{len(found)} of {column.name} for {len(key)} {first.name}")
            names.append(column.name)
            values.append(column.from_wire(found))
        if len(values) == 1:
            plain: tuple[Any, ...] = plainly(key)
            return plain
        return tuple(
            [make(**dict(zip(names, row, strict=True))) for row in zip(*values, strict=True)]
        )

    return from_wire


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
