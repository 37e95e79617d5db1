/*
 * Every operation that changes the disk first asks fault_next() (see file_fault_init in the header), in this
 * file and nowhere else: that is what makes "kill -9 at the N-th file operation" a test.
 *
 * Replacing a file: write a neighbour, sync it, rename it over the old one, sync the folder. Whoever reads
 * sees the old file or the new one, also after a power cut.
 */
#include "base/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <nmmintrin.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "base/held.h"

static Err io_error(const char *verb, const char *path) { return err_set(ERR_IO, "cannot %s '%s': %m", verb, path); }

/* ---- faults ---- */

typedef enum { FAULT_NONE, FAULT_KILL, FAULT_ENOSPC, FAULT_EIO, FAULT_SHORT, FAULT_EINTR, FAULT_COUNT } Fault;

static struct {
    Fault kind;
    int64_t at;
    const char *where; /* only operations on paths with this text count; NULL: all */
    _Atomic int64_t done;
} fault;

static void fault_print_count(void) { fprintf(stderr, "file operations: %lld\n", (long long)fault.done); }

static void fault_read(void)
{
    static const char *const names[] = { "", "kill", "enospc", "eio", "short", "eintr" };
    const char *text = getenv("MEGATRAIN_FILE_FAULT");
    if (!text) return;
    if (strcmp(text, "count") == 0) {
        fault.kind = FAULT_COUNT;
        atexit(fault_print_count);
        return;
    }
    const char *at = strchr(text, '@');
    for (int k = FAULT_KILL; at && k <= FAULT_EINTR; k++)
        if (strlen(names[k]) == (size_t)(at - text) && strncmp(text, names[k], (size_t)(at - text)) == 0)
            fault.kind = (Fault)k;
    char *end = "";
    fault.at = at ? strtoll(at + 1, &end, 10) : 0;
    fault.where = *end == ':' ? end + 1 : NULL;
    if (fault.kind == FAULT_NONE || fault.at < 1 || (*end && *end != ':')) {
        fprintf(stderr, "megatrain: error (configuration): MEGATRAIN_FILE_FAULT='%s' is not ACTION@N[:TEXT]\n", text);
        _exit(2);
    }
}

void file_fault_init(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fault_read);
}

/* The fault due at this operation, usually none. A write deals with KILL and SHORT itself. */
static Fault fault_next(const char *path)
{
    file_fault_init();
    if (fault.kind == FAULT_NONE || (fault.where && !strstr(path, fault.where))) return FAULT_NONE;
    int64_t n = atomic_fetch_add(&fault.done, 1) + 1;
    return n == fault.at ? fault.kind : FAULT_NONE;
}

static int fault_errno(Fault f) { return f == FAULT_EIO ? EIO : ENOSPC; }

/* The next system call of this operation ends with EINTR. */
static _Thread_local bool interrupt_next;

static bool interrupted(void)
{
    bool yes = interrupt_next;
    interrupt_next = false;
    if (yes) errno = EINTR;
    return yes;
}

/* For operations that happen or do not: true (with errno set) when this one must fail. */
static bool fault_hit(const char *path)
{
    Fault f = fault_next(path);
    interrupt_next = f == FAULT_EINTR;
    if (f == FAULT_KILL) raise(SIGKILL);
    if (f == FAULT_NONE || f == FAULT_EINTR) return false;
    errno = fault_errno(f);
    return true;
}

/* A call that a signal may interrupt before it has done anything (on network file systems) is made again. */
#define AGAIN_ON_EINTR(call)                       \
    ({                                             \
        int again_rc;                              \
        do again_rc = interrupted() ? -1 : (call); \
        while (again_rc < 0 && errno == EINTR);    \
        again_rc;                                  \
    })

static int open_file(const char *path, int flags) { return AGAIN_ON_EINTR(open(path, flags | O_CLOEXEC, 0666)); }

/* Not made again: on Linux the descriptor is gone, whatever close says. What counts was synced before. */
static int close_file(int fd) { return close(fd) < 0 && errno != EINTR ? -1 : 0; }

bool file_descriptors_left(int count)
{
    struct rlimit limit;
    int left = 0;
    if (getrlimit(RLIMIT_NOFILE, &limit)) return true;
    for (rlim_t fd = 0; fd < limit.rlim_cur && left < count; fd++) left += fcntl((int)fd, F_GETFD) < 0;
    return left >= count;
}

/* ---- reading ---- */

Err file_open_regular(const char *path, int *fd, int64_t *size_bytes)
{
    struct stat st;
    *fd = open_file(path, O_RDONLY | O_NONBLOCK); /* a pipe without a writer would be waited for */
    if (*fd < 0) return io_error("open", path);
    Err err = ERR_OK;
    if (fstat(*fd, &st) != 0) err = io_error("stat", path);
    else if (!S_ISREG(st.st_mode)) err = err_set(ERR_IO, "'%s' is not a regular file", path);
    if (err) close(*fd);
    else *size_bytes = st.st_size;
    return err;
}

/* True if a call that returned -1 should be made again. */
static bool try_again(int fd, short events)
{
    if (errno == EINTR) return true;
    if (errno != EAGAIN) return false;
    struct pollfd p = { .fd = fd, .events = events };
    poll(&p, 1, -1);
    return true;
}

/* Reads up to size_bytes; less only at the end of the file. -1 on errors. */
static int64_t read_some(int fd, int64_t offset, char *out, int64_t size_bytes)
{
    int64_t done = 0;
    while (done < size_bytes) {
        ssize_t n = pread(fd, out + done, (size_t)(size_bytes - done), offset + done);
        if (n < 0 && !try_again(fd, POLLIN)) return -1;
        if (n == 0) break;
        if (n > 0) done += n;
    }
    return done;
}

Err file_read_some(int fd, const char *path, int64_t offset, void *out, int64_t size_bytes, int64_t *got)
{
    *got = read_some(fd, offset, out, size_bytes);
    return *got < 0 ? io_error("read", path) : ERR_OK;
}

Err file_read_at(const char *path, int64_t offset, void *out, int64_t size_bytes)
{
    int fd;
    int64_t file_bytes;
    TRY(file_open_regular(path, &fd, &file_bytes));
    int64_t n = read_some(fd, offset, out, size_bytes);
    Err err = ERR_OK;
    if (n < 0) err = io_error("read", path);
    else if (n < size_bytes)
        err = err_set(ERR_IO, "'%s' is too short: %lld bytes, read up to %lld wanted", path, (long long)file_bytes,
                      (long long)offset + (long long)size_bytes);
    close(fd);
    return err;
}

enum { SAMPLE_BLOCK = 16 << 10 };

/* At `offset`, a block more. */
static Err sample_block(int fd, const char *path, int64_t offset, uint32_t *crc)
{
    char block[SAMPLE_BLOCK];
    const int64_t n = read_some(fd, offset, block, sizeof block);
    if (n < 0) return io_error("read", path);
    *crc = crc32c(*crc, block, (size_t)n);
    return ERR_OK;
}

Err file_sample_crc(const char *path, int64_t budget, uint32_t *crc)
{
    int fd;
    int64_t bytes;
    Err err = ERR_OK;
    TRY(file_open_regular(path, &fd, &bytes));
    const int64_t blocks = (bytes + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK, most = budget / SAMPLE_BLOCK + 1;
    const int64_t taken = bytes <= budget ? blocks : most < blocks ? most : blocks;
    const double apart = taken > 1 ? (double)(bytes - SAMPLE_BLOCK) / (double)(taken - 1) : 0;
    for (int64_t i = 0; i < taken && !err; i++)
        err = sample_block(fd, path, taken == blocks ? i * SAMPLE_BLOCK : (int64_t)(apart * (double)i), crc);
    close(fd);
    return err;
}

Err file_read_all(const char *path, int64_t max_bytes, char **out, int64_t *size_bytes)
{
    int fd;
    int64_t file_bytes;
    char *text = NULL;
    Err err = ERR_OK;
    TRY(file_open_regular(path, &fd, &file_bytes));
    if (file_bytes > max_bytes) {
        err = err_set(ERR_IO, "'%s' has %lld bytes, more than the %lld allowed", path, (long long)file_bytes,
                      (long long)max_bytes);
        goto out;
    }
    text = malloc((size_t)file_bytes + 1);
    if (!text) {
        err = err_set(ERR_MEMORY, "no memory for the %lld bytes of '%s'", (long long)file_bytes, path);
        goto out;
    }
    int64_t n = read_some(fd, 0, text, file_bytes);
    if (n < 0) {
        err = io_error("read", path);
        goto out;
    }
    text[n] = 0; /* a file that shrank meanwhile is simply shorter */
    *out = text;
    *size_bytes = n;
    text = NULL;
out:
    free(text);
    close(fd);
    return err;
}

/* ---- writing ---- */

static void writer_release(FileWriter *w)
{
    if (w->fd >= 0) close(w->fd);
    *w = (FileWriter){ .fd = -1, .failed = true };
}

Err file_check_link(const char *path)
{
    char bare[PATH_MAX]; /* (of "link/" lstat says what the link leads to) */
    struct stat link, target;
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    snprintf(bare, sizeof bare, "%.*s", (int)n, path);
    if (lstat(bare, &link) != 0 || !S_ISLNK(link.st_mode)) return ERR_OK;
    if (stat(bare, &target) != 0) return io_error("follow link", path);
    const uid_t us = geteuid();
    if ((link.st_uid == us || !link.st_uid) && (target.st_uid == us || !target.st_uid)) return ERR_OK;
    return err_set(ERR_IO, "'%s' is a link, and %s belongs to another user (%u)", path,
                   link.st_uid != us && link.st_uid ? "it" : "what it leads to",
                   (unsigned)(link.st_uid != us && link.st_uid ? link.st_uid : target.st_uid)),
           err_hint("links are followed that are yours or root's, to what is yours or root's");
}

enum { NEW = O_CREAT | O_EXCL | O_NOFOLLOW };

/* After a failure errno is that of open. */
static Err writer_open(const char *path, int flags, FileWriter *out)
{
    *out = (FileWriter){ .fd = -1, .failed = true };
    if (strlen(path) >= sizeof out->path) return err_set(ERR_IO, "path is too long: '%s'", path);
    if (!(flags & O_EXCL)) TRY(file_check_link(path));
    if (!fault_hit(path)) out->fd = open_file(path, O_WRONLY | flags);
    if (out->fd < 0) {
        const int why = errno;
        io_error(flags & O_CREAT ? "create" : "open", path);
        errno = why;
        return ERR_IO;
    }
    strcpy(out->path, path);
    out->failed = false;
    return ERR_OK;
}

Err file_create(const char *path, FileWriter *out)
{
    struct stat st;
    *out = (FileWriter){ .fd = -1, .failed = true };
    if (lstat(path, &st) == 0) {
        if (!S_ISREG(st.st_mode) && !S_ISLNK(st.st_mode))
            return err_set(ERR_IO, "'%s' is not a regular file and is not replaced", path);
        if (fault_hit(path) || unlink(path) != 0) return io_error("replace", path);
    }
    return writer_open(path, NEW, out);
}

/* ---- what killed processes have left beside a file ---- */

static int lock_whole(int fd)
{
    struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
    return fcntl(fd, F_OFD_SETLK, &lock);
}

/* Its writer holds a lock on it, and a minute is more than lies between making and locking, or closing and renaming. A
 * file system without locks keeps everything. */
static bool is_left_over(int dir, const char *name)
{
    enum { NEW_S = 60 };
    struct stat s;
    if (fstatat(dir, name, &s, AT_SYMLINK_NOFOLLOW) || !S_ISREG(s.st_mode)) return false;
    if (time(NULL) - s.st_mtim.tv_sec < NEW_S) return false;
    const int fd = openat(dir, name, O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    const bool free = fd >= 0 && !lock_whole(fd);
    if (fd >= 0) close(fd);
    return free;
}

void file_sweep_beside(const char *path)
{
    static const char mark[] = ".tmp-";
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    const size_t size = strlen(name);
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash + 1 - path) : 1, slash ? path : ".");
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));) {
        const char *number = e->d_name + size + strlen(mark);
        if (strncmp(e->d_name, name, size) || strncmp(e->d_name + size, mark, strlen(mark))) continue;
        if (!*number || number[strspn(number, "0123456789")] || !is_left_over(dirfd(d), e->d_name)) continue;
        unlinkat(dirfd(d), e->d_name, 0);
    }
    if (d) closedir(d);
}

Err file_create_beside(const char *path, FileWriter *out)
{
    enum { MOST = 1000 }; /* names that killed processes of our number may have left */
    char temp[PATH_MAX];
    for (int i = 0;; i++) {
        const int n = i ? snprintf(temp, sizeof temp, "%s.tmp-%d%03d", path, (int)getpid(), i)
                        : snprintf(temp, sizeof temp, "%s.tmp-%d", path, (int)getpid());
        if (n >= (int)sizeof temp) return err_set(ERR_IO, "path is too long: '%s'", path);
        const Err err = writer_open(temp, NEW, out);
        if (!err) lock_whole(out->fd); /* (until it is closed) */
        if (!err || errno != EEXIST || i == MOST - 1) return err;
    }
}

/* Somebody who turns logs over may have cut the file. */
static Err find_end(FileWriter *w)
{
    struct stat st;
    if (fstat(w->fd, &st) != 0) return io_error("stat", w->path);
    w->written_bytes = st.st_size;
    return ERR_OK;
}

Err file_append(const char *path, FileWriter *out)
{
    TRY(writer_open(path, O_CREAT | O_APPEND, out));
    out->appends = true;
    const Err err = find_end(out);
    if (err) writer_release(out);
    return err;
}

Err file_reopen(const char *path, int64_t size_bytes, FileWriter *out)
{
    TRY(writer_open(path, 0, out));
    struct stat st;
    Err err = ERR_OK;
    if (fstat(out->fd, &st) != 0) err = io_error("stat", path);
    else if (st.st_size < size_bytes)
        err =
            err_set(ERR_IO, "'%s' has %lld bytes, fewer than %lld", path, (long long)st.st_size, (long long)size_bytes);
    else if (fault_hit(path) || AGAIN_ON_EINTR(ftruncate(out->fd, size_bytes)) != 0) err = io_error("cut", path);
    out->written_bytes = size_bytes;
    if (err) writer_release(out);
    return err;
}

static bool write_all(int fd, int64_t offset, const char *data, int64_t size_bytes)
{
    while (size_bytes > 0) {
        ssize_t n = interrupted() ? -1 : pwrite(fd, data, (size_t)size_bytes, offset);
        if (n < 0 && !try_again(fd, POLLOUT)) return false;
        if (n > 0) {
            data += n;
            offset += n;
            size_bytes -= n;
        }
    }
    return true;
}

Err file_write_at(FileWriter *w, int64_t offset, const void *data, int64_t size_bytes)
{
    ASSERT(offset >= 0 && size_bytes >= 0);
    if (w->failed) return err_set(ERR_IO, "'%s' is not written further after a failure", w->path);
    Fault f = fault_next(w->path);
    bool half = f == FAULT_KILL || f == FAULT_SHORT || f == FAULT_EINTR;
    int64_t part = f == FAULT_NONE ? size_bytes : half ? size_bytes / 2 : 0;
    bool ok = write_all(w->fd, offset, data, part);
    if (f == FAULT_KILL) raise(SIGKILL);
    if (ok && f == FAULT_EINTR) {
        interrupt_next = true;
        ok = write_all(w->fd, offset + part, (const char *)data + part, size_bytes - part);
        f = FAULT_NONE;
    }
    if (ok && f != FAULT_NONE) {
        errno = fault_errno(f);
        ok = false;
    }
    if (!ok) {
        w->failed = true;
        return io_error("write", w->path);
    }
    if (offset + size_bytes > w->written_bytes) w->written_bytes = offset + size_bytes;
    return ERR_OK;
}

Err file_write(FileWriter *w, const void *data, int64_t size_bytes)
{
    if (w->appends && !w->failed) TRY(find_end(w));
    return file_write_at(w, w->written_bytes, data, size_bytes);
}

Err file_write_or_undo(FileWriter *w, const void *data, int64_t size_bytes)
{
    if (w->failed) return file_write(w, data, size_bytes);
    Err err = file_write(w, data, size_bytes);
    if (err) w->failed = ftruncate(w->fd, w->written_bytes) != 0;
    return err;
}

Err file_sync(FileWriter *w)
{
    if (w->failed) return err_set(ERR_IO, "'%s' was not written whole", w->path);
    if (!fault_hit(w->path) && AGAIN_ON_EINTR(fdatasync(w->fd)) == 0) return ERR_OK;
    w->failed = true; /* the system forgets what it could not write: a second sync would say all is well */
    return io_error("sync", w->path);
}

Err file_sync_close(FileWriter *w)
{
    Err err = file_sync(w);
    if (err) {
        writer_release(w);
        return err;
    }
    if (fault_hit(w->path)) err = io_error("close", w->path);
    else {
        int fd = w->fd;
        w->fd = -1; /* Linux releases it also when close fails */
        if (close_file(fd) != 0) err = io_error("close", w->path);
    }
    writer_release(w);
    return err;
}

void file_abandon(FileWriter *w)
{
    if (w->path[0] && !fault_hit(w->path)) unlink(w->path); /* best effort: an error is being reported already */
    writer_release(w);
}

/* Writes a neighbour of `path`; temp is its name. */
static Err write_beside(const char *path, const void *data, int64_t size_bytes, char temp[PATH_MAX])
{
    FileWriter w;
    TRY(file_create_beside(path, &w));
    strcpy(temp, w.path);
    Err err = file_write(&w, data, size_bytes);
    if (err) {
        file_abandon(&w);
        return err;
    }
    err = file_sync_close(&w);
    if (err) unlink(temp);
    return err;
}

/* The folder part of path: "." if there is none. */
static Err folder_of(const char *path, char out[PATH_MAX])
{
    const char *slash = strrchr(path, '/');
    int n = slash ? (int)(slash - path) : 0;
    if (n >= PATH_MAX) return err_set(ERR_IO, "path is too long: '%s'", path);
    if (!slash) strcpy(out, ".");
    else if (n == 0) strcpy(out, "/");
    else snprintf(out, PATH_MAX, "%.*s", n, path);
    return ERR_OK;
}

/* out = the file that a rename to `path` may replace: a link's target; never a device or a pipe. */
static Err replaceable(const char *path, char out[PATH_MAX])
{
    struct stat st;
    if (snprintf(out, PATH_MAX, "%s", path) >= PATH_MAX) return err_set(ERR_IO, "path is too long: '%s'", path);
    const bool there = lstat(path, &st) == 0;
    TRY(file_check_link(path));
    if (there && S_ISLNK(st.st_mode) && (!realpath(path, out) || stat(out, &st) != 0))
        return io_error("follow link", path);
    if (!there || S_ISREG(st.st_mode)) return ERR_OK;
    return err_set(ERR_IO, "'%s' is not a regular file and is not replaced", path);
}

Err file_check_output(const char *path)
{
    char target[PATH_MAX];
    if (file_is_dir(path)) return err_set(ERR_IO, "'%s' is a folder, where a file is to be written", path);
    return replaceable(path, target);
}

Err file_check_replaces(const char *path, const char *mark)
{
    char head[4096];
    int fd;
    int64_t bytes, got = 0;
    TRY_AS(ERR_STORAGE, file_check_output(path));
    if (!file_exists(path)) return ERR_OK;
    TRY_AS(ERR_STORAGE, file_open_regular(path, &fd, &bytes));
    Err err = err_as(file_read_some(fd, path, 0, head, sizeof head, &got), ERR_STORAGE);
    close(fd);
    if (err || !got || memmem(head, (size_t)got, mark, strlen(mark))) return err;
    return err_set(ERR_CONFIG, "'%s' is there already, and is no file that this command writes", path),
           err_hint("give another name, or remove it first");
}

static Err take_place(const char *temp, const char *path)
{
    char dir[PATH_MAX];
    Err err = folder_of(path, dir);
    if (!err) err = file_rename(temp, path);
    if (err) {
        unlink(temp);
        return err;
    }
    return file_sync_dir(dir);
}

Err file_take_place(const char *temp, const char *name)
{
    char path[PATH_MAX];
    const Err err = replaceable(name, path);
    if (err) unlink(temp);
    return err ? err : take_place(temp, path);
}

Err file_replace(const char *name, const void *data, int64_t size_bytes)
{
    char path[PATH_MAX], temp[PATH_MAX];
    TRY(replaceable(name, path));
    TRY(write_beside(path, data, size_bytes, temp));
    return take_place(temp, path);
}

Err file_rename(const char *from, const char *to)
{
    if (fault_hit(to) || rename(from, to) != 0) return err_set(ERR_IO, "cannot rename '%s' to '%s': %m", from, to);
    return ERR_OK;
}

Err file_cut(const char *path, int64_t size_bytes)
{
    FileWriter w;
    TRY(file_reopen(path, size_bytes, &w));
    return file_sync_close(&w);
}

/* ---- folders ---- */

Err file_sync_dir(const char *dir)
{
    int fd = open_file(dir, O_RDONLY | O_DIRECTORY);
    if (fd < 0) return io_error("open", dir);
    Err err = ERR_OK;
    /* some file systems cannot sync a folder and say EINVAL; their renames are as safe as they get */
    if (fault_hit(dir) || (AGAIN_ON_EINTR(fsync(fd)) != 0 && errno != EINVAL)) err = io_error("sync", dir);
    close(fd);
    return err;
}

bool file_exists(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0;
}

bool file_holds(const char *folder, const char *name)
{
    char path[PATH_MAX];
    return snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path && file_exists(path);
}

bool file_is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* Its name is synced: what is saved in a new folder would else be gone with it. */
static Err make_one_dir(const char *path)
{
    char parent[PATH_MAX];
    if (file_is_dir(path)) return ERR_OK;
    TRY(folder_of(path, parent));
    if (!fault_hit(path) && mkdir(path, 0777) == 0) return file_sync_dir(parent);
    if (errno == EEXIST && file_is_dir(path)) return ERR_OK; /* another rank was faster */
    return io_error("make folder", path);
}

Err file_make_dirs(const char *path)
{
    char part[PATH_MAX];
    if (strlen(path) >= sizeof part) return err_set(ERR_IO, "path is too long: '%s'", path);
    for (size_t i = 1; path[0] && i <= strlen(path); i++) {
        if (path[i] != '/' && path[i] != 0) continue;
        memcpy(part, path, i);
        part[i] = 0;
        TRY(make_one_dir(part));
    }
    return ERR_OK;
}

Err file_make_parents(const char *path)
{
    char parent[PATH_MAX];
    TRY(folder_of(path, parent));
    return file_make_dirs(parent);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st, (void)type, (void)where;
    return fault_hit(path) || remove(path) != 0 ? -1 : 0;
}

Err file_remove_tree(const char *path)
{
    if (nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS) != 0 && errno != ENOENT) return io_error("remove", path);
    return ERR_OK;
}

Err file_size(const char *path, int64_t *out)
{
    struct stat st;
    if (stat(path, &st) != 0) return io_error("stat", path);
    *out = st.st_size;
    return ERR_OK;
}

Err file_free_bytes(const char *path, int64_t *out)
{
    struct statvfs fs;
    char part[PATH_MAX], parent[PATH_MAX];
    if (snprintf(part, sizeof part, "%s", path) >= (int)sizeof part)
        return err_set(ERR_IO, "path is too long: '%s'", path);
    while (statvfs(part, &fs) != 0) { /* a run folder that is yet to be made: ask its nearest parent */
        if (errno != ENOENT || strcmp(part, ".") == 0 || strcmp(part, "/") == 0)
            return io_error("ask for free space on", path);
        TRY(folder_of(part, parent));
        strcpy(part, parent);
    }
    uint64_t bytes; /* network file systems without a limit may claim more than there can be */
    const bool fits = !__builtin_mul_overflow(fs.f_bavail, fs.f_frsize, &bytes) && bytes <= INT64_MAX;
    *out = fits ? (int64_t)bytes : INT64_MAX;
    return ERR_OK;
}

/* ---- lock ---- */

/* False if the holder before has removed the file between our open and our lock. */
bool file_is_still(int fd, const char *path)
{
    struct stat ours, there;
    return fstat(fd, &ours) == 0 && stat(path, &there) == 0 && ours.st_ino == there.st_ino &&
           ours.st_dev == there.st_dev;
}

/* An open-file-description lock: it goes with the descriptor, also between threads of one process, and the
 * system drops it when the process dies in whatever way. */
/* The system locks it; where a file system has no locks, another file stands for one. */
static Err lock_file(const char *path, int fd)
{
    char text[320] = "";
    if (!lock_whole(fd)) return held_check(path);
    if (errno == ENOLCK || errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL) return held_take(path, fd);
    if (errno != EAGAIN && errno != EACCES) return io_error("lock", path);
    int64_t n = read_some(fd, 0, text, sizeof text - 1);
    while (n > 0 && text[n - 1] == '\n') text[--n] = 0;
    err_set(ERR_STORAGE, "'%s' is held by another run (host and process: '%s')", path, text);
    return err_hint("wait for that run to end, or choose another run.dir");
}

/* The holder's name into the file that it has locked. */
static Err name_holder(const char *path, int fd)
{
    if (!file_is_still(fd, path))
        return err_set(ERR_STORAGE, "'%s' was removed by another run that ends just now", path),
               err_hint("start it again");
    char host[256] = "unknown-host", text[320];
    gethostname(host, sizeof host - 1);
    const int n = snprintf(text, sizeof text, "%s %d\n", host, (int)getpid());
    if (AGAIN_ON_EINTR(ftruncate(fd, 0)) != 0 || !write_all(fd, 0, text, n)) return io_error("write", path);
    return ERR_OK;
}

Err file_lock(const char *path, int *fd_out)
{
    TRY(file_check_link(path));
    int fd = open_file(path, O_RDWR | O_CREAT);
    if (fd < 0) return io_error("open lock file", path);
    Err err = lock_file(path, fd);
    if (!err) err = name_holder(path, fd);
    if (err) file_unlock(fd);
    else *fd_out = fd;
    return err;
}

void file_unlock(int fd)
{
    if (fd < 0) return;
    held_drop(fd);
    close(fd);
}

/* ---- checksum ---- */

static uint32_t crc_table[256];

static void crc_table_fill(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) c = c & 1 ? c >> 1 ^ 0x82F63B78u : c >> 1;
        crc_table[i] = c;
    }
}

uint32_t crc32c_table(uint32_t crc, const void *data, size_t size_bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, crc_table_fill);
    const uint8_t *p = data;
    crc = ~crc;
    for (; size_bytes; size_bytes--) crc = crc_table[(crc ^ *p++) & 0xFF] ^ crc >> 8;
    return ~crc;
}

/* The instruction has its result three cycles later and can begin each cycle: three lanes at once. What a lane's value
 * becomes by the bytes of the next one is linear: each byte of it has its share in a table. */
enum { LANE_BYTES = 4096 };
static uint32_t crc_lane[4][256];

__attribute__((target("sse4.2"))) static void crc_lane_fill(void)
{
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t i = 0; i < 256; i++) {
            uint64_t c = i << 8 * byte;
            for (int k = 0; k < LANE_BYTES; k += 8) c = _mm_crc32_u64(c, 0);
            crc_lane[byte][i] = (uint32_t)c;
        }
}

static uint64_t crc_behind_lane(uint64_t c)
{
    return crc_lane[0][c & 0xFF] ^ crc_lane[1][c >> 8 & 0xFF] ^ crc_lane[2][c >> 16 & 0xFF] ^
           crc_lane[3][c >> 24 & 0xFF];
}

static uint64_t word_at(const uint8_t *p)
{
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

__attribute__((target("sse4.2"))) static uint32_t crc32c_instruction(uint32_t crc, const void *data, size_t size_bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    const uint8_t *p = data;
    uint64_t c = ~crc;
    if (size_bytes >= 3 * LANE_BYTES) pthread_once(&once, crc_lane_fill);
    for (; size_bytes >= 3 * LANE_BYTES; size_bytes -= 3 * LANE_BYTES, p += 3 * LANE_BYTES) {
        uint64_t second = 0, third = 0;
        for (int i = 0; i < LANE_BYTES; i += 8) {
            c = _mm_crc32_u64(c, word_at(p + i));
            second = _mm_crc32_u64(second, word_at(p + i + LANE_BYTES));
            third = _mm_crc32_u64(third, word_at(p + i + 2 * LANE_BYTES));
        }
        c = crc_behind_lane(crc_behind_lane(c) ^ second) ^ third;
    }
    for (; size_bytes >= 8; size_bytes -= 8, p += 8) c = _mm_crc32_u64(c, word_at(p));
    for (; size_bytes; size_bytes--) c = _mm_crc32_u8((uint32_t)c, *p++);
    return ~(uint32_t)c;
}

uint32_t crc32c(uint32_t crc, const void *data, size_t size_bytes)
{
    return __builtin_cpu_supports("sse4.2") ? crc32c_instruction(crc, data, size_bytes)
                                            : crc32c_table(crc, data, size_bytes);
}
