/* calsim_artifact.c - opens a calbin folder: manifest, hashes, parameters (specs/calbin.md, E20a).
 */
#include "calsim_artifact.h"
#include <stdlib.h>
#include <string.h>

static const char MANIFEST[] = "manifest.json", PARAMETERS[] = "model.safetensors";
static const uint64_t MAX_MANIFEST_BYTES = 1ull << 20, MAX_FILE_BYTES = (1ull << 32) + (1ull << 25);

static npurt_status read_manifest(int folder, const char *expect_sha256, calsim_artifact *a,
                                  calsim_file_list *files, char error[CALSIM_ERROR_BYTES]) {
  calsim_file file;
  char *text = NULL, sha256[CALSIM_SHA256_HEX_BYTES];
  npurt_status status = calsim_file_open(folder, MANIFEST, MAX_MANIFEST_BYTES, &file, error);
  if (!status) status = calsim_file_read(&file, &text, error);
  if (!status) {
    calsim_sha256_hex(text, file.bytes, sha256);
    if (expect_sha256 && strcmp(sha256, expect_sha256) != 0)
      status = calsim_fail(error, NPURT_E_CALBIN_HASH, "%s: SHA-256 is %s, expected %.72s",
                           MANIFEST, sha256, expect_sha256);
  }
  if (!status) status = calsim_manifest_read(text, file.bytes, &a->manifest, files, error);
  if (!status) memcpy(a->manifest.sha256, sha256, sizeof sha256);
  free(text);
  calsim_file_close(&file);
  return status;
}

static npurt_status compare_hash(const calsim_listed_file *listed, const char *sha256,
                                 char error[CALSIM_ERROR_BYTES]) {
  if (strcmp(listed->sha256, sha256) == 0) return NPURT_OK;
  return calsim_fail(error, NPURT_E_CALBIN_HASH, "%s: SHA-256 is %s, %s says %s", listed->name,
                     sha256, MANIFEST, listed->sha256);
}

/* Open a listed file whose size is as listed. */
static npurt_status open_listed(int folder, const calsim_listed_file *listed, calsim_file *file,
                                char error[CALSIM_ERROR_BYTES]) {
  npurt_status status = calsim_file_open(folder, listed->name, MAX_FILE_BYTES, file, error);
  if (status || file->bytes == listed->bytes) return status;
  return calsim_fail(error, NPURT_E_CALBIN_HASH, "%s has %llu bytes, %s says %llu", listed->name,
                     (unsigned long long)file->bytes, MANIFEST, (unsigned long long)listed->bytes);
}

/* Hash the bytes that are then used: the parameters are read once, so nobody can exchange them in
 * between. */
static npurt_status load_parameters(int folder, const calsim_listed_file *listed,
                                    calsim_artifact *a, char error[CALSIM_ERROR_BYTES]) {
  calsim_file file;
  char *bytes = NULL, sha256[CALSIM_SHA256_HEX_BYTES];
  npurt_status status = open_listed(folder, listed, &file, error);
  if (!status) status = calsim_file_read(&file, &bytes, error);
  if (!status) {
    calsim_sha256_hex(bytes, file.bytes, sha256);
    status = compare_hash(listed, sha256, error);
  }
  if (!status) status = calsim_parameters_load(a, bytes, file.bytes, error);
  free(bytes);
  calsim_file_close(&file);
  return status;
}

static npurt_status check_file(int folder, const calsim_listed_file *listed,
                               char error[CALSIM_ERROR_BYTES]) {
  calsim_file file;
  char sha256[CALSIM_SHA256_HEX_BYTES];
  npurt_status status = open_listed(folder, listed, &file, error);
  if (!status) status = calsim_file_hash(&file, sha256, error);
  if (!status) status = compare_hash(listed, sha256, error);
  calsim_file_close(&file);
  return status;
}

static npurt_status load_files(int folder, const calsim_file_list *files, calsim_artifact *a,
                               char error[CALSIM_ERROR_BYTES]) {
  npurt_status status = NPURT_OK;
  for (uint32_t i = 0; i < files->count && !status; ++i) {
    bool parameters = strcmp(files->files[i].name, PARAMETERS) == 0;
    status = parameters ? load_parameters(folder, &files->files[i], a, error)
                        : check_file(folder, &files->files[i], error);
  }
  if (!status && !a->arena)
    status = calsim_fail(error, NPURT_E_CALBIN_FORMAT, "%s: files does not name %s", MANIFEST,
                         PARAMETERS);
  return status;
}

npurt_status calsim_artifact_open(const char *path, const char *expect_sha256,
                                  calsim_artifact **out, char error[CALSIM_ERROR_BYTES]) {
  int folder = -1;
  *out = NULL;
  error[0] = '\0';
  npurt_status status = calsim_folder_open(path, &folder, error);
  if (status) return status;
  calsim_artifact *a = calloc(1, sizeof *a);
  calsim_file_list *files = calloc(1, sizeof *files);
  if (!a || !files)
    status = calsim_fail(error, NPURT_E_HOST_MEMORY, "no host memory for %s", MANIFEST);
  if (!status) status = read_manifest(folder, expect_sha256, a, files, error);
  if (!status) status = load_files(folder, files, a, error);
  if (!status)
    *out = a;
  else
    calsim_artifact_close(a);
  free(files);
  calsim_folder_close(folder);
  return status;
}

void calsim_artifact_close(calsim_artifact *a) {
  if (!a) return;
  free(a->layers);
  free(a->inv_freq);
  free(a->arena);
  free(a);
}

const calsim_manifest *calsim_artifact_manifest(const calsim_artifact *a) { return &a->manifest; }
