/*
 * The cpu and null devices, streams and events. The CPU stream runs ops where they are called, so only
 * communicators ever complete an event later.
 */
#include "device/device.h"

#include <errno.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "device/ops.h"

/* Where the null device pretends its memory lies: far from anything mapped, so a dereference faults. */
static char *const NULL_BASE = (char *)((uintptr_t)1 << 46);

static const char *const isa_names[ISA_COUNT] = { "auto", "avx512", "avx2", "c" };

const char *isa_name(Isa isa) { return isa_names[isa]; }

bool isa_supported(Isa isa)
{
    if (isa == ISA_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
    if (isa == ISA_AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return true;
}

Isa isa_best(void)
{
    return isa_supported(ISA_AVX512) ? ISA_AVX512 : isa_supported(ISA_AVX2) ? ISA_AVX2 : ISA_C;
}

static Err map_memory(int64_t size_bytes, void **out)
{
    void *p = mmap(NULL, (size_t)size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return err_set(ERR_MEMORY, "cannot get %.1f MiB of memory: %s", (double)size_bytes / (1 << 20),
                       strerror(errno));
    madvise(p, (size_t)size_bytes, MADV_HUGEPAGE); /* a wish: refusal changes speed only */
    *out = p;
    return ERR_OK;
}

static Err open_cpu(Device *dev, int threads, Isa isa)
{
    static const OpTable *const tables[ISA_COUNT] = {
        [ISA_AVX512] = &cpu_avx512_ops, [ISA_AVX2] = &cpu_avx2_ops, [ISA_C] = &cpu_c_ops
    };
    if (isa == ISA_AUTO) isa = isa_best();
    if (!isa_supported(isa))
        return err_set(ERR_CONFIG, "this processor has no %s", isa_name(isa)),
               err_hint("set debug.isa=auto (here: %s)", isa_name(isa_best()));
    dev->isa = isa;
    dev->ops = tables[isa];
    dev->threads = threads > 0 ? threads : omp_get_max_threads();
    void *workspace;
    TRY(map_memory(DEVICE_WORKSPACE_BYTES, &workspace)); /* not touched: small shapes use little of it */
    dev->workspace = workspace;
    dev->workspace_bytes = DEVICE_WORKSPACE_BYTES;
    return ERR_OK;
}

Err device_open(Device *dev, const char *kind, int threads, Isa isa)
{
    memset(dev, 0, sizeof *dev);
    dev->name = kind;
    dev->stream.dev = dev;
    dev->threads = threads > 0 ? threads : 1;
    if (!strcmp(kind, "cpu")) return open_cpu(dev, threads, isa);
    if (strcmp(kind, "null"))
        return err_set(ERR_CONFIG, "this build has no device '%s'", kind), err_hint("devices here: cpu");
    dev->is_null = true;
    dev->ops = &null_ops;
    return ERR_OK;
}

void device_close(Device *dev)
{
    device_free(dev, dev->workspace, dev->workspace_bytes);
    memset(dev, 0, sizeof *dev);
}

/*
 * Touched once by the threads that will use it: fresh pages cost more in the middle of a step than all the
 * arithmetic on them.
 */
Err device_alloc(Device *dev, int64_t size_bytes, void **out)
{
    dev->counters.allocs++;
    dev->counters.alloc_bytes += size_bytes;
    *out = NULL;
    if (dev->is_null) {
        *out = NULL_BASE;
        return ERR_OK;
    }
    if (size_bytes <= 0) return ERR_OK;
    TRY(map_memory(size_bytes, out));
    char *bytes = *out;
#pragma omp parallel for schedule(static) num_threads(dev->threads)
    for (int64_t i = 0; i < size_bytes; i += 4096) bytes[i] = 0;
    return ERR_OK;
}

void device_free(Device *dev, void *p, int64_t size_bytes)
{
    if (!dev->is_null && p && size_bytes > 0) munmap(p, (size_t)size_bytes);
}

static Err move(Stream *s, void *to, const void *from, int64_t size_bytes)
{
    if (!s->dev->is_null && size_bytes > 0) memmove(to, from, (size_t)size_bytes);
    return ERR_OK;
}

Err device_write(Stream *s, void *device_dst, const void *host_src, int64_t size_bytes)
{
    return move(s, device_dst, host_src, size_bytes);
}

Err device_read(Stream *s, void *host_dst, const void *device_src, int64_t size_bytes)
{
    s->dev->counters.host_reads++;
    return move(s, host_dst, device_src, size_bytes);
}

Err device_copy(Stream *s, void *device_dst, const void *device_src, int64_t size_bytes)
{
    return move(s, device_dst, device_src, size_bytes);
}

Err device_zero(Stream *s, void *device_dst, int64_t size_bytes)
{
    if (!s->dev->is_null && size_bytes > 0) memset(device_dst, 0, (size_t)size_bytes);
    return ERR_OK;
}

Err device_row_count(Stream *s, Tensor t, int64_t bound, int64_t *out)
{
    s->dev->counters.host_reads++;
    *out = bound;
    if (!s->dev->is_null && t.rows && *t.rows < bound) *out = *t.rows;
    return ERR_OK;
}

void event_init(Event *e)
{
    memset(e, 0, sizeof *e);
    pthread_mutex_init(&e->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&e->done_cond, &attr);
    pthread_condattr_destroy(&attr);
}

void event_release(Event *e)
{
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->done_cond);
}

void event_reset(Event *e)
{
    pthread_mutex_lock(&e->lock);
    e->done = false;
    e->err = ERR_OK;
    pthread_mutex_unlock(&e->lock);
}

void event_complete(Event *e, Err err, const char *message)
{
    pthread_mutex_lock(&e->lock);
    e->done = true;
    e->err = err;
    if (err) snprintf(e->message, sizeof e->message, "%s", message);
    pthread_cond_broadcast(&e->done_cond);
    pthread_mutex_unlock(&e->lock);
}

Err event_wait(Event *e, double timeout_s)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    if (timeout_s > 0) {
        double t = (double)until.tv_nsec * 1e-9 + timeout_s;
        until.tv_sec += (time_t)t;
        until.tv_nsec = (long)((t - (double)(time_t)t) * 1e9);
    }
    pthread_mutex_lock(&e->lock);
    int rc = 0;
    while (!e->done && rc != ETIMEDOUT)
        rc = timeout_s > 0 ? pthread_cond_timedwait(&e->done_cond, &e->lock, &until)
                           : pthread_cond_wait(&e->done_cond, &e->lock);
    bool done = e->done;
    Err err = e->err;
    pthread_mutex_unlock(&e->lock);
    if (!done) return err_set(ERR_HANG, "work did not finish within %.1f s", timeout_s);
    return err ? err_set(err, "%s", e->message) : ERR_OK;
}

Err stream_wait(Stream *s, Event *e)
{
    (void)s;
    return event_wait(e, 0);
}
