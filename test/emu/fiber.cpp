/*
 * CUDA threads as fibers: the stack switch, the order in which threads and blocks run, one launch from its first
 * to its last block.
 *
 * A block's threads share one host thread. Each runs until it waits (a barrier, a warp operation) or returns;
 * then the scheduler picks the next. EMU_ORDER says how: forward, reverse, or random with a seed. Warps run one
 * after another as far as they can; in a random order they also overtake each other.
 */
#include "hopper.h"

#include <cxxabi.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <map>
#include <set>

#ifdef EMU_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void **save, const void *bottom, size_t size);
void __sanitizer_finish_switch_fiber(void *save, const void **bottom, size_t *size);
void __asan_get_shadow_mapping(size_t *scale, size_t *offset);
}
#endif

/* switch_stack(&mine, other): keeps the registers that a callee must keep on this stack, goes on on the other. */
extern "C" void emu_switch_stack(void **mine, void *other);
#ifdef __x86_64__
asm(".text\n"
    ".globl emu_switch_stack\n"
    ".type emu_switch_stack, @function\n"
    "emu_switch_stack:\n"
    "    pushq %rbp\n"
    "    pushq %rbx\n"
    "    pushq %r12\n"
    "    pushq %r13\n"
    "    pushq %r14\n"
    "    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n"
    "    popq %r14\n"
    "    popq %r13\n"
    "    popq %r12\n"
    "    popq %rbx\n"
    "    popq %rbp\n"
    "    ret\n"
    ".size emu_switch_stack, . - emu_switch_stack\n");
enum { SAVED_REGISTERS = 6 };
#else
#error "the emulator switches stacks on x86-64 only"
#endif

namespace emu
{

Thread *self;
uint3 block_index;
dim3 block_dim, grid_dim;
Block block;

enum Order { FORWARD, REVERSE, RANDOM };
enum { GUARD_BYTES = 64 << 10 }; /* below each stack */
enum { LEFT_BYTES = 16 << 10 };  /* of a stack: more than fiber_main leaves behind when it does not return */
#if defined(EMU_ASAN) || defined(EMU_TSAN)
enum { STACK_BYTES = 512 << 10 };
#else
enum { STACK_BYTES = 128 << 10 };
#endif

static struct {
    void *stack_pointer; /* of the host thread, while a fiber runs */
    const std::function<void()> *body;
    std::string name;
    void *tsan, *asan;
    const void *asan_bottom;
    size_t asan_size;
    char begin_token, end_token, fence_token;
} host;

/* Never destroyed: kernels may run while the process ends. */
static std::vector<Fiber *> &pool = *new std::vector<Fiber *>;
static std::map<const void *, int> &dynamic_limits = *new std::map<const void *, int>;

Fiber *current() { return static_cast<Fiber *>(self); }
const char *kernel_name() { return host.name.c_str(); }

/* Not by _exit: there ThreadSanitizer would complain of the Unwatched that a failure leaves behind, with its own
 * status. */
void end_failed()
{
    syscall(SYS_exit_group, EXIT_FAILURE_FOUND);
    __builtin_unreachable();
}

void fail(const char *format, ...)
{
    char text[1024], where[256] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (self)
        snprintf(where, sizeof where, "%s, block (%u,%u,%u), thread (%u,%u,%u): ", host.name.c_str(), block_index.x,
                 block_index.y, block_index.z, self->index.x, self->index.y, self->index.z);
    else if (!host.name.empty()) snprintf(where, sizeof where, "%s: ", host.name.c_str());
    fflush(stdout);
    fprintf(stderr, "emu: %s%s\n", where, text);
    end_failed();
}

/* ---- order ---- */

static struct {
    bool read;
    Order kind;
    uint64_t state;
} order;

static void read_order()
{
    if (order.read) return;
    order.read = true;
    const char *text = getenv("EMU_ORDER"), *seed = getenv("EMU_SEED");
    const std::string s = text ? text : "forward";
    if (s == "forward") order.kind = FORWARD;
    else if (s == "reverse") order.kind = REVERSE;
    else if (s.compare(0, 6, "random") == 0 && (s.size() == 6 || s[6] == ':')) order.kind = RANDOM;
    else fail("EMU_ORDER=%s: forward, reverse, random or random:SEED is wanted", text);
    if (s.size() > 7) seed = text + 7;
    order.state = (seed ? strtoull(seed, nullptr, 10) : 1) * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull;
}

bool random_order() { return order.kind == RANDOM; }
bool reverse_order() { return order.kind == REVERSE; }

/* splitmix64 */
uint32_t random_bits()
{
    uint64_t z = order.state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return static_cast<uint32_t>(z >> 32);
}

/* The order in which n things are tried. */
static void permute(std::vector<unsigned> &out, unsigned n)
{
    out.resize(n);
    for (unsigned i = 0; i < n; i++) out[i] = order.kind == REVERSE ? n - 1 - i : i;
    if (order.kind != RANDOM) return;
    for (unsigned i = n; i > 1; i--) std::swap(out[i - 1], out[static_cast<uint64_t>(random_bits()) * i >> 32]);
}

/* ---- switching ---- */

static void to_host(Fiber *f, bool last)
{
#ifdef EMU_ASAN
    __sanitizer_start_switch_fiber(last ? nullptr : &f->asan, host.asan_bottom, host.asan_size);
#endif
#ifdef EMU_TSAN
    __tsan_switch_to_fiber(host.tsan, 1); /* 1: the switch orders nothing */
#endif
    (void)last;
    emu_switch_stack(&f->stack_pointer, host.stack_pointer);
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(f->asan, &host.asan_bottom, &host.asan_size);
#endif
}

static void to_fiber(Fiber *f)
{
    self = f;
#ifdef EMU_ASAN
    __sanitizer_start_switch_fiber(&host.asan, f->stack, STACK_BYTES);
#endif
#ifdef EMU_TSAN
    __tsan_switch_to_fiber(f->tsan, 1);
#endif
    emu_switch_stack(&host.stack_pointer, f->stack_pointer);
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(host.asan, nullptr, nullptr);
#endif
    self = nullptr;
}

void wait(const char *what, Site at)
{
    Fiber *f = current();
    f->state = WAITING;
    f->waits_for = what;
    f->waits_at = at;
    while (f->state == WAITING) to_host(f, false);
}

void pass_on() { to_host(current(), false); }

void fence()
{
    release(&host.fence_token);
    acquire(&host.fence_token);
}

static void fiber_main()
{
    Fiber *f = current();
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &host.asan_bottom, &host.asan_size);
#endif
    acquire(&host.begin_token);
    (*host.body)();
    release(&host.end_token);
    if (!f->copies.empty()) fail("returns while %zu cp_async_16 copies were not waited for", f->copies.size());
    hopper_leave(f);
    f->state = DONE;
    leave_block(f);
    to_host(f, true);
    abort();
}

static void start_fiber(Fiber *f)
{
    if (!f->stack) {
        void *p = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED || mprotect(p, GUARD_BYTES, PROT_NONE)) fail("no memory for the stack of a thread");
        f->stack = static_cast<char *>(p) + GUARD_BYTES;
#ifdef EMU_TSAN
        f->tsan = __tsan_create_fiber(0);
#endif
    }
    permit(f->stack + STACK_BYTES - LEFT_BYTES, LEFT_BYTES);
    /* stacks start on different cache lines of a page, or threads would evict each other */
    void **top = reinterpret_cast<void **>(f->stack + STACK_BYTES - f->number * 9 % 128 * 64) - 2;
    top[1] = nullptr; /* fiber_main finds rsp at 8 modulo 16, as after a call */
    top[0] = reinterpret_cast<void *>(fiber_main);
    for (int i = 1; i <= SAVED_REGISTERS; i++) top[-i] = nullptr;
    f->stack_pointer = top - SAVED_REGISTERS;
    f->state = READY;
    f->copies.clear();
    f->groups.clear();
    f->phases.clear();
}

bool below_stack(const void *p)
{
    const char *byte = static_cast<const char *>(p);
    return byte < current()->stack && byte >= current()->stack - GUARD_BYTES;
}

/* ---- a block ---- */

static void report_deadlock()
{
    fflush(stdout);
    fprintf(stderr, "emu: %s, block (%u,%u,%u): no thread can go on\n", host.name.c_str(), block_index.x, block_index.y,
            block_index.z);
    const Fiber *before = nullptr;
    for (const Fiber *f : block.fibers) { /* a line for each run of threads that wait at the same place */
        if (f->state != WAITING) continue;
        if (before && before->waits_at.line == f->waits_at.line && before->waits_for == f->waits_for) continue;
        fprintf(stderr, "  from thread %d (%u,%u,%u) on: %s at %s:%d\n", f->number, f->index.x, f->index.y, f->index.z,
                f->waits_for, f->waits_at.file, f->waits_at.line);
        before = f;
    }
    fprintf(stderr, "  %d of %zu threads have returned\n", static_cast<int>(block.fibers.size()) - block.live,
            block.fibers.size());
    end_failed();
}

/* Runs the threads of a warp until none of them can go on, or, in a random order, for a while. */
static bool run_warp(Warp &w)
{
    static std::vector<unsigned> lanes;
    bool any = false, progress = true;
    while (progress) {
        progress = false;
        permute(lanes, w.count);
        for (unsigned lane : lanes) {
            if (w.fibers[lane]->state != READY) continue;
            to_fiber(w.fibers[lane]);
            any = progress = true;
        }
        if (order.kind == RANDOM && random_bits() % 4 == 0) break;
    }
    return any;
}

static void run_block()
{
    static std::vector<unsigned> sequence;
    while (block.live > 0) {
        bool progress = false;
        permute(sequence, static_cast<unsigned>(block.warps.size()));
        for (unsigned w : sequence) progress |= run_warp(block.warps[w]);
        if (progress) hopper_chance();
        else if (!hopper_event()) report_deadlock();
    }
}

static void start_block(uint64_t number, const dim3 &threads, unsigned count, size_t first_fiber)
{
    block_index.x = static_cast<unsigned>(number % grid_dim.x);
    block_index.y = static_cast<unsigned>(number / grid_dim.x % grid_dim.y);
    block_index.z = static_cast<unsigned>(number / grid_dim.x / grid_dim.y);
    block.barrier = Barrier();
    block.live = static_cast<int>(count);
    block.fibers.resize(count);
    block.warps.assign((count + WARP_LANES - 1) / WARP_LANES, Warp());
    for (unsigned i = 0; i < count; i++) {
        Fiber *f = pool[first_fiber + i];
        Warp &w = block.warps[i / WARP_LANES];
        f->index.x = i % threads.x, f->index.y = i / threads.x % threads.y, f->index.z = i / threads.x / threads.y;
        f->number = static_cast<int>(i);
        f->lane = static_cast<int>(i % WARP_LANES);
        f->warp = &w;
        w.number = static_cast<int>(i / WARP_LANES);
        w.fibers[f->lane] = f;
        w.present |= 1u << f->lane;
        w.count++;
        block.fibers[i] = f;
        start_fiber(f);
    }
}

/* ---- a launch ---- */

/* "TagIXadL_Z...": Tag<&(void softmax_kernel<float, 4>(float*, int))>, of which the name is wanted. */
std::string demangled(const char *tag)
{
    int status;
    char *text = abi::__cxa_demangle(tag, nullptr, nullptr, &status);
    if (!text) return tag;
    std::string s = text;
    free(text);
    const size_t from = s.find("&("), internal = s.find("(anonymous namespace)::");
    if (internal != std::string::npos) s.erase(internal, sizeof "(anonymous namespace)::" - 1);
    s = s.substr(from == std::string::npos ? 0 : from + 2);
    size_t end = 0;
    for (int depth = 0; end < s.size() && (s[end] != '(' || depth); end++) depth += (s[end] == '<') - (s[end] == '>');
    s.resize(end);
    if (s.compare(0, 5, "void ") == 0) s.erase(0, 5);
    return s;
}

void set_dynamic_limit(const void *kernel, int bytes) { dynamic_limits[kernel] = bytes; }

int dynamic_limit(const void *kernel)
{
    const auto it = dynamic_limits.find(kernel);
    return it == dynamic_limits.end() ? SHARED_DEFAULT : it->second;
}

/* Arrays count: a block has 48 KiB in all, or what the GPU has where cudaFuncSetAttribute names its dynamic part. */
size_t shared_limit(const void *kernel)
{
    const bool named = dynamic_limits.count(kernel);
    return named ? static_cast<size_t>(gpu().shared_block) << 10 : static_cast<size_t>(SHARED_DEFAULT);
}

cudaError_t check_launch(const Launch &l)
{
    const std::string name = demangled(l.tag);
    const uint64_t threads = static_cast<uint64_t>(l.block.x) * l.block.y * l.block.z;
    if (!threads || threads > MAX_THREADS || l.block.z > 64 || !l.grid.x || !l.grid.y || !l.grid.z ||
        l.grid.x > 0x7fffffff || l.grid.y > 65535 || l.grid.z > 65535)
        return refuse(cudaErrorInvalidConfiguration, "%s at %s:%d: grid (%u,%u,%u) of blocks (%u,%u,%u)", name.c_str(),
                      l.at.file, l.at.line, l.grid.x, l.grid.y, l.grid.z, l.block.x, l.block.y, l.block.z);
    if (l.shared_bytes > static_cast<size_t>(dynamic_limit(l.kernel)))
        return refuse(cudaErrorInvalidValue,
                      "%s at %s:%d: %zu bytes of dynamic shared memory, cudaFuncSetAttribute allows %d", name.c_str(),
                      l.at.file, l.at.line, l.shared_bytes, dynamic_limit(l.kernel));
    return cudaSuccess;
}

static void host_pointer(const Launch &l, int index, const void *p)
{
    fail("%s at %s:%d: argument %d holds %p, which is neither device nor pinned memory", demangled(l.tag).c_str(),
         l.at.file, l.at.line, index, p);
}

void check_pointer(const Launch &l, int index, const void *p)
{
    if (p && !device_find(p) && !pinned_holds(p, 0)) host_pointer(l, index, p);
}

/* AddressSanitizer maps a shadow of all memory in the middle of the addresses: nothing of a program lies there. */
static bool in_shadow(uintptr_t bits)
{
#ifdef EMU_ASAN
    size_t scale, offset;
    __asan_get_shadow_mapping(&scale, &offset);
    return bits >= offset && bits < offset + (uintptr_t{ 1 } << (47 - scale));
#else
    (void)bits;
    return false;
#endif
}

/* Two 32-bit fields, or one and the rest of an old pointer in the padding, must not pass for a pointer. */
static bool may_be_pointer(uintptr_t bits)
{
    if (in_shadow(bits)) return false;
    const uintptr_t high = bits >> 32, low = bits & 0xffffffffu;
    return high != 0 && high < 0x8000 && low >= 1 << 20;
}

void check_words(const Launch &l, int index, const void *words, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        void *p = static_cast<void *const *>(words)[i];
        unsigned char mapped;
        const uintptr_t bits = reinterpret_cast<uintptr_t>(p);
        if (!may_be_pointer(bits) || device_address(p) || pinned_holds(p, 0)) continue;
        if (mincore(reinterpret_cast<void *>(bits / 4096 * 4096), 1, &mapped) == 0) host_pointer(l, index, p);
    }
}

/* Loading may wait for what runs on the device; and a collective waits for a peer, which may wait for this process. */
static void check_loading(const Launch &l)
{
    static std::set<const void *> &loaded = *new std::set<const void *>;
    if (loads_eagerly() || !loaded.insert(l.kernel).second || !waits_for_others()) return;
    fail("%s at %s:%d: first launched, and so loaded, beside a running collective: CUDA_MODULE_LOADING=EAGER is not "
         "set",
         demangled(l.tag).c_str(), l.at.file, l.at.line);
}

/* EMU_FAIL=214:100:1, GPU 1 fails with error 214 at its launch 100, and does nothing from then on. */
static bool has_failed()
{
    static int code, at, device, count;
    static const bool wanted =
        getenv("EMU_FAIL") && sscanf(getenv("EMU_FAIL"), "%d:%d:%d", &code, &at, &device) == 3;
    if (!wanted || host_gpu(current_device()) != device || ++count < at) return false;
    set_error(static_cast<cudaError_t>(code));
    return true;
}

void enqueue(const Launch &l, std::function<void()> body)
{
    std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
    if (self) fail("a kernel launches a kernel");
    if (has_failed()) return;
    if (check_launch(l) != cudaSuccess) return;
    check_loading(l);
    submit(l.stream, demangled(l.tag), [l, body] { run_launch(l, body); });
}

/*
 * ThreadSanitizer takes all that one of its fibers does as ordered. Blocks of a launch are not, so each of the
 * next few blocks gets fibers of its own; after that many blocks, which of them meet depends on the order.
 */
static size_t groups_of_fibers(unsigned count)
{
#ifdef EMU_TSAN
    enum { GROUPS = 8, FIBERS = 2048 };
    host.tsan = __tsan_get_current_fiber();
    return count * GROUPS <= FIBERS ? GROUPS : FIBERS / count;
#else
    (void)count;
    return 1;
#endif
}

/* EMU_BLOCKS=ends: of a grid only the blocks at its ends, two on each axis: for tensors too large to be computed. */
static bool left_out(unsigned number, const dim3 &grid)
{
    static const char *const blocks = getenv("EMU_BLOCKS");
    if (!blocks) return false;
    if (strcmp(blocks, "ends") != 0) fail("EMU_BLOCKS=%s: ends is wanted", blocks);
    const auto inside = [](unsigned i, unsigned n) { return i >= 2 && i + 2 < n; };
    return inside(number % grid.x, grid.x) || inside(number / grid.x % grid.y, grid.y) ||
           inside(number / grid.x / grid.y, grid.z);
}

void run_launch(const Launch &l, const std::function<void()> &body)
{
    static std::vector<unsigned> sequence;
    read_order();
    const unsigned count = l.block.x * l.block.y * l.block.z;
    host.name = demangled(l.tag);
    host.body = &body;
    grid_dim = l.grid, block_dim = l.block;
    hopper_launch();
    const size_t fibers = groups_of_fibers(count) * count, most = shared_limit(l.kernel);
    size_t first = 0;
    release(&host.begin_token);
    permute(sequence, l.grid.x * l.grid.y * l.grid.z);
    for (unsigned number : sequence) {
        if (left_out(number, l.grid)) continue;
        shared_begin(l.shared_bytes, most);
        while (pool.size() < first + count) pool.push_back(new Fiber);
        start_block(number, l.block, count, first);
        hopper_begin(count);
        run_block();
        hopper_end();
        first = (first + count) % fibers;
        shared_end();
    }
    acquire(&host.end_token);
    check_margins(host.name.c_str());
    host.name.clear();
}

} // namespace emu
