"""Whole engines on any device, in an order nobody thought of: ``pytest --device URL``.

What clients and operators may do next is drawn from a fixed seed; a device whose time runs by
itself does not repeat a run, so nothing here is made smaller: the journal is what a failure is
looked up in. Every invariant is checked at every step, answers are those of runs alone, every
journal is proven. What needs the simulator is left out elsewhere, and said.

Source: I1 to I12, R18.3, R18.5.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random

import attrs
import pytest
from support.chosen_device import chosen, open_for_tests
from support.machine_run import OPTIONS, MachineRun
from support.text_model import Wish

from laneway.adapters.device import NpurtDevice
from laneway.engine.limits import Limits
from laneway.engine.sampling import Sampling

pytestmark = [pytest.mark.board, pytest.mark.slow]
LIVES_MAX = 3
RULES_EACH = 40
BY_ID = (
    Wish(prompt=(5,), max_tokens=4, sampling=Sampling(temperature=0.0, seed=0)),
    Wish(prompt=(101, 102, 103), max_tokens=9, sampling=Sampling(temperature=1.0, seed=7)),
    Wish(prompt=tuple(range(100, 121)), max_tokens=6, sampling=Sampling(top_k=20, seed=3)),
    Wish(
        prompt=tuple(range(60)),
        max_tokens=3,
        sampling=Sampling(temperature=0.8, top_p=0.9, seed=1 << 40),
    ),
)
BY_TEXT = (
    Wish(prompt="deaf cabbage", max_tokens=8, sampling=Sampling(temperature=1.0, seed=2)),
    Wish(prompt="a", max_tokens=5, sampling=Sampling(temperature=0.0, seed=0), stop=("ca", "n")),
)
NONSENSE = (
    Wish(prompt=(), max_tokens=1, sampling=BY_ID[0].sampling),
    Wish(prompt=(1,), max_tokens=0, sampling=BY_ID[0].sampling),
    Wish(prompt=(1,), max_tokens=1 << 30, sampling=BY_ID[0].sampling),
)
PLANS = (
    "",
    "fault s kind=slow factor=300000 nth=3",
    "fault r kind=submit_reject p=0.2 count=3",
    "fault k kind=kv_apply_before p=0.1 count=2",
    "fault x kind=ccu_exception nth=2 quiesce=n kv=unknown",
)


@attrs.frozen
class Rule:
    """One thing that may happen next; ``simulator``: only there."""

    name: str
    weight: int
    do: Callable[[MachineRun, Random], object]
    may: Callable[[MachineRun], bool] = lambda run: True
    simulator: bool = False


def _wishes() -> tuple[Wish, ...]:
    named = chosen()
    own_model = named is not None and named.model is not None
    return BY_ID if own_model else BY_ID + BY_TEXT


def _submit(run: MachineRun, random: Random) -> None:
    hurry = random.random() < 0.1
    run.submit(random.choice(_wishes()), deadline_s=1e-4 if hurry else None)


def _crowd(run: MachineRun, random: Random) -> None:
    for _ in range(random.randint(2, 10)):
        run.submit(random.choice(_wishes()))


def _nonsense(run: MachineRun, random: Random) -> None:
    if run.submit(random.choice(NONSENSE)) is not None:
        run.asked.pop()


def _operate(run: MachineRun, random: Random) -> None:
    for word in random.choice(("load", "unload", "unload load", "load load")).split():
        run.ask_load() if word == "load" else run.ask_unload()


def _look(run: MachineRun, random: Random) -> None:
    picture, health = run.engine.snapshot(), run.engine.health()
    assert picture.step == health.step == run.watch.step
    assert run.engine.ready() == health.ready


def _reopen(run: MachineRun, random: Random) -> None:
    run.close(drain=random.random() < 0.5)
    run.open()


RULES = (
    Rule("submit", 8, _submit),
    Rule("submit_many", 3, _crowd, lambda run: bool(run.state.aliases)),
    Rule("submit_nonsense", 1, _nonsense),
    Rule("cancel", 2, lambda run, random: run.cancel(random.randrange(16))),
    Rule("act", 12, lambda run, random: run.act(random.choice((1, 2, 3, 5, 8)))),
    Rule("act_long", 4, lambda run, random: run.act(random.choice((20, 60, 150)))),
    Rule("look", 1, _look),
    Rule("operate", 1, _operate),
    Rule("serve", 4, lambda run, random: run.ask_load(), lambda run: not run.state.models),
    Rule("reopen", 1, _reopen, lambda run: run.lives < LIVES_MAX),
    Rule(
        "let_time_pass",
        1,
        lambda run, random: run.let_time_pass(random.choice((700, 3_000, 250_000_000))),
        simulator=True,
    ),
    Rule(
        "change_faults",
        1,
        lambda run, random: run.set_faults(random.choice(PLANS)),
        simulator=True,
    ),
)


def _open() -> NpurtDevice:
    return open_for_tests("sim:tiny?clock=virtual", options=OPTIONS)


def _next(run: MachineRun, random: Random) -> Rule:
    simulates = run.device.simulator is not None
    open_now = [rule for rule in RULES if rule.may(run) and (simulates or not rule.simulator)]
    return random.choices(open_now, [rule.weight for rule in open_now])[0]


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_what_may_happen(seed: int, tmp_path: Path) -> None:
    named, random = chosen(), Random(seed)
    limits = Limits(inflight_jobs_max=1 + seed % 2, batch_rows_max=(1, 4)[seed // 2 % 2])
    run = MachineRun(
        tmp_path,
        limits=limits if named is None else named.limits(limits),
        open_board=_open,
        source=None if named is None else named.model,
    )
    if named is not None and run.device.simulator is None:
        out = ", ".join(rule.name for rule in RULES if rule.simulator)
        named.left_out.add(f"tests/model/test_any_device.py: {out} need the simulator")
    done = []
    try:
        for _ in range(RULES_EACH):
            rule = _next(run, random)
            done.append(rule.name)
            rule.do(run, random)
            run.check_board()
        run.set_faults("")
        run.settle()
        run.close()
    except BaseException as failure:
        failure.add_note(f"seed {seed}, rules so far: {' '.join(done)}")
        run.drop()
        raise
    finally:
        if named is not None:
            named.keep(run.file)
    run.prove()
