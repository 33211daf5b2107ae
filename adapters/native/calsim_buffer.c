/* calsim_buffer.c - buffers: which host memory a job reads or writes. The board never owns that
 * memory. */
#include "calsim_internal.h"
#include <stdlib.h>
#include <string.h>

static const calsim_submodel *submodel_of(const calsim_buffer *b) {
  return &b->calbin->m->submodels[b->submodel];
}

void calsim_buffer_free(calsim_buffer *b) {
  if (b != NULL) free(b->left);
  free(b);
}

static void reset_slices(calsim_buffer *b, uint32_t tensor) {
  calsim_tensor t = calsim_tensor_of(b->calbin->m, submodel_of(b), tensor);
  calsim_view *view = &b->views[tensor];
  view->row_first = view->column_first = 0;
  view->row_count = b->rows;
  view->column_count = t.columns;
}

static npurt_status check_spec(const calsim_calbin *c, const npurt_buffer_spec *s) {
  if (c->state != CALSIM_CONFIGURED)
    return calsim_error(NPURT_E_BAD_STATE, "buffers need a configured calbin");
  if (s->submodel >= c->m->submodel_count)
    return calsim_error(NPURT_E_NOT_FOUND, "submodel %u", s->submodel);
  uint32_t most = c->m->submodels[s->submodel].max_batch;
  if ((s->direction != CALSIM_IN && s->direction != CALSIM_OUT) || s->engine_mode > CALSIM_BANKS ||
      s->lanes > most)
    return calsim_error(NPURT_E_INVALID_ARG,
                        "direction %u (1, 2), engine mode %u (0 to 2) or lanes %u (0 to %u)",
                        s->direction, s->engine_mode, s->lanes, most);
  return NPURT_OK;
}

npurt_status npurt_buffer_create(npurt_calbin *handle, const npurt_buffer_spec *s,
                                 npurt_buffer **out) {
  npurt_status status = CALSIM_CHECK(s, npurt_buffer_spec);
  if (status != NPURT_OK) return status;
  if (out == NULL) return calsim_error(NPURT_E_INVALID_ARG, "buffer_create: out is NULL");
  calsim_device *d;
  calsim_calbin *c = calsim_lock_object(handle, CALSIM_CALBIN, &d);
  if (c == NULL) return NPURT_E_BAD_HANDLE;
  calsim_buffer *b = NULL;
  status = check_spec(c, s);
  if (status == NPURT_OK && (b = calloc(1, sizeof *b)) == NULL)
    status = calsim_error(NPURT_E_HOST_MEMORY, "out of host memory");
  if (status == NPURT_OK) {
    *b = (calsim_buffer){.calbin = c,
                         .generation = c->generation,
                         .submodel = s->submodel,
                         .direction = s->direction,
                         .engine = s->engine_mode};
    b->rows = s->lanes != 0 ? s->lanes : submodel_of(b)->max_batch;
    for (uint32_t tensor = 0; tensor < CALSIM_TENSORS; ++tensor) reset_slices(b, tensor);
    status = calsim_add_object(d, CALSIM_BUFFER, b, &b->handle);
  }
  if (status == NPURT_OK) {
    ++c->children;
    *out = b->handle;
  }
  calsim_unlock(d);
  if (status != NPURT_OK) free(b);
  return status;
}

/* Buffer behind a handle, which no job may hold; NULL with *status set. Locks the device. */
static calsim_buffer *lock_free_buffer(void *handle, calsim_device **d, npurt_status *status) {
  calsim_buffer *b = calsim_lock_object(handle, CALSIM_BUFFER, d);
  *status = b == NULL ? NPURT_E_BAD_HANDLE : NPURT_OK;
  if (b == NULL || b->job == NULL) return b;
  *status = calsim_error(NPURT_E_OBJECT_IN_FLIGHT, "job %llu holds the buffer until it is retired",
                         (unsigned long long)b->job->ticket);
  calsim_unlock(*d);
  return NULL;
}

static npurt_status check_tensor(const calsim_buffer *b, uint32_t tensor, calsim_tensor *t) {
  *t = (calsim_tensor){.name = "?"};
  if (tensor >= CALSIM_TENSORS) return calsim_error(NPURT_E_NOT_FOUND, "tensor %u", tensor);
  *t = calsim_tensor_of(b->calbin->m, submodel_of(b), tensor);
  if (t->direction == b->direction) return NPURT_OK;
  return calsim_error(NPURT_E_INVALID_ARG, "tensor %s goes the other way than the buffer", t->name);
}

npurt_status npurt_buffer_map(npurt_buffer *handle, uint32_t tensor, void *host, uint64_t bytes) {
  calsim_device *d;
  npurt_status status;
  calsim_buffer *b = lock_free_buffer(handle, &d, &status);
  if (b == NULL) return status;
  calsim_tensor t;
  status = check_tensor(b, tensor, &t);
  uint64_t need = status == NPURT_OK ? calsim_tensor_row_bytes(&t) * b->rows : 0;
  calsim_view view = {.host = host, .bytes = bytes};
  const calsim_job *holder = NULL;
  if (status != NPURT_OK) {
  } else if (host == NULL || bytes < need || bytes > UINTPTR_MAX - (uintptr_t)host) {
    status = calsim_error(NPURT_E_INVALID_ARG, "tensor %s: %llu bytes given, %llu needed", t.name,
                          (unsigned long long)bytes, (unsigned long long)need);
  } else if ((uintptr_t)host % CALSIM_PAGE != 0) {
    status = calsim_error(NPURT_E_ALIGNMENT, "tensor %s: %p is not aligned to %d bytes", t.name,
                          host, CALSIM_PAGE);
  } else if ((holder = calsim_overlaps_in_flight(d, &view, b->direction)) != NULL) {
    calsim_violation(d, holder, NPURT_E_RANGE_OVERLAP,
                     "RANGE_OVERLAP tensor %s: mapped over memory in flight", t.name);
    status = calsim_error(NPURT_E_RANGE_OVERLAP, "tensor %s: the memory belongs to a job in flight",
                          t.name);
  } else {
    b->views[tensor].host = host;
    b->views[tensor].bytes = bytes;
  }
  calsim_unlock(d);
  return status;
}

npurt_status npurt_buffer_slice(npurt_buffer *handle, uint32_t tensor, uint32_t axis, int64_t off,
                                int64_t len) {
  calsim_device *d;
  npurt_status status;
  calsim_buffer *b = lock_free_buffer(handle, &d, &status);
  if (b == NULL) return status;
  calsim_tensor t;
  status = check_tensor(b, tensor, &t);
  if (status == NPURT_OK && (axis >= t.rank || (t.slice_axes >> axis & 1) == 0))
    status =
        calsim_error(NPURT_E_UNSUPPORTED, "tensor %s cannot be sliced along axis %u", t.name, axis);
  if (status == NPURT_OK) {
    int64_t size = axis == 0 ? b->rows : t.columns;
    if (off < 0 || len < 1 || off >= size || len > size - off) {
      status =
          calsim_error(NPURT_E_INVALID_ARG, "tensor %s, axis %u: [%lld, +%lld) is not within %lld",
                       t.name, axis, (long long)off, (long long)len, (long long)size);
    } else if (axis == 0) {
      b->views[tensor].row_first = (uint32_t)off;
      b->views[tensor].row_count = (uint32_t)len;
    } else {
      b->views[tensor].column_first = (uint32_t)off;
      b->views[tensor].column_count = (uint32_t)len;
    }
  }
  calsim_unlock(d);
  return status;
}

npurt_status npurt_buffer_restore(npurt_buffer *handle, uint32_t what) {
  if (what == 0 || what > 7)
    return calsim_error(NPURT_E_INVALID_ARG, "buffer_restore: what 0x%x", what);
  calsim_device *d;
  npurt_status status;
  calsim_buffer *b = lock_free_buffer(handle, &d, &status);
  if (b == NULL) return status;
  for (uint32_t tensor = 0; tensor < CALSIM_TENSORS; ++tensor) {
    if ((what & 1) != 0) reset_slices(b, tensor);
    if ((what & 4) == 0) continue;
    b->views[tensor].host = NULL;
    b->views[tensor].bytes = 0;
  }
  b->restored |= what; /* tensors (2) have no state of their own between jobs on this board */
  calsim_unlock(d);
  return NPURT_OK;
}

npurt_status npurt_buffer_destroy(npurt_buffer *handle) {
  calsim_device *d;
  npurt_status status;
  calsim_buffer *b = lock_free_buffer(handle, &d, &status);
  if (b == NULL) return status;
  --b->calbin->children;
  calsim_remove_object(d, b->handle);
  calsim_unlock(d);
  calsim_buffer_free(b);
  return NPURT_OK;
}
