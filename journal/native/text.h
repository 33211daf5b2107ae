/* text.h - a text of bounded length, how plain values are written to it as JSON, and where objects
 * of the engine's classes have their fields. */
#ifndef LANEWAY_TEXT_H
#define LANEWAY_TEXT_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum {
  TEXT_MAX = 16384,
  DIGITS_MAX = 20, /* of a number of 64 bits, its sign among them */
};

/* A text that grows to its bound. What writes to it gives false where the text would be too long or
 * a value is not of the usual form; also, with Python's error set, where memory ran out. */
typedef struct text {
  size_t length;
  char bytes[TEXT_MAX];
} text;

static inline bool put(text *t, const char *bytes, size_t count) {
  if (count > sizeof t->bytes - t->length) return false;
  memcpy(t->bytes + t->length, bytes, count);
  t->length += count;
  return true;
}

static inline bool put_char(text *t, char c) {
  if (t->length == sizeof t->bytes) return false;
  t->bytes[t->length++] = c;
  return true;
}

static inline bool put_digits(text *t, uint64_t left, bool is_negative) {
  char digits[DIGITS_MAX];
  size_t at = sizeof digits;
  do {
    digits[--at] = (char)('0' + left % 10);
    left /= 10;
  } while (left);
  if (is_negative) digits[--at] = '-';
  return put(t, digits + at, sizeof digits - at);
}

static inline bool put_number(text *t, int64_t number) {
  return number < 0 ? put_digits(t, 0 - (uint64_t)number, true)
                    : put_digits(t, (uint64_t)number, false);
}

/* Take the number of an int that is no bool and no other class's, and fits into 64 bits. */
static inline bool as_number(PyObject *value, int64_t *number) {
  int overflow = 0;
  if (!value || !PyLong_CheckExact(value)) return false;
  *number = PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow == 0;
}

static inline bool put_int(text *t, PyObject *value) {
  int64_t number;
  return as_number(value, &number) && put_number(t, number);
}

/* Return the characters of a str that JSON shows as they are, NULL for any other value. */
static inline const char *plain(PyObject *value, size_t *count) {
  Py_ssize_t length;
  if (!value || !PyUnicode_CheckExact(value)) return NULL;
  const char *bytes = PyUnicode_AsUTF8AndSize(value, &length);
  if (!bytes) {
    if (PyErr_ExceptionMatches(PyExc_UnicodeError)) PyErr_Clear(); /* half of a surrogate pair */
    return NULL;
  }
  for (Py_ssize_t i = 0; i < length; ++i) {
    unsigned char c = (unsigned char)bytes[i];
    if (c < ' ' || c > '~' || c == '"' || c == '\\') return NULL;
  }
  *count = (size_t)length;
  return bytes;
}

static inline bool put_quoted(text *t, const char *bytes, size_t count) {
  return put_char(t, '"') && put(t, bytes, count) && put_char(t, '"');
}

static inline bool put_string(text *t, PyObject *value) {
  size_t count;
  const char *bytes = plain(value, &count);
  return bytes && put_quoted(t, bytes, count);
}

/* ---- what is known of Python ----------------------------------------------------------------- */

enum { FIELDS_MAX = 10 };

/* A class, and where its objects have the fields that are named, in the order of the names. */
typedef struct layout {
  PyTypeObject *type;
  Py_ssize_t offsets[FIELDS_MAX];
} layout;

/* The inputs that are written here. */
enum { COMPLETED, SUBMIT_ACCEPTED, BUFFER_RESTORED, KINDS };

/* Which field is which, in the order of the journal; text.c has their names. */
enum { KV_EFFECT = 5, ENGINE_SLOT, ROWS, TIMES };
enum { TOKEN, KV_DIGEST = 4, ROW_DEFAULTS = 5 };
enum { INSTANTS = 9 };
enum { MACHINE, ENTITIES, TRIGGER, SOURCE, DEST, EPOCH, GENERATION, DATA };

typedef struct known {
  layout kinds[KINDS], row, times, event;
  PyObject *kind_names;
  PyObject *row_defaults; /* of the fields behind the token */
  PyObject *no_data;      /* what an event without data has */
  bool hashes;
} known;

static inline known *known_of(PyObject *module) { return PyModule_GetState(module); }

static inline bool is_of(const layout *of, PyObject *object) {
  return object && Py_IS_TYPE(object, of->type);
}

/* Return a field of an object of the layout's class, borrowed; NULL if it was never set. */
static inline PyObject *field(const layout *of, PyObject *object, int which) {
  return *(PyObject **)(void *)((char *)object + of->offsets[which]);
}

/* Return None, or NULL if memory ran out on the way. */
static inline PyObject *not_usual(void) { return PyErr_Occurred() ? NULL : Py_NewRef(Py_None); }

static inline PyObject *miscalled(const char *name, int wanted, Py_ssize_t given) {
  return PyErr_Format(PyExc_TypeError, "%s takes %d values, not %zd", name, wanted, given);
}

/* Bytes that somebody else keeps. */
typedef struct span {
  const char *bytes;
  Py_ssize_t count;
} span;

enum { DIGEST_BYTES = 32 };

/* Has the processor what hash_pieces needs? To ask is slow in a virtual machine. */
bool can_hash(void);

/* Give the SHA-256 of pieces one after the other (text_sha256.c). */
void hash_pieces(const span *pieces, size_t count, uint8_t digest[DIGEST_BYTES]);

/* Write the events of a step (text_events.c). `codes`: by machine, trigger, source, dest. */
bool put_events(text *t, const known *k, PyObject *codes, PyObject *events);

#endif
