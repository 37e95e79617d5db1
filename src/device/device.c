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

#include "base/clock.h"
#include "device/ops.h"
#include "device/recorder.h"

/* Address at which the null device pretends its memory begins: above all that a process can map, so a dereference
 * faults. */
static char *const NULL_BASE = (char *)((uintptr_t)1 << 47);
enum { NULL_ALIGN = 4096 };

/* A bit that addresses of its host have. */
static const uintptr_t NULL_FAR = (uintptr_t)1 << 63;

static const char *const isa_names[ISA_COUNT] = { ISA_LIST(CHOICE_TEXT) };

const char *isa_name(Isa isa) { return isa_names[isa]; }

bool isa_supported(Isa isa)
{
    if (isa == ISA_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
    if (isa == ISA_AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return true;
}

Isa isa_best(void) { return isa_supported(ISA_AVX512) ? ISA_AVX512 : isa_supported(ISA_AVX2) ? ISA_AVX2 : ISA_C; }

#define DOT_NAME(name, text, number) [number] = text,
static const char *const dot_names[DOT_KINDS] = { DOT_LIST(DOT_NAME) };
#undef DOT_NAME

const char *dot_name(DotKind kind) { return dot_names[kind]; }

bool dot_supported(void) { return isa_supported(ISA_AVX512) && cpu_avx512_has_pairs(); }

static Tiles tiles_found;

static void find_tiles(void)
{
    /* (attention keeps to VDPBF16PS) */
    if (dot_supported() && cpu_avx512_has_tiles()) tiles_found = cpu_avx512_tiles_agree() ? TILES_AGREE : TILES_DIFFER;
}

Tiles dot_tiles(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_tiles);
    return tiles_found;
}

DotKind dot_best(void) { return dot_tiles() == TILES_AGREE ? DOT_AMX : dot_supported() ? DOT_VDPBF16 : DOT_FMA; }

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

static int threads_or_all(int threads) { return threads > 0 ? threads : omp_get_max_threads(); }

/* ---- cpu ---- */

static Err cpu_open(Device *dev, int index, Isa isa)
{
    static const OpTable *const tables[ISA_COUNT] = {
        [ISA_AVX512] = &cpu_avx512_ops, [ISA_AVX2] = &cpu_avx2_ops, [ISA_C] = &cpu_c_ops
    };
    (void)index;
    if (isa == ISA_AUTO) isa = isa_best();
    if (!isa_supported(isa))
        return err_set(ERR_CONFIG, "this processor has no %s", isa_name(isa)),
               err_hint("set debug.isa=auto (here: %s)", isa_name(isa_best()));
    dev->isa = isa;
    dev->ops = tables[isa];
    dev->dot_pairs = isa == ISA_AVX512 && dot_supported();
    dev->dot_tiles = isa == ISA_AVX512 && dot_tiles() == TILES_AGREE;
    void *workspace;
    TRY(map_memory(DEVICE_WORKSPACE_BYTES, &workspace)); /* not touched: small shapes use little of it */
    dev->workspace = workspace;
    dev->workspace_bytes = DEVICE_WORKSPACE_BYTES;
    dev->copies.handle = &dev->queue;
    return ERR_OK;
}

static void cpu_free(Device *dev, void *p, int64_t size_bytes)
{
    (void)dev;
    munmap(p, (size_t)size_bytes);
}

static void cpu_close(Device *dev)
{
    if (dev->workspace) cpu_free(dev, dev->workspace, dev->workspace_bytes);
}

/*
 * Touched once by the threads that will use it: fresh pages cost more in the middle of a step than all the
 * arithmetic on them.
 */
static Err cpu_alloc(Device *dev, int64_t size_bytes, void **out)
{
    TRY(map_memory(size_bytes, out));
    char *bytes = *out;
#pragma omp parallel for schedule(static) num_threads(dev->threads)
    for (int64_t i = 0; i < size_bytes; i += 4096) bytes[i] = 0;
    return ERR_OK;
}

static Err cpu_move(Stream *s, void *to, const void *from, int64_t size_bytes)
{
    (void)s;
    memmove(to, from, (size_t)size_bytes);
    return ERR_OK;
}

static Err cpu_zero(Stream *s, void *to, int64_t size_bytes)
{
    (void)s;
    memset(to, 0, (size_t)size_bytes);
    return ERR_OK;
}

static Err nothing_to_wait_for(Stream *s)
{
    (void)s;
    return ERR_OK;
}

/* A point in the queue of copies. */
typedef struct {
    CopyQueue *queue;
    int64_t copies; /* those before it */
} CopyMark;

static void make_copies(CopyQueue *q, int64_t until)
{
    for (; q->made < until; q->made++) {
        const int i = (int)(q->made % COPY_QUEUE_MOST);
        memcpy(q->copy[i].to, q->copy[i].from, (size_t)q->copy[i].size_bytes);
    }
}

static Err copies_stream_wait(Stream *s, void *mark)
{
    const CopyMark *m = mark;
    (void)s;
    make_copies(m->queue, m->copies);
    return ERR_OK;
}

static Err copies_wait(void *mark, double timeout_s)
{
    (void)timeout_s;
    return copies_stream_wait(NULL, mark);
}

static Err cpu_move_later(Stream *s, void *to, const void *from, int64_t size_bytes)
{
    CopyQueue *q = s->handle;
    if (!q) return cpu_move(s, to, from, size_bytes);
    if (q->asked - q->made == COPY_QUEUE_MOST) make_copies(q, q->made + 1);
    const int i = (int)(q->asked++ % COPY_QUEUE_MOST);
    q->copy[i].to = to;
    q->copy[i].from = from;
    q->copy[i].size_bytes = size_bytes;
    return ERR_OK;
}

static Err cpu_mark(Stream *s, Event *e)
{
    static const EventMarks marks = { copies_stream_wait, copies_wait, free };
    CopyQueue *q = s->handle;
    if (!q) return ERR_OK;
    if (!e->mark) e->mark = malloc(sizeof(CopyMark));
    if (!e->mark) return err_set(ERR_MEMORY, "no memory for a mark between copies");
    *(CopyMark *)e->mark = (CopyMark){ q, q->asked };
    e->marks = &marks;
    e->marked = true;
    return ERR_OK;
}

static const DeviceBackend cpu_backend = { .open = cpu_open,
                                           .close = cpu_close,
                                           .alloc = cpu_alloc,
                                           .free = cpu_free,
                                           .write = cpu_move,
                                           .read = cpu_move,
                                           .copy = cpu_move,
                                           .zero = cpu_zero,
                                           .sync = nothing_to_wait_for,
                                           .read_later = cpu_move_later,
                                           .write_later = cpu_move_later,
                                           .mark = cpu_mark };

/* ---- null ---- */

static Err null_open(Device *dev, int index, Isa isa)
{
    (void)index, (void)isa;
    dev->is_null = true;
    dev->null_end = NULL_BASE;
    dev->ops = &null_ops;
    return ERR_OK;
}

static void null_close(Device *dev) { (void)dev; }

static Err null_alloc(Device *dev, int64_t size_bytes, void **out)
{
    *out = dev->null_end;
    dev->null_end += (size_bytes + NULL_ALIGN - 1) / NULL_ALIGN * NULL_ALIGN;
    return ERR_OK;
}

static Err null_alloc_far(Device *dev, int64_t size_bytes, void **out)
{
    TRY(null_alloc(dev, size_bytes, out));
    *out = (void *)((uintptr_t)*out | NULL_FAR);
    return ERR_OK;
}

bool device_null_is_far(const void *p) { return (uintptr_t)p & NULL_FAR; }

static void null_free(Device *dev, void *p, int64_t size_bytes) { (void)dev, (void)p, (void)size_bytes; }

static Err null_move(Stream *s, void *to, const void *from, int64_t size_bytes)
{
    (void)s, (void)to, (void)from, (void)size_bytes;
    return ERR_OK;
}

static Err null_zero(Stream *s, void *to, int64_t size_bytes)
{
    (void)s, (void)to, (void)size_bytes;
    return ERR_OK;
}

static const DeviceBackend null_backend = { .open = null_open,
                                            .close = null_close,
                                            .alloc = null_alloc,
                                            .free = null_free,
                                            .alloc_far = null_alloc_far,
                                            .write = null_move,
                                            .read = null_move,
                                            .copy = null_move,
                                            .zero = null_zero,
                                            .sync = nothing_to_wait_for };

/* ---- cuda, where it was built ---- */

void device_cuda_for_several(void)
{
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

#ifndef MEGATRAIN_CUDA
static Err no_cuda_open(Device *dev, int index, Isa isa)
{
    (void)dev, (void)index, (void)isa;
    return err_set(ERR_CONFIG, "this build has no CUDA backend"),
           err_hint("install the CUDA toolkit and build again, or set run.device=cpu");
}
static const DeviceBackend cuda_backend = { .open = no_cuda_open, .close = null_close };

bool device_has_cuda(void) { return false; }

int device_cuda_count(char *why, int64_t why_size)
{
    snprintf(why, (size_t)why_size, "this build has no CUDA backend");
    return 0;
}

bool device_cuda_blas(const char **why)
{
    *why = "this build has no CUDA backend";
    return false;
}

Err device_cuda_info(int index, DeviceInfo *out)
{
    (void)index, (void)out;
    return no_cuda_open(NULL, 0, ISA_AUTO);
}
#else
/* cuda/device.c; other functions of device.h there and in cublaslt.c */
extern const DeviceBackend cuda_backend;

bool device_has_cuda(void) { return true; }
#endif

/* ---- devices ---- */

Err device_open(Device *dev, DeviceChoice choice)
{
    static const struct {
        const char *name;
        const DeviceBackend *backend;
    } kinds[DEVICE_KINDS] = { [DEVICE_CPU] = { "cpu", &cpu_backend },
                              [DEVICE_CUDA] = { "cuda", &cuda_backend },
                              [DEVICE_NULL] = { "null", &null_backend } };
    *dev = (Device){ .kind = choice.kind,
                     .name = kinds[choice.kind].name,
                     .backend = kinds[choice.kind].backend,
                     .threads = threads_or_all(choice.threads),
                     .dot = choice.dot };
    dev->stream.dev = dev->copies.dev = dev;
    dev->pinned_bytes = choice.pinned_bytes > DEVICE_PINNED_BYTES ? choice.pinned_bytes : DEVICE_PINNED_BYTES;
    TRY(dev->backend->open(dev, choice.index, choice.isa));
    if (choice.staging_bytes <= 0) return ERR_OK;
    ASSERT(choice.kind != DEVICE_CUDA);
    void *base;
    TRY(device_alloc(dev, choice.staging_bytes, &base));
    arena_init(&dev->staging, "staging", base, choice.staging_bytes);
    dev->wide_ops = dev->ops;
    dev->ops = &widened_ops;
    return ERR_OK;
}

void device_close(Device *dev)
{
    device_free(dev, dev->staging.base, dev->staging.size_bytes);
    if (dev->backend) dev->backend->close(dev);
    *dev = (Device){ 0 };
}

Err device_alloc(Device *dev, int64_t size_bytes, void **out)
{
    dev->counters.allocs++;
    dev->counters.alloc_bytes += size_bytes;
    *out = NULL;
    if (size_bytes <= 0) return ERR_OK;
    return dev->backend->alloc(dev, size_bytes, out);
}

void device_free(Device *dev, void *p, int64_t size_bytes)
{
    if (p && size_bytes > 0) dev->backend->free(dev, p, size_bytes);
}

Err device_alloc_far(Device *dev, int64_t size_bytes, void **out)
{
    *out = NULL;
    if (size_bytes <= 0) return ERR_OK;
    return (dev->backend->alloc_far ? dev->backend->alloc_far : dev->backend->alloc)(dev, size_bytes, out);
}

void device_free_far(Device *dev, void *p, int64_t size_bytes)
{
    if (!p || size_bytes <= 0) return;
    if (dev->backend->free_far) dev->backend->free_far(dev, p);
    else dev->backend->free(dev, p, size_bytes);
}

/* Digest of a copy, for a recorder. */
static uint64_t copy_digest(const void *to, const void *from, int64_t size_bytes)
{
    return digest_int(digest_pointer(digest_pointer(DIGEST_EMPTY, to), from), size_bytes);
}

Err device_write(Stream *s, void *device_dst, const void *host_src, int64_t size_bytes)
{
    if (size_bytes <= 0) return ERR_OK;
    if (recorder_hears(s)) TRY(recorder_refuse(s, "a copy from the host's memory"));
    return s->dev->backend->write(s, device_dst, host_src, size_bytes);
}

Err device_read(Stream *s, void *host_dst, const void *device_src, int64_t size_bytes)
{
    s->dev->counters.host_reads++;
    if (recorder_hears(s)) TRY(recorder_refuse(s, "a read by the host"));
    return size_bytes > 0 ? s->dev->backend->read(s, host_dst, device_src, size_bytes) : ERR_OK;
}

Err device_copy(Stream *s, void *device_dst, const void *device_src, int64_t size_bytes)
{
    if (size_bytes <= 0) return ERR_OK;
    if (recorder_hears(s)) TRY(recorder_work(s, copy_digest(device_dst, device_src, size_bytes)));
    return s->dev->backend->copy(s, device_dst, device_src, size_bytes);
}

Err device_zero(Stream *s, void *device_dst, int64_t size_bytes)
{
    if (size_bytes <= 0) return ERR_OK;
    if (recorder_hears(s)) TRY(recorder_work(s, copy_digest(device_dst, NULL, size_bytes)));
    return s->dev->backend->zero(s, device_dst, size_bytes);
}

Err device_host_alloc(Device *dev, int64_t size_bytes, void **out)
{
    *out = NULL;
    if (size_bytes <= 0) return ERR_OK;
    if (dev->backend->host_alloc) return dev->backend->host_alloc(dev, size_bytes, out);
    *out = calloc(1, (size_t)size_bytes);
    return *out ? ERR_OK : err_set(ERR_MEMORY, "no host memory for %lld bytes to be read", (long long)size_bytes);
}

void device_host_free(Device *dev, void *p)
{
    if (p && dev->backend->host_free) dev->backend->host_free(dev, p);
    else free(p);
}

Err device_read_later(Stream *s, void *host_dst, const void *device_src, int64_t size_bytes)
{
    const DeviceBackend *b = s->dev->backend;
    if (size_bytes <= 0) return ERR_OK;
    if (recorder_hears(s)) TRY(recorder_work(s, copy_digest(host_dst, device_src, size_bytes)));
    return (b->read_later ? b->read_later : b->read)(s, host_dst, device_src, size_bytes);
}

Err device_write_later(Stream *s, void *device_dst, const void *host_src, int64_t size_bytes)
{
    const DeviceBackend *b = s->dev->backend;
    if (size_bytes <= 0) return ERR_OK;
    if (recorder_hears(s)) TRY(recorder_work(s, copy_digest(device_dst, host_src, size_bytes)));
    return (b->write_later ? b->write_later : b->write)(s, device_dst, host_src, size_bytes);
}

Err device_call(Stream *s, DeviceCall *call, const void *args, int64_t bytes, uint64_t digest)
{
    return recorder_hears(s) ? recorder_call(s, call, args, bytes, digest) : call(s, args);
}

static Err mark(Stream *s, const void *args)
{
    Event *e = *(Event *const *)args;
    event_reset(e);
    if (s->dev->backend->mark) TRY(s->dev->backend->mark(s, e));
    event_complete(e, ERR_OK, "");
    return ERR_OK;
}

Err device_mark(Stream *s, Event *e) { return device_call(s, mark, &e, sizeof e, digest_pointer(DIGEST_EMPTY, e)); }

Err device_wait(Stream *s, Event *e)
{
    if (recorder_hears(s)) TRY(recorder_refuse(s, "a wait of the host"));
    return s->dev->backend->wait ? s->dev->backend->wait(s, e) : ERR_OK;
}

bool device_can_record(const Device *dev) { return dev->backend->record_begin != NULL; }

void device_autotune(Device *dev, DeviceTuning how)
{
    if (dev->backend->autotune) dev->backend->autotune(dev, how);
}

int64_t device_choices_save(const Device *dev, char *text)
{
    *text = 0;
    return dev->backend->choices_save ? dev->backend->choices_save(dev, text) : 0;
}

Err device_choices_load(Device *dev, const char *text, bool beside)
{
    return dev->backend->choices_load ? dev->backend->choices_load(dev, text, beside) : ERR_OK;
}

void device_leave_free(Device *dev, int multiprocessors)
{
    if (dev->backend->leave_free) dev->backend->leave_free(dev, multiprocessors);
}

void device_time_stalls(Device *dev, bool on)
{
    dev->times_stalls = on;
    dev->stalls_of = pthread_self();
}

Err device_stalled(Stream *s, double *seconds)
{
    Device *dev = s->dev;
    if (dev->backend->stalled) return dev->backend->stalled(s, seconds);
    *seconds = dev->stalled_s;
    dev->stalled_s = 0;
    return ERR_OK;
}

Err device_sync(Stream *s)
{
    if (recorder_hears(s)) TRY(recorder_refuse(s, "a wait of the host"));
    return s->dev->backend->sync(s);
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
    if (e->mark) e->marks->free(e->mark);
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->done_cond);
}

void event_reset(Event *e)
{
    pthread_mutex_lock(&e->lock);
    e->done = e->marked = e->idle = false;
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

static struct timespec deadline_in(double seconds)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    double t = (double)until.tv_nsec * 1e-9 + (seconds > 0 ? seconds : 0);
    until.tv_sec += (time_t)t;
    until.tv_nsec = (long)((t - (double)(time_t)t) * 1e9);
    return until;
}

/* Until event_complete: its outcome. */
static Err wait_completed(Event *e, double timeout_s)
{
    struct timespec until = deadline_in(timeout_s);
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

Err event_wait(Event *e, double timeout_s)
{
    TRY(wait_completed(e, timeout_s));
    return e->marked ? e->marks->wait(e->mark, timeout_s) : ERR_OK;
}

static Err stand_still(Stream *s, Event *e)
{
    TRY(wait_completed(e, 0));
    return e->marked ? e->marks->stream_wait(s, e->mark) : ERR_OK;
}

/* Is there anything to wait for, as far as the host knows? */
static bool is_over(Event *e)
{
    pthread_mutex_lock(&e->lock);
    const bool over = e->done && !e->marked;
    pthread_mutex_unlock(&e->lock);
    return over;
}

static Err wait_and_time(Stream *s, Event *e)
{
    Device *dev = s->dev;
    if (s == &dev->copies || !dev->times_stalls || !pthread_equal(dev->stalls_of, pthread_self()) || is_over(e))
        return stand_still(s, e);
    if (dev->backend->stall_begins) {
        TRY(dev->backend->stall_begins(s));
        TRY(stand_still(s, e));
        return dev->backend->stall_ends(s);
    }
    const double began_s = clock_s();
    TRY(stand_still(s, e));
    dev->stalled_s += clock_s() - began_s;
    return ERR_OK;
}

static Err wait_again(Stream *s, const void *args) { return wait_and_time(s, *(Event *const *)args); }

Err stream_wait(Stream *s, Event *e)
{
    if (!recorder_hears(s) || e->idle) return wait_and_time(s, e);
    return recorder_call(s, wait_again, &e, sizeof e, digest_pointer(DIGEST_EMPTY, e));
}
