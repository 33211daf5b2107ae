"""What is decided: the pure core of laneway, and the loop that runs it.

``Engine`` serves requests on a device with every step in a journal; the other names are the values
it takes and gives.
"""

from laneway.engine.errors import (
    CapabilityError,
    ConfigurationError,
    DeadlineExpiredError,
    DeviceError,
    EngineClosedError,
    InternalError,
    JournalError,
    LanewayError,
    ModelError,
    RequestCancelledError,
    RequestError,
    RequestLostError,
    RequestRejectedError,
    UsageError,
)
from laneway.engine.limits import Limits
from laneway.engine.loop import Engine
from laneway.engine.request import Delta, Request, Result, Usage
from laneway.engine.sampling import Sampling
from laneway.engine.stream import Stream

__all__ = [
    "CapabilityError",
    "ConfigurationError",
    "DeadlineExpiredError",
    "Delta",
    "DeviceError",
    "Engine",
    "EngineClosedError",
    "InternalError",
    "JournalError",
    "LanewayError",
    "Limits",
    "ModelError",
    "Request",
    "RequestCancelledError",
    "RequestError",
    "RequestLostError",
    "RequestRejectedError",
    "Result",
    "Sampling",
    "Stream",
    "Usage",
    "UsageError",
]
