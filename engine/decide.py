"""Decide what follows from one input: one match statement, one function for each input.

``decide`` is deterministic and does no IO: the same state and input give the same events and
effects, which is what ``journal verify`` proves. It is total over the inputs: operating errors are
events and effects, an exception is a bug. It advances the state it is given, through ``evolve``
alone; callers that need the old value copy it first. Every decision ends with ``settle``: what
became idle is unloaded or closed, and the device gets its next job in the same step.
"""

from typing import assert_never

from laneway.engine import (
    admission,
    canaries,
    closing,
    completing,
    counting,
    ending,
    faulting,
    health,
    loading,
    recovering,
    starting,
    submitting,
    trusting,
    unloading,
)
from laneway.engine.draft import Decision, Draft
from laneway.engine.evolve import begin_step
from laneway.engine.inputs import (
    ArtifactRefused,
    ArtifactValidated,
    BufferRestored,
    CancelRequested,
    CancelTold,
    CapabilitiesLost,
    CloseRequested,
    Completed,
    ConfigureFailed,
    CountersRead,
    DeviceClosed,
    DeviceFaulted,
    EngineStarted,
    HealthProbed,
    InboxOverflowed,
    Input,
    JobProgressed,
    JobStalled,
    KvApplied,
    KvApplyFailed,
    LoadBackRequested,
    LoadRequested,
    MemoryBuried,
    ModelConfigured,
    ModelReleased,
    ReleaseFailed,
    ReplaceRequested,
    RequestSubmitted,
    ResetFinished,
    RestoreFailed,
    StatusDoubted,
    SubmitAccepted,
    SubmitDoubtful,
    SubmitRefused,
    SubmitWithdrawn,
    ThrottleTold,
    TimePassed,
    UnloadRequested,
)
from laneway.engine.planning import plan
from laneway.engine.state import State


def decide(state: State, taken: Input, at_ns: int) -> Decision:
    """Take one input at engine time ``at_ns``.

    Return events and effects, and leave the state after them.
    """
    begin_step(state, taken, at_ns)
    draft = Draft(state, taken)
    _dispatch(draft, taken)
    settle(draft)
    return draft.decision()


def settle(draft: Draft) -> None:
    """Let every decision end the same way.

    Conclude what golden runs cannot decide, release what is idle, go on with a recovery, close if
    all is done, plan the next job, compare counters and ask for the health when it is due.
    """
    canaries.settle_runs(draft)
    unloading.unload_if_idle(draft)
    recovering.advance(draft)
    closing.shut_if_idle(draft)
    plan(draft)
    counting.ask_if_due(draft)
    health.ask_if_due(draft)


def _dispatch(draft: Draft, taken: Input) -> None:
    match taken:
        case Completed():
            completing.complete(draft, taken)
        case BufferRestored():
            completing.restore(draft, taken)
        case SubmitAccepted():
            submitting.accept(draft, taken)
        case RequestSubmitted():
            admission.admit(draft, taken)
        case CancelRequested():
            ending.cancel(draft, taken)
        case TimePassed():
            ending.expire(draft)
            faulting.expire_recalls(draft)
            unloading.reread(draft)
        case SubmitRefused():
            submitting.refuse(draft, taken)
        case SubmitDoubtful():
            submitting.doubt(draft, taken)
        case SubmitWithdrawn():
            submitting.withdraw(draft, taken)
        case KvApplyFailed():
            submitting.refuse_kv(draft, taken)
        case JobProgressed():
            submitting.progress(draft, taken)
        case RestoreFailed():
            faulting.restore_failed(draft, taken)
        case DeviceFaulted():
            faulting.fault(draft, taken)
        case JobStalled():
            faulting.stall(draft, taken)
        case CancelTold():
            faulting.recall_told(draft, taken)
        case StatusDoubted():
            trusting.doubt_status(draft, taken)
        case HealthProbed():
            unloading.judge_reread(draft, taken)
            health.probed(draft, taken)
        case CountersRead():
            counting.compare(draft, taken)
        case MemoryBuried():
            faulting.buried(draft, taken)
        case ResetFinished():
            recovering.reset_finished(draft, taken)
        case CapabilitiesLost():
            recovering.capabilities_lost(draft, taken)
        case LoadRequested():
            loading.load(draft, taken)
        case ReplaceRequested():
            loading.replace(draft, taken)
        case LoadBackRequested():
            loading.load_back(draft, taken)
        case ArtifactValidated():
            loading.validated(draft, taken)
        case ArtifactRefused():
            loading.refused(draft, taken)
        case ModelConfigured():
            loading.configured(draft, taken)
        case ConfigureFailed():
            loading.configure_failed(draft, taken)
        case UnloadRequested():
            unloading.drain(draft, taken.model)
        case ModelReleased():
            unloading.released(draft, taken)
        case ReleaseFailed():
            unloading.release_failed(draft, taken)
        case EngineStarted():
            starting.start(draft, taken)
        case CloseRequested():
            closing.close(draft, taken)
        case DeviceClosed():
            closing.closed(draft, taken)
        case KvApplied() | InboxOverflowed() | ThrottleTold():
            pass  # recorded for the reader, and taken note of; nothing follows
        case _:
            assert_never(taken)
