/* calsim_config.c - the text that npurt_device_open takes: lines of "key = value", each key at most
 * once. */
#include "calsim_internal.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool calsim_parse_u64(const char *text, uint64_t *out) {
  if (text[0] < '0' || text[0] > '9') return false; /* strtoull would take signs and blanks */
  char *end;
  errno = 0;
  unsigned long long value = strtoull(text, &end, strncmp(text, "0x", 2) == 0 ? 16 : 10);
  if (errno != 0 || *end != '\0') return false;
  *out = value;
  return true;
}

bool calsim_parse_real(const char *text, double *out) {
  if ((text[0] < '0' || text[0] > '9') && text[0] != '.') return false;
  char *end;
  errno = 0;
  double value = strtod(text, &end);
  if (errno != 0 || *end != '\0' || !isfinite(value)) return false;
  *out = value;
  return true;
}

bool calsim_parse_time(const char *text, uint64_t *out) {
  static const struct {
    const char *unit;
    double ns;
  } units[] = {{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}};
  char number[32];
  size_t digits = strspn(text, "0123456789.");
  double amount;
  if (digits == 0 || digits >= sizeof number) return false;
  memcpy(number, text, digits);
  number[digits] = '\0';
  for (size_t i = 0; i < 4; ++i) {
    if (strcmp(text + digits, units[i].unit) != 0 || !calsim_parse_real(number, &amount)) continue;
    if (amount * units[i].ns > 9e18) return false;
    *out = (uint64_t)(amount * units[i].ns + 0.5);
    return true;
  }
  return false;
}

/* One component of a dotted number; *text moves behind it and its dot. */
static uint64_t take_component(const char **text) {
  uint64_t value = 0;
  while (**text >= '0' && **text <= '9') value = value * 10 + (uint64_t)(*(*text)++ - '0');
  if (**text == '.') ++*text;
  return value;
}

int calsim_version_compare(const char *a, const char *b) {
  while (*a != '\0' || *b != '\0') {
    uint64_t x = take_component(&a), y = take_component(&b);
    if (x != y) return x < y ? -1 : 1;
  }
  return 0;
}

bool calsim_version_valid(const char *text) {
  for (uint32_t digits = 0;; ++text) {
    if (*text >= '0' && *text <= '9') {
      if (++digits > 9) return false;
    } else if (digits == 0 || (*text != '.' && *text != '\0')) {
      return false;
    } else if (*text == '\0') {
      return true;
    } else {
      digits = 0;
    }
  }
}

static bool choose(const char *value, const char *const *names, int count, int *out) {
  for (int i = 0; i < count; ++i) {
    if (strcmp(value, names[i]) != 0) continue;
    *out = i;
    return true;
  }
  return false;
}

static bool take_version(const char *value, char out[64]) {
  if (strlen(value) > 63 || !calsim_version_valid(value)) return false;
  calsim_copy_text(out, 64, value);
  return true;
}

static bool take_switch(const char *value, bool *out) {
  if (strcmp(value, "0") != 0 && strcmp(value, "1") != 0) return false;
  *out = value[0] == '1';
  return true;
}

/* all, none, or some of input, output and reuse with + between them. */
static bool take_checks(const char *value, uint32_t *out) {
  static const char *const names[] = {"input", "output", "reuse"};
  *out = strcmp(value, "all") == 0 ? CALSIM_CHECK_ALL : 0;
  if (*out != 0 || strcmp(value, "none") == 0) return true;
  for (;;) {
    size_t length = strcspn(value, "+");
    uint32_t bit = 0;
    for (uint32_t i = 0; i < 3; ++i)
      if (strlen(names[i]) == length && strncmp(value, names[i], length) == 0) bit = 1u << i;
    if (bit == 0 || (*out & bit) != 0) return false;
    *out |= bit;
    if (value[length] == '\0') return true;
    value += length + 1;
  }
}

/* Three times with / between them. */
static bool take_rate(const char *value, calsim_rate *out) {
  uint64_t *parts[] = {&out->base_ns, &out->each_ns, &out->context_ns};
  for (uint32_t i = 0; i < 3; ++i) {
    char part[32];
    size_t length = strcspn(value, "/");
    if (length >= sizeof part || (value[length] == '/') != (i < 2)) return false;
    memcpy(part, value, length);
    part[length] = '\0';
    if (!calsim_parse_time(part, parts[i])) return false;
    value += length + 1;
  }
  return true;
}

static const char *const KEYS[] = {
    "profile",         "seed",           "clock",           "scale", "strict",  "capture",
    "checks",          "overlap",        "h2d",             "d2h",   "prefill", "decode",
    "persona",         "dram_bytes",      "runtime_version", "driver_version",
    "firmware_version", "reset1",         "reset2",          "reset3", "reset4",
    "reset1_claims",   "reset2_claims",   "reset3_claims",   "reset4_claims",
    "reset_interval",  "board",           "cancel"};
enum {
  PROFILE,
  SEED,
  CLOCK,
  SCALE,
  STRICT,
  CAPTURE,
  CHECKS,
  OVERLAP,
  H2D,
  D2H,
  PREFILL,
  DECODE,
  PERSONA,
  DRAM_BYTES,
  RUNTIME,
  DRIVER,
  FIRMWARE,
  RESET_1,
  RESET_4 = RESET_1 + 3,
  RESET_1_CLAIMS,
  RESET_4_CLAIMS = RESET_1_CLAIMS + 3,
  RESET_INTERVAL,
  BOARD,
  CANCEL,
  KEY_COUNT
};

static bool set_key(calsim_config *c, int key, const char *value) {
  static const char *const profiles[] = {"tiny",   "null",   "cost",   "tp2-ref",
                                         "tp2-b4", "tp2-b8", "tp2-b16"};
  static const char *const overlaps[] = {"0", "1", "2", "3"};
  static const char *const clocks[] = {"manual", "real", "virtual"};
  static const char *const cancels[] = {"none", "queued", "any"};
  if (key >= RESET_1 && key <= RESET_4)
    return calsim_scope_take(&c->scopes[key - RESET_1], false, value);
  if (key >= RESET_1_CLAIMS && key <= RESET_4_CLAIMS)
    return calsim_scope_take(&c->scopes[key - RESET_1_CLAIMS], true, value);
  switch (key) {
    case PROFILE: return choose(value, profiles, 7, &c->profile);
    case SEED: return calsim_parse_u64(value, &c->seed);
    case CLOCK: return choose(value, clocks, 3, &c->clock);
    case SCALE: return calsim_parse_real(value, &c->scale) && c->scale >= 1e-3 && c->scale <= 1e6;
    case STRICT: return take_switch(value, &c->strict);
    case CAPTURE: return take_switch(value, &c->capture);
    case CHECKS: return take_checks(value, &c->checks);
    case OVERLAP: return choose(value, overlaps, 4, &c->overlap);
    case H2D: return calsim_parse_time(value, &c->h2d_ns);
    case D2H: return calsim_parse_time(value, &c->d2h_ns);
    case PREFILL: return take_rate(value, &c->prefill);
    case DECODE: return take_rate(value, &c->decode);
    case PERSONA:
      calsim_copy_text(c->persona, sizeof c->persona, value);
      return *value != '\0' && strlen(value) < sizeof c->persona;
    case DRAM_BYTES: return calsim_parse_u64(value, &c->dram_bytes) && c->dram_bytes > 0;
    case RUNTIME: return take_version(value, c->runtime_version);
    case DRIVER: return take_version(value, c->driver_version);
    case CANCEL: return choose(value, cancels, 3, &c->cancel);
    case BOARD:
      calsim_copy_text(c->board, sizeof c->board, value);
      return *value != '\0' && strlen(value) < sizeof c->board;
    case RESET_INTERVAL: return calsim_parse_time(value, &c->reset_interval_ns);
    default: return take_version(value, c->firmware_version);
  }
}

/* Cut blanks at both ends, in place. */
static char *trim(char *text) {
  text += strspn(text, " \t\r");
  size_t length = strlen(text);
  while (length > 0 && strchr(" \t\r", text[length - 1]) != NULL) text[--length] = '\0';
  return text;
}

static npurt_status parse_line(char *line, uint32_t number, bool *seen, calsim_config *config) {
  char *comment = strchr(line, '#');
  if (comment != NULL) *comment = '\0';
  char *key = trim(line), *equals = strchr(key, '=');
  if (*key == '\0') return NPURT_OK;
  if (equals == NULL)
    return calsim_error(NPURT_E_INVALID_ARG, "config line %u: not \"key = value\": %s", number,
                        key);
  *equals = '\0';
  char *value = trim(equals + 1);
  key = trim(key);
  int index;
  if (!choose(key, KEYS, KEY_COUNT, &index))
    return calsim_error(NPURT_E_INVALID_ARG, "config line %u: unknown key '%s'", number, key);
  if (seen[index])
    return calsim_error(NPURT_E_INVALID_ARG, "config line %u: key '%s' a second time", number, key);
  seen[index] = true;
  if (!set_key(config, index, value))
    return calsim_error(NPURT_E_INVALID_ARG, "config line %u: %s does not take the value '%s'",
                        number, key, value);
  return NPURT_OK;
}

npurt_status calsim_config_parse(const char *text, calsim_config *out) {
  bool seen[KEY_COUNT] = {false};
  *out = (calsim_config){.scale = 1.0,
                         .dram_bytes = 16ull << 30,
                         .overlap = CALSIM_OVERLAP_FULL,
                         .cancel = CALSIM_CANCEL_QUEUED,
                         .clock = CALSIM_CLOCK_USUAL,
                         .h2d_ns = 50000,
                         .d2h_ns = 50000,
                         .prefill = {8000000, 100000, 0},
                         .decode = {8000000, 500000, 0}};
  strcpy(out->runtime_version, "0.1.0");
  strcpy(out->driver_version, "0.1.0");
  strcpy(out->firmware_version, "0.1.0");
  out->checks = CALSIM_CHECK_ALL;
  calsim_scopes_default(out);
  if (text == NULL) return NPURT_OK;
  if (strnlen(text, 65536) == 65536)
    return calsim_error(NPURT_E_INVALID_ARG, "config text of 64 KiB or more");
  char *copy = strdup(text);
  if (copy == NULL) return calsim_error(NPURT_E_HOST_MEMORY, "out of host memory");
  npurt_status status = NPURT_OK;
  uint32_t number = 0;
  for (char *line = copy; line != NULL && status == NPURT_OK;) {
    char *next = strchr(line, '\n');
    if (next != NULL) *next++ = '\0';
    status = parse_line(line, ++number, seen, out);
    line = next;
  }
  free(copy);
  if (!seen[CHECKS]) out->checks = out->profile == CALSIM_PROFILE_TINY ? CALSIM_CHECK_ALL : 0;
  calsim_scope *soft = &out->scopes[CALSIM_DEVICE_SOFT - 1];
  if (out->board[0] != '\0' && !seen[RESET_4]) soft->does |= NPURT_FX_OTHER_PROCESS;
  if (out->board[0] != '\0' && !seen[RESET_4_CLAIMS]) soft->yes |= NPURT_FX_OTHER_PROCESS;
  for (int key = H2D; key <= DECODE && status == NPURT_OK; ++key)
    if (seen[key] && out->profile != CALSIM_PROFILE_COST)
      status = calsim_error(NPURT_E_INVALID_ARG, "config: %s belongs to profile = cost", KEYS[key]);
  if (status == NPURT_OK && seen[SCALE] && out->clock != CALSIM_CLOCK_REAL)
    status = calsim_error(NPURT_E_INVALID_ARG, "config: scale belongs to clock = real");
  return status;
}
