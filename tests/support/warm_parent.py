"""The test's side of ``support/mortal.py``: ask for lives, hear how they ended."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from laneway.adapters.library import find_library


@attrs.frozen
class Ended:
    """How a life ended: the negative signal or the exit code, and what it had said."""

    code: int
    said: list[list[Any]]

    def heard(self, kind: str) -> list[list[Any]]:
        """Return the words of one kind, in order."""
        return [words for first, *words in self.said if first == kind]

    @property
    def durable(self) -> int:
        """The last step whose append returned."""
        return max((step for (step,) in self.heard("durable")), default=0)


@attrs.frozen
class Called:
    """What a call of the command line left behind."""

    code: int
    out: str
    err: str


class WarmParent:
    """A process that has imported everything and forks engines."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def live(
        self,
        path: Path,
        *cut: Any,
        device: str = "fake",
        model: str = "source",
        resume: bool = False,
    ) -> Ended:
        """Let an engine live on a journal file until the cut, and return how it ended.

        With ``resume`` it asks for nothing and lets what is open go on.

        Cuts: ``never``; ``action k``, after k actions of the engine; ``before n``, ``durable n``,
        around the n-th append; ``statement n, operations``, inside SQLite; ``log n, bytes``, in the
        middle of writing its frame; ``checkpoint n, bytes``, after it, in a checkpoint; ``close
        bytes``, in the last one; ``create bytes``, while the file is made.
        """
        life = {"path": str(path), "cut": cut, "device": device, "model": model, "resume": resume}
        ended = self._ask(life)
        failures = ended.heard("failed")
        assert not failures, failures
        return ended

    def call(
        self,
        *arguments: object,
        folder: Path,
        disk: tuple[int, int] | None = None,
        nobody: bool = False,
    ) -> Called:
        """Call ``laneway`` in a fork of its own, from a folder where its output may be kept.

        ``disk`` (appends, bytes): after so many appends to the journal the disk has so little room.
        ``nobody``: without the rights of root.
        """
        out, err = folder / "stdout", folder / "stderr"
        for file in (out, err):
            file.touch()
            file.chmod(0o666)
        life = {"call": [*map(str, arguments)], "disk": disk, "nobody": nobody}
        with tempfile.TemporaryDirectory() as reached:
            # The checkout may lie where nobody else can go.
            Path(reached).chmod(0o755)
            library = shutil.copy(find_library(), reached)
            files = {"out": str(out), "err": str(err), "library": str(library)}
            ended = self._ask(life | files)
        assert not ended.said, ended.said
        return Called(ended.code, out.read_text(), err.read_text())

    def _ask(self, life: dict[str, Any]) -> Ended:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(life), file=self._process.stdin, flush=True)
        return Ended(**json.loads(self._process.stdout.readline()))


@contextmanager
def warm_parent() -> Iterator[WarmParent]:
    """Start the warm process; it ends with the block."""
    with subprocess.Popen(
        [sys.executable, "-m", "support.mortal"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        yield WarmParent(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0
