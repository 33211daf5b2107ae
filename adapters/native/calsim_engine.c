/* calsim_engine.c - when a job moves: the queue of pending events, the resources that phases take,
 * the threads of a real clock.
 *
 * A phase begins as soon as its resources are free, older jobs first; it ends with an event of the
 * queue, which is ordered by (time, sequence). Firing an event does the phase's work without the
 * lock (kernel copies, forward), then settles the job. A stepped clock jumps to the event, one at a
 * time. With a real clock each command bank has a thread that takes its job through all phases: it
 * works first and then sleeps until the event is due, so that computing counts as part of the
 * simulated time, and two banks work at once where their phases overlap. */
#include "calsim_internal.h"
#include <string.h>

enum { SPIN_NS = 20000 }; /* below this a sleep overshoots more than it saves */
enum { LOOK_NS = 50000000 }; /* how often a shared board is looked at while a phase lasts */

/* ---- queue ----------------------------------------------------------------------------- */

void calsim_push(calsim_device *d, calsim_job *job, uint32_t kind, uint64_t time) {
  d->pending[d->pending_count++] = (calsim_pending){
      .time = time, .seq = d->next_pending_seq++, .kind = kind, .job = job, .ticket = job->ticket};
  pthread_cond_broadcast(&d->work);
}

void calsim_push_instant(calsim_device *d, uint32_t rule, uint64_t time) {
  d->pending[d->pending_count++] = (calsim_pending){.time = time,
                                                    .seq = d->next_pending_seq++,
                                                    .kind = NPURT_SIM_EVENT_FAULT,
                                                    .rule = rule};
  pthread_cond_broadcast(&d->work);
}

const calsim_pending *calsim_earliest(const calsim_device *d, uint32_t bank) {
  const calsim_pending *best = NULL;
  for (uint32_t i = 0; i < d->pending_count; ++i) {
    const calsim_pending *event = &d->pending[i];
    uint32_t of_bank = event->job != NULL ? event->job->engine : 1;
    if (bank != 0 && of_bank != bank) continue;
    if (best == NULL || event->time < best->time ||
        (event->time == best->time && event->seq < best->seq))
      best = event;
  }
  return best;
}

static calsim_pending take(calsim_device *d, const calsim_pending *event) {
  calsim_pending taken = *event;
  d->pending[event - d->pending] = d->pending[--d->pending_count];
  return taken;
}

void calsim_forget_events(calsim_device *d, const calsim_job *job) {
  for (uint32_t i = d->pending_count; i-- > 0;)
    if (d->pending[i].job == job) take(d, &d->pending[i]);
}

void calsim_forget_instants(calsim_device *d) {
  for (uint32_t i = d->pending_count; i-- > 0;)
    if (d->pending[i].kind == NPURT_SIM_EVENT_FAULT) take(d, &d->pending[i]);
}

static uint32_t ghosts(const calsim_device *d) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < d->pending_count; ++i)
    count += d->pending[i].job == NULL && d->pending[i].kind == NPURT_SIM_EVENT_LATE_END;
  return count;
}

void calsim_retire_events(calsim_device *d, const calsim_job *job) {
  for (uint32_t i = d->pending_count; job->outlives && i-- > 0;)
    if (d->pending[i].job == job && d->pending[i].kind == NPURT_SIM_EVENT_LATE_END &&
        ghosts(d) < CALSIM_MAX_GHOSTS)
      d->pending[i].job = NULL;
  calsim_forget_events(d, job);
}

/* ---- resources ------------------------------------------------------------------------- */

enum { TO_DEVICE = 1, CORE = 2, TO_HOST = 4, ALL = 7 };

/* What a phase takes while it lasts, by overlap hypothesis. */
static uint32_t resources_of(const calsim_device *d, uint32_t state) {
  static const uint8_t half_duplex[] = {TO_DEVICE | TO_HOST, CORE, ALL};
  static const uint8_t independent[] = {TO_DEVICE, CORE, TO_HOST};
  switch (calsim_overlap(d)) {
    case CALSIM_OVERLAP_H2D: return half_duplex[state - NPURT_JOB_H2D];
    case CALSIM_OVERLAP_FULL: return independent[state - NPURT_JOB_H2D];
    default: return ALL;
  }
}

/* Is there a phase that this job is in, or waits to enter? */
static bool moves(const calsim_job *job) {
  return job->state < NPURT_JOB_DONE && !job->over && !job->never_runs;
}

void calsim_engine_next(calsim_device *d) {
  uint32_t taken = 0;
  if (d->resetting || d->closing) return;
  for (uint32_t i = 0; i < d->job_count; ++i) {
    const calsim_job *job = d->jobs[i];
    if (!moves(job) || !job->working) continue;
    bool starts = job->state == NPURT_JOB_QUEUED;
    taken |= resources_of(d, starts ? NPURT_JOB_H2D : job->state);
  }
  for (uint32_t i = 0; i < d->job_count; ++i) {
    calsim_job *job = d->jobs[i];
    if (!moves(job) || job->working) continue;
    uint32_t needs = resources_of(d, job->state + 1);
    bool free = (needs & taken) == 0;
    taken |= needs; /* or kept for it: nobody younger comes first */
    if (!free) continue;
    job->working = true;
    if (job->state == NPURT_JOB_QUEUED)
      calsim_push(d, job, NPURT_SIM_EVENT_START, calsim_now(d));
    else
      calsim_enter(d, job, job->state + 1);
  }
}

bool calsim_computes(const calsim_device *d) {
  for (uint32_t i = 0; i < d->job_count; ++i)
    if (d->jobs[i]->state == NPURT_JOB_EXEC && d->jobs[i]->working) return true;
  return false;
}

/* ---- firing ---------------------------------------------------------------------------- */

/* Real clock: sleep until the event is due, or the job is to be given up, or another process has
 * reset the board. */
static void sleep_until(calsim_device *d, uint64_t due, const calsim_job *job) {
  for (;;) {
    uint64_t now = calsim_host_now(), target = calsim_host_ns_of(d, due) + 1;
    if (now >= target || d->closing || atomic_load(&job->abort) || calsim_shared_moved(d)) return;
    if (target - now > SPIN_NS) {
      struct timespec until = calsim_host_time(d, due);
      if (d->shared_fd >= 0 && target - now > LOOK_NS) until = calsim_host_in(LOOK_NS);
      pthread_cond_timedwait(&d->work, &d->lock, &until);
    } else {
      calsim_suspend(d);
      while (calsim_host_now() < target && !atomic_load(&job->abort)) {
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

bool calsim_is_busy(const calsim_device *d) {
  for (uint32_t bank = 0; bank < CALSIM_BANKS; ++bank)
    if (d->busy[bank]) return true;
  return false;
}

/* A late end that came after its job was retired: nobody's, and said all the same. */
static void tell_ghost(calsim_device *d, npurt_ticket ticket) {
  ++d->totals.late;
  calsim_event(d, NPURT_EV_LATE_COMPLETION, ticket, 0, NPURT_OK, "told late, of a retired job");
}

/* An event that is no work of a phase. */
static bool fire_at_once(calsim_device *d, const calsim_pending *event) {
  switch (event->kind) {
    case NPURT_SIM_EVENT_START: calsim_enter(d, event->job, NPURT_JOB_H2D); return true;
    case NPURT_SIM_EVENT_FAULT: calsim_carry_instant(d, event->rule); return true;
    case NPURT_SIM_EVENT_LATE_END:
      if (event->job == NULL)
        tell_ghost(d, event->ticket);
      else
        calsim_settle(d, event->job, event->kind, NPURT_OK, 0);
      return true;
    default: return false;
  }
}

uint32_t calsim_fire(calsim_device *d, uint32_t bank) {
  calsim_pending event = take(d, calsim_earliest(d, bank));
  calsim_job *job = event.job;
  if (!calsim_is_real(d) && event.time > d->base_ns) d->base_ns = event.time;
  if (fire_at_once(d, &event)) return event.kind;
  uint32_t tensor = 0, of_bank = job->engine - 1;
  d->busy[of_bank] = true;
  calsim_suspend(d);
  npurt_status status = work_of(job, event.kind, &tensor);
  calsim_resume(d);
  if (calsim_is_real(d)) sleep_until(d, event.time, job);
  bool moved = calsim_shared_moved(d); /* then nobody may believe what the phase did */
  if (!atomic_load(&job->abort) && !d->closing && !moved) {
    calsim_settle(d, job, event.kind, status, tensor);
    calsim_engine_next(d);
  }
  d->busy[of_bank] = false;
  pthread_cond_broadcast(&d->changed);
  if (moved) calsim_shared_sync(d);
  return event.kind;
}

/* ---- threads of a real clock ----------------------------------------------------------- */

/* A late event is nobody's work: it is not begun before it is due, so that a job may come first.
 * Did the caller wait for one? */
static bool waits_for_late(calsim_device *d, const calsim_pending *next) {
  if (next->kind < NPURT_SIM_EVENT_LATE_END || next->time <= calsim_now(d)) return false;
  struct timespec until = calsim_host_time(d, next->time);
  pthread_cond_timedwait(&d->work, &d->lock, &until);
  return true;
}

static void *engine_main(void *argument) {
  const calsim_worker *me = argument;
  calsim_device *d = me->device;
  pthread_mutex_lock(&d->lock);
  while (!d->closing) {
    const calsim_pending *next = calsim_earliest(d, me->bank);
    if (next == NULL || d->resetting)
      pthread_cond_wait(&d->work, &d->lock);
    else if (!waits_for_late(d, next))
      calsim_fire(d, me->bank);
  }
  pthread_mutex_unlock(&d->lock);
  return NULL;
}

npurt_status calsim_engine_start(calsim_device *d) {
  d->scale = d->config.scale;
  d->base_host_ns = calsim_host_now();
  for (uint32_t i = 0; calsim_is_real(d) && i < CALSIM_BANKS; ++i) {
    calsim_worker *worker = &d->workers[i];
    *worker = (calsim_worker){.device = d, .bank = i + 1};
    int error = pthread_create(&worker->thread, NULL, engine_main, worker);
    if (error != 0)
      return calsim_error(NPURT_E_HOST_MEMORY, "an engine thread does not start: %s",
                          strerror(error));
    worker->runs = true;
  }
  return NPURT_OK;
}

void calsim_engine_stop(calsim_device *d) {
  for (uint32_t i = 0; i < CALSIM_BANKS; ++i) {
    if (d->workers[i].runs) pthread_join(d->workers[i].thread, NULL);
    d->workers[i].runs = false;
  }
}

/* ---- resets ---------------------------------------------------------------------------- */

void calsim_wait_not_busy(calsim_device *d) {
  while (calsim_is_busy(d)) pthread_cond_wait(&d->changed, &d->lock);
}

/* Can this reset end this job? A hung one only from its level on, whatever else the reset does. */
static bool ends_at(const calsim_job *job, uint32_t level, bool aborts) {
  return job->hung ? job->release_level != 0 && level >= job->release_level : aborts;
}

/* A job that had ended before the reset; true if nobody knows what it still does. */
static bool settle_ended(calsim_device *d, calsim_job *job, bool quiesces) {
  job->unseen_by_wait = false;
  if (job->state == NPURT_JOB_LOST) return true;
  if (!quiesces) return false;
  job->flags |= CALSIM_FLAG_QUIESCENT;
  if (!job->outlives) calsim_forget_events(d, job);
  return false;
}

uint32_t calsim_abort_jobs(calsim_device *d, uint32_t level, uint64_t effects,
                           uint32_t *unaccounted) {
  bool aborts = (effects & NPURT_FX_ABORTS_JOBS) != 0;
  bool quiesces = (effects & NPURT_FX_QUIESCES_DMA) != 0;
  uint32_t aborted = 0;
  *unaccounted = 0;
  for (uint32_t i = 0; i < d->job_count; ++i) {
    calsim_job *job = d->jobs[i];
    if (job->state >= NPURT_JOB_DONE) {
      *unaccounted += settle_ended(d, job, quiesces);
    } else if (ends_at(job, level, aborts)) {
      uint32_t effect = job->state >= NPURT_JOB_EXEC ? CALSIM_KV_UNKNOWN : CALSIM_KV_NONE;
      /* A hung job is quiet once its reset has ended it. */
      bool quiet = quiesces || (job->hung && !aborts);
      calsim_job_end(d, job, NPURT_JOB_ABORTED, NPURT_E_JOB_ABORTED, effect,
                     quiet ? CALSIM_FLAG_QUIESCENT : 0);
      ++aborted;
    } else {
      ++*unaccounted;
      /* Its memory or its whole board is gone under it; else it goes on. */
      if ((aborts && level == CALSIM_DEVICE_SOFT) ||
          (!job->hung && (effects & NPURT_FX_DROPS_CONFIG) != 0))
        calsim_job_end(d, job, NPURT_JOB_LOST, NPURT_E_JOB_LOST, CALSIM_KV_UNKNOWN, 0);
    }
  }
  return aborted;
}
