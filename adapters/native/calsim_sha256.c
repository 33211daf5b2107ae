/* calsim_sha256.c - SHA-256 (FIPS 180-4). */
#include "calsim_artifact.h"
#include <string.h>

static const uint32_t ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int by) { return x >> by | x << (32 - by); }

/* One round; the state's first word is s[first], the next s[first + 1 modulo 8] and so on. */
static inline void one_round(uint32_t s[8], int first, uint32_t input) {
  const uint32_t a = s[first], b = s[(first + 1) & 7], c = s[(first + 2) & 7];
  const uint32_t e = s[(first + 4) & 7], f = s[(first + 5) & 7], g = s[(first + 6) & 7];
  uint32_t *d = &s[(first + 3) & 7], *h = &s[(first + 7) & 7];
  uint32_t t = *h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & f) ^ (~e & g)) + input;
  *d += t;
  *h = t + (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
}

static void compress(uint32_t state[8], const uint8_t *block) {
  uint32_t w[64], s[8];
  for (int i = 0; i < 16; ++i)
    w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 |
           (uint32_t)block[4 * i + 2] << 8 | (uint32_t)block[4 * i + 3];
  for (int i = 16; i < 64; ++i) {
    uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + w[i - 7] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) +
           (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
  }
  memcpy(s, state, sizeof s);
  /* After a round the names of the eight words move on by one instead of their values. */
  for (int i = 0; i < 64; i += 8)
    for (int j = 0; j < 8; ++j) one_round(s, (8 - j) & 7, w[i + j] + ROUND[i + j]);
  for (int i = 0; i < 8; ++i) state[i] += s[i];
}

void calsim_sha256_begin(calsim_sha256 *h) {
  static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  memcpy(h->state, start, sizeof start);
  h->length = 0;
}

void calsim_sha256_add(calsim_sha256 *h, const void *bytes, uint64_t length) {
  const uint8_t *p = bytes;
  uint64_t held = h->length % 64;
  h->length += length;
  if (held) {
    uint64_t part = length < 64 - held ? length : 64 - held;
    memcpy(h->block + held, p, part);
    p += part;
    length -= part;
    if (held + part < 64) return;
    compress(h->state, h->block);
  }
  for (; length >= 64; length -= 64, p += 64) compress(h->state, p);
  if (length) memcpy(h->block, p, length);
}

void calsim_sha256_end(calsim_sha256 *h, char out[CALSIM_SHA256_HEX_BYTES]) {
  static const char digits[] = "0123456789abcdef";
  static const uint8_t padding[64] = {0x80};
  uint64_t bits = h->length * 8, held = h->length % 64;
  uint8_t tail[8];
  for (int i = 0; i < 8; ++i) tail[i] = (uint8_t)(bits >> (56 - 8 * i));
  calsim_sha256_add(h, padding, held < 56 ? 56 - held : 120 - held);
  calsim_sha256_add(h, tail, sizeof tail);
  for (int i = 0; i < 64; ++i) out[i] = digits[h->state[i / 8] >> (28 - 4 * (i % 8)) & 15];
  out[64] = '\0';
}

void calsim_sha256_hex(const void *bytes, uint64_t length, char out[65]) {
  calsim_sha256 h;
  calsim_sha256_begin(&h);
  calsim_sha256_add(&h, bytes, length);
  calsim_sha256_end(&h, out);
}
