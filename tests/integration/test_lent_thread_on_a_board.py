"""On threads, one job in flight: the thread with the result brings the next job, made ready before.

What a client gets is what the model's folder alone gives, and the journal proves itself.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.asking import Ask, answer_alone, outcomes, pack_with_end_tokens
from support.real_engine import RealEngine

from laneway.adapters.buffers import Buffer
from laneway.adapters.commands import Commands
from laneway.adapters.foreseeing import Foreseen
from laneway.adapters.loaded import LoadedModel
from laneway.engine import Limits
from laneway.engine.effects import SubmitJob
from laneway.engine.sampling import Sampling
from laneway.journal.replay import verify

BOARD = "sim:tiny?clock=real&scale=0.01"
"""A hundred times as slow as itself, so that an engine comes to rest while a job runs."""
ROWS, TOKENS = 4, 30
ONE_AT_A_TIME = Limits(inflight_jobs_max=1, batch_rows_max=ROWS)


@pytest.fixture(scope="module")
def calbin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_with_end_tokens(tmp_path_factory.mktemp("lent"), batch=(1, ROWS))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count who submitted, and for how many decode jobs the buffer was ready."""
    counts: Counter[str] = Counter()
    submit, is_of = Commands.submit, Foreseen.is_of

    def counted_submit(commands: Commands, effect: SubmitJob) -> None:
        counts[threading.current_thread().name] += 1
        submit(commands, effect)

    def counted_is_of(foreseen: Foreseen, job: SubmitJob, model: LoadedModel) -> bool:
        is_ready = is_of(foreseen, job, model)
        counts["ready" if is_ready else "otherwise"] += 1
        return is_ready

    monkeypatch.setattr(Commands, "submit", counted_submit)
    monkeypatch.setattr(Foreseen, "is_of", counted_is_of)
    yield counts


def asks(count: int) -> list[Ask]:
    """Return one batch of long answers, and shorter ones behind it that interrupt each other."""
    return [
        Ask(
            prompt=(3 * n + 1, 5, 9 + n),
            max_tokens=TOKENS - 5 * (n // ROWS),
            sampling=Sampling(temperature=0.8, top_k=40, seed=n),
            ignore_eos=True,
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("faults", ["", "ccu", "kv"])
def test_answers_are_those_of_the_folder(
    calbin: Path, seen: Counter[str], tmp_path: Path, faults: str
) -> None:
    plans = {
        "ccu": "fault a kind=ccu_exception nth=23\n",
        "kv": "fault a kind=kv_apply_before nth=40\n",
    }
    url = BOARD
    if faults:
        (tmp_path / "plan").write_text(plans[faults])
        url += f"&faults={tmp_path / 'plan'}"
    real = RealEngine(calbin, url=url, limits=ONE_AT_A_TIME, together=True)
    asked = asks(3 * ROWS if faults else ROWS)
    for ask in asked:
        real.submit(ask)
    ended = outcomes(real.results())
    assert ended == [answer_alone(calbin, ask) for ask in asked]
    assert seen["laneway-wait"]
    assert seen["ready"] or faults, "how many depends on when the requests came"
    assert not real.simulator.violations()
    report = verify(real.journal)
    assert report.ok and report.asked == "decide"
    real.close()


def test_a_job_that_was_not_foreseen_after_all_is_filled_in_anew(
    calbin: Path, seen: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something happens to the buffer between any two jobs: none of it is believed."""
    put = Buffer.put_tokens
    real = RealEngine(calbin, url=BOARD, limits=ONE_AT_A_TIME, together=True)
    asked = asks(ROWS)
    foresee = Commands.foresee

    def spoiled(commands: Commands, job: SubmitJob) -> None:
        foresee(commands, job)
        buffer = commands._models[job.model].buffers[job.buffer]
        buffer.fill((), vocabulary=1, positions_max=1)

    monkeypatch.setattr(Commands, "foresee", spoiled)
    monkeypatch.setattr(Buffer, "put_tokens", lambda *unused, **_: pytest.fail("it was believed"))
    for ask in asked:
        real.submit(ask)
    assert outcomes(real.results()) == [answer_alone(calbin, ask) for ask in asked]
    assert seen["otherwise"] and not seen["ready"]
    monkeypatch.setattr(Buffer, "put_tokens", put)
    real.close()
