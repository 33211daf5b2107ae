"""Fault plans for the simulated board, drawn at random from a table of what it can do wrong.

The table says for each kind where it may strike and its keys with their values. ``KINDS`` are those
that somebody can notice: the device says so, a number is checked, a reading does not fit, a job
does not end. ``SILENT`` are those that let a wrong token through that looks like any other, until a
canary or a golden run finds out; answers are not compared in a run that has one. Every kind that
the board knows is in one of the two (``tests/adapters/test_fault_plans.py``).
"""

from collections.abc import Callable, Sequence

import attrs
from hypothesis import strategies as st

_PICKS = ("nth=1", "nth=2", "nth=3", "nth=5", "nth=8", "every=4 count=2", "p=0.2 count=3")
_RARE_PICKS = ("nth=1", "nth=2", "p=0.3 count=2")
_TASKS = ("", "", " task=prefill", " task=decode")
_JOB_POINTS = ("submit", "h2d", "exec", "d2h", "visible", "poll")


@attrs.frozen
class FaultKind:
    """One kind of fault of the board (``adapters/native/npurt_sim.h`` describes it).

    A value that is empty leaves its key out.
    """

    name: str
    points: tuple[str, ...]
    keys: tuple[tuple[str, tuple[str, ...]], ...] = ()
    picks: tuple[str, ...] = _PICKS


def _at_an_instant(kind: FaultKind) -> FaultKind:
    """Return the same fault, of no call but of a moment."""
    after = ("after", ("1us", "40us", "2ms", "3s"))
    return FaultKind(kind.name, ("time",), (*kind.keys, after), picks=("nth=1",))


_RELEASE = ("release", ("reset1", "reset2", "reset4"))
_FINAL = ("release", ("reset4", "never"))
_FIELDS = ("field", ("submitted", "finished", "failed"))
_BYTES = ("bytes", ("4096", "104857600"))
_PHASES = ("h2d", "exec", "d2h")

JOB_KINDS = (
    FaultKind("submit_reject", ("submit",), (("code", ("0x0601", "0x0603", "0x0301", "0x0202")),)),
    FaultKind("submit_indeterminate", ("submit",), (("runs", ("yes", "no")),)),
    FaultKind("csr_fail", ("submit",)),
    FaultKind(
        "ccu_exception",
        ("exec",),
        (("quiesce", ("y", "n")), ("kv", ("none", "partial", "unknown"))),
    ),
    FaultKind("hang", _PHASES, (("release", ("never", "reset1", "reset2", "reset4")),)),
    FaultKind("slow", _PHASES, (("factor", ("3", "300000", "3000000")),)),
    FaultKind("dma_error", ("h2d", "d2h"), (("offset", ("0", "64")),)),
    FaultKind("numeric_nan", ("exec",), (("flag", ("y", "n")),)),
    FaultKind("numeric_garbage", ("exec",), (("flag", ("y",)),)),
    FaultKind("numeric_constant", ("exec",), (("flag", ("y",)),)),
    FaultKind("numeric_offset", ("exec",), (("flag", ("y",)),)),
    FaultKind("illegal_step", ("poll",), (("from", ("exec", "d2h")), ("to", ("h2d", "queued")))),
    FaultKind("lost_completion", ("visible",), (("poll_sees", ("y", "n")),)),
    FaultKind(
        "late_completion",
        ("visible",),
        (("delay", ("5us", "300ms", "7s")), ("outlives", ("y", "n"))),
    ),
    FaultKind("late_dma", ("visible",), (("delay", ("1us", "1ms", "9s")), ("bytes", ("64",)))),
    FaultKind("thermal", ("exec",), (("factor", ("2",)), ("tau", ("1us",)), ("limit", ("50",)))),
    FaultKind("drift", ("exec",), (("percent", ("1000",)), ("bytes", ("1000",)))),
)
KV_KINDS = (
    FaultKind("kv_apply_before", ("kv_apply_before",), (("code", ("0x0703", "0x0304")),)),
    FaultKind("kv_apply_after", ("kv_apply_after",), (("code", ("0x0703", "0x0304")),)),
    FaultKind("kv_apply_before", ("kv_apply_before",), (("partial", ("y",)),)),
    FaultKind("kv_apply_after", ("kv_apply_after",), (("partial", ("y",)),)),
    FaultKind("kv_can_lie", ("kv_can",), (("tokens", ("-64", "64")),)),
)
READING_KINDS = (
    FaultKind("counter_skew", ("counters",), (_FIELDS, ("n", ("-1", "1")))),
    FaultKind("counter_stuck", ("counters",), (_FIELDS,)),
    FaultKind("counter_negative", ("counters",), (_FIELDS,)),
    FaultKind("counter_reset", ("counters",), (_FIELDS,)),
    FaultKind("health_block", ("health",), (("for", ("1ms", "700ms", "4s")),)),
    FaultKind(
        "memory_skew",
        ("memory",),
        (("field", ("used", "dynamic")), ("n", ("4096", "104857600", "-1"))),
    ),
)
DEVICE_KINDS = (
    FaultKind("unhealthy", (*_PHASES, "submit", "health"), (_RELEASE,), picks=_RARE_PICKS),
    FaultKind("sticky", (*_PHASES, "submit", "health"), (_RELEASE,), picks=_RARE_PICKS),
    FaultKind("wedged", (*_PHASES, "submit", "health"), (_FINAL,), picks=_RARE_PICKS),
    FaultKind("device_lost", (*_PHASES, "submit", "health"), (_FINAL,), picks=_RARE_PICKS),
    FaultKind("epoch_bump", ("submit", "health"), picks=_RARE_PICKS),
    FaultKind(
        "owner_change", ("submit", "health"), (("for", ("50us", "5s", "")),), picks=_RARE_PICKS
    ),
)
LOAD_KINDS = (
    FaultKind("configure_fail", ("configure",), (("code", ("0x701", "0x303", "0x801")),)),
    FaultKind(
        "configure_partial_memory",
        ("configure",),
        (("release", ("reset3", "reset4", "never")), _BYTES),
        picks=_RARE_PICKS,
    ),
    FaultKind("configure_hang", ("configure",), (("for", ("1ms", "20s", "")),), picks=_RARE_PICKS),
    FaultKind("warmup_wrong", ("configure",), picks=_RARE_PICKS),
    FaultKind("release_leak", ("release",), (_BYTES,), picks=_RARE_PICKS),
    FaultKind("leak_until_dynamic_clear", ("release",), (_BYTES,), picks=_RARE_PICKS),
    FaultKind("leak_until_soft", ("release",), (_BYTES,), picks=_RARE_PICKS),
    FaultKind("release_slow", ("release",), (("for", ("1ms", "2s", "60s")),), picks=_RARE_PICKS),
)
_LEVEL = ("level", ("1", "2", "4", ""))
_TELLS = ("tells", ("y", "n"))
_EFFECTS = ("drops_config", "quiesces_dma", "aborts_jobs", "drops_kv+drops_all_kv", "new_epoch")
RESET_KINDS = (
    FaultKind("reset_fail", ("reset",), (_LEVEL,), picks=_RARE_PICKS),
    FaultKind("reset_refused", ("reset",), (_LEVEL,), picks=_RARE_PICKS),
    FaultKind("reset_slow", ("reset",), (_LEVEL, ("for", ("1s", "90s"))), picks=_RARE_PICKS),
    FaultKind(
        "reset_ok_but_dead",
        ("reset",),
        (_LEVEL, _TELLS, ("then", ("lost", "hang", "garbage")), _FINAL),
        picks=_RARE_PICKS,
    ),
    FaultKind(
        "reset_partial",
        ("reset",),
        (_LEVEL, _TELLS, ("without", _EFFECTS)),
        picks=_RARE_PICKS,
    ),
    FaultKind("reset_wide", ("reset",), (_LEVEL, _TELLS, ("also", _EFFECTS)), picks=_RARE_PICKS),
    FaultKind(
        "version_mismatch",
        ("reset",),
        (("field", ("runtime", "firmware")), ("version", ("9.9",))),
        picks=_RARE_PICKS,
    ),
)
INSTANT_KINDS = (
    *(_at_an_instant(kind) for kind in DEVICE_KINDS),
    _at_an_instant(next(kind for kind in RESET_KINDS if kind.name == "version_mismatch")),
)
GROUPS = (
    *(JOB_KINDS, JOB_KINDS, KV_KINDS, READING_KINDS),
    *(DEVICE_KINDS, LOAD_KINDS, RESET_KINDS, INSTANT_KINDS),
)
"""Each drawn as often as the others, so that devices do not die more often than jobs are slow."""
KINDS = tuple(dict.fromkeys(kind for group in GROUPS for kind in group))
CAUSES = (
    "ccu_exception on=exec nth=3 quiesce=n kv=unknown",
    "hang on=exec nth=4 release=reset2",
    "sticky on=d2h nth=3 release=reset4",
    "numeric_nan on=exec nth=5",
)
"""What makes a device need a reset, for the rules that are about one."""

_ROW = ("pos", ("", "0"))
SILENT = (
    FaultKind("numeric_garbage", ("exec",), (("flag", ("n",)),)),
    FaultKind("numeric_constant", ("exec",), (("flag", ("n",)),)),
    FaultKind("numeric_offset", ("exec",), (("flag", ("n",)), ("n", ("1", "3")))),
    FaultKind("stale_output", ("exec",)),
    FaultKind("swapped_output", ("d2h",)),
    FaultKind("kv_stale", ("exec",), (_ROW,)),
    FaultKind("kv_swap", ("exec",), (("with", ("0", "1", "3")), _ROW)),
    FaultKind("kv_zero", ("exec",), (_ROW,)),
    FaultKind("kv_bit", ("exec",), (_ROW,)),
    FaultKind("pad_write", ("exec",), (("victim", ("0", "1")),)),
)


def rule_of(kind: FaultKind, number: int, choose: Callable[[Sequence[str]], str]) -> str:
    """Return one rule of a plan for a kind, with everything that is left open chosen."""
    drawn = [(key, choose(values)) for key, values in kind.keys]
    keys = "".join(f" {key}={value}" for key, value in drawn if value)
    point = choose(kind.points)
    pick = choose(kind.picks)
    task = choose(_TASKS) if point in _JOB_POINTS else ""
    return f"fault f{number} kind={kind.name} on={point} {pick}{task}{keys}"


@st.composite
def rules(draw: st.DrawFn, number: int) -> str:
    """Draw one rule of a plan; few are silent, since nobody then knows the answers."""
    kind = draw(st.sampled_from(draw(st.sampled_from((*GROUPS, *GROUPS, SILENT)))))
    return rule_of(kind, number, lambda values: draw(st.sampled_from(values)))


def needs_a_reset(plan: Sequence[str]) -> bool:
    """Return whether a rule of a plan is about a reset, which then something must cause."""
    return any(f" on={kind.points[0]} " in rule for rule in plan for kind in RESET_KINDS)


@st.composite
def plans(draw: st.DrawFn) -> str:
    """Draw a plan of up to three rules; one run in five has none (swarm).

    A plan with a fault of resets has one more rule, so that there is a reset.
    """
    count = draw(st.sampled_from((0, 1, 1, 2, 3)))
    plan = [draw(rules(number)) for number in range(count)]
    if needs_a_reset(plan):
        plan.append(f"fault cause kind={draw(st.sampled_from(CAUSES))}")
    return "\n".join(plan)


def kinds_of(plan: str) -> set[str]:
    """Return the names of the kinds in a plan."""
    words = [word for line in plan.splitlines() for word in line.split()]
    return {word.removeprefix("kind=") for word in words if word.startswith("kind=")}


def corrupts(plan: str) -> bool:
    """Return whether a plan may let a wrong token through that looks like any other."""
    silent = {kind.name for kind in SILENT}
    return any(
        silent & kinds_of(line) and "flag=y" not in line.split() for line in plan.splitlines()
    )
