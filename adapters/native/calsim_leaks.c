/* calsim_leaks.c - accounted memory that nobody uses and that is not given back: by a fault of a
 * configuration or of a release, until a reset or time ends it. */
#include "calsim_internal.h"

static void forget(calsim_device *d, uint32_t i) { d->leaks[i] = d->leaks[--d->leak_count]; }

/* Drop what has fallen by itself. */
static void pass_time(calsim_device *d) {
  uint64_t now = calsim_now(d);
  for (uint32_t i = d->leak_count; i-- > 0;)
    if (d->leaks[i].until_ns <= now) forget(d, i);
}

uint64_t calsim_leaked(calsim_device *d, uint32_t chip, uint64_t ended_by) {
  uint64_t bytes = 0;
  pass_time(d);
  for (uint32_t i = 0; i < d->leak_count; ++i)
    if (d->leaks[i].chip == chip && d->leaks[i].ended_by == ended_by) bytes += d->leaks[i].bytes;
  return bytes;
}

uint64_t calsim_chip_used(calsim_device *d, uint32_t chip) {
  const calsim_chip *c = &d->chips[chip];
  uint64_t used = c->params + c->kv + c->workspace + c->dynamic;
  pass_time(d);
  for (uint32_t i = 0; i < d->leak_count; ++i)
    if (d->leaks[i].chip == chip) used += d->leaks[i].bytes;
  return used;
}

void calsim_leak_add(calsim_device *d, calsim_leak leak) {
  uint64_t room = d->config.dram_bytes - calsim_chip_used(d, leak.chip);
  if (leak.bytes > room) leak.bytes = room;
  calsim_trace(d, "leak chip=%u bytes=%llu", leak.chip, (unsigned long long)leak.bytes);
  for (uint32_t i = 0; i < d->leak_count; ++i) {
    calsim_leak *same = &d->leaks[i];
    if (same->chip != leak.chip || same->ended_by != leak.ended_by ||
        same->until_ns != leak.until_ns)
      continue;
    same->bytes += leak.bytes;
    return;
  }
  if (d->leak_count < CALSIM_MAX_LEAKS) d->leaks[d->leak_count++] = leak;
}

bool calsim_leaks_end(calsim_device *d, uint64_t effects) {
  bool any = false;
  pass_time(d);
  for (uint32_t i = d->leak_count; i-- > 0;) {
    if ((d->leaks[i].ended_by & effects) == 0) continue;
    any = true;
    forget(d, i);
  }
  return any;
}
