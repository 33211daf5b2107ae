/* calsim_trace.c - what the board remembers: the trace, the ring of events and the list of
 * violations.
 *
 * The trace must be the same bytes for the same plan and calls, so it numbers jobs and
 * configurations per device and never prints an address, a ticket or a generation. It stops at a
 * bound and says how many lines are missing. */
#include "calsim_internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void append_line(calsim_device *d, const char *line, size_t length) {
  calsim_log *log = &d->log;
  if (log->length + length + 1 > CALSIM_TRACE_BYTES_MAX) {
    ++log->lines_lost;
    return;
  }
  if (log->length + length + 1 > log->room) {
    uint64_t room = log->room == 0 ? 65536 : log->room * 2;
    char *text = realloc(log->text, room);
    if (text == NULL) {
      ++log->lines_lost;
      return;
    }
    log->text = text;
    log->room = room;
  }
  memcpy(log->text + log->length, line, length);
  log->length += length;
}

static bool is_full(calsim_log *log) {
  if (log->lines_lost > 0) ++log->lines_lost;
  return log->lines_lost > 0;
}

void calsim_trace(calsim_device *d, const char *format, ...) {
  char line[512];
  if (is_full(&d->log)) return;
  int head = snprintf(line, sizeof line, "%llu ", (unsigned long long)calsim_now(d));
  va_list args;
  va_start(args, format);
  int body = vsnprintf(line + head, sizeof line - (size_t)head, format, args);
  va_end(args);
  size_t length = (size_t)head + (size_t)body;
  if (length > sizeof line - 2) length = sizeof line - 2;
  line[length++] = '\n';
  append_line(d, line, length);
}

/* Write a name and a number; return where the next character goes. */
static char *put_field(char *at, const char *name, uint64_t number) {
  char digits[20];
  size_t begin = sizeof digits, length = strlen(name);
  memcpy(at, name, length);
  do {
    digits[--begin] = (char)('0' + number % 10);
    number /= 10;
  } while (number != 0);
  memcpy(at + length, digits + begin, sizeof digits - begin);
  return at + length + (sizeof digits - begin);
}

/* By hand, since a list has two for each row of a job, and printf takes ten times as long. */
void calsim_trace_kv(calsim_device *d, const char *verb, const npurt_kv_op *op) {
  char line[256], *at = line; /* six numbers of at most 20 digits, and less than 50 characters */
  if (is_full(&d->log)) return;
  at = put_field(at, "", calsim_now(d));
  memcpy(at, " kv ", 4);
  at += 4;
  memcpy(at, verb, strlen(verb));
  at += strlen(verb);
  at = put_field(at, " lane=", op->lane);
  at = put_field(at, " from=", op->from_len);
  at = put_field(at, " to=", op->to_len);
  at = put_field(at, " seq=", op->seq_tag);
  at = put_field(at, " txn=", op->txn);
  *at++ = '\n';
  append_line(d, line, (size_t)(at - line));
}

static npurt_event make_event(calsim_device *d, uint32_t kind, npurt_ticket ticket, uint32_t chip,
                              npurt_status code, const char *text) {
  npurt_event event = {.seq = ++d->log.next_seq,
                       .when_ns = calsim_now(d),
                       .device_epoch = d->epoch,
                       .ticket = ticket,
                       .kind = kind,
                       .chip = chip,
                       .code = code};
  calsim_copy_text(event.text, sizeof event.text, text);
  return event;
}

static void push_event(calsim_log *log, const npurt_event *event) {
  if (log->ring_count == CALSIM_EVENT_RING) {
    log->ring_first = (log->ring_first + 1) % CALSIM_EVENT_RING;
    --log->ring_count;
    ++log->ring_lost;
  }
  log->ring[(log->ring_first + log->ring_count++) % CALSIM_EVENT_RING] = *event;
}

void calsim_event(calsim_device *d, uint32_t kind, npurt_ticket ticket, uint32_t chip,
                  npurt_status code, const char *format, ...) {
  char text[128];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  npurt_event event = make_event(d, kind, ticket, chip, code, text);
  push_event(&d->log, &event);
  calsim_trace(d, "event kind=%u chip=%u code=0x%04x %s", kind, chip, (unsigned)code, text);
}

void calsim_violation(calsim_device *d, const calsim_job *job, npurt_status code,
                      const char *format, ...) {
  char text[128];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  npurt_event event =
      make_event(d, NPURT_EV_VIOLATION, job != NULL ? job->ticket : 0, 0, code, text);
  push_event(&d->log, &event);
  calsim_trace(d, "violation job=%llu code=0x%04x %s",
               (unsigned long long)(job != NULL ? job->ordinal : 0), (unsigned)code, text);
  calsim_log *log = &d->log;
  if (log->violations == NULL)
    log->violations = calloc(CALSIM_MAX_VIOLATIONS, sizeof *log->violations);
  if (log->violations != NULL && log->violation_count < CALSIM_MAX_VIOLATIONS)
    log->violations[log->violation_count++] = event;
  else
    ++log->violations_lost;
  if (!d->config.strict) return;
  fprintf(stderr, "calsim: violation (strict): %s\n", text);
  abort();
}

void calsim_log_free(calsim_log *log) {
  free(log->text);
  free(log->violations);
}

npurt_status npurt_device_event(npurt_device *handle, npurt_event *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_event);
  if (status != NPURT_OK) return status;
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  calsim_log *log = &d->log;
  status = NPURT_E_EMPTY;
  if (log->ring_count > 0) {
    npurt_event event = log->ring[log->ring_first];
    event.dropped = log->ring_lost;
    log->ring_lost = 0;
    log->ring_first = (log->ring_first + 1) % CALSIM_EVENT_RING;
    --log->ring_count;
    calsim_put(out, &event, sizeof event);
    status = NPURT_OK;
  }
  calsim_unlock(d);
  return status == NPURT_OK ? status : calsim_error(status, "no event");
}

npurt_status npurt_sim_trace(npurt_device *handle, char *buf, uint64_t cap, uint64_t *need) {
  if (buf == NULL && cap > 0)
    return calsim_error(NPURT_E_INVALID_ARG, "trace: buf is NULL but cap is not 0");
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  char tail[64] = "";
  if (d->log.lines_lost > 0)
    snprintf(tail, sizeof tail, "lost %llu lines\n", (unsigned long long)d->log.lines_lost);
  uint64_t length = d->log.length, total = length + strlen(tail);
  if (need != NULL) *need = total + 1;
  if (cap > 0) {
    uint64_t first = length < cap - 1 ? length : cap - 1;
    if (first > 0) memcpy(buf, d->log.text, first);
    calsim_copy_text(buf + first, cap - first, tail);
  }
  calsim_unlock(d);
  return NPURT_OK;
}

npurt_status npurt_sim_violations(npurt_device *handle, npurt_event *arr, uint32_t stride,
                                  uint32_t *inout_n) {
  if (inout_n == NULL || (arr == NULL && *inout_n > 0))
    return calsim_error(NPURT_E_INVALID_ARG, "violations: no room given");
  if (*inout_n > 0 && stride < CALSIM_ABI01(npurt_event))
    return calsim_error(NPURT_E_STRUCT_SIZE, "violations: stride %u is too small", stride);
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  for (uint32_t i = 0; i < *inout_n && i < d->log.violation_count; ++i)
    calsim_put_element(arr, stride, i, &d->log.violations[i], sizeof(npurt_event));
  *inout_n = d->log.violation_count + d->log.violations_lost;
  calsim_unlock(d);
  return NPURT_OK;
}
