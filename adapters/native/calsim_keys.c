/* calsim_keys.c - the keys that belong to a kind of fault: what each takes, and which a kind cannot do
 * without. */
#include "calsim_plan.h"
#include <string.h>

typedef bool taker(calsim_line *s, calsim_rule *rule, const char *key, const char *value);

static bool take_code(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  uint32_t code;
  if (!calsim_take_small(s, key, value, 0xffff, &code)) return false;
  rule->code = (npurt_status)code;
  return true;
}

static bool take_reject_code(calsim_line *s, calsim_rule *rule, const char *key,
                             const char *value) {
  if (!take_code(s, rule, key, value)) return false;
  uint32_t code = (uint32_t)rule->code, class = code >> 8;
  if ((class >= 1 && class <= 3 && (code & 0xff) != 0) || code == NPURT_E_SUBMIT_REJECTED ||
      code == NPURT_E_CSR_FAILED)
    return true;
  return calsim_wrong(
      s, "code=%s: a rejected submit has a code of class 1 to 3, 0x601 or 0x603", value);
}

static bool take_kv_code(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  if (!take_code(s, rule, key, value)) return false;
  if (rule->code == NPURT_E_KV_NO_SPACE || rule->code == NPURT_E_KV_APPLY ||
      rule->code == NPURT_E_KV_UNKNOWN)
    return true;
  return calsim_wrong(s, "code=%s: a list that is not applied has code 0x304, 0x703 or 0x704",
                      value);
}

static bool take_device_code(calsim_line *s, calsim_rule *rule, const char *key,
                             const char *value) {
  if (!take_code(s, rule, key, value)) return false;
  if (rule->code >> 8 == 0x08 && (rule->code & 0xff) != 0) return true;
  return calsim_wrong(s, "code=%s: a device refuses with a code of class 8", value);
}

static bool take_runs(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  uint32_t answer;
  if (!calsim_take_either(s, key, value, "yes", "no", &answer)) return false;
  rule->runs = answer == 1;
  return true;
}

static bool take_number(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_take_small(s, key, value, UINT32_MAX, &rule->number);
}

static bool take_chip(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_take_small(s, key, value, CALSIM_CHIPS - 1, &rule->chip);
}

static bool take_ccu_code(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_take_small(s, key, value, UINT32_MAX, &rule->ccu_code);
}

static bool take_pc(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_take_count(s, key, value, 0, UINT64_MAX, &rule->pc);
}

static bool take_quiesce(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_take_yes(s, key, value, &rule->quiesce);
}

static bool take_effect(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  static const char *const effects[] = {"none", "applied", "partial", "unknown"};
  int effect = calsim_index_in(value, effects, 4);
  if (effect < 0 || effect == CALSIM_KV_APPLIED)
    return calsim_wrong(s, "%s=%s: expected none, partial or unknown", key, value);
  rule->kv_effect = (uint32_t)effect;
  return true;
}

static bool take_release(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  static const char *const releases[] = {"never", "reset1", "reset2", "reset3", "reset4"};
  int level = calsim_index_in(value, releases, 5);
  rule->release_level = (uint32_t)level;
  return level >= 0 ||
         calsim_wrong(s, "%s=%s: expected never or reset1 .. reset4", key, value);
}

static bool take_factor(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  if (calsim_parse_real(value, &rule->factor) && rule->factor >= 1 && rule->factor <= 1e12)
    return true;
  return calsim_wrong(s, "%s=%s: expected a number from 1 to 1e12", key, value);
}

static bool take_percent(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  if (calsim_parse_real(value, &rule->factor) && rule->factor <= 1e12) return true;
  return calsim_wrong(s, "%s=%s: expected a number from 0 to 1e12", key, value);
}

static bool take_offset(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_take_count(s, key, value, 0, UINT64_MAX, &rule->offset);
}

static bool take_lanes(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  rule->lanes = UINT64_MAX;
  return strcmp(value, "all") == 0 ||
         calsim_take_count(s, key, value, 1, UINT64_MAX, &rule->lanes);
}

static bool take_flag(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_take_yes(s, key, value, &rule->numeric_flag);
}

static bool take_shift(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  uint64_t by;
  if (!calsim_take_count(s, key, value, 1, UINT32_MAX, &by)) return false;
  rule->amount = (int64_t)by;
  return true;
}

static bool take_position(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  uint64_t at;
  if (!calsim_take_count(s, key, value, 0, UINT32_MAX, &at)) return false;
  rule->position = (int64_t)at;
  return true;
}

static bool take_victim(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  uint64_t lane;
  if (!calsim_take_count(s, key, value, 0, CALSIM_MAX_LANES - 1, &lane)) return false;
  rule->victim = (int64_t)lane;
  return true;
}

static bool take_poll_sees(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_take_yes(s, key, value, &rule->poll_sees);
}

static bool take_bytes(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_take_count(s, key, value, 1, 1 << 30, &rule->bytes);
}

static bool take_delay(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_take_time(s, key, value, &rule->delay_ns);
}

static bool take_tau(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  if (!calsim_take_time(s, key, value, &rule->tau_ns)) return false;
  return rule->tau_ns > 0 || calsim_wrong(s, "%s=%s: more than nothing is wanted", key, value);
}

static bool take_degrees(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  uint64_t degrees;
  if (!calsim_take_count(s, key, value, 1, 1000, &degrees)) return false;
  *(strcmp(key, "rise") == 0 ? &rule->rise_mdegc : &rule->limit_mdegc) = (int32_t)degrees * 1000;
  return true;
}

static bool take_outlives(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_take_yes(s, key, value, &rule->outlives);
}

static bool take_tells(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_take_yes(s, key, value, &rule->tells);
}

static bool take_heeds(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_take_yes(s, key, value, &rule->heeds);
}

static bool take_for(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_take_time(s, key, value, &rule->for_ns);
}

static bool take_effects(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_effects_take(value, &rule->effects) ||
         calsim_wrong(s, "%s=%s: expected effects joined by +, such as new_epoch", key, value);
}

static bool take_then(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  static const char *const ends[] = {"lost", "hang", "garbage"};
  int then = calsim_index_in(value, ends, 3);
  rule->then = (uint32_t)then;
  return then >= 0 || calsim_wrong(s, "%s=%s: expected lost, hang or garbage", key, value);
}

static bool take_leaking_release(calsim_line *s, calsim_rule *rule, const char *key,
                                 const char *value) {
  static const char *const releases[] = {"never", "reset3", "reset4"};
  static const uint32_t levels[] = {0, CALSIM_DYNAMIC_MEM, CALSIM_DEVICE_SOFT};
  int found = calsim_index_in(value, releases, 3);
  if (found < 0)
    return calsim_wrong(s, "%s=%s: expected never, reset3 or reset4", key, value);
  rule->release_level = levels[found];
  return true;
}

static bool take_configure_code(calsim_line *s, calsim_rule *rule, const char *key,
                                const char *value) {
  if (!take_code(s, rule, key, value)) return false;
  uint32_t class = (uint32_t)rule->code >> 8;
  if ((class == 3 || class == 7 || class == 8) && (rule->code & 0xff) != 0) return true;
  return calsim_wrong(s, "code=%s: a configuration fails with a code of class 3, 7 or 8", value);
}

static bool take_memory_field(calsim_line *s, calsim_rule *rule, const char *key,
                              const char *value) {
  static const char *const fields[] = {"total",     "used",    "params",     "kv",
                                       "workspace", "dynamic", "unaccounted"};
  int field = calsim_index_in(value, fields, 7);
  rule->field = (uint32_t)field;
  return field >= 0 || calsim_wrong(s, "%s=%s is not a figure of memory", key, value);
}

static bool take_version_field(calsim_line *s, calsim_rule *rule, const char *key,
                               const char *value) {
  static const char *const fields[] = {"runtime", "driver", "firmware"};
  int field = calsim_index_in(value, fields, 3);
  rule->field = (uint32_t)field;
  return field >= 0 ||
         calsim_wrong(s, "%s=%s: expected runtime, driver or firmware", key, value);
}

static bool take_version(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  calsim_copy_text(rule->version, sizeof rule->version, value);
  return (strlen(value) < sizeof rule->version && calsim_version_valid(value)) ||
         calsim_wrong(s, "%s=%s: expected a dotted number", key, value);
}

static bool take_pid(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  uint64_t pid;
  if (!calsim_take_count(s, key, value, 1, INT32_MAX, &pid)) return false;
  rule->pid = (uint32_t)pid;
  return true;
}

static bool take_partial(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_take_yes(s, key, value, &rule->partial);
}

static bool take_amount(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_take_signed(s, key, value, &rule->amount);
}

static bool take_counter(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  return calsim_counter_find(value, &rule->counter) ||
         calsim_wrong(s, "%s=%s is not a counter of this board that can be skewed", key, value);
}

static bool take_state(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  static const char *const states[] = {"queued", "h2d", "exec", "d2h", "done"};
  bool from = strcmp(key, "from") == 0;
  int state = calsim_index_in(value, states, from ? 4 : 5);
  if (state < 0)
    return calsim_wrong(s, "%s=%s: expected queued, h2d, exec, d2h%s", key, value,
                        from ? "" : " or done");
  *(from ? &rule->from : &rule->to) = (uint32_t)state + NPURT_JOB_QUEUED;
  return true;
}

static const struct {
  calsim_fault_kind first, last; /* the kinds that have this key */
  const char *key;
  taker *take;
  bool needed;
} OWN[] = {
    {CALSIM_SUBMIT_REJECT, CALSIM_SUBMIT_REJECT, "code", take_reject_code, false},
    {CALSIM_SUBMIT_INDETERMINATE, CALSIM_SUBMIT_INDETERMINATE, "runs", take_runs, false},
    {CALSIM_CSR_FAIL, CALSIM_CSR_FAIL, "k", take_number, false},
    {CALSIM_CCU_EXCEPTION, CALSIM_CCU_EXCEPTION, "chip", take_chip, false},
    {CALSIM_CCU_EXCEPTION, CALSIM_CCU_EXCEPTION, "code", take_ccu_code, false},
    {CALSIM_CCU_EXCEPTION, CALSIM_CCU_EXCEPTION, "pc", take_pc, false},
    {CALSIM_CCU_EXCEPTION, CALSIM_CCU_EXCEPTION, "quiesce", take_quiesce, false},
    {CALSIM_CCU_EXCEPTION, CALSIM_CCU_EXCEPTION, "kv", take_effect, false},
    {CALSIM_HANG, CALSIM_SLOW, "phase", calsim_take_point, false},
    {CALSIM_HANG, CALSIM_HANG, "release", take_release, false},
    {CALSIM_SLOW, CALSIM_SLOW, "factor", take_factor, true},
    {CALSIM_DMA_ERROR, CALSIM_DMA_ERROR, "dir", calsim_take_point, false},
    {CALSIM_DMA_ERROR, CALSIM_DMA_ERROR, "offset", take_offset, false},
    {CALSIM_NUMERIC_NAN, CALSIM_NUMERIC_OFFSET, "lanes", take_lanes, false},
    {CALSIM_NUMERIC_NAN, CALSIM_NUMERIC_OFFSET, "flag", take_flag, false},
    {CALSIM_NUMERIC_OFFSET, CALSIM_NUMERIC_OFFSET, "n", take_shift, false},
    {CALSIM_KV_STALE, CALSIM_KV_BIT, "pos", take_position, false},
    {CALSIM_KV_SWAP, CALSIM_KV_SWAP, "with", take_victim, true},
    {CALSIM_PAD_WRITE, CALSIM_PAD_WRITE, "victim", take_victim, true},
    {CALSIM_UNHEALTHY, CALSIM_UNHEALTHY, "chip", take_chip, false},
    {CALSIM_UNHEALTHY, CALSIM_DEVICE_LOST, "release", take_release, false},
    {CALSIM_STICKY, CALSIM_STICKY, "code", take_device_code, false},
    {CALSIM_THERMAL, CALSIM_THERMAL, "tau", take_tau, false},
    {CALSIM_THERMAL, CALSIM_THERMAL, "rise", take_degrees, false},
    {CALSIM_THERMAL, CALSIM_THERMAL, "limit", take_degrees, false},
    {CALSIM_THERMAL, CALSIM_THERMAL, "factor", take_factor, false},
    {CALSIM_DRIFT, CALSIM_DRIFT, "percent", take_percent, false},
    {CALSIM_DRIFT, CALSIM_DRIFT, "bytes", take_bytes, false},
    {CALSIM_ILLEGAL_STEP, CALSIM_ILLEGAL_STEP, "from", take_state, true},
    {CALSIM_ILLEGAL_STEP, CALSIM_ILLEGAL_STEP, "to", take_state, true},
    {CALSIM_LOST_COMPLETION, CALSIM_LOST_COMPLETION, "poll_sees", take_poll_sees, false},
    {CALSIM_LATE_COMPLETION, CALSIM_LATE_DMA, "delay", take_delay, true},
    {CALSIM_LATE_COMPLETION, CALSIM_LATE_COMPLETION, "outlives", take_outlives, false},
    {CALSIM_LATE_DMA, CALSIM_LATE_DMA, "bytes", take_bytes, false},
    {CALSIM_KV_APPLY_BEFORE, CALSIM_KV_APPLY_AFTER, "code", take_kv_code, false},
    {CALSIM_KV_APPLY_BEFORE, CALSIM_KV_APPLY_AFTER, "partial", take_partial, false},
    {CALSIM_KV_CAN_LIE, CALSIM_KV_CAN_LIE, "tokens", take_amount, true},
    {CALSIM_COUNTER_SKEW, CALSIM_COUNTER_RESET, "field", take_counter, true},
    {CALSIM_COUNTER_SKEW, CALSIM_COUNTER_SKEW, "n", take_amount, true},
    {CALSIM_COUNTER_NEGATIVE, CALSIM_COUNTER_NEGATIVE, "n", take_shift, false},
    {CALSIM_CONFIGURE_FAIL, CALSIM_CONFIGURE_FAIL, "code", take_configure_code, false},
    {CALSIM_CONFIGURE_PARTIAL_MEMORY, CALSIM_CONFIGURE_PARTIAL_MEMORY, "release",
     take_leaking_release, false},
    {CALSIM_CONFIGURE_PARTIAL_MEMORY, CALSIM_CONFIGURE_PARTIAL_MEMORY, "chip", take_chip, false},
    {CALSIM_CONFIGURE_PARTIAL_MEMORY, CALSIM_CONFIGURE_PARTIAL_MEMORY, "bytes", take_bytes, false},
    {CALSIM_CONFIGURE_HANG, CALSIM_CONFIGURE_HANG, "for", take_for, false},
    {CALSIM_CONFIGURE_HANG, CALSIM_CONFIGURE_HANG, "heeds", take_heeds, false},
    {CALSIM_RELEASE_LEAK, CALSIM_LEAK_UNTIL_SOFT, "chip", take_chip, false},
    {CALSIM_RELEASE_LEAK, CALSIM_LEAK_UNTIL_SOFT, "bytes", take_bytes, false},
    {CALSIM_RELEASE_SLOW, CALSIM_RELEASE_SLOW, "for", take_for, true},
    {CALSIM_RESET_FAIL, CALSIM_RESET_FAIL, "code", take_device_code, false},
    {CALSIM_RESET_SLOW, CALSIM_RESET_SLOW, "for", take_for, true},
    {CALSIM_RESET_OK_BUT_DEAD, CALSIM_RESET_OK_BUT_DEAD, "then", take_then, false},
    {CALSIM_RESET_OK_BUT_DEAD, CALSIM_RESET_WIDE, "tells", take_tells, false},
    {CALSIM_RESET_OK_BUT_DEAD, CALSIM_RESET_OK_BUT_DEAD, "release", take_release, false},
    {CALSIM_RESET_PARTIAL, CALSIM_RESET_PARTIAL, "without", take_effects, true},
    {CALSIM_RESET_WIDE, CALSIM_RESET_WIDE, "also", take_effects, true},
    {CALSIM_HEALTH_BLOCK, CALSIM_HEALTH_BLOCK, "for", take_for, true},
    {CALSIM_MEMORY_SKEW, CALSIM_MEMORY_SKEW, "field", take_memory_field, true},
    {CALSIM_MEMORY_SKEW, CALSIM_MEMORY_SKEW, "n", take_amount, true},
    {CALSIM_VERSION_MISMATCH, CALSIM_VERSION_MISMATCH, "field", take_version_field, true},
    {CALSIM_VERSION_MISMATCH, CALSIM_VERSION_MISMATCH, "version", take_version, true},
    {CALSIM_OWNER_CHANGE, CALSIM_OWNER_CHANGE, "pid", take_pid, false},
    {CALSIM_OWNER_CHANGE, CALSIM_OWNER_CHANGE, "for", take_for, false},
};
enum { OWN_COUNT = sizeof OWN / sizeof OWN[0] };

bool calsim_take_own(calsim_line *s, calsim_rule *rule, const char *key, const char *value,
                     bool *known) {
  *known = false;
  for (uint32_t i = 0; i < OWN_COUNT; ++i) {
    if (rule->kind < OWN[i].first || rule->kind > OWN[i].last || strcmp(key, OWN[i].key) != 0)
      continue;
    *known = true;
    return OWN[i].take(s, rule, key, value);
  }
  return true;
}

bool calsim_needs_are_there(calsim_line *s, const calsim_rule *rule) {
  char wanted[64] = "";
  bool missing = false;
  for (uint32_t i = 0; i < OWN_COUNT; ++i) {
    if (rule->kind < OWN[i].first || rule->kind > OWN[i].last || !OWN[i].needed) continue;
    if (wanted[0] != '\0') strcat(wanted, " and ");
    strcat(strcat(wanted, OWN[i].key), "=");
    missing |= !calsim_has_key(s, OWN[i].key);
  }
  return !missing || calsim_wrong(s, "%s needs %s", calsim_kind_name(rule->kind), wanted);
}
