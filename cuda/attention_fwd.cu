/*
 * Attention, forward, and the checks of all attention ops. Engines, tiles, masks: attention.cuh.
 *
 * Per query row, over tiles of keys in ascending position:
 *
 *   s = q k^T, masked -inf          m' = max(m, max s)         r = exp(scale (m - m'))
 *   p = exp(scale (s - m'))         l  = l r + sum p           o = o r + (p kept by dropout) v
 *
 * and at the end o / (l (1 - p_drop)) and lse = scale m + log l, a sink being added to m and l before. exp is 2^x
 * with scale log2(e) folded into one FMA. A row without keys: o = 0, lse = -inf. Tiles that the mask empties are never
 * visited (their range follows from positions, window and documents); a tile is masked only where a warp needs it.
 * Keys that come in several calls: o, m and l of each call are merged, in fp32, with those of the calls before.
 *
 * Mapping  a block has 128 (64) queries of one head, a warp 32 (16); 4 warps; keys in tiles of 64. Scores, sums
 *          and statistics in registers. K and V of a tile have one buffer each and take turns: while scores are
 *          computed V arrives, while o is added to the next K arrives. The longest rows of a head start first.
 * Work     4 C FLOP a score; B = 64, H = 12, T = 1024, C = 64, causal: 103 GFLOP (half of T^2), 206 with full
 *          diagonal tiles; at 790 TFLOP/s 130 us. One exp a score: 16 a clock and SM make C = 64 bound by both.
 * Traffic  q, o once, k and v once a block of queries, from L2: 400 MB for the example, 94 us at 4.3 TB/s. The
 *          registers bound occupancy: 2 blocks of 4 warps an SM. Resumed: fp32 o read and written besides.
 * Hopper   most calls of 16 bits go to attention_fwd_hopper.cu, whose head says which.
 * Needs    widths of keys and of values up to 256, multiples of 8: both in tiles of the larger one, zeros behind the
 *          smaller; rows at multiples of 16 bytes; lse any row length.
 * Source   Dao 2023 (FlashAttention-2); Milakov & Gimelshein 2018 (online softmax).
 */
#include "attention_fma.cuh"
#include "attention_fwd.cuh"
#include "attention_mma.cuh"

/* ---- kernel ---- */

template <class E> struct FwdTile {
    static constexpr int Q = E::ROWS * E::PITCH, K = E::COLS * E::PITCH; /* elements of shared memory */
    static constexpr int BYTES = (Q + 2 * K) * static_cast<int>(sizeof(typename E::T)) + E::STAGE * 4;
    static_assert(BYTES + shared_arrays(sizeof(QueryBlock<typename E::T>)) <= SHARED_LEAST, "runs everywhere");
};

template <class E>
__global__ void __launch_bounds__(E::THREADS, E::BLOCKS)
    attention_fwd_kernel(AttnProblem p, Heads<typename E::T> out, RowValues lse, RunningRows running,
                         QueryHeads<const typename E::T> q, Heads<const typename E::T> k, Heads<const typename E::T> v,
                         long long *logit_max)
{
    typedef typename E::T T;
    DYNAMIC_SHARED(T, q_tile);
    SHARED(QueryBlock<T>, block, [1]);
    T *k_tile = q_tile + FwdTile<E>::Q, *v_tile = k_tile + FwdTile<E>::K;
    float *stage = reinterpret_cast<float *>(v_tile + FwdTile<E>::K);
    begin_queries<E>(p, block, q, k, v);
    if (block->tiles == 0 && running.o.resumed && running.unfinished) return; /* all stays as it is */

    FwdRows<E> rows;
    typename E::Sums o;
    E::clear(o);
    UNROLL
    for (int i = 0; i < E::R; i++) {
        rows.max[i] = -INFINITY;
        rows.sum[i] = 0;
    }
    if (block->tiles > 0) {
        const RowTile keys = walk_tile(block->walk, p.k, 0, E::COLS);
        copy_rows<E, E::ROWS>(q_tile, block->q, q.row, block->rows.count, p.C);
        copy_rows<E, E::COLS>(k_tile, block->k + keys.row * k.row, k.row, keys.count, p.C);
        cp_async_commit();
    }
    for (int i = 0; i < block->tiles; i++) {
        const RowTile keys = walk_tile(block->walk, p.k, i, E::COLS);
        cp_async_wait<0>();
        __syncthreads(); /* K is here; nobody reads V any more */
        copy_rows<E, E::COLS>(v_tile, block->v + keys.row * v.row, v.row, keys.count, p.V);
        cp_async_commit();
        const Range warp_rows = warp_range<E>(block->rows);
        const bool seen = __any_sync(ALL_LANES, may_see(p, warp_rows, range_of(keys)));
        typename E::Scores s;
        E::clear(s); /* also where not seen: registers left undefined would have to last from tile to tile */
        if (seen) E::multiply(s, q_tile, k_tile);
        cp_async_wait<0>();
        __syncthreads(); /* V is here; nobody reads K any more */
        if (i + 1 < block->tiles) {
            const RowTile next = walk_tile(block->walk, p.k, i + 1, E::COLS);
            copy_rows<E, E::COLS>(k_tile, block->k + next.row * k.row, k.row, next.count, p.C);
            cp_async_commit();
        }
        if (!seen) continue;
        if (p.softcap > 0) cap_scores<E>(p, s);
        if (keys.count < E::COLS || !all_see(warp_rows, block->most_low, range_of(keys)))
            mask_keys<E>(p, s, blockIdx.z, block->rows, keys);
        float factor[E::R];
        softmax_step<E>(s, factor, rows, p.scale * LOG2_E);
        E::scale_rows(o, factor);
        if (p.dropout.threshold)
            drop_keys<E>(s, head_dropout(p, blockIdx.z, blockIdx.y), block->rows.position, keys.position);
        E::add_weighted(o, s, v_tile, stage);
    }
    finish_rows<E>(p, o, rows, block->rows, blockIdx.z, blockIdx.y, q_tile, out, lse, running, logit_max);
}

/* ---- launching ---- */

template <class E> static Err launch_fwd(Stream *s, const AttnProblem &p, const AttnForward &a)
{
    typedef typename E::T T;
    const int64_t tiles = walk_count(walk_all(p.q, E::ROWS));
    if (tiles == 0 || a.q.dim[0] == 0 || a.q.dim[2] == 0) return ERR_OK;
    TRY(allow_shared(attention_fwd_kernel<E>, FwdTile<E>::BYTES));
    const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(a.q.dim[2]), static_cast<unsigned>(a.q.dim[0]));
    const RunningRows running = { wide_rows(a.o, a.q.dtype, a.resumed || a.unfinished, a.resumed), values_of(a.max),
                                  values_of(a.sum), a.unfinished };
    LAUNCH((attention_fwd_kernel<E>), grid, E::THREADS, FwdTile<E>::BYTES, cuda_stream(s), p, heads_of<T>(a.o),
           values_of(a.lse), running, query_heads_of<const T>(a.q), heads_of<const T>(a.k), heads_of<const T>(a.v),
           data_of<long long>(a.logit_max));
    return ERR_OK;
}

/* MmaEngine<type, width, row tiles a warp, warps, columns, blocks an SM> */
template <class T> static Err fwd_16(Stream *s, const AttnProblem &p, const AttnForward &a)
{
    if (widest(p) <= 32) return launch_fwd<MmaEngine<T, 32, 2, 4, 64, 3>>(s, p, a);
    if (widest(p) <= 64) return launch_fwd<MmaEngine<T, 64, 2, 4, 64, 2>>(s, p, a);
    if (widest(p) <= 96) return launch_fwd<MmaEngine<T, 96, 2, 4, 64, 2>>(s, p, a);
    if (widest(p) <= 128) return launch_fwd<MmaEngine<T, 128, 2, 4, 64, 2>>(s, p, a);
    if (widest(p) <= 192) return launch_fwd<MmaEngine<T, 192, 1, 4, 64, 2>>(s, p, a);
    return launch_fwd<MmaEngine<T, 256, 1, 4, 64, 2>>(s, p, a);
}

static Err fwd_32(Stream *s, const AttnProblem &p, const AttnForward &a)
{
    if (widest(p) <= 64) return launch_fwd<FmaEngine<64, 4, 32>>(s, p, a);
    if (widest(p) <= 128) return launch_fwd<FmaEngine<128, 4, 32>>(s, p, a);
    return launch_fwd<FmaEngine<256, 2, 16>>(s, p, a);
}

extern "C" Err cuda_attention_fwd(Stream *s, const attention_fwd_args *a)
{
    AttnProblem p;
    TRY(attention_problem(&p, a));
    p.sink = a->sink.data;
    const bool several = a->resumed || a->unfinished;
    if (several && (!a->max.data || !a->sum.data))
        return err_set(ERR_SHAPE, "attention_fwd: keys in several calls need max and sum");
    TRY(attention_result("o", a->o, several));
    TRY(attention_aligned("q", a->q));
    TRY(attention_aligned("k", a->k));
    TRY(attention_aligned("v", a->v));
    AttnForward f = { a->o, a->lse, a->max, a->sum, a->logit_max, a->q, a->k, a->v, a->resumed != 0,
                      a->unfinished != 0 };
    if (!several) f.max.data = f.sum.data = NULL;
    if (a->q.dtype == F32) return fwd_32(s, p, f);
    if (attention_fwd_hopper_fits(p, f)) return attention_fwd_hopper(s, p, f);
    return a->q.dtype == BF16 ? fwd_16<bf16>(s, p, f) : fwd_16<f16>(s, p, f);
}

/* ---- checks ---- */

static Err spans_of(const char *what, Spans s, int64_t rows, AttnSpans *out)
{
    if (s.count[0] < 0 || s.count[1] < 0 || s.count[0] + s.count[1] != rows)
        return err_set(ERR_SHAPE, "attention: spans of %s hold %lld + %lld positions, it has %lld rows", what,
                       static_cast<long long>(s.count[0]), static_cast<long long>(s.count[1]),
                       static_cast<long long>(rows));
    for (int i = 0; i < 2; i++) {
        const int64_t first = s.count[i] ? s.first[i] : 0, other = s.first[1 - i];
        const bool apart = first + s.count[i] <= other || other + s.count[1 - i] <= first;
        if (first < 0 || first + s.count[i] > INT32_MAX || (s.count[0] && s.count[1] && !apart))
            return err_set(ERR_SHAPE, "attention: spans of %s overlap or leave the range of positions", what);
        out->first[i] = static_cast<int>(first);
        out->count[i] = static_cast<int>(s.count[i]);
    }
    return ERR_OK;
}

Err attention_problem(AttnProblem *p, const attention_fwd_args *a)
{
    const int64_t H = a->q.dim[2], K = a->k.dim[2], C = a->q.dim[3], V = a->v.dim[3];
    if (K < 1 || H % K)
        return err_set(ERR_SHAPE, "attention: %lld query heads on %lld key heads", static_cast<long long>(H),
                       static_cast<long long>(K));
    if (C < 8 || C > 256 || C % 8)
        return err_set(ERR_SHAPE, "attention: head width is %lld, CUDA kernels are for multiples of 8 up to 256",
                       static_cast<long long>(C));
    if (V < 8 || V > 256 || V % 8)
        return err_set(ERR_SHAPE, "attention: width of values is %lld, CUDA kernels are for multiples of 8 up to 256",
                       static_cast<long long>(V));
    if (!(a->scale > 0))
        return err_set(ERR_SHAPE, "attention: scale is %g, it must be above 0", static_cast<double>(a->scale));
    TRY(spans_of("q", a->q_span, a->q.dim[1], &p->q));
    TRY(spans_of("k", a->k_span, a->k.dim[1], &p->k));
    p->T = static_cast<int>(a->q.dim[1]);
    p->C = static_cast<int>(C);
    p->V = static_cast<int>(V);
    p->group = static_cast<int>(H / K);
    p->window = a->window <= 0 ? 0 : a->window < INT32_MAX ? static_cast<int>(a->window) : INT32_MAX;
    p->scale = a->scale;
    p->softcap = a->softcap;
    p->cap_inner = p->cap_outer = p->cap_unit = 0;
    if (a->softcap > 0) {
        p->cap_unit = a->scale / a->softcap;
        p->cap_inner = 2 * LOG2_E * p->cap_unit;
        p->cap_outer = a->softcap / a->scale;
    }
    p->sink = NULL;
    p->doc = data_of<const int32_t>(a->doc);
    p->doc_ld = a->doc.ld;
    p->sample = data_of<const int64_t>(a->sample);
    p->dropout = a->dropout;
    p->head0 = static_cast<int>(a->head0);
    return ERR_OK;
}

Err attention_aligned(const char *name, Tensor t)
{
    if (rows_aligned(t)) return ERR_OK;
    return err_set(ERR_SHAPE, "attention: rows of %s do not begin at multiples of 16 bytes", name);
}

Err attention_result(const char *name, Tensor t, bool several)
{
    if (several && t.dtype != F32)
        return err_set(ERR_SHAPE, "attention: %s is %s: keys in several calls need it in f32", name,
                       dtype_name(t.dtype));
    return attention_aligned(name, t);
}
