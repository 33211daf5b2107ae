/* calsim_clock.c - device time: what it is, and what a caller does to it.
 *
 * The manual clock jumps to the next event when it is stepped; the real one is the host's monotonic
 * clock times a scale. */
#include "calsim_internal.h"
#include <time.h>

/* ---- clock ----------------------------------------------------------------------------- */

uint64_t calsim_host_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

bool calsim_is_real(const calsim_device *d) { return d->config.clock == CALSIM_CLOCK_REAL; }

uint64_t calsim_now(const calsim_device *d) {
  if (!calsim_is_real(d)) return d->base_ns;
  return d->base_ns + (uint64_t)((double)(calsim_host_now() - d->base_host_ns) * d->scale);
}

uint64_t calsim_host_ns_of(const calsim_device *d, uint64_t device_ns) {
  if (device_ns <= d->base_ns) return d->base_host_ns;
  double wait = (double)(device_ns - d->base_ns) / d->scale;
  return wait > 1e18 ? d->base_host_ns + 1000000000000000000u : d->base_host_ns + (uint64_t)wait;
}

static struct timespec to_timespec(uint64_t ns) {
  return (struct timespec){.tv_sec = (time_t)(ns / 1000000000u),
                           .tv_nsec = (long)(ns % 1000000000u)};
}

struct timespec calsim_host_in(uint64_t ns) { return to_timespec(calsim_host_now() + ns); }

struct timespec calsim_host_time(const calsim_device *d, uint64_t device_ns) {
  /* Never wake before the device clock has got there. */
  return to_timespec(calsim_host_ns_of(d, device_ns) + 1);
}

bool calsim_spend(calsim_device *d, uint64_t ns) {
  uint64_t now = calsim_now(d), until = ns > UINT64_MAX - now ? UINT64_MAX : now + ns;
  if (!calsim_is_real(d)) {
    /* Without end there is no instant to jump to: a day is more than anybody waits. */
    const uint64_t day = 86400000000000u;
    d->base_ns = ns > day ? now + day : until;
    return !d->closing;
  }
  while (!d->closing && calsim_now(d) < until) {
    struct timespec end = calsim_host_time(d, until);
    pthread_cond_timedwait(&d->changed, &d->lock, &end);
  }
  return !d->closing;
}

/* ---- stepping -------------------------------------------------------------------------- */

/* Wait for other steppers and resets; is there an event to fire? */
static bool can_fire(calsim_device *d) {
  while ((calsim_is_busy(d) || d->resetting) && !d->closing)
    pthread_cond_wait(&d->changed, &d->lock);
  return d->pending_count > 0 && !d->closing;
}

static bool reached(const calsim_device *d, uint64_t arg) {
  uint32_t wanted = (uint32_t)(arg >> 56);
  const calsim_job *job = calsim_job_of(d, arg & ((1ull << 56) - 1));
  if (wanted == 0 || wanted > NPURT_JOB_DONE) wanted = NPURT_JOB_DONE;
  return job == NULL || job->state >= wanted;
}

static uint64_t ended_count(const calsim_device *d) {
  return d->totals.finished + d->totals.aborted + d->totals.failed;
}

static npurt_status step_loop(calsim_device *d, uint32_t how, uint64_t arg, uint32_t *fired) {
  const bool bounded = how == NPURT_SIM_STEP_TIME || how == NPURT_SIM_STEP_END;
  const uint64_t ended = ended_count(d);
  while (!(how == NPURT_SIM_STEP_TICKET && reached(d, arg))) {
    if (!can_fire(d))
      return how == NPURT_SIM_STEP_TICKET || how == NPURT_SIM_STEP_KIND ? NPURT_E_NOT_READY
                                                                        : NPURT_OK;
    if (bounded && calsim_earliest(d, 0)->time > arg) return NPURT_OK;
    uint32_t kind = calsim_fire(d, 0);
    ++*fired;
    if (how == NPURT_SIM_STEP_ONE || (how == NPURT_SIM_STEP_KIND && kind == arg)) return NPURT_OK;
    if (how == NPURT_SIM_STEP_END && ended_count(d) != ended) return NPURT_OK;
  }
  return NPURT_OK;
}

npurt_status npurt_sim_step(npurt_device *handle, uint32_t how, uint64_t arg, uint32_t *fired) {
  if (how < NPURT_SIM_STEP_ONE || how > NPURT_SIM_STEP_END)
    return calsim_error(NPURT_E_INVALID_ARG, "step: how %u", how);
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  uint32_t count = 0;
  npurt_status status;
  if (calsim_is_real(d)) {
    status = calsim_error(NPURT_E_BAD_STATE, "a real clock is not stepped");
  } else if (how == NPURT_SIM_STEP_TICKET && calsim_job_of(d, arg & ((1ull << 56) - 1)) == NULL) {
    status = NPURT_E_STALE_TICKET;
  } else {
    status = step_loop(d, how, arg, &count);
    if (status == NPURT_E_NOT_READY) calsim_error(status, "the events ran out before that");
    if (how == NPURT_SIM_STEP_TIME && !d->closing && arg > d->base_ns) d->base_ns = arg;
    pthread_cond_broadcast(&d->changed);
  }
  calsim_unlock(d);
  if (fired != NULL) *fired = count;
  return status;
}

static npurt_status set_scale(calsim_device *d, uint64_t thousandths) {
  if (!calsim_is_real(d)) return calsim_error(NPURT_E_BAD_STATE, "only a real clock has a scale");
  if (thousandths == 0 || thousandths > 1000000000u)
    return calsim_error(NPURT_E_INVALID_ARG, "scale %llu thousandths",
                        (unsigned long long)thousandths);
  d->base_ns = calsim_now(d);
  d->base_host_ns = calsim_host_now();
  d->scale = (double)thousandths / 1000;
  pthread_cond_broadcast(&d->work);
  pthread_cond_broadcast(&d->changed);
  return NPURT_OK;
}

npurt_status npurt_sim_clock(npurt_device *handle, uint32_t op, uint64_t value, uint64_t *out) {
  if (out == NULL) return calsim_error(NPURT_E_INVALID_ARG, "sim_clock: out is NULL");
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  npurt_status status = NPURT_OK;
  if (op == NPURT_SIM_CLOCK_SCALE)
    status = set_scale(d, value);
  else if (op != NPURT_SIM_CLOCK_READ && op != NPURT_SIM_CLOCK_NEXT)
    status = calsim_error(NPURT_E_UNSUPPORTED, "sim_clock: operation %u", op);
  if (status == NPURT_OK && op == NPURT_SIM_CLOCK_NEXT)
    *out = d->pending_count > 0 ? calsim_earliest(d, 0)->time : UINT64_MAX;
  else if (status == NPURT_OK)
    *out = calsim_now(d);
  calsim_unlock(d);
  return status;
}
