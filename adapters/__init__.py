"""What acts: devices, and the programs that drive the engine.

``open_device`` opens a device by URL; ``list_devices`` says which names there are; ``read_records``
reads what ``laneway probe`` found out about a device, for ``Engine(records=…)``.
"""

from laneway.adapters.discover import ListedDevice, list_devices, open_device
from laneway.adapters.records import read_records

__all__ = ["ListedDevice", "list_devices", "open_device", "read_records"]
