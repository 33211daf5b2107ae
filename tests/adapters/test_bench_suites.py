"""The suites tick, ffi, pingpong and batch measure what they say; nothing here is timed."""

import json
from pathlib import Path

import attrs
import pytest
from support.command_line import laneway

from laneway.adapters import bench_batch, bench_ffi, bench_pingpong, bench_schedule, bench_tick
from laneway.adapters.bench_batch import Measured, choose, measure
from laneway.adapters.bench_board import calbin, probed
from laneway.adapters.bench_pingpong import EXEC_NS, TRANSFER_NS, idle_share, model_times
from laneway.engine import canaries, queueing
from laneway.engine.errors import ConfigurationError
from laneway.engine.inputs import BufferRestored, Completed, JobTimes, SubmitAccepted
from laneway.engine.plan import Plan
from laneway.engine.ports import Step
from laneway.engine.state import ModelState, State
from laneway.journal import open_journal
from laneway.journal.replay import verify
from laneway.statemachines import Event

MS = 1_000_000
USAGE = 2


def test_a_tick_is_one_full_batch_and_its_journal_verifies(tmp_path: Path) -> None:
    """By hand: accepted 2 entities, completed 2 + 16 + 16 + 2, restored 1."""
    with bench_tick.Serving(tmp_path / "tick.db", live=40, queued=5) as serving:
        steps = serving.steps_of_a_tick()
        taken = [type(step.taken) for step in steps]
        assert sorted(one.__name__ for one in taken) == [
            *("BufferRestored", "Completed", "SubmitAccepted"),
        ], "three answers make a tick"
        moved = {
            type(step.taken): sum(len(event.entities) for event in step.events) for step in steps
        }
        assert moved == {SubmitAccepted: 2, Completed: 36, BufferRestored: 1}
        states = [view.state for view in serving.engine.requests()]
        assert (states.count("decoding"), states.count("waiting")) == (40, 5)
        serving.run(3)
    with open_journal(tmp_path / "tick.db") as journal:
        report = verify(journal)
    assert report.ok, report


def test_the_baseline_fires_every_entity_of_every_event() -> None:
    events = (
        Event("buffer", (1, 2, 3), "acquire", "free", "acquired", 1, 1),
        Event("buffer", (2,), "refuse", "acquired", "free", 1, 1),
    )
    step = Step(step=1, at_ns=0, taken=BufferRestored(buffer=1, job=1), events=events)
    fire = bench_tick.firing([step])
    fire()
    fire()
    wrong = attrs.evolve(step, events=(*events, events[1]))
    with pytest.raises(Exception, match="refuse"):
        bench_tick.firing([wrong])()


def test_the_figures_of_a_tick_are_told() -> None:
    figures = list(bench_tick.run(live=32, queued=3, ticks=1, rounds=1))
    assert [figure.id for figure in figures] == ["T1", "T1/apart", "T2"]
    assert figures[2].baseline_value == figures[0].value, "T2 is held against T1"


def test_crossing_waking_and_the_board_are_told_apart() -> None:
    figures = {figure.id: figure for figure in bench_ffi.run(jobs=3, rounds=1)}
    assert set(figures) == {"T3", "T3/board", "T3/wake"}
    assert figures["T3/board"].gate_met is None and figures["T3"].gate == "<= 1.2x"


def test_idle_is_the_time_in_which_nothing_computes() -> None:
    """By hand: jobs compute from 0 to 10 and from 15 to 20, so 5 of 20 are idle."""
    times = [JobTimes(exec_begin_ns=a, exec_end_ns=b) for a, b in ((0, 10), (15, 20))]
    assert idle_share(times) == pytest.approx(0.25)


@pytest.mark.parametrize("host_ns", [0, 7 * MS])
def test_the_overlap_model_with_one_job_is_a_plain_sum(host_ns: int) -> None:
    """By hand: from one computing to the next there are two transfers and the host's time."""
    gap = 2 * TRANSFER_NS + host_ns
    jobs = 40 - 4
    assert idle_share(model_times(40, 1, host_ns)) == pytest.approx(
        (jobs - 1) * gap / (jobs * EXEC_NS + (jobs - 1) * gap)
    )


def test_the_overlap_model_with_two_jobs_hides_what_is_shorter_than_the_other() -> None:
    assert idle_share(model_times(40, 2, EXEC_NS // 2)) == pytest.approx(0.0)
    half = idle_share(model_times(400, 2, 3 * EXEC_NS))
    assert half == pytest.approx(2 / 3, abs=0.01), "the host is the limit: a third computes"


def test_ping_and_pong_remove_what_the_model_allows_on_a_stepped_clock() -> None:
    """Both figures are of device time alone, so they are the same on every machine."""
    t4, t5 = bench_pingpong.run(tokens=10, real=False)
    assert (t4.id, t5.id) == ("T4", "T5")
    assert t4.gate_met and t4.value == pytest.approx(100, abs=1)
    assert t5.gate_met and t5.value == pytest.approx(16 / (EXEC_NS / 1e9))


def test_one_job_in_flight_leaves_the_device_idle_for_the_host() -> None:
    with calbin(batch=(1, 16)) as folder:
        host_ns = 4 * MS
        times = bench_pingpong.decode_times(folder, depth=1, host_ns=host_ns, tokens=8)
    gap = 2 * TRANSFER_NS + host_ns
    assert bench_pingpong.periods_ns(times) == [EXEC_NS + gap] * (len(times) - 1)


@pytest.mark.slow
def test_no_class_waits_longer_than_is_stated() -> None:
    """By hand: 32 lanes in batches of 4 make 8 decodes, and a prefill before each; a long prompt of
    250 tokens is paid off by 4 decodes of 64."""
    told = {figure.id: figure for figure in bench_schedule.run(size=2)}
    kinds = ("decode", "prefill", "long_prefill", "token/p99", "token/longest")
    loads = ("endless", "long", "mixed")
    assert list(told) == [f"I9/{load}/{kind}" for load in loads for kind in kinds]
    assert all(figure.gate_met for figure in told.values())
    decode, prefill = told["I9/endless/decode"], told["I9/long/prefill"]
    assert decode.value == decode.baseline_value == 2 * 32 / 4
    assert prefill.value == prefill.baseline_value == 250 // 64 + 1 + 1
    assert told["I9/long/long_prefill"].value == told["I9/long/long_prefill"].baseline_value == 3
    longest = 8.1 + 4 * 0.5 + 4 * (8 + 16) / 1000  # decode of four at their last position
    longest += 4.1 + 64 / 10  # prefill of 64 tokens
    assert told["I9/endless/token/p99"].baseline_value <= 8 * longest


@pytest.mark.unproven_journals
@pytest.mark.slow
def test_a_class_that_starves_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """With prefill always first, decoding sequences wait for the end of the prompts."""

    def greedy(state: State, model: ModelState) -> Plan | None:
        return queueing._choose_prefill(state, model) or queueing._choose_decode(state, model)

    monkeypatch.setattr(canaries, "choose_request", greedy)
    smallest = bench_schedule.endless(1)
    for load in ("endless", "mixed", "long_prompts"):
        monkeypatch.setattr(bench_schedule, load, lambda size: smallest)
    called = laneway("bench", "schedule", "--json")
    assert called.code == 1
    told = {row["id"]: row for row in called.rows}
    assert not told["I9/endless/decode"]["gate_met"]
    assert told["I9/endless/decode"]["value"] > 16


def test_the_share_of_all_is_counted_from_below() -> None:
    assert bench_schedule.quantile([3, 1, 2], 1.0) == 3
    assert bench_schedule.quantile(list(range(1, 101)), 0.99) == 99
    assert bench_schedule.quantile([7], 0.99) == 7


def test_a_batch_is_measured_in_the_time_of_the_device() -> None:
    """By hand, with EXEC of 8 ms and 1 ms a row, and 50 us for each transfer."""
    url = "sim:cost?clock=virtual&decode=8ms/1ms/0ns&h2d=50us&d2h=50us"
    with calbin(batch=(1, 4)) as folder, probed(url, folder) as board:
        one = measure(board, 4, 8)
    assert one.alone_p50_ns == one.alone_p99_ns == 9.1 * MS
    assert one.fill == (1, 2, 3, 4)
    rates = [rows / (8.1 + rows) * 1000 for rows in one.fill]
    assert one.rate == pytest.approx(rates[-1])
    assert one.efficiency == pytest.approx([rate / rates[-1] for rate in rates])
    assert one.mixed == pytest.approx(1.0), "this model does not look at lengths"
    assert one.celsius and one.watts


def test_a_hot_board_is_measured_when_its_temperature_stands(tmp_path: Path) -> None:
    plan = tmp_path / "hot.faults"
    plan.write_text("fault hot kind=thermal tau=200ms rise=60 limit=70 factor=2\n")
    url = f"sim:cost?clock=virtual&decode=10ms/0ns/0ns&h2d=1us&d2h=1us&faults={plan}"
    with calbin(batch=(1,)) as folder, probed(url, folder) as board:
        one = measure(board, 1, 24)
    assert max(one.celsius) > 70
    assert one.steady_rate == pytest.approx(1 / 0.020, rel=0.01), "half as fast above its limit"


def _measured(batch: int, rate: float) -> Measured:
    return Measured(
        batch=batch,
        alone_p50_ns=1.0,
        alone_p99_ns=1.0,
        rate=rate,
        steady_rate=rate,
        fill=tuple(sorted({max(1, batch // 2), batch})),
        efficiency=(0.5, 1.0) if batch > 1 else (1.0,),
        mixed=1.0,
        kv_bytes=1.0,
        workspace_bytes=1.0,
        d2h_bytes=None,
        celsius=(),
        watts=(),
    )


@pytest.mark.parametrize(
    ("rates", "wanted"),
    [((100, 200, 300, 400), 16), ((100, 200, 390, 400), 8), ((100, 150, 140, 120), 4)],
)
def test_larger_is_not_taken_for_faster(rates: tuple[int, ...], wanted: int) -> None:
    sizes = [_measured(batch, rate) for batch, rate in zip((1, 4, 8, 16), rates, strict=True)]
    chosen = choose(sizes)
    assert chosen.value == wanted
    assert "half full keeps" in chosen.baseline


def test_the_options_of_batch_belong_to_it_alone() -> None:
    called = laneway("bench", "dispatch", "--device", "sim:")
    assert called.code == USAGE and "belong to the suite batch" in called.err


def test_batch_tells_every_size_of_a_calbin_and_one_choice() -> None:
    with calbin(batch=(1, 4)) as folder:
        called = laneway("bench", "batch", "--json", "--model", folder)
    figures = [json.loads(line) for line in called.out.splitlines()]
    told = {figure["id"].split("/")[1] for figure in figures}
    assert told == {"b1", "b4", "choice"}
    assert figures[-1]["id"] == "R6.3/choice" and figures[-1]["value"] in (1, 4)


def test_the_sizes_are_drawn_into_a_file(tmp_path: Path) -> None:
    """What is drawn is read back from the picture's own text; a file that cannot be is refused."""
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    draw = bench_batch._drawing(tmp_path / "batch.svg")
    draw([_measured(1, 100.0), _measured(4, 300.0)])
    picture = (tmp_path / "batch.svg").read_text()
    for text in ("batch 1", "batch 4", "P50", "P99", "rows in use"):
        assert f"<!-- {text} -->" in picture
    for name, words in (
        ("batch.nothing", "the name must end in one of"),
        ("batch", "the name must end in one of"),
        ("nowhere/batch.svg", "there is no folder"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            bench_batch._drawing(tmp_path / name)
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ConfigurationError, match="cannot be written: Is a directory"):
        bench_batch._drawing(tmp_path / "folder.svg")([_measured(1, 100.0)])


def test_completions_of_the_null_device_fit_their_jobs(tmp_path: Path) -> None:
    with bench_tick.Serving(tmp_path / "tick.db", live=16, queued=0) as serving:
        (done,) = [
            step.taken for step in serving.steps_of_a_tick() if isinstance(step.taken, Completed)
        ]
    assert len(done.rows) == bench_tick.ROWS
