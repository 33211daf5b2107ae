"""Fold the rows of a journal: long runs of like decode jobs at once, all else step by step.

Theory of operation. Every row is checked against the chain. After a job's three rows were folded
plainly, the engine is asked whether the state stands before a run (``engine/evolve_run.py``); if
so, the texts of the next rows are known but for tokens, instants and tickets, and are compared as
they are, without making values of them. What fits is only counted, its tokens kept; the first row
that does not fit ends the run: ``skip`` moves the state to the last even job, and the rows behind
that are folded plainly. Nothing is believed that a plain fold would not have believed, and no row
that a plain fold would have refused is passed over.
"""

from collections.abc import Callable
from functools import partial

from laneway.engine.evolve_run import Run, find_run, skip
from laneway.engine.inputs import BufferRestored, SubmitAccepted
from laneway.engine.ports import Step
from laneway.engine.state import State
from laneway.journal.chain import Block, FollowedRow, Head, are_typed, follow, follow_all
from laneway.journal.codec import Codec
from laneway.journal.sealing import decode_row

TICKS_MAX = 4096
"""Jobs whose tokens are kept before the state is moved."""

DIGITS_MAX = 19
"""Of a number that a journal can hold."""

_TICK = {b"Completed", b"BufferRestored", b"SubmitAccepted"}
_PAIR = 2 * len(_TICK)
"""Rows of two jobs."""

Texts = tuple[bytes, ...]
_RESTORED, _ACCEPTED = 1, 2
_STAND_IN = 7_777_777_777_777_770
"""A number no job has, to find where a job's number stands in a text."""


class RunFolder:
    """Fold row after row; ``take`` each, then ``finish``.

    ``plainly`` folds one step into the state; it may raise whatever it likes.
    """

    def __init__(
        self,
        codec: Codec,
        state: State,
        plainly: Callable[[FollowedRow, Step], None],
        *,
        bulk: bool = True,
        exact: bool = True,
    ) -> None:
        """Begin at a state; without ``bulk`` every row is folded plainly.

        ``exact``: a row of a run has the one text of what it says.
        """
        self._exact = exact
        self._codec = codec
        self._bulk = bulk and codec.tokens == "full"
        self._state = state
        self._plainly = plainly
        self._match: _Match | None = None
        self._kinds: list[bytes] = []
        self.at = 0
        """The step that was taken last, by itself."""

        self.steps = self.events = self.entity_events = 0
        """What was passed over at once."""

    def take_all(self, head: Head, rows: Block) -> Head:
        """Take the next rows, which follow ``head``; return where the journal stands after them.

        Raises: JournalFormatError for a row that does not follow the chain.
        """
        at = 0
        may_fit = True
        while at < len(rows):
            count = (len(rows) - at) // _PAIR * _PAIR
            if may_fit and count and self._match is not None and not self._match.tail:
                after = self._match.fit_all(head, rows[at : at + count])
                may_fit = after is not None
                if after is not None:
                    head, at = after, at + count
                    self._bound(self._match)
                    continue
            head, kind, taken, events = follow(head, rows[at])
            self.take((head.step, head.at_ns, kind, taken, events))
            at += 1
        return head

    def take(self, row: FollowedRow) -> None:
        """Take the next row."""
        self.at = row[0]
        match = self._match
        if match is None:
            self._fold(row)
        elif not match.fits(row):
            self.finish()
            self._fold(row)
        else:
            self._bound(match)

    def _bound(self, match: "_Match") -> None:
        """Move the state between two jobs of a run, if many are kept."""
        if len(match.tokens) >= TICKS_MAX and not match.tail:
            self.finish()
            self._begin()

    def finish(self) -> None:
        """End the run there is, so that the state is that after the last row taken."""
        match, self._match = self._match, None
        if match is None:
            return
        match.move(self._state)
        self.steps += match.steps
        self.events += match.steps // len(_TICK) * len(match.moves)
        self.entity_events += match.steps // len(_TICK) * sum(match.moves)
        for row in match.tail:
            self._fold_one(row)

    def _fold_one(self, row: FollowedRow) -> None:
        self._plainly(row, decode_row(self._codec, row))
        self._kinds = [*self._kinds[-2:], row[2]]

    def _fold(self, row: FollowedRow) -> None:
        """Fold a row plainly, and see whether a run begins behind it."""
        self._fold_one(row)
        if self._bulk and self._kinds[0] == b"Completed" and _TICK.issubset(self._kinds):
            self._begin()

    def _begin(self) -> None:
        run = find_run(self._state)
        self._match = None if run is None else _Match(self._codec, run, exact=self._exact)


class _Match:
    """Rows held against a run: what fitted up to the last even job, and the ``tail`` behind it."""

    def __init__(self, codec: Codec, run: Run, *, exact: bool) -> None:
        self._run = run
        self._job = run.job
        self._turn = 0
        self._waits_for = 0
        self._read = partial(codec.plain_completion, exact=exact)
        self._count = len(run.lanes)
        self._texts = [_Texts(codec, run, turn) for turn in (0, 1)]
        self._now = self._texts[0]
        following = (*run.completed(0, 0), *run.restored(0), *run.accepted(0, 0, 0))
        self.moves = [len(event.entities) for event in following]
        self._drawn: tuple[int, ...] = ()
        self._planned_ns = self._ticket = 0
        self._at = (0, 0, 0, 0)
        self._pending: list[tuple[int, ...]] = []
        self.tokens: list[tuple[int, ...]] = []
        self.tail: list[FollowedRow] = []
        self.steps = 0

    def fits(self, row: FollowedRow) -> bool:
        """Take note of a row if it is the next one of the run; return whether it is."""
        _, at_ns, kind, taken, events = row
        waits_for = self._waits_for
        if not waits_for:
            fits = kind == b"Completed" and self._completed(at_ns, taken, events)
        elif kind == b"BufferRestored":
            fits = bool(waits_for & _RESTORED) and self._restored(taken, events)
        elif kind == b"SubmitAccepted":
            fits = bool(waits_for & _ACCEPTED) and self._accepted(taken, events)
        else:
            return False
        if fits:
            self.tail.append(row)
            if not self._waits_for:
                self._end_job(row)
        return fits

    def fit_all(self, head: Head, rows: Block) -> Head | None:
        """Take note of the rows of an even number of jobs, if all are the next ones of the run.

        Return where the journal stands after them; else None, and nothing is changed.
        """
        columns = tuple(zip(*rows, strict=True))
        _, instants, kinds, inputs, events, _, _ = columns
        order = kinds[: len(_TICK)]
        jobs = range(self._job, self._job + len(rows) // len(_TICK))
        if not are_typed(columns):
            return None
        if (
            order[0] != b"Completed"
            or _TICK.symmetric_difference(order)
            or kinds != order * len(jobs)
        ):
            return None
        at = order.index(b"SubmitAccepted"), order.index(b"BufferRestored")
        tickets = self._tickets(jobs, inputs[at[0] :: 3], events[at[0] :: 3])
        if tickets is None or not self._all_restored(jobs, inputs[at[1] :: 3], events[at[1] :: 3]):
            return None
        tokens = self._all_completed(jobs, inputs[::3], events[::3])
        after = None if tokens is None else follow_all(head, columns)
        if tokens is None or after is None:
            return None
        self.tokens += tokens
        self._job += len(jobs)
        self.steps += len(rows)
        self._at = (after.step, after.at_ns, instants[-3], tickets[-1])
        return after

    def _tickets(self, jobs: range, inputs: Texts, events: Texts) -> list[int] | None:
        """Return the tickets by which the jobs behind some were accepted, None for another text."""
        try:
            tickets = [int(text[text.rindex(b",") + 1 : -1]) for text in inputs]
        except ValueError:
            return None
        for turn, texts in enumerate(self._texts):
            told = list(zip([job + 1 for job in jobs[turn::2]], tickets[turn::2], strict=True))
            accepted = texts.accepted_input + b"%d]"
            if inputs[turn::2] != tuple([accepted % one for one in told]):
                return None
            if events[turn::2] != tuple([texts.accepted % one for one in told]):
                return None
        return tickets

    def _all_restored(self, jobs: range, inputs: Texts, events: Texts) -> bool:
        for turn, texts in enumerate(self._texts):
            if set(events[turn::2]) != {texts.restored}:
                return False
            if inputs[turn::2] != tuple([texts.restored_input % job for job in jobs[turn::2]]):
                return False
        return True

    def _all_completed(
        self, jobs: range, inputs: Texts, events: Texts
    ) -> list[tuple[int, ...]] | None:
        """Return the tokens of jobs, None for another text or a token that may end a request."""
        for turn, texts in enumerate(self._texts):
            told = [(job, job + 1, job + 1, job + 1) for job in jobs[turn::2]]
            if events[turn::2] != tuple([texts.completed % one for one in told]):
                return None
        tokens: list[tuple[int, ...]] = []
        for job, done in zip(jobs, map(self._read, inputs), strict=True):
            if done is None or done[0] != job or len(done[1]) != self._count:
                return None
            tokens.append(done[1])
        ends = self._run.ends
        return tokens if not ends or all(map(ends.isdisjoint, tokens)) else None

    def move(self, state: State) -> None:
        """Move the state over the jobs that fitted."""
        step, now_ns, planned_ns, ticket = self._at
        known = {"step": step, "now_ns": now_ns, "planned_ns": planned_ns, "ticket": ticket}
        skip(state, self._run, self.tokens, **known)

    def _completed(self, at_ns: int, taken: bytes, events: bytes) -> bool:
        told = self._read(taken)
        if told is None:
            return False
        job, tokens = told
        if (
            job != self._job
            or len(tokens) != self._count
            or not self._run.ends.isdisjoint(tokens)
            or events != self._now.completed % (job, job + 1, job + 1, job + 1)
        ):
            return False
        self._drawn, self._planned_ns = tokens, at_ns
        self._waits_for = _RESTORED | _ACCEPTED
        return True

    def _restored(self, taken: bytes, events: bytes) -> bool:
        texts = self._now
        if events != texts.restored or taken != texts.restored_input % self._job:
            return False
        self._waits_for &= ~_RESTORED
        return True

    def _accepted(self, taken: bytes, events: bytes) -> bool:
        texts, following = self._now, self._job + 1
        begin = texts.accepted_input % following
        told = taken[len(begin) : -1]
        if not told.isdigit() or len(told) > DIGITS_MAX:
            return False
        ticket = int(told)
        if taken != b"%b%d]" % (begin, ticket) or events != texts.accepted % (following, ticket):
            return False
        self._ticket = ticket
        self._waits_for &= ~_ACCEPTED
        return True

    def _end_job(self, row: FollowedRow) -> None:
        """Go on to the next job; behind an even one lies nothing that would be folded again."""
        self._pending.append(self._drawn)
        self._job += 1
        self._turn = 1 - self._turn
        self._now = self._texts[self._turn]
        if self._turn == 0:
            self.tokens += self._pending
            self._pending.clear()
            self.steps += len(self.tail)
            self.tail.clear()
            self._at = (row[0], row[1], self._planned_ns, self._ticket)


class _Texts:
    """What the rows of one job say, numbers of jobs and the ticket left open for ``%d``."""

    def __init__(self, codec: Codec, run: Run, turn: int) -> None:
        job, ticket = _STAND_IN, _STAND_IN + 5
        self.completed = _open(codec.encode_events(run.completed(job, turn)), job, job + 1)
        self.restored = codec.encode_events(run.restored(turn))
        self.accepted = _open(codec.encode_events(run.accepted(job, turn, ticket)), job + 1, ticket)
        _, text = codec.encode_input(BufferRestored(buffer=run.buffers[turn], job=job))
        self.restored_input = _open(text, job)
        _, text = codec.encode_input(SubmitAccepted(job=job, ticket=ticket))
        self.accepted_input = _open(text, job).removesuffix(b"%d]" % ticket)


def _open(text: bytes, *numbers: int) -> bytes:
    """Return a text with ``%d`` in the place of numbers; nothing in it stands for itself twice."""
    text = text.replace(b"%", b"%%")
    for number in numbers:
        text = text.replace(b"%d" % number, b"%d")
    return text
