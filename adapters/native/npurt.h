/* npurt.h - one small C ABI between an LLM engine and whatever runs its models.
 *
 * Version 0.1: 38 functions, 31 structures (npurt_head included). LP64 only.
 *
 * Rules that hold for every function
 *   status      0 is success; otherwise (class << 8) | ordinal. The class alone says where recovery
 *               starts. npurt_last_error gives the calling thread's explanation.
 *   structures  fixed-width fields, no padding, no unions, no bit-fields, no enums inside. Every
 *               structure that may grow begins with npurt_head; the caller sets struct_size to its
 *               own sizeof before the call. A library asks for at least the size of version 0.1,
 *               never writes beyond the caller's size and sets struct_size to what it filled.
 *               Arrays of structures come with the caller's stride.
 *   time        unsigned nanoseconds of npurt_clock_now. A timeout of 0 polls.
 *   strings     inbound: UTF-8, copied before return. Outbound: fixed arrays, NUL-terminated.
 *   memory      what the caller maps stays the caller's; it must keep its address until every job
 *               on it is QUIESCENT.
 *   threads     no callbacks. Each function's class is given in brackets: [F] free, from any thread
 *               at any time; [D] serialised inside the library per device; [O] one thread per
 *               object at a time; [X] exclusive: no other call on that device but health, counters,
 *               event, poll and wait. */
#ifndef NPURT_H
#define NPURT_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#ifndef NPURT_API
#define NPURT_API __attribute__((visibility("default")))
#endif

#define NPURT_ABI_MAJOR 0u
#define NPURT_ABI_MINOR 1u
#define NPURT_MAX_CHIPS 8
#define NPURT_WAIT_FOREVER UINT64_MAX /* for tests; an engine always gives a bound */

typedef int32_t npurt_status;
typedef uint64_t npurt_ticket; /* one accepted job; never 0, never reused in a process */
typedef struct npurt_device npurt_device;
typedef struct npurt_calbin npurt_calbin;
typedef struct npurt_buffer npurt_buffer;
typedef struct npurt_kvbank npurt_kvbank;

typedef struct npurt_head {
  uint32_t struct_size, flags;
} npurt_head;

enum {
  NPURT_OK = 0,
  /* class 0x01, the caller's mistake: nothing has changed */
  NPURT_E_INVALID_ARG = 0x0101,
  NPURT_E_BAD_HANDLE,
  NPURT_E_BAD_STATE,
  NPURT_E_STRUCT_SIZE,
  NPURT_E_ABI,
  NPURT_E_UNSUPPORTED,
  NPURT_E_NOT_FOUND,
  NPURT_E_ALIGNMENT,
  NPURT_E_RANGE_OVERLAP,
  NPURT_E_LANE_RULE,
  /* class 0x02, stale: the device has moved on; drop, never retry as it is */
  NPURT_E_STALE_EPOCH = 0x0201,
  NPURT_E_STALE_GENERATION,
  NPURT_E_STALE_TICKET,
  /* class 0x03, capacity: retry within bounds or refuse upstream */
  NPURT_E_QUEUE_FULL = 0x0301,
  NPURT_E_HOST_MEMORY,
  NPURT_E_DEVICE_MEMORY,
  NPURT_E_KV_NO_SPACE,
  NPURT_E_OBJECT_IN_FLIGHT,
  NPURT_E_DEVICE_OWNED,
  /* class 0x04, about the wait only: says nothing about the job */
  NPURT_E_NOT_READY = 0x0401,
  NPURT_E_WAIT_TIMEOUT,
  NPURT_E_INTERRUPTED,
  NPURT_E_EMPTY,
  /* class 0x05, the artifact */
  NPURT_E_CALBIN_FORMAT = 0x0501,
  NPURT_E_CALBIN_HASH,
  NPURT_E_CALBIN_INCOMPATIBLE,
  NPURT_E_CALBIN_TOO_LARGE,
  /* class 0x06, one job */
  NPURT_E_SUBMIT_REJECTED = 0x0601,
  NPURT_E_SUBMIT_INDETERMINATE,
  NPURT_E_CSR_FAILED,
  NPURT_E_CCU_EXCEPTION,
  NPURT_E_DMA,
  NPURT_E_JOB_ABORTED,
  NPURT_E_JOB_LOST,
  NPURT_E_NUMERIC,
  NPURT_E_CANCEL_TOO_LATE,
  /* class 0x07, one generation */
  NPURT_E_CONFIGURE_FAILED = 0x0701,
  NPURT_E_CONFIG_LOST,
  NPURT_E_KV_APPLY,
  NPURT_E_KV_UNKNOWN,
  /* class 0x08, the device */
  NPURT_E_DEVICE_UNHEALTHY = 0x0801,
  NPURT_E_DEVICE_WEDGED,
  NPURT_E_DEVICE_LOST,
  NPURT_E_STICKY,
  NPURT_E_RESET_FAILED,
  NPURT_E_RESET_REFUSED,
  NPURT_E_RESET_UNVERIFIED,
  /* class 0x0F, the library's mistake; treated as 0x08 */
  NPURT_E_INTERNAL = 0x0F01
};

/* Job states only go forward; the last four are terminal and written once. */
enum {
  NPURT_JOB_QUEUED = 1,
  NPURT_JOB_H2D,
  NPURT_JOB_EXEC,
  NPURT_JOB_D2H,
  NPURT_JOB_DONE,
  NPURT_JOB_FAILED,
  NPURT_JOB_ABORTED,
  NPURT_JOB_LOST
};

enum { NPURT_OPT_SUBMIT_MODE = 1, NPURT_OPT_PARALLEL_MODE, NPURT_OPT_IN_FLIGHT_CEILING };

enum {
  NPURT_EV_HEALTH = 1,
  NPURT_EV_THROTTLE,
  NPURT_EV_CCU,
  NPURT_EV_LATE_COMPLETION,
  NPURT_EV_EPOCH,
  NPURT_EV_OWNER,
  NPURT_EV_MEMORY,
  NPURT_EV_COUNTER,
  NPURT_EV_VIOLATION
};

enum {
  NPURT_CAP_IN_FLIGHT = 1,
  NPURT_CAP_PING_PONG,
  NPURT_CAP_PARALLEL_MODE,
  NPURT_CAP_OVERLAP_MODEL,
  NPURT_CAP_POLL_THREADSAFE,
  NPURT_CAP_COUNTERS,
  NPURT_CAP_CANCEL,
  NPURT_CAP_JOB_TIMES,
  NPURT_CAP_CCU_RECORD,
  NPURT_CAP_SUBMIT_ATOMIC,
  NPURT_CAP_QUIESCE_ON_ERROR,
  NPURT_CAP_KV_LAYOUTS,
  NPURT_CAP_KV_EFFECT,
  NPURT_CAP_BATCH_LANES,
  NPURT_CAP_LANE_RULE,
  NPURT_CAP_INCREMENTAL_PREFILL,
  NPURT_CAP_PREEMPTION,
  NPURT_CAP_MULTI_CONFIGURE,
  NPURT_CAP_CONFIGURE_BUSY,
  NPURT_CAP_JOB_MODEL_HANDLE,
  NPURT_CAP_MODEL_ISOLATION,
  NPURT_CAP_CHIP_AFFINITY,
  NPURT_CAP_CHIP_RESET_DOMAIN,
  NPURT_CAP_PARAM_SHARING,
  NPURT_CAP_MEMORY_ACCOUNTING,
  NPURT_CAP_HEALTH,
  NPURT_CAP_EVENTS,
  NPURT_CAP_MULTI_BOARD,
  NPURT_CAP_DEVICE_SELECT,
  NPURT_CAP_EXCLUSIVE,
  NPURT_CAP_LAYOUTS,
  NPURT_CAP_SAME_MODEL_FAST_PATH,
  NPURT_CAP_NUMERIC_CHECK
};

/* Effects of a reset, as bits. */
enum {
  NPURT_FX_ABORTS_JOBS = 1,
  NPURT_FX_QUIESCES_DMA = 2,
  NPURT_FX_CLEARS_STICKY = 4,
  NPURT_FX_DROPS_CONFIG = 8,
  NPURT_FX_DROPS_ALL_CONFIGS = 16,
  NPURT_FX_DROPS_KV = 32,
  NPURT_FX_DROPS_ALL_KV = 64,
  NPURT_FX_DROPS_PARAMS = 128,
  NPURT_FX_FREES_DYNAMIC = 256,
  NPURT_FX_FREES_ALL = 512,
  NPURT_FX_RESETS_COUNTERS = 1024,
  NPURT_FX_NEW_EPOCH = 2048,
  NPURT_FX_OTHER_CHIP = 4096,
  NPURT_FX_OTHER_MODEL = 8192,
  NPURT_FX_OTHER_PROCESS = 16384,
  NPURT_FX_RELOADS_FIRMWARE = 32768,
  NPURT_FX_DROPS_HOST_MAPS = 65536
};

/* ---- 1. Versions ----------------------------------------------------------------------- */

typedef struct npurt_abi_info {
  npurt_head h;
  uint32_t abi_major, abi_minor;
  uint32_t backend_kind; /* 1 SIM, 2 CALRT, 3 LLAMACPP, others as they come */
  uint32_t size_count;   /* valid entries of sizes */
  uint64_t feature_bits;
  char backend_name[32], backend_version[64];
  uint32_t sizes[32]; /* sizeof of every structure of this header, in its order, npurt_head first */
} npurt_abi_info;

/* [F] The major must match and the library's minor be at least min_minor, else ABI. Fills `out` in
 * either case. */
NPURT_API npurt_status npurt_abi_negotiate(uint32_t want_major, uint32_t min_minor,
                                           npurt_abi_info *out);
/* [F] Why the calling thread's latest failed call failed; cut to cap - 1 bytes. */
NPURT_API npurt_status npurt_last_error(char *buf, uint64_t cap);

/* ---- 2. Device ------------------------------------------------------------------------- */

typedef struct npurt_device_desc {
  npurt_head h;
  uint32_t index, board_id; /* board_id UINT32_MAX: boards cannot be told apart */
  uint32_t chip_count, chip_present_mask;
  uint32_t owner_pid, owner_known;
  uint64_t version_valid; /* bit 0 runtime, 1 driver, 2 firmware */
  char product[32], serial[32], bus_id[32];
  char runtime_version[64], driver_version[64], firmware_version[64];
  uint64_t dram_bytes[NPURT_MAX_CHIPS];
} npurt_device_desc;

typedef struct npurt_open_params {
  npurt_head h;              /* flags: 1 EXCLUSIVE */
  uint32_t index, chip_mask; /* chip_mask 0: every chip present */
  const char *config;        /* backend text, lines of "key = value"; may be NULL */
} npurt_open_params;

typedef struct npurt_health {
  npurt_head h;
  uint64_t device_epoch, observed_ns, last_progress_ns;
  uint32_t state;      /* 0 UNKNOWN, 1 OK, 2 DEGRADED, 3 UNHEALTHY, 4 WEDGED, 5 LOST */
  uint32_t advised;    /* 0 nothing, 1..4 that reset level, 100 process, 101 driver, 102 host */
  npurt_status sticky; /* non-zero: every submit fails with it */
  uint32_t valid_mask; /* bit i: the i-th array below means something */
  uint32_t chip_state[NPURT_MAX_CHIPS];
  int32_t temp_mdegc[NPURT_MAX_CHIPS];
  uint32_t clock_mhz[NPURT_MAX_CHIPS];
  uint32_t power_mw[NPURT_MAX_CHIPS];
  uint32_t throttle[NPURT_MAX_CHIPS];
  uint64_t ecc_corrected[NPURT_MAX_CHIPS], ecc_uncorrected[NPURT_MAX_CHIPS];
} npurt_health;

typedef struct npurt_cap {
  npurt_head h;
  uint32_t id, support;      /* support: 0 UNKNOWN, 1 NO, 2 LIMITED, 3 YES */
  uint32_t evidence, source; /* evidence: 0..4 = C0..C4, 9 SIM; source: 1 device, 2 vendor document,
                                3 header, 4 verification record, 5 inferred, 6 simulated */
  int64_t value;
  char scope[48], note[128];
} npurt_cap;

typedef struct npurt_counters {
  npurt_head h;
  uint64_t device_epoch, valid_mask; /* bit i: the i-th field below; arrays count once */
  uint64_t submitted, pending, running, finished, left, failed, aborted, late;
  uint64_t inflight[2]; /* ping, pong */
  uint64_t ccu_exceptions, resets[4];
  uint64_t h2d_bytes, d2h_bytes, d2d_bytes, d2d_ns;
  uint64_t busy_ns[NPURT_MAX_CHIPS];
} npurt_counters;

typedef struct npurt_memory {
  npurt_head h;
  uint32_t chip, valid_mask; /* valid_mask bit i: the i-th field below */
  uint64_t total, used, params, kv, workspace, dynamic, unaccounted;
} npurt_memory;

typedef struct npurt_event {
  npurt_head h;
  uint64_t seq, when_ns, device_epoch;
  npurt_ticket ticket;
  uint32_t kind, chip;
  npurt_status code;
  uint32_t dropped; /* events lost just before this one */
  char text[128];
} npurt_event;

/* [F] */
NPURT_API npurt_status npurt_device_count(uint32_t *count);
/* [F] */
NPURT_API npurt_status npurt_device_describe(uint32_t index, npurt_device_desc *out);
/* [D] */
NPURT_API npurt_status npurt_device_open(const npurt_open_params *p, npurt_device **out);
/* [X] Closes with everything that belongs to the device; waiters return. */
NPURT_API npurt_status npurt_device_close(npurt_device *d);
/* [F] */
NPURT_API npurt_status npurt_device_health(npurt_device *d, npurt_health *out);
/* [F] inout_n: room in arr before, number of capabilities after; arr may be NULL when the room is
 * 0. */
NPURT_API npurt_status npurt_device_caps(npurt_device *d, npurt_cap *arr, uint32_t stride,
                                         uint32_t *inout_n);
/* [F] */
NPURT_API npurt_status npurt_device_counters(npurt_device *d, npurt_counters *out);
/* [F] */
NPURT_API npurt_status npurt_device_memory(npurt_device *d, uint32_t chip, npurt_memory *out);
/* [D] Takes the oldest event, or EMPTY; never blocks. */
NPURT_API npurt_status npurt_device_event(npurt_device *d, npurt_event *out);
/* [D] option: NPURT_OPT_* */
NPURT_API npurt_status npurt_device_set(npurt_device *d, uint32_t option, int64_t value);
/* [F] The clock of every time stamp. */
NPURT_API npurt_status npurt_clock_now(npurt_device *d, uint64_t *ns);

/* ---- 3. Calbin ------------------------------------------------------------------------- */

typedef struct npurt_calbin_source {
  npurt_head h;
  const char *path, *expect_sha256; /* expect_sha256 may be NULL */
} npurt_calbin_source;

typedef struct npurt_calbin_info {
  npurt_head h;
  uint64_t generation;    /* 0 unless configured; never reused in a process */
  uint32_t state, layout; /* state: 1 VALIDATED, 2 CONFIGURED, 3 LOST, 4 RELEASED;
                             layout: 1 SINGLE, 2 TP2, 3 EP2, 4 PP2, 5 TP+EP */
  uint32_t chip_count, chip_mask;
  uint32_t submodel_count, max_lanes;
  uint32_t max_context, vocab;
  uint32_t logits_dtype, kv_dtype; /* dtypes: 1 INT32, 2 UINT64, 3 FLOAT32, 4 BF16 */
  char name[64], sha256[72], compiler[64], needs_runtime[64], needs_firmware[64];
  uint64_t param_bytes[NPURT_MAX_CHIPS], kv_bytes[NPURT_MAX_CHIPS];
  uint64_t workspace_bytes[NPURT_MAX_CHIPS], other_bytes[NPURT_MAX_CHIPS];
} npurt_calbin_info;

typedef struct npurt_submodel_info {
  npurt_head h; /* flags: 1 INCREMENTAL_PREFILL, 2 PREEMPTIBLE, 4 FIXED_ROWS: row i is lane i, or i
                   behind a multiple of max_batch */
  uint32_t index, task;               /* task: 1 PREFILL, 2 DECODE */
  uint32_t max_batch, max_tokens;     /* max_tokens: per lane and submission */
  uint32_t max_context, engine_modes; /* engine_modes: bit 0 AUTO, 1 PING, 2 PONG */
  uint32_t lane_rule; /* inactive rows: 0 UNDEFINED, 1 LENGTH_ZERO, 2 MASK_CSR, 3 SCRATCH_LANE */
  uint32_t tensor_count, csr_count, logits_rows;
  char name[96]; /* exactly the vendor's name */
} npurt_submodel_info;

typedef struct npurt_tensor_info {
  npurt_head h;
  uint32_t index, direction; /* direction: 1 IN, 2 OUT */
  uint32_t dtype, rank;
  uint32_t alignment, slice_axes; /* slice_axes: bit i = axis i may be sliced */
  int64_t dims[8];
  uint64_t bytes;
  char name[64];
} npurt_tensor_info;

typedef struct npurt_csr_info {
  npurt_head h;
  uint32_t id, bits, per_lane, required;
  uint64_t min, max, def;
  char name[48];
} npurt_csr_info;

typedef struct npurt_configure_params {
  npurt_head h;
  uint32_t chip_mask, rsv; /* chip_mask 0: the calbin's own */
  uint64_t timeout_ns;
} npurt_configure_params;

typedef struct npurt_configure_result {
  npurt_head h;
  uint64_t generation, device_epoch, duration_ns;
  uint64_t mem_before[NPURT_MAX_CHIPS], mem_after[NPURT_MAX_CHIPS];
} npurt_configure_result;

/* [F] Reads and checks on the host only. */
NPURT_API npurt_status npurt_calbin_create(npurt_device *d, const npurt_calbin_source *s,
                                           npurt_calbin **out);
/* [F] */
NPURT_API npurt_status npurt_calbin_describe(npurt_calbin *c, npurt_calbin_info *out);
/* [F] */
NPURT_API npurt_status npurt_calbin_submodel(npurt_calbin *c, uint32_t i, npurt_submodel_info *out);
/* [F] */
NPURT_API npurt_status npurt_calbin_tensor(npurt_calbin *c, uint32_t sub, uint32_t i,
                                           npurt_tensor_info *out);
/* [F] */
NPURT_API npurt_status npurt_calbin_csr(npurt_calbin *c, uint32_t sub, uint32_t i,
                                        npurt_csr_info *out);
/* [X] The only call that puts a model on the device; gives a new generation. */
NPURT_API npurt_status npurt_calbin_configure(npurt_calbin *c, const npurt_configure_params *p,
                                              npurt_configure_result *out);
/* [X] OBJECT_IN_FLIGHT while buffers, a KV bank or jobs of it exist. */
NPURT_API npurt_status npurt_calbin_release(npurt_calbin *c);

/* ---- 4. Buffers ------------------------------------------------------------------------ */

typedef struct npurt_buffer_spec {
  npurt_head h;
  uint32_t submodel, direction;
  uint32_t engine_mode, lanes; /* lanes: rows the buffer has, 0: the submodel's max_batch */
} npurt_buffer_spec;

/* [D] */
NPURT_API npurt_status npurt_buffer_create(npurt_calbin *c, const npurt_buffer_spec *s,
                                           npurt_buffer **out);
/* [O] `host` stays the caller's; OBJECT_IN_FLIGHT from an accepted submit to its retire. */
NPURT_API npurt_status npurt_buffer_map(npurt_buffer *b, uint32_t tensor, void *host,
                                        uint64_t bytes);
/* [O] Transfers only elements off .. off + len - 1 of that axis. */
NPURT_API npurt_status npurt_buffer_slice(npurt_buffer *b, uint32_t tensor, uint32_t axis,
                                          int64_t off, int64_t len);
/* [O] what: 1 slices, 2 tensors, 4 maps */
NPURT_API npurt_status npurt_buffer_restore(npurt_buffer *b, uint32_t what);
/* [O] */
NPURT_API npurt_status npurt_buffer_destroy(npurt_buffer *b);

/* ---- 5. Jobs --------------------------------------------------------------------------- */

typedef struct npurt_lane {
  uint32_t lane, active;
  uint32_t tokens, kv_len; /* tokens of this job; committed length before it */
  uint64_t seq_tag;
} npurt_lane;

typedef struct npurt_csr_value {
  uint32_t id, lane;
  uint64_t value;
} npurt_csr_value;

typedef struct npurt_submit_params {
  npurt_head h;
  npurt_buffer *in, *out;
  npurt_kvbank *kv;
  const npurt_lane *lanes;
  const npurt_csr_value *csrs;
  uint32_t lane_count, lane_stride, csr_count, csr_stride;
  uint32_t engine_mode, priority; /* engine_mode: 0 AUTO, 1 PING, 2 PONG */
  uint64_t expect_generation, expect_epoch;
  uint64_t client_tag, kv_txn;
} npurt_submit_params;

typedef struct npurt_job_state {
  npurt_head h; /* flags as in npurt_completion */
  npurt_ticket ticket;
  uint32_t state;
  npurt_status status;
  uint64_t generation, device_epoch;
} npurt_job_state;

typedef struct npurt_times {
  uint32_t clock,
      valid; /* clock: 1 HOST_MONOTONIC, 2 DEVICE, 3 VIRTUAL; valid bit i: the i-th field below */
  uint64_t submit, accept, h2d_begin, h2d_end, exec_begin, exec_end, d2h_begin, d2h_end, visible;
  uint64_t d2d_ns, d2d_bytes;
} npurt_times;

typedef struct npurt_ccu_exception {
  uint32_t valid, chip, ccu, code, subcode, task_index, cmd_index, rsv;
  uint64_t pc, raw[8];
  char text[128];
} npurt_ccu_exception;

typedef struct npurt_completion {
  npurt_head h; /* flags: 1 TERMINAL, 2 QUIESCENT, 4 OUTPUT_VALID, 8 NUMERIC_FLAG, 16 LATE, 32
                   CANCEL_SEEN */
  npurt_ticket ticket;
  uint64_t client_tag, generation, device_epoch;
  npurt_status status;
  uint32_t state;
  uint32_t engine_used, kv_effect; /* kv_effect: 0 NONE, 1 APPLIED, 2 PARTIAL, 3 UNKNOWN */
  uint64_t lanes_done_mask;        /* bit i: row i of the job */
  npurt_times times;
  npurt_ccu_exception ccu;
} npurt_completion;

/* [D] OK: accepted, ticket set, buffers locked until retire. Ticket 0: nothing queued, no DMA, KV
 * untouched. */
NPURT_API npurt_status npurt_job_submit(npurt_device *d, const npurt_submit_params *p,
                                        npurt_ticket *out);
/* [F] */
NPURT_API npurt_status npurt_job_poll(npurt_device *d, npurt_ticket t, npurt_job_state *out);
/* [F] Index of one terminal ticket of n. WAIT_TIMEOUT says nothing about the jobs. */
NPURT_API npurt_status npurt_job_wait(npurt_device *d, const npurt_ticket *t, uint32_t n,
                                      uint64_t timeout_ns, uint32_t *which);
/* [F] NOT_READY until terminal; the same answer every time after that, but for flags that a reset or
 * a late completion may add. */
NPURT_API npurt_status npurt_job_result(npurt_device *d, npurt_ticket t, npurt_completion *out);
/* [F] OK: noted. Releases nothing. */
NPURT_API npurt_status npurt_job_cancel(npurt_device *d, npurt_ticket t);
/* [D] Only for TERMINAL and QUIESCENT, else OBJECT_IN_FLIGHT. Afterwards the ticket is stale. */
NPURT_API npurt_status npurt_job_retire(npurt_device *d, npurt_ticket t);

/* ---- 6. KV ----------------------------------------------------------------------------- */

typedef struct npurt_kv_params {
  npurt_head h;
  uint32_t layout, lanes; /* layout: 1 ONLY_VALID, 2 ALL, 3 AUTO; lanes 0: all of the calbin */
} npurt_kv_params;

typedef struct npurt_kv_op {
  uint32_t op, lane; /* op: 1 RESERVE, 2 COMMIT, 3 ROLLBACK, 4 RELEASE */
  uint32_t from_len, to_len;
  uint64_t seq_tag, txn;
} npurt_kv_op;

typedef struct npurt_kv_answer {
  npurt_head h;
  uint32_t free_lanes, fit_len;
  uint64_t need_bytes[NPURT_MAX_CHIPS], free_bytes[NPURT_MAX_CHIPS];
} npurt_kv_answer;

typedef struct npurt_kv_lane_info {
  npurt_head h;
  uint32_t lane, bound;
  uint32_t committed, reserved;
  uint32_t certainty, rsv; /* certainty: 1 KNOWN, 2 UNKNOWN */
  uint64_t seq_tag, txn, generation;
} npurt_kv_lane_info;

/* [D] */
NPURT_API npurt_status npurt_kv_open(npurt_calbin *c, const npurt_kv_params *p, npurt_kvbank **out);
/* [X] */
NPURT_API npurt_status npurt_kv_close(npurt_kvbank *k);
/* [F] Would apply succeed now? Changes nothing. `out` is filled whatever the answer. */
NPURT_API npurt_status npurt_kv_can_allocate(npurt_kvbank *k, const npurt_kv_op *ops,
                                             uint32_t stride, uint32_t n, npurt_kv_answer *out);
/* [D] All or nothing, in order; on failure the bank is as before and bad_index names the operation.
 */
NPURT_API npurt_status npurt_kv_apply(npurt_kvbank *k, const npurt_kv_op *ops, uint32_t stride,
                                      uint32_t n, uint32_t *bad_index);
/* [F] */
NPURT_API npurt_status npurt_kv_lane(npurt_kvbank *k, uint32_t lane, npurt_kv_lane_info *out);

/* ---- 7. Resets ------------------------------------------------------------------------- */

typedef struct npurt_reset_scope {
  npurt_head h;
  uint32_t level, evidence;
  uint32_t source, can_run_in_flight;
  uint64_t effects_yes, effects_no; /* NPURT_FX_*; a bit in neither: unknown */
  uint64_t typical_ns, min_interval_ns;
  char note[128];
} npurt_reset_scope;

typedef struct npurt_reset_params {
  npurt_head h;
  uint32_t level,
      chip_mask; /* level: 1 CCU, 2 CONFIGURATION, 3 DYNAMIC_MEM, 4 DEVICE_SOFT; chip_mask 0: all */
  npurt_status cause;
  uint32_t rsv;
  uint64_t timeout_ns;
  npurt_calbin *only; /* NULL: everything on the device at this level */
  char reason[128];
} npurt_reset_params;

typedef struct npurt_reset_report {
  npurt_head h; /* flags: 1 DMA_QUIESCED, 2 VERIFIED, 4 SCOPE_WIDER_THAN_ASKED */
  npurt_status status;
  uint32_t level;
  uint64_t epoch_before, epoch_after;
  uint64_t effects_seen, duration_ns;
  uint32_t jobs_aborted, jobs_unaccounted;
  uint32_t health_before, health_after;
  uint64_t mem_before[NPURT_MAX_CHIPS], mem_after[NPURT_MAX_CHIPS];
} npurt_reset_report;

/* [F] What a level claims to do. */
NPURT_API npurt_status npurt_reset_describe(npurt_device *d, uint32_t level,
                                            npurt_reset_scope *out);
/* [X] Does it and reports what was observed. */
NPURT_API npurt_status npurt_reset_run(npurt_device *d, const npurt_reset_params *p,
                                       npurt_reset_report *out);

#ifdef __cplusplus
}
#endif
#endif
