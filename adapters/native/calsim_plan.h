/* calsim_plan.h - how a fault plan is read: shared by calsim_plan.c (lines, keys of every kind),
 * calsim_kinds.c (kinds) and calsim_keys.c (their own keys). */
#ifndef CALSIM_PLAN_H
#define CALSIM_PLAN_H
#include "calsim_internal.h"

enum { CALSIM_MAX_KEYS = 32 };

typedef struct calsim_line { /* one rule while it is read */
  uint32_t number;
  const char *keys[CALSIM_MAX_KEYS], *values[CALSIM_MAX_KEYS];
  uint32_t key_count;
  bool counted;
  char *message; /* what is wrong, CALSIM_ERROR_BYTES of room */
} calsim_line;

/* Say what is wrong with the line; false. */
bool calsim_wrong(calsim_line *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
int calsim_index_in(const char *text, const char *const *names, int count);
bool calsim_has_key(const calsim_line *s, const char *key);
bool calsim_take_count(calsim_line *s, const char *key, const char *value, uint64_t least,
                       uint64_t most, uint64_t *out);
bool calsim_take_small(calsim_line *s, const char *key, const char *value, uint64_t most,
                       uint32_t *out);
/* One of two words; *out = 1 or 2. */
bool calsim_take_either(calsim_line *s, const char *key, const char *value, const char *one,
                        const char *two, uint32_t *out);
bool calsim_take_yes(calsim_line *s, const char *key, const char *value, bool *out);
/* A number with or without a sign. */
bool calsim_take_signed(calsim_line *s, const char *key, const char *value, int64_t *out);
bool calsim_take_time(calsim_line *s, const char *key, const char *value, uint64_t *out);
bool calsim_take_point(calsim_line *s, calsim_rule *rule, const char *key, const char *value);

const char *calsim_kind_name(calsim_fault_kind kind);
/* 0 when no kind has this name; the rule gets the kind's defaults. */
calsim_fault_kind calsim_take_kind(const char *name, calsim_rule *rule);
bool calsim_kind_at(calsim_fault_kind kind, calsim_point point);
/* A key of the rule's kind. *known tells whether it is one. */
bool calsim_take_own(calsim_line *s, calsim_rule *rule, const char *key, const char *value,
                     bool *known);
bool calsim_needs_are_there(calsim_line *s, const calsim_rule *rule);
/* What must be there once all keys are read. */
bool calsim_complete_rule(calsim_line *s, calsim_rule *rule);
#endif
