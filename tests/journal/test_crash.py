"""A process killed while it appends leaves a prefix of what it appended, whole and provable."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.journal_steps import end_requests, ticks

from laneway.journal import open_journal
from laneway.journal.replay import verify

APPEND = """
import sys
from laneway.journal import open_journal
from support.journal_steps import run_core

class Told:
    '''Says on stdout which step is durable.'''

    tokens = "full"

    def __init__(self, journal):
        self.journal = journal

    def read(self, **ranges):
        return self.journal.read(**ranges)

    def append(self, steps):
        self.journal.append(steps)
        print(steps[-1].step, flush=True)

    def close(self):
        self.journal.close()

journal = open_journal(sys.argv[1])
while True:
    run_core(Told(journal))
"""


@pytest.mark.slow
def test_killed_between_appends(tmp_path: Path) -> None:
    """Kill it after a drawn number of answers, three times, each on the journal left before."""
    path = tmp_path / "run.db"
    draw = random.Random(17)
    durable = 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", APPEND, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        wanted = draw.randrange(51, 140)
        said = [int(process.stdout.readline()) for _ in range(wanted)]
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        told = [*said, *(int(line) for line in rest.splitlines(keepends=True) if line[-1] == "\n")]
        assert told == list(range(durable + 1, durable + 1 + len(told)))
        with open_journal(path, read_only=True) as reader:
            durable = reader.head()[0]
        assert told[-1] <= durable <= told[-1] + 1
        with open_journal(path) as journal:
            assert journal.head()[0] == durable
            end_requests(journal)
            durable = journal.head()[0]
            report = verify(journal)
            assert report.ok, report.reason


def test_a_log_left_behind_is_read_and_taken_over(tmp_path: Path) -> None:
    """What a dead process leaves is the database as last checkpointed, and its log."""
    path = tmp_path / "run.db"
    with open_journal(path) as journal:
        journal.append(ticks(1, 20))
        for name in ("run.db", "run.db-wal"):
            (tmp_path / "dead").mkdir(exist_ok=True)
            (tmp_path / "dead" / name).write_bytes((tmp_path / name).read_bytes())
    dead = tmp_path / "dead" / "run.db"
    with open_journal(dead, read_only=True) as reader:
        assert list(reader.read()) == ticks(1, 20)
    with open_journal(dead) as journal:
        assert journal.head() == (20, 20_000)
        journal.append(ticks(21, 1))
    assert [file.name for file in dead.parent.iterdir()] == ["run.db"]


def test_a_torn_log_is_a_prefix(tmp_path: Path) -> None:
    """A log cut anywhere gives the steps of the commits that are whole, and goes on from there."""
    path = tmp_path / "run.db"
    with open_journal(path) as journal:
        for step in ticks(1, 12):
            journal.append([step])
        database = path.read_bytes()
        log = (tmp_path / "run.db-wal").read_bytes()
    draw = random.Random(3)
    heads = set()
    for number in range(25):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "run.db").write_bytes(database)
        (folder / "run.db-wal").write_bytes(log[: draw.randrange(len(log) // 2, len(log))])
        with open_journal(folder / "run.db") as journal:
            head = journal.head()[0]
            assert list(journal.read()) == ticks(1, head)
            journal.append(ticks(head + 1, 1))
            assert journal.head()[0] == head + 1
        heads.add(head)
    assert len(heads) > 3
