/* calsim_forward.c - the Qwen3 and Qwen3-MoE forward of the simulated board (specs/calbin.md), in
 * float32.
 *
 * A prompt is cut into pieces of PIECE tokens and each layer handles the piece token by token, so
 * that the layer's parameters stay in the cache. What a token reads are only its own vector and the
 * KV of earlier positions of the same layer; the result is therefore the same, in bits, as token
 * after token through all layers. */
#include "calsim_artifact.h"
#include "calsim_kernels.h"
#include <math.h>
#include <stdlib.h>

enum { PIECE = 32 };
static const uint32_t NOT_ROUTED = UINT32_MAX;

struct calsim_workspace {
  float *x;                                       /* [PIECE][hidden] residual stream */
  float *cosine, *sine;                           /* [PIECE][head_dim / 2] */
  float *normed, *projected, *moe_low, *moe_high; /* [hidden] */
  float *q, *mixed;                               /* [heads x head_dim] */
  float *scores;                                  /* [context] */
  float *gate, *up;                               /* [intermediate or moe_intermediate] */
  float *router;                                  /* [experts] */
  float *logits;                                  /* [vocab] */
  uint32_t *rank; /* [experts] place among the chosen, or NOT_ROUTED */
  float *floats;  /* owns the above */
};

/* One token on its way through one layer. */
typedef struct step {
  const calsim_artifact *a;
  calsim_workspace *w;
  const calsim_row *row;
  uint32_t index;    /* of the token in the row */
  uint32_t position; /* in the lane */
  uint32_t layer;
  float *x;                   /* [hidden] */
  const float *cosine, *sine; /* [head_dim / 2] */
} step;

/* ---- workspace ------------------------------------------------------------------------------ */

calsim_workspace *calsim_workspace_create(const calsim_artifact *a) {
  const calsim_shape *s = &a->manifest.shape;
  uint64_t width = s->experts ? s->moe_intermediate : s->intermediate;
  uint64_t heads = (uint64_t)s->heads * s->head_dim;
  calsim_workspace *w = calloc(1, sizeof *w);
  if (!w) return NULL;
  struct {
    float **at;
    uint64_t count;
  } parts[] = {{&w->x, (uint64_t)PIECE * s->hidden},
               {&w->cosine, (uint64_t)PIECE * s->head_dim / 2},
               {&w->sine, (uint64_t)PIECE * s->head_dim / 2},
               {&w->normed, s->hidden},
               {&w->projected, s->hidden},
               {&w->moe_low, s->hidden},
               {&w->moe_high, s->hidden},
               {&w->q, heads},
               {&w->mixed, heads},
               {&w->scores, a->manifest.context},
               {&w->gate, width},
               {&w->up, width},
               {&w->router, s->experts},
               {&w->logits, s->vocab}};
  const uint32_t count = sizeof parts / sizeof *parts;
  uint64_t total = 0;
  for (uint32_t i = 0; i < count; ++i) total += (parts[i].count + 15) / 16 * 16;
  w->floats = aligned_alloc(64, (size_t)total * sizeof(float));
  w->rank = calloc((size_t)s->experts + 1, sizeof *w->rank);
  if (!w->floats || !w->rank) {
    calsim_workspace_destroy(w);
    return NULL;
  }
  float *next = w->floats;
  for (uint32_t i = 0; i < count; ++i) {
    *parts[i].at = next;
    next += (parts[i].count + 15) / 16 * 16;
  }
  return w;
}

void calsim_workspace_destroy(calsim_workspace *w) {
  if (!w) return;
  free(w->floats);
  free(w->rank);
  free(w);
}

/* ---- parts of a layer ----------------------------------------------------------------------- */

static void rms_norm(float *to, const float *x, const float *weight, uint32_t count,
                     double epsilon) {
  double squares = 0;
  for (uint32_t i = 0; i < count; ++i) squares += (double)x[i] * (double)x[i];
  float factor = (float)(1.0 / sqrt(squares / count + epsilon));
  for (uint32_t i = 0; i < count; ++i) to[i] = x[i] * factor * weight[i];
}

/* The angle is rounded to float32 before cosine and sine, as the reference does it. */
static void fill_angles(const calsim_artifact *a, uint32_t position, float *cosine, float *sine) {
  for (uint32_t i = 0; i < a->manifest.shape.head_dim / 2; ++i) {
    float angle = (float)position * a->inv_freq[i];
    cosine[i] = (float)cos((double)angle);
    sine[i] = (float)sin((double)angle);
  }
}

/* Norm and rotation of `heads` vectors in place. */
static void norm_and_rotate(const step *s, float *vectors, const float *weight, uint32_t heads) {
  const calsim_shape *shape = &s->a->manifest.shape;
  uint32_t half = shape->head_dim / 2;
  for (uint32_t h = 0; h < heads; ++h) {
    float *v = vectors + (uint64_t)h * shape->head_dim;
    rms_norm(v, v, weight, shape->head_dim, shape->rms_norm_eps);
    for (uint32_t i = 0; i < half; ++i) {
      float low = v[i], high = v[i + half];
      v[i] = low * s->cosine[i] - high * s->sine[i];
      v[i + half] = high * s->cosine[i] + low * s->sine[i];
    }
  }
}

static void attention(const step *s) {
  const calsim_shape *shape = &s->a->manifest.shape;
  const calsim_layer *layer = &s->a->layers[s->layer];
  calsim_workspace *w = s->w;
  uint32_t q_width = shape->heads * shape->head_dim, kv_width = shape->kv_heads * shape->head_dim;
  uint32_t group = shape->heads / shape->kv_heads, positions = s->position + 1;
  uint64_t stride = 2ull * kv_width;
  float *lane = s->row->kv + (uint64_t)s->layer * s->a->manifest.context * stride;
  float *k = lane + s->position * stride, *v = k + kv_width;
  float scale = (float)(1.0 / sqrt((double)shape->head_dim));

  rms_norm(w->normed, s->x, layer->input_norm, shape->hidden, shape->rms_norm_eps);
  calsim_product(w->q, layer->q, w->normed, q_width, shape->hidden);
  calsim_product(k, layer->k, w->normed, kv_width, shape->hidden);
  calsim_product(v, layer->v, w->normed, kv_width, shape->hidden);
  norm_and_rotate(s, w->q, layer->q_norm, shape->heads);
  norm_and_rotate(s, k, layer->k_norm, shape->kv_heads);
  for (uint32_t h = 0; h < shape->heads; ++h) {
    uint64_t at = (uint64_t)h * shape->head_dim, kv_at = (uint64_t)(h / group) * shape->head_dim;
    calsim_scores(w->scores, w->q + at, lane + kv_at, stride, positions, shape->head_dim, scale);
    float factor = (float)(1.0 / calsim_exponentials(w->scores, positions));
    calsim_mix(w->mixed + at, w->scores, lane + kv_width + kv_at, stride, positions,
               shape->head_dim, factor);
  }
  calsim_product(w->projected, layer->o, w->mixed, shape->hidden, q_width);
  calsim_add(s->x, w->projected, shape->hidden);
}

/* projected = down(silu(gate(normed)) * up(normed)) with matrix number `expert` of each kind. */
static void swiglu(const step *s, uint32_t expert, uint32_t width) {
  const calsim_layer *layer = &s->a->layers[s->layer];
  calsim_workspace *w = s->w;
  uint32_t hidden = s->a->manifest.shape.hidden;
  uint64_t at = (uint64_t)expert * width * hidden;
  calsim_product(w->gate, layer->gate + at, w->normed, width, hidden);
  calsim_product(w->up, layer->up + at, w->normed, width, hidden);
  calsim_swiglu(w->gate, w->up, width);
  calsim_product(w->projected, layer->down + at, w->gate, hidden, width);
}

/* Choose the experts: the largest probabilities, ties (and NaN, which spoils all of them at once)
 * to the lower index. Leaves the probabilities in w->router and the place of each chosen expert in
 * w->rank; returns the divisor. */
static float route(const step *s) {
  const calsim_shape *shape = &s->a->manifest.shape;
  calsim_workspace *w = s->w;
  calsim_product(w->router, s->a->layers[s->layer].router, w->normed, shape->experts,
                 shape->hidden);
  float factor = (float)(1.0 / calsim_exponentials(w->router, shape->experts)), sum = 0;
  for (uint32_t e = 0; e < shape->experts; ++e) {
    w->router[e] *= factor;
    w->rank[e] = NOT_ROUTED;
  }
  for (uint32_t k = 0; k < shape->experts_per_token; ++k) {
    uint32_t best = NOT_ROUTED;
    for (uint32_t e = 0; e < shape->experts; ++e)
      if (w->rank[e] == NOT_ROUTED && (best == NOT_ROUTED || w->router[e] > w->router[best]))
        best = e;
    w->rank[best] = k;
    sum += w->router[best];
  }
  return shape->norm_topk_prob ? sum : 1.0f;
}

/* The experts of each half of the index range have their own sum, as on two chips. */
static void mixture(const step *s) {
  const calsim_shape *shape = &s->a->manifest.shape;
  calsim_workspace *w = s->w;
  uint32_t top = shape->experts_per_token;
  uint64_t capture = ((uint64_t)s->index * shape->layers + s->layer) * top;
  float divisor = route(s);
  memset(w->moe_low, 0, shape->hidden * sizeof(float));
  memset(w->moe_high, 0, shape->hidden * sizeof(float));
  for (uint32_t e = 0; e < shape->experts; ++e) {
    if (w->rank[e] == NOT_ROUTED) continue;
    float weight = w->router[e] / divisor;
    swiglu(s, e, shape->moe_intermediate);
    calsim_add_scaled(e < shape->experts / 2 ? w->moe_low : w->moe_high, w->projected, weight,
                      shape->hidden);
    if (s->row->route_idx) s->row->route_idx[capture + w->rank[e]] = (int32_t)e;
    if (s->row->route_weight) s->row->route_weight[capture + w->rank[e]] = weight;
  }
  calsim_add(w->moe_low, w->moe_high, shape->hidden);
  calsim_add(s->x, w->moe_low, shape->hidden);
}

static void feed_forward(const step *s) {
  const calsim_shape *shape = &s->a->manifest.shape;
  const calsim_layer *layer = &s->a->layers[s->layer];
  rms_norm(s->w->normed, s->x, layer->post_norm, shape->hidden, shape->rms_norm_eps);
  if (shape->experts) {
    mixture(s);
  } else {
    swiglu(s, 0, shape->intermediate);
    calsim_add(s->x, s->w->projected, shape->hidden);
  }
}

/* ---- head ----------------------------------------------------------------------------------- */

/* Round to nearest, ties to even; a NaN stays a (quiet) NaN whatever its low bits are. */
static uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

/* Logits of one token, if anybody wants them. */
static void head(const step *s) {
  const calsim_shape *shape = &s->a->manifest.shape;
  const calsim_row *row = s->row;
  bool last = s->index + 1 == row->token_count;
  if (!row->logits_f32 && !last) return;
  float *logits =
      row->logits_f32 ? row->logits_f32 + (uint64_t)s->index * shape->vocab : s->w->logits;
  rms_norm(s->w->normed, s->x, s->a->final_norm, shape->hidden, shape->rms_norm_eps);
  calsim_product(logits, s->a->head, s->w->normed, shape->vocab, shape->hidden);
  if (!last) return;
  for (uint32_t i = 0; i < shape->vocab; ++i) row->logits_bf16[i] = to_bf16(logits[i]);
}

/* ---- the forward ---------------------------------------------------------------------------- */

static step step_at(const calsim_artifact *a, calsim_workspace *w, const calsim_row *row,
                    uint32_t first, uint32_t i) {
  uint64_t half = a->manifest.shape.head_dim / 2;
  return (step){.a = a,
                .w = w,
                .row = row,
                .index = first + i,
                .position = row->position + first + i,
                .x = w->x + (uint64_t)i * a->manifest.shape.hidden,
                .cosine = w->cosine + i * half,
                .sine = w->sine + i * half};
}

void calsim_forward(const calsim_artifact *a, calsim_workspace *w, const calsim_row *row) {
  const calsim_shape *shape = &a->manifest.shape;
  uint64_t half = shape->head_dim / 2;
  for (uint32_t first = 0; first < row->token_count; first += PIECE) {
    uint32_t count = row->token_count - first < PIECE ? row->token_count - first : PIECE;
    for (uint32_t i = 0; i < count; ++i) {
      const float *embedding =
          a->embed + (uint64_t)(uint32_t)row->tokens[first + i] * shape->hidden;
      memcpy(w->x + (uint64_t)i * shape->hidden, embedding, shape->hidden * sizeof(float));
      fill_angles(a, row->position + first + i, w->cosine + i * half, w->sine + i * half);
    }
    for (uint32_t layer = 0; layer < shape->layers; ++layer)
      for (uint32_t i = 0; i < count; ++i) {
        step s = step_at(a, w, row, first, i);
        s.layer = layer;
        attention(&s);
        feed_forward(&s);
      }
    for (uint32_t i = 0; i < count; ++i) {
      step s = step_at(a, w, row, first, i);
      head(&s);
    }
  }
}
