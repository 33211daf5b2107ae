"""Exit codes of the command line, and the one line a user sees when something is wrong."""

import os
from contextlib import suppress
from typing import Any, TextIO

import typer

from laneway.engine.errors import (
    CapabilityError,
    DeviceError,
    EngineClosedError,
    InternalError,
    JournalError,
    LanewayError,
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
OUTPUT = 74
RESTART = 75
INTERRUPTED = 130
PIPE_CLOSED = 141
TERMINATED = 143


class OutputError(LanewayError):
    """What was to be printed cannot be written: the disk is full, or nobody reads any more."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"the output cannot be written: {cause.strerror or cause}")
        self.closed = isinstance(cause, BrokenPipeError)


class Output:
    """Standard output in which a failure to write is told apart from any other OSError."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write. Raises: OutputError."""
        try:
            return self._stream.write(text)
        except OSError as error:
            raise self._fail(error) from error

    def flush(self) -> None:
        """Write what is held back. Raises: OutputError."""
        try:
            self._stream.flush()
        except OSError as error:
            raise self._fail(error) from error

    def _fail(self, error: OSError) -> OutputError:
        """Return what to raise; nothing is tried again when the program ends."""
        with suppress(OSError, ValueError):
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, self._stream.fileno())
            os.close(sink)
        return OutputError(error)


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
    if isinstance(error, OutputError):
        return PIPE_CLOSED if error.closed else OUTPUT
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
