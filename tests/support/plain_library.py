"""A second npurt library: the simulated board built as if it were somebody's runtime.

Another name and kind, evidence as a vendor gives it, time that runs by itself, and none of the
simulator's own entries; so what needs those shows. The C compiler is wanted, not wished for: where
it is missing the tests fail.
"""

import functools
import subprocess
import tempfile
from pathlib import Path

NATIVE = Path(__file__).parents[2] / "adapters" / "native"
FLAGS = "-O0 -DCALSIM_PLAIN"
_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def plain_library() -> Path:
    """Compile it once for this process and return its path.

    Why without optimising: it computes little, and is compiled three times as fast.
    """
    _KEPT.append(tempfile.TemporaryDirectory(prefix="laneway-plain-"))
    folder = _KEPT[-1].name
    made = subprocess.run(
        ["make", "-s", "-C", str(NATIVE), "plain", f"FOLDER={folder}", f"FLAGS={FLAGS}"],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, f"the second library cannot be built: {made.stderr}"
    return Path(folder) / "libplain.so"
