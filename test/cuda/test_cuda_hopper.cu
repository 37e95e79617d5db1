/*
 * The instructions that cuda/hopper.cuh names, form by form, on one tile against a loop: which layouts a descriptor may
 * describe, where TMA puts what, how barriers count, and which bits a product has. On a GPU that has them, and on the
 * emulator. Kernels rest on these: where one is wrong, the first case that is wrong here says why.
 *
 *   test_cuda_hopper [GROUP ...]   of: products advances edges rings fences bits sums; all of them without a choice
 *
 * A line for each case that is wrong, with its first wrong element and what would explain it, then one for each group.
 * Every group runs in a process of its own: what dies or hangs is a case that is wrong, and the next ones run all the
 * same. Some cases ask what no kernel of ours rests on ("told").
 */
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "hopper.cuh"

#ifdef __CUDACC__
constexpr bool emulated = false;
#else
constexpr bool emulated = true;
#endif

/* ---- what is common to all cases ---- */

enum { DEATHS_MOST = 3, CASE_SECONDS = emulated ? 600 : 60 };

/* Progress of the group that runs, shared with the process that started it. */
static struct Progress {
    int at, wrong, told;
    bool asks; /* the case may die: that is what it finds out */
    char name[200];
} * progress;

static int first_case; /* those before it were run by a process that died */

/* The next case, by name: false where another process has done with it. */
static bool next_case(const char *format, ...) __attribute__((format(printf, 1, 2)));
static bool next_case(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(progress->name, sizeof progress->name, format, args);
    va_end(args);
    progress->asks = false;
    alarm(CASE_SECONDS);
    return progress->at++ >= first_case;
}

static void wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void wrong(const char *format, ...)
{
    char text[300];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    progress->wrong++;
    if (progress->told++ < 60) printf("  wrong: %s: %s\n", progress->name, text);
    fflush(stdout);
}

static void need(cudaError_t e, const char *what)
{
    if (e == cudaSuccess) return;
    if (!progress->asks) printf("  died: %s: %s: %s\n", progress->name, what, cudaGetErrorString(e));
    fflush(stdout);
    _exit(3);
}

template <class T> static T *on_device(const std::vector<T> &x)
{
    T *p;
    need(cudaMalloc(&p, x.size() * sizeof(T) + 256), "memory");
    need(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice), "to the device");
    return p;
}

template <class T> static std::vector<T> from_device(const T *p, size_t count)
{
    std::vector<T> x(count);
    need(cudaGetLastError(), "launch");
    need(cudaDeviceSynchronize(), "kernel");
    need(cudaMemcpy(x.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost), "from the device");
    return x;
}

static uint32_t random_state = 1;
static uint32_t random_next()
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}
static int random_small(int most)
{
    return static_cast<int>(random_next() % static_cast<uint32_t>(2 * most + 1)) - most;
}
static float random_normal()
{
    float sum = 0;
    for (int i = 0; i < 12; i++) sum += static_cast<float>(random_next()) / (1 << 24);
    return sum - 6;
}

/* Place to which the swizzle of rows of `span` bytes moves an offset of the shared window. */
static uint32_t swizzled(uint32_t at, int span)
{
    return at ^ ((at >> 7 & static_cast<uint32_t>(span / 16 - 1)) << 4);
}

/* ---- products ---- */

enum { STEPS = 12, ROWS = 64 };

/* An operand in shared memory: boxes that TMA brings one behind the other, and how descriptors name them. */
struct Operand {
    int offset, boxes, width,
        box_bytes; /* of the tile in shared memory; width: elements from a box to the next */
    int first;     /* bytes from the tile to what the first descriptor names */
    int lead, stride, base;
    Swizzle mode;
    int at[STEPS]; /* bytes, by step of the depth */
};

struct Form {
    Operand a, b;
    int steps, depth;
    bool keeps; /* d begins with what `out` holds, else with NaN, which must not matter */
};

__device__ __forceinline__ uint64_t descriptor(unsigned char *memory, const Operand &o, int step)
{
    return shared_matrix(memory + o.offset + o.first + o.at[step], o.lead, o.stride, o.mode) |
           static_cast<uint64_t>(o.base) << 49;
}

__device__ __forceinline__ void bring(unsigned char *memory, const TensorMap &map, const Operand &o,
                                      Barrier *full)
{
    for (int c = 0; c < o.boxes; c++)
        tma_load_2d(memory + o.offset + c * o.box_bytes, map, full, c * o.width, 0);
}

template <int N> __device__ __forceinline__ int64_t place_of(int r)
{
    const int t = threadIdx.x % 128;
    return (16 * (t / 32) + 8 * (r / 2 % 2) + t % 32 / 4) * N + 8 * (r / 4) + 2 * (t % 4) + r % 2;
}

#if HOPPER
/* What a thread holds of a, rows [64][depth], for a step. */
__device__ __forceinline__ void rows_of_thread(uint32_t (&a)[4], const uint16_t *rows, int depth, int step)
{
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    UNROLL
    for (int j = 0; j < 4; j++) {
        const uint16_t *from = rows + (row + j % 2 * 8) * depth + step * 16 + column + j / 2 * 8;
        a[j] = from[0] | static_cast<uint32_t>(from[1]) << 16;
    }
}

/* Four steps are one group of products, other numbers a group each. */
template <int N, bool TRANS_A, bool TRANS_B, bool REGISTERS, class T>
__device__ __forceinline__ void products(float (&d)[N / 2], unsigned char *memory, const uint16_t *rows,
                                         const Form &f)
{
    const bool together = f.steps == 4 && !REGISTERS;
    if (together) {
        wgmma_begin(d);
        UNROLL
        for (int s = 0; s < 4; s++)
            wgmma<TRANS_A, TRANS_B>(d, descriptor(memory, f.a, s), descriptor(memory, f.b, s),
                                    f.keeps || s > 0, T());
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_end(d);
    }
    for (int s = 0; s < f.steps && !together; s++) {
        uint32_t a[4];
        if (REGISTERS) rows_of_thread(a, rows, f.depth, s);
        wgmma_begin(d);
        if (REGISTERS) wgmma_rows<TRANS_B>(d, a, descriptor(memory, f.b, s), f.keeps || s > 0, T());
        else
            wgmma<TRANS_A, TRANS_B>(d, descriptor(memory, f.a, s), descriptor(memory, f.b, s),
                                    f.keeps || s > 0, T());
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_end(d);
    }
}
#endif

template <int N, bool TRANS_A, bool TRANS_B, bool REGISTERS, class T>
__global__ void __launch_bounds__(128)
    product_kernel(TENSOR_MAP(map_a), TENSOR_MAP(map_b), const uint16_t *rows, Form f, float *out)
{
#if HOPPER
    DYNAMIC_SHARED(unsigned char, memory);
    SHARED(Barrier, full, [1]);
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier_expect(full, (REGISTERS ? 0 : f.a.boxes * f.a.box_bytes) + f.b.boxes * f.b.box_bytes);
        if (!REGISTERS) bring(memory, map_a, f.a, full);
        bring(memory, map_b, f.b, full);
    }
    barrier_wait(full, 0);
    float d[N / 2];
    UNROLL
    for (int r = 0; r < N / 2; r++) d[r] = f.keeps ? out[place_of<N>(r)] : NAN;
    products<N, TRANS_A, TRANS_B, REGISTERS, T>(d, memory, rows, f);
    UNROLL
    for (int r = 0; r < N / 2; r++) out[place_of<N>(r)] = d[r];
#endif
}

/* The same products by mma.sync, which rounds as other kernels of ours do. */
template <class T>
__global__ void __launch_bounds__(128)
    mma_kernel(const uint16_t *a, const uint16_t *b, int depth, int n, bool keeps, float *out)
{
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4 * 2, row = threadIdx.x / 32 * 16;
    const auto pair = [&](const uint16_t *x, int r, int k) {
        return x[r * depth + k] | static_cast<uint32_t>(x[r * depth + k + 1]) << 16;
    };
    for (int c = 0; c < n; c += 8) {
        float d[4] = { 0, 0, 0, 0 };
        for (int i = 0; i < 4 && keeps; i++) d[i] = out[(row + g + i / 2 * 8) * n + c + t + i % 2];
        for (int k = 0; k < depth; k += 16) {
            const uint32_t fa[4] = { pair(a, row + g, k + t), pair(a, row + g + 8, k + t),
                                     pair(a, row + g, k + t + 8), pair(a, row + g + 8, k + t + 8) };
            const uint32_t fb[2] = { pair(b, c + g, k + t), pair(b, c + g, k + t + 8) };
            mma_16816(d, fa, fb, T());
        }
        for (int i = 0; i < 4; i++) out[(row + g + i / 2 * 8) * n + c + t + i % 2] = d[i];
    }
}

struct Layout {
    bool down;
    int swizzle; /* bytes, 0: none */
};

struct Case {
    Layout a = { false, 128 }, b = { false, 128 };
    bool registers = false, half = false;
    int n = 64, depth = 64;
    int a_rows = 64, row = 0, b_rows = 0,
        column = 0;               /* rows of the tiles, and the first that the product takes */
    int a_shift = 0, b_shift = 0; /* tiles begin so far behind a multiple of 1024 */
    bool based = false;           /* descriptors have the base offset of the tile's address */
    int lead = -1;                /* of a and b, where it is not used */
    bool keeps = false;
};

static Swizzle mode_of(int span)
{
    return span == 128 ? SWIZZLE_128 : span == 64 ? SWIZZLE_64 : span == 32 ? SWIZZLE_32 : SWIZZLE_NONE;
}

/* rows: of the whole tile. */
static Operand operand(Layout l, int rows, int depth, int first_row, int offset, bool based)
{
    const int span = l.swizzle ? l.swizzle : 16, width = span / 2;
    Operand o = {};
    o.offset = offset, o.width = width, o.mode = mode_of(l.swizzle);
    o.boxes = ((l.down ? rows : depth) + width - 1) / width;
    o.box_bytes = (l.down ? depth : rows) * span;
    o.stride = 8 * span, o.lead = 16;
    if (!l.down) {
        if (!l.swizzle) o.lead = o.box_bytes;
        o.first = first_row * span;
    } else {
        o.lead = o.box_bytes;
        if (!l.swizzle) o.lead = 128, o.stride = o.box_bytes;
        o.first = first_row / width * o.box_bytes;
    }
    for (int s = 0; s < STEPS; s++)
        o.at[s] = l.down ? s * 16 * span : s * 32 / span * o.box_bytes + s * 32 % span;
    if (based) o.base = offset >> 7 & 7;
    return o;
}

static TensorMap map_of(const void *data, std::vector<int> dim, std::vector<int> box, int swizzle)
{
    TensorMap map;
    TensorBox b = {};
    b.data = data, b.rank = static_cast<int>(dim.size()), b.swizzle = swizzle;
    int64_t stride = 2;
    for (int i = 0; i < b.rank; i++) {
        const size_t j = static_cast<size_t>(i);
        b.dim[i] = dim[j], b.box[i] = box[j], b.stride[i] = stride;
        stride *= dim[j];
    }
    if (tensor_map(&map, &b) != ERR_OK) {
        wrong("no tensor map");
        exit(4);
    }
    return map;
}

template <int N, class T>
static void launch_product(const Case &c, const TensorMap &a, const TensorMap &b, const uint16_t *rows,
                           const Form &f, float *out)
{
    enum { SHARED_BYTES = 200 << 10 };
#define RUN_PRODUCT(...)                                                                      \
    {                                                                                         \
        need(cudaFuncSetAttribute((product_kernel<__VA_ARGS__>),                              \
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES), \
             "shared memory");                                                                \
        LAUNCH((product_kernel<__VA_ARGS__>), 1, 128, SHARED_BYTES, 0, a, b, rows, f, out);   \
    }
    if (c.registers && c.b.down) RUN_PRODUCT(N, false, true, true, T)
    else if (c.registers) RUN_PRODUCT(N, false, false, true, T)
    else if (c.a.down && c.b.down) RUN_PRODUCT(N, true, true, false, T)
    else if (c.a.down) RUN_PRODUCT(N, true, false, false, T)
    else if (c.b.down) RUN_PRODUCT(N, false, true, false, T)
    else RUN_PRODUCT(N, false, false, false, T)
#undef RUN_PRODUCT
}

template <int N>
static void launch_any(const Case &c, const TensorMap &a, const TensorMap &b, const uint16_t *rows,
                       const Form &f, float *out)
{
    if (c.half) launch_product<N, __half>(c, a, b, rows, f, out);
    else launch_product<N, bf16>(c, a, b, rows, f, out);
}

static uint16_t half_bits(float x, bool half)
{
    return half ? static_cast<__half_raw>(__float2half(x)).x
                : static_cast<__nv_bfloat16_raw>(__float2bfloat16(x)).x;
}

static float from_half_bits(uint16_t bits, bool half)
{
    __nv_bfloat16_raw b;
    __half_raw h;
    b.x = h.x = bits;
    return half ? __half2float(h) : __bfloat162float(b);
}

/* Operands as numbers, a [a_rows][depth], b [b_rows][depth]; as the device has them. */
struct Numbers {
    std::vector<float> a, b, c; /* c: [64][n], what d begins with */
};

static std::vector<uint16_t> stored(const std::vector<float> &x, int rows, int depth, bool down, bool half)
{
    std::vector<uint16_t> y(x.size());
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < depth; k++)
            y[static_cast<size_t>(down ? k * rows + r : r * depth + k)] =
                half_bits(x[static_cast<size_t>(r * depth + k)], half);
    return y;
}

/* What the chip makes of the case; `change` may spoil the form before it runs. */
template <class Change> static std::vector<float> run_case(const Case &c, const Numbers &x, Change change)
{
    const int b_rows = c.b_rows ? c.b_rows : c.n;
    Form f = {};
    f.a = operand(c.a, c.a_rows, c.depth, c.row, c.a_shift, c.based);
    const int behind = c.registers ? 0 : (c.a_shift + f.a.boxes * f.a.box_bytes + 1023) / 1024 * 1024;
    f.b = operand(c.b, b_rows, c.depth, c.column, behind + c.b_shift, c.based);
    f.steps = c.depth / 16, f.depth = c.depth, f.keeps = c.keeps;
    if (c.lead >= 0) {
        if (!c.a.down && c.a.swizzle) f.a.lead = c.lead;
        if (!c.b.down && c.b.swizzle) f.b.lead = c.lead;
    }
    change(f);
    uint16_t *a = on_device(stored(x.a, c.a_rows, c.depth, c.a.down, c.half));
    uint16_t *b = on_device(stored(x.b, b_rows, c.depth, c.b.down, c.half));
    uint16_t *rows = on_device(stored(x.a, c.a_rows, c.depth, false, c.half));
    float *out = on_device(c.keeps ? x.c : std::vector<float>(static_cast<size_t>(ROWS * c.n), NAN));
    const auto map = [&](const uint16_t *p, Layout l, int many, const Operand &o) {
        return l.down ? map_of(p, { many, c.depth }, { o.width, c.depth }, l.swizzle)
                      : map_of(p, { c.depth, many }, { o.width, many }, l.swizzle);
    };
    const TensorMap ma = map(a, c.a, c.a_rows, f.a), mb = map(b, c.b, b_rows, f.b);
    switch (c.n) {
    case 32: launch_any<32>(c, ma, mb, rows, f, out); break;
    case 64: launch_any<64>(c, ma, mb, rows, f, out); break;
    case 96: launch_any<96>(c, ma, mb, rows, f, out); break;
    case 128: launch_any<128>(c, ma, mb, rows, f, out); break;
    case 192: launch_any<192>(c, ma, mb, rows, f, out); break;
    default: launch_any<256>(c, ma, mb, rows, f, out);
    }
    const std::vector<float> d = from_device(out, static_cast<size_t>(ROWS * c.n));
    for (void *p : { static_cast<void *>(a), static_cast<void *>(b), static_cast<void *>(rows),
                     static_cast<void *>(out) })
        need(cudaFree(p), "cudaFree");
    return d;
}

static Numbers small_numbers(const Case &c)
{
    Numbers x;
    const int b_rows = c.b_rows ? c.b_rows : c.n;
    for (int i = 0; i < c.a_rows * c.depth; i++) x.a.push_back(static_cast<float>(random_small(9)));
    for (int i = 0; i < b_rows * c.depth; i++) x.b.push_back(static_cast<float>(random_small(9)));
    for (int i = 0; i < ROWS * c.n; i++) x.c.push_back(static_cast<float>(random_small(99)));
    return x;
}

static float wanted(const Case &c, const Numbers &x, int row, int column)
{
    double sum = c.keeps ? x.c[static_cast<size_t>(row * c.n + column)] : 0;
    for (int k = 0; k < c.depth; k++)
        sum += static_cast<double>(x.a[static_cast<size_t>((c.row + row) * c.depth + k)]) *
               x.b[static_cast<size_t>((c.column + column) * c.depth + k)];
    return static_cast<float>(sum);
}

/* The first element that is wrong, or -1. */
static int first_wrong(const Case &c, const Numbers &x, const std::vector<float> &d, int *count)
{
    int first = -1;
    *count = 0;
    for (int i = 0; i < ROWS * c.n; i++) {
        if (d[static_cast<size_t>(i)] == wanted(c, x, i / c.n, i % c.n)) continue;
        if (first < 0) first = i;
        ++*count;
    }
    return first;
}

static std::string name_of(const Case &c)
{
    char text[200];
    snprintf(text, sizeof text,
             "A %s%d%s, B %s%d, N %d, depth %d, %s, rows from %d, columns from %d, tiles at +%d, +%d%s%s",
             c.registers ? "registers "
             : c.a.down  ? "down "
                         : "along ",
             c.registers ? 0 : c.a.swizzle, "", c.b.down ? "down " : "along ", c.b.swizzle, c.n, c.depth,
             c.half ? "f16" : "bf16", c.row, c.column, c.a_shift, c.b_shift, c.based ? ", base offset" : "",
             c.keeps ? ", keeps" : "");
    return text;
}

/* What else would be right, to say why it is not. */
static std::string explanation(const Case &c, const Numbers &x)
{
    static const char *const names[] = { "a: lead and stride exchanged",
                                         "b: lead and stride exchanged",
                                         "both exchanged",
                                         "modes as TMA counts them",
                                         "lead 0",
                                         "the other step" };
    std::string text;
    for (int e = 0; e < 6; e++) {
        const auto d = run_case(c, x, [e](Form &f) {
            if (e == 0 || e == 2) std::swap(f.a.lead, f.a.stride);
            if (e == 1 || e == 2) std::swap(f.b.lead, f.b.stride);
            for (Operand *o : { &f.a, &f.b }) {
                if (e == 3 && o->mode) o->mode = static_cast<Swizzle>(4 - o->mode);
                if (e == 4) o->lead = 0;
                if (e == 5)
                    for (int &at : o->at) at /= 2;
            }
        });
        int count;
        if (first_wrong(c, x, d, &count) < 0) text += std::string("; right with ") + names[e];
    }
    return text;
}

/* A case by small integers, whose sums every order makes the same. */
static void check(const Case &c)
{
    if (!next_case("%s", name_of(c).c_str())) return;
    const Numbers x = small_numbers(c);
    const auto d = run_case(c, x, [](Form &) {});
    int count;
    const int at = first_wrong(c, x, d, &count);
    if (at < 0) return;
    wrong("%d of %d; first row %d column %d: %g for %g%s", count, ROWS * c.n, at / c.n, at % c.n,
          static_cast<double>(d[static_cast<size_t>(at)]),
          static_cast<double>(wanted(c, x, at / c.n, at % c.n)), explanation(c, x).c_str());
}

static const int spans[] = { 128, 64, 32, 0 }, widths[] = { 32, 64, 96, 128, 192, 256 };

/* Every layout of a with every one of b; every N. */
static void products_of_layouts()
{
    for (int half = 0; half < 2; half++)
        for (int a = 0; a < 9; a++)
            for (int b = 0; b < 8; b++) {
                Case c;
                c.a = { a / 4 == 1, spans[a % 4] }, c.b = { b / 4 == 1, spans[b % 4] };
                c.registers = a == 8, c.half = half, c.n = half ? 64 : 128;
                check(c);
            }
    for (int n : widths)
        for (int form = 0; form < 6; form++)
            for (int span : spans) {
                Case c;
                c.registers = form >= 4, c.a = { form / 2 == 1, 128 }, c.b = { form % 2 == 1, span }, c.n = n;
                check(c);
                c.keeps = true;
                check(c);
            }
}

/* Depths beyond a row of the swizzle, parts of larger tiles, leads that nobody reads. */
static void advances()
{
    for (int depth : { 64, 128, 192 })
        for (int span : spans)
            for (int form = 0; form < 6; form++) {
                Case c;
                c.registers = form >= 4, c.a = { form / 2 == 1, span }, c.b = { form % 2 == 1, span };
                c.n = 96, c.depth = depth;
                check(c);
                c.a_rows = 128, c.row = 64; /* a second warpgroup's */
                if (!c.registers) check(c);
                c.a_rows = 64, c.row = 0, c.b_rows = 256, c.column = 64;
                check(c);
                if (!c.b.down) c.column = 8, check(c);
            }
    for (int lead : { 0, 16, 0x3fff0 })
        for (int span : { 128, 64, 32 }) {
            Case c;
            c.a.swizzle = c.b.swizzle = span, c.lead = lead, c.depth = 128;
            check(c);
        }
    /* tiles that do not begin where the swizzle's pattern does: where both sides take the address, nothing changes */
    for (int span : { 128, 64, 32 })
        for (int down = 0; down < 2; down++)
            for (int shift = 128; shift < 8 * span; shift *= 2) {
                Case c;
                c.a = { false, span }, c.b = { down == 1, span }, c.b_shift = shift;
                check(c);
                c.a_shift = shift;
                check(c);
            }
}

/* ---- stores that products read ---- */

/* Thread by thread b is written anew by plain stores; a and b: 64 x 64 along rows of 128 bytes. */
template <bool FENCED> __global__ void __launch_bounds__(128) fence_kernel(int rounds, int *bad)
{
#if HOPPER
    DYNAMIC_SHARED(unsigned char, memory);
    const int t = threadIdx.x, row = t / 2, half = t % 2 * 32;
    bf16 *a = reinterpret_cast<bf16 *>(memory), *b = a + 64 * 64;
    const auto place = [&](bf16 *to, int r, int k) {
        const uint32_t at = shared_address(to) + r * 128 + k * 2, moved = at ^ ((at >> 7 & 7) << 4);
        return to + (moved - shared_address(to)) / 2;
    };
    for (int k = half; k < half + 32; k++) *place(a, row, k) = __float2bfloat16(row == k ? 1.0f : 0.0f);
    int wrong_ones = 0;
    for (int i = 0; i < rounds; i++) {
        for (int k = half; k < half + 32; k++)
            *place(b, row, k) = __float2bfloat16(static_cast<float>((row * 7 + k * 3 + i) % 251));
        if (FENCED) proxy_fence();
        __syncthreads();
        float d[32];
        UNROLL
        for (int r = 0; r < 32; r++) d[r] = NAN;
        wgmma_begin(d);
        for (int s = 0; s < 4; s++)
            wgmma<false, false>(d, shared_matrix(a, 16, 1024, SWIZZLE_128) + 2 * s,
                                shared_matrix(b, 16, 1024, SWIZZLE_128) + 2 * s, s > 0, bf16());
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_end(d);
        UNROLL
        for (int r = 0; r < 32; r++) { /* a is the identity: d [i][j] is b [j][i] */
            const int at = static_cast<int>(place_of<64>(r));
            wrong_ones += d[r] != static_cast<float>((at % 64 * 7 + at / 64 * 3 + i) % 251);
        }
        __syncthreads();
    }
    if (wrong_ones) atomicAdd(bad, wrong_ones);
#endif
}

static const int fence_rounds = emulated ? 4 : 20000, ring_rounds = emulated ? 9 : 100;

static void fences()
{
    for (int fenced = 1; fenced >= 0; fenced--) {
        if (!next_case("stores, %s, then a product", fenced ? "a fence" : "no fence")) continue;
        int *bad = on_device(std::vector<int>(1));
        if (fenced) LAUNCH(fence_kernel<true>, 8, 128, 32768, 0, fence_rounds, bad);
        else LAUNCH(fence_kernel<false>, 8, 128, 32768, 0, fence_rounds, bad);
        const int count = from_device(bad, 1)[0];
        if (!fenced) printf("  told: without a fence %d elements were stale\n", count);
        else if (count) wrong("%d elements", count);
        if (emulated) return; /* it stops at the other */
    }
}

/* ---- edges of TMA ---- */

struct At {
    int c[4];
};

template <int RANK>
__global__ void __launch_bounds__(128)
    load_kernel(TENSOR_MAP(map), At at, int shift, int bytes, int room, uint16_t *out, uint32_t *address)
{
#if HOPPER
    DYNAMIC_SHARED(unsigned char, memory);
    SHARED(Barrier, full, [2]);
    uint16_t *tile = reinterpret_cast<uint16_t *>(memory + shift);
    for (int i = threadIdx.x; i < room / 2; i += 128) tile[i] = 0xdead;
    proxy_fence();
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        if (RANK != 3) barrier_expect(full, bytes); /* else behind the load, which is allowed as well */
        if constexpr (RANK == 2) tma_load_2d(tile, map, full, at.c[0], at.c[1]);
        if constexpr (RANK == 3) tma_load_3d(tile, map, full, at.c[0], at.c[1], at.c[2]);
        if constexpr (RANK == 4) tma_load_4d(tile, map, full, at.c[0], at.c[1], at.c[2], at.c[3]);
        if (RANK == 3) barrier_expect(full, bytes);
        *address = shared_address(tile);
    }
    barrier_wait(full, 0);
    for (int i = threadIdx.x; i < room / 2; i += 128) out[i] = tile[i];
#endif
}

static void edge(const std::vector<int> &dim, const std::vector<int> &box, const std::vector<int> &at,
                 int swizzle, int shift, bool told)
{
    const size_t rank = dim.size();
    std::string text;
    for (int x : at) text += " " + std::to_string(x);
    if (!next_case("TMA of %zu dimensions, swizzle %d, at%s, to +%d", rank, swizzle, text.c_str(), shift))
        return;
    progress->asks = told;
    int count = 1, total = 1;
    for (size_t i = 0; i < rank; i++) count *= dim[i], total *= box[i];
    std::vector<uint16_t> data(static_cast<size_t>(count));
    for (int i = 0; i < count; i++) data[static_cast<size_t>(i)] = static_cast<uint16_t>(i + 1);
    uint16_t *from = on_device(data), *out = on_device(std::vector<uint16_t>(static_cast<size_t>(total)));
    uint32_t *address = on_device(std::vector<uint32_t>(1));
    At c = {};
    for (size_t i = 0; i < rank; i++) c.c[i] = at[i];
    const TensorMap map = map_of(from, dim, box, swizzle);
    if (rank == 2)
        LAUNCH(load_kernel<2>, 1, 128, 40000, 0, map, c, shift, total * 2, total * 2, out, address);
    if (rank == 3)
        LAUNCH(load_kernel<3>, 1, 128, 40000, 0, map, c, shift, total * 2, total * 2, out, address);
    if (rank == 4)
        LAUNCH(load_kernel<4>, 1, 128, 40000, 0, map, c, shift, total * 2, total * 2, out, address);
    const auto got = from_device(out, static_cast<size_t>(total));
    const uint32_t base = from_device(address, 1)[0];
    int bad = 0, first = 0, want_first = 0;
    for (int i = 0; i < total; i++) {
        int rest = i, index = 0, scale = 1;
        bool inside = true;
        for (size_t j = 0; j < rank; j++) {
            const int x = at[j] + rest % box[j];
            inside = inside && x >= 0 && x < dim[j];
            index += x * scale, scale *= dim[j], rest /= box[j];
        }
        const int want = inside ? (index + 1) & 0xffff : 0;
        const uint32_t place =
            (swizzled(base + 2 * static_cast<uint32_t>(i), swizzle ? swizzle : 16) - base) / 2;
        if (place < static_cast<uint32_t>(total) && got[place] == want) continue;
        if (!bad++) first = i, want_first = want;
    }
    if (told) printf("  told: %s: %s\n", progress->name, bad ? "wrong" : "right");
    else if (bad)
        wrong("%d of %d; first element %d: %d for %d", bad, total, first, got[static_cast<size_t>(first)],
              want_first);
    for (void *p : { static_cast<void *>(from), static_cast<void *>(out), static_cast<void *>(address) })
        need(cudaFree(p), "cudaFree");
}

/* Rows of a box that are shorter than the swizzle's lie each in a row of the swizzle. */
static void narrow(int swizzle, int width)
{
    enum { ROWS_OF_BOX = 12 };
    if (!next_case("TMA of rows of %d elements, swizzle %d", width, swizzle)) return;
    const int room = ROWS_OF_BOX * swizzle;
    std::vector<uint16_t> data(80 * 20);
    for (size_t i = 0; i < data.size(); i++) data[i] = static_cast<uint16_t>(i + 1);
    uint16_t *from = on_device(data), *out = on_device(std::vector<uint16_t>(static_cast<size_t>(room / 2)));
    uint32_t *address = on_device(std::vector<uint32_t>(1));
    const TensorMap map = map_of(from, { 80, 20 }, { width, ROWS_OF_BOX }, swizzle);
    At at = {};
    LAUNCH(load_kernel<2>, 1, 128, 40000, 0, map, at, 0, ROWS_OF_BOX * width * 2, room, out, address);
    const auto got = from_device(out, static_cast<size_t>(room / 2));
    int bad = 0;
    for (int r = 0; r < ROWS_OF_BOX; r++)
        for (int x = 0; x < width; x++) {
            const uint32_t at_byte = swizzled(static_cast<uint32_t>(r * swizzle + 2 * x), swizzle);
            bad += got[at_byte / 2] != r * 80 + x + 1;
        }
    if (bad) wrong("%d of %d", bad, ROWS_OF_BOX * width);
}

static void edges()
{
    for (int swizzle : spans) {
        const int w = swizzle ? swizzle / 2 : 16;
        for (int x : { 0, 8, -8, 72, -200, 200 })
            for (int y : { 0, -5, 17, 100 }) edge({ 80, 20 }, { w, 12 }, { x, y }, swizzle, 0, false);
        for (int x : { 0, -16, 72 })
            for (int z : { 0, -1, 5, 9 }) {
                edge({ 80, 4, 7 }, { w, 1, 6 }, { x, 2, z }, swizzle, 0, false);
                edge({ 80, 4, 7, 3 }, { w, 1, 6, 1 }, { x, 3, z, 2 }, swizzle, 0, false);
                edge({ 80, 5, 7, 3 }, { w, 3, 2, 3 }, { x, 3, z, -1 }, swizzle, 0, false);
            }
        edge({ 80, 300 }, { w, 256 }, { 8, 20 }, swizzle, 0, false);
        for (int shift : { 128, 256, 512 }) edge({ 80, 20 }, { w, 12 }, { 8, 2 }, swizzle, shift, false);
    }
    edge({ 8, 4 }, { 8, 4 }, { 0, 0 }, 0, 0, false); /* strides of 16 bytes */
    narrow(128, 32);
    narrow(128, 48);
    narrow(64, 16);
    if (emulated) return; /* it stops at a coordinate within 16 bytes */
    for (int x : { 4, -4 }) edge({ 80, 20 }, { 64, 12 }, { x, 0 }, 128, 0, true);
}

/* ---- rings of stages, registers handed over, warpgroups in turns ---- */

enum { STAGES = 3, RING_DEPTH = 64, RING_N = 128, TURNS = 64 };

/* A producer and GROUPS warpgroups of 64 rows; b is theirs in common. out [GROUPS 64][RING_N]; turns: who came. */
template <int GROUPS, int GIVE, int TAKE>
__global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    ring_kernel(TENSOR_MAP(map_a), TENSOR_MAP(map_b), int rounds, float *out, int *turns)
{
#if HOPPER
    enum {
        A_BYTES = 64 * GROUPS * RING_DEPTH * 2,
        B_BYTES = RING_N * RING_DEPTH * 2,
        STAGE_BYTES = A_BYTES + B_BYTES
    };
    DYNAMIC_SHARED(unsigned char, memory);
    SHARED(Barrier, full, [STAGES]);
    SHARED(Barrier, empty, [STAGES]);
    SHARED(int, turn, [1]);
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(full + s, 1), barrier_init(empty + s, 4 * GROUPS);
        barriers_ready();
        turn[0] = 0;
    }
    __syncthreads();
    if (group < 0) {
        registers_give<GIVE>();
        if (threadIdx.x == 0)
            for (int i = 0; i < rounds; i++) {
                const int s = i % STAGES;
                unsigned char *stage = memory + s * STAGE_BYTES;
                barrier_wait(empty + s, (i / STAGES & 1) ^ 1);
                barrier_expect(full + s, STAGE_BYTES);
                tma_load_2d(stage, map_a, full + s, i * RING_DEPTH, 0);
                tma_load_2d(stage + A_BYTES, map_b, full + s, i * RING_DEPTH, 0);
            }
    } else {
        registers_take<TAKE>();
        float d[RING_N / 2];
        UNROLL
        for (int r = 0; r < RING_N / 2; r++) d[r] = 0;
        for (int i = 0; i < rounds; i++) {
            const int s = i % STAGES;
            unsigned char *stage = memory + s * STAGE_BYTES;
            const uint64_t a = shared_matrix(stage + group * 64 * 128, 16, 1024, SWIZZLE_128);
            const uint64_t b = shared_matrix(stage + A_BYTES, 16, 1024, SWIZZLE_128);
            barrier_wait(full + s, i / STAGES & 1);
            wgmma_begin(d);
            UNROLL
            for (int k = 0; k < RING_DEPTH / 16; k++)
                wgmma<false, false>(d, a + 2 * k, b + 2 * k, true, bf16());
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_end(d);
            if (threadIdx.x % 32 == 0)
                barrier_arrive(empty + s); /* a warp knows of itself alone that it has read */
        }
        UNROLL
        for (int r = 0; r < RING_N / 2; r++) out[group * 64 * RING_N + place_of<RING_N>(r)] = d[r];
        if (GROUPS == 1) return;
        /* in turns: the first is free, and each wakes the next */
        if (group == GROUPS - 1) named_arrive(1, 256);
        for (int i = 0; i < TURNS; i++) {
            named_sync(1 + group, 256);
            if (threadIdx.x % 128 == 5) turns[turn[0]] = group, turn[0]++;
            if (i < TURNS - 1 || group < GROUPS - 1) named_arrive(1 + (group + 1) % GROUPS, 256);
        }
    }
#endif
}

template <int GROUPS, int GIVE, int TAKE> static void ring(int rounds)
{
    if (!next_case("ring, %d consumers, registers %d and %d, %d rounds", GROUPS, GIVE, TAKE, rounds)) return;
    enum { SHARED_BYTES = STAGES * (64 * GROUPS + RING_N) * RING_DEPTH * 2 };
    const int depth = rounds * RING_DEPTH, rows = 64 * GROUPS;
    std::vector<float> a(static_cast<size_t>(rows * depth)), b(static_cast<size_t>(RING_N * depth));
    for (float &x : a) x = static_cast<float>(random_small(3));
    for (float &x : b) x = static_cast<float>(random_small(3));
    uint16_t *da = on_device(stored(a, rows, depth, false, false)),
             *db = on_device(stored(b, RING_N, depth, false, false));
    float *out = on_device(std::vector<float>(static_cast<size_t>(rows * RING_N), NAN));
    int *turns = on_device(std::vector<int>(GROUPS * TURNS, -1));
    const TensorMap ma = map_of(da, { depth, rows }, { 64, rows }, 128),
                    mb = map_of(db, { depth, RING_N }, { 64, RING_N }, 128);
    need(cudaFuncSetAttribute((ring_kernel<GROUPS, GIVE, TAKE>), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              SHARED_BYTES),
         "shared memory");
    LAUNCH((ring_kernel<GROUPS, GIVE, TAKE>), 1, 128 * (GROUPS + 1), SHARED_BYTES, 0, ma, mb, rounds, out,
           turns);
    const auto d = from_device(out, static_cast<size_t>(rows * RING_N));
    const auto order = from_device(turns, GROUPS * TURNS);
    int bad = 0, first = 0;
    for (int i = 0; i < rows * RING_N; i++) {
        double sum = 0;
        for (int k = 0; k < depth; k++)
            sum += static_cast<double>(a[static_cast<size_t>(i / RING_N * depth + k)]) *
                   b[static_cast<size_t>(i % RING_N * depth + k)];
        if (d[static_cast<size_t>(i)] != static_cast<float>(sum) && !bad++) first = i;
    }
    if (bad) wrong("%d elements, first row %d column %d", bad, first / RING_N, first % RING_N);
    for (int i = 0; GROUPS > 1 && i < GROUPS * TURNS; i++)
        if (order[static_cast<size_t>(i)] != i % GROUPS) {
            wrong("turn %d is warpgroup %d's", i, order[static_cast<size_t>(i)]);
            break;
        }
    for (void *p : { static_cast<void *>(da), static_cast<void *>(db), static_cast<void *>(out),
                     static_cast<void *>(turns) })
        need(cudaFree(p), "cudaFree");
}

static void rings()
{
    for (int rounds : { 1, 3, 4, 7, ring_rounds }) {
        ring<2, 24, 240>(rounds);
        ring<2, 40, 232>(rounds);
        ring<3, 32, 160>(rounds);
        ring<1, 56, 256>(rounds);
    }
}

/* ---- bits: the same product elsewhere ---- */

static Numbers normal_numbers(const Case &c, int spread)
{
    Numbers x = small_numbers(c);
    for (std::vector<float> *v : { &x.a, &x.b })
        for (float &y : *v)
            y = from_half_bits(half_bits(ldexpf(random_normal(), random_small(spread)), c.half), c.half);
    for (float &y : x.c) y = random_normal() * 4;
    return x;
}

static std::vector<float> by_mma(const Case &c, const Numbers &x)
{
    uint16_t *a = on_device(stored(x.a, c.a_rows, c.depth, false, c.half)),
             *b = on_device(stored(x.b, c.b_rows ? c.b_rows : c.n, c.depth, false, c.half));
    float *out = on_device(x.c);
    if (c.half) LAUNCH(mma_kernel<__half>, 1, 128, 0, 0, a, b, c.depth, c.n, c.keeps, out);
    else LAUNCH(mma_kernel<bf16>, 1, 128, 0, 0, a, b, c.depth, c.n, c.keeps, out);
    const auto d = from_device(out, static_cast<size_t>(ROWS * c.n));
    for (void *p : { static_cast<void *>(a), static_cast<void *>(b), static_cast<void *>(out) })
        need(cudaFree(p), "cudaFree");
    return d;
}

/* Do the first columns of two products have the same bits? */
static int differing(const std::vector<float> &a, int na, const std::vector<float> &b, int nb, int columns)
{
    int count = 0;
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < columns; j++)
            count += memcmp(&a[static_cast<size_t>(r * na + j)], &b[static_cast<size_t>(r * nb + j)], 4) != 0;
    return count;
}

static void bits()
{
    for (int half = 0; half < 2; half++)
        for (int depth : { 16, 64, 192 }) {
            Case base;
            base.b_rows = 256, base.n = 32, base.depth = depth, base.half = half;
            if (depth == 16) base.a.swizzle = base.b.swizzle = 32;
            const Numbers x = normal_numbers(base, 4);
            const auto plain = run_case(base, x, [](Form &) {});
            const auto same = [&](const Case &c, const Numbers &y) {
                if (!next_case("bits, %s", name_of(c).c_str())) return;
                const int count = differing(plain, 32, run_case(c, y, [](Form &) {}), c.n, 32);
                if (count) wrong("%d of %d differ from N 32's", count, ROWS * 32);
            };
            for (int n : widths)
                for (int form = 0; form < 6; form++) {
                    Case c = base;
                    c.n = n, c.registers = form >= 4, c.a.down = form / 2 == 1, c.b.down = form % 2 == 1;
                    if (depth == 16) c.a.swizzle = c.a.down ? 128 : 32, c.b.swizzle = c.b.down ? 128 : 32;
                    same(c, x);
                }
            { /* the same columns elsewhere in the tile, the same rows elsewhere */
                Case c = base;
                Numbers y = x;
                for (int j = 0; j < 256; j++)
                    for (int k = 0; k < depth; k++)
                        y.b[static_cast<size_t>(j * depth + k)] =
                            x.b[static_cast<size_t>((j + 192) % 256 * depth + k)];
                c.column = 64;
                same(c, y);
                for (int i = 0; i < 20; i++) same(base, x);
            }
        }
}

/* ---- sums: how an instruction rounds ---- */

/* kept: bits behind the leading one of the largest; group: products that are summed at a time; raw: exponents of
 * products are sums of their factors', not of what they came to; even: the sum is rounded, not cut. */
struct Model {
    int kept, group;
    bool raw, even;
};

static int exponent_of(double x) { return x == 0 ? -2000 : ilogb(x); }

static float model_sum(const Model &m, float c, const float *a, const float *b)
{
    double sum = c;
    for (int from = 0; from < 16; from += m.group) {
        int top = exponent_of(sum);
        for (int k = from; k < from + m.group; k++) {
            const double p = static_cast<double>(a[k]) * b[k];
            const int e = p == 0 ? -2000 : m.raw ? ilogb(a[k]) + ilogb(b[k]) : ilogb(p);
            if (e > top) top = e;
        }
        if (top == -2000) continue;
        __int128 total = static_cast<__int128>(trunc(ldexp(sum, m.kept - top)));
        for (int k = from; k < from + m.group; k++)
            total += static_cast<__int128>(trunc(ldexp(static_cast<double>(a[k]) * b[k], m.kept - top)));
        const double exact = ldexp(static_cast<double>(total), top - m.kept); /* fewer than 53 bits */
        float f = static_cast<float>(exact);
        if (!m.even && fabs(static_cast<double>(f)) > fabs(exact)) f = nextafterf(f, 0.0f);
        sum = f;
    }
    return static_cast<float>(sum);
}

/* The element by a model, over all of the depth. */
static float model_of(const Model &m, const Case &c, const Numbers &x, int i)
{
    float sum = c.keeps ? x.c[static_cast<size_t>(i)] : 0;
    for (int k = 0; k < c.depth; k += 16)
        sum = model_sum(m, sum, &x.a[static_cast<size_t>(i / c.n * c.depth + k)],
                        &x.b[static_cast<size_t>(i % c.n * c.depth + k)]);
    return sum;
}

static int fitting(const Model &m, const Case &c, const Numbers &x, const std::vector<float> &d, int *first)
{
    int right = 0;
    *first = -1;
    for (int i = 0; i < ROWS * c.n; i++) {
        const bool fits = model_of(m, c, x, i) == d[static_cast<size_t>(i)];
        right += fits;
        if (!fits && *first < 0) *first = i;
    }
    return right;
}

static void tell_fits(const Case &c, const Numbers &x, const std::vector<float> &d)
{
    struct Fit {
        Model m;
        int right;
    };
    std::vector<Fit> fits;
    for (int kept = 22; kept <= 28; kept++)
        for (int group : { 16, 8, 4 })
            for (int raw = 0; raw < 2; raw++)
                for (int even = 0; even < 2; even++) {
                    int first;
                    Fit f = { { kept, group, raw == 1, even == 1 }, 0 };
                    f.right = fitting(f.m, c, x, d, &first);
                    fits.push_back(f);
                }
    for (int shown = 0; shown < 3; shown++) {
        size_t best = 0;
        for (size_t i = 0; i < fits.size(); i++)
            if (fits[i].right > fits[best].right) best = i;
        const Model &m = fits[best].m;
        printf("  told: %d of %d by kept %d, groups of %d, exponents %s, %s\n", fits[best].right, ROWS * c.n,
               m.kept, m.group, m.raw ? "of factors" : "of products", m.even ? "rounded" : "cut");
        fits[best].right = -1;
    }
}

/* A step's 16 products and the sum so far, each cut off at 2^-25 of the largest, their sum cut off to fp32. */
static const Model hopper_model = { 25, 16, true, false };

static void sum_case(bool half, int depth, int spread)
{
    if (!next_case("sums, %s, depth %d, spread %d", half ? "f16" : "bf16", depth, spread)) return;
    Case c;
    c.n = depth == 16 ? 256 : 32, c.depth = depth, c.half = half, c.keeps = depth == 16;
    if (depth == 16) c.a.swizzle = c.b.swizzle = 32;
    const Numbers x = normal_numbers(c, spread);
    const auto w = run_case(c, x, [](Form &) {}), s = by_mma(c, x);
    int first;
    const int right = fitting(hopper_model, c, x, w, &first), differ = differing(w, c.n, s, c.n, c.n);
    if (differ) wrong("%d of %d are not mma.sync's", differ, ROWS * c.n);
    if (right == ROWS * c.n) return;
    const float is = w[static_cast<size_t>(first)], model = model_of(hopper_model, c, x, first);
    wrong("%d of %d fit the model; first %d: %a for %a", right, ROWS * c.n, first, static_cast<double>(is),
          static_cast<double>(model));
    if (depth != 16) return;
    tell_fits(c, x, w);
    for (int i = first, shown = 0; i < ROWS * c.n && shown < 12; i++) {
        if (model_of(hopper_model, c, x, i) == w[static_cast<size_t>(i)]) continue;
        shown++;
        printf("  sample %a = %a", static_cast<double>(w[static_cast<size_t>(i)]),
               static_cast<double>(x.c[static_cast<size_t>(i)]));
        for (int k = 0; k < 16; k++)
            printf(" + %a * %a", static_cast<double>(x.a[static_cast<size_t>(i / c.n * 16 + k)]),
                   static_cast<double>(x.b[static_cast<size_t>(i % c.n * 16 + k)]));
        printf("\n");
    }
}

static void sums()
{
    const char *rounding = getenv("EMU_ROUND");
    if (emulated && (!rounding || strcmp(rounding, "chip") != 0)) return;
    for (int half = 0; half < 2; half++)
        for (int spread : { 0, 3, 6 }) {
            sum_case(half, 16, spread);
            sum_case(half, 64, spread);
            sum_case(half, 192, spread);
        }
    sum_case(false, 16, 20);
    sum_case(false, 16, 60);
    sum_case(true, 16, 12); /* with subnormal numbers */
}

/* ---- the program ---- */

static const struct {
    const char *name;
    void (*run)();
} groups[] = { { "products", products_of_layouts },
               { "advances", advances },
               { "edges", edges },
               { "rings", rings },
               { "fences", fences },
               { "bits", bits },
               { "sums", sums } };

/* The GPU has the instructions, and this program was compiled for it. */
static bool has_hopper()
{
    cudaFuncAttributes a;
    int major = 0;
    return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
           major == 9 && cudaFuncGetAttributes(&a, ring_kernel<2, 24, 240>) == cudaSuccess &&
           a.binaryVersion == 90;
}

enum { NO_HOPPER = 77 };

static int in_process(void (*run)())
{
    int status;
    fflush(stdout);
    const pid_t pid = fork();
    if (pid < 0) return -1;
    if (pid == 0) {
        if (!has_hopper()) _exit(NO_HOPPER);
        run();
        exit(0);
    }
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
    return status;
}

/* A case has ended the process. */
static void died(int status)
{
    const bool hangs = WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM;
    progress->wrong += !progress->asks;
    printf("  %s: %s: %s\n", progress->asks ? "told" : "wrong", progress->name,
           hangs ? "it hangs" : "it dies");
    first_case = progress->at;
}

/* False: no such GPU. */
static bool run_group(const char *name, void (*run)())
{
    memset(progress, 0, sizeof *progress);
    first_case = 0;
    for (int deaths = 0; deaths <= DEATHS_MOST; deaths += !progress->asks) {
        progress->at = 0;
        const int status = in_process(run);
        if (WIFEXITED(status) && WEXITSTATUS(status) == NO_HOPPER) return false;
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) break;
        died(status);
    }
    printf("%-4s %-9s %4d cases, %d wrong\n", progress->wrong ? "FAIL" : "ok", name, progress->at,
           progress->wrong);
    return true;
}

#ifdef main /* one of several in a program: test/cuda/programs.c */
extern "C"
#endif
int main(int argc, char **argv)
{
    int passed = 0, failed = 0, skipped = 0;
    void *p = mmap(nullptr, sizeof *progress, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return 2;
    progress = static_cast<Progress *>(p);
    setvbuf(stdout, nullptr, _IOLBF, 0);
    for (const auto &g : groups) {
        bool chosen = argc < 2;
        for (int i = 1; i < argc; i++) chosen = chosen || !strcmp(argv[i], g.name);
        if (!chosen) continue;
        if (!run_group(g.name, g.run)) skipped++;
        else if (progress->wrong) failed++;
        else passed++;
    }
    if (skipped)
        puts("skipped: a GPU of compute capability 9.0 is needed, and object code for it (CUDA_ARCHS 90a)");
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed > 0;
}
