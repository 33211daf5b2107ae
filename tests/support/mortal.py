"""A warm process that forks engines which die where they are told.

``support/warm_parent.py`` starts it and talks to it: a line of JSON in is one life to live, a line
of JSON out is how it ended and what it had said. Everything is imported before the first fork, so a
life costs what its engine does and nothing else. A life opens its own device and journal, runs one
fixed script with ``threads=False``, and says aloud, over a pipe, each append that returned and
everything a client or an observer could see.
"""

import gc
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn, TextIO

import sqlalchemy
from support.fake_device import FakeDevice

from laneway.adapters import open_device
from laneway.adapters.cli import main as command_line
from laneway.adapters.library import VARIABLE
from laneway.engine import Engine, Request, Sampling, Stream
from laneway.engine.lanes import warm_up_lanes
from laneway.engine.logits import warm_up
from laneway.engine.ports import DevicePort, Step
from laneway.journal import SqlJournal, open_journal
from laneway.journal.owner import OwnerLock

LAZY = ("laneway.journal.replay",)
"""Modules that commands import when they are called."""

NOBODY = 65534
WALL_NS = 1_700_000_000_000_000_000
PROMPTS = ((3, 1, 4), (1, 5), (9, 2, 6, 5))
CANCELLED = 2
"""The prompt whose request is cancelled after its first token."""

MAX_TOKENS = 4
VOCABULARY = 512
"""That of the small models, for which the kernels are compiled before the first fork."""

Say = Callable[..., None]


def die() -> NoReturn:
    """Leave at once, as a killed process does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL was survived")


def die_beyond(size_bytes: int) -> None:
    """Die in the middle of the write that would make any file larger than this."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_files(size_bytes)


class MortalJournal:
    """The journal of a file; dies at one point of one append, and says which appends returned."""

    def __init__(self, journal: SqlJournal, cut: Sequence[Any], say: Say) -> None:
        self.tokens = journal.tokens
        self._journal = journal
        self._kind, self._number, *self._rest = (*cut, 0, 0)[: max(2, len(cut))]
        self._say = say
        self._appends = 0

    def read(self, *, first: int = 1, last: int | None = None) -> Iterator[Step]:
        return self._journal.read(first=first, last=last)

    def claim(self) -> None:
        self._journal.claim()

    def append(self, steps: Sequence[Step]) -> None:
        self._appends += 1
        chosen = self._appends == self._number
        if chosen and self._kind == "before":
            die()
        if chosen and self._kind == "statement":
            self._connection().set_progress_handler(die, self._rest[0])
        if chosen and self._kind == "log":
            log_bytes = Path(f"{self._journal.path}-wal").stat().st_size
            die_beyond(log_bytes + self._rest[0])
        self._journal.append(steps)
        self._say("durable", steps[-1].step)
        if chosen and self._kind == "durable":
            die()
        if chosen and self._kind == "checkpoint":
            die_beyond(self._journal.path.stat().st_size + self._rest[0])
            self._connection().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            die()

    def close(self) -> None:
        if self._kind == "close":
            die_beyond(self._journal.path.stat().st_size + self._number)
        self._journal.close()

    def _connection(self) -> Any:
        assert self._journal._writer is not None
        return self._journal._writer._connection


def live(life: dict[str, Any], say: Say) -> None:
    """Load a model, answer three requests (one is cancelled), unload, close; or die on the way.

    A life that resumes submits nothing: it listens to the requests that others left open.
    """
    cut = life["cut"]
    if cut[0] == "create":
        die_beyond(cut[1])
    opened = open_journal(life["path"])
    assert isinstance(opened, SqlJournal)
    device: DevicePort = FakeDevice() if life["device"] == "fake" else open_device(life["device"])
    engine = Engine(
        device=device,
        journal=MortalJournal(opened, cut, say),
        threads=False,
        wall_clock=lambda: WALL_NS,
        draw_seed=lambda: 77,
        resume=life["resume"],
    )
    actions = _count_actions(engine, cut)
    if life["resume"]:
        _resume(engine, life["model"], say)
    else:
        _tell_what_is_seen(engine, say)
        _ask(engine, life["model"])
    engine.unload("m")
    engine.close()
    say("actions", actions[0])


def _resume(engine: Engine, model: str, say: Say) -> None:
    """Listen to all open requests and let them go on."""
    streams = {id(stream): stream for stream in map(engine.attach, _open_numbers(engine))}
    _tell_what_is_seen(engine, say, listened=streams)
    engine.load("m", model)
    while engine.advance():
        pass
    for stream in streams.values():
        say("text", stream.request, stream.result().text)


def _open_numbers(engine: Engine) -> list[int]:
    return [view.number for view in engine.requests()]


def _ask(engine: Engine, model: str) -> None:
    """Load the model and ask for three answers, of which one is cancelled."""
    engine.load("m", model)
    streams = [
        engine.submit(
            Request(model="m", prompt=prompt, max_tokens=MAX_TOKENS, sampling=Sampling(seed=seed))
        )
        for seed, prompt in enumerate(PROMPTS)
    ]
    next(iter(streams[CANCELLED]))
    streams[CANCELLED].cancel()
    while engine.advance():
        pass


def _count_actions(engine: Engine, cut: Sequence[Any]) -> list[int]:
    """Count the actions of the engine in the list returned, and die after the one named."""
    advance, done = engine.advance, [0]

    def counted(until_ns: int | None = None) -> bool:
        acted = advance(until_ns)
        done[0] += 1
        if cut[0] == "action" and done[0] == cut[1]:
            die()
        return acted

    engine.advance = counted  # type: ignore[method-assign]
    return done


def _tell_what_is_seen(
    engine: Engine, say: Say, listened: Mapping[int, Stream] | None = None
) -> None:
    """Say every token and ending a client gets, and every step an observer sees, as it happens.

    ``listened`` are the streams that have clients, by id; None is all.
    """
    deliver, conclude, show = Stream.deliver, Stream.conclude, engine._show

    def tell_token(stream: Stream, position: int, token: int, *rest: Any) -> None:
        deliver(stream, position, token, *rest)
        if listened is None or id(stream) in listened:
            say("token", stream.request, position, token)

    def tell_ending(stream: Stream, ending: Any, *rest: Any) -> None:
        conclude(stream, ending, *rest)
        if listened is None or id(stream) in listened:
            say("ending", stream.request, ending.finish_reason)

    def tell_step(step: Step) -> None:
        show(step)
        say("seen", step.step)

    Stream.deliver = tell_token  # type: ignore[assignment,method-assign]
    Stream.conclude = tell_ending  # type: ignore[assignment,method-assign]
    engine._show = tell_step  # type: ignore[method-assign]


def call(life: dict[str, Any]) -> int:
    """Call the command line, perhaps on a full disk or without rights; return its exit code."""
    if life["disk"] is not None:
        _fill_disk(*life["disk"])
    if life["nobody"] and os.geteuid() == 0:
        for name in LAZY:
            importlib.import_module(name)  # nobody may not be let into the checkout
        os.environ[VARIABLE] = life["library"]
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    with open(life["out"], "w") as out, open(life["err"], "w") as err:
        return call_command_line(life["call"], out, err)


def call_command_line(words: list[str], out: TextIO, err: TextIO) -> int:
    """Call ``laneway`` in this process."""
    sys.argv = ["laneway", *words]
    with redirect_stdout(out), redirect_stderr(err):
        try:
            command_line()
        except SystemExit as left:
            return left.code if isinstance(left.code, int) else 1
    return 0


def _fill_disk(appends: int, room_bytes: int) -> None:
    """Let no file grow beyond the journal's log and some room, after so many appends.

    Without appends the room alone counts, from the opening on. The write that does not fit fails,
    as on a full disk: Python ignores the signal that would end the process.
    """
    append, acquire = SqlJournal.append, OwnerLock.acquire
    done = [0]

    def append_and_limit(journal: SqlJournal, steps: Sequence[Step]) -> None:
        append(journal, steps)
        done[0] += 1
        if done[0] == appends:
            log_bytes = Path(f"{journal.path}-wal").stat().st_size
            _limit_files(log_bytes + room_bytes)

    def limit_and_acquire(path: Path) -> OwnerLock:
        _limit_files(room_bytes)
        return acquire(path)

    if appends:
        SqlJournal.append = append_and_limit  # type: ignore[assignment,method-assign]
    else:
        OwnerLock.acquire = limit_and_acquire  # type: ignore[assignment,method-assign]


def _limit_files(size_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def be_born(life: dict[str, Any], pipe: int) -> int:
    """Live one life in the process that was forked for it; return its exit code."""

    def say(*words: Any) -> None:
        os.write(pipe, json.dumps(words).encode() + b"\n")

    try:
        if "call" in life:
            return call(life)
        live(life, say)
        return 0
    except BaseException as failure:
        say("failed", f"{type(failure).__name__}: {failure}")
        return 1


def raise_one(life: dict[str, Any]) -> dict[str, Any]:
    """Fork a life, hear what it says until it is gone, and return that and how it ended."""
    mouth_out, mouth_in = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(mouth_out)
        os._exit(be_born(life, mouth_in))
    os.close(mouth_in)
    with open(mouth_out) as mouth:
        said = [json.loads(line) for line in mouth if line.endswith("\n")]
    _, status = os.waitpid(child, 0)
    return {"code": os.waitstatus_to_exitcode(status), "said": said}


def main() -> None:
    """Live the lives that stdin names, one after the other."""
    warm_up(VOCABULARY)
    warm_up_lanes()
    sqlalchemy.create_engine("sqlite://").dispose()  # a call without rights can load nothing more
    with open(os.devnull, "w") as nothing:
        call_command_line(["devices"], nothing, nothing)  # imports what is imported late
    gc.collect()
    gc.freeze()  # a search in a life would touch, and so copy, what all lives share
    for line in sys.stdin:
        print(json.dumps(raise_one(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
