"""Ask for a configuration: of a load, and again of the same load after a reset (R10.1, G12)."""

from laneway.engine.draft import Draft
from laneway.engine.effects import ConfigureModel
from laneway.engine.state import ModelState


def ask_configure(draft: Draft, model: ModelState, *, again: bool = False) -> None:
    """Ask the device to take a model under the generation it has now."""
    state = draft.state
    assert model.facts is not None
    draft.ask(
        ConfigureModel(
            model=model.number,
            epoch=state.device.epoch,
            generation=model.generation,
            lane_first=model.lane_first,
            lane_count=model.lane_count,
            buffers=model.buffers,
            trials=model.facts.trials,
            timeout_ns=state.limits.configure_timeout_ns,
            again=again,
        )
    )
