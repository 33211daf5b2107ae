"""One check of the isolation runner, in a process of its own.

The request is a file, the answer another: what a library prints does not get between. Whatever goes
wrong inside Python becomes a finding; what ends the process, the runner sees. A device that is not
known to be quiet is left alone on the way out (D13).

Source: R5.2.
"""

import os
import sys
from pathlib import Path

import attrs
import msgspec

from laneway.adapters.device import NpurtDevice
from laneway.adapters.discover import open_device
from laneway.adapters.exits import DEVICE, exit_code
from laneway.adapters.probe_checks import CHECKS
from laneway.adapters.probing import CheckFailed, Finding, Probed
from laneway.engine.capability import fingerprint_of
from laneway.engine.errors import CapabilityError, LanewayError

DESCRIBE = "describe"


class Request(msgspec.Struct):
    """What one process is to do; ``check`` is ``describe`` or the name of a check."""

    url: str
    calbin: str
    check: str
    seed: int


class FoundFingerprint(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a fingerprint, as they travel."""

    backend: str
    backend_version: str
    runtime: str
    driver: str
    firmware: str
    chip_mask: int
    calbin_sha256: str


class Found(msgspec.Struct, forbid_unknown_fields=True):
    """One finding, as it travels."""

    capability: str
    result: str
    value: int
    note: str


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """What came of it.

    ``refused`` says why the system could not be opened at all, ``exit_code`` whose fault that was.
    """

    refused: str
    exit_code: int
    fingerprint: FoundFingerprint | None
    findings: list[Found]
    says_no: list[str]


def main() -> None:
    """Do what the request says and leave the answer behind."""
    request_path, answer_path = map(Path, sys.argv[1:])
    request = msgspec.json.decode(request_path.read_bytes(), type=Request)
    try:
        device = _open(request.url)
    except LanewayError as error:
        refusal = Answer(str(error), exit_code(error), None, [], [])
        answer_path.write_bytes(msgspec.json.encode(refusal))
        raise SystemExit(DEVICE) from error
    answer, clean = _work(device, request)
    answer_path.write_bytes(msgspec.json.encode(answer))
    if not clean:
        os._exit(0)  # the device may still be at work in this process's memory: touch nothing
    device.stop()


def _open(url: str) -> NpurtDevice:
    """Open the device for this process alone. Raises: LanewayError."""
    device = open_device(url, exclusive=True)
    if not isinstance(device, NpurtDevice):
        raise CapabilityError(f"{url} is no npurt device: there is nothing to probe")
    return device


def _work(device: NpurtDevice, request: Request) -> tuple[Answer, bool]:
    """Run the check; return the answer, and whether the device is quiet again."""
    facts = device.describe()
    says_no = [row.name for row in facts.capabilities if row.support == "no"]
    answer = Answer("", 0, None, [], says_no)
    try:
        probed = Probed(device, Path(request.calbin))
    except (LanewayError, CheckFailed) as error:
        answer.refused, answer.exit_code = str(error), exit_code(error)
        return answer, True
    found = fingerprint_of(facts, probed.sha256)
    answer.fingerprint = FoundFingerprint(**attrs.asdict(found))
    if request.check == DESCRIBE:
        findings: list[Finding] = []
        reason = ""
    else:
        findings, reason = _check(probed, request)
    clean, left = _clean_up(probed)
    reason = reason or left
    if reason:
        findings = [Finding(name, "failed", 0, reason) for name in _names(request.check)]
    answer.findings = [Found(**attrs.asdict(finding)) for finding in findings]
    return answer, clean


def _names(check: str) -> tuple[str, ...]:
    return CHECKS[check][1] if check in CHECKS else ()


def _check(probed: Probed, request: Request) -> tuple[list[Finding], str]:
    """Return what the check found, or why it failed."""
    try:
        return list(CHECKS[request.check][0](probed, request.seed)), ""
    except CheckFailed as verdict:
        return [], str(verdict)
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"


def _clean_up(probed: Probed) -> tuple[bool, str]:
    """Drain and close; return whether the device is quiet, and what is wrong with it."""
    try:
        probed.finish_all()
    except (CheckFailed, LanewayError) as error:
        return False, f"it cannot be drained: {error}"
    try:
        probed.close()
    except (CheckFailed, LanewayError) as error:
        return True, str(error)
    return True, ""


if __name__ == "__main__":
    main()
