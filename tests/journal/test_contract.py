"""What every journal does, whatever it is kept in."""

import threading
from collections.abc import Callable

import attrs
import pytest
from support.journal_steps import completed, started, story, ticks

from laneway.engine.errors import JournalWriteError
from laneway.engine.inputs import NO_TOKEN, Completed, RequestSubmitted, SubmitAccepted
from laneway.engine.ports import JournalPort, Step
from laneway.journal import Journal, MemoryJournal, ReadableJournal
from laneway.journal.chain import RawRow, follow

Factory = Callable[..., Journal]


def test_it_is_both_ports(make_journal: Factory) -> None:
    journal = make_journal()
    writes: JournalPort = journal
    reads: ReadableJournal = journal
    assert (writes.tokens, reads.journal_id) == ("full", journal.journal_id)
    journal.close()


def test_an_empty_journal(make_journal: Factory) -> None:
    with make_journal() as journal:
        assert journal.head() == (0, 0)
        assert list(journal.read()) == []
        assert list(journal.rows()) == []
        assert journal.findings() == []


def test_what_was_appended_is_read(make_journal: Factory) -> None:
    steps = story()
    with make_journal() as journal:
        journal.append(steps[:1])
        journal.append(steps[1:4])
        journal.append([])
        journal.append(steps[4:])
        assert list(journal.read()) == steps
        assert journal.head() == (5, 5000)


RANGES: list[tuple[int, int | None, list[int]]] = [
    (1, None, [1, 2, 3, 4, 5]),
    (1, 3, [1, 2, 3]),
    (2, 2, [2]),
    (4, None, [4, 5]),
    (4, 99, [4, 5]),
    (5, None, [5]),
    (6, None, []),
    (9, None, []),
    (3, 2, []),
    (1, 0, []),
    (0, 2, [1, 2]),
]


def test_ranges(make_journal: Factory) -> None:
    with make_journal() as journal:
        journal.append(story())
        for first, last, numbers in RANGES:
            assert [step.step for step in journal.read(first=first, last=last)] == numbers


def test_many_rows_are_read_in_order(make_journal: Factory) -> None:
    steps = [*story(), *ticks(6, 1500)]
    with make_journal() as journal:
        journal.append(steps)
        assert list(journal.read()) == steps
        assert [step.step for step in journal.read(first=1000, last=1400)] == [*range(1000, 1401)]


def test_the_chain_begins_at_the_origin(make_journal: Factory) -> None:
    with make_journal() as journal:
        journal.append(story())
        head = journal.origin()
        for row in journal.rows():
            assert isinstance(row, RawRow)
            head, *_ = follow(head, row)
        assert head.step == 5


def test_two_journals_have_two_ids(make_journal: Factory) -> None:
    with make_journal() as one:
        pass
    assert len(one.journal_id) == 32
    other = MemoryJournal()
    assert other.journal_id != one.journal_id


@pytest.mark.parametrize(
    "wrong",
    [
        ticks(7, 1),
        ticks(5, 1),
        [Step(step=6, at_ns=4999, taken=SubmitAccepted(job=1, ticket=1), events=())],
        [Step(step=6, at_ns=1 << 63, taken=SubmitAccepted(job=1, ticket=1), events=())],
        [Step(step=6, at_ns=6000, taken=started("digest"), events=())],
        [*ticks(6, 1), *ticks(8, 1)],
        [*ticks(6, 1), Step(step=7, at_ns=9000, taken="?", events=())],  # type: ignore[arg-type]
    ],
    ids=["gap", "again", "time falls", "time too large", "other mode", "later gap", "no input"],
)
def test_steps_that_do_not_follow_are_refused_whole(
    make_journal: Factory, wrong: list[Step]
) -> None:
    steps = story()
    with make_journal() as journal:
        journal.append(steps)
        with pytest.raises(JournalWriteError, match="step [5678]"):
            journal.append(wrong)
        assert list(journal.read()) == steps
        assert journal.head() == (5, 5000)
        journal.append(ticks(6, 1))
        assert journal.head() == (6, 6000)


def test_a_step_may_take_no_time(make_journal: Factory) -> None:
    with make_journal() as journal:
        journal.append([attrs.evolve(step, at_ns=0) for step in story()])
        assert journal.head() == (5, 0)


def test_close_is_idempotent_and_ends_appending(make_journal: Factory) -> None:
    journal = make_journal()
    journal.append(story())
    journal.close()
    journal.close()
    with pytest.raises(JournalWriteError, match="closed"):
        journal.append(ticks(6, 1))
    assert list(journal.read()) == story()


def test_other_threads_read(make_journal: Factory) -> None:
    found: list[list[Step]] = []
    with make_journal() as journal:
        journal.append(story())
        thread = threading.Thread(target=lambda: found.append(list(journal.read())))
        thread.start()
        thread.join()
    assert found == [story()]


def test_another_thread_appends(make_journal: Factory) -> None:
    with make_journal() as journal:
        thread = threading.Thread(target=lambda: journal.append(story()))
        thread.start()
        thread.join()
        assert list(journal.read()) == story()


def test_appending_while_reading(make_journal: Factory) -> None:
    with make_journal() as journal:
        journal.append([*story(), *ticks(6, 1000)])
        reading = journal.read()
        next(reading)
        journal.append(ticks(1006, 1))
        assert [step.step for step in reading][-1] >= 1005
        assert journal.head()[0] == 1006


def test_digest(make_journal: Factory) -> None:
    with make_journal(tokens="digest") as journal:
        assert journal.tokens == "digest"
        journal.append(story("digest"))
        stored = b"".join(row.input + row.events for row in journal.rows())  # type: ignore[operator]
        for secret in (b"7,8,9", b"secret stop", b"client-secret", b"54321", b"54322"):
            assert secret not in stored
        steps = list(journal.read())
    assert [step.events for step in steps] == [step.events for step in story()]
    request, done = steps[1].taken, steps[4].taken
    assert isinstance(request, RequestSubmitted)
    assert request.prompt == (NO_TOKEN,) * 3
    assert isinstance(done, Completed)
    assert attrs.evolve(done, rows=()) == completed(17, ())
