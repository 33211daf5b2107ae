"""Who is to blame for faults: a score by content, and the refusal of what failed twice (9.3, G15).

Every request of a job that a fault names is accused; one that gets through alone afterwards is
pardoned. Of jobs that stand still the oldest is named, since it holds up the others; and once a
reset is decided, only an exception of its own names a further one (``is_blamed``). A content that
is accused again while a first accusation stands is poison: requests with the same prompt are
refused for a while, so that no client can bring a device down over and over.
"""

import hashlib
import struct

from laneway.engine.ladder import Ladder
from laneway.engine.limits import Limits
from laneway.engine.state import JobState, State

EXCEPTIONS = ("ccu", "dma")
"""Kinds of fault that come with a record of the job that raised them."""

POISON_SCORE = 2
ACCUSED_MAX = 1024


def is_blamed(state: State, kind: str) -> bool:
    """Return whether the requests of a job that fails now are suspects, not innocent (9.3).

    While a reset waits for what is in flight its cause is known: what else comes to no end, or to a
    bad one, does so because of it.
    """
    recovery = state.ladder.recovery
    is_decided = recovery is not None and not recovery.watching
    return kind in EXCEPTIONS or state.device.state != "suspect" or not is_decided


def oldest_in_flight(state: State, told: JobState) -> JobState:
    """Return the job that is to blame when ``told`` stands still: the oldest that was handed over.

    The hang rule speaks when the device has not moved at all, or of the oldest first (E16).
    """
    handed_over = (job for job in state.jobs.values() if job.state != "planned")
    return next(handed_over, told)


def content_of(prompt: tuple[int, ...]) -> str:
    """Return what stands for a prompt: half of the SHA-256 of its ids, in hex."""
    packed = struct.pack(f"<{len(prompt)}q", *prompt)
    return hashlib.sha256(packed).hexdigest()[:32]


def accuse(ladder: Ladder, limits: Limits, content: str, now_ns: int) -> None:
    """Add one to the score of a content; what is too long ago, or too much, is forgotten.

    Several requests with one prompt in the job of a fault are one accusation of it.
    """
    score, at_ns = ladder.guilt.pop(content, (0, 0))
    if score and at_ns == now_ns:
        score -= 1
    if now_ns - at_ns >= limits.poison_window_ns:
        score = 0
    kept = [
        (known, entry)
        for known, entry in ladder.guilt.items()
        if now_ns - entry[1] < limits.poison_window_ns
    ]
    ladder.guilt = dict(kept[-(ACCUSED_MAX - 1) :])
    ladder.guilt[content] = (score + 1, now_ns)


def pardon(ladder: Ladder, content: str) -> None:
    """Take one accusation back: its request got through alone."""
    score, at_ns = ladder.guilt.pop(content, (0, 0))
    if score > 1:
        ladder.guilt[content] = (score - 1, at_ns)


def is_poison(ladder: Ladder, limits: Limits, prompt: tuple[int, ...], now_ns: int) -> bool:
    """Return whether requests with this prompt are refused now."""
    if not ladder.guilt:
        return False
    score, at_ns = ladder.guilt.get(content_of(prompt), (0, 0))
    return score >= POISON_SCORE and now_ns - at_ns < limits.poison_window_ns
