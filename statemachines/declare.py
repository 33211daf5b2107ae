"""Turn a literal declaration of a lifecycle into a checked table.

`transitions` is the judge of what a declaration means.

Theory of operation. A lifecycle is data: states with one line of meaning each, edges with trigger,
sources and destination, who decides them and which requirement asks for them. ``declare`` hands
that data to ``transitions.Machine`` (no model, no callbacks, no conditions, no automatic triggers)
and reads the dense table back from the machine it built, so what runs is what `transitions`
understood. Guards belong to `engine/decide.py`, side effects to adapters, storage to the journal.
The oracle test fires every trigger from every state on a real model and compares. The table step is
two orders of magnitude faster than ``model.trigger()``, which is why the running engine never fires
the latter.
"""

from collections.abc import Mapping
from types import MappingProxyType

import attrs
from transitions import Machine as TransitionsMachine


@attrs.frozen
class Edge:
    """One declared transition: ``trigger`` moves an entity from any of ``sources`` to ``dest``.

    ``by`` names the deciding function as module.function under engine/.
    """

    trigger: str
    sources: tuple[str, ...]
    dest: str
    by: str
    rule: str
    why: str = ""


@attrs.frozen
class Machine:
    """A declared lifecycle and its compiled table.

    ``table`` maps (state, trigger) to the destination. ``dense[i][j]`` is the index of the
    destination of state i under trigger j, or -1.
    """

    name: str
    meaning: str
    initial: str
    states: Mapping[str, str]
    final: frozenset[str]
    edges: tuple[Edge, ...]
    triggers: tuple[str, ...]
    table: Mapping[tuple[str, str], str] = attrs.field(repr=False)
    dense: tuple[tuple[int, ...], ...] = attrs.field(repr=False)

    def next_state(self, state: str, trigger: str) -> str | None:
        """Return where ``trigger`` leads from ``state``, or None if nothing is declared."""
        return self.table.get((state, trigger))

    def edge(self, state: str, trigger: str) -> Edge | None:
        """Return the declared edge behind one cell of the table."""
        for edge in self.edges:
            if edge.trigger == trigger and state in edge.sources:
                return edge
        return None


class DeclarationError(Exception):
    """A declaration contradicts itself; found at import, so it never reaches a user."""


def declare(
    *,
    name: str,
    meaning: str,
    initial: str,
    states: dict[str, str],
    final: tuple[str, ...],
    edges: tuple[Edge, ...],
) -> Machine:
    """Build and check the machine.

    Raises: DeclarationError for unknown or unreachable states, a trigger declared twice for one
    source, a dead end that is not final.
    """
    _check(name, initial, states, final, edges)
    judge = build_transitions_machine(initial, tuple(states), edges)
    triggers = tuple(dict.fromkeys(edge.trigger for edge in edges))
    table = _read_table(judge, triggers)
    index = {state: number for number, state in enumerate(states)}
    dense = tuple(
        tuple(index[table[s, t]] if (s, t) in table else -1 for t in triggers) for s in states
    )
    return Machine(
        name=name,
        meaning=meaning,
        initial=initial,
        states=MappingProxyType(dict(states)),
        final=frozenset(final),
        edges=edges,
        triggers=triggers,
        table=table,
        dense=dense,
    )


def build_transitions_machine(
    initial: str, states: tuple[str, ...], edges: tuple[Edge, ...]
) -> TransitionsMachine:
    """Build the `transitions` machine that a declaration stands for."""
    return TransitionsMachine(
        model=None,
        states=list(states),
        initial=initial,
        auto_transitions=False,
        transitions=[
            {"trigger": edge.trigger, "source": list(edge.sources), "dest": edge.dest}
            for edge in edges
        ],
    )


def _read_table(judge: TransitionsMachine, triggers: tuple[str, ...]) -> dict[tuple[str, str], str]:
    table: dict[tuple[str, str], str] = {}
    for trigger in triggers:
        for source, found in judge.events[trigger].transitions.items():
            table[source, trigger] = str(found[0].dest)
    return table


def _check(
    name: str,
    initial: str,
    states: dict[str, str],
    final: tuple[str, ...],
    edges: tuple[Edge, ...],
) -> None:
    seen: set[tuple[str, str]] = set()
    for edge in edges:
        for state in (*edge.sources, edge.dest):
            if state not in states:
                raise DeclarationError(f"{name}: edge {edge.trigger} names unknown state {state}")
        for source in edge.sources:
            if (source, edge.trigger) in seen:
                raise DeclarationError(f"{name}: {edge.trigger} is declared twice from {source}")
            seen.add((source, edge.trigger))
            if source in final:
                raise DeclarationError(f"{name}: {edge.trigger} leaves the final state {source}")
    reached = {initial}
    frontier = [initial]
    while frontier:
        state = frontier.pop()
        for edge in edges:
            if state in edge.sources and edge.dest not in reached:
                reached.add(edge.dest)
                frontier.append(edge.dest)
    if unreached := set(states) - reached:
        raise DeclarationError(f"{name}: unreachable states {sorted(unreached)}")
    for state in states:
        if state not in final and not any(state in edge.sources for edge in edges):
            raise DeclarationError(f"{name}: no way out of {state}")
