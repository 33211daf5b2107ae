/* calsim_manifest.c - parses manifest.json and refuses what the simulator could not run
 * (specs/calbin.md, E20a). Codes: malformed or contradictory is CALBIN_FORMAT, well-formed but not
 * for this simulator CALBIN_INCOMPATIBLE, over a bound CALBIN_TOO_LARGE. */
#include "calsim_artifact.h"
#include "calsim_json.h"
#include <stdio.h>
#include <string.h>

enum { MAX_NODES = 1 << 16, MAX_BYTES_LOG2 = 50 };

/* Carries the first error, so that a list of reads needs no test in between. */
typedef struct reader {
  calsim_json json;
  npurt_status status;
  char *error;
} reader;

#define REFUSE(r, code, ...) \
  ((r)->status               \
       ? (void)0             \
       : (void)((r)->status = calsim_fail((r)->error, (code), "manifest.json: " __VA_ARGS__)))

/* The value at `path` ("shape.layers"; the part behind the last point is the key in `object`). */
static bool find(reader *r, uint32_t object, const char *path, uint32_t *value) {
  const char *point = strrchr(path, '.');
  if (r->status) return false;
  switch (calsim_json_member(&r->json, object, point ? point + 1 : path, value)) {
    case CALSIM_JSON_FOUND: return true;
    case CALSIM_JSON_DUPLICATE: REFUSE(r, NPURT_E_CALBIN_FORMAT, "%s appears twice", path); break;
    default: REFUSE(r, NPURT_E_CALBIN_FORMAT, "%s is missing", path); break;
  }
  return false;
}

static uint32_t take_container(reader *r, uint32_t object, const char *path, uint32_t type) {
  uint32_t node = 0;
  if (!find(r, object, path, &node)) return UINT32_MAX;
  if (calsim_json_is(&r->json, node, type)) return node;
  REFUSE(r, NPURT_E_CALBIN_FORMAT, "%s: expected an %s", path,
         type == CALSIM_JSON_OBJECT ? "object" : "array");
  return UINT32_MAX;
}

static uint64_t number_of(reader *r, uint32_t node, const char *path, uint64_t min, uint64_t max) {
  uint64_t value = 0;
  if (r->status) return min;
  if (!calsim_json_u64(&r->json, node, &value) || value < min)
    REFUSE(r, NPURT_E_CALBIN_FORMAT, "%s: expected an integer of at least %llu", path,
           (unsigned long long)min);
  else if (value > max)
    REFUSE(r, NPURT_E_CALBIN_TOO_LARGE, "%s is %llu, at most %llu is supported", path,
           (unsigned long long)value, (unsigned long long)max);
  return r->status ? min : value;
}

static uint64_t take_u64(reader *r, uint32_t object, const char *path, uint64_t min, uint64_t max) {
  uint32_t node = 0;
  return find(r, object, path, &node) ? number_of(r, node, path, min, max) : min;
}

static uint32_t take_u32(reader *r, uint32_t object, const char *path, uint32_t min, uint32_t max) {
  return (uint32_t)take_u64(r, object, path, min, max);
}

static uint32_t take_bool(reader *r, uint32_t object, const char *path) {
  uint32_t node = 0;
  if (!find(r, object, path, &node)) return 0;
  if (calsim_json_is(&r->json, node, CALSIM_JSON_TRUE)) return 1;
  if (!calsim_json_is(&r->json, node, CALSIM_JSON_FALSE))
    REFUSE(r, NPURT_E_CALBIN_FORMAT, "%s: expected true or false", path);
  return 0;
}

/* The same of a key that may be missing, which says false. */
static uint32_t take_optional_bool(reader *r, uint32_t object, const char *key) {
  uint32_t node = 0;
  if (r->status || calsim_json_member(&r->json, object, key, &node) == CALSIM_JSON_ABSENT) return 0;
  return take_bool(r, object, key);
}

static double take_double(reader *r, uint32_t object, const char *path, double min, double max) {
  uint32_t node = 0;
  double value = min;
  if (!find(r, object, path, &node)) return min;
  if (calsim_json_double(&r->json, node, &value) && value >= min && value <= max) return value;
  REFUSE(r, NPURT_E_CALBIN_FORMAT, "%s: expected a number from %g to %g", path, min, max);
  return min;
}

/* Copy a non-empty string without control characters into `to`. */
static void string_of(reader *r, uint32_t node, const char *path, char *to, uint32_t capacity) {
  to[0] = '\0';
  if (r->status) return;
  const calsim_json_node *n = &r->json.nodes[node];
  if (n->type != CALSIM_JSON_STRING || n->length == 0 || n->length >= capacity) {
    REFUSE(r, NPURT_E_CALBIN_FORMAT, "%s: expected a string of 1 to %u bytes", path, capacity - 1);
    return;
  }
  memcpy(to, r->json.text + n->start, n->length);
  to[n->length] = '\0';
  for (const char *c = to; *c; ++c)
    if ((unsigned char)*c < 0x20 || *c == 0x7F)
      REFUSE(r, NPURT_E_CALBIN_FORMAT, "%s holds a control character", path);
}

static void take_string(reader *r, uint32_t object, const char *path, char *to, uint32_t capacity) {
  uint32_t node = 0;
  to[0] = '\0';
  if (find(r, object, path, &node)) string_of(r, node, path, to, capacity);
}

/* The index of a string in `names`; a name that is not there is INCOMPATIBLE. */
static uint32_t take_choice(reader *r, uint32_t object, const char *path, const char *const *names,
                            uint32_t count) {
  char name[96];
  take_string(r, object, path, name, sizeof name);
  for (uint32_t i = 0; i < count && !r->status; ++i)
    if (strcmp(name, names[i]) == 0) return i;
  REFUSE(r, NPURT_E_CALBIN_INCOMPATIBLE, "%s is \"%s\", which this simulator does not know", path,
         name);
  return 0;
}

#define CHOICE(r, object, path, ...)                                     \
  take_choice((r), (object), (path), (const char *const[]){__VA_ARGS__}, \
              (uint32_t)(sizeof((const char *const[]){__VA_ARGS__}) / sizeof(const char *)))

/* A version is numbers with points between them. */
static void take_version(reader *r, uint32_t object, const char *path, char to[64]) {
  take_string(r, object, path, to, 64);
  bool digit_before = false, good = !r->status;
  for (const char *c = to; *c && good; ++c) {
    bool digit = *c >= '0' && *c <= '9';
    good = digit || (*c == '.' && digit_before);
    digit_before = digit;
  }
  if (!good || !digit_before)
    REFUSE(r, NPURT_E_CALBIN_FORMAT, "%s: expected a version like 0.1, not \"%s\"", path, to);
}

static void read_shape(reader *r, calsim_manifest *m) {
  static const char *const architectures[] = {"qwen3", "qwen3_moe"};
  calsim_shape *s = &m->shape;
  uint32_t moe = take_choice(r, 0, "architecture", architectures, 2);
  uint32_t o = take_container(r, 0, "shape", CALSIM_JSON_OBJECT);
  s->layers = take_u32(r, o, "shape.layers", 1, 256);
  s->hidden = take_u32(r, o, "shape.hidden", 1, 1 << 16);
  s->heads = take_u32(r, o, "shape.heads", 1, 1 << 10);
  s->kv_heads = take_u32(r, o, "shape.kv_heads", 1, 1 << 10);
  s->head_dim = take_u32(r, o, "shape.head_dim", 2, 1 << 10);
  s->intermediate = take_u32(r, o, "shape.intermediate", moe ? 0 : 1, 1 << 20);
  s->experts = take_u32(r, o, "shape.experts", moe, 1 << 10);
  s->experts_per_token = take_u32(r, o, "shape.experts_per_token", moe, 1 << 10);
  s->moe_intermediate = take_u32(r, o, "shape.moe_intermediate", moe, 1 << 20);
  s->norm_topk_prob = take_bool(r, o, "shape.norm_topk_prob");
  s->vocab = take_u32(r, o, "shape.vocab", 1, 1 << 20);
  s->rms_norm_eps = take_double(r, o, "shape.rms_norm_eps", 1e-12, 1.0);
  s->rope_theta = take_double(r, o, "shape.rope_theta", 1.0, 1e12);
  s->tied_head = take_bool(r, o, "shape.tied_head");
  if (s->head_dim % 2)
    REFUSE(r, NPURT_E_CALBIN_INCOMPATIBLE, "shape.head_dim is %u, RoPE needs an even one",
           s->head_dim);
  if (s->heads % s->kv_heads)
    REFUSE(r, NPURT_E_CALBIN_INCOMPATIBLE,
           "shape.heads is %u, expected a multiple of kv_heads = %u", s->heads, s->kv_heads);
  if (s->experts_per_token > s->experts)
    REFUSE(r, NPURT_E_CALBIN_INCOMPATIBLE, "shape.experts_per_token is %u, there are %u experts",
           s->experts_per_token, s->experts);
  if (!moe && (s->experts || s->experts_per_token || s->moe_intermediate))
    REFUSE(r, NPURT_E_CALBIN_FORMAT,
           "shape.experts, experts_per_token and moe_intermediate must be 0 in a qwen3 model");
}

static void read_kv(reader *r, calsim_manifest *m) {
  const calsim_shape *s = &m->shape;
  m->context = take_u32(r, 0, "context", 1, 1 << 20);
  m->lanes = take_u32(r, 0, "lanes", 1, 64);
  m->lane_rule = CHOICE(r, 0, "lane_rule", "undefined", "length_zero", "mask_csr", "scratch_lane");
  m->fixed_rows = take_optional_bool(r, 0, "fixed_rows");
  m->kv_layout = 1 + CHOICE(r, 0, "kv_layout", "only_valid", "all", "auto");
  m->kv_bytes_per_token = 4ull * s->layers * s->kv_heads * s->head_dim;
  uint32_t kv = take_container(r, 0, "kv", CALSIM_JSON_OBJECT);
  uint64_t per_token = take_u64(r, kv, "kv.bytes_per_token", 0, UINT64_MAX);
  uint64_t per_lane = take_u64(r, kv, "kv.bytes_per_lane", 0, UINT64_MAX);
  if (per_token != m->kv_bytes_per_token)
    REFUSE(r, NPURT_E_CALBIN_FORMAT, "kv.bytes_per_token is %llu, the shape gives %llu",
           (unsigned long long)per_token, (unsigned long long)m->kv_bytes_per_token);
  if (per_lane != m->context * m->kv_bytes_per_token)
    REFUSE(r, NPURT_E_CALBIN_FORMAT, "kv.bytes_per_lane is %llu, context x bytes_per_token is %llu",
           (unsigned long long)per_lane, (unsigned long long)(m->context * m->kv_bytes_per_token));
}

/* One array of `bytes`: an entry per chip, in the order of the mask's bits. */
static void read_bytes(reader *r, uint32_t object, const char *path, uint32_t count,
                       uint64_t to[NPURT_MAX_CHIPS]) {
  uint32_t array = take_container(r, object, path, CALSIM_JSON_ARRAY);
  if (r->status) return;
  if (r->json.nodes[array].length != count) {
    REFUSE(r, NPURT_E_CALBIN_FORMAT, "%s: expected one number for each of the %u chips", path,
           count);
    return;
  }
  for (uint32_t i = 0, node = array + 1; i < count; ++i, node = r->json.nodes[node].next)
    to[i] = number_of(r, node, path, 0, 1ull << MAX_BYTES_LOG2);
}

static void read_chips(reader *r, calsim_manifest *m) {
  m->layout = 1 + CHOICE(r, 0, "layout", "single", "tp2", "ep2", "pp2", "tpep");
  uint32_t chips = take_container(r, 0, "chips", CALSIM_JSON_OBJECT);
  m->chip_count = take_u32(r, chips, "chips.count", 1, NPURT_MAX_CHIPS);
  m->chip_mask = take_u32(r, chips, "chips.mask", 1, (1u << NPURT_MAX_CHIPS) - 1);
  if ((uint32_t)__builtin_popcount(m->chip_mask) != m->chip_count)
    REFUSE(r, NPURT_E_CALBIN_FORMAT, "chips.mask %u does not name chips.count = %u chips",
           m->chip_mask, m->chip_count);
  if (m->chip_count != (m->layout == 1 ? 1u : 2u))
    REFUSE(r, NPURT_E_CALBIN_INCOMPATIBLE, "chips.count is %u, layout %s needs %s", m->chip_count,
           m->layout == 1 ? "single" : "tp2, ep2, pp2 or tpep", m->layout == 1 ? "1" : "2");
  uint32_t bytes = take_container(r, 0, "bytes", CALSIM_JSON_OBJECT);
  read_bytes(r, bytes, "bytes.params", m->chip_count, m->params);
  read_bytes(r, bytes, "bytes.kv", m->chip_count, m->kv);
  read_bytes(r, bytes, "bytes.workspace", m->chip_count, m->workspace);
  read_bytes(r, bytes, "bytes.other", m->chip_count, m->other);
}

typedef struct entry_path {
  char text[64];
} entry_path;

/* "list[3].key", for messages and for find. */
static const char *entry(entry_path *to, const char *list, uint32_t index, const char *key) {
  (void)snprintf(to->text, sizeof to->text, "%s[%u].%s", list, index, key);
  return to->text;
}

static void read_submodels(reader *r, calsim_manifest *m) {
  uint32_t array = take_container(r, 0, "submodels", CALSIM_JSON_ARRAY);
  if (r->status) return;
  uint32_t count = r->json.nodes[array].length;
  if (count == 0) REFUSE(r, NPURT_E_CALBIN_FORMAT, "submodels is empty");
  if (count > CALSIM_MAX_SUBMODELS)
    REFUSE(r, NPURT_E_CALBIN_TOO_LARGE, "submodels has %u entries, at most %d are supported", count,
           CALSIM_MAX_SUBMODELS);
  for (uint32_t i = 0, node = array + 1; i < count && !r->status;
       ++i, node = r->json.nodes[node].next) {
    calsim_submodel *s = &m->submodels[i];
    entry_path at = {0};
    take_string(r, node, entry(&at, "submodels", i, "name"), s->name, sizeof s->name);
    s->task = 1 + CHOICE(r, node, entry(&at, "submodels", i, "task"), "prefill", "decode");
    s->max_batch = take_u32(r, node, entry(&at, "submodels", i, "max_batch"), 1, 64);
    s->max_tokens = take_u32(r, node, entry(&at, "submodels", i, "max_tokens"), 1, 1 << 20);
    s->incremental_prefill = take_bool(r, node, entry(&at, "submodels", i, "incremental_prefill"));
    for (uint32_t j = 0; j < i; ++j)
      if (strcmp(s->name, m->submodels[j].name) == 0)
        REFUSE(r, NPURT_E_CALBIN_FORMAT, "submodel %s appears twice", s->name);
    if (s->max_batch > m->lanes)
      REFUSE(r, NPURT_E_CALBIN_INCOMPATIBLE, "submodel %s: max_batch is %u, there are %u lanes",
             s->name, s->max_batch, m->lanes);
    if (s->max_tokens > m->context)
      REFUSE(r, NPURT_E_CALBIN_INCOMPATIBLE, "submodel %s: max_tokens is %u, the context %u",
             s->name, s->max_tokens, m->context);
  }
  m->submodel_count = r->status ? 0 : count;
}

static void read_eos(reader *r, const calsim_manifest *m) {
  uint32_t array = take_container(r, 0, "eos_token_ids", CALSIM_JSON_ARRAY);
  if (r->status) return;
  uint32_t count = r->json.nodes[array].length;
  if (count > CALSIM_MAX_EOS)
    REFUSE(r, NPURT_E_CALBIN_TOO_LARGE, "eos_token_ids has %u entries, at most %d are supported",
           count, CALSIM_MAX_EOS);
  for (uint32_t i = 0, node = array + 1; i < count && !r->status;
       ++i, node = r->json.nodes[node].next)
    if (number_of(r, node, "eos_token_ids", 0, UINT64_MAX) >= m->shape.vocab)
      REFUSE(r, NPURT_E_CALBIN_FORMAT, "eos_token_ids: an id is not below vocab = %u",
             m->shape.vocab);
}

static void read_files(reader *r, calsim_file_list *list) {
  uint32_t object = take_container(r, 0, "files", CALSIM_JSON_OBJECT);
  if (r->status) return;
  uint32_t count = r->json.nodes[object].length;
  if (count > CALSIM_MAX_FILES)
    REFUSE(r, NPURT_E_CALBIN_TOO_LARGE, "files has %u entries, at most %d are supported", count,
           CALSIM_MAX_FILES);
  for (uint32_t i = 0, key = object + 1; i < count && !r->status;
       ++i, key = r->json.nodes[key + 1].next) {
    calsim_listed_file *f = &list->files[i];
    entry_path at = {0};
    string_of(r, key, "files: a name", f->name, sizeof f->name);
    if (strchr(f->name, '/') || !strcmp(f->name, ".") || !strcmp(f->name, "..") ||
        !strcmp(f->name, "manifest.json"))
      REFUSE(r, NPURT_E_CALBIN_FORMAT, "files: \"%s\" is not the plain name of a listed file",
             f->name);
    for (uint32_t j = 0; j < i; ++j)
      if (strcmp(f->name, list->files[j].name) == 0)
        REFUSE(r, NPURT_E_CALBIN_FORMAT, "files: %s appears twice", f->name);
    take_string(r, key + 1, entry(&at, "files", i, "sha256"), f->sha256, sizeof f->sha256);
    if (!r->status && strspn(f->sha256, "0123456789abcdef") != 64)
      REFUSE(r, NPURT_E_CALBIN_FORMAT, "files: sha256 of %s: expected 64 lower-case hex digits",
             f->name);
    f->bytes = take_u64(r, key + 1, entry(&at, "files", i, "bytes"), 0, UINT64_MAX);
    list->count = i + 1;
  }
}

static void read_all(reader *r, calsim_manifest *m, calsim_file_list *files) {
  if (!calsim_json_is(&r->json, 0, CALSIM_JSON_OBJECT))
    REFUSE(r, NPURT_E_CALBIN_FORMAT, "expected an object");
  (void)CHOICE(r, 0, "format", "laneway-calbin");
  uint64_t version = take_u64(r, 0, "format_version", 0, UINT64_MAX);
  if (version != 1)
    REFUSE(r, NPURT_E_CALBIN_INCOMPATIBLE, "format_version is %llu, this simulator reads 1",
           (unsigned long long)version);
  take_string(r, 0, "name", m->name, sizeof m->name);
  take_string(r, 0, "compiler", m->compiler, sizeof m->compiler);
  uint32_t needs = take_container(r, 0, "needs", CALSIM_JSON_OBJECT);
  take_version(r, needs, "needs.runtime", m->needs_runtime);
  take_version(r, needs, "needs.driver", m->needs_driver);
  take_version(r, needs, "needs.firmware", m->needs_firmware);
  read_shape(r, m);
  read_kv(r, m);
  read_chips(r, m);
  read_submodels(r, m);
  read_eos(r, m);
  read_files(r, files);
}

npurt_status calsim_manifest_read(char *text, uint64_t length, calsim_manifest *m,
                                  calsim_file_list *files, char error[CALSIM_ERROR_BYTES]) {
  reader r = {.status = NPURT_OK, .error = error};
  memset(m, 0, sizeof *m);
  memset(files, 0, sizeof *files);
  int parsed = calsim_json_parse(&r.json, text, (uint32_t)length, MAX_NODES);
  if (parsed == CALSIM_JSON_OK)
    read_all(&r, m, files);
  else
    REFUSE(&r,
           parsed == CALSIM_JSON_MEMORY  ? NPURT_E_HOST_MEMORY
           : parsed == CALSIM_JSON_LIMIT ? NPURT_E_CALBIN_TOO_LARGE
                                         : NPURT_E_CALBIN_FORMAT,
           "%s at byte %u", r.json.error, r.json.error_at);
  calsim_json_free(&r.json);
  return r.status;
}
