/* calsim_reset.c - the four reset levels: what each claims, and what it does to jobs,
 * configuration, memory and epoch. */
#include "calsim_internal.h"
#include <string.h>

enum { CCU = 1, CONFIGURATION, DYNAMIC_MEM, DEVICE_SOFT };
enum { REPORT_QUIESCED = 1, REPORT_VERIFIED = 2, REPORT_WIDER = 4 };

static const uint64_t FX_ALL = (1u << 17) - 1;
static const uint64_t FX_CONFIG = NPURT_FX_DROPS_CONFIG | NPURT_FX_DROPS_ALL_CONFIGS |
                                  NPURT_FX_DROPS_KV | NPURT_FX_DROPS_ALL_KV |
                                  NPURT_FX_DROPS_PARAMS | NPURT_FX_OTHER_MODEL;

typedef struct claim {
  uint64_t yes, unknown, typical_ns, min_interval_ns;
  uint32_t in_flight;
  const char *note;
} claim;

static claim claim_of(uint32_t level) {
  const uint64_t jobs = NPURT_FX_ABORTS_JOBS | NPURT_FX_QUIESCES_DMA;
  switch (level) {
    case CCU:
      return (claim){
          jobs | NPURT_FX_OTHER_CHIP | NPURT_FX_OTHER_MODEL,
          NPURT_FX_DROPS_KV | NPURT_FX_DROPS_ALL_KV,
          1000000,
          0,
          1,
          "aborts the jobs of both chips; afterwards the content of every lane is unknown"};
    case CONFIGURATION:
      return (claim){FX_CONFIG, 0, 10000000,
                     0,         0, "drops the configured calbin; dynamic memory stays"};
    case DYNAMIC_MEM:
      return (claim){
          NPURT_FX_FREES_DYNAMIC, 0, 5000000, 0, 0, "after level 2: returns dynamic memory"};
    default:
      return (claim){jobs | FX_CONFIG | NPURT_FX_CLEARS_STICKY | NPURT_FX_FREES_DYNAMIC |
                         NPURT_FX_FREES_ALL | NPURT_FX_RESETS_COUNTERS | NPURT_FX_NEW_EPOCH |
                         NPURT_FX_OTHER_CHIP,
                     NPURT_FX_RELOADS_FIRMWARE,
                     200000000,
                     1000000000,
                     1,
                     "drops everything and begins a new epoch"};
  }
}

npurt_status npurt_reset_describe(npurt_device *handle, uint32_t level, npurt_reset_scope *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_reset_scope);
  if (status != NPURT_OK) return status;
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  calsim_unlock(d);
  if (level < CCU || level > DEVICE_SOFT)
    return calsim_error(NPURT_E_INVALID_ARG, "reset level %u (1 to 4)", level);
  claim c = claim_of(level);
  npurt_reset_scope scope = {.level = level,
                             .evidence = CALSIM_EVIDENCE_SIM,
                             .source = CALSIM_SOURCE_SIM,
                             .can_run_in_flight = c.in_flight,
                             .effects_yes = c.yes,
                             .effects_no = FX_ALL & ~(c.yes | c.unknown),
                             .typical_ns = c.typical_ns,
                             .min_interval_ns = c.min_interval_ns};
  calsim_copy_text(scope.note, sizeof scope.note, c.note);
  calsim_put(out, &scope, sizeof scope);
  return NPURT_OK;
}

/* May this level run now? Stamps the attempt before anything else can fail. */
static npurt_status admit(calsim_device *d, uint32_t level) {
  uint64_t now = calsim_now(d), interval = claim_of(level).min_interval_ns;
  if (d->reset_stamped[level] && now - d->reset_stamp_ns[level] < interval)
    return calsim_error(NPURT_E_RESET_REFUSED, "level %u again after %llu ns; the least is %llu",
                        level, (unsigned long long)(now - d->reset_stamp_ns[level]),
                        (unsigned long long)interval);
  d->reset_stamped[level] = true;
  d->reset_stamp_ns[level] = now;
  if (level == CCU || level == DEVICE_SOFT) return NPURT_OK;
  if (calsim_in_flight(d) > 0 && !d->level1_done)
    return calsim_error(NPURT_E_OBJECT_IN_FLIGHT,
                        "level %u with %u jobs in flight; level 1 comes first", level,
                        calsim_in_flight(d));
  if (level == DYNAMIC_MEM && d->configured != NULL)
    return calsim_error(NPURT_E_BAD_STATE, "level 3 with a calbin configured; level 2 comes first");
  return NPURT_OK;
}

/* Make running phases end early, then end the jobs. */
static void end_jobs(calsim_device *d, uint32_t level, npurt_reset_report *report) {
  for (uint32_t i = 0; i < d->job_count; ++i)
    if (d->jobs[i]->state < NPURT_JOB_DONE) atomic_store(&d->jobs[i]->abort, true);
  pthread_cond_broadcast(&d->work);
  calsim_wait_not_busy(d);
  report->jobs_aborted = calsim_abort_jobs(d, level, &report->jobs_unaccounted);
  if (report->jobs_aborted > 0) report->effects_seen |= NPURT_FX_ABORTS_JOBS;
  if (report->jobs_unaccounted == 0) report->effects_seen |= NPURT_FX_QUIESCES_DMA;
}

static void drop_configuration(calsim_device *d, npurt_reset_report *report) {
  if (d->configured == NULL) return;
  calsim_event(d, NPURT_EV_MEMORY, 0, d->configured->home_chip, NPURT_E_CONFIG_LOST, "lost %s",
               d->configured->m->name);
  calsim_calbin_drop(d, d->configured, CALSIM_LOST, true);
  report->effects_seen |= NPURT_FX_DROPS_CONFIG | NPURT_FX_DROPS_KV | NPURT_FX_DROPS_PARAMS;
}

static void free_dynamic(calsim_device *d, npurt_reset_report *report) {
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip) {
    if (d->chips[chip].dynamic > 0) report->effects_seen |= NPURT_FX_FREES_DYNAMIC;
    d->chips[chip].dynamic = 0;
  }
}

static void new_epoch(calsim_device *d, npurt_reset_report *report) {
  uint64_t ccu = d->totals.ccu_exceptions, resets[4];
  memcpy(resets, d->totals.resets, sizeof resets);
  d->totals = (npurt_counters){.ccu_exceptions = ccu};
  memcpy(d->totals.resets, resets, sizeof resets);
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip) d->chips[chip].busy_ns = 0;
  ++d->epoch;
  report->effects_seen |=
      NPURT_FX_NEW_EPOCH | NPURT_FX_RESETS_COUNTERS | NPURT_FX_FREES_ALL;
  if (!calsim_is_sick(d)) report->effects_seen |= NPURT_FX_CLEARS_STICKY;
  calsim_event(d, NPURT_EV_EPOCH, 0, 0, NPURT_OK, "epoch %llu after a device reset",
               (unsigned long long)d->epoch);
}

static void run_level(calsim_device *d, uint32_t level, npurt_reset_report *report) {
  if (level == CCU || level == DEVICE_SOFT) end_jobs(d, level, report);
  if (level == CCU && d->bank != NULL) calsim_bank_all_unknown(d->bank);
  if (level == CONFIGURATION || level == DEVICE_SOFT) drop_configuration(d, report);
  if (level == DYNAMIC_MEM || level == DEVICE_SOFT) free_dynamic(d, report);
  calsim_cure(d, level);
  if (level == DEVICE_SOFT) new_epoch(d, report);
  if (level == CCU) d->level1_done = true;
  ++d->totals.resets[level - 1];
}

static bool all_quiescent(const calsim_device *d) {
  for (uint32_t i = 0; i < d->job_count; ++i)
    if ((d->jobs[i]->flags & CALSIM_FLAG_QUIESCENT) == 0) return false;
  return true;
}

static void note_wider_scope(const calsim_device *d, const npurt_reset_params *p,
                             npurt_reset_report *report) {
  if (p->level > CONFIGURATION || p->chip_mask == 0 || (d->chip_mask & ~p->chip_mask) == 0) return;
  report->h.flags |= REPORT_WIDER;
  report->effects_seen |= NPURT_FX_OTHER_CHIP;
}

static npurt_status check_params(calsim_device *d, const npurt_reset_params *p) {
  if (p->level < CCU || p->level > DEVICE_SOFT || (p->chip_mask & ~d->chip_mask) != 0)
    return calsim_error(NPURT_E_INVALID_ARG, "reset level %u (1 to 4), chips 0x%x of 0x%x",
                        p->level, p->chip_mask, d->chip_mask);
  if (p->only != NULL && calsim_find_object(d, p->only, CALSIM_CALBIN) == NULL)
    return NPURT_E_BAD_HANDLE;
  if (d->resetting) return calsim_error(NPURT_E_BAD_STATE, "another reset is running");
  return NPURT_OK;
}

npurt_status npurt_reset_run(npurt_device *handle, const npurt_reset_params *p,
                             npurt_reset_report *out) {
  npurt_status status = CALSIM_CHECK(p, npurt_reset_params);
  if (status == NPURT_OK) status = CALSIM_CHECK(out, npurt_reset_report);
  if (status != NPURT_OK) return status;
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  npurt_reset_report report = {
      .level = p->level, .epoch_before = d->epoch, .health_before = d->health};
  uint64_t begin = calsim_now(d);
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip)
    report.mem_before[chip] = calsim_chip_used(&d->chips[chip]);
  status = check_params(d, p);
  if (status == NPURT_OK) {
    d->resetting = true;
    status = admit(d, p->level);
    if (status == NPURT_OK) {
      calsim_trace(d, "reset level=%u", p->level);
      run_level(d, p->level, &report);
      note_wider_scope(d, p, &report);
      report.h.flags |= (calsim_is_sick(d) ? 0 : REPORT_VERIFIED) |
                        (all_quiescent(d) ? REPORT_QUIESCED : 0);
    }
    d->resetting = false;
    calsim_engine_next(d);
    pthread_cond_broadcast(&d->changed);
    pthread_cond_broadcast(&d->work);
  }
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip)
    report.mem_after[chip] = calsim_chip_used(&d->chips[chip]);
  report.status = status;
  report.epoch_after = d->epoch;
  report.health_after = d->health;
  report.duration_ns = calsim_now(d) - begin;
  calsim_trace(d, "reset level=%u code=0x%04x aborted=%u unaccounted=%u flags=%u effects=0x%llx",
               p->level, (unsigned)status, report.jobs_aborted, report.jobs_unaccounted,
               report.h.flags, (unsigned long long)report.effects_seen);
  calsim_unlock(d);
  calsim_put(out, &report, sizeof report);
  return status;
}
