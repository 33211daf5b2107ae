/* calsim_digest.c - how much KV a lane has, and a 64-bit digest of it (detection of exchanged,
 * stale or damaged rows). */
#include "calsim_model.h"
#include <string.h>

static const uint64_t ODD_A = 0x9E3779B97F4A7C15ull, ODD_B = 0xC2B2AE3D27D4EB4Full;

static uint64_t rotate(uint64_t x, int by) { return x << by | x >> (64 - by); }

/* Each step is a bijection of the sum for a given word and of the word for a given sum: a change of
 * one word always shows. */
static uint64_t absorb(uint64_t sum, uint64_t word) {
  return rotate(sum + word * ODD_B, 31) * ODD_A;
}

static uint64_t finish(uint64_t x) {
  x = (x ^ x >> 33) * 0xFF51AFD7ED558CCDull;
  x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53ull;
  return x ^ x >> 33;
}

uint64_t calsim_kv_floats_per_lane(const calsim_manifest *m) {
  return 2ull * m->shape.layers * m->context * m->shape.kv_heads * m->shape.head_dim;
}

uint64_t calsim_kv_digest(const calsim_manifest *m, const float *kv, uint32_t length) {
  /* In words of two floats: k and v of a position together have an even number of them. */
  uint64_t per_position = (uint64_t)m->shape.kv_heads * m->shape.head_dim;
  uint64_t words = length * per_position, layer_floats = 2 * per_position * m->context;
  uint64_t sums[4] = {ODD_A + ODD_B, ODD_B, 0, 0 - ODD_A};
  for (uint32_t layer = 0; layer < m->shape.layers; ++layer) {
    const char *at = (const char *)(kv + layer * layer_floats);
    uint64_t word[4], i = 0;
    for (; i + 4 <= words; i += 4) {
      memcpy(word, at + 8 * i, sizeof word);
      for (int lane = 0; lane < 4; ++lane) sums[lane] = absorb(sums[lane], word[lane]);
    }
    for (; i < words; ++i) {
      memcpy(word, at + 8 * i, sizeof *word);
      sums[i % 4] = absorb(sums[i % 4], *word);
    }
  }
  uint64_t digest = finish(length + ODD_A * m->shape.layers);
  for (int lane = 0; lane < 4; ++lane) digest = finish(absorb(digest, sums[lane]));
  return digest;
}
