/*
 * Device memory and pinned host memory.
 *
 * Device memory lies in one reserved range of addresses. An address is never given out twice, an allocation ends
 * at the end of a page (up to CUDA's alignment of 256 bytes) with nothing behind it, and it can be touched only
 * while an OpenDevice exists: host code that follows a device pointer, a kernel that uses freed memory or runs
 * past the end stops at once with a message. The few bytes between an allocation and its pages are checked after
 * every launch. New memory is 0xff, NaN in every float type, at no cost for what is never touched.
 *
 * Opening and closing is one instruction where the processor has protection keys, else an mprotect of every
 * allocation (0.2 us for each page in use). EMU_CLOSED=0 leaves memory open once it was opened.
 */
#include "runtime.h"

#include <execinfo.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>

namespace emu
{

enum { PAGE = 4096, DEVICE_ALIGN = 256, GPUS = 8 };
enum : unsigned char { MARGIN = 0xb6 };
static const size_t NAN_BYTES = 2 << 20, RANGE_BYTES = size_t(256) << 30, DEFAULT_MEMORY = size_t(4) << 30;

static struct {
    unsigned char *range, *next; /* next: where the next mapping may start */
    int open;                    /* OpenDevice objects */
    int key;                     /* memory protection key of the processor, or -1 */
    bool stays_open;
    int nans;                    /* file of NAN_BYTES of 0xff, of which new memory is a private mapping */
    unsigned count;              /* of allocations ever made */
    size_t used[GPUS], peak[GPUS]; /* bytes, by device */
    size_t library[GPUS];        /* held by libraries */
} heap;

/* Ordered by address; never destroyed. */
static std::map<const unsigned char *, Allocation> &allocations = *new std::map<const unsigned char *, Allocation>;
static std::map<const unsigned char *, size_t> &pinned = *new std::map<const unsigned char *, size_t>;

static size_t number_from(const char *name, size_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, nullptr, 10) : otherwise;
}

bool loads_eagerly()
{
    static const char *const loading = getenv("CUDA_MODULE_LOADING");
    static const bool eagerly = loading && !strcmp(loading, "EAGER");
    return eagerly;
}

/* CUDA_VISIBLE_DEVICES: numbers of the host's GPUs, up to the first that is none; the process numbers them anew. */
struct Visible {
    int count, gpus[GPUS];

    Visible() : count(0)
    {
        const int there = std::min<int>(static_cast<int>(number_from("EMU_DEVICES", 1)), GPUS);
        const char *at = getenv("CUDA_VISIBLE_DEVICES");
        for (; !at && count < there; count++) gpus[count] = count;
        for (char *end; at && count < there; at = *end == ',' ? end + 1 : "") {
            const long number = strtol(at, &end, 10);
            if (end == at || number < 0 || number >= there) break;
            gpus[count++] = static_cast<int>(number);
        }
    }
};

static const Visible &visible()
{
    static const Visible found;
    return found;
}

int device_count()
{
    loads_eagerly();
    return visible().count;
}

int host_gpu(int device) { return device < visible().count ? visible().gpus[device] : 0; }

size_t device_peak_bytes()
{
    size_t sum = 0;
    for (size_t bytes : heap.peak) sum += bytes;
    return sum;
}

int &current_device()
{
    static thread_local int device;
    return device;
}

static size_t device_bytes() { return number_from("EMU_MEMORY", DEFAULT_MEMORY); }

static unsigned char *page_of(const void *p)
{
    return reinterpret_cast<unsigned char *>(reinterpret_cast<uintptr_t>(p) / PAGE * PAGE);
}
static size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }
/* The pages of an allocation: [page_of(base), end_of(a)) */
static unsigned char *end_of(const Allocation &a) { return a.base + rounded(a.size, DEVICE_ALIGN); }

/* ---- what happens on a forbidden access ---- */

static struct sigaction before_segv, before_bus;

static void explain(const unsigned char *p)
{
    const Allocation *a = device_find(p);
    if (a && p < a->base + a->size) { /* or just behind it */
        void *frames[24];
        fprintf(stderr,
                "emu: host code touches device memory: %p, byte %zu of cudaMalloc %u (%zu bytes). "
                "Copy it with cudaMemcpy, or read it in a kernel. Called from:\n",
                static_cast<const void *>(p), static_cast<size_t>(p - a->base), a->number, a->size);
        backtrace_symbols_fd(frames, backtrace(frames, 24), STDERR_FILENO);
        end_failed();
    }
    const auto next = allocations.upper_bound(p);
    if (next == allocations.begin())
        fail("touches %p: device memory that is not allocated", static_cast<const void *>(p));
    const Allocation &b = std::prev(next)->second;
    fail("touches %p: device memory that is not allocated, or no longer; %zu bytes behind the end of cudaMalloc %u "
         "(%zu bytes)",
         static_cast<const void *>(p), static_cast<size_t>(p - b.base) - b.size, b.number, b.size);
}

static void on_fault(int number, siginfo_t *info, void *)
{
    const unsigned char *p = static_cast<unsigned char *>(info->si_addr);
    const bool kernel = self && number == SIGSEGV; /* (SIGBUS: of a file that a thread beside it reads) */
    if (device_address(p)) explain(p);
    if (kernel && info->si_code == SI_KERNEL)
        fail("touches an address that is not valid, or not a multiple of 16 in a 16-byte access");
    if (kernel && below_stack(p)) fail("uses more stack than a thread of the emulator has");
    if (kernel) fail("touches %p, which is not device memory", static_cast<const void *>(p));
    sigaction(number, number == SIGSEGV ? &before_segv : &before_bus, nullptr); /* the access is tried again */
}

static int file_of_nans()
{
    static unsigned char bytes[PAGE];
    const int fd = memfd_create("nan", MFD_CLOEXEC);
    memset(bytes, 0xff, sizeof bytes);
    for (size_t i = 0; i < NAN_BYTES / PAGE; i++)
        if (write(fd, bytes, PAGE) != PAGE) fail("no file in memory");
    return fd;
}

static void start()
{
    if (heap.range) return;
    void *p = mmap(nullptr, RANGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fail("no range of addresses for device memory");
    heap.range = static_cast<unsigned char *>(p);
    heap.next = heap.range + PAGE;
    heap.key = number_from("EMU_KEYS", 1) ? pkey_alloc(0, PKEY_DISABLE_ACCESS) : -1;
    heap.stays_open = !number_from("EMU_CLOSED", 1);
    heap.nans = file_of_nans();
    struct sigaction act = {};
    act.sa_sigaction = on_fault;
    act.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &act, &before_segv);
    sigaction(SIGBUS, &act, &before_bus);
}

/* A stack for the handler: a fiber's own may be what ran over. */
static void signal_stack()
{
    static thread_local bool done;
    if (done) return;
    done = true;
    stack_t s = {};
    if (sigaltstack(nullptr, &s) == 0 && !(s.ss_flags & SS_DISABLE)) return;
    s = {};
    s.ss_size = 64 << 10;
    s.ss_sp = malloc(s.ss_size); /* as long as the thread */
    static thread_local void *keep;
    keep = s.ss_sp;
    (void)keep;
    sigaltstack(&s, nullptr);
}

/* ---- opening and closing ---- */

static void set_access(bool open)
{
    if (!heap.range || (heap.stays_open && (!open || heap.key < 0))) return;
    if (heap.key >= 0) {
        pkey_set(heap.key, open ? 0 : PKEY_DISABLE_ACCESS);
        return;
    }
    for (const auto &entry : allocations) {
        unsigned char *from = page_of(entry.second.base);
        const size_t size = static_cast<size_t>(end_of(entry.second) - from);
        if (mprotect(from, size, open ? PROT_READ | PROT_WRITE : PROT_NONE)) fail("mprotect of device memory failed");
    }
}

OpenDevice::OpenDevice()
{
    signal_stack();
    if (!heap.open++) set_access(true);
}

OpenDevice::~OpenDevice()
{
    if (!--heap.open) set_access(false);
}

/* ---- allocations ---- */

static bool all_margin(const unsigned char *from, const unsigned char *to)
{
    permit(from, static_cast<size_t>(to - from));
    bool good = true;
    for (const unsigned char *p = from; p < to; p++) good &= *p == MARGIN;
    forbid(from, static_cast<size_t>(to - from));
    return good;
}

static void check_margin(const Allocation &a, const char *who)
{
    if (!all_margin(page_of(a.base), a.base)) fail("%s wrote before cudaMalloc %u (%zu bytes)", who, a.number, a.size);
    if (!all_margin(a.base + a.size, end_of(a)))
        fail("%s wrote behind cudaMalloc %u (%zu bytes)", who, a.number, a.size);
}

void check_margins(const char *who)
{
    for (const auto &entry : allocations) check_margin(entry.second, who);
}

/* New memory at `map`, 0xff; open if device memory is. */
static bool map_pages(unsigned char *map, size_t size)
{
    for (size_t done = 0; done < size; done += NAN_BYTES) {
        const size_t part = size - done < NAN_BYTES ? size - done : NAN_BYTES;
        const void *p =
            mmap(map + done, part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, heap.nans, 0);
        if (p == MAP_FAILED) return false;
    }
    return heap.key < 0 || pkey_mprotect(map, size, PROT_READ | PROT_WRITE, heap.key) == 0;
}

cudaError_t device_malloc(void **out, size_t size)
{
    start();
    *out = nullptr;
    if (!size) return cudaSuccess;
    const int device = current_device();
    const size_t pages = rounded(size, PAGE);
    unsigned char *map = heap.next;
    if (size > device_bytes() - heap.used[device] - heap.library[device] ||
        map + pages + PAGE > heap.range + RANGE_BYTES)
        return set_error(cudaErrorMemoryAllocation);
    heap.next = map + pages + PAGE;
    Allocation a = { map + pages - rounded(size, DEVICE_ALIGN), size, device, ++heap.count };
    OpenDevice open;
    if (!map_pages(map, pages)) return set_error(cudaErrorMemoryAllocation);
    memset(map, MARGIN, static_cast<size_t>(a.base - map));
    memset(a.base + size, MARGIN, static_cast<size_t>(map + pages - a.base) - size);
    forbid(map, static_cast<size_t>(a.base - map));
    forbid(a.base + size, static_cast<size_t>(map + pages - a.base) - size);
    allocations[a.base] = a;
    heap.used[device] += size;
    if (heap.used[device] > heap.peak[device]) heap.peak[device] = heap.used[device];
    *out = a.base;
    return cudaSuccess;
}

cudaError_t device_free(void *p)
{
    const auto it = allocations.find(static_cast<unsigned char *>(p));
    if (it == allocations.end())
        return refuse(cudaErrorInvalidValue, "cudaFree(%p): not the start of an allocation, or freed before", p);
    OpenDevice open;
    const Allocation a = it->second;
    check_margin(a, "somebody");
    unsigned char *map = page_of(a.base);
    const size_t pages = static_cast<size_t>(end_of(a) - map);
    void *again = mmap(map, pages, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (again == MAP_FAILED) fail("giving back device memory failed");
    forbid(a.base, a.size);
    heap.used[a.device] -= a.size;
    allocations.erase(it);
    return cudaSuccess;
}

const Allocation *device_find(const void *p)
{
    const unsigned char *byte = static_cast<const unsigned char *>(p);
    auto it = allocations.upper_bound(byte);
    if (it == allocations.begin()) return nullptr;
    const Allocation &a = std::prev(it)->second;
    return byte <= a.base + a.size ? &a : nullptr; /* the end too: a view without rows */
}

bool device_holds(const void *p, size_t size)
{
    const Allocation *a = device_find(p);
    return a && static_cast<size_t>(static_cast<const unsigned char *>(p) - a->base) + size <= a->size;
}

bool device_address(const void *p)
{
    const unsigned char *byte = static_cast<const unsigned char *>(p);
    return heap.range && byte >= heap.range && byte < heap.range + RANGE_BYTES;
}

void memory_info(size_t *free_bytes, size_t *total_bytes)
{
    *total_bytes = device_bytes();
    *free_bytes = *total_bytes - heap.used[current_device()] - heap.library[current_device()];
}

bool library_take(int64_t bytes)
{
    size_t free_bytes, total_bytes;
    memory_info(&free_bytes, &total_bytes);
    if (bytes > 0 && static_cast<size_t>(bytes) > free_bytes) return false;
    heap.library[current_device()] += static_cast<size_t>(bytes);
    return true;
}

/* ---- pinned memory ---- */

cudaError_t pinned_malloc(void **out, size_t size)
{
    *out = nullptr;
    if (!size) return cudaSuccess;
    if (posix_memalign(out, PAGE, size)) return set_error(cudaErrorMemoryAllocation);
    pinned[static_cast<unsigned char *>(*out)] = size;
    return cudaSuccess;
}

cudaError_t pinned_free(void *p)
{
    if (!pinned.erase(static_cast<unsigned char *>(p)))
        return refuse(cudaErrorInvalidValue, "cudaFreeHost(%p): not pinned memory, or freed before", p);
    free(p);
    return cudaSuccess;
}

bool pinned_holds(const void *p, size_t size)
{
    const unsigned char *byte = static_cast<const unsigned char *>(p);
    auto it = pinned.upper_bound(byte);
    if (it == pinned.begin()) return false;
    --it;
    return byte + size <= it->first + it->second;
}

} // namespace emu
