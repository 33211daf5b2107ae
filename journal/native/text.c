/* text.c - the texts of usual journal rows, byte for byte what Python writes.
 *
 * Theory of operation. By far the most rows have one form: a completion whose rows say nothing but
 * their tokens and the digests of their KV, an input of a few numbers, events of edges that have
 * codes. Each function here writes that form alone and gives None for anything else: then Python
 * writes the text, or says what is wrong with the value. So the rules stand in Python once, and
 * nothing is judged here.
 *
 * What is walked is exact: int, str, tuple, list and dict themselves, no class derived from them,
 * and the engine's own frozen classes, whose fields are read where the class says its slots are.
 * None of that runs code of Python, so nothing changes while it is walked, and references are
 * borrowed from what the caller holds. A text is written to a buffer of fixed size on the stack;
 * one that does not fit is not usual. Nothing is kept from one call to the next. */
#include "text.h"
#include <structmember.h>

/* ---- the engine's classes -------------------------------------------------------------------- */

static const char *const KIND_NAMES[KINDS] = {"Completed", "SubmitAccepted", "BufferRestored"};
static const char *const KIND_FIELDS[KINDS][FIELDS_MAX + 1] = {
    {"job", "ticket", "epoch", "generation", "flags", "kv_effect", "engine_slot", "rows", "times"},
    {"job", "ticket"},
    {"buffer", "job"},
};
static const char *const ROW_FIELDS[FIELDS_MAX + 1] = {
    "token", "stop_hit", "fault", "verdict", "kv_digest", "logprobs",
};
static const char *const TIMES_FIELDS[FIELDS_MAX + 1] = {
    "submit_ns",   "accept_ns",    "h2d_begin_ns", "h2d_end_ns", "exec_begin_ns",
    "exec_end_ns", "d2h_begin_ns", "d2h_end_ns",   "visible_ns", "postprocess_ns",
};
static const char *const EVENT_FIELDS[FIELDS_MAX + 1] = {
    "machine", "entities", "trigger", "source", "dest", "epoch", "generation", "data",
};

/* ---- inputs ---------------------------------------------------------------------------------- */

/* Write a digest: the number of an int that has 64 bits, with a sign or without. */
static bool put_digest(text *t, PyObject *value) {
  int64_t number;
  if (as_number(value, &number)) return put_number(t, number);
  if (!PyLong_CheckExact(value)) return false;
  unsigned long long digest = PyLong_AsUnsignedLongLong(value);
  if (digest != UINT64_MAX || !PyErr_Occurred()) return put_digits(t, digest, false);
  if (PyErr_ExceptionMatches(PyExc_OverflowError)) PyErr_Clear();
  return false;
}

/* Write the digests of rows that all have one, as the column that it is. */
static bool put_digests(text *t, const known *k, PyObject *rows, Py_ssize_t count) {
  if (!put(t, ",null,null,null,[", 17)) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *digest = field(&k->row, PyTuple_GetItem(rows, i), KV_DIGEST);
    if (!digest || (i && !put_char(t, ',')) || !put_digest(t, digest)) return false;
  }
  return put_char(t, ']');
}

/* Write rows by columns: their tokens, and what the device says of their KV where it says it of
 * all; every other field must hold the default, the very object. */
static bool put_rows(text *t, const known *k, PyObject *rows) {
  PyObject *defaults[1 + ROW_DEFAULTS];
  bool have_digests = false;
  for (int i = 0; i < ROW_DEFAULTS; ++i) defaults[1 + i] = PyTuple_GetItem(k->row_defaults, i);
  if (!rows || !PyTuple_CheckExact(rows) || !put(t, "[[", 2)) return false;
  Py_ssize_t count = PyTuple_Size(rows);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *row = PyTuple_GetItem(rows, i);
    if (!is_of(&k->row, row)) return false;
    for (int other = TOKEN + 1; other <= ROW_DEFAULTS; ++other)
      if (other != KV_DIGEST && field(&k->row, row, other) != defaults[other]) return false;
    bool has_digest = field(&k->row, row, KV_DIGEST) != defaults[KV_DIGEST];
    if (i == 0) have_digests = has_digest;
    if (has_digest != have_digests) return false;
    if ((i && !put_char(t, ',')) || !put_int(t, field(&k->row, row, TOKEN))) return false;
  }
  if (!put_char(t, ']')) return false;
  if (have_digests && !put_digests(t, k, rows, count)) return false;
  return put_char(t, ']');
}

/* Write instants as what has passed between them; the rules are those of instants.py. */
static bool put_times(text *t, const known *k, PyObject *times) {
  int64_t before = 0, instant, passed;
  if (!is_of(&k->times, times)) return false;
  for (int i = 0; i < INSTANTS; ++i) {
    if (!as_number(field(&k->times, times, i), &instant)) return false;
    if (instant == 0) {
      if (!put(t, "null,", 5)) return false;
      continue;
    }
    if (instant < before) {
      if (!(put_char(t, '[') && put_number(t, instant) && put(t, "],", 2))) return false;
    } else {
      if (__builtin_sub_overflow(instant, before, &passed)) return false;
      if (!put_number(t, passed) || !put_char(t, ',')) return false;
    }
    before = instant;
  }
  return put_int(t, field(&k->times, times, INSTANTS));
}

/* Write the fields of a completion that stand behind its version. */
static bool put_completed(text *t, const known *k, PyObject *taken) {
  const layout *of = &k->kinds[COMPLETED];
  for (int i = 0; i <= ENGINE_SLOT; ++i) {
    PyObject *value = field(of, taken, i);
    if (!put_char(t, ',')) return false;
    if (!(i == KV_EFFECT ? put_string(t, value) : put_int(t, value))) return false;
  }
  return put_char(t, ',') && put_rows(t, k, field(of, taken, ROWS)) && put(t, ",[", 2) &&
         put_times(t, k, field(of, taken, TIMES)) && put_char(t, ']');
}

/* Write the two numbers of an input that has no more. */
static bool put_pair(text *t, const layout *of, PyObject *taken) {
  return put_char(t, ',') && put_int(t, field(of, taken, 0)) && put_char(t, ',') &&
         put_int(t, field(of, taken, 1));
}

/* Write an input; return which kind it is, -1 if it is not usual. */
static int put_input(text *t, const known *k, PyObject *versions, PyObject *taken) {
  int kind = 0;
  while (kind < KINDS && !is_of(&k->kinds[kind], taken)) ++kind;
  if (kind == KINDS || !PyTuple_CheckExact(versions) || PyTuple_Size(versions) != KINDS) return -1;
  if (!put_char(t, '[') || !put_int(t, PyTuple_GetItem(versions, kind))) return -1;
  if (!(kind == COMPLETED ? put_completed(t, k, taken) : put_pair(t, &k->kinds[kind], taken)))
    return -1;
  return put_char(t, ']') ? kind : -1;
}

PyDoc_STRVAR(events_doc,
             "events(codes, events, /)\n--\n\n"
             "Return the text of the events of a step; None if it is not usual.");

static PyObject *events(PyObject *module, PyObject *const *given, Py_ssize_t count) {
  text t;
  t.length = 0;
  if (count != 2) return miscalled("events", 2, count);
  if (!put_events(&t, known_of(module), given[0], given[1])) return not_usual();
  return PyBytes_FromStringAndSize(t.bytes, (Py_ssize_t)t.length);
}

/* ---- the chain ------------------------------------------------------------------------------- */

/* What stands before the chain's texts: two heads with a number each; before a text: its head. */
enum { HEAD_BYTES = 9, NUMBERS_BYTES = 2 * (HEAD_BYTES + 8), TEXTS = 3 };

/* Write a number as its eight bytes, the greatest first; return where the next byte goes. */
static char *pack_number(char *at, uint64_t number) {
  for (int shift = 56; shift >= 0; shift -= 8) *at++ = (char)(number >> shift & 0xff);
  return at;
}

/* Write what stands before a value: the letter of its storage class, its length. */
static char *pack_head(char *at, char letter, uint64_t length) {
  *at = letter;
  return pack_number(at + 1, length);
}

/* Hash a row behind the chain before it; the layout stands in chain.py. */
static void hash_row(const span *previous, int64_t step, int64_t at_ns, const span texts[TEXTS],
                     uint8_t digest[DIGEST_BYTES]) {
  char numbers[NUMBERS_BYTES], heads[TEXTS][HEAD_BYTES];
  span pieces[2 + 2 * TEXTS] = {*previous, {numbers, sizeof numbers}};
  char *at = pack_number(pack_head(numbers, 'I', 8), (uint64_t)step);
  pack_number(pack_head(at, 'I', 8), (uint64_t)at_ns);
  for (int i = 0; i < TEXTS; ++i) {
    pack_head(heads[i], 'T', (uint64_t)texts[i].count);
    pieces[2 + 2 * i] = (span){heads[i], HEAD_BYTES};
    pieces[3 + 2 * i] = texts[i];
  }
  hash_pieces(pieces, sizeof pieces / sizeof *pieces, digest);
}

static bool as_span(PyObject *value, span *of) {
  char *bytes;
  if (!PyBytes_CheckExact(value) || PyBytes_AsStringAndSize(value, &bytes, &of->count) < 0)
    return false;
  of->bytes = bytes;
  return true;
}

static PyObject *as_bytes(const uint8_t digest[DIGEST_BYTES]) {
  return PyBytes_FromStringAndSize((const char *)digest, DIGEST_BYTES);
}

PyDoc_STRVAR(chain_doc,
             "chain(previous, step, at_ns, kind, taken, events, /)\n--\n\n"
             "Return the chain of a row; None if what it is made of is not usual, or the processor"
             " has no instructions for it.");

static PyObject *chain(PyObject *module, PyObject *const *given, Py_ssize_t count) {
  int64_t step, at_ns;
  span previous, texts[TEXTS];
  uint8_t digest[DIGEST_BYTES];
  if (count != 6) return miscalled("chain", 6, count);
  if (!known_of(module)->hashes) return not_usual();
  if (!as_span(given[0], &previous) || !as_number(given[1], &step) || !as_number(given[2], &at_ns))
    return not_usual();
  for (int i = 0; i < TEXTS; ++i)
    if (!as_span(given[3 + i], &texts[i])) return not_usual();
  hash_row(&previous, step, at_ns, texts, digest);
  return as_bytes(digest);
}

PyDoc_STRVAR(sha256_doc,
             "sha256(data, /)\n--\n\n"
             "Return the hash that chains are made with; None if there are no instructions for it.");

static PyObject *sha256(PyObject *module, PyObject *const *given, Py_ssize_t count) {
  span data;
  uint8_t digest[DIGEST_BYTES];
  if (count != 1) return miscalled("sha256", 1, count);
  if (!known_of(module)->hashes || !as_span(given[0], &data)) return not_usual();
  hash_pieces(&data, 1, digest);
  return as_bytes(digest);
}

/* ---- whole rows ------------------------------------------------------------------------------ */

PyDoc_STRVAR(row_doc,
             "row(versions, codes, previous, step, at_ns, taken, events, /)\n--\n\n"
             "Return the kind, the texts of input and events, and the chain (None if there are no"
             " instructions for it); None if any of it is not usual. ``versions`` are those of"
             " ``KINDS``.");

static PyObject *row(PyObject *module, PyObject *const *given, Py_ssize_t count) {
  const known *k = known_of(module);
  text taken, happened;
  span previous, texts[TEXTS];
  int64_t step, at_ns;
  uint8_t digest[DIGEST_BYTES];
  if (count != 7) return miscalled("row", 7, count);
  taken.length = happened.length = 0;
  if (!as_span(given[2], &previous) || !as_number(given[3], &step) || !as_number(given[4], &at_ns))
    return not_usual();
  int kind = put_input(&taken, k, given[0], given[5]);
  if (kind < 0 || !put_events(&happened, k, given[1], given[6])) return not_usual();
  PyObject *name = PyTuple_GetItem(k->kind_names, kind);
  texts[0] = (span){KIND_NAMES[kind], (Py_ssize_t)strlen(KIND_NAMES[kind])};
  texts[1] = (span){taken.bytes, (Py_ssize_t)taken.length};
  texts[2] = (span){happened.bytes, (Py_ssize_t)happened.length};
  if (k->hashes) hash_row(&previous, step, at_ns, texts, digest);
  return Py_BuildValue("(Os#s#y#)", name, texts[1].bytes, texts[1].count, texts[2].bytes,
                       texts[2].count, k->hashes ? (const char *)digest : NULL,
                       (Py_ssize_t)DIGEST_BYTES);
}

/* ---- the module ------------------------------------------------------------------------------ */

/* Return a thing of a module of ours, a new reference. */
static PyObject *imported(const char *module, const char *name) {
  PyObject *home = PyImport_ImportModule(module);
  if (!home) return NULL;
  PyObject *found = PyObject_GetAttrString(home, name);
  Py_DECREF(home);
  return found;
}

static int outdated(const char *what) {
  PyErr_Format(PyExc_ImportError,
               "laneway.journal._text was built for other %s: install laneway again, or change"
               " journal/native/text.c with them", what);
  return -1;
}

/* Find where objects of a class have their fields; it must have these and no others. */
static int find_layout(layout *of, const char *module, const char *name,
                       const char *const *fields) {
  PyObject *found = imported(module, name);
  if (!found) return -1;
  of->type = (PyTypeObject *)found;
  const PyMemberDef *slots =
      PyType_Check(found) ? PyType_GetSlot(of->type, Py_tp_members) : NULL;
  int wanted = 0, own = 0, known_ones = 0;
  while (fields[wanted]) ++wanted;
  for (; slots && slots[own].name; ++own)
    for (int i = 0; i < wanted; ++i)
      if (slots[own].type == T_OBJECT_EX && strcmp(fields[i], slots[own].name) == 0) {
        of->offsets[i] = slots[own].offset;
        ++known_ones;
      }
  return known_ones == wanted && own == wanted ? 0 : outdated(name);
}

static int find_all(PyObject *module) {
  static const char inputs[] = "laneway.engine.inputs", event[] = "laneway.statemachines.event";
  known *k = known_of(module);
  k->hashes = can_hash();
  k->kind_names = PyTuple_New(KINDS);
  if (!k->kind_names) return -1;
  for (int i = 0; i < KINDS; ++i) {
    PyObject *name = PyUnicode_InternFromString(KIND_NAMES[i]);
    if (!name || PyTuple_SetItem(k->kind_names, i, name) < 0) return -1;
    if (find_layout(&k->kinds[i], inputs, KIND_NAMES[i], KIND_FIELDS[i]) < 0) return -1;
  }
  if (find_layout(&k->times, inputs, "JobTimes", TIMES_FIELDS) < 0 ||
      find_layout(&k->row, inputs, "RowResult", ROW_FIELDS) < 0 ||
      find_layout(&k->event, event, "Event", EVENT_FIELDS) < 0)
    return -1;
  k->row_defaults = PyObject_GetAttrString((PyObject *)k->row.type, "__struct_defaults__");
  if (!k->row_defaults) return -1;
  if (!PyTuple_CheckExact(k->row_defaults) || PyTuple_Size(k->row_defaults) != ROW_DEFAULTS)
    return outdated("defaults of RowResult");
  k->no_data = imported(event, "NO_DATA");
  if (!k->no_data) return -1;
  return PyModule_AddObjectRef(module, "KINDS", k->kind_names);
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
  const known *k = known_of(module);
  for (int i = 0; i < KINDS; ++i) Py_VISIT(k->kinds[i].type);
  Py_VISIT(k->row.type);
  Py_VISIT(k->times.type);
  Py_VISIT(k->event.type);
  Py_VISIT(k->kind_names);
  Py_VISIT(k->row_defaults);
  Py_VISIT(k->no_data);
  return 0;
}

static int clear(PyObject *module) {
  known *k = known_of(module);
  for (int i = 0; i < KINDS; ++i) Py_CLEAR(k->kinds[i].type);
  Py_CLEAR(k->row.type);
  Py_CLEAR(k->times.type);
  Py_CLEAR(k->event.type);
  Py_CLEAR(k->kind_names);
  Py_CLEAR(k->row_defaults);
  Py_CLEAR(k->no_data);
  return 0;
}

static void give_back(void *module) { clear(module); }

static PyMethodDef METHODS[] = {
    {"row", (PyCFunction)(void (*)(void))row, METH_FASTCALL, row_doc},
    {"events", (PyCFunction)(void (*)(void))events, METH_FASTCALL, events_doc},
    {"chain", (PyCFunction)(void (*)(void))chain, METH_FASTCALL, chain_doc},
    {"sha256", (PyCFunction)(void (*)(void))sha256, METH_FASTCALL, sha256_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, find_all}, {0, NULL}};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "laneway.journal._text",
    .m_doc = "The texts of usual journal rows.",
    .m_size = sizeof(known),
    .m_methods = METHODS,
    .m_slots = SLOTS,
    .m_traverse = traverse,
    .m_clear = clear,
    .m_free = give_back,
};

PyMODINIT_FUNC PyInit__text(void) { return PyModuleDef_Init(&MODULE); }
