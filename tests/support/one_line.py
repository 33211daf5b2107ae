"""Hold what a person sees of a refusal against the whole line that is wanted."""

import re
from collections.abc import Sequence

from support.command_line import laneway


def is_the_line(found: str, wanted: str) -> bool:
    """Tell whether a line is the wanted one, in which ``…`` stands for anything."""
    pattern = "[^\n]*".join(re.escape(part) for part in wanted.split("…"))
    return re.fullmatch(pattern, found) is not None


def check_refused(words: Sequence[object], code: int, wanted: str) -> None:
    """Call the command line and hold exit code and the one line against what is wanted."""
    called = laneway(*words).refused(code)
    found = called.err.removesuffix("\n").removeprefix("laneway: ")
    assert is_the_line(found, wanted), found
    assert called.out == ""
