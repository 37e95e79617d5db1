/*
 * Attention, backward, on Hopper (sm_90a): dq and delta by wgmma and TMA. Formulas: attention_dq.cu; blocks, tiles,
 * order, which calls come here: attention_bwd_hopper.cuh.
 *
 * Mapping  a block has 128 queries of one head, a warpgroup 64; keys and values in tiles of 64.
 *          ds, as it leaves the products, is the left operand of dq += ds k, and k's tile the right one as it lies: no
 *          shared memory is written in the loop.
 * Ahead    up to width 64 the products of the next tile are under way while ds is computed of those that are here.
 */
#include "attention_bwd_hopper.cuh"

/* What a block works on. */
struct QueryItem {
    RowTile rows;
    TileWalk walk;
    int most_low, tiles; /* largest row_low; tiles of keys to visit, -1: no item comes any more */
    int h, b;
};

/* STAGES of keys and values; SETS of the queries' tiles. AHEAD: products of the next tile beside. O comes through a
 * stage. */
template <class E, int STAGES_, int SETS_, bool AHEAD_> struct DqHopper {
    static constexpr int STAGES = STAGES_, SETS = SETS_;
    static constexpr bool AHEAD = AHEAD_;
    static constexpr int ROWS = E::ROWS * E::W, KEYS = E::COLS * E::W; /* elements */
    static constexpr int BYTES = (2 * SETS * ROWS + 2 * STAGES * KEYS) * 2;
    static_assert(ROWS == 2 * KEYS, "O fills a stage");
};

template <class E, class L> struct DqShared {
    QueryItem item[L::SETS];
    float lse2[L::SETS][E::ROWS];
    Barrier rows_full[L::SETS], rows_empty[L::SETS], keys_full[L::STAGES], keys_empty[L::STAGES];
};

/* Writes the item that comes next, by a warp; false: there is none any more. */
template <class E>
__device__ __forceinline__ bool query_item(const AttnProblem &p, const BlockOrder &order, QueryItem *out)
{
    BlockItem next = {};
    const bool there = block_item(order, &next), writes = threadIdx.x % WARP == 0;
    if (!there) {
        if (writes) out->tiles = -1, out->rows.count = 0;
        return false;
    }
    int least, most;
    const RowTile rows = walk_tile(walk_all(p.q, E::ROWS), p.q, order.tiles - 1 - next.tile, E::ROWS);
    tile_lows(p, next.b, rows, &least, &most);
    if (writes) {
        out->h = next.h, out->b = next.b;
        out->rows = rows;
        out->most_low = most;
        out->walk = walk_of(p.k, least, rows.position + rows.count - 1, E::COLS);
        out->tiles = walk_count(out->walk);
    }
    return true;
}

/* The warp that brings what the others work on. */
template <class E, class L>
__device__ __forceinline__ void load_queries(const AttnProblem &p, const BlockOrder &order, const TensorMap &q_map,
                                             const TensorMap &go_map, const TensorMap &o_map, const TensorMap &k_map,
                                             const TensorMap &v_map, const RowValues &lse, typename E::T *sets,
                                             typename E::T *keys, DqShared<E, L> *in)
{
    const int lane = threadIdx.x % WARP;
    Ring<L::SETS> set = { 0, 0 };
    Ring<L::STAGES> stage = { 0, 0 };
    for (bool there = true; there; set.next()) {
        QueryItem *x = &in->item[set.stage];
        Barrier *full = &in->rows_full[set.stage];
        barrier_wait(&in->rows_empty[set.stage], set.parity ^ 1);
        there = query_item<E>(p, order, x);
        __syncwarp();
        if (lane == 0 && !there) barrier_arrive(full);
        if (lane == 0 && there) {
            typename E::T *to = sets + set.stage * (2 * L::ROWS);
            barrier_expect(full, 2 * L::ROWS * 2);
            load_rows<E, E::ROWS>(to, q_map, full, p.group, x->h, x->rows.row, x->b);
            load_rows<E, E::ROWS>(to + L::ROWS, go_map, full, 1, x->h, x->rows.row, x->b);
        }
        for (int r = lane; r < E::ROWS; r += WARP) {
            const float sum = r < x->rows.count ? *lse.at(p, x->b, x->rows.row + r, x->h) : -INFINITY;
            in->lse2[set.stage][r] = sum == -INFINITY ? INFINITY : sum * LOG2_E;
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(full);
        const int tiles = x->tiles;
        for (int i = -1; i < tiles; i++) { /* -1: O */
            if (lane == 0) {
                typename E::T *to = keys + stage.stage * (2 * L::KEYS);
                full = &in->keys_full[stage.stage];
                barrier_wait(&in->keys_empty[stage.stage], stage.parity ^ 1);
                barrier_expect(full, 2 * L::KEYS * 2);
                if (i < 0) {
                    load_rows<E, E::ROWS>(to, o_map, full, 1, x->h, x->rows.row, x->b);
                } else {
                    const int row = walk_tile(x->walk, p.k, i, E::COLS).row, h = x->h / p.group;
                    load_rows<E, E::COLS>(to, k_map, full, 1, h, row, x->b);
                    load_rows<E, E::COLS>(to + L::KEYS, v_map, full, 1, h, row, x->b);
                }
            }
            stage.next();
        }
        __syncwarp();
    }
}

/* delta of this thread's two rows; 4 lanes a row. Chunks of o and go lie alike. */
template <class E>
__device__ __forceinline__ void row_deltas(float delta[2], const typename E::T *go, const typename E::T *o)
{
    constexpr int CHUNK = 8, CHUNKS = E::ATOM / CHUNK;
    const typename E::Place at = E::place();
    UNROLL
    for (int i = 0; i < 2; i++) {
        float dot = 0;
        UNROLL_BY(2)
        for (int c = threadIdx.x % 4; c < E::ATOMS * CHUNKS; c += 4) {
            const int offset = c / CHUNKS * (E::ROWS * E::ATOM) + at.row(i) * E::ATOM + c % CHUNKS * CHUNK;
            const Pack<typename E::T> x = load16(o + offset), y = load16(go + offset);
            UNROLL
            for (int e = 0; e < CHUNK; e++) dot = fmaf(to_float(x.v[e]), to_float(y.v[e]), dot);
        }
        dot += __shfl_xor_sync(ALL_LANES, dot, 1);
        delta[i] = dot + __shfl_xor_sync(ALL_LANES, dot, 2);
    }
}

/* s: scores, becomes the weights of the keys' values. */
template <class E>
__device__ __forceinline__ void query_weights(const AttnProblem &p, typename E::Scores &s, const float lse2[2])
{
    const float scale2 = p.scale * LOG2_E;
    UNROLL
    for (int i = 0; i < 2; i++)
        UNROLL
        for (int j = 0; j < E::N; j++) s.at(i, j) = E::exp2(fmaf(s.at(i, j), scale2, -lse2[i]));
}

/* What a warp knows of the rows it works on. */
struct QueryRows {
    float lse2[2], delta[2];
    Range warp; /* positions of the warp's rows */
};

/* s: scores, become capped and masked; weights where neither dropout nor a cap needs them as they are. */
template <class E, bool PLAIN>
__device__ __forceinline__ void query_scores(const AttnProblem &p, typename E::Scores &s, const QueryItem *x,
                                             const QueryRows &r, const RowTile &tile)
{
    if (!PLAIN && p.softcap > 0) cap_scores<E>(p, s);
    if (tile.count < E::COLS || !all_see(r.warp, x->most_low, range_of(tile))) mask_keys<E>(p, s, x->b, x->rows, tile);
    if (PLAIN) query_weights<E>(p, s, r.lse2);
}

/* s becomes ds. */
template <class E, bool PLAIN>
__device__ __forceinline__ void query_gradients(const AttnProblem &p, typename E::Scores &s, typename E::Scores &dp,
                                                const QueryItem *x, const QueryRows &row, int first_key)
{
    if (!PLAIN) {
        if (p.dropout.threshold) {
            typename E::Draws::Keep keep;
            E::Draws::template keep_bits<false>(keep, head_dropout(p, x->b, x->h), x->rows.position, first_key);
            UNROLL
            for (int i = 0; i < 2; i++)
                UNROLL
                for (int j = 0; j < E::N; j++)
                    dp.at(i, j) = E::Draws::kept(keep, i, j) ? dp.at(i, j) * p.dropout.scale : 0.0f;
        }
        if (p.softcap > 0) { /* dp - delta, times the slope */
            UNROLL
            for (int i = 0; i < 2; i++)
                UNROLL
                for (int j = 0; j < E::N; j++)
                    dp.at(i, j) = fmaf(dp.at(i, j) - row.delta[i], cap_slope(p, s.at(i, j)), row.delta[i]);
        }
        query_weights<E>(p, s, row.lse2);
    }
    UNROLL
    for (int i = 0; i < 2; i++)
        UNROLL
        for (int j = 0; j < E::N; j++) s.at(i, j) *= dp.at(i, j) - row.delta[i];
}

template <class E, class L, bool PLAIN>
__global__ void __launch_bounds__(E::THREADS, 1)
    attention_dq_hopper_kernel(AttnProblem p, BlockOrder order, TENSOR_MAP(q_map), TENSOR_MAP(go_map),
                               TENSOR_MAP(o_map), TENSOR_MAP(k_map), TENSOR_MAP(v_map), QueryHeads<typename E::T> dq,
                               WideRows wide, RowValues lse, RowValues delta_out)
{
#if HOPPER
    typedef typename E::T T;
    DYNAMIC_SHARED(T, sets); /* Q, dO; then stages of K, V */
    typedef DqShared<E, L> Shared;
    SHARED(Shared, in, [1]);
    T *keys = sets + L::SETS * 2 * L::ROWS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < L::SETS; i++)
            barrier_init(&in->rows_full[i], 2), barrier_init(&in->rows_empty[i], E::WARPS);
        for (int i = 0; i < L::STAGES; i++)
            barrier_init(&in->keys_full[i], 1), barrier_init(&in->keys_empty[i], E::WARPS);
        barriers_ready();
    }
    __syncthreads();
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0);
    if (warp >= E::WARPS) {
        registers_give<E::GIVE>();
        if (warp == E::WARPS)
            load_queries<E, L>(p, order, q_map, go_map, o_map, k_map, v_map, lse, sets, keys, in);
        return;
    }
    registers_take<E::TAKE>();
    const int group = warp / 4, lane = threadIdx.x % WARP;
    const typename E::Place at = E::place();
    const uint32_t key_begin = E::begin_of(keys);
    Ring<L::SETS> set = { 0, 0 };
    Ring<L::STAGES> stage = { 0, 0 };
    for (;;) {
        barrier_wait(&in->rows_full[set.stage], set.parity);
        const QueryItem *x = &in->item[set.stage];
        const RowTile rows = x->rows;
        const int tiles = x->tiles, b = x->b, h = x->h;
        if (tiles < 0) break;
        T *block_rows = sets + set.stage * (2 * L::ROWS);
        const uint32_t q = E::begin_of(block_rows + group * (GROUP_ROWS * E::ATOM)), go = q + E::units(L::ROWS);
        QueryRows row;
        row.warp = warp_range<E>(rows);
        barrier_wait(&in->keys_full[stage.stage], stage.parity);
        row_deltas<E>(row.delta, block_rows + L::ROWS, keys + stage.stage * (2 * L::KEYS));
        __syncwarp();
        if (lane == 0) barrier_arrive(&in->keys_empty[stage.stage]);
        stage.next();
        const bool idle = tiles == 0 && wide.resumed; /* dq and delta stay as they are */
        UNROLL
        for (int i = 0; i < 2; i++) {
            row.lse2[i] = in->lse2[set.stage][at.row(i)];
            if (at.row(i) >= rows.count) row.delta[i] = 0;
            else if (lane % 4 == 0 && !idle) *delta_out.at(p, b, rows.row + at.row(i), h) = row.delta[i];
        }
        typename E::Sums sum;
        E::clear(sum);
        wgmma_end(sum.x);
        const Range group_rows = { rows.position + group * GROUP_ROWS,
                                   rows.position + min((group + 1) * GROUP_ROWS, rows.count) - 1 };
        int held = -1; /* stage that the last product reads */
        int i = 0;
        RowTile tile = {};
        /* The next tile that the warpgroup's rows may see; those before are given back. */
        auto find = [&]() {
            for (; i < tiles; i++, stage.next()) {
                tile = walk_tile(x->walk, p.k, i, E::COLS);
                barrier_wait(&in->keys_full[stage.stage], stage.parity);
                if (may_see(p, group_rows, range_of(tile))) return true;
                if (held >= 0) { /* else who loads waits for this stage, once all others are left out */
                    wgmma_wait<0>();
                    if (lane == 0) barrier_arrive(&in->keys_empty[held]);
                    held = -1;
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(&in->keys_empty[stage.stage]);
            }
            return false;
        };
        if (L::AHEAD && PLAIN) {
            typename E::Scores s, dp, s_next, dp_next;
            auto begin = [&]() {
                const uint32_t k = key_begin + stage.stage * E::units(2 * L::KEYS);
                E::multiply(s_next, q, k);
                E::multiply(dp_next, go, k + E::units(L::KEYS));
            };
            auto take = [&]() {
                wgmma_end(s_next.x);
                wgmma_end(dp_next.x);
                const float scale2 = p.scale * LOG2_E;
                UNROLL
                for (int r = 0; r < 2; r++)
                    UNROLL
                    for (int j = 0; j < E::N; j++) {
                        s.at(r, j) = fmaf(s_next.at(r, j), scale2, -row.lse2[r]);
                        dp.at(r, j) = dp_next.at(r, j) - row.delta[r];
                    }
            };
            bool more = find();
            if (more) {
                begin();
                wgmma_wait<0>();
                take();
            }
            auto work = [&](const RowTile &now, int here) {
                if (now.count < E::COLS || !all_see(row.warp, x->most_low, range_of(now)))
                    mask_keys<E>(p, s, b, x->rows, now);
                UNROLL
                for (int r = 0; r < 2; r++)
                    UNROLL
                    for (int j = 0; j < E::N; j++) s.at(r, j) = E::exp2(s.at(r, j)) * dp.at(r, j);
                wgmma_wait<0>();
                if (held >= 0 && lane == 0) barrier_arrive(&in->keys_empty[held]);
                held = here;
                typename E::Weights w;
                E::round(w, s);
                E::add_weighted(sum, w, key_begin + here * E::units(2 * L::KEYS));
            };
            while (more) {
                const RowTile now = tile;
                const int here = stage.stage;
                i++, stage.next();
                more = find();
                if (!more) {
                    work(now, here);
                    break;
                }
                begin();
                work(now, here);
                take();
            }
        } else {
            while (find()) {
                typename E::Scores s, dp;
                typename E::Weights w;
                const uint32_t k = key_begin + stage.stage * E::units(2 * L::KEYS);
                E::multiply(s, q, k);
                wgmma_wait<1>();
                if (held >= 0 && lane == 0) barrier_arrive(&in->keys_empty[held]);
                E::multiply(dp, go, k + E::units(L::KEYS));
                held = stage.stage;
                wgmma_wait<1>();
                wgmma_end(s.x);
                query_scores<E, PLAIN>(p, s, x, row, tile);
                wgmma_wait<0>();
                wgmma_end(dp.x);
                query_gradients<E, PLAIN>(p, s, dp, x, row, tile.position);
                E::round(w, s);
                E::add_weighted(sum, w, k);
                i++, stage.next();
            }
        }
        wgmma_wait<0>();
        wgmma_end(sum.x);
        if (held >= 0 && lane == 0) barrier_arrive(&in->keys_empty[held]);
        if (wide.rows.data) {
            if (!idle)
                E::add_wide(sum, p.scale, wide.resumed, wide.rows.at(p, b, rows.row, h), wide.rows.row, rows.count,
                            p.C);
        } else {
            named_sync(1 + group, WARPGROUP); /* the products of all its warps are over */
            E::store(sum, p.scale, block_rows, dq.at(p, b, rows.row, h), dq.row, rows.count, p.C);
            proxy_fence();
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&in->rows_empty[set.stage]);
        set.next();
    }
#endif
}

/* ---- launching ---- */

template <class E, class L, bool PLAIN>
static Err launch_dq_hopper(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    typedef typename E::T T;
    const int64_t tiles = walk_count(walk_all(p.q, E::ROWS)), heads = a.q.dim[2], samples = a.q.dim[0];
    if (tiles == 0 || heads == 0 || samples == 0) return ERR_OK;
    BlockOrder order;
    TRY(block_order(&order, s, tiles, heads, samples, a.k.dim[1] * (p.C + p.V) * 2 / p.group));
    TensorMap q, go, o, k, v;
    TRY(map_rows<E>(&q, head_map<T>(a.q, query_heads_of<const T>(a.q), p.group), E::ROWS));
    TRY(map_rows<E>(&go, head_map<T>(a.go, heads_of<const T>(a.go)), E::ROWS));
    TRY(map_rows<E>(&o, head_map<T>(a.o, heads_of<const T>(a.o)), E::ROWS));
    TRY(map_rows<E>(&k, head_map<T>(a.k, heads_of<const T>(a.k)), E::COLS));
    TRY(map_rows<E>(&v, head_map<T>(a.v, heads_of<const T>(a.v)), E::COLS));
    TRY(allow_shared(attention_dq_hopper_kernel<E, L, PLAIN>, L::BYTES));
    LAUNCH((attention_dq_hopper_kernel<E, L, PLAIN>), order_blocks(s, order), E::THREADS, L::BYTES, cuda_stream(s), p,
           order, q, go, o, k, v, query_heads_of<T>(a.dq), wide_rows(a.dq, a.q.dtype, a.resumed, a.resumed),
           values_of(a.lse), values_of(a.delta));
    return ERR_OK;
}

template <class E, int STAGES, int SETS, bool AHEAD, bool PLAIN>
static Err dq_tiles(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    return launch_dq_hopper<E, DqHopper<E, STAGES, SETS, AHEAD>, PLAIN>(s, p, a);
}

/* BackEngine<type, width, keys a tile> */
template <class T> static Err dq_hopper(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    const bool plain = p.softcap == 0 && !p.dropout.threshold;
    if (widest(p) <= 64)
        return plain ? dq_tiles<BackEngine<T, 64, 64>, 6, 2, true, true>(s, p, a)
                     : dq_tiles<BackEngine<T, 64, 64>, 6, 2, false, false>(s, p, a);
    return plain ? dq_tiles<BackEngine<T, 128, 64>, 3, 2, false, true>(s, p, a)
                 : dq_tiles<BackEngine<T, 128, 64>, 3, 2, false, false>(s, p, a);
}

Err attention_dq_hopper(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    return a.q.dtype == BF16 ? dq_hopper<bf16>(s, p, a) : dq_hopper<f16>(s, p, a);
}

/* Widths that fill no more than half a tile, and the shortest sequences, are left to mma.sync. */
constexpr int NARROWEST = 40, WIDEST = 128;
constexpr int64_t FEWEST_ROWS = 64;

bool attention_bwd_hopper_fits(const AttnProblem &p, const AttnBackward &a)
{
    if (a.q.dtype == F32 || widest(p) < NARROWEST || widest(p) > WIDEST) return false;
    if (a.q.dim[1] < FEWEST_ROWS || a.k.dim[1] < FEWEST_ROWS) return false;
    if (a.q.dim[0] * a.q.dim[1] * a.q.dim[2] >= INT32_MAX) return false; /* items are counted in 32 bits */
    typedef BackEngine<bf16, 64, 64> E;
    static const bool there = hopper_code(attention_dq_hopper_kernel<E, DqHopper<E, 6, 2, true>, true>);
    return there;
}
