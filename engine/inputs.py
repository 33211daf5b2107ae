"""The closed set of everything that can happen to the engine.

If it is not a class here it cannot change anything. Inputs are values: integers, floats, strings,
tuples and the frozen values below; logits and text never travel in them. Field order is the
journal's wire order (journal/codec.py, version per kind): a field is added at the end with a new
version, never moved.

Numbers are the engine's own (decision 9): model, request, job, buffer and lane are
numbered over the whole journal; ``ticket``, ``device_epoch`` and ``device_generation`` are the
device's words for them.
"""

from collections.abc import Mapping
from functools import cached_property

import attrs
import msgspec

from laneway.engine.evidence import Capability, Grant
from laneway.engine.limits import Limits
from laneway.engine.sampling import Sampling

NO_TOKEN = -1


@attrs.frozen(kw_only=True)
class ChipFacts:
    """One chip: memory in bytes as the device accounts it."""

    total_bytes: int
    used_bytes: int


@attrs.frozen(kw_only=True)
class DeviceFacts:
    """What the device says of itself when opened; versions are part of any fingerprint (E24).

    ``inflight_max`` and ``chunked_prefill`` are the device's own word until ``capability.grant``
    made them what the evidence allows with the best calbin; ``grants`` has it for each calbin.
    ``proven`` names the capabilities that a simulator's conformance tests prove (G22).
    ``backend_kind`` is the kind of library, ``backend`` its name.
    """

    url: str
    backend: str
    product: str
    serial: str
    runtime_version: str
    driver_version: str
    firmware_version: str
    device_epoch: int
    inflight_max: int
    chips: tuple[ChipFacts, ...]
    capabilities: tuple[Capability, ...] = ()
    backend_kind: str = ""
    backend_version: str = ""
    chip_mask: int = 0
    proven: tuple[str, ...] = ()
    grants: tuple[Grant, ...] = ()
    chunked_prefill: bool = False
    """Whether a prompt may be run in parts, where the submodel takes them (R5.5)."""
    counters: tuple[tuple[str, int], ...] = ()
    """What its counters said when it was opened; those it does not tell are left out."""

    @cached_property
    def granted(self) -> Mapping[str, Mapping[str, Grant]]:
        """The grants by calbin, then by feature."""
        calbins = dict.fromkeys(each.calbin_sha256 for each in self.grants)
        return {
            sha256: {each.feature: each for each in self.grants if each.calbin_sha256 == sha256}
            for sha256 in calbins
        }


@attrs.frozen(kw_only=True)
class EngineStarted:
    """A new incarnation opens: wall-clock anchor, code, limits and device (decision 9)."""

    wall_clock_ns: int
    code_version: str
    journal_tokens: str
    limits: Limits
    device: DeviceFacts


@attrs.frozen(kw_only=True)
class LoadRequested:
    """Somebody wants the artifact at ``source`` served as ``alias``."""

    model: int
    alias: str
    source: str


@attrs.frozen(kw_only=True)
class ReplaceRequested:
    """Somebody wants the artifact at ``source`` in the place of what serves ``alias``."""

    model: int
    alias: str
    source: str


@attrs.frozen(kw_only=True)
class LoadBackRequested:
    """The shell has a number for a load that the engine asked for: of what served before.

    ``sha256`` is what the artifact at ``source`` must be; ``instead_of`` is the model that failed.
    """

    model: int
    alias: str
    source: str
    sha256: str
    instead_of: int


@attrs.frozen(kw_only=True)
class SubmodelFacts:
    """One compiled graph of a calbin: task is ``prefill`` or ``decode``."""

    name: str
    task: str
    batch_max: int
    tokens_max: int
    incremental: bool = False
    """Whether a prefill may begin behind tokens that the lane already holds."""
    fixed_rows: bool = False
    """Whether row i of a batch is lane i, or lane i behind a multiple of the batch (E15)."""


@attrs.frozen(kw_only=True)
class Trial:
    """A fixed sequence that runs before a model is ready: prompt, then forced tokens.

    ``origin`` is ``golden`` (logits are compared) or ``warmup`` (output is thrown away). It runs in
    ``batch`` lanes at once, all with the same tokens, through the submodels of that batch.
    """

    origin: str
    prompt: tuple[int, ...]
    forced: tuple[int, ...]
    batch: int = 1


@attrs.frozen(kw_only=True)
class ArtifactValidated:
    """The artifact is good on the host (E20a): what it is, and what it needs."""

    model: int
    name: str
    sha256: str
    architecture: str
    layout: str
    lane_rule: str
    context_tokens: int
    vocabulary: int
    lane_count: int
    end_tokens: tuple[int, ...]
    submodels: tuple[SubmodelFacts, ...]
    chip_bytes: tuple[int, ...]
    chips: tuple[ChipFacts, ...]
    trials: tuple[Trial, ...]

    @cached_property
    def tasks(self) -> Mapping[str, tuple[SubmodelFacts, ...]]:
        """The submodels by task, smallest batch first."""
        ordered = sorted(self.submodels, key=lambda one: (one.batch_max, one.tokens_max))
        return {
            task: tuple(one for one in ordered if one.task == task)
            for task in ("prefill", "decode")
        }

    @cached_property
    def by_name(self) -> Mapping[str, SubmodelFacts]:
        """The submodels by name."""
        return {one.name: one for one in self.submodels}


@attrs.frozen(kw_only=True)
class ArtifactRefused:
    """The artifact was not accepted on the host; the device was not touched."""

    model: int
    reason: str


@attrs.frozen(kw_only=True)
class ModelConfigured:
    """The device is configured, the KV bank open, the buffers created."""

    model: int
    device_generation: int
    device_epoch: int
    duration_ns: int
    used_bytes_before: tuple[int, ...]
    used_bytes_after: tuple[int, ...]


@attrs.frozen(kw_only=True)
class ConfigureFailed:
    """The device refused the configuration, or a bank or buffer could not be made."""

    model: int
    code: int
    reason: str


@attrs.frozen(kw_only=True)
class ModelReleased:
    """The device gave the model back; memory and health are what was read afterwards (E22)."""

    model: int
    used_bytes: tuple[int, ...]
    healthy: bool


@attrs.frozen(kw_only=True)
class ReleaseFailed:
    """The device did not give the model back."""

    model: int
    code: int
    reason: str


@attrs.frozen(kw_only=True)
class UnloadRequested:
    """Somebody wants the model gone: drain it, then release it."""

    model: int


@attrs.frozen(kw_only=True)
class RequestSubmitted:
    """A client wants tokens.

    ``deadline_ns`` is engine time; ``sampling.seed`` is never None here. ``model`` is the one that
    the alias stood for when the tokens were made, 0 for none. ``logprobs``: how many of
    the most likely tokens are told beside each token's own log-probability, None for neither.
    Before ``min_tokens`` nothing but ``max_tokens`` ends the answer. A lower ``priority`` goes
    first; ``tenant`` is who shares the device fairly with others. ``on_fault`` is ``continue`` or
    ``fail``.
    """

    request: int
    alias: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool
    deadline_ns: int | None
    client_id: str | None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    model: int = 0
    priority: int = 0
    tenant: str = ""
    on_fault: str = "continue"


@attrs.frozen(kw_only=True)
class CancelRequested:
    """The client does not want the request any more."""

    request: int


@attrs.frozen(kw_only=True)
class TimePassed:
    """The clock reached an instant that the engine waits for (a deadline, a back-off)."""


@attrs.frozen(kw_only=True)
class InboxOverflowed:
    """Inputs of callers were refused because the inbox was full; each caller was told."""

    count: int


@attrs.frozen(kw_only=True, weakref_slot=False)
class SubmitAccepted:
    """The device took the job."""

    job: int
    ticket: int


@attrs.frozen(kw_only=True)
class SubmitRefused:
    """Nothing was queued; the device is as before, but the job's KV operations were applied."""

    job: int
    code: int
    reason: str


@attrs.frozen(kw_only=True)
class SubmitDoubtful:
    """The submit failed after it may have queued (D6)."""

    job: int
    ticket: int
    code: int
    reason: str


@attrs.frozen(kw_only=True)
class SubmitWithdrawn:
    """A job was taken back before it was handed over, since the device may not be given work (G2).

    Nothing of it reached the device.
    """

    job: int


@attrs.frozen(kw_only=True)
class KvApplyFailed:
    """A KV operation list was not applied; the bank is as before, unless ``unknown``.

    ``job`` is the job that was to be submitted with it (nothing was), or None for a list of its
    own. ``lane`` and ``operation`` name the operation that failed; ``lanes`` are those of the whole
    list, of which nothing certain is known where it ended ``unknown``.
    """

    job: int | None
    lane: int
    operation: str
    code: int
    unknown: bool
    reason: str
    lanes: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class KvApplied:
    """A KV operation list without a job was applied."""

    lanes: tuple[int, ...]


@attrs.frozen(kw_only=True)
class JobProgressed:
    """A job that takes long was seen in a phase (``h2d``, ``exec``, ``d2h``)."""

    job: int
    ticket: int
    phase: str


@attrs.frozen(kw_only=True, weakref_slot=False)
class JobTimes:
    """Instants of one job on the device clock in ns, 0 where the device does not tell."""

    submit_ns: int = 0
    accept_ns: int = 0
    h2d_begin_ns: int = 0
    h2d_end_ns: int = 0
    exec_begin_ns: int = 0
    exec_end_ns: int = 0
    d2h_begin_ns: int = 0
    d2h_end_ns: int = 0
    visible_ns: int = 0
    postprocess_ns: int = 0
    """Duration of turning logits into tokens; in time of the host, unless the device is stepped."""


class RowResult(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What one row of a done job gave.

    ``token`` is NO_TOKEN where nothing is sampled (forced rows) or ``fault`` is set. ``fault`` is
    "" or ``numeric`` (the device's numbers are abnormal, R14.5) or ``parameters`` (the request's
    own parameters leave no token, G17). ``verdict`` is "" or, for golden rows, ``equal`` or what
    differs. ``logprobs``, if asked for, are (token, log-probability) before anything is adjusted:
    the token's own, then the most likely in order.
    """

    token: int
    stop_hit: bool = False
    fault: str = ""
    verdict: str = ""
    kv_digest: int | None = None
    logprobs: tuple[tuple[int, float], ...] = ()


@attrs.frozen(kw_only=True, weakref_slot=False)
class Completed:
    """A job is terminal and done with valid output; logits are already tokens."""

    job: int
    ticket: int
    epoch: int
    generation: int
    flags: int
    kv_effect: str
    engine_slot: int
    rows: tuple[RowResult, ...]
    times: JobTimes


@attrs.frozen(kw_only=True)
class CcuRecord:
    """The device's exception record (CAP_CCU_RECORD)."""

    chip: int
    ccu: int
    code: int
    subcode: int
    task_index: int
    cmd_index: int
    pc: int
    text: str


@attrs.frozen(kw_only=True)
class HealthFacts:
    """What the device says of its health, memory and counters at one instant (decision 16)."""

    state: str
    device_epoch: int
    sticky: int
    advised: int
    observed_ns: int
    last_progress_ns: int
    used_bytes: tuple[int, ...]
    counters: tuple[tuple[str, int], ...]


@attrs.frozen(kw_only=True)
class DeviceFaulted:
    """A job ended badly, or the device did: everything that is known of it (decision 16, E27).

    ``job`` is None when no job is to blame. ``kind`` is ``ccu``, ``dma``, ``numeric``, ``aborted``,
    ``lost``, ``device`` or ``call`` (a device call failed that must not fail).
    """

    job: int | None
    ticket: int
    epoch: int
    generation: int
    kind: str
    code: int
    quiescent: bool
    kv_effect: str
    reason: str
    record: CcuRecord | None
    health: HealthFacts | None


@attrs.frozen(kw_only=True)
class JobStalled:
    """A job has had no result for a time the engine named (E16).

    It was polled once more before this was said.

    ``stage`` is ``suspect``, ``confirm`` or ``cap``.
    """

    job: int
    ticket: int
    stage: str
    phase: str
    age_ns: int
    progress_age_ns: int


@attrs.frozen(kw_only=True)
class CancelTold:
    """What the device said when it was asked to end a job: ``code`` 0 is no more than noted."""

    job: int
    ticket: int
    code: int
    reason: str


@attrs.frozen(kw_only=True)
class StatusDoubted:
    """What the device says of a job's state contradicts itself; each kind is said once a job.

    ``kind`` is ``backwards`` (a poll showed a phase before one already shown), ``early`` (a poll
    showed an end, and there is no result) or ``missed`` (a poll found an end that no wait had told
    of). ``before`` and ``shown`` are phases.
    """

    job: int
    ticket: int
    kind: str
    before: str
    shown: str


@attrs.frozen(kw_only=True)
class HealthProbed:
    """The answer to a health probe; None when the device did not answer."""

    health: HealthFacts | None
    reason: str


@attrs.frozen(kw_only=True)
class CapabilitiesLost:
    """What the device said it can when it was opened and does not say any more after a reset.

    Told before the report of that reset, and only where something is missing.
    """

    names: tuple[str, ...]


@attrs.frozen(kw_only=True)
class ThrottleTold:
    """Which chips run slower now because of their heat; told when that has changed."""

    chips: tuple[int, ...]


@attrs.frozen(kw_only=True, weakref_slot=False)
class BufferRestored:
    """Ticket retired, slices and tensors restored, memory wiped (E4)."""

    buffer: int
    job: int


@attrs.frozen(kw_only=True)
class RestoreFailed:
    """The buffer could not be brought back to a clean state: it must not be used again."""

    buffer: int
    job: int
    code: int
    reason: str


@attrs.frozen(kw_only=True)
class CountersRead:
    """The device's counters by name (E14); those it does not tell are left out.

    They were read after everything asked for before, and before any later submit. ``asked`` is what
    the engine counted when it asked.
    """

    asked: tuple[int, ...]
    counters: tuple[tuple[str, int], ...]


@attrs.frozen(kw_only=True)
class MemoryBuried:
    """Host memory is kept for good, because a device may still write to it (E9).

    The counts are those of the whole process, of devices before this one too.
    """

    item_count: int
    byte_count: int


@attrs.frozen(kw_only=True)
class ResetFinished:
    """What a reset did, as observed (E27): ``code`` 0 says no more than that the call came back.

    Flags of the report: ``quiesced`` (no DMA any more), ``verified`` (the device was asked again),
    ``wider`` (it did more than it was asked to). ``claimed`` and ``effects`` are bits of the ABI:
    what the level claims to do, what was seen. ``health`` is None when the device did not answer.
    """

    level: int
    code: int
    reason: str
    quiesced: bool
    verified: bool
    wider: bool
    epoch_before: int
    epoch_after: int
    claimed: int
    effects: int
    jobs_aborted: int
    jobs_unaccounted: int
    duration_ns: int
    used_bytes_before: tuple[int, ...]
    used_bytes_after: tuple[int, ...]
    health_before: HealthFacts | None
    health: HealthFacts | None
    runtime_version: str
    driver_version: str
    firmware_version: str


@attrs.frozen(kw_only=True)
class CloseRequested:
    """Close the engine.

    With ``drain`` after what is admitted is done, else after what is in flight.
    """

    drain: bool


@attrs.frozen(kw_only=True)
class DeviceClosed:
    """The device handle is closed, or was left alone because closing it is not safe (D13)."""

    abandoned: bool
    reason: str


Input = (
    EngineStarted
    | LoadRequested
    | ReplaceRequested
    | LoadBackRequested
    | ArtifactValidated
    | ArtifactRefused
    | ModelConfigured
    | ConfigureFailed
    | ModelReleased
    | ReleaseFailed
    | UnloadRequested
    | RequestSubmitted
    | CancelRequested
    | TimePassed
    | InboxOverflowed
    | SubmitAccepted
    | SubmitRefused
    | SubmitDoubtful
    | SubmitWithdrawn
    | KvApplyFailed
    | KvApplied
    | JobProgressed
    | Completed
    | DeviceFaulted
    | JobStalled
    | CancelTold
    | StatusDoubted
    | HealthProbed
    | CapabilitiesLost
    | ThrottleTold
    | BufferRestored
    | RestoreFailed
    | CountersRead
    | MemoryBuried
    | ResetFinished
    | CloseRequested
    | DeviceClosed
)
