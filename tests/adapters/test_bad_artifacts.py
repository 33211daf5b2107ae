"""Model folders and libraries that cannot be trusted: refused before anything is asked of them.

Source: R1.1, R9.1, E20a.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_line import MODELS, laneway
from support.native_board import ROOT
from support.one_line import check_refused

from laneway.adapters import library
from laneway.adapters.binding import PROTOTYPES, load_library
from laneway.adapters.calbin import pack
from laneway.engine.errors import AbiMismatchError

USAGE, DEVICE = 2, 3
VIRTUAL = "sim:?clock=virtual"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model, packed."""
    folder = tmp_path_factory.mktemp("bad") / "tiny"
    pack(MODELS / "tiny-dense", folder)
    return folder


def edit(change: Callable[[Any], object]) -> Callable[[Path], object]:
    """Change what the manifest says."""

    def damage(folder: Path) -> None:
        path = folder / "manifest.json"
        stated = json.loads(path.read_text())
        change(stated)
        path.write_text(json.dumps(stated))

    return damage


def flip(folder: Path) -> None:
    """Flip one bit of the last tensor."""
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def replace_golden(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Put something else where the golden runs are."""

    def damage(folder: Path) -> None:
        (folder / "golden.npz").unlink()
        make(folder / "golden.npz")

    return damage


REFUSES = "{folder}: the device refuses it: npurt_calbin_create: CALBIN_INCOMPATIBLE (0x0503): "
FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "parameters cut": (
        lambda folder: os.truncate(folder / "model.safetensors", 5000),
        "{folder}/model.safetensors: 5000 bytes, manifest.json says …",
    ),
    "parameters flipped": (
        flip,
        "{folder}/model.safetensors: damaged: its SHA-256 is …, manifest.json says …; pack the"
        " model again",
    ),
    "parameters missing": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "{folder}/model.safetensors: file is missing",
    ),
    "wrong hash": (
        edit(lambda m: m["files"]["golden.npz"].update(sha256="0" * 64)),
        "{folder}/golden.npz: damaged: its SHA-256 is …, manifest.json says 000000000000…; pack"
        " the model again",
    ),
    "newer runtime": (
        edit(lambda m: m["needs"].update(runtime="9.0")),
        REFUSES + "the calbin needs runtime 9.0 or later; the board has 0.1.0",
    ),
    "newer driver": (
        edit(lambda m: m["needs"].update(driver="0.1.1")),
        REFUSES + "the calbin needs driver 0.1.1 or later; the board has 0.1.0",
    ),
    "newer firmware": (
        edit(lambda m: m["needs"].update(firmware="1")),
        REFUSES + "the calbin needs firmware 1 or later; the board has 0.1.0",
    ),
    "newer format": (
        edit(lambda m: m.update(format_version=2)),
        "{folder}/manifest.json: format is 'laneway-calbin' version 2; this release reads"
        " 'laneway-calbin' version 1; pack the model again",
    ),
    "other chips": (
        edit(lambda m: m["chips"].update(mask=12)),
        REFUSES + "chip mask 0xc is not within the opened 0x3",
    ),
    "no manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        "{folder}: neither manifest.json (a calbin) nor config.json (a Hugging Face folder) is in"
        " it",
    ),
    "empty manifest": (
        lambda folder: (folder / "manifest.json").write_text(""),
        "{folder}/manifest.json: no valid manifest: …",
    ),
    "manifest of many levels": (
        lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
        "{folder}/manifest.json: no valid manifest: …",
    ),
    "file too large": (
        lambda folder: os.truncate(folder / "manifest.json", (1 << 20) + 1),
        "{folder}/manifest.json: 1048577 bytes, more than the 1048576 allowed",
    ),
    "file of nobody": (
        lambda folder: (folder / "readme").touch(),
        "{folder}/readme: is not named in manifest.json",
    ),
    "writable file": (
        lambda folder: (folder / "manifest.json").chmod(0o666),
        "{folder}/manifest.json: writable by others (mode 0666); run chmod o-w",
    ),
    "writable folder": (
        lambda folder: folder.chmod(0o777),
        "{folder}: the folder is writable by others; run chmod o-w",
    ),
    "link out": (
        replace_golden(lambda path: path.symlink_to("/etc/passwd")),
        "{folder}/golden.npz: leads out of the model folder to /etc/passwd; name a model root that"
        " contains both to allow it",
    ),
    "link to itself": (
        replace_golden(lambda path: path.symlink_to(path)),
        "{folder}/golden.npz: cannot be opened: …",
    ),
    "dangling link": (
        replace_golden(lambda path: path.symlink_to("nowhere")),
        "{folder}/golden.npz: file is missing",
    ),
    "pipe": (replace_golden(os.mkfifo), "{folder}/golden.npz: not a regular file"),
    "folder": (replace_golden(os.mkdir), "{folder}/golden.npz: not a regular file"),
}


@pytest.mark.parametrize(("damage", "line"), FOLDERS.values(), ids=FOLDERS.keys())
def test_a_model_folder_is_refused_by_file_and_reason(
    damage: Callable[[Path], object], line: str, packed: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(packed, tmp_path / "model"))
    damage(folder)
    try:
        run = ("run", "--prompt-tokens", 1, "--model", folder, "--device", VIRTUAL)
        wanted = "model 'model' was not loaded: " + line.replace("{folder}", str(folder))
        check_refused(run, USAGE, wanted)
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("dram_bytes=1000", "CALBIN_TOO_LARGE (0x0504): chip 0 has 1000 bytes; the calbin needs"),
        ("runtime_version=0.0.9", "the calbin needs runtime 0.1 or later; the board has 0.0.9"),
    ],
)
def test_a_board_that_is_too_small_or_too_old(option: str, line: str, packed: Path) -> None:
    device = f"{VIRTUAL}&{option}"
    run = ("run", "--prompt-tokens", 1, "--model", packed, "--device", device)
    check_refused(run, USAGE, "model 'tiny' was not loaded: …the device refuses it: …" + line + "…")


# ---------------------------------------------------------------------------- libraries

STUB = '#include "npurt.h"\n'
NEGOTIATE = """
npurt_status npurt_abi_negotiate(uint32_t major, uint32_t minor, npurt_abi_info *out) {{
  (void)major; (void)minor;
  out->abi_major = {major}; out->abi_minor = {minor};
  out->size_count = {count};
  for (int i = 0; i < 32; i++) out->sizes[i] = {size};
  return {status};
}}
"""


def false_library(folder: Path, negotiate: dict[str, int], *, stubs: bool = True) -> Path:
    """Compile a library that answers only to the first question; the rest are empty functions."""
    compiler = shutil.which("cc")
    assert compiler is not None, "the tests need a C compiler"
    names = [name for name in PROTOTYPES if name != "npurt_abi_negotiate"] if stubs else []
    filled = {"major": 0, "minor": 9, "count": 24, "size": 8, "status": 0} | negotiate
    first, second = folder / "first.c", folder / "second.c"
    first.write_text(STUB + NEGOTIATE.format(**filled))
    second.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names) + "\n")
    path = folder / "libfalse.so"
    flags = ("-shared", "-fPIC", "-O0", "-w", "-fvisibility=default")
    include = f"-I{ROOT / 'adapters' / 'native'}"
    subprocess.run([compiler, *flags, include, "-o", path, first, second], check=True)
    return path


def true_abi() -> dict[str, int]:
    info = load_library(library.find_library()).info
    return {"major": info.abi_major, "minor": info.abi_minor, "count": info.size_count}


@pytest.mark.parametrize(
    ("negotiate", "line"),
    [
        ({"size": 3}, "{path}: npurt_head has 3 bytes there and … here: rebuild the library against"
         " this package's npurt.h"),
        ({"count": 2}, "{path} gives the sizes of 2 structs, npurt … has …"),
        ({"count": 4_000_000_000, "size": 0}, "{path}: npurt_head has 0 bytes there and … here: …"),
        ({"major": 77}, "{path} speaks npurt 77.…, wanted is … (npurt_abi_negotiate: OK (0x0000))"),
        ({"status": 0x0108}, "{path} speaks npurt …, wanted is … (npurt_abi_negotiate: …)"),
    ],
    ids=["sizes", "too few", "count", "version", "refused"],
)  # fmt: skip
def test_a_library_of_another_abi_is_refused_before_it_is_asked_anything(
    negotiate: dict[str, int], line: str, tmp_path: Path
) -> None:
    path = false_library(tmp_path, true_abi() | negotiate)
    check_refused(("devices", f"npurt:{path}"), DEVICE, line.replace("{path}", str(path)))
    with pytest.raises(AbiMismatchError):
        load_library(path)


def test_a_library_without_the_functions_is_refused_by_their_names(tmp_path: Path) -> None:
    path = false_library(tmp_path, true_abi(), stubs=False)
    check_refused(
        ("devices", f"npurt:{path}"),
        DEVICE,
        f"{path} is no npurt … library: it does not export npurt_buffer_create, …",
    )


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.so"
    path.write_text("these are notes\n")
    line = f"{path} cannot be loaded as an npurt library: …"
    check_refused(("devices", f"npurt:{path}"), USAGE, line)


def test_without_a_compiler_at_install_the_places_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The package is there, its simulator was never built: all that needs no board works."""
    monkeypatch.setattr(library, "BUILT_NAME", "_never_built.so")
    monkeypatch.delenv(library.VARIABLE, raising=False)
    places = (
        "no npurt library found (named by the caller: not set; named by LANEWAY_NPURT: {named};"
        " the built simulator: …/_never_built.so). Was laneway installed without a C compiler?"
        " Install one and reinstall, or build adapters/native and set LANEWAY_NPURT."
    )
    for words in (("devices", "sim:"), ("run", "a"), ("devices", "npurt:")):
        check_refused(words, USAGE, places.replace("{named}", "not set"))
    monkeypatch.setenv(library.VARIABLE, str(tmp_path / "absent.so"))
    check_refused(("devices", "sim:"), USAGE, places.replace("{named}", f"{tmp_path}/absent.so"))
    laneway("devices").done()
    laneway("machines").done()
    laneway("model", "inspect", MODELS / "tiny-dense").done()
