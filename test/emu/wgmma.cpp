/*
 * Products of warpgroups (wgmma). Threads ask one by one, all 128 for the same, by equal descriptors, in one order. A
 * committed group is an event (hopper.h): when all have asked, in orders other than forward one for each warp, in
 * random ones when that warp has. It reads shared memory; and no earlier than at the wait does d get its sum, NaN since
 * the thread asked. So whoever reads d too early, or writes too early over what is read, has wrong numbers.
 *
 * Descriptors are decoded from their bits. Source: PTX ISA, "Matrix descriptor" and "Strides" of wgmma.
 */
#include "base/fp8.h"
#include "hopper.h"

#include <deque>
#include <memory>

namespace emu
{

enum {
    GROUP_THREADS = 128,
    GROUP_WARPS = 4,
    ROWS = 64,
    DEPTH = 16,
    CODE_DEPTH = 32,
    COLUMNS_MOST = 256,
    WARP_ROWS = 16
};
enum : uint32_t { UNDER_WAY = 0x7fc0dead }; /* a NaN: what d holds */

/* A matrix of sums that products add to, in the registers of a warpgroup. */
struct Sum {
    float *d[GROUP_THREADS];
    int last[GROUP_THREADS]; /* product of the thread that adds to it */
    int columns, users;
    float value[ROWS * COLUMNS_MOST];
};

struct Asked {
    Product p;
    std::shared_ptr<Sum> sum;
    uint32_t rows[GROUP_THREADS][4];
};

struct Warpgroup {
    std::deque<Asked> products; /* that not all warps are through with */
    int first;                  /* number of the oldest of them */
    std::vector<int> group_end; /* products up to the end of each group that was committed by some thread */
    std::vector<int> committed[GROUP_WARPS]; /* threads of the warp that have, by group */
    int done[GROUP_WARPS];                   /* groups, by warp */
};

/* d may be asked for: nobody has changed it since wgmma_begin. */
struct Begun {
    const float *d;
    uint32_t bits;
};

struct Asker {
    int asked, committed;
    std::vector<Begun> begun;
    std::vector<std::shared_ptr<Sum>> under_way;
};

static std::vector<Warpgroup> warpgroups;
static std::vector<Asker> askers;

static Warpgroup &warpgroup_of(const Fiber *f, const char *what, Site at)
{
    const size_t number = static_cast<size_t>(f->number / GROUP_THREADS);
    need_hopper(what, at);
    if (number >= warpgroups.size())
        fail("%s at %s:%d: the block has no four warps here", what, at.file, at.line);
    return warpgroups[number];
}

static Asker &asker() { return askers[static_cast<size_t>(current()->number)]; }

static uint32_t mixed(const float *d, int count)
{
    uint32_t sum = 0;
    for (int i = 0; i < count; i++) sum = sum * 31 + bits_as<uint32_t>(d[i]);
    return sum;
}

static std::shared_ptr<Sum> *find_sum(Asker &a, int thread, const float *d)
{
    for (std::shared_ptr<Sum> &s : a.under_way)
        if (s->d[thread] == d) return &s;
    return nullptr;
}

void wgmma_begin(float *d, int count, Site at)
{
    const Unwatched unwatched;
    Asker &a = asker();
    warpgroup_of(current(), "wgmma_begin", at);
    if (find_sum(a, current()->number % GROUP_THREADS, d)) return;
    for (Begun &b : a.begun)
        if (b.d == d) {
            b.bits = mixed(d, count);
            return;
        }
    a.begun.push_back({ d, mixed(d, count) });
}

/* ---- asking ---- */

/* Row and column of number r of a thread's d. */
static int place_of(int thread, int r, int columns)
{
    const int row = thread / 32 * 16 + r / 2 % 2 * 8 + thread % 32 / 4;
    return row * columns + r / 4 * 8 + thread % 4 * 2 + r % 2;
}

static int span_of(uint64_t descriptor)
{
    static const int spans[] = { 16, 128, 64, 32 };
    return spans[descriptor >> 62];
}

static void check_descriptor(uint64_t x, const char *name, Site at)
{
    const uint64_t unused = 0xc000c000ull | 0x3ff1ull << 48 | 0xc000ull << 32;
    if (x & unused)
        fail("wgmma at %s:%d: bits of %s's descriptor %016llx that must be 0 are not", at.file, at.line, name,
             static_cast<unsigned long long>(x));
    if (x >> 49 & 7)
        fail("wgmma at %s:%d: %s has a base offset; the emulator knows none", at.file, at.line, name);
}

static void check_same(const Product &mine, const Product &first)
{
    const Site at = mine.at;
    if (mine.at.line != first.at.line || strcmp(mine.at.file, first.at.file) != 0)
        fail("wgmma at %s:%d, while other threads of the warpgroup come to %s:%d", at.file, at.line,
             first.at.file, first.at.line);
    if (mine.a != first.a || mine.b != first.b || mine.keep != first.keep)
        fail("wgmma at %s:%d: descriptors %llx, %llx, keep %d, of other threads %llx, %llx, %d", at.file,
             at.line, static_cast<unsigned long long>(mine.a), static_cast<unsigned long long>(mine.b),
             mine.keep, static_cast<unsigned long long>(first.a), static_cast<unsigned long long>(first.b),
             first.keep);
}

/* d becomes part of a sum: its values go there, and it is NaN from now on. */
static void join_sum(Asker &a, const std::shared_ptr<Sum> &sum, float *d, const Product &p)
{
    const int thread = current()->number % GROUP_THREADS, count = p.columns / 2;
    size_t i = 0;
    while (i < a.begun.size() && a.begun[i].d != d) i++;
    if (i == a.begun.size())
        fail("wgmma at %s:%d: wgmma_begin(d) was left out since d was last waited for", p.at.file, p.at.line);
    if (a.begun[i].bits != mixed(d, count))
        fail("wgmma at %s:%d: d was changed behind wgmma_begin(d)", p.at.file, p.at.line);
    a.begun.erase(a.begun.begin() + static_cast<ptrdiff_t>(i));
    sum->d[thread] = d;
    sum->users++;
    a.under_way.push_back(sum);
    for (int r = 0; r < count; r++) {
        sum->value[place_of(thread, r, p.columns)] = d[r];
        d[r] = bits_as<float>(static_cast<uint32_t>(UNDER_WAY));
    }
}

static void check_untouched(const float *d, const Product &p)
{
    for (int r = 0; r < p.columns / 2; r++)
        if (bits_as<uint32_t>(d[r]) != UNDER_WAY)
            fail("wgmma at %s:%d: d was written while products that add to it are under way", p.at.file,
                 p.at.line);
}

static std::shared_ptr<Sum> new_sum(int columns)
{
    std::shared_ptr<Sum> s(new Sum);
    for (float *&d : s->d) d = nullptr;
    s->users = 0;
    s->columns = columns;
    return s;
}

void wgmma_issue(float *d, const Product &p)
{
    const Unwatched unwatched;
    Warpgroup &w = warpgroup_of(current(), "wgmma", p.at);
    Asker &a = asker();
    const int thread = current()->number % GROUP_THREADS, number = a.asked++;
    std::shared_ptr<Sum> *mine = find_sum(a, thread, d);
    if (!p.rows) check_descriptor(p.a, "a", p.at);
    check_descriptor(p.b, "b", p.at);
    if (number == w.first + static_cast<int>(w.products.size()))
        w.products.push_back({ p, mine ? *mine : new_sum(p.columns), {} });
    Asked &asked = w.products[static_cast<size_t>(number - w.first)];
    check_same(p, asked.p);
    if (!asked.sum->d[thread]) join_sum(a, asked.sum, d, p);
    else if (asked.sum->d[thread] != d)
        fail("wgmma at %s:%d: d is another than that of other threads", p.at.file, p.at.line);
    else if (asked.sum->columns != p.columns)
        fail("wgmma at %s:%d: %d columns, and a product of %d is under way", p.at.file, p.at.line, p.columns,
             asked.sum->columns);
    check_untouched(d, p);
    asked.sum->last[thread] = number;
    if (p.rows)
        for (int j = 0; j < 4; j++) asked.rows[thread][j] = p.rows[j];
}

/* In random orders a warp's part may come before the other warps have asked, else when all have. */
static void committed_by_warp(const Warpgroup &w, int number, int warp, size_t group)
{
    int warps = 0;
    for (const std::vector<int> &c : w.committed) warps += c[group] == WARP_LANES;
    if (random_order()) product_event(number, 1u << warp);
    else if (warps == GROUP_WARPS && !reverse_order()) product_event(number, 0xf);
    else if (warps == GROUP_WARPS)
        for (int i = GROUP_WARPS; i-- > 0;)
            product_event(number, 1u << i); /* the newest: of the first warp */
}

void wgmma_commit(Site at)
{
    const Unwatched unwatched;
    Warpgroup &w = warpgroup_of(current(), "wgmma_commit", at);
    Asker &a = asker();
    const size_t group = static_cast<size_t>(a.committed++);
    if (group == w.group_end.size()) {
        w.group_end.push_back(a.asked);
        for (std::vector<int> &c : w.committed) c.push_back(0);
    } else if (w.group_end[group] != a.asked)
        fail("wgmma_commit at %s:%d: %d products so far, of other threads %d", at.file, at.line, a.asked,
             w.group_end[group]);
    const int number = current()->number / GROUP_THREADS,
              warp = current()->number % GROUP_THREADS / WARP_LANES;
    if (++w.committed[warp][group] == WARP_LANES) wake(&w), committed_by_warp(w, number, warp, group);
    hopper_chance();
    give_way();
}

/* ---- waiting ---- */

static void deliver(Asker &a, int products)
{
    const int thread = current()->number % GROUP_THREADS;
    for (size_t i = a.under_way.size(); i-- > 0;) {
        Sum &s = *a.under_way[i];
        if (s.last[thread] >= products) continue; /* adds to it still */
        for (int r = 0; r < s.columns / 2; r++) s.d[thread][r] = s.value[place_of(thread, r, s.columns)];
        a.under_way.erase(a.under_way.begin() + static_cast<ptrdiff_t>(i));
    }
}

void wgmma_wait(int pending, Site at)
{
    const Unwatched unwatched;
    Warpgroup &w = warpgroup_of(current(), "wgmma_wait", at);
    Asker &a = asker();
    const int groups = a.committed - pending, warp = current()->number % GROUP_THREADS / WARP_LANES;
    hopper_chance();
    give_way();
    const auto all_asked = [&] {
        for (const std::vector<int> &c : w.committed)
            if (groups > 0 && c[static_cast<size_t>(groups - 1)] < WARP_LANES) return false;
        return true;
    };
    while (w.done[warp] < groups || !all_asked()) wait_on(&w, "wgmma_wait", at);
    if (groups > 0) deliver(a, w.group_end[static_cast<size_t>(groups - 1)]);
}

void wgmma_end(const float *d, Site at)
{
    const Unwatched unwatched;
    if (find_sum(asker(), current()->number % GROUP_THREADS, d))
        fail("wgmma_end at %s:%d: products that add to d are under way", at.file, at.line);
}

void wgmma_leave(Fiber *f)
{
    const Asker &a = askers[static_cast<size_t>(f->number)];
    if (!a.under_way.empty()) fail("returns while products were not waited for");
}

void wgmma_start(unsigned threads)
{
    warpgroups.clear();
    warpgroups.resize(threads / GROUP_THREADS);
    askers.resize(threads);
    for (Asker &a : askers) a.asked = a.committed = 0, a.begun.clear(), a.under_way.clear();
}

/* ---- computing ---- */

struct Matrix {
    uint32_t start, lead, stride, span;
    bool trans;
    const char *name;
    Site at;
};

static Matrix matrix_of(uint64_t x, bool trans, const char *name, Site at)
{
    const auto field = [x](int bit) { return static_cast<uint32_t>(x >> bit & 0x3fff) << 4; };
    return { field(0), field(16), field(32), static_cast<uint32_t>(span_of(x)), trans, name, at };
}

/* Place of the 8 numbers that begin with row (or column) i of depth k: along the depth, or, `trans`, along i. */
static uint32_t chunk_of(const Matrix &m, uint32_t i, uint32_t k)
{
    const uint32_t s = m.span, across = s / 2;
    if (!m.trans && s > 16) return m.start + i % 8 * s + i / 8 * m.stride + k * 2;
    if (!m.trans) return m.start + i % 8 * 16 + i / 8 * m.stride + k / 8 * m.lead;
    if (s > 16) return m.start + i % across * 2 + i / across * m.lead + k % 8 * s + k / 8 * m.stride;
    return m.start + i / 8 * m.stride + k % 8 * 16 + k / 8 * m.lead;
}

static const uint16_t *read_chunk(const Matrix &m, uint32_t i, uint32_t k)
{
    const uint32_t at = swizzled(chunk_of(m, i, k), m.span);
    const unsigned char *p = shared_at(at, 16);
    if (!p)
        fail("wgmma at %s:%d: %s, row or column %u, depth %u: %u is not in shared memory", m.at.file,
             m.at.line, m.name, i, k, at);
    if (!is_shown(p, 16))
        fail("wgmma at %s:%d: %s, row or column %u, depth %u: a thread stored it and had no proxy_fence() "
             "since",
             m.at.file, m.at.line, m.name, i, k);
    return reinterpret_cast<const uint16_t *>(p);
}

/* to[k][i] of `count` rows (of a) or columns (of b) from `first` on. */
template <Half TYPE>
static void read_matrix(float (*to)[COLUMNS_MOST], const Matrix &m, uint32_t first, uint32_t count)
{
    for (uint32_t i = 0; i < count; i += m.trans ? 8 : 1)
        for (uint32_t k = 0; k < DEPTH; k += m.trans ? 1 : 8) {
            const uint16_t *x = read_chunk(m, first + i, k);
            for (uint32_t e = 0; e < 8; e++)
                to[k + (m.trans ? 0 : e)][i + (m.trans ? e : 0)] = from_half<TYPE>(x[e]);
        }
}

/* The same of codes: 16 of them lie where 8 numbers would. */
static void read_codes(float (*to)[COLUMNS_MOST], const Matrix &m, uint32_t first, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t k = 0; k < CODE_DEPTH; k += 16) {
            const uint8_t *x = reinterpret_cast<const uint8_t *>(read_chunk(m, first + i, k / 2));
            for (uint32_t e = 0; e < 16; e++) to[k + e][i] = e4m3_to_float(x[e]);
        }
}

template <Half TYPE> static void rows_of_registers(float (*to)[COLUMNS_MOST], const Asked &asked, int warp)
{
    for (int lane = 0; lane < WARP_LANES; lane++)
        for (int j = 0; j < 4; j++)
            for (int half = 0; half < 2; half++)
                to[lane % 4 * 2 + half + j / 2 * 8][lane / 4 + j % 2 * 8] =
                    from_half<TYPE>(asked.rows[warp * WARP_LANES + lane][j] >> (16 * half) & 0xffffu);
}

typedef float Eight __attribute__((vector_size(32), aligned(4)));

/* In ascending order of the depth, in fp32, or as the chip: as warp_mma() does. */
static void add_row(float *sum, const float (*a)[COLUMNS_MOST], const float (*b)[COLUMNS_MOST], int row,
                    const Product &p)
{
    const auto chip = p.codes ? chip_sum_fp8 : chip_sum;
    const int columns = p.columns, depth = p.codes ? CODE_DEPTH : DEPTH;
    for (int c = 0; c < columns && chip_rounding; c++)
        sum[c] = chip(sum[c], a[0] + row, COLUMNS_MOST, b[0] + c, COLUMNS_MOST, depth);
    for (int c = 0; c < columns && !chip_rounding; c += 8) {
        Eight s = *reinterpret_cast<const Eight *>(sum + c);
        for (int k = 0; k < depth; k++) s += a[k][row] * *reinterpret_cast<const Eight *>(b[k] + c);
        *reinterpret_cast<Eight *>(sum + c) = s;
    }
}

template <Half TYPE> static void multiply(Asked &asked, uint32_t warps)
{
    static float a[CODE_DEPTH][COLUMNS_MOST], b[CODE_DEPTH][COLUMNS_MOST];
    const Product &p = asked.p;
    const auto read = p.codes ? read_codes : read_matrix<TYPE>;
    read(b, matrix_of(p.b, p.trans_b, "b", p.at), 0, static_cast<uint32_t>(p.columns));
    for (int w = 0; w < GROUP_WARPS; w++) {
        if (!(warps >> w & 1)) continue;
        if (p.rows) rows_of_registers<TYPE>(a, asked, w);
        else
            read(a, matrix_of(p.a, p.trans_a, "a", p.at), static_cast<uint32_t>(w * WARP_ROWS), WARP_ROWS);
        for (int row = 0; row < WARP_ROWS; row++) {
            float *sum = asked.sum->value + (w * WARP_ROWS + row) * p.columns;
            for (int c = 0; c < p.columns && !p.keep; c++) sum[c] = 0;
            add_row(sum, a, b, row, p);
        }
    }
}

/* The next group of each of these warps; in step where they are several. */
void wgmma_run(int number, uint32_t warps)
{
    Warpgroup &w = warpgroups[static_cast<size_t>(number)];
    const int warp = __builtin_ctz(warps), group = w.done[warp];
    const int from = group ? w.group_end[static_cast<size_t>(group - 1)] : 0,
              to = w.group_end[static_cast<size_t>(group)];
    for (int i = from; i < to; i++) {
        Asked &asked = w.products[static_cast<size_t>(i - w.first)];
        if (asked.p.type == BFLOAT16) multiply<BFLOAT16>(asked, warps);
        else multiply<FLOAT16>(asked, warps);
    }
    int least = group + 1;
    for (int i = 0; i < GROUP_WARPS; i++) {
        if (warps >> i & 1) w.done[i] = group + 1;
        if (w.done[i] < least) least = w.done[i];
    }
    for (const int end = least ? w.group_end[static_cast<size_t>(least - 1)] : 0; w.first < end; w.first++)
        w.products.pop_front();
    wake(&w);
}

} // namespace emu
