"""What the declarations must contain, from the requirements, and how they must hang together."""

import ast
import importlib
from functools import cache
from pathlib import Path

import pytest

from laneway.statemachines import MACHINES, Event
from laneway.statemachines.coupling import COUPLINGS, broken_couplings
from laneway.statemachines.declare import DeclarationError, Edge, declare
from laneway.statemachines.draw import markdown

ROOT = Path(__file__).parents[2]

# The lifecycle of a buffer as requirement R4.3 writes it, with gap G1.
BUFFER_R4_3 = [
    ("free", "preparing"),
    ("preparing", "submitted"),
    ("preparing", "free"),
    ("submitted", "running"),
    ("submitted", "completing"),
    ("running", "completing"),
    ("completing", "free"),
    ("submitted", "quarantined"),
    ("running", "quarantined"),
    ("quarantined", "free"),
    ("completing", "quarantined"),
    ("free", "free"),
]

# The lifecycle of a model as requirement R10.1 writes it, with gaps G5 and G6.
MODEL_R10_1 = [
    ("unloaded", "validating"),
    ("validating", "configuring"),
    ("validating", "failed"),
    ("configuring", "warming"),
    ("configuring", "failed"),
    ("warming", "ready"),
    ("ready", "draining"),
    ("draining", "unloading"),
    ("unloading", "unloaded"),
    ("failed", "unloaded"),
    ("ready", "recovering"),
    ("recovering", "configuring"),
    ("draining", "recovering"),
    ("configuring", "recovering"),
    ("warming", "recovering"),
    ("warming", "failed"),
    ("unloading", "failed"),
]

# What a restart does to what was bound to the old process (G21), by machine.
RESTART_G21 = {
    "job": ({"planned", "submitted", "uncertain"}, "lost"),
    "buffer": ({"preparing", "submitted", "running", "completing"}, "quarantined"),
    "lane": ({"ready", "reserved"}, "unknown"),
    "device": (
        set(MACHINES["device"].states) - {"closed"},
        "closed",
    ),
    "model": (set(MACHINES["model"].states) - {"unloaded", "failed"}, "failed"),
}


def moves(name: str) -> set[tuple[str, str]]:
    """Return the (source, destination) pairs of a machine."""
    return {(source, dest) for (source, _), dest in MACHINES[name].table.items()}


def test_buffer_has_the_lifecycle_of_the_requirement() -> None:
    assert set(BUFFER_R4_3) <= moves("buffer")
    assert MACHINES["buffer"].initial == "free"


def test_a_used_buffer_becomes_free_only_clean_or_new() -> None:
    to_free = {trigger for (_, trigger), dest in MACHINES["buffer"].table.items() if dest == "free"}
    assert to_free == {"refuse", "withdraw", "release", "rebuild"}
    assert [s for (s, t) in MACHINES["buffer"].table if t in ("refuse", "withdraw")] == [
        "preparing",
        "preparing",
    ]


def test_model_has_the_lifecycle_of_the_requirement() -> None:
    assert set(MODEL_R10_1) <= moves("model")


def test_unknown_kv_leaves_only_by_clearing_its_generation() -> None:
    ways_out = {t for (s, t) in MACHINES["lane"].table if s == "unknown"}
    assert ways_out == {"clear"}


@pytest.mark.parametrize("name", RESTART_G21)
def test_a_restart_ends_what_the_old_process_held(name: str) -> None:
    sources, dest = RESTART_G21[name]
    abandoned = {s: d for (s, t), d in MACHINES[name].table.items() if t == "abandon"}
    assert abandoned == dict.fromkeys(sources, dest)


def test_every_state_of_a_live_request_can_be_cancelled_expired_and_failed() -> None:
    machine = MACHINES["request"]
    live = set(machine.states) - machine.final - {"received"}
    for trigger in ("cancel", "expire", "fail"):
        assert {s for (s, t) in machine.table if t == trigger} == live


def test_couplings_name_declared_triggers() -> None:
    for coupling in COUPLINGS:
        for machine, trigger in (coupling.when, *coupling.then):
            assert trigger in MACHINES[machine].triggers


def test_a_broken_coupling_is_found() -> None:
    plan = Event("job", (1,), "plan", "drafted", "planned", 1, 1)
    acquire = Event("buffer", (1,), "acquire", "free", "preparing", 1, 1)
    reserve = Event("lane", (1,), "reserve", "ready", "reserved", 1, 1)
    assert broken_couplings([plan, acquire, reserve]) == []
    assert [c.then for c in broken_couplings([plan, acquire])] == [(("lane", "reserve"),)]


def test_triggers_of_two_machines_share_a_name_only_when_the_verb_means_the_same() -> None:
    shared = {
        "abandon",  # the process that held it is gone (G21)
        "clean",
        "complete",  # the device is done with the job and its buffer
        "degrade",
        "drain",  # refuse new work, finish what is there
        "fail",
        "lose",  # given up for good
        "refuse",  # nothing was begun
        "submit",  # handed to the device
        "suspect",  # not to be trusted from here on
        "withdraw",  # taken back before it was handed over
    }
    owners: dict[str, list[str]] = {}
    for machine in MACHINES.values():
        for trigger in machine.triggers:
            owners.setdefault(trigger, []).append(machine.name)
    assert {trigger for trigger, names in owners.items() if len(names) > 1} <= shared


def deciders() -> set[tuple[str, str, str]]:
    """Return every (machine, trigger, deciding function) that the declarations name."""
    return {
        (machine.name, edge.trigger, edge.by)
        for machine in MACHINES.values()
        for edge in machine.edges
    }


@pytest.mark.parametrize(("machine", "trigger", "by"), sorted(deciders()))
def test_the_named_function_exists_and_its_module_emits_the_trigger(
    machine: str, trigger: str, by: str
) -> None:
    module_name, function_name = by.split(".")
    module = importlib.import_module(f"laneway.engine.{module_name}")
    assert callable(getattr(module, function_name))
    assert trigger in constants_of_the_engine(), f"{machine}.{trigger} is decided nowhere"


@cache
def constants_of_the_engine() -> frozenset[str]:
    """Return every string constant in the engine's code."""
    return frozenset(
        node.value
        for path in (ROOT / "engine").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"initial": "nowhere"}, "unreachable"),
        ({"edges": (Edge("go", ("a",), "c", "x.y", "R0"),)}, "unknown state c"),
        ({"edges": (Edge("go", ("a", "a"), "b", "x.y", "R0"),)}, "declared twice"),
        ({"final": ()}, "no way out of b"),
        ({"edges": (Edge("go", ("b",), "a", "x.y", "R0"),)}, "leaves the final state"),
    ],
)
def test_a_contradictory_declaration_is_refused(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {
        "name": "toy",
        "meaning": "a toy",
        "initial": "a",
        "states": {"a": "first", "b": "last"},
        "final": ("b",),
        "edges": (Edge("go", ("a",), "b", "x.y", "R0"),),
    }
    declare(**good)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match=message):
        declare(**(good | change))  # type: ignore[arg-type]


def test_the_generated_page_is_current() -> None:
    page = (ROOT / "specs" / "machines.md").read_text()
    assert page == markdown(), "run: laneway machines --markdown > specs/machines.md"
