/*
 * Embedding: table lookup and its gradient.
 *
 *   embedding_fwd   y[n] = table[index[n] - first] (+ y[n]), 0 for indices of other ranks
 *   embedding_grad  dtable[index[n] - first] += dy[n]
 *
 * Mapping   fwd: two packs of 16 bytes a thread (PackGrid of kernel.cuh).
 *           grad: tokens are sorted by table row, then summed. The sort is a stable radix sort of (row, token)
 *           by digits of 9 bits: two passes below 262,144 rows. In a pass each of at most 64 blocks counts its
 *           digits, then places its tokens: a warp owns a contiguous range and takes 32 tokens at a time, so
 *           that order is kept without waiting for anyone. Then a warp sums 64 sorted tokens (a window) over 32
 *           packs of columns, in ascending token order, and adds each table row that lies wholly in the window;
 *           what a row shares with other windows goes to the workspace, and the window where the row begins
 *           adds these parts in ascending order. So a frequent token is summed by as many warps as it fills
 *           windows, every table row is written by one warp, and no float is added atomically.
 * Traffic   bf16, 65,536 tokens of width 768, 10,000 different ones: fwd reads and writes 2 bytes an element,
 *           0.20 GB, 47 us at 4.3 TB/s. grad reads dy (0.10 GB), reads and writes the rows met (0.06 GB), 37 us;
 *           the sort moves 24 bytes a token and pass, 3 MB, and costs its launches and latency, some 25 us.
 *           One FLOP an element: bound by memory.
 * Needs     16-byte aligned rows for full speed, else element by element; an F32 accumulator. The workspace
 *           holds 16 + D / 8 bytes a token; more tokens than fit are taken in several ascending rounds.
 */
#include "kernel.cuh"

/* Row of the local table for this index; -1: another rank's, or none. */
__device__ __forceinline__ int64_t table_row(int32_t index, int64_t first, int64_t V)
{
    const int64_t row = index - first;
    return index >= 0 && row >= 0 && row < V ? row : -1;
}

/* ---- lookup ---- */

struct Lookup {
    const int32_t *index;
    int64_t first, V;
    bool add;
};

/* Adding +0 makes -0 +0, as the sum over ranks does. */
template <class T, class N, bool WIDE>
__global__ void __launch_bounds__(PACK_THREADS)
embedding_fwd_kernel(Rows<T> y, Rows<const N> table, Lookup k, PackGrid g)
{
    const int64_t rows = rows_in_use(g.rows);
    Pack<T> from[PACK_UNROLL], old[PACK_UNROLL];
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<T>::COUNT>(g, rows, u);
        if (!p.used) continue;
        const int64_t row = table_row(k.index[p.row], k.first, k.V);
        for (int i = 0; i < Pack<T>::COUNT; i++) from[u].v[i] = old[u].v[i] = T(0.0f);
        if (row >= 0) from[u] = load_as<T, WIDE>(table.at(row) + p.column, p.left);
        if (k.add) old[u] = load_pack<T, WIDE>(y.at(p.row) + p.column, p.left);
    }
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<T>::COUNT>(g, rows, u);
        if (!p.used) continue;
        for (int i = 0; i < Pack<T>::COUNT; i++)
            from[u].v[i] = from_float<T>(to_float(old[u].v[i]) + to_float(from[u].v[i]));
        store_pack<T, WIDE>(y.at(p.row) + p.column, from[u], p.left);
    }
}

template <class T, class N> static void launch_lookup(Stream *s, const embedding_fwd_args *a)
{
    const PackGrid g = pack_grid(row_count(a->y, a->index), 1, a->y.dim[1], Pack<T>::COUNT);
    const Lookup k = { data_of<const int32_t>(a->index), a->first, a->table.dim[0], a->add != 0 };
    const Rows<T> y = rows_of<T>(a->y);
    const Rows<const N> table = rows_of<const N>(a->table);
    if (rows_aligned(a->y) && rows_aligned(a->table))
        LAUNCH((embedding_fwd_kernel<T, N, true>), g.grid, g.block, 0, cuda_stream(s), y, table, k, g);
    else LAUNCH((embedding_fwd_kernel<T, N, false>), g.grid, g.block, 0, cuda_stream(s), y, table, k, g);
}

extern "C" Err cuda_embedding_fwd(Stream *s, const embedding_fwd_args *a)
{
    DISPATCH_STREAM(a->y.dtype, a->table.dtype, (launch_lookup<T, N>(s, a)));
    return ERR_OK;
}

/* ---- stable sort of tokens by table row ---- */

constexpr int DIGIT_BITS = 9, DIGITS = 1 << DIGIT_BITS;
constexpr int SORT_THREADS = DIGITS, SORT_WARPS = SORT_THREADS / WARP, SORT_BLOCKS_MOST = 64;

struct SortPass {
    const int32_t *key_in, *token_in; /* keys: table rows; V for tokens that have none here */
    int32_t *key_out, *token_out;
    int32_t *count; /* [blocks, DIGITS] */
    int64_t tokens; /* of this round */
    int warp_tokens, low_bit;
};

__device__ __forceinline__ int sort_digit(const SortPass &p, int64_t i)
{
    return p.key_in[i] >> p.low_bit & (DIGITS - 1);
}

/* First token of a warp of this block, at most p.tokens. */
__device__ __forceinline__ int64_t sort_begin(const SortPass &p, int warp)
{
    const int64_t i = (blockIdx.x * static_cast<int64_t>(SORT_WARPS) + warp) * p.warp_tokens;
    return i < p.tokens ? i : p.tokens;
}

__global__ void __launch_bounds__(SORT_THREADS)
embedding_keys_kernel(int32_t *key, int32_t *token, Lookup k, int64_t begin, int64_t tokens, RowCount count)
{
    const int64_t i = blockIdx.x * static_cast<int64_t>(SORT_THREADS) + threadIdx.x, n = begin + i;
    if (i >= tokens) return;
    const int64_t row = n < rows_in_use(count) ? table_row(k.index[n], k.first, k.V) : -1;
    key[i] = static_cast<int32_t>(row < 0 ? k.V : row);
    token[i] = static_cast<int32_t>(n);
}

__global__ void __launch_bounds__(SORT_THREADS) embedding_count_kernel(SortPass p)
{
    SHARED(int, count, [DIGITS]);
    count[threadIdx.x] = 0;
    __syncthreads();
    const int64_t end = sort_begin(p, SORT_WARPS);
    for (int64_t i = sort_begin(p, 0) + threadIdx.x; i < end; i += SORT_THREADS) atomicAdd(&count[sort_digit(p, i)], 1);
    __syncthreads();
    p.count[blockIdx.x * DIGITS + threadIdx.x] = count[threadIdx.x];
}

/* Sum over the threads before this one. `part`: shared memory for SORT_WARPS numbers. */
__device__ __forceinline__ int sum_before(int x, int *part)
{
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int sum = x;
    for (int d = 1; d < WARP; d *= 2) {
        const int below = __shfl_up_sync(ALL_LANES, sum, d);
        if (lane >= d) sum += below;
    }
    if (lane == WARP - 1) part[warp] = sum;
    __syncthreads();
    int before = sum - x;
    for (int w = 0; w < warp; w++) before += part[w];
    return before;
}

/* Thread d turns the warps' counts of digit d into the places where each warp's first such token goes. */
__device__ __forceinline__ void sort_places(const SortPass &p, int (*place)[DIGITS], int *part)
{
    const int d = threadIdx.x;
    int total = 0, earlier = 0;
    for (unsigned b = 0; b < gridDim.x; b++) {
        const int n = p.count[b * DIGITS + d];
        if (b < blockIdx.x) earlier += n;
        total += n;
    }
    int at = sum_before(total, part) + earlier;
    for (int w = 0; w < SORT_WARPS; w++) {
        const int n = place[w][d];
        place[w][d] = at;
        at += n;
    }
}

__global__ void __launch_bounds__(SORT_THREADS) embedding_place_kernel(SortPass p)
{
    SHARED(int, place, [SORT_WARPS][DIGITS]);
    SHARED(int, part, [SORT_WARPS]);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t begin = sort_begin(p, warp), end = sort_begin(p, warp + 1);
    int *mine = place[warp];
    for (int d = lane; d < DIGITS; d += WARP) mine[d] = 0;
    __syncwarp();
    for (int64_t i = begin + lane; i < end; i += WARP) atomicAdd(&mine[sort_digit(p, i)], 1);
    __syncthreads();
    sort_places(p, place, part);
    __syncthreads();
    for (int64_t i = begin; i < end; i += WARP) {
        const int64_t from = i + lane;
        const int digit = from < end ? sort_digit(p, from) : -1;
        const unsigned same = __match_any_sync(ALL_LANES, digit), below = same & ((1u << lane) - 1);
        const int to = digit >= 0 ? mine[digit] + __popc(below) : 0;
        __syncwarp();
        if (digit >= 0 && !below) mine[digit] += __popc(same);
        __syncwarp();
        if (digit < 0) continue;
        p.key_out[to] = p.key_in[from];
        p.token_out[to] = p.token_in[from];
    }
}

/* ---- sums over sorted tokens ---- */

constexpr int WINDOW = 64, SUM_WARPS = 4, SUM_UNROLL = 4, PART_UNROLL = 8;

template <class T> struct SumArgs {
    Rows<const T> dy;
    Rows<float> dtable;
    const int32_t *key, *token; /* sorted */
    float *part;                /* [windows, 2, part_width]: of the row that began before, of the row that goes on */
    int64_t tokens, windows, part_width, D, none;
    int chunks; /* of columns */
};

/* A warp's share: one window, 32 packs of columns. */
template <class T> struct SumPlace {
    int64_t window, begin, end, column, left;
    bool used; /* the warp has a window; a lane of it may still have no column: left <= 0 */
    __device__ __forceinline__ SumPlace(const SumArgs<T> &a)
    {
        const int64_t unit = blockIdx.x * static_cast<int64_t>(SUM_WARPS) + threadIdx.x / WARP;
        window = unit / a.chunks;
        column = (unit % a.chunks * WARP + threadIdx.x % WARP) * Pack<T>::COUNT;
        left = a.D - column;
        begin = window * WINDOW;
        end = begin + WINDOW < a.tokens ? begin + WINDOW : a.tokens;
        used = window < a.windows;
    }
    __device__ __forceinline__ bool began_before(const SumArgs<T> &a, int32_t key) const
    {
        return begin > 0 && a.key[begin - 1] == key;
    }
    __device__ __forceinline__ bool goes_on(const SumArgs<T> &a, int32_t key) const
    {
        return end < a.tokens && a.key[end] == key;
    }
    __device__ __forceinline__ float *part(const SumArgs<T> &a, int64_t w, int which) const
    {
        return a.part + (w * 2 + which) * a.part_width + column;
    }
};

template <int COUNT> __device__ __forceinline__ void load_floats(float *x, const float *p)
{
    for (int i = 0; i < COUNT; i += 4) {
        const Pack<float> q = load16(p + i);
        for (int k = 0; k < 4; k++) x[i + k] = q.v[k];
    }
}

template <int COUNT> __device__ __forceinline__ void store_floats(float *p, const float *x)
{
    for (int i = 0; i < COUNT; i += 4) {
        const Pack<float> q = { { x[i], x[i + 1], x[i + 2], x[i + 3] } };
        store16_global(p + i, q);
    }
}

template <class T, bool WIDE>
__device__ __forceinline__ void add_to_table(const SumArgs<T> &a, int32_t row, int64_t column, const float *sum)
{
    constexpr int COUNT = Pack<T>::COUNT;
    float *to = a.dtable.at(row) + column;
    if constexpr (WIDE) {
        float old[COUNT];
        load_floats<COUNT>(old, to);
        for (int i = 0; i < COUNT; i++) old[i] += sum[i];
        store_floats<COUNT>(to, old);
    } else {
        for (int i = 0; i < COUNT; i++)
            if (column + i < a.D) to[i] += sum[i];
    }
}

/* The sum over the tokens of `key` in this window goes where it belongs; `last`: they end the window. */
template <class T, bool WIDE>
__device__ __forceinline__ void put_sum(const SumArgs<T> &a, const SumPlace<T> &p, int32_t key, bool first, bool last,
                                        const float *sum)
{
    if (key == a.none || p.left <= 0) return;
    if (first && p.began_before(a, key)) store_floats<Pack<T>::COUNT>(p.part(a, p.window, 0), sum);
    else if (last && p.goes_on(a, key)) store_floats<Pack<T>::COUNT>(p.part(a, p.window, 1), sum);
    else add_to_table<T, WIDE>(a, key, p.column, sum);
}

template <class T, bool WIDE> __global__ void __launch_bounds__(SUM_WARPS *WARP) embedding_window_kernel(SumArgs<T> a)
{
    constexpr int COUNT = Pack<T>::COUNT;
    const SumPlace<T> p(a);
    if (!p.used) return;
    int32_t now = a.key[p.begin];
    bool first = true;
    float sum[COUNT] = {};
    for (int64_t i = p.begin; i < p.end; i += SUM_UNROLL) {
        Pack<T> dy[SUM_UNROLL];
        int32_t key[SUM_UNROLL];
        for (int u = 0; u < SUM_UNROLL; u++) {
            key[u] = i + u < p.end ? a.key[i + u] : now;
            if (i + u < p.end && key[u] != a.none && p.left > 0)
                dy[u] = load_pack<T, WIDE>(a.dy.at(a.token[i + u]) + p.column, p.left);
            else
                for (int k = 0; k < COUNT; k++) dy[u].v[k] = T(0.0f);
        }
        for (int u = 0; u < SUM_UNROLL; u++) {
            if (i + u >= p.end) break;
            if (key[u] != now) {
                put_sum<T, WIDE>(a, p, now, first, false, sum);
                for (int k = 0; k < COUNT; k++) sum[k] = 0.0f;
                now = key[u], first = false;
            }
            for (int k = 0; k < COUNT; k++) sum[k] += to_float(dy[u].v[k]);
        }
    }
    put_sum<T, WIDE>(a, p, now, first, true, sum);
}

/* First window after w that does not begin with `key`; the lanes look at 32 at a time. */
template <class T> __device__ __forceinline__ int64_t windows_end(const SumArgs<T> &a, int64_t w, int32_t key)
{
    for (w++;; w += WARP) {
        const int64_t mine = w + threadIdx.x % WARP;
        const unsigned others = __ballot_sync(ALL_LANES, mine >= a.windows || a.key[mine * WINDOW] != key);
        if (others) return w + __ffs(others) - 1;
    }
}

/* Rows that go beyond the window they begin in. */
template <class T, bool WIDE> __global__ void __launch_bounds__(SUM_WARPS *WARP) embedding_parts_kernel(SumArgs<T> a)
{
    constexpr int COUNT = Pack<T>::COUNT;
    const SumPlace<T> p(a);
    if (!p.used) return;
    const int32_t key = a.key[p.end - 1];
    if (key == a.none || !p.goes_on(a, key) || p.began_before(a, key)) return;
    const int64_t end = windows_end(a, p.window, key);
    if (p.left <= 0) return;
    float sum[COUNT];
    load_floats<COUNT>(sum, p.part(a, p.window, 1));
    for (int64_t w = p.window + 1; w < end; w += PART_UNROLL) {
        float x[PART_UNROLL][COUNT];
        for (int u = 0; u < PART_UNROLL; u++)
            if (w + u < end) load_floats<COUNT>(x[u], p.part(a, w + u, 0));
        for (int u = 0; u < PART_UNROLL; u++)
            for (int k = 0; k < COUNT; k++)
                if (w + u < end) sum[k] += x[u][k];
    }
    add_to_table<T, WIDE>(a, key, p.column, sum);
}

/* ---- rounds ---- */

/* How the workspace is used by rounds of at most `tokens` tokens. */
struct GradPlan {
    int64_t tokens, part_width;
    int32_t *key[2], *token[2], *count;
    float *part;
    int passes;
};

static Err grad_plan(GradPlan *g, const Stream *s, const embedding_grad_args *a)
{
    const int64_t N = a->dy.dim[0], counts = sizeof(int32_t) * SORT_BLOCKS_MOST * DIGITS;
    g->part_width = ceil_div(a->dy.dim[1], 8) * 8;
    const int64_t window_bytes = 2 * g->part_width * 4 + 4 * WINDOW * 4, room = s->dev->workspace_bytes - counts;
    const int64_t all = ceil_div(N, WINDOW), fit = room / window_bytes, windows = all < fit ? all : fit;
    if (fit < 1)
        return err_set(ERR_SHAPE, "embedding_grad: rows of %lld are too long for the workspace",
                       static_cast<long long>(g->part_width));
    g->tokens = windows * WINDOW;
    g->part = reinterpret_cast<float *>(s->dev->workspace);
    int32_t *next = reinterpret_cast<int32_t *>(g->part + windows * 2 * g->part_width);
    for (int i = 0; i < 2; i++) {
        g->key[i] = next, next += g->tokens;
        g->token[i] = next, next += g->tokens;
    }
    g->count = next;
    g->passes = 1;
    while (a->dtable.dim[0] >> g->passes * DIGIT_BITS) g->passes++; /* keys are 0 to V */
    return ERR_OK;
}

/* Sorts the n tokens from `begin` on; returns which of the two arrays holds the result. */
static int launch_sort(Stream *s, const embedding_grad_args *a, const GradPlan &g, int64_t begin, int64_t n)
{
    const Lookup k = { data_of<const int32_t>(a->index), a->first, a->dtable.dim[0], true };
    const int64_t most = ceil_div(n, SORT_THREADS), blocks = most < SORT_BLOCKS_MOST ? most : SORT_BLOCKS_MOST;
    const int64_t warp_tokens = ceil_div(n, blocks * SORT_WARPS * WARP) * WARP;
    LAUNCH(embedding_keys_kernel, grid_blocks(most), SORT_THREADS, 0, cuda_stream(s), g.key[0], g.token[0], k, begin, n,
           row_count(a->dy, a->index));
    for (int i = 0; i < g.passes; i++) {
        const int from = i % 2, to = 1 - from;
        const SortPass p = { g.key[from], g.token[from], g.key[to], g.token[to], g.count, n,
                             static_cast<int>(warp_tokens), i * DIGIT_BITS };
        LAUNCH(embedding_count_kernel, grid_blocks(blocks), SORT_THREADS, 0, cuda_stream(s), p);
        LAUNCH(embedding_place_kernel, grid_blocks(blocks), SORT_THREADS, 0, cuda_stream(s), p);
    }
    return g.passes % 2;
}

template <class T>
static void launch_sums(Stream *s, const embedding_grad_args *a, const GradPlan &g, int sorted, int64_t n)
{
    const int64_t D = a->dy.dim[1], windows = ceil_div(n, WINDOW), chunks = ceil_div(D, WARP * Pack<T>::COUNT);
    const SumArgs<T> args = { rows_of<const T>(a->dy), rows_of<float>(a->dtable), g.key[sorted], g.token[sorted],
                              g.part, n, windows, g.part_width, D, a->dtable.dim[0], static_cast<int>(chunks) };
    const unsigned grid = grid_blocks(ceil_div(windows * chunks, SUM_WARPS)), block = SUM_WARPS * WARP;
    if (rows_aligned(a->dy) && rows_aligned(a->dtable)) {
        LAUNCH((embedding_window_kernel<T, true>), grid, block, 0, cuda_stream(s), args);
        LAUNCH((embedding_parts_kernel<T, true>), grid, block, 0, cuda_stream(s), args);
    } else {
        LAUNCH((embedding_window_kernel<T, false>), grid, block, 0, cuda_stream(s), args);
        LAUNCH((embedding_parts_kernel<T, false>), grid, block, 0, cuda_stream(s), args);
    }
}

extern "C" Err cuda_embedding_grad(Stream *s, const embedding_grad_args *a)
{
    GradPlan g = {};
    const int64_t N = a->dy.dim[0];
    if (a->dtable.dtype != F32)
        return err_set(ERR_SHAPE, "embedding_grad on cuda has no fixed point: dtable is f32");
    TRY(grad_plan(&g, s, a));
    for (int64_t begin = 0; begin < N; begin += g.tokens) {
        const int64_t n = begin + g.tokens < N ? g.tokens : N - begin;
        const int sorted = launch_sort(s, a, g, begin, n);
        DISPATCH(a->dy.dtype, launch_sums<T>(s, a, g, sorted, n));
    }
    return ERR_OK;
}
