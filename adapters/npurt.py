"""The npurt C ABI in Python: constants, status codes and structs, in the order of npurt.h.

Nothing here calls anything; ``adapters/binding.py`` loads a library and holds these layouts against
what the library says of its own (sizes at load). The layouts are written out once more instead of
being read from the header, so that a library without its header can be opened and a change on
either side is found.

Source: native/npurt.h, which is the definition.
"""

import ctypes as c
import enum

ABI_MAJOR = 0
ABI_MINOR = 1
MAX_CHIPS = 8

# Flags of a completion and of a polled job state (D2: four facts, never inferred from each other).
TERMINAL = 1
QUIESCENT = 2
ENDED = TERMINAL | QUIESCENT
OUTPUT_VALID = 4
NUMERIC_FLAG = 8
LATE = 16
CANCEL_SEEN = 32

# Tensor directions, buffer directions and tasks.
IN, OUT = 1, 2
PREFILL, DECODE = 1, 2
TASKS = {PREFILL: "prefill", DECODE: "decode"}

# Command banks a job may run on: whichever is free, or one of the two. Options of a device.
ENGINE_AUTO, ENGINE_PING, ENGINE_PONG = 0, 1, 2
OPTION_PARALLEL_MODE = 2

# Parts of npurt_buffer_restore.
SUBMODEL_INCREMENTAL_PREFILL = 1
SUBMODEL_FIXED_ROWS = 4
ROW_ACTIVE = b"row_active"
"""The register of lane rule MASK_CSR: 1 for each row that is active."""
"""Flag of npurt_submodel_info."""

RESTORE_SLICES, RESTORE_TENSORS, RESTORE_MAPS = 1, 2, 4

DTYPE_INT32, DTYPE_UINT64, DTYPE_FLOAT32, DTYPE_BF16 = 1, 2, 3, 4
KV_VERBS = {"RESERVE": 1, "COMMIT": 2, "ROLLBACK": 3, "RELEASE": 4}
KV_LAYOUTS = {"only_valid": 1, "all": 2, "auto": 3}
KV_EFFECTS = {0: "none", 1: "applied", 2: "partial", 3: "unknown"}
LANE_RULES = {0: "undefined", 1: "length_zero", 2: "mask_csr", 3: "scratch_lane"}
LAYOUTS = {1: "single", 2: "tp2", 3: "ep2", 4: "pp2", 5: "tpep"}
BACKENDS = {1: "sim", 2: "calrt", 3: "llamacpp"}
HEALTH_STATES = {0: "unknown", 1: "ok", 2: "degraded", 3: "unhealthy", 4: "wedged", 5: "lost"}
JOB_STATES = {
    **{1: "queued", 2: "h2d", 3: "exec", 4: "d2h"},
    **{5: "done", 6: "failed", 7: "aborted", 8: "lost"},
}
JOB_DONE = 5

CAPABILITIES = (
    *("IN_FLIGHT", "PING_PONG", "PARALLEL_MODE", "OVERLAP_MODEL", "POLL_THREADSAFE", "COUNTERS"),
    *("CANCEL", "JOB_TIMES", "CCU_RECORD", "SUBMIT_ATOMIC", "QUIESCE_ON_ERROR", "KV_LAYOUTS"),
    *("KV_EFFECT", "BATCH_LANES", "LANE_RULE", "INCREMENTAL_PREFILL", "PREEMPTION"),
    *("MULTI_CONFIGURE", "CONFIGURE_BUSY", "JOB_MODEL_HANDLE", "MODEL_ISOLATION"),
    *("CHIP_AFFINITY", "CHIP_RESET_DOMAIN", "PARAM_SHARING", "MEMORY_ACCOUNTING", "HEALTH"),
    *("EVENTS", "MULTI_BOARD", "DEVICE_SELECT", "EXCLUSIVE", "LAYOUTS", "SAME_MODEL_FAST_PATH"),
    *("NUMERIC_CHECK",),
)
"""Names by identity: identity 1 is the first."""


class Code(enum.IntEnum):
    """A status of the ABI: class in bits 8..15 (where the recovery ladder starts), then ordinal."""

    OK = 0
    INVALID_ARG = 0x0101
    BAD_HANDLE = 0x0102
    BAD_STATE = 0x0103
    STRUCT_SIZE = 0x0104
    ABI = 0x0105
    UNSUPPORTED = 0x0106
    NOT_FOUND = 0x0107
    ALIGNMENT = 0x0108
    RANGE_OVERLAP = 0x0109
    LANE_RULE = 0x010A
    STALE_EPOCH = 0x0201
    STALE_GENERATION = 0x0202
    STALE_TICKET = 0x0203
    QUEUE_FULL = 0x0301
    HOST_MEMORY = 0x0302
    DEVICE_MEMORY = 0x0303
    KV_NO_SPACE = 0x0304
    OBJECT_IN_FLIGHT = 0x0305
    DEVICE_OWNED = 0x0306
    NOT_READY = 0x0401
    WAIT_TIMEOUT = 0x0402
    INTERRUPTED = 0x0403
    EMPTY = 0x0404
    CALBIN_FORMAT = 0x0501
    CALBIN_HASH = 0x0502
    CALBIN_INCOMPATIBLE = 0x0503
    CALBIN_TOO_LARGE = 0x0504
    SUBMIT_REJECTED = 0x0601
    SUBMIT_INDETERMINATE = 0x0602
    CSR_FAILED = 0x0603
    CCU_EXCEPTION = 0x0604
    DMA = 0x0605
    JOB_ABORTED = 0x0606
    JOB_LOST = 0x0607
    NUMERIC = 0x0608
    CANCEL_TOO_LATE = 0x0609
    CONFIGURE_FAILED = 0x0701
    CONFIG_LOST = 0x0702
    KV_APPLY = 0x0703
    KV_UNKNOWN = 0x0704
    DEVICE_UNHEALTHY = 0x0801
    DEVICE_WEDGED = 0x0802
    DEVICE_LOST = 0x0803
    STICKY = 0x0804
    RESET_FAILED = 0x0805
    RESET_REFUSED = 0x0806
    RESET_UNVERIFIED = 0x0807
    INTERNAL = 0x0F01


CLASSES = {
    0x01: "caller error",
    0x02: "stale",
    0x03: "capacity",
    0x04: "wait",
    0x05: "artifact",
    0x06: "job",
    0x07: "generation",
    0x08: "device",
    0x0F: "internal",
}


def code_class(code: int) -> int:
    """Return the class of a status code."""
    return (code >> 8) & 0xFF


def code_name(code: int) -> str:
    """Name a status code: its name and number, or its class and number where the name is new."""
    try:
        return f"{Code(code).name} (0x{code:04x})"
    except ValueError:
        kind = CLASSES.get(code_class(code), "unknown class")
        return f"unnamed {kind} code (0x{code & 0xFFFFFFFF:04x})"


_u32, _i32, _u64, _i64 = c.c_uint32, c.c_int32, c.c_uint64, c.c_int64
_u32s, _i32s, _u64s = _u32 * MAX_CHIPS, _i32 * MAX_CHIPS, _u64 * MAX_CHIPS


class Head(c.Structure):
    """npurt_head: first in every struct that goes in or out."""

    _fields_ = [("struct_size", _u32), ("flags", _u32)]


class _Struct(c.Structure):
    """A struct that starts with a head; a new one carries its own size."""

    def __init__(self, **fields: object) -> None:
        super().__init__(**fields)
        self.h.struct_size = c.sizeof(self)


class AbiInfo(_Struct):
    """npurt_abi_info."""

    _fields_ = [
        ("h", Head),
        *(("abi_major", _u32), ("abi_minor", _u32), ("backend_kind", _u32), ("size_count", _u32)),
        ("feature_bits", _u64),
        *(("backend_name", c.c_char * 32), ("backend_version", c.c_char * 64)),
        ("sizes", _u32 * 32),
    ]


class DeviceDesc(_Struct):
    """npurt_device_desc."""

    _fields_ = [
        ("h", Head),
        *(("index", _u32), ("board_id", _u32), ("chip_count", _u32), ("chip_present_mask", _u32)),
        *(("owner_pid", _u32), ("owner_known", _u32)),
        ("version_valid", _u64),
        *(("product", c.c_char * 32), ("serial", c.c_char * 32), ("bus_id", c.c_char * 32)),
        ("runtime_version", c.c_char * 64),
        ("driver_version", c.c_char * 64),
        ("firmware_version", c.c_char * 64),
        ("dram_bytes", _u64s),
    ]


class OpenParams(_Struct):
    """npurt_open_params."""

    _fields_ = [("h", Head), ("index", _u32), ("chip_mask", _u32), ("config", c.c_char_p)]


class Health(_Struct):
    """npurt_health."""

    _fields_ = [
        ("h", Head),
        *(("device_epoch", _u64), ("observed_ns", _u64), ("last_progress_ns", _u64)),
        *(("state", _u32), ("advised", _u32), ("sticky", _i32), ("valid_mask", _u32)),
        *(("chip_state", _u32s), ("temp_mdegc", _i32s), ("clock_mhz", _u32s)),
        *(("power_mw", _u32s), ("throttle", _u32s)),
        *(("ecc_corrected", _u64s), ("ecc_uncorrected", _u64s)),
    ]


class Cap(_Struct):
    """npurt_cap."""

    _fields_ = [
        ("h", Head),
        *(("id", _u32), ("support", _u32), ("evidence", _u32), ("source", _u32)),
        ("value", _i64),
        *(("scope", c.c_char * 48), ("note", c.c_char * 128)),
    ]


class Counters(_Struct):
    """npurt_counters."""

    _fields_ = [
        ("h", Head),
        *(("device_epoch", _u64), ("valid_mask", _u64)),
        *(("submitted", _u64), ("pending", _u64), ("running", _u64), ("finished", _u64)),
        *(("left", _u64), ("failed", _u64), ("aborted", _u64), ("late", _u64)),
        ("inflight", _u64 * 2),
        *(("ccu_exceptions", _u64), ("resets", _u64 * 4)),
        *(("h2d_bytes", _u64), ("d2h_bytes", _u64), ("d2d_bytes", _u64), ("d2d_ns", _u64)),
        ("busy_ns", _u64s),
    ]


class Memory(_Struct):
    """npurt_memory."""

    _fields_ = [
        ("h", Head),
        *(("chip", _u32), ("valid_mask", _u32)),
        *(("total", _u64), ("used", _u64), ("params", _u64), ("kv", _u64)),
        *(("workspace", _u64), ("dynamic", _u64), ("unaccounted", _u64)),
    ]


class Event(_Struct):
    """npurt_event."""

    _fields_ = [
        ("h", Head),
        *(("seq", _u64), ("when_ns", _u64), ("device_epoch", _u64), ("ticket", _u64)),
        *(("kind", _u32), ("chip", _u32), ("code", _i32), ("dropped", _u32)),
        ("text", c.c_char * 128),
    ]


class CalbinSource(_Struct):
    """npurt_calbin_source."""

    _fields_ = [("h", Head), ("path", c.c_char_p), ("expect_sha256", c.c_char_p)]


class CalbinInfo(_Struct):
    """npurt_calbin_info."""

    _fields_ = [
        ("h", Head),
        ("generation", _u64),
        *(("state", _u32), ("layout", _u32), ("chip_count", _u32), ("chip_mask", _u32)),
        *(("submodel_count", _u32), ("max_lanes", _u32), ("max_context", _u32), ("vocab", _u32)),
        *(("logits_dtype", _u32), ("kv_dtype", _u32)),
        *(("name", c.c_char * 64), ("sha256", c.c_char * 72), ("compiler", c.c_char * 64)),
        *(("needs_runtime", c.c_char * 64), ("needs_firmware", c.c_char * 64)),
        *(("param_bytes", _u64s), ("kv_bytes", _u64s)),
        *(("workspace_bytes", _u64s), ("other_bytes", _u64s)),
    ]


class SubmodelInfo(_Struct):
    """npurt_submodel_info."""

    _fields_ = [
        ("h", Head),
        *(("index", _u32), ("task", _u32), ("max_batch", _u32), ("max_tokens", _u32)),
        *(("max_context", _u32), ("engine_modes", _u32), ("lane_rule", _u32)),
        *(("tensor_count", _u32), ("csr_count", _u32), ("logits_rows", _u32)),
        ("name", c.c_char * 96),
    ]


class TensorInfo(_Struct):
    """npurt_tensor_info."""

    _fields_ = [
        ("h", Head),
        *(("index", _u32), ("direction", _u32), ("dtype", _u32), ("rank", _u32)),
        *(("alignment", _u32), ("slice_axes", _u32)),
        *(("dims", _i64 * 8), ("bytes", _u64), ("name", c.c_char * 64)),
    ]


class CsrInfo(_Struct):
    """npurt_csr_info."""

    _fields_ = [
        ("h", Head),
        *(("id", _u32), ("bits", _u32), ("per_lane", _u32), ("required", _u32)),
        *(("min", _u64), ("max", _u64), ("def", _u64)),
        ("name", c.c_char * 48),
    ]


class ConfigureParams(_Struct):
    """npurt_configure_params."""

    _fields_ = [("h", Head), ("chip_mask", _u32), ("rsv", _u32), ("timeout_ns", _u64)]


class ConfigureResult(_Struct):
    """npurt_configure_result."""

    _fields_ = [
        ("h", Head),
        *(("generation", _u64), ("device_epoch", _u64), ("duration_ns", _u64)),
        *(("mem_before", _u64s), ("mem_after", _u64s)),
    ]


class BufferSpec(_Struct):
    """npurt_buffer_spec."""

    _fields_ = [
        ("h", Head),
        *(("submodel", _u32), ("direction", _u32), ("engine_mode", _u32), ("lanes", _u32)),
    ]


class Lane(c.Structure):
    """npurt_lane: one row of a job."""

    _fields_ = [
        *(("lane", _u32), ("active", _u32), ("tokens", _u32), ("kv_len", _u32)),
        ("seq_tag", _u64),
    ]


class CsrValue(c.Structure):
    """npurt_csr_value."""

    _fields_ = [("id", _u32), ("lane", _u32), ("value", _u64)]


class SubmitParams(_Struct):
    """npurt_submit_params."""

    _fields_ = [
        ("h", Head),
        # The header's `in` is a keyword here.
        *(("in_", c.c_void_p), ("out", c.c_void_p), ("kv", c.c_void_p)),
        *(("lanes", c.POINTER(Lane)), ("csrs", c.POINTER(CsrValue))),
        *(("lane_count", _u32), ("lane_stride", _u32), ("csr_count", _u32), ("csr_stride", _u32)),
        *(("engine_mode", _u32), ("priority", _u32)),
        *(("expect_generation", _u64), ("expect_epoch", _u64)),
        *(("client_tag", _u64), ("kv_txn", _u64)),
    ]


class JobState(_Struct):
    """npurt_job_state; flags in the head as in a completion."""

    _fields_ = [
        ("h", Head),
        *(("ticket", _u64), ("state", _u32), ("status", _i32)),
        *(("generation", _u64), ("device_epoch", _u64)),
    ]


class Times(c.Structure):
    """npurt_times."""

    _fields_ = [
        *(("clock", _u32), ("valid", _u32)),
        *(("submit", _u64), ("accept", _u64), ("h2d_begin", _u64), ("h2d_end", _u64)),
        *(("exec_begin", _u64), ("exec_end", _u64), ("d2h_begin", _u64), ("d2h_end", _u64)),
        *(("visible", _u64), ("d2d_ns", _u64), ("d2d_bytes", _u64)),
    ]


class CcuException(c.Structure):
    """npurt_ccu_exception."""

    _fields_ = [
        *(("valid", _u32), ("chip", _u32), ("ccu", _u32), ("code", _u32), ("subcode", _u32)),
        *(("task_index", _u32), ("cmd_index", _u32), ("rsv", _u32)),
        *(("pc", _u64), ("raw", _u64 * 8)),
        ("text", c.c_char * 128),
    ]


class Completion(_Struct):
    """npurt_completion; flags in the head."""

    _fields_ = [
        ("h", Head),
        *(("ticket", _u64), ("client_tag", _u64), ("generation", _u64), ("device_epoch", _u64)),
        *(("status", _i32), ("state", _u32), ("engine_used", _u32), ("kv_effect", _u32)),
        ("lanes_done_mask", _u64),
        *(("times", Times), ("ccu", CcuException)),
    ]


class KvParams(_Struct):
    """npurt_kv_params."""

    _fields_ = [("h", Head), ("layout", _u32), ("lanes", _u32)]


class KvOp(c.Structure):
    """npurt_kv_op."""

    _fields_ = [
        *(("op", _u32), ("lane", _u32), ("from_len", _u32), ("to_len", _u32)),
        *(("seq_tag", _u64), ("txn", _u64)),
    ]


class KvAnswer(_Struct):
    """npurt_kv_answer."""

    _fields_ = [
        ("h", Head),
        *(("free_lanes", _u32), ("fit_len", _u32)),
        *(("need_bytes", _u64s), ("free_bytes", _u64s)),
    ]


class KvLaneInfo(_Struct):
    """npurt_kv_lane_info."""

    _fields_ = [
        ("h", Head),
        *(("lane", _u32), ("bound", _u32), ("committed", _u32), ("reserved", _u32)),
        *(("certainty", _u32), ("rsv", _u32)),
        *(("seq_tag", _u64), ("txn", _u64), ("generation", _u64)),
    ]


class ResetScope(_Struct):
    """npurt_reset_scope."""

    _fields_ = [
        ("h", Head),
        *(("level", _u32), ("evidence", _u32), ("source", _u32), ("can_run_in_flight", _u32)),
        *(("effects_yes", _u64), ("effects_no", _u64)),
        *(("typical_ns", _u64), ("min_interval_ns", _u64)),
        ("note", c.c_char * 128),
    ]


class ResetParams(_Struct):
    """npurt_reset_params."""

    _fields_ = [
        ("h", Head),
        *(("level", _u32), ("chip_mask", _u32), ("cause", _i32), ("rsv", _u32)),
        *(("timeout_ns", _u64), ("only", c.c_void_p)),
        ("reason", c.c_char * 128),
    ]


class ResetReport(_Struct):
    """npurt_reset_report."""

    _fields_ = [
        ("h", Head),
        *(("status", _i32), ("level", _u32)),
        *(("epoch_before", _u64), ("epoch_after", _u64)),
        *(("effects_seen", _u64), ("duration_ns", _u64)),
        *(("jobs_aborted", _u32), ("jobs_unaccounted", _u32)),
        *(("health_before", _u32), ("health_after", _u32)),
        *(("mem_before", _u64s), ("mem_after", _u64s)),
    ]


RESET_DMA_QUIESCED, RESET_VERIFIED, RESET_WIDER = 1, 2, 4
"""Flags of a reset report."""


STRUCTS: tuple[tuple[str, type[c.Structure]], ...] = (
    ("npurt_head", Head),
    ("npurt_abi_info", AbiInfo),
    ("npurt_device_desc", DeviceDesc),
    ("npurt_open_params", OpenParams),
    ("npurt_health", Health),
    ("npurt_cap", Cap),
    ("npurt_counters", Counters),
    ("npurt_memory", Memory),
    ("npurt_event", Event),
    ("npurt_calbin_source", CalbinSource),
    ("npurt_calbin_info", CalbinInfo),
    ("npurt_submodel_info", SubmodelInfo),
    ("npurt_tensor_info", TensorInfo),
    ("npurt_csr_info", CsrInfo),
    ("npurt_configure_params", ConfigureParams),
    ("npurt_configure_result", ConfigureResult),
    ("npurt_buffer_spec", BufferSpec),
    ("npurt_lane", Lane),
    ("npurt_csr_value", CsrValue),
    ("npurt_submit_params", SubmitParams),
    ("npurt_job_state", JobState),
    ("npurt_times", Times),
    ("npurt_ccu_exception", CcuException),
    ("npurt_completion", Completion),
    ("npurt_kv_params", KvParams),
    ("npurt_kv_op", KvOp),
    ("npurt_kv_answer", KvAnswer),
    ("npurt_kv_lane_info", KvLaneInfo),
    ("npurt_reset_scope", ResetScope),
    ("npurt_reset_params", ResetParams),
    ("npurt_reset_report", ResetReport),
)
"""Every struct in header order: the order of npurt_abi_info.sizes."""
