"""Another process with a board of its own opens, told line by line what to do; it ends by itself.

The parent writes a line and reads a line of JSON; a child whose parent is gone reads the end of its
input, and one that is stuck is ended by its own alarm.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.native_board import DECODE, STEP_IDLE, Bench, Board, Pair

from laneway.adapters.binding import load_library
from laneway.engine.errors import DeviceError

LIFE_S = 120


class SecondOwner:
    """One child process; ``ask`` makes it do one thing."""

    def __init__(self, library: Path, calbin: Path) -> None:
        tests = str(Path(__file__).parents[1])
        search = os.pathsep.join((tests, os.environ.get("PYTHONPATH", "")))
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(library), str(calbin)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": search},
        )
        self.pid = self._process.pid

    def ask(self, verb: str, **arguments: Any) -> Any:
        """Do one thing there and return what it says."""
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None and pipe_out is not None
        pipe_in.write(json.dumps([verb, arguments]) + "\n")
        pipe_in.flush()
        line = pipe_out.readline()
        assert line, f"the process ended with {self._process.wait(LIFE_S)}"
        return json.loads(line)

    def kill(self) -> None:
        """End it without a chance to clean up."""
        self._process.kill()
        self._process.wait(LIFE_S)

    def end(self) -> None:
        """Let it end; every pipe is closed."""
        self._process.communicate(timeout=LIFE_S)


class _Child:
    def __init__(self, library: Path, calbin: Path) -> None:
        self.bench = Bench(load_library(library), calbin)
        self.board: Board | None = None

    def open(self, config: str, exclusive: bool = False) -> int:
        """Open the board; return the code."""
        try:
            self.board = Board(self.bench.library, self.bench.calbin, config, exclusive=exclusive)
        except DeviceError as refused:
            return refused.code
        return 0

    def _open(self) -> Board:
        assert self.board is not None
        return self.board

    def serve(self) -> list[int]:
        """Configure and run one job; return its logits."""
        board = self._open()
        board.epoch = board.health().device_epoch
        board.configure()
        pair = Pair(board, DECODE)
        board.run(pair, [(0, [5], 0)])
        board.step(STEP_IDLE)
        return pair.logits()

    def reset(self, level: int) -> list[int]:
        """Reset; return the epochs before and after."""
        report = self._open().reset(level)
        return [report.epoch_before, report.epoch_after]

    def epoch(self) -> int:
        """Look at the health."""
        return int(self._open().health().device_epoch)

    def events(self) -> list[tuple[int, int, str]]:
        """Take the events."""
        return self._open().events()

    def close(self) -> None:
        """Close the device."""
        self._open().close()
        self.board = None


def _main(library: str, calbin: str) -> None:
    signal.alarm(LIFE_S)
    child = _Child(Path(library), Path(calbin))
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        print(json.dumps(getattr(child, verb)(**arguments)), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
