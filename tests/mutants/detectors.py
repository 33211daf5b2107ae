"""Fast scenarios that a sound engine passes and an engine with one broken rule does not.

Each runs a small story with every invariant at every step and the answers of runs alone at the end.
A detector passes or raises; mutants are held against the one that must find them.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
from mutants.canary_detectors import CANARY_DETECTORS
from mutants.guilt_detectors import GUILT_DETECTORS
from mutants.recovery_detectors import RECOVERY_DETECTORS
from mutants.replacing_detectors import REPLACING_DETECTORS
from support.fake_device import KvFault
from support.journal_steps import run_core, tamper
from support.machine_run import MachineRun
from support.rig import Rig, without_resets
from support.schedules import Scheduled, Shape
from support.script import begin, finish_and_check
from support.text_model import Wish

from laneway.engine import Limits
from laneway.engine.effects import ConfigureModel, ReleaseModel, SubmitJob
from laneway.engine.errors import IllegalTransitionError, JournalWriteError
from laneway.engine.evolve import fold
from laneway.engine.inputs import Completed, ConfigureFailed, Input, MemoryBuried, ModelReleased
from laneway.engine.limits import SECOND
from laneway.engine.sampling import Sampling
from laneway.engine.state import initial_state
from laneway.journal import open_journal
from laneway.journal.replay import verify

GREEDY = Sampling(temperature=0.0, seed=0)
WISHES = (
    Wish(prompt="deaf cabbage", max_tokens=6, sampling=GREEDY, ignore_eos=True),
    Wish(prompt=(301, 302, 303), max_tokens=4, sampling=Sampling(seed=7), ignore_eos=True),
    Wish(prompt=(5,), max_tokens=5, sampling=GREEDY, stop=("a", "n")),
)


# ---------------------------------------------------------------------------- fake device


def script() -> None:
    """Three requests on two lanes, to the end."""
    finish_and_check(begin(), ended=[])


def crowd() -> None:
    """More requests than one, all on lanes at once."""
    rig = Rig()
    for number in range(5):
        rig.submit([number + 1, 3], seed=number, max_tokens=6, ignore_eos=True)
    rig.run()
    rig.check_answers()
    rig.check_idle()
    rig.close()


def blocks() -> None:
    """Requests of several lengths on lanes whose rows are fixed, in blocks of four."""
    it = Scheduled(Shape((1, 4), 4, "length_zero", 1, Limits(prefill_tokens_max=2), fixed=True))
    for number in range(24):
        it.rig.submit([number + 1, 3], seed=number, max_tokens=9 + number % 2, ignore_eos=True)
    it.rig.run()
    it.rig.check_answers()
    it.rig.check_idle()
    it.check_bounds()
    it.rig.close()


def cancels() -> None:
    """The same, with one request cancelled at several points."""
    for count in range(20, 90, 6):
        rig = begin()
        rig.run_actions(count)
        rig.streams[1].stream.cancel()
        finish_and_check(rig, ended=[1])


def stale_completions() -> None:
    """Completions of an ended job, another epoch, generation or ticket, and doubled ones."""
    for count in range(24, 80, 8):
        rig = begin()
        rig.run_actions(count)
        done = [step.taken for step in rig.steps if isinstance(step.taken, Completed)]
        rig.interrupt(done[-1])
        rig.interrupt(done[0])
        for job in list(rig.state.jobs.values()):
            own = attrs.evolve(done[-1], job=job.number, epoch=job.epoch, ticket=job.ticket)
            own = attrs.evolve(own, generation=job.generation)
            rig.interrupt(attrs.evolve(own, epoch=own.epoch + 1))
            rig.interrupt(attrs.evolve(own, generation=own.generation + 1))
            if job.state == "submitted":
                rig.interrupt(attrs.evolve(own, ticket=own.ticket + 1))
        finish_and_check(rig, ended=[])


def kv_not_applied() -> None:
    """A job ends well but says that its KV was not written."""
    rig = begin()
    rig.device.on_result = _without_kv
    rig.run()
    again = rig.events("request", "suspend")
    assert len(again) == 1, f"one sequence lost its KV, {len(again)} went on in another lane"
    rig.check_answers()
    rig.close()


def _without_kv(asked: SubmitJob, done: Completed) -> Input:
    return attrs.evolve(done, kv_effect="none") if asked.job == 4 else done


def kv_never_applied() -> None:
    """No reservation is ever applied: each request ends, and the bank is told nothing of it."""
    rig = Rig()
    rig.device.kv_faults = [KvFault(verb="RESERVE", times=1000)]
    rig.submit([1, 2])
    rig.run()
    rig.check_idle()
    rig.close()


def doubtful_submit() -> None:
    """One submit is in doubt: its buffer and lane are fenced, its request runs again."""
    rig = Rig()
    rig.device.submits.extend([0, "doubt"])
    for number in range(3):
        rig.submit([number + 1, 2], seed=number, max_tokens=3, ignore_eos=True)
    rig.run()
    again = rig.events("request", "suspend")
    assert len(again) == 1, f"row 4: one submit was in doubt, {len(again)} requests ran again"
    states = [buffer.state for buffer in rig.state.buffers.values()]
    assert states.count("quarantined") == 1, f"row 4: {states}"
    assert rig.state.device.state == "degraded", f"G12: {rig.state.device.state}"
    rig.check_answers()
    rig.close()


def last_buffer_in_doubt() -> None:
    """The only buffer of a submodel is quarantined: the device is lost instead of silent."""
    rig = Rig(limits=Limits(buffers_per_submodel=1))
    rig.device.submits.append("doubt")
    rig.submit([1, 2])
    rig.submit([2, 2])
    rig.run()
    assert rig.state.device.state == "lost", f"G12: {rig.state.device.state}, and nobody is served"
    rig.close()


def memory_back_late() -> None:
    """Memory is back only when it is read again: the model is gone, the device serves."""
    rig = Rig(limits=Limits(unload_tolerance_bytes=0))
    rig.device.overrides[ReleaseModel] = lambda effect: ModelReleased(
        model=effect.model, used_bytes=(1,), healthy=True
    )
    rig.ask_unload(1)
    rig.run()
    assert rig.state.device.state == "serving", f"row 13: {rig.state.device.reason}"
    rig.close()


def configure_fails_once() -> None:
    """The first configuration fails: the second try loads."""
    rig = Rig(load=False)

    def refuse_first(effect: ConfigureModel) -> Input:
        del rig.device.overrides[ConfigureModel]
        return ConfigureFailed(model=effect.model, code=0x0701, reason="once")

    rig.device.overrides[ConfigureModel] = refuse_first
    rig.engine.load("m", "source")
    rig.close()


def skewed_counters() -> None:
    """The device miscounts for good: its counters are not trusted any more."""
    rig = Rig()
    rig.run()
    rig.device.skew = {"finished": 1}
    for number in range(2):
        rig.submit([number + 1, 2], seed=number)
        rig.run()
    assert not rig.state.device.counters_trusted, "E14: wrong counters are trusted"
    rig.close()


def counters_skewed_once() -> None:
    """The device miscounts once: that is borne."""
    rig = Rig()
    rig.run()
    rig.device.skew = {"finished": 1}
    rig.submit([1, 2])
    rig.run()
    assert rig.state.device.counters_trusted, "E14: one odd reading ended the trust"
    rig.close()


def graves_beyond_the_budget() -> None:
    """The process keeps more memory than it may: the device is lost, and says what to do."""
    rig = Rig()
    rig.post(MemoryBuried(item_count=65, byte_count=0))
    rig.run()
    assert "restart the process" in rig.state.device.reason, f"E9: {rig.state.device.state}"
    rig.close()


def broken_journal() -> None:
    """The journal fails at several steps: nothing of that step reaches device or client."""
    for count in range(24, 84, 3):
        rig = begin()
        rig.run_actions(count)
        _fail_next_step(rig)


def _fail_next_step(rig: Rig) -> None:
    rig.journal.fail = True
    asked = len(rig.device.executed) + len(rig.engine._outbox)
    try:
        rig.run()
    except JournalWriteError:
        _check_nothing_of_the_step_is_out(rig, asked)
        rig.engine.close()


def _check_nothing_of_the_step_is_out(rig: Rig, asked: int) -> None:
    assert len(rig.device.executed) <= asked, "decision 4: an effect of a step that is not durable"
    durable = initial_state()
    for step in rig.steps:
        fold(durable, step)
    for one in rig.streams:
        request = durable.requests.get(one.stream.request)
        if request is not None:
            seen, kept = len(one.stream._tokens), len(request.tokens)
            assert seen <= kept, f"decision 14: {seen} tokens delivered, {kept} are durable"
            assert one.stream._result is None, "decision 14: an ending that is not durable"


def illegal_events() -> None:
    """A step whose events have no edge, or move what is elsewhere, cannot be folded."""
    rig = begin()
    rig.run()
    steps = list(rig.steps)
    buffer = min(rig.state.buffers)
    for source, trigger, dest in (
        ("submitted", "complete", "completing"),
        ("free", "release", "free"),
        ("free", "acquire", "completing"),
    ):
        event = attrs.evolve(
            rig.events("buffer", "acquire")[0],
            entities=(buffer,),
            source=source,
            trigger=trigger,
            dest=dest,
        )
        copied = initial_state()
        for step in steps[:-1]:
            fold(copied, step)
        try:
            fold(copied, attrs.evolve(steps[-1], events=(event,)))
        except IllegalTransitionError:
            continue
        raise AssertionError(f"decision 2: buffer {trigger} from {source} to {dest} was folded")


# ---------------------------------------------------------------------------- the board


ONE_BY_ONE = without_resets(Limits(inflight_jobs_max=1, batch_rows_max=1))


@contextmanager
def _run(plan: str = "") -> Iterator[MachineRun]:
    with tempfile.TemporaryDirectory(prefix="laneway-mutant-") as folder:
        run = MachineRun(Path(folder), plan=plan, limits=ONE_BY_ONE, load=False)
        try:
            run.ask_load()
            run.act_until(lambda: run.engine.ready() or not run.act(1))
            assert run.engine.ready(), f"not loaded: {run.state.device.reason}"
            yield run
        finally:
            run.drop()


def board() -> None:
    """Three requests on the simulated board, one cancelled late, memory looked at all the time."""
    with _run() as run:
        for wish in WISHES:
            run.submit(wish)
        run.act(40)
        run.cancel(1)
        while run.act(1):
            run.check_board()
        run.settle()
        run.close()
        run.prove()


def board_that_faults() -> None:
    """A CCU exception that leaves transfers under way: its memory outlives everything."""
    plan = "fault a kind=ccu_exception on=exec nth=3 quiesce=n kv=unknown"
    with _run(plan) as run:
        for wish in WISHES:
            run.submit(wish)
        run.settle()
        assert run.lost
        buffers = sum(len(model.buffers) for model in run.device._models.values())
        states = {buffer.state for buffer in run.state.buffers.values()}
        assert "quarantined" in states, f"E5: {states}"
        run.close()
        run.prove()
        kept = run.device.graveyard.item_count
        assert kept == buffers, f"E9: {kept} of {buffers} arenas outlive the device"


def board_that_steps_illegally() -> None:
    """Polls show slow jobs at their end too early: one in flight from here on, and that is all."""
    slow = "fault a kind=slow on=exec every=1 factor=3000000"
    with _run(f"{slow}\nfault b kind=illegal_step from=exec to=done every=1") as run:
        for wish in WISHES:
            run.submit(wish)
        run.settle()
        device = run.state.device
        assert device.state == "serving", f"E11: a poll alone ends a job: {device.reason}"
        assert "steps illegally" in device.ceiling_reason, f"E11: {device.ceiling_reason!r}"
        run.close()
        run.prove()


def graves_on_the_board() -> None:
    """What a faulty board leaves under way is in the journal with what the process keeps."""
    with _run("fault a kind=ccu_exception on=exec nth=3 quiesce=n kv=unknown") as run:
        for wish in WISHES:
            run.submit(wish)
        run.settle()
        run.close()
        with open_journal(run.file, read_only=True) as journal:
            told = [step.taken for step in journal.read() if isinstance(step.taken, MemoryBuried)]
        kept = run.device.graveyard.item_count
        assert told and told[-1].item_count == kept, f"E9: {kept} kept, told {told}"


def blocked_call() -> None:
    """A call is inside the library beyond five times its bound: the device is left alone."""
    with _run() as run:
        watch = run.device.calls.watch
        call = watch.enter("npurt_job_submit")
        now_ns = watch._now_ns()
        watch._now_ns = lambda: now_ns + 6 * SECOND
        run.device.watch_step()
        watch.leave(call)
        run.settle()
        assert run.lost and run.device.calls.closed, f"E10: {run.state.device.state}"
        run.close()


# ---------------------------------------------------------------------------- the journal


def altered_input() -> None:
    """An input altered behind the journal's back is found, although it decides the same."""
    with tempfile.TemporaryDirectory(prefix="laneway-mutant-") as folder:
        file = Path(folder) / "run.db"
        with open_journal(file) as journal:
            run_core(journal)
        change = "UPDATE step SET input = replace(input, 'fake', 'fame') WHERE step = 1"
        tamper(file, (change, ()))
        with open_journal(file, read_only=True) as journal:
            report = verify(journal)
        assert not report.ok and report.asked == "chain", f"decision 3: altered, yet {report}"


Detector = Callable[[], None]
DETECTORS: tuple[Detector, ...] = (
    script,
    crowd,
    blocks,
    cancels,
    stale_completions,
    kv_not_applied,
    kv_never_applied,
    doubtful_submit,
    last_buffer_in_doubt,
    memory_back_late,
    configure_fails_once,
    skewed_counters,
    counters_skewed_once,
    graves_beyond_the_budget,
    broken_journal,
    illegal_events,
    board,
    board_that_faults,
    board_that_steps_illegally,
    graves_on_the_board,
    blocked_call,
    altered_input,
    *CANARY_DETECTORS,
    *RECOVERY_DETECTORS,
    *GUILT_DETECTORS,
    *REPLACING_DETECTORS,
)
