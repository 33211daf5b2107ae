"""Put another build of the journal's extension in the place of the installed one.

A plugin of pytest (``-p support.text_library``), so that it comes before every import of the
package: ``LANEWAY_TEXT_LIBRARY`` names the file, such as a build under sanitizers.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

NAME = "laneway.journal._text"


def load(path: Path) -> ModuleType:
    """Return a module of its own from a built file. Raises: ImportError."""
    spec = importlib.util.spec_from_file_location(NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if "LANEWAY_TEXT_LIBRARY" in os.environ:
    sys.modules[NAME] = load(Path(os.environ["LANEWAY_TEXT_LIBRARY"]))
