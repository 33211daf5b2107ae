"""The whole engine on a board that fails in every way it can: each fault ends in a true end state.

A request is answered exactly, or its client is told once why it is not; a device in doubt that may
not be reset is lost and says so; the journal proves itself; the board has seen no mistake of the
host.

Source: R14.1, R14.2, E5, E7, E9, E14, E16, E17, G7, I5, rows 3 to 12 and 19 to 21.
"""

from pathlib import Path
from typing import TypeVar

import attrs
import numpy as np
import pytest
from support.asking import Ask, Outcome, answer_alone, draw_ask, outcomes, pack_with_end_tokens
from support.real_engine import RealEngine, check_journal
from support.rig import without_resets

from laneway.adapters import open_device
from laneway.adapters.npurt import LATE
from laneway.engine import Engine, ModelError, RequestLostError, RequestRejectedError, Result
from laneway.engine.inputs import (
    Completed,
    CountersRead,
    DeviceFaulted,
    Input,
    JobStalled,
    KvApplyFailed,
)
from laneway.engine.ports import Step
from laneway.journal import open_journal

Kind = TypeVar("Kind", bound=Input)
KV_RETRIES = 2
"""Row 19 of the ladder."""
DEVICE_LOST = ("device", "lose")
REQUEST_FAILED = ("request", "fail")


@pytest.fixture(scope="module")
def calbin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_with_end_tokens(tmp_path_factory.mktemp("engine"))


@attrs.frozen(eq=False)
class Ended:
    """What a plan led to: the real engine, its results, what each had to be, the journal file."""

    real: RealEngine
    results: list[Result]
    asks: list[Ask]
    alone: list[Outcome]
    file: Path

    @property
    def failed(self) -> list[Result]:
        """The requests that were not answered."""
        return [result for result in self.results if result.error is not None]

    def check(self) -> None:
        """Whoever was answered was answered exactly; whoever was not has a true beginning."""
        for result, stream, alone in zip(self.results, self.real.streams, self.alone, strict=True):
            assert stream.result(0) is result
            if result.error is None:
                assert outcomes([result]) == [alone]
            else:
                assert isinstance(result.error, RequestLostError)
                assert str(result.error)
                assert result.tokens == alone.tokens[: len(result.tokens)]

    def check_serving(self, *, device: str = "serving") -> None:
        """The device goes on: requests are served."""
        assert self.real.engine.ready()
        assert self.real.engine.health().device == device

    def check_lost(self, reason: str) -> None:
        """The device is lost and says why; a new request is told so at once."""
        health = self.real.engine.health()
        assert (health.device, health.live, health.ready) == ("lost", True, False)
        assert reason in health.reason
        taken = len(self.real.jobs)
        refused = self.real.submit(self.asks[0]).result(60)
        self.real.streams.pop()
        assert isinstance(refused.error, RequestRejectedError)
        assert (refused.error.reason, refused.error.http_status) == ("device_lost", 503)
        assert len(self.real.jobs) == taken, "nothing is submitted any more"

    def close(self) -> list[Step]:
        """Close, prove the journal, and return its steps."""
        self.real.close()
        with open_journal(self.file, read_only=True) as journal:
            return check_journal(journal)


def play(calbin: Path, folder: Path, plan: str, *, count: int = 3, clock: str = "virtual") -> Ended:
    """Answer some requests on a board with a fault plan."""
    (folder / "plan").write_text(plan + "\n")
    file = folder / "run.db"
    url = f"sim:tiny?clock={clock}&faults={folder / 'plan'}"
    real = RealEngine(calbin, url=url, journal=open_journal(file), limits=without_resets())
    random = np.random.default_rng(47)
    asks = [attrs.evolve(draw_ask(random), max_tokens=6, ignore_eos=True) for _ in range(count)]
    for ask in asks:
        real.submit(ask)
    ended = Ended(real, real.results(), asks, [answer_alone(calbin, ask) for ask in asks], file)
    ended.check()
    return ended


def taken(steps: list[Step], kind: type[Kind]) -> list[Kind]:
    """Return the inputs of one kind, in order."""
    return [step.taken for step in steps if isinstance(step.taken, kind)]


# ------------------------------------------------------------------------ nobody is told anything


@pytest.mark.parametrize(
    "plan",
    [
        "fault a kind=csr_fail nth=1",
        "fault a kind=csr_fail every=4",
        "fault a kind=slow factor=1000 p=0.5",
        "fault a kind=slow phase=h2d factor=1000000 nth=3",
        "fault a kind=lost_completion every=3",
        "fault a kind=late_completion delay=1s every=4",
        "fault a kind=kv_apply_before nth=2",
        "fault a kind=kv_apply_before code=0x304 nth=1",
        "fault a kind=kv_apply_before every=3",
        "fault a kind=kv_can_lie tokens=64 p=0.5",
        "fault a kind=kv_can_lie tokens=-1000 p=0.5",
        "fault a kind=late_dma delay=1us count=inf",
    ],
)
def test_a_fault_that_can_be_borne_costs_no_request_anything(
    calbin: Path, tmp_path: Path, plan: str
) -> None:
    ended = play(calbin, tmp_path, plan)
    assert ended.failed == []
    ended.check_serving()
    steps = ended.close()
    assert taken(steps, JobStalled) == []
    assert taken(steps, DeviceFaulted) == []


def test_wrong_counters_free_and_stop_nothing(calbin: Path, tmp_path: Path) -> None:
    ended = play(calbin, tmp_path, "fault a kind=counter_skew field=left n=-7 count=inf")
    assert ended.failed == []
    ended.check_serving()
    ended.close()


@pytest.mark.parametrize(
    "plan",
    [
        "fault a kind=slow factor=3000000 nth=3",
        "fault a kind=late_completion delay=3s nth=3",
    ],
)
def test_a_suspect_that_was_only_slow_is_absolved(calbin: Path, tmp_path: Path, plan: str) -> None:
    """E16: a suspicion stops submissions and nothing else."""
    ended = play(calbin, tmp_path, plan)
    assert ended.failed == []
    ended.check_serving()
    steps = ended.close()
    assert [one.stage for one in taken(steps, JobStalled)] == ["suspect"]
    moves = [(e.machine, e.trigger) for step in steps for e in step.events if e.machine == "device"]
    assert [trigger for _, trigger in moves if trigger in ("suspect", "absolve", "lose")] == [
        "suspect",
        "absolve",
    ]


def test_completions_that_no_wait_told_are_found_in_running_time(
    calbin: Path, tmp_path: Path
) -> None:
    ended = play(calbin, tmp_path, "fault a kind=lost_completion nth=3", clock="real")
    assert ended.failed == []
    assert ended.real.device._waiting.missed_count == 1
    ended.check_serving()
    ended.close()


# ------------------------------------------------------------------------ some pay


def test_a_register_that_always_fails_ends_in_a_lost_device(calbin: Path, tmp_path: Path) -> None:
    ended = play(calbin, tmp_path, "fault a kind=csr_fail count=inf")
    assert len(ended.failed) == len(ended.results)
    ended.check_lost("CSR_FAILED")
    ended.close()


@pytest.mark.parametrize("keys", ["", "code=0x704 partial=y"])
def test_kv_that_was_not_committed_costs_its_lane_only(
    calbin: Path, tmp_path: Path, keys: str
) -> None:
    """Row 20: the lane is out of use; its request goes on in another, exactly."""
    ended = play(calbin, tmp_path, f"fault a kind=kv_apply_after {keys} nth=2")
    assert ended.failed == []
    ended.check_serving(device="degraded")
    (failure,) = taken(ended.close(), KvApplyFailed)
    assert failure.operation == "COMMIT"
    assert failure.unknown == ("partial" in keys)


def test_a_doubtful_submit_that_runs_costs_a_lane_and_a_buffer(
    calbin: Path, tmp_path: Path
) -> None:
    """Row 4: both are out of use until the model is unloaded; the request goes on, exactly."""
    ended = play(calbin, tmp_path, "fault a kind=submit_indeterminate runs=yes nth=3")
    assert ended.failed == []
    assert "doubtful submit" in ended.real.engine.health().reason
    ended.check_serving(device="degraded")
    assert dict(ended.real.engine.snapshot().buffers)["quarantined"] == 1
    assert dict(ended.real.engine.snapshot().lanes)["unknown"] == 1
    ended.real.engine.unload("m")
    assert ended.real.engine.health().device == "serving"
    assert ended.real.device.graveyard.item_count == 0, "it was quiescent"
    ended.close()


@pytest.mark.parametrize("field", ["submitted", "finished"])
def test_wrong_counters_cost_trust_and_nothing_else(
    calbin: Path, tmp_path: Path, field: str
) -> None:
    """Row 21, E14: service goes on, and honest counters are trusted to the end."""
    for plan, wrong in (
        ("", False),
        (f"fault a kind=counter_skew field={field} n=1 count=inf", True),
    ):
        folder = tmp_path / str(wrong)
        folder.mkdir()
        ended = play(calbin, folder, plan)
        assert not ended.failed
        ended.real.submit(ended.asks[0])
        ended.real.run()
        ended.check_serving()
        steps = ended.close()
        moved = [e for step in steps for e in step.events if e.trigger == "distrust"]
        assert len(moved) == wrong
        read = taken(steps, CountersRead)
        assert read and all(dict(one.counters)["submitted"] for one in read)


def test_kv_that_can_never_be_reserved_is_tried_a_bounded_number_of_times(
    calbin: Path, tmp_path: Path
) -> None:
    ended = play(calbin, tmp_path, "fault a kind=kv_apply_before count=inf", count=1)
    assert "KV_APPLY" in str(ended.failed[0].error)
    lanes = dict(ended.real.engine.snapshot().lanes)
    assert set(lanes) == {"empty"}, "a lane that was never reserved is not in doubt"
    ended.check_serving()
    failures = taken(ended.close(), KvApplyFailed)
    assert [failure.operation for failure in failures] == ["RESERVE"] * (1 + KV_RETRIES)


@pytest.mark.parametrize(
    ("plan", "device"),
    [
        ("fault a kind=submit_indeterminate runs=no nth=3", "degraded"),
        ("fault a kind=ccu_exception quiesce=y kv=none nth=4", "degraded"),
        ("fault a kind=dma_error dir=h2d offset=4 nth=4", "degraded"),
        ("fault a kind=dma_error dir=d2h offset=100 nth=4", "degraded"),
        ("fault a kind=numeric_nan nth=4", "degraded"),
        ("fault a kind=numeric_nan nth=2 flag=n", "degraded"),
    ],
)
def test_a_fault_whose_extent_is_known_costs_a_buffer_and_no_reset(
    calbin: Path, tmp_path: Path, plan: str, device: str
) -> None:
    """Rows 4, 6 and 12: the job runs again, exactly; no reset is needed, and none is there."""
    ended = play(calbin, tmp_path, plan)
    assert ended.failed == []
    ended.check_serving(device=device)
    steps = ended.close()
    moves = [e.trigger for step in steps for e in step.events if e.machine == "device"]
    assert "reset" not in moves


# ------------------------------------------------------------------------ while loading


def loads(calbin: Path, folder: Path, plan: str) -> tuple[bool, str]:
    """Load a model on a board with a fault plan; return whether it is ready, and the device."""
    (folder / "plan").write_text(plan + "\n")
    url = f"sim:tiny?clock=virtual&faults={folder / 'plan'}"
    device = open_device(url)
    journal = open_journal(folder / "run.db")
    with Engine(device=device, journal=journal, limits=without_resets()) as engine:
        try:
            engine.load("m", str(calbin))
        except ModelError as error:
            assert str(error)
            assert not engine.ready()
        return engine.ready(), engine.health().device


@pytest.mark.parametrize(
    "keys",
    [
        "csr_fail nth=1",
        "slow factor=1000 nth=2",
        "lost_completion nth=2",
        "late_completion delay=3s nth=3",
        "kv_apply_before nth=2",
        "kv_can_lie tokens=9 count=inf",
        "counter_skew field=submitted n=1 count=inf",
    ],
)
def test_a_load_bears_what_a_request_bears(calbin: Path, tmp_path: Path, keys: str) -> None:
    plan = f"fault a kind={keys} during=load"
    assert loads(calbin, tmp_path, plan) == (True, "serving")


@pytest.mark.parametrize(
    ("keys", "device"),
    [
        ("submit_indeterminate nth=2", "serving"),
        ("submit_indeterminate runs=no nth=1", "serving"),
        ("lost_completion poll_sees=n nth=2", "lost"),
        ("dma_error dir=d2h nth=2", "serving"),
        ("numeric_nan nth=2", "lost"),
        ("numeric_nan nth=3 flag=n", "lost"),
        ("kv_apply_after nth=1", "serving"),
        ("kv_apply_after nth=1 partial=y", "serving"),
        ("kv_apply_before count=inf", "serving"),
        ("csr_fail count=2", "serving"),
    ],
)
def test_a_load_that_cannot_be_believed_fails(
    calbin: Path, tmp_path: Path, keys: str, device: str
) -> None:
    plan = f"fault a kind={keys} during=load"
    assert loads(calbin, tmp_path, plan) == (False, device)


# ------------------------------------------------------------------------ the device is lost


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("fault a kind=slow factor=10000000 nth=4", "hangs"),
        ("fault a kind=lost_completion poll_sees=n nth=4", "hangs"),
        ("fault a kind=late_completion delay=20s nth=4", "hangs"),
    ],
)
def test_a_device_in_doubt_is_lost_and_says_why(
    calbin: Path, tmp_path: Path, plan: str, reason: str
) -> None:
    ended = play(calbin, tmp_path, plan)
    assert ended.failed
    ended.check_lost(reason)
    steps = ended.close()
    losses = [e for step in steps for e in step.events if (e.machine, e.trigger) == DEVICE_LOST]
    assert len(losses) == 1
    fails = [e for step in steps for e in step.events if (e.machine, e.trigger) == REQUEST_FAILED]
    assert sum(len(event.entities) for event in fails) == len(ended.failed), "each is told once"


def test_a_result_that_comes_after_its_job_was_given_up_changes_nothing(
    calbin: Path, tmp_path: Path
) -> None:
    """I5, E7: it is recorded as an input, and nobody gets anything."""
    ended = play(calbin, tmp_path, "fault a kind=late_completion delay=20s nth=4")
    before = [(result.tokens, result.finish_reason) for result in ended.results]
    while ended.real.engine.advance():
        ended.real.engine.run_until_idle()
    again = [stream.result(0) for stream in ended.real.streams]
    assert [(result.tokens, result.finish_reason) for result in again] == before
    steps = ended.close()
    late = [step for step in steps if isinstance(step.taken, Completed) and step.taken.flags & LATE]
    assert [step.events for step in late] == [()]


def test_a_late_write_reaches_no_memory_that_is_in_use(calbin: Path, tmp_path: Path) -> None:
    plan = (
        "fault x kind=ccu_exception quiesce=n kv=unknown nth=4\n"
        "fault d kind=late_dma delay=30s bytes=4096"
    )
    ended = play(calbin, tmp_path, plan)
    ended.check_lost("ccu")
    real = ended.real
    graveyard = real.device.graveyard
    held = [buffer for buffer in real.device._models[real.model].buffers.values() if buffer.tainted]
    assert len(held) == graveyard.item_count == 1
    (buried,) = held
    buried.views["logits"][...] = 0
    before = {number: bytes(arena.mapping) for number, arena in real.arenas.items()}
    real.simulator.step_idle()
    after = {number: bytes(arena.mapping) for number, arena in real.arenas.items()}
    assert before.pop(buried.number) != after.pop(buried.number), "the write did come"
    assert after == before
    ended.close()
