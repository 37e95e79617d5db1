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
#include "delta_tiles.cuh"

/* One range of windows. */
struct DeltaRange {
    DeltaFwd<bf16> f;
    DeltaSolved solved;
    Rows<const float> begin;
    Rows<float> end; /* data: or NULL */
};

constexpr int CHAIN_BYTES = 11 * DELTA_TILE * 2;

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
        half_multiply<true>(o, left, t.rows, t.rows_low, k, p.column0);
    }
}

/* state = factor state, or 0, + the sum over the rows of k and what they wrote, as far as it is left. */
__device__ __forceinline__ void chain_move(TileSums &state, const ChainTiles &t, const DeltaGates &gates, int n, int D)
{
    const int m = threadIdx.x / WARP * 16;
    const bf16 *k = t.k + m / TILE * DELTA_TILE;
    const float factor[2] = { gates.from[n - 1], gates.from[n - 1] };
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
    copy_keys(t.k, c.k, c, w, head / c.group), copy_keys(t.q, c.q, c, w, head / c.group);
    tile_copy(t.v, c.v, w.row * c.V + head, c.V, column0, w.n, c.E, DELTA_WINDOW);
    cp_async_commit();
    load_gates(gates, t.rows, c.g, c.beta, c.rows, w, head);
    if (gates.run[0] == 0) tile_clear(state);
    chain_keep(state, r.f.states, t, c, ((w.b * c.windows + w.w) * c.V + head) * c.D, column0);
    cp_async_wait<0>();
    __syncthreads();
    chain_read(y, t, t.k, c.D);
    chain_read(o, t, t.q, c.D);
    chain_errors(y, t, gates);
    __syncthreads();
    chain_solve<false>(y, r.solved, t, c, w.w, item);
    __syncthreads();
    const float beta[2] = { gates.step[p.row], gates.step[p.row + 8] };
    half_put(t.rows, t.rows_low, y, beta);
    __syncthreads();
    chain_output(o, t, gates, c.D);
    chain_store(o, r.f.o, t, c, w, head, column0);
    __syncthreads();
    const float left[2] = { gates.left[p.row] * beta[0], gates.left[p.row + 8] * beta[1] };
    half_put(t.rows, t.rows_low, y, left);
    __syncthreads();
    chain_move(state, t, gates, w.n, c.D);
    __syncthreads();
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
    for (int64_t w = r.solved.first; w < r.solved.first + r.solved.count; w++)
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
    *done = takes(a) && most > 0 && c.windows > 0;
    if (!*done) return ERR_OK;
    TRY(allow_shared(delta_solve_kernel<false>, SOLVE_BYTES));
    TRY(allow_shared(delta_chain_kernel, CHAIN_BYTES));
    DeltaRange r = { f, { reinterpret_cast<uint32_t *>(carry + carried), 0, 0, 1 }, f.before, {} };
    DeltaSolved &range = r.solved;
    const dim3 chain(grid_blocks(heads), grid_blocks(ceil_div(c.E, TILE)));
    for (; range.first < c.windows; range.first += range.count) {
        range.count = c.windows - range.first < most ? c.windows - range.first : most;
        const Rows<float> waits = { carry, c.E };
        r.end = range.first + range.count < c.windows ? waits : f.after;
        LAUNCH((delta_solve_kernel<false>), grid_blocks(heads * range.count), SCAN_THREADS, SOLVE_BYTES, cuda_stream(s),
               c, range);
        LAUNCH(delta_chain_kernel, chain, SCAN_THREADS, CHAIN_BYTES, cuda_stream(s), r);
        r.begin = { carry, c.E };
    }
    return ERR_OK;
}
