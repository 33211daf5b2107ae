"""Read what a device says of itself into the engine's values.

Source: decision 16 (the whole of a fault is in the inputs), E24, E27.
"""

import ctypes
import struct
from collections.abc import Iterator

import attrs

from laneway.adapters import npurt
from laneway.adapters.calls import DeviceCalls
from laneway.engine.evidence import EVIDENCE, SIMULATED, SOURCES, SUPPORT, Capability
from laneway.engine.inputs import CcuRecord, ChipFacts, DeviceFacts, HealthFacts, JobTimes
from laneway.statemachines.values import quick

_CAPS_MAX = 256
_TELLS_THROTTLE = 1 << 4
"""The bit of an answer about health that says that its fifth array means something."""

_SIMULATED = 9

_COUNTER_NAMES = (
    *("submitted", "pending", "running", "finished", "left", "failed", "aborted", "late"),
    *("inflight", "ccu_exceptions", "resets"),
    *("h2d_bytes", "d2h_bytes", "d2d_bytes", "d2d_ns", "busy_ns"),
)
_TIME_NAMES = (
    *("submit", "accept", "h2d_begin", "h2d_end", "exec_begin", "exec_end"),
    *("d2h_begin", "d2h_end", "visible"),
)
_TIME_FIELDS = tuple(f"{name}_ns" for name in _TIME_NAMES)
_ALL_TOLD = (1 << len(_TIME_NAMES)) - 1
_TIMES = struct.Struct(f"@4xI{len(_TIME_NAMES)}Q")
"""npurt_times up to its last instant: which are valid, then all in order. Why: ctypes takes
several times as long field by field."""

_make_times = quick(JobTimes)


@attrs.frozen
class Described:
    """The description and the chips of an opened device."""

    facts: DeviceFacts
    chip_indices: tuple[int, ...]


def read_device(
    calls: DeviceCalls, *, url: str, index: int, proven: tuple[str, ...] = ()
) -> Described:
    """Read versions, chips and capabilities of an opened device.

    ``proven``: what a simulator carries records of (G22). Raises: DeviceError.
    """
    desc = _describe(calls, index)
    health = npurt.Health()
    calls.call("npurt_device_health", ctypes.byref(health))
    chips = tuple(chip for chip in range(npurt.MAX_CHIPS) if desc.chip_present_mask & (1 << chip))
    capabilities = tuple(_read_capabilities(calls))
    info = calls.library.info
    versions = _versions(desc)
    kind = npurt.BACKENDS.get(info.backend_kind, "unknown")
    facts = DeviceFacts(
        url=url,
        backend=_text(info.backend_name) or kind,
        product=_text(desc.product),
        serial=_text(desc.serial),
        runtime_version=versions[0],
        driver_version=versions[1],
        firmware_version=versions[2],
        device_epoch=health.device_epoch,
        inflight_max=_inflight_max(capabilities),
        chips=read_chips(calls, chips),
        capabilities=capabilities,
        counters=read_counters(calls),
        backend_kind=kind,
        backend_version=_text(info.backend_version),
        chip_mask=desc.chip_present_mask,
        proven=proven,
    )
    return Described(facts, chips)


def read_versions(calls: DeviceCalls, index: int) -> tuple[str, str, str]:
    """Read the versions of runtime, driver and firmware as they are now. Raises: DeviceError."""
    return _versions(_describe(calls, index))


def _describe(calls: DeviceCalls, index: int) -> npurt.DeviceDesc:
    desc = npurt.DeviceDesc()
    if calls.library.has("npurt_sim_describe"):
        # The index names the simulated board that was opened last, which may be another one.
        calls.call("npurt_sim_describe", ctypes.byref(desc))
    else:
        calls.library.call("npurt_device_describe", index, ctypes.byref(desc))
    return desc


def _versions(desc: npurt.DeviceDesc) -> tuple[str, str, str]:
    return (
        _version(desc, 0, desc.runtime_version),
        _version(desc, 1, desc.driver_version),
        _version(desc, 2, desc.firmware_version),
    )


def read_chips(calls: DeviceCalls, chips: tuple[int, ...]) -> tuple[ChipFacts, ...]:
    """Read total and used bytes of each chip. Raises: DeviceError."""
    facts = []
    for chip in chips:
        memory = npurt.Memory()
        calls.call("npurt_device_memory", chip, ctypes.byref(memory), about=f"chip {chip}")
        facts.append(ChipFacts(total_bytes=memory.total, used_bytes=memory.used))
    return tuple(facts)


def read_health(calls: DeviceCalls, chips: tuple[int, ...]) -> HealthFacts:
    """Read health, memory and counters as they are now. Raises: DeviceError."""
    return read_health_and_heat(calls, chips)[0]


def read_health_and_heat(
    calls: DeviceCalls, chips: tuple[int, ...]
) -> tuple[HealthFacts, tuple[int, ...]]:
    """Read health, memory and counters, and which chips run slower now because of their heat.

    Raises: DeviceError.
    """
    health = npurt.Health()
    calls.call("npurt_device_health", ctypes.byref(health))
    told = health.valid_mask & _TELLS_THROTTLE
    hot = tuple(chip for chip in chips if told and health.throttle[chip])
    return _health_facts(calls, health, chips), hot


def _health_facts(calls: DeviceCalls, health: npurt.Health, chips: tuple[int, ...]) -> HealthFacts:
    return HealthFacts(
        state=npurt.HEALTH_STATES.get(health.state, "unknown"),
        device_epoch=health.device_epoch,
        sticky=health.sticky,
        advised=health.advised,
        observed_ns=health.observed_ns,
        last_progress_ns=health.last_progress_ns,
        used_bytes=tuple(chip.used_bytes for chip in read_chips(calls, chips)),
        counters=read_counters(calls),
    )


def read_counters(calls: DeviceCalls) -> tuple[tuple[str, int], ...]:
    """Read those counters that the device says are valid. Raises: DeviceError."""
    counters = npurt.Counters()
    calls.call("npurt_device_counters", ctypes.byref(counters))
    return tuple(_name_counters(counters))


def read_times(times: npurt.Times, *, postprocess_ns: int = 0) -> JobTimes:
    """Take the instants that the device tells; 0 for the others."""
    valid, *instants = _TIMES.unpack_from(times)
    if valid & _ALL_TOLD != _ALL_TOLD:
        instants = [at if valid & (1 << bit) else 0 for bit, at in enumerate(instants)]
    told = dict(zip(_TIME_FIELDS, instants, strict=True))
    return _make_times(**told, postprocess_ns=postprocess_ns)


def read_record(record: npurt.CcuException) -> CcuRecord | None:
    """Take the exception record, or None where the device gave none."""
    if not record.valid:
        return None
    return CcuRecord(
        chip=record.chip,
        ccu=record.ccu,
        code=record.code,
        subcode=record.subcode,
        task_index=record.task_index,
        cmd_index=record.cmd_index,
        pc=record.pc,
        text=_text(record.text),
    )


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _version(desc: npurt.DeviceDesc, bit: int, raw: bytes) -> str:
    return _text(raw) if desc.version_valid & (1 << bit) else "unknown"


def lost_capabilities(calls: DeviceCalls, known: tuple[Capability, ...]) -> tuple[str, ...]:
    """Return which of the known capabilities a device does not have any more, or has less of.

    Raises: DeviceError.
    """
    now = {one.name: one for one in _read_capabilities(calls)}
    return tuple(
        was.name
        for was in known
        if was.supported
        and (was.name not in now or not now[was.name].supported or now[was.name].value < was.value)
    )


def _read_capabilities(calls: DeviceCalls) -> Iterator[Capability]:
    caps = (npurt.Cap * _CAPS_MAX)()
    for cap in caps:
        cap.h.struct_size = ctypes.sizeof(npurt.Cap)
    count = ctypes.c_uint32(_CAPS_MAX)
    calls.call("npurt_device_caps", caps, ctypes.sizeof(npurt.Cap), ctypes.byref(count))
    for cap in caps[: min(count.value, _CAPS_MAX)]:
        yield read_capability(cap)


def read_capability(cap: npurt.Cap) -> Capability:
    """Take one row of the table; a number that the ABI does not know is no evidence for anything.

    Why C3 then: the least that turns on only by the vendor's word and a record.
    """
    known = 1 <= cap.id <= len(npurt.CAPABILITIES)
    levels = {_SIMULATED: SIMULATED, **dict(enumerate(EVIDENCE[:5]))}
    understood = cap.evidence in levels and cap.support < len(SUPPORT)
    return Capability(
        name=npurt.CAPABILITIES[cap.id - 1] if known else f"CAPABILITY_{cap.id}",
        support=SUPPORT[cap.support] if understood else "unknown",
        evidence=levels[cap.evidence] if understood else "C3",
        source=SOURCES[cap.source] if cap.source < len(SOURCES) else "unknown",
        value=cap.value,
        scope=_text(cap.scope),
        note=_text(cap.note),
    )


def _inflight_max(capabilities: tuple[Capability, ...]) -> int:
    """Take the value of IN_FLIGHT; 1 where the device does not say (E11)."""
    values = [row.value for row in capabilities if row.name == "IN_FLIGHT" and row.supported]
    return max(values, default=1)


def _name_counters(counters: npurt.Counters) -> Iterator[tuple[str, int]]:
    for bit, name in enumerate(_COUNTER_NAMES):
        if not counters.valid_mask & (1 << bit):
            continue
        value = getattr(counters, name)
        if isinstance(value, int):
            yield name, value
        else:
            yield from ((f"{name}_{index}", each) for index, each in enumerate(value))
