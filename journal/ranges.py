"""Write entity numbers compactly: an ascending run of three or more becomes ``[first, last]``.

``(1, 3, 4, 5, 6)`` is written ``[1, [3, 6]]``. The order is kept, so decoding gives exactly the
tuple that was encoded, and one tuple has one form (a run is always as long as it can be).
"""

from collections.abc import Iterable, Sequence
from itertools import count
from operator import eq

RUN_MIN = 3
ENTITIES_MAX = 1 << 20
"""Entities one event may name; a damaged range must not fill the memory."""

Item = int | tuple[int, int]


def compress(entities: Sequence[int]) -> list[Item]:
    """Return the compact form of entity numbers."""
    length = len(entities)
    if length < RUN_MIN:
        return list(entities)
    first, last = entities[0], entities[-1]
    if last - first == length - 1 and tuple(range(first, last + 1)) == tuple(entities):
        return [(first, last)]
    items: list[Item] = []
    begin = 0
    for index in range(1, length + 1):
        if index < length and entities[index] == entities[index - 1] + 1:
            continue
        if index - begin >= RUN_MIN:
            items.append((entities[begin], entities[index - 1]))
        else:
            items.extend(entities[begin:index])
        begin = index
    return items


def is_run(entities: Sequence[int]) -> bool:
    """Return whether the numbers ascend by one."""
    return all(map(eq, entities, count(entities[0])))


def expand(items: Iterable[Item]) -> tuple[int, ...]:
    """Return the entity numbers behind a compact form.

    Raises: ValueError for a run that is too short, or more than ENTITIES_MAX entities.
    """
    entities: list[int] = []
    for item in items:
        if isinstance(item, int):
            entities.append(item)
            continue
        first, last = item
        if last - first + 1 < RUN_MIN:
            raise ValueError(f"entity range [{first}, {last}] is not {RUN_MIN} or more ascending")
        if last - first >= ENTITIES_MAX - len(entities):
            raise ValueError(f"an event names more than {ENTITIES_MAX} entities")
        entities.extend(range(first, last + 1))
    return tuple(entities)
