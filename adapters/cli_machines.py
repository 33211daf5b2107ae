"""``laneway machines``: the declared lifecycles."""

import json
from typing import Annotated

import typer
from rich.table import Table

from laneway.adapters.screen import wide_console
from laneway.engine.errors import ConfigurationError
from laneway.statemachines import MACHINES, Edge, Machine
from laneway.statemachines.coupling import couplings_of, couplings_with
from laneway.statemachines.draw import markdown

app = typer.Typer()


@app.callback(invoke_without_command=True)
def machines(
    context: typer.Context,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="The whole page of specs/machines.md.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object a transition.")] = False,
) -> None:
    """Show the declared lifecycles: machines, states and triggers, what is permitted.

    Examples:
        laneway machines

        laneway machines explain buffer quarantine

        laneway machines --markdown > specs/machines.md

    """
    if context.invoked_subcommand is not None:
        return
    if as_markdown:
        print(markdown(), end="")
        return
    if as_json:
        for machine in MACHINES.values():
            for (source, trigger), dest in machine.table.items():
                print(json.dumps(_row(machine, source, trigger, dest)))
        return
    console = wide_console()
    for machine in MACHINES.values():
        table = Table("state", "meaning", "leaves by", title=f"{machine.name}: {machine.meaning}")
        for state, meaning in machine.states.items():
            ways = [trigger for (source, trigger) in machine.table if source == state]
            table.add_row(state, meaning, ", ".join(ways) or "(final)")
        console.print(table)


def _row(machine: Machine, source: str, trigger: str, dest: str) -> dict[str, str]:
    edge = machine.edge(source, trigger)
    assert edge is not None
    return {
        "machine": machine.name,
        "trigger": trigger,
        "source": source,
        "dest": dest,
        "decided_by": edge.by,
        "rule": edge.rule,
    }


@app.command()
def explain(
    machine: Annotated[str, typer.Argument(help="request, job, buffer, lane, model, device.")],
    name: Annotated[str, typer.Argument(help="A state or a trigger of it.")],
) -> None:
    """Explain one state or trigger: meaning, sources, destinations, couplings, decider, rule.

    Examples:
        laneway machines explain buffer quarantined

        laneway machines explain lane reserve

    """
    found = MACHINES.get(machine)
    if found is None:
        raise ConfigurationError(f"no machine {machine!r}; there are {', '.join(MACHINES)}")
    if name not in found.states and name not in found.triggers:
        known = ", ".join([*found.states, *found.triggers])
        raise ConfigurationError(f"{machine} has no state or trigger {name!r}; it has {known}")
    if name in found.states:
        _explain_state(found, name)
    for edge in found.edges:
        if edge.trigger == name:
            _explain_edge(found, edge)


def _explain_state(machine: Machine, state: str) -> None:
    kind = "final state" if state in machine.final else "state"
    print(f"{machine.name} {state} ({kind}): {machine.states[state]}")
    for edge in machine.edges:
        if edge.dest == state:
            print(f"  reached by {edge.trigger} from {', '.join(edge.sources)}  {_said(edge)}")
            _explain_couplings(machine, edge, indent="    ")
    for edge in machine.edges:
        if state in edge.sources:
            print(f"  left by {edge.trigger} to {edge.dest}  {_said(edge)}")


def _explain_edge(machine: Machine, edge: Edge) -> None:
    print(f"{machine.name} {edge.trigger}: {', '.join(edge.sources)} -> {edge.dest}")
    if edge.why:
        print(f"  why: {edge.why}")
    _explain_couplings(machine, edge, indent="  ")
    print(f"  decided by: engine/{edge.by.replace('.', '.py, function ')}")
    print(f"  rule: {edge.rule}")


def _said(edge: Edge) -> str:
    return f"[{edge.by}; {edge.rule}]"


def _explain_couplings(machine: Machine, edge: Edge, *, indent: str) -> None:
    for coupling in couplings_of(machine.name, edge.trigger):
        then = " or ".join(" ".join(pair) for pair in coupling.then)
        print(f"{indent}in the same step: {then} ({coupling.why}) [{coupling.rule}]")
    for coupling in couplings_with(machine.name, edge.trigger):
        print(f"{indent}goes with: {' '.join(coupling.when)} ({coupling.why}) [{coupling.rule}]")
