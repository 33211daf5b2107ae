"""Load an npurt library and call it: prototypes, layout check, and a look at every status.

A library is opened with local symbols, so that two backends can live in one process. Before
anything else is asked of it, it says its version and the size of every struct; a difference is an
AbiMismatchError that names the struct, never a crash later. ``call`` raises for any status but OK;
``attempt`` returns the status for the few callers to whom a refusal is an answer.

Source: native/npurt.h, R1.1.
"""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from laneway.adapters import npurt
from laneway.adapters.callwatch import CallWatch
from laneway.adapters.files import is_file
from laneway.engine.errors import AbiMismatchError, ConfigurationError, DeviceError

_p, _u32, _u64, _i32, _i64 = (
    *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64),
)
_u32p, _u64p, _pp = ctypes.POINTER(_u32), ctypes.POINTER(_u64), ctypes.POINTER(_p)
_ERROR_BYTES = 512


def _to(struct: type[ctypes.Structure]) -> type:
    return ctypes.POINTER(struct)


PROTOTYPES: Mapping[str, tuple[type, ...]] = {
    "npurt_abi_negotiate": (_u32, _u32, _to(npurt.AbiInfo)),
    "npurt_last_error": (ctypes.c_char_p, _u64),
    "npurt_device_count": (_u32p,),
    "npurt_device_describe": (_u32, _to(npurt.DeviceDesc)),
    "npurt_device_open": (_to(npurt.OpenParams), _pp),
    "npurt_device_close": (_p,),
    "npurt_device_health": (_p, _to(npurt.Health)),
    "npurt_device_caps": (_p, _to(npurt.Cap), _u32, _u32p),
    "npurt_device_counters": (_p, _to(npurt.Counters)),
    "npurt_device_memory": (_p, _u32, _to(npurt.Memory)),
    "npurt_device_event": (_p, _to(npurt.Event)),
    "npurt_device_set": (_p, _u32, _i64),
    "npurt_clock_now": (_p, _u64p),
    "npurt_calbin_create": (_p, _to(npurt.CalbinSource), _pp),
    "npurt_calbin_describe": (_p, _to(npurt.CalbinInfo)),
    "npurt_calbin_submodel": (_p, _u32, _to(npurt.SubmodelInfo)),
    "npurt_calbin_tensor": (_p, _u32, _u32, _to(npurt.TensorInfo)),
    "npurt_calbin_csr": (_p, _u32, _u32, _to(npurt.CsrInfo)),
    "npurt_calbin_configure": (_p, _to(npurt.ConfigureParams), _to(npurt.ConfigureResult)),
    "npurt_calbin_release": (_p,),
    "npurt_buffer_create": (_p, _to(npurt.BufferSpec), _pp),
    "npurt_buffer_map": (_p, _u32, _p, _u64),
    "npurt_buffer_slice": (_p, _u32, _u32, _i64, _i64),
    "npurt_buffer_restore": (_p, _u32),
    "npurt_buffer_destroy": (_p,),
    "npurt_job_submit": (_p, _to(npurt.SubmitParams), _u64p),
    "npurt_job_poll": (_p, _u64, _to(npurt.JobState)),
    "npurt_job_wait": (_p, _u64p, _u32, _u64, _u32p),
    "npurt_job_result": (_p, _u64, _to(npurt.Completion)),
    "npurt_job_cancel": (_p, _u64),
    "npurt_job_retire": (_p, _u64),
    "npurt_kv_open": (_p, _to(npurt.KvParams), _pp),
    "npurt_kv_close": (_p,),
    "npurt_kv_can_allocate": (_p, _to(npurt.KvOp), _u32, _u32, _to(npurt.KvAnswer)),
    "npurt_kv_apply": (_p, _to(npurt.KvOp), _u32, _u32, _u32p),
    "npurt_kv_lane": (_p, _u32, _to(npurt.KvLaneInfo)),
    "npurt_reset_describe": (_p, _u32, _to(npurt.ResetScope)),
    "npurt_reset_run": (_p, _to(npurt.ResetParams), _to(npurt.ResetReport)),
}
"""The argument types of every function of the ABI; each returns a status."""

_floats, _ints = ctypes.POINTER(ctypes.c_float), ctypes.POINTER(_i32)
SIMULATOR_PROTOTYPES: Mapping[str, tuple[type, ...]] = {
    "npurt_sim_step": (_p, _u32, _u64, _u32p),
    "npurt_sim_clock": (_p, _u32, _u64, _u64p),
    "npurt_sim_faults": (_p, ctypes.c_char_p),
    "npurt_sim_arm": (_p,),
    "npurt_sim_describe": (_p, _to(npurt.DeviceDesc)),
    "npurt_sim_trace": (_p, ctypes.c_char_p, _u64, _u64p),
    "npurt_sim_violations": (_p, _to(npurt.Event), _u32, _u32p),
    "npurt_sim_oracle": (
        *(ctypes.c_char_p, _ints, _u32),
        *(ctypes.POINTER(ctypes.c_uint16), _u64p),
    ),
    "npurt_sim_logits": (_p, _u64, _u32, _u32, _floats, _u64),
    "npurt_sim_routing": (_p, _u64, _u32, _u32, _u32, _ints, _floats, _u32),
    "npurt_sim_kv_digest": (_p, _u32, _u64p),
    "npurt_sim_kv_address": (_p, _u32, _u32p, _u64p, _u64p),
    "npurt_sim_peek": (_p, _u32, _u64, _p, _u64),
    "npurt_sim_poke": (_p, _u32, _u64, _p, _u64),
}
"""What only the simulator exports."""


@attrs.frozen
class Answer:
    """The status of one call and, where it failed, the library's own words."""

    call: str
    code: int
    words: str = ""

    @property
    def ok(self) -> bool:
        """Whether the call succeeded."""
        return not self.code

    @property
    def reason(self) -> str:
        """One line: the call, the status by name and number, the library's words."""
        said = f": {self.words}" if self.words else ""
        return f"{self.call}: {npurt.code_name(self.code)}{said}"


_NOT_YET = tuple(
    Answer("npurt_job_wait", code) for code in (npurt.Code.WAIT_TIMEOUT, npurt.Code.NOT_READY)
)
_PLAIN = MappingProxyType({(one.call, one.code): one for one in _NOT_YET})
"""Answers that come all the time and whose words nobody reads."""

_STILL = frozenset(
    {
        *("npurt_clock_now", "npurt_sim_clock", "npurt_kv_apply", "npurt_job_submit"),
        *("npurt_job_poll", "npurt_job_wait", "npurt_job_result", "npurt_job_retire"),
        *("npurt_buffer_map", "npurt_buffer_restore", "npurt_device_counters"),
    }
)
"""Calls in which no time of a stepped device passes and no job ends."""


class Library:
    """One loaded npurt library."""

    def __init__(self, path: str, cdll: ctypes.CDLL, entries: Mapping[str, object]) -> None:
        self.path = path
        self._cdll = cdll
        self._entries: dict[str, Any] = dict(entries)
        self._done = {name: Answer(name, npurt.Code.OK) for name in entries}
        self.info = npurt.AbiInfo()
        self._watch: CallWatch | None = None
        self.moves = 0
        """Begins and ends of calls in which a stepped clock may move or a job end: odd in one."""

    def watched_by(self, watch: CallWatch) -> "Library":
        """Return the same library with every call of it noted in a watch (E10)."""
        watched = Library(self.path, self._cdll, self._entries)
        watched.info = self.info
        watched._watch = watch
        return watched

    @property
    def simulates(self) -> bool:
        """Whether the library has the simulator's own entries."""
        return "npurt_sim_step" in self._entries

    def has(self, name: str) -> bool:
        """Tell whether the library exports a function."""
        return name in self._entries

    def attempt(self, name: str, *arguments: object) -> Answer:
        """Call and return the status; the words are read in the same thread at once."""
        entry = self._entries.get(name)
        if entry is None:
            raise DeviceError(f"{self.path} does not export {name}", code=npurt.Code.UNSUPPORTED)
        watch, is_still = self._watch, name in _STILL
        call = watch.enter(name) if watch is not None else None
        if not is_still:
            self.moves += 1
        try:
            code = entry(*arguments)
        finally:
            if not is_still:
                self.moves += 1
            if watch is not None:
                watch.leave(call)
        if not code:
            return self._done[name]
        return _PLAIN.get((name, code)) or Answer(name, int(code), self._read_words())

    def call(self, name: str, *arguments: object, about: str = "") -> None:
        """Call and accept nothing but OK. Raises: DeviceError with call, status and words."""
        answer = self.attempt(name, *arguments)
        if answer.code:
            self.check(answer, about=about)

    def check(self, answer: Answer, *, about: str = "") -> None:
        """Accept nothing but OK. ``about`` names the ids. Raises: DeviceError."""
        if not answer.ok:
            named = f"{about}: " if about else ""
            raise DeviceError(named + answer.reason, code=answer.code)

    def _read_words(self) -> str:
        words = ctypes.create_string_buffer(_ERROR_BYTES)
        if self._entries["npurt_last_error"](words, _ERROR_BYTES):
            return ""
        return words.value.decode("utf-8", "replace")


def load_library(path: str | Path) -> Library:
    """Load a library by path and hold its version and struct sizes against ours.

    Raises: ConfigurationError if it cannot be loaded; AbiMismatchError if it is another ABI.
    """
    if not is_file(path, what="the library"):
        raise ConfigurationError(f"{path}: there is no such library: check the path")
    try:
        cdll = ctypes.CDLL(str(Path(path).resolve()), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be loaded as an npurt library: {error}") from error
    entries = {name: _declare(cdll, name, types) for name, types in PROTOTYPES.items()}
    missing = sorted(name for name, entry in entries.items() if entry is None)
    if missing:
        raise AbiMismatchError(
            f"{path} is no npurt {npurt.ABI_MAJOR}.{npurt.ABI_MINOR} library: it does not export"
            f" {', '.join(missing)}",
            code=npurt.Code.ABI,
        )
    optional = {name: _declare(cdll, name, types) for name, types in SIMULATOR_PROTOTYPES.items()}
    found = {name: entry for name, entry in optional.items() if entry is not None}
    library = Library(str(path), cdll, entries | found)
    _check_abi(library)
    return library


def _declare(cdll: ctypes.CDLL, name: str, types: tuple[type, ...]) -> object | None:
    entry = getattr(cdll, name, None)
    if entry is None:
        return None
    entry.argtypes = types
    entry.restype = ctypes.c_int32
    return entry  # type: ignore[no-any-return]


def _check_abi(library: Library) -> None:
    wanted = f"{npurt.ABI_MAJOR}.{npurt.ABI_MINOR}"
    answer = library.attempt(
        "npurt_abi_negotiate", npurt.ABI_MAJOR, npurt.ABI_MINOR, ctypes.byref(library.info)
    )
    info = library.info
    if not answer.ok or info.abi_major != npurt.ABI_MAJOR or info.abi_minor < npurt.ABI_MINOR:
        raise AbiMismatchError(
            f"{library.path} speaks npurt {info.abi_major}.{info.abi_minor}, wanted is {wanted}"
            f" ({answer.reason})",
            code=answer.code or npurt.Code.ABI,
        )
    check_sizes(library.path, list(info.sizes[: min(info.size_count, len(info.sizes))]))


def check_sizes(path: str, sizes: list[int]) -> None:
    """Hold a library's struct sizes against ours, in header order.

    Raises: AbiMismatchError naming the first struct that differs.
    """
    if len(sizes) < len(npurt.STRUCTS):
        raise AbiMismatchError(
            f"{path} gives the sizes of {len(sizes)} structs, npurt {npurt.ABI_MAJOR}."
            f"{npurt.ABI_MINOR} has {len(npurt.STRUCTS)}",
            code=npurt.Code.ABI,
        )
    for (name, struct), size in zip(npurt.STRUCTS, sizes, strict=False):
        ours = ctypes.sizeof(struct)
        if size != ours:
            raise AbiMismatchError(
                f"{path}: {name} has {size} bytes there and {ours} here: rebuild the library"
                " against this package's npurt.h",
                code=npurt.Code.STRUCT_SIZE,
            )
