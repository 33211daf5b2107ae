/* calsim_carry.c - what a fault of a phase does to its job and to the device, under the lock. What
 * it does to numbers in device memory: calsim_damage.c. */
#include "calsim_internal.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const int32_t AMBIENT_MDEGC = 45000;
static const uint64_t LONGEST_NS = 1000000000000000000u;

static void stretch(uint64_t *cost, double factor) {
  double slowed = (double)*cost * factor;
  *cost = slowed < (double)LONGEST_NS ? (uint64_t)slowed : LONGEST_NS;
}

static void carry_ccu(calsim_job *job, const calsim_rule *rule) {
  job->faulty = true;
  job->fault_quiesces = rule->quiesce;
  job->fault_kv = rule->kv_effect;
  job->ccu =
      (npurt_ccu_exception){.valid = 1, .chip = rule->chip, .code = rule->ccu_code, .pc = rule->pc};
  snprintf(job->ccu.text, sizeof job->ccu.text, "injected by fault %s", rule->id);
}

/* ---- the device ------------------------------------------------------------------------ */

/* Every job in flight is lost, or, wedged, makes no progress any more. */
static void strike_jobs(calsim_device *d, const calsim_rule *rule) {
  for (uint32_t i = 0; i < d->job_count; ++i) {
    calsim_job *job = d->jobs[i];
    if (job->state >= NPURT_JOB_DONE) continue;
    atomic_store(&job->abort, true); /* the other bank may be at work */
    if (rule->kind == CALSIM_DEVICE_LOST) {
      calsim_job_end(d, job, NPURT_JOB_LOST, NPURT_E_JOB_LOST, CALSIM_KV_UNKNOWN, 0);
    } else if (!job->hung) {
      job->hung = true;
      job->release_level = rule->release_level;
      calsim_forget_events(d, job);
    }
  }
  pthread_cond_broadcast(&d->work);
}

void calsim_fall_sick(calsim_device *d, const calsim_rule *rule) {
  uint32_t state = rule->kind == CALSIM_DEVICE_LOST ? CALSIM_HEALTH_LOST
                   : rule->kind == CALSIM_WEDGED    ? CALSIM_HEALTH_WEDGED
                                                    : CALSIM_HEALTH_UNHEALTHY;
  if (rule->kind != CALSIM_UNHEALTHY) d->sticky = rule->code;
  d->cure_level = rule->release_level;
  calsim_health_set(d, state, rule->release_level != 0 ? rule->release_level : 102, rule->chip);
  if (state >= CALSIM_HEALTH_WEDGED) strike_jobs(d, rule);
}

void calsim_carry_device(calsim_device *d, const calsim_rule *rule) {
  switch (rule->kind) {
    case CALSIM_EPOCH_BUMP: calsim_foreign_reset(d, 0); break;
    case CALSIM_OWNER_CHANGE: calsim_take_away(d, rule); break;
    case CALSIM_VERSION_MISMATCH:
      d->told_field = rule->field + 1;
      calsim_copy_text(d->told_version, sizeof d->told_version, rule->version);
      break;
    default: calsim_fall_sick(d, rule);
  }
}

void calsim_carry_instant(calsim_device *d, uint32_t rule) {
  const calsim_rule *fired = calsim_time_fault(d, rule);
  if (fired != NULL) calsim_carry_device(d, fired);
}

bool calsim_is_sick(const calsim_device *d) {
  return d->sticky != NPURT_OK || d->health >= CALSIM_HEALTH_UNHEALTHY;
}

void calsim_cure(calsim_device *d, uint32_t level) {
  bool cures = calsim_is_sick(d) ? d->cure_level != 0 && level >= d->cure_level
                                 : level == CALSIM_CCU || level == CALSIM_DEVICE_SOFT;
  if (d->curse_level != 0 && level >= d->curse_level) d->curse = 0;
  if (!cures) return;
  d->sticky = NPURT_OK;
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip)
    calsim_health_set(d, CALSIM_HEALTH_OK, 0, chip);
}

/* One RC node a chip, all with the same load: it goes to its target by exp(-t / tau). */
static void pass_heat(calsim_device *d, bool computed) {
  calsim_thermal *t = &d->thermal;
  uint64_t now = calsim_now(d);
  double target = AMBIENT_MDEGC + (computed ? t->rise_mdegc : 0);
  double left = exp(-(double)(now - t->seen_ns) / (double)t->tau_ns);
  t->mdegc = target + (t->mdegc - target) * left;
  t->seen_ns = now;
}

static void carry_heat(calsim_device *d, const calsim_rule *rule, uint64_t *cost) {
  calsim_thermal *t = &d->thermal;
  if (t->tau_ns == 0) *t = (calsim_thermal){.mdegc = AMBIENT_MDEGC, .seen_ns = calsim_now(d)};
  t->tau_ns = rule->tau_ns;
  t->rise_mdegc = rule->rise_mdegc;
  pass_heat(d, false);
  bool hot = t->mdegc > rule->limit_mdegc;
  if (hot) stretch(cost, rule->factor);
  if (hot != t->throttled)
    calsim_event(d, NPURT_EV_THROTTLE, 0, 0, NPURT_OK, "%s at %d mdegC",
                 hot ? "throttled" : "full clock", (int)t->mdegc);
  t->throttled = hot;
}

void calsim_heat_end(calsim_device *d) {
  if (d->thermal.tau_ns != 0) pass_heat(d, true);
}

int32_t calsim_temperature(calsim_device *d) {
  bool computes = calsim_computes(d);
  if (d->thermal.tau_ns == 0) return AMBIENT_MDEGC + (computes ? 7000 : 0);
  pass_heat(d, computes);
  return (int32_t)lround(d->thermal.mdegc);
}

static void carry_drift(calsim_device *d, const calsim_job *job, const calsim_rule *rule,
                        uint64_t *cost) {
  stretch(cost, 1 + rule->factor / 100 * ((double)job->ordinal / 1e6));
  uint32_t chip = job->calbin->home_chip;
  uint64_t room = d->config.dram_bytes - calsim_chip_used(d, chip);
  d->chips[chip].dynamic += rule->bytes < room ? rule->bytes : room;
}

/* ---- a job ----------------------------------------------------------------------------- */

void calsim_carry_fault(calsim_device *d, calsim_job *job, const calsim_rule *rule,
                        uint64_t *cost) {
  switch (rule->kind) {
    case CALSIM_HANG:
      job->hung = true;
      job->release_level = rule->release_level;
      break;
    case CALSIM_SLOW: stretch(cost, rule->factor); break;
    case CALSIM_DMA_ERROR:
      job->dma_fails = true;
      job->dma_left = rule->offset;
      snprintf(job->reason, sizeof job->reason, "transfer broken off by fault %s", rule->id);
      break;
    case CALSIM_CCU_EXCEPTION: carry_ccu(job, rule); break;
    case CALSIM_UNHEALTHY:
    case CALSIM_STICKY:
    case CALSIM_WEDGED:
    case CALSIM_DEVICE_LOST: calsim_fall_sick(d, rule); break;
    case CALSIM_THERMAL: carry_heat(d, rule, cost); break;
    case CALSIM_DRIFT: carry_drift(d, job, rule, cost); break;
    default: /* what is done to numbers */
      free(job->damage.saved);
      job->damage = (calsim_damage){.kind = rule->kind,
                                    .lanes = rule->lanes,
                                    .flag = rule->numeric_flag,
                                    .amount = (uint64_t)rule->amount,
                                    .lane = rule->lane,
                                    .position = rule->position,
                                    .victim = rule->victim};
  }
}

void calsim_carry_lasting(const calsim_device *d, calsim_job *job) {
  bool garbage = d->curse == CALSIM_NUMERIC_GARBAGE;
  if (d->curse == CALSIM_HANG && !job->over) {
    job->hung = true;
    job->release_level = d->curse_level;
  }
  if (job->damage.kind == 0 && (garbage || job->calbin->spoilt))
    job->damage = (calsim_damage){
        .kind = garbage ? CALSIM_NUMERIC_GARBAGE : CALSIM_NUMERIC_CONSTANT, .lanes = UINT64_MAX};
}
