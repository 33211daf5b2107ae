/* calsim_kv.c - the KV bank: which lane belongs to which sequence, how long it is, and what is
 * known about its content.
 *
 * An operation list is tried on a copy of the lanes and taken over whole or not at all. A lane's
 * length moves only by commit. A lane whose content is unknown accepts only RELEASE, which on this
 * board also wipes it: that is the statement which lets an engine use the lane again without
 * dropping the configuration. */
#include "calsim_internal.h"
#include <stdlib.h>
#include <string.h>

enum { RESERVE = 1, COMMIT, ROLLBACK, RELEASE };
static const char *const OPS[] = {"?", "reserve", "commit", "rollback", "release"};

bool calsim_bank_lost(const calsim_bank *bank) { return bank->calbin->device->bank != bank; }

float *calsim_lane_kv(const calsim_bank *bank, uint32_t lane) {
  const calsim_calbin *c = bank->calbin;
  return (float *)(c->device->chips[c->home_chip].map + c->layout.kv +
                   c->layout.kv_lane_bytes * lane);
}

void calsim_bank_all_unknown(calsim_bank *bank) {
  for (uint32_t i = 0; i < bank->lane_count; ++i) bank->lanes[i].certainty = CALSIM_UNKNOWN;
}

void calsim_bank_free(calsim_bank *bank) {
  free(bank->lanes);
  free(bank);
}

static void wipe(const calsim_bank *bank, uint32_t lane) {
  uint32_t positions = bank->lanes[lane].touched;
  if (positions == 0 || calsim_bank_lost(bank)) return;
  const calsim_shape *shape = &bank->calbin->m->shape;
  uint64_t position_floats = 2ull * shape->kv_heads * shape->head_dim;
  float *kv = calsim_lane_kv(bank, lane);
  for (uint32_t layer = 0; layer < shape->layers; ++layer)
    memset(kv + layer * position_floats * bank->calbin->m->context, 0,
           position_floats * positions * sizeof *kv);
}

/* ---- space ----------------------------------------------------------------------------- */

/* KV tokens that the accounted memory holds, over all lanes. */
static uint64_t pool_tokens(const calsim_calbin *c) {
  uint64_t bytes = 0;
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip) bytes += c->account.kv[chip];
  return c->account.kv_bytes_per_token == 0 ? 0 : bytes / c->account.kv_bytes_per_token;
}

static uint64_t add_lie(uint64_t tokens, int64_t lie) {
  if (lie < 0) return tokens > (uint64_t)-lie ? tokens - (uint64_t)-lie : 0;
  return tokens + (uint64_t)lie;
}

static uint32_t lane_tokens(const calsim_lane *lane) {
  return lane->reserved > lane->committed ? lane->reserved : lane->committed;
}

static uint64_t used_tokens(const calsim_lane *lanes, uint32_t count) {
  uint64_t tokens = 0;
  for (uint32_t i = 0; i < count; ++i) tokens += lane_tokens(&lanes[i]);
  return tokens;
}

/* A chip's part of so many tokens. */
static uint64_t chip_bytes(const calsim_calbin *c, uint32_t chip, uint64_t tokens) {
  uint64_t all = 0;
  for (uint32_t i = 0; i < CALSIM_CHIPS; ++i) all += c->account.kv[i];
  return all == 0 ? 0
                  : (uint64_t)((double)tokens * (double)c->account.kv_bytes_per_token *
                               ((double)c->account.kv[chip] / (double)all));
}

/* ---- operations ------------------------------------------------------------------------ */

typedef struct trial { /* an operation list under way on a copy of the lanes */
  calsim_device *device;
  calsim_bank *bank;
  calsim_lane *lanes;
  uint64_t tokens; /* used_tokens(lanes), kept up to date */
  int64_t lie;     /* tokens by which can_allocate takes pool and lanes for larger */
  bool *wiped;
} trial;

static npurt_status try_reserve(trial *t, calsim_lane *lane, const npurt_kv_op *op) {
  const calsim_calbin *c = t->bank->calbin;
  if (op->txn == 0)
    return calsim_error(NPURT_E_INVALID_ARG, "lane %u: a reservation needs a txn", op->lane);
  if (lane->certainty != CALSIM_KNOWN)
    return calsim_error(NPURT_E_KV_UNKNOWN, "lane %u: content unknown; release it", op->lane);
  if (lane->txn != 0)
    return calsim_error(NPURT_E_BAD_STATE, "lane %u: reserved by txn %llu", op->lane,
                        (unsigned long long)lane->txn);
  if (lane->bound && lane->seq_tag != op->seq_tag)
    return calsim_error(NPURT_E_BAD_STATE, "lane %u: bound to sequence %llu", op->lane,
                        (unsigned long long)lane->seq_tag);
  if (op->from_len != lane->committed || op->to_len <= op->from_len)
    return calsim_error(NPURT_E_INVALID_ARG, "lane %u: reserve %u to %u; %u is committed", op->lane,
                        op->from_len, op->to_len, lane->committed);
  uint64_t tokens = t->tokens + (op->to_len - op->from_len);
  if (op->to_len > add_lie(c->m->context, t->lie) || tokens > add_lie(pool_tokens(c), t->lie))
    return calsim_error(NPURT_E_KV_NO_SPACE,
                        "lane %u: %u tokens; the lane has %u, the bank %llu with %llu in use",
                        op->lane, op->to_len, c->m->context, (unsigned long long)pool_tokens(c),
                        (unsigned long long)t->tokens);
  t->tokens = tokens;
  lane->bound = 1;
  lane->seq_tag = op->seq_tag;
  lane->txn = op->txn;
  lane->reserved = op->to_len;
  return NPURT_OK;
}

static npurt_status try_settle(trial *t, calsim_lane *lane, const npurt_kv_op *op) {
  if (lane->certainty != CALSIM_KNOWN)
    return calsim_error(NPURT_E_KV_UNKNOWN, "lane %u: content unknown; release it", op->lane);
  if (lane->txn == 0 || lane->txn != op->txn || lane->seq_tag != op->seq_tag)
    return calsim_error(NPURT_E_BAD_STATE, "lane %u: no reservation of txn %llu and sequence %llu",
                        op->lane, (unsigned long long)op->txn, (unsigned long long)op->seq_tag);
  if (op->from_len != lane->committed || op->to_len != lane->reserved)
    return calsim_error(NPURT_E_INVALID_ARG, "lane %u: quotes %u to %u; reserved is %u to %u",
                        op->lane, op->from_len, op->to_len, lane->committed, lane->reserved);
  if (calsim_job_on_lane(t->device, t->bank, op->lane, true) != NULL)
    return calsim_error(NPURT_E_OBJECT_IN_FLIGHT, "lane %u: its job is not terminal", op->lane);
  if (op->op == COMMIT)
    lane->committed = lane->reserved;
  else
    t->tokens -= lane->reserved - lane->committed;
  lane->reserved = lane->committed;
  lane->txn = 0;
  return NPURT_OK;
}

static npurt_status try_release(trial *t, calsim_lane *lane, const npurt_kv_op *op) {
  if (!lane->bound && lane->certainty == CALSIM_KNOWN)
    return calsim_error(NPURT_E_BAD_STATE, "lane %u is free already", op->lane);
  if (lane->bound && lane->seq_tag != op->seq_tag)
    return calsim_error(NPURT_E_BAD_STATE, "lane %u: bound to sequence %llu", op->lane,
                        (unsigned long long)lane->seq_tag);
  if (calsim_job_on_lane(t->device, t->bank, op->lane, false) != NULL)
    return calsim_error(NPURT_E_OBJECT_IN_FLIGHT, "lane %u: its job is not quiescent", op->lane);
  t->tokens -= lane_tokens(lane);
  *lane = (calsim_lane){.certainty = CALSIM_KNOWN, .touched = lane->touched};
  t->wiped[op->lane] = true;
  return NPURT_OK;
}

static npurt_status try_op(trial *t, const npurt_kv_op *op) {
  if (op->lane >= t->bank->lane_count)
    return calsim_error(NPURT_E_INVALID_ARG, "lane %u of %u", op->lane, t->bank->lane_count);
  if (op->op < RESERVE || op->op > RELEASE)
    return calsim_error(NPURT_E_INVALID_ARG, "KV operation %u", op->op);
  if (op->op != RELEASE && calsim_bank_lost(t->bank))
    return calsim_error(NPURT_E_CONFIG_LOST,
                        "the bank's configuration is gone; only RELEASE is left");
  calsim_lane *lane = &t->lanes[op->lane];
  if (op->op == RESERVE) return try_reserve(t, lane, op);
  return op->op == RELEASE ? try_release(t, lane, op) : try_settle(t, lane, op);
}

const npurt_kv_op *calsim_kv_op_at(const npurt_kv_op *ops, uint32_t stride, uint32_t i) {
  return (const npurt_kv_op *)((const uint8_t *)ops + (uint64_t)stride * i);
}

/* Try a whole list; *bad names the operation that failed. The caller frees t->lanes and t->wiped.
 */
static npurt_status try_ops(trial *t, const npurt_kv_op *ops, uint32_t stride, uint32_t n,
                            uint32_t *bad) {
  uint32_t count = t->bank->lane_count;
  t->lanes = malloc(count * sizeof *t->lanes);
  t->wiped = calloc(count, sizeof *t->wiped);
  *bad = 0;
  if (t->lanes == NULL || t->wiped == NULL)
    return calsim_error(NPURT_E_HOST_MEMORY, "out of host memory");
  memcpy(t->lanes, t->bank->lanes, count * sizeof *t->lanes);
  t->tokens = used_tokens(t->lanes, count);
  for (uint32_t i = 0; i < n; ++i) {
    *bad = i;
    npurt_status status = try_op(t, calsim_kv_op_at(ops, stride, i));
    if (status != NPURT_OK) return status;
  }
  return NPURT_OK;
}

static npurt_status check_list(const npurt_kv_op *ops, uint32_t stride, uint32_t n) {
  if (n > CALSIM_MAX_KV_OPS || (ops == NULL && n > 0))
    return calsim_error(NPURT_E_INVALID_ARG, "KV operations: none given, or more than %d",
                        CALSIM_MAX_KV_OPS);
  if (n == 0 || stride >= CALSIM_ABI01(npurt_kv_op)) return NPURT_OK;
  return calsim_error(NPURT_E_STRUCT_SIZE, "KV operations: stride %u is too small", stride);
}

/* ---- faults ---------------------------------------------------------------------------- */

static const calsim_rule *list_fault(calsim_device *d, calsim_point point, const calsim_bank *bank,
                                     const npurt_kv_op *ops, uint32_t stride, uint32_t n) {
  const calsim_occasion list = {.bank = bank, .ops = ops, .stride = stride, .op_count = n};
  return calsim_fault_at(d, point, &list);
}

/* Index of the first operation that reserves (or, reserves = false, that does not); n if none. */
static uint32_t first_op(const npurt_kv_op *ops, uint32_t stride, uint32_t n, bool reserves) {
  uint32_t i = 0;
  while (i < n && (calsim_kv_op_at(ops, stride, i)->op == RESERVE) != reserves) ++i;
  return i;
}

/* The fault of a list that would have been applied; *bad names the operation that failed. A partial
 * one leaves the content of every lane of the list unknown, any other leaves the bank as it was. */
static npurt_status fail_list(trial *t, const npurt_kv_op *ops, uint32_t stride, uint32_t n,
                              uint32_t *bad) {
  const calsim_rule *rule = NULL;
  *bad = first_op(ops, stride, n, false);
  if (*bad < n) rule = list_fault(t->device, CALSIM_AT_KV_APPLY_AFTER, t->bank, ops, stride, n);
  if (rule == NULL) {
    *bad = first_op(ops, stride, n, true);
    if (*bad < n) rule = list_fault(t->device, CALSIM_AT_KV_APPLY_BEFORE, t->bank, ops, stride, n);
  }
  if (rule == NULL) return NPURT_OK;
  for (uint32_t i = 0; rule->partial && i < n; ++i)
    t->bank->lanes[calsim_kv_op_at(ops, stride, i)->lane].certainty = CALSIM_UNKNOWN;
  return calsim_error(rule->code, "not applied, by fault %s", rule->id);
}

npurt_status npurt_kv_can_allocate(npurt_kvbank *handle, const npurt_kv_op *ops, uint32_t stride,
                                   uint32_t n, npurt_kv_answer *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_kv_answer);
  if (status == NPURT_OK) status = check_list(ops, stride, n);
  if (status != NPURT_OK) return status;
  trial t = {0};
  t.bank = calsim_lock_object(handle, CALSIM_BANK, &t.device);
  if (t.bank == NULL) return NPURT_E_BAD_HANDLE;
  const calsim_calbin *c = t.bank->calbin;
  const calsim_rule *rule = list_fault(t.device, CALSIM_AT_KV_CAN, t.bank, ops, stride, n);
  if (rule != NULL) t.lie = rule->amount;
  uint64_t used = used_tokens(t.bank->lanes, t.bank->lane_count);
  uint64_t pool = add_lie(pool_tokens(c), t.lie), need = 0, fit;
  npurt_kv_answer answer = {0};
  for (uint32_t i = 0; i < t.bank->lane_count; ++i)
    answer.free_lanes += !t.bank->lanes[i].bound && t.bank->lanes[i].certainty == CALSIM_KNOWN;
  for (uint32_t i = 0; i < n; ++i) {
    const npurt_kv_op *op = calsim_kv_op_at(ops, stride, i);
    if (op->op == RESERVE && op->to_len > op->from_len) need += op->to_len - op->from_len;
  }
  uint64_t free_tokens = pool > used ? pool - used : 0;
  fit = free_tokens;
  if (n > 0 && calsim_kv_op_at(ops, stride, 0)->lane < t.bank->lane_count)
    fit += lane_tokens(&t.bank->lanes[calsim_kv_op_at(ops, stride, 0)->lane]);
  uint64_t context = add_lie(c->m->context, t.lie);
  answer.fit_len = (uint32_t)(fit < context ? fit : context);
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip) {
    answer.need_bytes[chip] = chip_bytes(c, chip, need);
    answer.free_bytes[chip] = chip_bytes(c, chip, free_tokens);
  }
  uint32_t bad;
  status = try_ops(&t, ops, stride, n, &bad);
  free(t.lanes);
  free(t.wiped);
  calsim_unlock(t.device);
  calsim_put(out, &answer, sizeof answer);
  return status;
}

static void take_over(trial *t, const npurt_kv_op *ops, uint32_t stride, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) {
    const npurt_kv_op *op = calsim_kv_op_at(ops, stride, i);
    calsim_trace_kv(t->device, OPS[op->op], op);
    if (op->op == COMMIT && t->bank->lanes[op->lane].written < op->to_len &&
        t->device->config.profile != CALSIM_PROFILE_NULL)
      calsim_violation(t->device, NULL, NPURT_E_KV_APPLY,
                       "COMMIT_UNWRITTEN lane %u to %u, written %u", op->lane, op->to_len,
                       t->bank->lanes[op->lane].written);
  }
  for (uint32_t lane = 0; lane < t->bank->lane_count; ++lane) {
    if (!t->wiped[lane]) continue;
    wipe(t->bank, lane);
    t->lanes[lane].touched = 0;
  }
  free(t->bank->lanes);
  t->bank->lanes = t->lanes;
  t->lanes = NULL;
}

npurt_status npurt_kv_apply(npurt_kvbank *handle, const npurt_kv_op *ops, uint32_t stride,
                            uint32_t n, uint32_t *bad_index) {
  npurt_status status = check_list(ops, stride, n);
  if (status != NPURT_OK) return status;
  trial t = {0};
  t.bank = calsim_lock_object(handle, CALSIM_BANK, &t.device);
  if (t.bank == NULL) return NPURT_E_BAD_HANDLE;
  uint32_t bad;
  status = try_ops(&t, ops, stride, n, &bad);
  if (status == NPURT_OK) status = fail_list(&t, ops, stride, n, &bad);
  if (status == NPURT_OK) {
    take_over(&t, ops, stride, n);
  } else {
    calsim_trace(t.device, "kv refused op=%u code=0x%04x", bad, (unsigned)status);
    if (bad_index != NULL) *bad_index = bad;
  }
  free(t.lanes);
  free(t.wiped);
  calsim_unlock(t.device);
  return status;
}

/* ---- the bank itself ------------------------------------------------------------------- */

static npurt_status check_open(const calsim_device *d, const calsim_calbin *c,
                               const npurt_kv_params *p) {
  enum { AUTO = 3 };
  if (c->state != CALSIM_CONFIGURED)
    return calsim_error(NPURT_E_BAD_STATE, "a KV bank needs a configured calbin");
  if (d->bank != NULL)
    return calsim_error(NPURT_E_BAD_STATE, "the generation has its KV bank already");
  if (p->layout < 1 || p->layout > AUTO || p->lanes > c->m->lanes)
    return calsim_error(NPURT_E_INVALID_ARG, "KV layout %u (1 to 3) or lanes %u (0 to %u)",
                        p->layout, p->lanes, c->m->lanes);
  if (p->layout == c->m->kv_layout || p->layout == AUTO || c->m->kv_layout == AUTO) return NPURT_OK;
  return calsim_error(NPURT_E_UNSUPPORTED, "KV layout %u; the calbin is built for %u", p->layout,
                      c->m->kv_layout);
}

npurt_status npurt_kv_open(npurt_calbin *handle, const npurt_kv_params *p, npurt_kvbank **out) {
  npurt_status status = CALSIM_CHECK(p, npurt_kv_params);
  if (status != NPURT_OK) return status;
  if (out == NULL) return calsim_error(NPURT_E_INVALID_ARG, "kv_open: out is NULL");
  calsim_device *d;
  calsim_calbin *c = calsim_lock_object(handle, CALSIM_CALBIN, &d);
  if (c == NULL) return NPURT_E_BAD_HANDLE;
  calsim_bank *bank = NULL;
  status = check_open(d, c, p);
  if (status == NPURT_OK) {
    uint32_t count = p->lanes != 0 ? p->lanes : c->m->lanes;
    bank = calloc(1, sizeof *bank);
    calsim_lane *lanes = calloc(count, sizeof *lanes);
    if (bank == NULL || lanes == NULL) {
      free(lanes);
      status = calsim_error(NPURT_E_HOST_MEMORY, "out of host memory");
    } else {
      for (uint32_t i = 0; i < count; ++i) lanes[i].certainty = CALSIM_KNOWN;
      *bank = (calsim_bank){.calbin = c,
                            .generation = c->generation,
                            .layout = p->layout,
                            .lane_count = count,
                            .lanes = lanes};
      status = calsim_add_object(d, CALSIM_BANK, bank, &bank->handle);
      if (status != NPURT_OK) free(lanes);
    }
  }
  if (status == NPURT_OK) {
    d->bank = bank;
    ++c->children;
    *out = bank->handle;
    calsim_trace(d, "kv open lanes=%u layout=%u", bank->lane_count, bank->layout);
  }
  calsim_unlock(d);
  if (status != NPURT_OK) free(bank);
  return status;
}

npurt_status npurt_kv_close(npurt_kvbank *handle) {
  calsim_device *d;
  calsim_bank *bank = calsim_lock_object(handle, CALSIM_BANK, &d);
  if (bank == NULL) return NPURT_E_BAD_HANDLE;
  npurt_status status = NPURT_OK;
  for (uint32_t i = 0; i < d->job_count && status == NPURT_OK; ++i)
    if (d->jobs[i]->bank == bank)
      status = calsim_error(NPURT_E_OBJECT_IN_FLIGHT, "job %llu is not retired",
                            (unsigned long long)d->jobs[i]->ticket);
  if (status == NPURT_OK) {
    for (uint32_t lane = 0; lane < bank->lane_count; ++lane) wipe(bank, lane);
    --bank->calbin->children;
    calsim_remove_object(d, bank->handle);
    if (d->bank == bank) d->bank = NULL;
    calsim_trace(d, "kv close");
  }
  calsim_unlock(d);
  if (status == NPURT_OK) calsim_bank_free(bank);
  return status;
}

npurt_status npurt_kv_lane(npurt_kvbank *handle, uint32_t lane, npurt_kv_lane_info *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_kv_lane_info);
  if (status != NPURT_OK) return status;
  calsim_device *d;
  calsim_bank *bank = calsim_lock_object(handle, CALSIM_BANK, &d);
  if (bank == NULL) return NPURT_E_BAD_HANDLE;
  if (lane >= bank->lane_count) {
    status = calsim_error(NPURT_E_NOT_FOUND, "lane %u of %u", lane, bank->lane_count);
  } else {
    const calsim_lane *l = &bank->lanes[lane];
    npurt_kv_lane_info info = {.lane = lane,
                               .bound = l->bound,
                               .committed = l->committed,
                               .reserved = l->reserved,
                               .certainty = l->certainty,
                               .seq_tag = l->seq_tag,
                               .txn = l->txn,
                               .generation = bank->generation};
    calsim_put(out, &info, sizeof info);
  }
  calsim_unlock(d);
  return status;
}
