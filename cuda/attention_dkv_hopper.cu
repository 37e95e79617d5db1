/*
 * Attention, backward, on Hopper (sm_90a): dk and dv by wgmma and TMA. Formulas: attention_dq.cu; blocks, tiles, order,
 * which calls come here: attention_bwd_hopper.cuh.
 *
 * Mapping  a block has 128 keys of one head, a warpgroup 64; queries and dO in tiles of 64 (of 32 with a cap or dropout
 *          from width 72 on). Scores are computed transposed, keys down: as they leave the first products, p and ds are
 *          left operands of the second ones, so nothing is written to shared memory in the loop.
 * Rows     three warps bring lse and delta, of every third tile each, so that many of these loads are on their way.
 * Order    the query heads of a key head one after another, as in attention_dkv.cu.
 */
#include "attention_bwd_hopper.cuh"
#include "attention_lows.cuh"

/* What a block works on. */
struct KeyItem {
    RowTile keys;
    TileWalk walk; /* tiles of queries that may see the keys */
    int all[2];    /* tiles of queries there are in each span */
    int tiles;     /* of the walk, of one head; -1: no item comes any more */
    int h, b;      /* h: of the keys */
};

/* STAGES of queries and dO; SETS of keys and values. */
template <class E, int STAGES_, int SETS_> struct DkvHopper {
    static constexpr int VALUE_WARPS = 3; /* that bring lse and delta */
    static constexpr bool FULL = E::W * E::COLS >= 128 * 64; /* more registers */
    static constexpr int GIVE = FULL ? 24 : E::GIVE, TAKE = FULL ? 240 : E::TAKE;
    static constexpr int STAGES = STAGES_, SETS = SETS_;
    static constexpr int ROWS = E::ROWS * E::W, QUERIES = E::COLS * E::W; /* elements */
    static constexpr int BYTES = (2 * SETS * ROWS + 2 * STAGES * QUERIES) * 2;
};

/* s: scores, becomes weights. */
template <class E>
__device__ __forceinline__ void query_factors(const AttnProblem &p, typename E::Scores &s, const QueryValues *values)
{
    const typename E::Place at = E::place();
    const float scale2 = p.scale * LOG2_E;
    UNROLL
    for (int j = 0; j < E::N; j++) {
        const float lse2 = values[at.column(j)].lse2;
        UNROLL
        for (int i = 0; i < 2; i++) s.at(i, j) = E::exp2(fmaf(s.at(i, j), scale2, -lse2));
    }
}

/* dp: do v, becomes ds. */
template <class E>
__device__ __forceinline__ void query_slopes(typename E::Scores &dp, typename E::Scores &s, const QueryValues *values)
{
    const typename E::Place at = E::place();
    UNROLL
    for (int j = 0; j < E::N; j++) {
        const float delta = values[at.column(j)].delta;
        UNROLL
        for (int i = 0; i < 2; i++) dp.at(i, j) = s.at(i, j) * (dp.at(i, j) - delta);
    }
}

/* The same two with dropout or a cap. s: scores, becomes the weights of dv; dp: do v, becomes ds. */
template <class E>
__device__ __forceinline__ void query_weights(const AttnProblem &p, typename E::Scores &s, typename E::Scores &dp,
                                              const QueryValues *values, int position, int first_query, int b, int h)
{
    const typename E::Place at = E::place();
    typename E::Draws::Keep keep = {};
    if (p.dropout.threshold) {
        E::Draws::template keep_bits<true>(keep, head_dropout(p, b, h), position, first_query);
        UNROLL
        for (int i = 0; i < 2; i++)
            UNROLL
            for (int j = 0; j < E::N; j++)
                dp.at(i, j) = E::Draws::kept(keep, i, j) ? dp.at(i, j) * p.dropout.scale : 0.0f;
    }
    if (p.softcap > 0) { /* dp - delta, times the slope */
        UNROLL
        for (int j = 0; j < E::N; j++) {
            const float delta = values[at.column(j)].delta;
            UNROLL
            for (int i = 0; i < 2; i++)
                dp.at(i, j) = fmaf(dp.at(i, j) - delta, cap_slope(p, s.at(i, j)), delta);
        }
    }
    query_factors<E>(p, s, values);
    query_slopes<E>(dp, s, values);
    if (p.dropout.threshold) {
        UNROLL
        for (int i = 0; i < 2; i++)
            UNROLL
            for (int j = 0; j < E::N; j++) s.at(i, j) = E::Draws::kept(keep, i, j) ? s.at(i, j) : 0.0f;
    }
}

/* Writes the item that comes next, by a warp; false: there is none any more. */
template <class E>
__device__ __forceinline__ bool key_item(const AttnProblem &p, const BlockOrder &order, const Lows *table, KeyItem *out)
{
    BlockItem next = {};
    const bool there = block_item(order, &next), writes = threadIdx.x % WARP == 0;
    if (!there) {
        if (writes) out->tiles = -1;
        return false;
    }
    const RowTile keys = walk_tile(walk_all(p.k, E::ROWS), p.k, next.tile, E::ROWS);
    const TileWalk all = walk_all(p.q, E::COLS);
    if (writes) {
        out->h = next.h, out->b = next.b;
        out->keys = keys;
        out->all[0] = all.tiles[0], out->all[1] = all.tiles[1];
    }
    const int last = range_of(keys).last, reach = p.window ? p.window - 1 : INT_MAX;
    TileWalk walk = walk_of(p.q, keys.position, last > INT_MAX - reach ? INT_MAX : last + reach, E::COLS);
    if (table) trim_walk(&walk, all.tiles, table, last, next.b);
    if (writes) {
        out->walk = walk;
        out->tiles = walk_count(walk);
    }
    return true;
}

/* The warp that starts the copies of tiles. */
template <class E, class L>
__device__ __forceinline__ void load_keys(const AttnProblem &p, const BlockOrder &order, const Lows *table,
                                          const TensorMap &q_map, const TensorMap &go_map, const TensorMap &k_map,
                                          const TensorMap &v_map, typename E::T *sets, typename E::T *queries,
                                          KeyItem *item, Barrier *rows_full, Barrier *rows_empty, Barrier *tile_full,
                                          Barrier *tile_empty)
{
    Ring<L::SETS> set = { 0, 0 };
    Ring<L::STAGES> stage = { 0, 0 };
    for (bool there = true; there; set.next()) {
        KeyItem *x = &item[set.stage];
        barrier_wait(&rows_empty[set.stage], set.parity ^ 1);
        there = key_item<E>(p, order, table, x);
        if (threadIdx.x % WARP == 0 && !there) barrier_arrive(&rows_full[set.stage]);
        if (threadIdx.x % WARP == 0 && there) {
            typename E::T *to = sets + set.stage * (2 * L::ROWS);
            Barrier *full = &rows_full[set.stage];
            barrier_expect(full, 2 * L::ROWS * 2);
            load_rows<E, E::ROWS>(to, k_map, full, 1, x->h, x->keys.row, x->b);
            load_rows<E, E::ROWS>(to + L::ROWS, v_map, full, 1, x->h, x->keys.row, x->b);
            for (int g = 0; g < p.group; g++)
                for (int i = 0; i < x->tiles; i++) {
                    barrier_wait(&tile_empty[stage.stage], stage.parity ^ 1);
                    const int row = walk_tile(x->walk, p.q, i, E::COLS).row, h = x->h * p.group + g;
                    to = queries + stage.stage * (2 * L::QUERIES);
                    full = &tile_full[stage.stage];
                    barrier_expect(full, 2 * L::QUERIES * 2);
                    load_rows<E, E::COLS>(to, q_map, full, p.group, h, row, x->b);
                    load_rows<E, E::COLS>(to + L::QUERIES, go_map, full, 1, h, row, x->b);
                    stage.next();
                }
        }
        __syncwarp();
    }
}

/* The warps that read lse and delta, each of every third tile. All wait for every stage and are waited for: who leaves
 * one out could take a phase for another. */
template <class E, class L>
__device__ __forceinline__ void load_values(const AttnProblem &p, const RowValues &lse,
                                            const RowValues &delta, int turn, const KeyItem *item,
                                            QueryValues (*values)[E::COLS], Barrier *rows_full, Barrier *rows_empty,
                                            Barrier *tile_full, Barrier *tile_empty)
{
    const int lane = threadIdx.x % WARP;
    Ring<L::SETS> set = { 0, 0 };
    Ring<L::STAGES> stage = { 0, 0 };
    for (;;) {
        barrier_wait(&rows_full[set.stage], set.parity);
        const KeyItem *x = &item[set.stage];
        if (x->tiles < 0) return;
        for (int g = 0; g < p.group; g++)
            for (int i = 0; i < x->tiles; i++) {
                const RowTile rows = walk_tile(x->walk, p.q, i, E::COLS);
                const int h = x->h * p.group + g;
                float sum[E::COLS / WARP], dot[E::COLS / WARP];
                UNROLL
                for (int r = 0; r < E::COLS / WARP; r++) {
                    const bool inside = turn == 0 && r * WARP + lane < rows.count;
                    sum[r] = inside ? *lse.at(p, x->b, rows.row + r * WARP + lane, h) : -INFINITY;
                    dot[r] = inside ? *delta.at(p, x->b, rows.row + r * WARP + lane, h) : 0.0f;
                }
                barrier_wait(&tile_empty[stage.stage], stage.parity ^ 1);
                if (turn == 0) {
                    UNROLL
                    for (int r = 0; r < E::COLS / WARP; r++) {
                        const QueryValues v = { sum[r] == -INFINITY ? INFINITY : sum[r] * LOG2_E, dot[r] };
                        values[stage.stage][r * WARP + lane] = v;
                    }
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(&tile_full[stage.stage]);
                turn = turn == 0 ? L::VALUE_WARPS - 1 : turn - 1;
                stage.next();
            }
        __syncwarp();
        if (lane == 0) barrier_arrive(&rows_empty[set.stage]);
        set.next();
    }
}

template <class E, class L, bool PLAIN>
__global__ void __launch_bounds__(E::THREADS, 1)
    attention_dkv_hopper_kernel(AttnProblem p, BlockOrder order, const Lows *table, TENSOR_MAP(q_map),
                                TENSOR_MAP(go_map), TENSOR_MAP(k_map), TENSOR_MAP(v_map), Heads<typename E::T> dk,
                                Heads<typename E::T> dv, RowValues lse, RowValues delta)
{
#if HOPPER
    typedef typename E::T T;
    DYNAMIC_SHARED(T, sets); /* K, V; then stages of Q, dO */
    SHARED(KeyItem, item, [L::SETS]);
    SHARED(QueryValues, values, [L::STAGES][E::COLS]);
    SHARED(Barrier, rows_full, [L::SETS]);
    SHARED(Barrier, rows_empty, [L::SETS]);
    SHARED(Barrier, tile_full, [L::STAGES]);
    SHARED(Barrier, tile_empty, [L::STAGES]);
    T *queries = sets + L::SETS * 2 * L::ROWS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < L::SETS; i++)
            barrier_init(&rows_full[i], 1), barrier_init(&rows_empty[i], E::WARPS + L::VALUE_WARPS);
        for (int i = 0; i < L::STAGES; i++) {
            barrier_init(&tile_full[i], 1 + L::VALUE_WARPS);
            barrier_init(&tile_empty[i], E::WARPS);
        }
        barriers_ready();
    }
    __syncthreads();
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
    Ring<L::SETS> set = { 0, 0 };
    Ring<L::STAGES> stage = { 0, 0 };
    if (warp >= E::WARPS) {
        registers_give<L::GIVE>();
        if (warp == E::WARPS)
            load_keys<E, L>(p, order, table, q_map, go_map, k_map, v_map, sets, queries, item, rows_full, rows_empty,
                            tile_full, tile_empty);
        else
            load_values<E, L>(p, lse, delta, warp - E::WARPS - 1, item, values, rows_full, rows_empty, tile_full,
                              tile_empty);
        return;
    }
    registers_take<L::TAKE>();
    const int group = warp / 4;
    const uint32_t query_begin = E::begin_of(queries);
    for (;;) {
        barrier_wait(&rows_full[set.stage], set.parity);
        const KeyItem *x = &item[set.stage]; /* stays in shared memory: sums need the registers */
        if (x->tiles < 0) break;
        typename E::Sums dv_sum, dk_sum;
        E::clear(dv_sum);
        E::clear(dk_sum);
        wgmma_end(dv_sum.x);
        wgmma_end(dk_sum.x);
        int held = -1; /* stage that the last products read */
        const int total = p.group * x->tiles;
        int i = 0, done = 0; /* tile of its head; tiles of all heads */
        RowTile tile = {};
        const uint32_t k = E::begin_of(sets + set.stage * (2 * L::ROWS) + group * (GROUP_ROWS * E::ATOM));
        const uint32_t v = k + E::units(L::ROWS);
        auto pass = [&]() {
            done++, stage.next();
            if (++i == x->tiles) i = 0;
        };
        /* All lanes have read the stage's lse and delta. */
        auto give_back = [&](int at) {
            __syncwarp();
            if (lane == 0) barrier_arrive(&tile_empty[at]);
        };
        /* The next tile that may see the warpgroup's keys; those before are given back. */
        auto find = [&]() {
            const Range keys = range_of(x->keys);
            const Range group_keys = { keys.first + group * GROUP_ROWS,
                                       min(keys.first + (group + 1) * GROUP_ROWS - 1, keys.last) };
            for (; done < total; pass()) {
                tile = walk_tile(x->walk, p.q, i, E::COLS);
                barrier_wait(&tile_full[stage.stage], stage.parity);
                if (may_see(p, range_of(tile), group_keys)) return true;
                if (held >= 0) { /* else who loads waits for this stage, once all others are left out */
                    wgmma_wait<0>();
                    give_back(held);
                    held = -1;
                }
                give_back(stage.stage);
            }
            return false;
        };
        auto mask = [&](typename E::Scores &s, const RowTile &now, int at) {
            const Range range = range_of(now);
            const int most_low = table ? table[lows_index(x->walk, x->all, at, x->b)].most
                                       : row_low(p, 0, 0, range.last);
            if (!all_see(range, most_low, warp_range<E>(x->keys)))
                mask_queries<E>(p, s, x->b, x->keys.position, now);
        };
        while (find()) {
            const uint32_t q = query_begin + stage.stage * E::units(2 * L::QUERIES), go = q + E::units(L::QUERIES);
            typename E::Scores s, dp;
            typename E::Weights w, dw;
            E::multiply(s, k, q);
            wgmma_wait<1>();
            if (held >= 0) give_back(held);
            E::multiply(dp, v, go);
            held = stage.stage;
            wgmma_wait<1>();
            wgmma_end(s.x);
            if (!PLAIN && p.softcap > 0) cap_scores<E>(p, s);
            mask(s, tile, i);
            if (PLAIN) {
                query_factors<E>(p, s, values[stage.stage]);
                E::round(w, s);
                E::add_weighted(dv_sum, w, go);
                wgmma_wait<1>();
                wgmma_end(dp.x);
                query_slopes<E>(dp, s, values[stage.stage]);
            } else {
                wgmma_wait<0>();
                wgmma_end(dp.x);
                query_weights<E>(p, s, dp, values[stage.stage], x->keys.position, tile.position, x->b,
                                 x->h * p.group + done / x->tiles);
                E::round(w, s);
                E::add_weighted(dv_sum, w, go);
            }
            E::round(dw, dp);
            E::add_weighted(dk_sum, dw, q);
            pass();
        }
        wgmma_wait<0>();
        wgmma_end(dv_sum.x);
        wgmma_end(dk_sum.x);
        if (held >= 0) give_back(held);
        named_sync(1 + group, WARPGROUP); /* the products of all its warps are over */
        T *rows = sets + set.stage * (2 * L::ROWS);
        const float dv_scale = p.dropout.threshold ? p.dropout.scale : 1.0f;
        E::store(dv_sum, dv_scale, rows + L::ROWS, dv.at(x->b, x->keys.row, x->h), dv.row, x->keys.count, p.V);
        E::store(dk_sum, p.scale, rows, dk.at(x->b, x->keys.row, x->h), dk.row, x->keys.count, p.C);
        proxy_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(&rows_empty[set.stage]);
        set.next();
    }
#endif
}

/* ---- launching ---- */

template <class E, class L, bool PLAIN>
static Err launch_dkv_hopper(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    typedef typename E::T T;
    const int64_t tiles = walk_count(walk_all(p.k, E::ROWS)), heads = a.k.dim[2], samples = a.k.dim[0];
    if (tiles == 0 || heads == 0 || samples == 0) return ERR_OK;
    const Lows *table;
    TRY(attention_lows(s, p, samples, E::COLS, &table));
    BlockOrder order;
    TRY(block_order(&order, s, tiles, heads, samples, a.q.dim[1] * (p.C + p.V) * 2 * p.group));
    TensorMap q, go, k, v;
    TRY(map_rows<E>(&q, head_map<T>(a.q, query_heads_of<const T>(a.q), p.group), E::COLS));
    TRY(map_rows<E>(&go, head_map<T>(a.go, heads_of<const T>(a.go)), E::COLS));
    TRY(map_rows<E>(&k, head_map<T>(a.k, heads_of<const T>(a.k)), E::ROWS));
    TRY(map_rows<E>(&v, head_map<T>(a.v, heads_of<const T>(a.v)), E::ROWS));
    TRY(allow_shared(attention_dkv_hopper_kernel<E, L, PLAIN>, L::BYTES));
    LAUNCH((attention_dkv_hopper_kernel<E, L, PLAIN>), order_blocks(s, order), E::THREADS, L::BYTES, cuda_stream(s), p,
           order, table, q, go, k, v, heads_of<T>(a.dk), heads_of<T>(a.dv), values_of(a.lse), values_of(a.delta));
    return ERR_OK;
}

template <class E, int STAGES, int SETS, bool PLAIN>
static Err dkv_tiles(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    return launch_dkv_hopper<E, DkvHopper<E, STAGES, SETS>, PLAIN>(s, p, a);
}

/* BackEngine<type, width, queries a tile> */
template <class T> static Err dkv_hopper(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    const bool plain = p.softcap == 0 && !p.dropout.threshold;
    if (widest(p) <= 64)
        return plain ? dkv_tiles<BackEngine<T, 64, 64>, 5, 2, true>(s, p, a)
                     : dkv_tiles<BackEngine<T, 64, 64>, 4, 2, false>(s, p, a);
    return plain ? dkv_tiles<BackEngine<T, 128, 64>, 3, 2, true>(s, p, a)
                 : dkv_tiles<BackEngine<T, 128, 32>, 4, 2, false>(s, p, a);
}

Err attention_dkv_hopper(Stream *s, const AttnProblem &p, const AttnBackward &a)
{
    return a.q.dtype == BF16 ? dkv_hopper<bf16>(s, p, a) : dkv_hopper<f16>(s, p, a);
}
