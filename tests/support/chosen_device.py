"""The device that ``pytest --device URL`` names, and what of the tests it is left out of.

Without the option there is none, and the tests that are marked ``board`` run on the simulator.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest

from laneway.adapters.device import NpurtDevice
from laneway.adapters.discover import open_device
from laneway.adapters.validating import ArtifactOptions
from laneway.engine.limits import Limits
from laneway.journal import open_journal
from laneway.journal.replay import verify

LEVELS = {
    "ccu_resets_max": 1,
    "configuration_resets_max": 2,
    "device_resets_max": 4,
}
"""The level of a reset that each budget is for."""


@attrs.define
class Chosen:
    """A device by URL, the artifact for it (None: the tests' own), how far it may be reset."""

    url: str
    model: Path | None
    reset_level_max: int
    results: Path
    left_out: set[str] = attrs.Factory(set)
    kept: int = 0

    def open(self, **options: Any) -> NpurtDevice:
        """Open the device and write down what it says of itself."""
        device = open_device(self.url, **options)
        assert isinstance(device, NpurtDevice), f"{self.url} is no npurt library"
        self.results.mkdir(parents=True, exist_ok=True)
        told = attrs.asdict(device.describe())
        (self.results / "device.json").write_text(json.dumps(told, indent=1, default=list) + "\n")
        return device

    def limits(self, limits: Limits) -> Limits:
        """Take the budgets of resets away that this device may not have."""
        barred: dict[str, Any] = {
            name: 0 for name, level in LEVELS.items() if level > self.reset_level_max
        }
        return attrs.evolve(limits, **barred)

    def keep(self, journal: Path) -> None:
        """Keep the journal of a run among the results."""
        self.kept += 1
        (self.results / "journals").mkdir(parents=True, exist_ok=True)
        shutil.copy(journal, self.results / "journals" / f"run-{self.kept}.db")

    def verdict(self) -> list[str]:
        """Prove every journal that was kept; say that, and what was left out."""
        lines = [f"device {self.url}, results in {self.results}"]
        wrong, steps = 0, 0
        for file in sorted((self.results / "journals").glob("run-*.db")):
            with open_journal(file, read_only=True) as journal:
                report = verify(journal)
            steps += report.steps
            wrong += not report.ok
            if not report.ok:
                lines.append(f"{file.name}: step {report.step}: {report.reason}")
        answer = "ok" if self.kept and not wrong else "no"
        lines.append(f"{self.kept} journals, {steps} steps, verify: {answer}")
        return lines + [f"left out: {what}" for what in sorted(self.left_out)]


_CHOSEN: list[Chosen] = []


def choose(device: Chosen) -> None:
    """Take the device for the whole session."""
    _CHOSEN[:] = [device]


def chosen() -> Chosen | None:
    """Return the device of the session, if one was named."""
    return _CHOSEN[0] if _CHOSEN else None


def open_for_tests(url: str, *, options: ArtifactOptions | None = None) -> NpurtDevice:
    """Open the device of the session, or the one that a test wants where none was named."""
    named = chosen()
    if named is not None:
        return named.open(options=options)
    device = open_device(url, options=options)
    assert isinstance(device, NpurtDevice)
    return device


def need_simulator(device: NpurtDevice, what: str) -> None:
    """Leave a test out on a device without the simulator's own entries, and say so."""
    if device.simulator is None:
        pytest.skip(f"{what} needs the simulator")


def need_still_time(device: NpurtDevice) -> None:
    """Leave a test out on a device whose time runs by itself, and say so."""
    if not device.stepped:
        pytest.skip("time that stands still needs the simulator, with clock=manual")
