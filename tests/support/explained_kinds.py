"""Every kind of fault of the simulated board, with what its explanation has to say.

Source: the table of kinds in npurt_sim.h; rows and rungs are those of ARCHITECTURE.md, "Faults".
"""

import re

import attrs
from support.native_board import ROOT

HEADER = ROOT / "adapters" / "native" / "npurt_sim.h"
_POINTS = (
    "submit|h2d|exec|d2h|the same|poll|visible|kv_|counters|configure|release|reset|health|memory"
)
EXCEPTION = "fault first kind=ccu_exception on=exec nth=3 quiesce=n kv=unknown\n"


@attrs.frozen
class Explained:
    """A plan, and the first story about it.

    ``kind``: what it is called; ``row``: of the ladder, None for what has no row; ``rung``: the one
    it begins with; ``outcome``: how it ends.
    """

    plan: str
    kind: str
    row: int | None
    rung: int
    outcome: str
    limits: dict[str, int] = attrs.Factory(dict)


def told(plan: str, kind: str, row: int | None, rung: int, outcome: str) -> Explained:
    """Return an explanation of a plan of one line behind ``kind=``."""
    return Explained(f"fault a kind={plan}", kind, row, rung, outcome)


def after_reset(plan: str, outcome: str) -> Explained:
    """Return one of a plan that lets a reset fail, which an exception brings about (row 7)."""
    return Explained(f"{EXCEPTION}fault a kind={plan}", "ccu", 7, 4, outcome)


KINDS: dict[str, Explained] = {
    "submit_reject": told(
        "submit_reject on=submit nth=3 code=0x0601", "submit_refused", 3, 1, "went on"
    ),
    "submit_indeterminate": told(
        "submit_indeterminate on=submit nth=3 runs=yes", "doubtful", 4, 2, "degraded"
    ),
    "csr_fail": told("csr_fail on=submit nth=2 k=0", "csr", 5, 1, "went on"),
    "ccu_exception": told(
        "ccu_exception on=exec nth=3 chip=1 code=9 pc=64 quiesce=y kv=none", "ccu", 6, 2, "degraded"
    ),
    "hang": told("hang on=exec nth=3 release=reset1", "hang", 8, 4, "recovered"),
    "slow": told("slow on=exec nth=3 factor=3000000", "hang", 9, 0, "absolved"),
    "dma_error": told("dma_error on=d2h nth=3 dir=d2h", "dma", 6, 2, "degraded"),
    "numeric_nan": told("numeric_nan on=exec nth=3", "numeric", 12, 2, "degraded"),
    "numeric_garbage": told("numeric_garbage on=exec nth=3 flag=y", "numeric", 12, 2, "degraded"),
    "numeric_constant": told("numeric_constant on=exec nth=3 flag=y", "numeric", 12, 2, "degraded"),
    "numeric_offset": told("numeric_offset on=exec nth=3 flag=y", "numeric", 12, 2, "degraded"),
    "unhealthy": told("unhealthy on=exec nth=3 release=reset4", "unhealthy", 14, 6, "recovered"),
    "sticky": told("sticky on=exec nth=3 release=reset4", "sticky", 15, 6, "recovered"),
    "wedged": told("wedged on=exec nth=3", "wedged", 16, 7, "lost"),
    "device_lost": told("device_lost on=exec nth=3", "lost", 16, 7, "lost"),
    "lost_completion": told(
        "lost_completion on=visible nth=3 poll_sees=n", "hang", 8, 4, "recovered"
    ),
    "late_completion": told("late_completion on=visible nth=3 delay=3s", "hang", 9, 0, "absolved"),
    "late_dma": Explained(
        f"{EXCEPTION}fault a kind=late_dma on=visible nth=1 delay=1ms", "ccu", 7, 4, "recovered"
    ),
    "kv_apply_before": told(
        "kv_apply_before on=kv_apply_before nth=3 code=0x0703", "kv_apply", 19, 1, "went on"
    ),
    "kv_apply_after": told(
        "kv_apply_after on=kv_apply_after nth=2 code=0x0703", "kv_apply", 20, 2, "degraded"
    ),
    "counter_skew": told(
        "counter_skew on=counters count=inf field=submitted n=5", "counters", 21, 2, "distrusted"
    ),
    "counter_stuck": told(
        "counter_stuck on=counters field=finished", "counters", 21, 2, "distrusted"
    ),
    "counter_negative": told(
        "counter_negative on=counters count=inf field=failed n=1", "counters", 21, 2, "distrusted"
    ),
    "counter_reset": told(
        "counter_reset on=counters skip=1 field=finished", "counters", 21, 2, "distrusted"
    ),
    "configure_fail": told("configure_fail on=configure nth=1", "configure", 17, 5, "recovered"),
    "configure_partial_memory": told(
        "configure_partial_memory on=configure count=inf release=reset4",
        "configure",
        17,
        5,
        "recovered",
    ),
    "configure_hang": told(
        "configure_hang on=configure count=inf", "configure", 17, 5, "recovered"
    ),
    "warmup_wrong": told("warmup_wrong on=configure nth=1", "golden", 18, 1, "failed"),
    "release_leak": told("release_leak on=release nth=1", "memory", 13, 5, "lost"),
    "leak_until_dynamic_clear": told(
        "leak_until_dynamic_clear on=release", "memory", 13, 5, "recovered"
    ),
    "leak_until_soft": told("leak_until_soft on=release", "memory", 13, 5, "recovered"),
    "release_slow": attrs.evolve(
        told("release_slow on=release for=2s", "memory", 13, 0, "went on"),
        limits={"unload_tolerance_bytes": 0},
    ),
    "reset_fail": after_reset("reset_fail on=reset nth=1", "recovered"),
    "reset_refused": after_reset("reset_refused on=reset nth=1", "recovered"),
    "reset_slow": after_reset("reset_slow on=reset nth=1 for=2s", "recovered"),
    "reset_ok_but_dead": after_reset("reset_ok_but_dead on=reset nth=1 then=lost", "recovered"),
    "reset_partial": after_reset("reset_partial on=reset nth=1 without=drops_kv", "recovered"),
    "reset_wide": after_reset("reset_wide on=reset nth=1 also=drops_config", "recovered"),
    "memory_skew": told(
        "memory_skew on=memory count=inf skip=3 field=used n=1073741824", "memory", 13, 5, "lost"
    ),
    "version_mismatch": after_reset(
        "version_mismatch on=reset nth=1 field=firmware version=9.9", "lost"
    ),
    "epoch_bump": told("epoch_bump on=submit nth=3", "epoch", 22, 6, "recovered"),
    "owner_change": told(
        "owner_change on=submit nth=3 pid=7 for=20ms", "epoch", 22, 6, "recovered"
    ),
}

SILENT: dict[str, str] = {
    "health_block": "health_block on=health nth=30 for=1s",
    "stale_output": "stale_output on=exec nth=3",
    "swapped_output": "swapped_output on=d2h nth=3",
    "kv_stale": "kv_stale on=exec nth=3",
    "kv_swap": "kv_swap on=exec nth=3 with=2",
    "kv_zero": "kv_zero on=exec nth=3",
    "kv_bit": "kv_bit on=exec nth=3",
    "pad_write": "pad_write on=exec nth=3 victim=2",
    "kv_can_lie": "kv_can_lie on=kv_can count=inf tokens=-64",
    "illegal_step": "illegal_step on=poll nth=3 from=exec to=queued",
    "thermal": "thermal on=exec",
    "drift": "drift on=exec percent=1",
}

"""Kinds that leave no fault in a journal, with a plan of each.

Numbers that are finite but wrong, and KV of which one row is another, look like any others: only a
canary or golden finds them. What a poll shows on the way, a call that takes long, what KV says it
could take, a chip that is warm, and a device that slowly gets slower cost nothing that would be
decided.
"""


def kinds_of_the_header() -> set[str]:
    """Return every kind that the header names."""
    text = HEADER.read_text("utf-8")
    table = text[text.index("kind                  on") : text.index("* Points. submit")]
    named = re.findall(rf"^ \*   ((?:\w+, )*\w+) +(?:{_POINTS})", table, re.MULTILINE)
    return {kind for names in named for kind in names.split(", ")}
