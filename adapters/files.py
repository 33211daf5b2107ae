"""Read a file that somebody named, whatever it turns out to be."""

import os
import stat
from pathlib import Path

from laneway.engine.errors import ConfigurationError


def read_bounded(path: str | os.PathLike[str], *, bytes_max: int) -> bytes:
    """Read at most one byte more than a file may have; a pipe or a device is no file.

    Raises: OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is no regular file")
        return file.read(bytes_max + 1)


def read_named_text(path: str, *, bytes_max: int, what: str) -> str:
    """Read the text of a file that an option names. Raises: ConfigurationError."""
    try:
        content = read_bounded(path, bytes_max=bytes_max)
        if len(content) > bytes_max:
            raise ConfigurationError(f"{what}={path} has more than {bytes_max} bytes")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{what}={path} cannot be read: {error}") from error


def is_file(path: str | os.PathLike[str], *, what: str) -> bool:
    """Tell whether a path leads to a file.

    Raises: ConfigurationError where nobody may look, or the name is none.
    """
    try:
        return Path(path).is_file()
    except OSError as error:
        raise ConfigurationError(f"{what} {path} cannot be looked at: {error.strerror}") from error
