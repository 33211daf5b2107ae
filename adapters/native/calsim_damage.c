/* calsim_damage.c - what a fault does to numbers in device memory: logits, outputs, KV. Runs within
 * EXEC, without the device lock. */
#include "calsim_internal.h"
#include <stdlib.h>
#include <string.h>

uint32_t calsim_pads(const calsim_job *job) {
  uint32_t active = 0;
  for (uint32_t row = 0; row < job->row_count; ++row) active += job->rows[row].active != 0;
  return job->submodel->max_batch - active;
}

/* ---- logits ---------------------------------------------------------------------------- */

static void shift_row(uint16_t *logits, uint32_t vocab, uint64_t by) {
  uint32_t first = (uint32_t)(by % vocab);
  uint16_t *copy = malloc(vocab * sizeof *copy);
  if (copy == NULL) abort(); /* a fault that silently did not happen would prove nothing */
  for (uint32_t i = 0; i < vocab; ++i) copy[(i + first) % vocab] = logits[i];
  memcpy(logits, copy, vocab * sizeof *copy);
  free(copy);
}

static void spoil_row(const calsim_job *job, uint32_t row, uint16_t *logits) {
  enum { BF16_NAN = 0x7fc0, BF16_ONE = 0x3f80, FINITE = 0xbfff };
  uint32_t vocab = job->calbin->m->shape.vocab;
  switch (job->damage.kind) {
    case CALSIM_NUMERIC_NAN: logits[calsim_mix(job->ordinal ^ row) % vocab] = BF16_NAN; break;
    case CALSIM_NUMERIC_GARBAGE:
      for (uint32_t i = 0; i < vocab; ++i)
        logits[i] = (uint16_t)(calsim_mix(calsim_mix(job->ordinal ^ row) ^ i) & FINITE);
      break;
    case CALSIM_NUMERIC_CONSTANT:
      for (uint32_t i = 0; i < vocab; ++i) logits[i] = BF16_ONE;
      break;
    default: shift_row(logits, vocab, job->damage.amount);
  }
}

static void spoil(calsim_job *job) {
  uint32_t vocab = job->calbin->m->shape.vocab;
  uint16_t *logits = (uint16_t *)calsim_address(job->calbin, job->engine, CALSIM_LOGITS);
  for (uint32_t row = 0; row < job->row_count; ++row) {
    const npurt_lane *lane = &job->rows[row];
    bool named = job->damage.lanes == UINT64_MAX ||
                 (lane->lane < 64 && (job->damage.lanes >> lane->lane & 1) != 0);
    if (!lane->active || !named) continue;
    spoil_row(job, row, logits + (uint64_t)row * vocab);
    if (job->damage.flag) job->numeric = true;
  }
}

/* ---- KV -------------------------------------------------------------------------------- */

static float *kv_row(const calsim_job *job, uint32_t lane, uint32_t layer, uint64_t position) {
  const calsim_manifest *m = job->calbin->m;
  uint64_t floats = 2ull * m->shape.kv_heads * m->shape.head_dim;
  return calsim_lane_kv(job->bank, lane) + (layer * (uint64_t)m->context + position) * floats;
}

/* The row of the job that the fault is about: that of the lane named, or the first active one. */
static const npurt_lane *row_of(const calsim_job *job) {
  for (uint32_t row = 0; row < job->row_count; ++row)
    if (job->rows[row].active &&
        (job->damage.lane < 0 || job->rows[row].lane == (uint64_t)job->damage.lane))
      return &job->rows[row];
  return NULL;
}

/* The position that the fault is about: the one that it names, else the last one written. */
static uint64_t position_of(const calsim_job *job, const npurt_lane *row) {
  uint64_t last = row->kv_len + row->tokens - 1;
  return job->damage.position >= 0 && (uint64_t)job->damage.position < last
             ? (uint64_t)job->damage.position
             : last;
}

/* Change a position of one layer. */
static void damage_layer(const calsim_job *job, const npurt_lane *row, uint32_t layer) {
  const calsim_shape *shape = &job->calbin->m->shape;
  uint64_t floats = 2ull * shape->kv_heads * shape->head_dim, position = position_of(job, row);
  float *at = kv_row(job, row->lane, layer, position);
  uint64_t draw = calsim_mix(job->device->config.seed ^ calsim_mix(job->ordinal));
  switch (job->damage.kind) {
    case CALSIM_KV_ZERO: memset(at, 0, floats * sizeof *at); break;
    case CALSIM_KV_STALE:
      memcpy(at, job->damage.saved + layer * floats, floats * sizeof *at);
      break;
    case CALSIM_KV_SWAP: {
      if (job->damage.victim >= job->bank->lane_count) break;
      float *other = kv_row(job, (uint32_t)job->damage.victim, layer, position);
      for (uint64_t i = 0; i < floats; ++i) {
        float kept = at[i];
        at[i] = other[i];
        other[i] = kept;
      }
      break;
    }
    default: /* one bit of one layer */
      if (layer == draw % shape->layers)
        ((uint8_t *)at)[(draw >> 8) % (floats * sizeof *at)] ^= (uint8_t)(1 << (draw >> 60 & 7));
  }
}

static bool is_kv(const calsim_job *job) {
  return job->damage.kind >= CALSIM_KV_STALE && job->damage.kind <= CALSIM_KV_BIT;
}

/* A row that is not active writes over the first position of a lane. */
static void write_pad(const calsim_job *job) {
  const calsim_shape *shape = &job->calbin->m->shape;
  uint64_t floats = 2ull * shape->kv_heads * shape->head_dim;
  if (job->damage.victim < 0 || job->damage.victim >= job->bank->lane_count) return;
  for (uint32_t layer = 0; layer < shape->layers; ++layer) {
    float *at = kv_row(job, (uint32_t)job->damage.victim, layer, 0);
    for (uint64_t i = 0; i < floats; ++i) at[i] = 1;
  }
}

/* ---- before and after the forward ------------------------------------------------------- */

static uint64_t output_bytes(const calsim_job *job) {
  return (uint64_t)job->submodel->max_batch * job->calbin->m->shape.vocab * sizeof(uint16_t);
}

bool calsim_damage_before(calsim_job *job) {
  const calsim_shape *shape = &job->calbin->m->shape;
  uint64_t floats = 2ull * shape->kv_heads * shape->head_dim;
  const npurt_lane *row = row_of(job);
  if (job->damage.kind == CALSIM_KV_STALE && row != NULL) {
    job->damage.saved = malloc(floats * shape->layers * sizeof(float));
    if (job->damage.saved == NULL) return false;
    for (uint32_t layer = 0; layer < shape->layers; ++layer)
      memcpy(job->damage.saved + layer * floats,
             kv_row(job, row->lane, layer, position_of(job, row)), floats * sizeof(float));
  }
  if (job->damage.kind == CALSIM_STALE_OUTPUT) {
    job->damage.saved = malloc(output_bytes(job));
    if (job->damage.saved == NULL) return false;
    memcpy(job->damage.saved, calsim_address(job->calbin, job->engine, CALSIM_LOGITS),
           output_bytes(job));
  }
  return true;
}

void calsim_damage_after(calsim_job *job) {
  const npurt_lane *row = row_of(job);
  calsim_fault_kind kind = job->damage.kind;
  bool null = job->device->config.profile == CALSIM_PROFILE_NULL; /* writes no KV */
  if (kind >= CALSIM_NUMERIC_NAN && kind <= CALSIM_NUMERIC_OFFSET) spoil(job);
  if (kind == CALSIM_STALE_OUTPUT)
    memcpy(calsim_address(job->calbin, job->engine, CALSIM_LOGITS), job->damage.saved,
           output_bytes(job));
  uint32_t layers = is_kv(job) && row != NULL && !null ? job->calbin->m->shape.layers : 0;
  for (uint32_t layer = 0; layer < layers; ++layer) damage_layer(job, row, layer);
  if (kind == CALSIM_PAD_WRITE && !null) write_pad(job);
}
