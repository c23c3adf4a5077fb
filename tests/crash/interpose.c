/* Counts the calls that change files below one directory, and lets one of them, or all from one on, go wrong.
 *
 * Preloaded, it stands between libc and whoever calls it: Python, and Arrow's C++. Its own work is done by the real
 * functions, so a short write is a short write: half of the bytes are there. See faults.py.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PASS, FAIL, SHORTEN, KILL, SHORTEN_AND_KILL, TELL };

static char root[PATH_MAX];
static size_t root_length;
static int fault, failing_errno, log_fd = -1;
static long first, last;
static const char *name_hit;
static atomic_long calls;

/* Begin: of the calls counted from now on, first … first + times - 1 go wrong, later ones only if of the same name. */
void interpose(const char *directory, int kind, int code, long at, long times, int log)
{
    snprintf(root, sizeof root, "%s", directory);
    root_length = strlen(root);
    fault = kind, failing_errno = code, first = at, last = at + times - 1, log_fd = log, name_hit = NULL;
    atomic_store(&calls, 0);
}

/* The cause is gone. */
void interpose_end(void) { fault = PASS; }

long interpose_calls(void) { return atomic_load(&calls); }

static int inside(const char *path) { return root_length && !strncmp(path, root, root_length); }

static int inside_fd(int fd)
{
    char link[64], path[PATH_MAX];
    if (!root_length) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return inside(path);
}

static int inside_at(int directory, const char *path)
{
    return path[0] == '/' ? inside(path) : directory != AT_FDCWD && inside_fd(directory);
}

/* Count a call; return what is to become of it. Of a call that is no write, PASS or FAIL. */
static int meet(const char *name, int fd, int is_write)
{
    long number = atomic_fetch_add(&calls, 1) + 1;
    if (fault == TELL && log_fd >= 0) dprintf(log_fd, "[\"call\", %ld, \"%s\", %d]\n", number, name, fd);
    if (fault == TELL) return PASS;
    if (fault == PASS || number < first || number > last) return PASS;
    if (number > first && (name_hit == NULL || strcmp(name, name_hit))) return PASS;
    if (number == first) {
        name_hit = name;
        if (log_fd >= 0) dprintf(log_fd, "[\"hit\", \"%s\"]\n", name);
    }
    if (fault == KILL || (fault == SHORTEN_AND_KILL && !is_write)) kill(getpid(), SIGKILL);
    if (fault == SHORTEN && !is_write) return PASS;
    if (fault == FAIL) errno = failing_errno;
    return fault;
}

/* No kill divides the eight aligned bytes that make a record visible, so those are there. */
static size_t half(size_t size)
{
    if (fault == SHORTEN_AND_KILL && size <= 8) return size;
    return size > 1 ? size / 2 : size;
}

static ssize_t shortened(ssize_t written)
{
    if (fault == SHORTEN_AND_KILL) kill(getpid(), SIGKILL);
    return written;
}

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name)
{
    void *found = dlsym(RTLD_NEXT, name);
    if (found == NULL) abort();
    return found;
}

/* -- bytes */

ssize_t write(int fd, const void *data, size_t size)
{
    switch (inside_fd(fd) ? meet("write", fd, 1) : PASS) {
    case PASS: return REAL(write)(fd, data, size);
    case FAIL: return -1;
    default: return shortened(REAL(write)(fd, data, half(size)));
    }
}

static ssize_t write_at(int fd, const void *data, size_t size, off_t offset)
{
    switch (inside_fd(fd) ? meet("pwrite", fd, 1) : PASS) {
    case PASS: return REAL(pwrite)(fd, data, size, offset);
    case FAIL: return -1;
    default: return shortened(REAL(pwrite)(fd, data, half(size), offset));
    }
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return write_at(fd, data, size, offset); }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) { return write_at(fd, data, size, offset); }

/* Half of all bytes, wherever that is in the parts. */
static ssize_t write_half(int fd, const struct iovec *parts, int count, off_t offset)
{
    size_t size = 0, left, done = 0;
    for (int at = 0; at < count; at++) size += parts[at].iov_len;
    left = half(size);
    for (int at = 0; at < count && left; at++) {
        size_t length = parts[at].iov_len < left ? parts[at].iov_len : left;
        ssize_t written = REAL(pwrite)(fd, parts[at].iov_base, length, offset + done);
        if (written < 0) return written;
        done += written, left -= length;
    }
    return done;
}

static ssize_t write_parts(int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
    switch (inside_fd(fd) ? meet("pwritev", fd, 1) : PASS) {
    case PASS: return REAL(pwritev2)(fd, parts, count, offset, flags);
    case FAIL: return -1;
    default: return shortened(write_half(fd, parts, count, offset));
    }
}
ssize_t pwritev(int fd, const struct iovec *p, int n, off_t at) { return write_parts(fd, p, n, at, 0); }
ssize_t pwritev64(int fd, const struct iovec *p, int n, off_t at) { return write_parts(fd, p, n, at, 0); }
ssize_t pwritev2(int fd, const struct iovec *p, int n, off_t at, int f) { return write_parts(fd, p, n, at, f); }
ssize_t pwritev64v2(int fd, const struct iovec *p, int n, off_t at, int f) { return write_parts(fd, p, n, at, f); }

/* -- all others */

#define GUARDED(name, is_inside, arguments)                                                                            \
    {                                                                                                                  \
        if ((is_inside) && meet(#name, -1, 0) == FAIL) return -1;                                                          \
        return REAL(name) arguments;                                                                                   \
    }

ssize_t writev(int fd, const struct iovec *parts, int count) GUARDED(writev, inside_fd(fd), (fd, parts, count))
int fsync(int fd) GUARDED(fsync, inside_fd(fd), (fd))
int fdatasync(int fd) GUARDED(fdatasync, inside_fd(fd), (fd))
int ftruncate(int fd, off_t size) GUARDED(ftruncate, inside_fd(fd), (fd, size))
int ftruncate64(int fd, off_t size) GUARDED(ftruncate64, inside_fd(fd), (fd, size))
int rename(const char *from, const char *to) GUARDED(rename, inside(to), (from, to))
int link(const char *from, const char *to) GUARDED(link, inside(to), (from, to))
int unlink(const char *path) GUARDED(unlink, inside(path), (path))
int rmdir(const char *path) GUARDED(rmdir, inside(path), (path))
int mkdir(const char *path, mode_t mode) GUARDED(mkdir, inside(path), (path, mode))
int symlink(const char *to, const char *path) GUARDED(symlink, inside(path), (to, path))
int renameat(int a, const char *from, int b, const char *to) GUARDED(renameat, inside_at(b, to), (a, from, b, to))
int linkat(int a, const char *from, int b, const char *to, int flags)
    GUARDED(linkat, inside_at(b, to), (a, from, b, to, flags))
int unlinkat(int at, const char *path, int flags) GUARDED(unlinkat, inside_at(at, path), (at, path, flags))
int mkdirat(int at, const char *path, mode_t mode) GUARDED(mkdirat, inside_at(at, path), (at, path, mode))
int symlinkat(const char *to, int at, const char *path) GUARDED(symlinkat, inside_at(at, path), (to, at, path))

/* Opening counts where it may create. */
#define OPENING(name, parameters, is_inside, arguments)                                                                \
    int name parameters                                                                                                \
    {                                                                                                                  \
        mode_t mode = 0;                                                                                               \
        if (flags & O_CREAT) {                                                                                         \
            va_list more;                                                                                              \
            va_start(more, flags);                                                                                     \
            mode = va_arg(more, mode_t);                                                                               \
            va_end(more);                                                                                              \
            if ((is_inside) && meet("open", -1, 0) == FAIL) return -1;                                                     \
        }                                                                                                              \
        return REAL(name) arguments;                                                                                   \
    }

OPENING(open, (const char *path, int flags, ...), inside(path), (path, flags, mode))
OPENING(open64, (const char *path, int flags, ...), inside(path), (path, flags, mode))
OPENING(openat, (int at, const char *path, int flags, ...), inside_at(at, path), (at, path, flags, mode))
OPENING(openat64, (int at, const char *path, int flags, ...), inside_at(at, path), (at, path, flags, mode))
