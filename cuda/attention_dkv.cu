/*
 * Attention, backward: dk and dv. Formulas and why two kernels: attention_dq.cu; engines: attention.cuh.
 *
 *   dv = 1 / (1 - p_drop) sum over queries of p kept do          dk = scale sum over queries of ds q
 *
 * over all query heads that share the key head, one after another: grouped queries need no second sum. Scores
 * are computed transposed, keys down, so that p and ds are left operands again.
 *
 * Mapping  a block has 128 (64) keys of one head, a warp 32 (16): 4 warps, or 8 where two sums of 32 rows are
 *          more than the registers; queries in tiles of 32 or 64, two buffers, one barrier a tile. From width 192
 *          on two blocks share the work, one for dk and one for dv (5 products instead of 4).
 * Rows     lse and delta of a tile's queries go through registers: read from global memory while the tile before is
 *          computed, stored to shared memory after it.
 * Skipping causal and window: by positions. Documents: a table of the lows of each tile of queries, written by a
 *          small kernel before (attention_lows.cu), tells which tiles see none of the keys.
 * Work     8 C FLOP a score; B = 64, H = 12, T = 1024, C = 64, causal: 206 GFLOP, at 790 TFLOP/s 261 us.
 * Traffic  k, v, dk, dv once, q and do once a block of keys, from L2: 400 MB for the example, 94 us at 4.3 TB/s.
 *          On GPUs whose blocks have less shared memory, tiles of half the queries from width 128 on.
 * Needs    as forward; with documents 8 bytes of workspace a tile of queries.
 * Source   Dao 2023 (FlashAttention-2).
 */
#include "attention_fma.cuh"
#include "attention_lows.cuh"
#include "attention_mma.cuh"

/* ---- kernel ---- */

/* The block's keys; in shared memory, as in QueryBlock. */
struct KeyBlock {
    RowTile keys;
    TileWalk walk;  /* tiles of queries that may see the keys */
    int all[2];     /* tiles of queries there are in each span */
    int tiles;      /* of the walk, over all heads of the group */
    int64_t q;      /* where the first of these heads begins, in elements of the queries */
};

template <class E> struct DkvTile {
    static constexpr int K = E::ROWS * E::PITCH, Q = E::COLS * E::PITCH; /* elements of shared memory */
    static constexpr int BYTES = (2 * K + 4 * Q) * static_cast<int>(sizeof(typename E::T)) + E::STAGE * 4;
    static constexpr int ALL = BYTES + shared_arrays(sizeof(KeyBlock) + 2 * E::COLS * sizeof(QueryValues));
};

template <class E>
__device__ __forceinline__ void begin_keys(const AttnProblem &p, KeyBlock *block, const Lows *table,
                                           const QueryHeads<const typename E::T> &q, int kh)
{
    if (threadIdx.x < WARP) {
        KeyBlock x;
        x.keys = walk_tile(walk_all(p.k, E::ROWS), p.k, blockIdx.x, E::ROWS);
        const int last = range_of(x.keys).last, reach = p.window ? p.window - 1 : INT_MAX;
        x.walk = walk_of(p.q, x.keys.position, last > INT_MAX - reach ? INT_MAX : last + reach, E::COLS);
        const TileWalk all = walk_all(p.q, E::COLS);
        x.all[0] = all.tiles[0], x.all[1] = all.tiles[1];
        if (table) trim_walk(&x.walk, x.all, table, last, blockIdx.z);
        x.tiles = walk_count(x.walk) * p.group;
        x.q = q.offset(p, blockIdx.z, 0, kh * p.group);
        if (threadIdx.x == 0) *block = x;
    }
    __syncthreads();
}

/* Tile i of the block: its head within the group, and its rows. */
struct QueryTile {
    int head;
    RowTile rows;
    int most_low; /* largest row_low */
};

template <class E>
__device__ __forceinline__ QueryTile query_tile(const AttnProblem &p, const KeyBlock *block, const Lows *table, int i)
{
    const int a_head = walk_count(block->walk), n = i % a_head;
    QueryTile t = { i / a_head, walk_tile(block->walk, p.q, n, E::COLS), 0 };
    t.most_low = table ? table[lows_index(block->walk, block->all, n, blockIdx.z)].most
                       : row_low(p, 0, 0, range_of(t.rows).last);
    return t;
}

/* Numbers that each thread, one a query, reads for a tile of queries. */
template <class E>
__device__ __forceinline__ QueryValues query_values(const AttnProblem &p, const RowTile &rows, int h,
                                                    const RowValues &lse, const RowValues &delta)
{
    const int i = threadIdx.x, b = blockIdx.z;
    QueryValues x = { INFINITY, 0 };
    if (i < E::COLS && i < rows.count) {
        const float sum = *lse.at(p, b, rows.row + i, h);
        x.lse2 = sum == -INFINITY ? INFINITY : sum * LOG2_E;
        x.delta = *delta.at(p, b, rows.row + i, h);
    }
    return x;
}

/* s: scores, becomes the weights of dv. dp: do v, becomes ds. position: of the block's first key. */
template <class E, bool CAPPED>
__device__ __forceinline__ void weights_step(const AttnProblem &p, typename E::Scores &s, typename E::Scores &dp,
                                             const QueryValues *values, int position, int first_query, int h)
{
    const typename E::Place at = E::place();
    const float scale2 = p.scale * LOG2_E;
    typename E::Keep keep = {};
    if (p.dropout.threshold) {
        E::template keep_bits<true>(keep, head_dropout(p, blockIdx.z, h), position, first_query);
        UNROLL
        for (int i = 0; i < E::R; i++)
            UNROLL
            for (int j = 0; j < E::N; j++) dp.at(i, j) = E::kept(keep, i, j) ? dp.at(i, j) * p.dropout.scale : 0.0f;
    }
    if (CAPPED && p.softcap > 0) { /* dp - delta, times the slope */
        UNROLL
        for (int j = 0; j < E::N; j++) {
            const float delta = values[at.column(j)].delta;
            UNROLL
            for (int i = 0; i < E::R; i++)
                dp.at(i, j) = fmaf(dp.at(i, j) - delta, cap_slope(p, s.at(i, j)), delta);
        }
    }
    UNROLL
    for (int j = 0; j < E::N; j++) {
        const float lse2 = values[at.column(j)].lse2, delta = values[at.column(j)].delta;
        UNROLL
        for (int i = 0; i < E::R; i++) {
            const float w = E::exp2(fmaf(s.at(i, j), scale2, -lse2));
            s.at(i, j) = w;
            dp.at(i, j) = w * (dp.at(i, j) - delta);
        }
    }
    if (p.dropout.threshold) {
        UNROLL
        for (int i = 0; i < E::R; i++)
            UNROLL
            for (int j = 0; j < E::N; j++) s.at(i, j) = E::kept(keep, i, j) ? s.at(i, j) : 0.0f;
    }
}

template <class E>
__device__ __forceinline__ void store_keys(const typename E::Sums &sum, float scale, typename E::T *tile,
                                           const Heads<typename E::T> &out, const RowTile &keys, int kh, int width)
{
    float factor[E::R];
    UNROLL
    for (int i = 0; i < E::R; i++) factor[i] = scale;
    E::store(sum, factor, tile, out.at(blockIdx.z, keys.row, kh), out.row, keys.count, width);
}

/* SPLIT: even blockIdx.y compute dv, odd ones dk. CAPPED: scores may be, which takes registers. */
template <class E, bool SPLIT, bool CAPPED>
__global__ void __launch_bounds__(E::THREADS, E::BLOCKS)
    attention_dkv_kernel(AttnProblem p, const Lows *table, Heads<typename E::T> dk, Heads<typename E::T> dv,
                         Heads<const typename E::T> go, QueryHeads<const typename E::T> q, Heads<const typename E::T> k,
                         Heads<const typename E::T> v, RowValues lse, RowValues delta)
{
    typedef typename E::T T;
    DYNAMIC_SHARED(T, k_tile);
    SHARED(KeyBlock, block, [1]);
    SHARED(QueryValues, values, [2][E::COLS]);
    T *v_tile = k_tile + DkvTile<E>::K, *qgo = v_tile + DkvTile<E>::K; /* qgo: Q, dO, and both again */
    float *stage = reinterpret_cast<float *>(qgo + 4 * DkvTile<E>::Q);
    const int kh = blockIdx.y / (SPLIT ? 2 : 1);
    const bool want_dk = !SPLIT || blockIdx.y % 2 == 1;
    begin_keys<E>(p, block, table, q, kh);

    typename E::Sums sum[SPLIT ? 1 : 2]; /* dv, dk; or the one that is wanted */
    E::clear(sum[0]);
    if (!SPLIT) E::clear(sum[1]);
    if (block->tiles > 0) {
        copy_rows<E, E::ROWS>(k_tile, k.at(blockIdx.z, block->keys.row, kh), k.row, block->keys.count, p.C);
        copy_rows<E, E::ROWS>(v_tile, v.at(blockIdx.z, block->keys.row, kh), v.row, block->keys.count, p.V);
    }
    for (int i = -1; i < block->tiles; i++) { /* -1: only starts tile 0; the keys come with it */
        cp_async_wait<0>();
        __syncthreads(); /* tile i is here; nobody reads tile i - 1 any more */
        QueryValues ahead = { 0, 0 };
        if (i + 1 < block->tiles) {
            const QueryTile next = query_tile<E>(p, block, table, i + 1);
            const int h = kh * p.group + next.head;
            T *to = qgo + (i + 1) % 2 * (2 * DkvTile<E>::Q);
            const T *queries = q.data + block->q + next.head * q.head + next.rows.row * q.row;
            copy_rows<E, E::COLS>(to, queries, q.row, next.rows.count, p.C);
            copy_rows<E, E::COLS>(to + DkvTile<E>::Q, go.at(blockIdx.z, next.rows.row, h), go.row,
                                  next.rows.count, p.V);
            cp_async_commit();
            ahead = query_values<E>(p, next.rows, h, lse, delta);
        }
        if (i >= 0) {
            const QueryTile now = query_tile<E>(p, block, table, i);
            const Range warp_keys = warp_range<E>(block->keys);
            if (__any_sync(ALL_LANES, may_see(p, range_of(now.rows), warp_keys))) {
                const T *q_tile = qgo + i % 2 * (2 * DkvTile<E>::Q), *go_tile = q_tile + DkvTile<E>::Q;
                typename E::Scores s, dp;
                E::clear(s);
                E::multiply(s, k_tile, q_tile);
                if (CAPPED && p.softcap > 0) cap_scores<E>(p, s);
                E::clear(dp);
                if (want_dk) E::multiply(dp, v_tile, go_tile);
                if (!all_see(range_of(now.rows), now.most_low, warp_keys))
                    mask_queries<E>(p, s, blockIdx.z, block->keys.position, now.rows);
                weights_step<E, CAPPED>(p, s, dp, values[i % 2], block->keys.position, now.rows.position,
                                        kh * p.group + now.head);
                if (!SPLIT || !want_dk) E::add_weighted(sum[0], s, go_tile, stage);
                if (want_dk) E::add_weighted(sum[SPLIT ? 0 : 1], dp, q_tile, stage);
            }
        }
        if (i + 1 < block->tiles && threadIdx.x < E::COLS) values[(i + 1) % 2][threadIdx.x] = ahead;
    }
    const float dv_scale = p.dropout.threshold ? p.dropout.scale : 1.0f;
    if (!SPLIT || !want_dk) store_keys<E>(sum[0], dv_scale, v_tile, dv, block->keys, kh, p.V);
    if (want_dk) store_keys<E>(sum[SPLIT ? 0 : 1], p.scale, k_tile, dk, block->keys, kh, p.C);
}

/* ---- launching ---- */

template <class E, bool SPLIT, bool CAPPED>
static Err launch_dkv(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    typedef typename E::T T;
    const Lows *table;
    const int64_t tiles = walk_count(walk_all(p.k, E::ROWS)), heads = a.k.dim[2] * (SPLIT ? 2 : 1);
    if (tiles == 0 || a.k.dim[0] == 0) return ERR_OK;
    TRY(attention_lows(s, p, a.k.dim[0], E::COLS, &table));
    TRY(allow_shared(attention_dkv_kernel<E, SPLIT, CAPPED>, DkvTile<E>::BYTES));
    const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(heads), static_cast<unsigned>(a.k.dim[0]));
    LAUNCH((attention_dkv_kernel<E, SPLIT, CAPPED>), grid, E::THREADS, DkvTile<E>::BYTES, cuda_stream(s), p, table,
           heads_of<T>(a.dk), heads_of<T>(a.dv), heads_of<const T>(a.go), query_heads_of<const T>(a.q),
           heads_of<const T>(a.k), heads_of<const T>(a.v), values_of(a.lse), values_of(a.delta));
    return ERR_OK;
}

/* In tiles of E, or where a block cannot have those of SMALL. */
template <class E, bool SPLIT, bool CAPPED, class SMALL = E>
static Err fit_dkv(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    static_assert(DkvTile<SMALL>::ALL <= SHARED_LEAST, "runs everywhere");
    if (DkvTile<E>::ALL <= s->dev->shared_bytes) return launch_dkv<E, SPLIT, CAPPED>(s, p, a);
    return launch_dkv<SMALL, SPLIT, CAPPED>(s, p, a);
}

/* MmaEngine<type, width, row tiles a warp, warps, columns, blocks an SM> */
template <class T> static Err dkv_16(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    if (widest(p) <= 32) return fit_dkv<MmaEngine<T, 32, 2, 4, 32, 2>, false, false>(s, p, a);
    if (widest(p) <= 64) return fit_dkv<MmaEngine<T, 64, 2, 4, 32, 2>, false, false>(s, p, a);
    if (widest(p) <= 96) return fit_dkv<MmaEngine<T, 96, 1, 8, 64, 1>, false, false>(s, p, a);
    if (widest(p) <= 128)
        return fit_dkv<MmaEngine<T, 128, 1, 8, 64, 1>, false, false, MmaEngine<T, 128, 1, 8, 32, 1>>(s, p, a);
    if (widest(p) <= 192) return fit_dkv<MmaEngine<T, 192, 1, 4, 32, 2>, true, false>(s, p, a);
    return fit_dkv<MmaEngine<T, 256, 1, 4, 32, 2>, true, false, MmaEngine<T, 256, 1, 4, 16, 1>>(s, p, a);
}

/* Tiles of half the size: the slopes of capped scores leave fewer registers. */
template <class T> static Err dkv_16_capped(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    if (widest(p) <= 64) return fit_dkv<MmaEngine<T, 64, 1, 4, 32, 2>, false, true>(s, p, a);
    if (widest(p) <= 128) return fit_dkv<MmaEngine<T, 128, 1, 8, 32, 1>, false, true>(s, p, a);
    return fit_dkv<MmaEngine<T, 256, 1, 4, 32, 2>, true, true, MmaEngine<T, 256, 1, 4, 16, 1>>(s, p, a);
}

/* (for comparisons rather than for speed: one form, which runs everywhere) */
static Err dkv_32(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    if (widest(p) <= 64) return fit_dkv<FmaEngine<64, 4, 32>, false, true>(s, p, a);
    if (widest(p) <= 128) return fit_dkv<FmaEngine<128, 2, 16>, false, true>(s, p, a);
    return fit_dkv<FmaEngine<256, 1, 8>, false, true>(s, p, a);
}

Err attention_dkv(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    if (attention_bwd_hopper_fits(p, a)) return attention_dkv_hopper(s, p, a);
    if (a.q.dtype == F32) return dkv_32(s, p, a);
    if (p.softcap > 0) return a.q.dtype == BF16 ? dkv_16_capped<bf16>(s, p, a) : dkv_16_capped<f16>(s, p, a);
    return a.q.dtype == BF16 ? dkv_16<bf16>(s, p, a) : dkv_16<f16>(s, p, a);
}
