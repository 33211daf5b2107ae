"""The suite ``journal``: what a full batch costs to append, to keep, to fold and to prove.

J1: one row a commit through the journal's own API, against bare `sqlite3` inserting the same rows
into the same tables; the rows are given to it ready-made. What is appended was decided shortly
before, FRESH steps at a time and not in the time measured, since an engine appends what it has just
decided: a step that was made long ago would have to be fetched from memory first, and it is many
values where a row is a few. Both keep their log bounded: the journal from a thread of its own, bare
`sqlite3` as it does by itself, every 1,000 pages. J1/log: against one that only makes its log
longer. J2: bytes on disk of a whole life, for every entity an event moved. J3: the life folded to
its state, and decided again. All of it is for decode jobs of 16 rows (``bench_ticks.py``).
"""

import gc
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs

from laneway.adapters.bench_ticks import entity_events, full_batches, life
from laneway.adapters.measuring import (
    Figure,
    absolute,
    compared,
    interleave,
    take_turns,
    times_as_fast,
)
from laneway.engine.inputs import Completed
from laneway.engine.ports import Step
from laneway.journal import SqlJournal, open_journal, schema
from laneway.journal.codec import Codec
from laneway.journal.replay import fold, verify
from laneway.journal.sealing import Row, seal

ROUNDS = 9
APPENDS = 1500
"""Steps a burst: one call of a contender appends so many, which is a checkpoint or more."""

FRESH = 50
"""Steps that are made at a time, right before they are appended."""

STEPS = 12_000
"""Steps of the life that is kept, folded and decided again: so many that its opening, some 120
steps of another kind, hardly counts."""

BYTES_MAX = 25
FOLD_MIN, VERIFY_MIN = 1_000_000, 100_000


def run(
    tell: Callable[[str], None] = lambda text: None,
    *,
    rounds: int = ROUNDS,
    appends: int = APPENDS,
    steps: int = STEPS,
) -> Iterator[Figure]:
    """Measure J1, J2 and J3. The arguments make it short for tests."""
    with TemporaryDirectory(prefix="laneway-bench-") as folder:
        tell("journal: append")
        yield from _append(Path(folder), rounds, appends)
        tell("journal: fold and verify")
        kept = list(islice(life(), steps))
        with open_journal(Path(folder) / "life.db") as journal:
            for step in kept:
                journal.append([step])
        yield _size(Path(folder) / "life.db", kept)
        yield from _replay(Path(folder) / "life.db", kept)


def _append(folder: Path, rounds: int, appends: int) -> Iterator[Figure]:
    """J1: completions of full batches, one row a commit."""
    with (
        open_journal(folder / "ours.db") as ours,
        _Bare(folder / "bare.db") as bare,
        _Bare(folder / "log.db", checkpoints=False) as log,
    ):

        def append(steps: list[Step]) -> float:
            begun = time.perf_counter()
            for step in steps:
                ours.append([step])
            return time.perf_counter() - begun

        def insert(into: _Bare, steps: list[Step]) -> float:
            rows, execute = into.ready_made(steps), into.connection.execute
            begun = time.perf_counter()
            for row in rows:
                execute(schema.INSERT_STEP, row)
            return time.perf_counter() - begun

        contenders = {
            name: partial(_burst, work, _numbered_completions(), appends)
            for name, work in (
                ("ours", append),
                ("bare", partial(insert, bare)),
                ("log", partial(insert, log)),
            )
        }
        with _out_of_sight():
            for burst in contenders.values():
                burst()
            took = take_turns(contenders, rounds=rounds)
    us = {name: each / appends * 1e6 for name, each in took.items()}
    yield times_as_fast(
        *("J1", us["ours"], "us/step", "bare sqlite3, ready-made rows", us["bare"]), limit=0.7
    )
    yield compared(
        *("J1/log", us["ours"], "us/step", "bare sqlite3 without checkpoints", us["log"])
    )


def _burst(work: Callable[[list[Step]], float], steps: Iterator[Step], appends: int) -> float:
    """Let a contender append so many steps, each made shortly before; return its seconds."""
    spent = 0.0
    while appends > 0:
        fresh = list(islice(steps, min(FRESH, appends)))
        appends -= len(fresh)
        spent += work(fresh)
    return spent


def _numbered_completions() -> Iterator[Step]:
    """Return completions of full batches as they are decided, numbered as if nothing else were."""
    done = (step for step in full_batches(life()) if isinstance(step.taken, Completed))
    return (attrs.evolve(step, step=number) for number, step in enumerate(done, 1))


@contextmanager
def _out_of_sight() -> Iterator[None]:
    """Keep what was made before from the garbage collector: it is nobody's work here."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Bare:
    """A file with the tables of a journal and nobody to look after it."""

    def __init__(self, path: Path, *, checkpoints: bool = True) -> None:
        """Make the file; with ``checkpoints`` its log is bounded as `sqlite3` does by itself."""
        SqlJournal.open(path).close()
        with SqlJournal.open_to_read(path) as empty:
            self._head = empty.origin()
        self.connection = sqlite3.connect(path, isolation_level=None)
        for setting in ("journal_mode=WAL", "synchronous=NORMAL"):
            self.connection.execute(f"PRAGMA {setting}")
        if not checkpoints:
            self.connection.execute("PRAGMA wal_autocheckpoint=0")

    def ready_made(self, steps: list[Step]) -> list[Row]:
        """Return the rows of steps that follow those before."""
        rows, self._head = seal(Codec(), self._head, steps)
        return rows

    def __enter__(self) -> "_Bare":
        return self

    def __exit__(self, *unused: object) -> None:
        self.connection.close()


def _size(path: Path, steps: list[Step]) -> Figure:
    """J2: the closed file, against the text in its rows."""
    moved = sum(map(entity_events, steps))
    rows = seal(Codec(), SqlJournal.open_to_read(path).origin(), steps)[0]
    text = sum(len(row[2]) + len(row[3]) + len(row[4]) for row in rows)
    return absolute(
        *("J2", path.stat().st_size / moved, "bytes/entity event"),
        *("text of the rows", text / moved),
        most=BYTES_MAX,
    )


def _replay(path: Path, steps: list[Step]) -> Iterator[Figure]:
    """J3: fold and verify, against a cursor over the same rows."""
    moved = sum(map(entity_events, steps))
    journal = SqlJournal.open_to_read(path)
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)

    def read() -> int:
        return sum(1 for _ in connection.execute("SELECT * FROM step ORDER BY step"))

    def prove() -> None:
        report = verify(journal)
        if not report.ok:
            raise RuntimeError(f"the life does not verify: step {report.step}: {report.reason}")

    try:
        with _out_of_sight():
            took = interleave(
                {"read": read, "fold": lambda: fold(journal), "verify": prove}, rounds=3, burst_ns=1
            )
    finally:
        connection.close()
    rate = {name: moved / us * 1e6 for name, us in took.items()}
    baseline = ("cursor over the rows", rate["read"])
    yield absolute("J3/fold", rate["fold"], "entity events/s", *baseline, least=FOLD_MIN)
    yield absolute("J3/verify", rate["verify"], "entity events/s", *baseline, least=VERIFY_MIN)
