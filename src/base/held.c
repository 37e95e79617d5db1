/* See held.h. Its few operations on the disk are not among those that base/file.c makes fail. */
#include "base/held.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TEXT_BYTES = 512, MOST = 16 };

/* ---- who holds it ---- */

/* Ticks from the host's start to the process'; 0: there is no such process. A number is given again, this is not. */
static unsigned long long begun(int pid)
{
    char path[64], text[1024] = "";
    unsigned long long ticks = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = fopen(path, "re");
    if (!f) return 0;
    const char *end = fgets(text, sizeof text, f) ? strrchr(text, ')') : NULL; /* (names of programs may hold blanks) */
    fclose(f);
    for (int field = 2; end && field < 22; field++) end = strchr(end + 1, ' ');
    if (end) sscanf(end, "%llu", &ticks);
    return ticks;
}

/* Processes that see each other by number: of one host, one start of it and one name space. */
static void place_of(char *out, size_t size)
{
    char host[256] = "unknown-host", space[64] = "", boot[64] = "";
    gethostname(host, sizeof host - 1);
    if (readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) *space = 0;
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (f && !fgets(boot, sizeof boot, f)) *boot = 0;
    if (f) fclose(f);
    boot[strcspn(boot, "\n")] = 0;
    snprintf(out, size, "%s %s %s", host, space, boot);
}

static void own_text(char *out, size_t size)
{
    char place[400];
    place_of(place, sizeof place);
    snprintf(out, size, "%d %llu %s", (int)getpid(), begun(getpid()), place);
}

/* Was it written here, by a process that has ended? */
static bool is_over(const char *text)
{
    char place[400];
    int pid, at = 0;
    unsigned long long then;
    if (sscanf(text, "%d %llu %n", &pid, &then, &at) != 2 || !at || !then || pid < 1) return false;
    place_of(place, sizeof place);
    return !strcmp(text + at, place) && begun(pid) != then;
}

/* ---- the file ---- */

static Err io_error(const char *what, const char *path)
{
    return err_set(ERR_IO, "cannot %s '%s': %s", what, path, strerror(errno));
}

/* Its text, "" if there is none. */
static void read_text(const char *path, char *out)
{
    const int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    const ssize_t n = fd < 0 ? 0 : read(fd, out, TEXT_BYTES - 1);
    out[n > 0 ? n : 0] = 0;
    if (fd >= 0) close(fd);
}

static Err write_text(const char *path, const char *text)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) return io_error("create", path);
    const size_t size = strlen(text);
    const bool whole = write(fd, text, size) == (ssize_t)size && fsync(fd) == 0;
    const Err err = whole ? ERR_OK : io_error("write", path);
    close(fd);
    if (err) unlink(path);
    return err;
}

/* The whole text is there when the file has its name, which a link never takes from another. (A server that is asked
 * again, as its answer was lost, says that the name is there: then it is the second one of the file.) */
static Err make(const char *path, bool *made)
{
    char text[TEXT_BYTES], temp[PATH_MAX];
    uint64_t chance = 0;
    struct stat st;
    *made = false;
    if (getrandom(&chance, sizeof chance, 0) < 0) return io_error("make a name beside", path);
    if (snprintf(temp, sizeof temp, "%s-%llx", path, (unsigned long long)chance) >= (int)sizeof temp)
        return err_set(ERR_IO, "path is too long: '%s'", path);
    own_text(text, sizeof text);
    TRY(write_text(temp, text));
    const int failed = link(temp, path), why = errno;
    *made = !failed || (!stat(temp, &st) && st.st_nlink == 2);
    unlink(temp);
    errno = why;
    return *made || why == EEXIST ? ERR_OK : io_error("link", path);
}

/* Removes what a process has left that ended. Of two that do so at once one takes away what the other has just made: by
 * what it then holds it sees that, and puts it back. */
static Err clear(const char *path, const char *left)
{
    char aside[PATH_MAX], text[TEXT_BYTES];
    if (snprintf(aside, sizeof aside, "%s-left-%d", path, (int)getpid()) >= (int)sizeof aside)
        return err_set(ERR_IO, "path is too long: '%s'", path);
    if (rename(path, aside) != 0) return errno == ENOENT ? ERR_OK : io_error("rename", path);
    read_text(aside, text);
    const bool other = strcmp(text, left) != 0 && link(aside, path) != 0 && errno != EEXIST;
    if (other) return io_error("link", path);
    unlink(aside);
    return ERR_OK;
}

static Err held_by_another(const char *path, const char *text)
{
    char host[256] = "unknown-host";
    int pid = 0;
    sscanf(text, "%d %*u %255s", &pid, host);
    err_set(ERR_STORAGE, "'%s' says that another run holds the folder (host and process: '%s %d')", path, host, pid);
    return err_hint("wait for that run to end, or choose another run.dir; this file system takes no locks, so if that "
                    "process is gone: rm '%s'",
                    path);
}

/* ---- what this process holds ---- */

static struct {
    int fd;
    char *path;
} held[MOST];
static pthread_mutex_t held_lock = PTHREAD_MUTEX_INITIALIZER;

static Err remember(int fd, const char *path)
{
    char *copy = strdup(path);
    int free_place = 0;
    pthread_mutex_lock(&held_lock);
    while (free_place < MOST && held[free_place].path) free_place++;
    if (copy && free_place < MOST) held[free_place].fd = fd, held[free_place].path = copy;
    pthread_mutex_unlock(&held_lock);
    if (copy && free_place < MOST) return ERR_OK;
    free(copy);
    return err_set(ERR_MEMORY, "no place to remember '%s'", path);
}

static bool name_of(const char *path, char out[PATH_MAX])
{
    return snprintf(out, PATH_MAX, "%s.held", path) < PATH_MAX;
}

Err held_take(const char *path, int fd)
{
    char name[PATH_MAX], text[TEXT_BYTES];
    if (!name_of(path, name)) return err_set(ERR_IO, "path is too long: '%s'", path);
    for (int turn = 0; turn < 2; turn++) {
        bool made;
        TRY(make(name, &made));
        if (made) {
            const Err err = remember(fd, name);
            if (err) unlink(name);
            return err;
        }
        read_text(name, text);
        if (turn || !is_over(text)) break;
        TRY(clear(name, text));
    }
    return held_by_another(name, text);
}

bool held_stands(const char *path)
{
    char name[PATH_MAX];
    return name_of(path, name) && access(name, F_OK) == 0;
}

Err held_check(const char *path)
{
    char name[PATH_MAX], text[TEXT_BYTES];
    if (!held_stands(path) || !name_of(path, name)) return ERR_OK;
    read_text(name, text);
    return *text && !is_over(text) ? held_by_another(name, text) : ERR_OK;
}

void held_drop(int fd)
{
    char own[TEXT_BYTES], text[TEXT_BYTES];
    pthread_mutex_lock(&held_lock);
    for (int i = 0; i < MOST; i++) {
        if (!held[i].path || held[i].fd != fd) continue;
        own_text(own, sizeof own);
        read_text(held[i].path, text);
        if (!strcmp(own, text)) unlink(held[i].path);
        free(held[i].path);
        held[i].path = NULL;
    }
    pthread_mutex_unlock(&held_lock);
}
