/*
 * Attention, forward, on Hopper (sm_90a): the results of attention_fwd.cu by wgmma and TMA. That file says what a row
 * of queries is computed from, and how its statistics are kept. The engine is in attention_wgmma.cuh.
 *
 * Mapping  as many blocks as multiprocessors. An item is 64 queries a warpgroup, of one head; a counter says which a
 *          block takes next. A warp of the last warpgroup (load_items) finds the next item and has TMA load its
 *          queries, keys and values, ahead of their use, into rings of tiles. A warpgroup (compute_items) leaves out
 *          the tiles that none of its own rows sees. Rows of a span beyond whole items are the first item, which sees
 *          fewest keys.
 * Overlap  a warpgroup issues the scores of a tile and, behind them, weights of the tile before times its values
 *          (FwdGroup::multiply). While these run it turns scores into weights (weigh). Issuing goes round the
 *          warpgroups, so that the exponentials of one run beside the products of another. If two items' queries fit,
 *          the last product of an item runs beside the first scores of the next. With a cap or dropout a warpgroup
 *          waits for all it has issued: the scores need the registers of the weights.
 * Order    heads in sections whose keys and values the L2 cache holds together; in a section the rows that see most
 *          keys first. Which block takes an item changes no bit.
 * Takes    matrices of 16 bits whose wider width is 40 or more (to 256), 128 keys or more, on a GPU that executes code
 *          for sm_90a. Other calls go to mma.sync (attention_fwd.cu): fp32 to FMA. This depends on the shape alone, so
 *          that repeats are equal bits.
 * Rate     H100, bf16, TFLOP/s (half of T^2 counted where causal; in brackets mma.sync): B 64 H 12 T 1024 width 64
 *          causal 305 (185); B 8 H 16 T 2048 width 64 full 459 (246), 96 causal 411 (221), 128 causal 526 (259) and
 *          full 584 (314), 192 with values of 128 causal 531 (194); B 1 H 32 T 8192 width 128 causal 645 (292).
 *          Width 64 is bound by exponentials and products alike: 16 a clock and multiprocessor take as long as the
 *          products of their scores at the chip's full rate.
 * Needs    rows at multiples of 16 bytes; 4 bytes of the device's workspace, for the counter.
 * Source   Shah et al. 2024 (FlashAttention-3).
 */
#include "attention_fwd.cuh"
#include "attention_wgmma.cuh"

/* Registers of a thread in the warpgroup that loads and in those that compute. Their sum over the block is that of its
 * start (65,536 in all). */
template <int GROUPS> struct Registers {
    static constexpr int LOADS = GROUPS == 3 ? 32 : 40, COMPUTES = GROUPS == 3 ? 160 : 232;
};

/* Order of the items: `section` of the heads of all samples at a time; in it the last tile of each head, then those
 * before. */
struct FwdOrder {
    int heads, H, tiles, section; /* B H heads in all; tiles of queries a head */
};

/* Item: what a block works on next, written by the warp that loads. */
template <int GROUPS> struct FwdItem {
    RowTile rows;
    int sample, head, tiles; /* tiles of keys; -1: no item comes any more */
    TileWalk walk;
    /* Each warpgroup's rows: the smallest and the largest row_low; first and end of the tiles that one may see. */
    int low[GROUPS], most_low[GROUPS], first[GROUPS], end[GROUPS];
};

template <class E, int STAGES_, int QUERIES_> struct FwdShared {
    typedef typename E::T T;
    static constexpr int STAGES = STAGES_, QUERIES = QUERIES_, ITEMS = 4, THREADS = E::THREADS + 128, SIZE = sizeof(T);
    static constexpr int Q = E::GROUP_ROWS * E::C, K = E::COLS * E::C, V = E::COLS * E::V; /* elements of a tile */
    static constexpr int BYTES = (QUERIES * E::GROUPS * Q + STAGES * (K + V)) * SIZE;
    struct Bars {
        Barrier q_full[E::GROUPS * QUERIES], q_empty[E::GROUPS * QUERIES], k_full[STAGES], k_empty[STAGES],
            v_full[STAGES], v_empty[STAGES];
        Barrier item_full[ITEMS], item_empty[ITEMS];
        FwdItem<E::GROUPS> item[ITEMS];
    };
    T *q, *k, *v; /* rings of tiles */
    Bars *bars;
    __device__ __forceinline__ FwdShared(T *tiles, Bars *barriers)
        : q(tiles), k(q + QUERIES * E::GROUPS * Q), v(k + STAGES * K), bars(barriers)
    {
    }
};

template <class S> __device__ __forceinline__ void barriers_init(typename S::Bars *bars, int groups)
{
    for (int g = 0; g < groups * S::QUERIES; g++)
        barrier_init(&bars->q_full[g], 1), barrier_init(&bars->q_empty[g], 4);
    for (int i = 0; i < S::STAGES; i++) {
        barrier_init(&bars->k_full[i], 1), barrier_init(&bars->k_empty[i], 4 * groups);
        barrier_init(&bars->v_full[i], 1), barrier_init(&bars->v_empty[i], 4 * groups);
    }
    for (int i = 0; i < S::ITEMS; i++)
        barrier_init(&bars->item_full[i], 1), barrier_init(&bars->item_empty[i], 4 * groups);
    barriers_ready();
}

/* Slot of a ring that number n takes, and the phase of its barriers in that round. */
template <int COUNT> __device__ __forceinline__ int ring_at(int n) { return n % COUNT; }
template <int COUNT> __device__ __forceinline__ int ring_phase(int n) { return n / COUNT & 1; }

__device__ __forceinline__ bool overlap(const Range &a, const Range &b)
{
    return a.first <= b.last && b.first <= a.last;
}

/* ---- the warp that loads ---- */

/* Tile `i` of the queries. A span's rows beyond whole tiles are its first one, which sees fewest keys. */
template <class E> __device__ __forceinline__ RowTile query_tile(const AttnSpans &spans, int i)
{
    RowTile t = walk_tile(walk_all(spans, E::ROWS), spans, i, E::ROWS);
    const int beyond = (t.row < spans.count[0] ? spans.count[0] : spans.count[1]) % E::ROWS;
    if (beyond == 0) return t;
    const int start = t.row < spans.count[0] ? 0 : spans.count[0];
    if (t.row == start) t.count = beyond;
    else t.row -= E::ROWS - beyond, t.position -= E::ROWS - beyond, t.count = E::ROWS;
    return t;
}

/* Lows of each warpgroup's rows, by a warp; returns the smallest. */
template <class E>
__device__ __forceinline__ int find_lows(const AttnProblem &p, int sample, const RowTile &rows, FwdItem<E::GROUPS> *x)
{
    int low = INT_MAX;
    UNROLL_BY(1)
    for (int g = 0; g < E::GROUPS; g++) {
        const int skipped = g * E::GROUP_ROWS;
        const RowTile part = { rows.row + skipped, rows.position + skipped, min(rows.count - skipped, E::GROUP_ROWS) };
        int least = INT_MAX, most = 0;
        if (part.count > 0) tile_lows(p, sample, part, &least, &most);
        if (threadIdx.x % WARP == 0) x->low[g] = least, x->most_low[g] = most;
        low = min(low, least);
    }
    return low;
}

/* Tiles of the walk that each warpgroup may see, by one thread. */
template <class E>
__device__ __forceinline__ void find_seen(const AttnProblem &p, const TileWalk &walk, const RowTile &rows,
                                          FwdItem<E::GROUPS> *x)
{
    UNROLL_BY(1)
    for (int g = 0; g < E::GROUPS; g++) {
        const Range seen = { x->low[g], rows.position + min(rows.count, (g + 1) * E::GROUP_ROWS) - 1 };
        int first = 0, end = seen.first == INT_MAX ? 0 : walk_count(walk);
        for (; end > first; end--)
            if (overlap(seen, range_of(walk_tile(walk, p.k, end - 1, E::COLS)))) break;
        for (; first < end; first++)
            if (overlap(seen, range_of(walk_tile(walk, p.k, first, E::COLS)))) break;
        x->first[g] = first, x->end[g] = end;
    }
}

/* Item `n` of all, by a warp. */
template <class E>
__device__ __forceinline__ void find_item(const AttnProblem &p, const FwdOrder &order, int n, FwdItem<E::GROUPS> *x)
{
    const int begin = n / (order.section * order.tiles) * order.section, at = n - begin * order.tiles;
    const int heads = min(order.section, order.heads - begin), back = at / heads, unit = begin + at - back * heads;
    const int sample = unit / order.H;
    const RowTile rows = query_tile<E>(p.q, order.tiles - 1 - back);
    const int low = find_lows<E>(p, sample, rows, x);
    const TileWalk walk = walk_of(p.k, low, rows.position + rows.count - 1, E::COLS);
    if (threadIdx.x % WARP == 0) {
        x->rows = rows, x->walk = walk;
        x->sample = sample, x->head = unit - sample * order.H, x->tiles = walk_count(walk);
        find_seen<E>(p, walk, rows, x);
    }
}

struct FwdMaps {
    const TensorMap &q, &k, &v;
};

/* Queries of an item, a tile for each warpgroup, by one thread. */
template <class E, class S>
__device__ __forceinline__ void load_queries(const AttnProblem &p, const FwdItem<E::GROUPS> *x, int step,
                                             const S &in, const TensorMap &map)
{
    const int head = x->head / p.group, row = x->sample * p.T + x->rows.row;
    UNROLL_BY(1)
    for (int g = 0; g < E::GROUPS; g++) {
        const int at = ring_at<S::QUERIES>(step) * E::GROUPS + g;
        barrier_wait(&in.bars->q_empty[at], ring_phase<S::QUERIES>(step) ^ 1);
        barrier_expect(&in.bars->q_full[at], S::Q * S::SIZE);
        UNROLL
        for (int c = 0; c < E::C; c += E::BOX)
            tma_load_4d(in.q + at * S::Q + c * E::GROUP_ROWS, map, &in.bars->q_full[at], c, x->head - head * p.group,
                        head, row + g * E::GROUP_ROWS);
    }
}

/* Keys and values of an item, by one thread. `n`: tiles of keys before it; returns those with it. */
template <class E, class S>
__device__ __forceinline__ int load_keys(const AttnProblem &p, const FwdItem<E::GROUPS> *x, int n, const S &in,
                                         const FwdMaps &maps)
{
    const int head = x->head / p.group, sample = x->sample, end = n + x->tiles;
    for (int i = 0; n < end; i++, n++) {
        const int slot = ring_at<S::STAGES>(n), phase = ring_phase<S::STAGES>(n) ^ 1;
        const int row = walk_tile(x->walk, p.k, i, E::COLS).row;
        barrier_wait(&in.bars->k_empty[slot], phase);
        barrier_expect(&in.bars->k_full[slot], S::K * S::SIZE);
        UNROLL
        for (int c = 0; c < E::C; c += E::BOX)
            tma_load_4d(in.k + slot * S::K + c * E::COLS, maps.k, &in.bars->k_full[slot], c, head, row, sample);
        barrier_wait(&in.bars->v_empty[slot], phase);
        barrier_expect(&in.bars->v_full[slot], S::V * S::SIZE);
        UNROLL
        for (int c = 0; c < E::V; c += E::BOX)
            tma_load_4d(in.v + slot * S::V + c * E::COLS, maps.v, &in.bars->v_full[slot], c, head, row, sample);
    }
    return end;
}

template <class E, class S>
__device__ __forceinline__ void load_items(const AttnProblem &p, const FwdOrder &order, int *next, const S &in,
                                           const FwdMaps &maps)
{
    const int lane = threadIdx.x % WARP;
    int n = 0; /* tiles of keys so far */
    for (int step = 0;; step++) {
        const int slot = ring_at<S::ITEMS>(step);
        FwdItem<E::GROUPS> *x = &in.bars->item[slot];
        barrier_wait(&in.bars->item_empty[slot], ring_phase<S::ITEMS>(step) ^ 1);
        int at = 0;
        if (lane == 0) at = atomicAdd(next, 1);
        at = __shfl_sync(ALL_LANES, at, 0);
        const bool over = at >= order.heads * order.tiles;
        if (!over) find_item<E>(p, order, at, x);
        if (lane == 0) {
            if (over) x->tiles = -1;
            barrier_arrive(&in.bars->item_full[slot]);
            if (!over) {
                load_queries<E, S>(p, x, step, in, maps.q);
                n = load_keys<E, S>(p, x, n, in, maps);
            }
        }
        __syncwarp();
        if (over) return;
    }
}

/* ---- a warpgroup that computes ---- */

__device__ __forceinline__ void warp_arrive(Barrier *b)
{
    __syncwarp();
    if (threadIdx.x % WARP == 0) barrier_arrive(b);
}

/* Scores that the mask excludes become -inf, in columns 4 BEGIN .. 4 END - 1. LOWS: some keys may lie before a row's
 * low. */
template <class E, int BEGIN, int END, bool LOWS>
__device__ __forceinline__ void mask_scores(const AttnProblem &p, typename E::Scores &s, int b, const RowTile &q,
                                            const RowTile &k)
{
    const typename E::Place at = E::place();
    UNROLL
    for (int i = 0; i < E::R; i++) {
        const int row = min(at.row(i), q.count - 1), position = q.position + row, column0 = k.position + at.column(0);
        const int last = min(position, k.position + k.count - 1) - column0;
        const int first = LOWS ? row_low(p, b, q.row + row, position) - column0 : 0;
        UNROLL
        for (int j = BEGIN; j < END; j++) {
            const int c = j / 2 * 8 + j % 2; /* compared with constants: no registers for columns */
            if (c > last || (LOWS && c < first)) s.at(i, j) = -INFINITY;
        }
    }
}

/* Masks these columns where it is needed. */
template <class E, int BEGIN, int END>
__device__ __forceinline__ void mask_part(const AttnProblem &p, typename E::Scores &s, const FwdItem<E::GROUPS> *item,
                                          const RowTile &k, int group)
{
    const Range part = { k.position + 4 * BEGIN, k.position + 4 * END - 1 };
    const int most_low = item->most_low[group];
    if (4 * END <= k.count && all_see(warp_range<E>(item->rows), most_low, part)) return;
    if (most_low <= part.first) mask_scores<E, BEGIN, END, false>(p, s, item->sample, item->rows, k);
    else mask_scores<E, BEGIN, END, true>(p, s, item->sample, item->rows, k);
}

/* Scores of a tile become weights, which are not rounded yet. factor: of earlier tiles' sums. */
template <class E>
__device__ __forceinline__ void weigh(const AttnProblem &p, const FwdItem<E::GROUPS> *item, int i, int group,
                                      typename E::Scores &s, float factor[E::R], FwdRows<E> &rows)
{
    constexpr int HALF = E::N / 2;
    const RowTile keys = walk_tile(item->walk, p.k, i, E::COLS);
    if (!E::PLAIN && p.softcap > 0) cap_scores<E>(p, s);
    mask_part<E, 0, HALF>(p, s, item, keys, group);
    mask_part<E, HALF, E::N>(p, s, item, keys, group);
    softmax_step<E>(s, factor, rows, p.scale * LOG2_E);
    if (!E::PLAIN && p.dropout.threshold)
        drop_keys<E>(s, head_dropout(p, item->sample, item->head), item->rows.position, keys.position);
}

/* Results of the kernel: its parameters, so that they stay in constant memory. */
template <class T> struct FwdResults {
    const Heads<T> &out;
    const RowValues &lse;
    const RunningRows &running;
    long long *logit_max;
};

/* A warpgroup on its way through the items. Weights of a tile are owed to o until values are multiplied by them, which
 * goes on beside the scores of the next tile, of the same item or of the next. */
template <class E, class S> struct FwdGroup {
    const AttnProblem &p;
    const S &in;
    const int group;
    int owed;   /* number of the tile whose weights are in w; -1: none */
    int values; /* number of the first tile whose values have not been given back */
    typename E::Sums o;
    typename E::Scores s;
    typename E::Weights w;
    FwdRows<E> rows, rows_before; /* statistics of the item's rows, and of the item before */

    __device__ __forceinline__ FwdGroup(const AttnProblem &problem, const S &shared)
        : p(problem), in(shared), group(__shfl_sync(ALL_LANES, static_cast<int>(threadIdx.x / 128), 0)), owed(-1),
          values(0)
    {
        clear_rows();
    }

    __device__ __forceinline__ void clear_rows()
    {
        UNROLL
        for (int i = 0; i < E::R; i++) {
            rows.max[i] = -INFINITY;
            rows.sum[i] = 0;
        }
    }

    /* ---- turns: who issues ---- */

    __device__ __forceinline__ void turn_begins() const
    {
        named_sync(1 + group, 2 * 128);
    }
    __device__ __forceinline__ void turn_ends() const
    {
        named_arrive(1 + (group + 1 == E::GROUPS ? 0 : group + 1), 2 * 128);
    }

    /* ---- tiles that are left out ---- */

    __device__ __forceinline__ void skip_values(int to)
    {
        for (; values < to; values++) {
            barrier_wait(&in.bars->v_full[ring_at<S::STAGES>(values)], ring_phase<S::STAGES>(values));
            warp_arrive(&in.bars->v_empty[ring_at<S::STAGES>(values)]);
        }
    }
    /* Keys are given back at once, values when none before them are owed for. */
    __device__ __forceinline__ void skip(int from, int to)
    {
        for (int n = from; n < to; n++) {
            turn_begins();
            turn_ends();
            barrier_wait(&in.bars->k_full[ring_at<S::STAGES>(n)], ring_phase<S::STAGES>(n));
            warp_arrive(&in.bars->k_empty[ring_at<S::STAGES>(n)]);
            if (owed < 0) skip_values(n + 1);
        }
    }
    /* Is the loader stuck if this group waits for the keys of tile n while weights are owed? */
    __device__ __forceinline__ bool too_far(int n) const { return owed >= 0 && n - owed > S::STAGES; }

    /* ---- values ---- */

    __device__ __forceinline__ void issue_owed()
    {
        barrier_wait(&in.bars->v_full[ring_at<S::STAGES>(owed)], ring_phase<S::STAGES>(owed));
        wgmma_begin(o.x);
        E::add_weighted(o, w, in.v + ring_at<S::STAGES>(owed) * S::V);
        wgmma_commit();
    }
    __device__ __forceinline__ void end_owed()
    {
        wgmma_wait<0>();
        wgmma_end(o.x);
        warp_arrive(&in.bars->v_empty[ring_at<S::STAGES>(owed)]);
        values = owed + 1;
    }
    __device__ __forceinline__ void settle_owed()
    {
        issue_owed();
        end_owed();
        owed = -1;
    }

    /* ---- a tile; `n`: its number ---- */

    /* Issues its scores and, if OWED, weights of the tile before times its values. Waits for the scores. */
    template <bool OWED> __device__ __forceinline__ void multiply(int n, const typename E::T *q)
    {
        const int at = ring_at<S::STAGES>(n);
        barrier_wait(&in.bars->k_full[at], ring_phase<S::STAGES>(n));
        turn_begins();
        wgmma_begin(s.x);
        E::multiply(s, q, in.k + at * S::K);
        wgmma_commit();
        if (OWED) issue_owed();
        turn_ends();
        if (OWED) wgmma_wait<E::PLAIN ? 1 : 0>(); /* (a cap and dropout need the registers of the weights before) */
        else wgmma_wait<0>();
        wgmma_end(s.x);
        warp_arrive(&in.bars->k_empty[at]);
    }
    /* Weights are rounded, and owed from here on. */
    __device__ __forceinline__ void owe(int n)
    {
        E::round(w, s);
        owed = n;
    }

    /* ---- results ---- */

    /* Results of item number `step`, whose rows have the statistics `r`. */
    __device__ __forceinline__ void finish(int step, const FwdRows<E> &r, const FwdResults<typename E::T> &to)
    {
        const FwdItem<E::GROUPS> *item = &in.bars->item[ring_at<S::ITEMS>(step)];
        if (item->tiles > 0 || !to.running.o.resumed || !to.running.unfinished) /* else all stays as it is */
            finish_rows<E>(p, o, r, item->rows, item->sample, item->head, static_cast<typename E::T *>(nullptr),
                           to.out, to.lse, to.running, to.logit_max);
        __syncwarp(); /* all lanes have read what the item says */
        warp_arrive(&in.bars->item_empty[ring_at<S::ITEMS>(step)]);
    }
};

/* Tiles of item number `step` that the warpgroup may see; `n`: tiles of keys before the item. If weights of the item
 * before are still owed, the first tile finishes that item. */
template <class E, class S>
__device__ __forceinline__ void compute_tiles(FwdGroup<E, S> &g, int step, int n, const typename E::T *q,
                                              const FwdResults<typename E::T> &to)
{
    const FwdItem<E::GROUPS> *item = &g.in.bars->item[ring_at<S::ITEMS>(step)];
    const int first = item->first[g.group], end = item->end[g.group];
    float factor[E::R];
    int i = first;
    if (first < end && g.owed < 0) {
        g.template multiply<false>(n + i, q);
        weigh<E>(g.p, item, i, g.group, g.s, factor, g.rows);
        g.owe(n + i++);
    }
    for (; i < end; i++) {
        g.template multiply<true>(n + i, q);
        weigh<E>(g.p, item, i, g.group, g.s, factor, g.rows);
        g.end_owed();
        if (i == first) {
            g.finish(step - 1, g.rows_before, to);
            E::clear(g.o);
            g.skip_values(n + i);
        } else {
            E::scale_rows(g.o, factor);
        }
        g.owe(n + i);
    }
}

template <class E, class S>
__device__ __forceinline__ void compute_items(const AttnProblem &p, const S &in, const FwdResults<typename E::T> &to)
{
    FwdGroup<E, S> g(p, in);
    if (g.group == E::GROUPS - 1) g.turn_ends();
    int n = 0; /* tiles of keys before those of the item */
    for (int step = 0;; step++) {
        const int slot = ring_at<S::ITEMS>(step), query = ring_at<S::QUERIES>(step) * E::GROUPS + g.group;
        barrier_wait(&in.bars->item_full[slot], ring_phase<S::ITEMS>(step));
        const FwdItem<E::GROUPS> *item = &in.bars->item[slot];
        const int count = item->tiles, first = item->first[g.group], end = item->end[g.group];
        if (g.owed >= 0 && (S::QUERIES == 1 || count < 0 || first == end || g.too_far(n + first))) {
            g.settle_owed();
            g.skip_values(n);
            g.finish(step - 1, g.rows, to);
        }
        if (count < 0) break;
        g.skip(n, n + first);
        if (g.owed < 0) E::clear(g.o);
        barrier_wait(&in.bars->q_full[query], ring_phase<S::QUERIES>(step));
        g.rows_before = g.rows;
        g.clear_rows();
        compute_tiles<E, S>(g, step, n, in.q + query * S::Q, to);
        warp_arrive(&in.bars->q_empty[query]);
        if (g.too_far(n + count)) { /* (the next item is told of behind this one's last values) */
            g.settle_owed();
            g.finish(step, g.rows, to);
        } else if (first == end) {
            g.finish(step, g.rows, to);
        }
        g.skip(n + end, n + count);
        n += count;
    }
    if (g.group == 0) g.turn_begins(); /* the last turn, which nobody takes */
}

template <class E, int STAGES, int QUERIES>
__global__ void __launch_bounds__(E::THREADS + 128, 1)
    attention_fwd_hopper_kernel(AttnProblem p, FwdOrder order, int *next, Heads<typename E::T> out, RowValues lse,
                                RunningRows running, long long *logit_max, TENSOR_MAP(q_map), TENSOR_MAP(k_map),
                                TENSOR_MAP(v_map))
{
#if HOPPER
    typedef FwdShared<E, STAGES, QUERIES> S;
    DYNAMIC_SHARED(typename E::T, tiles);
    SHARED(typename S::Bars, bars, [1]);
    const S in(tiles, bars);
    if (threadIdx.x == 0) barriers_init<S>(bars, E::GROUPS);
    __syncthreads();
    if (threadIdx.x / 128 == E::GROUPS) {
        registers_give<Registers<E::GROUPS>::LOADS>();
        const FwdMaps maps = { q_map, k_map, v_map };
        if (threadIdx.x / WARP == E::WARPS) load_items<E, S>(p, order, next, in, maps);
    } else {
        registers_take<Registers<E::GROUPS>::COMPUTES>();
        const FwdResults<typename E::T> to = { out, lse, running, logit_max };
        compute_items<E, S>(p, in, to);
    }
#endif
}

/* ---- launching ---- */

/* Map of a tensor whose heads lie in one or two dimensions. dim, step: elements and steps of each dimension, innermost
 * first; a box has `rows` of dimension `at`. */
static Err map_of(TensorMap *out, const void *data, const int64_t dim[4], const int64_t step[4], int columns, int at,
                  int rows)
{
    TensorBox b = {};
    b.data = data, b.rank = 4, b.swizzle = columns * 2;
    for (int i = 0; i < 4; i++) b.dim[i] = dim[i], b.stride[i] = step[i] * 2, b.box[i] = 1;
    b.box[0] = columns, b.box[at] = rows;
    return tensor_map(out, &b);
}

template <class E> static Err query_map(TensorMap *out, const AttnProblem &p, Tensor t)
{
    const QueryHeads<const typename E::T> q = query_heads_of<const typename E::T>(t);
    const int64_t dim[4] = { p.C, p.group, t.dim[2] / p.group, t.dim[0] * t.dim[1] };
    const int64_t step[4] = { 1, q.head, p.group * q.head + q.between, q.row };
    return map_of(out, q.data, dim, step, E::BOX, 3, E::GROUP_ROWS);
}

template <class E> static Err key_map(TensorMap *out, Tensor t)
{
    const Heads<const typename E::T> k = heads_of<const typename E::T>(t);
    const int64_t dim[4] = { t.dim[3], t.dim[2], t.dim[1], t.dim[0] }, step[4] = { 1, k.head, k.row, k.sample };
    return map_of(out, k.data, dim, step, E::BOX, 2, E::COLS);
}

constexpr int64_t SECTION_BYTES = 32 << 20;

static FwdOrder order_of(const AttnProblem &p, const AttnForward &a, int rows)
{
    const int64_t keys = a.k.dim[1] * (p.C + p.V) * 2, at_once = SECTION_BYTES / keys * p.group;
    FwdOrder o;
    o.H = static_cast<int>(a.q.dim[2]);
    o.heads = static_cast<int>(a.q.dim[0]) * o.H;
    o.tiles = walk_count(walk_all(p.q, rows));
    o.section = static_cast<int>(at_once < p.group ? p.group : at_once < o.heads ? at_once : o.heads);
    return o;
}

template <class E, int STAGES, int QUERIES>
static Err launch_hopper(Stream *s, const AttnProblem &p, const AttnForward &a)
{
    typedef typename E::T T;
    typedef FwdShared<E, STAGES, QUERIES> Shared;
    const FwdOrder order = order_of(p, a, E::ROWS);
    const int64_t items = static_cast<int64_t>(order.heads) * order.tiles;
    if (items == 0) return ERR_OK;
    TRY(allow_shared(attention_fwd_hopper_kernel<E, STAGES, QUERIES>, Shared::BYTES));
    int *next;
    TRY(items_taken(s, &next));
    TensorMap q, k, v;
    TRY(query_map<E>(&q, p, a.q));
    TRY(key_map<E>(&k, a.k));
    TRY(key_map<E>(&v, a.v));
    const RunningRows running = { wide_rows(a.o, a.q.dtype, a.resumed || a.unfinished, a.resumed), values_of(a.max),
                                  values_of(a.sum), a.unfinished };
    const unsigned blocks = static_cast<unsigned>(items < s->dev->threads ? items : s->dev->threads);
    LAUNCH((attention_fwd_hopper_kernel<E, STAGES, QUERIES>), blocks, Shared::THREADS, Shared::BYTES, cuda_stream(s), p,
           order, next, heads_of<T>(a.o), values_of(a.lse), running, data_of<long long>(a.logit_max), q, k, v);
    return ERR_OK;
}

/* Limits: fewer keys than a tile, and widths that fill no more than half of one, are left to mma.sync. */
constexpr int64_t FEWEST_KEYS = 128;
constexpr int NARROWEST = 40;

bool attention_fwd_hopper_fits(const AttnProblem &p, const AttnForward &a)
{
    if (a.q.dtype == F32 || widest(p) < NARROWEST || a.k.dim[1] < FEWEST_KEYS) return false;
    if (a.q.dim[0] * a.q.dim[1] * a.q.dim[2] >= INT32_MAX) return false; /* items are counted in 32 bits */
    static const bool there = hopper_code(attention_fwd_hopper_kernel<WgmmaEngine<bf16, 64, 64, 128, 3, true>, 4, 2>);
    return there;
}

/* WgmmaEngine<type, width of keys, of values, columns, warpgroups, without cap and dropout>, tiles of keys and values,
 * of queries a warpgroup */
template <class T, bool PLAIN> static Err fwd_hopper(Stream *s, const AttnProblem &p, const AttnForward &a)
{
    if (widest(p) <= 64) return launch_hopper<WgmmaEngine<T, 64, 64, 128, PLAIN ? 3 : 2, PLAIN>, 4, 2>(s, p, a);
    if (widest(p) <= 96) return launch_hopper<WgmmaEngine<T, 96, 96, 96, PLAIN ? 3 : 2, PLAIN>, 4, 2>(s, p, a);
    if (widest(p) <= 128) return launch_hopper<WgmmaEngine<T, 128, 128, 128, 2, PLAIN>, 3, 1>(s, p, a);
    if (p.C <= 192 && p.V <= 128) return launch_hopper<WgmmaEngine<T, 192, 128, 128, 2, PLAIN>, 2, 1>(s, p, a);
    if (widest(p) <= 192) return launch_hopper<WgmmaEngine<T, 192, 192, 96, 2, PLAIN>, 2, 1>(s, p, a);
    return launch_hopper<WgmmaEngine<T, 256, 256, 64, 2, PLAIN>, 2, 1>(s, p, a);
}

Err attention_fwd_hopper(Stream *s, const AttnProblem &p, const AttnForward &a)
{
    if (p.softcap > 0 || p.dropout.threshold)
        return a.q.dtype == BF16 ? fwd_hopper<bf16, false>(s, p, a) : fwd_hopper<f16, false>(s, p, a);
    return a.q.dtype == BF16 ? fwd_hopper<bf16, true>(s, p, a) : fwd_hopper<f16, true>(s, p, a);
}
