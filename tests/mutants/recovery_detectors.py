"""Fast scenarios in which the recovery ladder has something to do, told so that each rule shows.

Each is a detector as those of detectors.py.
"""

from collections.abc import Callable
from typing import Any

import attrs
from support.fake_device import FakeDevice, healthy
from support.rig import Rig
from support.script import small_artifact
from support.strikes import (
    POISON,
    RESET_FAILED,
    STICKY,
    begin,
    fault,
    levels,
    poisoned,
    strike,
)

from laneway.engine.inputs import DeviceFaulted
from laneway.engine.limits import SECOND


def _begin() -> Rig:
    return begin(tokens=4)


def _device_fault(rig: Rig) -> DeviceFaulted:
    return fault(rig, "device", STICKY)


def _check(rig: Rig, rule: str, expected: list[int]) -> None:
    """Run to the end: service, the same texts, the expected resets."""
    rig.run()
    assert levels(rig) == expected, f"{rule}: resets {levels(rig)} instead of {expected}"
    state = rig.state.device.state
    assert state == "serving", f"{rule}: the device is {state}"
    rig.check_answers()
    rig.check_idle()
    rig.close()


def one_exception() -> None:
    """A fault of unknown extent at several points: one reset, everything made anew, every text."""
    for count in (0, 9, 22):
        rig = _begin()
        rig.run_actions(count)
        strike(rig)
        (event,) = rig.events("device", "reset")
        assert rig.state.ladder.attempts == {4: (rig.state.now_ns,)}, (
            f"E28: the attempt is counted before it is made, not {rig.state.ladder.attempts}"
        )
        assert event.data["jobs"] == [], "G2: nothing was in flight"
        before = rig.state.models[1].generation
        rig.run(until=lambda rig=rig: rig.state.device.state == "serving")  # type: ignore[misc]
        after = rig.state.models[1].generation
        assert after == before + 1, f"G12: generation {after} follows {before}"
        stale = [b.number for b in rig.state.buffers.values() if b.generation != after]
        assert not stale, f"G3: buffers {stale} are of generation {before}"
        golden = [job for job in rig.device.executed_jobs if job.origin == "golden"]
        assert len(golden) == 2, f"G5: {len(golden)} golden jobs in two configurations"
        _check(rig, "row 7", [1])


def resets_that_lie() -> None:
    """Each report that is not what it must be is the next rung (V1, V3, V4, V5)."""
    odd = tuple((name, 9 if name == "submitted" else 0) for name in _COUNTERS)
    for rule, lie in (
        ("V1", {"health": None}),
        ("V1", {"health": attrs.evolve(healthy(0), sticky=STICKY)}),
        ("V3", {"used_bytes_after": (1 << 30,)}),
        ("V4", {"health": attrs.evolve(healthy(0), counters=odd)}),
        ("V5", {"epoch_after": 99}),
    ):
        rig = _begin()
        rig.device.resets.append(lie)
        strike(rig)
        _check(rig, rule, [1, 2])


_COUNTERS = ("submitted", "pending", "running", "finished", "failed", "aborted")


def another_firmware() -> None:
    """The firmware is another after the reset: nothing is served on it (V2)."""
    rig = _begin()
    rig.device.resets.append({"firmware_version": "2"})
    strike(rig)
    rig.run()
    assert rig.state.device.state == "lost", f"V2, row 26: {rig.state.device.state}"
    rig.close()


def wrong_golden() -> None:
    """Golden differs after the first reset: that is the next rung (V6)."""
    rig = _begin()
    rig.device.verdict = "token 3 differs"
    strike(rig)
    rig.run(until=lambda: len(levels(rig)) == 2 or rig.engine.ready())
    rig.device.verdict = "equal"
    _check(rig, "V6", [1, 2])


def sticky_device() -> None:
    """A device-wide fault: a new epoch, and what is in flight ends before the reset."""
    for count in range(3, 40):
        rig = _begin()
        rig.run_actions(count)
        epoch = rig.state.device.epoch
        handed_over = {job.job for job in rig.device.executed_jobs}
        waiting = set(rig.state.jobs) - handed_over
        rig.interrupt(_device_fault(rig))
        rig.run()
        assert rig.state.device.epoch == epoch + 1, f"V5: epoch {rig.state.device.epoch}"
        late = waiting.intersection(job.job for job in rig.device.submitted)
        assert not late, f"G2: jobs {late} were submitted though their device was in doubt"
        _check(rig, "row 15", [4])


def held_job() -> None:
    """What is in flight does not end: the reset comes all the same after 30 s."""
    rig = _begin()
    rig.run(until=lambda: any(job.state == "submitted" for job in rig.state.jobs.values()))
    rig.device.holding = True
    started_ns = rig.device.clock.now_ns()
    rig.interrupt(_device_fault(rig))
    rig.run(until=lambda: bool(levels(rig)))
    waited_ns = rig.device.clock.now_ns() - started_ns
    assert levels(rig), "cascade guard: a drain without end"
    in_time = 30 * SECOND <= waited_ns < 31 * SECOND
    assert in_time, f"cascade guard: reset after {waited_ns} ns"
    rig.device.holding = False
    _check(rig, "row 15", [4])


def broken_for_good() -> None:
    """No reset helps: budgets bound them, pauses stretch them, then everybody is told."""
    rig = _begin()
    for _ in range(30):
        rig.device.resets.append({"code": RESET_FAILED, "reason": "failed"})
    started_ns = rig.device.clock.now_ns()
    strike(rig)
    rig.run(until=lambda: len(levels(rig)) > 9)
    assert levels(rig) == [1, 2, 4, 4, 4], f"I10, E28: resets {levels(rig)}"
    waited_ns = rig.device.clock.now_ns() - started_ns
    assert waited_ns >= 180 * SECOND, f"9.3: pauses of {waited_ns} ns in all"
    assert rig.state.device.state == "lost", f"G7: {rig.state.device.state}"
    rig.close()


def crash_loop() -> None:
    """Processes that lose their device one after the other: the fourth is told to stop."""
    steps: list[Any] = []
    for process in range(4):
        rig = Rig(device=FakeDevice(artifact=small_artifact), steps=steps, resets=True)
        rig.device.resets.extend({"code": RESET_FAILED, "reason": "failed"} for _ in range(9))
        rig.submit([1, 2])
        rig.interrupt(_device_fault(rig))
        rig.run(until=lambda rig=rig: len(levels(rig)) > 9)  # type: ignore[misc]
        expected = [4, 4, 4] if process == 0 else []
        assert levels(rig) == expected, f"E28: process {process} resets {levels(rig)}"
        rung = rig.events("device", "lose")[-1].data["rung"]
        assert rung == (7 if process < 3 else 8), f"E28: process {process} ends on rung {rung}"
        rig.close()
        steps = rig.steps


def two_faults() -> None:
    """A fault in the proof of a reset counts double, and the next rung is taken (9.3)."""
    rig = _begin()
    strike(rig)
    rig.run(until=lambda: rig.state.device.state == "recovering" and bool(rig.device.running))
    strike(rig)
    stamps = [event.data["stamps"] for event in rig.events("device", "reset")]
    assert stamps == [1, 2], f"9.3: stamps {stamps}"
    _check(rig, "9.3", [1, 2])


def fault_of_before() -> None:
    """A fault that names an epoch that is over is recorded, and nothing else (I5)."""
    rig = _begin()
    rig.run(until=lambda: any(job.state == "submitted" for job in rig.state.jobs.values()))
    rig.interrupt(fault(rig, epoch=rig.state.device.epoch + 5))
    assert rig.state.device.state == "serving", f"I5: {rig.state.device.state}"
    _check(rig, "I5", [])


def innocents_twice() -> None:
    """Faults that never end: an innocent goes on once, then it is told (9.3)."""
    rig = _begin()
    for _ in range(2):
        rig.run(until=lambda: any(job.task == "decode" for job in rig.state.jobs.values()))
        rig.interrupt(_device_fault(rig))
        rig.run(until=lambda: rig.state.device.state == "serving")
    most = max(
        sum(event.entities == (number,) for event in rig.events("request", "resume"))
        for number in (1, 2, 3)
    )
    assert most <= 1, f"9.3: an innocent went on {most} times"
    rig.run()
    rig.check_answers(ended_early=[one.stream for one in rig.streams])
    rig.close()


def poison() -> None:
    """One prompt fails every job of it: it fails alone, is refused then, and nobody else pays."""
    rig = Rig(resets=True)
    rig.device.on_result = poisoned
    others = [rig.submit([2, n], seed=n, max_tokens=8, ignore_eos=True) for n in range(3)]
    guilty = rig.submit(POISON, seed=5)
    rig.run()
    assert all(stream.result().error is None for stream in others), "G15: an innocent pays"
    alone = "alone" in str(guilty.result().error)
    assert alone, f"G15: {guilty.result().error}"
    late = rig.submit(POISON, seed=9)
    rig.run()
    assert "poison" in str(getattr(late.result().error, "reason", "")), "9.3: poison is served"
    rig.check_answers(ended_early=[guilty, late])
    rig.close()


def pardoned() -> None:
    """Whoever gets through alone is accused of nothing any more (9.3)."""
    rig = _begin()
    strike(rig)
    _check(rig, "row 7", [1])
    assert rig.state.ladder.guilt == {}, f"9.3: accused for good: {rig.state.ladder.guilt}"


RECOVERY_DETECTORS: tuple[Callable[[], None], ...] = (
    one_exception,
    resets_that_lie,
    another_firmware,
    wrong_golden,
    sticky_device,
    held_job,
    broken_for_good,
    crash_loop,
    two_faults,
    fault_of_before,
    innocents_twice,
    poison,
    pardoned,
)
