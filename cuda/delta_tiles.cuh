/*
 * The gated delta rule by tensor cores: what its two passes share. delta_tiles_fwd.cu says what M is.
 */
#ifndef MEGATRAIN_CUDA_DELTA_TILES_CUH
#define MEGATRAIN_CUDA_DELTA_TILES_CUH

#include "delta.cuh"
#include "device/scan_room.h"
#include "scan_tiles.cuh"

typedef WindowGates<DELTA_WINDOW> DeltaGates;

constexpr int DELTA_TILE = DELTA_WINDOW * TILE;
constexpr int STEPS = DELTA_WINDOW / 16, FRAGMENT = 4 * WARP; /* words */
constexpr int SOLVED = 2 * STEPS * STEPS * FRAGMENT;          /* words of M, as fragments of its halves */
static_assert(DELTA_WINDOW == TILE, "a window's pairs are a tile");

/* A warp's 16 rows and 32 columns of a product. */
struct HalfSums {
    float x[TILE_CHUNKS / 2][4];
};

struct HalfPlace {
    int m, column0, row, column; /* row, column: of x[0][0] */
    __device__ __forceinline__ HalfPlace()
    {
        const int thread = in_place(threadIdx.x), warp = thread / WARP;
        m = warp % STEPS * 16, column0 = warp / STEPS * 32;
        row = m + thread % WARP / 4, column = column0 + thread % 4 * 2;
    }
};

/* s += left times 32 columns of a tile, depth 16 k .. 16 k + 15, down its rows or along them. */
template <bool DOWN>
__device__ __forceinline__ void half_multiply(HalfSums &s, const uint32_t left[4], const bf16 *tile, int k, int column0)
{
    UNROLL
    for (int n = 0; n < 2; n++) {
        uint32_t right[4];
        tile_right<DOWN>(right, tile, column0 + n * 16, k);
        mma_16816(s.x[2 * n], left, right, bf16());
        mma_16816(s.x[2 * n + 1], left, right + 2, bf16());
    }
}

/* The same, both of fp32, but for what the low halves are to each other. */
template <bool DOWN>
__device__ __forceinline__ void half_multiply(HalfSums &s, const SplitLeft &left, const bf16 *high, const bf16 *low,
                                              int k, int column0)
{
    half_multiply<DOWN>(s, left.high, high, k, column0);
    half_multiply<DOWN>(s, left.low, high, k, column0);
    half_multiply<DOWN>(s, left.high, low, k, column0);
}

/* Sums, each row times its factor, as two tiles. */
__device__ __forceinline__ void half_put(bf16 *high, bf16 *low, const HalfSums &s, const float factor[2])
{
    const HalfPlace p;
    UNROLL
    for (int n = 0; n < TILE_CHUNKS / 2; n++)
        UNROLL
        for (int i = 0; i < 2; i++) {
            const int at = tile_offset(p.row + 8 * i, p.column0 / TILE_CHUNK + n) + p.column % TILE_CHUNK;
            uint32_t h, l;
            split_pair(h, l, factor[i] * s.x[n][2 * i], factor[i] * s.x[n][2 * i + 1]);
            *reinterpret_cast<uint32_t *>(high + at) = h, *reinterpret_cast<uint32_t *>(low + at) = l;
        }
}

/* Rows of keys or queries, in pieces of 64 columns. */
__device__ __forceinline__ void copy_keys(bf16 *tile, GroupedRows<const bf16> x, const DeltaCall<bf16> &c,
                                          const Window &w, int key_head)
{
    for (int at = 0; at < c.D; at += TILE)
        tile_copy(tile + at * DELTA_WINDOW, x, w.row * c.K + key_head, c.K, at, w.n, c.D, DELTA_WINDOW);
}

/* ---- M ---- */

constexpr int SOLVE_PITCH = DELTA_WINDOW + 1;
constexpr int SOLVE_BYTES = 2 * DELTA_TILE * 2 + 2 * DELTA_WINDOW * SOLVE_PITCH * 4;
constexpr int SOLVE_BACK_BYTES = SOLVE_BYTES + DELTA_WINDOW * SOLVE_PITCH * 4;

/* M of a range of windows. */
struct DeltaSolved {
    uint32_t *words; /* [windows of the range, B, V][matrices][SOLVED] */
    int64_t first, count;
    int matrices;

    __device__ __forceinline__ uint32_t *at(const DeltaCall<bf16> &c, int64_t w, int64_t item, int matrix, int part,
                                            int m, int k) const
    {
        const int64_t slot = ((w - first) * c.rows.B * c.V + item) * matrices + matrix;
        return words + slot * SOLVED + ((part * STEPS + m) * STEPS + k) * FRAGMENT + threadIdx.x % WARP * 4;
    }
    __device__ __forceinline__ void load(SplitLeft &left, const DeltaCall<bf16> &c, int64_t w, int64_t item, int matrix,
                                         int m, int k) const
    {
        const uint4 high = *reinterpret_cast<const uint4 *>(at(c, w, item, matrix, 0, m, k));
        const uint4 low = *reinterpret_cast<const uint4 *>(at(c, w, item, matrix, 1, m, k));
        left.high[0] = high.x, left.high[1] = high.y, left.high[2] = high.z, left.high[3] = high.w;
        left.low[0] = low.x, left.low[1] = low.y, left.low[2] = low.z, left.low[3] = low.w;
    }
};

/* (k[i] k[j]) decay[i][j], negative, of j < i; else 0. */
__device__ __forceinline__ void solve_pairs(float *low, const bf16 *k, const DeltaGates &gates, int D)
{
    const HalfPlace p;
    HalfSums s = {};
    for (int d = 0; d < D; d += 16) {
        const bf16 *tile = k + d / TILE * DELTA_TILE;
        uint32_t left[4], right[4];
        tile_left<false>(left, tile, p.m, d % TILE / 16);
        UNROLL
        for (int n = 0; n < 2; n++) {
            tile_right<false>(right, tile, p.column0 + n * 16, d % TILE / 16);
            mma_16816(s.x[2 * n], left, right, bf16());
            mma_16816(s.x[2 * n + 1], left, right + 2, bf16());
        }
    }
    UNROLL
    for (int e = 0; e < 16; e++) {
        const int i = p.row + e % 4 / 2 * 8, j = p.column + e / 4 * 8 + e % 2;
        low[i * SOLVE_PITCH + j] = j < i ? -(s.x[e / 4][e % 4] * gates.decay(i, j)) : 0.0f;
    }
}

/* Columns of the inverse of 1 - low beta, or with BACK of 1 - beta low; a thread has a column. */
template <bool BACK>
__device__ __forceinline__ void solve_columns(float *m, const float *low, const float *beta, int j)
{
    for (int i = 0; i < DELTA_WINDOW; i++) {
        float sum = i == j ? 1.0f : 0.0f;
        for (int n = j; n < i; n++)
            sum = fmaf(low[i * SOLVE_PITCH + n], (BACK ? beta[i] : beta[n]) * m[n * SOLVE_PITCH + j], sum);
        m[i * SOLVE_PITCH + j] = sum;
    }
}

/* m, or its transpose, as fragments of its halves. */
template <bool TURNED>
__device__ __forceinline__ void solve_store(const DeltaSolved &s, const DeltaCall<bf16> &c, const float *m, int64_t w,
                                            int64_t item, int matrix)
{
    const int lane = threadIdx.x % WARP;
    for (int t = threadIdx.x / WARP; t < STEPS * STEPS; t += SCAN_THREADS / WARP) {
        const int row = t / STEPS * 16 + lane / 4, column = t % STEPS * 16 + lane % 4 * 2;
        uint32_t high[4], low[4];
        UNROLL
        for (int e = 0; e < 4; e++) {
            const int i = row + e % 2 * 8, j = column + e / 2 * 8;
            const float *x = TURNED ? m + j * SOLVE_PITCH + i : m + i * SOLVE_PITCH + j;
            split_pair(high[e], low[e], x[0], x[TURNED ? SOLVE_PITCH : 1]);
        }
        UNROLL
        for (int part = 0; part < 2; part++) {
            const uint32_t *x = part ? low : high;
            __stcg(reinterpret_cast<int4 *>(s.at(c, w, item, matrix, part, t / STEPS, t % STEPS)),
                   make_int4(static_cast<int>(x[0]), static_cast<int>(x[1]), static_cast<int>(x[2]),
                             static_cast<int>(x[3])));
        }
    }
}

/* BACK: of the second matrix the transpose besides, by the next 64 threads. */
template <bool BACK>
__global__ void __launch_bounds__(SCAN_THREADS, 2) delta_solve_kernel(DeltaCall<bf16> c, DeltaSolved s)
{
    DYNAMIC_SHARED(bf16, k);
    SHARED(DeltaGates, gates, [1]);
    float *low = reinterpret_cast<float *>(k + 2 * DELTA_TILE), *m = low + DELTA_WINDOW * SOLVE_PITCH;
    float *back = m + DELTA_WINDOW * SOLVE_PITCH;
    const int64_t item = blockIdx.x % (c.rows.B * c.V), index = s.first + blockIdx.x / (c.rows.B * c.V);
    const int head = static_cast<int>(item % c.V), column = threadIdx.x % DELTA_WINDOW;
    const Window w = window_of(c.rows, item / c.V, index);
    copy_keys(k, c.k, c, w, head / c.group);
    cp_async_commit();
    load_gates(*gates, low, c.g, c.beta, c.rows, w, head);
    cp_async_wait<0>();
    __syncthreads();
    solve_pairs(low, k, *gates, c.D);
    __syncthreads();
    if (threadIdx.x < DELTA_WINDOW) solve_columns<false>(m, low, gates->step, column);
    else if (BACK && threadIdx.x < 2 * DELTA_WINDOW) solve_columns<true>(back, low, gates->step, column);
    __syncthreads();
    solve_store<false>(s, c, m, index, item, 0);
    if (BACK) solve_store<true>(s, c, back, index, item, 1);
}

/* ---- chains of states ---- */

/* A block's tiles: keys and queries in pieces of 64 columns, the state in halves, rows of errors or of what is written
 * in halves, values. */
struct ChainTiles {
    bf16 *k, *q, *state, *state_low, *rows, *rows_low, *v;
};

__device__ __forceinline__ ChainTiles chain_tiles(bf16 *at)
{
    return { at,
             at + 2 * DELTA_TILE,
             at + 4 * DELTA_TILE,
             at + 6 * DELTA_TILE,
             at + 8 * DELTA_TILE,
             at + 9 * DELTA_TILE,
             at + 10 * DELTA_TILE };
}

/* A state, or its gradient, kept, and as tiles. Data of x: or NULL. */
__device__ __forceinline__ void chain_keep(const TileSums &state, Rows<float> x, const ChainTiles &t,
                                           const DeltaCall<bf16> &c, int64_t row, int column0)
{
    const int m = threadIdx.x / WARP * 16;
    const TilePlace p(m);
    UNROLL
    for (int n = 0; n < TILE_CHUNKS; n++)
        UNROLL
        for (int i = 0; i < 2; i++) {
            const int at = tile_offset(p.row + 8 * i, n) + p.column, column = column0 + n * 8 + p.column;
            const float first = state.x[n][2 * i], second = state.x[n][2 * i + 1];
            uint32_t high, low;
            split_pair(high, low, first, second);
            *reinterpret_cast<uint32_t *>(t.state + at) = high, *reinterpret_cast<uint32_t *>(t.state_low + at) = low;
            if (x.data && p.row + 8 * i < c.D && column < c.E)
                *reinterpret_cast<float2 *>(x.at(row + p.row + 8 * i) + column) = make_float2(first, second);
        }
}

/* y = rows times the state. */
__device__ __forceinline__ void chain_read(HalfSums &y, const ChainTiles &t, const bf16 *rows, int D)
{
    const HalfPlace p;
    UNROLL_BY(2)
    for (int d = 0; d < D; d += 16) {
        uint32_t left[4];
        tile_left<false>(left, rows + d / TILE * DELTA_TILE, p.m, d % TILE / 16);
        half_multiply<true>(y, left, t.state, d / 16, p.column0);
        half_multiply<true>(y, left, t.state_low, d / 16, p.column0);
    }
}

/* v - from y as tiles of rows. */
__device__ __forceinline__ void chain_errors(HalfSums &y, const ChainTiles &t, const DeltaGates &gates)
{
    const HalfPlace p;
    const float one[2] = { 1, 1 };
    UNROLL
    for (int n = 0; n < TILE_CHUNKS / 2; n++)
        UNROLL
        for (int i = 0; i < 2; i++) {
            const int at = tile_offset(p.row + 8 * i, p.column0 / TILE_CHUNK + n) + p.column % TILE_CHUNK;
            const __nv_bfloat162 v = *reinterpret_cast<const __nv_bfloat162 *>(t.v + at);
            const float from = gates.from[p.row + 8 * i];
            y.x[n][2 * i] = fmaf(-from, y.x[n][2 * i], to_float(v.x));
            y.x[n][2 * i + 1] = fmaf(-from, y.x[n][2 * i + 1], to_float(v.y));
        }
    half_put(t.rows, t.rows_low, y, one);
}

/* M times the rows; with BACK the second matrix, which is an upper triangle. */
template <bool BACK>
__device__ __forceinline__ void chain_solve(HalfSums &sum, const DeltaSolved &s, const ChainTiles &t,
                                            const DeltaCall<bf16> &c, int64_t w, int64_t item)
{
    const HalfPlace p;
    sum = {};
    UNROLL
    for (int k = 0; k < STEPS; k++) {
        SplitLeft left;
        if (BACK ? k * 16 < p.m : k * 16 > p.m) continue;
        s.load(left, c, w, item, BACK, p.m / 16, k);
        half_multiply<true>(sum, left, t.rows, t.rows_low, k, p.column0);
    }
}

/* A warp's part of rows of x, through the tile of values, which has been read. */
__device__ __forceinline__ void chain_store(const HalfSums &o, GroupedRows<bf16> x, const ChainTiles &t,
                                            const DeltaCall<bf16> &c, const Window &w, int head, int column0)
{
    const HalfPlace p;
    const int l = threadIdx.x % WARP, chunk0 = p.column0 / TILE_CHUNK;
    UNROLL
    for (int n = 0; n < TILE_CHUNKS / 2; n++)
        UNROLL
        for (int i = 0; i < 2; i++)
            *reinterpret_cast<uint32_t *>(t.v + tile_offset(p.row + 8 * i, chunk0 + n) + p.column % TILE_CHUNK) =
                pack_pair(o.x[n][2 * i], o.x[n][2 * i + 1], bf16());
    __syncwarp();
    for (int i = l; i < 16 * TILE_CHUNKS / 2; i += WARP) {
        const int row = p.m + i / (TILE_CHUNKS / 2), chunk = chunk0 + i % (TILE_CHUNKS / 2);
        const int column = column0 + chunk * TILE_CHUNK;
        if (row < w.n && column < c.E)
            store16_global(x.at((w.row + row) * c.V + head) + column, load16(t.v + tile_offset(row, chunk)));
    }
}

/* Columns [column0, column0 + 64) of a state, of a warp's rows. */
__device__ __forceinline__ void load_columns(TileSums &s, Rows<const float> x, int64_t row, int D, int E, int column0)
{
    const TilePlace p(threadIdx.x / WARP * 16);
    UNROLL
    for (int n = 0; n < TILE_CHUNKS; n++)
        UNROLL
        for (int e = 0; e < 4; e++) {
            const int at = p.row + e / 2 * 8, column = column0 + n * 8 + p.column + e % 2;
            s.x[n][e] = x.data && at < D && column < E ? x.at(row + at)[column] : 0.0f;
        }
}

__device__ __forceinline__ void store_columns(Rows<float> x, const TileSums &s, int64_t row, int D, int E, int column0)
{
    const TilePlace p(threadIdx.x / WARP * 16);
    UNROLL
    for (int n = 0; n < TILE_CHUNKS; n++)
        UNROLL
        for (int e = 0; e < 4; e++) {
            const int at = p.row + e / 2 * 8, column = column0 + n * 8 + p.column + e % 2;
            if (x.data && at < D && column < E) x.at(row + at)[column] = s.x[n][e];
        }
}

#endif
