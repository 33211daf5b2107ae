/* calsim_handles.c - what must be one per process: the table of open devices, the numbering of
 * tickets, generations and handles. Also the calling thread's error text and the rules for
 * structure sizes.
 *
 * A handle is not an address. It names a device slot, an entry of that device's object table and
 * the serial that the entry had when it was made, so that a destroyed handle is recognised for as
 * long as the process lives. */
#include "calsim_internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CALSIM_SIZE_ASSERT(name, bytes) \
  _Static_assert(sizeof(name) == (bytes), #name " changed its size");
CALSIM_STRUCTS(CALSIM_SIZE_ASSERT)
#undef CALSIM_SIZE_ASSERT

enum { KIND_BITS = 4, INDEX_BITS = 20, SLOT_BITS = 8 };

static _Thread_local char error_text[512];

static struct {
  pthread_mutex_t lock;
  pthread_cond_t left; /* some thread left some device */
  calsim_device *devices[CALSIM_MAX_DEVICES];
  uint32_t serials[CALSIM_MAX_DEVICES];
  uint64_t opened[CALSIM_MAX_DEVICES], opens;
  uint32_t next_serial;
} registry = {
    .lock = PTHREAD_MUTEX_INITIALIZER, .left = PTHREAD_COND_INITIALIZER, .next_serial = 1};

static atomic_uint_fast64_t last_ticket, last_generation;

npurt_status calsim_error(npurt_status status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(error_text, sizeof error_text, format, args);
  va_end(args);
  return status;
}

npurt_status npurt_last_error(char *buf, uint64_t cap) {
  if (buf == NULL || cap == 0) return NPURT_E_INVALID_ARG;
  calsim_copy_text(buf, cap, error_text);
  return NPURT_OK;
}

uint64_t calsim_next_ticket(void) { return atomic_fetch_add(&last_ticket, 1) + 1; }
uint64_t calsim_next_generation(void) { return atomic_fetch_add(&last_generation, 1) + 1; }

/* ---- handles --------------------------------------------------------------------------- */

static void *encode(calsim_kind kind, uint32_t slot, uint32_t index, uint32_t serial) {
  uint64_t word = (uint64_t)kind | (uint64_t)index << KIND_BITS |
                  (uint64_t)slot << (KIND_BITS + INDEX_BITS) | (uint64_t)serial << 32;
  return (void *)(uintptr_t)word;
}

static calsim_kind kind_of(const void *handle) {
  return (calsim_kind)((uintptr_t)handle & ((1u << KIND_BITS) - 1));
}
static uint32_t index_of(const void *handle) {
  return (uint32_t)((uintptr_t)handle >> KIND_BITS) & ((1u << INDEX_BITS) - 1);
}
static uint32_t slot_of(const void *handle) {
  return (uint32_t)((uintptr_t)handle >> (KIND_BITS + INDEX_BITS)) & ((1u << SLOT_BITS) - 1);
}
static uint32_t serial_of(const void *handle) { return (uint32_t)((uintptr_t)handle >> 32); }

/* Registry lock held. 32 bits of serials wrap after four billion handles; 0 marks a free entry and
 * is skipped. */
static uint32_t take_serial(void) {
  uint32_t serial = registry.next_serial++;
  if (registry.next_serial == 0) registry.next_serial = 1;
  return serial;
}

static void leave(calsim_device *d) {
  pthread_mutex_lock(&registry.lock);
  if (--d->users == 0) pthread_cond_broadcast(&registry.left);
  pthread_mutex_unlock(&registry.lock);
}

static calsim_device *enter_slot(const void *handle, calsim_kind kind) {
  calsim_device *d = NULL;
  if (kind_of(handle) == kind) {
    uint32_t slot = slot_of(handle);
    pthread_mutex_lock(&registry.lock);
    d = registry.devices[slot];
    if (d != NULL && kind == CALSIM_DEVICE && registry.serials[slot] != serial_of(handle)) d = NULL;
    if (d != NULL) ++d->users;
    pthread_mutex_unlock(&registry.lock);
  }
  if (d != NULL) {
    pthread_mutex_lock(&d->lock);
    if (d->closing) {
      calsim_unlock(d);
      d = NULL;
    }
  }
  if (d != NULL) calsim_shared_sync(d);
  if (d == NULL)
    calsim_error(NPURT_E_BAD_HANDLE, "handle %p is not alive, or of another kind", handle);
  return d;
}

calsim_device *calsim_lock(const void *handle, calsim_kind kind) {
  return enter_slot(handle, kind);
}

void *calsim_lock_object(const void *handle, calsim_kind kind, calsim_device **device) {
  calsim_device *d = enter_slot(handle, kind);
  if (d == NULL) return NULL;
  void *item = calsim_find_object(d, handle, kind);
  if (item == NULL) {
    calsim_unlock(d);
    return NULL;
  }
  *device = d;
  return item;
}

void calsim_unlock(calsim_device *d) {
  pthread_mutex_unlock(&d->lock);
  leave(d);
}

void calsim_suspend(calsim_device *d) { pthread_mutex_unlock(&d->lock); }
void calsim_resume(calsim_device *d) { pthread_mutex_lock(&d->lock); }

npurt_status calsim_register_device(calsim_device *d, npurt_device **handle) {
  npurt_status status = NPURT_E_HOST_MEMORY;
  pthread_mutex_lock(&registry.lock);
  for (uint32_t slot = 0; slot < CALSIM_MAX_DEVICES && status != NPURT_OK; ++slot) {
    if (registry.devices[slot] != NULL) continue;
    registry.devices[slot] = d;
    registry.serials[slot] = take_serial();
    registry.opened[slot] = ++registry.opens;
    d->handle = encode(CALSIM_DEVICE, slot, 0, registry.serials[slot]);
    *handle = (npurt_device *)d->handle;
    status = NPURT_OK;
  }
  pthread_mutex_unlock(&registry.lock);
  if (status != NPURT_OK)
    calsim_error(status, "%d devices are open in this process; close one", CALSIM_MAX_DEVICES);
  return status;
}

bool calsim_unregister_device(const void *handle, calsim_device **device) {
  if (kind_of(handle) != CALSIM_DEVICE) return false;
  uint32_t slot = slot_of(handle);
  pthread_mutex_lock(&registry.lock);
  calsim_device *d = registry.devices[slot];
  bool alive = d != NULL && registry.serials[slot] == serial_of(handle);
  if (alive) registry.devices[slot] = NULL;
  pthread_mutex_unlock(&registry.lock);
  if (!alive) return false;
  pthread_mutex_lock(&d->lock);
  d->closing = true;
  pthread_cond_broadcast(&d->changed);
  pthread_cond_broadcast(&d->work);
  pthread_mutex_unlock(&d->lock);
  pthread_mutex_lock(&registry.lock);
  while (d->users != 0) pthread_cond_wait(&registry.left, &registry.lock);
  pthread_mutex_unlock(&registry.lock);
  *device = d;
  return true;
}

calsim_device *calsim_lock_latest(void) {
  calsim_device *latest = NULL;
  uint64_t newest = 0;
  pthread_mutex_lock(&registry.lock);
  for (uint32_t slot = 0; slot < CALSIM_MAX_DEVICES; ++slot) {
    if (registry.devices[slot] == NULL || registry.opened[slot] <= newest) continue;
    newest = registry.opened[slot];
    latest = registry.devices[slot];
  }
  if (latest != NULL) ++latest->users;
  pthread_mutex_unlock(&registry.lock);
  if (latest != NULL) pthread_mutex_lock(&latest->lock);
  return latest;
}

npurt_status calsim_add_object(calsim_device *d, calsim_kind kind, void *item, void **handle) {
  calsim_objects *table = &d->objects;
  uint32_t index = 0;
  while (index < table->count && table->entries[index].serial != 0) ++index;
  if (index == table->count) {
    uint32_t grown = table->count == 0 ? 16 : table->count * 2;
    if (grown > CALSIM_MAX_OBJECTS)
      return calsim_error(NPURT_E_HOST_MEMORY, "too many objects on one device");
    calsim_object *entries = realloc(table->entries, grown * sizeof *entries);
    if (entries == NULL) return calsim_error(NPURT_E_HOST_MEMORY, "out of host memory");
    memset(entries + table->count, 0, (grown - table->count) * sizeof *entries);
    table->entries = entries;
    table->count = grown;
  }
  pthread_mutex_lock(&registry.lock);
  uint32_t serial = take_serial();
  pthread_mutex_unlock(&registry.lock);
  table->entries[index] = (calsim_object){serial, kind, item};
  *handle = encode(kind, slot_of(d->handle), index, serial);
  return NPURT_OK;
}

void *calsim_find_object(calsim_device *d, const void *handle, calsim_kind kind) {
  uint32_t index = index_of(handle);
  bool alive = kind_of(handle) == kind && slot_of(handle) == slot_of(d->handle) &&
               index < d->objects.count && d->objects.entries[index].serial == serial_of(handle) &&
               d->objects.entries[index].kind == kind;
  if (alive) return d->objects.entries[index].item;
  calsim_error(NPURT_E_BAD_HANDLE, "handle %p is not alive, of another kind or of another device",
               handle);
  return NULL;
}

void calsim_remove_object(calsim_device *d, const void *handle) {
  d->objects.entries[index_of(handle)] = (calsim_object){0, CALSIM_NONE, NULL};
}

/* ---- structure sizes ------------------------------------------------------------------- */

npurt_status calsim_check_struct(const void *p, uint32_t abi01_bytes, const char *name) {
  if (p == NULL) return calsim_error(NPURT_E_INVALID_ARG, "%s is NULL", name);
  uint32_t offered = ((const npurt_head *)p)->struct_size;
  if (offered >= abi01_bytes) return NPURT_OK;
  return calsim_error(NPURT_E_STRUCT_SIZE,
                      "%s: struct_size %u is below the %u bytes of version 0.1", name, offered,
                      abi01_bytes);
}

void calsim_put(void *out, const void *value, uint32_t own_bytes) {
  uint32_t offered = ((npurt_head *)out)->struct_size;
  uint32_t filled = offered < own_bytes ? offered : own_bytes;
  memcpy(out, value, filled);
  ((npurt_head *)out)->struct_size = filled;
}

void calsim_put_element(void *array, uint32_t stride, uint32_t i, const void *value,
                        uint32_t own_bytes) {
  npurt_head *element = (npurt_head *)((uint8_t *)array + (uint64_t)stride * i);
  element->struct_size = stride;
  calsim_put(element, value, own_bytes);
}

void calsim_copy_text(char *to, size_t room, const char *from) {
  size_t length = strnlen(from, room - 1);
  memcpy(to, from, length);
  to[length] = '\0';
}

npurt_status npurt_abi_negotiate(uint32_t want_major, uint32_t min_minor, npurt_abi_info *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_abi_info);
  if (status != NPURT_OK) return status;
  npurt_abi_info info = {
      .abi_major = NPURT_ABI_MAJOR, .abi_minor = NPURT_ABI_MINOR, .backend_kind = CALSIM_BACKEND};
  calsim_copy_text(info.backend_name, sizeof info.backend_name, CALSIM_NAME);
  calsim_copy_text(info.backend_version, sizeof info.backend_version, "0.1.0");
#define CALSIM_SIZE_FILL(name, bytes) info.sizes[info.size_count++] = (uint32_t)sizeof(name);
  CALSIM_STRUCTS(CALSIM_SIZE_FILL)
#undef CALSIM_SIZE_FILL
  calsim_put(out, &info, sizeof info);
  if (want_major == NPURT_ABI_MAJOR && min_minor <= NPURT_ABI_MINOR) return NPURT_OK;
  return calsim_error(NPURT_E_ABI, "asked for ABI %u.%u or later minor; this library has %u.%u",
                      want_major, min_minor, NPURT_ABI_MAJOR, NPURT_ABI_MINOR);
}
