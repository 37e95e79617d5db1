/*
 * Codes of 8 bits and their factors: fp8_amax, fp8_cast, fp8_cast_runs, fp8_values (device/ops.def). The products of
 * codes: fp8_product.c, fp8_grouped.cu. Codes and factors are those of the CPU to the last bit (base/fp8.h); where
 * factors lie: fp8.h.
 *
 * Mapping   amax        as maps (PackGrid), but blocks go on to further rows, so that few atomics meet; the largest of
 *                       numbers' bits, which is the same in any order
 *           lines       codes as x lies, factors of 128 or 32 columns of a row, or one: a thread has 16 neighbours of 2
 *                       rows; 8 or 2 lanes find their block's largest by shuffles
 *           squares     codes as x lies, factors of 128 x 128: a block's threads hold the square in registers
 *           turned      codes of x transposed: a tile of 128 rows and 64 columns (128 where factors are of squares)
 *                       passes through shared memory. A thread has 16 rows of two neighbouring columns, 8 lanes the
 *                       tile's whole columns, whose codes are 128 bytes in a row of y. Packs of 16 bytes lie at their
 *                       number xor (row / 16), so that neither side of the turn meets in a bank
 *           runs        as turned; a block finds the run that its 128 columns of y are of by halving the runs
 *           both        a tile of 128 x 128: read as by squares, from whose registers go the codes as x lies and the
 *                       tile, then as by turned
 * Traffic   x once, 2 bytes an element (amax alone 2 as well), codes 1 for each form, factors 4 bytes in 128 elements
 *           or more. 65,536 x 768 at 4.3 TB/s: amax 23 us, a cast 35 us, both 47 us. From 8.9 on an instruction
 *           converts two numbers.
 * Needs     rows of x on 16 bytes, widths that are multiples of 16; turned: rows as well. bf16.
 */
#include <cuda_fp8.h>

#include "kernel.cuh"
extern "C" {
#include "fp8.h"
}

constexpr int FP8_THREADS = 256, FP8_RUN = 16, FP8_LANES = FP8_BLOCK / FP8_RUN;
constexpr uint32_t FLOAT_INFINITE = 0x7F800000, FLOAT_MOST = 0x7F7FFFFF, HIGH_SIZE = 0x7FFF0000;
constexpr uint32_t FLOAT_NAN = 0x7FC00000, FLOAT_LEAST_POWER = 0x400000; /* 2^-127, e8m0's smallest */

/* ---- numbers ---- */

/* Bits of the largest magnitude of 8 numbers, as a float. */
__device__ __forceinline__ uint32_t pack_most(const Pack<bf16> &p)
{
    const uint32_t *word = reinterpret_cast<const uint32_t *>(&p);
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) most = max(most, max(word[i] & HIGH_SIZE, word[i] << 16 & HIGH_SIZE));
    return most;
}

__device__ __forceinline__ float low_half(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_half(uint32_t word) { return __uint_as_float(word & 0xFFFF0000); }

struct Factor8 {
    float scale, back;
};

/* fp8_factor of base/fp8.h. */
template <DType FORMAT> __device__ __forceinline__ Factor8 factor_of(uint32_t amax, bool power_of_two)
{
    constexpr float MOST = FORMAT == E4M3 ? E4M3_MOST : E5M2_MOST;
    if (amax == 0 || amax >= FLOAT_INFINITE) return Factor8{ 1, 1 };
    uint32_t bits = __float_as_uint(__fdiv_rn(MOST, __uint_as_float(amax)));
    if (bits >= FLOAT_INFINITE) bits = FLOAT_MOST;
    if (power_of_two) bits &= 0xFF800000;
    return Factor8{ __uint_as_float(bits), __fdiv_rn(1, __uint_as_float(bits)) };
}

/* fp8_factor_e8m0 of base/fp8.h. */
template <DType FORMAT> __device__ __forceinline__ Factor8 factor_e8m0(uint32_t amax)
{
    constexpr float MOST = FORMAT == E4M3 ? E4M3_MOST : E5M2_MOST;
    if (amax > FLOAT_INFINITE) return Factor8{ __uint_as_float(FLOAT_NAN), __uint_as_float(FLOAT_NAN) };
    const uint32_t bits = __float_as_uint(__fdiv_rn(__uint_as_float(amax), MOST)), mantissa = bits & 0x7FFFFF;
    uint32_t exponent = min(bits >> 23, 0xFEu);
    const bool above = exponent ? mantissa > 0 : mantissa > FLOAT_LEAST_POWER;
    if (exponent != 0xFE && above) exponent++;
    return Factor8{ __uint_as_float(exponent == 0xFE ? FLOAT_LEAST_POWER : (254 - exponent) << 23),
                    __uint_as_float(exponent == 0 ? FLOAT_LEAST_POWER : exponent << 23) };
}

/* The byte of a factor of e8m0, and back. */
__device__ __forceinline__ uint8_t exponent_of(float factor)
{
    return static_cast<uint8_t>(__float_as_uint(factor) >> 23);
}

__device__ __forceinline__ float power_of(uint8_t e)
{
    return __uint_as_float(e == 0 ? FLOAT_LEAST_POWER : e == 0xFF ? FLOAT_NAN : static_cast<uint32_t>(e) << 23);
}

template <DType FORMAT> __device__ __forceinline__ uint32_t codes_of(float low, float high, float scale)
{
    return __nv_cvt_float2_to_fp8x2(make_float2(__fmul_rn(low, scale), __fmul_rn(high, scale)), __NV_SATFINITE,
                                    FORMAT == E4M3 ? __NV_E4M3 : __NV_E5M2);
}

/* 16 codes of what neighbouring words hold; a NaN's is the same on every chip. */
template <DType FORMAT>
__device__ __forceinline__ Pack<uint8_t> codes_of_packs(const Pack<bf16> &a, const Pack<bf16> &b, float scale)
{
    Pack<uint8_t> out;
    uint32_t *to = reinterpret_cast<uint32_t *>(&out);
    const uint32_t *x[2] = { reinterpret_cast<const uint32_t *>(&a), reinterpret_cast<const uint32_t *>(&b) };
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t first = x[i / 2][i % 2 * 2], second = x[i / 2][i % 2 * 2 + 1];
        to[i] = codes_of<FORMAT>(low_half(first), high_half(first), scale) |
                codes_of<FORMAT>(low_half(second), high_half(second), scale) << 16;
    }
    return out;
}

/* How many neighbours have a block's numbers of a row. KIND: FP8_ROW_BLOCKS also where the tensor has one factor. */
template <Fp8Kind KIND> constexpr int LANES = KIND == FP8_TILES ? FP8_E8M0_BLOCK / FP8_RUN : FP8_LANES;

/* The largest that they have; all FP8_LANES neighbours are there. */
template <Fp8Kind KIND> __device__ __forceinline__ uint32_t lanes_most(uint32_t most)
{
    const unsigned lane = (threadIdx.y * blockDim.x + threadIdx.x) % WARP;
    const unsigned mask = 0xFFu << lane / FP8_LANES * FP8_LANES;
    for (int d = LANES<KIND> / 2; d > 0; d /= 2) most = max(most, __shfl_xor_sync(mask, most, d));
    return most;
}

/* ---- the largest ---- */

__global__ void __launch_bounds__(PACK_THREADS)
    fp8_amax_kernel(Rows<const bf16> x, unsigned long long *amax, PackGrid g, int64_t steps)
{
    SHARED(uint32_t, part, [PACK_THREADS]);
    const int64_t rows = rows_in_use(g.rows);
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    uint32_t most = 0;
    for (int64_t step = blockIdx.x; step < steps; step += gridDim.x) {
        Pack<bf16> p[PACK_UNROLL];
        bool used[PACK_UNROLL];
#pragma unroll
        for (int u = 0; u < PACK_UNROLL; u++) {
            const int64_t row = (step * PACK_UNROLL + u) * blockDim.y + threadIdx.y;
            const int64_t column = (blockIdx.y * static_cast<int64_t>(blockDim.x) + threadIdx.x) * Pack<bf16>::COUNT;
            used[u] = row < rows && column < g.width;
            if (used[u]) p[u] = load16(x.at(row) + column);
        }
#pragma unroll
        for (int u = 0; u < PACK_UNROLL; u++)
            if (used[u]) most = max(most, pack_most(p[u]));
    }
    part[thread] = most;
    __syncthreads();
    if (thread >= WARP) return;
    for (int t = thread + WARP; t < threads; t += WARP) most = max(most, part[t]);
    if (most) atomicMax(amax, static_cast<unsigned long long>(most));
}

/* ---- codes ---- */

struct CastArgs {
    Rows<const bf16> x;
    Rows<uint8_t> y, turned; /* turned [columns, rows] */
    float *factors, *turned_factors;
    const int64_t *amax; /* of the whole tensor; NULL: blocks have their own */
    int64_t rows, columns; /* of x */
    Fp8Kind kind;
    bool power_of_two;
    RowCount used; /* of x, which lines alone ask for */
};

__device__ __forceinline__ uint32_t whole_most(const CastArgs &c) { return static_cast<uint32_t>(*c.amax); }

template <DType FORMAT, Fp8Kind KIND> __device__ __forceinline__ Factor8 factor_for(const CastArgs &c, uint32_t most)
{
    return KIND == FP8_TILES ? factor_e8m0<FORMAT>(most) : factor_of<FORMAT>(most, c.power_of_two);
}

template <Fp8Kind KIND> __device__ __forceinline__ void store_factor(float *factors, int64_t place, float factor)
{
    if (KIND == FP8_TILES) reinterpret_cast<uint8_t *>(factors)[place] = exponent_of(factor);
    else factors[place] = factor;
}

template <DType FORMAT, Fp8Kind KIND>
__global__ void __launch_bounds__(PACK_THREADS) fp8_lines_kernel(CastArgs c)
{
    const int64_t part = blockIdx.y * static_cast<int64_t>(blockDim.x) + threadIdx.x, column = part * FP8_RUN;
    const int64_t rows = rows_in_use(c.used);
    Pack<bf16> p[PACK_UNROLL][2] = {};
    int64_t row[PACK_UNROLL];
    const bool first = blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0 && threadIdx.y == 0;
#pragma unroll
    for (int u = 0; u < PACK_UNROLL; u++) {
        row[u] = (blockIdx.x * static_cast<int64_t>(PACK_UNROLL) + u) * blockDim.y + threadIdx.y;
        if (row[u] >= rows || column >= c.columns) continue;
        p[u][0] = load16(c.x.at(row[u]) + column);
        p[u][1] = load16(c.x.at(row[u]) + column + Pack<bf16>::COUNT);
    }
#pragma unroll
    for (int u = 0; u < PACK_UNROLL; u++) {
        const uint32_t most = c.amax ? whole_most(c) : lanes_most<KIND>(max(pack_most(p[u][0]), pack_most(p[u][1])));
        const Factor8 f = factor_for<FORMAT, KIND>(c, most);
        if (row[u] >= rows || column >= c.columns) continue;
        store16_global(c.y.at(row[u]) + column, codes_of_packs<FORMAT>(p[u][0], p[u][1], f.scale));
        if (c.amax ? first && u == 0 : part % LANES<KIND> == 0)
            store_factor<KIND>(c.factors, fp8_factor_place(c.kind, c.rows, c.columns, row[u], part / LANES<KIND>),
                               f.back);
    }
}

/* Over all threads of a block of FP8_THREADS. */
__device__ __forceinline__ uint32_t block_most(uint32_t most, uint32_t *part)
{
    most = __reduce_max_sync(ALL_LANES, most);
    if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = most;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < FP8_THREADS / WARP; w++) most = max(most, part[w]);
    return most;
}

/* A thread's share of a square of 128 x 128: runs of 16 in some of its rows; zeros beyond the end. */
constexpr int SQUARE_ROWS = FP8_THREADS / FP8_LANES, SQUARE_TIMES = FP8_BLOCK / SQUARE_ROWS;
struct SquareRuns {
    Pack<bf16> p[SQUARE_TIMES][2];
    int64_t row, column; /* of the first */
};

__device__ __forceinline__ SquareRuns load_square(const CastArgs &c)
{
    SquareRuns s = {};
    s.row = blockIdx.y * static_cast<int64_t>(FP8_BLOCK) + threadIdx.x / FP8_LANES;
    s.column = blockIdx.x * static_cast<int64_t>(FP8_BLOCK) + threadIdx.x % FP8_LANES * FP8_RUN;
#pragma unroll
    for (int i = 0; i < SQUARE_TIMES; i++) {
        if (s.row + i * SQUARE_ROWS >= c.rows || s.column >= c.columns) continue;
        const bf16 *x = c.x.at(s.row + i * SQUARE_ROWS) + s.column;
        s.p[i][0] = load16(x), s.p[i][1] = load16(x + Pack<bf16>::COUNT);
    }
    return s;
}

__device__ __forceinline__ uint32_t run_most(const SquareRuns &s, int i)
{
    return max(pack_most(s.p[i][0]), pack_most(s.p[i][1]));
}

__device__ __forceinline__ uint32_t runs_most(const SquareRuns &s)
{
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < SQUARE_TIMES; i++) most = max(most, run_most(s, i));
    return most;
}

/* most: of the square. */
template <DType FORMAT, Fp8Kind KIND>
__device__ __forceinline__ void store_square(const CastArgs &c, const SquareRuns &s, uint32_t most)
{
    constexpr bool SQUARES = KIND == FP8_SQUARES;
    const int64_t block = SQUARES ? blockIdx.x : s.column / (FP8_RUN * LANES<KIND>);
    const bool first = SQUARES ? threadIdx.x == 0 : blockIdx.x + blockIdx.y + threadIdx.x == 0;
#pragma unroll
    for (int i = 0; i < SQUARE_TIMES; i++) {
        const int64_t row = s.row + i * SQUARE_ROWS;
        if (!SQUARES) most = c.amax ? whole_most(c) : lanes_most<KIND>(run_most(s, i));
        const Factor8 f = factor_for<FORMAT, KIND>(c, most);
        if (row >= c.rows || s.column >= c.columns) continue;
        store16_global(c.y.at(row) + s.column, codes_of_packs<FORMAT>(s.p[i][0], s.p[i][1], f.scale));
        if (SQUARES || c.amax ? first && i == 0 : threadIdx.x % LANES<KIND> == 0)
            store_factor<KIND>(c.factors,
                               fp8_factor_place(c.kind, c.rows, c.columns, SQUARES ? blockIdx.y : row, block), f.back);
    }
}

template <DType FORMAT>
__global__ void __launch_bounds__(FP8_THREADS) fp8_squares_kernel(CastArgs c)
{
    SHARED(uint32_t, part, [FP8_THREADS / WARP]);
    const SquareRuns s = load_square(c);
    store_square<FORMAT, FP8_SQUARES>(c, s, block_most(runs_most(s), part));
}

/* 16 rows of two neighbouring columns in a tile. */
struct TwoColumns {
    uint32_t word[FP8_RUN];
};

template <DType FORMAT, bool HIGH>
__device__ __forceinline__ Pack<uint8_t> codes_of_column(const TwoColumns &x, float scale)
{
    Pack<uint8_t> out;
    uint32_t *to = reinterpret_cast<uint32_t *>(&out);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float v[4];
        for (int k = 0; k < 4; k++) v[k] = HIGH ? high_half(x.word[4 * i + k]) : low_half(x.word[4 * i + k]);
        to[i] = codes_of<FORMAT>(v[0], v[1], scale) | codes_of<FORMAT>(v[2], v[3], scale) << 16;
    }
    return out;
}

/* Place of a pack of a tile's row. */
__device__ __forceinline__ int pack_place(int row, int pack) { return pack ^ row / FP8_RUN; }

/* From a tile of 128 rows and COLUMNS columns of x, whose largest is `most`. */
template <DType FORMAT, Fp8Kind KIND, int COLUMNS>
__device__ __forceinline__ void store_turned(const CastArgs &c,
                                             const Pack<bf16> (*tile)[COLUMNS / Pack<bf16>::COUNT], uint32_t most)
{
    constexpr bool SQUARES = KIND == FP8_SQUARES;
    constexpr int PAIRS = FP8_THREADS / FP8_LANES;
    const int64_t column0 = blockIdx.x * static_cast<int64_t>(COLUMNS);
    const int run = threadIdx.x % FP8_LANES; /* its 16 rows */
    const int64_t row = blockIdx.y * static_cast<int64_t>(FP8_BLOCK) + run * FP8_RUN;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2 / PAIRS; i++) {
        const int pair = i * PAIRS + threadIdx.x / FP8_LANES;
        const int64_t column = column0 + 2 * pair;
        TwoColumns x;
        uint32_t low = 0, high = 0;
#pragma unroll
        for (int k = 0; k < FP8_RUN; k++) {
            const int line = run * FP8_RUN + k;
            x.word[k] = reinterpret_cast<const uint32_t *>(&tile[line][pack_place(line, pair / 4)])[pair % 4];
            low = max(low, x.word[k] << 16 & HIGH_SIZE), high = max(high, x.word[k] & HIGH_SIZE);
        }
        if (SQUARES) low = high = most;
        else if (c.amax) low = high = whole_most(c);
        else low = lanes_most<KIND>(low), high = lanes_most<KIND>(high);
        const Factor8 f = factor_for<FORMAT, KIND>(c, low), g = factor_for<FORMAT, KIND>(c, high);
        if (row >= c.rows || column >= c.columns) continue;
        store16_global(c.turned.at(column) + row, codes_of_column<FORMAT, false>(x, f.scale));
        store16_global(c.turned.at(column + 1) + row, codes_of_column<FORMAT, true>(x, g.scale));
        if (SQUARES || c.amax) { /* one of the tile, or of all tiles */
            if (run == 0 && pair == 0 && (SQUARES || blockIdx.x + blockIdx.y == 0))
                c.turned_factors[fp8_factor_place(c.kind, c.columns, c.rows, blockIdx.x, blockIdx.y)] = f.back;
        } else if (run % LANES<KIND> == 0) {
            const int64_t block = row / (FP8_RUN * LANES<KIND>);
            const int64_t at = fp8_factor_place(c.kind, c.columns, c.rows, column, block);
            const int64_t next = fp8_factor_place(c.kind, c.columns, c.rows, column + 1, block);
            store_factor<KIND>(c.turned_factors, at, f.back), store_factor<KIND>(c.turned_factors, next, g.back);
        }
    }
}

template <DType FORMAT, Fp8Kind KIND>
__global__ void __launch_bounds__(FP8_THREADS) fp8_turned_kernel(CastArgs c)
{
    constexpr int COLUMNS = KIND == FP8_SQUARES ? FP8_BLOCK : FP8_BLOCK / 2;
    constexpr int PACKS = COLUMNS / Pack<bf16>::COUNT, LOADS = FP8_BLOCK * PACKS / FP8_THREADS;
    SHARED(Pack<bf16>, tile, [FP8_BLOCK][PACKS]);
    SHARED(uint32_t, part, [FP8_THREADS / WARP]);
    const int64_t row0 = blockIdx.y * static_cast<int64_t>(FP8_BLOCK);
    const int64_t column0 = blockIdx.x * static_cast<int64_t>(COLUMNS);
    Pack<bf16> p[LOADS] = {};
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int at = i * FP8_THREADS + threadIdx.x;
        const int64_t row = row0 + at / PACKS, column = column0 + at % PACKS * Pack<bf16>::COUNT;
        if (row < c.rows && column < c.columns) p[i] = load16(c.x.at(row) + column);
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int at = i * FP8_THREADS + threadIdx.x, row = at / PACKS;
        store16(&tile[row][pack_place(row, at % PACKS)].v[0], p[i]);
        most = max(most, pack_most(p[i]));
    }
    most = block_most(most, part); /* a barrier in any case */
    store_turned<FORMAT, KIND, COLUMNS>(c, tile, most);
}

template <DType FORMAT, Fp8Kind KIND>
__global__ void __launch_bounds__(FP8_THREADS) fp8_both_kernel(CastArgs c)
{
    constexpr int PACKS = FP8_BLOCK / Pack<bf16>::COUNT;
    SHARED(Pack<bf16>, tile, [FP8_BLOCK][PACKS]);
    SHARED(uint32_t, part, [FP8_THREADS / WARP]);
    const SquareRuns s = load_square(c);
#pragma unroll
    for (int i = 0; i < SQUARE_TIMES; i++) {
        const int row = threadIdx.x / FP8_LANES + i * SQUARE_ROWS, pack = threadIdx.x % FP8_LANES * 2;
        for (int k = 0; k < 2; k++) store16(&tile[row][pack_place(row, pack + k)].v[0], s.p[i][k]);
    }
    const uint32_t most = block_most(runs_most(s), part); /* a barrier in any case */
    store_square<FORMAT, KIND>(c, s, most);
    store_turned<FORMAT, KIND, FP8_BLOCK>(c, tile, most);
}

/* ---- rows in runs ---- */

__device__ __forceinline__ int64_t run_block(const int64_t *offset, int64_t run)
{
    return offset[run] / FP8_BLOCK + run;
}

__global__ void __launch_bounds__(FP8_THREADS) fp8_begins_kernel(int64_t *begin, const int64_t *offset, int64_t count)
{
    const int64_t i = blockIdx.x * static_cast<int64_t>(FP8_THREADS) + threadIdx.x;
    if (i < count) begin[i] = FP8_BLOCK * run_block(offset, i);
}

/* c.turned has c.rows columns: 128 of them, all of one run, to a block. */
__global__ void __launch_bounds__(FP8_THREADS) fp8_runs_kernel(CastArgs c, const int64_t *offset, int64_t runs)
{
    constexpr int COLUMNS = FP8_BLOCK / 2, PACKS = COLUMNS / Pack<bf16>::COUNT, LOADS = FP8_BLOCK * PACKS / FP8_THREADS;
    SHARED(Pack<bf16>, tile, [FP8_BLOCK][PACKS]);
    int64_t run = 0, beyond = runs + 1; /* the last run that begins here or before */
    while (beyond - run > 1) {
        const int64_t middle = (run + beyond) / 2;
        if (run_block(offset, middle) <= blockIdx.y) run = middle;
        else beyond = middle;
    }
    if (run == runs) return;
    const int64_t first = offset[run] + (blockIdx.y - run_block(offset, run)) * FP8_BLOCK, end = offset[run + 1];
    const int64_t column0 = blockIdx.x * static_cast<int64_t>(COLUMNS);
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int at = i * FP8_THREADS + threadIdx.x, row = at / PACKS;
        const int64_t column = column0 + at % PACKS * Pack<bf16>::COUNT;
        Pack<bf16> p = {};
        if (first + row < end && column < c.columns) p = load16(c.x.at(first + row) + column);
        store16(&tile[row][pack_place(row, at % PACKS)].v[0], p);
    }
    __syncthreads();
    store_turned<E4M3, FP8_ROW_BLOCKS, COLUMNS>(c, tile, 0);
}

/* ---- numbers again ---- */

/* Numbers of y that a thread takes together. */
constexpr int VALUES = 4;

template <DType FORMAT> __device__ __forceinline__ float value_of(uint32_t code)
{
    const __half_raw h = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code),
                                                 FORMAT == E4M3 ? __NV_E4M3 : __NV_E5M2);
    return __half2float(__half(h));
}

template <DType FORMAT>
__global__ void __launch_bounds__(FP8_THREADS)
    fp8_values_kernel(Rows<float> y, Rows<const uint8_t> x, const float *factors, Fp8Kind kind, int64_t rows,
                      int64_t columns)
{
    const int64_t row = blockIdx.x;
    for (int64_t i = threadIdx.x * VALUES; i < columns; i += FP8_THREADS * VALUES) {
        const uint32_t codes = *reinterpret_cast<const uint32_t *>(x.at(row) + i);
        const int64_t row_block = kind == FP8_SQUARES ? row / FP8_BLOCK : row;
        const int64_t block = i / (kind == FP8_TILES ? FP8_E8M0_BLOCK : FP8_BLOCK);
        const int64_t place = fp8_factor_place(kind, rows, columns, row_block, block);
        const uint8_t *bytes = reinterpret_cast<const uint8_t *>(factors);
        const float factor = kind == FP8_TILES ? power_of(bytes[place]) : factors[place];
        Pack<float> p;
        for (int k = 0; k < VALUES; k++) p.v[k] = value_of<FORMAT>(codes >> 8 * k & 255) * factor;
        store16_global(y.at(row) + i, p);
    }
}

/* ---- launchers ---- */

/* Refuses forms that no configuration asks for. */
static Err check_bits(OpId op, bool mixed, DType codes)
{
    if (!mixed && codes != E2M1) return ERR_OK;
    return err_set(ERR_SHAPE, "%s on cuda: %s", op_info(op)->name, E2M1_NOT_ON_GPUS);
}

static Err check_codes(OpId op, Tensor x, Tensor codes)
{
    const Tensor f = *codes.scale;
    const int64_t blocks = ceil_div(codes.dim[1], FP8_BLOCK);
    const Fp8Kind kind = fp8_kind(codes);
    TRY(check_bits(op, false, codes.dtype));
    if (x.rows || codes.rows) return err_set(ERR_SHAPE, "%s on cuda takes no row counts", op_info(op)->name);
    if (codes.dim[1] % FP8_RUN || codes.ld % FP8_RUN || reinterpret_cast<uintptr_t>(codes.data) % FP8_RUN)
        return err_set(ERR_SHAPE, "%s on cuda: rows of codes are no multiples of 16 bytes", op_info(op)->name);
    if (kind == FP8_OTHER_BLOCKS)
        return err_set(ERR_SHAPE, "%s on cuda: factors are of 32 or 128 columns, of 128 x 128, or one",
                       op_info(op)->name);
    if (kind == FP8_SQUARES ? f.ld != fp8_squares_ld(blocks) : kind == FP8_ROW_BLOCKS && f.ld != blocks)
        return err_set(ERR_SHAPE, "%s on cuda: rows of factors lie %lld apart", op_info(op)->name,
                       static_cast<long long>(f.ld));
    return ERR_OK;
}

static Err check_numbers(OpId op, Tensor x)
{
    if (x.dtype != BF16) return err_set(ERR_SHAPE, "%s on cuda: x is not bf16", op_info(op)->name);
    if (x.rows) return err_set(ERR_SHAPE, "%s on cuda takes no row counts", op_info(op)->name);
    if (rows_aligned(x)) return ERR_OK;
    return err_set(ERR_SHAPE, "%s on cuda: rows of x are not on 16 bytes", op_info(op)->name);
}

extern "C" Err cuda_fp8_amax(Stream *s, const fp8_amax_args *a)
{
    enum { BLOCKS = 8 }; /* a multiprocessor */
    TRY(check_bits(OP_fp8_amax, a->mixed, a->x.dtype));
    TRY(check_numbers(OP_fp8_amax, a->x));
    PackGrid g = pack_grid(row_count(a->x, a->x), 1, a->x.dim[1], Pack<bf16>::COUNT);
    const int64_t steps = g.grid.x, most = static_cast<int64_t>(s->dev->threads) * BLOCKS;
    g.grid.x = static_cast<unsigned>(steps < most ? steps : most);
    if (a->fresh) TRY(device_zero(s, a->amax.data, sizeof(int64_t)));
    LAUNCH(fp8_amax_kernel, g.grid, g.block, 0, cuda_stream(s), rows_of<const bf16>(a->x),
           data_of<unsigned long long>(a->amax), g, steps);
    return ERR_OK;
}

/* The threads of a block lie across so many runs of 16 that no factor's block is cut. */
template <DType FORMAT, Fp8Kind KIND> static void launch_lines(Stream *s, const CastArgs &c)
{
    const int64_t runs = ceil_div(c.columns, FP8_BLOCK) * FP8_LANES, across = ceil_div(runs, PACK_THREADS);
    const int64_t x = ceil_div(ceil_div(runs, across), FP8_LANES) * FP8_LANES, y = PACK_THREADS / x;
    const dim3 grid(grid_blocks(ceil_div(c.rows, y * PACK_UNROLL)), static_cast<unsigned>(across));
    const dim3 block(static_cast<unsigned>(x), static_cast<unsigned>(y));
    LAUNCH((fp8_lines_kernel<FORMAT, KIND>), grid, block, 0, cuda_stream(s), c);
}

template <DType FORMAT, Fp8Kind KIND> static void launch_cast(Stream *s, const CastArgs &c, bool straight, bool turned)
{
    constexpr bool SQUARES = KIND == FP8_SQUARES;
    const int width = SQUARES || straight ? FP8_BLOCK : FP8_BLOCK / 2;
    const dim3 grid(grid_blocks(ceil_div(c.columns, width)), grid_blocks(ceil_div(c.rows, FP8_BLOCK)));
    if (straight && turned) LAUNCH((fp8_both_kernel<FORMAT, KIND>), grid, FP8_THREADS, 0, cuda_stream(s), c);
    else if (straight && SQUARES) LAUNCH(fp8_squares_kernel<FORMAT>, grid, FP8_THREADS, 0, cuda_stream(s), c);
    else if (straight) launch_lines<FORMAT, KIND>(s, c);
    else LAUNCH((fp8_turned_kernel<FORMAT, KIND>), grid, FP8_THREADS, 0, cuda_stream(s), c);
}

template <DType FORMAT> static void launch_kind(Stream *s, const CastArgs &c, bool straight, bool turned)
{
    if (c.kind == FP8_SQUARES) launch_cast<FORMAT, FP8_SQUARES>(s, c, straight, turned);
    else if (c.kind == FP8_TILES) launch_cast<FORMAT, FP8_TILES>(s, c, straight, turned);
    else launch_cast<FORMAT, FP8_ROW_BLOCKS>(s, c, straight, turned);
}

/* Kind of the factors, by the arguments of a call. */
static Fp8Kind kind_of(const fp8_cast_args *a)
{
    if (a->amax.data) return FP8_WHOLE;
    if (a->blocks.scale == FP8_SCALE_E8M0) return FP8_TILES;
    return a->blocks.rows == FP8_BLOCK ? FP8_SQUARES : FP8_ROW_BLOCKS;
}

static Err check_output(const fp8_cast_args *a, Tensor x, Tensor y)
{
    TRY(check_codes(OP_fp8_cast, x, y));
    if (fp8_kind(y) == kind_of(a) || (fp8_kind(y) != FP8_WHOLE && y.dim[0] == 1)) return ERR_OK;
    return err_set(ERR_SHAPE, "fp8_cast on cuda: factors are not of amax, or of the blocks that are asked for");
}

/* Zeros where codes end within a tile of factors. */
static Err clear_tiles(Stream *s, Tensor codes)
{
    if (!codes.data || (codes.dim[0] % FP8_TILE_ROWS == 0 && codes.dim[1] % (FP8_TILE_BLOCKS * FP8_E8M0_BLOCK) == 0))
        return ERR_OK;
    return device_zero(s, codes.scale->data, static_cast<size_t>(fp8_tiles_bytes(codes.dim[0], codes.dim[1])));
}

extern "C" Err cuda_fp8_cast(Stream *s, const fp8_cast_args *a)
{
    const RowCount used = row_count(a->x, a->x);
    const Tensor turned = a->turned;
    Tensor x = a->x, y = a->y;
    if (y.data && !turned.data && kind_of(a) == FP8_ROW_BLOCKS) x.rows = y.rows = nullptr; /* lines */
    const Tensor one = y.data ? y : turned;
    TRY(check_bits(OP_fp8_cast, a->mixed || a->turned_amax.data, one.dtype));
    TRY(check_numbers(OP_fp8_cast, x));
    if (!one.data || (y.data && turned.data && y.dtype != turned.dtype))
        return err_set(ERR_SHAPE, "fp8_cast on cuda: nothing is to be written, or codes of two formats");
    if (y.data) TRY(check_output(a, x, y));
    if (turned.data) TRY(check_output(a, x, turned));
    if (kind_of(a) == FP8_TILES) TRY(clear_tiles(s, y));
    if (kind_of(a) == FP8_TILES) TRY(clear_tiles(s, turned));
    const CastArgs c = { rows_of<const bf16>(x),
                         rows_of<uint8_t>(y),
                         rows_of<uint8_t>(turned),
                         y.data ? data_of<float>(*y.scale) : nullptr,
                         turned.data ? data_of<float>(*turned.scale) : nullptr,
                         data_of<int64_t>(a->amax),
                         x.dim[0],
                         x.dim[1],
                         kind_of(a),
                         a->blocks.scale == FP8_SCALE_POWER_OF_TWO,
                         used };
    if (one.dtype == E4M3) launch_kind<E4M3>(s, c, y.data, turned.data);
    else launch_kind<E5M2>(s, c, y.data, turned.data);
    return ERR_OK;
}

extern "C" Err cuda_fp8_cast_runs(Stream *s, const fp8_cast_runs_args *a)
{
    const Tensor x = a->x, y = a->y;
    const int64_t *offset = data_of<const int64_t>(a->offset), count = a->offset.dim[0];
    TRY(check_numbers(OP_fp8_cast_runs, x));
    TRY(check_codes(OP_fp8_cast_runs, x, y));
    if (a->blocks.scale == FP8_SCALE_E8M0)
        return err_set(ERR_CONFIG, "fp8_cast_runs on cuda: experts of mxfp8 are not built");
    if (y.dtype != E4M3 || a->blocks.rows != 1 || y.dim[1] % FP8_BLOCK || fp8_kind(y) != FP8_ROW_BLOCKS ||
        y.dim[1] < FP8_BLOCK * (x.dim[0] / FP8_BLOCK + count - 1))
        return err_set(ERR_SHAPE, "fp8_cast_runs on cuda: y is not e4m3 in blocks of 128, or has not all columns");
    const CastArgs c = { rows_of<const bf16>(x),
                         {},
                         rows_of<uint8_t>(y),
                         nullptr,
                         data_of<float>(*y.scale),
                         nullptr,
                         y.dim[1],
                         x.dim[1],
                         FP8_ROW_BLOCKS,
                         a->blocks.scale == FP8_SCALE_POWER_OF_TWO,
                         {} };
    const dim3 grid(grid_blocks(ceil_div(x.dim[1], FP8_BLOCK / 2)), grid_blocks(y.dim[1] / FP8_BLOCK));
    LAUNCH(fp8_begins_kernel, grid_blocks(ceil_div(count, FP8_THREADS)), FP8_THREADS, 0, cuda_stream(s),
           data_of<int64_t>(a->begin), offset, count);
    LAUNCH(fp8_runs_kernel, grid, FP8_THREADS, 0, cuda_stream(s), c, offset, count - 1);
    return ERR_OK;
}

extern "C" Err cuda_fp8_values(Stream *s, const fp8_values_args *a)
{
    const Rows<float> y = rows_of<float>(a->y);
    const Rows<const uint8_t> x = rows_of<const uint8_t>(a->x);
    const unsigned rows = grid_blocks(a->x.dim[0]);
    TRY(check_codes(OP_fp8_values, a->y, a->x));
    if (!rows_aligned(a->y)) return err_set(ERR_SHAPE, "fp8_values on cuda: rows of y are not on 16 bytes");
    if (a->x.dtype == E4M3)
        LAUNCH(fp8_values_kernel<E4M3>, rows, FP8_THREADS, 0, cuda_stream(s), y, x, data_of<float>(*a->x.scale),
               fp8_kind(a->x), a->x.dim[0], a->x.dim[1]);
    else
        LAUNCH(fp8_values_kernel<E5M2>, rows, FP8_THREADS, 0, cuda_stream(s), y, x, data_of<float>(*a->x.scale),
               fp8_kind(a->x), a->x.dim[0], a->x.dim[1]);
    return ERR_OK;
}
