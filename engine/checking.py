"""Checks at the border: a value that the journal could not keep must not come in (I12).

One bad value of one caller is that caller's error when it is made, never the engine's end.
"""

from typing import Any

INT32_MAX = (1 << 31) - 1
SOURCE_CHARACTERS_MAX = 4096
NAME_CHARACTERS_MAX = 256


def check_text(name: str, value: Any, *, most: int) -> None:
    """Refuse what is not text, is too long, or has lone surrogates.

    Raises: TypeError or ValueError naming the field.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, not {type(value).__name__}")
    if len(value) > most:
        raise ValueError(f"{name} has at most {most} characters, not {len(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has a lone surrogate at character {error.start}, which is no character"
        ) from None


def check_int(name: str, value: Any, *, least: int, most: int) -> None:
    """Refuse what is not an integer within bounds. Raises: TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be within {least} and {most}, not {value}")
