/* calsim_json.h - a small strict JSON reader (RFC 8259) for files that may be hostile: bounded
 * depth, bounded node count, no recursion, UTF-8 checked, no NUL inside strings. Strings are
 * decoded in place, so the text is overwritten. */
#ifndef CALSIM_JSON_H
#define CALSIM_JSON_H
#include <stdbool.h>
#include <stdint.h>

enum { CALSIM_JSON_MAX_DEPTH = 16 };
enum {
  CALSIM_JSON_OBJECT = 1,
  CALSIM_JSON_ARRAY,
  CALSIM_JSON_STRING,
  CALSIM_JSON_NUMBER,
  CALSIM_JSON_TRUE,
  CALSIM_JSON_FALSE,
  CALSIM_JSON_NULL
};
enum { CALSIM_JSON_OK = 0, CALSIM_JSON_SYNTAX, CALSIM_JSON_LIMIT, CALSIM_JSON_MEMORY };
enum { CALSIM_JSON_ABSENT = 0, CALSIM_JSON_FOUND, CALSIM_JSON_DUPLICATE };

/* Nodes stand in document order. Children of a container follow it; an object's are key, value,
 * key, value ... */
typedef struct calsim_json_node {
  uint32_t type;
  uint32_t start;  /* scalar: offset of its text */
  uint32_t length; /* scalar: bytes; container: number of elements or members */
  uint32_t next;   /* the node behind this one and everything inside it */
} calsim_json_node;

typedef struct calsim_json {
  char *text; /* borrowed */
  calsim_json_node *nodes;
  uint32_t count, capacity, max_nodes;
  uint32_t error_at; /* byte offset and reason when parsing failed */
  const char *error;
} calsim_json;

/* Parse one document; node 0 is its root. Call calsim_json_free in every case. */
int calsim_json_parse(calsim_json *json, char *text, uint32_t length, uint32_t max_nodes);
void calsim_json_free(calsim_json *json);

bool calsim_json_is(const calsim_json *json, uint32_t node, uint32_t type);
bool calsim_json_equals(const calsim_json *json, uint32_t node, const char *string);
/* Look a key up in an object; ABSENT when `object` is not one. */
int calsim_json_member(const calsim_json *json, uint32_t object, const char *key, uint32_t *value);
/* A plain non-negative integer (no fraction, no exponent); a value over UINT64_MAX reads as
 * UINT64_MAX. */
bool calsim_json_u64(const calsim_json *json, uint32_t node, uint64_t *out);
/* Any number, correctly rounded whatever the process's locale is. */
bool calsim_json_double(const calsim_json *json, uint32_t node, double *out);
#endif
