"""An engine that cannot start leaves nothing open: the journal is free, the device closed."""

from pathlib import Path

import pytest

from laneway.adapters import open_device
from laneway.engine import ConfigurationError, Engine, JournalError, Request, UsageError
from laneway.journal import open_journal

MODEL = str(Path(__file__).parents[2] / "models" / "tiny-dense")
VIRTUAL = "sim:?clock=virtual"


def test_a_refused_journal_is_free_again(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    journal = open_journal(path)
    engine = Engine(device=open_device(VIRTUAL), journal=journal)
    engine.load("m", MODEL)
    engine.submit(Request(model="m", prompt=(1, 2), max_tokens=4))
    engine.step()
    journal.close()  # as if the process had ended here: the request has no ending
    for _ in range(2):
        device = open_device(VIRTUAL)
        with pytest.raises(JournalError, match="1 request has no ending"):
            Engine(device=device, journal=open_journal(path))
        assert device.calls.closed  # type: ignore[attr-defined]


def test_a_device_in_use_is_left_to_its_engine(tmp_path: Path) -> None:
    device = open_device(VIRTUAL)
    with Engine(device=device, journal=open_journal(None)) as engine:
        engine.load("m", MODEL)
        path = tmp_path / "second.db"
        with pytest.raises(UsageError, match="in use"):
            Engine(device=device, journal=open_journal(path))
        with open_journal(path) as second:
            assert second.head() == (0, 0), "nothing was recorded for an engine that never was"
        stream = engine.submit(Request(model="m", prompt=(1, 2), max_tokens=3))
        assert stream.result().finish_reason == "length"


@pytest.mark.parametrize("kept", ["file", "memory"])
def test_a_journal_is_for_one_engine(kept: str, tmp_path: Path) -> None:
    """The second engine is refused before it writes or asks anything; the first goes on."""
    journal = open_journal(tmp_path / "run.db" if kept == "file" else None)
    with Engine(device=open_device(VIRTUAL), journal=journal) as engine:
        engine.load("m", MODEL)
        before = journal.head()
        device = open_device(VIRTUAL)
        with pytest.raises(JournalError, match="a journal of its own for each engine"):
            Engine(device=device, journal=journal)
        assert device.calls.closed  # type: ignore[attr-defined]
        assert journal.head() == before
        stream = engine.submit(Request(model="m", prompt=(1, 2), max_tokens=3))
        assert stream.result().finish_reason == "length"
    with pytest.raises(JournalError):
        Engine(device=open_device(VIRTUAL), journal=journal)


def test_a_journal_that_is_read_is_no_engines(tmp_path: Path) -> None:
    open_journal(tmp_path / "run.db").close()
    with open_journal(tmp_path / "run.db", read_only=True) as journal:
        with pytest.raises(JournalError, match="to read only"):
            Engine(device=open_device(VIRTUAL), journal=journal)


def test_a_virtual_clock_and_threads_do_not_go_together() -> None:
    device = open_device(VIRTUAL)
    with pytest.raises(ConfigurationError, match="virtual clock"):
        Engine(device=device, journal=open_journal(None), threads=True)
    assert device.calls.closed  # type: ignore[attr-defined]
