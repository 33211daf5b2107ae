/* calsim_compute.c - phase EXEC: the forward of each active row, in device memory, without the
 * device lock. */
#include "calsim_internal.h"
#include <stdlib.h>
#include <string.h>

npurt_status calsim_capture_allocate(calsim_job *job) {
  const calsim_shape *shape = &job->calbin->m->shape;
  calsim_capture *capture = &job->capture;
  uint64_t tokens = 0;
  for (uint32_t row = 0; row < job->row_count; ++row) {
    capture->first[row] = tokens;
    if (job->rows[row].active) tokens += job->rows[row].tokens;
  }
  uint64_t routes = (uint64_t)shape->layers * shape->experts_per_token;
  if (tokens * (shape->vocab + 2 * routes) * sizeof(float) > CALSIM_CAPTURE_BYTES_MAX)
    return calsim_error(NPURT_E_HOST_MEMORY, "capture of more than 1 GiB for one job");
  capture->logits = calloc(tokens * shape->vocab, sizeof(float));
  if (routes > 0) {
    capture->route_idx = calloc(tokens * routes, sizeof(int32_t));
    capture->route_weight = calloc(tokens * routes, sizeof(float));
  }
  bool missing = capture->logits == NULL ||
                 (routes > 0 && (capture->route_idx == NULL || capture->route_weight == NULL));
  return missing ? calsim_error(NPURT_E_HOST_MEMORY, "out of host memory for the capture")
                 : NPURT_OK;
}

/* Logits of the null profile: one peak, at a token that follows from the last token and its
 * position. */
static void null_logits(uint16_t *logits, uint32_t vocab, int32_t token, uint32_t position) {
  enum { BF16_TEN = 0x4120 };
  logits[calsim_mix((uint64_t)(uint32_t)token << 32 | position) % vocab] = BF16_TEN;
}

static bool finite_bf16(const uint16_t *values, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i)
    if ((values[i] & 0x7f80) == 0x7f80) return false;
  return true;
}

/* Run the first `count` tokens of a row. */
static void run_row(calsim_job *job, uint32_t row, uint32_t count) {
  const calsim_calbin *c = job->calbin;
  const calsim_shape *shape = &c->m->shape;
  const npurt_lane *lane = &job->rows[row];
  const int32_t *tokens = (const int32_t *)calsim_address(c, job->engine, CALSIM_TOKENS) +
                          (uint64_t)row * job->submodel->max_tokens;
  uint16_t *logits =
      (uint16_t *)calsim_address(c, job->engine, CALSIM_LOGITS) + (uint64_t)row * shape->vocab;
  uint64_t *digest = (uint64_t *)calsim_address(c, job->engine, CALSIM_DIGEST) + row;
  if (job->device->config.profile == CALSIM_PROFILE_NULL) {
    uint32_t position = lane->kv_len + count - 1;
    null_logits(logits, shape->vocab, tokens[count - 1], position);
    *digest = calsim_mix(position);
    return;
  }
  const calsim_capture *capture = &job->capture;
  uint64_t routes = (uint64_t)shape->layers * shape->experts_per_token, first = capture->first[row];
  calsim_row work = {
      .kv = calsim_lane_kv(job->bank, lane->lane),
      .tokens = tokens,
      .token_count = count,
      .position = lane->kv_len,
      .logits_bf16 = logits,
      .logits_f32 = capture->logits == NULL ? NULL : capture->logits + first * shape->vocab,
      .route_idx = capture->route_idx == NULL ? NULL : capture->route_idx + first * routes,
      .route_weight =
          capture->route_weight == NULL ? NULL : capture->route_weight + first * routes};
  calsim_forward(c->artifact, c->workspace, &work);
  if (!finite_bf16(logits, shape->vocab)) job->numeric = true;
  if (job->views[CALSIM_DIGEST].host != NULL)
    *digest = calsim_kv_digest(c->m, work.kv, lane->kv_len + count);
}

/* Rows that a faulty job completes before its exception, of `active`; *half: the next one is begun.
 */
static uint32_t rows_before_exception(const calsim_job *job, uint32_t active, bool *half) {
  *half = job->fault_kv == CALSIM_KV_PARTIAL;
  if (job->fault_kv == CALSIM_KV_NONE) return 0;
  if (job->fault_kv == CALSIM_KV_PARTIAL) return active / 2;
  uint64_t draw = calsim_mix(job->device->config.seed ^ calsim_mix(job->ordinal));
  *half = (draw >> 32 & 1) != 0;
  return (uint32_t)(draw % (active + 1));
}

/* Rows that are not active, by rule scratch_lane: they compute all the same, on a lane that nobody
 * else has. */
static void run_scratch(const calsim_job *job) {
  const calsim_calbin *c = job->calbin;
  const int32_t token = 0;
  if (c->m->lane_rule != CALSIM_RULE_SCRATCH ||
      job->device->config.profile == CALSIM_PROFILE_NULL)
    return;
  for (uint32_t row = 0; row < job->submodel->max_batch; ++row) {
    if (row < job->row_count && job->rows[row].active) continue;
    uint16_t *logits = (uint16_t *)calsim_address(c, job->engine, CALSIM_LOGITS) +
                       (uint64_t)row * c->m->shape.vocab;
    calsim_row work = {.kv = calsim_lane_kv(job->bank, c->m->lanes),
                       .tokens = &token,
                       .token_count = 1,
                       .logits_bf16 = logits};
    calsim_forward(c->artifact, c->workspace, &work);
    memset(logits, 0, c->m->shape.vocab * sizeof *logits);
  }
}

npurt_status calsim_compute(calsim_job *job) {
  const calsim_calbin *c = job->calbin;
  uint32_t active = 0, done = 0;
  bool half = false;
  for (uint32_t row = 0; row < job->row_count; ++row) active += job->rows[row].active != 0;
  uint32_t whole = job->faulty ? rows_before_exception(job, active, &half) : active;
  if (job->damage.kind != 0 && !calsim_damage_before(job)) abort(); /* else it proves nothing */
  memset(calsim_address(c, job->engine, CALSIM_LOGITS), 0,
         (size_t)job->submodel->max_batch * c->m->shape.vocab * sizeof(uint16_t));
  memset(calsim_address(c, job->engine, CALSIM_DIGEST), 0,
         job->submodel->max_batch * sizeof(uint64_t));
  for (uint32_t row = 0; row < job->row_count; ++row) {
    const npurt_lane *lane = &job->rows[row];
    if (!lane->active) continue;
    if (atomic_load(&job->abort)) return NPURT_E_JOB_ABORTED;
    uint32_t count = done < whole            ? lane->tokens
                     : half && done == whole ? (lane->tokens + 1) / 2
                                             : 0;
    if (count == 0) break;
    job->rows_touched = ++done;
    run_row(job, row, count);
    if (done <= whole) job->rows_done |= 1ull << row;
  }
  run_scratch(job);
  if (job->damage.kind != 0) calsim_damage_after(job);
  return NPURT_OK;
}
