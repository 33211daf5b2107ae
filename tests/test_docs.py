"""What the documents say is there is there: commands, files, links, and the example runs."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from laneway.adapters.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "specs").glob("*.md"), ROOT / "tests" / "README.md"])
FILE = r"[\w./-]+\.(?:py|c|h|md|toml|json|npz|safetensors|tla|cfg)"
QUESTIONS_MIN = 20


def page(name: str) -> str:
    """Return the text of a page at the root."""
    return (ROOT / name).read_text("utf-8")


# ---------------------------------------------------------------------------- commands


def commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Return path and object of every command, and of every group that does something by itself."""
    below = getattr(command, "commands", {})
    if not below or command.invoke_without_command:
        yield path, command
    for name, each in below.items():
        yield from commands(each, (*path, name))


def undocumented(paths: list[tuple[str, ...]], text: str) -> list[str]:
    """Return the commands that a text does not show in full."""
    names = [" ".join(path) for path in paths]
    return [name for name in names if not re.search(rf"\b{name}(?![\w-])", text)]


COMMANDS = dict(commands(typer.main.get_command(app), ("laneway",)))


def test_the_commands_are_found() -> None:
    some = {("laneway", "run"), ("laneway", "machines"), ("laneway", "machines", "explain")}
    assert some <= COMMANDS.keys()
    assert ("laneway", "journal") not in COMMANDS


def test_every_command_is_documented() -> None:
    assert undocumented(list(COMMANDS), page("README.md")) == []


def test_a_missing_command_is_found() -> None:
    text = "`laneway run-all`, `laneway machines explain x`"
    paths = [("laneway", "run"), ("laneway", "machines"), ("laneway", "machines", "explain")]
    assert undocumented(paths, text) == ["laneway run"]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(path: tuple[str, ...]) -> None:
    assert "Examples:" in (COMMANDS[path].help or "")


# ---------------------------------------------------------------------------- files


def missing_files(text: str, root: Path, *, here: Path) -> list[str]:
    """Return the files in backticks that are neither under the root, beside the page, nor anywhere.

    A name without a folder may lie in any folder of the repository.
    """
    found = []
    for name in sorted(set(re.findall(rf"`({FILE})`", text))):
        near = (root / name, here / name)
        anywhere = [] if "/" in name else root.glob(f"*/**/{name}")
        if not any(path.exists() for path in near) and not any(anywhere):
            found.append(name)
    return found


def missing_functions(text: str, root: Path) -> list[str]:
    """Return each "`file.py`, function `name`" whose file has no such function."""
    found = []
    for file, name in re.findall(rf"`({FILE})`, function `(\w+)`", text):
        path = root / file
        if not path.exists() or not re.search(rf"^\s*def {name}\(", path.read_text(), re.M):
            found.append(f"{file} {name}")
    return found


def missing_links(text: str, here: Path) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    return [link for link in links if link and "://" not in link and not (here / link).exists()]


def where_is(text: str) -> list[str]:
    """Return the rows of the "where is" table of ARCHITECTURE.md."""
    after = re.split(r"^## Where is.*$", text, maxsplit=1, flags=re.M)
    assert len(after) == 2, "ARCHITECTURE.md has no section named Where is"
    section = re.split(r"^## ", after[1], maxsplit=1, flags=re.M)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_functions_and_links_of_a_page_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    assert missing_functions(text, ROOT) == []
    assert missing_links(text, path.parent) == []
    if path.name != "calbin.md":  # speaks of the files of a calbin, which are made by packing
        assert missing_files(text, ROOT, here=path.parent) == []


def test_the_where_is_table_answers_with_files() -> None:
    rows = where_is(page("ARCHITECTURE.md"))
    assert len(rows) >= QUESTIONS_MIN
    assert [row for row in rows if not re.search(rf"`{FILE}`|`git grep", row)] == []


def test_the_page_of_the_tests_names_every_folder_and_every_test_of_its_own() -> None:
    tests = ROOT / "tests"
    folders = {f"{path.parent.name}/" for path in tests.glob("*/test_*.py")}
    text = (tests / "README.md").read_text("utf-8")
    named = {*folders, *(path.name for path in tests.glob("test_*.py"))}
    assert sorted(name for name in named if f"`{name}" not in text) == []


def test_what_a_page_promises_and_does_not_keep_is_found() -> None:
    text = """
## Where is …

| question | look in |
|---|---|
| one? | `engine/decide.py`, function `decide` |
| two? | `engine/absent.py`, `npurt.h`, `nowhere.h` |
| three? | `engine/decide.py`, function `absent` |

## Next [a](README.md) [b](absent.md#x) [c](https://example.org)
"""
    assert [row[2:5] for row in where_is(text)] == ["one", "two", "thr"]
    assert missing_files(text, ROOT, here=ROOT) == ["engine/absent.py", "nowhere.h"]
    assert missing_functions(text, ROOT) == ["engine/decide.py absent"]
    assert missing_links(text, ROOT) == ["absent.md"]


# ---------------------------------------------------------------------------- the example


def python_blocks(text: str) -> list[str]:
    """Return the Python examples of a page."""
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def run_example(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an example as a reader would who stands beside the models."""
    (folder / "models").symlink_to(ROOT / "models")
    return subprocess.run(
        [sys.executable, "-c", source],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_the_first_example_of_the_readme_runs(tmp_path: Path) -> None:
    source = python_blocks(page("README.md"))[0]
    assert "Engine(" in source
    done = run_example(source, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    *answer, ending = done.stdout.strip().splitlines()
    assert ending in ("stop", "length")
    assert len("".join(answer).split()) >= 3, done.stdout


def test_a_broken_example_is_found(tmp_path: Path) -> None:
    text = (
        "```console\n$ x\n```\n```python\nprint('a')\n```\n```python\nraise SystemExit('b')\n```\n"
    )
    first, second = python_blocks(text)
    assert (first, second) == ("print('a')\n", "raise SystemExit('b')\n")
    done = run_example(second, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "b\n")
