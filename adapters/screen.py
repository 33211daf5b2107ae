"""What a person sees while models load and answers stream.

On a terminal every prompt has a panel that grows; elsewhere (a pipe, a log) each answer is printed
line by line as its lines are completed, with the prompt's number in front, so that several answers
at once stay readable.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from laneway.engine import Delta, Engine, Result
from laneway.engine.subscription import Subscription

REFRESHES_PER_SECOND = 12
PIPE_COLUMNS = 140


def wide_console(*, stderr: bool = False) -> Console:
    """Return a console for tables: as wide as the terminal, or wide enough where there is none."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PIPE_COLUMNS)


class Screen:
    """Show answers as they arrive; quiet shows nothing."""

    def __init__(self, console: Console, names: list[str], *, quiet: bool) -> None:
        self._console = console
        self._names = names
        self._quiet = quiet
        self._answers = ["" for _ in names]
        self._shown = [0 for _ in names]
        self._endings = ["" for _ in names]
        self._live: Live | None = None
        if console.is_terminal and not quiet:
            self._live = Live(
                get_renderable=self._panels,
                console=console,
                refresh_per_second=REFRESHES_PER_SECOND,
            )

    def __enter__(self) -> Self:
        """Begin to show."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Show the last state and give the terminal back."""
        if self._live is not None:
            self._live.stop()

    def add(self, index: int, delta: Delta) -> None:
        """Show one more piece of an answer; a token without text shows its id."""
        piece = delta.text
        if not piece and delta.token is not None and not self._answers[index].strip("0123456789 "):
            piece = f"{delta.token} "
        self._answers[index] += piece
        self._print_lines(index)

    def end(self, index: int, result: Result) -> None:
        """Show how an answer ended."""
        how = result.finish_reason if result.error is None else str(result.error)
        if result.suspect_tokens_from is not None:
            how += f", in doubt from token {result.suspect_tokens_from} on"
        if result.continued_tokens_from is not None:
            how += f", continued after a fault from token {result.continued_tokens_from} on"
        self._endings[index] = f"[{how}, {result.usage.completion_tokens} tokens]"
        if self._live is None and not self._quiet:
            rest = self._answers[index][self._shown[index] :]
            self._print(index, f"{rest} {self._endings[index]}".strip())

    def _print_lines(self, index: int) -> None:
        """Print the completed lines of an answer, where there is no terminal to redraw."""
        if self._live is not None or self._quiet:
            return
        *lines, _ = self._answers[index][self._shown[index] :].split("\n")
        for line in lines:
            self._shown[index] += len(line) + 1
            if line:
                self._print(index, line)

    def _print(self, index: int, text: str) -> None:
        self._console.print(f"{index + 1}| {text}", markup=False, highlight=False, soft_wrap=True)

    def _panels(self) -> Group:
        return Group(
            *(
                Panel(Text(answer), title=Text(name), subtitle=Text(ending), title_align="left")
                for name, answer, ending in zip(
                    self._names, self._answers, self._endings, strict=True
                )
            )
        )


@contextmanager
def watch_loading(engine: Engine, alias: str, *, quiet: bool) -> Iterator[None]:
    """Tell on stderr how far a load is, from the engine's own events."""
    if quiet:
        yield
        return
    console = Console(file=sys.stderr)
    subscription = engine.subscribe()
    with console.status(f"loading {alias}") as status:
        watcher = threading.Thread(
            target=_tell_progress,
            args=(subscription, lambda text: status.update(f"loading {alias}: {text}")),
            daemon=True,
        )
        watcher.start()
        try:
            yield
        finally:
            subscription.close()
            watcher.join()


def _tell_progress(subscription: Subscription, tell: Callable[[str], None]) -> None:
    jobs = 0
    for step in subscription:
        for event in step.events:
            if event.machine == "model":
                tell(event.dest)
            elif event.machine == "job" and event.trigger == "complete":
                jobs += 1
                tell(f"warming, {jobs} golden and warm-up jobs done")
