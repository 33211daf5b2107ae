"""What an event of the device changes in the memory of the recovery ladder (E28)."""

import attrs

from laneway.engine.inputs import Input, ResetFinished
from laneway.engine.ladder import (
    CCU,
    INSPECT,
    OUT,
    PROCESS,
    Recovery,
    budget,
    follows_foreign_reset,
    within,
)
from laneway.engine.state import Ledger, State
from laneway.statemachines import Event


def evolve_ladder(state: State, event: Event, taken: Input) -> None:
    """Follow a recovery from the rung chosen to its end; count what it used up."""
    if isinstance(taken, ResetFinished):
        if follows_foreign_reset(state.device.device_epoch, taken):
            _note_epoch_change(state)
        newest = max(taken.epoch_before, taken.epoch_after)
        state.device.device_epoch = max(state.device.device_epoch, newest)
    match event.trigger:
        case "escalate":
            _escalate(state, event)
        case "reset":
            _count_attempt(state, event)
        case "recover":
            state.ladder.breaker = "half_open"
            if isinstance(taken, ResetFinished):
                _count_anew(state, taken)
            if event.epoch != state.device.epoch:
                state.device.epoch = event.epoch
                state.next_epoch = event.epoch + 1
        case "serve":
            state.ladder.breaker = "closed"
            state.ladder.recovery = None
            state.device.refusals_in_a_row = state.device.backoff_tries = 0
        case "absolve":
            state.ladder.recovery = None
        case "lose":
            state.ladder.recovery = None
            _stamp(state, PROCESS, int(event.data.get("rung", OUT) == PROCESS))
        case "open" | "abandon":
            state.ladder.recovery = None
        case _:
            pass


def _count_anew(state: State, taken: ResetFinished) -> None:
    """Begin a new account of jobs, where the device's counters stand after a reset (E14)."""
    device = state.device
    device.ledger = Ledger()
    device.counter_differences = 0
    if device.facts is not None and taken.health is not None:
        device.facts = attrs.evolve(device.facts, counters=taken.health.counters)


def note_exception(state: State) -> None:
    """Remember that an exception was seen now (row 6)."""
    window_ns = state.limits.exceptions_window_ns
    recent = within(state.ladder.exceptions_ns, state.now_ns, window_ns)
    state.ladder.exceptions_ns = (*recent, state.now_ns)


def _escalate(state: State, event: Event) -> None:
    data = event.data
    before = state.ladder.recovery
    same = before is not None and before.rung == data["rung"]
    state.ladder.recovery = Recovery(
        cause=data["cause"],
        reason=data["reason"],
        rung=data["rung"],
        begun_ns=before.begun_ns if before is not None else state.now_ns,
        until_ns=data.get("until_ns", 0),
        attempts=before.attempts if before is not None and same else 0,
        resets=before.resets if before is not None else 0,
        code=data.get("code", before.code if before is not None else 0),
        watching=data.get("watching", False),
        pausing=data.get("pausing", False),
        level=data.get("level", 0),
    )


def _count_attempt(state: State, event: Event) -> None:
    """Count an attempt before it is made; one that follows a fault in half-open counts double."""
    ladder = state.ladder
    assert ladder.recovery is not None
    _stamp(state, event.data["rung"], event.data["stamps"])
    if event.data["level"] == INSPECT:
        _note_epoch_change(state)
    ladder.recovery.rung = event.data["rung"]
    ladder.recovery.attempts += 1
    ladder.recovery.resets += 1
    ladder.breaker = "open"


def _note_epoch_change(state: State) -> None:
    """Remember that another process reset the board (row 22)."""
    window_ns = state.limits.exceptions_window_ns
    recent = within(state.ladder.epoch_changes_ns, state.now_ns, window_ns)
    state.ladder.epoch_changes_ns = (*recent, state.now_ns)


def _stamp(state: State, rung: int, count: int) -> None:
    if count and rung >= CCU:
        window_ns = budget(state.limits, rung).window_ns
        recent = within(state.ladder.attempts.get(rung, ()), state.now_ns, window_ns)
        state.ladder.attempts[rung] = recent + (state.now_ns,) * count
