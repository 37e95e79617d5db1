/*
 * Attention, backward, on Hopper (sm_90a): dk and dv by wgmma and TMA. attention_dq.cu has the formulas;
 * attention_bwd_hopper.cuh says which calls come here, and has what both backward kernels share.
 *
 * Mapping  an item is 128 keys of one head: a warpgroup has 64. Queries and dO come in tiles of 64 (of 32 with a cap or
 *          dropout from width 72 on). Scores are computed transposed, keys down: p and ds leave the first products
 *          as left operands of the second ones, so the loop writes nothing to shared memory.
 * Warps    load_items brings tiles, load_values their lse and delta, compute_items multiplies (DkvGroup::add_tile).
 *          Three warps run load_values, every third tile each, so that many of their loads are under way.
 * Order    the query heads of a key head one after another, as in attention_dkv.cu.
 */
#include "attention_bwd_hopper.cuh"
#include "attention_lows.cuh"

/* Item: what a block works on. */
struct KeyItem {
    RowTile keys;
    TileWalk walk; /* tiles of queries that may see the keys */
    int all[2];    /* tiles of queries in each span, seen or not */
    int tiles;     /* tiles of the walk, for one query head; -1: no item comes any more */
    int h, b;      /* head of the keys, sample */
};

/* Sizes of a kernel. STAGES: tiles of queries and dO that fit; SETS: of keys and values. */
template <class E, int STAGES_, int SETS_> struct DkvHopper {
    static constexpr int VALUE_WARPS = 3; /* warps that bring lse and delta */
    static constexpr bool FULL = E::W * E::COLS >= 128 * 64; /* the largest tiles need more registers */
    static constexpr int GIVE = FULL ? 24 : E::GIVE, TAKE = FULL ? 240 : E::TAKE;
    static constexpr int STAGES = STAGES_, SETS = SETS_;
    static constexpr int ROWS = E::ROWS * E::W, QUERIES = E::COLS * E::W; /* elements */
    static constexpr int BYTES = (2 * SETS * ROWS + 2 * STAGES * QUERIES) * 2;
};

/* Scores s become weights. */
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

/* Products dp = dO v become ds; s: weights. */
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

/* Both steps with dropout or a cap. s: scores become the weights of dv; dp: products dO v become ds. */
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

/* A warp writes the item that comes next; false: there is none any more. */
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

/* ---- shared memory ---- */

/* K and V: a set of two tiles for each item that is here or on its way. */
template <class E, class L> struct DkvKeyTiles {
    typename E::T *tiles;
    KeyItem *item;         /* of each set */
    Barrier *full, *empty; /* of each set: it has been loaded, its readers are done */
    __device__ __forceinline__ typename E::T *k(int set) const { return tiles + set * (2 * L::ROWS); }
    __device__ __forceinline__ typename E::T *v(int set) const { return k(set) + L::ROWS; }
};

/* Q and dO: a ring of stages of two tiles, with lse and delta of their rows. */
template <class E, class L> struct DkvQueryTiles {
    typename E::T *tiles;
    QueryValues (*values)[E::COLS]; /* of each stage */
    Barrier *full, *empty;          /* of each stage */
    __device__ __forceinline__ typename E::T *q(int stage) const { return tiles + stage * (2 * L::QUERIES); }
    __device__ __forceinline__ typename E::T *go(int stage) const { return q(stage) + L::QUERIES; }
};

template <class E, class L>
__device__ __forceinline__ void barriers_init(const DkvKeyTiles<E, L> &keys, const DkvQueryTiles<E, L> &queries)
{
    for (int i = 0; i < L::SETS; i++)
        barrier_init(&keys.full[i], 1), barrier_init(&keys.empty[i], E::WARPS + L::VALUE_WARPS);
    for (int i = 0; i < L::STAGES; i++)
        barrier_init(&queries.full[i], 1 + L::VALUE_WARPS), barrier_init(&queries.empty[i], E::WARPS);
    barriers_ready();
}

/* ---- the warp that starts the copies of tiles ---- */

struct DkvMaps {
    const TensorMap &q, &go, &k, &v;
};

/* K and V of the set's item, by one thread. */
template <class E, class L>
__device__ __forceinline__ void load_keys(const DkvMaps &maps, const DkvKeyTiles<E, L> &keys, int set)
{
    const KeyItem *x = &keys.item[set];
    Barrier *full = &keys.full[set];
    barrier_expect(full, 2 * L::ROWS * 2);
    load_rows<E, E::ROWS>(keys.k(set), maps.k, full, 1, x->h, x->keys.row, x->b);
    load_rows<E, E::ROWS>(keys.v(set), maps.v, full, 1, x->h, x->keys.row, x->b);
}

/* Q and dO of all tiles that the item visits, one query head after another, by one thread. */
template <class E, class L>
__device__ __forceinline__ void load_queries(const AttnProblem &p, const DkvMaps &maps, const KeyItem *x,
                                             const DkvQueryTiles<E, L> &queries, Ring<L::STAGES> *ring)
{
    for (int g = 0; g < p.group; g++)
        for (int i = 0; i < x->tiles; i++) {
            const int stage = ring->stage;
            barrier_wait(&queries.empty[stage], ring->parity ^ 1);
            const int row = walk_tile(x->walk, p.q, i, E::COLS).row, h = x->h * p.group + g;
            Barrier *full = &queries.full[stage];
            barrier_expect(full, 2 * L::QUERIES * 2);
            load_rows<E, E::COLS>(queries.q(stage), maps.q, full, p.group, h, row, x->b);
            load_rows<E, E::COLS>(queries.go(stage), maps.go, full, 1, h, row, x->b);
            ring->next();
        }
}

template <class E, class L>
__device__ __forceinline__ void load_items(const AttnProblem &p, const BlockOrder &order, const Lows *table,
                                           const DkvMaps &maps, const DkvKeyTiles<E, L> &keys,
                                           const DkvQueryTiles<E, L> &queries)
{
    Ring<L::SETS> set = { 0, 0 };
    Ring<L::STAGES> stage = { 0, 0 };
    for (bool there = true; there; set.next()) {
        KeyItem *x = &keys.item[set.stage];
        barrier_wait(&keys.empty[set.stage], set.parity ^ 1);
        there = key_item<E>(p, order, table, x);
        if (threadIdx.x % WARP == 0 && !there) barrier_arrive(&keys.full[set.stage]);
        if (threadIdx.x % WARP == 0 && there) {
            load_keys<E, L>(maps, keys, set.stage);
            load_queries<E, L>(p, maps, x, queries, &stage);
        }
        __syncwarp();
    }
}

/* ---- the warps that read lse and delta ---- */

/* A warp brings every third tile's. All of them wait for every stage and are waited for: a warp that left one out could
 * take a phase for another. turn: tiles before this warp's first one. */
template <class E, class L>
__device__ __forceinline__ void load_values(const AttnProblem &p, const RowValues &lse, const RowValues &delta,
                                            int turn, const DkvKeyTiles<E, L> &keys,
                                            const DkvQueryTiles<E, L> &queries)
{
    const int lane = threadIdx.x % WARP;
    Ring<L::SETS> set = { 0, 0 };
    Ring<L::STAGES> stage = { 0, 0 };
    for (;;) {
        barrier_wait(&keys.full[set.stage], set.parity);
        const KeyItem *x = &keys.item[set.stage];
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
                barrier_wait(&queries.empty[stage.stage], stage.parity ^ 1);
                if (turn == 0) {
                    UNROLL
                    for (int r = 0; r < E::COLS / WARP; r++) {
                        const QueryValues v = { sum[r] == -INFINITY ? INFINITY : sum[r] * LOG2_E, dot[r] };
                        queries.values[stage.stage][r * WARP + lane] = v;
                    }
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(&queries.full[stage.stage]);
                turn = turn == 0 ? L::VALUE_WARPS - 1 : turn - 1;
                stage.next();
            }
        __syncwarp();
        if (lane == 0) barrier_arrive(&keys.empty[set.stage]);
        set.next();
    }
}

/* ---- a warpgroup that computes ---- */

/* A warpgroup on its way through the tiles of an item. */
template <class E, class L, bool PLAIN> struct DkvGroup {
    typedef typename E::Sums Sums;
    const AttnProblem &p;
    const Lows *table;
    const DkvQueryTiles<E, L> &queries;
    const int group, lane;
    const uint32_t query_begin;
    Ring<L::STAGES> stage;
    const KeyItem *x; /* stays in shared memory: sums need the registers */
    uint32_t k, v;    /* the warpgroup's rows of the item's tiles */
    int held;         /* stage that the last products read; -1: none */
    int i, done;      /* tile of its head; tiles of all heads that were passed */
    int total;        /* tiles of all heads in all */
    RowTile tile;     /* the one that was found */

    __device__ __forceinline__ DkvGroup(const AttnProblem &problem, const Lows *lows,
                                        const DkvQueryTiles<E, L> &tiles, int warp)
        : p(problem), table(lows), queries(tiles), group(warp / 4), lane(threadIdx.x % WARP),
          query_begin(E::begin_of(tiles.tiles)), stage{ 0, 0 }
    {
    }

    __device__ __forceinline__ void begin(const DkvKeyTiles<E, L> &keys, int set)
    {
        x = &keys.item[set];
        held = -1;
        total = p.group * x->tiles;
        i = done = 0;
        tile = {};
        k = E::begin_of(keys.k(set) + group * (GROUP_ROWS * E::ATOM));
        v = k + E::units(L::ROWS);
    }

    __device__ __forceinline__ void pass()
    {
        done++, stage.next();
        if (++i == x->tiles) i = 0;
    }

    /* A stage goes back once all lanes have read its lse and delta. */
    __device__ __forceinline__ void give_back(int at) const
    {
        __syncwarp();
        if (lane == 0) barrier_arrive(&queries.empty[at]);
    }

    /* Goes to the next tile that may see the warpgroup's keys, and gives back those before. false: there is none. */
    __device__ __forceinline__ bool find()
    {
        const Range keys = range_of(x->keys);
        const Range group_keys = { keys.first + group * GROUP_ROWS,
                                   min(keys.first + (group + 1) * GROUP_ROWS - 1, keys.last) };
        for (; done < total; pass()) {
            tile = walk_tile(x->walk, p.q, i, E::COLS);
            barrier_wait(&queries.full[stage.stage], stage.parity);
            if (may_see(p, range_of(tile), group_keys)) return true;
            if (held >= 0) { /* else the loader waits for this stage, once all others are left out */
                wgmma_wait<0>();
                give_back(held);
                held = -1;
            }
            give_back(stage.stage);
        }
        return false;
    }

    __device__ __forceinline__ void mask(typename E::Scores &s) const
    {
        const Range range = range_of(tile);
        const int most_low =
            table ? table[lows_index(x->walk, x->all, i, x->b)].most : row_low(p, 0, 0, range.last);
        if (!all_see(range, most_low, warp_range<E>(x->keys))) mask_queries<E>(p, s, x->b, x->keys.position, tile);
    }

    /* Weights p and ds of the tile, rounded. Starts dv += p dO as soon as p is there; dw: ds. */
    __device__ __forceinline__ void weigh(typename E::Scores &s, typename E::Scores &dp, typename E::Weights &dw,
                                          Sums &dv, uint32_t go) const
    {
        const QueryValues *values = queries.values[stage.stage];
        typename E::Weights w;
        if (PLAIN) {
            query_factors<E>(p, s, values);
            E::round(w, s);
            E::add_weighted(dv, w, go);
            wgmma_wait<1>();
            wgmma_end(dp.x);
            query_slopes<E>(dp, s, values);
        } else {
            wgmma_wait<0>();
            wgmma_end(dp.x);
            query_weights<E>(p, s, dp, values, x->keys.position, tile.position, x->b,
                             x->h * p.group + done / x->tiles);
            E::round(w, s);
            E::add_weighted(dv, w, go);
        }
        E::round(dw, dp);
    }

    /* Adds the tile that was found to both sums. */
    __device__ __forceinline__ void add_tile(Sums &dk, Sums &dv)
    {
        const uint32_t q = query_begin + stage.stage * E::units(2 * L::QUERIES), go = q + E::units(L::QUERIES);
        typename E::Scores s, dp;
        typename E::Weights dw;
        E::multiply(s, k, q);
        wgmma_wait<1>();
        if (held >= 0) give_back(held);
        E::multiply(dp, v, go);
        held = stage.stage;
        wgmma_wait<1>();
        wgmma_end(s.x);
        if (!PLAIN && p.softcap > 0) cap_scores<E>(p, s);
        mask(s);
        weigh(s, dp, dw, dv, go);
        E::add_weighted(dk, dw, q);
        pass();
    }

    /* Waits until all products are over, in all warps of the group. */
    __device__ __forceinline__ void end(Sums &dk, Sums &dv) const
    {
        wgmma_wait<0>();
        wgmma_end(dv.x);
        wgmma_end(dk.x);
        if (held >= 0) give_back(held);
        named_sync(1 + group, WARPGROUP);
    }
};

template <class E, class L, bool PLAIN>
__device__ __forceinline__ void compute_items(DkvGroup<E, L, PLAIN> &g, const DkvKeyTiles<E, L> &keys,
                                              const Heads<typename E::T> &dk, const Heads<typename E::T> &dv)
{
    const AttnProblem &p = g.p;
    for (Ring<L::SETS> set = { 0, 0 };; set.next()) {
        barrier_wait(&keys.full[set.stage], set.parity);
        const KeyItem *x = &keys.item[set.stage];
        if (x->tiles < 0) return;
        typename E::Sums dv_sum, dk_sum;
        E::clear(dv_sum);
        E::clear(dk_sum);
        wgmma_end(dv_sum.x);
        wgmma_end(dk_sum.x);
        g.begin(keys, set.stage);
        while (g.find()) g.add_tile(dk_sum, dv_sum);
        g.end(dk_sum, dv_sum);
        const float dv_scale = p.dropout.threshold ? p.dropout.scale : 1.0f;
        E::store(dv_sum, dv_scale, keys.v(set.stage), dv.at(x->b, x->keys.row, x->h), dv.row, x->keys.count, p.V);
        E::store(dk_sum, p.scale, keys.k(set.stage), dk.at(x->b, x->keys.row, x->h), dk.row, x->keys.count, p.C);
        proxy_fence();
        __syncwarp();
        if (g.lane == 0) barrier_arrive(&keys.empty[set.stage]);
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
    DYNAMIC_SHARED(T, tiles); /* sets of K, V; then stages of Q, dO */
    SHARED(KeyItem, item, [L::SETS]);
    SHARED(QueryValues, values, [L::STAGES][E::COLS]);
    SHARED(Barrier, keys_full, [L::SETS]);
    SHARED(Barrier, keys_empty, [L::SETS]);
    SHARED(Barrier, queries_full, [L::STAGES]);
    SHARED(Barrier, queries_empty, [L::STAGES]);
    const DkvKeyTiles<E, L> keys = { tiles, item, keys_full, keys_empty };
    const DkvQueryTiles<E, L> queries = { tiles + L::SETS * 2 * L::ROWS, values, queries_full, queries_empty };
    if (threadIdx.x == 0) barriers_init<E, L>(keys, queries);
    __syncthreads();
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0);
    if (warp < E::WARPS) {
        registers_take<L::TAKE>();
        DkvGroup<E, L, PLAIN> group(p, table, queries, warp);
        compute_items<E, L, PLAIN>(group, keys, dk, dv);
        return;
    }
    registers_give<L::GIVE>();
    const DkvMaps maps = { q_map, go_map, k_map, v_map };
    if (warp == E::WARPS) load_items<E, L>(p, order, table, maps, keys, queries);
    else load_values<E, L>(p, lse, delta, warp - E::WARPS - 1, keys, queries);
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
