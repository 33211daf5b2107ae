"""Open a device of any npurt library by path: ``npurt:/path/lib.so?key=value&…``.

Keys: ``index`` (which device of the library), ``chips`` (mask, 0 for all present), ``exclusive``
(0 or 1) and ``config`` (a file with the library's own lines of ``key = value``).

Source: R1.1.
"""

from laneway.adapters.device import NpurtDevice, open_calls
from laneway.adapters.files import read_named_text
from laneway.adapters.library import open_library
from laneway.adapters.simulated import SimulatorControls
from laneway.adapters.urls import parse_rest
from laneway.adapters.validating import ArtifactOptions
from laneway.engine.errors import ConfigurationError

KEYS = ("index", "chips", "exclusive", "config")
CONFIG_BYTES_MAX = 1 << 20


def open_device(
    rest: str,
    *,
    library: str | None = None,
    options: ArtifactOptions | None = None,
    exclusive: bool = False,
) -> NpurtDevice:
    """Open a device by the rest of its URL; without a path the library is looked up.

    Raises: ConfigurationError, AbiMismatchError, DeviceRefusedError.
    """
    path, values = parse_rest(rest, known=KEYS, scheme="npurt")
    if path and library is not None and path != library:
        raise ConfigurationError(f"npurt: two libraries are named, {path} and {library}")
    index = _number(values, "index", most=255)
    calls = open_calls(
        open_library(path or library),
        config=_read_config(values.get("config")),
        index=index,
        chip_mask=_number(values, "chips", most=255),
        exclusive=exclusive or bool(_number(values, "exclusive", most=1)),
    )
    controls = SimulatorControls(calls) if calls.library.simulates else None
    try:
        return NpurtDevice(
            calls,
            url=f"npurt:{rest}",
            index=index,
            simulator=controls,
            stepped=controls is not None and controls.stepped,
            options=options,
        )
    except BaseException:
        calls.attempt("npurt_device_close")
        raise


def _number(values: dict[str, str], key: str, *, most: int) -> int:
    text = values.get(key, "0")
    try:
        number = int(text, 0)
    except ValueError:
        number = -1
    if not 0 <= number <= most:
        raise ConfigurationError(f"npurt: option {key}={text}: 0 to {most} is wanted")
    return number


def _read_config(path: str | None) -> str:
    if path is None:
        return ""
    return read_named_text(path, bytes_max=CONFIG_BYTES_MAX, what="npurt: config")
