/* calsim_plan.c - reads a fault plan (npurt_sim.h): its lines and the keys of every kind. */
#include "calsim_plan.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const CALSIM_POINT_NAMES[CALSIM_POINTS - 1] = {
    "submit", "h2d",       "exec",    "d2h",   "visible", "kv_can", "kv_apply_before", "kv_apply_after",
    "counters", "poll", "configure", "release", "reset", "health", "memory", "time"};

bool calsim_wrong(calsim_line *s, const char *format, ...) {
  int head = snprintf(s->message, CALSIM_ERROR_BYTES, "fault plan line %u: ", s->number);
  va_list args;
  va_start(args, format);
  vsnprintf(s->message + head, CALSIM_ERROR_BYTES - (size_t)head, format, args);
  va_end(args);
  return false;
}

int calsim_index_in(const char *text, const char *const *names, int count) {
  for (int i = 0; i < count; ++i)
    if (strcmp(text, names[i]) == 0) return i;
  return -1;
}

bool calsim_take_count(calsim_line *s, const char *key, const char *value, uint64_t least,
                       uint64_t most, uint64_t *out) {
  if (calsim_parse_u64(value, out) && *out >= least && *out <= most) return true;
  return calsim_wrong(s, "%s=%s: expected a number from %llu to %llu", key, value,
               (unsigned long long)least, (unsigned long long)most);
}

bool calsim_take_small(calsim_line *s, const char *key, const char *value, uint64_t most,
                       uint32_t *out) {
  uint64_t number;
  if (!calsim_take_count(s, key, value, 0, most, &number)) return false;
  *out = (uint32_t)number;
  return true;
}

/* One of two words; *out = 1 or 2. */
bool calsim_take_either(calsim_line *s, const char *key, const char *value, const char *one,
                        const char *two, uint32_t *out) {
  *out = strcmp(value, one) == 0 ? 1 : strcmp(value, two) == 0 ? 2 : 0;
  return *out != 0 || calsim_wrong(s, "%s=%s: expected %s or %s", key, value, one, two);
}

bool calsim_take_yes(calsim_line *s, const char *key, const char *value, bool *out) {
  uint32_t answer;
  if (!calsim_take_either(s, key, value, "y", "n", &answer)) return false;
  *out = answer == 1;
  return true;
}

/* A number with or without a sign. */
bool calsim_take_signed(calsim_line *s, const char *key, const char *value, int64_t *out) {
  uint64_t amount;
  bool negative = value[0] == '-';
  if (!calsim_parse_u64(value + (negative || value[0] == '+'), &amount) || amount > INT64_MAX)
    return calsim_wrong(s, "%s=%s: expected a whole number", key, value);
  *out = negative ? -(int64_t)amount : (int64_t)amount;
  return true;
}

bool calsim_take_time(calsim_line *s, const char *key, const char *value, uint64_t *out) {
  if (calsim_parse_time(value, out)) return true;
  return calsim_wrong(s, "%s=%s: expected a time such as 2.5s, 10ms, 5us or 100ns", key, value);
}

bool calsim_has_key(const calsim_line *s, const char *key) {
  for (uint32_t i = 0; i < s->key_count; ++i)
    if (strcmp(s->keys[i], key) == 0) return true;
  return false;
}

bool calsim_take_point(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  int point = calsim_index_in(value, CALSIM_POINT_NAMES, CALSIM_POINTS - 1);
  if (point < 0)
    return calsim_wrong(s,
                        "%s=%s: this board injects at submit, h2d, exec, d2h, visible, poll,"
                        " kv_can, kv_apply_before, kv_apply_after, counters, configure, release,"
                        " reset, health, memory and time",
                        key, value);
  calsim_point at = (calsim_point)(point + CALSIM_AT_SUBMIT);
  if (!calsim_kind_at(rule->kind, at))
    return calsim_wrong(s, "%s=%s does not go with kind=%s", key, value,
                        calsim_kind_name(rule->kind));
  if (rule->point != 0 && rule->point != at)
    return calsim_wrong(s, "on= and %s= name different points",
                 rule->kind == CALSIM_DMA_ERROR ? "dir" : "phase");
  rule->point = at;
  return true;
}

static bool take_pick(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  if (rule->pick != CALSIM_PICK_ALL)
    return calsim_wrong(s, "%s: only one of nth, every and p", key);
  if (strcmp(key, "p") == 0) {
    rule->pick = CALSIM_PICK_CHANCE;
    if (calsim_parse_real(value, &rule->chance) && rule->chance <= 1) return true;
    return calsim_wrong(s, "p=%s: expected a probability from 0 to 1", value);
  }
  rule->pick = strcmp(key, "nth") == 0 ? CALSIM_PICK_NTH : CALSIM_PICK_EVERY;
  return calsim_take_count(s, key, value, 1, UINT64_MAX - 1, &rule->n);
}

static bool take_firings(calsim_line *s, calsim_rule *rule, const char *value) {
  s->counted = true;
  rule->count = UINT64_MAX;
  return strcmp(value, "inf") == 0 ||
         calsim_take_count(s, "count", value, 1, UINT64_MAX - 1, &rule->count);
}

static bool take_model(calsim_line *s, calsim_rule *rule, const char *value) {
  if (strlen(value) >= sizeof rule->model || *value == '\0')
    return calsim_wrong(s, "model=%s: not a model name", value);
  calsim_copy_text(rule->model, sizeof rule->model, value);
  return true;
}

/* Keys of every kind. *known tells whether the key was one of them. */
static bool take_common(calsim_line *s, calsim_rule *rule, const char *key, const char *value,
                        bool *known) {
  static const char *const keys[] = {"on",    "nth",   "every",  "p",       "count",
                                     "skip",  "task",  "engine", "model",   "lane",
                                     "after", "until", "during", "inflight", "level"};
  uint64_t number;
  int index = calsim_index_in(key, keys, 15);
  *known = index >= 0;
  switch (index) {
    case 0: return calsim_take_point(s, rule, key, value);
    case 1:
    case 2:
    case 3: return take_pick(s, rule, key, value);
    case 4: return take_firings(s, rule, value);
    case 5: return calsim_take_count(s, key, value, 0, UINT64_MAX - 1, &rule->skip);
    case 6: return calsim_take_either(s, key, value, "prefill", "decode", &rule->task);
    case 7: return calsim_take_either(s, key, value, "ping", "pong", &rule->engine);
    case 8: return take_model(s, rule, value);
    case 9:
      if (!calsim_take_count(s, key, value, 0, CALSIM_MAX_LANES - 1, &number)) return false;
      rule->lane = (int64_t)number;
      return true;
    case 10: return calsim_take_time(s, key, value, &rule->after_ns);
    case 11: return calsim_take_time(s, key, value, &rule->until_ns);
    case 12:
      rule->during_load = true;
      return strcmp(value, "load") == 0 || calsim_wrong(s, "during=%s: expected load", value);
    case 13: return calsim_take_small(s, "inflight", value, CALSIM_BANKS, &rule->inflight_min);
    case 14:
      if (!calsim_take_count(s, key, value, CALSIM_CCU, CALSIM_DEVICE_SOFT, &number)) return false;
      rule->level = (uint32_t)number;
      return true;
    default: return true;
  }
}

static bool take_key(calsim_line *s, calsim_rule *rule, const char *key, const char *value) {
  bool known;
  if (!take_common(s, rule, key, value, &known)) return false;
  if (known) return true;
  if (!calsim_take_own(s, rule, key, value, &known)) return false;
  return known ||
         calsim_wrong(s, "unknown key '%s' for kind=%s", key, calsim_kind_name(rule->kind));
}

/* Cut a line into keys and values, in place. */
static bool split_keys(calsim_line *s, char *text) {
  char *rest = NULL;
  for (char *word = strtok_r(text, " \t\r", &rest); word != NULL;
       word = strtok_r(NULL, " \t\r", &rest)) {
    char *equals = strchr(word, '=');
    if (equals == NULL || equals == word) return calsim_wrong(s, "'%s' is not key=value", word);
    if (s->key_count == CALSIM_MAX_KEYS) return calsim_wrong(s, "too many keys");
    *equals = '\0';
    if (strcmp(word, "inflight>") == 0)
      equals[-1] = '\0';
    else if (strcmp(word, "inflight") == 0)
      return calsim_wrong(s, "inflight takes >=");
    for (uint32_t i = 0; i < s->key_count; ++i)
      if (strcmp(s->keys[i], word) == 0) return calsim_wrong(s, "key '%s' a second time", word);
    s->keys[s->key_count] = word;
    s->values[s->key_count++] = equals + 1;
  }
  return true;
}

static bool take_kind(calsim_line *s, calsim_rule *rule) {
  for (uint32_t i = 0; i < s->key_count; ++i)
    if (strcmp(s->keys[i], "kind") == 0)
      return calsim_take_kind(s->values[i], rule) != 0 ||
             calsim_wrong(s, "kind=%s is not a fault of this board", s->values[i]);
  return calsim_wrong(s, "kind= is missing");
}

static bool parse_rule(calsim_line *s, char *line, calsim_rule *rule) {
  char *rest = NULL, *word = strtok_r(line, " \t\r", &rest), *id = strtok_r(NULL, " \t\r", &rest);
  *rule = (calsim_rule){.lane = -1, .until_ns = UINT64_MAX};
  if (strcmp(word, "fault") != 0)
    return calsim_wrong(s, "a rule begins with 'fault', not '%s'", word);
  if (id == NULL || strchr(id, '=') != NULL || strlen(id) >= sizeof rule->id)
    return calsim_wrong(s, "after 'fault' comes an id of at most %zu characters",
                        sizeof rule->id - 1);
  calsim_copy_text(rule->id, sizeof rule->id, id);
  if (!split_keys(s, rest) || !take_kind(s, rule)) return false;
  for (uint32_t i = 0; i < s->key_count; ++i)
    if (strcmp(s->keys[i], "kind") != 0 && !take_key(s, rule, s->keys[i], s->values[i]))
      return false;
  if (!calsim_complete_rule(s, rule)) return false;
  if (!s->counted && !rule->lasting)
    rule->count =
        rule->pick == CALSIM_PICK_EVERY || rule->pick == CALSIM_PICK_CHANCE ? UINT64_MAX : 1;
  else if (!s->counted)
    rule->count = UINT64_MAX;
  return true;
}

/* Read one line into rules[*count], if it has a rule. */
static bool parse_line(calsim_line *s, char *line, calsim_rule *rules, uint32_t *count) {
  char *comment = strchr(line, '#');
  if (comment != NULL) *comment = '\0';
  if (line[strspn(line, " \t\r")] == '\0') return true;
  if (*count == CALSIM_MAX_RULES) return calsim_wrong(s, "more than %d rules", CALSIM_MAX_RULES);
  if (!parse_rule(s, line, &rules[*count])) return false;
  for (uint32_t i = 0; i < *count; ++i)
    if (strcmp(rules[i].id, rules[*count].id) == 0)
      return calsim_wrong(s, "id '%s' a second time", rules[i].id);
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
    calsim_line s = {.number = ++number, .message = message};
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
