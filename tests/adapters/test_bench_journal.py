"""The suite ``journal`` measures what it says: full batches, equal rows, gates the right way."""

import json
import sqlite3
from itertools import islice
from pathlib import Path

import attrs

from laneway.adapters import bench_journal
from laneway.adapters.bench_ticks import (
    BATCH,
    entity_events,
    full_batches,
    life,
)
from laneway.adapters.measuring import absolute, times_as_fast
from laneway.engine.inputs import BufferRestored, Completed, SubmitAccepted
from laneway.engine.invariants import check
from laneway.engine.state import initial_state
from laneway.engine.watch import Watch
from laneway.journal import open_journal, schema
from laneway.journal.replay import verify


def test_a_tick_is_three_steps_and_moves_39_entities() -> None:
    """By hand: buffer, job, 16 commits, 16 reserves, buffer, job; buffer; buffer and job."""
    steps = list(islice(full_batches(life()), 6))
    assert [type(step.taken) for step in steps] == [Completed, BufferRestored, SubmitAccepted] * 2
    assert [entity_events(step) for step in steps] == [BATCH * 2 + 4, 1, 2] * 2


def test_the_life_keeps_every_invariant_and_verifies() -> None:
    state, watch = initial_state(), Watch()
    journal = open_journal(None)
    for step in islice(life(state), 300):
        watch.take(step)
        check(state)
        journal.append([step])
    report = verify(journal)
    assert report.ok and report.asked == "decide" and report.steps == 300


def test_both_sides_write_the_same_rows(tmp_path: Path) -> None:
    steps = [attrs.evolve(step, step=n) for n, step in enumerate(islice(life(), 50), 1)]
    with bench_journal._Bare(tmp_path / "bare.db") as bare:
        for row in bare.ready_made(steps):
            bare.connection.execute(schema.INSERT_STEP, row)
    with open_journal(tmp_path / "ours.db") as ours:
        for step in steps:
            ours.append([step])
    rows = []
    for name in ("bare.db", "ours.db"):
        connection = sqlite3.connect(tmp_path / name)
        told = "SELECT step, at_ns, input_kind, input, events FROM step ORDER BY step"
        rows.append(connection.execute(told).fetchall())
        connection.close()
    assert rows[0] == rows[1] and len(rows[0]) == 50


def test_every_figure_of_the_suite_is_one_json_object() -> None:
    figures = list(bench_journal.run(rounds=1, appends=2, steps=200))
    assert [figure.id for figure in figures] == ["J1", "J1/log", "J2", "J3/fold", "J3/verify"]
    for figure in figures:
        assert json.loads(json.dumps(figure.to_json()))["baseline_value"] > 0


def test_a_gate_on_the_value_itself() -> None:
    assert absolute("J2", 25.0, "bytes", "text", 20.0, most=25).gate_met
    assert not absolute("J2", 25.1, "bytes", "text", 20.0, most=25).gate_met
    assert absolute("J3", 100.0, "events/s", "read", 400.0, least=100).gate_met
    missed = absolute("J3", 99.0, "events/s", "read", 396.0, least=100)
    assert not missed.gate_met and (missed.gate, missed.ratio) == (">= 100 events/s", 0.25)


def test_a_gate_on_a_share_of_the_baseline() -> None:
    assert times_as_fast("J1", 10.0, "us", "bare", 7.0, limit=0.7).gate_met
    missed = times_as_fast("J1", 10.0, "us", "bare", 6.9, limit=0.7)
    assert not missed.gate_met and (missed.gate, missed.ratio) == (">= 0.7x as fast", 0.69)
