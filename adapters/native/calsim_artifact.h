/* calsim_artifact.h - private to the artifact half of the simulator: what calsim_artifact.c,
 * calsim_files.c, calsim_manifest.c, calsim_parameters.c and calsim_sha256.c share, and the
 * parameter layout that calsim_forward.c reads. */
#ifndef CALSIM_ARTIFACT_H
#define CALSIM_ARTIFACT_H
#include "calsim_model.h"

enum { CALSIM_MAX_FILES = 64, CALSIM_FILE_NAME_BYTES = 128, CALSIM_SHA256_HEX_BYTES = 65 };

/* ---- parameters: float32, row-major [out][in], each group on a 64-byte boundary ------------- */
typedef struct calsim_layer {
  const float *input_norm, *post_norm; /* [hidden] */
  const float *q, *k, *v;              /* [heads or kv_heads x head_dim][hidden] */
  const float *o;                      /* [hidden][heads x head_dim] */
  const float *q_norm, *k_norm;        /* [head_dim] */
  const float *router;                 /* [experts][hidden]; NULL for a dense model */
  const float *gate, *up, *down;       /* one matrix, or one per expert, one after the other */
} calsim_layer;

struct calsim_artifact {
  calsim_manifest manifest;
  calsim_layer *layers;
  const float *embed, *head, *final_norm; /* head == embed when tied */
  float *inv_freq;                        /* [head_dim / 2] RoPE frequencies */
  float *arena;                           /* owns every parameter above */
};

/* ---- errors --------------------------------------------------------------------------------- */
/* Write one printable ASCII line (names in it may come from a hostile file) and return `status`. */
npurt_status calsim_fail(char error[CALSIM_ERROR_BYTES], npurt_status status, const char *format,
                         ...) __attribute__((format(printf, 3, 4)));

/* ---- SHA-256 -------------------------------------------------------------------------------- */
typedef struct calsim_sha256 {
  uint32_t state[8];
  uint64_t length;
  uint8_t block[64];
} calsim_sha256;
void calsim_sha256_begin(calsim_sha256 *h);
void calsim_sha256_add(calsim_sha256 *h, const void *bytes, uint64_t length);
void calsim_sha256_end(calsim_sha256 *h, char out[CALSIM_SHA256_HEX_BYTES]);

/* ---- files: only regular files directly inside an opened folder ----------------------------- */
typedef struct calsim_file {
  int fd;
  uint64_t bytes;
  const char *name; /* borrowed */
} calsim_file;
npurt_status calsim_folder_open(const char *path, int *folder, char error[CALSIM_ERROR_BYTES]);
void calsim_folder_close(int folder);
npurt_status calsim_file_open(int folder, const char *name, uint64_t max_bytes, calsim_file *file,
                              char error[CALSIM_ERROR_BYTES]);
/* The whole file, NUL added behind the end; the caller frees it. */
npurt_status calsim_file_read(const calsim_file *file, char **bytes,
                              char error[CALSIM_ERROR_BYTES]);
npurt_status calsim_file_hash(const calsim_file *file, char hex[CALSIM_SHA256_HEX_BYTES],
                              char error[CALSIM_ERROR_BYTES]);
void calsim_file_close(calsim_file *file);

/* ---- manifest and parameters ---------------------------------------------------------------- */
typedef struct calsim_listed_file {
  char name[CALSIM_FILE_NAME_BYTES], sha256[CALSIM_SHA256_HEX_BYTES];
  uint64_t bytes;
} calsim_listed_file;

typedef struct calsim_file_list {
  uint32_t count;
  calsim_listed_file files[CALSIM_MAX_FILES];
} calsim_file_list;

/* Parse and check manifest.json; `text` is overwritten. Fills everything but `sha256`. */
npurt_status calsim_manifest_read(char *text, uint64_t length, calsim_manifest *m,
                                  calsim_file_list *files, char error[CALSIM_ERROR_BYTES]);

/* Check the safetensors header against the shape and convert every tensor to float32; `bytes` is
 * overwritten. */
npurt_status calsim_parameters_load(calsim_artifact *a, char *bytes, uint64_t length,
                                    char error[CALSIM_ERROR_BYTES]);
#endif
