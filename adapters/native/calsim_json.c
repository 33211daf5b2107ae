/* calsim_json.c - see calsim_json.h. The parser is a loop over an explicit stack of open
 * containers. */
#include "calsim_json.h"
#include <locale.h>
#include <stdlib.h>
#include <string.h>

typedef struct parser {
  calsim_json *json;
  char *text;
  uint32_t at, end;
  uint32_t depth, open[CALSIM_JSON_MAX_DEPTH];
} parser;

static int refuse(parser *p, int status, const char *why) {
  p->json->error_at = p->at;
  p->json->error = why;
  return status;
}

static int add_node(parser *p, uint32_t type, uint32_t start, uint32_t length) {
  calsim_json *j = p->json;
  if (j->count == j->capacity) {
    if (j->count >= j->max_nodes) return refuse(p, CALSIM_JSON_LIMIT, "too many values");
    uint32_t capacity = j->capacity ? j->capacity * 2 : 64;
    if (capacity > j->max_nodes) capacity = j->max_nodes;
    calsim_json_node *nodes = realloc(j->nodes, (size_t)capacity * sizeof *nodes);
    if (!nodes) return refuse(p, CALSIM_JSON_MEMORY, "out of memory");
    j->nodes = nodes;
    j->capacity = capacity;
  }
  j->nodes[j->count] = (calsim_json_node){type, start, length, j->count + 1};
  j->count++;
  return CALSIM_JSON_OK;
}

static void skip_space(parser *p) {
  while (p->at < p->end) {
    char c = p->text[p->at];
    if (c != ' ' && c != '\t' && c != '\n' && c != '\r') return;
    p->at++;
  }
}

static bool take(parser *p, char c) {
  if (p->at >= p->end || p->text[p->at] != c) return false;
  p->at++;
  return true;
}

/* ---- strings -------------------------------------------------------------------------------- */

static bool read_hex4(parser *p, uint32_t *out) {
  uint32_t value = 0;
  if (p->end - p->at < 4) return false;
  for (int i = 0; i < 4; ++i) {
    unsigned char c = (unsigned char)p->text[p->at++];
    uint32_t digit;
    if (c >= '0' && c <= '9')
      digit = c - (uint32_t)'0';
    else if (c >= 'a' && c <= 'f')
      digit = c - (uint32_t)'a' + 10;
    else if (c >= 'A' && c <= 'F')
      digit = c - (uint32_t)'A' + 10;
    else
      return false;
    value = value << 4 | digit;
  }
  *out = value;
  return true;
}

/* An escaped character is never shorter than its UTF-8 form, so decoding in place cannot overtake
 * reading. */
static uint32_t put_utf8(char *out, uint32_t code) {
  if (code < 0x80) {
    out[0] = (char)code;
    return 1;
  }
  uint32_t bytes = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
  static const uint8_t first[5] = {0, 0, 0xC0, 0xE0, 0xF0};
  for (uint32_t i = bytes - 1; i > 0; --i) {
    out[i] = (char)(0x80 | (code & 0x3F));
    code >>= 6;
  }
  out[0] = (char)(first[bytes] | code);
  return bytes;
}

static int read_unicode_escape(parser *p, uint32_t *code) {
  uint32_t low;
  if (!read_hex4(p, code)) return refuse(p, CALSIM_JSON_SYNTAX, "bad \\u escape");
  if (*code == 0) return refuse(p, CALSIM_JSON_SYNTAX, "NUL in a string");
  if (*code >= 0xDC00 && *code <= 0xDFFF) return refuse(p, CALSIM_JSON_SYNTAX, "lone surrogate");
  if (*code < 0xD800 || *code > 0xDBFF) return CALSIM_JSON_OK;
  if (!take(p, '\\') || !take(p, 'u') || !read_hex4(p, &low) || low < 0xDC00 || low > 0xDFFF)
    return refuse(p, CALSIM_JSON_SYNTAX, "lone surrogate");
  *code = 0x10000 + ((*code - 0xD800) << 10) + (low - 0xDC00);
  return CALSIM_JSON_OK;
}

static int read_escape(parser *p, uint32_t *write) {
  static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
  if (p->at >= p->end) return refuse(p, CALSIM_JSON_SYNTAX, "unterminated string");
  char c = p->text[p->at++];
  if (c == 'u') {
    uint32_t code;
    int status = read_unicode_escape(p, &code);
    if (status == CALSIM_JSON_OK) *write += put_utf8(p->text + *write, code);
    return status;
  }
  const char *found = c ? strchr(from, c) : NULL;
  if (!found) return refuse(p, CALSIM_JSON_SYNTAX, "unknown escape");
  p->text[(*write)++] = to[found - from];
  return CALSIM_JSON_OK;
}

/* Length of a well-formed multi-byte sequence at `s` with `left` bytes, 0 if it is not one
 * (overlong, surrogate, cut off). */
static uint32_t utf8_length(const unsigned char *s, uint32_t left) {
  uint32_t bytes = s[0] >= 0xC2 && s[0] <= 0xDF   ? 2
                   : (s[0] & 0xF0) == 0xE0        ? 3
                   : s[0] >= 0xF0 && s[0] <= 0xF4 ? 4
                                                  : 0;
  if (bytes == 0 || bytes > left) return 0;
  for (uint32_t i = 1; i < bytes; ++i)
    if ((s[i] & 0xC0) != 0x80) return 0;
  if ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F)) return 0;
  if ((s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F)) return 0;
  return bytes;
}

static int read_string(parser *p) {
  uint32_t start = ++p->at, write = start;
  while (p->at < p->end) {
    unsigned char c = (unsigned char)p->text[p->at];
    if (c == '"') {
      p->at++;
      return add_node(p, CALSIM_JSON_STRING, start, write - start);
    }
    if (c < 0x20) return refuse(p, CALSIM_JSON_SYNTAX, "control character in a string");
    if (c == '\\') {
      p->at++;
      int status = read_escape(p, &write);
      if (status) return status;
      continue;
    }
    uint32_t bytes =
        c < 0x80 ? 1 : utf8_length((const unsigned char *)p->text + p->at, p->end - p->at);
    if (bytes == 0) return refuse(p, CALSIM_JSON_SYNTAX, "invalid UTF-8");
    for (uint32_t i = 0; i < bytes; ++i) p->text[write++] = p->text[p->at++];
  }
  return refuse(p, CALSIM_JSON_SYNTAX, "unterminated string");
}

/* ---- numbers and words ---------------------------------------------------------------------- */

static uint32_t skip_digits(parser *p) {
  uint32_t start = p->at;
  while (p->at < p->end && p->text[p->at] >= '0' && p->text[p->at] <= '9') p->at++;
  return p->at - start;
}

static int read_number(parser *p) {
  uint32_t start = p->at;
  (void)take(p, '-');
  if (!take(p, '0') && skip_digits(p) == 0)
    return refuse(p, CALSIM_JSON_SYNTAX, "expected a value");
  if (take(p, '.') && skip_digits(p) == 0)
    return refuse(p, CALSIM_JSON_SYNTAX, "digits missing behind the point");
  if (take(p, 'e') || take(p, 'E')) {
    if (!take(p, '+')) (void)take(p, '-');
    if (skip_digits(p) == 0) return refuse(p, CALSIM_JSON_SYNTAX, "digits missing in the exponent");
  }
  if (p->at - start > 64) return refuse(p, CALSIM_JSON_LIMIT, "number longer than 64 characters");
  return add_node(p, CALSIM_JSON_NUMBER, start, p->at - start);
}

static int read_word(parser *p, const char *word, uint32_t type) {
  uint32_t length = (uint32_t)strlen(word);
  if (p->end - p->at < length || memcmp(p->text + p->at, word, length) != 0)
    return refuse(p, CALSIM_JSON_SYNTAX, "expected a value");
  p->at += length;
  return add_node(p, type, p->at - length, length);
}

/* ---- structure ------------------------------------------------------------------------------ */

static int read_key(parser *p) {
  skip_space(p);
  if (p->at >= p->end || p->text[p->at] != '"')
    return refuse(p, CALSIM_JSON_SYNTAX, "expected a key");
  int status = read_string(p);
  if (status) return status;
  skip_space(p);
  return take(p, ':') ? CALSIM_JSON_OK : refuse(p, CALSIM_JSON_SYNTAX, "expected ':'");
}

/* Open a container; `*complete` says that it was closed at once. */
static int open_container(parser *p, bool *complete) {
  bool object = p->text[p->at] == '{';
  if (p->depth == CALSIM_JSON_MAX_DEPTH) return refuse(p, CALSIM_JSON_LIMIT, "nested too deeply");
  uint32_t node = p->json->count;
  int status = add_node(p, object ? CALSIM_JSON_OBJECT : CALSIM_JSON_ARRAY, p->at, 0);
  if (status) return status;
  p->at++;
  skip_space(p);
  *complete = take(p, object ? '}' : ']');
  if (*complete) return CALSIM_JSON_OK;
  p->json->nodes[node].length = 1;
  p->open[p->depth++] = node;
  return object ? read_key(p) : CALSIM_JSON_OK;
}

/* Read one scalar or the opening of a container up to its first value. */
static int read_value(parser *p, bool *complete) {
  skip_space(p);
  *complete = true;
  switch (p->at < p->end ? p->text[p->at] : '\0') {
    case '{':
    case '[': return open_container(p, complete);
    case '"': return read_string(p);
    case 't': return read_word(p, "true", CALSIM_JSON_TRUE);
    case 'f': return read_word(p, "false", CALSIM_JSON_FALSE);
    case 'n': return read_word(p, "null", CALSIM_JSON_NULL);
    default: return read_number(p);
  }
}

/* Behind a complete value: go on to the next element of the innermost container, or close it. */
static int read_separator(parser *p, bool *complete) {
  calsim_json_node *node = &p->json->nodes[p->open[p->depth - 1]];
  bool object = node->type == CALSIM_JSON_OBJECT;
  skip_space(p);
  if (take(p, ',')) {
    node->length++;
    *complete = false;
    return object ? read_key(p) : CALSIM_JSON_OK;
  }
  if (!take(p, object ? '}' : ']'))
    return refuse(p, CALSIM_JSON_SYNTAX, object ? "expected ',' or '}'" : "expected ',' or ']'");
  node->next = p->json->count;
  p->depth--;
  return CALSIM_JSON_OK;
}

int calsim_json_parse(calsim_json *json, char *text, uint32_t length, uint32_t max_nodes) {
  *json = (calsim_json){.text = text, .max_nodes = max_nodes};
  parser p = {.json = json, .text = text, .end = length};
  bool complete = false;
  do {
    int status = complete ? read_separator(&p, &complete) : read_value(&p, &complete);
    if (status) return status;
  } while (!complete || p.depth > 0);
  skip_space(&p);
  return p.at == p.end ? CALSIM_JSON_OK
                       : refuse(&p, CALSIM_JSON_SYNTAX, "text behind the end of the document");
}

void calsim_json_free(calsim_json *json) {
  free(json->nodes);
  json->nodes = NULL;
  json->count = json->capacity = 0;
}

/* ---- reading the nodes ---------------------------------------------------------------------- */

bool calsim_json_is(const calsim_json *json, uint32_t node, uint32_t type) {
  return node < json->count && json->nodes[node].type == type;
}

bool calsim_json_equals(const calsim_json *json, uint32_t node, const char *string) {
  const calsim_json_node *n = &json->nodes[node];
  return n->type == CALSIM_JSON_STRING && n->length == strlen(string) &&
         memcmp(json->text + n->start, string, n->length) == 0;
}

int calsim_json_member(const calsim_json *json, uint32_t object, const char *key, uint32_t *value) {
  int found = CALSIM_JSON_ABSENT;
  if (!calsim_json_is(json, object, CALSIM_JSON_OBJECT)) return found;
  for (uint32_t at = object + 1; at < json->nodes[object].next; at = json->nodes[at + 1].next) {
    if (!calsim_json_equals(json, at, key)) continue;
    if (found) return CALSIM_JSON_DUPLICATE;
    *value = at + 1;
    found = CALSIM_JSON_FOUND;
  }
  return found;
}

bool calsim_json_u64(const calsim_json *json, uint32_t node, uint64_t *out) {
  const calsim_json_node *n = &json->nodes[node];
  uint64_t value = 0;
  if (n->type != CALSIM_JSON_NUMBER) return false;
  for (uint32_t i = 0; i < n->length; ++i) {
    char c = json->text[n->start + i];
    if (c < '0' || c > '9') return false;
    uint64_t digit = (uint64_t)(c - '0');
    value = value > (UINT64_MAX - digit) / 10 ? UINT64_MAX : value * 10 + digit;
  }
  *out = value;
  return true;
}

bool calsim_json_double(const calsim_json *json, uint32_t node, double *out) {
  const calsim_json_node *n = &json->nodes[node];
  char copy[72];
  if (n->type != CALSIM_JSON_NUMBER || n->length >= sizeof copy) return false;
  memcpy(copy, json->text + n->start, n->length);
  copy[n->length] = '\0';
  locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  if (!plain) return false;
  *out = strtod_l(copy, NULL, plain);
  freelocale(plain);
  return true;
}
