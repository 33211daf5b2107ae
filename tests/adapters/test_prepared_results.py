"""What is made for a job's results while the device computes: it is of that job, and of no other.

What must come out is the highest number of the logits as the device wrote them, looked up by numpy.
"""

from collections.abc import Iterator
from pathlib import Path

import attrs
import msgspec
import numpy as np
import pytest
from support.driven_device import GREEDY, DrivenDevice, row

from laneway.adapters import waiting
from laneway.adapters.device import NpurtDevice
from laneway.adapters.discover import open_device
from laneway.adapters.packing import pack
from laneway.adapters.results import prepare
from laneway.engine.effects import SubmitJob, SubmitRow
from laneway.engine.inputs import DeviceFaulted
from laneway.engine.sampling import Sampling

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-dense"
PROMPT = (1, 2, 3)
pytestmark = pytest.mark.board


@pytest.fixture(scope="module")
def calbin(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("calbin") / "tiny-dense"
    pack(MODEL, folder, batch=(1, 4))
    return str(folder)


@pytest.fixture
def driven(calbin: str) -> Iterator[DrivenDevice]:
    device = open_device("sim:tiny?clock=manual")
    assert isinstance(device, NpurtDevice)
    started = DrivenDevice(device, threads=False)
    started.load(calbin)
    yield started
    device.stop()


def on_lane(lane: int, **asked: object) -> SubmitRow:
    return msgspec.structs.replace(row(PROMPT, lane=lane), **asked)


def prefill(driven: DrivenDevice, *rows: SubmitRow, number: int = 0) -> SubmitJob:
    return driven.job("prefill", rows, batch=4, buffer=driven.buffer("prefill", batch=4) + number)


def logits(driven: DrivenDevice, effect: SubmitJob) -> np.ndarray:
    bits = driven.device.output_logits(1, effect.buffer)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_it_is_there_before_the_device_has_ended(driven: DrivenDevice) -> None:
    effect = prefill(driven, on_lane(0))
    driven.submit(effect)
    (flight,) = driven.device._waiting._snapshot()
    assert flight.prepared is not None and flight.prepared.effect is effect


def test_each_job_has_the_masked_tokens_of_its_own_rows(driven: DrivenDevice) -> None:
    """The same request, the same parameters: what is masked changes from job to job."""
    first = prefill(driven, on_lane(0))
    free = driven.complete(first).rows[0].token
    assert free == int(np.argmax(logits(driven, first)[0]))
    second = prefill(driven, on_lane(1, masked=(free,)), number=1)
    masked = driven.complete(second).rows[0].token
    numbers = logits(driven, second)[0]
    numbers[free] = -np.inf
    assert masked == int(np.argmax(numbers)) != free


def test_what_was_made_for_another_job_is_not_used(
    driven: DrivenDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = attrs.evolve(GREEDY, allowed_token_ids=(7,))
    other = prefill(driven, on_lane(2, sampling=only), on_lane(3))
    monkeypatch.setattr(waiting, "prepare", lambda effect: prepare(other))
    effect = prefill(driven, on_lane(0), on_lane(1, sampling=only))
    tokens = [each.token for each in driven.complete(effect).rows]
    assert tokens == [int(np.argmax(logits(driven, effect)[0])), 7]


def test_two_jobs_in_flight_have_rooms_of_their_own(driven: DrivenDevice) -> None:
    made = [prepare(prefill(driven, on_lane(0))) for _ in range(2)]
    assert not np.shares_memory(made[0].tokens, made[1].tokens)
    assert not np.shares_memory(made[0].status, made[1].status)
    assert not np.shares_memory(made[0].sampling.requests, made[1].sampling.requests)


def test_rows_that_cannot_be_prepared_end_their_job_once(driven: DrivenDevice) -> None:
    effect = prefill(driven, on_lane(0, sampling=Sampling(temperature=1.0)))
    fault = driven.run(effect, DeviceFaulted)
    assert (fault.job, fault.kind, fault.quiescent) == (effect.job, "call", True)
    assert "sampling needs a seed" in fault.reason
    assert sum(isinstance(one, DeviceFaulted) for one in driven.posted) == 1
    assert driven.device._waiting.is_idle
