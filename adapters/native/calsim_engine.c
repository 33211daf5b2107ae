/* calsim_engine.c - time and the life of a job: QUEUED, H2D, EXEC, D2H, terminal.
 *
 * Overlap hypothesis 0: phases of two jobs never run at once; the second command bank only keeps a
 * job ready. The engine is a queue of pending events ordered by (time, sequence). Firing one does
 * its work without the lock (kernel copies, forward), then settles the job. The manual clock jumps
 * to the event; the real clock lets the engine thread work first and then sleep until the event is
 * due, so that computing counts as part of the simulated time. */
#include "calsim_internal.h"
#include <stdio.h>
#include <string.h>
#include <time.h>

static const char *const STATES[] = {"?",    "queued", "h2d",     "exec", "d2h",
                                     "done", "failed", "aborted", "lost"};
enum { SPIN_NS = 20000 }; /* below this a sleep overshoots more than it saves */

/* ---- clock ----------------------------------------------------------------------------- */

static uint64_t host_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static bool is_real(const calsim_device *d) { return d->config.clock == CALSIM_CLOCK_REAL; }

uint64_t calsim_now(const calsim_device *d) {
  if (!is_real(d)) return d->base_ns;
  return d->base_ns + (uint64_t)((double)(host_now() - d->base_host_ns) * d->scale);
}

static uint64_t host_ns_of(const calsim_device *d, uint64_t device_ns) {
  if (device_ns <= d->base_ns) return d->base_host_ns;
  double wait = (double)(device_ns - d->base_ns) / d->scale;
  return wait > 1e18 ? d->base_host_ns + 1000000000000000000u : d->base_host_ns + (uint64_t)wait;
}

struct timespec calsim_host_time(const calsim_device *d, uint64_t device_ns) {
  uint64_t ns = host_ns_of(d, device_ns) + 1; /* never wake before the device clock has got there */
  return (struct timespec){.tv_sec = (time_t)(ns / 1000000000u),
                           .tv_nsec = (long)(ns % 1000000000u)};
}

/* ---- queue ----------------------------------------------------------------------------- */

static void push(calsim_device *d, calsim_job *job, uint32_t kind, uint64_t time) {
  d->pending[d->pending_count++] = (calsim_pending){time, d->next_pending_seq++, kind, job};
  pthread_cond_signal(&d->work);
}

static uint32_t earliest(const calsim_device *d) {
  uint32_t best = 0;
  for (uint32_t i = 1; i < d->pending_count; ++i) {
    const calsim_pending *a = &d->pending[i], *b = &d->pending[best];
    if (a->time < b->time || (a->time == b->time && a->seq < b->seq)) best = i;
  }
  return best;
}

static calsim_pending take(calsim_device *d, uint32_t i) {
  calsim_pending event = d->pending[i];
  d->pending[i] = d->pending[--d->pending_count];
  return event;
}

void calsim_forget_events(calsim_device *d, const calsim_job *job) {
  for (uint32_t i = d->pending_count; i-- > 0;)
    if (d->pending[i].job == job) take(d, i);
}

void calsim_engine_next(calsim_device *d) {
  if (d->active != NULL || d->resetting || d->closing) return;
  for (uint32_t i = 0; i < d->job_count; ++i) {
    if (d->jobs[i]->state != NPURT_JOB_QUEUED || d->jobs[i]->never_runs) continue;
    d->active = d->jobs[i];
    push(d, d->active, NPURT_SIM_EVENT_START, calsim_now(d));
    return;
  }
}

/* ---- life of a job --------------------------------------------------------------------- */

/* What the bank must believe of the job's lanes from now on. */
static void settle_lanes(const calsim_job *job) {
  calsim_bank *bank = job->bank;
  if (calsim_bank_lost(bank)) return;
  uint32_t seen = 0;
  for (uint32_t row = 0; row < job->row_count; ++row) {
    const npurt_lane *r = &job->rows[row];
    if (!r->active) continue;
    calsim_lane *lane = &bank->lanes[r->lane];
    uint32_t end = r->kv_len + r->tokens;
    bool done = (job->rows_done >> row & 1) != 0;
    if (seen++ < job->rows_touched && end > lane->touched) lane->touched = end;
    if (done && job->kv_effect != CALSIM_KV_UNKNOWN) lane->written = end;
    if (job->kv_effect == CALSIM_KV_UNKNOWN || (job->kv_effect == CALSIM_KV_PARTIAL && !done))
      lane->certainty = CALSIM_UNKNOWN;
  }
}

/* Let a job be terminal as its `end` says. */
static void conclude(calsim_device *d, calsim_job *job) {
  job->state = job->end.state;
  job->status = job->end.status;
  job->kv_effect = job->end.kv_effect;
  job->flags |= CALSIM_FLAG_TERMINAL | job->end.flags;
  job->times.visible = calsim_now(d);
  job->times.valid |= 1u << 8;
  d->last_progress_ns = job->times.visible;
  if (job->state == NPURT_JOB_DONE)
    ++d->totals.finished;
  else if (job->state == NPURT_JOB_ABORTED)
    ++d->totals.aborted;
  else
    ++d->totals.failed;
  settle_lanes(job);
  calsim_trace(d, "%s job=%llu code=0x%04x kv=%u rows_done=%llx flags=%u%s%s", STATES[job->state],
               (unsigned long long)job->ordinal, (unsigned)job->status, job->kv_effect,
               (unsigned long long)job->rows_done, job->flags, job->reason[0] != '\0' ? " " : "",
               job->reason);
  pthread_cond_broadcast(&d->changed);
}

void calsim_job_end(calsim_device *d, calsim_job *job, uint32_t state, npurt_status status,
                    uint32_t kv_effect, uint32_t flags) {
  job->end = (calsim_end){
      .state = state, .kv_effect = kv_effect, .flags = flags, .status = status};
  calsim_forget_events(d, job);
  if (d->active == job) d->active = NULL;
  const calsim_rule *rule = calsim_job_fault_at(d, CALSIM_AT_VISIBLE, job);
  bool hidden = rule != NULL && (rule->kind == CALSIM_LATE_COMPLETION ||
                                 (rule->kind == CALSIM_LOST_COMPLETION && !rule->poll_sees));
  if (hidden) {
    calsim_trace(d, "hidden job=%llu", (unsigned long long)job->ordinal);
    if (rule->kind == CALSIM_LATE_COMPLETION)
      push(d, job, NPURT_SIM_EVENT_LATE_END, calsim_now(d) + rule->delay_ns);
    return;
  }
  job->unseen_by_wait = rule != NULL && rule->kind == CALSIM_LOST_COMPLETION;
  conclude(d, job);
  if (rule == NULL || rule->kind != CALSIM_LATE_DMA) return;
  job->late_bytes = rule->bytes;
  push(d, job, NPURT_SIM_EVENT_LATE_WRITE, calsim_now(d) + rule->delay_ns);
}

static void settle_late_end(calsim_device *d, calsim_job *job) {
  job->end.flags |= CALSIM_FLAG_LATE;
  ++d->totals.late;
  calsim_event(d, NPURT_EV_LATE_COMPLETION, job->ticket, 0, NPURT_OK, "told late");
  conclude(d, job);
}

static void settle_late_write(calsim_device *d, calsim_job *job, npurt_status status) {
  calsim_trace(d, "late write job=%llu bytes=%llu code=0x%04x", (unsigned long long)job->ordinal,
               (unsigned long long)job->late_bytes, (unsigned)status);
  if (status != NPURT_OK)
    calsim_violation(d, job, NPURT_E_DMA,
                     "HOST_MEMORY_GONE tensor logits: the job was never quiescent");
}

static void carry_ccu(calsim_job *job, const calsim_rule *rule) {
  job->faulty = true;
  job->fault_quiesces = rule->quiesce;
  job->fault_kv = rule->kv_effect;
  job->ccu =
      (npurt_ccu_exception){.valid = 1, .chip = rule->chip, .code = rule->ccu_code, .pc = rule->pc};
  snprintf(job->ccu.text, sizeof job->ccu.text, "injected by fault %s", rule->id);
}

/* Take on a fault of a phase; *cost is what the phase takes. */
static void carry_fault(calsim_job *job, const calsim_rule *rule, uint64_t *cost) {
  switch (rule->kind) {
    case CALSIM_HANG:
      job->hung = true;
      job->release_level = rule->release_level;
      break;
    case CALSIM_SLOW: {
      double slowed = (double)*cost * rule->factor;
      *cost = slowed < 1e18 ? (uint64_t)slowed : 1000000000000000000u;
      break;
    }
    case CALSIM_DMA_ERROR:
      job->dma_fails = true;
      job->dma_left = rule->offset;
      snprintf(job->reason, sizeof job->reason, "transfer broken off by fault %s", rule->id);
      break;
    case CALSIM_NUMERIC_NAN:
      job->nan_lanes = rule->lanes;
      job->numeric_flag = rule->numeric_flag;
      break;
    default: carry_ccu(job, rule);
  }
}

static void enter(calsim_device *d, calsim_job *job, uint32_t state) {
  uint64_t now = calsim_now(d);
  uint64_t *begin = state == NPURT_JOB_H2D    ? &job->times.h2d_begin
                    : state == NPURT_JOB_EXEC ? &job->times.exec_begin
                                              : &job->times.d2h_begin;
  uint64_t cost = state == NPURT_JOB_H2D    ? job->cost.h2d_ns
                  : state == NPURT_JOB_EXEC ? job->cost.exec_ns
                                            : job->cost.d2h_ns;
  job->state = state;
  *begin = now;
  job->times.valid |= 1u << (2 * (state - NPURT_JOB_H2D) + 2);
  d->last_progress_ns = now;
  calsim_trace(d, "%s job=%llu", STATES[state], (unsigned long long)job->ordinal);
  const calsim_rule *rule =
      calsim_job_fault_at(d, (calsim_point)(state - NPURT_JOB_H2D + CALSIM_AT_H2D), job);
  if (rule != NULL) carry_fault(job, rule, &cost);
  if (!job->hung) push(d, job, state - NPURT_JOB_H2D + NPURT_SIM_EVENT_H2D_END, now + cost);
  pthread_cond_broadcast(&d->changed);
}

static void report_gone(calsim_device *d, const calsim_job *job, npurt_status status,
                        uint32_t tensor) {
  if (status != NPURT_E_DMA || job->dma_fails) return;
  calsim_violation(d, job, NPURT_E_DMA, "HOST_MEMORY_GONE tensor %s: %s",
                   calsim_tensor_of(job->calbin->m, job->submodel, tensor).name, job->reason);
}

static void settle_h2d(calsim_device *d, calsim_job *job, npurt_status status, uint32_t tensor) {
  calsim_check_report(d, job);
  job->times.h2d_end = calsim_now(d);
  job->times.valid |= 1u << 3;
  if (status == NPURT_OK) {
    d->totals.h2d_bytes += job->bytes_in;
    enter(d, job, NPURT_JOB_EXEC);
    return;
  }
  report_gone(d, job, status, tensor);
  calsim_job_end(d, job, NPURT_JOB_FAILED, status, CALSIM_KV_NONE, CALSIM_FLAG_QUIESCENT);
}

static void settle_exec(calsim_device *d, calsim_job *job) {
  job->times.exec_end = calsim_now(d);
  job->times.d2d_ns = job->cost.d2d_ns;
  job->times.d2d_bytes = job->cost.d2d_bytes;
  job->times.valid |= 1u << 5 | 1u << 9 | 1u << 10;
  d->totals.d2d_ns += job->cost.d2d_ns;
  d->totals.d2d_bytes += job->cost.d2d_bytes;
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip)
    if ((job->calbin->m->chip_mask >> chip & 1) != 0)
      d->chips[chip].busy_ns += job->times.exec_end - job->times.exec_begin;
  if (!job->faulty) {
    enter(d, job, NPURT_JOB_D2H);
    return;
  }
  ++d->totals.ccu_exceptions;
  calsim_event(d, NPURT_EV_CCU, job->ticket, job->ccu.chip, NPURT_E_CCU_EXCEPTION,
               "CCU exception code %u pc 0x%llx", job->ccu.code, (unsigned long long)job->ccu.pc);
  if (!job->fault_quiesces) calsim_health_set(d, CALSIM_HEALTH_DEGRADED, 1, job->ccu.chip);
  calsim_job_end(d, job, NPURT_JOB_FAILED, NPURT_E_CCU_EXCEPTION, job->fault_kv,
                 job->fault_quiesces ? CALSIM_FLAG_QUIESCENT : 0);
}

static void settle_d2h(calsim_device *d, calsim_job *job, npurt_status status, uint32_t tensor) {
  calsim_check_report(d, job);
  job->times.d2h_end = calsim_now(d);
  job->times.valid |= 1u << 7;
  report_gone(d, job, status, tensor);
  if (status == NPURT_OK) d->totals.d2h_bytes += job->bytes_out;
  uint32_t flags = CALSIM_FLAG_QUIESCENT | (job->numeric ? CALSIM_FLAG_NUMERIC : 0);
  calsim_job_end(d, job, status == NPURT_OK ? NPURT_JOB_DONE : NPURT_JOB_FAILED, status,
                 CALSIM_KV_APPLIED, flags | (status == NPURT_OK ? CALSIM_FLAG_OUTPUT_VALID : 0));
}

/* ---- firing ---------------------------------------------------------------------------- */

/* Real clock: sleep until the event is due, or the job is to be given up. */
static void sleep_until(calsim_device *d, uint64_t due, const calsim_job *job) {
  for (;;) {
    uint64_t now = host_now(), target = host_ns_of(d, due) + 1;
    if (now >= target || d->closing || atomic_load(&job->abort)) return;
    if (target - now > SPIN_NS) {
      struct timespec until = calsim_host_time(d, due);
      pthread_cond_timedwait(&d->work, &d->lock, &until);
    } else {
      calsim_suspend(d);
      while (host_now() < target && !atomic_load(&job->abort)) {
      }
      calsim_resume(d);
    }
  }
}

static npurt_status work_of(calsim_job *job, uint32_t kind, uint32_t *tensor) {
  switch (kind) {
    case NPURT_SIM_EVENT_H2D_END: return calsim_transfer_in(job, tensor);
    case NPURT_SIM_EVENT_EXEC_END: return calsim_compute(job);
    case NPURT_SIM_EVENT_LATE_WRITE: return calsim_write_late(job);
    default: return calsim_transfer_out(job, tensor);
  }
}

/* Fire the earliest event; returns its kind. Lock held before and after, not during the work. A job
 * that is to be given up meanwhile is left as it is, for the reset that asked. */
static uint32_t fire(calsim_device *d) {
  calsim_pending event = take(d, earliest(d));
  calsim_job *job = event.job;
  if (!is_real(d) && event.time > d->base_ns) d->base_ns = event.time;
  if (event.kind == NPURT_SIM_EVENT_START) {
    enter(d, job, NPURT_JOB_H2D);
    return event.kind;
  }
  if (event.kind == NPURT_SIM_EVENT_LATE_END) {
    settle_late_end(d, job);
    return event.kind;
  }
  uint32_t tensor = 0;
  d->busy = job;
  calsim_suspend(d);
  npurt_status status = work_of(job, event.kind, &tensor);
  calsim_resume(d);
  if (is_real(d)) sleep_until(d, event.time, job);
  if (!atomic_load(&job->abort) && !d->closing) {
    if (event.kind == NPURT_SIM_EVENT_H2D_END)
      settle_h2d(d, job, status, tensor);
    else if (event.kind == NPURT_SIM_EVENT_EXEC_END)
      settle_exec(d, job);
    else if (event.kind == NPURT_SIM_EVENT_LATE_WRITE)
      settle_late_write(d, job, status);
    else
      settle_d2h(d, job, status, tensor);
    calsim_engine_next(d);
  }
  d->busy = NULL;
  pthread_cond_broadcast(&d->changed);
  return event.kind;
}

/* A late event is nobody's work: it is not begun before it is due, so that a job may come first.
 * Did the caller wait for one? */
static bool waits_for_late(calsim_device *d) {
  const calsim_pending *next = &d->pending[earliest(d)];
  if (next->kind < NPURT_SIM_EVENT_LATE_END || next->time <= calsim_now(d)) return false;
  struct timespec until = calsim_host_time(d, next->time);
  pthread_cond_timedwait(&d->work, &d->lock, &until);
  return true;
}

static void *engine_main(void *argument) {
  calsim_device *d = argument;
  pthread_mutex_lock(&d->lock);
  while (!d->closing) {
    if (d->pending_count == 0 || d->resetting)
      pthread_cond_wait(&d->work, &d->lock);
    else if (!waits_for_late(d))
      fire(d);
  }
  pthread_mutex_unlock(&d->lock);
  return NULL;
}

npurt_status calsim_engine_start(calsim_device *d) {
  d->scale = d->config.scale;
  d->base_host_ns = host_now();
  if (!is_real(d)) return NPURT_OK;
  int error = pthread_create(&d->thread, NULL, engine_main, d);
  if (error != 0)
    return calsim_error(NPURT_E_HOST_MEMORY, "the engine thread does not start: %s",
                        strerror(error));
  d->thread_runs = true;
  return NPURT_OK;
}

void calsim_engine_stop(calsim_device *d) {
  if (d->thread_runs) pthread_join(d->thread, NULL);
  d->thread_runs = false;
}

void calsim_wait_not_busy(calsim_device *d) {
  while (d->busy != NULL) pthread_cond_wait(&d->changed, &d->lock);
}

/* Can this reset end this job? A hung one only from its level on. */
static bool ends_at(const calsim_job *job, uint32_t level) {
  return !job->hung || (job->release_level != 0 && level >= job->release_level);
}

uint32_t calsim_abort_jobs(calsim_device *d, uint32_t level, uint32_t *unaccounted) {
  enum { DEVICE_SOFT = 4 };
  uint32_t aborted = 0;
  *unaccounted = 0;
  for (uint32_t i = 0; i < d->job_count; ++i) {
    calsim_job *job = d->jobs[i];
    if (job->state >= NPURT_JOB_DONE) {
      job->unseen_by_wait = false;
      if (job->state != NPURT_JOB_LOST) {
        job->flags |= CALSIM_FLAG_QUIESCENT;
        calsim_forget_events(d, job);
      }
      *unaccounted += job->state == NPURT_JOB_LOST;
    } else if (ends_at(job, level)) {
      uint32_t effect = job->state >= NPURT_JOB_EXEC ? CALSIM_KV_UNKNOWN : CALSIM_KV_NONE;
      calsim_job_end(d, job, NPURT_JOB_ABORTED, NPURT_E_JOB_ABORTED, effect, CALSIM_FLAG_QUIESCENT);
      ++aborted;
    } else {
      ++*unaccounted;
      if (level == DEVICE_SOFT)
        calsim_job_end(d, job, NPURT_JOB_LOST, NPURT_E_JOB_LOST, CALSIM_KV_UNKNOWN, 0);
    }
  }
  return aborted;
}

/* ---- stepping -------------------------------------------------------------------------- */

/* Wait for other steppers and resets; is there an event to fire? */
static bool can_fire(calsim_device *d) {
  while ((d->busy != NULL || d->resetting) && !d->closing) pthread_cond_wait(&d->changed, &d->lock);
  return d->pending_count > 0 && !d->closing;
}

static bool reached(const calsim_device *d, uint64_t arg) {
  uint32_t wanted = (uint32_t)(arg >> 56);
  const calsim_job *job = calsim_job_of(d, arg & ((1ull << 56) - 1));
  if (wanted == 0 || wanted > NPURT_JOB_DONE) wanted = NPURT_JOB_DONE;
  return job == NULL || job->state >= wanted;
}

static npurt_status step_loop(calsim_device *d, uint32_t how, uint64_t arg, uint32_t *fired) {
  while (!(how == NPURT_SIM_STEP_TICKET && reached(d, arg))) {
    if (!can_fire(d))
      return how == NPURT_SIM_STEP_TICKET || how == NPURT_SIM_STEP_KIND ? NPURT_E_NOT_READY
                                                                        : NPURT_OK;
    if (how == NPURT_SIM_STEP_TIME && d->pending[earliest(d)].time > arg) return NPURT_OK;
    uint32_t kind = fire(d);
    ++*fired;
    if (how == NPURT_SIM_STEP_ONE || (how == NPURT_SIM_STEP_KIND && kind == arg)) return NPURT_OK;
  }
  return NPURT_OK;
}

npurt_status npurt_sim_step(npurt_device *handle, uint32_t how, uint64_t arg, uint32_t *fired) {
  if (how < NPURT_SIM_STEP_ONE || how > NPURT_SIM_STEP_KIND)
    return calsim_error(NPURT_E_INVALID_ARG, "step: how %u", how);
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  uint32_t count = 0;
  npurt_status status;
  if (is_real(d)) {
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
  if (!is_real(d)) return calsim_error(NPURT_E_BAD_STATE, "only a real clock has a scale");
  if (thousandths == 0 || thousandths > 1000000000u)
    return calsim_error(NPURT_E_INVALID_ARG, "scale %llu thousandths",
                        (unsigned long long)thousandths);
  d->base_ns = calsim_now(d);
  d->base_host_ns = host_now();
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
    *out = d->pending_count > 0 ? d->pending[earliest(d)].time : UINT64_MAX;
  else if (status == NPURT_OK)
    *out = calsim_now(d);
  calsim_unlock(d);
  return status;
}
