/* calsim_kinds.c - the kinds of faults: where each may happen, and what it is unless its rule says
 * otherwise. Their own keys: calsim_keys.c. */
#include "calsim_plan.h"
#include <string.h>

enum {
  IN_SUBMIT = 1 << CALSIM_AT_SUBMIT,
  IN_EXEC = 1 << CALSIM_AT_EXEC,
  IN_COPIES = 1 << CALSIM_AT_H2D | 1 << CALSIM_AT_D2H,
  IN_PHASES = IN_COPIES | IN_EXEC,
  IN_END = 1 << CALSIM_AT_VISIBLE,
  IN_CONFIGURE = 1 << CALSIM_AT_CONFIGURE,
  IN_RELEASE = 1 << CALSIM_AT_RELEASE,
  IN_RESET = 1 << CALSIM_AT_RESET,
  IN_HEALTH = 1 << CALSIM_AT_HEALTH,
  IN_TIME = 1 << CALSIM_AT_TIME,
  IN_CALLS = IN_SUBMIT | IN_HEALTH | IN_TIME, /* where a board may change under the host's hands */
  IN_SICKNESS = IN_PHASES | IN_CALLS
};
/* Points that know the job, and those that know a model. */
enum {
  KNOW_JOB = IN_SUBMIT | IN_PHASES | IN_END | 1 << CALSIM_AT_POLL,
  KNOW_LANE = KNOW_JOB | 1 << CALSIM_AT_KV_CAN | 1 << CALSIM_AT_KV_APPLY_BEFORE |
              1 << CALSIM_AT_KV_APPLY_AFTER,
  KNOW_MODEL = KNOW_LANE | IN_CONFIGURE | IN_RELEASE
};

/* Each kind, where it may happen (bits), and where it does unless the rule says so (0: it must). */
static const struct {
  const char *name;
  uint32_t points;
  calsim_point usual;
} KINDS[] = {
    [CALSIM_SUBMIT_REJECT] = {"submit_reject", IN_SUBMIT, CALSIM_AT_SUBMIT},
    [CALSIM_SUBMIT_INDETERMINATE] = {"submit_indeterminate", IN_SUBMIT, CALSIM_AT_SUBMIT},
    [CALSIM_CSR_FAIL] = {"csr_fail", IN_SUBMIT, CALSIM_AT_SUBMIT},
    [CALSIM_CCU_EXCEPTION] = {"ccu_exception", IN_EXEC, CALSIM_AT_EXEC},
    [CALSIM_HANG] = {"hang", IN_PHASES, 0},
    [CALSIM_SLOW] = {"slow", IN_PHASES, CALSIM_AT_EXEC},
    [CALSIM_DMA_ERROR] = {"dma_error", IN_COPIES, 0},
    [CALSIM_NUMERIC_NAN] = {"numeric_nan", IN_EXEC, CALSIM_AT_EXEC},
    [CALSIM_NUMERIC_GARBAGE] = {"numeric_garbage", IN_EXEC, CALSIM_AT_EXEC},
    [CALSIM_NUMERIC_CONSTANT] = {"numeric_constant", IN_EXEC, CALSIM_AT_EXEC},
    [CALSIM_NUMERIC_OFFSET] = {"numeric_offset", IN_EXEC, CALSIM_AT_EXEC},
    [CALSIM_STALE_OUTPUT] = {"stale_output", IN_EXEC, CALSIM_AT_EXEC},
    [CALSIM_SWAPPED_OUTPUT] = {"swapped_output", 1 << CALSIM_AT_D2H, CALSIM_AT_D2H},
    [CALSIM_KV_STALE] = {"kv_stale", IN_EXEC, CALSIM_AT_EXEC},
    [CALSIM_KV_SWAP] = {"kv_swap", IN_EXEC, CALSIM_AT_EXEC},
    [CALSIM_KV_ZERO] = {"kv_zero", IN_EXEC, CALSIM_AT_EXEC},
    [CALSIM_KV_BIT] = {"kv_bit", IN_EXEC, CALSIM_AT_EXEC},
    [CALSIM_PAD_WRITE] = {"pad_write", IN_EXEC, CALSIM_AT_EXEC},
    [CALSIM_UNHEALTHY] = {"unhealthy", IN_SICKNESS, CALSIM_AT_EXEC},
    [CALSIM_STICKY] = {"sticky", IN_SICKNESS, CALSIM_AT_EXEC},
    [CALSIM_WEDGED] = {"wedged", IN_SICKNESS, CALSIM_AT_EXEC},
    [CALSIM_DEVICE_LOST] = {"device_lost", IN_SICKNESS, CALSIM_AT_EXEC},
    [CALSIM_THERMAL] = {"thermal", IN_EXEC, CALSIM_AT_EXEC},
    [CALSIM_DRIFT] = {"drift", IN_EXEC, CALSIM_AT_EXEC},
    [CALSIM_ILLEGAL_STEP] = {"illegal_step", 1 << CALSIM_AT_POLL, CALSIM_AT_POLL},
    [CALSIM_LOST_COMPLETION] = {"lost_completion", IN_END, CALSIM_AT_VISIBLE},
    [CALSIM_LATE_COMPLETION] = {"late_completion", IN_END, CALSIM_AT_VISIBLE},
    [CALSIM_LATE_DMA] = {"late_dma", IN_END, CALSIM_AT_VISIBLE},
    [CALSIM_KV_APPLY_BEFORE] = {"kv_apply_before", 1 << CALSIM_AT_KV_APPLY_BEFORE,
                                CALSIM_AT_KV_APPLY_BEFORE},
    [CALSIM_KV_APPLY_AFTER] = {"kv_apply_after", 1 << CALSIM_AT_KV_APPLY_AFTER,
                               CALSIM_AT_KV_APPLY_AFTER},
    [CALSIM_KV_CAN_LIE] = {"kv_can_lie", 1 << CALSIM_AT_KV_CAN, CALSIM_AT_KV_CAN},
    [CALSIM_COUNTER_SKEW] = {"counter_skew", 1 << CALSIM_AT_COUNTERS, CALSIM_AT_COUNTERS},
    [CALSIM_COUNTER_STUCK] = {"counter_stuck", 1 << CALSIM_AT_COUNTERS, CALSIM_AT_COUNTERS},
    [CALSIM_COUNTER_NEGATIVE] = {"counter_negative", 1 << CALSIM_AT_COUNTERS, CALSIM_AT_COUNTERS},
    [CALSIM_COUNTER_RESET] = {"counter_reset", 1 << CALSIM_AT_COUNTERS, CALSIM_AT_COUNTERS},
    [CALSIM_CONFIGURE_FAIL] = {"configure_fail", IN_CONFIGURE, CALSIM_AT_CONFIGURE},
    [CALSIM_CONFIGURE_PARTIAL_MEMORY] = {"configure_partial_memory", IN_CONFIGURE,
                                         CALSIM_AT_CONFIGURE},
    [CALSIM_CONFIGURE_HANG] = {"configure_hang", IN_CONFIGURE, CALSIM_AT_CONFIGURE},
    [CALSIM_WARMUP_WRONG] = {"warmup_wrong", IN_CONFIGURE, CALSIM_AT_CONFIGURE},
    [CALSIM_RELEASE_LEAK] = {"release_leak", IN_RELEASE, CALSIM_AT_RELEASE},
    [CALSIM_LEAK_UNTIL_DYNAMIC_CLEAR] = {"leak_until_dynamic_clear", IN_RELEASE,
                                         CALSIM_AT_RELEASE},
    [CALSIM_LEAK_UNTIL_SOFT] = {"leak_until_soft", IN_RELEASE, CALSIM_AT_RELEASE},
    [CALSIM_RELEASE_SLOW] = {"release_slow", IN_RELEASE, CALSIM_AT_RELEASE},
    [CALSIM_RESET_FAIL] = {"reset_fail", IN_RESET, CALSIM_AT_RESET},
    [CALSIM_RESET_REFUSED] = {"reset_refused", IN_RESET, CALSIM_AT_RESET},
    [CALSIM_RESET_SLOW] = {"reset_slow", IN_RESET, CALSIM_AT_RESET},
    [CALSIM_RESET_OK_BUT_DEAD] = {"reset_ok_but_dead", IN_RESET, CALSIM_AT_RESET},
    [CALSIM_RESET_PARTIAL] = {"reset_partial", IN_RESET, CALSIM_AT_RESET},
    [CALSIM_RESET_WIDE] = {"reset_wide", IN_RESET, CALSIM_AT_RESET},
    [CALSIM_HEALTH_BLOCK] = {"health_block", IN_HEALTH, CALSIM_AT_HEALTH},
    [CALSIM_MEMORY_SKEW] = {"memory_skew", 1 << CALSIM_AT_MEMORY, CALSIM_AT_MEMORY},
    [CALSIM_VERSION_MISMATCH] = {"version_mismatch", IN_RESET | IN_TIME, CALSIM_AT_RESET},
    [CALSIM_EPOCH_BUMP] = {"epoch_bump", IN_CALLS, CALSIM_AT_SUBMIT},
    [CALSIM_OWNER_CHANGE] = {"owner_change", IN_CALLS, CALSIM_AT_SUBMIT},
};

const char *calsim_kind_name(calsim_fault_kind kind) { return KINDS[kind].name; }

bool calsim_kind_at(calsim_fault_kind kind, calsim_point point) {
  return (KINDS[kind].points >> point & 1) != 0;
}

/* Does a rule of this kind go on firing unless it says how often? */
static bool lasts(calsim_fault_kind kind) {
  return kind == CALSIM_THERMAL || kind == CALSIM_DRIFT || kind == CALSIM_COUNTER_STUCK ||
         kind == CALSIM_COUNTER_RESET;
}

static bool leaks(calsim_fault_kind kind) {
  return kind == CALSIM_CONFIGURE_PARTIAL_MEMORY || kind == CALSIM_RELEASE_LEAK ||
         kind == CALSIM_LEAK_UNTIL_DYNAMIC_CLEAR || kind == CALSIM_LEAK_UNTIL_SOFT;
}

/* The level of the reset that ends it, unless the rule says so. */
static uint32_t release_of(calsim_fault_kind kind) {
  switch (kind) {
    case CALSIM_UNHEALTHY: return CALSIM_CCU;
    case CALSIM_CONFIGURE_PARTIAL_MEMORY:
    case CALSIM_LEAK_UNTIL_DYNAMIC_CLEAR: return CALSIM_DYNAMIC_MEM;
    case CALSIM_STICKY:
    case CALSIM_WEDGED:
    case CALSIM_DEVICE_LOST:
    case CALSIM_LEAK_UNTIL_SOFT:
    case CALSIM_RESET_OK_BUT_DEAD: return CALSIM_DEVICE_SOFT;
    default: return 0;
  }
}

static void set_defaults(calsim_rule *rule) {
  calsim_fault_kind kind = rule->kind;
  bool kv = kind == CALSIM_KV_APPLY_BEFORE || kind == CALSIM_KV_APPLY_AFTER;
  rule->code = kv                              ? NPURT_E_KV_APPLY
               : kind == CALSIM_STICKY         ? NPURT_E_STICKY
               : kind == CALSIM_WEDGED         ? NPURT_E_DEVICE_WEDGED
               : kind == CALSIM_DEVICE_LOST    ? NPURT_E_DEVICE_LOST
               : kind == CALSIM_CONFIGURE_FAIL ? NPURT_E_CONFIGURE_FAILED
               : kind == CALSIM_RESET_FAIL     ? NPURT_E_RESET_FAILED
                                               : NPURT_E_SUBMIT_REJECTED;
  rule->release_level = release_of(kind);
  rule->ccu_code = 1;
  rule->quiesce = rule->runs = rule->poll_sees = true;
  rule->kv_effect = CALSIM_KV_NONE;
  rule->numeric_flag = kind == CALSIM_NUMERIC_NAN;
  rule->lanes = UINT64_MAX;
  rule->bytes = kind == CALSIM_DRIFT ? 0 : leaks(kind) ? 100u << 20 : 64;
  rule->amount = 1;
  rule->position = rule->victim = -1;
  rule->tau_ns = 10000000000u;
  rule->rise_mdegc = 50000;
  rule->limit_mdegc = 80000;
  rule->factor = kind == CALSIM_THERMAL ? 2 : 1;
  rule->lasting = lasts(kind);
  rule->for_ns = UINT64_MAX;
  rule->heeds = true;
  rule->tells = kind == CALSIM_RESET_WIDE;
  rule->pid = 1;
}

calsim_fault_kind calsim_take_kind(const char *name, calsim_rule *rule) {
  for (uint32_t kind = CALSIM_SUBMIT_REJECT; kind < CALSIM_KINDS; ++kind) {
    if (strcmp(name, KINDS[kind].name) != 0) continue;
    rule->kind = (calsim_fault_kind)kind;
    set_defaults(rule);
    return rule->kind;
  }
  return 0;
}

/* ---- the whole rule -------------------------------------------------------------------- */

/* Filters that mean nothing where there is no job, lane or model; levels are of resets. */
static bool filters_fit(calsim_line *s, calsim_rule *rule) {
  uint32_t here = 1u << rule->point;
  bool lane = (here & KNOW_LANE) != 0, model = (here & KNOW_MODEL) != 0;
  if (rule->level != 0 && rule->point != CALSIM_AT_RESET)
    return calsim_wrong(s, "level= is for on=reset");
  if (rule->point == CALSIM_AT_TIME && !calsim_has_key(s, "after"))
    return calsim_wrong(s, "on=time needs after=");
  rule->during_load |= rule->point >= CALSIM_AT_CONFIGURE;
  if ((here & KNOW_JOB) != 0 || (rule->task == 0 && rule->engine == 0 &&
                                 (lane || rule->lane < 0) && (model || rule->model[0] == '\0')))
    return true;
  return calsim_wrong(s, "kind=%s is about no job: no task=, engine=%s", KINDS[rule->kind].name,
                      lane    ? ""
                      : model ? " or lane="
                              : ", lane= or model=");
}

bool calsim_complete_rule(calsim_line *s, calsim_rule *rule) {
  bool kv = rule->kind == CALSIM_KV_APPLY_BEFORE || rule->kind == CALSIM_KV_APPLY_AFTER;
  if (rule->point == 0 && rule->kind == CALSIM_HANG)
    return calsim_wrong(s, "a hang needs phase= or on=");
  if (rule->point == 0) rule->point = KINDS[rule->kind].usual;
  if (rule->point == 0) return calsim_wrong(s, "a dma_error needs dir= or on=");
  if (!calsim_needs_are_there(s, rule)) return false;
  if (rule->kind == CALSIM_DRIFT && !calsim_has_key(s, "percent") && !calsim_has_key(s, "bytes"))
    return calsim_wrong(s, "drift needs percent= or bytes=");
  if (rule->kind == CALSIM_DRIFT && !calsim_has_key(s, "percent")) rule->factor = 0;
  if (rule->kind == CALSIM_ILLEGAL_STEP && rule->from == rule->to)
    return calsim_wrong(s, "from= and to= are the same state");
  if (rule->kind == CALSIM_CONFIGURE_HANG && !rule->heeds && rule->for_ns == UINT64_MAX)
    return calsim_wrong(s, "heeds=n needs for=");
  if (kv && rule->partial && !calsim_has_key(s, "code")) rule->code = NPURT_E_KV_UNKNOWN;
  if (kv && rule->partial != (rule->code == NPURT_E_KV_UNKNOWN))
    return calsim_wrong(s, "partial=y goes with code=0x704 and with no other");
  return filters_fit(s, rule);
}
