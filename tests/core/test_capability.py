"""Which evidence turns on which feature, by hand from the definitions of the levels.

Source: R1.2, R1.4, R5.3, R6.1, G19, G22, E11, E15, E26, E31.
"""

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.evidence_steps import (
    CALBIN,
    CALRT,
    OTHER_CALBIN,
    PING_PONG,
    changed,
    facts,
    fingerprint,
    record,
    row,
)
from support.fake_device import FakeDevice
from support.rig import Rig

from laneway.engine.capability import (
    FEATURES,
    batch_max,
    chunked_prefill,
    decide_all,
    decide_feature,
    find_grant,
    grant,
    inflight_max,
    lane_rule,
)
from laneway.engine.evidence import Capability, Fingerprint, Granted, Refused, VerificationRecord
from laneway.engine.limits import Limits

ROOT = Path(__file__).parents[2]
NONE: tuple[VerificationRecord, ...] = ()


def refused(
    feature: str,
    table: tuple[Capability, ...] = CALRT,
    records: tuple[VerificationRecord, ...] = NONE,
    here: Fingerprint | None = None,
) -> Refused:
    answer = decide_feature(table, records, here or fingerprint(), feature)
    assert isinstance(answer, Refused), answer
    assert answer.feature == feature and answer.reason.startswith(FEATURES[feature].title)
    return answer


def granted(
    feature: str,
    table: tuple[Capability, ...],
    records: tuple[VerificationRecord, ...] = NONE,
    here: Fingerprint | None = None,
) -> Granted:
    answer = decide_feature(table, records, here or fingerprint(), feature)
    assert isinstance(answer, Granted), answer
    return answer


# ---------------------------------------------------------------------------- the levels


def test_one_job_with_one_row_needs_nothing() -> None:
    assert granted("single_job", ()) == Granted(feature="single_job", value=1, evidence="C0", by="")
    on = [each.feature for each in decide_all(facts(), NONE) if isinstance(each, Granted)]
    assert on == ["single_job"]


def test_c0_is_on_as_far_as_it_says() -> None:
    table = (row("LAYOUTS", "C0", value=0b1110),)
    assert granted("expert_parallel", table).evidence == "C0"
    lacking = refused("pipeline_parallel", table)
    assert lacking.kind == "deliverable" and "LAYOUTS does not name pp2" in lacking.reason


def test_c0_is_off_where_its_check_failed() -> None:
    failed = record("CANCEL", result="failed", note="it hangs")
    assert refused("cancel", (row("CANCEL", "C0"),), (failed,)).kind == "failed"


def test_c0_that_does_not_say_yes_is_off() -> None:
    assert refused("cancel", (row("CANCEL", "C0", "unknown"),)).kind == "device"


@pytest.mark.parametrize("level", ["C1", "C2"])
@pytest.mark.parametrize("support", ["unknown", "limited", "yes"])
def test_c1_and_c2_need_a_record(level: str, support: str) -> None:
    table = (row("CANCEL", level, support),)
    assert refused("cancel", table).kind == "record"
    answer = granted("cancel", table, (record("CANCEL"),))
    assert (answer.evidence, answer.by) == (level, "by-hand")


def test_c3_needs_delivery_and_attestation_and_a_record() -> None:
    proof = (record("CANCEL"),)
    undelivered = row("CANCEL", "C3", "unknown", source="vendor document")
    unattested = row("CANCEL", "C3", "yes", source="device")
    whole = row("CANCEL", "C3", "yes", source="vendor document")
    assert refused("cancel", (undelivered,), proof).kind == "deliverable"
    assert "without a statement of the vendor" in refused("cancel", (unattested,), proof).reason
    assert refused("cancel", (whole,)).kind == "record"
    assert granted("cancel", (whole,), proof).evidence == "C3"


def test_c4_is_off_whatever_the_records_say_and_names_the_version() -> None:
    answer = refused("several_boards", CALRT, (record("MULTI_BOARD"),))
    assert answer.kind == "version"
    assert "CalRT 0.7.6 does not support it: MULTI_BOARD is C4" in answer.reason
    silent = changed(CALRT, row("MULTI_BOARD", "C4", "no"))
    assert "runtime 0.7.6 does not support it" in refused("several_boards", silent).reason


def test_a_device_that_says_no_is_believed() -> None:
    table = (row("CANCEL", "C1", "no", note="never"),)
    answer = refused("cancel", table, (record("CANCEL"),))
    assert answer.kind == "device" and "says no to CANCEL (never)" in answer.reason


def test_simulated_evidence_counts_for_the_simulator_only() -> None:
    table = (row("CANCEL", "SIM"),)
    simulated = fingerprint(backend="sim")
    proof = (record("CANCEL", fingerprint=simulated),)
    assert granted("cancel", table, proof, simulated).evidence == "SIM"
    assert refused("cancel", table, proof, fingerprint()).kind == "record"
    hardware = (record("CANCEL"),)
    assert "only ever simulated" in refused("cancel", table, hardware, fingerprint()).reason


# ---------------------------------------------------------------------------- records


@pytest.mark.parametrize("field", [field.name for field in attrs.fields(Fingerprint)])
def test_a_record_counts_only_where_every_field_is_equal(field: str) -> None:
    here = fingerprint()
    change: dict[str, Any] = {field: 1 if field == "chip_mask" else "other"}
    elsewhere = attrs.evolve(here, **change)
    table = (row("CANCEL", "C1"),)
    answer = refused("cancel", table, (record("CANCEL", fingerprint=elsewhere),))
    assert answer.kind == "record" and f"another system: {field} " in answer.reason


def test_the_last_record_of_a_system_decides() -> None:
    table = (row("CANCEL", "C1"),)
    failed = record("CANCEL", result="failed", note="two ended")
    passed = record("CANCEL")
    answer = refused("cancel", table, (passed, failed))
    assert answer.kind == "failed" and "failed its check by-hand: two ended" in answer.reason
    assert granted("cancel", table, (failed, passed)).value == 1
    elsewhere = attrs.evolve(failed, fingerprint=fingerprint(driver="9"))
    assert granted("cancel", table, (passed, elsewhere)).value == 1


# ---------------------------------------------------------------------------- two in flight


def test_two_in_flight_need_all_of_it() -> None:
    assert granted("two_in_flight", CALRT, PING_PONG).value == 2
    for without in PING_PONG:
        rest = tuple(each for each in PING_PONG if each is not without)
        answer = refused("two_in_flight", CALRT, rest)
        assert (answer.kind, answer.capability) == ("record", without.capability)
        worse = (*PING_PONG, attrs.evolve(without, result="failed"))
        assert refused("two_in_flight", CALRT, worse).kind == "failed"


def test_a_record_of_one_in_flight_is_not_enough() -> None:
    records = (*PING_PONG[:3], record("IN_FLIGHT", 1))
    assert "IN_FLIGHT is 1, 2 is needed" in refused("two_in_flight", CALRT, records).reason


def test_the_ceiling_is_two_at_most_and_one_without_evidence() -> None:
    eager = (*PING_PONG[:3], record("IN_FLIGHT", 7))
    given = grant(facts(), eager)
    assert (given.inflight_max, inflight_max(given, CALBIN)) == (2, 2)
    assert inflight_max(given, OTHER_CALBIN) == 1
    assert grant(facts()).inflight_max == 1


def test_what_failed_for_one_calbin_is_on_for_others_only() -> None:
    table = tuple(
        attrs.evolve(each, evidence="SIM") for each in FakeDevice().describe().capabilities
    )
    device = facts(
        changed(table, row("IN_FLIGHT", "SIM", value=2)),
        backend_kind="sim",
        proven=("IN_FLIGHT", "PING_PONG", "COUNTERS", "POLL_THREADSAFE"),
    )
    failed = record("COUNTERS", result="failed", fingerprint=fingerprint(backend="sim"))
    given = grant(device, (failed,))
    assert (inflight_max(given, CALBIN), inflight_max(given, OTHER_CALBIN)) == (1, 2)
    assert given.inflight_max == 2
    assert find_grant(given, "single_job", CALBIN) is not None


# ---------------------------------------------------------------------------- batches, pieces


ATTESTED = changed(
    CALRT,
    row("BATCH_LANES", "C3", value=8, source="vendor document"),
    row("LANE_RULE", "C3", value=0b10, source="vendor document"),
    row("INCREMENTAL_PREFILL", "C3", source="vendor document"),
)


def test_hardware_batches_need_the_vendor() -> None:
    lies = (record("BATCH_LANES", 16),)
    answer = refused("batch", CALRT, lies)
    assert answer.kind == "deliverable"
    assert "BATCH_LANES is 1, 2 is needed; missing is a calbin that the vendor" in answer.reason
    given = grant(facts(ATTESTED), (record("BATCH_LANES", 16),))
    assert batch_max(given, CALBIN, 4) == 4
    assert batch_max(given, CALBIN, 16) == 8  # the table is the vendor's word
    assert batch_max(given, OTHER_CALBIN, 4) == 1


def test_inactive_lanes_follow_a_rule_that_is_granted() -> None:
    given = grant(facts(ATTESTED), (record("BATCH_LANES", 8), record("LANE_RULE", 2)))
    assert lane_rule(given, CALBIN, "length_zero") == "length_zero"
    assert lane_rule(given, CALBIN, "mask_csr") == "undefined"
    assert lane_rule(given, CALBIN, "invented") == "undefined"
    assert lane_rule(given, OTHER_CALBIN, "length_zero") == "undefined"


def test_prompts_are_split_only_by_word_and_record() -> None:
    given = grant(facts(ATTESTED), (record("INCREMENTAL_PREFILL"),))
    assert given.chunked_prefill and chunked_prefill(given, CALBIN)
    assert not chunked_prefill(given, OTHER_CALBIN)
    assert not grant(facts(), (record("INCREMENTAL_PREFILL"),)).chunked_prefill


# ---------------------------------------------------------------------------- refusals


def test_every_row_of_the_matrix_is_a_feature_that_names_its_work() -> None:
    page = (ROOT / "specs" / "requirements.md").read_text("utf-8")
    table = page.partition("| capability |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]
    levels = sorted(row[1] for row in rows[2:])
    known = [feature.level for feature in FEATURES.values()]
    assert len(levels) == 10 and all(levels.count(level) <= known.count(level) for level in levels)
    for feature in FEATURES.values():
        assert feature.missing and re.match(r"C\d", feature.level)


def test_a_c3_refusal_names_what_is_missing() -> None:
    for name, feature in FEATURES.items():
        if name in ("single_job", "two_in_flight", "several_boards"):
            continue
        answer = refused(name, CALRT)
        assert answer.kind == "deliverable", answer
        assert f"missing is {feature.missing}" in answer.reason


def test_an_unknown_feature_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        decide_feature(CALRT, NONE, fingerprint(), "teleport")


# ---------------------------------------------------------------------------- the engine


def test_what_is_granted_stands_in_the_first_step() -> None:
    names = ("IN_FLIGHT", "PING_PONG", "COUNTERS", "POLL_THREADSAFE", "INCREMENTAL_PREFILL")
    rig = Rig(device=FakeDevice(inflight_max=2, verified=names))
    given = rig.state.device.facts
    assert given is not None and (given.inflight_max, given.chunked_prefill) == (2, True)
    assert {each.feature for each in given.grants} == {
        "single_job",
        "two_in_flight",
        "chunked_prefill",
    }
    rig.close()


def test_a_claim_of_two_without_a_record_is_one() -> None:
    rig = Rig(device=FakeDevice(inflight_max=2), limits=Limits(inflight_jobs_max=2))
    given = rig.state.device.facts
    assert given is not None and (given.inflight_max, given.chunked_prefill) == (1, False)
    rig.close()
