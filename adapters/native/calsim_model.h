/* calsim_model.h - the seam between the simulator's two halves: the artifact and its forward (calsim_artifact.c,
 * calsim_forward.c) know nothing of boards, jobs or clocks; the board (calsim_board.c) knows nothing of JSON or attention.
 * Nothing here is exported from the library. All functions are re-entrant; no global state. */
#ifndef CALSIM_MODEL_H
#define CALSIM_MODEL_H
#include "npurt.h"
#include <stdbool.h>

enum { CALSIM_MAX_SUBMODELS = 16, CALSIM_MAX_EOS = 8, CALSIM_ERROR_BYTES = 256 };

typedef struct calsim_shape {
  uint32_t layers, hidden, heads, kv_heads, head_dim, intermediate;
  uint32_t experts, experts_per_token, moe_intermediate; /* all 0 for a dense model */
  uint32_t vocab, norm_topk_prob, tied_head;
  double rms_norm_eps, rope_theta;
} calsim_shape;

typedef struct calsim_submodel {
  char name[96];
  uint32_t task; /* 1 PREFILL 2 DECODE, as npurt_submodel_info */
  uint32_t max_batch, max_tokens, incremental_prefill;
} calsim_submodel;

typedef struct calsim_manifest {
  char name[64], compiler[64], sha256[72]; /* sha256: of manifest.json, lower-case hex */
  char needs_runtime[64], needs_driver[64], needs_firmware[64];
  calsim_shape shape;
  uint32_t context, lanes, lane_rule, kv_layout, layout; /* numbered as in npurt.h */
  uint32_t fixed_rows; /* row i of a job is lane i, or i behind a multiple of the batch */
  uint32_t chip_count, chip_mask;
  uint64_t kv_bytes_per_token;
  uint64_t params[NPURT_MAX_CHIPS], kv[NPURT_MAX_CHIPS], workspace[NPURT_MAX_CHIPS], other[NPURT_MAX_CHIPS];
  uint32_t submodel_count;
  calsim_submodel submodels[CALSIM_MAX_SUBMODELS];
} calsim_manifest;

typedef struct calsim_artifact calsim_artifact; /* manifest + parameters in host memory; immutable after open */

/* Read and check a calbin folder: regular files inside the folder (no link out of it), not writable by others, sizes and
 * SHA-256 as the manifest says, every tensor present with its shape and dtype, bounded sizes. `expect_sha256` may be NULL.
 * Returns NPURT_OK or a class 0x05 code (NPURT_E_HOST_MEMORY when out of memory) with a one-line reason in `error`. */
npurt_status calsim_artifact_open(const char *path, const char *expect_sha256, calsim_artifact **out,
                                  char error[CALSIM_ERROR_BYTES]);
void calsim_artifact_close(calsim_artifact *a);
const calsim_manifest *calsim_artifact_manifest(const calsim_artifact *a);

/* KV of one lane: float32 [layers][context][2][kv_heads][head_dim]; [..][0] = k after norm and RoPE, [..][1] = v. */
uint64_t calsim_kv_floats_per_lane(const calsim_manifest *m);

typedef struct calsim_row {
  float *kv;             /* the lane's KV, in device memory */
  const int32_t *tokens; /* token_count ids, each in 0..vocab-1 (checked by the caller) */
  uint32_t token_count;  /* >= 1 */
  uint32_t position;     /* KV length before this job; position + token_count <= context */
  uint16_t *logits_bf16; /* [vocab], logits after the last token, round to nearest even */
  /* test-only capture, each may be NULL */
  float *logits_f32;     /* [token_count][vocab] */
  int32_t *route_idx;    /* [token_count][layers][experts_per_token] */
  float *route_weight;   /* same shape, normalised weights */
} calsim_row;

typedef struct calsim_workspace calsim_workspace; /* scratch for one forward at a time; allocate once per engine thread */
calsim_workspace *calsim_workspace_create(const calsim_artifact *a); /* NULL: out of memory */
void calsim_workspace_destroy(calsim_workspace *w);

/* Advance one row: write KV at position..position+token_count-1 and produce the logits. Rows are independent: a batch is a
 * loop over rows, so that 16 lanes together equal each alone bit for bit; a prefill is a loop over tokens, so that it equals
 * token_count decode steps bit for bit. */
void calsim_forward(const calsim_artifact *a, calsim_workspace *w, const calsim_row *row);

/* 64-bit hash over the KV bytes of positions 0..length-1 of all layers, plus the length: equal content, equal digest. */
uint64_t calsim_kv_digest(const calsim_manifest *m, const float *kv, uint32_t length);

/* SHA-256 of a byte range, lower-case hex with NUL (65 bytes). */
void calsim_sha256_hex(const void *bytes, uint64_t length, char out[65]);
#endif
