/*
 * Mamba-2's recurrence by tensor cores: its rows backward. The gradients are those of src/cpu/mamba.c, and have its
 * names; operands of products: scan_tiles.cuh; the states' own gradients: mamba_tiles_fwd.cu.
 *
 * Mapping   heads: a block a window of a head: dx, and the gradients of its gates. A warp has 16 rows j, and scores of
 *           the rows i that read them. Keys: a block a window of a group and 64 columns of dq, or of dk, through the
 *           group's heads in their order. A warp has 16 rows, and the gradients of their scores in registers.
 * Work      of a window of a head, N 128 and P 64: 8.9 MFLOP of heads, 6.6 of keys; executed 14.3 and 13.1, as what is
 *           fp32 takes two products, and 64 columns of keys need all scores. 46,000 powers of 2.
 * Traffic   x and go three times, dx once; states and their gradients twice, beside the chain; k and q once a head,
 *           from L2. 8,192 tokens of 64 heads of 64, N 128: 1.4 GB with the chain; at 3 TB/s 0.5 ms.
 * Needs     as forward. A group's heads are one chain: with one group and few windows much of a GPU is idle.
 */
#include "mamba_tiles.cuh"

/* ---- heads ---- */

struct HeadSums {
    float pairs[MAMBA_WARPS][MAMBA_WINDOW]; /* of `both` of row i, by the warps whose rows it reads */
    float from[MAMBA_WINDOW], read[MAMBA_WINDOW], last[MAMBA_WINDOW];
    float part[MAMBA_WARPS];
};

/* A block's tiles: rows of k and q in pieces of 64 columns, of a state, or its gradient, in two halves. */
struct HeadTiles {
    bf16 *k, *q, *state, *low, *go, *x;
};

constexpr int HEAD_BYTES = 5 * MAMBA_TILE * 2;

__device__ __forceinline__ HeadTiles head_tiles(bf16 *at)
{
    return { at, at + MAMBA_TILE, at + 2 * MAMBA_TILE, at + 5 * MAMBA_TILE / 2, at + 3 * MAMBA_TILE,
             at + 4 * MAMBA_TILE };
}

/* Products of a piece's rows with the state's or its gradient's. */
__device__ __forceinline__ void multiply_state(TileSums &s, const HeadTiles &t, const bf16 *rows, int m)
{
    UNROLL
    for (int d = 0; d < TILE / 16; d++) {
        uint32_t left[4];
        tile_left<false>(left, rows, m, d);
        tile_multiply<true>(s, left, t.state, d);
        tile_multiply<true>(s, left, t.low, d);
    }
}

/* Products of a piece's k of row j with q of row i, not before it. */
__device__ __forceinline__ void multiply_keys(TileSums kq[2], const HeadTiles &t, int m)
{
    UNROLL
    for (int d = 0; d < TILE / 16; d++) {
        uint32_t left[4];
        tile_left<false>(left, t.k, m, d);
        if (m < TILE) tile_multiply<false>(kq[0], left, t.q, d, m / 16);
        tile_multiply<false>(kq[1], left, t.q + MAMBA_TILE / 2, d, m < TILE ? 0 : m / 16 - 4);
    }
}

/* kq: k[j] q[i]; read: S^T q[i]; kept: dS^T k[j]. Returns this thread's part of the sum of dS S. */
__device__ __forceinline__ float head_products(TileSums kq[2], TileSums &read, TileSums &kept, const MambaBwd<bf16> &f,
                                               const HeadTiles &t, const Window &w, int head)
{
    const MambaCall<bf16> &c = f.c;
    const int m = threadIdx.x / WARP * 16, group = head / c.group;
    const int64_t row = c.state_row(w.b, w.w, head), keys = w.row * c.G + group;
    const Rows<const float> dstates = { f.dstates.data, f.dstates.ld };
    float sum = 0;
    tile_clear(kq[0]), tile_clear(kq[1]), tile_clear(read), tile_clear(kept);
    for (int first = 0; first < c.N; first += TILE) {
        tile_copy(t.k, c.k, keys, c.G, first, w.n, c.N, MAMBA_WINDOW);
        tile_copy(t.q, c.q, keys, c.G, first, w.n, c.N, MAMBA_WINDOW);
        cp_async_commit();
        tile_load_split(t.state, t.low, f.states, row + first, c.N - first, c.P);
        cp_async_wait<0>();
        __syncthreads();
        multiply_keys(kq, t, m);
        multiply_state(read, t, t.q, m);
        __syncthreads();
        tile_load_split(t.state, t.low, dstates, row + first, c.N - first, c.P);
        __syncthreads();
        multiply_state(kept, t, t.k, m);
        __syncthreads();
    }
    for (int i = threadIdx.x; i < c.N * c.P; i += SCAN_THREADS)
        sum = fmaf(dstates.at(row + i / c.P)[i % c.P], f.states.at(row + i / c.P)[i % c.P], sum);
    return sum;
}

/* Sums that the rows i from j on, in blocks of 16, add to dwrite; and `both`. */
__device__ __forceinline__ void head_pairs(TileSums &dwrite, HeadSums &sums, const TileSums kq[2],
                                           const MambaGates &gates, const HeadTiles &t)
{
    const int warp = threadIdx.x / WARP, m = warp * 16;
    const TilePlace p(m);
    uint32_t x[TILE / 16][4];
    float read_by[2] = { 0, 0 };
    UNROLL
    for (int d = 0; d < TILE / 16; d++) tile_left<false>(x[d], t.x, m, d);
    UNROLL
    for (int k = 0; k < MAMBA_WINDOW / 16; k++) {
        TileSums read;
        SplitLeft left;
        float pair[2][4], column[2][2] = {};
        if (k * 16 < m) continue;
        tile_block<TILE / 16>(pair, x, t.go, k * 16);
        UNROLL
        for (int e = 0; e < 8; e++) {
            const int j = p.row + e % 4 / 2 * 8, i = k * 16 + e / 4 * 8 + p.column + e % 2;
            const float score = kq[k / 4].x[k % 4 * 2 + e / 4][e % 4] * gates.decay(i, j);
            const float both = i > j ? pair[e / 4][e % 4] * gates.step[j] * score : 0.0f;
            read.x[e / 4][e % 4] = score;
            read_by[e % 4 / 2] += both, column[e / 4][e % 2] += both;
        }
        tile_split(left, read, 0);
        tile_multiply<true>(dwrite, left, t.go, k);
        UNROLL
        for (int e = 0; e < 4; e++) {
            float sum = column[e / 2][e % 2];
            for (int d = 4; d < WARP; d *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, d);
            if (p.row == m) sums.pairs[warp][k * 16 + e / 2 * 8 + p.column + e % 2] = sum;
        }
    }
    UNROLL
    for (int i = 0; i < 2; i++) {
        const float sum = tile_row_sum(read_by[i]);
        if (p.column == 0) sums.read[p.row + 8 * i] = sum;
    }
}

/* dwrite becomes dx; ddelta, dskip. */
__device__ __forceinline__ void head_writes(TileSums &dwrite, const MambaBwd<bf16> &f, const MambaGates &gates,
                                            const HeadTiles &t, const Window &w, int head)
{
    const int m = threadIdx.x / WARP * 16;
    const TilePlace p(m);
    const float one = f.c.skip_of(head), skip[2] = { one, one }, step[2] = { gates.step[p.row], gates.step[p.row + 8] };
    float ddelta[2], dskip[2];
    TileSums x, go;
    tile_read(x, t.x, m);
    tile_read(go, t.go, m);
    tile_dot(ddelta, dwrite, x);
    tile_dot(dskip, go, x);
    tile_scale(dwrite, step);
    tile_add(dwrite, go, skip);
    for (int i = 0; i < 2; i++) {
        if (p.column || p.row + 8 * i >= w.n) continue;
        f.ddelta.at(w.row + p.row + 8 * i)[head] = ddelta[i];
        f.dskip.at(w.row + p.row + 8 * i)[head] = dskip[i];
    }
    tile_store(dwrite, t.k, m, f.dx, w.row * f.c.H + head, f.c.H, w.n, 0, f.c.P);
}

/* dg: of the pairs of rows that row m parts, and of the states behind it. A thread has a row. room: for 2 sums a row */
__device__ __forceinline__ void head_gates(const MambaBwd<bf16> &f, HeadSums &sums, const MambaGates &gates,
                                           double *room, float states, const Window &w, int head)
{
    const int i = threadIdx.x;
    const bool mine = i < MAMBA_WINDOW;
    const float last = block_sum(i < w.n - 1 ? sums.last[i] : 0.0f, sums.part);
    int k = 0;
    if (mine) {
        double sum = i < w.n ? static_cast<double>(sums.from[i]) - sums.read[i] : 0.0;
        for (int warp = 0; warp <= i / 16 && i < w.n; warp++) sum += sums.pairs[warp][i];
        if (i < w.n - 1) sum -= sums.last[i];
        if (i == w.n - 1) sum += static_cast<double>(last) + static_cast<double>(gates.from[i]) * states;
        room[i] = sum;
    }
    __syncthreads();
    for (int d = 1; d < MAMBA_WINDOW; d *= 2, k ^= 1) {
        if (mine) {
            const double *sum = room + k * MAMBA_WINDOW;
            const bool add = i + d < w.n && gates.run[i + d] == gates.run[i];
            room[(k ^ 1) * MAMBA_WINDOW + i] = add ? sum[i] + sum[i + d] : sum[i];
        }
        __syncthreads();
    }
    if (i < w.n) f.dg.at(w.row + i)[head] = gates.run[i] == i ? 0.0f : static_cast<float>(room[k * MAMBA_WINDOW + i]);
}

/* The gradients of `from`, and of decays up to the last row, times these; kept becomes what dwrite has of the state. */
__device__ __forceinline__ void head_states(TileSums &kept, const TileSums &read, HeadSums &sums,
                                            const MambaGates &gates, const HeadTiles &t)
{
    const int m = threadIdx.x / WARP * 16;
    const TilePlace p(m);
    const float left[2] = { gates.left[p.row], gates.left[p.row + 8] };
    float from[2], last[2];
    TileSums rows;
    tile_read(rows, t.go, m);
    tile_dot(from, read, rows);
    tile_read(rows, t.x, m);
    tile_dot(last, kept, rows);
    tile_scale(kept, left);
    for (int i = 0; i < 2; i++) {
        const int row = p.row + 8 * i;
        if (p.column) continue;
        sums.from[row] = gates.from[row] * from[i];
        sums.last[row] = gates.left[row] * gates.step[row] * last[i];
    }
}

__global__ void __launch_bounds__(SCAN_THREADS, 1) mamba_heads_tiles_kernel(MambaBwd<bf16> f)
{
    const MambaCall<bf16> &c = f.c;
    DYNAMIC_SHARED(bf16, at);
    SHARED(MambaGates, gates, [1]);
    SHARED(HeadSums, sums, [1]);
    const HeadTiles t = head_tiles(at);
    const int64_t item = blockIdx.x / c.H;
    const int head = static_cast<int>(blockIdx.x % c.H);
    const Window w = window_of(c.rows, item / c.windows, item % c.windows);
    TileSums kq[2], read, dwrite;
    load_gates(*gates, t.k, c, w, head);
    tile_copy(t.go, f.go, w.row * c.H + head, c.H, 0, w.n, c.P, MAMBA_WINDOW);
    tile_copy(t.x, c.x, w.row * c.H + head, c.H, 0, w.n, c.P, MAMBA_WINDOW);
    const float states = block_sum(head_products(kq, read, dwrite, f, t, w, head), sums->part);
    head_states(dwrite, read, *sums, *gates, t);
    head_pairs(dwrite, *sums, kq, *gates, t);
    head_writes(dwrite, f, *gates, t, w, head);
    __syncthreads();
    head_gates(f, *sums, *gates, reinterpret_cast<double *>(t.q), states, w, head);
}

/* ---- keys ---- */

constexpr int KEYS_BYTES = 3 * MAMBA_TILE * 2;

/* dqk + qk' of a head, of rows `own` and all `other` that have to do with them. */
template <bool KEYS>
__device__ __forceinline__ void add_pairs(TileSums dqk[2], const MambaGates &gates, const uint32_t own[TILE / 16][4],
                                          const bf16 *other)
{
    const int m = threadIdx.x / WARP * 16;
    const TilePlace p(m);
    UNROLL
    for (int k = 0; k < MAMBA_WINDOW / 16; k++) {
        float pair[2][4];
        if (KEYS ? k * 16 < m : k * 16 > m) continue;
        tile_block<TILE / 16>(pair, own, other, k * 16);
        UNROLL
        for (int e = 0; e < 8; e++) {
            const int row = p.row + e % 4 / 2 * 8, column = k * 16 + e / 4 * 8 + p.column + e % 2;
            const int i = KEYS ? column : row, j = KEYS ? row : column;
            float &to = dqk[k / 4].x[k % 4 * 2 + e / 4][e % 4];
            to = fmaf(pair[e / 4][e % 4] * gates.step[j], gates.decay(i, j), to);
        }
    }
}

/* sum + what a head's rows `own` have of its state, or gradient of that: 64 columns of it. */
template <bool KEYS>
__device__ __forceinline__ void add_state(TileSums &sum, const MambaGates &gates, const uint32_t own[TILE / 16][4],
                                          const bf16 *state)
{
    const TilePlace p(threadIdx.x / WARP * 16);
    TileSums x;
    float factor[2];
    tile_clear(x);
    UNROLL
    for (int d = 0; d < TILE / 16; d++) {
        tile_multiply<false>(x, own[d], state, d);
        tile_multiply<false>(x, own[d], state + MAMBA_TILE / 2, d);
    }
    for (int i = 0; i < 2; i++) {
        const int row = p.row + 8 * i;
        factor[i] = KEYS ? gates.left[row] * gates.step[row] : gates.from[row];
    }
    tile_add(sum, x, factor);
}

/* dq, or with KEYS dk: own rows are those of go, or of x, the others those of x, or of go. */
template <bool KEYS> __global__ void __launch_bounds__(SCAN_THREADS, 1) mamba_keys_tiles_kernel(MambaBwd<bf16> f)
{
    const MambaCall<bf16> &c = f.c;
    DYNAMIC_SHARED(bf16, own_tile);
    SHARED(MambaGates, gates, [1]);
    bf16 *other = own_tile + MAMBA_TILE, *state = other + MAMBA_TILE;
    const int64_t item = blockIdx.x / c.G;
    const int group = static_cast<int>(blockIdx.x % c.G), first = static_cast<int>(blockIdx.y) * TILE;
    const int m = threadIdx.x / WARP * 16;
    const Window w = window_of(c.rows, item / c.windows, item % c.windows);
    const Rows<const float> dstates = { f.dstates.data, f.dstates.ld };
    TileSums dqk[2], sum;
    tile_clear(dqk[0]), tile_clear(dqk[1]), tile_clear(sum);
    for (int head = group * c.group; head < (group + 1) * c.group; head++) {
        uint32_t own[TILE / 16][4];
        load_gates(*gates, state, c, w, head);
        tile_copy(own_tile, KEYS ? c.x : f.go, w.row * c.H + head, c.H, 0, w.n, c.P, MAMBA_WINDOW);
        tile_copy(other, KEYS ? f.go : c.x, w.row * c.H + head, c.H, 0, w.n, c.P, MAMBA_WINDOW);
        cp_async_commit();
        tile_load_split(state, state + MAMBA_TILE / 2, KEYS ? dstates : f.states,
                        c.state_row(w.b, w.w, head) + first, c.N - first, c.P);
        cp_async_wait<0>();
        __syncthreads();
        UNROLL
        for (int d = 0; d < TILE / 16; d++) tile_left<false>(own[d], own_tile, m, d);
        add_pairs<KEYS>(dqk, *gates, own, other);
        add_state<KEYS>(sum, *gates, own, state);
        __syncthreads();
    }
    tile_copy(other, KEYS ? c.q : c.k, w.row * c.G + group, c.G, first, w.n, c.N, MAMBA_WINDOW);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    UNROLL
    for (int k = 0; k < MAMBA_WINDOW / 16; k++) {
        SplitLeft left;
        if (KEYS ? k * 16 < m : k * 16 > m) continue;
        tile_split(left, dqk[k / 4], k % 4);
        tile_multiply<true>(sum, left, other, k);
    }
    tile_store(sum, own_tile, m, KEYS ? f.dk : f.dq, w.row * c.G + group, c.G, w.n, first, c.N);
}

/* ---- launching ---- */

Err mamba_tiles_bwd(Stream *s, const MambaBwd<bf16> &f)
{
    const MambaCall<bf16> &c = f.c;
    const int64_t windows = c.rows.B * c.windows;
    const dim3 keys(grid_blocks(windows * c.G), grid_blocks(ceil_div(c.N, TILE)));
    TRY(mamba_tiles_states(s, f));
    TRY(allow_shared(mamba_heads_tiles_kernel, HEAD_BYTES));
    TRY(allow_shared(mamba_keys_tiles_kernel<false>, KEYS_BYTES));
    TRY(allow_shared(mamba_keys_tiles_kernel<true>, KEYS_BYTES));
    LAUNCH(mamba_heads_tiles_kernel, grid_blocks(windows * c.H), SCAN_THREADS, HEAD_BYTES, cuda_stream(s), f);
    LAUNCH((mamba_keys_tiles_kernel<false>), keys, SCAN_THREADS, KEYS_BYTES, cuda_stream(s), f);
    LAUNCH((mamba_keys_tiles_kernel<true>), keys, SCAN_THREADS, KEYS_BYTES, cuda_stream(s), f);
    return ERR_OK;
}
