"""Keep a second engine off a journal, and readers on it (decision 17).

An owner holds an advisory lock (flock) on a small file beside the journal, ``NAME.lock``, which
also says its process id. The kernel drops the lock when the process dies, however it dies; a file
left behind locks nobody. The journal itself is never opened here: closing any descriptor of it
would drop the locks that SQLite holds on it in the same process.

The directory may belong to others, so what has the lock's name may be anybody's: a link is not
followed, and a file that does not look like a lock is left as it is.
"""

import fcntl
import os
import re
import stat
from pathlib import Path

from laneway.engine.errors import JournalWriteError

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CONTENT = re.compile(rb"\d{0,20}\n?")
"""A process id; cut off or absent if its writer was killed at once."""


class OwnerLock:
    """The right to append to one journal file; made by ``acquire``."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, journal: Path) -> "OwnerLock":
        """Take the lock beside ``journal`` (a resolved path).

        Raises: JournalWriteError if another engine holds it, or no lock can be made there.
        """
        path = lock_path(journal)
        while True:
            try:
                descriptor = os.open(path, _FLAGS, 0o600)
            except OSError as error:
                if os.path.islink(path):
                    raise _strange(path) from error
                raise JournalWriteError(
                    f"{journal}: no journal can be written here ({error.strerror}):"
                    " choose a directory that exists and may be written"
                ) from error
            try:
                if not _looks_like_a_lock(descriptor):
                    raise _strange(path)
                _lock(journal, descriptor)
                if _is_still_there(path, descriptor):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                    return cls(path, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def release(self) -> None:
        """Give the lock back and remove its file; idempotent.

        Why: the file is removed while it is locked, and ``acquire`` looks whether the file it
        locked is still the one with that name, so nobody locks a file that has gone.
        """
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            self._path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def lock_path(journal: Path) -> Path:
    """Return the lock file of a journal; where it is, an engine owns the journal or has died."""
    return journal.with_name(journal.name + ".lock")


def _lock(journal: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        owner = f"process {pid}" if pid.isdigit() else "another process"
        raise JournalWriteError(
            f"{journal} is in use by {owner}: close that engine, or take another file"
            " (reading is allowed)"
        ) from error
    except OSError as error:
        raise JournalWriteError(
            f"{journal}: this file system has no locks ({error.strerror}): choose another one"
        ) from error


def _looks_like_a_lock(descriptor: int) -> bool:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return False
    return _CONTENT.fullmatch(os.pread(descriptor, 64, 0)) is not None


def _strange(path: Path) -> JournalWriteError:
    return JournalWriteError(
        f"{path} is in the way and is no lock of a journal: move it, or take another journal file"
    )


def _is_still_there(path: Path, descriptor: int) -> bool:
    try:
        named = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))
