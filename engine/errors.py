"""Say who is at fault, whether the engine still runs, and what to do next.

The tree; each class is documented below::

    LanewayError
    ├── UsageError
    │   ├── ConfigurationError        (also ValueError)
    │   └── EngineClosedError
    ├── RequestError
    │   ├── RequestRejectedError
    │   ├── RequestCancelledError
    │   ├── DeadlineExpiredError
    │   └── RequestLostError
    ├── ModelError
    ├── CapabilityError
    ├── DeviceError
    │   ├── DeviceRefusedError
    │   ├── DeviceFaultError
    │   ├── DeviceLostError
    │   └── AbiMismatchError
    ├── JournalError
    │   ├── JournalWriteError
    │   ├── JournalFormatError
    │   └── ReplayDivergedError
    └── InternalError
        ├── IllegalTransitionError
        └── InvariantError

The core raises only ``InternalError``. Operating errors are values inside it (a reject reason, a
fault record) until the shell turns them into a ``RequestError`` for one caller.
"""


class LanewayError(Exception):
    """Base of every error of this package; never raised itself."""


class UsageError(LanewayError):
    """The caller's mistake; the engine is untouched: correct the call."""


class ConfigurationError(UsageError, ValueError):
    """A limit, a name or an option is wrong, or an extra is not installed.

    The message says which.
    """


class EngineClosedError(UsageError):
    """The engine was closed or has stopped: make a new one."""


class RequestError(LanewayError):
    """One request cannot be served; the engine is well and other requests go on."""

    def __init__(self, message: str, *, request: int | None = None) -> None:
        super().__init__(message)
        self.request = request


class RequestRejectedError(RequestError):
    """Admission refused the request.

    Correct it (4xx) or come back after ``retry_after_s`` (429, 503).
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        http_status: int,
        retry_after_s: float | None = None,
        request: int | None = None,
    ) -> None:
        super().__init__(message, request=request)
        self.reason = reason
        self.http_status = http_status
        self.retry_after_s = retry_after_s


class RequestCancelledError(RequestError):
    """The caller cancelled the request.

    What it held is given back when the device is done with it.
    """


class DeadlineExpiredError(RequestError):
    """The request's own deadline passed: ask for less, or give it more time."""


class RequestLostError(RequestError):
    """The request's generation or lane went away, and it could not go on: send it again."""


class ModelError(LanewayError):
    """A model could not be loaded or used.

    The artifact or its fit to the device is at fault, the engine is well.
    """


class CapabilityError(LanewayError):
    """The device may not be asked for this.

    The message names the missing evidence or deliverable.
    """


class DeviceError(LanewayError):
    """The device or its runtime is at fault; the message names code, ticket and step."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class DeviceRefusedError(DeviceError):
    """A submit, configure or open was refused and nothing was queued."""


class DeviceFaultError(DeviceError):
    """A CCU exception, a DMA error or a hang: see ``laneway journal show``."""


class DeviceLostError(DeviceError):
    """The device is out of use for this engine: close it and open the device again."""


class RestartNeededError(DeviceLostError):
    """Only a new process can bring the device back: start again, on the same journal."""


class AbiMismatchError(DeviceError):
    """The library speaks another ABI or lays out its structs differently.

    Rebuild it against this npurt.h.
    """


class JournalError(LanewayError):
    """The journal cannot be used."""


class JournalWriteError(JournalError):
    """A step could not be made durable; the engine has stopped before any effect of it began."""


class JournalFormatError(JournalError):
    """The file is damaged, of another version, or not a journal; the message names the step."""


class ReplayDivergedError(JournalError):
    """Today's code decides something else than what is recorded."""

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class InternalError(LanewayError):
    """A bug in laneway.

    The engine has stopped and its journal is kept: please report it with the journal.
    """


class IllegalTransitionError(InternalError):
    """A decision or a journal asked for a transition that its machine does not have."""

    def __init__(self, machine: str, state: str, trigger: str, entities: str = "") -> None:
        named = f" of {entities}" if entities else ""
        super().__init__(f"{machine}{named}: no transition {trigger!r} from state {state!r}")
        self.machine = machine
        self.state = state
        self.trigger = trigger


class InvariantError(InternalError):
    """An invariant of engine/invariants.py or engine/watch.py does not hold."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"invariant {name}: {message}")
        self.name = name
