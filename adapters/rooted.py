"""Open the files of a model folder, and nothing else.

A model folder comes from elsewhere. A link in it may point at anything, a file in it may be a pipe
or larger than memory, and a file that anybody can write may change after it was checked. So every
file is opened here: its name is a plain name, it resolves inside the folder (or inside an explicit
model root, for snapshot folders made of links), it is a regular file that others cannot write, and
its size is bounded.

Source: E20a, R10.2.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

import attrs

from laneway.engine.errors import ModelError

_ENTRIES_MAX = 4096


@attrs.frozen
class Root:
    """A resolved folder and the folders that its files may resolve into."""

    folder: Path
    boundaries: tuple[Path, ...]

    def names(self) -> list[str]:
        """List the names in the folder, sorted.

        Raises: ModelError if it cannot be read or holds too many.
        """
        names: list[str] = []
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    names.append(entry.name)
                    if len(names) > _ENTRIES_MAX:
                        raise ModelError(
                            f"{self.folder}: more than {_ENTRIES_MAX} files; not a model folder"
                        )
        except OSError as error:
            raise ModelError(f"{self.folder}: cannot be listed: {error.strerror}") from error
        return sorted(names)

    def has(self, name: str) -> bool:
        """Tell whether the folder has an entry of this name, be it a dangling link."""
        return os.path.lexists(self.folder / name)

    def open(self, name: str, *, bytes_max: int) -> BinaryIO:
        """Open one file for reading after checking that it may be trusted.

        Raises: ModelError naming the file and the rule that it breaks.
        Source: E20a.
        """
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ModelError(f"{self.folder}: {name!r} is not a plain file name")
        path = self.folder / name
        try:
            resolved = path.resolve(strict=True)
            if not any(resolved.is_relative_to(boundary) for boundary in self.boundaries):
                raise ModelError(
                    f"{path}: leads out of the model folder to {resolved};"
                    " name a model root that contains both to allow it"
                )
            # The path is resolved already: a link that appears now is refused by O_NOFOLLOW, and a
            # pipe does not make the open wait.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(resolved, flags)
        except FileNotFoundError as error:
            raise ModelError(f"{path}: file is missing") from error
        except (OSError, RuntimeError) as error:
            # RuntimeError: how pathlib before 3.13 reports a loop of links.
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ModelError(f"{path}: cannot be opened: {reason}") from error
        try:
            _check_open_file(path, os.fstat(descriptor), bytes_max)
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise

    def read(self, name: str, *, bytes_max: int) -> bytes:
        """Read one whole file under the same rules."""
        with self.open(name, bytes_max=bytes_max) as file:
            try:
                content = file.read(bytes_max + 1)
            except OSError as error:
                raise ModelError(
                    f"{self.folder / name}: cannot be read: {error.strerror}"
                ) from error
        if len(content) > bytes_max:
            raise ModelError(f"{self.folder / name}: grew beyond {bytes_max} bytes while read")
        return content


def open_root(
    folder: str | os.PathLike[str], *, model_root: str | os.PathLike[str] | None = None
) -> Root:
    """Resolve a model folder, and the model root that its links may lead into.

    Raises: ModelError if either is not a folder, or the model folder is writable by others.
    """
    resolved = _resolve_folder(folder)
    if resolved.stat().st_mode & stat.S_IWOTH:
        # Whoever can write the folder can exchange a file in it after the file was checked.
        raise ModelError(f"{resolved}: the folder is writable by others; run chmod o-w")
    if model_root is None:
        return Root(resolved, (resolved,))
    return Root(resolved, (resolved, _resolve_folder(model_root)))


def _resolve_folder(folder: str | os.PathLike[str]) -> Path:
    try:
        resolved = Path(folder).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"{os.fspath(folder)}: no such folder; give the path of a model folder"
        ) from error
    if not resolved.is_dir():
        raise ModelError(f"{resolved}: not a folder; give the folder that holds the model's files")
    return resolved


def _check_open_file(path: Path, status: os.stat_result, bytes_max: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path}: not a regular file")
    if status.st_mode & stat.S_IWOTH:
        raise ModelError(
            f"{path}: writable by others (mode {stat.S_IMODE(status.st_mode):04o}); run chmod o-w"
        )
    if status.st_size > bytes_max:
        raise ModelError(f"{path}: {status.st_size} bytes, more than the {bytes_max} allowed")
