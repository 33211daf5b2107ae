"""What is known of a device's abilities, and on whose word: values only.

A capability is what the device says; a verification record is what a probe found out on one
running system, named by its fingerprint; a grant is what the engine may therefore use. The rules
between them stand in ``engine/capability.py``.

Levels of evidence: C0 runs in production, C1 has an entry point that nobody verified, C2 needs host
work and a verification of our own, C3 needs a deliverable of the vendor, C4 is refused by the
vendor for this version, SIM is said by a simulator and counts for that simulator only.
"""

import attrs

SUPPORT = ("unknown", "no", "limited", "yes")
"""By the number that the ABI gives them."""
SOURCES = (
    *("unknown", "device", "vendor document", "header only", "verification record"),
    *("inferred", "simulated"),
)
"""By the number that the ABI gives them."""
EVIDENCE = ("C0", "C1", "C2", "C3", "C4", "SIM")
RESULTS = ("passed", "failed")
ATTESTED = "vendor document"
SIMULATED = "SIM"
SIMULATOR = "sim"


@attrs.frozen(kw_only=True)
class Capability:
    """One row of a device's table of capabilities.

    ``scope`` is the version that the word holds for. Raises: ValueError for a word outside the
    three tables above.
    """

    name: str
    support: str = attrs.field(validator=attrs.validators.in_(SUPPORT))
    evidence: str = attrs.field(validator=attrs.validators.in_(EVIDENCE))
    source: str = attrs.field(validator=attrs.validators.in_(SOURCES))
    value: int
    scope: str = ""
    note: str = ""

    @property
    def supported(self) -> bool:
        """Whether the device says that it can."""
        return self.support in ("limited", "yes")


@attrs.frozen(kw_only=True)
class Fingerprint:
    """The running system that a record was made on; a record counts where every field is equal.

    ``backend`` is the kind of library (``sim``, ``calrt``, …); ``chip_mask`` the opened chips;
    ``calbin_sha256`` the artifact, empty for none. Source: E24.
    """

    backend: str
    backend_version: str
    runtime: str
    driver: str
    firmware: str
    chip_mask: int
    calbin_sha256: str

    def difference(self, other: "Fingerprint") -> str:
        """Return the first field that differs, as "name here, there", or nothing."""
        for field in attrs.fields(Fingerprint):
            here, there = getattr(self, field.name), getattr(other, field.name)
            if here != there:
                return f"{field.name} {here!r}, not {there!r}"
        return ""


@attrs.frozen(kw_only=True)
class VerificationRecord:
    """What one check of a capability found on one running system.

    ``value`` is what was found where the capability has a number (jobs in flight, overlap
    hypothesis). ``note`` is the evidence in words; for a failed check, the reason.
    """

    capability: str
    result: str = attrs.field(validator=attrs.validators.in_(RESULTS))
    value: int
    test: str
    seed: int
    note: str
    fingerprint: Fingerprint

    @property
    def passed(self) -> bool:
        """Whether the check passed."""
        return self.result == "passed"


@attrs.frozen(kw_only=True)
class Grant:
    """A feature that the engine may use with a calbin; an empty hash means any without records.

    ``evidence`` is the weakest that it stands on; ``by`` names the checks, empty for production.
    """

    feature: str
    calbin_sha256: str
    value: int
    evidence: str
    by: str


@attrs.frozen(kw_only=True)
class Granted:
    """The answer yes: ``value`` is the number that goes with the feature, 1 where there is none."""

    feature: str
    value: int
    evidence: str
    by: str


@attrs.frozen(kw_only=True)
class Refused:
    """The answer no.

    ``kind`` says what would change it: ``version`` (this one never can), ``deliverable`` (of the
    vendor), ``record`` (a verification that is missing or of another system), ``failed`` (it was
    tried here and failed), ``device`` (it says no). ``reason`` is a sentence for a person.
    """

    feature: str
    capability: str
    kind: str
    reason: str
