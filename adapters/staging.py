"""Write a folder so that it is there whole or not at all.

The files go into a hidden sibling folder, are forced to the disk, and one rename publishes them. A
destination that exists is replaced only if it is empty or a calbin that this package wrote: nothing
else is ever removed.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from laneway.adapters.manifest import BYTES_MAX, FORMAT, MANIFEST_NAME
from laneway.adapters.rooted import open_root
from laneway.engine.errors import ModelError


class _Format(msgspec.Struct):
    format: str


@contextmanager
def stage_folder(destination: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a folder to write into; publish it as `destination` when the block ends well.

    Raises: ModelError if the destination may not be replaced or cannot be written.
    """
    target = Path(destination).absolute()
    _check_destination(target)
    staged = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.mkdir(mode=0o755)
        yield staged
        sync_folder(staged)
        _publish(staged, target)
    except OSError as error:
        raise ModelError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


@contextmanager
def create_file(path: Path) -> Iterator[BinaryIO]:
    """Create a file that others cannot write whatever the umask; at the end force it to disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_destination(target: Path) -> None:
    if not os.path.lexists(target):
        return
    refused = f"{target}: exists and is no calbin of laneway; name another destination"
    if target.is_symlink() or not target.is_dir():
        raise ModelError(refused)
    root = open_root(target)
    names = root.names()
    if not names:
        return
    if MANIFEST_NAME not in names or not set(names) <= set(BYTES_MAX):
        raise ModelError(refused)
    try:
        raw = root.read(MANIFEST_NAME, bytes_max=BYTES_MAX[MANIFEST_NAME])
        stated = msgspec.json.decode(raw, type=_Format)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(refused) from error
    if stated.format != FORMAT:
        raise ModelError(refused)


def _publish(staged: Path, target: Path) -> None:
    """Rename the staged folder into place; an older one steps aside first and is removed last."""
    older: Path | None = None
    if target.exists():
        older = target.with_name(f".{target.name}.{secrets.token_hex(6)}.old")
        target.rename(older)
    try:
        staged.rename(target)
    except OSError:
        if older is not None:
            older.rename(target)
        raise
    sync_folder(target.parent)
    if older is not None:
        shutil.rmtree(older)
