/*
 * Between the emulator's own files: fibers, warps, device memory, streams. Kernels see emu.h only.
 *
 *   fiber.cpp    stack switch, order of threads, running a launch      warp.cpp   what threads do together
 *   memory.cpp   device and pinned memory, who may touch it            stream.cpp streams, events, graphs
 *   cudart.cpp   the CUDA runtime's C functions                    round.cpp  results as a chip rounds them
 *   hopper.cpp, wgmma.cpp   Hopper's instructions (hopper.h)       tensor_map.cpp  the driver's call for tensor maps
 *
 * Library stubs (cublaslt.cpp, nccl.cpp) need submit() and device_holds().
 *
 * One mutex serialises every call of the runtime; kernels run on the calling thread, under it.
 */
#ifndef MEGATRAIN_EMU_RUNTIME_H
#define MEGATRAIN_EMU_RUNTIME_H

#include "emu.h"

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

/*
 * Sanitizers watch the kernels, not the emulator: their lanes build these files without them, with -DEMU_ASAN or
 * -DEMU_TSAN, and with -fno-builtin, so that no loop becomes a call of memcpy in the name of some thread.
 */
#ifdef EMU_TSAN
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void *fiber);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *address);
void __tsan_release(void *address);
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreWritesBegin(const char *file, int line);
void AnnotateIgnoreWritesEnd(const char *file, int line);
}
#endif

#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace emu
{

enum { WARP_LANES = 32, MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / WARP_LANES };
enum { SHARED_LIMIT = 227 << 10 /* of any GPU */, SHARED_DEFAULT = 48 << 10 };
enum { EXIT_FAILURE_FOUND = 97 };
/* Ends the process as one that has failed. */
[[noreturn]] void end_failed();

/* The GPU that is imitated: EMU_GPU names its compute capability. */
struct Gpu {
    const char *name;
    int major, minor;
    int shared_block, shared_sm; /* KiB: of a block that asks for it, of a multiprocessor */
    int threads_sm, blocks_sm;
};
const Gpu &gpu(); /* cudart.cpp */

/* For ThreadSanitizer: what came before release(token) is ordered before what follows a later acquire(token). */
inline void acquire(void *token)
{
#ifdef EMU_TSAN
    __tsan_acquire(token);
#endif
    (void)token;
}
inline void release(void *token)
{
#ifdef EMU_TSAN
    __tsan_release(token);
#endif
    (void)token;
}
/* While one exists: what the library does to the emulator's own vectors is no access of the thread that runs. */
struct Unwatched {
#ifdef EMU_TSAN
    Unwatched() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__), AnnotateIgnoreWritesBegin(__FILE__, __LINE__); }
    ~Unwatched() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__), AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
#else
    Unwatched() {}
#endif
};
/* For AddressSanitizer. */
inline void forbid(const void *p, size_t size)
{
#ifdef EMU_ASAN
    __asan_poison_memory_region(p, size);
#endif
    (void)p, (void)size;
}
inline void permit(const void *p, size_t size)
{
#ifdef EMU_ASAN
    __asan_unpoison_memory_region(p, size);
#endif
    (void)p, (void)size;
}

/* ---- fibers (fiber.cpp) ---- */

struct Warp;

enum State : uint8_t { READY, WAITING, DONE };

struct Fiber : Thread {
    State state = DONE;
    int number = 0; /* in the block */
    Warp *warp = nullptr;
    Site waits_at = { "", 0 };
    const char *waits_for = "";
    void *stack_pointer = nullptr;
    char *stack = nullptr;
    std::vector<Copy> copies; /* asynchronous, oldest first */
    std::vector<int> groups;  /* for each committed group: copies up to its end */
    const void *waits_on = nullptr; /* hopper.h: wake() */
    std::vector<int> phases;        /* of each mbarrier, the last that this thread saw the end of */
    void *tsan = nullptr, *asan = nullptr;
};

/* Lanes that wait for each other in one warp operation. `lane[i]` points into the waiting fiber's stack. */
struct Meeting;
typedef void Combine(Meeting &m, uint32_t lanes);

struct Meeting {
    uint32_t mask = 0, arrived = 0;
    const char *what = ""; /* the operation; all lanes come with the same */
    Site at = { "", 0 };
    void *lane[WARP_LANES];
    Combine *combine = nullptr;
    unsigned round = 0;
};

enum { MEETINGS = 8 }; /* different masks that a warp may wait for at one time */

struct Warp {
    int number;
    unsigned count = 0; /* of lanes that are present */
    Meeting meetings[MEETINGS];
    Fiber *fibers[WARP_LANES];
    uint32_t present = 0, exited = 0;
};

struct Barrier {
    int arrived = 0, predicates = 0;
    int count = 0; /* of the last round: threads whose predicate held */
    bool all = false;
    unsigned round = 0;
    const char *what = "";
    Site at = { "", 0 };
};

/* The block that runs now. */
struct Block {
    std::vector<Fiber *> fibers;
    std::vector<Warp> warps;
    Barrier barrier;
    int live = 0;
};

extern Block block;
Fiber *current();                     /* the fiber of `self`; NULL outside kernels */
const char *kernel_name();            /* of the launch that runs now, or "" */
void wait(const char *what, Site at); /* gives way until the state is READY again */
bool below_stack(const void *p);      /* just below the running thread's stack */
void pass_on();                       /* others may go on; the state stays READY */
bool random_order(), reverse_order();
uint32_t random_bits();

/* Runs the whole launch now. */
void run_launch(const Launch &launch, const std::function<void()> &body);
/* The error that cudart would give for this launch; prints why. */
cudaError_t check_launch(const Launch &launch);
void set_dynamic_limit(const void *kernel, int bytes);
int dynamic_limit(const void *kernel);
size_t shared_limit(const void *kernel); /* of all shared memory of a block */
std::string demangled(const char *tag); /* "softmax_kernel<float, 4>" */

/* ---- what a block does together (warp.cpp) ---- */

void leave_block(Fiber *f);              /* the thread has returned */
/* Fresh memory for a block, of which arrays and the dynamic area may take `most`: 0xff, NaN in every float type. */
void shared_begin(size_t dynamic_bytes, size_t most);
void shared_end();                       /* nothing was written beside an array */
enum { SHADOW_BYTES = 512 << 10 };        /* more than shared memory with all its red zones */
unsigned char *shared_base();            /* of the dynamic area: address 0 of shared memory */
size_t shared_extent();                  /* from there to the end of all arrays */
unsigned char *shared_at(uint32_t offset, size_t size); /* null: not all of it is in one array */
void *named_token(int id, unsigned round);

/* Threads and blocks of __launch_bounds__; 0: none. */
struct LaunchBounds {
    unsigned threads;
    int blocks;
};
void hopper_launch(); /* a launch begins */

/* The number of these 16 bits. */
template <Half TYPE> float from_half(uint32_t bits)
{
    if (TYPE == BFLOAT16) return bits_as<float>(bits << 16);
    const uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    if (rest >= 0x7c00u) return bits_as<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    return bits_as<float>(sign |
                          bits_as<uint32_t>(bits_as<float>(rest << 13) * 0x1p112f)); /* subnormals come out right too */
}

/* ---- rounding (round.cpp) ---- */

/*
 * c and `count` products, at most 16, as tensor cores add them: each cut off at 2^-25 of the largest (2^-24 but on
 * Hopper), a product as large as its factors' exponents say, the sum toward zero.
 */
float chip_sum(float c, const float *a, int a_step, const float *b, int b_step, int count);
/* The same of fp8, at most 32 products: each cut off at 2^-13 of the largest. */
float chip_sum_fp8(float c, const float *a, int a_step, const float *b, int b_step, int count);

/* ---- memory (memory.cpp) ---- */

struct Allocation {
    unsigned char *base;
    size_t size;
    int device;
    unsigned number; /* the how-manieth cudaMalloc */
};

/* Device memory may be touched while one of these exists: in kernels, copies, memsets, library stubs. */
struct OpenDevice {
    OpenDevice();
    ~OpenDevice();
};

cudaError_t device_malloc(void **out, size_t size);
cudaError_t device_free(void *p);
cudaError_t pinned_malloc(void **out, size_t size);
cudaError_t pinned_free(void *p);
const Allocation *device_find(const void *p);  /* that holds this address, or NULL */
bool device_holds(const void *p, size_t size); /* all of [p, p + size) in one live allocation */
bool device_address(const void *p);            /* in the range where device memory lies */
bool pinned_holds(const void *p, size_t size);
void memory_info(size_t *free_bytes, size_t *total_bytes);
bool library_take(int64_t bytes); /* what a library holds of the current device beside cudaMalloc; false: too much */
void check_margins(const char *who); /* nothing was written beside an allocation */
int device_count();
int host_gpu(int device); /* its number among all of the host, whichever CUDA_VISIBLE_DEVICES shows */
bool loads_eagerly(); /* was CUDA_MODULE_LOADING=EAGER set when the first call of CUDA came? */
size_t device_peak_bytes(); /* most that cudaMalloc had given out at a time, all devices */
int &current_device();      /* of the calling thread */

/* ---- streams (stream.cpp) ---- */

std::recursive_mutex &runtime_mutex();

/*
 * Puts work into a stream: it runs when something waits for the stream (EMU_STREAMS=now: at once), or becomes
 * a node of the graph that the stream is captured into. Device memory is open while it runs. `name` is counted
 * in EMU_REPORT; "" is not. Everything the work needs must be held by value.
 */
cudaError_t submit(cudaStream_t stream, const std::string &name, std::function<void()> work);

/* Work that waits for other processes: called again and again, never blocking, until it returns true. Not in graphs. */
cudaError_t submit_until(cudaStream_t stream, const std::string &name, std::function<bool()> poll);

void let_pass(double ms); /* events recorded from now on are so much later than the clock says */

bool waits_for_others(); /* some stream holds work of submit_until() */

cudaError_t set_error(cudaError_t e); /* remembers it for cudaGetLastError, and returns it */
/* Prints "emu: ..." and remembers the error. */
cudaError_t refuse(cudaError_t e, const char *format, ...) __attribute__((format(printf, 2, 3)));
cudaError_t take_error(bool forget);

} // namespace emu

#endif
