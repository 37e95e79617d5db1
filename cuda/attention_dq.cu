/*
 * Attention, backward: dq and delta; the launcher of the op. Engines, tiles, masks: attention.cuh; dk and dv:
 * attention_dkv.cu.
 *
 *   delta = sum over V of do o
 *   p  = exp(scale q k - lse)            recomputed
 *   ds = p (keep (do v) - delta)         keep: 0 or 1 / (1 - p_drop); of capped scores times their slope
 *   dq = scale sum over keys of ds k     resumed: added to the dq of earlier calls, in fp32
 *
 * Two kernels, not one: dq is summed by the block that owns the queries, dk and dv by the block that owns the
 * keys. So nothing is added to memory that another block adds to (no atomics, same bits every time, no buffer
 * for partial sums), and in both kernels the weights of the second product stay in registers. The price: scores
 * and do v are computed twice, 7 products instead of 5.
 *
 * Mapping  a block has 128 (64) queries of one head, a warp 32 (16); 4 warps; keys in tiles of 32, two buffers,
 *          one barrier a tile. lse and delta of the rows in shared memory.
 * Work     6 C FLOP a score; B = 64, H = 12, T = 1024, C = 64, causal: 155 GFLOP, at 790 TFLOP/s 196 us.
 * Traffic  q, do, o, dq once, k and v once a block of queries, from L2: 600 MB for the example, 140 us.
 * Needs    as forward.
 * Source   Dao 2023 (FlashAttention-2).
 */
#include "attention_fma.cuh"
#include "attention_mma.cuh"

/* ---- kernel ---- */

/* lse in powers of 2. Of rows without keys, and beyond the tile, +inf: all their weights become 0. */
struct RowStatistics {
    float lse2, delta;
};

template <class E> struct DqTile {
    static constexpr int Q = E::ROWS * E::PITCH, K = E::COLS * E::PITCH; /* elements of shared memory */
    static constexpr int BYTES = (2 * Q + 4 * K) * static_cast<int>(sizeof(typename E::T)) + E::STAGE * 4;
    static constexpr int ALL =
        BYTES + shared_arrays(sizeof(QueryBlock<typename E::T>) + E::ROWS * sizeof(RowStatistics));
};

/* delta of the warp's own rows, 8 lanes a row; `go` is in shared memory. */
template <class E>
__device__ __forceinline__ void row_statistics(const AttnProblem &p, RowStatistics *out, const typename E::T *go,
                                               const Heads<const typename E::T> &o, const RowValues &lse,
                                               const RowValues &delta, const RowTile &rows)
{
    constexpr int CHUNK = Pack<typename E::T>::COUNT, LANES = 8;
    const int lane = threadIdx.x % LANES, b = blockIdx.z, h = blockIdx.y;
    const int begin = threadIdx.x / WARP * E::WARP_ROWS;
    for (int i = threadIdx.x % WARP / LANES; i < E::WARP_ROWS; i += WARP / LANES) {
        const int r = begin + i;
        float dot = 0;
        if (r < rows.count)
            for (int chunk = lane; chunk * CHUNK < p.V; chunk += LANES) {
                const Pack<typename E::T> x = load16(o.at(b, rows.row + r, h) + chunk * CHUNK);
                const Pack<typename E::T> y = load16(go + E::offset(r, chunk));
                for (int e = 0; e < CHUNK; e++) dot = fmaf(to_float(x.v[e]), to_float(y.v[e]), dot);
            }
        for (int d = 1; d < LANES; d *= 2) dot += __shfl_xor_sync(ALL_LANES, dot, d);
        if (lane > 0) continue;
        const float sum = r < rows.count ? *lse.at(p, b, rows.row + r, h) : -INFINITY;
        out[r].lse2 = sum == -INFINITY ? INFINITY : sum * LOG2_E;
        out[r].delta = dot;
        if (r < rows.count) *delta.at(p, b, rows.row + r, h) = dot;
    }
    __syncwarp();
}

/* s: scores, becomes ds. dp: do v. */
template <class E>
__device__ __forceinline__ void gradient_step(const AttnProblem &p, typename E::Scores &s, typename E::Scores &dp,
                                              const RowStatistics *statistics, int position, int first_key)
{
    if (p.dropout.threshold) {
        typename E::Keep keep;
        E::template keep_bits<false>(keep, head_dropout(p, blockIdx.z, blockIdx.y), position, first_key);
        UNROLL
        for (int i = 0; i < E::R; i++)
            UNROLL
            for (int j = 0; j < E::N; j++) dp.at(i, j) = E::kept(keep, i, j) ? dp.at(i, j) * p.dropout.scale : 0.0f;
    }
    const typename E::Place at = E::place();
    const float scale2 = p.scale * LOG2_E;
    if (p.softcap > 0) { /* dp - delta, times the slope */
        UNROLL
        for (int i = 0; i < E::R; i++) {
            const float delta = statistics[at.row(i)].delta;
            UNROLL
            for (int j = 0; j < E::N; j++)
                dp.at(i, j) = fmaf(dp.at(i, j) - delta, cap_slope(p, s.at(i, j)), delta);
        }
    }
    UNROLL
    for (int i = 0; i < E::R; i++) {
        const RowStatistics row = statistics[at.row(i)];
        UNROLL
        for (int j = 0; j < E::N; j++)
            s.at(i, j) = E::exp2(fmaf(s.at(i, j), scale2, -row.lse2)) * (dp.at(i, j) - row.delta);
    }
}

template <class E>
__global__ void __launch_bounds__(E::THREADS, E::BLOCKS)
    attention_dq_kernel(AttnProblem p, QueryHeads<typename E::T> dq, WideRows wide, RowValues delta,
                        Heads<const typename E::T> go, QueryHeads<const typename E::T> q, Heads<const typename E::T> k,
                        Heads<const typename E::T> v, Heads<const typename E::T> o, RowValues lse)
{
    typedef typename E::T T;
    DYNAMIC_SHARED(T, q_tile);
    SHARED(QueryBlock<T>, block, [1]);
    SHARED(RowStatistics, statistics, [E::ROWS]);
    T *go_tile = q_tile + DqTile<E>::Q, *kv = go_tile + DqTile<E>::Q; /* kv: K, V, and both again */
    float *stage = reinterpret_cast<float *>(kv + 4 * DqTile<E>::K);
    begin_queries<E>(p, block, q, k, v);
    if (block->tiles == 0 && wide.resumed) return; /* dq and delta stay as they are */

    typename E::Sums sum;
    E::clear(sum);
    copy_rows<E, E::ROWS>(q_tile, block->q, q.row, block->rows.count, p.C);
    copy_rows<E, E::ROWS>(go_tile, go.at(blockIdx.z, block->rows.row, blockIdx.y), go.row, block->rows.count, p.V);
    cp_async_commit();
    for (int i = -1; i < block->tiles; i++) { /* -1: the queries themselves */
        cp_async_wait<0>();
        __syncthreads(); /* tile i is here; nobody reads tile i - 1 any more */
        if (i + 1 < block->tiles) {
            const RowTile next = walk_tile(block->walk, p.k, i + 1, E::COLS);
            T *to = kv + (i + 1) % 2 * (2 * DqTile<E>::K);
            copy_rows<E, E::COLS>(to, block->k + next.row * k.row, k.row, next.count, p.C);
            copy_rows<E, E::COLS>(to + DqTile<E>::K, block->v + next.row * v.row, v.row, next.count, p.V);
            cp_async_commit();
        }
        if (i < 0) {
            row_statistics<E>(p, statistics, go_tile, o, lse, delta, block->rows);
            continue;
        }
        const RowTile keys = walk_tile(block->walk, p.k, i, E::COLS);
        const Range warp_rows = warp_range<E>(block->rows);
        if (!__any_sync(ALL_LANES, may_see(p, warp_rows, range_of(keys)))) continue;
        const T *k_tile = kv + i % 2 * (2 * DqTile<E>::K);
        typename E::Scores s, dp;
        E::clear(s);
        E::multiply(s, q_tile, k_tile);
        if (p.softcap > 0) cap_scores<E>(p, s); /* while registers for dp are free */
        E::clear(dp);
        E::multiply(dp, go_tile, k_tile + DqTile<E>::K);
        if (keys.count < E::COLS || !all_see(warp_rows, block->most_low, range_of(keys)))
            mask_keys<E>(p, s, blockIdx.z, block->rows, keys);
        gradient_step<E>(p, s, dp, statistics, block->rows.position, keys.position);
        E::add_weighted(sum, s, k_tile, stage);
    }
    float factor[E::R], keep[E::R];
    UNROLL
    for (int i = 0; i < E::R; i++) {
        factor[i] = p.scale;
        keep[i] = 1;
    }
    const RowTile &rows = block->rows;
    if (wide.rows.data)
        E::add_wide(sum, factor, keep, wide.resumed, wide.rows.at(p, blockIdx.z, rows.row, blockIdx.y), wide.rows.row,
                    rows.count, p.C);
    else
        E::store(sum, factor, q_tile, dq.at(p, blockIdx.z, rows.row, blockIdx.y), dq.row, rows.count, p.C);
}

/* ---- launching ---- */

template <class E> static Err launch_dq(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    typedef typename E::T T;
    const int64_t tiles = walk_count(walk_all(p.q, E::ROWS));
    if (tiles == 0 || a.q.dim[0] == 0 || a.q.dim[2] == 0) return ERR_OK;
    TRY(allow_shared(attention_dq_kernel<E>, DqTile<E>::BYTES));
    const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(a.q.dim[2]), static_cast<unsigned>(a.q.dim[0]));
    LAUNCH((attention_dq_kernel<E>), grid, E::THREADS, DqTile<E>::BYTES, cuda_stream(s), p, query_heads_of<T>(a.dq),
           wide_rows(a.dq, a.q.dtype, a.resumed, a.resumed), values_of(a.delta), heads_of<const T>(a.go),
           query_heads_of<const T>(a.q), heads_of<const T>(a.k), heads_of<const T>(a.v), heads_of<const T>(a.o),
           values_of(a.lse));
    return ERR_OK;
}

/* In tiles of E, or where a block cannot have those of SMALL. */
template <class E, class SMALL = E> static Err fit_dq(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    static_assert(DqTile<SMALL>::ALL <= SHARED_LEAST, "runs everywhere");
    if (DqTile<E>::ALL <= s->dev->shared_bytes) return launch_dq<E>(s, p, a);
    return launch_dq<SMALL>(s, p, a);
}

/* MmaEngine<type, width, row tiles a warp, warps, columns, blocks an SM> */
template <class T> static Err dq_16(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    if (widest(p) <= 32) return fit_dq<MmaEngine<T, 32, 2, 4, 32, 3>>(s, p, a);
    if (widest(p) <= 64) return fit_dq<MmaEngine<T, 64, 2, 4, 32, 2>>(s, p, a);
    if (widest(p) <= 96) return fit_dq<MmaEngine<T, 96, 2, 4, 32, 2>>(s, p, a);
    if (widest(p) <= 128) return fit_dq<MmaEngine<T, 128, 2, 4, 32, 2>>(s, p, a);
    if (widest(p) <= 192) return fit_dq<MmaEngine<T, 192, 1, 4, 32, 2>>(s, p, a);
    return fit_dq<MmaEngine<T, 256, 1, 4, 32, 2>, MmaEngine<T, 256, 1, 4, 16, 1>>(s, p, a);
}

/* (for comparisons rather than for speed: one form, which runs everywhere) */
static Err dq_32(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    if (widest(p) <= 64) return fit_dq<FmaEngine<64, 4, 32>>(s, p, a);
    if (widest(p) <= 128) return fit_dq<FmaEngine<128, 2, 16>>(s, p, a);
    return fit_dq<FmaEngine<256, 1, 8>>(s, p, a);
}

Err attention_dq(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    if (attention_bwd_hopper_fits(p, a)) return attention_dq_hopper(s, p, a);
    if (a.q.dtype == F32) return dq_32(s, p, a);
    return a.q.dtype == BF16 ? dq_16<bf16>(s, p, a) : dq_16<f16>(s, p, a);
}

extern "C" Err cuda_attention_bwd(Stream *s, const attention_bwd_args *a)
{
    AttnProblem p;
    attention_fwd_args f = {};
    f.q = a->q, f.k = a->k, f.v = a->v, f.doc = a->doc, f.sample = a->sample;
    f.q_span = a->q_span, f.k_span = a->k_span;
    f.scale = a->scale, f.softcap = a->softcap, f.window = a->window, f.dropout = a->dropout, f.head0 = a->head0;
    TRY(attention_problem(&p, &f));
    const struct {
        const char *name;
        Tensor t;
    } matrix[] = { { "dk", a->dk }, { "dv", a->dv }, { "go", a->go }, { "q", a->q },
                   { "k", a->k },   { "v", a->v },   { "o", a->o } };
    for (const auto &m : matrix) TRY(attention_aligned(m.name, m.t));
    TRY(attention_result("dq", a->dq, a->resumed));
    if (a->dk.dim[0] != a->q.dim[0])
        return err_set(ERR_SHAPE, "attention_bwd: chunks apart, whose sums have an order, are built for the cpu alone");
    const AttnBackward b = { a->dq, a->dk, a->dv, a->go, a->q, a->k, a->v, a->o, a->lse, a->delta, a->resumed != 0 };
    TRY(attention_dq(s, p, b)); /* first: it writes delta */
    return attention_dkv(s, p, b);
}
