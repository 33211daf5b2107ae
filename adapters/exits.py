"""Exit codes of the command line, and the one line a user sees when something is wrong."""

import typer

from laneway.engine.errors import (
    CapabilityError,
    DeviceError,
    EngineClosedError,
    InternalError,
    JournalError,
    ModelError,
    RequestError,
    RestartNeededError,
    UsageError,
)

DONE = 0
ANSWER_IS_NO = 1
USAGE = 2
DEVICE = 3
JOURNAL = 4
INTERNAL = 70
RESTART = 75
INTERRUPTED = 130
TERMINATED = 143


class Terminated(BaseException):
    """The process was asked to end (SIGTERM): what is open is closed on the way out.

    Why no Exception: nothing between here and the program's end may take it for an error.
    """


_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (RequestError, ANSWER_IS_NO),
    (JournalError, JOURNAL),
    (RestartNeededError, RESTART),
    (DeviceError, DEVICE),
    (ModelError, USAGE),
    (CapabilityError, USAGE),
    (UsageError, USAGE),
    (InternalError, INTERNAL),
    (KeyboardInterrupt, INTERRUPTED),
    (typer.Abort, INTERRUPTED),
    (Terminated, TERMINATED),
)

# The base of what the command line parser raises. Why not imported by name: typer brings a parser
# of its own in some versions and uses the package click in others.
_COMMAND_LINE_ERROR = typer.BadParameter.__mro__[typer.BadParameter.__mro__.index(Exception) - 1]
_HELP = "NoArgsIsHelpError"


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error; an engine that ended is judged by what ended it."""
    if isinstance(error, EngineClosedError) and error.__cause__ is not None:
        return exit_code(error.__cause__)
    if isinstance(error, _COMMAND_LINE_ERROR):
        return USAGE
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return INTERNAL


def describe(error: BaseException) -> str:
    """Return what to print: one line, whatever the error's own text looks like."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "interrupted"
    if isinstance(error, Terminated):
        return "terminated"
    if isinstance(error, _COMMAND_LINE_ERROR):
        return _describe_usage(error)
    text = one_line(str(error)) or type(error).__name__
    if exit_code(error) == INTERNAL:
        return f"internal error ({type(error).__name__}): {text}; run again with --debug"
    return text


def is_help(error: BaseException) -> bool:
    """Tell whether help was shown in place of a command that was not named."""
    return type(error).__name__ == _HELP and isinstance(error, _COMMAND_LINE_ERROR)


def _describe_usage(error: BaseException) -> str:
    """Say what is wrong with the command line, and where its help is."""
    text = one_line(str(getattr(error, "format_message", lambda: error)())).rstrip(".")
    context = getattr(error, "ctx", None)
    command = "laneway" if context is None else context.command_path
    return f"{text}; see {command} --help"


def one_line(text: str) -> str:
    """Return a text as one line of characters that can be printed.

    Why: it may quote a file name or a library's words, and those may steer a terminal.
    """
    line = " ".join(text.split())
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in line
    )
