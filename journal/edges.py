"""Codes for the edges of the declared machines, so that an event names its own in a few bytes.

Theory of operation. A file holds a table ``edge``: a code for each (machine, trigger, source, dest)
that was declared when the file was made. It never changes and is covered by the chain like
``meta``. An event of an edge that was declared later is written with the four names in the place of
the code, so a file goes on under newer code, and is read by what stands in it.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs

from laneway.statemachines import MACHINES

Edge = tuple[str, str, str, str]
"""machine, trigger, source, dest."""

CODES_MAX = 1 << 16


@attrs.frozen(eq=False)
class Edges:
    """The codes of one file: ``codes`` by edge, ``names`` by code."""

    codes: Mapping[Edge, int]
    names: Mapping[int, Edge]

    def rows(self) -> list[tuple[int, str, str, str, str]]:
        """Return the rows of the table, in order of the code."""
        return [(code, *self.names[code]) for code in sorted(self.names)]


def edges_of(rows: Iterable[tuple[int, str, str, str, str]]) -> Edges:
    """Return the codes that stand in the rows of a table.

    Raises: ValueError for an edge or a code that stands there twice, or a code out of range.
    """
    names: dict[int, Edge] = {}
    codes: dict[Edge, int] = {}
    for code, machine, trigger, source, dest in rows:
        edge = (machine, trigger, source, dest)
        if code in names or edge in codes or not 0 <= code < CODES_MAX:
            raise ValueError(f"the edge {'/'.join(edge)} has code {code}, which cannot be")
        names[code], codes[edge] = edge, code
    return Edges(MappingProxyType(codes), MappingProxyType(names))


def _declared() -> Edges:
    edges = [
        (name, trigger, source, dest)
        for name, machine in MACHINES.items()
        for (source, trigger), dest in machine.table.items()
    ]
    return edges_of((code, *edge) for code, edge in enumerate(edges))


DECLARED = _declared()
"""The codes of a file that is made today."""
