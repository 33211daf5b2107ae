"""Open a device of any npurt library by path: ``npurt:/path/lib.so?key=value&…``.

Keys: ``index`` (which device of the library), ``chips`` (mask, 0 for all present), ``exclusive``
(0 or 1), ``config`` (a file with the library's own lines of ``key = value``) and ``samplers`` (how
many threads share the rows of a job that is done).

Source: R1.1.
"""

from laneway.adapters.device import NpurtDevice, open_calls
from laneway.adapters.files import read_named_text
from laneway.adapters.library import open_library
from laneway.adapters.sampling_threads import THREADS_MAX
from laneway.adapters.simulated import SimulatorControls
from laneway.adapters.urls import parse_rest, read_number
from laneway.adapters.validating import ArtifactOptions
from laneway.engine.errors import ConfigurationError

KEYS = ("index", "chips", "exclusive", "config", "samplers")
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
    index = read_number(values, "index", default=0, most=255, scheme="npurt")
    chips = read_number(values, "chips", default=0, most=255, scheme="npurt")
    alone = read_number(values, "exclusive", default=0, most=1, scheme="npurt")
    samplers = read_number(values, "samplers", default=1, least=1, most=THREADS_MAX, scheme="npurt")
    calls = open_calls(
        open_library(path or library),
        config=_read_config(values.get("config")),
        index=index,
        chip_mask=chips,
        exclusive=exclusive or bool(alone),
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
            samplers=samplers,
        )
    except BaseException:
        calls.attempt("npurt_device_close")
        raise


def _read_config(path: str | None) -> str:
    if path is None:
        return ""
    return read_named_text(path, bytes_max=CONFIG_BYTES_MAX, what="npurt: config")
