"""Runs of like decode jobs are folded at once, to the state and the errors of a plain fold.

The plain fold applies every event by ``evolve``; it is the reference everywhere here. Lives are
decided by the real core: full batches undisturbed, and batches with everything that can happen
between two jobs.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
from support.journal_steps import run_core

from laneway.adapters import bench_ticks
from laneway.engine import evolve_run
from laneway.engine.decide import decide
from laneway.engine.effects import RestoreBuffer, SubmitJob
from laneway.engine.errors import JournalError
from laneway.engine.evolve import fold as fold_step
from laneway.engine.inputs import (
    BufferRestored,
    CancelRequested,
    Completed,
    EngineStarted,
    Input,
    JobProgressed,
    JobTimes,
    RequestSubmitted,
    RowResult,
    SubmitAccepted,
    TimePassed,
)
from laneway.engine.ports import Step
from laneway.engine.state import State, copy, freeze, initial_state
from laneway.journal import MemoryJournal, open_journal
from laneway.journal.chain import Head, RawRow, follow, row_chain
from laneway.journal.codec import Codec
from laneway.journal.meta import Meta
from laneway.journal.replay import TODAY, Code, fold, verify
from laneway.journal.runs import RunFolder

PLAIN = attrs.evolve(TODAY, fold=lambda state, step: fold_step(state, step))
"""Today's code, with every event applied by itself."""


def journal_of(steps: Iterator[Step], *, old: bool = False) -> MemoryJournal:
    """Return a journal of steps; an ``old`` one is written as version 1 was."""
    journal = MemoryJournal()
    if old:
        rows = {"journal_id": journal.journal_id, "schema_version": "1", "tokens": "full"}
        meta = Meta(rows, None)
        journal.codec, journal._origin, journal._head = meta.codec(), meta.origin(), meta.origin()
    for step in steps:
        journal.append([step])
    return journal


def skipped(journal: MemoryJournal) -> int:
    """Return how many steps of a journal are folded at once."""
    state = initial_state()
    folder = RunFolder(journal.codec, state, lambda row, step: fold_step(state, step))
    for row in journal.rows():
        folder.take(row[:5])  # type: ignore[arg-type]
    folder.finish()
    assert state == fold(journal, code=PLAIN)
    return folder.steps


BLOCK = 32
"""Steps after which a cut begins anew: longer than five runs that are as short as they can be."""


def assert_alike_at_every_step(journal: MemoryJournal, first: int = 1) -> None:
    """Fold the journal cut at every step, and compare with the state after it, step by step.

    A cut begins at the plain state before its block; at the end of each block the whole is folded.
    """
    state = initial_state()
    before, begin, head = initial_state(), journal.origin(), journal.origin()
    block: list[RawRow] = []
    for step, row in zip(journal.read(), journal.rows(), strict=True):
        fold_step(state, step)
        head = follow(head, row)[0]
        block.append(row)
        if step.step >= first:
            assert fold_rows(journal, before, begin, block) == state, f"step {step.step}"
        if len(block) == BLOCK:
            assert fold(journal, until=step.step) == state, f"all up to step {step.step}"
            before, begin, block = copy(state), head, []
    assert freeze(fold(journal)) == freeze(state)


def fold_rows(journal: MemoryJournal, before: State, begin: Head, rows: Sequence[RawRow]) -> State:
    """Return the state after rows, as ``fold`` does, from the one before them."""
    state = copy(before)
    plainly = partial(fold_step, state)
    folder = RunFolder(journal.codec, state, lambda _, step: plainly(step), exact=False)
    folder.take_all(begin, rows)
    folder.finish()
    return state


# ---------------------------------------------------------------------------- lives


def disturbed(seed: int, *, disturbances: float, inflight: int = 1) -> Iterator[Step]:
    """Return the steps of an engine that decodes; now and then something else happens."""
    draw = random.Random(seed)
    state = initial_state()
    later: deque[Input] = deque(opening(draw, inflight))
    inbox: list[Input] = []
    at_ns = 0
    while True:
        if inbox and not (later and state.aliases):
            # Two answers may come in either order, but no job is done before it was accepted.
            taken = inbox.pop(draw.random() < 0.1 and len(inbox) > 1)
            if isinstance(taken, Completed) and state.jobs[taken.job].state == "planned":
                inbox.append(taken)
                continue
            if not later and draw.random() < disturbances:
                inbox.insert(0, taken)
                taken = disturbance(draw, state)
        elif later:
            taken = later.popleft()
        else:
            return
        at_ns += draw.choice((0, 1, 1_000_000))
        decision = decide(state, taken, at_ns)
        yield Step(step=state.step, at_ns=at_ns, taken=taken, events=decision.events)
        for effect in decision.effects:
            inbox.extend(answers(draw, effect))


def opening(draw: random.Random, inflight: int) -> Iterator[Input]:
    """Return the opening of a life, with requests that end at different times."""
    for taken in bench_ticks.opening():
        if isinstance(taken, RequestSubmitted):
            taken = attrs.evolve(
                taken,
                max_tokens=draw.choice((9, 30, 500)),
                ignore_eos=draw.random() < 0.7,
                stop_token_ids=draw.choice(((), (77,))),
            )
        elif isinstance(taken, EngineStarted):
            limits = attrs.evolve(taken.limits, inflight_jobs_max=inflight)
            taken = attrs.evolve(taken, limits=limits)
        yield taken


def disturbance(draw: random.Random, state: State) -> Input:
    """Return something that may happen between any two steps."""
    requests = list(state.requests)
    jobs = [job for job in state.jobs.values() if job.state == "submitted"]
    kind = draw.randrange(4)
    if kind == 0 and requests:
        return CancelRequested(request=draw.choice(requests))
    if kind == 1 and jobs:
        return JobProgressed(job=jobs[0].number, ticket=jobs[0].ticket, phase="exec")
    if kind == 2:
        return TimePassed()
    asked = [one for one in bench_ticks.opening() if isinstance(one, RequestSubmitted)][0]
    return attrs.evolve(asked, request=state.next_request, max_tokens=draw.choice((5, 200)))


def answers(draw: random.Random, effect: Any) -> list[Input]:
    """Return what a healthy device says to an effect, with any ticket and any times."""
    if isinstance(effect, RestoreBuffer):
        return [BufferRestored(buffer=effect.buffer, job=effect.job)]
    if not isinstance(effect, SubmitJob):
        return []
    ticket = effect.job + draw.choice((0, 1, 900))
    done = Completed(
        job=effect.job,
        ticket=ticket,
        epoch=effect.epoch,
        generation=effect.generation,
        flags=7,
        kv_effect="applied",
        engine_slot=0,
        rows=tuple(RowResult(token=draw.choice((77, 5, 6, *range(100, 300)))) for _ in effect.rows),
        times=JobTimes(submit_ns=draw.choice((0, 5)), visible_ns=draw.choice((0, 90))),
    )
    return [SubmitAccepted(job=effect.job, ticket=ticket), done]


# ---------------------------------------------------------------------------- the same state


@pytest.mark.parametrize("old", [False, True])
def test_undisturbed_batches(old: bool) -> None:
    journal = journal_of(islice(bench_ticks.life(), 200), old=old)
    assert_alike_at_every_step(journal, first=110)
    assert skipped(journal) > 60
    report = verify(journal)
    assert report.ok, report.reason
    assert report.entity_events == sum(map(bench_ticks.entity_events, journal.read()))
    assert report.events == sum(len(step.events) for step in journal.read())


@pytest.mark.parametrize("inflight", [1, 2])
@pytest.mark.parametrize("disturbances", [0, 0.02, 0.2])
@pytest.mark.parametrize("seed", range(2))
def test_disturbed_batches(seed: int, disturbances: float, inflight: int) -> None:
    steps = disturbed(seed, disturbances=disturbances, inflight=inflight)
    journal = journal_of(islice(steps, 220))
    assert_alike_at_every_step(journal, first=150)
    assert verify(journal).ok


def test_disturbed_batches_have_runs() -> None:
    """Else the test above would show nothing."""
    counts = [
        skipped(journal_of(islice(disturbed(seed, disturbances=0.02), 220))) for seed in range(3)
    ]
    assert min(counts) > 0 and max(counts) > 50, counts


def test_the_core_on_a_device() -> None:
    journal = MemoryJournal()
    run_core(journal)
    run_core(journal, fault=True, wall_clock_ns=1_800_000_000_000_000_000)
    assert_alike_at_every_step(journal)


@pytest.mark.parametrize("count", [1, 5, 12, 64])
def test_blocks_of_any_size_hold_the_same(
    count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Blocks that end within a job, between two jobs and between two steps of either buffer."""
    steps = list(islice(bench_ticks.life(), 170))
    whole = journal_of(iter(steps))
    state, read = freeze(fold(whole, code=PLAIN)), list(whole.read())
    monkeypatch.setattr("laneway.journal.memory.ROWS_AT_ONCE", count)
    monkeypatch.setattr("laneway.journal.store.ROWS_PER_READ", count)
    for target in (None, tmp_path / "run.db"):
        with open_journal(target) as journal:
            journal.append(steps)
            assert [len(rows) for rows in journal.blocks()][:-1] == [count] * ((170 - 1) // count)
            assert [row.step for row in journal.rows(first=30, last=140)] == [*range(30, 141)]
            assert list(journal.read(first=30, last=140)) == read[29:140]
            assert freeze(fold(journal)) == state
            report = verify(journal)
            assert (report.ok, report.steps) == (True, 170), report.reason
            assert report.events == sum(len(step.events) for step in steps)


def test_a_long_run_is_moved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laneway.journal.runs.TICKS_MAX", 4)
    journal = journal_of(islice(bench_ticks.life(), 160))
    assert skipped(journal) > 30
    assert_alike_at_every_step(journal, first=110)


def test_digests_are_folded_plainly() -> None:
    journal = open_journal(None, tokens="digest")
    assert isinstance(journal, MemoryJournal)
    for step in islice(bench_ticks.life(), 150):
        if isinstance(step.taken, EngineStarted):
            step = attrs.evolve(step, taken=attrs.evolve(step.taken, journal_tokens="digest"))
        journal.append([step])
    assert skipped(journal) == 0


# ---------------------------------------------------------------------------- the same errors


def outcome(journal: MemoryJournal, code: Code) -> object:
    """Return the state a journal is folded to, or why it is not, and what verify says."""
    try:
        folded: object = fold(journal, code=code)
    except JournalError as error:
        folded = (type(error), str(error))
    report = verify(journal, code=code)
    return folded, report


@pytest.mark.parametrize("column", ["input", "events"])
def test_a_text_changed_within_a_run(column: str) -> None:
    """A digit or a bracket changed under a chain that fits: the answer is the plain fold's."""
    change_texts(column, 24)


@pytest.mark.soak
@pytest.mark.parametrize("column", ["input", "events"])
def test_many_texts_changed_within_a_run(column: str) -> None:
    change_texts(column, 1200)


def change_texts(column: str, count: int) -> None:
    """Change so many texts, one at a time; at least a third of them must be refused."""
    draw = random.Random(column)
    journal = journal_of(islice(bench_ticks.life(), 150))
    sound = list(journal._rows)
    first = 150 - skipped(journal)
    refused = 0
    for _ in range(count):
        number = draw.randrange(first, 150)
        text = bytearray(getattr(sound[number], column))
        places = [n for n, letter in enumerate(text) if letter in b"0123456789,[]"]
        text[draw.choice(places)] = draw.choice(b"0123456789,[]")
        forge(journal, sound, number, column, bytes(text))
        told = outcome(journal, TODAY)
        assert told == outcome(journal, PLAIN), (number, text)
        refused += not told[1].ok  # type: ignore[index]
    assert refused > count / 3


@pytest.mark.parametrize(
    ("column", "old", "new"),
    [
        ("input", b"]]", b"],[true]]"),
        ("input", b",[[", b",[[-1,"),
        ("input", b"[1,", b"[1, "),
        ("events", b"[1,1,", b"[1,1, "),
        ("events", b"[1,1,", b"[1,2,"),
    ],
)
def test_another_form_within_a_run(column: str, old: bytes, new: bytes) -> None:
    journal = journal_of(islice(bench_ticks.life(), 150))
    sound = list(journal._rows)
    for number in range(120, 126):
        forge(journal, sound, number, column, getattr(sound[number], column).replace(old, new, 1))
        assert outcome(journal, TODAY) == outcome(journal, PLAIN), number


@pytest.mark.parametrize(
    ("times", "told"),
    [
        (b"5,null,null,null,null,null,null,null,85,0", True),
        (b"null,null,null,null,null,null,null,null,null,-1", True),
        (b"5,1,1,1,[3],1,1,1,1,0", True),
        (b"5,1,1,1,[30],1,1,1,1,0", False),
        (b"0,1,1,1,1,1,1,1,1,0", False),
        (b"5,1,1,-1,1,1,1,1,1,0", False),
        (b"[5],1,1,1,1,1,1,1,1,0", False),
        (b"5,1,1,1,1,1,1,1,1,null", False),
    ],
)
def test_instants_within_a_run_have_one_form(times: bytes, told: bool) -> None:
    """By the rule in ``journal/instants.py``: what lies later is written as a difference."""
    text = b'[1,17,917,1,2,7,"applied",1,[[101,102]],[%b]]' % times
    assert (Codec().plain_completion(text) is not None) == told


def forge(journal: MemoryJournal, sound: list[Any], number: int, column: str, text: bytes) -> None:
    """Give a journal the sound rows with one text changed, under a chain that fits."""
    rows = [*sound[:number], sound[number]._replace(**{column: text}), *sound[number + 1 :]]
    chain = journal.origin().chain if number == 0 else rows[number - 1].chain
    for index in range(number, len(rows)):
        row = rows[index]
        chain = row_chain(chain, row.step, row.at_ns, row.input_kind, row.input, row.events)
        rows[index] = row._replace(chain=chain)
    journal._rows[:] = rows
    journal._head = Head(rows[-1].step, rows[-1].at_ns, chain)


def test_a_ticket_of_more_digits_than_python_reads() -> None:
    """A forged number of any length gets the plain fold's answer, not an error of its own."""
    journal = journal_of(islice(bench_ticks.life(), 150))
    sound: list[Any] = list(journal._rows)
    number = next(n for n in range(130, 150) if sound[n].input_kind == b"SubmitAccepted")
    head, _, _ = sound[number].input.rpartition(b",")
    for digits in (25, 5000):
        forge(journal, sound, number, "input", head + b"," + b"9" * digits + b"]")
        assert outcome(journal, TODAY) == outcome(journal, PLAIN)


# ---------------------------------------------------------------------------- planted mistakes


def test_verify_finds_a_state_that_was_moved_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deciding goes step by step, so its state tells on a fold that went at once."""
    real = evolve_run.skip

    def wrong(state: State, *rest: Any, **more: Any) -> None:
        real(state, *rest, **more)
        state.device.ledger.finished += 1

    monkeypatch.setattr("laneway.journal.runs.skip", wrong)
    report = verify(journal_of(islice(bench_ticks.life(), 150)))
    assert (report.ok, report.asked) == (False, "decide")
    assert "is not the folded state" in report.reason


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state, job: setattr(job, "suspected", True),
        lambda state, job: setattr(job, "recall_until_ns", 5),
        lambda state, job: setattr(job, "overlapped", True),
        lambda state, job: setattr(job, "state", "uncertain"),
        lambda state, job: setattr(job, "origin", "canary"),
        lambda state, job: setattr(job, "task", "prefill"),
        lambda state, job: state.jobs.update({999: job}),
        lambda state, job: state.decode_ready.append(1),
        lambda state, job: state.prefill_again.append(1),
        lambda state, job: state.chunking.append(1),
        lambda state, job: setattr(state, "reserving", (1,)),
        lambda state, job: setattr(state.device, "epoch", 9),
        lambda state, job: setattr(state.device, "refusals_in_a_row", 1),
        lambda state, job: setattr(state.device, "backoff_tries", 1),
        lambda state, job: setattr(state.models[job.model].canary, "went", True),
        lambda state, job: setattr(state.models[job.model].canary, "batches", ()),
        lambda state, job: setattr(state.buffers[job.buffer], "state", "running"),
        lambda state, job: state.models[job.model].free_buffers["decode"].clear(),
        lambda state, job: setattr(state.requests[3], "alone", True),
        lambda state, job: setattr(state.requests[3], "state", "prefilling"),
        lambda state, job: setattr(state.requests[3], "refusals", 1),
        lambda state, job: setattr(state.requests[3], "kv_refusals", 1),
        lambda state, job: setattr(state.requests[3], "prefill_tokens", 1 << 30),
        lambda state, job: state.requests.pop(3),
        lambda state, job: setattr(state.lanes[3], "on_device", False),
        lambda state, job: setattr(state.lanes[3], "carried", ()),
        lambda state, job: setattr(state.lanes[3], "length_tokens", 7),
        lambda state, job: setattr(state.lanes[3], "due", state.lanes[3].carried),
    ],
)
def test_a_state_that_is_not_at_rest_begins_no_run(spoil: Any) -> None:
    journal = journal_of(islice(bench_ticks.life(), 150))
    at = max(n for n in range(140, 150) if evolve_run.find_run(fold(journal, until=n)) is not None)
    state = fold(journal, until=at)
    (job,) = state.jobs.values()
    spoil(state, job)
    assert evolve_run.find_run(state) is None


def test_a_completion_that_says_more_than_tokens_is_not_plain() -> None:
    codec = Codec()
    done = next(
        step.taken
        for step in bench_ticks.full_batches(bench_ticks.life())
        if isinstance(step.taken, Completed)
    )
    _, text = codec.encode_input(done)
    assert codec.plain_completion(text) == (done.job, tuple(row.token for row in done.rows))
    odd = msgspec.structs.replace(done.rows[3], stop_hit=True)
    _, text = codec.encode_input(attrs.evolve(done, rows=(*done.rows[:3], odd, *done.rows[4:])))
    assert codec.plain_completion(text) is None
    assert codec.plain_completion(b"[1]") is codec.plain_completion(b"") is None
