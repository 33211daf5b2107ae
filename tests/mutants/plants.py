"""Engines with one rule broken: each mutant is a name, the rule, what is wrong, and its detector.

A plant replaces one function of the product for the time of a test. ``says`` is what the detector
must say, so that a mutant is not taken for found because its plant does not work.
"""

from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import mutants.canary_detectors as canary_detectors
import mutants.canary_plants as canary_plants
import mutants.detectors as detectors
import mutants.guilt_detectors as guilt_detectors
import mutants.guilt_plants as guilt_plants
import mutants.recovery_detectors as recovery_detectors
import mutants.recovery_plants as recovery_plants
import mutants.replacing_detectors as replacing_detectors
import mutants.replacing_plants as replacing_plants
import numpy as np
import pytest
from mutants.detectors import Detector

from laneway.adapters import arena, buffers, callwatch, commands, npurt, results, waiting
from laneway.adapters import device as adapter_device
from laneway.engine import (
    completing,
    counting,
    course,
    draft,
    ending,
    evolve_jobs,
    evolve_lanes,
    faulting,
    inbox,
    loading,
    loop,
    plan,
    planning,
    queueing,
    reserving,
    state,
    submitting,
    unloading,
)
from laneway.engine import evolve as engine_evolve
from laneway.engine.effects import Conclude, Deliver, RestoreBuffer
from laneway.engine.inputs import BufferRestored, Completed, SubmodelFacts
from laneway.journal import chain, sealing
from laneway.journal.codec import Codec
from laneway.journal.edges import DECLARED, Edges
from laneway.journal.native_text import PYTHON

Plant = Callable[[pytest.MonkeyPatch], None]


@attrs.frozen(kw_only=True)
class Mutant:
    """One broken rule and the detector that must find it."""

    id: str
    rule: str
    wrong: str
    plant: Plant
    detector: Detector
    says: str


# ---------------------------------------------------------------------------- adapter


def wait_removed(patch: pytest.MonkeyPatch) -> None:
    real = waiting.Waiting.collect

    def collect(self: waiting.Waiting, *, timeout_ns: int) -> bool:
        for flight in self._snapshot():
            if flight.effect.origin != "request":
                continue
            self._forget(flight)
            record = npurt.Completion(kv_effect=1, engine_used=1)
            record.h.flags = npurt.OUTPUT_VALID | npurt.TERMINAL | npurt.QUIESCENT
            self._complete(flight, record)
            return True
        return real(self, timeout_ns=timeout_ns)

    patch.setattr(waiting.Waiting, "collect", collect)


def memory_shared(patch: pytest.MonkeyPatch) -> None:
    made: list[arena.Arena] = []
    real = arena.Arena

    def share(byte_count: int) -> arena.Arena:
        if not made:
            made.append(real(1 << 20))
        return made[0]

    patch.setattr(buffers, "Arena", share)


def input_rewritten_in_flight(patch: pytest.MonkeyPatch) -> None:
    real = commands.Commands.submit

    def submit(self: Any, effect: Any) -> None:
        real(self, effect)
        if effect.origin == "request":
            self._models[effect.model].buffers[effect.buffer].views["tokens"][...] = 1

    patch.setattr(commands.Commands, "submit", submit)


def wipe_skipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(buffers.Buffer, "wipe", lambda self: None)


def restore_skipped(patch: pytest.MonkeyPatch) -> None:
    def restore(self: Any, effect: RestoreBuffer) -> None:
        buffer = self._buffer(self._model(effect.model), effect.buffer)
        buffer.ticket = 0
        buffer.wipe()
        self._post(BufferRestored(buffer=effect.buffer, job=effect.job))

    patch.setattr(commands.Commands, "restore", restore)


def graveyard_empty(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(arena.Graveyard, "bury", lambda self, buried, reason: None)


# ---------------------------------------------------------------------------- core: KV, lanes


def kv_committed_early(patch: pytest.MonkeyPatch) -> None:
    real = submitting.mark_submitted

    def mark(made: draft.Draft, job: state.JobState, ticket: int) -> None:
        real(made, job, ticket)
        made.emit("lane", [row.lane for row in job.rows], "commit", generation=job.generation)

    patch.setattr(submitting, "mark_submitted", mark)


def kv_effect_ignored(patch: pytest.MonkeyPatch) -> None:
    _complete_with(patch, lambda made, taken: attrs.evolve(taken, kv_effect="applied"))


def reserved_lane_evicted(patch: pytest.MonkeyPatch) -> None:
    real = reserving.evict_if_idle

    def evict(made: draft.Draft, number: int) -> None:
        if made.state.lanes[number].state == "reserved":
            made.emit("lane", number, "rollback", data={"applied": True})
        real(made, number)

    patch.setattr(ending, "evict_if_idle", evict)


def unreserved_lane_released(patch: pytest.MonkeyPatch) -> None:
    real = evolve_lanes._LANE_MOVES["bind"]

    def bind(lanes: list[state.LaneState], event: Any) -> None:
        real(lanes, event)
        for lane in lanes:
            lane.on_device = True

    patch.setitem(evolve_lanes._LANE_MOVES, "bind", bind)


def lane_kept_for_the_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ending, "evict_if_idle", lambda made, number: None)


def lane_given_twice(patch: pytest.MonkeyPatch) -> None:
    real = queueing._short

    def short(known: state.State, model: state.ModelState) -> plan.Plan | None:
        chosen = real(known, model)
        if chosen is None:
            return None
        rows = tuple(msgspec.structs.replace(row, lane=model.lane_first) for row in chosen.rows)
        return msgspec.structs.replace(chosen, rows=rows)

    patch.setattr(queueing, "_short", short)
    patch.setattr(planning, "validate", lambda known, chosen: None)


# ---------------------------------------------------------------------------- core: completions


def _complete_with(
    patch: pytest.MonkeyPatch, change: Callable[[draft.Draft, Completed], Completed]
) -> None:
    """Let the engine decide on a completion other than the one it got."""
    real = completing.complete

    def complete(made: draft.Draft, taken: Completed) -> None:
        real(made, change(made, taken))

    patch.setattr(completing, "complete", complete)


def cancelled_not_accounted(patch: pytest.MonkeyPatch) -> None:
    real = completing.complete

    def complete(made: draft.Draft, taken: Completed) -> None:
        job = made.state.jobs.get(taken.job)
        live = made.state.requests
        if job and job.origin == "request" and all(row.owner not in live for row in job.rows):
            return
        real(made, taken)

    patch.setattr(completing, "complete", complete)


def stale_believed(patch: pytest.MonkeyPatch) -> None:
    def change(made: draft.Draft, taken: Completed) -> Completed:
        if taken.job in made.state.jobs or not made.state.jobs:
            return taken
        job = next(iter(made.state.jobs.values()))
        return attrs.evolve(
            taken, job=job.number, ticket=job.ticket, epoch=job.epoch, generation=job.generation
        )

    _complete_with(patch, change)


def _quote(patch: pytest.MonkeyPatch, *fields: str) -> None:
    def change(made: draft.Draft, taken: Completed) -> Completed:
        job = made.state.jobs.get(taken.job)
        if job is None:
            return taken
        return attrs.evolve(taken, **{field: getattr(job, field) for field in fields})

    _complete_with(patch, change)


def epoch_ignored(patch: pytest.MonkeyPatch) -> None:
    _quote(patch, "epoch")


def generation_ignored(patch: pytest.MonkeyPatch) -> None:
    _quote(patch, "generation")


def ticket_ignored(patch: pytest.MonkeyPatch) -> None:
    _quote(patch, "ticket")


def accounted_twice(patch: pytest.MonkeyPatch) -> None:
    real = completing.complete

    def complete(made: draft.Draft, taken: Completed) -> None:
        if taken.job not in made.state.jobs:
            buffer = min(made.state.buffers)
            made.ask(RestoreBuffer(model=1, buffer=buffer, job=taken.job, ticket=taken.ticket))
        real(made, taken)

    patch.setattr(completing, "complete", complete)


def buffer_free_at_completion(patch: pytest.MonkeyPatch) -> None:
    real = completing._account

    def account(
        made: draft.Draft, job: state.JobState, taken: Completed, *, withheld: bool
    ) -> None:
        real(made, job, taken, withheld=withheld)
        made.emit("buffer", job.buffer, "release", generation=job.generation)

    patch.setattr(completing, "_account", account)


def fault_spares_the_buffer(patch: pytest.MonkeyPatch) -> None:
    real = faulting.fault_job

    def fault(made: draft.Draft, job: state.JobState, kind: str, reason: str, **more: bool) -> None:
        emit = made.emit

        class Sparing(draft.Draft):
            def emit(self, machine: str, *rest: Any, **more: Any) -> None:
                if machine != "buffer":
                    emit(machine, *rest, **more)

        sparing = Sparing(made.state, made.taken, made.events, made.effects)
        real(sparing, job, kind, reason, **more)

    patch.setattr(faulting, "fault_job", fault)


def doubtful_submit_believed(patch: pytest.MonkeyPatch) -> None:
    def believe(made: draft.Draft, job: state.JobState) -> None:
        taken = made.taken
        assert isinstance(taken, Completed)
        job.state = "submitted"
        completing.complete(made, taken)

    patch.setattr(completing, "_end_doubtful", believe)


def doubt_does_not_degrade(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(faulting, "degrade", lambda made, reason: None)


def short_of_buffers_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(faulting, "_too_little_left", lambda known, model: "")


def first_reading_decides(patch: pytest.MonkeyPatch) -> None:
    def released(made: draft.Draft, taken: Any) -> None:
        model = made.state.models[taken.model]
        reason = unloading.still_held(made.state, model, taken.used_bytes)
        if reason:
            unloading._release_ended_badly(made, model, reason)
        else:
            unloading._take_as_gone(made, model)

    patch.setattr(unloading, "released", released)


def configure_never_retried(patch: pytest.MonkeyPatch) -> None:
    def failed(made: draft.Draft, taken: Any) -> None:
        loading.fail_load(made, made.state.models[taken.model], taken.reason)

    patch.setattr(loading, "configure_failed", failed)


def graveyard_without_budget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(faulting, "buried", lambda made, taken: None)


def blocked_call_unseen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(callwatch.CallWatch, "step", lambda self: None)


def buried_memory_untold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(adapter_device.NpurtDevice, "_tell_buried", lambda self: None)


def counters_never_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(counting, "ask_if_due", lambda made: None)


def first_difference_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(counting, "DIFFERENCES_MAX", 0)


def ended_jobs_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evolve_jobs, "_count_end", lambda ledger, number, taken: None)


# ---------------------------------------------------------------------------- core: planning


def two_in_flight(patch: pytest.MonkeyPatch) -> None:
    for module in (plan, planning):
        patch.setattr(module, "inflight_ceiling", lambda known: 2)


def pool_key_without_task(patch: pytest.MonkeyPatch) -> None:
    real = queueing.free_buffer

    def free(model: state.ModelState, submodel: SubmodelFacts) -> int | None:
        others = [one for one in model.facts.submodels if one != submodel] if model.facts else []
        found = [real(model, other) for other in others]
        return next((one for one in found if one is not None), real(model, submodel))

    patch.setattr(queueing, "free_buffer", free)
    patch.setattr(planning, "validate", lambda known, chosen: None)


def rows_not_at_their_lanes(patch: pytest.MonkeyPatch) -> None:
    def places(model: state.ModelState, submodel: SubmodelFacts, lanes: list[int]) -> Any:
        return tuple(range(len(lanes))) if submodel.fixed_rows else ()

    patch.setattr(planning, "places_of", places)


def taken_rows_left_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evolve_jobs, "_drop_taken", lambda known, job: None)


# ---------------------------------------------------------------------------- journal order


def effects_before_commit(patch: pytest.MonkeyPatch) -> None:
    _act_early(patch, lambda effect: not isinstance(effect, Deliver | Conclude))


def delivered_before_durable(patch: pytest.MonkeyPatch) -> None:
    _act_early(patch, lambda effect: isinstance(effect, Deliver | Conclude))


def _act_early(patch: pytest.MonkeyPatch, early: Callable[[Any], bool]) -> None:
    """Carry out some effects of a decision before its step is in the journal."""
    real = loop.Engine._take

    def take(self: loop.Engine, taken: list[Any]) -> None:
        deciding_really = course.Course.decide

        def deciding(known: course.Course, one: Any, at_ns: int) -> draft.Decision:
            decision = deciding_really(known, one, at_ns)
            for effect in decision.effects:
                if early(effect):
                    self._act(effect)
            kept = tuple(effect for effect in decision.effects if not early(effect))
            return draft.Decision(decision.events, kept)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(course.Course, "decide", deciding)
            real(self, taken)

    patch.setattr(loop.Engine, "_take", take)


def event_not_evolved(patch: pytest.MonkeyPatch) -> None:
    real = engine_evolve.EVOLVERS["buffer"]

    def evolve(known: state.State, event: Any, taken: Any) -> None:
        if event.trigger != "release":
            real(known, event, taken)

    patch.setattr(draft, "EVOLVERS", {**engine_evolve.EVOLVERS, "buffer": evolve})


def event_not_recorded(patch: pytest.MonkeyPatch) -> None:
    real = draft.Draft.decision

    def decision(self: draft.Draft) -> draft.Decision:
        made = real(self)
        kept = tuple(e for e in made.events if (e.machine, e.trigger) != ("buffer", "release"))
        return draft.Decision(kept, made.effects)

    patch.setattr(draft.Draft, "decision", decision)


def table_unchecked(patch: pytest.MonkeyPatch) -> None:
    def evolve(known: state.State, event: Any, taken: Any) -> None:
        engine_evolve.EVOLVERS[event.machine](known, event, taken)

    patch.setattr(engine_evolve, "evolve", evolve)


def chain_without_input(patch: pytest.MonkeyPatch) -> None:
    real = chain.row_chain

    def row_chain(
        previous: bytes, step: int, at_ns: int, kind: bytes, taken: bytes, events: bytes
    ) -> bytes:
        return real(previous, step, at_ns, kind, b"", events)

    made = Codec.__init__

    def init(self: Codec, tokens: str = "full", *, edges: Edges | None = DECLARED) -> None:
        made(self, tokens, edges=edges, texts=PYTHON)  # so that every row is sealed here

    patch.setattr(Codec, "__init__", init)
    patch.setattr(chain, "row_chain", row_chain)
    patch.setattr(sealing, "row_chain", row_chain)


def inbox_order_swapped(patch: pytest.MonkeyPatch) -> None:
    real = inbox.Inbox.take

    def take(self: inbox.Inbox, at_most: int) -> list[Any]:
        self._queue.reverse()
        taken = real(self, at_most)
        self._queue.reverse()
        return taken

    patch.setattr(inbox.Inbox, "take", take)


def tokens_of_another_row(patch: pytest.MonkeyPatch) -> None:
    real = results.Results.read
    last: list[Any] = []

    def read(self: Any, effect: Any, model: Any, buffer: Any, *given: Any) -> Any:
        logits = buffer.views["logits"]
        kept = np.array(logits)
        if last and last[0].shape == logits.shape and effect.origin == "request":
            logits[...] = last[0]
        last[:] = [kept]
        return real(self, effect, model, buffer, *given)

    patch.setattr(results.Results, "read", read)


def _mutant(rule: str, plant: Plant, detector: Detector, says: str, wrong: str) -> Mutant:
    name = plant.__name__.replace("_", "-")
    return Mutant(id=name, rule=rule, wrong=wrong, plant=plant, detector=detector, says=says)


_d, _c, _r, _g = detectors, canary_detectors, recovery_detectors, guilt_detectors
MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "R2.7, R2.4",
        wait_removed,
        _d.board,
        "nothing went wrong, yet",
        "output is read before the device is done",
    ),
    _mutant("R2.7, R2.2, E1", memory_shared, _d.board, "E4", "all buffers share one memory"),
    _mutant(
        "R2.7, E17", kv_committed_early, _d.script, "E17", "KV commits when the job is accepted"
    ),
    _mutant(
        "R3.5, E6, E7", cancelled_not_accounted, _d.cancels, "E7", "a cancelled job is forgotten"
    ),
    _mutant(
        "E3",
        input_rewritten_in_flight,
        _d.board,
        "INPUT_TOUCHED",
        "input is written after the submit",
    ),
    _mutant("E4", wipe_skipped, _d.board, "E4", "a buffer goes back to the pool unwiped"),
    _mutant(
        "E4",
        restore_skipped,
        _d.board,
        "OBJECT_IN_FLIGHT",
        "a buffer goes back without retire and restore",
    ),
    _mutant("E4", buffer_free_at_completion, _d.script, "E4", "a buffer is free at its completion"),
    _mutant(
        "E5, G1",
        fault_spares_the_buffer,
        _d.board_that_faults,
        "G1, E5",
        "a fault leaves its buffer in use",
    ),
    _mutant(
        "D6, E5",
        doubtful_submit_believed,
        _d.doubtful_submit,
        "row 4",
        "a doubtful submit is believed when it ends",
    ),
    _mutant(
        "G12",
        doubt_does_not_degrade,
        _d.doubtful_submit,
        "G12",
        "a device with something in doubt serves fully",
    ),
    _mutant(
        "G12",
        short_of_buffers_ignored,
        _d.last_buffer_in_doubt,
        "G12",
        "a submodel without a buffer is waited for",
    ),
    _mutant(
        "E22",
        first_reading_decides,
        _d.memory_back_late,
        "row 13",
        "memory that is not back at once is never back",
    ),
    _mutant(
        "R10.1",
        configure_never_retried,
        _d.configure_fails_once,
        "once",
        "one failed configuration ends a load",
    ),
    _mutant("E9", graveyard_empty, _d.board_that_faults, "E9", "tainted memory is given back"),
    _mutant(
        "E9",
        graveyard_without_budget,
        _d.graves_beyond_the_budget,
        "E9",
        "memory is kept for good without end",
    ),
    _mutant(
        "E9",
        buried_memory_untold,
        _d.graves_on_the_board,
        "E9",
        "the engine is not told what the process keeps",
    ),
    _mutant(
        "E14",
        counters_never_compared,
        _d.skewed_counters,
        "E14",
        "the device's counters are never looked at",
    ),
    _mutant(
        "E14",
        first_difference_believed,
        _d.counters_skewed_once,
        "E14",
        "one odd reading ends the trust",
    ),
    _mutant(
        "E14",
        ended_jobs_not_counted,
        _d.script,
        "E14",
        "the own account forgets how jobs ended",
    ),
    _mutant(
        "E10",
        blocked_call_unseen,
        _d.blocked_call,
        "E10",
        "nobody notices a call that does not return",
    ),
    _mutant("E17", kv_effect_ignored, _d.kv_not_applied, "E17", "KV commits though not applied"),
    _mutant(
        "E6, E19", reserved_lane_evicted, _d.cancels, "I4", "cancel frees a lane that a job names"
    ),
    _mutant(
        "E19",
        unreserved_lane_released,
        _d.kv_never_applied,
        "never reserved",
        "a bank is told to release what it never held",
    ),
    _mutant("E19", lane_kept_for_the_dead, _d.cancels, "E19", "an ended request keeps its lane"),
    _mutant(
        "E12, I3",
        lane_given_twice,
        _d.crowd,
        "lane.*no transition 'bind'",
        "two sequences on one lane",
    ),
    _mutant(
        "E15", rows_not_at_their_lanes, _d.blocks, "E15", "a lane's row of the batch is another's"
    ),
    _mutant(
        "E15, I9",
        taken_rows_left_in_the_queue,
        _d.blocks,
        "I9",
        "a sequence that was taken out of its turn stands in the queue twice",
    ),
    _mutant("E2", pool_key_without_task, _d.script, "R4.1", "a buffer of the other task is taken"),
    _mutant("E11, I6", two_in_flight, _d.script, "I6", "the ceiling is ignored"),
    _mutant("E7, I5", stale_believed, _d.stale_completions, "I5", "a stale completion is believed"),
    _mutant("G11, I5", epoch_ignored, _d.stale_completions, "I5", "the epoch is not compared"),
    _mutant(
        "G11, I5", generation_ignored, _d.stale_completions, "I5", "the generation is not compared"
    ),
    _mutant("E8", ticket_ignored, _d.stale_completions, "I5", "the ticket is not compared"),
    _mutant("E7", accounted_twice, _d.stale_completions, "E4", "a doubled completion counts again"),
    _mutant("I7", tokens_of_another_row, _d.board, "I7", "tokens come from the job before"),
    _mutant(
        "decision 4",
        effects_before_commit,
        _d.broken_journal,
        "decision 4",
        "effects begin before the commit",
    ),
    _mutant(
        "decision 14",
        delivered_before_durable,
        _d.broken_journal,
        "decision 14",
        "clients are told before it is durable",
    ),
    _mutant("decision 13, I11", event_not_evolved, _d.script, "idle", "an event does not evolve"),
    _mutant(
        "decision 13, I11", event_not_recorded, _d.script, "no transition", "a change without event"
    ),
    _mutant(
        "decision 2", table_unchecked, _d.illegal_events, "decision 2", "evolve believes any event"
    ),
    _mutant(
        "decision 3",
        chain_without_input,
        _d.altered_input,
        "decision 3",
        "the chain skips the input",
    ),
    _mutant(
        "decision 9",
        inbox_order_swapped,
        _d.script,
        "request/3 arrived",
        "the inbox turns order around",
    ),
    _mutant(
        "E25, R14.5",
        canary_plants.canary_verdict_ignored,
        _c.canary_that_differs,
        "R14.5",
        "a canary that differs is taken for a good one",
    ),
    _mutant(
        "decision 15",
        canary_plants.doubt_not_marked,
        _c.canary_that_differs,
        "decision 15",
        "clients are not told which tokens are in doubt",
    ),
    _mutant(
        "E25",
        canary_plants.canary_in_a_row,
        _c.canaries_under_load,
        "E25",
        "a canary keeps requests waiting for its length",
    ),
    _mutant(
        "E11",
        canary_plants.ceiling_stays_at_two,
        _c.canary_that_overlapped,
        "E11",
        "a canary that differs leaves two in flight",
    ),
    _mutant(
        "E11",
        canary_plants.ceiling_reason_ignored,
        _c.canary_that_overlapped,
        "E11",
        "two are in flight although one may be",
    ),
    _mutant(
        "E11",
        canary_plants.overlapped_results_believed,
        _c.canary_that_overlapped,
        "E11",
        "what overlapped with a wrong canary is believed",
    ),
    _mutant(
        "E11",
        canary_plants.told_while_examined,
        _c.tokens_decided_before,
        "E11",
        "clients are told tokens while it is not decided whether they are believed",
    ),
    _mutant(
        "E11",
        canary_plants.two_again_without_proof,
        _c.canary_that_overlapped,
        "E11",
        "two in flight again without two golden runs at once",
    ),
    _mutant(
        "E11",
        canary_plants.two_again_never,
        _c.canary_that_overlapped,
        "E11",
        "one in flight for ever",
    ),
    _mutant(
        "E11",
        canary_plants.poll_believed,
        _d.board_that_steps_illegally,
        "E11",
        "a poll that shows an end is believed without a result",
    ),
    _mutant(
        "E11",
        canary_plants.illegal_step_unsaid,
        _d.board_that_steps_illegally,
        "E11",
        "a state that contradicts itself is kept quiet",
    ),
    _mutant(
        "E28, I10",
        recovery_plants.budget_not_counted,
        _r.broken_for_good,
        "I10, E28",
        "resets are not counted",
    ),
    _mutant(
        "E28",
        recovery_plants.attempt_counted_afterwards,
        _r.one_exception,
        "E28",
        "an attempt is counted when its report comes",
    ),
    _mutant(
        "V1, E27",
        recovery_plants.health_not_verified,
        _r.resets_that_lie,
        "V1",
        "a device that does not answer after a reset is believed",
    ),
    _mutant(
        "V2, E24",
        recovery_plants.versions_not_verified,
        _r.another_firmware,
        "V2",
        "another firmware is served on",
    ),
    _mutant(
        "V3, E22",
        recovery_plants.memory_not_verified,
        _r.resets_that_lie,
        "V3",
        "memory that is not back is not looked at",
    ),
    _mutant(
        "V4, E14",
        recovery_plants.counters_not_verified,
        _r.resets_that_lie,
        "V4",
        "counters that do not add up are believed",
    ),
    _mutant(
        "V5, G11",
        recovery_plants.epoch_not_verified,
        _r.resets_that_lie,
        "V5",
        "an epoch that should have stayed is believed",
    ),
    _mutant(
        "V6, G5",
        recovery_plants.golden_skipped_after_a_reset,
        _r.one_exception,
        "G5",
        "a model serves again without golden",
    ),
    _mutant(
        "V6",
        recovery_plants.golden_ignored_after_a_reset,
        _r.wrong_golden,
        "tokens of the task",
        "a golden that differs after a reset changes nothing",
    ),
    _mutant(
        "G11, V5",
        recovery_plants.epoch_kept_over_a_reset,
        _r.sticky_device,
        "V5",
        "a reset of the device begins no epoch",
    ),
    _mutant(
        "G12",
        recovery_plants.generation_kept_over_a_reset,
        _r.one_exception,
        "decision 9",
        "a reset begins no generation",
    ),
    _mutant(
        "G3",
        recovery_plants.buffers_rebuilt_for_the_old_generation,
        _r.one_exception,
        "E1, E2",
        "buffers are rebuilt for the generation that ended",
    ),
    _mutant(
        "G8",
        recovery_plants.lanes_not_cleared,
        _r.pardoned,
        "the device is recovering",
        "unknown lanes are not cleared with their generation",
    ),
    _mutant(
        "G14, I10",
        recovery_plants.lanes_believed_over_a_reset,
        _r.one_exception,
        "I10",
        "lanes are believed while a reset runs",
    ),
    _mutant(
        "9.3, G15",
        recovery_plants.innocents_go_on_without_end,
        _r.innocents_twice,
        "9.3",
        "an innocent goes on after every fault",
    ),
    _mutant(
        "G15",
        recovery_plants.suspects_not_alone,
        _r.poison,
        "G15",
        "suspects run beside others",
    ),
    _mutant(
        "D11, I7",
        recovery_plants.delivered_token_repeated,
        _r.one_exception,
        "token 0 was to be told after 1",
        "a token is told again after a fault",
    ),
    _mutant(
        "R6.2",
        recovery_plants.suspended_keeps_its_lane,
        _r.one_exception,
        "R6.2",
        "a suspended request keeps its lane",
    ),
    _mutant(
        "G2",
        recovery_plants.withdrawn_job_submitted,
        _r.sticky_device,
        "G2",
        "a job that is taken back is submitted all the same",
    ),
    _mutant(
        "cascade guard",
        recovery_plants.drain_without_bound,
        _r.held_job,
        "cascade guard",
        "what is in flight is waited for without end",
    ),
    _mutant(
        "cascade guard",
        recovery_plants.drain_skipped,
        _r.held_job,
        "cascade guard",
        "what is in flight is not waited for",
    ),
    _mutant(
        "9.3",
        recovery_plants.pause_ignored,
        _r.broken_for_good,
        "9.3",
        "resets of the device follow one another at once",
    ),
    _mutant(
        "E28, G7",
        recovery_plants.restarts_not_counted,
        _r.crash_loop,
        "E28",
        "new processes are asked for without end",
    ),
    _mutant(
        "E28",
        recovery_plants.budgets_forgotten_at_a_start,
        _r.crash_loop,
        "E28",
        "a new process has a budget of its own",
    ),
    _mutant(
        "9.3",
        recovery_plants.half_open_fault_counts_once,
        _r.two_faults,
        "9.3",
        "a fault in the proof of a reset counts once",
    ),
    _mutant(
        "9.3",
        recovery_plants.poison_served,
        _r.poison,
        "9.3",
        "what failed the device twice is served again",
    ),
    _mutant(
        "9.3, G15",
        recovery_plants.pardon_missing,
        _r.pardoned,
        "9.3",
        "who got through alone stays accused",
    ),
    _mutant(
        "I5, G11",
        recovery_plants.fault_of_another_epoch_believed,
        _r.fault_of_before,
        "I5",
        "a fault of another epoch is believed",
    ),
    _mutant(
        "G15",
        guilt_plants.hang_blames_everybody,
        _g.two_hung,
        "G15",
        "of two jobs that stand still both are accused",
    ),
    _mutant(
        "G15",
        guilt_plants.hang_blames_the_one_told,
        _g.two_hung,
        "G15",
        "the job that is told first is accused, not the oldest",
    ),
    _mutant(
        "G15",
        guilt_plants.innocents_blamed,
        _g.exception_beside,
        "G15",
        "who runs beside a fault is accused of it",
    ),
    _mutant(
        "9.3",
        guilt_plants.twins_accused_twice,
        _g.twins,
        "9.3",
        "a prompt that stands twice in one faulted job is poison",
    ),
    _mutant(
        "G8",
        guilt_plants.prefill_without_the_last_token,
        _r.one_exception,
        "G8",
        "what goes on forgets its last token",
    ),
    _mutant(
        "D11, I7",
        guilt_plants.last_token_told_again,
        _r.one_exception,
        "told",
        "the last token is told again to who goes on",
    ),
    _mutant(
        "row 20, G11",
        guilt_plants.lost_configuration_served,
        _g.configuration_gone,
        "row 20",
        "a configuration that is gone is served on",
    ),
    _mutant(
        "E9",
        guilt_plants.freed_after_a_reset,
        _g.transfers_beyond_a_reset,
        "E9",
        "tainted memory is given back after a reset",
    ),
    _mutant(
        "R10.2",
        replacing_plants.drained_before_it_is_known,
        replacing_detectors.bad_replacement,
        "R10.2",
        "a model that serves is drained for an artifact that nobody has looked at",
    ),
    _mutant(
        "R14.5",
        replacing_plants.any_artifact_loaded_back,
        replacing_detectors.overwritten_source,
        "R14.5",
        "whatever is at the old place is loaded back",
    ),
    _mutant(
        "R14.5",
        replacing_plants.disproven_gone_back_to,
        replacing_detectors.wrong_for_good,
        "R14.5",
        "an artifact that was found wrong is gone back to",
    ),
    _mutant(
        "row 22",
        replacing_plants.foreign_reset_overlooked,
        replacing_detectors.somebody_elses_reset,
        "row 22",
        "a device in a later epoch is taken for the same",
    ),
    _mutant(
        "row 17",
        replacing_plants.configured_again_without_a_reset,
        replacing_detectors.configuration_that_fails_once,
        "row 17",
        "a configuration that failed is tried again on the same device",
    ),
    _mutant(
        "R14.5",
        replacing_plants.tried_again_taken_for_vetted,
        replacing_detectors.unloaded_on_purpose,
        "R14.5",
        "a load that was tried again brings back what its operator unloaded",
    ),
    _mutant(
        "R14.5",
        replacing_plants.loads_back_without_end,
        replacing_detectors.nothing_can_be_configured,
        "R14.5",
        "a load back that fails is made up for by a further one",
    ),
)
