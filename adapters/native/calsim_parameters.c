/* calsim_parameters.c - checks the safetensors header against the manifest's shape and converts the
 * bf16 tensors to float32. */
#include "calsim_artifact.h"
#include "calsim_json.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_HEADER_BYTES = 16 << 20, MAX_HEADER_NODES = 2 << 20, ALIGN_FLOATS = 16 };
static const uint64_t MAX_PARAMETERS = 1ull << 31;
static const char FILE_NAME[] = "model.safetensors";

/* One entry of the header, sorted by name. */
typedef struct entry {
  const char *name;
  uint32_t length, value;
} entry;

typedef struct loader {
  calsim_json json;
  entry *entries;
  uint32_t entry_count;
  const char *data;
  uint64_t data_bytes;
  float *cursor;       /* next free float of the arena */
  bool counting;       /* first pass: only add up what the shape asks for */
  uint64_t parameters; /* floats asked for */
  uint32_t tensors;
  npurt_status status;
  char *error;
} loader;

#define REFUSE(l, code, ...) \
  ((l)->status ? (void)0 : (void)((l)->status = calsim_fail((l)->error, (code), __VA_ARGS__)))

static int compare(const void *left, const void *right) {
  const entry *a = left, *b = right;
  int order = memcmp(a->name, b->name, a->length < b->length ? a->length : b->length);
  return order ? order : (a->length > b->length) - (a->length < b->length);
}

/* List the tensors of the parsed header by name. */
static void index_header(loader *l) {
  const calsim_json *j = &l->json;
  if (!calsim_json_is(j, 0, CALSIM_JSON_OBJECT)) {
    REFUSE(l, NPURT_E_CALBIN_FORMAT, "%s: the header is not an object", FILE_NAME);
    return;
  }
  l->entries = malloc(((size_t)j->nodes[0].length + 1) * sizeof *l->entries);
  if (!l->entries) {
    REFUSE(l, NPURT_E_HOST_MEMORY, "no host memory for the header of %s", FILE_NAME);
    return;
  }
  for (uint32_t key = 1; key < j->count; key = j->nodes[key + 1].next)
    if (!calsim_json_equals(j, key, "__metadata__"))
      l->entries[l->entry_count++] =
          (entry){j->text + j->nodes[key].start, j->nodes[key].length, key + 1};
  qsort(l->entries, l->entry_count, sizeof *l->entries, compare);
  for (uint32_t i = 1; i < l->entry_count; ++i)
    if (compare(&l->entries[i - 1], &l->entries[i]) == 0)
      REFUSE(l, NPURT_E_CALBIN_FORMAT, "%s: tensor %.*s appears twice", FILE_NAME,
             (int)l->entries[i].length, l->entries[i].name);
}

static bool has_shape(const calsim_json *j, uint32_t node, uint32_t rows, uint32_t columns) {
  const uint64_t want[2] = {rows, columns};
  uint32_t rank = rows ? 2 : 1;
  if (!calsim_json_is(j, node, CALSIM_JSON_ARRAY) || j->nodes[node].length != rank) return false;
  for (uint32_t i = 0, at = node + 1; i < rank; ++i, at = j->nodes[at].next) {
    uint64_t got = 0;
    if (!calsim_json_u64(j, at, &got) || got != want[rank == 2 ? i : 1]) return false;
  }
  return true;
}

/* The bytes of a tensor inside the data region, or NULL with a reason. */
static const char *locate(loader *l, uint32_t value, const char *name, uint32_t rows,
                          uint32_t columns) {
  const calsim_json *j = &l->json;
  uint32_t dtype = 0, shape = 0, offsets = 0;
  uint64_t begin = 0, end = 0, bytes = 2ull * (rows ? rows : 1) * columns;
  if (calsim_json_member(j, value, "dtype", &dtype) != CALSIM_JSON_FOUND ||
      !calsim_json_equals(j, dtype, "BF16"))
    REFUSE(l, NPURT_E_CALBIN_FORMAT, "%s: tensor %s: expected dtype BF16", FILE_NAME, name);
  else if (calsim_json_member(j, value, "shape", &shape) != CALSIM_JSON_FOUND ||
           !has_shape(j, shape, rows, columns)) {
    if (rows)
      REFUSE(l, NPURT_E_CALBIN_FORMAT, "%s: tensor %s: expected shape [%u, %u]", FILE_NAME, name,
             rows, columns);
    REFUSE(l, NPURT_E_CALBIN_FORMAT, "%s: tensor %s: expected shape [%u]", FILE_NAME, name,
           columns);
  } else if (calsim_json_member(j, value, "data_offsets", &offsets) != CALSIM_JSON_FOUND ||
             !calsim_json_is(j, offsets, CALSIM_JSON_ARRAY) || j->nodes[offsets].length != 2 ||
             !calsim_json_u64(j, offsets + 1, &begin) || !calsim_json_u64(j, offsets + 2, &end) ||
             begin > end || end > l->data_bytes || end - begin != bytes)
    REFUSE(l, NPURT_E_CALBIN_FORMAT,
           "%s: tensor %s: data_offsets are not %llu bytes inside the file", FILE_NAME, name,
           (unsigned long long)bytes);
  return l->status ? NULL : l->data + begin;
}

static void convert(float *to, const char *bf16, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    uint16_t half;
    memcpy(&half, bf16 + 2 * i, sizeof half);
    uint32_t bits = (uint32_t)half << 16;
    memcpy(to + i, &bits, sizeof bits);
  }
}

/* Take the tensor of this name, [rows][columns] or [columns] when rows is 0; returns where its
 * floats are. */
__attribute__((format(printf, 4, 5))) static const float *take(loader *l, uint32_t rows,
                                                               uint32_t columns, const char *format,
                                                               ...) {
  uint64_t count = (uint64_t)(rows ? rows : 1) * columns;
  char name[128];
  if (l->status) return NULL;
  l->parameters += count;
  l->tensors++;
  if (l->counting) return NULL;
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(name, sizeof name, format, arguments);
  va_end(arguments);
  entry wanted = {name, (uint32_t)length, 0};
  const entry *found = bsearch(&wanted, l->entries, l->entry_count, sizeof *l->entries, compare);
  if (!found) {
    REFUSE(l, NPURT_E_CALBIN_FORMAT, "%s: tensor %s is missing", FILE_NAME, name);
    return NULL;
  }
  const char *bytes = locate(l, found->value, name, rows, columns);
  if (!bytes) return NULL;
  float *to = l->cursor;
  convert(to, bytes, count);
  l->cursor += count;
  return to;
}

/* Start the next group on a 64-byte boundary. */
static void align(loader *l) {
  while (!l->counting && (uintptr_t)l->cursor % (ALIGN_FLOATS * sizeof(float))) l->cursor++;
}

static const float *take_group(loader *l, uint32_t rows, uint32_t columns, uint32_t layer,
                               const char *name) {
  align(l);
  return take(l, rows, columns, "model.layers.%u.%s.weight", layer, name);
}

static const float *take_experts(loader *l, uint32_t count, uint32_t rows, uint32_t columns,
                                 uint32_t layer, const char *name) {
  const float *first = NULL;
  align(l);
  for (uint32_t e = 0; e < count; ++e) {
    const float *at =
        take(l, rows, columns, "model.layers.%u.mlp.experts.%u.%s.weight", layer, e, name);
    if (e == 0) first = at;
  }
  return first;
}

static void take_layer(loader *l, const calsim_shape *s, uint32_t n, calsim_layer *to) {
  uint32_t q_width = s->heads * s->head_dim, kv_width = s->kv_heads * s->head_dim;
  to->input_norm = take_group(l, 0, s->hidden, n, "input_layernorm");
  to->q = take_group(l, q_width, s->hidden, n, "self_attn.q_proj");
  to->k = take_group(l, kv_width, s->hidden, n, "self_attn.k_proj");
  to->v = take_group(l, kv_width, s->hidden, n, "self_attn.v_proj");
  to->q_norm = take_group(l, 0, s->head_dim, n, "self_attn.q_norm");
  to->k_norm = take_group(l, 0, s->head_dim, n, "self_attn.k_norm");
  to->o = take_group(l, s->hidden, q_width, n, "self_attn.o_proj");
  to->post_norm = take_group(l, 0, s->hidden, n, "post_attention_layernorm");
  if (s->experts) {
    uint32_t width = s->moe_intermediate;
    to->router = take_group(l, s->experts, s->hidden, n, "mlp.gate");
    to->gate = take_experts(l, s->experts, width, s->hidden, n, "gate_proj");
    to->up = take_experts(l, s->experts, width, s->hidden, n, "up_proj");
    to->down = take_experts(l, s->experts, s->hidden, width, n, "down_proj");
  } else {
    to->router = NULL;
    to->gate = take_group(l, s->intermediate, s->hidden, n, "mlp.gate_proj");
    to->up = take_group(l, s->intermediate, s->hidden, n, "mlp.up_proj");
    to->down = take_group(l, s->hidden, s->intermediate, n, "mlp.down_proj");
  }
}

static void take_all(loader *l, calsim_artifact *a) {
  const calsim_shape *s = &a->manifest.shape;
  l->parameters = 0;
  l->tensors = 0;
  align(l);
  a->embed = take(l, s->vocab, s->hidden, "model.embed_tokens.weight");
  align(l);
  a->final_norm = take(l, 0, s->hidden, "model.norm.weight");
  for (uint32_t n = 0; n < s->layers; ++n) take_layer(l, s, n, &a->layers[n]);
  a->head = a->embed;
  if (s->tied_head) return;
  align(l);
  a->head = take(l, s->vocab, s->hidden, "lm_head.weight");
}

/* Everything that can be known before a parameter is touched: sizes agree, so memory is bounded by
 * the file. */
static void check_totals(loader *l, calsim_artifact *a) {
  l->counting = true;
  take_all(l, a);
  l->counting = false;
  if (l->parameters > MAX_PARAMETERS)
    REFUSE(l, NPURT_E_CALBIN_TOO_LARGE, "the shape has %llu parameters, at most %llu are supported",
           (unsigned long long)l->parameters, (unsigned long long)MAX_PARAMETERS);
}

/* A count that differs although every wanted tensor was found means tensors that the shape does not
 * have. */
static void check_rest(loader *l) {
  if (l->tensors != l->entry_count)
    REFUSE(l, NPURT_E_CALBIN_FORMAT, "%s: %u tensors, the shape in manifest.json has %u", FILE_NAME,
           l->entry_count, l->tensors);
  if (2 * l->parameters != l->data_bytes)
    REFUSE(l, NPURT_E_CALBIN_FORMAT, "%s: %llu bytes of data, its tensors have %llu", FILE_NAME,
           (unsigned long long)l->data_bytes, (unsigned long long)(2 * l->parameters));
}

static void read_header(loader *l, char *bytes, uint64_t length) {
  uint64_t header = 0;
  if (length >= 8)
    for (int i = 7; i >= 0; --i) header = header << 8 | (uint8_t)bytes[i];
  if (length < 8 || header > length - 8) {
    REFUSE(l, NPURT_E_CALBIN_FORMAT, "%s: cut off inside its header", FILE_NAME);
    return;
  }
  if (header > MAX_HEADER_BYTES) {
    REFUSE(l, NPURT_E_CALBIN_TOO_LARGE, "%s: a header of %llu bytes, at most %d are read",
           FILE_NAME, (unsigned long long)header, MAX_HEADER_BYTES);
    return;
  }
  l->data = bytes + 8 + header;
  l->data_bytes = length - 8 - header;
  int parsed = calsim_json_parse(&l->json, bytes + 8, (uint32_t)header, MAX_HEADER_NODES);
  if (parsed)
    REFUSE(l,
           parsed == CALSIM_JSON_MEMORY  ? NPURT_E_HOST_MEMORY
           : parsed == CALSIM_JSON_LIMIT ? NPURT_E_CALBIN_TOO_LARGE
                                         : NPURT_E_CALBIN_FORMAT,
           "%s: header: %s at byte %u", FILE_NAME, l->json.error, l->json.error_at);
}

/* Mimics the reference in float32: 1 / theta^(2i / head_dim), each step rounded. */
static void fill_inv_freq(calsim_artifact *a) {
  const calsim_shape *s = &a->manifest.shape;
  for (uint32_t i = 0; i < s->head_dim / 2; ++i) {
    float exponent = (float)(2 * i) / (float)s->head_dim;
    a->inv_freq[i] = 1.0f / (float)pow((double)(float)s->rope_theta, (double)exponent);
  }
}

static void allocate(loader *l, calsim_artifact *a) {
  if (2 * l->parameters > l->data_bytes) {
    REFUSE(l, NPURT_E_CALBIN_FORMAT,
           "%s: %llu bytes of data, the shape in manifest.json needs %llu", FILE_NAME,
           (unsigned long long)l->data_bytes, (unsigned long long)(2 * l->parameters));
    return;
  }
  uint64_t room =
      l->parameters + (uint64_t)l->tensors * ALIGN_FLOATS; /* no group is without a tensor */
  a->arena = malloc((size_t)room * sizeof *a->arena);
  if (!a->arena)
    REFUSE(l, NPURT_E_HOST_MEMORY, "no host memory for %llu parameters",
           (unsigned long long)l->parameters);
  l->cursor = a->arena;
}

npurt_status calsim_parameters_load(calsim_artifact *a, char *bytes, uint64_t length,
                                    char error[CALSIM_ERROR_BYTES]) {
  const calsim_shape *s = &a->manifest.shape;
  loader l = {.status = NPURT_OK, .error = error};
  a->layers = calloc(s->layers, sizeof *a->layers);
  a->inv_freq = calloc(s->head_dim / 2, sizeof *a->inv_freq);
  if (!a->layers || !a->inv_freq)
    REFUSE(&l, NPURT_E_HOST_MEMORY, "no host memory for the layer table");
  if (!l.status) check_totals(&l, a);
  if (!l.status) read_header(&l, bytes, length);
  if (!l.status) index_header(&l);
  if (!l.status) allocate(&l, a);
  if (!l.status) take_all(&l, a);
  if (!l.status) check_rest(&l);
  if (!l.status) fill_inv_freq(a);
  free(l.entries);
  calsim_json_free(&l.json);
  return l.status;
}
