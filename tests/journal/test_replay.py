"""Folding, and proving that today's code decides the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.journal_steps import run_core, story, tamper, ticks

from laneway.engine.decide import decide
from laneway.engine.draft import Decision
from laneway.engine.errors import InternalError, JournalFormatError, ReplayDivergedError
from laneway.engine.evolve import fold
from laneway.engine.inputs import Completed, EngineStarted, Input
from laneway.engine.ports import Step
from laneway.engine.state import State, freeze, initial_state
from laneway.journal import Journal, MemoryJournal, open_journal
from laneway.journal.chain import Head, RawRow, row_chain
from laneway.journal.replay import TODAY, verify
from laneway.journal.replay import fold as fold_journal
from laneway.statemachines import Event


@pytest.fixture
def core() -> MemoryJournal:
    """Return a journal of the real core: one good incarnation."""
    journal = MemoryJournal()
    run_core(journal)
    return journal


def rewritten(journal: Journal, change: Callable[[Step], Step]) -> MemoryJournal:
    """Return a journal of changed steps with a chain that is right: another code wrote it."""
    other = MemoryJournal(tokens=journal.tokens)
    other.append([change(step) for step in journal.read()])
    return other


def test_fold_is_the_state_at_a_step(core: MemoryJournal) -> None:
    state = initial_state()
    for step in core.read():
        fold(state, step)
        if step.step in (1, 7, 20):
            assert freeze(fold_journal(core, step.step)) == freeze(state)
    assert freeze(fold_journal(core)) == freeze(state)
    assert freeze(fold_journal(core, 0)) == freeze(initial_state())


def test_verify_says_yes_and_counts(core_file: Path) -> None:
    with open_journal(core_file, read_only=True) as journal:
        steps = list(journal.read())
        report = verify(journal)
        chain = list(journal.rows())[-1].chain
    assert (report.ok, report.asked, report.step, report.reason) == (True, "decide", 0, "")
    assert report.steps == len(steps)
    assert report.incarnations == 2
    assert report.events == sum(len(step.events) for step in steps)
    assert report.entity_events == sum(len(e.entities) for step in steps for e in step.events)
    assert isinstance(chain, bytes)
    assert report.chain == chain.hex()
    assert report.to_json()["ok"] is True


def test_an_empty_journal_is_good() -> None:
    report = verify(MemoryJournal())
    assert (report.ok, report.steps) == (True, 0)


def test_other_events_than_today_are_found(core: MemoryJournal) -> None:
    """The recorded job data names another task; folding does not mind, deciding does."""
    plan = next(s.step for s in core.read() if any(e.trigger == "plan" for e in s.events))

    def change(step: Step) -> Step:
        if step.step != plan:
            return step
        events = tuple(
            attrs.evolve(e, data={**e.data, "more": 1}) if e.trigger == "plan" else e
            for e in step.events
        )
        return attrs.evolve(step, events=events)

    report = verify(rewritten(core, change))
    assert (report.ok, report.asked, report.step) == (False, "decide", plan)
    assert '"more":1' in report.reason.split("decided")[0]
    assert '"more":1' not in report.reason.split("decided")[1]


@pytest.mark.parametrize("extra", [True, False])
def test_an_event_too_many_or_too_few_is_found(core: MemoryJournal, extra: bool) -> None:
    def forgetful(state: State, taken: Input, at_ns: int) -> Decision:
        decision = decide(state, taken, at_ns)
        if not isinstance(taken, Completed):
            return decision
        again = decision.events + decision.events[-1:] if extra else decision.events[:-1]
        return decision._replace(events=again)

    report = verify(core, code=attrs.evolve(TODAY, decide=forgetful))
    first = next(s.step for s in core.read() if isinstance(s.taken, Completed))
    assert (report.ok, report.asked, report.step) == (False, "decide", first)


def test_deciding_that_fails_is_found(core: MemoryJournal) -> None:
    def broken(state: State, taken: Input, at_ns: int) -> Decision:
        if isinstance(taken, Completed):
            raise InternalError("told to")
        return decide(state, taken, at_ns)

    report = verify(core, code=attrs.evolve(TODAY, decide=broken))
    assert (report.asked, report.reason) == ("decide", "deciding fails: told to")


def test_a_decided_state_that_is_not_the_folded_one_is_found(core: MemoryJournal) -> None:
    def careless(state: State, taken: Input, at_ns: int) -> Decision:
        decision = decide(state, taken, at_ns)
        state.device.refusals_in_a_row += 1
        return decision

    report = verify(core, code=attrs.evolve(TODAY, decide=careless))
    assert (report.ok, report.asked, report.step) == (False, "decide", core.head()[0])
    assert "the decided state is not the folded state" in report.reason


def test_events_that_do_not_fit_are_found(core: MemoryJournal) -> None:
    def change(step: Step) -> Step:
        events = tuple(attrs.evolve(e, source="free") for e in step.events)
        return attrs.evolve(step, events=events) if step.step == 6 else step

    other = rewritten(core, change)
    report = verify(other)
    assert (report.ok, report.asked, report.step) == (False, "fold", 6)
    with pytest.raises(ReplayDivergedError, match="step 6") as error:
        fold_journal(other)
    assert error.value.step == 6
    fold_journal(other, 5)


def test_data_of_another_code_is_found(core: MemoryJournal) -> None:
    def change(step: Step) -> Step:
        return attrs.evolve(step, events=tuple(attrs.evolve(e, data={}) for e in step.events))

    other = rewritten(core, change)
    report = verify(other)
    assert (report.ok, report.asked) == (False, "fold")
    assert "KeyError" in report.reason
    with pytest.raises(ReplayDivergedError):
        fold_journal(other)


def test_a_journal_begins_with_its_engine() -> None:
    journal = MemoryJournal()
    journal.append(ticks(1, 2))
    report = verify(journal)
    assert (report.ok, report.asked, report.step) == (False, "fold", 1)
    assert "begins with EngineStarted" in report.reason


def forged(journal: MemoryJournal, step: int, column: str, value: bytes) -> MemoryJournal:
    """Put another text into a row and compute every chain again, as a careful forger would."""
    head = journal.origin()
    rows: list[RawRow] = []
    for row in journal.rows():
        changed: Any = row._replace(**{column: value}) if row.step == step else row
        chain = row_chain(
            head.chain,
            changed.step,
            changed.at_ns,
            changed.input_kind,
            changed.input,
            changed.events,
        )
        rows.append(changed._replace(chain=chain))
        head = Head(changed.step, changed.at_ns, chain)
    journal._rows[:] = rows
    return journal


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("input", b"[1,99]", "length"),
        ("input", b'[1,1,"m", "x"]', "not in the form"),
        ("input_kind", b"Nonsense", "unknown input kind"),
        ("input_kind", b"\xff", "unknown input kind"),
        ("events", b"[ ]", "not in the form"),
        ("events", b'[1,0,[["model","load","unloaded","validating"],1]]', "not in the form"),
        ("events", b"nonsense", "malformed"),
    ],
)
def test_rows_that_no_journal_writes(
    core: MemoryJournal, column: str, value: bytes, says: str
) -> None:
    report = verify(forged(core, 2, column, value))
    assert (report.ok, report.asked, report.step) == (False, "fold", 2), report.reason
    assert says in report.reason


def test_a_digest_is_folded_and_says_so() -> None:
    full, digest = MemoryJournal(), MemoryJournal(tokens="digest")
    run_core(full)
    run_core(digest)
    report = verify(digest)
    assert (report.ok, report.asked) == (True, "fold")
    assert "cannot be decided again" in report.note
    assert verify(full).note == ""
    assert (report.events, report.steps) == (verify(full).events, verify(full).steps)
    assert [step.events for step in digest.read()] == [step.events for step in full.read()]


def test_an_incarnation_of_the_wrong_mode(core: MemoryJournal) -> None:
    text = next(iter(core.rows())).input
    assert isinstance(text, bytes)
    report = verify(forged(core, 1, "input", text.replace(b'"full"', b'"digest"')))
    assert (report.asked, report.step) == ("fold", 1)
    assert "journal_tokens='digest'" in report.reason


def test_a_bad_chain_goes_before_what_the_fold_says(story_file: Path) -> None:
    """The fold would say no at step 2 already; and a row of a bad chain is never folded."""

    def unfit(state: Any, step: Step) -> None:
        assert step.step < 2, "unfit"

    code = attrs.evolve(TODAY, fold=unfit)
    with open_journal(story_file, read_only=True) as journal:
        assert (verify(journal, code=code).asked, verify(journal, code=code).step) == ("fold", 2)
        steps = verify(journal, code=code).steps
        assert steps == journal.head()[0]
    tamper(story_file, ("UPDATE step SET at_ns = at_ns + 1 WHERE step = 4", ()))
    with open_journal(story_file, read_only=True) as journal:
        report = verify(journal, code=code)
        assert (report.asked, report.step, report.steps) == ("chain", 4, 3)
        assert (report.incarnations, report.events, report.entity_events) == (0, 0, 0)
        folded: list[int] = []
        note = attrs.evolve(TODAY, fold=lambda state, step: folded.append(step.step))
        with pytest.raises(JournalFormatError, match="step 4"):
            fold_journal(journal, code=note)
        assert folded == [1, 2, 3]


def test_another_code_can_be_asked() -> None:
    """The parts are parameters: here a state that counts, and a core that repeats the story."""
    events = {type(step.taken): step.events for step in story()}

    def count(state: list[int], step: Step) -> None:
        state[0] += len(step.events)

    def repeat(state: list[int], taken: Input, at_ns: int) -> Decision:
        state[0] += len(events[type(taken)])
        return Decision(events[type(taken)], ())

    code = attrs.evolve(TODAY, initial_state=lambda: [0], fold=count, freeze=tuple, decide=repeat)
    journal = MemoryJournal()
    journal.append(story())
    assert fold_journal(journal, code=code) == [6]  # type: ignore[comparison-overlap]
    assert verify(journal, code=code).ok
    events[EngineStarted] = (Event("device", (0,), "open", "closed", "lost", 1, 0),)
    assert verify(journal, code=code).step == 1
