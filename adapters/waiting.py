"""Wait for tickets in flight and post what became of each, exactly once (E7).

Theory of operation. ``collect`` waits for any of the tickets, at most one slice. A terminal ticket
becomes ``Completed`` (done, output valid) or ``DeviceFaulted`` with everything that is known at
that moment. When a slice ends without a result every job is looked at: it is polled, a new phase is
reported, and the hang rule is applied (E16): a stage is reported once when both the job's age and
the time without any progress of the device have passed the times that came with the job, the cap
by age alone. Time is the device's clock, so a stepped device gives the same reports each run; but
how long results take on the host is told in time of the host where the device's runs by itself.

A poll is believed no further than its word holds (E11): a phase before one already shown, an end
without a result and an end that no wait told of are each reported once a job; the first two change
nothing else, since a job ends by its result alone.
"""

import ctypes
import logging
import threading
import time
from collections.abc import Callable

import attrs
import msgspec

from laneway.adapters import npurt
from laneway.adapters.arena import Graveyard
from laneway.adapters.binding import Answer
from laneway.adapters.buffers import Buffer, bury_buffer
from laneway.adapters.calls import DeviceCalls
from laneway.adapters.facts import read_health, read_record, read_times
from laneway.adapters.loaded import Generation, LoadedModel
from laneway.adapters.results import Prepared, Results, prepare
from laneway.engine.clock import Clock
from laneway.engine.effects import SubmitJob
from laneway.engine.errors import DeviceError
from laneway.engine.inputs import (
    NO_TOKEN,
    Completed,
    DeviceFaulted,
    HealthFacts,
    Input,
    JobProgressed,
    JobStalled,
    StatusDoubted,
)

LOG = logging.getLogger("laneway.adapters.waiting")
SLICE_NS = 200_000_000
NAP_NS = 1_000_000
"""The longest sleep of whoever waits for a job, in time of the host.

Why: a core that sleeps through a job is far away when the job ends, and the device waits until it
is back; some twenty microseconds a millisecond keep it near, where the interpreter is free.
"""

_SHORTEST_WAIT = 200
_NEVER_NS = (1 << 63) - 1
_STAGES = ("suspect", "confirm", "cap")
_PHASES = ("h2d", "exec", "d2h")
_ORDER = ("queued", *_PHASES)
_TIMEOUT = npurt.Code.WAIT_TIMEOUT
_NOTHING_YET = (_TIMEOUT, npurt.Code.NOT_READY, npurt.Code.INTERRUPTED)
_KINDS = {
    npurt.Code.CCU_EXCEPTION: "ccu",
    npurt.Code.DMA: "dma",
    npurt.Code.JOB_ABORTED: "aborted",
    npurt.Code.JOB_LOST: "lost",
    npurt.Code.NUMERIC: "numeric",
}


@attrs.define(eq=False)
class Flight:
    """One job that the device has, or may have, taken.

    ``graveyard`` takes its memory if the device does not let go of it.
    """

    effect: SubmitJob
    model: LoadedModel
    generation: Generation
    buffer: Buffer
    ticket: int
    since_ns: int
    looked_ns: int
    graveyard: Graveyard = attrs.field(kw_only=True)
    phase: str = "queued"
    prepared: Prepared | None = None
    """What reading its output needs, made while the device computes."""

    doubts: tuple[str, ...] = ()
    """The kinds of doubt about its state that were reported."""

    unsaid: tuple[tuple[str, int], ...] = attrs.field(init=False)
    """The stages of the hang rule that were not reported yet, each with its time."""

    def __attrs_post_init__(self) -> None:
        effect = self.effect
        times = (effect.suspect_after_ns, effect.confirm_after_ns, effect.cap_after_ns)
        self.unsaid = tuple(zip(_STAGES, times, strict=True))


class Waiting:
    """The jobs in flight of one device.

    ``track`` is called by the submit side, the rest by one thread that waits. ``post_alone`` is
    told in the place of ``post`` when the only job in flight is done. ``scale``: how much faster
    the device's clock runs than the host's.
    """

    def __init__(
        self,
        calls: DeviceCalls,
        clock: Clock,
        *,
        chips: tuple[int, ...],
        post: Callable[[Input], None],
        post_alone: Callable[[Input], None] | None = None,
        stepped: bool = False,
        scale: float = 1.0,
        samplers: int = 1,
    ) -> None:
        self._calls = calls
        self._stepped = stepped
        self._clock = clock
        self._chips = chips
        self._post = post
        self._post_alone = post if post_alone is None else post_alone
        self._scale = scale
        self._nap_ns = _NEVER_NS if stepped else max(1, int(NAP_NS * scale))
        self._results = Results(exact=calls.library.simulates, samplers=samplers)
        self._flights: dict[int, Flight] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._changes = 0
        self._missed = 0
        self._nothing_since: tuple[int, int] | None = None

    @property
    def missed_count(self) -> int:
        """How many results a poll found that no wait had told of."""
        return self._missed

    def close(self) -> None:
        """End the threads that sample, once nobody collects any more; idempotent."""
        self._results.close()

    def track(self, flight: Flight) -> None:
        """Wait for a ticket from now on; its acceptance was posted before.

        Before, while the device computes, what reading its output needs is made: whoever waits has
        nothing left to do then but to read.
        """
        try:
            flight.prepared = prepare(flight.effect)
        except Exception as error:
            # The same is met when the output is read, and ends the job there.
            LOG.warning("ticket %d: its output will not be readable: %s", flight.ticket, error)
        with self._changed:
            self._flights[flight.ticket] = flight
            self._changes += 1
            self._changed.notify_all()

    @property
    def changes(self) -> int:
        """How often ``wake`` or ``track`` was called; to be read before one looks."""
        with self._lock:
            return self._changes

    def wake(self) -> None:
        """Let ``sleep`` return: device time moved, or the waiting thread is to end."""
        with self._lock:
            self._changes += 1
            self._changed.notify_all()

    def sleep(self, seen: int) -> None:
        """Wait until something has changed since ``changes`` was ``seen``.

        Why: a stepped device moves only when somebody steps it, so its wait is never inside the
        library.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen)

    @property
    def tickets(self) -> tuple[int, ...]:
        """The tickets in flight, oldest first."""
        with self._lock:
            return tuple(self._flights)

    @property
    def is_idle(self) -> bool:
        """Whether no ticket is in flight."""
        return not self._flights

    def collect(self, *, timeout_ns: int) -> bool:
        """Wait for one result at most ``timeout_ns`` of device time.

        Return whether anything was posted. A stepped device that had nothing has nothing again
        until it is stepped or takes another job, and is not asked.
        """
        now = (self._calls.moves, self._changes)
        if self._stepped and now == self._nothing_since:
            return False
        flights = self._snapshot()
        if not flights:
            return False
        posted = self._collect_of(flights, timeout_ns, seen=now[1])
        self._nothing_since = None if posted or now[0] % 2 else now
        return posted

    def _collect_of(self, flights: tuple[Flight, ...], timeout_ns: int, *, seen: int) -> bool:
        tickets = (ctypes.c_uint64 * len(flights))(*(flight.ticket for flight in flights))
        which = ctypes.c_uint32(0)
        begun_ns, left_ns = time.monotonic_ns(), timeout_ns
        while True:
            answer = self._calls.attempt(
                *("npurt_job_wait", tickets, len(flights)),
                *(min(left_ns, self._nap_ns), ctypes.byref(which)),
            )
            if self._stepped or answer.code != _TIMEOUT or self._changes != seen:
                break
            # What has passed, not what was slept: a busy interpreter makes every nap longer.
            left_ns = timeout_ns - int((time.monotonic_ns() - begun_ns) * self._scale)
            if left_ns <= 0:
                break
        if answer.ok:
            self._finish(flights[which.value])
            return True
        if answer.code not in _NOTHING_YET:
            for flight in flights:
                self._give_up(flight, answer)
            return True
        return self._look_at(flights)

    def patience_ns(self, slice_ns: int) -> int:
        """Return how long to wait at once: a slice, or less if the hang rule speaks sooner."""
        now_ns = self._clock.now_ns()
        ages = [
            flight.since_ns + after_ns - now_ns
            for flight in self._snapshot()
            for _, after_ns in flight.unsaid
        ]
        if min(ages, default=slice_ns) >= slice_ns:
            return slice_ns
        stall_ns = self.next_stall_ns()
        left_ns = slice_ns if stall_ns is None else stall_ns - now_ns
        return min(slice_ns, max(left_ns, slice_ns // _SHORTEST_WAIT))

    def next_stall_ns(self, *, before_ns: int | None = None) -> int | None:
        """Return the next instant at which the hang rule would say something, if nothing moves.

        Whoever is interested in what comes before an instant names it; if nothing does, whatever
        the device's progress was, the device is not asked and the answer is merely not before it.
        """
        flights = self._snapshot()
        soonest = [flight.since_ns + after for flight in flights for _, after in flight.unsaid]
        if not soonest or (before_ns is not None and min(soonest) >= before_ns):
            return before_ns if soonest else None
        instants = []
        progress_ns: int | None = None
        for flight in flights:
            for stage, after_ns in flight.unsaid:
                instant = flight.since_ns + after_ns
                if stage != "cap":
                    progress_ns = self._progress_ns() if progress_ns is None else progress_ns
                    instant = max(instant, progress_ns + after_ns)
                instants.append(instant)
        return min(instants, default=None)

    def forget_all(self) -> None:
        """Stop waiting for all in flight: a reset ended their generation (E27)."""
        with self._changed:
            self._flights.clear()
            self._changes += 1
            self._changed.notify_all()

    def unseen_until_ns(self) -> int:
        """Return up to which instant nobody would look at a job that has not ended.

        Neither is it due to be polled before, nor would the hang rule say anything of it.
        """
        instants = [_NEVER_NS]
        for flight in self._snapshot():
            instants.append(flight.looked_ns + SLICE_NS - 1)
            instants += [flight.since_ns + after_ns - 1 for _, after_ns in flight.unsaid]
        return min(instants)

    def drop_all(self) -> tuple[SubmitJob, ...]:
        """Stop waiting for all in flight and keep its memory for good; return what it was."""
        with self._changed:
            flights = tuple(self._flights.values())
            self._flights.clear()
        for flight in flights:
            bury_buffer(flight.buffer, flight.graveyard, f"ticket {flight.ticket} was given up")
        return tuple(flight.effect for flight in flights)

    def _snapshot(self) -> tuple[Flight, ...]:
        return tuple(self._flights.values())

    def _forget(self, flight: Flight) -> bool:
        """Stop waiting for a ticket; tell whether it was still waited for."""
        with self._lock:
            return self._flights.pop(flight.ticket, None) is not None

    def _finish(self, flight: Flight) -> None:
        """Post what became of a terminal ticket, unless that was posted before (E7)."""
        if not self._forget(flight):
            return
        record = npurt.Completion()
        answer = self._calls.attempt("npurt_job_result", flight.ticket, ctypes.byref(record))
        generation = flight.generation
        told = (record.generation, record.device_epoch)
        if not answer.ok:
            self._fault(flight, answer.code, kind="call", reason=answer.reason)
        elif told != (generation.device_generation, generation.device_epoch):
            reason = f"the result is of device generation {told[0]} and epoch {told[1]}"
            self._fault(flight, npurt.Code.STALE_GENERATION, kind="lost", reason=reason)
        elif (
            record.status == npurt.Code.OK
            and record.state == npurt.JOB_DONE
            and record.h.flags & npurt.OUTPUT_VALID
        ):
            self._complete(flight, record)
        else:
            state = npurt.JOB_STATES.get(record.state, str(record.state))
            reason = f"ticket {flight.ticket} ended {state}: {npurt.code_name(record.status)}"
            kind = _KINDS.get(record.status, "device")
            self._fault(flight, record.status, kind=kind, reason=reason, record=record)

    def _complete(self, flight: Flight, record: npurt.Completion) -> None:
        effect = flight.effect
        now_ns = self._clock.now_ns if self._stepped else time.monotonic_ns
        begun_ns = now_ns()
        try:
            rows = self._results.read(effect, flight.model, flight.buffer, flight.prepared)
        except Exception as error:
            # The device is done but its answer cannot be used: the job must still end, once.
            reason = f"the output could not be read: {type(error).__name__}: {error}"
            self._fault(flight, npurt.Code.INTERNAL, kind="call", reason=reason, record=record)
            return
        told = record.h.flags & npurt.NUMERIC_FLAG
        if told and not any(row.fault == "numeric" for row in rows):
            # The device says that its numbers are abnormal and no row shows it: none is believed.
            rows = tuple(
                msgspec.structs.replace(row, token=NO_TOKEN, fault="numeric") for row in rows
            )
        took_ns = now_ns() - begun_ns
        tell = self._post if self._flights else self._post_alone
        tell(
            Completed(
                job=effect.job,
                ticket=flight.ticket,
                epoch=effect.epoch,
                generation=effect.generation,
                flags=record.h.flags,
                kv_effect=npurt.KV_EFFECTS.get(record.kv_effect, "unknown"),
                engine_slot=record.engine_used,
                rows=rows,
                times=read_times(record.times, postprocess_ns=took_ns),
            )
        )

    def _fault(
        self,
        flight: Flight,
        code: int,
        *,
        kind: str,
        reason: str,
        record: npurt.Completion | None = None,
    ) -> None:
        quiescent = record is not None and bool(record.h.flags & npurt.QUIESCENT)
        if not quiescent:
            # Before anybody hears of it: what may still be written to is kept from now on (E9).
            bury_buffer(flight.buffer, flight.graveyard, f"ticket {flight.ticket}: {reason}")
        health, unanswered = self._read_health()
        ccu = read_record(record.ccu) if record is not None else None
        said = f" ({ccu.text})" if ccu is not None and ccu.text else ""
        self._post(
            DeviceFaulted(
                job=flight.effect.job,
                ticket=flight.ticket,
                epoch=flight.effect.epoch,
                generation=flight.effect.generation,
                kind=kind,
                code=code,
                quiescent=quiescent,
                kv_effect=npurt.KV_EFFECTS.get(record.kv_effect, "unknown")
                if record is not None
                else "unknown",
                reason=reason + said + unanswered,
                record=ccu,
                health=health,
            )
        )

    def _give_up(self, flight: Flight, answer: Answer) -> None:
        """Stop waiting for a ticket whose fate the device does not tell."""
        if not self._forget(flight):
            return
        self._fault(flight, answer.code, kind="call", reason=answer.reason)

    def _look_at(self, flights: tuple[Flight, ...]) -> bool:
        now_ns = self._clock.now_ns()
        posted = False
        for flight in flights:
            age_ns = now_ns - flight.since_ns
            due = now_ns - flight.looked_ns >= SLICE_NS or any(
                [age_ns >= after_ns for _, after_ns in flight.unsaid]
            )
            if due:
                flight.looked_ns = now_ns
                posted = self._look(flight, now_ns) or posted
        return posted

    def _look(self, flight: Flight, now_ns: int) -> bool:
        state = npurt.JobState()
        answer = self._calls.attempt("npurt_job_poll", flight.ticket, ctypes.byref(state))
        if not answer.ok:
            self._give_up(flight, answer)
            return True
        phase = npurt.JOB_STATES.get(state.state, "queued")
        if state.h.flags & npurt.TERMINAL:
            if not self._has_result(flight):
                said = self._doubt(flight, "early", phase)
                return self._report_stall(flight, now_ns) or said
            # The wait missed it: a missed notification is not a missing completion (row 10).
            self._missed += 1
            LOG.warning("ticket %d was done and no wait said so (%d)", flight.ticket, self._missed)
            self._doubt(flight, "missed", phase)
            self._finish(flight)
            return True
        posted = False
        if phase in _ORDER and _ORDER.index(phase) < _ORDER.index(flight.phase):
            posted = self._doubt(flight, "backwards", phase)
        elif phase != flight.phase and phase in _PHASES:
            flight.phase = phase
            self._post(JobProgressed(job=flight.effect.job, ticket=flight.ticket, phase=phase))
            posted = True
        return self._report_stall(flight, now_ns) or posted

    def _has_result(self, flight: Flight) -> bool:
        """Return whether a ticket that a poll shows at its end has ended."""
        record = npurt.Completion()
        answer = self._calls.attempt("npurt_job_result", flight.ticket, ctypes.byref(record))
        return answer.code not in _NOTHING_YET

    def _doubt(self, flight: Flight, kind: str, shown: str) -> bool:
        """Report that a job's state contradicts itself; return whether it was not yet said."""
        if kind in flight.doubts:
            return False
        flight.doubts += (kind,)
        job, before = flight.effect.job, flight.phase
        said = StatusDoubted(job=job, ticket=flight.ticket, kind=kind, before=before, shown=shown)
        self._post(said)
        return True

    def _report_stall(self, flight: Flight, now_ns: int) -> bool:
        """Report each stage of the hang rule once, when its times have passed (E16)."""
        age_ns = now_ns - flight.since_ns
        waiting = [(stage, after_ns) for stage, after_ns in flight.unsaid if age_ns >= after_ns]
        if not waiting:
            return False
        still_ns = min(age_ns, max(0, now_ns - self._progress_ns()))
        posted = False
        for stage, after_ns in waiting:
            if stage == "cap" or still_ns >= after_ns:
                flight.unsaid = tuple(pair for pair in flight.unsaid if pair[0] != stage)
                posted = True
                self._post(
                    JobStalled(
                        job=flight.effect.job,
                        ticket=flight.ticket,
                        stage=stage,
                        phase=flight.phase,
                        age_ns=age_ns,
                        progress_age_ns=still_ns,
                    )
                )
        return posted

    def _progress_ns(self) -> int:
        """Return when the device last moved; 0 where it does not answer, which is no progress."""
        health = npurt.Health()
        answer = self._calls.attempt("npurt_device_health", ctypes.byref(health))
        return int(health.last_progress_ns) if answer.ok else 0

    def _read_health(self) -> tuple[HealthFacts | None, str]:
        try:
            return read_health(self._calls, self._chips), ""
        except DeviceError as error:
            return None, f"; health: {error}"
