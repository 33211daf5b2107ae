"""A buffer that was made ready for a job: only its tokens are left to write, or all of it is."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
from support.driven_device import DrivenDevice, row, settle_rows

from laneway.adapters.device import NpurtDevice
from laneway.adapters.discover import open_device
from laneway.adapters.loaded import LoadedModel
from laneway.adapters.packing import pack
from laneway.engine.effects import (
    ApplyKv,
    ForeseeJob,
    KvOperation,
    RestoreBuffer,
    SubmitJob,
)
from laneway.engine.inputs import (
    BufferRestored,
    Completed,
    Input,
    KvApplied,
    KvApplyFailed,
    SubmitAccepted,
    SubmitRefused,
)

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-dense"
PROMPTS = ((1, 2, 3), (4, 5, 6, 7))
pytestmark = pytest.mark.board


class Decoding:
    """Two sequences on a board whose prompts are done, and the job of their next tokens."""

    def __init__(self, folder: Path) -> None:
        opened = open_device("sim:tiny?clock=manual")
        assert isinstance(opened, NpurtDevice)
        self.device = opened
        self.driven = DrivenDevice(opened, threads=False)
        self.driven.load(str(folder))
        self.before: tuple[KvOperation, ...] = ()
        tokens = []
        for lane, prompt in enumerate(PROMPTS):
            buffer = self.driven.buffer("prefill", number=lane)
            effect = self.driven.job("prefill", (row(prompt, lane=lane),), buffer=buffer)
            tokens.append(self.driven.complete(effect).rows[0].token)
            self.before += settle_rows("COMMIT", effect)
        self.buffer = self.driven.buffer("decode", batch=2)
        rows = tuple(
            row((token,), lane=lane, start=len(PROMPTS[lane])) for lane, token in enumerate(tokens)
        )
        self.job = self.driven.job("decode", rows, before=self.before, batch=2, buffer=self.buffer)

    @property
    def model(self) -> LoadedModel:
        return self.device._models[1]

    def prefill(self) -> SubmitJob:
        """Return a job of several tokens a row: of such nothing is foreseen."""
        free = self.driven.buffer("prefill", batch=2)
        return msgspec.structs.replace(self.job, task="prefill", buffer=free)

    def foresee(self, job: SubmitJob | None = None) -> None:
        self.device.execute(ForeseeJob(submit=outlined(self.job if job is None else job)))
        self.driven.settle()

    def input(self) -> dict[str, Any]:
        """Return what the buffer and its form say now, but for addresses."""
        held = self.model.buffers[self.buffer]
        arrays = {name: held.views[name].tolist() for name in ("tokens", "positions", "lengths")}
        params = held.form.params
        names = ("lane_count", "csr_count", "client_tag", "kv_txn", "engine_mode")
        told = {name: getattr(params, name) for name in names}
        assert self.model.current is not None
        current = (self.model.current.device_generation, self.model.current.device_epoch)
        told["is_current"] = (params.expect_generation, params.expect_epoch) == current
        return arrays | told | {"rows": bytes(held.form._lanes)}


def outlined(job: SubmitJob) -> SubmitJob:
    rows = [msgspec.structs.replace(one, tokens=(0,) * len(one.tokens)) for one in job.rows]
    return msgspec.structs.replace(job, rows=tuple(rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed model for one and two rows."""
    made = tmp_path_factory.mktemp("calbin") / "tiny"
    pack(MODEL, made, batch=(1, 2))
    return made


@pytest.fixture
def decoding(folder: Path) -> Iterator[Decoding]:
    made = Decoding(folder)
    yield made
    made.device.stop()


@pytest.fixture
def plain(folder: Path) -> Iterator[Decoding]:
    """The same beside it, where nothing is foreseen."""
    made = Decoding(folder)
    yield made
    made.device.stop()


def translations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[KvOperation, ...]]:
    """Return the operation lists that are translated from here on."""
    seen: list[tuple[KvOperation, ...]] = []
    real = LoadedModel.device_operations

    def translate(model: LoadedModel, operations: tuple[KvOperation, ...]) -> Any:
        seen.append(operations)
        return real(model, operations)

    monkeypatch.setattr(LoadedModel, "device_operations", translate)
    return seen


def test_a_foreseen_job_says_to_the_device_what_any_other_says(
    decoding: Decoding, plain: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding.foresee()
    told = decoding.input()
    assert told["tokens"] == [[0], [0]] and told["positions"] == [[3], [4]]
    translated = translations(monkeypatch)
    rows = [each.driven.complete(each.job).rows for each in (decoding, plain)]
    assert rows[0] == rows[1]
    assert translated == [plain.job.operations], "the foreseen one was worked out before"
    assert decoding.model.lane_tags == plain.model.lane_tags


def test_its_input_is_that_of_any_other_job(decoding: Decoding, plain: Decoding) -> None:
    decoding.foresee()
    for each in (decoding, plain):
        each.driven.submit(each.job)
    ours, theirs = decoding.input(), plain.input()
    assert ours == theirs
    assert ours["tokens"] == [list(one.tokens) for one in decoding.job.rows]


def another_number(job: SubmitJob) -> SubmitJob:
    return msgspec.structs.replace(job, job=job.job + 1)


def another_place(job: SubmitJob) -> SubmitJob:
    first, second = job.rows
    return msgspec.structs.replace(job, rows=(first, msgspec.structs.replace(second, start=3)))


def fewer_rows(job: SubmitJob) -> SubmitJob:
    return msgspec.structs.replace(job, rows=job.rows[:1])


def other_operations(job: SubmitJob) -> SubmitJob:
    return msgspec.structs.replace(job, operations=job.operations[:-1])


def another_generation(job: SubmitJob) -> SubmitJob:
    return msgspec.structs.replace(job, generation=job.generation + 1)


@pytest.mark.parametrize(
    "change", [another_number, another_place, fewer_rows, other_operations, another_generation]
)
def test_a_job_that_comes_otherwise_is_filled_in_anew(
    decoding: Decoding,
    plain: Decoding,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[SubmitJob], SubmitJob],
) -> None:
    decoding.foresee(change(decoding.job))
    translated = translations(monkeypatch)
    for each in (decoding, plain):
        each.driven.submit(each.job)
    assert translated == [decoding.job.operations, plain.job.operations]
    assert decoding.input() == plain.input()


def wiped(decoding: Decoding) -> None:
    decoding.model.buffers[decoding.buffer].wipe()


def filled(decoding: Decoding) -> None:
    held = decoding.model.buffers[decoding.buffer]
    held.fill(decoding.job.rows[:1], vocabulary=decoding.model.vocabulary, positions_max=64)


def bound_otherwise(decoding: Decoding) -> None:
    reserve = KvOperation("RESERVE", decoding.job.rows[0].lane + 2, 0, 1, 77)
    effect = ApplyKv(
        model=1,
        epoch=decoding.job.epoch,
        generation=decoding.job.generation,
        operations=(reserve,),
    )
    decoding.driven.ask(effect, KvApplied)


def configured_anew(decoding: Decoding) -> None:
    assert decoding.model.current is not None
    decoding.model.current = attrs.evolve(decoding.model.current)


@pytest.mark.parametrize("meanwhile", [wiped, filled, bound_otherwise, configured_anew])
def test_what_happens_meanwhile_makes_it_worthless(
    decoding: Decoding,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[[Decoding], None],
) -> None:
    decoding.foresee()
    meanwhile(decoding)
    translated = translations(monkeypatch)
    decoding.driven.submit(decoding.job)
    assert translated == [decoding.job.operations]
    held = decoding.input()
    assert (held["positions"], held["lengths"]) == ([[3], [4]], [1, 1])


def another_job(decoding: Decoding) -> None:
    """In the other buffer."""
    other = decoding.driven.buffer("decode", batch=2, number=1)
    decoding.driven.submit(msgspec.structs.replace(decoding.job, buffer=other))


def another_foresight(decoding: Decoding) -> None:
    other = decoding.driven.buffer("decode", batch=2, number=1)
    decoding.foresee(msgspec.structs.replace(decoding.job, buffer=other))


def the_buffer_before_it_comes_back(decoding: Decoding) -> None:
    """So nothing followed its job: a submit would have gone first."""
    prefill = decoding.driven.buffer("prefill")
    ticket = decoding.model.buffers[prefill].ticket
    effect = RestoreBuffer(model=1, buffer=prefill, job=1, ticket=ticket)
    decoding.driven.ask(effect, BufferRestored)


@pytest.mark.parametrize(
    "instead", [another_job, another_foresight, the_buffer_before_it_comes_back]
)
def test_a_buffer_that_was_made_ready_for_nothing_is_wiped(
    decoding: Decoding, instead: Callable[[Decoding], None]
) -> None:
    decoding.foresee()
    arena = decoding.model.buffers[decoding.buffer].arena
    assert np.frombuffer(arena.mapping, np.uint8).any()
    instead(decoding)
    assert not np.frombuffer(arena.mapping, np.uint8).any()


def test_it_serves_one_job(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding.foresee()
    done = decoding.driven.complete(decoding.job)
    restore = RestoreBuffer(
        model=1, buffer=decoding.buffer, job=decoding.job.job, ticket=done.ticket
    )
    decoding.driven.ask(restore, BufferRestored)
    translated = translations(monkeypatch)
    answer = ask(decoding, decoding.job)
    assert translated == [decoding.job.operations]
    assert not isinstance(answer, SubmitAccepted), "its lanes have grown meanwhile"


def ask(decoding: Decoding, job: SubmitJob) -> Input:
    """Submit a job that will not be accepted, and return what is said of it."""
    seen = len(decoding.driven.posted)
    decoding.device.execute(job)
    decoding.driven.settle()
    return decoding.driven.posted[seen]


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_a_token_that_is_none_is_refused_and_nothing_is_left(
    decoding: Decoding, token: int
) -> None:
    decoding.foresee()
    bad = msgspec.structs.replace(decoding.job.rows[1], tokens=(token,))
    answer = ask(decoding, msgspec.structs.replace(decoding.job, rows=(decoding.job.rows[0], bad)))
    assert isinstance(answer, SubmitRefused) and "vocabulary" in answer.reason
    arena = decoding.model.buffers[decoding.buffer].arena
    assert not np.frombuffer(arena.mapping, np.uint8).any()


def test_operations_that_fail_leave_nothing(decoding: Decoding) -> None:
    last = msgspec.structs.replace(decoding.job.operations[-1], from_tokens=9, to_tokens=10)
    job = msgspec.structs.replace(decoding.job, operations=(*decoding.job.operations[:-1], last))
    decoding.foresee(job)
    assert isinstance(ask(decoding, job), KvApplyFailed)
    assert not np.frombuffer(decoding.model.buffers[decoding.buffer].arena.mapping, np.uint8).any()


def test_what_cannot_be_made_ready_is_let_be(
    decoding: Decoding, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for it: the job itself is told what is wrong, if it comes."""
    seen = len(decoding.driven.posted)
    far = msgspec.structs.replace(decoding.job.rows[1], start=1 << 20)
    decoding.foresee(msgspec.structs.replace(decoding.job, rows=(decoding.job.rows[0], far)))
    assert "cannot be made ready" in caplog.text
    for odd in (
        msgspec.structs.replace(decoding.job, model=9),
        msgspec.structs.replace(decoding.job, buffer=999),
        msgspec.structs.replace(decoding.job, epoch=99),
        decoding.prefill(),
    ):
        decoding.foresee(odd)
        assert decoding.device._commands._foreseen is None
    assert len(decoding.driven.posted) == seen
    decoding.driven.submit(decoding.job)
    held = decoding.input()
    decoding.foresee(another_number(decoding.job))
    assert decoding.input() == held, "a buffer that the device has is nobody's to fill"
    assert isinstance(decoding.driven.next(Completed, after=seen), Completed)
