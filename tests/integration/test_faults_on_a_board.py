"""A board that fails: each fault comes from a plan file and ends as the architecture says.

Clients are told once, a device in doubt that may not be reset is given up, the engine closes, and
the next engine takes the same journal with a fresh board. What resets make of the same faults is in
test_recovery_on_a_board.py.

Source: R2.3, R2.5, R14.1, R14.2, E5, E9, E16, G7, D13.
"""

from pathlib import Path

import numpy as np
import pytest
from support.asking import GREEDY, Ask, answer_alone, draw_ask, outcomes
from support.real_engine import RealEngine, check_journal
from support.rig import without_resets

from laneway.adapters import open_device
from laneway.engine import (
    Engine,
    Limits,
    ModelError,
    Request,
    RequestLostError,
    RequestRejectedError,
    Result,
)
from laneway.engine.inputs import DeviceFaulted, JobStalled, MemoryBuried, SubmitRefused
from laneway.engine.ports import Step
from laneway.journal import open_journal

SECOND = 1_000_000_000


class Case:
    """A board with a fault plan, three requests, and the journal file that must outlive it."""

    def __init__(
        self,
        calbin: Path,
        folder: Path,
        plan: str,
        *,
        clock: str = "virtual",
        limits: Limits | None = None,
        count: int = 3,
    ) -> None:
        (folder / "plan").write_text(f"# what the board does wrong\n{plan}\n")
        self.calbin = calbin
        self.file = folder / "run.db"
        self.real = RealEngine(
            calbin,
            url=f"sim:tiny?clock={clock}&faults={folder / 'plan'}",
            journal=open_journal(self.file),
            limits=without_resets(limits),
        )
        random = np.random.default_rng(31)
        self.asks = [draw_ask(random, tokens_max=8) for _ in range(count)]
        self.alone = [answer_alone(calbin, ask) for ask in self.asks]
        for ask in self.asks:
            self.real.submit(ask)

    def results(self) -> list[Result]:
        """Wait for every ending; what a client saw on the way is what its result says."""
        results = self.real.results()
        for stream, result in zip(self.real.streams, results, strict=True):
            seen = []
            try:
                for delta in stream:
                    seen.append(delta.token)
            except (RequestLostError, RequestRejectedError) as told:
                assert told is result.error
            assert tuple(seen) == result.tokens
            assert (result.error is None) == (result.finish_reason in ("stop", "length"))
        return results

    def check_prefixes(self, results: list[Result]) -> None:
        """No token is wrong, whatever became of the request."""
        for result, alone in zip(results, self.alone, strict=True):
            assert result.tokens == alone.tokens[: len(result.tokens)]

    def check_lost(self) -> None:
        """The device is lost: nothing is served, and a new request is told so at once."""
        health = self.real.engine.health()
        assert (health.device, health.live, health.ready) == ("lost", True, False)
        assert health.reason
        taken = len(self.real.jobs)
        late = self.real.submit(self.asks[0]).result(60)
        self.real.streams.pop()
        assert isinstance(late.error, RequestRejectedError)
        assert (late.error.reason, late.error.http_status) == ("device_lost", 503)
        assert len(self.real.jobs) == taken, "nothing is submitted any more"

    def close(self) -> list[Step]:
        """Close, prove the journal, and serve the same requests by the next engine."""
        self.real.close()
        with open_journal(self.file, read_only=True) as journal:
            steps = check_journal(journal)
        again = RealEngine(self.calbin, journal=open_journal(self.file))
        for ask in self.asks:
            again.submit(ask)
        assert outcomes(again.results()) == self.alone
        again.close()
        with open_journal(self.file, read_only=True) as journal:
            check_journal(journal)
        return steps


def triggers(steps: list[Step], machine: str) -> list[str]:
    """Return a machine's triggers, one for each entity moved."""
    return [
        event.trigger
        for step in steps
        for event in step.events
        if event.machine == machine
        for _ in event.entities
    ]


# ------------------------------------------------------------------------ refused submits


@pytest.mark.parametrize(
    ("nth", "code"), [(1, "0x0601"), (2, "0x0301"), (3, "0x0603"), (5, "0x0601")]
)
def test_a_submit_refused_once_costs_no_request_anything(
    calbin: Path, tmp_path: Path, nth: int, code: str
) -> None:
    case = Case(calbin, tmp_path, f"fault a kind=submit_reject on=submit nth={nth} code={code}")
    assert outcomes(case.results()) == case.alone
    assert case.real.log.refused == [int(code, 16)]
    assert case.real.engine.ready()
    case.close()


def test_a_request_whose_submits_are_always_refused_fails_alone(
    calbin: Path, tmp_path: Path
) -> None:
    """Rows 3 and 5: one retry, then the request pays; the device is not lost over one request."""
    plan = "fault a kind=submit_reject on=submit task=prefill count=2 code=0x0601"
    case = Case(calbin, tmp_path, plan)
    first, *others = case.results()
    assert isinstance(first.error, RequestLostError)
    assert "refused (2 times)" in str(first.error) and "0x0601" in str(first.error)
    assert outcomes(others) == case.alone[1:]
    assert case.real.engine.ready()
    case.close()


def test_submits_refused_for_ever_end_in_a_lost_device(calbin: Path, tmp_path: Path) -> None:
    plan = "fault a kind=submit_reject on=submit count=inf code=0x0601"
    case = Case(calbin, tmp_path, plan)
    results = case.results()
    assert all(isinstance(result.error, RequestLostError) for result in results)
    assert not any(result.tokens for result in results)
    assert case.real.log.refused == [0x0601] * Limits().submit_refusals_in_a_row_max
    case.check_lost()
    steps = case.close()
    assert triggers(steps, "device").count("lose") == 1


def test_a_device_that_is_always_full_is_asked_a_bounded_number_of_times(
    calbin: Path, tmp_path: Path
) -> None:
    """Row 2: back off, come back, then say that it is busy; the device itself is well."""
    plan = "fault a kind=submit_reject on=submit count=inf code=0x0301"
    limits = Limits(backoff_tries_max=4)
    case = Case(calbin, tmp_path, plan, limits=limits, count=1)
    (result,) = case.results()
    assert isinstance(result.error, RequestLostError) and "QUEUE_FULL" in str(result.error)
    assert case.real.log.refused == [0x0301] * (limits.backoff_tries_max + 1)
    assert case.real.engine.health().device == "serving"
    steps = case.close()
    at_ns = [step.at_ns for step in steps if isinstance(step.taken, SubmitRefused)]
    waits = np.diff(at_ns)
    assert (waits >= [limits.backoff_first_ns << tries for tries in range(len(waits))]).all()


def test_a_stale_generation_ends_in_a_lost_device(calbin: Path, tmp_path: Path) -> None:
    case = Case(calbin, tmp_path, "fault a kind=submit_reject on=submit nth=2 code=0x0202")
    case.check_prefixes(case.results())
    case.check_lost()
    case.close()


# ------------------------------------------------------------------------ exceptions


@pytest.mark.parametrize(
    ("quiesce", "kv", "nth", "clock"),
    [
        ("y", "partial", 2, "virtual"),
        ("y", "unknown", 4, "virtual"),
        ("n", "none", 3, "virtual"),
        ("n", "partial", 5, "virtual"),
        ("n", "unknown", 2, "real"),
    ],
)
def test_an_exception_is_told_once_and_the_device_is_given_up(
    calbin: Path, tmp_path: Path, quiesce: str, kv: str, nth: int, clock: str
) -> None:
    plan = f"fault a kind=ccu_exception on=exec nth={nth} code=77 quiesce={quiesce} kv={kv}"
    case = Case(calbin, tmp_path, plan, clock=clock)
    results = case.results()
    case.check_prefixes(results)
    failed = [result for result in results if result.error is not None]
    assert failed and all(isinstance(result.error, RequestLostError) for result in failed)
    assert len(case.real.jobs) == nth
    case.check_lost()
    buffers = len(case.real.arenas)
    graveyard = case.real.device.graveyard
    steps = case.close()
    faults = [step.taken for step in steps if isinstance(step.taken, DeviceFaulted)]
    assert [(one.kind, one.code, one.kv_effect) for one in faults] == [("ccu", 0x0604, kv)]
    assert faults[0].quiescent == (quiesce == "y")
    assert faults[0].record is not None and faults[0].record.code == 77
    assert (triggers(steps, "job").count("fault"), triggers(steps, "device").count("lose")) == (
        1,
        1,
    )
    assert triggers(steps, "buffer").count("quarantine") == 1
    assert triggers(steps, "lane").count("suspect") >= 1
    assert triggers(steps, "request").count("fail") == len(failed)
    assert graveyard.item_count == buffers, "E9, D13: all memory outlives a device left alone"


def test_a_process_that_keeps_too_much_memory_serves_on_no_fresh_board_either(
    calbin: Path, tmp_path: Path
) -> None:
    """E9: the budget is of the process, so the next engine in it is told to restart the process."""
    (tmp_path / "plan").write_text("fault a kind=ccu_exception on=exec nth=2 quiesce=n\n")
    limits = without_resets(Limits(buried_items_max=9))
    kept: list[int] = []
    for _ in range(5):
        device = open_device(f"sim:tiny?clock=virtual&faults={tmp_path / 'plan'}")
        with Engine(
            device=device, journal=open_journal(tmp_path / "run.db"), limits=limits
        ) as engine:
            if kept and kept[-1] > limits.buried_items_max:
                with pytest.raises(ModelError, match="a process may keep 9 .* restart the process"):
                    engine.load("m", str(calbin))
                break
            engine.load("m", str(calbin))
            ask = Request(model="m", prompt=(1, 2), max_tokens=4, ignore_eos=True)
            engine.submit(ask).result()
            assert engine.health().device == "lost"
        with open_journal(tmp_path / "run.db", read_only=True) as journal:
            told = [step.taken for step in journal.read() if isinstance(step.taken, MemoryBuried)]
        kept.append(told[-1].item_count)
    else:
        raise AssertionError(f"never over the budget: {kept}")
    assert kept == sorted(set(kept)), "what a process keeps never falls"


@pytest.mark.parametrize("task", ["prefill", "decode"])
def test_an_exception_while_loading_fails_the_load(calbin: Path, tmp_path: Path, task: str) -> None:
    (tmp_path / "plan").write_text(
        f"fault a kind=ccu_exception on=exec nth=2 during=load task={task} quiesce=n\n"
    )
    file = tmp_path / "run.db"
    device = open_device(f"sim:tiny?clock=virtual&faults={tmp_path / 'plan'}")
    limits = without_resets()
    with Engine(device=device, journal=open_journal(file), limits=limits) as engine:
        with pytest.raises(ModelError, match="ccu"):
            engine.load("m", str(calbin))
        assert engine.health().device == "lost"
        refused = engine.submit(Request(model="m", prompt=(1, 2))).result()
        assert isinstance(refused.error, RequestRejectedError)
    again = RealEngine(calbin, journal=open_journal(file))
    ask = Ask(prompt=(1, 2, 3), max_tokens=4, sampling=GREEDY)
    assert outcomes([again.submit(ask).result()]) == [answer_alone(calbin, ask)]
    again.close()
    with open_journal(file, read_only=True) as journal:
        check_journal(journal)


# ------------------------------------------------------------------------ hangs


@pytest.mark.parametrize(("phase", "nth"), [("h2d", 1), ("exec", 4), ("d2h", 2)])
def test_a_hang_is_suspected_confirmed_and_given_up(
    calbin: Path, tmp_path: Path, phase: str, nth: int
) -> None:
    case = Case(calbin, tmp_path, f"fault a kind=hang on={phase} nth={nth} release=never")
    results = case.results()
    case.check_prefixes(results)
    assert any("hang" in str(result.error) for result in results)
    case.check_lost()
    steps = case.close()
    stalls = [(step.taken, step.at_ns) for step in steps if isinstance(step.taken, JobStalled)]
    assert [(one.stage, one.phase) for one, _ in stalls] == [("suspect", phase), ("confirm", phase)]
    limits = Limits()
    for (one, _), limit in zip(
        stalls, (limits.hang_suspect_ns, limits.hang_confirm_ns), strict=True
    ):
        assert limit <= one.age_ns < limit + SECOND // 1000
    assert triggers(steps, "device")[-4:] == ["suspect", "lose", "shut", "close"]


def test_a_hang_with_threads_is_bounded_too(calbin: Path, tmp_path: Path) -> None:
    limits = Limits(hang_suspect_ns=SECOND, hang_confirm_ns=2 * SECOND)
    plan = "fault a kind=hang on=exec nth=3 release=never"
    case = Case(calbin, tmp_path, plan, clock="real", limits=limits)
    results = case.results()
    case.check_prefixes(results)
    assert any("hang" in str(result.error) for result in results)
    case.check_lost()
    case.close()


def test_closing_over_a_hang_ends(calbin: Path, tmp_path: Path) -> None:
    """What is in flight is waited for, and the hang rule bounds the wait (D13, E16)."""
    case = Case(calbin, tmp_path, "fault a kind=hang on=exec nth=2 release=never")
    case.real.engine.close(drain=False)
    results = case.real.results()
    case.check_prefixes(results)
    assert {result.finish_reason for result in results} <= {"cancelled", "length", "stop"}
    with open_journal(case.file, read_only=True) as journal:
        check_journal(journal)
