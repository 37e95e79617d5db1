/*
 * See map.h. The handler of SIGBUS finds the map by its address in a table without locks, and puts memory of zeros
 * where the rest of the file was, so that the access that failed goes on. mmap is not on POSIX's list of calls for
 * handlers, but is a plain system call on Linux.
 */
#include "base/map.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/file.h"

/* size 0: free. The size is set last and cleared first. */
static struct {
    _Atomic uintptr_t base;
    _Atomic size_t size;
    atomic_bool lost;
} guards[MAPS_MAX];

static pthread_mutex_t guards_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction before;

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    const uintptr_t at = (uintptr_t)info->si_addr, page = at & ~(uintptr_t)(sysconf(_SC_PAGESIZE) - 1);
    for (int i = 0; i < MAPS_MAX; i++) {
        const size_t size = atomic_load(&guards[i].size);
        const uintptr_t base = atomic_load(&guards[i].base);
        if (at < base || at - base >= size) continue;
        if (mmap((void *)page, base + size - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
            MAP_FAILED)
            break;
        atomic_store(&guards[i].lost, true);
        return;
    }
    (void)number, (void)context;
    sigaction(SIGBUS, &before, NULL); /* not ours: the access fails again, and means what it meant */
}

static void take_over(void)
{
    struct sigaction a = { .sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO };
    sigemptyset(&a.sa_mask);
    sigaction(SIGBUS, &a, &before);
}

static Err guard(FileMap *m)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, take_over);
    pthread_mutex_lock(&guards_lock);
    int i = 0;
    while (i < MAPS_MAX && atomic_load(&guards[i].size)) i++;
    if (i < MAPS_MAX) {
        atomic_store(&guards[i].lost, false);
        atomic_store(&guards[i].base, (uintptr_t)m->data);
        atomic_store(&guards[i].size, (size_t)m->size_bytes);
        m->guard = i;
    }
    pthread_mutex_unlock(&guards_lock);
    return i < MAPS_MAX ? ERR_OK : err_set(ERR_IO, "cannot map '%s': %d files are mapped already", m->path, MAPS_MAX);
}

static Err map_fd(int fd, int64_t size_bytes, const char *path, FileMap *m)
{
    m->path = strdup(path);
    if (!m->path) return err_set(ERR_MEMORY, "no memory for the name of '%s'", path);
    if (size_bytes == 0) return ERR_OK;
    void *data = mmap(NULL, (size_t)size_bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) return err_set(errno == ENOMEM ? ERR_MEMORY : ERR_IO, "cannot map '%s': %m", path);
    m->data = data;
    m->size_bytes = size_bytes;
    return guard(m);
}

Err file_map(const char *path, FileMap *out)
{
    int fd;
    int64_t size_bytes;
    *out = (FileMap){ .guard = -1 };
    TRY(file_open_regular(path, &fd, &size_bytes));
    Err err = map_fd(fd, size_bytes, path, out);
    close(fd);
    if (err) file_unmap(out);
    return err;
}

void file_unmap(FileMap *map)
{
    if (map->data && map->guard >= 0) atomic_store(&guards[map->guard].size, 0);
    if (map->data) munmap((void *)(uintptr_t)map->data, (size_t)map->size_bytes);
    free(map->path);
    *map = (FileMap){ .guard = -1 };
}

Err map_intact(const FileMap *map)
{
    if (!map->data || !atomic_load(&guards[map->guard].lost)) return ERR_OK;
    err_set(ERR_DATA,
            "'%s' cannot be read any more: it was cut short while it was in use, or its disk fails (it had "
            "%lld bytes)",
            map->path, (long long)map->size_bytes);
    return err_hint("leave files alone while they are read; put the whole file back and start again");
}
