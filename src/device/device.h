/*
 * Devices: what memory and ordered work look like, whatever executes it.
 *
 *   cpu    our own kernels (AVX-512, AVX2 or plain C chosen at run time; the same bits from each)
 *   cuda   our own kernels and cuBLASLt (cuda/); in builds that found the CUDA toolkit
 *   null   computes nothing, counts everything: the dry run behind `megatrain plan`
 *
 * A Stream is an in-order queue of ops; the CPU stream runs them at once, the CUDA stream later. A second one holds
 * copies between the device's memory and the host's, which go on beside ops; on the CPU a copy is made when its end is
 * waited for, the latest time there is. An Event marks a point that a stream or the host can wait for; work of
 * communicators completes through events (comm/comm.h).
 * Nothing here is thread-safe: one rank = one Device, used by one thread (which may use OpenMP inside).
 */
#ifndef MEGATRAIN_DEVICE_DEVICE_H
#define MEGATRAIN_DEVICE_DEVICE_H

#include <pthread.h>

#include "base/choices.h"
#include "device/tensor.h"

typedef struct Device Device;
typedef struct OpTable OpTable;

typedef struct Stream {
    Device *dev;
    void *handle; /* cudaStream_t on cuda; on cpu, of copies: their CopyQueue */
} Stream;

/* A point in a stream of a device that runs work later, and how it is waited for; cuda/device.c. */
typedef struct {
    Err (*stream_wait)(Stream *s, void *mark); /* later work of s runs after the point */
    Err (*wait)(void *mark, double timeout_s); /* as event_wait */
    void (*free)(void *mark);
} EventMarks;

/* Set by whoever completes the work; waited for with a deadline. Reusable after event_reset. */
typedef struct Event {
    pthread_mutex_t lock;
    pthread_cond_t done_cond;
    bool done;
    /* Only the enqueueing was completed; the work itself is done when the device passes `mark`. */
    bool marked;
    bool idle; /* nothing was given to any stream: there is nothing to wait for */
    const EventMarks *marks;
    void *mark; /* made with the first use on a device; NULL before */
    Err err;    /* the outcome of the work; its message travels in `message` */
    char message[256];
} Event;

/* Intel's AMX tiles: a processor has none (or its system lends none), has such as sum otherwise than their manual says,
 * or such as keep to it. */
typedef enum { TILES_ABSENT, TILES_DIFFER, TILES_AGREE } Tiles;

__extension__ typedef __int128 WideCount; /* (a GPU does 2^63 FLOP in a few hours) */

/* Counts of the work since device_open: exact integers, the same on every backend. */
typedef struct {
    /* FLOP and bytes of the rows that are in use, on the average. bytes counts every tensor argument once. */
    WideCount flop, bytes;
    int64_t ops;
    int64_t host_reads; /* device_read calls */
    int64_t host_waits; /* on cuda: waits of the host for work that it has enqueued */
    int64_t allocs, alloc_bytes;
    /* Replayed work (recorder.h), which is counted above, too: graphs, the launches that they replace, and calls
     * between them. */
    int64_t graphs, graph_launches, graph_calls;
} DeviceCounters;

typedef struct DeviceGraph DeviceGraph; /* recorded work; on cuda a cudaGraphExec_t */
typedef struct Recorder Recorder;       /* device/recorder.h */

typedef enum { DEVICE_CPU, DEVICE_CUDA, DEVICE_NULL, DEVICE_KINDS } DeviceKind;

/* Products take the library's first choice of algorithm; the fastest of those that gave the same bits; the fastest. */
typedef enum { TUNE_OFF, TUNE_SAME_BITS, TUNE_FASTEST } DeviceTuning;

/* How a kind of device is opened and how memory moves; one table per kind, behind the functions below. */
typedef struct {
    Err (*open)(Device *dev, int index, Isa isa);
    void (*close)(Device *dev);
    Err (*alloc)(Device *dev, int64_t size_bytes, void **out);
    void (*free)(Device *dev, void *p, int64_t size_bytes);
    /* Behind device_alloc_far; NULL: as alloc and free. */
    Err (*alloc_far)(Device *dev, int64_t size_bytes, void **out);
    void (*free_far)(Device *dev, void *p);
    Err (*write)(Stream *s, void *device_dst, const void *host_src, int64_t size_bytes);
    Err (*read)(Stream *s, void *host_dst, const void *device_src, int64_t size_bytes);
    Err (*copy)(Stream *s, void *device_dst, const void *device_src, int64_t size_bytes);
    Err (*zero)(Stream *s, void *device_dst, int64_t size_bytes);
    Err (*sync)(Stream *s);
    /* NULL where ops run at once: */
    Err (*host_alloc)(Device *dev, int64_t size_bytes, void **out);
    void (*host_free)(Device *dev, void *p);
    Err (*read_later)(Stream *s, void *host_dst, const void *device_src, int64_t size_bytes);
    Err (*write_later)(Stream *s, void *device_dst, const void *host_src, int64_t size_bytes);
    Err (*mark)(Stream *s, Event *e);
    Err (*wait)(Stream *s, Event *e);
    /* Mark the points of the stream between which it stands still; the sum over the pairs that it has passed. */
    Err (*stall_begins)(Stream *s);
    Err (*stall_ends)(Stream *s);
    Err (*stalled)(Stream *s, double *seconds);
    Err (*record_begin)(Stream *s);
    Err (*record_end)(Stream *s, DeviceGraph **out, int64_t *launches);
    Err (*replay)(Stream *s, DeviceGraph *graph);
    void (*graph_free)(DeviceGraph *graph);
    /* NULL where there is nothing to choose: */
    void (*autotune)(Device *dev, DeviceTuning how);
    int64_t (*choices_save)(const Device *dev, char *text);
    Err (*choices_load)(Device *dev, const char *text, bool beside);
    void (*leave_free)(Device *dev, int multiprocessors);
} DeviceBackend;

/* Copies of a device whose ops run at once, oldest first: those that nobody has waited for are still to be made. */
enum { COPY_QUEUE_MOST = 16 };
typedef struct {
    struct {
        void *to;
        const void *from;
        int64_t size_bytes;
    } copy[COPY_QUEUE_MOST];
    int64_t asked, made; /* copies so far; copy i is at i % COPY_QUEUE_MOST */
} CopyQueue;

struct Device {
    DeviceKind kind;
    const char *name; /* "cpu", "cuda", "null" */
    const DeviceBackend *backend;
    const OpTable *ops;
    bool is_null;
    /* On null: the end of all that was allocated, so that different allocations have different addresses there, too. */
    char *null_end;
    int threads; /* OpenMP threads of this rank's kernels; multiprocessors on cuda */
    Isa isa;
    DotKind dot;
    bool dot_pairs;          /* DOT_VDPBF16 runs by the instruction itself; else by other ones, slowly */
    bool dot_tiles;          /* the same for DOT_AMX */
    char *workspace;         /* kernels' own scratch: packing buffers, partial sums */
    int64_t workspace_bytes; /* DEVICE_WORKSPACE_BYTES on cpu and cuda */
    int64_t pinned_bytes;    /* on cuda: size of the ring through which host data travels */
    int64_t shared_bytes;    /* on cuda: shared memory that a block may have if it asks for it */
    void *cuda;              /* cuda/device_cuda.h */
    const OpTable *wide_ops; /* the table that device/widen.c calls, where 16-bit tensors are widened first */
    Arena staging;           /* for the widened copies */
    DeviceCounters counters;
    bool times_stalls;   /* stalls of the stream are timed */
    pthread_t stalls_of; /* in waits of this thread alone: others may wait beside it */
    double stalled_s;    /* where ops run at once: seconds that device_stalled has still to report */
    Stream stream;       /* the compute stream */
    Stream copies;       /* copies beside it; no op runs here */
    CopyQueue queue;     /* on cpu */
    /* Asked after every wait for the device: did work of others in its streams fail, such as a communicator's? The data
     * read is then worthless. NULL: there is no such work. */
    Err (*failure)(void *user);
    void *failure_user;
    int beside; /* collectives that were begun and not yet waited for, beside which ops are issued (optim/ddp.h) */
    Recorder *recorder; /* hears all work that the compute stream is given; NULL: there is none */
};

/*
 * DEVICE_LIBRARY_BYTES: what CUDA's context, modules and cuBLASLt may take on a GPU beside everything that is
 * planned; a run must leave that much free.
 */
enum { DEVICE_WORKSPACE_BYTES = 64 << 20, DEVICE_LIBRARY_BYTES = 768 << 20, DEVICE_PINNED_BYTES = 8 << 20 };

/*
 * threads 0 = as many as OpenMP would use. index: which GPU of this host. ERR_CONFIG: kind not built in, no
 * such GPU, ISA not supported by this processor. ERR_MEMORY.
 */
typedef struct {
    DeviceKind kind;
    int index, threads;
    Isa isa;
    DotKind dot;
    int64_t staging_bytes; /* > 0: ops on 16-bit tensors run widened, with so much memory (cpu and null) */
    int64_t pinned_bytes;  /* on cuda: host memory through which data travels; DEVICE_PINNED_BYTES at least */
} DeviceChoice;

Err device_open(Device *dev, DeviceChoice choice);
void device_close(Device *dev);

/*
 * For a process that is one of several, before anything else of this file. CUDA then loads kernels and libraries
 * when it begins, not with their first use: loading may wait for all that runs on the GPU, such as a collective that
 * waits for a rank which in turn waits for this one. And streams, one a group and those of libraries, have as many
 * queues of the hardware as there are: two in one queue wait for each other's work. (CUDA_MODULE_LOADING and
 * CUDA_DEVICE_MAX_CONNECTIONS, unless the environment has them, for the driver's own use.)
 */
void device_cuda_for_several(void);

/*
 * GPUs of this host that kind cuda could open: their number, 0 with the reason in `why` (a sentence without
 * a full stop), such as no toolkit at build time, no driver, no GPU.
 */
int device_cuda_count(char *why, int64_t why_size);
bool device_has_cuda(void); /* this build has the backend */

/* Whether cuBLASLt, which kind cuda multiplies with, is found at run time; if not, the reason in *why. */
bool device_cuda_blas(const char **why);

typedef struct {
    char name[128];
    char uuid[40];    /* the same for all processes that see this GPU, different for any other */
    char pci[16];     /* its address, "0000:1b:00.0" */
    int major, minor; /* compute capability */
    int multiprocessors;
    int64_t total_bytes, free_bytes;
    int driver, runtime; /* versions: 1000 * major + 10 * minor */
} DeviceInfo;

/* 90 is 9.0. */
static inline int device_info_capability(const DeviceInfo *gpu) { return 10 * gpu->major + gpu->minor; }

/* Describes GPU `index`. ERR_CONFIG when there is none. */
Err device_cuda_info(int index, DeviceInfo *out);

/* Zero-filled memory for an arena, touched once in parallel. On the null device an address not to be
 * dereferenced. Counted. ERR_MEMORY. */
Err device_alloc(Device *dev, int64_t size_bytes, void **out);
void device_free(Device *dev, void *p, int64_t size_bytes);

/*
 * The same in memory of the host, which is the device's memory, too, on the CPU. Elsewhere ops and copies reach it
 * across the link between the two, as if it were the device's own, at the rate of that link; the host must not touch
 * what is in it while they may be at work. Not counted.
 */
Err device_alloc_far(Device *dev, int64_t size_bytes, void **out);
void device_free_far(Device *dev, void *p, int64_t size_bytes);
bool device_null_is_far(const void *p); /* on the null device */

/* Host to device and back, in stream order; device_read returns when the data is there. No-ops on null. */
Err device_write(Stream *s, void *device_dst, const void *host_src, int64_t size_bytes);
Err device_read(Stream *s, void *host_dst, const void *device_src, int64_t size_bytes);
Err device_zero(Stream *s, void *device_dst, int64_t size_bytes);
Err device_copy(Stream *s, void *device_dst, const void *device_src, int64_t size_bytes);

/*
 * A read that does not wait: into memory of device_host_alloc (zero-filled; ERR_MEMORY), where the data is once an
 * event that was marked behind it is done. device_mark: `e`, initialised and waited for by nobody, is done when
 * everything enqueued so far is. device_wait waits for that on the host, without a limit, and reports what went wrong.
 * device_write_later is the other direction: the host's memory must stay as it is until such an event is done.
 */
Err device_host_alloc(Device *dev, int64_t size_bytes, void **out);
void device_host_free(Device *dev, void *p); /* may be NULL */
Err device_read_later(Stream *s, void *host_dst, const void *device_src, int64_t size_bytes);
Err device_write_later(Stream *s, void *device_dst, const void *host_src, int64_t size_bytes);
Err device_mark(Stream *s, Event *e);
Err device_wait(Stream *s, Event *e);

/* Whether a stream's work can be recorded as graphs (recorder.h). */
bool device_can_record(const Device *dev);

/*
 * Makes a call that no graph can hold, now. Recorded work remembers the call between its graphs, with a copy of the
 * arguments, and makes it again in each replay. The call's changes on the host are then made, too, such as noting what
 * is still to be waited for. Host code around the call does not run in a replay. digest: of the arguments.
 */
typedef Err DeviceCall(Stream *s, const void *args);
Err device_call(Stream *s, DeviceCall *call, const void *args, int64_t bytes, uint64_t digest);

/*
 * Algorithms that a backend may choose by timing them, shape by shape (DeviceTuning above). The choices as
 * text, of at most DEVICE_CHOICES_BYTES with the closing zero (save returns its length), can be kept and
 * loaded, so that later runs and other ranks choose alike. `beside`: those held stay, and only others are added.
 * ERR_CONFIG for another device's text.
 */
enum { DEVICE_CHOICES_BYTES = 192 << 10 };
void device_autotune(Device *dev, DeviceTuning how);
int64_t device_choices_save(const Device *dev, char *text);
Err device_choices_load(Device *dev, const char *text, bool beside);

/* Ops that are issued beside collectives (Device.beside) leave so many of a GPU's multiprocessors to the collectives,
 * as far as they can without other bits. Choices are forgotten. */
void device_leave_free(Device *dev, int multiprocessors);

/*
 * Seconds that the stream has stood still in stream_wait since the call before, for work of communicators or copies.
 * Only waits of the thread that turned timing on are timed. Where ops run at once the host's clock times them; on cuda
 * the device's does, for the waits that it has passed. At most DEVICE_STALLS_MOST of these may be unread: more are not
 * counted.
 */
enum { DEVICE_STALLS_MOST = 1 << 14 };
void device_time_stalls(Device *dev, bool on); /* off at first: no clock is read */
Err device_stalled(Stream *s, double *seconds);

/* Returns when everything enqueued so far is done; reports what went wrong in it. */
Err device_sync(Stream *s);

void event_init(Event *e);
void event_release(Event *e);
void event_reset(Event *e);
void event_complete(Event *e, Err err, const char *message); /* the worker calls it */
/* Waits on the host. timeout_s <= 0: no limit. ERR_HANG after the limit, else the work's own outcome. */
Err event_wait(Event *e, double timeout_s);
/* Later work of the stream runs after the event. Waits on the host until the work is done, or, if it is work of a
 * device, enqueued there: the stream then waits for the rest. */
Err stream_wait(Stream *s, Event *e);

Isa isa_best(void); /* the widest that this processor has */
const char *isa_name(Isa isa);
bool isa_supported(Isa isa);
const char *dot_name(DotKind kind);
bool dot_supported(void); /* this processor and this build have VDPBF16PS */
Tiles dot_tiles(void);    /* the same for TDPBF16PS, which the first call asks for and checks */
DotKind dot_best(void);   /* the fastest here, for debug.dot = auto */

/* The backends' op tables, one per build of src/cpu/ (src/cpu/table.c), and the null table (ops.c). */
extern const OpTable cpu_avx512_ops, cpu_avx2_ops, cpu_c_ops, null_ops;
extern const OpTable widened_ops;  /* widen.c */
bool cpu_avx512_has_pairs(void);   /* src/cpu/gemm_pairs.c: VDPBF16PS, of the build and of the processor */
bool cpu_avx512_has_tiles(void);   /* src/cpu/gemm_tiles.c: TDPBF16PS, and the system's leave to use it */
bool cpu_avx512_tiles_agree(void); /* it gives the bits of its definition; asked where there is one */

#endif
