"""What acts: devices, and the programs that drive the engine.

``open_device`` opens a device by URL; ``list_devices`` says which names there are.
"""

from laneway.adapters.discover import ListedDevice, list_devices, open_device

__all__ = ["ListedDevice", "list_devices", "open_device"]
