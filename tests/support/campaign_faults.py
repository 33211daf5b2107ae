"""What a stepped device can do wrong in a campaign: a table of kinds, each armed on a fake device.

A kind says how it is armed and whether it ends the device by design (rows 16, 22 and 26 of the
ladder). What is armed strikes at the next job, submit, operation or answer that it is about, so a
kind may strike anywhere: in a prompt, a batch, a recovery, a close, or never.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import attrs
from support.fake_device import FakeDevice, KvFault, healthy
from support.rig import Rig
from support.told import fault_told

from laneway.engine.effects import (
    ConfigureModel,
    ProbeHealth,
    RestoreBuffer,
    RunReset,
    SubmitJob,
)
from laneway.engine.inputs import (
    BufferRestored,
    Completed,
    ConfigureFailed,
    DeviceFaulted,
    HealthProbed,
    Input,
    JobStalled,
    RestoreFailed,
    RowResult,
)

CCU, DMA, STICKY, WEDGED, REJECTED, BUSY = 0x0604, 0x0605, 0x0804, 0x0802, 0x0601, 0x0301
STALE_EPOCH, STALE_GENERATION, RESET_FAILED, CONFIG_FAILED = 0x0201, 0x0202, 0x0805, 0x0701
SUSPECT_AFTER = 12
CONFIRM_AFTER = 30
_ANSWERS = (RestoreBuffer, ConfigureModel, ProbeHealth, RunReset)


@attrs.frozen
class Kind:
    """One kind: its name, how to arm it, and whether the device ends by it."""

    name: str
    arm: "Callable[[Trouble], None]"
    ends: str = ""
    """Why it ends the device by design, or "" where service must go on."""


@attrs.define
class _Stalled:
    """A job whose answer does not come, and what is told of it."""

    job: int
    ticket: int
    actions: int = 0
    answer: Input | None = None
    """The true answer, where it is only late."""


class Trouble:
    """Arms kinds on the device of a rig, and plays what takes time."""

    def __init__(self, rig: Rig, draws: random.Random) -> None:
        self.rig = rig
        self.draws = draws
        self.struck: list[str] = []
        self._results: list[tuple[str, Callable[[SubmitJob, Completed], Input | None]]] = []
        self._stalled: list[_Stalled] = []
        self._kind = ""
        self._wrong_until = 0
        rig.device.on_result = self._result
        rig.device.meanwhile = self._look

    # ------------------------------------------------------------------ arming

    @property
    def device(self) -> FakeDevice:
        """The device that fails."""
        return self.rig.device

    def strike(self, kind: Kind) -> None:
        """Arm a kind."""
        self._kind = kind.name
        kind.arm(self)

    def at_result(self, change: Callable[[SubmitJob, Completed], Input | None]) -> None:
        """Let the next job end in another way."""
        self._results.append((self._kind, change))

    def once(self, effect: type[Any], answer: Callable[[Any], Input | None]) -> None:
        """Let the next effect of a type be answered in another way."""
        kind = self._kind

        def answered(asked: Any) -> Input | None:
            del self.device.overrides[effect]
            self.struck.append(kind)
            return answer(asked)

        self.device.overrides[effect] = answered

    def say(self, taken: Input) -> None:
        """Let the device say something now."""
        self.struck.append(self._kind)
        self.rig.post(taken)

    def wrong_golden(self) -> None:
        """Let golden differ until two resets have run."""
        self.device.verdict = "token 3 differs"
        self._wrong_until = self._resets() + 2

    def _look(self, _: Input) -> None:
        if self._wrong_until and self._resets() >= self._wrong_until:
            self.device.verdict, self._wrong_until = "equal", 0

    def _resets(self) -> int:
        return sum(isinstance(effect, RunReset) for effect in self.device.executed)

    def fault(self, kind: str, code: int, job: int | None = None, **more: Any) -> DeviceFaulted:
        """Return a fault as a device would tell it."""
        known = self.rig.state.jobs.get(job) if job is not None else None
        taken = fault_told(
            kind,
            code,
            job=job,
            ticket=known.ticket if known is not None else 0,
            epoch=self.rig.state.device.epoch,
            generation=known.generation if known is not None else 1,
            health=healthy(0),
        )
        return attrs.evolve(taken, **more)

    # ------------------------------------------------------------------ playing

    def _result(self, asked: SubmitJob, done: Completed) -> Input | None:
        if not self._results:
            return done
        name, change = self._results.pop(0)
        self.struck.append(name)
        return change(asked, done)

    def stall(self, done: Completed, *, answer: Input | None = None) -> None:
        """Let a job's answer stay away; ``answer`` comes once it was suspected."""
        self._stalled.append(_Stalled(done.job, done.ticket, answer=answer))

    def go_on(self) -> None:
        """Play one action's worth of what takes time."""
        for one in list(self._stalled):
            one.actions += 1
            if one.actions == SUSPECT_AFTER:
                self._tell(one, "suspect")
            elif one.actions >= CONFIRM_AFTER:
                self._end(one)

    def _tell(self, one: _Stalled, stage: str) -> None:
        self.rig.post(
            JobStalled(
                job=one.job,
                ticket=one.ticket,
                stage=stage,
                phase="exec",
                age_ns=7,
                progress_age_ns=7,
            )
        )

    def _end(self, one: _Stalled) -> None:
        self._stalled.remove(one)
        if one.answer is not None:
            self.rig.post(one.answer)
        else:
            self._tell(one, "confirm")

    def end(self) -> None:
        """Let nothing new go wrong; what is under way comes to its end."""
        device = self.device
        self._results.clear()
        while self._stalled:
            one = self._stalled[0]
            if one.actions < SUSPECT_AFTER:
                self._tell(one, "suspect")
            self._end(one)
            self.rig.run()
        device.submits.clear()
        device.resets.clear()
        device.kv_faults.clear()
        for effect in _ANSWERS:
            device.overrides.pop(effect, None)
        device.verdict = "equal"

    def run(self) -> None:
        """Run until nothing is left, with what takes time; then let nothing new go wrong."""
        self.rig.run()
        self.end()
        self.rig.run()


# ---------------------------------------------------------------------------- the kinds


def _job_fault(kind: str, code: int, **more: Any) -> Callable[[Trouble], None]:
    def arm(it: Trouble) -> None:
        it.at_result(lambda asked, done: it.fault(kind, code, asked.job, **more))

    return arm


def _numeric(it: Trouble) -> None:
    bad = RowResult(token=63, fault="numeric")
    it.at_result(lambda asked, done: attrs.evolve(done, rows=(bad, *done.rows[1:])))


def _hang(it: Trouble) -> None:
    it.at_result(lambda asked, done: it.stall(done))


def _slow(it: Trouble) -> None:
    it.at_result(lambda asked, done: it.stall(done, answer=done))


def _kv_effect(effect: str) -> Callable[[Trouble], None]:
    def arm(it: Trouble) -> None:
        it.at_result(lambda asked, done: attrs.evolve(done, kv_effect=effect))

    return arm


def _submits(*told: int | str) -> Callable[[Trouble], None]:
    def arm(it: Trouble) -> None:
        it.struck.append(it._kind)
        it.device.submits.extend(told)

    return arm


def _doubt_that_never_ran(it: Trouble) -> None:
    it.struck.append(it._kind)
    it.device.submits.append("doubt")
    it.at_result(lambda asked, done: it.stall(done))


def _kv(verb: str, *, unknown: bool = False, times: int = 1) -> Callable[[Trouble], None]:
    def arm(it: Trouble) -> None:
        it.struck.append(it._kind)
        it.device.kv_faults.append(KvFault(verb=verb, unknown=unknown, times=times))

    return arm


def _device_fault(code: int, kind: str = "device") -> Callable[[Trouble], None]:
    return lambda it: it.say(it.fault(kind, code))


def _old_fault(it: Trouble) -> None:
    jobs = list(it.rig.state.jobs)
    job = jobs[0] if jobs else None
    epoch = it.rig.state.device.epoch + 7
    it.say(it.fault("ccu" if job is not None else "device", CCU, job, epoch=epoch))


def _health(**fields: Any) -> Callable[[Trouble], None]:
    def arm(it: Trouble) -> None:
        it.say(HealthProbed(health=attrs.evolve(healthy(0), **fields), reason=""))

    return arm


def _unwell_for_long(it: Trouble) -> None:
    unwell = attrs.evolve(healthy(0), state="unhealthy")
    it.say(HealthProbed(health=unwell, reason=""))
    it.once(ProbeHealth, lambda asked: HealthProbed(health=unwell, reason=""))


def _silent(it: Trouble) -> None:
    it.say(HealthProbed(health=None, reason="no answer"))


def _restore(it: Trouble) -> None:
    def refuse(asked: RestoreBuffer) -> Input:
        return RestoreFailed(buffer=asked.buffer, job=asked.job, code=1, reason="told to")

    it.once(RestoreBuffer, refuse)


def _lying_reset(**lie: Any) -> Callable[[Trouble], None]:
    def arm(it: Trouble) -> None:
        it.device.resets.append(lie)
        it.at_result(lambda asked, done: it.fault("ccu", CCU, asked.job))

    return arm


def _wrong_golden(it: Trouble) -> None:
    it.wrong_golden()
    it.at_result(lambda asked, done: it.fault("ccu", CCU, asked.job))


def _configure(it: Trouble) -> None:
    def refuse(asked: ConfigureModel) -> Input:
        return ConfigureFailed(model=asked.model, code=CONFIG_FAILED, reason="told to")

    it.once(ConfigureModel, refuse)
    it.at_result(lambda asked, done: it.fault("ccu", CCU, asked.job))


def _reset_blocks(it: Trouble) -> None:
    it.once(RunReset, lambda asked: it.fault("call", WEDGED))
    it.at_result(lambda asked, done: it.fault("ccu", CCU, asked.job))


def _doubled(it: Trouble) -> None:
    done = [step.taken for step in it.rig.steps if isinstance(step.taken, Completed)]
    if done:
        it.say(done[-1])
    restored = [step.taken for step in it.rig.steps if isinstance(step.taken, BufferRestored)]
    if restored:
        it.say(restored[-1])


def _skew(it: Trouble) -> None:
    it.struck.append(it._kind)
    it.device.skew = {"finished": 1}


def _lies() -> Iterator[Kind]:
    bad = attrs.evolve(healthy(0), state="unhealthy")
    stuck = attrs.evolve(healthy(0), sticky=STICKY)
    told: tuple[tuple[str, dict[str, Any]], ...] = (
        ("reset_fails", {"code": RESET_FAILED, "reason": "failed"}),
        ("reset_silent", {"health": None}),
        ("reset_unwell", {"health": bad}),
        ("reset_sticky", {"health": stuck}),
        ("reset_memory", {"used_bytes_after": (1 << 30,)}),
        ("reset_unaccounted", {"jobs_unaccounted": 1}),
        ("reset_epoch", {"epoch_after": 99}),
    )
    for name, lie in told:
        yield Kind(name, _lying_reset(**lie))


WELL_KNOWN = "row 16: a device that is gone"

KINDS = (
    Kind("ccu", _job_fault("ccu", CCU)),
    Kind("ccu_contained", _job_fault("ccu", CCU, quiescent=True, kv_effect="none")),
    Kind("ccu_contained_applied", _job_fault("ccu", CCU, quiescent=True, kv_effect="applied")),
    Kind("dma", _job_fault("dma", DMA)),
    Kind("aborted", _job_fault("aborted", 0x0606)),
    Kind("lost_job", _job_fault("lost", 0x0607)),
    Kind("numeric", _numeric),
    Kind("hang", _hang),
    Kind("slow", _slow),
    Kind("kv_effect_none", _kv_effect("none")),
    Kind("kv_effect_partial", _kv_effect("partial")),
    Kind("kv_effect_unknown", _kv_effect("unknown")),
    Kind("submit_reject", _submits(REJECTED)),
    Kind("submit_reject_thrice", _submits(REJECTED, REJECTED, REJECTED)),
    Kind("submit_busy", _submits(BUSY, BUSY)),
    Kind("submit_early", _submits("early")),
    Kind("submit_doubt", _submits("doubt")),
    Kind("submit_doubt_never_ran", _doubt_that_never_ran),
    Kind("submit_stale_generation", _submits(STALE_GENERATION)),
    Kind("submit_sticky", _submits(STICKY)),
    Kind("epoch_bump", _submits(STALE_EPOCH)),
    Kind("kv_reserve", _kv("RESERVE")),
    Kind("kv_reserve_unknown", _kv("RESERVE", unknown=True)),
    Kind("kv_commit", _kv("COMMIT")),
    Kind("kv_commit_unknown", _kv("COMMIT", unknown=True)),
    Kind("kv_release", _kv("RELEASE")),
    Kind("device_sticky", _device_fault(STICKY)),
    Kind("device_internal", _device_fault(0x0F01, "call")),
    Kind("old_fault", _old_fault),
    Kind("unwell", _health(state="unhealthy")),
    Kind("unwell_for_long", _unwell_for_long),
    Kind("advises_ccu", _health(state="unhealthy", advised=1)),
    Kind("advises_configuration", _health(state="unhealthy", advised=2)),
    Kind("advises_device", _health(state="degraded", advised=4)),
    Kind("sticky_health", _health(sticky=STICKY)),
    Kind("restore", _restore),
    Kind("golden_after_reset", _wrong_golden),
    Kind("configure_after_reset", _configure),
    Kind("doubled", _doubled),
    Kind("counters", _skew),
    *_lies(),
    Kind("wedged", _health(state="wedged"), ends=WELL_KNOWN),
    Kind("device_lost", _device_fault(0x0803), ends=WELL_KNOWN),
    Kind("silent", _silent, ends=WELL_KNOWN),
    Kind("reset_blocks", _reset_blocks, ends=WELL_KNOWN),
    Kind(
        "reset_versions",
        _lying_reset(firmware_version="2"),
        ends="row 26: another firmware is another device",
    ),
)
