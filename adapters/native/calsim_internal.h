/* calsim_internal.h - the parts of the simulated board, as its own files see them.
 *
 * One lock per device guards everything in calsim_device; it is given up only while a transfer or a
 * forward runs, and then `busy` of the job's bank is set, which is what resets, steppers and close
 * wait for. Lock order: registry (calsim_handles.c), then device. */
#ifndef CALSIM_INTERNAL_H
#define CALSIM_INTERNAL_H
#include "calsim_model.h"
#include "npurt_sim.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <time.h>

enum {
  CALSIM_CHIPS = 2,
  CALSIM_BANKS = 2, /* ping, pong */
  CALSIM_MAX_ROWS = 64,
  CALSIM_MAX_LANES = 4096,
  CALSIM_MAX_JOBS = 1024, /* accepted and not yet retired */
  CALSIM_MAX_DEVICES = 256,
  CALSIM_MAX_OBJECTS = 65536,
  CALSIM_MAX_KV_OPS = 65536,
  CALSIM_MAX_RULES = 64,
  CALSIM_MAX_LEAKS = 64,
  CALSIM_MAX_GHOSTS = 64, /* late ends of jobs that were retired before them */
  CALSIM_MAX_PENDING = CALSIM_MAX_JOBS + CALSIM_MAX_RULES + CALSIM_MAX_GHOSTS,
  CALSIM_EVENT_RING = 256,
  CALSIM_MAX_VIOLATIONS = 1024,
  CALSIM_TENSORS = 5,
  CALSIM_CAPS = NPURT_CAP_NUMERIC_CHECK,
  CALSIM_PAGE = 4096,
  CALSIM_PIECE = 65536, /* one transfer is cut into pieces of this size */
  CALSIM_SCRATCH_BYTES = (1 + CALSIM_BANKS) * CALSIM_PIECE
};
#define CALSIM_TRACE_BYTES_MAX (32u << 20)
#define CALSIM_CAPTURE_BYTES_MAX (1ull << 30)

enum {
  CALSIM_PROFILE_TINY,
  CALSIM_PROFILE_NULL,
  CALSIM_PROFILE_COST,
  CALSIM_PROFILE_TP2_REF, /* this and the next ones price the reference shape */
  CALSIM_PROFILE_TP2_B4,
  CALSIM_PROFILE_TP2_B8,
  CALSIM_PROFILE_TP2_B16
};
/* Rules for the rows of a batch that are not active, numbered as in npurt.h. */
enum { CALSIM_RULE_UNDEFINED, CALSIM_RULE_LENGTH_ZERO, CALSIM_RULE_MASK_CSR, CALSIM_RULE_SCRATCH };
/* What overlaps of two jobs: nothing; nothing, but their commands are ready early; the transfer to
 * the device with the other's EXEC; all three phases. */
enum { CALSIM_OVERLAP_NONE, CALSIM_OVERLAP_BANKS, CALSIM_OVERLAP_H2D, CALSIM_OVERLAP_FULL };
enum { CALSIM_CLOCK_MANUAL, CALSIM_CLOCK_REAL, CALSIM_CLOCK_VIRTUAL };
enum { CALSIM_IN = 1, CALSIM_OUT = 2 };
enum {
  CALSIM_CHECK_INPUT = 1,  /* inputs are the same at H2D as at submit */
  CALSIM_CHECK_OUTPUT = 2, /* outputs are tagged at submit and untouched until D2H */
  CALSIM_CHECK_REUSE = 4,  /* buffers are restored and cleaned between two jobs */
  CALSIM_CHECK_ALL = 7
};
enum { CALSIM_TOKENS, CALSIM_POSITIONS, CALSIM_LENGTHS, CALSIM_LOGITS, CALSIM_DIGEST };
enum { CALSIM_DTYPE_I32 = 1, CALSIM_DTYPE_U64, CALSIM_DTYPE_F32, CALSIM_DTYPE_BF16 };
enum { CALSIM_VALIDATED = 1, CALSIM_CONFIGURED, CALSIM_LOST, CALSIM_RELEASED };
enum {
  CALSIM_FLAG_TERMINAL = 1,
  CALSIM_FLAG_QUIESCENT = 2,
  CALSIM_FLAG_OUTPUT_VALID = 4,
  CALSIM_FLAG_NUMERIC = 8,
  CALSIM_FLAG_LATE = 16,
  CALSIM_FLAG_CANCEL_SEEN = 32
};
enum { CALSIM_KV_NONE, CALSIM_KV_APPLIED, CALSIM_KV_PARTIAL, CALSIM_KV_UNKNOWN };
enum { CALSIM_KNOWN = 1, CALSIM_UNKNOWN = 2 };
enum {
  CALSIM_HEALTH_OK = 1,
  CALSIM_HEALTH_DEGRADED = 2,
  CALSIM_HEALTH_UNHEALTHY = 3,
  CALSIM_HEALTH_WEDGED = 4,
  CALSIM_HEALTH_LOST = 5
};
enum { CALSIM_FIXED_ROWS = 4 }; /* flag of a submodel */
enum { CALSIM_ROW_ACTIVE };     /* the register of lane rule mask_csr */
/* Who the library says it is. With CALSIM_PLAIN it is built as if it were somebody's runtime: the
 * same board under another name, on the word of a vendor document, and time runs by itself. */
#ifdef CALSIM_PLAIN
#define CALSIM_NAME "plainboard"
enum { CALSIM_BACKEND = 64, CALSIM_EVIDENCE = 2, CALSIM_SOURCE = 2, CALSIM_CLOCK_USUAL = 1 };
#else
#define CALSIM_NAME "calsim"
enum { CALSIM_BACKEND = 1, CALSIM_EVIDENCE = 9, CALSIM_SOURCE = 6, CALSIM_CLOCK_USUAL = 0 };
#endif
enum { CALSIM_THEN_LOST, CALSIM_THEN_HANG, CALSIM_THEN_GARBAGE }; /* after a reset that lied */

typedef struct calsim_device calsim_device;
typedef struct calsim_calbin calsim_calbin;
typedef struct calsim_buffer calsim_buffer;
typedef struct calsim_bank calsim_bank;
typedef struct calsim_job calsim_job;

/* ---- calsim_handles.c: process-wide registry, error text, structure sizes -------------- */

typedef enum calsim_kind {
  CALSIM_NONE,
  CALSIM_DEVICE,
  CALSIM_CALBIN,
  CALSIM_BUFFER,
  CALSIM_BANK
} calsim_kind;

typedef struct calsim_object {
  uint32_t serial; /* process-wide; 0: free entry */
  calsim_kind kind;
  void *item;
} calsim_object;

typedef struct calsim_objects {
  calsim_object *entries;
  uint32_t count;
} calsim_objects;

/* Record why the calling thread's call fails, and pass the status on. */
npurt_status calsim_error(npurt_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Device of any handle, with its lock held and counted as in use; NULL (error recorded) when the
 * handle is not alive. */
calsim_device *calsim_lock(const void *handle, calsim_kind kind);
/* The same, and the object behind a child handle. */
void *calsim_lock_object(const void *handle, calsim_kind kind, calsim_device **device);
void calsim_unlock(calsim_device *d);
/* Give the lock up without leaving the device, and take it again. */
void calsim_suspend(calsim_device *d);
void calsim_resume(calsim_device *d);

npurt_status calsim_register_device(calsim_device *d, npurt_device **handle);
/* Take a device out of the registry and wait until no other thread is inside; false: already gone.
 * Lock not held. */
bool calsim_unregister_device(const void *handle, calsim_device **device);
calsim_device *calsim_lock_latest(void);
npurt_status calsim_add_object(calsim_device *d, calsim_kind kind, void *item, void **handle);
void *calsim_find_object(calsim_device *d, const void *handle, calsim_kind kind);
void calsim_remove_object(calsim_device *d, const void *handle);
uint64_t calsim_next_ticket(void);
uint64_t calsim_next_generation(void);

/* Sizes of ABI 0.1, which every caller must offer; CALSIM_ABI01(npurt_health) is one of them. */
#define CALSIM_STRUCTS(X)                                                                        \
  X(npurt_head, 8) X(npurt_abi_info, 256) X(npurt_device_desc, 392)                              \
  X(npurt_open_params, 24) X(npurt_health, 336) X(npurt_cap, 208)                                \
  X(npurt_counters, 240) X(npurt_memory, 72) X(npurt_event, 184)                                 \
  X(npurt_calbin_source, 24) X(npurt_calbin_info, 640) X(npurt_submodel_info, 144)               \
  X(npurt_tensor_info, 168) X(npurt_csr_info, 96) X(npurt_configure_params, 24)                  \
  X(npurt_configure_result, 160) X(npurt_buffer_spec, 24) X(npurt_lane, 24)                      \
  X(npurt_csr_value, 16) X(npurt_submit_params, 104) X(npurt_job_state, 40)                      \
  X(npurt_times, 96) X(npurt_ccu_exception, 232) X(npurt_completion, 392)                        \
  X(npurt_kv_params, 16) X(npurt_kv_op, 32) X(npurt_kv_answer, 144)                              \
  X(npurt_kv_lane_info, 56) X(npurt_reset_scope, 184) X(npurt_reset_params, 168)                 \
  X(npurt_reset_report, 192)
enum {
#define CALSIM_SIZE_ENUM(name, bytes) CALSIM_SIZE_##name = bytes,
  CALSIM_STRUCTS(CALSIM_SIZE_ENUM)
#undef CALSIM_SIZE_ENUM
};
#define CALSIM_ABI01(name) ((uint32_t)CALSIM_SIZE_##name)

/* OK when a structure with npurt_head is there and large enough for ABI 0.1. */
npurt_status calsim_check_struct(const void *p, uint32_t abi01_bytes, const char *name);
#define CALSIM_CHECK(p, name) calsim_check_struct((p), CALSIM_ABI01(name), #name)
/* Copy `value` to a checked out structure: at most what the caller offers; struct_size becomes what
 * was filled. */
void calsim_put(void *out, const void *value, uint32_t own_bytes);
/* The same for element i of a caller's array, whose stride is the room of each element. */
void calsim_put_element(void *array, uint32_t stride, uint32_t i, const void *value,
                        uint32_t own_bytes);
void calsim_copy_text(char *to, size_t room, const char *from);

/* ---- calsim_config.c ------------------------------------------------------------------- */

/* The simple cost model: base + rows (decode) or tokens (prefill) x each + context tokens (decode)
 * or tokens squared (prefill) x context. */
typedef struct calsim_rate {
  uint64_t base_ns, each_ns, context_ns;
} calsim_rate;

enum { CALSIM_CANCEL_NONE, CALSIM_CANCEL_QUEUED, CALSIM_CANCEL_ANY }; /* which jobs it ends */
enum { CALSIM_CCU = 1, CALSIM_CONFIGURATION, CALSIM_DYNAMIC_MEM, CALSIM_DEVICE_SOFT };
#define CALSIM_FX_ALL ((1ull << 17) - 1)

typedef struct calsim_scope { /* of a reset level */
  uint64_t does;              /* effects that it has, NPURT_FX_* */
  uint64_t yes, unknown;      /* effects that it claims, and those of which it says nothing */
} calsim_scope;

typedef struct calsim_config {
  int profile, clock, overlap;
  uint64_t h2d_ns, d2h_ns; /* these and the rates: profile cost */
  calsim_rate prefill, decode;
  double scale;
  uint64_t seed, dram_bytes;
  bool strict, capture;
  int cancel; /* CALSIM_CANCEL_* */
  uint32_t checks; /* CALSIM_CHECK_* */
  char runtime_version[64], driver_version[64], firmware_version[64];
  char persona[256]; /* path; empty: the board answers for itself */
  char board[256];   /* path of what processes share of one board; empty: nothing */
  calsim_scope scopes[4]; /* by reset level - 1 */
  uint64_t reset_interval_ns; /* between two resets of level 4 */
} calsim_config;

npurt_status calsim_config_parse(const char *text, calsim_config *out);
/* -1, 0, 1: dotted numbers compared number by number. */
int calsim_version_compare(const char *a, const char *b);
bool calsim_version_valid(const char *text);
bool calsim_parse_u64(const char *text, uint64_t *out);
bool calsim_parse_real(const char *text, double *out);
/* A number with ns, us, ms or s. */
bool calsim_parse_time(const char *text, uint64_t *out);

/* ---- calsim_cost.c: what a job takes, and what a model is accounted with --------------- */

typedef struct calsim_cost {
  uint64_t h2d_ns, exec_ns, d2h_ns, d2d_ns, d2d_bytes;
} calsim_cost;

typedef struct calsim_account {
  uint64_t params[CALSIM_CHIPS], kv[CALSIM_CHIPS], workspace[CALSIM_CHIPS], other[CALSIM_CHIPS];
  uint64_t kv_bytes_per_token; /* over all chips */
} calsim_account;

typedef struct calsim_work { /* the size of a job, as the cost model sees it */
  bool decodes;
  uint64_t bytes_in, rows, tokens, context_sum,
      attended; /* attended: sum over tokens of the positions each one reads */
} calsim_work;

calsim_cost calsim_job_cost(const calsim_config *config, const calsim_work *work);
/* What a calbin of a profile may have at most; 0: no bound. */
typedef struct calsim_limits {
  uint32_t batch, lanes, context;
} calsim_limits;
calsim_limits calsim_profile_limits(int profile);
calsim_account calsim_job_account(int profile, const calsim_manifest *m);

/* ---- calsim_trace.c: trace, events, violations ----------------------------------------- */

typedef struct calsim_log {
  char *text;
  uint64_t length, room, lines_lost;
  npurt_event ring[CALSIM_EVENT_RING];
  uint32_t ring_first, ring_count, ring_lost;
  uint64_t next_seq;
  npurt_event *violations;
  uint32_t violation_count, violations_lost;
} calsim_log;

void calsim_trace(calsim_device *d, const char *format, ...) __attribute__((format(printf, 2, 3)));
void calsim_trace_kv(calsim_device *d, const char *verb, const npurt_kv_op *op);
void calsim_event(calsim_device *d, uint32_t kind, npurt_ticket ticket, uint32_t chip,
                  npurt_status code, const char *format, ...) __attribute__((format(printf, 6, 7)));
/* A host mistake: event, list entry, trace line; ends the process when strict. */
void calsim_violation(calsim_device *d, const calsim_job *job, npurt_status code,
                      const char *format, ...) __attribute__((format(printf, 4, 5)));
void calsim_log_free(calsim_log *log);

/* ---- calsim_plan.c, calsim_kinds.c, calsim_faults.c ------------------------------------ */

typedef enum calsim_point {
  CALSIM_AT_SUBMIT = 1,
  CALSIM_AT_H2D,
  CALSIM_AT_EXEC,
  CALSIM_AT_D2H,
  CALSIM_AT_VISIBLE, /* the job's end becomes known */
  CALSIM_AT_KV_CAN,
  CALSIM_AT_KV_APPLY_BEFORE, /* a list that reserves */
  CALSIM_AT_KV_APPLY_AFTER,  /* a list that commits, rolls back or releases */
  CALSIM_AT_COUNTERS,
  CALSIM_AT_POLL,
  CALSIM_AT_CONFIGURE, /* from here on armed at open */
  CALSIM_AT_RELEASE,
  CALSIM_AT_RESET,
  CALSIM_AT_HEALTH,
  CALSIM_AT_MEMORY,
  CALSIM_AT_TIME, /* the rule's own instant */
  CALSIM_POINTS
} calsim_point;
typedef enum calsim_fault_kind {
  CALSIM_SUBMIT_REJECT = 1,
  CALSIM_SUBMIT_INDETERMINATE,
  CALSIM_CSR_FAIL,
  CALSIM_CCU_EXCEPTION,
  CALSIM_HANG,
  CALSIM_SLOW,
  CALSIM_DMA_ERROR,
  CALSIM_NUMERIC_NAN, /* to NUMERIC_OFFSET: of logits */
  CALSIM_NUMERIC_GARBAGE,
  CALSIM_NUMERIC_CONSTANT,
  CALSIM_NUMERIC_OFFSET,
  CALSIM_STALE_OUTPUT,
  CALSIM_SWAPPED_OUTPUT,
  CALSIM_KV_STALE, /* to KV_BIT: of one position of a lane */
  CALSIM_KV_SWAP,
  CALSIM_KV_ZERO,
  CALSIM_KV_BIT,
  CALSIM_PAD_WRITE,
  CALSIM_UNHEALTHY, /* to DEVICE_LOST: of the device */
  CALSIM_STICKY,
  CALSIM_WEDGED,
  CALSIM_DEVICE_LOST,
  CALSIM_THERMAL,
  CALSIM_DRIFT,
  CALSIM_ILLEGAL_STEP,
  CALSIM_LOST_COMPLETION,
  CALSIM_LATE_COMPLETION,
  CALSIM_LATE_DMA,
  CALSIM_KV_APPLY_BEFORE,
  CALSIM_KV_APPLY_AFTER,
  CALSIM_KV_CAN_LIE,
  CALSIM_COUNTER_SKEW,
  CALSIM_COUNTER_STUCK,
  CALSIM_COUNTER_NEGATIVE,
  CALSIM_COUNTER_RESET,
  CALSIM_CONFIGURE_FAIL, /* to WARMUP_WRONG: of a configuration */
  CALSIM_CONFIGURE_PARTIAL_MEMORY,
  CALSIM_CONFIGURE_HANG,
  CALSIM_WARMUP_WRONG,
  CALSIM_RELEASE_LEAK, /* to RELEASE_SLOW: of a release */
  CALSIM_LEAK_UNTIL_DYNAMIC_CLEAR,
  CALSIM_LEAK_UNTIL_SOFT,
  CALSIM_RELEASE_SLOW,
  CALSIM_RESET_FAIL, /* to RESET_WIDE: of a reset */
  CALSIM_RESET_REFUSED,
  CALSIM_RESET_SLOW,
  CALSIM_RESET_OK_BUT_DEAD,
  CALSIM_RESET_PARTIAL,
  CALSIM_RESET_WIDE,
  CALSIM_HEALTH_BLOCK,
  CALSIM_MEMORY_SKEW,
  CALSIM_VERSION_MISMATCH,
  CALSIM_EPOCH_BUMP,
  CALSIM_OWNER_CHANGE,
  CALSIM_KINDS
} calsim_fault_kind;
typedef enum calsim_pick {
  CALSIM_PICK_ALL,
  CALSIM_PICK_NTH,
  CALSIM_PICK_EVERY,
  CALSIM_PICK_CHANCE
} calsim_pick;

typedef struct calsim_rule {
  char id[32];
  calsim_fault_kind kind;
  calsim_point point;
  calsim_pick pick;
  uint64_t n, count, skip; /* count UINT64_MAX: no bound */
  double chance;
  uint32_t task, engine, inflight_min; /* 0: any */
  int64_t lane;                        /* -1: any */
  char model[64];                      /* empty: any */
  uint64_t after_ns, until_ns;
  bool during_load, lasting; /* lasting: fires for ever unless count= says otherwise */
  /* what the kind does; each uses its own */
  npurt_status code;
  uint32_t chip, ccu_code, kv_effect, release_level; /* release_level 0: never */
  uint32_t number;                                   /* csr_fail: the register */
  bool quiesce, runs, poll_sees, numeric_flag, partial, outlives, tells, heeds;
  uint64_t pc, delay_ns, bytes, offset, lanes;
  double factor;
  int64_t amount;   /* tokens of kv_can_lie, n */
  uint32_t counter; /* calsim_counter_find */
  uint64_t held;    /* what that counter showed at the first firing */
  uint32_t from, to;
  int64_t position, victim; /* -1: none named */
  uint64_t tau_ns;
  int32_t rise_mdegc, limit_mdegc;
  uint32_t level;    /* of a reset; 0: any */
  uint32_t then;     /* reset_ok_but_dead: CALSIM_THEN_* */
  uint64_t effects;  /* reset_partial: that it keeps from happening; reset_wide: that it adds */
  uint64_t for_ns;   /* UINT64_MAX: without end */
  uint32_t field;    /* memory_skew, version_mismatch: which, from 0 */
  uint32_t pid;      /* owner_change */
  char version[64];
  uint64_t seen, matches, fired; /* since armed */
} calsim_rule;

typedef struct calsim_plan {
  calsim_rule *rules;
  uint32_t count;
  bool armed;
} calsim_plan;

npurt_status calsim_plan_parse(const char *text, calsim_rule **rules, uint32_t *count);
/* What a decision is about: a job, an operation list of a bank, a calbin, a reset, or nothing of
 * that. */
typedef struct calsim_occasion {
  const calsim_job *job;
  const calsim_bank *bank;
  const npurt_kv_op *ops;
  uint32_t stride, op_count;
  const calsim_calbin *calbin;
  uint32_t level;
} calsim_occasion;
extern const char *const CALSIM_POINT_NAMES[CALSIM_POINTS - 1];
/* The rule that fires at this point, or NULL; counts and traces every decision. Lock held. */
calsim_rule *calsim_fault_at(calsim_device *d, calsim_point point,
                             const calsim_occasion *occasion);
calsim_rule *calsim_job_fault_at(calsim_device *d, calsim_point point, const calsim_job *job);
/* Put the instants of rules on=time into the queue of events, for those of an earlier plan. */
void calsim_plan_instants(calsim_device *d);
/* The rule of that number, whose instant has come, if it fires. */
calsim_rule *calsim_time_fault(calsim_device *d, uint32_t number);
/* Change what is read as a rule that has just fired says. */
bool calsim_counter_find(const char *name, uint32_t *index);
void calsim_counter_change(npurt_counters *counters, calsim_rule *rule);
uint64_t calsim_mix(uint64_t x);

/* ---- calsim_calbin.c, calsim_buffer.c, calsim_memory.c --------------------------------- */

typedef struct calsim_chip {
  int fd; /* the chip's memory file */
  uint64_t bytes;
  uint8_t *map;                            /* NULL when bytes is 0 */
  uint64_t params, kv, workspace, dynamic; /* accounted */
  uint64_t busy_ns;
} calsim_chip;

typedef struct calsim_layout { /* byte addresses in the home chip's file */
  uint64_t tensor[CALSIM_BANKS][CALSIM_TENSORS];
  uint64_t kv, kv_lane_bytes, bytes; /* behind the last lane: the scratch lane, where the rule has
                                        one */
} calsim_layout;

struct calsim_calbin {
  calsim_device *device;
  void *handle;
  calsim_artifact *artifact;
  const calsim_manifest *m;
  calsim_account account;
  calsim_layout layout;
  calsim_workspace *workspace; /* while configured */
  uint32_t state, home_chip;
  bool spoilt; /* by warmup_wrong: computes nonsense while configured */
  uint64_t generation, configuration; /* configuration: numbered per device, for the trace */
  uint32_t children;                  /* buffers and banks */
};

typedef struct calsim_view { /* what a job transfers of one tensor */
  uint8_t *host;             /* NULL: not mapped */
  uint64_t bytes;
  uint32_t row_first, row_count, column_first, column_count;
} calsim_view;

struct calsim_buffer {
  calsim_calbin *calbin;
  void *handle;
  uint64_t generation;
  uint32_t submodel, direction, engine, rows;
  calsim_view views[CALSIM_TENSORS];
  calsim_job *job;   /* holds the buffer from accepted submit to retire */
  uint32_t restored; /* what buffer_restore was told since the last retire */
  uint64_t job_count;
  int32_t *left; /* with check reuse: tokens of the latest job [rows][columns], 0 elsewhere */
};

typedef struct calsim_tensor { /* shape of one tensor of a submodel */
  const char *name;
  uint32_t direction, dtype, element_bytes, rows, columns;
  uint32_t rank, slice_axes;
} calsim_tensor;

calsim_tensor calsim_tensor_of(const calsim_manifest *m, const calsim_submodel *s, uint32_t tensor);
uint64_t calsim_tensor_row_bytes(const calsim_tensor *t);
calsim_layout calsim_layout_of(const calsim_manifest *m);
npurt_status calsim_memory_attach(calsim_device *d, calsim_calbin *c);
void calsim_memory_detach(calsim_device *d, const calsim_calbin *c);
uint8_t *calsim_address(const calsim_calbin *c, uint32_t engine, uint32_t tensor);
/* Kernel copies for one job, without the device lock. A violation is reported through *gone (the
 * tensor). */
npurt_status calsim_transfer_in(calsim_job *job, uint32_t *gone);
npurt_status calsim_transfer_out(calsim_job *job, uint32_t *gone);
/* The job in flight of which a range overlaps this view, where one of the two is output; or NULL.
 */
const calsim_job *calsim_overlaps_in_flight(const calsim_device *d, const calsim_view *view,
                                            uint32_t direction);
/* Checks of memory in flight, where the configuration asks for them. Lock held: at an accepted
 * submit, and at retire. */
void calsim_check_submit(calsim_device *d, calsim_job *job);
void calsim_check_retire(calsim_device *d, const calsim_job *job);
/* Report what the transfers found; lock held. */
void calsim_check_report(calsim_device *d, calsim_job *job);
/* Write a job's tag to its output memory, as a transfer that nobody stopped would; without the
 * lock. */
npurt_status calsim_write_late(calsim_job *job);
bool calsim_views_overlap(const calsim_view *a, const calsim_view *b);
void calsim_calbin_free(calsim_calbin *c);
void calsim_buffer_free(calsim_buffer *b);
/* The device loses this configuration: LOST, memory gone; its bank, if any, is lost too. */
void calsim_calbin_drop(calsim_device *d, calsim_calbin *c, uint32_t state, bool keep_dynamic);

/* ---- calsim_leaks.c: accounted memory that is not given back ---------------------------- */

typedef struct calsim_leak {
  uint32_t chip;
  uint64_t bytes, ended_by; /* ended_by: an effect of a reset, 0: none */
  uint64_t until_ns;        /* falls by itself then; UINT64_MAX: never */
} calsim_leak;

/* Accounted bytes in use on a chip, leaks included; bytes of leaks that an effect would end (0:
 * those that none does, or time). */
uint64_t calsim_chip_used(calsim_device *d, uint32_t chip);
uint64_t calsim_leaked(calsim_device *d, uint32_t chip, uint64_t ended_by);
/* Leak up to so many bytes, as far as the chip has room. */
void calsim_leak_add(calsim_device *d, calsim_leak leak);
/* End what these effects end; true if there was any. */
bool calsim_leaks_end(calsim_device *d, uint64_t effects);

/* ---- calsim_kv.c ----------------------------------------------------------------------- */

typedef struct calsim_lane {
  uint32_t bound, committed, reserved, certainty;
  uint32_t written;      /* length up to which the latest job left the lane's KV good */
  uint32_t touched;      /* length up to which anything was ever written since the lane was wiped */
  uint64_t seq_tag, txn; /* txn 0: no reservation */
} calsim_lane;

struct calsim_bank {
  calsim_calbin *calbin;
  void *handle;
  uint64_t generation;
  uint32_t layout, lane_count;
  calsim_lane *lanes;
};

const npurt_kv_op *calsim_kv_op_at(const npurt_kv_op *ops, uint32_t stride, uint32_t i);
bool calsim_bank_lost(const calsim_bank *bank);
float *calsim_lane_kv(const calsim_bank *bank, uint32_t lane);
void calsim_bank_all_unknown(calsim_bank *bank);
void calsim_bank_free(calsim_bank *bank);

/* ---- calsim_jobs.c, calsim_phases.c, calsim_engine.c, calsim_clock.c, calsim_compute.c --- */

typedef struct calsim_capture {
  float *logits;      /* [tokens][vocab] over all rows */
  int32_t *route_idx; /* [tokens][layers][experts_per_token] */
  float *route_weight;
  uint64_t first[CALSIM_MAX_ROWS]; /* token index of each row's first token */
} calsim_capture;

typedef struct calsim_damage { /* what a fault does to numbers; kind 0: nothing */
  calsim_fault_kind kind;
  uint64_t lanes, amount;
  int64_t lane, position, victim;
  bool flag;
  float *saved; /* what was there before */
} calsim_damage;

typedef struct calsim_end { /* how a job ends */
  uint32_t state, kv_effect, flags;
  npurt_status status;
} calsim_end;

struct calsim_job {
  calsim_device *device;
  npurt_ticket ticket;
  uint64_t ordinal; /* of the device, from 1 */
  uint64_t client_tag, kv_txn, generation, epoch;
  calsim_calbin *calbin;
  const calsim_submodel *submodel;
  calsim_bank *bank;
  calsim_buffer *in, *out;
  calsim_view views[CALSIM_TENSORS];
  uint32_t engine, row_count, priority;
  npurt_lane rows[CALSIM_MAX_ROWS];
  uint64_t bytes_in, bytes_out;
  calsim_cost cost;
  calsim_capture capture;
  uint32_t state, flags, kv_effect;
  npurt_status status;
  uint64_t rows_done;
  npurt_times times;
  npurt_ccu_exception ccu;
  bool working; /* in a phase, or about to begin the first; else it waits for its next one */
  bool over;    /* has left its last phase, known or not */
  bool cancelled; /* while it ran: it ends with its phase */
  /* the faults that this job carries */
  bool faulty, fault_quiesces, hung;
  uint32_t fault_kv, release_level;
  bool doubtful, never_runs; /* by submit_indeterminate */
  bool unseen_by_wait;       /* by lost_completion: only poll and result show the end */
  bool outlives;             /* by late_completion: a reset does not stop it */
  bool dma_fails;
  calsim_damage damage;
  uint64_t dma_left, late_bytes; /* dma_left: bytes until the transfer fails */
  calsim_end end;                           /* while a late end is pending */
  /* checks */
  uint64_t input_hash[CALSIM_LOGITS]; /* at submit; 0: not known */
  uint32_t tagged, touched;           /* bit i: tensor i got the tag; was touched in flight */
  /* results of the phase that runs without the lock */
  bool numeric;
  uint32_t rows_touched; /* active rows begun, the last of them perhaps in part */
  char reason[128];
  atomic_bool abort; /* a reset or close wants the phase to end early */
};

/* calsim_carry.c: take on a fault of a phase, or one of the device; *cost is what the phase takes.
 * What lasts beyond the rule that began it; what ends with a reset of this level; the heat that an
 * EXEC leaves; how warm the chips are now. */
void calsim_carry_fault(calsim_device *d, calsim_job *job, const calsim_rule *rule, uint64_t *cost);
void calsim_carry_lasting(const calsim_device *d, calsim_job *job);
void calsim_carry_instant(calsim_device *d, uint32_t rule);
/* What a rule of points submit, health or time does to the board. */
void calsim_carry_device(calsim_device *d, const calsim_rule *rule);
/* unhealthy, sticky, wedged or device_lost, from now on. */
void calsim_fall_sick(calsim_device *d, const calsim_rule *rule);
bool calsim_is_sick(const calsim_device *d); /* by unhealthy, sticky, wedged or device_lost */
void calsim_cure(calsim_device *d, uint32_t level);
void calsim_heat_end(calsim_device *d);
int32_t calsim_temperature(calsim_device *d);
/* calsim_damage.c: rows of the batch that are not active; what is kept before the forward (false:
 * no memory) and done after it. */
uint32_t calsim_pads(const calsim_job *job);
bool calsim_damage_before(calsim_job *job);
void calsim_damage_after(calsim_job *job);
/* Phase EXEC without the lock: KV and logits in device memory. */
npurt_status calsim_compute(calsim_job *job);
npurt_status calsim_capture_allocate(calsim_job *job);
void calsim_job_free(calsim_job *job);
calsim_job *calsim_job_of(const calsim_device *d, npurt_ticket ticket);
/* A job that still may touch this lane: not terminal, or not quiescent (or only not terminal). */
const calsim_job *calsim_job_on_lane(const calsim_device *d, const calsim_bank *bank, uint32_t lane,
                                     bool terminal_is_enough);
uint32_t calsim_in_flight(const calsim_device *d);

typedef struct calsim_pending {
  uint64_t time, seq;
  uint32_t kind; /* NPURT_SIM_EVENT_* */
  calsim_job *job; /* NULL: of the device, or of a job that was retired */
  npurt_ticket ticket; /* of that job */
  uint32_t rule;       /* NPURT_SIM_EVENT_FAULT */
} calsim_pending;

bool calsim_is_real(const calsim_device *d);
uint64_t calsim_now(const calsim_device *d);
uint64_t calsim_host_now(void);
uint64_t calsim_host_ns_of(const calsim_device *d, uint64_t device_ns);
/* Host time (CLOCK_MONOTONIC) at which a real device clock shows this. */
struct timespec calsim_host_time(const calsim_device *d, uint64_t device_ns);
/* So much later than now. */
struct timespec calsim_host_in(uint64_t ns);
npurt_status calsim_engine_start(calsim_device *d);
void calsim_engine_stop(calsim_device *d);
/* Let every job go on whose next phase has its resources free. */
void calsim_engine_next(calsim_device *d);
/* The hypothesis in force: that of the configuration, or none with parallel mode off. */
int calsim_overlap(const calsim_device *d);
bool calsim_computes(const calsim_device *d);
void calsim_push(calsim_device *d, calsim_job *job, uint32_t kind, uint64_t time);
/* An event of the device, due at the instant of a rule. */
void calsim_push_instant(calsim_device *d, uint32_t rule, uint64_t time);
void calsim_forget_instants(calsim_device *d);
/* Let device time pass within a call: a stepped clock jumps, a real one is slept through without
 * the lock. False when the device is being closed. */
bool calsim_spend(calsim_device *d, uint64_t ns);
/* The earliest event of a bank (0: of the device), or NULL. */
const calsim_pending *calsim_earliest(const calsim_device *d, uint32_t bank);
/* Fire that event; returns its kind. Lock held before and after, not during the work. A job that is
 * to be given up meanwhile is left as it is, for the reset that asked. */
uint32_t calsim_fire(calsim_device *d, uint32_t bank);
/* Begin a phase; what follows a phase's end. */
void calsim_enter(calsim_device *d, calsim_job *job, uint32_t state);
void calsim_settle(calsim_device *d, calsim_job *job, uint32_t kind, npurt_status status,
                   uint32_t tensor);
void calsim_job_end(calsim_device *d, calsim_job *job, uint32_t state, npurt_status status,
                    uint32_t kv_effect, uint32_t flags);
void calsim_forget_events(calsim_device *d, const calsim_job *job);
/* The same at retire; but a late end that outlives resets is still told, of nobody's job. */
void calsim_retire_events(calsim_device *d, const calsim_job *job);
/* End every job that a reset of this level with these effects can end; returns how many, and how
 * many it cannot account for. */
uint32_t calsim_abort_jobs(calsim_device *d, uint32_t level, uint64_t effects,
                           uint32_t *unaccounted);
/* Does a transfer or a forward run? Wait until none does. */
bool calsim_is_busy(const calsim_device *d);
void calsim_wait_not_busy(calsim_device *d);

/* ---- calsim_board.c -------------------------------------------------------------------- */

typedef struct calsim_worker { /* the thread that takes the jobs of one command bank through */
  calsim_device *device;
  uint32_t bank; /* as `engine` of a job: 1, 2 */
  bool runs;
  pthread_t thread;
} calsim_worker;

typedef struct calsim_thermal { /* with a thermal fault; tau_ns 0: none has fired */
  double mdegc;
  uint64_t seen_ns, tau_ns;
  int32_t rise_mdegc;
  bool throttled;
} calsim_thermal;

struct calsim_device {
  pthread_mutex_t lock;
  pthread_cond_t changed; /* a job, the clock or the device changed */
  pthread_cond_t work;    /* the engine thread has something to do */
  uint32_t users;         /* threads inside; guarded by the registry's lock */
  void *handle;
  calsim_objects objects;
  calsim_config config;
  npurt_cap caps[CALSIM_CAPS];
  uint32_t chip_mask;
  calsim_chip chips[CALSIM_CHIPS];
  int scratch_fd; /* what checks read host memory through: a piece for the lock's holder, then one
                     for each bank's phase that runs without it */
  uint8_t *scratch;
  /* clock: device time now (manual), or at base_host_ns (real) */
  uint64_t base_ns, base_host_ns;
  double scale;
  /* engine */
  calsim_worker workers[CALSIM_BANKS]; /* with a real clock */
  bool closing, resetting, configuring, parallel;
  bool busy[CALSIM_BANKS];
  calsim_pending pending[CALSIM_MAX_PENDING];
  uint32_t pending_count, in_flight_ceiling;
  uint64_t next_pending_seq;
  calsim_job *jobs[CALSIM_MAX_JOBS]; /* in ticket order */
  uint32_t job_count;
  uint64_t next_ordinal, next_configuration;
  calsim_calbin *configured;
  calsim_bank *bank; /* of the configured calbin */
  calsim_plan plan;
  calsim_log log;
  /* state that health, counters and resets report */
  uint64_t epoch, last_progress_ns;
  uint32_t health, advised, chip_health[CALSIM_CHIPS];
  npurt_status sticky; /* not OK: every submit fails with it */
  uint32_t cure_level; /* of the reset that ends sticky and sickness; 0: none does */
  calsim_fault_kind curse; /* what a reset that helped nothing does to every job; 0: nothing */
  uint32_t curse_level;    /* of the reset that ends it; 0: none does */
  uint32_t told_field; /* of versions, from 1, which the device tells otherwise now; 0: none */
  char told_version[64];
  calsim_thermal thermal;
  npurt_counters totals; /* pending, running, left and inflight are computed */
  bool level1_done;      /* and nothing submitted since */
  bool reset_stamped[5];
  uint64_t reset_stamp_ns[5];
  calsim_leak leaks[CALSIM_MAX_LEAKS];
  uint32_t leak_count;
  uint32_t foreign_pid; /* another process has the board until then; 0: it is ours */
  uint64_t foreign_until_ns;
  int shared_fd; /* with board=, else -1 */
  uint32_t shared_owner;
};

/* calsim_levels.c: what each reset level does and claims; words for effects, joined by +. */
void calsim_scopes_default(calsim_config *config);
/* `value` as the key of a level: what it does, or, claims, what it says. */
bool calsim_scope_take(calsim_scope *scope, bool claims, const char *value);
bool calsim_effects_take(const char *value, uint64_t *effects);

/* calsim_reset.c: another process resets the board; with the lock, nothing running in the caller. */
void calsim_foreign_reset(calsim_device *d, uint32_t pid);
/* calsim_owner.c: OK, or DEVICE_OWNED while another process has the board. */
npurt_status calsim_check_owner(calsim_device *d);
void calsim_take_away(calsim_device *d, const calsim_rule *rule);
void calsim_describe_now(calsim_device *d, npurt_device_desc *out);

/* calsim_shared.c: open and close what a board shares with other processes; has another one reset
 * it? Take notice of that, with nothing running in the caller; the next epoch, or, foreign, the one
 * that another process began. */
npurt_status calsim_shared_open(calsim_device *d, bool exclusive);
void calsim_shared_close(calsim_device *d);
bool calsim_shared_moved(const calsim_device *d);
void calsim_shared_sync(calsim_device *d);
uint64_t calsim_shared_epoch(calsim_device *d, bool foreign);

/* calsim_caps.c: take the answers of the configuration or its persona. */
npurt_status calsim_caps_load(calsim_device *d);
void calsim_describe(const calsim_config *config, npurt_device_desc *out);
void calsim_health_set(calsim_device *d, uint32_t state, uint32_t advised, uint32_t chip);
#endif
