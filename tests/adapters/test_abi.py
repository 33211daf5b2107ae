"""The Python layouts are those of the C header, as the system's compiler sees it."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from laneway.adapters import npurt
from laneway.adapters.binding import PROTOTYPES, SIMULATOR_PROTOTYPES, check_sizes, load_library
from laneway.engine.errors import AbiMismatchError, ConfigurationError

NATIVE = Path(__file__).resolve().parents[2] / "adapters" / "native"
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


def run_c(tmp_path: Path, body: str) -> str:
    """Compile and run a program that includes the header; return what it prints."""
    source = tmp_path / "layout.c"
    source.write_text(
        '#include "npurt.h"\n#include <stdio.h>\nint main(void) {\n' + body + "return 0;\n}\n"
    )
    program = tmp_path / "layout"
    assert COMPILER is not None
    command = [COMPILER, "-std=c11", f"-I{NATIVE}", "-o", str(program), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout


@needs_compiler
def test_sizes_and_offsets_equal_the_header(tmp_path: Path) -> None:
    lines = []
    ours = []
    for name, struct in npurt.STRUCTS:
        lines.append(f'printf("%zu\\n", sizeof({name}));')
        ours.append((name, ctypes.sizeof(struct)))
        for field in struct._fields_:
            c_field = field[0].rstrip("_")
            lines.append(f'printf("%zu\\n", offsetof({name}, {c_field}));')
            ours.append((f"{name}.{c_field}", getattr(struct, field[0]).offset))
            lines.append(f'printf("%zu\\n", sizeof((({name} *)0)->{c_field}));')
            ours.append((f"sizeof {name}.{c_field}", getattr(struct, field[0]).size))
    theirs = [int(line) for line in run_c(tmp_path, "\n".join(lines)).split()]
    assert [(name, size) for (name, _), size in zip(ours, theirs, strict=True)] == ours


@needs_compiler
def test_codes_capabilities_and_versions_equal_the_header(tmp_path: Path) -> None:
    names = [f"NPURT_E_{code.name}" if code else "NPURT_OK" for code in npurt.Code]
    names += [f"NPURT_CAP_{name}" for name in npurt.CAPABILITIES]
    names += ["NPURT_ABI_MAJOR", "NPURT_ABI_MINOR", "NPURT_MAX_CHIPS"]
    expected = [int(code) for code in npurt.Code]
    expected += list(range(1, len(npurt.CAPABILITIES) + 1))
    expected += [npurt.ABI_MAJOR, npurt.ABI_MINOR, npurt.MAX_CHIPS]
    body = "\n".join(f'printf("%d\\n", (int){name});' for name in names)
    assert [int(line) for line in run_c(tmp_path, body).split()] == expected


def test_the_header_declares_nothing_that_is_not_here() -> None:
    header = (NATIVE / "npurt.h").read_text()
    structs = re.findall(r"^\} (npurt_\w+);", header, re.MULTILINE)
    functions = re.findall(r"^NPURT_API npurt_status (npurt_\w+)\(", header, re.MULTILINE)
    codes = re.findall(r"^  NPURT_E_(\w+)", header, re.MULTILINE)
    assert structs == [name for name, _ in npurt.STRUCTS]
    assert functions == list(PROTOTYPES)
    assert codes == [code.name for code in npurt.Code][1:]
    assert len(PROTOTYPES) == 38


def test_simulator_entries_are_those_of_its_header() -> None:
    header = (NATIVE / "npurt_sim.h").read_text()
    functions = re.findall(r"^NPURT_API npurt_status (npurt_sim_\w+)\(", header, re.MULTILINE)
    assert set(functions) == set(SIMULATOR_PROTOTYPES)


def test_every_prototype_has_as_many_arguments_as_the_header() -> None:
    text = (NATIVE / "npurt.h").read_text() + (NATIVE / "npurt_sim.h").read_text()
    declared = {
        name: 0 if arguments.strip() == "void" else arguments.count(",") + 1
        for name, arguments in re.findall(
            r"NPURT_API npurt_status (npurt_\w+)\(([^)]*)\)", text, re.DOTALL
        )
    }
    ours = {name: len(types) for name, types in {**PROTOTYPES, **SIMULATOR_PROTOTYPES}.items()}
    assert ours == declared


def test_a_struct_of_another_size_is_named() -> None:
    sizes = [ctypes.sizeof(struct) for _, struct in npurt.STRUCTS]
    check_sizes("lib.so", sizes)
    sizes[4] += 8
    with pytest.raises(AbiMismatchError, match=r"npurt_health has 344 bytes there and 336 here"):
        check_sizes("lib.so", sizes)


def test_a_library_that_knows_fewer_structs_is_refused() -> None:
    sizes = [ctypes.sizeof(struct) for _, struct in npurt.STRUCTS][:-1]
    with pytest.raises(AbiMismatchError, match="sizes of 30 structs"):
        check_sizes("lib.so", sizes)


def test_out_structs_carry_their_own_size() -> None:
    assert npurt.Health().h.struct_size == 336
    assert npurt.Completion(status=3).h.struct_size == ctypes.sizeof(npurt.Completion)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (0x0704, "KV_UNKNOWN (0x0704)"),
        (0x0602, "SUBMIT_INDETERMINATE (0x0602)"),
        (0x0699, "unnamed job code (0x0699)"),
        (0x7701, "unnamed unknown class code (0x7701)"),
    ],
)
def test_codes_are_told_by_name_and_number(code: int, name: str) -> None:
    assert npurt.code_name(code) == name


def test_a_file_that_is_no_library_is_a_configuration_error(tmp_path: Path) -> None:
    path = tmp_path / "no.so"
    path.write_bytes(b"not a library")
    with pytest.raises(ConfigurationError, match=r"no\.so cannot be loaded"):
        load_library(path)


@needs_compiler
def test_a_library_without_the_functions_is_refused_by_name(tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text("int something_else(void) { return 1; }\n")
    path = tmp_path / "libother.so"
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", path, source], check=True)
    with pytest.raises(AbiMismatchError, match="does not export npurt_abi_negotiate"):
        load_library(path)


MISMATCHED = """
#include "npurt.h"
npurt_status npurt_abi_negotiate(uint32_t major, uint32_t minor, npurt_abi_info *out) {
  (void)minor;
  out->abi_major = %d;
  out->abi_minor = %d;
  return major == out->abi_major ? 0 : NPURT_E_ABI;
}
npurt_status npurt_last_error(char *buf, uint64_t cap) {
  if (cap > 0) buf[0] = 0;
  return 0;
}
"""


@needs_compiler
@pytest.mark.parametrize(("major", "minor"), [(1, 1), (0, 0)])
def test_another_version_is_refused(tmp_path: Path, major: int, minor: int) -> None:
    others = [
        name for name in PROTOTYPES if name not in ("npurt_abi_negotiate", "npurt_last_error")
    ]
    stubs = tmp_path / "stubs.c"
    stubs.write_text("\n".join(f"int {name}(void) {{ return 0x0F01; }}" for name in others))
    source = tmp_path / "mismatched.c"
    source.write_text(MISMATCHED % (major, minor))
    path = tmp_path / "libmismatched.so"
    assert COMPILER is not None
    command = [
        COMPILER,
        "-shared",
        "-fPIC",
        f"-I{NATIVE}",
        "-o",
        str(path),
        str(source),
        str(stubs),
    ]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(AbiMismatchError, match=rf"speaks npurt {major}\.{minor}, wanted is 0\.1"):
        load_library(path)
