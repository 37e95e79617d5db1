/*
 * Tiles of recurrences for tensor cores: mma.sync m16n8k16 of bf16, fp32 sums (common.cuh has the fragments).
 *
 * A tile has rows of 64 columns in shared memory, without padding: 16-byte chunk c of row r lies at chunk c ^ r mod 8,
 * so that the 8 rows of an 8 x 8 matrix fall into different banks. Columns that a matrix does not have are 0.
 *
 * An fp32 number goes as two of bf16, high + low, which is its 16 leading bits: states, and whatever decays have
 * scaled, lose 2^-17 of themselves at most. Rows of activations are bf16 as they are. So a product of the two takes
 * two mma. Nothing of fp32 is rounded to bf16 alone.
 */
#ifndef MEGATRAIN_CUDA_SCAN_TILES_CUH
#define MEGATRAIN_CUDA_SCAN_TILES_CUH

#include "scan.cuh"

constexpr int TILE = 64, TILE_CHUNK = 8, TILE_CHUNKS = TILE / TILE_CHUNK;

/* ---- gates ---- */

/*
 * A head's gates in a window of ROWS rows, which goes as a whole, whatever documents it has: their borders are zeros
 * among its decays. Decays are powers of 2 of differences of sums. So sums are two floats, of a sum in fp64: a
 * difference is then as exact as the numbers it is of.
 */
template <int ROWS> struct WindowGates {
    int run[ROWS];              /* where a row's run begins; -1: before the window */
    float high[ROWS], low[ROWS]; /* of sums of g, in units of log 2 */
    float step[ROWS];           /* beside g: what a row writes is scaled by */
    float from[ROWS], left[ROWS]; /* 0 beyond the first run and before the last */

    /* The decay of what row j wrote when row i reads it. */
    __device__ __forceinline__ float decay(int i, int j) const
    {
        if (i < j || run[i] != run[j]) return 0.0f;
        return exp2_approx((high[i] - high[j]) + (low[i] - low[j]));
    }
};

/* Room for its sums, as they come about. */
template <int ROWS> struct GateSums {
    double sum[2][ROWS];
    int run[2][ROWS];
};

/* A window of a sample. */
struct Window {
    int64_t b, w, row; /* row: the first, of [B T] */
    int n;
};

__device__ __forceinline__ Window window_of(const ScanRows &rows, int64_t b, int64_t w)
{
    const int64_t first = w * rows.window, left = rows.T - first;
    return { b, w, b * rows.T + first, static_cast<int>(left < rows.window ? left : rows.window) };
}

/* The gates of a head; a thread has a row. room: shared memory for GateSums. */
template <int ROWS>
__device__ __forceinline__ void load_gates(WindowGates<ROWS> &a, void *room, Rows<const float> gates,
                                           Rows<const float> steps, const ScanRows &rows, const Window &w, int head)
{
    static constexpr float LEAST = -200; /* (what exp makes 0, however much is added) */
    static constexpr double LOG2E = 1.4426950408889634;
    GateSums<ROWS> &s = *static_cast<GateSums<ROWS> *>(room);
    const int i = threadIdx.x;
    const bool mine = i < ROWS, there = i < w.n;
    int k = 0;
    if (mine) {
        const float g = there ? gates.at(w.row + i)[head] : 0.0f;
        a.step[i] = there ? steps.at(w.row + i)[head] : 0.0f;
        s.sum[0][i] = (g < LEAST ? LEAST : g) * LOG2E;
        s.run[0][i] = there && rows.begins(w.b, w.w * ROWS + i) ? i : -1;
    }
    __syncthreads();
    for (int d = 1; d < ROWS; d *= 2, k ^= 1) {
        if (mine) {
            const bool add = i >= d;
            s.sum[k ^ 1][i] = add ? s.sum[k][i - d] + s.sum[k][i] : s.sum[k][i];
            s.run[k ^ 1][i] = add && s.run[k][i - d] > s.run[k][i] ? s.run[k][i - d] : s.run[k][i];
        }
        __syncthreads();
    }
    if (mine) {
        a.run[i] = s.run[k][i];
        a.high[i] = static_cast<float>(s.sum[k][i]);
        a.low[i] = static_cast<float>(s.sum[k][i] - a.high[i]);
        a.from[i] = there && a.run[i] < 0 ? exp2_approx(a.high[i] + a.low[i]) : 0.0f;
    }
    __syncthreads();
    if (mine) a.left[i] = there ? a.decay(w.n - 1, i) : 0.0f;
    __syncthreads();
}

/* ---- tiles ---- */

/* A warp's sums: 16 rows of a tile. Lane: g = lane / 4, t = lane % 4; x[n][e] is row g + 8 (e / 2), column
 * 8 n + 2 t + e % 2. */
struct TileSums {
    float x[TILE_CHUNKS][4];
};

struct TilePlace {
    int row, column; /* of x[0][0] */
    __device__ __forceinline__ TilePlace(int first)
        : row(first + static_cast<int>(threadIdx.x) % WARP / 4), column(static_cast<int>(threadIdx.x) % 4 * 2)
    {
    }
};

/* A fragment of fp32 numbers. */
struct SplitLeft {
    uint32_t high[4], low[4];
};

__device__ __forceinline__ int tile_offset(int row, int chunk) { return row * TILE + (chunk ^ (row & 7)) * TILE_CHUNK; }

__device__ __forceinline__ void split_pair(uint32_t &high, uint32_t &low, float x, float y)
{
    const __nv_bfloat162 p = __floats2bfloat162_rn(x, y);
    high = *reinterpret_cast<const uint32_t *>(&p);
    low = pack_pair(x - to_float(p.x), y - to_float(p.y), bf16());
}

__device__ __forceinline__ void tile_clear(TileSums &s)
{
    UNROLL
    for (int n = 0; n < TILE_CHUNKS; n++)
        UNROLL
        for (int e = 0; e < 4; e++) s.x[n][e] = 0;
}

/* Left operand: rows m .. m + 15, depth 16 k .. 16 k + 15. DOWN: the depth goes down the tile's rows, and m along
 * them. */
template <bool DOWN> __device__ __forceinline__ void tile_left(uint32_t r[4], const bf16 *tile, int m, int k)
{
    const int l = threadIdx.x % WARP;
    if (DOWN) ldmatrix_x4_trans(r, tile + tile_offset(k * 16 + l % 8 + l / 16 * 8, m / 8 + l / 8 % 2));
    else ldmatrix_x4(r, tile + tile_offset(m + l % 16, k * 2 + l / 16));
}

/* Right operand of two neighbouring mma: columns n .. n + 15. */
template <bool DOWN> __device__ __forceinline__ void tile_right(uint32_t r[4], const bf16 *tile, int n, int k)
{
    const int l = threadIdx.x % WARP;
    if (DOWN) ldmatrix_x4_trans(r, tile + tile_offset(k * 16 + l % 16, n / 8 + l / 16));
    else ldmatrix_x4(r, tile + tile_offset(n + l % 8 + l / 16 * 8, k * 2 + l / 8 % 2));
}

/* s += left times columns [16 `least`, 16 `most`) of the tile, depth 16 k .. 16 k + 15. */
template <bool DOWN>
__device__ __forceinline__ void tile_multiply(TileSums &s, const uint32_t left[4], const bf16 *tile, int k,
                                              int least = 0, int most = TILE / 16)
{
    UNROLL
    for (int n = 0; n < TILE / 16; n++) {
        uint32_t right[4];
        if (n < least || n >= most) continue;
        tile_right<DOWN>(right, tile, n * 16, k);
        mma_16816(s.x[2 * n], left, right, bf16());
        mma_16816(s.x[2 * n + 1], left, right + 2, bf16());
    }
}

/* The same of fp32 numbers on the left. */
template <bool DOWN>
__device__ __forceinline__ void tile_multiply(TileSums &s, const SplitLeft &left, const bf16 *tile, int k)
{
    UNROLL
    for (int n = 0; n < TILE / 16; n++) {
        uint32_t right[4];
        tile_right<DOWN>(right, tile, n * 16, k);
        mma_16816(s.x[2 * n], left.high, right, bf16());
        mma_16816(s.x[2 * n + 1], left.high, right + 2, bf16());
        mma_16816(s.x[2 * n], left.low, right, bf16());
        mma_16816(s.x[2 * n + 1], left.low, right + 2, bf16());
    }
}

/* Columns 16 k .. 16 k + 15 of the sums as a left operand; they stay in the registers that mma left them in. */
__device__ __forceinline__ void tile_split(SplitLeft &left, const TileSums &s, int k)
{
    UNROLL
    for (int e = 0; e < 4; e++)
        split_pair(left.high[e], left.low[e], s.x[2 * k + e / 2][e % 2 * 2], s.x[2 * k + e / 2][e % 2 * 2 + 1]);
}

/* x = left times columns n .. n + 15 of the tile, over `depth` times 16. */
template <int DEPTH> __device__ __forceinline__ void tile_block(float x[2][4], const uint32_t left[DEPTH][4],
                                                                const bf16 *tile, int n)
{
    UNROLL
    for (int e = 0; e < 8; e++) x[e / 4][e % 4] = 0;
    UNROLL
    for (int k = 0; k < DEPTH; k++) {
        uint32_t right[4];
        tile_right<false>(right, tile, n, k);
        mma_16816(x[0], left[k], right, bf16());
        mma_16816(x[1], left[k], right + 2, bf16());
    }
}

/* A warp's 16 rows of a tile, from row m on. */
__device__ __forceinline__ void tile_read(TileSums &s, const bf16 *tile, int m)
{
    const TilePlace p(m);
    UNROLL
    for (int n = 0; n < TILE_CHUNKS; n++)
        UNROLL
        for (int i = 0; i < 2; i++) {
            const bf16 *from = tile + tile_offset(p.row + 8 * i, n) + p.column;
            const __nv_bfloat162 v = *reinterpret_cast<const __nv_bfloat162 *>(from);
            s.x[n][2 * i] = to_float(v.x), s.x[n][2 * i + 1] = to_float(v.y);
        }
}

/* y of rows g and g + 8 times factor. */
__device__ __forceinline__ void tile_scale(TileSums &y, const float factor[2])
{
    UNROLL
    for (int n = 0; n < TILE_CHUNKS; n++)
        UNROLL
        for (int e = 0; e < 4; e++) y.x[n][e] *= factor[e / 2];
}

/* y + factor x, by rows. */
__device__ __forceinline__ void tile_add(TileSums &y, const TileSums &x, const float factor[2])
{
    UNROLL
    for (int n = 0; n < TILE_CHUNKS; n++)
        UNROLL
        for (int e = 0; e < 4; e++) y.x[n][e] = fmaf(factor[e / 2], x.x[n][e], y.x[n][e]);
}

/* Sum over the lanes that share a row. */
__device__ __forceinline__ float tile_row_sum(float x)
{
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

/* x times y, row by row. */
__device__ __forceinline__ void tile_dot(float sum[2], const TileSums &x, const TileSums &y)
{
    sum[0] = sum[1] = 0;
    UNROLL
    for (int n = 0; n < TILE_CHUNKS; n++)
        UNROLL
        for (int e = 0; e < 4; e++) sum[e / 2] = fmaf(x.x[n][e], y.x[n][e], sum[e / 2]);
    UNROLL
    for (int i = 0; i < 2; i++) sum[i] = tile_row_sum(sum[i]);
}

/* A row of a tile, 0 behind its first `rows`; it arrives with cp_async_wait and a barrier. Row r of x: x.at(row + r
 * step). */
__device__ __forceinline__ void tile_copy(bf16 *tile, GroupedRows<const bf16> x, int64_t row, int64_t step, int column,
                                          int rows, int columns, int height)
{
    for (int i = threadIdx.x; i < height * TILE_CHUNKS; i += SCAN_THREADS) {
        const int r = i / TILE_CHUNKS, c = i % TILE_CHUNKS, at = column + c * TILE_CHUNK;
        const bool there = r < rows && at < columns;
        cp_async_16(tile + tile_offset(r, c), x.at(row + (there ? r : 0) * step) + (there ? at : 0), there);
    }
}

/* Numbers x as a chunk of two tiles. */
__device__ __forceinline__ void tile_put_split(bf16 *high, bf16 *low, int r, int c, const float x[TILE_CHUNK])
{
    Pack<bf16> h, l;
    UNROLL
    for (int e = 0; e < TILE_CHUNK; e++) {
        h.v[e] = from_float<bf16>(x[e]);
        l.v[e] = from_float<bf16>(x[e] - to_float(h.v[e]));
    }
    store16(high + tile_offset(r, c), h), store16(low + tile_offset(r, c), l);
}

/* Rows of fp32, from row `row` on, as two tiles of 64 rows. */
__device__ __forceinline__ void tile_load_split(bf16 *high, bf16 *low, Rows<const float> x, int64_t row, int rows,
                                                int columns)
{
    for (int i = threadIdx.x; i < TILE * TILE_CHUNKS; i += SCAN_THREADS) {
        const int r = i / TILE_CHUNKS, c = i % TILE_CHUNKS;
        float v[TILE_CHUNK] = {};
        if (r < rows && c * TILE_CHUNK < columns) {
            const float *from = x.at(row + r) + c * TILE_CHUNK;
            const Pack<float> a = load16(from), b = load16(from + 4);
            UNROLL
            for (int e = 0; e < 4; e++) v[e] = a.v[e], v[e + 4] = b.v[e];
        }
        tile_put_split(high, low, r, c, v);
    }
}

/* A warp's 16 rows from row m on to rows of x, 16 bytes at a time, through `tile`, which has room for them. */
__device__ __forceinline__ void tile_store(const TileSums &s, bf16 *tile, int m, GroupedRows<bf16> x, int64_t row,
                                           int64_t step, int rows, int column, int columns)
{
    const TilePlace p(m);
    const int l = threadIdx.x % WARP;
    UNROLL
    for (int n = 0; n < TILE_CHUNKS; n++)
        UNROLL
        for (int i = 0; i < 2; i++)
            *reinterpret_cast<uint32_t *>(tile + tile_offset(p.row + 8 * i, n) + p.column) =
                pack_pair(s.x[n][2 * i], s.x[n][2 * i + 1], bf16());
    __syncwarp();
    for (int i = l; i < 16 * TILE_CHUNKS; i += WARP) {
        const int r = m + i / TILE_CHUNKS, c = i % TILE_CHUNKS, at = column + c * TILE_CHUNK;
        if (r < rows && at < columns) store16_global(x.at(row + r * step) + at, load16(tile + tile_offset(r, c)));
    }
}

#endif
