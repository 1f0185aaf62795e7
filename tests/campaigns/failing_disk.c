/* A disk that fails, for one process: loaded before the C library, it stands in front of the calls that touch files
   under the directory FAILING_PREFIX. It does nothing until the process calls fail_from_now(). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { WRITE = 1, IN_PLACE = 2, OPEN = 4, RENAME = 8, LOOK = 16 };

static volatile int failing, number;
static volatile double seconds;

/* From now on calls of these kinds take so long, and then fail with this errno, unless it is 0. A negative time is that
   of the first call alone. */
void fail_from_now(int kinds, int error, double delay) {
    number = error;
    seconds = delay;
    failing = kinds;
}

static int under(const char *path) {
    const char *prefix = getenv("FAILING_PREFIX");
    return prefix && path && !strncmp(path, prefix, strlen(prefix));
}

static int open_under(int fd) {
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return under(path);
}

static int fails(int kind) {
    if (!(failing & kind)) return 0;
    double wait = seconds < 0 ? -seconds : seconds;
    if (seconds < 0) seconds = 0;
    struct timespec rest = {(time_t)wait, (long)((wait - (time_t)wait) * 1e9)};
    while (nanosleep(&rest, &rest) && errno == EINTR) {}
    if (!number) return 0;
    errno = number;
    return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) {
    if (failing && open_under(fd) && fails(WRITE)) return -1;
    return NEXT(write)(fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    if (failing && open_under(fd) && fails(IN_PLACE)) return -1;
    return NEXT(pwrite)(fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    if (failing && open_under(fd) && fails(IN_PLACE)) return -1;
    return NEXT(pwrite64)(fd, data, size, offset);
}
int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    if (failing && under(path) && fails(OPEN)) return -1;
    return NEXT(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    if (failing && under(path) && fails(OPEN)) return -1;
    return NEXT(open64)(path, flags, mode);
}
int rename(const char *from, const char *to) {
    if (failing && under(from) && fails(RENAME)) return -1;
    return NEXT(rename)(from, to);
}
int mkdir(const char *path, mode_t mode) {
    if (failing && under(path) && fails(OPEN)) return -1;
    return NEXT(mkdir)(path, mode);
}
int stat64(const char *path, struct stat64 *found) {
    if (failing && under(path) && fails(LOOK)) return -1;
    return NEXT(stat64)(path, found);
}
int stat(const char *path, struct stat *found) {
    if (failing && under(path) && fails(LOOK)) return -1;
    return NEXT(stat)(path, found);
}
