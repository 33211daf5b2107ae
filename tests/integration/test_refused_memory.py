"""A buffer whose submit was refused goes back to the pool holding nothing (E4, R4.4)."""

from pathlib import Path

import numpy as np
import pytest

from laneway.adapters import open_device
from laneway.adapters.device import NpurtDevice
from laneway.engine import Engine, Request
from laneway.journal import open_journal

MODEL = str(Path(__file__).parents[2] / "models" / "tiny-dense")


@pytest.mark.parametrize("code", ["0x0601", "0x0301", "0x0202"])
def test_a_refused_buffer_holds_nothing(code: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text(f"fault refused kind=submit_reject on=submit nth=1 code={code}\n")
    device = open_device(f"sim:?clock=virtual&faults={plan}")
    assert isinstance(device, NpurtDevice)
    with Engine(device=device, journal=open_journal(None)) as engine:
        engine.load("m", MODEL)
        stream = engine.submit(Request(model="m", prompt=(1, 2, 3), max_tokens=2))
        steps = engine.subscribe()
        refused: list[int] = []
        while not refused:
            engine.advance()
            while (step := steps.get(0)) is not None:
                for event in step.events:
                    if (event.machine, event.trigger) == ("buffer", "refuse"):
                        refused += event.entities
        # One action at a time: whoever has the buffer next has not filled it yet.
        held = next(
            model.buffers[number]
            for model in device._models.values()
            for number in refused
            if number in model.buffers
        )
        memory = held.arena.view(0, (held.arena.byte_count,), np.uint8)
        left = bool(memory.any())
        del memory  # an arena that is looked at cannot be given back
        assert not left, f"buffer/{held.number} is free and holds something"
        stream.cancel()
