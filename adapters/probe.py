"""The isolation runner: find out what a device can really do, and write it down (R5.2).

Theory of operation. Every check runs in a process of its own that opens the device exclusively,
configures the calbin, drives it call by call (probing.py), drains it, gives everything back and
looks whether the device is as it was. A process that crashes, hangs or answers nonsense is a failed
check with the reason, and never takes the runner with it. The first process only describes the
system: its fingerprint stands in every record, and a check that saw another one has failed.

What passed and what failed becomes a record; what there was nothing to check of, or what the device
says no to, does not.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import msgspec

from laneway.adapters.calbin import prepare
from laneway.adapters.exits import USAGE, one_line
from laneway.adapters.probe_checks import CHECKS
from laneway.adapters.probe_child import DESCRIBE, Answer, Request
from laneway.adapters.probing import Finding
from laneway.engine.errors import ConfigurationError, DeviceRefusedError, UsageError
from laneway.engine.evidence import RESULTS, Fingerprint, VerificationRecord

CHECK_TIMEOUT_S = 180.0
DESCRIBE_TIMEOUT_S = 180.0
NOTE_MAX = 1000
_ANSWER_BYTES_MAX = 1 << 20
_STDERR_BYTES = 2000


@attrs.frozen(kw_only=True)
class Checked:
    """What one check said of one capability."""

    test: str
    finding: Finding


@attrs.frozen(kw_only=True)
class Report:
    """What all checks found on one system."""

    fingerprint: Fingerprint
    seed: int
    checked: tuple[Checked, ...]

    @property
    def failed(self) -> bool:
        """Whether any check failed."""
        return any(each.finding.result == "failed" for each in self.checked)

    def records(self) -> tuple[VerificationRecord, ...]:
        """Return the record of each capability that was found to be so or not."""
        return tuple(
            VerificationRecord(
                capability=each.finding.capability,
                result=each.finding.result,
                value=each.finding.value,
                test=each.test,
                seed=self.seed,
                note=each.finding.note,
                fingerprint=self.fingerprint,
            )
            for each in self.checked
            if each.finding.result in RESULTS
        )


def probe(
    url: str,
    model: str | os.PathLike[str],
    *,
    seed: int = 1,
    checks: Sequence[str] = tuple(CHECKS),
    timeout_s: float = CHECK_TIMEOUT_S,
    tell: Callable[[str], None] = lambda name: None,
) -> Report:
    """Run checks on a device with a model; ``tell`` hears the name of each before it begins.

    Raises: UsageError for an unknown check or device; ModelError; DeviceRefusedError where the
    system cannot even be described.
    """
    unknown = [name for name in checks if name not in CHECKS]
    if unknown:
        raise UsageError(f"no check is called {unknown[0]!r}; known are {', '.join(CHECKS)}")
    with prepare(model) as folder, tempfile.TemporaryDirectory(prefix="laneway-probe-") as place:

        def ask(check: str) -> Answer | str:
            request = Request(url=url, calbin=str(folder), check=check, seed=seed)
            within_s = DESCRIBE_TIMEOUT_S if check == DESCRIBE else timeout_s
            return _ask(request, Path(place), within_s)

        described = _describe(ask(DESCRIBE), url)
        checked: list[Checked] = []
        for name in checks:
            tell(name)
            findings = _take(ask(name), name, described)
            checked += (Checked(test=name, finding=finding) for finding in findings)
    assert described.fingerprint is not None
    fingerprint = Fingerprint(**msgspec.structs.asdict(described.fingerprint))
    return Report(fingerprint=fingerprint, seed=seed, checked=tuple(checked))


def _describe(answer: Answer | str, url: str) -> Answer:
    """Return what the first process said. Raises: ConfigurationError, DeviceRefusedError."""
    if isinstance(answer, str):
        raise DeviceRefusedError(f"{url} cannot be probed: {answer}")
    if answer.exit_code == USAGE:
        raise ConfigurationError(f"{url} cannot be probed: {answer.refused}")
    if answer.refused or answer.fingerprint is None:
        raise DeviceRefusedError(f"{url} cannot be probed: {answer.refused or 'no fingerprint'}")
    return answer


def _take(answer: Answer | str, check: str, described: Answer) -> Iterator[Finding]:
    """Return the findings of a check, one for each capability it speaks about."""
    names = CHECKS[check][1]
    reason = answer if isinstance(answer, str) else answer.refused
    if not isinstance(answer, str) and not reason and answer.fingerprint != described.fingerprint:
        reason = "the system changed between two checks"
    found = {} if isinstance(answer, str) else {each.capability: each for each in answer.findings}
    for name in names:
        if name in described.says_no:
            yield Finding.skip(name, "the device says no to it")
        elif reason or name not in found:
            words = one_line(reason or "the check said nothing of it")[:NOTE_MAX]
            yield Finding(name, "failed", 0, words)
        else:
            told = found[name]
            yield Finding(name, told.result, told.value, one_line(told.note)[:NOTE_MAX])


# ---------------------------------------------------------------------------- one process


def _ask(request: Request, place: Path, timeout_s: float) -> Answer | str:
    """Run one process; return its answer, or why there is none."""
    files = {name: place / f"{request.check}.{name}" for name in ("request", "answer", "stderr")}
    files["request"].write_bytes(msgspec.json.encode(request))
    command = [sys.executable, "-m", "laneway.adapters.probe_child"]
    with files["stderr"].open("wb") as stderr:
        process = subprocess.Popen(
            [*command, str(files["request"]), str(files["answer"])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"no answer within {timeout_s:g} s: its process was ended"
        finally:
            _end(process)
    answer = _read_answer(files["answer"])
    if code == 0 and answer is not None:
        return answer
    if answer is not None and answer.refused:
        return answer
    return f"its process {_describe_end(code)}{_last_words(files['stderr'])}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started, if it is still there."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_answer(path: Path) -> Answer | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_ANSWER_BYTES_MAX), type=Answer)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} and no answer"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}"


def _last_words(path: Path) -> str:
    """Return the last line that a process said on stderr."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _STDERR_BYTES))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""
