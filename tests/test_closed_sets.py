"""Inputs and effects are closed sets: each is made by somebody and answered for by somebody."""

import ast
from pathlib import Path
from typing import get_args

import pytest

from laneway.engine.effects import ClientEffect, DeviceEffect, Effect, ShellEffect
from laneway.engine.inputs import Input
from laneway.journal.codec import KINDS

ROOT = Path(__file__).parents[1]


def names(union: object) -> set[str]:
    """Return the class names of a union."""
    return {member.__name__ for member in get_args(union)}


def matched(source: str, function: str) -> set[str]:
    """Return the classes that the match statement of a function has a case for."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return {
                case.cls.id
                for case in ast.walk(node)
                if isinstance(case, ast.MatchClass) and isinstance(case.cls, ast.Name)
            }
    raise AssertionError(f"there is no function {function}")


def asked_about(source: str, function: str) -> set[str]:
    """Return the classes that a function asks for with isinstance."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.FunctionDef) and node.name == function):
            continue
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "isinstance":
                found |= {n.id for n in ast.walk(call.args[1]) if isinstance(n, ast.Name)}
    return found


def made(source: str) -> set[str]:
    """Return the names that a source calls; ``make_job_row`` makes a ``JobRow``."""
    called = {
        node.func.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    makers = {name.removeprefix("make_") for name in called if name.startswith("make_")}
    return called | {name.title().replace("_", "") for name in makers}


def made_in(*files: Path) -> set[str]:
    """Return the names that files call."""
    return set().union(*(made(path.read_text("utf-8")) for path in files))


def test_every_input_is_decided() -> None:
    source = (ROOT / "engine" / "decide.py").read_text("utf-8")
    assert matched(source, "_dispatch") == names(Input)


def test_every_input_has_a_wire_form() -> None:
    assert set(KINDS) == names(Input)
    assert {cls.__name__ for _, cls in KINDS.values()} == names(Input)


def test_every_input_comes_from_the_shell_or_an_adapter() -> None:
    shell = [ROOT / "engine" / name for name in ("asking.py", "loop.py", "inbox.py")]
    assert names(Input) - made_in(*shell, *(ROOT / "adapters").glob("*.py")) == set()


def test_every_class_of_the_inputs_file_is_an_input_or_part_of_one() -> None:
    source = (ROOT / "engine" / "inputs.py").read_text("utf-8")
    classes = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    used = {
        node.id
        for cls in ast.parse(source).body
        if isinstance(cls, ast.ClassDef)
        for field in cls.body
        if isinstance(field, ast.AnnAssign)
        for node in ast.walk(field.annotation)
        if isinstance(node, ast.Name)
    }
    assert classes - names(Input) - used == set()


def test_every_device_effect_is_carried_out() -> None:
    source = (ROOT / "adapters" / "device.py").read_text("utf-8")
    assert matched(source, "_handle") == names(DeviceEffect)


def test_every_client_effect_is_carried_out() -> None:
    source = (ROOT / "engine" / "loop.py").read_text("utf-8")
    assert asked_about(source, "_act") == names(ClientEffect) | {ShellEffect.__name__}


def test_every_effect_is_asked_for_by_a_decision() -> None:
    shell = {"loop.py", "inbox.py", "stream.py", "subscription.py", "clock.py"}
    core = [path for path in (ROOT / "engine").glob("*.py") if path.name not in shell]
    assert names(Effect) - made_in(*core) == set()


TOY = """
class Device:
    def _handle(self, effect):
        if isinstance(effect, Deliver | Conclude):
            return Answer(effect=effect)
        match effect:
            case Submit() | Restore():
                self.run(effect)
            case other:
                raise other
"""


@pytest.mark.parametrize("missing", ["Submit", "Restore"])
def test_a_missing_case_is_found(missing: str) -> None:
    assert matched(TOY, "_handle") == {"Submit", "Restore"}
    assert missing not in matched(TOY.replace(missing, "Other"), "_handle")


def test_what_is_asked_and_made_is_found() -> None:
    assert asked_about(TOY, "_handle") == {"Deliver", "Conclude"}
    assert made(TOY) == {"isinstance", "Answer"}
    with pytest.raises(AssertionError, match="no function other"):
        matched(TOY, "other")
