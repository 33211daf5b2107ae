"""What a dead engine left: the checks that hold for its journal, whatever it was doing.

Nothing here believes the code that reads journals alone: pages are checked by SQLite itself, the
lock by the kernel, tokens by the rows of completed jobs.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from support.fake_device import FakeDevice, answer
from support.warm_parent import Ended

from laneway.adapters.exits import JOURNAL, describe, exit_code
from laneway.engine import Engine, JournalError, Request, Sampling
from laneway.engine.inputs import Completed, RequestSubmitted
from laneway.engine.ports import Step
from laneway.journal import open_journal
from laneway.journal.replay import fold, verify

ENDINGS = frozenset({"finish", "cancel", "expire", "fail", "reject"})
UNFINISHED = "no ending in the journal"


def read_whole(path: Path) -> list[Step]:
    """Prove a file that nobody has opened since its engine died, and return its steps."""
    connection = sqlite3.connect(path)
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        connection.close()
    with open_journal(path, read_only=True) as journal:
        report = verify(journal)
        assert report.ok, f"{report.asked}, step {report.step}: {report.reason}"
        steps = list(journal.read())
        if steps:
            assert fold(journal).step == len(steps) == report.steps
    return steps


def check_lock_is_free(path: Path) -> None:
    """The kernel must have dropped the lock of the dead, whose file may still lie there."""
    file = path.with_name(path.name + ".lock")
    if not file.exists():
        return
    descriptor = os.open(file, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def tokens_of(steps: Iterable[Step]) -> dict[int, list[int]]:
    """Return the tokens that the steps hold for each request: rows of its completed jobs."""
    owners: dict[int, list[int]] = {}
    tokens: dict[int, list[int]] = {}
    for step in steps:
        for event in step.events:
            planned = (event.machine, event.trigger) == ("job", "plan")
            if planned and event.data["origin"] == "request":
                owners[event.entities[0]] = list(event.data["owners"])
        if isinstance(step.taken, Completed):
            for owner, row in zip(owners.get(step.taken.job, ()), step.taken.rows, strict=False):
                tokens.setdefault(owner, []).append(row.token)
    return tokens


def open_requests(steps: Iterable[Step]) -> set[int]:
    """Return the requests of the steps that have no ending."""
    born: set[int] = set()
    ended: set[int] = set()
    for step in steps:
        if isinstance(step.taken, RequestSubmitted):
            born.add(step.taken.request)
        for event in step.events:
            if event.machine == "request" and event.trigger in ENDINGS:
                ended.update(event.entities)
    return born - ended


def check_numbers_rise(steps: Iterable[Step]) -> None:
    """Every number of every kind is one more than the last, over all lives (decision 9)."""
    used: dict[str, int] = {}

    def use(kind: str, *numbers: int) -> None:
        for number in numbers:
            assert number == used.get(kind, 0) + 1, f"{kind}/{number} after {used.get(kind)}"
            used[kind] = number

    for step in steps:
        for event in step.events:
            born = (event.machine, event.trigger)
            if born in (("job", "plan"), ("model", "load"), ("request", "admit")):
                use(event.machine, *event.entities)
            elif born == ("model", "accept"):
                use("generation", event.generation)
                first, count = event.data["lanes"]
                use("lane", *range(first, first + count))
                for _, _, first, count in event.data["buffers"]:
                    use("buffer", *range(first, first + count))
            elif born == ("model", "reconfigure"):
                use("generation", event.generation)
            elif born == ("device", "open"):
                use("epoch", event.epoch)
                use("incarnation", event.data["incarnation"])
            elif born == ("device", "recover") and event.epoch != used["epoch"]:
                use("epoch", event.epoch)


def check_visible_is_durable(ended: Ended, steps: Sequence[Step]) -> None:
    """Everything that a client or an observer saw must be in the file (decision 4)."""
    kept = tokens_of(steps)
    for request, position, token in ended.heard("token"):
        assert kept[request][position] == token, f"request/{request} was shown {token}"
    still_open = open_requests(steps)
    for request, reason in ended.heard("ending"):
        assert request not in still_open, f"request/{request} was told {reason}"
    for (number,) in ended.heard("seen"):
        assert number <= len(steps), f"step {number} was seen"


def check_next_engine(path: Path, steps: Sequence[Step]) -> bool:
    """A next engine starts clean, or is refused in one clear sentence; return which (G21)."""
    journal = open_journal(path)
    try:
        device = FakeDevice()
        assert journal.head() == ((steps[-1].step, steps[-1].at_ns) if steps else (0, 0))
        unfinished = open_requests(steps)
        if unfinished:
            with pytest.raises(JournalError, match=UNFINISHED) as refused:
                Engine(device=device, journal=journal, threads=False)
            assert exit_code(refused.value) == JOURNAL
            line = describe(refused.value)
            assert "\n" not in line and "another file" in line
            assert f"{len(unfinished)} request" in line and UNFINISHED in line
            assert list(journal.read()) == list(steps), "a refusal leaves the journal as it is"
            return False
        engine = Engine(device=device, journal=journal, threads=False)
        assert not engine.snapshot().requests and not engine.models()
        engine.load("m", "source")
        sampling = Sampling(seed=5)
        request = Request(model="m", prompt=(7, 7), max_tokens=3, sampling=sampling)
        result = engine.submit(request).result()
        assert list(result.tokens) == answer((7, 7), seed=5, max_tokens=3)
        engine.close()
        lives = list(journal.read())
        assert lives[: len(steps)] == list(steps)
        assert not open_requests(lives)
        check_numbers_rise(lives)
        return True
    finally:
        journal.close()
