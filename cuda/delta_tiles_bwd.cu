/*
 * The gated delta rule by tensor cores, backward. What is computed stands in src/cpu/delta_bwd.c; operands of products:
 * scan_tiles.cuh.
 *
 * Mapping   over ranges of windows, the last first, as many as the workspace has room for. Solve: M, and the inverse of
 *           1 - beta low, turned. Chain: a block has 64 columns of the gradient of a value head's state, in registers,
 *           and goes from window to window, with errors and dwrite on the way. Rows: a block has a window of a key head
 *           and goes through its value heads in their order; a warp has 16 rows, and half of the columns.
 * Work      of a window of a value head, D and E 128: 21 MFLOP; executed 53, as what is fp32 takes two products or
 *           three.
 * Traffic   of the above 0.7 MiB: the chain 184 KiB for each 64 columns, the rows 360 KiB.
 * Needs     as forward; workspace for gradients of states, and for a window of all heads. All else has delta_bwd.cu.
 */
#include "delta_tiles.cuh"

/* One range of windows. A slot: a window of a value head. */
struct BackRange {
    DeltaBwd<bf16> f;
    DeltaSolved solved;
    float *dstates, *error, *dwrite; /* [slots] of [D][E], of [64][E] */
    Rows<const float> begin;
    Rows<float> end; /* data: or NULL */

    __device__ __forceinline__ int64_t slot(int64_t w, int64_t item) const
    {
        return (w - solved.first) * f.c.rows.B * f.c.V + item;
    }
};

/* ---- the chain ---- */

constexpr int BACK_BYTES = 12 * DELTA_TILE * 2;

/* A warp's part of rows of fp32, [64][E]. */
__device__ __forceinline__ void back_keep(const HalfSums &s, float *to, int E, int column0)
{
    const HalfPlace p;
    UNROLL
    for (int n = 0; n < TILE_CHUNKS / 2; n++)
        UNROLL
        for (int i = 0; i < 2; i++) {
            const int column = column0 + p.column + n * 8;
            if (column >= E) continue;
            *reinterpret_cast<float2 *>(to + (p.row + 8 * i) * static_cast<int64_t>(E) + column) =
                make_float2(s.x[n][2 * i], s.x[n][2 * i + 1]);
        }
}

/* base += what rows from j on have of what it wrote. */
__device__ __forceinline__ void back_reads(HalfSums &base, const ChainTiles &t, const bf16 *go, const DeltaGates &gates,
                                           int D)
{
    const HalfPlace p;
    TileSums kq;
    tile_clear(kq);
    UNROLL_BY(2)
    for (int d = 0; d < D; d += 16) {
        uint32_t left[4];
        tile_left<false>(left, t.k + d / TILE * DELTA_TILE, p.m, d % TILE / 16);
        tile_multiply<false>(kq, left, t.q + d / TILE * DELTA_TILE, d % TILE / 16, p.m / 16);
    }
    UNROLL
    for (int k = 0; k < STEPS; k++) {
        SplitLeft left;
        if (k * 16 < p.m) continue;
        UNROLL
        for (int e = 0; e < 8; e++) {
            const int j = p.row + e % 4 / 2 * 8, i = k * 16 + e / 4 * 8 + p.column % 8 + e % 2;
            kq.x[2 * k + e / 4][e % 4] *= gates.decay(i, j);
        }
        tile_split(left, kq, k);
        half_multiply<true>(base, left.high, go, k, p.column0);
        half_multiply<true>(base, left.low, go, k, p.column0);
    }
}

/* dstate += the sum over the rows of k, or q, and the tiles of rows. */
__device__ __forceinline__ void back_move(TileSums &dstate, const ChainTiles &t, const bf16 *keys, int D)
{
    const int m = threadIdx.x / WARP * 16;
    if (m >= D) return;
    UNROLL
    for (int d = 0; d < STEPS; d++) {
        uint32_t left[4];
        tile_left<true>(left, keys + m / TILE * DELTA_TILE, m % TILE, d);
        tile_multiply<true>(dstate, left, t.rows, d);
        tile_multiply<true>(dstate, left, t.rows_low, d);
    }
}

/* Rows of a tile, as sums of a warp's half. */
__device__ __forceinline__ void half_read(HalfSums &s, const bf16 *tile)
{
    const HalfPlace p;
    UNROLL
    for (int n = 0; n < TILE_CHUNKS / 2; n++)
        UNROLL
        for (int i = 0; i < 2; i++) {
            const int at = tile_offset(p.row + 8 * i, p.column0 / TILE_CHUNK + n) + p.column % TILE_CHUNK;
            const __nv_bfloat162 v = *reinterpret_cast<const __nv_bfloat162 *>(tile + at);
            s.x[n][2 * i] = to_float(v.x), s.x[n][2 * i + 1] = to_float(v.y);
        }
}

/* dstate from that behind the window to that before it. */
__device__ __forceinline__ void back_state(TileSums &dstate, HalfSums &dwrite, const ChainTiles &t, const bf16 *go,
                                           const DeltaGates &gates, int n, int D)
{
    const HalfPlace p;
    const float factor[2] = { gates.from[n - 1], gates.from[n - 1] };
    const float from[2] = { gates.from[p.row], gates.from[p.row + 8] };
    const float taken[2] = { -from[0] * gates.step[p.row], -from[1] * gates.step[p.row + 8] };
    HalfSums read;
    tile_scale(dstate, factor);
    half_read(read, go);
    half_put(t.rows, t.rows_low, read, from);
    __syncthreads();
    back_move(dstate, t, t.q, D);
    __syncthreads();
    half_put(t.rows, t.rows_low, dwrite, taken);
    __syncthreads();
    back_move(dstate, t, t.k, D);
    __syncthreads();
}

/* A window: error, dwrite, dv, and the state's gradient from that behind it to that before it. */
__device__ __forceinline__ void back_window(TileSums &dstate, const BackRange &r, DeltaGates &gates,
                                            const ChainTiles &t, bf16 *go, const Window &w, int64_t item, int column0)
{
    const DeltaCall<bf16> &c = r.f.c;
    const HalfPlace p;
    const int head = static_cast<int>(item % c.V);
    const int64_t kept = ((w.b * c.windows + w.w) * c.V + head) * c.D, slot = r.slot(w.w, item);
    const Rows<const float> states = { r.f.states.data + column0, r.f.states.ld };
    HalfSums y = {};
    copy_keys(t.k, c.k, c, w, head / c.group), copy_keys(t.q, c.q, c, w, head / c.group);
    tile_copy(t.v, c.v, w.row * c.V + head, c.V, column0, w.n, c.E, DELTA_WINDOW);
    tile_copy(go, r.f.go, w.row * c.V + head, c.V, column0, w.n, c.E, DELTA_WINDOW);
    cp_async_commit();
    load_gates(gates, t.rows, c.g, c.beta, c.rows, w, head);
    for (int at = 0; at < c.D; at += TILE)
        tile_load_split(t.state + at * TILE, t.state_low + at * TILE, states, kept + at, c.D - at, c.E - column0);
    cp_async_wait<0>();
    __syncthreads();
    chain_read(y, t, t.k, c.D);
    chain_errors(y, t, gates);
    __syncthreads();
    chain_solve<false>(y, r.solved, t, c, w.w, item);
    back_keep(y, r.error + slot * DELTA_WINDOW * c.E, c.E, column0);
    __syncthreads();
    chain_keep(dstate, { r.dstates, c.E }, t, c, slot * c.D, column0);
    __syncthreads();
    HalfSums base = {};
    const float left[2] = { gates.left[p.row], gates.left[p.row + 8] }, one[2] = { 1, 1 };
    chain_read(base, t, t.k, c.D);
    UNROLL
    for (int e = 0; e < 16; e++) base.x[e / 4][e % 4] *= left[e % 4 / 2];
    back_reads(base, t, go, gates, c.D);
    half_put(t.rows, t.rows_low, base, one);
    __syncthreads();
    chain_solve<true>(y, r.solved, t, c, w.w, item);
    back_keep(y, r.dwrite + slot * DELTA_WINDOW * c.E, c.E, column0);
    __syncthreads();
    back_state(dstate, y, t, go, gates, w.n, c.D);
    UNROLL
    for (int e = 0; e < 16; e++) y.x[e / 4][e % 4] *= gates.step[p.row + e % 4 / 2 * 8];
    chain_store(y, r.f.dv, t, c, w, head, column0);
    __syncthreads();
}

__global__ void __launch_bounds__(SCAN_THREADS, 1) delta_chain_bwd_kernel(BackRange r)
{
    const DeltaCall<bf16> &c = r.f.c;
    DYNAMIC_SHARED(bf16, at);
    SHARED(DeltaGates, gates, [1]);
    const ChainTiles t = chain_tiles(at);
    const int64_t item = blockIdx.x;
    const int column0 = static_cast<int>(blockIdx.y) * TILE;
    TileSums dstate;
    load_columns(dstate, r.begin, item * c.D, c.D, c.E, column0);
    for (int64_t w = r.solved.first + r.solved.count - 1; w >= r.solved.first; w--)
        back_window(dstate, r, *gates, t, at + 11 * DELTA_TILE, window_of(c.rows, item / c.V, w), item, column0);
    store_columns(r.end, dstate, item * c.D, c.D, c.E, column0);
}

/* ---- rows ---- */

constexpr int ROWS_BYTES = 11 * DELTA_TILE * 2;

/* A block's tiles: keys in pieces of 64 columns; 64 columns of values, in halves where they are fp32; 64 rows of those
 * columns of a state, or its gradient. */
struct RowTiles {
    bf16 *k, *q, *go, *write, *write_low, *derror, *derror_low, *state, *state_low;
};

__device__ __forceinline__ RowTiles row_tiles(bf16 *at)
{
    return { at,
             at + 2 * DELTA_TILE,
             at + 4 * DELTA_TILE,
             at + 5 * DELTA_TILE,
             at + 6 * DELTA_TILE,
             at + 7 * DELTA_TILE,
             at + 8 * DELTA_TILE,
             at + 9 * DELTA_TILE,
             at + 10 * DELTA_TILE };
}

/* Sums of a head, by the warps that have the parts. */
struct RowSums {
    float read[2][DELTA_WINDOW], gave[STEPS][DELTA_WINDOW]; /* of `both`: of a row, of a column */
    float from[2][DELTA_WINDOW], last[2][DELTA_WINDOW], beta[DELTA_WINDOW];
    float part[SCAN_THREADS / WARP];
};

/* A warp's sums: of keys two pieces of 64 columns. */
struct RowGradients {
    HalfSums dq[2], dk[2], dqk, dkk;
};

/* s += 16 rows from m on of rows times a tile's, along both. */
__device__ __forceinline__ void rows_multiply(HalfSums &s, const bf16 *rows, const bf16 *tile, int m, int column0)
{
    UNROLL_BY(1) /* (registers) */
    for (int k = 0; k < STEPS; k++) {
        uint32_t left[4];
        tile_left<false>(left, rows, m, k);
        half_multiply<false>(s, left, tile, k, column0);
    }
}

/* The same of fp32 numbers on the right, or on both sides. */
__device__ __forceinline__ void rows_multiply(HalfSums &s, const bf16 *rows, const bf16 *rows_low, const bf16 *high,
                                              const bf16 *low, int m, int column0)
{
    rows_multiply(s, rows, high, m, column0);
    rows_multiply(s, rows, low, m, column0);
    if (rows_low) rows_multiply(s, rows_low, high, m, column0);
}

/* Columns of what the rows of a head wrote, of derror; of dbeta a thread's rows. */
__device__ __forceinline__ void load_writes(const BackRange &r, const RowTiles &t, RowSums &sums,
                                            const DeltaGates &gates, int64_t slot, int column0)
{
    const int E = r.f.c.E;
    for (int i = threadIdx.x; i < DELTA_WINDOW * TILE_CHUNKS; i += SCAN_THREADS) {
        const int row = i / TILE_CHUNKS, chunk = i % TILE_CHUNKS, column = column0 + chunk * TILE_CHUNK;
        const int64_t at = (slot * DELTA_WINDOW + row) * E + column;
        float write[TILE_CHUNK] = {}, derror[TILE_CHUNK] = {}, dbeta = 0;
        for (int e = 0; e < TILE_CHUNK && column < E; e += 4) {
            const Pack<float> x = load16(r.error + at + e), y = load16(r.dwrite + at + e);
            UNROLL
            for (int k = 0; k < 4; k++) {
                write[e + k] = gates.step[row] * x.v[k], derror[e + k] = gates.step[row] * y.v[k];
                dbeta = fmaf(x.v[k], y.v[k], dbeta);
            }
        }
        tile_put_split(t.write, t.write_low, row, chunk, write);
        tile_put_split(t.derror, t.derror_low, row, chunk, derror);
        for (int d = 1; d < TILE_CHUNKS; d *= 2) dbeta += __shfl_xor_sync(ALL_LANES, dbeta, d);
        if (chunk == 0) sums.beta[row] = column0 ? sums.beta[row] + dbeta : dbeta;
    }
}

/* to += factor x, by rows; sum += factor times x times the keys that have its columns. */
__device__ __forceinline__ void add_keys(HalfSums &to, float sum[2], const HalfSums &x, const bf16 *keys,
                                         const float factor[2])
{
    HalfSums k;
    half_read(k, keys);
    UNROLL
    for (int e = 0; e < 16; e++) {
        const float part = factor[e % 4 / 2] * x.x[e / 4][e % 4];
        to.x[e / 4][e % 4] += part;
        sum[e % 4 / 2] = fmaf(part, k.x[e / 4][e % 4], sum[e % 4 / 2]);
    }
}

/* Gradients through the state before the window, and that behind it, of 64 columns of values; from, last: a warp's
 * parts of the gradients of decays, times these. */
__device__ __forceinline__ void back_keys(RowGradients &d, float from[2], float last[2], const BackRange &r,
                                          const RowTiles &t, const DeltaGates &gates, int64_t kept, int64_t slot,
                                          int column0)
{
    const DeltaCall<bf16> &c = r.f.c;
    const HalfPlace p;
    const Rows<const float> states = { r.f.states.data + column0, r.f.states.ld };
    const Rows<const float> dstates = { r.dstates + column0, c.E };
    const float read[2] = { gates.from[p.row], gates.from[p.row + 8] }, taken[2] = { -read[0], -read[1] };
    const float left[2] = { gates.left[p.row], gates.left[p.row + 8] };
    UNROLL
    for (int piece = 0; piece < 2; piece++) {
        const int first = piece * TILE;
        if (first >= c.D) continue;
        HalfSums x = {}, y = {}, z = {};
        tile_load_split(t.state, t.state_low, states, kept + first, c.D - first, c.E - column0);
        __syncthreads();
        rows_multiply(x, t.go, nullptr, t.state, t.state_low, p.m, p.column0);
        add_keys(d.dq[piece], from, x, t.q + piece * DELTA_TILE, read);
        rows_multiply(y, t.derror, t.derror_low, t.state, t.state_low, p.m, p.column0);
        add_keys(d.dk[piece], from, y, t.k + piece * DELTA_TILE, taken);
        __syncthreads();
        tile_load_split(t.state, t.state_low, dstates, slot * c.D + first, c.D - first, c.E - column0);
        __syncthreads();
        rows_multiply(z, t.write, t.write_low, t.state, t.state_low, p.m, p.column0);
        add_keys(d.dk[piece], last, z, t.k + piece * DELTA_TILE, left);
        __syncthreads();
    }
}

/* Gradients of what rows gave to each other: read of go and what was written, low of derror and that. */
__device__ __forceinline__ void back_pairs(RowGradients &d, RowSums &sums, const HalfSums &read, const HalfSums &low,
                                           const HalfSums &qk, const HalfSums &kk, const DeltaGates &gates)
{
    const HalfPlace p;
    float row[2] = { 0, 0 }, column[TILE_CHUNKS / 2][2] = {};
    UNROLL
    for (int e = 0; e < 16; e++) {
        const int i = p.row + e % 4 / 2 * 8, j = p.column + e / 4 * 8 + e % 2;
        const float decay = gates.decay(i, j), a = read.x[e / 4][e % 4] * decay;
        const float b = j < i ? low.x[e / 4][e % 4] * decay : 0.0f;
        d.dqk.x[e / 4][e % 4] += a, d.dkk.x[e / 4][e % 4] -= b;
        const float both = j < i ? a * qk.x[e / 4][e % 4] - b * kk.x[e / 4][e % 4] : 0.0f;
        row[e % 4 / 2] += both, column[e / 4][e % 2] += both;
    }
    UNROLL
    for (int i = 0; i < 2; i++) {
        const float sum = tile_row_sum(row[i]);
        if (p.column % 8 == 0) sums.read[p.column0 / 32][p.row + 8 * i] = sum;
    }
    UNROLL
    for (int e = 0; e < 8; e++) {
        float sum = column[e / 2][e % 2];
        for (int k = 4; k < WARP; k *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, k);
        if (p.row == p.m) sums.gave[p.m / 16][p.column + e / 2 * 8 + e % 2] = sum;
    }
}

/* dg, of the pairs of rows that row m parts and of the states, and dbeta. A thread has a row. */
__device__ __forceinline__ void back_gates(const BackRange &r, RowSums &sums, const DeltaGates &gates, double *room,
                                           float states, const Window &w, int head)
{
    const int i = threadIdx.x;
    const bool mine = i < DELTA_WINDOW, there = i < w.n;
    const float lost = i < w.n - 1 ? sums.last[0][i] + sums.last[1][i] : 0.0f, last = block_sum(lost, sums.part);
    int k = 0;
    if (mine) {
        double sum = 0;
        if (there) {
            sum = static_cast<double>(sums.from[0][i]) + sums.from[1][i] + sums.read[0][i] + sums.read[1][i] - lost;
            for (int m = 0; m < STEPS; m++) sum -= sums.gave[m][i];
        }
        if (i == w.n - 1) sum += static_cast<double>(last) + static_cast<double>(gates.from[i]) * states;
        room[i] = sum;
    }
    __syncthreads();
    for (int d = 1; d < DELTA_WINDOW; d *= 2, k ^= 1) {
        if (mine) {
            const double *sum = room + k * DELTA_WINDOW;
            const bool add = i + d < w.n && gates.run[i + d] == gates.run[i];
            room[(k ^ 1) * DELTA_WINDOW + i] = add ? sum[i] + sum[i + d] : sum[i];
        }
        __syncthreads();
    }
    if (!there) return;
    r.f.dg.at(w.row + i)[head] = gates.run[i] == i ? 0.0f : static_cast<float>(room[k * DELTA_WINDOW + i]);
    r.f.dbeta.at(w.row + i)[head] = sums.beta[i];
}

/* The sum of the state before a window and the gradient of that behind it, product by product. */
__device__ __forceinline__ float back_states(const BackRange &r, int64_t kept, int64_t slot, float *part)
{
    const DeltaCall<bf16> &c = r.f.c;
    float sum = 0;
    for (int i = threadIdx.x; i < c.D * c.E; i += SCAN_THREADS)
        sum = fmaf(r.dstates[slot * c.D * c.E + i], r.f.states.at(kept + i / c.E)[i % c.E], sum);
    return block_sum(sum, part);
}

__device__ __forceinline__ void back_head(RowGradients &d, const BackRange &r, const RowTiles &t, RowSums &sums,
                                          DeltaGates &gates, const HalfSums &qk, const HalfSums &kk, const Window &w,
                                          int head)
{
    const DeltaCall<bf16> &c = r.f.c;
    const HalfPlace p;
    const int64_t slot = r.slot(w.w, w.b * c.V + head), kept = ((w.b * c.windows + w.w) * c.V + head) * c.D;
    float from[2] = { 0, 0 }, last[2] = { 0, 0 };
    HalfSums read = {}, low = {};
    load_gates(gates, t.state, c.g, c.beta, c.rows, w, head);
    for (int column0 = 0; column0 < c.E; column0 += TILE) {
        tile_copy(t.go, r.f.go, w.row * c.V + head, c.V, column0, w.n, c.E, DELTA_WINDOW);
        cp_async_commit();
        load_writes(r, t, sums, gates, slot, column0);
        cp_async_wait<0>();
        __syncthreads();
        rows_multiply(read, t.go, nullptr, t.write, t.write_low, p.m, p.column0);
        rows_multiply(low, t.derror, t.derror_low, t.write, t.write_low, p.m, p.column0);
        back_keys(d, from, last, r, t, gates, kept, slot, column0);
    }
    back_pairs(d, sums, read, low, qk, kk, gates);
    UNROLL
    for (int i = 0; i < 2; i++) {
        const float all = tile_row_sum(from[i]), kept_last = tile_row_sum(last[i]);
        if (p.column % 8) continue;
        sums.from[p.column0 / 32][p.row + 8 * i] = all, sums.last[p.column0 / 32][p.row + 8 * i] = kept_last;
    }
    const float states = back_states(r, kept, slot, sums.part);
    back_gates(r, sums, gates, reinterpret_cast<double *>(t.state), states, w, head);
    __syncthreads();
}

/* dq and dk + what rows gave to each other, by keys of 64 columns. */
__device__ __forceinline__ void back_given(HalfSums &dq, HalfSums &dk, const RowTiles &t, const bf16 *k, const bf16 *q)
{
    const HalfPlace p;
    UNROLL_BY(1)
    for (int d = 0; d < STEPS; d++)
        UNROLL_BY(1)
        for (int part = 0; part < 2; part++) {
            const bf16 *dqk = part ? t.write_low : t.write, *dkk = part ? t.derror_low : t.derror;
            uint32_t left[4];
            tile_left<false>(left, dqk, p.m, d);
            half_multiply<true>(dq, left, k, d, p.column0);
            tile_left<true>(left, dqk, p.m, d);
            half_multiply<true>(dk, left, q, d, p.column0);
            tile_left<false>(left, dkk, p.m, d);
            half_multiply<true>(dk, left, k, d, p.column0);
            tile_left<true>(left, dkk, p.m, d);
            half_multiply<true>(dk, left, k, d, p.column0);
        }
}

/* A warp's rows of 64 columns of dq, or dk. */
__device__ __forceinline__ void store_keys(const HalfSums &s, GroupedRows<bf16> x, bf16 *tile, const BackRange &r,
                                           const Window &w, int key_head, int column0)
{
    const HalfPlace p;
    const int chunk0 = p.column0 / TILE_CHUNK;
    UNROLL
    for (int n = 0; n < TILE_CHUNKS / 2; n++)
        UNROLL
        for (int i = 0; i < 2; i++)
            *reinterpret_cast<uint32_t *>(tile + tile_offset(p.row + 8 * i, chunk0 + n) + p.column % TILE_CHUNK) =
                pack_pair(s.x[n][2 * i], s.x[n][2 * i + 1], bf16());
    __syncwarp();
    for (int i = threadIdx.x % WARP; i < 16 * TILE_CHUNKS / 2; i += WARP) {
        const int row = p.m + i / (TILE_CHUNKS / 2), chunk = chunk0 + i % (TILE_CHUNKS / 2);
        const int column = column0 + chunk * TILE_CHUNK;
        if (row < w.n && column < r.f.c.D)
            store16_global(x.at((w.row + row) * r.f.c.K + key_head) + column, load16(tile + tile_offset(row, chunk)));
    }
    __syncwarp();
}

__global__ void __launch_bounds__(SCAN_THREADS, 1) delta_rows_bwd_kernel(BackRange r)
{
    const DeltaCall<bf16> &c = r.f.c;
    DYNAMIC_SHARED(bf16, at);
    SHARED(DeltaGates, gates, [1]);
    SHARED(RowSums, sums, [1]);
    const RowTiles t = row_tiles(at);
    const HalfPlace p;
    const int64_t item = blockIdx.x % (c.rows.B * c.K);
    const int key_head = static_cast<int>(item % c.K);
    const Window w = window_of(c.rows, item / c.K, r.solved.first + blockIdx.x / (c.rows.B * c.K));
    const float one[2] = { 1, 1 };
    RowGradients d = {};
    HalfSums qk = {}, kk = {};
    copy_keys(t.k, c.k, c, w, key_head), copy_keys(t.q, c.q, c, w, key_head);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    for (int at = 0; at < c.D; at += TILE) {
        rows_multiply(qk, t.q + at * TILE, t.k + at * TILE, p.m, p.column0);
        rows_multiply(kk, t.k + at * TILE, t.k + at * TILE, p.m, p.column0);
    }
    for (int head = key_head * c.group; head < (key_head + 1) * c.group; head++)
        back_head(d, r, t, *sums, *gates, qk, kk, w, head);
    half_put(t.write, t.write_low, d.dqk, one);
    half_put(t.derror, t.derror_low, d.dkk, one);
    __syncthreads();
    UNROLL
    for (int piece = 0; piece < 2; piece++) {
        if (piece * TILE >= c.D) continue;
        back_given(d.dq[piece], d.dk[piece], t, t.k + piece * DELTA_TILE, t.q + piece * DELTA_TILE);
        store_keys(d.dq[piece], r.f.dq, t.state, r, w, key_head, piece * TILE);
        store_keys(d.dk[piece], r.f.dk, t.state, r, w, key_head, piece * TILE);
    }
}

/* ---- launching ---- */

static bool takes(const delta_bwd_args *a)
{
    if (!delta_has_tiles(a->q.dim[3], a->v.dim[3])) return false;
    for (const Tensor &t : { a->dq, a->dk, a->dv, a->go, a->q, a->k, a->v, a->states, a->dbefore, a->dafter })
        if (t.data && !rows_aligned(t)) return false;
    return true;
}

Err delta_tiles_bwd(Stream *s, const delta_bwd_args *a, const DeltaBwd<bf16> &f, bool *done)
{
    const DeltaCall<bf16> &c = f.c;
    const int64_t heads = c.rows.B * c.V, size = c.D * static_cast<int64_t>(c.E), rows = DELTA_WINDOW * c.E;
    const int64_t slot = 2 * SOLVED + size + 2 * rows, room = s->dev->workspace_bytes / 4 - heads * size;
    const int64_t most = heads && room > 0 ? room / (heads * slot) : 0;
    const int64_t slots = heads * (most < c.windows ? most : c.windows);
    float *carry = c.workspace, *solved = carry + heads * size, *dstates = solved + slots * 2 * SOLVED;
    *done = takes(a) && most > 0 && c.windows > 0;
    if (!*done) return ERR_OK;
    TRY(allow_shared(delta_solve_kernel<true>, SOLVE_BACK_BYTES));
    TRY(allow_shared(delta_chain_bwd_kernel, BACK_BYTES));
    TRY(allow_shared(delta_rows_bwd_kernel, ROWS_BYTES));
    BackRange r = { f, { reinterpret_cast<uint32_t *>(solved), 0, 0, 2 }, dstates, dstates + slots * size,
                    dstates + slots * (size + rows), f.dafter, {} };
    const dim3 chain(grid_blocks(heads), grid_blocks(ceil_div(c.E, TILE)));
    for (int64_t end = c.windows; end > 0; end = r.solved.first) {
        r.solved.count = end < most ? end : most;
        r.solved.first = end - r.solved.count;
        const Rows<float> waits = { carry, c.E };
        r.end = r.solved.first > 0 ? waits : f.dbefore;
        LAUNCH((delta_solve_kernel<true>), grid_blocks(heads * r.solved.count), SCAN_THREADS, SOLVE_BACK_BYTES,
               cuda_stream(s), c, r.solved);
        LAUNCH(delta_chain_bwd_kernel, chain, SCAN_THREADS, BACK_BYTES, cuda_stream(s), r);
        LAUNCH(delta_rows_bwd_kernel, grid_blocks(c.rows.B * c.K * r.solved.count), SCAN_THREADS, ROWS_BYTES,
               cuda_stream(s), r);
        r.begin = { carry, c.E };
    }
    return ERR_OK;
}
