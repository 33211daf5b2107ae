"""Find the npurt library to open: what the caller names, then the environment, then our own."""

import importlib.resources
import os
from collections.abc import Mapping
from pathlib import Path

from laneway.adapters.binding import Library, load_library
from laneway.adapters.files import is_file
from laneway.engine.errors import ConfigurationError

VARIABLE = "LANEWAY_NPURT"
BUILT_NAME = "_calsim.abi3.so"


def find_library(
    explicit: str | None = None, *, environment: Mapping[str, str] | None = None
) -> Path:
    """Return the path of the library to load.

    Raises: ConfigurationError naming the three places if there is none, or nobody may look there.
    """
    named = os.environ if environment is None else environment
    built = Path(str(importlib.resources.files("laneway.adapters"))) / BUILT_NAME
    places = (
        ("named by the caller", explicit),
        (f"named by {VARIABLE}", named.get(VARIABLE)),
        ("the built simulator", str(built)),
    )
    # What somebody named is taken or refused; it is never silently replaced by the next place.
    first = next(place for _, place in places if place)
    if is_file(first, what="the library"):
        return Path(first)
    looked = "; ".join(f"{how}: {place or 'not set'}" for how, place in places)
    raise ConfigurationError(
        f"no npurt library found ({looked}). Was laneway installed without a C compiler?"
        f" Install one and reinstall, or build adapters/native and set {VARIABLE}."
    )


def open_library(explicit: str | None = None) -> Library:
    """Find and load a library. Raises: ConfigurationError, AbiMismatchError."""
    return load_library(find_library(explicit))
