/* calsim_faults.c - decides which rule of the fault plan fires. How a plan is read: calsim_plan.c;
 * what a fault does: calsim_carry.c, calsim_damage.c.
 *
 * A decision depends on the seed, the rule and the ordinal of the occurrence, never on time or
 * threads, so that the same order of jobs meets the same faults under every clock. */
#include "calsim_internal.h"
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

uint64_t calsim_mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

static bool chance_fires(uint64_t seed, const calsim_rule *rule) {
  uint64_t id = 0;
  for (const char *c = rule->id; *c != '\0'; ++c) id = calsim_mix(id ^ (uint8_t)*c);
  uint64_t draw =
      calsim_mix(calsim_mix(calsim_mix(seed ^ id) ^ (uint64_t)rule->point) ^ rule->seen);
  return (double)(draw >> 11) * 0x1p-53 < rule->chance;
}

static bool has_lane(const calsim_occasion *o, int64_t lane) {
  for (uint32_t i = 0; o->job != NULL && i < o->job->row_count; ++i)
    if (o->job->rows[i].active && o->job->rows[i].lane == (uint64_t)lane) return true;
  for (uint32_t i = 0; o->ops != NULL && i < o->op_count; ++i)
    if (calsim_kv_op_at(o->ops, o->stride, i)->lane == (uint64_t)lane) return true;
  return false;
}

/* Can this kind happen to the end that the job is about to have? */
static bool end_fits(const calsim_rule *rule, const calsim_job *job) {
  if (rule->kind == CALSIM_LATE_DMA) return (job->end.flags & CALSIM_FLAG_QUIESCENT) == 0;
  return job->end.state == NPURT_JOB_DONE;
}

static bool job_matches(const calsim_device *d, const calsim_rule *rule, const calsim_job *job) {
  uint32_t in_flight = calsim_in_flight(d) + (rule->point == CALSIM_AT_SUBMIT ? 1 : 0);
  if (rule->kind == CALSIM_PAD_WRITE && calsim_pads(job) == 0) return false;
  if (rule->kind == CALSIM_ILLEGAL_STEP && rule->from != job->state) return false;
  return (rule->task == 0 || rule->task == job->submodel->task) &&
         (rule->engine == 0 || rule->engine == job->engine) && in_flight >= rule->inflight_min &&
         (rule->point != CALSIM_AT_VISIBLE || end_fits(rule, job));
}

static bool matches(const calsim_device *d, const calsim_rule *rule, const calsim_occasion *o) {
  uint64_t now = calsim_now(d);
  const calsim_calbin *c = o->job != NULL    ? o->job->calbin
                           : o->bank != NULL ? o->bank->calbin
                                             : o->calbin;
  if (o->job == NULL ? calsim_in_flight(d) < rule->inflight_min : !job_matches(d, rule, o->job))
    return false;
  return (rule->model[0] == '\0' || (c != NULL && strcmp(rule->model, c->m->name) == 0)) &&
         (rule->lane < 0 || has_lane(o, rule->lane)) &&
         (rule->level == 0 || rule->level == o->level) && now >= rule->after_ns &&
         now < rule->until_ns;
}

static bool picked(uint64_t seed, const calsim_rule *rule) {
  if (rule->fired >= rule->count || rule->matches <= rule->skip) return false;
  uint64_t match = rule->matches - rule->skip;
  switch (rule->pick) {
    case CALSIM_PICK_NTH: return match == rule->n;
    case CALSIM_PICK_EVERY: return match % rule->n == 0;
    case CALSIM_PICK_CHANCE: return chance_fires(seed, rule);
    default: return true;
  }
}

calsim_rule *calsim_job_fault_at(calsim_device *d, calsim_point point, const calsim_job *job) {
  return calsim_fault_at(d, point, &(calsim_occasion){.job = job});
}

/* Counters that a rule can change, by name. */
static const struct {
  const char *name;
  size_t offset;
} COUNTERS[] = {
    {"submitted", offsetof(npurt_counters, submitted)},
    {"pending", offsetof(npurt_counters, pending)},
    {"running", offsetof(npurt_counters, running)},
    {"finished", offsetof(npurt_counters, finished)},
    {"left", offsetof(npurt_counters, left)},
    {"failed", offsetof(npurt_counters, failed)},
    {"aborted", offsetof(npurt_counters, aborted)},
    {"late", offsetof(npurt_counters, late)},
    {"ccu_exceptions", offsetof(npurt_counters, ccu_exceptions)},
    {"h2d_bytes", offsetof(npurt_counters, h2d_bytes)},
    {"d2h_bytes", offsetof(npurt_counters, d2h_bytes)},
};

bool calsim_counter_find(const char *name, uint32_t *index) {
  for (uint32_t i = 0; i < sizeof COUNTERS / sizeof COUNTERS[0]; ++i) {
    if (strcmp(COUNTERS[i].name, name) != 0) continue;
    *index = i;
    return true;
  }
  return false;
}

void calsim_counter_change(npurt_counters *counters, calsim_rule *rule) {
  uint64_t *field = (uint64_t *)((uint8_t *)counters + COUNTERS[rule->counter].offset);
  if (rule->fired == 1) rule->held = *field;
  switch (rule->kind) {
    case CALSIM_COUNTER_STUCK: *field = rule->held; break;
    case CALSIM_COUNTER_NEGATIVE: *field = 0 - (uint64_t)rule->amount; break;
    case CALSIM_COUNTER_RESET: *field -= rule->held; break;
    default: *field += (uint64_t)rule->amount;
  }
}

/* Does this rule fire now, where no other has? */
static bool decide(calsim_device *d, calsim_rule *rule, const calsim_occasion *occasion,
                   bool taken) {
  const char *decision = "no match";
  bool fires = false;
  ++rule->seen;
  if (matches(d, rule, occasion)) {
    ++rule->matches;
    decision = "pass";
    if (picked(d->config.seed, rule)) {
      decision = taken ? "shadowed" : "fire";
      fires = !taken;
      rule->fired += fires;
    }
  }
  calsim_trace(d, "fault rule=%s on=%s ordinal=%llu match=%llu job=%llu decision=%s", rule->id,
               CALSIM_POINT_NAMES[rule->point - 1], (unsigned long long)rule->seen,
               (unsigned long long)rule->matches,
               (unsigned long long)(occasion->job != NULL ? occasion->job->ordinal : 0), decision);
  return fires;
}

calsim_rule *calsim_fault_at(calsim_device *d, calsim_point point,
                             const calsim_occasion *occasion) {
  calsim_rule *winner = NULL;
  for (uint32_t i = 0; i < d->plan.count; ++i) {
    calsim_rule *rule = &d->plan.rules[i];
    if (rule->point != point || !(d->plan.armed || rule->during_load)) continue;
    if (decide(d, rule, occasion, winner != NULL)) winner = rule;
  }
  return winner;
}

/* ---- instants -------------------------------------------------------------------------- */

void calsim_plan_instants(calsim_device *d) {
  uint64_t now = calsim_now(d);
  calsim_forget_instants(d);
  for (uint32_t i = 0; i < d->plan.count; ++i) {
    const calsim_rule *rule = &d->plan.rules[i];
    if (rule->point == CALSIM_AT_TIME)
      calsim_push_instant(d, i, rule->after_ns > now ? rule->after_ns : now);
  }
}

calsim_rule *calsim_time_fault(calsim_device *d, uint32_t number) {
  calsim_rule *rule = &d->plan.rules[number];
  return decide(d, rule, &(calsim_occasion){.job = NULL}, false) ? rule : NULL;
}

npurt_status npurt_sim_faults(npurt_device *handle, const char *plan) {
  calsim_rule *rules;
  uint32_t count;
  npurt_status status = calsim_plan_parse(plan, &rules, &count);
  if (status != NPURT_OK) return status;
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) {
    free(rules);
    return NPURT_E_BAD_HANDLE;
  }
  free(d->plan.rules);
  d->plan.rules = rules;
  d->plan.count = count;
  calsim_plan_instants(d);
  calsim_trace(d, "fault plan rules=%u armed=%d", count, d->plan.armed);
  calsim_unlock(d);
  return NPURT_OK;
}

npurt_status npurt_sim_arm(npurt_device *handle) {
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  if (!d->plan.armed) {
    d->plan.armed = true;
    calsim_trace(d, "fault plan armed");
  }
  calsim_unlock(d);
  return NPURT_OK;
}
