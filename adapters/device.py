"""DevicePort over any npurt library.

Theory of operation. Effects go to one of four places: what changes the device runs in order on one
thread (commands.py), artifacts are checked on another (validating.py), health is asked on a third,
and a fourth waits for results (waiting.py). Every one of them answers by posting inputs, and an
exception in any of them is posted as a fault of kind ``call``. Without threads the same handlers
run inside ``step``: one effect, or one result, at a time (E30).

Time is the device's clock. Where the device is stepped it stands still until ``advance``, which
moves to whatever comes first: the device's next event, the next thing the hang rule would say, or
the instant that the engine waits for.
"""

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from laneway.adapters import npurt
from laneway.adapters.arena import Graveyard
from laneway.adapters.binding import Library
from laneway.adapters.calls import DeviceCalls
from laneway.adapters.callwatch import CallWatch
from laneway.adapters.commands import Commands
from laneway.adapters.deviceclock import DeviceClock
from laneway.adapters.facts import read_device, read_health_and_heat
from laneway.adapters.loaded import LoadedModel
from laneway.adapters.results import read_logits
from laneway.adapters.simulated import SimulatorControls
from laneway.adapters.trials import TrialRun
from laneway.adapters.validating import ArtifactOptions, Validation
from laneway.adapters.waiting import SLICE_NS, Waiting
from laneway.adapters.worker import Worker
from laneway.engine.clock import Clock, MonotonicClock
from laneway.engine.effects import (
    ApplyKv,
    CancelJob,
    CloseDevice,
    ConfigureModel,
    DeviceEffect,
    ForeseeJob,
    ProbeHealth,
    PublishModel,
    ReadCounters,
    ReleaseModel,
    RestoreBuffer,
    RunReset,
    SubmitJob,
    ValidateArtifact,
)
from laneway.engine.errors import ConfigurationError, DeviceError, DeviceRefusedError, UsageError
from laneway.engine.inputs import (
    DeviceClosed,
    DeviceFacts,
    DeviceFaulted,
    HealthProbed,
    Input,
    MemoryBuried,
    ThrottleTold,
)
from laneway.engine.ports import TextPort

LOG = logging.getLogger("laneway.adapters.device")
STOP_TIMEOUT_S = 5.0
WATCH_EVERY_S = 0.5
HAND_OVER_S = 0.002
"""How long the engine sleeps at most until an idle device has its next job."""
_FLAG_EXCLUSIVE = 1


def open_calls(
    library: Library,
    *,
    config: str = "",
    index: int = 0,
    chip_mask: int = 0,
    exclusive: bool = False,
) -> DeviceCalls:
    """Open one device of a library.

    Raises: ConfigurationError for a configuration that the library does not accept;
    DeviceRefusedError if the device cannot be opened.
    """
    params = npurt.OpenParams(index=index, chip_mask=chip_mask, config=config.encode() or None)
    params.h.flags = _FLAG_EXCLUSIVE if exclusive else 0
    pointer = ctypes.c_void_p()
    answer = library.attempt("npurt_device_open", ctypes.byref(params), ctypes.byref(pointer))
    if answer.code == npurt.Code.INVALID_ARG:
        raise ConfigurationError(f"{library.path}: {answer.reason}")
    if not answer.ok:
        raise DeviceRefusedError(f"{library.path}: {answer.reason}", code=answer.code)
    watch = CallWatch(time.monotonic_ns)
    return DeviceCalls(library.watched_by(watch), pointer, watch=watch)


class NpurtDevice:
    """An opened device that carries out effects and answers with inputs.

    ``simulator`` holds the simulator's own entries, None on other libraries. ``stepped``: device
    time moves only in ``advance``. ``virtual``: it is meant to be stepped by an engine without
    threads. ``scale``: device seconds per second, where time runs by itself. ``proven``: what a
    simulator carries records of. ``whole_jobs``: ``advance`` goes from one end of a job to the next
    and stops at no event between that nobody could see. ``samplers``: threads that share the rows
    of a job that is done.
    """

    def __init__(
        self,
        calls: DeviceCalls,
        *,
        url: str,
        index: int = 0,
        simulator: SimulatorControls | None = None,
        stepped: bool = False,
        virtual: bool = False,
        scale: float = 1.0,
        options: ArtifactOptions | None = None,
        graveyard: Graveyard | None = None,
        proven: tuple[str, ...] = (),
        whole_jobs: bool = False,
        samplers: int = 1,
    ) -> None:
        self.calls = calls
        self._index = index
        self.graveyard = graveyard if graveyard is not None else Graveyard()
        self.url = url
        self.simulator = simulator
        self.stepped = stepped and simulator is not None
        self.virtual = virtual
        self._whole_jobs = whole_jobs
        self._samplers = samplers
        self._scale = scale
        self._slice_ns = max(1, int(SLICE_NS * scale))
        self._options = options if options is not None else ArtifactOptions()
        self._own_clock = (
            DeviceClock(calls, stepped=self.stepped, scale=scale) if simulator is not None else None
        )
        self._clock: Clock = self._own_clock if self._own_clock is not None else MonotonicClock()
        self._described = read_device(calls, url=url, index=index, proven=proven)
        self._models: dict[int, LoadedModel] = {}
        self._queue: deque[DeviceEffect] = deque()
        self._post: Callable[[Input], None] | None = None
        self._workers: dict[str, Worker] = {}
        self._wait_thread: threading.Thread | None = None
        self._go_on: Callable[[Input], None] | None = None

        self._lent: list[DeviceEffect] = []
        """What the thread that waits was asked for while it was lent; it stands in for it."""

        self._stopping = False
        self._threads = False
        self._ended = threading.Event()
        self._telling = threading.Lock()
        self._told_buried = (0, 0)
        self._told_hot: tuple[int, ...] = ()

    @property
    def clock(self) -> Clock:
        """The clock all instants of this device are on."""
        return self._clock

    def describe(self) -> DeviceFacts:
        """Return what the device said of itself when it was opened."""
        return self._described.facts

    def text(self, model: int) -> TextPort:
        """Return the text side of a validated artifact. Raises: KeyError for an unknown model."""
        return self._models[model].text

    def trials(self, model: int) -> tuple[TrialRun, ...]:
        """Return the trials of a validated artifact, with the golden runs behind them."""
        return self._models[model].trials

    def output_logits(self, model: int, buffer: int) -> NDArray[np.uint16]:
        """Return a copy of the BF16 logits in a buffer whose job is done and not yet restored.

        Shapes: [rows, vocabulary].
        """
        held = self._models[model].buffers[buffer]
        return read_logits(held, self._models[model].vocabulary).copy()

    # ---------------------------------------------------------------------- working

    def lend(self, go_on: Callable[[Input], None]) -> None:
        """Let the thread that waits tell of the end of the only job in flight with ``go_on``.

        It has no call under way then, so nobody who wants to be alone with the device waits for it.
        """
        self._go_on = go_on

    def start(self, post: Callable[[Input], None], *, threads: bool) -> None:
        """Begin to work. Raises: UsageError when called twice."""
        if self._post is not None:
            raise UsageError(f"{self.url} is in use already: one device object serves one engine")
        self._post = post
        self._threads = threads
        self._tell_buried()
        chips = self._described.chip_indices
        self._waiting = Waiting(
            *(self.calls, self._clock),
            chips=chips,
            post=post,
            post_alone=self._lend_thread if self._go_on is not None and threads else post,
            stepped=self.stepped,
            scale=self._scale,
            samplers=self._samplers,
        )
        self._commands = Commands(
            *(self.calls, self._clock, self._waiting, self._models, self.graveyard),
            chips=chips,
            index=self._index,
            device_epoch=self._described.facts.device_epoch,
            capabilities=self._described.facts.capabilities,
            post=post,
        )
        self._validation = Validation(
            self.calls, self._models, self._options, chips=chips, post=post
        )
        if not threads:
            return
        for name in ("submit", "validate", "health", "close"):
            self._workers[name] = Worker(name, self._run)
            self._workers[name].start()
        self._wait_thread = threading.Thread(
            target=self._wait_for_results, name="laneway-wait", daemon=True
        )
        self._wait_thread.start()
        threading.Thread(target=self._watch_calls, name="laneway-watch", daemon=True).start()

    def _watch_calls(self) -> None:
        """Be the thread that looks for calls that do not return, until the device is closed."""
        while not self._ended.wait(WATCH_EVERY_S) and not self.calls.closed:
            self.watch_step()

    def watch_step(self) -> bool:
        """Look once for a call that does not return (E10); return whether there is a new one.

        Then the device is wedged: no call is made any more, all memory is kept, and the engine is
        told (row 16). Not to be called from within a device call.
        """
        overdue = self.calls.watch.step()
        if overdue is None or self.calls.closed:
            return False
        if self._own_clock is not None:
            self._own_clock.stop()
        self._commands.abandon(overdue.reason)
        self._tell_buried()
        self._answer(
            DeviceFaulted(
                job=None,
                ticket=0,
                epoch=0,
                generation=0,
                kind="call",
                code=npurt.Code.DEVICE_WEDGED,
                quiescent=False,
                kv_effect="unknown",
                reason=overdue.reason,
                record=None,
                health=None,
            )
        )
        self._waiting.wake()
        return True

    def execute(self, effect: DeviceEffect) -> None:
        """Take one effect; never waits for the device.

        Where nothing is in flight, the thread that submits goes first, for HAND_OVER_S at most. If
        the thread that waits is lent, it stands in for that one when it has come back.
        """
        if self._post is None or self._stopping:
            raise UsageError(f"{self.url} was not started or has ended")
        if self._threads:
            worker = self._workers[_worker_of(effect)]
            if threading.current_thread() is self._wait_thread and self._stands_in_for(worker):
                self._lent.append(effect)
            elif type(effect) is SubmitJob and self._waiting.is_idle:
                worker.hand_over(effect, at_most_s=HAND_OVER_S)
            else:
                worker.put(effect)
        else:
            self._queue.append(effect)

    def _stands_in_for(self, worker: Worker) -> bool:
        """Return whether the thread that waits does a worker's work now."""
        return worker is self._workers["submit"] and (bool(self._lent) or worker.claim())

    def step(self) -> bool:
        """Carry out one effect, or account for one result; return whether something was done."""
        if self._threads:
            raise UsageError(f"{self.url} works on threads of its own: it is not stepped by hand")
        if self._queue:
            self._run(self._queue.popleft())
            return True
        return self._collect(0)

    def advance(self, until_ns: int | None = None) -> bool:
        """Let device time pass to what comes next, at most to ``until_ns``.

        What comes next is an event of the device, or with ``whole_jobs`` the next end of a job.
        A device whose time runs by itself is waited for instead, at most one slice.
        Return False when nothing is to come.
        """
        if self._post is None or self.calls.closed:
            return False
        if not self.stepped or self.simulator is None:
            return False if self._threads else self._pass_time(until_ns)
        try:
            with self.calls.shared():
                moved = self._step_device(self.simulator, until_ns)
        except DeviceError:
            if not self.calls.closed:
                raise
            return False
        self._waiting.wake()
        return moved

    def _step_device(self, simulator: SimulatorControls, until_ns: int | None) -> bool:
        if self._whole_jobs:
            unseen_ns = self._waiting.unseen_until_ns()
            until_end_ns = unseen_ns if until_ns is None else min(unseen_ns, until_ns)
            if simulator.step_to_end(until_end_ns):
                return True
        event_ns = simulator.next_event_ns()
        now_ns = self._clock.now_ns()
        if event_ns is not None and event_ns <= now_ns:
            return simulator.step_event()
        ends = [at for at in (event_ns, until_ns) if at is not None and at > now_ns]
        stall_ns = self._waiting.next_stall_ns(before_ns=min(ends, default=None))
        instants = [at for at in (stall_ns, until_ns) if at is not None and at > now_ns]
        target_ns = min(instants, default=None)
        if event_ns is not None and (target_ns is None or event_ns <= target_ns):
            return simulator.step_event()
        if target_ns is None:
            return False
        simulator.step_to(target_ns)
        return True

    def _pass_time(self, until_ns: int | None) -> bool:
        if until_ns is None and self._waiting.is_idle:
            return False
        left_ns = self._slice_ns
        if until_ns is not None:
            left_ns = min(left_ns, max(0, until_ns - self._clock.now_ns()))
        if self._waiting.is_idle:
            time.sleep(self._clock.real_seconds(left_ns))
        elif left_ns < self._slice_ns:
            self._collect(left_ns)
        else:
            self._collect(None)
        return True

    def stop(self) -> None:
        """End the threads; close the device if nobody did. Idempotent."""
        self._stopping = True
        self._ended.set()
        if self._post is not None:
            self._waiting.wake()
        late = [
            name
            for name, worker in self._workers.items()
            if not worker.stop(timeout_s=STOP_TIMEOUT_S)
        ]
        if self._wait_thread is not None:
            self._wait_thread.join(STOP_TIMEOUT_S)
            late += ["wait"] if self._wait_thread.is_alive() else []
        if self._post is not None:
            self._waiting.close()
        if late:
            LOG.warning("%s: threads still inside a device call: %s", self.url, ", ".join(late))
        if self.calls.closed:
            return
        if late or self._post is None:
            self._close_plainly(wedged=bool(late))
        else:
            self._close_device(abandon=False)

    def _close_plainly(self, *, wedged: bool) -> None:
        """Close a device that never worked for an engine, or leave a wedged one alone (D13)."""
        if self._own_clock is not None:
            self._own_clock.stop()
        if wedged:
            self._commands.abandon("a device call has not returned")
            return
        answer = self.calls.attempt("npurt_device_close")
        self.calls.close()
        self.calls.library.check(answer, about=self.url)

    # ---------------------------------------------------------------------- handlers

    def _run(self, effect: DeviceEffect) -> None:
        """Carry out one effect; whatever goes wrong becomes an input."""
        try:
            self._handle(effect)
        except Exception as error:
            self._report(type(effect).__name__, getattr(effect, "job", None), effect, error)
        self._tell_buried()

    def _tell_buried(self) -> None:
        """Tell how much memory the process keeps for good, if that has grown (E9)."""
        with self._telling:
            totals = self.graveyard.account.totals
            if totals == self._told_buried:
                return
            self._told_buried = totals
            self._answer(MemoryBuried(item_count=totals[0], byte_count=totals[1]))

    def _handle(self, effect: DeviceEffect) -> None:
        if self.calls.closed and not isinstance(effect, CloseDevice):
            LOG.debug("%s is closed: %s is dropped", self.url, type(effect).__name__)
            return
        match effect:
            case SubmitJob():
                self._commands.submit(effect)
            case ForeseeJob():
                self._commands.foresee(effect.submit)
            case CancelJob():
                self._commands.cancel(effect)
            case ApplyKv():
                self._commands.apply_kv(effect)
            case RestoreBuffer():
                self._commands.restore(effect)
            case ValidateArtifact():
                self._validation.validate(effect)
            case ConfigureModel():
                self._commands.configure(effect)
            case PublishModel():
                self._commands.publish(effect)
            case ReleaseModel():
                self._commands.release(effect)
            case ReadCounters():
                self._commands.read_counters(effect)
            case RunReset():
                self._commands.reset(effect)
            case ProbeHealth():
                self._probe_health()
            case CloseDevice():
                self._close(effect)
            case _:
                assert_never(effect)

    def _probe_health(self) -> None:
        try:
            with self.calls.shared():
                health, hot = read_health_and_heat(self.calls, self._described.chip_indices)
        except DeviceError as error:
            self._answer(HealthProbed(health=None, reason=str(error)))
            return
        self._answer(HealthProbed(health=health, reason=""))
        if hot != self._told_hot:
            self._told_hot = hot
            self._answer(ThrottleTold(chips=hot))

    def _close(self, effect: CloseDevice) -> None:
        """Close behind everything asked for before: artifacts being checked, then commands."""
        validate = self._workers.get("validate")
        on_validate = validate is not None and validate.is_current
        if on_validate and not effect.abandon:
            self._workers["submit"].put(effect)
            return
        self._close_device(abandon=effect.abandon)

    def _close_device(self, *, abandon: bool) -> None:
        if not self.calls.closed and self._own_clock is not None:
            self._own_clock.stop()
        if self.calls.closed:
            reason = "it was closed before"
        elif abandon:
            reason = "left alone: closing a device that does not answer is not safe"
            self._commands.abandon(reason)
        else:
            reason = self._commands.close()
            abandon = bool(reason)
        self._waiting.wake()
        self._tell_buried()
        self._answer(DeviceClosed(abandoned=abandon, reason=reason))

    def _answer(self, posted: Input) -> None:
        if self._post is not None:
            self._post(posted)

    def _report(
        self, what: str, job: int | None, effect: DeviceEffect | None, error: Exception
    ) -> None:
        """Tell the engine of a failure that has no answer of its own."""
        LOG.error("%s: %s failed (job %s): %s", self.url, what, job, type(error).__name__)
        self._answer(
            DeviceFaulted(
                job=job,
                ticket=getattr(effect, "ticket", 0),
                epoch=getattr(effect, "epoch", 0),
                generation=getattr(effect, "generation", 0),
                kind="call",
                code=getattr(error, "code", 0) or npurt.Code.INTERNAL,
                quiescent=False,
                kv_effect="unknown",
                reason=f"{what}: {type(error).__name__}: {error}",
                record=None,
                health=None,
            )
        )

    # ---------------------------------------------------------------------- results

    def _collect(self, timeout_ns: int | None) -> bool:
        """Wait for one result, None: a slice at most; return whether anything was posted."""
        posted = self._wait_for_one(timeout_ns)
        if posted:
            self._tell_buried()
        return posted

    def _lend_thread(self, taken: Input) -> None:
        """Tell of the end of the only job, and do what was asked of this thread meanwhile.

        Whoever wants to be alone with the device does not wait for that.
        """
        assert self._go_on is not None
        self.calls.leave_shared()
        try:
            self._go_on(taken)
            if self._lent:
                effects, self._lent = self._lent, []
                self._workers["submit"].stand_in(effects)
        finally:
            self.calls.rejoin_shared()

    def _wait_for_one(self, timeout_ns: int | None) -> bool:
        """Wait for one result.

        Why everything in flight is given up after a failure: what is not understood now will not
        be understood in the next slice, and each job must still get one ending.
        """
        if self.calls.closed or self._waiting.is_idle:
            return False
        try:
            with self.calls.shared():
                if timeout_ns is None:
                    timeout_ns = self._waiting.patience_ns(self._slice_ns)
                return self._waiting.collect(timeout_ns=timeout_ns)
        except Exception as error:
            if self.calls.closed:
                return False
            for effect in self._waiting.drop_all():
                self._report("waiting for a result", effect.job, effect, error)
            return True

    def _wait_for_results(self) -> None:
        """Be the thread that waits, until the device is closed."""
        while not self._stopping and not self.calls.closed:
            seen = self._waiting.changes
            if self.stepped:
                if not self._collect(0):
                    self._waiting.sleep(seen)
            elif not self._waiting.is_idle:
                self._collect(None)
            else:
                self._waiting.sleep(seen)


def _worker_of(effect: DeviceEffect) -> str:
    """Return who carries an effect out; a wedged device is left by a thread of its own (D13)."""
    if isinstance(effect, CloseDevice) and effect.abandon:
        return "close"
    if isinstance(effect, ValidateArtifact | CloseDevice):
        return "validate"
    return "health" if isinstance(effect, ProbeHealth) else "submit"
