/* calsim_memory.c - device memory: where a calbin's tensors and KV lie in the memory file of its
 * home chip, the kernel copies between host memory and that file, and the checks of host memory
 * in flight.
 *
 * The host pointer is never dereferenced here. The kernel reads or writes through it, so that
 * memory which the host has unmapped gives EFAULT, as a bus error would on a board, and not a
 * crash. */
#include "calsim_internal.h"
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const char *const TENSOR_NAMES[CALSIM_TENSORS] = {"tokens", "positions", "lengths", "logits",
                                                         "kv_digest"};

calsim_tensor calsim_tensor_of(const calsim_manifest *m, const calsim_submodel *s,
                               uint32_t tensor) {
  calsim_tensor t = {.name = TENSOR_NAMES[tensor],
                     .rows = s->max_batch,
                     .columns = 1,
                     .element_bytes = 4,
                     .direction = tensor < CALSIM_LOGITS ? CALSIM_IN : CALSIM_OUT,
                     .dtype = CALSIM_DTYPE_I32,
                     .rank = 1,
                     .slice_axes = 1};
  switch (tensor) {
    case CALSIM_TOKENS:
    case CALSIM_POSITIONS:
      t.columns = s->max_tokens;
      t.rank = 2;
      t.slice_axes = 3;
      break;
    case CALSIM_LOGITS:
      t.columns = m->shape.vocab;
      t.rank = 3;
      t.element_bytes = 2;
      t.dtype = CALSIM_DTYPE_BF16;
      break;
    case CALSIM_DIGEST:
      t.element_bytes = 8;
      t.dtype = CALSIM_DTYPE_U64;
      break;
    default: break;
  }
  return t;
}

uint64_t calsim_tensor_row_bytes(const calsim_tensor *t) {
  return (uint64_t)t->columns * t->element_bytes;
}

static uint64_t page_up(uint64_t bytes) {
  return (bytes + CALSIM_PAGE - 1) / CALSIM_PAGE * CALSIM_PAGE;
}

calsim_layout calsim_layout_of(const calsim_manifest *m) {
  calsim_layout layout = {.kv_lane_bytes = page_up(calsim_kv_floats_per_lane(m) * sizeof(float))};
  for (uint32_t bank = 0; bank < CALSIM_BANKS; ++bank) {
    for (uint32_t tensor = 0; tensor < CALSIM_TENSORS; ++tensor) {
      uint64_t largest = 0;
      for (uint32_t i = 0; i < m->submodel_count; ++i) {
        calsim_tensor t = calsim_tensor_of(m, &m->submodels[i], tensor);
        uint64_t bytes = calsim_tensor_row_bytes(&t) * t.rows;
        if (bytes > largest) largest = bytes;
      }
      layout.tensor[bank][tensor] = layout.bytes;
      layout.bytes += page_up(largest);
    }
  }
  layout.kv = layout.bytes;
  layout.bytes += layout.kv_lane_bytes * (m->lanes + (m->lane_rule == CALSIM_RULE_SCRATCH));
  return layout;
}

npurt_status calsim_memory_attach(calsim_device *d, calsim_calbin *c) {
  calsim_chip *chip = &d->chips[c->home_chip];
  if (ftruncate(chip->fd, (off_t)c->layout.bytes) != 0)
    return calsim_error(NPURT_E_HOST_MEMORY, "no room for %llu bytes of device memory: %s",
                        (unsigned long long)c->layout.bytes, strerror(errno));
  void *map =
      mmap(NULL, c->layout.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, chip->fd, 0);
  if (map == MAP_FAILED) {
    npurt_status status =
        calsim_error(NPURT_E_HOST_MEMORY, "device memory cannot be mapped: %s", strerror(errno));
    if (ftruncate(chip->fd, 0) != 0)
      calsim_trace(d, "memory file of chip %u keeps its size", c->home_chip);
    return status;
  }
  chip->map = map;
  chip->bytes = c->layout.bytes;
  return NPURT_OK;
}

void calsim_memory_detach(calsim_device *d, const calsim_calbin *c) {
  calsim_chip *chip = &d->chips[c->home_chip];
  if (chip->map == NULL) return;
  munmap(chip->map, chip->bytes);
  chip->map = NULL;
  chip->bytes = 0;
  if (ftruncate(chip->fd, 0) != 0)
    calsim_trace(d, "memory file of chip %u keeps its size", c->home_chip);
}

uint8_t *calsim_address(const calsim_calbin *c, uint32_t engine, uint32_t tensor) {
  return c->device->chips[c->home_chip].map + c->layout.tensor[engine - 1][tensor];
}

/* ---- transfers ------------------------------------------------------------------------- */

typedef struct part { /* contiguous bytes that a job transfers of one tensor */
  uint8_t *host;
  uint64_t address, bytes;
} part;

/* One part, or one a row where a slice leaves columns out; none where nothing is mapped. */
static uint32_t part_count(const calsim_job *job, uint32_t tensor) {
  const calsim_view *view = &job->views[tensor];
  calsim_tensor t = calsim_tensor_of(job->calbin->m, job->submodel, tensor);
  if (view->host == NULL) return 0;
  return view->column_count == t.columns ? 1 : view->row_count;
}

/* The bank that a job's tensor lies in; by fault swapped_output an output comes from the other. */
static uint32_t bank_of(const calsim_job *job, uint32_t tensor) {
  bool swapped = job->damage.kind == CALSIM_SWAPPED_OUTPUT && tensor >= CALSIM_LOGITS;
  return swapped ? CALSIM_BANKS - job->engine : job->engine - 1;
}

static part part_of(const calsim_job *job, uint32_t tensor, uint32_t i) {
  const calsim_view *view = &job->views[tensor];
  calsim_tensor t = calsim_tensor_of(job->calbin->m, job->submodel, tensor);
  uint64_t row_bytes = calsim_tensor_row_bytes(&t);
  bool whole = view->column_count == t.columns;
  return (part){.host = view->host + (view->row_first + i) * row_bytes +
                        (uint64_t)view->column_first * t.element_bytes,
                .address = job->calbin->layout.tensor[bank_of(job, tensor)][tensor] + i * row_bytes,
                .bytes = whole ? row_bytes * view->row_count
                               : (uint64_t)view->column_count * t.element_bytes};
}

/* Copy one part in pieces, with a chance to be aborted or descheduled between two. */
static npurt_status copy_part(calsim_job *job, uint32_t direction, part p) {
  int fd = job->device->chips[job->calbin->home_chip].fd;
  while (p.bytes > 0) {
    if (atomic_load(&job->abort)) return NPURT_E_JOB_ABORTED;
    size_t piece = p.bytes < CALSIM_PIECE ? p.bytes : CALSIM_PIECE;
    if (job->dma_fails && piece > job->dma_left) piece = job->dma_left;
    if (piece == 0) return NPURT_E_DMA;
    ssize_t done = direction == CALSIM_IN ? pwrite(fd, p.host, piece, (off_t)p.address)
                                          : pread(fd, p.host, piece, (off_t)p.address);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) {
      snprintf(job->reason, sizeof job->reason, "kernel copy failed: %s",
               done < 0 ? strerror(errno) : "nothing copied");
      return NPURT_E_DMA;
    }
    p.host += done;
    p.address += (uint64_t)done;
    p.bytes -= (uint64_t)done;
    if (job->dma_fails) job->dma_left -= (uint64_t)done;
    if (p.bytes > 0) sched_yield();
  }
  return NPURT_OK;
}

static npurt_status transfer(calsim_job *job, uint32_t first, uint32_t end, uint32_t *gone) {
  uint32_t direction = first < CALSIM_LOGITS ? CALSIM_IN : CALSIM_OUT;
  for (uint32_t tensor = first; tensor < end; ++tensor) {
    for (uint32_t i = 0; i < part_count(job, tensor); ++i) {
      *gone = tensor;
      npurt_status status = copy_part(job, direction, part_of(job, tensor, i));
      if (status != NPURT_OK) return status;
    }
  }
  return job->dma_fails ? NPURT_E_DMA : NPURT_OK;
}

static npurt_status refuse_input(calsim_job *job, uint32_t row, const char *what, long long found,
                                 long long expected) {
  snprintf(job->reason, sizeof job->reason, "row %u: %s %lld, expected %lld", row, what, found,
           expected);
  return NPURT_E_INVALID_ARG;
}

/* The tensors that arrived must say what the submit said. */
static npurt_status check_inputs(calsim_job *job) {
  const calsim_calbin *c = job->calbin;
  const int32_t *tokens = (const int32_t *)calsim_address(c, job->engine, CALSIM_TOKENS);
  const int32_t *positions = (const int32_t *)calsim_address(c, job->engine, CALSIM_POSITIONS);
  const int32_t *lengths = (const int32_t *)calsim_address(c, job->engine, CALSIM_LENGTHS);
  for (uint32_t row = 0; row < job->row_count; ++row) {
    const npurt_lane *lane = &job->rows[row];
    if (!lane->active && c->m->lane_rule == CALSIM_RULE_MASK_CSR) continue;
    uint32_t count = lane->active ? lane->tokens : 0;
    const uint64_t first = (uint64_t)row * job->submodel->max_tokens;
    if (lengths[row] != (int32_t)count)
      return refuse_input(job, row, "lengths holds", lengths[row], count);
    for (uint32_t i = 0; i < count; ++i) {
      int32_t token = tokens[first + i], position = positions[first + i];
      if (token < 0 || (uint32_t)token >= c->m->shape.vocab) {
        snprintf(job->reason, sizeof job->reason, "row %u: token %d is not in the vocabulary of %u",
                 row, token, c->m->shape.vocab);
        return NPURT_E_INVALID_ARG;
      }
      if (position != (int32_t)(lane->kv_len + i))
        return refuse_input(job, row, "positions holds", position, (long long)lane->kv_len + i);
    }
  }
  return NPURT_OK;
}

/* ---- checks of host memory in flight ---------------------------------------------------- */

/* Several holders may look at host memory at once: who has the lock, and the phase of each bank
 * that runs without it, which goes by the bank's number. */
enum { WITH_LOCK };

/* Four undefined BF16 numbers that carry 28 bits of the ticket. */
static uint64_t tag_of(const calsim_job *job) {
  uint64_t tag = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    uint64_t bits = job->ticket >> (7 * i) & 0x7f;
    tag |= (0x7fc0 | (bits & 0x3f) | (bits >> 6) << 15) << (16 * i);
  }
  return tag;
}

/* Bring up to a piece of host memory into the scratch memory; NULL when it is not there. */
static const uint8_t *look_at(const calsim_device *d, int holder, const uint8_t *host,
                              size_t bytes) {
  ssize_t done;
  do done = pwrite(d->scratch_fd, host, bytes, (off_t)holder * CALSIM_PIECE);
  while (done < 0 && errno == EINTR);
  return done >= 0 && (size_t)done == bytes ? d->scratch + (size_t)holder * CALSIM_PIECE : NULL;
}

/* The tag as it lies from this address on, if words of it lie at multiples of eight. */
static uint64_t tag_from(uint64_t tag, const uint8_t *host) {
  uint8_t in_place[8], from[8];
  memcpy(in_place, &tag, sizeof tag);
  for (size_t i = 0; i < 8; ++i) from[i] = in_place[((uintptr_t)host + i) % 8];
  memcpy(&tag, from, sizeof tag);
  return tag;
}

/* Write a tag over host memory, in place by address; false when some of it is not there. */
static bool write_tag(const calsim_device *d, int holder, uint64_t tag, uint8_t *host,
                      uint64_t bytes) {
  uint8_t *scratch = d->scratch + (size_t)holder * CALSIM_PIECE;
  while (bytes > 0) {
    size_t piece = bytes < CALSIM_PIECE ? bytes : CALSIM_PIECE;
    uint64_t word = tag_from(tag, host);
    for (size_t at = 0; at < piece; at += 8)
      memcpy(scratch + at, &word, piece - at < 8 ? piece - at : 8);
    ssize_t done = pread(d->scratch_fd, host, piece, (off_t)holder * CALSIM_PIECE);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    host += done;
    bytes -= (uint64_t)done;
  }
  return true;
}

static uint64_t hash_bytes(uint64_t hash, const uint8_t *bytes, uint64_t count) {
  for (; count > 0; ++bytes, --count) hash = (hash ^ *bytes) * 0x100000001b3u;
  return hash;
}

static const uint64_t HASH_BEGIN = 0xcbf29ce484222325u;

/* Hash an input as it lies in host memory; 0 when some of it is not there. */
static uint64_t hash_host(const calsim_job *job, uint32_t tensor) {
  uint64_t hash = HASH_BEGIN;
  for (uint32_t i = 0; i < part_count(job, tensor); ++i) {
    part p = part_of(job, tensor, i);
    while (p.bytes > 0) {
      size_t piece = p.bytes < CALSIM_PIECE ? p.bytes : CALSIM_PIECE;
      const uint8_t *seen = look_at(job->device, WITH_LOCK, p.host, piece);
      if (seen == NULL) return 0;
      hash = hash_bytes(hash, seen, piece);
      p.host += piece;
      p.bytes -= piece;
    }
  }
  return hash;
}

/* Hold what was transferred against what was there at submit. */
static void compare_inputs(calsim_job *job) {
  const uint8_t *memory = job->device->chips[job->calbin->home_chip].map;
  for (uint32_t tensor = 0; tensor < CALSIM_LOGITS; ++tensor) {
    if (job->input_hash[tensor] == 0) continue;
    uint64_t hash = HASH_BEGIN;
    for (uint32_t i = 0; i < part_count(job, tensor); ++i) {
      part p = part_of(job, tensor, i);
      hash = hash_bytes(hash, memory + p.address, p.bytes);
    }
    if (hash != job->input_hash[tensor]) job->touched |= 1u << tensor;
  }
}

/* Is the tag whole in a tagged output (wanted = true), or is nothing of it left? An output that is
 * not there any more is left to the transfer. */
static bool tag_stands(const calsim_job *job, int holder, uint32_t tensor, bool wanted) {
  uint64_t tag = tag_of(job);
  for (uint32_t i = 0; i < part_count(job, tensor); ++i) {
    part p = part_of(job, tensor, i);
    while (p.bytes > 0) {
      size_t piece = p.bytes < CALSIM_PIECE ? p.bytes : CALSIM_PIECE;
      const uint8_t *seen = look_at(job->device, holder, p.host, piece);
      if (seen == NULL) return true;
      uint64_t word = tag_from(tag, p.host);
      for (size_t at = 0; wanted && at < piece; at += 8)
        if (memcmp(seen + at, &word, piece - at < 8 ? piece - at : 8) != 0) return false;
      for (size_t at = -(uintptr_t)p.host % 8; !wanted && at + 8 <= piece; at += 8)
        if (memcmp(seen + at, &tag, 8) == 0) return false;
      p.host += piece;
      p.bytes -= piece;
    }
  }
  return true;
}

static void tag_outputs(const calsim_device *d, calsim_job *job) {
  for (uint32_t tensor = CALSIM_LOGITS; tensor < CALSIM_TENSORS; ++tensor) {
    bool there = part_count(job, tensor) > 0;
    for (uint32_t i = 0; i < part_count(job, tensor); ++i) {
      part p = part_of(job, tensor, i);
      there &= write_tag(d, WITH_LOCK, tag_of(job), p.host, p.bytes);
    }
    if (there) job->tagged |= 1u << tensor;
  }
}

/* Is an element of the tokens in use by this job? `index` counts from the map's begin. */
static bool is_used(const calsim_job *job, uint64_t index) {
  const calsim_view *view = &job->views[CALSIM_TOKENS];
  uint64_t row = index / job->submodel->max_tokens, column = index % job->submodel->max_tokens;
  if (row < view->row_first || column < view->column_first) return false;
  row -= view->row_first;
  return row < job->row_count && job->rows[row].active &&
         column - view->column_first < job->rows[row].tokens;
}

/* Remember the tokens of this job; return the row in which one of the job before is left, or
 * UINT32_MAX. */
static uint32_t take_tokens(const calsim_device *d, const calsim_job *job) {
  uint32_t found = UINT32_MAX, columns = job->submodel->max_tokens;
  int32_t *left = job->in->left, token;
  for (uint32_t i = 0; i < part_count(job, CALSIM_TOKENS); ++i) {
    part p = part_of(job, CALSIM_TOKENS, i);
    uint64_t index = (uint64_t)(p.host - job->views[CALSIM_TOKENS].host) / sizeof token;
    for (; p.bytes > 0; p.host += CALSIM_PIECE) {
      size_t piece = p.bytes < CALSIM_PIECE ? p.bytes : CALSIM_PIECE;
      const uint8_t *seen = look_at(d, WITH_LOCK, p.host, piece);
      if (seen == NULL) return found;
      for (size_t at = 0; at < piece; at += sizeof token, ++index) {
        memcpy(&token, seen + at, sizeof token);
        bool used = is_used(job, index);
        if (!used && left[index] != 0 && left[index] == token && found == UINT32_MAX)
          found = (uint32_t)(index / columns);
        left[index] = used ? token : 0;
      }
      p.bytes -= piece;
    }
  }
  return found;
}

static void check_reuse(calsim_device *d, calsim_job *job) {
  enum { SLICES_AND_TENSORS = 3 };
  calsim_buffer *both[] = {job->in, job->out};
  for (uint32_t i = 0; i < 2; ++i)
    if (both[i]->job_count > 0 && (both[i]->restored & SLICES_AND_TENSORS) != SLICES_AND_TENSORS)
      calsim_violation(d, job, NPURT_E_BAD_STATE,
                       "NOT_RESTORED %s buffer: not restored since its latest job was retired",
                       i == 0 ? "input" : "output");
  if (job->in->left == NULL)
    job->in->left = calloc((size_t)job->in->rows * job->submodel->max_tokens, sizeof(int32_t));
  if (job->in->left == NULL) return; /* no memory to remember by: nothing is claimed */
  uint32_t row = take_tokens(d, job);
  if (row != UINT32_MAX)
    calsim_violation(d, job, NPURT_E_BAD_STATE,
                     "INPUT_NOT_WIPED tensor tokens row %u: tokens of the buffer's latest job",
                     row);
}

void calsim_check_submit(calsim_device *d, calsim_job *job) {
  if ((d->config.checks & CALSIM_CHECK_REUSE) != 0) check_reuse(d, job);
  if ((d->config.checks & CALSIM_CHECK_INPUT) != 0)
    for (uint32_t tensor = 0; tensor < CALSIM_LOGITS; ++tensor)
      job->input_hash[tensor] = hash_host(job, tensor);
  if ((d->config.checks & CALSIM_CHECK_OUTPUT) != 0) tag_outputs(d, job);
}

void calsim_check_report(calsim_device *d, calsim_job *job) {
  for (uint32_t tensor = 0; tensor < CALSIM_TENSORS; ++tensor) {
    if ((job->touched >> tensor & 1) == 0) continue;
    part p = part_of(job, tensor, 0);
    bool input = tensor < CALSIM_LOGITS;
    calsim_violation(d, job, NPURT_E_OBJECT_IN_FLIGHT, "%s tensor %s from byte %llu: written %s",
                     input ? "INPUT_TOUCHED" : "OUTPUT_TOUCHED",
                     calsim_tensor_of(job->calbin->m, job->submodel, tensor).name,
                     (unsigned long long)(p.host - job->views[tensor].host),
                     input ? "between submit and transfer" : "before the device wrote it");
  }
  job->touched = 0;
}

void calsim_check_retire(calsim_device *d, const calsim_job *job) {
  bool checked = (d->config.checks & CALSIM_CHECK_REUSE) != 0;
  if (!checked || (job->flags & CALSIM_FLAG_OUTPUT_VALID) == 0) return;
  for (uint32_t tensor = CALSIM_LOGITS; tensor < CALSIM_TENSORS; ++tensor)
    if ((job->tagged >> tensor & 1) != 0 && !tag_stands(job, WITH_LOCK, tensor, false))
      calsim_violation(d, job, NPURT_E_DMA, "TAG_LEFT tensor %s: valid output with the tag in it",
                       calsim_tensor_of(job->calbin->m, job->submodel, tensor).name);
}

npurt_status calsim_write_late(calsim_job *job) {
  uint64_t left = job->late_bytes;
  for (uint32_t i = 0; i < part_count(job, CALSIM_LOGITS) && left > 0; ++i) {
    part p = part_of(job, CALSIM_LOGITS, i);
    uint64_t bytes = p.bytes < left ? p.bytes : left;
    if (!write_tag(job->device, (int)job->engine, tag_of(job), p.host, bytes)) return NPURT_E_DMA;
    left -= bytes;
  }
  return NPURT_OK;
}

npurt_status calsim_transfer_in(calsim_job *job, uint32_t *gone) {
  npurt_status status = transfer(job, CALSIM_TOKENS, CALSIM_LOGITS, gone);
  if (status != NPURT_OK) return status;
  compare_inputs(job);
  return check_inputs(job);
}

npurt_status calsim_transfer_out(calsim_job *job, uint32_t *gone) {
  for (uint32_t tensor = CALSIM_LOGITS; tensor < CALSIM_TENSORS; ++tensor)
    if ((job->tagged >> tensor & 1) != 0 && !tag_stands(job, (int)job->engine, tensor, true))
      job->touched |= 1u << tensor;
  return transfer(job, CALSIM_LOGITS, CALSIM_TENSORS, gone);
}

/* ---- ranges in flight ------------------------------------------------------------------ */

bool calsim_views_overlap(const calsim_view *a, const calsim_view *b) {
  if (a->host == NULL || b->host == NULL) return false;
  uintptr_t a_first = (uintptr_t)a->host, b_first = (uintptr_t)b->host;
  return a_first < b_first + b->bytes && b_first < a_first + a->bytes;
}

const calsim_job *calsim_overlaps_in_flight(const calsim_device *d, const calsim_view *view,
                                            uint32_t direction) {
  for (uint32_t i = 0; i < d->job_count; ++i) {
    for (uint32_t tensor = 0; tensor < CALSIM_TENSORS; ++tensor) {
      bool writes = direction == CALSIM_OUT || tensor >= CALSIM_LOGITS;
      if (writes && calsim_views_overlap(view, &d->jobs[i]->views[tensor])) return d->jobs[i];
    }
  }
  return NULL;
}
