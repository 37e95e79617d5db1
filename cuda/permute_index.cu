/*
 * The order in which experts see the rows of tokens (device/ops.def; docs/moe.md); the rows themselves: permute.cu.
 *
 *   permute_index     row[n][k], choice[p], offset: choices ordered by (expert, number), runs of tokens apart
 *   dispatch_offsets  the same offsets for the rows that S ranks send
 *   dispatch_choices  where these rows are, if all ranks' tokens are at hand
 *   choice_groups     which of several groups of experts choices are in
 *   room_limits       how many of its rows for each expert a rank may send, where ranks have room for so many
 *
 * Mapping   permute_index is a counting sort whose order no timing can change. A block takes a contiguous part of
 *           one run of tokens and counts its choices by expert; the counts lie by (expert, run, part), so that their
 *           exclusive sum, by one block, is both where each block's rows of an expert begin and, at part 0, `offset`.
 *           Then each block places its choices: a warp owns a contiguous piece and takes 32 choices at a time, as
 *           the sort in embedding.cu does. dispatch_offsets is the same sum of other counts. All sizes stay in
 *           device memory.
 * Traffic   reads each choice three times and writes it twice, 20 bytes: 65,536 tokens of 2 choices, 3 MB. Short:
 *           three launches and the one block that sums, some 10 us.
 * Needs     at most 12,288 experts; workspace for 4 bytes a count.
 */
#include "kernel.cuh"

/* ---- sums over all that lie before ---- */

constexpr int SCAN_THREADS = 1024;

/* put(i, sum of count(j) over j < i) for i = 0 .. n, by one block. */
template <class Count, class Put> __device__ __forceinline__ void scan_by_block(int64_t n, Count count, Put put)
{
    SHARED(int64_t, part, [SCAN_THREADS / WARP]);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int64_t before = 0; /* of this round */
    for (int64_t base = 0; base <= n; base += SCAN_THREADS) {
        const int64_t i = base + threadIdx.x, mine = i < n ? count(i) : 0;
        int64_t sum = mine;
        for (int d = 1; d < WARP; d *= 2) {
            const int64_t below = __shfl_up_sync(ALL_LANES, sum, d);
            if (lane >= d) sum += below;
        }
        if (lane == WARP - 1) part[warp] = sum;
        __syncthreads();
        int64_t total = 0;
        for (int w = 0; w < SCAN_THREADS / WARP; w++) {
            if (w < warp) sum += part[w];
            total += part[w];
        }
        if (i <= n) put(i, before + sum - mine);
        before += total;
        __syncthreads(); /* part is written again */
    }
}

/* ---- the order of rows ---- */

constexpr int ORDER_THREADS = 256, ORDER_WARPS = ORDER_THREADS / WARP;
constexpr int64_t ORDER_BLOCKS = 256, ORDER_CHOICES_LEAST = 1024, ORDER_SHARED = 48 << 10;

struct Order {
    Rows<const int32_t> index;
    Rows<int32_t> row;
    int32_t *choice;
    int64_t *offset;
    int32_t *count; /* [experts, runs, parts]; then the sums of those before */
    int64_t P;      /* rows of choice: no more are written, whatever came from a rank that was lost */
    RowCount tokens;
    int64_t run, runs, parts, piece; /* piece: choices of a block */
    int K, experts;
};

/* First choice of a block, and the one behind its last; only those of tokens in use. */
struct OrderPart {
    int64_t begin, end;
    __device__ __forceinline__ OrderPart(const Order &o)
    {
        const int64_t r = blockIdx.x / o.parts, all = rows_in_use(o.tokens), last = (r + 1) * o.run;
        const int64_t stop = (last < all ? last : all) * o.K, from = r * o.run * o.K + blockIdx.x % o.parts * o.piece;
        begin = from < stop ? from : stop;
        end = begin + o.piece < stop ? begin + o.piece : stop;
    }
};

/* Below 0: the choice was dropped. */
__device__ __forceinline__ int expert_of(const Order &o, int64_t number)
{
    const int i = static_cast<int>(number), n = i / o.K; /* a choice's number fits 32 bits */
    return o.index.at(n)[i - n * o.K];
}

/* Place of the counts of this block's choices of expert e. */
__device__ __forceinline__ int64_t count_at(const Order &o, int e) { return e * o.runs * o.parts + blockIdx.x; }

__global__ void __launch_bounds__(ORDER_THREADS) permute_count_kernel(Order o)
{
    DYNAMIC_SHARED(int, count);
    const OrderPart p(o);
    for (int e = threadIdx.x; e < o.experts; e += blockDim.x) count[e] = 0;
    __syncthreads();
    for (int64_t i = p.begin + threadIdx.x; i < p.end; i += blockDim.x) {
        const int expert = expert_of(o, i);
        if (expert >= 0) atomicAdd(&count[expert], 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < o.experts; e += blockDim.x) o.count[count_at(o, e)] = count[e];
}

__global__ void __launch_bounds__(SCAN_THREADS) permute_scan_kernel(Order o)
{
    const int64_t n = o.experts * o.runs * o.parts;
    scan_by_block(n, [&](int64_t i) { return static_cast<int64_t>(o.count[i]); },
                  [&](int64_t i, int64_t before) {
                      if (i < n) o.count[i] = static_cast<int32_t>(before);
                      if (i % o.parts == 0) o.offset[i / o.parts] = before;
                  });
}

__global__ void __launch_bounds__(ORDER_THREADS) permute_place_kernel(Order o)
{
    DYNAMIC_SHARED(int, place); /* [warps, experts]: where the warp's next row of the expert goes */
    const OrderPart p(o);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int64_t each = (p.end - p.begin + warps - 1) / warps, from = p.begin + warp * each;
    const int64_t begin = from < p.end ? from : p.end, end = begin + each < p.end ? begin + each : p.end;
    int *mine = place + warp * o.experts;
    for (int e = lane; e < o.experts; e += WARP) mine[e] = 0;
    __syncwarp();
    for (int64_t i = begin + lane; i < end; i += WARP) {
        const int expert = expert_of(o, i);
        if (expert >= 0) atomicAdd(&mine[expert], 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < o.experts; e += blockDim.x) {
        int at = o.count[count_at(o, e)];
        for (int w = 0; w < warps; w++) {
            const int n = place[w * o.experts + e];
            place[w * o.experts + e] = at;
            at += n;
        }
    }
    __syncthreads();
    for (int64_t i = begin; i < end; i += WARP) {
        const int64_t number = i + lane;
        const int expert = number < end ? expert_of(o, number) : -1;
        const unsigned same = __match_any_sync(ALL_LANES, expert), below = same & ((1u << lane) - 1);
        const int to = expert >= 0 ? mine[expert] + __popc(below) : 0;
        __syncwarp();
        if (expert >= 0 && !below) mine[expert] += __popc(same);
        __syncwarp();
        if (number >= end) continue;
        const int i32 = static_cast<int>(number), n = i32 / o.K;
        o.row.at(n)[i32 - n * o.K] = expert >= 0 ? to : -1;
        if (expert >= 0 && to < o.P) o.choice[to] = i32;
    }
}

/* Parts of a run: so many that blocks fill the device, none of few choices. */
static Err order_plan(Order *o, const Stream *s, const permute_index_args *a)
{
    const int64_t X = a->offset.dim[0] - 1, K = a->index.dim[1], choices = a->run * K;
    o->index = rows_of<const int32_t>(a->index), o->row = rows_of<int32_t>(a->row);
    o->choice = data_of<int32_t>(a->choice), o->offset = data_of<int64_t>(a->offset);
    o->count = reinterpret_cast<int32_t *>(s->dev->workspace);
    o->P = a->choice.dim[0], o->tokens = row_count(a->index, a->index);
    o->K = static_cast<int>(K), o->experts = static_cast<int>(a->experts);
    o->run = a->run, o->runs = X / a->experts;
    const int64_t fill = ceil_div(ORDER_BLOCKS, o->runs > 0 ? o->runs : 1);
    const int64_t most = ceil_div(choices, ORDER_CHOICES_LEAST);
    o->piece = ceil_div(choices, most < fill ? most : fill);
    o->parts = ceil_div(choices, o->piece);
    if (a->choice.dim[0] > a->index.dim[0] * K || X % a->experts || a->index.dim[0] > o->runs * a->run)
        return err_set(ERR_SHAPE, "permute_index: %lld tokens, %lld offsets of %lld experts in runs of %lld tokens",
                       static_cast<long long>(a->index.dim[0]), static_cast<long long>(X + 1),
                       static_cast<long long>(a->experts), static_cast<long long>(a->run));
    if (a->experts * 4 > ORDER_SHARED || X * o->parts * 4 > s->dev->workspace_bytes)
        return err_set(ERR_SHAPE, "permute_index: %lld experts in %lld runs are too many",
                       static_cast<long long>(a->experts), static_cast<long long>(o->runs));
    return ERR_OK;
}

extern "C" Err cuda_permute_index(Stream *s, const permute_index_args *a)
{
    Order o = {};
    TRY(order_plan(&o, s, a));
    const int64_t bytes = a->experts * 4, fit = ORDER_SHARED / bytes, warps = fit < ORDER_WARPS ? fit : ORDER_WARPS;
    const unsigned grid = grid_blocks(o.runs * o.parts), block = static_cast<unsigned>(warps * WARP);
    LAUNCH(permute_count_kernel, grid, ORDER_THREADS, bytes, cuda_stream(s), o);
    LAUNCH(permute_scan_kernel, 1, SCAN_THREADS, 0, cuda_stream(s), o);
    LAUNCH(permute_place_kernel, grid, block, warps * bytes, cuda_stream(s), o);
    return ERR_OK;
}

/* ---- offsets of what ranks send ---- */

struct Sent {
    Rows<const int64_t> all; /* a rank a row */
    int64_t *offset;
    int64_t n, ranks, runs, first, most; /* n: offsets but the last; first: expert of this rank */
    __device__ __forceinline__ int64_t limited(int64_t rows) const { return rows < 0 ? 0 : rows < most ? rows : most; }
};

constexpr int CHOICE_THREADS = 128;

__global__ void __launch_bounds__(SCAN_THREADS) dispatch_scan_kernel(Sent t)
{
    scan_by_block(t.n,
                  [&](int64_t i) {
                      const int64_t each = t.ranks * t.runs, expert = i / each, rank = i % each / t.runs;
                      const int64_t *run = t.all.at(rank) + (t.first + expert) * t.runs + i % t.runs;
                      return t.limited(run[1] - run[0]);
                  },
                  [&](int64_t i, int64_t before) { t.offset[i] = t.limited(before); });
}

struct Choices {
    Rows<const int64_t> all;
    Rows<const int32_t> all_choice;
    const int64_t *offset;
    int32_t *choice;
    int64_t ranks, runs, first, P, numbers;
};

/* A block for the rows of one expert from one rank. */
__global__ void __launch_bounds__(CHOICE_THREADS) dispatch_choices_kernel(Choices t)
{
    const int64_t expert = blockIdx.x / t.ranks, rank = blockIdx.x % t.ranks;
    const int64_t *offset = t.offset + blockIdx.x * t.runs;
    const int64_t n = offset[t.runs] - offset[0], begin = t.all.at(rank)[(t.first + expert) * t.runs];
    const int32_t *from = t.all_choice.at(rank) + max(min(begin, t.P - n), int64_t{ 0 });
    for (int64_t i = threadIdx.x; i < n && i < t.P; i += CHOICE_THREADS) {
        const int64_t choice = max(min(int64_t{ from[i] }, t.numbers - 1), int64_t{ 0 });
        t.choice[offset[0] + i] = static_cast<int32_t>(rank * t.numbers + choice);
    }
}

extern "C" Err cuda_dispatch_choices(Stream *s, const dispatch_choices_args *a)
{
    const int64_t ranks = a->all.dim[0], X = a->offset.dim[0] - 1;
    const Choices t = { rows_of<const int64_t>(a->all), rows_of<const int32_t>(a->all_choice),
                        data_of<const int64_t>(a->offset), data_of<int32_t>(a->choice), ranks, X / (a->own * ranks),
                        a->first, a->all_choice.dim[1], a->numbers };
    LAUNCH(dispatch_choices_kernel, grid_blocks(a->own * ranks), CHOICE_THREADS, 0, cuda_stream(s), t);
    return ERR_OK;
}

extern "C" Err cuda_dispatch_offsets(Stream *s, const dispatch_offsets_args *a)
{
    const int64_t ranks = a->all.dim[0], X = a->offset.dim[0] - 1;
    const Sent t = { rows_of<const int64_t>(a->all), data_of<int64_t>(a->offset), X, ranks, X / (a->own * ranks),
                     a->first, a->most };
    LAUNCH(dispatch_scan_kernel, 1, SCAN_THREADS, 0, cuda_stream(s), t);
    return ERR_OK;
}

/* ---- groups of experts ---- */

struct Groups {
    Rows<int32_t> group;
    Rows<const int32_t> index, row; /* row.data: or NULL */
    int64_t R, N, first, own, count;
    int K;
    __device__ __forceinline__ int of(int64_t n, int k) const
    {
        const int expert = index.at(n)[k];
        if (expert < 0 || expert < first || (row.data && row.at(n)[k] < 0)) return -1;
        const int64_t g = (expert - first) / own;
        return g < count ? static_cast<int>(g) : -1;
    }
};

constexpr int GROUP_THREADS = 256;

/* A thread a choice, which looks at those before it. */
__global__ void __launch_bounds__(GROUP_THREADS) choice_groups_kernel(Groups a)
{
    const int64_t i = blockIdx.x * static_cast<int64_t>(GROUP_THREADS) + threadIdx.x, n = i / a.K;
    const int k = static_cast<int>(i - n * a.K);
    if (n >= a.R) return;
    int found = n < a.N ? a.of(n, k) : -1;
    for (int j = 0; j < k && found >= 0; j++)
        if (a.of(n, j) == found) found = -1;
    a.group.at(n)[k] = found;
}

extern "C" Err cuda_choice_groups(Stream *s, const choice_groups_args *a)
{
    const Groups g = { rows_of<int32_t>(a->group),
                       rows_of<const int32_t>(a->index),
                       rows_of<const int32_t>(a->row),
                       a->group.dim[0],
                       a->index.dim[0],
                       a->first,
                       a->own,
                       a->count,
                       static_cast<int>(a->index.dim[1]) };
    if (g.R < g.N)
        return err_set(ERR_SHAPE, "choice_groups: %lld tokens, room for %lld", static_cast<long long>(g.N),
                       static_cast<long long>(g.R));
    LAUNCH(choice_groups_kernel, grid_blocks(ceil_div(g.R * g.K, GROUP_THREADS)), GROUP_THREADS, 0, cuda_stream(s), g);
    return ERR_OK;
}

/* ---- where ranks have room for so many rows ---- */

struct Room {
    Rows<const int64_t> all; /* a rank a row */
    int64_t *limit;
    int32_t *full; /* or NULL */
    int64_t room, ranks, own; /* own: experts of a rank */
    int rank;
    /* Piece i of the receiver's: rows of rank i % ranks for its expert i / ranks. */
    __device__ __forceinline__ int64_t rows(int64_t receiver, int64_t i) const
    {
        const int64_t *at = all.at(i % ranks) + receiver * own + i / ranks;
        return at[1] - at[0];
    }
};

/* Sum over a block; every thread gets it. */
__device__ __forceinline__ int64_t sum_by_block(int64_t x, int64_t *part)
{
    for (int d = WARP / 2; d > 0; d /= 2) x += __shfl_xor_sync(ALL_LANES, x, d);
    if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = x;
    __syncthreads();
    int64_t sum = 0;
    for (int w = 0; w < SCAN_THREADS / WARP; w++) sum += part[w];
    __syncthreads();
    return sum;
}

/* A block a receiver. The cut is found bit by bit. */
__global__ void __launch_bounds__(SCAN_THREADS) room_limits_kernel(Room r)
{
    SHARED(int64_t, part, [SCAN_THREADS / WARP]);
    const int64_t receiver = blockIdx.x, pieces = r.own * r.ranks;
    const auto cut_to = [&](int64_t most) {
        int64_t mine = 0;
        for (int64_t i = threadIdx.x; i < pieces; i += SCAN_THREADS) {
            const int64_t rows = r.rows(receiver, i);
            mine += rows < most ? rows : most;
        }
        return sum_by_block(mine, part);
    };
    int64_t most = 0;
    for (int64_t bit = int64_t{1} << 31; bit; bit >>= 1)
        if (cut_to(most + bit) <= r.room) most += bit;
    const int64_t left = r.room - cut_to(most);
    scan_by_block(pieces, [&](int64_t i) { return static_cast<int64_t>(r.rows(receiver, i) > most); },
                  [&](int64_t i, int64_t before) {
                      if (i == pieces) return;
                      const int64_t rows = r.rows(receiver, i), more = rows > most && before < left;
                      if (i % r.ranks == r.rank)
                          r.limit[receiver * r.own + i / r.ranks] = (rows < most ? rows : most) + more;
                      if (rows > most + more && r.full) atomicExch(r.full, 1);
                  });
}

extern "C" Err cuda_room_limits(Stream *s, const room_limits_args *a)
{
    const int64_t E = a->limit.dim[0], ranks = a->all.dim[0], own = a->own;
    const Room r = { rows_of<const int64_t>(a->all), data_of<int64_t>(a->limit), data_of<int32_t>(a->full), a->room,
                     ranks, own, a->rank };
    if (own < 1 || E % own || a->all.dim[1] != E + 1)
        return err_set(ERR_SHAPE, "room_limits: %lld offsets of %lld experts on %lld ranks",
                       static_cast<long long>(a->all.dim[1]), static_cast<long long>(E),
                       static_cast<long long>(ranks));
    LAUNCH(room_limits_kernel, grid_blocks(E / own), SCAN_THREADS, 0, cuda_stream(s), r);
    return ERR_OK;
}
