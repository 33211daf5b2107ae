"""The closed set of everything the engine can ask of the world.

Effects are carried out after the step that decided them is durable, in the order decided. What the
device is asked carries job, epoch and generation, and answers quote them. Every device effect but
PublishModel and ForeseeJob has exactly one answer, an input; the two client effects (Deliver,
Conclude) have none. LoadBack is the shell's, which answers it. ForeseeJob belongs to no step.
"""

import attrs
import msgspec

from laneway.engine.inputs import Trial
from laneway.engine.sampling import Sampling


class KvOperation(msgspec.Struct, frozen=True, gc=False):
    """One operation on a lane of the device bank; ``verb`` is RESERVE, COMMIT, ROLLBACK or RELEASE.

    ``transaction`` is the number of the job that reserves.
    """

    verb: str
    lane: int
    from_tokens: int
    to_tokens: int
    transaction: int


class SubmitRow(msgspec.Struct, frozen=True, gc=False):
    """One row of a job: the tokens of one sequence, run from position ``start`` on.

    ``owner`` is a request number, or the index of a trial for golden and warm-up jobs. ``sampling``
    is None where nothing is sampled. The sampled token's absolute position is ``start +
    len(tokens)``; among its request's generated tokens it is number ``generated``.

    ``prompt`` and ``output`` are the request's tokens so far, empty where its penalties do not look
    at them; ``masked`` must not be drawn, because the request may not end yet; ``logprobs`` as in
    RequestSubmitted. ``searched``: its text is searched for stop strings, so the token has to be
    pushed when it is drawn; else it is when it is delivered, and the device waits for none of it.
    """

    lane: int
    owner: int
    tokens: tuple[int, ...]
    start: int
    sampling: Sampling | None
    generated: int = 0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    masked: tuple[int, ...] = ()
    logprobs: int | None = None
    searched: bool = False


class SubmitJob(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Apply ``operations`` once, fill the buffer, submit.

    Answer: SubmitAccepted, SubmitRefused, SubmitDoubtful, KvApplyFailed.

    After acceptance: Completed, DeviceFaulted or JobStalled when age and lack of progress pass the
    given times (E16).
    """

    job: int
    model: int
    epoch: int
    generation: int
    buffer: int
    task: str
    origin: str
    operations: tuple[KvOperation, ...]
    rows: tuple[SubmitRow, ...]
    suspect_after_ns: int
    confirm_after_ns: int
    cap_after_ns: int
    places: tuple[int, ...] = ()
    """Where rows are fixed to lanes, the place of each in the batch, rising; else row i is at i."""

    @property
    def batch_rows(self) -> tuple[SubmitRow | None, ...]:
        """The rows by their place in the batch, up to the last; None is an inactive row (E15)."""
        if not self.places:
            return self.rows
        at = dict(zip(self.places, self.rows, strict=True))
        return tuple(at.get(place) for place in range(max(at) + 1))


class ForeseeJob(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Get ready for a job that will most likely follow the one in flight. No answer.

    ``submit`` is right but for its tokens, which are 0, and what the sampler needs. It may never
    come, or come otherwise. Only an EagerPort is asked (ports.py).
    """

    submit: SubmitJob


@attrs.frozen(kw_only=True)
class ApplyKv:
    """Apply operations on lanes that have no next job. Answer: KvApplied or KvApplyFailed."""

    model: int
    epoch: int
    generation: int
    operations: tuple[KvOperation, ...]


@attrs.frozen(kw_only=True)
class CancelJob:
    """Ask the device to end a job that hangs (rung 3). Answer: CancelTold.

    What becomes of the job is told as of any other: it may still be done.
    """

    job: int
    ticket: int


class RestoreBuffer(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Retire the ticket, restore and wipe the buffer (E4).

    Answer: BufferRestored or RestoreFailed.
    """

    model: int
    buffer: int
    job: int
    ticket: int


@attrs.frozen(kw_only=True)
class ValidateArtifact:
    """Check the artifact on the host, off the device threads (E20a).

    Answer: ArtifactValidated or ArtifactRefused. ``check``: keep nothing of it, another model has
    the device.
    """

    model: int
    source: str
    check: bool = False


@attrs.frozen(kw_only=True)
class BufferPlan:
    """Buffers to create for one submodel: numbers ``first .. first + count - 1``."""

    submodel: str
    task: str
    first: int
    count: int


@attrs.frozen(kw_only=True)
class ConfigureModel:
    """Configure the device, open the bank, create the buffers.

    Answer: ModelConfigured or ConfigureFailed.

    Lanes are numbered ``lane_first .. lane_first + lane_count - 1``; the device's own index is the
    offset. ``trials`` lets the adapter know what the golden jobs of this generation will run.
    ``again``: a reset ended the generation before; what is left of it is given up, memory that the
    device may still write to is kept for good, and the same artifact is configured anew.
    """

    model: int
    epoch: int
    generation: int
    lane_first: int
    lane_count: int
    buffers: tuple[BufferPlan, ...]
    trials: tuple[Trial, ...]
    timeout_ns: int
    again: bool = False


@attrs.frozen(kw_only=True)
class PublishModel:
    """The model is ready: tell the adapter (fault rules are armed from here). No answer."""

    model: int
    generation: int


@attrs.frozen(kw_only=True)
class ReleaseModel:
    """Release bank, buffers and calbin after everything decided before.

    Answer: ModelReleased or ReleaseFailed.
    """

    model: int
    generation: int


@attrs.frozen(kw_only=True)
class ProbeHealth:
    """Ask the device for its health. Answer: HealthProbed."""


@attrs.frozen(kw_only=True)
class ReadCounters:
    """Read the device's counters between submits. Answer: CountersRead, which quotes ``asked``.

    ``asked`` is what the engine counts now: submitted, finished, failed, aborted.
    """

    asked: tuple[int, ...]


@attrs.frozen(kw_only=True)
class RunReset:
    """Reset the device at a level: 1 CCU, 2 configuration, 3 memory, 4 device.

    Answer: ResetFinished.

    ``cause`` is the code of the fault that led to it, 0 if there was none.
    """

    level: int
    cause: int
    reason: str
    timeout_ns: int


@attrs.frozen(kw_only=True)
class CloseDevice:
    """Close the device; ``abandon``: make no call that could hang on a wedged device (D13).

    Answer: DeviceClosed.
    """

    abandon: bool


@attrs.frozen(kw_only=True)
class LoadBack:
    """Load what served an alias before ``instead_of`` failed to. Answer: LoadBackRequested.

    Why the shell is asked: it gives the numbers of models (decision 9).
    """

    alias: str
    source: str
    sha256: str
    instead_of: int


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """Hand one durable token of a request to its client.

    ``position`` counts generated tokens from 0.
    """

    request: int
    position: int
    token: int
    logprobs: tuple[tuple[int, float], ...] = ()


@attrs.frozen(kw_only=True)
class Conclude:
    """Tell a client its one ending.

    ``finish_reason`` is stop, length, cancelled, deadline or error. ``kind`` names the error
    (``RejectReason`` value or fault); "" when it ended well. From ``suspect_tokens_from`` on the
    device's numbers were in doubt when its tokens were made, None: nowhere (decision 15). From
    ``continued_tokens_from`` on they were made after a fault or a restart, and nothing promises
    that they are those of a run without it.
    """

    request: int
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    kind: str = ""
    message: str = ""
    http_status: int = 200
    retry_after_ns: int | None = None
    admitted: bool = True
    suspect_tokens_from: int | None = None
    continued_tokens_from: int | None = None


DeviceEffect = (
    SubmitJob
    | ForeseeJob
    | ApplyKv
    | CancelJob
    | RestoreBuffer
    | ValidateArtifact
    | ConfigureModel
    | PublishModel
    | ReleaseModel
    | ProbeHealth
    | ReadCounters
    | RunReset
    | CloseDevice
)
ClientEffect = Deliver | Conclude
ShellEffect = LoadBack
Effect = DeviceEffect | ClientEffect | ShellEffect
