"""KV lanes: roll back, suspect, evict (R7, E17, E19).

Reserve and commit stand where jobs are planned and completed.

The engine's word on a lane comes first; the device's bank follows through operations that are due:
COMMIT and ROLLBACK ride with the lane's next job, and eviction sends what is due together with
RELEASE at once (decision 20).
"""

from collections.abc import Sequence

from laneway.engine.draft import Draft
from laneway.engine.effects import ApplyKv, KvOperation
from laneway.engine.state import JobState


def rollback(draft: Draft, job: JobState, *, applied: bool) -> None:
    """Undo a job's reservations; ``applied``: the device bank has seen them."""
    lanes = [row.lane for row in job.rows if draft.state.lanes[row.lane].state == "reserved"]
    if lanes:
        draft.emit("lane", lanes, "rollback", generation=job.generation, data={"applied": applied})


def suspect(draft: Draft, lanes: Sequence[int], *, reason: str) -> None:
    """Declare that nobody knows what the device holds for these lanes (R7.5, G14)."""
    known = [number for number in lanes if draft.state.lanes[number].state != "unknown"]
    if known:
        generation = draft.state.lanes[known[0]].generation
        draft.emit_each("lane", known, "suspect", generation=generation, data={"reason": reason})


def evict_if_idle(draft: Draft, number: int) -> None:
    """Give a lane back whose owner has ended.

    Nothing happens while a job still names it (E19), or when it is unknown.
    """
    if draft.state.lanes[number].state == "ready":
        evict(draft, (number,))


def evict(draft: Draft, numbers: tuple[int, ...]) -> None:
    """Give ready lanes of one model back; the device is told at once, of each lane by itself.

    Why a list for each lane: a list is applied whole or not at all, so one that fails would leave
    the device's word on the other lanes behind the engine's, unnoticed (row 20).

    The bank is asked for a RELEASE only if a RESERVE of this binding was ever applied: otherwise
    the lane has an owner here and none there, and a bank may call the release of what it does not
    hold a mistake, which would put the lane in doubt for nothing (row 19).
    """
    lanes = [draft.state.lanes[number] for number in numbers]
    held = [(lane.number, lane.due, lane.length_tokens) for lane in lanes if lane.on_device]
    generation = lanes[0].generation
    draft.emit("lane", numbers, "evict", generation=generation)
    for number, due, length_tokens in held:
        release = KvOperation(
            verb="RELEASE", lane=number, from_tokens=length_tokens, to_tokens=0, transaction=0
        )
        draft.ask(
            ApplyKv(
                model=lanes[0].model,
                epoch=draft.state.device.epoch,
                generation=generation,
                operations=(*due, release),
            )
        )
