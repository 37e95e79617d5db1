/*
 * Mamba-2's recurrence by tensor cores: its states, both ways, and its rows forward. What is computed stands in
 * src/cpu/mamba.c; operands of products: scan_tiles.cuh.
 *
 * Mapping   added: a block a window of a head: what its rows add to the state, which does not need the state. Chain: a
 *           thread has 4 numbers of a head's state and goes from window to window. Rows: a block has a window of up to
 *           8 heads of a group, a warp 16 rows; products of q and k stay in its registers for all these heads.
 * Work      of a window of a head, N 128 and P 64: 2.1 MFLOP added, 2.1 by the state, 1.2 from rows to rows, each
 *           executed twice, for high and low; 2.4 a group for q k. 9,216 powers of 2.
 * Traffic   x twice, o once, k and q once a head and once a group, from L2; states four times: written, then read and
 *           written by the chain, then read. 8,192 tokens of 64 heads of 64, N 128: 0.27 GB of rows, 0.54 GB of
 *           states; at 3 TB/s 0.27 ms.
 * Needs     bf16; N up to 256 and P up to 64, multiples of 8; rows at multiples of 16 bytes; workspace for a number a
 *           window and head. All else has mamba.cu.
 * Source    Dao, Gu 2024 (Transformers are SSMs), section 6.
 */
#include "device/scan_room.h"
#include "mamba_tiles.cuh"

/* ---- states ---- */

/* One direction. Keys and values: of the products that add to a state. */
struct StateCall {
    MambaCall<bf16> c;
    GroupedRows<const bf16> keys, values;
    Rows<float> states, end;
    Rows<const float> begin;
    float *factor; /* [B, windows, H]: of the state before; < 0: 0, and of ZERO what goes on into the window is 0 too */
};

constexpr float NOTHING = -1, ZERO = -2;

constexpr int ADDED_BYTES = 3 * MAMBA_TILE * 2;

/* Rows [m, m + 16) of what is added, columns 32 `half` .. + 31, of keys [first, first + 64). */
__device__ __forceinline__ void add_keys(const StateCall &f, const bf16 *keys, const bf16 *high, const bf16 *low,
                                         int64_t to, int rows)
{
    const int warp = threadIdx.x / WARP, m = warp % 4 * 16, half = warp / 4;
    const TilePlace p(m);
    float x[4][4] = {};
    UNROLL_BY(2)
    for (int k = 0; k < MAMBA_WINDOW / 16; k++) {
        uint32_t left[4], right[4];
        tile_left<true>(left, keys, m, k);
        UNROLL
        for (int n = 0; n < 2; n++)
            UNROLL
            for (int part = 0; part < 2; part++) {
                tile_right<true>(right, part ? low : high, half * 32 + n * 16, k);
                mma_16816(x[2 * n], left, right, bf16());
                mma_16816(x[2 * n + 1], left, right + 2, bf16());
            }
    }
    UNROLL
    for (int n = 0; n < 4; n++)
        UNROLL
        for (int i = 0; i < 2; i++) {
            const int r = p.row + 8 * i, column = half * 32 + n * 8 + p.column;
            if (r >= rows || column >= f.c.P) continue;
            *reinterpret_cast<float2 *>(f.states.at(to + r) + column) = make_float2(x[n][2 * i], x[n][2 * i + 1]);
        }
}

/* A window's sum for the state, in the place of the state itself. BACK: for the gradient of the one before. */
template <bool BACK> __global__ void __launch_bounds__(SCAN_THREADS, 2) mamba_added_kernel(StateCall f)
{
    const MambaCall<bf16> &c = f.c;
    DYNAMIC_SHARED(bf16, keys);
    SHARED(MambaGates, gates, [1]);
    bf16 *high = keys + MAMBA_TILE, *low = high + MAMBA_TILE;
    const int64_t item = blockIdx.x, at = item / c.H;
    const int head = static_cast<int>(item % c.H);
    const Window w = window_of(c.rows, at / c.windows, at % c.windows);
    load_gates(*gates, keys, c, w, head);
    const int *run = gates->run;
    if (threadIdx.x == 0)
        f.factor[item] = run[0] == 0 ? ZERO : run[w.n - 1] < 0 ? gates->from[w.n - 1] : NOTHING;
    for (int i = threadIdx.x; i < MAMBA_WINDOW * TILE_CHUNKS; i += SCAN_THREADS) {
        const int r = i / TILE_CHUNKS, chunk = i % TILE_CHUNKS;
        float v[TILE_CHUNK] = {};
        if (r < w.n && chunk * TILE_CHUNK < c.P) {
            const float scale = BACK ? gates->from[r] : gates->left[r] * gates->step[r];
            const Pack<bf16> x = load16(f.values.at((w.row + r) * c.H + head) + chunk * TILE_CHUNK);
            UNROLL
            for (int e = 0; e < TILE_CHUNK; e++) v[e] = scale * to_float(x.v[e]);
        }
        tile_put_split(high, low, r, chunk, v);
    }
    for (int first = 0; first < c.N; first += TILE) {
        tile_copy(keys, f.keys, w.row * c.G + head / c.group, c.G, first, w.n, c.N, MAMBA_WINDOW);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        add_keys(f, keys, high, low, c.state_row(w.b, w.w, head) + first, c.N - first);
        __syncthreads();
    }
}

constexpr int CHAIN_AHEAD = 4;

/* Sums of windows become the states before them; BACK: their gradients behind them. */
template <bool BACK> __global__ void __launch_bounds__(SCAN_THREADS) mamba_chain_kernel(StateCall f)
{
    const MambaCall<bf16> &c = f.c;
    const int64_t at = (blockIdx.y * static_cast<int64_t>(SCAN_THREADS) + threadIdx.x) * 4, item = blockIdx.x;
    const int64_t row = at / c.P, column = at % c.P, b = item / c.H, head = item % c.H;
    if (row >= c.N) return;
    Pack<float> state = {}, added[CHAIN_AHEAD];
    if (f.begin.data) state = load16(f.begin.at(item * c.N + row) + column);
    for (int64_t base = 0; base < c.windows; base += CHAIN_AHEAD) {
        const int64_t first = b * c.windows + (BACK ? c.windows - 1 - base : base), left = c.windows - base;
        const int64_t step = BACK ? -c.H : c.H, window = first * c.H + head;
        UNROLL
        for (int k = 0; k < CHAIN_AHEAD; k++)
            if (k < left) added[k] = load16(f.states.at((window + k * step) * c.N + row) + column);
        UNROLL
        for (int k = 0; k < CHAIN_AHEAD; k++) {
            if (k >= left) continue;
            const float factor = f.factor[window + k * step];
            Pack<float> kept = state;
            UNROLL
            for (int e = 0; e < 4; e++) {
                if (!BACK && factor == ZERO) kept.v[e] = 0;
                state.v[e] = factor < 0 ? added[k].v[e] : fmaf(factor, state.v[e], added[k].v[e]);
            }
            store16_global(f.states.at((window + k * step) * c.N + row) + column, kept);
        }
    }
    if (f.end.data) store16_global(f.end.at(item * c.N + row) + column, state);
}

template <bool BACK> static Err launch_states(Stream *s, const StateCall &f)
{
    const MambaCall<bf16> &c = f.c;
    const dim3 chain(grid_blocks(c.rows.B * c.H), grid_blocks(ceil_div(c.N * c.P, SCAN_THREADS * 4)));
    TRY(allow_shared(mamba_added_kernel<BACK>, ADDED_BYTES));
    LAUNCH((mamba_added_kernel<BACK>), grid_blocks(c.rows.B * c.windows * c.H), SCAN_THREADS, ADDED_BYTES,
           cuda_stream(s), f);
    LAUNCH((mamba_chain_kernel<BACK>), chain, SCAN_THREADS, 0, cuda_stream(s), f);
    return ERR_OK;
}

Err mamba_tiles_states(Stream *s, const MambaFwd<bf16> &f)
{
    return launch_states<false>(s, { f.c, f.c.k, f.c.x, f.states, f.after, f.before, f.c.workspace });
}

Err mamba_tiles_states(Stream *s, const MambaBwd<bf16> &f)
{
    return launch_states<true>(s, { f.c, f.c.q, f.go, f.dstates, f.dbefore, f.dafter, f.c.workspace });
}

/* ---- rows ---- */

constexpr int ROWS_HEADS = 8; /* of a block */

static int rows_bytes(int N) { return (static_cast<int>(ceil_div(N, TILE)) + 2) * MAMBA_TILE * 2; }

/* Sums of a warp's rows q with all rows k, that are not behind them. */
__device__ __forceinline__ void query_keys(TileSums s[2], const MambaCall<bf16> &c, const Window &w, int group,
                                           const bf16 *q, bf16 *k)
{
    const int m = threadIdx.x / WARP * 16;
    tile_clear(s[0]), tile_clear(s[1]);
    for (int first = 0; first < c.N; first += TILE) {
        tile_copy(k, c.k, w.row * c.G + group, c.G, first, w.n, c.N, MAMBA_WINDOW);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        UNROLL
        for (int d = 0; d < TILE / 16; d++) {
            uint32_t left[4];
            tile_left<false>(left, q + first * MAMBA_WINDOW, m, d);
            tile_multiply<false>(s[0], left, k, d, 0, m / 16 + 1);
            if (m >= TILE) tile_multiply<false>(s[1], left, k + MAMBA_TILE / 2, d, 0, m / 16 - 3);
        }
        __syncthreads();
    }
}

/* o = from (S^T q): the state in pieces of 64 of its rows. */
__device__ __forceinline__ void read_state(TileSums &o, const MambaFwd<bf16> &f, const MambaGates &gates,
                                           const bf16 *q, bf16 *state, int64_t row)
{
    const MambaCall<bf16> &c = f.c;
    const int m = threadIdx.x / WARP * 16;
    const TilePlace p(m);
    const float from[2] = { gates.from[p.row], gates.from[p.row + 8] };
    bf16 *low = state + MAMBA_TILE / 2;
    tile_clear(o);
    for (int first = 0; first < c.N; first += TILE) {
        tile_load_split(state, low, { f.states.data, f.states.ld }, row + first, c.N - first, c.P);
        __syncthreads();
        UNROLL
        for (int d = 0; d < TILE / 16; d++) {
            uint32_t left[4];
            tile_left<false>(left, q + first * MAMBA_WINDOW, m, d);
            tile_multiply<true>(o, left, state, d);
            tile_multiply<true>(o, left, low, d);
        }
        __syncthreads();
    }
    tile_scale(o, from);
}

/* o += what rows up to them wrote. */
__device__ __forceinline__ void read_rows(TileSums &o, const TileSums qk[2], const MambaGates &gates, const bf16 *x)
{
    const int m = threadIdx.x / WARP * 16;
    const TilePlace p(m);
    UNROLL
    for (int k = 0; k < MAMBA_WINDOW / 16; k++) {
        TileSums read;
        SplitLeft left;
        if (k * 16 > m) continue;
        UNROLL
        for (int e = 0; e < 8; e++) {
            const int i = p.row + e % 4 / 2 * 8, j = k * 16 + e / 4 * 8 + p.column + e % 2;
            read.x[e / 4][e % 4] = qk[k / 4].x[k % 4 * 2 + e / 4][e % 4] * gates.decay(i, j) * gates.step[j];
        }
        tile_split(left, read, 0);
        tile_multiply<true>(o, left, x, k);
    }
}

/* A head's state comes to L2 while the head before is worked on. */
__device__ __forceinline__ void expect_state(const MambaFwd<bf16> &f, int64_t row)
{
    constexpr int LINE = 32; /* floats */
    for (int i = threadIdx.x * LINE; i < f.c.N * f.c.P; i += SCAN_THREADS * LINE)
        prefetch_l2(f.states.at(row + i / f.c.P) + i % f.c.P);
}

__global__ void __launch_bounds__(SCAN_THREADS, 1) mamba_rows_tiles_kernel(MambaFwd<bf16> f, int parts)
{
    const MambaCall<bf16> &c = f.c;
    DYNAMIC_SHARED(bf16, state);
    SHARED(MambaGates, gates, [1]);
    bf16 *x = state + MAMBA_TILE, *q = x + MAMBA_TILE;
    const int64_t item = blockIdx.x / parts, at = item / c.G;
    const int group = static_cast<int>(item % c.G), begin = static_cast<int>(blockIdx.x % parts) * ROWS_HEADS;
    const int end = begin + ROWS_HEADS < c.group ? begin + ROWS_HEADS : c.group;
    const Window w = window_of(c.rows, at / c.windows, at % c.windows);
    const int m = threadIdx.x / WARP * 16;
    TileSums qk[2];
    for (int first = 0; first < c.N; first += TILE)
        tile_copy(q + first * MAMBA_WINDOW, c.q, w.row * c.G + group, c.G, first, w.n, c.N, MAMBA_WINDOW);
    query_keys(qk, c, w, group, q, state);
    for (int head = group * c.group + begin; head < group * c.group + end; head++) {
        const float skip[2] = { c.skip_of(head), c.skip_of(head) };
        TileSums o, value;
        load_gates(*gates, state, c, w, head);
        tile_copy(x, c.x, w.row * c.H + head, c.H, 0, w.n, c.P, MAMBA_WINDOW);
        cp_async_commit();
        if (head + 1 < group * c.group + end) expect_state(f, c.state_row(w.b, w.w, head + 1));
        cp_async_wait<0>();
        read_state(o, f, *gates, q, state, c.state_row(w.b, w.w, head));
        read_rows(o, qk, *gates, x);
        tile_read(value, x, m);
        tile_add(o, value, skip);
        tile_store(o, state, m, f.o, w.row * c.H + head, c.H, w.n, 0, c.P);
        __syncthreads();
    }
}

/* ---- launching ---- */

bool mamba_takes_tiles(Stream *s, Tensor x, Tensor k, std::initializer_list<Tensor> rows)
{
    const int64_t windows = ceil_div(x.dim[1], MAMBA_WINDOW);
    if (x.dtype != BF16 || !mamba_has_tiles(k.dim[3], x.dim[3])) return false;
    for (const Tensor &t : rows)
        if (t.data && !rows_aligned(t)) return false;
    const int64_t factors = x.dim[0] * windows * x.dim[2];
    return factors > 0 && factors * 4 <= static_cast<int64_t>(s->dev->workspace_bytes);
}

Err mamba_tiles_fwd(Stream *s, const MambaFwd<bf16> &f)
{
    const MambaCall<bf16> &c = f.c;
    const int bytes = rows_bytes(c.N), parts = static_cast<int>(ceil_div(c.group, ROWS_HEADS));
    TRY(mamba_tiles_states(s, f));
    TRY(allow_shared(mamba_rows_tiles_kernel, bytes));
    LAUNCH(mamba_rows_tiles_kernel, grid_blocks(c.rows.B * c.windows * c.G * parts), SCAN_THREADS, bytes,
           cuda_stream(s), f, parts);
    return ERR_OK;
}
