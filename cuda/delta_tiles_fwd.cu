/*
 * The gated delta rule by tensor cores, forward. What is computed stands in src/cpu/delta.h; operands of products:
 * scan_tiles.cuh.
 *
 * Of a window, with the state S before it: error = M (v - from (K S)), write = beta error. M is the inverse of the unit
 * lower triangle of (k k) decay beta, and does not need S.
 *
 * Mapping   solve: a block a window of a value head: M, by substitution, fp32; a thread has a column. Chain: a block
 *           has 64 columns of a value head's state, in registers, and goes from window to window. A warp has 16 rows
 *           and 32 columns of a window's products, and 16 rows of the state's. Both kernels go over as many windows at
 *           once as the workspace has room for; the state waits there between them.
 * Work      of a window, 64 columns and D 128: 4.5 MFLOP, executed 9.6, as what is fp32 takes two products, with M and
 *           rows that were written three, and both halves of the columns make products of q and k.
 * Traffic   q, k and M once for 64 columns; v, o and states once: 104 KiB for the above.
 * Needs     bf16; D up to 128, D and E multiples of 8; rows at multiples of 16 bytes; workspace for states and M of a
 *           window. All else has delta_fwd.cu.
 * Source    Yang, Kautz, Hatamizadeh 2024 (Gated Delta Networks).
 */
#include "delta.cuh"
#include "device/scan_room.h"
#include "scan_tiles.cuh"

typedef WindowGates<DELTA_WINDOW> DeltaGates;

constexpr int DELTA_TILE = DELTA_WINDOW * TILE;
constexpr int STEPS = DELTA_WINDOW / 16, FRAGMENT = 4 * WARP; /* words */
constexpr int SOLVED = 2 * STEPS * STEPS * FRAGMENT;          /* words of M, as fragments of its halves */
static_assert(DELTA_WINDOW == TILE, "a window's pairs are a tile");

/* One range of windows. */
struct DeltaRange {
    DeltaFwd<bf16> f;
    uint32_t *solved; /* [windows of the range, B, V][SOLVED] */
    Rows<const float> begin;
    Rows<float> end; /* data: or NULL */
    int64_t first, count;

    __device__ __forceinline__ uint32_t *fragment(int64_t w, int64_t head, int part, int m, int k) const
    {
        const int64_t at = (w - first) * f.c.rows.B * f.c.V + head;
        return solved + at * SOLVED + ((part * STEPS + m) * STEPS + k) * FRAGMENT + threadIdx.x % WARP * 4;
    }
};

/* A warp's 16 rows and 32 columns of a product. */
struct HalfSums {
    float x[TILE_CHUNKS / 2][4];
};

struct HalfPlace {
    int m, column0, row, column; /* row, column: of x[0][0] */
    __device__ __forceinline__ HalfPlace()
        : m(static_cast<int>(threadIdx.x) / WARP % STEPS * 16),
          column0(static_cast<int>(threadIdx.x) / WARP / STEPS * 32),
          row(m + static_cast<int>(threadIdx.x) % WARP / 4), column(column0 + static_cast<int>(threadIdx.x) % 4 * 2)
    {
    }
};

/* s += left times a tile's rows 16 k .. 16 k + 15, 32 columns of them. */
__device__ __forceinline__ void half_multiply(HalfSums &s, const uint32_t left[4], const bf16 *tile, int k, int column0)
{
    UNROLL
    for (int n = 0; n < 2; n++) {
        uint32_t right[4];
        tile_right<true>(right, tile, column0 + n * 16, k);
        mma_16816(s.x[2 * n], left, right, bf16());
        mma_16816(s.x[2 * n + 1], left, right + 2, bf16());
    }
}

/* The same, both of fp32, but for what the low halves are to each other. */
__device__ __forceinline__ void half_multiply(HalfSums &s, const SplitLeft &left, const bf16 *high, const bf16 *low,
                                              int k, int column0)
{
    half_multiply(s, left.high, high, k, column0);
    half_multiply(s, left.low, high, k, column0);
    half_multiply(s, left.high, low, k, column0);
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
                                          const Window &w, int head)
{
    for (int at = 0; at < c.D; at += TILE)
        tile_copy(tile + at * DELTA_WINDOW, x, w.row * c.K + head / c.group, c.K, at, w.n, c.D, DELTA_WINDOW);
}

/* ---- M ---- */

constexpr int SOLVE_PITCH = DELTA_WINDOW + 1;
constexpr int SOLVE_BYTES = 2 * DELTA_TILE * 2 + 2 * DELTA_WINDOW * SOLVE_PITCH * 4;

/* (k[i] k[j]) decay[i][j] beta[j], negative, of j < i; else 0. */
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
        low[i * SOLVE_PITCH + j] = j < i ? -(s.x[e / 4][e % 4] * gates.decay(i, j)) * gates.step[j] : 0.0f;
    }
}

__global__ void __launch_bounds__(SCAN_THREADS, 2) delta_solve_kernel(DeltaRange r)
{
    const DeltaCall<bf16> &c = r.f.c;
    DYNAMIC_SHARED(bf16, k);
    SHARED(DeltaGates, gates, [1]);
    float *low = reinterpret_cast<float *>(k + 2 * DELTA_TILE), *m = low + DELTA_WINDOW * SOLVE_PITCH;
    const int64_t item = blockIdx.x % (c.rows.B * c.V), index = r.first + blockIdx.x / (c.rows.B * c.V);
    const int head = static_cast<int>(item % c.V), warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Window w = window_of(c.rows, item / c.V, index);
    copy_keys(k, c.k, c, w, head);
    cp_async_commit();
    load_gates(*gates, low, c.g, c.beta, c.rows, w, head);
    cp_async_wait<0>();
    __syncthreads();
    solve_pairs(low, k, *gates, c.D);
    __syncthreads();
    for (int j = threadIdx.x, i = 0; j < DELTA_WINDOW && i < DELTA_WINDOW; i++) {
        float sum = i == j ? 1.0f : 0.0f;
        for (int n = j; n < i; n++) sum = fmaf(low[i * SOLVE_PITCH + n], m[n * SOLVE_PITCH + j], sum);
        m[i * SOLVE_PITCH + j] = sum;
    }
    __syncthreads();
    for (int t = warp; t < STEPS * STEPS; t += SCAN_THREADS / WARP) {
        const int row = t / STEPS * 16 + lane / 4, column = t % STEPS * 16 + lane % 4 * 2;
        uint32_t high[4], low_half[4];
        UNROLL
        for (int e = 0; e < 4; e++) {
            const float *x = m + (row + e % 2 * 8) * SOLVE_PITCH + column + e / 2 * 8;
            split_pair(high[e], low_half[e], x[0], x[1]);
        }
        __stcg(reinterpret_cast<uint4 *>(r.fragment(index, item, 0, t / STEPS, t % STEPS)),
               make_uint4(high[0], high[1], high[2], high[3]));
        __stcg(reinterpret_cast<uint4 *>(r.fragment(index, item, 1, t / STEPS, t % STEPS)),
               make_uint4(low_half[0], low_half[1], low_half[2], low_half[3]));
    }
}

/* ---- the chain ---- */

/* A block's tiles: keys and queries in pieces of 64 columns, the state in halves, rows of errors or of what is written
 * in halves, values. */
struct ChainTiles {
    bf16 *k, *q, *state, *state_low, *rows, *rows_low, *v;
};

constexpr int CHAIN_BYTES = 11 * DELTA_TILE * 2;

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

/* The state before a window: kept, and as tiles. */
__device__ __forceinline__ void chain_keep(const TileSums &state, const DeltaRange &r, const ChainTiles &t,
                                           int64_t row, int column0)
{
    const int m = threadIdx.x / WARP * 16;
    const TilePlace p(m);
    const DeltaCall<bf16> &c = r.f.c;
    UNROLL
    for (int n = 0; n < TILE_CHUNKS; n++)
        UNROLL
        for (int i = 0; i < 2; i++) {
            const int at = tile_offset(p.row + 8 * i, n) + p.column, column = column0 + n * 8 + p.column;
            const float x = state.x[n][2 * i], y = state.x[n][2 * i + 1];
            uint32_t high, low;
            split_pair(high, low, x, y);
            *reinterpret_cast<uint32_t *>(t.state + at) = high, *reinterpret_cast<uint32_t *>(t.state_low + at) = low;
            if (r.f.states.data && p.row + 8 * i < c.D && column < c.E)
                *reinterpret_cast<float2 *>(r.f.states.at(row + p.row + 8 * i) + column) = make_float2(x, y);
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
        half_multiply(y, left, t.state, d / 16, p.column0);
        half_multiply(y, left, t.state_low, d / 16, p.column0);
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

/* M times the rows: errors. */
__device__ __forceinline__ void chain_solve(HalfSums &error, const DeltaRange &r, const ChainTiles &t, int64_t w,
                                            int64_t item)
{
    const HalfPlace p;
    error = {};
    UNROLL
    for (int k = 0; k < STEPS; k++) {
        SplitLeft left;
        if (k * 16 > p.m) continue;
        const uint4 high = *reinterpret_cast<const uint4 *>(r.fragment(w, item, 0, p.m / 16, k));
        const uint4 low = *reinterpret_cast<const uint4 *>(r.fragment(w, item, 1, p.m / 16, k));
        left.high[0] = high.x, left.high[1] = high.y, left.high[2] = high.z, left.high[3] = high.w;
        left.low[0] = low.x, left.low[1] = low.y, left.low[2] = low.z, left.low[3] = low.w;
        half_multiply(error, left, t.rows, t.rows_low, k, p.column0);
    }
}

/* o = from o + what rows up to them wrote. */
__device__ __forceinline__ void chain_output(HalfSums &o, const ChainTiles &t, const DeltaGates &gates, int D)
{
    const HalfPlace p;
    TileSums qk;
    tile_clear(qk);
    UNROLL_BY(2)
    for (int d = 0; d < D; d += 16) {
        uint32_t left[4];
        tile_left<false>(left, t.q + d / TILE * DELTA_TILE, p.m, d % TILE / 16);
        tile_multiply<false>(qk, left, t.k + d / TILE * DELTA_TILE, d % TILE / 16, 0, p.m / 16 + 1);
    }
    UNROLL
    for (int e = 0; e < 16; e++) o.x[e / 4][e % 4] *= gates.from[p.row + e % 4 / 2 * 8];
    UNROLL
    for (int k = 0; k < STEPS; k++) {
        SplitLeft left;
        if (k * 16 > p.m) continue;
        UNROLL
        for (int e = 0; e < 8; e++) {
            const int i = p.row + e % 4 / 2 * 8, j = k * 16 + e / 4 * 8 + p.column % 8 + e % 2;
            qk.x[2 * k + e / 4][e % 4] *= gates.decay(i, j);
        }
        tile_split(left, qk, k);
        half_multiply(o, left, t.rows, t.rows_low, k, p.column0);
    }
}

/* A warp's part of the output, through the tile of values, which has been read. */
__device__ __forceinline__ void chain_store(const HalfSums &o, const DeltaRange &r, const ChainTiles &t,
                                            const Window &w, int head, int column0)
{
    const HalfPlace p;
    const DeltaCall<bf16> &c = r.f.c;
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
            store16_global(r.f.o.at((w.row + row) * c.V + head) + column, load16(t.v + tile_offset(row, chunk)));
    }
}

/* state = factor state, or 0, + the sum over the rows of k and what they wrote, as far as it is left. */
__device__ __forceinline__ void chain_move(TileSums &state, const ChainTiles &t, const DeltaGates &gates, int n, int D)
{
    const int m = threadIdx.x / WARP * 16;
    const bf16 *k = t.k + m / TILE * DELTA_TILE;
    const float last = gates.run[n - 1] < 0 ? gates.from[n - 1] : 0.0f, factor[2] = { last, last };
    if (m >= D) return;
    tile_scale(state, factor);
    UNROLL
    for (int d = 0; d < STEPS; d++) {
        uint32_t left[4];
        tile_left<true>(left, k, m % TILE, d);
        tile_multiply<true>(state, left, t.rows, d);
        tile_multiply<true>(state, left, t.rows_low, d);
    }
}

/* A window: o, and the state from that before it to that behind it. */
__device__ __forceinline__ void chain_window(TileSums &state, const DeltaRange &r, DeltaGates &gates,
                                             const ChainTiles &t, const Window &w, int64_t item, int column0)
{
    const DeltaCall<bf16> &c = r.f.c;
    const HalfPlace p;
    const int head = static_cast<int>(item % c.V);
    HalfSums y = {}, o = {};
    copy_keys(t.k, c.k, c, w, head), copy_keys(t.q, c.q, c, w, head);
    tile_copy(t.v, c.v, w.row * c.V + head, c.V, column0, w.n, c.E, DELTA_WINDOW);
    cp_async_commit();
    load_gates(gates, t.rows, c.g, c.beta, c.rows, w, head);
    if (gates.run[0] == 0) tile_clear(state);
    chain_keep(state, r, t, ((w.b * c.windows + w.w) * c.V + head) * c.D, column0);
    cp_async_wait<0>();
    __syncthreads();
    chain_read(y, t, t.k, c.D);
    chain_read(o, t, t.q, c.D);
    chain_errors(y, t, gates);
    __syncthreads();
    chain_solve(y, r, t, w.w, item);
    __syncthreads();
    const float beta[2] = { gates.step[p.row], gates.step[p.row + 8] };
    half_put(t.rows, t.rows_low, y, beta);
    __syncthreads();
    chain_output(o, t, gates, c.D);
    chain_store(o, r, t, w, head, column0);
    __syncthreads();
    const float left[2] = { gates.left[p.row] * beta[0], gates.left[p.row + 8] * beta[1] };
    half_put(t.rows, t.rows_low, y, left);
    __syncthreads();
    chain_move(state, t, gates, w.n, c.D);
    __syncthreads();
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

__global__ void __launch_bounds__(SCAN_THREADS, 1) delta_chain_kernel(DeltaRange r)
{
    const DeltaCall<bf16> &c = r.f.c;
    DYNAMIC_SHARED(bf16, at);
    SHARED(DeltaGates, gates, [1]);
    const ChainTiles t = chain_tiles(at);
    const int64_t item = blockIdx.x;
    const int column0 = static_cast<int>(blockIdx.y) * TILE;
    TileSums state;
    load_columns(state, r.begin, item * c.D, c.D, c.E, column0);
    for (int64_t w = r.first; w < r.first + r.count; w++)
        chain_window(state, r, *gates, t, window_of(c.rows, item / c.V, w), item, column0);
    store_columns(r.end, state, item * c.D, c.D, c.E, column0);
}

/* ---- launching ---- */

static bool takes(const delta_fwd_args *a)
{
    if (!delta_has_tiles(a->q.dim[3], a->v.dim[3])) return false;
    for (const Tensor &t : { a->o, a->q, a->k, a->v, a->states, a->before, a->after })
        if (t.data && !rows_aligned(t)) return false;
    return true;
}

Err delta_tiles_fwd(Stream *s, const delta_fwd_args *a, const DeltaFwd<bf16> &f, bool *done)
{
    const DeltaCall<bf16> &c = f.c;
    const int64_t heads = c.rows.B * c.V, carried = heads * c.D * c.E, room = s->dev->workspace_bytes / 4 - carried;
    const int64_t most = heads ? room / (heads * SOLVED) : 0;
    float *carry = c.workspace;
    *done = takes(a) && most > 0;
    if (!*done) return ERR_OK;
    TRY(allow_shared(delta_solve_kernel, SOLVE_BYTES));
    TRY(allow_shared(delta_chain_kernel, CHAIN_BYTES));
    DeltaRange r = { f, reinterpret_cast<uint32_t *>(carry + carried), f.before, {}, 0, 0 };
    const dim3 chain(grid_blocks(heads), grid_blocks(ceil_div(c.E, TILE)));
    for (r.first = 0; r.first < c.windows; r.first += r.count) {
        r.count = c.windows - r.first < most ? c.windows - r.first : most;
        const Rows<float> waits = { carry, c.E };
        r.end = r.first + r.count < c.windows ? waits : f.after;
        LAUNCH(delta_solve_kernel, grid_blocks(heads * r.count), SCAN_THREADS, SOLVE_BYTES, cuda_stream(s), r);
        LAUNCH(delta_chain_kernel, chain, SCAN_THREADS, CHAIN_BYTES, cuda_stream(s), r);
        r.begin = { carry, c.E };
    }
    return ERR_OK;
}
