"""Devices by name: lazily, one by one, and never only the ones that work."""

import os
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from laneway.adapters import discover
from laneway.adapters.binding import load_library
from laneway.adapters.library import VARIABLE, find_library
from laneway.adapters.urls import parse_rest, split_url
from laneway.engine.errors import ConfigurationError


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[EntryPoint]]:
    """Entry points of somebody else: one that works, two that do not, one that takes our name."""
    (tmp_path / "acme_device_for_test.py").write_text(
        "def open_device(rest, **options):\n    return ('acme', rest, options)\n"
    )
    (tmp_path / "acme_broken_for_test.py").write_text("raise RuntimeError('no driver here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [
        EntryPoint(name="acme", value="acme_device_for_test:open_device", group=discover.GROUP),
        EntryPoint(name="broken", value="acme_broken_for_test:open_device", group=discover.GROUP),
        EntryPoint(name="gone", value="acme_not_there_for_test:open_device", group=discover.GROUP),
        EntryPoint(name="sim", value="acme_device_for_test:open_device", group=discover.GROUP),
    ]

    def entry_points(*, group: str) -> list[EntryPoint]:
        assert group == "laneway.devices"
        return points

    monkeypatch.setattr(discover, "entry_points", entry_points)
    yield points


def test_the_built_in_names_resolve_without_an_installed_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discover, "entry_points", lambda *, group: [])
    listed = {device.name: device for device in discover.list_devices()}
    assert set(listed) == {"sim", "npurt"}
    assert all(device.error == "" for device in listed.values())


def test_a_broken_entry_point_is_listed_with_its_error(third_party: list[EntryPoint]) -> None:
    listed = {device.name: device for device in discover.list_devices()}
    assert list(listed) == ["acme", "broken", "gone", "npurt", "sim"]
    assert listed["acme"].error == ""
    assert listed["broken"].error == "RuntimeError: no driver here"
    assert listed["gone"].error.startswith("ModuleNotFoundError: ")
    assert listed["sim"].target == "laneway.adapters.simulator:open_device"


def test_a_working_entry_point_opens_beside_broken_ones(third_party: list[EntryPoint]) -> None:
    opened: Any = discover.open_device("acme:board0?x=1", colour="red")
    assert opened == ("acme", "board0?x=1", {"colour": "red"})


def test_opening_a_broken_entry_point_says_why(third_party: list[EntryPoint]) -> None:
    with pytest.raises(ConfigurationError, match=r"'broken'.*RuntimeError: no driver here"):
        discover.open_device("broken:")


def test_only_the_entry_point_that_is_asked_for_is_loaded(
    third_party: list[EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = EntryPoint.load

    def note(point: EntryPoint) -> Any:
        loaded.append(point.name)
        return load(point)

    monkeypatch.setattr(EntryPoint, "load", note)
    discover.open_device("acme:")
    assert loaded == ["acme"]


def test_an_unknown_name_lists_the_known_ones(third_party: list[EntryPoint]) -> None:
    with pytest.raises(ConfigurationError, match="known are acme, broken, gone, npurt, sim"):
        discover.open_device("nosuch:")


@pytest.mark.parametrize("url", ["sim", "", ":tiny", "/path/lib.so"])
def test_a_url_without_a_name_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="a name and a colon are wanted"):
        split_url(url)


def test_places_and_options_are_taken_apart() -> None:
    assert parse_rest(
        "tiny?seed=7&faults=%2Ftmp%2Fa%20b", known=("seed", "faults"), scheme="sim"
    ) == (
        "tiny",
        {"seed": "7", "faults": "/tmp/a b"},
    )
    assert parse_rest("", known=(), scheme="sim") == ("", {})


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("tiny?speed=7", "unknown option 'speed'; known are seed, clock"),
        ("tiny?seed", "option seed needs a value"),
        ("tiny?seed=", "option seed needs a value"),
        ("tiny?seed=1&seed=2", "option seed is given twice"),
        ("tiny?seed=1%0Aclock = real", "option seed holds a control character"),
    ],
)
def test_wrong_options_are_refused(rest: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_rest(rest, known=("seed", "clock"), scheme="sim")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sim:huge", "the profiles are tiny, null, cost, tp2-ref, tp2-b4, tp2-b8, tp2-b16"),
        ("sim:?persona=x", "persona=x: no such file; shipped: calrt-0.7.6"),
        ("sim:?clock=slow", "one of real, manual, virtual is wanted"),
        ("sim:?speed=x", "unknown option 'speed'; known are seed, clock, scale"),
        ("sim:?faults=/nowhere/plan", "faults=/nowhere/plan cannot be read"),
        ("npurt:/nowhere/lib.so?index=many", "option index=many: 0 to 255 is wanted"),
    ],
)
def test_device_options_are_checked_before_a_library_is_looked_for(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        discover.open_device(url)


def test_the_named_library_comes_first(tmp_path: Path) -> None:
    named, other = tmp_path / "named.so", tmp_path / "other.so"
    named.touch()
    other.touch()
    assert find_library(str(named), environment={VARIABLE: str(other)}) == named
    assert find_library(None, environment={VARIABLE: str(other)}) == other


def test_a_library_that_nobody_can_look_at_is_refused_in_words() -> None:
    """A name too long stands for every path that the system does not let us ask about."""
    name = "x" * 300
    for opened in (lambda: find_library(name, environment={}), lambda: load_library(name)):
        with pytest.raises(ConfigurationError, match=f"{name} cannot be looked at: File name"):
            opened()


@pytest.mark.parametrize("kind", ["pipe", "device", "long"])
def test_a_fault_plan_is_a_file_of_bounded_size(kind: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    if kind == "pipe":
        os.mkfifo(plan)
    elif kind == "device":
        plan = Path("/dev/zero")
    else:
        plan.write_text("#" * ((1 << 20) + 1))
    told = "has more than 1048576 bytes" if kind == "long" else "it is no regular file"
    for url in (f"sim:?faults={plan}", f"npurt:?config={plan}"):
        with pytest.raises(ConfigurationError, match=told):
            discover.open_device(url)


@pytest.mark.parametrize("explicit", [True, False])
def test_a_named_library_that_is_missing_is_never_replaced(tmp_path: Path, explicit: bool) -> None:
    missing = str(tmp_path / "missing.so")
    with pytest.raises(ConfigurationError) as raised:
        if explicit:
            find_library(missing, environment={})
        else:
            find_library(None, environment={VARIABLE: missing})
    message = str(raised.value)
    for part in ("named by the caller", f"named by {VARIABLE}", "the built simulator", missing):
        assert part in message
    assert "installed without a C compiler?" in message
