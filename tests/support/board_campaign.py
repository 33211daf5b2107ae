"""Fault schedules on the simulated board: drawn from a seed, played on virtual time, held to truth.

A schedule is an artifact with batches up to 16, one or two jobs in flight, requests that arrive
over time, cancels, a reload, and a fault plan of up to three rules of any kind that the board knows
(fault_plans.py). ``play`` runs it through the whole product with every invariant after every step,
holds every answer against a run alone where no kind can let a wrong token through that looks like
any other, proves the journal, and asks for the end: a device that is not lost serves again once
nothing new goes wrong. The same seed is the same schedule.
"""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
from support.fault_plans import CAUSES, KINDS, SILENT, FaultKind, needs_a_reset, rule_of
from support.machine_run import MachineRun
from support.tally import Outcome, judge
from support.text_model import Wish

from laneway.engine import Limits, RequestRejectedError
from laneway.engine.limits import SECOND
from laneway.engine.sampling import Sampling

BATCHES = ((1,), (1, 4), (1, 2, 4, 8, 16), (1, 16))
_SAMPLINGS = (
    Sampling(temperature=0.0, seed=0),
    Sampling(temperature=1.0, seed=7),
    Sampling(temperature=0.8, top_p=0.9, seed=(1 << 62) + 1),
)
_PROMPTS: tuple[str | tuple[int, ...], ...] = (
    *("a", "deaf cabbage", "ab", "hör auf, äh"),
    *((301, 302, 303), (5,), tuple(range(100, 121)), (9, 8, 7, 6)),
)
WISHES = tuple(
    Wish(
        prompt=prompt,
        max_tokens=2 + (3 * number + which) % 9,
        sampling=_SAMPLINGS[(number + which) % len(_SAMPLINGS)],
        ignore_eos=bool(which),
    )
    for number, prompt in enumerate(_PROMPTS)
    for which in range(3)
)
LATE = Wish(prompt=(9, 9, 9), max_tokens=3, sampling=_SAMPLINGS[0])
_AT_A_LOAD = ("configure", "release")
_MAY_END = {
    "wedged": "row 16: a device that is gone",
    "device_lost": "row 16: a device that is gone",
    "owner_change": "row 22: another process keeps the board",
    "version_mismatch": "row 26: another firmware is another device",
    "reset_ok_but_dead": "row 16: a device that is gone after a reset",
}
"""Kinds that may end the device alone, and why; so does what no reset ends (``release=never``)."""


@attrs.frozen
class BoardSchedule:
    """What happens in a run, in actions of the engine."""

    seed: int
    plan: str
    kinds: tuple[str, ...]
    """The kinds of the rules f0, f1 and so on of the plan."""

    batches: tuple[int, ...]
    rows: int
    inflight: int
    canary: int
    arrivals: tuple[tuple[int, int], ...]
    """Actions before a request comes, and which of ``WISHES`` it is."""

    cancels: tuple[int, ...]
    """Arrivals whose clients give up ten actions later."""

    reload_at: int | None
    """The arrival before which the model is unloaded and loaded again."""

    @property
    def may_end(self) -> bool:
        """Return whether one fault of the plan may end the device by design."""
        return "release=never" in self.plan or not _MAY_END.keys().isdisjoint(self.kinds)


def draw(
    seed: int, *, kinds: Sequence[FaultKind] = (*KINDS, *SILENT), faults_max: int = 3
) -> BoardSchedule:
    """Draw a schedule; with one fault at most, it strikes once and nobody gives up."""
    it = random.Random(seed)
    count = it.choice((3, 6, 12, 20))
    chosen = [it.choice(kinds) for _ in range(it.randint(1, faults_max))]
    if faults_max == 1:
        once = tuple(f"nth={number}" for number in range(1, 9))
        chosen = [attrs.evolve(kind, picks=once) for kind in chosen]
    plan = [rule_of(kind, number, it.choice) for number, kind in enumerate(chosen)]
    loads = any(point in _AT_A_LOAD for kind in chosen for point in kind.points)
    if needs_a_reset(plan) or any("configure" in kind.points for kind in chosen):
        plan.append(f"fault cause kind={it.choice(CAUSES)}")
    return BoardSchedule(
        seed=seed,
        plan="\n".join(plan),
        kinds=tuple(kind.name for kind in chosen),
        batches=it.choice(BATCHES),
        rows=it.choice((1, 4, 16)),
        inflight=it.choice((1, 2)),
        canary=it.choice((0, 5, 20)),
        arrivals=tuple(
            (it.choice((0, 0, 0, 3, 15, 60)), it.randrange(len(WISHES))) for _ in range(count)
        ),
        cancels=tuple(n for n in range(count) if faults_max > 1 and it.random() < 0.1),
        reload_at=it.randrange(count) if loads else None,
    )


def smaller(schedule: BoardSchedule) -> Iterator[BoardSchedule]:
    """Yield schedules that have a little less: of requests, rules, rows, canaries."""
    lines = schedule.plan.splitlines()
    for place in range(len(lines)):
        yield attrs.evolve(schedule, plan="\n".join(lines[:place] + lines[place + 1 :]))
    held = schedule.arrivals
    for place in range(len(held)):
        yield attrs.evolve(schedule, arrivals=held[:place] + held[place + 1 :])
    for plain in (
        {"cancels": ()},
        {"reload_at": None},
        {"inflight": 1},
        {"canary": 0},
        {"batches": (1,)},
    ):
        if any(getattr(schedule, name) != value for name, value in plain.items()):
            yield attrs.evolve(schedule, **plain)


def play(schedule: BoardSchedule, folder: Path) -> Outcome:
    """Play a schedule to its end; raises when an invariant, a text or the journal is wrong.

    The journal of the newest that failed stays in ``folder``, as failed.db.
    """
    limits = Limits(
        inflight_jobs_max=schedule.inflight,
        batch_rows_max=schedule.rows,
        canary_jobs=schedule.canary,
        canary_idle_ns=schedule.canary and 60 * SECOND,
        requalify_canaries=1,
    )
    run = MachineRun(folder, limits=limits, batches=schedule.batches)
    try:
        outcome = _play(run, schedule, limits)
    except BaseException:
        run.drop()
        run.file.rename(folder / "failed.db")
        raise
    run.file.unlink()
    return outcome


def _play(run: MachineRun, schedule: BoardSchedule, limits: Limits) -> Outcome:
    run.set_faults(schedule.plan)
    for number, (after, which) in enumerate(schedule.arrivals):
        run.act(after)
        if number == schedule.reload_at:
            _reload(run)
        if run.submit(WISHES[which]) is not None and number in schedule.cancels:
            run.act(10)
            run.cancel(len(run.asked) - 1)
        run.check_board()
    run.settle()
    assert run.device.simulator is not None
    hits = _struck(run.device.simulator.trace(), schedule.kinds) if not run.lost else None
    device = run.state.device.state
    run.set_faults("")
    run.settle()
    if not run.lost:
        device = _prove_service(run, schedule)
    whole = schedule.reload_at is None and not schedule.may_end
    made = Outcome(hits=hits or schedule.kinds, device=device, whole=whole)
    streams = [one.stream for one in run.asked]
    impatient = {one.stream.request for one in run.asked if not one.patient}
    run.close()
    if schedule.seed % 4 == 0:
        run.prove()
    return judge(made, run.steps, streams, impatient=impatient, limits=limits)


def _reload(run: MachineRun) -> None:
    """Have the model unloaded, and loaded again once it is gone."""
    run.ask_unload()
    run.act_until(lambda: not run.state.models)
    if not run.state.models:
        run.ask_load()


def _struck(trace: str, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kinds of the rules that fired, as the board's own trace has it."""
    fired = re.findall(r"fault rule=f(\d+) .* decision=fire", trace)
    return tuple(kinds[number] for number in sorted(set(map(int, fired))))


def _prove_service(run: MachineRun, schedule: BoardSchedule) -> str:
    """A device that is not lost serves again, with nothing held back; return its state.

    One that is gone may not have been asked for anything since.
    """
    state = run.state
    assert state.device.state in ("serving", "degraded"), state.device
    assert state.ladder.recovery is None and state.ladder.breaker == "closed"
    assert not state.suspended and not state.requests
    if not state.models:
        run.ask_load()
        run.settle()
    late = run.submit(LATE)
    run.settle()
    assert late is not None
    error = late.result().error
    if isinstance(error, RequestRejectedError) and error.reason == "unknown_model":
        assert {model.state for model in state.models.values()} == {"failed"}
    elif run.lost:
        assert schedule.may_end, state.device
    else:
        assert error is None, f"the device is {state.device.state}, yet {late.result()}"
    return state.device.state
