"""What no file may contain. Each rule is a function over a text, with a planted case."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("statemachines", "engine", "journal", "adapters")
FOLDERS = (*PACKAGES, "models", "tests", "specs", ".ci")
TEXTS = {".py", ".c", ".h", ".cpp", ".md", ".toml", ".json", ".tla", ".cfg", ".txt", ""}
BUILT = {"__pycache__", "build", "dist"}
AT_THE_ROOT = {"Makefile", "LICENSE", ".gitignore"}

# Handlers of every exception that do not re-raise, and what they do instead.
CATCHES_ALL = {
    ("engine/meter.py", "take"): "returned to whoever feeds it, and counted",
    ("engine/loop.py", "_run"): "_guarded has logged it, stopped the engine and told every waiter",
    ("engine/loop.py", "_go_on"): "as in _run; the thread is the device's and goes on",
    ("adapters/commands.py", "foresee"): "logged; nothing depends on it, the job is filled in anew",
    ("journal/checkpoint.py", "_run"): "kept; the next append fails with it",
    ("adapters/cli.py", "main"): "printed as one line; the exit code says which kind it was",
    ("adapters/discover.py", "_describe"): "a broken entry point is listed with its error",
    ("adapters/waiting.py", "_complete"): "posted as DeviceFaulted of kind call",
    ("adapters/waiting.py", "track"): "met again when the output is read, and told there",
    ("adapters/device.py", "_run"): "posted as DeviceFaulted of kind call",
    ("adapters/device.py", "_wait_for_one"): "posted as DeviceFaulted of kind call",
    ("adapters/probe_checks.py", "_run"): "kept; the check fails with it",
    ("adapters/probe_child.py", "_check"): "the check failed, with its words in the record",
}

# Words with two meanings: none of them names a module.
NO_MODULE_NAMES = frozenset(
    "context handle handler manager session cache instance process data info util utils helper "
    "helpers common misc".split()
)

OPEN_ENDS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
PLACES = re.compile(
    r"(?<![\w.])/(?:wor" + r"k|ho" + r"me|Use" + r"rs|ro" + r"ot|mn" + r"t)/\w"
    r"|\.\./(?:sha" + r"red|se" + r"ed)\b"
)
HOSTS = re.compile(
    r"py" + r"pi\.org|python" + r"hosted\.org|--(?:extra-)?index" + r"-url|arti" + r"factory"
    r"|://(?!127\.)\d+\.\d+\.\d+\.\d+|://[\w.-]+\.(?:internal|local|corp|lan)\b"
)


@cache
def texts() -> tuple[tuple[str, str], ...]:
    """Return path and content of every text file that belongs to the repository."""
    paths = [path for path in ROOT.iterdir() if path.suffix or path.name in AT_THE_ROOT]
    for folder in FOLDERS:
        paths += (ROOT / folder).rglob("*")
    found = []
    for path in sorted(paths):
        inside = path.relative_to(ROOT)
        made = any(part in BUILT or part[0] == "." for part in inside.parts[1:])
        if path.is_file() and path.suffix in TEXTS and not made:
            found.append((str(inside), path.read_text("utf-8")))
    return tuple(found)


def sources() -> Iterator[tuple[str, str]]:
    """Return path and content of every Python file."""
    return ((path, text) for path, text in texts() if path.endswith(".py"))


def lines_with(pattern: re.Pattern[str], text: str) -> list[int]:
    """Return the numbers of the lines where a pattern occurs."""
    return [n for n, line in enumerate(text.splitlines(), 1) if pattern.search(line)]


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Return the comments of a Python source with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def codeless_ignores(source: str) -> list[int]:
    """Return the lines where a checker is told to look away without saying from what."""
    silenced = re.compile(r"#\s*type:\s*ignore(?!\[[\w-]+)|#\s*noqa(?!:\s*[A-Z]+\d+)", re.I)
    if not silenced.search(source):
        return []  # neither in a comment nor elsewhere
    return [line for line, comment in comments(source) if silenced.search(comment)]


def swallowed(source: str) -> list[str]:
    """Return the functions with a handler of every exception that does not end in a raise."""
    found: list[str] = []

    def look(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.ExceptHandler) and _catches_all(node.type):
            if not isinstance(node.body[-1], ast.Raise):
                found.append(function)
        for child in ast.iter_child_nodes(node):
            look(child, function)

    look(ast.parse(source), "")
    return found


def _catches_all(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(isinstance(n, ast.Name) and n.id in ("Exception", "BaseException") for n in names)


def two_meanings(path: str) -> list[str]:
    """Return the words in a module's name that have two meanings."""
    return sorted(set(Path(path).stem.split("_")) & NO_MODULE_NAMES)


def test_the_repository_is_seen() -> None:
    seen = {path for path, _ in texts()}
    some = {"Makefile", ".ci/run", "engine/decide.py", "adapters/native/npurt.h", "specs/README.md"}
    assert some <= seen and len(seen) > 150


@pytest.mark.parametrize(
    ("what", "pattern"),
    [("an open end", OPEN_ENDS), ("a place on one machine", PLACES), ("a package host", HOSTS)],
)
def test_no_file_contains(what: str, pattern: re.Pattern[str]) -> None:
    found = {path: lines_with(pattern, text) for path, text in texts()}
    assert {path: lines for path, lines in found.items() if lines} == {}, what


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (OPEN_ENDS, "# ok\n# TO" + "DO: later\n", [2]),
        (OPEN_ENDS, "/* FIX" + "ME */", [1]),
        (OPEN_ENDS, "todos are fine", []),
        (PLACES, 'open("/wor' + 'k/main/x")', [1]),
        (PLACES, "see ../sha" + "red/plan", [1]),
        (PLACES, "adapters/work/x and a/home/b", []),
        (HOSTS, "pip install --index" + "-url https://x", [1]),
        (HOSTS, "at http://10.0" + ".0.7/simple", [1]),
        (HOSTS, "sqlite:///run.db and http://127.0.0.1:8000", []),
    ],
)
def test_what_no_file_contains_is_found(
    pattern: re.Pattern[str], text: str, found: list[int]
) -> None:
    assert lines_with(pattern, text) == found


def test_a_checker_is_never_silenced_without_a_code() -> None:
    found = {path: codeless_ignores(text) for path, text in sources()}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = 1\ny = f(x)  # type: " + "ignore", [2]),
        ("y = f()  # no" + "qa", [1]),
        ("y = f()  # type: " + "ignore[misc]  # no" + "qa: E501", []),
        ("text = '# type: " + "ignore'", []),
    ],
)
def test_a_silenced_checker_is_found(source: str, found: list[int]) -> None:
    assert codeless_ignores(source) == found


def test_no_exception_is_swallowed() -> None:
    """Every handler of all exceptions re-raises, or stands in the list above with its reason."""
    found = {
        (path, function)
        for path, text in sources()
        if path.partition("/")[0] in PACKAGES
        for function in swallowed(text)
    }
    assert found == set(CATCHES_ALL)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("except Exception:\n  pass", ["f"]),
        ("except:\n  log()", ["f"]),
        ("except (OSError, BaseException) as e:\n  return e", ["f"]),
        ("except Exception:\n  if x:\n   raise\n  y()", ["f"]),
        ("except Exception as e:\n  close()\n  raise Wrong() from e", []),
        ("except OSError:\n  pass", []),
    ],
)
def test_a_swallowed_exception_is_found(body: str, found: list[str]) -> None:
    source = f"def f():\n try:\n  g()\n {body}".replace("\n ", "\n  ")
    assert swallowed(source) == found


def test_no_module_has_a_name_with_two_meanings() -> None:
    found = {path: two_meanings(path) for path, _ in sources()}
    assert {path: words for path, words in found.items() if words} == {}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("engine/util.py", ["util"]),
        ("engine/session_manager.py", ["manager", "session"]),
        ("engine/processing.py", []),
        ("adapters/worker.py", []),
    ],
)
def test_a_name_with_two_meanings_is_found(path: str, found: list[str]) -> None:
    assert two_meanings(path) == found


def strong_asserts(source: str) -> list[int]:
    """Return the asserts that do more than tell a type: ``python -O`` would change behaviour."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assert) and not _tells_a_type(node.test)
    ]


def _tells_a_type(test: ast.expr) -> bool:
    if isinstance(test, ast.Call):
        return getattr(test.func, "id", "") == "isinstance"
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)


def test_assert_carries_no_behaviour() -> None:
    found = {
        path: strong_asserts(text) for path, text in sources() if path.partition("/")[0] in PACKAGES
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("assert lane.state == 'ready'", [1]),
        ("assert free(lane), 'lane'", [1]),
        ("assert facts is not None", []),
        ("assert isinstance(taken, int)", []),
    ],
)
def test_an_assert_with_behaviour_is_found(source: str, found: list[int]) -> None:
    assert strong_asserts(source) == found
