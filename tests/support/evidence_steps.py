"""Tables, records and fingerprints of systems that exist nowhere."""

from typing import Any

from laneway.engine.evidence import Capability, Fingerprint, VerificationRecord
from laneway.engine.inputs import ChipFacts, DeviceFacts

CALBIN, OTHER_CALBIN = "a" * 64, "b" * 64


def row(name: str, evidence: str, support: str = "yes", value: int = 1, **more: Any) -> Capability:
    source = more.pop("source", "simulated" if evidence == "SIM" else "device")
    return Capability(
        name=name, support=support, evidence=evidence, source=source, value=value, **more
    )


# What the shim of CalRT 0.7.6 says before anything was verified or answered by the vendor.
CALRT = (
    row("IN_FLIGHT", "C0"),
    *(row(name, "C1", "unknown", 0) for name in ("PING_PONG", "POLL_THREADSAFE", "COUNTERS")),
    row("CANCEL", "C3", "unknown", 0),
    row("BATCH_LANES", "C0"),
    row("LANE_RULE", "C3", "unknown", 0),
    row("INCREMENTAL_PREFILL", "C3", "unknown", 0),
    *(
        row(name, "C3", "unknown", 0)
        for name in ("MULTI_CONFIGURE", "JOB_MODEL_HANDLE", "MODEL_ISOLATION", "DEVICE_SELECT")
    ),
    row("MULTI_BOARD", "C4", "no", 0, scope="CalRT 0.7.6", note="an index is no evidence"),
    row("LAYOUTS", "C0", value=1 << 2),
)


def changed(table: tuple[Capability, ...], *rows: Capability) -> tuple[Capability, ...]:
    """Return a table with some rows replaced."""
    new = {each.name: each for each in rows}
    return tuple(new.pop(each.name, each) for each in table) + tuple(new.values())


def facts(table: tuple[Capability, ...] = CALRT, **more: Any) -> DeviceFacts:
    plain: dict[str, Any] = {
        "url": "npurt:x",
        "backend": "shim",
        "product": "p",
        "serial": "s",
        "runtime_version": "0.7.6",
        "driver_version": "1.0.0",
        "firmware_version": "2.0",
        "device_epoch": 1,
        "inflight_max": 2,
        "chips": (ChipFacts(total_bytes=1, used_bytes=0),),
        "capabilities": table,
        "backend_kind": "calrt",
        "backend_version": "5",
        "chip_mask": 3,
    }
    return DeviceFacts(**(plain | more))


def fingerprint(calbin: str = CALBIN, **more: Any) -> Fingerprint:
    plain: dict[str, Any] = {
        "backend": "calrt",
        "backend_version": "5",
        "runtime": "0.7.6",
        "driver": "1.0.0",
        "firmware": "2.0",
        "chip_mask": 3,
        "calbin_sha256": calbin,
    }
    return Fingerprint(**(plain | more))


def record(capability: str, value: int = 1, **more: Any) -> VerificationRecord:
    """Return a record, passed unless ``result`` says otherwise."""
    plain: dict[str, Any] = {
        "capability": capability,
        "result": "passed",
        "value": value,
        "test": "by-hand",
        "seed": 7,
        "note": "seen",
        "fingerprint": fingerprint(),
    }
    return VerificationRecord(**(plain | more))


PING_PONG = (
    record("PING_PONG", 2),
    record("COUNTERS"),
    record("POLL_THREADSAFE"),
    record("IN_FLIGHT", 2),
)
"""All that two jobs in flight need, for CALBIN."""
