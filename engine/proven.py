"""What passed golden on this device, by the name it served (R14.5, E24): where to go back to."""

from laneway.engine.inputs import DeviceFacts
from laneway.engine.state import ModelState, Proven, State

PROVEN_MAX = 2
"""Artifacts remembered for an alias: the one that serves it, and the one before."""


def proven_here(state: State, alias: str) -> tuple[Proven, ...]:
    """Return what passed golden for an alias on the device as it is now, the latest last."""
    facts = state.device.facts
    here = fingerprint(facts) if facts is not None else ""
    return tuple(one for one in state.proven.get(alias, ()) if one.device == here)


def forget_proven(state: State, model: ModelState) -> None:
    """Forget what a model passed golden with: it does not any more; called by ``evolve`` alone."""
    sha256 = "" if model.facts is None else model.facts.sha256
    kept = tuple(one for one in state.proven.get(model.alias, ()) if one.sha256 != sha256)
    if kept:
        state.proven[model.alias] = kept
    else:
        state.proven.pop(model.alias, None)


def passed_here(state: State, sha256: str) -> bool:
    """Return whether an artifact passed golden on the device as it is now, under any name."""
    return any(one.sha256 == sha256 for name in state.proven for one in proven_here(state, name))


def fingerprint(facts: DeviceFacts) -> str:
    """Return what tells a device, with its versions, from others (E24)."""
    versions = (facts.runtime_version, facts.driver_version, facts.firmware_version)
    return "/".join((facts.product, facts.serial, *versions))


def remember_proven(state: State, model: ModelState) -> None:
    """Remember what a model passed golden with; called by ``evolve`` alone."""
    assert model.facts is not None
    assert state.device.facts is not None
    sha256 = model.facts.sha256
    device = fingerprint(state.device.facts)
    others = [one for one in state.proven.get(model.alias, ()) if one.sha256 != sha256]
    newest = Proven(source=model.source, sha256=sha256, device=device)
    state.proven[model.alias] = (*others, newest)[-PROVEN_MAX:]
