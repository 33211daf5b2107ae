"""Decide which features of a device may be used, by evidence alone (R1.2, E31).

A feature needs capabilities, and each capability is held against one rule by its level:

* C0: on, unless its check failed here.
* C1, C2: on with a passed verification record of this very system.
* C3: on when the vendor delivered it (the device says yes), attests it (the word is from a vendor
  document) and a record of this system passed.
* C4: never on this version.
* SIM: on with a record of this simulator. Without a persona the simulator carries records of its
  own, for what its conformance tests prove (G22).

The last record for a capability and a system decides, so a failed check keeps a feature off until
it passes. One job in flight with one row needs nothing of all this (G19).
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import attrs

from laneway.engine.evidence import (
    ATTESTED,
    SIMULATED,
    SIMULATOR,
    Capability,
    Fingerprint,
    Grant,
    Granted,
    Refused,
    VerificationRecord,
)
from laneway.engine.inputs import DeviceFacts

INFLIGHT_MAX = 2
"""Two banks, ping and pong; more was never verified by anybody (R5.3)."""
CONFORMANCE = "conformance"
LANE_RULES = ("undefined", "length_zero", "mask_csr", "scratch_lane")
LAYOUTS = ("unknown", "single", "tp2", "ep2", "pp2", "tpep")
_SINGLE, _EXPERT, _PIPELINE = LAYOUTS.index("single"), LAYOUTS.index("ep2"), LAYOUTS.index("pp2")


@attrs.frozen
class Need:
    """A capability that a feature needs: at least ``least``, or with one bit of its value.

    ``by_record``: a record may raise the number above the device's own word.
    """

    capability: str
    least: int = 1
    bit: int | None = None
    by_record: bool = False

    def lack(self, value: int) -> str:
        """Return in which way a number is too small, or nothing."""
        if self.bit is not None:
            layout = LAYOUTS[self.bit]
            return "" if value >> self.bit & 1 else f"{self.capability} does not name {layout}"
        if value >= self.least:
            return ""
        return f"{self.capability} is {value}, {self.least} is needed"


@attrs.frozen(kw_only=True)
class Feature:
    """One thing that the engine does only where it is allowed.

    ``missing`` is the work without which it cannot be (R1.4). ``value`` names the capability whose
    number goes with the feature.
    """

    name: str
    title: str
    level: str
    needs: tuple[Need, ...]
    missing: str
    value: str = ""


_RESIDENT = (Need("MULTI_CONFIGURE"), Need("JOB_MODEL_HANDLE"), Need("MODEL_ISOLATION"))
_PARALLEL = "a partition by the compiler and scheduling by the runtime"

FEATURES: Mapping[str, Feature] = MappingProxyType(
    {
        feature.name: feature
        for feature in (
            Feature(
                name="single_job",
                title="one request at a time, two chiplets",
                level="C0",
                needs=(),
                missing="fixes for stability",
            ),
            Feature(
                name="two_in_flight",
                title="two jobs in flight by ping and pong",
                level="C1/C2",
                needs=(
                    Need("PING_PONG"),
                    Need("COUNTERS"),
                    Need("POLL_THREADSAFE"),
                    Need("IN_FLIGHT", least=2, by_record=True),
                ),
                missing="verification on this system",
                value="IN_FLIGHT",
            ),
            Feature(
                name="batch",
                title="batches of 4, 8 or 16",
                level="C3",
                needs=(Need("BATCH_LANES", least=2),),
                missing="a calbin that the vendor compiled for that batch",
                value="BATCH_LANES",
            ),
            Feature(
                name="partial_batch",
                title="batches with inactive lanes",
                level="C3",
                needs=(Need("BATCH_LANES", least=2), Need("LANE_RULE", least=2)),
                missing="the vendor's rule for inactive lanes",
                value="LANE_RULE",
            ),
            Feature(
                name="chunked_prefill",
                title="prompts in pieces",
                level="C3",
                needs=(Need("INCREMENTAL_PREFILL"),),
                missing="the vendor's word that pieces of a prompt equal the whole",
            ),
            Feature(
                name="cancel",
                title="cancelling a job on the device",
                level="C3",
                needs=(Need("CANCEL"),),
                missing="a call of the vendor that ends one job",
            ),
            Feature(
                name="single_chip",
                title="a small model on one chiplet",
                level="C3",
                needs=(Need("LAYOUTS", bit=_SINGLE),),
                missing="a calbin that the vendor compiled for one chiplet",
            ),
            Feature(
                name="model_per_chip",
                title="one small model on each chiplet",
                level="C3",
                needs=(
                    Need("LAYOUTS", bit=_SINGLE),
                    Need("CHIP_AFFINITY"),
                    Need("CHIP_RESET_DOMAIN"),
                    *_RESIDENT,
                ),
                missing="single-chiplet calbins and an API for affinity and isolation of chips",
            ),
            Feature(
                name="resident_models",
                title="several resident models",
                level="C3",
                needs=_RESIDENT,
                missing="a memory plan, namespaces and the vendor's confirmation",
            ),
            Feature(
                name="live_load",
                title="loading and unloading while serving",
                level="C2/C3",
                needs=(Need("CONFIGURE_BUSY"), Need("MEMORY_ACCOUNTING")),
                missing="the runtime's semantics of release and a proven recovery",
            ),
            Feature(
                name="several_boards",
                title="several boards in one process",
                level="C4 for CalRT 0.7.6, else C3",
                needs=(Need("MULTI_BOARD"),),
                missing="a new runtime or a layer above it",
            ),
            Feature(
                name="process_per_board",
                title="one process for each of several boards",
                level="C3",
                needs=(Need("DEVICE_SELECT"),),
                missing="the vendor's way to bind a process to a board",
            ),
            Feature(
                name="expert_parallel",
                title="experts split over chiplets",
                level="C3",
                needs=(Need("LAYOUTS", bit=_EXPERT),),
                missing=_PARALLEL,
            ),
            Feature(
                name="pipeline_parallel",
                title="layers split over chiplets",
                level="C3",
                needs=(Need("LAYOUTS", bit=_PIPELINE),),
                missing=_PARALLEL,
            ),
            Feature(
                name="engine_runtime",
                title="a higher-level runtime as backend",
                level="C3",
                needs=(Need("ENGINE_RUNTIME"),),
                missing="its SDK, ABI, artifacts and migration tests",
            ),
        )
    }
)


# ---------------------------------------------------------------------------- deciding


def decide_feature(
    table: Iterable[Capability],
    records: Sequence[VerificationRecord],
    fingerprint: Fingerprint,
    feature: str,
) -> Granted | Refused:
    """Return whether a feature may be used on the system of this fingerprint, and why not.

    Raises: KeyError for an unknown feature.
    """
    wanted = FEATURES[feature]
    rows = {capability.name: capability for capability in table}
    held: dict[str, _Held] = {}
    for need in wanted.needs:
        row = rows.get(need.capability) or _unheard_of(need.capability)
        answer = _hold(row, need, records, fingerprint)
        if isinstance(answer, _Lacking):
            return _refuse(wanted, row, answer)
        held[need.capability] = answer
    return Granted(
        feature=feature,
        value=held[wanted.value].value if wanted.value else 1,
        evidence=max((each.evidence for each in held.values()), default="C0"),
        by=", ".join(dict.fromkeys(each.by for each in held.values() if each.by)),
    )


@attrs.frozen
class _Held:
    """A need that is met."""

    value: int
    evidence: str
    by: str = ""


@attrs.frozen
class _Lacking:
    """A need that is not met."""

    kind: str
    words: str


def _unheard_of(name: str) -> Capability:
    """Return what a table without the row says: nothing is known, and nothing was delivered."""
    return Capability(name=name, support="unknown", evidence="C3", source="unknown", value=0)


def _hold(
    row: Capability,
    need: Need,
    records: Sequence[VerificationRecord],
    fingerprint: Fingerprint,
) -> _Held | _Lacking:
    """Hold one need against one row of the table and the records."""
    said = f" ({row.note})" if row.note else ""
    if row.evidence == "C4":
        version = row.scope or f"runtime {fingerprint.runtime}"
        return _Lacking("version", f"{version} does not support it: {row.name} is C4{said}")
    if row.support == "no":
        return _Lacking("device", f"the device says no to {row.name}{said}")
    if row.evidence == "C3" and not (row.supported and row.source == ATTESTED):
        lack = "without a statement of the vendor" if row.supported else "not delivered"
        return _Lacking("deliverable", f"{row.name} is C3 and {lack}{said}")
    if row.evidence == SIMULATED and fingerprint.backend != SIMULATOR:
        return _Lacking("record", f"{row.name} was only ever simulated{said}")
    if row.evidence == "C0" and not row.supported:
        return _Lacking("device", f"the device does not say yes to {row.name}{said}")
    record = _find_record(row.name, records, fingerprint)
    if isinstance(record, _Lacking) and record.kind == "failed":
        return record
    by_record = need.by_record or row.support == "unknown"
    short = need.lack(row.value)
    if short and not by_record:
        return _Lacking("deliverable", short)
    if row.evidence == "C0" and not short:
        return _Held(row.value, "C0")
    if isinstance(record, _Lacking):
        return record
    value = max(row.value, record.value) if by_record else row.value
    short = need.lack(value)
    if short:
        return _Lacking("record", short)
    level = "C2" if row.evidence == "C0" else row.evidence
    return _Held(value, level, record.test)


def _find_record(
    name: str, records: Sequence[VerificationRecord], fingerprint: Fingerprint
) -> VerificationRecord | _Lacking:
    """Return the passed record that counts, or why there is none."""
    about = [record for record in records if record.capability == name]
    if not about:
        return _Lacking("record", f"{name} has no verification record")
    matching = [record for record in about if record.fingerprint == fingerprint]
    if not matching:
        difference = about[-1].fingerprint.difference(fingerprint)
        return _Lacking("record", f"the record of {name} is of another system: {difference}")
    latest = matching[-1]
    if not latest.passed:
        return _Lacking("failed", f"{name} failed its check {latest.test}: {latest.note}")
    return latest


_REMEDY = MappingProxyType(
    {
        "record": "verify it with laneway probe DEVICE --record FILE and give --records FILE",
        "failed": "it stays off until the check passes",
    }
)


def _refuse(feature: Feature, row: Capability, lacking: _Lacking) -> Refused:
    remedy = _REMEDY.get(lacking.kind, f"missing is {feature.missing}")
    return Refused(
        feature=feature.name,
        capability=row.name,
        kind=lacking.kind,
        reason=f"{feature.title} ({feature.level}) is off: {lacking.words}; {remedy}",
    )


# ---------------------------------------------------------------------------- a device


def fingerprint_of(facts: DeviceFacts, calbin_sha256: str) -> Fingerprint:
    """Return the fingerprint of a device with a calbin, with the empty hash of one without."""
    return Fingerprint(
        backend=facts.backend_kind,
        backend_version=facts.backend_version,
        runtime=facts.runtime_version,
        driver=facts.driver_version,
        firmware=facts.firmware_version,
        chip_mask=facts.chip_mask,
        calbin_sha256=calbin_sha256,
    )


def decide_all(
    facts: DeviceFacts, records: Sequence[VerificationRecord], calbin_sha256: str = ""
) -> tuple[Granted | Refused, ...]:
    """Decide every feature of a device for a calbin, with the records it carries itself (G22)."""
    fingerprint = fingerprint_of(facts, calbin_sha256)
    known = (*_built_in(facts, fingerprint), *records)
    return tuple(
        decide_feature(facts.capabilities, known, fingerprint, feature) for feature in FEATURES
    )


def _built_in(facts: DeviceFacts, fingerprint: Fingerprint) -> tuple[VerificationRecord, ...]:
    """Return the records of what a simulator's own conformance tests prove, for any calbin."""
    if facts.backend_kind != SIMULATOR:
        return ()
    return tuple(
        VerificationRecord(
            capability=row.name,
            result="passed",
            value=row.value,
            test=CONFORMANCE,
            seed=0,
            note="",
            fingerprint=fingerprint,
        )
        for row in facts.capabilities
        if row.name in facts.proven and row.evidence == SIMULATED
    )


def grant(facts: DeviceFacts, records: Sequence[VerificationRecord] = ()) -> DeviceFacts:
    """Return the facts with what may be used: for any calbin, and for each that a record names.

    ``inflight_max`` and ``chunked_prefill`` become the most that any calbin may have.
    """
    named = {record.fingerprint.calbin_sha256 for record in records}
    of_this_device = [
        sha256
        for sha256 in sorted(named - {""})
        if any(record.fingerprint == fingerprint_of(facts, sha256) for record in records)
    ]
    grants = tuple(
        Grant(
            feature=decided.feature,
            calbin_sha256=sha256,
            value=decided.value,
            evidence=decided.evidence,
            by=decided.by,
        )
        for sha256 in ("", *of_this_device)
        for decided in decide_all(facts, records, sha256)
        if isinstance(decided, Granted)
    )
    granted = attrs.evolve(facts, grants=grants)
    calbins = ("", *of_this_device)
    return attrs.evolve(
        granted,
        inflight_max=max(inflight_max(granted, sha256) for sha256 in calbins),
        chunked_prefill=any(chunked_prefill(granted, sha256) for sha256 in calbins),
    )


# ---------------------------------------------------------------------------- asking


def find_grant(facts: DeviceFacts, feature: str, calbin_sha256: str) -> Grant | None:
    """Return what allows a feature with a calbin, or None.

    Why not a mixture: a calbin that records name was decided as a whole, and what failed for it is
    off although it holds for others.
    """
    considered = facts.granted.get(calbin_sha256) or facts.granted.get("") or {}
    return considered.get(feature)


def inflight_max(facts: DeviceFacts, calbin_sha256: str) -> int:
    """Return how many jobs may be in flight with a calbin: 2 only where verified (E11, R5.3)."""
    found = find_grant(facts, "two_in_flight", calbin_sha256)
    return 1 if found is None else min(found.value, INFLIGHT_MAX)


def chunked_prefill(facts: DeviceFacts, calbin_sha256: str) -> bool:
    """Tell whether a prompt may be split with a calbin that supports it (R5.5, E13)."""
    return find_grant(facts, "chunked_prefill", calbin_sha256) is not None


def can_cancel(facts: DeviceFacts, calbin_sha256: str) -> bool:
    """Tell whether the device may be asked to end a job (E6, rung 3)."""
    return find_grant(facts, "cancel", calbin_sha256) is not None


def batch_max(facts: DeviceFacts, calbin_sha256: str, declared: int) -> int:
    """Return the most rows of a job, of those that the calbin's submodel declares (R6.1)."""
    found = find_grant(facts, "batch", calbin_sha256)
    return 1 if found is None else min(found.value, declared)


def lane_rule(facts: DeviceFacts, calbin_sha256: str, declared: str) -> str:
    """Return the calbin's rule for inactive lanes, or ``undefined`` where it is not allowed.

    With ``undefined`` only full batches or batch 1 may run (E15).
    """
    found = find_grant(facts, "partial_batch", calbin_sha256)
    known = declared in LANE_RULES and LANE_RULES.index(declared)
    return declared if found is not None and known and found.value >> known & 1 else "undefined"
