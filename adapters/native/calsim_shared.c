/* calsim_shared.c - one board for several processes: a small file says whose it is and in which
 * epoch. A reset by one process is a new epoch for all.
 *
 * Two ranges of the file are locked, by kernel locks that go with the open file and so with a
 * process that dies: USE by everybody who has the board open, for himself alone if he asked for
 * that; RECORD for as long as the record is read or written. Nothing else is shared: each open has
 * memory, models and jobs of its own. */
#include "calsim_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { USE, RECORD };
enum { RECORD_BYTES = 79, TRIES = 1000, PAUSE_NS = 1000000 };
static const char FORMAT[] = "calsim-board 1\nepoch %020llu\nowner %010u\nreset by %010u\n";

typedef struct record {
  unsigned long long epoch;
  uint32_t owner, reset_by; /* process ids, 0: none */
} record;

/* Take or give back a range without waiting. */
static bool lock_range(int fd, int range, short how) {
  struct flock lock = {.l_type = how, .l_whence = SEEK_SET, .l_start = range, .l_len = 1};
  return fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

/* The record's lock, within a second: it is held for microseconds only. */
static bool lock_record(int fd) {
  for (int i = 0; i < TRIES; ++i) {
    if (lock_range(fd, RECORD, F_WRLCK)) return true;
    if (errno != EAGAIN && errno != EACCES && errno != EINTR) return false;
    nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
  }
  return false;
}

static void unlock_record(int fd) { (void)lock_range(fd, RECORD, F_UNLCK); }

/* With the record's lock held. An empty file is a board that nobody has used. */
static bool read_record(int fd, record *r) {
  char text[RECORD_BYTES + 1] = "";
  ssize_t length = pread(fd, text, RECORD_BYTES, 0);
  *r = (record){.epoch = 1};
  if (length == 0) return true;
  return length == RECORD_BYTES &&
         sscanf(text, FORMAT, &r->epoch, &r->owner, &r->reset_by) == 3 && r->epoch > 0;
}

static bool write_record(int fd, const record *r) {
  char text[128];
  int length = snprintf(text, sizeof text, FORMAT, r->epoch, r->owner, r->reset_by);
  return length == RECORD_BYTES && pwrite(fd, text, RECORD_BYTES, 0) == RECORD_BYTES;
}

/* ---- open, close ------------------------------------------------------------------------- */

static npurt_status take_board(calsim_device *d, bool exclusive) {
  const char *path = d->config.board;
  record r;
  if (!lock_record(d->shared_fd))
    return calsim_error(NPURT_E_DEVICE_OWNED, "board %s: its record stays locked", path);
  bool good = read_record(d->shared_fd, &r), mine = false;
  if (good) mine = lock_range(d->shared_fd, USE, exclusive ? F_WRLCK : F_RDLCK);
  uint32_t before = r.owner;
  if (mine) {
    r.owner = (uint32_t)getpid();
    good = write_record(d->shared_fd, &r);
  }
  unlock_record(d->shared_fd);
  if (!good)
    return calsim_error(NPURT_E_INVALID_ARG, "board %s is not the record of a board", path);
  if (!mine)
    return calsim_error(NPURT_E_DEVICE_OWNED, "board %s: process %u has it%s", path, before,
                        exclusive ? "" : " for itself alone");
  d->epoch = r.epoch;
  d->shared_owner = r.owner;
  return NPURT_OK;
}

npurt_status calsim_shared_open(calsim_device *d, bool exclusive) {
  struct stat about;
  if (d->config.board[0] == '\0') return NPURT_OK;
  d->shared_fd =
      open(d->config.board, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
  if (d->shared_fd < 0)
    return calsim_error(NPURT_E_NOT_FOUND, "board %s: %s", d->config.board, strerror(errno));
  if (fstat(d->shared_fd, &about) != 0 || !S_ISREG(about.st_mode))
    return calsim_error(NPURT_E_INVALID_ARG, "board %s is not a regular file", d->config.board);
  return take_board(d, exclusive);
}

void calsim_shared_close(calsim_device *d) {
  if (d->shared_fd >= 0) close(d->shared_fd);
  d->shared_fd = -1;
}

/* ---- what others did --------------------------------------------------------------------- */

/* As the record stands now; what cannot be read has not changed. */
static record look(const calsim_device *d) {
  record r = {.epoch = d->epoch, .owner = d->shared_owner}, found;
  if (!lock_record(d->shared_fd)) return r;
  if (read_record(d->shared_fd, &found) && found.epoch >= d->epoch) r = found;
  unlock_record(d->shared_fd);
  return r;
}

bool calsim_shared_moved(const calsim_device *d) {
  return d->shared_fd >= 0 && look(d).epoch != d->epoch;
}

void calsim_shared_sync(calsim_device *d) {
  if (d->shared_fd < 0 || d->resetting || d->configuring || d->closing) return;
  record r = look(d);
  bool opened = r.owner != d->shared_owner;
  d->shared_owner = r.owner;
  if (r.epoch != d->epoch)
    calsim_foreign_reset(d, r.reset_by);
  else if (opened)
    calsim_event(d, NPURT_EV_OWNER, 0, 0, NPURT_OK, "opened by process %u", r.owner);
}

uint64_t calsim_shared_epoch(calsim_device *d, bool foreign) {
  record r;
  if (d->shared_fd >= 0 && foreign) return look(d).epoch;
  uint64_t next = d->epoch + 1;
  if (d->shared_fd < 0 || !lock_record(d->shared_fd)) return next;
  if (read_record(d->shared_fd, &r)) {
    if (r.epoch >= next) next = r.epoch + 1; /* another one was quicker */
    r.epoch = next;
    r.owner = r.reset_by = d->shared_owner = (uint32_t)getpid();
    (void)write_record(d->shared_fd, &r);
  }
  unlock_record(d->shared_fd);
  return next;
}
