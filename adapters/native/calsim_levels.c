/* calsim_levels.c - the four reset levels: what each does on this board and what it claims, by
 * default and as the configuration says. */
#include "calsim_internal.h"
#include <string.h>

/* Effects by bit. */
static const char *const EFFECTS[] = {
    "aborts_jobs",   "quiesces_dma",      "clears_sticky",  "drops_config", "drops_all_configs",
    "drops_kv",      "drops_all_kv",      "drops_params",   "frees_dynamic", "frees_all",
    "resets_counters", "new_epoch",       "other_chip",     "other_model",  "other_process",
    "reloads_firmware", "drops_host_maps"};
enum { EFFECT_COUNT = sizeof EFFECTS / sizeof EFFECTS[0] };
_Static_assert((1ull << EFFECT_COUNT) - 1 == CALSIM_FX_ALL, "a word for each effect");

static const uint64_t JOBS = NPURT_FX_ABORTS_JOBS | NPURT_FX_QUIESCES_DMA;
static const uint64_t KV = NPURT_FX_DROPS_KV | NPURT_FX_DROPS_ALL_KV;
static const uint64_t CONFIG = NPURT_FX_DROPS_CONFIG | NPURT_FX_DROPS_ALL_CONFIGS |
                               NPURT_FX_DROPS_KV | NPURT_FX_DROPS_ALL_KV | NPURT_FX_DROPS_PARAMS |
                               NPURT_FX_OTHER_MODEL;

void calsim_scopes_default(calsim_config *config) {
  const uint64_t ccu = JOBS | NPURT_FX_OTHER_CHIP | NPURT_FX_OTHER_MODEL;
  const uint64_t soft = JOBS | CONFIG | NPURT_FX_CLEARS_STICKY | NPURT_FX_FREES_DYNAMIC |
                        NPURT_FX_FREES_ALL | NPURT_FX_RESETS_COUNTERS | NPURT_FX_NEW_EPOCH |
                        NPURT_FX_OTHER_CHIP;
  config->scopes[CALSIM_CCU - 1] = (calsim_scope){ccu | KV, ccu, KV};
  config->scopes[CALSIM_CONFIGURATION - 1] = (calsim_scope){CONFIG, CONFIG, 0};
  config->scopes[CALSIM_DYNAMIC_MEM - 1] =
      (calsim_scope){NPURT_FX_FREES_DYNAMIC, NPURT_FX_FREES_DYNAMIC, 0};
  config->scopes[CALSIM_DEVICE_SOFT - 1] =
      (calsim_scope){soft, soft, NPURT_FX_RELOADS_FIRMWARE};
  config->reset_interval_ns = 1000000000;
}

/* Words joined by +, or none; with `unknown`, a word with ? behind it goes there. */
static bool take_words(const char *value, uint64_t *effects, uint64_t *unknown) {
  uint64_t seen = 0;
  *effects = 0;
  if (strcmp(value, "none") == 0) return true;
  for (;;) {
    size_t length = strcspn(value, "+"), word = length;
    bool doubt = unknown != NULL && length > 0 && value[length - 1] == '?';
    uint64_t bit = 0;
    if (doubt) --word;
    for (uint32_t i = 0; i < EFFECT_COUNT; ++i)
      if (strlen(EFFECTS[i]) == word && strncmp(value, EFFECTS[i], word) == 0) bit = 1ull << i;
    if (bit == 0 || (seen & bit) != 0) return false;
    seen |= bit;
    *(doubt ? unknown : effects) |= bit;
    if (value[length] == '\0') return true;
    value += length + 1;
  }
}

bool calsim_effects_take(const char *value, uint64_t *effects) {
  return take_words(value, effects, NULL);
}

bool calsim_scope_take(calsim_scope *scope, bool claims, const char *value) {
  if (!claims) return take_words(value, &scope->does, NULL);
  scope->unknown = 0;
  return take_words(value, &scope->yes, &scope->unknown);
}
