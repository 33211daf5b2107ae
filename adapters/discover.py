"""Find devices by name: entry points of the group ``laneway.devices``, and the two built-in ones.

Each entry point is loaded by itself and only when it is asked for, so a broken one of somebody else
is listed with its error and the others work. The built-in names resolve also where the package was
not installed and so has no entry points.

Source: R1.1.
"""

from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import attrs

from laneway.adapters.urls import split_url
from laneway.engine.errors import ConfigurationError, LanewayError
from laneway.engine.ports import DevicePort

GROUP = "laneway.devices"
BUILT_IN = {
    "sim": "laneway.adapters.simulator:open_device",
    "npurt": "laneway.adapters.board:open_device",
}


@attrs.frozen(kw_only=True)
class ListedDevice:
    """One name a device URL may begin with; ``error`` says why it cannot be used, or is empty."""

    name: str
    target: str
    distribution: str
    error: str


def open_device(url: str, **options: Any) -> DevicePort:
    """Open a device by URL: the part before the colon names it, its opener takes the rest.

    Raises: ConfigurationError for an unknown name or option; what the opener raises.
    """
    name, rest = split_url(url)
    device: DevicePort = _find_opener(name)(rest, **options)
    return device


def list_devices() -> tuple[ListedDevice, ...]:
    """Return every known name in order, broken ones with their error."""
    return tuple(_describe(point) for point in sorted(_points(), key=lambda point: point.name))


def _points() -> Iterable[EntryPoint]:
    """Return one entry point for each name; the built-in names are always ours."""
    points = {
        name: EntryPoint(name=name, value=target, group=GROUP) for name, target in BUILT_IN.items()
    }
    for point in entry_points(group=GROUP):
        if point.name not in BUILT_IN:
            points.setdefault(point.name, point)
    return points.values()


def _describe(point: EntryPoint) -> ListedDevice:
    error = ""
    try:
        point.load()
    except Exception as broken:
        error = f"{type(broken).__name__}: {broken}"
    distribution = "laneway" if point.name in BUILT_IN else getattr(point.dist, "name", "unknown")
    return ListedDevice(name=point.name, target=point.value, distribution=distribution, error=error)


def _find_opener(name: str) -> Callable[..., Any]:
    point = {point.name: point for point in _points()}.get(name)
    if point is None:
        known = ", ".join(sorted(point.name for point in _points()))
        raise ConfigurationError(f"no device is called {name!r}; known are {known}")
    try:
        opener: Callable[..., Any] = point.load()
    except LanewayError:
        raise
    except Exception as broken:
        raise ConfigurationError(
            f"device {name!r} ({point.value}) cannot be loaded: {type(broken).__name__}: {broken}"
        ) from broken
    return opener
