/* text_sha256.c - SHA-256 (FIPS 180-4) of pieces that stand one after the other.
 *
 * Theory of operation. The chain of a row is the hash of a few short pieces, and to ask a library
 * for it takes several times as long as the hash itself, where the processor has instructions for
 * it; four rounds are two of them. Where it has none Python asks the library. Whole blocks are taken
 * from where they are; what is left of a piece waits for the next one. */
#include "text.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

enum { BLOCK = 64, LENGTH_AT = 56 };

typedef struct hash {
  uint32_t h[8];
  uint8_t waiting[BLOCK];
  size_t waits;
  uint64_t bytes;
} hash;

/* ---- blocks by the processor's own instructions ---------------------------------------------- */

#if defined(__x86_64__)

static const uint32_t K[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

/* The instructions want the eight words as (a, b, e, f) and (c, d, g, h), the last one lowest. */
__attribute__((target("sha,sse4.1"))) static void take(uint32_t h[8], const uint8_t *block,
                                                       size_t count) {
  const __m128i to_words = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  __m128i ab = _mm_loadu_si128((const void *)h), eh = _mm_loadu_si128((const void *)(h + 4));
  ab = _mm_shuffle_epi32(ab, 0xb1);
  eh = _mm_shuffle_epi32(eh, 0x1b);
  __m128i abef = _mm_alignr_epi8(ab, eh, 8), cdgh = _mm_blend_epi16(eh, ab, 0xf0);
  for (; count > 0; --count, block += BLOCK) {
    __m128i w[4], abef_before = abef, cdgh_before = cdgh;
    for (int i = 0; i < 16; ++i) {
      __m128i *now = &w[i & 3], before = w[(i + 3) & 3];
      if (i < 4) {
        *now = _mm_shuffle_epi8(_mm_loadu_si128((const void *)(block + 16 * i)), to_words);
      } else {
        __m128i seven_ago = _mm_alignr_epi8(before, w[(i + 2) & 3], 4);
        *now = _mm_add_epi32(_mm_sha256msg1_epu32(*now, w[(i + 1) & 3]), seven_ago);
        *now = _mm_sha256msg2_epu32(*now, before);
      }
      __m128i added = _mm_add_epi32(*now, _mm_load_si128((const void *)(K + 4 * i)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, added);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(added, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  ab = _mm_shuffle_epi32(abef, 0x1b);
  eh = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128((void *)h, _mm_blend_epi16(ab, eh, 0xf0));
  _mm_storeu_si128((void *)(h + 4), _mm_alignr_epi8(eh, ab, 8));
}

bool can_hash(void) {
  enum { SSE41 = 1 << 19, SHA = 1 << 29 };
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & SSE41)) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & SHA);
}

#else

static void take(uint32_t h[8], const uint8_t *block, size_t count) {
  (void)h, (void)block, (void)count;
}

bool can_hash(void) { return false; }

#endif

/* ---- pieces ---------------------------------------------------------------------------------- */

static void add(hash *of, const uint8_t *bytes, size_t count) {
  of->bytes += count;
  if (of->waits > 0) {
    size_t part = BLOCK - of->waits < count ? BLOCK - of->waits : count;
    memcpy(of->waiting + of->waits, bytes, part);
    of->waits += part;
    bytes += part;
    count -= part;
    if (of->waits < BLOCK) return;
    take(of->h, of->waiting, 1);
    of->waits = 0;
  }
  take(of->h, bytes, count / BLOCK);
  of->waits = count % BLOCK;
  memcpy(of->waiting, bytes + (count - of->waits), of->waits);
}

/* End the message: a bit that is set, zeros, its length in bits in the last eight bytes. */
static void end(hash *of) {
  uint64_t bits = of->bytes * 8;
  of->waiting[of->waits++] = 0x80;
  if (of->waits > LENGTH_AT) {
    memset(of->waiting + of->waits, 0, BLOCK - of->waits);
    take(of->h, of->waiting, 1);
    of->waits = 0;
  }
  memset(of->waiting + of->waits, 0, LENGTH_AT - of->waits);
  for (int i = 0; i < 8; ++i) of->waiting[LENGTH_AT + i] = (uint8_t)(bits >> (56 - 8 * i));
  take(of->h, of->waiting, 1);
}

void hash_pieces(const span *pieces, size_t count, uint8_t digest[DIGEST_BYTES]) {
  hash of = {.h = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c,
                   0x1f83d9ab, 0x5be0cd19}};
  for (size_t i = 0; i < count; ++i)
    add(&of, (const uint8_t *)pieces[i].bytes, (size_t)pieces[i].count);
  end(&of);
  for (int i = 0; i < 8; ++i)
    for (int byte = 0; byte < 4; ++byte)
      digest[4 * i + byte] = (uint8_t)(of.h[i] >> (24 - 8 * byte));
}
