"""The adapter on a board that fails in every way it can: what is posted, what memory does.

Source: E3, E4, E5, E7, E9, E14, E16, E17, D2, D3, D6, D12, rows 4, 5, 8 to 12, 19 and 20.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import attrs
import numpy as np
import pytest
from support.driven_device import DrivenDevice, row, settle_rows

from laneway.adapters import open_device
from laneway.adapters.arena import Account, Graveyard
from laneway.adapters.binding import Answer
from laneway.adapters.buffers import Buffer
from laneway.adapters.device import NpurtDevice
from laneway.adapters.npurt import LATE, NUMERIC_FLAG, Code
from laneway.adapters.packing import pack
from laneway.engine.effects import ApplyKv, KvOperation, ProbeHealth, RestoreBuffer, SubmitJob
from laneway.engine.inputs import (
    BufferRestored,
    Completed,
    DeviceFaulted,
    HealthProbed,
    Input,
    JobStalled,
    KvApplied,
    KvApplyFailed,
    RestoreFailed,
    SubmitAccepted,
    SubmitDoubtful,
    SubmitRefused,
)

MODELS = Path(__file__).resolve().parents[2] / "models"
PROMPT = (1, 2, 3)
Load = Callable[..., DrivenDevice]
Kind = TypeVar("Kind", bound=Input)


@pytest.fixture(scope="module")
def calbin(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("calbin") / "tiny-dense"
    pack(MODELS / "tiny-dense", folder, batch=(1, 4))
    return str(folder)


@contextmanager
def loading(calbin: str, *, threads: bool) -> Iterator[Load]:
    """Open boards on the manual clock with a fault plan and a model published."""
    opened: list[DrivenDevice] = []

    def make(faults: str = "") -> DrivenDevice:
        device = open_device("sim:tiny?clock=manual")
        assert isinstance(device, NpurtDevice) and device.simulator is not None
        device.simulator.set_faults(faults)
        opened.append(DrivenDevice(device, threads=threads))
        opened[-1].load(calbin)
        return opened[-1]

    yield make
    for driven in opened:
        driven.device.stop()


@pytest.fixture(params=[False, True], ids=["stepped", "threads"])
def load(request: pytest.FixtureRequest, calbin: str) -> Iterator[Load]:
    with loading(calbin, threads=request.param) as make:
        yield make


@pytest.fixture
def load_stepped(calbin: str) -> Iterator[Load]:
    """Where it matters that everything is looked at before time passes."""
    with loading(calbin, threads=False) as make:
        yield make


def kinds(driven: DrivenDevice) -> list[str]:
    """Return the mistakes of the host that the board saw."""
    assert driven.device.simulator is not None
    return [violation.kind for violation in driven.device.simulator.violations()]


def posted(driven: DrivenDevice, kind: type[Kind]) -> list[Kind]:
    return [one for one in driven.posted if isinstance(one, kind)]


def buffer_of(driven: DrivenDevice, effect: SubmitJob) -> Buffer:
    return driven.device._models[1].buffers[effect.buffer]


def expected_token(load: Load) -> int:
    """The greedy token behind the prompt on a board without faults."""
    driven = load()
    return driven.complete(driven.job("prefill", (row(PROMPT),))).rows[0].token


def run_out(driven: DrivenDevice) -> None:
    """Let everything happen that still will."""
    while driven.device.advance():
        driven.settle()


# ------------------------------------------------------------------------ time


@pytest.mark.parametrize(
    "faults",
    [
        "",
        "fault a kind=slow on=exec nth=1 factor=300000",
        "fault a kind=hang on=exec nth=1 release=never",
        "fault a kind=late_completion on=visible nth=1 delay=3s",
        "fault a kind=lost_completion on=visible nth=1 poll_sees=y",
    ],
)
def test_going_from_end_to_end_tells_what_going_from_event_to_event_tells(
    calbin: str, faults: str
) -> None:
    told, moves = [], []
    for whole_jobs in (False, True):
        device = open_device(
            "sim:tiny?clock=manual", whole_jobs=whole_jobs, graveyard=Graveyard(Account())
        )
        assert isinstance(device, NpurtDevice) and device.simulator is not None
        device.simulator.set_faults(faults)
        driven = DrivenDevice(device, threads=False)
        try:
            driven.load(calbin)
            seen, begun = len(driven.posted), device.calls.moves
            stall_ns = (2_000_000_000, 6_000_000_000, 60_000_000_000)
            device.execute(driven.job("prefill", (row(PROMPT),), stall_ns=stall_ns))
            driven.settle()
            run_out(driven)
        finally:
            device.stop()
        told.append([(type(one), _without_host_time(one)) for one in driven.posted[seen:]])
        moves.append(device.calls.moves - begun)
    assert told[0] == told[1]
    assert any(kind in (Completed, JobStalled) for kind, _ in told[1])
    assert faults or moves[1] < moves[0], "and a sound job takes fewer steps"


def _without_host_time(one: Input) -> dict[str, object]:
    """Return the fields of an answer, but for the numbering and the time of the process."""
    fields = attrs.asdict(one)
    fields.pop("ticket", None)
    fields.get("times", {}).pop("postprocess_ns", None)
    return fields


# ------------------------------------------------------------------------ submits


def test_a_doubtful_submit_that_runs_is_waited_for(load: Load) -> None:
    expected = expected_token(load)
    driven = load("fault i kind=submit_indeterminate runs=yes")
    effect = driven.job("prefill", (row(PROMPT),))
    doubtful = driven.ask(effect, SubmitDoubtful)
    assert (doubtful.job, doubtful.code) == (effect.job, Code.SUBMIT_INDETERMINATE)
    done = driven.next(Completed, after=0)
    assert (done.ticket, done.rows[0].token) == (doubtful.ticket, expected)
    assert doubtful.ticket != 0
    assert not posted(driven, SubmitAccepted) and not posted(driven, SubmitRefused)


def test_a_doubtful_submit_that_never_runs_is_a_hang(load: Load) -> None:
    driven = load("fault i kind=submit_indeterminate runs=no")
    effect = driven.job("prefill", (row(PROMPT),))
    driven.ask(effect, SubmitDoubtful)
    stalled = driven.next(JobStalled, after=0, fits=lambda one: one.stage == "confirm")
    assert (stalled.job, stalled.phase) == (effect.job, "queued")
    assert posted(driven, Completed) == []


def test_a_doubtful_submit_without_a_ticket_ends_the_job_at_once(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No library may do this; if one does, the job must end and its memory is kept."""
    driven = load()
    attempt = driven.device.calls.library.attempt

    def fail(name: str, *arguments: object) -> Answer:
        if name == "npurt_job_submit":
            return Answer(name, Code.SUBMIT_INDETERMINATE, "no ticket")
        return attempt(name, *arguments)

    monkeypatch.setattr(driven.device.calls.library, "attempt", fail)
    effect = driven.job("prefill", (row(PROMPT),))
    assert driven.ask(effect, SubmitDoubtful).ticket == 0
    fault = driven.next(DeviceFaulted, after=0)
    assert (fault.job, fault.kind, fault.quiescent) == (effect.job, "call", False)
    assert driven.device.graveyard.item_count == 1
    assert buffer_of(driven, effect).tainted


def test_a_register_that_fails_is_a_refusal_to_be_rolled_back(load: Load) -> None:
    driven = load("fault c kind=csr_fail k=7")
    effect = driven.job("prefill", (row(PROMPT),))
    refused = driven.ask(effect, SubmitRefused)
    assert (refused.job, refused.code) == (effect.job, Code.CSR_FAILED)
    assert "register 7" in refused.reason
    again = driven.job("prefill", (row(PROMPT),), before=settle_rows("ROLLBACK", effect))
    assert driven.complete(again).rows[0].token >= 0


# ------------------------------------------------------------------------ late and lost


def test_a_completion_that_no_wait_told_is_found_before_a_stall_is_reported(load: Load) -> None:
    expected = expected_token(load)
    driven = load("fault l kind=lost_completion nth=1")
    done = driven.complete(driven.job("prefill", (row(PROMPT),)))
    assert done.rows[0].token == expected
    assert driven.device._waiting.missed_count == 1
    run_out(driven)
    assert not posted(driven, JobStalled) and not posted(driven, DeviceFaulted)
    assert len(posted(driven, Completed)) == 1


def test_a_completion_that_nobody_tells_is_a_hang(load: Load) -> None:
    driven = load("fault l kind=lost_completion poll_sees=n")
    effect = driven.job("prefill", (row(PROMPT),))
    driven.device.execute(effect)
    driven.next(JobStalled, after=0, fits=lambda one: one.stage == "cap")
    assert [one.stage for one in posted(driven, JobStalled)] == ["suspect", "confirm", "cap"]
    assert posted(driven, Completed) == []
    assert driven.device._waiting.missed_count == 0


@pytest.mark.parametrize(
    ("delay", "stages"),
    [("1s", []), ("3s", ["suspect"]), ("10s", ["suspect", "confirm"])],
)
def test_a_late_completion_is_posted_once(
    load_stepped: Load, delay: str, stages: list[str]
) -> None:
    expected = expected_token(load_stepped)
    driven = load_stepped(f"fault l kind=late_completion delay={delay}")
    done = driven.complete(driven.job("prefill", (row(PROMPT),)))
    assert done.rows[0].token == expected
    assert done.flags & LATE
    run_out(driven)
    assert [one.stage for one in posted(driven, JobStalled)] == stages
    assert len(posted(driven, Completed)) == 1
    assert kinds(driven) == []


def test_a_doubled_completion_is_posted_once(load_stepped: Load) -> None:
    driven = load_stepped()
    effect = driven.job("prefill", (row(PROMPT),))
    driven.submit(effect)
    (flight,) = driven.device._waiting._snapshot()
    driven.next(Completed, after=0)
    driven.device._waiting._finish(flight)
    driven.device._waiting._give_up(flight, Answer("npurt_job_wait", Code.DEVICE_LOST))
    assert [one.ticket for one in posted(driven, Completed)] == [flight.ticket]
    assert not posted(driven, DeviceFaulted)
    assert driven.device.graveyard.item_count == 0


@pytest.mark.parametrize(("factor", "stages"), [(1e6, []), (3e6, ["suspect"])])
def test_a_slow_job_is_called_stalled_only_when_the_rule_says_so(
    load_stepped: Load, factor: float, stages: list[str]
) -> None:
    """The phase takes a second (nothing is said), or three: suspected, then done after all."""
    expected = expected_token(load_stepped)
    driven = load_stepped(f"fault s kind=slow factor={factor:.0f}")
    done = driven.complete(driven.job("prefill", (row(PROMPT),)))
    assert done.rows[0].token == expected
    assert [one.stage for one in posted(driven, JobStalled)] == stages


# ------------------------------------------------------------------------ memory


def test_a_late_write_lands_in_buried_memory_only(load_stepped: Load) -> None:
    driven = load_stepped(
        "fault x kind=ccu_exception quiesce=n kv=unknown\nfault d kind=late_dma delay=5s bytes=128"
    )
    effect = driven.job("prefill", (row(PROMPT),))
    fault = driven.run(effect, DeviceFaulted)
    assert not fault.quiescent
    buried = buffer_of(driven, effect)
    assert driven.device.graveyard.item_count == 1, "buried before anybody heard of the fault"
    restore = RestoreBuffer(model=1, buffer=effect.buffer, job=effect.job, ticket=fault.ticket)
    assert driven.ask(restore, RestoreFailed).buffer == effect.buffer
    with pytest.raises(BufferError):
        buried.arena.mapping.close()
    others = {
        number: buffer.arena
        for number, buffer in driven.device._models[1].buffers.items()
        if number != effect.buffer
    }
    before = {number: bytes(arena.mapping) for number, arena in others.items()}
    buried.views["logits"][...] = 0
    assert driven.device.simulator is not None
    driven.device.simulator.step_idle()
    written = np.asarray(buried.views["logits"]).reshape(-1).view(np.uint8)
    assert written[:128].all() and not written[128:].any()
    assert {number: bytes(arena.mapping) for number, arena in others.items()} == before
    assert kinds(driven) == []


def test_memory_of_a_quiescent_failure_is_not_buried(load: Load) -> None:
    driven = load("fault x kind=ccu_exception quiesce=y kv=none")
    effect = driven.job("prefill", (row(PROMPT),))
    fault = driven.run(effect, DeviceFaulted)
    assert fault.quiescent
    assert driven.device.graveyard.item_count == 0
    restore = RestoreBuffer(model=1, buffer=effect.buffer, job=effect.job, ticket=fault.ticket)
    assert driven.ask(restore, BufferRestored).job == effect.job


@pytest.mark.parametrize(("direction", "kv"), [("h2d", "none"), ("d2h", "applied")])
def test_a_transfer_that_breaks_off_is_a_fault_and_nothing_is_delivered(
    load: Load, direction: str, kv: str
) -> None:
    driven = load(f"fault e kind=dma_error dir={direction} offset=4")
    fault = driven.run(driven.job("prefill", (row(PROMPT),)), DeviceFaulted)
    assert (fault.kind, fault.code, fault.kv_effect) == ("dma", Code.DMA, kv)
    assert kinds(driven) == []
    assert posted(driven, Completed) == []


def use_twice(driven: DrivenDevice) -> None:
    """Run a long and then a short prompt through one and the same buffer."""
    long = driven.job("prefill", (row((4, 5, 6, 7, 8), lane=0),))
    done = driven.complete(long)
    restore = RestoreBuffer(model=1, buffer=long.buffer, job=long.job, ticket=done.ticket)
    driven.ask(restore, BufferRestored)
    short = driven.job("prefill", (row((9, 2), lane=1),), buffer=long.buffer)
    driven.complete(short)


def test_a_buffer_is_restored_and_wiped_between_two_jobs(load: Load) -> None:
    driven = load()
    use_twice(driven)
    assert kinds(driven) == []


def test_a_buffer_that_is_not_restored_would_be_seen(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = load()
    attempt = driven.device.calls.library.attempt

    def skip(name: str, *arguments: object) -> Answer:
        return Answer(name, 0) if name == "npurt_buffer_restore" else attempt(name, *arguments)

    monkeypatch.setattr(driven.device.calls.library, "attempt", skip)
    use_twice(driven)
    assert kinds(driven) == ["NOT_RESTORED", "NOT_RESTORED"]


def test_a_buffer_that_is_not_wiped_would_be_seen(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(
        self: Buffer, rows: tuple[object, ...], *, vocabulary: int, positions_max: int
    ) -> None:
        (only,) = rows
        tokens = only.tokens  # type: ignore[attr-defined]
        for name, values in (("tokens", tokens), ("positions", range(len(tokens)))):
            self.views[name].reshape(-1)[: len(tokens)] = values
        self.views["lengths"][0] = len(tokens)

    monkeypatch.setattr(Buffer, "fill", fill)
    driven = load()
    use_twice(driven)
    assert kinds(driven) == [], "the wipe alone is enough"
    monkeypatch.setattr(Buffer, "wipe", lambda self: None)
    driven = load()
    use_twice(driven)
    assert kinds(driven) == ["INPUT_NOT_WIPED"]


# ------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(("flag", "told"), [("y", NUMERIC_FLAG), ("n", 0)])
def test_undefined_numbers_are_a_fault_of_their_row_alone(load: Load, flag: str, told: int) -> None:
    driven = load(f"fault n kind=numeric_nan lanes=0x5 flag={flag}")
    rows = tuple(row(PROMPT, lane=lane, owner=lane) for lane in range(4))
    done = driven.complete(driven.job("prefill", rows, batch=4))
    assert [result.fault for result in done.rows] == ["numeric", "", "numeric", ""]
    assert [result.token >= 0 for result in done.rows] == [False, True, False, True]
    assert done.flags & NUMERIC_FLAG == told


# ------------------------------------------------------------------------ KV


def count_calls(driven: DrivenDevice, monkeypatch: pytest.MonkeyPatch, wanted: str) -> list[str]:
    """Return a list that grows with each call of one function from now on."""
    calls: list[str] = []
    attempt = driven.device.calls.library.attempt

    def watch(name: str, *arguments: object) -> Answer:
        if name == wanted:
            calls.append(name)
        return attempt(name, *arguments)

    monkeypatch.setattr(driven.device.calls.library, "attempt", watch)
    return calls


@pytest.mark.parametrize(
    ("keys", "code", "unknown"),
    [
        ("", Code.KV_APPLY, False),
        ("code=0x304", Code.KV_NO_SPACE, False),
        ("partial=y", Code.KV_UNKNOWN, True),
    ],
)
def test_a_list_that_fails_before_the_job_is_tried_once(
    load: Load, monkeypatch: pytest.MonkeyPatch, keys: str, code: int, unknown: bool
) -> None:
    driven = load(f"fault k kind=kv_apply_before {keys}")
    calls = count_calls(driven, monkeypatch, "npurt_kv_apply")
    submits = count_calls(driven, monkeypatch, "npurt_job_submit")
    effect = driven.job("prefill", (row(PROMPT),))
    failed = driven.ask(effect, KvApplyFailed)
    assert (failed.job, failed.operation, failed.code) == (effect.job, "RESERVE", code)
    assert failed.unknown is unknown
    assert (len(calls), submits) == (1, [])
    assert buffer_of(driven, effect).ticket == 0


def test_a_list_that_fails_after_the_job_is_tried_once(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = load("fault k kind=kv_apply_after")
    effect = driven.job("prefill", (row(PROMPT),))
    driven.complete(effect)
    calls = count_calls(driven, monkeypatch, "npurt_kv_apply")
    commit = ApplyKv(
        model=1,
        epoch=effect.epoch,
        generation=effect.generation,
        operations=settle_rows("COMMIT", effect),
    )
    failed = driven.ask(commit, KvApplyFailed)
    assert (failed.job, failed.operation, failed.lane) == (None, "COMMIT", effect.rows[0].lane)
    assert len(calls) == 1
    assert driven.ask(commit, KvApplied).lanes == (effect.rows[0].lane,)


def test_a_bank_is_asked_for_every_operation_it_is_to_apply(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the bank holds is the engine's to know: the adapter leaves nothing out (row 19)."""
    driven = load("fault k kind=kv_apply_before")
    effect = driven.job("prefill", (row(PROMPT),))
    driven.ask(effect, KvApplyFailed)
    calls = count_calls(driven, monkeypatch, "npurt_kv_apply")
    lane = effect.rows[0].lane
    release = ApplyKv(
        model=1,
        epoch=effect.epoch,
        generation=effect.generation,
        operations=(
            KvOperation(verb="RELEASE", lane=lane, from_tokens=0, to_tokens=0, transaction=0),
        ),
    )
    failed = driven.ask(release, KvApplyFailed)
    assert (failed.operation, failed.lane, len(calls)) == ("RELEASE", lane, 1)


# ------------------------------------------------------------------------ counters


def test_counters_are_told_as_they_are_read(load: Load) -> None:
    driven = load("fault s kind=counter_skew field=finished n=40 nth=1")
    driven.complete(driven.job("prefill", (row(PROMPT),)))
    told = []
    for _ in range(2):
        health = driven.ask(ProbeHealth(), HealthProbed).health
        assert health is not None
        told.append(dict(health.counters)["finished"])
    assert told == [41, 1]
