"""The folders at the root are the packages, by one table (pyproject.toml) and its links."""

import ast
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LINKS = ROOT / "src" / "laneway"


def setuptools_table() -> dict[str, Any]:
    """Return what pyproject.toml tells setuptools."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    table: dict[str, Any] = tomllib.loads(text)["tool"]["setuptools"]
    return table


PACKAGE_DIR: dict[str, str] = setuptools_table()["package-dir"]
FOLDERS = sorted(PACKAGE_DIR.values())


def link_faults(links: Path, root: Path, package_dir: Mapping[str, str]) -> list[str]:
    """Return how the links of a folder differ from the table of packages."""
    faults = []
    wanted = {package.partition(".")[2]: folder for package, folder in package_dir.items()}
    found = {path.name: path for path in links.iterdir()}
    for name in sorted(wanted.keys() | found.keys()):
        path = found.get(name)
        if path is None:
            faults.append(f"{name}: no link")
        elif name not in wanted:
            faults.append(f"{name}: not in the table")
        elif not path.is_symlink():
            faults.append(f"{name}: not a link")
        elif path.readlink().is_absolute():
            faults.append(f"{name}: an absolute link")
        elif path.resolve() != (root / wanted[name]).resolve():
            faults.append(f"{name}: leads to {path.resolve()}")
    return faults


def nested_modules(folder: Path) -> list[str]:
    """Return the Python files below a package folder that are not directly in it."""
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*.py"))
        if path.parent != folder
    ]


def bare_imports(source: str, folders: Iterable[str]) -> list[str]:
    """Return the imports of a package folder under its bare name."""
    names = set(folders)
    found: list[str] = []
    # A file in which no line begins such an import is not parsed.
    begun = rf"(?:from\s*\.|(?:import|from)\b[^\n]*(?<![.\w])(?:{'|'.join(names)})\b)"
    if not re.search(rf"^(?:[^\n]*[;:])?\s*{begun}|\\\n", source, re.M):
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.partition(".")[0] in names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if node.level or module.partition(".")[0] in names:
                found.append(module)
    return found


def python_files() -> list[Path]:
    """Return every Python file of the packages and the tests."""
    return [path for name in (*FOLDERS, "tests") for path in sorted((ROOT / name).rglob("*.py"))]


def test_links_equal_the_table() -> None:
    assert link_faults(LINKS, ROOT, PACKAGE_DIR) == []
    assert set(setuptools_table()["packages"]) == set(PACKAGE_DIR)


def test_wrong_links_are_found(tmp_path: Path) -> None:
    for name in ("here", "there", "elsewhere"):
        (tmp_path / name).mkdir()
    links = tmp_path / "there"
    (links / "here").symlink_to("../elsewhere")
    (links / "far").symlink_to(tmp_path / "here")
    (links / "solid").mkdir()
    (links / "extra").symlink_to("../here")
    table = {f"p.{name}": "here" for name in ("here", "far", "solid", "absent")}
    assert link_faults(links, tmp_path, table) == [
        "absent: no link",
        "extra: not in the table",
        "far: an absolute link",
        f"here: leads to {tmp_path.resolve() / 'elsewhere'}",
        "solid: not a link",
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_package_folders_are_flat(folder: str) -> None:
    assert (ROOT / folder / "__init__.py").is_file()
    assert nested_modules(ROOT / folder) == []


def test_a_nested_module_is_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("flat.py", "sub/deep.py"):
        (tmp_path / name).touch()
    assert nested_modules(tmp_path) == ["sub/deep.py"]


def test_nothing_imports_a_folder_under_its_bare_name() -> None:
    found = {
        str(path.relative_to(ROOT)): bare_imports(path.read_text("utf-8"), FOLDERS)
        for path in python_files()
    }
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import engine", ["engine"]),
        ("def f():\n    from engine.state import State", ["engine.state"]),
        ("from . import state", ["."]),
        ("import laneway.engine, enginelike", []),
    ],
)
def test_a_bare_import_is_found(source: str, found: list[str]) -> None:
    assert bare_imports(source, ["engine"]) == found


def test_every_package_with_code_is_typed() -> None:
    typed = {folder for folder in FOLDERS if (ROOT / folder / "py.typed").is_file()}
    with_code = {folder for folder in FOLDERS if len(list((ROOT / folder).glob("*.py"))) > 1}
    assert typed == with_code


@pytest.mark.parametrize(
    ("name", "folder", "sources"),
    [
        ("laneway.adapters._calsim", "adapters", "calsim_*.c"),
        ("laneway.journal._text", "journal", "*.c"),
    ],
)
def test_what_is_native_is_built_from_every_c_file(name: str, folder: str, sources: str) -> None:
    modules = {module["name"]: module for module in setuptools_table()["ext-modules"]}
    assert len(modules) == 2
    for key, pattern in (("sources", sources), ("depends", "*.h")):
        files = {str(path.relative_to(ROOT)) for path in (ROOT / folder / "native").glob(pattern)}
        assert set(modules[name][key]) == files
