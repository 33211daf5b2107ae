"""Who may import whom: arrows point down, and the core touches nothing of the world.

Core = statemachines and engine without its shell. The core decides from inputs alone, so it may not
reach for time, randomness, files, threads or libraries that do.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BELOW = {
    "statemachines": set[str](),
    "engine": {"statemachines"},
    "journal": {"engine", "statemachines"},
    "adapters": {"journal", "engine", "statemachines"},
    "models": set[str](),
}
SHELL = {"loop.py", "inbox.py", "clients.py", "stream.py", "subscription.py", "clock.py"}
FORBIDDEN_IN_CORE = frozenset(
    "threading queue asyncio ctypes sqlite3 sqlalchemy os sys io pathlib time datetime random "
    "secrets logging socket".split()
)
WAYS_AROUND = frozenset({"open", "input", "print", "exec", "eval", "__import__"})

# A core file that imports a shell file, and why it may.
CORE_MAY_IMPORT = {
    ("__init__.py", "loop"): "the facade of the package",
    ("__init__.py", "stream"): "the facade of the package",
    ("ports.py", "clock"): "the protocol Clock stands beside the clocks",
}


def imported(source: str) -> list[str]:
    """Return every module that a source imports, wherever in it; relative ones with their dots."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found.append(module)
            if module.count(".") <= 1:  # `from laneway.engine import decide` names a module
                found += [f"{module}.{alias.name}" for alias in node.names]
    return found


def world_uses(source: str) -> list[str]:
    """Return what a core source takes from the world: imports and built-in ways around them."""
    tops = [name.partition(".")[0] for name in imported(source)]
    found = [name for name in tops if name in FORBIDDEN_IN_CORE]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.func.id] if node.func.id in WAYS_AROUND else []
    return sorted(set(found))


def upward_imports(package: str, source: str) -> list[str]:
    """Return imports of a package's source that do not point down."""
    allowed = BELOW[package] | {package}
    found = []
    for name in imported(source):
        parts = name.split(".")
        if parts[0] == "":
            found.append(name)
        elif parts[0] == "laneway" and len(parts) > 1 and parts[1] not in allowed:
            found.append(name)
    return sorted(set(found))


def core_files() -> list[Path]:
    """Return the files of the core."""
    engine = [path for path in (ROOT / "engine").glob("*.py") if path.name not in SHELL]
    return sorted([*(ROOT / "statemachines").glob("*.py"), *engine])


def test_the_core_takes_nothing_from_the_world() -> None:
    found = {str(p.relative_to(ROOT)): world_uses(p.read_text("utf-8")) for p in core_files()}
    assert len(found) > 30
    assert {path: uses for path, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time", ["time"]),
        ("from os import path as p", ["os"]),
        ("def f():\n    import random\n    return random.random()", ["random"]),
        ("import numpy, math, heapq", []),
        ("import sys.monitoring", ["sys"]),
        ("text = open('x').read()", ["open"]),
        ("m = __import__('time')", ["__import__"]),
        ("from laneway.engine import state\nstate.time()", []),
    ],
)
def test_a_use_of_the_world_is_found(source: str, found: list[str]) -> None:
    assert world_uses(source) == found


def test_the_core_does_not_import_the_shell() -> None:
    shell = {f"laneway.engine.{name.removesuffix('.py')}" for name in SHELL}
    found = {
        (path.name, name.rpartition(".")[2])
        for path in core_files()
        for name in imported(path.read_text("utf-8"))
        if name in shell
    }
    assert found == set(CORE_MAY_IMPORT)


@pytest.mark.parametrize("package", BELOW)
def test_arrows_point_down(package: str) -> None:
    found = {
        path.name: upward_imports(package, path.read_text("utf-8"))
        for path in (ROOT / package).glob("*.py")
    }
    assert {name: imports for name, imports in found.items() if imports} == {}


@pytest.mark.parametrize(
    ("package", "source", "found"),
    [
        ("engine", "from laneway.journal import open_journal", ["laneway.journal"]),
        ("statemachines", "import laneway.engine.state", ["laneway.engine.state"]),
        ("engine", "def f():\n    from laneway import adapters", ["laneway.adapters"]),
        ("journal", "from .store import SqlJournal", [".store"]),
        ("adapters", "from laneway.journal.store import SqlJournal", []),
        ("statemachines", "from laneway.statemachines.event import Event", []),
    ],
)
def test_an_upward_import_is_found(package: str, source: str, found: list[str]) -> None:
    names = upward_imports(package, source)
    assert [name for name in names if name in found] == found
    assert bool(names) == bool(found)


def test_every_package_is_in_the_table() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == set(BELOW)
