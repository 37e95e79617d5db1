/*
 * The system calls by which this program reads and changes files, defined here before libc's, so that none escapes by
 * not going through base/file.c. A test hears of each and can make it fail:
 *
 *   before   is asked; true: the call is not made and fails with errno as it was set. It may lower `size`: a short
 *            read or write.
 *   after    is told of those that changed something, in their order, one at a time
 *
 * Only calls on files below file_calls.root count, by path or by a descriptor that was opened so.
 */
#ifndef MEGATRAIN_TEST_FILE_CALLS_H
#define MEGATRAIN_TEST_FILE_CALLS_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef enum {
    CALL_OPEN, /* also what makes or empties a file */
    CALL_READ,
    CALL_WRITE,
    CALL_CUT,
    CALL_SYNC,
    CALL_CLOSE,
    CALL_MKDIR,
    CALL_RENAME,
    CALL_REMOVE,
    CALL_KINDS
} FileCallKind;

typedef struct {
    FileCallKind kind;
    const char *path, *to; /* NULL: known by fd */
    int fd, flags;
    const void *data;
    int64_t offset, size;
} FileCall;

enum { FILE_CALLS_FDS = 1024 };

static struct {
    const char *root; /* NULL: nothing counts */
    bool (*before)(FileCall *c);
    void (*after)(const FileCall *c);
    pthread_mutex_t lock;
    bool below[FILE_CALLS_FDS];
} file_calls = { .lock = PTHREAD_MUTEX_INITIALIZER };

static bool file_call_counts(const FileCall *c)
{
    if (!file_calls.root) return false;
    if (!c->path) return c->fd >= 0 && c->fd < FILE_CALLS_FDS && file_calls.below[c->fd];
    size_t n = strlen(file_calls.root);
    return !strncmp(c->path, file_calls.root, n) && (c->path[n] == '/' || !c->path[n]);
}

static bool file_call_fails(FileCall *c)
{
    if (!file_calls.before || !file_call_counts(c)) return false;
    pthread_mutex_lock(&file_calls.lock);
    bool fails = file_calls.before(c);
    pthread_mutex_unlock(&file_calls.lock);
    return fails;
}

/* The result of the call, which `after` hears of if it is no failure. */
static long file_call_done(const FileCall *c, long result)
{
    if (result < 0 || !file_calls.after || !file_call_counts(c)) return result;
    int keep = errno;
    pthread_mutex_lock(&file_calls.lock);
    file_calls.after(c);
    pthread_mutex_unlock(&file_calls.lock);
    errno = keep;
    return result;
}

int open(const char *path, int flags, ...)
{
    va_list args;
    va_start(args, flags);
    int mode = flags & O_CREAT ? va_arg(args, int) : 0;
    va_end(args);
    FileCall c = { .kind = CALL_OPEN, .path = path, .flags = flags };
    if (file_call_fails(&c)) return -1;
    c.fd = (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    if (c.fd >= 0 && c.fd < FILE_CALLS_FDS) file_calls.below[c.fd] = file_call_counts(&c);
    return (int)file_call_done(&c, c.fd);
}

/* Fails, as on Linux, with the descriptor gone. */
int close(int fd)
{
    FileCall c = { .kind = CALL_CLOSE, .fd = fd };
    bool fails = file_call_fails(&c);
    int why = errno;
    if (fd >= 0 && fd < FILE_CALLS_FDS) file_calls.below[fd] = false;
    int rc = (int)syscall(SYS_close, fd);
    if (!fails) return rc;
    errno = why;
    return -1;
}

ssize_t pread(int fd, void *out, size_t size, off_t offset)
{
    FileCall c = { .kind = CALL_READ, .fd = fd, .offset = offset, .size = (int64_t)size };
    return file_call_fails(&c) ? -1 : syscall(SYS_pread64, fd, out, c.size, offset);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset)
{
    FileCall c = { .kind = CALL_WRITE, .fd = fd, .data = data, .offset = offset, .size = (int64_t)size };
    if (file_call_fails(&c)) return -1;
    return c.size = syscall(SYS_pwrite64, fd, data, c.size, offset), file_call_done(&c, c.size);
}

int ftruncate(int fd, off_t size)
{
    FileCall c = { .kind = CALL_CUT, .fd = fd, .size = size };
    return file_call_fails(&c) ? -1 : (int)file_call_done(&c, syscall(SYS_ftruncate, fd, size));
}

int fsync(int fd)
{
    FileCall c = { .kind = CALL_SYNC, .fd = fd };
    return file_call_fails(&c) ? -1 : (int)file_call_done(&c, syscall(SYS_fsync, fd));
}

int fdatasync(int fd)
{
    FileCall c = { .kind = CALL_SYNC, .fd = fd };
    return file_call_fails(&c) ? -1 : (int)file_call_done(&c, syscall(SYS_fdatasync, fd));
}

int mkdir(const char *path, mode_t mode)
{
    FileCall c = { .kind = CALL_MKDIR, .path = path };
    return file_call_fails(&c) ? -1 : (int)file_call_done(&c, syscall(SYS_mkdir, path, mode));
}

int rename(const char *from, const char *to)
{
    FileCall c = { .kind = CALL_RENAME, .path = from, .to = to };
    return file_call_fails(&c) ? -1 : (int)file_call_done(&c, syscall(SYS_rename, from, to));
}

int unlink(const char *path)
{
    FileCall c = { .kind = CALL_REMOVE, .path = path };
    return file_call_fails(&c) ? -1 : (int)file_call_done(&c, syscall(SYS_unlink, path));
}

int remove(const char *path)
{
    FileCall c = { .kind = CALL_REMOVE, .path = path };
    if (file_call_fails(&c)) return -1;
    long rc = syscall(SYS_unlink, path);
    if (rc && (errno == EISDIR || errno == EPERM)) rc = syscall(SYS_rmdir, path);
    return (int)file_call_done(&c, rc);
}

#endif
