"""Choose who writes the texts of usual rows: C where it was built, else Python as for all others.

Theory of operation. ``native/text.c`` writes the texts of by far the most rows, byte for byte as
the codec does. It gives None for every value that has not the usual form; whoever asks goes on in
Python then, so the rules and the refusals stand there alone. In an installation that was made
without a compiler there is no such module, and nothing is usual.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import attrs

_NAME = "laneway.journal._text"

UsualRow = tuple[str, str, str, bytes | None]
"""Kind, text of the input, text of the events, and chain; None where Python is to hash."""


@attrs.frozen
class Texts:
    """Who writes what is usual; each gives None for what is not.

    ``row``: of versions of ``kinds``, codes of edges (``CodedEvents.codes``), and a step behind a
    chain (previous, step, at_ns, taken, events). ``events``: of codes and events, their text.
    ``chain``: of what ``row_chain`` is given, what it gives.
    """

    kinds: tuple[str, ...]
    row: Callable[..., UsualRow | None]
    events: Callable[[Any, Any], bytes | None]
    chain: Callable[[bytes, int, int, bytes, bytes, bytes], bytes | None]


def nothing(*unused: object) -> None:
    """Return None: it is not usual."""


PYTHON = Texts((), nothing, nothing, nothing)
"""Python writes everything."""


def _built() -> Texts:
    """Return what this installation has.

    Why a module that is there and does not fit is not passed over: its ImportError says what to do.
    """
    if importlib.util.find_spec(_NAME) is None:
        return PYTHON
    module = importlib.import_module(_NAME)
    return Texts(module.KINDS, module.row, module.events, module.chain)


BUILT = _built()
"""What this installation has."""
