"""The names that users import. A name that goes away or is renamed needs a line in CHANGELOG.md."""

import importlib

import pytest

PUBLIC = {
    "laneway.engine": [
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
    ],
    "laneway.journal": [
        "Journal",
        "MemoryJournal",
        "ReadableJournal",
        "SqlJournal",
        "copy",
        "open_journal",
    ],
    "laneway.adapters": ["ListedDevice", "list_devices", "open_device", "read_records"],
    "laneway.statemachines": [
        "Edge",
        "Event",
        "MACHINES",
        "Machine",
        "entity_name",
        "next_state",
    ],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_those_of_the_snapshot(module: str) -> None:
    assert sorted(importlib.import_module(module).__all__) == PUBLIC[module]


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_exists(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []
