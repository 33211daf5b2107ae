/* calsim_calbin.c - calbins on the board: host-side checks, description, configure, release. */
#include "calsim_internal.h"
#include <stdlib.h>
#include <string.h>

static npurt_status check_version(const char *what, const char *needs, const char *has) {
  if (!calsim_version_valid(needs))
    return calsim_error(NPURT_E_CALBIN_FORMAT, "needs.%s '%s' is not a dotted number", what, needs);
  if (calsim_version_compare(needs, has) <= 0) return NPURT_OK;
  return calsim_error(NPURT_E_CALBIN_INCOMPATIBLE,
                      "the calbin needs %s %s or later; the board has %s", what, needs, has);
}

static npurt_status check_versions(const calsim_manifest *m, const calsim_config *config) {
  npurt_status status = check_version("runtime", m->needs_runtime, config->runtime_version);
  if (status == NPURT_OK) status = check_version("driver", m->needs_driver, config->driver_version);
  if (status == NPURT_OK)
    status = check_version("firmware", m->needs_firmware, config->firmware_version);
  return status;
}

static npurt_status check_shape(const calsim_manifest *m, const calsim_config *config,
                                uint32_t board_mask) {
  const npurt_status bad = NPURT_E_CALBIN_INCOMPATIBLE;
  if (m->chip_mask == 0 || (m->chip_mask & ~board_mask) != 0)
    return calsim_error(bad, "chip mask 0x%x is not within the opened 0x%x", m->chip_mask,
                        board_mask);
  if ((uint32_t)__builtin_popcount(m->chip_mask) != m->chip_count)
    return calsim_error(bad, "chip mask 0x%x does not have %u chips", m->chip_mask, m->chip_count);
  if (config->profile >= CALSIM_PROFILE_TP2_REF && m->layout != 2)
    return calsim_error(bad, "a tp2 profile runs layout tp2 only");
  calsim_limits limits = calsim_profile_limits(config->profile);
  if (limits.lanes != 0 && (m->lanes > limits.lanes || m->context > limits.context))
    return calsim_error(bad, "%u lanes of %u tokens; the profile has at most %u of %u", m->lanes,
                        m->context, limits.lanes, limits.context);
  if (m->lanes == 0 || m->lanes > CALSIM_MAX_LANES)
    return calsim_error(bad, "%u lanes; the board has 1 to %d", m->lanes, CALSIM_MAX_LANES);
  for (uint32_t i = 0; i < m->submodel_count; ++i) {
    const calsim_submodel *s = &m->submodels[i];
    if (s->max_batch == 0 || s->max_batch > CALSIM_MAX_ROWS || s->max_tokens == 0 ||
        s->max_tokens > m->context)
      return calsim_error(
          bad, "submodel %s: batch %u (1 to %d) or tokens %u (1 to context) out of range", s->name,
          s->max_batch, CALSIM_MAX_ROWS, s->max_tokens);
    if (limits.batch != 0 && s->max_batch > limits.batch)
      return calsim_error(bad, "submodel %s: batch %u; the profile has at most %u", s->name,
                          s->max_batch, limits.batch);
  }
  return NPURT_OK;
}

static npurt_status check_capacity(const calsim_calbin *c, uint64_t dram_bytes) {
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip) {
    uint64_t parts[] = {c->account.params[chip], c->account.kv[chip], c->account.workspace[chip],
                        c->account.other[chip]};
    uint64_t left = dram_bytes;
    for (uint32_t i = 0; i < 4; ++i) {
      if (parts[i] > left)
        return calsim_error(NPURT_E_CALBIN_TOO_LARGE,
                            "chip %u has %llu bytes; the calbin needs more", chip,
                            (unsigned long long)dram_bytes);
      left -= parts[i];
    }
  }
  if (c->layout.bytes <= (1ull << 40)) return NPURT_OK;
  return calsim_error(NPURT_E_CALBIN_TOO_LARGE, "KV of more than 1 TiB is beyond this simulator");
}

static npurt_status check_against_board(calsim_calbin *c, const calsim_config *config,
                                        uint32_t board_mask) {
  c->m = calsim_artifact_manifest(c->artifact);
  npurt_status status = check_versions(c->m, config);
  if (status == NPURT_OK) status = check_shape(c->m, config, board_mask);
  if (status != NPURT_OK) return status;
  c->account = calsim_job_account(config->profile, c->m);
  c->layout = calsim_layout_of(c->m);
  c->home_chip = (uint32_t)__builtin_ctz(c->m->chip_mask);
  c->state = CALSIM_VALIDATED;
  return check_capacity(c, config->dram_bytes);
}

void calsim_calbin_free(calsim_calbin *c) {
  calsim_workspace_destroy(c->workspace);
  if (c->artifact != NULL) calsim_artifact_close(c->artifact);
  free(c);
}

npurt_status npurt_calbin_create(npurt_device *handle, const npurt_calbin_source *s,
                                 npurt_calbin **out) {
  npurt_status status = CALSIM_CHECK(s, npurt_calbin_source);
  if (status != NPURT_OK) return status;
  if (out == NULL || s->path == NULL)
    return calsim_error(NPURT_E_INVALID_ARG, "calbin_create: out or path is NULL");
  calsim_calbin *c = calloc(1, sizeof *c);
  if (c == NULL) return calsim_error(NPURT_E_HOST_MEMORY, "out of host memory");
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) {
    free(c);
    return NPURT_E_BAD_HANDLE;
  }
  /* Hashing a large file takes seconds; the device goes on meanwhile. Configuration and mask never
   * change. */
  calsim_suspend(d);
  char error[CALSIM_ERROR_BYTES] = "";
  c->device = d;
  status = calsim_artifact_open(s->path, s->expect_sha256, &c->artifact, error);
  if (status != NPURT_OK)
    calsim_error(status, "%s", error);
  else
    status = check_against_board(c, &d->config, d->chip_mask);
  calsim_resume(d);
  if (status == NPURT_OK) status = calsim_add_object(d, CALSIM_CALBIN, c, &c->handle);
  if (status == NPURT_OK) {
    *out = c->handle;
    calsim_trace(d, "calbin create name=%s", c->m->name);
  }
  calsim_unlock(d);
  if (status != NPURT_OK) calsim_calbin_free(c);
  return status;
}

npurt_status npurt_calbin_describe(npurt_calbin *handle, npurt_calbin_info *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_calbin_info);
  if (status != NPURT_OK) return status;
  calsim_device *d;
  calsim_calbin *c = calsim_lock_object(handle, CALSIM_CALBIN, &d);
  if (c == NULL) return NPURT_E_BAD_HANDLE;
  const calsim_manifest *m = c->m;
  npurt_calbin_info info = {.generation = c->state == CALSIM_CONFIGURED ? c->generation : 0,
                            .state = c->state,
                            .layout = m->layout,
                            .chip_count = m->chip_count,
                            .chip_mask = m->chip_mask,
                            .submodel_count = m->submodel_count,
                            .max_lanes = m->lanes,
                            .max_context = m->context,
                            .vocab = m->shape.vocab,
                            .logits_dtype = CALSIM_DTYPE_BF16,
                            .kv_dtype = CALSIM_DTYPE_BF16};
  calsim_copy_text(info.name, sizeof info.name, m->name);
  calsim_copy_text(info.sha256, sizeof info.sha256, m->sha256);
  calsim_copy_text(info.compiler, sizeof info.compiler, m->compiler);
  calsim_copy_text(info.needs_runtime, sizeof info.needs_runtime, m->needs_runtime);
  calsim_copy_text(info.needs_firmware, sizeof info.needs_firmware, m->needs_firmware);
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip) {
    info.param_bytes[chip] = c->account.params[chip];
    info.kv_bytes[chip] = c->account.kv[chip];
    info.workspace_bytes[chip] = c->account.workspace[chip];
    info.other_bytes[chip] = c->account.other[chip];
  }
  calsim_unlock(d);
  calsim_put(out, &info, sizeof info);
  return NPURT_OK;
}

npurt_status npurt_calbin_submodel(npurt_calbin *handle, uint32_t i, npurt_submodel_info *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_submodel_info);
  if (status != NPURT_OK) return status;
  calsim_device *d;
  calsim_calbin *c = calsim_lock_object(handle, CALSIM_CALBIN, &d);
  if (c == NULL) return NPURT_E_BAD_HANDLE;
  if (i >= c->m->submodel_count) {
    status = calsim_error(NPURT_E_NOT_FOUND, "submodel %u of %u", i, c->m->submodel_count);
  } else {
    const calsim_submodel *s = &c->m->submodels[i];
    npurt_submodel_info info = {.h.flags = (s->incremental_prefill ? 1 : 0) |
                                           (c->m->fixed_rows ? CALSIM_FIXED_ROWS : 0),
                                .index = i,
                                .task = s->task,
                                .max_batch = s->max_batch,
                                .max_tokens = s->max_tokens,
                                .max_context = c->m->context,
                                .engine_modes = 7,
                                .lane_rule = c->m->lane_rule,
                                .tensor_count = CALSIM_TENSORS,
                                .csr_count = c->m->lane_rule == CALSIM_RULE_MASK_CSR,
                                .logits_rows = 1};
    calsim_copy_text(info.name, sizeof info.name, s->name);
    calsim_put(out, &info, sizeof info);
  }
  calsim_unlock(d);
  return status;
}

npurt_status npurt_calbin_tensor(npurt_calbin *handle, uint32_t sub, uint32_t i,
                                 npurt_tensor_info *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_tensor_info);
  if (status != NPURT_OK) return status;
  calsim_device *d;
  calsim_calbin *c = calsim_lock_object(handle, CALSIM_CALBIN, &d);
  if (c == NULL) return NPURT_E_BAD_HANDLE;
  if (sub >= c->m->submodel_count || i >= CALSIM_TENSORS) {
    status = calsim_error(NPURT_E_NOT_FOUND, "tensor %u of submodel %u", i, sub);
  } else {
    calsim_tensor t = calsim_tensor_of(c->m, &c->m->submodels[sub], i);
    npurt_tensor_info info = {.index = i,
                              .direction = t.direction,
                              .dtype = t.dtype,
                              .rank = t.rank,
                              .alignment = CALSIM_PAGE,
                              .slice_axes = t.slice_axes,
                              .bytes = calsim_tensor_row_bytes(&t) * t.rows};
    info.dims[0] = t.rows;
    if (t.rank > 1) info.dims[t.rank - 1] = t.columns;
    if (t.rank == 3) info.dims[1] = 1;
    calsim_copy_text(info.name, sizeof info.name, t.name);
    calsim_put(out, &info, sizeof info);
  }
  calsim_unlock(d);
  return status;
}

npurt_status npurt_calbin_csr(npurt_calbin *handle, uint32_t sub, uint32_t i, npurt_csr_info *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_csr_info);
  if (status != NPURT_OK) return status;
  calsim_device *d;
  const calsim_calbin *c = calsim_lock_object(handle, CALSIM_CALBIN, &d);
  if (c == NULL) return NPURT_E_BAD_HANDLE;
  bool masks = c->m->lane_rule == CALSIM_RULE_MASK_CSR && sub < c->m->submodel_count;
  calsim_unlock(d);
  if (!masks || i != CALSIM_ROW_ACTIVE)
    return calsim_error(NPURT_E_NOT_FOUND, "submodel %u has no CSR %u", sub, i);
  npurt_csr_info info = {
      .id = CALSIM_ROW_ACTIVE, .bits = 1, .per_lane = 1, .required = 1, .max = 1, .def = 1};
  calsim_copy_text(info.name, sizeof info.name, "row_active");
  calsim_put(out, &info, sizeof info);
  return NPURT_OK;
}

/* ---- configure, release ---------------------------------------------------------------- */

static npurt_status check_configurable(calsim_device *d, const calsim_calbin *c,
                                       uint32_t chip_mask) {
  if (d->resetting || d->configuring || calsim_is_busy(d) || calsim_in_flight(d) > 0)
    return calsim_error(NPURT_E_OBJECT_IN_FLIGHT,
                        "configure while jobs are in flight, or a reset or a configuration runs");
  npurt_status status = calsim_check_owner(d);
  if (status != NPURT_OK) return status;
  if (c->state == CALSIM_CONFIGURED)
    return calsim_error(NPURT_E_BAD_STATE, "the calbin is configured already");
  if (chip_mask != 0 && chip_mask != c->m->chip_mask)
    return calsim_error(NPURT_E_CALBIN_INCOMPATIBLE, "chip mask 0x%x; the calbin is built for 0x%x",
                        chip_mask, c->m->chip_mask);
  if (d->configured != NULL)
    return calsim_error(NPURT_E_CONFIGURE_FAILED,
                        "another calbin is configured; this board holds one at a time");
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip) {
    const calsim_account *a = &c->account;
    uint64_t need = a->params[chip] + a->kv[chip] + a->workspace[chip] + a->other[chip];
    uint64_t used = calsim_chip_used(d, chip);
    if (need > d->config.dram_bytes - used)
      return calsim_error(NPURT_E_DEVICE_MEMORY, "chip %u: %llu bytes needed, %llu free", chip,
                          (unsigned long long)need,
                          (unsigned long long)(d->config.dram_bytes - used));
  }
  return NPURT_OK;
}

static npurt_status attach(calsim_device *d, calsim_calbin *c) {
  c->workspace = calsim_workspace_create(c->artifact);
  if (c->workspace == NULL)
    return calsim_error(NPURT_E_HOST_MEMORY, "out of host memory for the forward's scratch");
  npurt_status status = calsim_memory_attach(d, c);
  if (status != NPURT_OK) {
    calsim_workspace_destroy(c->workspace);
    c->workspace = NULL;
    return status;
  }
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip) {
    d->chips[chip].params += c->account.params[chip];
    d->chips[chip].kv += c->account.kv[chip];
    d->chips[chip].workspace += c->account.workspace[chip];
    d->chips[chip].dynamic += c->account.other[chip];
  }
  c->state = CALSIM_CONFIGURED;
  c->generation = calsim_next_generation();
  c->configuration = ++d->next_configuration;
  d->configured = c;
  return NPURT_OK;
}

/* Which effect of a reset ends a leak that ends with this level. */
static uint64_t ended_by(uint32_t level) {
  return level == 0                    ? 0
         : level == CALSIM_DYNAMIC_MEM ? NPURT_FX_FREES_DYNAMIC
                                       : NPURT_FX_FREES_ALL;
}

static void leak_by(calsim_device *d, const calsim_rule *rule) {
  calsim_leak_add(d, (calsim_leak){.chip = rule->chip,
                                   .bytes = rule->bytes,
                                   .ended_by = ended_by(rule->release_level),
                                   .until_ns = UINT64_MAX});
}

/* Let the time of a hanging configuration pass, with everybody else kept out. */
static npurt_status hang(calsim_device *d, const calsim_rule *rule, uint64_t timeout_ns) {
  bool late = rule->heeds && rule->for_ns > timeout_ns;
  d->configuring = true;
  bool open = calsim_spend(d, late ? timeout_ns : rule->for_ns);
  d->configuring = false;
  pthread_cond_broadcast(&d->changed);
  if (!open) return calsim_error(NPURT_E_BAD_HANDLE, "the device was closed during the call");
  if (!late) return NPURT_OK;
  return calsim_error(NPURT_E_CONFIGURE_FAILED, "not configured after %llu ns",
                      (unsigned long long)timeout_ns);
}

/* Faults of a configuration that could be. */
static npurt_status pass_configure_fault(calsim_device *d, calsim_calbin *c, uint64_t timeout_ns,
                                         bool *spoilt) {
  const calsim_occasion about = {.calbin = c};
  const calsim_rule *rule = calsim_fault_at(d, CALSIM_AT_CONFIGURE, &about);
  if (rule == NULL) return NPURT_OK;
  if (rule->kind == CALSIM_CONFIGURE_HANG) return hang(d, rule, timeout_ns);
  *spoilt = rule->kind == CALSIM_WARMUP_WRONG;
  if (*spoilt) return NPURT_OK;
  if (rule->kind == CALSIM_CONFIGURE_FAIL)
    return calsim_error(rule->code, "not configured, by fault %s", rule->id);
  leak_by(d, rule);
  return calsim_error(NPURT_E_CONFIGURE_FAILED, "broken off with memory taken, by fault %s",
                      rule->id);
}

npurt_status npurt_calbin_configure(npurt_calbin *handle, const npurt_configure_params *p,
                                    npurt_configure_result *out) {
  npurt_status status = CALSIM_CHECK(p, npurt_configure_params);
  if (status == NPURT_OK) status = CALSIM_CHECK(out, npurt_configure_result);
  if (status != NPURT_OK) return status;
  calsim_device *d;
  calsim_calbin *c = calsim_lock_object(handle, CALSIM_CALBIN, &d);
  if (c == NULL) return NPURT_E_BAD_HANDLE;
  npurt_configure_result result = {.device_epoch = d->epoch};
  uint64_t begin = calsim_now(d);
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip)
    result.mem_before[chip] = calsim_chip_used(d, chip);
  status = check_configurable(d, c, p->chip_mask);
  bool spoilt = false;
  if (status == NPURT_OK) status = pass_configure_fault(d, c, p->timeout_ns, &spoilt);
  if (status == NPURT_OK) status = attach(d, c);
  c->spoilt = spoilt;
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip)
    result.mem_after[chip] = calsim_chip_used(d, chip);
  result.duration_ns = calsim_now(d) - begin;
  result.generation = status == NPURT_OK ? c->generation : 0;
  if (status == NPURT_OK)
    calsim_event(d, NPURT_EV_MEMORY, 0, c->home_chip, NPURT_OK,
                 "configured %s as configuration %llu", c->m->name,
                 (unsigned long long)c->configuration);
  else
    calsim_trace(d, "configure refused code=0x%04x", (unsigned)status);
  calsim_unlock(d);
  calsim_put(out, &result, sizeof result);
  return status;
}

void calsim_calbin_drop(calsim_device *d, calsim_calbin *c, uint32_t state, bool keep_dynamic) {
  calsim_memory_detach(d, c);
  calsim_workspace_destroy(c->workspace);
  c->workspace = NULL;
  c->state = state;
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip) {
    d->chips[chip].params -= c->account.params[chip];
    d->chips[chip].kv -= c->account.kv[chip];
    d->chips[chip].workspace -= c->account.workspace[chip];
    if (!keep_dynamic) d->chips[chip].dynamic -= c->account.other[chip];
  }
  if (d->bank != NULL) calsim_bank_all_unknown(d->bank);
  d->bank = NULL;
  d->configured = NULL;
}

/* Memory that a release leaves, by fault. */
static void pass_release_fault(calsim_device *d, const calsim_calbin *c) {
  const calsim_occasion about = {.calbin = c};
  const calsim_rule *rule = calsim_fault_at(d, CALSIM_AT_RELEASE, &about);
  if (rule != NULL && rule->kind != CALSIM_RELEASE_SLOW) leak_by(d, rule);
  if (rule == NULL || rule->kind != CALSIM_RELEASE_SLOW) return;
  uint64_t now = calsim_now(d);
  for (uint32_t chip = 0; chip < CALSIM_CHIPS; ++chip) {
    const calsim_account *a = &c->account;
    calsim_leak_add(
        d, (calsim_leak){.chip = chip,
                         .bytes = a->params[chip] + a->kv[chip] + a->workspace[chip] +
                                  a->other[chip],
                         .until_ns =
                             rule->for_ns > UINT64_MAX - now ? UINT64_MAX : now + rule->for_ns});
  }
}

npurt_status npurt_calbin_release(npurt_calbin *handle) {
  calsim_device *d;
  calsim_calbin *c = calsim_lock_object(handle, CALSIM_CALBIN, &d);
  if (c == NULL) return NPURT_E_BAD_HANDLE;
  npurt_status status = NPURT_OK;
  if (d->resetting || d->configuring) {
    status = calsim_error(NPURT_E_BAD_STATE, "a reset or a configuration is running");
  } else if (c->children > 0) {
    status = calsim_error(NPURT_E_OBJECT_IN_FLIGHT, "%u buffers or banks of the calbin exist",
                          c->children);
  } else {
    if (c->state == CALSIM_CONFIGURED) {
      calsim_calbin_drop(d, c, CALSIM_RELEASED, false);
      pass_release_fault(d, c);
      calsim_event(d, NPURT_EV_MEMORY, 0, c->home_chip, NPURT_OK, "released %s", c->m->name);
    }
    calsim_remove_object(d, c->handle);
  }
  calsim_unlock(d);
  if (status == NPURT_OK) calsim_calbin_free(c);
  return status;
}
