/* calsim_cost.c - what a job takes and what a model is accounted with, by profile.
 *
 * tp2-ref prices the reference shape (a 30B mixture of experts on two chips, tensor parallel)
 * whatever model really runs: per layer and chip, the slower of reading the weights that the tokens
 * touch and computing with them, then two exchanges between the chips. The chip numbers are
 * illustrative; nobody measured them. cost is the simple model: numbers of the configuration. */
#include "calsim_internal.h"
#include <math.h>

static const double GIB = 1073741824.0, LONGEST_NS = 1e15;

/* The reference shape. */
static const double LAYERS = 48, HIDDEN = 2048, VOCAB = 151936, EXPERTS = 128,
                    EXPERTS_PER_TOKEN = 8;
static const double ATTENTION_PARAMS = 2048.0 * 4096 * 2 + 2048.0 * 512 * 2,
                    ROUTER_PARAMS = 2048.0 * 128;
static const double EXPERT_PARAMS = 3.0 * 2048 * 768, QUERY_WIDTH = 4096;
static const double PARAM_BYTES = 16.938 * 1073741824.0 / 30.53e9; /* per parameter, quantised */
static const double KV_LAYER_BYTES = 2.0 * 4 * 128 * 2;            /* per token and layer, bf16 */
static const uint64_t KV_TOKEN_BYTES = 98304;

/* The illustrative chip. */
static const double CHIP_BYTES_PER_S = 200e9, CHIP_FLOPS = 60e12, LINK_LATENCY_S = 4e-6,
                    LINK_BYTES_PER_S = 32e9;
static const double HOST_BYTES_PER_S = 16e9, H2D_LATENCY_S = 50e-6, D2H_LATENCY_S = 31e-6;

static uint64_t to_ns(double seconds) { return (uint64_t)llround(seconds * 1e9); }

/* The slower of memory and arithmetic on one chip, which holds half of everything. */
static double half_roof(double bytes, double flops) {
  double memory = bytes / 2 / CHIP_BYTES_PER_S, arithmetic = flops / 2 / CHIP_FLOPS;
  return memory > arithmetic ? memory : arithmetic;
}

static calsim_cost reference_cost(const calsim_work *w) {
  double tokens = (double)w->tokens;
  double touched = EXPERTS * (1 - pow(1 - EXPERTS_PER_TOKEN / EXPERTS, tokens));
  double bytes = (ATTENTION_PARAMS + ROUTER_PARAMS + touched * EXPERT_PARAMS) * PARAM_BYTES +
                 (double)w->context_sum * KV_LAYER_BYTES;
  double flops =
      2 * tokens * (ATTENTION_PARAMS + ROUTER_PARAMS + EXPERTS_PER_TOKEN * EXPERT_PARAMS) +
      4 * (double)w->attended * QUERY_WIDTH;
  double exchange_bytes = tokens * HIDDEN * 2;
  double exchange = LINK_LATENCY_S + exchange_bytes / LINK_BYTES_PER_S;
  double head = half_roof(HIDDEN * VOCAB * PARAM_BYTES, 2 * (double)w->rows * HIDDEN * VOCAB);
  calsim_cost cost = {
      .h2d_ns = to_ns(H2D_LATENCY_S + (double)w->bytes_in / HOST_BYTES_PER_S),
      .exec_ns = to_ns(LAYERS * (half_roof(bytes, flops) + 2 * exchange) + head),
      .d2h_ns = to_ns(D2H_LATENCY_S + (double)w->rows * VOCAB * 2 / HOST_BYTES_PER_S),
      .d2d_ns = to_ns(LAYERS * 2 * exchange),
      .d2d_bytes = (uint64_t)llround(LAYERS * 2 * exchange_bytes),
  };
  return cost;
}

static calsim_cost simple_cost(const calsim_config *config, const calsim_work *w) {
  const calsim_rate *rate = w->decodes ? &config->decode : &config->prefill;
  double count = (double)(w->decodes ? w->rows : w->tokens);
  double context = w->decodes ? (double)w->context_sum : count * count;
  double exec = (double)rate->base_ns + (double)rate->each_ns * count +
                (double)rate->context_ns * context;
  return (calsim_cost){
      .h2d_ns = config->h2d_ns,
      .exec_ns = exec < LONGEST_NS ? (uint64_t)exec : (uint64_t)LONGEST_NS,
      .d2h_ns = config->d2h_ns,
  };
}

calsim_cost calsim_job_cost(const calsim_config *config, const calsim_work *work) {
  switch (config->profile) {
    case CALSIM_PROFILE_COST: return simple_cost(config, work);
    case CALSIM_PROFILE_NULL: return (calsim_cost){1, 1, 1, 0, 0};
    case CALSIM_PROFILE_TINY: return (calsim_cost){1000, 1000, 1000, 0, 0};
    default: return reference_cost(work);
  }
}

calsim_limits calsim_profile_limits(int profile) {
  enum { POOL = 40960 }; /* KV tokens of the reference memory */
  switch (profile) {
    case CALSIM_PROFILE_TP2_B4: return (calsim_limits){4, 8, POOL / 8};
    case CALSIM_PROFILE_TP2_B8: return (calsim_limits){8, 16, POOL / 16};
    case CALSIM_PROFILE_TP2_B16: return (calsim_limits){16, 32, POOL / 32};
    default: return (calsim_limits){0, 0, 0};
  }
}

calsim_account calsim_job_account(int profile, const calsim_manifest *m) {
  calsim_account account = {.kv_bytes_per_token = m->kv_bytes_per_token};
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip) {
    account.params[chip] = m->params[chip];
    account.kv[chip] = m->kv[chip];
    account.workspace[chip] = m->workspace[chip];
    account.other[chip] = m->other[chip];
    if (profile < CALSIM_PROFILE_TP2_REF) continue;
    account.params[chip] = (uint64_t)llround(16.938 * GIB / 2);
    account.kv[chip] = 40960 * KV_TOKEN_BYTES / 2;
    account.workspace[chip] = (uint64_t)llround(7.462 * GIB / 2);
    account.other[chip] = 0;
    account.kv_bytes_per_token = KV_TOKEN_BYTES;
  }
  return account;
}
