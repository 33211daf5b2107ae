/* calsim_phases.c - the life of a job: QUEUED, H2D, EXEC, D2H, terminal. What it means to enter a
 * phase, to leave it and to end; when that happens: calsim_engine.c. */
#include "calsim_internal.h"

static const char *const STATES[] = {"?",    "queued", "h2d",     "exec", "d2h",
                                     "done", "failed", "aborted", "lost"};

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
  if (!job->outlives) calsim_forget_events(d, job);
  job->working = false;
  job->over = true;
  const calsim_rule *rule = calsim_job_fault_at(d, CALSIM_AT_VISIBLE, job);
  bool hidden = rule != NULL && (rule->kind == CALSIM_LATE_COMPLETION ||
                                 (rule->kind == CALSIM_LOST_COMPLETION && !rule->poll_sees));
  if (hidden) {
    calsim_trace(d, "hidden job=%llu", (unsigned long long)job->ordinal);
    if (rule->kind == CALSIM_LATE_COMPLETION) {
      job->outlives = rule->outlives;
      calsim_push(d, job, NPURT_SIM_EVENT_LATE_END, calsim_now(d) + rule->delay_ns);
    }
    return;
  }
  job->unseen_by_wait = rule != NULL && rule->kind == CALSIM_LOST_COMPLETION;
  conclude(d, job);
  if (rule == NULL || rule->kind != CALSIM_LATE_DMA) return;
  job->late_bytes = rule->bytes;
  calsim_push(d, job, NPURT_SIM_EVENT_LATE_WRITE, calsim_now(d) + rule->delay_ns);
}

/* A job that a reset has ended meanwhile keeps that end; but it has come to rest. */
static void settle_late_end(calsim_device *d, calsim_job *job) {
  ++d->totals.late;
  if (job->state >= NPURT_JOB_DONE) {
    job->flags |= CALSIM_FLAG_LATE | CALSIM_FLAG_QUIESCENT;
    calsim_event(d, NPURT_EV_LATE_COMPLETION, job->ticket, 0, NPURT_OK, "told late, after a reset");
    pthread_cond_broadcast(&d->changed);
    return;
  }
  job->end.flags |= CALSIM_FLAG_LATE;
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

void calsim_enter(calsim_device *d, calsim_job *job, uint32_t state) {
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
  if (rule != NULL) calsim_carry_fault(d, job, rule, &cost);
  if (state == NPURT_JOB_EXEC) calsim_carry_lasting(d, job);
  if (!job->hung && !job->over)
    calsim_push(d, job, state - NPURT_JOB_H2D + NPURT_SIM_EVENT_H2D_END, now + cost);
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
    job->working = false;
    return;
  }
  report_gone(d, job, status, tensor);
  calsim_job_end(d, job, NPURT_JOB_FAILED, status, CALSIM_KV_NONE, CALSIM_FLAG_QUIESCENT);
}

static void settle_exec(calsim_device *d, calsim_job *job) {
  job->times.exec_end = calsim_now(d);
  calsim_heat_end(d);
  job->times.d2d_ns = job->cost.d2d_ns;
  job->times.d2d_bytes = job->cost.d2d_bytes;
  job->times.valid |= 1u << 5 | 1u << 9 | 1u << 10;
  d->totals.d2d_ns += job->cost.d2d_ns;
  d->totals.d2d_bytes += job->cost.d2d_bytes;
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip)
    if ((job->calbin->m->chip_mask >> chip & 1) != 0)
      d->chips[chip].busy_ns += job->times.exec_end - job->times.exec_begin;
  if (!job->faulty) {
    job->working = false;
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

/* A job that was cancelled while it ran: it goes no further, and has come to rest. */
static bool settle_cancelled(calsim_device *d, calsim_job *job, uint32_t kind) {
  if (!job->cancelled || (kind != NPURT_SIM_EVENT_H2D_END && kind != NPURT_SIM_EVENT_EXEC_END))
    return false;
  calsim_job_end(d, job, NPURT_JOB_ABORTED, NPURT_E_JOB_ABORTED,
                 kind == NPURT_SIM_EVENT_H2D_END ? CALSIM_KV_NONE : CALSIM_KV_UNKNOWN,
                 CALSIM_FLAG_QUIESCENT);
  return true;
}

void calsim_settle(calsim_device *d, calsim_job *job, uint32_t kind, npurt_status status,
                   uint32_t tensor) {
  if (settle_cancelled(d, job, kind)) return;
  switch (kind) {
    case NPURT_SIM_EVENT_H2D_END: settle_h2d(d, job, status, tensor); break;
    case NPURT_SIM_EVENT_EXEC_END: settle_exec(d, job); break;
    case NPURT_SIM_EVENT_D2H_END: settle_d2h(d, job, status, tensor); break;
    case NPURT_SIM_EVENT_LATE_END: settle_late_end(d, job); break;
    default: settle_late_write(d, job, status);
  }
}
