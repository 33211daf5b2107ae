"""The specification is complete, names only what exists, and knows every id the code quotes."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import attrs
import pytest

from laneway.statemachines import MACHINES
from laneway.statemachines.coupling import COUPLINGS

ROOT = Path(__file__).parents[1]
SPECS = ROOT / "specs"
CODE = ("statemachines", "engine", "journal", "adapters", "tests")

# How many lines each chapter of the requirements has, and how many rules of each other kind.
CHAPTERS = (2, 4, 7, 5, 7, 5, 5, 7, 3, 4, 4, 5, 2, 1, 7, 5, 6, 10, 5)
GAPS, ENGINE_RULES, DEVICE_RULES, INVARIANTS, ROWS = 22, 31, 16, 12, 26
CAPABILITIES, DECISIONS = 10, 22

STATES = ("built", "part", "not built yet", "refused", "fact")
PLACE = re.compile(r"`([\w./-]+\.(?:py|c|h|md|toml))(?:::([\w.]+))?`")
MISSING = "Not built yet: "
# Which sentences a state asks for: (a place in the code, a check, what is missing).
ASKED = {"built": (True, True, False), "part": (True, None, True), "refused": (True, None, False)}

ID = re.compile(
    r"(?<![\w./-])(?:R\d{1,2}(?:\.\d{1,2})?|G\d{1,2}|E\d{1,2}a?|D\d{1,2}|I\d{1,2})(?![\w-])"
)
NOT_IDS = frozenset({"I16", "I32", "I64"})  # element types of a safetensors file


@attrs.frozen
class Line:
    """One line of a table of requirements."""

    id: str
    text: str
    level: str
    state: str
    where: str
    checks: str


def cells(page: str) -> Iterator[tuple[str, ...]]:
    """Return the cells of every table row of a page that begins with an id or a number."""
    for line in page.splitlines():
        if re.match(r"\| (?:[RGEDI]?\d+[.\da]*) \|", line):
            yield tuple(cell.strip() for cell in line.strip("| ").split(" | "))


def page(name: str) -> str:
    """Return the text of a page of the specification."""
    return (SPECS / name).read_text("utf-8")


def lines(text: str) -> list[Line]:
    """Return the lines with a state. Raises: TypeError for a row of another width."""
    return [Line(*row) for row in cells(text) if re.match(r"[RGE]\d", row[0])]


LINES = lines(page("requirements.md"))


def expected_ids() -> list[str]:
    """Return every id of a line with a state, in order."""
    of_chapters = [f"R{c}.{n}" for c, count in enumerate(CHAPTERS) for n in range(1, count + 1)]
    rules = [f"E{n}" for n in range(1, ENGINE_RULES + 1)]
    rules.insert(rules.index("E20") + 1, "E20a")
    return [*of_chapters, *(f"G{n}" for n in range(1, GAPS + 1)), *rules]


def known_ids() -> set[str]:
    """Return every id that may be quoted, chapters included."""
    ids = {row[0] for name in ("requirements.md", "invariants.md") for row in cells(page(name))}
    return ids | {f"R{chapter}" for chapter in range(len(CHAPTERS))}


# ---------------------------------------------------------------------------- the lines


def test_ids_are_complete_and_unique() -> None:
    rows = [row[0] for row in cells(page("requirements.md"))]
    assert [line.id for line in LINES] == expected_ids()
    assert [r for r in rows if r[0] == "D"] == [f"D{n}" for n in range(1, DEVICE_RULES + 1)]
    assert [r for r in rows if r.isdecimal()] == [str(n) for n in range(1, ROWS + 1)]
    assert len(set(rows)) == len(rows)


def test_invariants_are_complete() -> None:
    rows = list(cells(page("invariants.md")))
    assert [row[0] for row in rows] == [f"I{n}" for n in range(1, INVARIANTS + 1)]
    assert [row for row in rows if len(row) != 4 or not PLACE.search(row[2])] == []


def test_decisions_are_complete() -> None:
    rows = [row[0] for row in cells(page("decisions.md"))]
    assert rows == [str(number) for number in range(1, DECISIONS + 1)]


def faults(line: Line) -> list[str]:
    """Return what a line says against the meaning of its state."""
    found = []
    if not re.fullmatch(r"–|C[0-4](/C[0-4])?", line.level):
        found.append(f"level {line.level}")
    if line.state not in STATES:
        return [*found, f"state {line.state}"]
    place, check, missing = ASKED.get(line.state, (False, None, False))
    if bool(PLACE.search(line.where)) != place or (not place and line.where != "–"):
        found.append(f"{line.state} with where {line.where}")
    if check and not any("test_" in name for _, name in PLACE.findall(line.checks)):
        if "engine/invariants.py" not in line.checks:
            found.append(f"{line.state} without a check")
    if (MISSING in line.checks) != missing:
        found.append(f"{line.state} and what is missing: {line.checks[-40:]}")
    if line.state == "not built yet" and line.checks != "–":
        found.append("not built, yet checked")
    return found


def test_lines_say_what_their_state_means() -> None:
    assert {line.id: faults(line) for line in LINES if faults(line)} == {}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"state": "done"}, "state done"),
        ({"level": "C7"}, "level C7"),
        ({"where": "–"}, "built with where –"),
        ({"checks": "–"}, "built without a check"),
        ({"checks": "`tests/a.py::test_a`. Not built yet: b"}, "built and what is missing"),
        ({"state": "part"}, "part and what is missing"),
        ({"state": "not built yet"}, "not built yet with where `engine/a.py`"),
    ],
)
def test_a_line_against_its_state_is_found(change: dict[str, str], fault: str) -> None:
    good = Line("R1.1", "text", "C2", "built", "`engine/a.py`", "`tests/a.py::test_a`")
    assert faults(good) == []
    assert any(found.startswith(fault) for found in faults(attrs.evolve(good, **change)))


def test_every_capability_names_its_work() -> None:
    text = page("requirements.md").partition("| capability |")[2].partition("\n\n")[0]
    rows = [[c.strip() for c in row.strip("| ").split(" | ")] for row in text.splitlines()[2:]]
    assert len(rows) == CAPABILITIES
    assert [
        row for row in rows if len(row) != 4 or not re.match(r"C\d", row[1]) or not row[2]
    ] == []


# ---------------------------------------------------------------------------- what they name


@cache
def definitions(path: Path) -> frozenset[str]:
    """Return the functions, classes, methods and constants of a Python file, as they are quoted."""
    found: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
            found |= {
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)


def absent(text: str, root: Path) -> list[str]:
    """Return the files, and the functions in them, that a text names and that do not exist."""
    found = []
    for file, name in PLACE.findall(text):
        path = root / file
        if "/" not in file and file != "pyproject.toml":
            continue
        if not path.is_file():
            found.append(file)
        elif name and name not in definitions(path):
            found.append(f"{file}::{name}")
    return found


@pytest.mark.parametrize("name", ["requirements.md", "invariants.md", "decisions.md", "README.md"])
def test_every_place_and_check_exists(name: str) -> None:
    assert absent(page(name), ROOT) == []


def test_every_scenario_is_shown_by_tests_that_exist() -> None:
    """A capacity or affinity that this engine refuses (19, 20, 25) has no scenario here."""
    text = (ROOT / "tests" / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| SCN-(\d\d) \| .* \| (.*) \| [^|]+ \|$", text, re.M)
    numbers = [*range(1, 19), *range(21, 25), 26]
    assert [int(number) for number, _ in rows] == numbers
    for number, shown in rows:
        assert PLACE.search(shown), number
        assert absent(shown, ROOT) == []


def test_a_place_that_does_not_exist_is_found() -> None:
    text = "`engine/decide.py::decide`, `engine/decide.py::absent`, `engine/absent.py`, `x/y.py::z`"
    assert absent(text, ROOT) == ["engine/decide.py::absent", "engine/absent.py", "x/y.py"]
    assert absent("`engine/loop.py::Engine.step`, `statemachines/kv.py::LANE`", ROOT) == []


# ---------------------------------------------------------------------------- what quotes them


def prose(source: str) -> str:
    """Return docstrings and comments of a Python source."""
    parts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts.append(str(node.value.value))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            parts.append(token.string)
    return "\n".join(parts)


def prose_of_c(source: str) -> str:
    """Return the comments of a C source."""
    return "\n".join(re.findall(r"/\*.*?\*/|//[^\n]*", source, re.S))


@cache
def sources() -> tuple[tuple[str, str], ...]:
    """Return path and text of every source of the product and its tests."""
    paths = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    paths += sorted((ROOT / "adapters" / "native").glob("*.[ch]"))
    return tuple((str(path.relative_to(ROOT)), path.read_text("utf-8")) for path in paths)


def found_in_prose(look: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Return what ``look`` finds in the prose of every source, by path, where it finds something.

    A source in which it finds nothing at all has nothing in its prose: only the others are read.
    """
    found = {}
    for path, text in sources():
        if look(text):
            found[path] = look(prose(text) if path.endswith(".py") else prose_of_c(text))
    return {path: words for path, words in found.items() if words}


def unknown_ids(text: str, known: set[str]) -> list[str]:
    """Return the ids in a text that no specification has."""
    return sorted(set(ID.findall(text)) - known - NOT_IDS)


def test_every_quoted_id_exists() -> None:
    known = known_ids()
    assert found_in_prose(lambda text: unknown_ids(text, known)) == {}


def test_every_rule_of_the_machines_exists() -> None:
    known = known_ids()
    rules = [edge.rule for machine in MACHINES.values() for edge in machine.edges]
    rules += [coupling.rule for coupling in COUPLINGS]
    for rule in rules:
        assert [part for part in rule.split(", ") if part not in known] == []


def test_what_only_code_says_is_no_quotation() -> None:
    """As the ids below; what stands in the prose of a source is found."""
    own = str(Path(__file__).relative_to(ROOT))
    assert unknown_ids(dict(sources())[own], known_ids())
    found = found_in_prose(
        lambda text: [word for word in ("known_ids()", "is found") if word in text]
    )
    assert found[own] == ["is found"]


def test_an_unknown_id_is_found() -> None:
    text = "R7.4, E17 and E20a hold; R99.1, G23 (gap), I16 and E2-x do not; see R7."
    assert unknown_ids(text, {"R7.4", "E17", "E20a", "R7"}) == ["G23", "R99.1"]
    source = 'x = "G77"\ndef f():\n    """Do. Source: G88."""  # G99\n'
    assert unknown_ids(prose(source), set()) == ["G88", "G99"]
    assert unknown_ids(prose_of_c("int G1; /* G2\n G3 */ // G4"), set()) == ["G2", "G3", "G4"]


# ---------------------------------------------------------------------------- papers

NUMBERED = re.compile(r"\bdecisions? (\d+)(?: and (\d+))?", re.I)
PAPER = re.compile(
    r"\bdevice-abi\b[^,;:)]{0,10}|\binterfaces \([^)]*\)|\bpackaging [A-Z]?\d+"
    r"|\b(?:architecture|serving|interfaces|performance)(?:\.md)?,? (?:chapter|rule)s? \d+"
)
PAGE = re.compile(r"\b[\w-]+\.md\b")


def unknown_papers(text: str, pages: set[str]) -> list[str]:
    """Return the papers a text refers to that a reader of this repository cannot open."""
    text = " ".join(text.split())
    found = [match.group(0) for match in PAPER.finditer(text)]
    for match in NUMBERED.finditer(text):
        numbers = [int(number) for number in match.groups() if number]
        found += [match.group(0)] if max(numbers) > DECISIONS else []
    return sorted({*found, *(name for name in PAGE.findall(text) if name not in pages)})


def test_the_code_refers_only_to_papers_of_this_repository() -> None:
    pages = {
        path.name
        for folder in ("", "specs", "tests", "models")
        for path in (ROOT / folder).glob("*.md")
    }
    assert found_in_prose(lambda text: unknown_papers(text, pages)) == {}


def test_a_paper_that_is_not_here_is_found() -> None:
    text = "Source: device-abi 4.3, absent.md; decisions 9 and 99. Decision 19, machines.md."
    papers = unknown_papers(text, {"machines.md"})
    assert papers == ["absent.md", "decisions 9 and 99", "device-abi 4.3"]
