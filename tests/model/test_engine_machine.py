"""The whole engine on the simulated board, in an order nobody thought of.

Rules are what clients, operators, time and the board may do next; the board fails by a plan drawn
for the run. Every invariant is checked at every step, the board's own violations after every rule.
Resets are allowed, up to two jobs of up to 16 rows are in flight. At the end of each life every
request was told once and its tokens are those of a run alone (unless the plan may let a wrong one
through that looks like any other); at the end of the run the journal is proven. A lost device is
followed by a fresh one on the same journal.

A failing run is printed as a program; its journal is kept, in a folder that the failure names.

Source: I1 to I12, R18.3; profiles quick, ci and long are those of tests/conftest.py.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.fault_plans import plans
from support.machine_run import MachineRun
from support.text_model import Wish

from laneway.adapters.buffers import Buffer
from laneway.engine.limits import SECOND, Limits
from laneway.engine.sampling import Sampling
from laneway.journal import open_journal
from laneway.journal.replay import verify

LIVES_MAX = 3
OPERATIONS_MAX = 3
CHANGES_MAX = 2
KEPT = Path(tempfile.gettempdir()) / f"laneway-failed-run-{os.getpid()}"

SHAPES = (((1, 4), 1), ((1, 4), 4), ((1, 2, 4, 8, 16), 16), ((1, 16), 16))
"""The batches of the artifact, and how many rows a job has at most."""

PROMPTS: tuple[str | tuple[int, ...], ...] = (
    "a",
    "deaf cabbage",
    "hör auf, äh",
    (301, 302, 303),
    (5,),
    tuple(range(100, 121)),
)
GREEDY = Sampling(temperature=0.0, seed=0)
SAMPLINGS = {
    "greedy": GREEDY,
    "warm": Sampling(temperature=1.0, seed=7),
    "top_p": Sampling(temperature=0.8, top_p=0.9, seed=(1 << 62) + 1),
    "top_k": Sampling(temperature=0.7, top_k=20, seed=3),
}
STOPS: tuple[tuple[str, ...], ...] = ((), (), ("a",), ("ca", "n"), ("zz", "\u00e4h"))
USUAL = tuple(
    Wish(prompt=prompt, max_tokens=3 + number % 5, sampling=list(SAMPLINGS.values())[number % 4])
    for number, prompt in enumerate(PROMPTS)
)
NONSENSE = (
    Wish(prompt=(), max_tokens=1, sampling=GREEDY),
    Wish(prompt=(512,), max_tokens=1, sampling=GREEDY),
    Wish(prompt=(1,) * 65, max_tokens=1, sampling=GREEDY),
    Wish(prompt=(1,), max_tokens=0, sampling=GREEDY),
    Wish(prompt="\ud800", max_tokens=1, sampling=GREEDY),
    Wish(prompt=(1,), max_tokens=1 << 20, sampling=GREEDY),
)


class EngineOnBoard(RuleBasedStateMachine):
    """Engines on boards over one journal."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="laneway-run-"))
        self.run: MachineRun | None = None
        self.operations = 0
        self.changes = 0

    @property
    def it(self) -> MachineRun:
        """The run, once it has begun."""
        assert self.run is not None
        return self.run

    @initialize(
        plan=plans(),
        loaded=st.sampled_from((True, True, True, False)),
        inflight=st.sampled_from((1, 2)),
        shape=st.sampled_from(SHAPES),
        canary=st.sampled_from((0, 3, 10)),
    )
    def begin(
        self,
        plan: str,
        loaded: bool,
        inflight: int,
        shape: tuple[tuple[int, ...], int],
        canary: int,
    ) -> None:
        """Open the engine, with or without its model, on a board with a fault plan."""
        batches, rows = shape
        limits = Limits(
            inflight_jobs_max=inflight,
            batch_rows_max=rows,
            canary_jobs=canary,
            canary_idle_ns=canary and 60 * SECOND,
            requalify_canaries=1,
        )
        self.run = MachineRun(self.folder, plan=plan, limits=limits, load=loaded, batches=batches)

    # ------------------------------------------------------------------ clients

    @rule(
        prompt=st.sampled_from(PROMPTS),
        max_tokens=st.sampled_from((1, 2, 5, 9)),
        sampling=st.sampled_from(sorted(SAMPLINGS)),
        stop=st.sampled_from(STOPS),
        ignore_eos=st.booleans(),
        deadline_us=st.one_of(st.none(), st.none(), st.integers(1, 200)),
    )
    def submit(
        self,
        prompt: str | tuple[int, ...],
        max_tokens: int,
        sampling: str,
        stop: tuple[str, ...],
        ignore_eos: bool,
        deadline_us: int | None,
    ) -> None:
        """A client asks for tokens."""
        wish = Wish(
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=SAMPLINGS[sampling],
            stop=stop,
            ignore_eos=ignore_eos,
        )
        self.it.submit(wish, deadline_s=None if deadline_us is None else deadline_us / 1e6)

    @precondition(lambda self: bool(self.it.state.aliases))
    @rule(usual=st.lists(st.integers(0, len(USUAL) - 1), min_size=2, max_size=20))
    def submit_many(self, usual: list[int]) -> None:
        """Several clients ask at once, also for more than there are lanes."""
        for which in usual:
            self.it.submit(USUAL[which])

    @rule(which=st.integers(0, len(NONSENSE) - 1))
    def submit_nonsense(self, which: int) -> None:
        """A client asks for what can never be served."""
        stream = self.it.submit(NONSENSE[which])
        if stream is not None:
            self.it.asked.pop()

    @rule(which=st.integers(0, 15))
    def cancel(self, which: int) -> None:
        """A client gives up, perhaps late or twice."""
        self.it.cancel(which)

    @rule()
    def look(self) -> None:
        """Somebody looks: the picture agrees with itself."""
        engine = self.it.engine
        picture, health = engine.snapshot(), engine.health()
        assert picture.step == health.step == self.it.watch.step
        assert sum(count for _, count in picture.jobs) == len(self.it.state.jobs)
        assert engine.ready() == health.ready
        assert not health.ready or engine.model_number("m") is not None

    # ------------------------------------------------------------------ time

    @rule(count=st.sampled_from((1, 2, 3, 5, 8)))
    def act(self, count: int) -> None:
        """The engine and the board do some things."""
        self.it.act(count)

    @rule(count=st.sampled_from((20, 60, 150)))
    def act_long(self, count: int) -> None:
        """The engine and the board do a lot."""
        self.it.act(count)

    @rule(by_ns=st.sampled_from((1, 700, 3_000, 250_000_000, 7_000_000_000)))
    def let_time_pass(self, by_ns: int) -> None:
        """Nobody looks for a while."""
        self.it.let_time_pass(by_ns)

    # ------------------------------------------------------------------ operators

    @precondition(lambda self: self.operations < OPERATIONS_MAX)
    @rule(wanted=st.sampled_from(("load", "unload", "unload load", "load unload load")))
    def operate(self, wanted: str) -> None:
        """Somebody loads or unloads, perhaps a second model, too early or twice."""
        self.operations += 1
        for one in wanted.split():
            if one == "load":
                self.it.ask_load()
            else:
                self.it.ask_unload()

    @precondition(lambda self: not self.it.state.models and not self.it.lost)
    @rule(count=st.sampled_from((0, 9, 200)))
    def serve(self, count: int) -> None:
        """Nothing is served: somebody loads the model, and may wait for it."""
        self.it.ask_load()
        self.it.act(count)

    @precondition(lambda self: self.it.lives < 2)
    @rule(drain=st.booleans(), asked=st.booleans())
    def reopen(self, drain: bool, asked: bool) -> None:
        """The engine is closed at some point, and another one takes the journal."""
        if asked:
            self.it.ask_close(drain=drain)
            self.it.act(3)
        self.it.close(drain=drain)
        self.it.open()

    @precondition(lambda self: self.it.lost and self.it.lives < LIVES_MAX)
    @rule()
    def replace_board(self) -> None:
        """The device is lost: a fresh one on the same journal goes on."""
        self.it.settle()
        assert not self.it.engine.ready()
        self.it.close()
        self.it.open()

    @precondition(lambda self: self.changes < CHANGES_MAX)
    @rule(plan=plans())
    def change_faults(self, plan: str) -> None:
        """The board begins to fail in another way, or stops to."""
        self.changes += 1
        self.it.set_faults(plan)

    # ------------------------------------------------------------------ always

    @invariant()
    def board_saw_no_mistake(self) -> None:
        """I2, E4: no violation, and free memory is clean."""
        if self.run is not None:
            self.run.check_board()

    def teardown(self) -> None:
        """Let everything settle without further faults, close, prove; keep what failed."""
        failure = sys.exc_info()[1]
        try:
            if failure is None and self.run is not None:
                self.run.set_faults("")
                self.run.settle()
                self.run.close()
                self.run.prove()
        except Exception as found:
            failure = found
            raise
        finally:
            if isinstance(failure, Exception):
                self._keep(failure)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _keep(self, failure: Exception) -> None:
        """Keep the journal of the newest failing run, which is the smallest one at the end."""
        shutil.rmtree(KEPT, ignore_errors=True)
        shutil.copytree(self.folder, KEPT)
        failure.add_note(f"its journal is kept: laneway journal show {KEPT / 'run.db'}")


TestEngineOnBoard = pytest.mark.slow(EngineOnBoard.TestCase)
PROFILE = settings.get_profile(settings.get_current_profile_name())
TestEngineOnBoard.settings = settings(
    PROFILE,
    max_examples=max(10, PROFILE.max_examples // 4),
    stateful_step_count=40,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


def test_a_failing_run_keeps_its_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a broken rule planted the run fails, and says where its journal is."""
    monkeypatch.setattr(Buffer, "wipe", lambda self: None)
    chosen = settings(
        PROFILE,
        max_examples=5,
        stateful_step_count=10,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    try:
        with pytest.raises(AssertionError, match="E4: buffer/. is free and holds") as found:
            run_state_machine_as_test(EngineOnBoard, settings=chosen)
        notes = "\n".join(found.value.__notes__)
        assert str(KEPT / "run.db") in notes and "state = EngineOnBoard()" in notes
        with open_journal(KEPT / "run.db", read_only=True) as journal:
            report = verify(journal)
        assert report.ok and report.steps > 0, "what was recorded is whole up to the failure"
    finally:
        shutil.rmtree(KEPT, ignore_errors=True)
