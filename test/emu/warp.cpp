/*
 * What the threads of a block do together: barriers, warp operations, matrix operations, shared memory,
 * asynchronous copies. Stricter than the hardware: threads that meet must come from the same line of source, a
 * lane that is read must take part, addresses must be aligned and in shared memory, a thread must not return
 * with copies under way.
 *
 * Lanes wait with a pointer to their own values; whoever comes last computes for all. Nothing here may call
 * memcpy or memset: under ThreadSanitizer they would count as accesses of the thread that happens to run.
 */
#include "base/fp8.h"
#include "runtime.h"

#include <sys/mman.h>

namespace emu
{

static bool same(Site a, Site b) { return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0); }

static void fill(void *p, unsigned char value, size_t size)
{
    asm volatile("rep stosb" : "+D"(p), "+c"(size) : "a"(value) : "memory");
}

/* ---- shared memory ---- */

enum { TOKEN_PAGE = 8192, STATIC_LIMIT = 48 << 10, ZONE = 64, SLOT_COUNT = 64, SHARED_ALIGN = 1024 };
enum { MAP_BYTES = TOKEN_PAGE + SHARED_ALIGN + SHARED_LIMIT + (2 * ZONE + 16) * (SLOT_COUNT + 1) };
enum : unsigned char { POISON = 0xff, ZONE_BYTE = 0xa7 };

struct Slot {
    const void *key;
    const char *name;
    unsigned char *base;
    size_t size;
};

/* A block's own mapping: what ThreadSanitizer knows of one block must not order the next. */
struct Tokens {
    uint64_t barrier[2];
    uint64_t meeting[MAX_WARPS][MEETINGS][2];
    uint64_t named[16][2];
};
static_assert(sizeof(Tokens) <= TOKEN_PAGE, "fits");

static struct {
    unsigned char *map, *end; /* end: of the areas handed out */
    size_t static_bytes, most;
    Slot slot[SLOT_COUNT + 1]; /* 0: the dynamic area */
    int slots;
} shared;

static Tokens *tokens() { return reinterpret_cast<Tokens *>(shared.map); }

/* An area with a red zone behind it; the zone before it belongs to the area before. */
static void *take_shared(const void *key, const char *name, size_t size, size_t align)
{
    const uintptr_t at = (reinterpret_cast<uintptr_t>(shared.end) + align - 1) / align * align;
    unsigned char *base = reinterpret_cast<unsigned char *>(at);
    if (shared.slots > SLOT_COUNT) fail("more than %d SHARED arrays", SLOT_COUNT);
    permit(base, size + ZONE);
    fill(base, POISON, size);
    fill(base + size, ZONE_BYTE, ZONE);
    forbid(base + size, ZONE);
    shared.slot[shared.slots++] = Slot{ key, name, base, size };
    shared.end = base + size + ZONE;
    return base;
}

void shared_begin(size_t dynamic_bytes, size_t most)
{
    bool fresh = !shared.map;
#ifdef EMU_TSAN
    fresh = true;
#endif
    if (fresh) {
        const int at = shared.map ? MAP_FIXED : 0;
        void *p = mmap(shared.map, MAP_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | at, -1, 0);
        if (p == MAP_FAILED) fail("no memory for shared memory");
        shared.map = static_cast<unsigned char *>(p);
        forbid(shared.map + TOKEN_PAGE, MAP_BYTES - TOKEN_PAGE);
    }
    for (int i = 0; i < shared.slots; i++) forbid(shared.slot[i].base, shared.slot[i].size);
    shared.slots = 0;
    shared.static_bytes = 0;
    shared.most = most;
    shared.end = shared.map + TOKEN_PAGE + SHARED_ALIGN - ZONE;
    permit(shared.end, ZONE);
    fill(shared.end, ZONE_BYTE, ZONE);
    forbid(shared.end, ZONE);
    shared.end += ZONE;
    take_shared(nullptr, "dynamic", dynamic_bytes, SHARED_ALIGN);
}

static void check_zone(const unsigned char *zone, const Slot &s, const char *side)
{
    permit(zone, ZONE);
    for (int i = 0; i < ZONE; i++)
        if (zone[i] != ZONE_BYTE)
            fail("block (%u,%u,%u) wrote %s the shared array '%s' (%zu bytes), %d bytes %s it", block_index.x,
                 block_index.y, block_index.z, side, s.name, s.size, side[0] == 'b' && side[2] == 'f' ? ZONE - i : i,
                 side);
    forbid(zone, ZONE);
}

void shared_end()
{
    check_zone(shared.slot[0].base - ZONE, shared.slot[0], "before");
    for (int i = 0; i < shared.slots; i++)
        check_zone(shared.slot[i].base + shared.slot[i].size, shared.slot[i], "behind");
}

void *shared_slot(const void *key, const char *name, size_t size, size_t align)
{
    for (int i = 1; i < shared.slots; i++)
        if (shared.slot[i].key == key) return shared.slot[i].base;
    shared.static_bytes += size;
    if (shared.static_bytes > STATIC_LIMIT)
        fail("%zu bytes of SHARED arrays, %d at most", shared.static_bytes, STATIC_LIMIT);
    /* the dynamic area lies behind the arrays, at a multiple of its alignment */
    const size_t dynamic = shared.slot[0].size, step = dynamic ? SHARED_ALIGN : 1;
    const size_t all = (shared.static_bytes + step - 1) / step * step + dynamic;
    if (all > shared.most) fail("%zu bytes of shared memory, %zu at most on %s", all, shared.most, gpu().name);
    return take_shared(key, name, size, align < 16 ? 16 : align);
}

void *shared_dynamic() { return shared.slot[0].base; }
unsigned char *shared_base() { return shared.slot[0].base; }
size_t shared_extent() { return static_cast<size_t>(shared.end - shared.slot[0].base); }
void *named_token(int id, unsigned round) { return &tokens()->named[id][round]; }

unsigned char *shared_at(uint32_t offset, size_t size)
{
    unsigned char *byte = shared.slot[0].base + offset;
    for (int i = 0; i < shared.slots; i++)
        if (byte >= shared.slot[i].base && byte + size <= shared.slot[i].base + shared.slot[i].size) return byte;
    return nullptr;
}

uint32_t shared_offset(const void *p, size_t size, Site at)
{
    const unsigned char *byte = static_cast<const unsigned char *>(p);
    for (int i = 0; i < shared.slots; i++) {
        const Slot &s = shared.slot[i];
        if (byte < s.base || byte + size > s.base + s.size) continue;
        return static_cast<uint32_t>(byte - shared.slot[0].base);
    }
    fail("%s:%d: %zu bytes at %p are not in shared memory", at.file, at.line, size, p);
}

/* ---- barriers ---- */

static void barrier_done()
{
    Barrier &b = block.barrier;
    b.count = b.predicates;
    b.all = b.predicates == b.arrived;
    b.arrived = b.predicates = 0;
    b.round++;
    for (Fiber *f : block.fibers)
        if (f->state == WAITING) f->state = READY;
}

static void barrier_round(const char *what, bool predicate, Site at)
{
    Barrier &b = block.barrier;
    if (!b.arrived) {
        b.what = what;
        b.at = at;
    } else if (b.what != what || !same(b.at, at))
        fail("%s at %s:%d while other threads wait in %s at %s:%d", what, at.file, at.line, b.what, b.at.file,
             b.at.line);
    void *token = &tokens()->barrier[b.round & 1];
    release(token);
    b.predicates += predicate;
    if (++b.arrived == block.live) barrier_done();
    else wait(what, at);
    acquire(token);
}

void barrier(Site at) { barrier_round("__syncthreads", false, at); }

int barrier_count(bool predicate, Site at)
{
    barrier_round("__syncthreads_count", predicate, at);
    return block.barrier.count;
}

int barrier_or(bool predicate, Site at)
{
    barrier_round("__syncthreads_or", predicate, at);
    return block.barrier.count > 0;
}

int barrier_and(bool predicate, Site at)
{
    barrier_round("__syncthreads_and", predicate, at);
    return block.barrier.all;
}

/* ---- warp operations ---- */

/* What lanes exchange in the operations on small values. */
struct Value {
    uint64_t in, out;
    int from; /* shuffle: the lane that is read */
};

static void meeting_done(Warp &w, Meeting &m)
{
    const uint32_t lanes = m.arrived;
    m.combine(m, lanes);
    m.arrived = 0;
    m.round++;
    for (int i = 0; i < WARP_LANES; i++)
        if (lanes >> i & 1) w.fibers[i]->state = READY;
}

/* Waits for the other lanes of the mask. `data` is this lane's part, read and written by `combine`. */
static void meet(const char *what, uint32_t mask, void *data, Combine *combine, Site at, bool ordered = false)
{
    Fiber *f = current();
    Warp &w = *f->warp;
    Meeting *m = nullptr;
    if (!(mask >> f->lane & 1))
        fail("%s at %s:%d: lane %d is not in its own mask %08x", what, at.file, at.line, f->lane, mask);
    for (Meeting &other : w.meetings) {
        if (other.arrived ? other.mask == mask : !m) m = &other;
        if (other.arrived && other.mask == mask) break;
    }
    if (!m) fail("%s at %s:%d: more than %d masks are waited for", what, at.file, at.line, MEETINGS);
    if (!m->arrived) {
        m->mask = mask;
        m->what = what;
        m->at = at;
        m->combine = combine;
    } else if (m->what != what || !same(m->at, at))
        fail("%s at %s:%d, while lanes of its mask %08x wait in %s at %s:%d: the warp has diverged", what, at.file,
             at.line, mask, m->what, m->at.file, m->at.line);
    void *token = &tokens()->meeting[w.number][m - w.meetings][m->round & 1];
    if (ordered) release(token);
    m->lane[f->lane] = data;
    m->arrived |= 1u << f->lane;
    if (!(mask & w.present & ~w.exited & ~m->arrived)) meeting_done(w, *m);
    else wait(what, at);
    if (ordered) acquire(token);
}

void leave_block(Fiber *f)
{
    Warp &w = *f->warp;
    w.exited |= 1u << f->lane;
    for (Meeting &m : w.meetings)
        if (m.arrived && !(m.mask & w.present & ~w.exited & ~m.arrived)) meeting_done(w, m);
    if (--block.live && block.barrier.arrived == block.live) barrier_done();
}

static Value &value(Meeting &m, int lane) { return *static_cast<Value *>(m.lane[lane]); }

static void combine_nothing(Meeting &, uint32_t) {}

void warp_sync(uint32_t mask, Site at) { meet("__syncwarp", mask, nullptr, combine_nothing, at, true); }

static void combine_shuffle(Meeting &m, uint32_t lanes)
{
    for (int i = 0; i < WARP_LANES; i++) {
        if (!(lanes >> i & 1)) continue;
        const int from = value(m, i).from;
        if (!(lanes >> from & 1))
            fail("%s at %s:%d: lane %d reads lane %d, which does not take part", m.what, m.at.file, m.at.line, i, from);
        value(m, i).out = value(m, from).in;
    }
}

uint64_t warp_shuffle(Shuffle kind, uint32_t mask, uint64_t bits, int argument, int width, Site at)
{
    static const char *const name[] = { "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync" };
    const int lane = self->lane, first = lane & -width;
    int from = lane;
    if (width < 1 || width > WARP_LANES || width & (width - 1))
        fail("%s at %s:%d: width %d is not a power of two up to 32", name[kind], at.file, at.line, width);
    switch (kind) { /* out of the segment: the lane's own value */
    case SHUFFLE_INDEX: from = first + (argument & (width - 1)); break;
    case SHUFFLE_UP: from = lane - argument < first ? lane : lane - argument; break;
    case SHUFFLE_DOWN: from = lane + argument >= first + width ? lane : lane + argument; break;
    case SHUFFLE_XOR: from = (lane ^ argument) >= first + width ? lane : lane ^ argument; break;
    }
    if (from < 0 || from >= WARP_LANES) fail("%s at %s:%d: no lane %d", name[kind], at.file, at.line, from);
    Value v = { bits, 0, from };
    meet(name[kind], mask, &v, combine_shuffle, at);
    return v.out;
}

static void combine_ballot(Meeting &m, uint32_t lanes)
{
    uint32_t ballot = 0;
    for (int i = 0; i < WARP_LANES; i++)
        if (lanes >> i & 1 && value(m, i).in) ballot |= 1u << i;
    for (int i = 0; i < WARP_LANES; i++)
        if (lanes >> i & 1) value(m, i).out = ballot;
}

uint32_t warp_ballot(uint32_t mask, bool predicate, Site at)
{
    Value v = { predicate, 0, 0 };
    meet("a vote", mask, &v, combine_ballot, at);
    return static_cast<uint32_t>(v.out);
}

static void combine_match(Meeting &m, uint32_t lanes)
{
    for (int i = 0; i < WARP_LANES; i++) {
        if (!(lanes >> i & 1)) continue;
        uint32_t same = 0;
        for (int j = 0; j < WARP_LANES; j++)
            if (lanes >> j & 1 && value(m, j).in == value(m, i).in) same |= 1u << j;
        value(m, i).out = same;
    }
}

uint32_t warp_match(uint32_t mask, uint64_t bits, Site at)
{
    Value v = { bits, 0, 0 };
    meet("__match_any_sync", mask, &v, combine_match, at);
    return static_cast<uint32_t>(v.out);
}

static uint32_t reduce_two(Reduce kind, uint32_t a, uint32_t b)
{
    const int32_t sa = static_cast<int32_t>(a), sb = static_cast<int32_t>(b);
    switch (kind) {
    case REDUCE_ADD: return a + b;
    case REDUCE_MIN: return a < b ? a : b;
    case REDUCE_MAX: return a > b ? a : b;
    case REDUCE_MIN_SIGNED: return sa < sb ? a : b;
    case REDUCE_MAX_SIGNED: return sa > sb ? a : b;
    case REDUCE_AND: return a & b;
    case REDUCE_OR: return a | b;
    case REDUCE_XOR: return a ^ b;
    }
    return 0;
}

static void combine_reduce(Meeting &m, uint32_t lanes)
{
    int first = __builtin_ctz(lanes);
    uint32_t sum = static_cast<uint32_t>(value(m, first).in);
    for (int i = first + 1; i < WARP_LANES; i++)
        if (lanes >> i & 1)
            sum = reduce_two(static_cast<Reduce>(value(m, i).from), sum, static_cast<uint32_t>(value(m, i).in));
    for (int i = 0; i < WARP_LANES; i++)
        if (lanes >> i & 1) value(m, i).out = sum;
}

uint32_t warp_reduce(Reduce kind, uint32_t mask, uint32_t bits, Site at)
{
    static const char *const name[] = { "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync",
                                        "__reduce_min_sync", "__reduce_max_sync", "__reduce_and_sync",
                                        "__reduce_or_sync",  "__reduce_xor_sync" };
    Value v = { bits, 0, kind };
    meet(name[kind], mask, &v, combine_reduce, at);
    return static_cast<uint32_t>(v.out);
}

/* ---- matrix operations ---- */

static void whole_warp(const char *what, Site at)
{
    const Warp &w = *current()->warp;
    if ((w.present & ~w.exited) != 0xffffffffu)
        fail("%s at %s:%d: the warp is not whole (lanes %08x)", what, at.file, at.line, w.present & ~w.exited);
}

struct Rows {
    uint16_t row[8]; /* the row of 8 numbers that this lane names */
    uint32_t out[4];
};

static uint16_t element(Meeting &m, int matrix, int row, int column)
{
    return static_cast<Rows *>(m.lane[matrix * 8 + row])->row[column];
}

template <bool TRANSPOSED> static void combine_ldmatrix(Meeting &m, uint32_t)
{
    for (int lane = 0; lane < WARP_LANES; lane++)
        for (int matrix = 0; matrix < 4; matrix++) {
            const int g = lane / 4, t = lane % 4 * 2;
            const uint32_t low = TRANSPOSED ? element(m, matrix, t, g) : element(m, matrix, g, t);
            const uint32_t high = TRANSPOSED ? element(m, matrix, t + 1, g) : element(m, matrix, g, t + 1);
            static_cast<Rows *>(m.lane[lane])->out[matrix] = low | high << 16;
        }
}

void warp_ldmatrix(uint32_t out[4], const uint64_t row[2], bool transposed, Site at)
{
    const char *what = transposed ? "ldmatrix_x4_trans" : "ldmatrix_x4";
    Rows mine;
    for (int i = 0; i < 8; i++) mine.row[i] = static_cast<uint16_t>(row[i / 4] >> (16 * (i % 4)));
    whole_warp(what, at);
    meet(what, 0xffffffffu, &mine, transposed ? combine_ldmatrix<true> : combine_ldmatrix<false>, at);
    for (int i = 0; i < 4; i++) out[i] = mine.out[i];
}

struct Fragments {
    float *d;
    const uint32_t *a, *b;
};

static void multiply_as_chip(float d[16][8], const float a[16][16], const float b[16][8])
{
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 8; column++)
            d[row][column] = chip_sum(d[row][column], a[row], 1, &b[0][column], 8, 16);
}

/* d (16 x 8) += a (16 x 16) b (16 x 8). Layout of the fragments: cuda/common.cuh. */
template <Half TYPE> static void combine_mma(Meeting &m, uint32_t)
{
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < WARP_LANES; lane++) {
        const Fragments &f = *static_cast<Fragments *>(m.lane[lane]);
        const int g = lane / 4, t = lane % 4 * 2;
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < 4; i++)
                a[g + i % 2 * 8][t + half + i / 2 * 8] = from_half<TYPE>(f.a[i] >> (16 * half) & 0xffffu);
            for (int i = 0; i < 2; i++) b[t + half + i * 8][g] = from_half<TYPE>(f.b[i] >> (16 * half) & 0xffffu);
        }
        for (int i = 0; i < 4; i++) d[g + i / 2 * 8][t + i % 2] = f.d[i];
    }
    if (chip_rounding) multiply_as_chip(d, a, b);
    else
        for (int row = 0; row < 16; row++)
            for (int k = 0; k < 16; k++)
                for (int column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < WARP_LANES; lane++) {
        const Fragments &f = *static_cast<Fragments *>(m.lane[lane]);
        for (int i = 0; i < 4; i++) f.d[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
}

void warp_mma(float d[4], const uint32_t a[4], const uint32_t b[2], Half type, Site at)
{
    Fragments f = { d, a, b };
    whole_warp("mma_16816", at);
    meet("mma_16816", 0xffffffffu, &f, type == BFLOAT16 ? combine_mma<BFLOAT16> : combine_mma<FLOAT16>, at);
}

/* d (16 x 8) += a (16 x 32) b (32 x 8) of codes. */
static void combine_mma_e4m3(Meeting &m, uint32_t)
{
    enum { K = 32 };
    float a[16][K], b[8][K], d[16][8]; /* b: transposed */
    for (int lane = 0; lane < WARP_LANES; lane++) {
        const Fragments &f = *static_cast<Fragments *>(m.lane[lane]);
        const int g = lane / 4, t = lane % 4 * 4;
        for (int byte = 0; byte < 4; byte++) {
            for (int i = 0; i < 4; i++)
                a[g + i % 2 * 8][t + byte + i / 2 * 16] = e4m3_to_float(f.a[i] >> (8 * byte) & 0xff);
            for (int i = 0; i < 2; i++) b[g][t + byte + i * 16] = e4m3_to_float(f.b[i] >> (8 * byte) & 0xff);
        }
        for (int i = 0; i < 4; i++) d[g + i / 2 * 8][lane % 4 * 2 + i % 2] = f.d[i];
    }
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 8; column++) {
            float &sum = d[row][column];
            if (chip_rounding) sum = chip_sum_fp8(sum, a[row], 1, b[column], 1, K);
            else
                for (int k = 0; k < K; k++) sum += a[row][k] * b[column][k];
        }
    for (int lane = 0; lane < WARP_LANES; lane++) {
        const Fragments &f = *static_cast<Fragments *>(m.lane[lane]);
        for (int i = 0; i < 4; i++) f.d[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
}

void warp_mma_e4m3(float d[4], const uint32_t a[4], const uint32_t b[2], Site at)
{
    Fragments f = { d, a, b };
    const Gpu &chip = gpu();
    if (chip.major * 10 + chip.minor < 89) fail("mma_16832_e4m3 at %s:%d: from 8.9 on", at.file, at.line);
    whole_warp("mma_16832_e4m3", at);
    meet("mma_16832_e4m3", 0xffffffffu, &f, combine_mma_e4m3, at);
}

/* ---- asynchronous copies ---- */

bool copy_begin(Copy c, Site at)
{
    Fiber *f = current();
    if (reinterpret_cast<uintptr_t>(c.to) % 16 || (c.valid && reinterpret_cast<uintptr_t>(c.from) % 16))
        fail("cp_async_16 at %s:%d: %p <- %p: both must be multiples of 16", at.file, at.line, c.to, c.from);
    shared_offset(c.to, 16, at);
    if (c.valid && !device_address(c.from))
        fail("cp_async_16 at %s:%d: %p is not device memory", at.file, at.line, c.from);
    if (random_order() && random_bits() & 1) return true; /* the hardware may be quick, too */
    f->copies.push_back(c);
    return false;
}

void copy_commit() { current()->groups.push_back(static_cast<int>(current()->copies.size())); }

const Copy *copies_due(int pending, int *count)
{
    Fiber *f = current();
    const int done = static_cast<int>(f->groups.size()) - pending;
    *count = done > 0 ? f->groups[static_cast<size_t>(done - 1)] : 0;
    return f->copies.data();
}

void copies_landed(int count)
{
    Fiber *f = current();
    size_t groups = 0, kept = 0;
    while (groups < f->groups.size() && f->groups[groups] <= count) groups++;
    for (size_t i = groups; i < f->groups.size(); i++) f->groups[kept++] = f->groups[i] - count;
    f->groups.resize(kept);
    kept = 0;
    for (size_t i = static_cast<size_t>(count); i < f->copies.size(); i++) f->copies[kept++] = f->copies[i];
    f->copies.resize(kept);
}

} // namespace emu
