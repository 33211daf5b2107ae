"""The checks of the isolation runner on boards: what is so passes, what is planted is found.

The runner itself, with its processes: ``test_cli_probe.py``. Source: R5.2, E12, E14, E15, E25, E31.
"""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray
from support.native_board import CONTEXT, LANES, ROOT

from laneway.adapters import npurt, open_device, probe_overlap, probing
from laneway.adapters.calbin import pack
from laneway.adapters.device import NpurtDevice
from laneway.adapters.probe_checks import CHECKS
from laneway.adapters.probe_overlap import (
    BANKS,
    FULL,
    H2D,
    SERIAL,
    Seen,
    judge,
    predict_periods,
)
from laneway.adapters.probing import CheckFailed, Finding, Piece, Probed
from laneway.adapters.results import read_logits

COST = "sim:cost?clock=virtual&h2d=1ms&d2h=1ms&prefill=3ms/0ns/0ns&decode=1ms/0ns/0ns"
Probing = Callable[[str], Probed]


@pytest.fixture(scope="module")
def batched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe") / "tiny-moe"
    pack(ROOT / "models" / "tiny-moe", folder, batch=(1, 4), context=CONTEXT, lanes=LANES)
    return folder


@pytest.fixture
def probing_on(batched: Path) -> Iterator[Probing]:
    opened: list[NpurtDevice] = []

    def make(url: str) -> Probed:
        device = open_device(url, exclusive=True)
        assert isinstance(device, NpurtDevice)
        opened.append(device)
        return Probed(device, batched)

    yield make
    for device in opened:
        device.stop()


def run(probed: Probed, check: str, seed: int = 3) -> list[Finding]:
    """Run one check to its end, and leave the device clean."""
    findings = list(CHECKS[check][0](probed, seed))
    probed.finish_all()
    probed.close()
    return findings


# ---------------------------------------------------------------------------- what is so


@pytest.mark.parametrize("check", [name for name in CHECKS if name != "parallel-mode"])
def test_a_check_passes_on_a_board_that_keeps_its_word(check: str, probing_on: Probing) -> None:
    findings = run(probing_on("sim:?clock=virtual"), check)
    assert {finding.result for finding in findings} == {"passed"}
    assert tuple(finding.capability for finding in findings) == CHECKS[check][1]


@pytest.mark.parametrize("overlap", range(4))
def test_the_overlap_is_named(overlap: int, probing_on: Probing) -> None:
    (finding,) = run(probing_on(f"{COST}&overlap={overlap}"), "overlap")
    assert (finding.result, finding.value) == ("passed", overlap)
    doubtful = "not distinguishable by that, taken is the device's own word" in finding.note
    assert doubtful == (overlap in (SERIAL, BANKS))


def test_without_a_word_of_the_device_serial_is_taken(probing_on: Probing) -> None:
    for overlap, value in ((0, SERIAL), (1, SERIAL), (2, H2D), (3, FULL)):
        url = f"{COST}&overlap={overlap}&persona=calrt-0.7.6"
        (finding,) = run(probing_on(url), "overlap")
        assert finding.value == value
        assert ("taken is the lesser" in finding.note) == (overlap < H2D)


@pytest.mark.parametrize(("overlap", "name"), [(2, "H2D overlaps compute"), (3, "all phases")])
def test_parallel_mode_is_what_makes_phases_overlap(
    overlap: int, name: str, probing_on: Probing
) -> None:
    (finding,) = run(probing_on(f"{COST}&overlap={overlap}"), "parallel-mode")
    assert finding.result == "passed"
    assert f"mode 0: serial; mode 1: {name}" in finding.note


def test_parallel_mode_that_does_not_exist_is_skipped(probing_on: Probing) -> None:
    (finding,) = run(probing_on(f"{COST}&overlap=0"), "parallel-mode")
    assert finding.result == "skipped" and "UNSUPPORTED" in finding.note


def test_a_calbin_of_batch_one_is_skipped_for_batches(tmp_path: Path) -> None:
    pack(ROOT / "models" / "tiny-dense", tmp_path / "one", context=CONTEXT, lanes=LANES)
    device = open_device("sim:?clock=virtual")
    assert isinstance(device, NpurtDevice)
    findings = run(Probed(device, tmp_path / "one"), "batch")
    device.stop()
    assert {finding.result for finding in findings} == {"skipped"}
    assert "compiled for batch 1" in findings[0].note


@pytest.mark.parametrize(
    ("rule", "value"), [("length_zero", 2), ("mask_csr", 4), ("scratch_lane", 8), ("undefined", 0)]
)
def test_each_lane_rule_is_held_against_rows_alone(rule: str, value: int, tmp_path: Path) -> None:
    folder = tmp_path / rule
    source = ROOT / "models" / "tiny-dense"
    pack(source, folder, batch=(1, 4), context=CONTEXT, lanes=LANES, lane_rule=rule)
    device = open_device("sim:?clock=virtual")
    assert isinstance(device, NpurtDevice)
    lanes, inactive = run(Probed(device, folder), "batch")
    device.stop()
    assert (lanes.result, lanes.value) == ("passed", 4)
    result = "passed" if value else "skipped"
    assert (inactive.result, inactive.value) == (result, value)


# ---------------------------------------------------------------------------- what is planted


def failing(probed: Probed, check: str) -> str:
    """Run a check that must fail; return its words."""
    with pytest.raises(CheckFailed) as failed:
        list(CHECKS[check][0](probed, 3))
    return str(failed.value)


Reader = Callable[[Any, int], NDArray[np.uint16]]


@pytest.mark.parametrize("check", ["interleave", "ping-pong"])
def test_outputs_that_cross_are_found(
    check: str, probing_on: Probing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every output of a job beside another is replaced by the other's."""
    probed = probing_on("sim:?clock=virtual")
    read: Reader = read_logits

    def cross(buffer: Any, vocabulary: int) -> NDArray[np.uint16]:
        others = [flight.buffer for flight in probed._flights if flight.buffer is not buffer]
        return read(others[0] if others else buffer, vocabulary)

    monkeypatch.setattr(probing, "read_logits", cross)
    assert "logits differ from the same job alone" in failing(probed, check)


def test_an_output_of_the_job_before_is_found(
    probing_on: Probing, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = probing_on("sim:?clock=virtual")
    read: Reader = read_logits
    before: list[NDArray[np.uint16]] = []

    def stale(buffer: Any, vocabulary: int) -> NDArray[np.uint16]:
        before.append(read(buffer, vocabulary).copy())
        beside = len(probed._flights) > 1
        return before[-2] if beside and len(before) > 1 else before[-1]

    monkeypatch.setattr(probing, "read_logits", stale)
    assert "differ from the same job alone" in failing(probed, "interleave")


def poke(probed: Probed, lane: int) -> None:
    """Change one number of a lane's KV."""
    chip, address, size = ctypes.c_uint32(), ctypes.c_uint64(), ctypes.c_uint64()
    where = (ctypes.byref(chip), ctypes.byref(address), ctypes.byref(size))
    probed.calls.library.call("npurt_sim_kv_address", probed.bank, lane, *where)
    number = np.array([1.5], np.float32)
    probed.calls.call(
        "npurt_sim_poke", chip.value, address.value, number.ctypes.data, number.nbytes
    )


def test_a_kv_row_that_changes_beside_another_job_is_found(
    probing_on: Probing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number of another lane's KV is changed whenever two jobs are in flight."""
    probed = probing_on("sim:?clock=virtual")
    start = Probed.start

    def disturb(self: Probed, pieces: Any, **more: Any) -> Any:
        flight = start(self, pieces, **more)
        if len(self._flights) == 2:
            poke(self, self._flights[0].pieces[0].sequence.lane)
        return flight

    monkeypatch.setattr(Probed, "start", disturb)
    assert "differ from the same job alone" in failing(probed, "interleave")


def test_an_inactive_row_that_writes_a_lane_is_found(
    probing_on: Probing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows of four are active; what the fourth writes is on the lane of a bystander.

    By hand: four stories alone take lanes 0 to 3 in turn, the full batch takes 4 to 7, and so the
    part of a batch takes 0 to 2 and the bystander 3.
    """
    probed = probing_on("sim:?clock=virtual")
    start = Probed.start

    def pad(self: Probed, pieces: Any, **more: Any) -> Any:
        if len(pieces) == 3:
            poke(self, pieces[-1].sequence.lane + 1)
        return start(self, pieces, **more)

    monkeypatch.setattr(Probed, "start", pad)
    assert "lane 3, which was in no row of the batch" in failing(probed, "batch")


@pytest.mark.parametrize("step", [(npurt.JOB_DONE, 1), (1, npurt.JOB_DONE), (3, 2)])
def test_a_state_that_steps_illegally_is_found(
    step: tuple[int, int], probing_on: Probing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second poll that sees ``step[0]`` is told ``step[1]``."""
    probed = probing_on("sim:?clock=virtual")
    poll = Probed.poll
    seen: list[int] = []

    def lie(self: Probed, flight: Any) -> npurt.JobState:
        told = poll(self, flight)
        seen.append(told.state)
        if told.state == step[0] and seen.count(step[0]) % 2 == 0:
            told.state = step[1]
        return told

    monkeypatch.setattr(Probed, "poll", lie)
    words = failing(probed, "status")
    assert "went back" in words or "with flags" in words


FIELDS = ("submitted", "pending", "running", "finished", "left", "failed", "aborted")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("amount", [1, -1])
def test_a_counter_that_lies_in_flight_is_found(
    field: str, amount: int, probing_on: Probing, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = probing_on("sim:?clock=virtual")
    counters = Probed.counters

    def lie(self: Probed) -> dict[str, int]:
        told = counters(self)
        if self._flights:
            told[field] = (told[field] + amount) % (1 << 64)
        return told

    monkeypatch.setattr(Probed, "counters", lie)
    assert "against the ledger" in failing(probed, "counters")


def test_a_counter_that_the_board_skews_is_found(tmp_path: Path, probing_on: Probing) -> None:
    plan = tmp_path / "plan"
    plan.write_text("fault a kind=counter_skew on=counters field=finished n=1 count=inf\n")
    words = failing(probing_on(f"sim:?clock=virtual&faults={plan}"), "counters")
    assert "counters moved without a job: " in words and "finished 0 to 1" in words


def test_a_counter_that_is_not_told_is_found(
    probing_on: Probing, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = probing_on("sim:?clock=virtual")
    monkeypatch.setattr(Probed, "counters", lambda self: {"submitted": 0})
    monkeypatch.setattr(probed, "opening", {"submitted": 0})
    assert "does not count pending, running" in failing(probed, "counters")


def test_a_bank_that_is_not_the_one_asked_for_is_found(
    probing_on: Probing, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = probing_on("sim:?clock=virtual")
    read = Probed._read

    def swap(self: Probed, flight: Any, done: npurt.Completion) -> Any:
        return attrs.evolve(read(self, flight, done), engine=1)

    monkeypatch.setattr(Probed, "_read", swap)
    assert "asked for bank 2, it ran on [1]" in failing(probed, "ping-pong")


def test_golden_numbers_that_are_others_are_found(probing_on: Probing) -> None:
    probed = probing_on("sim:?clock=virtual")
    first, *rest = probed.golden
    logits = first.logits.copy()
    logits[len(first.prompt) - 1, 7] += 1
    probed.golden = (attrs.evolve(first, logits=logits), *rest)
    assert "golden run 0, position" in failing(probed, "golden")
    assert "1 of 512 logits differ, most at token 7" in failing(probed, "interleave")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hang on=exec", "1 jobs in flight, and none of them ends"),
        ("ccu_exception on=exec quiesce=y kv=none", "ended failed: CCU_EXCEPTION"),
        ("submit_reject", "SUBMIT_REJECTED"),
        ("kv_apply_before", "RESERVE of lane 0"),
    ],
)
def test_a_fault_of_the_board_fails_the_check(
    fault: str, words: str, tmp_path: Path, probing_on: Probing
) -> None:
    plan = tmp_path / "plan"
    plan.write_text(f"fault a kind={fault}\n")
    assert words in failing(probing_on(f"sim:?clock=virtual&faults={plan}"), "interleave")


def test_a_device_that_is_not_left_clean_is_found(probing_on: Probing) -> None:
    probed = probing_on("sim:?clock=virtual")
    sequence = probed.open()
    flight = probed.start((Piece(sequence, (1, 2)),))
    with pytest.raises(CheckFailed, match="1 jobs are not accounted for"):
        probed.close()
    probed.finish(probed.wait((flight,)))
    probed._used_before = (-1 << 40, -1 << 40)
    with pytest.raises(CheckFailed, match="not clean afterwards: .* bytes were not given back"):
        probed.close()


# ---------------------------------------------------------------------------- judging overlap


def seen(**more: Any) -> Seen:
    """Return what a serial board with phases of 1, 3 and 1 ms shows, changed."""
    plain: dict[str, Any] = {
        "h2d_share": 0.0,
        "d2h_share": 0.0,
        "compute_share": 0.0,
        "pause_alone_ns": 0.0,
        "pause_paired_ns": 0.0,
        "period_ns": 5e6,
        "phases_ns": (1e6, 3e6, 1e6),
        "waited_for_accept": False,
        "banks": (1, 2),
    }
    return Seen(**(plain | more))


@pytest.mark.parametrize(
    ("phases", "gains"),
    [
        ((0.05, 5.4, 0.05), (1.00, 1.00, 1.01, 1.02)),
        ((0.3, 2.0, 0.5), (1.00, 1.00, 1.12, 1.40)),
        ((1, 1, 1), (1.00, 1.00, 1.50, 2.00)),
    ],
)
def test_predictions_are_those_of_hand_computation(
    phases: tuple[float, float, float], gains: tuple[float, ...]
) -> None:
    alone = sum(phases)
    assert tuple(round(alone / each, 2) for each in predict_periods(*phases)) == gains


def test_shares_decide_where_they_are_clear() -> None:
    assert judge(seen(), None)[0] == SERIAL
    assert judge(seen(h2d_share=1.0, period_ns=4e6), None)[0] == H2D
    assert judge(seen(h2d_share=1.0, d2h_share=1.0, period_ns=3e6), None)[0] == FULL


def test_what_can_tell_serial_from_banks_is_named() -> None:
    late = judge(seen(waited_for_accept=True), BANKS)
    assert late[0] == SERIAL and "accepted only when the other had ended" in late[1]
    one = judge(seen(banks=(1,)), BANKS)
    assert one[0] == SERIAL and "every job ran on bank 1" in one[1]
    assert judge(seen(), BANKS)[0] == BANKS
    assert judge(seen(), FULL)[0] == SERIAL  # its word is against what was measured


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"h2d_share": 0.15}, "neither apart nor overlapping: H2D beside the other job 15%"),
        ({"d2h_share": 0.06}, "neither apart nor overlapping"),
        ({"compute_share": 0.5}, "two jobs computed at once for 50%"),
        ({"h2d_share": 1.0}, "phases say H2D overlaps compute, the time from end to end serial"),
        ({"period_ns": 3e6}, "phases say serial, the time from end to end all phases overlap"),
    ],
)
def test_evidence_that_contradicts_itself_is_no_evidence(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckFailed, match=words):
        judge(seen(**change), None)


def test_jobs_that_end_too_soon_tell_nothing(
    probing_on: Probing, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = probing_on("sim:?clock=virtual")
    monkeypatch.setattr(
        probe_overlap, "_run", lambda probed, tokens, depth: _runs_apart(probed, tokens)
    )
    with pytest.raises(CheckFailed, match="too short to tell"):
        probe_overlap.measure(probed, 1)


def _runs_apart(probed: Probed, tokens: tuple[int, ...]) -> list[probing.Output]:
    outputs = []
    for _ in range(probe_overlap.JOBS):
        sequence = probed.open()
        outputs.append(probed.run(Piece(sequence, tokens)))
        probed.release(sequence)
    return outputs


# ---------------------------------------------------------------------------- faults of the board


LIES = {
    "stale_output inflight>=2 count=inf": ("interleave", "differ from the same job alone"),
    "stale_output inflight>=2 nth=3": ("ping-pong", "differ from the same job alone"),
    "swapped_output inflight>=2 count=inf": ("interleave", "differ from the same job alone"),
    "swapped_output inflight>=2 nth=2": ("ping-pong", "differ from the same job alone"),
    "kv_bit inflight>=2 pos=0 count=inf": ("interleave", "differ from the same job alone"),
    "kv_zero inflight>=2 pos=0 count=inf": ("interleave", "differ from the same job alone"),
    "numeric_garbage count=inf": ("golden", "logits differ"),
    "numeric_offset count=inf": ("interleave", "golden run 0"),
    "pad_write victim=3 count=inf": ("batch", "lane 3, which was in no row of the batch"),
    "illegal_step from=exec to=queued count=inf": ("status", "the state went back"),
    "illegal_step from=exec to=done every=2": ("status", "told done too early"),
    "illegal_step from=h2d to=done count=inf": ("status", "told done too early"),
    "counter_stuck field=finished": ("counters", "against the ledger"),
    "counter_negative field=left count=inf": ("counters", "counters moved without a job"),
    "counter_skew field=pending n=1 skip=6 count=inf": ("counters", "against the ledger"),
    "counter_reset field=submitted skip=9": ("counters", "against the ledger"),
}
"""What the board does wrong, the check that must find it, and its words."""


@pytest.mark.parametrize("fault", LIES)
def test_what_the_board_does_wrong_is_found(
    fault: str, tmp_path: Path, probing_on: Probing
) -> None:
    plan = tmp_path / "plan"
    plan.write_text(f"fault a kind={fault}\n")
    check, words = LIES[fault]
    assert words in failing(probing_on(f"sim:?clock=virtual&faults={plan}"), check)
