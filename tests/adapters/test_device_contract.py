"""What any npurt library must do behind NpurtDevice, on the simulator's manual clock by default.

Expected tokens and logits are those of the golden files that the models came with.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest
from msgspec.structs import replace
from support.chosen_device import chosen, need_simulator, need_still_time
from support.driven_device import (
    BUFFER_FIRST,
    EPOCH,
    GENERATION,
    LANE_FIRST,
    SECOND,
    DrivenDevice,
    row,
    settle_rows,
)

from laneway.adapters import open_device
from laneway.adapters.buffers import Buffer
from laneway.adapters.device import NpurtDevice
from laneway.adapters.library import find_library
from laneway.adapters.loaded import LoadedModel
from laneway.adapters.packing import pack
from laneway.adapters.results import Prepared
from laneway.engine.effects import (
    ApplyKv,
    CloseDevice,
    KvOperation,
    ProbeHealth,
    PublishModel,
    ReleaseModel,
    RestoreBuffer,
    SubmitJob,
    ValidateArtifact,
)
from laneway.engine.errors import ConfigurationError, UsageError
from laneway.engine.inputs import (
    NO_TOKEN,
    ArtifactRefused,
    ArtifactValidated,
    BufferRestored,
    Completed,
    ConfigureFailed,
    DeviceClosed,
    DeviceFaulted,
    HealthProbed,
    JobProgressed,
    JobStalled,
    KvApplied,
    KvApplyFailed,
    ModelConfigured,
    ModelReleased,
    ReleaseFailed,
    RestoreFailed,
    RowResult,
    SubmitAccepted,
    SubmitRefused,
)

MODELS = Path(__file__).resolve().parents[2] / "models"
CONTEXT = json.loads((MODELS / "tiny-dense" / "config.json").read_text())["max_position_embeddings"]
Open = Callable[..., DrivenDevice]
pytestmark = pytest.mark.board


@pytest.fixture(scope="module")
def calbin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A packed model with batches of 1 and 4."""
    folder = tmp_path_factory.mktemp("calbin") / "tiny-dense"
    pack(MODELS / "tiny-dense", folder, batch=(1, 4))
    return str(folder)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    """The golden numbers as they came with the model, read by numpy alone."""
    return dict(np.load(MODELS / "tiny-dense" / "golden.npz"))


def open_simulator(**keys: str) -> NpurtDevice:
    """Open the simulator on a manual clock; the factory of this contract.

    A device that was named takes its place, but in tests of the simulator's own keys.
    """
    named = chosen()
    if named is not None and keys:
        pytest.skip(f"{', '.join(keys)}= needs the simulator of its own")
    if named is not None:
        return named.open()
    try:
        find_library()
    except ConfigurationError as missing:
        pytest.skip(str(missing))
    query = "&".join(f"{key}={value}" for key, value in {"clock": "manual", **keys}.items())
    device = open_device(f"sim:tiny?{query}")
    assert isinstance(device, NpurtDevice)
    return device


@pytest.fixture(params=[False, True], ids=["stepped", "threads"])
def open_driven(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens driven devices and ends them all after the test; no host mistake may have been seen."""
    opened: list[DrivenDevice] = []

    def make(*, faults: str = "", **keys: str) -> DrivenDevice:
        device = open_simulator(**keys)
        if faults:
            need_simulator(device, "a fault plan")
            assert device.simulator is not None
            device.simulator.set_faults(faults)
        opened.append(DrivenDevice(device, threads=request.param))
        return opened[-1]

    yield make
    violations = [
        violation
        for driven in opened
        if driven.device.simulator is not None and not driven.device.calls.closed
        for violation in driven.device.simulator.violations()
    ]
    for driven in opened:
        driven.device.stop()
    assert violations == []


@pytest.fixture
def driven(open_driven: Open, calbin: str) -> DrivenDevice:
    """A device with the model loaded and published."""
    driven = open_driven()
    driven.load(calbin)
    return driven


# ------------------------------------------------------------------------ opening and describing


def test_the_device_describes_itself(open_driven: Open) -> None:
    facts = open_driven(firmware_version="3.2.1", dram_bytes="123456789").device.describe()
    assert facts.backend == "calsim"
    assert (facts.runtime_version, facts.firmware_version) == ("0.1.0", "3.2.1")
    assert facts.device_epoch == 1
    assert [chip.total_bytes for chip in facts.chips] == [123456789, 123456789]
    assert [chip.used_bytes for chip in facts.chips] == [0, 0]
    rows = {row.name: row for row in facts.capabilities}
    assert rows["IN_FLIGHT"].value == facts.inflight_max
    assert {(row.evidence, row.source) for row in rows.values()} == {("SIM", "simulated")}
    assert rows["CANCEL"].note == "queued jobs only" and rows["CANCEL"].scope == "calsim 0.1.0"
    assert (facts.backend_kind, facts.chip_mask) == ("sim", 0b11)


def test_a_value_that_the_board_does_not_take_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="seed"):
        open_simulator(seed="minus-one").stop()


def test_a_fault_plan_that_is_wrong_names_its_line(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text("fault a kind=hang on=exec\nfault b kind=nosuch\n")
    with pytest.raises(ConfigurationError, match=r"fault plan: .*2"):
        open_simulator(faults=str(plan))


def test_one_device_serves_one_engine(open_driven: Open) -> None:
    driven = open_driven()
    with pytest.raises(UsageError, match="in use already"):
        driven.device.start(print, threads=False)
    if driven.threads:
        with pytest.raises(UsageError, match="threads of its own"):
            driven.device.step()


def test_health_is_answered(driven: DrivenDevice) -> None:
    health = driven.ask(ProbeHealth(), HealthProbed).health
    assert health is not None
    assert (health.state, health.sticky, health.device_epoch) == ("ok", 0, 1)
    assert dict(health.counters)["submitted"] == 0
    assert len(health.used_bytes) == 2


# ------------------------------------------------------------------------ artifacts


def test_a_good_artifact_tells_what_it_needs(open_driven: Open, calbin: str) -> None:
    driven = open_driven()
    facts = driven.validate(calbin)
    assert (facts.context_tokens, facts.lane_count, facts.layout) == (CONTEXT, 8, "tp2")
    assert facts.architecture == "qwen3"
    assert {(s.task, s.batch_max) for s in facts.submodels} == {
        (task, batch) for task in ("prefill", "decode") for batch in (1, 4)
    }
    assert len(facts.chip_bytes) == 2
    assert facts.chips == driven.device.describe().chips


def test_trials_are_the_golden_prompts_a_warm_up_and_one_for_each_batch(
    open_driven: Open, calbin: str, golden: dict[str, np.ndarray]
) -> None:
    every = open_driven().validate(calbin).trials
    trials = [trial for trial in every if trial.batch == 1]
    wide = [trial for trial in every if trial.batch > 1]
    assert [trial.batch for trial in wide] == [4], "the calbin has batches 1 and 4"
    assert wide[0].origin == "golden" and wide[0].prompt in {trial.prompt for trial in trials}
    goldens = [trial for trial in trials if trial.origin == "golden"]
    assert [trial.origin for trial in trials] == ["golden"] * len(goldens) + ["warmup"]
    prompts = [golden[name] for name in sorted(golden) if name.startswith("prompt_")]
    assert {trial.prompt for trial in goldens} == {
        tuple(int(token) for token in prompt) for prompt in prompts if len(prompt) + 4 <= CONTEXT
    }
    assert all(len(trial.forced) == 4 for trial in goldens)
    assert len(trials[-1].forced) == 2


def test_a_damaged_artifact_is_refused_and_the_device_is_untouched(
    open_driven: Open, calbin: str, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in Path(calbin).iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    raw = bytearray((damaged / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(raw)
    driven = open_driven()
    effect = ValidateArtifact(model=1, source=str(damaged))
    assert "model.safetensors" in driven.ask(effect, ArtifactRefused).reason
    health = driven.ask(ProbeHealth(), HealthProbed).health
    assert health is not None and set(health.used_bytes) == {0}
    with pytest.raises(KeyError):
        driven.device.text(1)


def test_a_check_keeps_nothing_of_an_artifact(open_driven: Open, calbin: str) -> None:
    """Beside a model that serves: the same answer, no text, no memory, and a validation later."""
    driven = open_driven()
    facts = driven.validate(calbin)
    driven.configure()
    effect = ValidateArtifact(model=2, source=calbin, check=True)
    checked = driven.ask(effect, ArtifactValidated)
    used = tuple(chip.used_bytes for chip in checked.chips)
    assert used == facts.chip_bytes, "what the first one holds, and no more"
    assert attrs.evolve(checked, model=1, chips=facts.chips) == facts
    with pytest.raises(KeyError):
        driven.device.text(2)
    assert driven.ask(ReleaseModel(model=1, generation=GENERATION), ModelReleased).healthy
    driven.validate(calbin, model=2)
    driven.configure(model=2)


def test_an_artifact_for_newer_firmware_is_refused_by_the_device(
    open_driven: Open, calbin: str
) -> None:
    driven = open_driven(firmware_version="0.0.9")
    refused = driven.ask(ValidateArtifact(model=1, source=calbin), ArtifactRefused)
    assert "CALBIN_INCOMPATIBLE (0x0503)" in refused.reason
    assert "0.0.9" in refused.reason


def test_configuring_takes_the_memory_that_was_announced(open_driven: Open, calbin: str) -> None:
    driven = open_driven()
    facts = driven.validate(calbin)
    configured = driven.configure()
    assert configured.device_epoch == 1
    assert configured.device_generation > 0
    taken = tuple(
        after - before
        for before, after in zip(
            configured.used_bytes_before, configured.used_bytes_after, strict=True
        )
    )
    assert taken == facts.chip_bytes


def test_a_failed_configuration_gives_everything_back(open_driven: Open, calbin: str) -> None:
    driven = open_driven()
    driven.validate(calbin)
    effect = attrs.evolve(driven.configure_effect(), lane_count=9)
    failed = driven.ask(effect, ConfigureFailed)
    assert "9" in failed.reason and "INVALID_ARG (0x0101)" in failed.reason
    health = driven.ask(ProbeHealth(), HealthProbed).health
    assert health is not None and set(health.used_bytes) == {0}
    released = driven.ask(ReleaseModel(model=1, generation=GENERATION), ModelReleased)
    assert released.healthy and set(released.used_bytes) == {0}, "nothing is left to give back"


def test_release_retires_a_quarantined_buffer_that_is_quiescent(driven: DrivenDevice) -> None:
    driven.complete(driven.job("prefill", (row((1, 2, 3)),)))
    released = driven.ask(ReleaseModel(model=1, generation=GENERATION), ModelReleased)
    assert released.used_bytes == (0, 0) and released.healthy
    assert driven.device.graveyard.item_count == 0


def test_release_fails_while_a_job_is_not_quiescent(driven: DrivenDevice) -> None:
    need_still_time(driven.device)
    driven.ask(driven.job("prefill", (row((1, 2, 3)),)), SubmitAccepted)
    failed = driven.ask(ReleaseModel(model=1, generation=GENERATION), ReleaseFailed)
    assert "OBJECT_IN_FLIGHT" in failed.reason
    assert driven.device.graveyard.item_count == 1


def test_release_after_everything_was_restored(driven: DrivenDevice) -> None:
    effect = driven.job("prefill", (row((1, 2, 3)),))
    done = driven.complete(effect)
    restore = RestoreBuffer(model=1, buffer=effect.buffer, job=effect.job, ticket=done.ticket)
    driven.ask(restore, BufferRestored)
    released = driven.ask(ReleaseModel(model=1, generation=GENERATION), ModelReleased)
    assert released.used_bytes == (0, 0)
    assert released.healthy
    assert driven.device.graveyard.item_count == 0
    with pytest.raises(KeyError):
        driven.device.text(1)


def test_a_model_can_be_loaded_again_after_its_release(driven: DrivenDevice, calbin: str) -> None:
    driven.ask(ReleaseModel(model=1, generation=GENERATION), ModelReleased)
    driven.validate(calbin)
    again = driven.configure()
    assert again.used_bytes_before == (0, 0)
    assert driven.complete(driven.job("prefill", (row((1, 2, 3)),))).rows[0].token >= 0


# ------------------------------------------------------------------------ jobs


def test_greedy_tokens_are_the_golden_ones(
    driven: DrivenDevice, golden: dict[str, np.ndarray]
) -> None:
    prompt = tuple(int(token) for token in golden["prompt_0"])
    wanted = [int(token) for token in golden["greedy_0"]][:8]
    effect = driven.job("prefill", (row(prompt),))
    tokens = []
    length = len(prompt)
    for _ in wanted:
        done = driven.complete(effect)
        assert (done.job, done.epoch, done.generation) == (effect.job, EPOCH, GENERATION)
        assert (done.kv_effect, done.rows[0].fault, done.rows[0].verdict) == ("applied", "", "")
        tokens.append(done.rows[0].token)
        restore = RestoreBuffer(model=1, buffer=effect.buffer, job=effect.job, ticket=done.ticket)
        driven.ask(restore, BufferRestored)
        before = settle_rows("COMMIT", effect)
        effect = driven.job("decode", (row((tokens[-1],), start=length),), before=before)
        length += 1
    assert tokens == wanted


def test_the_answer_to_a_submit_comes_before_its_result(driven: DrivenDevice) -> None:
    seen = len(driven.posted)
    done = driven.complete(driven.job("prefill", (row((5, 6)),)))
    kinds = [one for one in driven.posted[seen:] if isinstance(one, SubmitAccepted | Completed)]
    assert [type(one) for one in kinds] == [SubmitAccepted, Completed]
    accepted = kinds[0]
    assert isinstance(accepted, SubmitAccepted)
    assert accepted.ticket == done.ticket
    assert done.times.submit_ns <= done.times.exec_begin_ns < done.times.exec_end_ns
    assert done.times.exec_end_ns <= done.times.visible_ns


def test_rows_of_a_batch_equal_the_same_rows_alone(driven: DrivenDevice) -> None:
    prompts = [(7, 8, 9), (100, 3), (11,)]
    alone = []
    for index, prompt in enumerate(prompts):
        effect = driven.job("prefill", (row(prompt, lane=index),))
        done = driven.complete(effect)
        driven.ask(
            RestoreBuffer(model=1, buffer=effect.buffer, job=effect.job, ticket=done.ticket),
            BufferRestored,
        )
        alone.append(done.rows[0])
        operations = settle_rows("COMMIT", effect)
        driven.ask(
            ApplyKv(model=1, epoch=EPOCH, generation=GENERATION, operations=operations), KvApplied
        )
    rows = tuple(
        row((alone[index].token,), lane=index, start=len(prompt), owner=index)
        for index, prompt in enumerate(prompts)
    )
    together = driven.complete(driven.job("decode", rows, batch=4)).rows
    assert len(together) == 3
    again = []
    for index, (prompt, first) in enumerate(zip(prompts, alone, strict=True)):
        lane = 4 + index
        effect = driven.job("prefill", (row((*prompt, first.token), lane=lane),))
        done = driven.complete(effect)
        driven.ask(
            RestoreBuffer(model=1, buffer=effect.buffer, job=effect.job, ticket=done.ticket),
            BufferRestored,
        )
        again.append(done.rows[0])
    assert [one.token for one in together] == [one.token for one in again]


def test_golden_rows_carry_a_verdict(driven: DrivenDevice) -> None:
    assert driven.facts is not None
    trial = driven.facts.trials[0]
    right = driven.job("prefill", (row(trial.prompt, owner=0, sampling=None),), origin="golden")
    result = driven.complete(right).rows[0]
    assert (result.token, result.verdict, result.fault) == (NO_TOKEN, "equal", "")
    wrong_tokens = (*trial.prompt[:-1], (trial.prompt[-1] + 1) % driven.facts.vocabulary)
    wrong = driven.job(
        "prefill",
        (row(wrong_tokens, lane=1, owner=0, sampling=None),),
        origin="golden",
        buffer=driven.buffer("prefill", number=1),
    )
    verdict = driven.complete(wrong).rows[0].verdict
    assert "logits differ" in verdict and "golden" in verdict


def test_a_forced_row_of_a_warm_up_gives_no_token(driven: DrivenDevice) -> None:
    effect = driven.job("prefill", (row((1, 2), sampling=None),), origin="warmup")
    result = driven.complete(effect).rows[0]
    assert (result.token, result.verdict) == (NO_TOKEN, "")


def test_a_restored_buffer_is_wiped(driven: DrivenDevice) -> None:
    effect = driven.job("prefill", (row((301, 302, 303)),))
    done = driven.complete(effect)
    arena = driven.device._models[1].buffers[effect.buffer].arena
    assert arena.view(0, (arena.byte_count,), np.uint8).any()
    driven.ask(
        RestoreBuffer(model=1, buffer=effect.buffer, job=effect.job, ticket=done.ticket),
        BufferRestored,
    )
    assert not arena.view(0, (arena.byte_count,), np.uint8).any()


def test_a_buffer_in_flight_is_not_restored_but_buried(driven: DrivenDevice) -> None:
    effect = driven.job("prefill", (row((1, 2, 3)),))
    need_still_time(driven.device)
    ticket = driven.submit(effect)
    restore = RestoreBuffer(model=1, buffer=effect.buffer, job=effect.job, ticket=ticket)
    failed = driven.ask(restore, RestoreFailed)
    assert "OBJECT_IN_FLIGHT" in failed.reason or failed.code == 0x0305
    assert driven.device.graveyard.item_count == 1
    seen = len(driven.posted)
    fault = driven.ask(driven.job("prefill", (row((4,), lane=1),)), DeviceFaulted)
    assert fault.kind == "call" and "not free" in fault.reason
    assert not any(isinstance(one, SubmitAccepted) for one in driven.posted[seen:])


def test_restoring_with_another_ticket_is_refused(driven: DrivenDevice) -> None:
    effect = driven.job("prefill", (row((1, 2, 3)),))
    done = driven.complete(effect)
    restore = RestoreBuffer(model=1, buffer=effect.buffer, job=effect.job, ticket=done.ticket + 1)
    assert driven.ask(restore, RestoreFailed).code == 0x0203
    right = RestoreBuffer(model=1, buffer=effect.buffer, job=effect.job, ticket=done.ticket)
    driven.ask(right, BufferRestored)
    assert driven.ask(right, RestoreFailed).code == 0x0203, "a ticket is retired once"


# ------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("epoch", "generation", "code"),
    [(EPOCH, GENERATION - 1, 0x0202), (EPOCH + 1, GENERATION, 0x0201)],
)
def test_a_stale_job_is_refused_before_anything_is_applied(
    driven: DrivenDevice, epoch: int, generation: int, code: int
) -> None:
    stale = driven.job("prefill", (row((1, 2, 3)),), epoch=epoch, generation=generation)
    assert driven.ask(stale, SubmitRefused).code == code
    assert driven.complete(driven.job("prefill", (row((1, 2, 3)),))).kv_effect == "applied"


def test_a_kv_list_fails_as_a_whole_and_nothing_is_submitted(driven: DrivenDevice) -> None:
    rows = (row((1, 2)), row((3,), lane=1))
    good = driven.job("prefill", rows, batch=4)
    wrong = replace(
        good,
        operations=(
            good.operations[0],
            replace(good.operations[1], from_tokens=5, to_tokens=6),
        ),
    )
    seen = len(driven.posted)
    failed = driven.ask(wrong, KvApplyFailed)
    assert (failed.job, failed.lane, failed.operation) == (good.job, LANE_FIRST + 1, "RESERVE")
    assert not failed.unknown
    assert not any(isinstance(one, SubmitAccepted | SubmitRefused) for one in driven.posted[seen:])
    assert len(driven.complete(good).rows) == 2, "the first reservation was not kept"


def test_operations_without_a_job_are_answered(driven: DrivenDevice) -> None:
    effect = driven.job("prefill", (row((1, 2, 3)),))
    done = driven.complete(effect)
    release = KvOperation(
        verb="RELEASE", lane=LANE_FIRST, from_tokens=3, to_tokens=3, transaction=0
    )
    apply = ApplyKv(
        model=1,
        epoch=EPOCH,
        generation=GENERATION,
        operations=(*settle_rows("ROLLBACK", effect), release),
    )
    assert driven.ask(apply, KvApplied).lanes == (LANE_FIRST, LANE_FIRST)
    failed = driven.ask(attrs.evolve(apply, operations=(release,)), KvApplyFailed)
    assert (failed.job, failed.lane, failed.operation) == (None, LANE_FIRST, "RELEASE")
    stale = driven.ask(attrs.evolve(apply, generation=1), KvApplyFailed)
    assert stale.code == 0x0202
    assert done.rows[0].token >= 0


def test_tokens_outside_the_vocabulary_are_refused_and_never_reach_the_device(
    driven: DrivenDevice,
) -> None:
    assert driven.facts is not None
    effect = driven.job("prefill", (row((1, driven.facts.vocabulary)),))
    refused = driven.ask(effect, SubmitRefused)
    assert refused.code == 0x0101 and "vocabulary" in refused.reason
    again = driven.job("prefill", (row((1, 2)),), before=settle_rows("ROLLBACK", effect))
    driven.complete(again)


def test_a_rejected_submit_leaves_the_reservation_to_be_rolled_back(
    open_driven: Open, calbin: str
) -> None:
    driven = open_driven(faults="fault a kind=submit_reject on=submit nth=1 code=0x0601")
    driven.load(calbin)
    effect = driven.job("prefill", (row((1, 2, 3)),))
    refused = driven.ask(effect, SubmitRefused)
    assert refused.code == 0x0601
    assert "SUBMIT_REJECTED (0x0601)" in refused.reason and "fault a" in refused.reason
    again = driven.job("prefill", (row((1, 2, 3)),), before=settle_rows("ROLLBACK", effect))
    assert driven.complete(again).kv_effect == "applied"


def test_faults_are_armed_when_the_model_is_published(open_driven: Open, calbin: str) -> None:
    driven = open_driven(faults="fault a kind=submit_reject on=submit nth=1")
    driven.validate(calbin)
    driven.configure()
    effect = driven.job("prefill", (row((1, 2, 3)),))
    done = driven.complete(effect)
    driven.ask(
        RestoreBuffer(model=1, buffer=effect.buffer, job=effect.job, ticket=done.ticket),
        BufferRestored,
    )
    driven.device.execute(PublishModel(model=1, generation=GENERATION))
    driven.ask(driven.job("prefill", (row((1,), lane=1),)), SubmitRefused)


def test_what_has_no_answer_becomes_a_fault(driven: DrivenDevice) -> None:
    operation = KvOperation(verb="RELEASE", lane=1, from_tokens=0, to_tokens=0, transaction=0)
    effect = ApplyKv(model=77, epoch=EPOCH, generation=GENERATION, operations=(operation,))
    fault = driven.ask(effect, DeviceFaulted)
    assert (fault.job, fault.kind) == (None, "call")
    assert "model/77" in fault.reason
    assert driven.complete(driven.job("prefill", (row((1,)),))).rows[0].token >= 0


# ------------------------------------------------------------------------ faults and hangs


@pytest.mark.parametrize(("quiesce", "kv"), [("y", "none"), ("n", "unknown"), ("n", "partial")])
def test_an_exception_brings_the_whole_record(
    open_driven: Open, calbin: str, quiesce: str, kv: str
) -> None:
    driven = open_driven(
        faults=f"fault a kind=ccu_exception on=exec nth=1 chip=1 code=77 pc=0x1234"
        f" quiesce={quiesce} kv={kv}"
    )
    driven.load(calbin)
    effect = driven.job("prefill", (row((1, 2, 3)),))
    fault = driven.run(effect, DeviceFaulted)
    assert (fault.job, fault.kind, fault.code) == (effect.job, "ccu", 0x0604)
    assert (fault.epoch, fault.generation) == (EPOCH, GENERATION)
    assert fault.quiescent is (quiesce == "y")
    assert fault.kv_effect == kv
    assert fault.record is not None
    assert (fault.record.chip, fault.record.code, fault.record.pc) == (1, 77, 0x1234)
    assert fault.health is not None
    assert dict(fault.health.counters)["failed"] == 1
    assert sum(fault.health.used_bytes) > 0
    assert not any(isinstance(one, Completed) for one in driven.posted)


@pytest.mark.parametrize("phase", ["h2d", "exec", "d2h"])
def test_a_hang_is_reported_stage_by_stage_and_each_once(
    open_driven: Open, calbin: str, phase: str
) -> None:
    driven = open_driven(faults=f"fault a kind=hang on={phase} nth=1 release=never")
    driven.load(calbin)
    limits = (2 * SECOND, 6 * SECOND, 60 * SECOND)
    effect = driven.job("prefill", (row((1, 2, 3)),), stall_ns=limits)
    driven.run(effect, JobStalled)
    driven.next(JobStalled, after=0, fits=lambda stalled: stalled.stage == "cap")
    stalls = [one for one in driven.posted if isinstance(one, JobStalled)]
    assert [stalled.stage for stalled in stalls] == ["suspect", "confirm", "cap"]
    assert {(stalled.job, stalled.phase) for stalled in stalls} == {(effect.job, phase)}
    for stalled, limit in zip(stalls[:2], limits[:2], strict=True):
        assert limit <= stalled.progress_age_ns <= stalled.age_ns < limit + SECOND // 1000
    assert limits[2] <= stalls[2].age_ns < limits[2] + SECOND // 1000
    progress = [one for one in driven.posted if isinstance(one, JobProgressed)]
    assert [one.phase for one in progress] == [phase]
    assert not driven.device.advance(), "nothing is to come after the cap"
    assert not any(isinstance(one, Completed | DeviceFaulted) for one in driven.posted)


def test_a_job_that_is_done_in_time_is_never_called_stalled(driven: DrivenDevice) -> None:
    need_still_time(driven.device)
    driven.complete(driven.job("prefill", (row((1, 2, 3)),), stall_ns=(50_000, 60_000, 70_000)))
    assert not any(isinstance(one, JobStalled | JobProgressed) for one in driven.posted)


def test_time_passes_no_further_than_asked(open_driven: Open) -> None:
    driven = open_driven()
    need_still_time(driven.device)
    now_ns = driven.device.clock.now_ns()
    assert driven.device.advance(now_ns + 5_000_000)
    assert driven.device.clock.now_ns() == now_ns + 5_000_000
    assert not driven.device.advance(None)
    assert not driven.device.advance(now_ns)


# ------------------------------------------------------------------------ the end


def test_closing_ends_the_device_and_keeps_the_clock(driven: DrivenDevice) -> None:
    driven.complete(driven.job("prefill", (row((1, 2, 3)),)))
    need_simulator(driven.device, "a clock that ends with the device")
    now_ns = driven.device.clock.now_ns()
    assert driven.ask(CloseDevice(abandon=False), DeviceClosed) == DeviceClosed(
        abandoned=False, reason=""
    )
    assert driven.device.clock.now_ns() == now_ns
    assert driven.device.graveyard.item_count == 0
    assert not driven.device.advance(None)
    driven.device.stop()
    driven.device.stop()


def test_closing_over_a_hung_job_keeps_its_memory(open_driven: Open, calbin: str) -> None:
    driven = open_driven(faults="fault a kind=hang on=exec nth=1 release=never")
    driven.load(calbin)
    driven.run(driven.job("prefill", (row((1, 2, 3)),)), JobStalled)
    closed = driven.ask(CloseDevice(abandon=False), DeviceClosed)
    assert not closed.abandoned
    assert driven.device.graveyard.item_count == 1


def test_an_abandoned_device_is_left_alone_with_all_its_memory(driven: DrivenDevice) -> None:
    submitted = driven.submit(driven.job("prefill", (row((1, 2, 3)),)))
    assert submitted > 0
    closed = driven.ask(CloseDevice(abandon=True), DeviceClosed)
    assert closed.abandoned
    assert driven.device.calls.closed
    assert driven.device.graveyard.item_count == len(driven.buffers) * 2
    driven.device.stop()


def test_two_runs_of_the_same_effects_post_the_same_inputs(calbin: str) -> None:
    def run() -> list[object]:
        driven = DrivenDevice(open_simulator(), threads=False)
        need_still_time(driven.device)
        driven.load(calbin)
        first_ticket = 0
        for index in range(4):
            effect = driven.job("prefill", (row((1, 2, 3 + index), lane=index),))
            done = driven.complete(effect)
            first_ticket = first_ticket or done.ticket
            restore = RestoreBuffer(
                model=1, buffer=effect.buffer, job=effect.job, ticket=done.ticket
            )
            driven.ask(restore, BufferRestored)
        driven.device.stop()
        # Tickets and generations are numbered over the process, everything else must be the same.
        return [
            attrs.evolve(one, ticket=one.ticket - first_ticket)
            if isinstance(one, SubmitAccepted | Completed)
            else attrs.evolve(one, device_generation=0)
            if isinstance(one, ModelConfigured)
            else one
            for one in driven.posted
        ]

    first, second = run(), run()
    assert first == second
    assert len(first) > 12


@pytest.mark.parametrize("threads", [False, True])
def test_the_same_tokens_when_time_runs_by_itself(
    threads: bool, calbin: str, golden: dict[str, np.ndarray]
) -> None:
    driven = DrivenDevice(open_simulator(clock="real", scale="10"), threads=threads)
    driven.load(calbin)
    prompt = tuple(int(token) for token in golden["prompt_1"])
    done = driven.complete(driven.job("prefill", (row(prompt),)))
    assert done.rows[0].token == int(golden["greedy_1"][0])
    assert driven.ask(CloseDevice(abandon=False), DeviceClosed).reason == ""
    driven.device.stop()


def test_buffers_of_two_tasks_have_numbers_of_their_own(driven: DrivenDevice) -> None:
    numbers = sorted(driven.device._models[1].buffers)
    assert numbers == list(range(BUFFER_FIRST, BUFFER_FIRST + 2 * len(driven.buffers)))
    addresses = {b.arena.address for b in driven.device._models[1].buffers.values()}
    assert len(addresses) == len(numbers)


def test_a_failure_while_waiting_ends_every_job_once(
    driven: DrivenDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*, timeout_ns: int) -> bool:
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(driven.device._waiting, "collect", fail)
    effect = driven.job("prefill", (row((1, 2, 3)),))
    fault = driven.run(effect, DeviceFaulted)
    assert (fault.job, fault.kind, fault.code) == (effect.job, "call", 0x0F01)
    assert "RuntimeError: not foreseen" in fault.reason
    assert driven.device._waiting.tickets == ()


def test_output_that_cannot_be_read_ends_the_job_once(
    driven: DrivenDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(driven.device._waiting._results, "read", fail)
    fault = driven.run(driven.job("prefill", (row((1, 2, 3)),)), DeviceFaulted)
    assert fault.kind == "call" and fault.quiescent and fault.kv_effect == "applied"
    assert fault.health is not None
    assert sum(isinstance(one, DeviceFaulted) for one in driven.posted) == 1


def test_abnormal_numbers_are_a_fault_of_their_row(
    driven: DrivenDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = driven.device._waiting._results.read

    def spoil(
        effect: SubmitJob, model: LoadedModel, buffer: Buffer, *given: Prepared | None
    ) -> tuple[RowResult, ...]:
        logits = buffer.output("logits")
        assert logits is not None
        logits.reshape(4, -1)[1, 17] = 0x7FC0
        return read(effect, model, buffer, *given)

    monkeypatch.setattr(driven.device._waiting._results, "read", spoil)
    rows = tuple(row((1, 2, 3), lane=lane, owner=lane) for lane in range(3))
    results = driven.complete(driven.job("prefill", rows, batch=4)).rows
    assert [result.fault for result in results] == ["", "numeric", ""]
    assert results[1].token == NO_TOKEN
    assert results[0].token == results[2].token >= 0
