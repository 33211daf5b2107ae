"""Which journals a test has proven, so that the proof after every test need not repeat it."""

from laneway.journal.port import ReadableJournal
from laneway.journal.replay import VerifyReport, verify

_PROVEN: set[tuple[str, int, int]] = set()
"""Random number of the journal, and its last step's number and instant."""


def prove(journal: ReadableJournal) -> VerifyReport:
    """Verify a journal and remember that it holds."""
    report = verify(journal)
    assert report.ok, f"{report.asked}, step {report.step}: {report.reason}"
    _PROVEN.add((journal.journal_id, *journal.head()))
    return report


def prove_once(journal: ReadableJournal) -> None:
    """Verify a journal unless it was proven and has no step since."""
    if (journal.journal_id, *journal.head()) not in _PROVEN:
        prove(journal)
