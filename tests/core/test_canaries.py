"""Golden runs among the jobs of requests: when they run, what they cost, what a bad one ends in.

The fake device says what the golden rows are held against, so a verdict is planted; tokens are held
against runs alone.

Source: E11, E25, R5.3, R14.5, decision 15.
"""

from collections.abc import Callable, Iterator

import attrs
import pytest
from support.canary_rig import (
    OFTEN,
    bad,
    begin_examination,
    busy,
    differs,
    fill,
    planned,
    told_so_far,
)
from support.fake_device import FakeDevice, KvFault, artifact
from support.rig import Rig
from support.schedules import Scheduled, Shape

from laneway.engine import Limits
from laneway.engine.effects import Conclude, Deliver, SubmitJob
from laneway.engine.inputs import ArtifactValidated, Completed, Input, StatusDoubted
from laneway.engine.limits import SECOND
from laneway.statemachines import Event

IDLE_NS = 600 * SECOND
LIMITS = {1: attrs.evolve(OFTEN, inflight_jobs_max=1), 2: OFTEN}


# ---------------------------------------------------------------------------- when


def test_an_idle_engine_runs_one_after_a_while_and_comes_to_rest() -> None:
    rig = Rig(canaries=True)
    rig.run()
    assert not planned(rig, "canary"), "nothing was served since the golden run of the load"
    for served in (1, 2):
        ready_ns = rig.state.now_ns
        fill(rig, 1)
        rig.run()
        assert len(rig.events("model", "prove")) == served
        assert rig.state.now_ns - ready_ns >= IDLE_NS * (served == 2)
        rig.run()
        assert len(rig.events("model", "prove")) == served, "nothing was served since"
    jobs = planned(rig, "canary")
    assert [e.data["task"] for e in jobs] == ["prefill", "decode", "decode"] * 2
    rig.check_answers()
    rig.check_idle()
    rig.close()


def test_it_is_never_due_where_limits_say_so_or_the_artifact_has_no_golden_run() -> None:
    for limits, device in (
        (Limits(canary_jobs=0, canary_idle_ns=0), FakeDevice()),
        (OFTEN, FakeDevice(artifact=_without_golden)),
    ):
        rig = Rig(limits=limits, canaries=True, device=device)
        fill(rig)
        rig.run()
        assert not planned(rig, "canary")
        rig.check_answers()
        rig.close()


def _without_golden(model: int) -> ArtifactValidated:
    facts = artifact(model)
    return attrs.evolve(facts, trials=facts.trials[1:])


@pytest.mark.parametrize("inflight", [1, 2])
@pytest.mark.parametrize("every", [3, 20])
def test_under_load_one_begins_after_so_many_jobs_and_costs_each_turn_one_at_most(
    inflight: int, every: int
) -> None:
    rig = busy(attrs.evolve(LIMITS[inflight], canary_jobs=every), inflight=inflight)
    fill(rig, 20)
    most = 0
    while len(planned(rig, "request")) < 120:
        assert rig.act()
        model = rig.state.models[1]
        if model.empty_lanes and not model.runs and not rig.engine._inbox._queue:
            most = max(most, model.canary.jobs)
    assert most < every, "one that is due takes the next empty lane"
    origins = [e.data["origin"] for e in planned(rig)][2:]
    pairs = list(zip(origins, origins[1:], strict=False))
    assert ("canary", "canary") not in pairs, "a request had work at every turn"
    assert len(rig.events("model", "prove")) > 1
    rig.run()
    rig.check_answers()
    rig.check_idle()
    rig.close()


def test_the_batches_in_use_take_turns() -> None:
    rig = busy(attrs.evolve(OFTEN, canary_jobs=4), batches=(1, 2, 4))
    fill(rig, 30)
    rig.run()
    buffers = {e.entities[0]: e for e in rig.events("buffer", "acquire")}
    used = set()
    for event in planned(rig, "canary"):
        used.add(rig.state.buffers[event.data["buffer"]].submodel)
    assert buffers and {"decode_b4", "prefill_b4"} <= used
    served = {
        rig.state.buffers[event.data["buffer"]].submodel.rpartition("_b")[2]
        for event in planned(rig, "request")
    }
    ran = {name.rpartition("_b")[2] for name in used}
    assert ran == served, "each batch that requests ran in, and no other"
    rig.check_answers()
    rig.close()


def test_a_batch_that_must_be_full_has_its_canary_when_its_lanes_are_free() -> None:
    shape = Shape((1, 4), 4, "undefined", 1, attrs.evolve(LIMITS[1], canary_jobs=2), canaries=True)
    rig = Scheduled(shape).rig
    fill(rig, 12)
    rig.run()
    rows = [len(event.data["owners"]) for event in planned(rig, "canary")]
    assert set(rows) <= {1, 4} and 4 in rows
    rig.check_answers()
    rig.close()


# ---------------------------------------------------------------------------- one that differs


def test_one_that_differs_alone_ends_the_belief_in_its_generation() -> None:
    rig = busy(LIMITS[1], inflight=1)
    rig.device.on_result = bad(lambda asked: asked.rows[0].start > 0)
    streams = fill(rig, 20)
    rig.run()
    assert rig.state.device.state == "lost"
    assert "computes wrongly: canary of trial 0 at position 2: 3 of" in rig.state.device.reason
    (mark,) = rig.events("model", "mark")
    assert not rig.events("model", "examine")
    told = {stream.request: stream.result() for stream in streams}
    marked = {number: first for number, first in mark.data["requests"]}
    assert marked and set(marked.values()) == {0}, "no canary was good before"
    for number, result in told.items():
        again = rig.engine.attach(number).result()
        assert (again.tokens, again.suspect_tokens_from) == (
            result.tokens,
            result.suspect_tokens_from,
        ), "who asks again is told of the mark too"
        if number in marked:
            assert result.suspect_tokens_from == 0 and result.error is not None
        elif result.error is not None:
            assert result.suspect_tokens_from is None and not result.tokens
    rig.check_answers(ended_early=[stream for stream in streams if stream.result().error])
    rig.close()


def test_while_one_that_overlapped_is_examined_nothing_is_delivered() -> None:
    rig = begin_examination()
    assert rig.state.device.ceiling_reason.endswith("while two jobs overlapped")
    tokens = told_so_far(rig)
    counted = {n: len(r.tokens) for n, r in rig.state.requests.items()}
    asked = len(planned(rig, "request"))
    actions = 0
    while not rig.events("model", "acquit"):
        assert rig.act()
        actions += 1
        assert tokens == told_so_far(rig)
        assert counted == {n: len(r.tokens) for n, r in rig.state.requests.items()}
    assert actions > 6 and asked == len(planned(rig, "request")) - 1
    withheld = [e for e in rig.events("job", "complete") if e.data.get("withheld")]
    assert len(withheld) == 1, "one job was in flight beside the canary"
    rig.run()
    rig.check_answers()
    rig.check_idle()
    rig.close()


def test_metrics_and_sums_count_only_what_is_believed() -> None:
    rig = begin_examination(runs=2)
    assert rig.engine.metrics().value("inflight_restricted") == 1
    rig.run()
    told = rig.engine.metrics()
    tokens = sum(len(one.stream.result().tokens) for one in rig.streams)
    assert told.value("generation_tokens_total") == tokens
    assert told.value("metrics_failures_total") == 0
    verdicts = [event.trigger for event in rig.events("model", "prove", "acquit", "mark")]
    for result, triggers in (("equal", ("prove", "acquit")), ("different", ("mark",))):
        counted = told.value("canary_runs_total", result=result)
        assert counted == sum(trigger in triggers for trigger in verdicts) > 0
    rig.close()


def test_what_is_marked_begins_where_the_last_good_one_began() -> None:
    rig = begin_examination(runs=3, count=30)
    (mark,) = rig.events("model", "mark")
    begun = _tokens_at_begin(rig, good=2)
    expected = [
        [number, begun.get(number, 0)]
        for number, request in rig.state.requests.items()
        if len(request.tokens) > begun.get(number, 0)
    ]
    assert mark.data["requests"] == expected and len(expected) > 3
    assert any(first > 0 for _, first in expected)
    rig.run()
    marked = {number: first for number, first in [*expected, *mark.data["ended"]]}
    for one in rig.streams:
        found = one.stream.result().suspect_tokens_from
        if one.stream.request in {number for number, _ in expected}:
            assert found == marked[one.stream.request]
        else:
            assert found is None, "it ended before, or was served after"
    rig.check_answers()
    rig.close()


def _tokens_at_begin(rig: Rig, *, good: int) -> dict[int, int]:
    """Count from the inputs alone how many tokens each request had when a canary began."""
    tokens: dict[int, int] = {}
    plans: dict[int, Event] = {}
    ended = 0
    at_begin: list[dict[int, int]] = []
    for step in rig.steps:
        for event in step.events:
            if (event.machine, event.trigger) == ("job", "plan"):
                plans[event.entities[0]] = event
                origin, task = event.data["origin"], event.data["task"]
                if (origin, task) == ("canary", "prefill"):
                    at_begin.append(dict(tokens))
            elif (event.machine, event.trigger) == ("job", "complete"):
                assert isinstance(step.taken, Completed)
                plan = plans[event.entities[0]]
                if plan.data["origin"] == "request":
                    for owner in plan.data["owners"]:
                        tokens[owner] = tokens.get(owner, 0) + 1
            elif (event.machine, event.trigger) == ("model", "prove"):
                ended += 1
                if ended == good:
                    return at_begin[-1]
    raise AssertionError("not so many canaries were good")


def test_a_golden_run_that_differs_alone_too_ends_the_belief() -> None:
    rig = begin_examination()
    rig.device.on_result = bad(lambda asked: True)
    rig.run()
    assert rig.state.device.state == "lost" and "computes wrongly" in rig.state.device.reason
    assert len(rig.events("model", "mark")) == 2 and not rig.events("model", "acquit")
    for one in rig.streams:
        result = one.stream.result()
        assert result.usage.completion_tokens == len(result.tokens)
    rig.check_answers(ended_early=[one.stream for one in rig.streams])
    rig.close()


@pytest.mark.parametrize("trouble", ["refused", "doubt", "kv", "no lane"])
def test_an_examination_that_cannot_be_made_ends_the_belief(trouble: str) -> None:
    rig = begin_examination()
    if trouble == "refused":
        rig.device.submits.extend([0x0101] * 3)
    elif trouble == "doubt":
        rig.device.submits.append("doubt")
    elif trouble == "kv":
        rig.device.kv_faults.append(KvFault(verb="RESERVE", times=9))
    else:
        rig.device.kv_faults.append(KvFault(verb="RELEASE", unknown=True, times=9))
    rig.run()
    for one in rig.streams:
        assert one.stream.ended, f"nobody waits for ever: {rig.state.device}"
    assert not any(model.canary.examining for model in rig.state.models.values())
    rig.close()


@pytest.mark.parametrize("believed", [True, False])
def test_tokens_decided_just_before_wait_until_it_is_known_whether_they_are_believed(
    believed: bool,
) -> None:
    """A result of another job that is taken together with the canary's is held back too."""
    rig = busy()
    held: list[Input] = []

    def on_result(asked: SubmitJob, done: Completed) -> Input | None:
        if rig.events("model", "mark"):
            return done if believed or asked.origin == "request" else differs(asked, done)
        if asked.origin != "canary" or asked.rows[0].start == 0:
            return done
        held.append(differs(asked, done))
        return None

    rig.device.on_result = on_result
    fill(rig, 30)
    rig.run(until=lambda: bool(held))
    rig.run(until=lambda: any(isinstance(e, Deliver) for e in rig.engine._outbox))
    waiting = [e for e in rig.engine._outbox if isinstance(e, Deliver)]
    assert waiting
    rig.interrupt(held[0])
    assert rig.events("model", "examine")
    counts = told_so_far(rig)
    rig.run(until=lambda: not rig.state.models[1].canary.examining)
    assert counts == told_so_far(rig)
    rig.run()
    for effect in waiting:
        result = rig.streams[effect.request - 1].stream.result()
        assert (effect.position < len(result.tokens)) is believed
        assert result.usage.completion_tokens == len(result.tokens)
        assert result.suspect_tokens_from is not None
    rig.check_answers(ended_early=[] if believed else [one.stream for one in rig.streams])
    rig.close()


# ---------------------------------------------------------------------------- back to two


def test_it_has_two_in_flight_again_after_good_canaries_and_two_golden_runs_at_once() -> None:
    rig = begin_examination()
    proven = len(rig.events("model", "prove"))
    fill(rig, 60, first=100)
    rig.run(until=lambda: bool(rig.events("device", "relax")))
    assert len(rig.events("model", "prove")) == proven + 2 + 2, "two canaries, and the two at once"
    pairs = [e for e in rig.events("lane", "bind") if e.data.get("pair")]
    assert len(pairs) == 2 and not set(pairs[0].entities) & set(pairs[1].entities)
    assert rig.state.device.ceiling_reason == ""
    rig.run(until=lambda: len(planned(rig)) > 200 and len(rig.state.jobs) == 2)
    assert {job.origin for job in rig.state.jobs.values()} == {"request"}
    rig.run()
    rig.check_answers()
    rig.check_idle()
    rig.close()


def test_after_a_second_fall_it_takes_twice_as_many() -> None:
    rig = begin_examination()
    fill(rig, 60, first=100)
    rig.run(until=lambda: bool(rig.events("device", "relax")))
    doubted = StatusDoubted(job=1, ticket=1, kind="backwards", before="exec", shown="h2d")
    rig.interrupt(doubted)
    proven = len(rig.events("model", "prove"))
    fill(rig, 80, first=200)
    rig.run(until=lambda: len(rig.events("device", "relax")) == 2)
    assert len(rig.events("model", "prove")) == proven + 4 + 2
    rig.close(drain=False)


def test_two_golden_runs_at_once_that_differ_leave_it_at_one() -> None:
    rig = begin_examination()
    paired: list[int] = []

    def when(asked: SubmitJob) -> bool:
        pairing = rig.state.models[1].canary.pairing
        paired.extend(pairing)
        return bool(pairing) and asked.rows[0].start > 0

    rig.device.on_result = bad(when)
    fill(rig, 60, first=100)
    rig.run(until=lambda: len(rig.events("model", "examine")) == 2)
    assert paired
    rig.device.on_result = None
    rig.run(until=lambda: len(rig.events("model", "acquit")) == 2)
    assert not rig.events("device", "relax")
    assert rig.state.device.ceiling_reason and rig.state.device.good_canaries == 0
    rig.run()
    rig.check_answers()
    rig.close()


def test_no_requests_job_runs_beside_the_two() -> None:
    rig = begin_examination()
    fill(rig, 60, first=100)
    rig.run(until=lambda: bool(rig.state.models[1].canary.pairing))
    while rig.state.models[1].canary.pairing:
        assert {job.origin for job in rig.state.jobs.values()} <= {"canary"}
        assert rig.act()
    assert rig.events("device", "relax")
    rig.close(drain=False)


def test_a_device_whose_counters_are_not_believed_stays_at_one() -> None:
    rig = busy()
    rig.device.skew = {"finished": 1}
    for number in range(3):
        fill(rig, 1, first=number)
        rig.run()
    assert rig.events("device", "distrust")
    assert "counters of the device are wrong" in rig.state.device.ceiling_reason
    rig.device.skew = {}
    fill(rig, 80, first=100)
    rig.run()
    assert rig.state.device.good_canaries > 8 and not rig.events("device", "relax")
    rig.check_answers()
    rig.close()


# ---------------------------------------------------------------------------- anomalies


def doubt(kind: str) -> StatusDoubted:
    return StatusDoubted(job=9, ticket=909, kind=kind, before="exec", shown="h2d")


@pytest.mark.parametrize("kind", ["backwards", "early"])
def test_an_illegal_step_leaves_one_in_flight(kind: str) -> None:
    rig = busy()
    fill(rig, 8)
    rig.run(until=lambda: len(rig.state.jobs) == 2)
    rig.interrupt(doubt(kind))
    said = "job/9, ticket 909, steps illegally: shown h2d after exec"
    assert rig.state.device.ceiling_reason == said
    rig.run(until=lambda: len(rig.state.jobs) < 2)
    rig.run(until=lambda: len(rig.state.jobs) == 2 or not rig.state.requests)
    rig.run()
    rig.check_answers()
    rig.close()


def test_results_found_by_polls_alone_are_borne_twice_an_hour() -> None:
    rig = busy()
    hour_ns = 3600 * SECOND
    for by_ns in (1, hour_ns // 2, hour_ns // 2 + 2, hour_ns // 2 + 2):
        rig.device.clock.advance(by_ns)
        rig.interrupt(doubt("missed"))
        assert not rig.state.device.ceiling_reason, "two within any hour"
    rig.interrupt(doubt("missed"))
    said = "3 results in an hour were found by polls alone"
    assert rig.state.device.ceiling_reason == said
    rig.close()


# ---------------------------------------------------------------------------- in between


def endings() -> Iterator[Callable[[Rig], None]]:
    yield lambda rig: rig.ask_close(drain=True)
    yield lambda rig: rig.ask_close(drain=False)
    yield lambda rig: rig.ask_unload(1)
    yield cancel_all


def cancel_all(rig: Rig) -> None:
    for one in rig.streams:
        one.stream.cancel()


@pytest.mark.parametrize("ending", list(endings()), ids=["drain", "close", "unload", "cancel"])
def test_an_end_at_every_point_of_an_examination(ending: Callable[[Rig], None]) -> None:
    whole = begin_examination()
    total = whole.run(until=lambda: bool(whole.events("model", "acquit")))
    assert total > 10
    for count in range(0, total + 1, 2):
        rig = begin_examination()
        rig.run_actions(count, seen=count - 2)
        ending(rig)
        rig.run()
        assert all(one.stream.ended for one in rig.streams)
        rig.check_answers(ended_early=[one.stream for one in rig.streams])
        if rig.state.device.state != "closed":
            rig.check_idle()
        rig.replays = count % 8 == 0
        rig.close()


@pytest.mark.parametrize("told", [0x0101, 0x0601, 0x0301, "early", "doubt"])
def test_a_canary_that_the_device_does_not_take_costs_nobody_a_token(told: int | str) -> None:
    for inflight in (1, 2):
        rig = busy(LIMITS[inflight], inflight=inflight)
        asked: list[int] = []

        def meanwhile(taken: Input, rig: Rig = rig, asked: list[int] = asked) -> None:
            waits = [e for e in rig.device._effects if isinstance(e, SubmitJob)]
            first = waits[0] if waits else None
            if first is not None and first.origin == "canary" and first.job not in asked:
                asked.append(first.job)
                if len(asked) < (2 if told == "doubt" else 6):
                    rig.device.submits.appendleft(told)

        rig.device.meanwhile = meanwhile
        fill(rig, 20)
        rig.run()
        assert asked
        rig.check_answers()
        rig.close()


@pytest.mark.parametrize("verb", ["RESERVE", "COMMIT", "RELEASE"])
def test_a_canary_whose_kv_is_not_applied_costs_nobody_a_token(verb: str) -> None:
    rig = busy()
    fill(rig, 20)
    rig.run(until=lambda: bool(planned(rig, "canary")))
    rig.device.kv_faults.append(KvFault(verb=verb))
    rig.run()
    early = [one.stream for one in rig.streams if one.stream.result().error is not None]
    assert len(early) <= 1
    rig.check_answers(ended_early=early)
    rig.close()


def test_what_clients_are_told_is_told_once_each() -> None:
    rig = begin_examination()
    rig.run()
    effects = [e for e in rig.engine._held._held if isinstance(e, Conclude)]
    assert not effects
    rig.check_answers()
    rig.close()
