"""Fast scenarios about who is to blame, and about what a reset leaves; detectors as the others."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from support.fake_device import FakeDevice, KvFault
from support.machine_run import MachineRun
from support.rig import Rig
from support.schedules import VERIFIED, wide
from support.script import small_artifact
from support.strikes import POISON, fault, levels, poisoned
from support.text_model import Wish
from support.told import stall_told

from laneway.engine.effects import SubmitJob
from laneway.engine.inputs import Completed, Input
from laneway.engine.sampling import Sampling


def _two_in_flight() -> Rig:
    device = FakeDevice(
        inflight_max=2,
        verified=VERIFIED,
        artifact=lambda model: wide(model, lanes=4, batches=(1,), rule="length_zero"),
    )
    rig = Rig(device=device, resets=True)
    device.holding = True
    for number in range(4):
        rig.submit([number + 1, 2], seed=number, max_tokens=3, ignore_eos=True)
    rig.run()
    return rig


def _suspects(rig: Rig) -> list[int]:
    events = rig.events("request", "suspend")
    return [number for event in events if event.data["suspect"] for number in event.entities]


def _go_on(rig: Rig, expected: list[int]) -> None:
    rig.run(until=lambda: bool(levels(rig)))
    rig.device.holding = False
    rig.run()
    found = _suspects(rig)
    assert found == expected, f"G15: {found} were accused instead of {expected}"
    rig.check_answers()
    rig.check_idle()
    rig.close()


def two_hung() -> None:
    """Both jobs in flight stand still, the younger one is told first: the older one did it."""
    rig = _two_in_flight()
    guilty = next(iter(rig.state.jobs.values())).rows[0].owner
    for job in reversed(list(rig.state.jobs.values())):
        for stage in ("suspect", "confirm"):
            rig.interrupt(stall_told(job, stage))
    _go_on(rig, [guilty])


def exception_beside() -> None:
    """An exception of one job ends the other as well: only the first one did anything."""
    rig = _two_in_flight()
    guilty = next(iter(rig.state.jobs.values())).rows[0].owner
    rig.interrupt(fault(rig))
    _go_on(rig, [guilty])


def twins() -> None:
    """Three requests with one prompt in one job that fails once: the prompt is no poison."""
    device = FakeDevice(
        verified=VERIFIED,
        artifact=lambda model: wide(model, lanes=4, batches=(1, 4), rule="length_zero"),
    )
    rig = Rig(device=device, resets=True)
    left = [1]

    def once(asked: SubmitJob, done: Completed) -> Input:
        return poisoned(asked, done) if len(asked.rows) == 3 and left and left.pop() else done

    device.on_result = once
    rig.submit([1, 2], max_tokens=1, ignore_eos=True)
    rig.run(until=lambda: bool(rig.state.jobs))
    for number in range(3):
        rig.submit(POISON, seed=number, ignore_eos=True)
    rig.run(until=lambda: bool(rig.state.alone) and rig.state.device.state == "serving")
    late = rig.submit(POISON, seed=9, ignore_eos=True)
    rig.run()
    assert late.result().error is None, f"9.3: {late.result().error} after one fault"
    rig.check_answers()
    rig.close()


def configuration_gone() -> None:
    """The list that reserves KV finds the configuration gone: it is made anew, nobody pays."""
    rig = Rig(device=FakeDevice(artifact=small_artifact), resets=True)
    for number in range(3):
        rig.submit([number + 1, 2], seed=number, ignore_eos=True)
    rig.device.kv_faults = [KvFault(verb="RESERVE", code=0x0702)]
    rig.run()
    assert levels(rig) == [2], f"row 20: resets {levels(rig)} of a configuration that is gone"
    rig.check_answers()
    rig.close()


def transfers_beyond_a_reset() -> None:
    """An exception that leaves transfers under way: its memory outlives the reset on a board."""
    plan = "fault a kind=ccu_exception on=exec nth=4 quiesce=n kv=unknown"
    with tempfile.TemporaryDirectory(prefix="laneway-mutant-") as folder:
        run = MachineRun(Path(folder))
        run.set_faults(plan)
        for number in range(3):
            greedy = Sampling(temperature=0.0, seed=0)
            run.submit(Wish(prompt=(number + 5, 9), max_tokens=4, sampling=greedy))
        run.settle()
        kept = run.device.graveyard.item_count
        run.close()
        run.prove()
    resets = [one for step in run.steps for one in step.events if one.trigger == "reset"]
    assert len(resets) == 1
    assert kept == 1, f"E9: {kept} arenas are kept, though a device may still write to one"


GUILT_DETECTORS: tuple[Callable[[], None], ...] = (
    two_hung,
    exception_beside,
    twins,
    configuration_gone,
    transfers_beyond_a_reset,
)
