"""Write the declared lifecycles as Markdown with Mermaid diagrams.

The text of specs/machines.md.
"""

from collections.abc import Iterable

from laneway.statemachines import MACHINES, Machine
from laneway.statemachines.coupling import COUPLINGS

HEAD = """\
# Lifecycles

Generated from `statemachines/` by `laneway machines --markdown`; a test keeps it current.
"Decided by" names the function under `engine/`.
"""


def mermaid(machine: Machine) -> str:
    """Return the machine as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {machine.initial}"]
    for edge in machine.edges:
        lines += [f"    {source} --> {edge.dest}: {edge.trigger}" for source in edge.sources]
    lines += [f"    {state} --> [*]" for state in machine.states if state in machine.final]
    return "\n".join(lines)


def markdown(machines: Iterable[Machine] = tuple(MACHINES.values())) -> str:
    """Return the whole page: per machine diagram, states and edges, then the couplings."""
    parts = [HEAD]
    for machine in machines:
        parts += [
            f"## {machine.name}\n\n{machine.meaning[0].upper()}{machine.meaning[1:]}.\n",
            f"```mermaid\n{mermaid(machine)}\n```\n",
            _table(("state", "meaning"), _states(machine)),
            _table(("trigger", "from", "to", "decided by", "rule"), _edges(machine)),
        ]
    parts.append("## Couplings\n\nTransitions that must share a step.\n")
    parts.append(_table(("when", "then one of", "why", "rule"), _couplings()))
    return "\n".join(parts)


def _states(machine: Machine) -> list[tuple[str, ...]]:
    return [
        (f"`{state}`" + (" (final)" if state in machine.final else ""), meaning)
        for state, meaning in machine.states.items()
    ]


def _edges(machine: Machine) -> list[tuple[str, ...]]:
    return [
        (f"`{edge.trigger}`", ", ".join(edge.sources), edge.dest, edge.by, edge.rule)
        for edge in machine.edges
    ]


def _couplings() -> list[tuple[str, ...]]:
    return [
        (
            " ".join(coupling.when),
            ", ".join(" ".join(then) for then in coupling.then),
            coupling.why,
            coupling.rule,
        )
        for coupling in COUPLINGS
    ]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
