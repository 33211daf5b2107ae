/* calsim_faults.c - the fault plan: its grammar (npurt_sim.h) and its decisions.
 *
 * A decision depends on the seed, the rule and the ordinal of the occurrence, never on time or
 * threads, so that the same order of jobs meets the same faults under every clock. */
#include "calsim_internal.h"
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const POINTS[] = {"submit",  "h2d",    "exec",            "d2h",
                                     "visible", "kv_can", "kv_apply_before", "kv_apply_after",
                                     "counters"};
enum { MAX_KEYS = 32, POINT_COUNT = CALSIM_POINTS - 1 };
enum { PHASES = 1 << CALSIM_AT_H2D | 1 << CALSIM_AT_EXEC | 1 << CALSIM_AT_D2H };

/* Each kind, where it may happen (bits), and where it does unless the rule says so (0: it must). */
static const struct {
  const char *name;
  uint32_t points;
  calsim_point usual;
} KINDS[] = {
    [CALSIM_SUBMIT_REJECT] = {"submit_reject", 1 << CALSIM_AT_SUBMIT, CALSIM_AT_SUBMIT},
    [CALSIM_SUBMIT_INDETERMINATE] = {"submit_indeterminate", 1 << CALSIM_AT_SUBMIT,
                                     CALSIM_AT_SUBMIT},
    [CALSIM_CSR_FAIL] = {"csr_fail", 1 << CALSIM_AT_SUBMIT, CALSIM_AT_SUBMIT},
    [CALSIM_CCU_EXCEPTION] = {"ccu_exception", 1 << CALSIM_AT_EXEC, CALSIM_AT_EXEC},
    [CALSIM_HANG] = {"hang", PHASES, 0},
    [CALSIM_SLOW] = {"slow", PHASES, CALSIM_AT_EXEC},
    [CALSIM_DMA_ERROR] = {"dma_error", 1 << CALSIM_AT_H2D | 1 << CALSIM_AT_D2H, 0},
    [CALSIM_NUMERIC_NAN] = {"numeric_nan", 1 << CALSIM_AT_EXEC, CALSIM_AT_EXEC},
    [CALSIM_LOST_COMPLETION] = {"lost_completion", 1 << CALSIM_AT_VISIBLE, CALSIM_AT_VISIBLE},
    [CALSIM_LATE_COMPLETION] = {"late_completion", 1 << CALSIM_AT_VISIBLE, CALSIM_AT_VISIBLE},
    [CALSIM_LATE_DMA] = {"late_dma", 1 << CALSIM_AT_VISIBLE, CALSIM_AT_VISIBLE},
    [CALSIM_KV_APPLY_BEFORE] = {"kv_apply_before", 1 << CALSIM_AT_KV_APPLY_BEFORE,
                                CALSIM_AT_KV_APPLY_BEFORE},
    [CALSIM_KV_APPLY_AFTER] = {"kv_apply_after", 1 << CALSIM_AT_KV_APPLY_AFTER,
                               CALSIM_AT_KV_APPLY_AFTER},
    [CALSIM_KV_CAN_LIE] = {"kv_can_lie", 1 << CALSIM_AT_KV_CAN, CALSIM_AT_KV_CAN},
    [CALSIM_COUNTER_SKEW] = {"counter_skew", 1 << CALSIM_AT_COUNTERS, CALSIM_AT_COUNTERS},
};

/* Counters that a rule can skew, by name. */
static const struct {
  const char *name;
  size_t offset;
} COUNTERS[] = {
    {"submitted", offsetof(npurt_counters, submitted)},
    {"pending", offsetof(npurt_counters, pending)},
    {"running", offsetof(npurt_counters, running)},
    {"finished", offsetof(npurt_counters, finished)},
    {"left", offsetof(npurt_counters, left)},
    {"failed", offsetof(npurt_counters, failed)},
    {"aborted", offsetof(npurt_counters, aborted)},
    {"late", offsetof(npurt_counters, late)},
    {"ccu_exceptions", offsetof(npurt_counters, ccu_exceptions)},
    {"h2d_bytes", offsetof(npurt_counters, h2d_bytes)},
    {"d2h_bytes", offsetof(npurt_counters, d2h_bytes)},
};
enum { COUNTER_COUNT = sizeof COUNTERS / sizeof COUNTERS[0] };

typedef struct line_state { /* one rule while it is read */
  uint32_t number;
  const char *keys[MAX_KEYS], *values[MAX_KEYS];
  uint32_t key_count, seen; /* seen: SEEN_* */
  bool counted;
  char *message; /* what is wrong, CALSIM_ERROR_BYTES of room */
} line_state;

/* Keys that a kind cannot do without, or that exclude others. */
enum { SEEN_FACTOR = 1, SEEN_DELAY = 2, SEEN_AMOUNT = 4, SEEN_COUNTER = 8, SEEN_CODE = 16 };

static bool wrong(line_state *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool wrong(line_state *s, const char *format, ...) {
  int head = snprintf(s->message, CALSIM_ERROR_BYTES, "fault plan line %u: ", s->number);
  va_list args;
  va_start(args, format);
  vsnprintf(s->message + head, CALSIM_ERROR_BYTES - (size_t)head, format, args);
  va_end(args);
  return false;
}

static int index_in(const char *text, const char *const *names, int count) {
  for (int i = 0; i < count; ++i)
    if (strcmp(text, names[i]) == 0) return i;
  return -1;
}

static bool take_count(line_state *s, const char *key, const char *value, uint64_t least,
                       uint64_t most, uint64_t *out) {
  if (calsim_parse_u64(value, out) && *out >= least && *out <= most) return true;
  return wrong(s, "%s=%s: expected a number from %llu to %llu", key, value,
               (unsigned long long)least, (unsigned long long)most);
}

static bool take_small(line_state *s, const char *key, const char *value, uint64_t most,
                       uint32_t *out) {
  uint64_t number;
  if (!take_count(s, key, value, 0, most, &number)) return false;
  *out = (uint32_t)number;
  return true;
}

/* One of two words; *out = 1 or 2. */
static bool take_either(line_state *s, const char *key, const char *value, const char *one,
                        const char *two, uint32_t *out) {
  *out = strcmp(value, one) == 0 ? 1 : strcmp(value, two) == 0 ? 2 : 0;
  return *out != 0 || wrong(s, "%s=%s: expected %s or %s", key, value, one, two);
}

static bool take_yes(line_state *s, const char *key, const char *value, bool *out) {
  uint32_t answer;
  if (!take_either(s, key, value, "y", "n", &answer)) return false;
  *out = answer == 1;
  return true;
}

/* A number with or without a sign. */
static bool take_signed(line_state *s, const char *key, const char *value, int64_t *out) {
  uint64_t amount;
  bool negative = value[0] == '-';
  if (!calsim_parse_u64(value + (negative || value[0] == '+'), &amount) || amount > INT64_MAX)
    return wrong(s, "%s=%s: expected a whole number", key, value);
  *out = negative ? -(int64_t)amount : (int64_t)amount;
  return true;
}

static bool take_time(line_state *s, const char *key, const char *value, uint64_t *out) {
  if (calsim_parse_time(value, out)) return true;
  return wrong(s, "%s=%s: expected a time such as 2.5s, 10ms, 5us or 100ns", key, value);
}

static bool take_point(line_state *s, calsim_rule *rule, const char *key, const char *value) {
  int point = index_in(value, POINTS, POINT_COUNT);
  if (point < 0)
    return wrong(s,
                 "%s=%s: this board injects at submit, h2d, exec, d2h, visible, kv_can,"
                 " kv_apply_before, kv_apply_after and counters",
                 key, value);
  calsim_point at = (calsim_point)(point + CALSIM_AT_SUBMIT);
  if ((KINDS[rule->kind].points >> at & 1) == 0)
    return wrong(s, "%s=%s does not go with kind=%s", key, value, KINDS[rule->kind].name);
  if (rule->point != 0 && rule->point != at)
    return wrong(s, "on= and %s= name different points",
                 rule->kind == CALSIM_DMA_ERROR ? "dir" : "phase");
  rule->point = at;
  return true;
}

static bool take_pick(line_state *s, calsim_rule *rule, const char *key, const char *value) {
  if (rule->pick != CALSIM_PICK_ALL) return wrong(s, "%s: only one of nth, every and p", key);
  if (strcmp(key, "p") == 0) {
    rule->pick = CALSIM_PICK_CHANCE;
    if (calsim_parse_real(value, &rule->chance) && rule->chance <= 1) return true;
    return wrong(s, "p=%s: expected a probability from 0 to 1", value);
  }
  rule->pick = strcmp(key, "nth") == 0 ? CALSIM_PICK_NTH : CALSIM_PICK_EVERY;
  return take_count(s, key, value, 1, UINT64_MAX - 1, &rule->n);
}

static bool take_firings(line_state *s, calsim_rule *rule, const char *value) {
  s->counted = true;
  rule->count = UINT64_MAX;
  return strcmp(value, "inf") == 0 ||
         take_count(s, "count", value, 1, UINT64_MAX - 1, &rule->count);
}

static bool take_model(line_state *s, calsim_rule *rule, const char *value) {
  if (strlen(value) >= sizeof rule->model || *value == '\0')
    return wrong(s, "model=%s: not a model name", value);
  calsim_copy_text(rule->model, sizeof rule->model, value);
  return true;
}

/* Keys of every kind. *known tells whether the key was one of them. */
static bool take_common(line_state *s, calsim_rule *rule, const char *key, const char *value,
                        bool *known) {
  static const char *const keys[] = {"on",    "nth",   "every",  "p",       "count",
                                     "skip",  "task",  "engine", "model",   "lane",
                                     "after", "until", "during", "inflight"};
  uint64_t number;
  int index = index_in(key, keys, 14);
  *known = index >= 0;
  switch (index) {
    case 0: return take_point(s, rule, key, value);
    case 1:
    case 2:
    case 3: return take_pick(s, rule, key, value);
    case 4: return take_firings(s, rule, value);
    case 5: return take_count(s, key, value, 0, UINT64_MAX - 1, &rule->skip);
    case 6: return take_either(s, key, value, "prefill", "decode", &rule->task);
    case 7: return take_either(s, key, value, "ping", "pong", &rule->engine);
    case 8: return take_model(s, rule, value);
    case 9:
      if (!take_count(s, key, value, 0, CALSIM_MAX_LANES - 1, &number)) return false;
      rule->lane = (int64_t)number;
      return true;
    case 10: return take_time(s, key, value, &rule->after_ns);
    case 11: return take_time(s, key, value, &rule->until_ns);
    case 12:
      rule->during_load = true;
      return strcmp(value, "load") == 0 || wrong(s, "during=%s: expected load", value);
    case 13: return take_small(s, "inflight", value, CALSIM_BANKS, &rule->inflight_min);
    default: return true;
  }
}

static bool take_reject_code(line_state *s, calsim_rule *rule, const char *value) {
  uint32_t code;
  if (!take_small(s, "code", value, 0xffff, &code)) return false;
  uint32_t class = code >> 8;
  rule->code = (npurt_status)code;
  if ((class >= 1 && class <= 3 && (code & 0xff) != 0) || code == NPURT_E_SUBMIT_REJECTED ||
      code == NPURT_E_CSR_FAILED)
    return true;
  return wrong(s, "code=%s: a rejected submit has a code of class 1 to 3, 0x601 or 0x603", value);
}

static bool take_ccu(line_state *s, calsim_rule *rule, const char *key, const char *value,
                     bool *known) {
  static const char *const keys[] = {"chip", "code", "pc", "quiesce", "kv"};
  static const char *const effects[] = {"none", "applied", "partial", "unknown"};
  int index = index_in(key, keys, 5);
  *known = index >= 0;
  switch (index) {
    case 0: return take_small(s, key, value, CALSIM_CHIPS - 1, &rule->chip);
    case 1: return take_small(s, key, value, UINT32_MAX, &rule->ccu_code);
    case 2: return take_count(s, key, value, 0, UINT64_MAX, &rule->pc);
    case 3: return take_yes(s, key, value, &rule->quiesce);
    case 4: {
      int effect = index_in(value, effects, 4);
      if (effect < 0 || effect == CALSIM_KV_APPLIED)
        return wrong(s, "kv=%s: expected none, partial or unknown", value);
      rule->kv_effect = (uint32_t)effect;
      return true;
    }
    default: return true;
  }
}

static bool take_release(line_state *s, calsim_rule *rule, const char *value) {
  static const char *const releases[] = {"never", "reset1", "reset2", "reset3", "reset4"};
  int level = index_in(value, releases, 5);
  rule->release_level = (uint32_t)level;
  return level >= 0 || wrong(s, "release=%s: expected never or reset1 .. reset4", value);
}

static bool take_factor(line_state *s, calsim_rule *rule, const char *value) {
  s->seen |= SEEN_FACTOR;
  if (calsim_parse_real(value, &rule->factor) && rule->factor >= 1 && rule->factor <= 1e12)
    return true;
  return wrong(s, "factor=%s: expected a number from 1 to 1e12", value);
}

static bool take_lanes(line_state *s, calsim_rule *rule, const char *value) {
  rule->lanes = UINT64_MAX;
  return strcmp(value, "all") == 0 || take_count(s, "lanes", value, 1, UINT64_MAX, &rule->lanes);
}

static bool take_kv_code(line_state *s, calsim_rule *rule, const char *value) {
  uint32_t code;
  s->seen |= SEEN_CODE;
  if (!take_small(s, "code", value, 0xffff, &code)) return false;
  rule->code = (npurt_status)code;
  if (code == NPURT_E_KV_NO_SPACE || code == NPURT_E_KV_APPLY || code == NPURT_E_KV_UNKNOWN)
    return true;
  return wrong(s, "code=%s: a list that is not applied has code 0x304, 0x703 or 0x704", value);
}

static bool take_counter(line_state *s, calsim_rule *rule, const char *value) {
  s->seen |= SEEN_COUNTER;
  for (uint32_t i = 0; i < COUNTER_COUNT; ++i) {
    if (strcmp(COUNTERS[i].name, value) != 0) continue;
    rule->counter = i;
    return true;
  }
  return wrong(s, "field=%s is not a counter of this board that can be skewed", value);
}

static bool take_delay(line_state *s, calsim_rule *rule, const char *value) {
  s->seen |= SEEN_DELAY;
  return take_time(s, "delay", value, &rule->delay_ns);
}

static bool take_amount(line_state *s, calsim_rule *rule, const char *key, const char *value) {
  s->seen |= SEEN_AMOUNT;
  return take_signed(s, key, value, &rule->amount);
}

/* Keys of one kind. *known tells whether the key is one of them. */
static bool take_own(line_state *s, calsim_rule *rule, const char *key, const char *value,
                     bool *known) {
  uint32_t answer;
  *known = true;
  switch (rule->kind) {
    case CALSIM_SUBMIT_REJECT:
      if (strcmp(key, "code") == 0) return take_reject_code(s, rule, value);
      break;
    case CALSIM_SUBMIT_INDETERMINATE:
      if (strcmp(key, "runs") != 0) break;
      if (!take_either(s, key, value, "yes", "no", &answer)) return false;
      rule->runs = answer == 1;
      return true;
    case CALSIM_CSR_FAIL:
      if (strcmp(key, "k") == 0) return take_small(s, key, value, UINT32_MAX, &rule->number);
      break;
    case CALSIM_CCU_EXCEPTION: return take_ccu(s, rule, key, value, known);
    case CALSIM_HANG:
      if (strcmp(key, "phase") == 0) return take_point(s, rule, key, value);
      if (strcmp(key, "release") == 0) return take_release(s, rule, value);
      break;
    case CALSIM_SLOW:
      if (strcmp(key, "phase") == 0) return take_point(s, rule, key, value);
      if (strcmp(key, "factor") == 0) return take_factor(s, rule, value);
      break;
    case CALSIM_DMA_ERROR:
      if (strcmp(key, "dir") == 0) return take_point(s, rule, key, value);
      if (strcmp(key, "offset") == 0)
        return take_count(s, key, value, 0, UINT64_MAX, &rule->offset);
      break;
    case CALSIM_NUMERIC_NAN:
      if (strcmp(key, "lanes") == 0) return take_lanes(s, rule, value);
      if (strcmp(key, "flag") == 0) return take_yes(s, key, value, &rule->numeric_flag);
      break;
    case CALSIM_LOST_COMPLETION:
      if (strcmp(key, "poll_sees") == 0) return take_yes(s, key, value, &rule->poll_sees);
      break;
    case CALSIM_LATE_DMA:
      if (strcmp(key, "bytes") == 0) return take_count(s, key, value, 1, 1 << 30, &rule->bytes);
      if (strcmp(key, "delay") == 0) return take_delay(s, rule, value);
      break;
    case CALSIM_LATE_COMPLETION:
      if (strcmp(key, "delay") == 0) return take_delay(s, rule, value);
      break;
    case CALSIM_KV_APPLY_BEFORE:
    case CALSIM_KV_APPLY_AFTER:
      if (strcmp(key, "code") == 0) return take_kv_code(s, rule, value);
      if (strcmp(key, "partial") == 0) return take_yes(s, key, value, &rule->partial);
      break;
    case CALSIM_KV_CAN_LIE:
      if (strcmp(key, "tokens") == 0) return take_amount(s, rule, key, value);
      break;
    case CALSIM_COUNTER_SKEW:
      if (strcmp(key, "field") == 0) return take_counter(s, rule, value);
      if (strcmp(key, "n") == 0) return take_amount(s, rule, key, value);
      break;
    default: break;
  }
  *known = false;
  return true;
}

static bool about_jobs(const calsim_rule *rule) {
  return rule->kind < CALSIM_KV_APPLY_BEFORE;
}

/* Filters that mean nothing where there is no job. */
static bool filters_fit(line_state *s, const calsim_rule *rule) {
  bool counters = rule->kind == CALSIM_COUNTER_SKEW;
  if (about_jobs(rule)) return true;
  if (rule->task == 0 && rule->engine == 0 && !(counters && (rule->lane >= 0 || rule->model[0])))
    return true;
  return wrong(s, "kind=%s is about no job: no task=, engine=%s", KINDS[rule->kind].name,
               counters ? ", lane= or model=" : "");
}

/* What must be there once all keys are read. */
static bool complete_rule(line_state *s, calsim_rule *rule) {
  bool kv = rule->kind == CALSIM_KV_APPLY_BEFORE || rule->kind == CALSIM_KV_APPLY_AFTER;
  bool late = rule->kind == CALSIM_LATE_DMA || rule->kind == CALSIM_LATE_COMPLETION;
  if (rule->point == 0 && rule->kind == CALSIM_HANG) return wrong(s, "a hang needs phase= or on=");
  if (rule->point == 0) rule->point = KINDS[rule->kind].usual;
  if (rule->point == 0) return wrong(s, "a dma_error needs dir= or on=");
  if (rule->kind == CALSIM_SLOW && (s->seen & SEEN_FACTOR) == 0)
    return wrong(s, "slow needs factor=");
  if (late && (s->seen & SEEN_DELAY) == 0)
    return wrong(s, "%s needs delay=", KINDS[rule->kind].name);
  if (rule->kind == CALSIM_KV_CAN_LIE && (s->seen & SEEN_AMOUNT) == 0)
    return wrong(s, "kv_can_lie needs tokens=");
  if (rule->kind == CALSIM_COUNTER_SKEW &&
      (s->seen & (SEEN_AMOUNT | SEEN_COUNTER)) != (SEEN_AMOUNT | SEEN_COUNTER))
    return wrong(s, "counter_skew needs field= and n=");
  if (kv && rule->partial && (s->seen & SEEN_CODE) == 0) rule->code = NPURT_E_KV_UNKNOWN;
  if (kv && rule->partial != (rule->code == NPURT_E_KV_UNKNOWN))
    return wrong(s, "partial=y goes with code=0x704 and with no other");
  return filters_fit(s, rule);
}

static bool take_key(line_state *s, calsim_rule *rule, const char *key, const char *value) {
  bool known;
  if (!take_common(s, rule, key, value, &known)) return false;
  if (known) return true;
  if (!take_own(s, rule, key, value, &known)) return false;
  return known || wrong(s, "unknown key '%s' for kind=%s", key, KINDS[rule->kind].name);
}

/* Cut a line into keys and values, in place. */
static bool split_keys(line_state *s, char *text) {
  char *rest = NULL;
  for (char *word = strtok_r(text, " \t\r", &rest); word != NULL;
       word = strtok_r(NULL, " \t\r", &rest)) {
    char *equals = strchr(word, '=');
    if (equals == NULL || equals == word) return wrong(s, "'%s' is not key=value", word);
    if (s->key_count == MAX_KEYS) return wrong(s, "too many keys");
    *equals = '\0';
    if (strcmp(word, "inflight>") == 0)
      equals[-1] = '\0';
    else if (strcmp(word, "inflight") == 0)
      return wrong(s, "inflight takes >=");
    for (uint32_t i = 0; i < s->key_count; ++i)
      if (strcmp(s->keys[i], word) == 0) return wrong(s, "key '%s' a second time", word);
    s->keys[s->key_count] = word;
    s->values[s->key_count++] = equals + 1;
  }
  return true;
}

static bool take_kind(line_state *s, calsim_rule *rule) {
  for (uint32_t i = 0; i < s->key_count; ++i) {
    if (strcmp(s->keys[i], "kind") != 0) continue;
    for (uint32_t kind = CALSIM_SUBMIT_REJECT; kind < CALSIM_KINDS; ++kind) {
      if (strcmp(s->values[i], KINDS[kind].name) != 0) continue;
      rule->kind = (calsim_fault_kind)kind;
      bool kv = kind == CALSIM_KV_APPLY_BEFORE || kind == CALSIM_KV_APPLY_AFTER;
      rule->code = kv ? NPURT_E_KV_APPLY : NPURT_E_SUBMIT_REJECTED;
      return true;
    }
    return wrong(s, "kind=%s is not a fault of this board", s->values[i]);
  }
  return wrong(s, "kind= is missing");
}

static bool parse_rule(line_state *s, char *line, calsim_rule *rule) {
  char *rest = NULL, *word = strtok_r(line, " \t\r", &rest), *id = strtok_r(NULL, " \t\r", &rest);
  *rule = (calsim_rule){.lane = -1,
                        .until_ns = UINT64_MAX,
                        .ccu_code = 1,
                        .quiesce = true,
                        .kv_effect = CALSIM_KV_NONE,
                        .runs = true,
                        .poll_sees = true,
                        .numeric_flag = true,
                        .lanes = UINT64_MAX,
                        .bytes = 64};
  if (strcmp(word, "fault") != 0) return wrong(s, "a rule begins with 'fault', not '%s'", word);
  if (id == NULL || strchr(id, '=') != NULL || strlen(id) >= sizeof rule->id)
    return wrong(s, "after 'fault' comes an id of at most %zu characters", sizeof rule->id - 1);
  calsim_copy_text(rule->id, sizeof rule->id, id);
  if (!split_keys(s, rest) || !take_kind(s, rule)) return false;
  for (uint32_t i = 0; i < s->key_count; ++i)
    if (strcmp(s->keys[i], "kind") != 0 && !take_key(s, rule, s->keys[i], s->values[i]))
      return false;
  if (!complete_rule(s, rule)) return false;
  if (!s->counted)
    rule->count =
        rule->pick == CALSIM_PICK_EVERY || rule->pick == CALSIM_PICK_CHANCE ? UINT64_MAX : 1;
  return true;
}

/* Read one line into rules[*count], if it has a rule. */
static bool parse_line(line_state *s, char *line, calsim_rule *rules, uint32_t *count) {
  char *comment = strchr(line, '#');
  if (comment != NULL) *comment = '\0';
  if (line[strspn(line, " \t\r")] == '\0') return true;
  if (*count == CALSIM_MAX_RULES) return wrong(s, "more than %d rules", CALSIM_MAX_RULES);
  if (!parse_rule(s, line, &rules[*count])) return false;
  for (uint32_t i = 0; i < *count; ++i)
    if (strcmp(rules[i].id, rules[*count].id) == 0)
      return wrong(s, "id '%s' a second time", rules[i].id);
  ++*count;
  return true;
}

npurt_status calsim_plan_parse(const char *text, calsim_rule **rules, uint32_t *count) {
  *rules = NULL;
  *count = 0;
  if (text == NULL) return NPURT_OK;
  if (strnlen(text, 1 << 20) == 1 << 20)
    return calsim_error(NPURT_E_INVALID_ARG, "fault plan of 1 MiB or more");
  char *copy = strdup(text), message[CALSIM_ERROR_BYTES] = "";
  calsim_rule *parsed = calloc(CALSIM_MAX_RULES, sizeof *parsed);
  bool good = copy != NULL && parsed != NULL;
  npurt_status status = good ? NPURT_OK : calsim_error(NPURT_E_HOST_MEMORY, "out of host memory");
  uint32_t number = 0;
  for (char *line = copy; line != NULL && good;) {
    char *next = strchr(line, '\n');
    if (next != NULL) *next++ = '\0';
    line_state s = {.number = ++number, .message = message};
    good = parse_line(&s, line, parsed, count);
    if (!good) status = calsim_error(NPURT_E_INVALID_ARG, "%s", message);
    line = next;
  }
  free(copy);
  if (good)
    *rules = parsed;
  else
    free(parsed);
  return status;
}

/* ---- decisions ------------------------------------------------------------------------- */

uint64_t calsim_mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

static bool chance_fires(uint64_t seed, const calsim_rule *rule) {
  uint64_t id = 0;
  for (const char *c = rule->id; *c != '\0'; ++c) id = calsim_mix(id ^ (uint8_t)*c);
  uint64_t draw =
      calsim_mix(calsim_mix(calsim_mix(seed ^ id) ^ (uint64_t)rule->point) ^ rule->seen);
  return (double)(draw >> 11) * 0x1p-53 < rule->chance;
}

static bool has_lane(const calsim_occasion *o, int64_t lane) {
  for (uint32_t i = 0; o->job != NULL && i < o->job->row_count; ++i)
    if (o->job->rows[i].active && o->job->rows[i].lane == (uint64_t)lane) return true;
  for (uint32_t i = 0; o->ops != NULL && i < o->op_count; ++i)
    if (calsim_kv_op_at(o->ops, o->stride, i)->lane == (uint64_t)lane) return true;
  return false;
}

/* Can this kind happen to the end that the job is about to have? */
static bool end_fits(const calsim_rule *rule, const calsim_job *job) {
  if (rule->kind == CALSIM_LATE_DMA) return (job->end.flags & CALSIM_FLAG_QUIESCENT) == 0;
  return job->end.state == NPURT_JOB_DONE;
}

static bool job_matches(const calsim_device *d, const calsim_rule *rule, const calsim_job *job) {
  uint32_t in_flight = calsim_in_flight(d) + (rule->point == CALSIM_AT_SUBMIT ? 1 : 0);
  return (rule->task == 0 || rule->task == job->submodel->task) &&
         (rule->engine == 0 || rule->engine == job->engine) && in_flight >= rule->inflight_min &&
         (rule->point != CALSIM_AT_VISIBLE || end_fits(rule, job));
}

static bool matches(const calsim_device *d, const calsim_rule *rule, const calsim_occasion *o) {
  uint64_t now = calsim_now(d);
  const calsim_calbin *c = o->job != NULL    ? o->job->calbin
                           : o->bank != NULL ? o->bank->calbin
                                             : NULL;
  if (o->job == NULL ? calsim_in_flight(d) < rule->inflight_min : !job_matches(d, rule, o->job))
    return false;
  return (rule->model[0] == '\0' || (c != NULL && strcmp(rule->model, c->m->name) == 0)) &&
         (rule->lane < 0 || has_lane(o, rule->lane)) && now >= rule->after_ns &&
         now < rule->until_ns;
}

static bool picked(uint64_t seed, const calsim_rule *rule) {
  if (rule->fired >= rule->count || rule->matches <= rule->skip) return false;
  uint64_t match = rule->matches - rule->skip;
  switch (rule->pick) {
    case CALSIM_PICK_NTH: return match == rule->n;
    case CALSIM_PICK_EVERY: return match % rule->n == 0;
    case CALSIM_PICK_CHANCE: return chance_fires(seed, rule);
    default: return true;
  }
}

const calsim_rule *calsim_job_fault_at(calsim_device *d, calsim_point point,
                                       const calsim_job *job) {
  return calsim_fault_at(d, point, &(calsim_occasion){.job = job});
}

uint64_t *calsim_counter_skewed(npurt_counters *counters, const calsim_rule *rule) {
  return (uint64_t *)((uint8_t *)counters + COUNTERS[rule->counter].offset);
}

const calsim_rule *calsim_fault_at(calsim_device *d, calsim_point point,
                                   const calsim_occasion *occasion) {
  const calsim_rule *winner = NULL;
  for (uint32_t i = 0; i < d->plan.count; ++i) {
    calsim_rule *rule = &d->plan.rules[i];
    if (rule->point != point || !(d->plan.armed || rule->during_load)) continue;
    ++rule->seen;
    const char *decision = "no match";
    if (matches(d, rule, occasion)) {
      ++rule->matches;
      decision = "pass";
      if (picked(d->config.seed, rule)) {
        decision = winner == NULL ? "fire" : "shadowed";
        if (winner == NULL) {
          ++rule->fired;
          winner = rule;
        }
      }
    }
    calsim_trace(d, "fault rule=%s on=%s ordinal=%llu match=%llu job=%llu decision=%s", rule->id,
                 POINTS[point - 1], (unsigned long long)rule->seen,
                 (unsigned long long)rule->matches,
                 (unsigned long long)(occasion->job != NULL ? occasion->job->ordinal : 0),
                 decision);
  }
  return winner;
}

npurt_status npurt_sim_faults(npurt_device *handle, const char *plan) {
  calsim_rule *rules;
  uint32_t count;
  npurt_status status = calsim_plan_parse(plan, &rules, &count);
  if (status != NPURT_OK) return status;
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) {
    free(rules);
    return NPURT_E_BAD_HANDLE;
  }
  free(d->plan.rules);
  d->plan.rules = rules;
  d->plan.count = count;
  calsim_trace(d, "fault plan rules=%u armed=%d", count, d->plan.armed);
  calsim_unlock(d);
  return NPURT_OK;
}

npurt_status npurt_sim_arm(npurt_device *handle) {
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  if (!d->plan.armed) {
    d->plan.armed = true;
    calsim_trace(d, "fault plan armed");
  }
  calsim_unlock(d);
  return NPURT_OK;
}
