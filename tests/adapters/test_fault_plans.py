"""The table of faults that whole runs draw from has every kind that the board knows.

Source: npurt_sim.h (fault plan), R18.3.
"""

import re

import pytest
from support.fault_plans import KINDS, SILENT, FaultKind, corrupts, kinds_of
from support.native_board import NATIVE, Board

from laneway.adapters.npurt import Code

ALL = (*KINDS, *SILENT)


def on_the_board() -> set[str]:
    """Return the kinds as the board's own table names them."""
    text = (NATIVE / "calsim_kinds.c").read_text("utf-8")
    return set(re.findall(r"\[CALSIM_\w+\]\s*=\s*\{\"(\w+)\"", text))


def every_rule(kind: FaultKind) -> list[str]:
    """Return rules that have each point, pick and value of a kind at least once."""
    width = max(len(values) for values in (kind.points, kind.picks, *(v for _, v in kind.keys)))
    rules = []
    for index in range(width):
        drawn = ((key, values[index % len(values)]) for key, values in kind.keys)
        keys = "".join(f" {key}={value}" for key, value in drawn if value)
        point, pick = kind.points[index % len(kind.points)], kind.picks[index % len(kind.picks)]
        rules.append(f"fault f kind={kind.name} on={point} {pick}{keys}")
    return rules


def test_every_kind_of_the_board_is_in_the_table() -> None:
    known = on_the_board()
    assert len(known) == 54
    assert {kind.name for kind in ALL} == known


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: f"{kind.name}-{kind.points[0]}")
def test_the_board_takes_every_rule_that_can_be_drawn(board: Board, kind: FaultKind) -> None:
    for rule in every_rule(kind):
        answer = board.library.attempt("npurt_sim_faults", board.device, rule.encode())
        assert answer.code == Code.OK, f"{rule}: {answer.words}"


def test_what_corrupts_is_what_nobody_can_see() -> None:
    for kind in SILENT:
        assert any(corrupts(rule) for rule in every_rule(kind)), kind.name
    for kind in KINDS:
        assert not any(corrupts(rule) for rule in every_rule(kind)), kind.name
    plan = "fault a kind=kv_bit\nfault b kind=hang on=exec"
    assert kinds_of(plan) == {"kv_bit", "hang"} and corrupts(plan)
