/* calsim_caps.c - what the board says it can do: its own answers, or those of a persona, a text
 * table that lets it answer like another runtime so that refusals can be tested (npurt_sim.h). */
#include "calsim_internal.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UNKNOWN, NO, LIMITED, YES };
enum { PERSONA_BYTES_MAX = 65536, NOT_SAID_EVIDENCE = 3, INFERRED = 5 };
static const char SCOPE[] = CALSIM_NAME " 0.1.0";

/* By identity, from 1. */
static const char *const NAMES[CALSIM_CAPS] = {
    "IN_FLIGHT",         "PING_PONG",      "PARALLEL_MODE",       "OVERLAP_MODEL",
    "POLL_THREADSAFE",   "COUNTERS",       "CANCEL",              "JOB_TIMES",
    "CCU_RECORD",        "SUBMIT_ATOMIC",  "QUIESCE_ON_ERROR",    "KV_LAYOUTS",
    "KV_EFFECT",         "BATCH_LANES",    "LANE_RULE",           "INCREMENTAL_PREFILL",
    "PREEMPTION",        "MULTI_CONFIGURE", "CONFIGURE_BUSY",     "JOB_MODEL_HANDLE",
    "MODEL_ISOLATION",   "CHIP_AFFINITY",  "CHIP_RESET_DOMAIN",   "PARAM_SHARING",
    "MEMORY_ACCOUNTING", "HEALTH",         "EVENTS",              "MULTI_BOARD",
    "DEVICE_SELECT",     "EXCLUSIVE",      "LAYOUTS",             "SAME_MODEL_FAST_PATH",
    "NUMERIC_CHECK"};

typedef struct answer {
  uint32_t id, support;
  int64_t value;
  const char *note;
} answer;

static const answer ANSWERS[CALSIM_CAPS] = {
    {NPURT_CAP_IN_FLIGHT, YES, CALSIM_BANKS, "jobs accepted at once"},
    {NPURT_CAP_PING_PONG, YES, CALSIM_BANKS, "command banks"},
    {NPURT_CAP_PARALLEL_MODE, YES, 1, "phases overlap as OVERLAP_MODEL says; on at open"},
    {NPURT_CAP_OVERLAP_MODEL, YES, 0, ""},
    {NPURT_CAP_POLL_THREADSAFE, YES, 1, "any thread, any time"},
    {NPURT_CAP_COUNTERS, YES, 1, "per device; a device reset zeroes the job counters"},
    {NPURT_CAP_CANCEL, LIMITED, 1, "queued jobs only"},
    {NPURT_CAP_JOB_TIMES, YES, 1, "exact, in device time"},
    {NPURT_CAP_CCU_RECORD, YES, 1, "chip, code, pc"},
    {NPURT_CAP_SUBMIT_ATOMIC, YES, 1, "a refused submit has queued nothing"},
    {NPURT_CAP_QUIESCE_ON_ERROR, LIMITED, 1, "as QUIESCENT of each completion says"},
    {NPURT_CAP_KV_LAYOUTS, YES, 1 << 1 | 1 << 2 | 1 << 3, "bit i: layout i"},
    {NPURT_CAP_KV_EFFECT, YES, 1, "RELEASE wipes a lane, also one of unknown content"},
    {NPURT_CAP_BATCH_LANES, YES, CALSIM_MAX_ROWS, "largest batch"},
    {NPURT_CAP_LANE_RULE, YES, 1 << 0 | 1 << 1 | 1 << 2 | 1 << 3, "bit i: lane rule i"},
    {NPURT_CAP_INCREMENTAL_PREFILL, YES, 1, "where the submodel says so; bit-equal to one prefill"},
    {NPURT_CAP_PREEMPTION, NO, 0, ""},
    {NPURT_CAP_MULTI_CONFIGURE, NO, 1, "one calbin at a time"},
    {NPURT_CAP_CONFIGURE_BUSY, NO, 0, ""},
    {NPURT_CAP_JOB_MODEL_HANDLE, YES, 1, "a job's buffers name its calbin"},
    {NPURT_CAP_MODEL_ISOLATION, NO, 0, ""},
    {NPURT_CAP_CHIP_AFFINITY, NO, 0, ""},
    {NPURT_CAP_CHIP_RESET_DOMAIN, NO, 0, "a CCU reset takes both chips"},
    {NPURT_CAP_PARAM_SHARING, NO, 0, ""},
    {NPURT_CAP_MEMORY_ACCOUNTING, YES, 1, "accounted, not backed, bytes"},
    {NPURT_CAP_HEALTH, YES, 1, ""},
    {NPURT_CAP_EVENTS, YES, CALSIM_EVENT_RING, "events kept"},
    {NPURT_CAP_MULTI_BOARD, NO, 1, "every open is a board of its own"},
    {NPURT_CAP_DEVICE_SELECT, NO, 0, ""},
    {NPURT_CAP_EXCLUSIVE, YES, 1, "every open is a board of its own"},
    {NPURT_CAP_LAYOUTS, YES, 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5,
     "bit i: layout i; outputs are the same bits"},
    {NPURT_CAP_SAME_MODEL_FAST_PATH, NO, 0, ""},
    {NPURT_CAP_NUMERIC_CHECK, YES, 1, "NUMERIC_FLAG on infinite or undefined logits"},
};

static npurt_cap own_answer(const calsim_config *config, uint32_t i) {
  static const char *const overlaps[] = {
      "nothing of two jobs overlaps", "commands are ready early, phases are serial",
      "the transfer to the device overlaps the other job's EXEC", "all three phases overlap"};
  npurt_cap cap = {.id = ANSWERS[i].id,
                   .support = ANSWERS[i].support,
                   .evidence = CALSIM_EVIDENCE,
                   .source = CALSIM_SOURCE,
                   .value = ANSWERS[i].value};
  const char *note = ANSWERS[i].note;
  if (cap.id == NPURT_CAP_PARALLEL_MODE && config->overlap < CALSIM_OVERLAP_H2D) {
    cap.support = NO;
    cap.value = 0;
    note = "phases are serial";
  }
  if (cap.id == NPURT_CAP_OVERLAP_MODEL) {
    cap.value = config->overlap;
    note = overlaps[config->overlap];
  }
  if (cap.id == NPURT_CAP_CANCEL && config->cancel != CALSIM_CANCEL_QUEUED) {
    bool any = config->cancel == CALSIM_CANCEL_ANY;
    cap.support = any ? YES : NO;
    cap.value = any;
    note = any ? "a running job ends with its phase" : "";
  }
  uint32_t batch = calsim_profile_limits(config->profile).batch;
  if (cap.id == NPURT_CAP_BATCH_LANES && batch != 0) cap.value = batch;
  calsim_copy_text(cap.scope, sizeof cap.scope, SCOPE);
  calsim_copy_text(cap.note, sizeof cap.note, note);
  return cap;
}

/* ---- personas -------------------------------------------------------------------------- */

typedef struct table { /* a persona while it is read */
  npurt_cap *caps;
  char scope[48];
  bool said[CALSIM_CAPS];
  uint32_t line;
} table;

/* The arguments begin with the line's number. */
#define WRONG(...) calsim_error(NPURT_E_INVALID_ARG, "persona line %u: " __VA_ARGS__)

static int index_of(const char *text, const char *const *names, int count) {
  for (int i = 0; i < count; ++i)
    if (strcmp(text, names[i]) == 0) return i;
  return -1;
}

static bool take_value(const char *value, int64_t *out) {
  uint64_t amount;
  if (!calsim_parse_u64(value, &amount) || amount > INT64_MAX) return false;
  *out = (int64_t)amount;
  return true;
}

static bool take_answer(npurt_cap *cap, int key, const char *value) {
  static const char *const supports[] = {"unknown", "no", "limited", "yes"};
  static const char *const evidences[] = {"C0", "C1", "C2", "C3", "C4"};
  static const char *const sources[] = {"device", "vendor",   "header",
                                        "record", "inferred", "simulated"};
  enum { SUPPORT, EVIDENCE, SOURCE };
  int found = key == SUPPORT    ? index_of(value, supports, 4)
              : key == EVIDENCE ? index_of(value, evidences, 5)
              : key == SOURCE   ? index_of(value, sources, 6)
                                : take_value(value, &cap->value) - 1;
  if (found < 0) return false;
  if (key == SUPPORT) cap->support = (uint32_t)found;
  if (key == EVIDENCE) cap->evidence = (uint32_t)found;
  if (key == SOURCE) cap->source = (uint32_t)found + 1;
  return true;
}

/* The rest of a line that begins with "cap": name, then keys; the note is the last one and has
 * blanks. */
static npurt_status take_cap(table *t, char *text) {
  static const char *const keys[] = {"support", "evidence", "source", "value"};
  enum { NEEDED = 7 };
  char *rest = NULL, *name = strtok_r(text, " \t", &rest);
  int id = name == NULL ? -1 : index_of(name, NAMES, CALSIM_CAPS);
  if (id < 0) return WRONG("'%s' is no capability", t->line, name == NULL ? "" : name);
  if (t->said[id]) return WRONG("%s a second time", t->line, name);
  npurt_cap *cap = &t->caps[id];
  t->said[id] = true;
  calsim_copy_text(cap->scope, sizeof cap->scope, t->scope);
  cap->note[0] = '\0';
  uint32_t seen = 0;
  while (rest != NULL && *(rest += strspn(rest, " \t")) != '\0') {
    if (strncmp(rest, "note=", 5) == 0) {
      calsim_copy_text(cap->note, sizeof cap->note, rest + 5);
      break;
    }
    char *word = strtok_r(NULL, " \t", &rest), *equals = strchr(word, '=');
    if (equals != NULL) *equals = '\0';
    int key = equals == NULL ? -1 : index_of(word, keys, 4);
    if (key < 0) return WRONG("unknown key '%s'", t->line, word);
    if ((seen >> key & 1) != 0) return WRONG("key '%s' a second time", t->line, word);
    seen |= 1u << key;
    if (!take_answer(cap, key, equals + 1))
      return WRONG("%s does not take the value '%s'", t->line, word, equals + 1);
  }
  if ((seen & NEEDED) == NEEDED) return NPURT_OK;
  return WRONG("%s needs support=, evidence= and source=", t->line, name);
}

static npurt_status take_line(table *t, char *line) {
  char *comment = strchr(line, '#');
  if (comment != NULL) *comment = '\0';
  size_t length = strlen(line);
  while (length > 0 && strchr(" \t\r", line[length - 1]) != NULL) line[--length] = '\0';
  line += strspn(line, " \t");
  if (*line == '\0') return NPURT_OK;
  size_t word = strcspn(line, " \t");
  if (word == 3 && strncmp(line, "cap", 3) == 0) return take_cap(t, line + 3);
  const char *text = line + word + strspn(line + word, " \t");
  if (word != 5 || strncmp(line, "scope", 5) != 0 || *text == '\0')
    return WRONG("expected 'cap NAME …' or 'scope TEXT'", t->line);
  calsim_copy_text(t->scope, sizeof t->scope, text);
  return NPURT_OK;
}

static npurt_status read_table(char *text, npurt_cap *caps) {
  table t = {.caps = caps};
  npurt_status status = NPURT_OK;
  for (uint32_t i = 0; i < CALSIM_CAPS; ++i) {
    caps[i] = (npurt_cap){
        .id = i + 1, .support = UNKNOWN, .evidence = NOT_SAID_EVIDENCE, .source = INFERRED};
    calsim_copy_text(caps[i].note, sizeof caps[i].note, "the persona does not say");
  }
  for (char *line = text; line != NULL && status == NPURT_OK;) {
    char *next = strchr(line, '\n');
    if (next != NULL) *next++ = '\0';
    ++t.line;
    status = take_line(&t, line);
    line = next;
  }
  return status;
}

static npurt_status read_persona(const char *path, npurt_cap *caps) {
  FILE *file = fopen(path, "rbe");
  if (file == NULL)
    return calsim_error(NPURT_E_NOT_FOUND, "persona %s: %s", path, strerror(errno));
  char *text = malloc(PERSONA_BYTES_MAX);
  size_t length = text != NULL ? fread(text, 1, PERSONA_BYTES_MAX, file) : 0;
  bool failed = ferror(file) != 0;
  fclose(file);
  npurt_status status = NPURT_OK;
  if (text == NULL)
    status = calsim_error(NPURT_E_HOST_MEMORY, "out of host memory");
  else if (failed || length == PERSONA_BYTES_MAX || memchr(text, '\0', length) != NULL)
    status = calsim_error(NPURT_E_INVALID_ARG, "persona %s: cannot be read, is no text or has"
                          " 64 KiB or more", path);
  else
    text[length] = '\0';
  if (status == NPURT_OK) status = read_table(text, caps);
  free(text);
  return status;
}

npurt_status calsim_caps_load(calsim_device *d) {
  if (d->config.persona[0] != '\0') return read_persona(d->config.persona, d->caps);
  for (uint32_t i = 0; i < CALSIM_CAPS; ++i) d->caps[i] = own_answer(&d->config, i);
  return NPURT_OK;
}

npurt_status npurt_device_caps(npurt_device *handle, npurt_cap *arr, uint32_t stride,
                               uint32_t *inout_n) {
  if (inout_n == NULL || (arr == NULL && *inout_n > 0))
    return calsim_error(NPURT_E_INVALID_ARG, "caps: no room given");
  if (*inout_n > 0 && stride < CALSIM_ABI01(npurt_cap))
    return calsim_error(NPURT_E_STRUCT_SIZE, "caps: stride %u is too small", stride);
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  for (uint32_t i = 0; i < *inout_n && i < CALSIM_CAPS; ++i)
    calsim_put_element(arr, stride, i, &d->caps[i], sizeof d->caps[i]);
  *inout_n = CALSIM_CAPS;
  calsim_unlock(d);
  return NPURT_OK;
}
