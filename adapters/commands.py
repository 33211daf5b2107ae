"""Carry out what changes the device: KV operations, submits, restores, configure, release, close.

One thread (or ``step``) runs these in the order in which they were asked for, so an operation can
rely on everything before it, and configure, release and close are barriers behind it (E23). Each
ends in exactly one answer; a refusal of the device is an answer, never an exception.

Order of posts: the answer to a submit is posted before its ticket is waited for, so a completion
never overtakes it here.
"""

import ctypes
import logging
from collections.abc import Callable, MutableMapping

from laneway.adapters import npurt
from laneway.adapters.arena import Graveyard
from laneway.adapters.binding import Answer
from laneway.adapters.buffers import (
    Buffer,
    bury_buffer,
    create_buffer,
    destroy_buffer,
)
from laneway.adapters.calls import DeviceCalls
from laneway.adapters.facts import read_counters, read_health
from laneway.adapters.foreseeing import Foreseen, foresee, put_tokens, write
from laneway.adapters.loaded import DeviceOperations, Generation, LoadedModel
from laneway.adapters.resetting import (
    give_up_generation,
    is_quiescent,
    read_lost_capabilities,
    run_reset,
)
from laneway.adapters.validating import create_calbin
from laneway.adapters.waiting import Flight, Waiting
from laneway.engine.clock import Clock
from laneway.engine.effects import (
    ApplyKv,
    CancelJob,
    ConfigureModel,
    KvOperation,
    PublishModel,
    ReadCounters,
    ReleaseModel,
    RestoreBuffer,
    RunReset,
    SubmitJob,
)
from laneway.engine.errors import DeviceError, InternalError, ModelError
from laneway.engine.evidence import Capability
from laneway.engine.inputs import (
    BufferRestored,
    CancelTold,
    CapabilitiesLost,
    ConfigureFailed,
    CountersRead,
    DeviceFaulted,
    Input,
    KvApplied,
    KvApplyFailed,
    ModelConfigured,
    ModelReleased,
    ReleaseFailed,
    RestoreFailed,
    SubmitAccepted,
    SubmitDoubtful,
    SubmitRefused,
)

LOG = logging.getLogger("laneway.adapters.commands")
EXCLUSIVE_TIMEOUT_S = 10.0


class Commands:
    """The handlers of everything that changes a device; one thread at a time."""

    def __init__(
        self,
        calls: DeviceCalls,
        clock: Clock,
        waiting: Waiting,
        models: MutableMapping[int, LoadedModel],
        graveyard: Graveyard,
        *,
        chips: tuple[int, ...],
        index: int,
        device_epoch: int,
        capabilities: tuple[Capability, ...],
        post: Callable[[Input], None],
    ) -> None:
        self._capabilities = capabilities
        self._index = index
        self._device_epoch = device_epoch
        self._calls = calls
        self._clock = clock
        self._waiting = waiting
        self._models = models
        self._graveyard = graveyard
        self._chips = chips
        self._post = post
        self._foreseen: Foreseen | None = None

    # -------------------------------------------------------------------------- jobs

    def foresee(self, job: SubmitJob) -> None:
        """Get a buffer ready for a job that may come; nothing depends on it."""
        self._drop_foreseen()
        model = self._models.get(job.model)
        if model is None or model.current is None:
            return
        buffer = model.buffers.get(job.buffer)
        is_stale = model.stale_code(epoch=job.epoch, generation=job.generation) is not None
        if is_stale or buffer is None or not buffer.is_free or buffer.submodel.tokens_max != 1:
            return
        try:
            self._foreseen = foresee(model, model.current, buffer, job)
        except Exception as error:
            # The same is met at its submit, and told there.
            LOG.warning("job/%d cannot be made ready for: %s", job.job, str(error))

    def _drop_foreseen(self) -> None:
        """Forget what was foreseen; a free buffer that was made ready is wiped again (E4)."""
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None and foreseen.is_untouched:
            foreseen.buffer.wipe()

    def submit(self, effect: SubmitJob) -> None:
        """Apply the operations once, fill the buffer, submit; one answer (R2.3, D6)."""
        model = self._model(effect.model)
        generation = model.current
        code = model.stale_code(epoch=effect.epoch, generation=effect.generation)
        if code is not None or generation is None:
            reason = f"decided for epoch {effect.epoch}, generation {effect.generation}"
            self._post(SubmitRefused(job=effect.job, code=code or 0, reason=reason))
            return
        buffer = self._buffer(model, effect.buffer)
        if self._foreseen is not None and not self._foreseen.is_of(effect, model):
            self._drop_foreseen()
        ready = self._foreseen
        operations = None if ready is None else ready.operations
        failed = self._apply(model, effect.operations, job=effect.job, translated=operations)
        if failed is not None:
            self._drop_foreseen()
            self._post(failed)
            return
        try:
            if ready is None or not put_tokens(model, buffer, effect):
                write(model, generation, buffer, effect, model.lane_tags)
        except ValueError as error:
            self._drop_foreseen()
            refusal = SubmitRefused(job=effect.job, code=npurt.Code.INVALID_ARG, reason=str(error))
            self._post(refusal)
            return
        self._foreseen = None
        answer, ticket = buffer.form.submit(self._calls)
        since_ns = self._clock.now_ns()  # before anybody wakes who would take the interpreter
        if answer.ok and ticket:
            answered: Input = SubmitAccepted(job=effect.job, ticket=ticket)
        elif ticket or answer.code == npurt.Code.SUBMIT_INDETERMINATE:
            answered = SubmitDoubtful(
                job=effect.job, ticket=ticket, code=answer.code, reason=answer.reason
            )
        else:
            reason = answer.reason if not answer.ok else f"{answer.call}: accepted without a ticket"
            refused = answer.code or npurt.Code.INTERNAL
            buffer.wipe()  # it goes back to the pool with nothing of anybody in it (E4)
            self._post(SubmitRefused(job=effect.job, code=refused, reason=reason))
            return
        buffer.ticket = ticket
        self._post(answered)
        if not ticket:
            self._give_up(effect, buffer, answer)
        else:
            self._waiting.track(
                Flight(
                    *(effect, model, generation, buffer, ticket, since_ns, since_ns),
                    graveyard=self._graveyard,
                )
            )

    def _give_up(self, effect: SubmitJob, buffer: Buffer, answer: Answer) -> None:
        """End a job that may be queued and has no ticket to ask about it (E5, E9)."""
        reason = f"the submit is in doubt and gave no ticket: {answer.reason}"
        bury_buffer(buffer, self._graveyard, reason)
        self._post(
            DeviceFaulted(
                job=effect.job,
                ticket=0,
                epoch=effect.epoch,
                generation=effect.generation,
                kind="call",
                code=answer.code,
                quiescent=False,
                kv_effect="unknown",
                reason=reason,
                record=None,
                health=None,
            )
        )

    def cancel(self, effect: CancelJob) -> None:
        """Ask the device to end a job; it is waited for as before (E6)."""
        answer = self._calls.attempt("npurt_job_cancel", effect.ticket)
        told = CancelTold(
            job=effect.job, ticket=effect.ticket, code=int(answer.code), reason=answer.reason
        )
        self._post(told)

    # -------------------------------------------------------------------------- KV

    def apply_kv(self, effect: ApplyKv) -> None:
        """Apply operations on lanes without a next job."""
        model = self._model(effect.model)
        code = model.stale_code(epoch=effect.epoch, generation=effect.generation)
        if code is not None:
            reason = f"decided for epoch {effect.epoch}, generation {effect.generation}"
            first = effect.operations[0]
            self._post(_kv_failure(first, effect.operations, None, code, reason=reason))
            return
        failed = self._apply(model, effect.operations, job=None)
        lanes = tuple(operation.lane for operation in effect.operations)
        self._post(failed if failed is not None else KvApplied(lanes=lanes))

    def _apply(
        self,
        model: LoadedModel,
        operations: tuple[KvOperation, ...],
        *,
        job: int | None,
        translated: DeviceOperations | None = None,
    ) -> KvApplyFailed | None:
        """Apply a list once, as it was ``translated`` before. Return what failed, or None."""
        array, tags = translated or model.device_operations(operations)
        bad = ctypes.c_uint32(0)
        answer = self._calls.library.attempt(
            "npurt_kv_apply",
            *(model.bank, array, ctypes.sizeof(npurt.KvOp), len(array), ctypes.byref(bad)),
        )
        if answer.ok:
            model.lane_tags = tags
            return None
        blamed = operations[min(bad.value, len(operations) - 1)]
        return _kv_failure(blamed, operations, job, answer.code, reason=answer.reason)

    # -------------------------------------------------------------------------- buffers

    def restore(self, effect: RestoreBuffer) -> None:
        """Retire the ticket, restore, wipe (E4); memory that is not quiescent is buried (E9).

        What was foreseen and has not come by now, before the buffer of the job before it is
        restored, will not come.
        """
        self._drop_foreseen()
        buffer = self._buffer(self._model(effect.model), effect.buffer)
        try:
            self._retire(buffer, effect.ticket)
            for direction in (npurt.IN, npurt.OUT):
                self._calls.library.call(
                    "npurt_buffer_restore",
                    *(buffer.pointers[direction], npurt.RESTORE_SLICES | npurt.RESTORE_TENSORS),
                    about=f"buffer/{buffer.number}",
                )
            buffer.wipe()
        except DeviceError as error:
            self._post(
                RestoreFailed(
                    buffer=effect.buffer, job=effect.job, code=error.code, reason=str(error)
                )
            )
            return
        self._post(BufferRestored(buffer=effect.buffer, job=effect.job))

    def _retire(self, buffer: Buffer, ticket: int) -> None:
        if buffer.ticket != ticket or buffer.tainted:
            raise DeviceError(
                f"buffer/{buffer.number} is held by ticket {buffer.ticket}, not by {ticket}",
                code=npurt.Code.STALE_TICKET,
            )
        state = npurt.JobState()
        about = f"buffer/{buffer.number} ticket {ticket}"
        self._calls.call("npurt_job_poll", ticket, ctypes.byref(state), about=about)
        if state.h.flags & npurt.ENDED != npurt.ENDED:
            bury_buffer(buffer, self._graveyard, f"{about} never became quiescent")
            raise DeviceError(
                f"{about} is not terminal and quiescent (flags {state.h.flags})",
                code=npurt.Code.OBJECT_IN_FLIGHT,
            )
        self._calls.call("npurt_job_retire", ticket, about=about)
        buffer.ticket = 0

    # -------------------------------------------------------------------------- counters

    def read_counters(self, effect: ReadCounters) -> None:
        """Read the counters between submits; a device that does not answer tells none (E14)."""
        try:
            counters = read_counters(self._calls)
        except DeviceError as error:
            LOG.warning("the counters cannot be read: %s", error)
            counters = ()
        self._post(CountersRead(asked=effect.asked, counters=counters))

    # -------------------------------------------------------------------------- models

    def configure(self, effect: ConfigureModel) -> None:
        """Configure the device, open the bank, create the buffers; all or a failure.

        After a reset (``again``) the model stays known when that fails: its requests still wait.
        """
        known = self._models.get(effect.model)
        if known is None and effect.again:
            reason = "its first configuration failed and was given back"
            failed = ConfigureFailed(model=effect.model, code=npurt.Code.BAD_STATE, reason=reason)
            self._post(failed)
            return
        model = self._model(effect.model)
        try:
            with self._calls.exclusive(timeout_s=EXCLUSIVE_TIMEOUT_S):
                if effect.again:
                    give_up_generation(self._calls, model, self._graveyard)
                    model.calbin = create_calbin(
                        self._calls, folder=model.folder, sha256=model.sha256
                    )
                configured = self._configure(model, effect)
        except (DeviceError, ModelError) as error:
            reason = str(error)
            if not effect.again:
                reason += self._undo(model)
            code = getattr(error, "code", npurt.Code.CALBIN_FORMAT)
            self._post(ConfigureFailed(model=effect.model, code=code, reason=reason))
            return
        self._post(configured)

    def _configure(self, model: LoadedModel, effect: ConfigureModel) -> ModelConfigured:
        call = self._calls.library.call
        about = f"model/{model.number}"
        params = npurt.ConfigureParams(chip_mask=0, timeout_ns=effect.timeout_ns)
        result = npurt.ConfigureResult()
        call(
            "npurt_calbin_configure",
            *(model.calbin, ctypes.byref(params), ctypes.byref(result)),
            about=about,
        )
        bank = ctypes.c_void_p()
        kv = npurt.KvParams(layout=model.kv_layout, lanes=effect.lane_count)
        call("npurt_kv_open", model.calbin, ctypes.byref(kv), ctypes.byref(bank), about=about)
        model.bank = bank
        parts = {part.name: part for part in model.submodels}
        for plan in effect.buffers:
            for number in range(plan.first, plan.first + plan.count):
                model.buffers[number] = create_buffer(
                    self._calls, model.calbin, number, parts[plan.submodel]
                )
        model.lane_tags.clear()
        model.current = Generation(
            epoch=effect.epoch,
            generation=effect.generation,
            device_epoch=result.device_epoch,
            device_generation=result.generation,
            lane_first=effect.lane_first,
            lane_count=effect.lane_count,
        )
        return ModelConfigured(
            model=effect.model,
            device_generation=result.generation,
            device_epoch=result.device_epoch,
            duration_ns=result.duration_ns,
            used_bytes_before=tuple(result.mem_before[chip] for chip in self._chips),
            used_bytes_after=tuple(result.mem_after[chip] for chip in self._chips),
        )

    def reset(self, effect: RunReset) -> None:
        """Reset the device and tell what was observed (E27).

        Nothing that was in flight is waited for any more; what it holds is given up with its
        generation.
        """
        finished = run_reset(
            *(self._calls, self._chips, effect), index=self._index, known_epoch=self._device_epoch
        )
        self._waiting.forget_all()
        self._device_epoch = finished.epoch_after or self._device_epoch
        lost = read_lost_capabilities(self._calls, self._capabilities)
        if lost:
            self._post(CapabilitiesLost(names=lost))
        self._post(finished)

    def publish(self, effect: PublishModel) -> None:
        """Arm the simulator's fault rules; other devices have nothing to be told."""
        if self._calls.library.has("npurt_sim_arm"):
            self._calls.call("npurt_sim_arm", about=f"model/{effect.model}")

    def release(self, effect: ReleaseModel) -> None:
        """Give bank, buffers and calbin back; say what memory and health are afterwards (E22).

        A model whose configuration failed was given back then, and only the figures are read.
        """
        model = self._models.get(effect.model)
        try:
            with self._calls.exclusive(timeout_s=EXCLUSIVE_TIMEOUT_S):
                if model is not None:
                    self._give_back(model)
                health = read_health(self._calls, self._chips)
        except DeviceError as error:
            self._post(ReleaseFailed(model=effect.model, code=error.code, reason=str(error)))
            return
        if model is not None:
            del self._models[effect.model]
            model.files.close()
        self._post(
            ModelReleased(
                model=effect.model,
                used_bytes=health.used_bytes,
                healthy=health.state == "ok" and health.sticky == npurt.Code.OK,
            )
        )

    def _give_back(self, model: LoadedModel) -> None:
        """Destroy buffers, bank and calbin, in that order.

        A quarantined buffer whose job is terminal and quiescent is retired first: its memory is
        given back, never used again. One that is not quiescent stays and is buried (E9).
        Raises: DeviceError at the first that is not given back.
        """
        about = f"model/{model.number}"
        for number in list(model.buffers):
            self._retire_if_ended(model.buffers[number])
            destroy_buffer(self._calls, model.buffers[number], self._graveyard)
            del model.buffers[number]
        if model.bank is not None:
            self._calls.library.call("npurt_kv_close", model.bank, about=about)
            model.bank = None
        model.current = None
        self._calls.library.call("npurt_calbin_release", model.calbin, about=about)

    def _retire_if_ended(self, buffer: Buffer) -> None:
        if buffer.ticket and is_quiescent(self._calls, buffer):
            self._calls.attempt("npurt_job_retire", buffer.ticket)

    def _undo(self, model: LoadedModel) -> str:
        """Give back what a failed configuration left; return what could not be, for the reason."""
        try:
            with self._calls.exclusive(timeout_s=EXCLUSIVE_TIMEOUT_S):
                self._give_back(model)
        except DeviceError as error:
            return f"; cleaning up: {error}"
        self._models.pop(model.number, None)
        model.files.close()
        return ""

    # -------------------------------------------------------------------------- close

    def close(self) -> str:
        """Close the device; return why that was not possible, or nothing.

        Memory that may still be written to is buried; the rest is given back.
        """
        try:
            with self._calls.exclusive(timeout_s=EXCLUSIVE_TIMEOUT_S):
                held = self._held_buffers()
                answer = self._calls.attempt("npurt_device_close")
                self._calls.close()
        except DeviceError as error:
            self.abandon(str(error))
            return str(error)
        for model in self._models.values():
            for buffer in model.buffers.values():
                if not answer.ok or buffer.number in held:
                    bury_buffer(buffer, self._graveyard, "not quiescent when the device was closed")
                elif not buffer.tainted:
                    buffer.drop_views()
                    buffer.arena.close()
            model.files.close()
        self._models.clear()
        return "" if answer.ok else answer.reason

    def _held_buffers(self) -> set[int]:
        """Return the buffers whose job is not known to be quiescent."""
        held = set()
        for model in self._models.values():
            for buffer in model.buffers.values():
                if not buffer.ticket:
                    continue
                state = npurt.JobState()
                answer = self._calls.attempt("npurt_job_poll", buffer.ticket, ctypes.byref(state))
                if not answer.ok or not state.h.flags & npurt.QUIESCENT:
                    held.add(buffer.number)
        return held

    def abandon(self, reason: str) -> None:
        """Make no call any more and keep all memory: the device may still write to it (D13)."""
        self._calls.close()
        for model in list(self._models.values()):
            for buffer in list(model.buffers.values()):
                bury_buffer(buffer, self._graveyard, reason)

    # -------------------------------------------------------------------------- look-ups

    def _model(self, number: int) -> LoadedModel:
        model = self._models.get(number)
        if model is None:
            raise InternalError(f"model/{number} is not validated or was released")
        return model

    def _buffer(self, model: LoadedModel, number: int) -> Buffer:
        buffer = model.buffers.get(number)
        if buffer is None:
            raise InternalError(f"buffer/{number} does not belong to model/{model.number}")
        return buffer


def _kv_failure(
    blamed: KvOperation,
    operations: tuple[KvOperation, ...],
    job: int | None,
    code: int,
    *,
    reason: str,
) -> KvApplyFailed:
    return KvApplyFailed(
        job=job,
        lane=blamed.lane,
        operation=blamed.verb,
        code=code,
        unknown=code == npurt.Code.KV_UNKNOWN,
        reason=f"{blamed.verb} lane/{blamed.lane} {blamed.from_tokens} to {blamed.to_tokens},"
        f" transaction {blamed.transaction}: {reason}",
        lanes=tuple(dict.fromkeys(operation.lane for operation in operations)),
    )
