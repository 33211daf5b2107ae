/* calsim_reset.c - resets: admission, what the effects of a level do to jobs, configuration, memory
 * and epoch, what is observed of it, and how a fault makes that another thing than the claim. What
 * each level does and claims: calsim_levels.c. */
#include "calsim_internal.h"
#include <string.h>

enum { REPORT_QUIESCED = 1, REPORT_VERIFIED = 2, REPORT_WIDER = 4 };

static const uint64_t FX_KV = NPURT_FX_DROPS_KV | NPURT_FX_DROPS_ALL_KV;
static const uint64_t FX_CONFIG = NPURT_FX_DROPS_CONFIG | NPURT_FX_DROPS_ALL_CONFIGS;

/* What a level takes, by level - 1. */
static const struct {
  uint64_t typical_ns;
  uint32_t in_flight;
  const char *note;
} LEVELS[] = {
    {1000000, 1, "aborts the jobs of both chips; afterwards the content of every lane is unknown"},
    {10000000, 0, "drops the configured calbin; dynamic memory stays"},
    {5000000, 0, "after level 2: returns dynamic memory"},
    {200000000, 1, "drops everything and begins a new epoch"}};

static uint64_t interval_of(const calsim_device *d, uint32_t level) {
  return level == CALSIM_DEVICE_SOFT ? d->config.reset_interval_ns : 0;
}

npurt_status npurt_reset_describe(npurt_device *handle, uint32_t level, npurt_reset_scope *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_reset_scope);
  if (status != NPURT_OK) return status;
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  bool known = level >= CALSIM_CCU && level <= CALSIM_DEVICE_SOFT;
  npurt_reset_scope scope = {0};
  if (known) {
    const calsim_scope *claimed = &d->config.scopes[level - 1];
    scope = (npurt_reset_scope){.level = level,
                                .evidence = CALSIM_EVIDENCE,
                                .source = CALSIM_SOURCE,
                                .can_run_in_flight = LEVELS[level - 1].in_flight,
                                .effects_yes = claimed->yes,
                                .effects_no = CALSIM_FX_ALL & ~(claimed->yes | claimed->unknown),
                                .typical_ns = LEVELS[level - 1].typical_ns,
                                .min_interval_ns = interval_of(d, level)};
  }
  calsim_unlock(d);
  if (!known) return calsim_error(NPURT_E_INVALID_ARG, "reset level %u (1 to 4)", level);
  calsim_copy_text(scope.note, sizeof scope.note, LEVELS[level - 1].note);
  calsim_put(out, &scope, sizeof scope);
  return NPURT_OK;
}

/* ---- may it run -------------------------------------------------------------------------- */

/* May this level run now? Stamps the attempt before anything else can fail. */
static npurt_status admit(calsim_device *d, uint32_t level) {
  uint64_t now = calsim_now(d), interval = interval_of(d, level);
  if (d->reset_stamped[level] && now - d->reset_stamp_ns[level] < interval)
    return calsim_error(NPURT_E_RESET_REFUSED, "level %u again after %llu ns; the least is %llu",
                        level, (unsigned long long)(now - d->reset_stamp_ns[level]),
                        (unsigned long long)interval);
  d->reset_stamped[level] = true;
  d->reset_stamp_ns[level] = now;
  npurt_status status = calsim_check_owner(d);
  if (status != NPURT_OK || level == CALSIM_CCU || level == CALSIM_DEVICE_SOFT) return status;
  if (calsim_in_flight(d) > 0 && !d->level1_done)
    return calsim_error(NPURT_E_OBJECT_IN_FLIGHT,
                        "level %u with %u jobs in flight; level 1 comes first", level,
                        calsim_in_flight(d));
  if (level == CALSIM_DYNAMIC_MEM && d->configured != NULL)
    return calsim_error(NPURT_E_BAD_STATE, "level 3 with a calbin configured; level 2 comes first");
  return NPURT_OK;
}

static npurt_status check_params(calsim_device *d, const npurt_reset_params *p) {
  if (p->level < CALSIM_CCU || p->level > CALSIM_DEVICE_SOFT ||
      (p->chip_mask & ~d->chip_mask) != 0)
    return calsim_error(NPURT_E_INVALID_ARG, "reset level %u (1 to 4), chips 0x%x of 0x%x",
                        p->level, p->chip_mask, d->chip_mask);
  if (p->only != NULL && calsim_find_object(d, p->only, CALSIM_CALBIN) == NULL)
    return NPURT_E_BAD_HANDLE;
  if (d->resetting || d->configuring)
    return calsim_error(NPURT_E_BAD_STATE, "another reset or a configuration is running");
  return NPURT_OK;
}

/* ---- effects ------------------------------------------------------------------------------ */

/* Make running phases end early, then end the jobs. */
static void end_jobs(calsim_device *d, uint32_t level, uint64_t effects,
                     npurt_reset_report *report) {
  bool interrupts = (effects & (NPURT_FX_ABORTS_JOBS | FX_CONFIG)) != 0;
  for (uint32_t i = 0; i < d->job_count && interrupts; ++i)
    if (d->jobs[i]->state < NPURT_JOB_DONE) atomic_store(&d->jobs[i]->abort, true);
  pthread_cond_broadcast(&d->work);
  if (interrupts) calsim_wait_not_busy(d);
  report->jobs_aborted = calsim_abort_jobs(d, level, effects, &report->jobs_unaccounted);
  if (report->jobs_aborted > 0) report->effects_seen |= NPURT_FX_ABORTS_JOBS;
  if ((effects & NPURT_FX_QUIESCES_DMA) != 0 && report->jobs_unaccounted == 0)
    report->effects_seen |= NPURT_FX_QUIESCES_DMA;
}

static void drop_configuration(calsim_device *d, npurt_reset_report *report) {
  if (d->configured == NULL) return;
  calsim_event(d, NPURT_EV_MEMORY, 0, d->configured->home_chip, NPURT_E_CONFIG_LOST, "lost %s",
               d->configured->m->name);
  calsim_calbin_drop(d, d->configured, CALSIM_LOST, true);
  report->effects_seen |= NPURT_FX_DROPS_CONFIG | NPURT_FX_DROPS_KV | NPURT_FX_DROPS_PARAMS;
}

static void doubt_kv(calsim_device *d, npurt_reset_report *report) {
  if (d->bank == NULL) return;
  calsim_bank_all_unknown(d->bank);
  report->effects_seen |= NPURT_FX_DROPS_KV;
}

static void free_memory(calsim_device *d, uint64_t effects, npurt_reset_report *report) {
  bool any = calsim_leaks_end(d, effects);
  for (uint32_t chip = 0; chip < CALSIM_CHIPS && (effects & NPURT_FX_FREES_DYNAMIC) != 0; ++chip) {
    /* What a configured calbin holds of it goes with the calbin. */
    bool held = d->configured != NULL;
    uint64_t kept = held ? d->configured->account.other[chip] : 0;
    any |= d->chips[chip].dynamic > kept;
    d->chips[chip].dynamic = kept;
  }
  if (any) report->effects_seen |= effects & (NPURT_FX_FREES_DYNAMIC | NPURT_FX_FREES_ALL);
}

static void reset_counters(calsim_device *d, npurt_reset_report *report) {
  uint64_t ccu = d->totals.ccu_exceptions, resets[4];
  memcpy(resets, d->totals.resets, sizeof resets);
  d->totals = (npurt_counters){.ccu_exceptions = ccu};
  memcpy(d->totals.resets, resets, sizeof resets);
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip) d->chips[chip].busy_ns = 0;
  report->effects_seen |= NPURT_FX_RESETS_COUNTERS;
}

static void new_epoch(calsim_device *d, bool foreign, npurt_reset_report *report) {
  uint64_t before = d->epoch;
  d->epoch = calsim_shared_epoch(d, foreign);
  if (d->epoch == before) d->epoch = calsim_shared_epoch(d, false); /* by a fault alone */
  report->effects_seen |= NPURT_FX_NEW_EPOCH;
  if (d->shared_fd >= 0 && !foreign) report->effects_seen |= NPURT_FX_OTHER_PROCESS;
  calsim_event(d, NPURT_EV_EPOCH, 0, 0, NPURT_OK, "epoch %llu after a device reset%s",
               (unsigned long long)d->epoch, foreign ? " by another process" : "");
}

static void unmap_host(calsim_device *d, npurt_reset_report *report) {
  for (uint32_t i = 0; i < d->objects.count; ++i) {
    if (d->objects.entries[i].kind != CALSIM_BUFFER) continue;
    calsim_buffer *b = d->objects.entries[i].item;
    if (b->job != NULL) continue;
    for (uint32_t tensor = 0; tensor < CALSIM_TENSORS; ++tensor)
      b->views[tensor].host = NULL, b->views[tensor].bytes = 0;
    report->effects_seen |= NPURT_FX_DROPS_HOST_MAPS;
  }
}

static void cure(calsim_device *d, uint32_t level, npurt_reset_report *report) {
  bool sick = calsim_is_sick(d);
  calsim_cure(d, level);
  if (sick && !calsim_is_sick(d)) report->effects_seen |= NPURT_FX_CLEARS_STICKY;
}

static void run_effects(calsim_device *d, uint32_t level, uint64_t effects, bool foreign,
                        npurt_reset_report *report) {
  end_jobs(d, level, effects, report);
  if ((effects & FX_KV) != 0) doubt_kv(d, report);
  if ((effects & FX_CONFIG) != 0) drop_configuration(d, report);
  free_memory(d, effects, report);
  /* Below the device reset it is the fault that says which level ends it. */
  if (level < CALSIM_DEVICE_SOFT || (effects & NPURT_FX_CLEARS_STICKY) != 0)
    cure(d, level, report);
  if ((effects & NPURT_FX_RESETS_COUNTERS) != 0) reset_counters(d, report);
  if ((effects & NPURT_FX_DROPS_HOST_MAPS) != 0) unmap_host(d, report);
  if ((effects & NPURT_FX_RELOADS_FIRMWARE) != 0) {
    d->told_field = 0;
    report->effects_seen |= NPURT_FX_RELOADS_FIRMWARE;
  }
  if ((effects & NPURT_FX_NEW_EPOCH) != 0) new_epoch(d, foreign, report);
  if (level == CALSIM_CCU) d->level1_done = true;
}

void calsim_foreign_reset(calsim_device *d, uint32_t pid) {
  npurt_reset_report report = {0};
  calsim_scope soft = d->config.scopes[CALSIM_DEVICE_SOFT - 1];
  if (d->resetting || d->configuring) return;
  d->resetting = true;
  if (pid != 0)
    calsim_event(d, NPURT_EV_OWNER, 0, 0, NPURT_OK, "reset by process %u", pid);
  else
    calsim_event(d, NPURT_EV_OWNER, 0, 0, NPURT_OK, "reset by another process");
  run_effects(d, CALSIM_DEVICE_SOFT, soft.does | NPURT_FX_NEW_EPOCH | FX_CONFIG, true, &report);
  d->resetting = false;
  pthread_cond_broadcast(&d->changed);
  pthread_cond_broadcast(&d->work);
}

/* ---- what is reported --------------------------------------------------------------------- */

static bool all_quiescent(const calsim_device *d) {
  for (uint32_t i = 0; i < d->job_count; ++i)
    if ((d->jobs[i]->flags & CALSIM_FLAG_QUIESCENT) == 0) return false;
  return true;
}

static void note_wider_scope(calsim_device *d, const npurt_reset_params *p,
                             const calsim_calbin *configured, npurt_reset_report *report) {
  bool chips = p->level <= CALSIM_CONFIGURATION && p->chip_mask != 0 &&
               (d->chip_mask & ~p->chip_mask) != 0;
  bool model = p->only != NULL && configured != NULL && configured->handle != (void *)p->only &&
               (report->effects_seen & (NPURT_FX_DROPS_CONFIG | FX_KV)) != 0;
  if (chips || model) report->h.flags |= REPORT_WIDER;
  report->effects_seen |= (chips ? NPURT_FX_OTHER_CHIP : 0) | (model ? NPURT_FX_OTHER_MODEL : 0);
}

/* The device is not recovered, whatever the answer says. */
static void leave_dead(calsim_device *d, const calsim_rule *rule) {
  if (rule->then == CALSIM_THEN_LOST) {
    calsim_rule lost = *rule;
    lost.kind = CALSIM_DEVICE_LOST;
    lost.code = NPURT_E_DEVICE_LOST;
    calsim_fall_sick(d, &lost);
    return;
  }
  d->curse = rule->then == CALSIM_THEN_HANG ? CALSIM_HANG : CALSIM_NUMERIC_GARBAGE;
  d->curse_level = rule->release_level;
}

/* What the reset does to chips that it was not asked for, where it keeps to those it was. */
static uint64_t within_chips(const calsim_device *d, const npurt_reset_params *p,
                             uint64_t effects) {
  bool reaches = p->level > CALSIM_CONFIGURATION || p->chip_mask == 0 || d->configured == NULL ||
                 (effects & NPURT_FX_OTHER_CHIP) != 0 ||
                 (d->configured->m->chip_mask & p->chip_mask) != 0;
  const uint64_t of_chip = NPURT_FX_ABORTS_JOBS | NPURT_FX_QUIESCES_DMA | FX_KV | FX_CONFIG;
  return reaches ? effects : effects & ~of_chip;
}

/* Faults that keep a reset from being tried, or over its time. */
static npurt_status fail_before(calsim_device *d, const calsim_rule *rule,
                                const npurt_reset_params *p) {
  if (rule == NULL) return NPURT_OK;
  if (rule->kind == CALSIM_RESET_REFUSED)
    return calsim_error(NPURT_E_RESET_REFUSED, "level %u refused by fault %s", p->level, rule->id);
  if (rule->kind == CALSIM_RESET_FAIL)
    return calsim_error(rule->code, "level %u failed by fault %s", p->level, rule->id);
  if (rule->kind != CALSIM_RESET_SLOW) return NPURT_OK;
  bool late = p->timeout_ns != 0 && rule->for_ns > p->timeout_ns;
  uint64_t timeout_ns = p->timeout_ns;
  char id[sizeof rule->id];
  calsim_copy_text(id, sizeof id, rule->id); /* the plan may change while time passes */
  if (!calsim_spend(d, late ? timeout_ns : rule->for_ns))
    return calsim_error(NPURT_E_BAD_HANDLE, "the device was closed during the reset");
  if (!late) return NPURT_OK;
  return calsim_error(NPURT_E_RESET_FAILED, "level %u is not over after %llu ns, by fault %s",
                      p->level, (unsigned long long)timeout_ns, id);
}

static npurt_status run_admitted(calsim_device *d, const npurt_reset_params *p,
                                 npurt_reset_report *report) {
  const calsim_rule *fired =
      calsim_fault_at(d, CALSIM_AT_RESET, &(calsim_occasion){.level = p->level});
  calsim_rule rule = {0}; /* a copy: the plan may change while time passes */
  if (fired != NULL) rule = *fired;
  npurt_status status = fail_before(d, fired, p);
  if (status != NPURT_OK) return status;
  const calsim_scope *scope = &d->config.scopes[p->level - 1];
  const calsim_calbin *configured = d->configured;
  uint64_t effects = scope->does;
  if (rule.kind == CALSIM_RESET_PARTIAL) effects &= ~rule.effects;
  if (rule.kind == CALSIM_RESET_WIDE) effects |= rule.effects;
  effects = within_chips(d, p, effects);
  calsim_trace(d, "reset level=%u", p->level);
  run_effects(d, p->level, effects, false, report);
  ++d->totals.resets[p->level - 1];
  note_wider_scope(d, p, configured, report);
  if (rule.kind == CALSIM_RESET_WIDE && rule.tells) report->h.flags |= REPORT_WIDER;
  if (rule.kind == CALSIM_RESET_WIDE && !rule.tells) report->effects_seen &= ~rule.effects;
  if (rule.kind == CALSIM_RESET_PARTIAL && !rule.tells)
    report->effects_seen |= rule.effects & scope->does & ~(uint64_t)NPURT_FX_QUIESCES_DMA;
  if (rule.kind == CALSIM_VERSION_MISMATCH) calsim_carry_device(d, &rule);
  report->h.flags |= (calsim_is_sick(d) ? 0 : REPORT_VERIFIED) |
                     (all_quiescent(d) ? REPORT_QUIESCED : 0);
  report->health_after = d->health;
  if (rule.kind != CALSIM_RESET_OK_BUT_DEAD) return NPURT_OK;
  leave_dead(d, &rule);
  if (!rule.tells) return NPURT_OK;
  report->h.flags &= ~(uint32_t)REPORT_VERIFIED;
  report->health_after = d->health;
  return calsim_error(NPURT_E_RESET_UNVERIFIED, "level %u ran and the device does not answer",
                      p->level);
}

npurt_status npurt_reset_run(npurt_device *handle, const npurt_reset_params *p,
                             npurt_reset_report *out) {
  npurt_status status = CALSIM_CHECK(p, npurt_reset_params);
  if (status == NPURT_OK) status = CALSIM_CHECK(out, npurt_reset_report);
  if (status != NPURT_OK) return status;
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  npurt_reset_report report = {
      .level = p->level, .epoch_before = d->epoch, .health_before = d->health,
      .health_after = d->health};
  uint64_t begin = calsim_now(d);
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip)
    report.mem_before[chip] = calsim_chip_used(d, chip);
  status = check_params(d, p);
  if (status == NPURT_OK) {
    d->resetting = true;
    status = admit(d, p->level);
    if (status == NPURT_OK) status = run_admitted(d, p, &report);
    d->resetting = false;
    calsim_engine_next(d);
    pthread_cond_broadcast(&d->changed);
    pthread_cond_broadcast(&d->work);
  }
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip)
    report.mem_after[chip] = calsim_chip_used(d, chip);
  report.status = status;
  report.epoch_after = d->epoch;
  report.duration_ns = calsim_now(d) - begin;
  calsim_trace(d, "reset level=%u code=0x%04x aborted=%u unaccounted=%u flags=%u effects=0x%llx",
               p->level, (unsigned)status, report.jobs_aborted, report.jobs_unaccounted,
               report.h.flags, (unsigned long long)report.effects_seen);
  calsim_unlock(d);
  calsim_put(out, &report, sizeof report);
  return status;
}
