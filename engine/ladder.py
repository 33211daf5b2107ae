"""The recovery ladder as data: causes, rungs, budgets, and the memory behind them (9.1 to 9.3).

Nothing here moves anything: ``recovering.py`` asks which rung is next and whether its budget allows
it. The memory (``Ladder``) is folded from the journal, so it survives a restart of the process
(E28).

Rungs: 0 queue or reject, 1 end one job, 2 quarantine, 3 cancel, 4 reset of the CCU, 5 reset of the
configuration, 6 soft reset of the device, 7 restart of the process, 8 out of rotation.
"""

import attrs

from laneway.engine.inputs import ResetFinished
from laneway.engine.limits import Limits

QUARANTINE, CANCEL, CCU, CONFIGURATION, DEVICE, PROCESS, OUT = range(2, 9)

LEVELS = {CCU: 1, CONFIGURATION: 2, DEVICE: 4}
"""The level of reset that a rung runs."""

MEMORY = 3
"""The level that clears dynamic memory: what rung 5 runs first where memory is the matter."""

INSPECT = 0
"""The level that runs no reset: another process did, and the device is looked at (row 22)."""

FOREIGN_RESET = "epoch changed by another (row 22)"

NUMBERS = "abnormal numbers (row 12)"
"""The cause of a generation that computes wrongly."""

GOLDEN = "golden at load, passed before (row 18)"
"""The cause of a load that ran well on this device before and does not now."""

RUNG_OF_ADVICE = {1: CCU, 2: CONFIGURATION, 3: CONFIGURATION, 4: DEVICE, 100: PROCESS}
"""What a device advises (npurt.h), as a rung; 101 and 102 are matters of an operator."""

GONE = ("wedged", "lost")
"""What health says of a device that no reset of this process brings back (row 16)."""

CLASS_STALE, CLASS_GENERATION, CLASS_DEVICE, CLASS_LIBRARY = 0x02, 0x07, 0x08, 0x0F
CODE_STALE_EPOCH = 0x0201
CODE_CANCEL_TOO_LATE = 0x0609
CODE_CONFIG_LOST = 0x0702
CODE_WEDGED, CODE_LOST = 0x0802, 0x0803


@attrs.define
class Recovery:
    """A recovery under way: why, on which rung, what it waits for.

    ``until_ns``: when the drain is over, or the pause before the next reset. ``attempts``: resets
    on this rung. ``watching``: the device is unwell and is given until then to become well (row
    14). ``resets``: how many there were in all. ``level``: of its reset, 0 for the rung's own.
    """

    cause: str
    reason: str
    rung: int
    begun_ns: int
    until_ns: int = 0
    attempts: int = 0
    resets: int = 0
    code: int = 0
    watching: bool = False
    pausing: bool = False
    level: int = 0


@attrs.define
class Ladder:
    """What is remembered over restarts: attempts by rung, exceptions, epochs, guilt, breaker.

    Times are engine time in ns, oldest first, and only those that still count are kept. ``guilt``
    is (content, score, time of the last). ``breaker``: closed, open, or half_open after a verified
    reset until the proof after it is complete.
    """

    attempts: dict[int, tuple[int, ...]] = attrs.Factory(dict)
    exceptions_ns: tuple[int, ...] = ()
    epoch_changes_ns: tuple[int, ...] = ()
    guilt: dict[str, tuple[int, int]] = attrs.Factory(dict)
    breaker: str = "closed"
    recovery: Recovery | None = None


@attrs.frozen
class Budget:
    """At most ``count`` attempts in any ``window_ns``."""

    count: int
    window_ns: int


def budget(limits: Limits, rung: int) -> Budget:
    """Return the budget of a rung that has one: 4 to 7."""
    counts = {
        CCU: Budget(limits.ccu_resets_max, limits.ccu_resets_window_ns),
        CONFIGURATION: Budget(
            limits.configuration_resets_max, limits.configuration_resets_window_ns
        ),
        DEVICE: Budget(limits.device_resets_max, limits.device_resets_window_ns),
        PROCESS: Budget(limits.process_restarts_max, limits.process_restarts_window_ns),
    }
    return counts[rung]


def within(times_ns: tuple[int, ...], now_ns: int, window_ns: int) -> tuple[int, ...]:
    """Return the times that are younger than a window."""
    return tuple(at for at in times_ns if now_ns - at < window_ns)


def is_spent(ladder: Ladder, limits: Limits, rung: int, now_ns: int) -> bool:
    """Return whether the budget of a rung allows no further attempt now."""
    allowed = budget(limits, rung)
    used = within(ladder.attempts.get(rung, ()), now_ns, allowed.window_ns)
    return len(used) >= allowed.count


def affordable_rung(ladder: Ladder, limits: Limits, rung: int, now_ns: int) -> int:
    """Return the lowest rung from ``rung`` on whose budget is not spent; OUT at the end.

    Rungs below the first reset cost nothing and are the caller's business.
    """
    while rung < OUT and is_spent(ladder, limits, rung, now_ns):
        rung += 1
    return rung


def pause_ns(ladder: Ladder, limits: Limits, rung: int, now_ns: int) -> int:
    """Return how long to wait before the next reset of the device: 60, 120, 240 s and so on.

    Only rung 6 pauses; its first attempt in a window does not.
    """
    if rung != DEVICE:
        return 0
    used = within(ladder.attempts.get(DEVICE, ()), now_ns, limits.device_resets_window_ns)
    if not used:
        return 0
    wait_ns = limits.device_reset_pause_ns << (len(used) - 1)
    return max(0, used[-1] + wait_ns - now_ns)


def is_beyond_lanes(code: int) -> bool:
    """Return whether a KV list failed because generation, epoch or device is gone (rows 15, 20).

    No further try helps then, nor is any lane more in doubt than the others.
    """
    gone = (CLASS_STALE, CLASS_DEVICE, CLASS_LIBRARY)
    return code == CODE_CONFIG_LOST or code >> 8 in gone


def follows_foreign_reset(device_epoch: int, taken: ResetFinished) -> bool:
    """Return whether a reset found the device in a later epoch than any known (row 22)."""
    return taken.level != INSPECT and taken.epoch_before > device_epoch


def first_rung(kind: str, code: int, *, quiescent: bool, kv_effect: str) -> tuple[str, int]:
    """Return the cause and the rung that a fault begins with (the rows of 9.2).

    A code that is not known is of the most severe class that still leaves a choice: the device's.
    """
    if code in (CODE_WEDGED, CODE_LOST):
        return "device lost (row 16)", PROCESS
    if code == CODE_STALE_EPOCH:
        return FOREIGN_RESET, DEVICE
    if kind in ("ccu", "dma"):
        if quiescent and kv_effect in ("none", "applied"):
            return "exception, contained (row 6)", QUARANTINE
        return "exception, extent unknown (row 7)", CCU
    if kind == "hang":
        return "hang (row 8)", CCU
    if kind in ("aborted", "lost", "doubtful", "restore"):
        return f"job {kind}, extent unknown (row 7)", CCU
    if kind == "numeric":
        return NUMBERS, CONFIGURATION
    if code >> 8 in (CLASS_STALE, CLASS_GENERATION):
        return "generation gone (row 20)", CONFIGURATION
    return "device error (row 15)", DEVICE
