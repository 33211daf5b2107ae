"""Fault plans for the simulated board, drawn at random from a table of what it can do wrong.

The table says for each kind where it may strike, its keys with their values, and what it may cost:
a kind that ``corrupts`` lets a wrong token through that nothing can notice, so that answers are not
compared in a run that has it.
"""

import attrs
from hypothesis import strategies as st


@attrs.frozen
class FaultKind:
    """One kind of fault of the board (``adapters/native/npurt_sim.h`` describes it)."""

    name: str
    points: tuple[str, ...]
    jobs: bool = True
    """Whether its points know the job, so that a rule may name a task."""
    keys: tuple[tuple[str, tuple[str, ...]], ...] = ()
    corrupts: bool = False


_KV_KEYS = (("code", ("0x0703", "0x0304")), ("partial", ("n",)))
_KV_PARTIAL_KEYS = (("code", ("0x0704",)), ("partial", ("y",)))

KINDS = (
    FaultKind(
        "submit_reject", ("submit",), keys=(("code", ("0x0601", "0x0603", "0x0301", "0x0202")),)
    ),
    FaultKind("submit_indeterminate", ("submit",), keys=(("runs", ("yes", "no")),)),
    FaultKind("csr_fail", ("submit",)),
    FaultKind(
        "ccu_exception",
        ("exec",),
        keys=(("quiesce", ("y", "n")), ("kv", ("none", "partial", "unknown"))),
    ),
    FaultKind("hang", ("h2d", "exec", "d2h"), keys=(("release", ("never",)),)),
    FaultKind("slow", ("h2d", "exec", "d2h"), keys=(("factor", ("3", "300000", "3000000")),)),
    FaultKind("dma_error", ("h2d", "d2h"), keys=(("offset", ("0", "64")),)),
    FaultKind("numeric_nan", ("exec",), keys=(("flag", ("y", "n")),)),
    FaultKind("lost_completion", ("visible",), keys=(("poll_sees", ("y", "n")),)),
    FaultKind("late_completion", ("visible",), keys=(("delay", ("5us", "300ms", "7s")),)),
    FaultKind("kv_apply_before", ("kv_apply_before",), jobs=False, keys=_KV_KEYS),
    FaultKind("kv_apply_after", ("kv_apply_after",), jobs=False, keys=_KV_KEYS),
    FaultKind("kv_apply_before", ("kv_apply_before",), jobs=False, keys=_KV_PARTIAL_KEYS),
    FaultKind("kv_apply_after", ("kv_apply_after",), jobs=False, keys=_KV_PARTIAL_KEYS),
    FaultKind("kv_can_lie", ("kv_can",), jobs=False, keys=(("tokens", ("-64", "64")),)),
    FaultKind(
        "counter_skew",
        ("counters",),
        jobs=False,
        keys=(("field", ("submitted", "finished", "failed")), ("n", ("-1", "1"))),
    ),
    FaultKind(
        "late_dma", ("visible",), keys=(("delay", ("1us", "1ms", "9s")), ("bytes", ("64", "4096")))
    ),
)

_PICKS = ("nth=1", "nth=2", "nth=3", "nth=5", "nth=8", "every=4 count=2", "p=0.2 count=3")
_TASKS = ("", "", " task=prefill", " task=decode")


@st.composite
def _rule(draw: st.DrawFn, number: int) -> str:
    kind = draw(st.sampled_from(KINDS))
    keys = "".join(f" {key}={draw(st.sampled_from(values))}" for key, values in kind.keys)
    point = draw(st.sampled_from(kind.points))
    pick = draw(st.sampled_from(_PICKS))
    task = draw(st.sampled_from(_TASKS)) if kind.jobs else ""
    return f"fault f{number} kind={kind.name} on={point} {pick}{task}{keys}"


@st.composite
def plans(draw: st.DrawFn) -> str:
    """Draw a plan of up to three rules; one run in five has none (swarm)."""
    count = draw(st.sampled_from((0, 1, 1, 2, 3)))
    return "\n".join(draw(_rule(number)) for number in range(count))


def kinds_of(plan: str) -> set[str]:
    """Return the names of the kinds in a plan."""
    words = [word for line in plan.splitlines() for word in line.split()]
    return {word.removeprefix("kind=") for word in words if word.startswith("kind=")}


def corrupts(plan: str) -> bool:
    """Return whether a plan may let a wrong token through."""
    return any(kind.corrupts for kind in KINDS if kind.name in kinds_of(plan))
