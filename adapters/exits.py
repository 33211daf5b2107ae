"""Exit codes of the command line, and the one line a user sees when something is wrong."""

from laneway.engine.errors import (
    CapabilityError,
    DeviceError,
    EngineClosedError,
    InternalError,
    JournalError,
    ModelError,
    RequestError,
    UsageError,
)

DONE = 0
ANSWER_IS_NO = 1
USAGE = 2
DEVICE = 3
JOURNAL = 4
INTERNAL = 70
INTERRUPTED = 130

_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (RequestError, ANSWER_IS_NO),
    (JournalError, JOURNAL),
    (DeviceError, DEVICE),
    (ModelError, USAGE),
    (CapabilityError, USAGE),
    (UsageError, USAGE),
    (InternalError, INTERNAL),
    (KeyboardInterrupt, INTERRUPTED),
)


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error; an engine that ended is judged by what ended it."""
    if isinstance(error, EngineClosedError) and error.__cause__ is not None:
        return exit_code(error.__cause__)
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return INTERNAL


def describe(error: BaseException) -> str:
    """Return what to print: one line, whatever the error's own text looks like."""
    text = " ".join(str(error).split()) or type(error).__name__
    if exit_code(error) == INTERNAL:
        return f"internal error ({type(error).__name__}): {text}; run again with --debug"
    return text
