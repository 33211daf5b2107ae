/* calsim_board.c - the board as a device: open, close, describe, health, counters, memory, options.
 * Its capabilities: calsim_caps.c.
 *
 * Two chips, two command banks, one host link. Everything a board knows is in its calsim_device. */
#include "calsim_internal.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BOARD_MASK = (1 << CALSIM_CHIPS) - 1 };
enum { EXCLUSIVE = 1 }; /* flag of npurt_open_params */

npurt_status npurt_device_count(uint32_t *count) {
  if (count == NULL) return calsim_error(NPURT_E_INVALID_ARG, "device_count: count is NULL");
  *count = 1;
  return NPURT_OK;
}

void calsim_describe(const calsim_config *config, npurt_device_desc *out) {
  *out = (npurt_device_desc){
      .chip_count = CALSIM_CHIPS, .chip_present_mask = BOARD_MASK, .version_valid = 7};
  calsim_copy_text(out->product, sizeof out->product, CALSIM_NAME);
  calsim_copy_text(out->serial, sizeof out->serial, "SIM-0");
  calsim_copy_text(out->bus_id, sizeof out->bus_id, "sim:0");
  calsim_copy_text(out->runtime_version, sizeof out->runtime_version, config->runtime_version);
  calsim_copy_text(out->driver_version, sizeof out->driver_version, config->driver_version);
  calsim_copy_text(out->firmware_version, sizeof out->firmware_version, config->firmware_version);
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip) out->dram_bytes[chip] = config->dram_bytes;
}

npurt_status npurt_device_describe(uint32_t index, npurt_device_desc *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_device_desc);
  if (status != NPURT_OK) return status;
  if (index != 0) return calsim_error(NPURT_E_NOT_FOUND, "board %u; there is board 0 only", index);
  calsim_config config;
  npurt_device_desc desc;
  status = calsim_config_parse(NULL, &config);
  if (status != NPURT_OK) return status;
  calsim_device *d = calsim_lock_latest();
  if (d == NULL) {
    calsim_describe(&config, &desc);
  } else {
    calsim_describe_now(d, &desc);
    calsim_unlock(d);
  }
  calsim_put(out, &desc, sizeof desc);
  return NPURT_OK;
}

npurt_status npurt_sim_describe(npurt_device *handle, npurt_device_desc *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_device_desc);
  if (status != NPURT_OK) return status;
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  npurt_device_desc desc;
  calsim_describe_now(d, &desc);
  calsim_unlock(d);
  calsim_put(out, &desc, sizeof desc);
  return NPURT_OK;
}

/* ---- open, close ----------------------------------------------------------------------- */

static void free_device(calsim_device *d) {
  for (uint32_t i = 0; i < d->job_count; ++i) calsim_job_free(d->jobs[i]);
  if (d->configured != NULL) calsim_calbin_drop(d, d->configured, CALSIM_RELEASED, false);
  for (uint32_t i = 0; i < d->objects.count; ++i) {
    const calsim_object *object = &d->objects.entries[i];
    if (object->kind == CALSIM_CALBIN)
      calsim_calbin_free(object->item);
    else if (object->kind == CALSIM_BANK)
      calsim_bank_free(object->item);
    else
      calsim_buffer_free(object->kind == CALSIM_BUFFER ? object->item : NULL);
  }
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip)
    if (d->chips[chip].fd >= 0) close(d->chips[chip].fd);
  if (d->scratch != NULL) munmap(d->scratch, CALSIM_SCRATCH_BYTES);
  if (d->scratch_fd >= 0) close(d->scratch_fd);
  calsim_shared_close(d);
  free(d->objects.entries);
  free(d->plan.rules);
  calsim_log_free(&d->log);
  pthread_cond_destroy(&d->changed);
  pthread_cond_destroy(&d->work);
  pthread_mutex_destroy(&d->lock);
  free(d);
}

static void init_locks(calsim_device *d) {
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&d->changed, &monotonic);
  pthread_cond_init(&d->work, &monotonic);
  pthread_condattr_destroy(&monotonic);
  pthread_mutex_init(&d->lock, NULL);
}

static npurt_status make_scratch(calsim_device *d) {
  d->scratch_fd = memfd_create("calsim-scratch", MFD_CLOEXEC);
  void *map = MAP_FAILED;
  if (d->scratch_fd >= 0 && ftruncate(d->scratch_fd, CALSIM_SCRATCH_BYTES) == 0)
    map = mmap(NULL, CALSIM_SCRATCH_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, d->scratch_fd, 0);
  if (map == MAP_FAILED)
    return calsim_error(NPURT_E_HOST_MEMORY, "no scratch memory: %s", strerror(errno));
  d->scratch = map;
  return NPURT_OK;
}

static npurt_status make_chips(calsim_device *d) {
  static const char *const names[CALSIM_CHIPS] = {"calsim-chip-0", "calsim-chip-1"};
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip) {
    d->chips[chip].fd = memfd_create(names[chip], MFD_CLOEXEC);
    d->chip_health[chip] = CALSIM_HEALTH_OK;
    if (d->chips[chip].fd < 0)
      return calsim_error(NPURT_E_HOST_MEMORY, "no memory file: %s", strerror(errno));
  }
  return NPURT_OK;
}

npurt_status npurt_device_open(const npurt_open_params *p, npurt_device **out) {
  npurt_status status = CALSIM_CHECK(p, npurt_open_params);
  if (status != NPURT_OK) return status;
  if (out == NULL || p->h.flags > 1 || (p->chip_mask & ~(uint32_t)BOARD_MASK) != 0)
    return calsim_error(NPURT_E_INVALID_ARG,
                        "device_open: out is NULL, flags 0x%x (0, 1) or chip mask 0x%x of 0x%x",
                        p->h.flags, p->chip_mask, (unsigned)BOARD_MASK);
  if (p->index != 0)
    return calsim_error(NPURT_E_NOT_FOUND, "board %u; there is board 0 only", p->index);
  calsim_config config;
  status = calsim_config_parse(p->config, &config);
  if (status != NPURT_OK) return status;
  calsim_device *d = calloc(1, sizeof *d);
  if (d == NULL) return calsim_error(NPURT_E_HOST_MEMORY, "out of host memory");
  d->config = config;
  d->chip_mask = p->chip_mask != 0 ? p->chip_mask : BOARD_MASK;
  d->epoch = 1;
  d->health = CALSIM_HEALTH_OK;
  d->in_flight_ceiling = CALSIM_BANKS;
  d->parallel = config.overlap >= CALSIM_OVERLAP_H2D;
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip) d->chips[chip].fd = -1;
  init_locks(d);
  d->scratch_fd = d->shared_fd = -1;
  status = calsim_shared_open(d, (p->h.flags & EXCLUSIVE) != 0);
  if (status == NPURT_OK) status = calsim_caps_load(d);
  if (status == NPURT_OK) status = make_chips(d);
  if (status == NPURT_OK) status = make_scratch(d);
  if (status == NPURT_OK) status = calsim_engine_start(d);
  if (status == NPURT_OK) {
    pthread_mutex_lock(&d->lock); /* the engine threads are there already */
    calsim_trace(d, "open profile=%d clock=%d seed=%llu chips=0x%x", config.profile, config.clock,
                 (unsigned long long)config.seed, d->chip_mask);
    pthread_mutex_unlock(&d->lock);
    status = calsim_register_device(d, out);
    if (status == NPURT_OK) return NPURT_OK;
  }
  pthread_mutex_lock(&d->lock); /* some threads may be there already */
  d->closing = true;
  pthread_cond_broadcast(&d->work);
  pthread_mutex_unlock(&d->lock);
  calsim_engine_stop(d);
  free_device(d);
  return status;
}

npurt_status npurt_device_close(npurt_device *handle) {
  calsim_device *d;
  if (!calsim_unregister_device(handle, &d))
    return calsim_error(NPURT_E_BAD_HANDLE, "handle %p is not an open device",
                        (const void *)handle);
  calsim_engine_stop(d);
  free_device(d);
  return NPURT_OK;
}

/* ---- health, counters, memory ---------------------------------------------------------- */

void calsim_health_set(calsim_device *d, uint32_t state, uint32_t advised, uint32_t chip) {
  d->chip_health[chip] = state;
  uint32_t worst = CALSIM_HEALTH_OK;
  for (uint32_t i = 0; i < CALSIM_CHIPS; ++i)
    if (d->chip_health[i] > worst) worst = d->chip_health[i];
  d->advised = worst == CALSIM_HEALTH_OK ? 0 : advised;
  if (worst == d->health) return;
  d->health = worst;
  calsim_event(d, NPURT_EV_HEALTH, 0, chip, NPURT_OK, "health %u, advised %u", worst, d->advised);
}

/* Faults of a look at the health; false when the device was closed meanwhile. */
static bool pass_health_fault(calsim_device *d) {
  const calsim_rule *rule = calsim_fault_at(d, CALSIM_AT_HEALTH, &(calsim_occasion){.job = NULL});
  if (rule == NULL) return true;
  if (rule->kind == CALSIM_HEALTH_BLOCK) return calsim_spend(d, rule->for_ns);
  calsim_carry_device(d, rule);
  return true;
}

npurt_status npurt_device_health(npurt_device *handle, npurt_health *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_health);
  if (status != NPURT_OK) return status;
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  if (!pass_health_fault(d)) {
    calsim_unlock(d);
    return calsim_error(NPURT_E_BAD_HANDLE, "the device was closed during the call");
  }
  bool computes = calsim_computes(d);
  npurt_health health = {.device_epoch = d->epoch,
                         .observed_ns = calsim_now(d),
                         .last_progress_ns = d->last_progress_ns,
                         .state = d->health,
                         .advised = d->advised,
                         .sticky = d->sticky,
                         .valid_mask = 0x7f};
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip) {
    if ((d->chip_mask >> chip & 1) == 0) continue;
    health.chip_state[chip] = d->chip_health[chip];
    health.temp_mdegc[chip] = calsim_temperature(d);
    health.clock_mhz[chip] = d->thermal.throttled ? 500 : 1000;
    health.throttle[chip] = d->thermal.throttled;
    health.power_mw[chip] = computes ? 24000 : 11000;
  }
  calsim_unlock(d);
  calsim_put(out, &health, sizeof health);
  return NPURT_OK;
}

npurt_status npurt_device_counters(npurt_device *handle, npurt_counters *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_counters);
  if (status != NPURT_OK) return status;
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  npurt_counters counters = d->totals;
  counters.device_epoch = d->epoch;
  counters.valid_mask = 0xffff;
  for (uint32_t i = 0; i < d->job_count; ++i) {
    const calsim_job *job = d->jobs[i];
    if (job->state >= NPURT_JOB_DONE) continue;
    if (job->state == NPURT_JOB_QUEUED)
      ++counters.pending;
    else
      ++counters.running;
    ++counters.inflight[job->engine - 1];
  }
  counters.left = counters.pending + counters.running;
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip)
    counters.busy_ns[chip] = d->chips[chip].busy_ns;
  calsim_rule *rule = calsim_fault_at(d, CALSIM_AT_COUNTERS, &(calsim_occasion){.job = NULL});
  if (rule != NULL) calsim_counter_change(&counters, rule);
  calsim_unlock(d);
  calsim_put(out, &counters, sizeof counters);
  return NPURT_OK;
}

npurt_status npurt_device_memory(npurt_device *handle, uint32_t chip, npurt_memory *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_memory);
  if (status != NPURT_OK) return status;
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  if (chip >= CALSIM_CHIPS || (d->chip_mask >> chip & 1) == 0) {
    status =
        calsim_error(NPURT_E_NOT_FOUND, "chip %u is not among the opened 0x%x", chip, d->chip_mask);
  } else {
    const calsim_chip *c = &d->chips[chip];
    npurt_memory memory = {.chip = chip,
                           .valid_mask = 0x7f,
                           .total = d->config.dram_bytes,
                           .used = calsim_chip_used(d, chip),
                           .params = c->params,
                           .kv = c->kv,
                           .workspace = c->workspace,
                           .dynamic =
                               c->dynamic + calsim_leaked(d, chip, NPURT_FX_FREES_DYNAMIC),
                           .unaccounted = calsim_leaked(d, chip, 0) +
                                          calsim_leaked(d, chip, NPURT_FX_FREES_ALL)};
    const calsim_rule *rule =
        calsim_fault_at(d, CALSIM_AT_MEMORY, &(calsim_occasion){.job = NULL});
    if (rule != NULL) (&memory.total)[rule->field] += (uint64_t)rule->amount;
    calsim_put(out, &memory, sizeof memory);
  }
  calsim_unlock(d);
  return status;
}

npurt_status npurt_clock_now(npurt_device *handle, uint64_t *ns) {
  if (ns == NULL) return calsim_error(NPURT_E_INVALID_ARG, "clock_now: ns is NULL");
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  *ns = calsim_now(d);
  calsim_unlock(d);
  return NPURT_OK;
}

int calsim_overlap(const calsim_device *d) {
  return d->parallel ? d->config.overlap : CALSIM_OVERLAP_NONE;
}

static npurt_status set_parallel(calsim_device *d, int64_t value) {
  if (value != 0 && (value != 1 || d->config.overlap < CALSIM_OVERLAP_H2D))
    return calsim_error(NPURT_E_UNSUPPORTED, "parallel mode %lld on a board with overlap %d",
                        (long long)value, d->config.overlap);
  if (calsim_in_flight(d) > 0)
    return calsim_error(NPURT_E_OBJECT_IN_FLIGHT, "parallel mode with %u jobs in flight",
                        calsim_in_flight(d));
  d->parallel = value == 1;
  return NPURT_OK;
}

npurt_status npurt_device_set(npurt_device *handle, uint32_t option, int64_t value) {
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  npurt_status status = NPURT_OK;
  if (option == NPURT_OPT_IN_FLIGHT_CEILING) {
    if (value >= 1 && value <= CALSIM_BANKS)
      d->in_flight_ceiling = (uint32_t)value;
    else
      status = calsim_error(NPURT_E_INVALID_ARG, "in-flight ceiling %lld (1, 2)", (long long)value);
  } else if (option == NPURT_OPT_PARALLEL_MODE) {
    status = set_parallel(d, value);
  } else if (option != NPURT_OPT_SUBMIT_MODE || value != 1) {
    status = calsim_error(NPURT_E_UNSUPPORTED, "option %u has no value %lld on this board", option,
                          (long long)value);
  }
  if (status == NPURT_OK) calsim_trace(d, "set option=%u value=%lld", option, (long long)value);
  calsim_unlock(d);
  return status;
}
