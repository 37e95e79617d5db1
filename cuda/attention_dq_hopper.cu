/*
 * Attention, backward, on Hopper (sm_90a): dq and delta by wgmma and TMA. attention_dq.cu has the formulas;
 * attention_bwd_hopper.cuh says which calls come here, and has what both backward kernels share.
 *
 * Mapping  an item is 128 queries of one head: a warpgroup has 64. Keys and values come in tiles of 64. ds leaves the
 *          products as the left operand of dq += ds k, and k's tile is the right one as it lies, so the loop writes
 *          nothing to shared memory.
 * Warps    load_items brings tiles, compute_items multiplies them (DqGroup::add_tile).
 * Ahead    up to width 64 the products of the next tile run while ds of this one is computed (add_tiles_ahead).
 */
#include "attention_bwd_hopper.cuh"

/* Item: what a block works on. */
struct QueryItem {
    RowTile rows;
    TileWalk walk;
    int most_low, tiles; /* largest row_low; tiles of keys in the walk, -1: no item comes any more */
    int h, b;
};

/* Sizes of a kernel. STAGES: tiles of keys and values that fit; SETS: of queries and dO. AHEAD: the next tile's
 * products run beside this one's ds. */
template <class E, int STAGES_, int SETS_, bool AHEAD_> struct DqHopper {
    static constexpr int STAGES = STAGES_, SETS = SETS_;
    static constexpr bool AHEAD = AHEAD_;
    static constexpr int ROWS = E::ROWS * E::W, KEYS = E::COLS * E::W; /* elements */
    static constexpr int BYTES = (2 * SETS * ROWS + 2 * STAGES * KEYS) * 2;
    static_assert(ROWS == 2 * KEYS, "O comes through a stage and fills it");
};

/* A warp writes the item that comes next; false: there is none any more. */
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

/* ---- shared memory ---- */

/* Q and dO: a set of two tiles for each item that is here or on its way. */
template <class E, class L> struct DqQueryTiles {
    typename E::T *tiles;
    QueryItem *item;        /* of each set */
    float (*lse2)[E::ROWS]; /* of each set: lse in powers of 2; +inf for rows without keys: weight 0 */
    Barrier *full, *empty;  /* of each set: it has been loaded, its readers are done */
    __device__ __forceinline__ typename E::T *q(int set) const { return tiles + set * (2 * L::ROWS); }
    __device__ __forceinline__ typename E::T *go(int set) const { return q(set) + L::ROWS; }
};

/* K and V: a ring of stages of two tiles. The first stage of an item brings O instead. */
template <class E, class L> struct DqKeyTiles {
    typename E::T *tiles;
    Barrier *full, *empty; /* of each stage */
    __device__ __forceinline__ typename E::T *k(int stage) const { return tiles + stage * (2 * L::KEYS); }
    __device__ __forceinline__ typename E::T *v(int stage) const { return k(stage) + L::KEYS; }
    __device__ __forceinline__ typename E::T *o(int stage) const { return k(stage); }
};

template <class E, class L>
__device__ __forceinline__ void barriers_init(const DqQueryTiles<E, L> &queries, const DqKeyTiles<E, L> &keys)
{
    for (int i = 0; i < L::SETS; i++) barrier_init(&queries.full[i], 2), barrier_init(&queries.empty[i], E::WARPS);
    for (int i = 0; i < L::STAGES; i++) barrier_init(&keys.full[i], 1), barrier_init(&keys.empty[i], E::WARPS);
    barriers_ready();
}

/* ---- the warp that loads ---- */

struct DqMaps {
    const TensorMap &q, &go, &o, &k, &v;
};

/* Q, dO and lse of the set's item, by a warp. `there` false: no item comes any more. */
template <class E, class L>
__device__ __forceinline__ void load_queries(const AttnProblem &p, const DqMaps &maps, const RowValues &lse,
                                             const DqQueryTiles<E, L> &queries, int set, bool there)
{
    const int lane = threadIdx.x % WARP;
    const QueryItem *x = &queries.item[set];
    Barrier *full = &queries.full[set];
    if (lane == 0 && !there) barrier_arrive(full);
    if (lane == 0 && there) {
        barrier_expect(full, 2 * L::ROWS * 2);
        load_rows<E, E::ROWS>(queries.q(set), maps.q, full, p.group, x->h, x->rows.row, x->b);
        load_rows<E, E::ROWS>(queries.go(set), maps.go, full, 1, x->h, x->rows.row, x->b);
    }
    for (int r = lane; r < E::ROWS; r += WARP) {
        const float sum = r < x->rows.count ? *lse.at(p, x->b, x->rows.row + r, x->h) : -INFINITY;
        queries.lse2[set][r] = sum == -INFINITY ? INFINITY : sum * LOG2_E;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(full);
}

/* A stage by one thread: tile `i` of the item's keys and values; -1: O. */
template <class E, class L>
__device__ __forceinline__ void load_stage(const AttnProblem &p, const DqMaps &maps, const QueryItem *x, int i,
                                           const DqKeyTiles<E, L> &keys, const Ring<L::STAGES> &ring)
{
    const int stage = ring.stage;
    Barrier *full = &keys.full[stage];
    barrier_wait(&keys.empty[stage], ring.parity ^ 1);
    barrier_expect(full, 2 * L::KEYS * 2);
    if (i < 0) {
        load_rows<E, E::ROWS>(keys.o(stage), maps.o, full, 1, x->h, x->rows.row, x->b);
    } else {
        const int row = walk_tile(x->walk, p.k, i, E::COLS).row, h = x->h / p.group;
        load_rows<E, E::COLS>(keys.k(stage), maps.k, full, 1, h, row, x->b);
        load_rows<E, E::COLS>(keys.v(stage), maps.v, full, 1, h, row, x->b);
    }
}

template <class E, class L>
__device__ __forceinline__ void load_items(const AttnProblem &p, const BlockOrder &order, const DqMaps &maps,
                                           const RowValues &lse, const DqQueryTiles<E, L> &queries,
                                           const DqKeyTiles<E, L> &keys)
{
    Ring<L::SETS> set = { 0, 0 };
    Ring<L::STAGES> stage = { 0, 0 };
    for (bool there = true; there; set.next()) {
        QueryItem *x = &queries.item[set.stage];
        barrier_wait(&queries.empty[set.stage], set.parity ^ 1);
        there = query_item<E>(p, order, x);
        __syncwarp();
        load_queries<E, L>(p, maps, lse, queries, set.stage, there);
        const int tiles = x->tiles;
        for (int i = -1; i < tiles; i++) {
            if (threadIdx.x % WARP == 0) load_stage<E, L>(p, maps, x, i, keys, stage);
            stage.next();
        }
        __syncwarp();
    }
}

/* ---- formulas ---- */

/* Deltas of this thread's two rows; 4 lanes a row. Chunks of o and go lie alike. */
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

/* Scores s become the weights of the keys' values. */
template <class E>
__device__ __forceinline__ void query_weights(const AttnProblem &p, typename E::Scores &s, const float lse2[2])
{
    const float scale2 = p.scale * LOG2_E;
    UNROLL
    for (int i = 0; i < 2; i++)
        UNROLL
        for (int j = 0; j < E::N; j++) s.at(i, j) = E::exp2(fmaf(s.at(i, j), scale2, -lse2[i]));
}

/* Rows that a thread works on, and those of its warp. */
struct QueryRows {
    float lse2[2], delta[2];
    Range warp; /* positions of the warp's rows */
};

/* Scores s become capped and masked, and weights unless dropout or a cap needs the scores once more. */
template <class E, bool PLAIN>
__device__ __forceinline__ void query_scores(const AttnProblem &p, typename E::Scores &s, const QueryItem *x,
                                             const QueryRows &r, const RowTile &tile)
{
    if (!PLAIN && p.softcap > 0) cap_scores<E>(p, s);
    if (tile.count < E::COLS || !all_see(r.warp, x->most_low, range_of(tile))) mask_keys<E>(p, s, x->b, x->rows, tile);
    if (PLAIN) query_weights<E>(p, s, r.lse2);
}

/* Weights s (PLAIN) or scores s become ds. */
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

/* ---- a warpgroup that computes ---- */

/* Results of the kernel: its parameters, so that they stay in constant memory. wide: if its rows have data, they are
 * written in fp32 instead of dq. */
template <class T> struct DqResults {
    const QueryHeads<T> &dq;
    const WideRows &wide;
    const RowValues &delta;
};

/* Products of a tile. */
template <class E> struct DqProducts {
    typename E::Scores s, dp; /* q k^T, dO v^T */
};

/* A warpgroup on its way through the tiles of an item. */
template <class E, class L, bool PLAIN> struct DqGroup {
    typedef typename E::Sums Sums;
    const AttnProblem &p;
    const DqKeyTiles<E, L> &keys;
    const int group, lane;
    const uint32_t key_begin;
    Ring<L::STAGES> stage;
    const QueryItem *x;
    RowTile rows;
    int tiles, b, h; /* the item's, in registers */
    uint32_t q, go;  /* the warpgroup's rows of the item's tiles */
    QueryRows row;
    Range group_rows; /* positions of the warpgroup's rows */
    int held;         /* stage that the last product reads; -1: none */
    int i;            /* tile of the item */
    RowTile tile;     /* the one that was found */

    __device__ __forceinline__ DqGroup(const AttnProblem &problem, const DqKeyTiles<E, L> &key_tiles, int warp)
        : p(problem), keys(key_tiles), group(warp / 4), lane(threadIdx.x % WARP),
          key_begin(E::begin_of(key_tiles.tiles)), stage{ 0, 0 }
    {
    }

    /* false: no item comes any more. */
    __device__ __forceinline__ bool begin(const DqQueryTiles<E, L> &queries, int set)
    {
        x = &queries.item[set];
        rows = x->rows;
        tiles = x->tiles, b = x->b, h = x->h;
        if (tiles < 0) return false;
        q = E::begin_of(queries.q(set) + group * (GROUP_ROWS * E::ATOM)), go = q + E::units(L::ROWS);
        row.warp = warp_range<E>(rows);
        const int past = min((group + 1) * GROUP_ROWS, rows.count);
        group_rows = { rows.position + group * GROUP_ROWS, rows.position + past - 1 };
        held = -1, i = 0;
        tile = {};
        return true;
    }

    /* Statistics of the thread's rows: lse, and delta of dO and O, which the next stage holds. */
    __device__ __forceinline__ void read_rows(const DqQueryTiles<E, L> &queries, int set, const RowValues &delta,
                                              bool writes)
    {
        const typename E::Place at = E::place();
        barrier_wait(&keys.full[stage.stage], stage.parity);
        row_deltas<E>(row.delta, queries.go(set), keys.o(stage.stage));
        __syncwarp();
        give_back(stage.stage);
        stage.next();
        UNROLL
        for (int r = 0; r < 2; r++) {
            row.lse2[r] = queries.lse2[set][at.row(r)];
            if (at.row(r) >= rows.count) row.delta[r] = 0;
            else if (lane % 4 == 0 && writes) *delta.at(p, b, rows.row + at.row(r), h) = row.delta[r];
        }
    }

    __device__ __forceinline__ void give_back(int at) const
    {
        if (lane == 0) barrier_arrive(&keys.empty[at]);
    }

    /* Goes to the next tile that the warpgroup's rows may see, and gives back those before. false: there is none. */
    __device__ __forceinline__ bool find()
    {
        for (; i < tiles; pass()) {
            tile = walk_tile(x->walk, p.k, i, E::COLS);
            barrier_wait(&keys.full[stage.stage], stage.parity);
            if (may_see(p, group_rows, range_of(tile))) return true;
            if (held >= 0) { /* else the loader waits for this stage, once all others are left out */
                wgmma_wait<0>();
                give_back(held);
                held = -1;
            }
            __syncwarp();
            give_back(stage.stage);
        }
        return false;
    }

    __device__ __forceinline__ void pass() { i++, stage.next(); }

    /* ---- one tile after another ---- */

    __device__ __forceinline__ void add_tile(Sums &sum)
    {
        DqProducts<E> now;
        typename E::Weights w;
        const uint32_t k = key_begin + stage.stage * E::units(2 * L::KEYS);
        E::multiply(now.s, q, k);
        wgmma_wait<1>();
        if (held >= 0) give_back(held);
        E::multiply(now.dp, go, k + E::units(L::KEYS));
        held = stage.stage;
        wgmma_wait<1>();
        wgmma_end(now.s.x);
        query_scores<E, PLAIN>(p, now.s, x, row, tile);
        wgmma_wait<0>();
        wgmma_end(now.dp.x);
        query_gradients<E, PLAIN>(p, now.s, now.dp, x, row, tile.position);
        E::round(w, now.s);
        E::add_weighted(sum, w, k);
        pass();
    }

    /* ---- the next tile's products beside this one's ds ---- */

    /* Starts the products of the tile that was found. */
    __device__ __forceinline__ void multiply(DqProducts<E> &next) const
    {
        const uint32_t k = key_begin + stage.stage * E::units(2 * L::KEYS);
        E::multiply(next.s, q, k);
        E::multiply(next.dp, go, k + E::units(L::KEYS));
    }

    /* Products that are done become s - lse, in powers of 2, and dp - delta. */
    __device__ __forceinline__ void take(DqProducts<E> &now, DqProducts<E> &next) const
    {
        wgmma_end(next.s.x);
        wgmma_end(next.dp.x);
        const float scale2 = p.scale * LOG2_E;
        UNROLL
        for (int r = 0; r < 2; r++)
            UNROLL
            for (int j = 0; j < E::N; j++) {
                now.s.at(r, j) = fmaf(next.s.at(r, j), scale2, -row.lse2[r]);
                now.dp.at(r, j) = next.dp.at(r, j) - row.delta[r];
            }
    }

    /* Adds ds k of `seen`, the tile in stage `at`; waits for all earlier products. */
    __device__ __forceinline__ void add_taken(Sums &sum, DqProducts<E> &now, const RowTile &seen, int at)
    {
        if (seen.count < E::COLS || !all_see(row.warp, x->most_low, range_of(seen)))
            mask_keys<E>(p, now.s, b, x->rows, seen);
        UNROLL
        for (int r = 0; r < 2; r++)
            UNROLL
            for (int j = 0; j < E::N; j++) now.s.at(r, j) = E::exp2(now.s.at(r, j)) * now.dp.at(r, j);
        wgmma_wait<0>();
        if (held >= 0) give_back(held);
        held = at;
        typename E::Weights w;
        E::round(w, now.s);
        E::add_weighted(sum, w, key_begin + at * E::units(2 * L::KEYS));
    }

    __device__ __forceinline__ void add_tiles_ahead(Sums &sum)
    {
        DqProducts<E> now, next;
        bool more = find();
        if (more) {
            multiply(next);
            wgmma_wait<0>();
            take(now, next);
        }
        while (more) {
            const RowTile seen = tile;
            const int at = stage.stage;
            pass();
            more = find();
            if (!more) {
                add_taken(sum, now, seen, at);
                break;
            }
            multiply(next);
            add_taken(sum, now, seen, at);
            take(now, next);
        }
    }

    /* ---- results ---- */

    __device__ __forceinline__ void end(Sums &sum) const
    {
        wgmma_wait<0>();
        wgmma_end(sum.x);
        if (held >= 0) give_back(held);
    }

    /* Rows of dq pass through Q's tile on their way to global memory. */
    __device__ __forceinline__ void store(const Sums &sum, typename E::T *q_tile, const DqResults<typename E::T> &out,
                                          bool idle) const
    {
        const QueryHeads<float> &wide = out.wide.rows;
        if (wide.data) {
            if (!idle)
                E::add_wide(sum, p.scale, out.wide.resumed, wide.at(p, b, rows.row, h), wide.row, rows.count, p.C);
        } else {
            named_sync(1 + group, WARPGROUP); /* the products of all its warps are over */
            E::store(sum, p.scale, q_tile, out.dq.at(p, b, rows.row, h), out.dq.row, rows.count, p.C);
            proxy_fence();
        }
    }
};

template <class E, class L, bool PLAIN>
__device__ __forceinline__ void compute_items(DqGroup<E, L, PLAIN> &g, const DqQueryTiles<E, L> &queries,
                                              const DqResults<typename E::T> &out)
{
    for (Ring<L::SETS> set = { 0, 0 };; set.next()) {
        barrier_wait(&queries.full[set.stage], set.parity);
        if (!g.begin(queries, set.stage)) return;
        const bool idle = g.tiles == 0 && out.wide.resumed; /* dq and delta stay as they are */
        g.read_rows(queries, set.stage, out.delta, !idle);
        typename E::Sums sum;
        E::clear(sum);
        wgmma_end(sum.x);
        if constexpr (L::AHEAD && PLAIN) g.add_tiles_ahead(sum);
        else
            while (g.find()) g.add_tile(sum);
        g.end(sum);
        g.store(sum, queries.q(set.stage), out, idle);
        __syncwarp();
        if (g.lane == 0) barrier_arrive(&queries.empty[set.stage]);
    }
}

template <class E, class L, bool PLAIN>
__global__ void __launch_bounds__(E::THREADS, 1)
    attention_dq_hopper_kernel(AttnProblem p, BlockOrder order, TENSOR_MAP(q_map), TENSOR_MAP(go_map),
                               TENSOR_MAP(o_map), TENSOR_MAP(k_map), TENSOR_MAP(v_map), QueryHeads<typename E::T> dq,
                               WideRows wide, RowValues lse, RowValues delta)
{
#if HOPPER
    typedef typename E::T T;
    DYNAMIC_SHARED(T, tiles); /* sets of Q, dO; then stages of K, V */
    SHARED(QueryItem, item, [L::SETS]);
    SHARED(float, lse2, [L::SETS][E::ROWS]);
    SHARED(Barrier, queries_full, [L::SETS]);
    SHARED(Barrier, queries_empty, [L::SETS]);
    SHARED(Barrier, keys_full, [L::STAGES]);
    SHARED(Barrier, keys_empty, [L::STAGES]);
    const DqQueryTiles<E, L> queries = { tiles, item, lse2, queries_full, queries_empty };
    const DqKeyTiles<E, L> keys = { tiles + L::SETS * 2 * L::ROWS, keys_full, keys_empty };
    if (threadIdx.x == 0) barriers_init<E, L>(queries, keys);
    __syncthreads();
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0);
    if (warp < E::WARPS) {
        registers_take<E::TAKE>();
        DqGroup<E, L, PLAIN> group(p, keys, warp);
        const DqResults<T> out = { dq, wide, delta };
        compute_items<E, L, PLAIN>(group, queries, out);
        return;
    }
    registers_give<E::GIVE>();
    const DqMaps maps = { q_map, go_map, o_map, k_map, v_map };
    if (warp == E::WARPS) load_items<E, L>(p, order, maps, lse, queries, keys);
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
