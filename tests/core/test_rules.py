"""Anything in any order: a rule-based machine over the FakeDevice, every invariant at every step.

Rules are what callers, clock and device may do next. The rig checks every invariant after every
step; the end checks that each request was told once, that the tokens are those of a run alone, and
that fold and second decision give the live state.
"""

import attrs
import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.fake_device import FakeDevice, KvFault, healthy
from support.rig import Rig
from support.schedules import VERIFIED
from support.told import fault_told

from laneway.engine import Limits
from laneway.engine.inputs import (
    Completed,
    HealthProbed,
    JobStalled,
    RestoreFailed,
    StatusDoubted,
)

HARMLESS = (0x0301, 0x0601, 0x0101, "early", "doubt")
FATAL = (0x0201, 0x0801)


class EngineRules(RuleBasedStateMachine):
    """One engine; ``fatal``: the device may also fail for good in this run."""

    rig: Rig
    fatal: bool

    @initialize(
        fatal=st.booleans(),
        loaded=st.booleans(),
        inflight=st.sampled_from([1, 2]),
        canaries=st.booleans(),
    )
    def begin(self, fatal: bool, loaded: bool, inflight: int, canaries: bool) -> None:
        """Open the engine, with or without its model, with or without canaries."""
        device = FakeDevice(inflight_max=inflight, verified=VERIFIED)
        limits = Limits(canary_jobs=3, canary_idle_ns=60_000, requalify_canaries=1)
        self.rig = Rig(load=loaded, device=device, limits=limits, canaries=canaries)
        self.fatal = fatal

    @rule(
        prompt=st.lists(st.integers(1, 63), min_size=1, max_size=6),
        seed=st.integers(0, 3),
        max_tokens=st.integers(1, 6),
        deadline_us=st.one_of(st.none(), st.integers(1, 60)),
        ignore_eos=st.booleans(),
    )
    def submit(
        self,
        prompt: list[int],
        seed: int,
        max_tokens: int,
        deadline_us: int | None,
        ignore_eos: bool,
    ) -> None:
        """A client asks for tokens."""
        self.rig.submit(
            prompt,
            seed=seed,
            max_tokens=max_tokens,
            deadline_s=None if deadline_us is None else deadline_us / 1e6,
            ignore_eos=ignore_eos,
        )

    @rule(bad=st.sampled_from([((), 1), ((64,), 1), ((1,) * 48, 1), ((1,), 0)]))
    def submit_nonsense(self, bad: tuple[tuple[int, ...], int]) -> None:
        """A client asks for what can never be served."""
        prompt, max_tokens = bad
        self.rig.submit(prompt, max_tokens=max_tokens)

    @rule(which=st.integers(0, 1 << 16))
    def cancel(self, which: int) -> None:
        """A client gives up, perhaps late or twice."""
        if self.rig.streams:
            self.rig.streams[which % len(self.rig.streams)].stream.cancel()

    @rule(count=st.integers(1, 25))
    def act(self, count: int) -> None:
        """The engine does some things."""
        self.rig.run_actions(count)

    @rule(by_us=st.integers(1, 300_000))
    def let_time_pass(self, by_us: int) -> None:
        """The clock moves."""
        self.rig.device.clock.advance(by_us * 1_000)

    @rule(told=st.lists(st.sampled_from((0, *HARMLESS)), min_size=1, max_size=3))
    def refuse(self, told: list[int | str]) -> None:
        """The device will refuse, or complete before it accepts."""
        self.rig.device.submits.extend(told)

    @precondition(lambda self: self.fatal)
    @rule(told=st.sampled_from(FATAL))
    def refuse_for_good(self, told: int | str) -> None:
        """The device will answer with what cannot be mended."""
        self.rig.device.submits.extend([0, told])

    @rule(verb=st.sampled_from(["RESERVE", "COMMIT", "RELEASE", "ROLLBACK"]), unknown=st.booleans())
    def fail_kv(self, verb: str, unknown: bool) -> None:
        """A KV operation list will not be applied."""
        self.rig.device.kv_faults.append(KvFault(verb=verb, unknown=unknown))

    @rule(holding=st.booleans())
    def hold(self, holding: bool) -> None:
        """The device is slow, or is fast again."""
        self.rig.device.holding = holding

    @precondition(lambda self: bool(self.rig.state.jobs))
    @rule(stage=st.sampled_from(["suspect", "suspect", "confirm", "cap"]))
    def stall(self, stage: str) -> None:
        """A job is suspected to hang."""
        job = next(iter(self.rig.state.jobs.values()))
        self.rig.post(
            JobStalled(
                job=job.number,
                ticket=job.ticket,
                stage=stage if self.fatal else "suspect",
                phase="exec",
                age_ns=7,
                progress_age_ns=7,
            )
        )

    @rule(answers=st.booleans())
    def probe(self, answers: bool) -> None:
        """A health probe is answered, whoever asked for it."""
        health = healthy(0) if answers or not self.fatal else None
        self.rig.post(HealthProbed(health=health, reason="silent"))

    @precondition(lambda self: self.fatal)
    @rule(kind=st.sampled_from(["ccu", "dma", "aborted", "lost", "call", "device"]))
    def fault(self, kind: str) -> None:
        """A job or the device fails."""
        job = next(iter(self.rig.state.jobs), None)
        self.rig.device.drop_jobs()
        self.rig.post(fault_told(kind, 0x0603, job=job, ticket=1, epoch=1, generation=1))

    @rule()
    def repeat_a_completion(self) -> None:
        """A completion comes again."""
        done = [step.taken for step in self.rig.steps if isinstance(step.taken, Completed)]
        if done:
            self.rig.post(done[-1])

    @rule(kind=st.sampled_from(["backwards", "early", "missed"]))
    def doubt(self, kind: str) -> None:
        """The device contradicts itself about a job."""
        said = StatusDoubted(job=1, ticket=1, kind=kind, before="exec", shown="h2d")
        self.rig.post(said)

    @rule(differs=st.booleans())
    def judge(self, differs: bool) -> None:
        """Canaries that overlapped differ from here on, or none does."""
        wrong = self.rig.state.jobs if differs else {}
        self.rig.device.on_result = lambda asked, done: (
            attrs.evolve(
                done, rows=tuple(msgspec.structs.replace(r, verdict="differs") for r in done.rows)
            )
            if asked.origin == "canary" and asked.job in wrong and wrong[asked.job].overlapped
            else done
        )

    @precondition(lambda self: self.fatal)
    @rule()
    def fail_restore(self) -> None:
        """A buffer cannot be cleaned."""
        for buffer in self.rig.state.buffers.values():
            if buffer.state == "completing" and buffer.job is not None:
                self.rig.post(
                    RestoreFailed(buffer=buffer.number, job=buffer.job, code=1, reason="told to")
                )

    @rule()
    def load(self) -> None:
        """Somebody loads a model, perhaps a second one."""
        self.rig.ask_load()

    @rule()
    def unload(self) -> None:
        """Somebody unloads the model, perhaps too early or twice."""
        self.rig.ask_unload(self.rig.state.next_model - 1)

    def teardown(self) -> None:
        """Close, and hold everything against the references."""
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        rig.device.holding = False
        rig.run()
        rig.close()
        rig.check_answers(ended_early=[one.stream for one in rig.streams])


TestEngineRules = EngineRules.TestCase
TestEngineRules.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
