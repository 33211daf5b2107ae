"""What is permitted.

Every lifecycle of laneway, declared once with `transitions` and compiled to a table.
"""

from collections.abc import Mapping
from types import MappingProxyType

from laneway.statemachines.buffer import BUFFER
from laneway.statemachines.declare import Edge, Machine
from laneway.statemachines.device import DEVICE
from laneway.statemachines.event import Event, entity_name
from laneway.statemachines.job import JOB
from laneway.statemachines.kv import LANE
from laneway.statemachines.model import MODEL
from laneway.statemachines.request import REQUEST

MACHINES: Mapping[str, Machine] = MappingProxyType(
    {machine.name: machine for machine in (REQUEST, JOB, BUFFER, LANE, MODEL, DEVICE)}
)


def next_state(machine: str, state: str, trigger: str) -> str | None:
    """Return where ``trigger`` leads from ``state``, or None where nothing is declared."""
    return MACHINES[machine].table.get((state, trigger))


__all__ = ["MACHINES", "Edge", "Event", "Machine", "entity_name", "next_state"]
