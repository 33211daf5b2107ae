"""When the engine's thread sleeps until its job is on the device, and when it does not."""

from pathlib import Path

import pytest
from support.driven_device import DrivenDevice, row

from laneway.adapters import device
from laneway.adapters.discover import open_device
from laneway.adapters.packing import pack
from laneway.adapters.worker import Worker
from laneway.engine.effects import DeviceEffect, SubmitJob
from laneway.engine.inputs import SubmitAccepted

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
