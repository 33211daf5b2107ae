"""The tests of a device on a library that is not the simulator: ``pytest --device npurt:…``.

The library is the simulated board under another name, without the simulator's own entries
(``support/plain_library.py``); the run is a process of its own, as somebody with a board starts it.

Source: R1.1, R18.5, E31.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.plain_library import plain_library

from laneway.adapters.binding import load_library
from laneway.adapters.discover import open_device
from laneway.adapters.npurt import STRUCTS
from laneway.engine.errors import CapabilityError

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
RUNS = "tests/model/test_any_device.py::test_any_order_of_what_may_happen"
PATIENCE_S = 900


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The library by URL; a mistake of the host ends the process."""
    config = tmp_path / "config"
    config.write_text("strict = 1\nchecks = all\n")
    return f"npurt:{plain_library()}?config={config}"


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own, without the options of this one."""
    environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_it_is_a_library_of_its_own() -> None:
    library = load_library(plain_library())
    assert not library.simulates
    assert library.info.backend_name == b"plainboard"
    assert library.info.size_count == len(STRUCTS)
    with pytest.raises(CapabilityError, match="is not the simulator: open it as npurt:"):
        open_device("sim:tiny", library=str(plain_library()))


def test_what_it_says_is_not_taken_for_the_simulators_word(url: str) -> None:
    device = open_device(url)
    facts = device.describe()
    device.stop()
    assert (facts.backend, facts.backend_kind, facts.product) == (
        "plainboard",
        "unknown",
        "plainboard",
    )
    assert {(row.evidence, row.source) for row in facts.capabilities} == {("C2", "vendor document")}
    assert facts.proven == ()


def test_the_tests_of_a_device_run_on_it(url: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    runs = [f"{RUNS}[{seed}]" for seed in (0, 3)]
    ended = run_pytest("--device", url, "--results", str(results), *runs)
    said = ended.stdout
    assert ended.returncode == 0, said + ended.stderr
    assert "2 passed" in said
    assert "verify: ok" in said
    assert "left out: tests/model/test_any_device.py: let_time_pass, change_faults need" in said
    told = json.loads((results / "device.json").read_text())
    assert told["backend"] == "plainboard"
    assert len(told["capabilities"]) == 33
    assert len(list((results / "journals").glob("run-*.db"))) == 2


def test_a_device_serves_one_process(url: str) -> None:
    ended = run_pytest("--device", url, "-n", "2", "tests/model")
    assert ended.returncode == 4
    assert "one device serves one process, leave out -n" in ended.stderr
