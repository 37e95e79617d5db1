/*
 * The CUDA backend of device/device.h: one GPU, one stream, plain cudaMalloc (once an arena, never inside a
 * step), and a ring of pinned memory through which host data travels, so that a write may return before the
 * copy is done. Ops are in table.c and the .cu files, products in gemm.c.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "device_cuda.h"
#include "gemm.h"

enum { PINNED_ALIGN = 256 };

static CudaDevice *device_of(Stream *s) { return s->dev->cuda; }

static int64_t round_up(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

/* ---- what there is ---- */

/* The runtime calls a driver that is not there one that is too old. */
static const char *driver_text(char *text, size_t size)
{
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (!driver) snprintf(text, size, "no NVIDIA driver on this machine");
    else
        snprintf(text, size, "the NVIDIA driver supports CUDA up to %d.%d, this program needs %d.%d", driver / 1000,
                 driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    return text;
}

int device_cuda_count(char *why, int64_t why_size)
{
    int count = 0;
    char driver[128];
    cudaError_t code = cudaGetDeviceCount(&count);
    if (code == cudaSuccess && count > 0) return count;
    snprintf(why, (size_t)why_size, "CUDA finds no GPU: %s",
             code == cudaSuccess                   ? "the count is 0"
             : code == cudaErrorInsufficientDriver ? driver_text(driver, sizeof driver)
                                                   : cudaGetErrorString(code));
    cudaGetLastError(); /* not sticky: what follows starts clean */
    return 0;
}

static Err need_device(int index)
{
    char why[256];
    int count = device_cuda_count(why, sizeof why);
    if (count == 0)
        return err_set(ERR_CONFIG, "%s", why),
               err_hint("set run.device=cpu, or see nvidia-smi and the driver");
    if (index < count) return ERR_OK;
    return err_set(ERR_CONFIG, "GPU %d is wanted, this host has %d", index, count),
           err_hint("start at most as many local ranks as there are GPUs");
}

Err device_cuda_info(int index, DeviceInfo *out)
{
    struct cudaDeviceProp prop;
    size_t free_bytes, total_bytes;
    TRY(need_device(index));
    TRY(cuda_check(cudaGetDeviceProperties(&prop, index), "reading the GPU's properties"));
    TRY(cuda_check(cudaSetDevice(index), "choosing the GPU"));
    TRY(cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes), "reading the GPU's free memory"));
    *out = (DeviceInfo){ .major = prop.major,
                         .minor = prop.minor,
                         .multiprocessors = prop.multiProcessorCount,
                         .total_bytes = (int64_t)total_bytes,
                         .free_bytes = (int64_t)free_bytes };
    snprintf(out->name, sizeof out->name, "%.*s", (int)sizeof out->name - 1, prop.name);
    for (int i = 0; i < 16; i++) snprintf(out->uuid + 2 * i, 3, "%02x", (unsigned char)prop.uuid.bytes[i]);
    snprintf(out->pci, sizeof out->pci, "%04x:%02x:%02x.0", (unsigned)prop.pciDomainID & 0xffff,
             (unsigned)prop.pciBusID & 0xff, (unsigned)prop.pciDeviceID & 0xff);
    TRY(cuda_check(cudaDriverGetVersion(&out->driver), "reading the driver's version"));
    return cuda_check(cudaRuntimeGetVersion(&out->runtime), "reading the runtime's version");
}

/* ---- opening ---- */

static Err open_parts(Device *dev, CudaDevice *d)
{
    struct cudaDeviceProp prop;
    void *workspace, *pinned;
    TRY(cuda_check(cudaSetDevice(d->index), "choosing the GPU"));
    TRY(cuda_check(cudaGetDeviceProperties(&prop, d->index), "reading the GPU's properties"));
    cuda_remember(d->index, &prop);
    if (prop.major < 8)
        return err_set(ERR_CONFIG, "GPU %d (%s) has compute capability %d.%d, 8.0 or newer is needed",
                       d->index, prop.name, prop.major, prop.minor),
               err_hint("set run.device=cpu");
    dev->threads = prop.multiProcessorCount;
    dev->shared_bytes = (int64_t)prop.sharedMemPerBlockOptin;
    TRY(cuda_check(cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking), "creating the stream"));
    TRY(cuda_check(cudaStreamCreateWithFlags(&d->copies, cudaStreamNonBlocking), "creating the stream of copies"));
    dev->stream.handle = d->stream;
    dev->copies.handle = d->copies;
    dev->pinned_bytes = round_up(dev->pinned_bytes, PINNED_PARTS * PINNED_ALIGN);
    TRY(cuda_check(cudaMallocHost(&pinned, (size_t)dev->pinned_bytes), "taking pinned host memory"));
    d->pinned = pinned;
    for (int i = 0; i < PINNED_PARTS; i++)
        TRY(cuda_check(cudaEventCreateWithFlags(&d->pinned_free[i], cudaEventDisableTiming),
                       "making an event"));
    TRY(cuda_check(cudaMalloc(&workspace, DEVICE_WORKSPACE_BYTES), "taking the kernels' workspace"));
    dev->workspace = workspace;
    dev->workspace_bytes = DEVICE_WORKSPACE_BYTES;
    return cuda_gemm_open(&d->gemm);
}

static void free_stalls(CudaDevice *d)
{
    for (int i = 0; i < DEVICE_STALLS_MOST; i++) {
        if (d->stalls[i].begin) cudaEventDestroy(d->stalls[i].begin);
        if (d->stalls[i].end) cudaEventDestroy(d->stalls[i].end);
    }
}

static void cuda_close(Device *dev)
{
    CudaDevice *d = dev->cuda;
    if (!d) return;
    if (d->copies) cudaStreamSynchronize(d->copies);
    if (d->stream) cudaStreamSynchronize(d->stream);
    free_stalls(d);
    if (d->gemm) cuda_gemm_close(d->gemm);
    if (dev->workspace) cudaFree(dev->workspace);
    if (d->pinned) cudaFreeHost(d->pinned);
    for (int i = 0; i < PINNED_PARTS; i++)
        if (d->pinned_free[i]) cudaEventDestroy(d->pinned_free[i]);
    if (d->stream) cudaStreamDestroy(d->stream);
    if (d->copies) cudaStreamDestroy(d->copies);
    free(d);
}

static Err cuda_open(Device *dev, int index, Isa isa)
{
    (void)isa;
    TRY(need_device(index));
    CudaDevice *d = calloc(1, sizeof *d);
    if (!d) return err_set(ERR_MEMORY, "no host memory for the device's own state");
    d->index = index;
    dev->cuda = d;
    dev->ops = &cuda_ops;
    return open_parts(dev, d);
}

/* ---- memory ---- */

static Err cuda_alloc(Device *dev, int64_t size_bytes, void **out)
{
    char what[64];
    CudaDevice *d = dev->cuda;
    snprintf(what, sizeof what, "taking %.1f MiB of device memory", (double)size_bytes / (1 << 20));
    TRY(cuda_check(cudaMalloc(out, (size_t)size_bytes), what));
    return cuda_check(cudaMemsetAsync(*out, 0, (size_t)size_bytes, d->stream), "clearing device memory");
}

static void cuda_free(Device *dev, void *p, int64_t size_bytes)
{
    (void)dev, (void)size_bytes;
    cudaFree(p);
}

/* (pinned memory has one address for the host and for every GPU, whose kernels read and write it over the link) */
static Err cuda_alloc_far(Device *dev, int64_t size_bytes, void **out)
{
    char what[64];
    CudaDevice *d = dev->cuda;
    snprintf(what, sizeof what, "taking %.1f MiB of pinned host memory", (double)size_bytes / (1 << 20));
    TRY(cuda_check(cudaMallocHost(out, (size_t)size_bytes), what));
    return cuda_check(cudaMemsetAsync(*out, 0, (size_t)size_bytes, d->stream), "clearing pinned memory");
}

/* After a wait: was it for something? */
static Err others_failure(const Stream *s)
{
    return s->dev->failure ? s->dev->failure(s->dev->failure_user) : ERR_OK;
}

static Err cuda_sync(Stream *s)
{
    CudaDevice *d = device_of(s);
    s->dev->counters.host_waits++;
    TRY(cuda_check(cudaStreamSynchronize(d->stream), "waiting for the GPU"));
    d->pinned_used = 0;
    return others_failure(s);
}

/* The next part of the ring, once the stream has passed the copies that went through it a turn ago. */
static Err pinned_next(Stream *s)
{
    CudaDevice *d = device_of(s);
    s->dev->counters.host_waits++;
    TRY(cuda_check(cudaEventRecord(d->pinned_free[d->pinned_part], d->stream),
                   "marking a point in a stream"));
    d->pinned_part = (d->pinned_part + 1) % PINNED_PARTS;
    d->pinned_used = 0;
    return cuda_check(cudaEventSynchronize(d->pinned_free[d->pinned_part]), "waiting for copies to the GPU");
}

/* Room for up to `want` bytes of the ring; waits for earlier copies when it is full. */
static Err pinned_take(Stream *s, int64_t want, char **at, int64_t *got)
{
    CudaDevice *d = device_of(s);
    const int64_t part = s->dev->pinned_bytes / PINNED_PARTS;
    if (d->pinned_used == part) TRY(pinned_next(s));
    *at = d->pinned + d->pinned_part * part + d->pinned_used;
    *got = part - d->pinned_used;
    if (want < *got) *got = want;
    d->pinned_used += round_up(*got, PINNED_ALIGN);
    return ERR_OK;
}

static Err cuda_write(Stream *s, void *to, const void *from, int64_t size_bytes)
{
    for (int64_t done = 0, n; done < size_bytes; done += n) {
        char *at;
        TRY(pinned_take(s, size_bytes - done, &at, &n));
        memcpy(at, (const char *)from + done, (size_t)n);
        TRY(cuda_check(cudaMemcpyAsync((char *)to + done, at, (size_t)n, cudaMemcpyDefault, device_of(s)->stream),
                       "copying to the GPU"));
    }
    return ERR_OK;
}

static Err cuda_read(Stream *s, void *to, const void *from, int64_t size_bytes)
{
    for (int64_t done = 0, n; done < size_bytes; done += n) {
        char *at;
        TRY(pinned_take(s, size_bytes - done, &at, &n));
        TRY(cuda_check(cudaMemcpyAsync(at, (const char *)from + done, (size_t)n, cudaMemcpyDefault,
                                       device_of(s)->stream),
                       "copying from the GPU"));
        TRY(cuda_sync(s));
        memcpy((char *)to + done, at, (size_t)n);
    }
    return ERR_OK;
}

static Err cuda_host_alloc(Device *dev, int64_t size_bytes, void **out)
{
    (void)dev;
    TRY(cuda_check(cudaMallocHost(out, (size_t)size_bytes), "taking pinned host memory"));
    memset(*out, 0, (size_t)size_bytes);
    return ERR_OK;
}

static void cuda_host_free(Device *dev, void *p)
{
    (void)dev;
    cudaFreeHost(p);
}

static Err cuda_read_later(Stream *s, void *to, const void *from, int64_t size_bytes)
{
    return cuda_check(cudaMemcpyAsync(to, from, (size_t)size_bytes, cudaMemcpyDefault, s->handle),
                      "copying from the GPU");
}

static Err cuda_write_later(Stream *s, void *to, const void *from, int64_t size_bytes)
{
    return cuda_check(cudaMemcpyAsync(to, from, (size_t)size_bytes, cudaMemcpyDefault, s->handle),
                      "copying to the GPU");
}

static Err cuda_copy(Stream *s, void *to, const void *from, int64_t size_bytes)
{
    return cuda_check(cudaMemcpyAsync(to, from, (size_t)size_bytes, cudaMemcpyDefault, device_of(s)->stream),
                      "copying on the GPU");
}

static Err cuda_zero(Stream *s, void *to, int64_t size_bytes)
{
    return cuda_check(cudaMemsetAsync(to, 0, (size_t)size_bytes, device_of(s)->stream),
                      "clearing on the GPU");
}

/* ---- events ---- */

static Err mark_stream_wait(Stream *s, void *mark)
{
    return cuda_check(cudaStreamWaitEvent(s->handle, mark, 0), "waiting for an event");
}

static Err mark_wait(void *mark, double timeout_s)
{
    enum { NAP_US = 200 };
    const double until = clock_s() + timeout_s;
    cudaError_t code = cudaEventQuery(mark);
    for (; code == cudaErrorNotReady; code = cudaEventQuery(mark)) {
        cudaGetLastError(); /* not an error */
        if (timeout_s > 0 && clock_s() > until)
            return err_set(ERR_HANG, "work on the GPU did not finish within %.1f s", timeout_s);
        usleep(NAP_US);
    }
    return cuda_check(code, "waiting for an event");
}

static void mark_free(void *mark) { cudaEventDestroy(mark); }

Err cuda_event_mark(Event *e, cudaStream_t stream)
{
    static const EventMarks marks = { mark_stream_wait, mark_wait, mark_free };
    if (!e->mark) {
        cudaEvent_t made;
        TRY(cuda_check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "making an event"));
        e->mark = made;
        e->marks = &marks;
    }
    e->marked = true;
    return cuda_check(cudaEventRecord(e->mark, stream), "marking a point in a stream");
}

static Err cuda_mark(Stream *s, Event *e) { return cuda_event_mark(e, s->handle); }

static Err cuda_wait(Stream *s, Event *e)
{
    s->dev->counters.host_waits++;
    TRY(cuda_check(cudaEventSynchronize(e->mark), "waiting for the GPU"));
    return others_failure(s);
}

/* ---- stalls ---- */

/* Before the host waits for what a communicator enqueues: the stream may run out of work meanwhile. */
static Err cuda_stall_begins(Stream *s)
{
    CudaDevice *d = device_of(s);
    d->stall = NULL;
    if (d->stalls_begun - d->stalls_read == DEVICE_STALLS_MOST) return ERR_OK;
    CudaStall *t = &d->stalls[d->stalls_begun % DEVICE_STALLS_MOST];
    if (!t->begin) TRY(cuda_check(cudaEventCreate(&t->begin), "making an event"));
    if (!t->end) TRY(cuda_check(cudaEventCreate(&t->end), "making an event"));
    d->stall = t;
    return cuda_check(cudaEventRecord(t->begin, d->stream), "timing a wait");
}

static Err cuda_stall_ends(Stream *s)
{
    CudaDevice *d = device_of(s);
    if (!d->stall) return ERR_OK;
    d->stalls_begun++;
    return cuda_check(cudaEventRecord(d->stall->end, d->stream), "timing a wait");
}

static Err cuda_stalled(Stream *s, double *seconds)
{
    CudaDevice *d = device_of(s);
    *seconds = 0;
    for (; d->stalls_read < d->stalls_begun; d->stalls_read++) {
        const CudaStall *t = &d->stalls[d->stalls_read % DEVICE_STALLS_MOST];
        float ms;
        const cudaError_t passed = cudaEventQuery(t->end);
        if (passed == cudaErrorNotReady) return cudaGetLastError(), ERR_OK;
        TRY(cuda_check(passed, "timing a wait"));
        TRY(cuda_check(cudaEventElapsedTime(&ms, t->begin, t->end), "timing a wait"));
        *seconds += 1e-3 * (double)ms;
    }
    return ERR_OK;
}

/* ---- graphs ---- */

static Err cuda_record_begin(Stream *s)
{
    return cuda_check(cudaStreamBeginCapture(device_of(s)->stream, cudaStreamCaptureModeThreadLocal),
                      "beginning to record a graph");
}

static Err cuda_record_end(Stream *s, DeviceGraph **out, int64_t *launches)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    size_t nodes = 0;
    TRY(cuda_check(cudaStreamEndCapture(device_of(s)->stream, &graph), "recording a graph"));
    Err err = cuda_check(cudaGraphGetNodes(graph, NULL, &nodes), "counting what a graph has");
    if (!err && nodes) err = cuda_check(cudaGraphInstantiate(&exec, graph, 0), "making a graph executable");
    *launches = (int64_t)nodes;
    cudaGraphDestroy(graph);
    *out = (DeviceGraph *)exec;
    return err;
}

static Err cuda_replay(Stream *s, DeviceGraph *graph)
{
    return cuda_check(cudaGraphLaunch((cudaGraphExec_t)graph, device_of(s)->stream), "running a graph");
}

static void cuda_graph_free(DeviceGraph *graph) { cudaGraphExecDestroy((cudaGraphExec_t)graph); }

/* ---- algorithms of products ---- */

static CudaGemm *gemm_of(const Device *dev) { return ((CudaDevice *)dev->cuda)->gemm; }

static void cuda_autotune(Device *dev, DeviceTuning how) { cuda_gemm_autotune(gemm_of(dev), how); }

static int64_t cuda_choices_save(const Device *dev, char *text) { return cuda_gemm_save(gemm_of(dev), text); }

static Err cuda_choices_load(Device *dev, const char *text, bool beside)
{
    return beside ? cuda_gemm_add(gemm_of(dev), text) : cuda_gemm_load(gemm_of(dev), text);
}

static void cuda_leave_free(Device *dev, int n) { cuda_gemm_leave_free(gemm_of(dev), n); }

const DeviceBackend cuda_backend = { .open = cuda_open,
                                     .close = cuda_close,
                                     .alloc = cuda_alloc,
                                     .free = cuda_free,
                                     .alloc_far = cuda_alloc_far,
                                     .free_far = cuda_host_free,
                                     .write = cuda_write,
                                     .read = cuda_read,
                                     .copy = cuda_copy,
                                     .zero = cuda_zero,
                                     .sync = cuda_sync,
                                     .host_alloc = cuda_host_alloc,
                                     .host_free = cuda_host_free,
                                     .read_later = cuda_read_later,
                                     .write_later = cuda_write_later,
                                     .mark = cuda_mark,
                                     .wait = cuda_wait,
                                     .stall_begins = cuda_stall_begins,
                                     .stall_ends = cuda_stall_ends,
                                     .stalled = cuda_stalled,
                                     .record_begin = cuda_record_begin,
                                     .record_end = cuda_record_end,
                                     .replay = cuda_replay,
                                     .graph_free = cuda_graph_free,
                                     .autotune = cuda_autotune,
                                     .choices_save = cuda_choices_save,
                                     .choices_load = cuda_choices_load,
                                     .leave_free = cuda_leave_free };
