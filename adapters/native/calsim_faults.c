/* calsim_faults.c - the fault plan: its grammar (npurt_sim.h) and its decisions.
 *
 * A decision depends on the seed, the rule and the ordinal of the occurrence, never on time or
 * threads, so that the same order of jobs meets the same faults under every clock. */
#include "calsim_internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const KINDS[] = {"submit_reject", "ccu_exception", "hang"};
static const char *const POINTS[] = {"submit", "h2d", "exec", "d2h"};
enum { MAX_KEYS = 32 };

typedef struct line_state { /* one rule while it is read */
  uint32_t number;
  const char *keys[MAX_KEYS], *values[MAX_KEYS];
  uint32_t key_count;
  bool counted;
  char *message; /* what is wrong, CALSIM_ERROR_BYTES of room */
} line_state;

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

static bool take_time(line_state *s, const char *key, const char *value, uint64_t *out) {
  static const struct {
    const char *unit;
    double ns;
  } units[] = {{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}};
  char number[32];
  size_t digits = strspn(value, "0123456789.");
  double amount;
  if (digits > 0 && digits < sizeof number) {
    memcpy(number, value, digits);
    number[digits] = '\0';
    for (size_t i = 0; i < 4; ++i) {
      if (strcmp(value + digits, units[i].unit) != 0 || !calsim_parse_real(number, &amount))
        continue;
      if (amount * units[i].ns > 9e18) break;
      *out = (uint64_t)(amount * units[i].ns + 0.5);
      return true;
    }
  }
  return wrong(s, "%s=%s: expected a time such as 2.5s, 10ms, 5us or 100ns", key, value);
}

static bool take_point(line_state *s, calsim_rule *rule, const char *key, const char *value) {
  int point = index_in(value, POINTS, 4);
  if (point < 0)
    return wrong(s, "%s=%s: this board injects at submit, h2d, exec and d2h", key, value);
  calsim_point at = (calsim_point)(point + CALSIM_AT_SUBMIT);
  bool fits = rule->kind == CALSIM_SUBMIT_REJECT   ? at == CALSIM_AT_SUBMIT
              : rule->kind == CALSIM_CCU_EXCEPTION ? at == CALSIM_AT_EXEC
                                                   : at != CALSIM_AT_SUBMIT;
  if (!fits) return wrong(s, "%s=%s does not go with kind=%s", key, value, KINDS[rule->kind - 1]);
  if (rule->point != 0 && rule->point != at)
    return wrong(s, "on= and phase= name different points");
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
  rule->reject_code = (npurt_status)code;
  if ((class >= 1 && class <= 3 && (code & 0xff) != 0) || code == NPURT_E_SUBMIT_REJECTED ||
      code == NPURT_E_CSR_FAILED)
    return true;
  return wrong(s, "code=%s: a rejected submit has a code of class 1 to 3, 0x601 or 0x603", value);
}

static bool take_ccu(line_state *s, calsim_rule *rule, const char *key, const char *value,
                     bool *known) {
  static const char *const keys[] = {"chip", "code", "pc", "quiesce", "kv"};
  static const char *const effects[] = {"none", "applied", "partial", "unknown"};
  uint32_t answer;
  int index = index_in(key, keys, 5);
  *known = index >= 0;
  switch (index) {
    case 0: return take_small(s, key, value, CALSIM_CHIPS - 1, &rule->chip);
    case 1: return take_small(s, key, value, UINT32_MAX, &rule->ccu_code);
    case 2: return take_count(s, key, value, 0, UINT64_MAX, &rule->pc);
    case 3:
      if (!take_either(s, key, value, "y", "n", &answer)) return false;
      rule->quiesce = answer == 1;
      return true;
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

static bool take_hang(line_state *s, calsim_rule *rule, const char *key, const char *value,
                      bool *known) {
  *known = true;
  if (strcmp(key, "phase") == 0) return take_point(s, rule, key, value);
  if (strcmp(key, "release") == 0) {
    static const char *const releases[] = {"never", "reset1", "reset2", "reset3", "reset4"};
    int level = index_in(value, releases, 5);
    rule->release_level = (uint32_t)level;
    return level >= 0 || wrong(s, "release=%s: expected never or reset1 .. reset4", value);
  }
  *known = false;
  return true;
}

static bool take_key(line_state *s, calsim_rule *rule, const char *key, const char *value) {
  bool known;
  if (!take_common(s, rule, key, value, &known)) return false;
  if (known) return true;
  if (rule->kind == CALSIM_SUBMIT_REJECT && strcmp(key, "code") == 0)
    return take_reject_code(s, rule, value);
  if (rule->kind == CALSIM_CCU_EXCEPTION && !take_ccu(s, rule, key, value, &known)) return false;
  if (rule->kind == CALSIM_HANG && !take_hang(s, rule, key, value, &known)) return false;
  return known || wrong(s, "unknown key '%s' for kind=%s", key, KINDS[rule->kind - 1]);
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
    int kind = index_in(s->values[i], KINDS, 3);
    if (kind < 0) return wrong(s, "kind=%s is not a fault of this board", s->values[i]);
    rule->kind = (calsim_fault_kind)(kind + CALSIM_SUBMIT_REJECT);
    return true;
  }
  return wrong(s, "kind= is missing");
}

static bool parse_rule(line_state *s, char *line, calsim_rule *rule) {
  char *rest = NULL, *word = strtok_r(line, " \t\r", &rest), *id = strtok_r(NULL, " \t\r", &rest);
  *rule = (calsim_rule){.lane = -1,
                        .until_ns = UINT64_MAX,
                        .reject_code = NPURT_E_SUBMIT_REJECTED,
                        .ccu_code = 1,
                        .quiesce = true,
                        .kv_effect = CALSIM_KV_NONE};
  if (strcmp(word, "fault") != 0) return wrong(s, "a rule begins with 'fault', not '%s'", word);
  if (id == NULL || strchr(id, '=') != NULL || strlen(id) >= sizeof rule->id)
    return wrong(s, "after 'fault' comes an id of at most %zu characters", sizeof rule->id - 1);
  calsim_copy_text(rule->id, sizeof rule->id, id);
  if (!split_keys(s, rest) || !take_kind(s, rule)) return false;
  for (uint32_t i = 0; i < s->key_count; ++i)
    if (strcmp(s->keys[i], "kind") != 0 && !take_key(s, rule, s->keys[i], s->values[i]))
      return false;
  if (rule->point == 0 && rule->kind == CALSIM_HANG) return wrong(s, "a hang needs phase= or on=");
  if (rule->point == 0)
    rule->point = rule->kind == CALSIM_SUBMIT_REJECT ? CALSIM_AT_SUBMIT : CALSIM_AT_EXEC;
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

static bool job_has_lane(const calsim_job *job, int64_t lane) {
  for (uint32_t i = 0; i < job->row_count; ++i)
    if (job->rows[i].active && job->rows[i].lane == (uint64_t)lane) return true;
  return false;
}

static bool matches(const calsim_device *d, const calsim_rule *rule, const calsim_job *job) {
  uint64_t now = calsim_now(d);
  uint32_t in_flight = calsim_in_flight(d) + (rule->point == CALSIM_AT_SUBMIT ? 1 : 0);
  return (rule->task == 0 || rule->task == job->submodel->task) &&
         (rule->engine == 0 || rule->engine == job->engine) &&
         (rule->model[0] == '\0' || strcmp(rule->model, job->calbin->m->name) == 0) &&
         (rule->lane < 0 || job_has_lane(job, rule->lane)) && now >= rule->after_ns &&
         now < rule->until_ns && in_flight >= rule->inflight_min;
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

const calsim_rule *calsim_fault_at(calsim_device *d, calsim_point point, const calsim_job *job) {
  const calsim_rule *winner = NULL;
  for (uint32_t i = 0; i < d->plan.count; ++i) {
    calsim_rule *rule = &d->plan.rules[i];
    if (rule->point != point || !(d->plan.armed || rule->during_load)) continue;
    ++rule->seen;
    const char *decision = "no match";
    if (matches(d, rule, job)) {
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
                 (unsigned long long)rule->matches, (unsigned long long)job->ordinal, decision);
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
