"""Call the command line: in this process, which is fast, or as a program of its own."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
from support.native_board import ROOT

from laneway.adapters.cli import main

MODELS = ROOT / "models"
DEMO = MODELS / "demo-shakespeare"
PATIENCE_S = 120


@attrs.frozen
class Called:
    """What a call left behind."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The JSON objects on stdout, one a line."""
        return [json.loads(line, parse_constant=_refuse) for line in self.out.splitlines()]

    @property
    def row(self) -> dict[str, Any]:
        """The only JSON object on stdout."""
        (row,) = self.rows
        return row

    def done(self, code: int = 0) -> "Called":
        """Hold the call against an exit code; nothing was complained about."""
        assert (self.code, self.err) == (code, ""), self
        return self

    def refused(self, code: int, *words: str) -> "Called":
        """Hold the call against an exit code and one line on stderr that has these words."""
        assert self.code == code, self
        assert self.err.startswith("laneway: ") and self.err.endswith("\n"), self
        assert self.err.count("\n") == 1 and "Traceback" not in self.err, self
        for word in words:
            assert word in self.err, f"{word!r} is not in {self.err!r}"
        return self


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def laneway(*arguments: object) -> Called:
    """Call ``laneway`` with these arguments in this process."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["laneway", *map(str, arguments)]
    code: object = 0
    with mock.patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as left:
            code = left.code
    return Called(code if isinstance(code, int) else int(code is not None), *map(_text, (out, err)))


def laneway_program(*arguments: object, folder: Path) -> Called:
    """Call ``laneway`` as a program of its own, in a folder."""
    script = Path(sys.executable).with_name("laneway")
    program = [str(script)] if script.exists() else [sys.executable, "-m", "laneway.adapters.cli"]
    command = [*program, *map(str, arguments)]
    called = subprocess.run(
        command, capture_output=True, cwd=folder, timeout=PATIENCE_S, check=False
    )
    return Called(called.returncode, called.stdout.decode(), called.stderr.decode())


def _text(stream: io.StringIO) -> str:
    return stream.getvalue()
