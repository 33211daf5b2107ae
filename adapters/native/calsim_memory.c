/* calsim_memory.c - device memory: where a calbin's tensors and KV lie in the memory file of its
 * home chip, and the kernel copies between host memory and that file.
 *
 * The host pointer is never dereferenced here. The kernel reads or writes through it, so that
 * memory which the host has unmapped gives EFAULT, as a bus error would on a board, and not a
 * crash. */
#include "calsim_internal.h"
#include <errno.h>
#include <sched.h>
#include <stdio.h>
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
  layout.bytes += layout.kv_lane_bytes * m->lanes;
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

uint64_t calsim_chip_used(const calsim_chip *chip) {
  return chip->params + chip->kv + chip->workspace + chip->dynamic;
}

/* ---- transfers ------------------------------------------------------------------------- */

/* Copy one contiguous range in pieces, with a chance to be aborted or descheduled between two. */
static npurt_status copy_range(calsim_job *job, uint32_t direction, uint8_t *host, uint64_t address,
                               uint64_t bytes) {
  int fd = job->device->chips[job->calbin->home_chip].fd;
  while (bytes > 0) {
    if (atomic_load(&job->abort)) return NPURT_E_JOB_ABORTED;
    size_t piece = bytes < CALSIM_PIECE ? bytes : CALSIM_PIECE;
    ssize_t done = direction == CALSIM_IN ? pwrite(fd, host, piece, (off_t)address)
                                          : pread(fd, host, piece, (off_t)address);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) {
      snprintf(job->reason, sizeof job->reason, "kernel copy failed: %s",
               done < 0 ? strerror(errno) : "nothing copied");
      return NPURT_E_DMA;
    }
    host += done;
    address += (uint64_t)done;
    bytes -= (uint64_t)done;
    if (bytes > 0) sched_yield();
  }
  return NPURT_OK;
}

static npurt_status copy_tensor(calsim_job *job, uint32_t tensor) {
  calsim_tensor t = calsim_tensor_of(job->calbin->m, job->submodel, tensor);
  const calsim_view *view = &job->views[tensor];
  uint64_t row_bytes = calsim_tensor_row_bytes(&t);
  uint64_t address = job->calbin->layout.tensor[job->engine - 1][tensor];
  uint8_t *host =
      view->host + view->row_first * row_bytes + (uint64_t)view->column_first * t.element_bytes;
  if (view->column_count == t.columns)
    return copy_range(job, t.direction, host, address, row_bytes * view->row_count);
  npurt_status status = NPURT_OK;
  for (uint32_t row = 0; row < view->row_count && status == NPURT_OK; ++row)
    status = copy_range(job, t.direction, host + row * row_bytes, address + row * row_bytes,
                        (uint64_t)view->column_count * t.element_bytes);
  return status;
}

static npurt_status transfer(calsim_job *job, uint32_t first, uint32_t end, uint32_t *gone) {
  for (uint32_t tensor = first; tensor < end; ++tensor) {
    if (job->views[tensor].host == NULL) continue;
    *gone = tensor;
    npurt_status status = copy_tensor(job, tensor);
    if (status != NPURT_OK) return status;
  }
  return NPURT_OK;
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

npurt_status calsim_transfer_in(calsim_job *job, uint32_t *gone) {
  npurt_status status = transfer(job, CALSIM_TOKENS, CALSIM_LOGITS, gone);
  return status == NPURT_OK ? check_inputs(job) : status;
}

npurt_status calsim_transfer_out(calsim_job *job, uint32_t *gone) {
  return transfer(job, CALSIM_LOGITS, CALSIM_TENSORS, gone);
}

/* ---- ranges in flight ------------------------------------------------------------------ */

bool calsim_views_overlap(const calsim_view *a, const calsim_view *b) {
  if (a->host == NULL || b->host == NULL) return false;
  uintptr_t a_first = (uintptr_t)a->host, b_first = (uintptr_t)b->host;
  return a_first < b_first + b->bytes && b_first < a_first + a->bytes;
}

bool calsim_overlaps_in_flight(const calsim_device *d, const calsim_view *view,
                               uint32_t direction) {
  for (uint32_t i = 0; i < d->job_count; ++i) {
    for (uint32_t tensor = 0; tensor < CALSIM_TENSORS; ++tensor) {
      bool writes = direction == CALSIM_OUT || tensor >= CALSIM_LOGITS;
      if (writes && calsim_views_overlap(view, &d->jobs[i]->views[tensor])) return true;
    }
  }
  return false;
}
