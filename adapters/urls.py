"""Take a device URL apart: ``NAME:PLACE?key=value&…``."""

from collections.abc import Sequence
from urllib.parse import unquote

from laneway.engine.errors import ConfigurationError


def split_url(url: str) -> tuple[str, str]:
    """Return the name before the first colon and the rest. Raises: ConfigurationError."""
    name, colon, rest = url.partition(":")
    if not colon or not name:
        raise ConfigurationError(
            f"device {url!r}: a name and a colon are wanted, such as sim: or npurt:/path/lib.so"
        )
    return name, rest


def parse_rest(rest: str, *, known: Sequence[str], scheme: str) -> tuple[str, dict[str, str]]:
    """Return the place and the options of a device URL.

    Raises: ConfigurationError for an unknown, repeated or empty option, listing the known ones.
    """
    place, _, query = rest.partition("?")
    values: dict[str, str] = {}
    for part in query.split("&") if query else ():
        key, equals, value = part.partition("=")
        if key not in known:
            raise ConfigurationError(f"{scheme}: unknown option {key!r}; known are {_list(known)}")
        if not equals or not value:
            raise ConfigurationError(f"{scheme}: option {key} needs a value: {key}=…")
        if key in values:
            raise ConfigurationError(f"{scheme}: option {key} is given twice")
        text = unquote(value)
        if any(ord(character) < 0x20 for character in text):
            # A line break would smuggle a second option into the library's own configuration.
            raise ConfigurationError(f"{scheme}: option {key} holds a control character")
        values[key] = text
    return unquote(place), values


def read_number(
    values: dict[str, str], key: str, *, default: int, least: int = 0, most: int, scheme: str
) -> int:
    """Return an option that is a number, decimal or 0x…, or its default.

    Raises: ConfigurationError for what is none, or out of range.
    """
    text = values.get(key, str(default))
    try:
        number = int(text, 0)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise ConfigurationError(f"{scheme}: option {key}={text}: {least} to {most} is wanted")
    return number


def _list(known: Sequence[str]) -> str:
    return ", ".join(known)
