/* calsim_sim.c - looking inside: oracle, captured logits and routing, KV digests, device memory. */
#include "calsim_internal.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static npurt_status run_oracle(const calsim_artifact *a, const int32_t *tokens, uint32_t n,
                               uint16_t *logits, uint64_t *digest) {
  const calsim_manifest *m = calsim_artifact_manifest(a);
  if (n > m->context)
    return calsim_error(NPURT_E_INVALID_ARG, "oracle: %u tokens; the context has %u", n,
                        m->context);
  for (uint32_t i = 0; i < n; ++i)
    if (tokens[i] < 0 || (uint32_t)tokens[i] >= m->shape.vocab)
      return calsim_error(NPURT_E_INVALID_ARG, "oracle: token %d is not in the vocabulary of %u",
                          tokens[i], m->shape.vocab);
  calsim_workspace *workspace = calsim_workspace_create(a);
  float *kv = calloc(calsim_kv_floats_per_lane(m), sizeof *kv);
  uint16_t *own = calloc(m->shape.vocab, sizeof *own);
  npurt_status status = NPURT_OK;
  if (workspace == NULL || kv == NULL || own == NULL) {
    status = calsim_error(NPURT_E_HOST_MEMORY, "out of host memory");
  } else {
    calsim_row row = {
        .kv = kv, .tokens = tokens, .token_count = n, .logits_bf16 = logits != NULL ? logits : own};
    calsim_forward(a, workspace, &row);
    if (digest != NULL) *digest = calsim_kv_digest(m, kv, n);
  }
  calsim_workspace_destroy(workspace);
  free(kv);
  free(own);
  return status;
}

npurt_status npurt_sim_oracle(const char *calbin_path, const int32_t *tokens, uint32_t n,
                              uint16_t *logits_bf16, uint64_t *kv_digest) {
  if (calbin_path == NULL || tokens == NULL || n == 0)
    return calsim_error(NPURT_E_INVALID_ARG, "oracle: a path and at least one token");
  calsim_artifact *artifact;
  char error[CALSIM_ERROR_BYTES] = "";
  npurt_status status = calsim_artifact_open(calbin_path, NULL, &artifact, error);
  if (status != NPURT_OK) return calsim_error(status, "%s", error);
  status = run_oracle(artifact, tokens, n, logits_bf16, kv_digest);
  calsim_artifact_close(artifact);
  return status;
}

/* ---- captures -------------------------------------------------------------------------- */

/* Index of a row's token within the capture of a job that ran; locks the device when OK. */
static npurt_status find_capture(npurt_device *handle, npurt_ticket t, uint32_t row, uint32_t pos,
                                 calsim_device **d, const calsim_job **job, uint64_t *index) {
  *d = calsim_lock(handle, CALSIM_DEVICE);
  if (*d == NULL) return NPURT_E_BAD_HANDLE;
  npurt_status status = NPURT_OK;
  *job = calsim_job_of(*d, t);
  if (*job == NULL)
    status = NPURT_E_STALE_TICKET;
  else if ((*job)->state < NPURT_JOB_DONE)
    status = calsim_error(NPURT_E_NOT_READY, "the job is not terminal");
  else if ((*job)->capture.logits == NULL || (*job)->kv_effect != CALSIM_KV_APPLIED)
    status = calsim_error(NPURT_E_NOT_FOUND,
                          "nothing captured: needs capture = 1, a real forward and a job that ran");
  else if (row >= (*job)->row_count || !(*job)->rows[row].active || pos >= (*job)->rows[row].tokens)
    status = calsim_error(NPURT_E_INVALID_ARG, "row %u has no token %u in this job", row, pos);
  if (status != NPURT_OK)
    calsim_unlock(*d);
  else
    *index = (*job)->capture.first[row] + pos;
  return status;
}

npurt_status npurt_sim_logits(npurt_device *handle, npurt_ticket t, uint32_t row, uint32_t pos,
                              float *out, uint64_t cap) {
  calsim_device *d;
  const calsim_job *job;
  uint64_t index;
  npurt_status status = find_capture(handle, t, row, pos, &d, &job, &index);
  if (status != NPURT_OK) return status;
  uint32_t vocab = job->calbin->m->shape.vocab;
  if (out == NULL || cap < vocab)
    status = calsim_error(NPURT_E_INVALID_ARG, "logits: room for %u floats is needed", vocab);
  else
    memcpy(out, job->capture.logits + index * vocab, vocab * sizeof *out);
  calsim_unlock(d);
  return status;
}

npurt_status npurt_sim_routing(npurt_device *handle, npurt_ticket t, uint32_t row, uint32_t pos,
                               uint32_t layer, int32_t *idx, float *w, uint32_t cap) {
  calsim_device *d;
  const calsim_job *job;
  uint64_t index;
  npurt_status status = find_capture(handle, t, row, pos, &d, &job, &index);
  if (status != NPURT_OK) return status;
  const calsim_shape *shape = &job->calbin->m->shape;
  uint32_t k = shape->experts_per_token;
  if (k == 0) {
    status = calsim_error(NPURT_E_UNSUPPORTED, "routing: a dense model has none");
  } else if (idx == NULL || w == NULL || cap < k || layer >= shape->layers) {
    status = calsim_error(NPURT_E_INVALID_ARG, "routing: room for %u entries, layer %u of %u", k,
                          layer, shape->layers);
  } else {
    uint64_t first = (index * shape->layers + layer) * k;
    memcpy(idx, job->capture.route_idx + first, k * sizeof *idx);
    memcpy(w, job->capture.route_weight + first, k * sizeof *w);
  }
  calsim_unlock(d);
  return status;
}

/* ---- device memory --------------------------------------------------------------------- */

static npurt_status check_lane(const calsim_bank *bank, uint32_t lane) {
  if (calsim_bank_lost(bank))
    return calsim_error(NPURT_E_CONFIG_LOST, "the bank's configuration is gone");
  if (lane >= bank->lane_count)
    return calsim_error(NPURT_E_NOT_FOUND, "lane %u of %u", lane, bank->lane_count);
  return NPURT_OK;
}

npurt_status npurt_sim_kv_digest(npurt_kvbank *handle, uint32_t lane, uint64_t *out) {
  if (out == NULL) return calsim_error(NPURT_E_INVALID_ARG, "kv_digest: out is NULL");
  calsim_device *d;
  calsim_bank *bank = calsim_lock_object(handle, CALSIM_BANK, &d);
  if (bank == NULL) return NPURT_E_BAD_HANDLE;
  npurt_status status = check_lane(bank, lane);
  if (status == NPURT_OK && calsim_job_on_lane(d, bank, lane, true) != NULL)
    status = calsim_error(NPURT_E_OBJECT_IN_FLIGHT, "lane %u: its job is not terminal", lane);
  if (status == NPURT_OK)
    *out =
        calsim_kv_digest(bank->calbin->m, calsim_lane_kv(bank, lane), bank->lanes[lane].committed);
  calsim_unlock(d);
  return status;
}

npurt_status npurt_sim_kv_address(npurt_kvbank *handle, uint32_t lane, uint32_t *chip,
                                  uint64_t *addr, uint64_t *bytes) {
  if (chip == NULL || addr == NULL || bytes == NULL)
    return calsim_error(NPURT_E_INVALID_ARG, "kv_address: out is NULL");
  calsim_device *d;
  calsim_bank *bank = calsim_lock_object(handle, CALSIM_BANK, &d);
  if (bank == NULL) return NPURT_E_BAD_HANDLE;
  npurt_status status = check_lane(bank, lane);
  if (status == NPURT_OK) {
    const calsim_calbin *c = bank->calbin;
    *chip = c->home_chip;
    *addr = c->layout.kv + c->layout.kv_lane_bytes * lane;
    *bytes = calsim_kv_floats_per_lane(c->m) * sizeof(float);
  }
  calsim_unlock(d);
  return status;
}

/* The whole range or nothing; a caller's bad pointer is an error, as for the board's own copies. */
static npurt_status copy_memory(npurt_device *handle, uint32_t chip, uint64_t addr, void *to,
                                const void *from, uint64_t len) {
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  npurt_status status = NPURT_OK;
  if (chip >= CALSIM_CHIPS || addr > d->chips[chip].bytes || len > d->chips[chip].bytes - addr) {
    status = calsim_error(NPURT_E_INVALID_ARG, "chip %u has no memory at %llu + %llu", chip,
                          (unsigned long long)addr, (unsigned long long)len);
  } else {
    ssize_t done = to != NULL ? pread(d->chips[chip].fd, to, len, (off_t)addr)
                              : pwrite(d->chips[chip].fd, from, len, (off_t)addr);
    if (done < 0 || (uint64_t)done != len)
      status = calsim_error(NPURT_E_INVALID_ARG, "copy of device memory: %s",
                            done < 0 ? strerror(errno) : "cut short");
    if (to == NULL)
      calsim_trace(d, "poke chip=%u addr=%llu len=%llu", chip, (unsigned long long)addr,
                   (unsigned long long)len);
  }
  calsim_unlock(d);
  return status;
}

npurt_status npurt_sim_peek(npurt_device *handle, uint32_t chip, uint64_t addr, void *buf,
                            uint64_t len) {
  if (buf == NULL) return calsim_error(NPURT_E_INVALID_ARG, "peek: buf is NULL");
  return copy_memory(handle, chip, addr, buf, NULL, len);
}

npurt_status npurt_sim_poke(npurt_device *handle, uint32_t chip, uint64_t addr, const void *buf,
                            uint64_t len) {
  if (buf == NULL) return calsim_error(NPURT_E_INVALID_ARG, "poke: buf is NULL");
  return copy_memory(handle, chip, addr, NULL, buf, len);
}
