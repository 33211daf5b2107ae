"""The engine: take, decide, record, evolve, act.

Theory of operation. One inbox, one thread at a time that changes state. Inputs that wait together
are decided one after the other, made durable in one transaction, and only then seen by anybody:
effects, deliveries, subscribers and snapshots wait for the commit (decision 4). A failed commit or
a bug in a decision stops the engine before any effect of that transaction began; its journal is
kept.

Whoever decides has the turn. That is the engine thread, or, while that has nothing to do, the
thread that brings the end of a job (``_go_on``): it decides this one input and gives the device its
next job, so that no thread has to be woken first. The rest of the step is the engine thread's,
which the job's answer wakes, or LENT_S where the device takes its time: it shows the step and tells
clients. Whoever looks before wakes it and waits. Locks are taken in the order turn, gate, inbox.

With ``threads=False`` the same code runs inside ``step()``: one input if there is one, else one
effect, else one piece of device work, else it says that it is idle. This file and inbox.py,
stream.py, clock.py are the shell: they hold no rule about requests, lanes or models.
"""

import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Self, TypeVar

from laneway.engine.asking import submitted, tokens_of
from laneway.engine.capability import grant
from laneway.engine.checking import (
    NAME_CHARACTERS_MAX,
    SOURCE_CHARACTERS_MAX,
    check_int,
    check_text,
)
from laneway.engine.clients import Clients
from laneway.engine.clock import Clock, wall_clock_ns
from laneway.engine.course import Course
from laneway.engine.effects import (
    ApplyKv,
    Conclude,
    Deliver,
    DeviceEffect,
    Effect,
    LoadBack,
    RestoreBuffer,
    SubmitJob,
)
from laneway.engine.errors import (
    ConfigurationError,
    EngineClosedError,
    LanewayError,
    ModelError,
)
from laneway.engine.evidence import VerificationRecord
from laneway.engine.holding import HeldBack
from laneway.engine.inbox import Inbox
from laneway.engine.inputs import (
    CancelRequested,
    CloseRequested,
    EngineStarted,
    Input,
    LoadBackRequested,
    LoadRequested,
    ReplaceRequested,
    SubmitWithdrawn,
    TimePassed,
    UnloadRequested,
)
from laneway.engine.limits import Limits
from laneway.engine.loads import Loads
from laneway.engine.meter import Meter
from laneway.engine.opening import fold_journal, open_journal_state, remember
from laneway.engine.picture import MetricsPicture
from laneway.engine.ports import (
    DevicePort,
    EagerPort,
    JournalPort,
    Step,
    TextPort,
    make_step,
)
from laneway.engine.request import Request
from laneway.engine.snapshot import Health, ModelView, RequestView, Snapshot, take_snapshot
from laneway.engine.state import State, initial_state
from laneway.engine.stream import Stream
from laneway.engine.subscription import Subscription

LOG = logging.getLogger("laneway.engine")
SECOND_NS = 1_000_000_000
_TOLD = (Deliver, Conclude)
_OF_JOBS = (SubmitJob, RestoreBuffer, ApplyKv)
REQUEST_MAX = (1 << 63) - 1
LENT_S = 0.02
"""How long the engine thread sleeps at most while a job is in flight that may end without it.

Why: whoever decides then wakes nobody, since to wake a thread takes a tenth and more of all that
has to be done before the device has its next job; and the device may be slow to take it. A job that
is shorter is not disturbed.
"""

_Done = TypeVar("_Done")


class Engine:
    """Serve models on one device, with every step in a journal.

    ``threads=False`` gives the same engine stepped by hand; by default it has threads unless the
    device's clock is virtual. ``clock`` defaults to the device's. The engine owns device and
    journal from here on and closes both.

    ``inspect`` sees the state after every transaction, with its steps, on the engine thread; what
    it raises stops the engine. It is for long runs that hold the engine to its invariants.

    ``records`` are what ``laneway probe`` found out about this device: they turn on what is off
    without evidence (R1.2).

    ``resume``: requests of the journal that have no ending go on from their tokens as soon as a
    model is loaded under their name from the same artifact; ``attach`` listens to them (G21). Those
    whose model is not loaded stay open when the engine is closed.

    Raises: JournalError when the journal is damaged or holds requests without an ending that are
    not to be resumed, or keeps only digests of their tokens; DeviceError. Source: R5.1, E30.
    """

    def __init__(
        self,
        *,
        device: DevicePort,
        journal: JournalPort,
        limits: Limits | None = None,
        threads: bool | None = None,
        clock: Clock | None = None,
        wall_clock: Callable[[], int] = wall_clock_ns,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
        inspect: Callable[[State, Sequence[Step]], None] | None = None,
        records: Sequence[VerificationRecord] = (),
        resume: bool = False,
    ) -> None:
        self._device = device
        self._journal = journal
        self._clock = clock if clock is not None else device.clock
        self._threads = threads = not device.virtual if threads is None else threads
        self._is_eager = threads and isinstance(device, EagerPort)
        self._draw_seed = draw_seed
        self._inspect = inspect
        self._records = tuple(records)
        self._resume = resume
        self._meter = Meter()
        self._course = Course(initial_state())
        chosen = limits if limits is not None else Limits()
        self._inbox = Inbox(chosen.inbox_inputs_max)
        self._batch_max = chosen.step_batch_max
        self._outbox: deque[Effect] = deque()
        self._turn = threading.Lock()
        self._unshown: list[Step] = []
        """Durable steps that nobody was shown yet (the gate)."""

        self._gate = threading.RLock()
        self._visible = threading.Condition(self._gate)
        self._clients = Clients(
            text=self._text_of, cancel=self.cancel, drive=None if threads else self._drive
        )
        self._held = HeldBack(self._clients.model_of)
        self._loads = Loads()
        self._subscriptions: list[Subscription] = []
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._ended = False
        self._looks = 0
        """How many callers wait for the engine thread to land."""

        try:
            journal.claim()
        except BaseException:
            device.stop()  # the journal belongs to somebody else, the device to nobody
            raise
        try:
            if self._is_eager and isinstance(device, EagerPort):
                device.lend(self._go_on)
            device.start(self._inbox.post, threads=threads)
        except BaseException:
            journal.close()  # the device belongs to somebody else
            raise
        try:
            self._begin(chosen, wall_clock)
        except BaseException:
            device.stop()
            journal.close()
            raise

    def _begin(self, limits: Limits, wall_clock: Callable[[], int]) -> None:
        """Take over what the journal has, record the start, and let the engine thread run."""
        if self._threads and self._device.virtual:
            raise ConfigurationError(
                "a virtual clock moves only in an engine without threads: leave threads out"
            )
        opened = open_journal_state(
            self._journal, wall_clock(), watch=self._measure, resume=self._resume
        )
        self._course = Course(opened.state)
        self._clients.restore(opened.state, opened.remembered)
        self._offset_ns = opened.now_ns - self._clock.now_ns()
        self._next_request = self._state.next_request
        self._next_model = self._state.next_model
        self._durable_step = self._state.step
        started = EngineStarted(
            wall_clock_ns=wall_clock(),
            code_version=_code_version(),
            journal_tokens=self._journal.tokens,
            limits=limits,
            device=grant(self._device.describe(), self._records),
        )
        self._take([started])
        if self._threads:
            self._thread = threading.Thread(target=self._run, name="laneway-engine", daemon=True)
            self._thread.start()

    @property
    def _state(self) -> State:
        """The state after the last step (the turn)."""
        return self._course.state

    def _look(self) -> State:
        """Return the state after the last step to a caller who holds the lock.

        The engine thread lands for it: no caller changes the state.
        """
        self._looks += 1
        try:
            self._await(lambda: not (self._course.is_cruising or self._unshown))
        finally:
            self._looks -= 1
        return self._state

    def _await_shown(self) -> None:
        """Let the engine thread show what is durable to a caller who holds the lock."""
        self._await(lambda: not self._unshown)

    def _await(self, done: Callable[[], bool]) -> None:
        """Let a caller who holds the lock wait for what the engine thread does when it is woken.

        Why no caller does it: it may be interrupted anywhere.
        """
        mine = self._thread is None or threading.current_thread() is self._thread
        if not (mine or self._ended or done()):
            self._inbox.wake()
            self._visible.wait_for(lambda: self._ended or done())

    def _land(self) -> None:
        """Let those look who wait for it (engine thread)."""
        with self._visible:
            self._course.land()
            self._visible.notify_all()

    # ------------------------------------------------------------------ the loop

    def step(self) -> bool:
        """Do one thing: an input, else an effect, else device work; return False when idle.

        Raises: EngineClosedError when the engine runs on threads of its own or has failed.
        """
        if self._threads:
            raise EngineClosedError("this engine runs on its own threads: do not step it")
        self._check_failure()
        taken = self._inbox.take(1)
        if not taken and self._is_time():
            taken = [TimePassed()]
        if taken:
            self._guarded(self._take, taken)
            return True
        if self._outbox:
            self._guarded(self._act, self._outbox.popleft())
            return True
        if self._ended:
            self._finish(EngineClosedError("the engine was closed"))
            return False
        return self._device.step()

    def run_until_idle(self) -> None:
        """Step until nothing is left to do without letting time pass."""
        while self.step():
            pass

    def advance(self, until_ns: int | None = None) -> bool:
        """Do one thing, or let device time pass to the next event or instant the engine waits for.

        ``until_ns``: an instant of the device's clock beyond which time does not pass. Returns
        False when nothing will ever happen by itself any more.
        """
        if self.step():
            return True
        wake_ns = self._course.wake_ns()
        ends = [] if wake_ns is None else [wake_ns - self._offset_ns]
        if until_ns is not None:
            ends.append(until_ns)
        return self._device.advance(min(ends, default=None))

    def _run(self) -> None:
        """Be the engine thread: take what waits, or sleep until something arrives or is due."""
        while not self._ended:
            try:
                with self._turn:
                    has_worked = self._work()
                    sleep_s = None if has_worked else self._sleep_s()
                if not has_worked:
                    self._inbox.wait(sleep_s)
            except Exception:
                if self._failure is None:
                    raise
                return  # logged and told to everybody by _guarded
        if self._failure is None:
            self._finish(EngineClosedError("the engine was closed"))

    def _work(self) -> bool:
        """Do what waits for the engine thread; return whether there was anything."""
        if self._ended:  # while it waited for the turn
            return False
        if self._looks:
            self._guarded(self._land)
        taken = self._inbox.take(self._batch_max)
        if not taken and self._is_time():
            taken = [TimePassed()]
        if not (taken or self._unshown or self._outbox):
            return False
        self._guarded(self._take, taken)
        self._guarded(self._act_all)
        if self._is_eager:
            self._guarded(self._foresee)
        return True

    def _foresee(self) -> None:
        """Let the device get ready for the job that will most likely be the next."""
        foreseen = self._course.foresee()
        if foreseen is not None:
            self._device.execute(foreseen)

    def _go_on(self, taken: Input) -> None:
        """Decide an answer on the thread that brings it, if the engine is at rest; else post it."""
        if not self._turn.acquire(blocking=False):
            self._inbox.post(taken)
            return
        try:
            if not self._is_at_rest():
                self._inbox.post(taken)
                return
            has_submitted = self._guarded(self._decide_first, taken)
        except Exception:
            if self._failure is None:
                raise
            return  # logged and told to everybody by _guarded
        finally:
            self._turn.release()
        if not has_submitted:
            self._inbox.wake()  # else the answer does

    def _is_at_rest(self) -> bool:
        """Return whether the engine thread has nothing to do and nobody waits for it (the turn)."""
        waits = self._looks or self._unshown or self._outbox or not self._inbox.is_empty
        return not (waits or self._ended) and self._may_act_first()

    def _may_act_first(self) -> bool:
        """Return whether the device may have its next job before anybody is shown the step.

        Nobody can tell the order, since a job's answers are inputs and are taken later. But for one
        case: a step that lets a request go on after a restart opens its text when it is shown, and
        its job needs that.
        """
        return self._threads and not (self._inspect or self._clients.awaits_model)

    def _decide_first(self, taken: Input) -> bool:
        """Decide and let the device have its next job; return whether there is one."""
        with self._gate:
            self._decide([taken])
            try:
                return self._act_on_jobs()
            except BaseException:
                self._show_all()  # it is durable
                raise

    def _guarded(self, work: Callable[..., _Done], *arguments: object) -> _Done:
        """Do a piece of engine work; a failure of it stops the engine, which everybody is told."""
        try:
            return work(*arguments)
        except Exception as failure:
            LOG.critical(
                "engine stopped at step %d: %s",
                self._course.step,
                failure,
                exc_info=not isinstance(failure, LanewayError),
            )
            self._fail(failure)
            raise

    def _take(self, taken: list[Input]) -> None:
        """Decide and evolve, make durable in one transaction, then let it be seen."""
        with self._gate:
            if self._unshown:
                self._show_all()
            steps = self._decide(taken) if taken else []
            try:
                if self._may_act_first():
                    self._act_on_jobs()
            finally:
                self._show_all()
                if self._inspect is not None:
                    self._inspect(self._state, steps)

    def _decide(self, taken: list[Input]) -> list[Step]:
        """Decide and evolve, then make durable in one transaction (turn and gate are held)."""
        course, now_ns, offset_ns = self._course, self._clock.now_ns, self._offset_ns
        steps: list[Step] = []
        effects: list[Effect] = []
        course.grounded = self._looks > 0
        for one in taken:
            at_ns = max(now_ns() + offset_ns, course.now_ns)
            events, asked = course.decide(one, at_ns)
            steps.append(make_step(step=course.step, at_ns=at_ns, taken=one, events=events))
            effects += asked
        self._journal.append(steps)
        self._durable_step = course.step
        self._unshown += steps
        if self._held:
            self._outbox.extendleft(reversed(self._held.release(self._state)))
        self._outbox += _device_first(effects)
        return steps

    def _act_on_jobs(self) -> bool:
        """Ask what stands first in the outbox for jobs; return whether to submit one (the gate)."""
        outbox = self._outbox
        has_submitted = False
        while outbox and type(outbox[0]) in _OF_JOBS:
            has_submitted = has_submitted or type(outbox[0]) is SubmitJob
            self._ask_device(outbox.popleft())  # type: ignore[arg-type]
        return has_submitted

    def _measure(self, step: Step) -> None:
        """Let the metrics see a durable step; what goes wrong there stays there (R16.2).

        Why the count in the log: one step that is not measured may spoil every later one, so the
        1st, 2nd, 4th, 8th, … is told.
        """
        failure = self._meter.take(step)
        failures = self._meter.failures
        if failure is not None and failures & (failures - 1) == 0:
            LOG.error(
                "step %d (%s) is not in the metrics: %s; %d steps so far",
                step.step,
                type(step.taken).__name__,
                type(failure).__name__,
                failures,
            )

    def _show_all(self) -> None:
        """Let what is durable be seen, and wake who waits for it (the gate)."""
        unshown = self._unshown
        self._visible.notify_all()
        while unshown:
            self._show(unshown.pop(0))

    def _show(self, step: Step) -> None:
        """Let waiters and subscribers see a durable step."""
        self._measure(step)
        for event in step.events:
            if event.machine == "model":
                self._loads.note(event)
            elif event.machine == "device" and event.trigger == "close":
                self._ended = True
            elif event.machine == "request" and event.trigger == "resume":
                self._clients.go_on(event.entities[0], event.data["model"])
        for subscription in self._subscriptions:
            subscription.put(step)

    def _act_all(self) -> None:
        """Carry out every effect that waits; tokens that stand together are told at once."""
        outbox = self._outbox
        while outbox:
            if type(outbox[0]) is Deliver and not self._course.is_examining():
                self._clients.deliver(_take_tokens(outbox))
            else:
                self._act(outbox.popleft())

    def _act(self, effect: Effect) -> None:
        """Carry out one effect: clients here, the device on its own workers."""
        course = self._course
        if course.is_examining() and isinstance(effect, Deliver | Conclude):
            if self._held.takes(self._state, effect):
                return
        if isinstance(effect, Deliver):
            self._clients.deliver((effect,))
        elif isinstance(effect, Conclude):
            self._clients.conclude(self._held.amend(effect))
        elif isinstance(effect, LoadBack):
            self._load_back(effect)
        else:
            self._ask_device(effect)

    def _ask_device(self, effect: DeviceEffect) -> None:
        """Ask the device for what is still wanted of it."""
        if self._course.is_wanted(effect):
            self._device.execute(effect)
        elif (job := self._course.withdrawn_job(effect)) is not None:
            self._inbox.post(SubmitWithdrawn(job=job))

    def _now_ns(self) -> int:
        return self._clock.now_ns() + self._offset_ns

    def _is_time(self) -> bool:
        wake_ns = self._course.wake_ns()
        return wake_ns is not None and wake_ns <= self._now_ns()

    def _sleep_s(self) -> float | None:
        """Return how long the engine thread may sleep."""
        wake_ns = self._course.wake_ns()
        due_s = None
        if wake_ns is not None:
            due_s = self._clock.real_seconds(max(wake_ns - self._now_ns(), 0))
        if not (self._is_eager and self._course.standing.jobs):
            return due_s
        return LENT_S if due_s is None else min(due_s, LENT_S)

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request) -> Stream:
        """Hand in a request; return its stream at once.

        A refusal by admission is the stream's ending, not an exception here.

        Raises: EngineClosedError; RequestRejectedError when the inbox is full, or the prompt or a
        stop string cannot be turned into tokens.
        """
        self._check_failure()
        model = self.model_number(request.model)
        prompt = tokens_of(request, self._text_of(model))
        made: list[Stream] = []

        def number() -> Input:
            taken = submitted(
                request,
                number=self._next_request,
                prompt=prompt,
                model=model,
                now_ns=self._now_ns(),
                draw_seed=self._draw_seed,
            )
            made.append(self._clients.open(taken, model))
            self._next_request += 1
            return taken

        self._inbox.ask(number)
        return made[0]

    def _text_of(self, model: int | None) -> TextPort | None:
        """Return the text side of a model; None for a model that is unknown or just went away."""
        if model is None:
            return None
        try:
            return self._device.text(model)
        except KeyError:
            return None

    def attach(self, request: int, from_position: int = 0) -> Stream:
        """Listen to a request by its number, from one of its tokens on; also after a restart.

        The stream repeats what was delivered and goes on with what follows; its result has all
        tokens. One that has ended is read from the journal, with text if a model of its artifact is
        loaded (decision 14).

        Raises: EngineClosedError; RequestRejectedError for a number that no request has, or a
        journal that keeps only digests of its tokens.
        """
        check_int("request", request, least=1, most=REQUEST_MAX)
        check_int("from_position", from_position, least=0, most=REQUEST_MAX)
        self._check_failure()
        stream = self._clients.attach(request, from_position=from_position)
        if stream is None:
            remembered = remember(self._journal, request)
            number = self._model_of(remembered.sha256)
            stream = self._clients.ended(
                remembered, number, self._journal.tokens, from_position=from_position
            )
        return stream

    def _model_of(self, sha256: str) -> int | None:
        """Return the number of a model of an artifact that has its text side, or None."""
        with self._visible:
            for model in self._course.standing.models.values():
                if model.facts is not None and model.facts.sha256 == sha256:
                    return model.number
        return None

    def cancel(self, request: int) -> None:
        """Ask for a request's end; idempotent, also for requests that have ended."""
        check_int("request", request, least=-REQUEST_MAX, most=REQUEST_MAX)
        if self._ended:
            return
        self._inbox.ask(lambda: CancelRequested(request=request), urgent=True)

    # ------------------------------------------------------------------ models

    def load(self, alias: str, source: str | os.PathLike[str]) -> int:
        """Load an artifact and serve it as ``alias``; return the model's number once it is ready.

        Raises: ModelError with the reason; EngineClosedError.
        """
        path = _check_place(alias, source)
        number = self._ask_model(lambda n: LoadRequested(model=n, alias=alias, source=path))
        self._wait_for(lambda: self._loads.has_ended(self._course.standing, number))
        if (reason := self._loads.reason(number)) is not None:
            raise ModelError(f"model {alias!r} was not loaded: {reason}")
        return number

    def replace(self, alias: str, source: str | os.PathLike[str]) -> int:
        """Put another artifact in the place of a model; return its number once it is ready.

        A bad artifact is refused while the model goes on. For a good one the model finishes what it
        has, requests that come meanwhile are told to come again, and the alias moves at once. If
        the new one then cannot be configured or does not pass golden, what was there before is
        loaded back.

        Raises: ModelError with the reason and what serves the alias now; EngineClosedError.
        Source: R10.2, R14.5.
        """
        path = _check_place(alias, source)
        number = self._ask_model(lambda n: ReplaceRequested(model=n, alias=alias, source=path))
        self._wait_for(lambda: self._loads.is_replaced(self._course.standing, number))
        if (reason := self._loads.reason(number)) is not None:
            serves = self._loads.describe_serving(number, self.model_number(alias))
            raise ModelError(f"model {alias!r} was not replaced: {reason}; {serves}")
        return number

    def _ask_model(self, make: Callable[[int], Input]) -> int:
        """Ask for a load under the next number of a model; return that number."""
        made: list[int] = []

        def number() -> Input:
            made.append(self._next_model)
            self._next_model += 1
            return make(made[0])

        self._check_failure()
        self._inbox.ask(number)
        return made[0]

    def _load_back(self, effect: LoadBack) -> None:
        """Give a load that the engine itself asks for its number."""

        def number() -> Input:
            self._next_model += 1
            return LoadBackRequested(
                model=self._next_model - 1,
                alias=effect.alias,
                source=effect.source,
                sha256=effect.sha256,
                instead_of=effect.instead_of,
            )

        self._inbox.ask(number, urgent=True)

    def unload(self, alias: str) -> None:
        """Drain a model, release it and check that its memory came back.

        Raises: ModelError if no such model is served or its release could not be verified.
        """
        number = self.model_number(alias)
        if number is None:
            raise ModelError(f"no model {alias!r} is served")
        self._inbox.ask(lambda: UnloadRequested(model=number), urgent=True)
        self._wait_for(lambda: self._loads.is_gone(self._course.standing, number))
        with self._visible:
            reason = self._loads.why_left(self._course.standing, number)
        if reason is not None:
            raise ModelError(f"model {alias!r} was not unloaded: {reason}")

    def model_number(self, alias: str) -> int | None:
        """Return the number of the model that serves an alias, or None."""
        with self._visible:
            return self._course.standing.aliases.get(alias)

    # ------------------------------------------------------------------ looking

    def models(self) -> tuple[ModelView, ...]:
        """Return the models that hold or want something on the device."""
        return self.snapshot().models

    def requests(self) -> tuple[RequestView, ...]:
        """Return the live requests."""
        return self.snapshot().requests

    def snapshot(self) -> Snapshot:
        """Return an immutable picture of the state after the last durable step."""
        with self._visible:
            state = self._look() if self._failure is None else None
            if state is None or self._failure is not None:
                return take_snapshot(fold_journal(self._journal)[0])
            return take_snapshot(state)

    def metrics(self) -> MetricsPicture:
        """Return a picture of all metrics after the last durable step (R15.1)."""
        with self._visible:
            self._await_shown()
            return self._meter.picture()

    def subscribe(self, *, steps_max: int = 4096) -> Subscription:
        """Return the durable steps from here on, as they become visible."""
        subscription = Subscription(steps_max, forget=self._forget)
        with self._visible:
            self._await_shown()
            self._subscriptions.append(subscription)
        return subscription

    def _forget(self, subscription: Subscription) -> None:
        with self._visible:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)

    def wait(self, timeout_s: float) -> None:
        """Wait until a step becomes visible, at most so long (engines with threads)."""
        with self._visible:
            self._visible.wait(timeout_s)

    def ready(self) -> bool:
        """Return whether a request would be served now (E29)."""
        return self.health().ready

    def health(self) -> Health:
        """Return liveness and readiness with the reason (E29)."""
        with self._visible:
            self._await_shown()
            alive = self._failure is None and not self._ended
            picture = take_snapshot(self._course.standing)
            return picture.health(alive=alive, failure=self._failure, step=self._durable_step)

    # ------------------------------------------------------------------ the end

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Close the engine, then device and journal; idempotent.

        With ``drain`` admitted requests are finished first; when ``timeout_s`` is over they are
        cancelled. What the device has in flight is always waited for, and a hang is bounded by the
        hang rule (E16).
        """
        try:
            self._close_engine(drain=drain, timeout_s=timeout_s)
        finally:
            self._inbox.close()
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            try:
                self._device.stop()
            finally:
                self._journal.close()

    def _close_engine(self, *, drain: bool, timeout_s: float | None) -> None:
        if self._failure is None and not self._ended:
            self._inbox.ask(lambda: CloseRequested(drain=drain), urgent=True)
            if not self._wait_for(lambda: self._ended, timeout_s=timeout_s if drain else None):
                self._inbox.ask(lambda: CloseRequested(drain=False), urgent=True)
                self._wait_for(lambda: self._ended)
        if not self._threads and self._failure is None:
            self._guarded(self._act_all)
        if not self._threads and self._failure is None:
            self._finish(EngineClosedError("the engine was closed"))

    def __enter__(self) -> Self:
        """Return the running engine."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; drain only when the block ended well."""
        self.close(drain=failure is None)

    # ------------------------------------------------------------------ helpers

    def _wait_for(self, done: Callable[[], bool], *, timeout_s: float | None = None) -> bool:
        """Wait until ``done``, driving the engine if it is stepped; return False after the time."""
        if not self._threads:
            end_ns = None if timeout_s is None else self._now_ns() + int(timeout_s * SECOND_NS)
            while not done():
                if end_ns is not None and self._now_ns() >= end_ns:
                    return False
                self._drive()
            return True
        with self._visible:
            in_time = self._visible.wait_for(
                lambda: done() or self._failure is not None, timeout=timeout_s
            )
        self._check_failure()
        return in_time

    def _drive(self) -> None:
        """Move a stepped engine on, or say why it cannot move by itself."""
        if not self.advance():
            raise EngineClosedError(
                "the engine is idle and device time does not move by itself: step the device"
            )

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise EngineClosedError(
                f"the engine stopped: {self._failure}; its journal is kept"
            ) from self._failure

    def _fail(self, failure: BaseException) -> None:
        """Stop for good: no further effect begins, and every waiter is told."""
        with self._visible:
            self._failure = self._failure or failure  # the first one says why
            self._ended = True
            self._outbox.clear()
            self._held.clear()
            self._visible.notify_all()
        self._finish(failure)

    def _finish(self, cause: BaseException) -> None:
        """Let everybody who still waits for something know that nothing follows; idempotent."""
        self._inbox.close(cause)
        self._clients.break_off(cause)
        with self._visible:
            for subscription in self._subscriptions:
                subscription.end()
            self._subscriptions.clear()


def _check_place(alias: str, source: str | os.PathLike[str]) -> str:
    """Return the path of an artifact. Raises: TypeError or ValueError for it or its alias."""
    path = os.fspath(source)
    check_text("alias", alias, most=NAME_CHARACTERS_MAX)
    check_text("source", path, most=SOURCE_CHARACTERS_MAX)
    return path


def _device_first(effects: list[Effect]) -> list[Effect]:
    """Return what the device is asked, then what clients are told, each in the order decided.

    Why: the device waits for its next job; a client that is told a moment later loses nothing. Not
    where anything else than jobs and KV is asked: a model that goes takes its text side with it.
    """
    asked: list[Effect] = []
    told: list[Effect] = []
    for effect in effects:
        (told if type(effect) in _TOLD else asked).append(effect)
    return asked + told if all([type(effect) in _OF_JOBS for effect in asked]) else effects


def _take_tokens(outbox: deque[Effect]) -> list[Deliver]:
    """Take the tokens that stand at the front of the outbox, until something else does."""
    tokens: list[Deliver] = []
    while outbox and type(outbox[0]) is Deliver:
        tokens.append(outbox.popleft())  # type: ignore[arg-type]
    return tokens


def _code_version() -> str:
    try:
        return version("laneway")
    except PackageNotFoundError:
        return "not installed"
