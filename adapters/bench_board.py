"""What the suites on a board share: a calbin packed for the purpose, and a device to ask."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from laneway.adapters.cli_run import demo_model
from laneway.adapters.device import NpurtDevice
from laneway.adapters.discover import open_device
from laneway.adapters.manifest import MANIFEST_NAME
from laneway.adapters.packing import pack
from laneway.adapters.probing import Probed
from laneway.engine.errors import CapabilityError

CONTEXT_TOKENS = 256
BATCHES = (1, 4, 8, 16)
LANES = 32


@contextmanager
def calbin(
    model: Path | None = None, *, batch: Sequence[int] = BATCHES, context: int = CONTEXT_TOKENS
) -> Iterator[Path]:
    """Give a calbin for the time of the block: a folder that is one, or one packed from a model.

    Raises: ModelError.
    """
    source = model if model is not None else demo_model()
    if (source / MANIFEST_NAME).is_file():
        yield source
        return
    with TemporaryDirectory(prefix="laneway-bench-") as folder:
        packed = Path(folder) / "calbin"
        pack(source, packed, batch=batch, lanes=LANES, context=context)
        yield packed


def open_npurt(url: str) -> NpurtDevice:
    """Open a device of the npurt ABI. Raises: CapabilityError for another one; DeviceError."""
    device = open_device(url)
    if not isinstance(device, NpurtDevice):
        device.stop()
        raise CapabilityError(f"{url} is no npurt device: it cannot be measured here")
    return device


@contextmanager
def probed(url: str, folder: Path) -> Iterator[Probed]:
    """Give a device with a calbin on it, to be asked job by job."""
    device = open_npurt(url)
    try:
        opened = Probed(device, folder)
        yield opened
        opened.finish_all()
        opened.close()
    finally:
        device.stop()
