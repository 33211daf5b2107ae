/* text_events.c - the text of a step's events, by codes of edges: the rules are those of events.py.
 *
 * Theory of operation. See text.c: what is not of the usual form is refused, whatever it is. */
#include "text.h"

enum {
  KEYS_MAX = 16, /* of one object in the data of an event */
  DEPTH_MAX = 8, /* arrays and objects in it that stand inside each other */
  RUN_MIN = 3,   /* as in ranges.py */
};

/* ---- the data of events ---------------------------------------------------------------------- */

static bool put_value(text *t, PyObject *value, int depth);

typedef struct member {
  const char *key;
  size_t length;
  PyObject *value;
} member;

static bool is_before(const member *a, const member *b) {
  size_t common = a->length < b->length ? a->length : b->length;
  int order = memcmp(a->key, b->key, common);
  return order ? order < 0 : a->length < b->length;
}

/* Write a dict with its keys sorted. */
static bool put_object(text *t, PyObject *dict, int depth) {
  member members[KEYS_MAX], next;
  int count = 0;
  Py_ssize_t position = 0;
  PyObject *key;
  if (PyDict_Size(dict) > KEYS_MAX) return false;
  while (count < KEYS_MAX && PyDict_Next(dict, &position, &key, &next.value)) {
    next.key = plain(key, &next.length);
    if (!next.key) return false;
    int at = count++;
    for (; at > 0 && is_before(&next, &members[at - 1]); --at) members[at] = members[at - 1];
    members[at] = next;
  }
  if (!put_char(t, '{')) return false;
  for (int i = 0; i < count; ++i) {
    if (i && !put_char(t, ',')) return false;
    if (!put_quoted(t, members[i].key, members[i].length) || !put_char(t, ':')) return false;
    if (!put_value(t, members[i].value, depth)) return false;
  }
  return put_char(t, '}');
}

static bool put_array(text *t, PyObject *values, int depth) {
  bool is_tuple = PyTuple_CheckExact(values);
  Py_ssize_t count = is_tuple ? PyTuple_Size(values) : PyList_Size(values);
  if (!put_char(t, '[')) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *value = is_tuple ? PyTuple_GetItem(values, i) : PyList_GetItem(values, i);
    if ((i && !put_char(t, ',')) || !put_value(t, value, depth)) return false;
  }
  return put_char(t, ']');
}

/* Write a value that `depth` arrays and objects stand around. */
static bool put_value(text *t, PyObject *value, int depth) {
  if (PyLong_CheckExact(value)) return put_int(t, value);
  if (PyUnicode_CheckExact(value)) return put_string(t, value);
  if (value == Py_None) return put(t, "null", 4);
  if (value == Py_True) return put(t, "true", 4);
  if (value == Py_False) return put(t, "false", 5);
  if (depth == DEPTH_MAX) return false;
  if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) return put_array(t, value, depth + 1);
  return PyDict_CheckExact(value) && put_object(t, value, depth + 1);
}

/* ---- events ---------------------------------------------------------------------------------- */

/* Return how many numbers from `first` on ascend by one; `last` is the first, then the last. */
static Py_ssize_t run_length(PyObject *entities, Py_ssize_t first, Py_ssize_t count,
                             int64_t *last) {
  Py_ssize_t end = first + 1;
  int64_t next;
  while (end < count && as_number(PyTuple_GetItem(entities, end), &next) && *last < INT64_MAX &&
         next == *last + 1) {
    *last = next;
    ++end;
  }
  return end - first;
}

/* Write several numbers, runs of them as ranges; the rules are those of ranges.py. */
static bool put_ranges(text *t, PyObject *entities, Py_ssize_t count) {
  if (!put_char(t, '[')) return false;
  for (Py_ssize_t at = 0; at < count;) {
    int64_t first, last;
    if (!as_number(PyTuple_GetItem(entities, at), &first) || (at && !put_char(t, ',')))
      return false;
    last = first;
    Py_ssize_t length = run_length(entities, at, count, &last);
    if (length < RUN_MIN) {
      if (!put_number(t, first)) return false;
      ++at;
    } else {
      if (!(put_char(t, '[') && put_number(t, first) && put_char(t, ','))) return false;
      if (!(put_number(t, last) && put_char(t, ']'))) return false;
      at += length;
    }
  }
  return put_char(t, ']');
}

static bool put_entities(text *t, PyObject *entities) {
  if (!entities || !PyTuple_CheckExact(entities)) return false;
  Py_ssize_t count = PyTuple_Size(entities);
  if (count == 1) return put_int(t, PyTuple_GetItem(entities, 0));
  return count > 1 && put_ranges(t, entities, count);
}

/* Return the code of an event's edge, borrowed; NULL if it has none.
 *
 * The table has keys of str alone (events.py), so that looking for one runs no code of Python. */
static PyObject *code_of(const known *k, PyObject *codes, PyObject *event) {
  static const int names[] = {MACHINE, TRIGGER, SOURCE, DEST};
  for (size_t i = 0; codes && i < sizeof names / sizeof *names; ++i) {
    PyObject *name = field(&k->event, event, names[i]);
    if (!name || !PyUnicode_CheckExact(name) || !PyDict_CheckExact(codes)) return NULL;
    codes = PyDict_GetItemWithError(codes, name);
  }
  return codes;
}

/* The epoch and the generation of an event. */
typedef struct era {
  int64_t epoch, generation;
} era;

static bool era_of(const known *k, PyObject *event, era *of) {
  return as_number(field(&k->event, event, EPOCH), &of->epoch) &&
         as_number(field(&k->event, event, GENERATION), &of->generation);
}

static bool put_era(text *t, const era *of) {
  return put_number(t, of->epoch) && put_char(t, ',') && put_number(t, of->generation);
}

/* Write the data of an event behind a comma, nothing for no data. */
static bool put_data(text *t, const known *k, PyObject *data) {
  if (data == k->no_data) return true;
  if (!data || !PyDict_CheckExact(data)) return false;
  return PyDict_Size(data) == 0 || (put_char(t, ',') && put_value(t, data, 0));
}

static bool put_event(text *t, const known *k, PyObject *codes, PyObject *event, const era *first) {
  era own;
  if (!is_of(&k->event, event) || !era_of(k, event, &own)) return false;
  if (!put(t, ",[", 2) || !put_int(t, code_of(k, codes, event)) || !put_char(t, ',')) return false;
  if (!put_entities(t, field(&k->event, event, ENTITIES))) return false;
  if (own.epoch != first->epoch || own.generation != first->generation)
    if (!put_char(t, ',') || !put_era(t, &own)) return false;
  return put_data(t, k, field(&k->event, event, DATA)) && put_char(t, ']');
}

bool put_events(text *t, const known *k, PyObject *codes, PyObject *events) {
  if (!PyTuple_CheckExact(events)) return false;
  Py_ssize_t count = PyTuple_Size(events);
  if (count == 0) return put(t, "[]", 2);
  era first;
  PyObject *one = PyTuple_GetItem(events, 0);
  if (!is_of(&k->event, one) || !era_of(k, one, &first)) return false;
  if (!put_char(t, '[') || !put_era(t, &first)) return false;
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!put_event(t, k, codes, PyTuple_GetItem(events, i), &first)) return false;
  return put_char(t, ']');
}

