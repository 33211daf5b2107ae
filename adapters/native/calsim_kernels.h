/* calsim_kernels.h - the float32 kernels of the forward (private to calsim_forward.c).
 *
 * Every product is a sum over two fixed halves of the reduction that are added last, in every
 * layout, and each half is summed in a fixed number of partial sums written out as vectors of four.
 * The compiler thus has nothing to reassociate: results are the same bits at every optimisation
 * level and vector width, as long as it neither contracts to FMA nor assumes fast math. */
#ifndef CALSIM_KERNELS_H
#define CALSIM_KERNELS_H
#include <stdint.h>
#include <string.h>

#ifdef __FAST_MATH__
#error "build without -ffast-math: the order of every sum is part of the contract"
#endif

/* Four floats at any float address; may alias float. */
typedef float calsim_f4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t calsim_i4 __attribute__((vector_size(16), aligned(4)));
typedef uint32_t calsim_u4 __attribute__((vector_size(16), aligned(4)));

#define CALSIM_KERNEL static __attribute__((noinline))

static inline calsim_f4 calsim_load4(const float *at) { return *(const calsim_f4 *)at; }

/* One half of two dot products, a . x and b . x: 16 partial sums each, folded to four. */
static inline void calsim_half_dots(const float *a, const float *b, const float *x, uint32_t n,
                                    calsim_f4 out[2]) {
  calsim_f4 a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}, b0 = {0}, b1 = {0}, b2 = {0}, b3 = {0};
  uint32_t i = 0;
  for (; i + 16 <= n; i += 16) {
    calsim_f4 x0 = calsim_load4(x + i), x1 = calsim_load4(x + i + 4);
    calsim_f4 x2 = calsim_load4(x + i + 8), x3 = calsim_load4(x + i + 12);
    a0 += calsim_load4(a + i) * x0;
    a1 += calsim_load4(a + i + 4) * x1;
    a2 += calsim_load4(a + i + 8) * x2;
    a3 += calsim_load4(a + i + 12) * x3;
    b0 += calsim_load4(b + i) * x0;
    b1 += calsim_load4(b + i + 4) * x1;
    b2 += calsim_load4(b + i + 8) * x2;
    b3 += calsim_load4(b + i + 12) * x3;
  }
  for (; i + 4 <= n; i += 4) {
    a0 += calsim_load4(a + i) * calsim_load4(x + i);
    b0 += calsim_load4(b + i) * calsim_load4(x + i);
  }
  for (; i < n; ++i) {
    a0[i % 4] += a[i] * x[i];
    b0[i % 4] += b[i] * x[i];
  }
  out[0] = (a0 + a1) + (a2 + a3);
  out[1] = (b0 + b1) + (b2 + b3);
}

/* a . x and b . x. Two at once share the loads of x and the shuffles of the last sums, nothing
 * else: a product does not depend on what stands beside it. */
static inline void calsim_dots(const float *a, const float *b, const float *x, uint32_t n,
                               float out[2]) {
  calsim_f4 low[2], high[2], pair[2];
  uint32_t half = n / 2;
  calsim_half_dots(a, b, x, half, low);
  calsim_half_dots(a + half, b + half, x + half, n - half, high);
  for (int i = 0; i < 2; ++i)
    pair[i] = (calsim_f4){low[i][0], high[i][0], low[i][1], high[i][1]} +
              (calsim_f4){low[i][2], high[i][2], low[i][3], high[i][3]};
  calsim_f4 halves = (calsim_f4){pair[0][0], pair[0][1], pair[1][0], pair[1][1]} +
                     (calsim_f4){pair[0][2], pair[0][3], pair[1][2], pair[1][3]};
  out[0] = halves[0] + halves[1];
  out[1] = halves[2] + halves[3];
}

/* Rows that are asked for before they are needed: a row is too short for the processor to see where
 * the next one begins, and what has to come from beyond the cache would be waited for. */
enum { CALSIM_AHEAD = 4 };

/* to[r] = factor * (row r of the matrix . x); `stride` floats lie between the rows. */
static inline void calsim_rows(float *to, const float *matrix, uint64_t stride, const float *x,
                               uint32_t rows, uint32_t columns, float factor) {
  float out[2];
  uint32_t r = 0;
  for (; r + 2 <= rows; r += 2) {
    for (uint32_t c = 0; r + CALSIM_AHEAD + 2 <= rows && c < 2 * columns; c += 16)
      __builtin_prefetch(matrix + (r + CALSIM_AHEAD) * stride + c);
    calsim_dots(matrix + r * stride, matrix + (r + 1) * stride, x, columns, out);
    to[r] = factor * out[0];
    to[r + 1] = factor * out[1];
  }
  if (r == rows) return;
  calsim_dots(matrix + r * stride, matrix + r * stride, x, columns, out);
  to[r] = factor * out[0];
}

/* to[r] = row r of a dense row-major matrix [rows][columns] . x */
CALSIM_KERNEL void calsim_product(float *to, const float *matrix, const float *x, uint32_t rows,
                                  uint32_t columns) {
  calsim_rows(to, matrix, columns, x, rows, columns, 1.0f);
}

/* scores[t] = scale * (q . key of position t); `stride` floats lie between positions. */
CALSIM_KERNEL void calsim_scores(float *scores, const float *q, const float *keys, uint64_t stride,
                                 uint32_t positions, uint32_t head_dim, float scale) {
  calsim_rows(scores, keys, stride, q, positions, head_dim, scale);
}

/* sum over t in [begin, end) of weights[t] * values[t] in `4 * fours` dimensions; the order of t is
 * the order of the sum. */
static inline void calsim_mix_half(calsim_f4 *sums, const int fours, const float *weights,
                                   const float *values, uint64_t stride, uint32_t begin,
                                   uint32_t end) {
  for (int i = 0; i < fours; ++i) sums[i] = (calsim_f4){0};
  for (uint32_t t = begin; t < end; ++t)
    for (int i = 0; i < fours; ++i)
      sums[i] += weights[t] * calsim_load4(values + t * stride + 4 * i);
}

/* to[d] = factor * (sum over positions of weights[t] * values[t][d]) for `4 * fours` dimensions. */
static inline void calsim_mix_block(float *to, const int fours, const float *weights,
                                    const float *values, uint64_t stride, uint32_t positions,
                                    float factor) {
  calsim_f4 low[4], high[4];
  calsim_mix_half(low, fours, weights, values, stride, 0, positions / 2);
  calsim_mix_half(high, fours, weights, values, stride, positions / 2, positions);
  for (int i = 0; i < fours; ++i) {
    calsim_f4 sum = factor * (low[i] + high[i]);
    memcpy(to + 4 * i, &sum, sizeof sum);
  }
}

static inline float calsim_mix_one(const float *weights, const float *values, uint64_t stride,
                                   uint32_t begin, uint32_t end) {
  float sum = 0;
  for (uint32_t t = begin; t < end; ++t) sum += weights[t] * values[t * stride];
  return sum;
}

/* to[d] = factor * (sum over positions of weights[t] * values[t][d]), in two halves of the
 * positions. */
CALSIM_KERNEL void calsim_mix(float *to, const float *weights, const float *values, uint64_t stride,
                              uint32_t positions, uint32_t head_dim, float factor) {
  uint32_t d = 0;
  for (; d + 16 <= head_dim; d += 16)
    calsim_mix_block(to + d, 4, weights, values + d, stride, positions, factor);
  for (; d + 4 <= head_dim; d += 4)
    calsim_mix_block(to + d, 1, weights, values + d, stride, positions, factor);
  for (; d < head_dim; ++d) {
    float low = calsim_mix_one(weights, values + d, stride, 0, positions / 2);
    to[d] = factor * (low + calsim_mix_one(weights, values + d, stride, positions / 2, positions));
  }
}

static inline calsim_f4 calsim_choose(calsim_i4 mask, calsim_f4 yes, calsim_f4 no) {
  return (calsim_f4)(((calsim_i4)yes & mask) | ((calsim_i4)no & ~mask));
}

/* e^x, four at once, within 2 units in the last place; x is clamped to [-87, 88] and NaN stays NaN.
 * Written out because libm picks a variant by processor: its bits may differ between machines. */
static inline calsim_f4 calsim_exp4(calsim_f4 x) {
  /* 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits. */
  const float shift = 12582912.0f;
  const calsim_f4 low = {-87.0f, -87.0f, -87.0f, -87.0f}, high = {88.0f, 88.0f, 88.0f, 88.0f};
  x = calsim_choose(x < low, low, x);
  x = calsim_choose(x > high, high, x);
  calsim_f4 shifted = x * 1.44269504f + shift, n = shifted - shift;
  /* ln 2 in two parts; the first product is exact. */
  calsim_f4 r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  calsim_f4 p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * (r * r) + r + 1.0f;
  return p * (calsim_f4)(((calsim_u4)shifted + 127u) << 23); /* times 2^n */
}

/* Up to four floats, the rest 0: what is left at the end of an array. */
static inline calsim_f4 calsim_load(const float *at, uint32_t left) {
  calsim_f4 part = {0};
  if (left >= 4) return calsim_load4(at);
  for (uint32_t i = 0; i < left; ++i) part[i] = at[i];
  return part;
}

static inline void calsim_store(float *at, calsim_f4 values, uint32_t left) {
  if (left >= 4)
    memcpy(at, &values, sizeof values);
  else
    for (uint32_t i = 0; i < left; ++i) at[i] = values[i];
}

static inline float calsim_maximum(const float *values, uint32_t count) {
  calsim_f4 top = {values[0], values[0], values[0], values[0]};
  uint32_t i = 0;
  for (; i + 4 <= count; i += 4) {
    calsim_f4 v = calsim_load4(values + i);
    top = calsim_choose(v > top, v, top);
  }
  float maximum = values[0];
  for (int lane = 0; lane < 4; ++lane) maximum = top[lane] > maximum ? top[lane] : maximum;
  for (; i < count; ++i) maximum = values[i] > maximum ? values[i] : maximum;
  return maximum;
}

/* values[i] = e^(values[i] - maximum); returns their sum. */
CALSIM_KERNEL double calsim_exponentials(float *values, uint32_t count) {
  const float maximum = calsim_maximum(values, count);
  double sums[4] = {0};
  uint32_t i = 0;
  for (; i + 4 <= count; i += 4) {
    calsim_f4 e = calsim_exp4(calsim_load4(values + i) - maximum);
    for (int lane = 0; lane < 4; ++lane) sums[lane] += (double)e[lane];
    memcpy(values + i, &e, sizeof e);
  }
  calsim_store(values + i, calsim_exp4(calsim_load(values + i, count - i) - maximum), count - i);
  for (int lane = 0; i < count; ++i, ++lane) sums[lane] += (double)values[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/* gate[i] = silu(gate[i]) * up[i]. */
CALSIM_KERNEL void calsim_swiglu(float *gate, const float *up, uint32_t count) {
  for (uint32_t i = 0; i < count; i += 4) {
    calsim_f4 g = calsim_load(gate + i, count - i), u = calsim_load(up + i, count - i);
    calsim_store(gate + i, g / (1.0f + calsim_exp4(-g)) * u, count - i);
  }
}

CALSIM_KERNEL void calsim_add(float *to, const float *x, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) to[i] += x[i];
}

CALSIM_KERNEL void calsim_add_scaled(float *to, const float *x, float factor, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) to[i] += factor * x[i];
}

#endif
