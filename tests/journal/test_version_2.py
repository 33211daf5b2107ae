"""What a job leaves in a file of schema version 2: every text and every chain, letter by letter.

The texts are written here by the rules in ``codec.py``, ``instants.py`` and ``events.py``, the
chains made by the rule in ``chain.py``, so that a quicker way to write them stays the same way.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

from laneway.engine.inputs import (
    BufferRestored,
    Completed,
    Input,
    JobTimes,
    RowResult,
    SubmitAccepted,
)
from laneway.engine.ports import Step
from laneway.journal.chain import Head
from laneway.journal.codec import Codec
from laneway.journal.edges import edges_of
from laneway.journal.sealing import seal
from laneway.statemachines import Event

EDGES = [
    ("buffer", "complete", "submitted", "completing"),
    ("job", "complete", "submitted", "completed"),
    ("lane", "commit", "reserved", "ready"),
    ("lane", "reserve", "ready", "reserved"),
    ("buffer", "acquire", "free", "preparing"),
    ("job", "plan", "drafted", "planned"),
    ("buffer", "release", "completing", "free"),
    ("job", "submit", "planned", "submitted"),
]
CODEC = Codec(edges=edges_of((code, *edge) for code, edge in enumerate(EDGES)))
ORIGIN = Head(40, 1_000, bytes(range(32)))
LANES, OTHERS = (3, 4, 5, 6), (7, 8)
TIMES = JobTimes(
    submit_ns=90_000_000_000_000,
    accept_ns=90_000_000_004_100,
    h2d_begin_ns=90_000_000_012_300,
    h2d_end_ns=90_000_000_095_400,
    exec_begin_ns=90_000_000_095_400,
    exec_end_ns=90_000_009_412_700,
    d2h_begin_ns=90_000_009_420_100,
    d2h_end_ns=90_000_009_690_800,
    visible_ns=90_000_009_702_300,
    postprocess_ns=412_345,
)
TIMES_TEXT = "[90000000000000,4100,8200,83100,0,9317300,7400,270700,11500,412345]"


def event(code: int, *entities: int, epoch: int = 1, **data: object) -> Event:
    """Return an event along one of the edges above."""
    return Event(EDGES[code][0], entities, *EDGES[code][1:], epoch, 2, data)


def done(*rows: RowResult, job: int = 16) -> Completed:
    """Return the end of a job."""
    return Completed(
        job=job,
        ticket=912,
        epoch=1,
        generation=2,
        flags=7,
        kv_effect="applied",
        engine_slot=0,
        rows=rows,
        times=TIMES,
    )


PLAIN = done(RowResult(token=48_810), RowResult(token=0), RowResult(token=151_935))
ODD = done(
    RowResult(token=5, stop_hit=True, logprobs=((5, -0.5),)),
    RowResult(token=-1, fault="numeric", kv_digest=77),
)
PLANNED: dict[str, Any] = {
    "task": "decode",
    "buffer": 2,
    "owners": LANES,
    "model": 1,
    "origin": "request",
}
PLANNED_TEXT = '{"buffer":2,"model":1,"origin":"request","owners":[3,4,5,6],"task":"decode"}'

CASES: list[tuple[Input, tuple[Event, ...], str, str]] = [
    (
        PLAIN,
        (
            event(0, 1),
            event(1, 16),
            event(2, *LANES),
            event(3, *OTHERS, by=1, job=17),
            event(3, *LANES, by=1, job=17),
            event(4, 2, job=17),
            event(5, 17, **PLANNED),
        ),
        f'[1,16,912,1,2,7,"applied",0,[[48810,0,151935]],{TIMES_TEXT}]',
        '[1,2,[0,1],[1,16],[2,[[3,6]]],[3,[7,8],{"by":1,"job":17}],[3,[[3,6]],{"by":1,"job":17}],'
        f'[4,2,{{"job":17}}],[5,17,{PLANNED_TEXT}]]',
    ),
    (BufferRestored(buffer=1, job=16), (event(6, 1),), "[1,1,16]", "[1,2,[6,1]]"),
    (
        SubmitAccepted(job=17, ticket=913),
        (event(7, 17, epoch=3, ticket=913), event(2, *OTHERS), event(2, *LANES)),
        "[1,17,913]",
        '[3,2,[7,17,{"ticket":913}],[2,[7,8],1,2],[2,[[3,6]],1,2]]',
    ),
    (
        ODD,
        (),
        '[1,16,912,1,2,7,"applied",0,[[5,-1],[true,false],["","numeric"],null,[null,77],'
        f"[[[5,-0.5]],[]]],{TIMES_TEXT}]",
        "[]",
    ),
]


def chain_of(previous: bytes, numbers: Iterable[int], texts: Iterable[str]) -> bytes:
    """Return a row's chain, by the rule in ``chain.py``."""
    said = previous
    for number in numbers:
        said += b"I" + (8).to_bytes(8, "big") + number.to_bytes(8, "big", signed=True)
    for text in texts:
        said += b"T" + len(text.encode()).to_bytes(8, "big") + text.encode()
    return hashlib.sha256(said).digest()


def test_every_text_and_chain_of_a_job() -> None:
    """Twice, since what was written before makes the second time quicker."""
    for _ in range(2):
        steps = [
            Step(step=number, at_ns=1_000 * number, taken=taken, events=events)
            for number, (taken, events, _, _) in enumerate(CASES, 41)
        ]
        rows, head = seal(CODEC, ORIGIN, steps)
        chain = ORIGIN.chain
        for row, step, (taken, _, text, events) in zip(rows, steps, CASES, strict=True):
            texts = (type(taken).__name__, text, events)
            chain = chain_of(chain, (step.step, step.at_ns), texts)
            assert row == (step.step, step.at_ns, *texts, bytearray(chain))
        assert head == (44, 44_000, chain)


def test_a_long_text_is_chained_as_a_short_one() -> None:
    """Around the lengths that are known beforehand, and around a length of two bytes' worth."""
    for count in (600, 682, 683, 684, 30_000):
        taken = done(*[RowResult(token=7)] * count)
        step = Step(step=41, at_ns=5_000, taken=taken, events=())
        ((_, _, kind, text, events, chain),) = seal(CODEC, ORIGIN, [step])[0]
        assert text.count(",7") >= count - 1 and len(text) > 2 * count
        assert chain == chain_of(ORIGIN.chain, (41, 5_000), (kind, text, events))
