"""Move the write-ahead log into the database, off the engine's thread (decision 17).

Theory of operation. Appending only lengthens the log. A checkpoint copies it into the database and
waits for the disk, so it runs on a thread and a connection of its own: passively, whenever the log
grew by GROWTH_BYTES and at least every PERIOD_S while there is something to copy. A passive
checkpoint never holds up the engine, but under steady load it never quite catches up either; past
LOG_BYTES_MAX the engine is held up for the moment that copying the rest takes, and begins the log
anew. The file is cut to LOG_BYTES_MAX and no further then: to write over what is there takes a
fifth less than to make it longer. While there is always some reader that stands in the log it
grows.
"""

import sqlite3
import threading

import sqlalchemy

from laneway.journal.connect import driver_connection
from laneway.journal.sealing import Row

PAGE_BYTES = 4096
GROWTH_BYTES = 1000 * PAGE_BYTES
"""Growth of the log between two checkpoints, roughly: a row dirties a page of its own or more."""

PERIOD_S = 1.0
LOG_BYTES_MAX = 64 << 20


class Checkpointer:
    """Checkpoint one journal: ``step`` does the work, ``start`` does it on a thread.

    ``gate`` is held by whoever appends, so that beginning anew never meets a write half-way.
    """

    def __init__(self, engine: sqlalchemy.Engine, gate: threading.Lock) -> None:
        self._engine = engine
        self._gate = gate
        self._wake = threading.Event()
        self._stopping = False
        self._grown_bytes = 0
        self._thread: threading.Thread | None = None
        self.failure: Exception | None = None
        """The error that ended the thread; the next append raises it."""

    def notice(self, rows: list[Row]) -> None:
        """Take note that the log grew by one commit (the gate is held)."""
        grown_bytes = self._grown_bytes + PAGE_BYTES + PAGE_BYTES * len(rows)
        for row in rows:
            grown_bytes += len(row[3]) + len(row[4])
        self._grown_bytes = grown_bytes
        if grown_bytes >= GROWTH_BYTES and not self._wake.is_set():
            self._wake.set()

    def start(self) -> None:
        """Begin to checkpoint on a thread."""
        self._thread = threading.Thread(target=self._run, name="journal-checkpoint", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; idempotent."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def step(self, connection: sqlite3.Connection) -> bool:
        """Checkpoint once, if the log grew; return whether it did."""
        with self._gate:
            grown, self._grown_bytes = self._grown_bytes, 0
        if grown == 0:
            return False
        _, pages, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if pages * PAGE_BYTES > LOG_BYTES_MAX:
            with self._gate:
                connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        return True

    def _run(self) -> None:
        try:
            proxied = self._engine.raw_connection()
            try:
                connection = driver_connection(proxied)
                connection.execute("PRAGMA busy_timeout=0")
                connection.execute("PRAGMA synchronous=NORMAL")
                while not self._stopping:
                    self._wake.wait(PERIOD_S)
                    self._wake.clear()
                    self.step(connection)
            finally:
                proxied.close()
        except Exception as error:  # whatever ended the thread, the next append must know
            self.failure = error
