/* calsim_files.c - reads the files of a calbin folder without following a link out of it (E20a),
 * and words errors. */
#include "calsim_artifact.h"
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

npurt_status calsim_fail(char error[CALSIM_ERROR_BYTES], npurt_status status, const char *format,
                         ...) {
  va_list arguments;
  va_start(arguments, format);
  int written = vsnprintf(error, CALSIM_ERROR_BYTES, format, arguments);
  va_end(arguments);
  if (written < 0) error[0] = '\0';
  for (char *c = error; *c; ++c)
    if (*c < 0x20 || *c > 0x7E) *c = '?';
  return status;
}

/* Why a path could not be opened; ELOOP and EMLINK are what O_NOFOLLOW answers for a link. */
static const char *reason(int number) {
  switch (number) {
    case ENOENT: return "does not exist";
    case EACCES: return "may not be read by this user";
    case ENOTDIR: return "is not a folder";
    case ELOOP:
    case EMLINK: return "is a symbolic link, a calbin holds regular files only";
    default: return "cannot be opened";
  }
}

npurt_status calsim_folder_open(const char *path, int *folder, char error[CALSIM_ERROR_BYTES]) {
  struct stat about;
  *folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (*folder < 0) {
    int number = errno;
    return calsim_fail(error, NPURT_E_CALBIN_FORMAT, "folder %s %s (errno %d)", path,
                       reason(number), number);
  }
  if (fstat(*folder, &about) == 0 && !(about.st_mode & S_IWOTH)) return NPURT_OK;
  (void)close(*folder);
  *folder = -1;
  return calsim_fail(error, NPURT_E_CALBIN_FORMAT, "folder %s is writable by others: chmod o-w",
                     path);
}

void calsim_folder_close(int folder) { (void)close(folder); }

npurt_status calsim_file_open(int folder, const char *name, uint64_t max_bytes, calsim_file *file,
                              char error[CALSIM_ERROR_BYTES]) {
  struct stat about;
  *file = (calsim_file){.fd = -1, .name = name};
  /* O_NONBLOCK: a FIFO must not block the load; it has no effect on the regular files that pass the
   * check below. */
  int fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (fd < 0) {
    int number = errno;
    return calsim_fail(error, NPURT_E_CALBIN_FORMAT, "%s %s (errno %d)", name, reason(number),
                       number);
  }
  npurt_status status = NPURT_OK;
  if (fstat(fd, &about) != 0 || !S_ISREG(about.st_mode))
    status = calsim_fail(error, NPURT_E_CALBIN_FORMAT, "%s is not a regular file", name);
  else if (about.st_mode & S_IWOTH)
    status = calsim_fail(error, NPURT_E_CALBIN_FORMAT, "%s is writable by others: chmod o-w", name);
  else if (about.st_size < 0 || (uint64_t)about.st_size > max_bytes)
    status =
        calsim_fail(error, NPURT_E_CALBIN_TOO_LARGE, "%s has %lld bytes, at most %llu are read",
                    name, (long long)about.st_size, (unsigned long long)max_bytes);
  if (status) {
    (void)close(fd);
    return status;
  }
  file->fd = fd;
  file->bytes = (uint64_t)about.st_size;
  return NPURT_OK;
}

void calsim_file_close(calsim_file *file) {
  if (file->fd >= 0) (void)close(file->fd);
  file->fd = -1;
}

/* Read exactly `length` bytes at `offset`. */
static npurt_status read_range(const calsim_file *file, char *to, uint64_t offset, uint64_t length,
                               char error[CALSIM_ERROR_BYTES]) {
  while (length > 0) {
    size_t part = length < (1u << 30) ? (size_t)length : (1u << 30);
    ssize_t got = pread(file->fd, to, part, (off_t)offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0)
      return calsim_fail(error, NPURT_E_CALBIN_FORMAT, "%s %s at byte %llu", file->name,
                         got < 0 ? "cannot be read" : "became shorter while it was read",
                         (unsigned long long)offset);
    to += got;
    offset += (uint64_t)got;
    length -= (uint64_t)got;
  }
  return NPURT_OK;
}

npurt_status calsim_file_read(const calsim_file *file, char **bytes,
                              char error[CALSIM_ERROR_BYTES]) {
  *bytes = malloc((size_t)file->bytes + 1);
  if (!*bytes)
    return calsim_fail(error, NPURT_E_HOST_MEMORY, "no host memory for the %llu bytes of %s",
                       (unsigned long long)file->bytes, file->name);
  (*bytes)[file->bytes] = '\0';
  npurt_status status = read_range(file, *bytes, 0, file->bytes, error);
  if (status) {
    free(*bytes);
    *bytes = NULL;
  }
  return status;
}

npurt_status calsim_file_hash(const calsim_file *file, char hex[CALSIM_SHA256_HEX_BYTES],
                              char error[CALSIM_ERROR_BYTES]) {
  char piece[16384];
  calsim_sha256 h;
  calsim_sha256_begin(&h);
  for (uint64_t at = 0; at < file->bytes; at += sizeof piece) {
    uint64_t part = file->bytes - at < sizeof piece ? file->bytes - at : sizeof piece;
    npurt_status status = read_range(file, piece, at, part, error);
    if (status) return status;
    calsim_sha256_add(&h, piece, part);
  }
  calsim_sha256_end(&h, hex);
  return NPURT_OK;
}
