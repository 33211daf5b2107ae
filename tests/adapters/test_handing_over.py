"""Who brings an idle device its next job: whose thread waits, and whose stands in for another."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.driven_device import DrivenDevice, row

from laneway.adapters import device
from laneway.adapters.commands import Commands
from laneway.adapters.discover import open_device
from laneway.adapters.packing import pack
from laneway.adapters.worker import Worker
from laneway.engine.effects import DeviceEffect, ProbeHealth, RestoreBuffer, SubmitJob
from laneway.engine.inputs import BufferRestored, Completed, HealthProbed, Input, SubmitAccepted

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-dense"
pytestmark = pytest.mark.board


def test_only_a_job_for_an_idle_device_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a job in flight the device has work, and the engine's time is worth more."""
    pack(MODEL, tmp_path / "calbin", batch=(1,))
    handed: list[int] = []
    real = Worker.hand_over

    def hand_over(worker: Worker, effect: DeviceEffect, *, at_most_s: float) -> None:
        assert isinstance(effect, SubmitJob) and at_most_s == device.HAND_OVER_S
        handed.append(effect.job)
        real(worker, effect, at_most_s=60)
        accepted = [one.job for one in driven.posted if isinstance(one, SubmitAccepted)]
        assert accepted[-1:] == [effect.job], "whoever goes on finds it on the device"

    monkeypatch.setattr(Worker, "hand_over", hand_over)
    opened = open_device("sim:tiny?clock=manual")
    assert isinstance(opened, device.NpurtDevice)
    driven = DrivenDevice(opened, threads=True)
    try:
        driven.load(str(tmp_path / "calbin"))
        first, second = (
            driven.job(
                "prefill",
                (row((1, 2, 3), lane=lane),),
                buffer=driven.buffer("prefill", number=lane),
            )
            for lane in (0, 1)
        )
        driven.submit(first)
        driven.submit(second)
        assert handed == [first.job]
    finally:
        opened.stop()


class Lent:
    """Two prompts on a board with threads, and an engine that asks for a job when one ends."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        opened = open_device("sim:tiny?clock=manual")
        assert isinstance(opened, device.NpurtDevice)
        self.opened = opened
        self.brought: list[Completed] = []
        self.by: dict[int, str] = {}
        self.when_lent: list[set[int]] = []
        self.then: list[DeviceEffect] = []
        opened.lend(self._go_on)
        real = Commands.submit

        def submit(commands: Commands, effect: SubmitJob) -> None:
            self.by[effect.job] = threading.current_thread().name
            real(commands, effect)

        monkeypatch.setattr(Commands, "submit", submit)
        self.driven = DrivenDevice(opened, threads=True)
        self.driven.load(str(folder))

    def _go_on(self, taken: Input) -> None:
        assert isinstance(taken, Completed)
        self.brought.append(taken)
        for effect in self.then:
            self.opened.execute(effect)
        self.then = []
        self.when_lent.append(set(self.by))
        self.driven._post(taken)

    def prompt(self, lane: int) -> SubmitJob:
        buffer = self.driven.buffer("prefill", number=lane)
        return self.driven.job("prefill", (row((1, 2, 3), lane=lane),), buffer=buffer)


@pytest.fixture
def lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lent]:
    pack(MODEL, tmp_path / "calbin", batch=(1,))
    made = Lent(tmp_path / "calbin", monkeypatch)
    yield made
    made.opened.stop()


def test_the_thread_that_waits_submits_the_next_job_once_it_has_come_back(lent: Lent) -> None:
    first, second = lent.prompt(0), lent.prompt(1)
    lent.then = [second]
    seen = len(lent.driven.posted)
    lent.driven.submit(first)
    lent.driven.next(Completed, after=seen, fits=lambda one: one.job == first.job)
    lent.driven.next(Completed, after=seen, fits=lambda one: one.job == second.job)
    assert lent.by == {first.job: "laneway-submit", second.job: "laneway-wait"}
    assert lent.when_lent[0] == {first.job}, "the engine is not held up by a device call"
    assert [one.job for one in lent.brought] == [first.job, second.job]


def test_what_else_is_asked_meanwhile_keeps_its_order(lent: Lent) -> None:
    """The wipe of the buffer that is done comes behind the submit, on the same thread."""
    first, second = lent.prompt(0), lent.prompt(1)
    seen = len(lent.driven.posted)
    ticket = lent.driven.submit(first)
    lent.then = [RestoreBuffer(model=1, buffer=first.buffer, job=first.job, ticket=ticket), second]
    restored = lent.driven.next(BufferRestored, after=seen)
    accepted = lent.driven.next(SubmitAccepted, after=seen, fits=lambda one: one.job == second.job)
    assert lent.driven.posted.index(accepted) < lent.driven.posted.index(restored)


def test_it_stands_in_for_nobody_else(lent: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    by: list[str] = []
    real = device.NpurtDevice._probe_health

    def probe(opened: device.NpurtDevice) -> None:
        by.append(threading.current_thread().name)
        real(opened)

    monkeypatch.setattr(device.NpurtDevice, "_probe_health", probe)
    lent.then = [ProbeHealth()]
    seen = len(lent.driven.posted)
    lent.driven.submit(lent.prompt(0))
    lent.driven.next(HealthProbed, after=seen)
    assert by == ["laneway-health"]


def test_a_device_that_still_has_a_job_lends_nobody(lent: Lent) -> None:
    first, second = lent.prompt(0), lent.prompt(1)
    seen = len(lent.driven.posted)
    lent.driven.submit(first)
    lent.driven.submit(second)
    while len(lent.opened._waiting.tickets) < 2:
        pass  # it was accepted, and is waited for a moment later
    lent.driven.next(Completed, after=seen, fits=lambda one: one.job == first.job)
    lent.driven.next(Completed, after=seen, fits=lambda one: one.job == second.job)
    assert [one.job for one in lent.brought] == [second.job]
