/*
 * Hopper's barriers (mbarrier), bulk tensor copies, proxy fences, named barriers and register counts. Stricter than the
 * chip: a phase that ends with other bytes than expected, a waiter two phases late, an arrival too many, a barrier
 * that copies cannot know of yet, an address that is not aligned, are failures.
 *
 * What copies and products may read of what threads stored: `shadow` is shared memory as the last fence showed it. Each
 * fence shows all that is there, and what a product reads must have been shown: a thread that stores and has no
 * fence of its own is seen in those orders in which it comes behind all who have one.
 */
#include "hopper.h"

#include <sys/mman.h>

#include <deque>

namespace emu
{

enum { TRANSACTION_MOST = (1 << 20) - 1, NAMED = 16, REGISTERS = 64 << 10 };
enum : uint32_t {
    BARRIER_MARK = 0xba221e70
}; /* the upper half of the word that a barrier is; the lower: its number */

/* A barrier in shared memory. */
struct Phased {
    uint64_t *word;
    int count, pending; /* arrivals */
    int64_t bytes;      /* expected and not there; below 0: there and not expected */
    int phases;         /* that are over */
    bool ready;         /* copies know of it */
    const Fiber *maker;
};

struct Load {
    MapBits map;
    unsigned char *to;
    int at[5];
    int barrier, phase;
    int rows, done; /* of the box */
    Site site;
};

/* The end of a copy or, without one, of some warps' products. In random orders the slow ones wait until no thread can
 * go on. */
struct Event {
    Load *load;
    int warpgroup;
    uint32_t warps;
    bool slow;
};

struct NamedBarrier {
    int threads, arrived;
    unsigned round;
    Site at;
};

/* Registers of a warp's threads; 0: not known. `lanes`: that have come to the change under way. */
struct WarpRegisters {
    int count, wanted;
    uint32_t lanes;
};

static struct {
    std::deque<Phased> barriers;
    std::vector<Event> events; /* the oldest first */
    NamedBarrier named[NAMED];
    WarpRegisters warp[MAX_WARPS];
    int warps, free_registers; /* registers: in units of a warp's 32 threads */
    unsigned char *shadow;
    size_t shown; /* bytes of shared memory that have a shadow */
} block_state;

void need_hopper(const char *what, Site at)
{
    if (gpu().major != 9)
        fail("%s at %s:%d: compute capability %s has no such instruction", what, at.file, at.line,
             gpu().name);
}

void wait_on(const void *object, const char *what, Site at)
{
    current()->waits_on = object;
    wait(what, at);
    current()->waits_on = nullptr;
}

void wake(const void *object)
{
    for (Fiber *f : block.fibers)
        if (f->state == WAITING && f->waits_on == object) f->state = READY;
}

/* ---- what stores show ---- */

static void copy_bytes(void *to, const void *from, size_t size)
{
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size)::"memory");
}

static void fill_new(void *p, size_t size) /* as shared_begin() leaves it */
{
    asm volatile("rep stosb" : "+D"(p), "+c"(size) : "a"(0xff) : "memory");
}

/* What was stored in memory handed out since the last call is not shown. */
static void cover()
{
    const size_t extent = shared_extent();
    if (!block_state.shadow) {
        void *p = mmap(nullptr, SHADOW_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) fail("no memory for a copy of shared memory");
        block_state.shadow = static_cast<unsigned char *>(p);
    }
    if (extent > block_state.shown)
        fill_new(block_state.shadow + block_state.shown, extent - block_state.shown);
    block_state.shown = extent;
}

static bool same_bytes(const unsigned char *a, const unsigned char *b, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if (a[i] != b[i]) return false;
    return true;
}

bool is_shown(const unsigned char *p, size_t size)
{
    cover();
    return same_bytes(p, block_state.shadow + (p - shared_base()), size);
}

void show(const unsigned char *p, size_t size)
{
    cover();
    copy_bytes(block_state.shadow + (p - shared_base()), p, size);
}

void async_fence(Site at)
{
    const Unwatched unwatched;
    need_hopper("proxy_fence", at);
    cover();
    copy_bytes(block_state.shadow, shared_base(), block_state.shown);
    give_way();
}

/* ---- barriers ---- */

static Phased &barrier_at(const uint64_t *b, const char *what, Site at)
{
    shared_offset(b, 8, at);
    const uint32_t number = static_cast<uint32_t>(*b);
    if (*b >> 32 != BARRIER_MARK || number >= block_state.barriers.size() ||
        block_state.barriers[number].word != b)
        fail("%s at %s:%d: no barrier: barrier_init has not been here, or something was written over it",
             what, at.file, at.line);
    return block_state.barriers[number];
}

void mbarrier_init(uint64_t *b, int arrivals, Site at)
{
    const Unwatched unwatched;
    need_hopper("barrier_init", at);
    aligned(b, 8, "barrier_init");
    shared_offset(b, 8, at);
    if (arrivals < 1 || arrivals > TRANSACTION_MOST)
        fail("barrier_init at %s:%d: %d arrivals", at.file, at.line, arrivals);
    for (const Phased &p : block_state.barriers)
        if (p.word == b) fail("barrier_init at %s:%d: this barrier was made before", at.file, at.line);
    cover();
    *b = static_cast<uint64_t>(BARRIER_MARK) << 32 | block_state.barriers.size();
    block_state.barriers.push_back(Phased{ b, arrivals, arrivals, 0, 0, false, current() });
}

void mbarriers_ready()
{
    const Unwatched unwatched;
    for (Phased &p : block_state.barriers)
        if (p.maker == current()) p.ready = true;
}

/* The phase is over when nothing is pending. */
static void settle(Phased &p, const char *what, Site at)
{
    if (p.pending > 0 || p.bytes > 0) return;
    if (p.bytes < 0)
        fail("%s at %s:%d: %lld bytes more have come than the barrier expects", what, at.file, at.line,
             static_cast<long long>(-p.bytes));
    p.phases++;
    p.pending = p.count;
    wake(&p);
}

static void arrive(Phased &p, int bytes, const char *what, Site at)
{
    if (!p.ready && p.maker != current())
        fail("%s at %s:%d: barriers_ready() was left out behind barrier_init", what, at.file, at.line);
    if (!p.pending)
        fail("%s at %s:%d: more arrivals than the %d of the barrier, before its phase is over", what, at.file,
             at.line, p.count);
    release(p.word);
    p.bytes += bytes;
    p.pending--;
    settle(p, what, at);
    give_way();
}

void mbarrier_expect(uint64_t *b, int bytes, Site at)
{
    const Unwatched unwatched;
    if (bytes < 0 || bytes > TRANSACTION_MOST)
        fail("barrier_expect at %s:%d: %d bytes", at.file, at.line, bytes);
    arrive(barrier_at(b, "barrier_expect", at), bytes, "barrier_expect", at);
}

void mbarrier_arrive(uint64_t *b, Site at)
{
    const Unwatched unwatched;
    arrive(barrier_at(b, "barrier_arrive", at), 0, "barrier_arrive", at);
}

/*
 * A thread that has seen the end of phase n asks with the other parity for that of n + 1, with the same parity for n
 * again. Where the barrier has come two phases further, the chip lets it pass for the wrong one.
 */
void mbarrier_wait(uint64_t *b, int parity, Site at)
{
    const Unwatched unwatched;
    enum { NEVER = -2 };
    Phased &p = barrier_at(b, "barrier_wait", at);
    const size_t number = static_cast<uint32_t>(*b);
    std::vector<int> &seen = current()->phases;
    if (parity != 0 && parity != 1) fail("barrier_wait at %s:%d: parity %d", at.file, at.line, parity);
    if (seen.size() <= number) seen.resize(number + 1, NEVER);
    const int last = seen[number];
    const int wanted = last == NEVER ? -parity : (last & 1) == parity ? last : last + 1;
    hopper_chance();
    give_way();
    while (((p.phases - 1) & 1) != parity) wait_on(&p, "barrier_wait", at);
    if (p.phases - 1 >= wanted + 2)
        fail("barrier_wait at %s:%d: phase %d has this parity, and the thread waits for phase %d: it comes "
             "late, or waits "
             "too seldom",
             at.file, at.line, p.phases - 1, wanted);
    current()->phases[number] = p.phases - 1;
    acquire(p.word);
}

/* ---- copies ---- */

static void add_event(Event e)
{
    e.slow = random_order() && random_bits() % 2;
    block_state.events.push_back(e);
}

static const MapBits &bits_of(const TensorMap &map, const char *what, Site at)
{
    const MapBits &m = *reinterpret_cast<const MapBits *>(&map);
    if (reinterpret_cast<uintptr_t>(&map) % 64)
        fail("%s at %s:%d: the map lies at %p", what, at.file, at.line, static_cast<const void *>(&map));
    if (m.magic != MAP_MAGIC) fail("%s at %s:%d: no tensor map", what, at.file, at.line);
    return m;
}

static void check_load(const MapBits &m, const void *to, const Phased &p, int x, int rank, int rows, Site at)
{
    static const char what[] = "tma_load";
    if (m.rank != rank)
        fail("%s_%dd at %s:%d: the map has %d dimensions", what, rank, at.file, at.line, m.rank);
    const size_t bytes = static_cast<size_t>(rows - 1) * m.pitch() + m.box(0) * m.element;
    if (shared_offset(to, bytes, at) % 128)
        fail("%s at %s:%d: %p is no multiple of 128", what, at.file, at.line, to);
    if (x * m.element % 16)
        fail("%s at %s:%d: coordinate %d: %d bytes are no multiple of 16", what, at.file, at.line, x,
             x * m.element);
    if (!p.ready)
        fail("%s at %s:%d: barriers_ready() was left out behind barrier_init", what, at.file, at.line);
}

void tma_load(void *to, const TensorMap &map, uint64_t *b, const int *c, int rank, Site at)
{
    const Unwatched unwatched;
    need_hopper("tma_load", at);
    Phased &p = barrier_at(b, "tma_load", at);
    const MapBits &m = bits_of(map, "tma_load", at);
    Load *l = new Load();
    l->map = m, l->to = static_cast<unsigned char *>(to), l->site = at, l->rows = 1;
    for (int i = 0; i < m.rank; i++) {
        if (i) l->rows *= m.box(i);
        if (i < rank) l->at[i] = c[i];
    }
    check_load(m, to, p, c[0], rank, l->rows, at);
    l->barrier = static_cast<int>(static_cast<uint32_t>(*b)), l->phase = p.phases;
    cover();
    add_event(Event{ l, 0, 0, false });
    hopper_chance();
    give_way();
}

/* The first element of a row of the box, by its outer coordinates; null outside of the tensor. */
static const unsigned char *row_of(const Load &l, int row)
{
    const unsigned char *p = l.map.data;
    for (int i = 1; i < l.map.rank; i++) {
        const int64_t x = static_cast<int64_t>(l.at[i]) + row % l.map.box(i);
        if (x < 0 || x >= static_cast<int64_t>(l.map.dim[i])) return nullptr;
        p += x * static_cast<int64_t>(l.map.stride[i]);
        row /= l.map.box(i);
    }
    return p;
}

static void land_row(const Load &l, int row)
{
    const MapBits &m = l.map;
    const int64_t bytes = static_cast<int64_t>(m.box(0)) * m.element,
                  from = static_cast<int64_t>(l.at[0]) * m.element;
    const int64_t length = static_cast<int64_t>(m.dim[0]) * m.element;
    const unsigned char *p = row_of(l, row);
    const int64_t first = from < 0 ? -from : 0, end = from + bytes > length ? length - from : bytes;
    if (p && first < end && !device_holds(p + from + first, static_cast<size_t>(end - first)))
        fail("tma_load at %s:%d: row %d of the box is not within one allocation", l.site.file, l.site.line,
             row);
    const uint32_t start = static_cast<uint32_t>(l.to - shared_base());
    for (int64_t i = 0; i < bytes; i += 16) {
        unsigned char *to =
            shared_base() + swizzled(static_cast<uint32_t>(start + row * m.pitch() + i), m.swizzle);
        for (int64_t j = i; j < i + 16; j++) to[j - i] = p && j >= first && j < end ? p[from + j] : 0;
        shared_offset(to, 16, l.site);
        show(to, 16);
    }
}

/* Lands some rows, all but in random orders. True: it is through. */
static bool land(Load &l)
{
    Phased &p = block_state.barriers[static_cast<size_t>(l.barrier)];
    const int left = l.rows - l.done,
              rows =
                  random_order() ? 1 + static_cast<int>(random_bits() % static_cast<uint32_t>(left)) : left;
    if (p.phases != l.phase)
        fail("tma_load at %s:%d: the barrier's phase was over before these bytes came: it expects too few",
             l.site.file, l.site.line);
    for (int i = 0; i < rows; i++) land_row(l, l.done++);
    p.bytes -= static_cast<int64_t>(rows) * l.map.box(0) * l.map.element;
    settle(p, "tma_load", l.site);
    return l.done == l.rows;
}

/* ---- events ---- */

void product_event(int warpgroup, uint32_t warps)
{
    cover();
    add_event(Event{ nullptr, warpgroup, warps, false });
}

static void happen(size_t i)
{
    std::vector<Event> &events = block_state.events;
    const Event e = events[i];
    if (!e.load) { /* a warp's groups are through in their order: this stands for the warp's oldest */
        events.erase(events.begin() + static_cast<ptrdiff_t>(i));
        wgmma_run(e.warpgroup, e.warps);
    } else if (land(*e.load)) {
        events.erase(events.begin() + static_cast<ptrdiff_t>(i));
        delete e.load;
    }
}

bool hopper_event()
{
    const size_t count = block_state.events.size();
    if (!count) return false;
    happen(random_order() ? random_bits() % count : reverse_order() ? count - 1 : 0);
    return true;
}

void hopper_chance()
{
    if (!random_order() || block_state.events.empty() || random_bits() % 16) return;
    const size_t i = random_bits() % block_state.events.size();
    if (!block_state.events[i].slow) happen(i);
}

void give_way()
{
    if (random_order() && random_bits() % 4 == 0) pass_on();
}

/* ---- named barriers ---- */

void named_barrier(int id, int threads, bool waits, Site at)
{
    const Unwatched unwatched;
    const char *what = waits ? "named_sync" : "named_arrive";
    need_hopper(what, at);
    if (id < 1 || id >= NAMED) fail("%s at %s:%d: barrier %d; there are 1 to 15", what, at.file, at.line, id);
    if (threads < 1 || threads % WARP_LANES || threads > static_cast<int>(block.fibers.size()))
        fail("%s at %s:%d: %d threads of %zu", what, at.file, at.line, threads, block.fibers.size());
    NamedBarrier &n = block_state.named[id];
    if (!n.arrived) n.threads = threads, n.at = at;
    else if (n.threads != threads)
        fail("%s at %s:%d: barrier %d of %d threads, and at %s:%d of %d", what, at.file, at.line, id, threads,
             n.at.file, n.at.line, n.threads);
    void *token = named_token(id, n.round & 1);
    const unsigned round = n.round;
    release(token);
    if (++n.arrived == n.threads) {
        n.arrived = 0;
        n.round++;
        wake(&n);
    } else
        while (waits && n.round == round) wait_on(&n, what, at);
    if (waits) acquire(token);
    give_way();
}

/* ---- registers ---- */

static LaunchBounds bounds;

void launch_bounds(unsigned threads, int blocks)
{
    const unsigned are = block_dim.x * block_dim.y * block_dim.z;
    if (are > threads) fail("blocks of %u threads, __launch_bounds__ allows %u", are, threads);
    bounds = { threads, blocks < 1 ? 1 : blocks };
}

/* What the compiler gives a thread at most under the kernel's launch bounds, and so at the start. */
static int entry_registers()
{
    const unsigned warps =
        (bounds.threads + WARP_LANES - 1) / WARP_LANES * static_cast<unsigned>(bounds.blocks);
    const int most = static_cast<int>(REGISTERS / WARP_LANES / warps / 8 * 8);
    return most > 256 ? 256 : most;
}

static void change_registers(WarpRegisters &w, int count, bool more, Site at)
{
    const char *what = more ? "registers_take" : "registers_give";
    if (more ? count < w.count : count > w.count)
        fail("%s<%d> at %s:%d: the warp has %d", what, count, at.file, at.line, w.count);
    while (count - w.count > block_state.free_registers) wait_on(&block_state.free_registers, what, at);
    block_state.free_registers -= count - w.count;
    w.count = count;
    wake(&block_state.free_registers);
}

/* The first lane of a warp changes them for all. */
void set_registers(int count, bool more, Site at)
{
    const Unwatched unwatched;
    const char *what = more ? "registers_take" : "registers_give";
    need_hopper(what, at);
    if (!bounds.threads)
        fail("%s at %s:%d: the kernel has no __launch_bounds__, and the compiler ignores it", what, at.file,
             at.line);
    if (!block_state.warps) {
        block_state.warps = static_cast<int>(block.warps.size());
        for (int i = 0; i < block_state.warps; i++) block_state.warp[i].count = entry_registers();
    }
    WarpRegisters &w = block_state.warp[current()->warp->number];
    if (!w.lanes) w.wanted = count;
    else if (w.wanted != count)
        fail("%s<%d> at %s:%d, and other lanes of the warp want %d", what, count, at.file, at.line, w.wanted);
    w.lanes |= 1u << current()->lane;
    if (w.count != count) change_registers(w, count, more, at);
    if (w.lanes == current()->warp->present) w.lanes = 0;
}

static void check_registers()
{
    for (int i = 0; i < block_state.warps; i++) {
        const int first = block_state.warp[i / 4 * 4].count;
        if (block_state.warp[i].lanes) fail("registers_give or _take: not all lanes of warp %d have come", i);
        if (block_state.warp[i].count != first)
            fail("registers_give or _take: warp %d has %d registers a thread, warp %d of its warpgroup %d", i,
                 block_state.warp[i].count, i / 4 * 4, first);
    }
}

/* ---- a block ---- */

void hopper_launch() { bounds = {}; }

void hopper_begin(unsigned threads)
{
    block_state.barriers.clear();
    block_state.warps = block_state.free_registers = 0;
    block_state.shown = 0;
    for (NamedBarrier &n : block_state.named) n = {};
    for (WarpRegisters &w : block_state.warp) w = {};
    wgmma_start(threads);
}

void hopper_leave(Fiber *f)
{
    const Unwatched unwatched;
    wgmma_leave(f);
}

void hopper_end()
{
    for (const Event &e : block_state.events)
        if (e.load)
            fail("block (%u,%u,%u) ends while a copy of tma_load at %s:%d is under way", block_index.x,
                 block_index.y, block_index.z, e.load->site.file, e.load->site.line);
    block_state.events.clear();
    for (const Phased &p : block_state.barriers)
        if (p.bytes)
            fail("block (%u,%u,%u) ends, and a barrier has %lld bytes to come", block_index.x, block_index.y,
                 block_index.z, static_cast<long long>(p.bytes));
    check_registers();
}

} // namespace emu
